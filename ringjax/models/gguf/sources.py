"""Sources of a model's tensors in a GGUF file, and how they differ there.

Guarantees: each tensor of the file is that of one Hugging Face name, or a part
of it; an unknown one keeps its name, so that it is refused as any other.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from ringjax.data.gguf.gguf_file import GgufFiles
from ringjax.models.gguf.architectures import (
  Architecture,
  architecture,
  refuse,
  said_of,
)

# Tensors that are in the model's config, not in the model.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight",
            "rope_factors_short.weight")  # fmt: skip
# Few tensors have a name without an ending: those of a state space.
_LAYER = re.compile(r"blk\.(\d{1,6})\.([\w.]+?)(?:\.(weight|bias|scale))?")


@dataclasses.dataclass(frozen=True)
class UnpairedRows:
  """Rows of heads in halves, from rows in pairs.

  Attributes:
    heads: Number of heads.
  """

  heads: int

  def __call__(self, x: Shaped[Any, "R ..."]) -> Shaped[Any, "R ..."]:
    rows = x.reshape(self.heads, -1, 2, *x.shape[1:])
    return rows.swapaxes(1, 2).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class GroupedRows:
  """Rows of each group's queries, key and value, from all queries first.

  Attributes:
    heads: Number of query heads.
    groups: Number of heads of keys.
  """

  heads: int
  groups: int

  def __call__(self, x: Shaped[Any, "R ..."]) -> Shaped[Any, "R ..."]:
    xp = np if isinstance(x, np.ndarray) else jnp
    head = x.shape[0] // (self.heads + 2 * self.groups)
    q, kv = self.heads * head, self.groups * head
    parts = [
      part.reshape(self.groups, -1, *x.shape[1:])
      for part in (x[:q], x[q : q + kv], x[q + kv :])
    ]
    return xp.concatenate(parts, 1).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class LessOne:
  """Numbers that are stored with one added."""

  def __call__(self, x: Float[Any, ...]) -> Float[Any, ...]:
    return x - np.float32(1)


@dataclasses.dataclass(frozen=True)
class NegatedLog:
  """Logarithms of numbers that are stored with another sign."""

  def __call__(self, x: Float[Any, ...]) -> Float[Any, ...]:
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.log(-x)


@dataclasses.dataclass(frozen=True)
class Turned:
  """Maps [..., in, out], from maps [..., out, in]."""

  def __call__(self, x: Shaped[Any, "... A B"]) -> Shaped[Any, "... B A"]:
    return x.swapaxes(-1, -2)


Change: TypeAlias = UnpairedRows | GroupedRows | LessOne | NegatedLog | Turned


@dataclasses.dataclass(frozen=True)
class Source:
  """Source of a tensor with a Hugging Face name.

  Attributes:
    name: Name of the tensor in the file.
    shape: Shape of the resulting tensor.
    index: Index in the first axis of the file's tensor, or None.
    change: Change of the numbers, before they are reshaped; or None.
    interleaved: A tensor whose last axis alternates with that of the first one,
      or None.
  """

  name: str
  shape: tuple[int, ...]
  index: int | None = None
  change: Change | None = None
  interleaved: str | None = None

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the file's tensors that it is made of."""
    return (
      (self.name,)
      if self.interleaved is None
      else (self.name, self.interleaved)
    )

  def floats(self, files: GgufFiles) -> Float[np.ndarray, ...]:
    """The numbers, float32."""
    return self.assemble([files.floats(x, self.index) for x in self.names])

  def assemble(self, parts: list[Any]) -> Any:
    """The tensor, from the numbers of its parts, on the host or on devices."""
    xp = np if isinstance(parts[0], np.ndarray) else jnp
    if self.change is not None:
      parts = [self.change(x) for x in parts]
    x = parts[0] if self.interleaved is None else xp.stack(parts, -1)
    return x.reshape(self.shape)


def _change(
  arch: Architecture, part: str, leaf: str | None, heads: int, groups: int
) -> tuple[Change | None, int]:
  """Change of a tensor, and the number that must divide its rows."""
  if arch.permuted and part in ("attn_q", "attn_k"):
    count = heads if part == "attn_q" else groups
    return UnpairedRows(count), 2 * count
  if arch.split_qkv and part == "attn_qkv":
    return GroupedRows(heads, groups), heads + 2 * groups
  if leaf == "weight" and part in arch.turned:
    return Turned(), 1
  if leaf == "weight" and arch.norm_one and part.endswith("norm"):
    return LessOne(), 1
  if part == "ssm_a":
    return NegatedLog(), 1
  return None, 1


def sources_of(files: GgufFiles) -> dict[str, Source]:
  """All tensors of a model by their Hugging Face names.

  Raises:
    ConfigError: If a tensor's shape does not fit the numbers of heads.
  """
  arch, entries = architecture(files.metadata), said_of(files.metadata)
  # Without attention there are none.
  heads, groups = (
    entries.get(f"attention.head_count{x}") or 0 for x in ("", "_kv")
  )
  names: dict[str, str] = dict(arch.names)
  if "blk.0.attn_norm_2.weight" in files.tensors:
    # In Falcons with two norms, the first is that of the feedforward.
    names |= {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
  sources: dict[str, Source] = {}
  for name, tensor in files.tensors.items():
    if name in _FACTORS:
      continue
    part, _, leaf = name.rpartition(".")
    new = name
    if match := _LAYER.fullmatch(name):
      part, leaf = match[2], match[3]
      ending = part if leaf is None else f"{part}.{leaf}"
      if (full_name := names.get(ending)) is not None:
        new = arch.layer.format(match[1]) + full_name
      elif part in names:
        new = f"{arch.layer.format(match[1])}{names[part]}.{leaf}"
    elif part in arch.outer:
      new = f"{arch.outer[part]}.{leaf}"
    change, unit = _change(arch, part, leaf, heads, groups)
    shape = tensor.shape
    if shape[0] % unit:
      refuse(name, list(shape), f"rows of {heads} and {groups} heads")
    if isinstance(change, Turned):
      shape = (*shape[:-2], *reversed(shape[-2:]))
    if leaf == "weight" and part in ("shortconv.conv", "ssm_conv1d"):
      shape = (shape[0], 1, *shape[1:])
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:
      shape = (1, *shape)
    if "{}" in new:
      for i in range(shape[0]):
        sources[new.format(i)] = Source(name, shape[1:], i, change)
    elif part in ("ffn_gate_exps", "ffn_up_exps"):
      _join(files, sources, new, Source(name, shape, None, change))
    else:
      sources[new] = Source(name, shape, None, change)
  return sources


def _join(
  files: GgufFiles, sources: dict[str, Source], new: str, part: Source
) -> None:
  """Adds a tensor in which gates and up-projections alternate."""
  gate = part.name.replace("ffn_up", "ffn_gate")
  up = part.name.replace("ffn_gate", "ffn_up")
  absent = [x for x in (gate, up) if x not in files.tensors]
  if absent or files.tensors[gate].shape != files.tensors[up].shape:
    refuse(part.name, list(part.shape), f"{gate} and {up} of one shape")
  shape = (*part.shape[:-1], 2 * part.shape[-1])
  sources[new] = Source(gate, shape, None, part.change, up)
