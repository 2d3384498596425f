"""Cost of kinds of caches: bytes, loss and divergence of the predictions.

Guarantees: all kinds read the same tokens, with each token's keys and values as
a cache of that kind decodes them (`rj.kv.SimulatedCache`); bytes are those of a
cache's arrays, with scales and coordinates. With a policy of eviction the first
half of a text is read and evicted once, and only the second half counts. Bytes
and bits of a kind that evicts are those after a whole text, read at once.
Cost: one forward pass for each row and kind, and one without a cache; for a
kind that evicts another one of the first row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.checks import token_rows
from ringjax.errors import OptionError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.repetition import evict_by_repetition
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.simulated import SimulatedCache
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention

# Of a cache's report only bytes are read, which no machine changes.
_MACHINE = "tpu-v5e"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindCost:
  """Cost of one kind of cache.

  Attributes:
    name: Name of the kind.
    bits: Bits of a number of the keys and values: all bytes of the cache over
      the numbers of its tokens, as of `explain`.
    nbytes: Bytes of the cache of one row of T tokens; of a kind that evicts,
      after the first text.
    nll: Mean negative log-likelihood, nats a token.
    loss: Increase of `nll` over that without a cache.
    kl: Mean Kullback-Leibler divergence of the predictions, nats a token.
    far: Root mean squared difference of the logits, relative to the root mean
      square of the logits without a cache, both centered.
    choices: For a policy with choices, as FastGen, the number of texts in which
      a KV head took each of them, by layer of the model and by head.
  """

  name: str
  bits: float
  nbytes: int
  nll: float
  loss: float
  kl: float
  far: float
  choices: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)

  def record(self) -> dict[str, Any]:
    """Fields as JSON."""
    return dataclasses.asdict(self)


def compare_caches(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  kinds: Mapping[str, CacheConfig | str],
  *,
  on_read: Callable[[int], Any] = lambda done: None,
  on_kind: Callable[[KindCost], Any] = lambda cost: None,
) -> list[KindCost]:
  """Measures costs of kinds of caches on texts.

  Args:
    model: Model on one device or a mesh.
    tokens: Ids of the texts, int32 [N, T]; on a mesh T is a multiple of the
      shards.
    kinds: Kinds of caches by name.
    on_read: Function of the number of passes over a text so far, of N for each
      kind.
    on_kind: Function of each result.

  Raises:
    ShapeError: If `tokens` has another shape.
    OptionError: If there are no kinds, or the model does not support one.
  """
  ids = token_rows(tokens, 2)
  if not kinds:
    raise OptionError("kinds", "none", "one or more", "name some kinds")
  model_kinds = {name: model.cache_kind(kind) for name, kind in kinds.items()}
  caches = {
    name: SimulatedCache.create(model, kind)
    for name, kind in model_kinds.items()
    if kind.codec is not None and kind.policy is None
  }
  costs, num_passes = [], 0
  for name, kind in model_kinds.items():
    sums = np.zeros(6)
    choices_by_row: list[list[list[str] | None]] = []
    for number, row in enumerate(ids):
      text = jnp.asarray(row[None], jnp.int32)
      chooses = kind.evicting or kind.policy is not None
      if chooses and name not in caches:
        part, choices = _costs_after_eviction(model, text, kind)
        choices_by_row.append(choices)
      else:
        part = _costs(model, text, caches.get(name))
      check_losses(part[0], model, document=number, first=1)
      check_losses(part[1], model, document=number, first=1)
      sums += np.asarray(part, np.float64)
      num_passes += 1
      on_read(num_passes)
    nll, base, kl, square, total_square = sums[:5] / sums[5]
    if kind.evicting:
      text = jnp.asarray(ids[:1], jnp.int32)
      cache = _evicted(model, text, kind, ids.shape[1])
    else:
      cache = model.init_cache_spec(1, ids.shape[1], kind=kind)
    costs.append(
      KindCost(
        name=name,
        bits=cache.explain(_MACHINE).bits,
        nbytes=bytes_each(cache),
        nll=float(nll),
        loss=float(nll - base),
        kl=float(kl),
        far=float(np.sqrt(square / total_square)),
        choices=_choices(kind, choices_by_row),
      )
    )
    on_kind(costs[-1])
  return costs


@jax.jit
def _costs(
  model: Transformer, tokens: Int[Array, "1 T"], cache: Any
) -> Float[Array, " 6"]:
  """Sums over the predictions, see `_sums`, of a cached pass."""
  exact_logits = model(tokens)
  cached_logits = exact_logits
  if cache is not None:
    # Each query sees other exact tokens: attend with cached attention.
    attend = CachedAttention() if cache.kind.exact else None
    cached_logits, _ = model(tokens, cache=cache, attend=attend)
  return _sums(exact_logits, cached_logits, tokens)


def _costs_after_eviction(
  model: Transformer, tokens: Int[Array, "1 T"], kind: CacheConfig
) -> tuple[Float[Array, " 6"], list[list[str] | None]]:
  """Sums of the second half of a text, after the first half was evicted.

  Also returns the choices of the cache's heads.
  """
  length = tokens.shape[1]
  half = length // 2
  cache = _evicted(model, tokens[:, :half], kind, length)
  choices = cache.choices(0) if kind.evicting else []
  cache = cache.with_room(length - half)
  cached_logits, cache = model(tokens[:, half:], cache=cache)
  exact_logits = model(tokens)[:, half:]
  sums = _sums(exact_logits, cached_logits, tokens[:, half:])
  return sums, choices


def _evicted(
  model: Transformer,
  tokens: Int[Array, "1 T"],
  kind: CacheConfig,
  capacity: int,
) -> Any:
  """Cache of a capacity that has read a text at once, after its eviction."""
  cache = model.init_cache(1, capacity, kind=kind).with_room(tokens.shape[1])
  _, cache = model(tokens, cache=cache)
  if kind.repeats:
    return evict_by_repetition(model, cache, tokens)
  return cache.evict(ended=np.ones(1, bool))


def _choices(
  kind: CacheConfig, choices_by_row: list[list[list[str] | None]]
) -> dict[str, list[list[int]]]:
  """Number of texts with each choice by layer and head; see `KindCost`."""
  names = () if kind.policy is None else kind.policy.choices
  layers = [
    [heads or [] for heads in layer]
    for layer in zip(*choices_by_row, strict=True)
  ]
  count = lambda name, layer: [
    sum(x == name for x in head) for head in zip(*layer, strict=True)
  ]
  return {name: [count(name, layer) for layer in layers] for name in names}


@jax.jit
def _sums(
  exact: Float[Array, "1 T V"],
  cached: Float[Array, "1 T V"],
  tokens: Int[Array, "1 T"],
) -> Float[Array, " 6"]:
  last = (slice(None), slice(0, -1))
  p, q = (jax.nn.log_softmax(x[last], -1) for x in (exact, cached))
  loss = lambda x: -jnp.sum(jnp.take_along_axis(x, tokens[:, 1:, None], -1))
  # A shift of all logits does not change a prediction: center them.
  level = lambda x: x - jnp.mean(x, -1, keepdims=True)
  a, b = level(exact[last]), level(cached[last])
  return jnp.stack(
    [
      loss(q),
      loss(p),
      jnp.sum(jnp.exp(p) * (p - q)),
      jnp.sum(jnp.square(a - b)),
      jnp.sum(jnp.square(a)),
      jnp.float32(a.shape[1]),
    ]
  )
