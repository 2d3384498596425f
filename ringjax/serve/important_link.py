"""Prefixes in a store, of which an engine's rows read what matters: IMPRESS.

Guarantees: no row finds what another one computed behind a part of a prefix:
such a row's pages are its own. What is kept of a prefix is a function of the
prefix and of the tokens behind it; with a share of 1 the pages that come back
have the bits that they had. What the store does cannot make a request fail: a
row whose prefix lost a part is computed.
Cost: a prefix is written once, when its prompt has been read. For a row whose
prefix is in the store a thread reads the probe heads' keys and the chunks with
important tokens, and passes the tokens behind the prefix through the layers
once more, while other rows go on; a few programs for each number of segments
and for each 64 tokens behind them.
Memory: on the host the kept pages of each row that has some, until it ends.
Lossy: what is not kept is left out of the softmax of question and answer.

A prefix is a chain of segments, each a `StoredNode` named by all tokens up to
its end, so that prompts with a common beginning share them. The tokens that a
layer's head keeps differ from those of others; there are equally many in all,
whole pages of them, and they are stored in the last pages of the prefix. A kept
key has its rotation, and all are before the question, so that a call needs no
other positions or masks than those of any row: pages before them are missing.
Ref: Chen et al. 2025, IMPRESS (FAST).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import logging
import math
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError
from ringjax.infer.contexts.important_prefix import (
  softmax_layers,
  through_layers,
)
from ringjax.kv.page_pool import PagePool
from ringjax.models.transformer import Transformer
from ringjax.serve.prefix_tree import PrefixBlock, next_digest
from ringjax.serve.scheduler import Scheduler, ServedRow, StoredPrefix
from ringjax.serve.store_link import StoreLink, read_pages
from ringjax.store import (
  Impress,
  ImpressCounters,
  MissingChunk,
  NodeChain,
  Store,
  StoredNode,
)

if TYPE_CHECKING:
  from ringjax.serve.engine import EngineCounters

_LOG = logging.getLogger("ringjax.serve")
# Tokens behind a prefix at most; with more of them reading is computing. They
# are filled up to a multiple.
_MOST_BEHIND, _MULTIPLE = 1024, 64
# Seconds that a step waits at most where there is nothing else to do, and
# copies of segments on their way to the host.
_WAIT, _MOST_COPIES = 0.05, 8
# Nodes whose order and importance are remembered, and by how many requests
# each is packed anew.
_NODES, _PACK_AT = 256, (1, 8, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportantShare:
  """The part of stored prefixes that an engine reads, and how it is chosen.

  Attributes:
    share: Part of a prefix's tokens to keep, above 0, at most 1; rounded up to
      whole pages.
    alpha: Exponent of the threshold above which probes are believed, see
      `rj.store.overlap_threshold`.
    probes: Number of probe heads, the first ones; of models with fewer, all. Or
      those of each layer, int [L, P].
    segment: Tokens of a segment, a multiple of the page: what a prefix is
      stored in.
    chunk: Tokens of a chunk, which is read whole.

  Raises:
    OptionError: a value is out of its range.
  """

  share: int | float = 0.25
  alpha: int | float = 0.6
  probes: int | Int[np.ndarray, "L P"] = 3
  segment: int = 512
  chunk: int = 32

  def __post_init__(self) -> None:
    number("share", self.share, above=0, most=1)
    number("alpha", self.alpha, least=0)
    positive_int("segment", self.segment)
    positive_int("chunk", self.chunk)


def share_of(
  important: object, store: object, adapters: object
) -> ImportantShare | None:
  """The `ImportantShare` of an engine's `important`.

  Args:
    important: A part, an `ImportantShare`, or None.
    store: The engine's store, or None.
    adapters: The engine's adapters, if it has some.

  Raises:
    OptionError: A part out of its range, or one without a store or with
      adapters.
  """
  if important is None:
    return None
  if not isinstance(important, ImportantShare):
    share = number("important", important, above=0, most=1)
    important = ImportantShare(share=share)
  if store is None:
    raise OptionError(
      "important",
      f"{important.share}, for an engine without a store",
      "a store, whose prefixes are read in part",
      "pass store=rj.store.Store(disk=(folder, 1 << 33)) too",
    )
  if adapters:
    raise OptionError(
      "important",
      f"{important.share}, for an engine with adapters",
      "a model whose queries are the same for all requests",
      "leave adapters or important out",
    )
  return important


class _Choice:
  """The part of a prefix that a row reads, on its way."""

  def __init__(self, work: concurrent.futures.Future[StoredPrefix | None]):
    self.work = work


@dataclasses.dataclass(eq=False)
class _NodeUse:
  """A node, how many requests asked for it, and what they looked at."""

  node: StoredNode
  count: int = 0
  importance: Any = 0.0


class ImportantLink(StoreLink):
  """Stores prefixes by layers, and gives rows the important part of them."""

  def __init__(
    self,
    store: Store,
    model: Transformer,
    pool: PagePool,
    scheduler: Scheduler,
    counters: EngineCounters,
    longest: int,
    how: ImportantShare,
  ):
    """Sets itself as the source of a scheduler.

    Args:
      store: Store of segments.
      model: Model whose keys are in the pool.
      pool: Pages of the engine.
      scheduler: Scheduler of the rows.
      counters: Counters of the engine.
      longest: Tokens of a row at most.
      how: Share that is kept, and how it is chosen.

    Raises:
      InputTypeError, OptionError, ConfigError: a model, or pages, of which no
        part can be read on its own.
    """
    page = scheduler.tree.page
    if how.segment % page:
      raise OptionError(
        "important",
        f"segments of {how.segment} tokens",
        f"whole pages of {page}",
        f"pass rj.serve.ImportantShare(segment={16 * page})",
      )
    if pool.kind.codec is not None or pool.kind.unrotated:
      raise OptionError(
        "cache_kind",
        f"{pool.kind}, with important=",
        "keys as attention reads them",
        "leave cache_kind out",
      )
    if pool.mesh is not None and pool.mesh.size > 1:
      raise OptionError(
        "mesh",
        f"{pool.mesh.size} devices, with important=",
        "one device",
        "leave mesh or important out",
      )
    self._programs = softmax_layers(model)
    super().__init__(store, model, pool, scheduler, counters, longest)
    # Pages do not go to the store one by one.
    self._tree.on_evict = None
    self.how, self._dtype = how, np.dtype(pool.dtype)
    self._layers = [(x.kind, x.index) for x in self._programs.layers]
    self._kinds = pool.groups[0].kinds
    mixer: Any = self._programs.layers[0].spec.attention
    self._heads = mixer.kv_heads
    self._widths = mixer.head_dim, mixer.value
    self._pages_each = how.segment // page
    self._nodes: collections.OrderedDict[bytes, _NodeUse] = (
      collections.OrderedDict()
    )
    # Of rows that read their prompt: the names of its segments, and how many
    # have been written or are about to be.
    self._reading: weakref.WeakKeyDictionary[ServedRow, list[bytes]] = (
      weakref.WeakKeyDictionary()
    )
    self._noted: weakref.WeakKeyDictionary[ServedRow, int] = (
      weakref.WeakKeyDictionary()
    )
    # Segments that are computed once the calls under way are done.
    self._computed: dict[bytes, np.ndarray] = {}
    self._writing: dict[bytes, concurrent.futures.Future[None]] = {}
    # Segments that are to be packed, by name: a node and its importance.
    self._unpacked: dict[bytes, tuple[StoredNode, np.ndarray]] = {}
    self._closing = False
    # One choice for all rows of a prompt.
    self._choices: weakref.WeakValueDictionary[bytes, _Choice] = (
      weakref.WeakValueDictionary()
    )

  def _segments(
    self, prompt: np.ndarray, root: PrefixBlock, most: int
  ) -> list[bytes]:
    """Names of the first segments of a prompt, of `most` pages at most."""
    names, at = [], root.digest
    most -= most % self._pages_each
    for n, piece in enumerate(self._tree.pieces(prompt, most), 1):
      at = next_digest(at, piece)
      if n % self._pages_each == 0:
        names.append(hashlib.sha256(b"segment" + self._names[0] + at).digest())
    return names

  def _mark(self, name: bytes) -> bytes:
    """Key of a block that says that all of a segment was written before."""
    facts = self.how.segment, self.how.chunk, repr(self.how.probes)
    return hashlib.sha256(b"written" + repr(facts).encode() + name).digest()

  def _use(self, name: bytes) -> _NodeUse:
    """A node of the store, and what requests looked at."""
    use = self._nodes.pop(name, None)
    use = _NodeUse(self._node(name)) if use is None else use
    self._nodes[name] = use
    while len(self._nodes) > _NODES:
      self._nodes.popitem(last=False)
    return use

  def _node(self, name: bytes, arrays: Any = None) -> StoredNode:
    """A segment in the store: written, if its keys and values are given."""
    if arrays is None:
      shape = len(self._layers), self._heads, self.how.segment
      arrays = [
        jax.ShapeDtypeStruct((*shape, x), self._dtype) for x in self._widths
      ]
    return StoredNode(
      self.store, name, *arrays, chunk=self.how.chunk, probes=self.how.probes
    )

  # -------------------------------------------------------------------------
  # Out
  # -------------------------------------------------------------------------

  def warm_up(self, pool: PagePool) -> PagePool:
    """The same pool, after each program of a copy ran once."""
    read_pages(pool, 0, np.zeros((1, self._pages_each), np.int32))
    return super().warm_up(pool)

  def move(self, pool: PagePool) -> PagePool:
    """Copies segments that the calls before have computed, then fills pages
    that come; call it behind a plan and before its calls."""
    self._export(pool, most=_MOST_COPIES)
    self._note()
    return self._import(pool)

  def _note(self) -> None:
    """Notes segments that the plan's calls complete."""
    for row in self._scheduler.running:
      if row is None or row.apart is not None or not row.share or row.parked:
        continue
      whole = row.prompt.size // self.how.segment
      if self._noted.get(row) == whole:
        continue
      if row not in self._reading:
        root = self._tree.root(row.salt, row.adapter)
        pages = whole * self._pages_each
        self._reading[row] = self._segments(row.prompt, root, pages)
      names = self._reading[row]
      end = min(whole, row.computed // self.how.segment)
      for n in range(self._noted.get(row, 0), end):
        name = names[n]
        known = name in self._writing or self._mark(name) in self.store
        if not known and name not in self._computed:
          first = n * self._pages_each
          table = self._scheduler.tables[0][row.slot, 0]
          self._computed[name] = table[first:][: self._pages_each].copy()
      self._noted[row] = end

  def _export(self, pool: PagePool, *, most: int | None) -> None:
    for name, pages in self._computed.items():
      if most is not None and len(self._writing) >= most:
        self._counters.pages_lost += pages.size
        continue
      arrays = read_pages(pool, 0, pages[None])
      for x in arrays:
        x.copy_to_host_async()
      self._writing[name] = self._copier.submit(self._write, name, arrays)
      self._counters.pages_out += pages.size
    self._computed = {}
    self._writing = {k: x for k, x in self._writing.items() if not x.done()}

  def _write(self, name: bytes, held: Any) -> None:
    """Gives the store a segment; what fails is as if it had no room."""
    try:
      stored = iter([np.asarray(x) for x in held])
      by_kind = {kind: (next(stored), next(stored)) for kind in self._kinds}
      keys, values = (
        np.stack(
          [_tokens(by_kind[kind][part][n], width) for kind, n in self._layers]
        )
        for part, width in enumerate(self._widths)
      )
      if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        return
      self._nodes.pop(name, None)
      self._node(name, (keys, values))
      self.store.put(self._mark(name), b"written")
    except Exception:
      _LOG.warning("a segment of a prefix was not stored", exc_info=True)

  def export_all(self, pool: PagePool) -> None:
    """Copies what is computed, and waits until the store has it."""
    self._export(pool, most=None)
    for write in self._writing.values():
      write.result()

  def close(self) -> None:
    """Lets go of the tree and ends the thread."""
    for choice in self._choices.values():
      choice.work.cancel()
    self._closing = True
    super().close()

  # -------------------------------------------------------------------------
  # In
  # -------------------------------------------------------------------------

  def look(
    self, row: ServedRow, root: PrefixBlock, count: int, most: int
  ) -> StoredPrefix | None:
    """See `BlockSource`: the important part of what the store has, if that is
    more than the tree has and not less than what is behind it."""
    if row.store_state is None:
      names = self._segments(row.prompt, root, most)
      there = [self._mark(name) in self.store for name in names]
      whole = [*there, False].index(False)
      size = whole * self.how.segment
      behind = row.prompt.size - size
      few = behind <= min(size, _MOST_BEHIND)
      if whole * self._pages_each <= count or not few:
        return StoredPrefix(count=count, payloads={})
      row.store_state = self._chosen(row.prompt, names[:whole])
    work = row.store_state.work
    if not work.done():
      return None
    stored = None if work.cancelled() else work.result()
    return stored or StoredPrefix(count=count, payloads={})

  def wait(self, rows: Iterable[ServedRow]) -> None:
    """Waits a moment for what a row waits for, if there is one."""
    for row in rows:
      if row.held and row.store_state is not None:
        concurrent.futures.wait([row.store_state.work], _WAIT)
        return

  def _chosen(self, prompt: np.ndarray, names: list[bytes]) -> _Choice:
    """What a prompt's rows read; begun, if no other row has."""
    size = len(names) * self.how.segment
    name = hashlib.sha256(names[-1] + prompt[size:].tobytes()).digest()
    choice = self._choices.get(name)
    if choice is None:
      work = self._copier.submit(self._choose, names, prompt[size:])
      choice = self._choices[name] = _Choice(work)
    return choice

  def _choose(
    self, names: list[bytes], question: np.ndarray
  ) -> StoredPrefix | None:
    """The important part of a chain of segments; None: it can't be had."""
    # A node whose chunks another process has packed anew has another order.
    for again in (False, True):
      try:
        if again:
          for name in names:
            self._nodes.pop(name, None)
        return self._read(names, question)
      except MissingChunk:
        continue
      except Exception:
        _LOG.warning("a prefix in the store was not read", exc_info=True)
        return None
    # Who computes it writes it anew.
    self.store.remove([self._mark(name) for name in names])
    return None

  def _read(self, names: list[bytes], question: np.ndarray) -> StoredPrefix:
    page, how = self._tree.page, self.how
    uses = [self._use(name) for name in names]
    chain = NodeChain([use.node for use in uses])
    count = len(names) * self._pages_each
    pages = max(1, math.ceil(how.share * count - 1e-6))
    work = Impress(chain, keep=pages / count, alpha=how.alpha)
    kept = []

    def attend(number: int, q: Any, k: Any, v: Any, scale: float) -> Any:
      mixed, tokens = work.attend(
        number, q, k, v, scale=scale, real=question.size
      )
      kept.append(tokens)
      return mixed

    through_layers(
      self._programs,
      question,
      chain.tokens,
      self._dtype,
      attend,
      multiple=_MULTIPLE,
    )
    payloads = self._payloads(kept, count - pages, count)
    self._count(work.counters, chain)
    for n, use in enumerate(uses):
      cut = slice(n * how.segment, (n + 1) * how.segment)
      new = work.importance[:, cut]
      use.count += 1
      use.importance = use.importance + (new - use.importance) / use.count
      if use.count in _PACK_AT and how.share < 1:
        self._unpacked[names[n]] = use.node, use.importance
    if self._unpacked:
      self._copier.submit(self._pack)
    assert pages * page == kept[0].tokens.shape[1]
    return StoredPrefix(count=count, payloads=payloads, apart=True)

  def _pack(self) -> None:
    """Packs what requests looked at of a segment into the same chunks; the next
    segment's turn comes behind whatever waits by then."""
    if self._closing or not self._unpacked:
      return
    node, importance = self._unpacked.pop(next(iter(self._unpacked)))
    # Who asks for it next finds out that a chunk is missing.
    with contextlib.suppress(MissingChunk):
      node.reorder(importance)
    if self._unpacked and not self._closing:
      self._copier.submit(self._pack)

  def _payloads(
    self, kept: list[Any], first: int, end: int
  ) -> dict[tuple[int, int], bytes]:
    """The bytes of pages from `first` to `end` that hold the kept tokens."""
    page, arrays = self._tree.page, []
    for kind in self._kinds:
      of_kind = [
        x for x, (k, _) in zip(kept, self._layers, strict=True) if k == kind
      ]
      arrays += [np.stack([getattr(x, p) for x in of_kind]) for p in _PARTS]
    payloads = {}
    for n in range(first, end):
      at = (n - first) * page
      parts = []
      for x, (shape, dtype) in zip(arrays, self._shapes[0], strict=True):
        # On a TPU zeros are behind the numbers of a key.
        whole = np.zeros(shape, dtype)
        whole[..., : x.shape[-1]] = x[:, :, at : at + page]
        parts.append(whole.tobytes())
      payloads[n, 0] = b"".join(parts)
    return payloads

  def _count(self, did: ImpressCounters, chain: NodeChain) -> None:
    """Counts what a prefix took."""
    counters, each = self._counters, np.dtype(self._dtype).itemsize
    of_probes = chain.layers * chain.probes * chain.tokens * self._widths[0]
    all_of_it = chain.layers * chain.heads * chain.tokens * sum(self._widths)
    counters.important_bytes += did.chunk_bytes
    counters.important_probe_bytes += of_probes * each
    left = all_of_it * each - did.chunk_bytes
    counters.important_bytes_left += max(0, left)


_PARTS = "keys", "values"


def _tokens(
  x: Shaped[np.ndarray, "n K P _"], width: int
) -> Shaped[np.ndarray, "K m H"]:
  """Pages of one layer as the tokens that they hold."""
  return np.concatenate(list(x[..., :width]), axis=1)
