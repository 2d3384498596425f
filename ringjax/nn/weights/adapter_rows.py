"""Adapter of each row of a call, set while the call is traced."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jaxtyping import Array, Int

_ROWS: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "adapter_rows", default=None
)


@contextlib.contextmanager
def adapter_rows(rows: Int[Array, " B"] | None) -> Iterator[None]:
  """Set each row's adapter while a model is traced.

  Args:
    rows: Adapter of each row, int32 [B], 0 for none; or None without adapters.
  """
  token = _ROWS.set(rows)
  try:
    yield
  finally:
    _ROWS.reset(token)


def current_adapter_rows() -> Int[Array, " B"] | None:
  """The adapter of each row that `adapter_rows` has set, or None."""
  return _ROWS.get()
