"""Configs of real models, as in their config.json; without weights.

They are in `presets.toml`.
"""

from __future__ import annotations

import copy
import pathlib
import tomllib
from typing import Any

from ringjax.checks import one_of

_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name("presets.toml").read_text("utf-8")
)
# TOML has no null.
PRESETS: dict[str, dict[str, Any]] = {
  name: {key: None if x == "null" else x for key, x in table.items()}
  for name, table in _TABLES.items()
}


def preset(name: str) -> dict[str, Any]:
  """A copy of a preset's config, which the caller may change."""
  one_of(
    "config",
    name,
    sorted(PRESETS),
    remedy="pass one of these, or a dict as in config.json",
  )
  return copy.deepcopy(PRESETS[name])
