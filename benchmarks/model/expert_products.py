"""Times the products of a mixture's experts: blocks, and `jax.lax.ragged_dot`.

Three maps, down(silu(gate x) * up x), of the rows of each expert: "blocks" is
`ops.experts.moe.mix`, which the models use; "ragged" sorts rows by expert and
calls `ragged_dot` three times. Both are timed in turn, forward and backward,
with weights in float32, in bfloat16, and as int8 codes with a scale for each
output (forward; "ragged" has to decode all experts first). Prints a JSON object
with medians in seconds, the ratio of "ragged" to "blocks", and the largest
difference of the outputs, relative to the largest output. With --compile=SLICE
nothing runs: a pass in bfloat16 is compiled for one chip, and its bytes and
cycles are printed, also of "kernel", the grouped product that models use on
TPUs, and of "megablox", JAX's own. Cycles are those of the machine code, for
the number of steps that tokens take which choose experts at random; all but
"kernel" decode all experts of --bits=8 or 4 first. A kernel whose number of
steps is not in its code is named in "open", and counts as one step.

  python -m benchmarks.model.expert_products --tokens=256 --experts=32
  python -m benchmarks.model.expert_products --compile=v5e:1x1 --tokens=4096
      --experts=128 --chosen=8 --width=2048 --hidden=768 --backward
  python -m benchmarks.model.expert_products --compile=v5p:1x1x1 --tokens=64
      --experts=32 --chosen=1 --width=7168 --hidden=2048 --bits=4
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from ringjax.json_text import json_text
from ringjax.ops.experts import grouped_product
from ringjax.ops.experts.grouped_product_tpu import (
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.ops.experts.moe import mix
from ringjax.parallel import chips
from ringjax.plan.compiler import aot

# Weights of an output that share a scale, of codes of 4 bits, and their levels.
GROUP = 64
LEVELS = tuple(range(-8, 8))


def decoded(map_: Any, dtype: Any) -> Float[Array, "*E A C"]:
  """Weights [..., A, C] of codes and scales, or of floats.

  Codes of 4 bits are [..., G, GROUP / 2, C], two in each number; those of a
  group's second half are its lower bits.
  """
  if not isinstance(map_, tuple):
    return map_
  codes, scales = map_
  if codes.dtype == jnp.uint8:
    codes = jnp.concatenate([codes >> 4, codes & 15], -2).astype(jnp.int32) - 8
    weights = codes.astype(dtype) * scales.astype(dtype)
    *lead, groups, size, outputs = weights.shape
    return weights.reshape(*lead, groups * size, outputs)
  return codes.astype(dtype) * scales.astype(dtype)


def expert_maps(map_: Any) -> ExpertMaps:
  """Weights of `decoded` in the form that the kernel for TPUs reads."""
  if not isinstance(map_, tuple):
    return ExpertMaps(stacked=map_)
  codes, scales = map_
  levels = LEVELS if codes.dtype == jnp.uint8 else None
  return ExpertMaps(stacked=codes, step=scales[..., 0, :], levels=levels)


def blocks(
  weights: PyTree, x: Array, chosen: Array, mixing: Array
) -> Float[Array, "T D"]:
  """Sum of each token's experts, by blocks of one expert each."""

  def f(expert: Array, rows: Array) -> Array:
    entry = jax.tree.map(lambda a: a[expert], weights)
    gate, up, down = (decoded(map_, rows.dtype) for map_ in entry)
    return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

  count = jax.tree.leaves(weights)[0].shape[0]
  return mix(f, x, chosen, mixing, count)


def ragged(
  weights: PyTree, x: Array, chosen: Array, mixing: Array
) -> Float[Array, "T D"]:
  """Sum of each token's experts, by `ragged_dot` of rows sorted by expert."""
  return grouped(lax.ragged_dot, weights, x, chosen, mixing)


def megablox(
  weights: PyTree, x: Array, chosen: Array, mixing: Array
) -> Float[Array, "T D"]:
  """Sum of each token's experts, by megablox' product, for TPUs alone."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm

  def product(a: Array, b: Array, sizes: Array) -> Array:
    # Tiles also have to fit the products of the backward pass.
    tile = megablox_tile(a.shape[0], b.shape[0], a.shape[1], b.shape[2])
    return gmm(a, b, sizes, a.dtype, tile)

  return grouped(product, weights, x, chosen, mixing)


def megablox_tile(
  rows: int, experts: int, inner: int, outer: int
) -> tuple[int, int, int]:
  """Tile of megablox: rows as the kernel's, the largest sides that fit."""
  size = GroupedProductTPU().block_rows(rows, experts)
  return max(128, size), min(1024, inner), min(1024, outer)


def kernel(
  weights: PyTree,
  x: Array,
  chosen: Array,
  mixing: Array,
  *,
  chip: str | None = None,
) -> Float[Array, "T D"]:
  """Sum of each token's experts, by the grouped product for TPUs."""

  def f(kernel: Any, weights: PyTree, rows: Array, blocks: Any) -> Array:
    gate, up, down = map(expert_maps, weights)
    h = grouped_product.gated(kernel, gate_of, rows, (gate, up), blocks)
    return grouped_product.products(kernel, h, (down,), blocks)[0]

  experts = grouped_product.GroupedExperts(
    kernel=GroupedProductTPU(chip=chip), f=f, weights=weights
  )
  count = jax.tree.leaves(weights)[0].shape[0]
  return mix(no_loop, x, chosen, mixing, count, grouped=experts)


