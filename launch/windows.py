"""The sub-command window of launch.plan: weights that stream over devices.

Tensor parallelism over slow devices that each load the next blocks from disk
while they compute: whether they ever wait, and what they hold (TPI-LLM). The
blocks, their bytes, their order and which stay are those that `launch.generate
--window` runs (`ringjax.models.window_layout`).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from absl import flags

from launch import aot, console, strategies
from ringjax.checks import number
from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.parallel.chips import number_bytes
from ringjax.plan import allreduce_hops, files, layer_window
from ringjax.plan.allreduce_hops import REDUCES, Topology
from ringjax.plan.layer_window import WindowBlock, WindowRun, WindowTimes

if TYPE_CHECKING:
  # These bring the models and flax; most sub-commands do without.
  from ringjax.kv.cache_kind import CacheKind
  from ringjax.models.tensor_shares import ModelShares
  from ringjax.models.window_layout import RankBlock, WindowLayout

_MODEL = "llama-2-7b"
_PROCESSES, _WINDOW = 8, 4
# Passes that are simulated: the prompt, and tokens until all is under way.
_PASSES = 6
# Of the paper's emulated devices: 300 Mb/s and a millisecond a link.
_BANDWIDTH, _LATENCY_S = 37.5e6, 1e-3
_RATES = ("flops", "memory_rate", "disk_rate")
NOTE = (
  "simulated from the given rates; a block takes the larger of its products "
  "and of reading its weights from memory; barriers are left out"
)
_MEASURED = (
  "simulated from the measured seconds of each block of a token; that of the "
  "prompt is not in the log"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
  """The model, the devices and the links."""

  name: str
  model: ModelShares
  blocks: tuple[tuple[RankBlock, ...], ...]
  layouts: tuple[WindowLayout, ...]
  cache: CacheKind
  flops: tuple[float, ...]
  memory_rate: tuple[float, ...]
  disk_rate: tuple[float, ...]
  graph: Topology
  bandwidth: float
  reduce: str
  prompt: int
  new: int
  window: int | None
  retain: int | None
  measured: tuple[tuple[_Measured, ...], ...] | None

  @property
  def blocks_at_once(self) -> int:
    """The window of the simulator, which knows no window of all."""
    return self.window or max(len(one.nbytes) for one in self.layouts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
  """Mean seconds of a block, of the log of a run."""

  name: str
  bytes: int
  read_s: float
  compute_s: float
  peers_s: float


def windowed(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints whether streamed blocks keep up, the times and the memory."""
  del stderr
  asked = _asked(values)
  devices, sums, first = _blocks(asked)
  run = layer_window.simulate(
    devices,
    window=asked.blocks_at_once,
    passes=max(2, min(_PASSES, asked.new)),
    reduce_s=sums,
    first_reduce_s=first,
  )
  rows = list(_rows(asked, devices, sums, run))
  hops = {
    name: {
      "chain_s": allreduce_hops.chain_s(asked.graph, name),
      "seconds": _reduce_s(asked, name, 1),
    }
    for name in REDUCES
  }
  record = {
    "model": asked.name,
    "window": asked.window or 0,
    "retain": asked.retain,
    "steady": all(row["steady"] for row in rows),
    "waits": not run.steady,
    "first_s": None if asked.measured else run.first_s,
    "token_s": run.token_s,
    "devices": rows,
    "allreduce": hops,
    "reduce": asked.reduce,
    "note": _MEASURED if asked.measured else NOTE,
  }
  strategies.put(values, stdout, record, list(_words(asked, run, rows, hops)))


