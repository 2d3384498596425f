"""Facts of an engine that have to be equal in all processes of a group."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ringjax.errors import OptionError

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
    f"option {field.name}": str(getattr(engine.config, field.name))
    for field in dataclasses.fields(engine.config)
    # A drafter may be an object, of which only the class has a text.
    if field.name != "speculate"
  }
  mesh = engine.mesh
  return {
    **options,
    "option speculate": _drafter(engine.config.speculate),
    "mesh": "" if mesh is None else str(dict(mesh.shape)),
    "model": _digest(repr(base.config).encode()),
    "replicated weights": _replicated(base),
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


def check_equal(facts: list[dict[str, str]]) -> None:
  """Refuses processes with other facts than process 0.

  Args:
    facts: Facts of each process, in the order of ranks.

  Raises:
    OptionError: If a fact differs.
  """
  for rank, facts_of_rank in enumerate(facts):
    for name in facts[0]:
      if facts_of_rank.get(name) != facts[0][name]:
        raise OptionError(
          name,
          f"{facts_of_rank.get(name)!r} in process {rank}",
          f"{facts[0][name]!r}, as in process 0",
          "start all processes with the same model, options and versions",
        )


def _drafter(drafter: Any) -> str:
  if drafter is None or isinstance(drafter, str):
    return str(drafter)
  return f"{type(drafter).__name__} {drafter.name}"


def _replicated(model: Any) -> str:
  """Digest of the first numbers of weights that every process has whole."""
  hasher = hashlib.sha256()
  for weight in jax.tree.leaves(model):
    if not isinstance(weight, jax.Array) or not weight.is_fully_replicated:
      continue
    local = weight.addressable_data(0).reshape(-1)[:_NUMBERS]
    hasher.update(np.asarray(local).tobytes())
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
