"""Answers and prompts of a step pass the products of a layer in one program."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops import flat_product_tpu
from ringjax.ops.flat_product_tpu import FlatProductTPU
from ringjax.serve import Engine, Request
from ringjax.serve.calls import compute, compute_step
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.tiling import row_tile
from tests import checkpoints

LONG, SLOW = pytest.mark.long, pytest.mark.slow
TILE = 16
# Sizes that the kernel multiplies.
WIDE = dict(
  model_type="llama",
  vocab_size=300,
  hidden_size=256,
  intermediate_size=384,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=128,
  max_position_embeddings=512,
)


@dataclasses.dataclass(frozen=True)
class OnCPU(FlatProductTPU):
  """The kernel by an interpreter, in which unwritten numbers are NaN."""

  interpret: bool | pltpu.InterpretParams = True

  def __post_init__(self):
    # A CPU has no vector memory.
    object.__setattr__(self, "chip", None)


@pytest.fixture
def kernel(monkeypatch):
  monkeypatch.setitem(flat_product_tpu.FLAT_PRODUCTS, "cpu", (OnCPU,))
  compute_step.clear_cache()
  yield
  compute_step.clear_cache()


@pytest.fixture(scope="module")
def sinks():
  """A dense model with windows and sinks in two layers of three."""
  config = checkpoints.config("mimo_v2_flash")
  config["mlp_layer_types"] = ["dense"] * 3
  return rj.models.create(config, seed=0)


def engine(model, **options):
  settings = dict(rows=4, longest=96, page=16, piece=16, pieces=2)
  return Engine(model, **settings | dict(row_tile=TILE) | options)


def drawn(model, *sizes):
  rng = np.random.default_rng(0)
  return [
    rng.integers(0, model.config.vocab, n).astype(np.int32) for n in sizes
  ]


def request(prompt, count, **options):
  return Request(prompt=prompt, max_new_tokens=count, logprobs=2, **options)


def numbers(handle):
  answer = handle.result().answers[0]
  return answer.tokens, answer.logprobs


def in_a_crowd(model, first, **options):
  """Numbers of a request in an engine where prompts come and go."""
  others = drawn(model, 20, 1, 33, 16, 7)
  crowd, steps = engine(model, **options), 0
  handle = crowd.submit(first)
  while crowd.step() or others:
    steps += 1
    # Steps of prompts alone, of both, and of answers alone.
    if others and steps % 3 == 0:
      crowd.submit(request(others.pop(), 2 + len(others) % 3))
  return numbers(handle)


def check_company(model, **options):
  """A request has its bits alone and in a crowd, and tokens of two calls."""
  (prompt,) = drawn(model, 37)
  alone = engine(model, **options)
  assert not alone.calls_apart
  wanted = numbers(alone.submit(request(prompt, 14)))
  assert in_a_crowd(model, request(prompt, 14), **options) == wanted
  apart = engine(model, **options | dict(row_tile=0, prompt_tile=0))
  assert apart.calls_apart
  tokens, logprobs = numbers(apart.submit(request(prompt, 14)))
  assert tokens == wanted[0]
  values = lambda entries: [entry.logprob for entry in entries]
  np.testing.assert_allclose(values(wanted[1]), values(logprobs), atol=1e-4)


@pytest.mark.parametrize(
  ("family", "options"),
  [
    pytest.param("llama3", {}, marks=LONG),
    pytest.param("gemma3_text", {}, marks=LONG),
    pytest.param("llama_dynamic", {}, marks=SLOW),
    pytest.param("qwen2_window", {}, marks=SLOW),
    pytest.param("falcon_7b", {}, marks=SLOW),
    pytest.param("cohere", {}, marks=SLOW),
    pytest.param("olmo2", {}, marks=SLOW),
    pytest.param("seed_oss", {}, marks=SLOW),
    pytest.param("llama3", dict(cache_kind="int8"), marks=SLOW),
    pytest.param("llama3", dict(layout="contiguous"), marks=SLOW),
    pytest.param("llama3", dict(row_tile=8), marks=SLOW),
  ],
)
def test_prompts_at_its_side_leave_an_answer_its_bits(loaded, family, options):
  check_company(loaded(family)[0], **options)


@pytest.mark.slow
def test_windows_and_sinks_keep_their_bits(sinks):
  check_company(sinks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_leaves_an_answer_its_bits(kernel, dtype):
  """Undefined numbers of tiles without tokens reach no token."""
  # Without a mesh a program counts as one for all devices.
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  model = rj.models.create(WIDE, seed=0, dtype=dtype)
  model = rj.models.place(model, mesh)
  attend = CachedAttention(mesh=mesh)
  assert row_tile(model, EngineConfig(), attend, "tpu") == (128, "")
  (prompt,) = drawn(model, 37)
  wanted = numbers(engine(model, mesh=mesh).submit(request(prompt, 9)))
  assert in_a_crowd(model, request(prompt, 9), mesh=mesh) == wanted
  if dtype == "float32":
    want = rj.infer.generate(model, [prompt], max_new_tokens=9)
    assert wanted[0] == want[0].tolist()


@pytest.mark.long
def test_a_later_turn_reads_the_pages_of_the_turn_before(loaded):
  """Chunks begin elsewhere where a prefix is there; answers have their bits."""
  model, _ = loaded("llama3")
  (first,) = drawn(model, 40)
  again = engine(model)
  tokens = numbers(again.submit(request(first, 8)))[0]
  second = np.concatenate([first, np.asarray([*tokens, 5, 6, 7], np.int32)])
  handle = again.submit(request(second, 8))
  turn = numbers(handle)
  assert handle.cached_tokens == 32
  assert numbers(engine(model).submit(request(second, 8))) == turn
  assert in_a_crowd(model, request(second, 8)) == turn


@pytest.mark.long
def test_a_step_compiles_one_program_whatever_it_holds(loaded):
  model, _ = loaded("llama3")
  # Sizes that no other test has.
  at = engine(model, rows=3, pieces=3, longest=80)
  count = lambda: (compute_step._cache_size(), compute._cache_size())
  old_counts = count()
  old_pool = jax.device_get(at._pool)
  at.warm_up()
  equal = jax.tree.map(np.array_equal, old_pool, jax.device_get(at._pool))
  assert all(jax.tree.leaves(equal))
  for prompt in drawn(model, 40, 5, 33, 2):
    at.submit(request(prompt, 6))
    at.step()
  at.run()
  assert count() == (old_counts[0] + 1, old_counts[1])


@pytest.mark.parametrize(
  ("family", "options", "reason"),
  [
    ("llama3", dict(layer_parts=2), "layer_parts"),
    ("llama3", dict(speculate="lookup:count=2"), "speculate"),
    ("llama3", dict(prompt_tile=8), "prompt_tile"),
    pytest.param("mixtral", {}, "experts", marks=LONG),
    pytest.param("qwen3_next", {}, "attention and", marks=LONG),
    pytest.param("deepseek_v3", {}, "attention and", marks=LONG),
    pytest.param("gemma3n", {}, "attention and", marks=LONG),
    pytest.param("llama3", dict(mesh="seq"), "several devices", marks=LONG),
  ],
)
def test_what_keeps_two_calls_is_named(loaded, family, options, reason):
  model, _ = loaded(family)
  mesh = None
  if options.pop("mesh", None):
    mesh = rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
  attend = CachedAttention(mesh=mesh)
  default = EngineConfig(**options)
  tile, answer = row_tile(model, default, attend, "tpu")
  assert tile == 0 and reason in answer
  requested = EngineConfig(row_tile=TILE, **options)
  with pytest.raises(OptionError, match=reason):
    row_tile(model, requested, attend, "cpu")


@pytest.mark.long
def test_other_maps_keep_two_calls(loaded):
  model, _ = loaded("llama3")
  lora = rj.train.Lora(rank=2)
  adapters = {"tuned": (lora, lora.start(model, seed=1))}
  with pytest.raises(OptionError, match="AdaptedLinear"):
    engine(model, adapters=adapters)
  attend = CachedAttention()
  reason = row_tile(model, EngineConfig(), attend, "tpu")[1]
  assert "by no kernel" in reason
  assert row_tile(model, EngineConfig(row_tile=0), attend, "tpu")[0] == 0
  assert row_tile(model, EngineConfig(), attend, "gpu")[0] == 0


@pytest.mark.long
def test_narrow_heads_keep_two_calls_on_a_tpu(kernel):
  narrow = rj.models.create(WIDE | dict(head_dim=64), seed=0)
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  attend = CachedAttention(mesh=mesh)
  reason = row_tile(narrow, EngineConfig(), attend, "tpu")[1]
  assert "heads of 64" in reason
