"""Layers that read hashed n-grams of the last tokens (Qwen4-Exp).

Guarantees: with e the concatenated embeddings of the n-grams that end with a
token, streams x_a, and norms n, m, p, before its other parts a layer adds

  g_a = sigmoid(s(n_a(key_a(e)) . m_a(x_a) / sqrt(D))) value(e)
  g_a + silu(conv_a(p_a(g_a)))

to each stream, where s(z) = sign(z) sqrt(|z|), and conv is a convolution of
each number over every N-th token, N of the longest n-gram. An n-gram has tokens
of one document, after the last end of a text; others count as such an end.
Equal results for a whole sequence, for chunks of it through a cache, and token
by token; for one device and for shards.
Cost: a row of each of the tables a token, which are not read otherwise.
Memory: the tables; for a row the last tokens that the convolution sees, with
their ids.
Ref:  Qwen Team 2026, Qwen4-Exp.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ringjax.kv.base import StateCache
from ringjax.kv.encoder_states import EncoderStates
from ringjax.kv.state import State, StateShape
from ringjax.nn.block import Block, CachedMixer, Layer, PartOfCache
from ringjax.nn.linear import Linear
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.delta import (
  Recurrent,
  RecurrentInputs,
  Taps,
  over_tokens,
)
from ringjax.nn.residuals import StreamNorm
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.recurrent.conv import Tail, causal_conv, lagged, tails
from ringjax.ops.recurrent.ngram_ids import ngram_ids
from ringjax.ops.softmax import wide_dtype
from ringjax.typing import Index

# Ids in a state are digits of so many bits, which all float dtypes hold.
_BITS = 8
_DIGITS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngrams:
  """Tables of a layer's n-grams, and sizes of how it reads them.

  Attributes:
    streams: Number of residual streams, A.
    orders: Numbers of rows of the tables of each order, from 2 tokens on.
    factors: Factors of an n-gram's tokens, the latest first.
    dim: Numbers of a row of a table.
    end: Id of the token that ends a text.
    parts: Number of arrays that a folder has the tables in.
    rows: Number of rows of all tables together, with unused ones.
    taps: Number of tokens that the convolution sees.
    eps: Epsilon of the norms.
  """

  streams: int
  orders: tuple[tuple[int, ...], ...]
  factors: tuple[int, ...]
  dim: int
  end: int
  parts: int
  rows: int
  taps: int
  eps: float

  @property
  def longest(self) -> int:
    """Number of tokens of the longest n-gram, N."""
    return len(self.orders) + 1

  @property
  def tail(self) -> int:
    """Number of earlier tokens that a token depends on."""
    return max((self.taps - 1) * self.longest, self.longest - 1)

  @property
  def numbers(self) -> int:
    """Numbers of all rows that a token reads."""
    return self.dim * sum(map(len, self.orders))

  def shape_of(self, layers: int, embed: int) -> StateShape:
    """Shape of the state that `layers` of a width keep."""
    return StateShape(
      layers=layers,
      heads=0,
      key=0,
      value=0,
      tail=self.tail,
      convolved=((self.streams, embed), (1, _DIGITS + 1)),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> NgramReader:
    return NgramReader(rngs, self, embed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramState(Recurrent):
  """State of a layer that reads n-grams: its last tokens.

  Attributes:
    ngrams: Tables of the layer.
    embed: Numbers of a stream, D.
  """

  ngrams: Ngrams
  embed: int

  def cache_shape(self, layers: int) -> StateShape:
    """Shape of the state that `layers` of this kind keep."""
    return self.ngrams.shape_of(layers, self.embed)


class NgramReader(nnx.Module):
  """The module of `Ngrams`."""

  def __init__(self, rngs: nnx.Rngs, spec: Ngrams, embed: int):
    self.spec, self.embed = spec, embed
    self.stored_rows = spec.rows
    a, size = spec.streams, spec.numbers
    rows = -(-spec.rows // spec.parts)
    self.table = param(
      rngs,
      (-(-spec.rows // rows), rows, spec.dim),
      (None, "vocab", None),
      fan_in=spec.dim,
    )
    self.key = Linear(rngs, (size,), (a, embed), (None, None, "embed"))
    self.value = Linear(rngs, (size,), (embed,), (None, "embed"))
    norm = lambda: StreamNorm(rngs, a, embed, eps=spec.eps)
    self.key_norm, self.query_norm, self.conv_norm = norm(), norm(), norm()
    self.taps = Taps(rngs, (a, embed, spec.taps), (None, None))

  def __call__(
    self,
    x: Float[Array, "B T A D"],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T A D"], StateCache]:
    """Compute the sum that is added to the streams, and the layer's cache."""
    spec = self.spec
    assert tokens.ids is not None
    seg = jnp.broadcast_to(tokens.seg, x.shape[:2])
    state = spec.shape_of(1, self.embed).empty(x.shape[0], x.dtype)
    if attend.resident:
      state = cache.recall(state)
    streams_tail, ids_tail = state.tail.x
    alone = lambda tail: State(state.memory, Tail((tail,), state.tail.seg))

    ids = RecurrentInputs((_digits(tokens.ids, x.dtype),), None, None, seg)
    earlier, ids_state = over_tokens(
      _earlier(spec.longest), (), ids, alone(ids_tail), attend
    )
    rows = self._rows(tokens.ids, earlier).astype(x.dtype)
    key = self.key_norm(self.key(rows))
    float_dtype = wide_dtype(x.dtype)
    products = key.astype(float_dtype) * self.query_norm(x).astype(float_dtype)
    scores = jnp.sum(products, -1) / math.sqrt(self.embed)
    size = jnp.sqrt(jnp.maximum(jnp.abs(scores), jnp.float32(1e-6)))
    gates = jax.nn.sigmoid(size * jnp.sign(scores)).astype(x.dtype)
    gated = gates[..., None] * self.value(rows)[:, :, None]

    inputs = RecurrentInputs((self.conv_norm(gated),), None, None, seg)
    convolved, conv_state = over_tokens(
      _convolved(spec.longest),
      self.taps.weight[...],
      inputs,
      alone(streams_tail),
      attend,
    )
    tail = Tail((*conv_state.tail.x, *ids_state.tail.x), conv_state.tail.seg)
    return gated + convolved, cache.keep(State(state.memory, tail))

  def _rows(
    self, ids: Int[Array, "B T"], earlier: Float[Array, "B T n X"]
  ) -> Float[Array, "B T E"]:
    """Rows of the n-grams that end with each token, one after another."""
    spec = self.spec
    weights = jnp.int32(1) << (jnp.arange(_DIGITS, dtype=jnp.int32) * _BITS)
    numbers = earlier.astype(jnp.int32)
    earlier_ids = jnp.sum(
      numbers[..., :_DIGITS] * weights[(None,) * 3], -1, dtype=jnp.int32
    )
    history = [ids]
    # Nothing before an end of a text counts.
    in_text = jnp.ones(ids.shape, bool)
    for n in range(spec.longest - 1):
      token = earlier_ids[..., n]
      in_text &= (numbers[..., n, _DIGITS] > 0) & (token != spec.end)
      history.append(jnp.where(in_text, token, spec.end))
    table = self.table[...]
    table = table.reshape(-1, table.shape[-1])
    starts = itertools.accumulate(
      itertools.chain.from_iterable(spec.orders), initial=0
    )
    first = jnp.asarray(list(starts)[:-1], jnp.int32)
    numbers_of_rows = jnp.concatenate(
      [
        ngram_ids(history[: n + 2], spec.factors, primes)
        for n, primes in enumerate(spec.orders)
      ],
      -1,
    )
    rows = table[numbers_of_rows + first[None, None]]
    return rows.reshape(*ids.shape, -1)


