"""A head after the layers of a model that drafts a block of tokens in one pass.

Guarantees: the residual stream passes unchanged, and what the head keeps of a
token is a part of the model's cache, as of `predict_layer`.
Cost: of a call of the model a map of n D to D numbers, and for each layer of
the head the maps of keys and values.
Memory: keys and values of the head's layers.
Ref: Chen et al. 2026, DFlash, arXiv 2602.06036, as SpecForge computes it.

For a token at position t the head keeps, in each of its layers, the key and the
value of f = norm(W [x_1; ...; x_n]), of the residual stream before n layers of
the model. A block is the last chosen token and masks after it. Its tokens see
all kept keys, and each other, in both directions; the output at the i-th mask
gives the law of the i-th drafted token by the model's head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.block import CachedMixer, PartOfCache
from ringjax.nn.draft_layers.eagle_layer import HeadFolder
from ringjax.nn.draft_layers.predict_layer import PredictBlock, PredictLayer
from ringjax.nn.linear import Linear, part_dtype, stream_dtype
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index

# Function from a layer's number and rotated queries, keys and values of a block
# to attention over the kept keys and those of the block.
ReadBlock = Callable[[int, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashLayer(PredictLayer):
  """A DFlash head; `attention`, `feedforward` and `norm` are of its layers.

  Attributes:
    taps: Layers before which the residual stream is read, n of them.
    depth: Number of its layers.
    block: Tokens of a block, the last chosen one among them.
    mask_id: Token id of the masks.
    folder: Storage of the head in its folder.
  """

  reads_ids: ClassVar[bool] = True
  drafter: ClassVar[str] = "dflash"
  by_token: ClassVar[bool] = False

  taps: tuple[int, ...]  # pyrefly: ignore
  depth: int
  block: int
  mask_id: int
  folder: HeadFolder

  @property
  def mixers(self) -> tuple[CachedMixer, ...]:  # pyrefly: ignore
    """The attention of each of its layers."""
    return (cast(Attention, self.attention),) * self.depth

  def build(self, rngs: nnx.Rngs, embed: int) -> DFlashBlock:
    return DFlashBlock(rngs, self, embed)


class DFlashBlock(PredictBlock):
  """The module of `DFlashLayer`."""

  def __init__(self, rngs: nnx.Rngs, spec: DFlashLayer, embed: int):
    # None of the parts of a usual layer are made: there are several of each.
    nnx.Module.__init__(self)
    self.spec = spec
    attention = cast(Attention, spec.attention)
    norm: Callable[[], Any] = lambda: spec.norm.build(rngs, embed)
    by_layer = lambda build: nnx.List([build() for _ in range(spec.depth)])
    self.fuse = Linear(
      rngs, (len(spec.taps) * embed,), (embed,), (None, "embed")
    )
    self.hidden_norm, self.out_norm = norm(), norm()
    self.pre_attentions, self.pre_feedforwards = by_layer(norm), by_layer(norm)
    self.attentions = by_layer(lambda: GroupedQuery(rngs, attention, embed))
    self.feedforwards = by_layer(lambda: spec.feedforward.build(rngs, embed))

  @property
  def attention(self) -> Any:  # pyrefly: ignore
    """Attention of the first layer."""
    return self.attentions[0]

  @property
  def feedforward(self) -> Any:  # pyrefly: ignore
    """Feedforward of the first layer."""
    return self.feedforwards[0]

  def hidden_state(
    self, x: Float[Array, "B T D"], tokens: Tokens, attend: Attend
  ) -> Float[Array, "B T D"]:
    """Normed map f of the residual stream before some layers."""
    spec = cast(DFlashLayer, self.spec)
    joined = jnp.concatenate([tokens.tapped[n] for n in spec.taps], -1)
    joined = joined.astype(part_dtype(self.fuse, x.dtype))
    fused = attend.rows(self.fuse, joined).astype(x.dtype)
    return attend.constrain(self.hidden_norm(fused))

  def embedded(
    self, ids: Int[Array, "B T"], weight: Float[Array, "V D"]
  ) -> Float[Array, "B T D"]:
    """The model's embeddings, without their scale and norm."""
    x = jnp.take(weight, ids, axis=0, mode="clip")
    return x.astype(stream_dtype(x.dtype))

  def __call__(
    self,
    x: Float[Array, "B T *D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T *Y"], Any]:
    """Return x, and the head's cache with keys and values of f."""
    del states, number
    spec = cast(Attention, self.spec.attention)
    # Of one layer it is that of its mixer.
    parts: Any = cache if len(self.attentions) > 1 else (cache,)
    f = self.hidden_state(x, tokens, attend)
    queries = jnp.zeros((*x.shape[:2], spec.heads, spec.head_dim), f.dtype)
    appended = []
    for layer, part in zip(self.attentions, parts, strict=True):
      maps = lambda h, layer=layer: (layer.k(h), layer.v(h))
      k, v = attend.rows(maps, f.astype(part_dtype(layer, f.dtype)))
      part = part.append(
        jnp.swapaxes(layer.k_norm(k), 1, 2),
        jnp.swapaxes(v, 1, 2),
        tokens.at,
        tokens.rotation(spec.rope),
      )
      appended.append(part.observe(lambda: queries, lambda: queries))
    return x, tuple(appended) if len(appended) > 1 else appended[0]

  def drafted(
    self,
    x: Float[Array, "B n D"],
    tokens: Tokens,
    attend: Attend,
    read: ReadBlock,
  ) -> Float[Array, "B n D"]:
    """Normed outputs for a block of embeddings.

    Args:
      x: Embeddings of the last chosen token and of masks.
      tokens: The block's tokens.
      attend: Sharding and attention of the call.
      read: Attention of a layer.
    """
    rope, stream = cast(Attention, self.spec.attention).rope, x.dtype
    for n in range(len(self.attentions)):
      layer = self.attentions[n]
      narrow = part_dtype(layer, stream)
      h = self.pre_attentions[n](x).astype(narrow)
      q = tokens.rotate(rope, layer.q_norm(layer.q(h)))
      k = tokens.rotate(rope, layer.k_norm(layer.k(h)))
      out = read(n, q, k, layer.v(h))
      x = x + attend.summed(layer.o, out.astype(narrow)).astype(stream)
      h = self.pre_feedforwards[n](x).astype(narrow)
      x = x + self.feedforwards[n](h, attend).astype(stream)
    return self.out_norm(x)
