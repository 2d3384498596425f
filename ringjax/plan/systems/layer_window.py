"""Sliding window over a model's blocks that stream from disk while it runs.

A device runs attention and feedforward in turn, each followed by an all-reduce,
and holds at most `window` blocks. A loader fetches the next block as soon as
there is room; a block is released when the next one begins, which is when its
all-reduce is done. The pass is repeated for each token.

With t the seconds of a block with its all-reduce and tau those of its load, the
device never waits in the steady state if and only if for each block j, and
each i up to it,

  tau_i + ... + tau_j <= t_{i - w + 1} + ... + t_{j - 1}                (steady)

as the load of i begins when block i - w is released. Two windows have names in
the paper, and a retained block has no load:

  tight  w = 2   t_attn + t_ar >= tau_ffn and t_ffn + t_ar >= tau_attn
  loose  w >= 3  t_attn + t_ffn + 2 t_ar >= tau_attn + tau_ffn

`simulate` runs the same on the event simulator, for devices with unequal shares
that wait for each other in each all-reduce.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), sections 3.3 and appendix.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from ringjax.checks import boolean, number, positive_int
from ringjax.errors import OptionError
from ringjax.plan import files
from ringjax.plan.events import Op, Simulator, Span

# Relative rounding error of sums of seconds.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowTimes:
  """Seconds of attention and feedforward blocks.

  Attributes:
    attention: Seconds to compute an attention block.
    feedforward: Seconds to compute a feedforward block.
    reduce: Seconds of the all-reduce after each block.
    load_attention: Seconds to load an attention block.
    load_feedforward: Seconds to load a feedforward block.
  """

  attention: int | float
  feedforward: int | float
  reduce: int | float
  load_attention: int | float
  load_feedforward: int | float

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowBlock:
  """A part of a model that is loaded and computed at once.

  Attributes:
    name: Name for reports.
    nbytes: Bytes of its weights.
    load_s: Seconds to load it.
    step_s: Seconds to compute it for a token.
    first_s: Seconds to compute it for the prompt; None for `step_s`.
    retained: Whether it stays; it is then loaded once and outside the window.
  """

  name: str
  nbytes: int | float
  load_s: int | float
  step_s: int | float
  first_s: int | float | None = None
  retained: bool = False

  def __post_init__(self) -> None:
    for name in ("nbytes", "load_s", "step_s"):
      number(name, getattr(self, name), least=0)
    if self.first_s is not None:
      number("first_s", self.first_s, least=0)
    boolean("retained", self.retained)

  def compute_s(self, number_of_pass: int) -> float:
    """Seconds in a pass, of which the first one is the prompt's."""
    if number_of_pass or self.first_s is None:
      return float(self.step_s)
    return float(self.first_s)


# ---------------------------------------------------------------------------
# Conditions for a device that never waits
# ---------------------------------------------------------------------------


def tight(times: WindowTimes) -> bool:
  """Whether the block before hides each load."""
  return bool(
    _at_least(times.attention + times.reduce, times.load_feedforward)
    and _at_least(times.feedforward + times.reduce, times.load_attention)
  )


