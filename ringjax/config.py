"""Configs: frozen values in place of long parameter lists.

A config is a class with the decorator `config`, whose fields are made by
`option` and documented there. It prints the options that differ from their
defaults, is written as plain values and read back, and takes overrides by name:
`EngineConfig(rows=8).replace(page=64)`.

A config may have other configs as parts. Options of parts are named directly,
where a config is made and where it is changed: `GenerateConfig(chunk=512)` has
`prefill.chunk`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from ringjax.checks import boolean, integer, number, one_of
from ringjax.errors import InputTypeError, OptionError

_C = TypeVar("_C", bound="Config")
_T = TypeVar("_T", bound="type[Config]")


class Flag(NamedTuple):
  """Flag of a script that sets an option.

  Fields:
    meaning: Text for --help.
    name: Name of the flag; default: that of the option.
    kind: Kind of value: "text", "whole" for an int, "number" for a float,
      "boolean", "path", or "texts" for a text that may be given several times;
      default: the kind of the option's default or smallest value, else "text".
    default: Value if the flag is not passed; None: the option's default.
    choices: Allowed texts; None: those of the option.
  """

  meaning: str
  name: str | None = None
  kind: str | None = None
  default: object = None
  choices: Collection[str] | None = None


def option(
  meaning: str,
  *,
  default: object,
  override: str | None = None,
  text: Callable[[Any], Any] | None = None,
  choices: Collection[str] | None = None,
  least: int | float | None = None,
  flag: Flag | None = None,
  aliases: Collection[str] = (),
) -> Any:
  """Make a field of a config.

  Args:
    meaning: Noun phrase that says what the value is, for docs and flags.
    default: Default value.
    override: Name by which a config that has this one as a part takes the
      option; default: the field's name.
    text: Function that converts a value to a plain one, from which the config
      makes the same value again; default: values have to be plain.
    choices: Allowed texts; None: any value.
    least: Smallest value, an int of an option that is an int, a float of one
      that is a number; None: the option is no int and has no smallest value.
    flag: Flag that sets the option; default: one of its name, which says the
      first sentence of the meaning.
    aliases: Names of the same option in other engines, with the same meaning
      and unit, which are taken in place of the name.
  """
  if flag is None:
    first = meaning.partition(". ")[0].removesuffix(".") + "."
    flag = Flag(first)
  if flag.kind is None:
    flag = flag._replace(kind=_flag_kind(default, least))
  facts = {
    "meaning": meaning,
    "override": override,
    "text": text,
    "choices": choices,
    "least": least,
    "flag": flag,
    "aliases": aliases,
  }
  return dataclasses.field(default=default, metadata=facts)


def part(
  meaning: str, *, default_factory: type[Any], main: str | None = None
) -> Any:
  """Make a field of a config that is a config itself.

  Args:
    meaning: Noun phrase that says what the part is about.
    default_factory: Class of the part.
    main: Option of the part that an override of the field's name sets, if the
      override is not a config: prefill="ring".
  """
  facts = {"meaning": meaning, "part": default_factory, "main": main}
  return dataclasses.field(default_factory=default_factory, metadata=facts)


class Config:
  """Base of configs; see the module.

  Raises:
    OptionError: If a value is out of its range, see `option`.
  """

  def __post_init__(self) -> None:
    for field in self.fields():
      value, facts = getattr(self, field.name), field.metadata
      if "part" in facts or (value is None and field.default is None):
        continue
      if facts["choices"] is not None:
        one_of(field.name, value, facts["choices"])
      if isinstance(facts["least"], float):
        number(field.name, value, least=facts["least"])
      elif facts["least"] is not None:
        integer(field.name, value, least=facts["least"])
      elif isinstance(field.default, bool):
        boolean(field.name, value)

  @classmethod
  def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
    """Fields of the config."""
    config_class: Any = cls
    return dataclasses.fields(config_class)

  @classmethod
  def of(cls: type[_C], config: _C | None, overrides: Mapping[str, Any]) -> _C:
    """Return a config, or the default one, with overrides.

    Raises:
      InputTypeError: If `config` is of another class.
      OptionError: If an override is unknown, or a value is wrong.
    """
    if config is None:
      config = cls()
    if not isinstance(config, cls):
      raise InputTypeError(
        "config",
        type(config).__name__,
        f"an {cls.__name__}",
        "pass one, or options by their names",
      )
    return config.replace(**overrides) if overrides else config

  @classmethod
  def options(cls) -> dict[str, tuple[str, ...]]:
    """Names of overrides, with the path of fields that each one sets."""
    return cls._paths(aliases=False)

  @classmethod
  def _paths(cls, *, aliases: bool) -> dict[str, tuple[str, ...]]:
    paths: dict[str, tuple[str, ...]] = {}
    for field in cls.fields():
      facts = field.metadata
      if "part" in facts:
        paths[field.name] = (field.name,)
        for name, path in facts["part"]._paths(aliases=aliases).items():
          paths.setdefault(name, (field.name, *path))
      else:
        paths[facts["override"] or field.name] = (field.name,)
        for name in facts["aliases"] if aliases else ():
          paths[name] = (field.name,)
    return paths

  @classmethod
  def field(cls, name: str) -> tuple[dataclasses.Field[Any], str]:
    """Field that an override sets, and the meaning of its part, or "".

    Raises:
      OptionError: If the option is unknown.
    """
    paths = cls.options()
    if name not in paths:
      raise cls._unknown(name, None, paths)
    path = paths[name]
    field = {x.name: x for x in cls.fields()}[path[0]]
    facts = field.metadata
    if "part" not in facts:
      return field, ""
    inner_name = (facts["main"] or name) if len(path) == 1 else name
    return facts["part"].field(inner_name)[0], facts["meaning"]

  def replace(self: _C, **overrides: Any) -> _C:
    """Copy with other values of some options, also of parts' options.

    Raises:
      OptionError: If an option is unknown, or a value is wrong.
    """
    parts = {x.name: getattr(self, x.name) for x in self.fields()}
    changes = self._changes(overrides, self._paths(aliases=True), parts)
    instance: Any = self
    return dataclasses.replace(instance, **changes)

  @classmethod
  def _changes(
    cls,
    overrides: Mapping[str, Any],
    paths: Mapping[str, tuple[str, ...]],
    parts: Mapping[str, Any],
  ) -> dict[str, Any]:
    """Values of fields that overrides change.

    Args:
      overrides: Values of options by name.
      paths: Path of fields that each name sets.
      parts: Parts before the change, by field.

    Raises:
      OptionError: If an option is unknown, is named twice, or has a wrong
        value.
    """
    names: dict[tuple[str, ...], str] = {}
    changes: dict[str, Any] = {}
    of_parts: dict[str, dict[str, Any]] = {}
    for name, value in overrides.items():
      if name not in paths:
        raise cls._unknown(name, value, paths)
      if paths[name] in names:
        raise named_twice(names[paths[name]], name)
      names[paths[name]] = name
      first, *part_path = paths[name]
      facts = cls._facts(first)
      if part_path:
        # The part's own name of the option.
        of_parts.setdefault(first, {})[name] = value
      elif "part" in facts and not isinstance(value, facts["part"]):
        if facts["main"] is None:
          raise InputTypeError(
            name,
            type(value).__name__,
            f"a {facts['part'].__name__}",
            "pass one, or its options by their names",
          )
        of_parts.setdefault(first, {})[facts["main"]] = value
      else:
        changes[first] = value
    for first, values in of_parts.items():
      changes[first] = changes.get(first, parts[first]).replace(**values)
    return changes

  def to_dict(self) -> dict[str, Any]:
    """Options that differ from their defaults, as values of JSON.

    Raises:
      OptionError: If a value is an object that can't be written.
    """
    values: dict[str, Any] = {}
    for name, value, facts in self._changed():
      if "part" in facts:
        values[name] = value.to_dict()
        continue
      plain = value if facts["text"] is None else facts["text"](value)
      if not _is_plain(plain):
        raise OptionError(
          name,
          f"a {type(value).__name__}",
          "a number, a text, or a list of them, which can be written",
          "write the config without it, and pass the object as an override",
        )
      values[name] = plain
    return values

  @classmethod
  def from_dict(cls: type[_C], values: Mapping[str, Any]) -> _C:
    """Make a config of values that `to_dict` returned.

    Raises:
      OptionError: If an option is unknown, or a value is wrong.
    """
    parts = {
      field.name: field.metadata["part"]
      for field in cls.fields()
      if "part" in field.metadata
    }
    for name, value in values.items():
      if name in parts and not isinstance(value, Mapping):
        raise InputTypeError(
          name,
          type(value).__name__,
          "a mapping of options",
          "pass what to_dict returned",
        )
    return cls(
      **{
        name: parts[name].from_dict(value) if name in parts else value
        for name, value in values.items()
      }
    )

  def __repr__(self) -> str:
    options = ", ".join(
      f"{name}={value!r}" for name, value, _ in self._changed()
    )
    return f"{type(self).__name__}({options})"

  def _changed(self) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Name, value and facts of fields that differ from their defaults."""
    changed: list[tuple[str, Any, Mapping[str, Any]]] = []
    for field in self.fields():
      value = getattr(self, field.name)
      if "part" in field.metadata:
        is_default = value == field.metadata["part"]()
      else:
        is_default = value is field.default or (
          type(value) is type(field.default) and value == field.default
        )
      if not is_default:
        changed.append((field.name, value, field.metadata))
    return changed

  @classmethod
  def _facts(cls, name: str) -> Mapping[str, Any]:
    return {x.name: x for x in cls.fields()}[name].metadata

  @classmethod
  def _unknown(
    cls, name: str, value: object, paths: Mapping[str, Any]
  ) -> OptionError:
    similar_names = difflib.get_close_matches(name, paths, n=3)
    return OptionError(
      name,
      repr(value),
      f"an option of {cls.__name__}: {', '.join(similar_names or paths)}",
      f"pass {similar_names[0]}="
      if similar_names
      else f"leave it out; see help({cls.__name__})",
    )


