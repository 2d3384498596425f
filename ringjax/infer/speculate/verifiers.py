"""Acceptance rules for drafted tokens that keep the target's distribution.

Guarantees: new tokens have the joint distribution that the sampler has without
drafts, whatever is drafted. After a node whose logits are not finite
`NOT_FINITE` is chosen, which is no drafted token. `match` gives the same tokens
as without drafts: a drafted token is right if the sampler would have chosen it.
`rejection` accepts by separate random numbers, and needs a sampler that states
its distribution ("law").
Cost: a sampler's work for each token that was read.

Drafted tokens form a tree whose root is the last token that was chosen; a chain
is a tree, too. Ref: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al.
2023 (arXiv 2302.01318) for chains, Miao et al. 2024 (SpecInfer, arXiv
2305.09781) for trees; `match` is their exact rule for deterministic drafts,
with the target's own random numbers.
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

# Streams of random numbers; the sampler itself uses stream 0.
DRAFT, ACCEPT, RESIDUAL = 1, 2, 3


class Nodes(NamedTuple):
  """Tree of tokens that the target read in a round: the root, then the draft.

  Fields:
    tokens: Token ids, int32 [B, N].
    parents: Index of each node's parent, an earlier node, int32 [B, N]; -1 for
      the root.
    real: Whether a node is a token rather than padding, bool [B, N].
    pos: Positions of the nodes, int32 [B, N].
    logits: The target's logits after each node, float32 [B, N, V].
    probs: Distribution that each drafted token was drawn from, float32
      [B, N - 1, V]; None: they were chosen deterministically.
    seen: Ids that each row has, bool [B, V], for samplers that need them.
  """

  tokens: Int[Array, "B N"]
  parents: Int[Array, "B N"]
  real: Bool[Array, "B N"]
  pos: Int[Array, "B N"]
  logits: Float[Array, "B N V"]
  probs: Float[Array, "B _ V"] | None
  seen: Bool[Array, "B V"] | None

  def seen_at(self) -> Bool[Array, "B N V"] | None:
    """Ids that occurred up to each node, with the node and its ancestors."""
    if self.seen is None:
      return None
    ancestors = ancestor_matrix(self.parents).astype(jnp.float32)
    token_one_hot = jax.nn.one_hot(self.tokens, self.logits.shape[2])
    return self.seen[:, None] | (
      jnp.einsum("bij,bjv->biv", ancestors, token_one_hot) > 0
    )


class Verdict(NamedTuple):
  """Decision of an acceptance rule.

  Fields:
    accepted_nodes: Path of accepted nodes from the root on, bool [B, N].
    chosen: The target's own token after the last of these, or `NOT_FINITE`,
      int32 [B].
  """

  accepted_nodes: Bool[Array, "B N"]
  chosen: Int[Array, " B"]


def match(sampler: Callable[..., Any], nodes: Nodes) -> Verdict:
  """Accepts the longest path of tokens that the sampler itself would choose."""
  seen = nodes.seen_at()
  axes = (1, 1, None if seen is None else 1)
  choose = lambda logits, pos, seen: or_not_finite(
    sampler(logits, pos, seen), logits
  )
  chosen = jax.vmap(choose, axes, 1)(nodes.logits, nodes.pos + 1, seen)
  path, last = right_path(nodes.tokens, nodes.parents, nodes.real, chosen)
  return Verdict(path, jnp.take_along_axis(chosen, last, 1)[:, 0])


def right_path(
  tokens: Int[Array, "B N"],
  parents: Int[Array, "B N"],
  real: Bool[Array, "B N"],
  chosen: Int[Array, "B N"],
) -> tuple[Bool[Array, "B N"], Int[Array, "B 1"]]:
  """Finds the longest path of tokens that were chosen, and its last node.

  Args:
    tokens: Token ids, see `Nodes`.
    parents: Index of each node's parent, see `Nodes`.
    real: Whether a node is a token, see `Nodes`.
    chosen: Token that the sampler chooses after each node.
  """
  right = jnp.take_along_axis(chosen, jnp.maximum(parents, 0), 1) == tokens
  right = (right & real) | (parents < 0)
  wrong = (~right).astype(jnp.int32)
  # A node stays if it and all its ancestors are right.
  ancestors = ancestor_matrix(parents)
  wrong = jnp.einsum("bij,bj->bi", ancestors.astype(jnp.int32), wrong)
  depth = jnp.sum(ancestors, 2, dtype=jnp.int32)
  last = jnp.argmax(jnp.where(wrong == 0, depth, 0), 1)[:, None]
  return jnp.take_along_axis(ancestors, last[..., None], 1)[:, 0], last


def rejection(sampler: Callable[..., Any], nodes: Nodes) -> Verdict:
  """Accepts each drafted token with the probability min(1, p / q).

  Children of an accepted node are tried one after the other; after each
  rejection p becomes the residual norm(max(0, p - q)) for the next child, and
  the target's own token is drawn from the last p.
  """
  batch, count = nodes.tokens.shape
  seen, rows = nodes.seen_at(), jnp.arange(batch)
  axes = (1, None if seen is None else 1)
  p = jax.vmap(lambda x, s: law(sampler, x, s), axes, 1)(nodes.logits, seen)

  def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    at, target_law, accepted_nodes = state
    take = lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False)
    token = take(nodes.tokens)[:, None]
    if nodes.probs is None:
      q = jax.nn.one_hot(token[:, 0], target_law.shape[1])
    else:
      q = lax.dynamic_index_in_dim(nodes.probs, i - 1, 1, keepdims=False)
    child = take(nodes.real) & (take(nodes.parents) == at)
    at_token = lambda x: jnp.take_along_axis(x, token, 1)[:, 0]
    u = uniform(sampler, rows, take(nodes.pos), i, stream=ACCEPT)
    accepted = child & (u * at_token(q) < at_token(target_law))
    residual = jnp.maximum(target_law - q, 0)
    total = jnp.sum(residual, 1, keepdims=True)
    # The residual is 0 only where p and q are equal up to rounding.
    residual = jnp.where(total > 0, residual / total, target_law)
    target_law = jnp.where((child & ~accepted)[:, None], residual, target_law)
    target_law = jnp.where(accepted[:, None], take(p), target_law)
    accepted_nodes = accepted_nodes.at[:, i].set(accepted)
    return jnp.where(accepted, i, at), target_law, accepted_nodes

  root = jnp.zeros((batch, count), bool).at[:, 0].set(True)
  start = jnp.zeros(batch, jnp.int32), p[:, 0], root
  at, target_law, accepted_nodes = lax.fori_loop(1, count, step, start)
  pos = jnp.take_along_axis(nodes.pos, at[:, None], 1)[:, 0]
  scores = jnp.log(target_law) + noise(
    sampler, rows, pos + 1, target_law.shape[1], stream=RESIDUAL
  )
  chosen = jnp.argmax(scores, 1).astype(jnp.int32)
  last = jnp.take_along_axis(nodes.logits, at[:, None, None], 1)[:, 0]
  return Verdict(accepted_nodes, or_not_finite(chosen, last))


VERIFIERS: dict[str, Callable[[Any, Nodes], Verdict]] = {
  "match": match,
  "rejection": rejection,
}


class Round(NamedTuple):
  """Outcome of a round: the new tokens after the root of each row.

  Fields:
    new: New tokens in order, int32 [B, N]; the last may be `NOT_FINITE`.
    count: Number of new tokens, int32 [B].
    kept_nodes: Nodes that stay in the cache, bool [B, N].
    stopped: Whether the last new token is a stop id or `NOT_FINITE`, bool [B].
  """

  new: Int[Array, "B N"]
  count: Int[Array, " B"]
  kept_nodes: Bool[Array, "B N"]
  stopped: Bool[Array, " B"]


def concluded(
  verdict: Verdict,
  nodes: Nodes,
  left: Int[Array, " B"],
  stops: Int[Array, " n"],
) -> Round:
  """New tokens of a verdict up to a stop id, at most `left`."""
  kept_nodes = verdict.accepted_nodes & nodes.real
  batch, width = kept_nodes.shape
  rank = jnp.cumsum(kept_nodes, 1, dtype=jnp.int32) - 1
  total = rank[:, -1:] + 1
  rows = jnp.arange(batch)[:, None]
  # Node of rank r > 0 is new token r - 1.
  place = jnp.where(kept_nodes & (rank > 0), rank - 1, width)
  new = jnp.zeros((batch, width), jnp.int32)
  new = new.at[rows, place].set(nodes.tokens, mode="drop")
  last = jnp.where(total > 0, total - 1, width)
  new = new.at[rows, last].set(verdict.chosen[:, None], mode="drop")
  index = jnp.arange(width, dtype=jnp.int32)[None]
  ends = jnp.any(new[..., None] == stops[None, None], 2)
  ends = (ends | (new == NOT_FINITE)) & (index < total)
  first = jnp.min(jnp.where(ends, index + 1, width), 1)
  count = jnp.minimum(jnp.minimum(total[:, 0], first), left)
  kept_nodes = kept_nodes & (rank < count[:, None])
  stopped = jnp.any(ends & (index == count[:, None] - 1), 1)
  return Round(new, count, kept_nodes, stopped)
