"""Perplexity by position: the loss of each token by its preceding context.

Guarantees: every token of a row counts once, at its position; each bucket ends
at twice the position where it begins. Rows are complete: every token has as
much context as its position. The id that begins a text is read and never
predicted. The losses of a draft are those of its training: each query sees the
keys of its target that a drafted token would see.
Cost: one forward pass for each row, with logits of a block of tokens at a time;
axes that shard a batch read as many rows at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringjax.checks import float_dtype, positive_int
from ringjax.errors import OptionError, PromptError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.prefill import Prefill, PrefillConfig
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.kv.model_cache import ModelCache
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.parallel.layout import Uneven
from ringjax.parallel.mesh import entering
from ringjax.train.batch import Batch, place, whole_rows
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.objective import each_token, each_token_cached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """Losses by position.

  Attributes:
    length: Tokens of a row, T.
    rows: Number of rows.
    ends: Ends of the buckets; a bucket begins where the previous one ends.
    nll: Mean negative log-likelihood in each bucket, nats a token.
    mean: Mean negative log-likelihood over all positions.
    last: Number of last tokens of a row that `last_nll` is of.
    last_nll: Mean over these tokens. For rows that end with the same tokens and
      begin earlier and earlier it shows the value of more context on equal
      tokens, while buckets are of different ones.
  """

  length: int
  rows: int
  ends: tuple[int, ...]
  nll: tuple[float, ...]
  mean: float
  last: int
  last_nll: float

  @property
  def perplexity(self) -> float:
    """Perplexity over all positions."""
    try:
      return math.exp(self.mean)
    except OverflowError:
      return math.inf

  def record(self) -> dict[str, Any]:
    """Fields as JSON; a value that is not finite becomes null."""
    finite_or_none = lambda x: x if math.isfinite(x) else None
    return dataclasses.asdict(self) | {
      "nll": tuple(map(finite_or_none, self.nll)),
      "mean": finite_or_none(self.mean),
      "last_nll": finite_or_none(self.last_nll),
      "perplexity": finite_or_none(self.perplexity),
    }


@functools.partial(jax.jit, static_argnums=(1,))
def _read(
  model: Transformer, attend: ShardingContext, batch: Batch
) -> jax.Array:
  """Losses [B, T] of rows that are read in one pass."""
  rows = jax.tree.map(lambda x: x[0], batch)
  return attend.everywhere(each_token(model, rows, attend))


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(3,))
def _read_on(
  model: Transformer,
  attend: CachedAttention,
  batch: Batch,
  cache: ModelCache,
  length: jax.Array,
) -> tuple[jax.Array, Any]:
  """Losses of a chunk after the cached tokens, and the new cache."""
  chunk = jax.tree.map(lambda x: x[0], batch)
  losses, cache = each_token_cached(model, chunk, attend, cache, length)
  return attend.everywhere(losses), cache


def perplexity(
  model: Transformer,
  documents: Iterable[np.ndarray],
  *,
  on_row: Callable[[int], Any] = lambda done: None,
  **options: Any,
) -> Curve:
  """Computes losses by position over the beginnings of documents.

  `options` and errors are those of `reader`; `on_row` is called with the number
  of rows read so far.
  """
  return reader(model, documents, **options)(on_row)


@on_its_mesh
def reader(
  model: Transformer,
  documents: Iterable[np.ndarray],
  *,
  length: int,
  rows: int,
  last: int | None = None,
  bos: int | None = None,
  prefill: str = "auto",
  mesh: Mesh | None = None,
  axis: str | None = None,
  chunk: int | None = None,
  cache_dtype: DTypeLike | None = None,
  draft: DraftTraining | None = None,
  seed: int = 0,
) -> Callable[[Callable[[int], Any]], Curve]:
  """Checks the arguments of `perplexity`; returns a function that computes it.

  Args:
    model: Model to evaluate.
    documents: Ids [n] of each document, without `bos`; shorter ones are
      skipped.
    length: Tokens that are read of each, T, a multiple of twice the shards.
    rows: Number of documents to read.
    last: Number of tokens of `Curve.last`; default: half of the row.
    bos: Id that begins each row, for a model that was trained with it.
    prefill: Prefill method, of `ringjax.infer.METHODS` or "sparse:PATTERN";
      "chunked" keeps the tokens that it has read in a cache.
    mesh: Device mesh; default: the model's, else the current one.
    axis: Mesh axis that shards the sequence; default "seq" if it exists.
    chunk: Tokens of a chunk.
    cache_dtype: Dtype of the cache; default: the model's.
    draft: Training of a `DraftTransformer`, by which positions and lags of its
      rows are drawn; None for other models.
    seed: Seed of these positions and lags, as of the recipe.

  Returns:
    A function of `on_row`, which reads the rows.

  Raises:
    PromptError: If too few documents are long enough, or an id is not in the
      model's vocabulary.
    OptionError: If the prefill method does not fit, or `draft` does not fit the
      model.
    MemoryEstimateError: If the cache does not fit the memory.
    NotFiniteLogitsError: From the returned function, if losses of a document
      are NaN or infinite.
  """
  positive_int("length", length)
  positive_int("rows", rows)
  last = max(1, length // 2) if last is None else last
  positive_int("last", last)
  if last > length:
    raise OptionError(
      "last", last, f"at most length={length}", "pass a smaller last="
    )
  if cache_dtype is not None:
    float_dtype("cache_dtype", cache_dtype)
  mesh, axis = place_of(mesh, axis, model)
  options = PrefillConfig(method=prefill, chunk=chunk)
  pattern = options.pattern
  if pattern is not None and pattern.max_left_out is not None:
    raise OptionError(
      "prefill",
      f"{prefill!r}, whose limit is not checked while losses are computed",
      "a pattern without max_left_out",
      "leave it out here, and look at the report of rj.infer.generate",
    )
  plan = options.plan(length, model, mesh, axis)
  if cache_dtype is not None and plan.chunk is None:
    raise OptionError(
      "cache_dtype",
      f"{cache_dtype} with prefill={plan.name!r}, which has no cache",
      "prefill='chunked'",
      "leave cache_dtype= out, or pass prefill='chunked'",
    )
  _check_draft(model, draft, plan, length)
  unit = 2 * plan.attend.size if plan.attend.size > 1 else 1
  if plan.chunk is None and length % unit:
    raise OptionError(
      "length",
      f"{length} over {plan.attend.size} shards",
      f"a multiple of {unit}",
      "round the length up, or use another mesh",
    )
  chosen = _rows(documents, length, rows, bos, model.config.vocab)
  # Each device of the batch's axes reads a row of its own.
  at_once = plan.attend.data_size
  if plan.chunk is not None:
    # Allocate the cache once, to raise an error now if it does not fit.
    Session(
      model, plan.width, batch=at_once, mesh=mesh, axis=axis, dtype=cache_dtype
    )

  def losses(ids: np.ndarray) -> np.ndarray:
    batch = whole_rows(ids)
    if draft is not None:
      index: Any = np.tile(np.arange(length, dtype=np.int32), (at_once, 1))
      batch = batch._replace(positions=index, segments=index * 0 + 1)
      batch = draft.rows(batch, seed)
    if plan.chunk is not None:
      return _in_chunks(model, batch, plan, mesh, axis, cache_dtype)
    layout, shards = plan.attend.layout, plan.attend.size
    if isinstance(layout, Uneven):
      # Its parts have a fixed sum: pad; no token sees the padding after it.
      padding = ((0, 0), (0, plan.width - length))
      batch = jax.tree.map(lambda x: np.pad(x, padding), batch)
    row_losses = _read(model, plan.attend, place(batch, plan.attend))
    row_losses = layout.restore(np.asarray(row_losses), shards=shards, axis=1)
    return row_losses[:, :length]

  @entering(lambda on_row: mesh)
  def read(on_row: Callable[[int], Any]) -> Curve:
    total = np.zeros(length)
    for first in range(0, rows, at_once):
      numbers = range(first, min(first + at_once, rows))
      # Rows after the last one repeat it, and do not count.
      spare = first + at_once - numbers.stop
      ids = [*chosen[first : numbers.stop], *chosen[-1:] * spare]
      for n, row_losses in zip(numbers, losses(np.stack(ids)), strict=False):
        # The first loss is of the second token (index 1).
        check_losses(row_losses, model, document=n, first=1)
        total += row_losses
        on_row(n + 1)
    return _curve(total / rows, length, rows, last)

  return read


def _check_draft(
  model: Transformer, draft: DraftTraining | None, plan: Prefill, length: int
) -> None:
  """Refuses a draft without its training, and prefills that it does not have.

  Raises:
    OptionError: If only one of the two is a draft's, if the prefill is chunked
      or has uneven parts, or if rows are longer than the draft's positions.
  """
  if isinstance(model, DraftTransformer) != (draft is not None):
    raise OptionError(
      "draft",
      f"{draft} for a {type(model).__name__}",
      "DraftTraining() for the draft of a target, and None for other models",
      "pass the draft= of its recipe, or the draft's target as the model",
    )
  if draft is None:
    return
  if plan.chunk is not None or isinstance(plan.attend.layout, Uneven):
    raise OptionError(
      "prefill",
      f"{plan.name!r} for a draft, which reads a row at once",
      "a method without chunks and uneven parts",
      "leave prefill= and chunk= out",
    )
  draft.check(length)


def _rows(
  documents: Iterable[np.ndarray],
  length: int,
  rows: int,
  bos: int | None,
  vocab: int,
) -> list[np.ndarray]:
  """Ids [T + 1] of each row; the last one is only predicted."""
  start = np.array([] if bos is None else [bos], np.int32)
  need = length + 1 - start.size
  enough = (ids for ids in documents if len(ids) >= need)
  long = list(itertools.islice(enough, rows))
  if len(long) < rows:
    raise PromptError(
      "documents",
      f"{len(long)} of more than {need - 1} tokens",
      f"{rows}",
      "pass a smaller length or fewer rows, or longer documents",
    )
  token_rows = [np.concatenate([start, ids[:need]]) for ids in long]
  largest_id = max(int(ids.max()) for ids in token_rows)
  if largest_id >= vocab:
    raise PromptError(
      "documents",
      f"id {largest_id}",
      f"ids below the model's vocabulary, {vocab}",
      "use the tokenizer that belongs to the model",
    )
  return token_rows


def _curve(losses: np.ndarray, length: int, rows: int, last: int) -> Curve:
  """Creates the curve of the mean losses [T] by position."""
  ends = [1]
  while ends[-1] < length:
    ends.append(min(2 * ends[-1], length))
  starts = [0, *ends[:-1]]
  pieces = [losses[a:b] for a, b in zip(starts, ends, strict=True)]
  return Curve(
    length=length,
    rows=rows,
    ends=tuple(ends),
    nll=tuple(float(piece.mean()) for piece in pieces),
    mean=float(losses.mean()),
    last=last,
    last_nll=float(losses[-last:].mean()),
  )


def _in_chunks(
  model: Transformer,
  batch: Batch,
  plan: Prefill,
  mesh: Mesh | None,
  axis: str | None,
  dtype: DTypeLike | None,
) -> np.ndarray:
  """Losses [B, T] of rows that are read chunk by chunk into a cache."""
  count, length = batch.tokens.shape
  cache = Session(
    model, plan.width, batch=count, mesh=mesh, axis=axis, dtype=dtype
  ).cache
  losses = np.zeros((count, length))
  for call in plan.calls(list(batch.tokens), np.zeros(count, np.int64)):
    assert call.pos is not None
    is_real = call.seg[0] > 0
    at = np.where(is_real, call.pos[0], 0)
    fields: Any = (
      call.tokens,
      batch.labels[:, at],
      np.where(is_real, batch.weights[:, at], 0),
    )
    pos: Any = call.pos
    seg: Any = call.seg
    part = Batch(*fields, positions=pos, segments=seg)
    chunk_losses, cache = _read_on(
      model, plan.attend, place(part, plan.attend), cache, jnp.int32(length)
    )
    losses[:, at[is_real]] = np.asarray(chunk_losses)[:, is_real]
  return losses
