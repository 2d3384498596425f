"""The chain, and the uneven layout that it is made for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import Blockwise, Causal, Chain, Contiguous, Uneven, Window
from ringjax.errors import OptionError, ShapeError
from tests import oracle
from tests.ops.attention.test_exact import problem, ring_mesh

TILES = Blockwise(8, 8)
# Of 72 tokens; a shard may have none.
PARTS = {
  1: (72,),
  2: (45, 27),
  3: (37, 0, 35),
  4: (30, 19, 13, 10),
  8: (15, 13, 11, 9, 8, 7, 5, 4),
}
CAUSAL = (
  "gqa", "window-narrow", "window-wide", "segments", "bias-full", "everything",
  "chunked", "mha", "mqa", "value-dim", "sinks", "soft-cap", "alibi",
  "mask-pairs",
)  # fmt: skip
QUICK = ("everything",)


def verify(name, layout, shards, local=TILES):
  case, want = problem(name)
  got = oracle.run(
    case,
    layout=layout,
    strategy=Chain(local),
    shards=shards,
    mesh=ring_mesh(shards),
  )
  oracle.check(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CAUSAL
  ],
)
def test_every_causal_feature(name):
  verify(name, Uneven(PARTS[8]), 8)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "shards",
  [1, pytest.param(2, marks=pytest.mark.slow), 3, 4],
)
def test_sizes(shards):
  verify("window-wide", Uneven(PARTS[shards]), shards)


@pytest.mark.parametrize("layout", [Contiguous(), Uneven(PARTS[4])])
def test_layouts_and_locals(layout):
  verify("gqa", layout, 4, rj.Dense())


@pytest.mark.parametrize(
  ("options", "says"),
  [
    (dict(), "a mask that sees nothing ahead"),
    (dict(mask=Window(3)), "a mask that sees nothing ahead"),
    (dict(is_causal=True, layout=rj.Striped()), "consecutive tokens"),
    (dict(is_causal=True, q_positions=jnp.arange(16)), "positions of your own"),
    (dict(is_causal=True, layout=Uneven((9, 3, 3))), "a count for each shard"),
    (dict(is_causal=True, layout=Uneven((9, 3, 3, 2))), "add up to"),
  ],
)
def test_what_a_chain_refuses(options, says):
  q = jnp.zeros((1, 16, 2, 4))
  with pytest.raises((OptionError, ShapeError), match=says):
    rj.dot_product_attention(
      q, q, q, strategy="chain", mesh=ring_mesh(4), **options
    )


@pytest.mark.parametrize("counts", [(), (0, 0), (3, -1), (2.0, 1), "12", 3])
def test_counts_that_are_none(counts):
  with pytest.raises(OptionError, match="counts"):
    Uneven(counts)


# What is sent.


def sends(shards, layout, tokens, *, grad=False, **options):
  """(pairs, bytes) of every permutation of the compiled program."""
  mesh = ring_mesh(shards)
  x = jax.ShapeDtypeStruct(
    (1, tokens, 2, 16),
    jnp.float32,
    sharding=NamedSharding(mesh, P(None, "seq")),
  )

  def f(q, k, v):
    return rj.dot_product_attention(
      q, k, v, is_causal=True, layout=layout, strategy="chain", mesh=mesh,
      axis="seq", **options,
    )  # fmt: skip

  def loss(*x):
    return jnp.sum(f(*x) ** 2)

  program = jax.jit(jax.grad(loss, (0, 1, 2)) if grad else f)
  text = program.lower(x, x, x).compile().as_text()
  assert "all-gather" not in text and "all-to-all" not in text
  found = re.findall(
    r"= \(?(\w+)\[([\d,]*)\]\S* .*?collective-permute(?:-start)?\(.*?"
    r"source_target_pairs=\{(.*?)\}\}",
    text,
  )
  return [
    (pairs.count("{"), np.prod([int(n) for n in dims.split(",")]))
    for kind, dims, pairs in found
    if kind == "f32"
  ]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_as_many_sends_as_pairs_of_shards(shards):
  """R (R - 1) / 2 sends of K and V in one array, half of a ring's."""
  local = 32
  found = sends(shards, Contiguous(), shards * local)
  assert [n for n, _ in found] == list(range(shards - 1, 0, -1))
  assert sum(n for n, _ in found) == shards * (shards - 1) // 2
  assert {size for _, size in found} == {2 * local * 2 * 16}


