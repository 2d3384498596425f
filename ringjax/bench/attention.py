"""How fast causal attention is: ours and what else one would pick.

Law: in each row all contestants get the same numbers, placed where they want
them before the clock starts, and run in turn (see `timing`), one round before
those that are timed unless runs are long. Each is first checked against float32
blockwise attention on one device: one whose result is off is reported as WRONG
and not timed. Work counts unmasked pairs only:
2 T T H N FLOPs forward (half of a full square's 4), and 3.5 times that
forward and backward. Whoever computes masked tiles pays for it.

On CPU the devices of a mesh are virtual: they share the cores of the
contestants on one device, so that the sharded ones cannot win by having more
hardware. They also make XLA use as many threads as there are devices, which is
no part of computing on one: who does has a process with one device (see
`alone`). What eight devices lose against it is lost to threads, cutting and
sending; *shared* is one device in the process that has all, and tells the
first of these from the others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench import alone, contest, timing
from ringjax.bench.alone import Alone
from ringjax.bench.contest import best
from ringjax.bench.timing import Skipped, Timing
from ringjax.ops.attention import api
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.gather import Gather
from ringjax.parallel.layout import Striped
from ringjax.parallel.mesh import make_mesh

Attend = Callable[[Any, Any, Any], Any]

# Those that keep a T x T array of scores for each head.
_DENSE_TOKENS = 8192

# Of the largest number of the reference, or of 1 where that is smaller. Wide
# enough in bfloat16 for a peer that also accumulates in it.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

PASSES = ("fwd", "fwdbwd")
# FLOPs from which on a contestant is not run once more before it is timed.
_LONG = 3e12


@dataclasses.dataclass(frozen=True)
class Case:
  """One row: the work that all contestants do."""

  dtype: str
  head_dim: int
  tokens: int
  backward: bool
  heads: int = 8
  devices: int = 8

  @property
  def flops(self) -> float:
    forward = 2.0 * self.tokens**2 * self.head_dim * self.heads
    return forward * (3.5 if self.backward else 1)

  def __str__(self) -> str:
    return (
      f"{'fwd+bwd' if self.backward else 'fwd'} {self.dtype} "
      f"T={self.tokens} N={self.heads} H={self.head_dim}"
    )


@dataclasses.dataclass(frozen=True)
class Ready:
  """A contestant with its inputs in place.

  Attributes:
    run: does the work of the case once.
    outputs: brings what `run` returns into the order [B, T, N, H] of the
      inputs, as NumPy arrays: (out,) or (dq, dk, dv).
  """

  run: Callable[[], Any]
  outputs: Callable[[Any], tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Contestant:
  """Someone who computes attention.

  Attributes:
    ready: puts inputs (q, k, v, do) of a case in place.
    sharded: whether it runs on all devices, or on one.
    ours: whether it is this package.
    alone: whether it wants a process in which there is one device.
    load: imports what it needs.
  """

  ready: Callable[[Case, Sequence[np.ndarray]], Ready]
  sharded: bool
  ours: bool
  alone: bool = False
  load: Callable[[], Any] = lambda: None


def _jitted(
  attend: Attend, case: Case, arrays: Sequence[np.ndarray], sharding: Any
) -> Ready:
  """A JAX function with arrays placed by `sharding`."""
  q, k, v, do = (jax.device_put(x, sharding) for x in arrays)
  if case.backward:
    # The gradient of sum(out * do).
    f = lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do)
    f, args = jax.jit(f, out_shardings=sharding), (q, k, v, do)
  else:
    f, args = jax.jit(attend, out_shardings=sharding), (q, k, v)
  return Ready(lambda: f(*args), contest.numpy)


def _one_device() -> SingleDeviceSharding:
  return SingleDeviceSharding(jax.devices()[0])


def _mesh(case: Case) -> Mesh:
  devices = jax.devices()[: case.devices]
  return make_mesh(
    (case.devices,), ("seq",), devices=devices, axis_types=AxisType.Auto
  )


def _over(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P(None, "seq"))


def _blockwise(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  attend = functools.partial(api.blockwise_attention, is_causal=True)
  return _jitted(attend, case, arrays, _one_device())


def _narrow(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  """The same, whatever the processor: products of bfloat16 themselves."""
  if case.dtype != "bfloat16":
    raise Skipped("skipped: bfloat16 only")
  attend = functools.partial(
    api.dot_product_attention,
    strategy=Gather(Blockwise(wide=False)),
    is_causal=True,
  )
  return _jitted(attend, case, arrays, _one_device())


def _ring(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  mesh = _mesh(case)
  attend = functools.partial(
    api.ring_attention, mesh=mesh, axis="seq", is_causal=True
  )
  return _jitted(attend, case, arrays, _over(mesh))


def _striped(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  mesh, layout = _mesh(case), Striped()
  attend = functools.partial(
    api.striped_attention, mesh=mesh, axis="seq", is_causal=True
  )
  permuted = layout.permute(list(arrays), shards=case.devices)
  ready = _jitted(attend, case, permuted, _over(mesh))
  restored = lambda outputs: layout.restore(
    contest.numpy(outputs), shards=case.devices
  )
  return Ready(ready.run, restored)


def _gather(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  mesh = _mesh(case)
  attend = functools.partial(
    api.dot_product_attention,
    mesh=mesh,
    axis="seq",
    strategy="gather",
    is_causal=True,
  )
  return _jitted(attend, case, arrays, _over(mesh))


def import_ringattention() -> Any:
  if not hasattr(jax.lib, "xla_bridge"):
    # It asks JAX for a module that is gone since 0.8; this one name of it is
    # all that it needs to be imported.
    backend = importlib.import_module("jax.extend.backend")
    bridge = types.SimpleNamespace(get_backend=backend.get_backend)
    setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010
  return importlib.import_module("ringattention")


def ring_options(chunk: int, dtype: Any) -> dict[str, Any]:
  """What `ringattention` wants to know beside its operands, for causal rows."""
  return dict(
    causal_block_size=1,
    deterministic=True,
    dropout_rng=None,
    attn_pdrop=0.0,
    query_chunk_size=chunk,
    key_chunk_size=chunk,
    dtype=jnp.dtype(dtype),
    policy=jax.checkpoint_policies.nothing_saveable,
    precision=None,
    prevent_cse=True,
  )


def _ringattention(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  """`ringattention` 0.1.2 from PyPI (Liu et al. 2023)."""
  peer = import_ringattention().ringattention
  mesh = _mesh(case)
  # 256 is its best chunk on the CPUs where this was tried.
  chunk = min(256, case.tokens // case.devices)
  options = ring_options(chunk, case.dtype)
  local = lambda q, k, v: peer(q, k, v, None, None, None, "seq", False, options)
  spec = P(None, "seq")
  attend = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(spec, spec, spec),
    out_specs=spec,
    check_vma=False,
  )
  return _jitted(attend, case, arrays, _over(mesh))


def _ringattention_of_one(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  """The same on one device: its blockwise attention, which nothing leaves."""
  return _ringattention(dataclasses.replace(case, devices=1), arrays)


def _check_dense(case: Case) -> None:
  if case.tokens > _DENSE_TOKENS:
    raise Skipped(f"skipped: T x T scores, only tried up to T={_DENSE_TOKENS}")


def _jax_nn(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  _check_dense(case)
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  return _jitted(attend, case, arrays, _one_device())


def _xla_allgather(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  """Plain jax.nn with sharded operands: XLA's partitioner gathers the keys."""
  _check_dense(case)
  if case.dtype != "float32":
    raise Skipped("skipped: float32 only")
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  return _jitted(attend, case, arrays, _over(_mesh(case)))


