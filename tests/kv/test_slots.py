"""Writing tokens into slots: the memory that it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ringjax.kv.slots import SHARDED, ContiguousSlots
from ringjax.ops.mask import Coords

L, B, K, S, H = 16, 5, 2, 40, 16


def test_narrow_keys_are_written_without_a_wide_copy_of_all_layers():
  before = np.array([[0], [7], [39], [12], [5]], np.int32)
  used = before + np.array([[1], [1], [1], [0], [1]], np.int32)
  at = Coords(*[jnp.zeros((B, S), jnp.int32)] * 2)
  slots = ContiguousSlots(
    at=at, used=jnp.asarray(used), before=jnp.asarray(before), mode=SHARDED
  )

  def step(old, new):
    write = lambda x, n: (slots.write(x, new, n), None)
    return lax.scan(write, old, jnp.arange(L, dtype=jnp.int32))[0]

  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  old, new = draw(L, B, K, S, H), draw(B, K, 1, H)
  old, new = (jnp.asarray(x, jnp.bfloat16) for x in (old, new))
  made = jax.jit(step, donate_argnums=0).lower(old, new).compile()
  want = np.array(old)
  for row in range(B):
    if used[row, 0] > before[row, 0]:
      want[:, row, :, before[row, 0]] = np.asarray(new)[row, :, 0]
  # Of one layer, in float32, and of nothing that grows with the layers.
  assert made.memory_analysis().temp_size_in_bytes < old.nbytes
  np.testing.assert_array_equal(np.asarray(made(old, new)), want)
