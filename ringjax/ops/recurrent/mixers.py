"""Token mixers of recurrent layers: short convolution and gated delta rule.

Guarantees: the results are those of the whole sequence, whatever the number of
shards; a document does not see another one.
Cost: `causal_conv`, see conv.py: contiguous shards send W - 1 tokens to
their neighbour. In layouts that are not in order each of the W - 1 earlier
taps is a `token_shift`. `gated_delta_rule`, see delta.py: shards gather an
[H, H + J] map a head, whatever the length.
Ref:  Yang et al. 2024, arXiv 2412.06464; Gu and Dao 2023, arXiv 2312.00752.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from ringjax.checks import as_array
from ringjax.errors import DtypeError, OptionError, ShapeError
from ringjax.ops.recurrent import conv, sequence
from ringjax.ops.recurrent.conv import Tail, tails
from ringjax.ops.recurrent.delta import delta_rule
from ringjax.ops.recurrent.scan import resets
from ringjax.ops.recurrent.sequence import Shards, beside
from ringjax.ops.recurrent.shift import shifted
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.layout import Layout


def causal_conv(
  x: Float[Array, "B T C"],
  weight: Float[Array, "C W"],
  *,
  bias: Float[Array, " C"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  before: Float[Array, "B _ C"] | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> Float[Array, "B T C"]:
  """Convolve each channel with its own W taps, over all shards.

  y_t = bias + sum_j weight[:, j] x_{t - (W - 1) + j} over tokens of t's
  document; sums are float32. As `jax.lax.conv_general_dilated` with one group
  a channel and W - 1 zeros in front.

  Args:
    x: Tokens, [B, T, C], floats, T over `axis`. Inside a shard_map where the
      axis is manual T is that of the shard.
    weight: Taps, [C, W]; the last one is for the token itself.
    bias: Bias of each channel, [C].
    segment_ids: Document of each token, int32 [B, T], 0 is padding, which
      gives 0. Padding is only before and after documents, not inside.
    before: Tokens before the first one and of its document, [B, W - 1, C], the
      oldest first; default zeros. In a caller's shard_map: those before the
      first shard, the same on all.
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T. Default: that of x, else the current mesh's
      "seq" axis, else one device.
    layout: Order of the tokens on the shards; default `Contiguous()`. Striped
      and zigzag shards send each tap separately, and take no `before`.

  Returns:
    Outputs [B, T, C] in x's dtype.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  x = sequence.floats("x", sequence.tokens("x", x, 3))
  weight = sequence.floats("weight", as_array("weight", weight))
  channels = x.shape[2]
  if weight.ndim != 2 or weight.shape[0] != channels or not weight.shape[1]:
    raise ShapeError(
      "weight",
      f"shape {weight.shape} for an x of shape {x.shape}",
      f"[{channels}, W] with at least one tap",
      "transpose it if taps come first",
    )
  if bias is not None:
    bias = sequence.floats("bias", as_array("bias", bias))
    sequence.check_shape("bias", bias, (channels,))
  taps = weight.shape[1]
  previous = None
  if before is not None:
    previous = sequence.floats("before", as_array("before", before))
    sequence.check_shape("before", previous, (x.shape[0], taps - 1, channels))
  seg = sequence.documents(segment_ids, x)
  split_operands = (x,) if seg is None else (x, seg)
  place, layout = sequence.sharding_and_layout(
    split_operands, "x", mesh, axis, layout, False
  )
  if previous is not None and place.size > 1 and not sequence.in_order(layout):
    raise OptionError(
      "before",
      f"tokens that precede, in the layout {layout}",
      "Contiguous() or Uneven(counts)",
      "leave it out for sequences that begin here",
    )
  (y,) = sequence.run(
    _Conv(), place, layout, (x, weight, bias, seg, previous),
    ("btc", "cW", "c", "bt", "bWc"), ("btc",),
  )  # fmt: skip
  return y


