"""One program computes the answers and the prompts of an engine's step."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.serve import Engine, Request
from ringjax.serve.calls import check_drafts, compute, compute_step
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.tiling import reason_for_two_calls

LONG, SLOW = pytest.mark.long, pytest.mark.slow


def engine(model, **options):
  settings = dict(rows=4, longest=96, page=16, piece=16, pieces=2)
  return Engine(model, **settings | options)


def drawn(model, *sizes):
  rng = np.random.default_rng(0)
  return [
    rng.integers(0, model.config.vocab, n).astype(np.int32) for n in sizes
  ]


def request(prompt, count, **options):
  return Request(
    prompt=prompt, max_new_tokens=count, logprobs=2, share=False, **options
  )


def numbers(handle):
  answer = handle.result().answers[0]
  return answer.tokens, answer.logprobs


def check_company(model, adapter="", **options):
  """A request alone, and while prompts come and go at its side."""
  prompt, *others = drawn(model, 37, 20, 1, 33, 16, 7)
  first = lambda: request(prompt, 14, adapter=adapter)
  alone = engine(model, **options)
  assert not alone.calls_apart
  wanted = numbers(alone.submit(first()))
  crowd = engine(model, **options)
  handle = crowd.submit(first())
  steps = 0
  while crowd.step() or others:
    steps += 1
    # Steps of prompts alone, of both, and of answers alone.
    if others and steps % 3 == 0:
      crowd.submit(request(others.pop(), 2 + len(others) % 3))
  assert numbers(handle) == wanted
  return wanted[0]


def test_a_step_compiles_one_program_whatever_it_holds(loaded):
  model, _ = loaded("llama3")
  # Sizes that no other test has.
  at = engine(model, rows=3, pieces=3, longest=80)
  count = lambda: (compute_step._cache_size(), compute._cache_size())
  old_counts = count()
  at.submit(request(drawn(model, 40)[0], 12))
  at.run()
  at.submit(request(drawn(model, 5)[0], 12))
  for prompt in drawn(model, 33, 2):
    at.step()
    at.submit(request(prompt, 4))
  at.run()
  assert count() == (old_counts[0] + 1, old_counts[1])


@pytest.mark.long
def test_prompts_at_its_side_leave_an_answer_its_bits(loaded):
  model, _ = loaded("llama3")
  tokens = check_company(model)
  want = rj.infer.generate(model, drawn(model, 37), max_new_tokens=14)
  assert tokens == want[0].tolist()


@pytest.mark.parametrize(
  ("family", "devices", "options"),
  [
    pytest.param("qwen3_next", 1, {}, marks=LONG),
    pytest.param("gpt_oss", 1, {}, marks=LONG),
    pytest.param("llama3", 4, {}, marks=LONG),
    pytest.param("llama3", 1, dict(cache_kind="int8"), marks=LONG),
    pytest.param("llama3", 1, dict(layout="contiguous"), marks=LONG),
    pytest.param("llama_dynamic", 1, {}, marks=LONG),
    pytest.param("deepseek_v3", 1, {}, marks=SLOW),
    pytest.param("mixtral", 1, {}, marks=SLOW),
    pytest.param("qwen3_next", 4, {}, marks=SLOW),
    pytest.param("llama3", 1, dict(layout="doubling"), marks=SLOW),
    pytest.param("gpt_oss", 4, dict(cache_kind="int4"), marks=SLOW),
  ],
)
def test_more_answers_keep_their_bits(loaded, family, devices, options):
  model, mesh = loaded(family, devices)
  check_company(model, mesh=mesh, **options)


@pytest.mark.long
def test_an_adapter_of_an_answer_is_not_that_of_the_prompts(loaded):
  model, _ = loaded("llama3")
  lora = rj.train.Lora(rank=2)
  fill = lambda x: np.asarray(
    np.random.default_rng(1).standard_normal(x.shape) * 0.3, np.float32
  )
  params = {p: {"a": x["a"], "b": fill(x["b"])}
            for p, x in lora.start(model, seed=1).items()}  # fmt: skip
  adapters = {"tuned": (lora, params)}
  tuned = check_company(model, adapters=adapters, adapter="tuned")
  assert tuned != check_company(model, adapters=adapters)
  want = rj.infer.generate(
    lora.merged(params, model), drawn(model, 37), max_new_tokens=14
  )
  assert tuned == want[0].tolist()


@pytest.mark.long
def test_a_step_reads_each_layer_from_the_disk_once(tmp_path):
  """An answer and the pieces of a prompt: two calls read each layer twice."""
  saved_model = rj.models.create(
    dict(
      model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=64,
      num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
      max_position_embeddings=256,
    ),
    seed=0,
  )  # fmt: skip
  rj.models.save(saved_model, tmp_path / "model")
  reads = {}
  for tile in (None, 0):
    model = rj.models.load(tmp_path / "model", placement="disk")
    at = engine(model, prompt_tile=tile)
    answer = at.submit(request(drawn(saved_model, 5)[0], 20))
    at.step()
    at.step()
    old_reads, steps = len(of_disk(model)), at.counters.steps
    for text in drawn(saved_model, 64, 64, 64):
      prompt = at.submit(request(text, 1))
      while not prompt.done:
        at.step()
    assert not answer.done
    at.run()
    steps = at.counters.steps - steps
    assert (
      answer.result().tokens.tolist()
      == rj.infer.generate(
        saved_model, drawn(saved_model, 5), max_new_tokens=20
      )[0].tolist()
    )
    reads[tile] = (len(of_disk(model)) - old_reads) / 4, steps
  # Steps are as many, and six of them have both kinds of row. Layers that are
  # read ahead of their step are counted with an earlier one.
  assert reads[None][1] == reads[0][1]
  assert reads[None][0] <= reads[None][1] + 2
  assert reads[0][0] > reads[0][1] + 3


def of_disk(model):
  """Reads of layers from the disk."""
  return [x for x in model.transfers() if x.what == "read"]


@pytest.mark.parametrize(
  ("family", "options", "reason"),
  [
    ("llama3", dict(prompt_tile=0), "one tile"),
    ("llama3", dict(layer_parts=2), "layer_parts"),
    ("llama3", dict(speculate="lookup:count=2"), "speculate"),
    pytest.param("gemma3n", {}, "one tile", marks=LONG),
    pytest.param("llama3", dict(mesh="data"), "one tile", marks=LONG),
  ],
)
def test_what_keeps_two_calls_is_named(loaded, family, options, reason):
  model, _ = loaded(family)
  if "mesh" in options:
    mesh = jax.make_mesh(
      (2,),
      ("data",),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=jax.devices()[:2],
    )
    model, options = rj.models.place(model, mesh), dict(mesh=mesh)
  assert reason in engine(model, **options).calls_apart


def test_accelerators_keep_two_calls():
  assert "copies" in reason_for_two_calls(EngineConfig(), (16,), "tpu")
  assert not reason_for_two_calls(EngineConfig(), (16,), "cpu")


@pytest.mark.long
def test_two_calls_have_the_tokens_of_one(loaded):
  model, _ = loaded("llama3")
  programs = lambda: compute._cache_size() + check_drafts._cache_size()
  old_count, answers = programs(), []
  for options in (
    {},
    dict(prompt_tile=0),
    dict(layer_parts=2),
    dict(speculate="lookup:count=2"),
  ):
    at = engine(model, **options)
    handles = [at.submit(request(x, 9)) for x in drawn(model, 37, 20, 3, 50, 8)]
    at.run()
    answers.append([h.result().tokens.tolist() for h in handles])
    assert (programs() > old_count) == bool(at.calls_apart)
  assert all(x == answers[0] for x in answers)


def test_a_call_of_padding_changes_nothing(loaded):
  """An engine without requests, whose program has nothing to compute."""
  model, _ = loaded("llama3")
  at = engine(model)
  old_pool = jax.device_get(at._pool)
  at.warm_up()
  new_pool = jax.device_get(at._pool)
  equal = jax.tree.map(np.array_equal, old_pool, new_pool)
  assert all(jax.tree.leaves(equal))
