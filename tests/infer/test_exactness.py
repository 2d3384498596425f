"""Tokens are a function of their row alone, whatever path they take."""

from __future__ import annotations

import pytest

from ringjax.kv import KINDS
from tests.contracts import exactness as contract

# One of each fault that this was written for, and what is refused at once.
OFTEN = {
  ("select by call", "chunks"),
  ("quest", "crowd"),
  ("neuron predictors", "rows"),
}
EVERY = [
  pytest.param(
    name,
    situation,
    marks=() if (name, situation) in OFTEN else pytest.mark.long,
  )
  for name in contract.PATHS
  for situation in contract.SITUATIONS
  if contract.applies(name, situation)
]


def test_every_policy_is_a_path():
  kinds = [
    path.options()["cache_kind"]
    for path in contract.PATHS.values()
    if path.refusals.get("crowd") == "policy"
  ]
  classes = {type(kind.policy) for kind in kinds}
  missing = {type(x.policy) for x in KINDS.values() if x.policy} - classes
  assert not missing, (
    "add an entry by _policy(...) to PATHS in tests/contracts/exactness.py"
  )


@pytest.mark.long_cases(4)
@pytest.mark.parametrize(("name", "situation"), EVERY)
def test_tokens_are_a_function_of_the_row(name, situation):
  contract.check(name, situation)
