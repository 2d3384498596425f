"""The arguments of an attention call, checked, as one pytree.

Guarantees: all errors of a call are found here, from shapes, dtypes and
  concrete
values alone, before anything is compiled or sent, and each error names the
argument, what came, what was expected and one remedy.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.checks import FLOATS, as_array, boolean
from ringjax.errors import (
  DtypeError,
  InputTypeError,
  OptionError,
  ShapeError,
)
from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.sparse.block_selection import KeyChoice
from ringjax.ops.attention.strategies.latents import up_project
from ringjax.ops.mask import (
  And,
  Causal,
  Coords,
  Everything,
  Mask,
  Or,
  Prefix,
  SameSegment,
  Window,
)
from ringjax.parallel.call_sharding import CallSharding
from ringjax.parallel.layout import Contiguous, Layout, Slots, into_slots
from ringjax.typing import Keys, Queries, Values

# The leading dimensions of each array: A stands for the keys of all shards,
# which no mesh axis shards, Z for other parts of the sequence, sharded without
# padding; ? marks one that may be 1 to broadcast.
_DIMENSIONS = {
  "q": ("B", "T", "N"),
  "k": ("B", "S", "K?"),
  "v": ("B", "S", "K?"),
  "bias": ("B?", "N?", "T?", "A?"),
  "allow": ("B?", "N?", "T?", "A?"),
  "sinks": ("N",),
  "slopes": ("N",),
  "heads": ("N",),
  "up": ("C", "N", "X"),
  "q_pos": ("B?", "T"),
  "k_pos": ("B?", "S"),
  "q_seg": ("B?", "T"),
  "k_seg": ("B?", "S"),
  "q_len": ("B",),
  "k_len": ("B",),
  "seed": ("B?",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArgs:
  """Checked arguments of one attention call, a pytree.

  `of` makes it; arrays that are absent are None. T and S are the caller's.

  Attributes:
    q: Queries, [B, T, N, H].
    k: Keys, [B, S, K, H].
    v: Values, [B, S, K, J].
    bias: Score bias, [B or 1, N or 1, T or 1, S or 1].
    allow: Boolean mask, shaped like the bias.
    sinks: Scores of the sinks, [N].
    slopes: ALiBi slopes, [N].
    heads: Indices of the heads, int32 [N], for dropout.
    up: Up-projection of latents, [C, N, P + J], if keys are rows [B, S, 1,
      C + R] and values have no numbers, see `strategies/latents.py`.
    q_pos: Positions of the queries, int32 [B or 1, T].
    k_pos: Positions of the keys, int32 [B or 1, S].
    q_seg: Segments of the queries, int32 [B or 1, T].
    k_seg: Segments of the keys, int32 [B or 1, S].
    q_len: Lengths of the query sequences, int32 [B].
    k_len: Lengths of the key sequences, int32 [B].
    seed: Dropout seed, uint32 [B or 1].
    selection: Choice of the keys that queries read, or None for all of them.
    mask: Mask over coordinates.
    scores: Score function, static.
    layout: Order of the sequence on the shards, static.
    batched: Whether the caller passed a batch axis, static.
  """

  q: Float[Array, "B T N H"]
  k: Float[Array, "B S K _"]
  v: Float[Array, "B S K J"]
  bias: Float[Array, "#B #N #T #S"] | None = None
  allow: Bool[Array, "#B #N #T #S"] | None = None
  sinks: Float[Array, " N"] | None = None
  slopes: Float[Array, " N"] | None = None
  heads: Int[Array, " N"] | None = None
  up: Float[Array, "C N Y"] | None = None
  q_pos: Int[Array, "#B T"] | None = None
  k_pos: Int[Array, "#B S"] | None = None
  q_seg: Int[Array, "#B T"] | None = None
  k_seg: Int[Array, "#B S"] | None = None
  q_len: Int[Array, " B"] | None = None
  k_len: Int[Array, " B"] | None = None
  seed: Int[Array, " #B"] | None = None
  selection: KeyChoice | None = None
  mask: Mask
  scores: Scores
  layout: Layout
  batched: bool

  @classmethod
  def of(
    cls,
    query: Float[Array | np.ndarray, "*B T N H"],
    key: Float[Array | np.ndarray, "*B S K H"],
    value: Float[Array | np.ndarray, "*B S K J"],
    *,
    bias: Float[Array | np.ndarray, " ..."] | None = None,
    mask: Bool[Array | np.ndarray, " ..."] | Mask | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array | np.ndarray, " B"] | None = None,
    key_value_seq_lengths: Int[Array | np.ndarray, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    layout: Layout | None = None,
    q_segment_ids: Int[Array | np.ndarray, " ..."] | None = None,
    kv_segment_ids: Int[Array | np.ndarray, " ..."] | None = None,
    q_positions: Int[Array | np.ndarray, " ..."] | None = None,
    kv_positions: Int[Array | np.ndarray, " ..."] | None = None,
    sinks: Float[Array | np.ndarray, " N"] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[Array | np.ndarray, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Int[Array, "*B"] | int | None = None,
    aligned: bool = False,
    key_shards: int = 1,
    up: Float[Array | np.ndarray, "C N Y"] | None = None,
  ) -> AttentionArgs:
    """Check the arguments of `api.dot_product_attention`.

    Args:
      query: Queries; they and the others as there.
      aligned: Whether causal T may differ from S without positions.
      key_shards: Number of shards of the keys, of which `key` is one; a shard's
        rows of `bias` and `mask` have the columns of them all.
      up: Up-projection of latents, if `key` holds rows of latent attention;
        then `value` is not read.

    Raises:
      RingjaxError: If an argument is wrong; the first such error.
    """
    is_causal = boolean("is_causal", is_causal)
    if up is None:
      operands = {"query": query, "key": key, "value": value}
      operands = {name: as_array(name, x) for name, x in operands.items()}
      q, k, v = _check_qkv(operands)
    else:
      up = as_array("up", up)
      operands = {"query": as_array("query", query)}
      q, k, v = _check_rows(operands["query"], as_array("rows", key), up)
    batched = operands["query"].ndim == 4
    (b, t, n, h), s = q.shape, k.shape[1]
    if layout is not None and not isinstance(layout, Layout):
      raise InputTypeError(
        "layout",
        repr(layout),
        "rj.Contiguous(), Striped(block), Zigzag() or Uneven(counts)",
        "pass an instance, not a name or a class",
      )
    aligned = aligned or q_positions is not None or kv_positions is not None
    if is_causal and t != s and not aligned:
      raise ShapeError(
        "is_causal",
        f"True with {t} queries and {s} keys and no positions",
        "equal lengths, or positions that say where the queries are",
        f"pass q_positions=jnp.arange({t}) + {max(s - t, 0)} to align ends",
      )
    pairs = (b, n, t, s * key_shards)
    predicate, allow = _mask(mask, pairs)
    if bias is not None:
      bias = _pairwise("bias", bias, pairs)
      _check_dtype("bias", bias, jnp.floating)
    q_seg, k_seg = _segments(q_segment_ids, kv_segment_ids, (b, t), (b, s))
    relates_segments = q_seg is None or predicate.relates_segments
    for extra_mask in (
      Causal() if is_causal else None,
      _window(local_window_size),
      None if relates_segments else SameSegment(),
    ):
      predicate = _and(predicate, extra_mask)
    rate = _rate(dropout_rate)
    return cls(
      q=q,
      k=k,
      v=v,
      bias=bias,
      allow=allow,
      sinks=_per_head("sinks", sinks, n),
      slopes=_per_head("alibi_slopes", alibi_slopes, n),
      heads=jnp.arange(n, dtype=jnp.int32) if rate else None,
      up=up,
      q_pos=_tokens("q_positions", q_positions, (b, t)),
      k_pos=_tokens("kv_positions", kv_positions, (b, s)),
      q_seg=q_seg,
      k_seg=k_seg,
      q_len=_lengths("query_seq_lengths", query_seq_lengths, b, t),
      k_len=_lengths("key_value_seq_lengths", key_value_seq_lengths, b, s),
      seed=_seed(dropout_seed, rate, b) if rate else None,
      mask=predicate,
      scores=Scores(
        scale=_number("scale", scale, 1 / math.sqrt(h), positive=False),
        soft_cap=_number("logits_soft_cap", logits_soft_cap, None),
        dropout_rate=rate,
      ),
      layout=layout or Contiguous(),
      batched=batched,
    )

  @property
  def operands(self) -> tuple[Queries, Keys, Values]:
    """Queries, keys and values."""
    return self.q, self.k, self.v

  @property
  def kv_heads(self) -> int:
    """Number of kv heads, K; where keys are rows, that of their keys."""
    return self.k.shape[2] if self.up is None else self.q.shape[2]

  @property
  def plain(self) -> int:
    """Number of key dims of a head that `up` projects to, P."""
    assert self.up is not None
    return self.q.shape[3] - (self.k.shape[3] - self.up.shape[0])

  def up_projected(self) -> AttentionArgs:
    """Replace rows by the keys and values of all heads."""
    assert self.up is not None
    k, v = up_project(self.k[:, :, 0], self.up, self.plain)
    return dataclasses.replace(self, k=k, v=v, up=None)

  def absorbed(self) -> AttentionArgs:
    """Project queries to those of rows, for attention to rows themselves."""
    assert self.up is not None
    up = self.up[..., : self.plain]
    q_latent = jnp.einsum(
      "btnh,cnh->btnc", self.q[..., : self.plain], up,
      preferred_element_type=up.dtype,
    )  # fmt: skip
    q = jnp.concatenate([q_latent, self.q[..., self.plain :]], -1)
    return dataclasses.replace(self, q=q, up=None)

  def _each(self, f: Callable[[Any, tuple[str, ...]], Any]) -> AttentionArgs:
    """Replace each array by f(array, its dimensions)."""
    arrays = {
      name: f(getattr(self, name), dimensions)
      for name, dimensions in _DIMENSIONS.items()
      if getattr(self, name) is not None
    }
    if self.selection is not None:
      arrays["selection"] = self.selection.map_arrays(f)
    return dataclasses.replace(self, **arrays)

  def specs(self, place: CallSharding) -> AttentionArgs:
    """PartitionSpecs of the arrays on the mesh of a place."""
    batch, heads = place.batch or None, place.heads or None
    axes = {"B": batch, "N": heads, "K": heads, "T": place.axis}
    axes["S"] = axes["Z"] = place.axis

    def spec(x: jax.Array, dimensions: tuple[str, ...]) -> P:
      return P(
        *(
          None
          if dimension.endswith("?") and size == 1
          else axes.get(dimension[0])
          for size, dimension in zip(x.shape, dimensions, strict=False)
        )
      )

    mask_spec = lambda x: P(batch) if jnp.ndim(x) else P()
    specs = self._each(spec)
    return dataclasses.replace(specs, mask=jax.tree.map(mask_spec, self.mask))

  def padded(self, queries: Slots | None, keys: Slots | None) -> AttentionArgs:
    """Pad to the same number of slots on each shard; see `slots_of`."""
    slots = {"T": queries, "S": keys, "A": keys}

    def pad(x: jax.Array, dimensions: tuple[str, ...]) -> jax.Array:
      for axis, dimension in enumerate(dimensions):
        # Arrays that do not depend on the keys have one column.
        if not (dimension.endswith("?") and x.shape[axis] == 1):
          x = into_slots(x, slots.get(dimension[0]), axis)
      return x

    return self._each(pad)


_STATIC = ("scores", "layout", "batched")
tree.register(AttentionArgs, (*_DIMENSIONS, "selection", "mask"), _STATIC)


def _mask(
  mask: Bool[Array | np.ndarray, " ..."] | Mask | None, shape: tuple[int, ...]
) -> tuple[Mask, Any]:
  """Split a caller's mask into (predicate, allowed pairs or None)."""
  if mask is None:
    return Everything(), None
  if isinstance(mask, Mask):
    return _predicate(mask, shape[0]), None
  if isinstance(mask, type) and issubclass(mask, Mask):
    raise InputTypeError(
      "mask",
      f"the class {mask.__name__}",
      f"an instance, such as {mask.__name__}(...)",
      "call it",
    )
  allow = _pairwise("mask", mask, shape)
  if allow.dtype != jnp.bool_:
    raise DtypeError(
      "mask",
      allow.dtype,
      "bool, or a ringjax mask such as Causal()",
      "pass an additive mask as bias=",
    )
  return Everything(), allow


