"""What the kernels for GPUs compute and take. Run where there is a GPU:

  python -m tests.ops.attention.kernels.on_gpu

Prints a line for hops of every kind by cuDNN, against float64, and for visits
of a cache, against XLA's loops in float32; fails where one is off. Inputs are
bfloat16; of hops outputs, log-sum-exps and all gradients are compared, also
that of the log-sum-exp. Visits are timed, beside the loops.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.kernels.auto_kernel import Loops
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.softmax import finalize
from tests import oracle

# Of bfloat16, as relative L2 distance.
FORWARD, BACKWARD = 5e-3, 1e-2

_ROW = np.arange


def kinds(t):
  """Positions (of queries, of keys) of a hop of each kind."""
  zigzag = np.concatenate([_ROW(t // 2) + t, _ROW(t // 2) + 5 * t])
  return {
    "full": (_ROW(t) + t, _ROW(t)),
    "causal": (_ROW(t), _ROW(t)),
    "strict": (2 * _ROW(t), 2 * _ROW(t) + 1),
    "pieces": (zigzag, zigzag + t),
    "other": (_ROW(t) // 2, _ROW(t)),
    "none": (_ROW(t), _ROW(t) + t),
  }


def errors(local, kind, t, h, n=4, kv=2, dtype=jnp.bfloat16):
  """How far results of a hop are off, and whether all are near enough."""
  q_pos, k_pos = kinds(t)[kind]
  case = oracle.build(
    t=t,
    h=h,
    n=n,
    kv=kv,
    q_pos=q_pos,
    k_pos=k_pos,
    is_causal=True,
    sees=lambda i, j: j <= i,
    dtype=dtype,
  )
  want = oracle.truth(case)
  got = oracle.run(case, strategy=rj.Gather(local), compiler={})
  found = {name: oracle.error(got[name], want[name]) for name in want}
  limit = lambda name: FORWARD if name in ("out", "lse") else BACKWARD
  return found, all(e <= limit(name) for name, e in found.items())


def decode(kernel, slots, queries, h, groups=4, kv=8, dtype=jnp.bfloat16):
  """(how far a visit of a cache is off, seconds of it by kernel and by loops).

  One of eight keys is an empty slot; the last layer of two is visited.
  """
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  q = draw(1, kv, groups, queries, h)
  k, v = draw(2, 1, kv, slots, h), draw(2, 1, kv, slots, h)
  used = slots // 8 * 7
  at = lambda pos: Coords(
    jnp.asarray(pos[None], jnp.int32),
    jnp.asarray((pos < used)[None], jnp.int32),
  )
  args = (q, k, v, at(_ROW(slots)), at(_ROW(used - queries, used)))

  def result(local, q, k, v, k_at, q_at):
    keys = ContiguousView(k, v, k_at, jnp.int32(1))
    context = Context(q_at, k_at, Causal())
    given = ScoreArgs(Scores(scale=h**-0.5), Terms(), context)
    return finalize(local.decode(q, keys, given))

  run = jax.jit(result, static_argnums=0)
  wide = jax.tree.map(
    lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, args
  )
  got, want = run(kernel, *args), run(Loops(), *wide)
  off = max(
    oracle.error(np.asarray(a, np.float64), np.asarray(b, np.float64))
    for a, b in zip(got, want, strict=True)
  )
  times = []
  for local in (kernel, Loops("gpu")):
    taken = []
    for _ in range(21):
      start = time.perf_counter()
      jax.block_until_ready(run(local, *args))
      taken.append(time.perf_counter() - start)
    times.append(statistics.median(taken))
  return off, times


def main() -> int:
  wrong = 0
  for slots, queries, h in (
    (1000, 3, 128), (16_384, 1, 64), (131_072, 1, 128), (131_072, 16, 96),
  ):  # fmt: skip
    off, times = decode(rj.DecodeGPU(), slots, queries, h)
    mark = "" if off <= FORWARD else "WRONG "
    wrong += off > FORWARD
    # What it reads: keys and values of eight heads, but for the empty slots.
    nbytes = slots // 8 * 7 * 8 * h * 2 * 2
    rates = [nbytes / t / 1e9 for t in times]
    print(
      f"{mark}visit S={slots} T={queries} H={h}: off {off:.1e}; "
      f"{times[0] * 1e6:.0f} us, {rates[0]:.0f} GB/s; "
      f"loops {times[1] * 1e6:.0f} us, {rates[1]:.0f} GB/s",
      flush=True,
    )
  for t, n, kv in ((1024, 4, 4), (1000, 8, 2)):
    for h in (64, 128):
      for kind in kinds(t):
        found, right = errors(rj.CuDNN(), kind, t, h, n, kv)
        words = " ".join(f"{name} {e:.1e}" for name, e in found.items())
        mark = "" if right else "WRONG "
        print(f"{mark}{kind} T={t} N={n} K={kv} H={h}: {words}", flush=True)
        wrong += not right
  return wrong


if __name__ == "__main__":
  sys.exit(main())
