"""Chunked pipeline prefill: each process has some layers, and reads all chunks.

Guarantees: the last rank ends with the logits that one device would have, and
with `keep="last"` or `"blocks"` with all keys and values; a rank never waits
for a later one, except for `credits`. The other ranks name a rank that dies,
freezes or hangs.
Cost: each link carries the activations of all tokens, once: tokens x width,
whatever the number of layers. KV-Runahead, whose ranks split tokens, sends keys
and values in every layer. With `keep="last"` or `"blocks"` the last rank pulls
the keys and values of earlier ranks' layers while it computes: each once.
Memory: the weights of a rank's layers, if `load_layers` has loaded them, and
their keys and values of all tokens; on the last rank those of all layers, with
"blocks" in the host's memory. "last" needs the whole model on the last rank.

Rank x of p has an even part of the layers. Chunk by chunk:

  1  the activations of the chunk, from rank x - 1 (rank 0: embeddings)
  2  its layers, whose caches hold the chunks before
  3  the outputs to rank x + 1, by a thread; the last rank: logits

Keys and values of a layer are published as soon as they are computed, while
the next layers run; a ticket passed along the chain lets rank p - 1 pull them
(`rj.transfer`): blocks stream layer by layer.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, section 5.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from ringjax.checks import float_dtype, one_of, positive_int
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import OptionError, PeerError
from ringjax.infer import inputs, prefill
from ringjax.infer.kv_runahead import measured_timelines, rank_agreement
from ringjax.infer.kv_runahead.chain_links import LinkEnd
from ringjax.infer.kv_runahead.kvr import (
  CREDITS,
  PromptTile,
  Reading,
  balanced,
  nothing,
)
from ringjax.infer.layerwise import (
  LayerPrograms,
  StackedLayer,
  TokenSpan,
  stacked_layers,
)
from ringjax.infer.session import Session
from ringjax.json_text import json_text
from ringjax.kv.cache import KVCache
from ringjax.models import checkpoint
from ringjax.models.fingerprint import fingerprint
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.partition.layer_range import (
  LayerRange,
  config_of,
  load_layers,
)
from ringjax.models.partition.tensor_shares import digest_of
from ringjax.models.transformer import Transformer
from ringjax.nn.linear import stream_dtype
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel import frames
from ringjax.parallel import peers as peers_
from ringjax.parallel.peers import Peers
from ringjax.plan import cost
from ringjax.plan.kv_runahead import balance
from ringjax.transfer import PageLayout, PageLeaf, Publisher, Ticket, pull

KEEPS = ("last", "stages", "blocks")
# Tokens of a tile, for which all programs are compiled.
_TILE = 512
# Header of a message: kind, first token, end, bytes of the contents.
_HEADER = struct.Struct("<BIIQ")
_ACTIVATIONS, _TICKET = 0, 1
_LARGEST_TICKET = 1 << 20
# Blocks are pulled at once; only a puller that died leaves one that long.
_LEASE_S = 3600.0


class ChunkPipeline:
  """One rank of a pipeline that reads prompts in chunks.

  Attributes:
    stages: Number of layers of each rank.
  """

  def __init__(
    self,
    model: Transformer | LayerRange,
    peers: Peers,
    *,
    stages: Sequence[int] | None = None,
    credits: int = CREDITS,
    tile: int | None = None,
    dtype: DTypeLike | None = None,
    digest: str | None = None,
  ):
    """Checks the arguments; nothing is computed yet.

    Args:
      model: Layers of this rank (`rj.models.load_layers`), or the whole model,
        on one device of this process.
      peers: Process group; each rank is a stage.
      stages: Number of layers of each rank; default: an even split.
      credits: Maximum number of chunks that wait to be sent.
      tile: Number of tokens in a tile; default: 512, or less for a short
        prompt.
      dtype: Dtype of the cache; default: the model's.
      digest: Text that is equal on ranks with weights of one model; default:
        that of the folder of a rank's layers, or of a whole model's weights.

    Raises:
      ConfigError: If layers of the model keep more than keys and values.
      OptionError: If an argument is out of range, there are more ranks than
        layers, or the layers of `model` are not this rank's.
    """
    part = model if isinstance(model, LayerRange) else None
    own_model = model.model if isinstance(model, LayerRange) else model
    # Of layers alone: shapes.
    self.whole = model.whole if isinstance(model, LayerRange) else model
    self.model = None if part is not None else own_model
    self.config, self.peers = self.whole.config, peers
    self.credits = positive_int("credits", credits)
    self.tile = None if tile is None else positive_int("tile", tile)
    self.dtype = float_dtype(
      "dtype", self.whole.dtype if dtype is None else dtype
    )
    self.layers = stacked_layers(self.whole)
    count = len(self.layers)
    if stages is None:
      _check_ranks(peers.size, count)
    layer_counts = cost.even(count, peers.size) if stages is None else stages
    self.stages = tuple(positive_int("stages", n) for n in layer_counts)
    if sum(self.stages) != count or len(self.stages) != peers.size:
      raise OptionError(
        "stages",
        self.stages,
        f"{peers.size} numbers that add up to {count} layers",
        "leave stages out for an even split",
      )
    first = sum(self.stages[: peers.rank])
    end = first + self.stages[peers.rank]
    if part is not None and (part.first, part.end) != (first, end):
      raise OptionError(
        "model",
        f"layers {part.first} to {part.end - 1}",
        f"layers {first} to {end - 1}, which rank {peers.rank} has",
        "load these with rj.models.load_layers",
      )
    self.programs = LayerPrograms(own_model, CachedAttention())
    if part is None:
      self._layers = self.programs.layers[first:end]
    else:
      self._layers = tuple(
        dataclasses.replace(layer, number=first + layer.number)
        for layer in self.programs.layers
      )
    if digest is None and part is not None:
      digest = part.digest
    self._part, self._digest = part, digest
    self._compiled: set[Any] = set()
    (self.device,) = jax.tree.leaves(own_model)[0].devices()

  @classmethod
  def load(
    cls,
    path: str | os.PathLike[str],
    peers: Peers,
    *,
    decodes: bool = False,
    weights_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
  ) -> ChunkPipeline:
    """Loads the layers of this rank and makes its part of the pipeline.

    Args:
      path: Folder, file or name, as for `rj.models.load`.
      peers: Process group; each rank is a stage of an even split.
      decodes: Whether the last rank loads the whole model, to continue after
        `read(keep="last")`.
      weights_dtype: Dtype of the weights; default: see `load_layers`.
      strict: See `rj.models.load`.
      **options: Arguments of the class, except `stages`.

    Raises:
      RingjaxError: See `load_layers` and the class.
    """
    count = len(config_of(path, strict=strict).layers)
    _check_ranks(peers.size, count)
    counts = cost.even(count, peers.size)
    first = sum(counts[: peers.rank])
    load_options: dict[str, Any] = {"dtype": weights_dtype, "strict": strict}
    if decodes and peers.rank == peers.size - 1:
      model = checkpoint.load(path, **load_options)
      options["digest"] = digest_of(open_model(path))
    else:
      model = load_layers(
        path, first, first + counts[peers.rank], **load_options
      )
    return cls(model, peers, **options)

  @property
  def weight_bytes(self) -> int:
    """Bytes of the weights in this process."""
    model = self.model if self._part is None else self._part.model
    return sum(x.nbytes for x in jax.tree.leaves(model))

  def own_weights(self) -> dict[str, Shaped[Array, " ..."]]:
    """Weights of this rank by their paths in the whole model.

    Raises:
      OptionError: If this rank has the whole model.
    """
    if self._part is None:
      raise OptionError(
        "model",
        "a whole model",
        "the layers of this rank",
        "load these with rj.models.load_layers",
      )
    return self._part.weights()

  def chunks(self, tokens: int, count: int | None = None) -> tuple[int, ...]:
    """Chunks of a prompt that take each stage about the same time.

    Args:
      tokens: Number of tokens in the prompt.
      count: Number of chunks, at most; default: four for each rank.
    """
    tile_tokens = self.tile or prefill.tile(tokens, self.peers.size)
    count = 4 * self.peers.size if count is None else count
    count = balance.most_ranks(tokens, count, tile_tokens)
    return balanced(self.whole, tokens, count, tile_tokens)

  def read(
    self,
    tokens: TokenIds | Int[Array | np.ndarray, "1 C"],
    chunks: Sequence[int],
    *,
    new_tokens: int = 1,
    keep: str = "last",
    method: str = "cpp",
    pause: Callable[[int], Any] = nothing,
  ) -> Reading:
    """Reads a prompt; all ranks call it, with the same arguments.

    Args:
      tokens: Token ids of the prompt, int32 [C] or [1, C].
      chunks: Number of tokens in each chunk; see `rj.plan.equal_times`.
      new_tokens: Tokens after the prompt that the cache has room for.
      keep: "last" brings the whole cache to the last rank, whose reading
        `kvr.follow` continues; "blocks" brings it there as arrays of
        the host (`Reading.blocks`); "stages" drops it.
      method: Name of the method in the outcome.
      pause: Callback at the beginning of every chunk, with its number; lets
        tests delay a rank.

    Returns:
      The reading, whose `outcome` has the chunks as lengths, the pairs of each,
      and the bytes of activations by link; spans of chunks ("attend"), of
      messages ("send"), and on the last rank of pulled blocks ("pull").

    Raises:
      OptionError: If the chunks do not add up to the prompt, or `keep` is
        "last" and the last rank has a part of the layers only.
      PromptError: If the prompt is empty, too long, or has unknown ids.
      PeerError: If the ranks' arguments differ, or one of them failed.
    """

    def check() -> tuple[dict[str, Any], tuple[np.ndarray, tuple[int, ...]]]:
      ids = inputs.prompt(tokens, self.config.vocab)
      lengths = cost.check_lengths(chunks, ids.size)
      positive_int("new_tokens", new_tokens)
      one_of("keep", keep, KEEPS)
      rank, last = self.peers.rank, self.peers.size - 1
      if keep == "last" and rank == last and self.model is None:
        raise OptionError(
          "keep",
          "'last' with a part of the layers on the last rank",
          "the whole model there, which decodes with the cache",
          "load it there with rj.models.load, or pass keep='blocks'",
        )
      inputs.within_context(
        self.config,
        ids.size + new_tokens,
        f"{ids.size:,} tokens and new_tokens={new_tokens:,}",
      )
      card = {"method": method, "chunks": list(lengths)}
      card |= rank_agreement.prompt_of(self.config, ids) | {
        "model weights": self._model_digest(),
        "model dtype": jnp.dtype(self.whole.dtype).name,
        "cache dtype": self.dtype.name,
        "stages": list(self.stages),
        "tile": self.tile or 0,
        "credits": self.credits,
        "new_tokens": new_tokens,
        "keep": keep,
      }
      return card, (ids, lengths)

    ids, lengths = rank_agreement.agree(self.peers, check)
    with self.peers.abandoning(), jax.default_device(self.device):
      return self._read(ids, lengths, new_tokens, keep, method, pause)

  def _model_digest(self) -> str:
    """Text that is equal on ranks with weights of one model."""
    if self._digest is not None:
      return self._digest
    assert self.model is not None
    return fingerprint(self.model)

  def _read(
    self,
    ids: np.ndarray,
    lengths: tuple[int, ...],
    new_tokens: int,
    keep: str,
    method: str,
    pause: Callable[[int], Any],
  ) -> Reading:
    peers = self.peers
    rank, last = peers.rank, peers.size - 1
    size = self._size(ids.size)
    room = prefill.padded(ids.size + size, 1)
    if keep == "blocks":
      # Many prompts come: one program for an octave of lengths.
      room = 1 << (room - 1).bit_length()
    gathers = keep in ("last", "blocks")
    session = blocks = None
    if rank == last and keep == "last":
      assert self.model is not None
      session = Session(
        self.model, max(room, ids.size + new_tokens), dtype=self.dtype
      )
    stage = _Stage(self, ids, room)
    self._compile(stage, session, size, room)
    secret = bytes.fromhex(peers.gather(secrets.token_hex(16))[0])
    recorder = measured_timelines.SpanRecorder(peers)
    layers = self.layers
    earlier_layers = layers[: sum(self.stages[:rank])]
    link = peers, layers, self.credits, recorder, ids.size
    sender = receiver = publisher = puller = logits = None
    tell: Callable[[str], object] = nothing
    try:
      if rank < last:
        sender = _ActivationSender(*link)
        tell = sender.tell
        if gathers:
          host = peers.link(rank + 1).getsockname()[0]
          publisher = Publisher(secret, host=host, lease_s=_LEASE_S)
          stage.publish = _BlockPublisher(peers, publisher, tell)
      elif gathers:
        puller = _BlockPuller(
          peers, earlier_layers, room, self.dtype, secret, recorder
        )
        tell = puller.put
      if rank > 0:
        receiver = _ActivationReceiver(
          *link,
          lengths=lengths,
          tickets=len(earlier_layers) * len(lengths) * gathers,
          width=self.config.embed,
          dtype=stream_dtype(self.whole.dtype),
          told=tell,
        )
      start_s = recorder.now()
      with peers.doing(peers_.WORKING):
        logits = self._chunks(
          stage, lengths, size, recorder, receiver, sender, pause
        )
        end_s = recorder.now()
        if session is not None:
          self._gather(session, stage, puller, ids)
        elif rank == last and gathers:
          blocks = self._host_blocks(stage, puller, ids.size)
      # Publishers stay open until the last rank has pulled all blocks.
      parts = peers.gather(
        {"start": start_s, "end": end_s, "spans": recorder.spans}
      )
    finally:
      for worker in (stage.publish, puller, publisher):
        if worker is not None:
          worker.close()
    width = self.config.embed * stream_dtype(self.whole.dtype).itemsize
    sent = float(ids.size * width)
    return Reading(
      outcome=measured_timelines.measured(
        method,
        lengths,
        parts,
        work=cost.pairs(cost.Prompt(tokens=ids.size), lengths, "causal"),
        end=last,
        sent={f"{x}-{x + 1}": sent for x in range(last)},
      ),
      tiles=(),
      length=ids.size,
      logits=logits,
      session=session,
      blocks=blocks,
    )

  def _chunks(
    self,
    run: _Stage,
    lengths: Sequence[int],
    size: int,
    recorder: measured_timelines.SpanRecorder,
    receiver: _ActivationReceiver | None,
    sender: _ActivationSender | None,
    pause: Callable[[int], Any],
  ) -> jax.Array | None:
    """Reads all chunks; returns the logits after them on the last rank."""
    first, logits = 0, None
    for number, count in enumerate(lengths):
      pause(number)
      self.peers.check()
      tiles = _cut(first, count, size)
      activations = None if receiver is None else receiver.take(number)
      start_s = recorder.now()
      xs = run.chunk(tiles, activations)
      recorder.add("attend", number, start_s)
      if sender is not None:
        pairs = zip(xs, tiles, strict=True)
        rows = [np.asarray(x)[0, : tile.real] for x, tile in pairs]
        sender.put(number, first, rows)
      elif number == len(lengths) - 1:
        programs = self.programs
        logits = programs.head(xs[-1], tiles[-1].real - 1)
        logits = jax.block_until_ready(logits)
      first += count
    if run.publish is not None:
      run.publish.finish()
    if receiver is not None:
      receiver.finish()
    if sender is not None:
      sender.finish()
    return logits

  def _gather(
    self,
    session: Session,
    run: _Stage,
    puller: _BlockPuller | None,
    ids: np.ndarray,
  ) -> None:
    """Fills a session with the caches of all ranks' layers."""
    if puller is not None:
      puller.finish()
    cache = session.cache
    for layer in self.programs.layers:
      if layer.number in run.caches:
        slots = run.caches[layer.number].slots[0]
        k, v = slots.k[0], slots.v[0]
      else:
        assert puller is not None
        k, v = puller.blocks[layer.number]
      cache = self.programs.load(
        layer.kind, cache, layer.index, 0, ids.size, k, v
      )
      self.peers.tick()
    session.cache = jax.block_until_ready(cache)
    session.seen[0, ids] = True

  def _host_blocks(
    self, run: _Stage, puller: _BlockPuller | None, tokens: int
  ) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Keys and values [K, tokens, H] of each layer of the model, in order."""
    if puller is not None:
      puller.finish()
    blocks = []
    for layer in self.layers:
      if layer.number in run.caches:
        slots = run.caches[layer.number].slots[0]
        pair = np.asarray(slots.k[0, 0]), np.asarray(slots.v[0, 0])
      else:
        assert puller is not None
        pair = puller.blocks[layer.number]
        pair = pair[0][0], pair[1][0]
      blocks.append((pair[0][:, :tokens], pair[1][:, :tokens]))
      self.peers.tick()
    return tuple(blocks)

  def _compile(
    self, run: _Stage, session: Session | None, size: int, room: int
  ) -> None:
    """Compiles all programs before other ranks wait for this one."""
    key = size, room, session and session.cache.capacity
    if key in self._compiled:
      return
    self._compiled.add(key)
    spare = _Stage(self, run.ids, room)
    width = self.config.embed
    rows = np.zeros((1, width), stream_dtype(self.whole.dtype))
    activations = None if self.peers.rank == 0 else rows
    (x,) = spare.chunk([PromptTile(0, size, 1)], activations)
    jax.block_until_ready(x)
    if self.peers.rank == self.peers.size - 1:
      jax.block_until_ready(self.programs.head(x, 0))
    if session is not None:
      for layer in self.programs.layers:
        zeros = np.zeros(_shape(layer, room), self.dtype)
        session.cache = self.programs.load(
          layer.kind, session.cache, layer.index, 0, 1, zeros, zeros
        )
      session.cache = session.cache.truncate(0)

  def _size(self, tokens: int) -> int:
    if self.tile is not None:
      return self.tile
    return min(_TILE, 8 * -(-tokens // 64))


def _check_ranks(ranks: int, layers: int) -> None:
  """Refuses more ranks than layers."""
  if ranks > layers:
    raise OptionError(
      "stages",
      f"{ranks} ranks for {layers} layers",
      "a layer for each rank",
      f"start at most {layers} processes",
    )


def _shape(layer: StackedLayer, room: int) -> tuple[int, int, int, int]:
  """Shape [1, K, room, H] of a layer's keys."""
  spec: Any = layer.spec.attention
  return 1, spec.kv_heads, room, spec.head_dim


