"""Cases of attention, their programs, and their results in float64.

Guarantees: expected results are those of `reference` in float64, from operands
as they are rounded, on the host's CPU where JAX has it: outputs, log-sum-exps,
and all gradients of hops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringjax.kv.codecs import CodeBook, Hadamard, Integers
from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cached.code_format import as_stored, stored_codes
from ringjax.ops.attention.cached.pooled import PooledView, pool_tile
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  KVView,
  UnrotatedView,
)
from ringjax.ops.attention.kernels.local_hops import LocalHops
from ringjax.ops.attention.reference import reference
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Mask, SameSegment, Window
from ringjax.ops.rope import Rope, Rotation
from ringjax.ops.softmax import finalize
from ringjax.serve.prefix.shared_rows import shared_tiles

KV_HEADS, GROUPS = 2, 2
OUTPUTS = ("out", "lse")
GRADIENTS = ("dq", "dk", "dv")

Results = dict[str, np.ndarray]


# ---------------------------------------------------------------------------
# Hops
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopCase:
  """Hops of a shard of a ring, with gradients.

  Attributes:
    name: Name of the case.
    dtype: Dtype of queries, keys and values.
    dim: Dimension of a head.
    mask: Mask of the call. Each query sees a key.
    hops: Number of hops, into which the keys are split.
    q_at: Positions and segments of the queries, int32 [2, T].
    k_at: Positions and segments of the keys, int32 [2, S].
  """

  name: str
  dtype: str
  dim: int
  mask: Mask
  hops: int
  q_at: np.ndarray
  k_at: np.ndarray


def hop_cases() -> tuple[HopCase, ...]:
  """Hops of each kind of mask, as strategies make them."""
  rows = np.arange(256, dtype=np.int32)
  # Keys that all queries see; each query's own key and those before it; those
  # before it alone, as two stripes have them.
  query_pos = 256 + 2 * rows
  key_pos = np.concatenate([rows, query_pos, query_pos + 1])
  single = lambda pos: np.stack([pos, np.ones_like(pos)])
  documents = np.stack([np.arange(384), 1 + np.arange(384) // 200])
  documents = documents.astype(np.int32)
  ring: Any = dict(
    mask=Causal(), hops=3, q_at=single(query_pos), k_at=single(key_pos)
  )
  return (
    HopCase(name="ring hops, bfloat16", dtype="bfloat16", dim=128, **ring),
    HopCase(name="ring hops, float32", dtype="float32", dim=64, **ring),
    HopCase(
      name="documents, window",
      dtype="bfloat16",
      dim=64,
      mask=Causal() & SameSegment() & Window(100),
      hops=1,
      q_at=documents,
      k_at=documents,
    ),
  )


class HopOperands(NamedTuple):
  """Operands of a hop case: queries, keys, values, and two cotangents."""

  x: Local
  q_at: Coords
  k_at: Coords
  d_out: Float[Array, "B K G T J"]
  d_lse: Float[Array, "B K G T"]


def hop_operands(case: HopCase) -> HopOperands:
  """Random operands, the same each time."""
  rng = np.random.default_rng(0)
  t, s = case.q_at.shape[1], case.k_at.shape[1]
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), case.dtype)
  at = lambda pair: Coords(*(jnp.asarray(row[None]) for row in pair))
  q_shape = (1, KV_HEADS, GROUPS, t, case.dim)
  return HopOperands(
    Local(
      draw(*q_shape),
      draw(1, KV_HEADS, s, case.dim),
      draw(1, KV_HEADS, s, case.dim),
    ),
    at(case.q_at),
    at(case.k_at),
    draw(*q_shape),
    jnp.asarray(rng.normal(size=q_shape[:4]), jnp.float32),
  )


def hop_args(case: HopCase, operands: HopOperands) -> ScoreArgs:
  """Score function of the hops."""
  context = Context(operands.q_at, operands.k_at, case.mask)
  return ScoreArgs(Scores(scale=case.dim**-0.5), Terms(), context)


class Program(NamedTuple):
  """A compiled function and its arguments."""

  function: jax.stages.Wrapped
  arguments: tuple[Any, ...]

  def run(self, names: tuple[str, ...]) -> Results:
    """Calls the function, whose outputs have these names."""
    return _named(names, self.function(*self.arguments))


def hop_program(algorithm: Any, case: HopCase) -> Program:
  """The program of a local algorithm: outputs and gradients."""

  # Positions are operands: the kind of a hop has to be found at run time.
  @jax.jit
  def run(operands: HopOperands) -> tuple[jax.Array, ...]:
    args = hop_args(case, operands)
    call = lambda x: attend(
      LocalHops(algorithm, case.hops), args.scores, x, args.terms, args.context
    )
    outputs, pull = jax.vjp(call, operands.x)
    return *outputs, *pull((operands.d_out, operands.d_lse))[0]

  return Program(run, (hop_operands(case),))


def hop_truth(case: HopCase) -> Results:
  """Expected outputs and gradients, in float64."""
  operands = jax.tree.map(np.asarray, hop_operands(case))

  @jax.jit
  def run(operands: HopOperands) -> tuple[jax.Array, ...]:
    x, *_ = operands
    call = lambda q, k, v: reference(
      q, k, v, case.mask, operands.q_at, operands.k_at
    )
    kv_heads = lambda a: jnp.swapaxes(a, 1, 2)
    (out, lse), pull = jax.vjp(call, _by_head(x.q), *map(kv_heads, x[1:]))
    dq, dk, dv = pull((_by_head(operands.d_out), _by_head(operands.d_lse)))
    return *map(_grouped, (out, lse, dq)), kv_heads(dk), kv_heads(dv)

  with _in_float64():
    return _named(OUTPUTS + GRADIENTS, run(_wide(operands)))


# ---------------------------------------------------------------------------
# Queries over a cache
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
  """A few queries over the keys of a cache.

  Attributes:
    name: Name of the case.
    q: Queries, [B, K, G, T, H], in the basis of the keys.
    keys: View of the keys and values.
    args: Score function, mask and coordinates.
    k: Keys of the view as numbers, float64 [B, K, S, H].
    v: Values of the view as numbers, float64 [B, K, S, J].
  """

  name: str
  q: Float[Array, "B K G T H"]
  keys: KVView
  args: ScoreArgs
  k: np.ndarray
  v: np.ndarray


_SLOTS, _USED, _DIM = 1100, 900, 128


def decode_cases(platform: str) -> Iterator[Callable[[], DecodeCase]]:
  """Functions that make the cases, each with its kind of cache.

  Args:
    platform: Platform whose layouts of codes and tiles of pages are used.
  """
  yield functools.partial(_plain, "bfloat16", 3, Causal())
  yield functools.partial(_plain, "float32", 1, Causal() & Window(300))
  codecs: Any = (
    ("int8", Integers(bits=8)),
    ("int4", Integers(bits=4)),
    ("hadamard4", Hadamard(bits=4)),
    ("book of 3 bits", CodeBook(bits=3, by="token")),
  )
  for name, codec in codecs:
    yield functools.partial(_encoded, name, codec, codec, platform)
  yield functools.partial(
    _encoded,
    "nuq3",
    CodeBook(bits=3),
    CodeBook(bits=3, by="token"),
    platform,
    rotation=Rotation(rope=Rope(theta=1e4, dims=_DIM)),
  )
  yield functools.partial(_pages, platform)
  yield functools.partial(_pages, platform, queries=130)


def decode_program(algorithm: Any, case: DecodeCase) -> Program:
  """The program of an algorithm of `decode`: outputs."""
  # The score function is no array.
  arrays = (case.q, case.keys, case.args.context)
  fixed = case.args
  call = jax.jit(
    lambda q, keys, context: finalize(
      algorithm.decode(q, keys, fixed._replace(context=context))
    )
  )
  return Program(call, arrays)


def decode_truth(case: DecodeCase) -> Results:
  """Expected outputs, in float64."""

  @jax.jit
  def run(
    q: jax.Array, k: jax.Array, v: jax.Array, context: Context
  ) -> tuple[jax.Array, ...]:
    kv_heads = lambda a: jnp.swapaxes(a, 1, 2)
    outputs = reference(
      _by_head(q),
      kv_heads(k),
      kv_heads(v),
      context.mask,
      context.q,
      context.k,
    )
    return tuple(map(_grouped, outputs))

  arrays = (case.q, case.k, case.v, case.args.context)
  arrays = jax.tree.map(np.asarray, arrays)
  with _in_float64():
    return _named(OUTPUTS, run(*_wide(arrays)))


def _cache_coords(
  rng: np.random.Generator, queries: int
) -> tuple[Coords, Coords]:
  """Coordinates of the last queries, and of slots of which some are empty."""
  pos = rng.permutation(_SLOTS)
  last = np.arange(_USED - queries, _USED)
  at = lambda pos: Coords(
    jnp.asarray(pos[None], jnp.int32),
    jnp.asarray((pos < _USED)[None], jnp.int32),
  )
  return at(last), at(pos)


def _score_args(q_at: Coords, k_at: Coords, mask: Mask) -> ScoreArgs:
  scores = Scores(scale=_DIM**-0.5)
  return ScoreArgs(scores, Terms(), Context(q_at, k_at, mask))


def _plain(dtype: str, queries: int, mask: Mask) -> DecodeCase:
  """Keys as numbers, in the second of two layers."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  q_at, k_at = _cache_coords(rng, queries)
  k, v = (draw(2, 1, KV_HEADS, _SLOTS, _DIM) for _ in range(2))
  layer = lambda x: np.asarray(x[1], np.float64)
  window = "" if isinstance(mask, Causal) else ", window"
  return DecodeCase(
    name=f"cache, {dtype}{window}",
    q=draw(1, KV_HEADS, GROUPS, queries, _DIM),
    keys=ContiguousView(k, v, k_at, jnp.int32(1)),
    args=_score_args(q_at, k_at, mask),
    k=layer(k),
    v=layer(v),
  )