def _import_torch() -> Any:
  return importlib.import_module("torch")


def _torch(case: Case, arrays: Sequence[np.ndarray]) -> Ready:
  """PyTorch's scaled_dot_product_attention on the CPU."""
  torch = _import_torch()
  torch.set_num_threads(os.cpu_count() or 1)
  dtype = getattr(torch, case.dtype)
  to_torch = lambda x: (
    torch.from_numpy(x.astype(np.float32))
    .to(dtype)
    .transpose(1, 2)
    .contiguous()
  )
  q, k, v, do = map(to_torch, arrays)
  sdpa = torch.nn.functional.scaled_dot_product_attention

  def forward() -> Any:
    with torch.no_grad():
      return (sdpa(q, k, v, is_causal=True),)

  def both() -> Any:
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(*operands, is_causal=True)
    return torch.autograd.grad(out, operands, do)

  outputs = lambda xs: tuple(x.transpose(1, 2).float().numpy() for x in xs)
  return Ready(both if case.backward else forward, outputs)


CONTESTANTS: dict[str, Contestant] = {
  "blockwise": Contestant(_blockwise, sharded=False, ours=True, alone=True),
  "shared": Contestant(_blockwise, sharded=False, ours=True),
  "narrow": Contestant(_narrow, sharded=False, ours=True, alone=True),
  "ring": Contestant(_ring, sharded=True, ours=True),
  "striped": Contestant(_striped, sharded=True, ours=True),
  "gather": Contestant(_gather, sharded=True, ours=True),
  "ringattention": Contestant(
    _ringattention, sharded=True, ours=False, load=import_ringattention
  ),
  "ringattention_1": Contestant(
    _ringattention_of_one,
    sharded=False,
    ours=False,
    alone=True,
    load=import_ringattention,
  ),
  "jax.nn": Contestant(_jax_nn, sharded=False, ours=False, alone=True),
  "xla_allgather": Contestant(_xla_allgather, sharded=True, ours=False),
  "torch": Contestant(_torch, sharded=False, ours=False, load=_import_torch),
}

