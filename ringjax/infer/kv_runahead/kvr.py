"""KV-Runahead: a chain of processes reads a prompt, each an uneven part of it.

Guarantees: the last rank ends with the cache that one device would have, and
with the same logits; what an earlier rank computes never waits for a later
one, but for `credits`.
Cost: over link i travel the keys and values of all tokens up to rank i's last,
without padding, once per layer; of a layer with a window only those that a
later query sees. Rank i computes the linear part of its c_i tokens, and the
attention tiles of its c_i queries under the diagonal.
Memory: an earlier rank holds a cache of one layer, and `credits` layers at each
end of a link; the last one the whole cache.
Ref: Cho et al. 2024, KV-Runahead, arXiv 2405.05329.

Layer by layer, from the host, rank i of p:

  1  computes queries, keys and values of its tokens, tile by tile
  2  receives keys and values of all tokens before them from rank i - 1
  3  sends both to rank i + 1, in a separate thread
  4  loads the received block into its cache; then, tile by tile, appends its
     keys and computes attention, output projection and feedforward

Blocks of keys and values travel as a layer of the cache appends them (rotated,
or before their rotation), whatever the kind of cache stores; with
`wire="cache"` they travel as the codes that the cache stores, encoded once by
the rank that has the tokens. Each rank but the last then attends to its own
keys exactly and to the decoded keys of the tokens before.

Arrays travel through TCP, and not as collectives of two devices: a collective
waits in the queue of the device's computations, so that a rank that sends would
wait for the one that receives. `Peers` tells stalled ranks from waiting ones
and drops a stalled rank.

A new partition compiles nothing: tiles have two sizes, positions and lengths
are data, and blocks have room for the same number of keys on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ringjax import plan
from ringjax.checks import float_dtype, one_of, positive_int
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import OptionError
from ringjax.infer import decode, inputs, prefill
from ringjax.infer.finite import NOT_FINITE, not_finite_error
from ringjax.infer.kv_runahead import measured_timelines, rank_agreement
from ringjax.infer.kv_runahead.chain_links import LayerBlock, Receiver, Sender
from ringjax.infer.layerwise import LayerPrograms, StackedLayer, TokenSpan
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import Session
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Codec
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.attention.blockwise import Blockwise, tile_kinds
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel import peers as peers_
from ringjax.parallel.peers import Peers
from ringjax.plan import cost
from ringjax.plan.kv_runahead.schedules import Outcome

CREDITS = 2
# Tokens of a large and of a small tile; the small one is for the remainder.
_TILES = (512, 128)
# Number of tiles in flight before the host waits for one.
_AHEAD = 2


def nothing(*_: Any) -> None:
  """Do nothing: the default of optional callbacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """A prompt, read by a group.

  Attributes:
    outcome: Time to the first token, pairs, bytes and the timeline of all
      ranks, by rank 0's clock; the same on all ranks.
    tiles: Number of attention tiles that each rank computed, in all layers.
    length: Number of prompt tokens, for rotations that depend on it.
    logits: Logits after the last token, float32 [1, V], on the last rank; None
      on the others.
    session: Session with the whole cache, on the last rank; None on the others.
    blocks: Keys and values of each layer, [K, length, H] in the host's memory,
      on the last rank of a pipeline with keep="blocks"; else None.
  """

  outcome: Outcome
  tiles: tuple[int, ...]
  length: int
  logits: jax.Array | None = None
  session: Session | None = None
  blocks: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None


@dataclasses.dataclass(frozen=True)
class PromptTile:
  """Tokens [first, first + real) of the prompt, in a tile of `size`."""

  first: int
  size: int
  real: int

  @property
  def end(self) -> int:
    return self.first + self.real


