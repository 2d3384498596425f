"""Blockwise cross entropy: the loss without the [T, V] array of logits.

Guarantees: for a token with hidden state h and label y, with logits l = h W
(and l = c tanh(h W / c) under a soft cap c),

  nll = logsumexp(l) - l[y] + z_loss * logsumexp(l)^2,

forward and backward, with no array of T x V numbers at any time: the forward
pass keeps one logsumexp a token, and the backward pass computes the logits of
a block of tokens again. Logits, statistics and the sum over blocks of the
gradient of W are float32 (float64 for float64 inputs); h and W are never cast.
Cost: 2 T D V FLOPs forward, 6 T D V backward.
Memory: the logits of one block, a float32 sum of the size of W backward.
Ref:  Liu and Abbeel 2023, arXiv 2305.19370 (blocks of tokens); Chowdhery et
al. 2022, arXiv 2204.02311 (z-loss); Gemma Team 2024, arXiv 2408.00118 (cap).

Blocks are those of `blockwise_feedforward`: each takes tokens of every shard,
so a sharded sequence stays where it is. W may be sharded over its vocabulary:
every step over V is then a sum or a maximum, of which one number a token is
sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import as_array, positive_int
from ringjax.errors import (
  DtypeError,
  MeshError,
  OptionError,
  ShapeError,
)
from ringjax.ops.feedforward import (
  Steps,
  shards_of,
  spec_of,
)
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives

# The label of tokens without one, as everywhere.
IGNORE_INDEX = -100

# What takes the place of a label that is none. Labels are 0 or more.
_IGNORED = -1
_WRONG = -2

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def blockwise_cross_entropy(
  h: Float[Array, "*B T D"],
  w_vocab: Float[Array, "D V"],
  labels: Int[Array, "*B T"],
  weights: Float[Array, "*B T"]
  | Int[Array, "*B T"]
  | Bool[Array, "*B T"]
  | None = None,
  block: int = 1024,
  *,
  logits_soft_cap: float | None = None,
  z_loss: float = 0.0,
  ignore_index: int | None = IGNORE_INDEX,
) -> Float[Array, "*B T"]:
  """Negative log-likelihood of each token's label, times its weight.

  Args:
    h: [B, T, D] or [T, D], the last hidden states.
    w_vocab: [D, V], the output projection, in the dtype of h.
    labels: [B, T] or [T], any integer dtype. A label outside of [0, V) raises
      an error where its value can be seen; under jit it makes that token's
      loss NaN. It is never clamped.
    weights: [B, T] or [T], what each token's loss is multiplied by; float,
      bool or int. Differentiable. Not a way to skip a token with a wrong
      label (0 * NaN is NaN): give it the label `ignore_index`.
    block: the most tokens of a sequence in one step, counted over all its
      shards as in `blockwise_feedforward`.
    logits_soft_cap: c, for logits c tanh(l / c).
    z_loss: factor of the square of the logsumexp; 0 for none.
    ignore_index: tokens with this label have loss 0 and gradients 0, whatever
      their hidden state is; None: no label is ignored. A mean
      leaves out their weights.

  Returns:
    [B, T] or [T], float32 (float64 for float64 inputs). It is not averaged:
    for the mean over weighted tokens divide its sum by that of the weights.
    Reverse mode only, once: `jax.jvp` and second derivatives raise.

  Raises:
    InputTypeError, DtypeError, ShapeError, OptionError, MeshError: an argument
      is not of the kind described here.
  """
  h, w, labels = _operands(h, w_vocab, labels)
  block = positive_int("block", block)
  spec = _Spec(
    Steps.of(max(1, h.shape[-2]), block, shards_of(h)),
    _number("logits_soft_cap", logits_soft_cap, least=math.ulp(0.0)),
    _number("z_loss", z_loss, least=0.0) or 0.0,
  )
  code = _encode(labels, w.shape[1], ignore_index)
  if weights is not None:
    weights = _weights(weights, labels.shape)
  batched = h.ndim == 3
  if not batched:
    h, code = h[None], code[None]
  _check_mesh(h, w)
  nll = _nll(spec, *_alike(h, w, code))
  nll = nll if batched else nll[0]
  return nll if weights is None else nll * weights.astype(nll.dtype)


def _alike(h: Array, w: Array, code: Array) -> tuple[Array, Array, Array]:
  """Types all as varying over the same manual axes.

  Then the backward rule may return each shard's own sums; the transpose of
  the cast adds them up, for W in float32.
  """
  axes = collectives.varying_axes(h, w, code)
  if axes - collectives.varying_axes(w):
    wide = collectives.vary(w.astype(wide_dtype(w.dtype)), axes)
    w = wide.astype(w.dtype)
  h, code = collectives.vary((h, code), axes)
  return _placed(h, w, code)


def _placed(h: Array, w: Array, code: Array) -> tuple[Array, Array, Array]:
  """The operands on one explicit mesh, if any of them is on one.

  What was made before the mesh was entered has no place on it yet, and labels
  need not lie as their tokens do.
  """
  at = [spec_of(x) for x in (h, w, code)]
  found = next((x for x in (h, w, code) if spec_of(x) is not None), None)
  if found is None:
    return h, w, code
  tokens = (at[0] or at[2] or (None, None))[:2]
  on = lambda x, spec: x if spec_of(x) == spec else _reshard(x, found, spec)
  return (
    on(h, at[0] or (*tokens, None)),
    on(w, at[1] or (None, None)),
    on(code, tokens),
  )


@functools.partial(jax.jit, static_argnums=2)
def _reshard(x: Array, like: Array, spec: tuple[Any, ...]) -> Array:
  """`x` over the axes of `spec` of the mesh of `like`."""
  return jax.sharding.reshard(x, _sharding(like, spec))


@dataclasses.dataclass(frozen=True)
class _Spec:
  """The static part of a call."""

  steps: Steps
  soft_cap: float | None
  z_loss: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(spec: _Spec, h: Array, w: Array, code: Array) -> Array:
  return _forward(spec, h, w, code)[0]


# Compiled also for a caller who compiles nothing, so that a block's logits are
# not written out once for each thing that is done to them.
@functools.partial(jax.jit, static_argnums=0)
def _forward(
  spec: _Spec, h: Array, w: Array, code: Array
) -> tuple[Array, tuple[Array, ...]]:
  """nll [B, T] and what the backward pass needs."""

  def one(part: tuple[Array, Array]) -> tuple[Array, Array]:
    h, code = part
    logits, _ = _logits(spec, _kept(h, code), w)
    top = jnp.max(logits, -1)
    total = jnp.sum(jnp.exp(logits - top[..., None]), -1)
    lse = top + jnp.log(total)
    hit = jnp.sum(jnp.where(_is_label(logits, code), logits, 0), -1)
    nll = lse - hit + spec.z_loss * lse * lse
    nll = jnp.where(code == _WRONG, jnp.nan, nll)
    return jnp.where(code == _IGNORED, 0, nll), lse

  if 0 in h.shape[:2]:
    lse = jnp.zeros_like(code, wide_dtype(h.dtype))
    return lse, (h, w, code, lse)
  steps = spec.steps
  blocks, rest = _cut(steps, (h, code))
  done = steps.run(one, blocks, 1)
  left = None if rest is None else one(rest)
  nll, lse = steps.join(done, left, 1)
  return nll, (h, w, code, lse)


@functools.partial(jax.jit, static_argnums=0)
def _backward(
  spec: _Spec, saved: tuple[Array, ...], g: Array
) -> tuple[Array, Array, None]:
  """Gradients of h and w, from the logits computed again."""
  h, w, code, lse = saved
  if 0 in h.shape[:2]:
    return jnp.zeros_like(h), jnp.zeros_like(w), None
  # float16 has no room for p * g where g is one over the number of tokens:
  # the products take g / unit, of at most 1, and their sums take the unit.
  unit = jnp.max(jnp.abs(g)) if h.dtype == jnp.float16 else None
  if unit is not None:
    unit = jnp.where(unit > 0, unit, 1)
    g = g / unit
  g = jnp.where(code == _IGNORED, 0, g)
  steps = spec.steps

  def one(dw: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
    h, code, lse, g = part
    h = _kept(h, code)
    logits, tanh = _logits(spec, h, w)
    p = jnp.exp(logits - lse[..., None])
    dl = p * (1 + 2 * spec.z_loss * lse)[..., None]
    dl = dl - jnp.where(_is_label(logits, code), 1, 0).astype(dl.dtype)
    dl = jnp.where((code == _WRONG)[..., None], jnp.nan, dl)
    dl = dl * jnp.where(code == _IGNORED, 0, g)[..., None]
    if tanh is not None:
      dl = dl * (1 - tanh * tanh)
    dl = dl.astype(h.dtype)
    dh = _dot("btv,dv->btd", dl, w, spec_of(h))
    if unit is not None:
      dh = dh * unit
    dw = dw + _dot("btd,btv->dv", h, dl, spec_of(w))
    return dw, dh.astype(h.dtype)

  blocks, rest = _cut(steps, (h, code, lse, g))
  dw = jnp.zeros_like(w, wide_dtype(w.dtype))
  dw = collectives.vary(dw, collectives.varying_axes(w))
  if steps.count == 1:
    dw, dh = one(dw, jax.tree.map(lambda b: b[0], blocks))
    dh = dh[None]
  else:
    dw, dh = lax.scan(one, dw, blocks)
  left = None
  if rest is not None:
    dw, left = one(dw, rest)
  if unit is not None:
    dw = dw * unit
  return steps.join(dh, left, 1), dw.astype(w.dtype), None


_nll.defvjp(_forward, _backward)


def _cut(steps: Steps, parts: tuple[Array, ...]) -> tuple[Any, Any]:
  cut = [steps.cut(x, 1) for x in parts]
  blocks, rest = tuple(b for b, _ in cut), tuple(r for _, r in cut)
  return blocks, None if rest[0] is None else rest


def _kept(h: Array, code: Array) -> Array:
  # A zero gradient times what padding holds may be NaN; times 0 it is 0.
  return jnp.where((code == _IGNORED)[..., None], jnp.zeros_like(h), h)


def _logits(spec: _Spec, h: Array, w: Array) -> tuple[Array, Array | None]:
  """[B, c, V] in float32, and the tanh of the cap for its derivative."""
  out = spec_of(h)
  if out is not None:
    out = (*out[:2], (spec_of(w) or (None, None))[1])
  logits = _dot("btd,dv->btv", h, w, out)
  if spec.soft_cap is None:
    return logits, None
  tanh = jnp.tanh(logits / spec.soft_cap)
  return spec.soft_cap * tanh, tanh


def _is_label(logits: Array, code: Array) -> Array:
  """Where each row's label is, without reading across a sharded V."""
  ids = lax.broadcasted_iota(
    jnp.int32,
    logits.shape,
    2,
    out_sharding=_sharding(logits, spec_of(logits)),
  )
  return ids == code[..., None]


