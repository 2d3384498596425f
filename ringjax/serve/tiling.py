"""Sizes of the tiles of an engine's calls, and whether a step is one program.

Guarantees: a size follows from the engine's model, options and devices, never
from its requests, so that a request's numbers are the same whatever else a call
holds.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import OptionError
from ringjax.kv.storage.call_tiles import tile_sizes
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention import GroupedQuery
from ringjax.nn.attention_layers.attention_function import DenseFunction
from ringjax.nn.attention_layers.cross_attention import NoCrossAttention
from ringjax.nn.attention_layers.latent import LatentLayer
from ringjax.nn.block import Block
from ringjax.nn.feedforward import (
  DenseAndExpertsLayer,
  ExpertsLayer,
  GatedLayer,
  PlainLayer,
)
from ringjax.nn.linear import Identity, Linear
from ringjax.nn.param import Rules, axis_names
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.stack import keeps
from ringjax.nn.weights.adapted import AdaptedLinear, LowRankSum
from ringjax.nn.weights.block_codes import BlockCodesLinear
from ringjax.nn.weights.coded import Coded8Linear
from ringjax.nn.weights.expert_maps import ExpertAxes
from ringjax.ops.block_product_tpu import BlockCodes
from ringjax.ops.flat_product_tpu import FlatWeight, choose_flat
from ringjax.parallel.call_sharding import on_mesh
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.sparse_prompts import pattern_of_prompts

# Tokens of the smallest tile on a CPU: the product of fewer takes as long.
_CPU_TILE = 16
# Rows of the matrix units of a TPU.
_TPU_TILE = 128
# Names of the maps of attention and of feedforwards without experts.
_MAPS = ("q_down", "q", "kv_down", "k", "v", "o", "gate", "up", "down")
# Maps, mixers and feedforwards that rows in tiles can pass.
_MAP_TYPES = (Linear, Coded8Linear, BlockCodesLinear)
_MIXERS = (GroupedQuery, LatentLayer)
_FEEDFORWARDS = (GatedLayer, PlainLayer, ExpertsLayer, DenseAndExpertsLayer)


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
  drafted: int = 0,
) -> tuple[int, str]:
  """Rows of a tile in which both calls pass products, see `nn.row_tiles`.

  Args:
    model: Model of the engine, with its adapters.
    config: Options of the engine.
    attend: Attention over cached keys.
    platform: Platform of the devices.
    attention_fn: Attention function of the engine, or None.
    drafted: Number of drafted tokens of a row that a call for answers checks.

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
  reason = reason_against_row_tiles(model, config, attend, attention_fn)
  if platform == "tpu" and not reason:
    reason = _reason_of_kernel(model, config, attend, rows, drafted)
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
  if pattern_of_prompts(config.prefill) is not None:
    return f"prefill={config.prefill!r}, whose blocks of queries are of a chunk"
  if model.inputs is not None:
    return "layers that read the ids of all tokens of a call"
  if not all(keeps(layer) for layer in model.config.layers):
    return "layers that read the keys of other layers"
  return ""


def reason_against_row_tiles(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  attention_fn: DenseFunction | None,
) -> str:
  """Reason for which both calls can't pass products together, or ""."""
  if pattern_of_prompts(config.prefill) is not None:
    return f"prefill={config.prefill!r}, by which prompts alone leave keys out"
  if config.one_order:
    return "one_order, by which tokens pass products in tiles of their own"
  if config.prompt_tile:
    return "prompt_tile, by which a call passes each layer tile by tile"
  if config.layer_parts > 1:
    return "layer_parts, which makes several programs of a call for prompts"
  if attention_fn is not None:
    return "an attention_fn, which reads all rows of a call together"
  if reason := _reason_of_mesh(model, config, attend):
    return reason
  if model.stack.placed is not None:
    return "layers whose weights are not on the devices"
  if model.streams is not None:
    return "residual streams, or numbers that a layer hands to the next"
  for block in _blocks(model):
    if reason := _reason_of_layer(block):
      return reason
  for name, module in _maps(model):
    linear = _base(module)
    if type(linear) not in _MAP_TYPES:
      return f"{name}, a map of {type(linear).__name__}"
    if type(linear) is not Linear:
      continue
    if (dtype := linear.weight.get_value().dtype) != model.dtype:
      return f"{name} of {dtype.name} in a model of {model.dtype.name}"
  return ""


