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
from ringjax.models.cepe import CepeTransformer
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class InductionHeads:
  """Initialises heads to copy what followed the previous occurrence.

  For models of layers with rotary embeddings and a window, one layer without
  positions and with full attention, and more layers with rotary embeddings.
  With a bias b of its keys, and the same rotated back by o tokens of its
  queries, the logits of a head with a rotary embedding are highest o tokens
  back: features of the last few tokens are there from the first step. The last
  layer before the full one has heads in pairs that share values v; the first
  looks 0 tokens back and the second 1. The full layer reads the first's output
  as its query and the second's as its key, so that q_t . k_s is v_t . v_(s-1):
  it copies the token after an earlier one like the last.

  Attributes:
    back: Distance in tokens that each head looks back, one row per layer with
      a rotary embedding.
    sharp: Size of the biases.
    match: Size of the queries and keys of the full layer.
    copied: Size of the values that it copies.
    attention: Factor of the output maps of layers with a rotary embedding.
    feedforward: Factor of the feedforwards' output maps.
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
      model: Model of the layers above, with biases of queries and keys, two
        query heads to a key head, and its runs of equal layers stacked.

    Raises:
      OptionError: If the model has other layers.
    """
    first_block, full_block, last_block = self._parts(model)
    first: Any = model.stack.runs[0].layers[0].attention
    theta = first.rope.theta
    count = first_block.attention.q.bias[...].shape[0]
    for block, back in (
      (first_block, self.back[:count]),
      (last_block, self.back[count:]),
    ):
      self._look_back(block, back, theta)
    for block in (first_block, full_block, last_block):
      _write(block.attention.o.weight, lambda o: self.attention * o)
      _write(block.feedforward.down.weight, lambda w: self.feedforward * w)
    double = np.ones((count, 1, 1, 1), np.float32)
    double[-1] = 2.0
    o = _write(first_block.attention.o.weight, lambda o: double * o)
    reads = self.match * jnp.transpose(o[-1], (2, 0, 1))[None]  # 1 D N H
    heads = reads.shape[2]
    # The first head of each pair is the query of both, the second one the key.
    query_heads = np.repeat(np.arange(0, heads, 2), 2)
    _write(full_block.attention.q.weight, lambda _: reads[:, :, query_heads])
    _write(full_block.attention.k.weight, lambda _: reads[:, :, 1::2])
    v = jnp.transpose(
      full_block.attention.v.weight[...], (0, 2, 3, 1)
    )  # 1 K H D
    copies = self.copied * jnp.repeat(v, 2, 1)
    _write(full_block.attention.o.weight, lambda _: copies)
    return model

  def _parts(self, model: Transformer) -> tuple[Any, Any, Any]:
    """Blocks of the layers before the full one, of it, and those after it."""
    kinds: list[Any] = [
      (run.layers[0].attention, run.repeats)
      for run in model.stack.runs
      if len(run.layers) == 1
    ]
    layers = len(model.config.layers)
    valid = len(kinds) == len(model.stack.runs) == 3 and kinds[1][1] == 1
    for number, (kind, _) in enumerate(kinds):
      rotary = kind.rope is not None
      paired = kind.heads == 2 * kind.kv_heads and kind.bias
      valid = valid and paired and rotary == (number != 1)
    if not valid:
      raise OptionError(
        "model",
        f"{model.config.family} of {layers} layers",
        "rotary layers, one without positions, rotary layers; biases, and two "
        "query heads to a key head",
        "leave out the initialisation, or pass such a model",
      )
    first: Any = model.config.layers[0].attention
    heads = first.heads
    if [len(row) for row in self.back] != [heads] * (layers - 1):
      raise OptionError(
        "back",
        f"rows of {[len(row) for row in self.back]}",
        f"{layers - 1} rows of {heads}, for each rotary layer and head",
        "pass a row for each of these layers",
      )
    first_block, full_block, last_block = (
      block for (block,) in model.stack.blocks
    )
    return first_block, full_block, last_block

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryInductionHeads:
  """Initialises induction heads where every layer rotates and sees all.

  The first layers look back as those of `InductionHeads`. The odd heads of the
  last of them look 1 token back and copy the first K H features of that token,
  a slice of H each, into the next K H features of this one. The layer after it
  matches: its queries read the first slices, its keys the second ones, so that
  q_t . k_s is x_t . x_(s-1), and it adds the first slices of the matching
  token. It matches in the features of a head that rotate at most `turn` radians
  in `reach` tokens, so that a match counts at all distances up to about that.
  Later layers keep their initialisation.

  Attributes:
    back: Distance in tokens that each head looks back, one row per first layer.
    reach: Longest distance of a match, in tokens.
    turn: Largest rotation within that distance, in radians.
    sharp: Size of the biases.
    match: Size of the queries and keys of the matching layer.
    copied: Size of the features that the matching layer adds.
    before: Size of the features copied from the token before.
    attention: Factor of the other output maps of looking layers.
    feedforward: Factor of the feedforwards' output maps.
    noise: Factor of the old values of replaced maps, which are added.
  """

  back: tuple[tuple[int, ...], ...]
  reach: int = 32768
  turn: float = 1.0
  sharp: float = 8.0
  match: float = 4.0
  copied: float = 1.0
  before: float = 0.15
  attention: float = 0.05
  feedforward: float = 0.05
  noise: float = 0.1

  def apply(self, model: Transformer) -> Transformer:
    """Initialises a fresh model in place, and returns it.

    Args:
      model: Model of equal layers with rotary embeddings and biases of
        queries and keys, with two query heads to a key head, at least 2 K H
        features, and its layers stacked.

    Raises:
      OptionError: If the model has other layers.
    """
    spec = self._spec(model)
    ((block,),) = model.stack.blocks
    q, k, v, o = (getattr(block.attention, name) for name in "qkvo")
    width, kv_heads, dim = v.weight[...].shape[1:]
    looking, layers = len(self.back), len(model.config.layers)
    half = dim // 2
    rates = spec.rope.theta ** -(np.arange(half) / half)
    # Biases whose logits are highest `back` tokens back.
    angles = np.asarray(self.back)[..., None] * rates  # L N H/2
    rotated = np.concatenate([np.cos(angles), -np.sin(angles)], -1)
    straight = np.concatenate([np.ones(half), np.zeros(half)])
    _write(q.bias, lambda b: b.at[:looking].set(self.sharp * rotated))
    _write(k.bias, lambda b: b.at[:looking].set(self.sharp * straight))
    size = np.where(np.arange(layers) < looking, self.attention, 1.0)
    _write(o.weight, lambda o: size[:, None, None, None] * o)
    _write(block.feedforward.down.weight, lambda w: self.feedforward * w)
    features = np.eye(width)[: 2 * kv_heads * dim]
    first, second = features.reshape(2, kv_heads, dim, width)  # K H D
    slow = np.tile(rates * self.reach <= self.turn, 2)[:, None]
    into = lambda x: np.transpose(x, (2, 0, 1))  # D K H
    twice = lambda x: np.repeat(x, 2, 0)
    for weight, layer, value in (
      (v.weight, looking - 1, into(first)),
      (q.weight, looking, into(twice(self.match * slow * first))),
      (k.weight, looking, into(self.match * slow * second)),
      (v.weight, looking, into(first)),
      (o.weight, looking, twice(self.copied * first)),
    ):
      _write(
        weight, lambda w, n=layer, x=value: w.at[n].set(self.noise * w[n] + x)
      )
    odd_heads = slice(1, None, 2)
    _write(
      o.weight, lambda o: o.at[looking - 1, odd_heads].set(self.before * second)
    )
    return model

  def _spec(self, model: Transformer) -> Any:
    """Attention spec of every layer, if the model fits; else raises."""
    layers, width = model.config.layers, model.config.embed
    spec: Any = layers[0].attention
    valid = all(layer == layers[0] for layer in layers)
    valid = valid and spec.rope is not None and spec.bias
    valid = valid and spec.heads == 2 * spec.kv_heads
    if not valid or width < spec.heads * spec.head_dim:
      raise OptionError(
        "model",
        f"{model.config.family} of {len(layers)} layers",
        "equal rotary layers with biases, two query heads to a key head, and "
        "no more heads than the width holds",
        "leave out the initialisation, or pass such a model",
      )
    if (
      not 1 <= len(self.back) < len(layers)
      or any(len(row) != spec.heads for row in self.back)
      or {*self.back[-1][1::2]} != {1}
    ):
      raise OptionError(
        "back",
        f"{self.back}",
        f"1 to {len(layers) - 1} rows of {spec.heads}, the last with 1 at odd "
        "places",
        "pass a row for each of the looking layers",
      )
    return spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossInductionHeads:
  """Initialises an encoder and cross-attention that look up (CEPE).

  The first half of the heads of the encoder's first layer look 1 token back and
  copy features E/2 to E of that token, which are the first ones of the
  decoder's embedding, into features 0 to E/2 of this one. In cross-attention,
  queries read the decoder's first E/2 features, keys the first half of a state,
  values the second: q_t . k_s is x_t . x_(s-1), and it adds x_s, the token
  after an earlier one like the last. The other heads look 1 ahead, 2 back, 2
  ahead and so on; later layers begin small.

  Attributes:
    sharp: Size of the biases.
    match: Size of the queries and keys of cross-attention.
    copied: Size of the features that it adds.
    small: Factor of the other output maps of the encoder.
    noise: Factor of the old values of replaced maps, which are added.
  """

  sharp: float = 8.0
  match: float = 2.0
  copied: float = 1.0
  small: float = 0.1
  noise: float = 0.1

  def apply(self, model: CepeTransformer) -> CepeTransformer:
    """Initialises a fresh encoder and its cross-attention in place.

    Args:
      model: Model by `ringjax.models.cepe.with_encoder`, whose encoder has
        layers of one kind, an even number of heads, and half of its width at
        most as wide as the decoder.

    Raises:
      OptionError: If the model has another encoder.
    """
    encoder = model.encoder_config
    half, heads = encoder.width // 2, encoder.heads
    dim = encoder.width // heads
    if heads % 2 or half > model.config.embed:
      raise OptionError(
        "model",
        f"an encoder of {heads} heads and width {encoder.width}",
        f"an even number, and at most {2 * model.config.embed}",
        "leave out the initialisation, or pass such an encoder",
      )
    self._encoder(model, half, heads, dim)
    for run in model.stack.blocks:
      for block in run:
        self._cross(block.cross, half)
    return model

  def _encoder(
    self, model: CepeTransformer, half: int, heads: int, dim: int
  ) -> None:
    features = model.embed.weight[...][:, :half]
    # Features of mean square 1.
    features = features * jax.lax.rsqrt(jnp.mean(jnp.square(features)))
    _write(
      model.encoder.embed.weight,
      lambda w: jnp.concatenate([self.noise * w[:, :half], features], 1),
    )
    ((block,),) = model.encoder.stack.blocks
    theta, numbers = model.encoder_config.theta, np.arange(heads // 2)
    # 1 back; then 1 ahead, 2 back, 2 ahead, and so on.
    back = np.where(numbers % 2, numbers // 2 + 2, -(numbers // 2) - 1)
    back = np.concatenate([np.ones(heads // 2), back])
    rates = theta ** -(np.arange(dim // 2) / (dim // 2))
    angles = back[:, None] * rates
    rotated = np.concatenate([np.cos(angles), -np.sin(angles)], -1)
    straight = np.concatenate([np.ones(dim // 2), np.zeros(dim // 2)])
    q, k, v, o = (getattr(block.attention, name) for name in "qkvo")
    _write(q.bias, lambda b: b.at[0].set(self.sharp * rotated))
    _write(k.bias, lambda b: b.at[0].set(self.sharp * straight))
    for weight in (q.weight, k.weight):
      _write(weight, lambda w: w.at[0].set(self.noise * w[0]))
    _write(block.feedforward.down.weight, lambda w: self.small * w)
    _write(o.weight, lambda w: self.small * w)
    copying = heads // 2
    slices = np.eye(half).reshape(copying, dim, half)  # N H E/2
    zeros = np.zeros_like(slices)
    reads = np.concatenate([zeros, slices], 2)
    writes = np.concatenate([slices, zeros], 2)
    _write(
      v.weight,
      lambda w: w.at[0, :, :copying].set(np.transpose(reads, (2, 0, 1))),
    )
    _write(o.weight, lambda w: w.at[0, :copying].set(writes))

  def _cross(self, cross: Any, half: int) -> None:
    """Writes the maps of all layers that share these arrays."""
    width, heads, dim = cross.q.weight[...].shape[1:]
    states, kv_heads, _ = cross.k.weight[...].shape[1:]
    # The feature of each number of a key or value.
    feature_of = np.arange(kv_heads * dim) % half
    feature = np.eye(half)[feature_of].reshape(kv_heads, dim, half)
    of_heads = np.repeat(feature, heads // kv_heads, 0)
    into = lambda x, size, first: np.transpose(
      np.pad(x, [(0, 0), (0, 0), (first, size - half - first)]), (2, 0, 1)
    )
    # Each feature is written by several heads.
    times = heads * dim / half
    for weight, value in (
      (cross.q.weight, self.match * into(of_heads, width, 0)),
      (cross.k.weight, self.match * into(feature, states, 0)),
      (cross.v.weight, into(feature, states, half)),
      (
        cross.o.weight,
        self.copied
        / times
        * np.pad(of_heads, [(0, 0), (0, 0), (0, width - half)]),
      ),
    ):
      _write(weight, lambda w, new=value: self.noise * w + new[None])


def _write(weight: Any, of: Callable[[jax.Array], Any]) -> jax.Array:
  """Replaces a weight by of(weight), with its dtype and sharding."""
  old = weight[...]
  new = jax.device_put(jnp.asarray(of(old), old.dtype), old.sharding)
  weight[...] = new
  return new


# Initialisations by their names in configs.
INITIALISATIONS: dict[
  str, type[InductionHeads | RotaryInductionHeads | CrossInductionHeads]
] = {
  "lookup": InductionHeads,
  "rotary_lookup": RotaryInductionHeads,
  "cross_lookup": CrossInductionHeads,
}
