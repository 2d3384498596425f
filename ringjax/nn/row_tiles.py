"""Tokens of several calls in tiles of rows, which pass each product together.

Guarantees: a token's numbers depend on that token alone, not on its tile, nor
on which calls have tokens: one program computes any of them, products as in
`ops.flat_product_tpu`, and what is between them in a loop over tiles. What
tiles without tokens hold is undefined.
Cost: a product reads its weight once for all calls, in place in the stack of
layers. Tiles without tokens cost nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax import tree
from ringjax.nn.param import Rules, axis_names
from ringjax.nn.weights.layer_array import LayerArray
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.block_product_tpu import BlockCodes
from ringjax.ops.flat_product_tpu import (
  FlatWeight,
  LiveTiles,
  flat_gated,
  flat_product,
)
from ringjax.ops.sharded_product import WeightShards, product_per_shard
from ringjax.parallel.call_sharding import model_call
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
  """Places of the tokens of several calls in tiles of rows.

  The first token of a call is the first of a tile.

  Attributes:
    calls: Whether each of a call's places holds a token, bool [B, T].
    size: Number of rows of a tile.
    live: Tiles that hold tokens.
    present: 1 for each call that has tokens, else 0, int32 [].
    adapters: Adapter of each row of each call, int32 [B]; None without.
  """

  calls: tuple[Bool[Array, "_ _"], ...]
  size: int
  live: LiveTiles
  present: tuple[Int[Array, ""], ...]
  adapters: tuple[Int[Array, " _"] | None, ...]

  @classmethod
  def of(
    cls,
    segments: Sequence[Int[Array, "_ _"]],
    size: int,
    adapters: Sequence[Int[Array, " _"] | None] = (),
  ) -> RowTiles:
    """Tiles of this size for calls whose tokens have these segments."""
    calls = tuple(x > 0 for x in segments)
    live = LiveTiles.of(jnp.any(_joined(calls, size), 1))
    present = tuple(jnp.any(call).astype(jnp.int32) for call in calls)
    return cls(
      calls=calls,
      size=size,
      live=live,
      present=present,
      adapters=tuple(adapters) or (None,) * len(calls),
    )

  @property
  def holds(self) -> Bool[Array, "tiles size"]:
    """Whether each place of the tiles holds a token."""
    return _joined(self.calls, self.size)

  def joined(
    self, arrays: Sequence[Shaped[Array, "_ _ ..."]]
  ) -> Shaped[Array, "tiles size ..."]:
    """Tiles of each call's array [B, T, ...]."""
    return _joined(arrays, self.size)

  def take(
    self, x: Shaped[Array, "tiles size ..."], call: int
  ) -> Shaped[Array, "B T ..."]:
    """A call's array of an array of tiles; zeros without tokens."""
    holds = self.calls[call]
    rows, start = x.reshape(-1, *x.shape[2:]), self._first_row(call)
    rows = lax.slice_in_dim(rows, start, start + holds.size)
    part = rows.reshape(*holds.shape, *x.shape[2:])
    holds = holds.reshape(*holds.shape, *(1,) * (x.ndim - 2))
    return jnp.where(holds, part, jnp.zeros((), x.dtype))

  def put(
    self,
    x: Shaped[Array, "tiles size ..."],
    call: int,
    new: Shaped[Array, "B T ..."],
  ) -> Shaped[Array, "tiles size ..."]:
    """An array of tiles with those of a call replaced."""
    rows, start = x.reshape(-1, *x.shape[2:]), self._first_row(call)
    new = new.reshape(-1, *x.shape[2:]).astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(rows, new, start, 0).reshape(x.shape)

  def each_call(
    self,
    step: Callable[[int, Sequence[Array], PyTree], PyTree],
    arrays: Sequence[Shaped[Array, "tiles size ..."]],
    carry: PyTree,
  ) -> PyTree:
    """`carry` after a step of each call that has tokens, in their order.

    Args:
      step: Function of a call's number, its arrays [B, T, ...] and the carry
        that returns the next carry.
      arrays: Arrays of tiles.
      carry: Tree of arrays, which steps write to in place.
    """
    for call, present in enumerate(self.present):

      def body(n: Index, carry: Any, call: int = call) -> Any:
        # The compiler would compute what only depends on them before the loop.
        in_loop, _ = lax.optimization_barrier((tuple(arrays), n))
        return step(call, [self.take(x, call) for x in in_loop], carry)

      # A loop writes to the arrays in place, of which a branch makes copies.
      with jax.named_scope(f"joint_call_{call}"):
        carry = loop(present, body, carry)
    return carry

  def add_by_row(
    self,
    y: Float[Array, "tiles size O"],
    x: Float[Array, "tiles size ..."],
    f: Callable[[Array, Array], Array],
  ) -> Float[Array, "tiles size O"]:
    """y and `f` of the tokens of each row and the row's adapter.

    Args:
      y: Numbers of the tokens.
      x: Input of `f`.
      f: Function of x of a call, [B, T, ...], and the adapters of its rows,
        int32 [B], that returns [B, T, O].
    """

    def step(call: int, inputs: Sequence[Array], y: Array) -> Array:
      rows = self.adapters[call]
      if rows is None:
        return y
      # Weights that only depend on the rows would be read for no tokens.
      rows, (x,) = lax.optimization_barrier((rows, inputs))
      total = self.take(y, call) + f(x, rows).astype(y.dtype)
      return self.put(y, call, total)

    return self.each_call(step, (x,), y)

  def _first_row(self, call: int) -> int:
    """Number of the row of a call's first token."""
    return sum(-(-x.size // self.size) * self.size for x in self.calls[:call])

  def map_tiles(
    self,
    f: Callable[..., Any],
    *arrays: Shaped[Array, "tiles size ..."],
  ) -> Any:
    """`f` of each tile of some arrays that holds tokens, one after another.

    Args:
      f: Function of arrays [1, size, ...] that acts on each token, and
        multiplies no large weights.
      *arrays: Arrays of tiles.
    """
    take = lambda x, n: lax.dynamic_slice_in_dim(x, n, 1, 0)
    order = jnp.asarray(self.live.order)

    def step(n: Index, results: Any) -> Any:
      tile = order[n]
      put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, tile, 0)
      return jax.tree.map(put, results, f(*(take(x, tile) for x in arrays)))

    empty = jax.tree.map(
      lambda x: lax.empty((order.size, *x.shape[1:]), x.dtype),
      jax.eval_shape(lambda: f(*(take(x, 0) for x in arrays))),
    )
    with jax.named_scope("row_tiles"):
      return loop(jnp.asarray(self.live.count), step, empty)

  def product(
    self,
    x: Float[Array, "tiles size *in"],
    weight: TiledWeight,
    bias: Float[Array, "*out"] | None = None,
  ) -> Float[Array, "tiles size O"]:
    """Product of the tokens with a weight, and a bias, in one axis.

    Args:
      x: Tokens, of the weight's dtype if it is one of floats.
      weight: Weight of a layer.
      bias: Numbers that are added, or None.
    """
    rows = x.reshape(*x.shape[:2], -1)
    y = self._per_shard(_flat_product, rows, (weight,))
    if bias is None:
      return y
    flat_bias = bias.reshape(1, 1, -1).astype(y.dtype)
    return self.map_tiles(lambda y: y + flat_bias, y)

  def gated(
    self,
    x: Float[Array, "tiles size D"],
    gate: TiledWeight,
    up: TiledWeight,
    combine: Callable[[Array, Array], Array],
  ) -> Float[Array, "tiles size F"]:
    """`combine` of the products with two weights, number by number.

    The weights have one form, see `TiledWeight.form`.
    """
    f = functools.partial(_flat_gated, combine)
    return self._per_shard(f, x, (gate, up))

  def _per_shard(
    self,
    f: Callable[..., Array],
    x: Float[Array, "tiles size I"],
    weights: Sequence[TiledWeight],
  ) -> Float[Array, "tiles size O"]:
    """`f` of tokens and weights on each shard of the weights.

    Args:
      f: Function (x, weights, index, live, wide) -> products.
      x: Tokens.
      weights: Weights of one form.
    """
    first = weights[0]
    if num_padding := first.inputs - x.shape[-1]:
      x = jnp.pad(x, ((0, 0), (0, 0), (0, num_padding)))

    def local(x: Array, arrays: tuple[Any, ...], wide: bool) -> Array:
      stacked, index, live = arrays
      as_matrix = functools.partial(_as_matrix, first.contracted, len(index))
      return f(x, tuple(map(as_matrix, stacked)), index, live, wide)

    arrays = tuple(x.stacked for x in weights), first.index, self.live
    replicated = jax.tree.map(lambda _: P(), (first.index, self.live))
    specs = (first.specs,) * len(weights), *replicated
    return product_per_shard(local, x, arrays, specs, first.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputCodes:
  """Codes of 8 bits of a weight, with a step for each output.

  Attributes:
    codes: Codes, int8 [*layers, *in, O].
    step: Steps, float32 [*layers, O].
  """

  codes: Int[ArrayLeaf, ...]
  step: Float[ArrayLeaf, ...]


tree.register(OutputCodes, data=("codes", "step"), meta=())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledWeight:
  """Weight of a map, in place in its stack, for products of rows in tiles.

  Attributes:
    stacked: Floats [*layers, *in, *out], codes [*layers, *in, O], or codes of
      groups [*layers, G, rows, O].
    index: Position in each axis of the stack, int32 [] each.
    contracted: Number of axes of the inputs of `stacked`.
    inputs: Number of inputs that a token has for it, with padding.
    shards: Mesh axes that shard it.
  """

  stacked: Float[Array, ...] | OutputCodes | BlockCodes
  index: tuple[Int[Array, ""], ...]
  contracted: int
  inputs: int
  shards: WeightShards

  @classmethod
  def of_floats(cls, parameter: nnx.Variable, contracted: int) -> TiledWeight:
    """A weight [*in, *out], sharded as the default `Rules` have it."""
    stacked, index = in_place(parameter.get_value())
    shape = stacked.shape[len(index) :]
    return cls(
      stacked=stacked,
      index=index,
      contracted=contracted,
      inputs=math.prod(shape[:contracted]),
      shards=default_shards(parameter, contracted),
    )

  @property
  def form(self) -> tuple[Any, ...]:
    """Kind of the weight: those that one kernel multiplies have the same."""
    leaves, structure = jax.tree.flatten(self.stacked)
    shapes = [(x.shape, np.dtype(x.dtype)) for x in leaves]
    return structure, shapes, self.contracted, self.shards

  @property
  def specs(self) -> PyTree:
    """Sharding of each array of `stacked`."""
    layers = (None,) * len(self.index)
    inputs, outputs = self.shards.inputs or None, self.shards.outputs or None
    other_inputs = (None,) * (self.contracted - 1)
    of_matrix = P(*layers, inputs, *other_inputs, outputs)
    codes = self.stacked
    if isinstance(codes, OutputCodes):
      of_steps = P(*layers, outputs)
      return tree.with_leaves(codes, codes=of_matrix, step=of_steps)
    if not isinstance(codes, BlockCodes):
      return of_matrix
    of_scales = P(*layers, inputs, outputs)
    return tree.with_leaves(
      codes,
      codes=P(*layers, inputs, None, outputs),
      step=of_scales,
      least=None if codes.least is None else of_scales,
    )


def tiled_pair(
  first: nnx.Module, second: nnx.Module
) -> tuple[TiledWeight, TiledWeight] | None:
  """Weights of two maps that one kernel may multiply; None: it may not.

  Maps without a `tiled_weight` add to the product with their weight.
  """
  makes = [getattr(map_, "tiled_weight", None) for map_ in (first, second)]
  weights = tuple(make() for make in makes if make is not None)
  if len(weights) < 2 or weights[0].form != weights[1].form:
    return None
  return weights[0], weights[1]


def default_shards(parameter: nnx.Variable, contracted: int) -> WeightShards:
  """Mesh axes by which the default `Rules` shard a parameter [*in, *out]."""
  mesh = model_call().mesh
  if mesh is None:
    return WeightShards()
  spec = tuple(Rules().sharding(parameter, mesh).spec)
  axes = parameter.get_metadata()["axes"]
  layers = len(parameter.get_value().shape) - len(axes)
  entries = (*spec, *(None,) * (layers + len(axes)))[layers:]
  return WeightShards(
    inputs=axis_names(entries[0]), outputs=axis_names(entries[contracted])
  )


def _as_matrix(
  contracted: int,
  layers: int,
  weight: Float[Array, ...] | OutputCodes | BlockCodes,
) -> FlatWeight:
  """A shard of a weight with its inputs in one axis, which is no copy.

  Outputs in one axis would be one.
  """
  in_one_axis = lambda x: x.reshape(
    *x.shape[:layers], -1, *x.shape[layers + contracted :]
  )
  if isinstance(weight, BlockCodes):
    return weight
  if not isinstance(weight, OutputCodes):
    return in_one_axis(weight)
  # All inputs are one group.
  codes = jnp.expand_dims(in_one_axis(weight.codes), layers)
  step = jnp.expand_dims(weight.step, layers)
  return BlockCodes(codes=codes, step=step, least=None)


def _flat_product(
  x: Float[Array, "tiles size I"],
  weights: tuple[FlatWeight, ...],
  index: tuple[Int[Array, ""], ...],
  live: LiveTiles,
  wide: bool,
) -> Float[Array, "tiles size O"]:
  """Product of tokens with a shard of a weight, float32 if `wide`."""
  return flat_product(x, weights[0], live, index, wide=wide)


def _flat_gated(
  combine: Callable[[Array, Array], Array],
  x: Float[Array, "tiles size I"],
  weights: tuple[FlatWeight, ...],
  index: tuple[Int[Array, ""], ...],
  live: LiveTiles,
  wide: bool,
) -> Float[Array, "tiles size O"]:
  """`combine` of the products of tokens with shards of two weights."""
  assert not wide, "a gate's inputs are not sharded"
  gate, up = weights
  return flat_gated(x, (gate, up), live, index, combine)


def _joined(
  arrays: Sequence[Shaped[Array, "_ _ ..."]], size: int
) -> Shaped[Array, "tiles size ..."]:
  """Tiles of rows of arrays of calls, each call's padded to whole tiles."""

  def padded(x: Array) -> Array:
    rows = x.reshape(-1, *x.shape[2:])
    return jnp.pad(rows, [(0, -rows.shape[0] % size)] + [(0, 0)] * (x.ndim - 2))

  rows = jnp.concatenate([padded(x) for x in arrays])
  return rows.reshape(-1, size, *rows.shape[1:])


def in_place(
  value: LayerArray | Shaped[Array, " ..."],
) -> tuple[Shaped[Array, " ..."], tuple[Int[Array, ""], ...]]:
  """A layer's array, or the stack that it is in, and its place there."""
  if isinstance(value, LayerArray):
    return value.stacked, (value.layer,)
  return value, ()


_CURRENT: contextvars.ContextVar[RowTiles | None] = contextvars.ContextVar(
  "ringjax_row_tiles", default=None
)


@contextlib.contextmanager
def in_row_tiles(tiles: RowTiles | None) -> Iterator[None]:
  """Tell linear maps, while layers are traced, that their rows are in tiles.

  With None their rows are those of one call.
  """
  token = _CURRENT.set(tiles)
  try:
    yield
  finally:
    _CURRENT.reset(token)


def current_row_tiles() -> RowTiles | None:
  """Tiles of the rows of the layers that are traced; None: rows of one call."""
  return _CURRENT.get()


def by_tile(f: Callable[..., Any], *arrays: PyTree) -> Any:
  """`f` of trees of arrays [B, T, ...]; of rows in tiles see `RowTiles`."""
  tiles = current_row_tiles()
  return by_token(f, *arrays) if tiles is None else tiles.map_tiles(f, *arrays)


# Function (f, *arrays) -> f(*arrays) that is applied to what acts on a token.
TokenMap = Callable[..., Any]
_TOKEN_MAP: contextvars.ContextVar[TokenMap | None] = contextvars.ContextVar(
  "ringjax_token_map", default=None
)


@contextlib.contextmanager
def token_map(apply: TokenMap | None) -> Iterator[None]:
  """Apply functions of tokens by `apply`, while layers are traced."""
  token = _TOKEN_MAP.set(apply)
  try:
    yield
  finally:
    _TOKEN_MAP.reset(token)


def by_token(f: Callable[..., Any], *arrays: PyTree) -> Any:
  """`f` of trees of arrays [B, T, ...], by token; see `token_map`."""
  apply = _TOKEN_MAP.get()
  return f(*arrays) if apply is None else apply(f, *arrays)
