"""The program of a process of test_placement_processes.py.

  python tests/models/placement_process.py PORT RANK FOLDER

Reads its own copy of the model, FOLDER/RANK, and prints what it found.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

PLACEMENTS = ("device=.34,host=.33,disk=.33", "disk")


def same(a: object, b: object) -> bool:
  """Whether this process's parts of trees of arrays are equal to the bit."""
  parts = lambda tree: [
    np.asarray(shard.data)
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
  ]
  pairs = list(zip(parts(a), parts(b), strict=True))
  return bool(pairs) and all((x == y).all() for x, y in pairs)


def main(rank: int, root: pathlib.Path) -> dict[str, object]:
  import ringjax as rj
  from ringjax.errors import RingjaxError

  def error_of(call: object) -> str:
    try:
      call()
    except RingjaxError as error:
      return f"{type(error).__name__} {error}"
    return ""

  # What is sharded over "model" is on both processes.
  mesh = rj.make_mesh((2, 2), ("model", "seq"))
  assert {d.process_index for d in mesh.devices[:, 0]} == {0, 1}
  folder = root / str(rank)
  tokens = np.arange(2 * 8).reshape(2, 8) % 60
  whole = rj.models.load(folder, mesh=mesh)
  how = rj.train.Lora(rank=2)

  @jax.jit
  def step(params: object, frozen: object) -> object:
    def loss(params: object) -> jax.Array:
      logits = how.model(params, frozen)(tokens)
      return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)

  def all_of(model: object) -> list[object]:
    new = rj.infer.generate(
      model, [[5, 6, 7, 8, 9], [3, 4, 1]], max_new_tokens=3
    )
    start = how.start(model)
    start = jax.tree.map(lambda x: x + jnp.asarray(0.01, x.dtype), start)
    return [model(tokens), new.tokens.tolist(), step(start, model)]

  import time

  began = time.time()
  say = lambda *x: print(
    rank, round(time.time() - began), *x, file=sys.stderr, flush=True
  )
  model = rj.models.load(folder, mesh=mesh, placement=PLACEMENTS[0])
  say("loaded")
  got = model(tokens)
  say("called", same(got, whole(tokens)))
  want = all_of(whole)
  say("want")
  found: dict[str, object] = {}
  for placement in PLACEMENTS:
    model = rj.models.load(folder, mesh=mesh, placement=placement)
    got = all_of(model)
    say("got")
    report = model.placement_report()
    far = [
      float(
        np.abs(np.asarray(x.addressable_data(0) - y.addressable_data(0))).max()
      )
      for x, y in zip(*map(jax.tree.leaves, (got[2], want[2])), strict=True)
    ]
    found[placement] = {
      "logits": same(got[0], want[0]),
      "tokens": got[1] == want[1],
      "step": same(got[2], want[2]),
      "far": max(far),
      "tiers": report.tiers,
      "shares": report.bytes_read / max(1, sum(report.reads.values())),
      "peak": report.peak_buffer_bytes <= report.buffer_bytes,
    }
  if rank == 1:
    os.truncate(folder / "model.safetensors", 1000)
  model.stack.placed[0][0].disk[0].reader.release()
  found["read"] = error_of(lambda: model(tokens))
  found["load"] = error_of(
    lambda: rj.models.load(folder, mesh=mesh, placement="disk")
  )
  # Nothing is left over of an error for another call.
  found["whole"] = same(whole(tokens), want[0])
  return found


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  port, me = sys.argv[1], int(sys.argv[2])
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
  print("FOUND", json.dumps(main(me, pathlib.Path(sys.argv[3]))))
  jax.distributed.shutdown()
