"""Export and import of prefixes between engines, also on other machines.

Guarantees: the keys and values that were computed reach the other engine bit
for bit, also where its pages have another size or its mesh another number of
shards; what was made by other weights, another kind of cache, codec or dtype is
refused, and so are pages of other tokens, in another order or of another
adapter: each page comes with a hash of all tokens up to its end. No page of a
step that failed is exported, also if a read of weights failed silently. Nothing
else of the other engine changes: a prompt finds the prefix there as if it came
out of its store, and tokens without keys are computed.
Cost: one copy of the prefix to the host, in batches of fixed shapes, or on the
devices alone (`on_devices`, for a publisher with a `DeviceServer`); one copy
there into blocks of the other size. An engine does not wait for copies between
two steps: they are only started there, some batches at a time. Parts of a
prompt that share their `PrefixHashes` hash each page once.
Memory: the prefix on the host of each side, or with `on_devices` on the devices
until its pages return; on the device these batches; of an export in the middle
of a step all pages, with a part of their layers.

`export_prefix` -> `rj.transfer.Publisher.publish` with `labels` -> ticket ->
`rj.transfer.pull` -> `import_prefix`. Whole pages move: the rest of a prompt is
computed again. A prompt that is still being computed can move in parts, with
`first=`, as far as its pages are computed. Of an engine with `layer_parts`
these leave in the middle of a step, too, some layers at a time:
`begin_layers` between two of its programs, `LayerParts` on the other side.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.infer import inputs
from ringjax.kv.storage.page_pool import PagePool
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.serve.engine import Engine
from ringjax.serve.prefix.page_copies import read_pages
from ringjax.serve.prefix.prefix_tree import (
  PrefixBlock,
  PrefixTree,
  next_digest,
)
from ringjax.serve.prefix.store_link import constants_digest, weights_digest
from ringjax.transfer import (
  DevicePage,
  PageBatch,
  PageLayout,
  PageLeaf,
  PulledPages,
  Ticket,
)

# Copies of some blocks' pages, and where in each the blocks are.
_Copies = list[tuple[tuple[jax.Array, ...], list[int]]]
# Pages of each shard in one copy; copies started between two steps.
_BATCH, _COPIES = 16, 8


@dataclasses.dataclass(frozen=True)
class ExportedPrefix:
  """Pages of a prefix with their layout and labels.

  Attributes:
    tokens: Number of tokens in the pages.
    pages: Leaves of each page, as `Publisher.publish` takes them: host arrays,
        or with `on_devices` pages of device batches.
    layout: Layout of each page.
    labels: Hash of each page: of all tokens up to its end, of the adapter and
      of the prompt's rotations.
  """

  tokens: int
  pages: Sequence[tuple[np.ndarray, ...] | DevicePage]
  layout: PageLayout
  labels: list[str]


class PrefixHashes:
  """Hashes of a prompt's pages, for calls with its successive parts.

  Each hash covers all tokens up to the end of its page and is computed once.
  The lookup of each part starts where the previous part ended. Another prompt
  clears the hashes.
  """

  def __init__(self) -> None:
    self._data = b""
    self._made: dict[tuple[bytes, int], list[bytes]] = {}
    # Blocks of the previous part, below this root.
    self._root: PrefixBlock | None = None
    self._part: list[PrefixBlock] = []

  def chain(
    self,
    tree: PrefixTree,
    root: PrefixBlock,
    tokens: Int[np.ndarray, " n"],
    first: int,
  ) -> list[PrefixBlock]:
    """Blocks of a prompt after the first ones, as far as the tree has them.

    Args:
      tree: Prefix tree of the engine, between two of its steps.
      root: Block of the tree under which the prompt's blocks are.
      tokens: Token ids of the prompt, int32 [n].
      first: Number of first blocks to leave out.
    """
    self._begin(np.ascontiguousarray(tokens, "<i4").tobytes())
    at, skipped = root, 0
    if root is self._root:
      for block in self._part:
        # Blocks are evicted from the end of a chain: if one is cached, so are
        # all before it.
        parent = block.parent
        is_cached = (
          parent is not None and parent.children.get(block.data) is block
        )
        if is_cached and block.depth == first - 1:
          at, skipped = block, first
    size = 4 * tree.page
    # Cut blocks lazily: most of a prompt may not be computed yet.
    blocks = tree.chain(
      at,
      (
        self._data[n * size : (n + 1) * size]
        for n in range(skipped, len(self._data) // size)
      ),
    )
    part = blocks[first - skipped :]
    self._root, self._part = root, part
    return part

  def _begin(self, data: bytes) -> None:
    """Clear the hashes if the prompt is another one."""
    if data != self._data:
      self._data, self._made, self._root = data, {}, None

  def of(
    self, tokens: Int[np.ndarray, " n"], page: int, start: bytes, count: int
  ) -> list[bytes]:
    """Hashes of the first pages, in order.

    Args:
      tokens: Token ids of the prompt, int32 [n].
      page: Number of tokens in a page.
      start: Hash from which the chain of hashes starts.
      count: Maximum number of hashes; there are n // page.
    """
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    self._begin(data)
    digests, size = self._made.setdefault((start, page), []), 4 * page
    count = min(count, len(data) // size)
    for n in range(len(digests), count):
      previous = digests[-1] if digests else start
      digests.append(next_digest(previous, data[n * size : (n + 1) * size]))
    return digests[:count]


def export_prefix(
  engine: Engine,
  tokens: Int[np.ndarray, " n"],
  *,
  salt: str = "",
  adapter: str = "",
  first: int = 0,
  layers: tuple[int, int] | None = None,
  hashes: PrefixHashes | None = None,
  on_devices: bool = False,
) -> ExportedPrefix:
  """Copies the pages of the longest prefix that an engine has computed.

  The engine keeps serving; if it evicts pages meanwhile, the prefix is shorter.

  Args:
    engine: Engine with `share` of "prompts" or "answers".
    tokens: Token ids of a prompt that it has computed, int32 [n]; the whole
      prompt where rotations depend on its length.
    salt: Salt of the request.
    adapter: Adapter of the request.
    first: Number of pages to leave out, as they were exported before.
    layers: First and end of the model's layers to export; None for all.
    hashes: Hashes of the prompt from the calls for earlier parts.
    on_devices: Whether the copies stay on the engine's devices, in batches of
      a fixed size (`copied_pages`).

  Raises:
    OptionError: If the engine has computed no whole page after these, has no
      such adapter, has a pool whose pages can't be cut to another size, or a
      step failed.
    CheckpointFormatError: If weights could not be read during a step.
    CheckpointMismatchError: If weights read during a step are not finite.
    PromptError: If the tokens are invalid.
  """
  tokens = inputs.prompt(tokens, engine.vocab)
  layout = prefix_layout(engine, layers)
  start = _label_start(engine, len(tokens), adapter)
  salt = engine.prefix_salt(salt, len(tokens))
  tree = engine.scheduler.tree
  hashes = hashes or PrefixHashes()
  with engine.between_steps():
    chain = hashes.chain(tree, tree.root(salt, adapter), tokens, first)
  pages: list[tuple[np.ndarray, ...] | DevicePage] = []
  step = _COPIES * _BATCH * tree.shards
  while True:
    at = len(pages)
    with engine.between_steps() as pool:
      batch = list(itertools.takewhile(_there, chain[at : at + step]))
      copies = [
        _begin_copies(pool, group, batch, tree.shards, layers)
        for group in range(len(pool.groups))
      ]
    pages += _pages_of(copies, len(batch), on_devices)
    if len(batch) < step:
      break
  # Blocks enter the tree when their step is planned. All copied blocks are
  # computed by now, so a failed read of weights is recorded already; the engine
  # itself raises it a step later.
  with engine.between_steps():
    for fault in engine.model.stack.faults:
      if fault.silent and fault.error is not None:
        raise fault.error
  if not pages:
    raise OptionError(
      "tokens",
      f"{len(tokens)} tokens of which no page of {tree.page} is known"
      + (f" after {first} pages" if first else ""),
      "the tokens of a prompt that this engine has read",
      "export it before its pages have to make room",
    )
  digests = hashes.of(tokens, tree.page, start, first + len(pages))
  return ExportedPrefix(
    tokens=len(pages) * tree.page,
    pages=pages,
    layout=layout,
    labels=[label_of(x) for x in digests[first:]],
  )


def copied_pages(engine: Engine, count: int) -> int:
  """Number of pages that copies of `count` pages hold: whole batches."""
  step = _BATCH * engine.scheduler.tree.shards
  return -(-count // step) * step


class LayerCopies:
  """Copies in flight of some layers of the pages that a step computes.

  Attributes:
    layers: First and end of the model's layers.
    count: Number of pages.
  """

  def __init__(
    self,
    layers: tuple[int, int],
    count: int,
    export: Callable[[], ExportedPrefix],
  ):
    self.layers, self.count, self._export = layers, count, export

  def result(self) -> ExportedPrefix:
    """Wait for the device and return the pages."""
    return self._export()


def begin_layers(
  engine: Engine,
  pool: PagePool,
  tokens: Int[np.ndarray, " n"],
  part: int,
  *,
  salt: str = "",
  adapter: str = "",
  first: int = 0,
  most: int,
  hashes: PrefixHashes,
  on_devices: bool = False,
) -> LayerCopies | None:
  """Begins copies of the layers that a step has just dispatched.

  Call it from `Engine.on_layers`, in its thread. Whether the step succeeded is
  known only after it: keep the copies until `export_prefix` has returned the
  pages of the last part, without which no reader can use them.

  Args:
    engine: Engine with `layer_parts` above 1.
    pool: Pool that `on_layers` was called with.
    tokens: Token ids of the prompt, int32 [n].
    part: Number of the part of the layers.
    salt: Salt of the request.
    adapter: Adapter of the request.
    first: Number of pages to leave out, as they were exported before.
    most: Maximum number of pages.
    hashes: Hashes of the prompt's pages.
    on_devices: Whether the copies stay on the engine's devices.

  Returns:
    None if there are no such pages.
  """
  layers, tree = engine.layer_parts[part], engine.scheduler.tree
  layout = prefix_layout(engine, layers)
  salt = engine.prefix_salt(salt, len(tokens))
  chain = hashes.chain(tree, tree.root(salt, adapter), tokens, first)
  blocks = list(itertools.takewhile(_there, chain[:most]))
  if not blocks:
    return None
  copies = [
    _begin_copies(pool, group, blocks, tree.shards, layers)
    for group in range(len(pool.groups))
  ]
  for arrays, _ in itertools.chain.from_iterable(copies):
    for x in () if on_devices else arrays:
      x.copy_to_host_async()
  start = _label_start(engine, len(tokens), adapter)

  def export() -> ExportedPrefix:
    digests = hashes.of(tokens, tree.page, start, first + len(blocks))[first:]
    return ExportedPrefix(
      tokens=len(blocks) * tree.page,
      pages=_pages_of(copies, len(blocks), on_devices),
      layout=layout,
      labels=[label_of(x) for x in digests],
    )

  return LayerCopies(layers, len(blocks), export)


class LayerParts:
  """Assembles pages whose layers arrive in parts, as from `begin_layers`.

  Guarantees: only whole pages are returned; parts whose next layers do not
    follow are dropped when other pages arrive.
  """

  def __init__(self, engine: Engine):
    self._whole = prefix_layout(engine)
    self._held: list[tuple[Ticket, PulledPages]] = []

  def add(
    self, ticket: Ticket, pulled: PulledPages
  ) -> tuple[Ticket, PulledPages] | None:
    """Adds the pages of a ticket.

    Args:
      ticket: Ticket of pages with all layers or a part of them.
      pulled: All pages of the ticket.

    Returns:
      Ticket and pages with all layers once these are complete, else None.
    """
    if any("layer" not in leaf.axes for leaf in ticket.layout.leaves):
      # Pages of another kind: `import_prefix` raises for them.
      return ticket, pulled
    if self._held and pulled.labels != self._held[0][1].labels:
      self._held = []
    if not self._follows(ticket):
      self._held = []
      if not self._follows(ticket):
        return None
    self._held.append((ticket, pulled))
    ends = self._ends()
    if any(
      ends.get(leaf.name, 0) < leaf.shape[_layer(leaf)]
      for leaf in self._whole.leaves
    ):
      return None
    parts, self._held = self._held, []
    return _joined(parts)

  def _follows(self, ticket: Ticket) -> bool:
    """Whether a ticket's layers start where the collected ones end."""
    ends = self._ends()
    return all(
      leaf.first[_layer(leaf)] == ends.get(leaf.name, 0)
      for leaf in ticket.layout.leaves
    )

  def _ends(self) -> dict[str, int]:
    """End of the collected layers, by leaf."""
    return {
      leaf.name: leaf.first[_layer(leaf)] + leaf.shape[_layer(leaf)]
      for ticket, _ in self._held
      for leaf in ticket.layout.leaves
    }


