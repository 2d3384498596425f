"""Drafts by a layer of the model (MTP) change no token."""

from __future__ import annotations

import itertools

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
from ringjax.infer.speculate.predict_draft import PredictDraft
from ringjax.kv import CacheConfig
from ringjax.kv.base import FreshLayer, NoCache
from ringjax.models.transformer import tokens_of
from ringjax.nn.sharding_context import ContextParallel
from tests import checkpoints, predicting
from tests.helpers import refused
from tests.predicting import prompts_of

LONG, SLOW = pytest.mark.long, pytest.mark.slow
DRAWN = dict(temperature=0.8, top_k=20, seed=3)


def drafter(**options):
  return speculate.PredictDraft(**{"count": 3, "adapt": False} | options)


def same(model, count=14, lengths=(9, 23, 4), draft=None, **how):
  return predicting.same(model, draft or drafter(), count, lengths, **how)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("name", "how"),
  [
    ("llama3", {"cache_kind": "unrotated"}),
    ("glm4_moe", {}),
    ("qwen3_next", {}),
    ("deepseek_v3", {"cache_kind": "int8"}),
    ("glm4_moe", DRAWN),
    ("ernie4_5_moe", {"cache_kind": "int4"}),
    ("qwen3", {"prefill": "chunked", "chunk": 8}),
  ],
  ids=str,
)
def test_no_token_changes(name, how):
  found = same(predicting.model(name), **how)
  assert found.drafted > found.accepted > 0
  assert found.tokens == found.calls + found.accepted


@LONG
@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  ("name", "options", "how"),
  [
    ("glm4_moe", dict(widths=(1, 1, 1)), {}),
    ("longcat_flash", dict(widths=(2, 3)), {}),
    ("mimo_v2_flash", dict(widths=(3, 3)), {"cache_kind": "windowed"}),
    ("deepseek_v3", dict(widths=(2, 4)), {"cache_kind": "int8"}),
    ("llama3", dict(widths=(4, 8, 8), beam=3, best=8), DRAWN),
  ],
  ids=str,
)
def test_trees_change_no_token(name, options, how):
  found = same(predicting.model(name), draft=drafter(**options), **how)
  assert found.accepted > 0 and found.drafter.tree


@SLOW
@pytest.mark.parametrize(
  "kind",
  ["kivi2", CacheConfig(device=16),
   CacheConfig(policy=rj.kv.KeyDiff(budget=12), room=8)],
  ids=str,
)  # fmt: skip
def test_caches_that_move_or_evict(kind):
  same(predicting.model("llama3"), cache_kind=kind, lengths=(19, 23), count=20)


@SLOW
@pytest.mark.parametrize("how", [{}, {"cache_kind": "int4"}], ids=str)
def test_a_sharded_cache(loaded, how):
  _, mesh = loaded("llama3", 4)
  model = rj.models.place(predicting.model("llama3"), mesh)
  same(model, mesh=mesh, **DRAWN, **how)


@LONG
def test_a_second_turn():
  model = predicting.model("llama3")
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
  model, rows = predicting.model("llama3"), 3000
  how = dict(max_new_tokens=3, temperature=1.0, top_k=2)
  prompts = np.tile(prompts_of(model, (9,))[0], (rows, 1))
  counts = []
  for seed, more in (
    (1, {}), (2, {"speculate": drafter(verify="rejection", count=2)})
  ):  # fmt: skip
    new = rj.infer.generate(model, prompts, seed=seed, **how, **more).tokens
    pairs = np.unique(new, axis=0, return_counts=True)
    counts.append({tuple(k): n for k, n in zip(*pairs, strict=True)})
  keys = sorted({*counts[0], *counts[1]})
  a, b = (np.array([x.get(k, 0) for k in keys], float) for x in counts)
  distance = ((a - b) ** 2 / (a + b)).sum()
  assert distance < len(keys) + 5 * np.sqrt(2 * len(keys))


# ---------------------------------------------------------------------------
# What is drafted
# ---------------------------------------------------------------------------


def laws_after(model, text, choose):
  """Log-probabilities [V] after a text and each token that is chosen by them.

  By calls of the layer over the whole text.
  """
  attend, block = ContextParallel(axis=None), model.predict_block
  spec = model.config.predicts

  def places_of(text):
    tokens = jnp.asarray(text)[None]
    return tokens, tokens_of(model, attend, tokens.shape, None, None, None)

  tokens, places = places_of(text[:-1])
  hidden, _ = model.hidden(tokens, places, NoCache(len(model.kinds)), attend)
  text = [*text]
  while True:
    tokens, places = places_of(text)
    model.embedded(tokens, places)
    before = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden], 1)
    caches = tuple(FreshLayer() for _ in spec.mixers[1:])
    g, _ = block.predicted(before, places, caches, attend)
    normed = block.normed(g, model.norm)
    law = np.asarray(jax.nn.log_softmax(model.logits(normed)[0, -1]))
    yield law
    handed = normed if spec.hands_normed else g
    hidden = jnp.concatenate([hidden, handed[:, -1:]], 1)
    text.append(choose(law))