def gate_of(gate: Array, up: Array) -> Float[Array, "n F"]:
  """Intermediate numbers of an expert."""
  return jax.nn.silu(gate) * up


def no_loop(expert: Array, rows: Array) -> Float[Array, "n D"]:
  """Takes the place of the function of one block, which is not called."""
  raise NotImplementedError


def grouped(
  product: Callable[..., Array],
  weights: PyTree,
  x: Array,
  chosen: Array,
  mixing: Array,
) -> Float[Array, "T D"]:
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


def steps_share(way: str, shape: Mapping[str, int]) -> float:
  """Share of the steps of a kernel's list that run, for random choices."""
  experts, k = shape["experts"], shape["chosen"]
  rows = shape["tokens"] * k
  draw = np.random.default_rng(0).random((shape["tokens"], experts))
  load = np.bincount(np.argsort(draw, 1)[:, :k].ravel(), minlength=experts)
  if way == "kernel":
    size = GroupedProductTPU().block_rows(rows, experts)
    return float((-(-load // size)).sum() / (-(-rows // size) + experts))
  size = megablox_tile(rows, experts, shape["width"], shape["hidden"])[0]
  ends = np.cumsum(load)
  visits = -(-ends // size) - (ends - load) // size
  return float(visits[load > 0].sum() / (rows // size + experts - 1))


def built(
  devices: Sequence[Any],
  *,
  way: str,
  shape: Mapping[str, int],
  backward: bool,
  bits: int = 16,
) -> aot.Built:
  """Builds a pass in bfloat16 of a way, for one chip; weights have `bits`."""
  mesh = Mesh(np.asarray(devices[:1]), ("one",))
  at = NamedSharding(mesh, PartitionSpec())
  form = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=at)
  e, d, f, t, k = (
    shape[name] for name in ("experts", "width", "hidden", "tokens", "chosen")
  )

  def weight(inputs: int, outputs: int) -> Any:
    if bits == 16:
      return form(jnp.bfloat16, e, inputs, outputs)
    if bits == 8:
      scales = form(jnp.float32, e, 1, outputs)
      return form(jnp.int8, e, inputs, outputs), scales
    groups = inputs // GROUP
    codes = form(jnp.uint8, e, groups, GROUP // 2, outputs)
    return codes, form(jnp.float32, e, groups, 1, outputs)

  weights = weight(d, f), weight(d, f), weight(f, d)
  arguments = (
    weights,
    form(jnp.bfloat16, t, d),
    form(jnp.int32, t, k),
    form(jnp.float32, t, k),
  )
  chip = chips.machine_name(devices[0].device_kind)
  ways = WAYS | {
    "megablox": megablox, "kernel": functools.partial(kernel, chip=chip)
  }  # fmt: skip
  return aot.Built(
    function=program(ways[way], backward=backward),
    arguments=arguments,
    mesh=mesh,
    facts={"tile_share": steps_share(way, shape)},
  )


def compiled(flags: argparse.Namespace) -> dict[str, Any]:
  """Bytes and cycles of each way, by the compiler."""
  shape = {
    name: getattr(flags, name)
    for name in ("experts", "width", "hidden", "tokens", "chosen")
  }
  ways = {}
  for way in flags.ways.split(","):
    program = aot.compile(
      "benchmarks.model.expert_products:built",
      flags.compile,
      {
        "way": way,
        "shape": shape,
        "backward": flags.backward,
        "bits": flags.bits,
      },
      code=True,
    )
    report, moved, time = program.report, program.traffic, program.time
    clock = chips.core(flags.compile).clock_hz
    ways[way] = {
      "estimated_cycles": None if report is None else report.total_cycles,
      "cycles": None if time is None else time.core_s * clock,
      "most_cycles": None if time is None else time.most_s * clock,
      "memory_cycles": None if time is None else time.touched_s * clock,
      "open": None if time is None else time.open,
      "slowest": None
      if time is None
      else [(x.name, x.least_s * clock * x.times) for x in time.operations],
      "bytes": None if moved is None else moved.total,
      "temporaries": None
      if program.memory is None
      else program.memory.temporaries,
    }
  return ways


def check_flags(parser: argparse.ArgumentParser, flags: Any) -> None:
  """Refuses flags that conflict."""
  if flags.bits != 16 and not flags.compile:
    parser.error("--bits needs --compile=SLICE, e.g. v5p:1x1x1")
  if flags.backward and flags.bits != 16:
    parser.error("codes have no gradient: leave out --backward, or --bits")
  inputs = (flags.width, flags.hidden)
  if flags.bits == 4 and any(size % GROUP for size in inputs):
    parser.error(f"--bits=4: --width and --hidden must be multiples of {GROUP}")


def main() -> None:
  """Measures and prints all cases."""
  parser = argparse.ArgumentParser(description=__doc__)
  for name, default in dict(
    tokens=256, experts=32, chosen=4, width=256, hidden=128, repeats=9
  ).items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--compile")
  parser.add_argument("--ways", default="blocks,kernel,ragged,megablox")
  parser.add_argument("--backward", action="store_true")
  parser.add_argument("--bits", type=int, default=16, choices=(16, 8, 4))
  flags = parser.parse_args()
  check_flags(parser, flags)
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