def _layer(leaf: PageLeaf) -> int:
  """Axis of layers in a leaf."""
  return leaf.axes.index("layer")


def _joined(
  parts: list[tuple[Ticket, PulledPages]],
) -> tuple[Ticket, PulledPages]:
  """Concatenate parts of pages along their layers, first layers first."""
  if len(parts) == 1:
    return parts[0]
  chunks: dict[str, list[tuple[PageLeaf, np.ndarray]]] = {}
  for ticket, pulled in parts:
    for leaf in ticket.layout.leaves:
      chunks.setdefault(leaf.name, []).append((leaf, pulled.arrays[leaf.name]))
  arrays, leaves = {}, []
  for name, leaf_chunks in chunks.items():
    leaf, at = leaf_chunks[0][0], _layer(leaf_chunks[0][0])
    arrays[name] = np.concatenate([x for _, x in leaf_chunks], axis=1 + at)
    shape = *leaf.shape[:at], arrays[name].shape[1 + at], *leaf.shape[at + 1 :]
    leaves.append(dataclasses.replace(leaf, shape=shape))
  ticket, first_pulled = parts[0]
  return (
    dataclasses.replace(ticket, layout=PageLayout(tuple(leaves))),
    dataclasses.replace(
      first_pulled,
      arrays=arrays,
      reads=sum(x.reads for _, x in parts),
      nbytes=sum(x.nbytes for _, x in parts),
      completed=all(x.completed for _, x in parts),
      array_reads=sum(x.array_reads for _, x in parts),
    ),
  )


