"""A process that is one elastic instance: a manager calls it, others help.

Guarantees: it does the calls of its manager one after another and answers each
once, with what came of it or why it failed; it answers pings meanwhile. A call
whose other instances are gone, or that the manager gives up, fails at once and
leaves the slots for `drop` to tidy. Strangers without the key get no further
than the greeting, and nothing is pickled. It ends with its manager.
Cost: a connection to each other instance that it sends to, made when first
needed; a thread for each connection.

  kind      from      arrays                           answer
  manage    manager   -                                opened
  read      manager   a `ReadPrompts`                  done or failed
  step      manager   a `StepRows`                     done or failed
  move      manager   a `MoveKeys`                     done or failed
  drop      manager   requests, first positions        -
  abandon   manager   -                                -
  ping      manager   -                                pong
  hello     instance  -                                -
  block, query, partial, keys, stored: between instances, see elastic_instance

  python -m ringjax.infer.elastic_worker

reads a line of JSON from the standard input (`key` in hexadecimal; `model`, a
folder or GGUF file; `number`, `slots`; `dtype`, `strict`, `host`, `port`,
`patience_s`), and when it has the model writes a line: host, port and the size
of the vocabulary.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import selectors
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.errors import PeerError, RingjaxError
from ringjax.infer.attention_wire import (
  ArrayMessage,
  receive_arrays,
  send_arrays,
)
from ringjax.infer.elastic_instance import (
  ElasticInstance,
  MoveKeys,
  ReadPrompts,
  StepRows,
)
from ringjax.infer.layerwise import LayerPrograms
from ringjax.json_text import json_text
from ringjax.models import checkpoint
from ringjax.models.transformer import Transformer
from ringjax.parallel.door import Door
from ringjax.transfer.wire import (
  PullConnection,
  checked_key,
  listening,
)

PATIENCE_S = 60.0
_BETWEEN = ("hello", "block", "query", "partial", "keys", "stored")
_CALLS = ("read", "step", "move", "drop")
FROM_MANAGER = ("manage", *_CALLS, "abandon", "ping")
TO_MANAGER = ("opened", "done", "failed", "pong")
_MOST = 1 << 31


def receive_idle(
  link: PullConnection, kinds: Sequence[str]
) -> ArrayMessage | None:
  """The next message of a connection that may be quiet for any time.

  Its patience counts within a message. None if the other side left.

  Raises:
    PeerError: it is gone, or sent something else.
  """
  with selectors.PollSelector() as wait:
    try:
      wait.register(link.link, selectors.EVENT_READ)
      wait.select()
      return receive_arrays(link, kinds)
    except (OSError, ValueError) as error:
      raise PeerError(f"{link.name} is gone: {error}") from None


class _PeerLinks:
  """Messages from other instances that wait, and connections to them."""

  def __init__(self, number: int, key: bytes, patience_s: int | float):
    self._number, self._key, self._patience_s = number, key, patience_s
    self._news = threading.Condition()
    self._came: dict[tuple[int, int, str], collections.deque[ArrayMessage]] = (
      collections.defaultdict(collections.deque)
    )
    self._gone: set[int] = set()
    self._out: dict[int, PullConnection] = {}
    self._begun, self._abandoned = -1, -1

  def begin(self, call: int) -> None:
    """Forgets messages of calls before this one."""
    with self._news:
      self._begun = call
      for place in [x for x in self._came if x[0] < call]:
        del self._came[place]

  def abandon(self, call: int) -> None:
    """Ends the waits of calls up to this one."""
    with self._news:
      self._abandoned = max(self._abandoned, call)
      self._news.notify_all()

  def receive(self, link: PullConnection, source: int) -> None:
    """Takes an instance's messages until it leaves."""
    try:
      while (heard := receive_idle(link, _BETWEEN)) is not None:
        call = heard.integer("call", _MOST)
        with self._news:
          if call >= self._begun:
            self._came[call, source, heard.kind].append(heard)
            self._news.notify_all()
    except PeerError:
      pass  # It is as good as gone.
    finally:
      link.close()
      with self._news:
        self._gone.add(source)
        self._news.notify_all()

  def take(self, call: int, source: int, kind: str) -> ArrayMessage:
    """The next message of a kind of a call.

    Raises:
      PeerError: the instance is gone, or the call was given up.
    """
    place = call, source, kind

    def ready() -> bool:
      return (
        bool(self._came.get(place))
        or source in self._gone
        or call <= self._abandoned
      )

    with self._news:
      # The manager gives up a call of which an instance stands still.
      self._news.wait_for(ready)
      if call <= self._abandoned:
        raise PeerError("the call was given up")
      if not self._came.get(place):
        raise PeerError(f"instance {source} is gone", source)
      return self._came[place].popleft()

  def to(self, target: int, address: tuple[str, int]) -> PullConnection:
    """The connection to an instance.

    Raises:
      PeerError: it is not there, or has another key.
    """
    if target not in self._out:
      try:
        made = socket.create_connection(address, self._patience_s)
      except OSError as error:
        raise PeerError(
          f"instance {target} does not listen: {error}", target
        ) from None
      link = PullConnection(made, self._patience_s, f"instance {target}")
      try:
        link.greet_publisher(self._key)
        send_arrays(link, "hello", number=self._number)
      except PeerError:
        link.close()
        raise
      self._out[target] = link
    return self._out[target]

  def close(self) -> None:
    """Ends all connections."""
    self.abandon(_MOST)
    for link in self._out.values():
      link.close()


