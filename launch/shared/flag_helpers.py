"""Short methods to define the flags of scripts."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from absl import flags

from ringjax import fetched_models
from ringjax.checks import is_address, local_path
from ringjax.config import Config, named_twice
from ringjax.paths import AnyPath, as_path, check_writable

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()


# Heading of flags that --help does not list.
_HIDDEN = "hidden"


class _Path(flags.ArgumentParser):
  """Parser that expands "~", as shells don't in `--model=~/folder`."""

  def parse(self, argument: str) -> str:
    return os.path.expanduser(local_path("path", str(argument)))

  def flag_type(self) -> str:
    return "string"


def check_output(path: str) -> None:
  """Makes the folder of a file to write, and refuses what can't be written.

  A script may work for hours before it writes a file.

  Raises:
    ValueError: If the path is a directory or can't be written.
    StorageError: If it is an address, and no object can be written there.
  """
  if is_address(path):
    check_writable(path)
    return
  if not path or os.path.isdir(path):
    got = f"{path!r}, a directory" if path else "an empty path"
    raise ValueError(f"got {got}; add the name of the file")
  # A device or a pipe, such as /dev/stdout, needs no writable folder.
  if os.path.isfile(path) or not os.path.exists(path):
    folder = os.path.dirname(os.path.abspath(path))
    try:
      os.makedirs(folder, exist_ok=True)
      # Permissions alone do not show that a disk is read-only.
      tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
      raise ValueError(
        f"cannot write to {path}: {error.strerror}; pass a path in another "
        "directory"
      ) from None


class _Place(flags.ArgumentParser):
  """Parser of a path or an address; expands "~"."""

  def parse(self, argument: str) -> str:
    path = str(argument)
    # An empty path stays one: as a `pathlib.Path` it is the working folder.
    return os.fspath(as_path(path)) if path else path

  def flag_type(self) -> str:
    return "string"


class _Output(_Place):
  """Parser of a file to write, see `check_output`."""

  def parse(self, argument: str) -> str:
    path = super().parse(argument)
    check_output(path)
    return path


class _LocalOutput(_Path):
  """Parser of a file of the file system to write, see `check_output`."""

  def parse(self, argument: str) -> str:
    path = super().parse(argument)
    check_output(path)
    return path


class _Model(_Place):
  """Parser of a path, an address or the name of a model."""

  def parse(self, argument: str) -> str:
    path = str(argument)
    path = path if is_address(path) else os.path.expanduser(path)
    # A name on the hub is downloaded by `model_folder`.
    resolve = fetched_models.resolve
    return os.fspath(resolve(path, "model", downloads=False))


def model_folder(
  values: flags.FlagValues, default: Callable[[], pathlib.Path]
) -> AnyPath:
  """Folder or file of --model; downloads what it names on the hub.

  Args:
    values: Parsed flags of a script.
    default: Function that returns the folder of the model without --model.

  Raises:
    OptionError: If the hub does not give the model.
  """
  if values.model is None:
    return default()
  return as_path(fetched_models.resolve(values.model, "--model"))


class _RopeScaling(flags.ArgumentParser):
  """Parser of a scaling, which is refused before a model is loaded."""

  def parse(self, argument: str) -> str:
    # Imported on use: scripts that load no model have no flax.
    from ringjax.models.rope_scaling import context_extension

    context_extension(argument, "--rope_scaling")
    return argument

  def flag_type(self) -> str:
    return "string"