def _cut(first: int, count: int, size: int) -> list[PromptTile]:
  """Cuts the tokens [first, first + count) into tiles."""
  end = first + count
  return [
    PromptTile(at, size, min(size, end - at)) for at in range(first, end, size)
  ]


class _Stage:
  """The layers of a rank, with their caches of the chunks so far.

  Attributes:
    ids: Token ids of the prompt, int32 [C].
    caches: Single-layer cache of each layer, by its number.
    publish: Publisher of keys and values as they are computed, or None.
  """

  def __init__(self, owner: ChunkPipeline, ids: np.ndarray, room: int):
    self.owner, self.ids = owner, ids
    self.publish: _BlockPublisher | None = None
    programs = owner.programs
    caches = {
      layer.number: KVCache.create(
        (programs.cache_spec(layer),), 1, room, owner.dtype
      )
      for layer in owner._layers
    }
    self.caches = jax.device_put(caches, SingleDeviceSharding(owner.device))

  def chunk(
    self,
    tiles: Sequence[PromptTile],
    came: Float[np.ndarray, "n D"] | None,
  ) -> list[jax.Array]:
    """Runs a chunk; returns the last layer's output of each tile, [1, T, D].

    Args:
      tiles: Tiles of the chunk.
      came: Activations of all its tokens from the rank before, [n, D]; None on
        the first rank.
    """
    owner = self.owner
    programs, peers = owner.programs, owner.peers
    length = self.ids.size
    token_spans = [TokenSpan(tile.first, tile.real, length) for tile in tiles]
    xs: list[Any] = [self._input(tile, tiles[0].first, came) for tile in tiles]
    for layer, weights in programs.walk(owner._layers):
      cache, outs, parts = self.caches[layer.number], [], []
      for x, span in zip(xs, token_spans, strict=True):
        projected = programs.project(layer.spec, weights, x, span, owner.dtype)
        out, cache = programs.attend(
          layer.spec, 0, weights, x, projected, span, cache, 0
        )
        outs.append(out)
        parts.append(projected[1:])
      xs, self.caches[layer.number] = outs, cache
      if self.publish is not None:
        self.publish.put(layer, tiles, parts)
      peers.tick()
    for x in xs:
      jax.block_until_ready(x)
      peers.tick()
    return xs

  def _input(
    self,
    tile: PromptTile,
    first: int,
    came: Float[np.ndarray, "n D"] | None,
  ) -> jax.Array | np.ndarray:
    programs = self.owner.programs
    if came is None:
      part = np.zeros((1, tile.size), np.int32)
      part[0, : tile.real] = self.ids[tile.first : tile.end]
      return programs.embed(part)
    rows = np.zeros((1, tile.size, came.shape[1]), came.dtype)
    rows[0, : tile.real] = came[tile.first - first : tile.end - first]
    return rows


