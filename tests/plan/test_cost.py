"""The cost model against counting by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringjax as rj
from ringjax import plan
from ringjax.errors import ConfigError, OptionError
from ringjax.models.presets import PRESETS
from ringjax.parallel import chips
from ringjax.parallel.chips import Link
from ringjax.plan import cost, profiles
from ringjax.plan.cost import Profile, Prompt, Shape

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
A100 = profiles.STATED["llama7b-a100"]


@pytest.mark.smoke
def test_the_worked_example():
  prompt = Prompt(tokens=9)
  assert cost.pairs(prompt, (4, 3, 2)).tolist() == [16, 21, 18]
  # A token's key and value are two rows.
  assert 2 * cost.chain_tokens(prompt, (4, 3, 2)).sum() == 22
  assert 2 * cost.gathered_tokens(prompt, 3) == 36


@given(LENGTHS)
def test_work_of_a_dense_chain(lengths):
  total = sum(lengths)
  work = cost.pairs(Prompt(tokens=total), lengths).sum()
  assert work == (total**2 + sum(n * n for n in lengths)) / 2


@given(LENGTHS, st.integers(0, 50), st.one_of(st.none(), st.integers(1, 60)))
def test_pairs_are_counted(lengths, prefix, window):
  prompt = Prompt(tokens=sum(lengths), prefix=prefix, window=window)
  reach = math.inf if window is None else window
  dense, causal, first = [], [], prefix
  for n in lengths:
    rows = range(first, first + n)
    causal.append(sum(min(row + 1, reach) for row in rows))
    kept = first - max(0, first - (reach - 1))
    dense.append(n * (kept + n))
    first += n
  assert cost.pairs(prompt, lengths, "dense").tolist() == dense
  # The diagonal counts half a pair a row.
  near = cost.pairs(prompt, lengths, "causal")
  slack = np.asarray(lengths) / 2 + 1e-9
  assert (np.abs(near - causal) <= slack).all()


@given(LENGTHS, st.one_of(st.none(), st.integers(1, 60)))
def test_what_travels(lengths, window):
  prompt = Prompt(tokens=sum(lengths), window=window)
  want = [
    min(sum(lengths[: i + 1]), math.inf if window is None else window - 1)
    for i in range(len(lengths) - 1)
  ]
  assert cost.chain_tokens(prompt, lengths).tolist() == want


def test_partitions_at_once():
  prompt = Prompt(tokens=9)
  many = [(4, 3, 2), (3, 3, 3)]
  for f in (cost.pairs, cost.chain_tokens):
    assert f(prompt, many).tolist() == [f(prompt, x).tolist() for x in many]


@given(st.integers(1, 12))
def test_bound_of_the_speed_up(ranks):
  """Attention alone: 2 p^2 / (p + 1) against one device, dense."""
  only = dataclasses.replace(A100, token_s=0.0, floor_s=0.0)
  prompt = Prompt(tokens=10_000)
  bound = cost.lower_bound_s(only, prompt, ranks)
  alone = only.pair_s * 10_000**2
  assert math.isclose(alone / bound, 2 * ranks**2 / (ranks + 1))


@given(st.integers(1, 40), st.integers(1, 9))
def test_even(tokens, ranks):
  if tokens < ranks:
    with pytest.raises(OptionError, match="ranks"):
      cost.even(tokens, ranks)
    return
  lengths = cost.even(tokens, ranks)
  assert sum(lengths) == tokens and max(lengths) - min(lengths) <= 1
  assert list(lengths) == sorted(lengths, reverse=True)


def test_shapes_of_presets():
  seven = Shape.of(PRESETS["llama-2-7b"])
  # 6,738,415,616 weights less embedding, head and norms.
  assert seven.parameters == 6738415616 - 2 * 32000 * 4096 - 65 * 4096
  assert seven.kv_bytes() == 16384
  assert math.isclose(seven.early, 0.25, rel_tol=0.02)
  gqa = dataclasses.replace(seven, kv_heads=8)
  mqa = dataclasses.replace(seven, kv_heads=1)
  assert (gqa.kv_bytes(), mqa.kv_bytes()) == (4096, 512)
  falcon = Shape.of(PRESETS["falcon-7b"])
  assert (falcon.kv_heads, falcon.gated, falcon.hidden) == (1, False, 18176)
  assert Shape.of(PRESETS["qwen3-8b"]).head_dim == 128


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "gemma-3-27b"])
def test_shapes_that_cost_otherwise(name):
  with pytest.raises(ConfigError, match="profile"):
    Shape.of(PRESETS[name])


def test_a_config_that_is_none():
  with pytest.raises(ConfigError, match="hidden_size"):
    Shape.of({"model_type": "llama"})


def test_scaled_to_itself():
  base = Shape.of(PRESETS["llama-2-7b"])
  same = A100.scaled(base, base, name="x", model="y", source="z")
  for name in ("token_s", "pair_s", "floor_s", "kv_bytes", "layers", "kernel"):
    assert getattr(same, name) == getattr(A100, name)


@pytest.mark.parametrize(
  "wrong",
  [
    lambda: dataclasses.replace(A100, token_s=-1.0),
    lambda: dataclasses.replace(A100, pair_s=math.nan),
    lambda: dataclasses.replace(A100, token_s=0.0, pair_s=0.0),
    lambda: dataclasses.replace(A100, layers=0),
    lambda: dataclasses.replace(A100, early=1.5),
    lambda: dataclasses.replace(A100, kernel="sparse"),
    lambda: dataclasses.replace(A100, kv_bytes=math.inf),
    lambda: Link(bandwidth=0.0),
    lambda: Link(bandwidth=-1.0),
    lambda: Link(bandwidth=1.0, latency_s=-1.0),
    lambda: Link(bandwidth=math.inf),
    lambda: Prompt(tokens=0),
    lambda: Prompt(tokens=5, prefix=-1),
    lambda: Prompt(tokens=5, window=0),
    lambda: cost.check_lengths((3, 0), 3),
    lambda: cost.check_lengths((3, 1), 5),
    lambda: cost.check_lengths((), 0),
    lambda: cost.check_count("n", True),
    lambda: cost.check_number("n", False),
    lambda: Shape(layers=0, embed=1, hidden=1, heads=1, kv_heads=1, head_dim=1),
  ],
)
def test_refusals(wrong):
  with pytest.raises(OptionError) as caught:
    wrong()
  assert len(str(caught.value)) < 400


def test_a_profile_is_a_value():
  assert Profile(**dataclasses.asdict(A100)) == A100
  assert hash(A100) == hash(Profile(**dataclasses.asdict(A100)))


def test_a_profile_of_a_stated_machine_counts_as_attention_s_choice_does():
  machine = chips.machine("tpu-v5p")
  shape = Shape(
    layers=4, embed=256, hidden=512, heads=4, kv_heads=2, head_dim=64
  )
  found = Profile.on(machine, shape, local="kernel")
  # A prompt on one device, whose tiles are the causal half but for diagonals.
  tokens = 1 << 17
  explained = rj.explain(
    (1, tokens, 4, 64), (1, tokens, 2, 64), shards=1, is_causal=True,
    machine=machine, local="kernel", backward=False, show=False,
  )  # fmt: skip
  alone = dataclasses.replace(
    found, layers=1, token_s=0.0, pair_s=found.pair_s / 4,
    fixed_s=found.fixed_s / 4,
  )  # fmt: skip
  ours = cost.compute_s(alone, Prompt(tokens=tokens), (tokens,)).item()
  assert ours == pytest.approx(explained.best.forward_s, rel=0.01)
  matrices = 2 * shape.parameters / machine.chip.rate("bfloat16")
  assert found.token_s == pytest.approx(matrices)
  assert found.early == shape.early and found.kv_bytes == 512
  # What the chain is planned with is the machine's own link.
  whole = plan.find(found, Prompt(tokens=tokens), 4, machine.link("seq"))
  assert sum(whole.lengths) == tokens and whole.lengths[0] > whole.lengths[-1]
  with pytest.raises(OptionError, match="local"):
    Profile.on(chips.machine("cpu"), shape, local="kernel")
