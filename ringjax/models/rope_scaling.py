"""Longer contexts without training: RoPE scalings that `load` applies.

Guarantees: all weights stay. The scaling is written into the model's
config.json, so that a saved folder has it and transformers reads the same; the
rotations are those of `ops.rope`. Only the rotary embedding of the layers with
full attention changes. Layers with a window keep theirs if config.json has one
per kind of layer; if it has one for all layers, as Gemma 2's, that one changes.

  linear    positions are divided by the factor (arXiv 2306.15595)
  ntk       the base grows, so that the slowest of the rotations is slower by
            the factor and the fastest stays; one base for all lengths
  dynamic   NTK with a base that follows from the length of the text, as
            transformers has it; nothing bounds the context
  yarn      slow rotations are divided, fast ones stay (arXiv 2309.00071)
  llama3    long wavelengths are divided, short ones stay, as in Llama 3.1
  longrope  a divisor for each rotation (arXiv 2402.13753)
  dual_chunk, self_extend: positions are folded, so that no distance is larger
            than those trained for; see `nn.attention_layers.folded_attention`

The last two are kept in the key `position_folding`, which transformers ignores:
there such a folder has plain attention.

A model whose config has a scaling already takes another one of the same kind,
which replaces it: a factor is relative to the original context, and settings
that are not passed stay. "ntk" is a larger base below any scaling.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from ringjax import option_text
from ringjax.checks import number, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.models.contents import read_source
from ringjax.models.families import Family
from ringjax.models.transformer import TransformerConfig
from ringjax.ops.rope import (
  Dynamic,
  Linear,
  Llama3,
  LongRope,
  Rope,
  Unscaled,
  Yarn,
)

FULL = "full_attention"
_ORIGINAL = "original_max_position_embeddings"
# Keys of config.json that bound the context; see `families.family`.
_LIMITS = (
  "max_seq_len", "model_max_length", "n_positions", "max_position_embeddings",
)  # fmt: skip
# Keys of a rotary embedding's entry that belong to its scaling.
_OF_SCALING = (
  "rope_type", "type", "factor", _ORIGINAL, "attention_factor", "beta_fast",
  "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor",
  "high_freq_factor", "short_factor", "long_factor", "finetuned",
)  # fmt: skip
_CHUNKS = "dual_chunk_attention_config"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextExtension:
  """A scaling of rotary embeddings for a longer context.

  Options have the names of their keys in config.json.

  Attributes:
    factor: New context length, as a multiple of the original one.
    original_max_position_embeddings: Context length that the model was trained
      for, in tokens; default: that of its scaling, or max_position_embeddings.

  Raises:
    OptionError: If an option is missing or out of its range.
  """

  factor: int | float | None = None
  original_max_position_embeddings: int | None = None

  name: ClassVar[str] = ""
  # Whether there is no default for the factor.
  needs_factor: ClassVar[bool] = True
  # Class of the rotation's scaling; None: the rotation has none.
  scaling: ClassVar[type[Unscaled] | None] = None

  def __post_init__(self) -> None:
    if not self.name:
      raise OptionError(
        "rope_scaling",
        f"a {type(self).__name__}, which is no scaling itself",
        "one of its subclasses",
        "pass YarnExtension(factor=4)",
      )
    if self.factor is None and self.needs_factor:
      raise OptionError(
        "rope_scaling",
        f"{self.name!r} without a factor",
        "the new context as a multiple of the original one",
        f"write {self.name}:factor=4",
      )
    if self.factor is not None:
      number("factor", self.factor, least=1)
    if self.original_max_position_embeddings is not None:
      positive_int(_ORIGINAL, self.original_max_position_embeddings)

  @property
  def entry(self) -> dict[str, Any]:
    """Settings in config.json, without the original context."""
    return {
      key: _plain(value)
      for key, value in dataclasses.asdict(self).items()
      if value is not None and key != _ORIGINAL
    }

  def check(self, rope: Rope) -> None:
    """Refuse a rotation that the settings do not fit."""
    del rope

  def context(self, original: int) -> int:
    """The new context length in tokens."""
    assert self.factor is not None
    return round(self.factor * original)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearExtension(ContextExtension):
  """All positions are divided by the factor."""

  name: ClassVar[str] = "linear"
  scaling: ClassVar[type[Unscaled] | None] = Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkExtension(ContextExtension):
  """The base grows by factor^(dims / (dims - 2)), for all lengths."""

  name: ClassVar[str] = "ntk"

  def check(self, rope: Rope) -> None:
    _check_dims(rope, self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicExtension(ContextExtension):
  """The base grows with the length of the text, beyond the original context."""

  name: ClassVar[str] = "dynamic"
  scaling: ClassVar[type[Unscaled] | None] = Dynamic

  def check(self, rope: Rope) -> None:
    _check_dims(rope, self.name)

  def context(self, original: int) -> int:
    # transformers reads the original context from this key.
    return original


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnExtension(ContextExtension):
  """Slow rotations are divided by the factor, fast ones stay.

  Attributes:
    beta_fast: Turns in the original context from which a rotation stays;
      default 32.
    beta_slow: Turns below which a rotation is divided completely; default 1.
    attention_factor: Factor on cosines and sines; default: 0.1 ln(factor) + 1,
      or by `mscale` and `mscale_all_dim`.
    mscale: Weight of the logarithm, together with `mscale_all_dim`.
    mscale_all_dim: Weight of the logarithm that DeepSeek's layers apply to the
      scores, by which the weight of `mscale` is divided.
    truncate: Whether the ramp begins and ends at whole dims; default true.
  """

  beta_fast: int | float | None = None
  beta_slow: int | float | None = None
  attention_factor: int | float | None = None
  mscale: int | float | None = None
  mscale_all_dim: int | float | None = None
  truncate: bool | None = None

  name: ClassVar[str] = "yarn"
  scaling: ClassVar[type[Unscaled] | None] = Yarn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Extension(ContextExtension):
  """Long wavelengths are divided by the factor, short ones stay.

  Attributes:
    low_freq_factor: Turns in the original context below which a rotation is
      divided; default 1.
    high_freq_factor: Turns above which it stays; default 4.
  """

  low_freq_factor: int | float | None = None
  high_freq_factor: int | float | None = None

  name: ClassVar[str] = "llama3"
  scaling: ClassVar[type[Unscaled] | None] = Llama3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeExtension(ContextExtension):
  """A divisor for each rotation, found by a search (LongRoPE).

  Attributes:
    long_factor: Divisors for texts beyond the original context, one for each
      two rotated dims.
    short_factor: Divisors up to there; default: 1 for all.
    attention_factor: Factor on cosines and sines; default:
      sqrt(1 + ln(factor) / ln(original context)).
  """

  long_factor: tuple[float, ...] | None = None
  short_factor: tuple[float, ...] | None = None
  attention_factor: int | float | None = None

  name: ClassVar[str] = "longrope"
  scaling: ClassVar[type[Unscaled] | None] = LongRope

  def check(self, rope: Rope) -> None:
    pairs = rope.dims // 2
    has_old = isinstance(rope.scaling, LongRope)
    for key in ("long_factor", "short_factor"):
      divisors = getattr(self, key)
      if divisors is None and (has_old or key == "short_factor"):
        continue
      count = 0 if divisors is None else len(divisors)
      if count != pairs:
        raise OptionError(
          "rope_scaling",
          f"{count or 'no'} numbers as {key} of longrope",
          f"{pairs}, one for each two of the {rope.dims} rotated dims",
          f"write longrope:factor={self.factor},{key}=(1.0,1.02,...), with the "
          "numbers that a search for this model gave",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualChunkExtension(ContextExtension):
  """Distances beyond a chunk are folded into trained ones (Qwen2.5-1M's form).

  For a published model with dual_chunk_attention_config no option is needed.

  Attributes:
    chunk_size: Largest distance of a rotation; default: that of the config, or
      3/4 of the original context.
    local_size: Tokens of it that are seen at their distances across the border
      of two chunks; default: that of the config, or 1/16 of the original
      context.
  """

  chunk_size: int | None = None
  local_size: int | None = None

  name: ClassVar[str] = "dual_chunk"
  needs_factor: ClassVar[bool] = False

  def folding(
    self, published: Mapping[str, Any] | None, original: int
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of position_folding and of dual_chunk_attention_config."""
    chunks = dict(
      published
      or {
        "chunk_size": original * 3 // 4,
        "local_size": original // 16,
        _ORIGINAL: original,
      }
    )
    for key in ("chunk_size", "local_size", _ORIGINAL):
      if getattr(self, key) is not None:
        chunks[key] = positive_int(key, getattr(self, key))
    size, local = chunks["chunk_size"], chunks["local_size"]
    trained = chunks.get(_ORIGINAL) or original
    largest = min(2 * (size - local) - 1, size)
    if not 0 <= local < size or largest > trained:
      raise OptionError(
        "rope_scaling",
        f"dual_chunk with chunk_size={size:,} and local_size={local:,}",
        f"a local_size below chunk_size, and distances of at most the "
        f"{trained:,} tokens of the original context",
        f"pass chunk_size={trained * 3 // 4},local_size={trained // 16}",
      )
    return {"type": self.name}, chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfExtendExtension(ContextExtension):
  """Tokens beyond a window share positions in groups (Self-Extend).

  Attributes:
    group: Number of positions that distant tokens share; default: the smallest
      with which no distance exceeds the original context.
    window: Number of tokens seen at their distances; default: 1/4 of the
      original context.
  """

  group: int | None = None
  window: int | None = None

  name: ClassVar[str] = "self_extend"

  def folding(self, original: int) -> dict[str, Any]:
    """The entry of position_folding.

    Raises:
      OptionError: If distances would exceed the original context.
    """
    window = original // 4 if self.window is None else self.window
    window = positive_int("window", window)
    context = self.context(original)
    # A query at the last position sees the first key at this distance.
    within_original = lambda group: (
      (context - 1) // group + window - window // group < original
    )
    groups = [self.group] if self.group is not None else range(1, context + 1)
    group = next((g for g in groups if g > 0 and within_original(g)), None)
    if group is None:
      raise OptionError(
        "rope_scaling",
        f"self_extend of {context:,} tokens with window={window:,}"
        + ("" if self.group is None else f" and group={self.group}"),
        f"distances below the {original:,} tokens of the original context",
        "pass a smaller window, or a larger group or none",
      )
    return {"type": self.name, "group": group, "window": window}


_KINDS: dict[str, type[ContextExtension]] = {
  kind.name: kind
  for kind in (
    LinearExtension,
    NtkExtension,
    DynamicExtension,
    YarnExtension,
    Llama3Extension,
    LongRopeExtension,
    DualChunkExtension,
    SelfExtendExtension,
  )
}


def context_extension(
  value: ContextExtension | str, name: str = "rope_scaling"
) -> ContextExtension:
  """The extension that a text such as "yarn:factor=4" describes.

  Args:
    value: The text, or an extension, which is returned.
    name: Name of the argument or flag, for errors.

  Raises:
    OptionError: If there is no such scaling, or an option is unknown, missing
      or out of its range.
  """
  return option_text.named(value, ContextExtension, _KINDS, name)


def read_extended(
  config: Mapping[str, Any],
  rope_scaling: ContextExtension | str | None,
  *,
  strict: bool = True,
) -> tuple[TransformerConfig, dict[str, Any], Family]:
  """Reads a config.json with a scaling: architecture, config and family.

  Args:
    config: Content of config.json.
    rope_scaling: Scaling to add; None: that of the config.
    strict: Whether an unknown key that may change the computation is an error.

  Raises:
    ConfigError: See `read_config` and `extended_config`.
    OptionError: See `context_extension`.
  """
  if rope_scaling is not None:
    rope_scaling = context_extension(rope_scaling)
  parsed, source, family = read_source(config, strict=strict)
  if rope_scaling is None:
    return parsed, source, family
  extended = extended_config(source, rope_scaling)
  return _read(extended), extended, family


def extended_config(
  config: Mapping[str, Any], extension: ContextExtension
) -> dict[str, Any]:
  """The config.json of a text model with a longer context.

  Raises:
    ConfigError: If the model has no rotary embeddings, or ones that the
      scaling does not apply to.
    OptionError: If the scaling's settings do not fit the rotation.
  """
  extended = copy.deepcopy(dict(config))
  old = _read(extended)
  if extended.get("position_folding") is not None:
    raise ConfigError(
      "rope_scaling",
      f"{extension.name!r} for a model whose positions are folded already",
      "a model without position_folding",
      "leave it out, or remove that key from config.json",
    )
  rope = full_rope(old)
  if not (
    old.rope_scalable
    or isinstance(extension, DualChunkExtension | SelfExtendExtension)
  ):
    raise ConfigError(
      "rope_scaling",
      f"{extension.name!r} for {old.family}",
      "a family whose config.json has keys for a scaling",
      "pass self_extend:factor=4",
    )
  holder, key = rope_entry(extended)
  if (holder.get(key) or {}).get("alpha") is not None:
    # A base that grew by alpha is a base.
    set_base(extended, holder, key, rope.theta)
  entry = dict(holder.get(key) or {})
  _check_kind(extension, rope, entry)
  published = extended.get(_CHUNKS)
  if published is not None and not isinstance(extension, DualChunkExtension):
    raise ConfigError(
      "rope_scaling",
      f"{extension.name!r} for a model made for dual chunk attention",
      "dual_chunk",
      f"pass dual_chunk, or remove {_CHUNKS} from config.json",
    )
  extension.check(rope)
  original = _original_context(extension, old, rope)
  if isinstance(extension, DualChunkExtension | SelfExtendExtension):
    return _folded_config(extended, extension, original)
  if extension.scaling is None:
    _set_base(extended, holder, key, rope, extension)
  else:
    nested = holder is not extended
    scaled = _scaled_entry(entry, extension, rope)
    if extension.scaling is not Dynamic and (
      nested or extension.scaling is not Linear
    ):
      scaled[_ORIGINAL] = original
    if not nested and (
      _ORIGINAL in extended or extension.scaling in (Linear, LongRope)
    ):
      # Beside the entry: transformers warns of it in that of "linear", and
      # classes with LongRoPE read it there alone.
      extended[_ORIGINAL] = original
    holder[key] = scaled
  _set_context(extended, extension.context(original))
  new = _read_scaled(extended, extension)
  if full_rope(new) == rope and type(rope.scaling) is Unscaled:
    raise ConfigError(
      "config.json",
      f"{old.family}, whose rotary embedding did not change",
      "a file whose rotary embedding this scaling changes",
      "pass a factor above 1, or edit the file",
    )
  return extended


def _folded_config(
  config: dict[str, Any],
  extension: DualChunkExtension | SelfExtendExtension,
  original: int,
) -> dict[str, Any]:
  """The config of a model whose positions are folded."""
  published = config.get(_CHUNKS)
  if isinstance(extension, SelfExtendExtension):
    config["position_folding"] = extension.folding(original)
  else:
    config["position_folding"], config[_CHUNKS] = extension.folding(
      published, original
    )
    if published is None and extension.factor is None:
      raise OptionError(
        "rope_scaling",
        f"dual_chunk without a factor, for a model without {_CHUNKS}",
        "the new context as a multiple of the original one",
        "write dual_chunk:factor=4",
      )
  if extension.factor is not None:
    _set_context(config, extension.context(original))
  _read_scaled(config, extension)
  return config


def _read_scaled(
  config: Mapping[str, Any], extension: ContextExtension
) -> TransformerConfig:
  """Reads a config with a scaling, whose values may not fit the model.

  Raises:
    OptionError: If a value of the scaling is refused.
  """
  try:
    return _read(config)
  except ConfigError as error:
    got, _, wanted = str(error).partition("; wanted ")
    raise OptionError(
      "rope_scaling",
      f"{extension.name!r}, of which {got}",
      wanted.partition("; ")[0] or "values that fit the model",
      "pass other values of its options",
    ) from None


def _set_context(config: dict[str, Any], context: int) -> None:
  """Sets every key of a config that bounds the context."""
  for limit in _LIMITS:
    if config.get(limit) is not None or limit == _LIMITS[-1]:
      config[limit] = context


def full_rope(config: TransformerConfig) -> Rope:
  """The rotary embedding of the layers with full attention, else of all.

  Raises:
    ConfigError: If it has no such embedding, or several.
  """
  if config.positions is not None:
    raise ConfigError(
      "config.json",
      f"{config.family}, which has learned {config.positions.count} positions",
      "a model whose positions are computed",
      "choose another model: what it has not learned cannot be stretched",
    )
  mixers = [layer.attention for layer in config.layers]
  full = [x for x in mixers if x.reach is None]
  ropes = {
    # Latent attention rotates pairs of dims in two places of a row.
    dataclasses.replace(rope, copies=1)
    for mixer in full or mixers
    for rope in mixer.ropes
  }
  if len(ropes) != 1:
    raise ConfigError(
      "config.json",
      f"{config.family}, with {len(ropes)} rotary embeddings of layers with "
      "full attention",
      "one",
      "pass no scaling: " + ("one would not fit all" if ropes else
      "nothing has to be stretched"),
    )  # fmt: skip
  return ropes.pop()


def rope_entry(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
  """The dict, and its key, with the RoPE settings of full attention."""
  new = config.get("rope_parameters")
  if new is None:
    return config, "rope_scaling"
  nested = new and all(isinstance(v, dict | None) for v in new.values())
  return (new, FULL) if nested else (config, "rope_parameters")


def _plain(value: bool | int | float | tuple[int | float, ...]) -> Any:
  """A value as JSON: transformers wants floats."""
  if isinstance(value, tuple | list):
    return [float(x) for x in value]
  return value if isinstance(value, bool) else float(value)


def _read(config: Mapping[str, Any]) -> TransformerConfig:
  """Reads a config whose unknown keys have been reported before."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return read_source(config)[0]


def _check_dims(rope: Rope, name: str) -> None:
  if rope.dims == 2:
    raise ConfigError(
      "rope_scaling",
      f"{name!r} for a rotation of two dims",
      "more than two dims that rotate",
      "pass linear:factor=4",
    )


def _check_kind(
  extension: ContextExtension, rope: Rope, entry: Mapping[str, Any]
) -> None:
  """Refuses a second scaling of another kind."""
  kind = type(rope.scaling)
  if isinstance(extension, NtkExtension) or kind is extension.scaling:
    return
  if kind is not Unscaled:
    got = entry.get("rope_type") or entry.get("type") or kind.__name__.lower()
    remedy = f"{got}:factor=8" if got in _KINDS else None
    raise ConfigError(
      "rope_scaling",
      f"{extension.name!r} for a model that has {got!r} already",
      "the same kind, which replaces it, or 'ntk', which is added to it",
      f"pass {remedy or 'ntk:factor=2'}; training was with its own scaling",
    )


def _original_context(
  extension: ContextExtension, old: TransformerConfig, rope: Rope
) -> int:
  """Context length in tokens that a factor is relative to.

  Raises:
    ConfigError: If the config does not state it.
  """
  if extension.original_max_position_embeddings is not None:
    return int(extension.original_max_position_embeddings)
  if old.bound is None:
    raise ConfigError(
      "config.json",
      "no max_position_embeddings",
      "the context that the model was trained for",
      f"pass {extension.name}:factor={extension.factor},{_ORIGINAL}=TOKENS",
    )
  scaling = rope.scaling
  if extension.scaling is None and isinstance(scaling, Yarn):
    # The config may state the context before that scaling.
    return old.longest or old.max_positions
  if extension.scaling is None or type(scaling) is Unscaled:
    return old.max_positions
  if isinstance(scaling, Linear) and scaling.original is None:
    return round((old.longest or old.max_positions) / scaling.factor)
  scaled: Any = scaling
  return scaled.original


def _set_base(
  config: dict[str, Any],
  holder: dict[str, Any],
  key: str,
  rope: Rope,
  extension: ContextExtension,
) -> None:
  """Sets the larger base of "ntk"."""
  assert extension.factor is not None
  theta = rope.theta * extension.factor ** (rope.dims / (rope.dims - 2))
  set_base(config, holder, key, theta)


def set_base(
  config: dict[str, Any], holder: dict[str, Any], key: str, theta: float
) -> None:
  """Sets the base of a rotary embedding in a config.

  Args:
    config: The config.
    holder: Dict and key of the embedding's settings, see `rope_entry`.
    key: See `holder`.
    theta: The base.
  """
  settings = holder.get(key)
  if isinstance(settings, dict) and settings.get("alpha") is not None:
    # The base is with the growth by alpha.
    holder[key] = {"rope_type": "default"} if key != "rope_scaling" else None
  if key != "rope_scaling":
    holder[key] = dict(holder.get(key) or {}) | {"rope_theta": theta}
  else:
    # A file with the base at the top level keeps its scaling.
    top_level_key = "rotary_emb_base"
    config[top_level_key if top_level_key in config else "rope_theta"] = theta


def _scaled_entry(
  entry: Mapping[str, Any], extension: ContextExtension, rope: Rope
) -> dict[str, Any]:
  """Settings of the rotary embedding, with those of the scaling."""
  settings = dict(entry)
  old = rope.scaling
  if type(old) is Unscaled:
    settings = {k: x for k, x in settings.items() if k not in _OF_SCALING}
  # It follows from the factor, unless it is passed.
  settings.pop("attention_factor", None)
  settings.pop("type", None)
  scaled = settings | {"rope_type": extension.name} | extension.entry
  if isinstance(extension, Llama3Extension):
    low, high = (old.low, old.high) if isinstance(old, Llama3) else (1.0, 4.0)
    scaled.setdefault("low_freq_factor", low)
    scaled.setdefault("high_freq_factor", high)
  if isinstance(extension, LongRopeExtension):
    # transformers computes it from both contexts.
    scaled.pop("factor", None)
    scaled.setdefault("short_factor", [1.0] * (rope.dims // 2))
  return scaled
