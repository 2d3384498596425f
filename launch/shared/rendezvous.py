"""Rendezvous of all processes, before `jax.distributed` connects them.

JAX aborts a process that waits too long for another, with a C++ stack trace.
So process 0 first listens at the coordinator's address; the others connect,
send their numbers and stay connected. Once all are connected, all continue;
else none does. A process that disconnects is not counted: one that died may be
started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import selectors
import socket
import time
from typing import Any

from ringjax.errors import OptionError
from ringjax.json_text import json_text

_PAUSE_S, _LONGEST = 0.1, 1 << 12
# Seconds to send an answer, which fits the socket's buffer.
_ANSWER_S = 1.0
_GO = "go"


def call(address: str, processes: int, number: int, timeout_s: float) -> None:
  """Returns when all processes have connected.

  Args:
    address: HOST:PORT of process 0.
    processes: Number of processes.
    number: Number of this process, from 0.
    timeout_s: Seconds to wait for the others.

  Raises:
    OptionError: If a process is missing, or their numbers are inconsistent.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise OptionError(
      "--coordinator", address, "HOST:PORT", "pass it like host0:1234"
    )
  if processes == 1:
    return
  end = time.monotonic() + timeout_s
  if number == 0:
    _listen(host.strip("[]"), int(port), processes, end, timeout_s)
  else:
    _report((host.strip("[]"), int(port)), processes, number, end, timeout_s)


def _listen(
  host: str, port: int, processes: int, end: float, timeout_s: float
) -> None:
  """Waits in process 0 for all others, and answers them."""
  with contextlib.ExitStack() as stack:
    try:
      servers = [stack.enter_context(server) for server in _servers(host, port)]
    except OSError as error:
      raise OptionError(
        "--coordinator",
        f"port {port}: {error.strerror}",
        "a free port of the machine that process 0 is on",
        "pass another port",
      ) from None
    attendance = stack.enter_context(_Attendance(servers, processes))
    fault = None
    while fault is None and not attendance.complete():
      remaining_s = end - time.monotonic()
      if remaining_s > 0:
        fault = attendance.wait(remaining_s)
        continue
      absent = sorted(set(range(1, processes)) - set(attendance.came))
      fault = (
        f"{len(attendance.came) + 1} of {processes} within {timeout_s:g} s; "
        f"missing: {', '.join(map(str, absent[:8]))}"
      )
    attendance.answer(fault or _GO)
  if fault is not None:
    raise _absent(fault)


def _servers(host: str, port: int) -> list[socket.socket]:
  """Listens on loopback alone if `host` is a loopback address.

  For any other name on all interfaces, with IPv6 and IPv4 if both exist: this
  machine may not know the address by which others reach it.
  """
  addresses = _loopback(host)
  if not addresses:
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return [
      socket.create_server(
        ("", port), family=family, dualstack_ipv6=dual_stack, backlog=1024
      )
    ]
  servers: list[socket.socket] = []
  for family, address in addresses:
    try:
      servers.append(
        socket.create_server((address, port), family=family, backlog=1024)
      )
    except OSError as error:
      # A machine may lack one of the two families of "localhost".
      missing = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
      if error.errno in missing and len(addresses) > 1:
        continue
      for server in servers:
        server.close()
      raise
  return servers


def _loopback(host: str) -> list[tuple[socket.AddressFamily, str]]:
  """Families and addresses of a loopback address; else an empty list.

  Names are not resolved: a machine's own name may be a loopback address here
  and another one elsewhere.
  """
  if host == "localhost":
    return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
  try:
    address = ipaddress.ip_address(host)
  except ValueError:
    return []
  if not address.is_loopback:
    return []
  family = socket.AF_INET if address.version == 4 else socket.AF_INET6
  return [(family, host)]


@dataclasses.dataclass(eq=False)
class _Caller:
  """A connection to process 0.

  Attributes:
    socket: Socket of the connection.
    received: Bytes received so far.
    number: Number of the process, once it has been received.
  """

  socket: socket.socket
  received: bytes = b""
  number: int | None = None


