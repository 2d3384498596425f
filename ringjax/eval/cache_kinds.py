"""What kinds of caches cost: bytes, loss, and how far the predictions move.

Guarantees: all kinds read the same tokens, each token's keys and values as a
cache of that kind gives them back (`rj.kv.SimulatedCache`); bytes are those of
the arrays that a cache has, scales and coordinates included.
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
from ringjax.kv.base import CacheSpec, bytes_each
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.simulated import SimulatedCache
from ringjax.kv.state import StateShape
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindCost:
  """What one kind of cache costs.

  Attributes:
    name: of the kind.
    bits: of a number of the keys and values, scales included.
    nbytes: of the cache of one row of that many tokens.
    nll: mean negative log-likelihood, nats a token.
    loss: how much more that is than without a cache.
    kl: mean Kullback-Leibler divergence of the predictions, nats a token.
    far: root of the mean squared distance of the logits, relative to theirs.
  """

  name: str
  bits: float
  nbytes: int
  nll: float
  loss: float
  kl: float
  far: float

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return dataclasses.asdict(self)


def compare_caches(
  model: Transformer,
  tokens: Any,
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
    name: None if kind.codec is None else SimulatedCache.create(model, kind)
    for name, kind in found.items()
  }
  costs, done = [], 0
  for name, kind in found.items():
    sums = np.zeros(5)
    for row in ids:
      part = _costs(model, jnp.asarray(row[None], jnp.int32), caches[name])
      sums += np.asarray(part, np.float64)
      done += 1
      on_read(done)
    nll, base, kl, square, all_ = sums / (ids.shape[0] * (ids.shape[1] - 1))
    spec = model.init_cache_spec(1, ids.shape[1], kind=kind)
    costs.append(
      KindCost(
        name=name,
        bits=_bits(model, kind),
        nbytes=bytes_each(spec),
        nll=float(nll),
        loss=float(nll - base),
        kl=float(kl),
        far=float(np.sqrt(square / all_)),
      )
    )
    on_kind(costs[-1])
  return costs


@jax.jit
def _costs(
  model: Transformer, tokens: Int[Array, "1 T"], cache: Any
) -> Float[Array, " 5"]:
  """Sums over the predictions: losses, divergence, squares of logits."""
  want = model(tokens)
  got = want if cache is None else model(tokens, cache=cache)[0]
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
