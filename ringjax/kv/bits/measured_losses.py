"""Losses of a model with codecs for some heads, in calls without a cache.

A killed run resumes from the losses in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.json_text import json_text
from ringjax.kv.base import FreshLayer, NoCache
from ringjax.kv.bits.allocation_units import Unit, attention_layers
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Codec
from ringjax.kv.codecs.codec import through
from ringjax.kv.layer_spec import LayerCacheSpec, model_layers
from ringjax.ops.rope import Rotation
from ringjax.parallel.programs import bounded
from ringjax.regular_files import replacing
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

PARTIAL_FILE = ".kv_bits.partial.json"


class Losses:
  """Measures losses of choices, and resumes from those measured before.

  Attributes:
    total: Number of model calls of the whole run.
    progress: Callback, see `allocate_bits`.
  """

  total: int = 0
  progress: Callable[[int, int], Any] | None = None

  def __init__(
    self,
    model: Transformer,
    ids: np.ndarray,
    kinds: tuple[CacheConfig, ...],
    measure: str,
    inputs: str,
    folder: str | os.PathLike[str] | None,
  ):
    self.model, self.ids, self.measure = model, ids, measure
    self.inputs, self.done = inputs, 0
    self.cache = ChosenCodecs.create(model, kinds)
    self.path = None if folder is None else pathlib.Path(folder) / PARTIAL_FILE
    self.known: list[list[float]] = []
    if self.path is not None and self.path.exists():
      # Ignore a file that is corrupt or of other inputs.
      with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        body = json.loads(self.path.read_text("utf-8"))
        if body["inputs"] == inputs:
          self.known = [[float(x), float(y)] for x, y in body["found"]]
    self.found: list[list[float]] = []

  def loss(self, pairs: Sequence[tuple[Unit, int]]) -> list[float]:
    """Loss (nats per token) and divergence with these choices."""
    number = len(self.found)
    if number < len(self.known):
      self.found.append(self.known[number])
      self.done += len(self.ids)
      return self.found[-1]
    cache, sums = self.cache.chosen(pairs), np.zeros(2)
    for row in self.ids:
      text = jnp.asarray(row[None], jnp.int32)
      part = loss_sums(self.model, text, cache, self.measure == "kl")
      sums += np.asarray(part, np.float64)
      self.done += 1
      if self.progress is not None:
        self.progress(self.done, self.total)
    count = self.ids.shape[0] * (self.ids.shape[1] - 1)
    self.found.append([float(x) for x in sums / count])
    if self.path is not None and self.done < self.total:
      body = {"inputs": self.inputs, "found": self.found}
      write_json(self.path, body)
    return self.found[-1]


@dataclasses.dataclass(frozen=True)
class ChosenCodecs(NoCache):
  """A cache that stores nothing and applies codecs chosen by traced data.

  Attributes:
    keys: Candidate of each head's keys in each layer of the model, int32
      [layers, heads]; -1 leaves them exact.
    values: Candidate of each head's values, likewise.
    constants: Codec constants, for each kind of layer and candidate.
    codecs: Codecs of the candidates.
    unrotated: Whether keys are encoded before their rotation.
    shapes: For each kind of layer, the shape of one token's cached vectors.
  """

  keys: Int[Array | np.ndarray, "layers heads"]
  values: Int[Array | np.ndarray, "layers heads"]
  constants: tuple[Any, ...]
  codecs: tuple[Codec, ...]
  unrotated: bool
  shapes: tuple[Any, ...]

  @classmethod
  def create(
    cls, model: Transformer, kinds: tuple[CacheConfig, ...]
  ) -> ChosenCodecs:
    codecs: tuple[Any, ...] = tuple(kind.codec for kind in kinds)
    constants = tuple(
      tuple(codec.constants(n, shape) for codec in codecs)
      if isinstance(shape, LayerCacheSpec)
      else ()
      for n, shape in enumerate(model.kinds)
    )
    layers = model_layers(model.kinds)
    heads = max(shape.heads for shape in attention_layers(model))
    exact = np.full((layers, heads), -1, np.int32)
    device_constants = jax.tree.map(jnp.asarray, constants)
    return cls(
      exact,
      exact,
      device_constants,
      codecs,
      kinds[0].layout.unrotated,
      model.kinds,
    )

  def chosen(self, pairs: Sequence[tuple[Unit, int]]) -> ChosenCodecs:
    """Cache with these candidates for these units, all others exact."""
    choices = {"keys": self.keys.copy(), "values": self.values.copy()}
    for unit, n in pairs:
      for part in unit.parts:
        choices[part][unit.layer, list(unit.heads)] = n
    arrays = {part: jnp.asarray(x) for part, x in choices.items()}
    return dataclasses.replace(self, **arrays)

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * len(self.shapes)

  def layer(self, kind: int, slots: PyTree, index: Index) -> FreshLayer:
    del slots
    shape = self.shapes[kind]
    if not isinstance(shape, LayerCacheSpec):
      return FreshLayer()
    layer = jnp.asarray(shape.which, jnp.int32)[index]
    of_layer = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    constants = jax.tree.map(of_layer, self.constants[kind])

    def with_codec(
      n: int, part: str, x: jax.Array, in_codec: jax.Array
    ) -> jax.Array:
      vectors, codec_constants = getattr(self.codecs[n], part), constants[n]
      put = lambda x: jnp.where(
        in_codec[None, :, None, None],
        through(vectors, x, codec_constants[part == "values"]),
        x,
      )
      # Skip the work for layers that stay exact: most, in most calls.
      return lax.cond(jnp.any(in_codec), put, lambda x: x, x)

    def encode_heads(part: str, x: jax.Array) -> jax.Array:
      if not x.shape[-1]:
        return x
      chosen = getattr(self, part)[layer, : shape.heads]
      for n in range(len(self.codecs)):
        x = with_codec(n, part, x, chosen == n)
      return x

    def change(
      k: jax.Array, v: jax.Array, rotation: Rotation
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
      k = encode_heads("keys", k if self.unrotated else rotation.own(k))
      k = rotation.own(k) if self.unrotated else k
      return k, encode_heads("values", v), ()

    return FreshLayer(change=change)


tree.register(
  ChosenCodecs,
  ("keys", "values", "constants"),
  ("codecs", "unrotated", "shapes"),
)


@bounded
@jax.jit(static_argnums=3)
def loss_sums(
  model: Transformer,
  tokens: Int[Array, "1 T"],
  cache: ChosenCodecs,
  compared: bool,
) -> Float[Array, " 2"]:
  """Sum over predictions the loss and, if `compared`, the divergence."""
  last = (slice(None), slice(0, -1))
  log_probs = lambda x: jax.nn.log_softmax(x[last], -1)
  q = log_probs(model(tokens, cache=cache)[0])
  loss = -jnp.sum(jnp.take_along_axis(q, tokens[:, 1:, None], -1))
  if not compared:
    return jnp.stack([loss, jnp.zeros_like(loss)])
  p = log_probs(model(tokens))
  return jnp.stack([loss, jnp.sum(jnp.exp(p) * (p - q))])


def write_json(path: pathlib.Path, body: dict[str, Any]) -> None:
  """Write a file atomically, replacing an old one; creates its folder."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as file:
    file.write(f"{json_text(body)}\n".encode())