class _Attendance:
  """The processes that have called process 0 and are still connected.

  Attributes:
    came: Connections by the number of the process.
  """

  def __init__(self, servers: list[socket.socket], processes: int):
    self.came: dict[int, _Caller] = {}
    self._processes = processes
    self._selector = selectors.DefaultSelector()
    # Connections with wrong numbers, which get an answer too.
    self._odd: list[_Caller] = []
    for server in servers:
      server.setblocking(False)
      self._selector.register(server, selectors.EVENT_READ)

  def __enter__(self) -> _Attendance:
    return self

  def __exit__(self, *_: object) -> None:
    callers = [key.data for key in self._selector.get_map().values()]
    self._selector.close()
    for caller in filter(None, callers):
      caller.socket.close()

  def complete(self) -> bool:
    """Whether all others have connected and are still connected."""
    if len(self.came) == self._processes - 1:
      for caller in list(self.came.values()):
        self._receive(caller)
    return len(self.came) == self._processes - 1

  def wait(self, wait_s: float) -> str | None:
    """Receives for up to `wait_s` seconds; returns a fault or None."""
    for key, _ in self._selector.select(wait_s):
      server: Any = key.fileobj
      if key.data is None:
        self._accept(server)
      # An earlier event of this loop may have dropped it.
      elif server.fileno() >= 0 and self._receive(key.data):
        fault = self._note(key.data)
        if fault is not None:
          return fault
    return None

  def answer(self, text: str) -> None:
    """Sends `text` to all processes that have connected."""
    for caller in [*self.came.values(), *self._odd]:
      with contextlib.suppress(OSError):
        caller.socket.settimeout(_ANSWER_S)
        caller.socket.sendall(f"{text}\n".encode())

  def _accept(self, server: socket.socket) -> None:
    try:
      connection, _ = server.accept()
    except BlockingIOError:
      return
    except OSError:
      # Too many open connections: wait until some are closed.
      time.sleep(_PAUSE_S)
      return
    connection.setblocking(False)
    self._selector.register(
      connection, selectors.EVENT_READ, _Caller(connection)
    )

  def _receive(self, caller: _Caller) -> bool:
    """Receives without waiting; returns False for a closed connection."""
    try:
      received = caller.socket.recv(_LONGEST)
    except (BlockingIOError, InterruptedError):
      return True
    except OSError:
      received = b""
    caller.received += received
    if received and len(caller.received) <= _LONGEST:
      return True
    self._drop(caller)
    return False

  def _drop(self, caller: _Caller) -> None:
    self._selector.unregister(caller.socket)
    caller.socket.close()
    if caller.number is not None:
      del self.came[caller.number]

  def _note(self, caller: _Caller) -> str | None:
    """Registers a process once its number is complete; returns a fault."""
    if caller.number is not None or not caller.received.endswith(b"\n"):
      return None
    try:
      message = json.loads(caller.received)
      number, count = message["number"], message["processes"]
    except (ValueError, KeyError, TypeError, RecursionError):
      number = count = None
    if type(number) is not int or type(count) is not int:
      # Not a process of this run.
      self._drop(caller)
      return None
    fault = None
    if count != self._processes:
      fault = (
        f"--num_processes={self._processes} in process 0, {count} in process "
        f"{number}"
      )
    elif not 0 < number < self._processes:
      fault = f"--process_id={number} of {self._processes} processes"
    elif number in self.came and self._receive(self.came[number]):
      fault = f"two processes with --process_id={number}"
    if fault is not None:
      self._odd.append(caller)
      return fault
    caller.number = number
    self.came[number] = caller
    return None


def _report(
  address: tuple[str, int],
  processes: int,
  number: int,
  end: float,
  timeout_s: float,
) -> None:
  """Connects to process 0, again and again until it answers."""
  why = "no answer"
  while (remaining_s := end - time.monotonic()) > 0:
    try:
      with socket.create_connection(address, timeout=remaining_s) as line:
        message = {"number": number, "processes": processes}
        line.sendall(f"{json_text(message)}\n".encode())
        # Process 0 stops at `end` itself and sends the reason.
        heard = _answer(line, end + 2.0)
    except OSError as error:
      why = error.strerror or "no answer"
      time.sleep(_PAUSE_S)
      continue
    if heard == _GO:
      return
    if heard:
      raise _absent(heard)
    # Closed without an answer: another run may have held the port.
    time.sleep(_PAUSE_S)
  raise OptionError(
    "--coordinator",
    f"{address[0]}:{address[1]}, where process 0 did not answer within "
    f"{timeout_s:g} s ({why})",
    "the address of process 0",
    "start it, pass its address, or a larger --init_timeout",
  )


def _absent(fault: str) -> OptionError:
  return OptionError(
    "processes",
    fault,
    "each of them once",
    "start what is missing, or pass a larger --init_timeout",
  )


def _answer(line: socket.socket, end: float) -> str:
  """Receives a line; empty if the connection ends first.

  Raises:
    OSError: If it does not arrive by `end`.
  """
  data = b""
  while not data.endswith(b"\n"):
    line.settimeout(max(end - time.monotonic(), 1e-3))
    received = line.recv(_LONGEST)
    data += received
    if not received or len(data) > _LONGEST:
      return ""
  return data.decode(errors="replace").strip()