def import_prefix(
  engine: Engine,
  tokens: Int[np.ndarray, " n"],
  ticket: Ticket,
  pulled: PulledPages,
  *,
  salt: str = "",
  adapter: str = "",
  first: int = 0,
  hashes: PrefixHashes | None = None,
) -> int:
  """Lets later requests of an engine find a prefix that was pulled.

  Args:
    engine: Engine with a `store=`, into which the blocks are put.
    tokens: Token ids of the pages and any after them, int32 [n]; the whole
      prompt where rotations depend on its length.
    ticket: Ticket of the pages.
    pulled: All pages of the ticket, in order.
    salt: Salt of the requests.
    adapter: Adapter of the requests.
    first: Number of pages before those of the ticket, as in `export_prefix`;
      their tokens have to be whole pages here.
    hashes: Hashes of the prompt from the calls for earlier parts.

  Returns:
    Number of the prompt's tokens that the engine finds now, if it still has
    those of the pages before `first`: fewer than were pulled if the store did
    not keep them.

  Raises:
    OptionError: If the engine has no store or no such adapter, or the pages are
      of other tokens, weights, codecs or dtypes.
    PromptError: If the tokens are invalid.
  """
  link = engine.store_link
  if engine.important is not None:
    raise OptionError(
      "engine",
      f"an engine with important={engine.important.share}",
      "one whose store has the pages of prefixes",
      "leave important out",
    )
  if link is None:
    raise OptionError(
      "engine",
      "an engine without a store",
      "one into whose store the prefix can go",
      "pass store=rj.store.Store(host=1 << 30) to it",
    )
  tokens = inputs.prompt(tokens, engine.vocab)
  want, page = prefix_layout(engine), engine.scheduler.tree.page
  theirs = {x.name: x for x in ticket.layout.leaves}
  lines: list[tuple[np.ndarray, int]] = []
  num_pages, size = len(pulled.labels), 0
  for leaf in want.leaves:
    remote_leaf, array = theirs.get(leaf.name), pulled.arrays.get(leaf.name)
    _check_leaf(leaf, remote_leaf, array, num_pages)
    assert remote_leaf is not None and array is not None
    axis = leaf.axes.index("token")
    if size and remote_leaf.shape[axis] != size:
      raise OptionError(
        f"leaf {leaf.name}",
        f"{remote_leaf.shape[axis]} tokens beside {size} of other leaves",
        "pages of as many tokens in all leaves",
        "publish what export_prefix returns",
      )
    size = remote_leaf.shape[axis]
    # [n, ..., P, ...] to [..., n P, ...].
    lines.append((np.concatenate(list(array), axis=axis), axis))
  skipped, remainder = divmod(first * size, page)
  if remainder:
    raise OptionError(
      "first",
      f"{first} pages of {size} tokens",
      f"a whole number of pages of {page}",
      "export parts of as many tokens as are whole pages on both sides",
    )
  hashes = hashes or PrefixHashes()
  start = _label_start(engine, len(tokens), adapter)
  page_digests = hashes.of(tokens, size, start, first + num_pages)[first:]
  valid = 0
  for valid, (page_digest, label) in enumerate(
    zip(page_digests, pulled.labels, strict=False), 1
  ):
    if label_of(page_digest) != label:
      raise OptionError(
        f"page {valid - 1} of the ticket",
        "one of other tokens, another adapter or another place",
        f"tokens {(first + valid - 1) * size} to {(first + valid) * size} of "
        "this prompt",
        "publish with labels=, pull all pages in order, and pass the prompt "
        "and the adapter of the export",
      )
  count = valid * size // page
  blocks = [
    np.split(np.take(line, range(count * page), axis), count, axis)
    for line, axis in lines
    if count
  ]
  tree = engine.scheduler.tree
  salt = engine.prefix_salt(salt, len(tokens))
  with engine.between_steps() as pool:
    digest = tree.root(salt, adapter).digest
    sizes = [len(pool.page_shapes(g)) for g in range(len(pool.groups))]
  digests = hashes.of(tokens, page, digest, skipped + count)
  # The first ones last: where there is no room for all, they stay.
  for n in reversed(range(count)):
    at = 0
    for group, num_leaves in enumerate(sizes):
      leaves = [x[n] for x in blocks[at : at + num_leaves]]
      link.put(group, digests[skipped + n], leaves)
      at += num_leaves
  missing = [
    n
    for n in range(skipped, len(digests))
    if not all(link.holds(g, digests[n]) for g in range(len(sizes)))
  ]
  if missing:
    pieces = tree.pieces(tokens, len(digests))
    with engine.between_steps():
      chain = tree.chain(tree.root(salt, adapter), pieces)
      for n in missing:
        if n >= len(chain) or not chain[n].ready:
          return n * page
  return len(digests) * page