def _asked(values: flags.FlagValues) -> _Asked:
  from launch.tensor_ranks import shares_of
  from ringjax.infer.tensor_window import cache_of_ranks
  from ringjax.kv import kind_text
  from ringjax.models.window_layout import WindowLayout, rank_blocks

  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  size = values.processes
  if size is None:
    size = _PROCESSES if values.shares is None else len(values.shares)
  shares = shares_of(values.shares, size)
  kind = kind_text.parse(values.cache or "windowed", "--cache")
  cache = cache_of_ranks(kind)
  graph = _graph(values, size)
  if values.measured is not None:
    strategies.refuse(values, "window --measured", (*_RATES, "dtype"))
  each = lambda name: _each(name, values[name].value or (), size)
  window = _WINDOW if values.window is None else values.window or None
  model = _model(names[0], shares, values.dtype)
  blocks = tuple(rank_blocks(model, rank) for rank in range(size))
  return _Asked(
    name=pathlib.Path(names[0]).name,
    model=model,
    blocks=blocks,
    layouts=tuple(
      WindowLayout.of(one, window, values.retain) for one in blocks
    ),
    cache=cache,
    flops=each("flops"),
    memory_rate=each("memory_rate"),
    disk_rate=each("disk_rate"),
    graph=graph,
    bandwidth=number(
      "--bandwidth", _given(values, "bandwidth", _BANDWIDTH), above=0
    ),
    reduce=values.reduce,
    prompt=values.prompt,
    new=values.new,
    window=window,
    retain=values.retain,
    measured=(
      None if values.measured is None else _measured(values.measured, blocks)
    ),
  )


def _model(
  name: str, shares: Sequence[float], dtype: str | None
) -> ModelShares:
  """A folder's model as it is stored, or what a config.json describes."""
  from ringjax.models.presets import preset
  from ringjax.models.tensor_shares import ModelShares, SharedModel

  config = aot.config_of(name)
  if isinstance(config, str):
    return ModelShares(preset(config), shares, dtype=dtype)
  if any(pathlib.Path(name).glob("*.safetensors*")):
    return SharedModel(name, shares, dtype=dtype)
  return ModelShares(config, shares, dtype=dtype)


def _graph(values: flags.FlagValues, size: int) -> Topology:
  if values.graph is None:
    return Topology.behind_switches(size, _given(values, "latency", _LATENCY_S))
  strategies.refuse(values, "window --graph", ("latency",))
  graph = Topology.load(values.graph)
  if len(graph.devices) != size:
    raise OptionError(
      "--graph",
      f"{len(graph.devices)} devices",
      f"{size}, as many as --processes or --shares",
      "pass --processes or --shares for as many devices",
    )
  return graph


def _measured(
  path: str, blocks: Sequence[Sequence[RankBlock]]
) -> tuple[tuple[_Measured, ...], ...]:
  """The seconds of a run's blocks, which have to be the plan's."""
  from launch.tensor_ranks import LOG_FORMAT

  body = files.read(path, LOG_FORMAT)
  try:
    found = tuple(
      tuple(
        _Measured(
          **{x.name: one[x.name] for x in dataclasses.fields(_Measured)}
        )
        for one in rank
      )
      for rank in body["blocks"]
    )
    for one in (block for rank in found for block in rank):
      for name in ("read_s", "compute_s", "peers_s"):
        number(name, getattr(one, name), least=0)
  except (KeyError, TypeError, OptionError) as error:
    raise CheckpointFormatError(
      path, f"{error!r}", "a log of launch.generate --window", "run it again"
    ) from None
  ran = [[(one.name, one.bytes) for one in rank] for rank in found]
  planned = [[(one.name, one.nbytes) for one in rank] for rank in blocks]
  if ran != planned:
    total = lambda ranks: [sum(n for _, n in rank) for rank in ranks]
    raise OptionError(
      "--measured",
      f"blocks of {total(ran)} bytes on the ranks",
      f"those of this model and these shares, {total(planned)}",
      "pass the --model and --shares of the run",
    )
  return found


def _given(values: flags.FlagValues, name: str, default: float) -> float:
  """A number that was given; other sub-commands have another default."""
  found = values[name]
  return default if not found.present else float(found.value or 0.0)


def _each(name: str, given: Sequence[str], count: int) -> tuple[float, ...]:
  """A number of each device, of one for all or of as many."""
  try:
    found = tuple(float(x) for x in given)
  except ValueError:
    raise OptionError(
      f"--{name}", ",".join(given), "numbers", f"pass e.g. --{name}=1e9,2e9"
    ) from None
  for one in found:
    number(f"--{name}", one, above=0)
  if len(found) == 1:
    return found * count
  if len(found) != count:
    raise OptionError(
      f"--{name}",
      f"{len(found)} numbers",
      f"1 or {count}",
      f"pass one for all devices or {count}",
    )
  return found


