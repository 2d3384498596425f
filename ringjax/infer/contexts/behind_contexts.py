"""Contexts that were encoded apart, combined with a question.

Guarantees: one context alone answers as the same text read at once. Contexts at
the same positions may come in any order: they are placed in the order of
their digests, so that not even a sum changes. Tokens of contexts are not
computed again, but for those that `Recompute` chooses.
Cost: one copy of the contexts to the devices; tokens computed are the links',
the recomputed and the question's.
Memory: the contexts of all rows on the devices, and room for what follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringjax.checks import positive_int
from ringjax.errors import MemoryEstimateError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.contexts.combine import (
  APE,
  Cepe,
  Combine,
  Full,
  KVLink,
  Recompute,
  Selection,
  combine_of,
)
from ringjax.infer.contexts.context_library import (
  ContextLibrary,
  EncodedContext,
  cache_spec,
  check_origin,
  context_tokens,
)
from ringjax.infer.contexts.differing import differing_tokens
from ringjax.infer.contexts.encoder_session import encoder_session
from ringjax.infer.prefill import padded, read
from ringjax.infer.prompt_reading import check_call
from ringjax.infer.session import Session, free_on, on_its_mesh
from ringjax.kv.base import bytes_each
from ringjax.kv.cache import Blocks
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.context_cache import (
  ContextCache,
  PlacedContext,
  placed,
  slots_for,
)
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.attention.apart import SelectedView, WeighedView
from ringjax.ops.attention.code_format import token_axis
from ringjax.ops.mask import Coords

# Slots of a tile of contexts that queries select, and of one call's tokens.
_TILE, _CHUNK = 64, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextReport:
  """What was done with contexts before the question.

  Attributes:
    combine: how they are combined.
    contexts: of all rows together.
    tokens: of contexts, all rows together.
    encoded: tokens that were computed to encode contexts that were not there.
    computed: tokens that were computed to combine them, of all rows: prefix,
      links and recomputed ones.
    nbytes: of keys and values that went to the devices, or of the states of
      an encoder.
  """

  combine: Combine
  contexts: int
  tokens: int
  encoded: int
  computed: int
  nbytes: int


@dataclasses.dataclass(kw_only=True)
class _Row:
  """A row's contexts in their places.

  Attributes:
    contexts: keys and values, and where they are read.
    texts: int32 [n], tokens that are computed, by position.
    at: their positions.
    end: the position of the question.
  """

  contexts: list[PlacedContext]
  texts: np.ndarray
  at: np.ndarray
  end: int


@on_its_mesh
def context_session(
  model: Transformer,
  contexts: Sequence[Any],
  combine: Combine | str = "parallel",
  *,
  capacity: int,
  batch: int | None = None,
  library: ContextLibrary | None = None,
  mesh: Mesh | None = None,
  axis: str | None = None,
  dtype: DTypeLike | None = None,
  cache_kind: CacheKind | str | None = None,
  progress: Callable[[int], Any] | None = None,
) -> Session:
  """A session behind contexts, for `rj.infer.generate(..., cache=session)`.

  `session.cache.snapshot()` and `restore` ask several questions.

  Args:
    model: made by `rj.models.load` or `create`.
    contexts: documents, each its ids or an `EncodedContext`: those of all rows,
      or for each row a list of them.
    combine: how they are combined, one of `WAYS` by its name, with options as
      in "ape:temperature=0.8", or an object; not "full", which has no session.
    capacity: tokens of questions and answers, of a row.
    batch: rows; default: as many as there are lists of contexts, or 1.
    library: which encodes documents and keeps them; default: one for this call.
    mesh: see `Session`.
    axis: see `Session`.
    dtype: see `Session`.
    cache_kind: how keys and values are stored; default: the library's, or
      "dense", and "unrotated" where contexts move.
    progress: called with the number of documents that are encoded.

  Raises:
    RingjaxError: in Python, before anything is computed.
  """
  check_call(model, [])
  capacity = positive_int("capacity", capacity)
  how = combine_of(combine)
  if isinstance(how, Full):
    raise OptionError(
      "combine",
      "'full', which reads contexts and question as one text",
      "a way to combine contexts that are encoded apart",
      "call generate with combine='full'",
    )
  rows = context_rows(contexts, batch)
  options = dict(mesh=mesh, axis=axis, dtype=dtype, cache_kind=cache_kind)
  if isinstance(how, Cepe):
    session, tokens, nbytes = encoder_session(
      model, rows, how, capacity=capacity, library=library, options=options
    )
    session.contexts = ContextReport(
      combine=how,
      contexts=sum(map(len, rows)),
      tokens=tokens,
      encoded=tokens,
      computed=0,
      nbytes=nbytes,
    )
    return session
  library = _library(model, how, rows, library, options)
  _check_ways(model, how, library)
  _prefix_ids(how, model.config.vocab)
  texts = [_checked(row, library, model) for row in rows]
  lengths = [[text.size for text in row] for row in texts]
  prefix = len(library.prefix)
  ends = [_end(how, row, prefix) for row in lengths]
  _check_lengths(model, how, lengths, ends, capacity)
  extra = max(_extra(how, row, prefix) for row in lengths)
  shards = library.shards
  room = padded(extra, shards) + shards + capacity + shards
  tile = _TILE if isinstance(how, Selection) else 1
  room = padded(room, shards)
  session = Session(model, room, batch=len(rows), **library.options)
  local = slots_for(lengths, shards, tile)
  spec = cache_spec(model, session, len(rows), local * shards)
  _check_memory(spec, session)
  before = library.counters.tokens
  ready = _encoded(rows, library, progress)
  arranged = [
    _placed_row(model, session, how, row, library.prefix) for row in ready
  ]
  cache, owner = placed(spec, [row.contexts for row in arranged], tile)
  session.cache = ContextCache(
    open=_behind_prefix(model, session, ready),
    kind=session.cache.kind,
    limit=max(ends) + capacity,
    contexts=cache,
    weigh=_weighed(how, owner, max(map(len, rows))),
  )
  _read_at(model, session, arranged)
  for seen, row, new in zip(session.seen, texts, arranged, strict=True):
    seen[np.concatenate([*row, new.texts, library.prefix]).astype(int)] = True
  session.contexts = ContextReport(
    combine=how,
    contexts=sum(map(len, rows)),
    tokens=sum(map(sum, lengths)),
    encoded=library.counters.tokens - before,
    computed=sum(row.texts.size for row in arranged),
    nbytes=sum(x.nbytes for x in jax.tree.leaves(cache.slots)),
  )
  return session


def context_rows(contexts: Sequence[Any], batch: int | None) -> list[list[Any]]:
  """The contexts of each row, of those of all rows or of a list for each.

  Raises:
    PromptError: none, or as many lists as there are not rows.
  """
  given = isinstance(contexts, Sequence) and not isinstance(contexts, str)
  if not given or not len(contexts):
    raise PromptError(
      "contexts",
      "none" if given else f"a {type(contexts).__name__}",
      "a list of documents, each its ids or an EncodedContext",
      "pass at least one, or leave contexts out",
    )
  if any(_is_context(context) for context in contexts):
    return [list(contexts) for _ in range(batch or 1)]
  if batch is not None and len(contexts) != batch:
    raise PromptError(
      "contexts",
      f"{len(contexts)} lists of contexts for {batch} rows",
      "a list for each row, or one for all",
      "pass as many as there are prompts",
    )
  for number, row in enumerate(contexts):
    if not isinstance(row, Sequence) or not len(row):
      raise PromptError(
        "contexts",
        f"row {number} without contexts",
        "at least one in each row",
        "answer that row in a call of its own",
      )
  return [list(row) for row in contexts]


def _is_context(x: Any) -> bool:
  """Whether it is a context, and not a list of some."""
  if isinstance(x, EncodedContext):
    return True
  first = x[0] if isinstance(x, Sequence) and len(x) else None
  return isinstance(x, np.ndarray | jax.Array) or isinstance(
    first, int | np.integer
  )


def joined(
  contexts: Sequence[Any],
  prompts: Sequence[np.ndarray],
  how: Combine,
  vocab: int,
) -> list[np.ndarray]:
  """Prefix, contexts and prompt of each row as one text, for `Full`."""
  rows, found = context_rows(contexts, len(prompts)), []
  prefix = _prefix_ids(how, vocab)
  for row, prompt in zip(rows, prompts, strict=True):
    raw = [x.tokens if isinstance(x, EncodedContext) else x for x in row]
    texts = context_tokens(raw, vocab)
    found.append(np.concatenate([prefix, *texts, prompt]))
  return found


def _prefix_ids(how: Combine, vocab: int) -> np.ndarray:
  """The prefix, int32 [n]; ids that the model does not have are refused."""
  if not how.prefix:
    return np.zeros(0, np.int32)
  return inputs.prompt(list(how.prefix), vocab)


def _library(
  model: Transformer,
  how: Combine,
  rows: list[list[Any]],
  library: ContextLibrary | None,
  options: dict[str, Any],
) -> ContextLibrary:
  """The library that encodes, with the prefix that all contexts share."""
  if library is None:
    kind = options["cache_kind"]
    if kind is None:
      options["cache_kind"] = "unrotated" if how.moves else "dense"
    encoded = [x for row in rows for x in row if isinstance(x, EncodedContext)]
    prefix = how.shared_prefix
    if encoded and not prefix and not isinstance(how, KVLink):
      prefix = encoded[0].prefix
    return ContextLibrary(model, prefix=prefix, **options)
  for name, value in options.items():
    if value is not None:
      raise OptionError(
        name,
        "a value beside library=",
        "the library's own",
        "leave it out: the library has its own",
      )
  if library.model is not model:
    raise OptionError(
      "library",
      "one of another model",
      "one that was made for this model",
      "make one with rj.infer.ContextLibrary(model)",
    )
  if how.shared_prefix and how.shared_prefix != library.prefix:
    raise OptionError(
      "prefix",
      f"one of {len(how.shared_prefix)} tokens that is not the library's",
      f"the library's of {len(library.prefix)} tokens",
      "leave it out, or make a library with this prefix",
    )
  return library


def _check_ways(
  model: Transformer, how: Combine, library: ContextLibrary
) -> None:
  """Refuses a way to combine that a kind of cache or a model can't do."""
  kind = library.kind
  if how.moves and model.config.positions is not None:
    raise OptionError(
      "combine",
      f"{how.name!r}, which moves keys, for a {model.config.family}",
      "a model whose positions are rotations, not learned ones within its keys",
      "pass combine='full' or 'parallel'",
    )
  if how.moves and not kind.unrotated:
    raise OptionError(
      "cache kind",
      f"{kind}, for combine={how.name!r}, which moves keys",
      "a kind that stores keys before their rotation",
      "pass cache_kind='unrotated', or with a codec rj.kv.CacheKind("
      "codec=..., unrotated=True)",
    )
  scaled = [rope.scaling for rope in model.config.ropes]
  if any(x is not None and x.by_length for x in scaled) and not kind.unrotated:
    raise OptionError(
      "cache kind",
      f"{kind}, for a model whose rotation depends on the context's length",
      "a kind that stores keys before their rotation",
      "pass cache_kind='unrotated'",
    )
  if isinstance(how, KVLink):
    if library.prefix:
      raise OptionError(
        "library",
        f"one with a prefix of {len(library.prefix)} tokens",
        "one without: contexts of KVLink do not see it",
        "pass KVLink(prefix=...), and a library without",
      )
    if how.links is not None:
      how.links.check(model.config.vocab)


