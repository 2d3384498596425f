"""Entropy of a model's attention, and what encoding contexts apart does to it.

A context that is cut into chunks, each encoded by itself at the same positions,
is read with flatter attention than the context as a whole, and the loss rises
with the entropy; one shared prefix in place of one for each chunk lowers both.

Guarantees: statistics are those of the call itself, over all keys that a query
sees; the same texts, queries and predicted tokens for every number of chunks.
Cost: one forward pass a text and setting, and the attention of the queries once
more. Programs do not depend on the number of chunks.
Ref: Zhang et al. 2025, arXiv 2412.16545.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer, positive_int
from ringjax.data.link_tokens import ArrangedPrompt, arranged
from ringjax.data.special_tokens import TokenIds
from ringjax.errors import OptionError, PromptError, ShapeError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.contexts.behind_contexts import context_session
from ringjax.infer.contexts.combine import Combine, Parallel, combine_of
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.kv.context_cache import ContextCache
from ringjax.kv.measured_contexts import MeasuredContexts
from ringjax.kv.statistics_cache import StatisticsCache
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.nn.stack import keeps
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.mask import Mask, SameSegment, SeparateDocuments

_SAME = SameSegment()


class ModelStatistics(NamedTuple):
  """What `attention_statistics` finds.

  Fields:
    layers: statistics of each layer of the model, [B, M, N] for M queries;
      None of recurrent layers, which attend to nothing, and of those that
      read another's keys.
    logits: float32 [B, M, V], of the tokens that follow the queries.
  """

  layers: tuple[AttentionStatistics | None, ...]
  logits: Float[Array, "B M V"]


@on_its_mesh
def attention_statistics(
  model: Transformer,
  tokens: Int[Array | np.ndarray, "B T"],
  *,
  queries: int | Sequence[int] | None = None,
  positions: Int[Array | np.ndarray, "*B T"] | None = None,
  segment_ids: Int[Array | np.ndarray, "*B T"] | None = None,
  segments: Mask = _SAME,
  keep: Bool[Array | np.ndarray, "*B T"] | None = None,
  columns: bool = False,
  mesh: Mesh | None = None,
  axis: str | None = None,
) -> ModelStatistics:
  """Statistics of the attention of every layer and head, in one forward pass.

  No array is T x S; the column mass is of the chosen queries alone.

  Args:
    model: the model, of any family with attention.
    tokens: int32 [B, T].
    queries: whose statistics: the last so many tokens, or the numbers of
      tokens, such as `range(100, 200)`; default: all.
    positions: int32 [B, T] or [T]; default: 0, 1, ...
    segment_ids: int32 [B, T] or [T], the document of each token, 0 for padding.
    segments: which documents see each other, `SameSegment()` or
      `SeparateDocuments()`.
    keep: bool [B, T] or [T], tokens whose mass is found, `kept_mass`.
    columns: whether to find what each token gets of the queries, `column_mass`
      [B, T, N].
    mesh: the mesh; default: the model's, else the current one.
    axis: the axis that shards the sequence; default "seq" if there is one.

  Raises:
    OptionError: a model without attention, or queries that are no tokens.
    RingjaxError: as the model's call.
  """
  ids = np.asarray(tokens)
  if ids.ndim != 2 or not ids.size:
    raise ShapeError(
      "tokens",
      f"shape {ids.shape}",
      "[B, T] with at least one token",
      "give a single text a batch axis: tokens[None]",
    )
  batch, length = ids.shape
  rows = np.tile(_rows(queries, length).astype(np.int32), (batch, 1))
  if keep is not None:
    keep = np.asarray(keep)
    if keep.dtype != np.bool_ or keep.shape not in ((length,), ids.shape):
      raise ShapeError(
        "keep",
        f"{keep.dtype} {list(keep.shape)}",
        f"bool [B, T] = {list(ids.shape)}",
        "say of each token whether it is in the set",
      )
    keep = jnp.asarray(np.broadcast_to(keep, ids.shape))
  if not any(hasattr(kind, "reading") for kind in model.kinds):
    raise OptionError(
      "model",
      f"a {model.config.family} of recurrent layers alone",
      "one with layers of attention",
      "pass a model of another family",
    )
  mesh, axis = place_of(mesh, axis, model)
  attend = ContextParallel(mesh=mesh, axis=axis, segments=segments)
  cache = StatisticsCache.create(
    model.kinds,
    model.dtype,
    jnp.asarray(rows),
    length,
    keep=keep,
    columns=columns,
    sinks=_sinks(model),
    attend=attend,
  )
  logits, cache = model(
    ids,
    positions=positions,
    segment_ids=segment_ids,
    cache=cache,
    attend=attend,
    rows=rows,
  )
  layers = cache.by_layer()
  # The last ones may read the keys of others.
  layers += (None,) * (len(model.config.layers) - len(layers))
  return ModelStatistics(layers, logits)


def context_statistics(
  session: Session,
  tokens: Sequence[int] | Int[np.ndarray, "*B T"],
  *,
  before: int = 0,
) -> ModelStatistics:
  """Statistics of the attention of a question behind contexts.

  Over the keys that its tokens read, with the weights that they have: those of
  contexts that a selection leaves, with APE's temperature and scale. The
  session stays as it is.

  Args:
    session: of `context_session`, on one device.
    tokens: int32 [B, T] of the question, or [T] for one row. Read in one call.
    before: keys at positions below it are those of `kept_mass`.

  Raises:
    OptionError: a session without contexts that are read as keys, or whose
      sequence is over several shards.
    RingjaxError: as the model's call.
  """
  cache, model = session.cache, session.model
  if not isinstance(cache, ContextCache) or cache.recurrent:
    raise OptionError(
      "session",
      "one whose layers do not read keys of contexts",
      "one of rj.infer.context_session, for a model of attention alone",
      "pass combine='parallel', 'ape', 'select', 'recompute' or 'kvlink'",
    )
  if cache.shards > 1:
    raise OptionError(
      "session",
      f"a sequence over {cache.shards} shards",
      "one shard, on which all scores of a query are",
      "make the session without a sequence axis",
    )
  readings = [getattr(kind, "reading", None) for kind in model.kinds]
  if any(x is not None and x.most is not None for x in readings):
    raise OptionError(
      "session",
      "one of layers that read only the keys that an index chooses",
      "layers that read all keys",
      "measure another model",
    )
  ids = np.atleast_2d(np.asarray(tokens, np.int32))
  measured = MeasuredContexts.of(
    cache, ids.shape[1], _sinks(model), integer("before", before, least=0)
  )
  attend = CachedAttention(
    mesh=session.mesh, axis=session.axis, replicated=False
  )
  logits, measured = model(
    ids,
    cache=measured,
    attend=attend,
    length=jnp.int32(session.capacity),
  )
  layers = measured.by_layer()
  layers += (None,) * (len(model.config.layers) - len(layers))
  return ModelStatistics(layers, logits)


def _rows(queries: Any, length: int) -> np.ndarray:
  """The numbers of the queries among `length` tokens."""
  if queries is None:
    return np.arange(length)
  if np.ndim(queries) == 0:
    many = integer("queries", queries, least=1, most=length)
    return np.arange(length - many, length)
  found = np.asarray(queries)
  fit = found.ndim == 1 and found.size and found.dtype.kind in "iu"
  if not fit or found.min() < 0 or found.max() >= length:
    raise OptionError(
      "queries",
      str(queries),
      f"a number of tokens, or numbers from 0 to {length - 1}",
      "pass queries=128 for the last 128 tokens",
    )
  return found


def _sinks(model: Transformer) -> list[Any]:
  """The learned sinks of each kind of layer, [L, N], or None."""
  stack, found = model.stack, []
  for g, run in enumerate(stack.runs):
    for p, layer in enumerate(run.layers):
      if not keeps(layer):
        continue
      block = stack.blocks[g][p]
      if len(run.layers[p].mixers) > 1:
        # None of these has sinks.
        found.extend(None for _ in run.layers[p].mixers)
        continue
      if getattr(block.attention, "sinks", None) is None:
        found.append(None)
        continue
      if stack.placed is None or stack.placed[g][p] is None:
        found.append(block.attention.sinks.get_value())
        continue
      layers: list[Any] = [stack.layer(g, p, n) for n in range(run.repeats)]
      each = [layer.attention.sinks.get_value() for layer in layers]
      found.append(jnp.stack(each))
  return found


# ---------------------------------------------------------------------------
# Contexts that are encoded apart
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitEntropy:
  """Entropy and loss of queries behind a context in chunks.

  Attributes:
    splits: chunks of the context, P; 1 is the context as a whole.
    shared: whether there is one prefix for all chunks, else each has its own.
    entropies: of each text, the mean over layers, heads and queries, in nats.
    losses: of each text, the mean over the tokens behind the queries, nats.
    heads: the mean over texts and queries of each layer and head; None of
      recurrent layers.
    prefix_mass: the mean part of the queries' weights that is on prefixes.
    combine: how the chunks are combined.
  """

  splits: int
  shared: bool
  entropies: tuple[float, ...]
  losses: tuple[float, ...]
  heads: tuple[tuple[float, ...] | None, ...]
  prefix_mass: float
  combine: str = "parallel"

  @property
  def entropy(self) -> float:
    """The mean over texts."""
    return float(np.mean(self.entropies))

  @property
  def loss(self) -> float:
    """The mean over texts."""
    return float(np.mean(self.losses))

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    means = {"entropy": self.entropy, "loss": self.loss}
    return dataclasses.asdict(self) | means


def settings(splits: Sequence[int]) -> list[tuple[int, bool]]:
  """(P, shared) of each setting; a context as a whole has one prefix anyway."""
  return [
    (p, shared) for p in splits for shared in (False, True)[: 1 + (p > 1)]
  ]


def correlation(found: Sequence[SplitEntropy]) -> float | None:
  """Pearson's, of entropies and losses; None for fewer than two settings."""
  x, y = ([getattr(one, name) for one in found] for name in ("entropy", "loss"))
  if len(found) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
    return None
  return float(np.corrcoef(x, y)[0, 1])


