"""A start that already looks back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models import checkpoint
from ringjax.train.methods.induction import InductionHeads, RotaryInductionHeads
from tests.train.test_step import CONFIG as PLAIN

BACK = ((1, 2, 3, 4), (0, 1, 0, 1), (0, 1, 2, 3))
CONFIG = {
  "architectures": ["SmolLM3ForCausalLM"],
  "model_type": "smollm3",
  "vocab_size": 48,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "max_position_embeddings": 512,
  "rope_theta": 100.0,
  "attention_bias": True,
  "use_sliding_window": True,
  "sliding_window": 16,
  "no_rope_layers": [1, 1, 0, 1],
  "layer_types": ["sliding_attention"] * 2
  + ["full_attention", "sliding_attention"],
  "tie_word_embeddings": True,
}

ROTARY_BACK = ((0, 1, 2, 3), (2, 1, 3, 1))
ROTARY = {
  "model_type": "llama",
  "vocab_size": 256,
  "hidden_size": 128,
  "intermediate_size": 96,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "max_position_embeddings": 1024,
  "rope_theta": 1e6,
  "attention_bias": True,
  "tie_word_embeddings": True,
}


def made(mesh=None, config=CONFIG):
  return checkpoint.create(config, seed=2, mesh=mesh)


def rotary(**options):
  return RotaryInductionHeads(back=ROTARY_BACK, reach=1024, **options)


@pytest.mark.long
def test_heads_look_as_far_back_as_they_are_told():
  """By the biases alone, which every token has."""
  model = InductionHeads(back=BACK).apply(made())
  before, _, behind = (block for (block,) in model.stack.blocks)
  rows = [(before, 0), (before, 1), (behind, 0)]
  half = 16
  turn = 100.0 ** -(np.arange(half) / half)
  angles = np.arange(12)[:, None] * turn
  cos, sin = np.cos(angles), np.sin(angles)

  def turned(x):
    a, b = x[:half], x[half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  for (block, layer), back in zip(rows, BACK, strict=True):
    q = np.asarray(block.attention.q.bias[...])[layer]
    k = np.asarray(block.attention.k.bias[...])[layer]
    for head, far in enumerate(back):
      logits = turned(k[head // 2]) @ turned(q[head])[-1]
      assert int(np.argmax(logits[::-1])) == far


@pytest.mark.long
def test_the_layer_that_sees_all_reads_what_the_one_before_writes():
  """Its query is what a head says of a token, its key what it says of the
  token before: equal values match."""
  model = InductionHeads(back=BACK, match=3.0, copied=0.25).apply(made())
  before, full, _ = (block for (block,) in model.stack.blocks)
  o = np.asarray(before.attention.o.weight[...])[-1]  # N H D
  q = np.asarray(full.attention.q.weight[...])[0]  # D N H
  k = np.asarray(full.attention.k.weight[...])[0]  # D K H
  v = np.asarray(full.attention.v.weight[...])[0]
  back = np.asarray(full.attention.o.weight[...])[0]
  for head in range(4):
    group = head // 2
    np.testing.assert_allclose(q[:, head], 3.0 * o[2 * group].T, rtol=1e-6)
    np.testing.assert_allclose(k[:, group], 3.0 * o[2 * group + 1].T, rtol=1e-6)
    # What it copies comes back as it was read.
    np.testing.assert_allclose(back[head], 0.25 * v[:, group].T, rtol=1e-6)


@pytest.mark.long
def test_on_a_mesh_it_is_the_same_and_lies_the_same():
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  one, many = made(), made(mesh)
  lies = lambda model: [x.sharding for x in jax.tree.leaves(model)]
  before = lies(many)
  InductionHeads(back=BACK).apply(one)
  InductionHeads(back=BACK).apply(many)
  assert lies(many) == before
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_rotary_heads_look_as_far_back_as_they_are_told():
  model = rotary().apply(made(config=ROTARY))
  ((block,),) = model.stack.blocks
  q = np.asarray(block.attention.q.bias[...])
  k = np.asarray(block.attention.k.bias[...])
  rates = 1e6 ** -(np.arange(16) / 16)
  turned = lambda x, at: (x[:16] + 1j * x[16:]) * np.exp(1j * at * rates)
  for layer, back in enumerate(ROTARY_BACK):
    for head, far in enumerate(back):
      logits = [
        np.real(turned(q[layer, head], 11) @ turned(k[layer, 0], at).conj())
        for at in range(12)
      ]
      assert int(np.argmax(logits[::-1])) == far
  assert not q[2:].any() and not k[2:].any()


def test_rotary_heads_copy_before_they_are_trained():
  """What followed the last time is the likeliest of 256 for many tokens."""
  rng = np.random.default_rng(0)
  once = np.stack([rng.permutation(256)[:100] for _ in range(4)])
  tokens = np.concatenate([once, once], 1).astype(np.int32)
  found = {}
  for name, model in (
    ("with", rotary().apply(made(config=ROTARY))),
    ("without", made(config=ROTARY)),
  ):
    best = np.argmax(jax.device_get(model(tokens[:, :-1])), -1)
    found[name] = np.mean(best[:, 102:] == tokens[:, 103:])
  assert found["with"] > 0.2 and found["without"] < 0.05


def test_rotary_on_a_mesh_it_is_the_same():
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  one, many = made(config=ROTARY), made(mesh, ROTARY)
  rotary().apply(one)
  rotary().apply(many)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  ("config", "back", "words"),
  [
    (CONFIG, ROTARY_BACK, "equal rotary layers"),
    ({**ROTARY, "attention_bias": False}, ROTARY_BACK, "equal rotary layers"),
    ({**ROTARY, "hidden_size": 64}, ROTARY_BACK, "equal rotary layers"),
    (ROTARY, ((1, 1, 1, 2),), "1 at odd"),
    (ROTARY, ((1, 1, 1),), "rows of 4"),
    (ROTARY, (), "1 to 3 rows"),
    (ROTARY, ((1, 1, 1, 1),) * 4, "1 to 3 rows"),
  ],
)
def test_rotary_refuses_other_forms(config, back, words):
  with pytest.raises(OptionError, match=words):
    RotaryInductionHeads(back=back).apply(made(config=config))


def test_models_of_another_form():
  with pytest.raises(OptionError, match="rotary layers"):
    InductionHeads(back=BACK).apply(checkpoint.create(PLAIN, seed=0))
  with pytest.raises(OptionError, match="3 rows of 4"):
    InductionHeads(back=BACK[:2]).apply(made())
