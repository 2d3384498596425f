"""Index of cached token blocks, by instance, as a router knows them.

Guarantees: the index is the result of each instance's events, in their order:
an event that comes twice counts once, one that comes too early waits for those
before it, and `behind` names the event from which an instance's log has to be
replayed. An instance that restarts has no blocks until its new log reports
them.
Cost: a dict lookup for each block and event; a match stops at the first
block that no instance has.
Memory: a set of names for each block that any instance has.

A key is a hash of a block's tokens and of all before them, so that a key names
its whole prefix. The index may be out of date by the events in flight: an
instance that fetches a block may not find it, and then computes it.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, section 6.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from ringjax.checks import integer, one_of, positive_int
from ringjax.serve.prefix.prefix_tree import GroupSpec, PrefixTree, next_digest

# "all" replaces an instance's set of blocks: at the beginning of a log, or in a
# replay of a log whose first events were dropped.
EVENTS = ("add", "remove", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockEvent:
  """A change of an instance's set of cached blocks.

  Attributes:
    instance: Name of the instance.
    epoch: Number that grows with each restart of the instance.
    number: Sequence number in this epoch, from 0.
    kind: Kind of change, one of `EVENTS`.
    keys: Keys of the blocks.
  """

  instance: str
  epoch: int
  number: int
  kind: str
  keys: tuple[Hashable, ...]

  def __post_init__(self) -> None:
    one_of("kind", self.kind, EVENTS)
    integer("epoch", self.epoch, least=0)
    integer("number", self.number, least=0)


class BlockLog:
  """Log of an instance's block changes: the engine's side.

  Attributes:
    instance: Name of the instance.
    epoch: Epoch of its events.
  """

  def __init__(
    self,
    instance: str,
    *,
    epoch: int = 0,
    most: int = 1024,
    send: Callable[[BlockEvent], object] = lambda event: None,
  ):
    """Begin a log without blocks, and send its first event.

    Args:
      instance: Name of the instance.
      epoch: Number larger than that of any earlier log of the instance, such
        as its start time.
      most: Number of recent events that are kept for replays.
      send: Function called with each event, in order.
    """
    self.instance, self.epoch = instance, integer("epoch", epoch, least=0)
    self._send = send
    self._keys: dict[Hashable, None] = {}
    self._number = 0
    self._recent: collections.deque[BlockEvent] = collections.deque(
      maxlen=positive_int("most", most)
    )
    self._lock = threading.RLock()
    self._tell("all", ())

  def add(self, keys: Iterable[Hashable]) -> None:
    """Add blocks to the instance's set."""
    with self._lock:
      new = tuple(key for key in dict.fromkeys(keys) if key not in self._keys)
      self._keys.update(dict.fromkeys(new))
      if new:
        self._tell("add", new)

  def remove(self, keys: Iterable[Hashable]) -> None:
    """Remove blocks from the instance's set."""
    with self._lock:
      removed = tuple(key for key in dict.fromkeys(keys) if key in self._keys)
      for key in removed:
        del self._keys[key]
      if removed:
        self._tell("remove", removed)

  def update(self, keys: Collection[Hashable]) -> None:
    """Replace the instance's set; only changes are sent."""
    with self._lock:
      current_keys = set(keys)
      self.remove([key for key in self._keys if key not in current_keys])
      self.add(keys)

  def replay(self, number: int) -> list[BlockEvent]:
    """Events from a number on, or one "all" event if some were dropped."""
    with self._lock:
      replayed = [event for event in self._recent if event.number >= number]
      if number >= self._number or (replayed and replayed[0].number == number):
        return replayed
      # One replacement, with the last event's number, has the same effect.
      return [self._event(self._number - 1, "all", tuple(self._keys))]

  def _tell(self, kind: str, keys: tuple[Hashable, ...]) -> None:
    event = self._event(self._number, kind, keys)
    self._number += 1
    self._recent.append(event)
    self._send(event)

  def _event(
    self, number: int, kind: str, keys: tuple[Hashable, ...]
  ) -> BlockEvent:
    return BlockEvent(
      instance=self.instance,
      epoch=self.epoch,
      number=number,
      kind=kind,
      keys=keys,
    )


@dataclasses.dataclass
class _Heard:
  """State of the index for one instance."""

  epoch: int
  next_number: int = 0
  keys: set[Hashable] = dataclasses.field(default_factory=set)
  early_events: dict[int, BlockEvent] = dataclasses.field(default_factory=dict)


