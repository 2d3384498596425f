"""Decode steps over the same devices, as different meshes, in turn.

The model has random weights and the cache is full. On a CPU the devices are
virtual and share the cores:

  python -m benchmarks.attention.mesh_steps --slots=65536
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.bench import timing
from ringjax.infer import Greedy, decode
from ringjax.models import CachedAttention
from ringjax.ops.mask import Coords
from ringjax.parallel.mesh import make_cpu_devices

MODEL = {
  "model_type": "llama",
  "num_hidden_layers": 8,
  "hidden_size": 512,
  "intermediate_size": 1024,
  "num_attention_heads": 8,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "vocab_size": 1024,
  "max_position_embeddings": 1 << 20,
}


def stepper(axes: Sequence[tuple[str, int]], slots: int) -> Callable[[], Any]:
  """Return a function that decodes a token after a full cache.

  Args:
    axes: Names and sizes of the mesh axes, "seq" among them.
    slots: Slots of the cache; each step writes the last one again.
  """
  names, sizes = zip(*axes, strict=True)
  devices = jax.devices()[: math.prod(sizes)]
  mesh = rj.make_mesh(sizes, names, devices=devices)
  model = rj.models.create(MODEL, mesh=mesh)
  attend = CachedAttention(mesh=mesh, axis="seq")
  cache = model.init_cache(1, slots, sharding=attend)
  slot_table = cache.held
  pos = np.arange(slots, dtype=np.int32)[None]
  used = np.full((1, slot_table.shards), slot_table.local, np.int32)
  put = lambda x, like: jax.device_put(x, like.sharding)
  slot_table = dataclasses.replace(
    slot_table,
    at=Coords(put(pos, slot_table.at.pos), put(pos * 0 + 1, slot_table.at.seg)),
    used=put(used, slot_table.used),
    before=put(used, slot_table.before),
  )
  row = lambda value: jnp.full((1,), value, jnp.int32)
  state = decode.DecodeState(row(1), row(slots - 1), row(0) > 0, None)
  last = [dataclasses.replace(cache, held=slot_table).truncate(slots - 1)]

  def step() -> jax.Array:
    new, cache = decode.step(
      model, attend, Greedy(), last[0], state, row(-1), jnp.int32(slots)
    )
    last[0] = cache.truncate(slots - 1)
    return new.token

  return step


def main() -> None:
  """Prints the median time of a step on each mesh."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--meshes", default="seq:8,seq:2/model:4")
  parser.add_argument("--slots", type=int, default=65_536)
  parser.add_argument("--rounds", type=int, default=9)
  flags = parser.parse_args()
  make_cpu_devices(8)
  runs = {}
  for text in flags.meshes.split(","):
    axes = [part.split(":") for part in text.split("/")]
    runs[text] = stepper([(name, int(n)) for name, n in axes], flags.slots)
  first = None
  for text, times in timing.timed(runs, flags.rounds).items():
    median = statistics.median(times.seconds)
    first = first or median
    print(f"{text}: {1e3 * median:.0f} ms a token, {median / first:.2f} times")


if __name__ == "__main__":
  main()
