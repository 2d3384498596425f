"""Membership of a worker in a router's cluster: join, beat, leave, join again.

Guarantees: the worker joins as soon as the router takes it, and again after
each lost connection, until it is closed; work of a lost connection is given up
before the next one begins. Leases of published pages are renewed while the
router is connected, by its heartbeats, and by nothing else.
Cost: one attempt to join every half second while there is no router; the two
threads of a `LiveLink` while there is one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringjax.checks import number
from ringjax.errors import OptionError, PeerError, PromptError
from ringjax.parallel.links.connection import Connection
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.control_link import checked_beat, dial
from ringjax.serve.cluster.routing import MOST_QUEUED
from ringjax.transfer import DeviceServer, Publisher, Ticket
from ringjax.transfer.client import Address

# Seconds to wait before joining again.
_AGAIN_S = 0.5


class Membership:
  """Connection of a worker to its router, made again whenever it was lost.

  Attributes:
    publisher: Publisher of the worker's pages; the worker closes it.
    link: The current or last connection to the router; None before the first.
    joined: Event, set while the worker is connected to the router.
    closed: Whether the worker joins no more.
    refused: Reason why the router refused the worker, or "".
    notice: Hint at an option without effect for this router, or "".
    tasks_taken: Number of tasks that the router has sent on this connection;
      the worker counts them, under its lock.
  """

  def __init__(
    self,
    work: threading.Condition,
    *,
    router: Address,
    key: bytes,
    host: str,
    port: int,
    lease_s: int | float,
    silence_s: int | float,
    beat_s: int | float,
    devices: DeviceServer | None = None,
    tickets: Callable[[], Sequence[Ticket]],
    join_fields: Callable[[], dict[str, Any]],
    notice: Callable[[bool], str],
    measure: Callable[[str], str],
    on_message: Callable[[dict[str, Any]], object],
    load: Callable[[], dict[str, Any]],
    on_join: Callable[[LiveLink], object],
    on_lost: Callable[[], object],
  ):
    """Open the port for pulls; `run` joins the router.

    Args:
      work: Lock of the worker's tasks, notified when they change.
      router: Host and port where instances join.
      key: Secret key that the whole cluster shares, at least 16 bytes.
      host: Address of this machine where others pull pages.
      port: Port for pulls; 0 takes a free one.
      lease_s: Seconds that pages stay published without renewal.
      silence_s: Seconds without a byte after which the router counts as lost.
      beat_s: Seconds between load reports to the router.
      devices: Sends pages from the devices, or None.
      tickets: Returns the tickets to renew.
      join_fields: Returns the message that asks to join.
      notice: Returns the notice for a router that streams pages, or does not.
      measure: Measures for a router that asks for times, with its error;
        returns why the worker can't join, or "" to try again.
      on_message: Function called with each message of the router.
      load: Returns the load report.
      on_join: Function called with each new link before it starts, with the
        lock held.
      on_lost: Function called after each link's end, to give up its tasks.

    Raises:
      OptionError: If a number of seconds is out of range, or the address is
        not free.
    """
    self._lease_s = number("lease_s", lease_s, above=0)
    self._silence_s, self._beat_s = checked_beat(silence_s, beat_s)
    if lease_s < 4 * beat_s:
      raise OptionError(
        "lease_s",
        lease_s,
        f"at least {4 * beat_s:g}, four times beat_s, which renews it",
        "pass a longer one",
      )
    self.publisher = Publisher(
      key,
      host=host,
      port=port,
      lease_s=lease_s,
      patience_s=silence_s,
      devices=devices,
    )
    self._work, self._router, self._key = work, router, key
    self._tickets = tickets
    self._join_fields, self._notice = join_fields, notice
    self._measure, self._load = measure, load
    self._on_message = on_message
    self._on_join, self._on_lost = on_join, on_lost
    self.joined, self.closed = threading.Event(), False
    self.refused = self.notice = ""
    self.link: LiveLink | None = None
    self.tasks_taken, self._renewed = 0, 0.0

  def run(self, alive: Callable[[], bool] = lambda: True) -> None:
    """Join the router, again after each lost connection, until it is closed.

    Args:
      alive: Function that returns whether the worker can still work.
    """
    while not self.closed and alive():
      wire = self._join()
      if wire is not None:
        ended = threading.Event()
        link = LiveLink(
          wire,
          on_message=lambda message: self._on_message(message.as_object),
          on_end=lambda _, ended=ended: ended.set(),
          beat=self._beat,
          beat_s=self._beat_s,
        )
        with self._work:
          if self.closed:
            wire.close()
            break
          self.tasks_taken, self.link, self.refused = 0, link, ""
          self._on_join(link)
        self.joined.set()
        link.start()
        ended.wait()
        self.joined.clear()
        self._on_lost()
      with self._work:
        self._work.wait_for(lambda: self.closed, _AGAIN_S)

  def leave(self, grace_s: int | float, idle: Callable[[], bool]) -> None:
    """Ask for no new work, and wait until the current work has ended.

    Args:
      grace_s: Maximum number of seconds to wait.
      idle: Function that returns whether no task is left.
    """
    if self.link is not None:
      self.link.tell("leave")
    with self._work:
      self._work.wait_for(
        lambda: idle() or not self.joined.is_set(), max(0.0, grace_s)
      )

  def close(self, why: str = "it is leaving") -> None:
    """Disconnect, and join no more."""
    with self._work:
      self.closed = True
      self._work.notify_all()
    if self.link is not None:
      self.link.close(why)

  def _join(self) -> Connection | None:
    """Connect to the router; the connection, or None if it refused."""
    try:
      wire = dial(self._router, self._key, self._silence_s)
    except PeerError as error:
      self.refused = str(error)
      return None
    try:
      wire.tell_object(self._join_fields())
      answer = wire.hear_object(1 << 20) or {}
    except PeerError as error:
      answer = {"error": str(error)}
    if answer.get("t") == "welcome":
      self.notice = self._notice(bool(answer.get("stream")))
      return wire
    wire.close()
    why = str(answer.get("error", "the router closed the connection"))
    self.refused = self._measure(why) if answer.get("t") == "measure" else why
    return None

  def _beat(self) -> dict[str, Any]:
    """Load report for the router; also renews the leases of published pages."""
    now_s = time.monotonic()
    if now_s - self._renewed > self._lease_s / 3:
      self._renewed = now_s
      for ticket in self._tickets():
        self.publisher.renew(ticket)
    return self._load()


def default_name(kind: str, publisher: Publisher) -> str:
  """Name of a worker from its kind, its host, its process and its port."""
  port = publisher.address[1]
  return f"{kind}-{socket.gethostname()}-{os.getpid()}-{port}"


def join_message(
  *,
  name: str,
  role: str,
  publisher: Publisher,
  codec: str,
  dtype: str,
  vocab: int,
  longest: int,
  page: int,
  capacity: int,
  rows: int,
  times: dict[str, Any] | None = None,
  roles: Sequence[str] | None = None,
  texts: bool = False,
  moves_pages: bool = True,
) -> dict[str, Any]:
  """Message that asks a router to let a worker join.

  Args:
    name: Name, unique in the cluster.
    role: Role to begin with.
    publisher: Publisher of the worker's pages.
    codec: Codec of these pages, equal for engines that can use each other's.
    dtype: Name of their dtype.
    vocab: Vocabulary size of the model.
    longest: Maximum total of prompt and generated tokens.
    page: Page size, in tokens.
    capacity: Tokens that fit at the same time.
    rows: Number of answers that are decoded at the same time.
    times: Measured times of calls, if there are any.
    roles: Roles that the worker can have; default: all.
    texts: Whether it scores and embeds texts.
    moves_pages: Whether it sends pages to others and pulls theirs.
  """
  return {
    "t": "join",
    "name": name,
    "role": role,
    **({} if roles is None else {"roles": list(roles)}),
    "texts": texts,
    "moves_pages": moves_pages,
    "address": publisher.address,
    "codec": codec,
    "dtype": dtype,
    "vocab": vocab,
    "longest": longest,
    "page": page,
    "capacity": capacity,
    "rows": rows,
    "times": times,
  }


def load_report(
  *,
  tasks_taken: int,
  queue: Sequence[tuple[int, int, int]],
  free_tokens: int,
  running_requests: int = 0,
  running_tokens: int = 0,
) -> dict[str, Any]:
  """Message that reports a worker's load to the router.

  Args:
    tasks_taken: Number of tasks that the report counts.
    queue: (task, tokens left, tokens computed) of each prompt in its order.
    free_tokens: Number of tokens for which there is room.
    running_requests: Number of requests in decode.
    running_tokens: Number of their tokens.
  """
  return {
    "t": "view",
    "taken": tasks_taken,
    "queued_requests": len(queue),
    "queued_tokens": sum(tokens_left for _, tokens_left, _ in queue),
    "queue": list(queue[:MOST_QUEUED]),
    "running_requests": running_requests,
    "running_tokens": running_tokens,
    "free_tokens": max(0, free_tokens),
  }


def tell_failure(link: LiveLink, task: int, error: object) -> None:
  """Report that no worker like this one can do a task."""
  refused = isinstance(error, OptionError | PromptError)
  link.tell("failed", id=task, error=str(error), refused=refused)
