"""What makes a family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.models.hf.config_reader import ConfigReader, error
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Gated
from ringjax.nn.linear import Norm
from ringjax.ops.mask import Causal, Mask, Window
from ringjax.ops.rope import Rope

# What a model of text and images says of the images.
IMAGE_KEYS = (
  "boi_token_index",
  "eoi_token_index",
  "image_token_index",
  "boi_token_id",
  "eoi_token_id",
  "image_token_id",
  "vision_config",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
  """A model of text and images, of which the text model is read.

  Attributes:
    type: its `model_type`.
    keys: what else its config.json says beside `text_config`.
    defaults: what a `text_config` means that does not say; writers leave out
      what transformers has by default.
    architecture: the text model's own, as transformers names it.
    others: prefixes of the tensors of all that is not the text model.
  """

  type: str
  keys: tuple[str, ...]
  defaults: Mapping[str, Any]
  architecture: str
  others: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A kind of checkpoint.

  Attributes:
    name: as in `rj.models.list()`.
    types: values of `model_type` that mean it.
    config: what a config.json says.
    names: the tensors of a model with that config.
    unread: prefixes of tensors that are no part of the model, by its
      config.json: layers that only guess further tokens.
    wrapper: a model that holds one of this family, or None.
  """

  name: str
  types: tuple[str, ...]
  config: Callable[[ConfigReader], TransformerConfig]
  names: Callable[[TransformerConfig], TensorNames] = lambda config: (
    TensorNames(parts=LLAMA)
  )
  unread: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
  wrapper: Wrapper | None = None


def causal(window: int | None) -> Mask:
  """Causal, within the last `window` tokens if it is given."""
  return Causal() if window is None else Causal() & Window(window)


def rms(r: ConfigReader, offset: float = 0.0, default: float = 1e-6) -> Norm:
  """The RMSNorm of a config."""
  return Norm(eps=r.positive("rms_norm_eps", default=default), offset=offset)


def attention(
  r: ConfigReader, rope: Rope | None = None, **options: Any
) -> Attention:
  """Grouped-query attention with the heads of a config; `rope` by default."""
  heads, kv_heads = r.heads()
  head_dim = r.head_dim(heads)
  return Attention(
    heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, **options
  )


def gated(r: ConfigReader, **options: Any) -> Gated:
  """The gated feedforward of a config."""
  bias = options.pop("bias", False)
  act = options.pop("act", None) or r.act("hidden_act", default="silu")
  return Gated(hidden=r.whole("intermediate_size"), act=act, bias=bias)


def _context(r: ConfigReader) -> tuple[int, str | None]:
  """Up to where the computation is that of the file, and which key says so.

  Dual chunk attention (An et al. 2024, arXiv 2402.17463) folds the distances
  of longer texts; it is plain attention up to a chunk.
  """
  most = r.whole("max_position_embeddings", default=2048)
  chunks = r.value("dual_chunk_attention_config", default=None)
  said = "max_position_embeddings"
  if chunks is None:
    return most, said if r.has(said) else None
  part = r.part("dual_chunk_attention_config", chunks)
  exact = (
    part.whole("original_max_position_embeddings", default=most),
    part.whole("chunk_size"),
  )
  # How the folding itself is done, and a faster form of it.
  part.ignore(
    "local_size",
    "sparse_attention_config",
    "sparse_attention_enabled",
    "sparse_attention_threshold",
  )
  part.finish()
  return min(most, *exact), "dual_chunk_attention_config"


def model(
  r: ConfigReader,
  family: str,
  layers: Sequence[Layer],
  *,
  tied: bool = False,
  vocab: str = "vocab_size",
  **options: Any,
) -> TransformerConfig:
  """The rest of a config. `tied` is what a file means that does not say."""
  positions, bound = _context(r)
  config = TransformerConfig(
    family=family,
    vocab=r.whole(vocab),
    embed=r.whole("hidden_size", "n_embed"),
    layers=tuple(layers),
    norm=layers[0].norm,
    tied=r.flag("tie_word_embeddings", default=tied),
    max_positions=positions,
    bound=bound,
    **options,
  )
  numbers = config.vocab * config.embed
  if numbers > 2**40:
    raise error(
      "vocab_size", config.vocab, "an embedding of 2^40 numbers", "repair it"
    )
  r.finish()
  return config
