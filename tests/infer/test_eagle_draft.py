"""Drafts by an EAGLE-3 head: as published, and no token changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.infer.decode import DecodeState
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.speculate.drafter import Target
from tests import eagle_heads, predicting
from tests.helpers import refused
from tests.predicting import prompts_of

LONG, SLOW = pytest.mark.long, pytest.mark.slow
DRAWN = dict(temperature=0.8, top_k=20, seed=3)


def drafter(**options):
  return speculate.Eagle3(**{"count": 3, "adapt": False} | options)


def same(model, count=14, lengths=(9, 23, 4), draft=None, **how):
  return predicting.same(model, draft or drafter(), count, lengths, **how)


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  "how",
  [{}, DRAWN, {"cache_kind": "int8", "prefill": "chunked", "chunk": 8}],
  ids=str,
)
def test_no_token_changes(how):
  found = same(eagle_heads.model(), count=24, **how)
  assert found.drafted > found.accepted > 0
  # The draft vocabulary has fewer ids than the target.
  assert eagle_heads.model().config.vocab > len(eagle_heads.IDS)


@SLOW
@pytest.mark.parametrize(
  ("family", "how"),
  [
    ("qwen3_next", {}),
    ("gemma3_text", {}),
    ("mixtral", {"cache_kind": "unrotated"}),
    ("llama3", {"cache_kind": "kivi2"}),
    ("llama3", {"cache_kind": "keydiff"}),
  ],
  ids=str,
)
def test_families_and_caches(family, how):
  """Recurrent layers, windows, experts; codes; tokens that are evicted."""
  if how.get("cache_kind") == "keydiff":
    kind = rj.kv.CacheConfig(policy=rj.kv.KeyDiff(budget=12), room=8)
    how = {"cache_kind": kind}
  same(eagle_heads.model(family), lengths=(19, 23), **how)


@LONG
@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  ("family", "options", "how"),
  [
    ("gemma3_text", dict(widths=(2, 3)), {}),
    ("llama3", dict(widths=(2, 4)), DRAWN),
    ("llama3", dict(widths=(3, 6, 6), beam=2, best=6), {"cache_kind": "int8"}),
  ],
  ids=str,
)
def test_trees_change_no_token(family, options, how):
  """Wider than the draft vocabulary has ids where few are left."""
  model = eagle_heads.model(family)
  found = same(model, count=24, draft=drafter(**options), **how)
  assert found.accepted > 0 and found.drafter.tree


@SLOW
def test_trees_over_a_sharded_cache_and_a_second_turn(loaded):
  _, mesh = loaded("llama3", 4)
  model = rj.models.place(eagle_heads.model(), mesh)
  turns = [prompts_of(model), [x[:3] for x in prompts_of(model)]]
  answers = []
  for how in ({}, {"speculate": drafter(widths=(2, 3), best=4)}):
    session = rj.infer.Session(model, 96, batch=3, mesh=mesh)
    answers.append([
      rj.infer.generate(model, turn, max_new_tokens=9, cache=session, **how)
      for turn in turns
    ])  # fmt: skip
  for a, b in zip(*answers, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)


@LONG
@pytest.mark.long_cases(1)
@pytest.mark.parametrize("how", [{}, {"cache_kind": "int4"}], ids=str)
def test_a_sharded_cache(loaded, how):
  _, mesh = loaded("llama3", 4)
  model = rj.models.place(eagle_heads.model(), mesh)
  same(model, mesh=mesh, **DRAWN, **how)


@SLOW
def test_a_second_turn():
  model = eagle_heads.model()
  turns = [prompts_of(model), [x[:3] for x in prompts_of(model)]]
  answers = []
  for how in ({}, {"speculate": drafter()}):
    session = rj.infer.Session(model, 96, batch=3)
    answers.append([
      rj.infer.generate(model, turn, max_new_tokens=9, cache=session, **how)
      for turn in turns
    ])  # fmt: skip
  for a, b in zip(*answers, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)


@SLOW
def test_a_law_that_is_accepted_by_chance():
  """Pairs of tokens come as often as without drafts."""
  model, rows = eagle_heads.model(), 3000
  how = dict(max_new_tokens=3, temperature=1.0, top_k=3)
  prompts = np.tile(prompts_of(model, (9,))[0], (rows, 1))
  counts = []
  for seed, more in (
    (1, {}), (2, {"speculate": drafter(verify="rejection", count=2)})
  ):  # fmt: skip
    new = rj.infer.generate(model, prompts, seed=seed, **how, **more).tokens
    pairs = np.unique(new, axis=0, return_counts=True)
    counts.append({tuple(k): n for k, n in zip(*pairs, strict=True)})
  keys = sorted({*counts[0], *counts[1]})
  # Some of the target's tokens can't be drafted.
  assert any(set(key) - {*eagle_heads.IDS.tolist()} for key in keys)
  a, b = (np.array([x.get(k, 0) for k in keys], float) for x in counts)
  distance = ((a - b) ** 2 / (a + b)).sum()
  assert distance < len(keys) + 5 * np.sqrt(2 * len(keys))


# ---------------------------------------------------------------------------
# What is drafted
# ---------------------------------------------------------------------------


def head(tmp_path, **more):
  """(target, target with a head, tensors of the head, its config)."""
  base, config = eagle_heads.target(), eagle_heads.settings(**more)
  weights = eagle_heads.tensors(config)
  folder = eagle_heads.write(tmp_path / "head", config)
  return base, rj.models.eagle3.load(folder, base), weights, config


@pytest.mark.long
@pytest.mark.parametrize(
  "more",
  [
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"hidden_size": 48, "target_hidden_size": 64},
    {},
  ],
  ids=str,
)
def test_drafts_are_those_of_the_published_forward(tmp_path, more):
  """Of rows of unequal length, one of which waits."""
  base, model, weights, config = head(tmp_path, **more)
  prompts = prompts_of(model)
  session = rj.infer.Session(model, 64, batch=3)
  rj.infer.read_context(model, [x[:-1] for x in prompts], cache=session)
  target = Target(model, session, traced(Greedy()), prompts, False, 8)
  state = DecodeState(
    jnp.asarray([x[-1] for x in prompts], jnp.int32),
    jnp.asarray([len(x) - 1 for x in prompts], jnp.int32),
    jnp.zeros(3, bool),
    None,
  )
  before = jax.tree.map(np.asarray, session.cache)
  drafting = drafter(count=4).begin(target)
  draft = drafting.draft([x[-1:] for x in prompts], state, np.array([4, 0, 2]))
  for row in (0, 2):
    count = int(draft.count[row])
    want, laws = eagle_heads.drafts(base, weights, config, prompts[row], count)
    assert draft.tokens[row, :count].tolist() == want
    logits = np.asarray(model.predicted_logits(prompts[row][None]))[0, -1]
    np.testing.assert_allclose(logits[eagle_heads.IDS], laws[0], atol=2e-4)
    others = np.setdiff1d(np.arange(model.config.vocab), eagle_heads.IDS)
    assert (logits[others] == -np.inf).all()
  # The target's cache is as it was.
  jax.tree.map(np.testing.assert_array_equal, before, session.cache)


def test_refusals():
  base, model = eagle_heads.target(), eagle_heads.model()
  check = lambda draft, model: lambda: draft.check(model)
  refused(OptionError, check(drafter(), base), "eagle3.load")
  refused(OptionError, check(speculate.PredictDraft(), model), "eagle3")
  refused(OptionError, check(drafter(), predicting.model("llama3")), "EAGLE-3")
  refused(OptionError, check(drafter(model="other"), model), "other")
  refused(OptionError, lambda: rj.models.save(model, "x"), "without_head")
  refused(OptionError, lambda: rj.models.with_more_tokens(model, 2), "head")
  again = lambda: rj.models.eagle3.with_head(model)
  refused(OptionError, again, "without_head")
  refused(OptionError, lambda: rj.models.eagle3.without_head(base), "eagle3")
  engine = lambda: rj.serve.Engine(model, rows=2, capacity=64, layer_parts=2)
  refused(OptionError, engine, "parts")
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  placed = rj.models.place(model, mesh)
  # Hidden states are stored in heads, too.
  prompt = np.arange(9, dtype=np.int32)[None]
  hybrid = lambda: rj.infer.generate(
    placed, prompt, max_new_tokens=2, mesh=mesh, prefill="hybrid"
  )
  refused(OptionError, hybrid, "hybrid")
