"""The contract: every strategy, layout, mesh and feature gives the truth.

Outputs, log-sum-exps and all gradients against float64. Tiles are forced
small, so that a shard has several of them and whole, partial and empty tiles
all occur; most lengths do not divide, so that shards hold padding.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import (
  Blockwise,
  Causal,
  Chunked,
  Contiguous,
  Dense,
  Gather,
  Prefix,
  Ring,
  Striped,
  Ulysses,
  Window,
  Zigzag,
)
from ringjax.ops.attention.attend import NAMES
from ringjax.ops.attention.blockwise import joined
from tests import oracle

TILES = Blockwise(8, 8)
LAYOUTS = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "striped4": Striped(4),
  "zigzag": Zigzag(),
}


def causal(i, j):
  return j <= i


def everything(t=72, bias=None, **options):
  """All features that combine, in one call."""
  seg = np.repeat([1, 2, 3, 0], [t // 2 - 6, 9, t - t // 2 - 10, 7])
  return dict(
    t=t,
    j=12,
    is_causal=True,
    local_window_size=(19, 30),
    sees=lambda i, j: (j <= i) & (i - j < 20),
    bias=bias or (2, 4, t, t),
    sinks=True,
    slopes=True,
    logits_soft_cap=5.0,
    q_seg=np.stack([seg, np.roll(seg, 11)]),
    k_len=np.array([t - 2, t - 11]),
    q_len=np.array([t, t - 4]),
    scale=0.3,
    **options,
  )


PREFIXES = np.array([13, 50], np.int32)
# Two rows of packed documents; 0 is padding, also in the middle.
PACKED = np.stack(
  [
    np.repeat([1, 2, 3, 0], [20, 1, 44, 7]),
    np.repeat([4, 0, 7, 5], [33, 6, 9, 24]),
  ]
)

# Two prompts of documents that do not see each other; 1 sees all, 2 is seen.
SEPARATE = np.stack(
  [
    np.repeat([2, 3, 1, 4, 1, 5, 1, 0], [5, 20, 2, 17, 2, 9, 10, 7]),
    np.repeat([1, 3, 0, 4, 5, 1], [4, 24, 3, 8, 20, 13]),
  ]
)


# The meshes and layouts that are tried on every commit.
SEPARATE_QUICK = [(1, "contiguous"), (4, "striped"), (8, "striped")]


def sees_documents(a, b):
  return (a == 1) | (b == 2) | (a == b)


# Features in which the order of tokens matters are tried in every layout.
ORDERED = {
  "gqa": dict(is_causal=True, sees=causal),
  "window-narrow": dict(
    mask=Causal() & Window(5), sees=lambda i, j: (j <= i) & (i - j < 5)
  ),
  "window-wide": dict(
    mask=Causal() & Window(23), sees=lambda i, j: (j <= i) & (i - j < 23)
  ),
  "segments": dict(is_causal=True, sees=causal, q_seg=PACKED),
  "prefill": dict(
    t=30, s=75, q_pos=45 + np.arange(30), is_causal=True, sees=causal
  ),
  "bias-full": dict(bias=(2, 4, 72, 72), is_causal=True, sees=causal),
  "everything": everything(),
}
PLAIN = {
  "window-sides": dict(
    local_window_size=(6, 13),
    sees=lambda i, j: (i - j <= 6) & (j - i <= 13),
  ),
  "window-symmetric": dict(mask=Window(7), sees=lambda i, j: abs(i - j) < 7),
  "prefix-each": dict(
    mask=Causal() | Prefix(PREFIXES),
    sees=lambda i, j: (j <= i) | (j < PREFIXES[:, None, None, None]),
  ),
  "chunked": dict(
    mask=Chunked(15) & Causal(),
    sees=lambda i, j: (i // 15 == j // 15) & (j <= i),
  ),
  "mask-full": dict(allow=(2, 4, 72, 72)),
  "mha": dict(kv=4, is_causal=True, sees=causal),
  "gqa3": dict(n=6, kv=2, is_causal=True, sees=causal),
  "mqa": dict(kv=1, is_causal=True, sees=causal),
  "head-dim-20": dict(h=20, is_causal=True, sees=causal),
  "value-dim": dict(h=16, j=24, is_causal=True, sees=causal),
  "bidirectional": dict(scale=0.7),
  "window-ahead": dict(
    mask=Window(1, 11), sees=lambda i, j: (j >= i) & (j - i <= 11)
  ),
  "segments-shared": dict(q_seg=PACKED[1]),
  "prefix": dict(
    mask=Causal() | Prefix(21), sees=lambda i, j: (j <= i) | (j < 21)
  ),
  "block-causal": dict(
    mask=rj.BlockCausal(10), sees=lambda i, j: j // 10 <= i // 10
  ),
  "cross": dict(t=40, s=75, q_len=np.array([40, 33])),
  "cross-causal": dict(t=50, s=33, is_causal=True, sees=causal),
  "positions": dict(
    t=33,
    s=70,
    q_pos=np.stack([3 * np.arange(33) - 4, 60 - np.arange(33)]),
    k_pos=np.stack([np.arange(70), np.arange(70) // 2 + 30]),
    mask=Causal() & Window(9),
    sees=lambda i, j: (j <= i) & (i - j < 9),
  ),
  "sinks": dict(sinks=True, q_seg=PACKED, is_causal=True, sees=causal),
  "soft-cap": dict(
    spread=5.0, logits_soft_cap=4.0, is_causal=True, sees=causal
  ),
  "bias-heads": dict(bias=(4, 72, 72), is_causal=True, sees=causal),
  "bias-keys": dict(bias=(1, 1, 1, 72), is_causal=True, sees=causal),
  "bias-queries": dict(bias=(1, 4, 72, 1), is_causal=True, sees=causal),
  "bias-one": dict(bias=(2, 4, 1, 1), t=40, s=75),
  "mask-keys": dict(allow=(2, 1, 1, 75), t=40, s=75),
  "mask-pairs": everything(allow=(1, 1, 72, 72)),
  "alibi": dict(slopes=True, is_causal=True, sees=causal),
  "lengths": dict(q_len=np.array([72, 31]), k_len=np.array([3, 55])),
  "nothing": dict(allow=np.zeros((1, 1, 1, 72), bool)),
  "separate": dict(
    mask=Causal() & rj.SeparateDocuments(),
    sees=causal,
    q_seg=SEPARATE,
    relates=sees_documents,
  ),
}
FEATURES = ORDERED | PLAIN
# Long enough for tiles without a mask that are computed at once.
LONG_PACKED = np.repeat(np.array([[1, 2, 0], [3, 4, 5]]), (96, 152, 8), axis=1)
LONG = {
  "long": dict(t=256, is_causal=True, sees=causal),
  "long-terms": dict(
    t=256,
    bias=(2, 4, 256, 256),
    sinks=True,
    slopes=True,
    logits_soft_cap=5.0,
    is_causal=True,
    sees=causal,
  ),
  "long-window": dict(
    t=256,
    mask=Causal() & Window(150),
    sees=lambda i, j: (j <= i) & (i - j < 150),
  ),
  "long-segments": dict(
    t=256, is_causal=True, sees=causal, q_seg=LONG_PACKED, j=12
  ),
  "long-lengths": dict(
    t=256, q_len=np.array([256, 171]), k_len=np.array([203, 55])
  ),
}
# Of the ordered ones those that are tried in every layout on every commit.
QUICK = ("gqa", "segments", "everything")


@functools.cache
def problem(name):
  case = oracle.build(**(FEATURES | LONG)[name])
  return case, oracle.truth(case)


@functools.cache
def ring_mesh(shards, kind=AxisType.Auto):
  return rj.make_mesh((shards,), ("seq",), axis_types=kind)


def verify(name, layout, strategy, shards=8):
  case, want = problem(name)
  got = oracle.run(
    case,
    layout=layout,
    strategy=strategy,
    shards=shards,
    mesh=ring_mesh(shards),
  )
  oracle.check(got, want)


def deal(names, all_of=(), turn=(0, 1)):
  """(name, layout) for the names in turn; what is left over is slow.

  `all_of` are tried in every layout, and of the others the `turn`[0]-th of
  each `turn`[1].
  """
  chosen = []
  for n, name in enumerate(names):
    for m, layout in enumerate(LAYOUTS):
      mine = (n + m) % len(LAYOUTS) == 0 and n % turn[1] == turn[0]
      marks = () if mine or name in all_of else pytest.mark.slow
      chosen.append(pytest.param(name, layout, marks=marks))
  return chosen


@pytest.mark.one_case
@pytest.mark.long_cases(3)
@pytest.mark.parametrize(("feature", "layout"), deal(FEATURES, QUICK, (0, 9)))
def test_ring_serves_every_feature(feature, layout):
  verify(feature, LAYOUTS[layout], Ring(TILES, unroll=1))


@pytest.mark.one_case
@pytest.mark.parametrize(("feature", "layout"), deal(FEATURES, turn=(1, 9)))
def test_ulysses_serves_every_feature(feature, layout):
  verify(feature, LAYOUTS[layout], Ulysses(TILES))


# These two share with the ring all but a few lines, each other's ones.
@pytest.mark.one_case
@pytest.mark.parametrize(("feature", "layout"), deal(FEATURES, turn=(3, 8)))
def test_gather_serves_every_feature(feature, layout):
  verify(feature, LAYOUTS[layout], Gather(TILES))


@pytest.mark.one_case
@pytest.mark.parametrize(("feature", "layout"), deal(FEATURES, turn=(7, 8)))
def test_dense_serves_every_feature(feature, layout):
  verify(feature, LAYOUTS[layout], Ring(Dense()))


SIZES = [1, 2, 3, 5, 6, 7]


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(("shards", "layout"), deal(SIZES, turn=(1, 2)))
def test_ring_sizes(shards, layout):
  verify("everything", LAYOUTS[layout], Ring(TILES), shards)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shards", "layout"),
  [
    pytest.param(
      shards,
      layout,
      marks=() if (shards, layout) in SEPARATE_QUICK else pytest.mark.long,
    )
    for shards in (1, 2, 4, 8)
    for layout in ("contiguous", "striped")
  ],
)
def test_a_ring_of_separate_documents(shards, layout):
  verify("separate", LAYOUTS[layout], Ring(TILES, unroll=1), shards)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("strategy", "layout"),
  [
    (Gather(TILES), "striped"),
    (Ulysses(TILES), "contiguous"),
    pytest.param(rj.Chain(TILES), "contiguous", marks=pytest.mark.long),
    pytest.param(
      Ring(TILES, by_document=True), "contiguous", marks=pytest.mark.long
    ),
    pytest.param(Ring(TILES), "zigzag", marks=pytest.mark.slow),
    pytest.param(rj.RingQ(TILES), "striped", marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_other_strategies_of_separate_documents(strategy, layout):
  verify("separate", LAYOUTS[layout], strategy, 4)


@pytest.mark.one_case
@pytest.mark.parametrize("strategy", [Gather(TILES), Ulysses(TILES)])
@pytest.mark.parametrize(
  "shards", [1, pytest.param(3, marks=pytest.mark.smoke)]
)
def test_sizes_of_other_strategies(shards, strategy):
  verify("everything", Zigzag(), strategy, shards)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("n", "kv", "shards"), [(6, 3, 4), (8, 8, 4), (6, 2, 8), (3, 1, 2)]
)
def test_ulysses_deals_heads_that_do_not_divide(n, kv, shards):
  options = dict(sinks=True, slopes=True, bias=(1, n, 40, 40), h=8, t=40)
  case = oracle.build(n=n, kv=kv, is_causal=True, sees=causal, **options)
  got = oracle.run(
    case, strategy=Ulysses(TILES), shards=shards, mesh=ring_mesh(shards)
  )
  oracle.check(got, oracle.truth(case))


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize(
  "unroll", [1, 3, pytest.param(16, marks=pytest.mark.slow)]
)
def test_unrolling_changes_nothing(unroll):
  verify("window-wide", Striped(), Ring(TILES, unroll=unroll))


@pytest.mark.smoke
@pytest.mark.parametrize("local", [Blockwise(), Blockwise(16, 8), Dense()])
def test_one_device_needs_no_mesh(local):
  case, want = problem("everything")
  oracle.check(oracle.run(case, strategy=Ring(local)), want)


@pytest.mark.smoke
def test_without_a_batch_axis():
  case = oracle.build(b=1, is_causal=True, sees=causal, q_seg=PACKED[:1])
  want = {name: x[0] for name, x in oracle.truth(case).items()}
  drop = lambda tree: {name: x[0] for name, x in tree.items()}
  case = dataclasses.replace(
    case,
    arrays=drop(case.arrays),
    fixed=drop(case.fixed),
    cotangents=tuple(x[0] for x in case.cotangents),
  )
  got = oracle.run(case, layout=Striped(), shards=4, mesh=ring_mesh(4))
  oracle.check(got, want)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("shards", "layout", "q_block"),
  [
    (1, Contiguous(), 8),
    (2, Striped(), 8),
    pytest.param(2, Zigzag(), 16, marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize("feature", LONG)
def test_tiles_without_a_mask_at_once(feature, shards, layout, q_block):
  assert joined(256 // shards // q_block, q_block) > 1
  verify(feature, layout, Ring(Blockwise(q_block, 8)), shards)


_AS_USERS_DO = """
import jax, jax.numpy as jnp, ringjax as rj
jax.config.update("jax_num_cpu_devices", 2)
mesh = rj.make_mesh((2,), ("seq",))
def loss(q):
  out = rj.striped_attention(
    q, q, q, is_causal=True, mesh=mesh, axis="seq", local=rj.Blockwise(8, 8)
  )
  return jnp.sum(out * out)
