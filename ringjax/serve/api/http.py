"""ASGI application that serves OpenAI's API for an engine or a cluster.

Guarantees: the event loop never waits for the engine: what takes its lock,
parses a body or encodes text is done by threads, and tokens wake the loop up. A
request for which the queue has no room is refused before its body is read;
short bodies do not wait for long ones, nor a client for all bodies of another.
A client that disconnects, or does not send or read for `stall` seconds, loses
its request, whose pages are free at once; other requests are not affected. With
keys, tenants share no prefix, have separate shares of the queue, and see no
numbers of others. A failure of one request is an error object, without a
traceback; also a stream that fails ends with [DONE].
Cost: a few threads.

It is plain ASGI 3: it has few paths and needs no framework, and any server of
ASGI runs it. `launch.serve` takes uvicorn (BSD, 70 kB; with h11 and click), the
extra `serve`, which parses HTTP and ends gracefully.
Ref: https://asgi.readthedocs.io, https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import re
from collections.abc import (
  Awaitable,
  Callable,
  Hashable,
  Iterator,
  Mapping,
  MutableMapping,
  Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from ringjax.checks import number, positive_int
from ringjax.errors import (
  NotFiniteLogitsError,
  OptionError,
  PeerError,
  PromptError,
  RingjaxError,
  message,
)
from ringjax.infer.scoring.text_scorer import TokenScores
from ringjax.json_text import json_text
from ringjax.serve.api.api_parameters import (
  ApiError,
  from_error,
  parse_json,
  refused,
)
from ringjax.serve.api.embeddings import EmbeddingCall, embedding_call
from ringjax.serve.api.fair_threads import FairThreads
from ringjax.serve.api.openai_api import (
  AnswerStream,
  ApiCall,
  ApiModel,
  rejected,
)
from ringjax.serve.api.responses import (
  ResponseCall,
  ResponseStore,
  ResponseStream,
  ended_response,
  response_call,
)
from ringjax.serve.api.server_metrics import CONTENT_TYPE, Figure, ServerMetrics
from ringjax.serve.request import (
  Answer,
  Answers,
  Handle,
  RejectedError,
  Request,
)
from ringjax.serve.tenants import TenantShares
from ringjax.serve.text_requests import TextRequests

_LOG = logging.getLogger("ringjax.serve")
_MODEL, _RESPONSE = "/v1/models/", "/v1/responses/"
_PATHS = {
  "/v1/completions": "POST",
  "/v1/chat/completions": "POST",
  "/v1/responses": "POST",
  "/v1/embeddings": "POST",
  "/v1/models": "GET",
  "/tokenize": "POST",
  "/detokenize": "POST",
  "/tokenizer_info": "GET",
  "/metrics": "GET",
  "/version": "GET",
  "/health": "GET",
  "/ready": "GET",
}
# Numbers of threads: for short bodies, for long ones (both parse bodies and
# encode texts), and for calls that take the engine's lock.
_SHORT_THREADS, _LONG_THREADS, _ENGINE_THREADS = 3, 2, 4
_SHORT_BYTES = 1 << 16
# Minimum rate of a body in bytes a second, after the first `stall` seconds.
_BODY_RATE = 1 << 14
_DONE = b"data: [DONE]\n\n"
_EVENTS = "text/event-stream; charset=utf-8"
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ClientGone(Exception):
  """The client has disconnected, or does not read."""


@runtime_checkable
class Served(Answers, Protocol):
  """Backend of an application: an `Engine`, `EngineGroup` or `ClusterRouter`.

  Attributes:
    tokenizer: Tokenizer of its texts.
    vocab: Number of token ids of the model.
    longest: Maximum number of tokens of a prompt and its answer together.
  """

  tokenizer: Any
  vocab: int
  longest: int

  @property
  def rows(self) -> int:
    """Number of answers that are computed at the same time."""
    ...

  @property
  def texts(self) -> TextRequests:
    """Scores and embeddings of texts."""
    ...

  @property
  def adapters(self) -> Sequence[str]:
    """Names of the adapters that requests may ask for."""
    ...

  @property
  def open(self) -> bool:
    """Whether it takes requests."""
    ...

  @property
  def missing(self) -> str:
    """Reason for which it can't serve requests now; "" if it can."""
    ...

  def start(self) -> Served:
    """Starts its threads, which work until `close`."""
    ...

  def close(self) -> None:
    """Ends it, and cancels what is left."""
    ...

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Queues a request."""
    ...

  def figures(self) -> list[Figure]:
    """Metrics that a server publishes about it."""
    ...


def app(engine: Served, **options: Any) -> OpenAIApp:
  """Make the application of an engine with a tokenizer; see `OpenAIApp`."""
  return OpenAIApp(engine, **options)


class OpenAIApp:
  """ASGI application: completions, chats, models, health and metrics.

  Attributes:
    engine: Engine that answers; it is started and closed with the application.
    metrics: Counts of requests and answers.
  """

  def __init__(
    self,
    engine: Served,
    *,
    model_name: str = "ringjax",
    keys: Mapping[str, str] | None = None,
    admin: str | None = None,
    queue: int = 256,
    body_bytes: int = 8 << 20,
    most_answers: int = 128,
    stall: int | float = 60.0,
    chat_template: str | None = None,
    trusted_template: bool = False,
    reasoning_parser: str = "auto",
    response_bytes: int = 64 << 20,
  ):
    """Make the application of an engine.

    Args:
      engine: Engine with a tokenizer.
      model_name: Name by which clients call the model.
      keys: Tenants by their keys; None accepts all clients, as one tenant.
      admin: Tenant that sees the metrics of all; others see their own.
      queue: Number of answers that may wait besides those that run.
      body_bytes: Maximum bytes of a body.
      most_answers: Maximum number of answers of one body.
      stall: Seconds after which a client that does not send or read is
        disconnected.
      chat_template: Jinja source in place of the tokenizer's, or None.
      trusted_template: Whether the template is trusted, see
        `ringjax.data.ChatTemplate`.
      reasoning_parser: Name of the format of reasoning in chats' answers, one
        of `reasoning.FORMATS`; "auto" for that which the chat template shows,
        "none" to leave it in the text.
      response_bytes: Maximum bytes of the responses that are stored, for
        clients that follow one of them.

    Raises:
      OptionError: If a value is out of range.
      TemplateError: If the template is invalid.
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
      adapters=engine.adapters,
      chat_template=chat_template,
      trusted_template=trusted_template,
      reasoning_parser=reasoning_parser,
    )
    # Look up digests, as a comparison of keys would leak time.
    self._keys = None
    if keys is not None:
      self._keys = {_digest(key): tenant for key, tenant in keys.items()}
    tenants = set(() if keys is None else keys.values())
    if admin is not None and admin not in tenants:
      raise OptionError(
        "admin", repr(admin), "a tenant of the keys", "give it a key"
      )
    self._admin = admin
    queue = positive_int("queue", queue)
    # The number of rows of a cluster changes, so read it each time.
    self._shares = TenantShares(len(tenants), lambda: engine.rows + queue)
    self._body_bytes = positive_int("body_bytes", body_bytes)
    self._responses = ResponseStore(
      positive_int("response_bytes", response_bytes)
    )
    self._stall = number("stall", stall, above=0.0)
    self._short = FairThreads(_SHORT_THREADS, "ringjax short bodies")
    self._long = FairThreads(_LONG_THREADS, "ringjax long bodies")
    self._pool = ThreadPoolExecutor(_ENGINE_THREADS, "ringjax http")
    # One call of texts is read at a time.
    self._readers = ThreadPoolExecutor(1, "ringjax texts")
    self._ended = False
    # HTTP requests that have not been submitted yet.
    self._preparing: set[asyncio.Task[Any]] = set()
    self._answering: set[Handle] = set()

  async def __call__(
    self, scope: MutableMapping[str, Any], receive: Receive, send: Send
  ) -> None:
    """Serves one request, or the lifespan events of the server."""
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
    """Closes the engine; requests in flight are cancelled."""
    self._ended = True
    self.engine.close()
    self._short.close()
    self._long.close()
    self._pool.shutdown(wait=False)
    self._readers.shutdown(wait=False, cancel_futures=True)

  async def end(self, grace: int | float) -> None:
    """Cancels requests in flight after `grace` seconds.

    A stream ends with an error and [DONE], other answers are status 503. From
    then on no requests are accepted.

    Args:
      grace: Seconds in which answers may still finish.
    """
    await asyncio.sleep(grace)
    self._ended = True
    for task in list(self._preparing):
      task.cancel()
    handles = list(self._answering)
    if handles:
      await self._thread(self._cancel, handles)

  def _thread(self, call: Callable[..., Any], *args: Any) -> Any:
    """Run a call that takes the engine's lock in a thread.

    Raises:
      ApiError: If the application is closed.
    """
    loop = asyncio.get_running_loop()
    try:
      return loop.run_in_executor(self._pool, call, *args)
    except RuntimeError:
      raise _unavailable() from None

  # -------------------------------------------------------------------------
  # HTTP
  # -------------------------------------------------------------------------

  async def _http(self, scope: Any, client: _Client) -> None:
    path = scope["path"]
    try:
      try:
        await self._route(scope, path, client)
      except ApiError as error:
        await client.failed(error)
      except ClientGone:
        raise
      except asyncio.CancelledError:
        # Cancelled as the server ends: still send the client an error.
        await client.failed(_unavailable())
      except Exception:
        _LOG.exception("%s %s", scope["method"], path)
        error = ApiError(
          500, "an internal error; see the server's log", kind="server_error"
        )
        await client.failed(error)
    except ClientGone:
      client.status = 499
    finally:
      await client.close()
      route = path if path in _PATHS else "other"
      for prefix in (_MODEL, _RESPONSE):
        route = f"{prefix}{{id}}" if path.startswith(prefix) else route
      self.metrics.answered(route, client.status, client.tenant)

  async def _route(self, scope: Any, path: str, client: _Client) -> None:
    method = _PATHS.get(path)
    if path.startswith((_MODEL, _RESPONSE)):
      method = "GET"
    if path.startswith(_RESPONSE) and scope["method"] == "DELETE":
      method = "DELETE"
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
    if path in ("/health", "/ready"):
      missing = self.engine.missing
      status = {"status": "unavailable", "missing": missing}
      await client.json(
        503 if missing else 200, status if missing else {"status": "ok"}
      )
      return
    headers = {key.lower(): value for key, value in scope["headers"]}
    client.tenant = self._tenant(headers)
    if path == "/v1/models":
      await client.json(200, self._model.models())
    elif path.startswith(_MODEL):
      await client.json(200, self._model.model(path.removeprefix(_MODEL)))
    elif path.startswith(_RESPONSE):
      response_id = path.removeprefix(_RESPONSE)
      if method == "DELETE":
        body = self._responses.delete(client.tenant, response_id)
      else:
        body = self._responses.get(client.tenant, response_id).body
      await client.json(200, body)
    elif path == "/tokenizer_info":
      await client.json(200, self._model.tokenizer_info())
    elif path == "/version":
      await client.json(200, {"version": _version()})
    elif path == "/metrics":
      seen = None if self._sees_all(client.tenant) else client.tenant
      text = self.metrics.text(self.engine.figures(), seen)
      await client.body(200, text.encode(), CONTENT_TYPE)
    else:
      # Without keys, clients are distinguished by their connections.
      whose = client.tenant or tuple(scope.get("client") or ())
      with self._place(client) as place:
        await self._post(path, headers, client, whose, place)

  async def _post(
    self,
    path: str,
    headers: Mapping[bytes, bytes],
    client: _Client,
    whose: Hashable,
    place: _Place,
  ) -> None:
    """Answer the body of a POST request."""
    task = asyncio.current_task()
    assert task is not None
    self._preparing.add(task)
    try:
      if self._ended:
        raise _unavailable()
      body = await self._body(headers, client)
      client.watch()
      threads = self._long if len(body) > _SHORT_BYTES else self._short
      work = functools.partial(self._made, path, body, client)
      parsed = await threads.run(whose, work)
    finally:
      self._preparing.discard(task)
    if isinstance(parsed, ApiCall):
      await self._answer(parsed, client, place)
    elif isinstance(parsed, ResponseCall):
      await self._answer(parsed.call, client, place, parsed)
    elif isinstance(parsed, EmbeddingCall):
      embed = functools.partial(
        self.engine.texts.embeddings,
        parsed.texts,
        pooling=parsed.pooling,
        adapter=parsed.adapter,
      )
      embeddings = await self._reading(embed, client)
      await client.json(200, parsed.body(embeddings))
    else:
      await client.json(200, parsed)

  def _made(
    self, path: str, data: bytes, client: _Client
  ) -> ApiCall | EmbeddingCall | ResponseCall | dict[str, Any]:
    """Parse a body to a call, or to the answer if it needs no engine."""
    if client.gone:
      raise ClientGone
    body, model = parse_json(data), self._model
    if path == "/tokenize":
      return model.tokenize(body)
    if path == "/detokenize":
      return model.detokenize(body)
    if path == "/v1/embeddings":
      return embedding_call(model, body)
    salt = f"tenant:{client.tenant}" if client.tenant else ""
    if path == "/v1/responses":
      return response_call(model, body, client.tenant, salt, self._responses)
    make = model.chat if "chat" in path else model.completion
    return make(body, salt)

  def _tenant(self, headers: Mapping[bytes, bytes]) -> str:
    """Tenant of a request; "" if the server has no keys.

    Raises:
      ApiError: If the key is missing or unknown.
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
    return tenant

  def _sees_all(self, tenant: str) -> bool:
    return self._keys is None or tenant == self._admin

  async def _body(
    self, headers: Mapping[bytes, bytes], client: _Client
  ) -> bytes:
    """Read the body of a request.

    Raises:
      ApiError: If it is too large, or its type is not JSON.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
      # Web pages may send other types across origins without a preflight.
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

  async def _reading(self, read: Callable[..., Any], client: _Client) -> Any:
    """Result of reading texts, one call after another, while a client is there.

    Raises:
      ApiError: If a text can't be read, or the application is closed.
      ClientGone: If the client has disconnected.
    """

    def on_batch(_: int) -> None:
      if client.gone:
        raise ClientGone
      if self._ended:
        raise _unavailable()

    loop = asyncio.get_running_loop()
    try:
      return await loop.run_in_executor(
        self._readers, functools.partial(read, on_batch=on_batch)
      )
    except RingjaxError as error:
      if not self.engine.open:
        raise _unavailable() from None
      # An instance's error has no class of its own.
      failed = isinstance(error, NotFiniteLogitsError | PeerError)
      if failed or type(error) is RingjaxError:
        raise ApiError(
          500, f"the text could not be read: {error}", kind="server_error"
        ) from None
      raise from_error(error) from None
    except RuntimeError:
      if self._ended:
        raise _unavailable() from None
      raise

  @contextlib.contextmanager
  def _place(self, client: _Client) -> Iterator[_Place]:
    """Hold a place in the queue from before the body is read until the end."""
    place = _Place(self._shares, client.tenant)
    place.take(1)
    try:
      yield place
    finally:
      self._shares.give(client.tenant, place.count)

  async def _answer(
    self,
    call: ApiCall,
    client: _Client,
    place: _Place,
    response: ResponseCall | None = None,
  ) -> None:
    """Submit the requests of a call and send the answers.

    Args:
      call: The call.
      client: Client that made it.
      place: Place of the call in the queue.
      response: Response whose chat the call is, or None.
    """
    max_answers = self._shares.limit()
    if call.answers > max_answers:
      raise refused(
        "n",
        f"{call.answers} answers",
        f"at most {max_answers} at the same time",
        "ask for fewer",
      )
    beams = call.requests[0].beams or 0
    if beams > self.engine.rows:
      raise refused(
        "beams",
        f"{beams}",
        f"at most {self.engine.rows}, as many answers as are made at once",
        "ask for fewer",
      )
    place.take(call.answers - place.count)
    handles: list[Handle] = []
    try:
      scores: list[TokenScores] = []
      if call.prompt_top is not None:
        read = functools.partial(
          self.engine.texts.scores,
          [request.prompt for request in call.requests],
          top=call.prompt_top,
          adapter=call.requests[0].adapter,
        )
        scores = await self._reading(read, client)
      if call.continues:
        await self._submit(call, handles, client)
      else:
        handles += [_echoed(self.engine, request) for request in call.requests]
      if call.stream and response is not None:
        await self._stream_response(response, handles, client)
        return
      if call.stream:
        await self._stream(call, handles, client, scores)
        return
      while not all(handle.done for handle in handles):
        await client.wait()
      if response is not None:
        ended = ended_response(self._model, response, handles)
        self._keep(response, ended, client)
        await client.json(200, ended.body)
        return
      await client.json(200, self._model.complete_body(call, handles, scores))
    finally:
      self._answering.difference_update(handles)
      self.metrics.ended(handles, client.tenant)
      if not all(handle.done for handle in handles):
        # A closed pool raises, but then the engine has cancelled them.
        with contextlib.suppress(RuntimeError):
          self._pool.submit(self._cancel, handles)

  async def _submit(
    self, call: ApiCall, handles: list[Handle], client: _Client
  ) -> None:
    """Submit requests; `handles` gets those that the engine has accepted."""
    loop, changed = asyncio.get_running_loop(), client.changed

    def on_answer(answer: Answer) -> None:
      # Answers that are not streamed are sent when they have ended.
      if call.stream or answer.finish is not None:
        # The loop may have ended before the engine.
        with contextlib.suppress(RuntimeError):
          loop.call_soon_threadsafe(changed.set)

    # Tenants with fewer answers in flight come first.
    priority = self._shares.in_flight(client.tenant) // max(1, self.engine.rows)

    def submit() -> None:
      for request in call.requests:
        if client.tenant:
          request = dataclasses.replace(request, priority=priority)
        on_change = self.metrics.watch(on_answer, client.tenant)
        handles.append(self.engine.submit(request, on_change))

    try:
      await self._thread(submit)
    except RejectedError as error:
      raise rejected(error) from None
    except PromptError as error:
      # The engine's limit, without its remedies for who made the engine.
      limit = re.search(r"; wanted (.*?);", str(error))
      raise refused(
        "messages" if call.chat else "prompt",
        f"{max(len(request.prompt) for request in call.requests):,} tokens and "
        f"{call.requests[0].max_new_tokens:,} new ones",
        limit[1] if limit else "what this server has room for",
        "shorten it or ask for fewer",
        code="context_length_exceeded",
      ) from None
    except RingjaxError as error:
      if not self.engine.open:
        raise _unavailable() from None
      raise from_error(error) from None
    self._answering.update(handles)
    if self._ended:
      raise _unavailable()

  def _cancel(self, handles: list[Handle]) -> None:
    for handle in handles:
      self.engine.cancel(handle)

  async def _stream(
    self,
    call: ApiCall,
    handles: list[Handle],
    client: _Client,
    scores: Sequence[TokenScores],
  ) -> None:
    """Sends parts of answers as they grow."""
    answers: list[AnswerStream] = []
    for n, handle in enumerate(handles):
      answers += self._model.streams(
        call, handle, handle.answers, n, len(answers), scores
      )
    await client.begin(200, _EVENTS)
    while True:
      for stream in answers:
        if stream.ended:
          continue
        first = not stream.begun
        choice = stream.choice(first, stream.take())
        if choice is not None:
          await client.event(self._model.chunk(call, [choice]))
      if all(stream.ended for stream in answers):
        break
      await client.wait()
    if call.usage:
      last = self._model.chunk(call, []) | {
        "usage": self._model.usage(call, handles)
      }
      await client.event(last)
    await client.finish(_DONE)

  async def _stream_response(
    self, response: ResponseCall, handles: Sequence[Handle], client: _Client
  ) -> None:
    """Sends the events of a response as its answer grows."""
    stream = ResponseStream(self._model, response, handles[0])
    await client.begin(200, _EVENTS)
    while True:
      events = stream.take()
      if stream.ended:
        # Stored before the client hears of it, who may follow it at once.
        self._keep(response, stream, client)
      for event in events:
        await client.event(event, event["type"])
      if stream.ended:
        break
      await client.wait()
    await client.finish()

  def _keep(
    self, response: ResponseCall, stream: ResponseStream, client: _Client
  ) -> None:
    """Stores a response that has ended, if its body asks for that."""
    if response.stores:
      self._responses.add(client.tenant, stream.body, stream.messages)


