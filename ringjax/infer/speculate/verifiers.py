"""Which drafted tokens stay: rules that leave the target's law as it is.

Guarantees: new tokens have the law that the sampler has without drafts, in
joint, whatever is drafted. Behind a node whose logits are not finite
`NOT_FINITE` is chosen, which is no drafted token. `match` gives the very
tokens: a draft is right or wrong by what the sampler would have chosen there.
`rejection` accepts by a drawing of its own, and needs a sampler that states its
law.
Cost: a sampler's work for each token that was read.

Drafted tokens form a tree whose root is the last token that was chosen; a chain
is one. Ref: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023
(arXiv 2302.01318) for chains, Miao et al. 2024 (SpecInfer, arXiv 2305.09781)
for trees; `match` is their exact rule for drafts without chance, with the
target's own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE, or_not_finite
from ringjax.infer.sampling import law, noise, uniform
from ringjax.ops.ancestors import ancestor_matrix

# Streams of random numbers beside the sampler's own, stream 0.
DRAFT, ACCEPT, RESIDUAL = 1, 2, 3


class Nodes(NamedTuple):
  """What the target has read in a round: the root, drafted tokens behind it.

  Fields:
    tokens: int32 [B, N].
    parents: int32 [B, N], an earlier node each; -1 for the root.
    real: bool [B, N], those that are there.
    pos: int32 [B, N], their positions.
    logits: float32 [B, N, V], the target's behind each.
    probs: float32 [B, N - 1, V], the law that each drafted token was drawn
      from; None: they were chosen without chance.
    seen: bool [B, V], ids that each row has, for samplers that ask for them.
  """

  tokens: Int[Array, "B N"]
  parents: Int[Array, "B N"]
  real: Bool[Array, "B N"]
  pos: Int[Array, "B N"]
  logits: Float[Array, "B N V"]
  probs: Float[Array, "B _ V"] | None
  seen: Bool[Array, "B V"] | None

  def seen_at(self) -> Bool[Array, "B N V"] | None:
    """Ids that occurred up to each node, itself and its ancestors too."""
    if self.seen is None:
      return None
    known = ancestor_matrix(self.parents).astype(jnp.float32)
    each = jax.nn.one_hot(self.tokens, self.logits.shape[2])
    return self.seen[:, None] | (jnp.einsum("bij,bjv->biv", known, each) > 0)


class Verdict(NamedTuple):
  """What a rule decides.

  Fields:
    kept: bool [B, N], the path of nodes that stay, from the root on.
    chosen: int32 [B], the target's own token behind the last of these, or
      `NOT_FINITE`.
  """

  kept: Bool[Array, "B N"]
  chosen: Int[Array, " B"]


def match(sampler: Callable[..., Any], nodes: Nodes) -> Verdict:
  """The longest path of tokens that the sampler would have chosen itself."""
  seen = nodes.seen_at()
  axes = (1, 1, None if seen is None else 1)
  choose = lambda logits, pos, seen: or_not_finite(
    sampler(logits, pos, seen), logits
  )
  chosen = jax.vmap(choose, axes, 1)(nodes.logits, nodes.pos + 1, seen)
  kept, last = right_path(nodes.tokens, nodes.parents, nodes.real, chosen)
  return Verdict(kept, jnp.take_along_axis(chosen, last, 1)[:, 0])


def right_path(
  tokens: Int[Array, "B N"],
  parents: Int[Array, "B N"],
  real: Bool[Array, "B N"],
  chosen: Int[Array, "B N"],
) -> tuple[Bool[Array, "B N"], Int[Array, "B 1"]]:
  """The longest path of tokens that were chosen, and its last node.

  Args:
    tokens: see `Nodes`.
    parents: see `Nodes`.
    real: see `Nodes`.
    chosen: what is chosen behind each.
  """
  right = jnp.take_along_axis(chosen, jnp.maximum(parents, 0), 1) == tokens
  right = (right & real) | (parents < 0)
  wrong = (~right).astype(jnp.int32)
  # A node stays if it and all that it follows are right.
  known = ancestor_matrix(parents)
  wrong = jnp.einsum("bij,bj->bi", known.astype(jnp.int32), wrong)
  depth = jnp.sum(known, 2, dtype=jnp.int32)
  last = jnp.argmax(jnp.where(wrong == 0, depth, 0), 1)[:, None]
  return jnp.take_along_axis(known, last[..., None], 1)[:, 0], last


def rejection(sampler: Callable[..., Any], nodes: Nodes) -> Verdict:
  """Accepts each drafted token with the probability min(1, p / q).

  Children of a node that was accepted are tried one after the other; each that
  is rejected leaves the rest of p, norm(max(0, p - q)), to the next, and what
  is left at the end is drawn from.
  """
  batch, count = nodes.tokens.shape
  seen, rows = nodes.seen_at(), jnp.arange(batch)
  axes = (1, None if seen is None else 1)
  p = jax.vmap(lambda x, s: law(sampler, x, s), axes, 1)(nodes.logits, seen)

  def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    at, left, kept = state
    take = lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
    token = take(nodes.tokens)[:, None]
    if nodes.probs is None:
      q = jax.nn.one_hot(token[:, 0], left.shape[1])
    else:
      q = lax.dynamic_index_in_dim(nodes.probs, i - 1, 1, keepdims=False)
    child = take(nodes.real) & (take(nodes.parents) == at)
    mine = lambda x: jnp.take_along_axis(x, token, 1)[:, 0]
    u = uniform(sampler, rows, take(nodes.pos), i, stream=ACCEPT)
    accepted = child & (u * mine(q) < mine(left))
    rest = jnp.maximum(left - q, 0)
    total = jnp.sum(rest, 1, keepdims=True)
    # All of p is gone only by rounding: then every token was as likely in q.
    rest = jnp.where(total > 0, rest / total, left)
    left = jnp.where((child & ~accepted)[:, None], rest, left)
    left = jnp.where(accepted[:, None], take(p), left)
    kept = kept.at[:, i].set(accepted)
    return jnp.where(accepted, i, at), left, kept

  root = jnp.zeros((batch, count), bool).at[:, 0].set(True)
  start = jnp.zeros(batch, jnp.int32), p[:, 0], root
  at, left, kept = lax.fori_loop(1, count, step, start)
  pos = jnp.take_along_axis(nodes.pos, at[:, None], 1)[:, 0]
  scores = jnp.log(left) + noise(
    sampler, rows, pos + 1, left.shape[1], stream=RESIDUAL
  )
  chosen = jnp.argmax(scores, 1).astype(jnp.int32)
  last = jnp.take_along_axis(nodes.logits, at[:, None, None], 1)[:, 0]
  return Verdict(kept, or_not_finite(chosen, last))


VERIFIERS: dict[str, Callable[[Any, Nodes], Verdict]] = {
  "match": match,
  "rejection": rejection,
}


class Round(NamedTuple):
  """Of a round: what comes behind the root of each row.

  Fields:
    new: int32 [B, N], new tokens in order; the last one may be `NOT_FINITE`.
    count: int32 [B], how many of them there are.
    kept: bool [B, N], nodes that stay in the cache.
    stopped: bool [B], whether the last new token is a stop id, or none.
  """

  new: Int[Array, "B N"]
  count: Int[Array, " B"]
  kept: Bool[Array, "B N"]
  stopped: Bool[Array, " B"]


def concluded(
  verdict: Verdict,
  nodes: Nodes,
  left: Int[Array, " B"],
  stops: Int[Array, " n"],
) -> Round:
  """New tokens up to a stop id, `left` of them at most."""
  kept = verdict.kept & nodes.real
  batch, width = kept.shape
  rank = jnp.cumsum(kept, 1, dtype=jnp.int32) - 1
  total = rank[:, -1:] + 1
  rows = jnp.arange(batch)[:, None]
  # Node of rank r > 0 is new token r - 1.
  place = jnp.where(kept & (rank > 0), rank - 1, width)
  new = jnp.zeros((batch, width), jnp.int32)
  new = new.at[rows, place].set(nodes.tokens, mode="drop")
  last = jnp.where(total > 0, total - 1, width)
  new = new.at[rows, last].set(verdict.chosen[:, None], mode="drop")
  index = jnp.arange(width, dtype=jnp.int32)[None]
  ends = jnp.any(new[..., None] == stops[None, None], 2)
  ends = (ends | (new == NOT_FINITE)) & (index < total)
  first = jnp.min(jnp.where(ends, index + 1, width), 1)
  count = jnp.minimum(jnp.minimum(total[:, 0], first), left)
  kept = kept & (rank < count[:, None])
  stopped = jnp.any(ends & (index == count[:, None] - 1), 1)
  return Round(new, count, kept, stopped)
