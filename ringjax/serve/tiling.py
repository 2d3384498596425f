"""Sizes of the tiles of an engine's calls, and whether a step is one program.

Guarantees: a size follows from the engine's model, options and devices, never
from its requests, so that a request's numbers are the same whatever else a call
holds.
"""

from __future__ import annotations

from ringjax.errors import OptionError
from ringjax.kv.storage.call_tiles import tile_sizes
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention_function import DenseFunction
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.stack import keeps
from ringjax.serve.engine_config import EngineConfig

# Tokens of the smallest tile on a CPU: the product of fewer takes as long.
_CPU_TILE = 16


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
    requested = 0 if reason or platform != "cpu" else _CPU_TILE
  if requested and reason:
    raise OptionError(
      "prompt_tile",
      f"{requested}, with {reason}",
      "0: such a call is not cut into tiles",
      "leave prompt_tile out",
    )
  return tile_sizes(requested, config.piece) if requested else ()


def reason_for_two_calls(
  config: EngineConfig, tiles: tuple[int, ...], platform: str
) -> str:
  """Reason for which a step's answers and prompts are two calls, or "".

  Args:
    config: Options of the engine.
    tiles: Sizes of the tiles of prompts.
    platform: Platform of the devices.
  """
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
