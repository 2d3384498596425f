"""Drafts by a DFlash head: as published, and no token changes."""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, ConfigError, OptionError
from ringjax.infer import speculate
from ringjax.infer.decode import DecodeState
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.speculate.drafter import Target
from tests import checkpoints, eagle_heads
from tests.helpers import refused

LONG, SLOW = pytest.mark.long, pytest.mark.slow
DEPTH, BLOCK, MASK, OUTPUTS = 2, 5, 3, (0, 2, 3)
DRAWN = dict(temperature=0.8, top_k=20, seed=3)


def settings(**more):
  """config.json of a head, as SpecForge writes it."""
  return {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [*OUTPUTS]},
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 40,
    "layer_types": ["full_attention"] * DEPTH,
    "max_position_embeddings": 2048,
    "max_window_layers": DEPTH,
    "num_attention_heads": 4,
    "num_hidden_layers": DEPTH,
    "num_key_value_heads": 2,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 14,
  } | more


@functools.cache
def tensors():
  draw, made = np.random.default_rng(5), {}

  def weight(name, out, into):
    x = draw.normal(size=(out, into)) * 1.5 / into**0.5
    made[f"{name}.weight"] = x.astype(np.float32)

  def norm(name, size):
    x = 1 + 0.2 * draw.normal(size=size)
    made[f"{name}.weight"] = x.astype(np.float32)

  weight("fc", 64, 64 * len(OUTPUTS))
  norm("hidden_norm", 64)
  norm("norm", 64)
  for n in range(DEPTH):
    start = f"layers.{n}."
    for part, heads in (("q", 4), ("k", 2), ("v", 2)):
      weight(f"{start}self_attn.{part}_proj", heads * 8, 64)
    weight(f"{start}self_attn.o_proj", 64, 32)
    for part in ("q_norm", "k_norm"):
      norm(f"{start}self_attn.{part}", 8)
    weight(f"{start}mlp.gate_proj", 40, 64)
    weight(f"{start}mlp.up_proj", 40, 64)
    weight(f"{start}mlp.down_proj", 64, 40)
    for part in ("input_layernorm", "post_attention_layernorm"):
      norm(start + part, 64)
  return made


@functools.cache
def model():
  folder = pathlib.Path(tempfile.mkdtemp(prefix="ringjax-head-")) / "head"
  checkpoints.write_folder(tensors(), settings(), folder)
  return rj.models.dflash.load(folder, eagle_heads.target())


