"""Loads and saves models as Hugging Face folders.

Memory: `load` has some tensors at a time on the host, beside the parameters.
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
from ringjax.checks import FLOATS, float_dtype, one_of
from ringjax.errors import (
  CheckpointMismatchError,
  MemoryEstimateError,
  OptionError,
)
from ringjax.kv.base import DEVICE, DISK, IN_HOST
from ringjax.models import cepe
from ringjax.models.coded_weights import refuse_codes
from ringjax.models.contents import contents, read_source, text_config
from ringjax.models.gguf.gguf_folder import GgufFolder, open_model
from ringjax.models.gguf.stored import stored_tensor, with_stored_codes
from ringjax.models.hf.config_reader import error
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.packings import packing
from ringjax.models.hf.save import write
from ringjax.models.hf.tensors import (
  CheckpointTensor,
  checkpoint_tensors,
  parameters,
)
from ringjax.models.origin import origin_of
from ringjax.models.streaming import Streaming, check_host, planned
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import WeightPlacement, refuse_placed
from ringjax.nn.param import Rules
from ringjax.parallel import outcome
from ringjax.parallel.memory import host_free_bytes
from ringjax.parallel.mesh import automatic, entering, with_shardings

# A module, or of its shapes.
M = TypeVar("M", bound=nnx.Module)

# What weights may be kept as, beside floats.
WEIGHTS = ("stored",)
# The path of the parameter that a tied head is.
EMBEDDING = "embed.weight"
# Bytes of a float32, and which part of the free memory weights of them may have
# that are not asked for: keys and what is computed come beside them.
_WIDE, _OF_FREE = 4, 0.5


def create(
  config: Mapping[str, Any] | str,
  *,
  seed: int = 0,
  dtype: DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
  rules: Rules | None = None,
  scan: bool = True,
) -> Transformer:
  """A model with random weights.

  Args:
    config: what a config.json holds, or the name of a preset.
    seed: of the weights.
    dtype: of the weights.
    mesh: which devices have them; default: one.
    rules: how they are sharded over it.
    scan: whether equal layers are one loop.

  Returns:
    The model.

  Raises:
    ConfigError: as `read_config`.
    OptionError: rules without a mesh.
    MeshError: rules for an axis that the mesh does not have.
    MemoryEstimateError: the weights do not fit.
  """
  from ringjax.models.presets import preset

  mesh = _checked_mesh(mesh, rules)
  given = preset(config) if isinstance(config, str) else config
  parsed, source, _ = read_source(given)
  dtype = float_dtype("dtype", dtype)

  def build() -> Transformer:
    model = Transformer(parsed, nnx.Rngs(seed), scan=scan)
    return _with_source(cast(model, dtype), source)

  abstract = jax.eval_shape(build)
  shardings = None if mesh is None else _shardings(abstract, mesh, rules)
  # In a trace, for shapes only, nothing is allocated.
  if not isinstance(jnp.zeros(()), jax.core.Tracer):
    params = parameters(abstract)
    _check_memory(params, _by_path(params, mesh, rules), mesh)
  if shardings is None:
    return jax.jit(build)()
  return jax.jit(build, out_shardings=shardings)()


def place(
  model: Transformer, mesh: Mesh, rules: Rules | None = None
) -> Transformer:
  """Moves a model onto a mesh, or onto another one.

  Raises:
    OptionError: a model whose layers are not all on the devices.
  """
  refuse_placed(model, "move it", "load it with mesh= and placement=")
  mesh = _checked_mesh(automatic(mesh), rules)
  return jax.device_put(model, _shardings(model, mesh, rules))


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
) -> Transformer:
  """A model of shapes without numbers, to plan with; see `create`."""
  mesh = _checked_mesh(mesh, rules)
  form = jax.eval_shape(lambda: create(config, dtype=dtype))
  if mesh is None:
    return form
  return with_shardings(form, _shardings(form, mesh, rules))


def cast(model: M, dtype: DTypeLike) -> M:
  """A module in another dtype, but for parameters that stay float32.

  Raises:
    OptionError: a model whose layers are not all on the devices.
  """
  refuse_placed(model, "cast it", "load it with dtype= and placement=")

  def one(p: nnx.Variable) -> nnx.Variable:
    wide = p.get_metadata()["wide"]
    return p if wide else p.replace(p.get_value().astype(dtype))

  done = jax.tree.map(one, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
  if isinstance(done, Transformer):
    done.saved_dtype = None
  return done


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
  placement: WeightPlacement | str | None = None,
  memory: int | str | None = None,
  beside: Callable[..., Mapping[str, Mapping[str, int]]] | None = None,
  weights: str | None = None,
) -> Transformer:
  """Reads a Hugging Face folder, or a GGUF file, into sharded arrays.

  Every process reads the bytes that its devices need, some tensors at a time.
  Weights of eight bits or fewer (`hf.packings` lists the formats) become floats
  on the devices. Of a model of text and images the text model is read. A folder
  with an encoder beside its decoder (`ringjax.models.cepe`) is both.

  Args:
    path: a folder with `config.json` and `*.safetensors`; a GGUF file, a part
      of a split one, or a folder with one; or the name of a model that
      `python -m launch.fetch` has brought.
    mesh: which devices have the weights; default: one.
    rules: which mesh axis shards which axis of the weights; default `Rules()`,
      which shards heads, feedforward and vocabulary over "model". Only with
      a mesh.
    dtype: of the weights and of the computation; default: the checkpoint's. On
      one CPU device a checkpoint of 16 bits is held in float32 if that takes
      at most half of the free memory, and saved as it was: XLA's products on
      CPUs convert 16-bit weights anew for every token.
    scan: whether equal layers are one loop over stacked weights; without it
      the program grows with the layers, and no step copies weights out of a
      stack (faster decoding on CPUs).
    strict: whether a key of config.json that nothing reads is an error where
      it may change the computation: the family's class in transformers knows
      it, or the folder has code of its own, which may. Without it such keys
      are named by a warning; keys that transformers ignores always are.
    placement: in which memory the layers are, a `Placement` or a text as
      "device=.2,host=.5,disk=.3", "host" or "disk"; default: all on the
      devices. What is not there is fetched when a layer runs: from the host's
      memory, or from these files, which must stay as they are.
    memory: bytes that weights may take on a device, as a number or as "6GiB":
      as many layers as fit are there, the others in the host's memory as far
      as they fit and `placement` says nothing else, the rest on disk.
      Of weights alone, with what passes through: keys and what a call computes
      come beside it, unless `beside` says how much that is.
    beside: the largest call that `memory` is to have room for too, an
      `rj.infer.CallMemory`; or any function of (model, mesh) that returns bytes
      by memory ("device", "host", "disk") and by what they are. Its part of
      the host's memory is looked at, too.
    weights: "stored": linear maps of a GGUF file stay the codes that the file
      has, whose numbers are the same as without; None: they become floats.

  Returns:
    The model.

  Raises:
    ConfigError: an unknown architecture, or a config that cannot be meant.
    CheckpointFormatError: a broken file.
    CheckpointMismatchError: tensors that are missing, too many, of a wrong
      shape or not finite, or a head that is not the embedding it is tied to.
    UnsafeFormatError: weights only in files that would run code.
    MemoryEstimateError: the weights do not fit, or not where `placement` says,
      or not beside the call; before any of them is read.
    OptionError: rules without a mesh; a placement that is none, or of a folder
      with an encoder; stored weights of what is no quantised GGUF file.
    MeshError: rules for an axis that the mesh does not have.
  """
  path = fetched_models.resolve(path)
  if weights is not None:
    one_of("weights", weights, WEIGHTS)
  mesh = _checked_mesh(mesh, rules)
  ranks = outcome.processes_of(mesh)
  streaming, streamed, in_host = None, [], set()
  call: dict[str, int] = {}
  # A file that one process does not have is an error of all.
  with outcome.failing_together(ranks):
    folder = open_model(path)
    config, source, family = read_source(folder.config, strict=strict)
    stored = stored_dtype(folder, source) if dtype is None else dtype
    shapes_in = lambda dtype: jax.eval_shape(
      lambda: _with_source(
        cast(Transformer(config, nnx.Rngs(0), scan=scan), dtype), source
      )
    )
    empty = shapes_in(float_dtype("dtype", stored))
    if dtype is None and placement is None and memory is None:
      widened = _wide_on_cpu(empty, mesh)
      if widened:
        empty = shapes_in(jnp.float32)
        empty.saved_dtype = jnp.dtype(stored).name
    found = contents(folder, family, empty, source)
    empty.origin = origin_of(
      found,
      whole=folder.config.get("model_type") in family.types,
      packed=packing(folder.config) is not None,
    )
    if isinstance(folder, GgufFolder):
      folder = folder.with_stored()
      found = dataclasses.replace(found, folder=folder)
    if weights is not None:
      if not isinstance(folder, GgufFolder):
        raise OptionError(
          "weights", f"{weights!r}, of a folder of safetensors", "a GGUF file",
          "leave it out, or take rj.models.with_coded_weights",
        )  # fmt: skip
      found, empty = with_stored_codes(found, empty)
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
    # It exchanges by itself.
    tiers = planned(empty, shardings, placement, memory, call)
  with outcome.failing_together(ranks):
    if set(tiers) != {DEVICE}:
      _refuse_encoder(path)
      streaming = Streaming(empty, tiers, mesh, shardings)
      empty = streaming.empty
      pairs = [streaming.placed(t) for t in found.tensors]
      streamed = [t for tier, t in pairs if tier == DISK]
      if isinstance(folder, GgufFolder):
        streamed = [stored_tensor(folder, t) for t in streamed]
      in_host |= {t.name for tier, t in pairs if tier == IN_HOST}
      kept = [t for tier, t in pairs if tier != DISK]
      found = dataclasses.replace(found, tensors=kept)
    params = parameters(empty)
    shardings = _by_path(params, mesh, rules)
    _check_memory(params, shardings, mesh)
    if streaming is not None or call:
      hosted = 0 if streaming is None else streaming.host_bytes
      check_host(hosted, call.get(IN_HOST, 0))
  shapes = tuple((p.shape, jnp.dtype(p.dtype).name) for p in params.values())
  zeros = _zeros(shapes, None if mesh is None else tuple(shardings.values()))
  arrays = dict(zip(params, zeros, strict=True))
  targets = lambda t: _targets(t, params, shardings, mesh)
  with outcome.failing_together(ranks):
    for t, x in found.read(targets):
      paths, indices = zip(*t.targets, strict=True)
      packed = isinstance(t.form, Packed)
      if packed:
        check_unpacked(t, x, arrays[paths[0]].dtype)
      if streaming is not None and t.name in in_host:
        streaming.host(t, x)
        continue
      put = _put(
        t.form,
        tuple(shardings[path] for path in paths),
        tuple(arrays[path] for path in paths),
        x if packed else x[0],
        indices,
      )
      # Else more and more tensors wait to be put into their parameters.
      arrays.update(zip(paths, jax.block_until_ready(put), strict=True))
    check_heads(folder, found.heads, arrays[EMBEDDING])
    flat, tree = jax.tree.flatten(
      empty, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    filled = [p.replace(arrays[k]) for k, p in zip(params, flat, strict=True)]
    model = jax.tree.unflatten(tree, filled)
    if streaming is not None:
      model = streaming.finish(model, folder, streamed, targets)
    else:
      model = cepe.attached(path, model, rules)
  return model


def _refuse_encoder(path: str | os.PathLike[str]) -> None:
  if (pathlib.Path(path) / cepe.CONFIG).exists():
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
  """Arrays to fill, by one program for all models of a shape."""
  made = tuple(jnp.zeros(shape, dtype) for shape, dtype in shapes)
  if shardings is None:
    return made
  return jax.lax.with_sharding_constraint(made, shardings)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def _put(
  form: Any,
  shardings: tuple[Any, ...],
  leaves: tuple[jax.Array, ...],
  x: Any,
  indices: tuple[tuple[Any, ...], ...],
) -> tuple[jax.Array, ...]:
  """Puts the pieces of a tensor into their parameters."""
  done = []
  for piece, leaf, index, sharding in zip(
    form.split(x), leaves, indices, shardings, strict=True
  ):
    piece = piece.astype(leaf.dtype)[(None,) * len(index)]
    start = [jnp.asarray(i, jnp.int32) for i in index]
    start += [jnp.int32(0)] * (leaf.ndim - len(index))
    leaf = lax.dynamic_update_slice(leaf, piece, start)
    if sharding is not None:
      leaf = lax.with_sharding_constraint(leaf, sharding)
    done.append(leaf)
  return tuple(done)


def _targets(
  tensor: CheckpointTensor,
  params: dict[str, Any],
  shardings: dict[str, Any],
  mesh: Mesh | None,
) -> dict[str, jax.ShapeDtypeStruct]:
  """How the pieces of a tensor come to the devices."""
  path, index = tensor.targets[0]
  value = params[path].get_value()
  found: dict[str, jax.ShapeDtypeStruct] = {}
  for piece in tensor.pieces:
    sharding = None
    if mesh is not None:
      axes = tuple(shardings[path].spec)
      axes += (None,) * (value.ndim - len(axes))
      cuts = tensor.form.cuts(axes[len(index) :])
      spec = [None if a is None else cuts[a] for a in piece.axes]
      for i, n in enumerate(piece.shape):
        if spec[i] is not None and n % mesh.shape[spec[i]]:
          spec[i] = None
      sharding = NamedSharding(mesh, P(*spec))
    found[piece.name] = jax.ShapeDtypeStruct(
      piece.shape, piece.dtype or value.dtype, sharding=sharding
    )
  return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sound(form: Any, dtype: DTypeLike, x: tuple[jax.Array, ...]) -> jax.Array:
  return jnp.isfinite(form.unpack(*x).astype(dtype)).all()


def check_unpacked(
  tensor: CheckpointTensor,
  x: tuple[Shaped[Array, " ..."], ...],
  dtype: DTypeLike,
) -> None:
  """Refuses codes and scales whose product is no finite number of a dtype."""
  # What stays codes is computed with in float32.
  floats = jnp.issubdtype(dtype, jnp.floating)
  dtype = jnp.dtype(dtype if floats else jnp.float32)
  if not _sound(tensor.form, dtype, x):
    raise CheckpointMismatchError(
      tensor.name,
      f"codes and scales that are not finite as {dtype}",
      "finite values",
      "download the file again, or take a wider dtype",
    )


def check_heads(
  folder: Folder, heads: tuple[str, ...], embedding: Float[Array, "V D"]
) -> None:
  """Refuses a head in a folder that is not the embedding that it should be.

  Some writers store a tied embedding twice; others forget to say that a head
  has learned on its own.
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


