"""A layer of a chunk as six programs: three of linear maps, three of the rest.

Guarantees: the programs, one after another, are the layer. They are the same
for every layer of a kind. Outliers of an `IntegerLinear` are multiplied by a
separate program, on another device: its result is added in the next one.
Memory: the maps' weights where maps run; norms, sinks, and of maps that
multiply outliers beside the codes and the float rows where the rest runs.
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
from ringjax.nn.integer import IntegerLinear
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.nn.tokens import Tokens
from ringjax.ops.mask import Mask

Weights = tuple[Shaped[Array, " ..."] | None, ...]
# A map's result: of integers or floats, and what is added to it or None.
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
      ConfigError: layers without a feedforward.
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
    there = lambda names: tuple(n for n in names if _at(block, n) is not None)
    self.inputs, self.output = there(_INPUTS), _OUTPUT
    self._beside = {
      n for n in (*self.inputs, *_OUTPUT) if _has_rows(_at(block, n))
    }
    self.wide: tuple[str, ...] = ()
    self.narrow: tuple[str, ...] = ()
    if isinstance(spec.feedforward, Plain | Gated):
      maps = there((*_WIDE, *_NARROW))
      if any(_has_rows(_at(block, n)) for n in maps):
        self.wide, self.narrow = there(_WIDE), _NARROW
        self._beside |= {n for n in maps if _has_rows(_at(block, n))}

  def split(self, weights: Weights) -> tuple[Weights, Weights]:
    """The weights of one layer: for the maps' device, and for the other."""
    maps, rest = [], []
    within = lambda path, names: any(path.startswith(f"{n}.") for n in names)
    for path, x in zip(self._paths, weights, strict=True):
      linear = within(path, (*self.inputs, *_OUTPUT, "feedforward"))
      beside = within(path, self._beside)
      only = beside and (".rows" in path or ".slots" in path)
      maps.append(x if linear and not only else None)
      rest.append(x if beside or not linear else None)
    return tuple(maps), tuple(rest)

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
    """Maps of x, without what is multiplied beside."""
    block = self._block(weights)

    def product(linear: Any) -> jax.Array:
      apart = isinstance(linear, IntegerLinear)
      return linear.main(x) if apart else linear(x)

    return tuple(product(_at(block, n)) for n in names)

  @functools.partial(jax.jit, static_argnums=(0,))
  def between(
    self, weights: Weights, x: Float[Array, "B T D"], wide: tuple[Result, ...]
  ) -> jax.Array:
    """Compute the input of the feedforward's last map, [B, T, F]."""
    block = self._block(weights)
    given = dict(zip(self.wide, wide, strict=True))
    slots = _placed(block, (*self.wide, *self.narrow), given)
    block.feedforward.row(x)
    return slots[self.narrow[0]].x

  @functools.partial(jax.jit, static_argnums=(0,))
  def feedforward(
    self, weights: Weights, x: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """The whole feedforward."""
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
    """Attention, and a cache of this layer alone with the tokens' keys.

    Args:
      weights: the layer's.
      made: results of the maps `inputs`.
      span: the T tokens.
      cache: holds the keys of the tokens before; donated.
    """
    block = self._block(weights)
    given = dict(zip(self.inputs, made, strict=True))
    slots = self._slots(block, given)
    first = made[0][0]
    cache = cache.allocate(span.at(first.shape[1]), replicated=False, sees=True)
    part = cache.layer(0, cache.slots[0], 0)
    # The layer's input goes nowhere: all that reads it is given.
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
    """Compute the feedforward's input of the layer's and attention's."""
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
    """The layer's output, of what `second_norm` read and the feedforward.

    `fed` is the feedforward's result if `whole`, else that of `narrow`.
    """
    block = self._block(weights)
    given = {_OUTPUT[0]: output}
    if whole:
      self._slots(block, given | {"feedforward": fed})
    else:
      given[self.narrow[0]] = fed
      maps = (*self.inputs, *_OUTPUT, *self.wide, *self.narrow)
      _placed(block, maps, given)
    return self._run(block, x, span)[0]

  def _slots(self, block: Any, given: dict[str, Result]) -> dict[str, _Slot]:
    """Slots in place of all maps, of which some have results."""
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
    """The module; what is elsewhere is zeros, which no program reads."""
    return jax.tree.unflatten(
      self._tree,
      [
        jnp.zeros(a.shape, a.dtype) if x is None else x
        for a, x in zip(self._shapes, weights, strict=True)
      ],
    )


class _Slot:
  """Takes the place of a map: it notes the input, and gives a result."""

  x: Any = None

  def __init__(self, module: Any, result: Result | None):
    self.module, self.result = module, result

  def __call__(self, x: jax.Array, *more: Any) -> jax.Array:
    self.x = x
    if self.result is None:
      # Nothing reads it but what is dropped with it.
      if more:
        return jnp.zeros_like(x)
      shape = jax.eval_shape(lambda x: self.module(x), x)
      return jnp.zeros(shape.shape, shape.dtype)
    main, beside = self.result
    return (main if beside is None else main + beside).astype(x.dtype)


# No arrays of a module, but a part of the program.
jax.tree_util.register_static(_Slot)


class _Context:
  """A sharding context that takes all tokens at once, and may not attend."""

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
  """Puts slots in place of a block's maps, with results or without."""
  slots = {}
  for name in names:
    *above, last = name.split(".")
    owner = _at(block, ".".join(above)) if above else block
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