class FlagHelper:
  """Defines flags among `values`, each with a default and a help text.

  Args:
    values: Flags to add to.
    heading: Words above these flags in --help; "": none.
  """

  def __init__(self, values: flags.FlagValues, heading: str = ""):
    self._flags, self._heading = values, heading

  def _define(self, define: Callable[..., Any], *args: Any) -> None:
    """Calls a function of absl, and notes the heading at the new flag."""
    known_names = set(self._flags)
    define(*args, flag_values=self._flags)
    for name in set(self._flags) - known_names:
      flag: Any = self._flags[name]
      flag.heading = self._heading

  def text(self, name: str, default: str | None, text: str) -> None:
    self._define(flags.DEFINE_string, name, default, text)

  def path(self, name: str, default: str | None, text: str) -> None:
    """Defines a path, or one with options after it; expands "~"."""
    self._define(flags.DEFINE, _Path(), name, default, text)

  def place(self, name: str, default: str | None, text: str) -> None:
    """Defines a path, or an address such as gs://bucket/name; expands "~"."""
    self._define(flags.DEFINE, _Place(), name, default, text)

  def output(self, name: str, default: str | None, text: str) -> None:
    """Defines a file or an object to write, or refuses it; makes its folder."""
    self._define(flags.DEFINE, _Output(), name, default, text)

  def local_output(self, name: str, default: str | None, text: str) -> None:
    """Defines a file to write that cannot be an object, as a log."""
    self._define(flags.DEFINE, _LocalOutput(), name, default, text)

  def model(self, name: str, default: str | None, text: str) -> None:
    """Defines a model's folder or file, or its name."""
    self._define(flags.DEFINE, _Model(), name, default, text)

  def options(
    self,
    kind: type[Config],
    names: Iterable[str],
    says: Mapping[str, str] | None = None,
  ) -> None:
    """Defines flags of options of a config, which say what the options say.

    Flags of a part's options are below the part's meaning in --help.

    Args:
      kind: Class of the config.
      names: Names of its options, as overrides, that get a flag.
      says: Sentences that a script adds to the texts of some of them.
    """
    for name in names:
      field, about = kind.field(name)
      facts, flag = field.metadata, field.metadata["flag"]
      default = flag.default
      if default is None:
        default = field.default
      aliases = ", ".join(f"--{alias}" for alias in facts["aliases"])
      also = f"The same: {aliases}." if aliases else ""
      parts = (flag.meaning, (says or {}).get(name, ""), also)
      text = " ".join(filter(None, parts))
      new = FlagHelper(self._flags, about or self._heading)
      flag_name = flag.name or name
      choices = flag.choices or facts["choices"]
      if choices is not None:
        new.choice(flag_name, default, choices, text)
      elif flag.kind == "whole":
        new.whole(flag_name, default, text, facts["least"])
      elif flag.kind == "number":
        new.number(flag_name, default, text, facts["least"])
      elif flag.kind == "boolean":
        new.boolean(flag_name, default, text)
      elif flag.kind == "path":
        new.path(flag_name, default, text)
      elif flag.kind == "texts":
        new._define(flags.DEFINE_multi_string, flag_name, default, text)
      else:
        new.text(flag_name, default, text)
      new.aliases(flag_name, facts["aliases"])

  def aliases(self, name: str, aliases: Collection[str]) -> None:
    """Defines other names of a flag, which --help shows in its text."""
    if not aliases:
      return
    new = FlagHelper(self._flags, _HIDDEN)
    for alias in aliases:
      new._define(flags.DEFINE_alias, alias, name)

    def once(_: Mapping[str, Any]) -> bool:
      """Whether the flag is passed by one of its names."""
      # A flag counts what comes by its aliases, too.
      counts = {alias: self._flags[alias].present for alias in aliases}
      counts[name] = self._flags[name].present - sum(counts.values())
      passed = [f"--{x}" for x, count in counts.items() if count]
      if len(passed) > 1:
        raise flags.ValidationError(f"{named_twice(*passed[:2])}")
      return True

    flags.register_multi_flags_validator(
      [name, *aliases], once, flag_values=self._flags
    )

  def checkpoint(self, default: str = "the model in ringjax") -> None:
    """Defines --model and --strict of a script that loads a model.

    Args:
      default: Description of the default model, for --help.
    """
    self.model(
      "model",
      None,
      "Hugging Face folder, GGUF file, a name as of launch.fetch or on the "
      "Hugging Face Hub, such as Qwen/Qwen3-8B; default: "
      f"{default}.",
    )
    self.strict()

  def strict(self) -> None:
    """Defines --strict: refuse unknown keys of a config."""
    self.boolean(
      "strict",
      True,
      "Refuse keys of config.json that nothing reads and that may change the "
      "computation; else a warning names them.",
    )

  def rope_scaling(self) -> None:
    """Defines --rope_scaling: a longer context without training."""
    self._define(
      flags.DEFINE,
      _RopeScaling(),
      "rope_scaling",
      None,
      "A longer context than the model was trained for, by a scaling of its "
      "rotary embedding: yarn:factor=4, or linear, ntk, dynamic, llama3 or "
      "longrope; or with folded positions: dual_chunk:factor=4 or "
      "self_extend:factor=4. Default: as config.json says.",
    )

  def texts(self, name: str, default: list[str] | None, text: str) -> None:
    """Defines a list of texts with commas between."""
    self._define(flags.DEFINE_list, name, default, text)

  def choice(
    self, name: str, default: str | None, choices: Iterable[str], text: str
  ) -> None:
    """Defines a text that is one of `choices`."""
    self._define(flags.DEFINE_enum, name, default, list(choices), text)

  def whole(
    self,
    name: str,
    default: int | None,
    text: str,
    least: int | None = 1,
    most: int | None = None,
  ) -> None:
    """Defines an int, from `least` to `most`."""
    self._define(flags.DEFINE_integer, name, default, text, least, most)

  def number(
    self,
    name: str,
    default: float | None,
    text: str,
    least: float | None = None,
  ) -> None:
    """Defines a float, `least` or more."""
    self._define(flags.DEFINE_float, name, default, text, least)

  def boolean(self, name: str, default: bool | None, text: str) -> None:
    self._define(flags.DEFINE_bool, name, default, text)


def is_shown(flag: Any) -> bool:
  """Whether a flag is one that `FlagHelper` has defined, and no alias."""
  return getattr(flag, "heading", _HIDDEN) != _HIDDEN


def is_place(flag: Any) -> bool:
  """Whether the value of a flag is a file, a folder or an address."""
  return isinstance(flag.parser, _Path | _Place)


def names_of(define: Callable[[flags.FlagValues], None]) -> frozenset[str]:
  """Names of the flags that a function defines, without aliases."""
  values = flags.FlagValues()
  absl_names = set(values)
  define(values)
  return frozenset(
    name
    for name in set(values) - absl_names
    if getattr(values[name], "heading", "") != _HIDDEN
  )


def flag_name(kind: type[Config], name: str) -> str:
  """Name of the flag that sets an option of a config."""
  return kind.field(name)[0].metadata["flag"].name or name


def option_values(
  values: flags.FlagValues, kind: type[Config], names: Iterable[str]
) -> dict[str, Any]:
  """Values of options of a config, by name, from their flags.

  Options whose flags the script does not have are left out.
  """
  flag_names = {name: flag_name(kind, name) for name in names}
  return {
    name: values[flag].value
    for name, flag in flag_names.items()
    if flag in values
  }


def help_text(shown: Iterable[flags.Flag]) -> str:
  """Texts of flags below their headings, those without a heading first."""
  pages = {"": flags.FlagValues()}
  for flag in shown:
    heading = getattr(flag, "heading", "")
    pages.setdefault(heading, flags.FlagValues())[flag.name] = flag
  pages.pop(_HIDDEN, None)
  return "\n".join(
    f"{heading or 'Flags.'}\n{page.get_help('  ', False)}\n"
    for heading, page in pages.items()
  )