def _checked(
  row: list[Any], library: ContextLibrary, model: Transformer
) -> list[np.ndarray]:
  """The tokens of a row's contexts."""
  for number, context in enumerate(row):
    if isinstance(context, EncodedContext):
      name = f"context {number}"
      check_origin(context, library.origin, library.prefix, name)
  raw = [x.tokens if isinstance(x, EncodedContext) else x for x in row]
  return context_tokens(raw, model.config.vocab)


def _before(how: Combine, prefix: int) -> int:
  """Tokens before the contexts, of which `prefix` are the library's."""
  return len(how.prefix) if isinstance(how, KVLink) else prefix


def _each(how: Combine) -> int:
  """Link tokens behind a context."""
  links = how.links if isinstance(how, KVLink) else None
  return 0 if links is None else links.each


def _end(how: Combine, lengths: list[int], prefix: int) -> int:
  """The position of the question behind contexts of these lengths."""
  first = _before(how, prefix)
  if not how.moves:
    return first + max(lengths)
  return first + sum(lengths) + _each(how) * len(lengths)


def _extra(how: Combine, lengths: list[int], prefix: int) -> int:
  """Tokens that are in the open cache before the question."""
  found = _before(how, prefix) + _each(how) * len(lengths)
  if isinstance(how, Recompute):
    found += _recomputed(how, sum(lengths))
  return found


