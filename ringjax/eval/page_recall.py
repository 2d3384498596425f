"""Recall of chosen pages of host memory: attention and best keys that are read.

Guarantees: the text is read as by `rj.infer.generate`: its beginning as a
prompt, then token by token, each with the pages that its queries choose. At
every `every`-th token each layer's queries are also compared with all keys.
Cost: one call for each token after the prompt; a measured one copies all keys
of a layer to the device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import positive_int, token_rows
from ringjax.errors import OptionError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.session import Session, on_its_mesh
from ringjax.kv.base import LayerCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.model_cache import ModelCache
from ringjax.kv.offload.chosen_layer import ChosenTieredLayer
from ringjax.kv.offload.chosen_tiered import page_fetches
from ringjax.kv.offload.hot_pages import PageFetches
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.nn.sums.tile_sums import PageRecord
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.cached.views import KVView, StreamedView
from ringjax.ops.mask import Coords, Mask, visible
from ringjax.parallel.programs import bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRecall:
  """Keys that one layer's queries read, against all keys.

  Attributes:
    layer: Number of the layer in the model.
    attention: Part of the attention that is on keys that are read, mean over
      queries and heads.
    recall: Part of the `top` keys with the largest products that is read,
      likewise.
    worst_head: Smallest recall of a head, mean over queries.
    error: Norm of the error of the attention's output, divided by that of the
      output over all keys, mean over queries and heads.
  """

  layer: int
  attention: float
  recall: float
  worst_head: float
  error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRecall:
  """Keys that queries read of host memory, and the loss of what follows.

  Attributes:
    kind: Text of the kind of cache.
    top: Number of best keys, k of recall@k.
    queries: Number of measured queries of a head.
    nll: Mean negative log-likelihood of the tokens after the prompt, nats.
    layers: Recall of each layer with keys in host memory.
    fetches: Pages that all queries chose.
  """

  kind: str
  top: int
  queries: int
  nll: float
  layers: tuple[LayerRecall, ...]
  fetches: PageFetches

  @property
  def attention(self) -> float:
    """Part of the attention on keys that are read, mean over layers."""
    return float(np.mean([x.attention for x in self.layers]))

  @property
  def recall(self) -> float:
    """Part of the best keys that is read, mean over layers."""
    return float(np.mean([x.recall for x in self.layers]))

  @property
  def error(self) -> float:
    """Relative error of the attention's output, mean over layers."""
    return float(np.mean([x.error for x in self.layers]))

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return {
      **dataclasses.asdict(self),
      "fetches": self.fetches.record(),
      "attention": self.attention,
      "recall": self.recall,
      "error": self.error,
    }


@on_its_mesh
def page_recall(
  model: Transformer,
  tokens: Int[np.ndarray, "B T"],
  kind: CacheConfig | str,
  *,
  prompt: int,
  every: int = 8,
  top: int = 64,
) -> PageRecall:
  """Measures which keys of host memory the tokens after a prompt read.

  Args:
    model: Model on one device, without a mesh.
    tokens: Ids of the texts, int32 [B, T].
    kind: Kind of the cache, `select:device=N,hot=M` and its options.
    prompt: Number of first tokens that are read as a prompt.
    every: Number of tokens of which one is measured.
    top: Number of best keys, k of recall@k.

  Raises:
    ShapeError: If `tokens` has another shape.
    OptionError: If the kind has no choice of pages by a policy, the model is on
      a mesh, the texts are not longer than the prompt, or a number is out of
      range.
    NotFiniteLogitsError: If losses are NaN or infinite.
  """
  ids = token_rows(tokens, 2).astype(np.int32)
  every, top = positive_int("every", every), positive_int("top", top)
  prompt = positive_int("prompt", prompt)
  if prompt >= ids.shape[1] - 1:
    raise OptionError(
      "prompt",
      f"{prompt} tokens of texts of {ids.shape[1]}",
      f"at most {ids.shape[1] - 2}, so that some follow",
      "pass longer texts, or fewer tokens of the prompt",
    )
  cache_kind = model.cache_kind(kind)
  if cache_kind.tier.hot is None or cache_kind.policy is None:
    raise OptionError(
      "kind",
      str(cache_kind),
      "a kind in which queries choose pages of host memory by a policy",
      "pass select:device=N,hot=M",
    )
  if model.mesh is not None:
    raise OptionError(
      "model",
      "one on a mesh",
      "a model on one device, which has all keys of a row",
      "load it without mesh=",
    )
  session = Session(
    model, ids.shape[1] + 1, batch=len(ids), cache_kind=cache_kind
  )
  read_context(model, ids[:, :prompt], cache=session)
  cache, attend = session.cache, MeasuredPages(top=top)
  sums, losses = [], []
  for n in range(prompt, ids.shape[1] - 1):
    cache = cache.flush().with_room(np.ones((cache.batch, 1), np.int64))
    token = jnp.asarray(ids[:, n : n + 1])
    if (n - prompt) % every == 0:
      logits, cache, layer_sums = _measured(model, attend, token, cache)
      sums.append(jax.device_get(layer_sums))
    else:
      logits, cache = model(token, cache=cache)
    losses.append(_loss(logits[:, 0], jnp.asarray(ids[:, n + 1])))
  loss = np.mean(np.stack(losses, 1), 0)
  check_losses(loss, model, document=0, first=prompt)
  fetches = page_fetches(cache)
  assert fetches is not None
  layers, queries = _layers(model, sums)
  return PageRecall(
    kind=str(cache_kind),
    top=top,
    queries=queries,
    nll=float(loss.mean()),
    layers=layers,
    fetches=fetches,
  )