def _check_rows(
  q: jax.Array, rows: jax.Array, up: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Check queries, rows [B, S, C + R] and their up-projection [C, N, P + J].

  Returns queries, rows as keys of one head, and values without numbers.
  """
  for name, x, axes in (
    ("query", q, (3, 4)),
    ("rows", rows, (q.ndim - 1,)),
    ("up", up, (3,)),
  ):
    if x.ndim not in axes or not x.size:
      raise ShapeError(
        name,
        f"shape {x.shape}",
        "a query [B, T, N, H], rows [B, S, C + R] and up [C, N, P + J]",
        "leave B out of both the query and the rows, or of none",
      )
    if x.dtype.name not in FLOATS or x.dtype != q.dtype:
      raise DtypeError(
        name,
        f"{x.dtype} next to a query of {q.dtype}",
        f"one dtype of {', '.join(FLOATS)} for query, rows and up",
        f"cast it: {name}.astype(query.dtype)",
      )
  if q.ndim == 3:
    q, rows = q[None], rows[None]
  (b, _, n, h), (size, heads, numbers) = q.shape, up.shape
  shared = rows.shape[2] - size
  if rows.shape[0] != b or heads != n or not 0 <= shared <= h:
    raise ShapeError(
      "rows",
      f"shape {rows.shape} with a query of shape {q.shape} and up {up.shape}",
      f"[{b}, S, {size} + shared key dims], up for {n} heads",
      "pass each latent followed by the key dims that the heads share",
    )
  if numbers <= h - shared:
    raise ShapeError(
      "up",
      f"shape {up.shape}",
      f"more than the {h - shared} key dims of a head: values follow them",
      "join the projections to keys and to values along the last axis",
    )
  rows = rows[:, :, None]
  return q, rows, rows[..., :0]


def _check_qkv(
  operands: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Check queries, keys and values, and add a batch axis."""
  q, k, v = operands.values()
  for name, x in operands.items():
    if x.ndim not in (3, 4):
      raise ShapeError(
        name,
        f"shape {x.shape}",
        "[B, T, heads, H] or [T, heads, H]",
        "add or remove axes",
      )
    if x.ndim != q.ndim:
      raise ShapeError(
        name,
        f"shape {x.shape} beside a query of shape {q.shape}",
        "the same number of axes",
        "give all of them a batch axis, or none",
      )
    if x.dtype.name not in FLOATS:
      raise DtypeError(
        name,
        x.dtype,
        f"one of {', '.join(FLOATS)}",
        f"cast it, e.g. {name}.astype(jnp.float32)",
      )
    if x.dtype != q.dtype:
      raise DtypeError(
        name,
        f"{x.dtype} beside a query of {q.dtype}",
        "one dtype for query, key and value",
        f"cast it: {name}.astype(query.dtype)",
      )
  if q.ndim == 3:
    q, k, v = q[None], k[None], v[None]
  (b, _, _, h), (_, s, kv_heads, _) = q.shape, k.shape
  if k.shape != (b, s, kv_heads, h):
    raise ShapeError(
      "key",
      f"shape {k.shape} beside a query of shape {q.shape}",
      f"the query's batch of {b} and head dim of {h}",
      "project both to one head dim, and broadcast or slice the batch",
    )
  if v.shape[:3] != k.shape[:3]:
    raise ShapeError(
      "value",
      f"shape {v.shape} beside a key of shape {k.shape}",
      "the key's batch, length and number of heads",
      "only the head dims of key and value may differ",
    )
  for name, x in (("query", q), ("key", k)):
    if x.shape[1] == 0:
      raise ShapeError(
        name,
        f"sequence length 0 in shape {x.shape}",
        "at least one token",
        "skip the call for an empty sequence",
      )
  if min(q.shape[2:] + k.shape[2:] + v.shape[2:]) == 0:
    raise ShapeError(
      "query, key, value",
      f"shapes {q.shape}, {k.shape}, {v.shape}",
      "at least one head and a head dim of at least 1",
      "check the projections",
    )
  if q.shape[2] % k.shape[2]:
    raise ShapeError(
      "query",
      f"{q.shape[2]} query heads for {k.shape[2]} key heads",
      "a multiple of the number of key heads",
      "change the number of heads; grouped queries share key heads",
    )
  return q, k, v


_KINDS: dict[Any, tuple[str, str]] = {
  jnp.floating: ("a floating dtype", "float32"),
  jnp.integer: ("an integer dtype", "int32"),
  jnp.int32: ("int32", "int32"),
  jnp.bool_: ("bool", "bool_"),
}


def _check_dtype(name: str, x: jax.Array, kind: type) -> None:
  if not jnp.issubdtype(x.dtype, kind):
    expected, cast = _KINDS[kind]
    raise DtypeError(name, x.dtype, expected, f"pass {name}.astype(jnp.{cast})")


def _array(
  name: str, x: Any, kind: type, shapes: Sequence[tuple[int, ...]], each: str
) -> jax.Array:
  """Convert x to an array, and check its dtype kind and its shape."""
  x = as_array(name, x)
  _check_dtype(name, x, kind)
  if x.shape not in shapes:
    expected = " or ".join(map(str, shapes))
    raise ShapeError(name, f"shape {x.shape}", expected, f"pass {each}")
  return x


def _pairwise(
  name: str, x: jax.Array | np.ndarray, shape: tuple[int, ...]
) -> jax.Array:
  x = as_array(name, x)
  if x.ndim > 4:
    raise ShapeError(
      name,
      f"shape {x.shape}",
      "at most the four axes [B, N, T, S]",
      "drop the extra axes",
    )
  x = x.reshape((1,) * (4 - x.ndim) + x.shape)
  if any(a not in (1, full) for a, full in zip(x.shape, shape, strict=True)):
    raise ShapeError(
      name,
      f"shape {x.shape}",
      f"one that broadcasts to [B, N, T, S] = {list(shape)}",
      "keep 1 for the axes that it does not depend on",
    )
  return x


def _per_head(
  name: str, x: jax.Array | np.ndarray | None, heads: int
) -> jax.Array | None:
  """Check an array [N], or None."""
  if x is None:
    return None
  expected = "one number for each query head at hand"
  return _array(name, x, jnp.floating, [(heads,)], expected)


def _tokens(
  name: str, x: Any, shape: tuple[int, int], least: int = -(2**31)
) -> Any:
  """Convert [T] or [B, T] to int32 [B or 1, T], at least `least`; or None."""
  if x is None:
    return None
  _check_values(name, x, least)
  shapes = shape, shape[1:], (1, shape[1])
  x = _array(name, x, jnp.integer, shapes, "a number for each token")
  return x.astype(jnp.int32).reshape(-1, shape[1])


def coords(
  name: str,
  at: Coords | Int[Array | np.ndarray, "*B T"],
  batch: int,
  length: int,
) -> Coords:
  """Check coordinates of an operand's tokens, int32 [B or 1, T]."""
  pair = isinstance(at, tuple) and len(at) == 2
  if not pair or any(x is None for x in at):
    raise InputTypeError(
      name,
      type(at).__name__,
      "coordinates, positions and documents of the tokens",
      "pass rj.Coords(pos, seg)",
    )
  shape = batch, length
  return Coords(
    *(
      _tokens(f"{name}.{field}", x, shape)
      for field, x in zip(Coords._fields, at, strict=True)
    )
  )


def kept_keys(
  keep: Bool[Array | np.ndarray, "*B S *K"], x: AttentionArgs
) -> Bool[Array, "B S _"]:
  """Check a set of the keys of a call, bool [B, S, K or 1].

  Raises:
    RingjaxError: If its dtype or shape is wrong.
  """
  keep = as_array("keep", keep)
  b, s, heads, _ = x.k.shape
  if x.batched is False and keep.ndim in (1, 2):
    keep = keep[None]
  if keep.shape not in ((b, s), (b, s, heads)):
    raise ShapeError(
      "keep",
      f"shape {keep.shape}",
      f"[B, S] = {b, s}, or [B, S, K] = {b, s, heads}",
      "say of each key whether it is in the set",
    )
  _check_dtype("keep", keep, jnp.bool_)
  return keep if keep.ndim == 3 else keep[..., None]


def _check_values(name: str, x: Any, least: int = -(2**31)) -> None:
  """Refuse integers below `least` or beyond int32, if they are concrete."""
  concrete = isinstance(x, np.ndarray) or (
    isinstance(x, jax.Array)
    and not isinstance(x, jax.core.Tracer)
    and x.is_fully_addressable
  )
  if not concrete or x.dtype.kind not in "iu" or not x.size:
    return
  if least < 0 and np.can_cast(x.dtype, np.int32):
    return
  x = np.asarray(x)
  for value in (int(x.min()), int(x.max())):
    if not least <= value < 2**31:
      raise OptionError(
        name,
        f"{value} in an array of {x.dtype}",
        f"numbers from {least} that int32 holds",
        "number documents from 1, padding 0 and positions from 0",
      )


def _predicate(mask: Mask, batch: int) -> Mask:
  """Convert a mask's prefixes to int32, one for all examples or one each."""
  if isinstance(mask, And | Or):
    left_mask, right_mask = (
      _predicate(m, batch) for m in (mask.left, mask.right)
    )
    return dataclasses.replace(mask, left=left_mask, right=right_mask)
  if not isinstance(mask, Prefix):
    return mask
  length = mask.length
  if isinstance(length, numbers.Integral) and not isinstance(length, bool):
    # A prefix longer than every sequence is no limit.
    return Prefix(max(0, min(int(length), 2**31 - 1)))
  dtype, shape = getattr(length, "dtype", None), getattr(length, "shape", None)
  is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
  if not is_integer or shape not in ((), (1,), (batch,)):
    description = type(length).__name__ if dtype is None else f"{dtype} {shape}"
    raise OptionError(
      "mask",
      f"Prefix of {description}",
      f"an int, or an integer array [] or [B] = ({batch},)",
      "pass one length for all examples, or one each",
    )
  _check_values("mask", length)
  length = jnp.asarray(length).astype(jnp.int32)
  return Prefix(length.reshape(()) if shape == (1,) else length)


def _segments(
  q_seg: jax.Array | np.ndarray | None,
  k_seg: jax.Array | np.ndarray | None,
  q_shape: tuple[int, int],
  k_shape: tuple[int, int],
) -> tuple[Any, Any]:
  """Check segment ids of queries and keys; one alone is used for both."""
  if q_seg is None and k_seg is None:
    return None, None
  if q_shape[1] != k_shape[1] and (q_seg is None or k_seg is None):
    missing = "q_segment_ids" if q_seg is None else "kv_segment_ids"
    raise ShapeError(
      missing,
      f"None with {q_shape[1]} queries and {k_shape[1]} keys",
      "segment ids of both when their lengths differ",
      f"pass {missing} too",
    )
  q_seg = k_seg if q_seg is None else q_seg
  k_seg = q_seg if k_seg is None else k_seg
  return (
    _tokens("q_segment_ids", q_seg, q_shape, least=0),
    _tokens("kv_segment_ids", k_seg, k_shape, least=0),
  )


def _lengths(
  name: str, x: jax.Array | np.ndarray | None, batch: int, longest: int
) -> jax.Array | None:
  """Check lengths, int32 [B], or None."""
  if x is None:
    return None
  expected = f"one length, at most {longest}, for each example"
  return _array(name, x, jnp.int32, [(batch,)], expected)


def _window(size: int | tuple[int, int] | None) -> Window | None:
  if size is None:
    return None
  sides = size if isinstance(size, tuple | list) else (size, size)
  if len(sides) != 2 or any(
    not isinstance(s, numbers.Integral) or isinstance(s, bool) or s < 0
    for s in sides
  ):
    raise OptionError(
      "local_window_size",
      repr(size),
      "an int or a pair (left, right) of ints of at least 0",
      "count the tokens on each side, the query's own not included",
    )
  return Window(int(sides[0]) + 1, int(sides[1]))


def _rate(rate: float) -> float:
  if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
    raise OptionError(
      "dropout_rate",
      repr(rate),
      "a number of at least 0 and below 1",
      "pass 0.0 to switch dropout off",
    )
  return float(rate)


def _seed(seed: Any, rate: float, batch: int) -> jax.Array:
  """Convert a dropout seed to uint32 [B or 1]."""
  if seed is None:
    raise OptionError(
      "dropout_seed",
      f"None with dropout_rate={rate}",
      "an int, or an integer array [] or [B]",
      "pass a seed, a new one each step",
    )
  if isinstance(seed, numbers.Integral):
    seed = np.uint32(int(seed) % 2**32)
  expected = "one seed for all examples, or one each"
  shapes = (), (1,), (batch,)
  seed = _array("dropout_seed", seed, jnp.integer, shapes, expected)
  return seed.astype(jnp.uint32).reshape(-1)


def _number(
  name: str, x: float | None, default: Any, positive: bool = True
) -> Any:
  if x is None:
    return default
  if isinstance(x, jax.core.Tracer):
    raise InputTypeError(
      name,
      "a traced value",
      "a Python number, known when the call is traced",
      f"mark {name} static, or multiply the query by it",
    )
  try:
    value = float(x)
  except (TypeError, ValueError):
    value = math.nan
  # Scores of 16-bit and 32-bit operands are float32.
  representable = abs(value) <= float(np.finfo(np.float32).max)
  if not representable or (positive and value <= 0):
    raise OptionError(
      name,
      repr(x),
      "a number that float32 holds" + (" above 0" if positive else ""),
      f"leave {name} out for the default",
    )
  return value


def _and(mask: Mask, extra_mask: Mask | None) -> Mask:
  if extra_mask is None:
    return mask
  return extra_mask if isinstance(mask, Everything) else And(mask, extra_mask)
