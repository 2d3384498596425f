"""How tokens that do not fill all slots of their shards lie in them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.parallel.layout import into_slots, out_of_slots, slots_of


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("layout", "shards", "lengths"),
  [
    *(
      pytest.param(
        layout, shards, (1, 2, 5, 7, 13, 31),
        marks=() if shards == 3 else pytest.mark.slow,
      )
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
    by_shard = real.reshape(shards, -1)
    assert np.array_equal(layout.real_tokens(length, shards), by_shard.sum(1))
    x = jnp.arange(1, length + 1)[None]
    y = into_slots(x, slots, 1)
    # The tokens in their order, and 0 where there is none.
    assert np.array_equal(y[0], np.where(real, np.cumsum(real), 0))
    assert np.array_equal(out_of_slots(y, slots), x)


@pytest.mark.one_case
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
  "layout", [rj.Striped(), rj.Striped(block=2), rj.Zigzag()]
)
def test_a_sharded_array_is_brought_into_order_and_back(layout, kind, axis):
  mesh = jax.make_mesh((4, 2), ("seq", "data"), axis_types=(kind, kind))
  given = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3)
  x = jax.device_put(given, NamedSharding(mesh, P("data", "seq")))
  forth = lambda a: layout.permute(a, shards=4, axis=axis)
  back = lambda a: layout.restore(a, shards=4, axis=axis)
  want = forth(given)
  assert not np.array_equal(want, given)
  for call in (lambda f: f, jax.jit):
    np.testing.assert_array_equal(call(forth)(x), want)
    np.testing.assert_array_equal(call(back)(call(forth)(x)), given)
  if kind == AxisType.Explicit:
    assert jax.typeof(forth(x)).sharding == jax.typeof(x).sharding
  # JAX asks for the mesh where it makes zeros of its own.
  with jax.set_mesh(mesh):
    grads = jax.grad(lambda a: jnp.sum(forth(a) * want))(x)
  np.testing.assert_array_equal(grads, given)