# What stands for us in the comparisons.
_BEST_OF = ("blockwise", "ring", "striped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to run; every combination is a row."""

  tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
  head_dims: tuple[int, ...] = (64, 128)
  dtypes: tuple[str, ...] = ("float32", "bfloat16")
  passes: tuple[str, ...] = PASSES
  contestants: tuple[str, ...] = tuple(CONTESTANTS)
  heads: int = 8
  rounds: int = 5
  devices: int = 8

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={
        "dtypes": tuple(TOLERANCE),
        "passes": PASSES,
        "contestants": tuple(CONTESTANTS),
      },
      counts=("tokens", "head_dims", "heads", "rounds", "devices"),
    )

  @property
  def cases(self) -> list[Case]:
    return [
      Case(dtype, head_dim, tokens, one == "fwdbwd", self.heads, self.devices)
      for dtype, head_dim, tokens, one in itertools.product(
        self.dtypes, self.head_dims, self.tokens, self.passes
      )
    ]


QUICK = Settings(tokens=(4096,), head_dims=(64,), dtypes=("float32",), rounds=3)


def run(
  settings: Settings,
  *,
  command: str = "",
  json: str | None = None,
  plot: str | None = None,
  append: bool = False,
) -> dict[str, Any]:
  """Runs the benchmark; prints, writes and returns the result.

  Args:
    settings: what to run.
    command: the command line, for the record.
    json: file for the result; rewritten after every row.
    plot: file for a picture of all rows; needs matplotlib.
    append: keeps what `json` holds already, but for rows that run anew.
  """
  record = contest.Record(
    "attention",
    settings,
    order=_order,
    summary=summary,
    command=command,
    json=json,
    plot=plot,
    append=append,
  )
  contest.load(CONTESTANTS[name] for name in settings.contestants)
  cases = settings.cases
  progress = timing.Progress(sum(c.flops for c in cases))
  done = 0.0
  with Alone() as process:
    for case in cases:
      row = _row(case, settings, progress, done, process)
      done += case.flops
      record.add(row, last=case is cases[-1])
      progress.clear()
      print(_table(case, row), flush=True)
  result = record.result
  print(_summary_table(result["summary"]), flush=True)
  if plot is not None:
    draw(result, plot)
  return result


def _inputs(case: Case) -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  shape = (1, case.tokens, case.heads, case.head_dim)
  dtype = jnp.dtype(case.dtype)
  draw = lambda: rng.standard_normal(shape, np.float32).astype(dtype)
  return [draw() for _ in range(4)]


def made(name: str, case: Case) -> contest.Made:
  """A contestant of a case, and what came out the first time."""
  CONTESTANTS[name].load()
  ready = CONTESTANTS[name].ready(case, _inputs(case))
  # The first call, with its compilation, is the warm-up as well.
  return ready.run, ready.outputs(jax.block_until_ready(ready.run()))