def _label_start(engine: Engine, length: int, adapter: str) -> bytes:
  """Start of the hashes of an engine's prompt."""
  return label_start(engine.adapter_digest(adapter), engine.rotations(length))


def label_start(adapter: str, rotations: tuple[str, ...]) -> bytes:
  """Start of the hashes: what keys depend on besides tokens and layout."""
  return repr((adapter, rotations)).encode()


def label_of(digest: bytes) -> str:
  """Text label of a page."""
  return digest.hex()[:32]


def _there(block: PrefixBlock) -> bool:
  """Whether a block's keys are in the pool."""
  return block.ready and all(page is not None for page in block.pages)


def _begin_copies(
  pool: PagePool,
  group: int,
  blocks: list[PrefixBlock],
  shards: int,
  layers: tuple[int, int] | None = None,
) -> _Copies:
  """Start copies of a group's pages of successive blocks.

  The device copies them before the calls that are dispatched later. Each copy
  comes with the places of the blocks in it.
  """
  copies: _Copies = []
  step = _BATCH * shards
  for start in range(0, len(blocks), step):
    pages = np.zeros((shards, _BATCH), np.int32)
    places = []
    for n, block in enumerate(blocks[start : start + step]):
      page = block.pages[group]
      assert page is not None
      shard, column = block.depth % shards, n // shards
      pages[shard, column] = page
      places.append(shard * _BATCH + column)
    arrays = read_pages(pool, group, pages, layers)
    copies.append((arrays, places))
  return copies


