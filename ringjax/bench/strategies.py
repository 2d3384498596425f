"""Every way to move attention, measured side by side and beside its prediction.

Law: a strategy whose result or gradients are off is not timed. Times are
medians of interleaved rounds; hops and bytes are counted in the compiled
programs, scores in the tiles that the loops run; predictions are those that
`strategy="auto"` goes by, on a machine that was measured in the same run
unless another is given.

  scores   that are computed, in parts of those that the mask allows
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench import contest, machine, timing
from ringjax.bench.program import Program
from ringjax.ops.attention import nesting, select
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.halo import Halo
from ringjax.ops.attention.registry import STRATEGIES
from ringjax.ops.attention.ulysses import Ulysses
from ringjax.ops.mask import Causal, Coords, Mask, Window
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import Layout, Striped
from ringjax.parallel.mesh import make_mesh
from ringjax.plan import draw, machines

PASSES = ("fwd", "fwdbwd")
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
NAMES = tuple(name for name in STRATEGIES if name != "documents")
_COLLECTIVES = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to measure.

  Attributes:
    devices: of the mesh, R.
    tokens: of sequences, T.
    heads: N.
    kv_heads: K.
    head_dim: H.
    dtype: of `TOLERANCE`.
    window: keys that a query sees, itself among them; None is all.
    passes: of `PASSES`.
    strategies: their names; "hybrid:4" and "two_level:4" have groups of 4.
    rounds: timed rounds.
  """

  devices: int = 8
  tokens: tuple[int, ...] = (2048, 8192)
  heads: int = 8
  kv_heads: int = 8
  head_dim: int = 64
  dtype: str = "float32"
  window: int | None = None
  passes: tuple[str, ...] = PASSES
  strategies: tuple[str, ...] | None = None
  rounds: int = 5

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={"passes": PASSES, "dtype": tuple(TOLERANCE)},
      counts=("devices", "tokens", "heads", "kv_heads", "head_dim", "rounds"),
    )
    for name in self.names:
      nesting.named(name)

  @property
  def names(self) -> tuple[str, ...]:
    """The strategies; by default all that serve the mask."""
    if self.strategies is not None:
      return self.strategies
    group = max(
      (n for n in range(2, self.devices) if self.devices % n == 0), default=1
    )
    return tuple(
      f"two_level:{group}" if name == "two_level" else name
      for name in NAMES
      if name != "halo" or self.window is not None
    )

  @property
  def mask(self) -> Mask:
    return Causal() if self.window is None else Causal() & Window(self.window)


QUICK = Settings(tokens=(2048,), passes=("fwdbwd",), rounds=3)


def run(
  settings: Settings,
  *,
  on: str | None = None,
  command: str = "",
  json: str | None = None,
  plot: str | None = None,
  append: bool = False,
) -> dict[str, Any]:
  """Measures; prints, writes and returns the result.

  Args:
    settings: what to measure.
    on: name of a stated machine, or path of a measured one; None measures.
    command: the command line, for the record.
    json: file for the result.
    plot: file for the picture; needs matplotlib.
    append: keeps what `json` holds already.
  """
  stated = None if on is None else machines.load(on)
  record = contest.Record(
    "strategies",
    settings,
    order=_order,
    summary=_summary,
    command=command,
    json=json,
    plot=plot,
    append=append,
  )
  mesh = make_mesh(
    (settings.devices,), ("seq",), devices=jax.devices()[: settings.devices]
  )
  known = stated or machine.measure(mesh, name="measured", dtype=settings.dtype)
  record.result["predicted_on"] = known.record()
  cases = [(t, p) for t in settings.tokens for p in settings.passes]
  progress = timing.Progress(len(cases))
  for n, (tokens, passes) in enumerate(cases):
    row = _row(settings, mesh, known, tokens, passes, progress, n)
    record.add(row, last=n == len(cases) - 1)
    progress.clear()
    print(_table(row), flush=True)
  if plot is not None:
    draw.against(_points(record.result["rows"]), plot, _title(settings))
  return record.result


def layout_of(name: str) -> Layout:
  """The order of tokens in which a strategy is measured."""
  found = STRATEGIES[name.partition(":")[0]]
  return found.layout if found.consecutive else Striped()


