"""Products of a map, of floats and of integers, side by side.

python docs/how/integers.py            times on this machine, interleaved
python docs/how/integers.py v5e:1x1    what the TPU compiler expects
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from ringjax.ops.integer_product import integer_product


def products(shadow: int) -> dict:
  """Functions of activations, a weight of floats, and one of integers."""
  return {
    "floats": lambda x, w, codes, scales: jnp.dot(x, w),
    "integers": lambda x, w, codes, scales: integer_product(
      x, codes, scales, jnp.float32(0.03), shadow=shadow
    ),
  }


def shapes(tokens: int, size: tuple[int, int], dtype, sharding=None) -> tuple:
  inner, outer = size
  make = lambda shape, dtype: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding
  )
  return (
    make((tokens, inner), dtype),
    make((inner, outer), dtype),
    make((inner, outer), jnp.int8),
    make((outer,), jnp.float32),
  )


def measured(tokens: int, size: tuple[int, int] = (1024, 2816)) -> str:
  """Medians of 21 interleaved rounds."""
  keys = jax.random.split(jax.random.key(0), 3)
  x, w, codes, scales = shapes(tokens, size, jnp.float32)
  arrays = (
    jnp.clip(jax.random.normal(keys[0], x.shape), -3.5, 3.5),
    jax.random.normal(keys[1], w.shape),
    jax.random.randint(keys[2], codes.shape, -127, 128).astype(jnp.int8),
    jnp.ones(scales.shape),
  )
  calls = {name: jax.jit(f) for name, f in products(0).items()}
  times = {name: [] for name in calls}
  for round_ in range(22):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call(*arrays))
      if round_:
        times[name].append(time.perf_counter() - start)
  found = {name: statistics.median(ts) for name, ts in times.items()}
  ratio = found["integers"] / found["floats"]
  return f"{tokens:5} tokens: {ratio:.2f} of float32's time"


def expected(
  topology: str, tokens: int, size: tuple[int, int] = (4096, 14336)
) -> str:
  """By the cost analysis of the compiled programs."""
  found = topologies.get_topology_desc(
    platform="tpu",
    topology_name=topology,
    chips_per_host_bounds=(1, 1, 1),
  )
  place = jax.sharding.SingleDeviceSharding(found.devices[0])
  given = shapes(tokens, size, jnp.bfloat16, place)
  costs = {
    name: jax.jit(f).lower(*given).compile().cost_analysis()
    for name, f in products(0).items()
  }
  ratio = lambda what: costs["integers"][what] / costs["floats"][what]
  return (
    f"{tokens:5} tokens: {ratio('optimal_seconds'):.2f} of bfloat16's time, "
    f"{ratio('bytes accessed'):.2f} of its bytes"
  )


if __name__ == "__main__":
  for count in (1, 256, 2048):
    print(
      expected(sys.argv[1], count) if sys.argv[1:] else measured(count),
      flush=True,
    )
