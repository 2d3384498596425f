"""Times all strategies of attention side by side, beside their predictions.

Hops and bytes are counted in the compiled programs, scores in the tiles that
the loops run; predictions are those that `strategy="auto"` goes by, on a
machine that is measured in the same run unless another is given.

  scores   that are computed, in parts of those that the mask allows
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

from ringjax.bench import attention, harness, machine
from ringjax.bench.attention import AttentionCase
from ringjax.bench.harness import PASSES, Report, Row, Trial, option
from ringjax.bench.program import CompiledProgram
from ringjax.ops.attention import nesting, select
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.halo import Halo
from ringjax.ops.attention.registry import STRATEGIES
from ringjax.ops.attention.strategy import Strategy
from ringjax.ops.attention.ulysses import Ulysses
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
  """What the benchmark of strategies runs.

  Attributes:
    devices: of the mesh, R.
    tokens: of sequences, T.
    heads: N.
    kv_heads: K.
    head_dim: H.
    window: keys that a query sees, itself among them; None is all.
    strategies: their names; "hybrid:4" and "two_level:4" have groups of 4.
    rounds: timed rounds.
    machine: name of a stated machine, or path of a measured one, to predict
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
    """Pairs of a query and a key that it sees, of one head."""
    seen = min(self.tokens, self.window or self.tokens)
    return float(seen * (seen + 1) // 2 + (self.tokens - seen) * seen)

  def __str__(self) -> str:
    window = f", window {self.window}" if self.window else ""
    return f"{super().__str__()} K={self.kv_heads}, causal{window}"


class StrategyBenchmark(harness.Benchmark):
  """All strategies on one mesh, measured and predicted."""

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
  def known(self) -> Machine:
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
    return {"predicted_on": self.known.record()}

  def devices(self, name: str) -> int:
    return self.settings.devices

  def row(self, case: StrategyCase, report: Report) -> Row:
    arrays = attention.inputs(case, case.kv_heads)
    one, _ = _compiled(arrays, case, strategy="gather")
    reference = one.check()
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
      lambda found: harness.compare(found, reference, TOLERANCE[case.dtype]),
      report,
    )
    for name, one in results.items():
      strategy, layout = nesting.named(name), layout_of(name)
      shape = (case.devices, case.tokens, case.kv_heads)
      one |= {
        "layout": repr(layout),
        "predicted_s": self.predicted_s(case, name),
        "scores": scores(strategy, layout, case.mask, *shape) / case.pairs,
        **counted.get(name, {}),
      }
    facts = dataclasses.asdict(case)
    return {"pass": facts.pop("passes"), **facts, "results": results}

  def predicted_s(self, case: StrategyCase, name: str) -> float | None:
    """Seconds that a strategy is predicted to take, or None if it is not."""
    kind, _, inner = name.partition(":")
    shape = lambda heads: (1, case.tokens, heads, case.head_dim)
    found = select.explain(
      shape(case.heads),
      shape(case.kv_heads),
      shards=case.devices,
      layout=layout_of(name),
      mask=case.mask,
      dtype=case.dtype,
      machine=self.known,
      backward=case.backward,
      among=(kind,),
      show=False,
    )
    group = int(inner) if inner else None
    if kind == "hybrid" and group is None:
      strategy = nesting.named(name)
      group = nesting.group_of(strategy, case.devices, case.kv_heads)
    for one in found.predictions:
      if group is None or one.options.get("inner") == group:
        return one.seconds
    return None

  def table(self, case: StrategyCase, row: Row) -> str:
    lines = [
      str(case),
      f"  {'':15}{'measured':>11}{'predicted':>12}{'hops':>6}{'sent':>10}"
      f"{'gathered':>10}{'scores':>8}",
    ]
    for name, one in row["results"].items():
      if one["median_s"] is None:
        lines.append(f"  {name:15}{'-':>11}  {one['reason']}")
        continue
      predicted = one["predicted_s"]
      guess = "-" if predicted is None else f"{1e3 * predicted:.1f} ms"
      sent, other = (
        f"{one[key] / 1e6:.2f} MB" for key in ("sent_bytes", "other_bytes")
      )
      lines.append(
        f"  {name:15}{1e3 * one['median_s']:8.1f} ms{guess:>12}"
        f"{one['hops']:>6}{sent:>10}{other:>10}{one['scores']:>8.2f}"
      )
    return "\n".join(lines) + "\n"

  def summary(self, rows: Sequence[Row]) -> Row:
    """Of each row the fastest as measured and as predicted, and the ratios."""
    found = []
    for row in rows:
      timed = {name: (p, m) for name, p, m in _points(row)}
      if not timed:
        continue
      predicted = min(timed, key=lambda name, of=timed: of[name][0])
      fastest = min(timed, key=lambda name, of=timed: of[name][1])
      ratios = [p / m for p, m in timed.values()]
      found.append(
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
    return {"rows": found}

  def draw(self, result: Row, path: str) -> None:
    """Predicted against measured times of all rows."""
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
    (name, one["predicted_s"], one["median_s"])
    for name, one in row["results"].items()
    if one["median_s"] and one["predicted_s"]
  ]


def layout_of(name: str) -> Layout:
  """The order of tokens in which a strategy is measured."""
  found = STRATEGIES[name.partition(":")[0]]
  return found.layout if found.consecutive else Striped()


def scores(
  strategy: Strategy,
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
  # [groups of queries, groups of keys, tiles, tiles].
  kinds = np.asarray(
    _all_kinds(mask, _tiled(q, blocks[0]), _tiled(k, blocks[1]), blocks)
  )
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


def counters(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Hops of a compiled program, and bytes that a device sends."""
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
  """Attention, or that and its gradients, ready to run; and its program."""
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

  def both(q: Any, k: Any, v: Any, do: Any) -> Any:
    if not case.backward:
      return (call(q, k, v),)
    out, pull = jax.vjp(call, q, k, v)
    return (out, *pull(do))

  operands = [put(x) for x in arrays]
  program = jax.jit(both).lower(*operands).compile()
  run = lambda: program(*operands)
  check = lambda: [back(np.asarray(x, np.float32)) for x in run()]
  return harness.Runnable(run, check), program
