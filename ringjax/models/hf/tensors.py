"""Maps a model's parameters to a checkpoint's tensors and back.

Guarantees: every tensor of the checkpoint and every parameter is named exactly
once; a family whose names do not cover its model fails here, before it reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ringjax.models.hf.codes import StoredTensor
from ringjax.models.hf.names import (
  Form,
  FusedColumns,
  FusedRows,
  LastRows,
  Reshape,
  SwappedAxes,
  TensorNames,
  Transpose,
  WholeNumbers,
)
from ringjax.models.hf.packed import Packed
from ringjax.models.transformer import Transformer
from ringjax.nn.linear import Head, Linear, RMSNorm
from ringjax.nn.recurrent_layers.delta import Taps


@dataclasses.dataclass(frozen=True)
class CheckpointTensor:
  """One tensor of a checkpoint.

  Attributes:
    name: Name of the tensor.
    form: Form in which parameters are stored in it.
    targets: (path of a parameter, index of the piece in it), for each piece.
    stored_name: Name in a folder, if it differs.
  """

  name: str
  form: Form | Packed
  targets: tuple[tuple[str, tuple[int, ...]], ...]
  stored_name: str | None = None

  @property
  def pieces(self) -> tuple[StoredTensor, ...]:
    """The tensors on disk that it is made of: itself, or codes and scales."""
    name = self.stored_name or self.name
    if isinstance(self.form, Packed):
      return self.form.pieces(name)
    stored, dtype = self.form.stored, None
    if isinstance(self.form, WholeNumbers):
      dtype = self.form.dtype
    return (StoredTensor(name, stored, dtype, tuple(range(len(stored)))),)


def parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
  """All parameters of a module by their path, "stack.blocks.0.0.norm"."""
  leaves = jax.tree_util.tree_leaves_with_path(
    module, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
    if isinstance(leaf, nnx.Variable)
  }


def checkpoint_tensors(
  model: Transformer, names: TensorNames
) -> list[CheckpointTensor]:
  """The tensors of a checkpoint of `model`, which may be abstract."""
  tensors = list(_outer(model, names))
  for g, run in enumerate(model.stack.runs):
    for p in range(len(run.layers)):
      block = model.stack.blocks[g][p]
      prefix = f"stack.blocks.{g}.{p}."
      for i in range(run.repeats):
        tensors.extend(_layer(block, names, prefix, run.number(p, i), i))
  named = [target for tensor in tensors for target, _ in tensor.targets]
  uncovered = set(parameters(model)) - set(named)
  assert not uncovered, f"parameters without a tensor: {sorted(uncovered)}"
  assert len({t.name for t in tensors}) == len(tensors), "a tensor named twice"
  return tensors


def _outer(
  model: Transformer, names: TensorNames
) -> Iterator[CheckpointTensor]:
  parts = {"embed": names.embed, "norm": names.norm}
  if model.head is not None:
    parts["head"] = names.head
  for part, name in parts.items():
    module = getattr(model, part)
    for leaf, param in parameters(module).items():
      shape = param.get_value().shape
      form = _form(module, leaf, shape)
      target = ((f"{part}.{leaf}", ()),)
      file = f"{name}.{leaf}"
      if leaf.startswith("norm."):
        file = f"{names.embed_norm}.{leaf.removeprefix('norm.')}"
      elif leaf.startswith("positions."):
        file = f"{names.positions}.{leaf.removeprefix('positions.')}"
      yield CheckpointTensor(file, form, target)
  if model.rope_factors is not None:
    shape = model.rope_factors.get_value().shape
    target = (("rope_factors", ()),)
    yield CheckpointTensor(names.rope_factors, Reshape(shape, shape), target)
  if model.streams is not None:
    params = parameters(model.streams)
    for leaf, name in names.streams.items():
      shape = params[leaf].get_value().shape
      if "{}" not in name:
        target = ((f"streams.{leaf}", ()),)
        part, _, last = leaf.rpartition(".")
        owner = _part(model.streams, part) if part else model.streams
        yield CheckpointTensor(name, _form(owner, last, shape), target)
        continue
      square = Transpose(shape[1:2], shape[2:])
      for i in range(shape[0]):
        target = ((f"streams.{leaf}", (i,)),)
        yield CheckpointTensor(name.format(i), square, target)
  if model.inputs is None:
    return
  if names.shared:
    yield from _shared(model.inputs, names.shared)
    return
  for leaf, param in parameters(model.inputs).items():
    shape = param.get_value().shape
    form = Reshape(shape, (shape[0], math.prod(shape[1:])))
    if leaf == "projection":
      form = Transpose(shape[:1], shape[1:])
    elif len(shape) == 1:
      form = Reshape(shape, shape)
    yield CheckpointTensor(names.inputs[leaf], form, ((f"inputs.{leaf}", ()),))


def _shared(
  blocks: nnx.Module, names: Mapping[str, Sequence[str]]
) -> Iterator[CheckpointTensor]:
  """The tensors of blocks whose weights layers share."""
  params = parameters(blocks)
  for name, paths in names.items():
    forms = []
    for path in paths:
      part, _, leaf = path.rpartition(".")
      shape = params[path].get_value().shape
      forms.append(_form(_part(blocks, part), leaf, shape))
    form = forms[0] if len(forms) == 1 else FusedRows(1, tuple(forms))
    targets = tuple((f"inputs.{path}", ()) for path in paths)
    yield CheckpointTensor(name, form, targets)


def _form(
  module: Any, leaf: str, shape: tuple[int, ...]
) -> Reshape | Transpose:
  """Form in which a parameter of a module is stored."""
  if leaf == "weight" and isinstance(module, Linear):
    return Transpose(shape[: module.contracted], shape[module.contracted :])
  if leaf == "weight" and isinstance(module, Head):
    return Transpose(shape[:1], shape[1:])
  if isinstance(module, Taps):
    if leaf == "bias":
      return Reshape(shape, (math.prod(shape),))
    return Reshape(shape, (math.prod(shape[:-1]), 1, shape[-1]))
  # A norm over several axes is stored as a row.
  if len(shape) == 1 or isinstance(module, Linear | RMSNorm):
    return Reshape(shape, (math.prod(shape),))
  return Reshape(shape, shape)


def sparse_name(part: str) -> str:
  """Name of a part that `sparse_attention` adds to attention of any family."""
  prefix, _, name = part.partition(".")
  assert prefix == "attention", f"a part without a name: {part}"
  return f"sparse_attention.{name}"


def _part(block: Any, path: str) -> Any:
  """A module in a block by its path, or None."""
  for name in path.split("."):
    owner: Any = block
    block = owner[int(name)] if name.isdigit() else getattr(owner, name, None)
  return block


def _layer(
  block: Any, names: TensorNames, prefix: str, layer: int, index: int
) -> Iterator[CheckpointTensor]:
  """The tensors of layer `layer`, number `index` in the stack of `block`."""
  have = {
    path: param.get_value().shape[1:]
    for path, param in parameters(block).items()
  }
  remaining = dict(have)

  def tensor(
    name: str, form: Any, paths: Sequence[str], *more: int
  ) -> CheckpointTensor:
    for path in paths:
      remaining.pop(path, None)
    if names.swapped(name) and len(form.stored) > 1:
      form = SwappedAxes(form)
    targets = tuple((prefix + path, (index, *more)) for path in paths)
    start = names.start(layer, paths[0])
    return CheckpointTensor(start + name, form, targets)

  def form(path: str) -> Reshape | Transpose:
    part, _, leaf = path.rpartition(".")
    return _form(_part(block, part), leaf, have[path])

  for name, fusion in names.fused.items():
    for leaf in ("weight", "bias"):
      paths = [f"{part}.{leaf}" for part in fusion.parts]
      applies = not fusion.beside or f"{fusion.beside}.weight" in have
      if applies and set(paths) <= set(have):
        rows = FusedRows(fusion.groups, tuple(map(form, paths)))
        yield tensor(f"{name}.{leaf}", rows, paths)
  for name, (paths, interleaved) in names.columns.items():
    if set(paths) <= set(have):
      yield tensor(name, FusedColumns(have[paths[0]], interleaved), paths)
  for path, shape in list(remaining.items()):
    part, _, leaf = path.rpartition(".")
    if path in names.leaves:
      stored = (1, *shape) if names.rows(path) else shape
      leaf_form: Any = Reshape(shape, stored)
      if names.integers(path):
        leaf_form = WholeNumbers(leaf_form)
      yield tensor(names.leaves[path], leaf_form, [path])
    elif path in names.experts:
      expert_form = Reshape(shape[1:], shape[1:])
      if len(shape) > 2:
        expert_form = Transpose(shape[1:2], shape[2:])
      for expert in range(shape[0]):
        name = names.experts[path].format(expert)
        yield tensor(name, expert_form, [path], expert)
    elif path in names.tables:
      count, rows, dims = shape
      part_form: Any = Reshape((rows, dims), (rows, dims))
      missing = count * rows - _part(block, part).stored_rows
      for number in range(count):
        name = names.tables[path].format(number)
        if missing and number == count - 1:
          part_form = LastRows(part_form, missing)
        yield tensor(name, part_form, [path], number)
    else:
      name = names.part(layer, part) or sparse_name(part)
      yield tensor(f"{name}.{leaf}", form(path), [path])


def module_tensors(
  module: nnx.Module, names: Mapping[str, str]
) -> list[CheckpointTensor]:
  """The tensors of a module that is no model, which may be abstract.

  Args:
    module: Module with all parameters.
    names: Name of each of its parts, by the part's path.
  """
  tensors = []
  for path, param in parameters(module).items():
    part, _, leaf = path.rpartition(".")
    form = _form(_part(module, part), leaf, param.get_value().shape)
    name = f"{names[part]}.{leaf}"
    tensors.append(CheckpointTensor(name, form, ((path, ()),)))
  return tensors


def copied_tensors(
  tensors: Sequence[CheckpointTensor],
  copies: Mapping[str, str],
  *,
  tied: bool,
) -> list[CheckpointTensor]:
  """Tensors that store parameters of other tensors once more.

  Args:
    tensors: The tensors of a model.
    copies: Name of a tensor -> path of the parameter that it has.
    tied: Whether the model's head is its embedding.
  """
  by_path = {t.targets[0][0]: t for t in tensors if len(t.targets) == 1}
  paths = {
    name: "embed.weight" if tied else path for name, path in copies.items()
  }
  return [
    dataclasses.replace(by_path[path], name=name, stored_name=None)
    for name, path in paths.items()
  ]
