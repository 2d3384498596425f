"""Models whose linear maps are products of 8-bit integers.

Guarantees: a token's results do not depend on the other tokens of its call, to
the bit, as in the model of floats.
Cost: one pass over some texts, and rounding every weight once.
Memory: a byte per weight of a rounded map, those of experts too, and the float
weights of channels that are often outliers. Embedding, head, norms, routers and
the map that latent attention absorbs into its queries stay unrounded.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858: activations in 8 bits with one
scale for all channels; outliers are multiplied separately in floats (shadow),
but not in the layers where they matter least.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, number, one_of
from ringjax.errors import (
  CheckpointMismatchError,
  ConfigError,
)
from ringjax.infer import inputs
from ringjax.models.grouping import looped, regrouped
from ringjax.models.transformer import Transformer
from ringjax.models.weights import calibration as files
from ringjax.models.weights.coded_weights import rounded
from ringjax.models.weights.linear_maps import inner_size, rounded_maps
from ringjax.models.weights.placed_maps import with_maps
from ringjax.nn.linear import Linear
from ringjax.nn.weights.integer import IntegerLinear, NotedLinear
from ringjax.ops.integer_product import LARGEST
from ringjax.paths import AnyPath, as_path

FILE = "activation_ranges.safetensors"
SCALES = ("channel", "tensor")
_REMEDY = "measure again with rj.infer.activation_ranges(model, tokens)"


@dataclasses.dataclass(frozen=True)
class ActivationRanges:
  """Largest inputs of a model's linear maps on some texts.

  Attributes:
    model: Digest of the model.
    sizes: Largest absolute value of each channel of a map's input, by the map's
      path in a model whose equal layers are a loop, float32 [L, I]. Experts of
      a layer share one range, as the texts may not choose all of them.
  """

  model: str
  sizes: Mapping[str, np.ndarray]

  def save(self, folder: str | os.PathLike[str]) -> AnyPath:
    """Writes activation_ranges.safetensors into a folder: returns its path.

    The folder may be an address.
    """
    path = as_path(folder, "folder") / FILE
    files.write_tensors(path, self.sizes, {"model": self.model})
    return path

  @classmethod
  def load(
    cls, folder: str | os.PathLike[str], model: Transformer
  ) -> ActivationRanges:
    """Loads the ranges of this model that `save` wrote into a folder.

    Raises:
      CheckpointFormatError: If the file is missing or incomplete.
      CheckpointMismatchError: If the ranges are of another model.
    """
    path = as_path(folder, "folder") / FILE
    arrays, metadata = files.read_tensors(path)
    ranges = cls(metadata.get("model", ""), arrays)
    ranges.check(model, str(path))
    return ranges

  def check(self, model: Transformer, name: str = "ranges") -> None:
    """Refuses another model than the one that was measured.

    Raises:
      CheckpointMismatchError: If the model's digest is another.
    """
    digest = files.model_digest(model)
    if self.model != digest:
      raise CheckpointMismatchError(
        name,
        f"ranges of the model {self.model or 'without a digest'}",
        f"those of this one, {digest}",
        _REMEDY,
      )


def activation_ranges(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  *,
  progress: Callable[[int, int], Any] | None = None,
) -> ActivationRanges:
  """Measures the inputs of a model's linear maps on texts.

  Args:
    model: Model to measure, on one device or a mesh of this process.
    tokens: Token ids of texts, int32 [N, T].
    progress: Called with the number of texts read and the number of texts.

  Raises:
    ShapeError: If `tokens` has another shape.
    PromptError: If an id is not in the vocabulary.
    ConfigError: If the model spans several processes.
  """
  ids = inputs.texts(tokens, model.config.vocab)
  if jax.process_count() > 1:
    raise ConfigError(
      "model",
      f"{jax.process_count()} processes",
      "one, which sees all activations",
      "measure in one process, and load what it saved in all",
    )
  maps = rounded_maps(model, "products of integers")
  sizes = {
    path: np.zeros((_layers(model, path), inner_size(linear)), np.float32)
    for path, linear in maps.items()
  }
  # Each shard reports the inputs that its experts read, in its own thread.
  lock = threading.Lock()

  def note_for(path: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def note(layer: np.ndarray, size: np.ndarray) -> None:
      layer_sizes = sizes[path][int(layer)]
      with lock:
        np.maximum(layer_sizes, size, out=layer_sizes)

    return note

  def noting_map(path: str) -> Callable[[Linear], NotedLinear]:
    numbers = np.arange(_layers(model, path), dtype=np.int32)
    return lambda linear: NotedLinear(
      linear, _of_experts(linear, numbers), note_for(path)
    )

  # One row of logits, as the head's output is not used.
  call = jax.jit(
    lambda model, row: model(row, rows=jnp.zeros((1, 1), jnp.int32))
  )
  watched = with_maps(model, {path: noting_map(path) for path in maps})
  for n, row in enumerate(ids):
    call(watched, jnp.asarray(row[None], jnp.int32))
    jax.effects_barrier()
    if progress is not None:
      progress(n + 1, len(ids))
  groups = model.stack.runs
  sizes = regrouped(sizes, groups, looped(groups))
  return ActivationRanges(files.model_digest(model), sizes)


def integer_model(
  model: Transformer,
  ranges: ActivationRanges | str | os.PathLike[str],
  *,
  shadow: int = 16,
  prune: int | float = 0.0,
  scales: str = "channel",
  hot: int | float = 1.0,
) -> Transformer:
  """Round a model to one whose linear maps multiply 8-bit integers (W8A8).

  `generate` reads and answers with it; `Session.hand_over` lets the model of
  floats answer about a prompt that this one read.

  A map's input has one scale. With `shadow` the scale ignores the
  ceil(shadow / 2) channels that are largest in `ranges`, and the excess over
  8 bits, in any channel, is multiplied separately, in floats. Without, and in
  pruned layers, the largest number of `ranges` is 127, and larger numbers are
  clipped.

  Args:
    model: Model of floats.
    ranges: Ranges of its activations, see `activation_ranges`; or the folder
      that they were saved to.
    shadow: Twice the number of a map's channels that its scale ignores; 0: no
      outlier is multiplied separately.
    prune: Fraction of the maps, counted per layer, that do without `shadow`:
      those whose largest number is the smallest multiple of their scale. The
      paper prunes 0.85.
    scales: Scales of weights: "channel", one for each output; "tensor", one for
      each layer, as in the paper, or for each of its experts.
    hot: Largest fraction of a map's channels whose float weights are kept, from
      0 to 1. They are channels that exceed 8 bits in `ranges`, in any layer;
      the excess of others is multiplied by the weights' codes. The paper keeps
      0.03, and reads the others' weights from disk.

  Raises:
    CheckpointMismatchError: If the ranges are of another model.
    OptionError: If an argument is out of range.
    CheckpointFormatError: If the folder has no ranges.
  """
  integer("shadow", shadow, least=0)
  number("prune", prune, least=0, most=1)
  one_of("scales", scales, SCALES)
  number("hot", hot, least=0, most=1)
  if isinstance(ranges, ActivationRanges):
    ranges.check(model)
  else:
    ranges = ActivationRanges.load(ranges, model)
  maps = rounded_maps(model, "products of integers")
  groups = model.stack.runs
  sizes_by_path = regrouped(ranges.sizes, looped(groups), groups)
  largest = {path: sizes_by_path[path].max(1) for path in maps}
  tight_scales = {}
  for path in maps:
    sizes = np.sort(sizes_by_path[path], axis=1)
    num_outliers = min(-(-shadow // 2), sizes.shape[1] - 1)
    kept_largest = sizes[:, sizes.shape[1] - 1 - num_outliers]
    # If all other channels are zero, the scale is that of the ignored ones.
    tight_scales[path] = (
      np.where(kept_largest > 0, kept_largest, largest[path]) / LARGEST
    )
  # A map whose inputs were all zero keeps a scale of one.
  unit = lambda scale: np.where(scale > 0, scale, 1).astype(np.float32)
  importance = {
    path: largest[path] / (LARGEST * unit(tight_scales[path])) for path in maps
  }
  ordered = sorted(
    (float(x), path, layer)
    for path, row in importance.items()
    for layer, x in enumerate(row)
  )
  pruned = {
    (path, layer) for _, path, layer in ordered[: int(prune * len(ordered))]
  }
  replacements = {}
  for path in maps:
    layers = range(_layers(model, path))
    active = np.array([shadow > 0 and (path, n) not in pruned for n in layers])
    scale = unit(np.where(active, tight_scales[path], largest[path] / LARGEST))
    replacements[path] = functools.partial(
      _integers,
      scale=scale,
      active=active.astype(np.int32),
      hot=_hot(sizes_by_path[path][active], scale[active], hot),
      channels=scales == "channel",
    )
  return with_maps(model, replacements)


def _hot(
  sizes: Float[np.ndarray, "L I"],
  scale: Float[np.ndarray, " L"],
  part: int | float,
) -> Int[np.ndarray, " H"] | None:
  """Choose the channels that exceed 8 bits most, in any layer.

  Args:
    sizes: Largest input of each channel, of the layers with a shadow, [L, I].
    scale: Scale of each of these layers, [L].
    part: Largest fraction of the channels to choose.

  Returns:
    Channels in increasing order, [H]; None if no layer has a shadow.
  """
  if not len(sizes):
    return None
  beyond = (sizes / (LARGEST * scale[:, None])).max(0)
  count = min(int((beyond > 1).sum()), math.ceil(part * sizes.shape[1]))
  return np.sort(np.argsort(-beyond, kind="stable")[:count])


def _integers(
  linear: Linear,
  *,
  scale: Float[np.ndarray, " L"],
  active: Int[np.ndarray, " L"],
  hot: Int[np.ndarray, " H"] | None,
  channels: bool,
) -> IntegerLinear:
  """Round a map to integers, with the scales of all layers."""
  codes, scales = rounded(linear, channels=channels)
  shadow = {}
  if hot is not None:
    first, inner = 1 + linear.lead, inner_size(linear)
    weight = linear.weight.get_value()
    out = weight.shape[first + linear.contracted :]
    flat = weight.reshape(*weight.shape[:first], inner, *out)
    slots = np.full((len(scale), inner), len(hot), np.int32)
    slots[:, hot] = np.arange(len(hot))
    shadow = {
      "rows": jnp.take(flat, jnp.asarray(hot), axis=first),
      "slots": _of_experts(linear, slots),
    }
  return IntegerLinear(
    linear,
    codes,
    scales,
    _of_experts(linear, scale),
    _of_experts(linear, active),
    **shadow,
  )


def _layers(model: Transformer, path: str) -> int:
  """Number of layers of a map's kind."""
  run = path.removeprefix("stack.blocks.").split(".")[0]
  return model.stack.runs[int(run)].repeats


def _of_experts(linear: Linear, x: np.ndarray) -> jax.Array:
  """Broadcast [L, ...] to [L, E, ...] over a layer's experts, if any."""
  experts = linear.weight.get_value().shape[1 : 1 + linear.lead]
  reshaped = x.reshape(x.shape[0], *(1 for _ in experts), *x.shape[1:])
  shape = (x.shape[0], *experts, *x.shape[1:])
  return jnp.asarray(np.broadcast_to(reshaped, shape))