# ---------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------


def _reduce_s(asked: _Asked, name: str, tokens: int) -> float:
  nbytes = (
    tokens * asked.model.config.embed * number_bytes(asked.model.dtype.name)
  )
  return allreduce_hops.allreduce_s(asked.graph, name, nbytes, asked.bandwidth)


def _work(asked: _Asked, block: RankBlock) -> tuple[float, float]:
  """FLOPs of a block for a token, and for the prompt.

  A token meets each number in a product and a sum, but for those of experts
  that it does not choose; a query meets each key that it sees.
  """
  from ringjax.nn.attention import Attention

  s = asked.prompt
  numbers, pairs, seen = 0.0, 0.0, 0.0
  for part in block.parts.values():
    numbers += sum(
      len(one.names) * math.prod(one.shape) for one in part.tensors
    )
    spec = part.spec
    if isinstance(spec, Attention):
      behind = spec.mask.reach[0]
      span = math.inf if behind is None else behind + 1
      each = 2.0 * spec.heads * (spec.head_dim + spec.value)
      seen = each * min(s + asked.new / 2, span)
      short = min(s, span)
      pairs = each * (short * short / 2 + (s - short) * short)
    elif hasattr(spec, "idle"):
      numbers -= spec.idle(asked.model.config.embed)
  if block.name == "head":
    # It reads the last token of the prompt alone.
    return 2 * numbers, 2 * numbers
  return 2 * numbers + seen, 2 * numbers * s + pairs


def _blocks(
  asked: _Asked,
) -> tuple[list[list[WindowBlock]], list[float], list[float]]:
  """Blocks of each device, and what each sum takes, of a token and the prompt.

  Before the first block rank 0 reads rows of the embedding; the sum of each
  block goes out again, but for the last one.
  """
  embed = asked.model.config.embed
  count = len(asked.blocks[0])
  row = embed * number_bytes(asked.model.dtype.name)
  devices = []
  for d, (blocks, layout) in enumerate(
    zip(asked.blocks, asked.layouts, strict=True)
  ):
    rows = 0.0 if d else row / asked.disk_rate[0]
    made = [
      WindowBlock(
        name="rows of the embedding",
        nbytes=0,
        load_s=0.0,
        step_s=rows,
        first_s=rows * asked.prompt,
      )
    ]
    for k, block in enumerate(blocks):
      work, first = _work(asked, block)
      nbytes = block.nbytes
      reading = nbytes / asked.memory_rate[d]
      load_s = nbytes / asked.disk_rate[d]
      step_s = max(work / asked.flops[d], reading)
      first_s = max(first / asked.flops[d], reading)
      if asked.measured is not None:
        seconds = asked.measured[d][k]
        load_s, step_s, first_s = seconds.read_s, *[seconds.compute_s] * 2
      made.append(
        WindowBlock(
          name=block.name,
          nbytes=nbytes,
          load_s=load_s,
          step_s=step_s,
          first_s=first_s,
          retained=k in layout.kept,
        )
      )
    # The head is on rank 0 alone.
    made += [WindowBlock(name="none", nbytes=0, load_s=0.0, step_s=0.0)] * (
      count - len(blocks)
    )
    devices.append(made)
  if asked.measured is not None:
    # The rank that waited least for others came last.
    waits = [[one.peers_s for one in rank] for rank in asked.measured]
    least = [min(each) for each in zip(*waits, strict=False)]
    sums = [0.0, *least, *[0.0] * (count - len(least))]
    return devices, sums, sums
  sums, first = (
    [
      _reduce_s(asked, "star", tokens) / 2,
      *[_reduce_s(asked, asked.reduce, tokens)] * (count - 2),
      _reduce_s(asked, asked.reduce, tokens)
      / (2 if asked.reduce == "star" else 1),
      0.0,
    ]
    for tokens in (1, asked.prompt)
  )
  return devices, sums, first