@dataclasses.dataclass(frozen=True)
class _Conv:
  """`causal_conv` of one shard's tokens."""

  def __call__(
    self,
    shards: Shards,
    x: jax.Array,
    weight: jax.Array,
    bias: Any,
    seg: Any,
    before: Any,
  ) -> tuple[jax.Array]:
    given_seg, real = seg, shards.real
    if seg is None:
      seg = jnp.ones(x.shape[:2], jnp.int32)
    if real is not None:
      seg = jnp.where(real[None], seg, 0)
    if weight.shape[1] > 1 and sequence.in_order(shards.layout):
      tail = _tail_before(
        shards, x, seg, given_seg, before, weight.shape[1] - 1
      )
      # With a head axis of size 1, as conv.py needs it.
      x_with_head, tail = x[:, :, None], tail._replace(x=tail.x[:, :, None])
      y = conv.causal_conv(x_with_head, weight[None], seg, tail)[:, :, 0]
    else:
      y = _conv_by_taps(shards, x, weight, seg)
    if bias is not None:
      biased = (
        y.astype(wide_dtype(x.dtype))
        + bias.astype(wide_dtype(x.dtype))[None, None]
      )
      y = jnp.where(beside(seg > 0, y), biased.astype(x.dtype), 0)
    return (y,)


def _tail_before(
  shards: Shards,
  x: jax.Array,
  seg: Int[Array, "B T"],
  given_seg: Int[Array, "B T"] | None,
  before: Float[Array, "B n C"] | None,
  n: int,
) -> Tail:
  """Tail of the n tokens that precede this shard's."""
  if before is None:
    previous = collectives.zeros((x.shape[0], n, x.shape[2]), x.dtype, x)
    first = jnp.zeros_like(seg[:, :1])
  else:
    previous = before
    if given_seg is None:
      first = jnp.ones_like(seg[:, :1])
    else:
      first = _first_document(seg, shards.axis)
  axes = collectives.varying_axes(x, seg)
  tail = Tail(
    previous.astype(x.dtype), jnp.broadcast_to(first, previous.shape[:2])
  )
  tail = collectives.vary(tail, axes)
  # Only shards that others follow have to hold enough tokens.
  counts = shards.counts[: int(np.flatnonzero(shards.counts)[-1])]
  min_slots = int(counts.min(initial=shards.local))
  return tails(tail, x, seg, shards.axis, min_slots)[0]


def _first_document(seg: jax.Array, axis: str | None) -> jax.Array:
  """Document of the sequence's first token, [B, 1]."""

  def first(seg: jax.Array) -> jax.Array:
    at = jnp.argmax(seg > 0, 1)[:, None]
    return jnp.take_along_axis(seg, at, 1)

  own_first = first(seg)
  if axis is None:
    return own_first
  return first(collectives.gather(own_first, axis, 1))


def _conv_by_taps(
  shards: Shards, x: jax.Array, weight: jax.Array, seg: jax.Array
) -> jax.Array:
  dtype, taps = wide_dtype(x.dtype), weight.shape[1]
  y = jnp.zeros((), dtype)[(None,) * x.ndim]
  for j in range(taps):
    tap, exists = shifted(shards, x, taps - 1 - j, seg)
    tap = jnp.where(beside(exists, tap), tap, 0).astype(dtype)
    y = y + tap * weight[None, None, :, j].astype(dtype)
  return y.astype(x.dtype)


