"""Prefixes of one engine for another: with other pages, on another machine.

Guarantees: the keys and values that were computed reach the other engine bit
for bit, also where its pages have another size or its mesh another number of
shards; what was made by other weights, another kind of cache, codec or dtype is
refused, and so are pages of other tokens, in another order or of another
adapter: each page comes with a hash of all tokens up to its end. Of a step that
failed, also silently by a read of weights, no page leaves. Nothing else
of the other engine changes: a prompt finds the prefix there as if it came out
of its store, and what is missing is computed.
Cost: one copy of the prefix to the host, in batches of fixed shapes, or on the
devices alone (`on_devices`, for a publisher with a `DeviceServer`); one copy
there into blocks of the other size. Between two steps of an engine stand no
copies: reading pages is begun there, some batches at a time. Parts of a prompt
that share their `PrefixHashes` hash each page once.
Memory: the prefix on the host of each side, or with `on_devices` on the devices
until its pages return; on the device these batches, and of what leaves in the
middle of a step all of its pages, a part of their layers.

`export_prefix` -> `rj.transfer.Publisher.publish` with `labels` -> ticket ->
`rj.transfer.pull` -> `import_prefix`. Whole pages move: the rest of a prompt is
computed again. A prompt that is still being read can move in parts, with
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
from ringjax.kv.page_pool import PagePool
from ringjax.serve.engine import Engine
from ringjax.serve.prefix_tree import PrefixBlock, PrefixTree, next_digest
from ringjax.serve.store_link import read_pages, weights_digest
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
# Pages of each shard in one copy, and copies that are begun between two steps.
_BATCH, _COPIES = 16, 8


@dataclasses.dataclass(frozen=True)
class ExportedPrefix:
  """The pages of a prefix.

  Attributes:
    tokens: how many the pages hold.
    pages: of each page its leaves, as `Publisher.publish` takes them: in the
      memory of the host, or with `on_devices` pages of batches.
    layout: of each page.
    labels: of each page a hash of all tokens up to its end, of the adapter and
      of how the prompt rotates.
  """

  tokens: int
  pages: Sequence[tuple[np.ndarray, ...] | DevicePage]
  layout: PageLayout
  labels: list[str]


class PrefixHashes:
  """Hashes of a prompt's pages, for calls with its successive parts.

  Each is of all tokens up to the end of its page, and is made once; and each
  part is looked up from where the one before ended. With another prompt they
  begin anew.
  """

  def __init__(self) -> None:
    self._data = b""
    self._made: dict[tuple[bytes, int], list[bytes]] = {}
    # Blocks of the part before, behind this root.
    self._root: PrefixBlock | None = None
    self._part: list[PrefixBlock] = []

  def chain(
    self,
    tree: PrefixTree,
    root: PrefixBlock,
    tokens: Int[np.ndarray, " n"],
    first: int,
  ) -> list[PrefixBlock]:
    """The blocks of a prompt behind the first ones, as far as there are.

    Args:
      tree: of the engine, between two of its steps.
      root: of the tree, before the prompt.
      tokens: int32, of the prompt.
      first: how many are left out.
    """
    self._begin(np.ascontiguousarray(tokens, "<i4").tobytes())
    at, skipped = root, 0
    if root is self._root:
      for block in self._part:
        # Blocks go from the end of a chain: before one that is there all are.
        parent = block.parent
        there = parent is not None and parent.children.get(block.data) is block
        if there and block.depth == first - 1:
          at, skipped = block, first
    size = 4 * tree.page
    # Cut as they are looked up: most of a prompt may still have to be read.
    behind = tree.chain(
      at,
      (
        self._data[n * size : (n + 1) * size]
        for n in range(skipped, len(self._data) // size)
      ),
    )
    found = behind[first - skipped :]
    self._root, self._part = root, found
    return found

  def _begin(self, data: bytes) -> None:
    """Forgets another prompt."""
    if data != self._data:
      self._data, self._made, self._root = data, {}, None

  def of(
    self, tokens: Int[np.ndarray, " n"], page: int, start: bytes, count: int
  ) -> list[bytes]:
    """Those of the first pages, in their order.

    Args:
      tokens: int32, of the prompt.
      page: tokens of a page.
      start: a hash of what comes before all tokens.
      count: how many, at most; there are n // page.
    """
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    self._begin(data)
    made, size = self._made.setdefault((start, page), []), 4 * page
    count = min(count, len(data) // size)
    for n in range(len(made), count):
      before = made[-1] if made else start
      made.append(next_digest(before, data[n * size : (n + 1) * size]))
    return made[:count]


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

  The engine goes on meanwhile; where it lets pages go the prefix is shorter.

  Args:
    engine: with `share` of "prompts" or "answers".
    tokens: int32, of a prompt that it has read; all of it where rotations
      depend on its length.
    salt: of the request.
    adapter: of the request.
    first: leaves out so many pages, which have moved before.
    layers: of the model, first and end, of which the pages have their part
      alone; None for all.
    hashes: of the prompt, from calls for parts before these pages.
    on_devices: whether the copies stay on the engine's devices, in batches of
      a fixed size (`copied_pages`).

  Raises:
    OptionError: the engine knows no whole page of it behind these, has no such
      adapter, or has a pool whose pages can't be cut elsewhere; a step failed.
    CheckpointFormatError: weights of a step that is under way could not be
      read.
    CheckpointMismatchError: or are not finite.
    PromptError: tokens that are none.
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
      some = list(itertools.takewhile(_there, chain[at : at + step]))
      copies = [
        _begin_copies(pool, group, some, tree.shards, layers)
        for group in range(len(pool.groups))
      ]
    pages += _pages_of(copies, len(some), on_devices)
    if len(some) < step:
      break
  # Blocks are known from when their step is planned. All that was copied is
  # computed by now, and a read that failed in it has said so; the engine raises
  # that a step later.
  with engine.between_steps():
    for fault in engine.model.stack.faults:
      if fault.silent and fault.error is not None:
        raise fault.error
  if not pages:
    raise OptionError(
      "tokens",
      f"{len(tokens)} tokens of which no page of {tree.page} is known"
      + (f" behind {first} pages" if first else ""),
      "the tokens of a prompt that this engine has read",
      "export it before its pages have to make room",
    )
  found = hashes.of(tokens, tree.page, start, first + len(pages))
  return ExportedPrefix(
    tokens=len(pages) * tree.page,
    pages=pages,
    layout=layout,
    labels=[_label(x) for x in found[first:]],
  )


def copied_pages(engine: Engine, count: int) -> int:
  """Pages that copies of so many have room for: whole batches of them."""
  step = _BATCH * engine.scheduler.tree.shards
  return -(-count // step) * step


class LayerCopies:
  """Pages of a prompt that a step computes, some of their layers, on their way
  to the host, or for readers on the devices.

  Attributes:
    layers: of the model, first and end.
    count: pages.
  """

  def __init__(
    self,
    layers: tuple[int, int],
    count: int,
    export: Callable[[], ExportedPrefix],
  ):
    self.layers, self.count, self._export = layers, count, export

  def result(self) -> ExportedPrefix:
    """The pages; waits for the device."""
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
  """Begins copies of the layers that a step has just been told to compute.

  For `Engine.on_layers`, by its thread. Whether the step is good is known only
  behind it: hold them until `export_prefix` has returned the pages of the last
  part, without which no reader can use them.

  Args:
    engine: with `layer_parts`.
    pool: what `on_layers` got.
    tokens: int32, of the prompt.
    part: its number.
    salt: of the request.
    adapter: of the request.
    first: leaves out so many pages, which have moved before.
    most: pages, at most.
    hashes: of the prompt.
    on_devices: whether the copies stay on the engine's devices.

  Returns:
    None if there are no such pages.
  """
  layers, tree = engine.layer_parts[part], engine.scheduler.tree
  layout = prefix_layout(engine, layers)
  salt = engine.prefix_salt(salt, len(tokens))
  chain = hashes.chain(tree, tree.root(salt, adapter), tokens, first)
  some = list(itertools.takewhile(_there, chain[:most]))
  if not some:
    return None
  copies = [
    _begin_copies(pool, group, some, tree.shards, layers)
    for group in range(len(pool.groups))
  ]
  for held, _ in itertools.chain.from_iterable(copies):
    for x in () if on_devices else held:
      x.copy_to_host_async()
  start = _label_start(engine, len(tokens), adapter)

  def export() -> ExportedPrefix:
    found = hashes.of(tokens, tree.page, start, first + len(some))[first:]
    return ExportedPrefix(
      tokens=len(some) * tree.page,
      pages=_pages_of(copies, len(some), on_devices),
      layout=layout,
      labels=[_label(x) for x in found],
    )

  return LayerCopies(layers, len(some), export)


class LayerParts:
  """Puts pages together whose layers come apart, as from `begin_layers`.

  Guarantees: pages are whole or not there; what is not followed by the layers
  behind it is forgotten when other pages come.
  """

  def __init__(self, engine: Engine):
    self._whole = prefix_layout(engine)
    self._held: list[tuple[Ticket, PulledPages]] = []

  def add(
    self, ticket: Ticket, pulled: PulledPages
  ) -> tuple[Ticket, PulledPages] | None:
    """Takes the pages of a ticket.

    Args:
      ticket: of pages with all layers or some.
      pulled: all pages of it.

    Returns:
      What a ticket for all layers would have brought, once they are there.
    """
    if any("layer" not in leaf.axes for leaf in ticket.layout.leaves):
      # Of another kind of pages: `import_prefix` says so.
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
    held, self._held = self._held, []
    return _joined(held)

  def _follows(self, ticket: Ticket) -> bool:
    """Whether layers go on where those that are there end."""
    ends = self._ends()
    return all(
      leaf.first[_layer(leaf)] == ends.get(leaf.name, 0)
      for leaf in ticket.layout.leaves
    )

  def _ends(self) -> dict[str, int]:
    """Up to which of its layers each leaf is there."""
    return {
      leaf.name: leaf.first[_layer(leaf)] + leaf.shape[_layer(leaf)]
      for ticket, _ in self._held
      for leaf in ticket.layout.leaves
    }


def _layer(leaf: PageLeaf) -> int:
  """The axis of layers."""
  return leaf.axes.index("layer")


def _joined(
  parts: list[tuple[Ticket, PulledPages]],
) -> tuple[Ticket, PulledPages]:
  """Pages of which each part has layers, first ones first."""
  if len(parts) == 1:
    return parts[0]
  found: dict[str, list[tuple[PageLeaf, np.ndarray]]] = {}
  for ticket, pulled in parts:
    for leaf in ticket.layout.leaves:
      found.setdefault(leaf.name, []).append((leaf, pulled.arrays[leaf.name]))
  arrays, leaves = {}, []
  for name, some in found.items():
    leaf, at = some[0][0], _layer(some[0][0])
    arrays[name] = np.concatenate([x for _, x in some], axis=1 + at)
    shape = *leaf.shape[:at], arrays[name].shape[1 + at], *leaf.shape[at + 1 :]
    leaves.append(dataclasses.replace(leaf, shape=shape))
  ticket, one = parts[0]
  return (
    dataclasses.replace(ticket, layout=PageLayout(tuple(leaves))),
    dataclasses.replace(
      one,
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
    engine: with a `store=`, into which the blocks go.
    tokens: int32, those of which the pages are, and any more; the whole prompt
      where rotations depend on its length.
    ticket: of the pages.
    pulled: all pages of the ticket, in their order.
    salt: of the requests.
    adapter: of the requests.
    first: pages before those of the ticket, as of `export_prefix`; their
      tokens have to be whole pages here.
    hashes: of the prompt, from calls for parts before these pages.

  Returns:
    How many tokens of the prompt the engine finds now, if it still has those
    of the pages before `first`: fewer than came where the store did not keep
    them.

  Raises:
    OptionError: the engine has no store or no such adapter, or the pages are
      of other tokens, or were made by other weights, codecs or dtypes.
    PromptError: tokens that are none.
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
  whole, size = len(pulled.labels), 0
  for leaf in want.leaves:
    found, array = theirs.get(leaf.name), pulled.arrays.get(leaf.name)
    _check_leaf(leaf, found, array, whole)
    assert found is not None and array is not None
    axis = leaf.axes.index("token")
    if size and found.shape[axis] != size:
      raise OptionError(
        f"leaf {leaf.name}",
        f"{found.shape[axis]} tokens beside {size} of other leaves",
        "pages of as many tokens in all leaves",
        "publish what export_prefix returns",
      )
    size = found.shape[axis]
    # [n, ..., P, ...] to [..., n P, ...].
    lines.append((np.concatenate(list(array), axis=axis), axis))
  skipped, rest = divmod(first * size, page)
  if rest:
    raise OptionError(
      "first",
      f"{first} pages of {size} tokens",
      f"a whole number of pages of {page}",
      "export parts of as many tokens as are whole pages on both sides",
    )
  hashes = hashes or PrefixHashes()
  start = _label_start(engine, len(tokens), adapter)
  mine = hashes.of(tokens, size, start, first + whole)[first:]
  known = 0
  for known, (made, label) in enumerate(
    zip(mine, pulled.labels, strict=False), 1
  ):
    if _label(made) != label:
      raise OptionError(
        f"page {known - 1} of the ticket",
        "one of other tokens, another adapter or another place",
        f"tokens {(first + known - 1) * size} to {(first + known) * size} of "
        "this prompt",
        "publish with labels=, pull all pages in order, and pass the prompt "
        "and the adapter of the export",
      )
  count = known * size // page
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
    for group, some in enumerate(sizes):
      leaves = [x[n] for x in blocks[at : at + some]]
      link.put(group, digests[skipped + n], leaves)
      at += some
  gone = [
    n
    for n in range(skipped, len(digests))
    if not all(link.holds(g, digests[n]) for g in range(len(sizes)))
  ]
  if gone:
    pieces = tree.pieces(tokens, len(digests))
    with engine.between_steps():
      chain = tree.chain(tree.root(salt, adapter), pieces)
      for n in gone:
        if n >= len(chain) or not chain[n].ready:
          return n * page
  return len(digests) * page


def _label_start(engine: Engine, length: int, adapter: str) -> bytes:
  """All on which the keys of a prompt depend beside its tokens, and which the
  layout does not tell."""
  facts = engine.adapter_digest(adapter), engine.rotations(length)
  return repr(facts).encode()


def _label(digest: bytes) -> str:
  """The text that goes with a page."""
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
  """Copies of a group's pages of successive blocks, which the device makes
  before it computes what comes next; where in them the blocks are."""
  found: _Copies = []
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
    held: Any = read_pages(pool, group, pages, layers)
    found.append((held, places))
  return found


def _pages_of(
  copies: list[_Copies], count: int, on_devices: bool
) -> Sequence[tuple[np.ndarray, ...] | DevicePage]:
  """Of each page its leaves, of the copies of all groups."""
  if on_devices:
    # As copies to the host do: whether a step is good is known behind it.
    jax.block_until_ready([held for group in copies for held, _ in group])
    # In each group the pages lie in the same rows.
    return [
      DevicePage(batch, row)
      for parts in zip(*copies, strict=True)
      for batch in [PageBatch(tuple(x for held, _ in parts for x in held), 1)]
      for row in parts[0][1]
    ]
  arrays = [x for group in copies for x in _copied(group)]
  return [tuple(x[n] for x in arrays) for n in range(count)]


def _copied(copies: _Copies) -> list[np.ndarray]:
  """A group's arrays, [n, L, K, P, H] each, on the host."""
  parts = [
    [np.moveaxis(x[:, places], 1, 0) for x in jax.device_get(held)]
    for held, places in copies
  ]
  return [
    np.ascontiguousarray(np.concatenate(x)) for x in zip(*parts, strict=True)
  ]


