"""Calibration of code books on texts: scales of channels, levels of codes.

Guarantees: the same texts give the same calibration, in one run or in several
that follow one another.
Cost: two passes over the texts, the second with gradients of the loss.
Memory: the keys and values of one text and the gradients by them, the inputs of
its layers, one layer's activations and the logits of a block of tokens; of each
channel the numbers that are farthest out.
The keys of the texts' first tokens, attention sinks, are far from all others
and alike: their mean is the sink, from which such keys are coded.
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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax import tree
from ringjax.checks import boolean, integer, one_of
from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
)
from ringjax.infer import inputs
from ringjax.infer.session import place_of
from ringjax.kv.base import FreshLayer, NoCache
from ringjax.kv.codecs import page_outliers
from ringjax.kv.codecs.calibration import KEYS, WEIGHTS, Calibration
from ringjax.kv.codecs.code_book import CodeBook
from ringjax.kv.codecs.code_bytes import LEVEL_BITS
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.state import StateShape
from ringjax.kv.summaries.summary_spec import SummarySpec
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.models.weights import calibration as files
from ringjax.nn.attention_layers.choosing.choosing_attention import (
  refuse_sparse,
)
from ringjax.nn.sharding_context import ContextParallel, ShardingContext
from ringjax.ops.attention.blockwise import pad_axis
from ringjax.ops.rope import Rotation
from ringjax.paths import as_path
from ringjax.typing import Index

# Cells of [-1, 1] into which scaled numbers are counted.
_CELLS = 1024
# Tokens whose logits are there at a time.
_BLOCK = 128
_ROUNDS = 100
# Codes are that much finer at the sink at most.
_LEAST_FACTOR = 1 / 64
PARTIAL = ".kv_calibration.partial.safetensors"


def calibrate(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  *,
  outliers: int | float | str = 0.01,
  first: int = 1,
  weights: str = "fisher",
  normalized: Sequence[int] = (2,),
  keys: str = "channel",
  rotated: bool = False,
  folder: str | os.PathLike[str] | None = None,
  progress: Callable[[int, int], Any] | None = None,
) -> Calibration:
  """Measures a model's keys and values on texts.

  Args:
    model: Model, on one device or a mesh.
    tokens: Token ids of texts, int32 [N, T]; KVQuant takes 16 of 2,048 tokens.
    outliers: Part of a channel's numbers that its scale leaves out; "1%" for
      kinds with outliers=1%, whose values keep a page's farthest numbers.
    first: Number of tokens at the beginning of each text that are left out;
      with 1 or more the key of the first one is the sink, see
      `rj.kv.CodeBook`.
    weights: Weight of a number's error: "fisher", the squared gradient of the
      loss by it; "none", the same for all, which needs no gradients.
    normalized: Bits of the codes whose levels have the mean and the deviation
      of the numbers (Q-Norm), some of 2, 3 and 4.
    keys: Vectors that share a scale of keys: "channel", as in the paper, or
      "token", for kinds with keys.by=token, to compare with.
    rotated: Whether keys are measured after their rotation, for kinds with
      unrotated=False; the paper's are measured before it.
    folder: Folder for the state after each text, from which a run that was
      killed resumes, and for the calibration at the end, or its address; it is
      created if it does not exist. Only the first process reads and writes it.
    progress: Function that is called with the number of passes over a text
      that are done, and their total.

  Raises:
    ShapeError: If `tokens` has another shape.
    PromptError: If an id is not in the vocabulary.
    ConfigError: If the model has no keys and values.
    OptionError: If an argument is out of range, or the model was made sparse:
      its caches have no calibrated codec.
  """
  refuse_sparse(
    model.config.layers,
    "model",
    "a calibration",
    "leave it out: such a model's caches are dense, bfloat16, int8 or int4",
  )
  ids = inputs.texts(tokens, model.config.vocab)
  outliers = page_outliers.checked(outliers)
  integer("first", first, least=0, most=ids.shape[1] - 2)
  one_of("weights", weights, WEIGHTS)
  one_of("keys", keys, KEYS)
  boolean("rotated", rotated)
  for bits in normalized:
    one_of("normalized", bits, LEVEL_BITS)
  kinds = [
    n for n, x in enumerate(model.kinds) if isinstance(x, LayerCacheSpec)
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
  settings = f"{outliers} {first} {weights} {keys} {rotated}"
  digest.update(f"{model_digest} {ids.shape} {settings}".encode())
  work = _Work(
    model,
    ids,
    kinds,
    outliers,
    first,
    weights,
    digest.hexdigest()[:16],
    keys,
    rotated,
  )
  # Of several processes all measure the same.
  out = None if folder is None or jax.process_index() else as_path(folder)
  partial = None if out is None else out / PARTIAL
  if partial is not None and partial.exists():
    # A damaged file is ignored: the texts are read again.
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
  arrays = files.in_file_order(work.finish(normalized), model)
  calibration = files.make(
    model_digest, arrays, weights, outliers, first, keys, rotated
  )
  if out is not None and partial is not None:
    files.save_calibration(calibration, out)
    partial.unlink()
  return files.for_kinds(calibration, model)


class _Work:
  """Statistics of the texts measured so far.

  Attributes:
    done: Number of passes over a text that are done, of two for each.
    arrays: Statistics by name, for each kind of layer: "low" and "high"
      [L, K, D, m], the channels' farthest numbers; "sinks" [N, L, K, D], the
      keys of the texts' first tokens; "keys" and "values" [3, L, K, cells],
      weights, weighted sums and counts of scaled numbers in each cell.
  """

  def __init__(
    self,
    model: Transformer,
    ids: np.ndarray,
    kinds: list[int],
    outliers: int | float | str,
    first: int,
    weights: str,
    inputs: str,
    keys: str,
    rotated: bool,
  ):
    self.model, self.ids, self.kinds = model, ids, kinds
    self.outliers, self.first, self.inputs = outliers, first, inputs
    self.weights = weights
    self.keys, self.rotated = keys, rotated
    self.done = 0
    count = ids.shape[0] * (ids.shape[1] - first)
    # The quantile is that many numbers from either end.
    share = page_outliers.share_of(outliers)
    self.far = max(1, round(share / 2 * count) + 1)
    self.arrays: dict[str, np.ndarray] = {}
    for n in kinds:
      shape = model.kinds[n]
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
    self._ends = jax.jit(replicated(_ends), static_argnums=(4, 5))
    self._counts = jax.jit(replicated(_counts), static_argnums=(1, 5, 6, 7, 8))
    mesh, axis = place_of(None, None, model)
    self.attend = ContextParallel(
      mesh=mesh, axis=axis, remat=jax.checkpoint_policies.nothing_saveable
    )

  def metadata(self) -> dict[str, str]:
    return {"inputs": self.inputs, "done": f"{self.done}"}

  def resume(
    self, arrays: dict[str, np.ndarray], metadata: dict[str, str]
  ) -> None:
    """Continues from saved statistics, if their inputs are the same."""
    shapes = lambda arrays: {name: x.shape for name, x in arrays.items()}
    if (
      metadata.get("inputs") == self.inputs
      and metadata.get("done", "").isdecimal()
      and shapes(arrays) == shapes(self.arrays)
    ):
      self.arrays, self.done = arrays, int(metadata["done"])

  def as_first(self) -> None:
    """Continues from the statistics of the first process."""
    local_state = self.arrays, np.int32(self.done)
    arrays, passes_done = multihost_utils.broadcast_one_to_all(local_state)
    self.arrays = {name: np.asarray(x) for name, x in arrays.items()}
    self.done = int(passes_done)

  def step(self) -> None:
    """One pass over one text."""
    texts = len(self.ids)
    # Arrays of the host are the same on all processes' devices.
    row = np.asarray(self.ids[[self.done % texts]], np.int32)
    arrays = dict(self.arrays)
    if self.done < texts:
      text = np.int32(self.done)
      new = self._ends(self.model, row, text, arrays, self.first, self.rotated)
    else:
      scales: dict[int, Any] = dict.fromkeys(self.kinds)
      if self.keys == "channel":
        scales = {n: self.scales(n) for n in self.kinds}
      new = self._counts(
        self.model,
        self.attend,
        row,
        arrays,
        scales,
        self.first,
        self.outliers,
        self.weights,
        self.rotated,
      )
    self.arrays |= {name: np.asarray(x) for name, x in new.items()}
    self.done += 1

  def scales(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero of each channel of a kind of layer, [L, K, D]."""
    low = self.arrays[f"{n}.low"].max(-1)
    high = self.arrays[f"{n}.high"].min(-1)
    scale = np.maximum((high - low) / 2, np.float32(1e-8))
    return scale.astype(np.float32), ((high + low) / 2).astype(np.float32)

  def sink(self, n: int) -> dict[str, np.ndarray]:
    """The mean key of first tokens, and how far they are from it in scales."""
    if not self.first:
      return {}
    keys, (scale, _) = self.arrays[f"{n}.sinks"], self.scales(n)
    mean = keys.mean(0)
    distance = (np.abs(keys - mean) / scale).max((0, -1))[..., None]
    factor = np.clip(distance, _LEAST_FACTOR, 1).astype(np.float32)
    return {f"{n}.keys.sink": mean, f"{n}.keys.factor": factor}

  def finish(self, normalized: Sequence[int]) -> dict[str, np.ndarray]:
    """The arrays of the calibration."""
    arrays: dict[str, np.ndarray] = {}
    for n in self.kinds:
      if self.keys == "channel":
        scale, zero = self.scales(n)
        arrays |= {f"{n}.keys.scale": scale, f"{n}.keys.zero": zero}
        arrays |= self.sink(n)
      shape = self.model.kinds[n]
      for part in ("keys", "values") if shape.value else ("keys",):
        weight, total, count = self.arrays[f"{n}.{part}"]
        for bits in LEVEL_BITS:
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
  """Levels of least weighted squared error, by Lloyd's iterations.

  Args:
    weight: Weight of the numbers in each cell of [-1, 1].
    total: Weighted sum of these numbers.
    count: Number of levels, n.
  """
  middle = (np.arange(_CELLS) + 0.5) * (2 / _CELLS) - 1
  x = np.where(weight > 0, total / np.where(weight > 0, weight, 1), middle)
  weight = weight.astype(np.float64) + 1e-12 * weight.max(-1, keepdims=True)
  weight = weight + 1e-30
  sums = weight * x
  # Cells of equal weight to begin with.
  part = np.cumsum(weight, -1) / weight.sum(-1, keepdims=True)
  code = np.minimum((part * count).astype(np.int64), count - 1)
  level_table = np.zeros((*weight.shape[:-1], count))
  ordinal = np.arange(count)
  for _ in range(_ROUNDS):
    chosen = code[..., None] == ordinal
    mass = np.einsum("lkc,lkcn->lkn", weight, chosen)
    mean = np.einsum("lkc,lkcn->lkn", sums, chosen) / np.maximum(mass, 1e-300)
    # A level that no cell chose stays where it was.
    level_table = np.sort(np.where(mass > 0, mean, level_table), -1)
    edges = (level_table[..., 1:] + level_table[..., :-1]) / 2
    new = (x[..., None] > edges[..., None, :]).sum(-1)
    if (new == code).all():
      break
    code = new
  return level_table.astype(np.float32)


