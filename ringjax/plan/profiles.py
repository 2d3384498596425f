"""Profiles by name: stated ones, and those that a user measured.

The stated profiles are in `profiles.toml`, with their sources: a fit to
published times, and estimates that `Profile.scaled` derives from it.

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
  tables = tomllib.loads(path.read_text("utf-8"))
  fitted, base = Profile(**tables["fitted"]), tables["base"]
  profiles = {fitted.name: fitted}
  source = f"scaled from {fitted.name} by shape; not measured"
  for name, sizes in tables["scaled"].items():
    model = sizes.pop("model")
    profiles[name] = fitted.scaled(
      Shape(**base),
      Shape(**base | sizes),
      name=name,
      model=model,
      source=source,
    )
  return profiles


STATED = _stated()


def folder() -> str:
  """Folder of a user's profiles."""
  base = os.environ.get("XDG_DATA_HOME", "")
  # The XDG standard ignores relative paths.
  if not os.path.isabs(base):
    base = os.path.join(os.path.expanduser("~"), ".local", "share")
  return os.path.join(base, "ringjax", "profiles")


def names() -> tuple[str, ...]:
  """Names of all profiles that `load` finds."""
  try:
    entries = os.listdir(folder())
  except OSError:
    entries = []
  user_names = {
    entry.removesuffix(".json") for entry in entries if entry.endswith(".json")
  }
  return tuple(
    sorted(
      STATED.keys() | {name for name in user_names if _NAME.fullmatch(name)}
    )
  )


def load(name: str) -> Profile:
  """Load a profile by name, or by the path of its file (with a slash or .json).

  Raises:
    OptionError: If no profile has this name.
    CheckpointFormatError: If its file does not hold a profile.
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
  """Read the profile in a file.

  Raises:
    OptionError: If it cannot be read.
    CheckpointFormatError: If it does not hold a profile.
  """
  make = lambda body: files.as_dataclass(Profile, body)
  return files.load(path, FORMAT, make, "exactly the fields of a profile")


def store(profile: Profile) -> str:
  """Store a profile in the user's folder, replacing its namesake; its path.

  Raises:
    OptionError: If the name is a stated profile's or not fit for a file, or
      the folder cannot be written to.
  """
  check_name(profile.name)
  path = _path(profile.name)
  files.write(path, FORMAT, dataclasses.asdict(profile))
  return path


def check_name(name: str) -> None:
  """Check that a user's profile can have a name.

  Raises:
    OptionError: If it is a stated profile's, or not fit for a file.
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
