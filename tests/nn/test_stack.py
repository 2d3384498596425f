"""Layers fall into loops, and a loop of layers is the layers."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringjax.kv.base import NoCache
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.feedforward import Gated
from ringjax.nn.linear import Norm
from ringjax.nn.residuals import ScaledResidual
from ringjax.nn.sharding_context import ContextParallel
from ringjax.nn.stack import Run, Stack, runs
from ringjax.nn.tokens import Tokens


def layer(heads, **options):
  return Layer(
    attention=Attention(heads=heads, kv_heads=1, head_dim=4),
    feedforward=Gated(hidden=12, act="silu"),
    norm=Norm(eps=1e-6),
    **options,
  )


def lettered(text):
  """A layer for each letter, equal ones for equal letters."""
  return [layer(ord(letter)) for letter in text]


def flat(found):
  """The layers that runs stand for, in order."""
  return [
    run.layers[p]
    for run in found
    for _ in range(run.repeats)
    for p in range(len(run.layers))
  ]


@hypothesis.given(
  unit=st.text("ab", min_size=1, max_size=6),
  repeats=st.integers(1, 7),
  before=st.text("abc", max_size=3),
  after=st.text("abc", max_size=5),
)
def test_runs_cover_all_layers_in_order(unit, repeats, before, after):
  layers = lettered(before + unit * repeats + after)
  found = runs(layers)
  assert flat(found) == layers
  first = 0
  for run in found:
    assert run.first == first
    numbers = [
      run.number(p, r)
      for r in range(run.repeats)
      for p in range(len(run.layers))
    ]
    assert numbers == list(range(first, first + len(numbers)))
    first += len(numbers)
  assert flat(runs(layers, scan=False)) == layers
  assert all(r.repeats == 1 for r in runs(layers, scan=False))


@pytest.mark.parametrize(
  ("layers", "want"),
  [
    ("a", [("a", 1)]),
    ("aaaa", [("a", 4)]),
    ("abab", [("ab", 2)]),
    ("abaaba", [("aba", 2)]),
    ("lllllglllllgll", [("lllllg", 2), ("l", 2)]),  # Gemma 3
    ("dddmmmmmmm", [("d", 3), ("m", 7)]),  # DeepSeek-V3
    ("nnnfnnnfnnnf", [("nnnf", 3)]),  # Qwen3-Next
    ("abc", [("a", 1), ("b", 1), ("c", 1)]),
  ],
)
def test_runs(layers, want):
  want = [(tuple(lettered(unit)), repeats) for unit, repeats in want]
  assert [(r.layers, r.repeats) for r in runs(lettered(layers))] == want


def test_long_stacks_are_cut_at_once():
  (run,) = runs(lettered("lllllg" * 160))
  assert run == Run(0, tuple(lettered("lllllg")), 160)


def tokens(batch, length):
  pos = jnp.arange(length, dtype=jnp.int32)[None]
  return Tokens(
    pos,
    jnp.ones((1, length), jnp.int32),
    derived=True,
    segmented=False,
    ropes=(),
    length=length,
  )


@pytest.mark.long
def test_a_loop_is_its_layers():
  a, b = layer(2), layer(3, post=True)
  specs = [a, b, a, b, a]
  stack = Stack(nnx.Rngs(0), specs, 8, scan=True)
  assert [r.repeats for r in stack.runs] == [2, 1]
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)
  at, attend = tokens(2, 6), ContextParallel()
  cache = NoCache(3)
  got = jax.jit(lambda x: stack(x, at, cache, attend)[0])(x)

  def one(run, position, repeat):
    block = stack.blocks[run][position]
    return jax.tree.map(lambda w: w[repeat], block)

  want = x
  for where in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)):
    part = NoCache(1).layer(0, (), 0)
    want, _ = one(*where)(want, at, part, attend)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  # No two layers of a loop have the same weights.
  q = np.asarray(stack.blocks[0][0].attention.q.weight[...])
  assert not np.array_equal(q[0], q[1])


def test_where_norms_stand():
  """Pre, post, both, parallel with one norm or two: by hand."""
  x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 8)), jnp.float32)
  at, attend = tokens(1, 4), ContextParallel()

  def run(**options):
    block = layer(2, **options).build(nnx.Rngs(3), 8)
    attention = lambda y: block.attention(
      y, at, NoCache(1).layer(0, (), 0), attend
    )[0]
    feed = lambda y: block.feedforward(y, attend)
    got, _ = block(x, at, NoCache(1).layer(0, (), 0), attend)
    return got, attention, feed

  norm = lambda y: y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)

  got, attention, feed = run()
  h = x + attention(norm(x))
  close(got, h + feed(norm(h)))
  got, attention, feed = run(post=True)
  h = x + norm(attention(norm(x)))
  close(got, h + norm(feed(norm(h))))
  got, attention, feed = run(pre=False, post=True)
  h = x + norm(attention(x))
  close(got, h + norm(feed(h)))
  got, attention, feed = run(parallel=True)
  close(got, x + attention(norm(x)) + feed(norm(x)))
  got, attention, feed = run(parallel=True, shared_norm=True)
  close(got, x + attention(norm(x)) + feed(norm(x)))
  got, attention, feed = run(residuals=(ScaledResidual(add=0.5),) * 2)
  h = x + 0.5 * attention(norm(x))
  close(got, h + 0.5 * feed(norm(h)))