def normalize(
  levels: Float[np.ndarray, "L K n"], count: Float[np.ndarray, "L K cells"]
) -> Float[np.ndarray, "L K n"]:
  """Levels that give codes the mean and the deviation of the numbers (Q-Norm).

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
  code_mean, code_deviation = moments(np.take_along_axis(levels, code, -1))
  ratio = deviation / np.where(code_deviation > 0, code_deviation, 1)
  ratio = np.where(code_deviation > 0, ratio, 1)
  return ((levels - code_mean) * ratio + mean).astype(np.float32)


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


def _ends(
  model: Transformer,
  tokens: Int[Array, "1 T"],
  text: Index,
  arrays: dict[str, Any],
  first: int,
  rotated: bool,
) -> dict[str, Any]:
  """Updates the channels' farthest numbers by one more text."""
  seen = _Recording.create(model, tokens.shape[1], rotated)
  _, seen = model(tokens, cache=seen)
  updates: dict[str, Any] = {}
  for n, (k, _) in enumerate(seen.slots):
    if f"{n}.low" not in arrays:
      continue
    sinks = arrays[f"{n}.sinks"]
    updates[f"{n}.sinks"] = lax.dynamic_update_index_in_dim(
      sinks, k[:, 0, :, 0], text, 0
    )
    k = jnp.swapaxes(k[:, 0, :, first:], -1, -2)
    low, high = arrays[f"{n}.low"], arrays[f"{n}.high"]
    size = low.shape[-1]
    merged = lambda far, k=k: jnp.sort(jnp.concatenate([far, k], -1), -1)
    updates[f"{n}.low"] = merged(low)[..., :size]
    updates[f"{n}.high"] = merged(high)[..., -size:]
  return updates


