"""Times all strategies of attention, and compares with predictions.

Hops and bytes are counted in the compiled programs, scores in the tiles that
the loops run; predictions are those that `strategy="auto"` uses, on a machine
that is measured in the same run unless another is given.

  scores   computed scores, over the number that the mask allows
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from benchmarks.attention import attention
from benchmarks.attention.attention import AttentionCase
from benchmarks.shared import harness
from benchmarks.shared.harness import PASSES, Report, Row, Trial, option
from ringjax.bench import machine
from ringjax.bench.program import CompiledProgram
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.cost import select
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.halo import Halo
from ringjax.ops.attention.strategies.registry import STRATEGIES
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.attention.strategies.ulysses import Ulysses
from ringjax.ops.mask import Causal, Coords, Mask, Window
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import Layout, Striped
from ringjax.parallel.mesh import make_mesh
from ringjax.plan import draw, machines

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
NAMES = tuple(name for name in STRATEGIES if name != "documents")
_COLLECTIVES = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySettings(harness.BenchmarkSettings):
  """Settings of the benchmark of strategies.

  Attributes:
    devices: Number of devices of the mesh, R.
    tokens: Lengths of sequences, T.
    heads: Number of query heads, N.
    kv_heads: Number of heads of keys and values, K.
    head_dim: Head dimension, H.
    window: Number of keys that a query sees, with its own; None for all.
    strategies: Names; "hybrid:4" and "two_level:4" have groups of 4.
    rounds: Timed rounds.
    machine: Name of a stated machine, or path of a measured one, to predict
      for; None measures the devices.
  """

  devices: int = option(8)
  tokens: tuple[int, ...] = option((2048, 8192))
  heads: int = option(8)
  kv_heads: int = option(8)
  head_dim: int = option(64, flag="head_dims")
  dtype: str = option("float32", tuple(TOLERANCE), flag="dtypes")
  window: int | None = option(None)
  passes: tuple[str, ...] = option(PASSES, PASSES)
  strategies: tuple[str, ...] | None = option(
    None, (), flag="contestants", several=True
  )
  rounds: int = option(5)
  machine: str | None = option(None, ())

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in self.names:
      nesting.named(name)

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the strategies; by default all that support the mask."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyCase(AttentionCase):
  """One row of the benchmark: attention of one shape and pass."""

  kv_heads: int
  window: int | None

  @property
  def mask(self) -> Mask:
    return Causal() if self.window is None else Causal() & Window(self.window)

  @property
  def pairs(self) -> float:
    """Number of unmasked pairs of a query and a key, of one head."""
    seen = min(self.tokens, self.window or self.tokens)
    return float(seen * (seen + 1) // 2 + (self.tokens - seen) * seen)

  def __str__(self) -> str:
    window = f", window {self.window}" if self.window else ""
    return f"{super().__str__()} K={self.kv_heads}, causal{window}"


class StrategyBenchmark(harness.Benchmark):
  """Benchmark of all strategies on one mesh, measured and predicted."""

  name = "strategies"
  options = StrategySettings
  quick = StrategySettings(tokens=(2048,), passes=("fwdbwd",), rounds=3)
  columns = (
    "dtype", "heads", "kv_heads", "head_dim", "window", "tokens", "pass",
  )  # fmt: skip

  def __init__(self, settings: StrategySettings):
    super().__init__(settings)
    name = settings.machine
    self._stated = None if name is None else machines.load(name)

  @functools.cached_property
  def mesh(self) -> Mesh:
    devices = jax.devices()[: self.settings.devices]
    return make_mesh((len(devices),), ("seq",), devices=devices)

  @functools.cached_property
  def machine(self) -> Machine:
    """The machine for which times are predicted."""
    return self._stated or machine.measure(
      self.mesh, name="measured", dtype=self.settings.dtype
    )

  @property
  def cases(self) -> list[StrategyCase]:
    return harness.combinations(
      StrategyCase, self.settings, tokens="tokens", passes="passes"
    )

  def facts(self) -> Row:
    return {"predicted_on": self.machine.record()}

  def devices(self, name: str) -> int:
    return self.settings.devices

  def row(self, case: StrategyCase, report: Report) -> Row:
    arrays = attention.inputs(case, case.kv_heads)
    gather_run, _ = _compiled(arrays, case, strategy="gather")
    reference = gather_run.check()
    counted: dict[str, dict[str, int]] = {}

    def build(name: str) -> Trial:
      built, program = _compiled(
        arrays,
        case,
        strategy=nesting.named(name),
        mesh=self.mesh,
        layout=layout_of(name),
      )
      counted[name] = counters(program)
      return built.run, built.check()

    results, _ = self.measure(
      self.settings.names,
      build,
      lambda outputs: harness.compare(
        outputs, reference, TOLERANCE[case.dtype]
      ),
      report,
    )
    for name, result in results.items():
      strategy, layout = nesting.named(name), layout_of(name)
      shape = (case.devices, case.tokens, case.kv_heads)
      result |= {
        "layout": repr(layout),
        "predicted_s": self.predicted_s(case, name),
        "scores": scores(strategy, layout, case.mask, *shape) / case.pairs,
        **counted.get(name, {}),
      }
    facts = dataclasses.asdict(case)
    return {"pass": facts.pop("passes"), **facts, "results": results}

  def predicted_s(self, case: StrategyCase, name: str) -> float | None:
    """Predicted seconds of a strategy; None without a prediction."""
    kind, _, inner = name.partition(":")
    shape = lambda heads: (1, case.tokens, heads, case.head_dim)
    ranking = select.explain(
      shape(case.heads),
      shape(case.kv_heads),
      shards=case.devices,
      layout=layout_of(name),
      mask=case.mask,
      dtype=case.dtype,
      machine=self.machine,
      backward=case.backward,
      among=(kind,),
      show=False,
    )
    group = int(inner) if inner else None
    if kind == "hybrid" and group is None:
      strategy = nesting.named(name)
      group = nesting.group_of(strategy, case.devices, case.kv_heads)
    for prediction in ranking.predictions:
      if group is None or prediction.options.get("inner") == group:
        return prediction.seconds
    return None

  def table(self, case: StrategyCase, row: Row) -> str:
    lines = [
      str(case),
      f"  {'':15}{'measured':>11}{'predicted':>12}{'hops':>6}{'sent':>10}"
      f"{'gathered':>10}{'scores':>8}",
    ]
    for name, result in row["results"].items():
      if result["median_s"] is None:
        lines.append(f"  {name:15}{'-':>11}  {result['reason']}")
        continue
      predicted = result["predicted_s"]
      guess = "-" if predicted is None else f"{1e3 * predicted:.1f} ms"
      sent, gathered = (
        f"{result[key] / 1e6:.2f} MB" for key in ("sent_bytes", "other_bytes")
      )
      lines.append(
        f"  {name:15}{1e3 * result['median_s']:8.1f} ms{guess:>12}"
        f"{result['hops']:>6}{sent:>10}{gathered:>10}{result['scores']:>8.2f}"
      )
    return "\n".join(lines) + "\n"

  def summary(self, rows: Sequence[Row]) -> Row:
    """Fastest strategy of each row, measured and predicted, and ratios."""
    entries = []
    for row in rows:
      timed = {name: (p, m) for name, p, m in _points(row)}
      if not timed:
        continue
      predicted = min(timed, key=lambda name, times=timed: times[name][0])
      fastest = min(timed, key=lambda name, times=timed: times[name][1])
      ratios = [p / m for p, m in timed.values()]
      entries.append(
        {
          "tokens": row["tokens"],
          "pass": row["pass"],
          "window": row["window"],
          "fastest": fastest,
          "predicted": predicted,
          "loss_of_choice": timed[predicted][1] / timed[fastest][1] - 1,
          "predicted_over_measured": [min(ratios), max(ratios)],
        }
      )
    return {"rows": entries}

  def draw(self, result: Row, path: str) -> None:
    """Draws predicted against measured times of all rows."""
    s = result["settings"]
    title = (
      f"{s['devices']} devices, N={s['heads']}, K={s['kv_heads']}, "
      f"H={s['head_dim']}, {s['dtype']}"
    )
    points = [
      (name, f"{row['tokens']} {row['pass']}", predicted, measured)
      for row in result["rows"]
      for name, predicted, measured in _points(row)
    ]
    draw.against(points, path, title)


def _points(row: Row) -> list[tuple[str, float, float]]:
  """(strategy, predicted, measured seconds) of all that have both."""
  return [
    (name, result["predicted_s"], result["median_s"])
    for name, result in row["results"].items()
    if result["median_s"] and result["predicted_s"]
  ]


def layout_of(name: str) -> Layout:
  """Layout of tokens with which a strategy is measured."""
  strategy = STRATEGIES[name.partition(":")[0]]
  return strategy.layout if strategy.consecutive else Striped()


def scores(
  strategy: Strategy,
  layout: Layout,
  mask: Mask,
  shards: int,
  tokens: int,
  kv_heads: int,
) -> int:
  """Scores of one head that all devices compute, by the tiles they run."""
  local = layout.local_length(tokens, shards)
  pos = np.stack(
    [np.asarray(layout.positions(i, shards, local)) for i in range(shards)]
  )
  seg = (pos < tokens).astype(np.int32)
  group = _group(strategy, shards, kv_heads)
  grouped = lambda x: jnp.asarray(x.reshape(shards // group, 1, group * local))
  q = Coords(grouped(pos), grouped(seg))
  k = q
  local_algorithm = nesting.innermost(strategy)
  inside = strategy.local if isinstance(strategy, Ulysses) else strategy
  if isinstance(inside, Halo):
    reach_before, reach_after = (x or 0 for x in mask.reach)
    start = np.arange(shards // group)[:, None, None] * group * local
    positions = jnp.asarray(
      start + np.arange(-reach_before, group * local + reach_after)
    )
    k = Coords(
      positions, ((positions >= 0) & (positions < tokens)).astype(jnp.int32)
    )
  elif isinstance(inside, Gather) or not nesting.is_strategy(inside):
    k = Coords(*(jnp.asarray(x.reshape(1, 1, -1)) for x in (pos, seg)))
  blocks = local_algorithm.blocks(q.pos.shape[-1], k.pos.shape[-1])
  # [groups of queries, groups of keys, tiles, tiles].
  kinds = np.asarray(
    _all_kinds(mask, _tiled(q, blocks[0]), _tiled(k, blocks[1]), blocks)
  )
  if isinstance(inside, Halo):
    kinds = np.stack([kinds[i, i] for i in range(shards // group)])
  return int(np.count_nonzero(kinds)) * blocks[0] * blocks[1]


def _group(strategy: Any, shards: int, kv_heads: int) -> int:
  """Number of shards whose queries a call of the local algorithm has."""
  if not isinstance(strategy, Ulysses):
    return 1
  if not nesting.is_strategy(strategy.local):
    return shards
  return nesting.group_of(strategy, shards, kv_heads)


def _tiled(at: Coords, block: int) -> Coords:
  extra = ((0, 0), (0, 0), (0, -at.pos.shape[-1] % block))
  return Coords(*(jnp.pad(x, extra) for x in at))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _all_kinds(mask: Mask, q: Coords, k: Coords, blocks: Any) -> jax.Array:
  kinds = lambda q, k: tile_kinds(mask, q, k, *blocks)
  return jax.vmap(jax.vmap(kinds, (None, 0)), (0, None))(q, k)


def counters(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Counts hops of a compiled program, and bytes that a device sends."""
  program = CompiledProgram(compiled.as_text() or "")
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


