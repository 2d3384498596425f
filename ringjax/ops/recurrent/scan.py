"""Scans along a sequence that may be sharded.

Guarantees: the results are those of the whole sequence, whatever the number of
shards and however they are filled. A shard scans its own tokens, the totals of
shards are scanned by all, and the total that arrives at a shard is combined
into each of its results.
Cost: twice the combinations of one device, log2 of a shard's tokens deep. For a
total of n bytes, R shards gather n each if that is little altogether (one
collective, R n bytes of memory); larger totals take 1 + log2 R rounds of a
neighbour's n bytes.
Ref:  Blelloch 1990, "Prefix sums and their applications"; Hillis and Steele
1986 (the rounds); Martin and Cundy 2018, arXiv 1709.04057 (recurrences).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from ringjax.checks import as_array
from ringjax.errors import InputTypeError, ShapeError
from ringjax.ops.recurrent import sequence
from ringjax.ops.recurrent.sequence import Shards
from ringjax.ops.softmax import wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout

# Most bytes of all shards' totals to gather, rather than pass on in rounds.
_GATHERED_BYTES = 1 << 22


def associative_scan(
  combine: Callable[[Any, Any], Any],
  elements: PyTree,
  *,
  reverse: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> PyTree:
  """`jax.lax.associative_scan` along a sequence that may be sharded.

  Args:
    combine: Associative function of two pytrees like `elements` to another,
      for any number of tokens, as in JAX. It need not have a neutral element.
      Outside of a jit a new function is compiled again.
    elements: Pytree of [B, T, ...], T over `axis`. Inside a shard_map where
      the axis is manual T is that of the shard. Over explicit mesh axes only
      B stays sharded.
    reverse: Whether to scan from the last token to the first; `combine` gets
      the later tokens first, as in JAX.
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T. Default: that of the operands, else the
      current mesh's "seq" axis, else one device.
    layout: `Contiguous()`, the default, or `Uneven(counts)`. Other layouts
      would cost a permutation of the sequence there and back, and are refused.

  Returns:
    A pytree like `elements`. Differentiable as `combine` is. Slots of
    `Uneven` shards without a token have undefined values.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  sequence.called("combine", combine)
  leaves, tree = jax.tree.flatten(elements)
  if not leaves:
    raise InputTypeError(
      "elements", tree, "a pytree with an array in it", "pass some"
    )
  x = tuple(sequence.tokens("elements", a) for a in leaves)
  for a in x:
    if a.shape[1] != x[0].shape[1]:
      raise ShapeError(
        "elements",
        f"sequences of {x[0].shape[1]} and of {a.shape[1]} tokens",
        "one length",
        "pad or broadcast them",
      )
  place, layout = sequence.sharding_and_layout(
    x, "elements", mesh, axis, layout, True
  )
  shards = place.size
  total = sum(a.nbytes // a.shape[1] for a in x)
  f = _Scan(combine, tree, bool(reverse), _gathered(total, shards))
  # `combine` may mix a token's numbers, as in a product of matrices.
  dims = tuple("bt" + "X" * (a.ndim - 2) for a in x)
  results = sequence.run(f, place, layout, x, dims, dims)
  return jax.tree.unflatten(tree, results)


def linear_recurrence(
  a: Float[Array, "B T ..."],
  b: Float[Array, "B T ..."],
  *,
  initial: Float[Array, "B ..."] | None = None,
  reverse: bool = False,
  segment_ids: Int[Array, "B T"] | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | None = None,
  layout: Layout | None = None,
) -> tuple[Float[Array, "B T ..."], Float[Array, "B ..."]]:
  """Linear recurrence h_t = a_t h_{t-1} + b_t, elementwise, over shards.

  The recurrence of diagonal state-space layers (Gu and Dao 2023, arXiv
  2312.00752) and of RG-LRU (De et al. 2024, arXiv 2402.19427). Sums and
  products are float32 (float64 for float64 inputs); the derivative is a
  recurrence the other way, which keeps a and h and nothing else. Products of
  many `|a| > 1` may overflow where h itself does not.

  Args:
    a: Factors, [B, T, ...], floats.
    b: Terms, [B, T, ...], floats; dimensions but T broadcast against those
      of a.
    initial: State h before the first token, [B, ...], default zeros. It
      belongs to the document of the first token.
    reverse: Whether h_t = a_t h_{t+1} + b_t; then `initial` follows the last
      token.
    segment_ids: Document of each token, int32 [B, T], 0 is padding. A
      document starts from zeros where another one precedes it; padding leaves
      h as it is and gives 0.
    mesh: Device mesh; default: the operands', else the current one.
    axis: Mesh axis that shards T. Default: that of the operands, else the
      current mesh's "seq" axis, else one device. Inside a shard_map where the
      axis is manual T is that of the shard, and `initial` that of the first
      shard (the last one's, in reverse).
    layout: `Contiguous()`, the default, or `Uneven(counts)`; others are
      refused, since h is passed from each token to the next.

  Returns:
    (h, last): the states of all tokens, [B, T, ...] in b's dtype, and the state
    after the last token (before the first, in reverse), [B, ...] in float32,
    the same on all shards.

  Raises:
    RingjaxError: If arguments do not fit, before anything is compiled.
  """
  a = sequence.floats("a", sequence.tokens("a", a))
  b = sequence.floats("b", sequence.tokens("b", b, a.ndim))
  pairs = list(zip(a.shape, b.shape, strict=True))
  if a.shape[1] != b.shape[1] or any(
    m != n and 1 not in (m, n) for m, n in pairs
  ):
    raise ShapeError(
      "b",
      f"shape {b.shape} beside an a of shape {a.shape}",
      "as many tokens, and other dimensions alike or 1",
      "broadcast or slice one of them",
    )
  shape = tuple(n if m == 1 else m for m, n in pairs)
  b = jnp.broadcast_to(b, shape) if b.shape != shape else b
  seg = sequence.documents(segment_ids, b)
  if initial is not None:
    initial = sequence.floats("initial", as_array("initial", initial))
    sequence.check_shape("initial", initial, (shape[0], *shape[2:]))
  split_operands = (b, a) if seg is None else (b, a, seg)
  place, layout = sequence.sharding_and_layout(
    split_operands, "b", mesh, axis, layout, True
  )
  dtype = jnp.promote_types(wide_dtype(a.dtype), wide_dtype(b.dtype))
  total = 2 * math.prod((shape[0], *shape[2:])) * dtype.itemsize
  f = _Recurrence(bool(reverse), _gathered(total, place.size), dtype.name)
  dims = sequence.letters(b.ndim)
  state = dims.replace("t", "")
  h, last = sequence.run(
    f, place, layout, (b, a, seg, initial), (dims, dims, "bt", state),
    (dims, state),
  )  # fmt: skip
  return h, last


def recurrence_of_shard(
  a: Float[Array, "B T ..."],
  b: Float[Array, "B T ..."],
  initial: Float[Array, "B ..."],
  *,
  axis: str | None,
) -> tuple[Float[Array, "B T ..."], Float[Array, "B ..."]]:
  """Per shard: `linear_recurrence` of one document, for layers.

  Args:
    a: Factors, [B, T, ...], with the shape of b; 0 forgets earlier tokens.
    b: Terms, [B, T, ...].
    initial: State before the first shard's first token, [B, ...].
    axis: Mesh axis of shards that hold consecutive tokens, each as many; None
      for one device, whatever the current mesh.

  Returns:
    (h, last), as `linear_recurrence` does.
  """
  size = 1 if axis is None else collectives.axis_size(axis)
  local = b.shape[1]
  shards = Shards(Contiguous(), axis, size, size * local, local)
  dtype = jnp.promote_types(wide_dtype(a.dtype), wide_dtype(b.dtype))
  total = 2 * math.prod(initial.shape) * dtype.itemsize
  f = _Recurrence(False, _gathered(total, size), dtype.name)
  return f(shards, b, a, None, initial)


def _gathered(total_bytes: int, shards: int) -> bool:
  return total_bytes * shards <= _GATHERED_BYTES


def resets(
  seg: Int[Array, "B T"], axis: str | None, reverse: bool = False
) -> Bool[Array, "B T"]:
  """Mark tokens that begin a document after another one.

  Per shard, if `axis` is given. In reverse: tokens that end one before another.
  """
  if reverse:
    seg = jnp.flip(seg, 1)
  latest = _latest_documents(seg)
  arriving_seg = jnp.zeros_like(latest[:, :1])
  if axis is not None:
    all_latest = collectives.gather(latest[:, -1:], axis, 1)
    size, shard = all_latest.shape[1], collectives.axis_index(axis)
    if reverse:
      all_latest, shard = jnp.flip(all_latest, 1), size - 1 - shard
    earlier = jnp.arange(size, dtype=jnp.int32)[None] < shard
    arriving_seg = _latest_documents(jnp.where(earlier, all_latest, 0))[:, -1:]
  latest = jnp.concatenate([arriving_seg, latest[:, :-1]], 1)
  latest = jnp.where(latest > 0, latest, arriving_seg)
  begins = (seg > 0) & (latest > 0) & (latest != seg)
  return jnp.flip(begins, 1) if reverse else begins


def _latest_documents(seg: jax.Array) -> jax.Array:
  """Document of the last real token up to each token, else 0."""
  index = jnp.arange(seg.shape[1], dtype=jnp.int32)[None]
  latest_index = lax.cummax(jnp.where(seg > 0, index, -1), axis=1)
  latest_seg = jnp.take_along_axis(seg, jnp.maximum(latest_index, 0), 1)
  return jnp.where(latest_index >= 0, latest_seg, 0)


# Totals that arrive at a shard.


def arriving(
  combine: Callable[[Any, Any], Any],
  total: PyTree,
  axis: str,
  some: np.ndarray,
  reverse: bool,
  gathered: bool,
) -> PyTree:
  """Combine the totals of all shards before this one; undefined on the first.

  Args:
    combine: Function of the earlier and the later total.
    total: Total of this shard, a pytree of [B, 1, ...].
    axis: Mesh axis of the shards.
    some: Whether each shard holds tokens, bool [R]; totals of others are
      skipped.
    reverse: Whether the last shard is the first.
    gathered: Whether to use one collective, rather than rounds.
  """
  size, shard = some.size, collectives.axis_index(axis)
  direction = -1 if reverse else 1
  order = np.arange(size)[::direction]
  order = order[some[order]]
  if order.size < 2:
    return total
  # Rounds use equal distances, and cannot skip empty shards.
  if gathered or order.size < size:
    prefixes = collectives.gather(total, axis, 1)
    prefixes = jax.tree.map(lambda x: jnp.take(x, order[:-1], axis=1), prefixes)
    prefixes = lax.associative_scan(combine, prefixes, axis=1)
    prefix_index = np.zeros(size, np.int32)
    prefix_index[order[1:]] = np.arange(order.size - 1)
    own_prefix = jnp.asarray(prefix_index)[shard]
    return jax.tree.map(
      lambda x: lax.dynamic_slice_in_dim(x, own_prefix, 1, axis=1), prefixes
    )
  rank = size - 1 - shard if reverse else shard
  total = collectives.rotate(total, axis, direction)
  step = 1
  while step < size - 1:
    arrived = collectives.rotate(total, axis, direction * step)
    # Without a sender a shard combines its own total twice, and discards it.
    has_sender = rank > step
    arrived = _where(has_sender, arrived, total)
    total = _where(has_sender, combine(arrived, total), total)
    step *= 2
  return total


def _where(condition: jax.Array, a: PyTree, b: PyTree) -> PyTree:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


@dataclasses.dataclass(frozen=True)
class _Scan:
  """`associative_scan` of one shard's tokens."""

  combine: Callable[[Any, Any], Any]
  tree: jax.tree_util.PyTreeDef
  reverse: bool
  gathered: bool

  def __call__(self, shards: Shards, *leaves: jax.Array) -> tuple:
    local, counts = shards.local, shards.counts
    x = jax.tree.unflatten(self.tree, leaves)
    full = bool(np.all(counts == local))
    count = jnp.asarray(counts, jnp.int32)[shards.index]
    if not full:
      x = jax.tree.map(lambda a: self._tokens_first(a, count), x)
    x = lax.associative_scan(self.combine, x, axis=1, reverse=self.reverse)
    if shards.axis is not None:
      x = self._combine_earlier(shards, x, count)
    if not full and self.reverse:
      x = jax.tree.map(lambda a: jnp.roll(a, count - local, 1), x)
    return tuple(jax.tree.leaves(x))

  def _tokens_first(self, x: jax.Array, count: jax.Array) -> jax.Array:
    """Move tokens first in the scan's direction, then copies of the last one.

    Copies, because there is no neutral element, and `combine` may do anything
    with zeros.
    """
    slots = jnp.arange(x.shape[1], dtype=jnp.int32)
    slot = slots - (x.shape[1] - count) if self.reverse else slots
    real = (slot >= 0) & (slot < count)
    slot = jnp.clip(slot, 0, jnp.maximum(count - 1, 0))
    x = jnp.take(x, slot, axis=1)
    return jnp.where(sequence.beside(real, x), x, lax.stop_gradient(x))

  def _combine_earlier(
    self, shards: Shards, x: PyTree, count: jax.Array
  ) -> PyTree:
    """Combine the totals of the shards before this one into its results."""
    assert shards.axis is not None
    nonempty = shards.counts > 0
    edge = shards.local - count if self.reverse else count - 1
    edge = jnp.clip(edge, 0, shards.local - 1)
    total = jax.tree.map(
      lambda a: lax.dynamic_slice_in_dim(a, edge, 1, axis=1), x
    )
    arrived = arriving(
      self.combine, total, shards.axis, nonempty, self.reverse, self.gathered
    )
    first = np.flatnonzero(nonempty)[-1 if self.reverse else 0]
    has_earlier = jnp.asarray(nonempty)[shards.index] & (
      shards.index != int(first)
    )
    # Discarded values may be infinite, and so may their derivatives: there the
    # shard's own total is used.
    arrived = _where(
      has_earlier, arrived, jax.tree.map(lax.stop_gradient, total)
    )
    repeated = jax.tree.map(
      lambda c, a: jnp.broadcast_to(c, a.shape), arrived, x
    )
    return _where(has_earlier, self.combine(repeated, x), x)


# Linear recurrences.


@dataclasses.dataclass(frozen=True)
class _Recurrence:
  """`linear_recurrence` of one shard's tokens."""

  reverse: bool
  gathered: bool
  state_dtype: str

  def __call__(
    self,
    shards: Shards,
    b: jax.Array,
    a: jax.Array,
    seg: jax.Array | None,
    initial: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array]:
    real, axis = shards.real, shards.axis
    if real is not None:
      real = real[None]
    if seg is not None:
      seg = seg if real is None else jnp.where(real, seg, 0)
      real = seg > 0
      reset = resets(seg, axis, self.reverse)
      a = jnp.where(sequence.beside(reset, a), 0, a)
    if real is not None:
      # Padding leaves h as it is.
      a = jnp.where(sequence.beside(real, a), a, 1)
      b = jnp.where(sequence.beside(real, b), b, 0)
    if initial is None:
      initial = jnp.zeros((b.shape[0], *b.shape[2:]), self.state_dtype)
    start = initial.astype(self.state_dtype)[:, None]
    axes = collectives.varying_axes(a, b, start)
    a, b, start = collectives.vary((a, b, start), axes)
    rule = _Rule(
      axis, shards.size, self.reverse, self.gathered, self.state_dtype
    )
    h, end = _recur(rule, a, b, start)
    if real is not None:
      h = jnp.where(sequence.beside(real, h), h, 0)
    if axis is not None:
      last = 0 if self.reverse else shards.size - 1
      end = jnp.where(shards.index == last, end, jnp.zeros_like(end))
      end = collectives.total(end, axis)
    return h, end[:, 0]


@dataclasses.dataclass(frozen=True)
class _Rule:
  """Static part of a recurrence."""

  axis: str | None
  size: int
  reverse: bool
  gathered: bool
  state_dtype: str

  @property
  def first(self) -> jax.Array | bool:
    """Whether this shard is the first in the recurrence's direction."""
    if self.axis is None:
      return True
    first = self.size - 1 if self.reverse else 0
    return collectives.axis_index(self.axis) == first


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recur(
  rule: _Rule, a: jax.Array, b: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Return h [B, L, ...] in b's dtype, and the wide last h [B, 1, ...]."""
  return _recur_fwd(rule, a, b, start)[0]


def _recur_fwd(
  rule: _Rule, a: jax.Array, b: jax.Array, start: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
  h, arrived = _scan_tokens(
    rule, a.astype(rule.state_dtype), b.astype(rule.state_dtype), start
  )
  narrow = h.astype(b.dtype)
  return (narrow, _last_h(h, rule.reverse)), (a, narrow, arrived)


def _recur_bwd(
  rule: _Rule, saved: PyTree, cotangents: PyTree
) -> tuple[jax.Array, jax.Array, jax.Array]:
  a, h, h_before = saved
  dh, dend = cotangents
  widen = lambda x: x.astype(rule.state_dtype)
  reversed_rule = dataclasses.replace(rule, reverse=not rule.reverse)
  # m_t = a_t (dh_t + m_{t+1}) is passed on to the token before; the gradient of
  # a token's h is dh_t + m_{t+1}.
  length = dh.shape[1]
  edge = 0 if rule.reverse else length - 1
  dh = widen(dh)
  dh = jnp.concatenate(
    [dh[:, :edge], dh[:, edge : edge + 1] + dend, dh[:, edge + 1 :]], 1
  )
  axes = () if rule.axis is None else ((rule.axis, rule.size),)
  with collectives.bound(axes):
    m, arrived = _scan_tokens(
      reversed_rule, widen(a), widen(a) * dh, jnp.zeros_like(dend)
    )
    first = rule.first
    db = dh + _previous_h(m, arrived, reversed_rule.reverse)
    da = db * _previous_h(widen(h), h_before, rule.reverse)
    dstart = _last_h(m, reversed_rule.reverse)
    dstart = jnp.where(first, dstart, jnp.zeros_like(dstart))
  summed_axes = [i for i, n in enumerate(a.shape) if n != da.shape[i]]
  da = jnp.sum(da, summed_axes, keepdims=True) if summed_axes else da
  return da.astype(a.dtype), db.astype(h.dtype), dstart


_recur.defvjp(_recur_fwd, _recur_bwd)


def _last_h(h: jax.Array, reverse: bool) -> jax.Array:
  """Slice the last h in the direction of a recurrence, [B, 1, ...]."""
  return h[:, :1] if reverse else h[:, -1:]


def _previous_h(h: jax.Array, first_h: jax.Array, reverse: bool) -> jax.Array:
  """Shift h to the next token: the h that each token gets."""
  parts = [h[:, 1:], first_h] if reverse else [first_h, h[:, :-1]]
  return jnp.concatenate(parts, 1)


def _affine(first: PyTree, second: PyTree) -> PyTree:
  """Compose x -> a x + b after another such map."""
  return second[0] * first[0], second[0] * first[1] + second[1]


def _scan_tokens(
  rule: _Rule, a: jax.Array, b: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Compute h of all slots, and the h that arrives at the shard's first."""
  decay, h = lax.associative_scan(_affine, (a, b), axis=1, reverse=rule.reverse)
  arrived = start
  if rule.axis is not None:
    first = rule.first
    total, end = _last_h(decay, rule.reverse), _last_h(h, rule.reverse)
    end = jnp.where(first, total * start + end, end)
    all_shards = np.ones(rule.size, bool)
    _, arrived = arriving(
      _affine, (total, end), rule.axis, all_shards, rule.reverse, rule.gathered
    )
    arrived = jnp.where(first, start, arrived)
  return h + decay * arrived, arrived
