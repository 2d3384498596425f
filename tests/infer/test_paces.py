"""How long drafts are: what drafting costs is bounded, whatever is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from ringjax.infer.speculate import EarlyExit, PromptLookup
from ringjax.infer.speculate.paces import SHARE, Paces

PLAIN_S = 1.0


def _spent(
  accepts,
  *,
  draft_s: float,
  tokens: int = 2000,
  reading_s: float = 0.0,
  adapt: bool = True,
  paces: Paces | None = None,
) -> tuple[float, int, Paces]:
  """Seconds for so many tokens, the rounds with drafts, and the paces.

  Args:
    accepts: of a token's place, how many drafted ones behind it are right.
    draft_s: of each drafted token, to draft and to check it.
    tokens: new ones.
    reading_s: of each step of a pause, at its end.
    adapt: of the drafter.
    paces: those of a call before.
  """
  drafter = EarlyExit if reading_s else PromptLookup
  paces = paces or Paces(drafter(count=4, adapt=adapt), 1)
  at, lag, total, rounds = 0, 0, 0.0, 0
  while at < tokens:
    most = paces.draft_lengths()
    length = int(most[0])
    seconds, came = PLAIN_S, 1
    if length:
      rounds += 1
      seconds += draft_s * length + reading_s * lag
      came, lag = 1 + min(length, accepts(at)), 0
    else:
      lag += 1
    paces.add(most, most, np.array([came]), seconds)
    total, at = total + seconds, at + came
  return total / (at * PLAIN_S), rounds, paces


@pytest.mark.parametrize("draft_s", [0.05, 0.3, 5.0])
@pytest.mark.parametrize("tokens", [64, 400, 4000])
@pytest.mark.parametrize("reading", [0.0, 0.125, 0.5])
def test_useless_drafts_cost_no_more_than_a_twentieth(draft_s, tokens, reading):
  reading_s = reading * draft_s
  ratio, rounds, paces = _spent(
    lambda at: 0, draft_s=draft_s, tokens=tokens, reading_s=reading_s
  )
  # Of the first draft nothing is known; a trial finds what reading costs.
  first = 4 * draft_s + 40 * reading_s
  assert ratio <= 1 + SHARE + first / tokens
  assert rounds >= 1
  assert paces.cost_s / paces.plain_s == pytest.approx(ratio - 1, abs=0.01)
  # Without the rule it would cost what each draft does.
  always, _, _ = _spent(lambda at: 0, draft_s=draft_s, tokens=64, adapt=False)
  assert always == pytest.approx(1 + 4 * draft_s)


def test_drafts_that_pay_are_made():
  ratio, rounds, paces = _spent(lambda at: 4, draft_s=0.1, tokens=400)
  assert ratio < 0.35 and rounds > 70
  assert paces.cost_s < 0
  assert "gives" in paces.why


def test_drafts_that_pay_later_are_found():
  ratio, rounds, _ = _spent(lambda at: 4 * (at > 500), draft_s=0.1, tokens=4000)
  assert ratio < 0.5 and rounds > 400


def test_costly_drafts_from_the_text_are_tried_again():
  """They have nothing to read behind a pause."""
  _, rounds, _ = _spent(lambda at: 0, draft_s=5.0, tokens=4000)
  assert rounds > 5


def test_drafts_that_are_often_empty_may_pay():
  paces, n = Paces(PromptLookup(count=4), 1), 0
  for n in range(200):
    most = paces.draft_lengths()
    # Every third draft there is one, and it is right.
    drafted = most * (n % 3 == 0)
    seconds = 2.0 if drafted.any() else 1.05 if most.any() else PLAIN_S
    paces.add(most, drafted, 1 + drafted, seconds)
  assert paces.cost_s < -0.5 * n


def test_plain_steps_are_timed_anew_where_rounds_take_less():
  """Drafts that paid beside long texts do not beside short ones."""
  paces, plain_s, rounds = Paces(PromptLookup(count=4), 1), 10.0, 0
  for n in range(400):
    if n == 200:
      plain_s, rounds = 2.0, 0
    most = paces.draft_lengths()
    rounds += most.any()
    # Half of it does not depend on the text.
    seconds = plain_s + 4.0 * most.any()
    paces.add(most, most, 1 + np.minimum(most, 1), seconds)
    if n == 199:
      assert rounds > 180
  assert rounds < 40


def test_text_that_becomes_hopeless_costs_no_more_than_it_saved():
  ratio, _, _ = _spent(lambda at: 4 * (at % 200 < 20), draft_s=1.0, tokens=4000)
  assert ratio <= 1 + SHARE


def test_a_next_call_knows_what_the_last_one_measured():
  _, _, paces = _spent(lambda at: 0, draft_s=5.0, tokens=300)
  assert _spent(lambda at: 0, draft_s=5.0, tokens=30, paces=paces)[1] == 0
  assert "takes" in paces.why


def test_reading_that_costs_more_than_a_step_may_is_not_tried_again():
  _, few, _ = _spent(lambda at: 0, draft_s=0.1, tokens=4000, reading_s=0.2)
  _, many, _ = _spent(lambda at: 0, draft_s=0.1, tokens=4000)
  assert few < many


def test_the_first_draft_of_a_model_is_short():
  """Of text it costs next to nothing, and may be long."""
  assert Paces(EarlyExit(count=4), 1).draft_lengths().tolist() == [1]
  assert Paces(PromptLookup(count=4), 1).draft_lengths().tolist() == [4]
  assert Paces(EarlyExit(count=4, adapt=False), 1).draft_lengths().tolist() == [
    4
  ]
  assert Paces(EarlyExit(widths=(2, 2)), 1).draft_lengths().tolist() == [4]


def test_a_trial_that_may_not_pay_has_a_length_that_was_timed():
  """Another one would compile a draft and a check of that length."""
  paces, lengths, tokens = Paces(EarlyExit(count=4), 1), [], np.ones(1, int)
  seconds = lambda length: 1.25 + 0.06 * length if length else PLAIN_S
  for length in (1, 4) * 30:
    draft = np.full(1, length)
    paces.add(draft, draft, tokens, seconds(length))
  for _ in range(4000):
    most = paces.draft_lengths()
    lengths.append(int(most[0]))
    paces.add(most, most, tokens, seconds(lengths[-1]))
  assert {1, 4} & set(lengths) and set(lengths) <= {0, 1, 4}


def test_rounds_that_compile_are_not_measured():
  paces, full = Paces(PromptLookup(count=4), 1), np.full(1, 4)
  assert paces.draft_lengths().tolist() == [4]
  paces.add(full, full, np.array([1]), None)
  assert paces.cost_s == 0 and paces.rounds == 1
  assert paces.draft_lengths().tolist() == [4]
  paces.add(full, full, np.array([1]), 3.0)
  none = np.zeros(1, int)
  while not paces.draft_lengths().any() and paces.steps < 3:
    paces.add(none, none, np.array([1]), None if paces.steps == 0 else 1.0)
  assert paces.cost_s == pytest.approx(2.0)


def test_processes_that_measure_other_times_draft_alike():
  lengths = []
  for draft_s in (0.0, 50.0):
    paces = Paces(PromptLookup(count=4), 2, processes=2)
    for _ in range(20):
      lengths.append(paces.draft_lengths().tolist())
      nothing = np.zeros(2, int)
      paces.add(np.full(2, 4), np.full(2, 4), nothing + 1, PLAIN_S + draft_s)
    assert "2 processes" in paces.why and not paces.reason
  assert lengths == [[4, 4]] * 40
