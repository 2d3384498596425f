"""Are all processes there? Asked before JAX meets them.

JAX ends a process that waits in vain for another in its own way: an abort and
a stack trace of C++. So process 0 first listens at the coordinator's address,
the others call it there and say who they are, and all go on when all have
called, or none.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time

from ringjax.errors import OptionError, message

_PAUSE_S, _LONGEST = 0.1, 1 << 12
_GO = "go"


def call(address: str, processes: int, number: int, timeout_s: float) -> None:
  """Returns when all processes have called.

  Args:
    address: HOST:PORT of process 0.
    processes: how many there are.
    number: which one this is, from 0.
    timeout_s: how long it waits for the others.

  Raises:
    OptionError: somebody did not come, or they do not agree.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise OptionError(
      message("--coordinator", address, "HOST:PORT", "correct it")
    )
  if processes == 1:
    return
  end = time.monotonic() + timeout_s
  if number == 0:
    _listen(int(port), processes, end, timeout_s)
  else:
    _report((host.strip("[]"), int(port)), processes, number, end, timeout_s)


def _listen(port: int, processes: int, end: float, timeout_s: float) -> None:
  """Process 0: waits for all others, and tells them how it went."""
  came: dict[int, socket.socket] = {}
  with contextlib.ExitStack() as stack:
    try:
      door = stack.enter_context(_door(port))
    except OSError as error:
      raise OptionError(
        message(
          "--coordinator",
          f"port {port}: {error.strerror}",
          "a free port of the machine that process 0 is on",
          "choose another",
        )
      ) from None
    waiting = stack.enter_context(selectors.DefaultSelector())
    waiting.register(door, selectors.EVENT_READ)
    fault = None
    while fault is None and len(came) < processes - 1:
      left = end - time.monotonic()
      if left <= 0:
        absent = sorted(set(range(1, processes)) - set(came))
        fault = (
          f"{len(came) + 1} of {processes} within {timeout_s:g} s; missing: "
          f"{', '.join(map(str, absent[:8]))}"
        )
        break
      for key, _ in waiting.select(min(left, 1.0)):
        if key.fileobj is door:
          line, _ = door.accept()
          stack.enter_context(line)
          # Who calls and says nothing keeps nobody waiting.
          line.settimeout(1.0)
          waiting.register(line, selectors.EVENT_READ, line)
          continue
        line = key.data
        waiting.unregister(line)
        fault = _note(line, processes, came)
    said = _GO if fault is None else fault
    for line in came.values():
      with contextlib.suppress(OSError):
        line.sendall(f"{said}\n".encode())
  if fault is not None:
    raise _absent(fault)


def _door(port: int) -> socket.socket:
  """Listens on IPv6 and IPv4, or what there is of them."""
  both = socket.has_dualstack_ipv6()
  return socket.create_server(
    ("", port),
    family=socket.AF_INET6 if both else socket.AF_INET,
    dualstack_ipv6=both,
    backlog=1024,
  )


def _note(
  line: socket.socket, processes: int, came: dict[int, socket.socket]
) -> str | None:
  """Writes down who calls; what is wrong with it."""
  try:
    said = json.loads(_line(line))
    number, count = int(said["number"]), int(said["processes"])
  except (OSError, ValueError, KeyError, TypeError):
    # A stranger, or one that hung up: it may call again.
    line.close()
    return None
  if count != processes:
    return (
      f"--num_processes={processes} in process 0, {count} in process {number}"
    )
  if number in came or not 0 < number < processes:
    return f"two processes with --process_id={number}"
  came[number] = line
  return None


def _report(
  address: tuple[str, int],
  processes: int,
  number: int,
  end: float,
  timeout_s: float,
) -> None:
  """Another process: calls process 0 until it answers."""
  why = "nobody"
  while (left := end - time.monotonic()) > 0:
    try:
      with socket.create_connection(address, timeout=left) as line:
        said = {"number": number, "processes": processes}
        line.sendall(f"{json.dumps(said)}\n".encode())
        # Process 0 gives up by itself, and says why.
        line.settimeout(left + 2.0)
        heard = _line(line)
    except OSError as error:
      why = error.strerror or "nobody"
      time.sleep(_PAUSE_S)
      continue
    if heard == _GO:
      return
    if heard:
      raise _absent(heard)
    # It has gone: it may be that another run held the port.
    time.sleep(_PAUSE_S)
  raise OptionError(
    message(
      "--coordinator",
      f"{address[0]}:{address[1]}, where process 0 did not answer within "
      f"{timeout_s:g} s ({why})",
      "the address of process 0",
      "start it, correct the address, or raise --init_timeout",
    )
  )


def _absent(fault: str) -> OptionError:
  return OptionError(
    message(
      "processes",
      fault,
      "each of them once",
      "start what is missing, or raise --init_timeout",
    )
  )


def _line(line: socket.socket) -> str:
  """What came until the end of the line; nothing if it was not ended."""
  data = b""
  while not data.endswith(b"\n"):
    more = line.recv(_LONGEST)
    data += more
    if not more or len(data) > _LONGEST:
      return ""
  return data.decode(errors="replace").strip()
