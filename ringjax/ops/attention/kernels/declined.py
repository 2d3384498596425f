"""What is said to who insists on a kernel that declines the call."""

from __future__ import annotations

from ringjax.errors import OptionError


def check(kernel: object, why: str | None) -> None:
  """Refuses the call that a kernel declines.

  Args:
    kernel: the local algorithm.
    why: what its `decline` said, or None.

  Raises:
    OptionError: it declined.
  """
  if why is None:
    return
  raise OptionError(
    "local",
    f"{type(kernel).__name__}() for {why}",
    "a call that this kernel serves",
    "pass local=AutoKernel(), which takes what serves each call",
  )