def _encoded(
  name: str,
  k_codec: Any,
  v_codec: Any,
  platform: str,
  rotation: Rotation | None = None,
) -> DecodeCase:
  """Keys and values as codes, in the second of two layers."""
  rng = np.random.default_rng(0)
  q_at, k_at = _cache_coords(rng, 2)
  q = jnp.asarray(rng.normal(size=(1, KV_HEADS, GROUPS, 2, _DIM)), jnp.bfloat16)
  sides = [
    _codes(rng, codec, platform, rotation is not None)
    for codec in (k_codec, v_codec)
  ]
  (k_codes, k_constants), (v_codes, v_constants) = sides

  def aligned(dtype: DTypeLike, q: jax.Array) -> tuple[KVView, jax.Array]:
    decoders = (
      Decoder(k_codec, _DIM, dtype),
      Decoder(v_codec, _DIM, dtype),
    )
    view: Any = EncodedView(
      k_codes,
      v_codes,
      k_at,
      jnp.int32(1),
      (k_constants, v_constants),
      decoders,
    )
    if rotation is not None:
      view = UnrotatedView(view, rotation)
    in_basis = view.aligned(q)
    return in_basis.view, in_basis.q

  keys, q = aligned(jnp.bfloat16, q)
  with _on_host():
    numbers, _ = aligned(jnp.float32, jnp.asarray(q, jnp.float32))
    k, v = jax.jit(lambda view: view.tile(0, _SLOTS))(
      _on_default_device(numbers)
    )
  return DecodeCase(
    name=f"codes, {name}",
    q=q,
    keys=keys,
    args=_score_args(q_at, k_at, Causal()),
    k=np.asarray(k, np.float64),
    v=np.asarray(v, np.float64),
  )


