"""Kinds of caches: how the keys and values of a model are stored."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from jax.typing import DTypeLike

from ringjax import option_text
from ringjax.checks import boolean, integer, positive_int
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

_PAGES = (8, 16, 32, 64, 128)
# Tokens between two evictions of the kinds that have a policy.
_ROOM = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKind:
  """Storage options of a cache: codec, eviction policy, windows, host memory.

  Attributes:
    unrotated: Whether keys are stored before their rotation and rotated when
      they are read, so that `load` can move them to other positions without a
      copy of the stored numbers. Reading costs a rotation of each key.
    windowed: Whether layers with a window of w tokens keep w + `slack` tokens
      of each row, in a ring buffer. Other layers keep all.
    slack: Number of a call's tokens that `keep` or `truncate` may remove from
      a ring buffer, at least 1.
    codec: Codec that stores keys and values in fewer bytes; None stores the
      numbers. States of recurrent layers are never encoded.
    policy: Policy that chooses the tokens each KV head keeps; None keeps all.
      Layers with a window keep the tokens of the window.
    first: Number of tokens at the start of each document that stay, exact.
    recent: Number of newest tokens of a row that stay, exact. With a codec, a
      token is encoded when it is no longer among them; with a codec of groups
      of tokens, when its whole group is not.
    room: Number of tokens between two evictions, if they come one by one;
      with `device`, tokens of a block in host memory.
    residual: Residual length R of KIVI, for a codec of groups: keys are encoded
      R at a time, at each multiple of R, values one by one once they are older
      than the newest R. `recent` must be R, too. None: keys and values are
      encoded together.
    page: Slots of a page; each KV head has a whole number of pages. Used with
      a policy, `first` or `recent`.
    device: Number of newest tokens of a row that stay in device memory, all
      shards together. Older ones move to host memory, block by block, and are
      read from there. None: all stay. See `TieredCache`.
  """

  unrotated: bool = False
  windowed: bool = False
  slack: int = 128
  codec: CacheCodec | None = None
  policy: Policy | None = None
  first: int = 0
  recent: int = 0
  room: int = 256
  page: int = 32
  device: int | None = None
  residual: int | None = None

  def __post_init__(self) -> None:
    boolean("unrotated", self.unrotated)
    boolean("windowed", self.windowed)
    positive_int("slack", self.slack)
    positive_int("room", self.room)
    for name in ("first", "recent"):
      integer(name, getattr(self, name), least=0)
    if self.device is not None:
      positive_int("device", self.device)
      if self.evicting:
        raise OptionError(
          "device",
          f"{self.device}, with a policy, first or recent",
          "a kind of cache that keeps all tokens",
          "leave device out, or leave those out",
        )
    if self.page not in _PAGES:
      raise OptionError(
        "page", repr(self.page), f"one of {_PAGES}", "pass page=32"
      )
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
    if self.evicting and isinstance(self.codec, Allocated | PerHead):
      raise OptionError(
        "codec",
        "one for each head, with a policy, first or recent",
        "one codec for all heads, for pages hold vectors of one length",
        "leave the policy, first and recent out, or take one codec",
      )
    if self.codec is not None and self.codec.unrotated and not self.unrotated:
      raise OptionError(
        "unrotated",
        "False, with a codec of keys before their rotation",
        "True",
        "pass rj.kv.CacheKind(codec=..., unrotated=True)",
      )
    after_rotation = (
      isinstance(self.codec, Calibrated) and not self.codec.unrotated
    )
    if after_rotation and self.unrotated:
      raise OptionError(
        "unrotated",
        "True, with a calibrated codec of keys behind their rotation",
        "the same of both: levels fit keys of one sort",
        "pass rj.kv.Calibrated(unrotated=True), or leave unrotated out",
      )
    if self.residual is not None:
      self._check_residual()
    if self.grouped:
      self._check_groups()
    if self.policy is not None and self.policy.moves:
      if self.first:
        raise OptionError(
          "first",
          f"{self.first}, with positions='cache'",
          "0: the policy's sinks are the first tokens that stay",
          f"leave it out, and pass sinks={self.first}",
        )
      # Keys are rotated where they are read, by the index that they have then.
      object.__setattr__(self, "unrotated", True)

  def _check_residual(self) -> None:
    """Check that `residual` fits the codec, the pages and `recent`."""
    size = self.residual
    positive_int("residual", size)
    assert size is not None
    if not self.grouped:
      raise OptionError(
        "residual",
        f"{size}, without a codec of groups of tokens",
        "keys by channel, of which so many become codes at a time",
        "write kivi2:residual=128, or recent= with other codecs",
      )
    if size % self.page or self.recent != size or self.first:
      raise OptionError(
        "residual",
        f"{size}, with recent={self.recent}, first={self.first} and groups of "
        f"{self.page}",
        "whole groups, recent the same, and first 0",
        f"write residual={-(-size // self.page) * self.page}, and leave recent "
        "and first out",
      )

  def _check_groups(self) -> None:
    """Check the options that a codec of groups of tokens restricts."""
    codec = self.codec
    assert isinstance(codec, Codec)
    if self.policy is not None:
      raise OptionError(
        "policy",
        f"{self.policy} with a codec of groups of tokens",
        "none: heads that keep different tokens have no groups in common",
        "use a codec of single tokens, as int4, or leave the policy out",
      )
    if not self.recent:
      raise OptionError(
        "recent",
        "0 with a codec of groups of tokens",
        "1 or more: tokens stay exact until a group is full",
        "pass recent=128",
      )
    sizes = {x.page for x in (codec.keys, codec.values) if hasattr(x, "page")}
    if sizes != {self.page}:
      raise OptionError(
        "page",
        f"{self.page} with groups of {sorted(sizes)} tokens",
        "pages that are groups",
        f"pass page={max(sizes)} and group={max(sizes)}",
      )

  @property
  def evicting(self) -> bool:
    """Whether a cache of this kind has pages, see `EvictingCache`."""
    return self.policy is not None or self.exact

  @property
  def grouped(self) -> bool:
    """Whether the codec encodes whole pages."""
    return isinstance(self.codec, Codec) and self.codec.page is not None

  @property
  def exact(self) -> bool:
    """Whether tokens stay exact in the open cache before they go into pages."""
    return bool(self.first or self.recent)

  @property
  def alike(self) -> str | None:
    """Heads that keep the same tokens, see `Policy.alike`."""
    return "layers" if self.policy is None else self.policy.alike

  @property
  def repeats(self) -> bool:
    """Whether the policy scores tokens by a repetition of the context."""
    return self.policy is not None and self.policy.repeats

  def keeping_all(self, what: str) -> CacheKind:
    """Return the kind itself if its caches keep all tokens in their slots.

    Raises:
      OptionError: If the kind evicts, which `what` does not support.
    """
    if self.evicting:
      raise OptionError(
        "cache kind",
        f"{self}, for {what}",
        "one without a policy, first and recent: what these keep depends on "
        "the text",
        "leave them out, or measure with python -m launch.evaluate caches",
      )
    return self

  def resident(self, what: str) -> CacheKind:
    """Return the kind itself if its caches keep all tokens on the devices.

    Raises:
      OptionError: If the kind evicts or uses host memory, which `what` does not
        support.
    """
    if self.device is not None:
      raise OptionError(
        "cache kind",
        f"{self}, for {what}",
        "one without device=, which moves tokens to the host's memory",
        "leave it out",
      )
    return self.keeping_all(what)

  @property
  def least(self) -> int:
    """Minimum number of slots of an open cache."""
    window = 0 if self.policy is None else self.policy.queries or 0
    group_tokens = self.page if self.grouped else 0
    return max(self.first + self.recent + group_tokens + self.room, window)

  def opened(self) -> CacheKind:
    """Kind of the open cache, which holds tokens until they go into pages."""
    return dataclasses.replace(
      self,
      codec=None if self.exact else self.codec,
      policy=None,
      first=0,
      recent=0,
      residual=None,
      device=None,
      # Blocks that are exported fit caches without a part in host memory.
      room=self.room if self.device is None else CacheKind.room,
    )

  def noted(self, capacity: int) -> tuple[int, bool]:
    """Number of newest queries that are recorded, and whether moments are."""
    policy = self.policy
    if policy is None:
      return 0, False
    window = capacity if policy.queries is None else policy.queries
    return min(window, capacity), policy.moments

  def __add__(self, other: CacheKind) -> CacheKind:
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
    return CacheKind(
      unrotated=self.unrotated or other.unrotated,
      windowed=self.windowed or other.windowed,
      slack=max(self.slack, other.slack),
      codec=self.codec or other.codec,
      policy=self.policy or other.policy,
      first=max(self.first, other.first),
      recent=max(self.recent, other.recent),
      room=max(x.room for x in evicting or (self, other)),
      page=max(self.page, other.page),
      device=max((self.device, other.device), key=lambda n: n or 0),
      residual=self.residual or other.residual,
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
    if self.unrotated:
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

  def for_model(self, load: Callable[[Any], Any]) -> CacheKind:
    """Complete the kind for a model with tables that `load` reads from files.

    A calibration that is set already is passed to `load` to be compared.
    """
    if self.codec is None:
      return self
    codec = self.codec.for_model(load)
    if isinstance(codec, Calibrated) and isinstance(
      codec.calibration, Calibration
    ):
      codec.calibration.check_first(self.first)
    # The codec that was read may be for keys before their rotation.
    unrotated = self.unrotated or codec.unrotated
    return dataclasses.replace(self, codec=codec, unrotated=unrotated)

  def options(self) -> dict[str, Any]:
    """All options by name: own fields, then the policy's and the codec's."""
    options = {name: getattr(self, name) for name in self._plain_fields()}
    if self.policy is not None:
      for field in dataclasses.fields(self.policy):
        options[f"policy.{field.name}"] = getattr(self.policy, field.name)
    return options | ({} if self.codec is None else self.codec.options())

  def with_options(self, options: dict[str, Any]) -> CacheKind:
    """Copy with other values for the options that `options` names."""
    changes = {
      n: value for n, value in options.items() if n in self._plain_fields()
    }
    if changes.get("residual") is not None:
      changes.setdefault("recent", changes["residual"])
    if self.codec is not None:
      changes["codec"] = codec = self.codec.with_options(options)
      if isinstance(codec, Calibrated) and "unrotated" in changes:
        stage = changes["unrotated"]
        changes["codec"] = dataclasses.replace(codec, unrotated=stage)
    if self.policy is not None:
      policy_options = {
        name.removeprefix("policy."): value
        for name, value in options.items()
        if name.startswith("policy.")
      }
      changes["policy"] = dataclasses.replace(self.policy, **policy_options)
    return dataclasses.replace(self, **changes)

  def _plain_fields(self) -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(self))
    return tuple(name for name in names if name not in ("codec", "policy"))

  def __str__(self) -> str:
    """Format as `launch.generate --cache=` takes it: names, changed options."""
    codec = self.codec
    if isinstance(codec, PerHead) and codec.source:
      from_file = Allocated(table=codec.source)
      return str(dataclasses.replace(self, codec=from_file, unrotated=False))
    options = self.options()
    shortest: tuple[int, str] | None = None
    for name, kind in _named():
      defaults = kind.options()
      if defaults.keys() != options.keys() or _classes(kind) != _classes(self):
        continue
      changed = [f"{n}={x}" for n, x in options.items() if defaults[n] != x]
      text = f"{name}:{','.join(changed)}" if changed else name
      if shortest is None or len(changed) < shortest[0]:
        shortest = len(changed), text
    return repr(self) if shortest is None else shortest[1]


def _named() -> Iterator[tuple[str, CacheKind]]:
  """Yield all kinds that have a name, and pairs of a codec and a policy."""
  yield from KINDS.items()
  yield from FROM_FILES.items()
  for name, kind in KINDS.items():
    for policy_name, policy_kind in KINDS.items():
      coded = kind.codec is not None and not kind.grouped
      if coded and policy_kind.policy is not None:
        yield f"{name}+{policy_name}", kind + policy_kind


def _classes(kind: CacheKind) -> tuple[type, ...]:
  codec = kind.codec
  types: tuple[type, ...] = () if codec is None else (type(codec),)
  if isinstance(codec, Codec):
    types = type(codec.keys), type(codec.values)
  return (*types, type(kind.policy))


def _encoded(vectors: VectorCodec) -> CacheKind:
  codec = Codec(keys=vectors, values=vectors)
  return CacheKind(windowed=True, codec=codec)


def _calibrated(bits: int) -> CacheKind:
  codec = Calibrated(
    keys=CodeBook(bits=bits, by="channel"),
    values=CodeBook(bits=bits, by="token"),
  )
  return CacheKind(windowed=True, unrotated=True, codec=codec)


def _grouped(bits: int) -> CacheKind:
  codec = Codec(
    keys=ChannelGroups(bits=bits, group=32),
    values=Integers(bits=bits, group=32),
  )
  # With room for one group between evictions, each is encoded once it is full.
  return CacheKind(windowed=True, codec=codec, recent=128, room=32)


def _evicting(policy: Policy) -> CacheKind:
  return CacheKind(windowed=True, policy=policy, room=_ROOM)


DENSE = CacheKind()
WINDOWED = CacheKind(windowed=True)
KINDS: dict[str, CacheKind] = {
  "dense": DENSE,
  "unrotated": CacheKind(unrotated=True),
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
FROM_FILES: dict[str, CacheKind] = {
  "allocated": CacheKind(windowed=True, codec=Allocated()),
}


def cache_kind(kind: CacheKind | str, name: str = "cache_kind") -> CacheKind:
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
  if isinstance(kind, CacheKind):
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
      f"pass {name}=dense, {name}=allocated:table=DIR, or an rj.kv.CacheKind",
    )
  parts = [known_names[part] for part in kind_name.split("+")]
  named = functools.reduce(operator.add, parts)
  defaults = named.options()
  options: dict[str, Any] = {}
  for part in option_text.split(options_text) if colon else ():
    key, equals, value = part.partition("=")
    names = [n for n in defaults if key in (n, n.partition(".")[2])]
    if not names or key in options or not equals:
      shown = ", ".join(f"{k}={v}" for k, v in defaults.items())
      raise OptionError(
        name,
        f"{part!r} in {kind!r}",
        f"options of {kind_name!r}, each once: {shown or 'there are none'}",
        f"write {name}={kind_name}:key=value,key=value",
      )
    for n in names:
      options[n] = _value(name, part, value, defaults[n])
  return named.with_options(options)


def _value(name: str, part: str, text: str, like: Any) -> Any:
  """Parse an option's text as a value of the type of `like`, or any if None."""
  value = option_text.value(text)
  if isinstance(like, float) and type(value) is int:
    # 1 means the whole share, 1.0; from 2 on it is a number of tokens.
    return value if value > 1 else float(value)
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