def _row(
  case: Case,
  settings: Settings,
  progress: timing.Progress,
  done: float,
  process: Alone,
) -> dict[str, Any]:
  """Checks and times all contestants on one case."""
  names = settings.contestants
  warmup = int(case.flops < _LONG)
  steps = contest.steps(names, warmup + settings.rounds)

  def report(step: int, label: str) -> None:
    progress.at(done + case.flops * step / steps, f"{case}: {label}")

  report(0, "reference")
  wide = dataclasses.replace(case, dtype="float32")
  arrays = [x.astype(np.float32) for x in _inputs(case)]
  base = _blockwise(wide, arrays)
  reference = base.outputs(base.run())
  del base, arrays

  def make(name: str) -> contest.Made:
    if CONTESTANTS[name].alone and alone.serves():
      return process.make(f"{__name__}:{made.__name__}", name, case)
    return made(name, case)

  timings, differences = contest.run(
    names,
    make,
    lambda outputs: contest.compare(outputs, reference, TOLERANCE[case.dtype]),
    settings.rounds,
    report,
    {"gemm": timing.gemm(case.dtype)},
    warmup=warmup,
  )
  process.clear()
  return _record(case, names, timings, differences)


def _record(
  case: Case,
  names: Sequence[str],
  timings: dict[str, Timing],
  differences: dict[str, float],
) -> dict[str, Any]:
  gemm = timings["gemm"]
  assert gemm.median_s is not None, gemm.reason
  rate = timing.GEMM_FLOPS / gemm.median_s
  results = {}
  for name in names:
    one = timings[name]
    median = one.median_s
    results[name] = {
      "devices": case.devices if CONTESTANTS[name].sharded else 1,
      "median_s": median,
      "min_s": one.min_s,
      "gemm_percent": median and 100 * case.flops / median / rate,
      "max_abs_difference": differences.get(name),
      "seconds": list(one.seconds),
      "reason": one.reason,
    }
  return {
    "dtype": case.dtype,
    "head_dim": case.head_dim,
    "heads": case.heads,
    "tokens": case.tokens,
    "pass": "fwdbwd" if case.backward else "fwd",
    "flops": case.flops,
    "gemm": {
      "flops": timing.GEMM_FLOPS,
      "median_s": gemm.median_s,
      "min_s": gemm.min_s,
      "flops_per_s": rate,
      "seconds": list(gemm.seconds),
    },
    "results": results,
  }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Ratios of median times, ours over theirs: below 1 we are faster.

  "best" is our best of blockwise, ring and striped; "sharded" compares the
  better of ring and striped with peers that are sharded themselves; "loss" is
  what `devices` cost against one, ring and striped over blockwise, and "cut"
  what of it is not the threads': the same over one of the devices.
  """
  tables: dict[str, dict[str, list[float | None]]] = {}

  def add(table: str, name: str, ours: Sequence[str], theirs: str) -> None:
    ratios = []
    for row in rows:
      a, b = best(row, ours), best(row, [theirs])
      ratios.append(a[1] / b[1] if a and b else None)
    if any(r is not None for r in ratios):
      tables.setdefault(table, {})[name] = ratios

  sharded = [n for n in _BEST_OF if CONTESTANTS[n].sharded]
  for name, one in CONTESTANTS.items():
    if not one.ours:
      add("best", name, _BEST_OF, name)
      if one.sharded:
        add("sharded", name, sharded, name)
  for name in sharded:
    add("loss", name, [name], "blockwise")
    add("cut", name, [name], "shared")
  median = lambda xs: statistics.median(x for x in xs if x is not None)
  fastest = [best(row, _BEST_OF) for row in rows]
  return {
    "rows": [_label(row) for row in rows],
    "best_of_ours": [b and b[0] for b in fastest],
    **{
      table: {
        name: {"ratios": ratios, "median": median(ratios)}
        for name, ratios in columns.items()
      }
      for table, columns in tables.items()
    },
  }


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
  """What tells rows apart, in the order of the tables."""
  return (
    list(TOLERANCE).index(row["dtype"]),
    row["heads"],
    row["head_dim"],
    row["tokens"],
    PASSES.index(row["pass"]),
  )


def _label(row: dict[str, Any]) -> str:
  return (
    f"{row['pass']:6} {row['dtype']:8} T={row['tokens']:<6} H={row['head_dim']}"
  )


def _table(case: Case, row: dict[str, Any]) -> str:
  rate = row["gemm"]["flops_per_s"] / 1e9
  size = timing.GEMM_SIZE
  ms = 2e3 * size**3 / row["gemm"]["flops_per_s"]
  lines = [
    str(case),
    f"  {'gemm ' + str(size) + '^3':15}  1 device {ms:11.1f} ms   100 %   "
    f"{rate:.0f} GFLOP/s",
  ]
  more = lambda one: (
    f"{one['gemm_percent']:5.1f} %   best {one['min_s'] * 1e3:.1f} ms, "
    f"off by {one['max_abs_difference']:.0e}"
  )
  return "\n".join(lines + contest.lines(row, more)) + "\n"


_TITLES = {
  "best": "Time of our best (of blockwise, ring, striped) over a peer's",
  "sharded": "Time of the better of ring and striped over a sharded peer's",
  "loss": "Time on all devices over time on one (blockwise)",
  "cut": "Time on all devices over time on one of them (shared)",
}


def _summary_table(found: dict[str, Any]) -> str:
  lines = []
  for table, title in _TITLES.items():
    columns = found.get(table)
    if not columns:
      continue
    lines.append(title)
    widths = {name: max(len(name), 6) + 2 for name in columns}
    head = "".join(f"{name:>{widths[name]}}" for name in columns)
    lines.append(f"  {'':32}{head}")
    cell = lambda x, w: f"{'-' if x is None else format(x, '.2f'):>{w}}"
    for i, label in enumerate(found["rows"]):
      cells = [cell(c["ratios"][i], widths[n]) for n, c in columns.items()]
      note = f"  {found['best_of_ours'][i]}" if table == "best" else ""
      lines.append(f"  {label:32}{''.join(cells)}{note}")
    cells = [cell(c["median"], widths[n]) for n, c in columns.items()]
    lines.append(f"  {'median':32}{''.join(cells)}\n")
  return "\n".join(lines)


def draw(result: dict[str, Any], path: str) -> None:
  """Grouped bars: percent of the product's rate, a panel a dtype and pass."""
  figures = importlib.import_module("matplotlib.figure")
  rows = result["rows"]
  panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for row in rows:
    panels.setdefault((row["dtype"], row["pass"]), []).append(row)
  names = [
    name for name in CONTESTANTS if any(best(row, [name]) for row in rows)
  ]
  most = max(len(p) for p in panels.values())
  figure = figures.Figure(
    figsize=(max(9, 1.1 * most + 3), 2.6 * len(panels) + 0.8),
    layout="constrained",
  )
  axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
  ours = ["#08519c", "#9ecae1", "#c6dbef", "#3182bd", "#6baed6", "#bdd7e7"]
  peers = ["#d95f0e", "#fe9929", "#969696", "#cccccc", "#756bb1"]
  of = {True: iter(ours), False: iter(peers)}
  colors = {n: next(of[c.ours]) for n, c in CONTESTANTS.items()}
  width = 0.85 / max(len(names), 1)
  for ax, ((dtype, kind), members) in zip(axes, panels.items(), strict=True):
    for i, name in enumerate(names):
      found = [m["results"].get(name, {}) for m in members]
      heights = [f.get("gemm_percent") or 0 for f in found]
      x = np.arange(len(members)) + (i - (len(names) - 1) / 2) * width
      ax.bar(x, heights, width * 0.92, color=colors[name], label=name)
    ticks = [f"T={m['tokens']}\nH={m['head_dim']}" for m in members]
    ax.set_xticks(range(len(members)), ticks, fontsize=9)
    title = "forward" if kind == "fwd" else "forward + backward"
    ax.set_title(f"{title}, {dtype}", loc="left", fontsize=11)
    ax.set_ylabel(f"% of the {dtype}\nmatrix product", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
  if names:
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
      handles, labels, loc="outside lower center", ncols=4, frameon=False
    )
  figure.savefig(path, dpi=150)
  print(f"wrote {path}", file=sys.stderr)
