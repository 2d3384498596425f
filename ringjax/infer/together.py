"""Baselines of KV-Runahead: all ranks go through each layer together.

Law:   the logits of the model, whichever way the keys go.
Cost:  the ranks meet in every layer. `tsp` and `flash_tsp` gather all keys and
       values on each; a ring passes them round, each part p - 1 times.
Ref:   "TSP" is what Cho et al. 2024 (arXiv 2405.05329) compare with: tensor and
       sequence parallel, an even split, an all-gather of keys and values in
       each layer, all products, then the mask. `flash_tsp` is the same without
       the tiles that the mask forbids.

One program a layer kind, over a mesh of all devices, called layer by layer as
the chain is, so that one clock measures both. The cache stays where it was
made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import MeshError, OptionError, PeerError
from ringjax.infer import agree, inputs, kvr, spans
from ringjax.infer.layerwise import Pieces
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.schedule import tile_counts
from ringjax.parallel import peers as peers_
from ringjax.parallel.layout import Contiguous, Striped
from ringjax.parallel.peers import Peers
from ringjax.plan import cost

# name: (layout, strategy)
_WAYS: dict[str, tuple[Any, Any]] = {
  "tsp": (Contiguous(), Gather(Dense())),
  "flash_tsp": (Contiguous(), Gather()),
  "ring": (Contiguous(), Ring()),
  "striped": (Striped(), Ring()),
}
METHODS = tuple(_WAYS)


class Together:
  """A method that reads a prompt on all devices of a mesh at once."""

  def __init__(
    self,
    model: Transformer,
    peers: Peers,
    method: str,
    *,
    mesh: Any,
    axis: str = "seq",
  ):
    """Prepares; nothing is computed yet.

    Args:
      model: on the mesh.
      peers: the group of the mesh's processes.
      method: one of `METHODS`.
      mesh: all devices of all processes.
      axis: the axis that shards the sequence, the only one of the mesh.

    Raises:
      OptionError: an unknown method.
      MeshError: a mesh with more axes.
      ConfigError: a model with layers that keep more than keys and values.
    """
    if method not in _WAYS:
      raise OptionError(
        "method", repr(method), f"one of {', '.join(METHODS)}", "choose one"
      )
    if mesh.shape[axis] != mesh.devices.size:
      raise MeshError(
        "mesh",
        f"{dict(mesh.shape)}",
        f"all devices along {axis!r}",
        f"write --mesh={axis}:-1",
      )
    layout, strategy = _WAYS[method]
    self.model, self.peers, self.method = model, peers, method
    self.mesh, self.axis, self.size = mesh, axis, mesh.shape[axis]
    self.attend = ContextParallel(
      mesh=mesh, axis=axis, layout=layout, strategy=strategy
    )
    self.pieces = Pieces(model, self.attend)
    self._warm: set[int] = set()

  def read(
    self,
    tokens: Any,
    *,
    new_tokens: int = 1,
    pause: Callable[[int], Any] | None = None,
  ) -> kvr.Reading:
    """Reads a prompt; all processes call it, with the same arguments.

    Args:
      tokens: int32 [C] or [1, C].
      new_tokens: of the context, behind the prompt.
      pause: see `Runahead.read`.

    Raises:
      PromptError: a prompt that is none, or too short for the mesh.
      PeerError: processes do not agree, or one of them failed.
    """
    peers = self.peers
    peers.check()

    def card() -> dict[str, Any]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      cost.even(ids.size, self.size)
      return {
        "method": self.method,
        "tokens": f"{ids.size} of digest {agree.digest(ids.tobytes())}",
        "model config": agree.digest(repr(self.model.config).encode()),
        "model weights": agree.fingerprint(self.model),
        "model dtype": jnp.dtype(self.model.dtype).name,
        "new_tokens": new_tokens,
      }

    agree.agree(peers, card)
    ids = inputs.prompt(tokens, self.model.config.vocab)
    lengths = cost.even(ids.size, self.size)
    work = lambda: self._read(ids, lengths, new_tokens, pause)
    return apart(peers, work)

  def _read(
    self, ids: np.ndarray, lengths: tuple[int, ...], new: int, pause: Any
  ) -> kvr.Reading:
    peers = self.peers
    width = -(-ids.size // (2 * self.size)) * 2 * self.size
    if width not in self._warm:
      # Nobody is blamed for the time that compiling takes.
      self._warm.add(width)
      self._layers(ids, width, new, None, None)
    events = spans.Events(peers)
    peers.gather("ready")
    start_s = events.now()
    peers.tick(0)
    with peers.doing(peers_.TOGETHER):
      logits = self._layers(ids, width, new, events, pause)
    mine = {"start": start_s, "end": events.now(), "spans": events.spans}
    parts = peers.gather(mine)
    work, tiles = self._work(ids.size, lengths)
    row = kvr.row_bytes(self.pieces, self.model.dtype)
    each = (self.size - 1) * width // self.size * row
    links = [f"{i}-{(i + 1) % self.size}" for i in range(self.size)]
    return kvr.Reading(
      outcome=spans.outcome(
        self.method,
        lengths,
        parts,
        work=work,
        end=len(parts) - 1,
        sent=dict.fromkeys(links, float(each)) if self.size > 1 else {},
      ),
      tiles=tiles,
      length=ids.size + new,
      logits=logits,
    )

  def _layers(
    self, ids: np.ndarray, width: int, new: int, events: Any, pause: Any
  ) -> jax.Array:
    """float32 [1, V], in every process."""
    pieces, peers = self.pieces, self.peers
    order = np.asarray(self.attend.layout.order(width, self.size))
    real = order < ids.size
    sharding = NamedSharding(self.mesh, P(None, self.axis))
    put = lambda x: jax.make_array_from_callback(
      (1, width), sharding, lambda index: x[None][index]
    )
    filled = np.zeros(width, np.int32)
    filled[: ids.size] = ids
    x = pieces.embed(put(filled[order]))
    at = (
      put(order.astype(np.int32)),
      None if real.all() else put(real.astype(np.int32)),
    )
    kept = []
    for place in pieces.places:
      if pause is not None:
        pause(place.number)
      if events is not None:
        peers.check()
        peers.tick(place.number + 1)
      start_s = events.now() if events is not None else 0.0
      weights = pieces.weights(place)
      x, fresh = pieces.whole(place, weights, x, at, ids.size + new)
      kept.append((fresh.k, fresh.v))
      jax.block_until_ready(x)
      if events is not None:
        events.add("attend", place.number, start_s)
    row = int(np.flatnonzero(order == ids.size - 1)[0])
    logits = jax.block_until_ready(pieces.head(x, row))
    return logits.addressable_data(0)

  def _work(
    self, tokens: int, lengths: tuple[int, ...]
  ) -> tuple[list[float], tuple[int, ...]]:
    """Pairs of each rank in a layer, and its tiles in all layers."""
    places = self.pieces.places
    prompt = cost.Prompt(tokens=tokens)
    if self.method == "tsp":
      pairs = [float(c * tokens) for c in lengths]
      return pairs, (len(places),) * self.size
    if self.method == "striped":
      pairs = [tokens * tokens / 2 / self.size] * self.size
    else:
      pairs = [float(n) for n in cost.pairs(prompt, lengths, "causal")]
    tiles = np.zeros(self.size, np.int64)
    for place in places:
      mask = place.layer.attention.mask
      counts = tile_counts(self.attend.layout, mask, self.size, tokens)
      tiles += counts.sum(0)
    return pairs, tuple(int(n) for n in tiles)


def apart(peers: Peers, work: Callable[[], Any]) -> Any:
  """What `work` gives; it runs in a thread, which is left if somebody fails.

  A process that waits in a collective cannot be woken: after a PeerError end
  it by `os._exit`.

  Raises:
    PeerError: somebody failed.
  """
  outcome: list[tuple[Any, BaseException | None]] = []

  def target() -> None:
    try:
      outcome.append((work(), None))
    except BaseException as error:
      outcome.append((None, error))
    peers.wake()

  threading.Thread(target=target, daemon=True).start()
  peers.rest(lambda: bool(outcome))
  value, error = outcome[0]
  if error is None:
    return value
  if isinstance(error, PeerError):
    raise error
  # A collective fails when its peer does: the watch knows which.
  end = time.monotonic() + 1.0
  while peers.failure is None and time.monotonic() < end:
    time.sleep(0.05)
  if peers.failure is not None:
    raise peers.failure from None
  peers.abandon(error)
  raise error