x = jax.ShapeDtypeStruct((1, 128, 1, 8), jnp.float32)
jax.jit(jax.grad(loss)).lower(x).compile()
print("compiled")
"""


@pytest.mark.slow
def test_tiles_at_once_compile_as_users_do():
  """With all of LLVM's passes; what it cannot compile ends the process."""
  assert joined(8, 8) > 1
  done = subprocess.run(
    [sys.executable, "-c", _AS_USERS_DO],
    env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    check=False,
  )
  assert "compiled" in done.stdout, done.stderr[-2000:]


# Meshes.


def on(mesh, name, x):
  """`x` where a model has it: batch over data, heads over model."""
  names = {"query": "BTN.", "key": "BTN.", "value": "BTN.", "out": "BTN.",
           "lse": "BTN", "bias": "BNT.", "mask": "BNT.", "sinks": "N",
           "alibi_slopes": "N", "q_segment_ids": "BT",
           "query_seq_lengths": "B", "key_value_seq_lengths": "B"}  # fmt: skip
  axes = {"B": "data", "T": "seq", "N": "model", ".": None}
  spec = P(
    *(
      axes[letter] if size > 1 else None
      for letter, size in zip(names[name], x.shape, strict=True)
    )
  )
  return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.long
@pytest.mark.parametrize(
  "strategy",
  [
    Ring(TILES),
    pytest.param(Gather(TILES), marks=pytest.mark.slow),
    Ulysses(TILES),
  ],
)
@pytest.mark.parametrize(
  ("kind", "layout", "said"),
  [
    ("Auto", Zigzag(), {}),
    ("Explicit", Striped(), {}),
    pytest.param(
      "Auto",
      Striped(4),
      {"batch_axis": "data", "head_axis": "model"},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_batch_and_heads_are_sharded_too(kind, layout, said, strategy):
  mesh = rj.make_mesh(
    (2, 2, 2), ("data", "seq", "model"), axis_types=AxisType[kind]
  )
  case, want = problem("everything")
  got = oracle.run(
    case,
    functools.partial(rj.dot_product_attention, **said),
    layout=layout,
    shards=2,
    strategy=strategy,
    mesh=mesh,
    place=lambda name, x: on(mesh, name, x),
  )
  oracle.check(got, want)


@pytest.mark.parametrize(
  "mask",
  [
    Window(2**40),
    Window(2**31, 2**31),
    Chunked(2**40),
    rj.BlockCausal(2**40),
    Prefix(2**40),
  ],
)
def test_what_int32_does_not_hold_is_no_limit(mask):
  q = jax.random.normal(jax.random.key(0), (1, 12, 2, 4))
  options = dict(mesh=ring_mesh(2), strategy="ring")
  got = rj.dot_product_attention(q, q, q, mask=mask, **options)
  want = rj.dot_product_attention(q, q, q, **options)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_types_of_axes_may_be_mixed():
  kinds = AxisType.Explicit, AxisType.Auto, AxisType.Explicit
  mesh = rj.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=kinds)
  case, want = problem("everything")
  got = oracle.run(
    case,
    layout=Zigzag(),
    shards=2,
    strategy=Ring(TILES),
    mesh=mesh,
    axis="seq",
    place=lambda name, x: on(mesh, name, x),
  )
  oracle.check(got, want)


@pytest.mark.smoke
def test_the_mesh_and_axis_are_read_off_the_operands():
  mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  where = {"query": P("x", "y"), "key": P("x", "y"), "value": P("x", "y"),
           "out": P("x", "y"), "lse": P("x", "y")}  # fmt: skip
  case, want = problem("gqa")
  got = oracle.run(
    case,
    layout=Zigzag(),
    shards=4,
    place=lambda name, x: jax.device_put(x, NamedSharding(mesh, where[name])),
  )
  oracle.check(got, want)


@pytest.mark.parametrize("layout", [Contiguous(), Striped()])
def test_explicit_axes_that_do_not_divide_the_sequence(layout):
  case = oracle.build(t=39, is_causal=True, sees=causal)
  mesh = rj.make_mesh((4,), ("seq",), axis_types=AxisType.Explicit)
  got = oracle.run(case, layout=layout, shards=4, mesh=mesh, axis="seq")
  oracle.check(got, oracle.truth(case))


def test_the_current_mesh_is_found():
  case, want = problem("gqa")
  with jax.set_mesh(ring_mesh(4)):
    got = oracle.run(case, layout=Striped(4), shards=4)
  oracle.check(got, want)


# Inside a caller's shard_map or vmap the operands are per shard.


def sharded_axis(name, x):
  """The axis over which a shard_map cuts an argument, None for whole."""
  axes = [a for a in oracle.AXES.get(name, {}) if x.ndim >= -a]
  if name in ("bias", "mask"):
    axes = [a for a in axes if a == -2]  # A shard has all columns of its rows.
  axes = [x.ndim + a for a in axes if x.shape[a] > 1]
  return axes[0] if axes else None


def cut_spec(name, x):
  axis = sharded_axis(name, x)
  return P() if axis is None else P(*(None,) * axis, "seq")


def in_shard_map(mesh, names):
  def function(**arguments):
    arrays = {n: x for n, x in arguments.items() if hasattr(x, "shape")}
    rest = {n: x for n, x in arguments.items() if n not in arrays}
    rest["axis"] = "seq"
    return jax.shard_map(
      lambda arrays: rj.dot_product_attention(**arrays, **rest),
      mesh=mesh,
      in_specs=({n: cut_spec(n, x) for n, x in arrays.items()},),
      out_specs=(P(None, "seq"), P(None, "seq")),
      axis_names=names,
    )(arrays)

  return function


@functools.cache
def whole_problem():
  """A problem whose shards hold no padding in any layout."""
  case = oracle.build(**everything(t=96, bias=(2, 4, 96, 1)))
  return case, oracle.truth(case)


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "strategy"),
  [(Zigzag(), Ring(TILES)), (Striped(), Ulysses(TILES))],
)
def test_a_shard_has_all_columns_of_its_rows_of_bias_and_mask(layout, strategy):
  case = oracle.build(bias=(1, 4, 96, 96), allow=(2, 1, 96, 96), t=96)
  got = oracle.run(
    case,
    in_shard_map(ring_mesh(4), {"seq"}),
    layout=layout,
    shards=4,
    strategy=strategy,
  )
  oracle.check(got, oracle.truth(case))


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "strategy"),
  [
    pytest.param(Contiguous(), Ring(TILES), marks=pytest.mark.slow),
    (Zigzag(), Ring(TILES)),
    pytest.param(Striped(4), Ring(TILES), marks=pytest.mark.slow),
    (Striped(), Gather(TILES)),
    (Contiguous(), Ulysses(TILES)),
    pytest.param(Zigzag(), Ring(Dense()), marks=pytest.mark.slow),
  ],
)
def test_inside_shard_map(layout, strategy):
  case, want = whole_problem()
  mesh = rj.make_mesh((2, 4), ("data", "seq"))
  got = oracle.run(
    case,
    in_shard_map(mesh, {"seq"}),
    layout=layout,
    shards=4,
    strategy=strategy,
  )
  oracle.check(got, want)