def _recomputed(how: Recompute, tokens: int) -> int:
  return min(tokens, int(np.ceil(how.fraction * tokens)))


def _check_lengths(
  model: Transformer, how: Combine, rows: list[list[int]], ends: list[int],
  capacity: int,
) -> None:  # fmt: skip
  """Refuses contexts beyond the model's context or the links' slots."""
  row = int(np.argmax(ends))
  inputs.within_context(
    model.config,
    ends[row] + capacity,
    f"{ends[row]:,} positions of contexts in row {row} and {capacity:,} "
    "of question and answer",
  )
  links = how.links if isinstance(how, KVLink) else None
  most = max(map(len, rows))
  if links is not None and most > links.documents:
    raise PromptError(
      "contexts",
      f"{most} of a row",
      f"at most {links.documents}, the slots of the link tokens",
      "pass fewer contexts, or train links for more",
    )


def _check_memory(spec: Any, session: Session) -> None:
  """Refuses contexts that do not fit on the devices."""
  each = bytes_each(spec)
  free, devices = free_on(session.mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      "contexts",
      f"{each:,} bytes on each of {devices} device(s)",
      f"at most the {free:,} that are free there",
      "pass fewer contexts, a kind of cache with a codec (cache_kind='int4'), "
      "or shard the sequence over more devices",
    )