def published(base, text):
  """Logits [BLOCK - 1, V] of the tokens after a text, float64."""
  w = {k: np.asarray(x, np.float64) for k, x in tensors().items()}
  eps, heads, dim = 1e-5, 4, 8
  norm = lambda name, x: eagle_heads.rms_norm(x, w[f"{name}.weight"], eps)
  turned = lambda x, pos: eagle_heads.turned(x, pos, 500.0)
  table = np.asarray(base.embed.weight.get_value(), np.float64)
  states = eagle_heads.streams(base, text[:-1], OUTPUTS)
  f = norm("hidden_norm", states @ w["fc.weight"].T)
  x = table[[text[-1], *[MASK] * (BLOCK - 1)]]
  before, block = np.arange(float(len(f))), len(f) + np.arange(float(BLOCK))
  for n in range(DEPTH):
    start = f"layers.{n}."
    mapped = lambda name, y, start=start: y @ w[f"{start}{name}.weight"].T
    split = lambda y: y.reshape(len(y), -1, dim)
    h = norm(f"{start}input_layernorm", x)
    both = np.concatenate([f, h])
    at = np.concatenate([before, block])
    q = norm(f"{start}self_attn.q_norm", split(mapped("self_attn.q_proj", h)))
    k = norm(
      f"{start}self_attn.k_norm", split(mapped("self_attn.k_proj", both))
    )
    v = split(mapped("self_attn.v_proj", both))
    q, k = turned(q, block), turned(k, at)
    k, v = (np.repeat(y, heads // y.shape[1], 1) for y in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * dim**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", p, v).reshape(BLOCK, -1)
    x = x + mapped("self_attn.o_proj", out)
    y = norm(f"{start}post_attention_layernorm", x)
    gate = mapped("mlp.gate_proj", y)
    y = gate / (1 + np.exp(-gate)) * mapped("mlp.up_proj", y)
    x = x + mapped("mlp.down_proj", y)
  return norm("norm", x)[1:] @ table.T


def prompts_of(lengths=(9, 23, 4)):
  draw = np.random.default_rng(0)
  return [draw.integers(0, 14, n).astype(np.int32) for n in lengths]


def drafter(**options):
  return speculate.DFlash(**{"count": 4, "adapt": False} | options)


def same(model, count=14, lengths=(9, 23, 4), draft=None, **how):
  """The report of a call whose tokens are those of one without drafts."""
  prompts, reports = prompts_of(lengths), []
  want = rj.infer.generate(model, prompts, max_new_tokens=count, **how)
  got = rj.infer.generate(
    model, prompts, max_new_tokens=count, speculate=draft or drafter(),
    report=reports.append, **how,
  )  # fmt: skip
  np.testing.assert_array_equal(got.tokens, want.tokens)
  return reports[0].speculation


@pytest.mark.long
def test_drafts_are_those_of_the_published_forward():
  """Rows have unequal lengths, and one waits; drawn tokens state their laws."""
  prompts = prompts_of()
  session = rj.infer.Session(model(), 64, batch=3)
  rj.infer.read_context(model(), [x[:-1] for x in prompts], cache=session)
  sampler = traced(rj.infer.Sample(temperature=1.0, seed=1))
  state = DecodeState(
    jnp.asarray([x[-1] for x in prompts], jnp.int32),
    jnp.asarray([len(x) - 1 for x in prompts], jnp.int32),
    jnp.zeros(3, bool),
    None,
  )
  base, most = eagle_heads.target(), np.array([4, 0, 2])
  new = [x[-1:] for x in prompts]
  greedy = Target(model(), session, traced(Greedy()), prompts, False, 8)
  draft = drafter().begin(greedy).draft(new, state, most)
  drawn = Target(model(), session, sampler, prompts, True, 8)
  laws = drafter().begin(drawn).draft(new, state, most).probs
  for row in (0, 2):
    want = published(base, prompts[row])[: most[row]]
    assert draft.tokens[row, : most[row]].tolist() == want.argmax(-1).tolist()
    law = np.exp(want) / np.exp(want).sum(-1, keepdims=True)
    np.testing.assert_allclose(laws[row, : most[row]], law, atol=2e-4)


@pytest.mark.long
def test_no_token_changes():
  found = same(model(), count=24, **DRAWN)
  assert found.drafted > found.accepted > 0


@LONG
def test_trees_change_no_token():
  draft = drafter(widths=(2, 4, 4), best=6)
  found = same(model(), count=24, draft=draft, **DRAWN)
  assert found.accepted > 0 and found.drafter.tree


@SLOW
@pytest.mark.parametrize("how", [{}, {"cache_kind": "int8"}], ids=str)
def test_a_sharded_cache(loaded, how):
  _, mesh = loaded("llama3", 4)
  same(rj.models.place(model(), mesh), mesh=mesh, **how)


def test_a_folder_is_saved_to_the_bit(tmp_path):
  rj.models.dflash.save(model(), tmp_path / "head")
  got = load_file(tmp_path / "head" / "model.safetensors")
  assert got.keys() == tensors().keys()
  for name, x in tensors().items():
    np.testing.assert_array_equal(got[name], x)
  assert json.loads((tmp_path / "head" / "config.json").read_text()) == (
    settings()
  )


def test_refusals(tmp_path):
  base = eagle_heads.target()
  refused(OptionError, lambda: drafter().check(base), "dflash.load")
  refused(OptionError, lambda: drafter(count=5).check(model()), "count")
  deep = drafter(widths=(1,) * 5)
  refused(OptionError, lambda: deep.check(model()), "widths", "4 depths")
  refused(OptionError, lambda: rj.models.save(model(), "x"), "without_head")
  tokens = np.array([[1, 2]], np.int32)
  refused(OptionError, lambda: model().predicted_logits(tokens), "further")
  others = (
    {"num_target_layers": 6},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"dflash_config": {"mask_token_id": 14}},
    {"dflash_config": {"mask_token_id": 3, "projector_type": "domino"}},
  )
  for number, more in enumerate(others):
    folder = checkpoints.write_folder(
      tensors(), settings(**more), tmp_path / f"{number}"
    )
    refused(ConfigError, functools.partial(rj.models.dflash.load, folder, base))
  folder = checkpoints.write_folder(
    tensors() | {"markov.weight": np.ones((2, 2), np.float32)},
    settings(),
    tmp_path / "more",
  )
  refused(
    CheckpointMismatchError,
    lambda: rj.models.dflash.load(folder, base),
    "extra",
  )
