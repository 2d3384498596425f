"""The sub-command window of launch.plan: weights that stream over devices.

Tensor parallelism over slow devices that each load the next blocks from disk
while they compute: whether they ever wait, and the memory they need (TPI-LLM).
The blocks, their bytes, their order and the retained ones are those that
`launch.generate --window` runs (`ringjax.models.partition.window_layout`).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from absl import flags

from ringjax.checks import number
from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.parallel.chips import Link, number_bytes
from ringjax.paths import as_path
from ringjax.plan import files
from ringjax.plan.systems import allreduce_hops, layer_window
from ringjax.plan.systems.allreduce_hops import REDUCES, Topology
from ringjax.plan.systems.layer_window import (
  WindowBlock,
  WindowRun,
  WindowTimes,
)

from ..shared import console, machines
from . import aot, strategies

if TYPE_CHECKING:
  # These import the models and flax, which most sub-commands don't need.
  from ringjax.kv.cache_kind import CacheConfig
  from ringjax.models.partition.tensor_shares import ModelShares
  from ringjax.models.partition.window_layout import RankBlock, WindowLayout

_MODEL = "llama-2-7b"
_PROCESSES, _WINDOW = 8, 4
# Passes that are simulated: the prompt, and tokens until a steady state.
_PASSES = 6
# The links of the paper's emulated devices: 300 Mb/s and one millisecond.
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
class _WindowRequest:
  """The model, the devices and the links."""

  name: str
  model: ModelShares
  blocks: tuple[tuple[RankBlock, ...], ...]
  layouts: tuple[WindowLayout, ...]
  cache: CacheConfig
  flops: tuple[float, ...]
  memory_rate: tuple[float, ...]
  disk_rate: tuple[float, ...]
  graph: Topology
  link: Link
  reduce: str
  prompt: int
  new: int
  window: int | None
  retain: int | None
  measured: tuple[tuple[_BlockSeconds, ...], ...] | None

  @property
  def blocks_at_once(self) -> int:
    """Number of blocks in the simulated window; all of them by default."""
    return self.window or max(len(layout.nbytes) for layout in self.layouts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _BlockSeconds:
  """Mean seconds of a block in the log of a run."""

  name: str
  bytes: int
  read_s: float
  compute_s: float
  peers_s: float


def windowed(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints whether streamed blocks keep up, the times and the memory."""
  del stderr
  request = _parse_request(values)
  devices, sums, first = _blocks(request)
  run = layer_window.simulate(
    devices,
    window=request.blocks_at_once,
    passes=max(2, min(_PASSES, request.new)),
    reduce_s=sums,
    first_reduce_s=first,
  )
  rows = list(_rows(request, devices, sums, run))
  hops = {
    name: {
      "chain_s": allreduce_hops.chain_s(request.graph, name),
      "seconds": _reduce_s(request, name, 1),
    }
    for name in REDUCES
  }
  record = {
    "model": request.name,
    "window": request.window or 0,
    "retain": request.retain,
    "steady": all(row["steady"] for row in rows),
    "waits": not run.steady,
    "first_s": None if request.measured else run.first_s,
    "token_s": run.token_s,
    "devices": rows,
    "allreduce": hops,
    "reduce": request.reduce,
    "note": _MEASURED if request.measured else NOTE,
  }
  strategies.put(values, stdout, record, list(_lines(request, run, rows, hops)))


