"""The tests test: each planted bug is found by a comparison with the oracle."""

from __future__ import annotations

import sys

import pytest

import ringjax
from tests import faults, mutations


@pytest.mark.one_case
@pytest.mark.parametrize("check", mutations.CHECKS)
def test_the_healthy_code_passes(check):
  mutations.CHECKS[check](ringjax)


# The package is imported anew for each.
@pytest.mark.one_case
@pytest.mark.long_cases(14)
@pytest.mark.parametrize(
  "bug", mutations.BUGS, ids=[bug.name for bug in mutations.BUGS]
)
def test_a_planted_bug_is_found(bug):
  # A wrong number, not a crash: that would prove nothing about the checks.
  wrong = pytest.raises(AssertionError, match=r"relative errors|allclose")
  with mutations.planted(bug) as broken, wrong:
    mutations.CHECKS[bug.seen_by](broken)
  assert sys.modules["ringjax"] is ringjax


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault):
  """Renaming loses no fault that `python -m tests.faults` plants."""
  faults.substituted(fault)


@pytest.mark.parametrize("bug", mutations.BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_its_place(bug):
  """Renaming loses no bug, also of those that the long run plants."""
  mutations.substituted(bug)