def _pages_of(
  copies: list[_Copies], count: int, on_devices: bool
) -> Sequence[tuple[np.ndarray, ...] | DevicePage]:
  """Leaves of each page, from the copies of all groups."""
  if on_devices:
    # Wait, as copies to the host do: a step may still fail until it ends.
    jax.block_until_ready([arrays for group in copies for arrays, _ in group])
    # Pages are in the same rows in each group.
    return [
      DevicePage(batch, row)
      for parts in zip(*copies, strict=True)
      for batch in [
        PageBatch(tuple(x for arrays, _ in parts for x in arrays), 1)
      ]
      for row in parts[0][1]
    ]
  arrays = [x for group in copies for x in _copied(group)]
  return [tuple(x[n] for x in arrays) for n in range(count)]


def _copied(copies: _Copies) -> list[np.ndarray]:
  """Host arrays of a group, [n, L, K, P, H] each."""
  parts = [
    [np.moveaxis(x[:, places], 1, 0) for x in jax.device_get(arrays)]
    for arrays, places in copies
  ]
  return [
    np.ascontiguousarray(np.concatenate(x)) for x in zip(*parts, strict=True)
  ]


def prefix_layout(
  engine: Engine, layers: tuple[int, int] | None = None
) -> PageLayout:
  """Names, dtypes and shapes of the arrays of a page of an engine.

  The codec of each is a text that is equal for two engines if one can use the
  pages of the other.

  Args:
    engine: Engine that has the pages.
    layers: First and end of the model's layers in a page; None for all.

  Raises:
    OptionError: If the pool's pages can't be cut to another size.
  """
  layouts = _LAYOUTS.setdefault(engine, {})
  if layers not in layouts:
    with engine.between_steps() as pool:
      full_layout = layouts.get(None)
      if full_layout is None:
        full_layout = _layout(engine, pool, engine.scheduler.tree.page)
      layouts[layers] = (
        full_layout if layers is None else _cut(full_layout, pool, layers)
      )
  return layouts[layers]


