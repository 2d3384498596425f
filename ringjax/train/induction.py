"""Induction-head initialisation: attention heads that look back from the start.

Guarantees: only biases of queries and keys, and maps of attention and
feedforward, are written; training changes all of them. It saves the hours in
which such heads form by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class InductionHeads:
  """Initialises heads to copy what followed the previous occurrence.

  For models of layers with rotary embeddings and a window, one layer without
  positions and with full attention, and more layers with rotary embeddings.
  With a bias b of its keys, and the same rotated back by o tokens of its
  queries, the logits of a head with a rotary embedding are highest o tokens
  back: features of the last few tokens are there from the first step. The last
  layer before the full one has heads in pairs that share values v, the first
  looks 0 and the second 1 token back; the full layer reads the first's output
  as its query and the second's as its key, so that q_t . k_s is v_t . v_(s-1):
  it copies the token after an earlier one like the last.

  Attributes:
    back: how many tokens back each head of each layer with a rotary embedding
      looks.
    sharp: size of the biases.
    match: size of the queries and keys of the full layer.
    copied: size of the values that it copies.
    attention: factor of the output maps of layers with a rotary embedding.
    feedforward: factor of the feedforwards' output maps.
  """

  back: tuple[tuple[int, ...], ...]
  sharp: float = 4.0
  match: float = 4.0
  copied: float = 0.5
  attention: float = 0.15
  feedforward: float = 0.05

  def apply(self, model: Transformer) -> Transformer:
    """Initialises a fresh model in place, and returns it.

    Args:
      model: of the layers above, with biases of queries and keys, two query
        heads to a key head, and its runs of equal layers stacked.

    Raises:
      OptionError: the model has other layers.
    """
    before, full, behind = self._parts(model)
    theta = model.stack.runs[0].layers[0].attention.rope.theta
    count = before.attention.q.bias[...].shape[0]
    for block, back in (
      (before, self.back[:count]),
      (behind, self.back[count:]),
    ):
      self._look_back(block, back, theta)
    for block in (before, full, behind):
      _write(block.attention.o.weight, lambda o: self.attention * o)
      _write(block.feedforward.down.weight, lambda w: self.feedforward * w)
    double = np.ones((count, 1, 1, 1), np.float32)
    double[-1] = 2.0
    o = _write(before.attention.o.weight, lambda o: double * o)
    reads = self.match * jnp.transpose(o[-1], (2, 0, 1))[None]  # 1 D N H
    heads = reads.shape[2]
    # The first head of each pair is the query of both, the second one the key.
    asks = np.repeat(np.arange(0, heads, 2), 2)
    _write(full.attention.q.weight, lambda _: reads[:, :, asks])
    _write(full.attention.k.weight, lambda _: reads[:, :, 1::2])
    v = jnp.transpose(full.attention.v.weight[...], (0, 2, 3, 1))  # 1 K H D
    hands_on = self.copied * jnp.repeat(v, 2, 1)
    _write(full.attention.o.weight, lambda _: hands_on)
    return model

  def _parts(self, model: Transformer) -> tuple[Any, Any, Any]:
    """The layers before the full one, that one, and those after it."""
    kinds = [
      (run.layers[0].attention, run.repeats)
      for run in model.stack.runs
      if len(run.layers) == 1
    ]
    layers = len(model.config.layers)
    sound = len(kinds) == len(model.stack.runs) == 3 and kinds[1][1] == 1
    for number, (kind, _) in enumerate(kinds):
      rotary = kind.rope is not None
      paired = kind.heads == 2 * kind.kv_heads and kind.bias
      sound = sound and paired and rotary == (number != 1)
    if not sound:
      raise OptionError(
        "model",
        f"{model.config.family} of {layers} layers",
        "rotary layers, one without positions, rotary layers; biases, and two "
        "query heads to a key head",
        "leave out the initialisation, or pass such a model",
      )
    heads = model.config.layers[0].attention.heads
    if [len(row) for row in self.back] != [heads] * (layers - 1):
      raise OptionError(
        "back",
        f"rows of {[len(row) for row in self.back]}",
        f"{layers - 1} rows of {heads}, for each rotary layer and head",
        "pass a row for each of these layers",
      )
    before, full, behind = (block for (block,) in model.stack.blocks)
    return before, full, behind

  def _look_back(
    self, block: Any, back: tuple[tuple[int, ...], ...], theta: float
  ) -> None:
    """Writes biases whose logits are highest `back` tokens back."""
    q, k = block.attention.q.bias, block.attention.k.bias
    half = q[...].shape[-1] // 2
    rates = theta ** -(np.arange(half) / half)
    angles = np.asarray(back)[..., None] * rates  # L N H/2
    rotated = np.concatenate([np.cos(angles), -np.sin(angles)], -1)
    _write(q, lambda _: self.sharp * rotated)
    straight = np.concatenate([np.ones(half), np.zeros(half)])
    _write(k, lambda k: np.broadcast_to(self.sharp * straight, k.shape))


def _write(weight: Any, of: Callable[[jax.Array], Any]) -> jax.Array:
  """Replaces a weight by of(weight), with its dtype and sharding."""
  old = weight[...]
  new = jax.device_put(jnp.asarray(of(old), old.dtype), old.sharding)
  weight[...] = new
  return new