def _counts(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "1 T"],
  arrays: dict[str, Any],
  scales: dict[int, Any],
  first: int,
  outliers: int | float | str,
  weights: str,
  rotated: bool,
) -> dict[str, Any]:
  """Updates the cells' weights and sums by one more text.

  `scales`: Scales of the channels of keys by kind of layer, or None where each
  key has its scale.
  """
  empty = _Recording.create(model, tokens.shape[1] - 1, rotated)

  def loss(moves: Any) -> tuple[jax.Array, Any]:
    cache = dataclasses.replace(empty, moves=moves)
    ids = tokens[:, :-1]
    places = tokens_of(model, attend, ids.shape, None, None, None)
    h, seen = model.hidden(ids, places, cache, attend)
    return nll(model, h[0], tokens[0, 1:]), seen.slots

  if weights == "fisher":
    gradients, seen = jax.grad(loss, has_aux=True)(empty.slots)
  else:
    _, seen = loss(empty.slots)
    gradients = jax.tree.map(jnp.ones_like, seen)
  updates = {}
  for n, parts in enumerate(seen):
    if n not in scales:
      continue
    fisher = [jnp.square(g[:, 0, :, first:]) for g in gradients[n]]
    k, v = (x[:, 0, :, first:] for x in parts)
    of_keys, of_values = f"{n}.keys", f"{n}.values"
    if scales[n] is None:
      updates[of_keys] = _by_token(arrays[of_keys], k, fisher[0], outliers)
    else:
      scale, zero = (jnp.asarray(x)[:, :, None] for x in scales[n])
      k = (k - zero) / scale
      weight = fisher[0] * jnp.square(scale)
      updates[of_keys] = _cells(arrays[of_keys], k, weight, jnp.abs(k) <= 1)
    if v.shape[-1]:
      updates[of_values] = _by_token(arrays[of_values], v, fisher[1], outliers)
  return updates


