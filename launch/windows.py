"""The sub-command window of launch.plan: weights that stream over devices.

Tensor parallelism over slow devices that each load the next blocks from disk
while they compute: whether they ever wait, and what they hold (TPI-LLM).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from absl import flags

from launch import aot, console, strategies
from ringjax.checks import number, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.parallel.chips import number_bytes
from ringjax.plan import allreduce_hops, layer_window
from ringjax.plan.allreduce_hops import REDUCES, Topology
from ringjax.plan.cost import Shape
from ringjax.plan.layer_window import WindowBlock, WindowRun, WindowTimes

_MODEL = "llama-2-7b"
_RANKS = 8
# Passes that are simulated: the prompt, and tokens until all is under way.
_PASSES = 6
# Of the paper's emulated devices: 300 Mb/s and a millisecond a link.
_BANDWIDTH, _LATENCY_S = 37.5e6, 1e-3
NOTE = (
  "simulated from the given rates; a token takes the larger of its products "
  "and of reading its weights; barriers and sums are left out"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
  """The model, the devices and the links."""

  name: str
  shape: Shape
  vocab: int
  shares: tuple[float, ...]
  flops: tuple[float, ...]
  memory_rate: tuple[float, ...]
  disk_rate: tuple[float, ...]
  graph: Topology
  bandwidth: float
  reduce: str
  dtype: str
  prompt: int
  new: int
  window: int
  retain: int | None


def windowed(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints whether streamed blocks keep up, the times and the memory."""
  del stderr
  asked = _asked(values)
  devices, sums, first = _blocks(asked)
  run = layer_window.simulate(
    devices,
    window=asked.window,
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
    "window": asked.window,
    "retain": asked.retain,
    "steady": all(row["steady"] for row in rows),
    "waits": not run.steady,
    "first_s": run.first_s,
    "token_s": run.token_s,
    "devices": rows,
    "allreduce": hops,
    "reduce": asked.reduce,
    "note": NOTE,
  }
  strategies.put(values, stdout, record, list(_words(asked, run, rows, hops)))


def _asked(values: flags.FlagValues) -> _Asked:
  from ringjax.models.presets import preset

  names = values.model or [_MODEL]
  if len(names) > 1:
    raise OptionError(
      "--model", ",".join(names), "one model", "pass one name or folder"
    )
  found = aot.config_of(names[0])
  config = preset(found) if isinstance(found, str) else found
  shape, vocab = Shape.of(config), config.get("vocab_size")
  if not isinstance(vocab, int):
    raise ConfigError(
      "config", f"vocab_size {vocab!r}", "an int", "add vocab_size to it"
    )
  shares = _numbers("shares", values.shares)
  ranks = values.ranks if values["ranks"].present else _RANKS
  if shares is None:
    shares = (1 / ranks,) * ranks
  elif values["ranks"].present:
    raise OptionError(
      "flags", "--shares and --ranks", "one of them", "leave one out"
    )
  for share in shares:
    number("--shares", share, above=0, most=1)
  if abs(sum(shares) - 1) > 1e-3:
    raise OptionError(
      "--shares",
      f"{sum(shares):g} in all",
      "parts of the model that add up to 1",
      "change them so that the sum is 1",
    )
  if values.graph is None:
    graph = Topology.behind_switches(
      len(shares), _given(values, "latency", _LATENCY_S)
    )
  else:
    strategies.refuse(values, "window --graph", ("latency",))
    graph = Topology.load(values.graph)
    if len(graph.devices) != len(shares):
      raise OptionError(
        "--graph",
        f"{len(graph.devices)} devices",
        f"{len(shares)}, one of each share",
        "pass --shares or --ranks for as many devices",
      )
  if values.retain is not None:
    positive_int("--retain", values.retain)
  each = lambda name: _each(name, values[name].value or (), len(shares))
  return _Asked(
    name=pathlib.Path(names[0]).name,
    shape=shape,
    vocab=vocab,
    shares=shares,
    flops=each("flops"),
    memory_rate=each("memory_rate"),
    disk_rate=each("disk_rate"),
    graph=graph,
    bandwidth=number(
      "--bandwidth", _given(values, "bandwidth", _BANDWIDTH), above=0
    ),
    reduce=values.reduce,
    dtype=values.dtype or "float32",
    prompt=values.prompt,
    new=values.new,
    window=values.blocks,
    retain=values.retain,
  )


def _given(values: flags.FlagValues, name: str, default: float) -> float:
  """A number that was given; other sub-commands have another default."""
  found = values[name]
  return default if not found.present else float(found.value or 0.0)


