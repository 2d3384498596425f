"""Trees of drafted tokens: each is read as if its path were the text."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import CacheConfig
from ringjax.kv.kind_text import parse
from ringjax.ops.ancestors import ancestor_matrix
from tests.contracts import cache as contract

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"
T, DRAFTED = 10, 7


def a_forest(rng, rows=2, count=DRAFTED):
  """Parents of drafted tokens, other ones in each row."""
  return np.stack(
    [[rng.integers(-1, n) for n in range(count)] for _ in range(rows)]
  ).astype(np.int32)


def path_of(parents, token):
  path = []
  while token >= 0:
    path.insert(0, token)
    token = int(parents[token])
  return path


def check(model, kind, *, attend=None, seed=0, tolerance=1e-5):
  rng = np.random.default_rng(seed)
  vocab = model.config.vocab
  text = rng.integers(0, vocab, (2, T)).astype(np.int32)
  parents = a_forest(rng)
  draft = rng.integers(0, vocab, parents.shape).astype(np.int32)
  cache = model.init_cache(2, 32, sharding=attend, kind=kind)
  _, cache = model(text, cache=cache)
  got, cache = model(draft, cache=cache, parents=parents)
  kept, longest = np.zeros(parents.shape, bool), []
  for row in range(2):
    for token in range(DRAFTED):
      path = path_of(parents[row], token)
      whole = np.concatenate([text[row], draft[row, path]])[None]
      want = model(whole, attend=rj.models.ContextParallel(axis=None))
      np.testing.assert_allclose(
        got[row, token], want[0, -1], rtol=0, atol=tolerance
      )
    longest.append(
      max((path_of(parents[row], n) for n in range(DRAFTED)), key=len)
    )
    kept[row, longest[-1]] = True
  # The accepted path stays, as if it had been read alone.
  cache = cache.keep(kept)
  assert cache.length.tolist() == [T + len(path) for path in longest]
  more = rng.integers(0, vocab, (2, 1)).astype(np.int32)
  got, _ = model(more, cache=cache)
  for row, path in enumerate(longest):
    whole = np.concatenate([text[row], draft[row, path], more[row]])[None]
    want = model(whole, attend=rj.models.ContextParallel(axis=None))
    np.testing.assert_allclose(got[row, 0], want[0, -1], rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, 1])
@pytest.mark.parametrize(
  "kind", [CacheConfig(windowed=True, slack=8), "unrotated", "dense"], ids=str
)
def test_every_node_sees_its_path(kind, shards):
  model, attend = contract.model(shards), None
  if shards > 1:
    attend = rj.models.CachedAttention(mesh=model.mesh, axis="seq")
  check(model, kind, attend=attend, seed=shards)


@pytest.mark.long
@pytest.mark.parametrize(
  "kind",
  ["int4", *(pytest.param(k, marks=pytest.mark.long) for k in
             ("hadamard2", "int4:unrotated=True", "kivi2", "keydiff+int4"))],
)  # fmt: skip
def test_a_node_is_read_as_a_token_of_its_own(kind):
  """Drafted tokens see one another as later ones will, by their codes."""
  model, rng, kind = contract.model(1), np.random.default_rng(3), parse(kind)
  vocab = model.config.vocab
  text = rng.integers(0, vocab, (1, T)).astype(np.int32)
  draft = rng.integers(0, vocab, (1, 4)).astype(np.int32)
  parents = np.array([[-1, 0, 0, 2]], np.int32)

  def read(ids, cache=None, **how):
    if cache is None:
      cache = model.init_cache(1, 32, kind=kind)
    return model(ids, cache=cache.with_room(ids.shape[1]), **how)

  got, _ = read(draft, read(text)[1], parents=parents)
  for token in range(4):
    _, cache = read(text)
    for one in path_of(parents[0], token):
      want, cache = read(draft[:, one : one + 1], cache)
    np.testing.assert_allclose(got[0, token], want[0, -1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text", "gpt_oss"])
def test_families(family):
  config = json.loads((FIXTURES / family / "config.json").read_text())
  check(rj.models.create(config, seed=3), "dense", tolerance=5e-5)


def test_ancestors_by_hand():
  parents = np.array([[-1, 0, 0, 2, -1, 4]], np.int32)
  got = np.asarray(ancestor_matrix(jnp.asarray(parents)))[0]
  want = [
    [n in path_of(parents[0], token) for n in range(6)] for token in range(6)
  ]
  np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_tree():
  model = contract.model(1)
  tokens = np.zeros((1, 3), np.int32)
  cache = model.init_cache(1, 8)
  with pytest.raises(OptionError, match="a cache"):
    model(tokens, parents=np.array([-1, 0, 0]))
  with pytest.raises(OptionError, match="from -1 to n - 1"):
    model(tokens, cache=cache, parents=np.array([-1, 1, 0]))
