"""Measures the current devices: products, attention, memory, links.

Guarantees: every device does the same at the same time, so that shared
resources (cores of one processor, a memory, a switch) are measured under the
load of all. A send is timed as the difference between programs of many sends
and of one, so that the cost of a program is not counted as latency.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.bench import timing
from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.ops.attention.api import blockwise_attention
from ringjax.parallel import collectives, memory
from ringjax.parallel.chips import Machine, machine_of, number_bytes
from ringjax.plan import machines

# Sends of a program: minus the one send of another program, 16 are timed.
_MANY = 17
_HEADS, _HEAD_DIM = 4, 64

Samples = list[tuple[float, float]]


def measure(
  mesh: Mesh,
  *,
  name: str,
  dtype: str = "float32",
  tokens: Sequence[int] = (256, 512, 1024),
  nbytes: Sequence[int] = (1 << 16, 1 << 20, 1 << 22),
  sides: Sequence[int] = (256, 512, 1024),
  rounds: int = 5,
  stream: TextIO | io.TextIOBase | None = None,
) -> Machine:
  """Measures a mesh's devices and the links along each of its axes.

  Args:
    mesh: Mesh of the devices; axes of one device have no links.
    name: Name of the machine.
    dtype: Dtype of the local algorithm's operands.
    tokens: Numbers of queries, and of keys, of calls of the local algorithm.
    nbytes: Sizes of sent arrays, in bytes of a device's shard.
    sides: Sides of the square matrices whose products are timed.
    rounds: Timed runs of each.
    stream: Stream for progress; default stderr.

  Raises:
    OptionError: If a count is too small, a call fails, or times are noise.
  """
  positive_int("rounds", rounds)
  number_bytes(dtype)
  for option, counts in (
    ("tokens", tokens),
    ("bytes", nbytes),
    ("sides", sides),
  ):
    minimum = 2 if option != "bytes" else 1024
    if len({integer(option, n, least=minimum) for n in counts}) < 2:
      raise OptionError(
        option,
        list(counts),
        "two sizes or more",
        f"pass another size of {option}",
      )
  axes = [axis for axis, size in mesh.shape.items() if size > 1]
  if not axes:
    raise OptionError(
      "mesh",
      f"{dict(mesh.shape)}",
      "two devices or more along an axis",
      "pass a mesh with links to measure",
    )
  runs: dict[str, Callable[[], Any]] = {}
  put = functools.partial(_on_all, mesh)
  runs["call"] = put(lambda x: x, (8,), "float32")
  for kind in dict.fromkeys(("float32", "bfloat16", dtype)):
    for side in sides:
      runs[f"product {kind} {side}"] = put(_product, (side, side), kind)
  for count in tokens:
    shape = (1, count, _HEADS, _HEAD_DIM)
    runs[f"forward {count}"] = put(_attention, shape, dtype)
    runs[f"both {count}"] = put(_gradient, shape, dtype)
  for size in nbytes:
    # Larger than any CPU cache, as the arrays of a long sequence are.
    runs[f"copy {size}"] = put(lambda x: x + 1, (4 * size,), "float32")
  for axis in axes:
    for size in nbytes:
      shape = (mesh.shape[axis], -(-size // 4 // mesh.shape[axis]))
      for times in (1, _MANY):
        for kind, send in _SENDS.items():
          f = functools.partial(_repeat, send, axis, times)
          runs[f"link {axis} {kind} {size} {times}"] = put(f, shape, "float32")
  timings = timing.timed(runs, rounds, stream)

  # The minimum: other work on the machine can only add time.
  seconds = lambda *label: min(timings[" ".join(map(str, label))].seconds)
  call_s = seconds("call")
  net = lambda *label: seconds(*label) - call_s
  forward = [(4.0 * _pairs(n), net("forward", n)) for n in tokens]
  backward = [
    (10.0 * _pairs(n), net("both", n) - net("forward", n)) for n in tokens
  ]
  products = {
    kind: [(2.0 * n**3, net("product", kind, n)) for n in sides]
    for kind in dict.fromkeys(("float32", "bfloat16", dtype))
  }

  def sends(axis: str, kind: str, share: float) -> Samples:
    send_s = lambda size: (
      seconds("link", axis, kind, size, _MANY)
      - seconds("link", axis, kind, size, 1)
    ) / (_MANY - 1)  # fmt: skip
    return [(share * size, send_s(size)) for size in nbytes]

  links = {}
  for axis in axes:
    size = mesh.shape[axis]
    links[axis] = machines.LinkTimes(
      size=size,
      one_way=sends(axis, "one", 1.0),
      two_way=sends(axis, "both", 1.0),
      # Each device already holds its part of the gathered array.
      gather=sends(axis, "gather", (size - 1) / size),
      exchange=sends(axis, "exchange", (size - 1) / size),
      noise_s=call_s / (_MANY - 1),
    )
  device = mesh.devices.flat[0]
  return machines.fitted(
    name,
    products=products,
    forward=forward,
    backward=backward,
    links=links,
    copies=[(8.0 * 4 * n, net("copy", n)) for n in nbytes],
    memory_bytes=_memory_bytes(device, mesh.devices.size),
    call_s=call_s,
    dtype=dtype,
    source=(
      f"measured on {mesh.devices.size} {device.device_kind}, all at once, "
      f"{dtype}, the least of {rounds} rounds"
    ),
  )


def link_rates(
  mesh: Mesh,
  *,
  nbytes: int,
  rounds: int = 3,
  stream: TextIO | io.TextIOBase | None = None,
) -> dict[tuple[str, str], float]:
  """Measures what a device sends along each axis, in bytes per second.

  Args:
    mesh: Mesh of the devices; axes of one device have no links.
    nbytes: Bytes of a device's shard.
    rounds: Timed runs of each.
    stream: Stream for progress; default stderr.

  Returns:
    Rates by axis and kind: "one", a permute to a neighbour; "gather"; "sum", of
    which a ring sends each part twice. Not a number if the time is noise.

  Raises:
    OptionError: If a run fails.
  """
  run_names = {
    (axis, kind): f"{kind} along {axis}"
    for axis, size in mesh.shape.items()
    for kind in ("one", "gather", "sum")
    if size > 1
  }
  runs: dict[str, Callable[[], Any]] = {}
  for (axis, kind), label in run_names.items():
    shape = (mesh.shape[axis], -(-nbytes // 4 // mesh.shape[axis]))
    for times in (1, _MANY):
      f = functools.partial(_repeat, (_SENDS | _SUMS)[kind], axis, times)
      runs[f"{label}, {times}"] = _on_all(mesh, f, shape, "float32")
  timings = timing.timed(runs, rounds, stream)
  rates = {}
  for (axis, kind), label in run_names.items():
    size = mesh.shape[axis]
    share = {"one": 1.0, "gather": (size - 1) / size}
    share["sum"] = 2 * share["gather"]
    many, single = (min(timings[f"{label}, {n}"].seconds) for n in (_MANY, 1))
    send_s = (many - single) / (_MANY - 1)
    rates[axis, kind] = (
      share[kind] * nbytes / send_s if send_s > 0 else float("nan")
    )
  return rates


def read_rate(
  device: jax.Device,
  *,
  nbytes: int,
  rounds: int = 5,
  stream: TextIO | io.TextIOBase | None = None,
) -> float:
  """Measures the bytes per second at which a device reads an array once.

  The faster of a sum and of a matrix times a vector.

  Args:
    device: Device of this process.
    nbytes: Bytes of the array.
    rounds: Timed runs of each.
    stream: Stream for progress; default stderr.

  Raises:
    OptionError: If a run fails.
  """
  # Sums of ints may be reordered, so that CPUs add vectors of them too.
  total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.int32))
  product = jax.jit(lambda x, y: x @ y)
  put = lambda shape, dtype: jax.device_put(jnp.ones(shape, dtype), device)
  columns = 1024
  matrix = put((nbytes // 4 // columns, columns), jnp.float32)
  vector, ints = put(columns, jnp.float32), put(nbytes // 4, jnp.int32)
  few = put(8, jnp.int32)
  runs = {
    "sum": lambda: total(ints),
    "product": lambda: product(matrix, vector),
    "call": lambda: total(few),
  }
  timings = timing.timed(runs, rounds, stream)
  fastest_s = lambda name: min(timings[name].seconds)
  read_s = min(fastest_s("sum"), fastest_s("product")) - fastest_s("call")
  return nbytes / read_s if read_s > 0 else math.nan


def _pairs(count: int) -> float:
  return float(count) ** 2 * _HEADS * _HEAD_DIM


def _on_all(
  mesh: Mesh, f: Callable[[Any], Any], shape: Sequence[int], dtype: str
) -> Callable[[], Any]:
  """Compiles a run of `f` on an array of `shape` on every device."""
  spec = P(mesh.axis_names)
  every = (mesh.devices.size * shape[0], *shape[1:])
  operand = jax.jit(
    lambda: jnp.full(every, 0.01, jnp.dtype(dtype)),
    out_shardings=jax.sharding.NamedSharding(mesh, spec),
  )()
  # check_vma: attention's loops carry both varying and replicated arrays.
  run = jax.jit(
    jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
  ).lower(operand).compile()  # fmt: skip
  return lambda: run(operand)


def _product(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.matmul(x, x, precision=exact)


def _attention(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  return blockwise_attention(x, x, x)


def _gradient(x: Shaped[Array, " ..."]) -> Shaped[Array, " ..."]:
  out, pull = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v), x, x, x)
  dq, dk, dv = pull(out)
  return dq + dk + dv


_SENDS: dict[str, Callable[[Any, str], Any]] = {
  "one": lambda x, axis: collectives.rotate(x, axis, 1),
  "both": lambda x, axis: (
    collectives.rotate(x, axis, 1) + collectives.rotate(x * 2, axis, -1)
  ),
  # Each device gathers one row of every other: the shape stays the same.
  "gather": lambda x, axis: collectives.gather(x[:1], axis, 0),
  "exchange": lambda x, axis: collectives.exchange(x, axis, 0, 0),
}

# `measure` needs no sums: the cost model has none.
_SUMS: dict[str, Callable[[Any, str], Any]] = {
  # The mean, so that repeated sums stay finite.
  "sum": lambda x, axis: (
    collectives.total(x, axis) / collectives.axis_size(axis)
  ),
}


def _repeat(
  send: Callable[[Any, str], Any],
  axis: str,
  times: int,
  x: Shaped[Array, " ..."],
) -> Shaped[Array, " ..."]:
  """Runs `times` sends, each of the array that the previous one received."""
  return jax.lax.fori_loop(
    0, times, lambda _, a: collectives.vary(send(a, axis), (axis,)), x
  )


def _memory_bytes(device: Any, devices: int) -> float:
  """Memory of a device; that of its data sheet if it does not report one."""
  total = memory.device_memory(device, devices).total
  sheet = machine_of(device.device_kind, device.platform).chip
  return float(sheet.hbm_bytes if total is None else total)