def _parse_request(values: flags.FlagValues) -> _WindowRequest:
  from ringjax.infer.tpi_llm.tensor_window import cache_of_ranks
  from ringjax.kv import kind_text
  from ringjax.models.partition.window_layout import WindowLayout, rank_blocks

  from ..shared.tensor_ranks import shares_of

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
  per_device = lambda name: _per_device(name, values[name].value or (), size)
  window = _WINDOW if values.window is None else values.window or None
  model = _model(names[0], shares, values.dtype)
  blocks = tuple(rank_blocks(model, rank) for rank in range(size))
  return _WindowRequest(
    name=pathlib.Path(names[0]).name,
    model=model,
    blocks=blocks,
    layouts=tuple(
      WindowLayout.of(blocks_of_rank, window, values.retain)
      for blocks_of_rank in blocks
    ),
    cache=cache,
    flops=per_device("flops"),
    memory_rate=per_device("memory_rate"),
    disk_rate=per_device("disk_rate"),
    graph=graph,
    link=_link(values),
    reduce=values.reduce,
    prompt=values.prompt,
    new=values.new,
    window=window,
    retain=values.retain,
    measured=(
      None
      if values.measured is None
      else _read_measured(values.measured, blocks)
    ),
  )


def _model(
  name: str, shares: Sequence[float], dtype: str | None
) -> ModelShares:
  """Tensor shares of a stored model, or of the model of a config.json."""
  from ringjax.models.partition.tensor_shares import ModelShares, SharedModel
  from ringjax.models.presets import preset

  config = aot.config_of(name)
  if isinstance(config, str):
    return ModelShares(preset(config), shares, dtype=dtype)
  if any(as_path(name).glob("*.safetensors*")):
    return SharedModel(name, shares, dtype=dtype)
  return ModelShares(config, shares, dtype=dtype)


def _graph(values: flags.FlagValues, size: int) -> Topology:
  if values.graph is None:
    return Topology.behind_switches(size, _link(values).latency_s)
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


def _read_measured(
  path: str, blocks: Sequence[Sequence[RankBlock]]
) -> tuple[tuple[_BlockSeconds, ...], ...]:
  """Reads the measured seconds of each block, and checks the blocks."""
  from ..shared.tensor_ranks import LOG_FORMAT

  body = files.read(path, LOG_FORMAT)
  try:
    measured = tuple(
      tuple(
        _BlockSeconds(
          **{x.name: record[x.name] for x in dataclasses.fields(_BlockSeconds)}
        )
        for record in rank
      )
      for rank in body["blocks"]
    )
    for entry in (block for rank in measured for block in rank):
      for name in ("read_s", "compute_s", "peers_s"):
        number(name, getattr(entry, name), least=0)
  except (KeyError, TypeError, OptionError) as error:
    raise CheckpointFormatError(
      path, f"{error!r}", "a log of launch.generate --window", "run it again"
    ) from None
  ran = [[(block.name, block.bytes) for block in rank] for rank in measured]
  planned = [[(block.name, block.nbytes) for block in rank] for rank in blocks]
  if ran != planned:
    total = lambda ranks: [sum(n for _, n in rank) for rank in ranks]
    raise OptionError(
      "--measured",
      f"blocks of {total(ran)} bytes on the ranks",
      f"those of this model and these shares, {total(planned)}",
      "pass the --model and --shares of the run",
    )
  return measured


def _link(values: flags.FlagValues) -> Link:
  return machines.link(values, bandwidth=_BANDWIDTH, latency_s=_LATENCY_S)


def _per_device(
  name: str, items: Sequence[str], count: int
) -> tuple[float, ...]:
  """Parses a number for each device, from `count` numbers or one for all."""
  try:
    numbers = tuple(float(x) for x in items)
  except ValueError:
    raise OptionError(
      f"--{name}", ",".join(items), "numbers", f"pass e.g. --{name}=1e9,2e9"
    ) from None
  for value in numbers:
    number(f"--{name}", value, above=0)
  if len(numbers) == 1:
    return numbers * count
  if len(numbers) != count:
    raise OptionError(
      f"--{name}",
      f"{len(numbers)} numbers",
      f"1 or {count}",
      f"pass one for all devices or {count}",
    )
  return numbers


# ---------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------


def _reduce_s(request: _WindowRequest, name: str, tokens: int) -> float:
  nbytes = (
    tokens * request.model.config.embed * number_bytes(request.model.dtype.name)
  )
  return allreduce_hops.allreduce_s(
    request.graph, name, nbytes, request.link.bandwidth
  )