@pytest.mark.one_case
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()])
def test_gradients_taken_inside_shard_map(layout):
  case, want = whole_problem()
  mesh, shards = ring_mesh(4), 4
  put = lambda tree: {
    n: oracle.reorder(n, x, layout, shards) for n, x in tree.items()
  }
  specs = lambda tree: {n: cut_spec(n, x) for n, x in tree.items()}
  arrays, fixed = put(case.arrays), put(case.fixed)
  cotangents = put(dict(zip(("out", "lse"), case.cotangents, strict=True)))

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(specs(arrays), specs(fixed), specs(cotangents)),
    out_specs=(specs(cotangents), specs(arrays)),
  )
  def both(arrays, fixed, cotangents):
    call = lambda x: rj.dot_product_attention(
      **x,
      **fixed,
      **case.options,
      axis="seq",
      layout=layout,
      strategy=Ring(TILES),
      return_residual=True,
    )
    (out, lse), pull = jax.vjp(call, arrays)
    gradients = pull((cotangents["out"], cotangents["lse"]))[0]
    return {"out": out, "lse": lse}, gradients

  results, gradients = both(arrays, fixed, cotangents)
  got = {
    n: oracle.reorder(n, np.asarray(x), layout, shards, back=True)
    for n, x in (results | gradients).items()
  }
  oracle.check(got, want)