def prefix_layout(
  engine: Engine, layers: tuple[int, int] | None = None
) -> PageLayout:
  """Names, dtypes and shapes of the arrays of a page of an engine.

  The codec of each is a text that two engines have in common if one can use
  the pages of the other.

  Args:
    engine: whose pages.
    layers: of the model, first and end, that are in a page; None for all.

  Raises:
    OptionError: a pool whose pages can't be cut elsewhere.
  """
  made = _LAYOUTS.setdefault(engine, {})
  if layers not in made:
    with engine.between_steps() as pool:
      whole = made.get(None)
      if whole is None:
        whole = _layout(engine, pool, engine.scheduler.tree.page)
      made[layers] = whole if layers is None else _cut(whole, pool, layers)
  return made[layers]


def _cut(
  whole: PageLayout, pool: PagePool, layers: tuple[int, int]
) -> PageLayout:
  """The part of a page that some layers have."""
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


# Weights of an engine do not change: they are looked at once.
_LAYOUTS: Any = weakref.WeakKeyDictionary()


def _layout(engine: Engine, pool: PagePool, page: int) -> PageLayout:
  """See `prefix_layout`."""
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
  elif any(
    s[axis] != page
    for some, places in zip(shapes, axes, strict=True)
    for (s, _), axis in zip(some, places, strict=True)
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
  facts = hashlib.sha256()
  facts.update(repr((weights_digest(engine.base), engine.longest)).encode())
  for x in jax.tree.leaves(pool.constants):
    facts.update(np.asarray(x).tobytes())
  text = f"{str(pool.kind)[:100]}{_OF}{facts.hexdigest()[:32]}"
  return PageLayout(
    tuple(
      PageLeaf(
        f"{group}.{n}", dtype.name, shape, _axes(len(shape), at), codec=text
      )
      for group, (some, places) in enumerate(zip(shapes, axes, strict=True))
      for n, ((shape, dtype), at) in enumerate(zip(some, places, strict=True))
    )
  )


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
  """Raises unless pulled pages are of what this engine has, pages of another
  size apart."""
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
    same = (ours.axes, ours.first) == (theirs.axes, theirs.first)
    same = same and cut(ours.shape) == cut(theirs.shape)
    if same and array.shape == (pages, *theirs.shape):
      return
    fault = f"{list(array.shape)} of {theirs.axes}"
    want = f"{pages} whole pages of {list(ours.shape)}, any tokens"
  raise OptionError(
    f"leaf {ours.name}",
    fault,
    want,
    "serve one model with the same options on both sides, and pull whole pages",
  )
