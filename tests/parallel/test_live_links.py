"""Links and groups of them: what dies, freezes, leaves or fails is named."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ringjax.errors import OptionError, PeerError
from ringjax.parallel.links import live_link
from ringjax.parallel.links.array_messages import receive_arrays
from ringjax.parallel.links.connection import Connection, HostileMessageError
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LinkEnding, LiveLink
from tests.helpers import until

ROOT = pathlib.Path(__file__).parents[2]
KEY = bytes(range(32))
# Nothing here takes long; what hangs ends.
PATIENCE_S = 240


@contextlib.contextmanager
def pair(
  patience_s: float = 60.0,
  own_end: dict[str, Any] | None = None,
  peer_end: dict[str, Any] | None = None,
) -> Iterator[tuple[LiveLink, LiveLink]]:
  """Both sides of a link: "a" is seen by `peer_end`, "b" by `own_end`."""
  links = [
    LiveLink(Connection(end, patience_s, name), rank=rank, **(options or {}))
    for end, name, rank, options in zip(
      socket.socketpair(), ("b", "a"), (1, 0), (own_end, peer_end), strict=True
    )
  ]
  try:
    yield links[0].start(), links[1].start()
  finally:
    for link in links:
      link.close()
      link.join(PATIENCE_S)


def error_of(call: Callable[[], object]) -> PeerError:
  with pytest.raises(PeerError) as raised:
    call()
  return raised.value


def waiting(link: LiveLink, count: int) -> list[PeerError]:
  """Errors of threads that wait for messages, once the link has ended."""
  errors: list[PeerError] = []

  def wait() -> None:
    try:
      link.take()
    except PeerError as error:
      errors.append(error)

  threads = [threading.Thread(target=wait) for _ in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
  return errors


# ---------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------


def test_messages_arrive_in_order_with_their_arrays():
  rows = np.arange(6, dtype=np.float32).reshape(2, 3)
  with pair() as (a, b):
    for n in range(3):
      a.tell("row", [rows[n % 2]], n=n)
    b.send("done", [])
    for n in range(3):
      message = b.take("row")
      assert message.fields == {"n": n}
      np.testing.assert_array_equal(message.arrays[0], rows[n % 2])
    assert a.take().kind == "done"


def test_a_function_gets_the_messages_and_the_reason_of_the_end():
  kinds: list[str] = []
  ends: list[PeerError] = []
  options = {"on_message": lambda m: kinds.append(m.kind)}
  with pair(peer_end=options | {"on_end": ends.append}) as (a, b):
    a.tell("first")
    a.tell("second")
    a.close("the work is done")
    until(lambda: ends)
    assert kinds == ["first", "second"]
    assert [str(error) for error in ends] == ["a left: the work is done"]
    assert b.ending is LinkEnding.LEFT


def test_a_beat_may_carry_fields():
  loads: list[Any] = []
  beat = lambda: {"t": "load", "free": 3}
  with pair(
    own_end={"beat": beat, "beat_s": 0.01},
    peer_end={"on_message": lambda m: loads.append((m.kind, m.fields))},
  ):
    until(lambda: len(loads) > 2)
  assert loads[0] == ("load", {"free": 3})


def test_the_patience_of_the_other_side_sets_the_beats():
  own_end, peer_end = socket.socketpair()
  ready = threading.Event()
  a = LiveLink(Connection(own_end, 600.0, "b"))
  b = LiveLink(
    Connection(peer_end, 0.5, "a"),
    beat=lambda: {"t": "load"},
  )
  a.start(), b.start()
  # "a" alone would beat every two minutes.
  threading.Timer(1.5, ready.set).start()
  while not ready.is_set():
    a.take("load", within_s=60.0)
  assert b.error is None
  for link in (a, b):
    link.close()
    link.join(PATIENCE_S)


def test_a_message_of_another_kind_is_refused():
  with pair(peer_end={"kinds": ("row",)}) as (a, b):
    a.tell("column")
    error = error_of(b.take)
    assert b.ending is LinkEnding.BROKEN and "column" in str(error)
    assert "given up by b" in str(error_of(a.take))
  with pair() as (a, b):
    a.tell("column")
    with pytest.raises(HostileMessageError, match="column; expected row"):
      b.take("row")


@pytest.mark.parametrize(
  "shape",
  [[0, 1 << 39, 1 << 39], [1 << 39, 1 << 39, 0], [1 << 35, 0], [1 << 36]],
)
def test_shapes_of_no_array_are_refused(shape):
  own_end, peer_end = socket.socketpair()
  with own_end, peer_end:
    header = {"t": "row", "x": [["float32", shape]]}
    Connection(peer_end, 60.0, "a").tell_object(header)
    with pytest.raises(HostileMessageError, match="not of the protocol"):
      receive_arrays(Connection(own_end, 60.0, "b"))


def test_arrays_of_no_elements_arrive():
  with pair() as (a, b):
    a.tell("row", [np.zeros((0, 3, 1 << 20), np.float32)])
    assert b.take("row").arrays[0].shape == (0, 3, 1 << 20)


def test_an_error_of_the_function_ends_the_link():
  def refuse(message: Any) -> None:
    raise OptionError("role", "cook", "a waiter", "pass one")

  with pair(peer_end={"on_message": refuse}) as (a, b):
    a.tell("role")
    assert "cook" in str(error_of(a.take))
    assert b.ending is LinkEnding.BROKEN


def test_an_error_that_no_one_expects_ends_the_link(monkeypatch):
  with pair() as (a, b):

    def fail(*_: Any) -> None:
      raise MemoryError("no room for it")

    monkeypatch.setattr(b.wire, "frame", fail)
    a.tell("row")
    error = error_of(b.take)
    assert str(error) == "this process failed: MemoryError: no room for it"
    assert b.ending is LinkEnding.BROKEN and error.rank is None
    peer_error = error_of(a.take)
    assert str(peer_error) == "b failed: MemoryError: no room for it"
    assert peer_error.rank == 1


def fail_here(*_: Any) -> Any:
  raise RuntimeError("no room")


@pytest.mark.parametrize(
  ("options", "message", "why"),
  [
    ({"beat": fail_here}, {}, "RuntimeError: no room"),
    ({"beat": lambda: {"t": "load", "n": {1}}}, {}, "AttributeError: 'set'"),
    ({"on_message": fail_here}, {}, "RuntimeError: no room"),
    ({}, {"n": {1}}, "a message to a: 'set'"),
  ],
)
def test_an_error_of_a_process_is_blamed_on_it(options, message, why):
  with pair(peer_end={"own_rank": 1} | options) as (a, b):
    a.tell("row")
    if message:
      b.tell("row", **message)
    until(lambda: b.error is not None)
    assert str(b.error).startswith(f"rank 1 failed: {why}")
    assert b.error.rank == 1 and b.ending is LinkEnding.BROKEN
    # The other side gets the reason, and blames the same process.
    until(lambda: a.error is not None)
    assert str(a.error).startswith(f"b failed: {why}")
    assert a.error.rank == 1 and a.ending is LinkEnding.TOLD


def test_a_message_without_its_fields_is_blamed_on_its_sender():
  with pair(peer_end={"on_message": lambda m: m.fields["n"]}) as (a, b):
    a.tell("row")
    until(lambda: a.error is not None)
    assert b.error.rank == 0 and "not of the protocol" in str(b.error)
    assert "this process was given up by b" in str(a.error)
    assert a.error.rank is None


# ---------------------------------------------------------------------------
# Ends
# ---------------------------------------------------------------------------


def test_one_that_is_gone_is_noticed_by_all_that_wait():
  with pair() as (a, b):
    threading.Timer(0.05, a.wire.close).start()
    errors = waiting(b, 3)
    assert [str(error) for error in errors] == ["a closed the connection"] * 3
    assert errors[0].rank == 0 and b.ending is LinkEnding.CLOSED
    # Whoever comes later gets the same reason, and nothing can be sent.
    assert error_of(b.take) is b.error is error_of(lambda: b.send("row"))


def test_one_whose_messages_are_dropped_is_silent(monkeypatch):
  with pair(patience_s=0.4) as (a, b):
    # Half-open: nothing of "a" arrives, though it hears the other side.
    monkeypatch.setattr(a.wire, "send", lambda *_: None)
    assert str(error_of(b.take)) == "a did nothing for 0.4 s"
    assert b.ending is LinkEnding.SILENT
    # It learns that it was given up, and why.
    assert "this process was given up by b: a did nothing" in str(
      error_of(a.take)
    )


def test_one_that_computes_for_long_is_not_silent():
  with pair(patience_s=0.2) as (a, b):
    threading.Timer(1.0, lambda: a.tell("result")).start()
    assert b.take("result").kind == "result"


def test_one_that_is_stuck_beats_but_answers_nothing():
  with pair(patience_s=0.2) as (_, b):
    error = error_of(lambda: b.take("answer", within_s=0.6))
    assert str(error) == "a has answered nothing for 0.6 s"
    assert error.rank == 0 and b.error is None


def test_a_failure_is_told_with_the_rank_at_fault():
  with pair() as (a, b):
    a.fail("no memory")
    error = error_of(b.take)
    assert (str(error), error.rank) == ("a failed: no memory", 0)
    assert b.ending is LinkEnding.TOLD
  with pair() as (a, b):
    a.fail("rank 7 is gone", blame=7)
    assert (str(error_of(b.take)), error_of(b.take).rank) == (
      "rank 7 is gone",
      7,
    )
  with pair(peer_end={"own_rank": 1}) as (a, b):
    a.fail("it is late", blame=1)
    error = error_of(b.take)
    assert str(error) == "rank 1 was given up by a: it is late"
    assert error.rank == 1


def test_the_first_reason_stays_and_the_end_is_told_once():
  ends: list[PeerError] = []
  with pair(own_end={"on_end": ends.append}) as (a, b):
    a.close("first")
    a.close("second")
    a.fail("third")
    b.close("fourth")
    until(lambda: ends)
    until(lambda: not a._receiver.is_alive())
  assert [str(error) for error in ends] == ["first"]


def test_a_reason_precedes_a_send_that_fails():
  with pair() as (a, b):
    a.fail("no memory")
    until(lambda: not a._sender.is_alive())

    def send() -> None:
      while True:
        b.send("row", [np.zeros(1 << 20, np.float32)])

    assert str(error_of(send)) == "a failed: no memory"


def test_messages_before_the_end_are_not_lost():
  with pair() as (a, b):
    a.tell("last")
    a.close("done")
    until(lambda: b.error is not None)
    assert b.take("last").kind == "last"
    assert "done" in str(error_of(b.take))


def test_telling_never_waits_for_one_that_reads_nothing():
  own_end, peer_end = socket.socketpair()
  link = LiveLink(Connection(own_end, 0.5, "b")).start()
  with peer_end:
    for _ in range(64):
      link.tell("row", [np.zeros(1 << 18, np.float32)])
    assert link.error is None
    until(lambda: link.error is not None)
  assert link.ending is LinkEnding.SILENT


def test_one_that_reads_too_slowly_is_given_up(monkeypatch):
  """A single long message is sent; those that queue after it have a limit."""
  monkeypatch.setattr(live_link, "MOST_QUEUED_BYTES", 1 << 20)
  row = np.zeros(1 << 17, np.float32)
  with pair() as (a, b):
    a.tell("long", [np.zeros(1 << 20, np.float32)])
    assert b.take().arrays[0].size == 1 << 20
    for _ in range(4):
      # What was sent does not count.
      until(lambda: not a._queued_bytes)
      a.tell("row", [row])
      b.take()
    assert a.error is None
  own_end, peer_end = socket.socketpair()
  link = LiveLink(Connection(own_end, 60.0, "rank 2"), rank=2).start()
  with peer_end:
    for _ in range(8):
      link.tell("row", [row])
      # It reads, but not as much as comes.
      peer_end.recv(1 << 10)
    until(lambda: not link._receiver.is_alive())
  assert link.error is not None and link.error.rank == 2
  assert link.ending is LinkEnding.SLOW
  assert "rank 2 receives too slowly" in str(link.error)
  assert link._queued_bytes <= (1 << 20) + row.nbytes + 100


def test_the_reason_of_an_end_before_the_start_is_not_lost():
  for _ in range(20):
    # Over TCP, where sending to a closed socket breaks the connection.
    with socket.create_server(("127.0.0.1", 0)) as server:
      a_end = socket.create_connection(server.getsockname())
      b_end, _ = server.accept()
    a = LiveLink(Connection(a_end, 60.0, "b")).start()
    a.close("the work is done")
    a.join(PATIENCE_S)
    b = LiveLink(Connection(b_end, 60.0, "a")).start()
    assert str(error_of(b.take)) == "a left: the work is done"
    assert b.ending is LinkEnding.LEFT


def test_a_link_can_be_made_again_after_its_end():
  for _ in range(2):
    with pair() as (a, b):
      a.tell("row")
      assert b.take("row")
      a.wire.close()
      assert error_of(b.take).rank == 0


# ---------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def group_of(
  members: int, *, together: bool, patience_s: float = 60.0
) -> Iterator[tuple[LinkGroup[int], list[LiveLink], list[Any]]]:
  """A group, the other sides of its links, and the members that were lost."""
  lost: list[Any] = []

  def note(member: int, link: LiveLink) -> None:
    lost.append((member, str(link.error)))

  group: LinkGroup[int] = LinkGroup(note, together=together)
  sides = []
  for n in range(1, members + 1):
    own_end, peer_end = socket.socketpair()
    group.add(n, LiveLink(Connection(own_end, patience_s, f"rank {n}"), rank=n))
    sides.append(
      LiveLink(Connection(peer_end, patience_s, "rank 0"), rank=0, own_rank=n)
    )
  for link in (*group.links.values(), *sides):
    link.start()
  try:
    yield group, sides, lost
  finally:
    group.close("the test is over")
    for link in sides:
      link.close()


def test_a_group_continues_without_one_that_is_lost():
  with group_of(3, together=False) as (group, sides, lost):
    sides[1].wire.close()
    until(lambda: lost)
    group.tell_all("row")
    assert sides[0].take("row") and sides[2].take("row")
    assert lost == [(2, "rank 2 closed the connection")]
    assert sorted(group.links) == [1, 3] and [*group.lost] == [2]
    # A new process takes the place of the lost one.
    own_end, peer_end = socket.socketpair()
    link = LiveLink(Connection(own_end, 60.0, "rank 2"), rank=2)
    group.add(2, link)
    link.start()
    again = LiveLink(Connection(peer_end, 60.0, "rank 0")).start()
    group.tell_all("row")
    assert again.take("row") and len(group) == 3
    again.close()


def test_who_was_removed_is_not_lost():
  with group_of(2, together=False) as (group, sides, lost):
    group.remove(1, "it is slow")
    assert "it is slow" in str(error_of(sides[0].take))
    group.remove(1, "twice")
    sides[1].wire.close()
    until(lambda: lost)
  assert lost == [(2, "rank 2 closed the connection")]


def test_the_first_failure_ends_a_group_that_works_together():
  with group_of(3, together=True) as (group, sides, lost):
    threading.Timer(0.05, sides[2].wire.close).start()
    # One that waits for another member is woken, and the others are told.
    errors = [error_of(link.take) for link in (group.links[1], *sides[:2])]
    text = "rank 3 closed the connection"
    assert [(str(x), x.rank) for x in errors] == [(text, 3)] * 3
    until(lambda: lost)
  assert lost == [(3, text)]


def test_a_blamed_member_is_told_by_whom():
  with group_of(2, together=True) as (group, sides, lost):
    group.fail("rank 1 is stuck", blame=1)
    blamed, second = (error_of(side.take) for side in sides)
    assert str(blamed) == "rank 1 was given up by rank 0: rank 1 is stuck"
    assert (str(second), second.rank, blamed.rank) == ("rank 1 is stuck", 1, 1)
    assert not lost


def test_one_that_leaves_does_not_end_a_group():
  with group_of(2, together=True) as (group, sides, lost):
    sides[0].close("it has all it needs")
    until(lambda: lost)
    group.tell_all("row")
    assert sides[1].take("row")
  assert lost == [(1, "rank 1 left: it has all it needs")]


@pytest.mark.parametrize("blame", [None, 2, 3])
@pytest.mark.parametrize("added", ["before the failure", "after the failure"])
def test_a_member_that_is_not_started_is_told_why(added, blame):
  own_end, peer_end = socket.socketpair()
  peer_link = LiveLink(Connection(peer_end, 60.0, "rank 0"), rank=0, own_rank=3)
  peer_link.start()
  group: LinkGroup[int] = LinkGroup(together=True)
  own_link = LiveLink(Connection(own_end, 60.0, "rank 3"), rank=3)
  if added == "after the failure":
    group.fail("it has no memory", blame=blame)
    group.add(3, own_link)
  else:
    group.add(3, own_link)
    group.fail("it has no memory", blame=blame)
  own_link.start()
  error = error_of(peer_link.take)
  texts = {
    None: "rank 0 failed: it has no memory",
    2: "it has no memory",
    3: "rank 3 was given up by rank 0: it has no memory",
  }
  assert (str(error), error.rank) == (texts[blame], blame or 0)
  assert peer_link.ending is LinkEnding.TOLD
  for link in (own_link, peer_link):
    link.join(PATIENCE_S)
    until(lambda link=link: not link._receiver.is_alive())


# ---------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------

PROCESS = """
import sys, time
from ringjax.parallel.links.connection import Connection
from ringjax.parallel.links.live_link import LiveLink
port, patience_s = int(sys.argv[1]), float(sys.argv[2])
wire = Connection.connect(("127.0.0.1", port), bytes(range(32)), 60, "parent")
wire.patience_s = patience_s
link = LiveLink(wire, rank=0).start()
link.tell("ready")
try:
  print(link.take().kind, flush=True)
