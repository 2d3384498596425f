"""JSON that leaves the process: null in place of what JSON cannot say."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ringjax.json_text import json_text


def strict(text):
  """As a parser reads it that knows JSON alone."""

  def constant(name):
    raise AssertionError(name)

  return json.loads(text, parse_constant=constant)


def test_numbers_that_are_not_finite_are_null():
  value = {
    "a": [1.5, math.nan, (math.inf, -math.inf), {"b": np.float64("nan")}],
    "c": "NaN",
  }
  want = {"a": [1.5, None, [None, None], {"b": None}], "c": "NaN"}
  assert strict(json_text(value)) == want
  assert json_text({"b": 1, "a": 2}, sort_keys=True) == '{"a": 2, "b": 1}'


def test_what_is_made_of_other_values_is_finite_too():
  item = lambda x: x.item()
  for x, want in ((np.float32("inf"), None), (np.int64(3), 3)):
    assert strict(json_text([x], default=item)) == [want]
  with pytest.raises(TypeError):
    json_text([object()])


def test_what_contains_itself_is_refused():
  loop = []
  loop.append(loop)
  with pytest.raises((ValueError, RecursionError)):
    json_text(loop)
