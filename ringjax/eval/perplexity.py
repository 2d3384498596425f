"""Perplexity by position: the loss of each token by its preceding context.

Guarantees: every token of a row counts once, at its position; a bucket goes
from the end of the one before to its own, which is twice that. Rows are whole:
no token has less context than its position says. The id that begins a text is
read and never predicted.
Cost: one forward pass a row, without logits of more than a block of tokens.
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
from ringjax.infer.prefill import Prefill, PrefillOptions
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.parallel.layout import Uneven
from ringjax.parallel.mesh import entering
from ringjax.train.batch import Batch, place, whole_rows
from ringjax.train.objective import each_token, each_token_cached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """Losses by position.

  Attributes:
    length: T, tokens of a row.
    rows: how many there were.
    ends: of the buckets; a bucket begins where the one before ends.
    nll: mean negative log-likelihood in each bucket, nats a token.
    mean: over all positions.
    last: how many tokens at the end `last_nll` is of.
    last_nll: mean over those. Of rows that end alike and begin earlier and
      earlier it tells what more context is worth, by the same tokens; buckets
      are of different ones.
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
    """Over all positions."""
    try:
      return math.exp(self.mean)
    except OverflowError:
      return math.inf

  def record(self) -> dict[str, Any]:
    """The fields as JSON; a value that is not finite becomes null."""
    known = lambda x: x if math.isfinite(x) else None
    return dataclasses.asdict(self) | {
      "nll": tuple(map(known, self.nll)),
      "mean": known(self.mean),
      "last_nll": known(self.last_nll),
      "perplexity": known(self.perplexity),
    }


@functools.partial(jax.jit, static_argnums=(1,))
def _read(
  model: Transformer, attend: ShardingContext, batch: Batch
) -> jax.Array:
  """Losses [1, T] of a row, by its own keys."""
  one = jax.tree.map(lambda x: x[0], batch)
  return attend.everywhere(each_token(model, one, attend))


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(3,))
def _read_on(
  model: Transformer,
  attend: CachedAttention,
  batch: Batch,
  cache: Any,
  length: jax.Array,
) -> tuple[jax.Array, Any]:
  """Losses of a chunk behind what the cache holds, and the cache."""
  one = jax.tree.map(lambda x: x[0], batch)
  each, cache = each_token_cached(model, one, attend, cache, length)
  return attend.everywhere(each), cache


