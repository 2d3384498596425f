"""Wire formats: keys and values in fewer bytes when sent between shards.

Guarantees: the received numbers are within a stated distance of those sent. A
code is made by the shard that owns the keys and values and is passed on
unchanged, so the error does not grow with the number of hops. Sums that cross
a hop (partials, dK, dV) stay float32. Gradients are those of attention to the
received keys, passed on to the original keys as if these were the same.

    dtype          bytes a number   |received - sent| of each number x
  bfloat16       2                2^-8 |x|
  int8           1 + 4 / block    amax / 252
  float8_e4m3fn  1 + 4 / block    max(2^-4 |x|, amax / 2^18)
  float8_e5m2    1 + 4 / block    max(2^-3 |x|, amax / 2^32)

amax is the largest number of the block: of one token, one head and at most
`block` of its dimensions.

With delta = scale * sum_h |q_h| * error_h, at most, for a score, an output
changes by no more than (e^(2 delta) - 1) max |v| + the error of v.

`Wire` is the interface that strategies use; the codecs of caches (`kv/codecs`)
implement it too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError

_CASTS = ("bfloat16", "float16")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
DTYPES = (*_CASTS, *_LARGEST)


@runtime_checkable
class Wire(Protocol):
  """Format of keys and values between shards; hashable, compared by value."""

  def send(
    self, k: Shaped[Array, "B K S H"], v: Shaped[Array, "B K S J"]
  ) -> tuple[Any, int]:
    """Encode; return what to send, and its dimension of the tokens."""
    ...

  def receive(
    self,
    sent: PyTree,
    k: Shaped[Array, "B K _ H"],
    v: Shaped[Array, "B K _ J"],
  ) -> tuple[Shaped[Array, "B K _ H"], Shaped[Array, "B K _ J"]]:
    """Decode to keys and values with the dtypes and head dims of k and v."""
    ...

  def token_bytes(self, key_dim: int, value_dim: int) -> int:
    """Bytes of a token's key and value in one KV head."""
    ...


@runtime_checkable
class MakesWire(Protocol):
  """A codec of a cache that also serves between shards."""

  def as_wire(self) -> Wire:
    """Return the wire format that sends keys and values as its codes."""
    ...


# Values that users pass as a wire: a wire, a codec, or the name of a dtype.
WireLike = Wire | MakesWire | str


class Coded(NamedTuple):
  """Numbers in blocks with one scale each.

  Fields:
    codes: Codes, [..., blocks, block].
    scale: Scales, float32 [..., blocks]; NaN for a block that was not finite.
  """

  codes: jax.Array
  scale: jax.Array


