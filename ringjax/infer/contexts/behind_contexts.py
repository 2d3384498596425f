"""Sessions on separately encoded contexts that are combined with a question.

Guarantees: a single context gives the same answer as the same text read at
once. Contexts at the same positions may come in any order: they are placed in
the order of their digests, so that not even a sum changes. Tokens of contexts
are not computed again, except those that `Recompute` chooses.
Cost: one copy of the contexts to the devices; the tokens computed are link
tokens, recomputed tokens and the question.
Memory: the contexts of all rows on the devices, and room for the question and
the answer.
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
from jaxtyping import Int

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
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.composed.context_cache import (
  ContextCache,
  PlacedContext,
  placed,
  slots_for,
)
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.separate_contexts import (
  SelectedView,
  WeighedView,
)
from ringjax.ops.mask import Coords

# Slots in a tile of contexts that queries select; tokens of one model call.
_TILE, _CHUNK = 64, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextReport:
  """Counts of the work done on contexts before the question.

  Attributes:
    combine: Strategy that combines the contexts.
    contexts: Number of contexts, all rows together.
    tokens: Number of tokens in the contexts, all rows together.
    encoded: Tokens computed to encode contexts that were not encoded yet.
    computed: Tokens computed to combine the contexts, all rows together:
      prefix, link and recomputed tokens.
    nbytes: Bytes of the keys and values copied to the devices, or of the
      encoder's states.
  """

  combine: Combine
  contexts: int
  tokens: int
  encoded: int
  computed: int
  nbytes: int


@dataclasses.dataclass(kw_only=True)
class _Row:
  """A row's contexts with their positions, and the tokens still to compute.

  Attributes:
    contexts: Keys and values of each context with their positions.
    texts: Token ids to compute, int32 [n].
    at: Positions of `texts`, int32 [n].
    end: Position of the question's first token.
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
  cache_kind: CacheConfig | str | None = None,
  progress: Callable[[int], Any] | None = None,
) -> Session:
  """Makes a session after contexts, for `generate(..., cache=session)`.

  To ask several questions of the same contexts, use `session.cache.snapshot()`
  and `restore`.

  Args:
    model: Model made by `rj.models.load` or `create`.
    contexts: Documents, each as token ids or an `EncodedContext`: one list for
      all rows, or a list for each row.
    combine: Strategy that combines them: a name of `WAYS`, with options as
      in "ape:temperature=0.8", or an object; not "full", which has no session.
    capacity: Maximum tokens of questions and answers in a row.
    batch: Number of rows; default: the number of lists of contexts, or 1.
    library: Library that encodes and keeps documents; default: a new one for
      this call.
    mesh: Mesh of the session, see `Session`.
    axis: Mesh axis that shards the sequence, see `Session`.
    dtype: Dtype of keys and values, see `Session`.
    cache_kind: Storage format of keys and values; default: the library's, or
      "dense", or "unrotated" where contexts move.
    progress: Callback that gets the number of documents encoded so far.

  Raises:
    RingjaxError: If an argument is invalid; raised before any computation.
  """
  check_call(model, [])
  capacity = positive_int("capacity", capacity)
  strategy = combine_of(combine)
  if isinstance(strategy, Full):
    raise OptionError(
      "combine",
      "'full', which reads contexts and question as one text",
      "a way to combine contexts that are encoded apart",
      "call generate with combine='full'",
    )
  rows = context_rows(contexts, batch)
  options = dict(mesh=mesh, axis=axis, dtype=dtype, cache_kind=cache_kind)
  if isinstance(strategy, Cepe):
    session, tokens, nbytes = encoder_session(
      model, rows, strategy, capacity=capacity, library=library, options=options
    )
    session.contexts = ContextReport(
      combine=strategy,
      contexts=sum(map(len, rows)),
      tokens=tokens,
      encoded=tokens,
      computed=0,
      nbytes=nbytes,
    )
    return session
  library = _library(model, strategy, rows, library, options)
  _check_ways(model, strategy, library)
  _prefix_ids(strategy, model.config.vocab)
  texts = [_checked_ids(row, library, model) for row in rows]
  lengths = [[text.size for text in row] for row in texts]
  prefix = len(library.prefix)
  ends = [_question_position(strategy, row, prefix) for row in lengths]
  _check_lengths(model, strategy, lengths, ends, capacity)
  extra = max(_num_open_tokens(strategy, row, prefix) for row in lengths)
  shards = library.shards
  room = padded(extra, shards) + shards + capacity + shards
  tile = _TILE if isinstance(strategy, Selection) else 1
  room = padded(room, shards)
  session = Session(model, room, batch=len(rows), **library.options)
  local = slots_for(lengths, shards, tile)
  spec = cache_spec(model, session, len(rows), local * shards)
  _check_memory(spec, session)
  tokens_before = library.counters.tokens
  ready = _encoded(rows, library, progress)
  arranged = [
    _placed_row(model, session, strategy, row, library.prefix) for row in ready
  ]
  cache, owner = placed(spec, [row.contexts for row in arranged], tile)
  session.cache = ContextCache(
    open=_cache_after_prefix(model, session, ready),
    kind=session.cache.kind,
    limit=max(ends) + capacity,
    contexts=cache,
    weigh=_weighing_view(strategy, owner, max(map(len, rows))),
  )
  _read_at(model, session, arranged)
  for seen, row, new in zip(session.seen, texts, arranged, strict=True):
    seen[np.concatenate([*row, new.texts, library.prefix]).astype(int)] = True
  session.contexts = ContextReport(
    combine=strategy,
    contexts=sum(map(len, rows)),
    tokens=sum(map(sum, lengths)),
    encoded=library.counters.tokens - tokens_before,
    computed=sum(row.texts.size for row in arranged),
    nbytes=sum(x.nbytes for x in jax.tree.leaves(cache.slots)),
  )
  return session


