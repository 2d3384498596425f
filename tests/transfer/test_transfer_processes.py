"""Processes that pull pages from each other, and are killed meanwhile."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from tests.transfer import members
from tests.transfer.test_transfer import Returned

ROOT = pathlib.Path(__file__).parents[2]
LAYOUT = transfer.PageLayout.of("k", "uint8", (members.PAGE_BYTES,), "byte")


class Member:
  """A process with a role of `members.py`."""

  def __init__(self, role):
    self.process = subprocess.Popen(
      [sys.executable, "-m", "tests.transfer.members", role],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def tell(self, ticket, address, **more):
    order = dict(ticket=json.loads(ticket.to_json()), address=address, **more)
    self.process.stdin.write(json.dumps(order) + "\n")
    self.process.stdin.flush()

  def line(self):
    return self.process.stdout.readline().strip()

  def kill(self):
    self.process.send_signal(signal.SIGKILL)
    self.process.wait()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.kill()
    self.process.stdin.close()
    self.process.stdout.close()


def pages(numbers, seed):
  return dict(zip(numbers, members.contents(seed), strict=True))


def test_readers_come_and_go_and_one_is_killed_in_the_middle():
  now, back = [0.0], Returned()
  with (
    transfer.Publisher(members.KEY, clock=lambda: now[0]) as publisher,
    Member("reader") as first,
    Member("reader") as second,
  ):
    runs = {0: range(6), 1: (10, 11, 20, 21, 30, 31)}
    tickets = [
      publisher.publish(pages(runs[n], n), LAYOUT, readers=2, released=back)
      for n in range(2)
    ]
    # 1. The first stops in the middle of a read, and is killed there.
    assert first.line() == "ready"
    first.tell(tickets[0], publisher.address, middle={"devices": False})
    assert first.line() == "middle"
    first.kill()
    # 2. The second joins and gets all, then leaves.
    assert second.line() == "ready"
    for n, ticket in enumerate(tickets):
      second.tell(ticket, publisher.address)
      want = [(1, 3)[n], members.digest(members.contents(n)), 0]
      assert json.loads(second.line()) == want
    second.process.stdin.close()
    assert second.process.wait() == 0
    # 3. The killed one's pages stay until its lease is over; of the other
    # ticket another reader gets what it wants.
    got = transfer.pull(tickets[1], publisher.address, members.KEY)
    np.testing.assert_array_equal(got.arrays["k"], members.contents(1))
    assert back.wait(6) == [10, 11, 20, 21, 30, 31]
    publisher.expire()
    assert publisher.offered == 6
    now[0] += 31.0
    publisher.expire()
    assert back.wait(12) == sorted([*runs[0], *runs[1]])
    # 4. A late reader of that ticket is told, and gets no page of the next.
    publisher.publish(pages(range(6), 5), LAYOUT, released=back)
    with pytest.raises(transfer.StaleTicketError):
      transfer.pull(tickets[0], publisher.address, members.KEY)
    assert publisher.counters.broken == 1
  assert len(back.pages) == 18


def test_a_publisher_that_is_killed_or_stands_still_in_the_middle():
  with Member("publisher") as member:
    address, fields = json.loads(member.line())
    ticket = transfer.Ticket.from_json(json.dumps(fields))
    name = f"publisher {address[0]}:{address[1]}"
    into = {"k": np.zeros((6, members.PAGE_BYTES), np.uint8)}
    pull = lambda patience_s: transfer.pull(
      ticket, tuple(address), members.KEY, into=into, patience_s=patience_s
    )
    with pytest.raises(rj.PeerError, match=f"{name} did nothing for 0.7 s"):
      pull(0.7)
    assert member.line() == "middle"
    np.testing.assert_array_equal(into["k"][:2], members.contents(3)[:2])
    assert not into["k"][3:].any()
    caught = []

    def work():
      try:
        pull(60)
      except rj.PeerError as error:
        caught.append(error)

    # It is at work on this read when it is killed, or has not begun it.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    member.kill()
    thread.join()
    assert f"{name} closed the connection" in str(caught[0])


@pytest.mark.long
def test_a_reader_of_arrays_is_killed_and_another_one_gets_them():
  back, devices = Returned(), transfer.DeviceServer()
  with (
    transfer.Publisher(
      members.KEY, devices=devices, lease_s=2, patience_s=60
    ) as publisher,
    Member("reader") as first,
    Member("reader") as second,
  ):
    batch = transfer.PageBatch((jnp.asarray(members.contents(4)),))
    publish = lambda numbers: publisher.publish(
      {n: batch[x] for x, n in enumerate(numbers)}, LAYOUT, released=back,
      readers=2,
    )  # fmt: skip
    assert first.line() == second.line() == "ready"
    ticket = publish(range(6))
    first.tell(ticket, publisher.address, middle={"devices": True})
    assert first.line() == "middle"
    # What it was offered stays as it is, until it is over.
    assert devices.held == 6 * members.PAGE_BYTES
    first.kill()
    other = publish([10, 11, 12, 20, 21, 30])
    for one, reads in ((ticket, 1), (other, 3)):
      assert publisher.renew(one, 60)
      second.tell(one, publisher.address, devices=True)
      want = [reads, members.digest(members.contents(4)), reads]
      assert json.loads(second.line()) == want
    assert publisher.counters.broken == 1
    assert publisher.counters.array_reads == 4
    got = transfer.pull(other, publisher.address, members.KEY)
    np.testing.assert_array_equal(got.arrays["k"], members.contents(4))
    assert back.wait(6) == [10, 11, 12, 20, 21, 30]
    # Of the killed one's ticket a lease is left.
    publisher.renew(ticket, 0.1)
    assert back.wait(12) and publisher.offered == 0


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_publisher_of_arrays_ends_in_the_middle(how, monkeypatch):
  devices = transfer.DeviceServer()
  number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
  with Member("device_publisher") as member:
    address, fields = json.loads(member.line())
    ticket = transfer.Ticket.from_json(json.dumps(fields))
    pull = lambda: transfer.pull(
      ticket, tuple(address), members.KEY, devices=devices, patience_s=0.7
    )
    assert pull().array_reads == 1
    begin = devices.pull

    def begun(*args, **options):
      if how == "stopped":
        # Before it can send anything.
        member.process.send_signal(number)
        time.sleep(0.1)
      made = begin(*args, **options)
      member.process.send_signal(number)
      return made

    monkeypatch.setattr(devices, "pull", begun)
    name = f"publisher {address[0]}:{address[1]}"
    # A small read may be here before the signal is.
    many = lambda: [pull() for _ in range(20)]
    with pytest.raises(rj.PeerError, match=name) as caught:
      many()
    if how == "stopped":
      assert "did nothing for 0.7 s" in str(caught.value)
      member.process.send_signal(signal.SIGCONT)
      monkeypatch.undo()
      # It is well again, and sends bytes.
      got = pull()
      assert (got.reads, got.array_reads) == (1, 0)
      np.testing.assert_array_equal(got.arrays["k"], members.contents(3))
