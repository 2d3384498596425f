"""Groups of strategies of two levels, where a call names no size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError


def attended(shards: int, kv_heads: int, strategy: str):
  mesh = rj.make_mesh((shards,), ("seq",), devices=jax.devices()[:shards])
  q, k, v = (
    jax.random.normal(jax.random.key(n), (1, 4 * shards, heads, 8))
    for n, heads in enumerate((6, kv_heads, kv_heads))
  )
  ask = dict(is_causal=True)
  got = rj.dot_product_attention(
    q, k, v, mesh=mesh, axis="seq", strategy=strategy, **ask
  )
  return got, jax.nn.dot_product_attention(q, k, v, **ask)


@pytest.mark.parametrize(
  ("shards", "strategy"),
  [
    (4, "two_level"),
    *(
      pytest.param(shards, name, marks=pytest.mark.long)
      for shards, name in ((6, "two_level"), (8, "two_level"), (6, "hybrid"))
    ),
  ],
)
def test_a_name_alone_finds_groups(shards, strategy):
  got, want = attended(shards, 3, strategy)
  np.testing.assert_allclose(got, want, atol=2e-6)
  assert got.dtype == jnp.float32


@pytest.mark.parametrize(
  ("shards", "strategy", "words", "not_said"),
  [
    # No group of two shares three heads.
    (4, "hybrid", ("3 heads", "'two_level' or 'ring'"), "two_level:4"),
    (5, "two_level", ("5 shards", "strategy='ring'"), "two_level"),
    (5, "hybrid", ("5 shards", "strategy='ring'"), "two_level"),
    (6, "two_level:4", ("4 for 6", "one of 2, 3"), "two_level:4"),
  ],
)
def test_what_is_recommended_works(shards, strategy, words, not_said):
  with pytest.raises(OptionError) as error:
    attended(shards, 3, strategy)
  for word in words:
    assert word in str(error.value)
  assert not_said not in str(error.value)
