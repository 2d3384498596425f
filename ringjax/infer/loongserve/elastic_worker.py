"""A process that is one elastic instance, called by a manager.

Guarantees: it runs the calls of its manager one after another and answers each
once, with the result or the error; it beats meanwhile. A call whose other
instances are gone, or that the manager abandons, fails at once; `drop`
then frees its slots. Peers without the key get no further than the greeting,
and nothing is pickled. The process ends with its manager.
Cost: a connection to each other instance that it sends to, made when first
needed; the two threads of a `LiveLink` for each connection.

  kind      from      arrays                           answer
  manage    manager   -                                -
  read      manager   a `ReadPrompts`                  done or failed
  step      manager   a `StepRows`                     done or failed
  move      manager   a `MoveKeys`                     done or failed
  drop      manager   requests, first positions        -
  abandon   manager   -                                -
  hello     instance  -                                -
  block, query, partial, keys, stored: between instances, see elastic_instance

  python -m ringjax.infer.loongserve.elastic_worker

reads a line of JSON from the standard input (`key` in hexadecimal; `model`, a
folder or GGUF file; `number`, `slots`; `dtype`, `strict`, `host`, `port`,
`patience_s`), and when it has the model writes a line: host, port and the size
of the vocabulary.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.errors import PeerError, RingjaxError
from ringjax.infer.layerwise import LayerPrograms
from ringjax.infer.loongserve.elastic_instance import (
  ElasticInstance,
  MoveKeys,
  ReadPrompts,
  StepRows,
)
from ringjax.json_text import json_text
from ringjax.models import checkpoint
from ringjax.models.transformer import Transformer
from ringjax.parallel.door import Door
from ringjax.parallel.links.array_messages import (
  ArrayMessage,
  receive_arrays,
  send_arrays,
)
from ringjax.parallel.links.connection import Connection, checked_key, listening
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LiveLink

PATIENCE_S = 60.0
_BETWEEN = ("block", "query", "partial", "keys", "stored")
_CALLS = ("read", "step", "move", "drop")
_FROM_MANAGER = (*_CALLS, "abandon")
TO_MANAGER = ("done", "failed")
_MOST = 1 << 31


class _PeerLinks:
  """Queued messages from other instances, and connections to them."""

  def __init__(self, number: int, key: bytes, patience_s: int | float):
    self._number, self._key, self._patience_s = number, key, patience_s
    self._news = threading.Condition()
    self._came: dict[tuple[int, int, str], collections.deque[ArrayMessage]] = (
      collections.defaultdict(collections.deque)
    )
    self._sources: LinkGroup[int] = LinkGroup(self._notify, together=False)
    self._targets: LinkGroup[int] = LinkGroup(together=False)
    self._begun, self._abandoned = -1, -1

  def begin(self, call: int) -> None:
    """Drops messages of calls before this one."""
    with self._news:
      self._begun = call
      for place in [x for x in self._came if x[0] < call]:
        del self._came[place]

  def abandon(self, call: int) -> None:
    """Ends the waits of calls up to this one."""
    with self._news:
      self._abandoned = max(self._abandoned, call)
      self._news.notify_all()

  def add(self, wire: Connection, source: int) -> None:
    """Queues an instance's messages until it disconnects."""
    wire.name = f"instance {source}"
    keep = functools.partial(self._keep, source)
    link = LiveLink(wire, rank=source, kinds=_BETWEEN, on_message=keep)
    self._sources.add(source, link)
    link.start()

  def _keep(self, source: int, message: ArrayMessage) -> None:
    call = message.integer("call", _MOST)
    with self._news:
      if call >= self._begun:
        self._came[call, source, message.kind].append(message)
        self._news.notify_all()

  def _notify(self, *_: object) -> None:
    with self._news:
      self._news.notify_all()

  def take(self, call: int, source: int, kind: str) -> ArrayMessage:
    """Waits for the next message of a call, an instance and a kind.

    Raises:
      PeerError: If the instance is gone, or the call was abandoned.
    """
    place = call, source, kind

    def ready() -> bool:
      return (
        bool(self._came.get(place))
        or self._is_gone(source)
        or call <= self._abandoned
      )

    with self._news:
      # No timeout: the manager abandons a call if an instance hangs.
      self._news.wait_for(ready)
      if call <= self._abandoned:
        raise PeerError("the call was given up")
      if not self._came.get(place):
        raise PeerError(f"instance {source} is gone", rank=source)
      return self._came[place].popleft()

  def to(self, target: int, address: tuple[str, int]) -> LiveLink:
    """Returns the link to an instance, made when first needed.

    Raises:
      PeerError: If the instance is gone, does not listen, or has another key.
    """
    # Its links' threads may remove it at any time.
    if (link := self._targets.links.get(target)) is not None:
      return link
    if (error := self._targets.lost.get(target)) is not None:
      raise error
    wire = Connection.connect(
      address,
      self._key,
      self._patience_s,
      f"instance {target}",
      rank=target,
    )
    try:
      send_arrays(wire, "hello", number=self._number)
    except PeerError:
      wire.close()
      raise
    link = LiveLink(wire, rank=target, kinds=())
    self._targets.add(target, link)
    return link.start()

  def _is_gone(self, source: int) -> bool:
    return source in self._sources.lost or source in self._sources.left

  def close(self) -> None:
    """Ends all waits and closes the connections."""
    self.abandon(_MOST)
    for group in (self._sources, self._targets):
      group.close("the instance has ended")


