"""Link between an engine's pages and a store of blocks.

Guarantees: a page comes back with the bits that it had. A block's key is a
digest of its whole prefix with salt and adapter, and of all that its keys
depend on: weights, config, codec, page, the shapes of the calls, the kind of
device and JAX's version; a block of another model, tenant or program is never
found. A failure of the store cannot make a request fail.
Cost: pages are copied in batches of fixed shapes, two compiled programs for
each group of layers; a step waits for no copy to the host and reads and writes
no file, unless all rows wait for one.
Memory: on the device the batches in flight to the host, eight at most; pages
beyond these are dropped and counted.

Of an engine in several processes each stores and reads its own part of the
pages; a prefix counts as found as far as all have it, by a message from each to
each while a row is about to begin (`EngineGroup`).

A block of the store is one page of one group of layers: groups that look back
a window let pages go earlier than others, and need the last ones only.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt

from ringjax.errors import InputTypeError
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.fingerprint import fingerprint
from ringjax.models.grouping import STACK, looped, regrouped
from ringjax.models.transformer import Transformer
from ringjax.ops.rope import Rope
from ringjax.parallel.local_arrays import whole_on_host
from ringjax.parallel.programs import bounded
from ringjax.serve.prefix.page_copies import (
  BATCH,
  DeviceBatch,
  Payload,
  page_copies,
)
from ringjax.serve.prefix.prefix_tree import PrefixBlock, next_digest
from ringjax.serve.scheduler import Scheduler, ServedRow, StoredPrefix
from ringjax.store import Store, StoreFetch

if TYPE_CHECKING:
  from ringjax.serve.engine import EngineCounters

# Maximum copies in flight to the host.
_MOST_COPIES = 8
# Maximum seconds that a step waits for blocks if it has no other work.
_WAIT = 0.05


@bounded
@jax.jit
def checksums(
  leaves: dict[str, Shaped[Array, " ..."]],
) -> dict[str, UInt[Array, " ..."]]:
  """Checksum over all bits of each array, by path; of each layer [L]."""

  def checksum(x: jax.Array) -> jax.Array:
    size = jnp.dtype(x.dtype).itemsize
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[size]
    words = jax.lax.bitcast_convert_type(x, kind)
    words = words.astype(jnp.uint32)
    # Multiply by an odd number per index, so that swapped values differ.
    for axis in range(words.ndim):
      place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
      words = words * (place * np.uint32(2) + np.uint32(0x9E3779B1))
    return jnp.sum(words, dtype=jnp.uint32)

  return {
    path: (jax.vmap(checksum) if path.startswith(STACK) else checksum)(x)
    for path, x in leaves.items()
  }


@dataclasses.dataclass(kw_only=True)
class RowSearch:
  """Search state of a row's blocks in the store.

  Attributes:
    digests: Digests of its prompt's full blocks.
    payloads: Payloads found, by (number, group).
    missing: Pairs (number, group) that are not in the store.
    common: Number of blocks that all processes have at most, None if unknown.
    fetch: Fetch in flight, or None.
    wanted: Pairs (number, group) that it fetches.
  """

  digests: list[bytes]
  payloads: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
  missing: set[tuple[int, int]] = dataclasses.field(default_factory=set)
  common: int | None = None
  fetch: StoreFetch | None = None
  wanted: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class StoreLink:
  """Exports evicted pages and imports cached ones; a `BlockSource`.

  Attributes:
    store: Store of the blocks.
    together: Function of this process's number of blocks that returns the
      numbers of all processes of the engine.
    early: Whether blocks are exported once a row that read them has ended
      well, before they are evicted: a process that is killed then leaves them.
  """

  def __init__(
    self,
    store: Store,
    model: Transformer,
    pool: PagePool,
    scheduler: Scheduler,
    counters: EngineCounters,
    longest: int,
    *,
    base: Transformer | None = None,
    adapters: Mapping[str, str] | None = None,
  ):
    """Become the source of a scheduler and the listener of its tree.

    Args:
      store: Store of the blocks.
      model: Model whose keys are in the pool.
      pool: Pool of pages.
      scheduler: Scheduler whose rows are served.
      counters: Counters of the engine.
      longest: Context length for which rotations are made.
      base: Model without adapters; default: `model`.
      adapters: Digests of the model's adapters, by name.

    Raises:
      InputTypeError: If `store` is not a `Store`.
    """
    if not isinstance(store, Store):
      raise InputTypeError(
        "store",
        type(store).__name__,
        "an rj.store.Store",
        "make one with rj.store.Store(host=1 << 30)",
      )
    self.store, self._scheduler, self._counters = store, scheduler, counters
    self._tree, self._pages = scheduler.tree, page_copies(pool)
    self._groups = len(pool.groups)
    self._names = _namespaces(
      model, base or model, adapters or {}, pool, scheduler, longest
    )
    if self._pages.facts:
      # Processes that share a folder have other parts of the same pages.
      facts = self._pages.facts.encode()
      self._names = [hashlib.sha256(x + facts).digest() for x in self._names]
    # Pages that are about to be freed, and their keys, by group and shard.
    self._leaving: list[list[list[tuple[int, bytes]]]] = [
      [[] for _ in range(self._tree.shards)] for _ in pool.groups
    ]
    self.together: Callable[[int | None], list[int | None]] = lambda n: [n]
    self.early = False
    # Blocks to export before they are evicted.
    self._early: collections.deque[PrefixBlock] = collections.deque()
    self._copies: list[concurrent.futures.Future[None]] = []
    self._copier = concurrent.futures.ThreadPoolExecutor(
      1, "ringjax engine exports"
    )
    self._tree.on_evict = self._leave
    scheduler.source = self

  def _key(self, group: int, digest: bytes) -> bytes:
    return hashlib.sha256(self._names[group] + digest).digest()

  def warm_up(self, pool: PagePool) -> PagePool:
    """Compile the copy programs; returns the pool unchanged."""
    shape = self._tree.shards, BATCH
    for group in range(self._groups):
      self._pages.read(pool, group, np.zeros(shape, np.int32))
      blank = self._pages.blank(group)
      pool = self._pages.write(pool, group, self._no_pages(), blank)
    return pool

  def _no_pages(self) -> np.ndarray:
    """Out-of-range page numbers of a batch, int32 [R, k]: not written."""
    shape = self._tree.shards, BATCH
    return np.full(shape, np.iinfo(np.int32).max, np.int32)

  # -------------------------------------------------------------------------
  # Out
  # -------------------------------------------------------------------------

  def _leave(self, block: PrefixBlock, group: int, page: int) -> None:
    """Queue a page that is about to be freed for export."""
    shard = block.depth % self._tree.shards
    if self._scheduler.loads.pop((group, shard, page), None) is not None:
      # It was never loaded into the page, so the store still has it.
      return
    key = self._key(group, block.digest)
    if self._pages.nbytes(group, shard) and key not in self.store:
      self._leaving[group][shard].append((page, key))

  def move(self, pool: PagePool) -> PagePool:
    """Export evicted pages, then fill pages from the store.

    Call it after a plan and before its calls.
    """
    self._export(pool, most=_MOST_COPIES)
    self._export_early(pool)
    return self._import(pool)

  def ended(self, row: ServedRow) -> None:
    """Queues the blocks of a row whose answer is complete, if `early`."""
    if self.early:
      self._early.extend(row.blocks)

  def settle(self, pool: PagePool) -> None:
    """Exports queued blocks and waits for the copies; for an idle engine."""
    while self._early:
      self._export_early(pool)
      self._await_copies()

  def _export_early(self, pool: PagePool) -> None:
    """Exports queued blocks, as many as there is room for in flight."""
    self._copies = [x for x in self._copies if not x.done()]
    room = (_MOST_COPIES - len(self._copies)) * BATCH
    while self._early and room > 0:
      block = self._early.popleft()
      if not block.ready or block.lost:
        continue
      shard = block.depth % self._tree.shards
      for group, page in enumerate(block.pages):
        # Evicted pages are exported already, and those to load are stored.
        if page is None or (group, shard, page) in self._scheduler.loads:
          continue
        self._leave(block, group, page)
        room -= 1
    self._export(pool, most=None)

  def _await_copies(self) -> None:
    for copy in self._copies:
      copy.result()

  def _export(self, pool: PagePool, *, most: int | None) -> None:
    self._copies = [x for x in self._copies if not x.done()]
    for group, shards in enumerate(self._leaving):
      while any(shards):
        batch = [shard[:BATCH] for shard in shards]
        for shard in shards:
          del shard[:BATCH]
        count = sum(map(len, batch))
        if most is not None and len(self._copies) >= most:
          self._counters.pages_lost += count
          continue
        pages = np.zeros((len(shards), BATCH), np.int32)
        for n, shard in enumerate(batch):
          pages[n, : len(shard)] = [page for page, _ in shard]
        keys = [
          (n, i, key)
          for n, shard in enumerate(batch)
          for i, (_, key) in enumerate(shard)
        ]
        arrays = self._pages.read(pool, group, pages)
        self._counters.pages_out += count
        self._copies.append(self._copier.submit(self._put, arrays, keys))

  def _put(
    self, arrays: DeviceBatch, keys: list[tuple[int, int, bytes]]
  ) -> None:
    """Gives the store pages (shard, index in the batch, key) of a batch."""
    batch = self._pages.on_host(arrays)
    for shard, n, key in keys:
      self.store.put(key, self._pages.payload(batch, shard, n))

  def put(self, group: int, digest: bytes, leaves: list[np.ndarray]) -> None:
    """Gives the store one page of a group that another engine computed.

    Args:
      group: Number of the group of layers.
      digest: Digest of the prefix that ends with the page.
      leaves: Arrays of the page, see `PagePool.page_shapes`.
    """
    payload = b"".join(x.tobytes() for x in leaves)
    self.store.put(self._key(group, digest), payload)

  def holds(self, group: int, digest: bytes) -> bool:
    """Whether the store has a page of a group, by its digest as in `put`."""
    return self._key(group, digest) in self.store

  def export_all(self, pool: PagePool) -> None:
    """Copies all blocks of the tree, and waits until the store has them."""
    for block in self._tree.blocks():
      for group, page in enumerate(block.pages):
        if block.ready and page is not None:
          self._leave(block, group, page)
    self._early.clear()
    self._export(pool, most=None)
    self._await_copies()

  def close(self) -> None:
    """Detaches from the tree and ends the thread."""
    self._tree.on_evict = self._scheduler.source = None
    self._copier.shutdown()

  # -------------------------------------------------------------------------
  # In
  # -------------------------------------------------------------------------

  def look(
    self, row: ServedRow, root: PrefixBlock, count: int, most: int
  ) -> StoredPrefix | None:
    """Blocks of a row's prompt from tree and store; None while in flight.

    Of several processes all return the same blocks, those that all have.
    """
    pieces = self._tree.pieces(row.prompt, most)
    state: RowSearch = row.store_state
    if state is None:
      digests, at = [], root.digest
      for piece in pieces:
        at = next_digest(at, piece)
        digests.append(at)
      state = row.store_state = RowSearch(digests=digests)
      for group in range(self._groups):
        self.store.request([self._key(group, x) for x in digests])
    chain = self._tree.chain(root, pieces)
    chain = chain[: next((n for n, b in enumerate(chain) if not b.ready), None)]
    while True:
      needed = self._needed(state, chain, count, most)
      totals = self.together(None if needed is None else needed[0])
      known = [total for total in totals if total is not None]
      if needed is None or len(known) < len(totals):
        return None
      if len({*known}) == 1:
        payloads = {x: self._payload(state, *x) for x in needed[1]}
        return StoredPrefix(count=needed[0], payloads=payloads)
      # A window may need other pages for fewer blocks.
      state.common = min(known)

  def _needed(
    self, state: RowSearch, chain: list[PrefixBlock], count: int, most: int
  ) -> tuple[int, list[tuple[int, int]]] | None:
    """Blocks that this process has; None while it fetches some.

    Args:
      state: Search of the row.
      chain: Blocks of the prompt in the tree.
      count: Number of blocks that the tree has.
      most: Maximum number of blocks.

    Returns:
      Number of blocks, and their pages (number, group) that the store has.
    """
    if state.fetch is not None:
      if not state.fetch.done:
        return None
      self._fetched(state)
    if state.common is not None:
      most = min(most, state.common)
    while True:
      total, needed = self._longest(state, chain, count, most)
      wanted = [x for x in needed if self._here(*x) and x not in state.payloads]
      if not wanted:
        return total, needed
      keys = [self._key(g, state.digests[n]) for n, g in wanted]
      state.wanted, state.fetch = wanted, self.store.fetch(keys)
      if not state.fetch.done:
        return None
      self._fetched(state)

  def _here(self, n: int, group: int) -> bool:
    """Whether this process has a part of the page of block n of a prompt."""
    return self._pages.nbytes(group, n % self._tree.shards) > 0

  def _payload(self, state: RowSearch, n: int, group: int) -> Payload:
    return state.payloads[n, group] if self._here(n, group) else b""

  def _fetched(self, state: RowSearch) -> None:
    """Collects the payloads of a fetch and notes the first missing block."""
    fetch, state.fetch = state.fetch, None
    assert fetch is not None
    for n, group in state.wanted:
      payload = fetch.found.get(self._key(group, state.digests[n]))
      size = self._pages.nbytes(group, n % self._tree.shards)
      if payload is None or len(payload) != size:
        state.missing.add((n, group))
        return
      state.payloads[n, group] = payload

  def _longest(
    self,
    state: RowSearch,
    chain: list[PrefixBlock],
    count: int,
    most: int,
  ) -> tuple[int, list[tuple[int, int]]]:
    """Number of available blocks, and their pages that are not in the tree."""
    tree = self._tree
    available: dict[tuple[int, int], bool] = {}

    def cached(n: int, group: int) -> bool:
      return n < len(chain) and chain[n].pages[group] is not None

    def is_available(n: int, group: int) -> bool:
      at = n, group
      if at not in available:
        available[at] = (
          cached(n, group)
          or not self._here(n, group)
          or (
            at not in state.missing
            and (
              at in state.payloads
              or self._key(group, state.digests[n]) in self.store
            )
          )
        )
      return available[at]

    full_groups = [
      g for g, spec in enumerate(tree.groups) if spec.reach is None
    ]
    limit = next(
      (
        n
        for n in range(most)
        if not all(is_available(n, g) for g in full_groups)
      ),
      most,
    )
    # A gap in a group with a window only matters for counts whose window
    # contains it.
    for total in range(limit, count, -1):
      needed = [
        (n, g)
        for g, spec in enumerate(tree.groups)
        for n in range(self._first(spec.reach, total), total)
      ]
      if all(is_available(n, g) for n, g in needed):
        return total, sorted(x for x in needed if not cached(*x))
    return count, []

  def _first(self, reach: int | None, total: int) -> int:
    """First block within the window of the token after `total` blocks."""
    return 0 if reach is None else max(0, total - -(-reach // self._tree.page))

  def wait(self, rows: Iterable[ServedRow]) -> None:
    """Waits a moment for a fetch in flight, if a row waits for one."""
    for row in rows:
      state = row.store_state
      if row.held and state is not None and state.fetch is not None:
        state.fetch.wait(_WAIT)
        return

  def _import(self, pool: PagePool) -> PagePool:
    """Fills the pages that the scheduler gave to blocks of the store."""
    loads, shards = self._scheduler.loads, self._tree.shards
    waiting: list[list[list[tuple[int, Any]]]] = [
      [[] for _ in range(shards)] for _ in range(self._groups)
    ]
    for (group, shard, page), payload in loads.items():
      waiting[group][shard].append((page, payload))
    loads.clear()
    for group, lists in enumerate(waiting):
      while any(lists):
        pages, batch = self._no_pages(), self._pages.blank(group)
        for shard, page_loads in enumerate(lists):
          for i, (page, payload) in enumerate(page_loads[:BATCH]):
            pages[shard, i] = page
            self._pages.fill(batch, shard, i, payload)
          self._counters.pages_in += len(page_loads[:BATCH])
          del page_loads[:BATCH]
        pool = self._pages.write(pool, group, pages, batch)
    return pool


def weights_digest(model: Transformer) -> str:
  """Digest of a model's rotations, and of its weights on the devices.

  Weights elsewhere enter only with a sample (`fingerprint`).
  """
  return digest_of_sums(
    fingerprint(model), _by_layer(model, _checksums), model.config.ropes
  )


def digest_of_sums(
  corners: str, sums: Sequence[int | list[int]], ropes: tuple[Rope, ...]
) -> str:
  """Digest of weights and rotations.

  Args:
    corners: Digest of a corner of each weight (`fingerprint`).
    sums: Checksum of each weight (`checksums`); of weights of layers that are
      alike, those of each layer.
    ropes: Rotations of the layers: keys of the same weights differ by them.
  """
  facts = corners, [*sums], ropes
  return hashlib.sha256(repr(facts).encode()).hexdigest()


def _checksums(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Checksums of arrays on the devices, by path; of layers' arrays [L]."""
  on_device = {
    path: x
    for path, x in leaves.items()
    if jnp.dtype(x.dtype).itemsize in (1, 2, 4, 8)
    and x.sharding.memory_kind in (None, _local_device(x).default_memory().kind)
  }
  return whole_on_host(checksums(on_device))


