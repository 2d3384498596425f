"""Tokens of sharded layouts in the order of the sequence, and back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.parallel import redeal
from tests.helpers import make_mesh

LAYOUTS = [rj.Striped(2), rj.Striped(), rj.Zigzag(), rj.Contiguous()]


@pytest.mark.one_case
@pytest.mark.parametrize("shards", [3, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shards_get_consecutive_tokens_and_give_them_back(layout, shards):
  mesh, length = make_mesh(shards, "auto"), layout.local_length(40, shards)
  order = layout.padded_order(shards * length, shards)
  x = jnp.asarray(order, jnp.float32)[None, :, None] + 1

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq")
  )
  def both(x):
    ordered = redeal.to_order(x, layout, "seq")
    return ordered, redeal.from_order(ordered, layout, "seq", x.shape[1])

  ordered, back = both(x)
  tokens = np.asarray(ordered)[0, :, 0]
  # Padding that is added is zeros at the end.
  assert tokens[: order.size].tolist() == list(range(1, order.size + 1))
  assert not tokens[order.size :].any()
  np.testing.assert_array_equal(back, x)
  weight = jnp.arange(float(ordered.size)).reshape(ordered.shape)
  gradient = jax.grad(lambda x: (both(x)[0] * weight).sum())(x)
  np.testing.assert_array_equal(gradient[0, :, 0], order)


def test_shards_of_unequal_lengths_are_refused():
  with pytest.raises(OptionError, match="layout"):
    redeal.check(rj.Uneven((3, 2)))
