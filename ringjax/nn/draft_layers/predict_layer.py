"""A layer after those of a model that predicts one token further.

Guarantees: the residual stream passes unchanged, so a model with such a layer
has the logits of one without. What the layer keeps of a token is a part of the
model's cache like that of any layer: whatever reads, shares, shards or takes
back tokens does so for this layer, too.
Cost: of a call whose predictions are not used, a map of 2 D to D numbers and
the maps of keys and values; the compiler drops the rest.
Memory: keys and values of one layer, and the hidden states of a window of two
tokens.
Ref: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.

For the token at position t the layer reads its embedding and h, the output of
the model at t - 1, and predicts the token at t + 1:

  y = W [norm(embedding_t); norm(h)],  g = layer(y),  logits = head(norm(g))

So that its labels are those of the model itself. The first token of a document
has no h: no query sees its key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from ringjax.kv.base import LayerCache
from ringjax.kv.encoder_states import EncoderStates
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.query_reading import KeyReading
from ringjax.nn.block import Block, CachedMixer, Layer, PartOfCache
from ringjax.nn.linear import Identity, Linear, Norm, part_dtype
from ringjax.nn.sharding_context import Attend, CachedAttention, Extras
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Behind, Coords, Mask, Since
from ringjax.ops.rope import Rope
from ringjax.typing import Index

# Position before which no token has a predecessor.
FIRST = 1
# Largest size of a head in which hidden states are stored.
_HEAD = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreviousHidden:
  """Hidden states of the model, of which a query reads that of one token.

  They are values of attention whose mask allows the token before the query, so
  that the output is that token's value, to the bit.

  Attributes:
    embed: Size of a hidden state, D.
  """

  embed: int
  mask: Mask = Behind(1)

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """No rotations."""
    return ()

  @property
  def head_dim(self) -> int:
    """Size of the heads that a hidden state is stored in."""
    return math.gcd(self.embed, _HEAD)

  @property
  def heads(self) -> int:
    """Number of these heads."""
    return self.embed // self.head_dim

  @property
  def reach(self) -> int | None:
    """Number of tokens that a query looks back."""
    return self.mask.reach[0]

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    """Shape of what `layers` of this kind keep for a token."""
    return LayerCacheSpec(
      layers,
      self.heads,
      self.head_dim,
      self.head_dim,
      self.mask.reach[0],
      KeyReading(groups=1, scores=Scores(scale=1.0), mask=self.mask),
    )

  def __call__(
    self,
    h: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], LayerCache]:
    """Hidden state of the token before each one, and the cache with `h`."""
    # The token before is that of the document, also where positions jump.
    tokens = tokens.ordered()
    heads = h.reshape(*h.shape[:2], -1, self.head_dim)
    rows = jnp.swapaxes(heads, 1, 2)
    cache = cache.append(rows, rows, tokens.at, tokens.rotation(None))
    queries = jnp.zeros_like(heads)
    cache = cache.observe(lambda: queries, lambda: queries)
    out = attend(queries, tokens, cache, self.mask, Extras(scale=1.0))
    return out.reshape(h.shape).astype(h.dtype), cache

  def read(
    self, at: Coords, cache: PyTree, tokens: Tokens, attend: CachedAttention
  ) -> Float[Array, "B T D"]:
    """Hidden states [B, T, D] of the tokens before those at `at`.

    Args:
      at: Coordinates of the tokens, [B, T]; the cache does not have them.
      cache: The layer's part of a cache, which is not appended to.
      tokens: The same tokens.
      attend: Attention over the cache.
    """
    layer = cache.for_reading(tokens.rotation(None))
    queries = jnp.zeros((*at.pos.shape, self.heads, self.head_dim))
    out = attend.visit(
      queries, layer.views(), at, self.mask & attend.segments, Extras(scale=1.0)
    )
    return out.reshape(*at.pos.shape, self.embed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictLayer(Layer):
  """A layer that predicts one token further.

  Attributes:
    embed: Size of the hidden states that it reads: the width of the model, D.
    out_norm: Norm between the layer's output and the head; None: that of the
      model.
    hidden_first: Whether the hidden state comes before the embedding in the
      input of the map that joins them.
    hands_normed: Whether a second prediction reads the normed output, rather
      than the output, in place of the model's hidden state.
  """

  embed: int
  out_norm: Norm | None
  hidden_first: bool = False
  hands_normed: bool = False

  # Layers before which the residual stream is read, see `Tokens.tapped`.
  taps: ClassVar[tuple[int, ...]] = ()
  # Whether it reads embeddings other than the input of the first layer.
  reads_ids: ClassVar[bool] = False
  # Name of the drafter that drafts by it.
  drafter: ClassVar[str] = "mtp"
  # Whether it predicts a token at each token of a text.
  by_token: ClassVar[bool] = True

  @classmethod
  def of(cls, layer: Layer, embed: int, **options: Any) -> PredictLayer:
    """A predicting layer with the parts of another layer.

    Its attention does not see the first token of a document.
    """
    fields = {
      field.name: getattr(layer, field.name)
      for field in dataclasses.fields(Layer)
    }
    attention: Any = layer.attention
    mask = attention.mask & Since(FIRST)
    fields["attention"] = dataclasses.replace(attention, mask=mask)
    return cls(**fields, embed=embed, **options)

  @property
  def hidden(self) -> PreviousHidden:
    """Hidden states of the model in the cache."""
    return PreviousHidden(embed=self.embed)

  @property
  def mixers(self) -> tuple[CachedMixer | PreviousHidden, ...]:  # pyrefly: ignore
    """Hidden states, and the mixers of the layer."""
    return (self.hidden, *super().mixers)

  def build(self, rngs: nnx.Rngs, embed: int) -> PredictBlock:
    return PredictBlock(rngs, self, embed)


class PredictBlock(Block):
  """The module of `PredictLayer`."""

  def __init__(self, rngs: nnx.Rngs, spec: PredictLayer, embed: int):
    super().__init__(rngs, spec, embed)
    self.embed_norm = spec.norm.build(rngs, embed)
    self.hidden_norm = spec.norm.build(rngs, embed)
    self.join = Linear(rngs, (2 * embed,), (embed,), (None, "embed"))
    out_norm = spec.out_norm
    self.out_norm = (
      Identity() if out_norm is None else out_norm.build(rngs, embed)
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: PartOfCache | tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T Y"], Any]:
    """Return x, and the layer's cache with the call's tokens.

    For `tokens.predicting` x has the layer's output next to it, [B, T, D + D'].
    """
    spec = cast(PredictLayer, self.spec)
    # Tuples: a part for the hidden states, then those of the layer.
    parts = cast(tuple[PartOfCache, ...], cache)
    hidden_cache: Any = parts[0]
    previous, hidden_cache = spec.hidden(
      self.hidden_state(x, tokens, attend), tokens, hidden_cache, attend
    )
    own_cache: Any = parts[1:]
    g, own_cache = self.predicted(
      previous, tokens, own_cache, attend, states, number
    )
    if tokens.predicting:
      x = attend.constrain(jnp.concatenate([x, g.astype(x.dtype)], -1))
    return x, (hidden_cache, *own_cache)

  def hidden_state(
    self, x: Float[Array, "B T D"], tokens: Tokens, attend: Attend
  ) -> Float[Array, "B T D"]:
    """Hidden states of the model, of which the next token reads its own.

    Args:
      x: Output of the layers before.
      tokens: Tokens of the call.
      attend: Sharding and attention of the call.
    """
    del attend
    assert tokens.last_norm is not None
    return tokens.last_norm(x)

  def embedded(
    self, ids: Int[Array, "B T"], weight: Float[Array, "V D"]
  ) -> Float[Array, "B T D"]:
    """Embeddings that the layer reads, if it `reads_ids`.

    Args:
      ids: Token ids, int32 [B, T].
      weight: Weight of the model's embedding.
    """
    raise NotImplementedError

  def logits(
    self,
    h: Float[Array, "*batch D"],
    head: Callable[[Array], Array],
    vocab: int,
  ) -> Float[Array, "*batch V"]:
    """Logits of normed outputs, float32.

    Args:
      h: Outputs of the layer after their norm.
      head: Function from hidden states to the logits of the model's head.
      vocab: Size of the model's vocabulary, V.
    """
    del vocab
    return head(h)

  def predicted(
    self,
    previous: Float[Array, "B T D"],
    tokens: Tokens,
    cache: tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Output of the layer, [B, T, D], and the caches of its mixers.

    Args:
      previous: Hidden state of the token before each one.
      tokens: Tokens, with their embeddings.
      cache: Cache of each mixer but the hidden states.
      attend: Sharding and attention of the call.
      states: States of an encoder, or None.
      number: Number of the layer in its model.
    """
    assert tokens.embedded is not None
    spec = cast(PredictLayer, self.spec)
    stream = tokens.embedded.dtype
    parts = [
      self.embed_norm(tokens.embedded),
      self.hidden_norm(previous.astype(stream)),
    ]
    if spec.hidden_first:
      parts.reverse()
    joined = jnp.concatenate(parts, -1).astype(part_dtype(self.join, stream))
    y = attend.constrain(attend.rows(self.join, joined).astype(stream))
    part: Any = cache if len(cache) > 1 else cache[0]
    g, part = super().__call__(y, tokens, part, attend, states, number)
    return g, part if len(cache) > 1 else (part,)

  def normed(
    self, g: Float[Array, "B T D"], last_norm: Callable[[Array], Array]
  ) -> Float[Array, "B T D"]:
    """The layer's output after its norm, or the model's if it has none."""
    spec = cast(PredictLayer, self.spec)
    return last_norm(g) if spec.out_norm is None else self.out_norm(g)
