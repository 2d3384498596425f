"""KV-Runahead: a chain of processes reads a prompt, each an uneven part of it.

Guarantees: the last rank ends with the cache that one device would have, and
with the same logits; what an earlier rank computes never waits for a later
one, but for `credits`.
Cost: over link i travel the keys and values of all tokens up to rank i's last,
exactly so many rows, once a layer; of a layer with a window only those that a
later query sees. Rank i computes c_i of the linear part, and the tiles of c_i
queries under the diagonal.
Memory: an earlier rank holds a cache of one layer, and `credits` layers at each
end of a link; the last one the whole cache.
Ref: Cho et al. 2024, KV-Runahead, arXiv 2405.05329.

Layer by layer, from the host, rank i of p:

  1  queries, keys and values of its own tokens, tile by tile
  2  keys and values of all tokens before them, from rank i - 1
  3  both on their way to rank i + 1, by a thread of its own
  4  what came into its cache; then, tile by tile, its own keys into it,
     attention of its own queries, output projection, feedforward

What travels are blocks of keys and values as a layer of the cache appends them
(rotated, or before their rotation), whatever the kind of cache makes of them;
with `wire="cache"` the codes that the cache stores, which the rank that has the
tokens makes once. Its own keys a rank but the last then sees exact, and those
of the tokens before decoded.

Arrays travel through TCP, and not as collectives of two devices: a collective
takes its turn in the queue of the device's computations, so that a rank that
sends would wait for the one that receives. `Peers` tells stalled ranks from
waiting ones; a stalled rank is given up.

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
from ringjax.data.special_tokens import TokenIds
from ringjax.errors import OptionError
from ringjax.infer import agree, decode, inputs, prefill, spans
from ringjax.infer.finite import NOT_FINITE, not_finite_error
from ringjax.infer.layerwise import LayerPrograms, StackedLayer, TokenSpan
from ringjax.infer.links import LayerBlock, Receiver, Sender
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import Session
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Codec
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.attention.blockwise import Blockwise, tile_kinds
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel import peers as peers_
from ringjax.parallel.peers import Peers
from ringjax.plan import cost
from ringjax.plan.schedules import Outcome

CREDITS = 2
# A tile of tokens; what does not fill one is read in the smaller size.
_TILES = (512, 128)
# How many tiles are under way before the host waits for one.
_AHEAD = 2


def nothing(*_: Any) -> None:
  """What is done where nothing is to be done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """A prompt, read by a group.

  Attributes:
    outcome: time to the first token, pairs, bytes and the timeline of all
      ranks, with rank 0's clock; the same on all ranks.
    tiles: tiles of attention that each rank computed, in all layers.
    length: of the prompt, for rotations that depend on it.
    logits: float32 [1, V] behind the last token, on the last rank; else None.
    session: the whole cache, on the last rank; else None.
  """

  outcome: Outcome
  tiles: tuple[int, ...]
  length: int
  logits: jax.Array | None = None
  session: Session | None = None


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
    kind: CacheKind | str = "dense",
    wire: str | None = None,
  ):
    """Prepares; nothing is computed yet.

    Args:
      model: the whole model, on one device of this process.
      peers: the group.
      credits: layers that wait at each end of a link at most.
      tile: tokens of a tile; default: by the length of the prompt.
      dtype: of the cache; default: the model's.
      kind: of the cache, an `rj.kv.CacheKind` or its name.
      wire: "cache" sends keys and values as the codes of a kind with a codec;
        None: as they are.

    Raises:
      ConfigError: a model with layers that keep more than keys and values.
      OptionError: an argument out of range, no kind of cache, or codes of a
        kind without a codec.
    """
    self.model, self.peers = model, peers
    self.credits = positive_int("credits", credits)
    self.tile = None if tile is None else positive_int("tile", tile)
    self.dtype = float_dtype("dtype", model.dtype if dtype is None else dtype)
    self.kind = model.cache_kind(kind).resident("KV-Runahead")
    self.wire = one_of("wire", wire, (None, "cache"))
    own = self.kind.codec
    self.codec = own if wire is not None and isinstance(own, Codec) else None
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
      tokens: int32 [C] or [1, C].
      partition: tokens of each rank; ranks behind its end stay idle.
      new_tokens: room in the cache behind the prompt.
      method: its name, for the outcome.
      pause: called at the beginning of every layer with its number, to see
        what a slow rank does to the others.

    Raises:
      OptionError: a partition that does not add up to the prompt.
      PromptError: an empty prompt, unknown ids, or too many tokens.
      PeerError: ranks do not agree, or one of them failed.
    """

    def check() -> tuple[dict[str, Any], tuple[np.ndarray, tuple[int, ...]]]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      lengths = agree.check_partition(partition, ids.size, self.peers.size)
      positive_int("new_tokens", new_tokens)
      inputs.within_context(
        self.model.config,
        ids.size + new_tokens,
        f"{ids.size:,} tokens and new_tokens={new_tokens:,}",
      )
      card = {"method": method, "partition": list(lengths)}
      card |= agree.reading(self.model, ids) | {
        "cache dtype": self.dtype.name,
        "cache kind": str(self.kind),
        "wire": self.wire or "",
        "tile": self.tile or 0,
        "credits": self.credits,
        "new_tokens": new_tokens,
      }
      return card, (ids, lengths)

    ids, lengths = agree.agree(self.peers, check)
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
    room, length = _capacity(ids.size, sizes), ids.size
    first = sum(lengths[:rank])
    tiles = _cut(first, lengths[rank], sizes) if rank <= last else []
    session = logits = sender = None
    if rank == last:
      session = Session(
        self.model,
        max(room, length + new_tokens),
        dtype=self.dtype,
        cache_kind=self.kind,
      )
    caches = self._caches(room, session)
    self._compile(caches, sizes, room)
    recorder = spans.SpanRecorder(peers)
    peers.gather("ready")
    start_s = recorder.now()
    if tiles:
      layers = self.programs.layers
      link = peers, layers, self.credits, recorder
      take = put = nothing
      if rank > 0:
        receiver = Receiver(
          *link, first, size=room, dtype=self.dtype, codec=self.codec
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
    count = self._count(tiles, room)
    parts = peers.gather(
      {"start": start_s, "end": end_s, "tiles": count, "spans": recorder.spans}
    )
    return Reading(
      outcome=spans.measured(
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
    recorder: spans.SpanRecorder,
    take: Callable[[StackedLayer], LayerBlock | None],
    put: Callable[[StackedLayer, list[LayerBlock]], Any] = nothing,
    pause: Callable[[int], Any] = nothing,
  ) -> jax.Array:
    """What the last layer makes of the last tile, [1, T, D]; fills caches.

    Args:
      layers: which ones, in order.
      ids: the prompt.
      tiles: of this rank.
      length: tokens of the whole context.
      caches: of `_caches`.
      recorder: of this rank.
      take: returns a layer's block of the tokens before, if there are any.
      put: gets a layer's blocks, this rank's own last.
      pause: called first in every layer.
    """
    programs = self.programs
    where = [TokenSpan(tile.first, tile.real, length) for tile in tiles]
    xs = []
    for tile in tiles:
      part = np.zeros((1, tile.size), np.int32)
      part[0, : tile.real] = ids[tile.first : tile.end]
      xs.append(programs.embed(programs.outer, part))
    for layer in layers:
      pause(layer.number)
      self.peers.check()
      weights = programs.weights(layer)
      start_s = recorder.now()
      made = self._paced(
        programs.project(layer.spec, weights, x, span, self.dtype)
        for x, span in zip(xs, where, strict=True)
      )
      recorder.add("project", layer.number, start_s)
      before = take(layer)
      if put is not nothing:
        own = [
          LayerBlock(tile.first, tile.end, *self._sent(layer, k, v))
          for tile, (_, k, v) in zip(tiles, made, strict=True)
        ]
        put(layer, own if before is None else [before, *own])
      start_s = recorder.now()
      tokens = zip(xs, made, where, strict=True)
      xs = self._paced(self._attend(layer, weights, tokens, before, caches))
      recorder.add("attend", layer.number, start_s)
    return xs[-1]

  def _attend(
    self,
    layer: StackedLayer,
    weights: Any,
    tokens: Iterable[tuple[jax.Array, Any, TokenSpan]],
    before: LayerBlock | None,
    caches: dict[Any, KVCache],
  ) -> Iterator[jax.Array]:
    """A layer's outputs for the tiles, whose keys its cache has from then on.

    The cache is filled with the block of the tokens before, if any.
    """
    programs = self.programs
    key, kind, index = self._cache_of(layer, caches)
    cache = caches[key]
    if before is None:
      cache = cache.truncate(0)
    else:
      coded = self.codec is not None
      constants = programs.constants(layer) if coded else None
      cache = programs.load(kind, cache, index, *before, constants)
    for x, made, span in tokens:
      out, cache = programs.attend(
        layer.spec, kind, weights, x, made, span, cache, index
      )
      yield out
    caches[key] = cache

  def _sent(
    self, layer: StackedLayer, k: jax.Array, v: jax.Array
  ) -> tuple[Any, Any]:
    """Keys and values of some tokens as they go to the next rank."""
    if self.codec is None:
      return k, v
    return self.programs.encode(self.programs.constants(layer), k, v)

  def _head(self, x: jax.Array, row: int) -> jax.Array:
    return self.programs.head(self.programs.outer, x, row)

  def _paced(self, started: Iterator[Any]) -> list[Any]:
    """Starts programs, the host at most `_AHEAD` before the device.

    Tells the group of each that is done.
    """
    made: list[Any] = []
    for one in started:
      made.append(one)
      if len(made) > _AHEAD:
        self._settle(made[-1 - _AHEAD])
    for one in made[-_AHEAD:]:
      self._settle(one)
    return made

  def _settle(self, made: Any) -> None:
    jax.block_until_ready(made)
    self.peers.tick()

  def _caches(self, room: int, session: Session | None) -> dict[Any, KVCache]:
    """Empty caches: the session's, or of one layer of each shape, used again.

    They are called None, or as a cache of the one layer is specified.
    """
    found: dict[Any, KVCache] = {}
    if session is not None:
      found = {None: session.cache}
    else:
      # What passes through is not encoded: the next rank gets exact keys.
      kind = dataclasses.replace(self.kind, codec=None)
      for layer in self.programs.layers:
        spec = self.programs.cache_spec(layer)
        found.setdefault(
          spec, KVCache.create((spec,), 1, room, self.dtype, kind=kind)
        )
    # One by one: specifications have no order, which the keys of a tree need.
    where = SingleDeviceSharding(self.device)
    return {key: jax.device_put(one, where) for key, one in found.items()}

  def _cache_of(
    self, layer: StackedLayer, caches: dict[Any, KVCache]
  ) -> tuple[Any, int, int]:
    """What a layer's cache is called, the layer's kind and its index there."""
    if None in caches:
      return None, layer.kind, layer.index
    return self.programs.cache_spec(layer), 0, 0

  def _compile(
    self, caches: dict[Any, KVCache], sizes: tuple[int, ...], room: int
  ) -> None:
    """Compiles all programs, before the others wait for this rank.

    A rank is not given up for the time that this takes.
    """
    key = sizes, room, *((name, x.capacity) for name, x in caches.items())
    if key in self._compiled:
      return
    self._compiled.add(key)

    def empty(layer: StackedLayer) -> LayerBlock:
      return LayerBlock.zeros(layer, 1, room, self.dtype, self.codec)

    tiles = [PromptTile(0, size, 1) for size in sizes]
    recorder = spans.SpanRecorder(self.peers)
    ids = np.zeros(1, np.int32)
    each = {
      (x.spec, *self._cache_of(x, caches)[:2]): x for x in self.programs.layers
    }
    # The last rank sends nothing.
    put = nothing if None in caches else lambda *_: None
    for take in (nothing, empty):
      x = self._layers(
        each.values(), ids, tiles, 1, caches, recorder, take, put
      )
    jax.block_until_ready(self._head(x, 0))

  def _sizes(self, tokens: int) -> tuple[int, ...]:
    """Sizes of tiles, the largest first."""
    if self.tile is not None:
      return (self.tile,)
    large, small = _TILES
    if tokens < 16 * small:
      return (min(small, 8 * -(-tokens // 64)),)
    return (large if tokens >= 16 * large else large // 2, small)

  def _count(self, tiles: Sequence[PromptTile], room: int) -> int:
    """Tiles of attention that this rank computes, by the loops' own rule."""
    mixers: list[Any] = [x.spec.attention for x in self.programs.layers]
    masks = [mixer.mask for mixer in mixers]
    computed = {
      mask: sum(_tiles_computed(mask, x, tiles[-1].end, room) for x in tiles)
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
) -> np.ndarray:
  """Continues what the last rank has read, there: int32 [n].

  The session then goes on with `rj.infer.generate(..., cache=session)`.

  Raises:
    OptionError: another rank's reading, or more tokens than there is room for.
    NotFiniteLogitsError: the logits are NaN or infinite; with the tokens before
      that.
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
  found: list[int] = []
  needs = getattr(sampler, "needs_seen", False)
  with jax.default_device(device):
    stops, length = (
      decode.stop_ids(tuple(stop)),
      jnp.array([reading.length], jnp.int32),
    )
    pos = jnp.asarray(session.lengths.astype(np.int32))
    sampler, seen = traced(sampler), jnp.array(session.seen) if needs else None
    state = decode.first(sampler, logits, pos, seen, stops)
    try:
      while True:
        token = int(state.token[0])
        if token == NOT_FINITE:
          session.not_finite([0])
          at = int(state.pos[0])
          tokens = np.asarray(found, np.int32)
          raise not_finite_error({0: at}, session.model.dtype, tokens)
        found.append(token)
        session.seen[0, found[-1]] = True
        if len(found) == count or bool(state.done[0]):
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
  session.pending = np.array([found[-1]], np.int64)
  return np.asarray(found, np.int32)


# ---------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------


def _cut(first: int, count: int, sizes: tuple[int, ...]) -> list[PromptTile]:
  """Tiles of the tokens [first, first + count), large ones first."""
  found, end = [], first + count
  for size in sizes:
    last = size == sizes[-1]
    while first < end and (last or end - first >= size):
      found.append(PromptTile(first, size, min(size, end - first)))
      first += size
  return found


def _capacity(tokens: int, sizes: tuple[int, ...]) -> int:
  """Keys that there is room for on every rank, the last tile's padding too."""
  return prefill.padded(tokens + sizes[-1], 1)