def nll(
  model: Transformer,
  h: Float[Array, "T D"],
  labels: Int[Array, " T"],
  block: int = _BLOCK,
) -> Float[Array, ""]:
  """Sum of the labels' losses, with the logits of a block of tokens at a time.

  Args:
    model: Model with the head.
    h: Inputs of the head.
    labels: Token that follows each.
    block: Tokens of a block.
  """
  size = min(block, labels.size)
  filled = -(-labels.size // size) * size
  blocks = lambda x: pad_axis(x, 0, filled).reshape(-1, size, *x.shape[1:])
  is_token = jnp.ones(labels.shape, jnp.bool_)

  def add(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
    h, labels, is_token = block
    chance = jax.nn.log_softmax(model.logits(h), -1)
    chance = jnp.take_along_axis(chance, labels[:, None], -1)[:, 0]
    return total - jnp.sum(jnp.where(is_token, chance, 0)), None

  step = jax.checkpoint(add, prevent_cse=False)
  parts = tuple(map(blocks, (h, labels, is_token)))
  return lax.scan(step, jnp.float32(0), parts)[0]


def _by_token(
  cells: Float[Array, "3 L K cells"],
  x: Float[Array, "L K T D"],
  fisher: Float[Array, "L K T D"],
  outliers: int | float | str,
) -> jax.Array:
  """Adds numbers whose vectors have a scale each to the cells."""
  book, count = CodeBook(outliers=outliers), x.shape[2]
  # Pages are whole.
  pad = [(0, 0), (0, 0), (0, -count % (book.page or 1)), (0, 0)]
  _, *scaled = book.by_token(jnp.pad(x, pad, mode="edge"))
  is_outlier, scale, zero = (y[:, :, :count] for y in scaled)
  scale = jnp.maximum(scale, jnp.float32(1e-8))
  inside = ~is_outlier
  weight = fisher * jnp.square(scale)
  # The largest is a little beyond 1 where its scale was rounded down.
  x = jnp.clip((x - zero) / scale, -1, 1)
  return _cells(cells, x, weight, inside)


def _cells(
  cells: Float[Array, "3 L K cells"],
  x: Float[Array, "L K T D"],
  weight: Float[Array, "L K T D"],
  inside: Bool[Array, "L K T D"],
) -> jax.Array:
  """Weights, sums and count of the scaled numbers that are `inside`."""
  cell = jnp.floor((x + 1) * (_CELLS / 2)).astype(jnp.int32)
  weight = jnp.where(inside, weight, 0)
  cell = jnp.clip(cell, 0, _CELLS - 1)

  def add(
    cells: jax.Array,
    cell: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    inside: jax.Array,
  ) -> jax.Array:
    flat = cell.reshape(-1)
    put = lambda y: jnp.zeros(_CELLS, jnp.float32).at[flat].add(y.reshape(-1))
    count = put(inside.astype(jnp.float32))
    return cells + jnp.stack([put(weight), put(weight * x), count])

  add_by_head = jax.vmap(jax.vmap(add, (1, 0, 0, 0, 0), 1), (1, 0, 0, 0, 0), 1)
  return add_by_head(cells, cell, x, weight, inside)


@dataclasses.dataclass(frozen=True)
class _Recording(NoCache):
  """A cache that records a call's keys and values.

  Attributes:
    recorded: Keys [L, 1, K, T, D] and values of each kind of layer.
    rotated: Whether keys are recorded after their rotation.
    moves: Numbers that are added to them, by which gradients are taken.
  """

  recorded: tuple[Any, ...]
  rotated: bool
  moves: tuple[Any, ...] | None = None

  @classmethod
  def create(cls, model: Transformer, tokens: int, rotated: bool) -> _Recording:
    def zeros_of(
      shape: LayerCacheSpec | StateShape | SummarySpec,
    ) -> tuple[jax.Array, jax.Array]:
      if not isinstance(shape, LayerCacheSpec):
        return jnp.zeros(0), jnp.zeros(0)
      lead = (shape.layers, 1, shape.heads, tokens)
      zeros = lambda dim: jnp.zeros((*lead, dim), jnp.float32)
      return zeros(shape.key), zeros(shape.value)

    return cls(tuple(zeros_of(shape) for shape in model.kinds), rotated)

  @property
  def slots(self) -> tuple[Any, ...]:
    return self.recorded

  def layer(self, kind: int, slots: Any, index: Index) -> FreshLayer:
    moves = None if self.moves is None else self.moves[kind]

    def change(
      k: jax.Array, v: jax.Array, rotation: Rotation
    ) -> tuple[jax.Array, jax.Array, PyTree]:
      if self.rotated:
        k = rotation.own(k)
      if moves is not None:
        layer_of = lambda x, like: lax.dynamic_index_in_dim(
          x, index, 0, keepdims=False
        ).astype(like.dtype)
        k, v = k + layer_of(moves[0], k), v + layer_of(moves[1], v)
      write = lambda array, x: lax.dynamic_update_index_in_dim(
        array, x.astype(array.dtype), index, 0
      )
      noted = tuple(map(write, slots, (k, v)))
      return k if self.rotated else rotation.own(k), v, noted

    return FreshLayer(slots=slots, change=change)

  def updated(self, slots: tuple[Any, ...]) -> _Recording:
    return dataclasses.replace(self, recorded=slots)


tree.register(_Recording, ("recorded", "moves"), ("rotated",))