def _cut(
  whole: PageLayout, pool: PagePool, layers: tuple[int, int]
) -> PageLayout:
  """Layout of the part of a page that belongs to some layers."""
  groups = range(len(pool.groups))
  cuts = [x for group in groups for x in pool.layer_ranges(group, layers)]
  return PageLayout(
    tuple(
      dataclasses.replace(
        leaf,
        shape=(len(cut), *leaf.shape[1:]),
        first=(cut.start, *leaf.first[1:]),
      )
      for leaf, cut in zip(whole.leaves, cuts, strict=True)
      if cut
    )
  )


# Weights of an engine do not change, so they are hashed once.
_LAYOUTS: Any = weakref.WeakKeyDictionary()


def _layout(engine: Engine, pool: PagePool, page: int) -> PageLayout:
  """Layout of whole pages with all layers, as `prefix_layout` returns it."""
  shapes = [pool.page_shapes(g) for g in range(len(pool.groups))]
  # Codes on a TPU have their tokens last.
  axes = [pool.page_axes(g) for g in range(len(pool.groups))]
  arrays = jax.tree.leaves((pool.slots, engine.model))
  if not all(x.is_fully_addressable for x in arrays):
    fault = "pages that are spread over several processes"
  elif not engine.scheduler.reuse or pool.recurrent:
    fault = "an engine that shares no prefixes"
  elif any(g.reach is not None for g in pool.groups):
    fault = "layers that look back a window and let pages go"
  elif any(isinstance(s, SummarySpec) for s in pool.shapes):
    fault = "layers that keep summaries of keys (means, or compressed keys)"
  elif any(
    s[axis] != page
    for group_shapes, places in zip(shapes, axes, strict=True)
    for (s, _), axis in zip(group_shapes, places, strict=True)
  ):
    fault = f"the cache kind {pool.kind}, which codes tokens together"
  else:
    fault = ""
  if fault:
    raise OptionError(
      "engine",
      fault,
      "pages of whole tokens, all in one process",
      "pass cache_kind='dense', or let the other side compute the prompt",
    )
  return page_layout(pool, weights_digest(engine.base), engine.longest)


