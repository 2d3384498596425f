"""generate continues a prompt as transformers does, on any Python and JAX."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from tests import checkpoints

NAME = "llama3"


@pytest.mark.parametrize(
  ("devices", "prefill"),
  [
    (1, "auto"),
    pytest.param(8, "striped", marks=pytest.mark.smoke),
    (8, "chunked"),
  ],
)
def test_greedy_tokens_are_those_of_transformers(loaded, devices, prefill):
  expected = checkpoints.expected(NAME)
  model, mesh = loaded(NAME, devices)
  new = rj.infer.generate(
    model,
    expected.prompt,
    max_new_tokens=expected.greedy.shape[1],
    mesh=mesh,
    prefill=prefill,
  )
  np.testing.assert_array_equal(new, expected.greedy)
