"""Hops of every kind by cuDNN, against float64. Run where there is a GPU:

  python -m tests.ops.attention.kernels.on_gpu

Prints a line each, and fails where one is off. Inputs are bfloat16; outputs,
log-sum-exps and all gradients are compared, also that of the log-sum-exp.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np

import ringjax as rj
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


def main() -> int:
  wrong = 0
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
