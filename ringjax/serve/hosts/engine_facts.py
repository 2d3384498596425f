"""Facts of an engine that have to be equal in all processes of a group."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Set, Sized
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ringjax.infer.speculate.drafter import Drafter
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.transformer import Transformer

if TYPE_CHECKING:
  from ringjax.serve.engine import Engine

# Numbers of each replicated weight that are compared.
_NUMBERS = 1024


def engine_facts(engine: Engine) -> dict[str, str]:
  """Texts that are equal in processes whose engines take the same steps.

  Weights that are sharded over the processes are not compared: each has other
  parts of them.
  """
  tree, base = engine.scheduler.tree, engine.base
  options = {
    f"option {field.name}": _option(getattr(engine.config, field.name))
    for field in dataclasses.fields(engine.config)
  }
  mesh = engine.mesh
  return {
    **options,
    "mesh": "" if mesh is None else str(dict(mesh.shape)),
    "model": _digest(repr(base.config).encode()),
    "replicated weights": _replicated(base),
    "store": str(engine.store_link is not None),
    "adapters": str(
      [(name, engine.adapter_digest(name)) for name in engine.adapters]
    ),
    "tokenizer": _tokenizer(engine.tokenizer, engine.vocab),
    "pages": str([(g.pages, g.reach, tree.page) for g in tree.groups]),
    "common reads": str(not engine.reads_apart),
    "one program": str(not engine.calls_apart),
    "jax": jax.__version__,
    "ringjax": _version(),
  }


def _option(value: object) -> str:
  """Text of an option; with a digest of its contents if it is an object."""
  if value is None or isinstance(value, str | bool | int | float):
    return str(value)
  hasher = hashlib.sha256()
  _add_contents(hasher, value, set())
  text = type(value).__name__
  if isinstance(value, CacheConfig):
    text = str(value)
  elif isinstance(value, Drafter):
    text += f" {value.name}"
  return f"{text} ({hasher.hexdigest()[:16]})"


def _add_contents(hasher: Any, value: object, seen: set[int]) -> None:
  """Adds all values of an object to a digest, of arrays some numbers.

  Addresses in memory are no part of it: it is equal in all processes that make
  the object alike.

  Args:
    hasher: Digest to update.
    value: Object.
    seen: Ids of the objects that contain it, which are not added again.
  """
  add = functools.partial(_add_contents, hasher, seen=seen | {id(value)})
  hasher.update(type(value).__qualname__.encode())
  if id(value) in seen:
    return
  if isinstance(value, jax.Array | np.ndarray):
    hasher.update(f"{value.dtype} {value.shape}".encode())
    hasher.update(_first_numbers(value))
  elif isinstance(value, Transformer):
    hasher.update(repr(value.config).encode())
    hasher.update(_replicated(value).encode())
  elif value is None or isinstance(
    value, str | bytes | bool | int | float | complex | np.generic | np.dtype
  ):
    hasher.update(repr(value).encode())
  elif (name := getattr(value, "__qualname__", None)) is not None:
    # Classes and functions.
    hasher.update(f"{getattr(value, '__module__', '')} {name}".encode())
  elif isinstance(value, Mapping):
    for key, entry in value.items():
      add(key)
      add(entry)
  elif isinstance(value, Set):
    hasher.update(repr(sorted(map(repr, value))).encode())
  elif isinstance(value, Iterable) and isinstance(value, Sized):
    for entry in value:
      add(entry)
  else:
    entries = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value):
      fields = dataclasses.fields(value)
      entries = {field.name: getattr(value, field.name) for field in fields}
    for name, entry in sorted(entries.items()):
      hasher.update(name.encode())
      add(entry)


def _first_numbers(array: jax.Array | np.ndarray) -> bytes:
  """Some numbers of an array that a process has whole, b"" of others."""
  if isinstance(array, jax.Array):
    if not array.is_fully_replicated:
      return b""
    array = array.addressable_data(0)
  return np.asarray(array.reshape(-1)[:_NUMBERS]).tobytes()


def _replicated(model: Any) -> str:
  """Digest of the first numbers of weights that every process has whole."""
  hasher = hashlib.sha256()
  for weight in jax.tree.leaves(model):
    if isinstance(weight, jax.Array):
      hasher.update(_first_numbers(weight))
  return hasher.hexdigest()[:16]


def _tokenizer(tokenizer: Any, vocab: int) -> str:
  """Digest of the texts of a tokenizer's tokens; "" without one."""
  if tokenizer is None:
    return ""
  step = max(1, vocab // _NUMBERS)
  texts = [tokenizer.decode([token]) for token in range(0, vocab, step)]
  return _digest("\0".join(texts).encode("utf-8", "surrogatepass"))


def _digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]


def _version() -> str:
  try:
    return importlib.metadata.version("ringjax")
  except importlib.metadata.PackageNotFoundError:
    return ""
