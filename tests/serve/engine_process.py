"""The program of a process of test_engine_processes.py.

  python tests/serve/engine_process.py WORK FOLDER PORT SIZE RANK

WORK is "answers", which answers the same requests on several meshes and writes
the answers of process 0 to FOLDER/SIZE.json, or "stream", which answers
requests until a process fails and writes all that process 0 hands out to
FOLDER/stream.json.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

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
# Meshes and options of the engines.
ENGINES: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
  (dict(seq=2, model=2), dict(cache_kind="int8", speculate="lookup:count=2")),
  (dict(seq=4), dict(preempt="swap")),
  (dict(model=4), dict(preempt="swap", cache_kind="int8")),
  (dict(data=2, model=2), dict(speculate="lookup:count=3,adapt=False")),
  (dict(seq=2, model=2), dict(speculate="early:layers=1,count=2")),
  (dict(seq=4, model=2), dict(preempt="swap")),
  (dict(seq=2, model=2), dict(cache_kind="int8", store=1 << 24)),
  (dict(seq=4), dict(store=1 << 24, speculate="lookup:count=2")),
)
TIMEOUT_S = 8.0


def make_requests(tokenizer: Any, vocab: int) -> list[Any]:
  """Requests of unequal prompts, of which some share a prefix."""
  from ringjax.serve import Request, RowSampling
  from ringjax.serve.api.grammar import GrammarCompiler

  rng = np.random.default_rng(0)
  common = rng.integers(0, 256, 40).astype(np.int32)
  ends = [rng.integers(0, 256, 1 + 3 * n) for n in range(5)]
  plain = [
    Request(
      prompt=np.concatenate([common[: (0, 17, 40)[n % 3]], end]),
      max_new_tokens=12 + 4 * n,
      sampling=RowSampling(
        temperature=0.8 * (n % 2),
        seed=n,
        repetition_penalty=1.0 + 0.2 * (n % 2),
      ),
    )
    for n, end in enumerate(ends)
  ]
  mask = GrammarCompiler(tokenizer, vocab).mask(None, "[ab]{4,9}", 1)
  return [
    *plain,
    Request(prompt=[65, 66, 67], max_new_tokens=12, mask=mask),
    Request(prompt=common, max_new_tokens=5, beams=2),
  ]


def make_engine(number: int, folder: pathlib.Path | None = None) -> Any:
  import ringjax as rj
  from ringjax.data import Bytes

  sizes, options = ENGINES[number]
  if "store" in options:
    # One folder of all processes: each has parts of its own in it.
    disk = (
      pathlib.Path(folder or ".") / f"store {number} {jax.process_count()}",
      options["store"],
    )
    options = options | dict(store=rj.store.Store(disk=disk))
  mesh = rj.make_mesh(tuple(sizes.values()), tuple(sizes))
  model = rj.models.place(rj.models.create(MODEL, seed=0), mesh)
  settings = dict(rows=4, capacity=128, longest=96, page=16, piece=16, pieces=2)
  return rj.serve.Engine(
    model, mesh=mesh, tokenizer=Bytes(), **settings | options
  )


def check_stores(engine: Any) -> None:
  """Processes that do not agree on stored prefixes are refused."""
  import ringjax as rj

  if engine.store_link is None:
    return
  try:
    engine.submit(rj.serve.Request(prompt=[1], max_new_tokens=1))
  except rj.errors.OptionError as error:
    assert "EngineGroup" in str(error)
  else:
    raise AssertionError("a store without a group is not refused")


def answers(numbers: list[int], folder: pathlib.Path) -> list[Any]:
  """Answers of engines; with a cancelled request each."""
  import ringjax as rj

  results = []
  for number in numbers:
    engine = make_engine(number, folder)
    served: Any = engine
    if jax.process_count() > 1:
      check_stores(engine)
      served = rj.serve.EngineGroup(engine, timeout_s=300)
      if jax.process_index():
        served.follow()
        continue
    with served:
      requests = make_requests(engine.tokenizer, engine.vocab)
      handles = [served.submit(request) for request in requests]
      dropped = served.submit(
        rj.serve.Request(prompt=[9, 8, 7], max_new_tokens=80)
      )
      next(iter(dropped))
      dropped.cancel()
      results.append([h.result().tokens.tolist() for h in handles])
    counters = engine.counters
    results[-1].append(
      dict(
        cancelled=counters.cancelled,
        shared=counters.cached_tokens > 0,
        stored=counters.stored_tokens,
        swapped=counters.swapped > 0,
        drafted=counters.drafted_steps > 0,
      )
    )
  return results


def stream(folder: pathlib.Path) -> None:
  """Answer requests until a process fails; process 0 writes what it gives."""
  import ringjax as rj
  from ringjax.errors import PeerError

  def failed(error: PeerError) -> None:
    if jax.process_index():
      print(f"FAILED {error}", flush=True)
      os._exit(3)

  engine = make_engine(0)
  engine.warm_up()
  group = rj.serve.EngineGroup(engine, timeout_s=TIMEOUT_S, on_failure=failed)
  print("READY", flush=True)
  if jax.process_index():
    group.follow()
    return
  path = folder / "stream.json"
  rounds: list[Any] = []
  while True:
    requests = make_requests(engine.tokenizer, engine.vocab)
    handles = []
    error, began = "", time.time()
    try:
      for request in requests:
        handles.append(group.submit(request))
      for handle in handles:
        handle.result()
    except PeerError as raised:
      error = str(raised)
    rounds.append(
      dict(
        tokens=[[a.tokens for a in h.answers] for h in handles],
        ends=[[a.finish for a in h.answers] for h in handles],
        error=error,
        began=began,
        ended=time.time(),
      )
    )
    path.with_suffix(".new").write_text(json.dumps(rounds))
    os.replace(path.with_suffix(".new"), path)
    if error:
      print(f"FAILED {error}", flush=True)
      os._exit(3)


def main(work: str, folder: str, port: str, size: str, rank: str) -> None:
  jax.config.update("jax_platforms", "cpu")
  numbers = [0] if work == "stream" else [int(n) for n in work.split(",")]
  (devices,) = {math.prod(ENGINES[n][0].values()) for n in numbers}
  jax.config.update("jax_num_cpu_devices", devices // int(size))
  if int(size) > 1:
    jax.distributed.initialize(f"localhost:{port}", int(size), int(rank))
  if work == "stream":
    stream(pathlib.Path(folder))
    return
  results = answers(numbers, pathlib.Path(folder))
  if not int(rank):
    path = pathlib.Path(folder) / f"{size}.json"
    path.write_text(json.dumps(results))


if __name__ == "__main__":
  main(*sys.argv[1:])
