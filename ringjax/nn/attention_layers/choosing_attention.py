"""Base of grouped-query attention whose queries choose the keys that they read.

Layers whose queries see all keys before them can be made sparse: a kind is a
subclass with its sizes, and a module that passes a choice to attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ringjax.errors import OptionError
from ringjax.nn.attention_layers.attention import Attention
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
    if isinstance(x.attention, ChoosingAttention)
  ]
  if kinds:
    raise OptionError(
      name,
      f"{got}, for a model with layers of {kinds[0]} (sparse_attention)",
      "a model whose layers read all keys",
      remedy,
    )
