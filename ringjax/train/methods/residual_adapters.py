"""Adapters over codes that begin as the error of the codes.

Guarantees: s A B is, in each layer, the matrix of rank r with the least
sum_i m_i |E_i - s (A B)_i|^2, where E is the weight less its codes, E_i its
row of input channel i, and m_i the mean square of that channel on the texts;
without texts m_i is 1. The codes are those of `with_coded_weights`: a model
that is coded again in the same way finds the adapters' base, and no other does.
Cost: a pass of the model of floats over the texts, and for each map and layer
the eigenvectors of a matrix of as many rows as the smaller side of E has.
Memory: both models, the mean squares [L, I], and one layer's error.
Ref: Li et al. 2023, LoftQ, arXiv 2310.08659 (one iteration); Zhang et al. 2024,
QERA, arXiv 2410.06040 (the approximate form, by mean squares of channels).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped

from ringjax.checks import number
from ringjax.errors import OptionError, ShapeError
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import code_kind
from ringjax.models.weights.linear_maps import (
  CODED,
  adaptable_maps,
  inner_size,
  linear_maps,
)
from ringjax.models.weights.placed_maps import with_maps
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.linear import Linear
from ringjax.nn.weights.adapted import AdaptableMap
from ringjax.nn.weights.integer import NotedLinear, mean_square
from ringjax.train.methods.lora import Lora

# A channel that is zero on the texts counts as this part of the mean.
_LEAST = 1e-4


def residual_adapters(
  how: Lora,
  model: Transformer,
  coded: Transformer,
  tokens: Int[np.ndarray, "N T"] | None = None,
) -> tuple[Lora, dict[str, dict[str, Shaped[Array, " ..."]]]]:
  """Makes adapters that correct the error of a model's codes.

  `rj.train.train` takes the pair as `lora` of its recipe and as `adapters`.

  Args:
    how: Rank, alpha and targets of the adapters.
    model: Model of floats that was coded.
    coded: Model of `with_coded_weights(model, ...)`.
    tokens: Token ids of texts whose activations weigh the errors of input
      channels, int32 [N, T]; None: all channels weigh the same.

  Returns:
    (settings with the codes in `over`, adapters as `Lora.start` makes them).

  Raises:
    OptionError: If the maps of `coded` that get adapters are no codes, those of
      `model` no floats, or some are not on the devices; with new tokens.
    ShapeError: If `tokens` has another shape.
  """
  for checked_model in (model, coded):
    refuse_placed(
      checked_model,
      "correct the error of its codes",
      "load it without placement=",
    )
  number("alpha", how.alpha, above=0)
  if how.new_tokens:
    raise OptionError(
      "new_tokens",
      f"{how.new_tokens} for adapters over codes",
      "0: embeddings are no codes",
      "leave it out",
    )
  start = jax.eval_shape(lambda: how.start(coded))
  floats, codes = dict(linear_maps(model)), adaptable_maps(coded)
  wrong = [
    x for x in start if x not in floats or not isinstance(codes[x], CODED)
  ]
  if wrong:
    raise OptionError(
      "coded",
      f"{wrong[0]}, which is not coded from a map of floats",
      "a model of floats, and its codes",
      "pass model and rj.models.with_coded_weights(model, bits=4)",
    )
  squares: dict[str, np.ndarray] = {}
  if tokens is not None:
    squares = _mean_squares(model, tokens, {x: floats[x] for x in start})
  scale = how.alpha / how.rank
  params: dict[str, dict[str, Shaped[Array, " ..."]]] = {}
  for path, part in start.items():
    channels = squares.get(path)
    if channels is not None:
      floor = np.maximum(_LEAST * channels.mean(1, keepdims=True), 1e-30)
      channels = np.sqrt(np.maximum(channels, floor))
    a, b = _factors(
      floats[path], codes[path], channels, rank=how.rank, scale=scale
    )
    params[path] = {
      "a": a.reshape(part["a"].shape),
      "b": b.reshape(part["b"].shape),
    }
  return dataclasses.replace(how, over=code_kind(coded)), params


def _mean_squares(
  model: Transformer, tokens: Int[np.ndarray, "N T"], maps: dict[str, Linear]
) -> dict[str, Float32[np.ndarray, "L I"]]:
  """Mean squares of the input channels of maps on texts, by path."""
  ids = np.asarray(tokens)
  if ids.ndim != 2 or not ids.size:
    raise ShapeError(
      "tokens", f"{ids.shape}", "[N, T] with tokens", "pass rows of token ids"
    )
  if jax.process_count() > 1:
    raise OptionError(
      "tokens",
      f"texts in {jax.process_count()} processes",
      "one process, which sees all activations",
      "pass None, or make the adapters in one process",
    )
  sums = {
    path: np.zeros((_layers(linear), inner_size(linear)), np.float32)
    for path, linear in maps.items()
  }
  # Shards may report in threads of their own.
  lock = threading.Lock()

  def note_for(path: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def note(layer: np.ndarray, square: np.ndarray) -> None:
      with lock:
        sums[path][int(layer)] += square

    return note

  watched = with_maps(
    model,
    {
      path: lambda linear, path=path: NotedLinear(
        linear,
        jnp.arange(_layers(linear), dtype=jnp.int32),
        note_for(path),
        measure=mean_square,
      )
      for path in maps
    },
  )
  # One row of logits, as the head's output is not used.
  call = jax.jit(
    lambda model, row: model(row, rows=jnp.zeros((1, 1), jnp.int32))
  )
  for row in ids:
    jax.block_until_ready(call(watched, jnp.asarray(row[None], jnp.int32)))
    jax.effects_barrier()
  return {path: x / len(ids) for path, x in sums.items()}


def _layers(linear: Linear) -> int:
  """Number of layers that share a map's array."""
  return linear.weight.get_value().shape[0]


