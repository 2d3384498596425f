"""An ASGI application that speaks OpenAI's API for an engine or a cluster.

Guarantees: the event loop never waits for the engine: what takes its lock or
encodes text is done by threads, and tokens wake the loop up. A client that
disconnects, or does not read for `stall` seconds, loses its request, whose
pages are free at once; other requests do not notice. With keys, tenants share
no prefix. A failure of one request is an error object, without a traceback.
Cost: one small pool of threads.

It is plain ASGI 3: it has five paths and needs no framework, and any server of
ASGI runs it. `launch.serve` takes uvicorn (BSD, 70 kB; with h11 and click), the
extra `serve`, which parses HTTP and ends gracefully.
Ref: https://asgi.readthedocs.io, https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pathlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, RingjaxError, message
from ringjax.json_text import json_text
from ringjax.serve.openai_api import (
  AnswerStream,
  ApiCall,
  ApiError,
  ApiModel,
  from_error,
  parse_json,
  rejected,
  usage,
)
from ringjax.serve.request import (
  Answer,
  Answers,
  Handle,
  RejectedError,
  Request,
)
from ringjax.serve.server_metrics import CONTENT_TYPE, Figure, ServerMetrics

_LOG = logging.getLogger("ringjax.serve")
_PATHS = {
  "/v1/completions": "POST",
  "/v1/chat/completions": "POST",
  "/v1/models": "GET",
  "/metrics": "GET",
  "/health": "GET",
}
_THREADS = 8
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ClientGone(Exception):
  """The client has disconnected, or does not read."""


@runtime_checkable
class Served(Answers, Protocol):
  """What an application serves: an `Engine`, or a `ClusterRouter`.

  Attributes:
    tokenizer: of its texts.
    vocab: ids that the model has.
    longest: tokens of a prompt and its answer together at most.
  """

  tokenizer: Any
  vocab: int
  longest: int

  @property
  def rows(self) -> int:
    """Answers that are made at the same time."""
    ...

  @property
  def open(self) -> bool:
    """Whether it takes requests."""
    ...

  @property
  def missing(self) -> str:
    """What it lacks to serve a request now; "" if nothing."""
    ...

  def start(self) -> Served:
    """Lets it work by itself, until `close`."""
    ...

  def close(self) -> None:
    """Ends it, and gives up what is left."""
    ...

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Takes a request."""
    ...

  def figures(self) -> list[Figure]:
    """What a server shows of it."""
    ...


def app(engine: Served, **options: Any) -> OpenAIApp:
  """The application of an engine that has a tokenizer; see `OpenAIApp`."""
  return OpenAIApp(engine, **options)


def read_keys(path: str | os.PathLike[str]) -> dict[str, str]:
  """The tenants of a file, by their keys.

  Args:
    path: of a text file: a key and a tenant a line, and comments behind #.

  Raises:
    OptionError: a line is none, a key is there twice, or there is none.
  """
  found: dict[str, str] = {}
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except (OSError, ValueError) as error:
    raise OptionError(
      "api_keys", error, "a text file", "pass its path"
    ) from None
  for n, line in enumerate(lines, 1):
    words = line.partition("#")[0].split()
    if not words:
      continue
    # The line is not shown: there is a key in it.
    if len(words) != 2 or words[0] in found or not words[0].isascii():
      raise OptionError(
        "api_keys",
        f"line {n} of {path}",
        "a key of ASCII, not used before, and a tenant",
        "write KEY TENANT",
      )
    found[words[0]] = words[1]
  if not found:
    raise OptionError("api_keys", f"no keys in {path}", "some", "add a line")
  return found


