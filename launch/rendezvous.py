"""Are all processes there? Asked before JAX meets them.

JAX ends a process that waits in vain for another in its own way: an abort and
a stack trace of C++. So process 0 first listens at the coordinator's address,
the others call it there, say who they are and stay on the line, and all go on
when all are there, or none. Who hangs up was not there: a process that died may
be started again.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import selectors
import socket
import time

from ringjax.errors import OptionError

_PAUSE_S, _LONGEST = 0.1, 1 << 12
# For an answer, which no line is too full to take.
_ANSWER_S = 1.0
_GO = "go"


def call(address: str, processes: int, number: int, timeout_s: float) -> None:
  """Returns when all processes have called.

  Args:
    address: HOST:PORT of process 0.
    processes: how many there are.
    number: which one this is, from 0.
    timeout_s: how long it waits for the others.

  Raises:
    OptionError: a process did not come, or they do not agree.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise OptionError("--coordinator", address, "HOST:PORT", "correct it")
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
  """Process 0: waits for all others, and tells them how it went."""
  with contextlib.ExitStack() as stack:
    try:
      doors = [stack.enter_context(door) for door in _doors(host, port)]
    except OSError as error:
      raise OptionError(
        "--coordinator",
        f"port {port}: {error.strerror}",
        "a free port of the machine that process 0 is on",
        "choose another",
      ) from None
    desk = stack.enter_context(_Desk(doors, processes))
    fault = None
    while fault is None and not desk.all_there():
      left = end - time.monotonic()
      if left <= 0:
        absent = sorted(set(range(1, processes)) - set(desk.came))
        fault = (
          f"{len(desk.came) + 1} of {processes} within {timeout_s:g} s; "
          f"missing: {', '.join(map(str, absent[:8]))}"
        )
      else:
        fault = desk.hear(left)
    desk.tell(_GO if fault is None else fault)
  if fault is not None:
    raise _absent(fault)


def _doors(host: str, port: int) -> list[socket.socket]:
  """Listens where `host` is, and nowhere else, if that is this machine alone.

  For any other name on all interfaces, of IPv6 and IPv4 or what there is of
  them: what a name is elsewhere, this machine may not know.
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
  doors: list[socket.socket] = []
  for family, address in found:
    try:
      doors.append(
        socket.create_server((address, port), family=family, backlog=1024)
      )
    except OSError as error:
      # One of the two that "localhost" is may not be there.
      missing = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
      if error.errno in missing and len(found) > 1:
        continue
      for door in doors:
        door.close()
      raise
  return doors


def _loopback(host: str) -> list[tuple[socket.AddressFamily, str]]:
  """Families and addresses, if only this machine has them.

  By what is written alone: a machine may call itself by a name that is a
  loopback address here and another one elsewhere.
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


class _Line:
  """Somebody who called.

  Attributes:
    said: what was heard so far.
    number: who it is, once it said so.
  """

  def __init__(self, line: socket.socket):
    self.socket = line
    self.said = b""
    self.number: int | None = None

  def hear(self) -> bool:
    """Takes what has come, without waiting; whether it is still there."""
    try:
      more = self.socket.recv(_LONGEST)
    except (BlockingIOError, InterruptedError):
      return True
    except OSError:
      return False
    self.said += more
    return bool(more) and len(self.said) <= _LONGEST


class _Desk:
  """Where process 0 writes down who is there.

  Attributes:
    came: the lines of those who said who they are, and are still there.
  """

  def __init__(self, doors: list[socket.socket], processes: int):
    self.came: dict[int, _Line] = {}
    self._processes = processes
    self._waiting = selectors.DefaultSelector()
    # Who is to hear how it went, beside those who came.
    self._odd: list[_Line] = []
    for door in doors:
      door.setblocking(False)
      self._waiting.register(door, selectors.EVENT_READ, door)

  def __enter__(self) -> _Desk:
    return self

  def __exit__(self, *_: object) -> None:
    held = [key.data for key in self._waiting.get_map().values()]
    self._waiting.close()
    for line in held:
      if isinstance(line, _Line):
        line.socket.close()

  def all_there(self) -> bool:
    """Whether all others called, and none has hung up since."""
    if len(self.came) < self._processes - 1:
      return False
    for line in list(self.came.values()):
      self._look(line)
    return len(self.came) == self._processes - 1

  def hear(self, wait_s: float) -> str | None:
    """Waits for something to come, and takes it; what is wrong with it."""
    for key, _ in self._waiting.select(wait_s):
      if not isinstance(key.data, _Line):
        self._open(key.data)
      # It may have been dropped a moment ago.
      elif key.data.socket.fileno() >= 0 and self._look(key.data):
        fault = self._note(key.data)
        if fault is not None:
          return fault
    return None

  def tell(self, said: str) -> None:
    """Answers all who came."""
    for line in [*self.came.values(), *self._odd]:
      with contextlib.suppress(OSError):
        line.socket.settimeout(_ANSWER_S)
        line.socket.sendall(f"{said}\n".encode())

  def _open(self, door: socket.socket) -> None:
    try:
      line, _ = door.accept()
    except BlockingIOError:
      return
    except OSError:
      # No more lines than the system allows: some will hang up.
      time.sleep(_PAUSE_S)
      return
    line.setblocking(False)
    self._waiting.register(line, selectors.EVENT_READ, _Line(line))

  def _look(self, line: _Line) -> bool:
    """Whether a line is still there; else it is forgotten."""
    if line.hear():
      return True
    self._drop(line)
    return False

  def _drop(self, line: _Line) -> None:
    self._waiting.unregister(line.socket)
    line.socket.close()
    if line.number is not None:
      del self.came[line.number]

  def _note(self, line: _Line) -> str | None:
    """Writes down who it is, if it has said so; what is wrong with it."""
    if line.number is not None or not line.said.endswith(b"\n"):
      return None
    try:
      said = json.loads(line.said)
      number, count = said["number"], said["processes"]
    except (ValueError, KeyError, TypeError, RecursionError):
      number = count = None
    if type(number) is not int or type(count) is not int:
      # A stranger.
      self._drop(line)
      return None
    fault = None
    if count != self._processes:
      fault = (
        f"--num_processes={self._processes} in process 0, {count} in process "
        f"{number}"
      )
    elif not 0 < number < self._processes:
      fault = f"--process_id={number} of {self._processes} processes"
    elif number in self.came and self._look(self.came[number]):
      fault = f"two processes with --process_id={number}"
    if fault is not None:
      self._odd.append(line)
      return fault
    line.number = number
    self.came[number] = line
    return None


def _report(
  address: tuple[str, int],
  processes: int,
  number: int,
  end: float,
  timeout_s: float,
) -> None:
  """Another process: calls process 0 until it answers."""
  why = "no answer"
  while (left := end - time.monotonic()) > 0:
    try:
      with socket.create_connection(address, timeout=left) as line:
        said = {"number": number, "processes": processes}
        line.sendall(f"{json.dumps(said)}\n".encode())
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
    # It has gone: it may be that another run held the port.
    time.sleep(_PAUSE_S)
  raise OptionError(
    "--coordinator",
    f"{address[0]}:{address[1]}, where process 0 did not answer within "
    f"{timeout_s:g} s ({why})",
    "the address of process 0",
    "start it, correct the address, or raise --init_timeout",
  )


def _absent(fault: str) -> OptionError:
  return OptionError(
    "processes",
    fault,
    "each of them once",
    "start what is missing, or raise --init_timeout",
  )


def _answer(line: socket.socket, end: float) -> str:
  """What came until the end of the line; nothing if it was not ended.

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
