"""Times the products of a mixture's experts: blocks, and `jax.lax.ragged_dot`.

Three maps, down(silu(gate x) * up x), of the rows of each expert: "blocks" is
`ops.experts.moe.mix`, which the models use; "ragged" sorts rows by expert and calls
`ragged_dot` three times. Both are timed in turn, forward and backward, with
weights in float32, in bfloat16, and as int8 codes with a scale for each output
(forward; "ragged" has to decode all experts first). Prints a JSON object with
medians in seconds, the ratio of "ragged" to "blocks", and the largest
difference of the outputs, relative to the largest output. With --compile=SLICE
nothing runs: the forward pass is compiled for one chip, and bytes and estimated
cycles are printed, also of "megablox", JAX's grouped product for TPUs.

  python -m benchmarks.model.expert_products --tokens=256 --experts=32
  python -m benchmarks.model.expert_products --compile=v5p:1x1x1 --tokens=8192
      --experts=128 --chosen=8 --width=2048 --hidden=768
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ringjax.json_text import json_text
from ringjax.ops.experts.moe import mix
from ringjax.plan.compiler import aot


def decoded(map_: Any, dtype: Any) -> Array:
  """Weights [..., A, C] of codes and scales, or of floats."""
  if not isinstance(map_, tuple):
    return map_
  codes, scales = map_
  return codes.astype(dtype) * scales.astype(dtype)


def blocks(weights: PyTree, x: Array, chosen: Array, mixing: Array) -> Array:
  """Sum of each token's experts, by blocks of one expert each."""

  def f(expert: Array, rows: Array) -> Array:
    entry = jax.tree.map(lambda a: a[expert], weights)
    gate, up, down = (decoded(map_, rows.dtype) for map_ in entry)
    return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

  count = jax.tree.leaves(weights)[0].shape[0]
  return mix(f, x, chosen, mixing, count)


def ragged(weights: PyTree, x: Array, chosen: Array, mixing: Array) -> Array:
  """Sum of each token's experts, by `ragged_dot` of rows sorted by expert."""
  return grouped(lax.ragged_dot, weights, x, chosen, mixing)


def megablox(weights: PyTree, x: Array, chosen: Array, mixing: Array) -> Array:
  """Sum of each token's experts, by megablox' product, for TPUs alone."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  def product(a: Array, b: Array, sizes: Array) -> Array:
    # The largest tiles of which two fit into vector memory.
    tile = min(512, a.shape[0]), min(2048, a.shape[1]), min(1024, b.shape[2])
    return gmm(a, b, sizes, a.dtype, tile)

  return grouped(product, weights, x, chosen, mixing)


def grouped(
  product: Callable[..., Array],
  weights: PyTree,
  x: Array,
  chosen: Array,
  mixing: Array,
) -> Array:
  """Sum of each token's experts, by a product (rows, maps, rows of each)."""
  tokens, k = chosen.shape
  gate, up, down = (decoded(map_, x.dtype) for map_ in weights)
  order = jnp.argsort(chosen.reshape(-1), stable=True)
  sizes = jnp.zeros((gate.shape[0],), jnp.int32).at[chosen.reshape(-1)].add(1)
  rows = x[order // k]
  dot = lambda a, b: product(a, b, sizes)
  y = dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)
  y = y.astype(jnp.float32) * mixing.reshape(-1)[order][:, None]
  back = jnp.zeros((tokens * k, x.shape[1]), jnp.float32).at[order].set(y)
  return jnp.sum(back.reshape(tokens, k, -1), 1).astype(x.dtype)


WAYS = {"blocks": blocks, "ragged": ragged}


def problem(flags: argparse.Namespace, kind: str) -> tuple[Any, ...]:
  """Weights, tokens, choices and mixing weights."""
  draw = np.random.default_rng(0)
  dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float32
  e, d, f = flags.experts, flags.width, flags.hidden

  def weight(a: int, c: int) -> Any:
    if kind == "int8":
      codes = draw.integers(-127, 128, (e, a, c)).astype(np.int8)
      scale = np.full((e, 1, c), 1 / (64 * np.sqrt(a)), np.float32)
      return jnp.asarray(codes), jnp.asarray(scale)
    return jnp.asarray(draw.normal(size=(e, a, c)) / np.sqrt(a), dtype)

  weights = weight(d, f), weight(d, f), weight(f, d)
  x = jnp.asarray(draw.normal(size=(flags.tokens, d)), dtype)
  chosen = np.argsort(draw.random((flags.tokens, e)), 1)[:, : flags.chosen]
  mixing = draw.random(chosen.shape).astype(np.float32)
  return weights, x, jnp.asarray(chosen.astype(np.int32)), jnp.asarray(mixing)


