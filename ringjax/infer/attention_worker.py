"""A process that keeps the keys of some sequences and attends over them.

Guarantees: it gets queries, keys and values of one layer and returns what
attention makes of them, by the program that a model's own cache runs: masks,
windows, sinks and soft caps are those of the model's config, and no weights
but the small ones (sinks) are there. It serves one model at a time; when the
connection ends its caches go, and it waits for the next one.
Memory: keys and values of its rows; windowed layers keep their window.

  python -m ringjax.infer.attention_worker

reads a line of JSON from the standard input (`key` in hexadecimal; `host`,
`port`, `patience_s`), writes the port as a line, and ends when the standard
input does.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ringjax.errors import PeerError, RingjaxError
from ringjax.infer.attention_wire import (
  ArrayMessage,
  receive_arrays,
  send_arrays,
)
from ringjax.infer.layerwise import LayerPrograms, TokenRows
from ringjax.json_text import json_text
from ringjax.kv import kind_text
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.checkpoint import abstract
from ringjax.parallel.door import Door
from ringjax.transfer.wire import (
  AuthenticationError,
  HostileMessageError,
  PullConnection,
  checked_key,
  listening,
)

PATIENCE_S = 120.0
# Between two messages of a model that is doing something else.
_IDLE_S = 86_400.0
_GREETING_S = 5.0
_MOST_ROWS = 1 << 20
_MOST_TOKENS = 1 << 30
# Prompts come in blocks of so many tokens, so that few sizes are compiled.
LOAD_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows:
  """What a worker keeps.

  Attributes:
    config: the model's config.json, as text.
    dtype: of the model.
    cache_dtype: of keys and values.
    kind: of the caches.
    capacity: tokens of a row.
    rows: of each mini-batch, that this worker has.
  """

  config: str
  dtype: str
  cache_dtype: str
  kind: CacheKind
  capacity: int
  rows: tuple[int, ...]


class AttentionHost:
  """The caches of a worker's rows, a layer and a mini-batch each."""

  def __init__(
    self,
    held: HostRows,
    small: list[tuple[np.ndarray | None, ...]],
    before: AttentionHost | None = None,
  ):
    """Makes empty caches.

    Args:
      held: what it keeps.
      small: of each layer the weights that attention has, as
        `LayerPrograms.mixing_weights` gives them.
      before: one whose programs are taken, if they are of the same model.

    Raises:
      RingjaxError: the config has layers that keep more than keys and values.
    """
    self.held = held
    if before is not None and before.of == self.of:
      self.form, self.programs = before.form, before.programs
    else:
      self.form = abstract(json.loads(held.config), dtype=held.dtype)
      self.programs = LayerPrograms(self.form, kind=held.kind)
    form, self.layers = self.form, self.programs.layers
    if len(small) != len(self.layers):
      raise HostileMessageError(
        f"small weights of {len(small)} of {len(self.layers)} layers"
      )
    leaves = [jax.tree.leaves(b) for run in form.stack.blocks for b in run]
    self._weights: list[tuple[Any, Any]] = []
    for layer, found in zip(self.layers, small, strict=True):
      shapes = tuple(
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves[layer.kind]
      )
      want = [None if len(x.shape) > 1 else x.shape for x in shapes]
      if want != [None if x is None else x.shape for x in found]:
        raise HostileMessageError("small weights of another model")
      self._weights.append((shapes, found))
    self.caches = [
      [self._empty(layer, n) for layer in self.layers] for n in held.rows
    ]
    self._none = [self._empty(layer, 1) for layer in self.layers]

  @property
  def of(self) -> tuple[Any, ...]:
    """What the programs depend on."""
    return self.held.config, self.held.dtype, self.held.kind

  def _empty(self, layer: Any, rows: int) -> KVCache | None:
    if not rows:
      return None
    return KVCache.create(
      (self.programs.cache_spec(layer),),
      rows,
      self.held.capacity,
      jnp.dtype(self.held.cache_dtype),
      kind=self.held.kind,
    )

  def load(
    self,
    half: int,
    row: int,
    layer: int,
    first: int,
    end: int,
    k: Shaped[np.ndarray, "1 K S H"],
    v: Shaped[np.ndarray, "1 K S J"],
  ) -> None:
    """Puts keys of a prompt into a row, in place of what it held.

    Args:
      half: which mini-batch.
      row: of those that the worker has of it.
      layer: its number.
      first: position of the first key.
      end: position behind the last; keys behind it are padding.
      k: as the caches store them.
      v: the same of values.
    """
    empty = self._none[layer]
    assert empty is not None
    ints = (np.int32(0), np.int32(first), np.int32(end))
    one = self.programs.load(0, jax.tree.map(jnp.copy, empty), *ints, k, v)
    cache: Any = self.caches[half][layer]
    self.caches[half][layer] = cache.insert(np.array([row]), one)

  def attend(
    self,
    half: int,
    layer: int,
    q: Shaped[np.ndarray, "B 1 N H"],
    k: Shaped[np.ndarray, "B K 1 H"],
    v: Shaped[np.ndarray, "B K 1 J"],
    pos: Int[np.ndarray, " B"],
  ) -> Shaped[Array, "B 1 N J"]:
    """Appends a token of each row and attends: what attention makes.

    `pos` are the tokens' positions; rows with -1 have none.
    """
    shapes, small = self._weights[layer]
    mixed, self.caches[half][layer] = self.programs.mix(
      self.layers[layer].spec, 0, shapes, small, (q, k, v),
      TokenRows(pos, np.int32(1)), self.caches[half][layer], np.int32(0),
    )  # fmt: skip
    return mixed


