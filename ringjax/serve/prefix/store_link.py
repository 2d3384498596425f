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

A block of the store is one page of one group of layers: groups that look back
a window let pages go earlier than others, and need the last ones only.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped, UInt

from ringjax.errors import InputTypeError, OptionError
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.fingerprint import fingerprint
from ringjax.models.grouping import STACK, looped, regrouped
from ringjax.models.transformer import Transformer
from ringjax.ops.rope import Rope
from ringjax.parallel.programs import bounded
from ringjax.serve.prefix.prefix_tree import PrefixBlock, next_digest
from ringjax.serve.scheduler import Scheduler, ServedRow, StoredPrefix
from ringjax.store import Store, StoreFetch

if TYPE_CHECKING:
  from ringjax.serve.engine import EngineCounters

# Pages of each shard in one copy; maximum copies in flight to the host.
_BATCH, _MOST_COPIES = 16, 8
# Maximum seconds that a step waits for blocks if it has no other work.
_WAIT = 0.05


@bounded
@functools.partial(jax.jit, static_argnums=(1, 3))
def read_pages(
  pool: PagePool,
  group: int,
  pages: Int[Array, "R k"],
  layers: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
  """Compiled `PagePool.read_pages`: arrays of a group's pages."""
  return pool.read_pages(group, pages, layers)


@bounded
@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _write_pages(
  pool: PagePool, group: int, pages: jax.Array, held: Any
) -> PagePool:
  return pool.write_pages(group, pages, held)


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
    fetch: Fetch in flight, or None.
    wanted: Pairs (number, group) that it fetches.
  """

  digests: list[bytes]
  payloads: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
  missing: set[tuple[int, int]] = dataclasses.field(default_factory=set)
  fetch: StoreFetch | None = None
  wanted: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class StoreLink:
  """Exports evicted pages and imports cached ones; a `BlockSource`."""

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
      OptionError: If pages are spread over several processes.
    """
    if not isinstance(store, Store):
      raise InputTypeError(
        "store",
        type(store).__name__,
        "an rj.store.Store",
        "make one with rj.store.Store(host=1 << 30)",
      )
    arrays = jax.tree.leaves((pool.slots, model))
    if not all(x.is_fully_addressable for x in arrays):
      raise OptionError(
        "store",
        "a store, for pages that are spread over several processes",
        "pages on the devices of one process",
        "leave store out",
      )
    self.store, self._scheduler, self._counters = store, scheduler, counters
    self._tree = scheduler.tree
    self._names = _namespaces(
      model, base or model, adapters or {}, pool, scheduler, longest
    )
    self._shapes = [pool.page_shapes(g) for g in range(len(pool.groups))]
    self._bytes = [
      sum(int(np.prod(s)) * d.itemsize for s, d in shapes)
      for shapes in self._shapes
    ]
    # Pages that are about to be freed, and their keys, by group and shard.
    self._leaving: list[list[list[tuple[int, bytes]]]] = [
      [[] for _ in range(self._tree.shards)] for _ in pool.groups
    ]
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
    for group in range(len(pool.groups)):
      read_pages(pool, group, np.zeros((self._tree.shards, _BATCH), np.int32))
      pages, arrays = self._blank(group)
      pool = _write_pages(pool, group, pages, tuple(arrays))
    return pool

  def _blank(self, group: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Blank batch: page numbers, int32 [R, k], and arrays for the pages."""
    shards = self._tree.shards
    # Out-of-range page numbers, which a write drops.
    pages = np.full((shards, _BATCH), np.iinfo(np.int32).max, np.int32)
    arrays = [
      np.zeros((shape[0], shards * _BATCH, *shape[1:]), dtype)
      for shape, dtype in self._shapes[group]
    ]
    return pages, arrays

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
    if key not in self.store:
      self._leaving[group][shard].append((page, key))

  def move(self, pool: PagePool) -> PagePool:
    """Export evicted pages, then fill pages from the store.

    Call it after a plan and before its calls.
    """
    self._export(pool, most=_MOST_COPIES)
    return self._import(pool)

  def _export(self, pool: PagePool, *, most: int | None) -> None:
    self._copies = [x for x in self._copies if not x.done()]
    for group, shards in enumerate(self._leaving):
      while any(shards):
        batch = [shard[:_BATCH] for shard in shards]
        for shard in shards:
          del shard[:_BATCH]
        count = sum(map(len, batch))
        if most is not None and len(self._copies) >= most:
          self._counters.pages_lost += count
          continue
        pages = np.zeros((len(shards), _BATCH), np.int32)
        for n, shard in enumerate(batch):
          pages[n, : len(shard)] = [page for page, _ in shard]
        arrays = read_pages(pool, group, pages)
        for x in arrays:
          x.copy_to_host_async()
        keys = [
          (n * _BATCH + i, key)
          for n, shard in enumerate(batch)
          for i, (_, key) in enumerate(shard)
        ]
        self._counters.pages_out += count
        self._copies.append(self._copier.submit(self._put, arrays, keys))

  def _put(self, held: Any, keys: list[tuple[int, bytes]]) -> None:
    arrays = [np.asarray(x) for x in held]
    for n, key in keys:
      self.store.put(key, b"".join(x[:, n].tobytes() for x in arrays))

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
    self._export(pool, most=None)
    for copy in self._copies:
      copy.result()

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
    """Blocks of a row's prompt from tree and store; None while in flight."""
    tree = self._tree
    pieces = tree.pieces(row.prompt, most)
    state: RowSearch = row.store_state
    if state is None:
      digests, at = [], root.digest
      for piece in pieces:
        at = next_digest(at, piece)
        digests.append(at)
      state = row.store_state = RowSearch(digests=digests)
      for group in range(len(self._names)):
        self.store.request([self._key(group, x) for x in digests])
    if state.fetch is not None:
      if not state.fetch.done:
        return None
      self._fetched(state)
    while True:
      chain = tree.chain(root, pieces)
      chain = chain[
        : next((n for n, b in enumerate(chain) if not b.ready), None)
      ]
      total, needed = self._longest(state, chain, count, most)
      wanted = [x for x in needed if x not in state.payloads]
      if not wanted:
        payloads = {x: state.payloads[x] for x in needed}
        return StoredPrefix(count=total, payloads=payloads)
      keys = [self._key(g, state.digests[n]) for n, g in wanted]
      state.wanted, state.fetch = wanted, self.store.fetch(keys)
      if not state.fetch.done:
        return None
      self._fetched(state)

  def _fetched(self, state: RowSearch) -> None:
    """Collects the payloads of a fetch and notes the first missing block."""
    fetch, state.fetch = state.fetch, None
    assert fetch is not None
    for n, group in state.wanted:
      payload = fetch.found.get(self._key(group, state.digests[n]))
      if payload is None or len(payload) != self._bytes[group]:
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
        available[at] = cached(n, group) or (
          at not in state.missing
          and (
            at in state.payloads
            or self._key(group, state.digests[n]) in self.store
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
      [[] for _ in range(shards)] for _ in self._shapes
    ]
    for (group, shard, page), payload in loads.items():
      waiting[group][shard].append((page, payload))
    loads.clear()
    for group, lists in enumerate(waiting):
      while any(lists):
        pages, arrays = self._blank(group)
        for shard, page_loads in enumerate(lists):
          for i, (page, payload) in enumerate(page_loads[:_BATCH]):
            pages[shard, i] = page
            _unpack(payload, arrays, shard * _BATCH + i)
          self._counters.pages_in += len(page_loads[:_BATCH])
          del page_loads[:_BATCH]
        pool = _write_pages(pool, group, pages, tuple(arrays))
    return pool


def _unpack(payload: Any, held: list[np.ndarray], n: int) -> None:
  """Writes a payload to index n of the arrays."""
  at = 0
  for x in held:
    shape = (x.shape[0], *x.shape[2:])
    size = int(np.prod(shape))
    values = np.frombuffer(payload, x.dtype, size, at)
    x[:, n] = values.reshape(shape)
    at += values.nbytes


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
    and x.sharding.memory_kind
    in (None, next(iter(x.devices())).default_memory().kind)
  }
  return jax.device_get(checksums(on_device))


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
    for x in map(np.asarray, jax.tree.leaves(constants)):
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
  device = next(iter(leaves[0].devices()))
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
