"""Prints docs/one_program.md: what a step on a TPU computes in one program.

  PYTHONPATH=. python docs/one_program.py > docs/one_program.md

The reasons are those of `engine.calls_apart`, asked for models without
weights. `tests/serve/test_row_tiles.py` checks that the page is what this
script prints.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
from flax import nnx

import ringjax as rj
from ringjax.models.weights import coded_weights
from ringjax.nn.feedforward import ExpertsLayer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.tiling import reason_against_row_tiles
from tests import checkpoints

_HEAD = """\
# What one program serves

On a TPU a step of an engine is one program for its answers and its prompts
([how](how/serve.md#on-a-tpu)), or two calls for a reason that
`engine.calls_apart` names. This page is printed by `docs/one_program.py`, which
asks for that reason for a small model of each family, without weights; sizes
that the kernel does not take are not among the reasons here.

## Families

| in one program | families |
|---|---|
"""
_OPTIONS = {
  "`prompt_tile=16`": dict(prompt_tile=16),
  "`layer_parts=2`": dict(layer_parts=2),
  '`speculate="lookup"`': dict(speculate="lookup"),
  '`cache_kind="int8"`, `"int4"`': dict(cache_kind="int4"),
  '`layout="contiguous"`': dict(layout="contiguous"),
  '`prefill="sparse:xattention,block=64"`': dict(
    prefill="sparse:xattention,block=64"
  ),
  "`one_order=True`": dict(one_order=True),
}
_MESHES = {
  "`seq`": dict(seq=2),
  "`model`": dict(model=2),
  "`seq` and `model`": dict(seq=2, model=2),
  "`data`": dict(data=2),
}


def page() -> str:
  """The text of the page."""
  families: dict[str, list[str]] = collections.defaultdict(list)
  for folder in sorted(checkpoints.MODELS.iterdir()):
    families[_reason(folder.name)].append(folder.name)
  lines = [_HEAD.rstrip("\n")]
  for reason in sorted(families, key=lambda text: (text != "", text)):
    lines.append(f"| {_answer(reason)} | {', '.join(families[reason])} |")
  lines += ["", "## Options", "", "| option | in one program |", "|---|---|"]
  for name, options in _OPTIONS.items():
    lines.append(f"| {name} | {_answer(_reason('llama3', options))} |")
  of_function = _reason("llama3", attention_fn=lambda *args: args[0])
  lines.append(f"| an `attention_fn` | {_answer(of_function)} |")
  lines += ["", "## Weights", "", "| codes | in one program |", "|---|---|"]
  for kind in coded_weights.KINDS:
    lines.append(f"| `{kind}` | {_answer(_reason('llama3', codes=kind))} |")
  lines += [
    "", "## Meshes", "",
    "| axes | dense layers | mixtures, the width of each expert over `model` "
    "| mixtures, experts over the axes |", "|---|---|---|---|",
  ]  # fmt: skip
  for name, axes in _MESHES.items():
    answers = (
      _answer(_reason("llama3", axes=axes)),
      _answer(_reason("mixtral", axes=axes)),
      _answer(_reason("mixtral", axes=axes, experts=(*axes,))),
    )
    lines.append(f"| {name} | {' | '.join(answers)} |")
  return "\n".join(lines) + "\n"


def _answer(reason: str) -> str:
  return f"no: {reason}" if reason else "yes"


def _reason(
  family: str,
  options: dict[str, Any] | None = None,
  axes: dict[str, int] | None = None,
  attention_fn: Any = None,
  codes: str | None = None,
  experts: tuple[str, ...] = (),
) -> str:
  """Reason for two calls of a model of a family, or ""."""
  mesh = None
  if axes is not None:
    mesh = jax.sharding.AbstractMesh((*axes.values(),), (*axes,))
  model = rj.models.abstract(checkpoints.config(family))
  if codes is not None:
    kind = coded_weights.KINDS[codes]
    make = functools.partial(coded_weights.coded_model, **kind)
    model = jax.eval_shape(make, model)
  for _, module in nnx.iter_modules(model):
    if isinstance(module, ExpertsLayer):
      module.over = experts
  attend = CachedAttention(mesh=mesh)
  config = EngineConfig(**(options or {}))
  return reason_against_row_tiles(model, config, attend, attention_fn)


if __name__ == "__main__":
  print(page(), end="")