def _codes(
  rng: np.random.Generator, codec: Any, platform: str, by_channel: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Codes of random vectors as a cache stores them, and their constants."""
  x = rng.normal(size=(2, 1, KV_HEADS, _SLOTS, _DIM))
  constants: list[np.ndarray] = []
  if isinstance(codec, CodeBook):
    levels = np.sort(rng.normal(size=(KV_HEADS, 2**codec.bits)), 1) / 2
    constants = [levels]
    if by_channel and codec.by == "channel":
      shape = (KV_HEADS, _DIM)
      scale, zero = rng.uniform(0.2, 2, shape), rng.normal(size=shape)
      constants = [scale, zero, levels]
      if codec.sinks:
        sink = zero + scale * 4 * rng.choice((-1, 1), shape)
        constants[2:2] = [sink, rng.uniform(0.1, 0.5, (KV_HEADS, 1))]
      x = x * scale[:, None] + zero[:, None]
  with _on_host():
    arrays = tuple(jnp.asarray(c, jnp.float32) for c in constants)
    encode = jax.jit(lambda x: codec.encode(x, arrays))
    layers = [encode(jnp.asarray(layer, jnp.bfloat16)) for layer in x]
    codes = jnp.stack(layers)
    like = stored_codes(codes.shape[:3], _SLOTS, codes.shape[4], platform)
    stored = np.asarray(as_stored(codes, jnp.zeros(*like)))
  return jnp.asarray(stored), tuple(jnp.asarray(np.asarray(c)) for c in arrays)


def _pages(platform: str, queries: int = 1) -> DecodeCase:
  """Three rows of pages; two rows share the pages of their first tile.

  Only a call of one query a row has a plan of the tiles that rows share.
  """
  rng = np.random.default_rng(0)
  page = 128
  tile = pool_tile(page, platform)
  row_pages = 2 * tile // page
  used = np.array([[2 * tile], [tile + 37], [tile + 2]])
  table = rng.permutation(3 * row_pages).astype(np.int32).reshape(3, row_pages)
  table[2, : tile // page] = table[0, : tile // page]
  table[np.arange(row_pages)[None] * page >= used] = -1
  plan = shared_tiles(table[:, None], used[:, 0], page, tile, 2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  pos = np.broadcast_to(np.arange(2 * tile), (3, 2 * tile))
  k, v = (draw(2, 3 * row_pages, KV_HEADS, page, _DIM) for _ in range(2))
  k_at = coords(pos, pos < used)
  view = PooledView(
    k,
    v,
    k_at,
    jnp.asarray(table),
    jnp.int32(1),
    shared=jax.tree.map(jnp.asarray, plan) if queries == 1 else None,
  )

  def rows(x: jax.Array) -> np.ndarray:
    pages = np.asarray(x[1], np.float64)[np.maximum(table, 0)]
    return np.swapaxes(pages, 1, 2).reshape(3, KV_HEADS, -1, _DIM)

  last = used - queries + np.arange(queries)
  return DecodeCase(
    name="shared pages" if queries == 1 else "pieces of prompts over pages",
    q=draw(3, KV_HEADS, GROUPS, queries, _DIM),
    keys=view,
    args=_score_args(coords(last, last >= 0), k_at, Causal()),
    k=rows(k),
    v=rows(v),
  )


# ---------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------


def _named(names: tuple[str, ...], arrays: Any) -> Results:
  return {
    name: np.asarray(x, np.float64)
    for name, x in zip(names, arrays, strict=True)
  }


@contextlib.contextmanager
def _on_host() -> Generator[None]:
  """Computes on the host's CPU, or on the device where JAX has no CPU."""
  try:
    device = jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    yield
    return
  with jax.default_device(device):
    yield


@contextlib.contextmanager
def _in_float64() -> Generator[None]:
  with _on_host(), jax.enable_x64(True):
    yield


def _on_default_device(tree: PyTree) -> PyTree:
  """Moves the arrays of a tree to the current default device."""
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def _wide(tree: PyTree) -> PyTree:
  """Converts the floats of a tree to float64."""
  convert = lambda x: x if x.dtype.kind in "ib" else x.astype(np.float64)
  return jax.tree.map(convert, tree)


def _by_head(x: jax.Array) -> jax.Array:
  """[B, K, G, T, ...] -> [B, T, N, ...]."""
  x = jnp.moveaxis(x, 3, 1)
  return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _grouped(x: jax.Array) -> jax.Array:
  """[B, T, N, ...] -> [B, K, G, T, ...]."""
  x = x.reshape(*x.shape[:2], KV_HEADS, GROUPS, *x.shape[3:])
  return jnp.moveaxis(x, 1, 3)
