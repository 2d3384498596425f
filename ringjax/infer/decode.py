"""One token after another, from a cache that stays where it is.

Law: a step's program is the same for every step of a capacity; it depends on
neither the length of the context nor on what is in it, nor on a sampler's
numbers, but on which of them it has.
Cost: a step reads the weights and the filled slots of the cache once, and
sends one small reduction a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention

# Room for the stop ids of most models.
_STOPS = 4


class State(NamedTuple):
  """What a step hands to the next.

  Fields:
    token: int32 [B], the tokens that were chosen last.
    pos: int32 [B], their positions.
    done: bool [B], whether an example has stopped.
    seen: bool [B, V], ids that occurred, or None if the sampler ignores them.
  """

  token: jax.Array
  pos: jax.Array
  done: jax.Array
  seen: Any


def stop_ids(ids: Sequence[int]) -> jax.Array:
  """Ids that end an example, int32 [n]: few n, so that few are compiled."""
  size = max(_STOPS, 1 << (len(ids) - 1).bit_length())
  padded = np.full(size, -1, np.int32)
  padded[: len(ids)] = ids
  return jnp.asarray(padded)


@jax.jit
def first(
  sampler: Any, logits: jax.Array, pos: jax.Array, seen: Any, stops: jax.Array
) -> State:
  """Chooses the token behind the prompt, whose position is `pos` [B].

  `sampler` is a pytree: `sampling.traced`.
  """
  token = sampler(logits, pos, seen)
  return State(token, pos, _stopped(token, stops), _note(seen, token))


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(3,))
def step(
  model: Transformer,
  attend: CachedAttention,
  sampler: Any,
  cache: Any,
  state: State,
  stops: jax.Array,
  length: jax.Array,
) -> tuple[State, Any]:
  """Reads the last tokens into the cache and chooses the next ones."""
  logits, cache = forward(
    model,
    attend,
    state.token[:, None],
    state.pos[:, None],
    # What follows a stop is nothing that a later turn may see.
    (~state.done).astype(jnp.int32)[:, None],
    cache,
    None,
    length,
  )
  pos = state.pos + 1
  token = sampler(attend.everywhere(logits[:, 0]), pos, state.seen)
  token = jnp.where(state.done, state.token, token)
  after = State(
    token,
    pos,
    state.done | _stopped(token, stops),
    _note(state.seen, token),
  )
  return attend.everywhere(after), cache


@functools.partial(jax.jit, static_argnums=0)
def ends(attend: CachedAttention, done: jax.Array, told: Any) -> jax.Array:
  """Which examples have ended, bool [B]: by a stop id, or as told."""
  return attend.everywhere(done | told)


def _stopped(token: jax.Array, stops: jax.Array) -> jax.Array:
  return jnp.any(token[:, None] == stops[None], 1)


def _note(seen: Any, token: jax.Array) -> Any:
  if seen is None:
    return None
  return seen.at[jnp.arange(token.shape[0]), token].set(True)
