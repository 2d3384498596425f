"""Stored prefixes of which rows read the important part: IMPRESS.

Guarantees: keys that a row computed after a part of a prefix are not shared:
such a row's pages are private. The kept tokens of a prefix are a function of
the prefix and of the tokens after it; with a share of 1 the pages that come
back have the bits that they had. A failure of the store cannot make a request
fail: a row whose prefix lost a part is computed.
Cost: a prefix is written once, when its prompt has been computed. For a row
whose prefix is in the store a thread reads the probe heads' keys and the chunks
with important tokens, and passes the tokens after the prefix through the layers
once more, while other rows continue; a few programs for each number of segments
and for each 64 tokens after them.
Memory: on the host the kept pages of each such row, until it ends.
Lossy: tokens that are not kept are left out of the softmax of question and
answer.

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
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.transformer import Transformer
from ringjax.serve.prefix.page_copies import read_pages
from ringjax.serve.prefix.prefix_tree import PrefixBlock, next_digest
from ringjax.serve.prefix.store_link import StoreLink
from ringjax.serve.scheduler import Scheduler, ServedRow, StoredPrefix
from ringjax.store import (
  Impress,
  ImpressCounters,
  MissingChunk,
  NodeChain,
  Store,
  StoredNode,
)
from ringjax.store.impress.importance import heads_of_layers

if TYPE_CHECKING:
  from ringjax.serve.engine import EngineCounters

_LOG = logging.getLogger("ringjax.serve")
# Maximum tokens after a prefix (with more, computing the prefix is no more
# expensive than choosing), and the multiple to which they are padded.
_MOST_BEHIND, _MULTIPLE = 1024, 64
# Maximum seconds that a step waits if it has no other work; maximum copies of
# segments in flight to the host.
_WAIT, _MOST_COPIES = 0.05, 8
# Number of nodes whose order and importance are kept in memory; numbers of
# requests after which a node is packed again.
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
      heads, int [P] of every layer or [L, P], see
      `rj.infer.contexts.probe_heads`.
    segment: Tokens of a segment, a multiple of the page: what a prefix is
      stored in.
    chunk: Tokens of a chunk, which is read whole.

  Raises:
    OptionError: If a value is out of range.
  """

  share: int | float = 0.25
  alpha: int | float = 0.6
  probes: int | Int[np.ndarray, "... P"] = 3
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
  """Make an `ImportantShare` of an engine's `important` argument.

  Args:
    important: A part, an `ImportantShare`, or None.
    store: The engine's store, or None.
    adapters: The engine's adapters, if it has some.

  Raises:
    OptionError: If the share is out of range, without a store or with adapters.
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
  """Part of a prefix that a row reads, in flight."""

  def __init__(self, work: concurrent.futures.Future[StoredPrefix | None]):
    self.work = work


@dataclasses.dataclass(eq=False)
class _NodeUse:
  """A node, its number of requests, and their mean importance of tokens."""

  node: StoredNode
  count: int = 0
  importance: Any = 0.0


class ImportantLink(StoreLink):
  """Stores prefixes by layers and loads the important part of them."""

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
    """Become the source of a scheduler.

    Args:
      store: Store of segments.
      model: Model whose keys are in the pool.
      pool: Pages of the engine.
      scheduler: Scheduler of the rows.
      counters: Counters of the engine.
      longest: Maximum number of tokens of a row.
      how: Share to keep and settings of the choice.

    Raises:
      InputTypeError, OptionError, ConfigError: If parts of the model's keys or
        of the pages can't be read separately, or probes are not its heads.
    """
    page = scheduler.tree.page
    if how.segment % page:
      raise OptionError(
        "important",
        f"segments of {how.segment} tokens",
        f"whole pages of {page}",
        f"pass rj.serve.ImportantShare(segment={16 * page})",
      )
    if pool.kind.codec is not None or pool.kind.layout.unrotated:
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
    mixer: Any = self._programs.layers[0].spec.attention
    self._heads = mixer.kv_heads
    self._probes = heads_of_layers(
      how.probes, len(self._programs.layers), self._heads
    )
    super().__init__(store, model, pool, scheduler, counters, longest)
    # Single pages are not stored on eviction.
    self._tree.on_evict = None
    self.how, self._dtype = how, np.dtype(pool.dtype)
    self._page_shapes = pool.page_shapes(0)
    self._widths = mixer.head_dim, mixer.value
    self._pages_each = how.segment // page
    self._nodes: collections.OrderedDict[bytes, _NodeUse] = (
      collections.OrderedDict()
    )
    # For rows that compute their prompt: names of its segments, and the number
    # of segments that have been or will be written.
    self._reading: weakref.WeakKeyDictionary[ServedRow, list[bytes]] = (
      weakref.WeakKeyDictionary()
    )
    self._noted: weakref.WeakKeyDictionary[ServedRow, int] = (
      weakref.WeakKeyDictionary()
    )
    # Segments that are computed once the calls in flight are done.
    self._computed: dict[bytes, np.ndarray] = {}
    self._writing: dict[bytes, concurrent.futures.Future[None]] = {}
    # Segments to pack, by name: a node and its importance.
    self._unpacked: dict[bytes, tuple[StoredNode, np.ndarray]] = {}
    self._closing = False
    # All rows of a prompt share one choice.
    self._choices: weakref.WeakValueDictionary[bytes, _Choice] = (
      weakref.WeakValueDictionary()
    )

  def _segments(
    self, prompt: np.ndarray, root: PrefixBlock, most: int
  ) -> list[bytes]:
    """Names of the first segments of a prompt, up to `most` pages."""
    names, at = [], root.digest
    num_pages = most - most % self._pages_each
    for n, piece in enumerate(self._tree.pieces(prompt, num_pages), 1):
      at = next_digest(at, piece)
      if n % self._pages_each == 0:
        names.append(hashlib.sha256(b"segment" + self._names[0] + at).digest())
    return names

  def _mark(self, name: bytes) -> bytes:
    """Key of the block that marks a segment as completely written."""
    probes = self.how.probes
    if np.ndim(probes):
      # `repr` of a large array leaves heads out.
      probes = self._probes.tolist()
    facts = self.how.segment, self.how.chunk, repr(probes)
    return hashlib.sha256(b"written" + repr(facts).encode() + name).digest()

  def _use(self, name: bytes) -> _NodeUse:
    """Node of the store with its requests; the most recent ones are kept."""
    use = self._nodes.pop(name, None)
    use = _NodeUse(self._node(name)) if use is None else use
    self._nodes[name] = use
    while len(self._nodes) > _NODES:
      self._nodes.popitem(last=False)
    return use

  def _node(self, name: bytes, arrays: Any = None) -> StoredNode:
    """Node of a segment; it is written if its keys and values are given."""
    if arrays is None:
      shape = len(self._programs.layers), self._heads, self.how.segment
      arrays = [
        jax.ShapeDtypeStruct((*shape, x), self._dtype) for x in self._widths
      ]
    return StoredNode(
      self.store, name, *arrays, chunk=self.how.chunk, probes=self._probes
    )

  # -------------------------------------------------------------------------
  # Out
  # -------------------------------------------------------------------------

  def warm_up(self, pool: PagePool) -> PagePool:
    """Compile the copy programs; returns the pool unchanged."""
    read_pages(pool, 0, np.zeros((1, self._pages_each), np.int32))
    return super().warm_up(pool)

  def move(self, pool: PagePool) -> PagePool:
    """Copy segments that earlier calls computed, then fill imported pages.

    Call it after a plan and before its calls.
    """
    self._export(pool, most=_MOST_COPIES)
    self._note()
    return self._import(pool)

  def _note(self) -> None:
    """Queue segments that the plan's calls complete."""
    for row in self._scheduler.running:
      if row is None or row.apart is not None or not row.share or row.parked:
        continue
      num_segments = row.prompt.size // self.how.segment
      if self._noted.get(row) == num_segments:
        continue
      if row not in self._reading:
        root = self._tree.root(row.salt, row.adapter)
        pages = num_segments * self._pages_each
        self._reading[row] = self._segments(row.prompt, root, pages)
      names = self._reading[row]
      end = min(num_segments, row.computed // self.how.segment)
      for n in range(self._noted.get(row, 0), end):
        name = names[n]
        is_stored = name in self._writing or self._mark(name) in self.store
        if not is_stored and name not in self._computed:
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
    """Write a segment to the store; on a failure it is just not stored."""
    try:
      stored = [np.asarray(x) for x in held]
      keys, values = (
        np.stack([_tokens(x, width) for x in stored[part]])
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
    """Copy all computed segments and wait until the store has them."""
    self._export(pool, most=None)
    for write in self._writing.values():
      write.result()

  def close(self) -> None:
    """Detaches from the tree and ends the thread."""
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
    """Important part of a stored prefix; None while it is in flight.

    It is used if the store has more of the prompt than the tree, and at least
    as much as follows it.
    """
    if row.store_state is None:
      names = self._segments(row.prompt, root, most)
      is_stored = [self._mark(name) in self.store for name in names]
      num_stored = [*is_stored, False].index(False)
      size = num_stored * self.how.segment
      num_after = row.prompt.size - size
      few = num_after <= min(size, _MOST_BEHIND)
      if num_stored * self._pages_each <= count or not few:
        return StoredPrefix(count=count, payloads={})
      row.store_state = self._chosen(row.prompt, names[:num_stored])
    work = row.store_state.work
    if not work.done():
      return None
    stored = None if work.cancelled() else work.result()
    return stored or StoredPrefix(count=count, payloads={})

  def wait(self, rows: Iterable[ServedRow]) -> None:
    """Waits a moment for a choice in flight, if a row waits for one."""
    for row in rows:
      if row.held and row.store_state is not None:
        concurrent.futures.wait([row.store_state.work], _WAIT)
        return

  def _chosen(self, prompt: np.ndarray, names: list[bytes]) -> _Choice:
    """Choice for a prompt's rows; started unless another row has done so."""
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
    """Important part of a chain of segments; None if it can't be read."""
    # Another process may have packed a node: retry once with its new order.
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
        self._counters.important_failed += 1
        return None
    self._counters.important_failed += 1
    # Without their marks, the next row that computes them writes them again.
    self.store.remove([self._mark(name) for name in names])
    return None

  def _read(self, names: list[bytes], question: np.ndarray) -> StoredPrefix:
    page, options = self._tree.page, self.how
    uses = [self._use(name) for name in names]
    chain = NodeChain([use.node for use in uses])
    count = len(names) * self._pages_each
    pages = max(1, math.ceil(options.share * count - 1e-6))
    work = Impress(chain, keep=pages / count, alpha=options.alpha)
    kept_tokens = []

    def attend(
      number: int, q: jax.Array, k: jax.Array, v: jax.Array, scale: float
    ) -> jax.Array:
      mixed, tokens = work.attend(
        number, q, k, v, scale=scale, real=question.size
      )
      kept_tokens.append(tokens)
      return mixed

    through_layers(
      self._programs,
      question,
      chain.tokens,
      self._dtype,
      attend,
      multiple=_MULTIPLE,
    )
    payloads = self._payloads(kept_tokens, count - pages, count)
    self._count(work.counters, chain)
    for n, use in enumerate(uses):
      cut = slice(n * options.segment, (n + 1) * options.segment)
      new = work.importance[:, cut]
      use.count += 1
      use.importance = use.importance + (new - use.importance) / use.count
      if use.count in _PACK_AT and options.share < 1:
        self._unpacked[names[n]] = use.node, use.importance
    if self._unpacked:
      self._copier.submit(self._pack)
    assert pages * page == kept_tokens[0].tokens.shape[1]
    return StoredPrefix(count=count, payloads=payloads, apart=True)

  def _pack(self) -> None:
    """Pack the important tokens of a segment into the same chunks.

    The next segment is queued after the work that waits by then.
    """
    if self._closing or not self._unpacked:
      return
    node, importance = self._unpacked.pop(next(iter(self._unpacked)))
    # The next request of this node handles the missing chunk.
    with contextlib.suppress(MissingChunk):
      node.reorder(importance)
    if self._unpacked and not self._closing:
      self._copier.submit(self._pack)

  def _payloads(
    self, kept: list[Any], first: int, end: int
  ) -> dict[tuple[int, int], bytes]:
    """Bytes of the pages from `first` to `end` that hold the kept tokens."""
    page, arrays = self._tree.page, []
    for part in _PARTS:
      arrays.append(np.stack([getattr(x, part) for x in kept]))
    payloads = {}
    for n in range(first, end):
      at = (n - first) * page
      parts = []
      for x, (shape, dtype) in zip(arrays, self._page_shapes, strict=True):
        # On a TPU keys are padded with zeros.
        padded = np.zeros(shape, dtype)
        padded[..., : x.shape[-1]] = x[:, :, at : at + page]
        parts.append(padded.tobytes())
      payloads[n, 0] = b"".join(parts)
    return payloads

  def _count(self, did: ImpressCounters, chain: NodeChain) -> None:
    """Count the bytes that were read for a prefix."""
    counters, itemsize = self._counters, np.dtype(self._dtype).itemsize
    of_probes = chain.layers * chain.probes * chain.tokens * self._widths[0]
    all_of_it = chain.layers * chain.heads * chain.tokens * sum(self._widths)
    counters.important_bytes += did.chunk_bytes
    counters.important_probe_bytes += of_probes * itemsize
    unread_bytes = all_of_it * itemsize - did.chunk_bytes
    counters.important_bytes_left += max(0, unread_bytes)


_PARTS = "keys", "values"


def _tokens(
  x: Shaped[np.ndarray, "n K P _"], width: int
) -> Shaped[np.ndarray, "K m H"]:
  """Concatenate the pages of one layer along their tokens."""
  return np.concatenate(list(x[..., :width]), axis=1)
