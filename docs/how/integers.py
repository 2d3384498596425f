"""Products of a map, of floats and of integers, side by side.

python docs/how/integers.py            times on this machine, interleaved
python docs/how/integers.py v5e:1x1    what the TPU compiler expects
python docs/how/integers.py DIR        losses and logits of a folder's model
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import pathlib
import statistics
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import ringjax as rj
from ringjax.data.text.tokenizer import Tokenizer
from ringjax.ops.integer_product import integer_product

# What `rj.infer.integer_model` is told.
SETTINGS = (
  {"shadow": 0},
  {"shadow": 16, "hot": 0.0},
  {"shadow": 16, "hot": 0.03},
  {"shadow": 16},
  {"shadow": 16, "prune": 0.85},
  {"shadow": 16, "scales": "tensor"},
)


def products() -> dict:
  """Functions of activations, a weight of floats, and one of integers."""
  return {
    "floats": lambda x, w, codes, scales: jnp.dot(x, w),
    "integers": lambda x, w, codes, scales: integer_product(
      x, codes, scales, jnp.float32(0.03)
    ).astype(x.dtype),
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
  calls = {name: jax.jit(f) for name, f in products().items()}
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
    for name, f in products().items()
  }
  ratio = lambda what: costs["integers"][what] / costs["floats"][what]
  return (
    f"{tokens:5} tokens: {ratio('optimal_seconds'):.2f} of bfloat16's time, "
    f"{ratio('bytes accessed'):.2f} of its bytes"
  )


def losses(folder: str) -> None:
  """Of 512 tokens of Python's sources, with ranges of 2,048 others."""
  model = rj.models.load(folder, dtype="float32")
  tokenizer = Tokenizer.load(folder)
  ids = lambda *modules: np.asarray(
    tokenizer.encode("".join(map(inspect.getsource, modules))), np.int32
  )
  ranges = rj.infer.activation_ranges(
    model, ids(argparse)[:2048].reshape(4, 512)
  )
  text = ids(heapq, textwrap)[None, :512]
  weights = lambda model: sum(x.nbytes for x in jax.tree.leaves(model.stack))

  def logits(model: rj.models.Transformer) -> tuple[jax.Array, float]:
    found = model(text)
    likely = jax.nn.log_softmax(found[0, :-1])
    return found, -float(likely[np.arange(511), text[0, 1:]].mean())

  want, loss = logits(model)
  print(f"float32: loss {loss:.4f}, {weights(model) / 1e6:.0f} MB", flush=True)
  for how in SETTINGS:
    made = rj.infer.integer_model(model, ranges, **how)
    got, loss = logits(made)
    far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    name = ", ".join(f"{key}={value}" for key, value in how.items())
    size = weights(made) / 1e6
    print(
      f"{name}: loss {loss:.4f}, logits {100 * far:.2f} % away, {size:.0f} MB",
      flush=True,
    )


if __name__ == "__main__":
  if sys.argv[1:] and pathlib.Path(sys.argv[1]).is_dir():
    losses(sys.argv[1])
    sys.exit()
  for count in (1, 256, 2048):
    print(
      expected(sys.argv[1], count) if sys.argv[1:] else measured(count),
      flush=True,
    )