@jax.jit(static_argnames=("rank", "scale"))
def _factors(
  linear: Linear,
  codes: AdaptableMap,
  channels: Float[Array, "L I"] | None,
  *,
  rank: int,
  scale: float,
) -> tuple[Float[Array, "L I r"], Float[Array, "L r O"]]:
  """Factors of the errors of a map's layers, made one layer at a time.

  Args:
    linear: Map of floats.
    codes: Map of its codes.
    channels: Factors of the errors of input channels, or None for 1.
    rank: Rank of the product.
    scale: Number that the product is multiplied by.
  """
  inner = inner_size(linear)
  weight = linear.weight.get_value()
  if channels is None:
    channels = jnp.ones((weight.shape[0], inner), jnp.float32)
  factor = 1 / math.sqrt(scale)

  def of_layer(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
  ) -> tuple[jax.Array, jax.Array]:
    exact, decoded, weights = arrays
    error = exact.astype(jnp.float32) - decoded.astype(jnp.float32)
    a, b = _nearest(error.reshape(inner, -1) * weights[:, None], rank)
    return a / weights[:, None] * jnp.float32(factor), b * jnp.float32(factor)

  return jax.lax.map(of_layer, (weight, codes.weight(), jnp.asarray(channels)))


def _nearest(
  error: Float[Array, "I O"], rank: int
) -> tuple[Float[Array, "I r"], Float[Array, "r O"]]:
  """Factors of the nearest matrix of a rank, of equal sizes."""
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  # Eigenvalues ascend.
  if error.shape[0] <= error.shape[1]:
    a = jnp.linalg.eigh(product(error, error.T))[1][:, -rank:]
    b = product(a.T, error)
  else:
    b = jnp.linalg.eigh(product(error.T, error))[1][:, -rank:].T
    a = product(error, b.T)
  sizes = jnp.linalg.norm(a, axis=0), jnp.linalg.norm(b, axis=1)
  # A factor of 0 stays: the other one is a unit vector, and learns.
  positive = (sizes[0] > 0) & (sizes[1] > 0)
  ratio = jnp.sqrt(
    jnp.where(positive, sizes[1] / jnp.where(positive, sizes[0], 1), 1)
  )
  missing = rank - a.shape[1]
  return (
    jnp.pad(a * ratio[None], ((0, 0), (0, missing))),
    jnp.pad(b / ratio[:, None], ((0, missing), (0, 0))),
  )
