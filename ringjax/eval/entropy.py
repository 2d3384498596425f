"""Entropy of a model's attention, for contexts that are encoded in chunks.

A context that is cut into chunks, each encoded separately at the same
positions, is read with flatter attention than the context as a whole, and the
loss rises with the entropy; one shared prefix in place of one for each chunk
lowers both.

Guarantees: statistics are those of the call itself, over all keys that a query
sees; the same texts, queries and predicted tokens for every number of chunks.
Cost: one forward pass for each text and setting, and a second computation of
the queries' attention. Programs do not depend on the number of chunks.
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
from ringjax.data.tasks.link_tokens import ArrangedPrompt, arranged
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import OptionError, PromptError, ShapeError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.contexts.behind_contexts import context_session
from ringjax.infer.contexts.combine import Combine, Parallel, combine_of
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.kv.composed.context_cache import ContextCache
from ringjax.kv.composed.measured_contexts import MeasuredContexts
from ringjax.kv.layer_spec import check_one_set_of_keys
from ringjax.kv.statistics_cache import StatisticsCache
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.nn.stack import keeps
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.mask import Mask, SameSegment, SeparateDocuments

_SAME = SameSegment()


class ModelStatistics(NamedTuple):
  """Result of `attention_statistics`.

  Fields:
    layers: Statistics of each layer of the model, [B, M, N] for M queries;
      None for recurrent layers, which do not attend, and for layers that read
      the keys of another.
    logits: Logits of the tokens after the queries, float32 [B, M, V].
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
  """Computes attention statistics of every layer and head in one forward pass.

  No array is T x S; the column mass is of the chosen queries alone.

  Args:
    model: Model of any family with attention.
    tokens: Ids, int32 [B, T].
    queries: Number of last tokens, or indices of tokens such as
      `range(100, 200)`, to compute statistics of; default: all.
    positions: Positions, int32 [B, T] or [T]; default: 0, 1, ...
    segment_ids: Document of each token, int32 [B, T] or [T], 0 for padding.
    segments: Mask between documents, `SameSegment()` or `SeparateDocuments()`.
    keep: Tokens whose mass is computed, `kept_mass`, bool [B, T] or [T].
    columns: Whether to compute the mass that each token gets from the queries,
      `column_mass` [B, T, N].
    mesh: Device mesh; default: the model's, else the current one.
    axis: Mesh axis that shards the sequence; default "seq" if it exists.

  Raises:
    OptionError: If the model has no attention, or a layer with two, or queries
      are out of range.
    RingjaxError: Errors of the model's call.
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
  check_one_set_of_keys(model.kinds, "attention statistics")
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
  # The last layers may read the keys of others: they have no statistics.
  layers += (None,) * (len(model.config.layers) - len(layers))
  return ModelStatistics(layers, logits)


def context_statistics(
  session: Session,
  tokens: Sequence[int] | Int[np.ndarray, "*B T"],
  *,
  before: int = 0,
) -> ModelStatistics:
  """Computes attention statistics of a question after contexts.

  They are over the keys that its tokens read, with the weights in use: those of
  contexts that a selection keeps, with APE's temperature and scale. The session
  is not changed.

  Args:
    session: Session of `context_session`, on one device.
    tokens: Ids of the question, int32 [B, T], or [T] for one row, which are
      read in one call.
    before: Position below which keys count for `kept_mass`.

  Raises:
    OptionError: If the session has no contexts that are read as keys, its
      sequence is sharded, or a layer has two attentions.
    RingjaxError: Errors of the model's call.
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
      "one of layers that read only keys that they choose",
      "layers that read all keys",
      "measure another model",
    )
  check_one_set_of_keys(model.kinds, "attention statistics")
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
  """Indices of the queries among `length` tokens."""
  if queries is None:
    return np.arange(length)
  if np.ndim(queries) == 0:
    count = integer("queries", queries, least=1, most=length)
    return np.arange(length - count, length)
  indices = np.asarray(queries)
  fit = indices.ndim == 1 and indices.size and indices.dtype.kind in "iu"
  if not fit or indices.min() < 0 or indices.max() >= length:
    raise OptionError(
      "queries",
      str(queries),
      f"a number of tokens, or numbers from 0 to {length - 1}",
      "pass queries=128 for the last 128 tokens",
    )
  return indices