class BlockIndex:
  """Maps blocks to the instances that have them: the router's side.

  Thread-safe.
  """

  def __init__(self) -> None:
    self._owners: dict[Hashable, set[str]] = {}
    self._heard: dict[str, _Heard] = {}
    self._lock = threading.RLock()

  def apply(self, event: BlockEvent) -> bool:
    """Apply an event, or keep it until the events before it have come.

    Returns:
      Whether all events of its instance up to this one have come. If not, call
      the instance's `BlockLog.replay` with the number that `behind` returns.
    """
    with self._lock:
      heard = self._heard.get(event.instance)
      if heard is None or event.epoch > heard.epoch:
        self.forget(event.instance)
        heard = self._heard[event.instance] = _Heard(event.epoch)
      if event.epoch < heard.epoch or event.number < heard.next_number:
        return True
      if event.kind == "all":
        # It includes the effect of all earlier events.
        heard.early_events = {
          n: early_event
          for n, early_event in heard.early_events.items()
          if n > event.number
        }
        heard.next_number = event.number
      heard.early_events[event.number] = event
      while heard.next_number in heard.early_events:
        self._apply_event(heard, heard.early_events.pop(heard.next_number))
        heard.next_number += 1
      return not heard.early_events

  def behind(self) -> dict[str, int]:
    """Number of the first missing event, by instance with later events."""
    with self._lock:
      return {
        name: heard.next_number
        for name, heard in self._heard.items()
        if heard.early_events
      }

  def catch_up(self, log: BlockLog) -> None:
    """Apply the missing events from an instance's log."""
    with self._lock:
      heard = self._heard.get(log.instance)
      same_epoch = heard is not None and heard.epoch == log.epoch
      number = heard.next_number if heard is not None and same_epoch else 0
    for event in log.replay(number):
      self.apply(event)

  def forget(self, instance: str) -> None:
    """Remove an instance and its blocks."""
    with self._lock:
      heard = self._heard.pop(instance, None)
      for key in () if heard is None else heard.keys:
        self._disown(instance, key)

  def instances(self) -> tuple[str, ...]:
    """Sorted names of the instances that have sent events."""
    with self._lock:
      return tuple(sorted(self._heard))

  def owners(self, key: Hashable) -> tuple[str, ...]:
    """Sorted names of the instances that have a block."""
    with self._lock:
      return tuple(sorted(self._owners.get(key, ())))

  def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
    """Number of leading blocks that each instance has without a gap.

    Args:
      keys: Keys of a prompt's blocks, first to last.

    Returns:
      Counts of the instances that have at least the first block, by name.
    """
    num_blocks: dict[str, int] = {}
    with self._lock:
      candidates: set[str] | None = None
      for n, key in enumerate(keys):
        owners = self._owners.get(key, set())
        candidates = set(owners) if candidates is None else candidates & owners
        if not candidates:
          break
        num_blocks.update(dict.fromkeys(candidates, n + 1))
    return num_blocks

  def cached_tokens(
    self, keys: Sequence[Hashable], block: int
  ) -> Callable[[str], int]:
    """`RoutedRequest.cached_tokens` of a prompt at this time.

    Args:
      keys: Keys of the prompt's full blocks.
      block: Block size in tokens.
    """
    positive_int("block", block)
    num_blocks = self.match(keys)
    return lambda name: block * num_blocks.get(name, 0)

  def _apply_event(self, heard: _Heard, event: BlockEvent) -> None:
    if event.kind == "all":
      for key in heard.keys.difference(event.keys):
        self._disown(event.instance, key)
      heard.keys = set()
    if event.kind == "remove":
      for key in event.keys:
        self._disown(event.instance, key)
      heard.keys.difference_update(event.keys)
      return
    heard.keys.update(event.keys)
    for key in event.keys:
      self._owners.setdefault(key, set()).add(event.instance)

  def _disown(self, instance: str, key: Hashable) -> None:
    owners = self._owners.get(key)
    if owners is not None:
      owners.discard(instance)
      if not owners:
        del self._owners[key]


# ---------------------------------------------------------------------------
# Keys of the blocks of engines
# ---------------------------------------------------------------------------


def block_keys(
  tokens: Int[np.ndarray, " n"],
  block: int,
  *,
  salt: str = "",
  adapter: str = "",
) -> list[bytes]:
  """Keys of a prompt's full blocks, equal to those of `tree_keys`.

  Args:
    tokens: Token ids of the prompt, int32 [n].
    block: Block size in tokens, the page size of the engines.
    salt: Salt of the request, as `Engine.prefix_salt` returns it.
    adapter: Adapter name of the request.
  """
  tree = PrefixTree((GroupSpec(pages=1),), positive_int("block", block))
  digest, keys = tree.root(salt, adapter).digest, []
  for block_tokens in tree.pieces(tokens):
    digest = next_digest(digest, block_tokens)
    keys.append(digest)
  return keys


def short_key(key: bytes) -> str:
  """First half of a key as a hex string: 128 bits tell blocks apart."""
  return key.hex()[:32]


def tree_keys(tree: PrefixTree) -> list[bytes]:
  """Keys of the blocks that an engine has cached, for `BlockLog.update`.

  These are blocks whose keys and values are computed, and whose pages no group
  of layers has released. Call it where the engine cannot change them, in
  `Engine.between_steps`.
  """
  return [
    block.digest
    for block in tree.blocks()
    if block.ready and all(page is not None for page in block.pages)
  ]
