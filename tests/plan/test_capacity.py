"""The largest context is found, and by few programs."""

from __future__ import annotations

import pytest

from ringjax.errors import OptionError
from ringjax.plan.compiler import capacity

LIMIT = 16_000


def line(base, each, asked=None):
  """A program that takes base + each * tokens bytes."""

  def fits(tokens):
    if asked is not None:
      asked.append(tokens)
    need = int(base + each * tokens)
    return need <= LIMIT, need, LIMIT

  return fits


@pytest.mark.parametrize("base", [0, 1000, 15_000])
@pytest.mark.parametrize("each", [0.25, 3, 40])
def test_close_to_what_a_line_says(base, each):
  asked = []
  found = capacity.largest(
    line(base, each, asked), unit=8, least=8, most=1 << 20
  )
  want = (LIMIT - base) / each
  assert found.tokens <= want < found.too_many
  assert found.too_many <= max(found.tokens * 1.125, found.tokens + 8)
  assert found.tokens % 8 == 0
  # What is said was tried, not reckoned.
  assert {found.tokens, found.too_many} <= set(asked)
  assert found.tried == len(asked) <= 12
  # What fits takes the compiler minutes, what does not a second.
  assert sum(tokens <= want for tokens in asked) <= 2


def test_close_to_what_a_square_says():
  """Plain scores grow with the square of the tokens."""
  asked = []

  def fits(tokens):
    asked.append(tokens)
    need = 100 + tokens**2 // 40
    return need <= LIMIT, need, LIMIT

  found = capacity.largest(fits, unit=8, least=8, most=1 << 20)
  want = (40 * (LIMIT - 100)) ** 0.5
  assert found.tokens <= want < found.too_many <= 1.125 * found.tokens + 8
  assert sum(tokens <= want for tokens in asked) <= 2 and len(asked) <= 12


def test_all_fits_or_nothing_does():
  found = capacity.largest(line(0, 1), unit=8, least=8, most=4096)
  assert (found.tokens, found.too_many, found.tried) == (4096, None, 1)
  found = capacity.largest(line(LIMIT + 1, 1), unit=8, least=64, most=4096)
  assert found.tokens == 0 and found.too_many == 64
  assert found.needed_bytes == LIMIT + 65


def test_needs_that_are_no_line_are_halved():
  # A compiler that does not say how much is missing.
  silent = lambda tokens: (tokens <= 1000, 0, 0)
  found = capacity.largest(silent, unit=8, least=8, most=1 << 16)
  assert found.tokens <= 1000 < found.too_many <= 1.13 * found.tokens


@pytest.mark.parametrize(
  "bounds", [dict(unit=0, least=1, most=2), dict(unit=8, least=99, most=9)]
)
def test_bounds_that_leave_nothing_are_refused(bounds):
  with pytest.raises(OptionError, match="tokens"):
    capacity.largest(line(0, 1), **bounds)
