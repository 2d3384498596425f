"""Treatment of keys of a config.json that no reader of a family knows.

Guarantees: a key that the family's class in transformers also knows may change
the computation and is an error, and so is any key of a folder with custom code,
which may read it. For all others transformers computes the same with and
without them: a warning names them. The keys that each class knows are in
`../known_keys.json`, made by `tests/fixtures/known_keys.py`.
"""

from __future__ import annotations

import functools
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

_FILE = pathlib.Path(__file__).parents[1] / "known_keys.json"
# Largest number of names in a warning.
_SHOWN = 20
_CODE = "auto_map"
# Entry of a GGUF file's config: its metadata that nothing has read, and that
# may change the computation.
GGUF_KEYS = "gguf_keys"
# Classes of a folder's code that read no config of a model.
_OTHER_CLASSES = frozenset({
  "AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor",
  "AutoTokenizer", "AutoVideoProcessor",
})  # fmt: skip


@functools.cache
def _known(model_type: str) -> frozenset[str] | None:
  """Keys that transformers knows of a model; None if it has no such model."""
  table = json.loads(_FILE.read_text("utf-8"))
  if model_type not in table:
    return None
  return frozenset(table["everywhere"]) | frozenset(table[model_type])


class UnknownKeys:
  """The keys of one config.json that were not read.

  Attributes:
    ignored: Paths of keys that are left out without a change, as they come.
    overruled: Paths of keys that `strict=False` leaves out.
  """

  def __init__(self, config: Mapping[str, Any], *, strict: bool = True):
    """Begins with no unread keys.

    Args:
      config: Content of the whole file.
      strict: Whether a key that may change the computation is an error.
    """
    self._strict = strict
    code = config.get(_CODE) or {}
    self._own_code = not isinstance(code, Mapping) or bool(
      set(code) - _OTHER_CLASSES
    )
    self._types = [config.get("model_type")]
    self.ignored: list[str] = []
    self.overruled: list[str] = []

  def text_of(self, model_type: object) -> None:
    """Adds the type of the text model, whose class also reads keys."""
    self._types.append(model_type)

  def harmless(self, key: str) -> bool:
    """Whether transformers computes the same without a key."""
    if self._own_code or key == GGUF_KEYS:
      return False
    tables = [_known(x) for x in self._types if isinstance(x, str)]
    return all(keys is not None and key not in keys for keys in tables)

  def leave_out(self, path: str) -> bool:
    """Records an unread key; returns whether it may be left out.

    Args:
      path: Name of the key, after the names of the objects around it and
        dots.
    """
    *parts, key = path.split(".")
    # The tables of transformers say nothing about keys in an object that only
    # other programs read.
    foreign = bool(parts) and self.harmless(parts[0])
    if self.harmless(key) and not foreign:
      self.ignored.append(path)
    elif not self._strict:
      self.overruled.append(path)
    else:
      return False
    return True

  def remedy(self) -> str:
    """The advice about a key that is refused."""
    note = " (code of the folder may read it)" if self._own_code else ""
    return (
      f"if it does not change the computation{note}, remove it or pass "
      "strict=False (--nostrict)"
    )

  def without_overruled(self, source: dict[str, Any]) -> dict[str, Any]:
    """A config without the keys that `strict=False` has left out."""
    for path in self.overruled:
      source = _without(source, path.split("."))
    return source

  def warn(self) -> None:
    """Warns about all keys that were left out, if there are any."""
    parts = []
    if self.ignored:
      parts.append(
        f"ignored as transformers does: {_listed(self.ignored)}",
      )
    if self.overruled:
      parts.append(
        "left out by strict=False, though they may change the computation: "
        + _listed(self.overruled)
      )
    if parts:
      warnings.warn(
        f"config.json: keys that are not read; {'; '.join(parts)}",
        UserWarning,
        stacklevel=2,
      )


def _without(source: dict[str, Any], parts: list[str]) -> dict[str, Any]:
  """A copy without the key at a path, if it is there."""
  key, *inner_path = parts
  if key not in source:
    return source
  if not inner_path:
    return {k: v for k, v in source.items() if k != key}
  inner = source[key]
  if not isinstance(inner, dict):
    return source
  return {**source, key: _without(inner, inner_path)}


def _listed(paths: list[str]) -> str:
  """Lists up to `_SHOWN` names."""
  names = [path if len(path) <= 60 else f"{path[:57]}..." for path in paths]
  more_text = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return ", ".join(names[:_SHOWN]) + more_text