def _encoded(
  rows: list[list[Any]],
  library: ContextLibrary,
  progress: Callable[[int], Any] | None,
) -> list[list[EncodedContext]]:
  """The contexts of all rows, those that came as ids read together."""
  raw = [x for row in rows for x in row if not isinstance(x, EncodedContext)]
  made = iter(library.encode(raw, progress=progress) if raw else ())
  return [
    [x if isinstance(x, EncodedContext) else next(made) for x in row]
    for row in rows
  ]


def _placed_row(
  model: Transformer,
  session: Session,
  how: Combine,
  row: list[EncodedContext],
  prefix: tuple[int, ...],
) -> _Row:
  """A row's contexts in their places, and what is computed beside them."""
  first = _before(how, len(prefix))
  lengths = [x.tokens.size for x in row]
  if not how.moves:
    # Their order is that of their digests, so that sums are the same.
    row = sorted(row, key=lambda x: x.digest)
    places = [first + np.arange(x.tokens.size) for x in row]
    contexts = [
      PlacedContext(x.blocks, at) for x, at in zip(row, places, strict=True)
    ]
    none = np.zeros(0, np.int32)
    return _Row(contexts=contexts, texts=none, at=none,
                end=first + max(lengths))  # fmt: skip
  texts, at, contexts, place = [], [], [], first
  if isinstance(how, KVLink):
    texts.append(np.asarray(how.prefix, np.int32))
    at.append(np.arange(first))
  for slot, context in enumerate(row):
    stop = place + context.tokens.size
    contexts.append(PlacedContext(context.blocks, np.arange(place, stop)))
    place = stop
    if isinstance(how, KVLink) and how.links is not None:
      texts.append(how.links.ids(slot))
      at.append(np.arange(place, place + how.links.each))
      place += how.links.each
  if isinstance(how, Recompute):
    count = _recomputed(how, sum(lengths))
    anew = differing_tokens(model, session, row, prefix, count)
    for number, (context, those) in enumerate(zip(row, anew, strict=True)):
      held = contexts[number]
      texts.append(context.tokens[those])
      at.append(held.pos[those])
      contexts[number] = PlacedContext(
        _without(held.blocks, those), held.pos[~those]
      )
  return _Row(
    contexts=contexts,
    texts=np.concatenate([*texts, np.zeros(0, np.int32)]).astype(np.int32),
    at=np.concatenate([*at, np.zeros(0, np.int32)]).astype(np.int32),
    end=place,
  )