def _dot(equation: str, a: Array, b: Array, out: Any) -> Array:
  """An einsum that accumulates in float32 and never casts its operands."""
  exact = a.dtype in (jnp.float32, jnp.float64)
  return jnp.einsum(
    equation,
    a,
    b,
    preferred_element_type=wide_dtype(a.dtype),
    precision=lax.Precision.HIGHEST if exact else None,
    out_sharding=_sharding(a, out),
  )


def _sharding(x: Array, spec: Any) -> NamedSharding | None:
  if spec is None:
    return None
  return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def _operands(
  h: jax.Array, w: jax.Array, labels: jax.Array
) -> tuple[Array, Array, Any]:
  """h, w and labels, found to fit; labels as they came, to be looked at."""
  h, w = as_array("h", h), as_array("w_vocab", w)
  as_array("labels", labels)
  if h.ndim not in (2, 3):
    raise ShapeError(
      "h", f"shape {h.shape}", "[B, T, D] or [T, D]", "reshape it"
    )
  if w.ndim != 2 or w.shape[0] != h.shape[-1] or w.shape[1] == 0:
    raise ShapeError(
      "w_vocab",
      f"shape {w.shape} beside an h of shape {h.shape}",
      f"[D, V] with D = {h.shape[-1]}",
      "transpose it if it is an embedding table [V, D]",
    )
  for name, x in (("h", h), ("w_vocab", w)):
    if x.dtype.name not in _DTYPES:
      raise DtypeError(
        name,
        x.dtype,
        f"one of {', '.join(_DTYPES)}",
        f"cast it, e.g. {name}.astype(jnp.float32)",
      )
  if h.dtype != w.dtype:
    raise DtypeError(
      "w_vocab",
      f"{w.dtype} beside an h of {h.dtype}",
      "one dtype for both",
      "cast it: w_vocab.astype(h.dtype)",
    )
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise DtypeError(
      "labels", labels.dtype, "an integer dtype", "pass ids, not one-hots"
    )
  _check_shape("labels", labels.shape, h.shape[:-1])
  return h, w, labels


