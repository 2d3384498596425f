"""Decode steps: one token after another, from a cache that stays in place.

Guarantees: a step is a pure function of a `DecodeState` and a cache. All steps
with the same cache capacity share one program; it depends neither on the length
or contents of the context nor on the values of a sampler's settings, but on
which settings are used. A row whose logits are not finite ends, with
`finite.NOT_FINITE` in place of its token; other rows are not affected.
Cost: a step reads the weights and the filled slots of the cache once, and
sends one small reduction a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ringjax.infer.finite import NOT_FINITE, or_not_finite
from ringjax.kv.base import CallCache
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

# Most models have at most this many stop ids.
_STOPS = 4


class DecodeState(NamedTuple):
  """State of decoding between steps, without the cache.

  The cache is separate: a step donates the cache's memory, while the host still
  reads the tokens of the state before.

  Fields:
    token: Last chosen tokens, int32 [B]; `finite.NOT_FINITE` in rows whose
      logits were not finite.
    pos: Positions of these tokens, int32 [B].
    done: Whether a row has stopped, bool [B].
    seen: Ids that occurred, bool [B, V], or None if the sampler ignores them.
  """

  token: Int[Array, " B"]
  pos: Int[Array, " B"]
  done: Bool[Array, " B"]
  seen: Bool[Array, "B V"] | None


def stop_ids(ids: Sequence[int]) -> Int[Array, " _"]:
  """Ids that end a row, padded to a power of two: few programs are compiled."""
  size = max(_STOPS, 1 << (len(ids) - 1).bit_length())
  padded = np.full(size, -1, np.int32)
  padded[: len(ids)] = ids
  return jnp.asarray(padded)


@bounded
@jax.jit
def first(
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  pos: Int[Array, " B"],
  seen: Bool[Array, "B V"] | None,
  stops: Int[Array, " n"],
) -> DecodeState:
  """Chooses the first token after the prompt, at position `pos`.

  `sampler` is a pytree: `sampling.traced`.
  """
  token = or_not_finite(sampler(logits, pos, seen), logits)
  return _chosen(token, pos, False, seen, stops)


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(3,))
def step(
  model: Transformer,
  attend: CachedAttention,
  sampler: Callable[..., Any],
  cache: CallCache,
  state: DecodeState,
  stops: Int[Array, " n"],
  length: Lengths,
) -> tuple[DecodeState, Any]:
  """Reads the last tokens into the cache and chooses the next ones.

  `length` is the length of the whole context or of each row's prompt, for
  rotations that depend on it.
  """
  logits, cache = forward(
    model,
    attend,
    # Negative ids mark rows without a token: any valid id will do.
    jnp.maximum(state.token, 0)[:, None],
    state.pos[:, None],
    # No later turn may see what follows a stop.
    (~state.done).astype(jnp.int32)[:, None],
    cache,
    None,
    length,
  )
  next_state = _following(
    sampler, attend.everywhere(logits[:, 0]), state, stops
  )
  return attend.everywhere(next_state), cache


@bounded
@jax.jit
def following(
  sampler: Callable[..., Any],
  logits: Float[Array, "B V"],
  state: DecodeState,
  stops: Int[Array, " n"],
) -> DecodeState:
  """Chooses the tokens after those of a state, by the logits after them."""
  return _following(sampler, logits, state, stops)


def _following(
  sampler: Any, logits: jax.Array, state: DecodeState, stops: jax.Array
) -> DecodeState:
  pos = state.pos + 1
  token = or_not_finite(sampler(logits, pos, state.seen), logits)
  token = jnp.where(state.done, state.token, token)
  return _chosen(token, pos, state.done, state.seen, stops)


@bounded
@functools.partial(jax.jit, static_argnums=0)
def ends(
  attend: CachedAttention, done: Bool[Array, " B"], ended: Bool[Array, " B"]
) -> Bool[Array, " B"]:
  """Mask of ended rows: by a stop id (`done`), or by the host (`ended`)."""
  return attend.everywhere(done | ended)


def _chosen(
  token: jax.Array,
  pos: jax.Array,
  done: Any,
  seen: jax.Array | None,
  stops: jax.Array,
) -> DecodeState:
  """State after tokens [B] were chosen at `pos`."""
  if seen is not None:
    seen = seen.at[jnp.arange(token.shape[0]), token].set(True)
  stopped = jnp.any(token[:, None] == stops[None], 1)
  return DecodeState(token, pos, done | stopped | (token == NOT_FINITE), seen)
