"""Tokens depend on a row alone, whatever path they take."""

from __future__ import annotations

import pytest

from tests.contracts import exactness as contract

EVERY = [
  (name, situation)
  for name in contract.PATHS
  for situation in contract.SITUATIONS
  if contract.applies(name, situation)
]


@pytest.mark.parametrize(("name", "situation"), EVERY)
def test_tokens_are_a_function_of_the_row(name, situation):
  contract.check(name, situation)
