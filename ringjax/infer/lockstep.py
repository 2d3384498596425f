"""Baselines of KV-Runahead: all ranks go through each layer in lockstep.

Guarantees: the logits of the model, whichever way the keys go.
Cost: the ranks meet in every layer. `tsp` and `flash_tsp` gather all keys and
values on each; a ring passes them round, each part p - 1 times.
Ref: "TSP" is what Cho et al. 2024 (arXiv 2405.05329) compare with: tensor and
sequence parallel, an even split, an all-gather of keys and values in each
layer, all products, then the mask. `flash_tsp` is the same without the tiles
that the mask forbids.

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
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ringjax.checks import one_of
from ringjax.data.special_tokens import TokenIds
from ringjax.errors import MeshError, PeerError
from ringjax.infer import agree, inputs, kvr, spans
from ringjax.infer.layerwise import LayerPrograms
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
_STRATEGIES: dict[str, tuple[Any, Any]] = {
  "tsp": (Contiguous(), Gather(Dense())),
  "flash_tsp": (Contiguous(), Gather()),
  "ring": (Contiguous(), Ring()),
  "striped": (Striped(), Ring()),
}
METHODS = tuple(_STRATEGIES)


class LockstepPrefill:
  """Reads a prompt on all devices of a mesh, which meet in every layer."""

  def __init__(
    self,
    model: Transformer,
    peers: Peers,
    method: str,
    *,
    mesh: Mesh,
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
    self.method = one_of("method", method, METHODS)
    if mesh.shape[axis] != mesh.devices.size:
      raise MeshError(
        "mesh",
        f"{dict(mesh.shape)}",
        f"all devices along {axis!r}",
        f"pass rj.make_mesh((-1,), ({axis!r},))",
      )
    layout, strategy = _STRATEGIES[method]
    self.model, self.peers = model, peers
    self.mesh, self.axis, self.size = mesh, axis, mesh.shape[axis]
    self.attend = ContextParallel(
      mesh=mesh, axis=axis, layout=layout, strategy=strategy
    )
    self.programs = LayerPrograms(model, self.attend)
    self._compiled: set[int] = set()

  def read(
    self,
    tokens: TokenIds | Int[Array | np.ndarray, "1 C"],
    *,
    new_tokens: int = 1,
    pause: Callable[[int], Any] = kvr.nothing,
  ) -> kvr.Reading:
    """Reads a prompt; all processes call it, with the same arguments.

    Args:
      tokens: int32 [C] or [1, C].
      new_tokens: of the context, behind the prompt.
      pause: see `Runahead.read`.

    Raises:
      PromptError: an empty prompt, or unknown ids.
      OptionError: fewer tokens than devices.
      PeerError: processes do not agree, or one of them failed.
    """

    def check() -> tuple[dict[str, Any], tuple[np.ndarray, tuple[int, ...]]]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      lengths = cost.even(ids.size, self.size)
      card = {"method": self.method, "new_tokens": new_tokens}
      return card | agree.reading(self.model, ids), (ids, lengths)

    ids, lengths = agree.agree(self.peers, check)
    work = lambda: self._read(ids, lengths, pause)
    return interruptible(self.peers, work)

  def _read(
    self, ids: np.ndarray, lengths: tuple[int, ...], pause: Any
  ) -> kvr.Reading:
    peers = self.peers
    width = -(-ids.size // (2 * self.size)) * 2 * self.size
    if width not in self._compiled:
      # Before the others wait: no rank is given up for the time this takes.
      self._compiled.add(width)
      self._layers(ids, width, None, kvr.nothing)
    recorder = spans.SpanRecorder(peers)
    peers.gather("ready")
    start_s = recorder.now()
    peers.tick(0)
    with peers.doing(peers_.TOGETHER):
      logits = self._layers(ids, width, recorder, pause)
    mine = {"start": start_s, "end": recorder.now(), "spans": recorder.spans}
    parts = peers.gather(mine)
    work, tiles = self._work(ids.size, lengths)
    row = kvr.row_bytes(self.programs.layers, self.model.dtype)
    each = float((self.size - 1) * width // self.size * row)
    links = [f"{i}-{(i + 1) % self.size}" for i in range(self.size)]
    return kvr.Reading(
      outcome=spans.measured(
        self.method,
        lengths,
        parts,
        work=work,
        end=len(parts) - 1,
        sent=dict.fromkeys(links, each) if self.size > 1 else {},
      ),
      tiles=tiles,
      length=ids.size,
      logits=logits,
    )

  def _layers(
    self,
    ids: np.ndarray,
    width: int,
    recorder: spans.SpanRecorder | None,
    pause: Callable[[int], Any],
  ) -> jax.Array:
    """float32 [1, V], in every process; without a recorder it only compiles."""
    programs, peers = self.programs, self.peers
    order = np.asarray(self.attend.layout.order(width, self.size))
    real = order < ids.size
    sharding = NamedSharding(self.mesh, P(None, self.axis))
    put = lambda x: jax.make_array_from_callback(
      (1, width), sharding, lambda index: x[None][index]
    )
    filled = np.zeros(width, np.int32)
    filled[: ids.size] = ids
    x = programs.embed(programs.outer, put(filled[order]))
    pos = put(order.astype(np.int32))
    seg = None if real.all() else put(real.astype(np.int32))
    kept = []
    for layer in programs.layers:
      pause(layer.number)
      if recorder is not None:
        peers.check()
        peers.tick(layer.number + 1)
      start_s = 0.0 if recorder is None else recorder.now()
      weights = programs.weights(layer)
      x, fresh = programs.whole(layer.spec, weights, x, pos, seg, ids.size)
      kept.append((fresh.k, fresh.v))
      jax.block_until_ready(x)
      if recorder is not None:
        recorder.add("attend", layer.number, start_s)
    row = int(np.flatnonzero(order == ids.size - 1)[0])
    logits = jax.block_until_ready(programs.head(programs.outer, x, row))
    return logits.addressable_data(0)

  def _work(
    self, tokens: int, lengths: tuple[int, ...]
  ) -> tuple[list[float], tuple[int, ...]]:
    """Pairs of each rank in a layer, and its tiles in all layers."""
    layers, size = self.programs.layers, self.size
    if self.method == "tsp":
      return [float(c * tokens) for c in lengths], (len(layers),) * size
    pairs = [tokens * tokens / 2 / size] * size
    if self.method != "striped":
      pairs = cost.pairs(cost.Prompt(tokens=tokens), lengths, "causal").tolist()
    mixers: list[Any] = [layer.spec.attention for layer in layers]
    tiles = sum(
      tile_counts(self.attend.layout, mixer.mask, size, tokens).sum(0)
      for mixer in mixers
    )
    return pairs, tuple(np.asarray(tiles).tolist())


def interruptible(peers: Peers, work: Callable[[], Any]) -> Any:
  """The result of `work`, run in a thread that is left if a peer fails.

  A process that waits in a collective cannot be woken: after a PeerError end
  it by `os._exit`.

  Raises:
    PeerError: a rank failed.
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