def in_vmap(shards):
  def function(**arguments):
    arrays = {n: x for n, x in arguments.items() if hasattr(x, "shape")}
    rest = {n: x for n, x in arguments.items() if n not in arrays}
    axes = {n: sharded_axis(n, x) for n, x in arrays.items()}

    def split(x, axis):
      if axis is None:
        return x
      return x.reshape(*x.shape[:axis], shards, -1, *x.shape[axis + 1 :])

    out, lse = jax.vmap(
      lambda arrays: rj.dot_product_attention(**arrays, **rest),
      in_axes=(axes,),
      out_axes=1,
      axis_name="seq",
    )({n: split(x, axes[n]) for n, x in arrays.items()})
    join = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
    return join(out), join(lse)

  return function


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "strategy"),
  [
    pytest.param(Contiguous(), Ring(TILES), marks=pytest.mark.slow),
    (Striped(), Ring(TILES)),
    pytest.param(Zigzag(), Gather(TILES), marks=pytest.mark.slow),
    (Striped(4), Ulysses(TILES)),
    pytest.param(Zigzag(), Ring(Dense()), marks=pytest.mark.slow),
  ],
)
def test_one_device_plays_all_shards(layout, strategy):
  case, want = whole_problem()
  got = oracle.run(
    case,
    in_vmap(4),
    layout=layout,
    shards=4,
    strategy=strategy,
    axis="seq",
  )
  oracle.check(got, want)


