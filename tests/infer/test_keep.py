"""Where the cache lies behind the prompt, and how a machine chooses the way."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import plan
from ringjax.errors import MeshError, OptionError, PromptError
from ringjax.infer import prefill
from ringjax.models import work_profile
from tests import checkpoints

NAME = "llama3"


@pytest.fixture(scope="module")
def said():
  """A prompt [B, P] and its greedy continuation [B, 16]."""
  expected = checkpoints.expected(NAME)
  return expected.prompt, expected.greedy


# ---------------------------------------------------------------------------
# On the last device
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
  ("method", "devices"),
  [
    ("kvr", 4),
    pytest.param("striped", 2, marks=pytest.mark.slow),
    ("chunked", 4),
    *(
      pytest.param(method, devices, marks=pytest.mark.slow)
      for method, devices in (("kvr", 2), ("striped", 4), ("chunked", 2))
    ),
  ],
)
def test_the_last_device_decodes_the_same(loaded, said, method, devices):
  model, mesh = loaded(NAME, devices)
  prompt, greedy = said
  session = rj.infer.Session(model, 80, batch=len(prompt), mesh=mesh)
  capacity = session.cache.capacity
  new = rj.infer.generate(
    model,
    prompt,
    max_new_tokens=16,
    prefill=method,
    chunk=8 if method == "chunked" else None,
    keep="last",
    cache=session,
  )
  np.testing.assert_array_equal(new, greedy)
  last = mesh.devices.flat[-1]
  for x in jax.tree.leaves(session.cache):
    assert x.devices() == {last}
  assert session.shards == 1 and session.cache.capacity == capacity


@pytest.mark.slow
def test_prompts_of_unequal_lengths(loaded, said):
  """Their slots have holes, which stay holes."""
  model, mesh = loaded(NAME, 4)
  prompt, _ = said
  prompts = [prompt[0][:5], prompt[0], prompt[0][:13]]
  options = dict(max_new_tokens=6, prefill="striped", mesh=mesh)
  want = rj.infer.generate(model, prompts, **options)
  got = rj.infer.generate(model, prompts, keep="last", **options)
  np.testing.assert_array_equal(got, want)


@pytest.mark.long
def test_a_conversation_goes_on_there(loaded, said):
  model, mesh = loaded(NAME, 4)
  prompt, _ = said
  turns = [prompt[:1, :11], np.array([[9, 8, 7]]), np.array([[1, 2]])]
  answers = []
  for keeps in (("sharded",) * 3, ("sharded", "last", "last")):
    session = rj.infer.Session(model, 192, mesh=mesh)
    answers.append(
      [
        rj.infer.generate(
          model, turn, max_new_tokens=5, cache=session, keep=keep
        ).tokens.tolist()
        for turn, keep in zip(turns, keeps, strict=True)
      ]
    )
    assert session.lengths.tolist() == [11 + 5 + 3 + 5 + 2 + 5 - 1]
  assert answers[0] == answers[1]


@pytest.mark.long
def test_room_is_kept(loaded, said):
  model, mesh = loaded(NAME, 4)
  prompt, _ = said
  rooms = []
  for keep in ("sharded", "last"):
    session = rj.infer.Session(model, 64, mesh=mesh)
    rj.infer.generate(
      model, prompt[:1], max_new_tokens=1, cache=session, keep=keep
    )
    rooms.append(session.room())
    with pytest.raises(PromptError, match="larger capacity"):
      rj.infer.generate(
        model, [[1] * 8], max_new_tokens=rooms[-1], cache=session
      )
  assert rooms[0] == rooms[1]


@pytest.mark.slow
def test_recurrent_states_go_along(loaded):
  expected = checkpoints.expected("qwen3_next")
  model, mesh = loaded("qwen3_next", 4)
  new = rj.infer.generate(
    model, expected.prompt, max_new_tokens=16, mesh=mesh, keep="last"
  )
  np.testing.assert_array_equal(new, expected.greedy)


@pytest.mark.slow
@pytest.mark.parametrize(
  "shape",
  [pytest.param(x, marks=pytest.mark.long) for x in ((2, 2), (1, 4), (1, 3))],
)
def test_latent_keys_go_along(tmp_path, shape):
  """Their values are a part of the keys: arrays of values are empty."""
  count = shape[0] * shape[1]
  mesh = rj.make_mesh(shape, ("data", "seq"), devices=jax.devices()[:count])
  name = "deepseek_v3_noq"
  expected = checkpoints.expected(name)
  folder = checkpoints.write(name, tmp_path / name)
  model = rj.models.load(folder, mesh=mesh)
  new = rj.infer.generate(
    model, expected.prompt, max_new_tokens=3, mesh=mesh, keep="last"
  )
  np.testing.assert_array_equal(new, expected.greedy[:, :3])


def test_one_device_keeps_it_anyway(loaded, said):
  model, _ = loaded(NAME)
  prompt, greedy = said
  new = rj.infer.generate(model, prompt, max_new_tokens=4, keep="last")
  np.testing.assert_array_equal(new, greedy[:, :4])


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_kept(loaded, said, tmp_path):
  model, _ = loaded(NAME, 4)
  prompt, _ = said
  with pytest.raises(OptionError, match="sharded, last"):
    rj.infer.generate(model, prompt, max_new_tokens=1, keep="first")
  checkpoints.write(NAME, tmp_path / NAME)
  both = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  parts = rj.models.load(tmp_path / NAME, mesh=both)
  with pytest.raises(MeshError, match="not whole on cpu"):
    rj.infer.generate(parts, prompt, max_new_tokens=1, keep="last")


# ---------------------------------------------------------------------------
# The way, chosen
# ---------------------------------------------------------------------------


def machine(model, bandwidth: float, **more) -> plan.Cluster:
  profile = plan.Profile(
    name="made",
    model=model.config.family,
    hardware="none",
    layers=len(model.config.layers),
    token_s=1e-6,
    pair_s=1e-7,
    kv_bytes=64,
  )
  network = plan.Link(bandwidth=bandwidth)
  return plan.Cluster(profile=profile, network=network, **more)


@pytest.mark.slow
def test_auto_takes_the_chain_over_slow_links(loaded, said):
  model, mesh = loaded(NAME, 4)
  prompt, greedy = said
  reports = []
  for bandwidth in (1e12, 1e6):
    new = rj.infer.generate(
      model,
      prompt,
      max_new_tokens=8,
      mesh=mesh,
      machine=machine(model, bandwidth),
      report=reports.append,
    )
    np.testing.assert_array_equal(new, greedy[:, :8])
  fast, slow = (one.prefill for one in reports)
  assert fast.name == "striped" and slow.name == "kvr"
  choice = plan.choose(
    machine(model, 1e6), plan.Prompt(tokens=slow.width), 4, tile=2
  )
  assert slow.attend.layout.counts == choice.way.lengths
  for how in (fast, slow):
    for way in ("striped", "gather", "kvr"):
      assert f"{way}: " in how.why
    assert "s to the first token" in how.why


def test_auto_takes_the_chain_for_one_device_that_decodes(loaded):
  model, mesh = loaded(NAME, 4)
  plans = {
    keep: prefill.PrefillConfig(machine=machine(model, 1e6), keep=keep)
    .plan(4096, model, mesh, "seq")
    .name
    for keep in ("sharded", "last")
  }
  assert plans == {"sharded": "striped", "last": "kvr"}


@pytest.mark.usefixtures("unchecked")
def test_a_machine_without_a_choice(loaded):
  model, mesh = loaded(NAME, 4)
  slow = machine(model, 1e3)
  ways = lambda model, mesh, **more: (
    prefill.PrefillConfig(**more).plan(64, model, mesh, "seq").name
  )
  with pytest.raises(OptionError, match="machine: got one with chunk=16"):
    ways(model, mesh, machine=slow, chunk=16)
  with pytest.raises(OptionError, match="machine: got one with chunk=16"):
    rj.infer.generate(
      model, [[1]], max_new_tokens=1, mesh=mesh, machine=slow, chunk=16
    )
  alone = prefill.PrefillConfig(machine=slow).plan(
    64, loaded(NAME)[0], None, None
  )
  assert alone.name == "blockwise"
  assert "the machine leaves nothing to choose" in alone.why
  model, mesh = loaded("qwen3_next", 4)
  with pytest.raises(OptionError, match=r"machine: .*recurrent layers"):
    ways(model, mesh, machine=machine(model, 1e3))
  assert ways(model, mesh) == "ring"


@pytest.mark.usefixtures("unchecked")
def test_machines_that_are_none(loaded):
  model, mesh = loaded(NAME, 4)
  made = machine(model, 1e9)
  other = dataclasses.replace(
    made, profile=dataclasses.replace(made.profile, layers=32)
  )
  ask = lambda name, given: prefill.PrefillConfig(
    method=name, machine=given
  ).plan(64, model, mesh, "seq")
  with pytest.raises(OptionError, match="32 layers; wanted one of this model"):
    ask("auto", other)
  with pytest.raises(OptionError, match="prefill='auto'"):
    ask("kvr", made)
  with pytest.raises(OptionError, match=r"rj\.plan\.Cluster"):
    ask("auto", made.network)


# ---------------------------------------------------------------------------
# Work
# ---------------------------------------------------------------------------


def flops(config: dict) -> plan.Profile:
  model = jax.eval_shape(lambda: rj.models.create(config, seed=0))
  return work_profile.profile(model, 1000)


BASE = {
  "architectures": ["MistralForCausalLM"],
  "model_type": "mistral",
  "vocab_size": 64,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "sliding_window": None,
}


def test_work_of_plain_layers():
  found = flops(BASE)
  # Queries, keys and values, output, three maps, and two norms.
  weights = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 2 * 16
  assert found.token_s == 2 * 3 * weights
  assert found.pair_s == 3 * 4 * 16


def test_a_window_counts_with_the_token():
  plain = flops(BASE)
  found = flops(BASE | {"sliding_window": 100})
  assert found.pair_s == 0
  assert found.token_s == plain.token_s + 3 * 4 * 16 * 100
  # Longer than the prompt it is none.
  found = flops(BASE | {"sliding_window": 10**6})
  assert found.token_s == plain.token_s + 3 * 4 * 16 * 1000


def test_of_the_experts_the_chosen_count(loaded):
  model, _ = loaded("mixtral")
  spec = model.config.layers[0].feedforward
  one = work_profile.profile(model, 100)
  layers, embed = len(model.config.layers), model.config.embed
  assert 0 < spec.chosen < spec.experts
  stored = sum(x.size for x in jax.tree.leaves(model.stack))
  idle = layers * (spec.experts - spec.chosen) * 3 * embed * spec.hidden
  behind = model.config.layers[0].attention.reach
  assert behind is None
  assert one.token_s == 2 * (stored - idle)


@pytest.mark.long
def test_latent_attention_counts_its_expanded_heads(loaded):
  model, _ = loaded("deepseek_v3")
  spec = model.config.layers[0].attention
  found = work_profile.profile(model, 100)
  each = 2 * spec.heads * (spec.plain + spec.rope.dims + spec.value)
  assert found.pair_s == len(model.config.layers) * each


def test_a_cache_of_fewer_bits(loaded, said):
  """bfloat16 keys beside float32 weights."""
  model, _ = loaded(NAME)
  prompt, _ = said
  kept = []
  whole, short = (
    rj.infer.generate(
      model, prompt, max_new_tokens=4, cache_dtype=d, report=kept.append
    )
    for d in (None, "bfloat16")
  )
  assert whole.tokens.shape == short.tokens.shape == (len(prompt), 4)
  # The slots' coordinates are as they were.
  assert kept[1].cache_bytes < 0.7 * kept[0].cache_bytes
  session = rj.infer.Session(model, 192, batch=len(prompt))
  with pytest.raises(OptionError, match="cache_dtype"):
    rj.infer.generate(
      model, prompt, max_new_tokens=1, cache=session, cache_dtype="bfloat16"
    )


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_a_machine_is_looked_at_in_later_turns_too(loaded, said):
  model, _ = loaded(NAME)
  prompt = said[0][:1]
  session = rj.infer.Session(model, 400)
  rj.infer.generate(model, prompt, max_new_tokens=1, cache=session)
  with pytest.raises(OptionError, match="machine"):
    rj.infer.generate(
      model, prompt, max_new_tokens=1, cache=session, machine="a100"
    )