@dataclasses.dataclass(frozen=True)
class WireFormat:
  """Wire format that casts or scales numbers to a narrow dtype.

  Attributes:
    dtype: "bfloat16", "float16", "int8", "float8_e4m3fn" or "float8_e5m2".
    block: Most numbers, of one token and head, that share a scale.
  """

  dtype: str
  block: int = 64

  def __post_init__(self) -> None:
    one_of(
      "wire",
      self.dtype,
      DTYPES,
      remedy="pass one of these or an rj.kv.Codec, or leave it out",
    )
    positive_int("wire block", self.block)

  def encode(self, x: Shaped[Array, "... H"]) -> Shaped[Array, "... H"] | Coded:
    """Encode [..., H] for sending."""
    if self.dtype in _CASTS:
      return x.astype(self.dtype)
    blocks = -(-x.shape[-1] // self.block)
    size = -(-x.shape[-1] // blocks)
    widths = [(0, 0)] * (x.ndim - 1) + [(0, blocks * size - x.shape[-1])]
    x = jnp.pad(x.astype(jnp.float32), widths)
    x = x.reshape(*x.shape[:-1], blocks, size)
    amax = jnp.max(jnp.abs(x), -1)
    is_finite = jnp.isfinite(amax)
    # A quotient below float32's normal numbers is flushed to 0.
    scale = jnp.maximum(amax / _LARGEST[self.dtype], _SMALLEST)
    x = jnp.where(is_finite[..., None], x / scale[..., None], 0)
    if self.dtype == "int8":
      x = jnp.round(x)
    return Coded(x.astype(self.dtype), jnp.where(is_finite, scale, jnp.nan))

  def decode(
    self, sent: Array | Coded, like: Shaped[Array, "... H"]
  ) -> Shaped[Array, "... H"]:
    """Decode to the dtype and the head dim of `like`."""
    if not isinstance(sent, Coded):
      return sent.astype(like.dtype)
    x = sent.codes.astype(jnp.float32) * sent.scale[..., None]
    x = x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))
    return x[..., : like.shape[-1]].astype(like.dtype)

  def bytes_of(self, numbers: int, head_dim: int) -> int:
    """Bytes of `numbers` numbers of keys with this head dim."""
    if self.dtype in _CASTS:
      return 2 * numbers
    blocks = -(-head_dim // self.block)
    size = -(-head_dim // blocks)
    return numbers // head_dim * blocks * (size + 4)

  def send(
    self, k: Shaped[Array, "B K S H"], v: Shaped[Array, "B K S J"]
  ) -> tuple[Any, int]:
    packed, axis = pack(k, v), token_axis(k, v)
    return jax.tree.map(self.encode, packed), axis

  def receive(
    self,
    sent: PyTree,
    k: Shaped[Array, "B K _ H"],
    v: Shaped[Array, "B K _ J"],
  ) -> tuple[Shaped[Array, "B K _ H"], Shaped[Array, "B K _ J"]]:
    if token_axis(k, v) == 3:
      return unpack(self.decode(sent, k))
    if not v.shape[-1]:
      return unpack((self.decode(sent[0], k),))
    return self.decode(sent[0], k), self.decode(sent[1], v)

  def token_bytes(self, key_dim: int, value_dim: int) -> int:
    dims = (dim for dim in (key_dim, value_dim) if dim)
    return sum(self.bytes_of(dim, dim) for dim in dims)


_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def pack(
  a: Shaped[Array, " ..."], b: Shaped[Array, " ..."]
) -> Shaped[Array, "2 ..."] | tuple[Shaped[Array, " ..."], ...]:
  """Stack two arrays to send one if their shapes agree, else pair them.

  The second is left out if it has no numbers: rows of latent attention stand
  for keys and values.
  """
  if a.shape == b.shape:
    return jnp.stack([a, b])
  return (a, b) if b.size else (a,)


def unpack(
  packed: Array | tuple[Array, ...],
) -> tuple[Shaped[Array, " ..."], Shaped[Array, " ..."]]:
  if len(packed) == 1:
    return packed[0], packed[0][..., :0]
  return packed[0], packed[1]


def token_axis(k: Shaped[Array, "B K S H"], v: Shaped[Array, "B K S J"]) -> int:
  """Dimension of `pack(k, v)` that runs over tokens."""
  return 3 if k.shape == v.shape else 2


def wire_of(wire: WireLike) -> Wire:
  """Make a wire from a `Wire`, a codec (with `as_wire`) or a dtype's name.

  Raises:
    OptionError: If it is an unknown dtype, or a codec that cannot be a wire.
  """
  if isinstance(wire, Wire):
    return wire
  return wire.as_wire() if isinstance(wire, MakesWire) else WireFormat(wire)


def as_wire(wire: WireLike | None, local: Any) -> Wire | None:
  """Make the wire of a strategy around `local`; see `wire_of`.

  Raises:
    OptionError: If it would also encode codes again, or if JAX differentiates
      the algorithm: rounding has no slope.
  """
  if wire is None:
    return None
  if local.differentiable:
    raise OptionError(
      "wire",
      f"{wire!r} around {local!r}",
      "a blockwise algorithm",
      "pass local=Blockwise(), or leave wire out",
    )
  wire = wire_of(wire)
  inner_wire = getattr(local, "wire", None)
  if inner_wire is not None and not (
    isinstance(wire, WireFormat) and isinstance(inner_wire, WireFormat)
  ):
    # Encoding what a codec decoded may give another code.
    raise OptionError(
      "wire",
      f"{wire} around {inner_wire}",
      "a codec on one of two levels",
      "leave wire out of the inner strategy",
    )
  return wire