# Transformations.


@pytest.mark.parametrize(
  "strategy",
  [Ring(TILES), pytest.param(Ulysses(TILES), marks=pytest.mark.slow)],
)
def test_vmap(strategy):
  cases = [
    oracle.build(is_causal=True, sees=causal, sinks=True, seed=n, t=40)
    for n in range(2)
  ]
  both = jax.tree.map(lambda *x: np.stack(x), *(c.arrays for c in cases))
  cotangents = jax.tree.map(
    lambda *x: np.stack(x), *(c.cotangents for c in cases)
  )

  @jax.jit
  @jax.vmap
  def function(arrays, cotangents):
    call = lambda x: rj.dot_product_attention(
      **x,
      is_causal=True,
      mesh=ring_mesh(8),
      strategy=strategy,
      return_residual=True,
    )
    (out, lse), pull = jax.vjp(call, arrays)
    return {"out": out, "lse": lse, **pull(cotangents)[0]}

  got = jax.tree.map(np.asarray, function(both, cotangents))
  for n, case in enumerate(cases):
    oracle.check({i: x[n] for i, x in got.items()}, oracle.truth(case))


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("policy", ["nothing", "names"])
def test_scan_and_remat(policy):
  policy = {
    "nothing": None,
    "names": jax.checkpoint_policies.save_only_these_names(*NAMES),
  }[policy]
  case = oracle.build(is_causal=True, sees=causal, kv=4, t=40)
  x, k, v = (case.arrays[n] for n in ("query", "key", "value"))
  weights = np.array([0.5, -1.5], np.float32)
  do, _ = case.cotangents

  @jax.jit
  def function(x, k, v, weights):
    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, weight):
      out = rj.dot_product_attention(
        x, k, v, is_causal=True, mesh=ring_mesh(8), strategy=Ring(TILES)
      )
      return x + weight * out, None

    return jax.lax.scan(layer, x, weights)[0]

  y, pull = jax.vjp(function, x, k, v, weights)
  got = dict(zip("yxkvw", map(np.asarray, (y, *pull(do))), strict=True))

  # The same by hand: layers forward, then their gradients in reverse.
  found = lambda q, do: oracle.attend(
    q, k, v, case.visible, do, np.zeros(do.shape[:3])
  )
  xs, outs, d = [x.astype(np.float64)], [], do.astype(np.float64)
  for weight in weights:
    outs.append(found(xs[-1], d)["out"])
    xs.append(xs[-1] + weight * outs[-1])
  want = {"y": xs[-1], "k": 0.0, "v": 0.0, "w": np.zeros(2)}
  for n in (1, 0):
    want["w"][n] = np.sum(d * outs[n])
    gradients = found(xs[n], weights[n] * d)
    want["k"] = want["k"] + gradients["key"]
    want["v"] = want["v"] + gradients["value"]
    d = d + gradients["query"]
  oracle.check(got, want | {"x": d}, 1e-5, 1e-5)


