"""Bytes of weights that a step of decoding must read, and of blocks it runs.

Tokens are taken to choose experts independently and evenly. Then a step of B
tokens reads the share 1 - (1 - k / E)^B of E experts, of which each token
chooses k.
"""

from __future__ import annotations

import math

import jax
from flax import nnx

from ringjax.kv.base import bytes_each
from ringjax.models.transformer import Transformer
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Experts
from ringjax.nn.weights.layer_array import read_by_index
from ringjax.ops.experts.row_blocks import block_rows


def weight_bytes(model: Transformer, tokens: int) -> float:
  """Bytes of a device's weights that a step of `tokens` tokens must read.

  Of experts those that are chosen; of embeddings only those that are the head.

  Args:
    model: Model, or its shapes.
    tokens: Number of tokens, B.
  """
  stack, tables = model.stack, (model.embed, model.inputs)
  total = float(bytes_each(model) - bytes_each(stack))
  total -= bytes_each(tables if model.head is not None else model.inputs)
  for run, blocks in zip(stack.runs, stack.blocks, strict=True):
    for layer, block in zip(run.layers, blocks, strict=True):
      share = _chosen_share(layer, tokens)
      total += sum(
        bytes_each(leaf) * (share if read_by_index(leaf) else 1.0)
        for leaf in jax.tree.leaves(
          block, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
      )
  return total


def filled_blocks(model: Transformer, tokens: int) -> float:
  """Share of a mixture's blocks that have rows, see `ops.experts.moe`.

  1 without a mixture; with several kinds, the share of the first.

  Args:
    model: Model, or its shapes.
    tokens: Number of tokens, B.
  """
  mixtures = [
    mixture
    for run in model.stack.runs
    for layer in run.layers
    if (mixture := _mixture(layer)) is not None
  ]
  if not mixtures:
    return 1.0
  experts, chosen = mixtures[0].experts, mixtures[0].chosen
  rows = tokens * chosen
  size = block_rows(rows, experts)
  blocks = -(-rows // size) + min(experts, rows)
  p = chosen / mixtures[0].routed
  if p >= 1:
    return experts * -(-tokens // size) / blocks
  # Of a binomial distribution; the factors alone exceed a float's range.
  log_chance = lambda n: (
    math.lgamma(tokens + 1)
    - math.lgamma(n + 1)
    - math.lgamma(tokens - n + 1)
    + n * math.log(p)
    + (tokens - n) * math.log1p(-p)
  )
  filled = sum(
    -(-n // size) * math.exp(log_chance(n)) for n in range(tokens + 1)
  )
  return experts * filled / blocks


def _mixture(layer: Layer) -> Experts | None:
  feedforward = getattr(layer.feedforward, "sparse", layer.feedforward)
  return feedforward if isinstance(feedforward, Experts) else None


def _chosen_share(layer: Layer, tokens: int) -> float:
  """Expected share of a layer's experts that are chosen; 1 without any."""
  mixture = _mixture(layer)
  if mixture is None:
    return 1.0
  return 1.0 - (1.0 - mixture.chosen / mixture.routed) ** tokens
