"""Compute a hop by the platform's first kernel that serves the call.

Guarantees: `AutoKernel` equals `Blockwise`, which serves what every kernel
declines. `choose` reports the kernel for a call and why others do not serve it,
`rj.explain` whether a kernel is used. A kernel that fails its check, or that
RINGJAX_OFF names, is declined, see `kernel_choice`; one that is passed
explicitly runs in any case.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import (
  Blockwise,
  Gradients,
  Local,
  LocalAlgorithm,
  QGradients,
  Residuals,
  check_positive,
)
from ringjax.ops.attention.cached.code_format import CodeFormat
from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.pooled import (
  PooledView,
  SharedTiles,
  decode_pool,
)
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  KVView,
  decode_attention,
)
from ringjax.ops.attention.cost.call_shape import CallShape
from ringjax.ops.attention.kernels.cudnn import CuDNN
from ringjax.ops.attention.kernels.decode_codes_tpu import DecodeCodesTPU
from ringjax.ops.attention.kernels.decode_gpu import DecodeGPU
from ringjax.ops.attention.kernels.decode_pages_tpu import DecodePagesTPU
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.kernels.local_hops import LocalHops
from ringjax.ops.attention.kernels.prefill_pool_tpu import PrefillPoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.kernel_choice import (
  KernelChoice,
  first_serving,
  off_reason,
  register,
  relative_error,
  switched_off,
)
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.softmax import Partial, finalize
from ringjax.parallel import chips

# In order of preference.
KERNELS: dict[str, tuple[type, ...]] = {"tpu": (FlashTPU,), "gpu": (CuDNN,)}
# Kernels for decode attention over a cache.
DECODERS: dict[str, tuple[type, ...]] = {
  "tpu": (
    DecodeTPU,
    DecodeCodesTPU,
    DecodePoolTPU,
    PrefillPoolTPU,
    DecodePagesTPU,
  ),
  "gpu": (DecodeGPU,),
}


def expected(
  call: CallShape, platform: str, chip: str | None = None
) -> tuple[str, tuple[tuple[str, str], ...]]:
  """Predict which of `chips.LOCALS` `AutoKernel` uses for a call's hops.

  Args:
    call: Shapes, mask and mesh axes of the call.
    platform: Platform that runs it.
    chip: Machine of `chips.MACHINES`, if it is one of them.

  Returns:
    local: "kernel" or "blockwise".
    declined: Name of each kernel that declines such hops, and the reason.
  """
  shards = math.prod(size for _, size in call.axes)
  t, s = (-(-n // shards) for n in (call.queries, call.keys))
  b, k, g = call.batch, call.kv_heads, call.heads // call.kv_heads
  spec: Any = lambda *shape: jax.ShapeDtypeStruct(shape, call.dtype)
  x = Local(
    spec(b, k, g, t, call.head_dim),
    spec(b, k, s, call.head_dim),
    spec(b, k, s, call.value_dim),
  )
  no_coords: Any = None
  terms, context = Terms(), Context(no_coords, no_coords, call.mask)
  scores = Scores(scale=1.0)
  declined = []
  for kind in KERNELS.get(platform, ()):
    reason = off_reason(kind)
    if reason is None:
      reason = kind(chip=chip).foreseen(scores, x, terms, context)
    if reason is None:
      return "kernel", tuple(declined)
    declined.append((kind.__name__, reason))
  return "blockwise", tuple(declined)


@dataclasses.dataclass(frozen=True)
class AutoKernel(LocalAlgorithm):
  """The platform's fastest local algorithm that serves the call.

  Attributes:
    q_block: Queries of a tile; None: the algorithm's choice. A kernel that has
      no tiles of that size declines.
    kv_block: Keys of a tile.
    platform: "tpu", "gpu" or "cpu"; None is filled in by the call, from its
      mesh or its operands.
    chip: Machine of `chips.MACHINES` whose rates give a kernel's cost estimate;
      filled in with the platform.
  """

  q_block: int | None = None
  kv_block: int | None = None
  platform: str | None = None
  chip: str | None = None

  def __post_init__(self) -> None:
    check_positive(self, "q_block", "kv_block")

  def on_device(self, platform: str, kind: str, alone: bool = True) -> Any:
    """Specialize to the platform and device kind that it runs on.

    Args:
      alone: Whether it runs in a shard_map or on one device; in any other
        program XLA partitions, and no kernel can be partitioned.

    Raises:
      OptionError: If RINGJAX_OFF names no kernel.
    """
    # Refuse a misspelt name on every platform.
    switched_off()
    if platform not in KERNELS or not alone:
      blockwise = Blockwise(self.q_block, self.kv_block)
      return blockwise.on_device(platform, kind, alone)
    return dataclasses.replace(
      self, platform=platform, chip=chips.machine_name(kind)
    )

  def blocks(self, q_length: int, k_length: int) -> tuple[int, int]:
    """Tile of the preferred algorithm for calls of these lengths."""
    kinds = KERNELS.get(self.platform or jax.default_backend(), ())
    kinds = [kind for kind in kinds if off_reason(kind) is None]
    kernel = (*kinds, Blockwise)[0](self.q_block, self.kv_block)
    return kernel.blocks(q_length, k_length)

  def choose(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> KernelChoice:
    """Choose the algorithm for this call."""
    kinds = KERNELS.get(self.platform or jax.default_backend(), ())
    instances = [
      kind(self.q_block, self.kv_block, chip=self.chip) for kind in kinds
    ]
    return first_serving(
      instances,
      lambda kernel: kernel.decline(scores, x, terms, context),
      Blockwise(self.q_block, self.kv_block),
    )

  def choose_decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> KernelChoice:
    """Choose the algorithm for a few queries over the keys of a view."""
    kinds = DECODERS.get(self.platform or jax.default_backend(), ())
    return first_serving(
      [kind(self.kv_block, chip=self.chip) for kind in kinds],
      lambda kernel: kernel.decline(q, keys, args),
      Loops(self.platform or jax.default_backend()),
    )

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys into `carry`, see `Blockwise.forward`."""
    return self._chosen(x, args).forward(x, args, carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Gradients of the keys, see `Blockwise.backward`."""
    return self._chosen(x, args).backward(x, args, residuals, carry)

  def _chosen(self, x: Local, args: ScoreArgs) -> Any:
    return self.choose(args.scores, x, args.terms, args.context).algorithm

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Partial of the queries, see `views.decode_attention`."""
    return self.choose_decode(q, keys, args).algorithm.decode(q, keys, args)


@dataclasses.dataclass(frozen=True)
class Loops:
  """`views.decode_attention`, which serves every view on every platform.

  Attributes:
    platform: Platform whose tile sizes are used.
  """

  platform: str = "cpu"

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Partial of the queries, see `views.decode_attention`."""
    if getattr(keys, "shared", None) is not None:
      return decode_pool(q, keys, args, self.platform)
    return decode_attention(q, keys, args, self.platform)


def _compare_decodes(kernel: Any) -> float:
  """Error for a few queries after keys of which some slots are empty."""
  if isinstance(kernel, DecodePoolTPU):
    return max(_compare_pools(kernel, queries) for queries in (1, 5))
  if isinstance(kernel, PrefillPoolTPU):
    return max(
      _compare_pools(kernel, 130, coded=coded) for coded in (False, True)
    )
  if isinstance(kernel, DecodePagesTPU):
    return _compare_pages(kernel)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  slots, used, queries = 1100, 900, 3
  q = draw(1, 2, 2, queries, 128)
  at = _coords_before(rng.permutation(slots), used)
  keys: KVView = ContiguousView(
    draw(2, 1, 2, slots, 128),
    draw(2, 1, 2, slots, 128),
    at,
    jnp.int32(1),
  )
  if isinstance(kernel, DecodeCodesTPU):
    decoder = Decoder(_SmallIntegers(), 128, jnp.bfloat16)
    codes = lambda: jnp.asarray(_SmallIntegers.draw(rng, (2, 1, 2), slots))
    keys = EncodedView(
      codes(), codes(), at, jnp.int32(1), ((), ()), (decoder, decoder)
    )
  last = _coords_before(np.arange(used - queries, used), used)

  return _decode_error(kernel, Loops(), q, keys, last)


def _decode_error(
  kernel: Any, loops: Loops, q: jax.Array, keys: KVView, last: Coords
) -> float:
  """Largest error of a kernel, relative to loops over the same keys."""

  def results(
    algorithm: Any, q: jax.Array, keys: KVView, at: Coords
  ) -> tuple[jax.Array, jax.Array]:
    context = Context(at, keys.at, Causal())
    args = ScoreArgs(Scores(scale=128**-0.5), Terms(), context)
    return finalize(algorithm.decode(q, keys, args))

  compiled = jax.jit(results, static_argnums=0)
  return relative_error(*(compiled(f, q, keys, last) for f in (kernel, loops)))


def _compare_pages(kernel: DecodePagesTPU) -> float:
  """Error for two heads with pages of their own, some places without one."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  page, places, queries = 32, 40, 3
  table = rng.permutation(2 * places).astype(np.int32).reshape(1, 2, places)
  table[0, 1, 3] = -1
  table[0, 0, 30:] = -1
  pos = rng.permutation(2 * places * page).reshape(2 * places, page)
  used = 2 * places * page - 100
  view = PagedView(
    draw(2 * places, page, 128),
    draw(2 * places, page, 128),
    jnp.asarray(np.where(pos < used - queries, pos, -1), jnp.int32),
    None,
    jnp.asarray(table),
  )
  last = _coords_before(np.arange(used - queries, used), used)
  q = draw(2, 1, 4, queries, 128)
  return _decode_error(kernel, Loops("tpu"), q, view, last)


def _compare_pools(
  kernel: DecodePoolTPU | PrefillPoolTPU, queries: int, coded: bool = False
) -> float:
  """Error for three rows, two of which share the first of two tiles.

  Args:
    kernel: The kernel.
    queries: Queries of a row.
    coded: Whether the pages have codes of 4 bits.
  """
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  page, tile_pages = 128, 4
  table = np.arange(6 * tile_pages, dtype=np.int32).reshape(3, -1)
  table[2, :tile_pages] = table[0, :tile_pages]
  used = np.array([[700], [1000], [530]])
  pos = np.broadcast_to(
    np.arange(2 * tile_pages * page), (3, 2 * tile_pages * page)
  )
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  ints = lambda *x: jnp.asarray(x, jnp.int32)
  plan = SharedTiles(
    ints([0]),
    ints([0]),
    jnp.asarray([[[True, False, True]]]),
    ints(1),
    ints([1, 0, 1]),
  )
  view = PooledView(
    draw(2, 6 * tile_pages, 2, page, 128),
    draw(2, 6 * tile_pages, 2, page, 128),
    coords(pos, pos < used),
    jnp.asarray(table),
    jnp.int32(1),
    shared=plan if isinstance(kernel, DecodePoolTPU) else None,
  )
  if coded:
    decoder = Decoder(_SmallIntegers(), 128, jnp.bfloat16)
    lead = (2, 6 * tile_pages, 2)
    codes = lambda: jnp.asarray(_SmallIntegers.draw(rng, lead, page))
    view = dataclasses.replace(
      view, k=codes(), v=codes(), decoders=(decoder, decoder)
    )
  q = draw(3, 2, 4, queries, 128)
  end = used - queries + np.arange(queries)
  last = coords(end, end >= 0)

  return _decode_error(kernel, Loops("tpu"), q, view, last)


@dataclasses.dataclass(frozen=True)
class _SmallIntegers:
  """A codec of vectors of 128 elements: 4 bits each, a scale and a zero."""

  @staticmethod
  def draw(
    rng: np.random.Generator, lead: tuple[int, ...], slots: int
  ) -> np.ndarray:
    """Codes of random vectors, int8 [*lead, 72, slots]."""
    codes = rng.integers(0, 256, (*lead, slots, 72))
    half = np.stack(
      [rng.uniform(0.1, 0.3, (*lead, slots)), rng.normal(size=(*lead, slots))],
      -1,
    ).astype(np.float16)
    codes = codes.astype(np.uint8)
    codes[..., 64:68] = half.view(np.uint8)
    return np.swapaxes(codes, -1, -2).view(np.int8)

  def code_format(self, dim: int) -> CodeFormat:
    return CodeFormat(dim=dim, bits=4, halves=2)

  def decode(
    self, data: jax.Array, dim: int, dtype: DTypeLike, constants: PyTree = ()
  ) -> jax.Array:
    del constants
    low, high = data[..., : dim // 2] & 15, data[..., : dim // 2] >> 4
    codes = jnp.concatenate([low, high], -1).astype(jnp.float32)
    half = lax.bitcast_convert_type(
      data[..., 64:68].reshape(*data.shape[:-1], 2, 2), jnp.float16
    ).astype(jnp.float32)
    return (codes * half[..., :1] + half[..., 1:]).astype(dtype)


def _coords_before(pos: np.ndarray, used: int) -> Coords:
  """Coordinates [1, n] of the tokens before `used`; others are empty."""
  seg = (pos < used).astype(np.int32)
  return Coords(jnp.asarray(pos[None], jnp.int32), jnp.asarray(seg[None]))


def _compare_hops(kernel: Any) -> float:
  """Error of values and gradients of three hops."""
  rng = np.random.default_rng(0)
  length, dim = 256, 128
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  # Three hops: keys that all queries see, each query's own key with those
  # before it, and those before it alone (every other token, as two stripes have
  # them).
  x = Local(
    draw(1, 1, 2, length, dim),
    draw(1, 1, 3 * length, dim),
    draw(1, 1, 3 * length, dim),
  )
  rows = np.arange(length, dtype=np.int32)
  query_pos = length + 2 * rows
  at = [
    Coords(jnp.asarray(pos)[None], jnp.ones((1, len(pos)), jnp.int32))
    for pos in (query_pos, np.concatenate([rows, query_pos, query_pos + 1]))
  ]
  do = draw(*x.q.shape)
  dlse = jnp.asarray(rng.normal(size=x.q.shape[:4]), jnp.float32)

  def results(algorithm: Any, x: Local, q: Coords, k: Coords) -> Any:
    call = lambda x: attend(
      LocalHops(algorithm, 3),
      Scores(scale=dim**-0.5),
      x,
      Terms(),
      Context(q, k, Causal()),
    )
    outputs, pull = jax.vjp(call, x)
    return *outputs, *pull((do, dlse))[0]

  # Positions are operands: the kind of a hop has to be found at run time.
  compiled = jax.jit(results, static_argnums=0)
  return relative_error(*(compiled(f, x, *at) for f in (kernel, Blockwise())))


register(KERNELS, _compare_hops)
register(DECODERS, _compare_decodes)
