"""Loads and saves models as Hugging Face folders.

Memory: `load` has some tensors at a time on the host, next to the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from ringjax import fetched_models
from ringjax.checks import FLOATS, float_dtype, local_path, one_of
from ringjax.errors import (
  CheckpointMismatchError,
  MemoryEstimateError,
  OptionError,
)
from ringjax.kv.base import DEVICE, DISK, IN_HOST
from ringjax.models import cepe
from ringjax.models.contents import (
  Contents,
  contents,
  read_source,
  text_config,
)
from ringjax.models.families import Family
from ringjax.models.gguf.gguf_folder import GgufFolder, open_model
from ringjax.models.gguf.stored import stored_tensor, with_stored_codes
from ringjax.models.heads.added_layer import check_family, refuse_head
from ringjax.models.hf.config_reader import error
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.names import Reshape
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.packings import packing
from ringjax.models.hf.save import write
from ringjax.models.hf.tensors import (
  CheckpointTensor,
  checkpoint_tensors,
  copied_tensors,
  parameters,
)
from ringjax.models.origin import origin_of
from ringjax.models.rope_scaling import ContextExtension, read_extended
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.models.weights.coded_weights import refuse_codes
from ringjax.models.weights.expert_loading import (
  ExpertGroup,
  expert_groups,
  put_group,
  read_groups,
)
from ringjax.models.weights.streaming import Streaming, check_host, planned
from ringjax.models.weights.weight_placement import (
  PlacementConfig,
  WeightPlacement,
  refuse_placed,
)
from ringjax.nn.feedforward import ExpertsLayer
from ringjax.nn.param import Rules, axis_names
from ringjax.nn.weights.block_codes import with_shards
from ringjax.parallel import joint_outcome
from ringjax.parallel.memory import device_free_bytes, host_free_bytes
from ringjax.parallel.mesh import automatic, entering, with_shardings
from ringjax.paths import as_path

# A module, of arrays or of shapes.
M = TypeVar("M", bound=nnx.Module)

# Other forms than floats that weights may be kept in.
WEIGHTS = ("stored",)
# Path of the parameter that is a tied head.
EMBEDDING = "embed.weight"
# Bytes of a float32, and the fraction of free memory up to which weights are
# widened to float32 unasked: keys and activations need the rest.
_WIDE, _OF_FREE = 4, 0.5


def create(
  config: Mapping[str, Any] | str,
  *,
  seed: int = 0,
  dtype: DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
  rules: Rules | None = None,
  scan: bool = True,
  predict_layers: bool = False,
) -> Transformer:
  """Makes a model with random weights.

  Args:
    config: Content of a config.json, or the name of a preset.
    seed: Seed of the weights.
    dtype: Dtype of the weights.
    mesh: Mesh of the weights; default: one device.
    rules: Rules that shard the weights over the mesh.
    scan: Whether equal layers run as one loop.
    predict_layers: Whether it has a layer that predicts one token further, see
      `load`.

  Returns:
    The model.

  Raises:
    ConfigError: See `read_config`.
    OptionError: If rules are given without a mesh, or `predict_layers` of a
      family that has none here.
    MeshError: If a rule names an axis that the mesh does not have.
    MemoryEstimateError: If the weights do not fit.
  """
  from ringjax.models.presets import preset

  mesh = _checked_mesh(mesh, rules)
  content = preset(config) if isinstance(config, str) else config
  parsed, source, family = read_source(content)
  if predict_layers:
    check_family(family)
    assert family.predict is not None
    parsed = family.predict.with_layer(parsed)
    source = source | {family.predict.key: 1}
  dtype = float_dtype("dtype", dtype)

  def build() -> Transformer:
    model = Transformer(parsed, nnx.Rngs(seed), scan=scan)
    model = _with_source(cast(model, dtype), source)
    return _with_axes(model, mesh, rules)

  abstract = jax.eval_shape(build)
  shardings = None if mesh is None else _shardings(abstract, mesh, rules)
  # In a trace nothing is allocated, so memory is not checked.
  if not isinstance(jnp.zeros(()), jax.core.Tracer):
    params = parameters(abstract)
    check_memory(params, _by_path(params, mesh, rules), mesh)
  if shardings is None:
    return jax.jit(build)()
  return jax.jit(build, out_shardings=shardings)()


def place(
  model: Transformer, mesh: Mesh, rules: Rules | None = None
) -> Transformer:
  """Moves a model onto a mesh.

  Raises:
    OptionError: If not all layers of the model are on the devices.
  """
  refuse_placed(model, "move it", "load it with mesh= and placement=")
  mesh = _checked_mesh(automatic(mesh), rules)
  model = _with_axes(model, mesh, rules)
  return jax.device_put(model, _shardings(model, mesh, rules))


def _with_axes(model: M, mesh: Mesh | None, rules: Rules | None) -> M:
  """The model that knows which mesh axes shard its experts and its codes.

  In a trace no array knows its sharding.
  """
  rules_of_mesh = rules or Rules()
  result = with_shards(
    model,
    lambda p: None if mesh is None else rules_of_mesh.sharding(p, mesh).spec,
  )
  for _, module in nnx.iter_modules(result):
    if isinstance(module, ExpertsLayer):
      module.over = (
        ()
        if mesh is None
        else rules_of_mesh.over_experts(module.spec.experts, mesh)
      )
  return result


def _shardings(model: Transformer, mesh: Mesh, rules: Rules | None) -> Any:
  """The model with shardings in place of its parameters."""
  rules = rules or Rules()
  return jax.tree.map(
    lambda p: p.replace(rules.sharding(p, mesh)),
    model,
    is_leaf=lambda x: isinstance(x, nnx.Variable),
  )


def _by_path(
  params: Mapping[str, nnx.Variable], mesh: Mesh | None, rules: Rules | None
) -> dict[str, Any]:
  """The sharding of each parameter by its path; None without a mesh."""
  if mesh is None:
    return dict.fromkeys(params)
  rules = rules or Rules()
  return {path: rules.sharding(p, mesh) for path, p in params.items()}


def _checked_mesh(mesh: Mesh | None, rules: Rules | None) -> Any:
  """The mesh of a model; refuses rules that it can't follow."""
  if mesh is not None:
    mesh = automatic(mesh)
    (rules or Rules()).check(mesh)
  elif rules is not None:
    raise OptionError(
      "rules", "rules without a mesh", "both or neither", "pass mesh="
    )
  return mesh


