"""Pages that lie on devices, pulled by JAX's transfer server or as bytes."""

from __future__ import annotations

import os
import resource
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import transfer
from ringjax.transfer import device_pages, protocol, wire
from tests.helpers import until
from tests.transfer.test_transfer import KEY, LAYOUT, Returned, make_pages


def batches(counts, *, axis=1, seed=0):
  """Batches of pages of `LAYOUT`, and each page's leaves."""
  pages = make_pages(range(sum(counts)), seed)
  found, at = [], 0
  for count in counts:
    some = [pages[n] for n in range(at, at + count)]
    leaves = [jnp.asarray(np.stack(x, axis)) for x in zip(*some, strict=True)]
    found.append(transfer.PageBatch(tuple(leaves), axis))
    at += count
  return found, pages


def rows_of(found):
  return [batch[n] for batch in found for n in range(len(batch))]


def equal(got, pages, numbers, cut=(slice(None), slice(None))):
  for n, leaf in enumerate(LAYOUT.leaves):
    want = np.stack([pages[page][n][cut[n]] for page in numbers])
    np.testing.assert_array_equal(
      got.arrays[leaf.name].view(np.uint8), want.view(np.uint8)
    )


@pytest.fixture(scope="module")
def devices():
  """Of a publisher, and of a reader."""
  return transfer.DeviceServer(), transfer.DeviceServer()


@pytest.fixture
def publisher(devices):
  with transfer.Publisher(KEY, devices=devices[0]) as made:
    yield made


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pages_come_as_arrays_and_return_once(publisher, devices, axis):
  found, pages = batches((3, 5), axis=axis)
  back = Returned()
  numbers = [4, 5, 6, 7, 20, 21, 22, 40]
  ticket = publisher.publish(
    dict(zip(numbers, rows_of(found), strict=True)), LAYOUT, released=back
  )
  ticket = transfer.Ticket.from_json(ticket.to_json())
  assert publisher.device_bytes == 8 * LAYOUT.nbytes
  got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
  equal(got, pages, range(8))
  assert got.reads == got.array_reads == publisher.counters.array_reads == 3
  assert got.nbytes == publisher.counters.read_bytes == 8 * LAYOUT.nbytes
  assert got.completed and back.wait(8) == numbers
  assert publisher.offered == publisher.device_bytes == devices[0].held == 0


@pytest.mark.parametrize("sides", ["neither", "reader", "publisher"])
def test_who_has_no_transfer_server_gets_bytes(devices, sides):
  mine = devices[0] if sides == "publisher" else None
  theirs = devices[1] if sides == "reader" else None
  found, pages = batches((4,))
  with transfer.Publisher(KEY, devices=mine) as publisher:
    some = dict(enumerate(rows_of(found)))
    ticket = publisher.publish(some, LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=theirs)
    equal(got, pages, range(4))
    assert (got.reads, got.array_reads) == (1, 0)


@pytest.mark.parametrize("hosts", [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_between_addresses_of_two_kinds_bytes_are_sent(hosts):
  found, pages = batches((3,))
  mine, theirs = map(transfer.DeviceServer, hosts)
  with transfer.Publisher(KEY, devices=mine) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=theirs)
    equal(got, pages, range(3))
    assert (got.array_reads, got.completed) == (0, True)


def test_one_server_on_both_sides():
  found, pages = batches((3,))
  both = transfer.DeviceServer("::1", streams=3)
  with transfer.Publisher(KEY, devices=both) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=both)
    equal(got, pages, range(3))
    assert got.array_reads == 1


def test_pages_of_the_host_beside_pages_of_devices(publisher, devices):
  found, pages = batches((2,))
  mixed = {5: pages[0], 6: rows_of(found)[1], 8: rows_of(found)[0]}
  ticket = publisher.publish(mixed, LAYOUT)
  got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
  equal(got, pages, [0, 1, 0])
  # One read of both kinds is of bytes.
  assert (got.reads, got.array_reads) == (2, 1)


