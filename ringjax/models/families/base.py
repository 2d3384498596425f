"""What makes a family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ringjax.models.hf.names import LLAMA, Names
from ringjax.models.hf.reader import Reader, error
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Gated
from ringjax.nn.linear import Norm
from ringjax.ops.mask import Causal, Mask, Window
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A kind of checkpoint.

  Attributes:
    name: as in `rj.models.list()`.
    types: values of `model_type` that mean it.
    config: what a config.json says.
    names: the tensors of a model with that config.
  """

  name: str
  types: tuple[str, ...]
  config: Callable[[Reader], TransformerConfig]
  names: Callable[[TransformerConfig], Names] = lambda config: Names(
    parts=LLAMA
  )


def causal(window: int | None) -> Mask:
  """Causal, within the last `window` tokens if it is given."""
  return Causal() if window is None else Causal() & Window(window)


def rms(r: Reader, offset: float = 0.0, default: float = 1e-6) -> Norm:
  """The RMSNorm of a config."""
  return Norm(eps=r.positive("rms_norm_eps", default=default), offset=offset)


def attention(r: Reader, rope: Rope | None = None, **options: Any) -> Attention:
  """Grouped-query attention with the heads of a config; `rope` by default."""
  heads, kv_heads = r.heads()
  head_dim = r.head_dim(heads)
  return Attention(
    heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, **options
  )


def gated(r: Reader, **options: Any) -> Gated:
  """The gated feedforward of a config."""
  bias = options.pop("bias", False)
  act = options.pop("act", None) or r.act("hidden_act", default="silu")
  return Gated(hidden=r.whole("intermediate_size"), act=act, bias=bias)


def model(
  r: Reader,
  family: str,
  layers: Sequence[Layer],
  *,
  tied: bool = False,
  vocab: str = "vocab_size",
  **options: Any,
) -> TransformerConfig:
  """The rest of a config. `tied` is what a file means that does not say."""
  config = TransformerConfig(
    family=family,
    vocab=r.whole(vocab),
    embed=r.whole("hidden_size", "n_embed"),
    layers=tuple(layers),
    norm=layers[0].norm,
    tied=r.flag("tie_word_embeddings", default=tied),
    max_positions=r.whole("max_position_embeddings", default=2048),
    bounded=r.has("max_position_embeddings"),
    **options,
  )
  numbers = config.vocab * config.embed
  if numbers > 2**40:
    raise error(
      "vocab_size", config.vocab, "an embedding of 2^40 numbers", "repair it"
    )
  r.finish()
  return config