def gated_delta_rule(
  q: Float[Array, "B T K H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T N J"],
  decay: Float[Array, "B T N"],
  beta: Float[Array, "B T N"],
  *,
  initial: Float[Array, "B N H J"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk: int = 64,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> tuple[Float[Array, "B T N J"], Float[Array, "B N H J"]]:
  """The gated delta rule (Yang et al. 2024, arXiv 2412.06464), over shards.

  For each head, with the state S [H, J], g = `decay` and b = `beta`:
  S_t = e^g_t S_{t-1} + b_t k_t (v_t - e^g_t S_{t-1}^T k_t)^T, o_t = S_t^T q_t.
  Queries are not scaled here: scale them, usually by H**-0.5.

  Args:
    q: Queries, [B, T, K, H], floats; T over `axis`. Inside a shard_map where
      the axis is manual T is that of the shard.
    k: Keys, [B, T, K, H]; the rule is stable where `beta |k|^2 <= 2`.
    v: Values, [B, T, N, J]; value head n belongs to key head n // (N / K).
    decay: Logarithm of the state's decay, [B, T, N], at most 0; -inf forgets
      all.
    beta: Update rates, [B, T, N].
    initial: State before the first token, [B, N, H, J], default zeros. It
      belongs to the document of the first token.
    segment_ids: Document of each token, int32 [B, T], 0 is padding. A document
      starts from zeros where another one precedes it; padding leaves the state
      as it is and gives 0.
    chunk: Tokens that are computed at once, a power of two.
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T. Default: that of the operands, else the
      current mesh's "seq" axis, else one device.
    layout: `Contiguous()`, the default, or `Uneven(counts)`; others are
      refused, since the state is passed from each token to the next.

  Returns:
    (o, state): outputs [B, T, N, J] in v's dtype, and the state after the last
    token, [B, N, H, J] in float32, the same on all shards.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  operands = dict(q=q, k=k, v=v, decay=decay, beta=beta)
  rank = dict(q=4, k=4, v=4, decay=3, beta=3)
  x = {
    name: sequence.floats(name, sequence.tokens(name, a, rank[name]))
    for name, a in operands.items()
  }
  b, t, heads, h = x["q"].shape
  n, j = x["v"].shape[2:]
  sequence.check_shape("k", x["k"], (b, t, heads, h))
  sequence.check_shape("v", x["v"], (b, t, n, j))
  for name in ("decay", "beta"):
    sequence.check_shape(name, x[name], (b, t, n))
  for name in ("k", "v"):
    if x[name].dtype != x["q"].dtype:
      raise DtypeError(
        name,
        f"{x[name].dtype} beside a q of {x['q'].dtype}",
        "one dtype for q, k and v",
        f"cast it: {name}.astype(q.dtype)",
      )
  if not heads or n % heads:
    raise ShapeError(
        "v", f"{n} heads for {heads} heads of k", "a multiple of k's heads",
        "repeat or drop heads")  # fmt: skip
  is_int = isinstance(chunk, int) and not isinstance(chunk, bool)
  if not is_int or chunk < 1 or chunk & (chunk - 1):
    raise OptionError(
      "chunk", repr(chunk), "a power of two", "leave it out for 64"
    )
  if initial is not None:
    initial = sequence.floats("initial", as_array("initial", initial))
    sequence.check_shape("initial", initial, (b, n, h, j))
  seg = sequence.documents(segment_ids, x["q"])
  split_operands = tuple(x.values()) if seg is None else (*x.values(), seg)
  place, layout = sequence.sharding_and_layout(
    split_operands, "q", mesh, axis, layout, True
  )
  out, state = sequence.run(
    _Delta(chunk), place, layout, (*x.values(), seg, initial),
    ("btnH", "btnH", "btnj", "btn", "btn", "bt", "bnHj"), ("btnj", "bnHj"),
  )  # fmt: skip
  return out, state


@dataclasses.dataclass(frozen=True)
class _Delta:
  """`gated_delta_rule` of one shard's tokens."""

  chunk: int

  def __call__(
    self,
    shards: Shards,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    seg: jax.Array | None,
    initial: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    decay = decay.astype(wide_dtype(v.dtype))
    real = None if shards.real is None else shards.real[None]
    if seg is not None:
      seg = seg if real is None else jnp.where(real, seg, 0)
      real = seg > 0
      reset = resets(seg, shards.axis)[..., None]
      decay = jnp.where(reset, -jnp.inf, decay)
    if real is not None:
      # Padding becomes tokens that leave the state as it is.
      q, k, v, decay, beta = (
        jnp.where(beside(real, a), a, 0) for a in (q, k, v, decay, beta)
      )
    out, state = delta_rule(
      q, k, v, decay, beta, initial, axis=shards.axis, chunk=self.chunk
    )
    if real is not None:
      out = jnp.where(beside(real, out), out, 0)
    return out, state
