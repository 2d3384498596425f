"""Prompts that are read with chosen tiles: refusals, and what is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.ops.attention.tiles.tile_pattern import TilePattern


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTiles:
  """Tiles that one layer computes of a prompt.

  Attributes:
    layer: Number of the layer in the model.
    computed: Part of the tiles of dense attention that is computed; None where
      a prompt is read in chunks, whose tiles are not counted.
    left_out: Part of the attention that is left out, mean over sampled queries
      and heads.
    worst_head: Largest part that a head leaves out, mean over sampled queries.
    by_shard: Number of tiles that each shard of the sequence computes, over
      all heads; empty on one shard, and where shards exchange tokens for heads.
  """

  layer: int
  computed: float | None
  left_out: float
  worst_head: float
  by_shard: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileReport:
  """Tiles that a model computes of a prompt.

  Attributes:
    pattern: Choice of the tiles.
    layers: Tiles of each layer with attention.
    samples: Number of queries of each layer at which the attention that is left
      out was measured.
  """

  pattern: TilePattern
  layers: tuple[LayerTiles, ...]
  samples: int

  @property
  def computed(self) -> float | None:
    """Part of the tiles that is computed, mean over layers; None in chunks."""
    parts = [x.computed for x in self.layers if x.computed is not None]
    return float(np.mean(parts)) if parts else None

  @property
  def by_shard(self) -> tuple[int, ...]:
    """Number of tiles that each shard computes, over all layers and heads."""
    shards = [x.by_shard for x in self.layers if x.by_shard]
    return tuple(int(n) for n in np.sum(shards, 0)) if shards else ()

  @property
  def balance(self) -> float | None:
    """Tiles of the shard with the most over their mean; None on one shard."""
    tiles = self.by_shard
    return float(max(tiles) / np.mean(tiles)) if any(tiles) else None

  @property
  def left_out(self) -> float:
    """Largest part of a layer's attention that is left out."""
    return max(x.left_out for x in self.layers)

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return {
      "pattern": type(self.pattern).__name__,
      **dataclasses.asdict(self.pattern),
      "computed": self.computed,
      "left_out": self.left_out,
      "by_shard": list(self.by_shard),
      "balance": self.balance,
      "samples": self.samples,
      "layers": [dataclasses.asdict(x) for x in self.layers],
    }


def tile_report(
  model: Transformer, pattern: TilePattern, calls: Sequence[Any]
) -> TileReport | None:
  """Report of a prompt, from what its calls recorded; None without attention.

  Args:
    model: Model that read it.
    pattern: Choice of the tiles.
    calls: `Tokens.recorded` of each call.
  """
  layers: list[LayerTiles] = []
  counts: list[int] = []
  for g, run in enumerate(model.stack.runs):
    for repeat in range(run.repeats):
      for position in range(len(run.layers)):
        sums = [call[g][position] for call in calls]
        if sums[0] is None:
          continue
        total = lambda name, found=sums, n=repeat: np.sum(
          [np.asarray(getattr(x, name)[n], np.float64) for x in found], 0
        )
        samples, visible = total("samples"), total("visible")
        left_out = total("left_out") / max(samples, 1)
        chosen = float(total("chosen") / visible) if visible else None
        counts.append(int(samples))
        layers.append(
          LayerTiles(
            layer=run.number(position, repeat),
            computed=chosen,
            left_out=float(np.mean(left_out)),
            worst_head=float(np.max(left_out)),
            by_shard=tuple(int(n) for n in total("by_shard")),
          )
        )
  if not layers:
    return None
  return TileReport(pattern=pattern, layers=tuple(layers), samples=min(counts))


def check_left_out(report: TileReport) -> None:
  """Refuses a prompt of which a layer left out more than the limit.

  Raises:
    OptionError: If the pattern has a limit, and a layer is above it.
  """
  limit = report.pattern.max_left_out
  worst = max(report.layers, key=lambda x: x.left_out)
  if limit is None or worst.left_out <= limit:
    return
  raise OptionError(
    "max_left_out",
    f"{worst.left_out:.4f} of the attention of layer {worst.layer}, left out "
    f"at {report.samples} sampled queries",
    f"at most {limit}",
    "read more tiles, as threshold=0.95 does, or leave max_left_out out; a "
    "session that was given holds the prompt until restart()",
  )


def check_layers(model: Transformer) -> None:
  """Refuses models whose layers choose keys or weigh them by distance.

  Raises:
    OptionError: If a layer has an index, ALiBi slopes or folded positions.
  """
  for number, layer in enumerate(model.config.layers):
    for mixer in layer.mixers:
      spec: Any = mixer
      reading = getattr(spec.cache_shape(1), "reading", None)
      reason = None
      if reading is not None and reading.most is not None:
        keys = f"the {reading.most} keys that {reading.chooser} chooses"
        reason = f"reads {keys}"
      elif getattr(reading, "slopes", None) is not None:
        reason = "has ALiBi slopes"
      elif hasattr(spec, "positions"):
        reason = f"folds positions by {type(spec.positions).__name__}"
      if reason is not None:
        raise OptionError(
          "prefill",
          f"'sparse' for {model.config.family}, whose layer {number} {reason}",
          "layers that read all keys by a rotation or without one",
          "leave prefill= out",
        )