def test_an_uneven_chain_sends_its_largest_part():
  parts = (48, 32, 24, 24)
  found = sends(4, Uneven(parts), 4 * max(parts))
  assert [n for n, _ in found] == [3, 2, 1]
  assert {size for _, size in found} == {2 * max(parts) * 2 * 16}


def test_a_window_cuts_the_chain():
  near = sends(8, Contiguous(), 256, local_window_size=(20, 0))
  assert [n for n, _ in near] == [7]
  # The last shard begins 31 tokens behind the last one of the second.
  parts = (64, 40, 30, 26)
  far = sends(4, Uneven(parts), 4 * 64, local_window_size=(30, 0))
  assert [n for n, _ in far] == [3]
  far = sends(4, Uneven(parts), 4 * 64, local_window_size=(31, 0))
  assert [n for n, _ in far] == [3, 2]


def test_backward_takes_sums_home():
  """Beside K, V and the sums that go down, R - 1 sends of whole sums."""
  shards = 4
  found = [n for n, _ in sends(shards, Contiguous(), 128, grad=True)]
  down = shards * (shards - 1) // 2
  # XLA of JAX 0.10 looks through the barrier and shares keys that are sent
  # forward with those that are sent backward.
  shared = down if jax.__version_info__ < (0, 11) else 0
  assert sum(found) == 3 * down + shards - 1 - shared


# The work.


def test_tiles_of_a_chain_follow_the_counts():
  tile, parts = 16, (96, 64, 48, 48)
  counts = rj.tile_counts(Uneven(parts), Causal(), 4, sum(parts), tile, tile)
  t = [n // tile for n in parts]
  want = [t[i] * (t[i] + 1) // 2 + t[i] * sum(t[:i]) for i in range(4)]
  assert counts.sum(0).tolist() == want
  # Nothing comes from behind.
  assert all(counts[h, i] == 0 for h in range(4) for i in range(h))


@given(
  st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
  st.integers(0, 30),
)
def test_an_uneven_layout(counts, behind):
  layout, shards, length = Uneven(tuple(counts)), len(counts), sum(counts)
  local = layout.local_length(length, shards)
  assert local == max(counts)
  x = np.arange(2 * length).reshape(2, length)
  there = layout.permute(x, shards=shards)
  np.testing.assert_array_equal(there, x)
  positions = np.stack(
    [layout.positions(i, shards, local) for i in range(shards)]
  )
  order = layout.padded_order(length, shards)
  flat = positions.reshape(-1)
  assert np.array_equal(np.where(flat < length, flat, -1), order)
  assert (np.diff(positions, axis=1) > 0).all()
  assert len(set(flat.tolist())) == flat.size
  # Rows that come with their empty slots have positions beyond all tokens.
  slots = layout.padded_order(shards * local, shards)
  if shards * local > length:
    np.testing.assert_array_equal(slots, flat)
    assert (np.sort(slots)[length:] >= shards * local).all()
  needed = layout.reachable(shards, shards * local, shards * local, behind, 0)
  want = np.zeros(shards, bool)
  want[0] = True
  for i in range(shards):
    for j in range(shards):
      q = positions[i][positions[i] < length][:, None]
      k = positions[j][positions[j] < length][None]
      if ((q - k >= 0) & (q - k <= behind)).any():
        want[(i - j) % shards] = True
  np.testing.assert_array_equal(needed, want)
