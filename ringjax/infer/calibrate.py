"""Calibration of code books on texts: scales of channels, levels of codes.

Guarantees: the same texts give the same calibration, in one run or in several
resumed ones.
Cost: two passes over the texts, the second with gradients of the loss.
Memory: the memory of training on one text, and the extreme numbers of each
channel.
The keys of the texts' first tokens, attention sinks, are far from all others
and similar to each other: their mean is the sink, relative to which such keys
are coded.
Ref: Hooper et al. 2024, KVQuant, arXiv 2401.18079: keys before their rotation,
scaled by channel so that all but the outliers are in [-1, 1]; levels by a
weighted k-means, where an error counts as much as the squared gradient of the
loss by that number (the diagonal of the Fisher information); Q-Norm (section
3.5), levels of few bits whose mean and deviation are those of the numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.checks import integer, number, one_of
from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
)
from ringjax.infer import inputs
from ringjax.kv.base import FreshLayer, NoCache
from ringjax.kv.cache import LayerCacheSpec
from ringjax.kv.codecs.calibration import BITS, WEIGHTS, Calibration
from ringjax.kv.codecs.code_book import CodeBook, marked
from ringjax.kv.state import StateShape
from ringjax.models import calibration as files
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

# Number of histogram cells of [-1, 1] that count scaled numbers.
_CELLS = 1024
_ROUNDS = 100
# Lower limit of the factor by which codes are finer at the sink.
_LEAST_FACTOR = 1 / 64
PARTIAL = ".kv_calibration.partial.safetensors"


def calibrate(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  *,
  outliers: int | float = 0.01,
  first: int = 1,
  weights: str = "fisher",
  normalized: Sequence[int] = (2,),
  folder: str | os.PathLike[str] | None = None,
  progress: Callable[[int, int], Any] | None = None,
) -> Calibration:
  """Measures a model's keys and values on texts.

  Args:
    model: Model on one device or a mesh.
    tokens: Token ids of the texts, int32 [N, T]; KVQuant takes 16 texts of
      2,048 tokens.
    outliers: Fraction of a channel's numbers that its scale leaves out.
    first: Number of tokens at the beginning of each text that are left out;
      with 1 or more the key of the first one is the sink, see `rj.kv.CodeBook`.
    weights: Weight of a number's error: "fisher", the squared gradient of the
      loss by the number; "none", equal for all, which needs no gradients.
    normalized: Bit widths of the codes whose levels have the mean and the
      deviation of the numbers (Q-Norm), some of 2, 3 and 4.
    folder: Folder for the measurements after each text, from which a killed
      run resumes, and for the final calibration. Of several processes the
      first one reads and writes it.
    progress: Callback that gets the number of finished passes over a text and
      their total number.

  Raises:
    ShapeError: If `tokens` has another shape.
    PromptError: If ids are outside the vocabulary.
    ConfigError: If the model has no keys and values.
    OptionError: If an argument is out of range.
  """
  ids = inputs.texts(tokens, model.config.vocab)
  number("outliers", outliers, least=0, most=0.5)
  integer("first", first, least=0, most=ids.shape[1] - 2)
  one_of("weights", weights, WEIGHTS)
  for bits in normalized:
    one_of("normalized", bits, BITS)
  kinds = [
    n for n, x in enumerate(model.kinds) if not isinstance(x, StateShape)
  ]
  if not kinds:
    raise ConfigError(
      "model",
      f"{model.config.family}, without keys and values",
      "attention in some layer",
      "its states need no codec",
    )
  model_digest = files.model_digest(model)
  digest = hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes())
  digest.update(
    f"{model_digest} {ids.shape} {outliers} {first} {weights}".encode()
  )
  work = _Work(
    model, ids, kinds, outliers, first, weights, digest.hexdigest()[:16]
  )
  # All processes measure the same; only the first one writes files.
  out = None if folder is None or jax.process_index() else pathlib.Path(folder)
  partial = None if out is None else out / PARTIAL
  if partial is not None and partial.exists():
    # A corrupt file is ignored: the texts are read again.
    with contextlib.suppress(CheckpointFormatError):
      work.resume(*files.read_tensors(partial))
  if jax.process_count() > 1:
    work.as_first()
  total = 2 * len(ids)
  while work.done < total:
    work.step()
    if partial is not None:
      files.write_tensors(partial, work.arrays, work.metadata())
    if progress is not None:
      progress(work.done, total)
  arrays = work.finish(normalized)
  calibration = files.make(
    model_digest, arrays, weights, float(outliers), first
  )
  if out is not None and partial is not None:
    files.save_calibration(calibration, out)
    partial.unlink()
  return calibration


class _Work:
  """Measurements so far, and the passes that extend them.

  Attributes:
    done: Number of finished passes over a text, of two for each text.
    arrays: Measured arrays by name, for each kind of layer: "low" and "high"
      [L, K, D, m], extreme numbers of the channels; "sinks" [N, L, K, D], keys
      of the texts' first tokens; "keys" and "values" [3, L, K, cells], sum of
      weights, weighted sum and count of the scaled numbers in each cell.
  """

  def __init__(
    self,
    model: Transformer,
    ids: np.ndarray,
    kinds: list[int],
    outliers: float,
    first: int,
    weights: str,
    inputs: str,
  ):
    self.model, self.ids, self.kinds = model, ids, kinds
    self.outliers, self.first, self.inputs = outliers, first, inputs
    self.weights = weights
    self.done = 0
    count = ids.shape[0] * (ids.shape[1] - first)
    # Position of the quantile, counted from either end.
    self.far = max(1, round(outliers / 2 * count) + 1)
    self.arrays: dict[str, np.ndarray] = {}
    for n in kinds:
      shape: Any = model.kinds[n]
      lead = (shape.layers, shape.heads)
      ends = (*lead, shape.key, self.far)
      self.arrays[f"{n}.low"] = np.full(ends, np.inf, np.float32)
      self.arrays[f"{n}.high"] = np.full(ends, -np.inf, np.float32)
      sinks = (len(ids), *lead, shape.key)
      self.arrays[f"{n}.sinks"] = np.zeros(sinks, np.float32)
      for part in ("keys", "values"):
        self.arrays[f"{n}.{part}"] = np.zeros((3, *lead, _CELLS), np.float32)
    everywhere = ShardingContext(mesh=model.mesh).everywhere
    replicated = lambda f: lambda *args: everywhere(f(*args))
    self._ends = jax.jit(replicated(_ends), static_argnums=(4,))
    self._counts = jax.jit(replicated(_counts), static_argnums=(4, 5, 6))

  def metadata(self) -> dict[str, str]:
    return {"inputs": self.inputs, "done": f"{self.done}"}

  def resume(
    self, arrays: dict[str, np.ndarray], metadata: dict[str, str]
  ) -> None:
    """Continues from saved measurements if they have the same inputs."""
    shapes = lambda arrays: {name: x.shape for name, x in arrays.items()}
    if (
      metadata.get("inputs") == self.inputs
      and metadata.get("done", "").isdecimal()
      and shapes(arrays) == shapes(self.arrays)
    ):
      self.arrays, self.done = arrays, int(metadata["done"])

  def as_first(self) -> None:
    """Continues from the measurements of the first process."""
    progress = self.arrays, np.int32(self.done)
    arrays, num_done = multihost_utils.broadcast_one_to_all(progress)
    self.arrays = {name: np.asarray(x) for name, x in arrays.items()}
    self.done = int(num_done)

  def step(self) -> None:
    """Runs one pass over one text."""
    texts = len(self.ids)
    # NumPy arrays are replicated over the devices of all processes.
    row = np.asarray(self.ids[[self.done % texts]], np.int32)
    arrays = dict(self.arrays)
    if self.done < texts:
      text = np.int32(self.done)
      new = self._ends(self.model, row, text, arrays, self.first)
    else:
      scales = {n: self.scales(n) for n in self.kinds}
      new = self._counts(
        self.model,
        row,
        arrays,
        scales,
        self.first,
        self.outliers,
        self.weights,
      )
    self.arrays |= {name: np.asarray(x) for name, x in new.items()}
    self.done += 1

  def scales(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero of each channel for a kind of layer, [L, K, D] each."""
    low = self.arrays[f"{n}.low"].max(-1)
    high = self.arrays[f"{n}.high"].min(-1)
    scale = np.maximum((high - low) / 2, np.float32(1e-8))
    return scale.astype(np.float32), ((high + low) / 2).astype(np.float32)

  def sink(self, n: int) -> dict[str, np.ndarray]:
    """Mean key of first tokens, and their largest distance in scales."""
    if not self.first:
      return {}
    keys, (scale, _) = self.arrays[f"{n}.sinks"], self.scales(n)
    mean = keys.mean(0)
    distance = (np.abs(keys - mean) / scale).max((0, -1))[..., None]
    factor = np.clip(distance, _LEAST_FACTOR, 1).astype(np.float32)
    return {f"{n}.keys.sink": mean, f"{n}.keys.factor": factor}

  def finish(self, normalized: Sequence[int]) -> dict[str, np.ndarray]:
    """Makes the arrays of the calibration from the measurements."""
    arrays: dict[str, np.ndarray] = {}
    for n in self.kinds:
      scale, zero = self.scales(n)
      arrays |= {f"{n}.keys.scale": scale, f"{n}.keys.zero": zero}
      arrays |= self.sink(n)
      shape: Any = self.model.kinds[n]
      for part in ("keys", "values") if shape.value else ("keys",):
        weight, total, count = self.arrays[f"{n}.{part}"]
        for bits in BITS:
          fitted = levels(weight, total, 2**bits)
          if bits in normalized:
            fitted = normalize(fitted, count)
          arrays[f"{n}.{part}.levels{bits}"] = fitted
    return arrays


