"""Times causal attention: ours and the implementations it is compared with.

Contestants are checked against float32 blockwise attention on one device. Work
counts unmasked pairs only: 2 T T H N FLOPs forward (half of a full square's 4),
and 3.5 times that forward and backward; an implementation that computes masked
tiles pays for it.

On CPU the devices of a mesh are virtual: they share the cores with the
contestants on one device, so that the sharded ones cannot win by more hardware.
They also make XLA use as many threads as there are devices; a contestant on one
device therefore runs in a process with one (see `one_device`). The loss of
eight devices against it is due to threads, sharding and sending; *shared* is
one device in the process that has all, and shows the effect of threads alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float

from benchmarks.shared import harness
from benchmarks.shared.harness import (
  PASSES,
  Report,
  Row,
  Runnable,
  Trial,
  option,
)
from ringjax.bench import timing
from ringjax.bench.timing import Skipped
from ringjax.ops.attention import api
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.parallel.layout import Striped
from ringjax.parallel.mesh import make_mesh

Attend = Callable[[Any, Any, Any], Any]
Arrays = Sequence[np.ndarray]

# Tokens up to which T x T scores of each head are tried.
DENSE_TOKENS = 8192

# As a fraction of the reference's largest number, or of 1 if that is larger.
# Wide enough in bfloat16 for a peer that also accumulates in bfloat16.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

# Cases of more FLOPs are timed without a warm-up round.
_LONG = 3e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
  """One row of the benchmark: causal attention of one shape and pass."""

  dtype: str
  head_dim: int
  tokens: int
  passes: str
  heads: int
  devices: int = 1

  @property
  def backward(self) -> bool:
    return self.passes == "fwdbwd"

  @property
  def pairs(self) -> float:
    """Number of unmasked pairs of a query and a key, of one head."""
    return self.tokens**2 / 2

  @property
  def flops(self) -> float:
    forward = 4.0 * self.pairs * self.head_dim * self.heads
    return forward * (3.5 if self.backward else 1)

  def __str__(self) -> str:
    return (
      f"{'fwd+bwd' if self.backward else 'fwd'} {self.dtype} "
      f"T={self.tokens} N={self.heads} H={self.head_dim}"
    )


def _jitted(
  attend: Attend, case: AttentionCase, arrays: Arrays, mesh: Mesh | None = None
) -> harness.Runnable:
  """Compiles a JAX function with arrays over a mesh, or on one device."""
  sharding = SingleDeviceSharding(jax.devices()[0])
  if mesh is not None:
    sharding = NamedSharding(mesh, P(None, "seq"))
  q, k, v, do = (jax.device_put(x, sharding) for x in arrays)
  if case.backward:
    # The gradient of sum(out * do).
    f = lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do)
    f, args = jax.jit(f, out_shardings=sharding), (q, k, v, do)
  else:
    f, args = jax.jit(attend, out_shardings=sharding), (q, k, v)
  run = lambda: f(*args)
  return harness.Runnable(run, lambda: harness.host_arrays(run()))


def _mesh(case: AttentionCase) -> Mesh:
  devices = jax.devices()[: case.devices]
  return make_mesh(
    (case.devices,), ("seq",), devices=devices, axis_types=AxisType.Auto
  )


def _sharded(
  attend: Callable[..., Any], **options: Any
) -> Callable[[AttentionCase, Sequence[np.ndarray]], Runnable]:
  """Builds an attention function over a mesh of all devices."""

  def build(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
    mesh = _mesh(case)
    call = functools.partial(
      attend, mesh=mesh, axis="seq", is_causal=True, **options
    )
    return _jitted(call, case, arrays, mesh)

  return build


def _blockwise(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  attend = functools.partial(api.blockwise_attention, is_causal=True)
  return _jitted(attend, case, arrays)


def _native_bfloat16(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  """Blockwise attention with bfloat16 products, on any processor."""
  if case.dtype != "bfloat16":
    raise Skipped("skipped: bfloat16 only")
  attend = functools.partial(
    api.dot_product_attention,
    strategy=Gather(Blockwise(wide=False)),
    is_causal=True,
  )
  return _jitted(attend, case, arrays)


def _striped(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  """Striped attention; its arrays are permuted before the clock starts."""
  layout, shards = Striped(), case.devices
  permuted = layout.permute(list(arrays), shards=shards)
  built = _sharded(api.striped_attention)(case, permuted)
  restored = lambda: layout.restore(built.check(), shards=shards)
  return harness.Runnable(built.run, restored)


def import_ringattention() -> types.ModuleType:
  """The module `ringattention`, which JAX since 0.8 needs help to import."""
  if not hasattr(jax.lib, "xla_bridge"):
    # It imports one name of a module that JAX has removed.
    backend = importlib.import_module("jax.extend.backend")
    bridge = types.SimpleNamespace(get_backend=backend.get_backend)
    setattr(jax.lib, "xla_bridge", bridge)  # noqa: B010
  return importlib.import_module("ringattention")


def published_attention(
  mesh: Mesh, axis: str, chunk: int, dtype: DTypeLike
) -> Any:
  """The causal attention of `ringattention` 0.1.2 (PyPI; Liu et al. 2023).

  Args:
    mesh: Mesh of the devices.
    axis: Mesh axis over which the sequence is sharded.
    chunk: Tokens of a tile, of queries and of keys.
    dtype: Dtype of the computation.

  Returns:
    A function of q, k and v [B, T, N, H].
  """
  peer = import_ringattention().ringattention
  options = dict(
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
  local = lambda q, k, v: peer(q, k, v, None, None, None, axis, False, options)
  part = P(None, axis)
  return jax.shard_map(
    local, mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=False
  )


def _ringattention(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  mesh = _mesh(case)
  # 256 was its best chunk on the CPUs that were tried.
  chunk = min(256, case.tokens // case.devices)
  attend = published_attention(mesh, "seq", chunk, case.dtype)
  return _jitted(attend, case, arrays, mesh)


def _ringattention_one_device(
  case: AttentionCase, arrays: Arrays
) -> harness.Runnable:
  """The blockwise attention of `ringattention` on one device."""
  return _ringattention(dataclasses.replace(case, devices=1), arrays)


def _check_dense(case: AttentionCase) -> None:
  if case.tokens > DENSE_TOKENS:
    raise Skipped(f"skipped: T x T scores, only tried up to T={DENSE_TOKENS}")


def _jax_nn(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  _check_dense(case)
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  return _jitted(attend, case, arrays)


def _xla_allgather(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  """Plain jax.nn with sharded operands: XLA's partitioner gathers the keys."""
  _check_dense(case)
  if case.dtype != "float32":
    raise Skipped("skipped: float32 only")
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  return _jitted(attend, case, arrays, _mesh(case))