def _weights(weights: jax.Array | None, shape: tuple[int, ...]) -> Array:
  weights = as_array("weights", weights)
  if weights.dtype.kind == "c":
    raise DtypeError("weights", weights.dtype, "float, bool or int", "cast it")
  _check_shape("weights", weights.shape, shape)
  return weights


def _check_shape(
  name: str, got: tuple[int, ...], want: tuple[int, ...]
) -> None:
  if got != want:
    raise ShapeError(
      name,
      f"shape {got}",
      f"{want}, one for each token of h",
      "broadcast or slice it to that",
    )


def _number(name: str, value: Any, least: float) -> float | None:
  if value is None:
    return None
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not least <= float(value) < math.inf:
    wanted = "a positive number" if least else "a number of at least 0"
    raise OptionError(
      name,
      repr(value),
      f"{wanted}, known when the loss is traced",
      "leave it out for none",
    )
  return float(value)


def _check_mesh(h: Array, w: Array) -> None:
  over = [_axes(spec_of(h) or ()), _axes((spec_of(w) or ())[1:])]
  if set(over[0]) & set(over[1]):
    raise MeshError(
      "w_vocab",
      f"a vocabulary over mesh axes {over[1]}, and h over {over[0]}",
      "different mesh axes for the tokens and for the vocabulary",
      "jax.sharding.reshard one of them",
    )