# ---------------------------------------------------------------------------
# Activations from stage to stage
# ---------------------------------------------------------------------------


class _ActivationSender(LinkEnd):
  """Sends chunks and tickets of published blocks to the next rank."""

  step, sent, over, ended = 1, 0, False, False

  def put(self, number: int, first: int, rows: list[np.ndarray]) -> None:
    """Queues a chunk to send; waits while `credits` chunks are queued."""
    start_s = self.recorder.now()
    free: Callable[[], bool] = lambda: number - self.sent < self.credits
    if not free():
      self.peers.wait(free)
      self.recorder.add("full", number, start_s)
    self.ready.append((number, first, rows))
    self.peers.wake()

  def tell(self, text: str) -> None:
    """Queues a ticket to send; may be called from any thread."""
    self.ready.append(text)
    self.peers.wake()

  def finish(self) -> None:
    """Waits until everything is sent."""
    self.over = True
    self.peers.wake()
    self.peers.wait(lambda: self.ended)

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    while True:
      self.peers.wait_idle(lambda: bool(self.ready) or self.over)
      if not self.ready:
        break
      item = self.ready.popleft()
      if isinstance(item, str):
        data = np.frombuffer(item.encode(), np.uint8)
        header = _HEADER.pack(_TICKET, 0, 0, data.size)
        frames.send(link, [data], header)
        continue
      number, first, rows = item
      nbytes = sum(part.nbytes for part in rows)
      start_s = self.recorder.now()
      count = sum(len(part) for part in rows)
      header = _HEADER.pack(_ACTIVATIONS, first, first + count, nbytes)
      frames.send(link, rows, header)
      self.recorder.add("send", number, start_s, nbytes)
      self.sent += 1
      self.peers.wake()
    self.ended = True
    self.peers.wake()


