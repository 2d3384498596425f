"""Prefixes of one engine for another: with other pages, on another machine.

Guarantees: the keys and values that were computed reach the other engine bit
for bit, also where its pages have another size or its mesh another number of
shards; what was made by other weights, another kind of cache, codec or dtype is
refused. Nothing else of the other engine changes: a prompt finds the prefix
there as if it came out of its store, and what is missing is computed.
Cost: one copy of the prefix to the host, in batches of fixed shapes between
two steps; one copy there into blocks of the other size.
Memory: the prefix on the host of each side.

`export_prefix` -> `rj.transfer.Publisher.publish` -> ticket ->
`rj.transfer.pull` -> `import_prefix`. Whole pages move: the rest of a prompt is
computed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.kv.page_pool import PagePool
from ringjax.models.fingerprint import fingerprint
from ringjax.serve.engine import Engine
from ringjax.serve.prefix_tree import PrefixBlock, next_digest
from ringjax.serve.store_link import read_pages
from ringjax.transfer import PageLayout, PageLeaf, PulledPages, Ticket

# Pages of each shard in one copy.
_BATCH = 16


@dataclasses.dataclass(frozen=True)
class ExportedPrefix:
  """The pages of a prefix, in host memory.

  Attributes:
    tokens: how many the pages hold.
    pages: of each page its leaves, as `Publisher.publish` takes them.
    layout: of each page.
  """

  tokens: int
  pages: list[tuple[np.ndarray, ...]]
  layout: PageLayout


def export_prefix(
  engine: Engine,
  tokens: Int[np.ndarray, " n"],
  *,
  salt: str = "",
  adapter: str = "",
) -> ExportedPrefix:
  """Copies the pages of the longest prefix that an engine has computed.

  Args:
    engine: with `share` of "prompts" or "answers".
    tokens: int32, of a prompt that it has read.
    salt: of the request.
    adapter: of the request.

  Raises:
    OptionError: the engine knows no whole page of it, or has a pool whose
      pages can't be cut elsewhere.
  """
  with engine.between_steps() as pool:
    tree = engine.scheduler.tree
    names = _layout(engine, pool, tree.page)
    chain = tree.chain(tree.root(salt, adapter), tree.pieces(tokens))
    ready = next((n for n, b in enumerate(chain) if not b.ready), len(chain))
    if not ready:
      raise OptionError(
        "tokens",
        f"{len(tokens)} tokens of which no page of {tree.page} is known",
        "the tokens of a prompt that this engine has read",
        "export it before its pages have to make room",
      )
    groups = [
      _read(pool, group, chain[:ready], tree.shards)
      for group in range(len(pool.groups))
    ]
  arrays = [x for group in groups for x in group]
  return ExportedPrefix(
    tokens=ready * tree.page,
    pages=[tuple(x[n] for x in arrays) for n in range(ready)],
    layout=names,
  )


def import_prefix(
  engine: Engine,
  tokens: Int[np.ndarray, " n"],
  ticket: Ticket,
  pulled: PulledPages,
  *,
  salt: str = "",
  adapter: str = "",
) -> int:
  """Lets later requests of an engine find a prefix that was pulled.

  Args:
    engine: with a `store=`, into which the blocks go.
    tokens: int32, those of which the pages are, and any more.
    ticket: of the pages.
    pulled: all pages of the ticket, in their order.
    salt: of the requests.
    adapter: of the requests.

  Returns:
    How many tokens of the prompt the engine finds now.

  Raises:
    OptionError: the engine has no store, or the pages were made by other
      weights, codecs or dtypes.
  """
  with engine.between_steps() as pool:
    link, tree = engine.store_link, engine.scheduler.tree
    if link is None:
      raise OptionError(
        "engine",
        "an engine without a store",
        "one into whose store the prefix can go",
        "pass store=rj.store.Store(host=1 << 30) to it",
      )
    want = _layout(engine, pool, tree.page)
    theirs = {x.name: x for x in ticket.layout.leaves}
    blocks: list[list[np.ndarray]] = []
    count, whole = len(tokens) // tree.page, len(ticket.pages)
    for leaf in want.leaves:
      found, array = theirs.get(leaf.name), pulled.arrays.get(leaf.name)
      if found is None or array is None or not _same(leaf, found, array, whole):
        raise OptionError(
          f"leaf {leaf.name}",
          "nothing" if found is None else f"{found.dtype} {found.codec!r}",
          f"{leaf.dtype} {leaf.codec!r}, {whole} whole pages",
          "serve one model with one cache_kind and dtype on both sides",
        )
      # [n, L, K, P, H] to [L, K, n P, H], then to pages of this engine.
      line = np.concatenate(list(array), axis=2)
      count = min(count, line.shape[2] // tree.page)
      blocks.append(
        np.split(line[:, :, : count * tree.page], count, 2) if count else []
      )
    digest, at = tree.root(salt, adapter).digest, 0
    sizes = [len(pool.page_shapes(g)) for g in range(len(pool.groups))]
    pieces = tree.pieces(tokens, count)
    for n, piece in enumerate(pieces):
      digest, at = next_digest(digest, piece), 0
      for group, size in enumerate(sizes):
        leaves = [x[n] for x in blocks[at : at + size]]
        link.put(group, digest, leaves)
        at += size
    return count * tree.page


def _read(
  pool: PagePool, group: int, blocks: list[PrefixBlock], shards: int
) -> list[np.ndarray]:
  """A group's arrays of some blocks, [n, L, K, P, H] each."""
  parts: list[list[np.ndarray]] = []
  step = _BATCH * shards
  for first in range(0, len(blocks), step):
    some = blocks[first : first + step]
    pages = np.zeros((shards, _BATCH), np.int32)
    places = []
    for n, block in enumerate(some):
      page = block.pages[group]
      assert page is not None
      shard, column = (first + n) % shards, n // shards
      assert shard == block.depth % shards
      pages[shard, column] = page
      places.append(shard * _BATCH + column)
    held = jax.device_get(read_pages(pool, group, pages))
    parts.append([np.moveaxis(x[:, places], 1, 0) for x in held])
  return [
    np.ascontiguousarray(np.concatenate(x)) for x in zip(*parts, strict=True)
  ]


