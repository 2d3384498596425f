"""Short methods to define the flags of scripts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any

from absl import flags

from ringjax import fetched_models
from ringjax.config import Config

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()


class _Path(flags.ArgumentParser):
  """Parser that expands "~", as shells don't in `--model=~/folder`."""

  def parse(self, argument: str) -> str:
    return os.path.expanduser(str(argument))

  def flag_type(self) -> str:
    return "string"


def check_output(path: str) -> None:
  """Makes the folder of a file to write, and refuses what can't be written.

  A script may work for hours before it writes a file.

  Raises:
    ValueError: If the path is a directory or can't be written.
  """
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


class _Output(_Path):
  """Parser of a file to write, see `check_output`."""

  def parse(self, argument: str) -> str:
    path = super().parse(argument)
    check_output(path)
    return path


class _Model(_Path):
  """Parser of a path or of the name of a fetched model."""

  def parse(self, argument: str) -> str:
    path = super().parse(argument)
    return os.fspath(fetched_models.resolve(path, "--model"))


class FlagHelper:
  """Defines flags among `values`, each with a default and a help text."""

  def __init__(self, values: flags.FlagValues):
    self._values = {"flag_values": values}

  def text(self, name: str, default: str | None, text: str) -> None:
    flags.DEFINE_string(name, default, text, **self._values)

  def path(self, name: str, default: str | None, text: str) -> None:
    """Defines a path, or one with options after it; expands "~"."""
    flags.DEFINE(_Path(), name, default, text, **self._values)

  def output(self, name: str, default: str | None, text: str) -> None:
    """Defines a file to write; makes its folder, or refuses the path."""
    flags.DEFINE(_Output(), name, default, text, **self._values)

  def model(self, name: str, default: str | None, text: str) -> None:
    """Defines a model's folder or file, or the name of a fetched model."""
    flags.DEFINE(_Model(), name, default, text, **self._values)

  def options(self, kind: type[Config], names: Iterable[str]) -> None:
    """Defines flags of options of a config, which say what the options say.

    Args:
      kind: Class of the config.
      names: Names of its options that get a flag.
    """
    fields = {field.name: field for field in kind.fields()}
    for name in names:
      default: Any = fields[name].default
      facts = fields[name].metadata
      meaning = facts["meaning"].partition(". ")[0].removesuffix(".") + "."
      if facts["choices"] is not None:
        flags.DEFINE_enum(
          name, default, facts["choices"], meaning, **self._values
        )
      elif facts["least"] is not None:
        self.whole(name, default, meaning, facts["least"])
      else:
        self.text(name, default, meaning)

  def checkpoint(self, default: str = "the model in ringjax") -> None:
    """Defines --model and --strict of a script that loads a model.

    Args:
      default: Description of the default model, for --help.
    """
    self.model(
      "model",
      None,
      "Hugging Face folder, GGUF file or a name as of launch.fetch; default: "
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

  def texts(self, name: str, default: list[str] | None, text: str) -> None:
    """Defines a list of texts with commas between."""
    flags.DEFINE_list(name, default, text, **self._values)

  def whole(
    self,
    name: str,
    default: int | None,
    text: str,
    least: int | None = 1,
    most: int | None = None,
  ) -> None:
    """Defines an int, from `least` to `most`."""
    flags.DEFINE_integer(name, default, text, least, most, **self._values)

  def number(
    self,
    name: str,
    default: float | None,
    text: str,
    least: float | None = None,
  ) -> None:
    """Defines a float, `least` or more."""
    flags.DEFINE_float(name, default, text, least, **self._values)

  def boolean(self, name: str, default: bool | None, text: str) -> None:
    flags.DEFINE_bool(name, default, text, **self._values)