class _ActivationReceiver(LinkEnd):
  """Receives chunks from the rank before, and passes on its tickets."""

  step = -1

  def __init__(
    self,
    *link: Any,
    lengths: Sequence[int],
    tickets: int,
    width: int,
    dtype: np.dtype,
    told: Callable[[str], object],
  ):
    """Starts the receiving thread, see `LinkEnd`.

    Args:
      *link: Arguments of `LinkEnd`.
      lengths: Number of tokens in each chunk.
      tickets: Number of tickets to expect, for blocks of all ranks before.
      width: Width of an activation.
      dtype: Dtype of activations.
      told: Callback that gets each ticket, in the receiving thread.
    """
    self.lengths, self.tickets = lengths, tickets
    self.width, self.dtype, self.told = width, dtype, told
    self.ended = False
    super().__init__(*link)

  def take(self, number: int) -> np.ndarray:
    """Waits for a chunk's activations [n, D]."""
    start_s = self.recorder.now()
    self.peers.wait(lambda: bool(self.ready))
    self.recorder.add("wait", number, start_s)
    return self.ready.popleft()

  def finish(self) -> None:
    """Waits until all tickets have come."""
    self.peers.wait(lambda: self.ended)

  def work(self) -> None:
    link = self.peers.link(self.neighbour)
    num_chunks = first = tickets = 0
    while num_chunks < len(self.lengths) or tickets < self.tickets:
      kind, begin, end, nbytes = frames.receive_header(link, _HEADER)
      if kind == _TICKET and nbytes <= _LARGEST_TICKET:
        text = np.zeros(nbytes, np.uint8)
        frames.receive(link, [text])
        tickets += 1
        self.told(text.tobytes().decode())
        continue
      count = self.lengths[num_chunks] if num_chunks < len(self.lengths) else 0
      rows = np.zeros((count, self.width), self.dtype)
      expected = (_ACTIVATIONS, first, first + count, rows.nbytes)
      if (kind, begin, end, nbytes) != expected:
        raise PeerError(
          f"rank {self.neighbour} sent {nbytes} bytes of tokens {begin} to "
          f"{end}; wanted {expected[3]} of {expected[1]} to {expected[2]}",
          self.neighbour,
        )
      frames.receive(link, [rows])
      num_chunks, first = num_chunks + 1, end
      self.ready.append(rows)
      self.peers.wake()
    self.ended = True
    self.peers.wake()


