"""A layer after those of a model that reads the inputs of several of them.

Guarantees: as of `predict_layer`: the residual stream passes unchanged, and
what the layer keeps of a token is a part of the model's cache.
Cost: of a call whose predictions are not used, a map of n D to D' numbers and
the maps of keys and values; the compiler drops the rest.
Memory: keys and values of one layer, and the fused states of a window of two
tokens.
Ref: Li et al. 2025, EAGLE-3, arXiv 2503.01840, as SpecForge, SGLang and vLLM
compute it.

For the token at position t the layer reads its embedding e and f, a map of the
residual stream before n layers at t - 1, and predicts the token at t + 1:

  x = f + attention([norm(e); norm(f)]),  g = x + feedforward(norm(x))

The logits, head(norm(g)), are those of a draft vocabulary. In place of f a
second prediction reads g.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ringjax.kv.encoder_states import EncoderStates
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.block import PartOfCache
from ringjax.nn.draft_layers.predict_layer import PredictBlock, PredictLayer
from ringjax.nn.linear import (
  Embedding,
  Head,
  Identity,
  Linear,
  part_dtype,
  stream_dtype,
)
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.typing import Index


class DraftVocabulary:
  """Ids of a draft vocabulary in the vocabulary of the model.

  It is a constant of programs: equal ones have the same hash.

  Attributes:
    ids: Id in the model's vocabulary of each drafted one, int32 [W].
  """

  def __init__(self, ids: Int[np.ndarray, " W"]):
    self.ids = np.ascontiguousarray(ids, np.int32)
    self.ids.setflags(write=False)
    self._digest = hashlib.sha256(self.ids.tobytes()).digest()

  def __hash__(self) -> int:
    return hash(self._digest)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, DraftVocabulary) and self._digest == other._digest

  def __len__(self) -> int:
    return self.ids.size

  def __repr__(self) -> str:
    return f"DraftVocabulary({self.ids.size} ids)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFolder:
  """Storage of a head in its folder.

  Attributes:
    config: Text of its config.json.
    prefix: Prefix of the names of tensors, but of those in `bare`.
    layer: Further prefix of those of the layer.
    dtype: Dtype of its tensors.
    path: Path that it was loaded from, or "".
    bare: Names without that prefix.
    mask: Number of ids of which it marks those of the draft vocabulary (t2d),
      too; 0: it does not.
  """

  config: str = dataclasses.field(repr=False)
  prefix: str = ""
  layer: str = "midlayer."
  dtype: str = "bfloat16"
  path: str = ""
  bare: tuple[str, ...] = ()
  mask: int = 0

  def named(self, name: str) -> str:
    """Name of a tensor in the folder."""
    return name if name in self.bare else self.prefix + name


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleLayer(PredictLayer):
  """The layer of an EAGLE-3 head.

  `embed` is its own width, D', `out_norm` the norm before its head, and the
  mask of its attention leaves out the first token of a document.

  Attributes:
    taps: Layers before which the residual stream is read, n of them; as many
      as the model has layers: after the last one.
    vocabulary: Draft vocabulary, or the number of ids for all of them.
    own_embedding: Number of embeddings of the head; 0: it reads those of the
      model.
    feature_norm: Norms of the n states before their map: "each", "whole" for
      one over all numbers, or "" for none.
    normed_residual: Whether attention is added to the normed f, not to f.
    folder: Storage of the head in its folder.
  """

  reads_ids: ClassVar[bool] = True
  drafter: ClassVar[str] = "eagle3"

  taps: tuple[int, ...]  # pyrefly: ignore
  vocabulary: DraftVocabulary | int
  own_embedding: int = 0
  feature_norm: str = ""
  normed_residual: bool = False
  folder: HeadFolder = HeadFolder(config="{}")

  def build(self, rngs: nnx.Rngs, embed: int) -> EagleBlock:
    return EagleBlock(rngs, self, embed)


class EagleBlock(PredictBlock):
  """The module of `EagleLayer`."""

  def __init__(self, rngs: nnx.Rngs, spec: EagleLayer, embed: int):
    # None of the parts of a usual layer are made: all have other widths.
    nnx.Module.__init__(self)
    self.spec = spec
    width, count = spec.embed, len(spec.taps)
    norm: Callable[[int], Any] = lambda size: spec.norm.build(rngs, size)
    self.attention = GroupedQuery(
      rngs, cast(Attention, spec.attention), 2 * width, width
    )
    self.feedforward = spec.feedforward.build(rngs, width)
    self.fuse = Linear(rngs, (count * embed,), (width,), (None, "embed"))
    self.feature_norms = nnx.List(
      [norm(embed) for _ in range(count * (spec.feature_norm == "each"))]
    )
    joint_norm = spec.feature_norm == "whole"
    self.features_norm = norm(count * embed) if joint_norm else Identity()
    self.embed_norm, self.hidden_norm = norm(width), norm(width)
    self.pre_feedforward, self.out_norm = norm(width), norm(width)
    ids = spec.own_embedding
    self.embedding = Embedding(rngs, ids, width) if ids else None
    size = spec.vocabulary
    self.head = Head(rngs, width, size if isinstance(size, int) else len(size))

  def hidden_state(
    self, x: Float[Array, "B T D"], tokens: Tokens, attend: Attend
  ) -> Float[Array, "B T E"]:
    """Map f of the residual stream before some layers, [B, T, D']."""
    spec = cast(EagleLayer, self.spec)
    states = [tokens.tapped[n] for n in spec.taps]
    if spec.feature_norm == "each":
      states = [f(y) for f, y in zip(self.feature_norms, states, strict=True)]
    joined = self.features_norm(jnp.concatenate(states, -1))
    joined = joined.astype(part_dtype(self.fuse, x.dtype))
    return attend.constrain(attend.rows(self.fuse, joined).astype(x.dtype))

  def embedded(
    self, ids: Int[Array, "B T"], weight: Float[Array, "V D"]
  ) -> Float[Array, "B T E"]:
    """The head's embeddings, or the model's without their scale and norm."""
    if self.embedding is not None:
      return self.embedding(ids)
    x = jnp.take(weight, ids, axis=0, mode="clip")
    return x.astype(stream_dtype(x.dtype))

  def logits(
    self,
    h: Float[Array, "*batch E"],
    head: Callable[[Array], Array],
    vocab: int,
  ) -> Float[Array, "*batch V"]:
    """Logits by its own head; -inf for ids outside of its vocabulary."""
    del head
    y = self.draft_logits(h)
    size = cast(EagleLayer, self.spec).vocabulary
    if isinstance(size, int):
      padding = [(0, 0)] * (y.ndim - 1) + [(0, vocab - size)]
      return jnp.pad(y, padding, constant_values=-jnp.inf)
    column = np.full(vocab, -1, np.int32)
    column[size.ids] = np.arange(len(size), dtype=np.int32)
    columns = jnp.asarray(column)
    drafted = jnp.take(y, jnp.maximum(columns, 0), axis=-1)
    return jnp.where(columns >= 0, drafted, -jnp.inf)

  def draft_logits(
    self, h: Float[Array, "*batch E"]
  ) -> Float[Array, "*batch W"]:
    """Logits of the draft vocabulary, float32, of normed outputs."""
    return self.head.logits(h.astype(part_dtype(self.head, h.dtype)))

  def predicted(
    self,
    previous: Float[Array, "B T E"],
    tokens: Tokens,
    cache: tuple[PartOfCache, ...],
    attend: Attend,
    states: EncoderStates | None = None,
    number: Index = 0,
  ) -> tuple[Float[Array, "B T E"], tuple[Any, ...]]:
    """Compute `PredictBlock.predicted`, of f or g in `previous`."""
    del states, number
    assert tokens.embedded is not None
    spec = cast(EagleLayer, self.spec)
    stream = tokens.embedded.dtype
    residual = previous.astype(stream)
    normed = self.hidden_norm(residual)
    joined = jnp.concatenate([self.embed_norm(tokens.embedded), normed], -1)
    narrow = part_dtype(self.attention, stream)
    (part,) = cache
    mixed, part = self.attention(
      joined.astype(narrow), tokens, cast(Any, part), attend
    )
    residual = normed if spec.normed_residual else residual
    x = attend.constrain(residual + mixed.astype(stream))
    feedforward: Any = self.feedforward
    h = feedforward(self.pre_feedforward(x).astype(narrow), attend)
    return attend.constrain(x + h.astype(stream)), (part,)
