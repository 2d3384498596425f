"""Scores of policies, by hand, of the masses that they are given."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.policies.heavy_hitters import HeavyHitters
from ringjax.kv.policies.scores.snapkv import SnapKV


def look(mass, length):
  """What a policy looks at: masses of tokens at positions 0, 1, ..."""
  mass = jnp.asarray(mass, jnp.float32)[None, None]
  pos = jnp.arange(mass.shape[2], dtype=jnp.int32)[None, None]
  return types.SimpleNamespace(
    real=pos < length,
    pos=pos,
    length=jnp.array([length], jnp.int32),
    column_mass=lambda: mass[:, :, None],
    sums=lambda: mass,
  )


@pytest.mark.usefixtures("unchecked")
def test_heavy_hitters_have_a_mean_over_the_queries_that_saw_them():
  """As many as tokens from themselves on."""
  scores = HeavyHitters().scores(look([4, 3, 3, 1], 4))
  np.testing.assert_array_equal(scores[0, 0], [1, 1, 1.5, 1])


@pytest.mark.usefixtures("unchecked")
def test_snapkv_averages_over_neighbours_on_both_sides():
  """What is beyond either end has no mass, and the newest token stays."""
  scores = SnapKV(window=1, kernel=5).scores(look([5, 10, 0, 0, 0, 20, 7], 7))
  np.testing.assert_array_equal(scores[0, 0], [3, 3, 3, 6, 4, 4, np.inf])


@pytest.mark.usefixtures("unchecked")
def test_heavy_hitters_can_have_the_sum_of_the_paper():
  """The oldest token, which all queries saw, has the largest one."""
  policy = cache_kind("h2o:score=sum").policy
  scores = policy.scores(look([4, 3, 3, 1], 4))
  np.testing.assert_array_equal(scores[0, 0], [4, 3, 3, 1])


@pytest.mark.parametrize(
  ("text", "stays"),
  [("h2o", [0, 1, 2, 3]), ("h2o:newest=.5", [0, 1, 4, 5]),
   ("h2o:newest=3", [0, 3, 4, 5]), ("h2o:newest=1.0", [2, 3, 4, 5])],
)  # fmt: skip
def test_heavy_hitters_share_their_budget_with_the_newest(text, stays):
  """Four of six tokens, with an empty slot behind them."""
  scores = jnp.array([9, 8, 7, 6, 5, 4, -jnp.inf])[None, None, None]
  keep = cache_kind(text).policy.kept(scores, jnp.array([[4]], jnp.int32))
  assert np.flatnonzero(keep[0, 0, 0]).tolist() == stays


@pytest.mark.usefixtures("unchecked")
def test_snapkv_can_take_the_largest_of_neighbours():
  """As the paper's text says; the newest token stays."""
  policy = cache_kind("snapkv:window=1,kernel=3,pool=max").policy
  scores = policy.scores(look([5, 10, 0, 0, 0, 20, 7], 7))
  np.testing.assert_array_equal(scores[0, 0], [10, 10, 10, 0, 20, 20, np.inf])


@pytest.mark.parametrize("text", ["h2o:score=median", "snapkv:pool=sum"])
def test_an_unknown_form_of_a_score_is_refused(text):
  with pytest.raises(rj.OptionError, match="mean"):
    cache_kind(text)


def test_a_pool_is_refused_where_another_policy_gives_the_scores():
  with pytest.raises(rj.OptionError, match="pool='max' with by="):
    rj.kv.AdaKV(pool="max", by=rj.kv.HeavyHitters())
