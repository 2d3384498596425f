"""Drafts by a DFlash head: a block of tokens in one pass.

Guarantees: as with all drafters no token changes, but where rounding decides.
The target's cache is read and not changed, whatever its kind.
Cost: one pass of the head over a block, however many tokens are drafted, and
the model's head for each of them. The target's calls compute the head's keys of
the tokens that they read.
Memory: the block's keys; the head's other keys are in the target's cache.
Ref: Chen et al. 2026, arXiv 2602.06036.

All tokens of a draft follow from the text alone: a token is no function of the
drafted ones before it, and its stated law is not, either. So all tokens of a
depth of a tree have the same likeliest continuations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.infer.speculate.draft_programs import TreeNodes, drafted_by
from ringjax.infer.speculate.drafter import TreeShape
from ringjax.infer.speculate.predict_draft import HeadDraft
from ringjax.kv.base import KV, HeldKeys
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.draft_layers.dflash_layer import DFlashBlock, DFlashLayer
from ringjax.nn.draft_layers.predict_layer import PredictLayer
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.ops.mask import Everything
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash(HeadDraft):
  """Drafts by the DFlash head that a model has.

  Attributes:
    count: Maximum number of drafted tokens, less than a block has.
  """

  name: ClassVar[str] = "dflash"
  title: ClassVar[str] = "a DFlash head"
  layer: ClassVar[type[PredictLayer]] = DFlashLayer

  count: int = 7

  def check(self, target: Transformer) -> None:
    super().check(target)
    head: Any = target.config.predicts
    deepest = head.block - 1
    if self.widths is None:
      integer("count", self.count, least=1, most=deepest)
    elif len(self.widths) > deepest:
      raise OptionError(
        "widths",
        f"{self.widths}, for a head with blocks of {head.block} tokens",
        f"at most {deepest} depths",
        "pass fewer widths",
      )

  @property
  def program(self) -> Callable[..., Any]:
    return drafted_block


class _BlockCall(NamedTuple):
  """Arguments of a drafting program, see `DraftCall`."""

  drawn: bool
  sampler: Callable[..., Any]
  pos: Int[Array, " B"]
  at: Int[Array, " B"]
  seen: Any

  def read(
    self,
    tokens: Int[Array, "B 1"],
    pos: Int[Array, "B 1"],
    cache: tuple[Float[Array, "B n V"], Int[Array, ""]],
  ) -> tuple[Float[Array, "B 1 V"], Any]:
    """Take the logits of the next token, which are no function of this one."""
    del tokens, pos
    logits, number = cache
    next_logits = jax.lax.dynamic_slice_in_dim(logits, number, 1, 1)
    return next_logits, (logits, number + 1)

  def read_depth(
    self,
    nodes: TreeNodes,
    first: int,
    cache: tuple[Float[Array, "B n V"], Int[Array, ""]],
  ) -> tuple[Float[Array, "B w V"], Any]:
    """Take the logits after the tokens of a depth, which are all the same."""
    new = nodes.tokens[:, first:]
    next_logits, cache = self.read(new[:, :1], new[:, :1], cache)
    batch, _, vocab = next_logits.shape
    shape = batch, new.shape[1], vocab
    return jnp.broadcast_to(next_logits, shape), cache


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def drafted_block(
  model: Transformer,
  attend: CachedAttention,
  shape: int | TreeShape,
  drawn: bool,
  sampler: Callable[..., Any],
  target_cache: HeldKeys,
  token: Int[Array | np.ndarray, " B"],
  pos: Int[Array | np.ndarray, " B"],
  live: Bool[Array | np.ndarray, " B"],
  seen: Bool[ArrayLeaf, "B V"] | None,
  length: Int[Array, ""],
) -> tuple[
  Int[Array, "B n"], Float[Array, "B n V"] | None, Int[Array, "B n"] | None
]:
  """Drafts a chain of tokens, or a tree, by one pass of a DFlash head.

  The arguments and results are those of `predict_draft.predicted`.
  """
  block: Any = model.predict_block
  assert isinstance(block, DFlashBlock)
  spec: Any = block.spec
  context = dataclasses.replace(
    attend, mesh=target_cache.mesh, axis=target_cache.axis
  )
  pos = jnp.asarray(pos, jnp.int32)
  batch, size = pos.shape[0], spec.block
  ids = jnp.full((batch, size), spec.mask_id, jnp.int32)
  ids = ids.at[:, 0].set(jnp.maximum(jnp.asarray(token, jnp.int32), 0))
  at = pos[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  alive = jnp.asarray(live).astype(jnp.int32)[:, None]
  seg = jnp.broadcast_to(alive, (batch, size))
  places = tokens_of(model, context, (batch, size), at, seg, length)
  model.embedded(ids, places)
  first = len(model.kinds) - spec.depth
  rotation = places.rotation(spec.attention.rope)
  mask = Everything() & context.segments

  def read(
    number: int,
    q: Float[Array, "B n N H"],
    k: Float[Array, "B n K H"],
    v: Float[Array, "B n K H"],
  ) -> Float[Array, "B n N H"]:
    kind = first + number
    layer = target_cache.layer(kind, target_cache.slots[kind], jnp.int32(0))
    layer = layer.for_reading(rotation)
    block_keys = KV(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), places.at)
    views = (*layer.views(), block_keys.view(context.size))
    extras = Extras(scale=spec.attention.logit_scale)
    return context.visit(q, views, places.at, mask, extras)

  assert places.embedded is not None
  attention: Any = context
  h = block.drafted(places.embedded, places, attention, read)
  depth = shape if isinstance(shape, int) else len(shape.widths)
  h = model.head_dtype(h[:, 1 : depth + 1])
  logits = context.everywhere(model.logits(h))
  call = _BlockCall(drawn, sampler, pos + 1, pos + 1, seen)
  state = logits, jnp.int32(1)
  draft, _ = drafted_by(call, shape, logits[:, 0], state)
  return context.everywhere(draft)
