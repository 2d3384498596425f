"""JAX's transfer server: arrays from devices to the host of another process.

Guarantees: an offered array can be pulled once, by the peer that got its
number, if the pull begins before the offer ends; then it is dropped. A pull can
be abandoned at any time. Open offers hold at most `most` bytes.
Cost: the threads and free ports of one JAX server for pulls, and of one for
each kind of device that arrays leave; a thread that drops offers; all of them
until the process ends.

JAX's server requires no key, and a few unexpected bytes end its process.
Numbers of offers are random, and only sent to peers that have the key of
a `Publisher`; access to the ports must be limited by the network.
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

# Readers' clocks differ; this only bounds when a pull is finally dropped.
_PULL_S = 24 * 3600.0
# Seconds until offers that could not be dropped are tried again.
_AGAIN_S = 0.25
# Seconds for which a publisher without arrivals is avoided: first, maximum.
_PAUSES_S = 15.0, 3600.0
_Ports = tuple[int, ...]
MOST_STREAMS = 8
# Attempts to find ports that stay free.
_TRIES = 5


class ArrayOffer(NamedTuple):
  """Arrays that a reader can pull.

  Fields:
    ports: Ports of the server that has them, first the one for commands.
    number: Number of the offer at the server.
    nbytes: Bytes of all arrays.
    until: Time in seconds of `time.monotonic` when they are dropped.
  """

  ports: tuple[int, ...]
  number: int
  nbytes: int
  until: float


class DeviceServer:
  """JAX's transfer server of this process, for publishers and readers.

  Attributes:
    host: Address of this machine that others reach.
    most: Maximum bytes of open offers.
    streams: Number of connections over which bytes are sent.
  """

  def __init__(
    self, host: str = "127.0.0.1", *, most: int = 1 << 30, streams: int = 1
  ):
    """Start the server for pulls.

    Args:
      host: Numeric address of this machine, such as 10.0.0.5.
      most: Maximum bytes of arrays on offer at once; further pages are sent as
        bytes.
      streams: Number of connections over which arrays are sent, at most 8.

    Raises:
      OptionError: If this JAX has no transfer server, or the address does not
        belong to this machine.
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
    self._forget_thread: threading.Thread | None = None
    self._servers: dict[tuple[Any, bool], tuple[Any, _Ports]] = {}
    self._links: dict[tuple[str, _Ports], Any] = {}
    self._offers: dict[int, tuple[ArrayOffer, jax.Device]] = {}
    # (seconds of a pause, its end) by incarnation.
    self._avoided: dict[int, tuple[float, float]] = {}
    try:
      self._server(host_device().client, offers=False)
    except (OSError, RuntimeError) as error:
      raise _no_address(f"{host}: {str(error)[:200]}") from None

  @property
  def held(self) -> int:
    """Bytes of open offers."""
    with self._lock:
      return self._held()

  def _held(self) -> int:
    return sum(offer.nbytes for offer, _ in self._offers.values())

  # -------------------------------------------------------------------------
  # Offers
  # -------------------------------------------------------------------------

  def offer(
    self, arrays: Sequence[Shaped[Array, " ..."]], seconds: int | float
  ) -> ArrayOffer | None:
    """Let one reader pull arrays, each on one device of one kind.

    Args:
      arrays: Arrays, with their current contents.
      seconds: Seconds until they are dropped, rounded up by at most one, unless
        the reader has begun.

    Returns:
      The offer, or None if there is no room for it.
    """
    number("seconds", seconds, above=0)
    nbytes = sum(array.nbytes for array in arrays)
    device = next(iter(arrays[0].devices()))
    server, ports = self._server(device.client, offers=True)
    end = _end_time(seconds)
    until = time.monotonic() + end.timestamp() - time.time()
    array_offer = ArrayOffer(ports, secrets.randbits(62), nbytes, until)
    with self._lock:
      if self._held() + nbytes > self.most:
        return None
      self._offers[array_offer.number] = array_offer, device
      if self._forget_thread is None:
        self._forget_thread = threading.Thread(
          target=self._forget_loop, name="ringjax offers", daemon=True
        )
        self._forget_thread.start()
      self._lock.notify_all()
    try:
      server.await_pull(array_offer.number, list(arrays), timeout=end)
    except BaseException:
      self.taken(array_offer)
      raise
    return array_offer

  def taken(self, offer: ArrayOffer) -> None:
    """Record that a reader has all of an offer."""
    with self._lock:
      self._offers.pop(offer.number, None)

  def _forget_loop(self) -> None:
    """Drop expired offers, in a loop."""
    while True:
      with self._lock:
        ends = [offer.until for offer, _ in self._offers.values()]
        if not ends:
          self._lock.wait()
          continue
        # A bit later, as the two clocks differ slightly.
        now_s = time.monotonic() - 0.02
        wait_s = min(ends) - now_s
        if wait_s > 0:
          self._lock.wait(wait_s)
          continue
        expired = [
          n for n, (offer, _) in self._offers.items() if offer.until <= now_s
        ]
        devices = {self._offers[n][1] for n in expired}
      try:
        for device in devices:
          # JAX's server drops expired offers only when a new one comes.
          expired_array = jnp.zeros((), jnp.int8, device=device)
          server, _ = self._server(device.client, offers=True)
          server.await_pull(
            secrets.randbits(62), [expired_array], timeout=_end_time(-2.0)
          )
      except RuntimeError:
        # The device has no memory for one number: try again soon.
        time.sleep(_AGAIN_S)
        continue
      with self._lock:
        for n in expired:
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
    """Begin to pull the arrays of an offer into the memory of the host.

    Args:
      host: Host of the server that has them.
      ports: Ports of that server.
      number: Number of the offer.
      shapes: Shapes and dtypes of its arrays.
      seconds: Timeout of the connection test to each port.

    Returns:
      Arrays that are ready (`is_ready`) once they have arrived, or once an
      error is known, which their use raises. Unready arrays may be dropped.

    Raises:
      OSError: If a port is not reachable from `host` of this server.
    """
    device = host_device()
    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = [
      jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
      for spec in shapes
    ]
    server, _ = self._server(device.client, offers=False)
    link = self._links.get((host, ports))
    if link is None:
      for port in ports:
        socket.create_connection(
          (host, port), seconds, source_address=(self.host, 0)
        ).close()
      with self._lock:
        link = server.connect(_address_text(host, ports[0]))
        self._links[host, ports] = link
    return link.pull(number, specs, timeout=_end_time(_PULL_S))

  def avoid(self, incarnation: int, host: str, ports: tuple[int, ...]) -> None:
    """Record that no array came from a publisher this way."""
    with self._lock:
      last_pause, _ = self._avoided.get(incarnation, (0.0, 0.0))
      pause = min(max(2 * last_pause, _PAUSES_S[0]), _PAUSES_S[1])
      self._avoided[incarnation] = pause, time.monotonic() + pause
      self._links.pop((host, ports), None)

  def reaches(self, incarnation: int) -> bool:
    """Whether to ask a publisher for arrays: at first, and after pauses.

    Pauses take 15 s to an hour.
    """
    _, end = self._avoided.get(incarnation, (0.0, 0.0))
    return time.monotonic() >= end

  def _server(self, client: Any, *, offers: bool) -> tuple[Any, _Ports]:
    """The server of a kind of devices, and its ports.

    A server that pulls binds its side of each connection to its listening
    address, so it can't use fixed ports; with fewer streams than the other side
    has it would abort.
    """
    key = client, offers
    count = 1 + (self.streams if offers else MOST_STREAMS)
    with self._lock:
      for tries_left in range(_TRIES, 0, -1):
        if key in self._servers:
          break
        try:
          ports = _free_ports(self.host, count) if offers else (0,) * count
          addresses = [_address_text(self.host, port) for port in ports]
          server = self._start(client, addresses[0], addresses[1:])
          self._servers[key] = server, ports
        except RuntimeError:
          # Another process may have taken one of the ports.
          if tries_left == 1:
            raise
      return self._servers[key]


def host_device() -> jax.Device:
  """Device whose memory is the host's; else the first device."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return jax.local_devices()[0]


def _free_ports(host: str, count: int) -> tuple[int, ...]:
  """Find free ports, as JAX does not report those that it chooses."""
  with contextlib.ExitStack() as stack:
    sockets = [
      stack.enter_context(socket.create_server((host, 0), family=_family(host)))
      for _ in range(count)
    ]
    return tuple(server.getsockname()[1] for server in sockets)


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
  """JAX's function that starts a transfer server."""
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


def _address_text(host: str, port: int) -> str:
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end_time(seconds: int | float) -> datetime.datetime:
  """Time in `seconds`, rounded up, as JAX drops fractions of a second."""
  return datetime.datetime.fromtimestamp(
    math.ceil(time.time() + seconds), datetime.UTC
  )
