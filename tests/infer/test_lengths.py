"""Rotations that depend on the length: by the row alone, whatever is beside."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.ops import rope
from ringjax.serve import Engine, Request
from tests import checkpoints
from tests.helpers import make_mesh, swept

NAMES = ("phi3_longrope", "llama_dynamic")


def prompt_of(model, length: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(3, model.config.vocab, length).astype(np.int32)


def first_alone(model, prompt: np.ndarray, count: int) -> list[int]:
  """The slow truth: a cache, one row, one call, then one token each."""
  sizes = dict(length=np.array([prompt.size], np.int32))
  cache = model.init_cache(1, 128)
  logits, cache = model(prompt[None], cache=cache, **sizes)
  found = []
  for _ in range(count):
    found.append(int(np.argmax(np.asarray(logits)[0, -1])))
    logits, cache = model(
      np.array([[found[-1]]], np.int32),
      cache=cache,
      attend=rj.models.CachedAttention(),
      **sizes,
    )
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_on_itself_alone(loaded, name):
  """Prompts on both sides of 64 tokens, where both rotations change."""
  model, _ = loaded(name)
  short, long = prompt_of(model, 40), prompt_of(model, 80, 1)
  want = [first_alone(model, x, 6) for x in (short, long)]
  few = rj.infer.generate(model, [short], max_new_tokens=6)
  many = rj.infer.generate(model, [short], max_new_tokens=40)
  both = rj.infer.generate(model, [long, short], max_new_tokens=6)
  parts = rj.infer.generate(model, [short, long], max_new_tokens=6, chunk=16)
  drafted = rj.infer.generate(
    model,
    [short, long],
    max_new_tokens=6,
    speculate="lookup:count=4,adapt=false",
  )
  groups = rj.infer.generate(
    model, [short, long], max_new_tokens=6, rows_at_once=1
  )
  np.testing.assert_array_equal(groups.tokens, want)
  np.testing.assert_array_equal(few[0], want[0])
  np.testing.assert_array_equal(many[0][:6], want[0])
  np.testing.assert_array_equal(both.tokens, want[::-1])
  np.testing.assert_array_equal(parts.tokens, want)
  np.testing.assert_array_equal(drafted.tokens, want)


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=pytest.mark.slow) for x in NAMES]
)
@pytest.mark.parametrize("kind", ["unrotated", "dense"])
def test_an_engine_agrees(loaded, name, kind):
  """Rows beside each other, of which one begins as the other does."""
  model, _ = loaded(name)
  long = prompt_of(model, 90, 1)
  prompts = [long, long[:40], long[:70], long[:70]]
  engine = Engine(
    model, rows=2, longest=128, page=16, piece=32, share="answers",
    cache_kind=kind,
  )  # fmt: skip
  for prompt in prompts:
    handle = engine.submit(Request(prompt=prompt, max_new_tokens=6))
    engine.run()
    want = rj.infer.generate(model, [prompt], max_new_tokens=6, cache_kind=kind)
    np.testing.assert_array_equal(handle.answers[0].tokens, want[0])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "names"),
  [
    pytest.param((2, 2), ("data", "seq"), marks=pytest.mark.long),
    pytest.param((4,), ("seq",), marks=pytest.mark.long),
  ],
)
def test_rows_on_a_mesh_rotate_alike(loaded, tmp_path, shape, names):
  """Keys stored before their rotation, rows and tokens both sharded."""
  name = "phi3_longrope"
  one, _ = loaded(name)
  prompts = [prompt_of(one, n, n) for n in (80, 40)]
  want = rj.infer.generate(one, prompts, max_new_tokens=4)
  import jax

  devices = jax.devices()[: int(np.prod(shape))]
  mesh = rj.make_mesh(shape, names, devices=devices)
  folder = checkpoints.write(name, tmp_path / name)
  model = rj.models.load(folder, mesh=mesh)
  got = rj.infer.generate(
    model, prompts, max_new_tokens=4, mesh=mesh, cache_kind="unrotated"
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)


def test_a_pass_over_unequal_rows(loaded):
  """Without a cache too: padding and a longer row change nothing."""
  model, _ = loaded("phi3_longrope")
  tokens = np.zeros((2, 80), np.int32)
  tokens[0, :40], tokens[1] = prompt_of(model, 40), prompt_of(model, 80, 1)
  seg = (np.arange(80)[None] < [[40], [80]]).astype(np.int32)
  both = model(tokens, segment_ids=seg)
  alone = model(tokens[:1, :40])
  np.testing.assert_allclose(both[0, :40], alone[0], atol=2e-5)


def test_the_rule_of_dynamic():
  """A prompt by its length, later tokens each by its own."""
  scaling = rope.Dynamic(factor=2.0, original=8)
  found = rope.Rope(theta=1e4, dims=8, scaling=scaling)
  pos = jnp.arange(14)[None]
  cos, sin = found.tables(pos, jnp.array([10], jnp.int32))
  for p in range(14):
    one = found.tables(pos[:, p : p + 1], max(10, p + 1))
    np.testing.assert_allclose(cos[:, p : p + 1], one[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sin[:, p : p + 1], one[1], rtol=1e-5, atol=1e-6)
  assert dataclasses.replace(found).scaling.alike(9) == 9


@pytest.mark.parametrize(
  ("name", "capacity"), swept([(x, n) for x in NAMES for n in (64, 65)],
                              [(NAMES[0], 64)])
)  # fmt: skip
def test_a_session_goes_by_the_capacity_that_was_asked_for(
  loaded, name, capacity
):
  """On both sides of 64 tokens; three shards have room for 66."""
  model, _ = loaded(name)
  prompt = prompt_of(model, 40)
  mesh = make_mesh(3, "auto")

  def answer(model, **options):
    session = rj.infer.Session(model, capacity, **options)
    return rj.infer.generate(
      model, [prompt], max_new_tokens=6, cache=session
    ).tokens

  want = answer(model)
  sharded = rj.models.place(model, mesh)
  np.testing.assert_array_equal(answer(sharded, mesh=mesh), want)
  # It grows as tokens come, and evicts none of so few.
  policy = rj.kv.SnapKV(budget=60, window=4)
  kind = rj.kv.CacheConfig(policy=policy, page=8, room=8)
  np.testing.assert_array_equal(answer(model, cache_kind=kind), want)
