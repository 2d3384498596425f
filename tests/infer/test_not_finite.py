"""A row whose logits are not finite is named, and its neighbours go on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import NotFiniteLogitsError, OptionError, PromptError
from ringjax.infer import speculate
from ringjax.infer.finite import NOT_FINITE, finite_rows, or_not_finite
from ringjax.infer.kv_runahead import kvr
from ringjax.infer.loongserve import elastic
from ringjax.parallel.peers import Peers
from tests.helpers import poisoned, refused

NAME = "llama2"
COUNT = 6
BAD = 3


@pytest.fixture(scope="module")
def sound(loaded):
  return loaded(NAME)[0]


@pytest.fixture(scope="module")
def prompts(sound):
  """Three, none of which has the id `BAD`."""
  rng = np.random.default_rng(0)
  ids = np.delete(np.arange(sound.config.vocab), BAD)
  return [rng.choice(ids, n).astype(np.int32) for n in (9, 5, 12)]


def with_bad(prompts, row):
  """The prompts, of which one has the id `BAD` in it."""
  found = [p.copy() for p in prompts]
  found[row][2] = BAD
  return found


def caught(call, *words):
  return refused(NotFiniteLogitsError, call, *words)


def late(sound, prompts):
  """An id that row 1 alone generates, and the number of that step."""
  new = rj.infer.generate(sound, prompts, max_new_tokens=COUNT)
  rest = {*np.concatenate([*prompts, new[0], new[2]]).tolist()}
  at = next(n for n in range(COUNT - 1) if int(new[1][n]) not in rest)
  return int(new[1][at]), at, new


@pytest.mark.parametrize(
  ("row", "is_finite"),
  [
    ([0.0, 1.0], True),
    ([-np.inf, 1.0], True),
    ([np.nan, 1.0], False),
    ([1.0, np.nan], False),
    ([np.inf, 1.0], False),
    ([-np.inf, -np.inf], False),
    ([-np.inf, np.nan], False),
  ],
)
def test_a_row_is_finite_if_its_largest_logit_is(row, is_finite):
  logits = jnp.asarray([row, [0.0, 1.0]])
  assert jax.jit(finite_rows)(logits).tolist() == [is_finite, True]
  token = jax.jit(or_not_finite)(jnp.zeros(2, jnp.int32), logits)
  assert token.tolist() == [0 if is_finite else NOT_FINITE, 0]


def test_a_bad_prompt_is_named_and_the_others_are_answered(sound, prompts):
  want = rj.infer.generate(sound, prompts, max_new_tokens=COUNT)
  model = poisoned(sound, BAD)
  asked = with_bad(prompts, 1)
  shown = []
  error = caught(
    lambda: rj.infer.generate(
      model, asked, max_new_tokens=COUNT, stream=shown.append, pad_id=7
    ),
    "row 1 at position 5",
    "weights",
  )
  assert error.rows == (1,) and error.positions == (5,)
  assert error.tokens.lengths.tolist() == [COUNT, 0, COUNT]
  for row in (0, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])
  assert (error.tokens.tokens[1] == 7).all()
  assert np.array(shown)[:, 1].tolist() == [7] * COUNT


def test_a_row_that_gets_bad_keeps_what_came_before(sound, prompts):
  bad, at, want = late(sound, prompts)
  model = poisoned(sound, bad)
  error = caught(
    lambda: rj.infer.generate(model, prompts, max_new_tokens=COUNT)
  )
  assert error.rows == (1,)
  assert error.positions == (prompts[1].size + at + 1,)
  np.testing.assert_array_equal(error.tokens[1], want[1][: at + 1])
  for row in (0, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])


@pytest.mark.parametrize(
  "names",
  [dict(temperature=0.8, top_k=9, seed=1), dict(repetition_penalty=2.0)],
)
@pytest.mark.long
def test_samplers_are_watched_too(sound, prompts, names):
  want = rj.infer.generate(sound, prompts, max_new_tokens=3, **names)
  model, asked = poisoned(sound, BAD), with_bad(prompts, 0)
  error = caught(
    lambda: rj.infer.generate(model, asked, max_new_tokens=3, **names)
  )
  assert error.rows == (0,)
  for row in (1, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])


def test_weights_with_infinity_stop_all_rows(sound, prompts):
  graph_model = poisoned(sound, *range(sound.config.vocab))
  error = caught(
    lambda: rj.infer.generate(graph_model, prompts, max_new_tokens=3)
  )
  assert error.rows == (0, 1, 2) and not error.tokens.lengths.any()


@pytest.mark.parametrize(
  "cache_kind",
  ["windowed", pytest.param("int8", marks=pytest.mark.long)],
)
def test_a_session_refuses_to_go_on_until_a_restart(sound, prompts, cache_kind):
  model, asked = poisoned(sound, BAD), with_bad(prompts, 2)
  session = rj.infer.Session(model, 64, batch=3, cache_kind=cache_kind)
  ask = lambda p: rj.infer.generate(
    model, p, max_new_tokens=COUNT, cache=session
  )
  error = caught(lambda: ask(asked))
  assert error.rows == (2,)
  refused(OptionError, lambda: ask(prompts), "[2]", "restart")
  session.restart()
  want = rj.infer.generate(
    sound, prompts, max_new_tokens=COUNT, cache_kind=cache_kind
  )
  np.testing.assert_array_equal(ask(prompts).tokens, want.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  "drafter",
  [
    "lookup:count=3",
    pytest.param(
      speculate.SelfDraft(count=3, adapt=False), marks=pytest.mark.long
    ),
    pytest.param(
      speculate.SelfDraft(widths=(2, 2), adapt=False), marks=pytest.mark.long
    ),
    pytest.param(
      speculate.SelfDraft(count=3, adapt=False, verify="rejection"),
      marks=pytest.mark.long,
    ),
  ],
  ids=["lookup", "chain", "tree", "rejection"],
)
def test_speculation_names_the_row_of_the_target(sound, prompts, drafter):
  bad, at, want = late(sound, prompts)
  model = poisoned(sound, bad)
  error = caught(
    lambda: rj.infer.generate(
      model, prompts, max_new_tokens=COUNT, speculate=drafter
    )
  )
  assert error.rows == (1,)
  assert error.positions == (prompts[1].size + at + 1,)
  np.testing.assert_array_equal(error.tokens[1], want[1][: at + 1])
  for row in (0, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])


@pytest.mark.parametrize(
  "options",
  [dict(count=3), dict(widths=(2, 2)), dict(count=3, verify="rejection")],
  ids=["chain", "tree", "rejection"],
)
@pytest.mark.long
def test_a_draft_that_is_not_finite_changes_no_token(sound, prompts, options):
  bad, _, want = late(sound, prompts)
  drafter = speculate.DraftModel(
    model=poisoned(sound, bad), adapt=False, **options
  )
  error = caught(
    lambda: rj.infer.generate(
      sound, prompts, max_new_tokens=COUNT, speculate=drafter
    ),
    "logits of the draft",
  )
  assert error.rows == (1,)
  np.testing.assert_array_equal(error.tokens.tokens, want.tokens)


@pytest.mark.slow
def test_contexts_that_are_bad_are_named(sound, prompts):
  model = poisoned(sound, BAD)
  good, bad = prompts[0], with_bad(prompts, 2)[2]
  ask = lambda contexts, model: rj.infer.generate(
    model, prompts[:2], max_new_tokens=3, contexts=contexts
  )
  want = ask([[good], [good]], sound)
  error = caught(lambda: ask([[good], [bad, good]], model))
  assert error.rows == (1,)
  np.testing.assert_array_equal(error.tokens[0], want[0])


@pytest.mark.long
def test_workers_of_attention_name_the_row(sound, prompts):
  bad, at, want = late(sound, prompts)
  model = poisoned(sound, bad)
  with rj.infer.AttentionWorkers.in_threads(2, patience_s=120) as workers:
    error = caught(
      lambda: rj.infer.generate_beside(
        model, prompts, workers=workers, max_new_tokens=COUNT, rows=2
      )
    )
  assert error.rows == (1,)
  assert error.positions == (prompts[1].size + at + 1,)
  np.testing.assert_array_equal(error.tokens[1], want[1][: at + 1])
  for row in (0, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])


def test_a_session_names_the_rows_of_all_its_steps(sound):
  session = rj.infer.Session(sound, 8, batch=3)
  session.not_finite([2])
  session.not_finite([0])
  refused(OptionError, session.check, "[0, 2]", "restart")


def test_ids_outside_of_the_vocabulary_are_refused(sound):
  for wrong in (-1, sound.config.vocab):
    refused(
      PromptError,
      lambda wrong=wrong: rj.infer.generate(
        sound, [[1, wrong]], max_new_tokens=1
      ),
      f"id {wrong} at position 1 of prompt 0",
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_next"])
def test_no_mixer_and_no_mixture_carries_it_to_other_rows(loaded, name):
  sound, _ = loaded(name)
  rng = np.random.default_rng(1)
  ids = np.delete(np.arange(sound.config.vocab), BAD)
  prompts = [rng.choice(ids, n).astype(np.int32) for n in (6, 6, 6)]
  asked = with_bad(prompts, 1)
  want = rj.infer.generate(sound, prompts, max_new_tokens=3)
  model = poisoned(sound, BAD)
  error = caught(lambda: rj.infer.generate(model, asked, max_new_tokens=3))
  assert error.rows == (1,)
  for row in (0, 2):
    np.testing.assert_array_equal(error.tokens[row], want[row])


@pytest.mark.long
def test_a_sharded_sequence_names_the_row(loaded, prompts):
  sound, mesh = loaded(NAME, 4)
  model, asked = poisoned(sound, BAD), with_bad(prompts, 1)
  want = rj.infer.generate(sound, prompts, max_new_tokens=3, mesh=mesh)
  for options in (dict(), dict(keep="last")):
    error = caught(
      lambda options=options: rj.infer.generate(
        model, asked, max_new_tokens=3, mesh=mesh, **options
      )
    )
    assert error.rows == (1,)
    for row in (0, 2):
      np.testing.assert_array_equal(error.tokens[row], want[row])


@pytest.mark.long
def test_an_elastic_session_names_the_row_in_each_call(loaded, prompts):
  sound, mesh = loaded(NAME, 4)
  model, asked = poisoned(sound, BAD), with_bad(prompts, 1)
  want = rj.infer.generate(sound, prompts, max_new_tokens=5, mesh=mesh)
  session = rj.infer.ElasticSession(model, 40, mesh=mesh)
  owners = [elastic.owners_of([p.size, 0, 0, 0]) for p in prompts]
  session.read(asked, owners)
  for first, count in ((0, 3), (3, 2)):
    error = caught(lambda count=count: session.decode(count))
    assert error.rows == (1,) and error.positions == (5,)
    for row in (0, 2):
      np.testing.assert_array_equal(
        error.tokens[row], want[row][first : first + count]
      )


def test_what_a_chain_has_read_is_continued_up_to_it(sound, prompts):
  ids = with_bad(prompts, 0)[0]
  (group,) = Peers.in_threads(1, timeout_s=120.0)
  chain = kvr.Runahead(poisoned(sound, BAD), group, tile=16)
  reading = chain.read(ids, (ids.size,), new_tokens=3)
  error = caught(lambda: kvr.follow(reading, 3), "row 0 at position 9")
  assert error.tokens.size == 0
  refused(OptionError, lambda: kvr.follow(reading, 3), "restart")
  group.close()
