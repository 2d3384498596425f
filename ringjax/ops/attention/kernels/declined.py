"""Error for a kernel that was passed explicitly but declines the call."""

from __future__ import annotations

from typing import Any

from ringjax.errors import OptionError


def check(kernel: Any, *call: Any) -> None:
  """Raise OptionError if a kernel declines a call.

  Args:
    kernel: Kernel to ask.
    *call: Arguments of its `decline`.
  """
  reason = kernel.decline(*call)
  if reason is None:
    return
  raise OptionError(
    "local",
    f"{type(kernel).__name__}() for {reason}",
    "a call that this kernel serves",
    "pass local=AutoKernel(), which takes what serves each call",
  )
