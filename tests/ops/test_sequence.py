"""Shifts, scans and mixers over shards, against NumPy token by token."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import Contiguous, Striped, Uneven, Zigzag
from ringjax.bench.program import Program
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  MeshError,
  OptionError,
  ShapeError,
)
from ringjax.ops.recurrent import scan
from ringjax.ops.recurrent.mixers import causal_conv, gated_delta_rule
from ringjax.ops.recurrent.scan import associative_scan, linear_recurrence
from ringjax.ops.recurrent.shift import token_shift
from tests.helpers import make_mesh, refused

_slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# Documents that cross shards, short ones, padding at either end.
SEG = np.asarray(
  [
    [1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 4, 4],
    [0, 0, 5, 5, 5, 5, 6, 6, 6, 6, 6, 0, 0],
  ],
  np.int32,
)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape)


def close(got, want, tolerance=1e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    scale = max(np.max(np.abs(b), initial=0), 1e-30)
    assert np.max(np.abs(a - b), initial=0) <= tolerance * scale


def weigh(outs):
  """A number that depends on each result in its own way."""
  total = 0.0
  for out in outs:
    way = np.sin(1.0 + np.arange(out.size)).reshape(out.shape)
    total += (out * way.astype(out.dtype)).sum()
  return total


def gradients(f, x):
  """Of weigh(f(*x)) for each of x: float64 differences, one by one."""
  x = [np.array(a, np.float64) for a in x]
  found, step = [], 1e-6
  for a in x:
    grad = np.zeros_like(a)
    for at in np.ndindex(a.shape):
      was = a[at]
      a[at] = was + step
      up = weigh(f(*x))
      a[at] = was - step
      grad[at] = (up - weigh(f(*x))) / (2 * step)
      a[at] = was
    found.append(grad)
  return found


def truth(f, x):
  return f(*(np.asarray(a, np.float64) for a in x)), gradients(f, x)


def measured(f, x, layout=None, shards=1, cut=None, tokens=None):
  """Results and gradients of f, in natural order.

  `cut` and `tokens` say which operands and results go over the sequence.
  """
  layout = layout or Contiguous()
  cut = (True,) * len(x) if cut is None else cut

  def there(a, does=True):
    a = jnp.asarray(a, jnp.float32)
    return layout.permute(a, shards=shards) if does else a

  def back(a, does=True):
    a = np.asarray(a)
    return layout.restore(a, shards=shards) if does else a

  @jax.jit
  def both(x):
    outs, pull = jax.vjp(lambda *x: f(*x), *x)
    which = tokens or (True,) * len(outs)
    ways = []
    for out, does in zip(outs, which, strict=True):
      way = np.sin(1.0 + np.arange(out.size)).reshape(out.shape)
      ways.append(there(way, does).astype(out.dtype))
    return outs, pull(tuple(ways))

  outs, grads = both([there(a, d) for a, d in zip(x, cut, strict=True)])
  which = tokens or (True,) * len(outs)
  return (
    tuple(back(a, d) for a, d in zip(outs, which, strict=True)),
    [back(a, d) for a, d in zip(grads, cut, strict=True)],
  )


def check(f, reference, x, *, cut=None, tokens=None, tolerance=1e-5, **where):
  got = measured(f, x, cut=cut, tokens=tokens, **where)
  close(got, truth(reference, x), tolerance)


def by_document(seg, row):
  """Lists of the tokens of each document of a row."""
  return [np.flatnonzero(seg[row] == d) for d in sorted(set(seg[row]) - {0})]


# ---------------------------------------------------------------------------
# token_shift
# ---------------------------------------------------------------------------


def shift(x, by, fill=0.0, seg=None):
  y = np.full_like(x, fill)
  for row in range(x.shape[0]):
    for t in range(x.shape[1]):
      there = 0 <= t - by < x.shape[1]
      if there and seg is not None:
        there = seg[row, t] == seg[row, t - by] and seg[row, t] > 0
      if there:
        y[row, t] = x[row, t - by]
  return y


def shifts(by, layout, shards, mesh, seg=None, fill=0.5):
  seg = None if seg is None else layout.permute(seg, shards=shards)

  def f(x):
    return (
      token_shift(x, by, fill=fill, segment_ids=seg, mesh=mesh, layout=layout),
    )

  return f


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("layout", "shards", "bys"),
  [
    (Contiguous(), 1, (1, -2)),
    (Contiguous(), 3, (-1, 7)),
    _slow(Contiguous(), 8, (3, -1, -12)),
    (Striped(), 3, (1, -1)),
    _slow(Striped(2), 8, (-1, 1)),
    (Striped(2), 3, (-3, 8)),
    (Zigzag(), 3, (1, -4)),
    _slow(Zigzag(), 8, (-1, 3)),
    # Runs of one message that differ in length and reach a shard's end.
    (Uneven((4, 1, 4, 0, 4)), 5, (2, -6)),
    _slow(Uneven((2, 0, 8, 3)), 4, (-1, 6)),
  ],
)
def test_shift(layout, shards, bys):
  x, mesh = [normal(0, 2, 13, 3)], make_mesh(shards, "auto")
  calls = list(zip(bys, (SEG, None, SEG), strict=False))

  def f(x):
    return tuple(shifts(by, layout, shards, mesh, s)(x)[0] for by, s in calls)

  def reference(x):
    return tuple(shift(x, by, 0.5, s) for by, s in calls)

  check(f, reference, x, layout=layout, shards=shards, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [13, 24])
@pytest.mark.parametrize("shards", [2, 3, 8])
@pytest.mark.parametrize(
  "layout", [Contiguous(), Striped(), Striped(2), Striped(4), Zigzag(), None]
)
def test_every_shift(layout, shards, length):
  if layout is None:
    counts = np.random.default_rng(shards).integers(0, 2 * length, shards)
    counts = (counts * length // counts.sum()).tolist()
    layout = Uneven((*counts[:-1], length - sum(counts[:-1])))
  x, mesh = normal(0, 1, length), make_mesh(shards, "auto")
  there = layout.permute(x.astype(np.float32), shards=shards)
  bys = range(-length - 1, length + 2, 3)
  every = jax.jit(
    lambda x: [shifts(by, layout, shards, mesh)(x)[0] for by in bys]
  )
  for by, got in zip(bys, every(there), strict=True):
    got = layout.restore(np.asarray(got), shards=shards)
    close(got, shift(x, by, 0.5), 1e-6)


@pytest.mark.parametrize(
  ("dtype", "fill"),
  [
    (jnp.bfloat16, -1.5),
    (jnp.int32, -100),
    (jnp.uint8, 255),
    (jnp.bool_, True),
    (jnp.float32, np.inf),
    (jnp.int32, jnp.int32(7)),
  ],
)
def test_shift_of_any_dtype(dtype, fill):
  x = jnp.asarray(normal(1, 2, 12) * 3, dtype)
  got = token_shift(x, 1, fill=fill, mesh=make_mesh(3, "auto"))
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, shift(np.asarray(x), 1, fill))


def test_shift_of_rows_that_have_their_empty_slots():
  layout, counts = Uneven((2, 0, 5, 3)), (2, 0, 5, 3)
  x = normal(2, 1, 10).astype(np.float32)
  rows = np.full((1, 20), np.nan, np.float32)
  slots = np.concatenate([5 * i + np.arange(n) for i, n in enumerate(counts)])
  rows[:, slots] = x
  got = token_shift(rows, -1, mesh=make_mesh(4, "auto"), layout=layout)
  np.testing.assert_array_equal(got[:, slots], shift(x, -1))
  assert not np.any(np.delete(np.asarray(got), slots, 1))


def test_the_fill_has_a_gradient():
  x = jnp.ones((2, 12))
  mesh = make_mesh(3, "auto")
  f = lambda fill: jnp.sum(token_shift(x, -2, fill=fill, mesh=mesh))
  assert jax.jit(jax.grad(f))(jnp.float32(3)) == 4


def sent(f, *x):
  """Numbers that go along each of the sends of a program, and its ops."""
  program = Program(jax.jit(f).lower(*x).compile().as_text())
  sizes = [
    int(np.prod(i.shapes[0][1])) * times for _, i, times in program.sends()
  ]
  return sorted(sizes), program.ops()


@pytest.mark.parametrize(
  ("layout", "by", "want"),
  [
    (Contiguous(), 2, [2]),
    (Contiguous(), -1, [1]),
    (Contiguous(), 6, [2, 2]),
    (Striped(), 1, [4]),
    (Striped(2), -1, [2]),
    (Zigzag(), -1, [1, 1]),
    (Uneven((4,) * 8), 3, [3]),
  ],
)
def test_only_what_is_needed_is_sent(layout, by, want):
  mesh, wide = make_mesh(8, "auto"), 5
  x = jax.device_put(
    jnp.ones((1, 32, wide)), NamedSharding(mesh, P(None, "seq"))
  )
  f = lambda x: jnp.sum(jnp.sin(shifts(by, layout, 8, mesh)(x)[0]))
  sizes, ops = sent(shifts(by, layout, 8, mesh), x)
  assert sizes == [wide * n for n in want]
  both, more = sent(jax.value_and_grad(f), x)
  assert sorted(both) == sorted(2 * [wide * n for n in want])
  assert not {"all-gather", "all-to-all"} & (ops | more)


# ---------------------------------------------------------------------------
# associative_scan
# ---------------------------------------------------------------------------


def compose(early, late):
  """Of affine maps x -> x m + c, which do not commute."""
  turned = jnp.einsum("bti,btij->btj", early["c"], late["m"])
  return {
    "m": jnp.einsum("btij,btjk->btik", early["m"], late["m"]),
    "c": turned + late["c"],
  }


def composed(m, c, reverse=False):
  m, c = np.array(m), np.array(c)
  order = range(m.shape[1])[:: -1 if reverse else 1]
  for before, t in itertools.pairwise(order):
    c[:, t] += np.einsum("bi,bij->bj", c[:, before], m[:, t])
    m[:, t] = np.einsum("bij,bjk->bik", m[:, before], m[:, t])
  return m, c


def maps(length, b=1):
  return [normal(3, b, length, 2, 2) * 0.8, normal(4, b, length, 2)]


def scans(reverse, layout=None, mesh=None, axis=None):
  def f(m, c):
    got = associative_scan(
      compose, {"m": m, "c": c}, reverse=reverse, mesh=mesh, layout=layout,
      axis=axis,
    )  # fmt: skip
    return got["m"], got["c"]

  return f


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("layout", "shards", "rounds", "reverse"),
  [
    (Contiguous(), 1, False, True),
    _slow(Contiguous(), 3, False, False),
    # The last one has nothing.
    (Contiguous(), 8, False, True),
    _slow(Contiguous(), 8, False, False),
    (Uneven((0, 2, 0, 8, 3)), 5, False, True),
    _slow(Uneven((0, 2, 0, 8, 3)), 5, False, False),
    (Uneven((4, 2, 1, 2, 4)), 5, True, False),
    _slow(Uneven((4, 2, 1, 2, 4)), 5, True, True),
  ],
)
def test_scan(layout, shards, rounds, reverse, monkeypatch):
  if rounds:
    monkeypatch.setattr(scan, "_GATHERED_BYTES", 0)
  f = scans(reverse, layout, make_mesh(shards, "auto"))
  reference = functools.partial(composed, reverse=reverse)
  check(f, reference, maps(13), layout=layout, shards=shards)


def test_scan_without_a_neutral_element():
  """A function that makes NaN of zeros, and whose derivative is infinite."""
  x = np.abs(normal(5, 2, 17, 1)) + 0.5
  f = lambda x: (
    associative_scan(
      lambda a, b: a * b / jnp.sqrt(a * b), x, mesh=make_mesh(8, "auto")
    ),
  )
  # Not associative but for one number: all tokens are alike.
  x[:] = x[0, 0]
  got, (grad,) = measured(f, [x], shards=8)
  close(got, (x,))
  assert np.all(np.isfinite(grad))


def test_large_totals_go_in_rounds(monkeypatch):
  mesh = make_mesh(8, "auto")
  x = jax.device_put(jnp.ones((1, 64, 5)), NamedSharding(mesh, P(None, "seq")))
  f = lambda x: associative_scan(jnp.maximum, x, mesh=mesh)
  sizes, ops = sent(f, x)
  assert sizes == [] and "all-gather" in ops
  monkeypatch.setattr(scan, "_GATHERED_BYTES", 0)
  sizes, ops = sent(lambda x: f(x), x)
  assert sizes == [5] * 4 and "all-gather" not in ops


# ---------------------------------------------------------------------------
# linear_recurrence
# ---------------------------------------------------------------------------


def recurrence(a, b, initial, seg=None, reverse=False):
  h, state = np.zeros(np.broadcast_shapes(a.shape, b.shape)), initial.copy()
  for row in range(h.shape[0]):
    before = None
    for t in range(h.shape[1])[:: -1 if reverse else 1]:
      document = 1 if seg is None else seg[row, t]
      if document == 0:
        continue
      if before not in (None, document):
        state[row] = 0
      state[row] = a[min(row, a.shape[0] - 1), t] * state[row] + b[row, t]
      h[row, t], before = state[row], document
  return h, state


def coefficients(length, a_shape=(3, 1)):
  a = 1 / (1 + np.exp(-normal(6, 2, length, *a_shape)))
  return [a, normal(7, 2, length, 3, 2), normal(8, 2, 3, 2)]


def recurrences(seg=None, reverse=False, layout=None, mesh=None, shards=1):
  if seg is not None and layout is not None:
    seg = layout.permute(seg, shards=shards)
  return lambda a, b, initial: linear_recurrence(
    a, b, initial=initial, reverse=reverse, segment_ids=seg, mesh=mesh,
    layout=layout,
  )  # fmt: skip


@pytest.mark.parametrize(
  ("layout", "shards", "rounds", "reverse"),
  [
    _slow(Contiguous(), 1, False, True),
    _slow(Contiguous(), 3, False, False),
    (Contiguous(), 8, True, True),
    _slow(Contiguous(), 8, True, False),
    (Uneven((0, 2, 0, 8, 3)), 5, False, True),
    _slow(Uneven((0, 2, 0, 8, 3)), 5, False, False),
  ],
)
def test_recurrence(layout, shards, rounds, reverse, monkeypatch):
  if rounds:
    monkeypatch.setattr(scan, "_GATHERED_BYTES", 0)
  seg = SEG if shards > 1 else None
  f = recurrences(seg, reverse, layout, make_mesh(shards, "auto"), shards)
  reference = functools.partial(recurrence, seg=seg, reverse=reverse)
  check(
    f,
    reference,
    coefficients(13),
    cut=(True, True, False),
    tokens=(True, False),
    layout=layout,
    shards=shards,
  )


def test_recurrence_of_bfloat16_sums_in_float32():
  a, b, initial = coefficients(100)
  a, b = (jnp.asarray(x, jnp.bfloat16) for x in (0.9 + 0.1 * a, b))
  mesh = make_mesh(3, "auto")
  h, last = linear_recurrence(a, b, initial=jnp.float32(initial), mesh=mesh)
  assert h.dtype == jnp.bfloat16 and last.dtype == jnp.float32
  wide = [np.asarray(x, np.float64) for x in (a, b)]
  want = recurrence(*wide, initial)
  close(last, want[1], 1e-5)
  close(h, want[0], 2**-8)
  loss = lambda b: jnp.sum(linear_recurrence(a, b, mesh=mesh)[1])
  grad = jax.jit(jax.grad(loss))(b)
  assert grad.dtype == jnp.bfloat16
  after = np.cumprod(wide[0][:, :0:-1], 1)[:, ::-1]
  want = np.concatenate([after, np.ones_like(after[:, :1])], 1)
  close(grad, np.broadcast_to(want, b.shape), 2**-8)


def test_recurrence_keeps_no_more_than_its_operands_and_its_result():
  x = [jnp.asarray(a, jnp.float32) for a in coefficients(500, (3, 2))]
  _, pull = jax.vjp(linear_recurrence, *x[:2])
  kept = sum(a.nbytes for a in jax.tree.leaves(pull) if hasattr(a, "nbytes"))
  assert kept <= 2.1 * x[0].nbytes


# ---------------------------------------------------------------------------
# causal_conv
# ---------------------------------------------------------------------------


def convolution(x, weight, bias, before=None, seg=None):
  taps = weight.shape[1]
  y = np.zeros_like(x)
  seg = np.ones(x.shape[:2], int) if seg is None else seg
  for row in range(x.shape[0]):
    for i, at in enumerate(by_document(seg, row)):
      earlier = np.zeros((taps - 1, x.shape[2]))
      if i == 0 and before is not None:
        earlier = before[row]
      tokens = np.concatenate([earlier, x[row, at]])
      for n, t in enumerate(at):
        y[row, t] = (weight * tokens[n : n + taps].T).sum(1) + bias
  return (y,)


def filters(taps=4):
  return [normal(9, 2, 13, 3), normal(10, 3, taps), normal(11, 3)]


def convolutions(seg, layout, shards, mesh):
  seg = None if seg is None else layout.permute(seg, shards=shards)
  return lambda x, weight, bias, before=None: (
    causal_conv(
      x, weight, bias=bias, before=before, segment_ids=seg, mesh=mesh,
      layout=layout,
    ),
  )  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("layout", "shards", "seg", "taps", "before"),
  [
    _slow(Contiguous(), 1, None, 4, True),
    _slow(Contiguous(), 3, None, 4, True),
    (Contiguous(), 3, SEG, 4, True),
    _slow(Contiguous(), 8, SEG, 4, True),
    _slow(Contiguous(), 3, SEG, 1, False),
    (Striped(), 3, SEG, 3, False),
    _slow(Zigzag(), 3, None, 3, False),
    (Uneven((0, 2, 0, 8, 3)), 5, SEG, 3, True),
  ],
)
def test_conv(layout, shards, seg, taps, before):
  x = filters(taps)
  if before:
    x.append(normal(12, 2, taps - 1, 3))
  check(
    convolutions(seg, layout, shards, make_mesh(shards, "auto")),
    functools.partial(convolution, seg=seg),
    x,
    cut=(True,) + (False,) * (len(x) - 1),
    layout=layout,
    shards=shards,
  )


def test_a_neighbour_sends_what_the_conv_needs():
  mesh, wide, taps = make_mesh(8, "auto"), 5, 4
  x = jax.device_put(
    jnp.ones((1, 32, wide)), NamedSharding(mesh, P(None, "seq"))
  )
  weight = jnp.ones((wide, taps))
  f = lambda x: causal_conv(x, weight, mesh=mesh)
  sizes, ops = sent(f, x)
  assert max(sizes) == wide * (taps - 1)
  assert sum(sizes) <= (wide + 1) * (taps - 1)
  assert not {"all-gather", "all-to-all"} & ops


# ---------------------------------------------------------------------------
# gated_delta_rule
# ---------------------------------------------------------------------------


def delta(q, k, v, decay, beta, initial, seg=None):
  out, state = np.zeros_like(v), initial.copy()
  group = v.shape[2] // k.shape[2]
  for row, n in np.ndindex(v.shape[0], v.shape[2]):
    before = None
    s = state[row, n]
    for t in range(v.shape[1]):
      document = 1 if seg is None else seg[row, t]
      if document == 0:
        continue
      if before not in (None, document):
        s = np.zeros_like(s)
      key = k[row, t, n // group]
      s = s * np.exp(decay[row, t, n])
      s = s + beta[row, t, n] * np.outer(key, v[row, t, n] - s.T @ key)
      out[row, t, n], before = s.T @ q[row, t, n // group], document
    state[row, n] = s
  return out, state


def heads(length, b):
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  return [
    unit(normal(13, b, length, 1, 2)),
    unit(normal(14, b, length, 1, 2)),
    normal(15, b, length, 2, 2),
    -np.exp(normal(16, b, length, 2)),
    1 / (1 + np.exp(-normal(17, b, length, 2))),
    normal(18, b, 2, 2, 2),
  ]


def deltas(seg, layout, shards, mesh):
  seg = None if seg is None else layout.permute(seg, shards=shards)[:1]
  return lambda *x: gated_delta_rule(
    *x[:5], initial=x[5], segment_ids=seg, chunk=4, mesh=mesh, layout=layout
  )


@pytest.mark.parametrize(
  ("layout", "shards", "seg"),
  [
    _slow(Contiguous(), 1, SEG),
    _slow(Contiguous(), 3, SEG),
    _slow(Contiguous(), 8, None),
    (Uneven((0, 2, 0, 8, 3)), 5, SEG),
  ],
)
def test_delta(layout, shards, seg):
  check(
    deltas(seg, layout, shards, make_mesh(shards, "auto")),
    functools.partial(delta, seg=seg),
    heads(13, 1),
    cut=(True,) * 5 + (False,),
    tokens=(True, False),
    layout=layout,
    shards=shards,
    tolerance=2e-5,
  )


# ---------------------------------------------------------------------------
# Where a call runs
# ---------------------------------------------------------------------------

# name: (f with keywords that say where, its operands, the truth, which operands
# and which results go over the sequence)
SOME = normal(19, 2, 12, 2)
CALLS = {
  "shift": (
    lambda **place: lambda x: (token_shift(x, -2, **place),),
    [SOME],
    lambda x: (shift(x, -2),),
    (True,),
    (True,),
  ),
  "scan": (
    lambda **place: scans(False, **place),
    maps(12, 2),
    composed,
    (True, True),
    (True, True),
  ),
  "recurrence": (
    lambda **place: lambda a, b, s: linear_recurrence(a, b, initial=s, **place),
    coefficients(12),
    recurrence,
    (True, True, False),
    (True, False),
  ),
  "conv": (
    lambda **place: lambda x, w, b: (causal_conv(x, w, bias=b, **place),),
    [SOME, normal(20, 2, 3), normal(21, 2)],
    convolution,
    (True, False, False),
    (True,),
  ),
  "delta": (
    lambda **place: (
      lambda *x: gated_delta_rule(*x[:5], initial=x[5], chunk=4, **place)
    ),
    heads(12, 2),
    delta,
    (True,) * 5 + (False,),
    (True, False),
  ),
}


# The delta rule takes long to compile.
FEW = [*(n for n in CALLS if n != "delta"), _slow("delta")]


@functools.cache
def expected(name):
  _, x, reference, _, _ = CALLS[name]
  return truth(reference, x)


def spec(does):
  return P(None, "seq") if does else P()


@pytest.mark.one_case
@pytest.mark.parametrize("name", CALLS)
def test_explicit_mesh(name):
  call, x, _, cut, tokens = CALLS[name]
  mesh = jax.make_mesh(
    (2, 3), ("data", "seq"), axis_types=(AxisType.Explicit,) * 2,
    devices=jax.devices()[:6],
  )  # fmt: skip
  put = lambda a, does: jax.device_put(
    jnp.asarray(a, jnp.float32),
    NamedSharding(mesh, P("data", "seq") if does else P()),
  )

  @jax.jit
  def both(x):
    outs, pull = jax.vjp(call(), *x)
    way = lambda a: jax.sharding.reshard(
      jnp.sin(1.0 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape),
      jax.typeof(a).sharding,
    )
    return outs, pull(tuple(way(a) for a in outs))

  with jax.set_mesh(mesh):
    outs, grads = both([put(a, d) for a, d in zip(x, cut, strict=True)])
    for out, does in zip(outs, tokens, strict=True):
      if does:
        assert jax.typeof(out).sharding.spec[:2] == P("data", "seq")[:2]
  close((outs, list(grads)), expected(name), 2e-5)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()])
def test_explicit_mesh_that_does_not_divide_the_length(layout):
  mesh = jax.make_mesh(
    (2, 3), ("model", "seq"), axis_types=(AxisType.Explicit,) * 2,
    devices=jax.devices()[:6],
  )  # fmt: skip
  x = normal(22, 2, 13, 2).astype(np.float32)
  there = jax.device_put(
    layout.permute(x, shards=3), NamedSharding(mesh, P(None, None, "model"))
  )
  with jax.set_mesh(mesh):
    got = jax.jit(lambda x: token_shift(x, 1, layout=layout))(there)
  assert jax.typeof(got).sharding.spec == P(None, None, "model")
  close(layout.restore(np.asarray(got), shards=3), shift(x, 1))


def test_what_combines_may_close_over_what_is_differentiated():
  x = jnp.asarray(normal(23, 1, 12, 2), jnp.float32)

  def loss(scan, s):
    return jnp.sum(scan(lambda a, b: a + b + s * a * b, x) ** 2)

  over = functools.partial(associative_scan, mesh=make_mesh(3, "auto"))
  alone = functools.partial(jax.lax.associative_scan, axis=1)
  got, want = (
    jax.jit(jax.grad(functools.partial(loss, f)))(0.5) for f in (over, alone)
  )
  close(got, want)


@pytest.mark.parametrize("name", FEW)
def test_inside_shard_map(name):
  call, x, _, cut, tokens = CALLS[name]
  f = jax.shard_map(
    call(),
    mesh=make_mesh(3, "auto"),
    in_specs=tuple(map(spec, cut)),
    out_specs=tuple(map(spec, tokens)),
    axis_names={"seq"},
  )
  got = measured(f, x, shards=3, cut=cut, tokens=tokens)
  close(got, expected(name), 2e-5)


@pytest.mark.parametrize("name", FEW)
def test_one_device_plays_all_shards(name):
  call, x, _, cut, tokens = CALLS[name]

  def f(*x):
    split = lambda a, d: a.reshape(2, 3, 4, *a.shape[2:]) if d else a
    outs = jax.vmap(
      call(axis="seq"),
      in_axes=tuple(1 if d else None for d in cut),
      out_axes=tuple(1 if d else 0 for d in tokens),
      axis_name="seq",
    )(*(split(a, d) for a, d in zip(x, cut, strict=True)))
    join = lambda a, d: a.reshape(2, 12, *a.shape[3:]) if d else a[1]
    return tuple(join(a, d) for a, d in zip(outs, tokens, strict=True))

  got = measured(f, x, cut=cut, tokens=tokens)
  close(got, expected(name), 2e-5)


def test_the_current_mesh_is_found_and_other_axes_are_left_alone():
  mesh = jax.make_mesh(
    (2, 3), ("data", "seq"), axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:6],
  )  # fmt: skip
  x = jax.device_put(
    jnp.asarray(SOME, jnp.float32), NamedSharding(mesh, P("data", "seq"))
  )
  with jax.set_mesh(mesh):
    f = jax.jit(lambda x: token_shift(x, 1)).lower(x).compile()
  close(f(x), shift(SOME, 1))
  assert f.output_shardings.is_equivalent_to(x.sharding, 3)
  (size,) = (
    np.prod(i.shapes[0][1]) for _, i, _ in Program(f.as_text()).sends()
  )
  assert size == 2


# ---------------------------------------------------------------------------
# What is wrong with a call
# ---------------------------------------------------------------------------

X = jnp.ones((2, 12, 3))
ROW = jnp.ones((2, 12), jnp.int32)
Q, V, G = jnp.ones((2, 12, 2, 4)), jnp.ones((2, 12, 4, 3)), jnp.ones((2, 12, 4))


@pytest.mark.parametrize(
  ("call", "kind", "words"),
  [
    (lambda m: token_shift([1.0]), InputTypeError, "x list"),
    (lambda m: token_shift(X[0, 0]), ShapeError, "x (3,)"),
    (lambda m: token_shift(X, 1.5), OptionError, "by 1.5"),
    (lambda m: token_shift(X, True), OptionError, "by True"),
    (lambda m: token_shift(ROW, fill=0.5), DtypeError, "fill 0.5 int32"),
    (lambda m: token_shift(ROW, fill=np.nan), DtypeError, "fill nan int32"),
    (lambda m: token_shift(X, fill=X), ShapeError, "fill (2, 12, 3)"),
    (lambda m: token_shift(X, segment_ids=X), DtypeError, "segment_ids"),
    (
      lambda m: token_shift(X, segment_ids=ROW[:, :5]),
      ShapeError,
      "segment_ids (2, 5) (2, 12)",
    ),
    (lambda m: token_shift(X, mesh=m, axis="x"), MeshError, "axis 'x' seq"),
    (lambda m: token_shift(X, axis="seq"), MeshError, "axis 'seq' mesh"),
    (lambda m: token_shift(X, layout="zigzag"), OptionError, "layout zigzag"),
    (
      lambda m: token_shift(X, mesh=m, layout=Uneven((4, 4, 5))),
      ShapeError,
      "layout 13 12",
    ),
    (
      lambda m: associative_scan(jnp.add, X, mesh=m, layout=Striped()),
      OptionError,
      "layout Striped Contiguous permutation",
    ),
    (lambda m: associative_scan("add", X), InputTypeError, "combine str"),
    (lambda m: associative_scan(jnp.add, []), InputTypeError, "elements"),
    (
      lambda m: associative_scan(jnp.add, [X, X[:, :4]]),
      ShapeError,
      "elements 12 4",
    ),
    (lambda m: linear_recurrence(X, X[:, :4]), ShapeError, "b (2, 4, 3)"),
    (lambda m: linear_recurrence(X, X[..., None]), ShapeError, "b 3"),
    (lambda m: linear_recurrence(ROW, ROW), DtypeError, "a int32"),
    (
      lambda m: linear_recurrence(X, X, initial=X),
      ShapeError,
      "initial (2, 3)",
    ),
    (
      lambda m: linear_recurrence(X, X, mesh=m, layout=Zigzag()),
      OptionError,
      "layout Zigzag",
    ),
    (lambda m: causal_conv(X, X[0]), ShapeError, "weight (12, 3)"),
    (lambda m: causal_conv(X, X[0, :3, :2], bias=X), ShapeError, "bias (3,)"),
    (
      lambda m: causal_conv(X, jnp.ones((3, 4)), before=X),
      ShapeError,
      "before (2, 3, 3)",
    ),
    (
      lambda m: causal_conv(
        X, jnp.ones((3, 4)), before=X[:, :3], mesh=m, layout=Striped()
      ),
      OptionError,
      "before Striped",
    ),
    (lambda m: gated_delta_rule(Q, Q, X, G, G), ShapeError, "v (2, 12, 3)"),
    (lambda m: gated_delta_rule(Q, Q, V, G, X), ShapeError, "beta (2, 12, 4)"),
    (
      lambda m: gated_delta_rule(Q, Q, V[:, :, :3], X, X),
      ShapeError,
      "v 3 2",
    ),
    (
      lambda m: gated_delta_rule(Q, Q.astype(jnp.bfloat16), V, G, G),
      DtypeError,
      "k bfloat16 float32",
    ),
    (lambda m: gated_delta_rule(Q, Q, V, G, G, chunk=3), OptionError, "chunk"),
  ],
)
def test_bad_input(call, kind, words, unchecked):
  refused(kind, lambda: call(make_mesh(3, "auto")), *words.split())


def test_a_shard_that_does_not_fit_its_layout(unchecked):
  f = jax.shard_map(
    lambda x: token_shift(x, layout=Striped(3)),
    mesh=make_mesh(3, "auto"),
    in_specs=P(None, "seq"),
    out_specs=P(None, "seq"),
  )
  refused(ShapeError, lambda: f(X), "4 tokens", "Striped", "multiple of")