class OpenAIApp:
  """An ASGI application: completions, chats, models, health and metrics.

  Attributes:
    engine: that answers; it is started with the application, and closed.
    metrics: what was counted.
  """

  def __init__(
    self,
    engine: Served,
    *,
    model_name: str = "ringjax",
    keys: Mapping[str, str] | None = None,
    queue: int = 256,
    body_bytes: int = 8 << 20,
    most_answers: int = 128,
    stall: int | float = 60.0,
    trusted_template: bool = False,
  ):
    """For an engine.

    Args:
      engine: with a tokenizer.
      model_name: by which clients call the model.
      keys: tenants by their keys; None lets everyone in, as one tenant.
      queue: answers that may wait beside those that are being made.
      body_bytes: of a body at most.
      most_answers: of one body.
      stall: seconds after which a client that does not send or read is given
        up.
      trusted_template: see `ringjax.data.ChatTemplate`.

    Raises:
      OptionError: a value is out of its range.
    """
    if engine.tokenizer is None:
      raise OptionError(
        "engine",
        "one without a tokenizer",
        "one that knows texts",
        "pass tokenizer= to rj.serve.Engine",
      )
    self.engine, self.metrics = engine, ServerMetrics()
    self._model = ApiModel(
      model_name,
      engine.tokenizer,
      vocab=engine.vocab,
      longest=engine.longest,
      most_answers=positive_int("most_answers", most_answers),
      trusted_template=trusted_template,
    )
    # Looking up a digest takes as long for any key.
    self._keys = None
    if keys is not None:
      self._keys = {_digest(key): tenant for key, tenant in keys.items()}
    self._queue = positive_int("queue", queue)
    self._body_bytes = positive_int("body_bytes", body_bytes)
    self._stall = number("stall", stall, above=0.0)
    self._answers = 0
    self._pool = ThreadPoolExecutor(_THREADS, "ringjax http")

  async def __call__(
    self, scope: MutableMapping[str, Any], receive: Receive, send: Send
  ) -> None:
    """Serves one connection's request, or the life of the server."""
    if scope["type"] == "lifespan":
      await self._lifespan(receive, send)
    elif scope["type"] == "http":
      await self._http(scope, _Client(receive, send, self._stall))
    else:
      # No WebSockets.
      await send({"type": "websocket.close", "code": 1003})

  async def _lifespan(self, receive: Receive, send: Send) -> None:
    while True:
      event = (await receive())["type"]
      if event == "lifespan.startup":
        self.engine.start()
        await send({"type": "lifespan.startup.complete"})
      elif event == "lifespan.shutdown":
        await self._thread(self.close)
        await send({"type": "lifespan.shutdown.complete"})
        return

  def close(self) -> None:
    """Closes the engine; what is under way is given up."""
    self.engine.close()
    self._pool.shutdown(wait=False)

  def _thread(self, call: Callable[..., Any], *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(self._pool, call, *args)

  # -------------------------------------------------------------------------
  # HTTP
  # -------------------------------------------------------------------------

  async def _http(self, scope: Any, client: _Client) -> None:
    path = scope["path"]
    try:
      try:
        await self._route(scope, path, client)
      except ApiError as error:
        if client.status:
          # The head is gone: the error is the last event of the stream.
          await client.event(error.body)
          await client.finish()
        else:
          await client.json(error.status, error.body, error.headers)
      except (ClientGone, asyncio.CancelledError):
        raise
      except Exception:
        _LOG.exception("%s %s", scope["method"], path)
        if client.status:
          raise
        error = ApiError(
          500, "an internal error; see the server's log", kind="server_error"
        )
        await client.json(500, error.body)
    except ClientGone:
      client.status = 499
    finally:
      await client.close()
      known = path if path in _PATHS else "other"
      self.metrics.answered(known, client.status)

  async def _route(self, scope: Any, path: str, client: _Client) -> None:
    method = _PATHS.get(path)
    if method is None:
      raise ApiError(
        404,
        message(
          "path",
          path,
          f"one of {', '.join(_PATHS)}",
          "send the request to one of these, behind the server's address",
        ),
      )
    if scope["method"] != method:
      raise ApiError(
        405,
        message("method", scope["method"], method, f"send a {method}"),
        headers={"allow": method},
      )
    if path == "/health":
      missing = self.engine.missing
      status = {"status": "unavailable", "missing": missing}
      await client.json(
        503 if missing else 200, status if missing else {"status": "ok"}
      )
      return
    headers = {key.lower(): value for key, value in scope["headers"]}
    salt = self._tenant(headers)
    if path == "/v1/models":
      await client.json(200, self._model.models())
    elif path == "/metrics":
      text = self.metrics.text(self.engine.figures())
      await client.body(200, text.encode(), CONTENT_TYPE)
    else:
      body = await self._body(headers, client)
      given = parse_json(body)
      make = self._model.chat if "chat" in path else self._model.completion
      await self._answer(await self._thread(make, given, salt), client)

  def _tenant(self, headers: Mapping[bytes, bytes]) -> str:
    """The salt of a request's tenant.

    Raises:
      ApiError: no key, or one that is not known.
    """
    if self._keys is None:
      return ""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    tenant = self._keys.get(_digest(key.strip().decode("latin-1")))
    if scheme.lower() != b"bearer" or tenant is None:
      raise ApiError(
        401,
        message(
          "authorization",
          "an unknown key" if key else "no key",
          "a key of this server",
          "send the header Authorization: Bearer KEY",
        ),
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
      )
    return f"tenant:{tenant}"

  async def _body(
    self, headers: Mapping[bytes, bytes], client: _Client
  ) -> bytes:
    """The body of a request.

    Raises:
      ApiError: it is too large, or not said to be JSON.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
      # A page in a browser may send other types to any address unasked.
      raise ApiError(
        415,
        message(
          "content-type",
          kind.decode("latin-1") or "none",
          "application/json",
          "send it",
        ),
      )
    length = headers.get(b"content-length", b"0")
    too_large = ApiError(
      413,
      message(
        "body",
        f"over {self._body_bytes:,} bytes",
        f"{self._body_bytes:,} at most",
        "shorten it",
      ),
    )
    if not length.isdigit() or int(length[:18]) > self._body_bytes:
      raise too_large
    parts, size = [], 0
    async for part in client.parts():
      size += len(part)
      if size > self._body_bytes:
        raise too_large
      parts.append(part)
    return b"".join(parts)

  # -------------------------------------------------------------------------
  # Answers
  # -------------------------------------------------------------------------

  async def _answer(self, call: ApiCall, client: _Client) -> None:
    """Submits what a body asks for, and sends the answers."""
    most = self.engine.rows + self._queue
    if call.answers > most:
      raise ApiError(
        400,
        message(
          "n",
          f"{call.answers} answers",
          f"at most {most} at the same time",
          "ask for fewer",
        ),
        param="n",
      )
    if self._answers + call.answers > most:
      raise ApiError(
        429,
        f"the queue is full: {self._answers} answers of {most}; "
        "try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": "1"},
      )
    self._answers += call.answers
    handles: list[Handle] = []
    try:
      loop, changed = asyncio.get_running_loop(), client.changed

      def then(answer: Answer) -> None:
        # One that is not streamed is looked at when it has ended.
        if call.stream or answer.finish is not None:
          # The loop may have ended before the engine.
          with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

      def submit() -> None:
        for request in call.requests:
          on_change = self.metrics.watch(then)
          handles.append(self.engine.submit(request, on_change))

      try:
        await self._thread(submit)
      except RejectedError as error:
        raise rejected(error) from None
      except RingjaxError as error:
        if not self.engine.open:
          raise ApiError(
            503,
            "the server takes no requests any more",
            kind="server_error",
            code="unavailable",
          ) from None
        raise from_error(error) from None
      client.watch()
      if call.stream:
        await self._stream(call, handles, client)
        return
      while not all(handle.done for handle in handles):
        await client.wait()
      await client.json(200, self._model.whole(call, handles))
    finally:
      self._answers -= call.answers
      if not all(handle.done for handle in handles):
        self._pool.submit(self._cancel, handles)

  def _cancel(self, handles: list[Handle]) -> None:
    for handle in handles:
      self.engine.cancel(handle)

  async def _stream(
    self, call: ApiCall, handles: list[Handle], client: _Client
  ) -> None:
    """Sends parts of answers as they come."""
    answers = []
    for handle, echo in zip(handles, call.echoes, strict=True):
      for answer in handle.answers:
        answers.append(
          AnswerStream(self._model.tokenizer, answer, len(answers), call, echo)
        )
    await client.begin(200, "text/event-stream; charset=utf-8")
    while True:
      for one in answers:
        if one.ended:
          continue
        first = not one.begun
        choice = one.choice(first, one.take())
        if choice is not None:
          await client.event(self._model.chunk(call, [choice]))
      if all(one.ended for one in answers):
        break
      await client.wait()
    if call.usage:
      last = self._model.chunk(call, []) | {"usage": usage(handles)}
      await client.event(last)
    await client.finish(b"data: [DONE]\n\n")


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class _Client:
  """One client's side of a request.

  Attributes:
    status: of the answer, 0 before it begins.
    changed: set when there may be something to send, or when it is gone.
  """

  def __init__(self, receive: Receive, send: Send, stall: float):
    self.status = 0
    self.changed = asyncio.Event()
    self._receive, self._send_, self._stall = receive, send, stall
    self._gone = False
    self._watching: asyncio.Task[None] | None = None

  async def parts(self) -> Any:
    """The body, part by part.

    Raises:
      ApiError: nothing comes any more.
      ClientGone: it has disconnected.
    """
    more = True
    while more:
      try:
        event = await asyncio.wait_for(self._receive(), self._stall)
      except TimeoutError:
        raise ApiError(
          408,
          message(
            "body",
            f"nothing for {self._stall:g} s",
            "a whole body",
            "send it again",
          ),
          headers={"connection": "close"},
        ) from None
      if event["type"] == "http.disconnect":
        raise ClientGone
      more = event.get("more_body", False)
      yield event.get("body", b"")

  def watch(self) -> None:
    """Lets `wait` notice that it disconnects; behind the body."""

    async def watched() -> None:
      while (await self._receive())["type"] != "http.disconnect":
        pass
      self._gone = True
      self.changed.set()

    self._watching = asyncio.ensure_future(watched())

  async def wait(self) -> None:
    """Waits until `changed` is set.

    Raises:
      ClientGone: it has disconnected.
    """
    await self.changed.wait()
    self.changed.clear()
    if self._gone:
      raise ClientGone

  async def close(self) -> None:
    """Watches no longer."""
    if self._watching is not None:
      self._watching.cancel()
      await asyncio.gather(self._watching, return_exceptions=True)

  async def json(
    self, status: int, body: Any, headers: Mapping[str, str] | None = None
  ) -> None:
    """Sends a whole answer."""
    data = json_text(body).encode()
    await self.body(status, data, "application/json", headers)

  async def body(
    self,
    status: int,
    data: bytes,
    kind: str,
    headers: Mapping[str, str] | None = None,
  ) -> None:
    """Sends a whole answer of any type."""
    length = {"content-length": str(len(data))}
    await self.begin(status, kind, {**length, **(headers or {})})
    await self.finish(data)

  async def begin(
    self, status: int, kind: str, headers: Mapping[str, str] | None = None
  ) -> None:
    """Sends the head of an answer."""
    self.status = status
    found = {
      "content-type": kind,
      "cache-control": "no-store",
      **(headers or {}),
    }
    pairs = [(k.encode(), v.encode()) for k, v in found.items()]
    await self._send(
      {"type": "http.response.start", "status": status, "headers": pairs}
    )

  async def event(self, body: Any) -> None:
    """Sends an event of a stream."""
    data = b"data: " + json_text(body).encode() + b"\n\n"
    await self._send(
      {"type": "http.response.body", "body": data, "more_body": True}
    )

  async def finish(self, data: bytes = b"") -> None:
    """Sends the end of an answer."""
    await self._send({"type": "http.response.body", "body": data})

  async def _send(self, event: Any) -> None:
    try:
      await asyncio.wait_for(self._send_(event), self._stall)
    except (TimeoutError, OSError):
      raise ClientGone from None