def scores(
  strategy: Any,
  layout: Layout,
  mask: Mask,
  shards: int,
  tokens: int,
  kv_heads: int,
) -> int:
  """Scores that all devices compute of one head, by the tiles they run."""
  local = layout.local_length(tokens, shards)
  pos = np.stack(
    [np.asarray(layout.positions(i, shards, local)) for i in range(shards)]
  )
  seg = (pos < tokens).astype(np.int32)
  group = _group(strategy, shards, kv_heads)
  wide = lambda x: jnp.asarray(x.reshape(shards // group, 1, group * local))
  q = Coords(wide(pos), wide(seg))
  k = q
  local_algorithm = nesting.innermost(strategy)
  inside = strategy.local if isinstance(strategy, Ulysses) else strategy
  if isinstance(inside, Halo):
    behind, ahead = (x or 0 for x in mask.reach)
    start = np.arange(shards // group)[:, None, None] * group * local
    near = jnp.asarray(start + np.arange(-behind, group * local + ahead))
    k = Coords(near, ((near >= 0) & (near < tokens)).astype(jnp.int32))
  elif isinstance(inside, Gather) or not nesting.is_strategy(inside):
    k = Coords(*(jnp.asarray(x.reshape(1, 1, -1)) for x in (pos, seg)))
  blocks = local_algorithm.blocks(q.pos.shape[-1], k.pos.shape[-1])
  kinds = _kinds(mask, _tiled(q, blocks[0]), _tiled(k, blocks[1]), blocks)
  if isinstance(inside, Halo):
    kinds = np.stack([kinds[i, i] for i in range(shards // group)])
  return int(np.count_nonzero(kinds)) * blocks[0] * blocks[1]


def _group(strategy: Any, shards: int, kv_heads: int) -> int:
  """How many shards' tokens a call of the local algorithm has as queries."""
  if not isinstance(strategy, Ulysses):
    return 1
  if not nesting.is_strategy(strategy.local):
    return shards
  return nesting.group_of(strategy, shards, kv_heads)


def _tiled(at: Coords, block: int) -> Coords:
  extra = ((0, 0), (0, 0), (0, -at.pos.shape[-1] % block))
  return Coords(*(jnp.pad(x, extra) for x in at))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _all_kinds(mask: Mask, q: Coords, k: Coords, blocks: Any) -> Any:
  kinds = lambda q, k: tile_kinds(mask, q, k, *blocks)
  return jax.vmap(jax.vmap(kinds, (None, 0)), (0, None))(q, k)


def _kinds(mask: Mask, q: Coords, k: Coords, blocks: Any) -> np.ndarray:
  """[q groups, k groups, tiles, tiles]."""
  return np.asarray(_all_kinds(mask, q, k, blocks))


def _row(
  settings: Settings,
  mesh: Mesh,
  known: Machine,
  tokens: int,
  passes: str,
  progress: timing.Progress,
  done: int,
) -> contest.Row:
  names = settings.names
  steps = contest.steps(names, settings.rounds)

  def report(step: int, label: str) -> None:
    progress.at(done + step / steps, f"T={tokens} {passes}: {label}")

  report(0, "reference")
  rng = np.random.default_rng(0)
  n, k, h = settings.heads, settings.kv_heads, settings.head_dim
  dtype = jnp.dtype(settings.dtype)
  arrays = [
    rng.standard_normal((1, tokens, heads, h), np.float32).astype(dtype)
    for heads in (n, k, k, n)
  ]
  one = _work(arrays, passes, mask=settings.mask, strategy="gather", mesh=None)
  reference = [np.asarray(x, np.float32) for x in one.found()]
  counted: dict[str, dict[str, Any]] = {}

  def make(name: str) -> contest.Made:
    ready = _work(
      arrays,
      passes,
      mask=settings.mask,
      strategy=nesting.named(name),
      mesh=mesh,
      layout=layout_of(name),
    )
    counted[name] = ready.counters()
    return ready.run, ready.found()

  timings, differences = contest.run(
    names,
    make,
    lambda found: contest.compare(found, reference, TOLERANCE[settings.dtype]),
    settings.rounds,
    report,
    {"gemm": timing.gemm(settings.dtype)},
  )
  pairs = _pairs(tokens, settings.window)
  results = {}
  for name in names:
    time = timings[name]
    strategy = nesting.named(name)
    computed = scores(
      strategy, layout_of(name), settings.mask, settings.devices, tokens, k
    )
    results[name] = {
      "layout": repr(layout_of(name)),
      "median_s": time.median_s,
      "min_s": time.min_s,
      "seconds": list(time.seconds),
      "reason": time.reason,
      "max_abs_difference": differences.get(name),
      "predicted_s": _predicted(settings, known, tokens, passes, name),
      "scores": computed / pairs,
      **counted.get(name, {}),
    }
  return {
    "tokens": tokens,
    "pass": passes,
    "heads": n,
    "kv_heads": k,
    "head_dim": h,
    "dtype": settings.dtype,
    "window": settings.window,
    "results": results,
  }


def _pairs(tokens: int, window: int | None) -> int:
  """Pairs of a query and a key that it sees."""
  seen = min(tokens, window or tokens)
  return seen * (seen + 1) // 2 + (tokens - seen) * seen


def _predicted(
  settings: Settings, known: Machine, tokens: int, passes: str, name: str
) -> float | None:
  kind, _, inner = name.partition(":")
  shape = lambda heads: (1, tokens, heads, settings.head_dim)
  found = select.explain(
    shape(settings.heads),
    shape(settings.kv_heads),
    shards=settings.devices,
    layout=layout_of(name),
    mask=settings.mask,
    dtype=settings.dtype,
    machine=known,
    backward=passes == "fwdbwd",
    among=(kind,),
    show=False,
  )
  group = int(inner) if inner else None
  if kind == "hybrid" and group is None:
    group = nesting.group_of(
      nesting.named(name), settings.devices, settings.kv_heads
    )
  for one in found.predictions:
    if group is None or one.options.get("inner") == group:
      return one.seconds
  return None


@dataclasses.dataclass(frozen=True)
class _Work:
  """A compiled program with its operands."""

  compiled: Any
  operands: Any
  restore: Callable[[Any], Any]

  def run(self) -> Any:
    return self.compiled(*self.operands)

  def found(self) -> list[np.ndarray]:
    """Results in the order of the sequence, float32."""
    return [self.restore(np.asarray(x, np.float32)) for x in self.run()]

  def counters(self) -> dict[str, Any]:
    """Hops and bytes of a device."""
    program = Program(self.compiled.as_text())
    sends = program.sends()
    return {
      "hops": sum(times for _, _, times in sends),
      "sent_bytes": sum(i.bytes * times for _, i, times in sends),
      "other_bytes": sum(
        i.bytes * program.times[name]
        for name, computation in program.computations.items()
        for i in computation.values()
        if i.op.removesuffix("-start") in _COLLECTIVES
      ),
    }


def _work(
  arrays: Sequence[np.ndarray],
  passes: str,
  *,
  mask: Mask,
  strategy: Any,
  mesh: Any,
  layout: Layout | None = None,
) -> _Work:
  """Attention, or that and its gradients, ready to run."""
  call = functools.partial(
    dot_product_attention, mask=mask, strategy=strategy, mesh=mesh
  )
  if mesh is None:
    put, back = jnp.asarray, lambda x: x
  else:
    assert layout is not None
    shards = mesh.shape["seq"]
    call = functools.partial(call, layout=layout, axis="seq")
    over = NamedSharding(mesh, P(None, "seq"))
    put = lambda x: jax.device_put(layout.permute(x, shards=shards), over)
    back = lambda x: layout.restore(x, shards=shards)

  def both(q: Any, k: Any, v: Any, do: Any) -> Any:
    if passes == "fwd":
      return (call(q, k, v),)
    out, pull = jax.vjp(call, q, k, v)
    return (out, *pull(do))

  operands = [put(x) for x in arrays]
  return _Work(jax.jit(both).lower(*operands).compile(), operands, back)


def _order(row: contest.Row) -> tuple[Any, ...]:
  return (
    row["dtype"],
    row["heads"],
    row["kv_heads"],
    row["head_dim"],
    row["window"] or 0,
    row["tokens"],
    PASSES.index(row["pass"]),
  )


def _summary(rows: Sequence[contest.Row]) -> dict[str, Any]:
  """Of each row the fastest as measured and as predicted, and the ratios."""
  found = []
  for row in rows:
    timed = {
      name: one
      for name, one in row["results"].items()
      if one["median_s"] and one["predicted_s"]
    }
    if not timed:
      continue
    least = lambda key, timed=timed: min(timed, key=lambda n: timed[n][key])
    best = timed[least("median_s")]["median_s"]
    ratios = [x["predicted_s"] / x["median_s"] for x in timed.values()]
    found.append(
      {
        "tokens": row["tokens"],
        "pass": row["pass"],
        "window": row["window"],
        "fastest": least("median_s"),
        "predicted": least("predicted_s"),
        "loss_of_choice": timed[least("predicted_s")]["median_s"] / best - 1,
        "predicted_over_measured": [min(ratios), max(ratios)],
      }
    )
  return {"rows": found}


def _table(row: contest.Row) -> str:
  window = f", window {row['window']}" if row["window"] else ""
  lines = [
    f"{row['pass']} {row['dtype']} T={row['tokens']} N={row['heads']} "
    f"K={row['kv_heads']} H={row['head_dim']}, causal{window}",
    f"  {'':15}{'measured':>11}{'predicted':>12}{'hops':>6}{'sent':>10}"
    f"{'gathered':>10}{'scores':>8}",
  ]
  for name, one in row["results"].items():
    if one["median_s"] is None:
      lines.append(f"  {name:15}{'-':>11}  {one['reason']}")
      continue
    predicted = one["predicted_s"]
    guess = "-" if predicted is None else f"{1e3 * predicted:.1f} ms"
    lines.append(
      f"  {name:15}{1e3 * one['median_s']:8.1f} ms{guess:>12}{one['hops']:>6}"
      f"{_mb(one['sent_bytes']):>10}{_mb(one['other_bytes']):>10}"
      f"{one['scores']:>8.2f}"
    )
  return "\n".join(lines) + "\n"


def _mb(count: int) -> str:
  return f"{count / 1e6:.2f} MB"


def _title(settings: Settings) -> str:
  return (
    f"{settings.devices} devices, N={settings.heads}, K={settings.kv_heads}, "
    f"H={settings.head_dim}, {settings.dtype}"
  )


def _points(rows: Sequence[contest.Row]) -> list[tuple[str, str, float, float]]:
  """(strategy, row, predicted, measured) of all that has both."""
  return [
    (
      name,
      f"{row['tokens']} {row['pass']}",
      one["predicted_s"],
      one["median_s"],
    )
    for row in rows
    for name, one in row["results"].items()
    if one["median_s"] and one["predicted_s"]
  ]
