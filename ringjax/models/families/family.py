"""Definition of a model family, and config parts that most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.models.families.predict_layers import PredictNames
from ringjax.models.hf.config_reader import ConfigReader
from ringjax.models.hf.names import LLAMA, TensorNames
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.models.transformer import TransformerConfig
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.choosing.block_attention import BlockAttention
from ringjax.nn.attention_layers.choosing.indexed_attention import (
  IndexedAttention,
)
from ringjax.nn.attention_layers.choosing.native_attention import (
  NativeAttention,
)
from ringjax.nn.attention_layers.folded_attention import (
  DualChunk,
  FoldedAttention,
  SelfExtend,
)
from ringjax.nn.block import Feedforward, Layer, Mixer
from ringjax.nn.feedforward import Experts, Gated, Router
from ringjax.nn.linear import Norm
from ringjax.ops.attention.sparse.native_sparse import NativeSparse
from ringjax.ops.mask import Causal, Mask, Window
from ringjax.ops.rope import LengthScaled, Rope, Unscaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
  """A way to read the text model within a model of text and images.

  Attributes:
    type: The `model_type` of a text model with the same computation.
    architecture: Name of that model's class in transformers.
    text_model_type: The `model_type` that `text_config` has; default: `type`.
    defaults: Values of keys that a `text_config` leaves out.
    renamed: A key of `text_config` -> the keys of the other model for it.
    fixed: Values that hold whatever the `text_config` says.
    names: Names of its tensors; default: those of its family.
    turned: Endings of tensors whose last two axes may be swapped; the shape in
      the folder decides.
    skips: Key of a list of layers that text does not pass, if any.
    rows: Embedding rows after those of the vocabulary, which no text uses.
  """

  type: str
  architecture: str
  text_model_type: str = ""
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
    type: The `model_type` of the whole model.
    defaults: Values of keys that a `text_config` leaves out; writers omit the
      defaults of transformers.
    architecture: Name of the text model's class in transformers.
    texts: Ways to read `text_config`, of which the first counts without a
      `model_type`; default: the types of the family.
    flat: Whether older files have the text model's keys next to their own.
    within: Key of the part that has `text_config`, if it is not outermost.
    text_ties: Whether `tie_word_embeddings` in `text_config`, if present,
      counts before the outer one.
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
  """Llama's tensor names for every config; `parts` and options replace some."""
  names = TensorNames(parts={**LLAMA, **(parts or {})}, **options)
  return lambda config: names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A model family: how its configs and tensors are read.

  Attributes:
    name: Name of the family, as in `rj.models.list()`.
    config: Function that reads a config.json.
    names: Function from a config to the names of its tensors.
    types: Values of `model_type` of the family; default: its name.
    unread: Function from a config.json to prefixes of tensors that the model
      does not use: layers that only predict further tokens.
    wrapper: A model that holds one of this family, or None.
    spellings: Function from a tensor's name to the names that it may have in a
      folder, the first of which is the name itself.
    predict: The layer that predicts one token further, in folders that have
      one; None: none is read.
  """

  name: str
  config: Callable[[ConfigReader], TransformerConfig]
  names: Callable[[TransformerConfig], TensorNames] = llama_names()
  types: tuple[str, ...] = ()
  unread: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
  wrapper: Wrapper | None = None
  spellings: Callable[[str], tuple[str, ...]] = lambda name: (name,)
  predict: PredictNames | None = None

  def __post_init__(self):
    object.__setattr__(self, "types", self.types or (self.name,))

  def tensor_names(self, config: TransformerConfig) -> TensorNames:
    """Names of a model's tensors, with those of its predicting layer."""
    names = self.names(config)
    if config.predicts is None:
      return names
    assert self.predict is not None
    return self.predict.named(names, config)

  def read(
    self, config: Mapping[str, Any], unknown: UnknownKeys
  ) -> TransformerConfig:
    """Reads the config.json of a text model.

    Args:
      config: Content of config.json.
      unknown: Treatment of keys that nothing reads.

    Raises:
      ConfigError: If a value is out of range, or a key is not known.
    """
    reader = ConfigReader(config, unknown=unknown)
    if self.predict is not None:
      # Read with the layer, see `PredictNames`.
      reader.ignore(self.predict.key)
    return self.config(reader)


def pattern(
  r: ConfigReader, every: int, other: str = "sliding_attention"
) -> list[str]:
  """Kinds of layers, of which every `every`-th has full attention."""
  return [
    other if (i + 1) % every else "full_attention" for i in range(r.layers())
  ]


