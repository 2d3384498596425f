"""What kinds of caches cost: bytes, loss, and how far the predictions move.

Guarantees: all kinds read the same tokens, each token's keys and values as a
cache of that kind gives them back (`rj.kv.SimulatedCache`); bytes are those of
the arrays that a cache has, scales and coordinates included. With a policy of
eviction the first half of a text is read and evicted once, and the second half
behind it is what counts. Bytes of a kind with exact tokens are those behind a
whole text.
Cost: one forward pass a row and kind, and one without a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.errors import OptionError, ShapeError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.repetition import evict_by_repetition
from ringjax.kv.base import CacheSpec, bytes_each
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.simulated import SimulatedCache
from ringjax.kv.state import StateShape
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindCost:
  """What one kind of cache costs.

  Attributes:
    name: of the kind.
    bits: of a number of the keys and values, scales included.
    nbytes: of the cache of one row of that many tokens; with a policy, once it
      has evicted.
    nll: mean negative log-likelihood, nats a token.
    loss: how much more that is than without a cache.
    kl: mean Kullback-Leibler divergence of the predictions, nats a token.
    far: root of the mean squared distance of the logits, relative to theirs.
    choices: of a policy with choices, as FastGen, in how many texts a KV head
      took each of them: by layer of the model and by head, in that order.
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
    """The fields as JSON."""
    return dataclasses.asdict(self)


def compare_caches(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  kinds: Mapping[str, CacheKind | str],
  *,
  on_read: Callable[[int], Any] = lambda done: None,
  on_kind: Callable[[KindCost], Any] = lambda cost: None,
) -> list[KindCost]:
  """Costs of kinds of caches on texts.

  Args:
    model: the model, on one device or a mesh.
    tokens: int32 [N, T], texts; on a mesh T is a multiple of the shards.
    kinds: by the names that they are to have.
    on_read: called with the number of passes over a text that are done, of
      N for each kind.
    on_kind: called with each result.

  Raises:
    ShapeError: tokens of another shape.
    OptionError: no kinds, or one that the model can't have.
  """
  ids = np.asarray(tokens)
  whole = ids.ndim == 2 and np.issubdtype(ids.dtype, np.integer)
  if not whole or ids.shape[0] < 1 or ids.shape[1] < 2:
    raise ShapeError(
      "tokens",
      f"{ids.dtype} {list(ids.shape)}",
      "integers [N, T], a row for each text, of two tokens or more",
      "cut the texts into rows of equal length",
    )
  if not kinds:
    raise OptionError("kinds", "none", "one or more", "name some kinds")
  found = {name: model.cache_kind(kind) for name, kind in kinds.items()}
  caches = {
    name: SimulatedCache.create(model, kind)
    for name, kind in found.items()
    if kind.codec is not None and kind.policy is None
  }
  costs, done = [], 0
  for name, kind in found.items():
    sums, nbytes = np.zeros(6), 0
    taken: list[list[list[str] | None]] = []
    for number, row in enumerate(ids):
      text = jnp.asarray(row[None], jnp.int32)
      if kind.evicting and name not in caches:
        part, nbytes, choices = _costs_behind(model, text, kind)
        taken.append(choices)
      else:
        part = _costs(model, text, caches.get(name))
      if kind.evicting and name in caches and not nbytes:
        cache = model.init_cache(1, ids.shape[1], kind=kind)
        _, cache = model(text, cache=cache.with_room(ids.shape[1]))
        nbytes = bytes_each(cache.evict())
      check_losses(part[0], model, document=number, first=1)
      check_losses(part[1], model, document=number, first=1)
      sums += np.asarray(part, np.float64)
      done += 1
      on_read(done)
    nll, base, kl, square, all_ = sums[:5] / sums[5]
    if not kind.evicting:
      nbytes = bytes_each(model.init_cache_spec(1, ids.shape[1], kind=kind))
    costs.append(
      KindCost(
        name=name,
        bits=_bits(model, kind),
        nbytes=nbytes,
        nll=float(nll),
        loss=float(nll - base),
        kl=float(kl),
        far=float(np.sqrt(square / all_)),
        choices=_choices(kind, taken),
      )
    )
    on_kind(costs[-1])
  return costs


@jax.jit
def _costs(
  model: Transformer, tokens: Int[Array, "1 T"], cache: Any
) -> Float[Array, " 6"]:
  """Sums over the predictions: losses, divergence, squares; their number."""
  want = model(tokens)
  got = want
  if cache is not None:
    # Queries that see other exact tokens each look for them.
    attend = CachedAttention() if cache.kind.exact else None
    got, _ = model(tokens, cache=cache, attend=attend)
  return _sums(want, got, tokens)


def _costs_behind(
  model: Transformer, tokens: Int[Array, "1 T"], kind: CacheKind
) -> tuple[Float[Array, " 6"], int, list[list[str] | None]]:
  """The same of the second half, behind a first half that was evicted.

  Also the bytes of the cache, and the choices of its heads.
  """
  length = tokens.shape[1]
  half = length // 2
  cache = model.init_cache(1, length, kind=kind)
  _, cache = model(tokens[:, :half], cache=cache)
  if kind.repeats:
    cache = evict_by_repetition(model, cache, tokens[:, :half])
  else:
    cache = cache.evict()
  choices = cache.choices(0)
  cache = cache.with_room(length - half)
  got, cache = model(tokens[:, half:], cache=cache)
  want = model(tokens)[:, half:]
  sums = _sums(want, got, tokens[:, half:])
  return sums, bytes_each(cache.flush()), choices


def _choices(
  kind: CacheKind, taken: list[list[list[str] | None]]
) -> dict[str, list[list[int]]]:
  """How often each choice was taken, by layer and head; see `KindCost`."""
  names = () if kind.policy is None else kind.policy.choices
  layers = [
    [heads or [] for heads in layer] for layer in zip(*taken, strict=True)
  ]
  count = lambda name, layer: [
    sum(x == name for x in head) for head in zip(*layer, strict=True)
  ]
  return {name: [count(name, layer) for layer in layers] for name in names}


@jax.jit
def _sums(
  want: Float[Array, "1 T V"],
  got: Float[Array, "1 T V"],
  tokens: Int[Array, "1 T"],
) -> Float[Array, " 6"]:
  last = (slice(None), slice(0, -1))
  p, q = (jax.nn.log_softmax(x[last], -1) for x in (want, got))
  loss = lambda x: -jnp.sum(jnp.take_along_axis(x, tokens[:, 1:, None], -1))
  # One shift of all logits moves no prediction.
  level = lambda x: x - jnp.mean(x, -1, keepdims=True)
  a, b = level(want[last]), level(got[last])
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


def _bits(model: Transformer, kind: CacheKind) -> float:
  """Bits of a number, over all layers that keep keys and values."""
  room = CacheSpec(batch=1, capacity=1, dtype=model.dtype, codec=kind.codec)
  numbers = nbytes = 0
  for shape in model.kinds:
    if not isinstance(shape, StateShape):
      numbers += shape.numbers()
      nbytes += bytes_each(shape.slots(room))
  return 8 * nbytes / max(1, numbers)
