"""JAX's transfer server: arrays from devices to the host of another process.

Guarantees: an array that is offered can be pulled once, by who was told its
number, if it begins before the seconds of the offer are over; then it is
forgotten. A pull can be given up at any time. Offers that are neither taken nor
over hold `most` bytes at most.
Cost: the threads and free ports of a server of JAX for pulls, and of one for
each kind of device that arrays leave; a thread that forgets offers; all of them
until the process ends.

JAX's server asks nobody for a key, and a few bytes that it does not expect end
its process. Numbers of offers are random, and told to those who have the key of
a `Publisher` alone; who may reach the ports at all is a matter of the network.
A process whose connection to another one's ports is refused is ended, too: a
reader tries them before JAX does, from its own address.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError

# Those who pull have other clocks; it only bounds what is forgotten at last.
_PULL_S = 24 * 3600.0
# What could not be forgotten is tried again after so long.
_AGAIN_S = 0.25
# For so long a publisher is avoided from which nothing came: at first, at most.
_PAUSES_S = 15.0, 3600.0
_Ports = tuple[int, ...]
MOST_STREAMS = 8
# To find ports that stay free.
_TRIES = 5


class ArrayOffer(NamedTuple):
  """Arrays that a reader can pull.

  Fields:
    ports: of the server that has them, first the one for commands.
    number: under which it has them.
    nbytes: of all.
    until: seconds of `time.monotonic` when they are forgotten.
  """

  ports: tuple[int, ...]
  number: int
  nbytes: int
  until: float


class DeviceServer:
  """JAX's transfer server of this process, for publishers and readers.

  Attributes:
    host: the address of this machine that others reach.
    most: bytes of offers that are neither taken nor over.
    streams: connections over which bytes leave.
  """

  def __init__(
    self, host: str = "127.0.0.1", *, most: int = 1 << 30, streams: int = 1
  ):
    """Listens at once.

    Args:
      host: an address of this machine in numbers, such as 10.0.0.5.
      most: bytes of arrays on offer at once; beyond these pages go the other
        way.
      streams: connections over which the bytes of arrays leave, 8 at most.

    Raises:
      OptionError: this JAX has no transfer server, or the address is none of
        this machine.
    """
    try:
      address = ipaddress.ip_address(host)
    except ValueError:
      address = None
    if address is None or address.is_unspecified:
      raise _no_address(repr(host))
    self.host, self.most = host, positive_int("most", most)
    self.streams = integer("streams", streams, least=1, most=MOST_STREAMS)
    self._start = _starter()
    self._lock = threading.Condition()
    self._forgets: threading.Thread | None = None
    self._servers: dict[tuple[Any, bool], tuple[Any, _Ports]] = {}
    self._links: dict[tuple[str, _Ports], Any] = {}
    self._offers: dict[int, tuple[ArrayOffer, jax.Device]] = {}
    # By incarnation the seconds of a pause, and its end.
    self._avoided: dict[int, tuple[float, float]] = {}
    try:
      self._server(host_device().client, offers=False)
    except (OSError, RuntimeError) as error:
      raise _no_address(f"{host}: {str(error)[:200]}") from None

  @property
  def held(self) -> int:
    """Bytes of offers that are neither taken nor over."""
    with self._lock:
      return self._held()

  def _held(self) -> int:
    return sum(x.nbytes for x, _ in self._offers.values())

  # -------------------------------------------------------------------------
  # Offers
  # -------------------------------------------------------------------------

  def offer(
    self, arrays: Sequence[Shaped[Array, " ..."]], seconds: int | float
  ) -> ArrayOffer | None:
    """Lets one reader pull arrays, each on one device of one kind.

    Args:
      arrays: as they are now, however long it takes.
      seconds: until they are forgotten, and up to one more, unless the reader
        has begun.

    Returns:
      None if there is no room for them.
    """
    number("seconds", seconds, above=0)
    nbytes = sum(x.nbytes for x in arrays)
    device = next(iter(arrays[0].devices()))
    server, ports = self._server(device.client, offers=True)
    end = _in(seconds)
    until = time.monotonic() + end.timestamp() - time.time()
    made = ArrayOffer(ports, secrets.randbits(62), nbytes, until)
    with self._lock:
      if self._held() + nbytes > self.most:
        return None
      self._offers[made.number] = made, device
      if self._forgets is None:
        self._forgets = threading.Thread(
          target=self._forget, name="ringjax offers", daemon=True
        )
        self._forgets.start()
      self._lock.notify_all()
    try:
      server.await_pull(made.number, list(arrays), timeout=end)
    except BaseException:
      self.taken(made)
      raise
    return made

  def taken(self, offer: ArrayOffer) -> None:
    """Says that a reader has all of an offer."""
    with self._lock:
      self._offers.pop(offer.number, None)

  def _forget(self) -> None:
    """Forgets offers that are over."""
    while True:
      with self._lock:
        ends = [x.until for x, _ in self._offers.values()]
        if not ends:
          self._lock.wait()
          continue
        # A bit later, as the two clocks do not agree to the last digit.
        now = time.monotonic() - 0.02
        left = min(ends) - now
        if left > 0:
          self._lock.wait(left)
          continue
        over = [n for n, (x, _) in self._offers.items() if x.until <= now]
        devices = {self._offers[n][1] for n in over}
      try:
        for device in devices:
          # JAX's server looks at the ends of its offers when another one comes.
          past = jnp.zeros((), jnp.int8, device=device)
          server, _ = self._server(device.client, offers=True)
          server.await_pull(secrets.randbits(62), [past], timeout=_in(-2.0))
      except RuntimeError:
        # A device without memory for a number: once more, before long.
        time.sleep(_AGAIN_S)
        continue
      with self._lock:
        for n in over:
          self._offers.pop(n, None)

  # -------------------------------------------------------------------------
  # Pulls
  # -------------------------------------------------------------------------

  def pull(
    self,
    host: str,
    ports: tuple[int, ...],
    number: int,
    shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    seconds: int | float,
  ) -> list[Shaped[Array, " ..."]]:
    """Begins to pull the arrays of an offer into the memory of the host.

    Args:
      host: of the server that has them.
      ports: of it.
      number: of the offer.
      shapes: of its arrays.
      seconds: until each port is given up that does not answer.

    Returns:
      Arrays that are ready (`is_ready`) once they are here, or once an error is
      known, which their use raises. What is not ready may be dropped.

    Raises:
      OSError: a port is not reached from `host` of this server.
    """
    device = host_device()
    place = jax.sharding.SingleDeviceSharding(device)
    wanted = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes
    ]
    server, _ = self._server(device.client, offers=False)
    link = self._links.get((host, ports))
    if link is None:
      for port in ports:
        socket.create_connection(
          (host, port), seconds, source_address=(self.host, 0)
        ).close()
      with self._lock:
        link = server.connect(_text(host, ports[0]))
        self._links[host, ports] = link
    return link.pull(number, wanted, timeout=_in(_PULL_S))

  def avoid(self, incarnation: int, host: str, ports: tuple[int, ...]) -> None:
    """Notes that nothing came from a publisher this way."""
    with self._lock:
      before, _ = self._avoided.get(incarnation, (0.0, 0.0))
      pause = min(max(2 * before, _PAUSES_S[0]), _PAUSES_S[1])
      self._avoided[incarnation] = pause, time.monotonic() + pause
      self._links.pop((host, ports), None)

  def reaches(self, incarnation: int) -> bool:
    """Whether a publisher may be asked to send this way: the first time, and
    behind pauses of 15 s to an hour."""
    _, end = self._avoided.get(incarnation, (0.0, 0.0))
    return time.monotonic() >= end

  def _server(self, client: Any, *, offers: bool) -> tuple[Any, _Ports]:
    """The server of a kind of devices, and its ports.

    One that pulls binds its side of each connection to what it listens at, so
    that it can't do so at ports that it has to tell; with fewer than the other
    side has it would end.
    """
    key = client, offers
    count = 1 + (self.streams if offers else MOST_STREAMS)
    with self._lock:
      for left in range(_TRIES, 0, -1):
        if key in self._servers:
          break
        try:
          ports = _free_ports(self.host, count) if offers else (0,) * count
          places = [_text(self.host, port) for port in ports]
          server = self._start(client, places[0], places[1:])
          self._servers[key] = server, ports
        except RuntimeError:
          # Another process may have taken one of them.
          if left == 1:
            raise
      return self._servers[key]


def host_device() -> jax.Device:
  """The device whose memory is the host's; else the first one."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return jax.local_devices()[0]