def program(way: Callable[..., Array], *, backward: bool) -> Callable[..., Any]:
  """The compiled call, or its gradients by weights and tokens."""
  if not backward:
    return jax.jit(way)
  loss = lambda *args: jnp.sum(way(*args).astype(jnp.float32) ** 2)
  return jax.jit(jax.grad(loss, (0, 1)))


def measured(
  flags: argparse.Namespace, kind: str, *, backward: bool
) -> dict[str, float]:
  """Medians of both ways, taken in turn, and how they agree."""
  args = problem(flags, kind)
  calls = {name: program(way, backward=backward) for name, way in WAYS.items()}
  outputs = {
    name: jax.tree.leaves(jax.block_until_ready(call(*args)))
    for name, call in calls.items()
  }
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(flags.repeats):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call(*args))
      seconds[name].append(time.perf_counter() - start)
  medians = {name: statistics.median(x) for name, x in seconds.items()}
  wide = lambda x: np.asarray(x, np.float32)
  differences = [
    float(np.abs(wide(a) - wide(b)).max() / np.abs(wide(a)).max())
    for a, b in zip(outputs["blocks"], outputs["ragged"], strict=True)
  ]
  return medians | {
    "ratio": medians["ragged"] / medians["blocks"],
    "difference": max(differences),
  }


def built(
  devices: Sequence[Any], *, way: str, shape: Mapping[str, int]
) -> aot.Built:
  """Builds the forward pass in bfloat16 of a way, for one chip."""
  mesh = Mesh(np.asarray(devices[:1]), ("one",))
  at = NamedSharding(mesh, PartitionSpec())
  form = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=at)
  e, d, f, t, k = (
    shape[name] for name in ("experts", "width", "hidden", "tokens", "chosen")
  )
  weights = tuple(
    form(jnp.bfloat16, e, *sizes) for sizes in ((d, f), (d, f), (f, d))
  )
  arguments = (
    weights,
    form(jnp.bfloat16, t, d),
    form(jnp.int32, t, k),
    form(jnp.float32, t, k),
  )
  call = jax.jit((WAYS | {"megablox": megablox})[way])
  return aot.Built(function=call, arguments=arguments, mesh=mesh)


def compiled(flags: argparse.Namespace) -> dict[str, Any]:
  """Bytes and estimated cycles of each way, by the compiler."""
  shape = {
    name: getattr(flags, name)
    for name in ("experts", "width", "hidden", "tokens", "chosen")
  }
  ways = {}
  for way in (*WAYS, "megablox"):
    program = aot.compile(
      "benchmarks.model.expert_products:built",
      flags.compile,
      {"way": way, "shape": shape},
      code=True,
    )
    report, moved, time = program.report, program.traffic, program.time
    ways[way] = {
      "cycles": None if report is None else report.total_cycles,
      "code_s": None if time is None else time.core_s,
      "touched_s": None if time is None else time.touched_s,
      "most_s": None if time is None else time.most_s,
      "open": None if time is None else time.open,
      "bytes": None if moved is None else moved.total,
      "temporaries": None
      if program.memory is None
      else program.memory.temporaries,
    }
  return ways


def main() -> None:
  """Measures and prints all cases."""
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in dict(
    tokens=256, experts=32, chosen=4, width=256, hidden=128, repeats=9
  ).items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--compile")
  flags = parser.parse_args()
  if flags.compile:
    print(json_text({**vars(flags), "ways": compiled(flags)}))
    return
  cases = {
    f"{kind} {'backward' if backward else 'forward'}": measured(
      flags, kind, backward=backward
    )
    for kind in ("float32", "bfloat16", "int8")
    for backward in (False, True)
    # Codes have no gradient.
    if not (kind == "int8" and backward)
  }
  print(json_text({"platform": jax.default_backend(), **vars(flags),
                   "cases": cases}))  # fmt: skip


if __name__ == "__main__":
  main()