def _digits(ids: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T 1 X"]:
  """Ids as small numbers, and a one after them for a token that there is."""
  shifts = jnp.arange(_DIGITS, dtype=jnp.int32) * _BITS
  digits = (ids[..., None] >> shifts[None, None]) & ((1 << _BITS) - 1)
  ones = jnp.ones((*ids.shape, 1), digits.dtype)
  return jnp.concatenate([digits, ones], -1)[:, :, None].astype(dtype)


def _earlier(longest: int) -> Any:
  """Mixer that returns the tokens before each one, for `over_tokens`."""

  def mix(
    taps: Any, x: RecurrentInputs, state: State, axis: str | None
  ) -> tuple[Float[Array, "B T n X"], State]:
    del taps
    tail, next_tail = tails(state.tail, x.qkv, x.seg, axis)
    (digits,), (tail_digits,) = x.qkv, tail.x
    lags = range(1, longest)
    tokens = lagged(digits, x.seg, tail._replace(x=tail_digits), lags)
    return jnp.concatenate(tokens, 2), State(state.memory, next_tail)

  return mix


def _convolved(dilation: int) -> Any:
  """Mixer that convolves every `dilation`-th token, for `over_tokens`."""

  def mix(
    taps: Float[Array, "A D W"],
    x: RecurrentInputs,
    state: State,
    axis: str | None,
  ) -> tuple[Float[Array, "B T A D"], State]:
    tail, next_tail = tails(state.tail, x.qkv, x.seg, axis)
    (streams,), (tail_streams,) = x.qkv, tail.x
    tail = tail._replace(x=tail_streams)
    y = causal_conv(streams, taps, x.seg, tail, dilation=dilation)
    return jax.nn.silu(y), State(state.memory, next_tail)

  return mix


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramLayer(Layer):
  """A layer of several streams that may read n-grams before its other parts.

  Attributes:
    ngrams: Tables of its n-grams, or None.
    embed: Numbers of a stream, D; for layers that have tables.
  """

  ngrams: Ngrams | None = None
  embed: int = 0

  @property
  def mixers(self) -> tuple[CachedMixer, ...]:
    """Mixers of tokens, and what the layer keeps of n-grams."""
    if self.ngrams is None:
      return super().mixers
    state = NgramState(ngrams=self.ngrams, embed=self.embed)
    return (*super().mixers, state)

  def build(self, rngs: nnx.Rngs, embed: int) -> Block:
    if self.ngrams is None:
      return Block(rngs, self, embed)
    return NgramBlock(rngs, self, embed)


class NgramBlock(Block):
  """The module of an `NgramLayer` that has tables."""

  def __init__(self, rngs: nnx.Rngs, spec: NgramLayer, embed: int):
    super().__init__(rngs, spec, embed)
    assert spec.ngrams is not None
    self.ngrams = spec.ngrams.build(rngs, embed)

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T *D"], Any]:
    """[B, T, A, D] -> [B, T, A, D], and the caches of its mixers."""
    assert isinstance(cache, tuple)
    *others, ngram_cache = cache
    read: Any = self.ngrams
    added, ngram_cache = read(x, tokens, ngram_cache, attend)
    x = attend.constrain(x + added.astype(x.dtype))
    parts: Any = others[0] if len(others) == 1 else tuple(others)
    x, parts = super().__call__(x, tokens, parts, attend, states, number)
    parts = (parts,) if len(others) == 1 else parts
    return x, (*parts, ngram_cache)