def abstract(
  config: Mapping[str, Any] | str,
  *,
  dtype: DTypeLike = jnp.bfloat16,
  mesh: Mesh | None = None,
  rules: Rules | None = None,
  predict_layers: bool = False,
) -> Transformer:
  """Makes a model of shapes without weights, to plan with; see `create`."""
  mesh = _checked_mesh(mesh, rules)
  form = jax.eval_shape(
    lambda: create(config, dtype=dtype, predict_layers=predict_layers)
  )
  if mesh is None:
    return form
  return abstract_on(form, mesh, rules)


def abstract_on(
  form: Transformer, mesh: Mesh, rules: Rules | None = None
) -> Transformer:
  """Shards a model of shapes on a mesh."""
  form = _with_axes(form, mesh, rules)
  return with_shardings(form, _shardings(form, mesh, rules))


def cast(model: M, dtype: DTypeLike) -> M:
  """Casts a module to another dtype, except parameters that stay float32.

  Raises:
    OptionError: If not all layers of the model are on the devices.
  """
  refuse_placed(model, "cast it", "load it with dtype= and placement=")

  def cast_parameter(p: nnx.Variable) -> nnx.Variable:
    keeps_float32 = p.get_metadata()["wide"]
    return p if keeps_float32 else p.replace(p.get_value().astype(dtype))

  result = jax.tree.map(
    cast_parameter, model, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  if isinstance(result, Transformer):
    result.saved_dtype = None
  return result


def _with_source(model: Transformer, source: Mapping[str, Any]) -> Transformer:
  model.source = json.dumps(source, sort_keys=True, allow_nan=True)
  return model


@entering(lambda *_, mesh=None, **__: mesh)
def load(
  path: str | os.PathLike[str],
  *,
  mesh: Mesh | None = None,
  rules: Rules | None = None,
  dtype: DTypeLike | None = None,
  scan: bool = True,
  strict: bool = True,
  placement: PlacementConfig | WeightPlacement | str | None = None,
  memory: int | str | None = None,
  beside: Callable[..., Mapping[str, Mapping[str, int]]] | None = None,
  weights: str | None = None,
  rope_scaling: ContextExtension | str | None = None,
  predict_layers: bool = False,
  revision: str | None = None,
) -> Transformer:
  """Reads a Hugging Face folder, or a GGUF file, into sharded arrays.

  Every process reads the bytes that its devices need, some tensors at a time.
  Weights of eight bits or fewer (`hf.packings` lists the formats) become floats
  on the devices. For a model of text and images only the text model is read. A
  folder with an encoder next to its decoder (`ringjax.models.cepe`) loads both.

  Args:
    path: Folder with `config.json` and `*.safetensors`, also as an address,
      gs://bucket/folder or s3://bucket/folder; a GGUF file, a part of a split
      one, or a folder with one; the name of a model that
      `python -m ringjax.launch.fetch` has downloaded; or a name on the Hugging
      Face Hub, "Qwen/Qwen3-8B", whose files are downloaded to the hub's cache.
    mesh: Mesh of the weights; default: one device.
    rules: Rules from axes of the weights to mesh axes; default `Rules()`,
      which shards heads, feedforward and vocabulary over "model". Only with
      a mesh.
    dtype: Dtype of the weights and of the computation; default: the
      checkpoint's. On one CPU device a checkpoint of 16 bits is kept in float32
      if that takes at most half of the free memory, and saved as it was: XLA's
      products on CPUs convert 16-bit weights again for every token.
    scan: Whether equal layers are one loop over stacked weights. Without it
      the program grows with the layers, and so does the time to compile it, but
      no step copies weights out of a stack. On a CPU a row of float32 weights
      then decodes 1.6 times as fast; each new length of a prompt compiles for
      longer, and an engine, whose calls have many rows, gains nothing.
    strict: Whether an unread key of config.json is an error if it may change
      the computation: if the family's class in transformers knows it, or the
      folder has code that may use it. If False, such keys are named by a
      warning; keys that transformers ignores always are.
    placement: Memory of the layers, a `Placement` or a text such as
      "device=.2,host=.5,disk=.3", "host" or "disk"; default: all on the
      devices. Other layers are fetched when they run: from the host's memory,
      or from these files, which must not change. Of an
      `rj.infer.PlacementConfig` its weights and memory are read.
    memory: Bytes that weights may take on a device, as a number or as "6GiB":
      as many layers as fit are there, the others in the host's memory as far
      as they fit and `placement` does not say otherwise, the rest on disk.
      It is for weights, including layers that pass through: keys and
      activations need more, unless `beside` says how much that is.
    beside: Largest call that `memory` must have room for, too, an
      `rj.infer.CallMemory`; or any function of (model, mesh) that returns bytes
      by memory ("device", "host", "disk") and by purpose. Its need of host
      memory is checked, too.
    weights: "stored" keeps linear maps of a GGUF file as the codes of the
      file, which have the same values; None: they become floats.
    rope_scaling: Scaling of the rotary embedding for a longer context than the
      model was trained for, a `ContextExtension` or a text such as
      "yarn:factor=4"; see `ringjax.models.rope_scaling`. `save` writes it.
    predict_layers: Whether to read the layer that predicts one token further
      (multi-token prediction), which drafts as `speculate="mtp"` and can be
      trained. Of several the first one is read. Logits are the same with it.
    revision: Branch, tag or commit of a name on the hub, also as
      "Qwen/Qwen3-8B@main".

  Returns:
    The model.

  Raises:
    ConfigError: If the architecture is unknown, the config contradictory, or
      `rope_scaling` of another kind than the model's own, or for a model
      without RoPE.
    CheckpointFormatError: If a file is broken.
    CheckpointMismatchError: If tensors are missing, too many, of a wrong
      shape or not finite, or a tied head differs from the embedding.
    UnsafeFormatError: If all weights are in files that would run code.
    MemoryEstimateError: If the weights do not fit, not where `placement` says,
      or not next to the call; before any of them is read.
    OptionError: If rules come without a mesh; if the placement is unknown or
      the folder has an encoder; if stored weights are asked of a folder or file
      that is not a quantised GGUF file; if `rope_scaling` is unknown; if the
      hub has no such model, or not for this user; if `predict_layers` are asked
      of a folder without them, or of a family that has none here.
    MeshError: If a rule names an axis that the mesh does not have.
  """
  path = fetched_models.resolve(path, revision=revision)
  if isinstance(placement, PlacementConfig):
    if placement.memory is not None and memory is not None:
      raise OptionError(
        "memory",
        f"{memory!r} beside that of the PlacementConfig",
        "one of them",
        "leave one out",
      )
    memory = placement.memory if memory is None else memory
    placement = placement.weights
  if weights is not None:
    one_of("weights", weights, WEIGHTS)
  mesh = _checked_mesh(mesh, rules)
  ranks = joint_outcome.processes_of(mesh)
  streaming, streamed, in_host = None, [], set()
  call: dict[str, int] = {}
  # A file that one process lacks is an error of all processes.
  with joint_outcome.failing_together(ranks):
    folder = open_model(path)
    config, source, family = read_extended(
      folder.config, rope_scaling, strict=strict
    )
    if predict_layers:
      config = with_predict_layer(config, family, folder)
    stored = stored_dtype(folder, source) if dtype is None else dtype
    shapes_in = lambda dtype: _with_axes(
      jax.eval_shape(
        lambda: _with_source(
          cast(Transformer(config, nnx.Rngs(0), scan=scan), dtype), source
        )
      ),
      mesh,
      rules,
    )
    empty = shapes_in(float_dtype("dtype", stored))
    if dtype is None and placement is None and memory is None:
      widened = wide_on_cpu(parameters(empty), empty.dtype, mesh)
      if widened:
        empty = shapes_in(jnp.float32)
        empty.saved_dtype = jnp.dtype(stored).name
    model_contents = contents(folder, family, empty, source)
    empty.origin = origin_of(
      model_contents,
      whole=folder.config.get("model_type") in family.types,
      packed=packing(folder.config) is not None,
    )
    if isinstance(folder, GgufFolder):
      folder = folder.with_stored()
      model_contents = dataclasses.replace(model_contents, folder=folder)
    if weights is not None:
      if not isinstance(folder, GgufFolder):
        raise OptionError(
          "weights", f"{weights!r}, of a folder of safetensors", "a GGUF file",
          "leave it out, or take rj.models.with_coded_weights",
        )  # fmt: skip
      model_contents, empty = with_stored_codes(model_contents, empty)
      empty = _with_axes(empty, mesh, rules)
    shardings = _by_path(parameters(empty), mesh, rules)
    if beside is not None:
      if memory is None:
        raise OptionError(
          "beside",
          "a call without memory",
          "the bytes that weights and call may have",
          "pass memory= too, or leave it out",
        )
      needs = beside(empty, mesh)
      call = {tier: sum(x.values()) for tier, x in needs.items()}
  tiers = (DEVICE,)
  if placement is not None or memory is not None:
    # `planned` exchanges between processes by itself.
    tiers = planned(empty, shardings, placement, memory, call)
  with joint_outcome.failing_together(ranks):
    if set(tiers) != {DEVICE}:
      _refuse_encoder(path)
      if DISK in tiers:
        # Layers on disk are read again for each call of the model.
        local_path("placement with layers on disk", path)
      streaming = Streaming(empty, tiers, mesh, shardings)
      empty = streaming.empty
      pairs = [streaming.placed(t) for t in model_contents.tensors]
      streamed = [t for tier, t in pairs if tier == DISK]
      if isinstance(folder, GgufFolder):
        streamed = [stored_tensor(folder, t) for t in streamed]
      in_host |= {t.name for tier, t in pairs if tier == IN_HOST}
      loaded_tensors = [t for tier, t in pairs if tier != DISK]
      model_contents = dataclasses.replace(
        model_contents, tensors=loaded_tensors
      )
    params = parameters(empty)
    shardings = _by_path(params, mesh, rules)
    check_memory(params, shardings, mesh)
    if streaming is not None or call:
      hosted = 0 if streaming is None else streaming.host_bytes
      check_host(hosted, call.get(IN_HOST, 0))
  device_targets = lambda t: _targets(t, params, shardings, mesh)

  def to_host(t: CheckpointTensor, x: tuple[Any, ...]) -> bool:
    hosts = streaming is not None and t.name in in_host
    if hosts:
      streaming.host(t, x)
    return hosts

  with joint_outcome.failing_together(ranks):
    host = None if streaming is None else to_host
    arrays = read_parameters(model_contents, params, shardings, mesh, host)
    check_heads(folder, model_contents.heads, arrays[EMBEDDING])
    for name, parameter in model_contents.copies.items():
      weight = arrays[parameter]
      check_copy(folder, name, weight, turned=parameter != EMBEDDING)
    model = with_arrays(empty, arrays)
    if streaming is not None:
      model = streaming.finish(model, folder, streamed, device_targets)
    else:
      model = cepe.attached(path, model, rules)
  return model


def with_predict_layer(
  config: TransformerConfig, family: Family, folder: Folder
) -> TransformerConfig:
  """A config with the layer that predicts one token further.

  Raises:
    OptionError: If the family has none here, or the folder has none.
  """
  if isinstance(folder, GgufFolder):
    raise OptionError(
      "predict_layers", "True, for a GGUF file", "a folder of safetensors",
      "leave predict_layers out",
    )  # fmt: skip
  check_family(family)
  assert family.predict is not None
  return family.predict.with_layer(config, folder.tensors)


def read_parameters(
  model_contents: Contents,
  params: dict[str, Any],
  shardings: dict[str, Any],
  mesh: Mesh | None = None,
  to_host: Callable[[CheckpointTensor, tuple[Any, ...]], bool] | None = None,
) -> dict[str, Shaped[Array, " ..."]]:
  """Reads tensors into arrays of parameters, some at a time.

  A tensor that is all of a parameter, as it is stored, becomes its array: the
  largest ones, embeddings, are on the devices once. Tensors of sharded experts
  are read by the processes of their shards alone.

  Args:
    model_contents: Folder, and its tensors to read.
    params: Parameters by their paths.
    shardings: Sharding of each parameter; None on one device.
    mesh: Mesh of the shardings.
    to_host: Called with each tensor that was read and the arrays of its pieces;
      True if it has taken them.

  Returns:
    The array of each parameter, by its path.
  """
  whole_tensors = {
    t.targets[0][0]: t.name for t in model_contents.tensors if _is_whole(t)
  }
  parts = [path for path in params if path not in whole_tensors]
  shapes = tuple(
    (params[path].shape, jnp.dtype(params[path].dtype).name) for path in parts
  )
  constraints = None if mesh is None else tuple(shardings[p] for p in parts)
  zeros = _zeros(shapes, constraints)
  arrays = dict(zip(parts, zeros, strict=True))
  del zeros
  groups: list[ExpertGroup] = []
  if to_host is None:
    groups, model_contents = expert_groups(
      model_contents, params, shardings, mesh
    )
  targets = lambda t: _targets(t, params, shardings, mesh)
  for group, x in read_groups(groups, model_contents, targets):
    first = group.tensors[0]
    if isinstance(first.form, Packed):
      check_unpacked_experts(group, x, arrays[group.paths[0]].dtype)
    new = put_group(group, arrays, x, shardings)
    arrays.update(zip(group.paths, jax.block_until_ready(new), strict=True))
  for t, x in model_contents.read(targets):
    paths, indices = zip(*t.targets, strict=True)
    packed = isinstance(t.form, Packed)
    if packed:
      check_unpacked(t, x, arrays[paths[0]].dtype)
    if to_host is not None and to_host(t, x):
      continue
    if whole_tensors.get(paths[0]) == t.name:
      sharding = shardings[paths[0]]
      arrays[paths[0]] = (
        x[0] if sharding is None else jax.device_put(x[0], sharding)
      )
      continue
    put = _put(
      t.form,
      tuple(shardings[path] for path in paths),
      tuple(arrays[path] for path in paths),
      x if packed else x[0],
      indices,
    )
    # Without this, ever more tensors would wait in memory to be put.
    arrays.update(zip(paths, jax.block_until_ready(put), strict=True))
  return {path: arrays[path] for path in params}


def _is_whole(t: CheckpointTensor) -> bool:
  """Whether a tensor is all of one parameter, in its own shape."""
  form = t.form
  return (
    isinstance(form, Reshape)
    and form.shape == form.stored
    and [index for _, index in t.targets] == [()]
  )


def with_arrays(
  empty: Transformer, arrays: Mapping[str, Shaped[Array, " ..."]]
) -> Transformer:
  """A model of shapes with its parameters filled, by their paths."""
  flat, tree = jax.tree.flatten(
    empty, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  paths = parameters(empty)
  filled = [p.replace(arrays[k]) for k, p in zip(paths, flat, strict=True)]
  return jax.tree.unflatten(tree, filled)


def _refuse_encoder(path: str | os.PathLike[str]) -> None:
  if (as_path(path) / cepe.CONFIG).exists():
    raise OptionError(
      "placement",
      "a folder with an encoder beside its decoder",
      "a decoder alone",
      "leave placement= and memory= out",
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(
  shapes: tuple[tuple[tuple[int, ...], str], ...],
  shardings: tuple[Any, ...] | None,
) -> tuple[jax.Array, ...]:
  """Zero arrays to fill, by one program for all models of a shape."""
  arrays = tuple(jnp.zeros(shape, dtype) for shape, dtype in shapes)
  if shardings is None:
    return arrays
  return jax.lax.with_sharding_constraint(arrays, shardings)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def _put(
  form: Any,
  shardings: tuple[Any, ...],
  leaves: tuple[jax.Array, ...],
  x: Any,
  indices: tuple[tuple[Any, ...], ...],
) -> tuple[jax.Array, ...]:
  """Puts the pieces of a tensor into their parameters."""
  updated = []
  for piece, leaf, index, sharding in zip(
    form.split(x), leaves, indices, shardings, strict=True
  ):
    piece = piece.astype(leaf.dtype)[(None,) * len(index)]
    start = [jnp.asarray(i, jnp.int32) for i in index]
    start += [jnp.int32(0)] * (leaf.ndim - len(index))
    leaf = lax.dynamic_update_slice(leaf, piece, start)
    if sharding is not None:
      leaf = lax.with_sharding_constraint(leaf, sharding)
    updated.append(leaf)
  return tuple(updated)


def _targets(
  tensor: CheckpointTensor,
  params: dict[str, Any],
  shardings: dict[str, Any],
  mesh: Mesh | None,
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes, dtypes and shardings of a tensor's pieces on the devices."""
  path, index = tensor.targets[0]
  value = params[path].get_value()
  targets: dict[str, jax.ShapeDtypeStruct] = {}
  for piece in tensor.pieces:
    sharding = None
    if mesh is not None:
      axes = tuple(shardings[path].spec)
      axes += (None,) * (value.ndim - len(axes))
      cuts = tensor.form.cuts(axes[len(index) :])
      spec = [None if a is None else cuts[a] for a in piece.axes]
      for i, n in enumerate(piece.shape):
        if n % math.prod(mesh.shape[a] for a in axis_names(spec[i])):
          spec[i] = None
      sharding = NamedSharding(mesh, P(*spec))
    targets[piece.name] = jax.ShapeDtypeStruct(
      piece.shape, piece.dtype or value.dtype, sharding=sharding
    )
  return targets


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sound(form: Any, dtype: DTypeLike, x: tuple[jax.Array, ...]) -> jax.Array:
  return jnp.isfinite(form.unpack(*x).astype(dtype)).all()


def check_unpacked(
  tensor: CheckpointTensor,
  x: tuple[Shaped[Array, " ..."], ...],
  dtype: DTypeLike,
) -> None:
  """Refuses codes and scales whose product is not finite in a dtype."""
  dtype = _unpacked_dtype(dtype)
  if not _sound(tensor.form, dtype, x):
    _refuse_not_finite(tensor, dtype)


def check_unpacked_experts(
  group: ExpertGroup, x: tuple[Shaped[Array, " ..."], ...], dtype: DTypeLike
) -> None:
  """Refuses codes and scales of a group whose product is not finite."""
  dtype = _unpacked_dtype(dtype)
  mesh: Any = x[0].sharding
  sound = jax.device_get(
    _sound_experts(group.tensors[0].form, dtype, mesh.mesh, x)
  )
  for tensor, is_sound in zip(group.tensors, sound, strict=True):
    if not is_sound:
      _refuse_not_finite(tensor, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sound_experts(
  form: Any, dtype: DTypeLike, mesh: Mesh, x: tuple[jax.Array, ...]
) -> jax.Array:
  is_sound = lambda *x: jnp.isfinite(form.unpack(*x).astype(dtype)).all()
  sound = jax.vmap(is_sound)(*x)
  # Every process reads the answer.
  return lax.with_sharding_constraint(sound, NamedSharding(mesh, P()))


def _unpacked_dtype(dtype: DTypeLike) -> Any:
  # Parameters that stay codes are computed with in float32.
  floats = jnp.issubdtype(dtype, jnp.floating)
  return jnp.dtype(dtype if floats else jnp.float32)


def _refuse_not_finite(tensor: CheckpointTensor, dtype: Any) -> None:
  raise CheckpointMismatchError(
    tensor.name,
    f"codes and scales that are not finite as {dtype}",
    "finite values",
    "download the file again, or take a wider dtype",
  )


def check_heads(
  folder: Folder, heads: tuple[str, ...], embedding: Float[Array, "V D"]
) -> None:
  """Refuses a stored head that differs from the embedding it is tied to.

  Some writers store a tied embedding twice; others forget to say that a head
  was trained separately.
  """
  like = jax.ShapeDtypeStruct(
    embedding.shape, embedding.dtype, sharding=embedding.sharding
  )
  for name in heads:
    (head,) = folder.read({name: like}).values()
    if not _equal(head, embedding):
      raise CheckpointMismatchError(
        name,
        "other numbers than the embedding's",
        "the same, as tie_word_embeddings says",
        "set tie_word_embeddings to false in config.json, or remove it",
      )


_equal = jax.jit(jnp.array_equal)
_equal_to_transposed = jax.jit(lambda x, y: jnp.array_equal(x, y.T))


def check_copy(
  folder: Folder, name: str, weight: Float[Array, "_ _"], *, turned: bool
) -> None:
  """Refuses a copy of the embedding or the head that differs from it.

  Layers that predict further tokens may be stored with copies.

  Args:
    folder: Folder of the copy.
    name: Name of the copy.
    weight: The model's own weight.
    turned: Whether the weight is the transpose of what is stored.
  """
  shape = tuple(folder.tensors[name].shape)
  sharding = weight.sharding
  if turned and isinstance(sharding, NamedSharding):
    rows, columns = (*sharding.spec, None, None)[:2]
    sharding = NamedSharding(sharding.mesh, P(columns, rows))
  like = jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)
  equal: Any = shape == (weight.shape[::-1] if turned else weight.shape)
  if equal:
    (copied,) = folder.read({name: like}).values()
    equal = (_equal_to_transposed if turned else _equal)(copied, weight)
  if not equal:
    raise CheckpointMismatchError(
      name,
      "other numbers than the model's own",
      "a copy of the model's embedding or head",
      "leave predict_layers out: layers with heads of their own are not read",
    )


def _on_one_cpu(mesh: Mesh | None) -> bool:
  devices = jax.local_devices()[:1] if mesh is None else [*mesh.devices.flat]
  return len(devices) == 1 and devices[0].platform == "cpu"


def wide_on_cpu(
  params: Mapping[str, nnx.Variable], dtype: DTypeLike, mesh: Mesh | None = None
) -> bool:
  """Whether weights of 16 bits should be kept in float32.

  Where they don't fit, a warning says that they will be slow.
  """
  if jnp.dtype(dtype).itemsize != 2 or not _on_one_cpu(mesh):
    return False
  count = sum(p.get_value().size for p in params.values())
  free = host_free_bytes()
  if free is None or _WIDE * count <= _OF_FREE * free:
    return True
  warnings.warn(
    f"weights stay in {dtype}, which is slow on a CPU: in float32 they "
    f"take {_WIDE * count:,} bytes, more than half of the {free:,} that are "
    'free; pass dtype="float32" all the same, or go on with '
    "rj.models.with_coded_weights(model, bits=8)",
    RuntimeWarning,
    stacklevel=4,
  )
  return False


def stored_dtype(folder: Folder, source: Mapping[str, Any]) -> str:
  """Dtype that config.json states, or else that of the largest plain tensor."""
  name = source.get("dtype") or source.get("torch_dtype")
  if name is None:
    floats = [t for t in folder.tensors.values() if str(t.dtype) in FLOATS]
    largest = max(floats or folder.tensors.values(), key=lambda t: t.nbytes)
    name = str(largest.dtype)
  if name not in FLOATS:
    raise error("dtype", name, f"one of {', '.join(FLOATS)}", "pass dtype=")
  return name


def check_memory(
  params: dict[str, Any], shardings: dict[str, Any], mesh: Mesh | None
) -> None:
  """Refuses weights that do not fit, before any of them is allocated."""
  per_device = 0
  for path, p in params.items():
    shape = p.get_value().shape
    if shardings[path] is not None:
      shape = shardings[path].shard_shape(shape)
    per_device += math.prod(shape) * p.get_value().dtype.itemsize
  devices = jax.local_devices() if mesh is None else mesh.local_devices
  device = devices[0]
  count = 1 if mesh is None else len(devices)
  free = device_free_bytes(device, count)
  if free is not None and per_device > free:
    raise MemoryEstimateError(
      "weights",
      f"{per_device:,} bytes on each of {count} device(s)",
      f"at most the {free:,} that are free there",
      "pass dtype=jnp.bfloat16, or a mesh with a larger 'model' axis",
    )


@entering(lambda model, *_, **__: model.mesh)
def save(
  model: Transformer,
  path: str | os.PathLike[str],
  *,
  max_shard_bytes: int = 5_000_000_000,
  overwrite: bool = False,
) -> None:
  """Writes a model as a folder that `load` and transformers read.

  Files next to the weights of the folder that it was loaded from (tokenizer,
  chat template, ...) are copied, and so are the tensors that `load` does not
  use, if the model's own weights are unchanged; otherwise these are left out,
  with a warning, and the config lists no layers that predict further tokens
  but the one that the model has.

  Args:
    model: Model by `load` or `create`.
    path: Folder that does not exist yet, or its address.
    max_shard_bytes: Largest size of one file, in bytes.
    overwrite: Whether to replace an existing folder.

  Raises:
    OptionError: If the folder exists, the model has an EAGLE-3 head, or not all
      layers of the model are on the devices: its folder has them.
    CheckpointWriteError: If it cannot be written: no permission, a full disk.
    StorageError: If objects of an address cannot be written.
  """
  refuse_placed(model, "save it", "copy the folder that it was loaded from")
  refuse_codes(model, "save it")
  refuse_head(model, "save it")
  model, beside = cepe.split(model)
  source = json.loads(model.source)
  _, family = text_config(source)
  params = parameters(model)
  source.pop("torch_dtype", None)
  dtype = jnp.dtype(model.saved_dtype or model.dtype)
  source["dtype"] = dtype.name
  origin = model.origin

  def value(path: str, index: tuple[int, ...]) -> jax.Array:
    p = params[path]
    weight = p.get_value()[index]
    return weight if p.get_metadata()["wide"] else weight.astype(dtype)

  # Packed weights are written as plain floats.
  tensors: list[Any] = checkpoint_tensors(
    model, family.tensor_names(model.config)
  )
  arrays = lambda: (
    (t.name, t.form.join(tuple(value(*target) for target in t.targets)))
    for t in tensors
  )
  copies = origin.copies if model.config.predicts is not None else {}
  tensors += copied_tensors(tensors, copies, tied=model.config.tied)
  origin_tensors = origin.kept_tensors(arrays, set(copies))

  def write_other_files(folder: pathlib.Path) -> None:
    origin.copy_files(folder, as_path(path))
    beside(folder)

  write(
    path,
    origin.config(
      source, origin_tensors, int(model.config.predicts is not None)
    ),
    itertools.chain(arrays(), origin.stored(origin_tensors)),
    max_shard_bytes=max_shard_bytes,
    overwrite=overwrite,
    beside=write_other_files,
  )