def _torch(case: AttentionCase, arrays: Arrays) -> harness.Runnable:
  """PyTorch's scaled_dot_product_attention on the CPU."""
  torch = harness.import_torch()
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

  def forward_backward() -> Any:
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(*operands, is_causal=True)
    return torch.autograd.grad(out, operands, do)

  run = forward_backward if case.backward else forward
  check = lambda: tuple(x.transpose(1, 2).float().numpy() for x in run())
  return harness.Runnable(run, check)


CONTESTANTS: dict[str, harness.Contestant] = {
  "blockwise": harness.Contestant(_blockwise, ours=True, one_device=True),
  "shared": harness.Contestant(_blockwise, ours=True),
  "narrow": harness.Contestant(_native_bfloat16, ours=True, one_device=True),
  "ring": harness.Contestant(
    _sharded(api.ring_attention), ours=True, sharded=True
  ),
  "striped": harness.Contestant(_striped, ours=True, sharded=True),
  "gather": harness.Contestant(
    _sharded(api.dot_product_attention, strategy="gather"),
    ours=True,
    sharded=True,
  ),
  "ringattention": harness.Contestant(
    _ringattention, sharded=True, load=import_ringattention
  ),
  "ringattention_1": harness.Contestant(
    _ringattention_one_device, one_device=True, load=import_ringattention
  ),
  "jax.nn": harness.Contestant(_jax_nn, one_device=True),
  "xla_allgather": harness.Contestant(_xla_allgather, sharded=True),
  "torch": harness.Contestant(_torch, load=harness.import_torch),
}

# Contestants of which our best is compared.
_BEST_OF = ("blockwise", "ring", "striped")

