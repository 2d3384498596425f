"""A prompt read on two devices at once is the prompt read on one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import ConfigError, OptionError
from ringjax.plan.systems.subgraphs import RULES
from tests.helpers import SMALL, refused
from tests.plan.test_subgraphs import check_order


def prompt_of(model, length=45, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, model.config.vocab, (1, length)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
  "llama3",
  pytest.param("gpt_oss", marks=pytest.mark.long),
  pytest.param("gemma2", marks=pytest.mark.long),
])  # fmt: skip
def test_every_order_gives_the_same(loaded, name):
  model, _ = loaded(name)
  prompt = prompt_of(model)
  read = lambda rule: rj.infer.read_on_two(
    model, prompt, devices=jax.devices()[1:3], chunk=16, rule=rule
  )
  found = {rule: read(rule) for rule in RULES}
  layers = len(model.config.layers)
  for reading in found.values():
    check_order(reading.order, 3, layers)
    np.testing.assert_array_equal(reading.logits, found["fifo"].logits)
    assert 0 <= reading.waiting < 1
    same = jax.tree.map(
      np.array_equal, reading.session.cache.slots,
      found["fifo"].session.cache.slots,
    )  # fmt: skip
    assert all(jax.tree.leaves(same))
  want = model(prompt)[:, -1]
  np.testing.assert_allclose(found["waits"].logits, want, atol=2e-4, rtol=1e-4)
  # What follows is what follows the prompt in one piece.
  first = np.asarray(found["waits"].logits).argmax(-1)[None]
  behind = rj.infer.generate(
    model, first, max_new_tokens=7, cache=found["waits"].session
  ).tokens
  whole = rj.infer.generate(model, prompt, max_new_tokens=8).tokens
  np.testing.assert_array_equal(
    np.concatenate([first, behind], 1), whole[:, :8]
  )


@pytest.fixture(scope="module")
def uneven():
  """A model of which some channels are far larger than others."""
  model = rj.models.create({**SMALL, "num_hidden_layers": 3}, seed=0)
  for block in model.stack.blocks[0]:
    for norm in (block.pre_attention, block.pre_feedforward):
      weight = norm.weight.get_value()
      norm.weight = norm.weight.replace(weight.at[..., 5:8].multiply(40.0))
  return model


@pytest.mark.long
@pytest.mark.parametrize("prune", [
  0.0, pytest.param(0.5, marks=pytest.mark.long)
])  # fmt: skip
def test_integers_on_one_and_outliers_on_the_other(uneven, prune):
  prompt, two = prompt_of(uneven, 33), jax.devices()[:2]
  ranges = rj.infer.activation_ranges(uneven, prompt)
  made = rj.infer.integer_model(uneven, ranges, shadow=4, prune=prune)
  got = rj.infer.read_on_two(made, prompt, devices=two, chunk=16)
  check_order(got.order, 3, 3)
  assert min(got.step_seconds.values()) > 0 and got.seconds > 0
  assert set(got.simulated()) == set(RULES)
  # The graph that ran is the one that is simulated.
  assert set(got.order) == set(got.simulated()["fifo"].order)
  want = made(prompt)[:, -1]
  np.testing.assert_allclose(got.logits, want, atol=2e-4, rtol=1e-4)
  # Beside three parts of a layer, that of the feedforward twice.
  shadows = sum(x.resource == "shadow" for x in got.timeline.spans)
  assert shadows == 3 * 3 * 4 if not prune else 0 < shadows < 3 * 3 * 4
  # Without them it would be another result.
  clipped = rj.infer.integer_model(uneven, ranges, shadow=4, prune=1.0)
  plain = rj.infer.read_on_two(clipped, prompt, devices=two, chunk=16)
  assert all(x.resource != "shadow" for x in plain.timeline.spans)
  assert np.abs(plain.logits - want).max() > 1e-2


def test_bad_input(loaded):
  model, _ = loaded("llama3")
  prompt, two = prompt_of(model), jax.devices()[:2]
  read = lambda model=model, **how: rj.infer.read_on_two(
    model, prompt, **{"devices": two} | how
  )
  refused(OptionError, lambda: read(devices=two[:1] * 2), "two different")
  refused(OptionError, lambda: read(rule="lifo"), "waits")
  refused(OptionError, lambda: read(chunk=0), "chunk")
  refused(OptionError, lambda: read(chunk=32, capacity=50), "64")
  sharded, _ = loaded("llama3", 2)
  refused(ConfigError, lambda: read(sharded), "mesh")
  recurrent, _ = loaded("qwen3_next")
  refused(ConfigError, lambda: read(recurrent), "keys and values")
