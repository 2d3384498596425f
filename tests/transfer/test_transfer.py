"""Pages that are pulled over TCP, inside of one process."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time

import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.parallel.links.connection import MAGIC, AuthenticationError
from ringjax.transfer.description import keys_to_runs, runs_to_keys
from ringjax.transfer.wire import PullConnection
from tests.helpers import until

KEY = secrets.token_bytes(32)
TOKENS, HEADS, DIM = 4, 6, 3
LAYOUT = transfer.PageLayout(
  (
    transfer.PageLeaf(
      "k",
      "bfloat16",
      (2, TOKENS, HEADS, DIM),
      ("layer", "token", "head", "dim"),
    ),
    transfer.PageLeaf("scale", "float32", (2, HEADS), ("layer", "head")),
  )
)


def make_pages(numbers, seed=0):
  """Leaves of random bits, by page."""
  draw = np.random.default_rng(seed)
  return {
    n: [
      draw.normal(size=leaf.shape).astype(
        transfer.description.dtype_of(leaf.dtype)
      )
      for leaf in LAYOUT.leaves
    ]
    for n in numbers
  }


def same(got, pages, numbers):
  for n, leaf in enumerate(LAYOUT.leaves):
    want = np.stack([pages[page][n] for page in numbers])
    np.testing.assert_array_equal(
      got.arrays[leaf.name].view(np.uint8), want.view(np.uint8)
    )


class Returned:
  """Counts the pages that return."""

  def __init__(self):
    self.pages = []
    self._news = threading.Condition()

  def __call__(self, pages):
    with self._news:
      self.pages += pages
      self._news.notify_all()

  def wait(self, count):
    with self._news:
      assert self._news.wait_for(lambda: len(self.pages) >= count, 60)
    return sorted(self.pages)


@pytest.fixture
def publisher():
  with transfer.Publisher(KEY) as made:
    yield made


def test_pages_come_and_return_once(publisher):
  pages, back = make_pages([7, 8, 9, 3, 4, 20]), Returned()
  ticket = publisher.publish(pages, LAYOUT, released=back)
  ticket = transfer.Ticket.from_json(ticket.to_json())
  got = transfer.pull(ticket, publisher.address, KEY)
  same(got, pages, list(pages))
  # Three runs of neighbours, three reads; all sent from where they were.
  assert got.reads == publisher.counters.reads == 3 and got.completed
  assert got.nbytes == 6 * LAYOUT.nbytes == publisher.counters.read_bytes
  assert publisher.counters.copied_bytes == 0
  assert back.wait(6) == sorted(pages) and publisher.offered == 0


@pytest.mark.parametrize(
  ("numbers", "places", "runs"),
  [
    ([1, 2, 3, 4], None, 1),
    ([4, 3, 2, 1], None, 4),
    ([1, 2, 4, 5, 6, 9], None, 3),
    ([1, 2, 3, 4], [0, 1, 5, 6], 2),
    ([1, 3, 5], [2, 1, 0], 3),
    ([5], [9], 1),
  ],
)
def test_runs_are_reads(publisher, numbers, places, runs):
  pages = make_pages(numbers)
  ticket = publisher.publish(pages, LAYOUT)
  got = transfer.pull(ticket, publisher.address, KEY, places=places, window=1)
  assert got.reads == publisher.counters.reads == runs
  rows = places or range(len(numbers))
  for row, page in zip(rows, numbers, strict=True):
    np.testing.assert_array_equal(got.arrays["scale"][row], pages[page][1])


def test_into_arrays_of_the_reader_and_only_some_pages(publisher):
  pages = make_pages(range(5))
  ticket = publisher.publish(pages, LAYOUT, readers=2)
  into = {
    x.name: np.zeros((8, *x.shape), transfer.description.dtype_of(x.dtype))
    for x in LAYOUT.leaves
  }
  got = transfer.pull(
    ticket, publisher.address, KEY, into=into, pages=[3, 1], places=[6, 2]
  )
  assert got.arrays["k"] is into["k"] and got.reads == 2
  np.testing.assert_array_equal(into["scale"][6], pages[3][1])
  np.testing.assert_array_equal(into["scale"][2], pages[1][1])
  assert not into["scale"][[0, 1, 3, 4, 5, 7]].any()
  wrong = dict(into, k=into["k"].astype(np.float32))
  with pytest.raises(rj.OptionError, match="writable"):
    transfer.pull(ticket, publisher.address, KEY, into=wrong)
  with pytest.raises(rj.OptionError, match="different rows"):
    transfer.pull(ticket, publisher.address, KEY, places=[0] * 5)


def test_two_readers_of_one_ticket(publisher):
  pages, back = make_pages(range(3)), Returned()
  ticket = publisher.publish(pages, LAYOUT, readers=2, released=back)
  for reader, held in (("a", 3), ("a", 3), ("b", 0)):
    # A second attempt of the same reader does not count twice.
    got = transfer.pull(ticket, publisher.address, KEY, reader=reader)
    same(got, pages, range(3))
    assert publisher.offered == held
  assert back.wait(3) == [0, 1, 2]
  with pytest.raises(transfer.StaleTicketError, match="not published"):
    transfer.pull(ticket, publisher.address, KEY, reader="c")


def test_a_reader_that_declines_is_one_that_ended(publisher):
  back = Returned()
  ticket = publisher.publish(make_pages([1]), LAYOUT, released=back)
  transfer.decline(ticket, publisher.address, KEY)
  assert back.wait(1) == [1]


def test_a_lease_ends_by_the_clock_and_not_before():
  now = [100.0]
  with transfer.Publisher(KEY, lease_s=30, clock=lambda: now[0]) as publisher:
    pages, back = make_pages([1, 2]), Returned()
    ticket = publisher.publish(pages, LAYOUT, readers=9, released=back)
    now[0] += 29.9
    publisher.expire()
    transfer.pull(ticket, publisher.address, KEY)
    assert publisher.renew(ticket)
    now[0] += 29.9
    publisher.expire()
    transfer.pull(ticket, publisher.address, KEY)
    assert not back.pages
    now[0] += 0.2
    publisher.expire()
    assert back.wait(2) == [1, 2] and not publisher.renew(ticket)
    # The same page with other contents: the old ticket does not get them.
    again = publisher.publish(make_pages([1, 2], seed=1), LAYOUT)
    with pytest.raises(transfer.StaleTicketError, match="other contents"):
      transfer.pull(ticket, publisher.address, KEY)
    assert publisher.counters.expired == 1 and publisher.counters.refused == 1
    transfer.pull(again, publisher.address, KEY)


def test_a_page_of_two_tickets_returns_with_the_second(publisher):
  pages, first, second = make_pages([1, 2, 3]), Returned(), Returned()
  one = publisher.publish({n: pages[n] for n in (1, 2)}, LAYOUT, released=first)
  two = publisher.publish(
    {n: pages[n] for n in (2, 3)}, LAYOUT, released=second
  )
  publisher.withdraw(one)
  assert first.wait(1) == [1] and not second.pages
  same(transfer.pull(two, publisher.address, KEY), pages, [2, 3])
  # The page of both goes back to both, once each.
  assert second.wait(2) == [2, 3] and first.wait(2) == [1, 2]
  # A page's callback may raise; others do not suffer.
  with pytest.warns(RuntimeWarning, match="raised"):
    publisher.withdraw(
      publisher.publish(pages, LAYOUT, released=lambda _: 1 // 0)
    )


def test_a_publisher_that_starts_anew_knows_no_old_ticket(publisher):
  pages = make_pages([0])
  ticket = publisher.publish(pages, LAYOUT)
  publisher.close()
  with pytest.raises(rj.PeerError, match="cannot be reached"):
    transfer.pull(ticket, publisher.address, KEY)
  with transfer.Publisher(KEY, port=publisher.address[1]) as again:
    again.publish(make_pages([0], seed=1), LAYOUT)
    with pytest.raises(transfer.StaleTicketError, match="started anew"):
      transfer.pull(ticket, again.address, KEY)


def test_a_connection_that_fails_names_the_other_side():
  with transfer.Publisher(KEY) as publisher:
    address = publisher.address
    connect = lambda key: PullConnection.connect(
      address, key, 5.0, "instance 3", rank=3
    )
    connect(KEY).close()
    with pytest.raises(AuthenticationError, match="instance 3"):
      connect(bytes(32))
  with pytest.raises(rj.PeerError, match="instance 3 cannot be") as error:
    connect(KEY)
  assert error.value.rank == 3
  # One sentence, and no tuple of a text and a number.
  assert f"{error.value}".startswith("instance 3 cannot be reached")


def test_pages_stay_while_they_are_read():
  # A reader that stops in the middle of a read of 64 MB, more than the
  # buffers of the system take.
  layout = transfer.PageLayout.of("k", "uint8", (1 << 26,), "byte")
  data, back = np.full(1 << 26, 5, np.uint8), Returned()
  with transfer.Publisher(KEY, patience_s=20) as publisher:
    ticket = publisher.publish({0: data}, layout, released=back)
    wire = transfer.wire.PullConnection(
      socket.create_connection(publisher.address), 20, "publisher"
    )
    wire.greet_server(KEY)
    wire.tell(
      transfer.protocol.ReadRequest(ticket.incarnation, "r", 0, ticket.pages)
    )
    wire.hear()
    publisher.withdraw(ticket)
    with pytest.raises(transfer.StaleTicketError):
      transfer.pull(ticket, publisher.address, KEY)
    assert not back.pages and publisher.offered == 1
    # It goes on and gets the bytes of before.
    got = bytearray(1 << 26)
    wire.receive(memoryview(got))
    assert got == data.tobytes() and back.wait(1) == [0]
    wire.close()


def test_a_reader_that_stops_for_good_is_cut_off():
  layout = transfer.PageLayout.of("k", "uint8", (1 << 26,), "byte")
  back = Returned()
  with transfer.Publisher(KEY, lease_s=0.2, patience_s=0.5) as publisher:
    data = np.zeros(1 << 26, np.uint8)
    ticket = publisher.publish({0: data}, layout, released=back)
    wire = transfer.wire.PullConnection(
      socket.create_connection(publisher.address), 20, "publisher"
    )
    wire.greet_server(KEY)
    wire.tell(
      transfer.protocol.ReadRequest(ticket.incarnation, "r", 0, ticket.pages)
    )
    assert back.wait(1) == [0] and publisher.counters.broken == 1
    wire.close()


def test_a_publisher_wants_a_proof_of_the_key():
  """Of a reader that goes on whatever it is shown."""
  here, there = socket.socketpair()
  with here, there:
    there.sendall(bytes(64))
    with pytest.raises(transfer.AuthenticationError, match="have the key"):
      transfer.wire.PullConnection(here, 20.0, "a reader").greet_client(KEY)


def test_runs_are_of_one_generation():
  keys = ((4, 1), (5, 1), (6, 2), (8, 2))
  runs = keys_to_runs(keys)
  assert runs == [[4, 2, 1], [6, 1, 2], [8, 1, 2]]
  assert runs_to_keys(runs, 4) == keys


def test_another_key_on_either_side(publisher):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  with pytest.raises(transfer.AuthenticationError, match="same key"):
    transfer.pull(ticket, publisher.address, secrets.token_bytes(32))
  until(lambda: publisher.counters.strangers == 1)  # Counted by its thread.
  # What answers without the key is found out as well.
  with socket.create_server(("127.0.0.1", 0)) as server:

    def answer():
      link, _ = server.accept()
      link.sendall(MAGIC + bytes(32))
      link.recv(64)
      link.sendall(bytes(32))
      link.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(transfer.AuthenticationError, match="same key"):
      transfer.pull(ticket, server.getsockname(), KEY)
    thread.join()
  with pytest.raises(rj.OptionError, match="at least 16 bytes"):
    transfer.Publisher(b"short")
  same(transfer.pull(ticket, publisher.address, KEY), make_pages([0]), [0])


def frame(body):
  return struct.pack("<I", len(body)) + body


HOSTILE = {
  "size": struct.pack("<I", 1 << 31),
  "empty": struct.pack("<I", 0),
  "no json": frame(b"\x80\x04pickle"),
  "no object": frame(b"[1, 2]"),
  "deep": frame(b"[" * 200_000),
  "unknown": frame(b'{"t": "run", "code": "1"}'),
  "a reply": frame(b'{"t": "completed", "incarnation": 1, "ticket": 0, '
                   b'"reader": "x"}'),
  "negative": frame(b'{"t": "complete", "incarnation": 1, "ticket": -1, '
                    b'"reader": "x"}'),
  "a list for a text": frame(b'{"t": "abort", "incarnation": 1, "ticket": 1, '
                             b'"reader": ["x"]}'),
  "many pages": frame(b'{"t": "read", "incarnation": 1, "reader": "x", '
                      b'"number": 0, "pages": [[0, 1000000000, 0]]}'),
  "truncated": frame(b'{"t": "read"}')[:-3],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reader_loses_its_connection_only(publisher, name):
  pages, back = make_pages([0, 1]), Returned()
  ticket = publisher.publish(pages, LAYOUT, released=back)
  wire = transfer.wire.PullConnection(
    socket.create_connection(publisher.address), 20, "publisher"
  )
  wire.greet_server(KEY)
  wire.send([HOSTILE[name]])
  if name == "truncated":
    wire.link.shutdown(socket.SHUT_WR)
  assert wire.hear() is None
  wire.close()
  same(transfer.pull(ticket, publisher.address, KEY), pages, [0, 1])
  assert back.wait(2) == [0, 1]


@pytest.mark.parametrize(
  "parts",
  [
    "all",
    [None],
    [None, None],
    [[[0, 2]], None],
    [[[0, 2], [0, TOKENS], [0, HEADS], [0, DIM + 1]], None],
    [[[0, 2], [2, 2], [0, HEADS], [0, DIM]], None],
    [[[0, 2], [-1, 2], [0, HEADS], [0, DIM]], None],
    [[[0, 2], [0, 1.5], [0, HEADS], [0, DIM]], None],
  ],
)
def test_parts_that_are_not_there(publisher, parts):
  back = Returned()
  ticket = publisher.publish(make_pages([0]), LAYOUT, released=back)
  wire = transfer.wire.PullConnection(
    socket.create_connection(publisher.address), 20, "publisher"
  )
  wire.greet_server(KEY)
  asks = transfer.protocol.ReadRequest(ticket.incarnation, "r", 0, ticket.pages)
  wire.tell(asks, parts=parts)
  assert wire.hear() is None
  wire.close()
  assert publisher.counters.broken == publisher.counters.strangers == 1
  publisher.withdraw(ticket)
  assert back.wait(1) == [0]


def hostile_publisher(answers):
  """Greets a reader, then sends the bytes of each answer to its messages."""
  server = socket.create_server(("127.0.0.1", 0))

  def work():
    link, _ = server.accept()
    wire = transfer.wire.PullConnection(link, 20, "reader")
    wire.greet_client(KEY)
    wire.hear()
    wire.send(answers)
    wire.close()
    server.close()

  threading.Thread(target=work, daemon=True).start()
  return server.getsockname()


@pytest.mark.parametrize(
  ("beside", "pages", "says"),
  [
    ({"bytes": 1 << 50}, ((0, 0),), "announced"),
    ({"bytes": "x" * 1000}, ((0, 0),), "announced"),
    ({}, ((0, 0),), "announced"),
    ({"bytes": LAYOUT.nbytes}, ((1, 0),), "unasked"),
    ({"bytes": LAYOUT.nbytes}, ((0, 1),), "unasked"),
    ({"bytes": LAYOUT.nbytes}, ((0, 0),), "closed the connection"),
  ],
)
def test_a_hostile_publisher_is_named(publisher, beside, pages, says):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  reply = transfer.protocol.ReadReply(ticket.incarnation, "r", 0, pages)
  address = hostile_publisher(
    [transfer.wire.encode(reply, **beside), b"half of the page"]
  )
  with pytest.raises(rj.PeerError, match=says) as caught:
    transfer.pull(ticket, address, KEY, reader="r")
  assert f"publisher 127.0.0.1:{address[1]}" in str(caught.value)
  assert len(str(caught.value)) < 400


def test_a_silent_publisher_is_given_up(publisher):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  with socket.create_server(("127.0.0.1", 0)) as server:
    start = time.monotonic()
    with pytest.raises(rj.PeerError, match="did nothing for 0.3 s"):
      transfer.pull(ticket, server.getsockname(), KEY, patience_s=0.3)
    assert time.monotonic() - start >= 0.3


def test_connections_of_readers_are_bounded():
  with transfer.Publisher(KEY, connections=2) as publisher:
    ticket = publisher.publish(make_pages([0]), LAYOUT)
    readers = []
    for _ in range(2):
      link = socket.create_connection(publisher.address)
      readers.append(transfer.wire.PullConnection(link, 5.0, "publisher"))
      readers[-1].greet_server(KEY)
    with pytest.raises(rj.PeerError, match="closed the connection"):
      transfer.pull(ticket, publisher.address, KEY)
    assert publisher.counters.turned_away == 1
    for reader in readers:
      reader.close()


def test_silent_connections_keep_no_reader_out():
  # More than are greeted at a time, and more than may read.
  with transfer.Publisher(KEY, connections=2) as publisher:
    ticket = publisher.publish(make_pages([0]), LAYOUT)
    silent = [socket.create_connection(publisher.address) for _ in range(200)]
    pulled = transfer.pull(ticket, publisher.address, KEY)
    assert pulled.completed and pulled.labels == ("",)
    assert publisher.counters.turned_away >= 200 - 64
    for link in silent:
      link.close()


@pytest.mark.parametrize("axis", ["head", "token"])
def test_shards_of_one_count_from_shards_of_another(axis):
  # Prefill on 4 shards, decoding on 2, then on 3 that pull from these 2.
  whole = np.random.default_rng(0).normal(size=(5, 2, 12, 12, 3))
  whole = whole.astype(np.float32)
  axes = ("layer", "token", "head", "dim")
  place = 1 + axes.index(axis)

  def cut(array, n, of):
    size = array.shape[place] // of
    index = [slice(None)] * 5
    index[place] = slice(n * size, (n + 1) * size)
    return np.ascontiguousarray(array[tuple(index)])

  def publish(array, n, of, readers):
    publisher = transfer.Publisher(KEY)
    first = [0] * 4
    first[place - 1] = n * array.shape[place]
    leaf = transfer.PageLeaf(
      "k", "float32", array.shape[1:], axes, tuple(first), "plain"
    )
    # Pages of each publisher have numbers of their own.
    pages = {10 * n + 2 * i: page for i, page in enumerate(array)}
    ticket = publisher.publish(
      pages, transfer.PageLayout((leaf,)), readers=readers
    )
    return publisher, ticket

  shards, opened = [cut(whole, n, 4) for n in range(4)], []
  for of in (2, 3):
    made = [publish(x, n, len(shards), of) for n, x in enumerate(shards)]
    opened += [publisher for publisher, _ in made]
    sources = [(ticket, publisher.address) for publisher, ticket in made]
    step = 12 // of
    shards = [
      transfer.pull_shards(
        sources, KEY, want={axis: (n * step, (n + 1) * step)}, reader=f"d{n}"
      ).arrays["k"]
      for n in range(of)
    ]
    for n in range(of):
      np.testing.assert_array_equal(shards[n], cut(whole, n, of))
  for publisher in opened:
    # Each reader ended each ticket, also where it wanted nothing.
    publisher._wait(lambda p=publisher: not p._pages)
    assert publisher.counters.expired == 0 and publisher.offered == 0
    publisher.close()
  with pytest.raises(rj.OptionError, match="within 0 to 6"):
    transfer.pull_shards(sources[:1], KEY, want={axis: (0, 12)})
  with pytest.raises(rj.OptionError, match="overlap"):
    transfer.pull_shards([*sources, sources[0]], KEY)


@pytest.mark.parametrize(
  ("want", "says"),
  [
    ({"heads": (0, 2)}, "'heads'"),
    ({"head": (0, HEADS + 1)}, "within 0 to 6"),
    ({"head": (-1, 2)}, "within 0 to 6"),
    ({"head": (3, 3)}, "within 0 to 6"),
    ({"token": (3, 1)}, "within 0 to 4"),
  ],
)
def test_a_part_that_there_is_not_is_named(publisher, want, says):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  for ask in (
    lambda: transfer.pull(ticket, publisher.address, KEY, want=want),
    lambda: transfer.pull_shards([(ticket, publisher.address)], KEY, want=want),
  ):
    with pytest.raises(rj.OptionError, match=says):
      ask()
  assert publisher.offered == 1


def test_shards_with_a_gap_or_of_other_tokens(publisher):
  made = []
  for first, label in ((0, "a"), (4, "a"), (2, "b")):
    leaf = transfer.PageLeaf("k", "uint8", (2, 3), ("head", "dim"), (first, 0))
    layout = transfer.PageLayout((leaf,))
    (number,) = publisher.new_numbers(1)
    page = {number: np.zeros((2, 3), np.uint8)}
    ticket = publisher.publish(page, layout, labels=[label])
    made.append((ticket, publisher.address))
  with pytest.raises(rj.OptionError, match="gaps"):
    transfer.pull_shards(made[:2], KEY)
  with pytest.raises(rj.OptionError, match="different labels"):
    transfer.pull_shards(made, KEY)


def test_labels_come_with_their_pages(publisher):
  pages = make_pages([5, 6, 7])
  for labels in (["a"], ["a", "b", "x" * 257]):
    with pytest.raises(rj.OptionError, match="labels"):
      publisher.publish(pages, LAYOUT, labels=labels)
  ticket = publisher.publish(pages, LAYOUT, labels=["a", "b", "c"])
  assert transfer.Ticket.from_json(ticket.to_json()) == ticket
  with pytest.raises(rj.OptionError, match="or label"):
    publisher.publish(pages, LAYOUT, labels=["a", "b", "d"])
  got = transfer.pull(
    ticket, publisher.address, KEY, pages=[2, 0], places=[0, 3]
  )
  assert got.labels == ("c", "", "", "a")


def test_a_lease_of_another_publisher_is_not_renewed(publisher):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  with transfer.Publisher(KEY) as other:
    theirs = other.publish(make_pages([0]), LAYOUT)
    assert theirs.number == ticket.number
    assert not publisher.renew(theirs) and publisher.renew(ticket)


def test_only_the_part_is_sent(publisher):
  pages = make_pages([0, 1])
  ticket = publisher.publish(pages, LAYOUT)
  got = transfer.pull(
    ticket, publisher.address, KEY, want={"head": (1, 3), "token": (2, 4)}
  )
  for n in (0, 1):
    np.testing.assert_array_equal(got.arrays["k"][n], pages[n][0][:, 2:4, 1:3])
    np.testing.assert_array_equal(got.arrays["scale"][n], pages[n][1][:, 1:3])
  assert got.nbytes == 2 * (2 * 2 * 2 * DIM * 2 + 2 * 2 * 4)
  assert publisher.counters.read_bytes == got.nbytes


@pytest.mark.parametrize(
  "text",
  [
    "",
    "[]",
    "{}",
    "[" * 100_000,
    '{"incarnation": -1, "number": 0, "readers": 1, "lease_s": 1, '
    '"pages": [[0, 1, 0]], "leaves": []}',
  ],
)
def test_a_ticket_that_is_none(text):
  with pytest.raises(rj.OptionError):
    transfer.Ticket.from_json(text)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ('"pages": [[0, 1, 0]]', '"pages": [[0, 99999999999, 0]]'),
    ('"pages": [[0, 1, 0]]', '"pages": [[0, 1]]'),
    ('"dtype": "bfloat16"', '"dtype": "O"'),
    ('"dtype": "bfloat16"', '"dtype": ["f4"]'),
    ('"shape": [2, 4, 6, 3]', '"shape": [2, 4, 6, 99999999999999]'),
    ('"shape": [2, 4, 6, 3]', '"shape": [2, 4, 6, -3]'),
    ('"shape": [2, 4, 6, 3]', '"shape": 3'),
    ('"readers": 1', '"readers": 0'),
    ('"lease_s": 30.0', '"lease_s": NaN'),
  ],
)
def test_a_ticket_with_numbers_out_of_range(publisher, old, new):
  text = publisher.publish(make_pages([0]), LAYOUT).to_json()
  assert old in text
  with pytest.raises(rj.OptionError):
    transfer.Ticket.from_json(text.replace(old, new))


def test_arguments_that_are_none(publisher):
  ticket = publisher.publish(make_pages([0]), LAYOUT)
  for port in (0, 70000):
    with pytest.raises(rj.OptionError, match="host and a port"):
      transfer.pull(ticket, ("127.0.0.1", port), KEY)
  with pytest.raises(rj.OptionError, match="free address"):
    transfer.Publisher(KEY, port=publisher.address[1])
  for name in ("", "x" * 257):
    with pytest.raises(rj.OptionError, match="256 characters"):
      transfer.decline(ticket, publisher.address, KEY, reader=name)


def test_who_greets_too_slowly_is_cut_off():
  # Each byte comes within the patience; all of them would take a minute.
  with transfer.Publisher(KEY, patience_s=0.5, connections=1) as publisher:
    ticket = publisher.publish(make_pages([0]), LAYOUT)
    with socket.create_connection(publisher.address) as slow:
      slow.settimeout(20)
      assert slow.recv(8) == MAGIC
      with contextlib.suppress(ConnectionError):
        while True:
          slow.send(b"x")
          time.sleep(0.05)
    # It left no thread and no connection behind.
    publisher._wait(lambda: not publisher._wires)
    transfer.pull(ticket, publisher.address, KEY)


def test_a_page_that_is_read_twice_at_once_returns_once(publisher):
  ticket, back = publisher.publish(make_pages([0]), LAYOUT), Returned()
  publisher.publish(make_pages([1]), LAYOUT, released=back)
  wire = transfer.wire.PullConnection(
    socket.create_connection(publisher.address), 20, "publisher"
  )
  wire.greet_server(KEY)
  twice = (*ticket.pages, *ticket.pages)
  asks = transfer.protocol.ReadRequest(ticket.incarnation, "r", 0, twice)
  for _ in range(2):
    wire.tell(asks)
    reply, beside = wire.hear()
    assert isinstance(reply, transfer.protocol.ReadReply)
    wire.receive(memoryview(bytearray(beside["bytes"])))
  publisher.withdraw(ticket)
  publisher._wait(lambda: publisher.offered == 1)
  assert publisher.offered == 1 and publisher.counters.released == 1
  wire.close()


def test_pages_that_do_not_fit_their_layout(publisher):
  with pytest.raises(rj.OptionError, match="bytes"):
    publisher.publish({0: b"abc"}, LAYOUT)
  with pytest.raises(rj.OptionError, match="1 to"):
    publisher.publish({}, LAYOUT)
  pages = make_pages([0])
  publisher.publish(pages, LAYOUT)
  publisher.publish(pages, LAYOUT)
  # Other contents under a number that is still offered would be left unseen.
  with pytest.raises(rj.OptionError, match="other memory"):
    publisher.publish(make_pages([0]), LAYOUT)
  assert list(publisher.new_numbers(2)) == [1, 2]
  assert list(publisher.new_numbers(1)) == [3]
  other = transfer.PageLayout.of("k", "uint8", (4,), "byte")
  with pytest.raises(rj.OptionError, match="other memory"):
    publisher.publish({0: b"abcd"}, other)
