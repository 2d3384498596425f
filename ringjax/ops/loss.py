"""Blockwise cross entropy: the loss without the [T, V] array of logits.

Guarantees: for a token with hidden state h and label y, with logits l = h W
(and l = c tanh(h W / c) under a soft cap c),

  nll = logsumexp(l) - l[y] + z_loss * logsumexp(l)^2,

forward and backward, with no array of T x V numbers at any time: the forward
pass keeps one logsumexp a token, and the backward pass recomputes the logits of
a block of tokens. Logits, statistics and the sum over blocks of the gradient of
W are float32 (float64 for float64 inputs); h and W are never cast.
Cost: 2 T D V FLOPs forward, 6 T D V backward.
Memory: the logits of one block, a float32 sum of the size of W backward.
Ref:  Liu and Abbeel 2023, arXiv 2305.19370 (blocks of tokens); Chowdhery et
al. 2022, arXiv 2204.02311 (z-loss); Gemma Team 2024, arXiv 2408.00118 (cap).

Blocks are those of `blockwise_feedforward`: each takes tokens of every shard,
so a sharded sequence stays where it is. W may be sharded over its vocabulary:
every step over V is then a sum or a maximum, for which one number a token is
sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
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
from ringjax.ops.softmax import wide_dtype, widened
from ringjax.parallel import collectives

# The usual label of tokens without one.
IGNORE_INDEX = -100

# Codes in place of invalid labels. Labels are 0 or more.
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
    h: Last hidden states, [B, T, D] or [T, D].
    w_vocab: Output projection, [D, V], in the dtype of h.
    labels: Labels, [B, T] or [T], any integer dtype. A label outside of [0, V)
      raises an error where its value is known; under jit it makes that token's
      loss NaN. It is never clamped.
    weights: Factors of each token's loss, [B, T] or [T]; float, bool or int.
      Differentiable. They cannot hide a token with a wrong label (0 * NaN is
      NaN): give it the label `ignore_index`.
    block: Most tokens of a sequence in one step, counted over all its shards as
      in `blockwise_feedforward`.
    logits_soft_cap: Soft cap c, for logits c tanh(l / c).
    z_loss: Factor of the square of the logsumexp; 0 for none.
    ignore_index: Label of tokens that have loss 0 and gradients 0, whatever
      their hidden state is; None: no label is ignored. A mean should exclude
      their weights.

  Returns:
      Losses [B, T] or [T], float32 (float64 for float64 inputs), not averaged:
      for the mean over weighted tokens divide their sum by that of the weights.
      Reverse mode only, once: `jax.jvp` and second derivatives raise.

    Raises:
      InputTypeError, DtypeError, ShapeError, OptionError, MeshError: If an
        argument is not as described here.
  """
  h, w, labels = _operands(h, w_vocab, labels)
  block = positive_int("block", block)
  options = (
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
  h, w, code = _vary_alike(h, w, code)
  nll = _nll(_Spec(*options, w.dtype), h, w, code)
  nll = nll if batched else nll[0]
  return nll if weights is None else nll * weights.astype(nll.dtype)


def _vary_alike(h: Array, w: Array, code: Array) -> tuple[Array, Array, Array]:
  """Make all types vary over the same manual axes.

  Then the backward rule may return each shard's own sums; the transpose of
  the cast adds them up. W is float32 then, and so are its sums.
  """
  axes = collectives.varying_axes(h, w, code)
  if axes - collectives.varying_axes(w):
    w = widened(w, h, w, code)
  h, code = collectives.vary((h, code), axes)
  return _on_one_mesh(h, w, code)


def _on_one_mesh(h: Array, w: Array, code: Array) -> tuple[Array, Array, Array]:
  """Reshard the operands to one explicit mesh, if any of them is on one.

  Arrays made before the mesh was entered have no place on it yet, and labels
  may be sharded differently from their tokens.
  """
  specs = [spec_of(x) for x in (h, w, code)]
  on_mesh = next((x for x in (h, w, code) if spec_of(x) is not None), None)
  if on_mesh is None:
    return h, w, code
  tokens = (specs[0] or specs[2] or (None, None))[:2]
  place = lambda x, spec: (
    x if spec_of(x) == spec else _reshard(x, on_mesh, spec)
  )
  return (
    place(h, specs[0] or (*tokens, None)),
    place(w, specs[1] or (None, None)),
    place(code, tokens),
  )


@functools.partial(jax.jit, static_argnums=2)
def _reshard(x: Array, like: Array, spec: tuple[Any, ...]) -> Array:
  """Reshard `x` over the axes of `spec` of the mesh of `like`."""
  return jax.sharding.reshard(x, _sharding(like, spec))


@dataclasses.dataclass(frozen=True)
class _Spec:
  """Static part of a call.

  Attributes:
    steps: Loop over the tokens.
    soft_cap: Soft cap of the logits.
    z_loss: Factor of the square of the logsumexp.
    gradient_dtype: Dtype of the gradient of W, and of W as an argument;
      products cast it to that of h.
  """

  steps: Steps
  soft_cap: float | None
  z_loss: float
  gradient_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(spec: _Spec, h: Array, w: Array, code: Array) -> Array:
  return _forward(spec, h, w, code)[0]


# Compiled also for a caller who compiles nothing, so that a block's logits are
# not written to memory between elementwise operations.
@functools.partial(jax.jit, static_argnums=0)
def _forward(
  spec: _Spec, h: Array, w: Array, code: Array
) -> tuple[Array, tuple[Array, ...]]:
  """Return nll [B, T] and the residuals of the backward pass."""
  w = w.astype(h.dtype)

  def block_nll(part: tuple[Array, Array]) -> tuple[Array, Array]:
    h, code = part
    logits, _ = _logits(spec, _zero_ignored(h, code), w)
    top = jnp.max(logits, -1)
    total = jnp.sum(jnp.exp(logits - top[..., None]), -1)
    lse = top + jnp.log(total)
    label_logit = jnp.sum(jnp.where(_is_label(logits, code), logits, 0), -1)
    nll = lse - label_logit + spec.z_loss * lse * lse
    nll = jnp.where(code == _WRONG, jnp.nan, nll)
    return jnp.where(code == _IGNORED, 0, nll), lse

  if 0 in h.shape[:2]:
    lse = jnp.zeros_like(code, wide_dtype(h.dtype))
    return lse, (h, w, code, lse)
  steps = spec.steps
  blocks, remainder = _split_blocks(steps, (h, code))
  block_results = steps.run(block_nll, blocks, 1)
  remainder_result = None if remainder is None else block_nll(remainder)
  nll, lse = steps.join(block_results, remainder_result, 1)
  return nll, (h, w, code, lse)


@functools.partial(jax.jit, static_argnums=0)
def _backward(
  spec: _Spec, saved: tuple[Array, ...], g: Array
) -> tuple[Array, Array, None]:
  """Gradients of h and w, from recomputed logits."""
  h, w, code, lse = saved
  if 0 in h.shape[:2]:
    return jnp.zeros_like(h), jnp.zeros_like(w, spec.gradient_dtype), None
  # float16 underflows in p * g if g is one over the number of tokens: the
  # products use g / unit, of at most 1, and their sums are scaled by the unit.
  unit = jnp.max(jnp.abs(g)) if h.dtype == jnp.float16 else None
  if unit is not None:
    unit = jnp.where(unit > 0, unit, 1)
    g = g / unit
  g = jnp.where(code == _IGNORED, 0, g)
  steps = spec.steps

  def block_gradients(
    dw: Array, part: tuple[Array, ...]
  ) -> tuple[Array, Array]:
    h, code, lse, g = part
    h = _zero_ignored(h, code)
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

  blocks, remainder = _split_blocks(steps, (h, code, lse, g))
  dw = jnp.zeros_like(w, wide_dtype(w.dtype))
  dw = collectives.vary(dw, collectives.varying_axes(w))
  if steps.count == 1:
    dw, dh = block_gradients(dw, jax.tree.map(lambda b: b[0], blocks))
    dh = dh[None]
  else:
    dw, dh = lax.scan(block_gradients, dw, blocks)
  remainder_dh = None
  if remainder is not None:
    dw, remainder_dh = block_gradients(dw, remainder)
  if unit is not None:
    dw = dw * unit
  return steps.join(dh, remainder_dh, 1), dw.astype(spec.gradient_dtype), None


_nll.defvjp(_forward, _backward)


def _split_blocks(steps: Steps, parts: tuple[Array, ...]) -> tuple[Any, Any]:
  splits = [steps.cut(x, 1) for x in parts]
  blocks, remainders = tuple(b for b, _ in splits), tuple(r for _, r in splits)
  return blocks, None if remainders[0] is None else remainders


def _zero_ignored(h: Array, code: Array) -> Array:
  # A zero gradient times non-finite padding would be NaN; times 0 it is 0.
  return jnp.where((code == _IGNORED)[..., None], jnp.zeros_like(h), h)


def _logits(spec: _Spec, h: Array, w: Array) -> tuple[Array, Array | None]:
  """Float32 logits [B, c, V], and the tanh of the cap for its derivative."""
  out = spec_of(h)
  if out is not None:
    out = (*out[:2], (spec_of(w) or (None, None))[1])
  logits = _dot("btd,dv->btv", h, w, out)
  if spec.soft_cap is None:
    return logits, None
  tanh = jnp.tanh(logits / spec.soft_cap)
  return spec.soft_cap * tanh, tanh


def _is_label(logits: Array, code: Array) -> Array:
  """Mark each row's label, without reading across a sharded V."""
  ids = lax.broadcasted_iota(
    jnp.int32,
    logits.shape,
    2,
    out_sharding=_sharding(logits, spec_of(logits)),
  )
  return ids == code[..., None]


def _dot(equation: str, a: Array, b: Array, out: Any) -> Array:
  """Einsum that accumulates in float32 and never casts its operands."""
  exact = a.dtype in (jnp.float32, jnp.float64)
  return jnp.einsum(
    equation,
    a,
    b,
    preferred_element_type=wide_dtype(a.dtype),
    precision=lax.Precision.HIGHEST if exact else None,
    out_sharding=_sharding(a, out),
  )


def _sharding(x: Array, spec: Sequence[Any] | None) -> NamedSharding | None:
  if spec is None:
    return None
  return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def _operands(
  h: jax.Array, w: jax.Array, labels: jax.Array
) -> tuple[Array, Array, Any]:
  """Check h, w and labels; labels are returned as they came."""
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
  name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
  if shape != expected:
    raise ShapeError(
      name,
      f"shape {shape}",
      f"{expected}, one for each token of h",
      "broadcast or slice it to that",
    )


def _number(name: str, value: Any, least: float) -> float | None:
  if value is None:
    return None
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not real or not least <= float(value) < math.inf:
    expected = "a positive number" if least else "a number of at least 0"
    raise OptionError(
      name,
      repr(value),
      f"{expected}, known when the loss is traced",
      "leave it out for none",
    )
  return float(value)


def _check_mesh(h: Array, w: Array) -> None:
  mesh_axes = [_axes(spec_of(h) or ()), _axes((spec_of(w) or ())[1:])]
  if set(mesh_axes[0]) & set(mesh_axes[1]):
    raise MeshError(
      "w_vocab",
      f"a vocabulary over mesh axes {mesh_axes[1]}, and h over {mesh_axes[0]}",
      "different mesh axes for the tokens and for the vocabulary",
      "jax.sharding.reshard one of them",
    )


def _axes(spec: tuple[Any, ...]) -> tuple[str, ...]:
  flat: list[str] = []
  for entry in spec:
    flat += [entry] if isinstance(entry, str) else entry or ()
  return tuple(flat)


def _encode(labels: jax.Array, vocab: int, ignore: int | None) -> Array:
  """Encode labels as int32; _IGNORED and _WRONG mark the invalid ones."""
  dtype = jnp.asarray(labels).dtype
  info = np.iinfo(dtype)
  if ignore == IGNORE_INDEX and info.min > IGNORE_INDEX:
    # The default cannot occur as a label of an unsigned dtype.
    ignore = None
  if ignore is not None:
    is_int = isinstance(ignore, numbers.Integral) and ignore is not True
    if not is_int or not info.min <= int(ignore) <= info.max:
      raise OptionError(
        "ignore_index",
        f"{ignore!r} with labels of {dtype}",
        "None or an int that this dtype holds",
        "cast labels to int32",
      )
  _check_labels(labels, vocab, ignore)
  labels = jnp.asarray(labels)
  # Compared in the labels' dtype: a cast could bring a wrong id into range.
  valid = labels >= 0
  if vocab <= info.max:
    valid = valid & (labels < vocab)
  ignored = jnp.zeros_like(valid) if ignore is None else labels == int(ignore)
  code = jnp.where(valid, labels, 0).astype(jnp.int32)
  code = jnp.where(valid, code, _WRONG)
  return jnp.where(ignored, _IGNORED, code)


def _check_labels(labels: jax.Array, vocab: int, ignore: int | None) -> None:
  """Raise for a wrong label where its value is known."""
  if isinstance(labels, jax.core.Tracer):
    return
  if isinstance(labels, jax.Array) and not labels.is_fully_addressable:
    return
  ids = np.asarray(labels)
  invalid = (ids < 0) | (ids >= vocab)
  if ignore is not None:
    invalid &= ids != ignore
  if invalid.any():
    at = tuple(int(i) for i in np.argwhere(invalid)[0])
    raise OptionError(
      "labels",
      f"{int(ids[at])} at {list(at)}, and {int(invalid.sum()) - 1} more",
      f"ids from 0 to {vocab - 1}",
      f"mark tokens without a label by {IGNORE_INDEX}, or pass ignore_index=",
    )
