"""Kernels of one device, ours and JAX's, for `rj.plan.cycles`: same shapes.

Builders for `rj.plan.aot`: each is called with the devices of a slice, of
which it takes the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.checks import one_of
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


def _one(devices: Sequence[Any]) -> Mesh:
  return Mesh(np.array(devices[:1]), ("seq",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashShape:
  """A call of flash attention, a few tiles long.

  Attributes:
    what: "forward", or "backward" for both passes.
    q_block: queries of a tile.
    kv_block: keys of a tile.
    head_dim: H.
    dtype: of the operands.

  Raises:
    OptionError: an unknown `what`.
  """

  what: str = "forward"
  q_block: int = 1024
  kv_block: int = 1024
  head_dim: int = 128
  dtype: str = "bfloat16"

  def __post_init__(self) -> None:
    one_of("what", self.what, WHAT)

  @property
  def length(self) -> int:
    """Queries and keys: some tiles in either direction."""
    return 4 * max(self.q_block, self.kv_block)

  def built(
    self,
    attend: Callable[..., Any],
    mesh: Mesh,
    shape: tuple[int, ...],
    kernel: str,
  ) -> Built:
    """`attend`, or that and its gradients, of operands of `shape`."""
    like = jax.ShapeDtypeStruct(
      shape, jnp.dtype(self.dtype), sharding=NamedSharding(mesh, P())
    )

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[jax.Array, Any]:
      out, pullback = jax.vjp(attend, q, k, v)
      return out, pullback(do)

    backward = self.what == "backward"
    return Built(
      function=jax.jit(both if backward else attend),
      arguments=(like,) * (4 if backward else 3),
      mesh=mesh,
      facts={"what": self.what, "kernel": kernel, "shape": list(shape)},
    )


def ours(devices: Sequence[Any], **shape: Any) -> Built:
  """`FlashTPU`, causal: by its positions some tiles are full.

  Args:
    devices: of the slice.
    shape: of `FlashShape`.
  """
  mesh, of = _one(devices), FlashShape(**shape)
  chip = chips.known(devices[0].device_kind)
  attend = functools.partial(
    dot_product_attention,
    is_causal=True,
    mesh=mesh,
    axis="seq",
    strategy=Gather(FlashTPU(of.q_block, of.kv_block, chip=chip)),
  )
  return of.built(attend, mesh, (1, of.length, _HEADS, of.head_dim), "FlashTPU")


def splash(devices: Sequence[Any], **shape: Any) -> Built:
  """JAX's splash attention, all of whose tiles are full.

  Its backward pass is the fused one.

  Args:
    devices: of the slice.
    shape: of `FlashShape`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  of = FlashShape(**shape)
  sizes = kernels.BlockSizes(
    block_q=of.q_block,
    block_kv=of.kv_block,
    block_kv_compute=of.kv_block,
    block_q_dkv=of.q_block,
    block_kv_dkv=of.kv_block,
    block_kv_dkv_compute=of.kv_block,
    use_fused_bwd_kernel=True,
  )
  mask = masks.MultiHeadMask([masks.FullMask((of.length, of.length))] * _HEADS)
  kernel: Any = kernels.make_splash_mha(
    mask, block_sizes=sizes, head_shards=1, q_seq_shards=1
  )
  operands = (1, _HEADS, of.length, of.head_dim)
  return of.built(jax.vmap(kernel), _one(devices), operands, "splash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
  """Queries behind a cache of keys, which see all of them.

  Attributes:
    heads: N.
    kv_heads: K.
    head_dim: H.
    keys: S, slots of the cache.
    queries: T, none of them before the last key.
    dtype: of all operands.
  """

  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  keys: int = 65536
  queries: int = 1
  dtype: str = "bfloat16"

  def operands(self, sharding: Any = None) -> tuple[Any, Any]:
    """The shapes of the queries and of the stack of keys."""
    like = lambda *shape: jax.ShapeDtypeStruct(
      shape, jnp.dtype(self.dtype), sharding=sharding
    )
    groups = self.heads // self.kv_heads
    return (
      like(1, self.kv_heads, groups, self.queries, self.head_dim),
      like(_LAYERS, 1, self.kv_heads, self.keys, self.head_dim),
    )


def decode(
  devices: Sequence[Any],
  *,
  local: str = "kernel",
  trips: float | int = 1.0,
  **shape: Any,
) -> Built:
  """Attention of new queries over a cache.

  Args:
    devices: of the slice.
    local: "kernel", `DecodeTPU`, or "loops", XLA's.
    trips: the trip count that each of XLA's loops is taken to have.
    shape: of `DecodeShape`.

  Raises:
    OptionError: an unknown `local`.
  """
  mesh, of = _one(devices), DecodeShape(**shape)
  made = {
    "kernel": DecodeTPU(chip=chips.known(devices[0].device_kind)),
    "loops": Blockwise(),
  }
  one_of("local", local, made)
  resident = ShardedDecode(mesh=mesh, axis="seq", whole=True, local=made[local])
  over = NamedSharding(mesh, P())
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)
  q, stored = of.operands(over)

  def attend(q: Any, k: Any, v: Any, at: Any, layer: Any) -> jax.Array:
    q_at, k_at = (Coords(*pair) for pair in at)
    return resident(
      Scores(scale=of.head_dim**-0.5),
      q,
      (ContiguousView(k, v, k_at, layer),),
      Terms(),
      q_at,
      Causal(),
    )

  at = tuple((number(1, n),) * 2 for n in (of.queries, of.keys))
  return Built(
    function=jax.jit(attend),
    arguments=(q, stored, stored, at, number()),
    mesh=mesh,
    facts={"what": "decode", "kernel": local, "keys": of.keys},
    data_trips=trips,
  )


def decode_tile(chip: str, *, local: str = "kernel", **shape: Any) -> int:
  """Bytes of keys and values of a tile of `decode`, of one core.

  Args:
    chip: whose tile it is.
    local: as of `decode`.
    shape: of `DecodeShape`.
  """
  of = DecodeShape(**shape)
  found: list[tuple[int, int]] = []

  def look(q: Any, k: Any, v: Any, at: Any) -> None:
    stored = ContiguousView(k, v, Coords(at, at), 0)
    kernel = DecodeTPU(chip=chip).tile(q, stored)
    loops = of.kv_heads, tile_slots(stored, "tpu")
    found.append(kernel if local == "kernel" else loops)

  q, k = of.operands()
  jax.eval_shape(look, q, k, k, jax.ShapeDtypeStruct((1, of.keys), jnp.int32))
  ((many, length),) = found
  return 2 * many * length * of.head_dim * k.dtype.itemsize
