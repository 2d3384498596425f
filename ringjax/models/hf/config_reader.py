"""Reads a Hugging Face config.json key by key, and refuses unknown keys.

Guarantees: a key that is not read and not known to be harmless is an error,
since it may change the computation, unless `unknown_keys.py` says that it
can't. Some keys are harmless with one value only; another value is an error,
too. The spellings of transformers 4 and 5 mean the same. The tables of keys are
in `../config_keys.toml`.
"""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringjax.errors import ConfigError
from ringjax.models.hf.unknown_keys import UnknownKeys
from ringjax.ops.rope import (
  Dynamic,
  Linear,
  Llama3,
  LongRope,
  Proportional,
  Rope,
  Unscaled,
  Yarn,
  yarn_magnitude,
)

_TABLES = tomllib.loads(
  pathlib.Path(__file__)
  .parents[1]
  .joinpath("config_keys.toml")
  .read_text("utf-8")
)
_HARMLESS = frozenset(_TABLES["harmless"])
_TURNED_WHOLE = frozenset(_TABLES["turned_whole"]["families"])
_PARTS_WITHIN = frozenset(_TABLES["parts_within"]["families"])
_KINDS = (
  "full_attention",
  "sliding_attention",
  "chunked_attention",
  "linear_attention",
)
_MOST = 2**31 - 1
# Bounds of the numbers that float32 distinguishes from infinity and from 0.
_LARGEST, _SMALLEST = 3.4e38, 1e-37
_MISSING = object()

DOWNLOAD = "download the model's config.json again"
OTHER = "use another checkpoint"


def error(
  key: str, got: object, want: str, remedy: str = DOWNLOAD
) -> ConfigError:
  """The error to raise for the value of a key."""
  shown = repr(got)
  shown = shown if len(shown) <= 80 else shown[:77] + "..."
  return ConfigError(f"config.json: {key}", shown, want, remedy)


