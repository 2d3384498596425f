"""The program of the processes of test_kvr_processes.py: one rank each.

  python tests/infer/ranks.py FOLDER PORT SIZE RANK

Does everything in one go, since starting processes and compiling is what
costs, and writes what it found to FOLDER/RANK.json.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np

MODELS = ("llama3", "falcon_7b", "mistral")
TOKENS = 42
NEW = 32
TILE = 8
# One rank stays idle; odd lengths; a rank with one token.
PARTITIONS = ((25, 17), (20, 13, 9), (33, 8, 1))


def prompt(vocab: int) -> np.ndarray:
  return np.random.default_rng(7).integers(0, vocab, TOKENS).astype(np.int32)


class Rank:
  """What one process does."""

  def __init__(self, folder: pathlib.Path, rank: int):
    self.folder, self.rank = folder, rank
    self.found: dict = {}

  def note(self, name: str, value: object) -> None:
    self.found[name] = value
    path = self.folder / f"{self.rank}.json"
    path.with_suffix(".new").write_text(json.dumps(self.found))
    os.replace(path.with_suffix(".new"), path)

  def flag(self, name: str) -> None:
    (self.folder / f"{name}.{self.rank}").touch()

  def wait_for(self, name: str, *ranks: int) -> None:
    for r in ranks:
      while not (self.folder / f"{name}.{r}").exists():
        time.sleep(0.01)


def reference(model, ids: np.ndarray) -> tuple:
  """Logits, cache and greedy tokens of one device."""
  import ringjax as rj

  session = rj.infer.Session(model, TOKENS + NEW)
  new = rj.infer.generate(
    model, [ids], max_new_tokens=NEW, prefill="dense", cache=session
  )
  rows = np.array([[TOKENS - 1]], np.int32)
  logits = np.asarray(model(ids[None], rows=rows)[:, 0])
  return logits, session.cache.slots, new[0]


def in_threads(count: int, run) -> list:
  """The results of run(rank, peers), in a thread for each rank."""
  from ringjax.parallel.peers import Peers

  group = Peers.in_threads(count, timeout_s=300.0)
  with concurrent.futures.ThreadPoolExecutor(count) as threads:
    results = [
      threads.submit(run, rank, peers) for rank, peers in enumerate(group)
    ]
    try:
      return [x.result(600) for x in results]
    finally:
      for peers in group:
        peers.close()


def far(got, want) -> float:
  """The largest difference, relative to the largest number."""
  got, want = np.asarray(got), np.asarray(want)
  return float(np.abs(got - want).max() / np.abs(want).max())


def read_all(self: Rank, model_folder: str, peers, name: str) -> None:
  """All partitions of one model, and what one device says."""
  import ringjax as rj
  from ringjax.infer.kv_runahead import kvr

  model = rj.models.load(model_folder)
  ids = prompt(model.config.vocab)
  chain = kvr.Runahead(model, peers, tile=TILE)
  want = None
  for partition in PARTITIONS[name != MODELS[0] :]:
    # With one credit a layer comes into the buffer of the one before.
    chain.credits = 1 if partition[-1] == 1 else 2
    reading = chain.read(ids, partition, new_tokens=NEW)
    said = {
      "link_bytes": reading.outcome.link_bytes,
      "formula": kvr.link_bytes(chain.programs.layers, partition, model.dtype),
      "tiles": reading.tiles,
      "programs": chain.programs.count(),
    }
    if reading.session is not None:
      want = want or reference(model, ids)
      logits, slots, tokens = want
      said["logits"] = far(reading.logits, logits)
      said["keys"] = []
      for layer in chain.programs.layers:
        seen = layer.first_needed(TOKENS)
        rows = (layer.index, 0, slice(None), slice(seen, TOKENS))
        mine = reading.session.cache.slots[layer.kind]
        for a, b in zip(mine, slots[layer.kind], strict=True):
          said["keys"].append(far(a[rows], b[rows]))
      new = kvr.follow(reading, NEW)
      said["tokens"] = [new.tolist(), tokens.tolist()]
      # The conversation goes on there.
      said["more"] = rj.infer.generate(
        model, [[5, 6, 7]], max_new_tokens=2, cache=reading.session
      ).tokens.tolist()  # fmt: skip
      del reading
    self.note(f"{name} {len(partition)} {partition[-1]}", said)


def refused(read) -> list:
  """(kind, rank, text) of what `read` raises."""
  from ringjax.errors import RingjaxError

  try:
    read()
  except RingjaxError as error:
    return [type(error).__name__, getattr(error, "rank", None), f"{error}"]
  return ["nothing", None, ""]


def main(folder: str, port: str, size: str, rank: str) -> None:
  jax.config.update("jax_num_cpu_devices", 1)
  jax.distributed.initialize(f"localhost:{port}", int(size), int(rank))
  import ringjax as rj
  from ringjax.infer.kv_runahead import kvr, lockstep
  from ringjax.parallel.peers import Peers

  self = Rank(pathlib.Path(folder), int(rank))
  me = self.rank
  peers = Peers.of_processes(timeout_s=60.0)
  models = {name: f"{folder}/{name}" for name in MODELS}
  for name, path in models.items():
    read_all(self, path, peers, name)

  # Refusals, before any work; the group is as good as before.
  mesh = rj.make_mesh((-1,), ("seq",))
  whole = rj.models.load(models["llama3"], mesh=mesh)
  model = jax.tree.map(lambda a: a.addressable_data(0), whole)
  ids = prompt(model.config.vocab)
  chain = kvr.Runahead(model, peers, tile=TILE)
  odd = (20, 13, 9) if me != 1 else (19, 14, 9)
  self.note("odd partition", refused(lambda: chain.read(ids, odd)))
  other = ids if me != 2 else np.roll(ids, 1)
  self.note("odd tokens", refused(lambda: chain.read(other, (20, 13, 9))))
  bad = kvr.Runahead(model, peers, tile=TILE, dtype="bfloat16" if me else None)
  self.note("odd cache", refused(lambda: bad.read(ids, (20, 13, 9))))
  for n, wrong in enumerate([(20, 20), (20, 13, 8, 1), (42, 0), (43, -1)]):
    self.note(f"wrong {n}", refused(lambda wrong=wrong: chain.read(ids, wrong)))

  half = (20, 22) if me != 1 else (20, 23)
  self.note("one refuses", refused(lambda: chain.read(ids, half)))

  # The last rank begins its first layer when the others are in their last.
  def late(layer: int) -> None:
    if me < 2:
      self.flag(f"in {layer}")
    elif layer == 0:
      self.wait_for(f"in {len(chain.programs.layers) - 1}", 0, 1)
      time.sleep(0.2)

  reading = chain.read(ids, (20, 13, 9), pause=late)
  self.note("late kvr", spans(reading))
  slow = lambda layer: time.sleep(0.5 if me == 2 else 0)
  rows = np.array([[TOKENS - 1]], np.int32)
  want = np.asarray(model(ids[None], rows=rows)[:, 0])
  for method in lockstep.METHODS:
    one = lockstep.LockstepPrefill(whole, peers, method, mesh=mesh)
    reading = one.read(ids, pause=slow if method == "tsp" else kvr.nothing)
    self.note(
      method, {"logits": far(reading.logits, want), "spans": spans(reading)}
    )
  peers.gather("before faults")

  # Rank 1 stops in its second layer, and wakes when it has been given up.
  group = Peers.of_processes(timeout_s=2.0)
  chain = kvr.Runahead(model, group, tile=TILE)

  def stop(layer: int) -> None:
    while me == 1 and layer == 1 and group.failure is None:
      time.sleep(0.05)

  self.note("stuck", refused(lambda: chain.read(ids, (20, 13, 9), pause=stop)))
  peers.gather("before the last fault")

  # Rank 2 dies in its second layer.
  group = Peers.of_processes(timeout_s=60.0)
  chain = kvr.Runahead(model, group, tile=TILE)

  def die(layer: int) -> None:
    if me == 2 and layer == 1:
      os.kill(os.getpid(), signal.SIGKILL)

  self.note("dead", refused(lambda: chain.read(ids, (20, 13, 9), pause=die)))
  self.note("done", True)
  if me == 0:
    # JAX's own service runs here.
    self.flag("over")
    self.wait_for("over", 1)
  else:
    self.flag("over")
  os._exit(0)


def spans(reading) -> list:
  """(name, start, end), by one clock."""
  return [[s.name, s.start_s, s.end_s] for s in reading.outcome.timeline.spans]


if __name__ == "__main__":
  main(*sys.argv[1:])
