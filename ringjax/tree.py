"""Dataclasses as pytrees.

Guarantees: structures of two classes are never equal. With JAX's own
`register_dataclass` they are (jaxlib 0.10 to 0.12) if their static fields are:
only their hashes differ, of which a table of compiled programs compares seven
bits. A jitted function called with `Causal()` would then, in one process of
about a hundred, run the program of another mask.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax

C = TypeVar("C")


def with_leaves(x: C, **fields: Any) -> C:
  """Copy a registered dataclass, with non-array leaves in some fields.

  For leaves such as PartitionSpecs: `dataclasses.replace` calls `__init__`,
    which
  checks the annotated types.
  """
  copied = copy.copy(x)
  for name, value in fields.items():
    object.__setattr__(copied, name, value)
  return copied


def register(cls: type[C], data: Sequence[str], meta: Sequence[str]) -> type[C]:
  """Make a dataclass a pytree, as `jax.tree_util.register_dataclass` does.

  Args:
    cls: A dataclass. Its `__init__` is not called when JAX rebuilds an
      instance, whose leaves may be anything.
    data: Names of the fields that are subtrees.
    meta: Names of the other fields, hashable, part of the structure.
  """
  names = {field.name for field in dataclasses.fields(cls)}  # pyrefly: ignore
  if names != {*data, *meta} or len(names) != len(data) + len(meta):
    raise TypeError(f"{cls.__name__}: fields {names}, not {data} and {meta}")
  keys = [jax.tree_util.GetAttrKey(name) for name in data]

  def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return (
      tuple(getattr(x, name) for name in data),
      tuple(getattr(x, name) for name in meta),
    )

  def with_keys(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, static = flatten(x)
    return tuple(zip(keys, leaves, strict=True)), static

  def unflatten(static: Iterable[Any], leaves: Iterable[Any]) -> C:
    instance = object.__new__(cls)
    for name, value in zip(data, leaves, strict=True):
      object.__setattr__(instance, name, value)
    for name, value in zip(meta, static, strict=True):
      object.__setattr__(instance, name, value)
    return instance

  jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
  return cls