def _wide_on_cpu(empty: Transformer, mesh: Mesh | None) -> bool:
  """Whether weights of 16 bits are to be held in float32.

  Where they don't fit, a warning says that they will be slow.
  """
  devices = jax.local_devices()[:1] if mesh is None else [*mesh.devices.flat]
  narrow = jnp.dtype(empty.dtype).itemsize == 2
  if not narrow or len(devices) > 1 or devices[0].platform != "cpu":
    return False
  count = sum(p.get_value().size for p in parameters(empty).values())
  free = host_free_bytes()
  if free is None or _WIDE * count <= _OF_FREE * free:
    return True
  warnings.warn(
    f"weights stay in {empty.dtype}, which is slow on a CPU: in float32 they "
    f"take {_WIDE * count:,} bytes, more than half of the {free:,} that are "
    'free; pass dtype="float32" all the same, or take '
    "rj.models.with_coded_weights",
    RuntimeWarning,
    stacklevel=4,
  )
  return False


def stored_dtype(folder: Folder, source: Mapping[str, Any]) -> str:
  """What config.json says, or else what the largest plain tensor has."""
  said = source.get("dtype") or source.get("torch_dtype")
  if said is None:
    floats = [t for t in folder.tensors.values() if str(t.dtype) in FLOATS]
    largest = max(floats or folder.tensors.values(), key=lambda t: t.nbytes)
    said = str(largest.dtype)
  if said not in FLOATS:
    raise error("dtype", said, f"one of {', '.join(FLOATS)}", "pass dtype=")
  return said


