"""What a hop costs: kernels, the loops of Blockwise, and one plain call.

Law: as in `attention`: the same numbers for all, checked before the clock
starts, run in turn. Nothing is sent: what is timed is one shard's part of a
ring, all of its hops one after another, on one device.

  full    one hop, every query sees every key
  causal  one hop, a shard's own keys
  strict  one hop of a striped ring, whose keys are a token ahead
  ring    a shard's queries over the keys of all shards, all seen
  striped the same in a striped ring: half of each hop is seen

Work counts the pairs that are seen: 4 H FLOPs a head each, and 3.5 times that
forward and backward. `jax.nn` is one call over the same pairs (cuDNN's on a
GPU), without statistics that come in and go out: what `full`, `causal` and
`ring` lose against it is what hops cost. It knows no strict or striped hop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.bench import contest, timing
from ringjax.bench.contest import best
from ringjax.bench.timing import Skipped
from ringjax.errors import OptionError
from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Blockwise, Local
from ringjax.ops.attention.kernels.auto_kernel import KERNELS
from ringjax.ops.attention.kernels.turns import InTurn
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Everything
from ringjax.parallel import chips

PASSES = ("fwd", "fwdbwd")
HOPS = ("full", "causal", "strict")
RINGS = ("ring", "striped")
CONTESTANTS = ("kernel", "blockwise", "jax.nn")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

# Longer cases are checked at this length: the truth is slow.
_CHECKED = 4096
# XLA's own attention keeps a T x T array of scores for each head.
_DENSE_TOKENS = 8192
# Products that keep a GPU busy; elsewhere they would take the longest.
_GEMM = {"gpu": 8192, "tpu": 8192}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row: the work that all contestants do.

  Attributes:
    kind: of `HOPS` and `RINGS`.
    tokens: of a hop's queries and its keys; of a ring, in all.
    shards: of a ring.
  """

  kind: str
  dtype: str
  head_dim: int
  tokens: int
  backward: bool
  heads: int
  kv_heads: int
  shards: int

  @property
  def hops(self) -> int:
    return self.shards if self.kind in RINGS else 1

  @property
  def rows(self) -> int:
    """Queries of the shard."""
    return self.tokens // self.hops

  @property
  def pairs(self) -> float:
    t = self.rows
    if self.kind == "striped":
      # The middle one of the stripes: half of its hops are strict.
      return self.hops / 2 * t * t + (self.shards // 2 + 1 - self.hops / 2) * t
    causal = {"causal": 0.5, "strict": -0.5}
    if self.kind in causal:
      return t * t / 2 + causal[self.kind] * t
    return float(t * self.tokens)

  @property
  def flops(self) -> float:
    forward = 4.0 * self.pairs * self.head_dim * self.heads
    return forward * (3.5 if self.backward else 1)

  @property
  def context(self) -> Context:
    """Where queries and keys are."""
    t, r = np.arange(self.rows), self.hops
    mine = r // 2
    q, k = {
      "full": (t, t),
      "ring": (t, np.arange(self.tokens)),
      "causal": (t, t),
      "strict": (2 * t, 2 * t + 1),
      "striped": (r * t + mine, (np.arange(r)[:, None] + r * t).reshape(-1)),
    }[self.kind]
    at = lambda pos: Coords(
      jnp.asarray(pos, jnp.int32)[None], jnp.ones((1, len(pos)), jnp.int32)
    )
    seen = Everything() if self.kind in ("full", "ring") else Causal()
    return Context(at(q), at(k), seen)

  def __str__(self) -> str:
    return (
      f"{self.kind} {'fwd+bwd' if self.backward else 'fwd'} {self.dtype} "
      f"T={self.tokens} N={self.heads} K={self.kv_heads} H={self.head_dim}"
      + (f" R={self.shards}" if self.kind in RINGS else "")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to run; every combination is a row."""

  kinds: tuple[str, ...] = (*HOPS, *RINGS)
  tokens: tuple[int, ...] = (8192, 16384, 32768, 65536, 131072)
  head_dims: tuple[int, ...] = (64, 128)
  dtypes: tuple[str, ...] = ("bfloat16",)
  passes: tuple[str, ...] = PASSES
  contestants: tuple[str, ...] = CONTESTANTS
  heads: int = 8
  kv_heads: int = 8
  shards: int = 8
  rounds: int = 5
  # For the record: one device does everything.
  devices: int = 1

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={
        "kinds": (*HOPS, *RINGS),
        "dtypes": tuple(TOLERANCE),
        "passes": PASSES,
        "contestants": CONTESTANTS,
      },
      counts=("tokens", "head_dims", "heads", "kv_heads", "shards", "rounds"),
    )
    if self.heads % self.kv_heads:
      raise OptionError(
        "kv_heads", self.kv_heads, f"a divisor of {self.heads}", "change one"
      )
    odd = [t for t in self.tokens if t % self.shards]
    if odd and {*self.kinds} & {*RINGS}:
      raise OptionError(
        "tokens", odd[0], f"multiples of {self.shards}", "or change shards"
      )

  @property
  def cases(self) -> list[Case]:
    return [
      Case(
        kind=kind,
        dtype=dtype,
        head_dim=head_dim,
        tokens=tokens,
        backward=one == "fwdbwd",
        heads=self.heads,
        kv_heads=self.kv_heads,
        shards=self.shards,
      )
      for dtype, head_dim, tokens, kind, one in itertools.product(
        self.dtypes, self.head_dims, self.tokens, self.kinds, self.passes
      )
    ]


QUICK = Settings(
  tokens=(1024,), head_dims=(64,), heads=4, kv_heads=2, shards=4, rounds=3
)


def _inputs(case: Case) -> tuple[Local, jax.Array]:
  """Operands of the shard and the cotangent of its output."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(
    rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))
  )
  k, h = case.kv_heads, case.head_dim
  shape = (1, k, case.heads // k, case.rows, h)
  keys = (1, k, case.rows * case.hops, h)
  return Local(draw(*shape), draw(*keys), draw(*keys)), draw(*shape)


def _ready(
  case: Case, call: Callable[..., Any], context: Any
) -> Callable[..., Any]:
  """(x, do) -> (out,) or its gradients; `call(x, context)` attends."""

  def both(x: Local, do: jax.Array, context: Any) -> Any:
    if not case.backward:
      return (call(x, context),)
    return tuple(jax.vjp(lambda x: call(x, context), x)[1](do)[0])

  # Coordinates are operands: what a hop is is found at run time.
  jitted = jax.jit(both)
  return lambda x, do: jitted(x, do, context)


def _turns(local: Any, case: Case, x: Local) -> Callable[..., Any]:
  """All hops by a local algorithm."""
  scores = Scores(scale=case.head_dim**-0.5)
  hops, context = InTurn(local, case.hops), case.context
  if hasattr(local, "decline"):
    part = x._replace(k=x.k[:, :, : case.rows], v=x.v[:, :, : case.rows])
    seen = context._replace(k=Coords(*(c[:, : case.rows] for c in context.k)))
    why = local.decline(scores, part, Terms(), seen)
    if why is not None:
      raise Skipped(f"declines: {why}")
  call = lambda x, context: attend(hops, scores, x, Terms(), context)[0]
  return _ready(case, call, context)


def _kernel(case: Case, x: Local) -> Callable[..., Any]:
  device = jax.devices()[0]
  if device.platform not in KERNELS:
    raise Skipped(f"no kernel for {device.platform}")
  kind = KERNELS[device.platform][0]
  return _turns(kind(chip=chips.known(device.device_kind)), case, x)


def _blockwise(case: Case, x: Local) -> Callable[..., Any]:
  return _turns(Blockwise(), case, x)


def _plain(case: Case, x: Local) -> Callable[..., Any]:
  """`jax.nn.dot_product_attention`, once."""
  del x
  if case.kind in ("strict", "striped"):
    raise Skipped(f"skipped: it knows no {case.kind} hop")
  cudnn = jax.default_backend() == "gpu"
  if not cudnn and case.tokens > _DENSE_TOKENS:
    raise Skipped(f"skipped: T x T scores, only tried up to T={_DENSE_TOKENS}")
  attention = functools.partial(
    jax.nn.dot_product_attention,
    is_causal=case.kind == "causal",
    implementation="cudnn" if cudnn else None,
  )

  def call(x: Local, context: Any) -> jax.Array:
    del context
    b, k, g, t, h = x.q.shape
    flat = x.q.reshape(b, k * g, t, h)
    q, keys, v = (jnp.swapaxes(a, 1, 2) for a in (flat, x.k, x.v))
    return jnp.swapaxes(attention(q, keys, v), 1, 2).reshape(x.q.shape)

  return _ready(case, call, ())


_MAKE = {"kernel": _kernel, "blockwise": _blockwise, "jax.nn": _plain}


def run(
  settings: Settings,
  *,
  command: str = "",
  json: str | None = None,
  append: bool = False,
) -> dict[str, Any]:
  """Runs the benchmark; prints, writes and returns the result."""
  record = contest.Record(
    "kernels",
    settings,
    order=_order,
    summary=summary,
    command=command,
    json=json,
    append=append,
  )
  cases = settings.cases
  progress = timing.Progress(sum(c.flops for c in cases))
  done = 0.0
  for case in cases:
    row = _row(case, settings, progress, done)
    done += case.flops
    record.add(row, last=case is cases[-1])
    progress.clear()
    print(_table(case, row), flush=True)
  for name, ratio in record.result["summary"].items():
    print(f"{name}: {ratio['median']:.2f} of its time (median)", flush=True)
  return record.result


def _row(
  case: Case, settings: Settings, progress: timing.Progress, done: float
) -> dict[str, Any]:
  """Checks and times all contestants on one case."""
  names = settings.contestants
  steps = contest.steps(names, settings.rounds)

  def report(step: int, label: str) -> None:
    progress.at(done + case.flops * step / steps, f"{case}: {label}")

  report(0, "reference")
  few_tokens = min(case.tokens, _CHECKED // case.shards * case.shards)
  short = dataclasses.replace(case, tokens=few_tokens)
  few = _inputs(short)
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), few)
  one = dataclasses.replace(short, dtype="float32")
  reference = contest.numpy(_blockwise(one, wide[0])(*wide))
  x, do = _inputs(case)

  def make(name: str) -> contest.Made:
    found = contest.numpy(_MAKE[name](short, few[0])(*few))
    work = _MAKE[name](case, x)
    # The first call, with its compilation, is the warm-up as well.
    jax.block_until_ready(work(x, do))
    return lambda: work(x, do), found

  size = _GEMM.get(jax.default_backend(), timing.GEMM_SIZE)
  timings, differences = contest.run(
    names,
    make,
    lambda found: contest.compare(found, reference, TOLERANCE[case.dtype]),
    settings.rounds,
    report,
    {"gemm": timing.gemm(case.dtype, size)},
  )
  gemm = timings["gemm"]
  assert gemm.median_s is not None, gemm.reason
  rate = timing.gemm_flops(size) / gemm.median_s
  results = {}
  for name in names:
    found = timings[name]
    median = found.median_s
    results[name] = {
      "median_s": median,
      "min_s": found.min_s,
      "gemm_percent": median and 100 * case.flops / median / rate,
      "max_abs_difference": differences.get(name),
      "seconds": list(found.seconds),
      "reason": found.reason,
    }
  facts = dataclasses.asdict(case)
  return {
    **{key: value for key, value in facts.items() if key != "backward"},
    "pass": "fwdbwd" if case.backward else "fwd",
    "flops": case.flops,
    "checked_tokens": short.tokens,
    "gemm": {
      "size": size,
      "median_s": gemm.median_s,
      "flops_per_s": rate,
      "seconds": list(gemm.seconds),
    },
    "results": results,
  }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """The kernel's median time over another's: below 1 it is faster."""
  found = {}
  for name in CONTESTANTS[1:]:
    pairs = [(best(row, ["kernel"]), best(row, [name])) for row in rows]
    ratios = [a[1] / b[1] if a and b else None for a, b in pairs]
    known = [r for r in ratios if r is not None]
    if known:
      found[f"kernel over {name}"] = {
        "ratios": ratios,
        "median": float(np.median(known)),
      }
  return found


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
  """What tells rows apart, in the order of the tables."""
  return (
    list(TOLERANCE).index(row["dtype"]),
    row["heads"],
    row["kv_heads"],
    row["head_dim"],
    row["tokens"],
    (*HOPS, *RINGS).index(row["kind"]),
    row["shards"],
    PASSES.index(row["pass"]),
  )


def _table(case: Case, row: dict[str, Any]) -> str:
  rate = row["gemm"]["flops_per_s"]
  lines = [
    str(case),
    f"  gemm {row['gemm']['size']}^3: {rate / 1e12:.2f} TFLOP/s",
  ]
  for name, one in row["results"].items():
    if one["median_s"] is None:
      lines.append(f"  {name:10}          - {one['reason']}")
      continue
    lines.append(
      f"  {name:10}{one['median_s'] * 1e3:11.2f} ms "
      f"{one['gemm_percent']:5.1f} % of gemm, best "
      f"{one['min_s'] * 1e3:.2f} ms, off by {one['max_abs_difference']:.0e}"
    )
  return "\n".join(lines) + "\n"
