"""How long JAX traces and compiles.

Cost: a list of spans, of those programs that are compiled while it is entered.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax


class Compiling:
  """Seconds that JAX traces and compiles, while it is entered."""

  def __init__(self) -> None:
    self._spans: list[tuple[float, float]] = []

  def __enter__(self) -> Compiling:
    _listen()
    _LISTENING.append(self)
    return self

  def __exit__(self, *_: object) -> None:
    _LISTENING.remove(self)

  def took(self, duration_s: float) -> None:
    """Something was compiled, and took so long."""
    now = time.monotonic()
    self._spans.append((now - duration_s, now))

  def seconds(self, until: float = float("inf")) -> float:
    """Of the time before `until`; what overlaps counts once."""
    total, end = 0.0, -float("inf")
    for first, last in sorted(self._spans):
      last = min(last, until)
      total += max(0.0, last - max(first, end))
      end = max(end, last)
    return total


_LISTENING: list[Compiling] = []


@functools.cache
def _listen() -> None:
  """Once: what listens cannot be taken away again."""

  def hear(event: str, duration_s: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
      for one in list(_LISTENING):
        one.took(duration_s)

  listener: Any = hear
  jax.monitoring.register_event_duration_secs_listener(listener)
