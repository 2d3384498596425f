"""Links to the other members of a group: those that are in, left or were lost.

Guarantees: `on_lost` is called once for each member whose link ends, unless
this side ended it. In a group that works together, the first failure ends it:
each member gets the reason and the rank that failed, and all that wait for any
member are woken with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ringjax.errors import PeerError
from ringjax.parallel.links.live_link import LinkEnding, LiveLink

Member = TypeVar("Member")
# Seconds for the last messages of a group that ends.
_FLUSH_S = 1.0


class LinkGroup(Generic[Member]):
  """Links of this process to the other members of a group.

  Attributes:
    links: Links to the members that are in.
    left: Reasons of the members that have left, without a failure.
    lost: Reasons of the members that were lost, or have failed.
  """

  def __init__(
    self,
    on_lost: Callable[[Member, LiveLink], object] = lambda *_: None,
    *,
    together: bool,
  ):
    """Make an empty group.

    Args:
      on_lost: Function of a member and its link, called by another thread.
      together: Whether the group ends when one of its members fails.
    """
    self.links: dict[Member, LiveLink] = {}
    self.left: dict[Member, PeerError] = {}
    self.lost: dict[Member, PeerError] = {}
    self._on_lost, self._together = on_lost, together
    self._lock = threading.Lock()
    # Function that ends a link as the group has ended; None before.
    self._end_link: Callable[[LiveLink], object] | None = None

  def __len__(self) -> int:
    """Number of members that are in."""
    return len(self.links)

  def add(self, member: Member, link: LiveLink) -> None:
    """Add a member by its link, which is started afterwards.

    The link of one that comes when the group has ended ends as the others did,
    for the same reason.
    """
    link.on_end = lambda _: self._lost(member, link)
    with self._lock:
      end_link = self._end_link
      self.links[member] = link
    if end_link is not None:
      end_link(link)

  def remove(self, member: Member, why: str) -> None:
    """End the link to a member, which may have left already."""
    with self._lock:
      link = self.links.pop(member, None)
    if link is not None:
      link.close(why)

  def tell_all(
    self, kind: str, arrays: Sequence[np.ndarray] = (), /, **fields: Any
  ) -> None:
    """Queue a message to each member."""
    for link in list(self.links.values()):
      link.tell(kind, arrays, **fields)

  def close(self, why: str) -> None:
    """End all links, without a failure."""
    self._end(lambda link: link.close(why))

  def fail(self, why: str, *, blame: int | None = None) -> bool:
    """End all links, and report the failure of a rank, or of this process.

    Returns:
      Whether the group had not ended before.
    """
    return self._end(lambda link: link.fail(why, blame=blame))

  def _end(self, end_link: Callable[[LiveLink], object]) -> bool:
    with self._lock:
      if self._end_link is not None:
        return False
      self._end_link = end_link
      links = list(self.links.values())
    for link in links:
      end_link(link)
    until = time.monotonic() + _FLUSH_S
    for link in links:
      link.join(until - time.monotonic())
    return True

  def _lost(self, member: Member, link: LiveLink) -> None:
    error = link.error
    assert error is not None
    with self._lock:
      if self._end_link is not None or self.links.get(member) is not link:
        return
      has_left = link.ending is LinkEnding.LEFT
      # Those that read without the lock find the member in one of the tables.
      (self.left if has_left else self.lost)[member] = error
      del self.links[member]
    if (
      has_left or not self._together or self.fail(str(error), blame=error.rank)
    ):
      self._on_lost(member, link)