def _local_device(x: jax.Array) -> jax.Device:
  """A device of this process that has a part of an array."""
  return next(iter(x.sharding.addressable_devices))


def _forms(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
  """Shapes and dtypes of arrays, by path; of layers' arrays [L]."""
  forms = {}
  for path, x in leaves.items():
    layered = path.startswith(STACK)
    form = f"{x.shape[1:] if layered else x.shape} {x.dtype}"
    forms[path] = np.full(x.shape[:1] if layered else (), form)
  return forms


def _by_layer(
  model: Transformer, f: Callable[[Mapping[str, jax.Array]], dict[str, Any]]
) -> list[Any]:
  """Results of `f` for a model's arrays, however its layers are grouped."""
  paths = jax.tree_util.tree_leaves_with_path(model)
  facts = f(
    {jax.tree_util.keystr(k, simple=True, separator="."): x for k, x in paths}
  )
  stack = getattr(model, "stack", None)
  if stack is not None and stack.placed is None:
    facts = regrouped(facts, stack.runs, looped(stack.runs))
  return [np.asarray(x).tolist() for x in facts.values()]


def constants_digest(pool: PagePool) -> bytes:
  """Digest of the constants of a pool's codec, layer by layer."""
  by_layer: dict[int, Any] = {}
  for shape, constants in zip(pool.shapes, pool.constants, strict=True):
    for x in jax.tree.leaves(whole_on_host(constants)):
      for n, number in enumerate(shape.which):
        part = x[n] if x.shape[:1] == (len(shape.which),) else x
        hasher = by_layer.setdefault(number, hashlib.sha256())
        hasher.update(part.tobytes())
  digests = b"".join(by_layer[n].digest() for n in sorted(by_layer))
  return hashlib.sha256(digests).digest()


def _namespaces(
  model: Transformer,
  base: Transformer,
  adapters: Mapping[str, str],
  pool: PagePool,
  scheduler: Scheduler,
  longest: int,
) -> list[bytes]:
  """Digest of all that a group's keys depend on besides tokens, per group."""
  digest = hashlib.sha256()
  tree, limits = scheduler.tree, scheduler.limits
  leaves = jax.tree.leaves(model)
  device = _local_device(leaves[0])
  facts = (
    "ringjax block 4",
    weights_digest(base),
    # Prefixes of different adapters differ by the adapters' names.
    sorted(adapters.items()),
    _by_layer(model, _forms),
    repr(model.config),
    str(pool.kind),
    str(pool.dtype),
    tree.page,
    tree.shards,
    limits.piece,
    limits.pieces,
    longest,
    pool.mesh is not None and dict(pool.mesh.shape),
    device.platform,
    device.device_kind,
    jax.__version__,
  )
  digest.update(repr(facts).encode())
  digest.update(constants_digest(pool))
  return [
    hashlib.sha256(
      digest.digest()
      + repr((g.reach, pool.layers(n), pool.page_shapes(n))).encode()
    ).digest()
    for n, g in enumerate(pool.groups)
  ]
