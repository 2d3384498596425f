"""The program of a process of test_answer_processes.py.

  python tests/infer/answer_process.py FOLDER PORT SIZE RANK CASES

Answers the same two turns of unequal rows in each case, on a mesh of four
devices of SIZE processes; process 0 writes all tokens to FOLDER/SIZE.json.
CASES are the numbers of the cases, with commas.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

DEVICES = 4
MODEL = dict(
  model_type="llama",
  vocab_size=262,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=4,
  max_position_embeddings=256,
)


class Case(NamedTuple):
  """A way to answer.

  Fields:
    mesh: Size of each axis of the mesh.
    cache_kind: Kind of the session's cache.
    options: Options of `generate`.
    drafts: Whether a model on the same mesh drafts.
    combine: Way to combine contexts, of which rows have other ones; "": none.
  """

  mesh: dict[str, int]
  cache_kind: str = "dense"
  options: Mapping[str, Any] = MappingProxyType({})
  drafts: bool = False
  combine: str = ""


CASES = (
  Case(dict(seq=2, model=2), "int8", dict(speculate="lookup:count=3")),
  Case(dict(seq=4), "dense", {}, drafts=True),
  Case(
    dict(data=2, seq=2), "windowed", dict(speculate="early:layers=1,count=2")
  ),
  Case(
    dict(model=4),
    "unrotated",
    dict(temperature=0.8, seed=3, repetition_penalty=1.2),
  ),
  Case(dict(seq=4), "snapkv:budget=.5"),
  Case(dict(seq=4), "h2o:budget=.5"),
  Case(dict(data=4), "int4", dict(prefill="chunked", chunk=8, stop=[5, 7])),
  Case(dict(seq=4), combine="cepe"),
  Case(dict(seq=2, model=2), "int8", combine="cepe:chunk=11"),
)


def turns() -> list[list[list[int]]]:
  """Prompts of unequal rows, of two turns."""
  rng = np.random.default_rng(0)
  sizes = (37, 12, 30, 21), (5, 9, 1, 14)
  return [[rng.integers(0, 256, n).tolist() for n in x] for x in sizes]


def contexts() -> list[list[list[int]]]:
  """Documents of each row: other numbers of other lengths."""
  rng = np.random.default_rng(1)
  sizes = (19, 7), (30,), (5, 11, 8), (13, 13)
  return [[rng.integers(0, 256, n).tolist() for n in row] for row in sizes]


def answers(case: Case, mesh: Any) -> list[Any]:
  """New tokens of both turns, int [4, 7] each."""
  import ringjax as rj

  model = rj.models.create(MODEL, seed=0)
  if mesh is not None:
    model = rj.models.place(model, mesh)
  options = dict(case.options)
  if case.drafts:
    draft = rj.models.create(MODEL, seed=1)
    if mesh is not None:
      draft = rj.models.place(draft, mesh)
    options["speculate"] = rj.infer.speculate.DraftModel(model=draft, count=2)
  kind = case.cache_kind
  if case.combine.startswith("cepe"):
    encoder = rj.models.cepe.Encoder(
      layers=1, width=32, heads=2, hidden=64, chunk=16
    )
    model = rj.models.cepe.with_encoder(model, encoder)
  if case.combine:
    session = rj.infer.context_session(
      model, contexts(), case.combine, capacity=128, cache_kind=kind, mesh=mesh
    )
  else:
    session = rj.infer.Session(
      model, batch=4, capacity=128, cache_kind=kind, mesh=mesh
    )
  return [
    rj.infer.generate(
      model, prompts, max_new_tokens=7, cache=session, **options
    ).tokens.tolist()
    for prompts in turns()
  ]


def main(folder: str, port: str, size: str, rank: str, cases: str) -> None:
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES // int(size))
  if int(size) > 1:
    jax.distributed.initialize(f"localhost:{port}", int(size), int(rank))
  import ringjax as rj

  results = []
  for number in map(int, cases.split(",")):
    sizes = CASES[number].mesh
    mesh = rj.make_mesh(tuple(sizes.values()), tuple(sizes))
    results.append(answers(CASES[number], mesh))
  if not int(rank):
    path = pathlib.Path(folder) / f"{size}.json"
    path.write_text(json.dumps(results))


if __name__ == "__main__":
  main(*sys.argv[1:])