def _reason_of_mesh(
  model: Transformer, config: EngineConfig, attend: CachedAttention
) -> str:
  """Reason for which devices can't multiply shards of the weights, or ""."""
  mesh = attend.mesh
  if mesh is None or mesh.size == 1:
    return ""
  if attend.batch_axes(config.rows) or attend.batch_axes(config.pieces):
    return "a mesh axis that shards the rows"
  for block in _blocks(model):
    if reason := _reason_of_experts(block.feedforward, mesh):
      return reason
  for name, module in _maps(model):
    linear = _base(module)
    if type(linear) not in _MAP_TYPES:
      # It is another reason.
      continue
    weight = _parameter(linear)
    array = weight.get_value()
    placed = getattr(array, "sharding", None)
    if not isinstance(placed, NamedSharding):
      continue
    # Others would be sent to other devices in each step.
    by_rules = Rules().sharding(weight, mesh)
    if not placed.is_equivalent_to(by_rules, array.ndim):
      return f"{name} sharded by other rules than the default ones"
  return ""


def _reason_of_experts(feedforward: Any, mesh: Mesh | AbstractMesh) -> str:
  """Reason for which devices can't run shards of a mixture's experts, or ""."""
  if isinstance(feedforward, DenseAndExpertsLayer):
    feedforward = feedforward.sparse
  if not isinstance(feedforward, ExpertsLayer):
    return ""
  axes = ExpertAxes(over=feedforward.over, mesh=mesh)
  if not {*axes.over} <= {*mesh.axis_names}:
    return f"experts over mesh axes {axes.over}, which the engine's has not"
  widths = set()
  for name in feedforward.MAPS:
    map_ = getattr(feedforward, name)
    if map_ is None:
      continue
    if not _is_parameter(map_) and type(map_) not in _MAP_TYPES:
      return f"experts' {name}, a map of {type(map_).__name__}"
    widths.add(frozenset(axes.width(map_, down=name == "down")))
    for parameter in jax.tree.leaves(map_, is_leaf=_is_parameter):
      array = parameter.get_value()
      placed = getattr(array, "sharding", None)
      if not isinstance(placed, NamedSharding):
        continue
      by_rules = NamedSharding(mesh, P(None, *axes.spec(parameter)))
      if not placed.is_equivalent_to(by_rules, array.ndim):
        return f"experts' {name} sharded by other rules than the default ones"
  if len(widths) > 1:
    return "experts of which a mesh axis shards the width of some maps alone"
  if feedforward.spec.out_norm is not None and any(widths):
    return "a norm of the outputs of experts, of which a device has a part"
  return ""


def _is_parameter(x: Any) -> bool:
  """Whether x is a parameter, rather than a module or an array."""
  return hasattr(x, "get_metadata")


def _blocks(model: Transformer) -> list[Block]:
  """Layers of a model, a stack of them for each position of each run."""
  return [block for run in model.stack.blocks for block in run]


def _reason_of_layer(block: Block) -> str:
  """Reason for which rows in tiles can't pass a layer, or ""."""
  other_layer = "layers other than attention and a feedforward"
  if type(block) is not Block:
    return other_layer
  mixer, feedforward = block.attention, block.feedforward
  others = block.inputs, block.low_rank, block.streams
  has_others = any(part is not None for part in others)
  has_cross = type(block.cross) is not NoCrossAttention
  if has_others or has_cross or type(mixer) not in _MIXERS:
    return other_layer
  if isinstance(mixer, LatentLayer) and mixer.spec.index is not None:
    return "latent attention with an index of its keys"
  if isinstance(mixer, GroupedQuery) and mixer.spec.group is not None:
    return "layers that read the keys of other layers"
  if type(feedforward) not in _FEEDFORWARDS:
    return f"a feedforward of {type(feedforward).__name__}"
  if isinstance(feedforward, ExpertsLayer) and feedforward.spec.by_id:
    return "experts that are fixed by the tokens' ids"
  return ""