def split_prompt(
  context: np.ndarray,
  query: np.ndarray,
  splits: int,
  prefix: np.ndarray,
  *,
  shared: bool,
) -> ArrangedPrompt:
  """A context in chunks at the same positions, and a query behind the longest.

  Args:
    context: ids [N].
    query: ids [M].
    splits: P, chunks of about equal length.
    prefix: ids [n] before the chunks.
    shared: whether all chunks see one prefix; else each has its own.

  Returns:
    ids, positions and segments, for `rj.SeparateDocuments()`.
  """
  integer("splits", splits, least=1, most=len(context))
  chunks = np.array_split(context, splits)
  if not shared:
    chunks = [np.concatenate([prefix, chunk]) for chunk in chunks]
  made = arranged(chunks, query, prefix=prefix if shared else None)
  start = len(prefix) if shared else 0
  longest = max(map(len, chunks))
  each = [np.arange(start), *(start + np.arange(len(x)) for x in chunks)]
  each.append(start + longest + np.arange(len(query)))
  return made._replace(positions=np.concatenate(each).astype(np.int32))


@on_its_mesh
def split_entropy(
  model: Transformer,
  texts: Iterable[np.ndarray],
  splits: Sequence[int],
  *,
  context: int,
  query: int,
  prefix: TokenIds,
  rows: int,
  combine: Combine | str = "parallel",
  mesh: Mesh | None = None,
  axis: str | None = None,
  on_read: Callable[[int], Any] = lambda done: None,
  on_setting: Callable[[SplitEntropy], Any] = lambda found: None,
) -> list[SplitEntropy]:
  """Entropy and loss by the number of chunks of a context.

  Args:
    model: the model.
    texts: ids of each; the first N + M + 1 are read, shorter ones are passed
      over.
    splits: numbers of chunks, P.
    context: N, tokens of the context.
    query: M, tokens behind it, whose attention and predictions are looked at.
    prefix: ids [n] before each chunk, or before all of them.
    rows: how many texts are read.
    combine: how queries read the chunks: all of them ("parallel"), with APE's
      temperature and scale ("ape"), or some ("select:keep=2"): the entropy is
      then over the keys that are read, with their weights. These two on one
      shard of the sequence.
    mesh: the mesh; default: the model's, else the current one.
    axis: the axis that shards the sequence; default "seq" if there is one.
    on_read: called with the number of forward passes that are done.
    on_setting: called with the result of each of `settings(splits)`.

  Raises:
    PromptError: not so many texts are long enough.
    OptionError: numbers of chunks that the context does not have, or a way to
      combine them at other positions.
  """
  how = combine_of(combine)
  if not isinstance(how, Parallel) or how.prefix:
    raise OptionError(
      "combine",
      f"{how.name!r}" + " with a prefix" * bool(how.prefix),
      "'parallel', 'ape' or 'select', with the prefix of prefix=",
      "pass combine='select:keep=2', for instance",
    )
  positive_int("context", context)
  positive_int("query", query)
  positive_int("rows", rows)
  for p in splits:
    integer("splits", p, least=1, most=context)
  first = np.asarray(prefix, np.int32)
  if not splits or not first.size:
    raise OptionError(
      "prefix" if splits else "splits",
      "none",
      "one or more",
      "pass the id that begins a text, and e.g. splits=[1, 2, 4]",
    )
  need = context + query + 1
  long = [np.asarray(x[:need]) for x in texts if len(x) >= need][:rows]
  if len(long) < rows:
    raise PromptError(
      "texts",
      f"{len(long)} of {need} tokens or more",
      f"{rows}",
      "pass a shorter context, fewer rows, or longer texts",
    )
  mesh, axis = place_of(mesh, axis, model)
  shards = 1 if mesh is None or axis is None else mesh.shape[axis]
  length = context + max(splits) * first.size + query
  length += -length % shards
  apart = how != Parallel()
  if apart and shards > 1:
    raise OptionError(
      "combine",
      f"{how.name!r} on a sequence over {shards} shards",
      "one shard, on which all scores of a query are",
      "pass mesh=None or a mesh with one shard, or combine='parallel'",
    )
  # Every process of a run of several reads all of them.
  everywhere = jax.jit(ContextParallel(mesh=mesh, axis=axis).everywhere)
  found, done = [], 0
  for p, shared in settings(splits):
    losses, entropies, masses = [], [], []
    for number, ids in enumerate(long):
      if apart:
        of_text = _behind_chunks(
          model, ids[:-1], p, context, first, how, shared, mesh, axis
        )
        losses.append(_loss(of_text.logits, ids[context + 1 :]))
        check_losses(losses[-1], model, document=number, first=context + 1)
        entropies.append(_by_head(of_text.layers, "entropy"))
        masses.append(_by_head(of_text.layers, "kept_mass"))
        done += 1
        on_read(done)
        continue
      prompt = split_prompt(
        ids[:context], ids[context:-1], p, first, shared=shared
      )
      # Those of the query are behind all prefixes.
      own = prompt.positions < first.size
      # Padding stands before the query, so that all settings are one program.
      end = len(prompt.tokens) - query
      wide = lambda x, end=end: np.concatenate(
        [x[:end], np.zeros(length - len(x), x.dtype), x[end:]]
      )[None]
      made = attention_statistics(
        model,
        wide(prompt.tokens),
        queries=query,
        positions=wide(prompt.positions),
        segment_ids=wide(prompt.segments),
        segments=SeparateDocuments(),
        keep=wide(own),
        mesh=mesh,
        axis=axis,
      )
      of_text = everywhere(made)
      losses.append(_loss(of_text.logits, ids[context + 1 :]))
      check_losses(losses[-1], model, document=number, first=context + 1)
      entropies.append(_by_head(of_text.layers, "entropy"))
      masses.append(_by_head(of_text.layers, "kept_mass"))
      done += 1
      on_read(done)
    found.append(_setting(p, shared, losses, entropies, masses, how.name))
    on_setting(found[-1])
  return found