def rope_flags(r: ConfigReader) -> list[bool]:
  """Whether each layer has a rotation; by default every fourth has none."""
  every = r.whole("no_rope_layer_interval", default=4)
  default = [int((i + 1) % every != 0) for i in range(r.layers())]
  return r.flags("no_rope_layers", default)


def causal(window: int | None, kind: str = "sliding_attention") -> Mask:
  """Causal mask; in layers of a sliding kind it has a window, too."""
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
  router: Router,
  *,
  count: Sequence[str] = ("num_local_experts", "num_experts"),
  chosen: Sequence[str] = ("num_experts_per_tok",),
  most: int | None = None,
  hidden: str = "moe_intermediate_size",
  **options: Any,
) -> Experts:
  """The mixture of experts of a config.

  Args:
    r: Reader of the config.
    router: Router that chooses experts.
    count: Keys of the number of experts.
    chosen: Keys of the number of experts per token.
    most: Largest number of experts per token; default: all.
    hidden: Key of an expert's width.
    **options: Other options of `Experts`.
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


def _folding(r: ConfigReader) -> tuple[DualChunk | SelfExtend | None, int]:
  """Read the folding of positions, and the original context of keys' scale.

  The key `position_folding` is this package's own, see `models.rope_scaling`;
  the sizes of dual chunk attention are in the published one.

  Returns:
    The folding, or None; and the original context, 0 for keys without a scale.
  """
  folding = r.value("position_folding", default=None)
  if folding is None:
    return None, 0
  part = r.part("position_folding", folding, closed=True)
  kind = part.text("type")
  if kind == "self_extend":
    positions = SelfExtend(
      group=part.whole("group"), window=part.whole("window")
    )
    part.finish()
    return positions, 0
  part.finish()
  key = "dual_chunk_attention_config"
  if kind != "dual_chunk":
    raise part.error("type", kind, "dual_chunk or self_extend")
  chunks = r.part(key, r.value(key))
  size = chunks.whole("chunk_size", least=2)
  positions = DualChunk(
    chunk_size=size,
    local_size=chunks.whole("local_size", least=0, most=size - 2, default=0),
  )
  return positions, chunks.whole(
    "original_max_position_embeddings", default=None
  ) or 0


def _folded(r: ConfigReader, layers: Sequence[Layer]) -> tuple[Layer, ...]:
  """Folds the positions of the layers with full attention, if the config says.

  Raises:
    ConfigError: If a layer's positions cannot be folded, or none has any.
  """
  positions, original = _folding(r)
  if positions is None:
    return tuple(layers)
  folded: list[Layer] = []
  for layer in layers:
    mixer: Any = layer.attention
    if mixer.ropes and mixer.reach is None:
      rope = getattr(mixer, "rope", None)
      if rope is not None and type(rope.scaling) is not Unscaled:
        raise r.error(
          "position_folding", positions, "a model without another scaling"
        )
      if original and rope is not None:
        rope = dataclasses.replace(
          rope, scaling=LengthScaled(original=original)
        )
        mixer = dataclasses.replace(mixer, rope=rope)
      mixer = FoldedAttention.of(mixer, positions)
    folded.append(dataclasses.replace(layer, attention=mixer))
  if folded == list(layers):
    raise r.error(
      "position_folding", positions, "layers with full attention that rotate"
    )
  return tuple(folded)


def _sparse(r: ConfigReader, layers: Sequence[Layer]) -> tuple[Layer, ...]:
  """Let layers choose the keys that they read, if the config says so.

  The key `sparse_attention` is this package's own, see `train.sparsify`.

  Raises:
    ConfigError: If no layer sees all keys before it.
    OptionError: If such a layer cannot choose its keys.
  """
  entry = r.value("sparse_attention", default=None)
  if entry is None:
    return tuple(layers)
  part = r.part("sparse_attention", entry, closed=True)
  kinds = {"index": _indexed, "moba": _of_blocks, "nsa": _native}
  kind = part.text("type")
  if kind not in kinds:
    raise part.error("type", kind, f"one of {', '.join(kinds)}")
  make_sparse = kinds[kind](part)
  full_last = part.whole("full_last", least=0, default=0)
  part.finish()
  attends = [
    n
    for n, layer in enumerate(layers)
    if getattr(layer.attention, "reach", 0) is None
    and isinstance(layer.attention, Attention)
  ]
  if not attends:
    kinds = {type(layer.attention).__name__ for layer in layers}
    raise r.error(
      "sparse_attention",
      f"{kind} for layers of {', '.join(sorted(kinds))}",
      "a layer of plain attention that sees all keys before its queries",
      "leave sparse_attention out, or take another model",
    )
  chosen = attends[: max(0, len(attends) - full_last)]
  if not chosen:
    raise part.error(
      "full_last",
      full_last,
      f"at most {len(attends) - 1}, as {len(attends)} layers see all keys",
      f"pass full_last={len(attends) - 1}",
    )
  return tuple(
    dataclasses.replace(layer, attention=make_sparse(layer.attention))
    if n in chosen
    else layer
    for n, layer in enumerate(layers)
  )


def _indexed(part: ConfigReader) -> Callable[[Mixer], Mixer]:
  """Read the sizes of an index that each layer gets."""
  sizes = {name: part.whole(name) for name in ("heads", "dim", "count")}
  return lambda attention: IndexedAttention.of(attention, **sizes)


def _of_blocks(part: ConfigReader) -> Callable[[Mixer], Mixer]:
  """Read the sizes of the blocks that each query chooses."""
  sizes = {name: part.whole(name) for name in ("block", "count")}
  return lambda attention: BlockAttention.of(attention, **sizes)


def _native(part: ConfigReader) -> Callable[[Mixer], Mixer]:
  """Read the sizes of native sparse attention."""
  minimum = {"initial": 0}
  sizes = {
    field.name: part.whole(field.name, least=minimum.get(field.name, 1))
    for field in dataclasses.fields(NativeSparse)
  }
  return lambda attention: NativeAttention.of(attention, **sizes)


def _context(r: ConfigReader) -> tuple[int, str | None]:
  """The longest context that is computed as trained, and its key.

  Dual chunk attention (An et al. 2024, arXiv 2402.17463) folds the distances
  of longer texts; it is plain attention up to a chunk, which is all that is
  computed unless `position_folding` says more.
  """
  keys = (
    "max_seq_len", "model_max_length", "n_positions", "max_position_embeddings",
  )  # fmt: skip
  limit_key = next((key for key in keys if r.has(key)), keys[-1])
  context = r.whole(limit_key, default=2048)
  chunks = r.value("dual_chunk_attention_config", default=None)
  if chunks is None or r.has("position_folding"):
    r.ignore("dual_chunk_attention_config")
    return context, limit_key if r.has(limit_key) else None
  part = r.part("dual_chunk_attention_config", chunks)
  exact_lengths = (
    part.whole("original_max_position_embeddings", default=context),
    part.whole("chunk_size"),
  )
  # How the folding is done, and a faster form of it.
  part.ignore(
    "local_size",
    "sparse_attention_config",
    "sparse_attention_enabled",
    "sparse_attention_threshold",
  )
  part.finish()
  return min(context, *exact_lengths), "dual_chunk_attention_config"


def model(
  r: ConfigReader,
  family: str,
  attention: Mixer | Sequence[Mixer],
  feedforward: Feedforward | Sequence[Feedforward],
  norm: Norm,
  *,
  layer: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
  kind: type[Layer] = Layer,
  tied: bool = False,
  bound: str | None = None,
  **options: Any,
) -> TransformerConfig:
  """Makes the architecture of a config, all of whose keys must be read by now.

  Args:
    r: Reader of the config.
    family: Name of the family.
    attention: Attention of every layer, or a list with one per layer, whose
      length is then the number of layers.
    feedforward: Feedforward of every layer, or a list with one per layer.
    norm: Norm of every layer, and the last one.
    layer: Further options of `Layer`, or a list with those of each layer.
    kind: Class of the layers.
    tied: Whether the head is the embedding, if the file does not say.
    bound: Key of the number of learned positions, if there are any.
    **options: Other options of `TransformerConfig`.

  Raises:
    ConfigError: If a value is out of range, or a key was not read.
  """
  count = len(attention) if isinstance(attention, list) else r.layers()
  per_layer: Callable[[Any], list[Any]] = lambda part: (
    part if isinstance(part, list) else [part] * count
  )
  layers = [
    kind(attention=a, feedforward=f, norm=norm, **more)
    for a, f, more in zip(
      per_layer(attention),
      per_layer(feedforward),
      per_layer(layer or {}),
      strict=True,
    )
  ]
  learned = options.get("positions")
  if learned is not None and bound is not None:
    max_positions = learned.count
  else:
    max_positions, bound = _context(r)
  config = TransformerConfig(
    family=family,
    vocab=r.whole("vocab_size"),
    embed=r.whole("hidden_size", "n_embed", "d_model", "n_embd"),
    layers=_sparse(r, _folded(r, layers)),
    norm=norm,
    tied=r.flag("tie_word_embeddings", default=tied),
    max_positions=max_positions,
    bound=bound,
    **options,
  )
  if config.vocab * config.embed > 2**40:
    raise r.error("vocab_size", config.vocab, "an embedding of 2^40 numbers")
  r.finish()
  return config
