"""Forms in which a checkpoint's tensors store parameters, and their names.

Guarantees: `split` of a form gives the parameters that a tensor of a checkpoint
holds, and `join` gives the tensor again, to the bit. `cuts` says which mesh
axis cuts each axis of the tensor, by those that cut its parameters' axes.

A checkpoint has a linear map as [out, in]; here it is [in, out] with its axes
split, so that heads have an axis. Some families keep several maps in one
tensor, whose rows are grouped by head or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True)
class Reshape:
  """Form of a parameter that is stored with another shape."""

  shape: tuple[int, ...]
  stored: tuple[int, ...]

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    return (x.reshape(self.shape),)

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    return parts[0].reshape(self.stored)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return axes if self.shape == self.stored else (None,) * len(self.stored)


@dataclasses.dataclass(frozen=True)
class Transpose:
  """Form of a linear map [out, in], here with the axes [*inputs, *outputs]."""

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]

  @property
  def stored(self) -> tuple[int, ...]:
    return (math.prod(self.outputs), math.prod(self.inputs))

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    return (x.T.reshape(self.inputs + self.outputs),)

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    return parts[0].reshape(self.stored[::-1]).T

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return axes[len(self.inputs)], axes[0]


@dataclasses.dataclass(frozen=True)
class FusedRows:
  """Several parameters in the rows of one tensor.

  Attributes:
    groups: Number of equal groups of the rows.
    parts: Forms of the parameters; a group has some rows of each, in this
      order.
  """

  groups: int
  parts: tuple[Any, ...]

  @property
  def stored(self) -> tuple[int, ...]:
    rows = sum(p.stored[0] for p in self.parts)
    return (rows, *self.parts[0].stored[1:])

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    row_shape = self.stored[1:]
    x = x.reshape(self.groups, -1, *row_shape)
    params, at = [], 0
    for part in self.parts:
      rows = part.stored[0] // self.groups
      piece = x[:, at : at + rows].reshape(part.stored)
      params.extend(part.split(piece))
      at += rows
    return tuple(params)

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    pieces = [
      form.join((p,)).reshape(self.groups, -1, *self.stored[1:])
      for form, p in zip(self.parts, parts, strict=True)
    ]
    return _concatenate(pieces, 1).reshape(self.stored)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return (None,) * len(self.stored)


@dataclasses.dataclass(frozen=True)
class FusedColumns:
  """Two parameters [..., F] in the columns of one tensor [..., 2 F].

  Attributes:
    shape: Shape of each parameter.
    interleaved: Whether their columns alternate; otherwise they are two halves.
  """

  shape: tuple[int, ...]
  interleaved: bool

  @property
  def stored(self) -> tuple[int, ...]:
    return (*self.shape[:-1], 2 * self.shape[-1])

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    if self.interleaved:
      return x[..., 0::2], x[..., 1::2]
    f = self.shape[-1]
    return x[..., :f], x[..., f:]

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    if not self.interleaved:
      return _concatenate(list(parts), -1)
    pair = _concatenate([p[..., None] for p in parts], -1)
    return pair.reshape(self.stored)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*axes[:-1], None)


@dataclasses.dataclass(frozen=True)
class SwappedAxes:
  """A form whose tensor has its last two axes swapped."""

  form: Reshape | Transpose | FusedRows | FusedColumns

  @property
  def stored(self) -> tuple[int, ...]:
    *leading, a, b = self.form.stored
    return (*leading, b, a)

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    return self.form.split(x.swapaxes(-1, -2))

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    return self.form.join(parts).swapaxes(-1, -2)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    *leading, a, b = self.form.cuts(axes)
    return (*leading, b, a)


@dataclasses.dataclass(frozen=True)
class FirstRows:
  """A form whose tensor has `extra_rows` more at its end: zeros when joined."""

  form: Reshape
  extra_rows: int

  @property
  def stored(self) -> tuple[int, ...]:
    rows, *row_shape = self.form.stored
    return (rows + self.extra_rows, *row_shape)

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    return self.form.split(x[: self.form.stored[0]])

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    x = self.form.join(parts)
    xp = np if isinstance(x, np.ndarray) else jnp
    padding = xp.zeros((self.extra_rows, *self.form.stored[1:]), x.dtype)
    return _concatenate([x, padding], 0)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return (None, *self.form.cuts(axes)[1:])


@dataclasses.dataclass(frozen=True)
class LastRows:
  """A form whose parameter has `missing_rows` more at its end: zeros."""

  form: Reshape
  missing_rows: int

  @property
  def stored(self) -> tuple[int, ...]:
    rows, *row_shape = self.form.stored
    return (rows - self.missing_rows, *row_shape)

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    xp = np if isinstance(x, np.ndarray) else jnp
    zeros = xp.zeros((self.missing_rows, *self.form.stored[1:]), x.dtype)
    return self.form.split(_concatenate([x, zeros], 0))

  def join(self, parts: tuple[Any, ...]) -> Shaped[Array | np.ndarray, " ..."]:
    return self.form.join(parts)[: self.stored[0]]

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return (None, *self.form.cuts(axes)[1:])


@dataclasses.dataclass(frozen=True)
class WholeNumbers:
  """A form whose tensor has int64 numbers, all of which float32 has."""

  form: Reshape

  # Dtype as which the numbers are read.
  dtype = "int32"

  @property
  def stored(self) -> tuple[int, ...]:
    return self.form.stored

  def split(self, x: Shaped[Array | np.ndarray, " ..."]) -> tuple[Any, ...]:
    return self.form.split(x)

  def join(self, parts: tuple[Any, ...]) -> Shaped[np.ndarray, " ..."]:
    return np.asarray(self.form.join(parts)).astype(np.int64)

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return self.form.cuts(axes)


# Form in which a parameter is stored.
Form = (
  Reshape
  | Transpose
  | FusedRows
  | FusedColumns
  | SwappedAxes
  | FirstRows
  | LastRows
  | WholeNumbers
)


def _concatenate(
  parts: list[Any], axis: int
) -> Shaped[Array | np.ndarray, " ..."]:
  """Concatenates arrays; on the host if they are there."""
  xp = np if isinstance(parts[0], np.ndarray) else jnp
  return xp.concatenate(parts, axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fusion:
  """Maps of a layer that a checkpoint keeps in one tensor.

  Attributes:
    parts: Paths of the parameters here, e.g. ("attention.q", "attention.k").
    groups: See `FusedRows`.
    beside: A part that the layer must also have, if not every layer with these
      parts has them in one tensor.
  """

  parts: tuple[str, ...]
  groups: int = 1
  beside: str = ""


def _none() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
  """The names of a family's tensors.

  Attributes:
    layer: Prefix of a layer's names, with {} for its number.
    number: (a layer's number here, the path of a parameter in it) -> the
      number of the checkpoint's layer that has it.
    prefix: Function from a layer's number and the path of a parameter in it to
      the prefix of its name, for layers without a common one; None: `layer`.
    parts: A part here -> its name after the prefix. Where a part has a
      weight and a bias, the name is what comes before ".weight".
    parts_of: A layer's number -> names of its parts that replace those in
      `parts`, for a layer whose parts have other names.
    leaves: A parameter here -> its whole name after the prefix, where it is
      not the weight or the bias of a part.
    fused: A name after the prefix -> the parameters in that tensor.
    experts: A parameter whose leading axis are experts, or heads -> name with
      {} for the number of each.
    tables: A parameter [parts, rows, dims] of a module that knows the number
      of rows of all parts, `stored_rows` -> name with {} for each part's
      number; the last part may have fewer rows.
    columns: A name after the prefix -> the two parameters in its columns,
      and whether they are interleaved.
    swapped: A name after the prefix -> whether the last two axes of its
      tensor, if it has two, are swapped.
    rows: A parameter here -> whether it is stored as one row, [1, n].
    integers: A parameter here -> whether its tensor has whole numbers, int64.
    embed, embed_norm, positions, norm, head: Names of the other parts.
    inputs: A parameter of the inputs of all layers here -> its whole name.
    shared: A whole name -> the parameters of shared blocks in its rows.
    streams: A parameter of the start or end of streams here -> its whole name,
      with {} for the number of a stream if each has its own.
    rope_factors: Name of the logarithms of a learned rotation's factors.
    base: Prefix of all names but the head's, which a folder leaves out if it
      has a model that was saved without its head.
    buffers: Endings of tensors that may be present and are not read.
  """

  layer: str = "model.layers.{}."
  number: Callable[[int, str], int] = lambda layer, path: layer
  prefix: Callable[[int, str], str] | None = None
  parts: Mapping[str, str]
  parts_of: Mapping[int, Mapping[str, str]] = _none()
  leaves: Mapping[str, str] = _none()
  fused: Mapping[str, Fusion] = _none()
  experts: Mapping[str, str] = _none()
  tables: Mapping[str, str] = _none()
  columns: Mapping[str, tuple[tuple[str, str], bool]] = _none()
  swapped: Callable[[str], bool] = lambda name: False
  rows: Callable[[str], bool] = lambda path: False
  integers: Callable[[str], bool] = lambda path: False
  embed: str = "model.embed_tokens"
  embed_norm: str = "model.embed_norm"
  positions: str = "model.embed_positions"
  norm: str = "model.norm"
  head: str = "lm_head"
  inputs: Mapping[str, str] = _none()
  shared: Mapping[str, tuple[str, ...]] = _none()
  streams: Mapping[str, str] = _none()
  rope_factors: str = "model.rotary_emb.alpha"
  base: str = ""
  buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)

  def start(self, layer: int, path: str) -> str:
    """Prefix of the name of a parameter in a layer."""
    if self.prefix is not None:
      return self.prefix(layer, path)
    return self.layer.format(self.number(layer, path))

  def part(self, layer: int, part: str) -> str | None:
    """Name after the prefix of a part of a layer, if it has one."""
    return self.parts_of.get(layer, {}).get(part) or self.parts.get(part)


LLAMA = {
  "attention.q": "self_attn.q_proj",
  "attention.k": "self_attn.k_proj",
  "attention.v": "self_attn.v_proj",
  "attention.o": "self_attn.o_proj",
  "attention.q_norm": "self_attn.q_norm",
  "attention.k_norm": "self_attn.k_norm",
  "feedforward.gate": "mlp.gate_proj",
  "feedforward.up": "mlp.up_proj",
  "feedforward.down": "mlp.down_proj",
  "pre_attention": "input_layernorm",
  "pre_feedforward": "post_attention_layernorm",
}