class AttentionServer:
  """Accepts models, one after another, and answers them.

  Attributes:
    address: host and port.
  """

  def __init__(
    self,
    key: bytes,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    patience_s: int | float = PATIENCE_S,
  ):
    """Listens.

    Args:
      key: that models have to have too, at least 16 bytes.
      host: of the interface to listen on.
      port: 0 takes one that is free.
      patience_s: seconds without a byte in the middle of a message after
        which a model is given up.
    """
    self._key, self._patience_s = checked_key(key), patience_s
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._link: PullConnection | None = None
    self._closed = False
    self._door = Door(
      self._server, self._greet, name="ringjax attention worker"
    )

  def serve(self) -> None:
    """Answers until `close`."""
    while not self._closed:
      self._link = link = self._door.accept()
      if link is None:
        return
      try:
        link.patience_s = self._patience_s
        _Conversation(link, self._patience_s).run()
      except (AuthenticationError, HostileMessageError, PeerError, OSError):
        pass  # It named itself to the other side, as far as that is there.
      finally:
        link.close()

  def close(self) -> None:
    """Ends the connection and listens no more."""
    self._closed = True
    self._door.close()
    self._server.close()
    if self._link is not None:
      self._link.close()

  def _greet(self, link: socket.socket, address: Any) -> PullConnection:
    """Let a model show its key."""
    # A client whose machine is gone must not keep others waiting for a day.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, n in (
      ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)
    ):  # fmt: skip
      if hasattr(socket, option):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), n)
    wire = PullConnection(
      link, min(_GREETING_S, self._patience_s), f"{address[0]}:{address[1]}"
    )
    wire.greet_reader(self._key)
    return wire


class _Conversation:
  """One model's messages, in order."""

  def __init__(self, link: PullConnection, patience_s: int | float):
    self._link, self._patience_s = link, patience_s
    self._host: AttentionHost | None = None

  def run(self) -> None:
    """Answers until the model leaves."""
    while (heard := self._next()) is not None:
      try:
        self._answer(heard)
      except RingjaxError as error:
        send_arrays(self._link, "failed", why=str(error)[:400])
        raise PeerError(str(error)) from None
      except (TypeError, ValueError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"[:400]
        send_arrays(self._link, "failed", why=why)
        raise PeerError(why) from error

  def _next(self) -> ArrayMessage | None:
    # A model may do something else for long, but not within a message.
    self._link.link.settimeout(_IDLE_S)
    start = self._link.link.recv(1, socket.MSG_PEEK)
    self._link.link.settimeout(self._patience_s)
    return receive_arrays(self._link) if start else None

  def _answer(self, heard: ArrayMessage) -> None:
    if heard.kind == "open":
      self._host = _opened(heard, self._host)
      send_arrays(self._link, "opened")
      return
    host = self._host
    if host is None or heard.kind not in ("load", "attend"):
      raise HostileMessageError(f"{heard.kind} out of turn")
    half = heard.integer("half", len(host.held.rows))
    layer = heard.integer("layer", len(host.layers))
    if heard.kind == "attend":
      q, k, v, pos = heard.arrays
      mixed = host.attend(half, layer, q, k, v, pos)
      send_arrays(self._link, "attended", [np.asarray(mixed)])
      return
    row = heard.integer("row", host.held.rows[half])
    most = host.held.capacity + 1
    first, end = heard.integer("first", most), heard.integer("end", most)
    k, v = heard.arrays
    host.load(half, row, layer, first, end, k, v)


def _opened(heard: ArrayMessage, before: AttentionHost | None) -> AttentionHost:
  """The host that a model asks for, in place of the one before."""
  fields = heard.fields
  rows, config = fields.get("rows"), fields.get("config")
  dtypes = [fields.get(name) for name in ("dtype", "cache_dtype")]
  texts: list[Any] = [config, *dtypes, fields.get("cache_kind")]
  if not isinstance(rows, list) or not 1 <= len(rows) <= 2:
    raise HostileMessageError("no rows")
  if not all(type(n) is int and 0 <= n < _MOST_ROWS for n in rows):
    raise HostileMessageError("rows out of range")
  if not all(isinstance(x, str) for x in texts):
    raise HostileMessageError("no config")
  held = HostRows(
    config=texts[0],
    dtype=texts[1],
    cache_dtype=texts[2],
    kind=kind_text.parse(texts[3], "cache_kind"),
    capacity=heard.integer("capacity", _MOST_TOKENS),
    rows=tuple(rows),
  )
  small, arrays = [], iter(heard.arrays)
  layers = fields.get("small")
  if not isinstance(layers, list):
    raise HostileMessageError("no small weights")
  for layer in layers:
    if not isinstance(layer, list):
      raise HostileMessageError("small weights of no layer")
    small.append(tuple(next(arrays, None) if there else None
                       for there in layer))  # fmt: skip
  return AttentionHost(held, small, before)


def main() -> None:
  """The process: see the head of this file."""
  said = json.loads(sys.stdin.readline())
  server = AttentionServer(
    bytes.fromhex(said["key"]),
    host=said.get("host", "127.0.0.1"),
    port=said.get("port", 0),
    patience_s=said.get("patience_s", PATIENCE_S),
  )
  threading.Thread(target=server.serve, daemon=True).start()
  print(json_text(server.address), flush=True)
  sys.stdin.read()


if __name__ == "__main__":
  main()
