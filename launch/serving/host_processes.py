"""The processes of a server whose devices are on several hosts.

Process 0 serves clients; the others take its steps, and answer probes at the
same paths. Each answers /health as soon as it runs, and /ready with 200 only
while the engine takes requests: kubelets and load balancers ask there.
"""

from __future__ import annotations

import http.server
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from absl import flags

import ringjax as rj
from ringjax.errors import OptionError, PeerError
from ringjax.json_text import json_text

from ..shared import console
from ..shared.group import Group
from .flag_modes import MAY_DIFFER

# Seconds to send clients their errors once a process is lost.
LINGER_S = 10.0
_STALL_S, _READ_BYTES = 10.0, 1 << 16
# Seconds after which clients may try again while processes start.
RETRY_S = 5


class ProbeServer:
  """Answers /health and /ready at a listening socket.

  Attributes:
    missing: Reason for which no requests are served; "" if they are.
  """

  def __init__(
    self, listener: socket.socket, missing: str, *, serves: bool = True
  ):
    """Begins to answer in a thread; the socket stays the caller's.

    Args:
      listener: Listening socket.
      missing: Reason for which no requests are served.
      serves: Whether requests are served here once nothing is missing.
    """
    self.missing, self._serves = missing, serves
    probes = self

    class Probe(http.server.BaseHTTPRequestHandler):
      """Answers a probe."""

      timeout = _STALL_S

      def do_GET(self) -> None:
        status, body = probes.answer(self.path)
        data = json_text(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status == 503:
          self.send_header("retry-after", str(RETRY_S))
        self.end_headers()
        self.wfile.write(data)

      def do_POST(self) -> None:
        # Unread bytes would reset the connection before the answer arrives.
        length = self.headers.get("content-length", "0")
        unread = int(length) if length.isdecimal() else 0
        while unread > 0:
          data = self.rfile.read(min(unread, _READ_BYTES))
          if not data:
            break
          unread -= len(data)
        self.close_connection = True
        self.do_GET()

      def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    address = listener.getsockname()[:2]
    self._server = http.server.ThreadingHTTPServer(
      address, Probe, bind_and_activate=False
    )
    self._server.socket.close()
    self._server.socket = listener
    self._thread = threading.Thread(
      target=self._server.serve_forever, name="ringjax probes", daemon=True
    )
    self._thread.start()

  def answer(self, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of a path."""
    missing = self.missing
    if path == "/health":
      return 200, {"status": "ok"}
    if path != "/ready" and self._serves:
      text = f"the server can't answer now ({missing}); try again later"
      error = {"message": text, "type": "server_error", "code": "unavailable"}
      return 503, {"error": error | {"param": None}}
    if path != "/ready":
      return 404, {"error": "requests are served by process 0"}
    if missing:
      return 503, {"status": "unavailable", "missing": missing}
    return 200, {"status": "ok"}

  def stop(self) -> None:
    """Ends the thread; the socket stays open for another server."""
    self._server.shutdown()
    self._thread.join()


class HostProcesses:
  """The processes of one server, or a process alone.

  Attributes:
    group: The processes; they end when one is lost.
    serves: Whether clients of this process wait for answers.
  """

  def __init__(self, screen: console.Screen, doing: Callable[[], str]):
    self.serves = False
    self._screen = screen
    self.group = Group(screen, doing, lingers=self._lingers)
    self._probes: ProbeServer | None = None
    self._lost = self._ends = False

  @property
  def leads(self) -> bool:
    """Whether this process serves clients."""
    return not self.group.several or jax.process_index() == 0

  def meet(
    self,
    values: flags.FlagValues,
    listener: socket.socket,
    answers: Callable[[], object],
  ) -> None:
    """Connects the processes, and answers probes from now on.

    Args:
      values: Flags as passed.
      listener: Listening socket of this process.
      answers: Called once probes are answered, in several processes.

    Raises:
      OptionError: If a flag has no meaning in one process, or in several.
      PeerError: If a process is missing.
    """
    if jax.process_count() == 1:
      if values["failure_timeout"].present and not values.restarts:
        self.refuse_alone(values)
      return
    # JAX takes SIGTERM for a notice: a process that loads would not end by it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    self._probes = ProbeServer(
      listener,
      "the model: it is being loaded",
      serves=jax.process_index() == 0 and values.join is None,
    )
    answers()
    self._screen.quiet = jax.process_index() > 0
    self._peers = self.group.meet(
      values, values.failure_timeout, own=MAY_DIFFER
    )

  @staticmethod
  def refuse_alone(values: flags.FlagValues) -> NoReturn:
    """Refuses --failure_timeout, which is of several processes.

    Raises:
      OptionError: Always.
    """
    raise OptionError(
      "--failure_timeout",
      f"{values.failure_timeout:g} in one process",
      "several processes, of which one may fail",
      "leave it out, or pass --restarts=N, or --coordinator, "
      "--num_processes and --process_id",
    )

  def engine(
    self, engine: rj.serve.Engine, *, probes: bool = False
  ) -> rj.serve.Engine | rj.serve.EngineGroup:
    """The engine for the server: that of all processes, if there are several.

    Args:
      engine: Engine of this process.
      probes: Whether process 0 goes on to answer probes here, as it has no
        server of requests.

    Raises:
      OptionError: If the processes' engines differ.
    """
    if not self.group.several:
      return engine
    served = rj.serve.EngineGroup(
      engine,
      peers=self._peers,
      on_failure=self._failed,
      on_leave=self._leave,
    )
    if self.leads:
      assert self._probes is not None
      if probes:
        self._probes.missing = ""
      else:
        # The server of requests answers probes from now on.
        self._probes.stop()
    return served

  def follow(self, served: rj.serve.EngineGroup) -> int:
    """Takes the steps of process 0 until it ends; returns the exit status."""
    assert self._probes is not None
    for number in (signal.SIGTERM, signal.SIGINT):
      # Process 0 finishes its answers and ends all, whichever of them is told.
      signal.signal(number, lambda *_: served.leave())
    self._probes.missing = ""
    served.follow()
    self._probes.missing = "the engine: it is closed"
    jax.distributed.shutdown()
    return 0

  def stops(self, stop: Callable[[], None]) -> None:
    """Takes the function that ends process 0's server after a failure."""
    self._stop_server = stop
    self.serves = True
    if self._lost or self._ends:
      stop()

  def ended(self) -> None:
    """Ends process 0 after its server; does not return after a failure."""
    if not self.group.several:
      return
    if self._lost:
      self.group.end()
    jax.distributed.shutdown()

  def _lingers(self) -> float:
    """Seconds for which this process still answers after a failure."""
    self._lost = True
    return LINGER_S if self.serves else 0.0

  def _leave(self, rank: int) -> None:
    """Ends process 0's server gracefully: another process was told to end."""
    self._screen.say(f"process {rank} was told to end: all of them end")
    self._ends = True
    if self.serves:
      self._stop_server()

  def _failed(self, error: PeerError) -> None:
    """Ends the server once requests have ended with an error."""
    if not self._lost:
      # It is this process that has failed.
      self._screen.error(str(error))
      self._lost = True
      self.group.end_after(LINGER_S)
    if self.serves:
      self._stop_server()
