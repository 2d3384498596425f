"""uvicorn for applications of ASGI, with limits of time and a gentle end.

Guarantees: a connection that sends no whole head of a request, or the rest of
a body that was refused, is closed after `stall` seconds. One that is kept alive
is closed later than clients give theirs up, so that a request does not meet its
end. At SIGTERM or SIGINT answers under way have `grace` seconds to end; clients
of the others get an error before the connection closes.
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
# In which answers that are given up are sent, behind --grace.
_LAST_WORDS_S = 10
# Sockets beside the files of the process.
_SOCKETS = 1 << 16


class Application(Protocol):
  """An application of ASGI with a graceful end."""

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Serves one request."""
    ...

  async def end(self, grace: int | float) -> None:
    """Gives up what is under way when so many seconds are over."""
    ...


def serve(
  uvicorn: types.ModuleType,
  app: Application,
  listener: socket.socket,
  *,
  grace: int,
  stall: float,
) -> None:
  """Serves until SIGTERM or SIGINT, and ends gracefully.

  Args:
    uvicorn: the module.
    app: an application.
    listener: a socket that listens.
    grace: seconds to finish in.
    stall: seconds in which a head has to come.
  """
  _allow_sockets()
  running = server(uvicorn, app, grace=grace, stall=stall)
  # It raises a signal anew when it has ended, for the handler from before.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
  running.run(sockets=[listener])


def server(
  uvicorn: types.ModuleType, app: Application, *, grace: int, stall: float
) -> Any:
  """A server of uvicorn, to be run; arguments are those of `serve`."""
  config = uvicorn.Config(
    app,
    loop="asyncio",
    http=_patient(stall),
    ws="none",
    lifespan="on",
    log_level="warning",
    access_log=False,
    server_header=False,
    backlog=1024,
    timeout_keep_alive=KEEP_ALIVE_S,
    timeout_graceful_shutdown=grace + _LAST_WORDS_S,
  )

  class Server(uvicorn.Server):
    """Tells the application when it begins to end."""

    async def shutdown(self, sockets: Any = None) -> None:
      ending = asyncio.ensure_future(app.end(grace))
      try:
        await super().shutdown(sockets)
      finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)

  return Server(config)


def _patient(stall: float) -> Callable[..., Any]:
  """uvicorn's protocol, whose patience with heads has an end."""
  base: Any = importlib.import_module(
    "uvicorn.protocols.http.h11_impl"
  ).H11Protocol

  class Patient(base):
    """A connection that is closed unless heads come in time."""

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
      # The time of a connection that is kept alive counts.
      self._stop()

    def _wait(self) -> None:
      """Counts time while no request is under way."""
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
  """Lets the process have as many sockets as the system allows it."""
  with contextlib.suppress(ImportError, OSError, ValueError):
    resource = importlib.import_module("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _SOCKETS if hard == resource.RLIM_INFINITY else min(hard, _SOCKETS)
    if soft < most:
      resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
