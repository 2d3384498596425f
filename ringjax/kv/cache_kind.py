"""Kinds of caches: how the keys and values of a model are stored."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.typing import DTypeLike

from ringjax import option_text
from ringjax.config import Config, config, named_twice, option, part
from ringjax.errors import OptionError
from ringjax.kv.codecs import (
  Allocated,
  CacheCodec,
  Calibrated,
  Calibration,
  ChannelGroups,
  CodeBook,
  Codec,
  Floats,
  Hadamard,
  Integers,
  PerHead,
  VectorCodec,
)
from ringjax.kv.codecs.codec_wire import CodecWire
from ringjax.kv.kind_parts import (
  REFUSED,
  ExactConfig,
  LayoutConfig,
  TierConfig,
)
from ringjax.kv.policies import (
  AdaKV,
  ExpectedAttention,
  FastGen,
  HeavyHitters,
  KeyDiff,
  KeyNorm,
  KVzip,
  LagKV,
  Policy,
  PyramidKV,
  Select,
  Sinks,
  SnapKV,
  Tova,
)

# Tokens between two evictions of the kinds that have a policy.
_ROOM = 16
# Most of a budget that room, or pages that are not full, take of it.
_ROOM_SHARE, _PAGE_SHARE = 16, 32
# Options of parts that come first in texts; those of new fields follow.
_TEXT_ORDER = (
  "unrotated", "windowed", "slack", "first", "recent", "room", "page", "device",
  "hot", "residual",
)  # fmt: skip
_P = TypeVar("_P", bound=Config)


@config
class CacheConfig(Config):
  """Storage of a cache: layout, codec, eviction policy, host memory.

  Its text is that of `--cache`, see `cache_kind`; one with a codec or a policy
  is written as its text, `str(kind)`, and not by `to_dict`. `CacheKind` is its
  name of earlier versions, deprecated, as are the options of parts as
  attributes of the whole, `kind.windowed` for `kind.layout.windowed`: both for
  one version.

  Raises:
    OptionError: If an option is out of its range, or some contradict.
  """

  layout: LayoutConfig = part(
    "Slots, and what is stored in them.", default_factory=LayoutConfig
  )
  codec: CacheCodec | None = option(
    "Codec that stores keys and values in fewer bytes; None stores the "
    "numbers. States of recurrent layers are never encoded.",
    default=None,
  )
  policy: Policy | None = option(
    "Policy that chooses the tokens each KV head keeps; None keeps all. Layers "
    "with a window keep the tokens of the window.",
    default=None,
  )
  exact: ExactConfig = part(
    "Tokens that stay exact.", default_factory=ExactConfig
  )
  tier: TierConfig = part(
    "Tokens that stay in device memory.", default_factory=TierConfig
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    if not isinstance(self.policy, Policy | None):
      raise OptionError(
        "policy",
        repr(self.policy),
        "an rj.kv.Policy, or None",
        "pass rj.kv.SnapKV(budget=0.5), for instance",
      )
    if not isinstance(self.codec, CacheCodec | None):
      raise OptionError(
        "codec",
        repr(self.codec),
        "an rj.kv.Codec, or None",
        "pass rj.kv.Codec(keys=rj.kv.Integers(bits=4), values=...)",
      )
    if self.tier.hot is not None and self.exact.room == _ROOM:
      # Tokens leave by blocks: what a named policy sets counts for nothing.
      exact = self.exact.replace(room=ExactConfig().room)
      object.__setattr__(self, "exact", exact)
    for refusal in REFUSED:
      if refusal.refused(self):
        remedy = refusal.remedy
        raise OptionError(
          refusal.option,
          refusal.got(self),
          refusal.want,
          remedy if isinstance(remedy, str) else remedy(self),
        )
    if self.policy is not None and self.policy.moves:
      # Keys are rotated where they are read, by the index that they have then.
      layout = self.layout.replace(unrotated=True)
      object.__setattr__(self, "layout", layout)

  @classmethod
  def _changes(
    cls,
    overrides: Mapping[str, Any],
    paths: Mapping[str, tuple[str, ...]],
    parts: Mapping[str, Any],
  ) -> dict[str, Any]:
    tier = overrides.get("tier", parts["tier"])
    device = overrides.get("device", getattr(tier, "device", None))
    if "room" in overrides and device is not None:
      if "block" in overrides:
        raise named_twice("room", "block")
      # In texts the tokens of a block in host memory are room, too.
      overrides = {
        "block" if name == "room" else name: value
        for name, value in overrides.items()
      }
    if overrides.get("hot") is not None and "block" not in overrides:
      layout = overrides.get("layout", parts["layout"])
      overrides = dict(overrides)
      overrides["block"] = overrides.get("page", layout.page)
    return super()._changes(overrides, paths, parts)

  @property
  def evicting(self) -> bool:
    """Whether a cache of this kind has pages, see `EvictingCache`."""
    chooses = self.policy is not None and self.tier.device is None
    return chooses or bool(self.exact)

  @property
  def grouped(self) -> bool:
    """Whether the codec encodes whole pages."""
    return isinstance(self.codec, Codec) and self.codec.page is not None

  @property
  def alike(self) -> str | None:
    """Heads that keep the same tokens, see `Policy.alike`."""
    return "layers" if self.policy is None else self.policy.alike

  @property
  def repeats(self) -> bool:
    """Whether the policy scores tokens by a repetition of the context."""
    return self.policy is not None and self.policy.repeats

  def keeping_all(self, what: str) -> CacheConfig:
    """Return the kind itself if its caches keep all tokens in their slots.

    Raises:
      OptionError: If the kind evicts, which `what` does not support.
    """
    if self.evicting:
      raise self._chooses_for(what)
    return self

  def reading_all(self, what: str) -> CacheConfig:
    """Return the kind itself if its queries read all tokens in their slots.

    Raises:
      OptionError: If the kind evicts or has a policy, which `what` does not
        support.
    """
    if self.policy is not None:
      raise self._chooses_for(what)
    return self.keeping_all(what)

  def _chooses_for(self, what: str) -> OptionError:
    return OptionError(
      "cache kind",
      f"{self}, for {what}",
      "one without a policy, first and recent: what these keep depends on "
      "the text",
      "leave them out, or measure with "
      "python -m ringjax.launch.evaluate caches",
    )

  def resident(self, what: str) -> CacheConfig:
    """Return the kind itself if its caches keep all tokens on the devices.

    Raises:
      OptionError: If the kind evicts or uses host memory, which `what` does not
        support.
    """
    if self.tier.device is not None:
      raise OptionError(
        "cache kind",
        f"{self}, for {what}",
        "one without device=, which moves tokens to the host's memory",
        "leave it out",
      )
    return self.keeping_all(what)

  def without_weights(self) -> CacheConfig:
    """Kind of the same bytes that depends on no model's weights.

    Raises:
      OptionError: If bits are allocated by head.
    """
    if self.codec is None:
      return self
    return dataclasses.replace(self, codec=self.codec.without_weights())

  @property
  def least(self) -> int:
    """Minimum number of slots of an open cache."""
    window = 0 if self.policy is None else self.policy.queries or 0
    group_tokens = self.layout.page if self.grouped else 0
    exact = self.exact
    return max(exact.first + exact.recent + group_tokens + exact.room, window)

  def counts(
    self, length: int, heads: Sequence[int], *, expected: bool = False
  ) -> list[int | float]:
    """Number of tokens that a head keeps of a row, for each layer.

    A budget includes the tokens that come until the next eviction: of fewer
    tokens than the row has, `room` - 1 are left out, at most a sixteenth. Of
    32 pages or more, a last page that would not be full is left out, too.
    Policies that set what they expect themselves keep their own counts.

    Args:
      length: Number of tokens that the row has had.
      heads: Number of KV heads under the policy, see `Policy.counts`.
      expected: Whether to return `Policy.expected`, for plans.
    """
    policy = self.policy
    if policy is None:
      return [length] * len(heads)
    counts = (policy.expected if expected else policy.counts)(length, heads)
    if not policy.budgeted:
      return list(counts)
    exact, page = self.exact.first + self.exact.recent, self.layout.page

    def leaving_room(count: int | float) -> int | float:
      if count >= length:
        return count
      count -= min(self.exact.room - 1, int(count) // _ROOM_SHARE)
      paged = int(count) - exact
      return count - (paged % page if paged >= _PAGE_SHARE * page else 0)

    return [leaving_room(count) for count in counts]

  def opened(self) -> CacheConfig:
    """Kind of the open cache, which holds tokens until they go into pages."""
    return CacheConfig(
      layout=self.layout,
      codec=None if self.exact else self.codec,
      # Blocks that are exported fit caches without a part in host memory.
      exact=ExactConfig(room=self.exact.room),
    )

  @property
  def most_steps(self) -> int | None:
    """Most tokens between two evictions; None: as many as fit."""
    if self.tier.hot is not None:
      # What a query chooses from must not depend on drafts and other rows.
      return self.tier.block
    return None if self.tier.device is not None else self.exact.room

  def noted(self, capacity: int) -> tuple[int, bool]:
    """Number of newest queries that are recorded, and whether moments are."""
    policy = self.policy
    if policy is None:
      return 0, False
    window = capacity if policy.queries is None else policy.queries
    return min(window, capacity), policy.moments

  def __add__(self, other: CacheConfig) -> CacheConfig:
    """Combine two kinds, such as one with a codec and one with a policy.

    Raises:
      OptionError: If both have a codec or both have a policy.
    """
    for name in ("codec", "policy"):
      pair = [getattr(self, name), getattr(other, name)]
      if None not in pair:
        raise OptionError(
          "cache kind",
          f"two of a {name}: {self} and {other}",
          f"one {name}",
          "leave one of them out",
        )
    evicting = [x for x in (self, other) if x.evicting]
    tiers = (self.tier, other.tier)
    room = max(x.exact.room for x in evicting or (self, other))
    return CacheConfig(
      layout=_combined(self.layout, other.layout),
      codec=self.codec or other.codec,
      policy=self.policy or other.policy,
      exact=_combined(self.exact, other.exact).replace(room=room),
      tier=max(tiers, key=lambda x: x.device or 0),
    )

  def as_wire(self, dtype: DTypeLike) -> CodecWire:
    """Wire format in which strategies send the bytes that such a cache stores.

    Args:
      dtype: Dtype of the cache's keys and values before they are encoded.

    Raises:
      OptionError: If there is no codec, or the stored keys are not those that
        are sent, as with `unrotated`.
    """
    if self.codec is None:
      raise OptionError(
        "wire",
        f"'cache' with a cache of kind {self}",
        "a kind with a codec",
        "pass cache_kind='int8', for instance, or wire='int8'",
      )
    if self.layout.unrotated:
      raise OptionError(
        "wire",
        f"'cache' with a cache of kind {self}, of keys before their rotation",
        "keys as they are stored to be those that travel, rotated",
        "leave unrotated out, or pass a wire of its own, as wire='int8'",
      )
    if not isinstance(self.codec, Codec):
      raise OptionError(
        "wire",
        f"'cache' with a cache of kind {self}",
        "one codec for all heads",
        "pass a wire of its own, as wire='int8'",
      )
    return self.codec.as_wire(dtype)

  def for_model(self, load: Callable[[Any], Any]) -> CacheConfig:
    """Complete the kind for a model with tables that `load` reads from files.

    A calibration that is set already is passed to `load` to be compared.
    """
    if self.codec is None:
      return self
    codec = self.codec.for_model(load)
    if isinstance(codec, Calibrated) and isinstance(
      codec.calibration, Calibration
    ):
      codec.calibration.check_first(self.exact.first)
    # The codec that was read may be for keys before their rotation.
    unrotated = self.layout.unrotated or codec.unrotated
    return self.replace(codec=codec, unrotated=unrotated)

  def text_options(self) -> dict[str, Any]:
    """Options of texts by name: of parts, then the policy's and the codec's."""
    tier = self.tier
    parts = {
      field.name: getattr(part, field.name)
      for part in (self.layout, self.exact, tier)
      for field in part.fields()
    }
    block = parts.pop("block")
    if tier.device is not None:
      # In texts the tokens of a block in host memory are room, too.
      parts["room"] = block
    options = {name: parts.pop(name) for name in _TEXT_ORDER} | parts
    if self.policy is not None:
      for field in dataclasses.fields(self.policy):
        options[f"policy.{field.name}"] = getattr(self.policy, field.name)
    return options | ({} if self.codec is None else self.codec.options())

  def with_options(self, options: dict[str, Any]) -> CacheConfig:
    """Copy with other values for the options that `options` names."""
    paths = self.options()
    changes = {n: value for n, value in options.items() if n in paths}
    if changes.get("residual") is not None:
      changes.setdefault("recent", changes["residual"])
    if self.codec is not None:
      changes["codec"] = codec = self.codec.with_options(options)
      if isinstance(codec, Calibrated) and "unrotated" in changes:
        stage = changes["unrotated"]
        changes["codec"] = dataclasses.replace(codec, unrotated=stage)
      page = None
      if isinstance(codec, Codec) and not self.grouped:
        page = codec.page
      if page is not None:
        # Groups that are full are encoded at once, if nothing else is said.
        changes = {"recent": 1, "room": page, "page": page} | changes
    if self.policy is not None:
      policy_options = {
        name.removeprefix("policy."): value
        for name, value in options.items()
        if name.startswith("policy.")
      }
      changes["policy"] = dataclasses.replace(self.policy, **policy_options)
    return self.replace(**changes)

  def __str__(self) -> str:
    """Format as `launch.generate --cache=` takes it: names, changed options."""
    codec = self.codec
    if isinstance(codec, PerHead) and codec.source:
      from_file = Allocated(table=codec.source)
      return str(self.replace(codec=from_file, unrotated=False))
    options = self.text_options()
    shortest: tuple[int, str] | None = None
    for name, kind in _named():
      defaults = kind.text_options()
      if defaults.keys() != options.keys() or _classes(kind) != _classes(self):
        continue
      if self.tier.device is not None and kind.tier.device is None:
        defaults["room"] = kind.tier.block
      changed = [f"{n}={x}" for n, x in options.items() if defaults[n] != x]
      text = f"{name}:{','.join(changed)}" if changed else name
      if shortest is None or len(changed) < shortest[0]:
        shortest = len(changed), text
    return repr(self) if shortest is None else shortest[1]


def _combined(a: _P, b: _P) -> _P:
  """Combine parts of two kinds: what either has, the larger of two numbers."""
  pairs = {x.name: (getattr(a, x.name), getattr(b, x.name)) for x in a.fields()}
  return a.replace(
    **{
      name: max((x for x in pair if x is not None), default=None)
      for name, pair in pairs.items()
    }
  )


def _of_part(name: str) -> property:
  """Attribute of a config that is an option of a part."""
  return property(lambda self: self.text_options()[name])


# Deprecated, for one version: see `CacheConfig`.
CacheKind = CacheConfig
for _name in (*LayoutConfig.options(), *ExactConfig.options(), "device"):
  setattr(CacheConfig, _name, _of_part(_name))


_WINDOWED = LayoutConfig(windowed=True)


def _named() -> Iterator[tuple[str, CacheConfig]]:
  """Yield all kinds that have a name, and pairs of a codec and a policy."""
  yield from KINDS.items()
  yield from FROM_FILES.items()
  for name, kind in KINDS.items():
    for policy_name, policy_kind in KINDS.items():
      coded = kind.codec is not None and not kind.grouped
      if coded and policy_kind.policy is not None:
        yield f"{name}+{policy_name}", kind + policy_kind


def _classes(kind: CacheConfig) -> tuple[type, ...]:
  codec = kind.codec
  types: tuple[type, ...] = () if codec is None else (type(codec),)
  if isinstance(codec, Codec):
    types = type(codec.keys), type(codec.values)
  return (*types, type(kind.policy))


def _encoded(vectors: VectorCodec) -> CacheConfig:
  codec = Codec(keys=vectors, values=vectors)
  return CacheConfig(layout=_WINDOWED, codec=codec)


def _calibrated(bits: int) -> CacheConfig:
  codec = Calibrated(
    keys=CodeBook(bits=bits, by="channel"),
    values=CodeBook(bits=bits, by="token"),
  )
  layout = LayoutConfig(windowed=True, unrotated=True)
  return CacheConfig(layout=layout, codec=codec)


def _grouped(bits: int) -> CacheConfig:
  codec = Codec(
    keys=ChannelGroups(bits=bits, group=32),
    values=Integers(bits=bits, group=32),
  )
  # With room for one group between evictions, each is encoded once it is full.
  exact = ExactConfig(recent=128, room=32)
  return CacheConfig(layout=_WINDOWED, codec=codec, exact=exact)


def _evicting(policy: Policy) -> CacheConfig:
  exact = ExactConfig(room=_ROOM)
  return CacheConfig(layout=_WINDOWED, policy=policy, exact=exact)


DENSE = CacheConfig()
WINDOWED = CacheConfig(layout=_WINDOWED)
KINDS: dict[str, CacheConfig] = {
  "dense": DENSE,
  "unrotated": CacheConfig(layout=LayoutConfig(unrotated=True)),
  "windowed": WINDOWED,
  "bfloat16": _encoded(Floats(format="bfloat16")),
  "int8": _encoded(Integers(bits=8)),
  "float8": _encoded(Floats(format="e4m3")),
  "int4": _encoded(Integers(bits=4)),
  "int2": _encoded(Integers(bits=2, group=32)),
  "hadamard4": _encoded(Hadamard(bits=4)),
  "hadamard3": _encoded(Hadamard(bits=3)),
  "hadamard2": _encoded(Hadamard(bits=2)),
  "nuq4": _calibrated(4),
  "nuq3": _calibrated(3),
  "nuq2": _calibrated(2),
  "sinks": _evicting(Sinks()),
  "keydiff": _evicting(KeyDiff()),
  "snapkv": _evicting(SnapKV()),
  "pyramidkv": _evicting(PyramidKV()),
  "adakv": _evicting(AdaKV()),
  "tova": _evicting(Tova()),
  "h2o": _evicting(HeavyHitters()),
  "expected": _evicting(ExpectedAttention()),
  "fastgen": _evicting(FastGen()),
  "select": _evicting(Select()),
  "knorm": _evicting(KeyNorm()),
  "lagkv": _evicting(LagKV()),
  "kvzip": _evicting(KVzip()),
  "kivi4": _grouped(4),
  "kivi2": _grouped(2),
}
# Kinds that need a file of the model.
FROM_FILES: dict[str, CacheConfig] = {
  "allocated": CacheConfig(layout=_WINDOWED, codec=Allocated()),
}


def cache_kind(
  kind: CacheConfig | str, name: str = "cache_kind"
) -> CacheConfig:
  """Parse the text that names a kind of cache; return a kind unchanged.

  Args:
    kind: A kind, or a text: a name of `KINDS`, or the names of a codec and a
      policy with a plus between them. After a colon, options of that kind, such
      as "int4:group=32,keys.bits=8", where "group" sets that of keys and
      values. Option values are Python literals, in upper or lower case; several
      values stand in parentheses, "fastgen:punctuation=(33,46)".
    name: Name of the flag or argument, for errors.

  Raises:
    OptionError: If a name or an option is unknown, or a value's type is wrong.
  """
  if isinstance(kind, CacheConfig):
    return kind
  kind_name, colon, options_text = (
    kind.partition(":") if isinstance(kind, str) else ("", "", "")
  )
  known_names = KINDS | FROM_FILES
  if any(part not in known_names for part in kind_name.split("+")):
    raise OptionError(
      name,
      repr(kind),
      f"one of {', '.join(KINDS)}, or a codec + a policy of these",
      f"pass {name}=dense, {name}=allocated:table=DIR, or an rj.kv.CacheConfig",
    )
  parts = [known_names[part] for part in kind_name.split("+")]
  named = functools.reduce(operator.add, parts)
  defaults = named.text_options()
  options: dict[str, Any] = {}
  keys: set[str] = set()
  for pair in option_text.split(options_text) if colon else ():
    key, equals, value = pair.partition("=")
    names = [n for n in defaults if key in (n, n.partition(".")[2])]
    if not names or key in keys or not equals:
      shown = ", ".join(defaults)
      raise OptionError(
        name,
        f"{pair!r} in {kind!r}",
        f"options of {kind_name!r}, each once: {shown or 'there are none'}",
        f"write {name}={kind_name}:key=value,key=value",
      )
    keys.add(key)
    for n in names:
      options[n] = _value(name, pair, value, defaults[n])
  return named.with_options(options)


def _value(name: str, part: str, text: str, like: Any) -> Any:
  """Parse an option's text as a value of the type of `like`, or any if None."""
  value = option_text.value(text)
  if isinstance(like, float) and type(value) is int:
    # 1 means the whole share, 1.0; from 2 on it is a number of tokens.
    return value if value > 1 else float(value)
  if isinstance(value, str) and part.partition("=")[0].endswith("outliers"):
    # Of a page, "1%"; the codec checks it.
    return value
  if isinstance(like, tuple) and type(value) is int:
    return (value,)
  if None not in (like, value) and type(value) is not type(like):
    raise OptionError(
      name,
      repr(part),
      f"a value of type {type(like).__name__}",
      f"write it as {part.partition('=')[0]}={like}",
    )
  return value