def levels(
  weight: Float[np.ndarray, "L K cells"],
  total: Float[np.ndarray, "L K cells"],
  count: int,
) -> Float[np.ndarray, "L K n"]:
  """Fits levels of least weighted squared error, by Lloyd's iterations.

  Args:
    weight: Sum of the weights of the numbers in each cell of [-1, 1].
    total: Weighted sum of these numbers.
    count: Number of levels, n.
  """
  middle = (np.arange(_CELLS) + 0.5) * (2 / _CELLS) - 1
  x = np.where(weight > 0, total / np.where(weight > 0, weight, 1), middle)
  weight = weight.astype(np.float64) + 1e-12 * weight.max(-1, keepdims=True)
  weight = weight + 1e-30
  sums = weight * x
  # The initial levels split the cells into groups of equal weight.
  part = np.cumsum(weight, -1) / weight.sum(-1, keepdims=True)
  code = np.minimum((part * count).astype(np.int64), count - 1)
  levels = np.zeros((*weight.shape[:-1], count))
  ordinal = np.arange(count)
  for _ in range(_ROUNDS):
    chosen = code[..., None] == ordinal
    mass = np.einsum("lkc,lkcn->lkn", weight, chosen)
    mean = np.einsum("lkc,lkcn->lkn", sums, chosen) / np.maximum(mass, 1e-300)
    # A level without cells keeps its value.
    levels = np.sort(np.where(mass > 0, mean, levels), -1)
    edges = (levels[..., 1:] + levels[..., :-1]) / 2
    new = (x[..., None] > edges[..., None, :]).sum(-1)
    if (new == code).all():
      break
    code = new
  return levels.astype(np.float32)