# Tables of the summary, in their order.
_TITLES = {
  "best": "Time of our best (of blockwise, ring, striped) over a peer's",
  "sharded": "Time of the better of ring and striped over a sharded peer's",
  "loss": "Time on all devices over time on one (blockwise)",
  "cut": "Time on all devices over time on one of them (shared)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings(harness.BenchmarkSettings):
  """Settings of the benchmark of attention; every combination is a row."""

  tokens: tuple[int, ...] = option((4096, 8192, 16384, 32768))
  head_dims: tuple[int, ...] = option((64, 128))
  dtypes: tuple[str, ...] = option(tuple(TOLERANCE), tuple(TOLERANCE))
  passes: tuple[str, ...] = option(PASSES, PASSES)
  contestants: tuple[str, ...] = option(tuple(CONTESTANTS), CONTESTANTS)
  heads: int = option(8)
  rounds: int = option(5)
  devices: int = option(8)


def inputs(
  case: AttentionCase, kv_heads: int | None = None
) -> list[Float[np.ndarray, "1 T _ H"]]:
  """Draws q, k, v and the cotangent of the output, [1, T, N or K, H] each.

  Args:
    case: Case that determines shapes and dtype.
    kv_heads: Number of heads of keys and values, K; default N.
  """
  rng, n, k = np.random.default_rng(0), case.heads, kv_heads or case.heads
  shape = lambda heads: (1, case.tokens, heads, case.head_dim)
  draw = lambda heads: rng.standard_normal(shape(heads), np.float32)
  return [draw(heads).astype(jnp.dtype(case.dtype)) for heads in (n, k, k, n)]


def trial(name: str, case: AttentionCase) -> Trial:
  """Builds a contestant of a case and runs it once."""
  return CONTESTANTS[name].trial(case, inputs(case))


class AttentionBenchmark(harness.Benchmark):
  """Benchmark of causal attention, in percent of the matrix product.

  Attributes:
    case: Class of its cases.
    listed_settings: Name of the setting with the values of a case's field.
    digits: Number of digits of times in milliseconds.
  """

  name = "attention"
  options = AttentionSettings
  quick = AttentionSettings(
    tokens=(4096,), head_dims=(64,), dtypes=("float32",), rounds=3
  )
  contestants = CONTESTANTS
  columns = ("dtype", "heads", "head_dim", "tokens", "pass")
  case: ClassVar[type[AttentionCase]] = AttentionCase
  listed_settings: ClassVar[Mapping[str, str]] = {
    "dtype": "dtypes",
    "head_dim": "head_dims",
    "tokens": "tokens",
    "passes": "passes",
  }
  digits: ClassVar[int] = 1

  @property
  def cases(self) -> list[Any]:
    return harness.combinations(
      self.case, self.settings, **self.listed_settings
    )

  def weight(self, case: AttentionCase) -> float:
    return case.flops

  def row(self, case: AttentionCase, report: Report) -> Row:
    float32_case = dataclasses.replace(case, dtype="float32")
    arrays = [x.astype(np.float32) for x in inputs(case)]
    reference = _blockwise(float32_case, arrays).check()
    del arrays
    build = lambda name: self.placed(
      CONTESTANTS[name].one_device, trial, name, case
    )
    warmup = int(case.flops < _LONG)
    return self.beside_product(
      case, build, reference, TOLERANCE, report, warmup=warmup
    )

  def beside_product(
    self,
    case: AttentionCase,
    build: Callable[[str], Trial],
    reference: Arrays,
    tolerance: Mapping[str, float],
    report: Report,
    *,
    size: int | None = None,
    warmup: int = 0,
  ) -> Row:
    """Measures the row of a case, with the matrix product of its dtype.

    Args:
      case: Case of the row.
      build: Function that builds a contestant.
      reference: Expected result.
      tolerance: Tolerance of each dtype, see `harness.compare`.
      report: Function that is called before each run.
      size: Number of rows of the matrices; default `timing.GEMM_SIZE`.
      warmup: Number of rounds that are not timed.
    """
    size = timing.GEMM_SIZE if size is None else size
    results, timings = self.measure(
      self.settings.contestants,
      build,
      lambda x: harness.compare(x, reference, tolerance[case.dtype]),
      report,
      machine={"gemm": timing.gemm(case.dtype, size)},
      warmup=warmup,
    )
    gemm = harness.product_row(timings["gemm"], size)
    for result in results.values():
      result["gemm_percent"] = harness.percent(case.flops, result, gemm)
    facts = dataclasses.asdict(case)
    return {
      "pass": facts.pop("passes"),
      **facts,
      "flops": case.flops,
      "gemm": gemm,
      "results": results,
    }

  def table(self, case: AttentionCase, row: Row) -> str:
    rate, flops = row["gemm"]["flops_per_s"], row["gemm"]["flops"]
    # FLOPs of one of the products that are timed together.
    flops *= 2 / timing.gemm_flops(1)
    title = f"gemm {round((flops / 2) ** (1 / 3))}^3"
    head = (
      f"  {title:15}  1 device {1e3 * flops / rate:11.{self.digits}f} ms   "
      f"100 %   {rate / 1e9:.0f} GFLOP/s"
    )
    result_text = lambda result: (
      f"{result['gemm_percent']:5.1f} %   best "
      f"{result['min_s'] * 1e3:.{self.digits}f} ms, "
      f"off by {result['max_abs_difference']:.0e}"
    )
    lines = harness.lines(row, result_text, digits=self.digits)
    return "\n".join([str(case), head, *lines]) + "\n"

  def summary(self, rows: Sequence[Row]) -> Row:
    """Ratios of median times, ours over theirs: below 1 we are faster.

    "best" is our best of blockwise, ring and striped; "sharded" compares the
    better of ring and striped with sharded peers; "loss" is the time of ring
    and striped on `devices` over blockwise in a process with one, and "cut"
    over one of the devices, which leaves the effect of threads out.
    """
    tables: dict[str, dict[str, Any]] = {}

    def add(table: str, name: str, ours: Sequence[str], theirs: str) -> None:
      column = harness.ratios(rows, ours, [theirs])
      if column is not None:
        tables.setdefault(table, {})[name] = column

    sharded = [n for n in _BEST_OF if CONTESTANTS[n].sharded]
    for name, contestant in CONTESTANTS.items():
      if not contestant.ours:
        add("best", name, _BEST_OF, name)
        if contestant.sharded:
          add("sharded", name, sharded, name)
    for name in sharded:
      add("loss", name, [name], "blockwise")
      add("cut", name, [name], "shared")
    fastest = [harness.best(row, _BEST_OF) for row in rows]
    return {
      "rows": [
        f"{r['pass']:6} {r['dtype']:8} T={r['tokens']:<6} H={r['head_dim']}"
        for r in rows
      ],
      "best_of_ours": [b and b[0] for b in fastest],
      **tables,
    }

  def closing(self, result: Row) -> str:
    summary, lines = result["summary"], []
    cell = lambda x, w: f"{'-' if x is None else format(x, '.2f'):>{w}}"
    for table, title in _TITLES.items():
      columns = summary.get(table)
      if not columns:
        continue
      widths = {name: max(len(name), 6) + 2 for name in columns}
      head = "".join(f"{name:>{widths[name]}}" for name in columns)
      lines += [title, f"  {'':32}{head}"]
      for i, label in enumerate(summary["rows"]):
        cells = [cell(c["ratios"][i], widths[n]) for n, c in columns.items()]
        note = f"  {summary['best_of_ours'][i]}" if table == "best" else ""
        lines.append(f"  {label:32}{''.join(cells)}{note}")
      cells = [cell(c["median"], widths[n]) for n, c in columns.items()]
      lines.append(f"  {'median':32}{''.join(cells)}\n")
    return "\n".join(lines)

  def draw(self, result: Row, path: str) -> None:
    """Draws percent of the product's rate, a panel for each dtype and pass."""
    rows = result["rows"]
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
      panels.setdefault((row["dtype"], row["pass"]), []).append(row)
    ours = ["#08519c", "#9ecae1", "#c6dbef", "#3182bd", "#6baed6", "#bdd7e7"]
    peers = ["#d95f0e", "#fe9929", "#969696", "#cccccc", "#756bb1"]
    color_iters = {True: iter(ours), False: iter(peers)}
    colors = {n: next(color_iters[c.ours]) for n, c in CONTESTANTS.items()}
    colors = {
      name: color
      for name, color in colors.items()
      if any(harness.best(row, [name]) for row in rows)
    }
    max_rows = max(len(p) for p in panels.values())
    figure = harness.figure(max(9, 1.1 * max_rows + 3), 2.6 * len(panels) + 0.8)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    height = lambda row, name: (
      row["results"].get(name, {}).get("gemm_percent") or 0
    )
    tick = lambda row: f"T={row['tokens']}\nH={row['head_dim']}"
    for ax, ((dtype, kind), members) in zip(axes, panels.items(), strict=True):
      title = "forward" if kind == "fwd" else "forward + backward"
      harness.tidy(ax, f"{title}, {dtype}")
      harness.bars(ax, members, colors, height, tick)
      ax.set_ylabel(f"% of the {dtype}\nmatrix product", fontsize=9)
    if colors:
      handles, labels = axes[0].get_legend_handles_labels()
      figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False
      )
    harness.save(figure, path)
