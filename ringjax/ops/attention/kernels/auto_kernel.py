"""Computes a hop by the platform's first kernel that serves the call.

Guarantees: `AutoKernel` equals `Blockwise`, which serves what every kernel
declines. `choose` says what serves a call and why others do not, `rj.explain`
whether it goes by a kernel; one that fails its check on this machine is
declined with one line in the log.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

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
from ringjax.ops.attention.call_shape import CallShape
from ringjax.ops.attention.code_format import CodeFormat
from ringjax.ops.attention.kernels.cudnn import CuDNN
from ringjax.ops.attention.kernels.decode_codes_tpu import DecodeCodesTPU
from ringjax.ops.attention.kernels.decode_gpu import DecodeGPU
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.kernels.local_hops import LocalHops
from ringjax.ops.attention.pooled import PooledView, SharedTiles, decode_pool
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  KVView,
  decode_attention,
)
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.softmax import Partial, finalize
from ringjax.parallel import chips, collectives

_log = logging.getLogger(__name__)

# In order of preference.
KERNELS: dict[str, tuple[type, ...]] = {"tpu": (FlashTPU,), "gpu": (CuDNN,)}
# Those for a few queries that read the keys of a cache.
DECODERS: dict[str, tuple[type, ...]] = {
  "tpu": (DecodeTPU, DecodeCodesTPU, DecodePoolTPU),
  "gpu": (DecodeGPU,),
}


def expected(
  call: CallShape, platform: str, chip: str | None = None
) -> tuple[str, tuple[tuple[str, str], ...]]:
  """What of `chips.LOCALS` `AutoKernel` is there for a call's hops, as a rule.

  Args:
    call: what is to be computed.
    platform: where.
    chip: the machine, of `chips.MACHINES`, where it is one of them.

  Returns:
    (local, why each of the platform's kernels declines such hops).
  """
  shards = math.prod(size for _, size in call.axes)
  t, s = (-(-n // shards) for n in (call.queries, call.keys))
  b, k, g = call.batch, call.kv_heads, call.heads // call.kv_heads
  like: Any = lambda *shape: jax.ShapeDtypeStruct(shape, call.dtype)
  x = Local(
    like(b, k, g, t, call.head_dim),
    like(b, k, s, call.head_dim),
    like(b, k, s, call.value_dim),
  )
  nowhere: Any = None
  terms, context = Terms(), Context(nowhere, nowhere, call.mask)
  scores = Scores(scale=1.0)
  declined = []
  for kind in KERNELS.get(platform, ()):
    why = kind(chip=chip).foreseen(scores, x, terms, context)
    if why is None:
      return "kernel", tuple(declined)
    declined.append((kind.__name__, why))
  return "blockwise", tuple(declined)


class KernelChoice(NamedTuple):
  """A local algorithm, and why those before it were declined."""

  algorithm: Any
  declined: tuple[tuple[str, str], ...]

  def __str__(self) -> str:
    reasons = "".join(f"; not {n}: {why}" for n, why in self.declined)
    return f"{type(self.algorithm).__name__}{reasons}"


@dataclasses.dataclass(frozen=True)
class AutoKernel(LocalAlgorithm):
  """The local algorithm that is fastest on the platform.

  Attributes:
    q_block: queries of a tile; None leaves it to the algorithm. A kernel that
      has no tiles of that size declines.
    kv_block: keys of a tile.
    platform: "tpu", "gpu" or "cpu"; None is filled in by the call, from its
      mesh or its operands.
    chip: the machine, of `chips.MACHINES`, by whose rates a kernel tells the
      compiler its cost; filled in with the platform.
  """

  q_block: int | None = None
  kv_block: int | None = None
  platform: str | None = None
  chip: str | None = None

  def __post_init__(self) -> None:
    check_positive(self, "q_block", "kv_block")

  def on_device(self, platform: str, kind: str, alone: bool = True) -> Any:
    """The same where it is known what it runs on.

    Args:
      alone: whether it is a shard_map's or one device's; XLA would cut
        another program, and cuts no kernel.
    """
    if platform not in KERNELS or not alone:
      loops = Blockwise(self.q_block, self.kv_block)
      return loops.on_device(platform, kind, alone)
    return dataclasses.replace(self, platform=platform, chip=chips.known(kind))

  def blocks(self, q_length: int, k_length: int) -> tuple[int, int]:
    """The tile of what serves calls of this length as a rule."""
    kinds = KERNELS.get(self.platform or jax.default_backend(), (Blockwise,))
    kernel = kinds[0](self.q_block, self.kv_block)
    return kernel.blocks(q_length, k_length)

  def choose(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> KernelChoice:
    """What serves this call."""
    kinds = KERNELS.get(self.platform or jax.default_backend(), ())
    made = [kind(self.q_block, self.kv_block, chip=self.chip) for kind in kinds]
    return _first(
      made,
      lambda kernel: kernel.decline(scores, x, terms, context),
      Blockwise(self.q_block, self.kv_block),
    )

  def choose_decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> KernelChoice:
    """What serves a few queries that read the keys of a view."""
    kinds = DECODERS.get(self.platform or jax.default_backend(), ())
    return _first(
      [kind(self.kv_block, chip=self.chip) for kind in kinds],
      lambda kernel: kernel.decline(q, keys, args),
      Loops(self.platform or jax.default_backend()),
    )

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """See `Blockwise.forward`."""
    return self._chosen(x, args).forward(x, args, carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """See `Blockwise.backward`."""
    return self._chosen(x, args).backward(x, args, residuals, carry)

  def _chosen(self, x: Local, args: ScoreArgs) -> Any:
    return self.choose(args.scores, x, args.terms, args.context).algorithm

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """See `views.decode_attention`."""
    return self.choose_decode(q, keys, args).algorithm.decode(q, keys, args)


@dataclasses.dataclass(frozen=True)
class Loops:
  """`views.decode_attention`, which serves every view on every platform.

  Attributes:
    platform: for which its tiles are.
  """

  platform: str = "cpu"

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """See `views.decode_attention`."""
    if getattr(keys, "shared", None) is not None:
      return decode_pool(q, keys, args, self.platform)
    return decode_attention(q, keys, args, self.platform)


def _first(
  kernels: Sequence[Any], decline: Callable[[Any], str | None], rest: Any
) -> KernelChoice:
  """The first kernel that serves, else `rest`."""
  declined = []
  cut = collectives.partitioned()
  for kernel in kernels:
    why = decline(kernel)
    if why is None and cut is not None:
      why = f"XLA cuts no kernel along {cut}"
    why = why or _fault(type(kernel))
    if why is None:
      return KernelChoice(kernel, tuple(declined))
    declined.append((type(kernel).__name__, why))
  return KernelChoice(rest, tuple(declined))


@functools.cache
def _fault(kind: type) -> str | None:
  """What is wrong with a kernel on this machine, or None.

  It is tried once a process, mostly while another function is traced: hence in
  a thread, which has no part in that trace. Without a device of the platform,
  as in compiling ahead of time, nothing is tried.
  """
  both = (*KERNELS.items(), *DECODERS.items())
  platform = next(p for p, kinds in both if kind in kinds)
  try:
    device = jax.local_devices(backend=platform)[0]
  except RuntimeError:
    return None
  try:
    with futures.ThreadPoolExecutor(1) as thread:
      off = thread.submit(_error, kind(), device, platform).result()
  except Exception as e:
    off, why = None, f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
  else:
    why = None if off <= _ALLOWED else f"off by {off:.2g} in a small case"
  if why is not None:
    _log.warning(
      "%s does not work on %s (%s); XLA's loops are used",
      kind.__name__,
      device.device_kind,
      why,
    )
  return why


# Of bfloat16 operands, relative to the largest number.
_ALLOWED = 0.02


def _error(kernel: Any, device: jax.Device, platform: str) -> float:
  """How far a kernel's results in a few small cases are off."""
  decodes = type(kernel) in DECODERS.get(platform, ())
  with jax.default_device(device):
    return _compare_decodes(kernel) if decodes else _compare_hops(kernel)


def _compare_decodes(kernel: Any) -> float:
  """Of a few queries behind keys of which some slots are empty."""
  if isinstance(kernel, DecodePoolTPU):
    return _compare_pools(kernel)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  slots, used, queries = 1100, 900, 3
  q = draw(1, 2, 2, queries, 128)
  at = _at(rng.permutation(slots), used)
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
  last = _at(np.arange(used - queries, used), used)

  def results(
    algorithm: Any, q: jax.Array, keys: KVView, at: Coords
  ) -> tuple[jax.Array, jax.Array]:
    context = Context(at, keys.at, Causal())
    args = ScoreArgs(Scores(scale=128**-0.5), Terms(), context)
    return finalize(algorithm.decode(q, keys, args))

  compiled = jax.jit(results, static_argnums=0)
  return _far(*(compiled(f, q, keys, last) for f in (kernel, Loops())))


def _compare_pools(kernel: DecodePoolTPU) -> float:
  """Of three rows, two of which share the first of two tiles."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  page, each = 128, 4
  table = np.arange(6 * each, dtype=np.int32).reshape(3, -1)
  table[2, :each] = table[0, :each]
  used = np.array([[700], [1000], [530]])
  pos = np.broadcast_to(np.arange(2 * each * page), (3, 2 * each * page))
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
    draw(2, 6 * each, 2, page, 128),
    draw(2, 6 * each, 2, page, 128),
    coords(pos, pos < used),
    jnp.asarray(table),
    jnp.int32(1),
    shared=plan,
  )
  q, last = draw(3, 2, 4, 1, 128), coords(used - 1, used > 0)

  def results(
    algorithm: Any, q: jax.Array, keys: PooledView
  ) -> tuple[jax.Array, jax.Array]:
    context = Context(last, keys.at, Causal())
    args = ScoreArgs(Scores(scale=128**-0.5), Terms(), context)
    return finalize(algorithm.decode(q, keys, args))

  compiled = jax.jit(results, static_argnums=0)
  return _far(*(compiled(f, q, view) for f in (kernel, Loops("tpu"))))


@dataclasses.dataclass(frozen=True)
class _SmallIntegers:
  """A codec of vectors of 128 numbers: 4 bits each, a scale and a zero."""

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


def _at(pos: np.ndarray, used: int) -> Coords:
  """Coordinates [1, n] of the tokens before `used`; others are empty."""
  seg = (pos < used).astype(np.int32)
  return Coords(jnp.asarray(pos[None], jnp.int32), jnp.asarray(seg[None]))


def _far(ours: Sequence[jax.Array], theirs: Sequence[jax.Array]) -> float:
  """The largest error, of the largest number; infinity for what is none."""
  single = lambda a: a.astype(jnp.float32)
  far = [
    jnp.max(jnp.abs(single(a) - single(b))) / jnp.max(jnp.abs(single(b)))
    for a, b in zip(ours, theirs, strict=True)
  ]
  worst = float(jnp.max(jnp.stack(far)))
  return worst if worst == worst else float("inf")


def _compare_hops(kernel: Any) -> float:
  """Values and gradients of three hops."""
  rng = np.random.default_rng(0)
  length, wide = 256, 128
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  # Three hops: keys that all see, each query's own with those before it, and
  # those before it alone (every other token, as two stripes have them).
  x = Local(
    draw(1, 1, 2, length, wide),
    draw(1, 1, 3 * length, wide),
    draw(1, 1, 3 * length, wide),
  )
  rows = np.arange(length, dtype=np.int32)
  own = length + 2 * rows
  at = [
    Coords(jnp.asarray(pos)[None], jnp.ones((1, len(pos)), jnp.int32))
    for pos in (own, np.concatenate([rows, own, own + 1]))
  ]
  do = draw(*x.q.shape)
  dlse = jnp.asarray(rng.normal(size=x.q.shape[:4]), jnp.float32)

  def results(algorithm: Any, x: Local, q: Coords, k: Coords) -> Any:
    call = lambda x: attend(
      LocalHops(algorithm, 3),
      Scores(scale=wide**-0.5),
      x,
      Terms(),
      Context(q, k, Causal()),
    )
    found, pull = jax.vjp(call, x)
    return *found, *pull((do, dlse))[0]

  # Positions are operands: what a hop is has to be found at run time.
  compiled = jax.jit(results, static_argnums=0)
  return _far(*(compiled(f, x, *at) for f in (kernel, Blockwise())))