class _CallPost:
  """Messages of one call, an implementation of `Post`."""

  def __init__(
    self, call: int, addresses: dict[str, list[Any]], links: _PeerLinks
  ):
    self._call, self._addresses, self._links = call, addresses, links

  def send(
    self, target: int, kind: str, arrays: Sequence[np.ndarray], **fields: Any
  ) -> int:
    host, port = self._addresses[str(target)]
    link = self._links.to(target, (host, port))
    return link.send(kind, arrays, call=self._call, **fields)

  def take(self, source: int, kind: str) -> ArrayMessage:
    return self._links.take(self._call, source, kind)


class ElasticWorker:
  """Server of an instance: it runs a manager's calls with other instances.

  Attributes:
    address: Host and port that it listens on.
    vocab: Size of the model's vocabulary.
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
    """Listens on a port.

    Args:
      model: Model on one device.
      number: Number of the instance, unique in its cluster.
      slots: Number of tokens that it has room for.
      key: Shared secret of the cluster, at least 16 bytes.
      programs: Programs of the model from another instance of this process;
        default: new ones.
      host: Address of the interface to listen on.
      port: Port to listen on; 0 takes a free one.
      patience_s: Seconds without a byte after which another process counts as
        lost.

    Raises:
      ConfigError: If layers of the model keep more than keys and values.
    """
    self._instance = ElasticInstance(model, number, slots, programs=programs)
    self._key, self._patience_s = checked_key(key), patience_s
    self.vocab = model.config.vocab
    self._links = _PeerLinks(number, self._key, patience_s)
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._manager: queue.SimpleQueue[LiveLink | None] = queue.SimpleQueue()
    self._calls: queue.SimpleQueue[ArrayMessage | None] = queue.SimpleQueue()
    self._door = Door(
      self._server, self._greet, self._enter, name="ringjax elastic worker"
    )

  def serve(self) -> None:
    """Runs a manager's calls until it disconnects, or `close`."""
    link = self._manager.get()
    if link is not None:
      link.start()
      try:
        while (message := self._calls.get()) is not None:
          self._run(link, message)
        link.close("the instance has ended")
      except Exception as error:
        link.fail(f"{type(error).__name__}: {error}")
      finally:
        # A link that is not served must not look alive.
        link.fail("the instance has ended")
        link.join(1.0)
    self.close()

  def close(self) -> None:
    """Closes all connections and stops listening."""
    self._manager.put(None)
    self._calls.put(None)
    self._door.close()
    self._server.close()
    self._links.close()

  def _greet(
    self, link: socket.socket, address: tuple[Any, ...]
  ) -> tuple[Connection, ArrayMessage]:
    """Authenticates a peer, and receives its first message."""
    wire = Connection.admit(link, address, self._key, self._patience_s)
    message = receive_arrays(wire, ("hello", "manage"))
    if message is None:
      raise PeerError(f"{wire.name} left")
    message.integer("number", _MOST)
    return wire, message

  def _enter(self, greeted: tuple[Connection, ArrayMessage]) -> None:
    """Serves a manager, or another instance."""
    wire, message = greeted
    if message.kind == "hello":
      self._links.add(wire, message.integer("number", _MOST))
      return
    wire.name = "the manager"
    self._manager.put(
      LiveLink(
        wire,
        kinds=_FROM_MANAGER,
        on_message=self._hear,
        on_end=lambda _: self._end_calls(),
      )
    )

  def _hear(self, message: ArrayMessage) -> None:
    """Abandons a call at once, or queues it."""
    if message.kind == "abandon":
      self._links.abandon(message.integer("call", _MOST))
    else:
      self._calls.put(message)

  def _end_calls(self) -> None:
    # The manager left: waiting calls are of no use.
    self._links.abandon(_MOST)
    self._calls.put(None)

  def _run(self, link: LiveLink, message: ArrayMessage) -> None:
    if message.kind == "drop":
      requests, first = message.arrays
      self._instance.drop(requests.tolist(), first.tolist())
      return
    call = message.integer("call", _MOST)
    sent = self._instance.sent.copy()
    try:
      self._links.begin(call)
      tokens = self._do(message, call)
    except Exception as error:
      gone = error.rank if isinstance(error, PeerError) else None
      why = f"{error}" if isinstance(error, RingjaxError) else repr(error)
      link.tell("failed", call=call, why=why[:400], gone=gone)
      return
    bytes_sent = dict(self._instance.sent - sent)
    link.tell("done", call=call, tokens=tokens, bytes_sent=bytes_sent)

  def _do(self, message: ArrayMessage, call: int) -> list[Any]:
    """Runs a call; returns (request, new tokens) of this instance's rows."""
    fields, instance = message.fields, self._instance
    post = _CallPost(call, fields["addresses"], self._links)
    if message.kind == "move":
      move = MoveKeys(fields["source"], *message.arrays)
      instance.move(move, post)
      return []
    group = tuple(fields["group"])
    if message.kind == "read":
      first = instance.read(ReadPrompts(group, *message.arrays), post)
      return [[r, [token]] for r, token in first.items()]
    rows = StepRows(group, fields["steps"], *message.arrays)
    return [[r, new] for r, new in instance.step(rows, post).items()]


def main() -> None:
  """Runs the instance process; options come from the standard input."""
  options = json.loads(sys.stdin.readline())
  model = checkpoint.load(
    options["model"],
    dtype=options.get("dtype"),
    strict=options.get("strict", True),
  )
  worker = ElasticWorker(
    model,
    options["number"],
    options["slots"],
    bytes.fromhex(options["key"]),
    host=options.get("host", "127.0.0.1"),
    port=options.get("port", 0),
    patience_s=options.get("patience_s", PATIENCE_S),
  )
  print(json_text([*worker.address, worker.vocab]), flush=True)

  def until_left() -> None:
    # The standard input ends with the parent process: then exit at once.
    sys.stdin.read()
    os._exit(0)

  threading.Thread(target=until_left, daemon=True).start()
  worker.serve()
  os._exit(0)


if __name__ == "__main__":
  main()