class ConfigReader:
  """A config whose keys are read one by one.

  Each method that reads a value takes the spellings of its key; the first one
  that is present and not null counts. Without one the value is `default`; or
  `absent`, if null means None and only a missing key has a default. Without
  either the key is required.

  Args:
    config: Content of config.json, or of an object in it.
    prefix: Prefix of keys in errors.
    unknown: Treatment of keys that are not read; default: errors.
  """

  def __init__(
    self,
    config: Mapping[str, Any],
    prefix: str = "",
    unknown: UnknownKeys | None = None,
  ):
    self._config = config
    self._prefix = prefix
    self._unknown = unknown
    self._read: set[str] = set()

  def error(
    self, key: str, got: object, want: str, remedy: str = DOWNLOAD
  ) -> ConfigError:
    """The error to raise for the value of a key of this config."""
    return error(self._prefix + key, got, want, remedy)

  def part(
    self, key: str, value: object, *, closed: bool = False
  ) -> ConfigReader:
    """A reader of an object in this config.

    Args:
      key: Name of the object.
      value: The object.
      closed: Whether a key in it that is not read is an error in any case.
    """
    if not isinstance(value, dict):
      raise self.error(key, value, "an object")
    unknown = None if closed else self._unknown
    return ConfigReader(value, f"{self._prefix}{key}.", unknown)

  def ignore(self, *keys: str) -> None:
    """Marks keys as read that have no meaning in this family."""
    self._read.update(keys)

  def all(self) -> dict[str, Any]:
    """All keys with their values, none of them read."""
    return dict(self._config)

  def has(self, key: str) -> bool:
    """Whether the key is present and not null."""
    return self._config.get(key) is not None

  def value(
    self, *keys: str, default: object = _MISSING, absent: object = _MISSING
  ) -> Any:
    """Reads a value of any type.

    Raises:
      ConfigError: If a required value is missing, or two spellings differ:
        other programs do not read all of them.
    """
    self._read.update(keys)
    present = [key for key in keys if self._config.get(key) is not None]
    if present:
      x, *others = (self._config[key] for key in present)
      for key, value in zip(present[1:], others, strict=True):
        if value != x and not isinstance(x, dict):
          raise self.error(key, value, f"{x!r}, as {present[0]} says")
      return x
    if absent is not _MISSING:
      return None if keys[0] in self._config else absent
    if default is _MISSING:
      raise self.error(" or ".join(keys), "nothing", "a value")
    return default

  def _typed(
    self,
    keys: Sequence[str],
    without: dict[str, Any],
    fits: Callable[[Any], bool],
    want: str,
    remedy: str = DOWNLOAD,
  ) -> Any:
    """Reads a value that `fits`, or its default of None."""
    x = self.value(*keys, **without)
    if x is not None and not fits(x):
      raise self.error(keys[0], x, want, remedy)
    return x

  def whole(
    self, *keys: str, least: int = 1, most: int = _MOST, **without: Any
  ) -> Any:
    """A whole number."""
    in_range = lambda x: _is_whole(x) and least <= x <= most
    want = f"a whole number from {least} to {most}"
    return self._typed(keys, without, in_range, want)

  def number(self, *keys: str, **without: Any) -> Any:
    """A finite number."""
    x = self._typed(keys, without, _is_number, "a finite number")
    return None if x is None else float(x)

  def positive(self, *keys: str, **without: Any) -> Any:
    """A number above 0."""
    x = self._typed(keys, without, _is_positive, "a number above 0")
    return None if x is None else float(x)

  def flag(self, *keys: str, **without: Any) -> bool:
    """True or false; null is false, whatever a missing key means."""
    named = [key for key in keys if key in self._config]
    if named and not any(map(self.has, named)):
      self.ignore(*keys)
      return False
    is_bool = lambda x: isinstance(x, bool)
    return self._typed(keys, without, is_bool, "true or false")

  def text(self, *keys: str, **without: Any) -> str:
    """A string."""
    is_text = lambda x: isinstance(x, str)
    return self._typed(keys, without, is_text, "a string")

  def act(self, *keys: str, **without: Any) -> str:
    """Reads an activation, by this package's name of it."""
    activations = _TABLES["activations"]
    is_known = lambda x: isinstance(x, str) and x in activations
    want = f"one of {', '.join(activations)}"
    # A newer key counts before the older one, which may say something else.
    self.ignore(*keys)
    key = next(filter(self.has, keys), keys[0])
    return activations[self._typed((key,), without, is_known, want, OTHER)]

  def must_be(self, key: str, wanted: object, default: object) -> None:
    """Refuses another value than the one that is supported."""
    x = self.value(key, default=default)
    if x != wanted:
      raise self.error(key, x, repr(wanted), OTHER)

  def only(self, key: str, wanted: object) -> None:
    """Refuses any value but the default, which changes nothing."""
    self.must_be(key, wanted, wanted)

  def layers(self) -> int:
    """The number of layers."""
    return self.whole("num_hidden_layers", "n_layer", "n_layers", most=1000)

  def _list(
    self, key: str, fits: Callable[[Any], bool], want: str, **without: Any
  ) -> list[Any]:
    """A list whose items fit."""
    valid = lambda x: isinstance(x, list) and all(map(fits, x))
    return self._typed((key,), without, valid, want)

  def layer_types(self, default: Sequence[str]) -> tuple[str, ...]:
    """Kind of each layer, as the file says; default: what older files meant."""
    count = self.layers()
    types = self.value("layer_types", default=list(default))
    if not isinstance(types, list) or len(types) != count:
      raise self.error("layer_types", types, f"a list of {count} names")
    for name in types:
      if name not in _KINDS:
        raise self.error("layer_types", name, f"one of {', '.join(_KINDS)}")
    return tuple(types)

  def kinds(
    self,
    key: str,
    known: Sequence[str],
    default: Sequence[str],
    *,
    longer: bool = False,
  ) -> list[str]:
    """A name for each layer.

    Args:
      key: Key of the list.
      known: Names that are supported.
      default: List of a file without one.
      longer: Whether names may follow those of the layers; they are dropped.
    """
    names, count = self.value(key, default=list(default)), self.layers()
    valid = isinstance(names, list) and all(x in list(known) for x in names)
    if not valid or len(names) < count or (len(names) > count and not longer):
      want = f"{count} names, each {' or '.join(known)}"
      raise self.error(key, names, want)
    return names[:count]

  def flags(self, key: str, default: Sequence[int]) -> list[bool]:
    """A list of 0 and 1 for the layers; empty means the default."""
    count = self.layers()
    want = f"a list of {count} times 0 or 1"
    x = self._list(key, lambda i: i in (0, 1), want, default=[])
    x = x or list(default)
    if len(x) != count:
      raise self.error(key, x, want)
    return [bool(i) for i in x]

  def numbers_of_layers(self, key: str, default: Sequence[int]) -> list[int]:
    """A list of layers by their numbers."""
    want = "a list of layers' numbers"
    return self._list(key, _is_whole, want, default=list(default))

  def _unsaid(self, key: str) -> Any:
    """Default that transformers has for a missing key, if it is fixed."""
    if key in self._config:
      return None
    return _TABLES["unsaid"].get(self._config.get("model_type"), {}).get(key)

  def heads(self) -> tuple[int, int]:
    """(query heads, kv heads)."""
    key = "num_key_value_heads"
    n = self.whole("num_attention_heads", "n_head")
    k = self.whole(key, default=self._unsaid(key) or n)
    if n % k:
      got = k if self.has(key) else f"nothing, which means {k}"
      raise self.error(key, got, f"a divisor of the {n} query heads")
    return n, k

  def head_dim(self) -> int:
    """Width of a head: its own key, or the hidden size over the heads."""
    heads, _ = self.heads()
    hidden = self.whole("hidden_size", "n_embed")
    h = self.whole("head_dim", default=self._unsaid("head_dim"))
    if h is None and hidden % heads:
      want = f"a multiple of the {heads} heads, or a head_dim"
      raise self.error("hidden_size", hidden, want)
    return h or hidden // heads

  def rope(
    self,
    head_dim: int | None = None,
    *,
    kind: str | None = None,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    plain: bool = False,
    theta_key: str = "rope_theta",
    beside: Sequence[str] = (),
    unsaid: str = "default",
  ) -> Rope:
    """Reads the rotary embedding of the layers of one kind.

    Args:
      head_dim: Width of the rotated vectors; default: `head_dim()`.
      kind: Kind of the layers, if the file tells them apart.
      theta: Default of the base.
      partial: Default of the fraction of dims that rotates.
      interleaved: Whether neighbouring dims are a pair, not those of halves.
      plain: Whether the scaling of an older file is not for this kind.
      theta_key: Key of the base in an older file.
      beside: Keys among those of the rotation that the caller reads.
      unsaid: Default of the scaling type.
    """
    head_dim = self.head_dim() if head_dim is None else head_dim
    bases = ("rotary_emb_base", "rope_theta")
    if theta_key not in bases:
      # A separate key for these layers: the bases of other layers don't apply.
      self.ignore(*bases)
      bases = (theta_key,)
    theta = self.positive(*bases, default=theta)
    key, kind_of_model = "partial_rotary_factor", self._config.get("model_type")
    keys = (key, "rotary_pct") if kind_of_model == "gpt_neox" else (key,)
    for part_key in {key, "rotary_pct"}:
      # transformers does not read these for such families.
      if part_key not in keys or kind_of_model in _PARTS_WITHIN:
        self.only(part_key, 1)
    partial = self.positive(*keys, default=partial)
    new = self.has("rope_parameters")
    name = "rope_parameters" if new else "rope_scaling"
    self.ignore("rope_parameters", "rope_scaling")
    rope_config = {} if plain and not new else self.value(name, default={})
    part = self.part(name, rope_config)
    by_kind = all(isinstance(v, dict | None) for v in rope_config.values())
    if new and rope_config and by_kind:
      if kind not in rope_config:
        raise self.error(name, sorted(rope_config), f"one entry for {kind!r}")
      part = self.part(name, rope_config[kind] or {})
      key = "original_max_position_embeddings"
      if self.has(key):
        # transformers reads it from each kind.
        self.only(key, part.whole(key))
    theta = part.positive("rope_theta", default=theta)
    partial = part.positive("partial_rotary_factor", default=partial)
    unsaid = "default" if rope_config else unsaid
    rope_type = part.text("rope_type", "type", default=unsaid)
    proportional = rope_type == "proportional"
    if (
      partial != 1 and rope_type == "default" and kind_of_model in _TURNED_WHOLE
    ):
      # Programs disagree: transformers rotates whole heads, others a part.
      want = "1: transformers turns whole heads of this family"
      raise self.error("partial_rotary_factor", partial, want, OTHER)
    dims = head_dim if proportional else int(head_dim * partial)
    part.ignore(*beside)
    alpha = part.positive("alpha", default=None)
    if alpha is not None and part.text("rope_type", "type") == "dynamic":
      # HunYuan's files: a fixed base, whatever the length.
      part.ignore("factor", "mscale", "mscale_all_dim", "type")
      part.ignore("beta_fast", "beta_slow", "original_max_position_embeddings")
      part.finish()
      theta *= alpha ** (head_dim / (head_dim - 2))
      part = self.part(name, {})
    if dims < 2 or dims % 2 or dims > head_dim:
      want = f"an even number of the {head_dim} dims of a head"
      raise self.error("partial_rotary_factor", partial, want)
    return Rope(
      theta=theta,
      dims=dims,
      interleaved=interleaved,
      scaling=self._scaling(part, theta, dims, partial, unsaid),
    )

  def _scaling(
    self,
    part: ConfigReader,
    theta: float,
    dims: int,
    partial: float,
    unsaid: str,
  ) -> Unscaled:
    """Reads the scaling of a rotary embedding for longer contexts."""
    kind = part.text("rope_type", "type", default=unsaid)
    # Without a limit in the file there is no factor to scale a context by.
    needs_limit = kind not in ("default", "linear", "proportional")
    without = {} if needs_limit else {"default": 2048}
    max_positions = self.whole("max_position_embeddings", **without)
    key = "original_max_position_embeddings"
    inner = part.whole(key, default=max_positions)
    outer = self.whole(key, default=None)
    original = outer or inner
    # "finetuned" is about training.
    part.ignore("type", "finetuned")
    match kind:
      case "default":
        if refused_keys := part.refused():
          want = f"the kind of stretching that {refused_keys[0]} belongs to"
          if not part.has("rope_type") and not part.has("type"):
            raise part.error("rope_type", "nothing, which means default", want)
        scaling = Unscaled()
      case "linear":
        scaling = Linear(
          factor=part.positive("factor"),
          original=original if outer or part.has(key) else None,
        )
      case "proportional":
        rotating = int(partial * dims // 2)
        if not 1 <= rotating <= dims // 2:
          want = f"a part of {dims} dims, at least one pair"
          raise self.error("partial_rotary_factor", partial, want)
        scaling = Proportional(
          turning=rotating, factor=part.positive("factor", default=1.0)
        )
      case "dynamic":
        if dims == 2:
          raise part.error("rope_type", kind, "more than 2 dims that rotate")
        scaling = Dynamic(
          factor=part.positive("factor"), original=max_positions
        )
      case "llama3":
        scaling = part._llama3(original)
      case "yarn":
        scaling = part._yarn(original, max_positions, theta)
      case "longrope" | "su":
        scaling = part._longrope(original, max_positions, dims)
      case _:
        raise part.error(
          "rope_type",
          kind,
          "default, linear, dynamic, llama3, yarn, longrope or proportional",
          OTHER,
        )
    part.finish()
    return scaling

  def _llama3(self, original: int) -> Llama3:
    low = self.positive("low_freq_factor")
    high = self.positive("high_freq_factor")
    if high < low:
      raise self.error("high_freq_factor", high, f"at least {low}")
    return Llama3(
      factor=self.positive("factor"), low=low, high=high, original=original
    )

  def _longrope(self, original: int, most: int, dims: int) -> LongRope:
    if original < 2:
      key = "original_max_position_embeddings"
      raise self.error(key, original, "at least 2")
    factors = []
    for key in ("short_factor", "long_factor"):
      want = f"a list of {dims // 2} numbers above 0"
      x = self._list(key, lambda i: _is_number(i) and i > 0, want)
      if len(x) != dims // 2:
        raise self.error(key, x, want)
      factors.append(tuple(map(float, x)))
    return LongRope(
      short=factors[0],
      long=factors[1],
      original=original,
      factor=self.positive("factor", default=most / original),
      attention=self.positive("attention_factor", default=None),
    )

  def _yarn(self, original: int, most: int, theta: float) -> Yarn:
    if theta <= 1:
      raise self.error("rope_theta", theta, "more than 1")
    factor = self.positive("factor", default=most / original)
    weight = self.number("mscale", default=None)
    all_dim = self.number("mscale_all_dim", default=None)
    attention = self.positive("attention_factor", default=None)
    if attention is None and weight and all_dim:
      attention = yarn_magnitude(factor, weight) / yarn_magnitude(
        factor, all_dim
      )
    return Yarn(
      factor=factor,
      original=original,
      fast=self.positive("beta_fast", default=32.0),
      slow=self.positive("beta_slow", default=1.0),
      truncate=self.flag("truncate", default=True),
      attention=attention,
    )

  def unread(self) -> list[str]:
    """Keys that were not read and are not known to be harmless."""
    return [
      key
      for key, x in sorted(self._config.items())
      if x is not None and key not in self._read and key not in _HARMLESS
    ]

  def refused(self) -> list[str]:
    """Keys that were not read and may change the computation."""
    unknown = self._unknown
    return [
      key
      for key in self.unread()
      if unknown is None or not unknown.harmless(key)
    ]

  def finish(self) -> None:
    """Refuses keys that were not read and may change the computation."""
    unknown = self._unknown
    for key in self.unread():
      if key in _TABLES["harmless_as"]:
        self.only(key, _TABLES["harmless_as"][key])
      elif key == "layer_types" and _is_full(self._config[key]):
        continue
      elif unknown is None or not unknown.leave_out(self._prefix + key):
        remedy = "remove it if it does not change the computation"
        if unknown is not None:
          remedy = unknown.remedy()
        raise self.error(key, self._config[key], "keys of this family", remedy)


def _is_full(types: object) -> bool:
  """Whether layer types say nothing to a family that does not read them."""
  return isinstance(types, list) and all(x == "full_attention" for x in types)


def _is_whole(x: object) -> bool:
  """Whether it is an integer; True is not."""
  return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
  """Whether float32 represents it; True and NaN are not numbers."""
  numeric = _is_whole(x) or isinstance(x, float)
  return numeric and abs(x) <= _LARGEST


def _is_positive(x: Any) -> bool:
  """Whether float32 distinguishes it from 0 and infinity."""
  return _is_number(x) and x >= _SMALLEST
