"""Profiles by name: some that are stated here, others that a user measured.

The A100 numbers are fits to published times: a Llama 7B on one GPU reads 1k,
2k, 4k, 8k, 12k tokens in 0.10, 0.24, 0.65, 1.95, 3.95 s (Cho et al. 2024,
arXiv 2405.05329, Table 3), which a n + b n^2 meets to 0.01 s. The floor is
what short prompts take on any number of GPUs. Its siblings are scaled from it,
see `Profile.scaled`: estimates, not fits.

A user's profiles lie in $XDG_DATA_HOME/ringjax/profiles, by default
~/.local/share/ringjax/profiles, one JSON file each.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from ringjax.errors import OptionError, RingjaxError
from ringjax.plan import files
from ringjax.plan.cost import Profile, Shape

FORMAT = "ringjax.profile"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_LLAMA7B = Profile(
  name="llama7b-a100",
  model="llama-7b",
  hardware="a100",
  source="fit to published times of one GPU, arXiv 2405.05329, Table 3",
  layers=32,
  token_s=7.715e-5,
  pair_s=1.979e-8,
  floor_s=0.095,
  kv_bytes=16384,
)


def _shape(
  layers: int, embed: int, hidden: int, heads: int, kv_heads: int, **more: Any
) -> Shape:
  return Shape(
    layers=layers,
    embed=embed,
    hidden=hidden,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=embed // heads,
    **more,
  )


_BASE = _shape(32, 4096, 11008, 32, 32)
_SIBLINGS = {
  "llama7b-gqa8-a100": ("llama-7b-gqa8", _shape(32, 4096, 11008, 32, 8)),
  "llama7b-mqa-a100": ("llama-7b-mqa", _shape(32, 4096, 11008, 32, 1)),
  "llama13b-a100": ("llama-13b", _shape(40, 5120, 13824, 40, 40)),
  "llama30b-a100": ("llama-30b", _shape(60, 6656, 17920, 52, 52)),
  "falcon1b-a100": (
    "falcon-1b",
    _shape(24, 2048, 8192, 32, 32, gated=False),
  ),
  "falcon7b-a100": (
    "falcon-7b",
    _shape(32, 4544, 18176, 71, 1, gated=False),
  ),
}

STATED: dict[str, Profile] = {
  _LLAMA7B.name: _LLAMA7B,
  **{
    name: _LLAMA7B.scaled(
      _BASE,
      shape,
      name=name,
      model=model,
      source="scaled from llama7b-a100 by shape; not measured",
    )
    for name, (model, shape) in _SIBLINGS.items()
  },
}


def folder() -> str:
  """Where a user's profiles lie."""
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
    OptionError: there is none.
    CheckpointFormatError: its file is not one.
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
      "choose one or measure it with --fit",
    )
  return read(path)


def read(path: str) -> Profile:
  """The profile in a file.

  Raises:
    OptionError: it cannot be read.
    CheckpointFormatError: it is no profile.
  """
  body = files.read(path, FORMAT)
  fields = {field.name: field for field in dataclasses.fields(Profile)}
  missing = [
    name
    for name, field in fields.items()
    if field.default is dataclasses.MISSING and name not in body
  ]
  more = sorted(body.keys() - fields.keys())
  if missing or more:
    raise files.fault(
      path,
      f"missing {missing}, unknown {more}",
      "exactly the fields of a profile",
    )
  for name, field in fields.items():
    value = body.get(name, field.default)
    kind, word = {
      "str": (str, "a text"),
      "int": (int, "an int"),
    }.get(f"{field.type}", (int | float, "a number"))
    if not isinstance(value, kind) or isinstance(value, bool):
      raise files.fault(path, f"{name} {value!r}", word)
  try:
    return Profile(**body)
  except RingjaxError as error:
    raise files.fault(path, f"{error}", "a valid profile") from None


def store(profile: Profile) -> str:
  """Stores a profile in the user's folder, over one of its name; its path.

  Raises:
    OptionError: the name is a stated profile's or none for a file, or the
      folder cannot be written to.
  """
  check_name(profile.name)
  path = _path(profile.name)
  files.write(path, FORMAT, dataclasses.asdict(profile))
  return path


def check_name(name: str) -> None:
  """Refuses names that no profile of a user's can have.

  Raises:
    OptionError: it is a stated profile's, or none for a file.
  """
  _path(name)
  if name in STATED:
    raise OptionError(
      "name", repr(name), "a name that is not taken", "choose another"
    )


def _path(name: str) -> str:
  if not _NAME.fullmatch(name):
    raise OptionError(
      "name",
      repr(name),
      "up to 64 letters, digits, '.', '_' and '-'",
      "choose another",
    )
  return os.path.join(folder(), f"{name}.json")