def normalize(
  levels: Float[np.ndarray, "L K n"], count: Float[np.ndarray, "L K cells"]
) -> Float[np.ndarray, "L K n"]:
  """Shifts and scales levels so that codes have the numbers' moments (Q-Norm).

  Args:
    levels: Levels, ascending.
    count: Number of the numbers in each cell of [-1, 1].
  """
  middle = (np.arange(_CELLS) + 0.5) * (2 / _CELLS) - 1
  share = count / np.maximum(count.sum(-1, keepdims=True), 1)

  def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = (share * x).sum(-1, keepdims=True)
    square = (share * np.square(x - mean)).sum(-1, keepdims=True)
    return mean, np.sqrt(square)

  edges = (levels[..., 1:] + levels[..., :-1]) / 2
  code = (middle[..., None] > edges[..., None, :]).sum(-1)
  mean, deviation = moments(np.broadcast_to(middle, share.shape))
  code_mean, spread = moments(np.take_along_axis(levels, code, -1))
  factor = deviation / np.where(spread > 0, spread, 1)
  factor = np.where(spread > 0, factor, 1)
  return ((levels - code_mean) * factor + mean).astype(np.float32)


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


def _ends(
  model: Transformer,
  tokens: Int[Array, "1 T"],
  text: Index,
  held: dict[str, Any],
  first: int,
) -> dict[str, Any]:
  """Extends the channels' extreme numbers and the sinks by one text."""
  seen = _Recording.create(model, tokens.shape[1])
  _, seen = model(tokens, cache=seen)
  arrays: dict[str, Any] = {}
  for n, (k, _) in enumerate(seen.slots):
    if f"{n}.low" not in held:
      continue
    sinks = held[f"{n}.sinks"]
    arrays[f"{n}.sinks"] = lax.dynamic_update_index_in_dim(
      sinks, k[:, 0, :, 0], text, 0
    )
    k = jnp.swapaxes(k[:, 0, :, first:], -1, -2)
    low, high = held[f"{n}.low"], held[f"{n}.high"]
    size = low.shape[-1]
    merged = lambda far, k=k: jnp.sort(jnp.concatenate([far, k], -1), -1)
    arrays[f"{n}.low"] = merged(low)[..., :size]
    arrays[f"{n}.high"] = merged(high)[..., -size:]
  return arrays


