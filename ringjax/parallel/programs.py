"""Bound on the number of compiled programs that a process keeps.

Guarantees: the compiler of a process that runs many shapes does not run out of
memory mappings, at which point it would end the process. On Linux a process
may have `vm.max_map_count` of them, 65,530 by default; a program on a CPU takes
a few for each of its fusions, one of `generate` hundreds. Above half of them
the package's own programs are released, and those in use are compiled again;
where that is not enough, all of JAX's caches are cleared, with a warning.
Cost: only an addition if nothing was compiled since the last check; else one
read of /proc/self/maps, 0.7 ms for each 1,000 mappings or less.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MAPS = pathlib.Path("/proc/self/maps")
_MOST = pathlib.Path("/proc/sys/vm/max_map_count")
# Shares of the mappings above which programs, and all caches, are released.
_OWN, _ALL = 0.5, 0.7
# The package's jitted functions; see `bounded`.
_own: list[Any] = []


class _Compiled:
  """Number of compiled programs, now and at the last check."""

  count = 0
  seen = 0


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
  del duration_secs
  if event.endswith("backend_compile_duration"):
    _Compiled.count += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def bounded(function: _Function) -> _Function:
  """Register a jitted function whose programs `make_room` may release."""
  _own.append(function)
  return function


def mappings() -> int | None:
  """Number of memory mappings of this process, or None if unknown."""
  try:
    with _MAPS.open("rb") as file:
      parts = iter(functools.partial(file.read, 1 << 20), b"")
      return sum(part.count(b"\n") for part in parts)
  except OSError:
    return None


def most_mappings() -> int:
  """Largest number of memory mappings that a process may have."""
  try:
    return int(_MOST.read_text())
  except (OSError, ValueError):
    return 65_530


def make_room() -> None:
  """Release programs if the process nears its limit of memory mappings.

  Called by the package's functions that compile a program for each shape,
  before they compile.
  """
  if _Compiled.seen == _Compiled.count:
    return
  _Compiled.seen, cap = _Compiled.count, most_mappings()
  used = mappings()
  if used is None or used <= _OWN * cap:
    return
  for function in _own:
    function.clear_cache()
  gc.collect()
  used = mappings()
  if used is None or used <= _ALL * cap:
    return
  jax.clear_caches()
  gc.collect()
  warnings.warn(
    f"{used:,} of the {cap:,} memory mappings that this process may have were "
    "taken: all programs in JAX's caches were let go, and are compiled "
    "again where they are used. Raise vm.max_map_count, or compile fewer "
    "shapes",
    RuntimeWarning,
    stacklevel=3,
  )