def loose(
  times: WindowTimes, layers: int, retain_every: int | None = None
) -> bool:
  """Whether loads keep up over the layers, by the paper's condition.

  A layer's loads fit its time, and from a start at an attention block, or at a
  feedforward, no later block of the other kind comes too late. With
  `retain_every` = T one feedforward in T layers has no load, and it is enough
  that T layers' loads fit.

  Args:
    times: Times of the blocks.
    layers: L, number of layers.
    retain_every: T, or None.
  """
  positive_int("layers", layers)
  if retain_every is not None:
    positive_int("retain_every", retain_every)
  t = times
  loads = lambda count: count - (count // retain_every if retain_every else 0)
  period = retain_every or 1
  layer_s = t.attention + t.feedforward + 2 * t.reduce
  need = period * t.load_attention + loads(period) * t.load_feedforward
  if not _at_least(period * layer_s, need):
    return False
  counts = range(1, layers + 1)
  from_attention = all(
    _at_least(
      n * t.attention + (n - 1) * t.feedforward + (2 * n - 1) * t.reduce,
      loads(n) * t.load_feedforward + (n - 1) * t.load_attention,
    )
    for n in counts
  )
  from_feedforward = all(
    _at_least(
      n * t.feedforward + (n - 1) * t.attention + (2 * n - 1) * t.reduce,
      n * t.load_attention + loads(n - 1) * t.load_feedforward,
    )
    for n in counts
  )
  return from_attention or from_feedforward


def steady(
  steps: Sequence[int | float], loads: Sequence[int | float], window: int
) -> bool:
  """Whether a device that repeats its blocks for ever stops waiting.

  Args:
    steps: Seconds of each block of a pass with its all-reduce.
    loads: Seconds to load each block; 0 if it is retained outside the window.
    window: Number of blocks that the device holds, without retained ones.
  """
  positive_int("window", window)
  if len(steps) != len(loads):
    raise OptionError(
      "loads",
      f"{len(loads)}",
      f"{len(steps)}, one of each block",
      "pass as many loads as steps",
    )
  # Blocks with a load, and the start of each in a pass without waits.
  starts = [0.0, *itertools.accumulate(map(float, steps))]
  pass_s = starts.pop() if steps else 0.0
  streamed = [i for i, load in enumerate(loads) if load > 0]
  if not streamed:
    return True
  if not _at_least(pass_s, sum(loads)):
    return False
  count = len(streamed)
  ends = [starts[i] + float(steps[i]) for i in streamed]
  # Begin and end of the n-th streamed block, counted over all passes.
  begin = lambda n: starts[streamed[n % count]] + (n // count) * pass_s
  end = lambda n: ends[n % count] + (n // count) * pass_s
  for first in range(count):
    loading = end(first - window)
    for n in range(first, first + count):
      loading += float(loads[streamed[n % count]])
      if not _at_least(begin(n), loading):
        return False
  return True


def least_window(
  steps: Sequence[int | float], loads: Sequence[int | float]
) -> int | None:
  """Smallest window that is steady, or None."""
  for window in range(1, len(steps) + 1):
    if steady(steps, loads, window):
      return window
  return None


def _at_least(actual: int | float, required: int | float) -> bool:
  return bool(actual >= required - _ROUNDING * max(abs(actual), abs(required)))


# ---------------------------------------------------------------------------
# Simulation
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowRun:
  """Times and peaks of a simulated run.

  Attributes:
    first_s: Seconds until the first token.
    token_s: Mean seconds of a pass in the second half of the passes.
    waits_s: Seconds that each device waits for loads in that half.
    peak_blocks: Maximum blocks that each device held, including retained ones.
    peak_bytes: Maximum bytes that each device held.
    seconds: Duration of the whole run.
  """

  first_s: float
  token_s: float
  waits_s: tuple[float, ...]
  peak_blocks: tuple[int, ...]
  peak_bytes: tuple[float, ...]
  seconds: float

  @property
  def steady(self) -> bool:
    """Whether no device waits for loads in the second half of the run."""
    return all(s <= _ROUNDING * self.seconds for s in self.waits_s)

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    return files.record(self, "steady")


def simulate(
  devices: Sequence[Sequence[WindowBlock]],
  *,
  window: int,
  passes: int,
  reduce_s: Sequence[int | float],
  first_reduce_s: Sequence[int | float] | None = None,
) -> WindowRun:
  """Simulate all devices' blocks for some passes.

  Args:
    devices: Blocks of each device in order, as many of each; a device without
      a part in a block has one of 0 bytes and 0 seconds.
    window: Number of blocks that a device holds.
    passes: Number of tokens, the first of which follows the prompt.
    reduce_s: Seconds of the all-reduce after each block.
    first_reduce_s: Seconds of the all-reduces for the prompt; default:
      `reduce_s`.

  Raises:
    OptionError: If devices have unequal numbers of blocks, or values are out
      of range.
  """
  positive_int("window", window)
  positive_int("passes", passes)
  counts = {len(reduce_s), *(len(blocks) for blocks in devices)}
  if len(counts) != 1 or 0 in counts or not devices:
    raise OptionError(
      "devices",
      f"blocks and all-reduces of {sorted(counts)}",
      "the same number of blocks for each device and of all-reduces",
      "add blocks of 0 bytes and seconds where a device has none",
    )
  sim = Simulator()
  pools = [sim.pool(f"room {d}", window) for d in range(len(devices))]
  cores = [sim.device(f"core {d}") for d in range(len(devices))]
  loaders = [sim.device(f"loader {d}") for d in range(len(devices))]
  last_load: list[list[Op]] = [[] for _ in devices]
  loads: dict[tuple[int, int, int], Op] = {}
  steps: dict[tuple[int, int, int], Op] = {}
  reduces: dict[tuple[int, int], Op] = {}
  last_reduce: list[Op] = []
  for number_of_pass in range(passes):
    sums = reduce_s
    if not number_of_pass and first_reduce_s is not None:
      sums = first_reduce_s
    for i, reduce in enumerate(sums):
      block_steps = []
      give = {}
      for d, blocks in enumerate(devices):
        block = blocks[i]
        needs = list(last_reduce)
        streams = block.nbytes > 0 or block.load_s > 0
        if streams and not (block.retained and number_of_pass):
          windowed = not block.retained
          load = sim.op(
            f"load {block.name}",
            loaders[d],
            block.load_s,
            after=last_load[d],
            take={pools[d]: 1} if windowed else None,
          )
          last_load[d] = [load]
          loads[number_of_pass, i, d] = load
          needs.append(load)
          if windowed:
            give[pools[d]] = 1
        step = sim.op(
          block.name, cores[d], block.compute_s(number_of_pass), after=needs
        )
        steps[number_of_pass, i, d] = step
        block_steps.append(step)
      reduces[number_of_pass, i] = sim.op(
        "all-reduce", None, reduce, after=block_steps, give=give
      )
      last_reduce = [reduces[number_of_pass, i]]
  timeline = sim.run()
  reduce_end_s = lambda key: float(timeline[reduces[key]].done_s)
  final = len(reduce_s) - 1
  half = passes // 2
  waits = [0.0] * len(devices)
  for n, i in itertools.product(range(half, passes), range(final + 1)):
    key = (n, i - 1) if i else (n - 1, final)
    free_s = reduce_end_s(key) if key in reduces else 0.0
    for d in range(len(devices)):
      waits[d] += float(timeline[steps[n, i, d]].start_s) - free_s
  peaks = [
    _peak(devices[d], d, loads, reduces, timeline.__getitem__)
    for d in range(len(devices))
  ]
  start = reduce_end_s((half - 1, final)) if half else 0.0
  return WindowRun(
    first_s=reduce_end_s((0, final)),
    token_s=(reduce_end_s((passes - 1, final)) - start) / (passes - half),
    waits_s=tuple(waits),
    peak_blocks=tuple(blocks for blocks, _ in peaks),
    peak_bytes=tuple(nbytes for _, nbytes in peaks),
    seconds=float(timeline.finish_s),
  )


def _peak(
  blocks: Sequence[WindowBlock],
  device: int,
  loads: Any,
  reduces: Any,
  span: Any,
) -> tuple[int, float]:
  """Maximum blocks, and maximum bytes, that a device held at once."""
  changes: list[tuple[float, int, int, float]] = []
  for (number_of_pass, i, d), load in loads.items():
    if d != device:
      continue
    load_span: Span = span(load)
    changes.append((load_span.start_s, 1, 1, float(blocks[i].nbytes)))
    if not blocks[i].retained:
      reduce_span: Span = span(reduces[number_of_pass, i])
      changes.append((reduce_span.done_s, 0, -1, -float(blocks[i].nbytes)))
  count = most_blocks = 0
  nbytes = largest = 0.0
  # At one instant, releases come before loads.
  for _, _, n, size in sorted(changes):
    count, nbytes = count + n, nbytes + size
    most_blocks, largest = max(most_blocks, count), max(largest, nbytes)
  return most_blocks, largest


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


def window_numbers(numbers: Sequence[int | float], window: int) -> float:
  """Largest sum of `window` consecutive blocks, cyclically."""
  positive_int("window", window)
  count = min(window, len(numbers))
  twice = [*numbers, *numbers]
  return max(
    float(sum(twice[i : i + count])) for i in range(len(numbers))
  )  # fmt: skip


def worker_numbers(
  attention: int | float, feedforward: int | float, window: int
) -> float:
  """Weights in a worker's window, the larger kind of block at both ends."""
  positive_int("window", window)
  small, large = sorted((attention, feedforward))
  return float((window // 2) * small + ((window + 1) // 2) * large)


def master_numbers(
  attention: int | float,
  feedforward: int | float,
  embedding: int | float,
  head: int | float,
  window: int,
) -> float:
  """Weights in the master's window, which also has embedding and head.

  Args:
    attention: Weights of an attention block.
    feedforward: Weights of a feedforward block.
    embedding: Weights of the first block, no smaller than these.
    head: Weights of the last block, with its norm.
    window: Number of blocks.
  """
  positive_int("window", window)
  if window == 1:
    return float(max(embedding, head))
  return float(embedding + head) + (
    worker_numbers(attention, feedforward, window - 2) if window > 2 else 0.0
  )
