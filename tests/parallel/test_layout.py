"""How tokens that do not fill all slots of their shards lie in them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.parallel.layout import into_slots, out_of_slots, slots_of


@pytest.mark.parametrize(
  ("layout", "shards", "lengths"),
  [
    *(
      (layout, shards, (1, 2, 5, 7, 13, 31))
      for layout in (
        rj.Contiguous(), rj.Striped(), rj.Striped(block=3), rj.Zigzag()
      )
      for shards in (2, 3, 5, 8)
    ),
    (rj.Uneven((3, 0, 5, 2)), 4, (10, 20)),
  ],
  ids=str,
)  # fmt: skip
def test_slots_are_filled_and_emptied(layout, shards, lengths):
  for length in lengths:
    slots = slots_of(layout, length, shards)
    real = layout.padded_order(length, shards) >= 0
    assert (slots is None) == bool(real.all())
    if slots is None:
      continue
    x = jnp.arange(1, length + 1)[None]
    y = into_slots(x, slots, 1)
    # The tokens in their order, and 0 where there is none.
    assert np.array_equal(y[0], np.where(real, np.cumsum(real), 0))
    assert np.array_equal(out_of_slots(y, slots), x)