def _cache_bytes(asked: _Asked, rank: int) -> int:
  """Of a rank's heads, for the prompt and what is made behind it."""
  import jax

  from ringjax.infer.prefill import padded
  from ringjax.kv.cache import KVCache

  capacity = padded(padded(asked.prompt, 1) + asked.new, 1)
  total = 0
  for block in asked.blocks[rank]:
    spec: Any = block.parts["term"].spec if "term" in block.parts else None
    if hasattr(spec, "cache_shape"):
      made = KVCache.spec(
        (spec.cache_shape(1),),
        1,
        capacity,
        asked.model.dtype,
        kind=asked.cache,
      )
      total += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
  return total


def _rows(
  asked: _Asked,
  devices: Sequence[Sequence[WindowBlock]],
  sums: Sequence[float],
  run: WindowRun,
) -> Iterator[dict[str, Any]]:
  """Of each device: whether it is steady, and its bytes."""
  count = len(sums)
  steps = [
    max(blocks[i].step_s for blocks in devices) + sums[i] for i in range(count)
  ]
  weights = asked.model.weights
  for d, (blocks, layout) in enumerate(
    zip(devices, asked.layouts, strict=True)
  ):
    loads = [0.0 if one.retained else float(one.load_s) for one in blocks]
    attention, feedforward = blocks[1], blocks[2]
    times = WindowTimes(
      attention=steps[1] - sums[1],
      feedforward=steps[2] - sums[2],
      reduce=sums[1],
      load_attention=attention.load_s,
      load_feedforward=feedforward.load_s,
    )
    cache = _cache_bytes(asked, d)
    yield {
      "device": asked.graph.devices[d],
      "share": weights[d] / sum(weights),
      "tight": layer_window.tight(times),
      "loose": layer_window.loose(
        times, len(asked.model.config.layers), asked.retain
      ),
      "steady": layer_window.steady(steps, loads, asked.blocks_at_once),
      "least_window": layer_window.least_window(steps, loads),
      "waits_s": run.waits_s[d],
      "blocks": run.peak_blocks[d],
      "weight_bytes": run.peak_bytes[d],
      "cache_bytes": cache,
      "all_bytes": sum(layout.nbytes) + cache,
      "block_bytes": list(layout.nbytes),
      "kept": sorted(layout.kept),
      "pass_bytes": layout.pass_bytes,
    }


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def _words(
  asked: _Asked,
  run: WindowRun,
  rows: Sequence[dict[str, Any]],
  hops: dict[str, dict[str, float]],
) -> Iterator[str]:
  kept = f", one feedforward in {asked.retain} stays" if asked.retain else ""
  yield (
    f"{asked.name} in {asked.model.dtype.name} on {len(rows)} devices, prompt "
    f"{asked.prompt:,}, windows of {asked.window or 'all'} blocks{kept}"
  )
  yield ""
  yield (
    ("" if asked.measured else f"first token {run.first_s:.4g} s, then ")
    + f"{run.token_s:.4g} s a token; "
    + (
      "no device waits for its disk" if run.steady else "devices wait for disk"
    )
  )
  yield ""
  says = lambda x: "yes" if x else "no"
  yield from strategies.markdown(
    ("device",),
    ("share", "tight", "loose", "steady", "least window", "reads a token",
     "blocks", "weights", "cache", "peak", "without a window"),
    [
      (row["device"], f"{row['share']:.3g}", says(row["tight"]),
       says(row["loose"]), says(row["steady"]),
       "none" if row["least_window"] is None else f"{row['least_window']}",
       console.nbytes(row["pass_bytes"]),
       f"{row['blocks']}", console.nbytes(row["weight_bytes"]),
       console.nbytes(row["cache_bytes"]),
       console.nbytes(row["weight_bytes"] + row["cache_bytes"]),
       console.nbytes(row["all_bytes"]))
      for row in rows
    ],
  )  # fmt: skip
  yield ""
  yield from strategies.markdown(
    ("all-reduce",),
    ("links, one after another", "with a token's bytes"),
    [
      (name + (", used" if name == asked.reduce else ""),
       f"{1e3 * one['chain_s']:.4g} ms", f"{1e3 * one['seconds']:.4g} ms")
      for name, one in hops.items()
    ],
  )  # fmt: skip
  yield ""
  yield _MEASURED if asked.measured else NOTE
