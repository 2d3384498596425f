"""Sparse attention for a trained dense model, whose training then continues.

Guarantees: weights that the model has are kept, and only those of what chooses
or compresses keys are new. Layers whose queries see all keys before them become
sparse, but for the last `full_last` of them; layers with a window stay as they
are. The kind and its sizes are in the key `sparse_attention` of config.json,
which is this package's own: transformers ignores it and the new weights, and
computes dense attention.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from ringjax import option_text
from ringjax.checks import integer, positive_int
from ringjax.errors import ConfigError, InputTypeError
from ringjax.models.checkpoint import abstract, cast
from ringjax.models.contents import read_config
from ringjax.models.heads.added_layer import refuse_predicting
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import refuse_codes
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.param import Rules
from ringjax.ops.attention.sparse.native_sparse import NativeSparse
from ringjax.parallel.mesh import entering

KEY = "sparse_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseKind:
  """Way in which the layers of a model choose keys, and its sizes.

  Attributes:
    full_last: Number of last layers that still read all keys.
  """

  full_last: int = 0
  # Value of "type" in config.json.
  name: ClassVar[str] = ""
  # Whether a model gets weights that must be trained.
  adds_weights: ClassVar[bool] = True

  def __post_init__(self) -> None:
    integer("full_last", self.full_last, least=0)
    for field in dataclasses.fields(self):
      if field.name != "full_last":
        positive_int(field.name, getattr(self, field.name))

  def entry(self) -> dict[str, Any]:
    """The entry of config.json."""
    return {"type": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexKind(SparseKind):
  """An index beside each layer's attention (DeepSeek-V3.2).

  Attributes:
    heads: Number of the index's query heads.
    dim: Size of the index's keys.
    count: Most keys that a query reads.
  """

  heads: int = 4
  dim: int = 128
  count: int = 2048
  name: ClassVar[str] = "index"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKind(SparseKind):
  """Blocks that each query head chooses by their mean keys (MoBA).

  Attributes:
    block: Number of positions of a block.
    count: Most blocks that a query reads, its own among them.
  """

  block: int = 512
  count: int = 8
  name: ClassVar[str] = "moba"
  adds_weights: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeKind(SparseKind):
  """Compressed keys, blocks that they weigh most, and a window (NSA).

  Attributes:
    length: Number of tokens of a compressed key.
    stride: Number of tokens from one compressed key's first token to the next
      one's; it divides `length` and `block`.
    block: Number of positions of a block that is chosen.
    count: Most blocks that a query reads, `initial` and `local` ones among
      them.
    initial: Number of first blocks of the sequence that each query reads.
    local: Number of blocks up to its own that each query reads.
    window: Number of tokens of the window, the query's own among them.
  """

  length: int = 32
  stride: int = 16
  block: int = 64
  count: int = 16
  initial: int = 1
  local: int = 2
  window: int = 512
  name: ClassVar[str] = "nsa"

  def __post_init__(self) -> None:
    integer("full_last", self.full_last, least=0)
    fields = dataclasses.fields(NativeSparse)
    NativeSparse(**{x.name: getattr(self, x.name) for x in fields})


KINDS: dict[str, type[SparseKind]] = {
  kind.name: kind for kind in (IndexKind, BlockKind, NativeKind)
}


def sparse_kind(kind: SparseKind | str) -> SparseKind:
  """A kind from its text, "index:heads=4,dim=128,count=2048", or as it is.

  Raises:
    OptionError: If the kind or an option is unknown, or out of range.
  """
  return option_text.named(kind, SparseKind, KINDS, KEY)


def sparse_config(
  config: dict[str, Any], kind: SparseKind | str
) -> dict[str, Any]:
  """The config.json of the model with sparse attention.

  Raises:
    ConfigError: If the model's attention is sparse already, or no layer sees
      all keys before it.
    OptionError: If its layers cannot choose keys.
  """
  if config.get(KEY) is not None:
    raise ConfigError(
      KEY,
      f"{config[KEY]}, which the model has already",
      "a dense model",
      "train it as it is, without making it sparse",
    )
  config = config | {KEY: sparse_kind(kind).entry()}
  read_config(config)
  return config


@entering(lambda model, *_, **__: model.mesh)
def with_sparse_attention(
  model: Transformer,
  kind: SparseKind | str,
  *,
  seed: int = 0,
  rules: Rules | None = None,
) -> Transformer:
  """The model with sparse attention and the same weights.

  Args:
    model: Dense model with floating-point weights on the devices. The result
      shares its embeddings, norm and head, and the arrays of equal layers of
      which all become sparse. Training donates them: load the dense model again
      to use it afterwards.
    kind: Kind and its sizes, such as "index:heads=4,dim=128,count=2048".
    seed: Seed of the new weights.
    rules: Rules that shard the new weights over the model's mesh.

  Raises:
    ConfigError: See `sparse_config`.
    OptionError: See `sparse_config`, or if weights are codes or elsewhere.
    InputTypeError: If it is not a model of text alone.
  """
  if type(model) is not Transformer:
    raise InputTypeError(
      "model",
      f"a {type(model).__name__}",
      "a model without an encoder or a draft",
      "pass the model that rj.models.load returns for a plain folder",
    )
  refuse_placed(model, "make it sparse", "load it without placement=")
  refuse_codes(model, "make it sparse")
  refuse_predicting(model, "make it sparse")
  config = sparse_config(json.loads(model.source), kind)
  form = abstract(config, dtype=model.dtype)
  new_params = parameters(form)
  sources = {
    path: _sources(model, form, path)
    for path in new_params
    if path.startswith(_STACK)
  }
  old = {path: p.get_value() for path, p in parameters(model).items()}
  fresh = [
    path
    for path in new_params
    if path not in old and sources.get(path, ((), ()))[0] == ()
  ]
  mesh = model.mesh

  def build() -> dict[str, jax.Array]:
    parsed, _ = read_config(config)
    random = cast(Transformer(parsed, nnx.Rngs(seed)), model.dtype)
    arrays = {p: x.get_value() for p, x in parameters(random).items()}
    return {path: arrays[path] for path in fresh}

  shardings = None
  if mesh is not None:
    rules = rules or Rules()
    shardings = {path: rules.sharding(new_params[path], mesh) for path in fresh}
  arrays = jax.jit(build, out_shardings=shardings)()
  for path in new_params:
    if path in arrays:
      continue
    if path not in sources:
      arrays[path] = old[path]
      continue
    paths, indices = sources[path]
    arrays[path] = _stacked(old, paths, indices)
  sparse = jax.tree.map(
    lambda p: p,
    form,
    is_leaf=lambda x: isinstance(x, nnx.Variable),
  )
  leaves, tree = jax.tree.flatten(
    sparse, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  named = list(parameters(form).items())
  assert len(named) == len(leaves)
  sparse = jax.tree.unflatten(
    tree,
    [
      p.replace(arrays[path])
      for p, (path, _) in zip(leaves, named, strict=True)
    ],
  )
  sparse.origin, sparse.saved_dtype = model.origin, model.saved_dtype
  return sparse


_STACK = "stack.blocks."


def _sources(
  model: Transformer, form: Transformer, path: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
  """Parameters of `model`, and indices in them, of a parameter of `form`.

  Both are () for a parameter that `model` does not have.
  """
  group, position, name = path.removeprefix(_STACK).split(".", 2)
  run = form.stack.runs[int(group)]
  old = parameters(model)
  paths, indices = [], []
  for repeat in range(run.repeats):
    layer = run.number(int(position), repeat)
    old_path, index = _place_of(model, layer)
    old_path += name
    if old_path not in old:
      return (), ()
    paths.append(old_path)
    indices.append(index)
  return tuple(paths), tuple(indices)


def _place_of(model: Transformer, layer: int) -> tuple[str, int]:
  """Prefix of the path of a layer's parameters, and its index in them."""
  for group, run in enumerate(model.stack.runs):
    number = layer - run.first
    if 0 <= number < len(run.layers) * run.repeats:
      repeat, position = divmod(number, len(run.layers))
      return f"{_STACK}{group}.{position}.", repeat
  raise AssertionError(f"layer {layer} is in no run")


def _stacked(
  old: dict[str, jax.Array], paths: tuple[str, ...], indices: tuple[int, ...]
) -> jax.Array:
  """Slices of arrays, stacked; the array itself if that is what it is."""
  first = old[paths[0]]
  all_layers = tuple(range(first.shape[0]))
  if len(set(paths)) == 1 and indices == all_layers:
    return first
  sharding = first.sharding
  if not isinstance(sharding, NamedSharding):
    sharding = None
  stack = lambda arrays: jnp.stack(
    [x[i] for x, i in zip(arrays, indices, strict=True)]
  )
  return jax.jit(stack, out_shardings=sharding)([old[path] for path in paths])
