"""A supervisor that starts the process of a server again when it is lost.

Guarantees: the supervisor holds the listening socket, so that the port stays
the same; while its process starts it answers itself: 503 with Retry-After, and
/ready says what is missing. A process that is silent for too long, because it
hangs or is stopped, is killed and started again. It ends when its supervisor
does.
Cost: a Python process without devices, for each process of the server.

Of several processes each has a supervisor. When one is lost all of them end,
and meet again once their supervisors have started them. No supervisor knows of
the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from ..shared import console
from ..shared.group import FAILED
from .host_processes import ProbeServer

# The listening socket, the socket to the supervisor, and the number of
# restarts, as numbers.
VARIABLE = "RINGJAX_SERVE_PROCESS"
# Several beats fit into the shortest --failure_timeout, 1 s.
_BEAT_S, _PAUSE_S = 0.2, 1.0
# Seconds in which a process that has let go of its supervisor has to end.
_END_S = 60.0
_ALIVE, _ANSWERS, _SERVES = b".", b"A", b"S"
# Exit status of a process that refuses its flags, or fails by an error.
_REFUSED = 2


class SupervisedProcess(NamedTuple):
  """The process of a server, from its own view.

  Fields:
    listener: Listening socket of the server.
    link: Connection to the supervisor.
    restarts: Number of times that it was started again.
  """

  listener: socket.socket
  link: socket.socket
  restarts: int

  @classmethod
  def from_environment(cls) -> SupervisedProcess | None:
    """Begins the heartbeats of a process that a supervisor has started.

    It ends with `FAILED` when its supervisor ends. None without a supervisor.
    """
    # No process that this one starts is the supervisor's.
    text = os.environ.pop(VARIABLE, None)
    if text is None:
      return None
    listener, link, restarts = map(int, text.split())
    process = cls(
      socket.socket(fileno=listener), socket.socket(fileno=link), restarts
    )
    for work in (process._beat, process._watch):
      threading.Thread(target=work, daemon=True).start()
    return process

  def answers(self) -> None:
    """Tells the supervisor that this process answers at the socket."""
    with contextlib.suppress(OSError):
      self.link.sendall(_ANSWERS)

  def serves(self) -> None:
    """Tells the supervisor that the flags are accepted and requests served."""
    with contextlib.suppress(OSError):
      self.link.sendall(_ANSWERS + _SERVES)

  def _beat(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        self.link.sendall(_ALIVE)
        time.sleep(_BEAT_S)

  def _watch(self) -> None:
    with contextlib.suppress(OSError):
      self.link.recv(1)
    os._exit(FAILED)


class Supervisor:
  """Starts the command of this process again, in another process.

  Args:
    listener: Listening socket of the server.
    screen: Console.
    restarts: Maximum number of restarts.
    silence_s: Seconds of silence after which the process is killed.
  """

  def __init__(
    self,
    listener: socket.socket,
    screen: console.Screen,
    *,
    restarts: int,
    silence_s: float,
  ):
    self._listener, self._screen = listener, screen
    self._most, self._silence_s = restarts, silence_s
    self._process: subprocess.Popen[bytes] | None = None
    self._told = False
    # Whether a process has served requests, and whether this one does.
    self._served = self._serves = False

  def run(self) -> int:
    """Runs the server until it ends; returns its exit status."""
    # Its process may take a connection first.
    self._listener.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._end)
    count = 0
    while True:
      status = self._run_once(count)
      refused = status == _REFUSED and not (count or self._served)
      killed = status == -signal.SIGKILL and not self._serves
      if self._told and (killed or status in (None, -signal.SIGTERM)):
        # There was no process, or none that served: nobody waits for an
        # answer of it.
        self._screen.say("ended")
        return 0
      assert status is not None
      if not status or refused or self._told or count == self._most:
        # As a shell reports signals.
        return status if status >= 0 else 128 - status
      count += 1
      self._screen.say(
        f"the server's process ended with status {status}: start {count} of "
        f"{self._most}"
      )
      time.sleep(_PAUSE_S)

  def _end(self, *_: object) -> None:
    """Ends the process after a signal; nothing is started after it."""
    self._told = True
    if self._process is None or self._process.poll() is not None:
      return
    if self._serves:
      self._process.terminate()
    else:
      # Ctrl-C would end it with a traceback, and JAX catches SIGTERM while it
      # connects processes.
      self._process.kill()

  def _run_once(self, count: int) -> int | None:
    """Runs the process once, unless a signal has come.

    Returns:
      Its exit status, below 0 for a signal; None if it was not started.
    """
    link, process_link = socket.socketpair()
    with link, process_link:
      self._serves = False
      if self._told:
        return None
      probes: ProbeServer | None = ProbeServer(
        self._listener, "the server: it is being started"
      )
      descriptors = self._listener.fileno(), process_link.fileno()
      # In a session of its own: a terminal's Ctrl-C is the supervisor's.
      process = self._process = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {VARIABLE: "{} {} {}".format(*descriptors, count)},
        pass_fds=descriptors,
        start_new_session=True,
      )
      process_link.close()
      if self._told:
        # The signal came before there was a process.
        process.kill()
      silence_s = None
      while True:
        ready, _, _ = select.select([link], [], [], silence_s)
        if not ready:
          self._screen.error(
            f"the server's process was silent for {self._silence_s:g} s"
          )
          process.kill()
          break
        try:
          received = link.recv(1 << 10)
        except OSError:
          received = b""
        if not received:
          break
        silence_s = self._silence_s
        self._serves |= _SERVES in received
        self._served |= self._serves
        if _ANSWERS in received and probes is not None:
          probes.stop()
          probes = None
      status = self._status(process)
      if probes is not None:
        probes.stop()
      return status

  def _status(self, process: subprocess.Popen[bytes]) -> int:
    """Status of a process that ends; it is killed if it hangs at its end."""
    try:
      return process.wait(_END_S)
    except subprocess.TimeoutExpired:
      self._screen.error(
        f"the server's process did not end within {_END_S:g} s"
      )
      process.kill()
      return process.wait()