def page_layout(pool: PagePool, weights: str, longest: int) -> PageLayout:
  """Layout of whole pages of a pool, or of one of shapes.

  Args:
    pool: Pool, whose pages can be cut to another size.
    weights: Digest of the weights (`weights_digest`).
    longest: Maximum number of tokens of a prompt and its answer.
  """
  text = _codec(pool, weights, longest)
  return PageLayout(
    tuple(
      PageLeaf(
        f"{group}.{n}", dtype.name, shape, _axes(len(shape), at), codec=text
      )
      for group in range(len(pool.groups))
      for n, ((shape, dtype), at) in enumerate(
        zip(pool.page_shapes(group), pool.page_axes(group), strict=True)
      )
    )
  )


def page_codec(engine: Engine) -> tuple[str, str]:
  """Codec and dtype of an engine's pages, equal to those of engines like it.

  Of an engine in several processes each of them has to call it, before its
  `EngineGroup` is made: checksums of weights are computed by all.
  """
  with engine.between_steps() as pool:
    weights = weights_digest(engine.base)
    (_, dtype), *_ = pool.page_shapes(0)
    return _codec(pool, weights, engine.longest), dtype.name


def _codec(pool: PagePool, weights: str, longest: int) -> str:
  """Text of a page's codec, see `page_layout`."""
  facts = hashlib.sha256()
  facts.update(repr((weights, longest)).encode())
  facts.update(constants_digest(pool))
  return f"{str(pool.kind)[:100]}{_OF}{facts.hexdigest()[:32]}"


# Between the kind of cache and the digest of the weights, in a codec's text.
_OF = " of "


def _axes(rank: int, token: int) -> tuple[str, ...]:
  """Names of a page's axes, of which one is of tokens."""
  names = ["layer", "head", *(f"dim{i}" for i in range(rank - 3))]
  names.insert(token, "token")
  return tuple(names)


def _check_leaf(
  ours: PageLeaf, theirs: PageLeaf | None, array: np.ndarray | None, pages: int
) -> None:
  """Raise unless a pulled leaf fits this engine, apart from the page size."""
  kind, _, weights = ours.codec.partition(_OF)
  if theirs is None or array is None:
    fault, want = "nothing", "all arrays of a page"
  elif theirs.codec.partition(_OF)[0] != kind or theirs.dtype != ours.dtype:
    fault = f"{theirs.dtype}, cache_kind {theirs.codec.partition(_OF)[0]}"
    want = f"{ours.dtype}, cache_kind {kind}"
  elif theirs.codec != ours.codec:
    fault = f"the mark {theirs.codec.partition(_OF)[2]!r}"
    want = f"{weights!r}: the same weights, constants and longest="
  else:
    at = ours.axes.index("token")
    cut = lambda shape: (*shape[:at], *shape[at + 1 :])
    matches = (ours.axes, ours.first) == (theirs.axes, theirs.first)
    matches = matches and cut(ours.shape) == cut(theirs.shape)
    if matches and array.shape == (pages, *theirs.shape):
      return
    fault = f"{list(array.shape)} of {theirs.axes}"
    want = f"{pages} whole pages of {list(ours.shape)}, any tokens"
  raise OptionError(
    f"leaf {ours.name}",
    fault,
    want,
    "serve one model with the same options on both sides, and pull whole pages",
  )