def _check_memory(
  params: dict[str, Any], shardings: dict[str, Any], mesh: Mesh | None
) -> None:
  """Refuses weights that cannot fit, before any of them is allocated."""
  each = 0
  for path, p in params.items():
    shape = p.get_value().shape
    if shardings[path] is not None:
      shape = shardings[path].shard_shape(shape)
    each += math.prod(shape) * p.get_value().dtype.itemsize
  devices = jax.local_devices() if mesh is None else mesh.local_devices
  device = devices[0]
  count = 1 if mesh is None else len(devices)
  free = free_bytes(device, count)
  if free is not None and each > free:
    raise MemoryEstimateError(
      "weights",
      f"{each:,} bytes on each of {count} device(s)",
      f"at most the {free:,} that are free there",
      "pass dtype=jnp.bfloat16, or a mesh with a larger 'model' axis",
    )


def free_bytes(device: jax.Device, sharing: int) -> int | None:
  """Bytes that may still be allocated on a device; None if unknown.

  CPU devices share the host's memory: each of `sharing` gets its part.
  """
  stats = device.memory_stats()
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  if device.platform != "cpu":
    return None
  free = host_free_bytes()
  return None if free is None else free // sharing


@entering(lambda model, *_, **__: model.mesh)
def save(
  model: Transformer,
  path: str | os.PathLike[str],
  *,
  max_shard_bytes: int = 5_000_000_000,
  overwrite: bool = False,
) -> None:
  """Writes a model as the folder that `load` and transformers read.

  Of the folder that it was loaded from, files beside the weights (tokenizer,
  chat template, ...) are copied, and tensors that it does not read, as long as
  its own are as they were there; otherwise these are left out, with a warning,
  and the config speaks of no layers that guess further tokens.

  Args:
    model: made by `load` or `create`.
    path: a folder that does not exist yet.
    max_shard_bytes: of one file.
    overwrite: replaces a folder that does.

  Raises:
    OptionError: the folder exists, or the model's layers are not all on the
      devices: its folder has them.
    CheckpointWriteError: it cannot be written: no permission, a full disk.
  """
  refuse_placed(model, "save it", "copy the folder that it was loaded from")
  refuse_codes(model, "save it")
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
    found = p.get_value()[index]
    return found if p.get_metadata()["wide"] else found.astype(dtype)

  # What was packed is written in the forms of plain floats.
  tensors: list[Any] = checkpoint_tensors(model, family.names(model.config))
  arrays = lambda: (
    (t.name, t.form.join(tuple(value(*target) for target in t.targets)))
    for t in tensors
  )
  kept = origin.kept(arrays)

  def further(folder: pathlib.Path) -> None:
    origin.copy_files(folder, pathlib.Path(path))
    beside(folder)

  write(
    path,
    origin.config(source, kept),
    itertools.chain(arrays(), origin.stored(kept)),
    max_shard_bytes=max_shard_bytes,
    overwrite=overwrite,
    beside=further,
  )