def _axes(spec: tuple[Any, ...]) -> tuple[str, ...]:
  flat: list[str] = []
  for entry in spec:
    flat += [entry] if isinstance(entry, str) else entry or ()
  return tuple(flat)


def _encode(labels: jax.Array, vocab: int, ignore: int | None) -> Array:
  """int32 labels; _IGNORED and _WRONG mark ignored and impossible ones."""
  dtype = jnp.asarray(labels).dtype
  info = np.iinfo(dtype)
  if ignore == IGNORE_INDEX and info.min > IGNORE_INDEX:
    # No label of an unsigned dtype is the default.
    ignore = None
  if ignore is not None:
    whole = isinstance(ignore, numbers.Integral) and ignore is not True
    if not whole or not info.min <= int(ignore) <= info.max:
      raise OptionError(
        "ignore_index",
        f"{ignore!r} with labels of {dtype}",
        "None or an int that this dtype holds",
        "cast labels to int32",
      )
  _check_labels(labels, vocab, ignore)
  labels = jnp.asarray(labels)
  # In the labels' own dtype: a cast could bring a wrong id into range.
  good = labels >= 0
  if vocab <= info.max:
    good = good & (labels < vocab)
  skip = jnp.zeros_like(good) if ignore is None else labels == int(ignore)
  code = jnp.where(good, labels, 0).astype(jnp.int32)
  code = jnp.where(good, code, _WRONG)
  return jnp.where(skip, _IGNORED, code)


def _check_labels(labels: jax.Array, vocab: int, ignore: int | None) -> None:
  """Raises for a wrong label where its value can be seen from here."""
  if isinstance(labels, jax.core.Tracer):
    return
  if isinstance(labels, jax.Array) and not labels.is_fully_addressable:
    return
  seen = np.asarray(labels)
  wrong = (seen < 0) | (seen >= vocab)
  if ignore is not None:
    wrong &= seen != ignore
  if wrong.any():
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise OptionError(
      "labels",
      f"{int(seen[at])} at {list(at)}, and {int(wrong.sum()) - 1} more",
      f"ids from 0 to {vocab - 1}",
      f"mark tokens without a label by {IGNORE_INDEX}, or pass ignore_index=",
    )
