"""What the compiled program sends, when, and how much memory it takes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.bench.program import Program

B, N, K, H = 1, 4, 2, 16
LAYOUTS = (rj.Contiguous(), rj.Striped(), rj.Zigzag())


def mesh_of(size):
  return jax.make_mesh(
    (size,),
    ("seq",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:size],
  )


def compiled(size, tokens, backward, v_dim=H, **options):
  """The compiled forward or backward pass over `size` devices."""
  mesh = mesh_of(size)
  sharding = NamedSharding(mesh, P(None, "seq"))
  arg = lambda heads, dim: jax.ShapeDtypeStruct(
    (B, tokens, heads, dim), jnp.float32, sharding=sharding
  )
  attend = functools.partial(
    rj.dot_product_attention,
    **{"mesh": mesh, "axis": "seq", "is_causal": True, **options},
  )
  args = arg(N, H), arg(K, H), arg(K, v_dim)
  if not backward:
    return jax.jit(attend, out_shardings=sharding).lower(*args).compile()
  # The backward pass alone: with the forward pass in the same program XLA
  # would share the first send of the keys between the two.
  out, pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x), *args)
  put = lambda a: jax.ShapeDtypeStruct(
    a.shape, a.dtype, sharding=_residual_sharding(mesh, a, tokens)
  )
  pull, out = jax.tree.map(put, (pull, out))
  return (
    jax.jit(lambda pull, do: pull(do), out_shardings=sharding)
    .lower(pull, out)
    .compile()
  )


def _residual_sharding(mesh, a, tokens):
  """The sequence is the dimension that is `tokens` long."""
  spec = [("seq" if n == tokens else None) for n in a.shape]
  return NamedSharding(mesh, P(*spec))


def sent(program):
  """{shape of what is sent: times}, coordinates apart."""
  keys, coords = {}, 0
  for _, i, times in program.sends():
    ((dtype, dims),) = i.shapes
    if dtype == "s32":
      coords += times * i.bytes
    else:
      keys[dims] = keys.get(dims, 0) + times
  return keys, coords


@pytest.mark.one_case
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [3, 8])
def test_forward_sends_each_block_once(layout, size):
  length = 12
  program = Program(
    compiled(
      size, size * length, False, strategy="ring", layout=layout
    ).as_text()
  )
  keys, coords = sent(program)
  assert keys == {(2, B, K, length, H): size - 1}
  assert coords == (size - 1) * 2 * length * 4
  assert not program.ops() & {"all-gather", "all-to-all", "all-reduce"}


@pytest.mark.one_case
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [3, 8])
def test_backward_sends_keys_and_sums(layout, size):
  length = 12
  program = Program(
    compiled(
      size, size * length, True, strategy="ring", layout=layout
    ).as_text()
  )
  keys, _ = sent(program)
  # R-1 sends of K and V, R of dK and dV.
  assert keys == {(2, B, K, length, H): (size - 1) + size}
  assert not program.ops() & {"all-gather", "all-to-all", "all-reduce"}


def test_unequal_head_dims_send_keys_and_values_apart():
  program = Program(compiled(4, 48, False, v_dim=8, strategy="ring").as_text())
  assert sent(program)[0] == {(B, K, 12, H): 3, (B, K, 12, 8): 3}


@pytest.mark.one_case
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [1, 13, 14, 60])
def test_window_cuts_the_ring(window, backward):
  size, length = 8, 12
  program = Program(
    compiled(
      size,
      size * length,
      backward,
      strategy="ring",
      local_window_size=(window - 1, 0),
    ).as_text()
  )
  hops = min(-(-(window - 1) // length), size - 1)
  home = hops + (1 if hops else 0)
  times = sum(sent(program)[0].values())
  assert times == (hops + home if backward else hops)


_COMPUTE = {"dot", "while", "custom-call"}


@pytest.mark.parametrize("backward", [False, True])
def test_sends_wait_for_no_product_of_their_hop(backward):
  ring = rj.Ring(rj.Blockwise(), unroll=1)
  program = Program(
    compiled(8, 96, backward, strategy=ring, layout=rj.Striped()).as_text()
  )
  in_loops = [x for x in program.sends() if x[2] > 1]
  assert in_loops, "the hops are expected in rolled loops"
  for name, send, _ in in_loops:
    assert not program.waits_for(name, send.name) & _COMPUTE


def test_unrolled_sums_wait_for_the_hop_before_only():
  program = Program(compiled(8, 96, True, strategy="ring").as_text())
  waiting = [
    send.shapes[0][1]
    for name, send, times in program.sends()
    if times > 1 and program.waits_for(name, send.name) & _COMPUTE
  ]
  # Of two hops in the body the second one's sums hold the first one's.
  assert waiting == [(2, B, K, 12, H)]


def test_receive_then_use_is_caught():
  """Negative control: a ring that computes with what it just asked for."""
  mesh = mesh_of(8)

  def late(x):
    def hop(x, _):
      x = jax.lax.ppermute(x @ x, "seq", [(i, (i + 1) % 8) for i in range(8)])
      return x, None

    return jax.lax.scan(hop, x, None, length=7)[0]

  f = jax.jit(
    jax.shard_map(late, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
  )
  program = Program(f.lower(jnp.ones((8 * 16, 16))).compile().as_text())
  ((name, send, times),) = program.sends()
  assert times == 7
  assert program.waits_for(name, send.name) & _COMPUTE


def test_gather_and_ulysses_use_their_collectives():
  ops = Program(compiled(4, 48, True, strategy="gather").as_text()).ops()
  assert "all-gather" in ops and "collective-permute" not in ops
  ops = Program(compiled(2, 48, True, strategy="ulysses").as_text()).ops()
  assert "all-to-all" in ops and "collective-permute" not in ops


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ring"])
def test_program_does_not_grow(strategy):
  size = lambda shards, tokens: len(
    compiled(shards, tokens, True, strategy=strategy).as_text()
  )
  assert size(8, 8 * 64) < 1.1 * size(6, 6 * 64)
  assert size(4, 4 * 1024) < 1.05 * size(4, 4 * 512)


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize(
  ("layout", "backward"),
  [
    (LAYOUTS[0], True),
    (LAYOUTS[1], False),
    pytest.param(LAYOUTS[0], False, marks=pytest.mark.slow),
    pytest.param(LAYOUTS[1], True, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_memory_is_flat_in_the_number_of_shards(layout, backward):
  local = 512
  one = lambda r: (
    compiled(r, r * local, backward, strategy="ring", layout=layout)
    .memory_analysis()
    .temp_size_in_bytes
  )
  assert one(8) <= 1.1 * one(4)


@pytest.mark.parametrize("backward", [False, True])
def test_no_array_of_local_by_whole_length(backward):
  local, size = 1024, 4
  program = Program(
    compiled(size, size * local, backward, strategy="ring").as_text()
  )
  assert program.largest() < local * size * local
