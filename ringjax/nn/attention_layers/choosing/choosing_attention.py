"""Base of grouped-query attention whose queries choose the keys that they read.

Layers whose queries see all keys before them can be made sparse: a kind is a
subclass with its sizes, and a module that passes a choice to attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.base import LayerCache
from ringjax.kv.summaries.summary_layers import SummaryLayer
from ringjax.kv.summaries.summary_spec import KeySummaries
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.summaries.summary_view import SummaryView
from ringjax.ops.attention.cached.summaries.window_sums import (
  PoolingGates,
  WindowSizes,
  WindowWeights,
)
from ringjax.ops.mask import Causal


def why_dense(attention: object) -> str | None:
  """The reason for which a layer cannot choose its keys, or None."""
  if type(attention) is not Attention:
    return f"a layer of {type(attention).__name__}"
  if attention.mask != Causal():
    return f"a layer whose queries see {attention.mask}"
  if attention.alibi is not None:
    return "a layer with ALiBi"
  if attention.sinks:
    return "a layer with learned sinks"
  if attention.group is not None:
    return "a layer that shares its keys with others"
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoosingAttention(Attention):
  """Attention of one layer to keys that its queries choose."""

  @classmethod
  def fields_of(cls, attention: object) -> dict[str, Any]:
    """Fields of a dense layer that is made a layer of this kind.

    Raises:
      OptionError: If the layer cannot choose its keys.
    """
    reason = why_dense(attention)
    if reason is not None:
      raise OptionError(
        "sparse_attention",
        f"it for {reason}",
        "causal layers of plain attention",
        "use another model",
      )
    names = [field.name for field in dataclasses.fields(Attention)]
    return {name: getattr(attention, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryAttention(ChoosingAttention):
  """Attention of one layer whose queries choose keys by summaries of them."""

  @property
  def windows(self) -> WindowSizes:
    """Sizes of the windows of keys that have a summary."""
    raise NotImplementedError

  @property
  def summarizes_values(self) -> bool:
    """Whether values have summaries, too."""
    raise NotImplementedError

  @property
  def summaries(self) -> KeySummaries:
    """Summaries of the keys, for the layer's cache."""
    rope = self.rope
    changes = rope is not None and rope.scaling.by_length
    normed_late = self.qk_norm_late and self.qk_norm is not None
    return KeySummaries(
      kv_heads=self.kv_heads,
      key=self.head_dim,
      value=self.value if self.summarizes_values else 0,
      sizes=self.windows,
      fixed=not changes and not normed_late,
    )


class SummaryQuery(GroupedQuery):
  """Base class of the modules of `SummaryAttention`."""

  def _appended_with_summaries(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    tokens: Tokens,
    caches: tuple[LayerCache, Any],
    attend: Attend,
    weights: WindowWeights | None = None,
  ) -> tuple[
    Float[Array, "B T N H"], tuple[LayerCache, Any], SummaryView | None
  ]:
    """Append a call's keys, and the summaries of the windows that they end.

    Returns:
      Rotated queries, the layer's caches, and a view of the summaries; None
      where keys travel, and where a cache has none.
    """
    keys, summaries = caches
    q, keys = self._appended(q, k, v, tokens, keys)
    summaries, view = appended_summaries(
      summaries, keys, tokens, attend, weights
    )
    return q, (keys, summaries), view


def appended_summaries(
  summaries: object,
  keys: LayerCache,
  tokens: Tokens,
  attend: Attend,
  weights: WindowWeights | PoolingGates | None = None,
) -> tuple[object, SummaryView | None]:
  """Write the summaries of the windows of keys that end in a call.

  Args:
    summaries: The layer's summaries; anything else for a call without a cache.
    keys: Keys of the layer, with those of the call.
    tokens: Tokens of the call.
    attend: Sharding of the tokens.
    weights: See `SummaryLayer.appended`.

  Returns:
    The summaries, and a view of them; None where keys travel, and where a cache
    has none.
  """
  # A call without a cache keeps none.
  if not isinstance(summaries, SummaryLayer):
    return summaries, None
  views = tuple(view.keys_alone() for view in keys.views())
  if weights is None or isinstance(weights, PoolingGates):
    summaries = summaries.appended(views, tokens.at, weights)
  else:
    summaries = summaries.appended(keys.views(), tokens.at, weights)
  return summaries, summaries.view(views) if attend.resident else None


def index_summaries(dim: int, block: int) -> KeySummaries:
  """Summaries of the blocks of an index's keys, of `dim` numbers each."""
  return KeySummaries(
    kv_heads=1,
    key=dim,
    value=0,
    sizes=WindowSizes(block, block),
    fixed=True,
    of_index=True,
  )


def refuse_sparse(
  layers: Sequence[Any], name: str, got: str, remedy: str
) -> None:
  """Refuses a model made sparse for what does not support its two caches.

  Args:
    layers: Layers of the model.
    name: Name of the argument, for the error.
    got: Description of what came.
    remedy: Advice, for the error.

  Raises:
    OptionError: If a layer of grouped-query attention chooses its keys.
  """
  kinds = [
    type(x.attention).__name__
    for x in layers
    if hasattr(x.attention, "index_keys")
    or isinstance(x.attention, ChoosingAttention)
  ]
  if kinds:
    raise OptionError(
      name,
      f"{got}, for a model with layers of {kinds[0]}, which choose keys",
      "a model whose layers read all keys",
      remedy,
    )


def refuse_tree(tokens: Tokens) -> None:
  """Refuse a tree of drafts, whose tokens share positions.

  Raises:
    OptionError: If the tokens are a tree.
  """
  if tokens.tree is not None:
    raise OptionError(
      "parents",
      "a tree of drafted tokens, for layers that choose blocks of positions",
      "one path of tokens",
      "draft one path, or none",
    )