def _compiled(
  arrays: Sequence[np.ndarray],
  case: StrategyCase,
  *,
  strategy: Any,
  mesh: Mesh | None = None,
  layout: Layout | None = None,
) -> tuple[harness.Runnable, Any]:
  """Compiles attention, with gradients if backward; returns its program too."""
  call = functools.partial(
    dot_product_attention, mask=case.mask, strategy=strategy, mesh=mesh
  )
  put, back = jnp.asarray, lambda x: x
  if mesh is not None and layout is not None:
    shards = mesh.shape["seq"]
    call = functools.partial(call, layout=layout, axis="seq")
    over = NamedSharding(mesh, P(None, "seq"))
    put = lambda x: jax.device_put(layout.permute(x, shards=shards), over)
    back = lambda x: layout.restore(x, shards=shards)

  def outputs_or_gradients(
    q: Shaped[Array, " ..."],
    k: Shaped[Array, " ..."],
    v: Shaped[Array, " ..."],
    do: Shaped[Array, " ..."],
  ) -> tuple[Shaped[Array, " ..."], ...]:
    if not case.backward:
      return (call(q, k, v),)
    out, pull = jax.vjp(call, q, k, v)
    return (out, *pull(do))

  operands = [put(x) for x in arrays]
  program = jax.jit(outputs_or_gradients).lower(*operands).compile()
  run = lambda: program(*operands)
  check = lambda: [back(np.asarray(x, np.float32)) for x in run()]
  return harness.Runnable(run, check), program
