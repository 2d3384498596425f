"""Rendezvous of all processes, before `jax.distributed` connects them.

JAX aborts a process that waits in vain for another, with a stack trace of C++.
So process 0 first listens at the coordinator's address, the others connect,
say their numbers and stay connected, and all go on when all are there, or none.
A process that disconnects is not counted: one that died may be started again.
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
# To send an answer, which fits any buffer.
_ANSWER_S = 1.0
_GO = "go"


def call(address: str, processes: int, number: int, timeout_s: float) -> None:
  """Returns when all processes have connected.

  Args:
    address: HOST:PORT of process 0.
    processes: how many there are.
    number: which one this is, from 0.
    timeout_s: how long it waits for the others.

  Raises:
    OptionError: a process is missing, or they do not agree.
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
  """Process 0: waits for all others, and answers them."""
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
      left = end - time.monotonic()
      if left > 0:
        fault = attendance.wait(left)
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

  For any other name on all interfaces, of IPv6 and IPv4 or what there is of
  them: this machine may not know by which address others reach it.
  """
  found = _loopback(host)
  if not found:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return [
      socket.create_server(
        ("", port), family=family, dualstack_ipv6=both, backlog=1024
      )
    ]
  servers: list[socket.socket] = []
  for family, address in found:
    try:
      servers.append(
        socket.create_server((address, port), family=family, backlog=1024)
      )
    except OSError as error:
      # A machine may lack one of the two families of "localhost".
      missing = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
      if error.errno in missing and len(found) > 1:
        continue
      for server in servers:
        server.close()
      raise
  return servers


def _loopback(host: str) -> list[tuple[socket.AddressFamily, str]]:
  """Families and addresses of a loopback address; else nothing.

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
    socket: the connection.
    said: what was received so far.
    number: of the process, once it has said so.
  """

  socket: socket.socket
  said: bytes = b""
  number: int | None = None


class _Attendance:
  """The processes that have called process 0 and are still connected.

  Attributes:
    came: their connections, by the processes' numbers.
  """

  def __init__(self, servers: list[socket.socket], processes: int):
    self.came: dict[int, _Caller] = {}
    self._processes = processes
    self._selector = selectors.DefaultSelector()
    # Connections that are answered too, though they do not fit.
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
    """Whether all others have called, and none has disconnected since."""
    if len(self.came) == self._processes - 1:
      for caller in list(self.came.values()):
        self._receive(caller)
    return len(self.came) == self._processes - 1

  def wait(self, wait_s: float) -> str | None:
    """Takes what comes within `wait_s` seconds; what is wrong with it."""
    for key, _ in self._selector.select(wait_s):
      server: Any = key.fileobj
      if key.data is None:
        self._accept(server)
      # It may have been dropped a moment ago.
      elif server.fileno() >= 0 and self._receive(key.data):
        fault = self._note(key.data)
        if fault is not None:
          return fault
    return None

  def answer(self, text: str) -> None:
    """Answers all processes that came."""
    for caller in [*self.came.values(), *self._odd]:
      with contextlib.suppress(OSError):
        caller.socket.settimeout(_ANSWER_S)
        caller.socket.sendall(f"{text}\n".encode())

  def _accept(self, server: socket.socket) -> None:
    try:
      made, _ = server.accept()
    except BlockingIOError:
      return
    except OSError:
      # More connections than the system allows: some will be closed.
      time.sleep(_PAUSE_S)
      return
    made.setblocking(False)
    self._selector.register(made, selectors.EVENT_READ, _Caller(made))

  def _receive(self, caller: _Caller) -> bool:
    """Takes what has come, without waiting; drops a closed connection."""
    try:
      more = caller.socket.recv(_LONGEST)
    except (BlockingIOError, InterruptedError):
      return True
    except OSError:
      more = b""
    caller.said += more
    if more and len(caller.said) <= _LONGEST:
      return True
    self._drop(caller)
    return False

  def _drop(self, caller: _Caller) -> None:
    self._selector.unregister(caller.socket)
    caller.socket.close()
    if caller.number is not None:
      del self.came[caller.number]

  def _note(self, caller: _Caller) -> str | None:
    """Notes a process, once its number has come; what is wrong with it."""
    if caller.number is not None or not caller.said.endswith(b"\n"):
      return None
    try:
      said = json.loads(caller.said)
      number, count = said["number"], said["processes"]
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
  """Another process: connects to process 0 until it answers."""
  why = "no answer"
  while (left := end - time.monotonic()) > 0:
    try:
      with socket.create_connection(address, timeout=left) as line:
        said = {"number": number, "processes": processes}
        line.sendall(f"{json_text(said)}\n".encode())
        # Process 0 gives up by itself, and says why.
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
  """The line that comes; empty if the connection ends before it does.

  Raises:
    OSError: it took until `end`.
  """
  data = b""
  while not data.endswith(b"\n"):
    line.settimeout(max(end - time.monotonic(), 1e-3))
    more = line.recv(_LONGEST)
    data += more
    if not more or len(data) > _LONGEST:
      return ""
  return data.decode(errors="replace").strip()
