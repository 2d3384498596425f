"""Which instances have which blocks of tokens, as a router knows it.

Guarantees: the index is what the events of each instance say, in their order:
an event that comes twice counts once, one that comes too early waits for those
before it, and `behind` says from where an instance's log has to be replayed.
An instance that begins anew has no blocks until its new log says so.
Cost: a look into a dict for each block and event; a match stops at the first
block that no instance has.
Memory: a set of names for each block that any instance has.

A key is a hash of a block's tokens and of all before them, so that a key names
its whole prefix. What the index says may be out of date by the events under
way: who fetches a block may not find it, and computes it.
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
from ringjax.serve.prefix_tree import GroupSpec, PrefixTree, next_digest

# "all" replaces what an instance has: the beginning of a log, or a replay of
# one that has forgotten its beginning.
EVENTS = ("add", "remove", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockEvent:
  """A change of what an instance has.

  Attributes:
    instance: its name.
    epoch: grows when the instance begins anew.
    number: of the event in this epoch, from 0.
    kind: of `EVENTS`.
    keys: of the blocks.
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
  """What an instance tells of its blocks: the side of the engine.

  Attributes:
    instance: its name.
    epoch: of its events.
  """

  def __init__(
    self,
    instance: str,
    *,
    epoch: int = 0,
    most: int = 1024,
    send: Callable[[BlockEvent], object] = lambda event: None,
  ):
    """Without blocks, of which the first event tells.

    Args:
      instance: name.
      epoch: larger than the one of any log that the instance had before, such
        as the time at which it began.
      most: events that are kept for replays.
      send: called with each event, in their order.
    """
    self.instance, self.epoch = instance, integer("epoch", epoch, least=0)
    self._send = send
    self._keys: dict[Hashable, None] = {}
    self._number = 0
    self._kept: collections.deque[BlockEvent] = collections.deque(
      maxlen=positive_int("most", most)
    )
    self._lock = threading.RLock()
    self._tell("all", ())

  def add(self, keys: Iterable[Hashable]) -> None:
    """Blocks that the instance has from now on."""
    with self._lock:
      new = tuple(k for k in dict.fromkeys(keys) if k not in self._keys)
      self._keys.update(dict.fromkeys(new))
      if new:
        self._tell("add", new)

  def remove(self, keys: Iterable[Hashable]) -> None:
    """Blocks that the instance does not have any more."""
    with self._lock:
      gone = tuple(k for k in dict.fromkeys(keys) if k in self._keys)
      for key in gone:
        del self._keys[key]
      if gone:
        self._tell("remove", gone)

  def update(self, keys: Collection[Hashable]) -> None:
    """All blocks that the instance has; tells what changed."""
    with self._lock:
      have = set(keys)
      self.remove([k for k in self._keys if k not in have])
      self.add(keys)

  def replay(self, number: int) -> list[BlockEvent]:
    """The events from a number on; of those forgotten, what they came to."""
    with self._lock:
      kept = [one for one in self._kept if one.number >= number]
      if number >= self._number or (kept and kept[0].number == number):
        return kept
      # A replacement in the place of the last event is all that counts.
      return [self._event(self._number - 1, "all", tuple(self._keys))]

  def _tell(self, kind: str, keys: tuple[Hashable, ...]) -> None:
    event = self._event(self._number, kind, keys)
    self._number += 1
    self._kept.append(event)
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
  """What the index knows of an instance."""

  epoch: int
  next_number: int = 0
  keys: set[Hashable] = dataclasses.field(default_factory=set)
  early: dict[int, BlockEvent] = dataclasses.field(default_factory=dict)


