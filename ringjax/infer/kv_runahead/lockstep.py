"""Baselines of KV-Runahead: all ranks go through each layer in lockstep.

Guarantees: the logits of the model, with every method.
Cost: the ranks synchronise in every layer. `tsp` and `flash_tsp` gather all
keys and values on each; a ring passes each shard p - 1 times.
Ref: "TSP" is the baseline of Cho et al. 2024 (arXiv 2405.05329): tensor and
sequence parallel, an even split, an all-gather of keys and values in each
layer, all products, then the mask. `flash_tsp` skips the tiles that the mask
forbids.

One program per kind of layer, over a mesh of all devices, is called layer by
layer as in the chain, so that both are measured alike. Keys and values stay on
the shards that computed them.
"""

from __future__ import annotations

import dataclasses
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
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import MeshError, PeerError
from ringjax.infer import inputs
from ringjax.infer.kv_runahead import kvr, measured_timelines, rank_agreement
from ringjax.infer.layerwise import LayerPrograms
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention.cost.schedule import tile_counts
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.strategies.registry import find
from ringjax.parallel import peers as peers_
from ringjax.parallel.peers import Peers
from ringjax.plan import cost

# Names in the table of strategies; "tsp" computes all scores at once.
_NAMES = {
  "tsp": "gather",
  "flash_tsp": "gather",
  "ring": "ring",
  "striped": "striped",
}
METHODS = tuple(_NAMES)


class LockstepPrefill:
  """Reads a prompt on all devices of a mesh, in lockstep layer by layer."""

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
      model: Model with weights on the mesh.
      peers: Group of the mesh's processes.
      method: Distribution of keys, one of `METHODS`.
      mesh: Mesh of all devices of all processes.
      axis: Axis that shards the sequence, the only one of the mesh.

    Raises:
      OptionError: If the method is unknown.
      MeshError: If the mesh has more axes.
      ConfigError: If a layer keeps more than keys and values.
    """
    self.method = one_of("method", method, METHODS)
    if mesh.shape[axis] != mesh.devices.size:
      raise MeshError(
        "mesh",
        f"{dict(mesh.shape)}",
        f"all devices along {axis!r}",
        f"pass rj.make_mesh((-1,), ({axis!r},))",
      )
    entry = find(_NAMES[method])
    assert entry is not None
    strategy = entry.strategy
    if method == "tsp":
      strategy = dataclasses.replace(strategy, local=Dense())
    self.model, self.peers = model, peers
    self.mesh, self.axis, self.size = mesh, axis, mesh.shape[axis]
    self.attend = ContextParallel(
      mesh=mesh, axis=axis, layout=entry.layout, strategy=strategy
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
      tokens: Token ids, int32 [C] or [1, C].
      new_tokens: Number of tokens that the context has after the prompt.
      pause: Called at the beginning of every layer, see `Runahead.read`.

    Raises:
      PromptError: If the prompt is empty or has unknown ids.
      OptionError: If there are fewer tokens than devices.
      PeerError: If the processes' arguments differ, or one of them failed.
    """

    def check() -> tuple[dict[str, Any], tuple[np.ndarray, tuple[int, ...]]]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      lengths = cost.even(ids.size, self.size)
      settings = {"method": self.method, "new_tokens": new_tokens}
      return settings | rank_agreement.reading(self.model, ids), (ids, lengths)

    ids, lengths = rank_agreement.agree(self.peers, check)
    work = lambda: self._read(ids, lengths, pause)
    return interruptible(self.peers, work)

  def _read(
    self, ids: np.ndarray, lengths: tuple[int, ...], pause: Any
  ) -> kvr.Reading:
    peers = self.peers
    width = -(-ids.size // (2 * self.size)) * 2 * self.size
    if width not in self._compiled:
      # Compile before other ranks wait: they count no rank as stalled here.
      self._compiled.add(width)
      self._layers(ids, width, None, kvr.nothing)
    recorder = measured_timelines.SpanRecorder(peers)
    peers.gather("ready")
    start_s = recorder.now()
    peers.tick(0)
    with peers.doing(peers_.TOGETHER):
      logits = self._layers(ids, width, recorder, pause)
    measurement = {
      "start": start_s,
      "end": recorder.now(),
      "spans": recorder.spans,
    }
    parts = peers.gather(measurement)
    work, tiles = self._work(ids.size, lengths)
    row = kvr.row_bytes(self.programs.layers, self.model.dtype)
    link_bytes = float((self.size - 1) * width // self.size * row)
    links = [f"{i}-{(i + 1) % self.size}" for i in range(self.size)]
    return kvr.Reading(
      outcome=measured_timelines.measured(
        self.method,
        lengths,
        parts,
        work=work,
        end=len(parts) - 1,
        sent=dict.fromkeys(links, link_bytes) if self.size > 1 else {},
      ),
      tiles=tiles,
      length=ids.size,
      logits=logits,
    )

  def _layers(
    self,
    ids: np.ndarray,
    width: int,
    recorder: measured_timelines.SpanRecorder | None,
    pause: Callable[[int], Any],
  ) -> jax.Array:
    """Run all layers: logits float32 [1, V], on every process.

    A call without a recorder is for compilation.
    """
    programs, peers = self.programs, self.peers
    order = np.asarray(self.attend.layout.order(width, self.size))
    real = order < ids.size
    sharding = NamedSharding(self.mesh, P(None, self.axis))
    put = lambda x: jax.make_array_from_callback(
      (1, width), sharding, lambda index: x[None][index]
    )
    filled = np.zeros(width, np.int32)
    filled[: ids.size] = ids
    x = programs.embed(put(filled[order]))
    pos = put(order.astype(np.int32))
    seg = None if real.all() else put(real.astype(np.int32))
    keys_values = []
    start_s = 0.0

    def begin_layer(number: int) -> None:
      nonlocal start_s
      pause(number)
      if recorder is not None:
        peers.check()
        peers.tick(number + 1)
        start_s = recorder.now()

    for layer, weights in programs.walk(before=begin_layer):
      x, fresh = programs.full_layer(layer.spec, weights, x, pos, seg, ids.size)
      keys_values.append((fresh.k, fresh.v))
      jax.block_until_ready(x)
      if recorder is not None:
        recorder.add("attend", layer.number, start_s)
    row = int(np.flatnonzero(order == ids.size - 1)[0])
    logits = jax.block_until_ready(programs.head(x, row))
    return logits.addressable_data(0)

  def _work(
    self, tokens: int, lengths: tuple[int, ...]
  ) -> tuple[list[float], tuple[int, ...]]:
    """Count each rank's pairs in a layer, and its tiles in all layers."""
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
  """Run `work` in a thread that is abandoned if a peer fails.

  A thread that waits in a collective cannot be woken: after a PeerError end
  the process by `os._exit`.

  Raises:
    PeerError: If a rank failed.
  """
  outcome: list[tuple[Any, BaseException | None]] = []

  def target() -> None:
    try:
      outcome.append((work(), None))
    except BaseException as error:
      outcome.append((None, error))
    peers.wake()

  threading.Thread(target=target, daemon=True).start()
  peers.wait_idle(lambda: bool(outcome))
  value, error = outcome[0]
  if error is None:
    return value
  if isinstance(error, PeerError):
    raise error
  # A collective fails when a peer does: the watch of the peers knows which.
  end = time.monotonic() + 1.0
  while peers.failure is None and time.monotonic() < end:
    time.sleep(0.05)
  if peers.failure is not None:
    raise peers.failure from None
  peers.abandon(error)
  raise error
