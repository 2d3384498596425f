"""Tenants of a server: their keys, and their shares of its queue.

Guarantees: each tenant has a share of the queue that no other one takes, and
may have more while the common part has room.
"""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Callable

from ringjax.errors import OptionError


def read_keys(path: str | os.PathLike[str]) -> dict[str, str]:
  """Read tenants from a file, by their keys.

  Args:
    path: Path of a text file: a key and a tenant a line, and comments after #.

  Raises:
    OptionError: If a line has another form, a key is there twice, or there are
      no keys.
  """
  tenants: dict[str, str] = {}
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except (OSError, ValueError) as error:
    raise OptionError(
      "api_keys", error, "a text file", "pass its path"
    ) from None
  for n, line in enumerate(lines, 1):
    words = line.partition("#")[0].split()
    if not words:
      continue
    # The error does not show the line, which contains a key.
    if len(words) != 2 or words[0] in tenants or not words[0].isascii():
      raise OptionError(
        "api_keys",
        f"line {n} of {path}",
        "a key of ASCII, not used before, and a tenant",
        "write KEY TENANT",
      )
    tenants[words[0]] = words[1]
  if not tenants:
    raise OptionError("api_keys", f"no keys in {path}", "some", "add a line")
  return tenants


class TenantShares:
  """Numbers of answers in flight by tenant, and their limits.

  Half of all belongs to the tenants in equal parts, at least one to each; the
  rest is first come, first served. A single tenant may have all.
  """

  def __init__(self, tenants: int, most: Callable[[], int]):
    """Begins with no answers in flight.

    Args:
      tenants: Number of tenants.
      most: Function that returns the limit of all tenants together.
    """
    self._tenants, self._most = tenants, most
    self._taken: collections.Counter[str] = collections.Counter()

  def in_flight(self, tenant: str) -> int:
    """Number of answers that a tenant has in flight."""
    return self._taken[tenant]

  def limit(self) -> int:
    """Maximum answers of a tenant when no other one has any."""
    return sum(self._parts())

  def take(self, tenant: str, count: int) -> bool:
    """Adds answers to a tenant if they fit; whether they did."""
    part, free = self._parts()
    beyond = lambda name, more=0: max(0, self._taken[name] + more - part)
    others = sum(beyond(name) for name in self._taken if name != tenant)
    if beyond(tenant, count) > max(0, free - others):
      # A tenant is never refused within its own share.
      return False
    self._taken[tenant] += count
    return True

  def give(self, tenant: str, count: int) -> None:
    """Removes answers that have ended."""
    self._taken[tenant] -= count
    if not self._taken[tenant]:
      del self._taken[tenant]

  def _parts(self) -> tuple[int, int]:
    """Share of each tenant, and the part that they have in common."""
    limit = self._most()
    if self._tenants < 2:
      return limit, 0
    tenant_share = limit // (2 * self._tenants)
    return max(1, tenant_share), limit - tenant_share * self._tenants
