"""Groups of processes: values that all get, and who is found missing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ringjax.errors import OptionError, PeerError
from ringjax.parallel import frames
from ringjax.parallel import peers as peers_
from ringjax.parallel.links.array_messages import send_arrays
from ringjax.parallel.links.connection import AuthenticationError, Connection
from ringjax.parallel.peers import Peers

ROOT = pathlib.Path(__file__).parents[2]
# Nothing here takes long; what hangs ends.
PATIENCE_S = 240


@contextlib.contextmanager
def group(size: int, timeout_s: float = 30.0) -> Iterator[list[Peers]]:
  made = Peers.in_threads(size, timeout_s=timeout_s)
  try:
    yield made
  finally:
    for one in made:
      one.close()


def each(made: list[Peers], work) -> list:
  """What `work` gives or raises, for every rank in a thread of its own."""
  found: list = [None] * len(made)

  def run(rank: int) -> None:
    try:
      found[rank] = work(made[rank])
    except PeerError as error:
      found[rank] = error

  threads = [
    threading.Thread(target=run, args=(r,), daemon=True)
    for r in range(len(made))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
  return found


def test_all_get_what_each_gave():
  with group(4) as made:
    want = [{"rank": r, "text": "ä" * r} for r in range(4)]
    for _ in range(3):
      found = each(made, lambda p: p.gather(want[p.rank]))
      assert found == [want] * 4


def test_alone():
  peers = Peers(0, 1, {}, {})
  assert peers.gather("x") == ["x"]
  peers.close()


def test_arrays_over_a_link():
  x = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
  y = np.zeros_like(x)
  # More pieces than the system takes at once.
  cut = lambda a: [p for row in a for p in row.reshape(64, -1)]

  def work(p: Peers) -> None:
    if p.rank == 0:
      frames.send(p.link(1), cut(x))
    else:
      frames.receive(p.link(0), cut(y))

  with group(2) as made:
    each(made, work)
  np.testing.assert_array_equal(y, x)


def test_who_leaves_is_not_missed():
  with group(3) as made:
    made[2].close()
    made[0].wait(lambda: 2 in made[0]._group.left)
    assert made[0].failure is None
    found = each(made[:2], lambda p: p.gather(p.rank))
  assert all(isinstance(f, PeerError) and f.rank == 2 for f in found)


def test_a_value_that_comes_with_the_end_is_not_lost():
  with group(2) as (first, _):

    class Left(dict):
      """Ranks that have left; the second leaves while it is looked up."""

      def __contains__(self, rank) -> bool:
        first._values[0, rank] = "last"
        return True

    first._group.left = Left()
    assert first.gather("first") == ["first", "last"]


@pytest.mark.parametrize(
  ("leave", "expected"),
  [
    (lambda p: p.close(), "rank 0 has left"),
    (
      lambda p: p.abandon(ValueError("a bad config")),
      "rank 0 failed: ValueError: a bad config",
    ),
  ],
)
def test_rank_0_may_end_as_soon_as_it_has_met_the_others(leave, expected):
  cards, all_here = [""] * 2, threading.Barrier(2)

  def join(rank: int) -> str:
    def exchange(card: str) -> list[str]:
      cards[rank] = card
      all_here.wait()
      return cards

    try:
      peers = Peers.meet(rank, 2, exchange)
      if rank == 0:
        leave(peers)
        return ""
      peers.wait(lambda: 0 in peers._group.left)
    except PeerError as error:
      return str(error)
    peers.close()
    return "rank 0 has left"

  for _ in range(3):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      assert list(pool.map(join, range(2))) == ["", expected]


def test_one_that_fails_tells_the_others():
  with group(3) as made:
    made[1].abandon(MemoryError("no room"))
    found = each([made[0], made[2]], lambda p: p.gather(0))
  assert [f.rank for f in found] == [1, 1]
  assert all("rank 1 failed: MemoryError: no room" in str(f) for f in found)


def test_one_that_is_gone():
  with group(3) as made:
    # It ends without a word, and the system closes what it had: a watch that
    # went on would say first that it is the others who are gone.
    made[1]._closed, made[1]._group._end_link = True, lambda _: None
    for link in made[1]._group.links.values():
      link.wire.close()
    made[1]._shut()
    found = each([made[0], made[2]], lambda p: p.gather(0))
  assert [f.rank for f in found] == [1, 1]


@pytest.mark.parametrize("how", [peers_.WORKING, peers_.TOGETHER])
def test_one_that_is_stuck(how):

  def work(p: Peers) -> None:
    with p.doing(how):
      if how == peers_.TOGETHER:
        # The others are in step 2, as in a collective.
        p.tick(1 if p.rank == 1 else 2)
      elif p.rank != 1:
        for _ in range(10_000):
          p.tick()
          p.check()
          time.sleep(0.01)
      p.wait_idle(lambda: False)

  with group(3, timeout_s=1.0) as made:
    calls = []
    made[0].on_failure(calls.append)
    found = each(made, work)
  assert [f.rank for f in found] == [1, 1, 1]
  assert "stuck" in str(found[0])
  assert "given up by rank" in str(found[1]) or "stuck" in str(found[1])
  assert calls == [found[0]]


def test_one_that_waits_is_not_stuck():
  with group(2, timeout_s=0.4) as made:

    def work(p: Peers) -> str:
      if p.rank == 0:
        # Waits for much longer than the timeout.
        p.gather("late")
        return "fine"
      for _ in range(100):
        p.tick()
        time.sleep(0.02)
      p.gather("late")
      return "fine"

    assert each(made, work) == ["fine", "fine"]


def test_strangers_are_not_let_in():
  done: list = []
  cards: list[str] = ["", ""]
  here = threading.Barrier(2)

  def join(rank: int) -> None:
    def exchange(mine: str) -> list[str]:
      cards[rank] = mine
      here.wait()
      if rank == 1:
        port = json.loads(cards[0])["port"]
        with socket.create_connection(("127.0.0.1", port)) as one:
          one.sendall(b"GET / HTTP/1.1\r\n" + b"\0" * 100)
      return cards

    done.append(Peers.meet(rank, 2, exchange))

  threads = [threading.Thread(target=join, args=(r,)) for r in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE_S)
  done.sort(key=lambda p: p.rank)
  assert each(done, lambda p: p.gather(p.rank)) == [[0, 1], [0, 1]]
  for one in done:
    one.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_shows_the_secret_of_its_group(known):
  accepted, opened = socket.socketpair()

  def come() -> None:
    with contextlib.suppress(PeerError):
      wire = Connection(opened, 60.0, "rank 0")
      wire.greet_server(b"s" * 32 if known else b"t" * 32)
      send_arrays(wire, "control", rank=1)

  with accepted, opened:
    comer = threading.Thread(target=come)
    comer.start()
    if known:
      assert peers_._greet(b"s" * 32, accepted, ("127.0.0.1", 1))[1:] == (
        1,
        "control",
      )
    else:
      with pytest.raises(AuthenticationError, match="does not have the key"):
        peers_._greet(b"s" * 32, accepted, ("127.0.0.1", 1))
    comer.join(PATIENCE_S)


def test_a_frozen_rank_that_reads_nothing_is_named():
  with group(3, timeout_s=1.0) as made:
    # It takes no byte and sends none, as a stopped process.
    for link in made[1]._group.links.values():
      link.wire.send = lambda *_: None
      link.wire.readable = lambda _: time.sleep(60) or False
    text = "x" * (1 << 24)
    found = each([made[0], made[2]], lambda p: p.gather(text))
  assert [f.rank for f in found] == [1, 1]


def test_a_timeout_that_is_none():
  with pytest.raises(OptionError, match="timeout_s"):
    Peers.meet(0, 1, lambda mine: [mine], timeout_s=-1)


PROCESS = """
import json, sys, time
from ringjax.errors import PeerError
from ringjax.parallel import frames
from ringjax.parallel import peers as peers_
rank, folder = int(sys.argv[1]), sys.argv[2]

