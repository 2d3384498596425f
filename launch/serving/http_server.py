"""uvicorn for ASGI applications, with timeouts and a graceful shutdown.

Guarantees: a connection that does not send the complete head of a request, or
the rest of a body that was refused, is closed after `stall` seconds. An idle
connection stays open longer than clients keep theirs, so that no request meets
a connection that closes. At SIGTERM or SIGINT answers in progress have `grace`
seconds to end; clients of the others get an error before the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import socket
import types
from collections.abc import Callable
from typing import Any, Protocol

# Clients keep idle connections for 5 s (httpx, and with it OpenAI's client; it
# is uvicorn's default too) to 60 s (many proxies).
KEEP_ALIVE_S = 75
# Seconds after --grace in which errors are sent for aborted answers.
_ABORT_S = 10
# Largest limit of open files and sockets to ask for.
_SOCKETS = 1 << 16


class Application(Protocol):
  """An ASGI application with a graceful shutdown."""

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Serves one request."""
    ...

  async def end(self, grace: int | float) -> None:
    """Aborts answers that are still in progress after `grace` seconds."""
    ...


def serve(
  uvicorn: types.ModuleType,
  app: Application,
  listener: socket.socket,
  *,
  grace: int,
  stall: float,
  stops: Callable[[Callable[[], None]], object] = lambda stop: None,
) -> None:
  """Serves until SIGTERM or SIGINT, and ends gracefully.

  Args:
    uvicorn: Module uvicorn.
    app: Application to serve.
    listener: Listening socket.
    grace: Seconds to finish answers after a signal.
    stall: Seconds in which the head of a request has to arrive.
    stops: Gets a function by which any thread ends the server as a signal does.
  """
  _allow_sockets()
  running = server(uvicorn, app, grace=grace, stall=stall)
  stops(lambda: setattr(running, "should_exit", True))
  # After its shutdown uvicorn raises the signal again for the previous handler,
  # which must not end the process: install one that does nothing.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
  running.run(sockets=[listener])


def server(
  uvicorn: types.ModuleType, app: Application, *, grace: int, stall: float
) -> Any:
  """Creates a uvicorn server to run; arguments are those of `serve`."""
  config = uvicorn.Config(
    app,
    loop="asyncio",
    http=_protocol_with_timeout(stall),
    ws="none",
    lifespan="on",
    log_level="warning",
    access_log=False,
    server_header=False,
    backlog=1024,
    timeout_keep_alive=KEEP_ALIVE_S,
    timeout_graceful_shutdown=grace + _ABORT_S,
  )

  class Server(uvicorn.Server):
    """Ends the application when the shutdown begins."""

    async def shutdown(self, sockets: Any = None) -> None:
      ending = asyncio.ensure_future(app.end(grace))
      try:
        await super().shutdown(sockets)
      finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)

  return Server(config)


def _protocol_with_timeout(stall: float) -> Callable[..., Any]:
  """uvicorn's HTTP protocol with a timeout for heads of requests."""
  base = importlib.import_module("uvicorn.protocols.http.h11_impl").H11Protocol

  class Patient(base):
    """Connection that is closed unless heads arrive in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      self._wait()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
      super().connection_lost(exc)
      self._stop()

    def on_response_complete(self) -> None:
      super().on_response_complete()
      # An idle connection has uvicorn's keep-alive timeout instead.
      self._stop()

    def _wait(self) -> None:
      """Runs the timer while no request is in progress."""
      if self.cycle is not None and not self.cycle.response_complete:
        self._stop()
      elif self._timer is None and not self.transport.is_closing():
        self._timer = self.loop.call_later(stall, self.transport.close)

    def _stop(self) -> None:
      if self._timer is not None:
        self._timer.cancel()
        self._timer = None

  return Patient


def _allow_sockets() -> None:
  """Raises the process's limit of open sockets as far as allowed."""
  with contextlib.suppress(ImportError, OSError, ValueError):
    resource = importlib.import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _SOCKETS if hard == resource.RLIM_INFINITY else min(hard, _SOCKETS)
    if soft < limit:
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
