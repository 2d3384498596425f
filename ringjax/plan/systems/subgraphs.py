"""Out-of-order dispatch of a chunked prefill to two processors (llm.npu).

Guarantees: a `Dispatcher` returns a subgraph when all that it needs is done,
and each subgraph once, by any rule; the same class serves the simulator below
and live devices.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858: integer products on one
processor, norms and attention in floats on another; of the subgraphs that may
begin, the one that keeps the integer processor from waiting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.plan.events import Device, Simulator, Span, Timeline

INTEGER, FLOAT = "integer", "float"
# Steps of a layer for a chunk, and their processor: the six of the paper. Float
# products that a step on the integer processor does as well are in its time.
STEPS = {
  "norm": FLOAT,
  "project": INTEGER,
  "attend": FLOAT,
  "output": INTEGER,
  "second_norm": FLOAT,
  "feedforward": INTEGER,
}
_PROJECT, _ATTEND = 1, 2
# serial: chunk by chunk. fifo: in the order in which they became ready. waits:
# the paper's rule: a subgraph on the float processor counts the integer seconds
# that it unblocks, one on the integer processor loses the float seconds that it
# unblocks. This starts the first chunk, which all others need, after them: fifo
# was as short or shorter in all settings tried (docs/how/integers.md).
RULES = ("fifo", "waits", "serial")


@dataclasses.dataclass(frozen=True, order=True)
class Subgraph:
  """One step of one layer for one chunk.

  Attributes:
    chunk: Index of the chunk in the prompt.
    layer: Index of the layer in the model.
    step: Index into `STEPS`.
  """

  chunk: int
  layer: int
  step: int

  @property
  def name(self) -> str:
    """Name of its step."""
    return tuple(STEPS)[self.step]

  @property
  def processor(self) -> str:
    """Processor that runs it."""
    return STEPS[self.name]


class Dispatcher:
  """Chooses the subgraph of a prefill that a free processor runs next.

  A subgraph needs the one before it in its chunk. Attention also needs the keys
  of all earlier chunks in its layer: their projections, or with `in_order`
  their attention, if that appends keys to a cache.
  """

  def __init__(
    self,
    chunks: int,
    layers: int,
    *,
    rule: str = RULES[0],
    seconds: Mapping[str, int | float] | None = None,
    in_order: bool = False,
  ):
    """Begin with nothing done.

    Args:
      chunks: Number of chunks of the prompt.
      layers: Number of layers of the model.
      rule: One of `RULES`.
      seconds: Duration of each of `STEPS`, for "waits"; default: all equal.
      in_order: Whether attention of a chunk needs that of the chunk before.

    Raises:
      OptionError: If an argument is out of range.
    """
    self.chunks = positive_int("chunks", chunks)
    self.layers = positive_int("layers", layers)
    self.rule = one_of("rule", rule, RULES)
    self.in_order = in_order
    self.seconds = _checked_seconds({} if seconds is None else seconds)
    self._done: set[Subgraph] = set()
    # In the order in which they became ready.
    self._ready: list[Subgraph] = []
    self._given: set[Subgraph] = set()
    for chunk in range(chunks):
      self._offer(Subgraph(chunk, 0, 0))

  @property
  def finished(self) -> bool:
    """Whether all subgraphs are done."""
    return len(self._done) == self.chunks * self.layers * len(STEPS)

  def take(self, where: str) -> Subgraph | None:
    """Next subgraph for the free processor `where`; None if it has to wait."""
    candidates = [
      subgraph for subgraph in self._ready if subgraph.processor == where
    ]
    if self.rule == "serial":
      # Chunk by chunk: none overtakes an earlier chunk.
      first_chunk = min(
        (subgraph.chunk for subgraph in self._open()), default=0
      )
      candidates = [
        subgraph for subgraph in candidates if subgraph.chunk == first_chunk
      ]
    if not candidates:
      return None
    chosen = candidates[0] if self.rule == "fifo" else min(candidates)
    if self.rule == "waits":
      # Of equals prefer the earlier chunk, whose keys others wait for.
      chosen = max(
        candidates,
        key=lambda subgraph: (
          self._unblocked_s(subgraph),
          -subgraph.chunk,
          -subgraph.layer,
        ),
      )
    self._ready.remove(chosen)
    self._given.add(chosen)
    return chosen

  def finish(self, part: Subgraph) -> None:
    """Record that a subgraph is done.

    Raises:
      OptionError: If it was not returned by `take`, or is done already.
    """
    if part not in self._given:
      raise OptionError(
        "part", part, "one that take() returned", "tell each part once"
      )
    self._given.discard(part)
    self._done.add(part)
    for dependent in self._dependents(part):
      self._offer(dependent)

  def needs(self, part: Subgraph) -> tuple[Subgraph, ...]:
    """Subgraphs that have to be done before this one."""
    required = []
    if part.step:
      required.append(Subgraph(part.chunk, part.layer, part.step - 1))
    elif part.layer:
      required.append(Subgraph(part.chunk, part.layer - 1, len(STEPS) - 1))
    if part.name == "attend" and part.chunk:
      earlier = range(part.chunk)
      if self.in_order:
        required.append(dataclasses.replace(part, chunk=part.chunk - 1))
      else:
        required += [Subgraph(n, part.layer, _PROJECT) for n in earlier]
    return tuple(required)

  def _dependents(self, part: Subgraph) -> list[Subgraph]:
    """Subgraphs that need this one."""
    dependents = []
    if part.step + 1 < len(STEPS):
      dependents.append(Subgraph(part.chunk, part.layer, part.step + 1))
    elif part.layer + 1 < self.layers:
      dependents.append(Subgraph(part.chunk, part.layer + 1, 0))
    later_chunks = range(part.chunk + 1, self.chunks)
    if self.in_order and part.name == "attend":
      dependents += [
        Subgraph(n, part.layer, part.step) for n in later_chunks[:1]
      ]
    elif not self.in_order and part.name == "project":
      dependents += [Subgraph(n, part.layer, _ATTEND) for n in later_chunks]
    return dependents

  def _offer(self, part: Subgraph) -> None:
    """Mark a subgraph as ready if all that it needs is done."""
    scheduled = part in self._done or part in self._given or part in self._ready
    if not scheduled and all(
      required in self._done for required in self.needs(part)
    ):
      self._ready.append(part)

  def _open(self) -> list[Subgraph]:
    return [*self._ready, *self._given]

  def _unblocked_s(self, part: Subgraph) -> float:
    """Seconds unblocked on the other processor, signed as in "waits"."""
    unblocked = [
      dependent
      for dependent in self._dependents(part)
      if dependent.processor != part.processor
      and dependent not in self._done
      and all(
        required == part or required in self._done
        for required in self.needs(dependent)
      )
    ]
    total = math.fsum(self.seconds[dependent.name] for dependent in unblocked)
    return total if part.processor == FLOAT else -total


@dataclasses.dataclass(frozen=True)
class SubgraphSchedule:
  """Schedule of a prefill on two processors.

  Attributes:
    timeline: Timeline of both processors.
    order: Subgraphs in the order in which they began.
  """

  timeline: Timeline
  order: tuple[Subgraph, ...]

  @property
  def seconds(self) -> float:
    """Duration of the whole prefill, in seconds."""
    return float(self.timeline.finish_s)

  @property
  def waiting(self) -> float:
    """Fraction of the time in which the integer processor waits."""
    return self.timeline.idle(INTEGER)


def simulated(
  chunks: int,
  layers: int,
  seconds: Mapping[str, int | float],
  *,
  rule: str = RULES[0],
  growing: int | float = 0.0,
  in_order: bool = False,
) -> SubgraphSchedule:
  """Simulate a prefill on two processors.

  Args:
    chunks: Number of chunks of the prompt.
    layers: Number of layers of the model.
    seconds: Duration of each of `STEPS`, in seconds.
    rule: One of `RULES`.
    growing: Extra time of attention for each earlier chunk, as a fraction of
      its time for the first chunk.
    in_order: See `Dispatcher`.

  Raises:
    OptionError: If an argument is out of range.
  """
  number("growing", growing, least=0)
  plan = Dispatcher(
    chunks, layers, rule=rule, seconds=seconds, in_order=in_order
  )
  simulator = Simulator()
  free = {
    processor: simulator.device(processor) for processor in (INTEGER, FLOAT)
  }
  order: list[Subgraph] = []

  def begin() -> None:
    for processor in list(free):
      part = plan.take(processor)
      if part is not None:
        order.append(part)
        run(part, free.pop(processor))

  def run(part: Subgraph, device: Device) -> None:
    def finish(span: Span) -> None:
      del span
      plan.finish(part)
      free[part.processor] = device
      simulator.at(simulator.now_s, begin)

    growth = growing * part.chunk if part.name == "attend" else 0
    simulator.op(
      f"{part.name} {part.layer}.{part.chunk}",
      device,
      plan.seconds[part.name] * (1 + growth),
      kind=part.name,
      then=finish,
    )

  simulator.at(0.0, begin)
  return SubgraphSchedule(simulator.run(), tuple(order))


def compared(
  chunks: Sequence[int],
  layers: int,
  seconds: Mapping[str, int | float],
  *,
  growing: int | float = 0.0,
  in_order: bool = False,
) -> dict[int, dict[str, SubgraphSchedule]]:
  """Simulate every rule for numbers of chunks: {chunks: {rule: schedule}}."""
  return {
    n: {
      rule: simulated(
        n, layers, seconds, rule=rule, growing=growing, in_order=in_order
      )
      for rule in RULES
    }
    for n in chunks
  }


def _checked_seconds(seconds: Mapping[str, int | float]) -> dict[str, float]:
  wrong = [name for name in seconds if name not in STEPS]
  if wrong:
    raise OptionError(
      "seconds",
      ", ".join(map(str, wrong)),
      f"some of {', '.join(STEPS)}",
      "write seconds={'project': 1, 'attend': 2, 'output': 3}, for instance",
    )
  for name, value in seconds.items():
    number(f"seconds[{name!r}]", value, above=0)
  return {name: float(seconds.get(name, 1.0)) for name in STEPS}
