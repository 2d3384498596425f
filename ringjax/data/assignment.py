"""Which shards each document of a batch goes to, by a cost model.

How many shards a document takes is chosen for each batch: one on more
shards loads none of them so much, but all wait for more hops of the ring. The
time of each choice of these degrees is bounded from below,

  max(mean work, largest share of a document) + hops * slots * hop

and the best of the choices with the lowest bounds is taken, each tried in
full: documents on several shards first, then whole ones, the longest before
the others, each on the shard with the least work (Graham 1969) and room. A
document for which no shard has room is split over neighbours by their room.

Guarantees: the shards of a document are neighbours, in a row that does not run
over the ring's end; whatever adds up to no more than the slots is assigned.
Cost: O(N log N) of N documents.
Ref: Ge et al. 2025 (arXiv 2502.21231) and Wang et al. 2025 (arXiv 2412.01523)
      choose the number of devices of each sequence by such a cost.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ringjax.checks import number
from ringjax.errors import OptionError

# Choices that are tried in full, and parts of the mean that a share may be.
_TRIED = 8
_PARTS = (1, 2, 4)
# A choice this much above its bound is good enough.
_CLOSE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """The cost model of a shard's time, in units of a token's linear work.

  The defaults are those of a model of width D = 4096 with 8 heads of 128 keys
  and values, in bfloat16, on devices of 4e14 FLOP/s with links of 5e10 bytes a
  second. A layer's matrices take some 24 D^2 FLOPs a token, a pair 4 D.

  Attributes:
    token: of the work that is linear in the tokens. 0 by default: a program of
      fixed shapes does it for empty slots too, so that it is the same on all
      shards; 1 where empty slots are left out.
    pair: of a query and a key that it sees; 1 / (6 D).
    hop: of sending a token's keys and values one shard further, as if no
      computation hid it; a hop sends all slots of a shard.
  """

  token: int | float = 0.0
  pair: int | float = 4.1e-5
  hop: int | float = 0.08

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), least=0)
    if not self.token + self.pair:
      raise OptionError(
        "cost", self, "a token or a pair above 0", "pass pair=4.1e-5"
      )

  def work(
    self, tokens: int | float | np.ndarray, pairs: int | float | np.ndarray
  ) -> Any:
    """Of so many tokens and pairs."""
    return self.token * tokens + self.pair * pairs


class RingSlots(NamedTuple):
  """A ring of shards, their slots, and the spread of documents over several.

  Fields:
    shards: R.
    local_length: t, slots of each.
    spread: "stripe" or "run", see ringjax/data/placement.py.
    cost: of tokens, pairs and hops.
  """

  shards: int
  local_length: int
  spread: str
  cost: Cost

  def hop_time(self, reach: int) -> float:
    """The cost of the hops for documents on `reach` + 1 shards."""
    hops = reach if self.spread == "run" else 2 * reach
    return min(hops, self.shards - 1) * self.local_length * self.cost.hop

  def even(
    self,
    size: int | np.integer | np.ndarray,
    degree: int | np.integer | np.ndarray,
    member: int | np.integer | np.ndarray,
  ) -> tuple[Any, Any]:
    """(tokens, work) of the shard `member` of a document that is split evenly.

    All may be arrays.
    """
    tokens, more = np.divmod(size, degree)
    first = member * tokens + np.minimum(member, more)
    tokens = tokens + (member < more)
    if self.spread == "run":
      pairs = tokens * first + tokens * (tokens + 1) // 2
    else:
      pairs = tokens * (member + 1) + degree * (tokens * (tokens - 1) // 2)
    return tokens, self.cost.work(tokens, pairs)

  def largest(
    self, sizes: Int[np.ndarray, " N"], degrees: Int[np.ndarray, " N"]
  ) -> float:
    """The most work that a document gives to a shard if all split evenly."""
    # Shards that have one token more, or the last token, have the most.
    ends = (np.maximum(sizes % degrees, 1) - 1, degrees - 1)
    found = [self.even(sizes, degrees, member)[1] for member in ends]
    return float(np.max(found, initial=0.0))

  def uneven(self, counts: Int[np.ndarray, " D"]) -> np.ndarray:
    """Work of the shards of a document with these tokens on each."""
    member = members(counts, self.spread)
    pairs = np.bincount(member, np.arange(1.0, len(member) + 1), len(counts))
    return self.cost.work(counts, pairs)


class Assignment(NamedTuple):
  """The shards of each document.

  Fields:
    first: int64 [N], the first shard of each document.
    groups: tokens on each shard, of documents on several shards.
    work: float64 [R], of each shard.
  """

  first: np.ndarray
  groups: dict[int, np.ndarray]
  work: np.ndarray

  @property
  def reach(self) -> int:
    return max((len(counts) - 1 for counts in self.groups.values()), default=0)

  def time(self, ring: RingSlots) -> float:
    """The cost of the batch."""
    return float(self.work.max()) + ring.hop_time(self.reach)


def assign(sizes: Int[np.ndarray, " N"], ring: RingSlots) -> Assignment:
  """Assigns documents to shards, to as many each as costs least.

  Args:
    sizes: int64 [N], tokens of each; together no more than there are slots.
    ring: the shards.

  Returns:
    The best that was found; the same for the same arguments.
  """
  found: list[Assignment] = []
  time = lambda one: one.time(ring)
  for bound, degrees in _choices(sizes, ring):
    if found and min(map(time, found)) <= bound * (1 + _CLOSE):
      break
    one, _ = assign_degrees(sizes, degrees, ring, exact=False)
    if one is not None:
      found.append(one)
  else:
    # Where there is hardly room it may be all there is.
    found.append(_in_order(sizes, ring))
  return min(found, key=time)


def _choices(
  sizes: np.ndarray, ring: RingSlots
) -> list[tuple[float, np.ndarray]]:
  """Degrees to try, int64 [N], with a lower bound of the time; best first."""
  work = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  mean = float(work.sum()) / ring.shards
  least = -(-sizes // ring.local_length)
  # All others are on one shard in any choice.
  some = np.flatnonzero((work * _PARTS[-1] > mean) | (least > 1))
  size, fewest = sizes[some], least[some]
  known: dict[bytes, tuple[float, int, np.ndarray]] = {}
  for parts in _PARTS:
    want = np.ceil(work[some] * parts / max(mean, 1e-300)).astype(np.int64)
    for most in range(1, ring.shards + 1):
      chosen = np.minimum(want, most).clip(
        fewest, np.minimum(size, ring.shards)
      )
      key = chosen.tobytes()
      if key in known:
        continue
      reach = int(chosen.max(initial=1)) - 1
      bound = max(mean, ring.largest(size, chosen)) + ring.hop_time(reach)
      known[key] = bound, reach, chosen
  found = []
  for bound, _, chosen in sorted(known.values(), key=lambda x: x[:2])[:_TRIED]:
    degrees = np.minimum(sizes, 1)
    degrees[some] = chosen
    found.append((bound, degrees))
  return found


def assign_degrees(
  sizes: Int[np.ndarray, " N"],
  degrees: Int[np.ndarray, " N"],
  ring: RingSlots,
  *,
  exact: bool,
) -> tuple[Assignment | None, int]:
  """Assigns documents to as many shards as `degrees` says, if there is room.

  Without `exact`, a document for which there is no room is split unevenly or
  over more shards.

  Returns:
    The assignment; or None, and the tokens of the first document without room.
  """
  room = np.full(ring.shards, ring.local_length)
  work = np.zeros(ring.shards)
  first = np.zeros(len(sizes), np.int64)
  groups: dict[int, np.ndarray] = {}
  own = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  even = functools.cache(lambda n, d: ring.even(n, d, np.arange(d)))

  def take(
    document: int, at: int, counts: np.ndarray, load: np.ndarray
  ) -> None:
    here = slice(at, at + len(counts))
    room[here] -= counts
    work[here] += load
    first[document] = at
    groups[document] = counts

  def split(document: int, least: int) -> bool:
    """Splits a document by the room there is; False if there is none."""
    found = None
    if not exact:
      found = _by_room(int(sizes[document]), least, room, work)
    if found is not None:
      take(document, *found, ring.uneven(found[1]))
    return found is not None

  several = np.flatnonzero(degrees > 1)
  # Documents on the most shards fit in the fewest places.
  order = np.lexsort((several, -own[several], -degrees[several]))
  for i in several[order].tolist():
    counts, load = even(int(sizes[i]), int(degrees[i]))
    at = _least_loaded(counts, load, room, work)
    if at is not None:
      take(i, at, counts, load)
    elif not split(i, int(degrees[i])):
      return None, int(sizes[i])
  whole = np.flatnonzero(degrees == 1)
  whole = whole[np.argsort(-sizes[whole], kind="stable")]
  # Shards by their work; and those without room for the document at hand, by
  # their room: documents get shorter, so each comes back once there is some.
  open_ = [(w, r) for r, w in enumerate(work.tolist())]
  heapq.heapify(open_)
  full: list[tuple[int, int]] = []
  rooms = room.tolist()
  for i, size, load in zip(
    whole.tolist(), sizes[whole].tolist(), own[whole].tolist(), strict=True
  ):
    while full and -full[0][0] >= size:
      r = heapq.heappop(full)[1]
      heapq.heappush(open_, (float(work[r]), r))
    while open_ and rooms[open_[0][1]] < size:
      r = heapq.heappop(open_)[1]
      heapq.heappush(full, (-rooms[r], r))
    if open_:
      before, r = open_[0]
      rooms[r] -= size
      work[r] = before + load
      first[i] = r
      heapq.heapreplace(open_, (before + load, r))
      continue
    room[:] = rooms
    if not split(i, 2):
      return None, size
    rooms = room.tolist()
    full = [(-n, r) for r, n in enumerate(rooms)]
    heapq.heapify(full)
  return Assignment(first, groups, work), 0


def _least_loaded(
  counts: np.ndarray, load: np.ndarray, room: np.ndarray, work: np.ndarray
) -> int | None:
  """The first of the neighbours with room whose load is smallest."""
  at = _neighbours(len(room), len(counts))
  fits = (room[at] >= counts).all(1)
  if not fits.any():
    return None
  most = (work[at] + load).max(1)
  return int(np.argmin(np.where(fits, most, np.inf)))


def _by_room(
  size: int, least: int, room: np.ndarray, work: np.ndarray
) -> tuple[int, np.ndarray] | None:
  """The first of the fewest neighbours with room, and the tokens on each."""
  for degree in range(least, min(len(room), size) + 1):
    at = _neighbours(len(room), degree)
    fits = (room[at].sum(1) >= size) & (room[at].min(1) > 0)
    if fits.any():
      best = int(np.argmin(np.where(fits, work[at].max(1), np.inf)))
      return best, _even_counts(size, room[best : best + degree])
  return None


def _even_counts(size: int, room: np.ndarray) -> np.ndarray:
  """Tokens on each shard, as even as the room allows; int64 [d]."""
  counts = np.zeros(len(room), np.int64)
  for done, member in enumerate(np.argsort(room, kind="stable")):
    counts[member] = min(int(room[member]), size // (len(room) - done))
    size -= int(counts[member])
  return counts


@functools.lru_cache(64)
def _neighbours(shards: int, degree: int) -> np.ndarray:
  """All rows of `degree` neighbours, int64 [R - d + 1, d]."""
  return np.arange(shards - degree + 1)[:, None] + np.arange(degree)


def _in_order(sizes: np.ndarray, ring: RingSlots) -> Assignment:
  """One document behind the other, which always fits."""
  ends = np.cumsum(sizes)
  starts = ends - sizes
  first = np.minimum(starts // ring.local_length, ring.shards - 1)
  last = np.maximum(ends - 1, starts) // ring.local_length
  work = np.zeros(ring.shards)
  whole = (first == last) & (sizes > 0)
  own = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  np.add.at(work, first[whole], own[whole])
  groups = {}
  for i in np.flatnonzero((first < last) & (sizes > 0)).tolist():
    edges = np.arange(first[i], last[i] + 2) * ring.local_length
    counts = np.diff(edges.clip(starts[i], ends[i]))
    groups[i] = counts
    work[first[i] : last[i] + 1] += ring.uneven(counts)
  return Assignment(first, groups, work)


def members(counts: Int[np.ndarray, " D"], spread: str) -> np.ndarray:
  """The shard, of a document's own, that has each token; int64 [n]."""
  size, degree = int(counts.sum()), len(counts)
  runs = np.repeat(np.arange(degree), counts)
  if spread == "run":
    return runs
  if counts[0] - counts[-1] <= 1 and (np.diff(counts) <= 0).all():
    return np.arange(size) % degree
  # A shard with fewer tokens has them further apart.
  nth = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
  return runs[np.argsort((2 * nth + 1) / counts[runs], kind="stable")]
