"""The program of a process of test_placement_processes.py.

  python tests/models/placement_process.py PORT RANK FOLDER

Reads its own copy of the model, FOLDER/RANK, and prints what it found.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIXED = "device=.34,host=.34,disk=.32"
TOKENS = np.arange(2 * 8).reshape(2, 8) % 60


def same(a: Any, b: Any) -> bool:
  """Whether this process's parts of trees of arrays are equal to the bit."""
  parts = lambda tree: [
    np.asarray(shard.data)
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
  ]
  pairs = list(zip(parts(a), parts(b), strict=True))
  return bool(pairs) and all((x == y).all() for x, y in pairs)


def error_of(call: Callable[[], object]) -> str:
  """The error of a call in words."""
  from ringjax.errors import RingjaxError

  try:
    call()
  except RingjaxError as error:
    return f"{type(error).__name__} {error}"
  return ""


def main(rank: int, root: pathlib.Path) -> dict[str, object]:
  """Everything in one go: starting and compiling is what takes time."""
  import ringjax as rj
  from ringjax.models import cepe
  from ringjax.nn.weights.placed_layers import naming_faults

  # What is sharded over "model" is on both processes.
  mesh = rj.make_mesh((2, 2), ("model", "seq"))
  assert {d.process_index for d in mesh.devices[:, 0]} == {0, 1}
  folder, how = root / str(rank), rj.train.Lora(rank=2)

  @jax.jit
  def step(params: Any, frozen: Any) -> Any:
    def loss(params: Any) -> jax.Array:
      logits = how.model(params, frozen)(TOKENS)
      return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)

  def all_of(model: Any) -> tuple[Any, Any, Any]:
    new = rj.infer.generate(
      model, [[5, 6, 7, 8, 9], [3, 4, 1]], max_new_tokens=3
    )
    start = how.start(model)
    start = jax.tree.map(lambda x: x + jnp.asarray(0.01, x.dtype), start)
    return model(TOKENS), new.tokens.tolist(), step(start, model)

  load = lambda **more: rj.models.load(folder, mesh=mesh, **more)
  whole, model = load(), load(placement=MIXED)
  want, got = all_of(whole), all_of(model)
  report = model.placement_report()
  reads = sum(report.reads.values())
  found: dict[str, object] = {
    "logits": same(got[0], want[0]),
    "tokens": got[1] == want[1],
    "step": same(got[2], want[2]),
    "tiers": report.tiers,
    "share": report.bytes_read / (reads * report.disk_bytes),
    "host_share": report.host_bytes / report.disk_bytes,
    "buffers": report.peak_buffer_bytes <= report.buffer_bytes,
  }
  file = folder / "model.safetensors"
  data, times = file.read_bytes(), os.stat(file)
  if rank == 1:
    os.truncate(file, 1000)
  forget = model.stack.placed[0][0].disk[0].reader.release
  forget()
  answer = lambda: rj.infer.generate(model, [[5, 6]], max_new_tokens=3)
  found["read"] = [error_of(lambda: model(TOKENS)), error_of(answer)]
  found["load"] = [error_of(lambda: load(placement="disk"))]
  if rank == 1:
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

  def beside(*_: object) -> dict[str, dict[str, int]]:
    if rank == 1:
      raise rj.errors.CheckpointFormatError("nothing is known of the call")
    return {}

  # Before the weights are placed, and when all of them are read.
  found["load"] += [error_of(lambda: load(memory="1GiB", beside=beside))]
  encoder = folder / cepe.CONFIG
  if rank == 1:
    encoder.write_text("{")
  found["load"] += [error_of(load)]
  if rank == 1:
    encoder.unlink()

  def out_of_memory() -> None:
    with naming_faults(model.stack.faults):
      if rank == 1:
        raise rj.errors.OutOfMemoryError("none is left", nbytes=1)

  found["other"] = error_of(out_of_memory)
  forget()
  # Nothing is left over of an error for another call.
  found["after"] = same(model(TOKENS), want[0])
  return found


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  port, me = sys.argv[1], int(sys.argv[2])
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
  print("RESULT", json.dumps(main(me, pathlib.Path(sys.argv[3]))))
  jax.distributed.shutdown()