class BlockIndex:
  """Instances by the blocks that they have: the side of the router.

  Several threads may call.
  """

  def __init__(self) -> None:
    self._owners: dict[Hashable, set[str]] = {}
    self._heard: dict[str, _Heard] = {}
    self._lock = threading.RLock()

  def apply(self, event: BlockEvent) -> bool:
    """Takes an event.

    Returns:
      Whether all events of its instance up to this one have come. If not, call
      the instance's `BlockLog.replay` with what `behind` says.
    """
    with self._lock:
      heard = self._heard.get(event.instance)
      if heard is None or event.epoch > heard.epoch:
        self.forget(event.instance)
        heard = self._heard[event.instance] = _Heard(event.epoch)
      if event.epoch < heard.epoch or event.number < heard.next_number:
        return True
      if event.kind == "all":
        # Whatever came before it is in it.
        heard.early = {
          n: one for n, one in heard.early.items() if n > event.number
        }
        heard.next_number = event.number
      heard.early[event.number] = event
      while heard.next_number in heard.early:
        self._take(heard, heard.early.pop(heard.next_number))
        heard.next_number += 1
      return not heard.early

  def behind(self) -> dict[str, int]:
    """By instance, the first event that has not come though later ones have."""
    with self._lock:
      return {
        name: heard.next_number
        for name, heard in self._heard.items()
        if heard.early
      }

  def catch_up(self, log: BlockLog) -> None:
    """Takes what is missing out of an instance's log."""
    with self._lock:
      heard = self._heard.get(log.instance)
      same = heard is not None and heard.epoch == log.epoch
      number = heard.next_number if heard is not None and same else 0
    for event in log.replay(number):
      self.apply(event)

  def forget(self, instance: str) -> None:
    """An instance has gone, and its blocks with it."""
    with self._lock:
      heard = self._heard.pop(instance, None)
      for key in () if heard is None else heard.keys:
        self._disown(instance, key)

  def instances(self) -> tuple[str, ...]:
    """Names of those that have told of their blocks."""
    with self._lock:
      return tuple(sorted(self._heard))

  def owners(self, key: Hashable) -> tuple[str, ...]:
    """Names of the instances that have a block."""
    with self._lock:
      return tuple(sorted(self._owners.get(key, ())))

  def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
    """By instance, how many of these blocks it has without a gap.

    Args:
      keys: of a prompt's blocks, first to last.

    Returns:
      The instances that have at least the first one.
    """
    found: dict[str, int] = {}
    with self._lock:
      left: set[str] | None = None
      for n, key in enumerate(keys):
        have = self._owners.get(key, set())
        left = set(have) if left is None else left & have
        if not left:
          break
        found.update(dict.fromkeys(left, n + 1))
    return found

  def cached_tokens(
    self, keys: Sequence[Hashable], block: int
  ) -> Callable[[str], int]:
    """`RoutedRequest.cached_tokens` of a prompt, as of now.

    Args:
      keys: of its whole blocks.
      block: tokens of a block.
    """
    positive_int("block", block)
    found = self.match(keys)
    return lambda name: block * found.get(name, 0)

  def _take(self, heard: _Heard, event: BlockEvent) -> None:
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
# Engines
# ---------------------------------------------------------------------------


def block_keys(
  tokens: Int[np.ndarray, " n"],
  block: int,
  *,
  salt: str = "",
  adapter: str = "",
) -> list[bytes]:
  """The keys of the whole blocks of a prompt, as `tree_keys` has them.

  Args:
    tokens: int32.
    block: tokens of a block, the pages of the engines.
    salt: of the request, as `Engine.prefix_salt` returns it.
    adapter: of the request.
  """
  tree = PrefixTree((GroupSpec(pages=1),), positive_int("block", block))
  digest, found = tree.root(salt, adapter).digest, []
  for piece in tree.pieces(tokens):
    digest = next_digest(digest, piece)
    found.append(digest)
  return found


def short_key(key: bytes) -> str:
  """Half of a key as a text, for messages: 128 bits tell blocks apart."""
  return key.hex()[:32]


def tree_keys(tree: PrefixTree) -> list[bytes]:
  """The keys of the blocks that an engine has, for `BlockLog.update`.

  Blocks whose keys and values are computed, of which no group of layers has
  let the page go. Call it where the engine may not change them, in
  `Engine.between_steps`.
  """
  return [
    block.digest
    for block in tree.blocks()
    if block.ready and all(page is not None for page in block.pages)
  ]
