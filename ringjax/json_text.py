"""JSON for output: in files, on sockets, on the screen.

Guarantees: any JSON parser reads it. JSON has no NaN and no infinities: null is
written in their place. All other calls of `json.dump` and `json.dumps` in the
package pass `allow_nan` (`tests/test_structure.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

# A value of JSON as `json.loads` returns it.
Json = str | int | float | bool | None | list[Any] | dict[str, Any]


def json_text(
  value: object,
  *,
  default: Callable[[Any], Any] | None = None,
  **options: Any,
) -> str:
  """Format a value as JSON, null in place of numbers that are not finite.

  Args:
    value: A value that `json.dumps` takes.
    default: Function that converts other values to such a value, or None.
    **options: Options of `json.dumps`: indent, sort_keys, separators,
      ensure_ascii.

  Raises:
    TypeError: If it is another value, or what `default` raises.
    ValueError: If a value contains itself.
  """
  try:
    return json.dumps(value, default=default, allow_nan=False, **options)
  except ValueError:
    # Rare: values are only walked after a first attempt has failed.
    clean = None if default is None else lambda x: _finite(default(x))
    return json.dumps(_finite(value), default=clean, allow_nan=False, **options)


def _finite(value: Any) -> Any:
  """Replace each number in the value that is not finite by None.

  Values that are not of JSON stay, for the caller's `default`.
  """
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {key: _finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  return value