def _layout(engine: Engine, pool: PagePool, page: int) -> PageLayout:
  """Names, dtypes and shapes of a page's arrays.

  Raises:
    OptionError: a pool whose pages can't be cut elsewhere.
  """
  shapes = [pool.page_shapes(g) for g in range(len(pool.groups))]
  arrays = jax.tree.leaves((pool.slots, engine.model))
  if not all(x.is_fully_addressable for x in arrays):
    fault = "pages that are spread over several processes"
  elif not engine.scheduler.reuse or pool.recurrent:
    fault = "an engine that shares no prefixes"
  elif any(g.reach is not None for g in pool.groups):
    fault = "layers that look back a window and let pages go"
  elif any(s[2:3] != (page,) for group in shapes for s, _ in group):
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
  facts.update(repr((fingerprint(engine.model), engine.longest)).encode())
  for x in jax.tree.leaves(pool.constants):
    facts.update(np.asarray(x).tobytes())
  text = f"{str(pool.kind)[:100]} {facts.hexdigest()[:32]}"
  return PageLayout(
    tuple(
      PageLeaf(
        f"{group}.{n}",
        dtype.name,
        shape,
        ("layer", "head", "token", *(f"dim{i}" for i in range(len(shape) - 3))),
        codec=text,
      )
      for group, some in enumerate(shapes)
      for n, (shape, dtype) in enumerate(some)
    )
  )


def _same(ours: PageLeaf, theirs: PageLeaf, array: Any, pages: int) -> bool:
  """Whether pulled pages are of what this engine has, pages of another size
  apart."""
  cut = lambda shape: (*shape[:2], *shape[3:])
  return (
    (ours.dtype, ours.codec, ours.axes, ours.first)
    == (theirs.dtype, theirs.codec, theirs.axes, theirs.first)
    and cut(ours.shape) == cut(theirs.shape)
    and array.shape == (pages, *theirs.shape)
  )
