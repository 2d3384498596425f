"""Times a hop: kernels, the loops of Blockwise, and one plain call.

Nothing is sent: the benchmark times one shard's part of a ring, all of its hops
one after another, on one device.

  full    one hop, every query sees every key
  causal  one hop, a shard's own keys
  strict  one hop of a striped ring, whose keys are a token ahead
  ring    a shard's queries over the keys of all shards, all seen
  striped a shard's queries in a striped ring: half of each hop is seen

Work counts unmasked pairs: 4 H FLOPs a head each, and 3.5 times that forward
and backward. `jax.nn` is one call over the same pairs (cuDNN's on a GPU),
without softmax statistics as inputs and outputs: the loss of `full`, `causal`
and `ring` against it is the cost of hops. It has no strict or striped hop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention.attention import (
  DENSE_TOKENS,
  AttentionBenchmark,
  AttentionCase,
  AttentionSettings,
)
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, Trial, option
from ringjax.bench.timing import Skipped
from ringjax.errors import OptionError
from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Blockwise, Local
from ringjax.ops.attention.kernels.auto_kernel import KERNELS
from ringjax.ops.attention.kernels.local_hops import LocalHops
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Everything
from ringjax.parallel import chips

HOPS = ("full", "causal", "strict")
RINGS = ("ring", "striped")
_KINDS = (*HOPS, *RINGS)
CONTESTANTS = ("kernel", "blockwise", "jax.nn")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

# Longer cases are checked at this length: the reference is slow.
_CHECKED = 4096
# Sizes of products that keep an accelerator busy; too slow on a CPU.
_GEMM = {"gpu": 8192, "tpu": 8192}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopCase(AttentionCase):
  """One row of the benchmark: the hops of a shard.

  Attributes:
    kind: Kind of hop or ring, of `HOPS` and `RINGS`.
    tokens: Queries and keys of a hop; all tokens of a ring.
    shards: Number of shards of a ring.
  """

  kind: str
  kv_heads: int
  shards: int

  @property
  def hops(self) -> int:
    return self.shards if self.kind in RINGS else 1

  @property
  def rows(self) -> int:
    """Number of queries of the shard."""
    return self.tokens // self.hops

  @property
  def pairs(self) -> float:
    t = self.rows
    if self.kind == "striped":
      # The middle stripe, half of whose hops are strict.
      return self.hops / 2 * t * t + (self.shards // 2 + 1 - self.hops / 2) * t
    causal = {"causal": 0.5, "strict": -0.5}
    if self.kind in causal:
      return t * t / 2 + causal[self.kind] * t
    return float(t * self.tokens)

  @property
  def context(self) -> Context:
    """Positions of queries and keys, and their mask."""
    t, r = np.arange(self.rows), self.hops
    stripe = r // 2
    q, k = {
      "full": (t, t),
      "ring": (t, np.arange(self.tokens)),
      "causal": (t, t),
      "strict": (2 * t, 2 * t + 1),
      "striped": (r * t + stripe, (np.arange(r)[:, None] + r * t).reshape(-1)),
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
class KernelSettings(AttentionSettings):
  """Settings of the benchmark of kernels; every combination is a row."""

  kinds: tuple[str, ...] = option(_KINDS, _KINDS, flag="parts")
  tokens: tuple[int, ...] = option((8192, 16384, 32768, 65536, 131072))
  dtypes: tuple[str, ...] = option(("bfloat16",), tuple(TOLERANCE))
  contestants: tuple[str, ...] = option(CONTESTANTS, CONTESTANTS)
  kv_heads: int = option(8)
  shards: int = option(8)
  # For the record: one device does everything.
  devices: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.heads % self.kv_heads:
      raise OptionError(
        "kv_heads",
        self.kv_heads,
        f"a divisor of the {self.heads} heads",
        f"pass --kv_heads={self.heads}",
      )
    odd = [t for t in self.tokens if t % self.shards]
    if odd and {*self.kinds} & {*RINGS}:
      raise OptionError(
        "tokens",
        odd[0],
        f"multiples of {self.shards}",
        f"round them up to {-(-odd[0] // self.shards) * self.shards}, or pass "
        "other --shards",
      )


def _inputs(case: HopCase) -> tuple[Local, jax.Array]:
  """Random operands of the shard and the cotangent of its output."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(
    rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))
  )
  k, h = case.kv_heads, case.head_dim
  shape = (1, k, case.heads // k, case.rows, h)
  keys = (1, k, case.rows * case.hops, h)
  return Local(draw(*shape), draw(*keys), draw(*keys)), draw(*shape)


def _jitted(
  case: HopCase, call: Callable[..., Any], context: Any
) -> Callable[..., Any]:
  """Compiles attention by `call`: (x, do) -> (out,), or its gradients."""

  def outputs_or_gradients(x: Local, do: jax.Array, context: Any) -> Any:
    if not case.backward:
      return (call(x, context),)
    return tuple(jax.vjp(lambda x: call(x, context), x)[1](do)[0])

  # Coordinates are operands, so that tiles are skipped at run time.
  jitted = jax.jit(outputs_or_gradients)
  return lambda x, do: jitted(x, do, context)


def _all_hops(local: Any, case: HopCase, x: Local) -> Callable[..., Any]:
  """Runs all hops with a local algorithm."""
  scores = Scores(scale=case.head_dim**-0.5)
  hops, context = LocalHops(local, case.hops), case.context
  if hasattr(local, "decline"):
    part = x._replace(k=x.k[:, :, : case.rows], v=x.v[:, :, : case.rows])
    seen = context._replace(k=Coords(*(c[:, : case.rows] for c in context.k)))
    why = local.decline(scores, part, Terms(), seen)
    if why is not None:
      raise Skipped(f"declines: {why}")
  call = lambda x, context: attend(hops, scores, x, Terms(), context)[0]
  return _jitted(case, call, context)


def _kernel(case: HopCase, x: Local) -> Callable[..., Any]:
  device = jax.devices()[0]
  if device.platform not in KERNELS:
    raise Skipped(f"no kernel for {device.platform}")
  kind = KERNELS[device.platform][0]
  return _all_hops(kind(chip=chips.machine_name(device.device_kind)), case, x)


def _blockwise(case: HopCase, x: Local) -> Callable[..., Any]:
  return _all_hops(Blockwise(), case, x)


def _jax_nn(case: HopCase, x: Local) -> Callable[..., Any]:
  """Runs `jax.nn.dot_product_attention` once over all keys."""
  del x
  if case.kind in ("strict", "striped"):
    raise Skipped(f"skipped: it has no {case.kind} hop")
  cudnn = jax.default_backend() == "gpu"
  if not cudnn and case.tokens > DENSE_TOKENS:
    raise Skipped(f"skipped: T x T scores, only tried up to T={DENSE_TOKENS}")
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

  return _jitted(case, call, ())


_BUILD = {"kernel": _kernel, "blockwise": _blockwise, "jax.nn": _jax_nn}


class KernelBenchmark(AttentionBenchmark):
  """Benchmark of hops of a ring, in percent of the matrix product."""

  name = "kernels"
  options = KernelSettings
  quick = KernelSettings(
    tokens=(1024,), head_dims=(64,), heads=4, kv_heads=2, shards=4, rounds=3
  )
  contestants: ClassVar[Mapping[str, Any]] = {}
  columns = (
    "dtype", "heads", "kv_heads", "head_dim", "tokens", "kind", "shards",
    "pass",
  )  # fmt: skip
  parts = _KINDS
  files = ("json", "append")
  case = HopCase
  listed_settings: ClassVar[Mapping[str, str]] = {
    "dtype": "dtypes",
    "head_dim": "head_dims",
    "tokens": "tokens",
    "kind": "kinds",
    "passes": "passes",
  }
  digits = 2

  def row(self, case: Any, report: Report) -> Row:
    few_tokens = min(case.tokens, _CHECKED // case.shards * case.shards)
    short = dataclasses.replace(case, tokens=few_tokens)
    short_inputs = _inputs(short)
    float32_inputs = jax.tree.map(lambda a: a.astype(jnp.float32), short_inputs)
    exact = dataclasses.replace(short, dtype="float32")
    reference = harness.host_arrays(
      _blockwise(exact, float32_inputs[0])(*float32_inputs)
    )
    x, do = _inputs(case)

    def build(name: str) -> Trial:
      output = harness.host_arrays(
        _BUILD[name](short, short_inputs[0])(*short_inputs)
      )
      work = _BUILD[name](case, x)
      # The first call compiles and is the warm-up.
      jax.block_until_ready(work(x, do))
      return lambda: work(x, do), output

    row = self.beside_product(
      case,
      build,
      reference,
      TOLERANCE,
      report,
      size=_GEMM.get(jax.default_backend()),
    )
    return row | {"checked_tokens": short.tokens}

  def summary(self, rows: Sequence[Row]) -> Row:
    """Ratio of the kernel's median time to others': below 1 it is faster."""
    ratios = {
      f"kernel over {name}": harness.ratios(rows, ["kernel"], [name])
      for name in CONTESTANTS[1:]
    }
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}

  def closing(self, result: Row) -> str:
    return "\n".join(
      f"{name}: {ratio['median']:.2f} of its time (median)"
      for name, ratio in result["summary"].items()
    )