# ---------------------------------------------------------------------------
# Keys and values to the last rank
# ---------------------------------------------------------------------------


class _Worker:
  """A thread that handles queued items one after another.

  Attributes:
    peers: Process group, which wakes waiting threads.
  """

  def __init__(self, peers: Peers):
    self.peers = peers
    self._ready: collections.deque[Any] = collections.deque()
    self._left = 0
    threading.Thread(target=self._run, daemon=True).start()

  def put(self, *item: Any) -> None:
    """Queues an item, given as the arguments of `handle`."""
    self._left += 1
    self._ready.append(item)
    self.peers.wake()

  def finish(self) -> Any:
    """Waits until all queued items are handled."""
    self.peers.wait(lambda: not self._left)

  def handle(self, *item: Any) -> None:
    """Handles an item, in the thread."""
    raise NotImplementedError

  def _run(self) -> None:
    try:
      while True:
        self.peers.wait_idle(lambda: bool(self._ready))
        item = self._ready.popleft()
        if not item:
          return
        self.handle(*item)
        self._left -= 1
        self.peers.wake()
    except PeerError:
      # Already reported: `rest` raises known failures, `handle` new ones.
      return
    except BaseException as error:
      self.peers.abandon(error)

  def close(self) -> None:
    """Ends the thread after all queued items."""
    self._ready.append(())
    self.peers.wake()


