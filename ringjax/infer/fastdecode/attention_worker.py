"""A process that keeps the keys of some sequences and attends over them.

Guarantees: it gets queries, keys and values of one layer and returns the
attention outputs, by the program that a model's own cache runs: masks,
windows, sinks and soft caps are those of the model's config, and it has no
weights except the small ones (sinks). It serves one model at a time; when the
connection ends it drops its caches and waits for the next one.
Memory: keys and values of its rows; windowed layers keep their window.

  kind      from    arrays                     answer
  open      model   small weights, by layer    opened
  load      model   k, v of one prompt         -
  attend    model   q, k, v of a layer's rows  attended: attention outputs

  python -m ringjax.infer.fastdecode.attention_worker

reads a line of JSON from the standard input (`key` in hexadecimal; `host`,
`port`, `patience_s`), writes the port as a line, and ends when the standard
input does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ringjax.errors import PeerError, RingjaxError
from ringjax.infer.layerwise import LayerPrograms, TokenRows
from ringjax.json_text import json_text
from ringjax.kv import kind_text
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.checkpoint import abstract
from ringjax.parallel.door import Door
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.parallel.links.connection import (
  Connection,
  HostileMessageError,
  checked_key,
  listening,
)
from ringjax.parallel.links.live_link import LiveLink

PATIENCE_S = 120.0
# Kinds of messages of a model.
_KINDS = ("open", "load", "attend")
_MOST_ROWS = 1 << 20
_MOST_TOKENS = 1 << 30
# Smallest padded size of a prompt's block, so that few sizes are compiled.
LOAD_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows:
  """Model and cache settings of the rows that a worker keeps.

  Attributes:
    config: The model's config.json, as text.
    dtype: Dtype of the model.
    cache_dtype: Dtype of keys and values.
    kind: Kind of the caches.
    capacity: Maximum number of tokens in a row.
    rows: Number of rows of each mini-batch that this worker has.
  """

  config: str
  dtype: str
  cache_dtype: str
  kind: CacheConfig
  capacity: int
  rows: tuple[int, ...]


class AttentionHost:
  """Caches of a worker's rows, one for each layer and mini-batch."""

  def __init__(
    self,
    held: HostRows,
    small: list[tuple[np.ndarray | None, ...]],
    before: AttentionHost | None = None,
  ):
    """Makes empty caches.

    Args:
      held: Model and cache settings of the rows.
      small: Weights that attention itself needs, by layer, as
        `LayerPrograms.mixing_weights` returns them.
      before: Earlier host whose programs are reused if it has the same model.

    Raises:
      RingjaxError: If layers of the config keep more than keys and values.
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
    for layer, layer_small in zip(self.layers, small, strict=True):
      shapes = tuple(
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves[layer.kind]
      )
      expected = [None if len(x.shape) > 1 else x.shape for x in shapes]
      if expected != [None if x is None else x.shape for x in layer_small]:
        raise HostileMessageError("small weights of another model")
      self._weights.append((shapes, layer_small))
    self.caches = [
      [self._empty(layer, n) for layer in self.layers] for n in held.rows
    ]
    self._none = [self._empty(layer, 1) for layer in self.layers]

  @property
  def of(self) -> tuple[Any, ...]:
    """Settings that determine the programs, to compare two hosts."""
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
    """Replaces a row of a layer's cache by the keys and values of a prompt.

    Args:
      half: Number of the mini-batch.
      row: Index among the worker's rows of the mini-batch.
      layer: Number of the layer.
      first: Position of the first key.
      end: Position after the last key; later keys are padding.
      k: Keys as the caches store them.
      v: Values as the caches store them.
    """
    empty = self._none[layer]
    assert empty is not None
    ints = (np.int32(0), np.int32(first), np.int32(end))
    row_cache = self.programs.load(
      0, jax.tree.map(jnp.copy, empty), *ints, k, v
    )
    cache: Any = self.caches[half][layer]
    self.caches[half][layer] = cache.insert(np.array([row]), row_cache)

  def attend(
    self,
    half: int,
    layer: int,
    q: Shaped[np.ndarray, "B 1 N H"],
    k: Shaped[np.ndarray, "B K 1 H"],
    v: Shaped[np.ndarray, "B K 1 J"],
    pos: Int[np.ndarray, " B"],
  ) -> Shaped[Array, "B 1 N J"]:
    """Appends a token to each row and attends; returns the attention outputs.

    `pos` are the tokens' positions; rows with -1 have no token.
    """
    shapes, small = self._weights[layer]
    mixed, self.caches[half][layer] = self.programs.mix(
      self.layers[layer].spec, 0, shapes, small, (q, k, v),
      TokenRows(pos, np.int32(1)), self.caches[half][layer], np.int32(0),
    )  # fmt: skip
    return mixed


class AttentionServer:
  """Accepts connections of models, one after another, and serves them.

  Attributes:
    address: Host and port that it listens on.
  """

  def __init__(
    self,
    key: bytes,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    patience_s: int | float = PATIENCE_S,
  ):
    """Listens on a port.

    Args:
      key: Shared secret that models must have, too, at least 16 bytes.
      host: Address of the interface to listen on.
      port: Port to listen on; 0 takes a free one.
      patience_s: Seconds without a byte after which a model counts as lost.
    """
    self._key, self._patience_s = checked_key(key), patience_s
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._link: LiveLink | None = None
    self._closed = False
    self._door = Door(
      self._server,
      lambda link, address: Connection.admit(
        link, address, self._key, self._patience_s
      ),
      name="ringjax attention worker",
    )

  def serve(self) -> None:
    """Serves models until `close`."""
    while not self._closed:
      wire = self._door.accept()
      if wire is None:
        return
      self._link = link = LiveLink(wire, kinds=_KINDS).start()
      try:
        with contextlib.suppress(PeerError):
          # The model gets the reason, if it still listens.
          _Conversation(link).run()
      finally:
        # A link that is not served must not look alive.
        link.fail("the worker has ended")
        link.join(1.0)

  def close(self) -> None:
    """Ends the connection and listens no more."""
    self._closed = True
    self._door.close()
    self._server.close()
    if self._link is not None:
      self._link.close("the worker was closed")


class _Conversation:
  """Serves the messages of one model, in order."""

  def __init__(self, link: LiveLink):
    self._link = link
    self._host: AttentionHost | None = None

  def run(self) -> None:
    """Answers messages until the model disconnects.

    Raises:
      PeerError: When it has, or after a message that can't be answered.
    """
    while True:
      message = self._link.take()
      try:
        self._answer(message)
      except RingjaxError as error:
        self._fail(str(error))
      except Exception as error:
        # Any config, shape and dtype may come: the next model is served.
        self._fail(f"{type(error).__name__}: {error}")

  def _fail(self, why: str) -> NoReturn:
    self._link.fail(why)
    raise PeerError(why)

  def _answer(self, message: ArrayMessage) -> None:
    if message.kind == "open":
      self._host = _opened(message, self._host)
      self._link.send("opened")
      return
    host = self._host
    if host is None or message.kind not in ("load", "attend"):
      raise HostileMessageError(f"{message.kind} out of turn")
    half = message.integer("half", len(host.held.rows))
    layer = message.integer("layer", len(host.layers))
    if message.kind == "attend":
      q, k, v, pos = message.arrays
      mixed = host.attend(half, layer, q, k, v, pos)
      self._link.send("attended", [np.asarray(mixed)])
      return
    row = message.integer("row", host.held.rows[half])
    limit = host.held.capacity + 1
    first, end = message.integer("first", limit), message.integer("end", limit)
    k, v = message.arrays
    host.load(half, row, layer, first, end, k, v)


def _opened(
  message: ArrayMessage, before: AttentionHost | None
) -> AttentionHost:
  """Makes the host that an "open" message asks for, from the earlier one."""
  fields = message.fields
  rows, config = fields.get("rows"), fields.get("config")
  dtypes = [fields.get(name) for name in ("dtype", "cache_dtype")]
  texts: list[Any] = [config, *dtypes, fields.get("cache_kind")]
  if not isinstance(rows, list) or not 1 <= len(rows) <= 2:
    raise HostileMessageError("no rows")
  if not all(type(n) is int and 0 <= n < _MOST_ROWS for n in rows):
    raise HostileMessageError("rows out of range")
  if not all(isinstance(x, str) for x in texts):
    raise HostileMessageError("no config")
  rows_held = HostRows(
    config=texts[0],
    dtype=texts[1],
    cache_dtype=texts[2],
    kind=kind_text.parse(texts[3], "cache_kind"),
    capacity=message.integer("capacity", _MOST_TOKENS),
    rows=tuple(rows),
  )
  small, arrays = [], iter(message.arrays)
  layers = fields.get("small")
  if not isinstance(layers, list):
    raise HostileMessageError("no small weights")
  for layer in layers:
    if not isinstance(layer, list):
      raise HostileMessageError("small weights of no layer")
    small.append(tuple(next(arrays, None) if present else None
                       for present in layer))  # fmt: skip
  return AttentionHost(rows_held, small, before)


def main() -> None:
  """Runs the worker process; options come from the standard input."""
  options = json.loads(sys.stdin.readline())
  server = AttentionServer(
    bytes.fromhex(options["key"]),
    host=options.get("host", "127.0.0.1"),
    port=options.get("port", 0),
    patience_s=options.get("patience_s", PATIENCE_S),
  )
  threading.Thread(target=server.serve, daemon=True).start()
  print(json_text(server.address), flush=True)
  sys.stdin.read()


if __name__ == "__main__":
  main()
