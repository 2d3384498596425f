"""Trains predictors of the neurons that a token needs (LLM in a Flash).

Guarantees: the same texts and seed give the same predictors on one machine.
Cost: one pass over the texts, and a few epochs of two small products a layer.
Memory: the feedforward inputs of all tokens and layers, 4 bytes a number, and
a byte per neuron; use few texts: some thousand tokens are enough.
Ref: Alizadeh et al. 2023, LLM in a Flash, arXiv 2312.11514 (section 3.2). It
trains on the output of attention; here it is the feedforward's input, which
is that output after the residual and the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.checks import number, positive_int, token_rows
from ringjax.errors import OptionError, PromptError
from ringjax.models.transformer import Transformer
from ringjax.models.weights import calibration as files
from ringjax.models.weights.linear_maps import replaced
from ringjax.models.weights.neuron_predictors import NeuronPredictors
from ringjax.models.weights.neurons import SPARSE, check_neurons
from ringjax.nn.weights.neuron_feedforward import NotedFeedforward

# Fraction of the tokens on which thresholds are chosen and measured.
_HELD_OUT = 0.25
_BATCH = 256


def train_predictors(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  *,
  rank: int = 64,
  false_negatives: int | float = 0.04,
  threshold: int | float = 0.0,
  epochs: int = 20,
  learning_rate: int | float = 3e-3,
  seed: int = 0,
  progress: Callable[[int, int], Any] | None = None,
) -> NeuronPredictors:
  """Trains one predictor a layer, sigmoid(x . down . up + bias).

  The loss is balanced: active neurons have half of the weight, the others half.
  The bias is then moved so that, on texts that were held out, predictors miss
  no more than `false_negatives` of the active neurons; half of those texts
  choose the bias and half measure it.

  Args:
    model: Model of floats, on one device.
    tokens: Token ids of texts, int32 [N, T], N at least 8.
    rank: Width between the two products, r.
    false_negatives: Fraction of active neurons that may be missed.
    threshold: Size up to which an activation counts as zero, see
      `rj.models.sparse_model`.
    epochs: Number of passes over the tokens.
    learning_rate: Learning rate of Adam; falls to zero by a cosine.
    seed: Seed of the order and of the initial weights.
    progress: Function that is called with the number of texts and layers done,
      and in all.

  Raises:
    ShapeError: If tokens have another shape.
    PromptError: If an id is not in the vocabulary.
    OptionError: If an argument is out of range, or no neurons are sparse.
    MeshError: If the model is on a mesh, or there are several processes.
  """
  check_neurons(model)
  ids = token_rows(tokens)
  vocab = model.config.vocab
  if ids.min() < 0 or ids.max() >= vocab:
    raise PromptError(
      "tokens",
      f"ids from {ids.min()} to {ids.max()}",
      f"0 to {vocab - 1}",
      "encode the texts with the model's tokenizer",
    )
  positive_int("rank", rank)
  positive_int("epochs", epochs)
  number("false_negatives", false_negatives, least=0, most=1)
  number("threshold", threshold, least=0)
  number("learning_rate", learning_rate, least=0)
  if len(ids) < 8:
    raise OptionError(
      "tokens",
      f"{len(ids)} texts",
      "at least 8, a quarter of which is held out",
      "cut them into shorter rows",
    )
  acts = {layer.feedforward.act for layer in model.config.layers}  # pyrefly: ignore
  if not threshold and not acts <= set(SPARSE):
    raise OptionError(
      "model",
      f"the activation {(acts - set(SPARSE)).pop()!r}, zero for no neuron",
      f"one of {', '.join(SPARSE)}, or a threshold",
      "pass threshold=.05, or a ReLU model",
    )
  total = len(ids) + len(model.config.layers)
  report = progress or (lambda done, total: None)
  seen = _observed(model, ids, threshold, lambda n: report(n, total))
  num_held_out = max(2, int(len(ids) * _HELD_OUT))
  layers, measured = {}, {}
  for n, (layer, (x, active)) in enumerate(sorted(seen.items())):
    # Whole texts are held out: tokens of one text are alike.
    cut = lambda a, i, j: a[i * ids.shape[1] : j * ids.shape[1]]
    texts = len(ids)
    parts = _trained(
      cut(x, 0, texts - num_held_out),
      cut(active, 0, texts - num_held_out),
      min(rank, *x.shape[1:]),
      epochs,
      float(learning_rate),
      seed + layer,
    )
    middle = texts - num_held_out + (num_held_out + 1) // 2
    choose = (texts - num_held_out, middle)
    scores = _scores(parts, cut(x, *choose))
    wanted = scores[cut(active, *choose)]
    # Active neurons with scores below this level are missed.
    level = np.quantile(wanted, false_negatives) if wanted.size else 0.0
    parts["bias"] = (parts["bias"] - np.float32(level)).astype(np.float32)
    test = (middle, texts)
    predicted = _scores(parts, cut(x, *test)) > 0
    true = cut(active, *test)
    layers[layer] = parts
    measured[layer] = {
      "false_negatives": float((true & ~predicted).sum() / max(true.sum(), 1)),
      "predicted": float(predicted.mean()),
      "active": float(true.mean()),
    }
    report(len(ids) + n + 1, total)
  return NeuronPredictors(
    files.model_digest(model), float(threshold), layers, measured
  )


def _observed(
  model: Transformer,
  ids: np.ndarray,
  threshold: float,
  progress: Callable[[int], Any],
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
  """Feedforward inputs, [n, D], and active neurons, [n, F], by layer."""
  noted_parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

  def note(layer: int, x: np.ndarray, active: np.ndarray) -> None:
    noted_parts.setdefault(layer, []).append((x[0], active[0]))

  changed = {}
  for g, run in enumerate(model.stack.runs):
    for p in range(len(run.layers)):
      numbers = [run.number(p, n) for n in range(run.repeats)]
      changed[f"stack.blocks.{g}.{p}.feedforward"] = NotedFeedforward(
        model.stack.blocks[g][p].feedforward,
        jnp.asarray(numbers, jnp.int32),
        note,
        threshold=threshold,
      )
  noting_model = replaced(model, changed)
  call = jax.jit(
    lambda model, row: model(row, rows=jnp.zeros((1, 1), jnp.int32))
  )
  for n, row in enumerate(ids):
    call(noting_model, jnp.asarray(row[None], jnp.int32))
    # The barrier keeps texts in order, in every layer.
    jax.effects_barrier()
    progress(n + 1)
  return {
    layer: (
      np.concatenate([x for x, _ in parts]),
      np.concatenate([active for _, active in parts]),
    )
    for layer, parts in noted_parts.items()
  }


def _trained(
  x: Float[np.ndarray, "n D"],
  active: Bool[np.ndarray, "n F"],
  rank: int,
  epochs: int,
  learning_rate: float,
  seed: int,
) -> dict[str, np.ndarray]:
  """Trains a layer's predictor."""
  rng = np.random.default_rng(seed)
  dims, neurons = x.shape[1], active.shape[1]
  normal = lambda *shape: rng.normal(size=shape) / np.sqrt(shape[0])
  parts = {
    "down": jnp.asarray(normal(dims, rank), jnp.float32),
    "up": jnp.asarray(normal(rank, neurons), jnp.float32),
    "bias": jnp.zeros(neurons, jnp.float32),
  }
  share = float(np.clip(active.mean(), 1e-6, 1 - 1e-6))
  batch = min(_BATCH, len(x))
  steps = epochs * (len(x) // batch)
  optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

  def loss(parts: PyTree, x: Array, active: Array) -> jax.Array:
    logits = jnp.matmul(x @ parts["down"], parts["up"]) + parts["bias"][None]
    losses = optax.sigmoid_binary_cross_entropy(
      logits, active.astype(jnp.float32)
    )
    weight = jnp.where(
      active, jnp.float32(0.5 / share), jnp.float32(0.5 / (1 - share))
    )
    return jnp.mean(losses * weight)

  @jax.jit
  def step(
    parts: PyTree, state: PyTree, x: Array, active: Array
  ) -> tuple[Any, Any]:
    gradient = jax.grad(loss)(parts, x, active)
    # optax counts steps in integers, and multiplies with them.
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(parts, updates), state

  state = optimizer.init(parts)
  for _ in range(epochs):
    order = rng.permutation(len(x))
    for n in range(len(x) // batch):
      part = order[n * batch : (n + 1) * batch]
      parts, state = step(parts, state, x[part], active[part])
  return {name: np.asarray(a) for name, a in parts.items()}


def _scores(parts: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
  return x @ parts["down"] @ parts["up"] + parts["bias"]