def exchange(mine):
  with open(f"{folder}/{rank}.new", "w") as file:
    file.write(mine)
  import os
  os.replace(f"{folder}/{rank}.new", f"{folder}/{rank}")
  cards = []
  for r in range(3):
    while not os.path.exists(f"{folder}/{r}"):
      time.sleep(0.01)
    cards.append(open(f"{folder}/{r}").read())
  return cards

peers = peers_.Peers.meet(rank, 3, exchange, timeout_s=3.0)
peers.gather("here")
print("here", flush=True)
try:
  peers.wait(lambda: False)
except PeerError as error:
  print(json.dumps([error.rank, str(error)]), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_die_or_freeze(sent, tmp_path):
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  with contextlib.ExitStack() as stack:
    running = []
    for rank in range(3):
      one = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(rank), str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
      )
      stack.callback(one.communicate)
      stack.callback(one.kill)
      running.append(one)
    for one in running:
      assert one.stdout is not None
      assert one.stdout.readline() == "here\n"
    running[1].send_signal(sent)
    for rank in (0, 2):
      said = json.loads(running[rank].communicate(timeout=PATIENCE_S)[0])
      assert said[0] == 1
      word = "gone" if sent == signal.SIGKILL else "said nothing"
      assert word in said[1]


def test_posts_come_in_order_and_end_with_their_rank():
  with group(3) as ranks:

    def work(peers: Peers) -> list:
      if peers.rank == 0:
        for n in range(4):
          peers.post(["all", n])
          peers.post({"only": n}, 2)
        return [peers.receive(1), peers.receive(2, idle=False)]
      values = [peers.receive(0) for _ in range(4 * peers.rank)]
      peers.post(peers.rank, 0)
      return values

    alone = [["all", n] for n in range(4)]
    both = [x for n in range(4) for x in (["all", n], {"only": n})]
    assert each(ranks, work) == [[1, 2], alone, both]
    # What came before the end is still received.
    ranks[1].post("last", 0)
    ranks[1].close()
    assert ranks[0].receive(1) == "last"
    with pytest.raises(PeerError, match="rank 1 has left"):
      ranks[0].receive(1)
    # Nothing is queued for it.
    ranks[0].post("late", 1)
