"""Low-rank adapters (LoRA), trained in place of all weights.

Guarantees: with adapters the model computes x (W + s A B) for each target map,
where A is [in, r] and random, B is [r, out] and begins at zero, s = alpha / r;
so at the start it equals the model, and `merged` returns a plain model with the
same outputs. Where W is stored as codes, of 8 or 4 bits, it computes x W +
s (x A) B (QLoRA), and `models.with_float_weights` makes floats of the merged
model. Embeddings of the last `new_tokens` ids are trained directly.
Memory: gradients and moments of r (in + out) numbers a map, not of in x out;
the sum W + s A B is computed in each step, in the dtype of the computation. Of
codes the backward pass decodes one map of a layer at a time.
Ref: Hu et al. 2021, arXiv 2106.09685; Dettmers et al. 2023, QLoRA, arXiv
2305.14314.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.models.parameter_arrays import tensors_digest
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import code_kind
from ringjax.models.weights.linear_maps import (
  CODED,
  INDEX_PATH,
  adaptable_maps,
  replaced,
  used_as_array,
)
from ringjax.nn.weights.adapted import (
  AdaptableMap,
  AdaptedLinear,
  LowRankSum,
)
from ringjax.nn.weights.integer import IntegerLinear

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank adapters of a model's linear maps.

  Attributes:
    rank: Rank of each adapter, r.
    alpha: Numerator of the adapters' scale, alpha / r.
    targets: Names of maps, of `TARGETS` or others that the model has, but for
      those of an index of keys. Maps whose arrays a layer uses without calling
      them, as routers, can be trained on the devices and merged, but neither in
      layers elsewhere nor row by row.
    new_tokens: Number of ids at the end of the vocabulary whose embeddings are
      trained, and their part of an untied head.
    over: Codes whose error the adapters began with, see `residual_adapters`;
      empty: adapters of a model's weights, of floats or codes.
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = ("q", "k", "v", "o")
  new_tokens: int = 0
  over: str = ""

  def __post_init__(self) -> None:
    positive_int("rank", self.rank)
    integer("new_tokens", self.new_tokens, least=0)
    if not self.targets:
      raise OptionError(
        "targets", "none", "names of maps", "pass targets=('q', 'v')"
      )

  def start(
    self, model: Transformer, *, seed: int = 0, dtype: DTypeLike = jnp.float32
  ) -> dict[str, dict[str, Shaped[Array, " ..."]]]:
    """Makes new adapters, by a map's path.

    An adapter is `{"a": [R, *in, r], "b": [R, r, *out]}`, where R is the number
    of layers that share the map's array. With `new_tokens` there is also their
    part of each parameter with a vocabulary, `{"new": ...}` by its path.

    Raises:
      OptionError: If the model lacks a target, if layers elsewhere use one as
        an array, if it rounds activations, or if there are more new tokens than
        its vocabulary.
    """
    if any(isinstance(x, IntegerLinear) for _, x in nnx.iter_modules(model)):
      raise OptionError(
        "model",
        "one whose activations are rounded to integers, which have no gradient",
        "weights of floats or codes",
        "pass the model that was rounded",
      )
    # An index of keys is named as attention is, and would change the choice.
    maps = {
      path: linear
      for path, linear in adaptable_maps(model).items()
      if INDEX_PATH not in path
    }
    names = sorted({path.rsplit(".", 1)[-1] for path in maps})
    unknown = [name for name in self.targets if name not in names]
    if unknown:
      raise OptionError(
        "targets",
        ", ".join(unknown),
        f"some of {', '.join(names)}",
        "leave out those that this model does not have",
      )
    adapters = {}
    key = jax.random.key(seed)
    for n, (path, linear) in enumerate(maps.items()):
      if path.rsplit(".", 1)[-1] not in self.targets:
        continue
      if model.stack.placed is not None:
        _refuse_arrays(model, [path])
      lead, into, out = map_shape(model, path, linear)
      scale = jnp.float32(1 / math.sqrt(math.prod(into)))
      map_key = jax.random.fold_in(key, n)
      a = jax.random.normal(map_key, (*lead, *into, self.rank), jnp.float32)
      adapters[path] = {
        "a": (a * scale).astype(dtype),
        "b": jnp.zeros((*lead, self.rank, *out), dtype),
      }
    integer("new_tokens", self.new_tokens, least=0, most=model.config.vocab - 1)
    if self.new_tokens:
      for path, p in _of_vocabulary(model).items():
        adapters[path] = {"new": self._new(p).astype(dtype)}
    return adapters

  def _new(self, param: nnx.Variable) -> jax.Array:
    """Part of a parameter that belongs to the new tokens."""
    value = param.get_value()
    axis = param.get_metadata()["axes"].index("vocab")
    start = value.shape[axis] - self.new_tokens
    return jax.lax.slice_in_dim(value, start, value.shape[axis], axis=axis)

  def check_codes(self, model: Transformer) -> None:
    """Refuses a model without the codes whose error the adapters correct.

    Raises:
      OptionError: If it has floats, or other codes.
    """
    kind = code_kind(model) if self.over else ""
    if kind != self.over:
      raise OptionError(
        "adapters",
        f"adapters that correct the error of {self.over}, for a model of "
        f"{kind or 'floats'}",
        f"a model whose maps are {self.over}",
        "code the model as it was for the training, with "
        "rj.models.with_coded_weights or --weights",
      )

  def model(self, params: PyTree, frozen: Transformer) -> Transformer:
    """The model with its adapters added; its own weights get no gradient."""
    self.check_codes(frozen)
    maps = adaptable_maps(frozen)
    # Sums that exist only while a layer runs.
    in_layers = {
      path
      for path in params
      if path in maps
      and (frozen.stack.placed is not None or isinstance(maps[path], CODED))
    }
    scale = self.alpha / self.rank
    changed = {}
    new = {}
    for path, part in params.items():
      if "new" in part:
        new[path] = part["new"]
        continue
      if path in in_layers:
        continue
      lead, into, out = map_shape(frozen, path, maps[path])
      inner, outer = math.prod(into), math.prod(out)
      a = part["a"].reshape(*lead, inner, self.rank)
      b = part["b"].reshape(*lead, self.rank, outer)
      changed[f"{path}.weight"] = jnp.matmul(a, b).reshape(
        *lead, *into, *out
      ) * jnp.asarray(scale, a.dtype)

    def add(path: tuple[Any, ...], p: Any) -> Any:
      if not isinstance(p, nnx.Variable):
        # Weights of layers in the host's memory are constants in any case.
        return p
      weight = jax.lax.stop_gradient(p.get_value())
      if (new_rows := new.get(_dotted(path))) is not None:
        start = [
          n - m for n, m in zip(weight.shape, new_rows.shape, strict=True)
        ]
        new_rows = new_rows.astype(weight.dtype)
        return p.replace(jax.lax.dynamic_update_slice(weight, new_rows, start))
      delta = changed.get(_dotted(path))
      if delta is None:
        return p.replace(weight)
      return p.replace(
        (weight.astype(delta.dtype) + delta).astype(weight.dtype)
      )

    result = jax.tree_util.tree_map_with_path(
      add, frozen, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    if not in_layers:
      return result
    _refuse_arrays(frozen, in_layers)
    maps = adaptable_maps(result)
    return replaced(
      result,
      {
        path: LowRankSum(
          maps[path], params[path]["a"], params[path]["b"], scale
        )
        for path in params
        if path in in_layers
      },
    )

  def merged(self, params: PyTree, frozen: Transformer) -> Transformer:
    """Adds the adapters to the model's weights, so that it can be saved.

    A model with codes, or with layers that are not all on the devices, adds
    them when a layer runs. One with codes is saved after
    `models.with_float_weights`, the other cannot be saved.
    """
    merged = jax.jit(self.model)(params, frozen)
    # A cached program returns the folder of the model it was traced with.
    merged.origin = frozen.origin
    return merged


def with_adapters(
  model: Transformer, adapters: Sequence[tuple[Lora, Any]]
) -> Transformer:
  """Makes a model whose rows may each use another adapter.

  In `adapter_rows` a row with number n uses the n-th adapter, 0 means none.

  Args:
    model: Model, whose weights are shared.
    adapters: Pairs of settings and params, as `Lora.start` makes them. Smaller
      ranks are padded with zeros, and so are maps that an adapter lacks.

  Raises:
    OptionError: If parameters are of another model, or of maps that its layers
      use as arrays.
  """
  for lora, _ in adapters:
    lora.check_codes(model)
  maps = adaptable_maps(model)
  paths = list(dict.fromkeys(path for _, params in adapters for path in params))
  unknown = [path for path in paths if path not in maps]
  if unknown:
    raise OptionError(
      "adapters",
      f"maps {', '.join(unknown[:3])}",
      "maps that this model has",
      "pass adapters that were trained on it",
    )
  _refuse_arrays(model, paths)
  rank = max((lora.rank for lora, _ in adapters), default=0)
  changed = {}
  for path in paths:
    lead, into, out = map_shape(model, path, maps[path])
    downs, ups = [], []
    for lora, params in adapters:
      part = params.get(path)
      if part is None:
        a = jnp.zeros((*lead, *into, rank), jnp.float32)
        b = jnp.zeros((*lead, rank, *out), jnp.float32)
      else:
        _check_part(
          path, part, (*lead, *into, lora.rank), (*lead, lora.rank, *out)
        )
        missing = rank - lora.rank
        a_padding = [(0, 0)] * (len(lead) + len(into)) + [(0, missing)]
        b_padding = [(0, 0)] * len(lead) + [(0, missing)] + [(0, 0)] * len(out)
        a = jnp.pad(jnp.asarray(part["a"]), a_padding)
        scale = jnp.asarray(lora.alpha / lora.rank, part["b"].dtype)
        b = jnp.pad(jnp.asarray(part["b"]) * scale, b_padding)
      downs.append(a)
      ups.append(b)
    changed[path] = AdaptedLinear(
      maps[path], _numbered(downs, len(lead)), _numbered(ups, len(lead))
    )
  return replaced(model, changed)


def adapter_digest(how: Lora, params: Mapping[str, Any]) -> str:
  """Digest of all that an adapter adds to a model: every number and scale.

  Args:
    how: Adapter settings, with rank and alpha.
    params: Adapter parameters, as `Lora.start` makes them.
  """
  arrays = {
    f"{path}.{name}": np.asarray(x)
    for path, part in params.items()
    for name, x in part.items()
  }
  text = f"{how.rank} {how.alpha} {tensors_digest(arrays)}"
  return hashlib.sha256(text.encode()).hexdigest()


def _refuse_arrays(model: Transformer, paths: Iterable[str]) -> None:
  """Refuses maps that layers use as arrays and never call as modules."""
  used = [path for path in paths if used_as_array(model, path)]
  if used:
    raise OptionError(
      "targets",
      f"{', '.join(used[:2])}, whose arrays a layer takes without calling it",
      "maps that layers call",
      "leave it out, or merge adapters into a model that is all on the devices",
    )


def _numbered(arrays: list[jax.Array], axis: int) -> jax.Array:
  """Stacks arrays on a new axis, from number 1; number 0 is zeros."""
  return jnp.stack([jnp.zeros_like(arrays[0]), *arrays], axis)


def _check_part(
  path: str, part: Any, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
  shapes = tuple(part["a"].shape), tuple(part["b"].shape)
  if shapes != (a, b):
    raise OptionError(
      "adapters",
      f"{shapes} for {path}",
      f"{(a, b)}",
      "pass adapters that were trained on this model",
    )


def _dotted(path: tuple[Any, ...]) -> str:
  """Dotted path, as 'stack.blocks.0.0.attention.q.weight', of a key path."""
  return ".".join(str(getattr(k, "name", getattr(k, "idx", k))) for k in path)


def _of_vocabulary(model: Transformer) -> dict[str, nnx.Variable]:
  """The parameters that have a part for each id, by path."""
  params = {
    "embed.weight": model.embed.weight,
    "head.weight": getattr(model.head, "weight", None),
    "head.bias": getattr(model.head, "bias", None),
  }
  return {path: p for path, p in params.items() if p is not None}


def map_shape(
  model: Transformer, path: str, linear: AdaptableMap
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
  """(layers, in, out) shapes of a map whose layers share an array."""
  if isinstance(linear, CODED):
    codes: Any = linear.codes.get_value()
    lead = codes.ndim - len(linear.codes.get_metadata()["axes"])
    inputs, outputs = linear.inputs, linear.outputs
  else:
    shape = linear.weight.get_value().shape
    lead = len(shape) - len(linear.weight.get_metadata()["axes"])
    split = lead + linear.contracted
    inputs, outputs = shape[lead:split], shape[split:]
  # The array lacks layers that are fetched.
  run = model.stack.runs[int(path.split(".")[2])]
  layers = (run.repeats,) * lead
  return layers, inputs, outputs