@pytest.mark.parametrize(
  ("which", "places"),
  [
    ([6, 5, 4, 3, 2, 1, 0], None),
    ([1, 2, 3, 4, 6], [9, 8, 0, 1, 2]),
    ([2, 4, 3], [0, 1, 2]),
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
  ],
)
def test_some_pages_into_places(publisher, devices, which, places):
  found, pages = batches((4, 3))
  # A batch's rows are published in another order.
  rows = rows_of(found)
  order = [3, 1, 0, 2, 6, 4, 5]
  ticket = publisher.publish(
    {n: rows[x] for n, x in enumerate(order)}, LAYOUT, readers=2
  )
  got, bytes_ = (
    transfer.pull(
      ticket, publisher.address, KEY, pages=which, places=places, devices=x,
    )
    for x in (devices[1], None)
  )  # fmt: skip
  ends = places or range(len(which))
  for n, leaf in enumerate(LAYOUT.leaves):
    want = np.stack([pages[order[x]][n] for x in which])
    for one in (got, bytes_):
      np.testing.assert_array_equal(one.arrays[leaf.name][list(ends)], want)
  assert got.array_reads == got.reads == bytes_.reads


def test_parts_of_pages(publisher, devices):
  found, pages = batches((7,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT, readers=9)
  pull = lambda **how: transfer.pull(
    ticket, publisher.address, KEY, devices=devices[1], **how
  )
  got = pull(want={"head": (1, 4)})
  cut = np.s_[..., 1:4, :], np.s_[..., 1:4]
  equal(got, pages, range(7), cut)
  got = pull(want={"token": (2, 3), "head": (5, 6)}, pages=[0, 1, 2, 3, 4])
  equal(got, pages, range(5), (np.s_[:, 2:3, 5:6], np.s_[..., 5:6]))
  got = pull(want={"layer": (1, 2)})
  equal(got, pages, range(7), (np.s_[1:], np.s_[1:]))
  assert got.array_reads == 1


@pytest.mark.parametrize("dtype", transfer.description.DTYPES)
def test_every_dtype(publisher, devices, dtype):
  bits = np.random.default_rng(3).integers(0, 256, (5, 64), np.uint8)
  if dtype == "bool":
    bits &= 1
  with jax.enable_x64(True):
    data = bits.view(transfer.description.dtype_of(dtype))
    batch = transfer.PageBatch((jnp.asarray(data),))
    layout = transfer.PageLayout.of("k", dtype, data.shape[1:], "n")
    ticket = publisher.publish({n: batch[n] for n in range(5)}, layout)
  # The reader's process may know of 32 bits only.
  got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
  np.testing.assert_array_equal(got.arrays["k"].view(np.uint8), bits)
  assert got.array_reads == 1


@pytest.mark.parametrize("explicit", [True, False])
def test_shards_of_a_mesh_reach_other_shards(devices, explicit):
  kind = (
    jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
  )
  mesh = jax.make_mesh((2, 3), ("seq", "head"), axis_types=(kind,) * 2)
  pages = make_pages(range(6))
  spec = jax.P(None, "seq", None, "head"), jax.P(None, "seq")
  leaves = [
    jax.device_put(np.stack(x, 1), jax.NamedSharding(mesh, s))
    for x, s in zip(zip(*pages.values(), strict=True), spec, strict=True)
  ]
  batch = transfer.PageBatch(tuple(leaves), 1)
  with transfer.Publisher(KEY, devices=devices[0]) as publisher:
    ticket = publisher.publish({n: batch[n] for n in range(6)}, LAYOUT)
    # Two of three shards' heads are cut; copies of the scales go once.
    got = transfer.pull_shards(
      [(ticket, publisher.address)],
      KEY,
      want={"head": (1, 4)},
      devices=devices[1],
    )
  equal(got, pages, range(6), (np.s_[..., 1:4, :], np.s_[..., 1:4]))
  assert (got.reads, got.array_reads) == (1, 1)


def test_bytes_on_devices_are_those_of_whole_batches(publisher):
  found, _ = batches((3, 2))
  rows = rows_of(found)
  one = publisher.publish({0: rows[0], 1: rows[2]}, LAYOUT)
  assert publisher.device_bytes == 3 * LAYOUT.nbytes
  two = publisher.publish({7: rows[4], 1: rows[2]}, LAYOUT)
  assert publisher.device_bytes == 5 * LAYOUT.nbytes
  publisher.withdraw(one)
  assert publisher.device_bytes == 5 * LAYOUT.nbytes
  publisher.withdraw(two)
  mesh = jax.make_mesh((2, 4), ("x", "y"))
  place = jax.NamedSharding(mesh, jax.P(None, "x"))
  batch = transfer.PageBatch((jax.device_put(np.zeros((3, 4), "f4"), place),))
  layout = transfer.PageLayout.of("k", "float32", (4,), "n")
  publisher.publish({9: batch[1]}, layout)
  assert publisher.device_bytes == 4 * 3 * layout.nbytes


@pytest.mark.parametrize("streams", [(8, 1), (1, 8), (3, 3)])
def test_other_numbers_of_streams(streams):
  here, there = (transfer.DeviceServer(streams=n) for n in streams)
  found, pages = batches((4,))
  with transfer.Publisher(KEY, devices=here) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=there)
  equal(got, pages, range(4))
  assert got.array_reads == 1