def _work(request: _WindowRequest, block: RankBlock) -> tuple[float, float]:
  """FLOPs of a block for a token, and for the prompt.

  A token takes two FLOPs for each weight, except those of experts that it is
  not routed to, and each query attends to the keys that its mask allows.
  """
  from ringjax.nn.attention_layers.attention import Attention

  s = request.prompt
  numbers, pairs, seen = 0.0, 0.0, 0.0
  for part in block.parts.values():
    numbers += sum(
      len(tensor.names) * math.prod(tensor.shape) for tensor in part.tensors
    )
    spec = part.spec
    if isinstance(spec, Attention):
      reach = spec.mask.reach[0]
      span = math.inf if reach is None else reach + 1
      pair_flops = 2.0 * spec.heads * (spec.head_dim + spec.value)
      seen = pair_flops * min(s + request.new / 2, span)
      short = min(s, span)
      pairs = pair_flops * (short * short / 2 + (s - short) * short)
    elif hasattr(spec, "idle"):
      numbers -= spec.idle(request.model.config.embed)
  if block.name == "head":
    # Only the last token of the prompt needs logits.
    return 2 * numbers, 2 * numbers
  return 2 * numbers + seen, 2 * numbers * s + pairs


def _blocks(
  request: _WindowRequest,
) -> tuple[list[list[WindowBlock]], list[float], list[float]]:
  """Blocks of each device, and the seconds of each all-reduce.

  The all-reduce seconds are for a token and for the prompt. Before the first
  block rank 0 reads rows of the embedding; the sum of each block except the
  last one is broadcast again.
  """
  embed = request.model.config.embed
  count = len(request.blocks[0])
  row = embed * number_bytes(request.model.dtype.name)
  devices = []
  for d, (blocks, layout) in enumerate(
    zip(request.blocks, request.layouts, strict=True)
  ):
    rows_s = 0.0 if d else row / request.disk_rate[0]
    window_blocks = [
      WindowBlock(
        name="rows of the embedding",
        nbytes=0,
        load_s=0.0,
        step_s=rows_s,
        first_s=rows_s * request.prompt,
      )
    ]
    for k, block in enumerate(blocks):
      work, first = _work(request, block)
      nbytes = block.nbytes
      reading = nbytes / request.memory_rate[d]
      load_s = nbytes / request.disk_rate[d]
      step_s = max(work / request.flops[d], reading)
      first_s = max(first / request.flops[d], reading)
      if request.measured is not None:
        seconds = request.measured[d][k]
        load_s, step_s, first_s = seconds.read_s, *[seconds.compute_s] * 2
      window_blocks.append(
        WindowBlock(
          name=block.name,
          nbytes=nbytes,
          load_s=load_s,
          step_s=step_s,
          first_s=first_s,
          retained=k in layout.kept_blocks,
        )
      )
    # The head is on rank 0 alone.
    window_blocks += [
      WindowBlock(name="none", nbytes=0, load_s=0.0, step_s=0.0)
    ] * (count - len(blocks))
    devices.append(window_blocks)
  if request.measured is not None:
    # The rank that arrives last waits only for the all-reduce itself.
    waits = [[block.peers_s for block in rank] for rank in request.measured]
    min_waits = [min(block_waits) for block_waits in zip(*waits, strict=False)]
    sums = [0.0, *min_waits, *[0.0] * (count - len(min_waits))]
    return devices, sums, sums
  sums, first = (
    [
      _reduce_s(request, "star", tokens) / 2,
      *[_reduce_s(request, request.reduce, tokens)] * (count - 2),
      _reduce_s(request, request.reduce, tokens)
      / (2 if request.reduce == "star" else 1),
      0.0,
    ]
    for tokens in (1, request.prompt)
  )
  return devices, sums, first


