"""Any two options combine: each pair runs with gradients or raises our error.

Values are checked option by option elsewhere; here nothing is compiled, the
call and its backward pass are traced for every pair.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import ringjax as rj

B, T, N, K, H = 2, 24, 4, 2, 8
OPTIONS = {
  "bias": {"bias": jnp.ones((B, N, T, T))},
  "mask": {"mask": jnp.ones((1, 1, T, T), bool)},
  "mask object": {"mask": rj.Causal() | rj.Prefix(jnp.array([3, 5]))},
  "scale": {"scale": 0.3},
  "is_causal": {"is_causal": True},
  "query_seq_lengths": {"query_seq_lengths": jnp.array([9, 24], jnp.int32)},
  "key_value_seq_lengths": {
    "key_value_seq_lengths": jnp.array([24, 7], jnp.int32)
  },
  "local_window_size": {"local_window_size": (5, 2)},
  "return_residual": {"return_residual": True},
  "q_segment_ids": {"q_segment_ids": jnp.ones((B, T), jnp.int32)},
  "positions": {
    "q_positions": jnp.arange(T),
    "kv_positions": jnp.arange(T) + 2,
  },
  "sinks": {"sinks": jnp.ones((N,))},
  "logits_soft_cap": {"logits_soft_cap": 5.0},
  "alibi_slopes": {"alibi_slopes": jnp.ones((N,))},
  "dropout": {"dropout_rate": 0.2, "dropout_seed": 1},
  "layout": {"layout": rj.Striped(2)},
  "axes": {"batch_axis": (), "head_axis": ()},
}
STRATEGIES = ("ring", "gather", "ulysses", rj.Ring(rj.Dense()))
SLOW = ("gather", "ulysses", rj.Ring(rj.Dense()))
PAIRS = list(itertools.combinations(OPTIONS, 2))


@pytest.mark.long
@pytest.mark.parametrize(
  "strategy",
  [
    pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s
    for s in STRATEGIES
  ],
  ids=lambda s: str(s)[:16],
)
@pytest.mark.parametrize(
  "turn", [0] + [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)]
)
def test_every_pair(strategy, turn):
  mesh = jax.make_mesh(
    (4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
  )
  q, k = jnp.ones((B, T, N, H)), jnp.ones((B, T, K, H))
  at = STRATEGIES.index(strategy)
  served = 0
  # In one turn each pair meets one strategy, over the four turns all four.
  for pair in PAIRS[(turn + at) % 4 :: 4]:
    options = OPTIONS[pair[0]] | OPTIONS[pair[1]]
    if set(pair) == {"mask", "mask object"}:
      continue

    def run(q, k, v, options=options):
      out = rj.dot_product_attention(
        q, k, v, mesh=mesh, strategy=strategy, **options
      )
      return jnp.sum(out[0] if "return_residual" in options else out)

    shapes = jax.eval_shape(jax.grad(run, (0, 1, 2)), q, k, k)
    assert [s.shape for s in shapes] == [q.shape, k.shape, k.shape], pair
    served += 1
  assert served >= len(PAIRS) // 4 - 1


def test_the_table_names_every_option():
  import inspect

  known = set(inspect.signature(rj.dot_product_attention).parameters)
  used = {name for options in OPTIONS.values() for name in options}
  elsewhere = {"query", "key", "value", "mesh", "axis", "strategy"}
  elsewhere |= {"implementation", "kv_segment_ids"}
  assert used | elsewhere == known