def _behind_chunks(
  model: Transformer,
  ids: np.ndarray,
  splits: int,
  context: int,
  prefix: np.ndarray,
  how: Parallel,
  shared: bool,
  mesh: Mesh | None,
  axis: str | None,
) -> ModelStatistics:
  """Statistics of a query behind chunks that are combined in some way.

  Args:
    model: the model.
    ids: of the context and the query behind it.
    splits: P, chunks of the context.
    context: tokens of the context.
    prefix: ids before each chunk, or before all of them.
    how: how chunks are combined.
    shared: whether there is one prefix.
    mesh: of the session.
    axis: of the session.
  """
  chunks = np.array_split(ids[:context], splits)
  if shared:
    how = dataclasses.replace(how, prefix=tuple(prefix.tolist()))
  else:
    chunks = [np.concatenate([prefix, chunk]) for chunk in chunks]
  query = ids[context:]
  session = context_session(
    model,
    [chunk.astype(np.int32) for chunk in chunks],
    how,
    capacity=query.size,
    mesh=mesh,
    axis=axis,
  )
  return context_statistics(session, query, before=prefix.size)


def _loss(logits: Any, labels: np.ndarray) -> float:
  """The mean loss of labels [M] by logits [1, M, V]."""
  scores = np.asarray(logits, np.float64)[0]
  top = scores.max(-1)
  lse = top + np.log(np.exp(scores - top[:, None]).sum(-1))
  return float(np.mean(lse - scores[np.arange(len(labels)), labels]))


def _by_head(layers: Sequence[Any], name: str) -> list[Any]:
  """The means over queries, [N] of each layer."""
  return [
    None if x is None else np.asarray(getattr(x, name), np.float64)[0].mean(0)
    for x in layers
  ]


def _setting(
  splits: int,
  shared: bool,
  losses: list[float],
  entropies: list[list[Any]],
  masses: list[list[Any]],
  combine: str,
) -> SplitEntropy:
  mean = lambda layers: float(
    np.mean(np.concatenate([x for x in layers if x is not None]))
  )
  return SplitEntropy(
    splits=splits,
    shared=shared,
    entropies=tuple(map(mean, entropies)),
    losses=tuple(losses),
    heads=tuple(
      None if each[0] is None else tuple(np.mean(each, 0).tolist())
      for each in zip(*entropies, strict=True)
    ),
    prefix_mass=float(np.mean([mean(layers) for layers in masses])),
    combine=combine,
  )
