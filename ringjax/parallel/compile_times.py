"""Time that JAX spends on tracing and compiling.

Cost: a list of spans, for the programs that are compiled while it is entered.
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
    """Record that something was compiled in `duration_s` seconds."""
    end_s = time.monotonic()
    self._spans.append((end_s - duration_s, end_s))

  def seconds(self, until: float = float("inf")) -> float:
    """Seconds before `until`; overlapping spans count once."""
    total, end = 0.0, -float("inf")
    for first, last in sorted(self._spans):
      last = min(last, until)
      total += max(0.0, last - max(first, end))
      end = max(end, last)
    return total


_LISTENING: list[Compiling] = []


@functools.cache
def _listen() -> None:
  """Register a listener, once: JAX cannot remove one."""

  def hear(event: str, duration_s: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
      for compiling in list(_LISTENING):
        compiling.took(duration_s)

  listener: Any = hear
  jax.monitoring.register_event_duration_secs_listener(listener)