def _without(blocks: Blocks, gone: np.ndarray) -> Blocks:
  """Blocks without the tokens in `gone`, bool [n]."""
  stay = np.flatnonzero(~gone)
  take = lambda x: np.take(x, stay, token_axis(x[:, None]) - 1)
  at = Coords(*(x[stay] for x in blocks.at))
  return Blocks(at, jax.tree.map(take, blocks.parts), blocks.kind)


def _behind_prefix(
  model: Transformer, session: Session, ready: list[list[EncodedContext]]
) -> Any:
  """The session's cache with the prefix that all contexts were read behind."""
  first = ready[0][0]
  if first.prefix_blocks is None:
    return session.cache
  empty = cache_spec(model, session, session.batch, session.cache.capacity)
  at = np.arange(len(first.prefix))
  one = [PlacedContext(first.prefix_blocks, at)]
  return placed(empty, [one] * session.batch)[0]


def _weighed(how: Combine, owner: jax.Array, most: int) -> Any:
  """How the contexts' keys are weighed, for `ContextCache.weigh`."""
  if isinstance(how, APE) and (how.temperature, how.scale) != (1, 1):
    scale = jnp.float32(how.scale * how.temperature)
    return WeighedView(None, scale, how.temperature)
  if isinstance(how, Selection) and how.keep < most:
    # Few counts, so that few programs are compiled.
    count = 1 << (most - 1).bit_length()
    return SelectedView(None, owner, count, how.keep, how.by)
  return None


def _read_at(
  model: Transformer, session: Session, rows: Sequence[_Row]
) -> None:
  """Reads tokens of each row at their own positions."""
  longest = max(row.texts.size for row in rows)
  if not longest:
    return
  shards, total = session.shards, jnp.int32(session.capacity)
  width = padded(longest, shards)
  shape = (len(rows), width)
  tokens, pos, seg = (np.zeros(shape, np.int32) for _ in range(3))
  for n, row in enumerate(rows):
    # In order, so that a later chunk sees those before.
    order = np.argsort(row.at, kind="stable")
    size = row.at.size
    tokens[n, :size], pos[n, :size] = row.texts[order], row.at[order]
    seg[n, :size] = 1
  attend = CachedAttention(
    mesh=session.mesh, axis=session.axis, replicated=False
  )
  last = jnp.zeros(len(rows), jnp.int32)
  chunk = -(-min(width, _CHUNK) // shards) * shards
  with session.running("reading tokens between contexts"):
    for start in range(0, width, chunk):
      cut = lambda x, start=start: jnp.asarray(x[:, start : start + chunk])
      _, session.cache = read(
        model, attend, cut(tokens), cut(pos), cut(seg), session.cache, last,
        total,
      )  # fmt: skip
