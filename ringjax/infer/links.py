"""Both ends of a link of a chain: keys and values come and go by threads.

Law: layers pass in order, each exactly the rows that somebody behind needs;
at most `credits` of them wait at either end. Whoever waits is woken when the
neighbour fails.

The receiver grants; the sender sends a layer for each grant: a header of layer,
first row and end, then the rows of every head, keys before values.
"""

from __future__ import annotations

import collections
import struct
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ringjax.errors import PeerError
from ringjax.infer.layerwise import Place
from ringjax.infer.spans import Events
from ringjax.parallel import peers as peers_

_HEADER = struct.Struct("<III")


def first_needed(place: Place, end: int) -> int:
  """The first of `end` keys that a query behind them may see."""
  return 0 if place.behind is None else max(0, end - place.behind)


class Box:
  """A thread at one end of a link."""

  def __init__(self, owner: Any, places: Sequence[Place], events: Events):
    self.owner, self.peers = owner, owner.peers
    self.places, self.events = places, events
    self.ready: collections.deque[Any] = collections.deque()
    self.thread = threading.Thread(target=self._guarded, daemon=True)

  def start(self) -> None:
    self.thread.start()

  def work(self) -> None:
    raise NotImplementedError

  @property
  def neighbour(self) -> int:
    raise NotImplementedError

  def _guarded(self) -> None:
    try:
      self.work()
    except PeerError as error:
      self.peers.blame(self.neighbour, f"{error}", 0.0)
    except OSError as error:
      # The watch knows better what happened, if it does.
      self.peers.blame(self.neighbour, f"closed its link: {error}")
    except BaseException as error:
      self.peers.abandon(error)


class Inbox(Box):
  """Keys and values of the tokens before, layer by layer."""

  def __init__(
    self,
    owner: Any,
    places: Sequence[Place],
    end: int,
    room: int,
    events: Events,
  ):
    super().__init__(owner, places, events)
    self.end, self.room = end, room
    self.free: dict[tuple[int, ...], list[Any]] = collections.defaultdict(list)
    self.granted = 0

  @property
  def neighbour(self) -> int:
    return self.peers.rank - 1

  def start(self) -> None:
    for _ in range(min(self.owner.credits, len(self.places))):
      self._grant()
    super().start()

  def take(self, place: Place) -> tuple[Any, Any]:
    """A layer's keys as soon as they are there: the buffers, and on the device.

    The latter may be the former, to which they are to be given back.
    """
    start_s = self.events.now()
    self.peers.wait(lambda: bool(self.ready))
    self.events.add("wait", place.number, start_s)
    pair = self.ready.popleft()
    return pair, jax.device_put(pair, SingleDeviceSharding(self.owner.device))

  def give_back(self, pair: Any) -> None:
    """Buffers that may be filled again."""
    self.free[pair[0].shape].append(pair)
    if self.granted < len(self.places):
      self._grant()

  def _grant(self) -> None:
    """Lets the sender send one more layer."""
    self.granted += 1
    try:
      self.peers.link(self.neighbour).sendall(b"+")
    except OSError as error:
      raise self.peers.blame(
        self.neighbour, f"closed its link: {error}"
      ) from None

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    for place in self.places:
      header = np.zeros(_HEADER.size, np.uint8)
      peers_.receive(link, [header])
      start_s = self.events.now()
      layer, first, end = _HEADER.unpack(header.tobytes())
      want = (place.number, first_needed(place, self.end), self.end)
      if (layer, first, end) != want:
        raise PeerError(
          f"rank {self.neighbour} sent rows {first} to {end} of layer {layer}; "
          f"wanted {want[1]} to {want[2]} of layer {want[0]}",
          self.neighbour,
        )
      pair = self._buffers(place)
      if first:
        for x in pair:
          x[:, :, :first] = 0
      rows = [x[0, h, first:end] for x in pair for h in range(x.shape[1])]
      peers_.receive(link, rows)
      self.events.add("receive", place.number, start_s)
      self.ready.append(pair)
      self.peers.wake()

  def _buffers(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
    a = place.layer.attention
    shape = (1, a.kv_heads, self.room, a.head_dim)
    if self.free[shape]:
      return self.free[shape].pop()
    make = lambda: np.zeros(shape, self.owner.dtype)
    return make(), make()


class Outbox(Box):
  """Keys and values on their way to the next rank."""

  def __init__(
    self, owner: Any, places: Sequence[Place], end: int, events: Events
  ):
    super().__init__(owner, places, events)
    self.end, self.sent = end, 0

  @property
  def neighbour(self) -> int:
    return self.peers.rank + 1

  def put(self, place: Place, keys: tuple[jax.Array, jax.Array]) -> None:
    """Has a layer sent; waits while too many are under way."""
    start_s = self.events.now()
    under_way = lambda: place.number - self.sent
    if under_way() >= self.owner.credits:
      self.peers.wait(lambda: under_way() < self.owner.credits)
      self.events.add("full", place.number, start_s)
    self.ready.append((place, keys))
    self.peers.wake()

  def finish(self) -> None:
    """Waits until all is sent."""
    self.peers.wait(lambda: self.sent == len(self.places))

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    grant = np.zeros(1, np.uint8)
    for _ in self.places:
      self.peers.rest(lambda: bool(self.ready))
      place, keys = self.ready.popleft()
      host = [np.asarray(x) for x in keys]
      del keys
      peers_.receive(link, [grant])
      start_s = self.events.now()
      first = first_needed(place, self.end)
      rows = [
        x[0, h, first : self.end] for x in host for h in range(x.shape[1])
      ]
      header = _HEADER.pack(place.number, first, self.end)
      peers_.send(link, [np.frombuffer(header, np.uint8), *rows])
      nbytes = sum(r.nbytes for r in rows)
      self.events.add("send", place.number, start_s, nbytes)
      self.sent += 1
      self.peers.wake()
