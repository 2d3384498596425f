"""Compiled programs of a draft model: chains, trees, and missing tokens.

Guarantees: the compiled programs depend neither on the context's length nor on
its contents.
Cost: a step of the draft model for each drafted token of a chain; for a tree a
call for each depth, which reads the tree's tokens so far.

Trees of a beam: Cai et al. 2024 (Medusa, arXiv 2401.10774), Yang et al. 2025
(LongSpec, arXiv 2502.17421); of those the likeliest are checked: Li et al. 2024
(EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.infer.finite import NOT_FINITE, finite_rows, or_not_finite
from ringjax.infer.sampling import law, log_weights, noise
from ringjax.infer.speculate.drafter import TreeShape
from ringjax.infer.speculate.verifiers import DRAFT
from ringjax.kv.model_cache import ModelCache
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf

# Tokens read in one call when a draft model has to catch up.
WINDOW = 16


class Missing(NamedTuple):
  """Tokens that the draft's cache does not have yet.

  Fields:
    tokens: Missing token ids in order, then padding, int32 [B, W].
    count: Number of missing tokens, int32 [B].
    pos: Position of the first, int32 [B]; cached tokens from there on are
      stale.
  """

  tokens: Int[ArrayLeaf, "B W"]
  count: Int[ArrayLeaf, " B"]
  pos: Int[ArrayLeaf, " B"]


@bounded
@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def read_more(
  model: Transformer,
  attend: CachedAttention,
  cache: ModelCache,
  read: Missing,
  length: Int[Array, ""],
) -> ModelCache:
  """Reads missing tokens into the cache, at most `WINDOW`."""
  return _begun(model, attend, cache, read, WINDOW, length)[1]


@bounded
@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def without(
  cache: ModelCache, end: Int[Array | np.ndarray, " B"], most: int
) -> ModelCache:
  """Removes tokens from `end` on, at most `most` of a row, from the cache."""
  return cache.truncate(end, most)


def _begun(
  model: Transformer,
  attend: CachedAttention,
  cache: ModelCache,
  read: Missing,
  most: int,
  length: Int[Array, ""],
) -> tuple[jax.Array, Any]:
  """Reads missing tokens; returns logits [B, V] after them, and the cache."""
  already_truncated = cache.kind.evicting or cache.kind.tier.device is not None
  if not (already_truncated or cache.recurrent):
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
  """A sampler with separate settings for each row."""

  def ranked(
    self,
    logits: Float[Array, "B V"],
    pos: Int[Array, " B"],
    seen: Bool[Array, "B V"],
  ) -> Float[Array, "B V"]:
    """Log probabilities plus the noise that draws for each row.

    The sampler's token is the one with the largest sum.
    """
    ...


class TreeNodes(NamedTuple):
  """Drafted tokens that are continued, in the order of their depths.

  Fields:
    tokens: Token ids, int32 [B, N].
    parents: Index of the token that each follows, int32 [B, N], -1 for those
      that follow the text.
    depths: Number of drafted tokens before each one on its path, N numbers.
  """

  tokens: Int[Array, "B N"]
  parents: Int[Array, "B N"]
  depths: tuple[int, ...]

  def offsets(self) -> Int[Array, "1 N"]:
    """Depths as an array, by which positions count."""
    return jnp.asarray(np.array(self.depths, np.int32))[None]


@runtime_checkable
class DraftCall(Protocol):
  """Arguments of a program that drafts; see `_Drafting`."""

  @property
  def drawn(self) -> bool: ...
  @property
  def sampler(self) -> Callable[..., Any]: ...
  @property
  def pos(self) -> Any: ...
  @property
  def at(self) -> Any: ...
  @property
  def seen(self) -> Any: ...

  def read(
    self, tokens: Int[Array, "B T"], pos: Int[Array, "B T"], cache: PyTree
  ) -> tuple[Any, Any]:
    """Reads tokens [B, T]; returns logits [B, T, V] and the cache."""
    ...

  def read_depth(
    self, nodes: TreeNodes, first: int, cache: PyTree
  ) -> tuple[Any, Any]:
    """Reads tokens of a tree.

    Args:
      nodes: Tokens of the tree, those of earlier calls first.
      first: Index of the first new one, all of one depth.
      cache: Cache, or other state, of the calls before.

    Returns:
      Logits [B, w, V] after the w new tokens, and the cache.
    """
    ...


class _Drafting(NamedTuple):
  """Arguments shared by the parts of a drafting program.

  Fields:
    model: Draft model.
    attend: Cached attention over the shards of the draft's cache.
    drawn: Whether tokens are drawn, see `Target`.
    sampler: Sampler of the target, a pytree.
    live: 1 for the rows that take part, int32 [B, 1].
    pos: Position of the first drafted token in the draft's text, int32 [B].
    at: Position of that token in the target's text, by which a sampler draws,
      int32 [B].
    seen: Ids that each row has, see `DecodeState`.
    length: Length of the whole context, for rotations.
  """

  model: Transformer
  attend: CachedAttention
  drawn: bool
  sampler: Callable[..., Any]
  live: Int[ArrayLeaf, "B 1"]
  pos: Int[ArrayLeaf, " B"]
  at: Any
  seen: Any
  length: Int[ArrayLeaf, ""]

  def read(
    self,
    tokens: Int[Array, "B T"],
    pos: Int[Array, "B T"],
    cache: ModelCache,
    parents: Int[Array, "B T"] | None = None,
  ) -> tuple[Float[Array, "B T V"], ModelCache]:
    """Reads tokens; returns replicated logits [B, T, V] and the cache."""
    live = jnp.broadcast_to(self.live, tokens.shape)
    tokens = jnp.maximum(tokens, 0)
    logits, cache = forward(
      self.model, self.attend, tokens, pos, live, cache, None, self.length,
      parents,
    )  # fmt: skip
    return self.attend.everywhere(logits), cache

  def read_depth(
    self, nodes: TreeNodes, first: int, cache: ModelCache
  ) -> tuple[Float[Array, "B w V"], ModelCache]:
    """Reads all tokens of a tree again, which the cache does not keep."""
    pos = self.pos[:, None] + nodes.offsets()
    logits, cache = self.read(nodes.tokens, pos, cache, nodes.parents)
    nothing = jnp.zeros((pos.shape[0],), jnp.int32)
    return logits[:, first:], cache.keep_first(nothing, pos.shape[1])


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=(5,))
def drafted(
  model: Transformer,
  attend: CachedAttention,
  shape: int | TreeShape,
  drawn: bool,
  sampler: Callable[..., Any],
  cache: ModelCache,
  read: Missing,
  at: Int[Array | np.ndarray, " B"],
  seen: Bool[Array | np.ndarray, "B V"] | None,
  length: Int[Array, ""],
) -> tuple[tuple[Any, Any, Any], Any]:
  """Drafts a chain of tokens, or a tree.

  Args:
    model: Draft model.
    attend: Cached attention over the shards of the draft's cache.
    shape: Number of tokens of a chain, or the shape of a tree.
    drawn: Whether tokens are drawn, see `Target`.
    sampler: Sampler of the target, a pytree.
    cache: Cache of the draft model; donated.
    read: Missing tokens to read before drafting.
    at: Position of the first drafted token in the target's text, int32 [B].
    seen: Ids that each row has, see `DecodeState`.
    length: Length of the whole context, for rotations.

  Returns:
    Tokens [B, n], `NOT_FINITE` where the logits are not finite; the
    distributions that they were drawn from, [B, n, V], or None; for a tree the
    parent of each token, [B, n]; and the cache.
  """
  nodes = shape if isinstance(shape, int) else shape.continued
  logits, draft_cache = _begun(model, attend, cache, read, nodes, length)
  # Recurrent states can't be truncated: they are restored after the draft.
  snapshot = draft_cache.snapshot() if draft_cache.recurrent else None
  live = (read.count > 0).astype(jnp.int32)[:, None]
  call = _Drafting(
    model, attend, drawn, sampler, live, read.pos + read.count, at, seen, length
  )
  draft, draft_cache = drafted_by(call, shape, logits, draft_cache)
  if snapshot is not None:
    draft_cache = draft_cache.restore(snapshot)
  return jax.tree.map(attend.everywhere, draft), draft_cache


def drafted_by(
  call: DraftCall,
  shape: int | TreeShape,
  logits: Float[Array, "B V"],
  cache: PyTree,
) -> tuple[tuple[Any, Any, Any], Any]:
  """Drafts a chain of tokens, or a tree.

  Args:
    call: Arguments of the drafting program.
    shape: Number of tokens of a chain, or the shape of a tree, n tokens in all.
    logits: Logits of the first token, [B, V].
    cache: Cache, or other state, that methods of `call` take and return.

  Returns:
    Tokens [B, n], their distributions or None, for a tree their parents [B, n];
    and the cache.
  """
  draft = _chained if isinstance(shape, int) else _tree
  return draft(call, cast(Any, shape), logits, cache)


def _chained(
  call: DraftCall, count: int, logits: Float[Array, "B V"], cache: PyTree
) -> tuple[tuple[Any, Any, Any], Any]:
  """Drafts `count` tokens one after the other."""

  def draft_step(
    carry: tuple[Any, Any, Any], step: jax.Array
  ) -> tuple[tuple[Any, Any, Any], tuple[Any, Any]]:
    cache, token, seen = carry
    logits, cache = call.read(token[:, None], (call.pos + step)[:, None], cache)
    token, q = _next(call, logits[:, 0], call.at + step + 1, seen)
    return (cache, token, _seen(seen, token)), (token, q)

  token, q = _next(call, logits, call.at, call.seen)
  steps = jnp.arange(count - 1, dtype=jnp.int32)
  carry = cache, token, _seen(call.seen, token)
  (cache, *_), later_steps = lax.scan(draft_step, carry, steps)
  tokens, laws = jax.tree.map(
    lambda x, later: jnp.moveaxis(jnp.concatenate([x[None], later]), 0, 1),
    (token, q),
    later_steps,
  )
  return (tokens, laws, None), cache


def _tree(
  call: DraftCall,
  shape: TreeShape,
  logits: Float[Array, "B V"],
  cache: PyTree,
) -> tuple[tuple[Any, Any, Any], Any]:
  """Drafts a tree of tokens, depth by depth.

  Without drawing, the tokens with the likeliest whole paths are taken; drawn
  tokens are spread evenly over the tokens of the depth before.
  """
  batch, widths = logits.shape[0], shape.widths
  tokens = parents = jnp.zeros((batch, 0), jnp.int32)
  # For each token the lowest path sum of the token and its ancestors.
  values = jnp.zeros((batch, 0))
  laws: list[jax.Array] = []
  # From the depth before, of the w tokens that are continued: logits [B, w, V],
  # path sums, their numbers, and the first index among those of all depths.
  ends, total = logits[:, None], jnp.zeros((batch, 1))
  numbers, start = jnp.full((batch, 1), -1, jnp.int32), -1
  nodes = TreeNodes(tokens, parents, ())
  for depth, width in enumerate(widths):
    first = tokens.shape[1]
    if call.drawn:
      new_tokens, places, depth_laws = _drawn(
        call, ends, call.at + depth, width, first
      )
      laws += depth_laws
    else:
      new_tokens, places, total = _likeliest(
        call, ends, call.at + depth, total, width
      )
    finite = jnp.take_along_axis(finite_rows(ends), places, 1)
    new_tokens = jnp.where(finite, new_tokens, NOT_FINITE)
    tokens = jnp.concatenate([tokens, new_tokens], 1)
    above = jnp.take_along_axis(numbers, places, 1)
    parents = jnp.concatenate([parents, above], 1)
    above_values = jnp.take_along_axis(
      jnp.pad(values, ((0, 0), (1, 0)), constant_values=jnp.inf), above + 1, 1
    )
    values = jnp.concatenate([values, jnp.minimum(above_values, total)], 1)
    # Of several that are not drawn the likeliest are the first.
    width = min(width, shape.beam or width)
    total = total[:, :width]
    numbers = jnp.broadcast_to(
      first + jnp.arange(width, dtype=jnp.int32)[None], (batch, width)
    )
    if depth + 1 < len(widths):
      above = start + places[:, :width]
      start = len(nodes.depths)
      nodes = TreeNodes(
        jnp.concatenate([nodes.tokens, new_tokens[:, :width]], 1),
        jnp.concatenate([nodes.parents, above], 1),
        (*nodes.depths, *(depth,) * width),
      )
      ends, cache = call.read_depth(nodes, start, cache)
  if shape.best < tokens.shape[1]:
    tokens, parents = _best(tokens, parents, values, shape.best)
  return (tokens, jnp.stack(laws, 1) if laws else None, parents), cache


def _best(
  tokens: Int[Array, "B N"],
  parents: Int[Array, "B N"],
  values: Float[Array, "B N"],
  count: int,
) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
  """Selects the tokens of the largest values, with their parents.

  No token has a larger value than its parent, and ties go to the earlier
  token: so the parent of each selected token is selected, too.
  """
  _, places = lax.top_k(values, count)
  places = jnp.sort(places, 1).astype(jnp.int32)
  rows = jnp.arange(tokens.shape[0])[:, None]
  is_best = jnp.zeros(tokens.shape, jnp.int32).at[rows, places].set(1)
  number = jnp.pad(jnp.cumsum(is_best, 1) - 1, ((0, 0), (1, 0)))
  number = number.at[:, 0].set(-1)
  above = jnp.take_along_axis(parents, places, 1)
  return (
    jnp.take_along_axis(tokens, places, 1),
    jnp.take_along_axis(number, above + 1, 1),
  )


def _next(
  call: DraftCall,
  logits: Float[Array, "B V"],
  at: Int[Array, " B"],
  seen: Bool[Array, "B V"] | None,
) -> tuple[jax.Array, Any]:
  """A drafted token [B] at `at`, and the distribution it was drawn from."""
  if not call.drawn:
    return or_not_finite(call.sampler(logits, at, seen), logits), None
  q = law(call.sampler, logits, seen)
  return or_not_finite(_by_law(call, q, at, DRAFT), logits), q


def _by_law(
  call: DraftCall, q: Float[Array, "B V"], at: Int[Array, " B"], stream: int
) -> Int[Array, " B"]:
  rows = jnp.arange(q.shape[0])
  gumbel = noise(call.sampler, rows, at, q.shape[1], stream=stream)
  return jnp.argmax(jnp.log(q) + gumbel, 1).astype(jnp.int32)


def _drawn(
  call: DraftCall,
  logits: Float[Array, "B w V"],
  at: Int[Array, " B"],
  width: int,
  first: int,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
  """Draws nodes from number `first` on.

  Returns:
    Tokens and places of their parents, [B, n] each, and the distribution of
    each node.
  """
  batch, num_parents = logits.shape[:2]
  tokens, laws = [], []
  parent_places = np.repeat(np.arange(num_parents), width // num_parents)
  for number, parent in enumerate(parent_places, first):
    laws.append(law(call.sampler, logits[:, parent], call.seen))
    # Each node has a separate random stream, unlike those of `verifiers`.
    tokens.append(_by_law(call, laws[-1], at, DRAFT + 4 * (1 + number)))
  places = jnp.broadcast_to(
    jnp.asarray(parent_places, jnp.int32)[None], (batch, width)
  )
  return jnp.stack(tokens, 1), places, laws


def _likeliest(
  call: DraftCall,
  logits: Float[Array, "B w V"],
  at: Int[Array, " B"],
  total: Float[Array, "B w"],
  width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Tokens, places of parents and path sums of the likeliest paths, [B, n]."""
  batch, num_parents, vocab = logits.shape
  # The noise is that by which the sampler itself will draw at this position.
  if isinstance(call.sampler, Ranks):
    weigh = lambda logits: call.sampler.ranked(logits, at, call.seen)
    scores = jax.vmap(weigh, 1, 1)(logits) + total[..., None]
  else:
    weigh = lambda logits: log_weights(call.sampler, logits, call.seen)
    scores = jax.vmap(weigh, 1, 1)(logits) + total[..., None]
    scores += noise(call.sampler, jnp.arange(batch), at, vocab)[:, None]
  total, best = lax.top_k(scores.reshape(batch, num_parents * vocab), width)
  place, token = jnp.divmod(best.astype(jnp.int32), vocab)
  return token, place, total


def _seen(
  seen: Bool[Array, "B V"] | None, token: jax.Array
) -> Bool[Array, "B V"] | None:
  if seen is None:
    return None
  return seen.at[jnp.arange(token.shape[0]), token].set(True)
