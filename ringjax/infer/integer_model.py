"""Models whose linear maps are products of 8-bit integers.

Guarantees: what such a model makes of a token does not depend on the tokens
beside it, to the bit, as little as that of the model itself.
Cost: one pass over some texts, and rounding every weight once.
Memory: a byte for a weight of a map that is rounded, those of experts too, and
the float weights of channels that are often outliers. Embedding, head, norms,
routers and the map that latent attention absorbs into its queries stay as they
are.
Ref: Xu et al. 2025, llm.npu, arXiv 2407.05858: activations by 8 bits with one
scale for all channels, outliers multiplied beside in floats (shadow), the
layers where they matter least without.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
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
from ringjax.models import calibration as files
from ringjax.models.coded_weights import rounded
from ringjax.models.linear_maps import inner_size, rounded_maps
from ringjax.models.placed_maps import with_maps
from ringjax.models.transformer import Transformer
from ringjax.nn.integer import IntegerLinear, NotedLinear
from ringjax.nn.linear import Linear
from ringjax.ops.integer_product import LARGEST

FILE = "activation_ranges.safetensors"
SCALES = ("channel", "tensor")
_REMEDY = "measure again with rj.infer.activation_ranges(model, tokens)"


@dataclasses.dataclass(frozen=True)
class ActivationRanges:
  """How large the inputs of a model's linear maps are on some texts.

  Attributes:
    model: digest of the model.
    sizes: of each map, by path, float32 [L, I]: the largest absolute value of
      each channel of its input, layer by layer. Experts of a layer have one
      range: one that the texts seldom choose would have none of its own.
  """

  model: str
  sizes: Mapping[str, np.ndarray]

  def save(self, folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes activation_ranges.safetensors into a folder; its path."""
    path = pathlib.Path(folder) / FILE
    files.write_tensors(path, self.sizes, {"model": self.model})
    return path

  @classmethod
  def load(
    cls, folder: str | os.PathLike[str], model: Transformer
  ) -> ActivationRanges:
    """What `save` wrote into a folder, of this model.

    Raises:
      CheckpointFormatError: no such file, or no whole one.
      CheckpointMismatchError: of another model.
    """
    path = pathlib.Path(folder) / FILE
    arrays, said = files.read_tensors(path)
    made = cls(said.get("model", ""), arrays)
    made.check(model, str(path))
    return made

  def check(self, model: Transformer, name: str = "ranges") -> None:
    """Refuses a model of which these are not.

    Raises:
      CheckpointMismatchError: it says what came.
    """
    mine = files.model_digest(model)
    if self.model != mine:
      raise CheckpointMismatchError(
        name,
        f"ranges of the model {self.model or 'without a digest'}",
        f"those of this one, {mine}",
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
    model: the model, on one device or a mesh of this process.
    tokens: int32 [N, T], texts.
    progress: called with the number of texts that were read and that there are.

  Raises:
    ShapeError: tokens of another shape.
    PromptError: ids that the vocabulary does not have.
    ConfigError: a model that spans several processes.
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
  # Each shard tells of its own tokens that experts read.
  lock = threading.Lock()

  def noting(path: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def note(layer: np.ndarray, size: np.ndarray) -> None:
      mine = sizes[path][int(layer)]
      with lock:
        np.maximum(mine, size, out=mine)

    return note

  def noted(path: str) -> Callable[[Linear], NotedLinear]:
    numbers = np.arange(_layers(model, path), dtype=np.int32)
    return lambda linear: NotedLinear(
      linear, _of_experts(linear, numbers), noting(path)
    )

  # One row of logits: who hears them does not matter.
  call = jax.jit(
    lambda model, row: model(row, rows=jnp.zeros((1, 1), jnp.int32))
  )
  watched = with_maps(model, {path: noted(path) for path in maps})
  for n, row in enumerate(ids):
    call(watched, jnp.asarray(row[None], jnp.int32))
    jax.effects_barrier()
    if progress is not None:
      progress(n + 1, len(ids))
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
  """A model whose linear maps multiply 8-bit integers (W8A8).

  With it `generate` reads and answers; `Session.hand_over` lets the model
  itself answer about a prompt that this one read.

  A map's input has one scale. With `shadow` it leaves out the half of `shadow`
  channels that are largest in `ranges`. What leaves 8 bits, in any channel, is
  multiplied beside, in floats. Without, and in the layers that are pruned, the
  largest number of `ranges` is 127, and a larger one is clipped.

  Args:
    model: the model, of floats.
    ranges: of its activations, see `activation_ranges`; or the folder that they
      were saved to.
    shadow: twice the channels of a map that its scale leaves out; 0: none is
      multiplied beside.
    prune: part of the maps, layer by layer, that go without: those whose
      largest number is the smallest multiple of their scale. The paper
      prunes 0.85.
    scales: of weights: "channel", one for each output; "tensor", one for each
      layer, as the paper has it, or each of its experts.
    hot: largest part of a map's channels of which float weights are kept, from
      0 to 1. Those that leave 8 bits in `ranges`, in any layer, have them; what
      others have beyond 8 bits is multiplied by the weights' codes. The paper
      keeps 0.03, and reads those of others from disk.

  Raises:
    CheckpointMismatchError: ranges of another model.
    OptionError: an argument out of range.
    CheckpointFormatError: a folder without them.
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
  largest = {path: ranges.sizes[path].max(1) for path in maps}
  tight = {}
  for path in maps:
    sizes = np.sort(ranges.sizes[path], axis=1)
    out = min(-(-shadow // 2), sizes.shape[1] - 1)
    rest = sizes[:, sizes.shape[1] - 1 - out]
    # Where only those have numbers, the scale is theirs.
    tight[path] = np.where(rest > 0, rest, largest[path]) / LARGEST
  # A map that nothing went into keeps a scale of one.
  unit = lambda scale: np.where(scale > 0, scale, 1).astype(np.float32)
  importance = {
    path: largest[path] / (LARGEST * unit(tight[path])) for path in maps
  }
  ordered = sorted(
    (float(x), path, layer)
    for path, row in importance.items()
    for layer, x in enumerate(row)
  )
  pruned = {
    (path, layer) for _, path, layer in ordered[: int(prune * len(ordered))]
  }
  changed = {}
  for path in maps:
    layers = range(_layers(model, path))
    active = np.array([shadow > 0 and (path, n) not in pruned for n in layers])
    scale = unit(np.where(active, tight[path], largest[path] / LARGEST))
    changed[path] = functools.partial(
      _integers,
      scale=scale,
      active=active.astype(np.int32),
      hot=_hot(ranges.sizes[path][active], scale[active], hot),
      channels=scales == "channel",
    )
  return with_maps(model, changed)


def _hot(
  sizes: Float[np.ndarray, "L I"],
  scale: Float[np.ndarray, " L"],
  part: int | float,
) -> Int[np.ndarray, " H"] | None:
  """Channels that leave 8 bits most, in any layer; None without layers.

  Args:
    sizes: of the layers that multiply outliers beside, by channel.
    scale: of the same layers.
    part: of the channels, that may be chosen.
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
  """A map of integers, with the scales of all layers."""
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
  """Layers of the kind of a map, wherever they are."""
  run = path.removeprefix("stack.blocks.").split(".")[0]
  return model.stack.runs[int(run)].repeats


def _of_experts(linear: Linear, x: np.ndarray) -> jax.Array:
  """[L, ...], of a map of experts [L, E, ...]: the same for all of a layer."""
  experts = linear.weight.get_value().shape[1 : 1 + linear.lead]
  wide = x.reshape(x.shape[0], *(1 for _ in experts), *x.shape[1:])
  shape = (x.shape[0], *experts, *x.shape[1:])
  return jnp.asarray(np.broadcast_to(wide, shape))
