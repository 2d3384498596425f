"""Programs of drafts by a model: chains, trees, and what is read before them.

Guarantees: the compiled programs depend on neither the context's length nor
what is in it.
Cost: a step of the draft model for each drafted token of a chain; for a tree a
call a depth, which reads the tree's tokens so far.

Trees of a beam: Cai et al. 2024 (Medusa, arXiv 2401.10774), Yang et al. 2025
(LongSpec, arXiv 2502.17421).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE, finite_rows, or_not_finite
from ringjax.infer.sampling import law, log_weights, noise
from ringjax.infer.speculate.verifiers import DRAFT
from ringjax.kv.base import CallCache
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf

# Tokens that are read at once where a draft model has fallen behind.
WINDOW = 16


class Missing(NamedTuple):
  """Tokens that the draft's cache does not have yet.

  Fields:
    tokens: int32 [B, W], in order, padding behind them.
    count: int32 [B], how many there are.
    pos: int32 [B], the position of the first; from there on the cache's tokens
      are of no more use.
  """

  tokens: Int[ArrayLeaf, "B W"]
  count: Int[ArrayLeaf, " B"]
  pos: Int[ArrayLeaf, " B"]


@bounded
@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def read_more(
  model: Transformer,
  attend: CachedAttention,
  cache: CallCache,
  read: Missing,
  length: Int[Array, ""],
) -> Any:
  """The cache with tokens that were missing, `WINDOW` at most."""
  return _begun(model, attend, cache, read, WINDOW, length)[1]


@bounded
@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def without(
  cache: CallCache, end: Int[Array | np.ndarray, " B"], most: int
) -> Any:
  """The cache without tokens from `end` on, `most` of a row at most."""
  held: Any = cache
  return held.truncate(end, most)


def _begun(
  model: Transformer,
  attend: CachedAttention,
  cache: Any,
  read: Missing,
  most: int,
  length: Any,
) -> tuple[jax.Array, Any]:
  """Reads what is missing: the logits [B, V] behind it, and the cache."""
  apart = cache.kind.evicting or cache.kind.device is not None
  if not (apart or cache.recurrent):
    cache = cache.truncate(read.pos, most + read.tokens.shape[1])
  index = jnp.arange(read.tokens.shape[1], dtype=jnp.int32)[None]
  last = jnp.maximum(read.count - 1, 0)[:, None]
  logits, cache = forward(
    model,
    attend,
    read.tokens,
    read.pos[:, None] + index,
    (index < read.count[:, None]).astype(jnp.int32),
    cache,
    last,
    length,
  )
  return attend.everywhere(logits[:, 0]), cache


@runtime_checkable
class Ranks(Protocol):
  """A sampler with settings of its own for each row."""

  def ranked(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Float[Array, "B V"]:
    """Logarithms of probabilities, with the noise by which a row draws: of the
    largest one the sampler makes its token."""
    ...


class TreeShape(NamedTuple):
  """How many tokens a tree has at each depth, and how many of all stay."""

  widths: tuple[int, ...]
  best: int


class _Drafting(NamedTuple):
  """What the parts of a program that drafts have in common.

  Fields:
    model: which drafts.
    attend: over which shards its cache is.
    drawn: see `Target`.
    sampler: a pytree.
    live: int32 [B, 1], 1 for the rows that take part.
    pos: int32 [B], the position of the first drafted token in the draft's text.
    at: int32 [B], that in the target's text, by which a sampler draws.
    seen: see `DecodeState`.
    length: of the whole context.
  """

  model: Transformer
  attend: CachedAttention
  drawn: bool
  sampler: Any
  live: Any
  pos: Any
  at: Any
  seen: Any
  length: Any

  def read(self, tokens: Any, pos: Any, cache: Any, parents: Any = None) -> Any:
    """Logits [B, T, V] behind tokens, everywhere, and the cache."""
    live = jnp.broadcast_to(self.live, tokens.shape)
    tokens = jnp.maximum(tokens, 0)
    logits, cache = forward(
      self.model, self.attend, tokens, pos, live, cache, None, self.length,
      parents,
    )  # fmt: skip
    return self.attend.everywhere(logits), cache


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=(5,))
def drafted(
  model: Transformer,
  attend: CachedAttention,
  shape: int | TreeShape,
  drawn: bool,
  sampler: Callable[..., Any],
  cache: CallCache,
  read: Missing,
  at: Int[Array | np.ndarray, " B"],
  seen: Bool[Array | np.ndarray, "B V"] | None,
  length: Int[Array, ""],
) -> tuple[tuple[Any, Any, Any], Any]:
  """A chain of so many tokens, or a tree.

  Args:
    model: which drafts.
    attend: over which shards its cache is.
    shape: how many tokens.
    drawn: see `Target`.
    sampler: a pytree.
    cache: the model's.
    read: what it has to read before.
    at: position of the first drafted token in the target's text.
    seen: see `DecodeState`.
    length: of the whole context.

  Returns:
    tokens [B, n], `NOT_FINITE` where the logits are not finite; the laws that
    they were drawn from, [B, n, V], or None; of a tree the token that each
    follows, [B, n]; and the cache.
  """
  nodes = shape if isinstance(shape, int) else sum(shape.widths)
  logits, held = _begun(model, attend, cache, read, nodes, length)
  # States can't go back: they stay as they are before the draft.
  before = held.snapshot() if held.recurrent else None
  live = (read.count > 0).astype(jnp.int32)[:, None]
  call = _Drafting(
    model, attend, drawn, sampler, live, read.pos + read.count, at, seen, length
  )
  if isinstance(shape, int):
    found, held = _chain(call, shape, logits, held)
  else:
    found, held = _tree(call, shape, logits, held)
  if before is not None:
    held = held.restore(before)
  return jax.tree.map(attend.everywhere, found), held


def _chain(
  call: _Drafting, count: int, logits: Float[Array, "B V"], cache: Any
) -> tuple[tuple[Any, Any, Any], Any]:
  """`count` tokens one after the other."""

  def one(
    carry: tuple[Any, Any, Any], step: jax.Array
  ) -> tuple[tuple[Any, Any, Any], tuple[Any, Any]]:
    cache, token, seen = carry
    logits, cache = call.read(token[:, None], (call.pos + step)[:, None], cache)
    token, q = _next(call, logits[:, 0], call.at + step + 1, seen)
    return (cache, token, _seen(seen, token)), (token, q)

  token, q = _next(call, logits, call.at, call.seen)
  steps = jnp.arange(count - 1, dtype=jnp.int32)
  carry = cache, token, _seen(call.seen, token)
  (cache, *_), more = lax.scan(one, carry, steps)
  tokens, laws = jax.tree.map(
    lambda x, rest: jnp.moveaxis(jnp.concatenate([x[None], rest]), 0, 1),
    (token, q),
    more,
  )
  return (tokens, laws, None), cache


def _tree(
  call: _Drafting,
  shape: TreeShape,
  logits: Float[Array, "B V"],
  cache: Any,
) -> tuple[tuple[Any, Any, Any], Any]:
  """Tokens by depth.

  Those that are chosen are the likeliest by their whole paths; those that are
  drawn are as many for each token of the depth before.
  """
  batch, widths = logits.shape[0], shape.widths
  tokens = parents = jnp.zeros((batch, 0), jnp.int32)
  # Of each token the least sum of a path to it or to one before it.
  values = jnp.zeros((batch, 0))
  laws: list[jax.Array] = []
  # Of the depth before: logits [B, w, V], sums of their paths, numbers.
  ends, total = logits[:, None], jnp.zeros((batch, 1))
  numbers = jnp.full((batch, 1), -1, jnp.int32)
  for depth, width in enumerate(widths):
    first = tokens.shape[1]
    if call.drawn:
      came, which, some = _drawn(call, ends, call.at + depth, width, first)
      laws += some
    else:
      came, which, total = _likeliest(call, ends, call.at + depth, total, width)
    sound = jnp.take_along_axis(finite_rows(ends), which, 1)
    came = jnp.where(sound, came, NOT_FINITE)
    tokens = jnp.concatenate([tokens, came], 1)
    above = jnp.take_along_axis(numbers, which, 1)
    parents = jnp.concatenate([parents, above], 1)
    least = jnp.take_along_axis(
      jnp.pad(values, ((0, 0), (1, 0)), constant_values=jnp.inf), above + 1, 1
    )
    values = jnp.concatenate([values, jnp.minimum(least, total)], 1)
    numbers = jnp.broadcast_to(
      first + jnp.arange(width, dtype=jnp.int32)[None], (batch, width)
    )
    if depth + 1 < len(widths):
      depths = np.repeat(np.arange(depth + 1), widths[: depth + 1])
      pos = call.pos[:, None] + jnp.asarray(depths, jnp.int32)[None]
      found, cache = call.read(tokens, pos, cache, parents)
      cache = cache.keep(jnp.zeros(tokens.shape, bool))
      ends = found[:, first:]
  if shape.best < tokens.shape[1]:
    tokens, parents = _best(tokens, parents, values, shape.best)
  return (tokens, jnp.stack(laws, 1) if laws else None, parents), cache


def _best(
  tokens: Int[Array, "B N"],
  parents: Int[Array, "B N"],
  values: Float[Array, "B N"],
  count: int,
) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
  """The tokens of the largest values and their parents.

  No token has a larger value than its parent, of two equal ones the earlier
  counts: a token's parent is there too.
  """
  _, places = lax.top_k(values, count)
  places = jnp.sort(places, 1).astype(jnp.int32)
  rows = jnp.arange(tokens.shape[0])[:, None]
  there = jnp.zeros(tokens.shape, jnp.int32).at[rows, places].set(1)
  number = jnp.pad(jnp.cumsum(there, 1) - 1, ((0, 0), (1, 0)))
  number = number.at[:, 0].set(-1)
  above = jnp.take_along_axis(parents, places, 1)
  return (
    jnp.take_along_axis(tokens, places, 1),
    jnp.take_along_axis(number, above + 1, 1),
  )


def _next(
  call: _Drafting, logits: Float[Array, "B V"], at: Int[Array, " B"], seen: Any
) -> tuple[jax.Array, Any]:
  """A drafted token [B] at `at`, and the law that it was drawn from."""
  if not call.drawn:
    return or_not_finite(call.sampler(logits, at, seen), logits), None
  q = law(call.sampler, logits, seen)
  return or_not_finite(_by_law(call, q, at, DRAFT), logits), q


def _by_law(
  call: _Drafting, q: Float[Array, "B V"], at: Int[Array, " B"], stream: int
) -> Int[Array, " B"]:
  rows = jnp.arange(q.shape[0])
  gumbel = noise(call.sampler, rows, at, q.shape[1], stream=stream)
  return jnp.argmax(jnp.log(q) + gumbel, 1).astype(jnp.int32)


def _drawn(
  call: _Drafting,
  logits: Float[Array, "B w V"],
  at: Int[Array, " B"],
  width: int,
  first: int,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
  """Nodes `first`, first + 1 ...: tokens, places of parents [B, n], laws."""
  batch, wide = logits.shape[:2]
  found, laws = [], []
  which = np.repeat(np.arange(wide), width // wide)
  for number, parent in enumerate(which, first):
    laws.append(law(call.sampler, logits[:, parent], call.seen))
    # Each node has a stream of its own, beside those of `verifiers`.
    found.append(_by_law(call, laws[-1], at, DRAFT + 4 * (1 + number)))
  places = jnp.broadcast_to(jnp.asarray(which, jnp.int32)[None], (batch, width))
  return jnp.stack(found, 1), places, laws


def _likeliest(
  call: _Drafting,
  logits: Float[Array, "B w V"],
  at: Int[Array, " B"],
  total: Float[Array, "B w"],
  width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Tokens, places of parents and sums of the likeliest paths, [B, n]."""
  batch, wide, vocab = logits.shape
  # With the numbers by which the sampler itself will draw there.
  if isinstance(call.sampler, Ranks):
    weigh = lambda logits: call.sampler.ranked(logits, at, call.seen)
    scores = jax.vmap(weigh, 1, 1)(logits) + total[..., None]
  else:
    weigh = lambda logits: log_weights(call.sampler, logits, call.seen)
    scores = jax.vmap(weigh, 1, 1)(logits) + total[..., None]
    scores += noise(call.sampler, jnp.arange(batch), at, vocab)[:, None]
  total, best = lax.top_k(scores.reshape(batch, wide * vocab), width)
  place, token = jnp.divmod(best.astype(jnp.int32), vocab)
  return token, place, total


def _seen(seen: Any, token: jax.Array) -> Any:
  if seen is None:
    return None
  return seen.at[jnp.arange(token.shape[0]), token].set(True)