@dataclass_transform(
  kw_only_default=True,
  frozen_default=True,
  field_specifiers=(option, part),
)
def config(cls: _T) -> _T:
  """Make a config of a class whose fields are made by `option` and `part`."""
  config_class: Any = dataclasses.dataclass(
    frozen=True, kw_only=True, repr=False
  )(cls)
  make = config_class.__init__
  fields = config_class.fields()
  paths = config_class._paths(aliases=True)
  paths |= {field.name: (field.name,) for field in fields}
  parts = {
    field.name: field.metadata["part"]()
    for field in fields
    if "part" in field.metadata
  }

  @functools.wraps(make)
  def init(self: Config, **options: Any) -> None:
    make(self, **self._changes(options, paths, parts))

  config_class.__init__ = init
  entries = [
    textwrap.fill(
      f"{field.name}: {field.metadata['meaning']}{_also(field)}",
      76,
      initial_indent="    ",
      subsequent_indent="      ",
    )
    for field in dataclasses.fields(config_class)
  ]
  about, mark, errors = (cls.__doc__ or "").rstrip().partition("\n\n  Raises:")
  config_class.__doc__ = "\n".join(
    [about, "", "  Attributes:", *entries, f"{mark[1:]}{errors}\n  "]
  )
  return config_class


def named_twice(name: str, other: str) -> OptionError:
  """Make an error about an option that is set by two of its names."""
  return OptionError(
    name,
    f"it beside {other}, which means the same",
    "one of these names",
    "leave one of them out",
  )


def _flag_kind(default: object, least: int | float | None) -> str:
  """Kind of the flag of an option, from its default and smallest value."""
  if isinstance(default, bool):
    return "boolean"
  if isinstance(default, float) or isinstance(least, float):
    return "number"
  return "whole" if least is not None else "text"


def _also(field: dataclasses.Field[Any]) -> str:
  """Sentence on the aliases of a field, or ""."""
  aliases = ", ".join(field.metadata.get("aliases", ()))
  return f" Also: {aliases}." if aliases else ""


def _is_plain(value: object) -> bool:
  if isinstance(value, list | tuple):
    return all(_is_plain(x) for x in value)
  return value is None or isinstance(value, bool | int | float | str)