def _numbers(
  name: str, given: Sequence[str] | None
) -> tuple[float, ...] | None:
  if given is None:
    return None
  try:
    return tuple(float(x) for x in given)
  except ValueError:
    raise OptionError(
      f"--{name}", ",".join(given), "numbers", f"pass e.g. --{name}=0.5,0.5"
    ) from None


def _each(name: str, given: Sequence[str], count: int) -> tuple[float, ...]:
  """A number of each device, of one for all or of as many."""
  found = _numbers(name, given) or ()
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
  nbytes = tokens * asked.shape.embed * number_bytes(asked.dtype)
  return allreduce_hops.allreduce_s(asked.graph, name, nbytes, asked.bandwidth)


def _blocks(
  asked: _Asked,
) -> tuple[list[list[WindowBlock]], list[float], list[float]]:
  """Blocks of each device, and the all-reduces of a token and of the prompt."""
  shape, s, each = asked.shape, asked.prompt, number_bytes(asked.dtype)
  D = shape.embed
  attend = D * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
  feed = (2 + shape.gated) * D * shape.hidden
  pair = 4 * shape.heads * shape.head_dim
  table = asked.vocab * D
  seen = s + asked.new / 2
  devices = []
  for d, p in enumerate(asked.shares):

    def block(
      name: str, weights: float, work: float, first: float,
      d: int = d, retained: bool = False,
    ) -> WindowBlock:  # fmt: skip
      nbytes = weights * each
      reading = nbytes / asked.memory_rate[d] if work else 0.0
      return WindowBlock(
        name=name,
        nbytes=nbytes,
        load_s=nbytes / asked.disk_rate[d],
        step_s=max(work / asked.flops[d], reading),
        first_s=max(first / asked.flops[d], reading),
        retained=retained,
      )

    mine = [block("input", table if d == 0 else 0.0, 0.0, 0.0)]
    for layer in range(1, shape.layers + 1):
      attention = 2 * attend * p
      mine += [
        block(
          f"attention {layer}",
          attend * p + D,
          attention + pair * p * seen,
          s * attention + pair * p * s**2 / 2,
        ),
        block(
          f"feedforward {layer}",
          feed * p + D,
          2 * feed * p,
          2 * feed * p * s,
          retained=asked.retain is not None and layer % asked.retain == 0,
        ),
      ]
    # The head reads the last token of the prompt alone.
    head = (table + D, 2.0 * table, 2.0 * table) if d == 0 else (0.0, 0.0, 0.0)
    devices.append([*mine, block("output", *head)])
  sums, first = (
    [
      # Hidden states go out once, and the last sum is at the master.
      _reduce_s(asked, "star", tokens) / 2,
      *[_reduce_s(asked, asked.reduce, tokens)] * (2 * shape.layers),
      0.0,
    ]
    for tokens in (1, s)
  )
  return devices, sums, first


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
  tokens = asked.prompt + asked.new
  for d, blocks in enumerate(devices):
    loads = [0.0 if one.retained else float(one.load_s) for one in blocks]
    attention, feedforward = blocks[1], blocks[2]
    times = WindowTimes(
      attention=steps[1] - sums[1],
      feedforward=steps[2] - sums[2],
      reduce=sums[1],
      load_attention=attention.load_s,
      load_feedforward=feedforward.load_s,
    )
    cache = (
      asked.shape.layers * tokens * asked.shares[d]
      * asked.shape.kv_bytes(number_bytes(asked.dtype))
    )  # fmt: skip
    yield {
      "device": asked.graph.devices[d],
      "share": asked.shares[d],
      "tight": layer_window.tight(times),
      "loose": layer_window.loose(times, asked.shape.layers, asked.retain),
      "steady": layer_window.steady(steps, loads, asked.window),
      "least_window": layer_window.least_window(steps, loads),
      "waits_s": run.waits_s[d],
      "blocks": run.peak_blocks[d],
      "weight_bytes": run.peak_bytes[d],
      "cache_bytes": cache,
      "all_bytes": sum(one.nbytes for one in blocks) + cache,
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
    f"{asked.name} in {asked.dtype} on {len(rows)} devices, prompt "
    f"{asked.prompt:,}, windows of {asked.window} blocks{kept}"
  )
  yield ""
  yield (
    f"first token {run.first_s:.4g} s, then {run.token_s:.4g} s a token; "
    + (
      "no device waits for its disk" if run.steady else "devices wait for disk"
    )
  )
  yield ""
  says = lambda x: "yes" if x else "no"
  yield from strategies.markdown(
    ("device",),
    ("share", "tight", "loose", "steady", "least window", "blocks", "weights",
     "cache", "peak", "without a window"),
    [
      (row["device"], f"{row['share']:.3g}", says(row["tight"]),
       says(row["loose"]), says(row["steady"]),
       "none" if row["least_window"] is None else f"{row['least_window']}",
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
  yield NOTE