def _echoed(engine: Served, request: Request) -> Handle:
  """Handle of a request whose answers are empty and have ended."""
  handle = Handle(engine, request, 0.0)
  for answer in handle.answers:
    answer.finish = "length"
  return handle


def _version() -> str:
  try:
    return importlib.metadata.version("ringjax")
  except importlib.metadata.PackageNotFoundError:
    return "unknown"


def _unavailable() -> ApiError:
  return ApiError(
    503,
    "the server takes no requests any more",
    kind="server_error",
    code="unavailable",
    headers={"retry-after": "5"},
  )


class _Place:
  """Answers of a tenant that count as in flight.

  Attributes:
    count: Number of answers.
  """

  def __init__(self, shares: TenantShares, tenant: str):
    self.count, self._shares, self._tenant = 0, shares, tenant

  def take(self, more: int) -> None:
    """Count more answers as in flight.

    Raises:
      ApiError: If the queue is full.
    """
    if not self._shares.take(self._tenant, more):
      has = self._shares.in_flight(self._tenant)
      raise ApiError(
        429,
        f"the queue is full: {has} answers under way; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": "1"},
      )
    self.count += more


def _digest(key: str) -> bytes:
  return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class _Client:
  """Connection to the client of one request.

  Attributes:
    status: HTTP status of the answer, 0 before it begins.
    tenant: Tenant of the client, or "" if it is not known.
    gone: Whether it has disconnected.
    changed: Event that is set when there may be data to send, or when the
      client is gone.
  """

  def __init__(self, receive: Receive, send: Send, stall: float):
    self.status, self.tenant, self.gone = 0, "", False
    self.changed = asyncio.Event()
    self._receive, self._send_, self._stall = receive, send, stall
    self._streams = self._complete = False
    self._watching: asyncio.Task[None] | None = None

  async def parts(self) -> Any:
    """Iterate over the parts of the body.

    Raises:
      ApiError: If the body stops or is too slow.
      ClientGone: If the client has disconnected.
    """
    clock = asyncio.get_running_loop().time
    has_more, begun, size = True, clock(), 0
    while has_more:
      remaining = begun + self._stall + size / _BODY_RATE - clock()
      try:
        wait = max(0.0, min(self._stall, remaining))
        async with asyncio.timeout(wait):
          event = await self._receive()
      except TimeoutError:
        raise ApiError(
          408,
          message(
            "body",
            f"{size:,} bytes in {clock() - begun:.3g} s",
            "a whole body",
            "send it again, faster",
          ),
          headers={"connection": "close"},
        ) from None
      if event["type"] == "http.disconnect":
        raise ClientGone
      has_more = event.get("more_body", False)
      part = event.get("body", b"")
      size += len(part)
      yield part

  def watch(self) -> None:
    """Let `wait` notice a disconnect; call it after the body is read."""

    async def watched() -> None:
      while (await self._receive())["type"] != "http.disconnect":
        pass
      self.gone = True
      self.changed.set()

    self._watching = asyncio.ensure_future(watched())

  async def wait(self) -> None:
    """Waits until `changed` is set.

    Raises:
      ClientGone: If the client has disconnected.
    """
    await self.changed.wait()
    self.changed.clear()
    if self.gone:
      raise ClientGone

  async def close(self) -> None:
    """Stop watching for a disconnect."""
    if self._watching is not None:
      self._watching.cancel()
      await asyncio.gather(self._watching, return_exceptions=True)

  async def json(
    self, status: int, body: Any, headers: Mapping[str, str] | None = None
  ) -> None:
    """Sends a whole answer."""
    data = json_text(body).encode()
    await self.body(status, data, "application/json", headers)

  async def failed(self, error: ApiError) -> None:
    """Send an error as the answer, or as the last event of a begun stream."""
    if not self.status:
      await self.json(error.status, error.body, error.headers)
    elif self._streams and not self._complete:
      await self.event(error.body)
      await self.finish(_DONE)

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
    self.status, self._streams = status, kind == _EVENTS
    fields = {
      "content-type": kind,
      "cache-control": "no-store",
      **(headers or {}),
    }
    pairs = [(k.encode(), v.encode()) for k, v in fields.items()]
    await self._send(
      {"type": "http.response.start", "status": status, "headers": pairs}
    )

  async def event(self, body: Any, name: str = "") -> None:
    """Sends an event of a stream, with a name or without."""
    head = f"event: {name}\n" if name else ""
    data = f"{head}data: {json_text(body)}\n\n".encode()
    await self._send(
      {"type": "http.response.body", "body": data, "more_body": True}
    )

  async def finish(self, data: bytes = b"") -> None:
    """Sends the end of an answer."""
    self._complete = True
    await self._send({"type": "http.response.body", "body": data})

  async def _send(self, event: Any) -> None:
    try:
      # Not `wait_for`: that of Python 3.11 may lose a cancellation of the task.
      async with asyncio.timeout(self._stall):
        await self._send_(event)
    except (TimeoutError, OSError):
      raise ClientGone from None