def _counts(
  model: Transformer,
  tokens: Int[Array, "1 T"],
  held: dict[str, Any],
  scales: dict[int, Any],
  first: int,
  outliers: float,
  weights: str,
) -> dict[str, Any]:
  """Extends the cells' weights, sums and counts by one text."""
  empty = _Recording.create(model, tokens.shape[1] - 1)

  def loss(moves: Any) -> tuple[jax.Array, Any]:
    logits, seen = model(
      tokens[:, :-1], cache=dataclasses.replace(empty, moves=moves)
    )
    chance = jax.nn.log_softmax(logits, -1)
    return -jnp.sum(
      jnp.take_along_axis(chance, tokens[:, 1:, None], -1)
    ), seen.slots

  if weights == "fisher":
    gradients, seen = jax.grad(loss, has_aux=True)(empty.slots)
  else:
    _, seen = loss(empty.slots)
    gradients = jax.tree.map(jnp.ones_like, seen)
  arrays = {}
  for n, (k, v) in enumerate(seen):
    if n not in scales:
      continue
    scale, zero = (jnp.asarray(x)[:, :, None] for x in scales[n])
    fisher = [jnp.square(g[:, 0, :, first:]) for g in gradients[n]]
    k = (k[:, 0, :, first:] - zero) / scale
    arrays[f"{n}.keys"] = _cells(
      held[f"{n}.keys"],
      k,
      fisher[0] * jnp.square(scale),
      jnp.abs(k) <= 1,
    )
    if v.shape[-1]:
      v = v[:, 0, :, first:]
      index, token_scale, zero = CodeBook(outliers=outliers).by_token(v)
      token_scale = jnp.maximum(token_scale, jnp.float32(1e-8))
      inside = ~marked(index, v.shape[-1])
      weight = fisher[1] * jnp.square(token_scale)
      # Clipped: a scale that was rounded down leaves numbers just above 1.
      v = jnp.clip((v - zero) / token_scale, -1, 1)
      arrays[f"{n}.values"] = _cells(held[f"{n}.values"], v, weight, inside)
  return arrays


def _cells(
  held: Float[Array, "3 L K cells"],
  x: Float[Array, "L K T D"],
  weight: Float[Array, "L K T D"],
  inside: Bool[Array, "L K T D"],
) -> jax.Array:
  """Adds weights, sums and counts of the scaled numbers that are `inside`."""
  cell = jnp.floor((x + 1) * (_CELLS / 2)).astype(jnp.int32)
  weight = jnp.where(inside, weight, 0)
  cell = jnp.clip(cell, 0, _CELLS - 1)

  def add(
    held: jax.Array,
    cell: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    inside: jax.Array,
  ) -> jax.Array:
    flat = cell.reshape(-1)
    put = lambda y: jnp.zeros(_CELLS, jnp.float32).at[flat].add(y.reshape(-1))
    count = put(inside.astype(jnp.float32))
    return held + jnp.stack([put(weight), put(weight * x), count])

  add_by_head = jax.vmap(jax.vmap(add, (1, 0, 0, 0, 0), 1), (1, 0, 0, 0, 0), 1)
  return add_by_head(held, cell, x, weight, inside)


@dataclasses.dataclass(frozen=True)
class _Recording(NoCache):
  """A cache that records a call's keys, before their rotation, and values.

  Attributes:
    held: Keys [L, 1, K, T, D] and values for each kind of layer.
    moves: Offsets added to them: zeros, for the gradients by each number.
  """

  held: tuple[Any, ...]
  moves: tuple[Any, ...] | None = None

  @classmethod
  def create(cls, model: Transformer, tokens: int) -> _Recording:
    def zeros_of_kind(shape: LayerCacheSpec | StateShape) -> Any:
      if isinstance(shape, StateShape):
        return jnp.zeros(0), jnp.zeros(0)
      lead = (shape.layers, 1, shape.heads, tokens)
      zeros = lambda dim: jnp.zeros((*lead, dim), jnp.float32)
      return zeros(shape.key), zeros(shape.value)

    return cls(tuple(zeros_of_kind(shape) for shape in model.kinds))

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.held

  def layer(self, kind: int, slots: Any, index: Index) -> Any:
    moves = None if self.moves is None else self.moves[kind]

    def change(k: jax.Array, v: jax.Array, rotation: Rotation) -> Any:
      if moves is not None:
        layer_moves = lambda x, like: lax.dynamic_index_in_dim(
          x, index, 0, keepdims=False
        ).astype(like.dtype)
        k, v = k + layer_moves(moves[0], k), v + layer_moves(moves[1], v)
      put = lambda held, x: lax.dynamic_update_index_in_dim(
        held, x.astype(held.dtype), index, 0
      )
      return rotation.own(k), v, tuple(map(put, slots, (k, v)))

    return FreshLayer(slots=slots, change=change)

  def updated(self, slots: tuple[Any, ...]) -> _Recording:
    return dataclasses.replace(self, held=slots)


tree.register(_Recording, ("held", "moves"), ())
