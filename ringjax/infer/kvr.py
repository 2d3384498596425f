"""KV-Runahead: a chain of processes reads a prompt, each an uneven part of it.

Law:   the last rank ends with the cache that one device would have, and with
       the same logits; what an earlier rank computes never waits for a later
       one, but for `credits`.
Cost:  over link i travel the keys and values of all tokens up to rank i's last,
       exactly so many rows, once a layer; of a layer with a window only those
       that a later query sees. Rank i computes c_i of the linear part, and the
       tiles of c_i queries under the diagonal.
Memory: an earlier rank holds one layer's keys at a time, and `credits` layers
       at each end of a link; the last one the whole cache.
Ref:   Cho et al. 2024, KV-Runahead, arXiv 2405.05329.

Layer by layer, from the host, rank i of p:

  1  queries, keys and values of its own tokens, tile by tile
  2  keys and values of all tokens before them, from rank i - 1
  3  both in one array, by position
  4  all of it on its way to rank i + 1, by a thread of its own
  5  attention of its own queries, output projection, feedforward

Arrays travel through TCP, and not as collectives of two devices: a collective
takes its turn in the queue of the device's computations, so that a rank that
sends would wait for the one that receives. Whoever does not get on is told
from who waits (`Peers`), and can be left.

A new partition compiles nothing: tiles have two sizes, positions and lengths
are data, and all ranks have room for the same number of keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ringjax import plan
from ringjax.checks import float_dtype, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.infer import decode, inputs, prefill, spans
from ringjax.infer.agree import (
  agree,
  check_partition,
  digest,
  fingerprint,
)
from ringjax.infer.layerwise import Pieces, Place
from ringjax.infer.links import Inbox, Outbox, first_needed
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import Session
from ringjax.infer.spans import Events
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """A prompt, read by a group.

  Attributes:
    outcome: time to the first token, pairs, bytes and the timeline of all
      ranks, with rank 0's clock; the same on all ranks.
    tiles: tiles of attention that each rank computed, in all layers.
    length: of the context with room for new tokens, for rotations that
      depend on it.
    logits: float32 [1, V] behind the last token, on the last rank; else None.
    session: the whole cache, on the last rank; else None.
  """

  outcome: Outcome
  tiles: tuple[int, ...]
  length: int
  logits: jax.Array | None = None
  session: Session | None = None


@dataclasses.dataclass(frozen=True)
class _Tile:
  """Tokens [first, first + real) of the prompt, in a tile of `size`."""

  first: int
  size: int
  real: int


class Runahead:
  """One rank of a chain that reads prompts."""

  def __init__(
    self,
    model: Transformer,
    peers: Peers,
    *,
    credits: int = CREDITS,
    tile: int | None = None,
    dtype: Any = None,
  ):
    """Prepares; nothing is computed yet.

    Args:
      model: the whole model, on one device of this process.
      peers: the group.
      credits: layers that wait at each end of a link at most.
      tile: tokens of a tile; default: by the length of the prompt.
      dtype: of the cache; default: the model's.

    Raises:
      ConfigError: a model with layers that keep more than keys and values.
      OptionError: numbers that are none.
    """
    self.model, self.peers = model, peers
    self.credits = positive_int("credits", credits)
    self.tile = None if tile is None else positive_int("tile", tile)
    self.dtype = float_dtype("dtype", model.dtype if dtype is None else dtype)
    self.pieces = Pieces(model, CachedAttention())
    self._warm: set[Any] = set()
    (self.device,) = model.embed.weight.get_value().devices()

  def read(
    self,
    tokens: Any,
    partition: Sequence[int],
    *,
    new_tokens: int = 1,
    method: str = "kvr",
    pause: Callable[[int], Any] | None = None,
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
      OptionError: a partition that is none.
      PromptError: a prompt that is none.
      PeerError: ranks do not agree, or one of them failed.
    """
    self.peers.check()

    def card() -> dict[str, Any]:
      ids = inputs.prompt(tokens, self.model.config.vocab)
      lengths = check_partition(partition, ids.size, self.peers.size)
      positive_int("new_tokens", new_tokens)
      inputs.within_context(
        self.model.config,
        ids.size + new_tokens,
        f"{ids.size:,} tokens and new_tokens={new_tokens:,}",
      )
      return self._card(ids, lengths, method, new_tokens)

    agree(self.peers, card)
    ids = inputs.prompt(tokens, self.model.config.vocab)
    lengths = check_partition(partition, ids.size, self.peers.size)
    try:
      return self._read(ids, lengths, new_tokens, method, pause)
    except PeerError:
      raise
    except BaseException as error:
      self.peers.abandon(error)
      if self.peers.failure is not None and isinstance(error, OSError):
        raise self.peers.failure from None
      raise

  def warm(self, tokens: int) -> int:
    """Compiles what a prompt of this length needs; how many programs there are.

    Others are not asked, and nobody is blamed for the time it takes.
    """
    sizes = self._sizes(tokens)
    room = _capacity(tokens, sizes)
    if (sizes, room) in self._warm:
      return self.pieces.programs()
    self._warm.add((sizes, room))
    kinds = {p.layer: p for p in self.pieces.places}
    with jax.default_device(self.device):
      for place in kinds.values():
        weights = self.pieces.weights(place)
        for size in sizes:
          keys = self._room(place, room)
          x = self.pieces.embed(np.zeros((1, size), np.int32))
          q, k, v = self.pieces.project(place, weights, x, 0, size)
          keys = self.pieces.join(keys, k, v, 0)
          keys = self.pieces.write(keys, k, v, 0)
          x = self.pieces.attend(
            place, weights, x, q, keys, (0, size, size), size
          )
          jax.block_until_ready(self.pieces.head(x, 0))
    return self.pieces.programs()

  # -------------------------------------------------------------------------

  def _card(
    self, ids: np.ndarray, lengths: tuple[int, ...], method: str, room: int
  ) -> dict[str, Any]:
    """What all ranks have to agree on."""
    return {
      "method": method,
      "partition": list(lengths),
      "tokens": f"{ids.size} of digest {digest(ids.tobytes())}",
      "model config": digest(repr(self.model.config).encode()),
      "model weights": fingerprint(self.model),
      "model dtype": jnp.dtype(self.model.dtype).name,
      "cache dtype": self.dtype.name,
      "tile": self.tile or 0,
      "credits": self.credits,
      "new_tokens": room,
    }

  def _sizes(self, tokens: int) -> tuple[int, ...]:
    """Sizes of tiles, the largest first."""
    if self.tile is not None:
      return (self.tile,)
    large, small = _TILES
    if tokens < 16 * small:
      return (min(small, 8 * -(-tokens // 64)),)
    return (large if tokens >= 16 * large else large // 2, small)

  def _read(
    self,
    ids: np.ndarray,
    lengths: tuple[int, ...],
    new_tokens: int,
    method: str,
    pause: Any,
  ) -> Reading:
    peers = self.peers
    rank, active = peers.rank, len(lengths)
    events = Events(peers)
    session, logits = None, None
    first = sum(lengths[:rank])
    sizes = self._sizes(ids.size)
    room = _capacity(ids.size, sizes)
    with jax.default_device(self.device):
      if rank == active - 1:
        session = Session(
          self.model, max(room, ids.size + new_tokens), dtype=self.dtype
        )
      # Nobody is blamed for the time that this takes.
      self.warm(ids.size)
      peers.gather("ready")
      start_s = events.now()
      if rank < active:
        tiles = _cut(first, lengths[rank], sizes)
        length = ids.size + new_tokens
        run = _Run(self, ids, first, tiles, room, active, events, pause, length)
        with peers.doing(peers_.WORKING):
          logits = run.go(session)
      first_s = events.now()
      if session is not None:
        _fill(session, ids)
    count = 0
    if rank < active:
      count = self._count(lengths[rank], first, sizes, room)
    mine = {"start": start_s, "end": first_s, "tiles": count,
            "spans": events.spans}  # fmt: skip
    all_ = peers.gather(mine)
    return Reading(
      outcome=spans.outcome(
        method,
        lengths,
        all_,
        work=cost.pairs(cost.Prompt(tokens=ids.size), lengths, "causal"),
        end=active - 1,
      ),
      tiles=tuple(a["tiles"] for a in all_),
      length=ids.size + new_tokens,
      logits=logits,
      session=session,
    )

  def _room(self, place: Place, room: int) -> tuple[jax.Array, jax.Array]:
    """Empty keys where those of others are put."""
    keys = self.pieces.blank(place, 1, room, self.dtype)
    return jax.device_put(keys, SingleDeviceSharding(self.device))

  def _count(
    self, count: int, first: int, sizes: tuple[int, ...], room: int
  ) -> int:
    """Tiles of attention that this rank computes, by the loops' own rule."""
    total = 0
    known: dict[Mask, int] = {}
    end = first + count
    for place in self.pieces.places:
      mask = place.layer.attention.mask
      if mask not in known:
        known[mask] = sum(
          _tiles_computed(mask, tile, end, room)
          for tile in _cut(first, count, sizes)
        )
      total += known[mask]
    return total


class _Run:
  """One rank reads one prompt."""

  def __init__(
    self,
    owner: Runahead,
    ids: np.ndarray,
    first: int,
    tiles: list[_Tile],
    room: int,
    active: int,
    events: Events,
    pause: Any,
    length: int,
  ):
    self.owner, self.ids, self.length = owner, ids, length
    self.tiles, self.room, self.events = tiles, room, events
    self.pause = pause
    self.end = tiles[-1].first + tiles[-1].real
    rank = owner.peers.rank
    places = owner.pieces.places
    self.inbox = Inbox(owner, places, first, room, events) if rank else None
    self.outbox = (
      Outbox(owner, places, self.end, events) if rank < active - 1 else None
    )

  def go(self, session: Session | None) -> jax.Array | None:
    """All layers; the logits on the last rank, whose cache is filled."""
    peers, pieces = self.owner.peers, self.owner.pieces
    for box in (self.inbox, self.outbox):
      if box is not None:
        box.start()
    slots: list[Any] | None = None
    if session is not None:
      slots = list(session.cache.slots)
      # Given away layer by layer, and put back at the end.
      session.cache = dataclasses.replace(session.cache, slots=())
    xs = []
    for tile in self.tiles:
      part = np.zeros((1, tile.size), np.int32)
      part[0, : tile.real] = self.ids[tile.first : tile.first + tile.real]
      xs.append(pieces.embed(part))
    for place in pieces.places:
      if self.pause is not None:
        self.pause(place.number)
        peers.check()
      weights = pieces.weights(place)
      keys, qs = self._keys(place, weights, xs)
      if self.outbox is not None:
        self.outbox.put(place, keys)
      xs = self._attend(place, weights, xs, qs, keys)
      if slots is not None:
        slots[place.kind] = type(slots[place.kind])(
          *pieces.keep(tuple(slots[place.kind]), keys, place)
        )
    if session is not None and slots is not None:
      session.cache = dataclasses.replace(session.cache, slots=tuple(slots))
      row = self.end - 1 - self.tiles[-1].first
      return jax.block_until_ready(pieces.head(xs[-1], row))
    if self.outbox is not None:
      self.outbox.finish()
    return None

  def _keys(
    self, place: Place, weights: Any, xs: list[jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
    """All keys up to this rank's last, by position; and its own queries."""
    owner, pieces = self.owner, self.owner.pieces
    start_s = self.events.now()
    made = []
    for x, tile in zip(xs, self.tiles, strict=True):
      made.append(pieces.project(place, weights, x, tile.first, self.length))
      self._settle(made, len(made) - 1 - _AHEAD)
    for n in range(max(0, len(made) - _AHEAD), len(made)):
      self._settle(made, n)
    self.events.add("project", place.number, start_s)
    keys = None
    if self.inbox is None:
      keys = owner._room(place, self.room)
    for (_, k, v), tile in zip(made, self.tiles, strict=True):
      if keys is not None:
        keys = pieces.write(keys, k, v, tile.first)
        continue
      # What came may lie in the buffer that the next layer comes into, until
      # it has been copied.
      assert self.inbox is not None
      pair, came = self.inbox.take(place)
      keys = jax.block_until_ready(pieces.join(came, k, v, tile.first))
      self.inbox.give_back(pair)
    assert keys is not None
    return keys, [q for q, _, _ in made]

  def _attend(
    self,
    place: Place,
    weights: Any,
    xs: list[jax.Array],
    qs: list[jax.Array],
    keys: tuple[jax.Array, jax.Array],
  ) -> list[jax.Array]:
    start_s = self.events.now()
    done: list[jax.Array] = []
    for x, q, tile in zip(xs, qs, self.tiles, strict=True):
      span = (tile.first, tile.real, self.end)
      done.append(
        self.owner.pieces.attend(place, weights, x, q, keys, span, self.length)
      )
      self._settle(done, len(done) - 1 - _AHEAD)
    for n in range(max(0, len(done) - _AHEAD), len(done)):
      self._settle(done, n)
    self.events.add("attend", place.number, start_s)
    return done

  def _settle(self, made: list[Any], n: int) -> None:
    """Waits for tile `n`, so that the host is not far ahead, and says so."""
    if n >= 0:
      jax.block_until_ready(made[n])
      self.owner.peers.tick()


# ---------------------------------------------------------------------------
# Decoding
# ---------------------------------------------------------------------------


def follow(
  reading: Reading,
  max_new_tokens: int,
  *,
  sampler: Any = None,
  stop: Iterable[int] = (),
) -> np.ndarray:
  """Continues what the last rank has read, there: int32 [n].

  The session then goes on with `rj.infer.generate(..., cache=session)`.

  Raises:
    OptionError: another rank's reading, or more tokens than there is room for.
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
  with jax.default_device(device):
    stops = decode.stop_ids(tuple(stop))
    total = jnp.int32(reading.length)
    pos = jnp.asarray(session.lengths.astype(np.int32))
    needs = getattr(sampler, "needs_seen", False)
    sampler, seen = traced(sampler), jnp.array(session.seen) if needs else None
    state = decode.first(sampler, logits, pos, seen, stops)
    while True:
      found.append(int(state.token[0]))
      session.seen[0, found[-1]] = True
      if len(found) == count or bool(state.done[0]):
        break
      try:
        state, session.cache = decode.step(
          session.model,
          CachedAttention(),
          sampler,
          session.cache,
          state,
          stops,
          total,
        )
        session.lengths = session.lengths + 1
      except BaseException:
        session.recover()
        raise
  session.pending = np.array([found[-1]], np.int64)
  return np.asarray(found, np.int32)


def _fill(session: Session, ids: np.ndarray) -> None:
  """Notes that the slots hold the prompt's tokens."""
  tokens = ids.size
  session.seen[0, ids] = True
  cache, size = session.cache, session.cache.capacity
  pos = jnp.arange(size, dtype=jnp.int32)[None]
  at = Coords(pos, (pos < tokens).astype(jnp.int32))
  session.cache = cache.allocate(at, replicated=False, sees=False)
  session.lengths = np.array([tokens], np.int64)


# ---------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------


def _cut(first: int, count: int, sizes: tuple[int, ...]) -> list[_Tile]:
  """Tiles of the tokens [first, first + count), large ones first."""
  found, end = [], first + count
  for size in sizes:
    last = size == sizes[-1]
    while first < end and (last or end - first >= size):
      found.append(_Tile(first, size, min(size, end - first)))
      first += size
  return found


def _capacity(tokens: int, sizes: tuple[int, ...]) -> int:
  """Keys that there is room for on every rank, the last tile's padding too."""
  return prefill.padded(tokens + sizes[-1], 1)


def link_bytes(
  pieces: Pieces, lengths: Sequence[int], dtype: Any
) -> tuple[int, ...]:
  """Bytes that pass each link of a chain, all layers together."""
  ends = np.cumsum(lengths)[:-1]
  row = lambda a: 2 * a.kv_heads * a.head_dim * jnp.dtype(dtype).itemsize
  return tuple(
    sum(
      row(p.layer.attention) * (int(end) - first_needed(p, int(end)))
      for p in pieces.places
    )
    for end in ends
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


def row_bytes(pieces: Pieces, dtype: Any) -> int:
  """Bytes of a token's keys and values in all layers."""
  each = (p.layer.attention for p in pieces.places)
  size = jnp.dtype(dtype).itemsize
  return sum(2 * a.kv_heads * a.head_dim * size for a in each)


def _tiles_computed(mask: Mask, tile: _Tile, end: int, room: int) -> int:
  qb, kb = Blockwise().blocks(tile.size, room)

  def coords(first: int, size: int, real: int, block: int) -> Coords:
    index = np.arange(-(-size // block) * block, dtype=np.int32)
    seg = (index < real).astype(np.int32)
    return Coords(jnp.asarray(first + index)[None], jnp.asarray(seg)[None])

  q = coords(tile.first, tile.size, tile.real, qb)
  k = coords(0, room, end, kb)
  return int(np.count_nonzero(np.asarray(tile_kinds(mask, q, k, qb, kb))))
