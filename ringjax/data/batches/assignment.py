"""Assigns the documents of a batch to shards, by a cost model.

The number of shards of a document is chosen for each batch: on more shards it
loads none of them so much, but all wait for more hops of the ring. The time of
each choice of these degrees has a lower bound,

  max(mean work, largest share of a document) + hops * slots * hop

and the best of the choices with the lowest bounds is taken, each tried in
full: documents on several shards first, then whole ones, the longest before
the others, each on the shard with the least work (Graham 1969) and room. A
document that fits on no shard is split over neighbours by their room.

Guarantees: the shards of a document are neighbours, in a row that does not run
over the ring's end; documents of at most as many tokens as slots are assigned.
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
from jaxtyping import Float, Int

from ringjax.checks import number
from ringjax.errors import OptionError

# Choices that are tried in full, and parts of the mean work for a share.
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
    token: Work of a token that is linear in the tokens. 0 by default: a program
      of fixed shapes does it for empty slots, too, so it is the same on all
      shards; 1 if empty slots are left out.
    pair: Work of a query and a key that it sees; 1 / (6 D).
    hop: Cost of sending a token's keys and values one shard further, as if no
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
    """Work of a number of tokens and pairs."""
    return self.token * tokens + self.pair * pairs


class RingSlots(NamedTuple):
  """A ring of shards, their slots, and the spread of documents over several.

  Fields:
    shards: Number of shards, R.
    local_length: Slots of each shard, t.
    spread: "stripe" or "run", see ringjax/data/batches/placement.py.
    cost: Costs of tokens, pairs and hops.
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

    All arguments may be arrays.
    """
    tokens, remainder = np.divmod(size, degree)
    first = member * tokens + np.minimum(member, remainder)
    tokens = tokens + (member < remainder)
    if self.spread == "run":
      pairs = tokens * first + tokens * (tokens + 1) // 2
    else:
      pairs = tokens * (member + 1) + degree * (tokens * (tokens - 1) // 2)
    return tokens, self.cost.work(tokens, pairs)

  def largest(
    self, sizes: Int[np.ndarray, " N"], degrees: Int[np.ndarray, " N"]
  ) -> float:
    """Largest work that a document gives to a shard if all are split evenly."""
    # Shards that have one token more, or the last token, have the most.
    ends = (np.maximum(sizes % degrees, 1) - 1, degrees - 1)
    work = [self.even(sizes, degrees, member)[1] for member in ends]
    return float(np.max(work, initial=0.0))

  def uneven(self, counts: Int[np.ndarray, " D"]) -> Float[np.ndarray, " D"]:
    """Work of each shard of a document, by its tokens on each."""
    member = members(counts, self.spread)
    pairs = np.bincount(member, np.arange(1.0, len(member) + 1), len(counts))
    return self.cost.work(counts, pairs)


class Assignment(NamedTuple):
  """The shards of each document.

  Fields:
    first: First shard of each document, int64 [N].
    groups: Tokens on each shard, by document, for documents on several shards.
    work: Work of each shard, float64 [R].
  """

  first: np.ndarray
  groups: dict[int, np.ndarray]
  work: np.ndarray

  @property
  def reach(self) -> int:
    return max((len(counts) - 1 for counts in self.groups.values()), default=0)

  def time(self, ring: RingSlots) -> float:
    """Cost of the batch."""
    return float(self.work.max()) + ring.hop_time(self.reach)


def assign(sizes: Int[np.ndarray, " N"], ring: RingSlots) -> Assignment:
  """Assigns documents to shards, to as many each as costs least.

  Args:
    sizes: Tokens of each document, int64 [N]; at most the slots in sum.
    ring: Ring of shards.

  Returns:
    The best assignment that was tried; the same for the same arguments.
  """
  assignments: list[Assignment] = []
  time_of = lambda assignment: assignment.time(ring)
  for bound, degrees in _choices(sizes, ring):
    if assignments and min(map(time_of, assignments)) <= bound * (1 + _CLOSE):
      break
    assignment, _ = assign_degrees(sizes, degrees, ring, exact=False)
    if assignment is not None:
      assignments.append(assignment)
  else:
    # With little room left this may be the only one that fits.
    assignments.append(_in_order(sizes, ring))
  return min(assignments, key=time_of)


def _choices(
  sizes: np.ndarray, ring: RingSlots
) -> list[tuple[float, np.ndarray]]:
  """Degrees to try, int64 [N], with lower bounds of the time; best first."""
  work = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  mean = float(work.sum()) / ring.shards
  fewest_shards = -(-sizes // ring.local_length)
  # All other documents are on one shard in any choice.
  spreadable = np.flatnonzero((work * _PARTS[-1] > mean) | (fewest_shards > 1))
  size, fewest = sizes[spreadable], fewest_shards[spreadable]
  choices: dict[bytes, tuple[float, int, np.ndarray]] = {}
  for parts in _PARTS:
    want = np.ceil(work[spreadable] * parts / max(mean, 1e-300)).astype(
      np.int64
    )
    for max_degree in range(1, ring.shards + 1):
      chosen = np.minimum(want, max_degree).clip(
        fewest, np.minimum(size, ring.shards)
      )
      key = chosen.tobytes()
      if key in choices:
        continue
      reach = int(chosen.max(initial=1)) - 1
      bound = max(mean, ring.largest(size, chosen)) + ring.hop_time(reach)
      choices[key] = bound, reach, chosen
  best = []
  for bound, _, chosen in sorted(choices.values(), key=lambda x: x[:2])[
    :_TRIED
  ]:
    degrees = np.minimum(sizes, 1)
    degrees[spreadable] = chosen
    best.append((bound, degrees))
  return best


def assign_degrees(
  sizes: Int[np.ndarray, " N"],
  degrees: Int[np.ndarray, " N"],
  ring: RingSlots,
  *,
  exact: bool,
) -> tuple[Assignment | None, int]:
  """Assigns documents to as many shards as `degrees` says, if they have room.

  Without `exact`, a document for which there is no room is split unevenly or
  over more shards.

  Returns:
    The assignment; or None, and the tokens of the first document without room.
  """
  room = np.full(ring.shards, ring.local_length)
  work = np.zeros(ring.shards)
  first = np.zeros(len(sizes), np.int64)
  groups: dict[int, np.ndarray] = {}
  document_work = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  even = functools.cache(lambda n, d: ring.even(n, d, np.arange(d)))

  def take(
    document: int, at: int, counts: np.ndarray, load: np.ndarray
  ) -> None:
    shards = slice(at, at + len(counts))
    room[shards] -= counts
    work[shards] += load
    first[document] = at
    groups[document] = counts

  def split_document(document: int, least: int) -> bool:
    """Splits a document by the free slots; False if there are too few."""
    split_at = None
    if not exact:
      split_at = _by_room(int(sizes[document]), least, room, work)
    if split_at is not None:
      take(document, *split_at, ring.uneven(split_at[1]))
    return split_at is not None

  multi = np.flatnonzero(degrees > 1)
  # Documents on the most shards fit in the fewest places.
  order = np.lexsort((multi, -document_work[multi], -degrees[multi]))
  for i in multi[order].tolist():
    counts, load = even(int(sizes[i]), int(degrees[i]))
    at = _least_loaded(counts, load, room, work)
    if at is not None:
      take(i, at, counts, load)
    elif not split_document(i, int(degrees[i])):
      return None, int(sizes[i])
  single = np.flatnonzero(degrees == 1)
  single = single[np.argsort(-sizes[single], kind="stable")]
  # Shards by their work; and those without room for the current document, by
  # their room: documents get shorter, so each returns once it has enough room.
  by_work = [(w, r) for r, w in enumerate(work.tolist())]
  heapq.heapify(by_work)
  full: list[tuple[int, int]] = []
  rooms = room.tolist()
  for i, size, load in zip(
    single.tolist(),
    sizes[single].tolist(),
    document_work[single].tolist(),
    strict=True,
  ):
    while full and -full[0][0] >= size:
      r = heapq.heappop(full)[1]
      heapq.heappush(by_work, (float(work[r]), r))
    while by_work and rooms[by_work[0][1]] < size:
      r = heapq.heappop(by_work)[1]
      heapq.heappush(full, (-rooms[r], r))
    if by_work:
      shard_work, r = by_work[0]
      rooms[r] -= size
      work[r] = shard_work + load
      first[i] = r
      heapq.heapreplace(by_work, (shard_work + load, r))
      continue
    room[:] = rooms
    if not split_document(i, 2):
      return None, size
    rooms = room.tolist()
    full = [(-n, r) for r, n in enumerate(rooms)]
    heapq.heapify(full)
  return Assignment(first, groups, work), 0


def _least_loaded(
  counts: np.ndarray, load: np.ndarray, room: np.ndarray, work: np.ndarray
) -> int | None:
  """First of the neighbouring shards with room and the smallest load."""
  at = _neighbours(len(room), len(counts))
  has_room = (room[at] >= counts).all(1)
  if not has_room.any():
    return None
  peak = (work[at] + load).max(1)
  return int(np.argmin(np.where(has_room, peak, np.inf)))


def _by_room(
  size: int, least: int, room: np.ndarray, work: np.ndarray
) -> tuple[int, np.ndarray] | None:
  """First of the fewest neighbours with room, and the tokens on each."""
  for degree in range(least, min(len(room), size) + 1):
    at = _neighbours(len(room), degree)
    has_room = (room[at].sum(1) >= size) & (room[at].min(1) > 0)
    if has_room.any():
      best = int(np.argmin(np.where(has_room, work[at].max(1), np.inf)))
      return best, _even_counts(size, room[best : best + degree])
  return None


def _even_counts(size: int, room: np.ndarray) -> np.ndarray:
  """Tokens on each shard, as even as the room allows; int64 [d]."""
  counts = np.zeros(len(room), np.int64)
  for assigned, member in enumerate(np.argsort(room, kind="stable")):
    counts[member] = min(int(room[member]), size // (len(room) - assigned))
    size -= int(counts[member])
  return counts


@functools.lru_cache(64)
def _neighbours(shards: int, degree: int) -> np.ndarray:
  """All rows of `degree` neighbours, int64 [R - d + 1, d]."""
  return np.arange(shards - degree + 1)[:, None] + np.arange(degree)


def _in_order(sizes: np.ndarray, ring: RingSlots) -> Assignment:
  """Assigns documents in their order, which always fits."""
  ends = np.cumsum(sizes)
  starts = ends - sizes
  first = np.minimum(starts // ring.local_length, ring.shards - 1)
  last = np.maximum(ends - 1, starts) // ring.local_length
  work = np.zeros(ring.shards)
  single = (first == last) & (sizes > 0)
  document_work = ring.cost.work(sizes, sizes * (sizes + 1) // 2)
  np.add.at(work, first[single], document_work[single])
  groups = {}
  for i in np.flatnonzero((first < last) & (sizes > 0)).tolist():
    edges = np.arange(first[i], last[i] + 2) * ring.local_length
    counts = np.diff(edges.clip(starts[i], ends[i]))
    groups[i] = counts
    work[first[i] : last[i] + 1] += ring.uneven(counts)
  return Assignment(first, groups, work)


def members(
  counts: Int[np.ndarray, " D"], spread: str
) -> Int[np.ndarray, " _"]:
  """Index of the shard among a document's shards, of each token; int64 [n]."""
  size, degree = int(counts.sum()), len(counts)
  runs = np.repeat(np.arange(degree), counts)
  if spread == "run":
    return runs
  if counts[0] - counts[-1] <= 1 and (np.diff(counts) <= 0).all():
    return np.arange(size) % degree
  # A shard with fewer tokens has them further apart.
  nth = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
  return runs[np.argsort((2 * nth + 1) / counts[runs], kind="stable")]
