"""Loss of an EAGLE-3 head that is unrolled over its own predictions.

Guarantees: prediction j at token t is the one that the head makes as the
(j + 1)-th of a draft that begins j tokens earlier, with the text's tokens as
drafted ones: it reads the target's states up to the beginning of the draft, and
from there on its own outputs. So it is on all layouts and over all shards.
Cost: for each prediction the head, attention over the text, j + 1 scores per
token, and shifts of states, keys and values by up to j tokens.
Memory: the logits of some tokens at a time; keys and outputs of all
predictions.
Ref: Li et al. 2025, arXiv 2503.01840, section 3.2 (training-time test); loss
and its decay by 0.8 as in SpecForge.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ringjax.kv.base import KV, FreshLayer
from ringjax.models.transformer import Transformer
from ringjax.nn.draft_layers.eagle_layer import EagleBlock, EagleLayer
from ringjax.nn.draft_layers.predict_layer import FIRST
from ringjax.nn.sharding_context import Extras, ShardingContext
from ringjax.nn.tokens import Tokens
from ringjax.ops.mask import Causal, Coords, Mask, Since
from ringjax.ops.recurrent.shift import token_shift
from ringjax.ops.softmax import Partial, finalize, merge

# Number of predictions in a row, and the weight of each by the one before.
STEPS, DECAY = 7, 0.8


class _Unrolled:
  """Attention of one prediction; all else is as in the context of the call.

  Attributes:
    keys: Rotated keys and values of the predictions so far, each [B, K, T, H].
  """

  def __init__(self, attend: ShardingContext):
    self._attend: Any = attend
    self.keys: list[tuple[jax.Array, jax.Array]] = []

  def __getattr__(self, name: str) -> Any:
    return getattr(self._attend, name)

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: FreshLayer,
    mask: Mask,
    extras: Extras,
  ) -> Any:
    """[B, T, N, J]: queries see earlier keys of the text, and their draft's."""
    assert cache.fresh is not None
    k, v, _ = cache.fresh
    self.keys.append((k, v))
    if len(self.keys) == 1:
      return self._attend(q, tokens, cache, mask, extras)
    return self._of_draft(q, tokens, extras)

  def shifted(
    self, x: Float[Array, "B T *d"], by: int, tokens: Tokens
  ) -> Float[Array, "B T *d"]:
    """x of the token `by` tokens before in the same document, or zeros."""
    seg = jnp.broadcast_to(tokens.seg, x.shape[:2])
    attend = self._attend
    if by == 0:
      return x
    return token_shift(
      x,
      by,
      segment_ids=seg,
      mesh=attend.mesh,
      axis=attend.of_mesh,
      layout=attend.layout,
    )

  def _of_draft(
    self, q: Float[Array, "B T N H"], tokens: Tokens, extras: Extras
  ) -> Float[Array, "B T N J"]:
    """Attention of the last prediction so far."""
    step = len(self.keys) - 1
    # Drafts begin and end by the order of tokens, also where positions jump.
    at = tokens.ordered().at
    at = Coords(*(jnp.broadcast_to(x, q.shape[:2]) for x in at))
    k, v = self.keys[0]
    # The target's states, and so the first keys, end before the draft does.
    text_keys = KV(k, v, Coords(at.pos + step, at.seg))
    mask = Causal() & Since(FIRST + step) & self._attend.segments
    residual = dataclasses.replace(extras, residual=True)
    partial = Partial.of(
      *self._attend.between(q, at, text_keys, mask, residual)
    )
    groups = q.shape[2] // k.shape[1]
    for number, (k, v) in enumerate(self.keys[1:], 1):
      k, v = (
        self.shifted(jnp.swapaxes(x, 1, 2), step - number, tokens)
        for x in (k, v)
      )
      k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
      scores = jnp.einsum(
        "btnh,btnh->btn", q, k, preferred_element_type=jnp.float32
      )
      scores = scores * jnp.float32(extras.scale)
      values = v.astype(scores.dtype)
      partial = merge(partial, Partial(values, scores, jnp.ones_like(scores)))
    return finalize(partial)[0].astype(q.dtype)


def eagle_outputs(
  model: Transformer, places: Tokens, attend: ShardingContext, steps: int
) -> list[Float[Array, "B T E"]]:
  """Normed outputs of a head, of each prediction in a row.

  Args:
    model: Model with the head.
    places: Tokens of a call of the model, with the streams that it has tapped.
    attend: Sharding context of the call.
    steps: Number of predictions in a row.

  Returns:
    Inputs of the head's map to logits, [B, T, D'] each. That of prediction j is
    of no use at the first j + 1 tokens of a document.
  """
  block = cast(EagleBlock, model.predict_block)
  spec = cast(EagleLayer, model.config.predicts)
  unrolled = _Unrolled(attend)
  context: Any = unrolled
  embedded = places.embedded
  assert embedded is not None
  state = block.hidden_state(embedded, places, context)
  outputs = []
  for _ in range(steps):
    previous = unrolled.shifted(state, 1, places)
    g, _ = block.predicted(previous, places, (FreshLayer(),), context)
    normed = block.normed(g, model.norm)
    outputs.append(normed)
    state = normed if spec.hands_normed else g
  return outputs


def eagle_losses(
  model: Transformer,
  h: Float[Array, "B T D"],
  outputs: list[Float[Array, "B T E"]],
  attend: ShardingContext,
) -> Float[Array, "B T n"]:
  """Cross-entropy of each prediction with the target's law, float32.

  The law is that over the draft vocabulary. Where the target's likeliest token
  is not in it the loss is 0.

  Args:
    model: Model with the head.
    h: Input of the target's head.
    outputs: Normed outputs of each prediction, see `eagle_outputs`.
    attend: Sharding context of the tokens.
  """
  block = cast(EagleBlock, model.predict_block)
  size = cast(EagleLayer, model.config.predicts).vocabulary
  widths = np.cumsum([h.shape[-1], *(x.shape[-1] for x in outputs)])[:-1]
  ids = None if isinstance(size, int) else size.ids
  in_vocab = np.ones(model.config.vocab, bool)
  if ids is not None:
    in_vocab = np.isin(np.arange(model.config.vocab), ids)
  else:
    in_vocab[size:] = False

  def losses(states: jax.Array) -> jax.Array:
    h, *parts = jnp.split(states, widths, -1)
    logits = jax.lax.stop_gradient(model.logits(model.head_dtype(h)))
    drafted = logits[..., :size] if ids is None else (
      jnp.take(logits, jnp.asarray(ids), -1)
    )  # fmt: skip
    law = jax.nn.softmax(drafted)
    draftable = jnp.take(jnp.asarray(in_vocab), jnp.argmax(logits, -1))
    of_steps = [
      -jnp.sum(law * jax.nn.log_softmax(block.draft_logits(x)), -1)
      for x in parts
    ]
    return jnp.where(draftable[..., None], jnp.stack(of_steps, -1), 0.0)

  joined = jnp.concatenate([h, *(x.astype(h.dtype) for x in outputs)], -1)
  return attend.rowwise(losses, joined)
