"""Native sparse attention equals its equations on any mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.bench.program import CompiledProgram
from ringjax.errors import RingjaxError
from tests.contracts import native_sparse, program


def mesh_of(shards: int):
  return jax.make_mesh(
    (shards,),
    ("seq",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:shards],
  )


@pytest.mark.long
def test_outputs_choices_and_gradients_are_those_of_the_equations():
  native_sparse.check(rj.Contiguous())


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "shards"),
  [
    (rj.Contiguous(), 4),
    (rj.Contiguous(), 8),
    (rj.Striped(), 4),
    (rj.Striped(4), 2),
    (rj.Zigzag(), 4),
  ],
  ids=str,
)
def test_shards_in_each_layout_give_the_same(layout, shards):
  native_sparse.check(layout, shards, mesh_of(shards))


@pytest.mark.slow
def test_documents_keys_of_the_window_and_other_sizes_combine():
  seg = np.stack([np.repeat([1, 2, 3, 0], [9, 30, 20, 5]), np.ones(64)])
  seg = seg.astype(np.int32)
  native_sparse.check(rj.Contiguous(), seg=seg, own_window_keys=True)
  native_sparse.check(
    rj.Striped(), 4, mesh_of(4), seg=seg, own_window_keys=True
  )
  # Blocks as long as a compressed key, a stride as long, and no fixed first.
  config = rj.NativeSparse(
    length=4, stride=4, block=4, count=3, initial=0, local=1, window=3
  )
  native_sparse.check(rj.Contiguous(), config=config, t=52)
  # Compressed keys that are longer than a block, and than a shard.
  config = rj.NativeSparse(
    length=12, stride=2, block=4, count=5, initial=1, local=2, window=80
  )
  native_sparse.check(rj.Contiguous(), 8, mesh_of(8), config=config)


@pytest.mark.long
def test_heads_and_rows_are_sharded():
  mesh = rj.make_mesh(
    (2, 2, 2), ("data", "seq", "model"), devices=jax.devices()[:8]
  )
  native_sparse.check(
    rj.Contiguous(), 2, mesh, axis="seq", batch_axis="data", head_axis="model"
  )


@pytest.mark.slow
def test_a_call_inside_of_a_shard_map_equals_the_whole_call():
  r = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
  config = native_sparse.SMALL
  x = draw(1, 64, 4, 8), draw(1, 64, 2, 8), draw(1, 64, 2, 8)

  def attend(q, k, v, **options):
    cut = lambda x: jnp.mean(
      rj.strided_blocks(x, length=4, stride=2, **options), 2
    )
    gates = jnp.full((*q.shape[:3], 3), 0.5)
    return rj.native_sparse_attention(
      q, k, v, cut(k), cut(v), gates, config, **options
    )

  spec = jax.P(None, "seq")
  sharded = jax.shard_map(
    lambda *x: attend(*x, axis="seq"),
    mesh=mesh_of(4),
    in_specs=(spec, spec, spec),
    out_specs=spec,
  )
  np.testing.assert_allclose(sharded(*x), attend(*x), atol=2e-6)


@pytest.mark.parametrize(
  "layout", [rj.Contiguous(), rj.Striped(), rj.Zigzag()], ids=str
)
def test_strided_blocks_are_those_of_the_whole_sequence(layout):
  x = np.arange(1, 33, dtype=np.float32)[None, :, None]
  blocks = rj.strided_blocks(
    layout.permute(jnp.asarray(x), shards=4),
    length=6, stride=4, mesh=mesh_of(4), layout=layout,
  )  # fmt: skip
  padded = np.pad(x[0, :, 0], (0, 6))
  want = [padded[first : first + 6] for first in range(0, 32, 4)]
  np.testing.assert_array_equal(blocks[0, ..., 0], want)


@pytest.mark.long
def test_only_compressed_keys_and_values_are_gathered():
  config, t, shards = rj.NativeSparse(count=4, window=128), 2048, 8
  mesh = mesh_of(shards)
  shape = lambda *s: jax.ShapeDtypeStruct(
    s, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "seq"))
  )
  blocks = t // config.stride
  x = shape(1, t, 2, 8), shape(1, t, 1, 8), shape(1, t, 1, 8)
  compressed = shape(1, blocks, 1, 8), shape(1, blocks, 1, 8)
  attend = lambda *x: rj.native_sparse_attention(
    *x, config, mesh=mesh, window_strategy="halo"
  )
  compiled = jax.jit(attend).lower(*x, *compressed, shape(1, t, 2, 3)).compile()
  sent = program.sent(CompiledProgram(compiled.as_text()))
  # Keys twice and values, of 8 float32 numbers, and their coordinates.
  assert 0 < sent["all-gather"] <= blocks * 4 * (3 * 8 + 3)
  assert compiled.memory_analysis().temp_size_in_bytes < t * t


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(stride=24), "multiple of the stride"),
    (dict(count=2), "at least 3 blocks"),
    (dict(window=0), "window"),
    (dict(initial=-1), "initial"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(options, words):
  with pytest.raises(RingjaxError, match=words):
    rj.NativeSparse(**options)


@pytest.mark.usefixtures("unchecked")
def test_operands_that_do_not_fit_are_refused():
  q, k = jnp.ones((1, 64, 2, 8)), jnp.ones((1, 64, 1, 8))
  attend = lambda compressed, gates: rj.native_sparse_attention(
    q, k, k, compressed, compressed, gates, native_sparse.SMALL
  )
  gates = jnp.ones((1, 64, 2, 3))
  with pytest.raises(RingjaxError, match="one key of each block"):
    attend(k[:, :31], gates)
  with pytest.raises(RingjaxError, match="three branches"):
    attend(k[:, :32], gates[..., :2])
  with pytest.raises(RingjaxError, match="no padding"):
    rj.strided_blocks(q[:, :63], length=4, stride=2, mesh=mesh_of(4))
  with pytest.raises(RingjaxError, match="no padding"):
    rj.native_sparse_attention(
      q[:, :63], k[:, :63], k[:, :63], k[:, :32], k[:, :32], gates[:, :63],
      native_sparse.SMALL, mesh=mesh_of(4),
    )  # fmt: skip
  whole = (q, k, k, k[:, :32], k[:, :32], gates, native_sparse.SMALL)
  with pytest.raises(RingjaxError, match="keys of the window"):
    rj.native_sparse_attention(*whole, window_key=k[:, :5])
  with pytest.raises(RingjaxError, match="values of the window"):
    rj.native_sparse_attention(*whole, window_value=k[:, :5])
  with pytest.raises(RingjaxError, match="at most 4"):
    rj.strided_blocks(q, length=4, stride=6)


@pytest.mark.usefixtures("unchecked")
def test_operands_of_other_kinds_are_refused():
  k, gates = jnp.ones((1, 64, 1, 8)), jnp.ones((1, 64, 2, 3))
  rest = (k, k, k[:, :32], k[:, :32], gates, native_sparse.SMALL)
  with pytest.raises(RingjaxError, match="four axes"):
    rj.native_sparse_attention(jnp.ones((64, 2, 8)), *rest)
  with pytest.raises(RingjaxError, match="layout"):
    rj.native_sparse_attention(jnp.ones((1, 64, 2, 8)), *rest, layout="striped")