def test_value_and_grad_without_jit():
  case, want = problem("gqa")
  layout, (do, _) = Striped(), case.cotangents
  q, k, v = (
    jnp.asarray(oracle.reorder(n, case.arrays[n], layout, 8))
    for n in ("query", "key", "value")
  )
  do_there = jnp.asarray(oracle.reorder("out", do, layout, 8))

  def loss(q, k, v):
    out = rj.striped_attention(q, k, v, is_causal=True, mesh=ring_mesh(8))
    return jnp.sum(out * do_there)

  value, gradients = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
  assert np.isclose(value, np.sum(do * want["out"]), rtol=1e-5)
  want = oracle.truth(
    dataclasses.replace(case, cotangents=(do, np.zeros(do.shape[:3])))
  )
  for name, x in zip(("query", "key", "value"), gradients, strict=True):
    x = oracle.reorder(name, np.asarray(x), layout, 8, back=True)
    assert oracle.error(x, want[name]) < 1e-5


def test_forward_mode_and_second_derivatives_of_dense(x64):
  case = oracle.build(
    t=12, n=2, kv=1, h=4, b=1, is_causal=True, sees=causal, dtype=np.float64
  )
  names = ("query", "key", "value")
  primals = tuple(case.arrays[n] for n in names)
  rng = np.random.default_rng(1)
  tangents = tuple(rng.normal(size=x.shape) for x in primals)
  do, dlse = case.cotangents
  dlse = np.zeros_like(dlse)

  def loss(*x):
    out = rj.ring_attention(
      *x, is_causal=True, mesh=ring_mesh(4), local=Dense()
    )
    return jnp.sum(out * do)

  def gradients(by):
    moved = (x + by * d for x, d in zip(primals, tangents, strict=True))
    found = oracle.attend(*moved, case.visible, do, dlse)
    return [found[n] for n in names]

  slope = jax.jit(lambda *x: jax.jvp(loss, x, tangents)[1])(*primals)
  want = sum(np.sum(g * d) for g, d in zip(gradients(0), tangents, strict=True))
  assert np.isclose(slope, want, rtol=1e-12)
  turn = jax.jit(lambda *x: jax.jvp(jax.grad(loss, (0, 1, 2)), x, tangents)[1])(
    *primals
  )
  step = 1e-5
  for got, up, down in zip(
    turn, gradients(step), gradients(-step), strict=True
  ):
    assert oracle.error(got, (up - down) / (2 * step)) < 1e-8


# The functions by their papers' names, and the one for builders.


def test_blockwise_attention():
  case, want = problem("everything")
  got = oracle.run(
    case,
    lambda layout, **x: rj.blockwise_attention(**x, q_block=16, kv_block=8),
  )
  oracle.check(got, want)


def test_attention_of_coordinates_and_the_merge_of_its_partials():
  """Two documents' keys, attended apart and merged, are the whole."""
  case = oracle.build(is_causal=True, sees=causal, t=40)
  k_pos = np.arange(40, dtype=np.int32)[None]
  one = np.ones_like(k_pos)

  def function(query, key, value, **options):
    at = rj.Coords(jnp.asarray(k_pos), jnp.asarray(one))
    parts = [
        rj.attention(
            query, key[:, part], value[:, part], at, at[:, part], Causal(),
            Gather(TILES),
        )
        for part in (slice(0, 13), slice(13, 40))
    ]  # fmt: skip
    out, lse = rj.finalize(rj.merge(*(rj.Partial.of(*part) for part in parts)))
    return out, lse

  oracle.check(oracle.run(case, function), oracle.truth(case))
