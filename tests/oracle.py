"""The truth that the attention tests compare with: float64 NumPy, by hand.

Law: nothing here is shared with ringjax. `attend` is softmax attention with
every extra, over whole arrays in natural order, and its gradients, derived on
paper. A `Case` is a call in natural order together with what it means; `run`
brings it into a layout, calls ringjax, and brings the answer back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import ringjax as rj


def attend(
  q,
  k,
  v,
  visible,
  do,
  dlse,
  *,
  scale=None,
  bias=None,
  slopes=None,
  distance=None,
  sinks=None,
  cap=None,
  weights=None,
):
  """out, lse and all gradients, as a dict.

  q [B,T,N,H], k [B,S,K,H], v [B,S,K,J]; visible, bias, weights (of dropout)
  and distance broadcast to [B,N,T,S]; slopes, sinks [N]. do [B,T,N,J] and
  dlse [B,T,N] are the cotangents.
  """
  wide = lambda x: None if x is None else np.asarray(x).astype(np.float64)
  q, k, v, do, dlse = map(wide, (q, k, v, do, dlse))
  bias, slopes, sinks, distance = map(wide, (bias, slopes, sinks, distance))
  n, h, kv = *q.shape[2:], k.shape[2]
  scale = h**-0.5 if scale is None else scale
  each = lambda x: np.repeat(x, n // kv, axis=2)  # a key for every query head
  dlse = dlse.transpose(0, 2, 1)[..., None]
  s = np.einsum("btnh,bsnh->bnts", q, each(k)) * scale
  slope_of_cap = 1.0
  if cap is not None:
    slope_of_cap = 1 - np.tanh(s / cap) ** 2
    s = cap * np.tanh(s / cap)
  if slopes is not None:
    s = s - slopes[:, None, None] * distance
  if bias is not None:
    s = s + bias
  s = np.where(visible, s, -np.inf)
  sink = np.full((1, n, 1, 1), -np.inf)
  if sinks is not None:
    sink = sinks[None, :, None, None]
  m = np.maximum(s.max(-1, keepdims=True), sink)
  m = np.where(np.isinf(m), 0, m)
  total = np.exp(s - m).sum(-1, keepdims=True) + np.exp(sink - m)
  seen = total > 0
  lse = np.where(seen, m + np.log(np.where(seen, total, 1)), -np.inf)
  p = np.exp(s - m) / np.where(seen, total, 1)
  weights = 1.0 if weights is None else wide(weights)
  out = np.einsum("bnts,bsnj->btnj", p * weights, each(v))
  # The backward pass.
  fold = lambda x: x.reshape(*x.shape[:2], kv, n // kv, -1).sum(3)
  dp = np.einsum("btnj,bsnj->bnts", do, each(v)) * weights
  delta = (do * out).sum(-1).transpose(0, 2, 1)[..., None] - dlse
  ds = p * (dp - delta)
  dx = ds * slope_of_cap * scale
  found = {
    "out": out,
    "lse": lse[..., 0].transpose(0, 2, 1),
    "query": np.einsum("bnts,bsnh->btnh", dx, each(k)),
    "key": fold(np.einsum("bnts,btnh->bsnh", dx, q)),
    "value": fold(np.einsum("bnts,btnj->bsnj", p * weights, do)),
  }
  if bias is not None:
    thin = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(i for i in range(4) if thin[i] == 1)
    found["bias"] = ds.sum(axes, keepdims=True).reshape(bias.shape)
  if slopes is not None:
    found["alibi_slopes"] = -(ds * distance).sum((0, 2, 3))
  if sinks is not None:
    share = np.where(seen, np.exp(sink - np.where(seen, lse, 0)), 0)
    found["sinks"] = -(share * delta).sum((0, 2, 3))
  return found


@dataclasses.dataclass(frozen=True)
class Case:
  """A call of `dot_product_attention` in natural order.

  Attributes:
    arrays: the operands with a gradient, by the name of their argument.
    fixed: the array arguments without one.
    options: the static arguments.
    visible: bool, broadcastable to [B, N, T, S].
    distance: |position of q - position of k|, [B or 1, 1, T, S].
    weights: of dropout, or None.
    cotangents: of out and lse.
  """

  arrays: dict[str, Any]
  fixed: dict[str, Any]
  options: dict[str, Any]
  visible: Any
  distance: Any
  weights: Any
  cotangents: tuple[Any, Any]


def build(
  *,
  b=2,
  t=72,
  s=None,
  n=4,
  kv=2,
  h=16,
  j=None,
  sees=None,
  allow=None,
  bias=None,
  sinks=False,
  slopes=False,
  q_pos=None,
  k_pos=None,
  q_seg=None,
  k_seg=None,
  relates=None,
  q_len=None,
  k_len=None,
  spread=1.0,
  dtype=np.float32,
  weights=None,
  seed=0,
  **options,
):
  """A random `Case`.

  `sees(i, j)` is the mask over positions in NumPy, whatever says the same to
  ringjax is among the options, and `relates(a, b)` is whether a query of
  segment a may see segment b, by default its own. `bias` is a shape, `allow` a
  shape or an array, `spread` about the standard deviation of the logits.
  """
  rng = np.random.default_rng(seed)
  s, j = s or t, j or h
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  arrays = {
    "query": (spread * rng.normal(size=(b, t, n, h))).astype(dtype),
    "key": normal(b, s, kv, h),
    "value": normal(b, s, kv, j),
  }
  if bias is not None:
    arrays["bias"] = normal(*bias)
  if sinks:
    arrays["sinks"] = normal(n)
  if slopes:
    arrays["alibi_slopes"] = np.abs(normal(n)) / np.asarray(4, dtype)
  # An all-true axis costs nothing and keeps the broadcasts in one shape.
  row = lambda x: np.reshape(x, (-1, 1, t, 1))
  column = lambda x: np.reshape(x, (-1, 1, 1, s))
  at_q = row(np.arange(t) if q_pos is None else q_pos)
  at_k = column(np.arange(s) if k_pos is None else k_pos)
  visible = np.ones((1, 1, t, s), bool)
  if sees is not None:
    visible = visible & sees(at_q, at_k)
  if isinstance(allow, tuple):
    # Some rows see nothing.
    allow = rng.random(allow) < 0.6
    allow = allow & (rng.random((*allow.shape[:-1], 1)) < 0.9)
  if allow is not None:
    visible = visible & allow
  fixed = {
    "mask": allow,
    "q_positions": q_pos,
    "kv_positions": k_pos,
    "q_segment_ids": q_seg,
    "kv_segment_ids": k_seg,
    "query_seq_lengths": q_len,
    "key_value_seq_lengths": k_len,
  }
  fixed = {name: x for name, x in fixed.items() if x is not None}
  for name, x in fixed.items():
    if name != "mask":
      fixed[name] = np.asarray(x, np.int32)
  if q_seg is not None:
    q_seg, k_seg = row(q_seg), column(q_seg if k_seg is None else k_seg)
    related = q_seg == k_seg if relates is None else relates(q_seg, k_seg)
    visible = visible & related & (q_seg != 0) & (k_seg != 0)
  per_example = lambda x: np.reshape(x, (-1, 1, 1, 1))
  if q_len is not None:
    visible = visible & (row(np.arange(t)) < per_example(q_len))
  if k_len is not None:
    visible = visible & (column(np.arange(s)) < per_example(k_len))
  wide = np.float64 if dtype == np.float64 else np.float32
  cotangents = normal(b, t, n, j), rng.normal(size=(b, t, n)).astype(wide)
  return Case(arrays, fixed, options, visible, np.abs(at_q - at_k), weights,
              cotangents)  # fmt: skip


def truth(case):
  """What `run` has to find."""
  x = case.arrays
  return attend(
    x["query"],
    x["key"],
    x["value"],
    case.visible,
    *case.cotangents,
    scale=case.options.get("scale"),
    bias=x.get("bias"),
    slopes=x.get("alibi_slopes"),
    distance=case.distance,
    sinks=x.get("sinks"),
    cap=case.options.get("logits_soft_cap"),
    weights=case.weights,
  )


# Which axes of an argument run over the queries (0) and over the keys (1),
# counted from the end, because leading axes may be missing.
AXES = {"query": {-3: 0}, "key": {-3: 1}, "value": {-3: 1}, "out": {-3: 0},
         "lse": {-2: 0}, "bias": {-2: 0, -1: 1}, "mask": {-2: 0, -1: 1},
         "q_positions": {-1: 0}, "q_segment_ids": {-1: 0},
         "kv_positions": {-1: 1}, "kv_segment_ids": {-1: 1}}  # fmt: skip


def reorder(name, x, layout, shards, back=False):
  """Argument or result `name` into the order of `layout`, or back."""
  for axis in AXES.get(name, {}):
    if x.ndim >= -axis and x.shape[axis] > 1:
      order = layout.order(x.shape[axis], shards)
      x = np.take(x, np.argsort(order) if back else order, axis)
  return x


# Compiling is what these tests take their time for, and XLA may take half.
QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_parallel_codegen_split_count": 1,
  "xla_llvm_disable_expensive_passes": True,
}


def compiled(
  case,
  function=None,
  *,
  layout=None,
  shards=1,
  place=lambda name, x: x,
  compiler=None,
  **options,
):
  """One program that finds what `truth` finds, for all cases of one shape.

  `function` has the arguments of `dot_product_attention`. `place(name, x)`
  may put an argument on devices; `compiler` are options of `jax.jit`'s, by
  default those that compile quickly. Returns a function from a case to a
  dict: out, lse and all gradients, in natural order.
  """
  function = function or rj.dot_product_attention
  layout = layout or rj.Contiguous()
  put = lambda tree: {
    name: place(name, reorder(name, x, layout, shards))
    for name, x in tree.items()
  }
  options = {**case.options, "layout": layout, **options}

  def both(arrays, fixed, cotangents):
    call = lambda x: function(**x, **fixed, **options, return_residual=True)
    results, pull = jax.vjp(call, arrays)
    return results, pull((cotangents["out"], cotangents["lse"]))[0]

  jitted = jax.jit(
    both, compiler_options=QUICK if compiler is None else compiler
  )

  def find(case):
    cotangents = dict(zip(("out", "lse"), case.cotangents, strict=True))
    (out, lse), gradients = jitted(
      put(case.arrays), put(case.fixed), put(cotangents)
    )
    found = {"out": out, "lse": lse, **gradients}
    return {
      name: reorder(name, np.asarray(x), layout, shards, back=True)
      for name, x in found.items()
    }

  return find


def run(case, function=None, **options):
  """What `compiled` gives for its own case."""
  return compiled(case, function, **options)(case)


def error(got, want):
  """Relative L2 distance; infinite where infinities or NaNs disagree."""
  got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
  assert got.shape == want.shape, (got.shape, want.shape)
  finite = np.isfinite(want)
  if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
    return np.inf
  off = np.linalg.norm(got[finite] - want[finite])
  if np.isnan(off):
    return np.inf
  return off / max(np.linalg.norm(want[finite]), 1e-30) if off else 0.0


def check(got, want, forward=3e-6, backward=1e-5):
  """Every result within its tolerance; float32 ones by default."""
  assert got.keys() == want.keys()
  errors = {name: error(got[name], want[name]) for name in want}
  limit = lambda name: forward if name in ("out", "lse") else backward
  wrong = {name: e for name, e in errors.items() if not e <= limit(name)}
  assert not wrong, f"relative errors {wrong}"
  return errors