@jax.jit
def _loss(
  logits: Float[Array, "B V"], token: Int[Array, " B"]
) -> Float[Array, " B"]:
  """Negative log-likelihood of the next tokens."""
  scores = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -jnp.take_along_axis(scores, token[:, None], 1)[:, 0]


@bounded
@functools.partial(jax.jit, static_argnums=(1,))
def _measured(
  model: Transformer,
  attend: MeasuredPages,
  tokens: Int[Array, "B 1"],
  cache: ModelCache,
) -> tuple[Float[Array, "B 1 V"], Any, Any]:
  """Logits of a token, the cache, and the sums of its layers."""
  sums: list[Any] = []
  logits, cache = forward(
    model, attend, tokens, None, None, cache, None, None,
    record=(PageRecord, sums),
  )  # fmt: skip
  return logits, cache, sums


def _layers(
  model: Transformer, calls: list[Any]
) -> tuple[tuple[LayerRecall, ...], int]:
  """Recall of each layer, and the number of queries, from sums of calls."""
  layers: list[LayerRecall] = []
  queries = 0
  for g, run in enumerate(model.stack.runs):
    for repeat in range(run.repeats):
      for position in range(len(run.layers)):
        layer_sums = [call[g][position] for call in calls]
        if layer_sums[0] is None:
          continue
        total = lambda name, sums=layer_sums, n=repeat: np.sum(
          [np.asarray(getattr(x, name)[n], np.float64) for x in sums], 0
        )
        queries = int(total("queries"))
        by_head = total("top_read") / queries
        layers.append(
          LayerRecall(
            layer=run.number(position, repeat),
            attention=float(1 - np.mean(total("left_out")) / queries),
            recall=float(np.mean(by_head)),
            worst_head=float(np.min(by_head)),
            error=float(np.mean(total("error")) / queries),
          )
        )
  return tuple(layers), queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPages(CachedAttention):
  """Attention over chosen pages that is also compared with all keys.

  Attributes:
    top: Number of best keys.
  """

  top: int

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N J"]:
    out = super().__call__(q, tokens, cache, mask, extras)
    record = tokens.record_of(PageRecord)
    if record is None or not isinstance(cache, ChosenTieredLayer):
      return out
    if cache.chosen is None:
      return out
    # Sinks are no keys: without them the parts add up to 1.
    extras = dataclasses.replace(extras, residual=True, sinks=None)
    read_out, read_lse = super().__call__(q, tokens, cache, mask, extras)
    bias = cache.chosen.bias
    if bias is not None:
      # The keys that are read count as they are, not by their probabilities.
      unweighted = jnp.where(bias > -jnp.inf, 0, bias)
      chosen = cache.chosen._replace(bias=unweighted)
      as_they_are = dataclasses.replace(cache, chosen=chosen)
      _, read_lse = super().__call__(q, tokens, as_they_are, mask, extras)
    every_key = dataclasses.replace(cache, chosen=None)
    all_out, all_lse = super().__call__(q, tokens, every_key, mask, extras)
    top_read = self._top_read(q, tokens, cache, every_key.views(), mask)
    norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
    error = norm(read_out - all_out) / jnp.maximum(norm(all_out), 1e-30)
    record.add(read_lse, all_lse, top_read, error)
    return out

  def _top_read(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: ChosenTieredLayer,
    views: tuple[KVView, ...],
    mask: Mask,
  ) -> Float[Array, "B T N"]:
    """Part of the keys with the largest products that each query reads."""
    b, t, n, h = q.shape
    heads = views[-1].shape[1]
    grouped = q.reshape(b, t, heads, n // heads, h)
    grouped = jnp.transpose(grouped, (0, 2, 3, 1, 4))
    q_at = Coords(*(x[:, :, None] for x in tokens.at))
    scores, reads = [], []
    for number, view in enumerate(views):
      at = view.at
      keys = _all_keys(view)
      s = product("bkgth,bksh->bkgts", grouped, keys.astype(q.dtype))
      seen = visible(mask, q_at, Coords(*(x[:, None] for x in at)))
      scores.append(jnp.where(seen[:, None, None], s, -jnp.inf))
      shape = (b, heads, t, keys.shape[2])
      older = number == 0 and len(views) > 1
      is_read = jnp.ones((), bool)
      if older:
        is_read = _is_read(cache, at, shape)
      reads.append(jnp.broadcast_to(is_read, s.shape))
    score = jnp.concatenate(scores, -1)
    read = jnp.concatenate(reads, -1)
    best, slot = jax.lax.top_k(score, min(self.top, score.shape[-1]))
    best_read = jnp.take_along_axis(read, slot, -1) & (best > -jnp.inf)
    total = lambda x: jnp.sum(x, -1, dtype=jnp.float32)
    part = total(best_read) / jnp.maximum(total(best > -jnp.inf), 1)
    return jnp.transpose(part, (0, 3, 1, 2)).reshape(b, t, n)


def _all_keys(view: KVView) -> Float[Array, "B K S H"]:
  """Rotated keys of all slots of a view."""
  slots = view.shape[2]
  if not isinstance(view, StreamedView):
    return view.tile(jnp.int32(0), slots)[0]
  starts = jnp.arange(0, slots, view.block, dtype=jnp.int32)
  tiles = jax.lax.map(lambda start: view.tile(start, view.block)[0], starts)
  tiles = jnp.moveaxis(tiles, 0, 2)
  return tiles.reshape(*tiles.shape[:2], slots, tiles.shape[-1])


def _is_read(
  cache: ChosenTieredLayer, at: Coords, shape: tuple[int, int, int, int]
) -> Bool[Array, "B K _ T S"]:
  """Whether each query reads each older slot, by the slots' positions.

  Queries of a group that choose together have one entry.
  """
  chosen = cache.chosen
  assert chosen is not None and chosen.places is not None
  b, heads, t, _ = shape
  pages = chosen.table.shape[2]
  pos = chosen.at.pos.reshape(b, heads, 1, pages, -1)
  places = jnp.maximum(chosen.places, 0)[..., None]
  pos = jnp.take_along_axis(pos, places, 3)
  size = cache.cache.limit + 1
  # Slots of pages that are not read are marked beyond all positions.
  reads = (chosen.places >= 0)[:, :, None]
  if chosen.bias is not None:
    reads = reads & (chosen.bias > -jnp.inf)
  pos = pos[:, :, None]
  pos = jnp.where(reads[..., None] & (pos >= 0), pos, size)
  groups = pos.shape[2]
  pos = pos.reshape(b, heads, groups, t, -1)
  row, head, group, query = jnp.ogrid[:b, :heads, :groups, :t]
  marks = jnp.zeros((b, heads, groups, t, size), bool)
  of_query = row[..., None], head[..., None], group[..., None], query[..., None]
  marks = marks.at[(*of_query, pos)].set(True, mode="drop")
  older = jnp.broadcast_to(
    at.pos[:, None, None, None], (*marks.shape[:4], shape[3])
  )
  return jnp.take_along_axis(marks, jnp.clip(older, 0, size - 1), 4)