class Runahead:
  """One rank of a chain that reads prompts."""

  def __init__(
    self,
    model: Transformer,
    peers: Peers,
    *,
    credits: int = CREDITS,
    tile: int | None = None,
    dtype: DTypeLike | None = None,
    kind: CacheConfig | str = "dense",
    wire: str | None = None,
  ):
    """Prepares; nothing is computed yet.

    Args:
      model: The whole model, on one device of this process.
      peers: The group of processes.
      credits: Maximum number of layers buffered at each end of a link.
      tile: Number of tokens of a tile; default: by the length of the prompt.
      dtype: Dtype of the cache; default: the model's.
      kind: Kind of the cache, an `rj.kv.CacheConfig` or its name.
      wire: Format of keys and values on the links: "cache" for the codes of a
        kind with a codec; None: unencoded.

    Raises:
      ConfigError: If a layer keeps more than keys and values.
      OptionError: If an argument is out of range, `kind` is unknown, or `wire`
        asks for codes of a kind without a codec.
    """
    self.model, self.peers = model, peers
    self.credits = positive_int("credits", credits)
    self.tile = None if tile is None else positive_int("tile", tile)
    self.dtype = float_dtype("dtype", model.dtype if dtype is None else dtype)
    self.kind = model.cache_kind(kind).resident("KV-Runahead")
    self.wire = one_of("wire", wire, (None, "cache"))
    codec = self.kind.codec
    self.codec = (
      codec if wire is not None and isinstance(codec, Codec) else None
    )
    if wire is not None and self.codec is None:
      raise OptionError(
        "wire",
        f"{wire!r} with a cache of kind {self.kind}",
        "a kind with a codec that all heads share",
        "pass kind='int8', for instance, or leave wire out",
      )
    self.programs = LayerPrograms(model, CachedAttention(), self.kind)
    self._compiled: set[Any] = set()
    (self.device,) = model.embed.weight.get_value().devices()

  def read(
    self,
    tokens: TokenIds | Int[Array | np.ndarray, "1 C"],
    partition: Sequence[int],
    *,
    new_tokens: int = 1,
    method: str = "kvr",
    pause: Callable[[int], Any] = nothing,
  ) -> Reading:
    """Reads a prompt; all ranks call it, with the same arguments.

    Args:
      tokens: Token ids, int32 [C] or [1, C].
      partition: Number of tokens of each rank; ranks after its end stay idle.
      new_tokens: Room in the cache after the prompt, in tokens.
      method: Name of the method, for the outcome.
      pause: Called at the beginning of every layer with its number, to see
        what a slow rank does to the others.

    Raises:
      OptionError: If the partition does not add up to the prompt.
      PromptError: If the prompt is empty, too long or has unknown ids.
      PeerError: If the ranks' arguments differ, or a rank failed.
    """

    def check() -> tuple[dict[str, Any], tuple[np.ndarray, tuple[int, ...]]]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      lengths = rank_agreement.check_partition(
        partition, ids.size, self.peers.size
      )
      positive_int("new_tokens", new_tokens)
      inputs.within_context(
        self.model.config,
        ids.size + new_tokens,
        f"{ids.size:,} tokens and new_tokens={new_tokens:,}",
      )
      settings = {"method": method, "partition": list(lengths)}
      settings |= rank_agreement.reading(self.model, ids) | {
        "cache dtype": self.dtype.name,
        "cache kind": str(self.kind),
        "wire": self.wire or "",
        "tile": self.tile or 0,
        "credits": self.credits,
        "new_tokens": new_tokens,
      }
      return settings, (ids, lengths)

    ids, lengths = rank_agreement.agree(self.peers, check)
    with self.peers.abandoning(), jax.default_device(self.device):
      return self._read(ids, lengths, new_tokens, method, pause)

  def _read(
    self,
    ids: np.ndarray,
    lengths: tuple[int, ...],
    new_tokens: int,
    method: str,
    pause: Callable[[int], Any],
  ) -> Reading:
    peers = self.peers
    rank, last = peers.rank, len(lengths) - 1
    sizes = self._sizes(ids.size)
    capacity, length = _capacity(ids.size, sizes), ids.size
    first = sum(lengths[:rank])
    tiles = _cut(first, lengths[rank], sizes) if rank <= last else []
    session = logits = sender = None
    if rank == last:
      session = Session(
        self.model,
        max(capacity, length + new_tokens),
        dtype=self.dtype,
        cache_kind=self.kind,
      )
    caches = self._caches(capacity, session)
    self._compile(caches, sizes, capacity)
    recorder = measured_timelines.SpanRecorder(peers)
    peers.gather("ready")
    start_s = recorder.now()
    if tiles:
      layers = self.programs.layers
      link = peers, layers, self.credits, recorder
      take = put = nothing
      if rank > 0:
        receiver = Receiver(
          *link, first, size=capacity, dtype=self.dtype, codec=self.codec
        )
        take = receiver.take
      if rank < last:
        sender = Sender(*link, tiles[-1].end)
        put = sender.put
      with peers.doing(peers_.WORKING):
        x = self._layers(
          layers, ids, tiles, length, caches, recorder, take, put, pause
        )
        if sender is not None:
          sender.finish()
        else:
          logits = jax.block_until_ready(self._head(x, tiles[-1].real - 1))
    end_s = recorder.now()
    if session is not None:
      session.cache = caches[None]
      session.seen[0, ids] = True
    num_tiles = self._count(tiles, capacity)
    parts = peers.gather(
      {
        "start": start_s,
        "end": end_s,
        "tiles": num_tiles,
        "spans": recorder.spans,
      }
    )
    return Reading(
      outcome=measured_timelines.measured(
        method,
        lengths,
        parts,
        work=cost.pairs(cost.Prompt(tokens=ids.size), lengths, "causal"),
        end=last,
      ),
      tiles=tuple(part["tiles"] for part in parts),
      length=length,
      logits=logits,
      session=session,
    )

  def _layers(
    self,
    layers: Iterable[StackedLayer],
    ids: np.ndarray,
    tiles: Sequence[PromptTile],
    length: int,
    caches: dict[Any, KVCache],
    recorder: measured_timelines.SpanRecorder,
    take: Callable[[StackedLayer], LayerBlock | None],
    put: Callable[[StackedLayer, list[LayerBlock]], Any] = nothing,
    pause: Callable[[int], Any] = nothing,
  ) -> jax.Array:
    """Run layers over this rank's tiles and fill the caches.

    Args:
      layers: Layers to run, in order.
      ids: Token ids of the prompt, int32 [C].
      tiles: Tiles of this rank's tokens.
      length: Number of tokens of the whole context.
      caches: Caches from `_caches`; updated in place.
      recorder: Timeline of this rank.
      take: Returns a layer's block of the tokens before, if there are any.
      put: Gets a layer's blocks, those of this rank's tokens last.
      pause: Called first in every layer, with its number.

    Returns:
      Output of the last layer for the last tile, [1, T, D].
    """
    programs = self.programs
    tile_spans = [TokenSpan(tile.first, tile.real, length) for tile in tiles]
    xs = []
    for tile in tiles:
      tile_ids = np.zeros((1, tile.size), np.int32)
      tile_ids[0, : tile.real] = ids[tile.first : tile.end]
      xs.append(programs.embed(tile_ids))

    def begin_layer(number: int) -> None:
      pause(number)
      self.peers.check()

    for layer, weights in programs.walk(layers, before=begin_layer):
      start_s = recorder.now()
      projected = self._paced(
        programs.project(layer.spec, weights, x, span, self.dtype)
        for x, span in zip(xs, tile_spans, strict=True)
      )
      recorder.add("project", layer.number, start_s)
      prefix_block = take(layer)
      if put is not nothing:
        own_blocks = [
          LayerBlock(tile.first, tile.end, *self._sent(layer, k, v))
          for tile, (_, k, v) in zip(tiles, projected, strict=True)
        ]
        put(
          layer,
          own_blocks if prefix_block is None else [prefix_block, *own_blocks],
        )
      start_s = recorder.now()
      tokens = zip(xs, projected, tile_spans, strict=True)
      xs = self._paced(
        self._attend(layer, weights, tokens, prefix_block, caches)
      )
      recorder.add("attend", layer.number, start_s)
    return xs[-1]

  def _attend(
    self,
    layer: StackedLayer,
    weights: Any,
    tokens: Iterable[tuple[jax.Array, Any, TokenSpan]],
    prefix_block: LayerBlock | None,
    caches: dict[Any, KVCache],
  ) -> Iterator[jax.Array]:
    """Yield a layer's outputs for the tiles, and append their keys.

    The cache is first filled with the block of the tokens before, if any.
    """
    programs = self.programs
    key, kind, index = self._cache_of(layer, caches)
    cache = caches[key]
    if prefix_block is None:
      cache = cache.truncate(0)
    else:
      coded = self.codec is not None
      constants = programs.constants(layer) if coded else None
      cache = programs.load(kind, cache, index, *prefix_block, constants)
    for x, projected, span in tokens:
      out, cache = programs.attend(
        layer.spec, kind, weights, x, projected, span, cache, index
      )
      yield out
    caches[key] = cache

  def _sent(
    self, layer: StackedLayer, k: jax.Array, v: jax.Array
  ) -> tuple[Any, Any]:
    """Encode keys and values for the next rank, if the wire has a codec."""
    if self.codec is None:
      return k, v
    return self.programs.encode(self.programs.constants(layer), k, v)

  def _head(self, x: jax.Array, row: int) -> jax.Array:
    return self.programs.head(x, row)

  def _paced(self, started: Iterator[Any]) -> list[Any]:
    """Start programs, at most `_AHEAD` of them in flight, and return all.

    Signs of life go to the group as each is done.
    """
    results: list[Any] = []
    for result in started:
      results.append(result)
      if len(results) > _AHEAD:
        self._settle(results[-1 - _AHEAD])
    for result in results[-_AHEAD:]:
      self._settle(result)
    return results

  def _settle(self, result: Any) -> None:
    jax.block_until_ready(result)
    self.peers.tick()

  def _caches(self, room: int, session: Session | None) -> dict[Any, KVCache]:
    """Return empty caches: the session's, or one per shape of layer.

    The session's cache has the key None, the cache of a shape its
    specification. Layers of the same shape reuse one cache.
    """
    caches: dict[Any, KVCache] = {}
    if session is not None:
      caches = {None: session.cache}
    else:
      # A rank but the last stores exact keys: its cache has no codec.
      kind = dataclasses.replace(self.kind, codec=None)
      for layer in self.programs.layers:
        spec = self.programs.cache_spec(layer)
        caches.setdefault(
          spec, KVCache.create((spec,), 1, room, self.dtype, kind=kind)
        )
    # One by one: keys of a pytree's dict must be sortable, specs are not.
    sharding = SingleDeviceSharding(self.device)
    return {
      key: jax.device_put(cache, sharding) for key, cache in caches.items()
    }

  def _cache_of(
    self, layer: StackedLayer, caches: dict[Any, KVCache]
  ) -> tuple[Any, int, int]:
    """Key of a layer's cache, and the layer's kind and index in that cache."""
    if None in caches:
      return None, layer.kind, layer.index
    return self.programs.cache_spec(layer), 0, 0

  def _compile(
    self, caches: dict[Any, KVCache], sizes: tuple[int, ...], room: int
  ) -> None:
    """Compile all programs before other ranks wait for this one.

    Peers do not count a rank as stalled for the time that this takes.
    """
    key = (
      sizes,
      room,
      *((name, cache.capacity) for name, cache in caches.items()),
    )
    if key in self._compiled:
      return
    self._compiled.add(key)

    def empty(layer: StackedLayer) -> LayerBlock:
      return LayerBlock.zeros(layer, 1, room, self.dtype, self.codec)

    tiles = [PromptTile(0, size, 1) for size in sizes]
    recorder = measured_timelines.SpanRecorder(self.peers)
    ids = np.zeros(1, np.int32)
    distinct_layers = {
      (layer.spec, *self._cache_of(layer, caches)[:2]): layer
      for layer in self.programs.layers
    }
    # The last rank sends nothing.
    put = nothing if None in caches else lambda *_: None
    for take in (nothing, empty):
      x = self._layers(
        distinct_layers.values(), ids, tiles, 1, caches, recorder, take, put
      )
    jax.block_until_ready(self._head(x, 0))

  def _sizes(self, tokens: int) -> tuple[int, ...]:
    """Choose the sizes of tiles, in tokens, the largest first."""
    if self.tile is not None:
      return (self.tile,)
    large, small = _TILES
    if tokens < 16 * small:
      return (min(small, 8 * -(-tokens // 64)),)
    return (large if tokens >= 16 * large else large // 2, small)

  def _count(self, tiles: Sequence[PromptTile], room: int) -> int:
    """Count the attention tiles that this rank computes, as the loops skip."""
    mixers: list[Any] = [layer.spec.attention for layer in self.programs.layers]
    masks = [mixer.mask for mixer in mixers]
    computed = {
      mask: sum(
        _tiles_computed(mask, tile, tiles[-1].end, room) for tile in tiles
      )
      for mask in dict.fromkeys(masks)
    }
    return sum(computed[mask] for mask in masks)


# ---------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------


def follow(
  reading: Reading,
  max_new_tokens: int,
  *,
  sampler: Callable[..., Any] | None = None,
  stop: Iterable[int] = (),
) -> Int[np.ndarray, " _"]:
  """Generate tokens after a read prompt, on the last rank: int32 [n].

  The session then continues with `rj.infer.generate(..., cache=session)`.

  Raises:
    OptionError: If `reading` is another rank's, or the cache has too little
      room for the tokens.
    NotFiniteLogitsError: If logits are NaN or infinite; the error has the
      tokens before that.
  """
  count = positive_int("max_new_tokens", max_new_tokens)
  sampler = Greedy() if sampler is None else sampler
  session, logits = reading.session, reading.logits
  if session is None or logits is None:
    raise OptionError(
      "reading",
      "one of a rank without the cache",
      "that of the last rank",
      "call it there only",
    )
  session.check()
  if count - 1 > session.room():
    raise OptionError(
      "max_new_tokens",
      count,
      f"at most {session.room() + 1}",
      "pass new_tokens= to read",
    )
  (device,) = logits.devices()
  new_tokens: list[int] = []
  needs_seen = getattr(sampler, "needs_seen", False)
  with jax.default_device(device):
    stops, length = (
      decode.stop_ids(tuple(stop)),
      jnp.array([reading.length], jnp.int32),
    )
    pos = jnp.asarray(session.lengths.astype(np.int32))
    sampler, seen = (
      traced(sampler),
      jnp.array(session.seen) if needs_seen else None,
    )
    state = decode.first(sampler, logits, pos, seen, stops)
    try:
      while True:
        token = int(state.token[0])
        if token == NOT_FINITE:
          session.not_finite([0])
          position = int(state.pos[0])
          tokens = np.asarray(new_tokens, np.int32)
          raise not_finite_error({0: position}, session.model.dtype, tokens)
        new_tokens.append(token)
        session.seen[0, new_tokens[-1]] = True
        if len(new_tokens) == count or bool(state.done[0]):
          break
        state, session.cache = decode.step(
          session.model,
          CachedAttention(),
          sampler,
          session.cache,
          state,
          stops,
          length,
        )
    except BaseException:
      session.recover()
      raise
  session.pending = np.array([new_tokens[-1]], np.int64)
  return np.asarray(new_tokens, np.int32)


# ---------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------


def _cut(first: int, count: int, sizes: tuple[int, ...]) -> list[PromptTile]:
  """Cut the tokens [first, first + count) into tiles, large ones first."""
  tiles, end = [], first + count
  for size in sizes:
    last = size == sizes[-1]
    while first < end and (last or end - first >= size):
      tiles.append(PromptTile(first, size, min(size, end - first)))
      first += size
  return tiles


def _capacity(tokens: int, sizes: tuple[int, ...]) -> int:
  """Capacity in keys of every rank's cache, with the last tile's padding."""
  return prefill.padded(tokens + sizes[-1], 1)


def link_bytes(
  layers: Sequence[StackedLayer],
  lengths: Sequence[int],
  dtype: DTypeLike,
  codec: Codec | None = None,
) -> tuple[int, ...]:
  """Bytes that pass each link of a chain, all layers together.

  Args:
    layers: Layers of the model.
    lengths: Number of tokens of each rank.
    dtype: Dtype of keys and values.
    codec: Codec whose codes are sent in their place, or None.
  """
  token_bytes = [layer.token_bytes(dtype, codec) for layer in layers]
  return tuple(
    sum(
      nbytes * (end - layer.first_needed(end))
      for nbytes, layer in zip(token_bytes, layers, strict=True)
    )
    for end in np.cumsum(lengths)[:-1].tolist()
  )


def balanced(
  model: Transformer, tokens: int, ranks: int, tile: int = 1
) -> tuple[int, ...]:
  """Partition a prompt so that all ranks compute the same number of FLOPs.

  `rj.plan` also searches partitions and models slow links.
  """
  profile = work_profile.profile(model, tokens)
  shares = plan.balanced(profile, cost.Prompt(tokens=tokens), ranks)
  return plan.round_to_tiles(shares, tokens, tile)


def row_bytes(layers: Sequence[StackedLayer], dtype: DTypeLike) -> int:
  """Bytes of one token's keys and values in all layers."""
  return sum(layer.token_bytes(dtype) for layer in layers)


def _tiles_computed(mask: Mask, tile: PromptTile, end: int, room: int) -> int:
  qb, kb = Blockwise().blocks(tile.size, room)

  def coords(first: int, size: int, real: int, block: int) -> Coords:
    index = np.arange(-(-size // block) * block, dtype=np.int32)
    seg = (index < real).astype(np.int32)
    return Coords(jnp.asarray(first + index)[None], jnp.asarray(seg)[None])

  q = coords(tile.first, tile.size, tile.real, qb)
  k = coords(0, room, end, kb)
  return int(np.count_nonzero(np.asarray(tile_kinds(mask, q, k, qb, kb))))