except Exception as error:
  print(error, flush=True)
"""


@contextlib.contextmanager
def process(
  patience_s: float, own_patience_s: float | None = None
) -> Iterator[tuple[Any, LiveLink]]:
  """A process and the link to it, which beats as often as the process needs."""
  with (
    contextlib.ExitStack() as stack,
    socket.create_server(("127.0.0.1", 0)) as server,
  ):
    port = server.getsockname()[1]
    child = subprocess.Popen(
      [sys.executable, "-c", PROCESS, str(port), str(patience_s)],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=subprocess.PIPE,
      text=True,
    )
    stack.callback(child.communicate)
    stack.callback(child.kill)
    wire = Connection(server.accept()[0], 60.0, "child")
    wire.greet_client(KEY)
    wire.patience_s = own_patience_s or patience_s
    link = LiveLink(wire, rank=1, beat_s=patience_s / 10).start()
    link.take("ready")
    yield child, link
    link.close()


@pytest.mark.long
@pytest.mark.parametrize(
  ("sent", "patience_s", "ending"),
  [
    (signal.SIGKILL, 120.0, LinkEnding.CLOSED),
    (signal.SIGSTOP, 2.0, LinkEnding.SILENT),
  ],
)
def test_processes_that_are_killed_or_frozen(sent, patience_s, ending):
  with process(patience_s) as (child, link):
    child.send_signal(sent)
    errors = waiting(link, 2)
    assert link.ending is ending and {x.rank for x in errors} == {1}
    if sent == signal.SIGSTOP:
      # It wakes, and hears that it was given up.
      child.send_signal(signal.SIGCONT)
      assert "given up by parent: child did nothing" in child.stdout.readline()


@pytest.mark.long
def test_one_that_was_suspended_itself_gives_up_no_one():
  with process(2.0, 120.0) as (child, link):
    child.send_signal(signal.SIGSTOP)
    # Nothing waits for it when it wakes: only its clock has run on.
    with mock.patch.object(link.wire, "send", return_value=None):
      time.sleep(4.0)
      child.send_signal(signal.SIGCONT)
    link.tell("last")
    link.close("done")
    assert child.wait(PATIENCE_S) == 0
    assert child.stdout.read() == "last\n"