class _BlockPublisher(_Worker):
  """Publishes keys and values of a layer while the next layers compute."""

  def __init__(
    self, peers: Peers, publisher: Publisher, tell: Callable[[str], object]
  ):
    self._publisher, self._tell = publisher, tell
    super().__init__(peers)

  def handle(self, *item: Any) -> None:
    """Publishes a layer's keys and values of the tiles of a chunk."""
    layer, tiles, parts = item
    # Waits for the projections of this layer, not for later computations.
    k, v = (
      np.concatenate(
        [
          np.asarray(part[side])[0, :, : tile.real]
          for part, tile in zip(parts, tiles, strict=True)
        ],
        axis=1,
      )
      for side in range(2)
    )
    axes = ("head", "token", "dim")
    leaves = tuple(
      PageLeaf(name, x.dtype.name, x.shape, axes)
      for name, x in (("k", k), ("v", v))
    )
    (page,) = self._publisher.new_numbers(1)
    ticket = self._publisher.publish({page: (k, v)}, PageLayout(leaves))
    card = {
      "rank": self.peers.rank,
      "layer": layer.number,
      "first": tiles[0].first,
      "address": list(self._publisher.address),
      "ticket": ticket.to_json(),
    }
    self._tell(json_text(card))


class _BlockPuller(_Worker):
  """Pulls the blocks of other ranks while this one computes.

  Attributes:
    blocks: Keys and values [1, K, room, H] of each layer, by its number.
  """

  def __init__(
    self,
    peers: Peers,
    layers: Sequence[StackedLayer],
    room: int,
    dtype: np.dtype,
    key: bytes,
    recorder: measured_timelines.SpanRecorder,
  ):
    self.blocks = {
      layer.number: [np.zeros(_shape(layer, room), dtype) for _ in range(2)]
      for layer in layers
    }
    self._key, self._recorder = key, recorder
    super().__init__(peers)

  def handle(self, *item: Any) -> None:
    """Pulls the block that a ticket of `_BlockPublisher` names."""
    card = json.loads(*item)
    start_s = self._recorder.now()
    host, port = card["address"]
    try:
      pulled = pull(Ticket.from_json(card["ticket"]), (host, port), self._key)
    except PeerError as error:
      raise self.peers.report_failure(card["rank"], f"{error}") from None
    first = card["first"]
    for side, name in enumerate("kv"):
      (rows,) = pulled.arrays[name]
      end = first + rows.shape[1]
      self.blocks[card["layer"]][side][0, :, first:end] = rows
    self._recorder.add("pull", card["layer"], start_s, pulled.nbytes)