def test_without_room_for_an_offer_bytes_are_sent(devices):
  found, pages = batches((4,))
  small = transfer.DeviceServer(most=3 * LAYOUT.nbytes)
  with transfer.Publisher(KEY, devices=small) as publisher:
    ticket = publisher.publish(
      dict(zip((1, 2, 3, 9), rows_of(found), strict=True)), LAYOUT
    )
    got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
    assert (got.reads, got.array_reads) == (2, 2)
    ticket = publisher.publish(dict(enumerate(rows_of(found), 20)), LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
    equal(got, pages, range(4))
    assert (got.reads, got.array_reads) == (1, 0)


def test_nothing_is_cut_without_room_for_it(devices, monkeypatch):
  cut = []
  taken = device_pages._taken
  monkeypatch.setattr(
    device_pages, "_taken", lambda *args: cut.append(0) or taken(*args)
  )
  found, pages = batches((5,))
  for most, cuts in ((LAYOUT.nbytes // 3, 0), (LAYOUT.nbytes, 2)):
    small = transfer.DeviceServer(most=most)
    with transfer.Publisher(KEY, devices=small) as publisher:
      ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
      half = dict(pages=[1], want={"layer": (0, 1)}, devices=devices[1])
      got = transfer.pull(ticket, publisher.address, KEY, **half)
      equal(got, pages, [1], (np.s_[:1], np.s_[:1]))
    assert len(cut) == cuts


@pytest.mark.parametrize(
  ("name", "most", "arrays"),
  [
    ("_MOST_PIECES", 8, 1),
    ("_MOST_PIECES", 7, 0),
    ("_MOST_PIECES", 5, 0),
    ("MOST_MESSAGE", 1000, 1),
    ("MOST_MESSAGE", 500, 0),
  ],
)
def test_too_many_pieces_are_sent_as_bytes(
  publisher, devices, monkeypatch, name, most, arrays
):
  found, pages = batches((1, 1, 4))
  ticket = publisher.publish(dict(enumerate(rows_of(found)[:5])), LAYOUT)
  monkeypatch.setattr(device_pages, name, most)
  # Of three rows of a batch two and one are a piece.
  got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
  equal(got, pages, range(5))
  assert (got.reads, got.array_reads) == (1, arrays)


@pytest.mark.long
def test_a_read_of_more_pieces_than_a_message_can_name(publisher, devices):
  shape, axes = (1,) * 16, tuple("abcdefghijklmnop")
  leaves = [transfer.PageLeaf(f"{n}", "int8", shape, axes) for n in range(9)]
  layout = transfer.PageLayout(tuple(leaves))
  data = np.arange(900 * 9).astype(np.int8).reshape(900, 9, *shape)
  found = [
    transfer.PageBatch(tuple(map(jnp.asarray, x[:, None])))[0] for x in data
  ]
  ticket = publisher.publish(dict(enumerate(found)), layout)
  got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
  for n in range(9):
    np.testing.assert_array_equal(got.arrays[f"{n}"], data[:, n])
  assert (got.reads, got.array_reads) == (1, 0)


class Asks:
  """A reader that asks for arrays, and does what a test wants then."""

  def __init__(self, publisher, ticket):
    link = socket.create_connection(publisher.address)
    self.wire = wire.PullConnection(link, 60, "publisher")
    self.wire.greet_server(KEY)
    self.wire.tell(
      protocol.ReadRequest(ticket.incarnation, "x", 0, ticket.pages),
      devices=True,
    )
    _, beside = self.wire.hear()
    self.offer = beside["arrays"]


def test_arrays_that_nobody_takes_are_forgotten(devices):
  mine = transfer.DeviceServer()
  found, _ = batches((3,))
  back = Returned()
  rows = dict(enumerate(rows_of(found)))
  with transfer.Publisher(KEY, devices=mine, lease_s=0.5, patience_s=0.5) as p:
    ticket = p.publish(rows, LAYOUT, released=back)
    reader = Asks(p, ticket)
    assert mine.held == 3 * LAYOUT.nbytes
    # It says nothing; the page returns with the read, the offer with its end.
    assert back.wait(3) == [0, 1, 2] and p.counters.broken == 1
    until(lambda: mine.held == 0)
    # It comes too late.
    place = reader.offer
    shapes = [jax.ShapeDtypeStruct((2, 3, 4, 6, 3), jnp.bfloat16)]
    at = place["host"], tuple(place["ports"]), place["number"]
    late = devices[1].pull(*at, shapes, seconds=60)
    time.sleep(0.3)
    assert not late[0].is_ready()
  reader.wire.close()


@pytest.mark.parametrize(
  "said", [{"came": 1}, {"came": -1, "done": False}, {"came": 0, "done": 1}, {}]
)
def test_a_reader_that_says_what_it_should_not(publisher, said):
  found, _ = batches((2,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  reader = Asks(publisher, ticket)
  reader.wire.tell_object(said)
  assert reader.wire.hear_object(1000) is None
  reader.wire.close()
  until(lambda: publisher.counters.strangers == publisher.counters.broken == 1)
  publisher.withdraw(ticket)
  until(lambda: publisher.offered == 0)


@pytest.mark.parametrize(
  "change",
  [
    lambda x: x["pieces"].pop(),
    lambda x: x["pieces"].append(x["pieces"][0]),
    lambda x: x["pieces"][0].__setitem__(0, [1, 0]),
    lambda x: x["pieces"][0].__setitem__(0, [0, 5]),
    lambda x: x["pieces"][0][1].pop(),
    lambda x: x["pieces"][0][1][0][2].__setitem__(0, [0, 1]),
    lambda x: x["pieces"][0][1][0][2].__setitem__(0, [0, 3]),
    lambda x: x["pieces"][0][1][0][2].__setitem__(0, [1, 1]),
    lambda x: x["pieces"][0][1][0].__setitem__(0, 7),
    lambda x: x["pieces"][0][1][0].__setitem__(1, 9),
    lambda x: x.update(pieces="all"),
    lambda x: x.update(ports=[-1, 5]),
    lambda x: x.update(ports=[5]),
    lambda x: x.update(ports=[5] * 10),
    lambda x: x.update(ports=5),
    lambda x: x.update(number="one"),
    lambda x: x.pop("host"),
    lambda x: x.update(host="localhost"),
  ],
)
def test_a_publisher_that_offers_what_was_not_asked_for(
  publisher, devices, monkeypatch, change
):
  found, _ = batches((2,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  offered = transfer.Publisher._offered_arrays

  def changed(*args):
    offer, fields = offered(*args)
    fields["pieces"] = [list(map(list, x)) for x in fields["pieces"]]
    for _, some in fields["pieces"]:
      for one in some:
        one[2] = list(one[2])
    change(fields)
    return offer, fields

  monkeypatch.setattr(transfer.Publisher, "_offered_arrays", changed)
  with pytest.raises(transfer.HostileMessageError, match="not of the protocol"):
    transfer.pull(ticket, publisher.address, KEY, devices=devices[1])


@pytest.mark.parametrize("where", ["nobody", "another"])
def test_a_server_that_sends_nothing_is_avoided(where, monkeypatch):
  clock = time.monotonic
  found, pages = batches((2,))
  theirs = transfer.DeviceServer()

  class Elsewhere(transfer.DeviceServer):
    def offer(self, arrays, seconds):
      made = super().offer(arrays, seconds)
      if where == "nobody":
        with socket.create_server(("127.0.0.1", 0)) as free:
          return made._replace(ports=(free.getsockname()[1],) * 2)
      return made._replace(number=made.number ^ 1)

  with transfer.Publisher(KEY, devices=Elsewhere()) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    pull = lambda: transfer.pull(
      ticket, publisher.address, KEY, devices=theirs, patience_s=0.5
    )
    if where == "another":
      with pytest.raises(rj.PeerError, match="did nothing for 0.5 s"):
        pull()
    got = pull()
    equal(got, pages, range(2))
    assert (got.array_reads, got.completed) == (0, True)
  # Behind a pause it is asked again, and then avoided for longer.
  number, later = ticket.incarnation, 0
  monkeypatch.setattr(time, "monotonic", lambda: clock() + later)
  assert not theirs.reaches(number)
  later = 16
  assert theirs.reaches(number)
  theirs.avoid(number, "127.0.0.1", (1, 1))
  later = 16 + 29
  assert not theirs.reaches(number)
  later = 16 + 31
  assert theirs.reaches(number)


def test_a_pull_that_fails_goes_on_with_bytes(publisher, monkeypatch):
  found, pages = batches((2,))
  theirs = transfer.DeviceServer()

  def pull(*args, **options):
    raise jax.errors.JaxRuntimeError("no way")

  monkeypatch.setattr(theirs, "pull", pull)
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  got = transfer.pull(ticket, publisher.address, KEY, devices=theirs)
  equal(got, pages, range(2))
  assert (got.reads, got.array_reads) == (1, 0)
  assert not theirs.reaches(ticket.incarnation)


@pytest.mark.parametrize("error", [OSError, jax.errors.JaxRuntimeError])
def test_a_server_that_does_not_start_is_done_without(
  devices, monkeypatch, error
):
  found, pages = batches((2,))
  mine = transfer.DeviceServer()

  def start(*_):
    raise error("no port is free")

  monkeypatch.setattr(mine, "_start", start)
  with transfer.Publisher(KEY, devices=mine) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    got = transfer.pull(ticket, publisher.address, KEY, devices=devices[1])
    equal(got, pages, range(2))
    assert (got.reads, got.array_reads) == (1, 0)


class Slow:
  """An array that is there later."""

  def __init__(self, array, seconds):
    self.array, self.end = array, time.monotonic() + seconds

  def is_ready(self):
    return time.monotonic() > self.end and self.array.is_ready()

  def __array__(self, *_, **__):
    return np.asarray(self.array)


class Slowly(transfer.DeviceServer):
  """Arrays are there one by one."""

  def pull(self, *args, **options):
    made = super().pull(*args, **options)
    return [Slow(x, 0.06 * n) for n, x in enumerate(made, 1)]


@pytest.mark.parametrize("theirs_s", [0.5, 60])
def test_arrays_that_come_one_by_one_keep_both_patient(devices, theirs_s):
  found, pages = batches((1,) * 8)

  with transfer.Publisher(KEY, devices=devices[0], patience_s=0.5) as publisher:
    ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
    # 16 arrays take a second.
    got = transfer.pull(
      ticket, publisher.address, KEY, devices=Slowly(), patience_s=theirs_s
    )
    equal(got, pages, range(8))
    assert got.completed and got.array_reads == 1


def test_sockets_of_large_numbers(publisher):
  found, pages = batches((2,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  most = resource.getrlimit(resource.RLIMIT_NOFILE)
  held = []
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, most[1]))
    with open(os.devnull) as some:
      held += [os.dup(some.fileno()) for _ in range(1100)]
    got = transfer.pull(ticket, publisher.address, KEY, devices=Slowly())
  finally:
    for x in held:
      os.close(x)
    resource.setrlimit(resource.RLIMIT_NOFILE, most)
  equal(got, pages, range(2))
  assert got.array_reads == 1


def test_arrays_that_are_deleted_are_refused_by_name(publisher, devices):
  found, _ = batches((2,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  found[0].leaves[1].delete()
  for one in (devices[1], None):
    with pytest.raises(transfer.StaleTicketError, match="deleted or donated"):
      transfer.pull(ticket, publisher.address, KEY, devices=one)


def test_a_ticket_that_ended_is_refused_with_arrays_too(publisher, devices):
  found, _ = batches((2,))
  ticket = publisher.publish(dict(enumerate(rows_of(found))), LAYOUT)
  publisher.withdraw(ticket)
  with pytest.raises(transfer.StaleTicketError, match="not published any more"):
    transfer.pull(ticket, publisher.address, KEY, devices=devices[1])


def test_other_arrays_under_an_offered_number_are_refused(publisher):
  found, _ = batches((2,))
  rows = rows_of(found)
  publisher.publish({0: rows[0]}, LAYOUT)
  publisher.publish({0: rows[0]}, LAYOUT)
  with pytest.raises(rj.OptionError, match="other memory"):
    publisher.publish({0: rows[1]}, LAYOUT)


def test_batches_that_do_not_fit(publisher):
  x = jnp.zeros((2, 3, 4))
  with pytest.raises(rj.OptionError, match="as many pages in each"):
    transfer.PageBatch((x, jnp.zeros((3, 4))))
  with pytest.raises(rj.OptionError, match="axis"):
    transfer.PageBatch((x,), 3)
  with pytest.raises(rj.OptionError, match="row"):
    transfer.PageBatch((x,))[2]
  layout = transfer.PageLayout.of("k", "float32", (3, 5), "a b")
  with pytest.raises(rj.OptionError, match="leaves"):
    publisher.publish({0: transfer.PageBatch((x,))[0]}, layout)
  layout = transfer.PageLayout.of("k", "float32", (3, 4), "a b")
  for row in (-1, 2):
    page = transfer.DevicePage(transfer.PageBatch((x,)), row)
    with pytest.raises(rj.OptionError, match="row of page 7"):
      publisher.publish({7: page}, layout)


@pytest.mark.parametrize(
  "host", ["0.0.0.0", "::", "localhost", "", "198.51.100.7", "2001:db8::1"]
)
def test_addresses_that_others_cannot_reach(host):
  with pytest.raises(rj.OptionError, match="an address of this machine"):
    transfer.DeviceServer(host)


@pytest.mark.parametrize("at", [0.1, 0.6])
def test_an_offer_lasts_its_seconds(devices, at):
  x = jnp.arange(3)
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
  time.sleep((at - time.time()) % 1)
  offer = devices[0].offer([x], 0.3)
  (got,) = devices[1].pull(
    "127.0.0.1", offer.ports, offer.number, shapes, seconds=9
  )
  until(got.is_ready)
  np.testing.assert_array_equal(got, x)
  devices[0].taken(offer)


def test_what_can_not_be_forgotten_at_once_is_later(monkeypatch):
  server, failed = transfer.DeviceServer(), []
  zeros = jnp.zeros

  def full(*args, **kwargs):
    if len(failed) < 2:
      failed.append(0)
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
    return zeros(*args, **kwargs)

  monkeypatch.setattr(jnp, "zeros", full)
  server.offer([jnp.ones(3)], 0.1)
  until(lambda: server.held == 0)
  assert len(failed) == 2


def test_room_comes_back_from_offers_that_are_over():
  server = transfer.DeviceServer(most=1 << 20)
  for _ in range(3):
    assert server.offer([jnp.ones((1 << 18,), jnp.int8)], 0.2) is not None
  assert server.held == 3 << 18
  until(lambda: server.held == 0)
  assert server.offer([jnp.ones((1 << 20,), jnp.int8)], 60) is not None
  assert server.offer([jnp.ones((1,), jnp.int8)], 60) is None