def link_bytes(
  layers: Sequence[StackedLayer],
  lengths: Sequence[int],
  dtype: DTypeLike,
  codec: Codec | None = None,
) -> tuple[int, ...]:
  """Bytes that pass each link of a chain, all layers together.

  Args:
    layers: the model's.
    lengths: tokens of each rank.
    dtype: of the numbers.
    codec: of the codes that are sent in their place, or None.
  """
  each = [x.token_bytes(dtype, codec) for x in layers]
  return tuple(
    sum(
      n * (end - x.first_needed(end)) for n, x in zip(each, layers, strict=True)
    )
    for end in np.cumsum(lengths)[:-1].tolist()
  )


def balanced(
  model: Transformer, tokens: int, ranks: int, tile: int = 1
) -> tuple[int, ...]:
  """A partition with which all ranks have as much to compute, in FLOPs.

  `rj.plan` has more: searches, and links that bind.
  """
  profile = work_profile.profile(model, tokens)
  shares = plan.balanced(profile, cost.Prompt(tokens=tokens), ranks)
  return plan.round_to_tiles(shares, tokens, tile)


def row_bytes(layers: Sequence[StackedLayer], dtype: DTypeLike) -> int:
  """Bytes of a token's keys and values in all layers."""
  return sum(x.token_bytes(dtype) for x in layers)


def _tiles_computed(mask: Mask, tile: PromptTile, end: int, room: int) -> int:
  qb, kb = Blockwise().blocks(tile.size, room)

  def coords(first: int, size: int, real: int, block: int) -> Coords:
    index = np.arange(-(-size // block) * block, dtype=np.int32)
    seg = (index < real).astype(np.int32)
    return Coords(jnp.asarray(first + index)[None], jnp.asarray(seg)[None])

  q = coords(tile.first, tile.size, tile.real, qb)
  k = coords(0, room, end, kb)
  return int(np.count_nonzero(np.asarray(tile_kinds(mask, q, k, qb, kb))))