def _free_ports(host: str, count: int) -> tuple[int, ...]:
  """Ports that nobody has; those that JAX chooses it does not tell."""
  with contextlib.ExitStack() as stack:
    made = [
      stack.enter_context(socket.create_server((host, 0), family=_family(host)))
      for _ in range(count)
    ]
    return tuple(x.getsockname()[1] for x in made)


def _family(host: str) -> socket.AddressFamily:
  return socket.AF_INET6 if ":" in host else socket.AF_INET


def _no_address(got: str) -> OptionError:
  return OptionError(
    "host",
    got,
    "an address of this machine that others reach, such as 10.0.0.5",
    "pass the one of the network between the processes",
  )


def _starter() -> Callable[..., Any]:
  """What starts a server of JAX."""
  try:
    from jax.experimental import transfer

    return transfer.start_transfer_server
  except (ImportError, AttributeError):
    raise OptionError(
      "devices",
      f"JAX {jax.__version__}, without jax.experimental.transfer",
      "a JAX with a transfer server",
      "install another one, or move pages over sockets alone",
    ) from None


def _text(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _in(seconds: int | float) -> datetime.datetime:
  """A time so far from now; the next whole second, as JAX drops what is behind
  the point."""
  return datetime.datetime.fromtimestamp(
    math.ceil(time.time() + seconds), datetime.UTC
  )
