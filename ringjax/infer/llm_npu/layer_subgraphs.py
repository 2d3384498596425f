"""A layer of a chunk as six programs: three of linear maps, three of the rest.

Guarantees: the programs, run in order, compute the layer. They are the same for
every layer of a kind. Outliers of an `IntegerLinear` are multiplied by a
separate program, on another device: its result is added in the next one.
Memory: the maps' weights on the maps' device; norms, sinks, and codes and float
rows of maps with separate outliers on the other.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from ringjax.errors import ConfigError
from ringjax.infer.layerwise import TokenSpan, tokens_of_call
from ringjax.kv.base import NoCache
from ringjax.kv.cache import KVCache
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Gated, NoFeedforward, Plain
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.integer import IntegerLinear
from ringjax.ops.mask import Mask

Weights = tuple[Shaped[Array, " ..."] | None, ...]
# A map's product, of integers or floats, and its outliers' product or None.
Result = tuple[jax.Array, jax.Array | None]
_INPUTS = ("attention.q", "attention.k", "attention.v", "attention.gate")
_OUTPUT = ("attention.o",)
_WIDE = ("feedforward.gate", "feedforward.up")
_NARROW = ("feedforward.down",)


class LayerSubgraphs:
  """The programs of the layers of a kind.

  Attributes:
    inputs: Paths of the maps that read the layer's normalised input.
    output: Paths of the maps that read the result of attention.
    wide: Paths of the maps that read the feedforward's input, where another
      device multiplies their outliers; else empty: it runs in one piece.
    narrow: Path of the map after them, or empty.
  """

  def __init__(self, spec: Layer, block: nnx.Module, embed: int):
    """Prepare; nothing is compiled yet.

    Args:
      spec: Specification of the layers.
      block: Module of any number of such layers.
      embed: Width of the residual stream, D.

    Raises:
      ConfigError: If the layers have no feedforward.
    """
    if isinstance(spec.feedforward, NoFeedforward):
      raise ConfigError(
        "model",
        "a layer without a feedforward",
        "attention and a feedforward in every layer",
        "read it with rj.infer.generate",
      )
    self.spec, self.embed = spec, embed
    leaves, self._tree = jax.tree_util.tree_flatten_with_path(block)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    self._paths = tuple(name(path) for path, _ in leaves)
    self._shapes = tuple(
      jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for _, x in leaves
    )
    existing = lambda names: tuple(
      n for n in names if _at(block, n) is not None
    )
    self.inputs, self.output = existing(_INPUTS), _OUTPUT
    self._beside = {
      n for n in (*self.inputs, *_OUTPUT) if _has_rows(_at(block, n))
    }
    self.wide: tuple[str, ...] = ()
    self.narrow: tuple[str, ...] = ()
    if isinstance(spec.feedforward, Plain | Gated):
      maps = existing((*_WIDE, *_NARROW))
      if any(_has_rows(_at(block, n)) for n in maps):
        self.wide, self.narrow = existing(_WIDE), _NARROW
        self._beside |= {n for n in maps if _has_rows(_at(block, n))}

  def split(self, weights: Weights) -> tuple[Weights, Weights]:
    """Split a layer's weights: for the maps' device, and for the other."""
    map_weights, other_weights = [], []
    within = lambda path, names: any(path.startswith(f"{n}.") for n in names)
    for path, x in zip(self._paths, weights, strict=True):
      linear = within(path, (*self.inputs, *_OUTPUT, "feedforward"))
      has_outliers = within(path, self._beside)
      other_only = has_outliers and (".rows" in path or ".slots" in path)
      map_weights.append(x if linear and not other_only else None)
      other_weights.append(x if has_outliers or not linear else None)
    return tuple(map_weights), tuple(other_weights)

  def active(self, weights: Weights) -> frozenset[str]:
    """Paths of maps whose outliers another device multiplies in a layer."""
    block = self._block(weights)
    return frozenset(
      n for n in self._beside if bool(_at(block, n).active.get_value())
    )

  # -------------------------------------------------------------------------
  # Programs of the maps
  # -------------------------------------------------------------------------

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def products(
    self, names: tuple[str, ...], weights: Weights, x: Float[Array, "B T ..."]
  ) -> tuple[jax.Array, ...]:
    """Multiply x by maps, without their outliers."""
    block = self._block(weights)

    def product(linear: Any) -> jax.Array:
      is_integer = isinstance(linear, IntegerLinear)
      return linear.main(x) if is_integer else linear(x)

    return tuple(product(_at(block, n)) for n in names)

  @functools.partial(jax.jit, static_argnums=(0,))
  def between(
    self, weights: Weights, x: Float[Array, "B T D"], wide: tuple[Result, ...]
  ) -> Float[Array, "B T F"]:
    """Compute the input of the feedforward's last map, [B, T, F]."""
    block = self._block(weights)
    results = dict(zip(self.wide, wide, strict=True))
    slots = _placed(block, (*self.wide, *self.narrow), results)
    block.feedforward.row(x)
    return slots[self.narrow[0]].x

  @functools.partial(jax.jit, static_argnums=(0,))
  def feedforward(
    self, weights: Weights, x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Compute the whole feedforward."""
    return self._block(weights).feedforward(x, _Context())

  # -------------------------------------------------------------------------
  # Programs of the rest
  # -------------------------------------------------------------------------

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def beside(
    self, names: tuple[str, ...], weights: Weights, x: Float[Array, "B T ..."]
  ) -> tuple[jax.Array, ...]:
    """Multiply the outliers of integer maps in floats."""
    block = self._block(weights)
    return tuple(_at(block, n).beside(x) for n in names)

  @functools.partial(jax.jit, static_argnums=(0,))
  def norm(
    self, weights: Weights, x: Float[Array, "B T D"], span: TokenSpan
  ) -> Float[Array, "B T D"]:
    """Compute the input of the first maps."""
    block = self._block(weights)
    slots = self._slots(block, {})
    self._run(block, x, span)
    return slots[_INPUTS[0]].x

  @functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(4,))
  def attend(
    self,
    weights: Weights,
    made: tuple[Result, ...],
    span: TokenSpan,
    cache: KVCache,
  ) -> tuple[Float[Array, "B T N J"], KVCache]:
    """Compute attention, and append the tokens' keys to a one-layer cache.

    Args:
      weights: Weights of the layer.
      made: Results of the maps `inputs`.
      span: Positions of the T tokens.
      cache: Cache of this layer with the keys of the tokens before; donated.
    """
    block = self._block(weights)
    results = dict(zip(self.inputs, made, strict=True))
    slots = self._slots(block, results)
    first = made[0][0]
    cache = cache.allocate(span.at(first.shape[1]), replicated=False, sees=True)
    part = cache.layer(0, cache.slots[0], 0)
    # The layer's input is not used: results of all maps that read it are given.
    x = jnp.zeros((*first.shape[:2], self.embed), cache.dtype)
    part = self._run(block, x, span, part, _Context(attends=True))[1]
    return slots[_OUTPUT[0]].x, cache.updated((part.slots,))

  @functools.partial(jax.jit, static_argnums=(0,))
  def second_norm(
    self,
    weights: Weights,
    x: Float[Array, "B T D"],
    output: Result,
    span: TokenSpan,
  ) -> Float[Array, "B T D"]:
    """Compute the feedforward's input from the layer's input and `output`."""
    block = self._block(weights)
    slots = self._slots(block, {_OUTPUT[0]: output})
    self._run(block, x, span)
    return slots["feedforward"].x

  @functools.partial(jax.jit, static_argnums=(0, 5))
  def finish(
    self,
    weights: Weights,
    x: Float[Array, "B T D"],
    output: Result,
    fed: Result,
    whole: bool,
    span: TokenSpan,
  ) -> Float[Array, "B T D"]:
    """Compute the layer's output from its input and its maps' results.

    `fed` is the feedforward's result if `whole`, else that of `narrow`.
    """
    block = self._block(weights)
    results = {_OUTPUT[0]: output}
    if whole:
      self._slots(block, results | {"feedforward": fed})
    else:
      results[self.narrow[0]] = fed
      maps = (*self.inputs, *_OUTPUT, *self.wide, *self.narrow)
      _placed(block, maps, results)
    return self._run(block, x, span)[0]

  def _slots(self, block: Any, given: dict[str, Result]) -> dict[str, _Slot]:
    """Put slots in place of all maps, some of them with results."""
    names = (*self.inputs, *_OUTPUT, "feedforward")
    return _placed(block, names, given)

  def _run(
    self,
    block: Any,
    x: jax.Array,
    span: TokenSpan,
    cache: Any = None,
    context: _Context | None = None,
  ) -> tuple[jax.Array, Any]:
    tokens = tokens_of_call(self.spec, span.at(x.shape[1]), span.length)
    cache = NoCache(1).layer(0, (), 0) if cache is None else cache
    return block(x, tokens, cache, context or _Context())

  def _block(self, weights: Weights) -> Any:
    """Rebuild the module; missing weights are zeros, which no program reads."""
    return jax.tree.unflatten(
      self._tree,
      [
        jnp.zeros(shape.shape, shape.dtype) if x is None else x
        for shape, x in zip(self._shapes, weights, strict=True)
      ],
    )


class _Slot:
  """Stand-in for a map that captures its input and returns a given result."""

  x: Any = None

  def __init__(self, module: Any, result: Result | None):
    self.module, self.result = module, result

  def __call__(self, x: jax.Array, *more: Any) -> jax.Array:
    self.x = x
    if self.result is None:
      # The compiler drops these zeros with all that reads them.
      if more:
        return jnp.zeros_like(x)
      shape = jax.eval_shape(lambda x: self.module(x), x)
      return jnp.zeros(shape.shape, shape.dtype)
    main, outliers = self.result
    return (main if outliers is None else main + outliers).astype(x.dtype)


# Static: a slot has no arrays of the module, and is part of the program.
jax.tree_util.register_static(_Slot)


class _Context:
  """Sharding context of all tokens at once, with or without attention."""

  def __init__(self, attends: bool = False):
    self._attends, self._base = attends, CachedAttention()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._base, name)

  def rowwise(self, f: Any, x: jax.Array) -> jax.Array:
    return f(x)

  def summed_rowwise(self, layer: Any, x: jax.Array) -> jax.Array:
    return layer.row(x)

  def __call__(
    self, q: jax.Array, tokens: Tokens, cache: Any, mask: Mask, extras: Extras
  ) -> jax.Array:
    if not self._attends:
      return jnp.zeros_like(q)
    return self._base(q, tokens, cache, mask, extras)


def _placed(
  block: Any, names: tuple[str, ...], given: dict[str, Result]
) -> dict[str, _Slot]:
  """Put slots in place of a block's maps, with results or without."""
  slots = {}
  for name in names:
    *parents, last = name.split(".")
    owner = _at(block, ".".join(parents)) if parents else block
    slots[name] = _Slot(getattr(owner, last), given.get(name))
    vars(owner)[last] = slots[name]
  return slots


def _at(block: Any, path: str) -> Any:
  """Return the module at a path of a block, or None."""
  for name in path.split("."):
    block = getattr(block, name, None)
  return block


def _has_rows(module: Any) -> bool:
  return isinstance(module, IntegerLinear) and module.rows is not None
