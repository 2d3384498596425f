"""Kernels of one device, ours and JAX's, for `rj.plan.cycles`: same shapes.

Builders for `rj.plan.aot`: each is called with the devices of a slice, of
which it takes the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import OptionError
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cached import ShardedDecode
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.attention.views import ContiguousView, tile_slots
from ringjax.ops.mask import Causal, Coords
from ringjax.parallel import chips
from ringjax.plan.aot import Built

WHAT = ("forward", "backward")
_HEADS = 2
_LAYERS = 2


def ours(
  devices: Sequence[Any],
  *,
  what: str = "forward",
  q_block: int = 1024,
  kv_block: int = 1024,
  head_dim: int = 128,
  dtype: str = "bfloat16",
) -> Built:
  """`FlashTPU`, causal: by its positions some tiles are whole.

  Args:
    devices: of the slice.
    what: "forward", or "backward" for both passes.
    q_block: queries of a tile.
    kv_block: keys of a tile.
    head_dim: H.
    dtype: of the operands.
  """
  mesh = _one(devices)
  chip = chips.known(devices[0].device_kind)
  strategy = Gather(FlashTPU(q_block, kv_block, chip=chip))

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return dot_product_attention(
      q, k, v, is_causal=True, mesh=mesh, axis="seq", strategy=strategy
    )

  shape = (1, _length(q_block, kv_block), _HEADS, head_dim)
  return _built(attend, mesh, shape, dtype, what, "FlashTPU")


def splash(
  devices: Sequence[Any],
  *,
  what: str = "forward",
  q_block: int = 1024,
  kv_block: int = 1024,
  head_dim: int = 128,
  dtype: str = "bfloat16",
) -> Built:
  """JAX's splash attention, all of whose tiles are whole.

  Its backward pass is the fused one. Arguments as of `ours`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  mesh = _one(devices)
  length = _length(q_block, kv_block)
  sizes = kernels.BlockSizes(
    block_q=q_block,
    block_kv=kv_block,
    block_kv_compute=kv_block,
    block_q_dkv=q_block,
    block_kv_dkv=kv_block,
    block_kv_dkv_compute=kv_block,
    use_fused_bwd_kernel=True,
  )
  mask = masks.MultiHeadMask([masks.FullMask((length, length))] * _HEADS)
  kernel: Any = kernels.make_splash_mha(
    mask, block_sizes=sizes, head_shards=1, q_seq_shards=1
  )
  shape = (1, _HEADS, length, head_dim)
  return _built(jax.vmap(kernel), mesh, shape, dtype, what, "splash")


def _one(devices: Sequence[Any]) -> Mesh:
  return Mesh(np.array(devices[:1]), ("seq",), axis_types=(AxisType.Auto,))


def _length(q_block: int, kv_block: int) -> int:
  """Some tiles in either direction."""
  return 4 * max(q_block, kv_block)


def _built(
  attend: Callable[..., jax.Array],
  mesh: Mesh,
  shape: tuple[int, ...],
  dtype: str,
  what: str,
  name: str,
) -> Built:
  if what not in WHAT:
    raise OptionError(
      "what", repr(what), f"one of {', '.join(WHAT)}", "pass one of these names"
    )
  like = jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P())
  )

  def both(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array
  ) -> tuple[jax.Array, Any]:
    out, pullback = jax.vjp(attend, q, k, v)
    return out, pullback(do)

  backward = what == "backward"
  return Built(
    function=jax.jit(both if backward else attend),
    arguments=(like,) * (4 if backward else 3),
    mesh=mesh,
    facts={"what": what, "kernel": name, "shape": list(shape)},
  )


def decode(
  devices: Sequence[Any],
  *,
  local: str = "kernel",
  heads: int = 32,
  kv_heads: int = 8,
  head_dim: int = 128,
  keys: int = 65536,
  queries: int = 1,
  dtype: str = "bfloat16",
  trips: float | int = 1.0,
) -> Built:
  """Queries behind a cache of `keys` tokens, all of which they see.

  Args:
    devices: of the slice.
    local: "kernel", `DecodeTPU`, or "loops", XLA's.
    heads: N.
    kv_heads: K.
    head_dim: H.
    keys: S, slots of the cache.
    queries: T, of which none is before the last key.
    dtype: of all operands.
    trips: how often each of XLA's loops is taken to turn.
  """
  mesh = _one(devices)
  made = {
    "kernel": DecodeTPU(chip=chips.known(devices[0].device_kind)),
    "loops": Blockwise(),
  }
  if local not in made:
    raise OptionError(
      "local",
      repr(local),
      f"one of {', '.join(made)}",
      "pass one of these names",
    )
  resident = ShardedDecode(mesh=mesh, axis="seq", whole=True, local=made[local])
  over = NamedSharding(mesh, P())
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)
  q, stored = (
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over)
    for x in _visit(heads, kv_heads, head_dim, keys, dtype, queries)
  )

  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, at: Any, layer: jax.Array
  ) -> jax.Array:
    q_at, k_at = (Coords(*pair) for pair in at)
    return resident(
      Scores(scale=head_dim**-0.5),
      q,
      (ContiguousView(k, v, k_at, layer),),
      Terms(),
      q_at,
      Causal(),
    )

  at = tuple((number(1, n),) * 2 for n in (queries, keys))
  return Built(
    function=jax.jit(attend),
    arguments=(q, stored, stored, at, number()),
    mesh=mesh,
    facts={"what": "decode", "kernel": local, "keys": keys},
    data_trips=trips,
  )


def decode_tile(
  chip: str,
  *,
  local: str = "kernel",
  heads: int = 32,
  kv_heads: int = 8,
  head_dim: int = 128,
  keys: int = 65536,
  dtype: str = "bfloat16",
) -> int:
  """Bytes of keys and values of a tile of `decode`, of one core."""
  found: list[tuple[int, int]] = []

  def look(q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array) -> None:
    stored = ContiguousView(k, v, Coords(at, at), 0)
    kernel = DecodeTPU(chip=chip).tile(q, stored)
    loops = kv_heads, tile_slots(stored, "tpu")
    found.append(kernel if local == "kernel" else loops)

  q, k = _visit(heads, kv_heads, head_dim, keys, dtype)
  jax.eval_shape(look, q, k, k, jax.ShapeDtypeStruct((1, keys), jnp.int32))
  ((many, length),) = found
  return 2 * many * length * head_dim * k.dtype.itemsize


def _visit(
  heads: int,
  kv_heads: int,
  head_dim: int,
  keys: int,
  dtype: str,
  queries: int = 1,
) -> tuple[Any, Any]:
  """What stands for the queries and for the stack of keys."""
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
  return (
    like(1, kv_heads, heads // kv_heads, queries, head_dim),
    like(_LAYERS, 1, kv_heads, keys, head_dim),
  )
