"""What makes a family, and the parts that most configs describe alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention import Attention
from ringjax.nn.block import Feedforward, Layer, Mixer
from ringjax.nn.feedforward import Experts, Gated, Grouped, Sigmoid, Softmax
from ringjax.nn.linear import Norm
from ringjax.ops.mask import Causal, Mask, Window
from ringjax.ops.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
  """As what the text model within a model of text and images is read.

  Attributes:
    type: the `model_type` of a model that computes the same of text.
    architecture: how transformers names that one.
    said: the `model_type` that `text_config` has; default: `type`.
    defaults: what a `text_config` means that does not say.
    renamed: a key of `text_config` -> those that say it of the other model.
    fixed: what it means whatever it says.
    names: its tensors; default: as its family names them.
    turned: endings of tensors whose last two axes may be the other way round;
      the shape in the folder decides.
    skips: the key of a list of layers that text does not meet, if any.
    rows: of the embedding, behind those of the vocabulary, that no text reads.
  """

  type: str
  architecture: str
  said: str = ""
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  renamed: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  names: Callable[[TransformerConfig], TensorNames] | None = None
  turned: tuple[str, ...] = ()
  skips: str = ""
  rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
  """A model of text and images, of which the text model is read.

  Attributes:
    type: its `model_type`.
    defaults: what a `text_config` means that does not say; writers leave out
      what transformers has by default.
    architecture: the text model's own, as transformers names it.
    texts: as which models `text_config` may be read, the first of which is the
      one that is meant without a `model_type`; default: those of the family, as
      themselves.
    flat: whether older files have the text model's keys beside their own.
    within: the key of the part that has `text_config`, if it is not outermost.
    text_ties: whether `tie_word_embeddings` in `text_config`, where it is
      there, counts before the outer one.
  """

  type: str
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  architecture: str = ""
  texts: tuple[TextModel, ...] = ()
  flat: bool = False
  within: str = ""
  text_ties: bool = False


def llama_names(
  parts: Mapping[str, str] | None = None, **options: Any
) -> Callable[[TransformerConfig], TensorNames]:
  """Names like Llama's, for every config: `parts` and options replace some."""
  names = TensorNames(parts={**LLAMA, **(parts or {})}, **options)
  return lambda config: names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A kind of checkpoint.

  Attributes:
    name: as in `rj.models.list()`.
    config: what a config.json says.
    names: the tensors of a model with that config.
    types: values of `model_type` that mean it; default: its name.
    unread: prefixes of tensors that are no part of the model, by its
      config.json: layers that only guess further tokens.
    wrapper: a model that holds one of this family, or None.
    spellings: names that a tensor may have in a folder, by its own, which is
      the first of them.
  """

  name: str
  config: Callable[[ConfigReader], TransformerConfig]
  names: Callable[[TransformerConfig], TensorNames] = llama_names()
  types: tuple[str, ...] = ()
  unread: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
  wrapper: Wrapper | None = None
  spellings: Callable[[str], tuple[str, ...]] = lambda name: (name,)

  def __post_init__(self):
    object.__setattr__(self, "types", self.types or (self.name,))

  def read(
    self, config: Mapping[str, Any], unknown: UnknownKeys
  ) -> TransformerConfig:
    """What the config.json of a text model means.

    Args:
      config: The file.
      unknown: What happens to keys that nothing reads.

    Raises:
      ConfigError: a value out of range, or a key that is not known.
    """
    return self.config(ConfigReader(config, unknown=unknown))


def pattern(
  r: ConfigReader, every: int, other: str = "sliding_attention"
) -> list[str]:
  """Kinds of layers of which each `every`-th has full attention."""
  return [
    other if (i + 1) % every else "full_attention" for i in range(r.layers())
  ]


def rope_flags(r: ConfigReader) -> list[bool]:
  """Whether each layer has a rotation: of every few, the last one has none."""
  every = r.whole("no_rope_layer_interval", default=4)
  default = [int((i + 1) % every != 0) for i in range(r.layers())]
  return r.flags("no_rope_layers", default)


def causal(window: int | None, kind: str = "sliding_attention") -> Mask:
  """Causal; within the last `window` tokens in layers of a sliding kind."""
  if window is None or kind != "sliding_attention":
    return Causal()
  return Causal() & Window(window)


def rms(r: ConfigReader, offset: float = 0.0, default: float = 1e-6) -> Norm:
  """The RMSNorm of a config."""
  return Norm(eps=r.positive("rms_norm_eps", default=default), offset=offset)


def biases(
  r: ConfigReader, key: str = "attention_bias", default: bool = False
) -> dict[str, bool]:
  """Options of `attention`: one key for the biases of all its maps."""
  bias = r.flag(key, default=default)
  return {"bias": bias, "out_bias": bias}


def attention(r: ConfigReader, rope: Rope | None, **options: Any) -> Attention:
  """Grouped-query attention with the heads of a config."""
  heads, kv_heads = r.heads()
  return Attention(
    heads=heads, kv_heads=kv_heads, head_dim=r.head_dim(), rope=rope, **options
  )


def gated(
  r: ConfigReader, *, bias: bool = False, act: str | None = None
) -> Gated:
  """The gated feedforward of a config."""
  return Gated(
    hidden=r.whole("intermediate_size"),
    act=act or r.act("hidden_act", default="silu"),
    bias=bias,
  )


def experts(
  r: ConfigReader,
  router: Grouped | Sigmoid | Softmax,
  *,
  count: Sequence[str] = ("num_local_experts", "num_experts"),
  chosen: Sequence[str] = ("num_experts_per_tok",),
  most: int | None = None,
  hidden: str = "moe_intermediate_size",
  **options: Any,
) -> Experts:
  """The mixture of experts of a config.

  Args:
    r: the config.
    router: how experts are chosen.
    count: keys of how many there are.
    chosen: keys of how many a token has.
    most: the most that it may have; default: all.
    hidden: the key of an expert's width.
    **options: of `Experts`.
  """
  number = r.whole(*count)
  return Experts(
    experts=number,
    chosen=r.whole(*chosen, most=most or number),
    hidden=r.whole(hidden),
    act=r.act("hidden_act", default="silu"),
    router=router,
    **options,
  )


def _context(r: ConfigReader) -> tuple[int, str | None]:
  """Up to where the computation is that of the file, and which key says so.

  Dual chunk attention (An et al. 2024, arXiv 2402.17463) folds the distances
  of longer texts; it is plain attention up to a chunk.
  """
  keys = ("max_seq_len", "model_max_length", "max_position_embeddings")
  said = next((key for key in keys if r.has(key)), keys[-1])
  most = r.whole(said, default=2048)
  chunks = r.value("dual_chunk_attention_config", default=None)
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
  attention: Mixer | Sequence[Mixer],
  feedforward: Feedforward | Sequence[Feedforward],
  norm: Norm,
  *,
  layer: Mapping[str, Any] | None = None,
  tied: bool = False,
  bound: str | None = None,
  **options: Any,
) -> TransformerConfig:
  """The model of a config, of which all keys have to be read by now.

  Args:
    r: the config.
    family: its name.
    attention: of every layer, or a list with one for each, whose length is
      then the number of layers.
    feedforward: of every layer, or a list with one for each.
    norm: of every layer, and the last one.
    layer: further options of `Layer`.
    tied: whether the head is the embedding, if the file does not say.
    bound: the key that says how many positions were learned, if any were.
    **options: of `TransformerConfig`.

  Raises:
    ConfigError: a value out of range, or a key that was not read.
  """
  count = len(attention) if isinstance(attention, list) else r.layers()
  each = lambda part: part if isinstance(part, list) else [part] * count
  layers = [
    Layer(attention=a, feedforward=f, norm=norm, **(layer or {}))
    for a, f in zip(each(attention), each(feedforward), strict=True)
  ]
  learned = options.get("positions")
  if learned is not None and bound is not None:
    most = learned.count
  else:
    most, bound = _context(r)
  config = TransformerConfig(
    family=family,
    vocab=r.whole("vocab_size"),
    embed=r.whole("hidden_size", "n_embed", "d_model", "n_embd"),
    layers=tuple(layers),
    norm=norm,
    tied=r.flag("tie_word_embeddings", default=tied),
    max_positions=most,
    bound=bound,
    **options,
  )
  if config.vocab * config.embed > 2**40:
    raise r.error("vocab_size", config.vocab, "an embedding of 2^40 numbers")
  r.finish()
  return config
