"""Sizes of the tiles of an engine's calls, and whether a step is one program.

Guarantees: a size follows from the engine's model, options and devices, never
from its requests, so that a request's numbers are the same whatever else a call
holds.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from ringjax.errors import OptionError
from ringjax.kv.storage.call_tiles import tile_sizes
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention import GroupedQuery
from ringjax.nn.attention_layers.attention_function import DenseFunction
from ringjax.nn.attention_layers.cross_attention import NoCrossAttention
from ringjax.nn.block import Block
from ringjax.nn.feedforward import GatedLayer, PlainLayer
from ringjax.nn.linear import Linear
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.stack import keeps
from ringjax.ops.flat_product_tpu import choose_flat
from ringjax.parallel.call_sharding import on_mesh
from ringjax.serve.engine_config import EngineConfig

# Tokens of the smallest tile on a CPU: the product of fewer takes as long.
_CPU_TILE = 16
# Rows of the matrix units of a TPU.
_TPU_TILE = 128


def prompt_tiles(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  platform: str,
  attention_fn: DenseFunction | None = None,
) -> tuple[int, ...]:
  """Sizes of the tiles of prompts, ascending; () if a call is one tile.

  A call is one tile on accelerators by default: there each tile would read the
  weights of a layer from the device's memory again.

  Raises:
    OptionError: If tiles are requested where a call can't be cut.
  """
  reason = _reason_for_one_tile(model, config, attend, attention_fn)
  requested = config.prompt_tile
  if requested is None:
    default = _CPU_TILE if platform == "cpu" and not config.row_tile else 0
    requested = 0 if reason else default
  if requested and reason:
    raise OptionError(
      "prompt_tile",
      f"{requested}, with {reason}",
      "0: such a call is not cut into tiles",
      "leave prompt_tile out",
    )
  return tile_sizes(requested, config.piece) if requested else ()


def row_tile(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  platform: str,
  attention_fn: DenseFunction | None = None,
) -> tuple[int, str]:
  """Rows of a tile in which both calls pass products, see `nn.row_tiles`.

  Returns:
    (number of rows, ""), or (0, reason).

  Raises:
    OptionError: If such tiles are requested where they can't be used.
  """
  requested = config.row_tile
  if requested == 0:
    return 0, "row_tile=0"
  if requested is None and platform != "tpu":
    return 0, f"a {platform}, on which row_tile is 0"
  rows = _TPU_TILE if requested is None else requested
  reason = _reason_against_row_tiles(model, config, attend, attention_fn)
  if platform == "tpu" and not reason:
    reason = _reason_of_kernel(model, config, attend, rows)
  if requested is None:
    return (0, reason) if reason else (rows, "")
  if reason:
    raise OptionError(
      "row_tile",
      f"{requested}, with {reason}",
      "0: answers and prompts are two calls then",
      "leave row_tile out",
    )
  return requested, ""


def reason_for_two_calls(
  config: EngineConfig,
  tiles: tuple[int, ...],
  platform: str,
  against_rows: str = "",
) -> str:
  """Reason for which a step is two calls where it has no tiles of rows, or "".

  Args:
    config: Options of the engine.
    tiles: Sizes of the tiles of prompts.
    platform: Platform of the devices.
    against_rows: Reason for which there are no tiles of rows, see `row_tile`.
  """
  if platform == "tpu" and not tiles:
    return against_rows
  if platform != "cpu":
    # Both loops read the copy: four passes over the weights in place of two,
    # and three in place of one for a step of answers alone.
    return (
      f"a {platform}, whose compiler copies a layer's weights before a loop "
      "that may skip the layer"
    )
  if not tiles:
    return "a call for prompts of one tile, which takes the time of its room"
  if config.layer_parts > 1:
    return "layer_parts, which makes several programs of a call for prompts"
  if config.speculate is not None:
    return "speculate, whose calls for answers check drafts"
  return ""


def _reason_for_one_tile(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  attention_fn: DenseFunction | None,
) -> str:
  """Reason for which a call for prompts can't be cut into tiles, or ""."""
  if attend.batch_axes(config.pieces):
    return "a mesh axis that shards the rows, each of which is on one device"
  if attention_fn is not None:
    return "an attention_fn, which reads all rows of a call together"
  if model.inputs is not None:
    return "layers that read the ids of all tokens of a call"
  if not all(keeps(layer) for layer in model.config.layers):
    return "layers that read the keys of other layers"
  return ""


def _reason_against_row_tiles(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  attention_fn: DenseFunction | None,
) -> str:
  """Reason for which both calls can't pass products together, or ""."""
  if config.prompt_tile:
    return "prompt_tile, by which a call passes each layer tile by tile"
  if config.layer_parts > 1:
    return "layer_parts, which makes several programs of a call for prompts"
  if config.speculate is not None:
    return "speculate, whose calls for answers check drafts"
  if attention_fn is not None:
    return "an attention_fn, which reads all rows of a call together"
  if attend.mesh is not None and attend.mesh.size > 1:
    return "a mesh of several devices"
  if model.stack.placed is not None:
    return "layers whose weights are not on the devices"
  blocks = [block for run in model.stack.blocks for block in run]
  if model.streams is not None or not all(map(_is_dense, blocks)):
    return "layers other than attention and a feedforward without experts"
  for name, module in _maps(model):
    if type(module) is not Linear:
      return f"{name}, a map of {type(module).__name__}"
    if (dtype := module.weight.get_value().dtype) != model.dtype:
      return f"{name} of {dtype.name} in a model of {model.dtype.name}"
  return ""


def _is_dense(block: Block) -> bool:
  """Whether a layer is attention to its own keys, and a dense feedforward."""
  if type(block) is not Block or type(block.attention) is not GroupedQuery:
    return False
  others = block.inputs, block.low_rank, block.streams
  return (
    block.attention.spec.group is None
    and type(block.feedforward) in (GatedLayer, PlainLayer)
    and type(block.cross) is NoCrossAttention
    and all(part is None for part in others)
  )


def _maps(model: Transformer) -> list[tuple[str, Any]]:
  """Name and module of each linear map of dense layers, a stack of layers."""
  names = {
    "attention": ("q", "k", "v", "o", "gate"),
    "feedforward": ("gate", "up", "down"),
  }
  blocks = [block for run in model.stack.blocks for block in run]
  parts = [
    (f"{part}.{name}", getattr(getattr(block, part), name, None))
    for block in blocks
    for part, part_names in names.items()
    for name in part_names
  ]
  return [(name, module) for name, module in parts if module is not None]


def _reason_of_kernel(
  model: Transformer, config: EngineConfig, attend: CachedAttention, rows: int
) -> str:
  """Reason for which no kernel multiplies tiles of rows by a map, or ""."""
  tiles = -(-config.rows // rows) + -(-config.pieces * config.piece // rows)
  for name, linear in _maps(model):
    weight = linear.weight.get_value()
    first = 1 + linear.contracted
    inner, outputs = math.prod(weight.shape[1:first]), weight.shape[first:]
    spec: Any = functools.partial(jax.ShapeDtypeStruct, dtype=weight.dtype)
    with on_mesh(attend.mesh):
      # A gate's product and that of the map beside it are one kernel.
      count = 2 if name == "feedforward.gate" else 1
      choice = choose_flat(
        spec((tiles, rows, inner)), (spec((inner, *outputs)),) * count
      )
    if choice.algorithm is None:
      reasons = [reason for _, reason in choice.declined]
      return "; ".join([f"{name} by no kernel", *reasons])
  return ""
