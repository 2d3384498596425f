"""Tensors of GGUF files as they are stored, for codes and for layers on disk.

Codes of linear maps stay codes; layers on disk are read whenever they run.

Guarantees: the numbers of a map that stays codes, and of a layer on disk, are
those that the package gguf dequantises, to the bit in float32; rates of a state
space, whose logarithm a layer on disk takes on the device, up to its rounding.
Memory: 4 bits per weight of a type of 4 bits, 8 for others, and its steps;
layers whose types differ share the narrowest layout that holds them all.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ringjax.errors import OptionError
from ringjax.models.contents import Contents
from ringjax.models.gguf.blocks import BLOCKS, PLAIN, BlockType
from ringjax.models.gguf.gguf_folder import GgufFolder, stored_name
from ringjax.models.gguf.sources import (
  Change,
  GroupedRows,
  Turned,
  UnpairedRows,
)
from ringjax.models.hf.codes import PackedForm, StoredTensor
from ringjax.models.hf.names import (
  FusedColumns,
  FusedRows,
  Reshape,
  SwappedAxes,
  Transpose,
)
from ringjax.models.hf.tensors import CheckpointTensor
from ringjax.models.transformer import Transformer
from ringjax.models.weights.linear_maps import replaced, rounded_maps
from ringjax.nn.linear import ExpertLinear, Linear
from ringjax.nn.weights.block_codes import BlockCodesLinear, BlockLayout

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredForm(PackedForm):
  """A tensor that is read as the bytes of a GGUF file.

  Attributes:
    types: Types of its parts, as ggml's numbers.
    shapes: Shapes of the parts: bytes of rows, or plain numbers.
    change: Change of the file's tensors, or None.
    shape: Shape of the tensor.
  """

  types: tuple[int, ...]
  shapes: tuple[tuple[int, ...], ...]
  change: Change | None
  shape: tuple[int, ...]

  def pieces(self, name: str) -> tuple[StoredTensor, ...]:
    return tuple(
      StoredTensor(
        stored_name(name, n),
        shape,
        jnp.float32 if kind in PLAIN else jnp.uint8,
        (None,) * len(shape),
      )
      for n, (kind, shape) in enumerate(
        zip(self.types, self.shapes, strict=True)
      )
    )

  def unpack(self, *x: Shaped[Array, " ..."]) -> Float[Array, " ..."]:
    parts = [
      a.astype(jnp.float32) if kind in PLAIN else BLOCKS[kind].floats(a)
      for kind, a in zip(self.types, x, strict=True)
    ]
    if self.change is not None:
      parts = [self.change(a) for a in parts]
    joined = parts[0] if len(parts) == 1 else jnp.stack(parts, -1)
    return joined.reshape(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCodes(StoredForm):
  """A tensor whose parameters are codes, steps and least numbers.

  Attributes:
    layouts: Layout of each map in it.
  """

  layouts: tuple[BlockLayout, ...]

  def split(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(x) > 1 or not _has_rows(self.form):
      # Experts in one tensor: their maps are [E, out, in] in the file.
      pieces = list(x) if len(x) > 1 else _halves(self.form, x[0])
    else:
      (rows,) = x
      if self.change is not None and not isinstance(self.change, Turned):
        rows = self.change(rows)
      pieces = _row_pieces(self.form, rows)
    kinds = [BLOCKS[kind] for kind in self.types]
    kinds = kinds if len(kinds) == len(pieces) else kinds * len(pieces)
    return tuple(
      array
      for kind, layout, rows in zip(kinds, self.layouts, pieces, strict=True)
      for array in _laid_out(kind, layout, rows)
    )

  def cuts(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    # Rows of bytes are read whole, on every device.
    return (None,) * len(self.shapes[0])


def _has_rows(form: Any) -> bool:
  """Whether the rows of a tensor are outputs of maps."""
  if isinstance(form, SwappedAxes):
    return _has_rows(form.form)
  if isinstance(form, FusedRows):
    return all(isinstance(part, Transpose) for part in form.parts)
  return isinstance(form, Transpose)


def _halves(form: Any, x: Shaped[Array, "E R B"]) -> list[jax.Array]:
  """The rows of each map of the experts in a tensor."""
  if isinstance(form, SwappedAxes):
    return _halves(form.form, x)
  if not isinstance(form, FusedColumns):
    return [x]
  if form.interleaved:
    return [x[:, 0::2], x[:, 1::2]]
  count = form.shape[-1]
  return [x[:, :count], x[:, count:]]


def _row_pieces(form: Any, x: Shaped[Array, "R B"]) -> list[jax.Array]:
  """The rows of each map in a tensor."""
  if isinstance(form, SwappedAxes):
    return _row_pieces(form.form, x)
  if not isinstance(form, FusedRows):
    return [x]
  x = x.reshape(form.groups, -1, x.shape[1])
  pieces, at = [], 0
  for part in form.parts:
    count = part.stored[0] // form.groups
    pieces.append(x[:, at : at + count].reshape(-1, x.shape[2]))
    at += count
  return pieces


def _outputs(form: Any) -> tuple[tuple[int, ...], ...] | None:
  """Sizes of the output axes of each map in a tensor, if codes can stay."""
  if isinstance(form, SwappedAxes):
    return _outputs(form.form)
  if isinstance(form, Transpose):
    return (form.outputs,)
  if isinstance(form, FusedRows) and _has_rows(form):
    return tuple(part.outputs for part in form.parts)
  if isinstance(form, FusedColumns) and len(form.shape) == 3:
    return (form.shape[2:],) * 2
  if isinstance(form, Reshape) and form.shape == form.stored:
    return (form.shape[2:],) if len(form.shape) == 3 else None
  return None


def _laid_out(
  kind: BlockType,
  layout: BlockLayout,
  rows: Shaped[Array, "*lead O B"],
) -> list[jax.Array]:
  """Codes [*lead, G, rows, O], steps and least numbers [*lead, G, O]."""
  codes, step, minima = kind.split(rows)
  if layout.levels is None:
    codes = kind.levels_of(codes)
  *lead, outer, _ = codes.shape
  splits = kind.group // layout.group
  codes = codes.reshape(*lead, outer, -1, layout.group)
  codes = jnp.moveaxis(codes, -3, -1)
  if layout.levels is not None:
    high, low = jnp.split(codes, 2, -2)
    codes = (high << 4) | low
  per_group = lambda x: jnp.repeat(x, splits, -1).swapaxes(-1, -2)
  flat = [codes, per_group(step).astype(layout.step)]
  if layout.minimum is not None:
    zeros = jnp.zeros_like(step) if minima is None else minima
    flat.append(per_group(zeros).astype(layout.minimum))
  return flat


def _layout(kinds: Iterable[BlockType]) -> BlockLayout:
  """The narrowest layout that holds blocks of several types."""
  kinds = list(kinds)
  levels = {kind.levels for kind in kinds}
  steps = {kind.step for kind in kinds}
  minimum_types = {kind.minimum for kind in kinds} - {None}
  common_dtype = lambda names: names.pop() if len(names) == 1 else "float32"
  return BlockLayout(
    group=min(kind.group for kind in kinds),
    levels=levels.pop() if len(levels) == 1 else None,
    step=common_dtype(steps),
    minimum=common_dtype(minimum_types) if minimum_types else None,
  )


def stored_tensor(
  folder: GgufFolder, tensor: CheckpointTensor
) -> CheckpointTensor:
  """A tensor that is read as bytes, and becomes floats on the devices.

  Raises:
    OptionError: If a type is dequantised on the host only.
  """
  if isinstance(tensor.form, StoredForm):
    return tensor
  plain: Any = tensor.form
  form = StoredForm(form=plain, **_fields(folder, tensor))
  for number in form.types:
    if number not in BLOCKS and number not in PLAIN:
      raise OptionError(
        "placement",
        f"layers on disk of the type {folder.type_name(number)}",
        "one of " + ", ".join(
          (*PLAIN.values(), *(kind.name for kind in BLOCKS.values()))
        ),
        "make a folder of it first: python -m ringjax.launch.convert",
      )  # fmt: skip
  return dataclasses.replace(tensor, form=form)


def _fields(folder: GgufFolder, tensor: CheckpointTensor) -> dict[str, Any]:
  name = tensor.stored_name or tensor.name
  source = folder.sources[name]
  infos = [
    folder.tensors[stored_name(name, n)] for n in range(len(source.names))
  ]
  return dict(
    types=tuple(folder.gguf.tensors[x].type for x in source.names),
    shapes=tuple(info.shape for info in infos),
    change=source.change,
    shape=source.shape,
  )


def with_stored_codes(
  found: Contents, model: Transformer
) -> tuple[Contents, Transformer]:
  """Turns a model of shapes into one whose linear maps stay codes.

  Args:
    found: Tensors of a GGUF file, of a folder with stored names.
    model: Model of shapes.

  Returns:
    (tensors to read, model).

  Raises:
    OptionError: If none of the file's linear maps are codes.
  """
  folder: Any = found.folder
  maps = rounded_maps(model, "codes of the file")
  of_parameter = {
    path if isinstance(linear, ExpertLinear) else f"{path}.weight": path
    for path, linear in maps.items()
  }
  kinds: dict[str, set[BlockType]] = {path: set() for path in maps}
  floats: set[str] = set()
  for t in found.tensors:
    targets = [of_parameter.get(path) for path, _ in t.targets]
    types = _block_types(folder, t)
    if types is None or None in targets:
      floats.update(path for path in targets if path is not None)
      continue
    for path, kind in zip(targets, types, strict=True):
      if path is not None:
        kinds[path].add(kind)
  # A map that shares a tensor with one that becomes floats does so, too.
  while True:
    affected = {
      path
      for t in found.tensors
      if {of_parameter.get(x) for x, _ in t.targets} & floats
      for path in (of_parameter.get(x) for x, _ in t.targets)
      if path is not None
    }
    if affected <= floats:
      break
    floats |= affected
  layouts = {
    path: _layout(kinds[path])
    for path in maps
    if kinds[path] and path not in floats
  }
  if not layouts:
    raise OptionError(
      "weights",
      "'stored', of a file whose linear maps are not in blocks of "
      + ", ".join(kind.name for kind in BLOCKS.values()),
      "a quantised file",
      "leave weights= out, or take rj.models.with_coded_weights",
    )
  tensors = [_coded(folder, t, of_parameter, layouts) for t in found.tensors]
  model = replaced(
    model, {path: _module(maps[path], layouts[path]) for path in layouts}
  )
  model.stored_types = _types_line(folder, tensors)
  _log.info("%s: %s", folder.gguf.name, model.stored_types)
  return dataclasses.replace(found, tensors=tensors), model


def _block_types(
  folder: GgufFolder, tensor: CheckpointTensor
) -> list[BlockType] | None:
  """Block type of each map in a tensor; None if they become floats."""
  source = folder.sources.get(tensor.stored_name or tensor.name)
  outputs = _outputs(tensor.form)
  if source is None or outputs is None:
    return None
  kinds = [BLOCKS.get(folder.gguf.tensors[x].type) for x in source.names]
  known_kinds = [kind for kind in kinds if kind is not None]
  # In the file rows are outputs, which they are not in these tensors.
  turned = isinstance(tensor.form, SwappedAxes) == _has_rows(tensor.form)
  changes = Turned if turned else UnpairedRows | GroupedRows | None
  if len(known_kinds) < len(kinds) or not isinstance(source.change, changes):
    return None
  known_kinds = (
    known_kinds
    if len(known_kinds) == len(outputs)
    else known_kinds * len(outputs)
  )
  return known_kinds if len(known_kinds) == len(outputs) else None


def _coded(
  folder: GgufFolder,
  tensor: CheckpointTensor,
  of_parameter: Mapping[str, str],
  kept_layouts: Mapping[str, BlockLayout],
) -> CheckpointTensor:
  """A tensor whose parameters are codes, if all of its maps stay codes."""
  paths = [of_parameter.get(path) for path, _ in tensor.targets]
  if not all(path in kept_layouts for path in paths):
    return tensor
  layouts = tuple(kept_layouts[path] for path in paths if path is not None)
  targets = tuple(
    (f"{path}.{part}", index)
    for path, layout, (_, index) in zip(
      paths, layouts, tensor.targets, strict=True
    )
    for part in _parts(layout)
  )
  plain: Any = tensor.form
  form = StoredCodes(form=plain, layouts=layouts, **_fields(folder, tensor))
  return dataclasses.replace(tensor, form=form, targets=targets)


def _parts(layout: BlockLayout) -> tuple[str, ...]:
  return ("codes", "step") if layout.minimum is None else (
    "codes", "step", "least",
  )  # fmt: skip


def _module(linear: Linear, layout: BlockLayout) -> BlockCodesLinear:
  """The module of shapes that replaces a map."""
  shape = linear.weight.get_value().shape
  first = 1 + linear.lead
  inputs = shape[first : first + linear.contracted]
  outputs = shape[first + linear.contracted :]
  groups = math.prod(inputs) // layout.group
  make: Any = jax.ShapeDtypeStruct
  lead, outer = (*shape[:first], groups), math.prod(outputs)
  least_dtype = layout.minimum
  return BlockCodesLinear(
    linear,
    layout,
    make((*lead, layout.rows, outer), jnp.dtype(layout.dtype)),
    make((*lead, outer), jnp.dtype(layout.step)),
    None
    if least_dtype is None
    else make((*lead, outer), jnp.dtype(least_dtype)),
    inputs=inputs,
    outputs=outputs,
  )


def _types_line(folder: GgufFolder, tensors: Iterable[CheckpointTensor]) -> str:
  """One line that lists the types that stay codes and that become floats."""
  counts: dict[bool, dict[str, int]] = {True: {}, False: {}}
  for t in tensors:
    source = folder.sources[t.stored_name or t.name]
    for name in source.names:
      of_kind = counts[isinstance(t.form, StoredCodes)]
      kind = folder.type_name(folder.gguf.tensors[name].type)
      of_kind[kind] = of_kind.get(kind, 0) + 1
  listed = lambda of_kind: ", ".join(
    f"{of_kind[x]} {x}" for x in sorted(of_kind)
  )
  return (
    f"stay codes: {listed(counts[True]) or 'none'}; "
    f"become floats: {listed(counts[False]) or 'none'} (tensors)"
  )