def _maps(model: Transformer) -> list[tuple[str, Any]]:
  """Name and module of each linear map of the layers, a stack of layers.

  Not the routers of mixtures nor the maps of their experts.
  """
  maps: dict[str, Any] = {}

  def add(part: str, module: Any) -> None:
    for name in _MAPS:
      maps[f"{part}.{name}"] = getattr(module, name, None)

  def add_feedforward(part: str, module: Any) -> None:
    if isinstance(module, DenseAndExpertsLayer):
      add_feedforward(f"{part}.dense", module.dense)
      add_feedforward(f"{part}.sparse", module.sparse)
    elif isinstance(module, ExpertsLayer):
      for name in ("into", "out_of", "shared_gate"):
        maps[f"{part}.{name}"] = getattr(module, name)
      add(f"{part}.shared", module.shared)
    else:
      add(part, module)

  pairs: list[tuple[str, Any]] = []
  for block in _blocks(model):
    maps.clear()
    add("attention", block.attention)
    add_feedforward("feedforward", block.feedforward)
    pairs += [
      (name, map_)
      for name, map_ in maps.items()
      if not isinstance(map_, Identity | None)
    ]
  return pairs


def _base(module: Any) -> Any:
  """The map whose product adapters are added to, or the map."""
  is_sum = isinstance(module, AdaptedLinear)
  if isinstance(module, LowRankSum):
    # An adapter of floats is added to the weight.
    is_sum = type(module.base) is not Linear
  return module.base if is_sum else module


def _reason_of_kernel(
  model: Transformer,
  config: EngineConfig,
  attend: CachedAttention,
  rows: int,
  drafted: int,
) -> str:
  """Reason for which no kernel multiplies tiles of rows by a map, or ""."""
  tokens = config.rows * (1 + drafted), config.pieces * config.piece
  tiles = sum(-(-count // rows) for count in tokens)
  mesh = attend.mesh
  alone = None
  if isinstance(mesh, Mesh):
    # The kernel runs on each device by itself.
    axes = mesh.axis_names
    first_device = mesh.devices.reshape(-1)[:1]
    alone = Mesh(first_device.reshape((1,) * len(axes)), axes)
  for name, module in _maps(model):
    linear = _base(module)
    weight = _shard(linear, mesh)
    is_coded = isinstance(weight, BlockCodes)
    outputs = weight.step.shape[-1:] if is_coded else weight.shape[1:]
    if math.prod(outputs) <= rows:
      # A loop over tiles reads no more of such a weight than of a tile.
      continue
    inner = weight.inputs if is_coded else weight.shape[0]
    x: Any = jax.ShapeDtypeStruct((tiles, rows, inner), model.dtype)
    with on_mesh(alone):
      # A gate's product and that of the map beside it are one kernel.
      is_gate = name.endswith(".gate") and not name.startswith("attention")
      count = 2 if is_gate and module is linear else 1
      choice = choose_flat(x, (weight,) * count)
    if choice.algorithm is None:
      reasons = [reason for _, reason in choice.declined]
      return "; ".join([f"{name} by no kernel", *reasons])
  return ""


def _parameter(linear: Any) -> Any:
  """Floats of a map, or its codes."""
  return linear.weight if type(linear) is Linear else linear.codes


def _shard(linear: Any, mesh: Mesh | AbstractMesh | None) -> FlatWeight:
  """Shapes of one layer of a map's weight, on a device by itself."""
  parameter = _parameter(linear)
  array = parameter.get_value()
  shape = np.array(array.shape)
  if mesh is not None:
    spec = Rules().sharding(parameter, mesh).spec
    for n, entry in enumerate(spec):
      shape[n] //= math.prod(mesh.shape[x] for x in axis_names(entry))
  _, *sizes = shape.tolist()
  make: Any = jax.ShapeDtypeStruct
  if type(linear) is Linear:
    inner = math.prod(sizes[: linear.contracted])
    return make((inner, *sizes[linear.contracted :]), array.dtype)
  is_grouped = type(linear) is BlockCodesLinear
  # Otherwise all inputs are one group, with a step for each output.
  shape = sizes if is_grouped else [1, math.prod(sizes[:-1]), sizes[-1]]
  scales = lambda x: make((shape[0], shape[-1]), x.get_value().dtype)
  has_least = is_grouped and linear.least is not None
  return BlockCodes(
    codes=make(tuple(shape), array.dtype),
    step=scales(linear.step),
    least=scales(linear.least) if has_least else None,
    levels=linear.layout.levels if is_grouped else None,
  )
