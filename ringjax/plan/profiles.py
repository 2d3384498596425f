"""Profiles by name: stated ones, and others that a user measured.

The stated profiles are in `profiles.toml`, with their sources: a fit to
published times, and estimates that `Profile.scaled` makes of it.

A user's profiles are in $XDG_DATA_HOME/ringjax/profiles, by default
~/.local/share/ringjax/profiles, one JSON file each.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tomllib

from ringjax.errors import OptionError
from ringjax.plan import files
from ringjax.plan.cost import Profile, Shape

FORMAT = "ringjax.profile"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _stated() -> dict[str, Profile]:
  path = pathlib.Path(__file__).with_name("profiles.toml")
  given = tomllib.loads(path.read_text("utf-8"))
  fitted, base = Profile(**given["fitted"]), given["base"]
  found = {fitted.name: fitted}
  source = f"scaled from {fitted.name} by shape; not measured"
  for name, sizes in given["scaled"].items():
    model = sizes.pop("model")
    found[name] = fitted.scaled(
      Shape(**base),
      Shape(**base | sizes),
      name=name,
      model=model,
      source=source,
    )
  return found


STATED = _stated()


def folder() -> str:
  """The folder of a user's profiles."""
  base = os.environ.get("XDG_DATA_HOME", "")
  # The standard has relative paths ignored.
  if not os.path.isabs(base):
    base = os.path.join(os.path.expanduser("~"), ".local", "share")
  return os.path.join(base, "ringjax", "profiles")


def names() -> tuple[str, ...]:
  """All profiles that `load` finds by name."""
  try:
    entries = os.listdir(folder())
  except OSError:
    entries = []
  mine = {e.removesuffix(".json") for e in entries if e.endswith(".json")}
  return tuple(sorted(STATED.keys() | {n for n in mine if _NAME.fullmatch(n)}))


def load(name: str) -> Profile:
  """A profile by name, or by the path of its file (with a slash or .json).

  Raises:
    OptionError: no profile has this name.
    CheckpointFormatError: its file does not hold a profile.
  """
  if name in STATED:
    return STATED[name]
  if os.sep in name or name.endswith(".json"):
    return read(name)
  path = _path(name)
  if not os.path.exists(path):
    raise OptionError(
      "profile",
      repr(name),
      f"one of {', '.join(names())}",
      "pass one of these, or measure it with --fit",
    )
  return read(path)


def read(path: str) -> Profile:
  """The profile in a file.

  Raises:
    OptionError: it cannot be read.
    CheckpointFormatError: it does not hold a profile.
  """
  make = lambda body: files.as_dataclass(Profile, body)
  return files.load(path, FORMAT, make, "exactly the fields of a profile")


def store(profile: Profile) -> str:
  """Stores a profile in the user's folder, over one of its name; its path.

  Raises:
    OptionError: the name is a stated profile's or not fit for a file, or the
      folder cannot be written to.
  """
  check_name(profile.name)
  path = _path(profile.name)
  files.write(path, FORMAT, dataclasses.asdict(profile))
  return path


def check_name(name: str) -> None:
  """Refuses names that a user's profile cannot have.

  Raises:
    OptionError: it is a stated profile's, or not fit for a file.
  """
  _path(name)
  if name in STATED:
    raise OptionError(
      "name", repr(name), "a name that is not taken", "pass another name"
    )


def _path(name: str) -> str:
  if not _NAME.fullmatch(name):
    raise OptionError(
      "name",
      repr(name),
      "up to 64 letters, digits, '.', '_' and '-'",
      "pass a name of these",
    )
  return os.path.join(folder(), f"{name}.json")
