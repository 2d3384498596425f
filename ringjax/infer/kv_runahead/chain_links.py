"""Both ends of a link of a chain: a thread each sends and receives blocks.

Guarantees: layers pass in order, each with exactly the rows that a later query
may see; at most `credits` of them wait at either end. A rank that waits is
woken when its neighbour fails.

These connections have no heartbeats: the links of `Peers` notice failures.

The sender sends a layer for each grant of the receiver: a header of layer,
first row and end, then the rows of every head, keys before values.
"""

from __future__ import annotations

import collections
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from ringjax.errors import PeerError
from ringjax.infer.kv_runahead.measured_timelines import SpanRecorder
from ringjax.infer.layerwise import StackedLayer
from ringjax.kv.codecs import Codec
from ringjax.parallel import frames
from ringjax.parallel.peers import Peers

_HEADER = struct.Struct("<III")


class LayerBlock(NamedTuple):
  """Keys and values of consecutive tokens of a layer, as a cache stores them.

  Fields:
    first: Position of the first row.
    end: Position after the last real row.
    k: Keys [1, K, n, H], or codes [1, K, n, X]; n >= end - first.
    v: Values or codes, [1, K, n, J or X].
  """

  first: int
  end: int
  k: Shaped[Array | np.ndarray, "1 K n _"]
  v: Shaped[Array | np.ndarray, "1 K n _"]

  @classmethod
  def zeros(
    cls,
    layer: StackedLayer,
    end: int,
    size: int,
    dtype: DTypeLike,
    codec: Codec | None = None,
  ) -> LayerBlock:
    """Allocate a block of the tokens before `end`, in `size` rows of zeros."""
    spec: Any = layer.spec.attention
    lead, dim = (1, spec.kv_heads, size), spec.head_dim
    if codec is None:
      zeros = lambda: np.zeros((*lead, dim), dtype)
      return cls(0, end, zeros(), zeros())
    widths = codec.keys.width(dim), codec.values.width(dim)
    return cls(0, end, *(np.zeros((*lead, n), np.uint8) for n in widths))


def rows(
  blocks: Sequence[LayerBlock], first: int
) -> list[Shaped[np.ndarray, "_ _"]]:
  """Views of the rows from position `first` on, in the order of sending."""
  pairs = [
    (block, (np.asarray(block.k), np.asarray(block.v))) for block in blocks
  ]
  heads = blocks[0].k.shape[1]
  return [
    pair[part][0, head, max(0, first - block.first) : block.end - block.first]
    for part in range(2)
    for head in range(heads)
    for block, pair in pairs
    if block.end > first
  ]


class LinkEnd:
  """A thread at one end of a link.

  Attributes:
    peers: Group of processes.
    neighbour: Rank at the other end.
    layers: Layers of the model.
    credits: Maximum number of layers that wait at this end.
    recorder: Timeline of this rank.
    end: Position after the last token whose keys pass.
    ready: Layers that have come, or that are to be sent.
  """

  step = 0  # From this rank to the neighbour.

  def __init__(
    self,
    peers: Peers,
    layers: Sequence[StackedLayer],
    credits: int,
    recorder: SpanRecorder,
    end: int,
  ):
    self.peers, self.neighbour = peers, peers.rank + self.step
    self.layers, self.credits = layers, credits
    self.recorder, self.end = recorder, end
    self.ready: collections.deque[Any] = collections.deque()
    threading.Thread(target=self._guarded, daemon=True).start()

  def work(self) -> None:
    """Runs in the thread, until all layers have passed."""
    raise NotImplementedError

  def _guarded(self) -> None:
    try:
      self.work()
    except PeerError as error:
      self.peers.report_failure(self.neighbour, f"{error}", 0.0)
    except OSError as error:
      # The watch of the peers may know a better reason, which takes precedence.
      self.peers.report_failure(self.neighbour, f"closed its link: {error}")
    except BaseException as error:
      self.peers.abandon(error)


class Receiver(LinkEnd):
  """Receives the keys and values of all tokens before, layer by layer."""

  step = -1

  def __init__(
    self, *link: Any, size: int, dtype: DTypeLike, codec: Codec | None = None
  ):
    """Starts the thread; blocks have `size` rows of `dtype`, or of codes."""
    self.size, self.dtype, self.codec = size, dtype, codec
    self.granted = 0
    super().__init__(*link)
    for _ in range(min(self.credits, len(self.layers))):
      self._grant()

  def take(self, layer: StackedLayer) -> LayerBlock:
    """Waits for a layer's block, and lets the sender send one more."""
    start_s = self.recorder.now()
    self.peers.wait(lambda: bool(self.ready))
    self.recorder.add("wait", layer.number, start_s)
    block = self.ready.popleft()
    if self.granted < len(self.layers):
      self._grant()
    return block

  def _grant(self) -> None:
    """Lets the sender send one more layer."""
    self.granted += 1
    try:
      self.peers.link(self.neighbour).sendall(b"+")
    except OSError as error:
      reason = f"closed its link: {error}"
      raise self.peers.report_failure(self.neighbour, reason) from None

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    for layer in self.layers:
      number, first, end = frames.receive_header(link, _HEADER)
      start_s = self.recorder.now()
      wanted = (layer.number, layer.first_needed(self.end), self.end)
      if (number, first, end) != wanted:
        raise PeerError(
          f"rank {self.neighbour} sent rows {first} to {end} of layer "
          f"{number}; wanted {wanted[1]} to {wanted[2]} of layer {wanted[0]}",
          self.neighbour,
        )
      block = LayerBlock.zeros(layer, end, self.size, self.dtype, self.codec)
      frames.receive(link, rows([block], first))
      self.recorder.add("receive", layer.number, start_s)
      self.ready.append(block)
      self.peers.wake()


class Sender(LinkEnd):
  """Sends keys and values on to the next rank."""

  step, sent = 1, 0

  def put(self, layer: StackedLayer, blocks: Sequence[LayerBlock]) -> None:
    """Queues a layer to send; waits while `credits` of them are queued.

    Args:
      layer: Next layer.
      blocks: Blocks of all tokens up to this rank's last, in their order.
    """
    start_s = self.recorder.now()
    free: Callable[[], bool] = lambda: layer.number - self.sent < self.credits
    if not free():
      self.peers.wait(free)
      self.recorder.add("full", layer.number, start_s)
    self.ready.append((layer, blocks))
    self.peers.wake()

  def finish(self) -> None:
    """Waits until all is sent."""
    self.peers.wait(lambda: self.sent == len(self.layers))

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    grant = np.zeros(1, np.uint8)
    for _ in self.layers:
      self.peers.wait_idle(lambda: bool(self.ready))
      layer, blocks = self.ready.popleft()
      first = layer.first_needed(self.end)
      parts = rows(blocks, first)
      del blocks
      frames.receive(link, [grant])
      start_s = self.recorder.now()
      header = _HEADER.pack(layer.number, first, self.end)
      frames.send(link, parts, header)
      nbytes = sum(part.nbytes for part in parts)
      self.recorder.add("send", layer.number, start_s, nbytes)
      # Free the layer's rows before the thread waits for the next layer.
      del parts
      self.sent += 1
      self.peers.wake()