class _CallPost:
  """As `Post`: messages of one call."""

  def __init__(
    self, call: int, addresses: dict[str, list[Any]], links: _PeerLinks
  ):
    self._call, self._addresses, self._links = call, addresses, links

  def send(
    self, target: int, kind: str, arrays: Sequence[np.ndarray], **fields: Any
  ) -> int:
    host, port = self._addresses[str(target)]
    link = self._links.to(target, (host, port))
    return send_arrays(link, kind, arrays, call=self._call, **fields)

  def take(self, source: int, kind: str) -> ArrayMessage:
    return self._links.take(self._call, source, kind)


class ElasticWorker:
  """Listens for a manager and other instances, and does what the first says.

  Attributes:
    address: host and port.
    vocab: of the model.
  """

  def __init__(
    self,
    model: Transformer,
    number: int,
    slots: int,
    key: bytes,
    *,
    programs: LayerPrograms | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    patience_s: int | float = PATIENCE_S,
  ):
    """Listens.

    Args:
      model: on one device.
      number: of the instance, unique in its cluster.
      slots: tokens that it has room for.
      key: of the cluster, at least 16 bytes.
      programs: of the model, where another instance of this process has some.
      host: of the interface to listen on.
      port: 0 takes one that is free.
      patience_s: seconds without a byte in the middle of a message after which
        its sender is given up.

    Raises:
      ConfigError: a model whose layers keep more than keys and values.
    """
    self._instance = ElasticInstance(model, number, slots, programs=programs)
    self._key, self._patience_s = checked_key(key), patience_s
    self.vocab = model.config.vocab
    self._links = _PeerLinks(number, self._key, patience_s)
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._manager: queue.SimpleQueue[PullConnection | None] = (
      queue.SimpleQueue()
    )
    self._calls: queue.SimpleQueue[ArrayMessage | None] = queue.SimpleQueue()
    self._telling = threading.Lock()
    self._all: list[PullConnection] = []
    self._door = Door(
      self._server, self._greet, self._enter, name="ringjax elastic worker"
    )

  def serve(self) -> None:
    """Does a manager's calls until it leaves, or `close`."""
    link = self._manager.get()
    if link is None:
      return
    threading.Thread(target=self._listen, args=(link,), daemon=True).start()
    with contextlib.suppress(PeerError):
      self._tell(link, "opened")
      while (heard := self._calls.get()) is not None:
        self._run(link, heard)
    self.close()

  def close(self) -> None:
    """Ends all connections and listens no more; once."""
    self._manager.put(None)
    self._calls.put(None)
    self._door.close()
    self._server.close()
    self._links.close()
    for link in self._all:
      link.close()

  def _greet(self, link: socket.socket, address: Any) -> PullConnection:
    wire = PullConnection(link, self._patience_s, f"{address[0]}:{address[1]}")
    wire.greet_reader(self._key, 5.0)
    return wire

  def _enter(self, link: PullConnection) -> None:
    """Takes a connection, by its first message: in a thread of its own."""
    self._all.append(link)
    try:
      heard = receive_arrays(link, ("hello", "manage"))
      if heard is None:
        raise PeerError(f"{link.name} left")
      if heard.kind == "manage":
        self._manager.put(link)
        return
      source = heard.integer("number", _MOST)
    except (PeerError, OSError):
      link.close()
      return
    self._links.receive(link, source)

  def _listen(self, link: PullConnection) -> None:
    """Takes the manager's messages; those that can't wait are done here."""
    try:
      while (heard := receive_idle(link, FROM_MANAGER)) is not None:
        if heard.kind == "ping":
          self._tell(link, "pong")
        elif heard.kind == "abandon":
          self._links.abandon(heard.integer("call", _MOST))
        else:
          self._calls.put(heard)
    except PeerError:
      pass
    finally:
      # Nobody asks for the rest.
      self._links.abandon(_MOST)
      self._calls.put(None)

  def _tell(self, link: PullConnection, kind: str, **fields: Any) -> None:
    with self._telling:
      send_arrays(link, kind, **fields)

  def _run(self, link: PullConnection, heard: ArrayMessage) -> None:
    if heard.kind == "drop":
      requests, first = heard.arrays
      self._instance.drop(requests.tolist(), first.tolist())
      return
    call = heard.integer("call", _MOST)
    sent = self._instance.sent.copy()
    try:
      self._links.begin(call)
      tokens = self._do(heard, call)
    except Exception as error:
      gone = error.rank if isinstance(error, PeerError) else None
      why = f"{error}" if isinstance(error, RingjaxError) else repr(error)
      self._tell(link, "failed", call=call, why=why[:400], gone=gone)
      return
    bytes_sent = dict(self._instance.sent - sent)
    self._tell(link, "done", call=call, tokens=tokens, bytes_sent=bytes_sent)

  def _do(self, heard: ArrayMessage, call: int) -> list[Any]:
    """Does a call: (request, its new tokens) of those that end here."""
    fields, instance = heard.fields, self._instance
    post = _CallPost(call, fields["addresses"], self._links)
    if heard.kind == "move":
      what = MoveKeys(fields["source"], *heard.arrays)
      instance.move(what, post)
      return []
    group = tuple(fields["group"])
    if heard.kind == "read":
      first = instance.read(ReadPrompts(group, *heard.arrays), post)
      return [[r, [token]] for r, token in first.items()]
    rows = StepRows(group, fields["steps"], *heard.arrays)
    return [[r, new] for r, new in instance.step(rows, post).items()]


def main() -> None:
  """An instance that is told what it is, by the standard input."""
  told = json.loads(sys.stdin.readline())
  model = checkpoint.load(
    told["model"], dtype=told.get("dtype"), strict=told.get("strict", True)
  )
  worker = ElasticWorker(
    model,
    told["number"],
    told["slots"],
    bytes.fromhex(told["key"]),
    host=told.get("host", "127.0.0.1"),
    port=told.get("port", 0),
    patience_s=told.get("patience_s", PATIENCE_S),
  )
  print(json_text([*worker.address, worker.vocab]), flush=True)

  def until_left() -> None:
    # The starter's end is this one's, whatever runs.
    sys.stdin.read()
    os._exit(0)

  threading.Thread(target=until_left, daemon=True).start()
  worker.serve()
  os._exit(0)


if __name__ == "__main__":
  main()