def perplexity(
  model: Transformer,
  documents: Iterable[np.ndarray],
  *,
  on_row: Callable[[int], Any] = lambda done: None,
  **options: Any,
) -> Curve:
  """Losses by position over the beginnings of documents.

  `options` and errors are those of `reader`; `on_row` is called with how many
  rows are read.
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
) -> Callable[[Callable[[int], Any]], Curve]:
  """Checks everything `perplexity` needs, and returns what computes it.

  Args:
    model: that reads.
    documents: ids [n] of each, without `bos`; shorter ones are passed over.
    length: T, tokens that are read of each, a multiple of twice the shards.
    rows: how many documents are read.
    last: tokens of `Curve.last`; default: half of the row.
    bos: the id that begins each row, for a model that was trained so.
    prefill: how, of `ringjax.infer.METHODS`; "chunked" keeps what it has read
      in a cache.
    mesh: the mesh; default: the model's, else the current one.
    axis: the axis that shards the sequence; default "seq" if there is one.
    chunk: tokens of a chunk.
    cache_dtype: of the cache; default: the model's.

  Returns:
    A function of `on_row`, which reads the rows.

  Raises:
    PromptError: not so many documents are long enough, or an id that the
      model does not have.
    OptionError: a prefill method that does not fit.
    MemoryEstimateError: the cache has no room.
    NotFiniteLogitsError: of `on_row`'s function, for a document whose losses
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
  options = PrefillOptions(method=prefill, chunk=chunk)
  how = options.plan(length, model, mesh, axis)
  if cache_dtype is not None and how.chunk is None:
    raise OptionError(
      "cache_dtype",
      f"{cache_dtype} with prefill={how.name!r}, which has no cache",
      "prefill='chunked'",
      "leave cache_dtype= out, or pass prefill='chunked'",
    )
  unit = 2 * how.attend.size if how.attend.size > 1 else 1
  if how.chunk is None and length % unit:
    raise OptionError(
      "length",
      f"{length} over {how.attend.size} shards",
      f"a multiple of {unit}",
      "round the length up, or use another mesh",
    )
  chosen = _rows(documents, length, rows, bos, model.config.vocab)
  if how.chunk is not None:
    # Its cache: refused if it does not fit, and released at once.
    Session(model, how.width, mesh=mesh, axis=axis, dtype=cache_dtype)

  def losses(ids: np.ndarray) -> np.ndarray:
    batch = whole_rows(ids[None])
    if how.chunk is not None:
      return _in_chunks(model, batch, how, mesh, axis, cache_dtype)
    layout, shards = how.attend.layout, how.attend.size
    if isinstance(layout, Uneven):
      # Its parts are of a fixed sum; nothing reads what is behind the text.
      more = ((0, 0), (0, how.width - length))
      batch = jax.tree.map(lambda x: np.pad(x, more), batch)
    found = _read(model, how.attend, place(batch, how.attend))
    found = layout.restore(np.asarray(found), shards=shards, axis=1)
    return found[0, :length]

  @entering(lambda on_row: mesh)
  def read(on_row: Callable[[int], Any]) -> Curve:
    total = np.zeros(length)
    for n, ids in enumerate(chosen):
      each = losses(ids)
      # The loss of a token is by the logits at the one before.
      check_losses(each, model, document=n, first=1)
      total += each
      on_row(n + 1)
    return _curve(total / rows, length, rows, last)

  return read


def _rows(
  documents: Iterable[np.ndarray],
  length: int,
  rows: int,
  bos: int | None,
  vocab: int,
) -> list[np.ndarray]:
  """Ids [T + 1] of each row, the last one of which is only predicted."""
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
  found = [np.concatenate([start, ids[:need]]) for ids in long]
  most = max(int(ids.max()) for ids in found)
  if most >= vocab:
    raise PromptError(
      "documents",
      f"id {most}",
      f"ids below the model's vocabulary, {vocab}",
      "use the tokenizer that belongs to the model",
    )
  return found


def _curve(each: np.ndarray, length: int, rows: int, last: int) -> Curve:
  """The curve of the losses [T] by position."""
  ends = [1]
  while ends[-1] < length:
    ends.append(min(2 * ends[-1], length))
  starts = [0, *ends[:-1]]
  pieces = [each[a:b] for a, b in zip(starts, ends, strict=True)]
  return Curve(
    length=length,
    rows=rows,
    ends=tuple(ends),
    nll=tuple(float(piece.mean()) for piece in pieces),
    mean=float(each.mean()),
    last=last,
    last_nll=float(each[-last:].mean()),
  )


def _in_chunks(
  model: Transformer,
  batch: Batch,
  how: Prefill,
  mesh: Mesh | None,
  axis: str | None,
  dtype: DTypeLike | None,
) -> np.ndarray:
  """Losses of a row [T], read behind what a cache holds, chunk by chunk."""
  length = batch.tokens.shape[1]
  cache = Session(model, how.width, mesh=mesh, axis=axis, dtype=dtype).cache
  found = np.zeros(length)
  for call in how.calls(list(batch.tokens), np.zeros(1, np.int64)):
    assert call.pos is not None
    real = call.seg[0] > 0
    at = np.where(real, call.pos[0], 0)
    mine: Any = (
      call.tokens,
      batch.labels[:, at],
      np.where(real, batch.weights[:, at], 0),
    )
    pos: Any = call.pos
    seg: Any = call.seg
    part = Batch(*mine, positions=pos, segments=seg)
    each, cache = _read_on(
      model, how.attend, place(part, how.attend), cache, jnp.int32(length)
    )
    found[at[real]] = np.asarray(each)[0, real]
  return found
