"""Compute a hop by the platform's first kernel that serves the call.

Guarantees: `AutoKernel` equals `Blockwise`, which serves what every kernel
declines. `choose` reports the kernel for a call and why others do not serve it,
`rj.explain` whether a kernel is used. A kernel that fails its check on this
machine is declined with one line in the log, and so is one that the environment
variable RINGJAX_OFF names ("flash_tpu,decode_pool_tpu"), which is read when a
program is traced. A kernel that is passed explicitly runs in any case.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.checks import one_of
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
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.kernels.local_hops import LocalHops
from ringjax.ops.attention.kernels.prefill_pool_tpu import PrefillPoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.block_product_tpu import BlockCodes, BlockProductTPU
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.softmax import Partial, finalize
from ringjax.parallel import chips, collectives
from ringjax.parallel.call_sharding import product_device

_log = logging.getLogger(__name__)

# In order of preference.
KERNELS: dict[str, tuple[type, ...]] = {"tpu": (FlashTPU,), "gpu": (CuDNN,)}
# Kernels for decode attention over a cache.
DECODERS: dict[str, tuple[type, ...]] = {
  "tpu": (DecodeTPU, DecodeCodesTPU, DecodePoolTPU, PrefillPoolTPU),
  "gpu": (DecodeGPU,),
}
# Kernels for products of a few rows with weights of block codes.
PRODUCTS: dict[str, tuple[type, ...]] = {"tpu": (BlockProductTPU,)}
# Environment variable with the names of kernels that `AutoKernel` leaves out.
OFF_VARIABLE = "RINGJAX_OFF"


def kernel_name(kind: type) -> str:
  """Name of a kernel in RINGJAX_OFF, which is that of its file: "flash_tpu"."""
  return kind.__module__.rpartition(".")[2]


def switched_off() -> frozenset[str]:
  """Names of the kernels that RINGJAX_OFF switches off.

  Raises:
    OptionError: If it names no kernel.
  """
  return _parse_off(os.environ.get(OFF_VARIABLE, ""))


@functools.cache
def _parse_off(text: str) -> frozenset[str]:
  kinds = (*KERNELS.values(), *DECODERS.values(), *PRODUCTS.values())
  all_names = sorted({kernel_name(kind) for row in kinds for kind in row})
  words = [word.strip() for word in text.split(",")]
  names = frozenset(
    one_of(
      OFF_VARIABLE, word, all_names, remedy="pass names with commas between"
    )
    for word in words
    if word
  )
  if names:
    # Cached, so once in a process.
    _log.warning(
      "%s switches off %s; XLA's loops are used",
      OFF_VARIABLE,
      ", ".join(sorted(names)),
    )
  return names


def _off_reason(kind: type) -> str | None:
  if kernel_name(kind) in switched_off():
    return f"switched off by {OFF_VARIABLE}"
  return None


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
    reason = _off_reason(kind)
    if reason is None:
      reason = kind(chip=chip).foreseen(scores, x, terms, context)
    if reason is None:
      return "kernel", tuple(declined)
    declined.append((kind.__name__, reason))
  return "blockwise", tuple(declined)


class KernelChoice(NamedTuple):
  """A local algorithm, and the reasons of the kernels that declined."""

  algorithm: Any
  declined: tuple[tuple[str, str], ...]

  def __str__(self) -> str:
    reasons = "".join(f"; not {n}: {reason}" for n, reason in self.declined)
    return f"{type(self.algorithm).__name__}{reasons}"


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
    kinds = [kind for kind in kinds if _off_reason(kind) is None]
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
    return _first_serving(
      instances,
      lambda kernel: kernel.decline(scores, x, terms, context),
      Blockwise(self.q_block, self.kv_block),
    )

  def choose_decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> KernelChoice:
    """Choose the algorithm for a few queries over the keys of a view."""
    kinds = DECODERS.get(self.platform or jax.default_backend(), ())
    return _first_serving(
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


def choose_product(x: Float[Array, "N I"], weight: BlockCodes) -> KernelChoice:
  """Choose the kernel for x . weight; its algorithm is None for XLA's loops.

  In a model's call the call's mesh gives the platform, see `on_mesh`.
  """
  platform, kind, alone = product_device((x,))
  kernels = [
    kernel(chip=chips.machine_name(kind))
    for kernel in PRODUCTS.get(platform, ())
  ]
  whole = lambda kernel: (
    kernel.decline(x, weight)
    if alone
    else "XLA cuts no kernel over several devices"
  )
  return _first_serving(kernels, whole, None)


def _first_serving(
  kernels: Sequence[Any], decline: Callable[[Any], str | None], fallback: Any
) -> KernelChoice:
  """Choose the first kernel that serves, else `fallback`."""
  # Refuse a misspelt name where a platform has no kernels, too.
  switched_off()
  declined = []
  axis = collectives.partitioned()
  for kernel in kernels:
    reason = _off_reason(type(kernel)) or decline(kernel)
    if reason is None and axis is not None:
      reason = f"XLA cuts no kernel along {axis}"
    reason = reason or _fault(type(kernel))
    if reason is None:
      return KernelChoice(kernel, tuple(declined))
    declined.append((type(kernel).__name__, reason))
  return KernelChoice(fallback, tuple(declined))


@functools.cache
def _fault(kind: type) -> str | None:
  """Check a kernel on this machine; return what is wrong, or None.

  It runs once per process, mostly while another function is traced: hence in a
  thread, which has no part in that trace. Without a device of the platform, as
  in compiling ahead of time, nothing is checked.
  """
  tables = (*KERNELS.items(), *DECODERS.items(), *PRODUCTS.items())
  platform = next(p for p, kinds in tables if kind in kinds)
  try:
    device = jax.local_devices(backend=platform)[0]
  except RuntimeError:
    return None
  try:
    with futures.ThreadPoolExecutor(1) as thread:
      error = thread.submit(_largest_error, kind(), device, platform).result()
  except Exception as e:
    error, reason = None, f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
  else:
    reason = (
      None if error <= _ALLOWED else f"off by {error:.2g} in a small case"
    )
  if reason is not None:
    _log.warning(
      "%s does not work on %s (%s); XLA's loops are used",
      kind.__name__,
      device.device_kind,
      reason,
    )
  return reason


# Tolerance for bfloat16 operands, relative to the largest number.
_ALLOWED = 0.02


def _largest_error(kernel: Any, device: jax.Device, platform: str) -> float:
  """Largest relative error of a kernel in a few small cases."""
  if type(kernel) in PRODUCTS.get(platform, ()):
    with jax.default_device(device):
      return _compare_products(kernel)
  decodes = type(kernel) in DECODERS.get(platform, ())
  with jax.default_device(device):
    return _compare_decodes(kernel) if decodes else _compare_hops(kernel)


def _compare_decodes(kernel: Any) -> float:
  """Error for a few queries after keys of which some slots are empty."""
  if isinstance(kernel, DecodePoolTPU):
    return max(_compare_pools(kernel, queries) for queries in (1, 5))
  if isinstance(kernel, PrefillPoolTPU):
    return max(
      _compare_pools(kernel, 130, coded=coded) for coded in (False, True)
    )
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

  def results(
    algorithm: Any, q: jax.Array, keys: KVView, at: Coords
  ) -> tuple[jax.Array, jax.Array]:
    context = Context(at, keys.at, Causal())
    args = ScoreArgs(Scores(scale=128**-0.5), Terms(), context)
    return finalize(algorithm.decode(q, keys, args))

  compiled = jax.jit(results, static_argnums=0)
  return _relative_error(
    *(compiled(f, q, keys, last) for f in (kernel, Loops()))
  )


def _compare_products(kernel: Any) -> float:
  """Error for the second of two maps of 4 bits in groups of 64."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  codes = jnp.asarray(rng.integers(0, 256, (2, 5, 32, 200)), jnp.uint8)
  step, least = draw(2, 5, 200), draw(2, 5, 200)
  x = jnp.asarray(rng.normal(size=(3, 320)), jnp.bfloat16)
  levels = jnp.concatenate([codes >> 4, codes & 15], 2)[1]
  numbers = levels.astype(jnp.float32) * step[1][:, None] + least[1][:, None]
  exact = jnp.matmul(
    x.astype(jnp.float32),
    numbers.reshape(320, 200),
    precision=lax.Precision.HIGHEST,
  )

  def multiply(x: jax.Array, *arrays: jax.Array) -> jax.Array:
    names = ("codes", "step", "least")
    weight = BlockCodes(
      **dict(zip(names, arrays, strict=True)),
      index=(jnp.int32(1),),
      levels=tuple(range(16)),
    )
    return kernel.product(x, weight)

  y = jax.jit(multiply)(x, codes, step, least)
  return _relative_error((y,), (exact,))


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

  def results(
    algorithm: Any, q: jax.Array, keys: PooledView
  ) -> tuple[jax.Array, jax.Array]:
    context = Context(last, keys.at, Causal())
    args = ScoreArgs(Scores(scale=128**-0.5), Terms(), context)
    return finalize(algorithm.decode(q, keys, args))

  compiled = jax.jit(results, static_argnums=0)
  return _relative_error(
    *(compiled(f, q, view) for f in (kernel, Loops("tpu")))
  )


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


def _relative_error(
  results: Sequence[jax.Array], references: Sequence[jax.Array]
) -> float:
  """Largest error, relative to the largest number; infinity for NaN."""
  float32 = lambda a: a.astype(jnp.float32)
  errors = [
    jnp.max(jnp.abs(float32(a) - float32(b))) / jnp.max(jnp.abs(float32(b)))
    for a, b in zip(results, references, strict=True)
  ]
  worst = float(jnp.max(jnp.stack(errors)))
  return worst if worst == worst else float("inf")


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
  return _relative_error(*(compiled(f, x, *at) for f in (kernel, Blockwise())))
