"""The error of a kernel that was passed for a call which it declines."""

from __future__ import annotations

from typing import Any

from ringjax.errors import OptionError


def check(kernel: Any, *call: Any) -> None:
  """Raises OptionError if a kernel declines a call.

  Args:
    kernel: the kernel.
    *call: the arguments of its `decline`.
  """
  why = kernel.decline(*call)
  if why is None:
    return
  raise OptionError(
    "local",
    f"{type(kernel).__name__}() for {why}",
    "a call that this kernel serves",
    "pass local=AutoKernel(), which takes what serves each call",
  )