def by_one_call(model, text, count):
  """Tokens that follow a text, the likeliest after one another."""
  best = lambda law: int(np.argmax(law))
  laws = laws_after(model, text, best)
  return [best(law) for law in itertools.islice(laws, count)]


def law_of(model, text, path):
  """Log-probabilities [V] after a text and the tokens of a path."""
  tokens = iter(path)
  *_, law = itertools.islice(
    laws_after(model, text, lambda law: next(tokens)), len(path) + 1
  )
  return law


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "llama3"])
def test_drafts_in_decoding_are_those_of_whole_texts(name):
  """Of rows of unequal length, one of which waits."""
  model = predicting.model(name)
  session = rj.infer.Session(model, 64, batch=3)
  prompts = prompts_of(model)
  rj.infer.read_context(model, [x[:-1] for x in prompts], cache=session)
  target = Target(model, session, traced(Greedy()), prompts, False, 8)
  state = DecodeState(
    jnp.asarray([x[-1] for x in prompts], jnp.int32),
    jnp.asarray([len(x) - 1 for x in prompts], jnp.int32),
    jnp.zeros(3, bool),
    None,
  )
  before = jax.tree.map(np.asarray, session.cache)
  drafting = PredictDraft(count=4).begin(target)
  draft = drafting.draft([x[-1:] for x in prompts], state, np.array([4, 0, 2]))
  assert draft.count.tolist() == [4, 0, 2]
  for row in (0, 2):
    count = int(draft.count[row])
    want = by_one_call(model, prompts[row], count)
    assert draft.tokens[row, :count].tolist() == want
  # The target's cache is as it was.
  jax.tree.map(np.testing.assert_array_equal, before, session.cache)


@LONG
def test_paths_of_a_tree_are_those_of_whole_texts():
  """Each token is among the likeliest after the text and its ancestors."""
  model, widths = predicting.model("llama3"), (2, 3, 4)
  session = rj.infer.Session(model, 64, batch=3)
  prompts = prompts_of(model)
  rj.infer.read_context(model, [x[:-1] for x in prompts], cache=session)
  target = Target(model, session, traced(Greedy()), prompts, False, 8)
  state = DecodeState(
    jnp.asarray([x[-1] for x in prompts], jnp.int32),
    jnp.asarray([len(x) - 1 for x in prompts], jnp.int32),
    jnp.zeros(3, bool),
    None,
  )
  before = jax.tree.map(np.asarray, session.cache)
  drafting = PredictDraft(widths=widths, beam=2).begin(target)
  draft = drafting.draft([x[-1:] for x in prompts], state, np.array([9, 0, 9]))
  assert draft.count.tolist() == [9, 0, 9]
  tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
  for row in (0, 2):
    # (sum of log-probabilities, its path) of the tokens that are continued.
    beam, first = [(0.0, ())], 0
    for width in widths:
      paths = sorted(
        (
          (total + value, (*path, token))
          for total, path in beam
          for token, value in enumerate(law_of(model, prompts[row], path))
        ),
        reverse=True,
      )[:width]
      got = []
      for node in range(first, first + width):
        path = ()
        while node >= 0:
          path, node = (int(tokens[row, node]), *path), parents[row, node]
        got.append(path)
      assert got == [path for _, path in paths]
      beam, first = paths[:2], first + width
  # The target's cache is as it was.
  jax.tree.map(np.testing.assert_array_equal, before, session.cache)


@LONG
def test_trees_for_recurrent_layers_are_refused():
  model = predicting.model("qwen3_next")
  call = lambda: rj.infer.generate(
    model, [[1, 2]], max_new_tokens=2, speculate=drafter(widths=(2, 2))
  )
  refused(OptionError, call, "chain", "widths")


def test_refusals():
  model = predicting.model("llama3")
  call = lambda model, how: rj.infer.generate(
    model, [[1, 2]], max_new_tokens=2, speculate=how
  )
  config = checkpoints.config("llama3")
  plain = rj.models.abstract(config)
  refused(OptionError, lambda: PredictDraft().check(plain), "predict_layers=")
  refused(OptionError, lambda: call(model, "mtp:widths=(2,15)"), "14", "7 ids")
  drawn = lambda: PredictDraft(widths=(2, 2), beam=1, verify="rejection")
  refused(OptionError, drawn, "beam", "widths=")
  folding = {"type": "self_extend", "group": 4, "window": 6}
  folded = rj.models.abstract(
    checkpoints.config("qwen3") | {"position_folding": folding}
  )
  tree = PredictDraft(widths=(2, 2))
  refused(OptionError, lambda: tree.check_tree(folded), "widths", "Folded")
  # Trees of other widths are others.
  assert tree != PredictDraft(widths=(2, 3))
  draft = lambda: rj.models.longspec.with_draft(model)
  refused(OptionError, draft, "predicts further tokens")
  again = lambda: rj.models.with_predict_layer(model)
  refused(OptionError, again, "without one")
  other = lambda: rj.models.abstract("gpt2", predict_layers=True)
  refused(OptionError, other, "llama")