def _cache_bytes(request: _WindowRequest, rank: int) -> int:
  """Cache bytes of a rank's heads, for the prompt and the new tokens."""
  import jax

  from ringjax.infer.prefill import padded
  from ringjax.kv.cache import KVCache

  capacity = padded(padded(request.prompt, 1) + request.new, 1)
  total = 0
  for block in request.blocks[rank]:
    spec = block.parts["term"].spec if "term" in block.parts else None
    if hasattr(spec, "cache_shape"):
      cache_spec = KVCache.spec(
        (spec.cache_shape(1),),
        1,
        capacity,
        request.model.dtype,
        kind=request.cache,
      )
      total += sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(cache_spec)
      )
  return total


def _rows(
  request: _WindowRequest,
  devices: Sequence[Sequence[WindowBlock]],
  sums: Sequence[float],
  run: WindowRun,
) -> Iterator[dict[str, Any]]:
  """Yields a row for each device: whether it is steady, and its bytes."""
  count = len(sums)
  steps = [
    max(blocks[i].step_s for blocks in devices) + sums[i] for i in range(count)
  ]
  weights = request.model.weights
  for d, (blocks, layout) in enumerate(
    zip(devices, request.layouts, strict=True)
  ):
    loads = [0.0 if block.retained else float(block.load_s) for block in blocks]
    attention, feedforward = blocks[1], blocks[2]
    times = WindowTimes(
      attention=steps[1] - sums[1],
      feedforward=steps[2] - sums[2],
      reduce=sums[1],
      load_attention=attention.load_s,
      load_feedforward=feedforward.load_s,
    )
    cache = _cache_bytes(request, d)
    yield {
      "device": request.graph.devices[d],
      "share": weights[d] / sum(weights),
      "tight": layer_window.tight(times),
      "loose": layer_window.loose(
        times, len(request.model.config.layers), request.retain
      ),
      "steady": layer_window.steady(steps, loads, request.blocks_at_once),
      "least_window": layer_window.least_window(steps, loads),
      "waits_s": run.waits_s[d],
      "blocks": run.peak_blocks[d],
      "weight_bytes": run.peak_bytes[d],
      "cache_bytes": cache,
      "all_bytes": sum(layout.nbytes) + cache,
      "block_bytes": list(layout.nbytes),
      "kept": sorted(layout.kept_blocks),
      "pass_bytes": layout.pass_bytes,
    }


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


def _lines(
  request: _WindowRequest,
  run: WindowRun,
  rows: Sequence[dict[str, Any]],
  hops: dict[str, dict[str, float]],
) -> Iterator[str]:
  retain_text = (
    f", one feedforward in {request.retain} stays" if request.retain else ""
  )
  yield (
    f"{request.name} in {request.model.dtype.name} on {len(rows)} devices, "
    f"prompt {request.prompt:,}, windows of {request.window or 'all'} "
    f"blocks{retain_text}"
  )
  yield ""
  yield (
    ("" if request.measured else f"first token {run.first_s:.4g} s, then ")
    + f"{run.token_s:.4g} s a token; "
    + (
      "no device waits for its disk" if run.steady else "devices wait for disk"
    )
  )
  yield ""
  yes_no = lambda x: "yes" if x else "no"
  yield from strategies.markdown(
    ("device",),
    ("share", "tight", "loose", "steady", "least window", "reads a token",
     "blocks", "weights", "cache", "peak", "without a window"),
    [
      (row["device"], f"{row['share']:.3g}", yes_no(row["tight"]),
       yes_no(row["loose"]), yes_no(row["steady"]),
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
      (name + (", used" if name == request.reduce else ""),
       f"{1e3 * seconds['chain_s']:.4g} ms",
       f"{1e3 * seconds['seconds']:.4g} ms")
      for name, seconds in hops.items()
    ],
  )  # fmt: skip
  yield ""
  yield _MEASURED if request.measured else NOTE