def context_rows(contexts: Sequence[Any], batch: int | None) -> list[list[Any]]:
  """Lists of contexts by row, from one list for all rows or one for each.

  Raises:
    PromptError: If there is no context, or the number of lists is not `batch`.
  """
  is_list = isinstance(contexts, Sequence) and not isinstance(contexts, str)
  if not is_list or not len(contexts):
    raise PromptError(
      "contexts",
      "none" if is_list else f"a {type(contexts).__name__}",
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
  """Whether `x` is a context rather than a list of contexts."""
  if isinstance(x, EncodedContext):
    return True
  first = x[0] if isinstance(x, Sequence) and len(x) else None
  return isinstance(x, np.ndarray | jax.Array) or isinstance(
    first, int | np.integer
  )


def joined(
  contexts: Sequence[Any],
  prompts: Sequence[Int[np.ndarray, " _"]],
  how: Combine,
  vocab: int,
) -> list[Int[np.ndarray, " _"]]:
  """Joins prefix, contexts and prompt of each row to one text, for `Full`."""
  rows, joined_texts = context_rows(contexts, len(prompts)), []
  prefix = _prefix_ids(how, vocab)
  for row, prompt in zip(rows, prompts, strict=True):
    raw = [x.tokens if isinstance(x, EncodedContext) else x for x in row]
    texts = context_tokens(raw, vocab)
    joined_texts.append(np.concatenate([prefix, *texts, prompt]))
  return joined_texts


def _prefix_ids(strategy: Combine, vocab: int) -> np.ndarray:
  """Token ids of the prefix, int32 [n], checked against the vocabulary."""
  if not strategy.prefix:
    return np.zeros(0, np.int32)
  return inputs.prompt(list(strategy.prefix), vocab)


def _library(
  model: Transformer,
  strategy: Combine,
  rows: list[list[Any]],
  library: ContextLibrary | None,
  options: dict[str, Any],
) -> ContextLibrary:
  """Library that encodes the contexts, with the prefix that all share."""
  if library is None:
    kind = options["cache_kind"]
    if kind is None:
      options["cache_kind"] = "unrotated" if strategy.moves else "dense"
    encoded = [x for row in rows for x in row if isinstance(x, EncodedContext)]
    prefix = strategy.shared_prefix
    if encoded and not prefix and not isinstance(strategy, KVLink):
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
  if strategy.shared_prefix and strategy.shared_prefix != library.prefix:
    raise OptionError(
      "prefix",
      f"one of {len(strategy.shared_prefix)} tokens that is not the library's",
      f"the library's of {len(library.prefix)} tokens",
      "leave it out, or make a library with this prefix",
    )
  return library


def _check_ways(
  model: Transformer, strategy: Combine, library: ContextLibrary
) -> None:
  """Refuses a strategy that the cache kind or the model does not support."""
  kind = library.kind
  if strategy.moves and model.config.positions is not None:
    raise OptionError(
      "combine",
      f"{strategy.name!r}, which moves keys, for a {model.config.family}",
      "a model whose positions are rotations, not learned ones within its keys",
      "pass combine='full' or 'parallel'",
    )
  if strategy.moves and not kind.layout.unrotated:
    raise OptionError(
      "cache kind",
      f"{kind}, for combine={strategy.name!r}, which moves keys",
      "a kind that stores keys before their rotation",
      "pass cache_kind='unrotated', or with a codec rj.kv.CacheConfig("
      "codec=..., unrotated=True)",
    )
  scaled = [rope.scaling for rope in model.config.ropes]
  if (
    any(x is not None and x.by_length for x in scaled)
    and not kind.layout.unrotated
  ):
    raise OptionError(
      "cache kind",
      f"{kind}, for a model whose rotation depends on the context's length",
      "a kind that stores keys before their rotation",
      "pass cache_kind='unrotated'",
    )
  if isinstance(strategy, KVLink):
    if library.prefix:
      raise OptionError(
        "library",
        f"one with a prefix of {len(library.prefix)} tokens",
        "one without: contexts of KVLink do not see it",
        "pass KVLink(prefix=...), and a library without",
      )
    if strategy.links is not None:
      strategy.links.check(model.config.vocab)


def _checked_ids(
  row: list[Any], library: ContextLibrary, model: Transformer
) -> list[np.ndarray]:
  """Checked token ids of a row's contexts, int32 [n] each."""
  for number, context in enumerate(row):
    if isinstance(context, EncodedContext):
      name = f"context {number}"
      check_origin(context, library.origin, library.prefix, name)
  raw = [x.tokens if isinstance(x, EncodedContext) else x for x in row]
  return context_tokens(raw, model.config.vocab)


def _prefix_length(strategy: Combine, prefix: int) -> int:
  """Number of tokens before the contexts; `prefix`: length of the library's."""
  return len(strategy.prefix) if isinstance(strategy, KVLink) else prefix


def _links_per_context(strategy: Combine) -> int:
  """Number of link tokens after each context."""
  links = strategy.links if isinstance(strategy, KVLink) else None
  return 0 if links is None else links.each


def _question_position(
  strategy: Combine, lengths: list[int], prefix: int
) -> int:
  """Position of the question after contexts of these lengths."""
  first = _prefix_length(strategy, prefix)
  if not strategy.moves:
    return first + max(lengths)
  return first + sum(lengths) + _links_per_context(strategy) * len(lengths)


def _num_open_tokens(strategy: Combine, lengths: list[int], prefix: int) -> int:
  """Number of tokens in the open cache before the question."""
  count = _prefix_length(strategy, prefix) + _links_per_context(strategy) * len(
    lengths
  )
  if isinstance(strategy, Recompute):
    count += _recomputed(strategy, sum(lengths))
  return count


def _recomputed(strategy: Recompute, tokens: int) -> int:
  return min(tokens, int(np.ceil(strategy.fraction * tokens)))


def _check_lengths(
  model: Transformer, strategy: Combine, rows: list[list[int]], ends: list[int],
  capacity: int,
) -> None:  # fmt: skip
  """Refuses contexts that exceed the model's length or the link slots."""
  row = int(np.argmax(ends))
  inputs.within_context(
    model.config,
    ends[row] + capacity,
    f"{ends[row]:,} positions of contexts in row {row} and {capacity:,} "
    "of question and answer",
  )
  links = strategy.links if isinstance(strategy, KVLink) else None
  most_contexts = max(map(len, rows))
  if links is not None and most_contexts > links.documents:
    raise PromptError(
      "contexts",
      f"{most_contexts} of a row",
      f"at most {links.documents}, the slots of the link tokens",
      "pass fewer contexts, or train links for more",
    )


def _check_memory(spec: Any, session: Session) -> None:
  """Refuses contexts that do not fit on the devices."""
  bytes_per_device = bytes_each(spec)
  free, devices = free_on(session.mesh)
  if free is not None and bytes_per_device > free:
    raise MemoryEstimateError(
      "contexts",
      f"{bytes_per_device:,} bytes on each of {devices} device(s)",
      f"at most the {free:,} that are free there",
      "pass fewer contexts, a kind of cache with a codec (cache_kind='int4'), "
      "or shard the sequence over more devices",
    )


def _encoded(
  rows: list[list[Any]],
  library: ContextLibrary,
  progress: Callable[[int], Any] | None,
) -> list[list[EncodedContext]]:
  """Encoded contexts of all rows; those given as ids are encoded together."""
  raw = [x for row in rows for x in row if not isinstance(x, EncodedContext)]
  encoded = iter(library.encode(raw, progress=progress) if raw else ())
  encoded_context = lambda x: (
    library.of_kinds(x) if isinstance(x, EncodedContext) else next(encoded)
  )
  return [[encoded_context(x) for x in row] for row in rows]


def _placed_row(
  model: Transformer,
  session: Session,
  strategy: Combine,
  row: list[EncodedContext],
  prefix: tuple[int, ...],
) -> _Row:
  """Places a row's contexts, and collects the tokens still to compute."""
  first = _prefix_length(strategy, len(prefix))
  lengths = [x.tokens.size for x in row]
  if not strategy.moves:
    # Sorted by digest, so that sums do not depend on the callers' order.
    row = sorted(row, key=lambda x: x.digest)
    places = [first + np.arange(x.tokens.size) for x in row]
    contexts = [
      PlacedContext(x.blocks, at) for x, at in zip(row, places, strict=True)
    ]
    no_tokens = np.zeros(0, np.int32)
    return _Row(contexts=contexts, texts=no_tokens, at=no_tokens,
                end=first + max(lengths))  # fmt: skip
  texts, at, contexts, place = [], [], [], first
  if isinstance(strategy, KVLink):
    texts.append(np.asarray(strategy.prefix, np.int32))
    at.append(np.arange(first))
  for slot, context in enumerate(row):
    stop = place + context.tokens.size
    contexts.append(PlacedContext(context.blocks, np.arange(place, stop)))
    place = stop
    if isinstance(strategy, KVLink) and strategy.links is not None:
      texts.append(strategy.links.ids(slot))
      at.append(np.arange(place, place + strategy.links.each))
      place += strategy.links.each
  if isinstance(strategy, Recompute):
    count = _recomputed(strategy, sum(lengths))
    masks = differing_tokens(model, session, row, prefix, count)
    for number, (context, mask) in enumerate(zip(row, masks, strict=True)):
      placement = contexts[number]
      texts.append(context.tokens[mask])
      at.append(placement.pos[mask])
      contexts[number] = PlacedContext(
        _drop_tokens(placement.blocks, mask), placement.pos[~mask]
      )
  return _Row(
    contexts=contexts,
    texts=np.concatenate([*texts, np.zeros(0, np.int32)]).astype(np.int32),
    at=np.concatenate([*at, np.zeros(0, np.int32)]).astype(np.int32),
    end=place,
  )


def _drop_tokens(blocks: Blocks, dropped: np.ndarray) -> Blocks:
  """Blocks without the tokens in `dropped`, bool [n]."""
  stay = np.flatnonzero(~dropped)
  take = lambda x: np.take(x, stay, token_axis(x[:, None]) - 1)
  at = Coords(*(x[stay] for x in blocks.at))
  return Blocks(at, jax.tree.map(take, blocks.parts), blocks.kind)


def _cache_after_prefix(
  model: Transformer, session: Session, ready: list[list[EncodedContext]]
) -> Any:
  """The session's cache filled with the prefix that all contexts share."""
  first = ready[0][0]
  if first.prefix_blocks is None:
    return session.cache
  empty = cache_spec(model, session, session.batch, session.cache.capacity)
  at = np.arange(len(first.prefix))
  prefix_row = [PlacedContext(first.prefix_blocks, at)]
  return placed(empty, [prefix_row] * session.batch)[0]


def _weighing_view(
  strategy: Combine, owner: jax.Array, most: int
) -> SelectedView | WeighedView | None:
  """View that weighs or selects contexts' keys, for `ContextCache.weigh`."""
  if isinstance(strategy, APE) and (strategy.temperature, strategy.scale) != (
    1,
    1,
  ):
    scale = jnp.float32(strategy.scale * strategy.temperature)
    return WeighedView(None, scale, strategy.temperature)
  if isinstance(strategy, Selection) and strategy.keep < most:
    # Rounded up to a power of two, so that few programs are compiled.
    count = 1 << (most - 1).bit_length()
    return SelectedView(None, owner, count, strategy.keep, strategy.by)
  return None


def _read_at(
  model: Transformer, session: Session, rows: Sequence[_Row]
) -> None:
  """Computes each row's `texts` at their positions into the session's cache."""
  longest = max(row.texts.size for row in rows)
  if not longest:
    return
  shards, total = session.shards, jnp.int32(session.capacity)
  width = padded(longest, shards)
  shape = (len(rows), width)
  tokens, pos, seg = (np.zeros(shape, np.int32) for _ in range(3))
  for n, row in enumerate(rows):
    # Sorted by position, so that a later chunk sees the earlier ones.
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