def _sinks(model: Transformer) -> list[Any]:
  """Learned attention sinks of each kind of layer, [L, N], or None."""
  stack, sinks = model.stack, []
  for g, run in enumerate(stack.runs):
    for p, layer in enumerate(run.layers):
      if not keeps(layer):
        continue
      block = stack.blocks[g][p]
      if len(run.layers[p].mixers) > 1:
        # Layers with several mixers have no sinks.
        sinks.extend(None for _ in run.layers[p].mixers)
        continue
      if getattr(block.attention, "sinks", None) is None:
        sinks.append(None)
        continue
      if stack.placed is None or stack.placed[g][p] is None:
        sinks.append(block.attention.sinks.get_value())
        continue
      layers: list[Any] = [stack.layer(g, p, n) for n in range(run.repeats)]
      layer_sinks = [layer.attention.sinks.get_value() for layer in layers]
      sinks.append(jnp.stack(layer_sinks))
  return sinks


# ---------------------------------------------------------------------------
# Contexts that are encoded separately
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitEntropy:
  """Entropy and loss of queries after a context in chunks.

  Attributes:
    splits: Number of chunks of the context, P; 1 for the context as a whole.
    shared: Whether all chunks share one prefix; else each has a prefix.
    entropies: Mean entropy of each text over layers, heads and queries, nats.
    losses: Mean loss of each text over the tokens after the queries, nats.
    heads: Mean entropy of each layer and head over texts and queries; None for
      recurrent layers.
    prefix_mass: Mean fraction of the queries' weights that is on prefixes.
    combine: Name of the method by which chunks are combined.
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
    """Mean entropy over texts."""
    return float(np.mean(self.entropies))

  @property
  def loss(self) -> float:
    """Mean loss over texts."""
    return float(np.mean(self.losses))

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    means = {"entropy": self.entropy, "loss": self.loss}
    return dataclasses.asdict(self) | means


def settings(splits: Sequence[int]) -> list[tuple[int, bool]]:
  """(P, shared) of each setting; with P = 1 both prefixes are the same."""
  return [
    (p, shared) for p in splits for shared in (False, True)[: 1 + (p > 1)]
  ]


def correlation(found: Sequence[SplitEntropy]) -> float | None:
  """Pearson correlation of entropy and loss; None below two settings."""
  x, y = (
    [getattr(setting, name) for setting in found]
    for name in ("entropy", "loss")
  )
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
  """Arranges a context in chunks at the same positions, and a query after them.

  Args:
    context: Ids of the context, [N].
    query: Ids of the query, [M], at positions after the longest chunk.
    splits: Number of chunks of about equal length, P.
    prefix: Ids before the chunks, [n].
    shared: Whether all chunks see one prefix; else each has a prefix.

  Returns:
    ids, positions and segments, for `rj.SeparateDocuments()`.
  """
  integer("splits", splits, least=1, most=len(context))
  chunks = np.array_split(context, splits)
  if not shared:
    chunks = [np.concatenate([prefix, chunk]) for chunk in chunks]
  prompt = arranged(chunks, query, prefix=prefix if shared else None)
  start = len(prefix) if shared else 0
  longest = max(map(len, chunks))
  positions = [np.arange(start), *(start + np.arange(len(x)) for x in chunks)]
  positions.append(start + longest + np.arange(len(query)))
  return prompt._replace(positions=np.concatenate(positions).astype(np.int32))


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
  """Measures entropy and loss by the number of chunks of a context.

  Args:
    model: Model to evaluate.
    texts: Ids of each text; the first N + M + 1 are read, and shorter texts
      are skipped.
    splits: Numbers of chunks, P.
    context: Number of tokens of the context, N.
    query: Number of tokens after it whose attention and predictions are
      measured, M.
    prefix: Ids before each chunk, or before all of them, [n].
    rows: Number of texts to read.
    combine: Method by which queries read the chunks: all of them ("parallel"),
      with APE's temperature and scale ("ape"), or some ("select:keep=2"); the
      entropy is over the keys that are read, with their weights. "ape" and
      "select" need a sequence on one shard.
    mesh: Device mesh; default: the model's, else the current one.
    axis: Mesh axis that shards the sequence; default "seq" if it exists.
    on_read: Function of the number of forward passes so far.
    on_setting: Function of the result of each of `settings(splits)`.

  Raises:
    PromptError: If too few texts are long enough.
    OptionError: If the context has fewer tokens than chunks, or the method
      combines them at other positions.
  """
  method = combine_of(combine)
  if not isinstance(method, Parallel) or method.prefix:
    raise OptionError(
      "combine",
      f"{method.name!r}" + " with a prefix" * bool(method.prefix),
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
  long_texts = [np.asarray(x[:need]) for x in texts if len(x) >= need][:rows]
  if len(long_texts) < rows:
    raise PromptError(
      "texts",
      f"{len(long_texts)} of {need} tokens or more",
      f"{rows}",
      "pass a shorter context, fewer rows, or longer texts",
    )
  mesh, axis = place_of(mesh, axis, model)
  shards = 1 if mesh is None or axis is None else mesh.shape[axis]
  length = context + max(splits) * first.size + query
  length += -length % shards
  by_session = method != Parallel()
  if by_session and shards > 1:
    raise OptionError(
      "combine",
      f"{method.name!r} on a sequence over {shards} shards",
      "one shard, on which all scores of a query are",
      "pass mesh=None or a mesh with one shard, or combine='parallel'",
    )
  # Statistics are gathered, so that every process can read them.
  everywhere = jax.jit(ContextParallel(mesh=mesh, axis=axis).everywhere)
  results, num_passes = [], 0
  for p, shared in settings(splits):
    losses, entropies, masses = [], [], []
    for number, ids in enumerate(long_texts):
      if by_session:
        text_statistics = _chunk_statistics(
          model, ids[:-1], p, context, first, method, shared, mesh, axis
        )
        losses.append(_loss(text_statistics.logits, ids[context + 1 :]))
        check_losses(losses[-1], model, document=number, first=context + 1)
        entropies.append(_by_head(text_statistics.layers, "entropy"))
        masses.append(_by_head(text_statistics.layers, "kept_mass"))
        num_passes += 1
        on_read(num_passes)
        continue
      prompt = split_prompt(
        ids[:context], ids[context:-1], p, first, shared=shared
      )
      # Positions of the query are after all prefixes.
      is_prefix = prompt.positions < first.size
      # Padding before the query gives all settings one shape and program.
      end = len(prompt.tokens) - query
      padded = lambda x, end=end: np.concatenate(
        [x[:end], np.zeros(length - len(x), x.dtype), x[end:]]
      )[None]
      statistics = attention_statistics(
        model,
        padded(prompt.tokens),
        queries=query,
        positions=padded(prompt.positions),
        segment_ids=padded(prompt.segments),
        segments=SeparateDocuments(),
        keep=padded(is_prefix),
        mesh=mesh,
        axis=axis,
      )
      text_statistics = everywhere(statistics)
      losses.append(_loss(text_statistics.logits, ids[context + 1 :]))
      check_losses(losses[-1], model, document=number, first=context + 1)
      entropies.append(_by_head(text_statistics.layers, "entropy"))
      masses.append(_by_head(text_statistics.layers, "kept_mass"))
      num_passes += 1
      on_read(num_passes)
    results.append(_setting(p, shared, losses, entropies, masses, method.name))
    on_setting(results[-1])
  return results


def _chunk_statistics(
  model: Transformer,
  ids: np.ndarray,
  splits: int,
  context: int,
  prefix: np.ndarray,
  combine: Parallel,
  shared: bool,
  mesh: Mesh | None,
  axis: str | None,
) -> ModelStatistics:
  """Statistics of a query after chunks that a session combines.

  Args:
    model: Model to evaluate.
    ids: Ids of the context and of the query after it.
    splits: Number of chunks of the context, P.
    context: Number of tokens of the context.
    prefix: Ids before each chunk, or before all of them.
    combine: Method by which chunks are combined.
    shared: Whether all chunks share one prefix.
    mesh: Device mesh of the session.
    axis: Mesh axis of the session's sequence.
  """
  chunks = np.array_split(ids[:context], splits)
  if shared:
    combine = dataclasses.replace(combine, prefix=tuple(prefix.tolist()))
  else:
    chunks = [np.concatenate([prefix, chunk]) for chunk in chunks]
  query = ids[context:]
  session = context_session(
    model,
    [chunk.astype(np.int32) for chunk in chunks],
    combine,
    capacity=query.size,
    mesh=mesh,
    axis=axis,
  )
  return context_statistics(session, query, before=prefix.size)


def _loss(logits: jax.Array, labels: np.ndarray) -> float:
  """Mean loss of labels [M] for logits [1, M, V]."""
  scores = np.asarray(logits, np.float64)[0]
  top = scores.max(-1)
  lse = top + np.log(np.exp(scores - top[:, None]).sum(-1))
  return float(np.mean(lse - scores[np.arange(len(labels)), labels]))


def _by_head(layers: Sequence[Any], name: str) -> list[Any]:
  """Means of a statistic over queries, [N] for each layer."""
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
      None if layer[0] is None else tuple(np.mean(layer, 0).tolist())
      for layer in zip(*entropies, strict=True)
    ),
    prefix_mass=float(np.mean([mean(layers) for layers in masses])),
    combine=combine,
  )
