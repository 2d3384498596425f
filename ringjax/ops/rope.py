"""Rotary position embeddings (RoPE) and their scalings for long contexts.

Guarantees: dims 2i and 2i+1 (interleaved), or i and i + dims/2 (halves), of a
head are rotated by position * frequency_i; the dot product of a query and a key
then depends on the distance of their positions only. Angles are exact to 8e-7
radians at every position of int32, see `ops.turns`.
Ref: Su et al. 2021, arXiv 2104.09864; the scalings as Hugging Face
checkpoints mean them: linear (Chen et al. 2023, arXiv 2306.15595), dynamic
NTK, Llama 3, YaRN (Peng et al. 2023, arXiv 2309.00071), LongRoPE (Ding et al.
2024, arXiv 2402.13753).

Two scalings depend on the length of the context. It is an argument, one number
for all rows or one for each, never the length of the current array: a chunk or
a shard of a long text is rotated like the whole of it, and a row in a batch
like the row alone. The length of a row is that of its prompt. Under LongRoPE
its later tokens keep the divisors of the prompt: keys of one set and queries of
the other would not fit. Under dynamic NTK a token after the prompt is rotated
by the length up to itself, and cached keys keep their rotation, as in
transformers' cache. Without tokens after the prompt, both equal the rotation of
one pass over the row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.ops import turns
from ringjax.ops.turns import Frequencies
from ringjax.typing import Index, Lengths


@dataclasses.dataclass(frozen=True)
class Unscaled:
  """No scaling: the frequencies theta**(-2i/dims)."""

  by_length = False

  def reaches(
    self, length: Lengths, positions: Int[Array, "#B T"]
  ) -> Int[Array, "#B _"]:
    """Length that scales each token's rotation, for row lengths [B]."""
    del positions
    return jnp.asarray(length)[:, None]

  def alike(self, length: int) -> int:
    """A number that two prompts share if they are rotated alike."""
    del length
    return 0

  def scale(
    self, inverse: np.ndarray, theta: float
  ) -> Shaped[np.ndarray, " dims"]:
    """Scale radians per position, [dims/2]."""
    del theta
    return inverse

  def frequencies(
    self, inverse: np.ndarray, theta: float, length: Lengths | None
  ) -> Frequencies:
    """Scaled frequencies for one context length or several, [*N]."""
    del length
    return Frequencies.of(self.scale(inverse, theta))

  @property
  def magnitude(self) -> float:
    """Factor of the cosines and sines."""
    return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Unscaled):
  """Position interpolation: all positions divided by `factor`.

  Attributes:
    original: Context length that is stretched, where it is known.
  """

  factor: float
  original: int | None = None

  def scale(
    self, inverse: np.ndarray, theta: float
  ) -> Shaped[np.ndarray, " dims"]:
    return inverse / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proportional(Unscaled):
  """Only the fastest `turning` frequencies rotate; `factor` divides positions.

  The dims of a pair are as far apart as if all rotated, unlike in a rotation of
  a part of the dims.
  """

  turning: int
  factor: float = 1.0

  def scale(
    self, inverse: np.ndarray, theta: float
  ) -> Shaped[np.ndarray, " dims"]:
    turning = np.arange(inverse.size) < self.turning
    return np.where(turning, inverse, 0.0) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ByLength(Unscaled):
  """A scaling that grows with a row's length beyond `original` tokens."""

  original: int

  by_length = True

  def reaches(
    self, length: Lengths, positions: Int[Array, "#B T"]
  ) -> Int[Array, "#B T"]:
    tokens_so_far = jnp.minimum(positions, 2**31 - 2) + 1
    return jnp.maximum(jnp.asarray(length)[:, None], tokens_so_far)

  def alike(self, length: int) -> int:
    return max(length, self.original)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(_ByLength):
  """Dynamic NTK: a base that grows with the length beyond `original`."""

  factor: float

  def frequencies(
    self, inverse: np.ndarray, theta: float, length: Lengths | None
  ) -> Frequencies:
    assert length is not None
    length = jnp.asarray(length, jnp.int32)
    return turns.stretched(
      length, theta, inverse.size, self.factor, self.original
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3(Unscaled):
  """Llama 3: long wavelengths divided by `factor`, short ones kept.

  In between is a ramp, of no width where `low` is `high`.
  """

  factor: float
  low: float
  high: float
  original: int

  def scale(
    self, inverse: np.ndarray, theta: float
  ) -> Shaped[np.ndarray, " dims"]:
    turns_in_context = self.original * inverse / (2 * math.pi)
    if self.low == self.high:
      keep = np.where(turns_in_context >= self.low, 1.0, 0.0)
    else:
      keep = np.clip(
        (turns_in_context - self.low) / (self.high - self.low), 0, 1
      )
    return keep * inverse + (1 - keep) * inverse / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(Unscaled):
  """YaRN: slow dims are interpolated, fast ones are kept.

  Dims with fewer than `slow` turns in `original` tokens are slow, those with
  more than `fast` turns are fast; a ramp over the dims is in between.
  """

  factor: float
  original: int
  fast: float = 32.0
  slow: float = 1.0
  truncate: bool = True
  attention: float | None = None

  def scale(
    self, inverse: np.ndarray, theta: float
  ) -> Shaped[np.ndarray, " dims"]:
    dims = 2 * inverse.size

    def dim_of(times: float) -> float:
      wavelength = self.original / (times * 2 * math.pi)
      return dims * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(self.fast), dim_of(self.slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
      high += 0.001  # A ramp of no width would divide by zero.
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    return inverse * (1 - ramp) + inverse / self.factor * ramp

  @property
  def magnitude(self) -> float:
    if self.attention is not None:
      return self.attention
    return yarn_magnitude(self.factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
  """YaRN's attention temperature, 0.1 weight ln(factor) + 1."""
  return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(Unscaled):
  """LongRoPE: a divisor per dim, from one of two sets, by context length.

  `short` serves up to `original` tokens, `long` beyond.
  """

  short: tuple[float, ...]
  long: tuple[float, ...]
  original: int
  factor: float
  attention: float | None = None

  by_length = True

  def alike(self, length: int) -> int:
    return int(length > self.original)

  def frequencies(
    self, inverse: np.ndarray, theta: float, length: Lengths | None
  ) -> Frequencies:
    is_long = jnp.asarray(length, jnp.int32)[..., None] > self.original
    long, short = (
      Frequencies.of(inverse / np.asarray(x)).with_axes(is_long.ndim - 1)
      for x in (self.long, self.short)
    )
    return Frequencies(
      jnp.where(is_long, long.units, short.units),
      jnp.where(is_long, long.fractions, short.fractions),
    )

  @property
  def magnitude(self) -> float:
    if self.attention is not None:
      return self.attention
    if self.factor <= 1:
      return 1.0
    return math.sqrt(1 + math.log(self.factor) / math.log(self.original))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthScaled(_ByLength):
  """No scaling of rotations, but of keys, by 0.1 ln(length / original) + 1.

  The length is that of the row's prompt, or up to the token if it is later; the
  factor is at least 1. It is the form of Qwen2.5-1M's dual chunk attention.
  """

  def frequencies(
    self, inverse: np.ndarray, theta: float, length: Lengths | None
  ) -> Frequencies:
    axes = 0 if length is None else np.ndim(length)
    return Frequencies.of(self.scale(inverse, theta)).with_axes(axes)

  def factor(
    self, length: Lengths, positions: Int[Array, "#B T"]
  ) -> Float[Array, "#B T"]:
    """Factor of the key of each token, for row lengths [B] or one length."""
    tokens = self.reaches(jnp.atleast_1d(length), positions)
    stretch = tokens.astype(jnp.float32) / self.original
    return 0.1 * jnp.log(jnp.maximum(stretch, 1.0)) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """A rotary embedding.

  Attributes:
    theta: Base of the frequencies.
    dims: Number of a head's first dims that are rotated.
    interleaved: Whether neighbours make a pair, or the two halves do.
    scaling: Scaling for long contexts.
    reverse: Whether to rotate the other way.
    copies: Number of groups of `dims`, one after another, that are rotated by
      the same angles.
    learned: Whether the frequencies are multiplied by factors that are weights
      of a model, not with a scaling that depends on the length.
  """

  theta: float
  dims: int
  interleaved: bool = False
  scaling: Unscaled = Unscaled()
  reverse: bool = False
  copies: int = 1
  learned: bool = False

  def tables(
    self,
    positions: Int[Array, "#B T"],
    length: Lengths | None,
    log_factors: Float[Array, " half"] | None = None,
  ) -> tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]:
    """Cosines and sines, float32 [B, T, dims/2], for `positions` [B, T].

    `length` is that of the whole context, an int or a traced int32 scalar; or
    int32 [B], the prompt of each row, see the module's docstring. `log_factors`
    are the logarithms of learned factors.

    Raises:
      OptionError: If the rotation is learned, and there are no factors.
    """
    by_row = length is not None and np.ndim(length) > 0
    if by_row and self.scaling.by_length:
      frequencies = self.frequencies(self.scaling.reaches(length, positions))
    else:
      frequencies = self.frequencies(None if by_row else length, log_factors)
      frequencies = frequencies.with_axes(2)
    angles = frequencies.angles(positions[..., None])
    magnitude = jnp.float32(self.scaling.magnitude)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude

  def frequencies(
    self,
    length: Lengths | None,
    log_factors: Float[Array, " half"] | None = None,
  ) -> Frequencies:
    """Angle of each pair for one position, [*N, dims/2].

    `length` [*N] as for `tables`, one or several; `log_factors`, too.
    """
    exponents = np.arange(0, self.dims, 2, dtype=turns.WIDE) / self.dims
    inverse = turns.WIDE(self.theta) ** -exponents
    if self.learned:
      assert not self.scaling.by_length
      if log_factors is None:
        raise OptionError(
          "model",
          "learned factors of its rotation, which this computation lacks",
          "a rotation that follows from config.json",
          "leave the option out that rotates keys apart from a call of the "
          "model, such as one that evicts them",
        )
      radians = self.scaling.scale(inverse, self.theta)
      frequencies = turns.multiplied(tuple(map(float, radians)), log_factors)
    else:
      frequencies = self.scaling.frequencies(inverse, self.theta, length)
    return frequencies.reversed() if self.reverse else frequencies

  @property
  def pairs(self) -> Int[np.ndarray, " turned"]:
    """Index of the frequency that rotates each of the first dims, [turned]."""
    indices = np.arange(self.dims // 2)
    per_dim = np.repeat(indices, 2) if self.interleaved else np.tile(indices, 2)
    return np.tile(per_dim, self.copies)

  @property
  def turned(self) -> int:
    """Number of rotated dims, in all copies."""
    return self.copies * self.dims

  def rotate(
    self,
    x: Float[Array, "B T N H"],
    tables: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]],
  ) -> Float[Array, "B T N H"]:
    """Rotate queries or keys by the tables of their positions."""
    if self.copies > 1:
      parts = jnp.split(x[..., : self.turned], self.copies, -1)
      single = dataclasses.replace(self, copies=1)
      parts = [single.rotate(part, tables) for part in parts]
      return jnp.concatenate([*parts, x[..., self.turned :]], -1)
    cos, sin = (t[:, :, None] for t in tables)
    rotary_dims, unrotated = x[..., : self.dims], x[..., self.dims :]
    rotated = rotary_dims.astype(jnp.float32)
    if self.interleaved:
      a, b = rotated[..., 0::2], rotated[..., 1::2]
      rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
      rotated = rotated.reshape(rotary_dims.shape)
    else:
      a, b = jnp.split(rotated, 2, -1)
      rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    rotated = rotated.astype(x.dtype)
    return (
      jnp.concatenate([rotated, unrotated], -1)
      if unrotated.shape[-1]
      else rotated
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionFold:
  """Positions in place of a token's own: min((p % modulo) // divisor + shift).

  Attributes:
    modulo: Number of positions after which they begin again; None: never.
    divisor: Number of positions that become one.
    shift: Number that is added.
    largest: Largest position; None: no limit.
  """

  modulo: int | None = None
  divisor: int = 1
  shift: int = 0
  largest: int | None = None

  def __call__(self, positions: Int[Array, "#B T"]) -> Int[Array, "#B T"]:
    if self.modulo is not None:
      positions = positions % self.modulo
    positions = positions // self.divisor + self.shift
    return (
      positions
      if self.largest is None
      else jnp.minimum(positions, self.largest)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedRope(Rope):
  """A rotary embedding by folded positions.

  Attributes:
    fold: Positions in place of a token's own.
  """

  fold: PositionFold

  def tables(
    self,
    positions: Int[Array, "#B T"],
    length: Lengths | None,
    log_factors: Float[Array, " half"] | None = None,
  ) -> tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]:
    return super().tables(self.fold(positions), length, log_factors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
  """Rotation of projected keys, and a norm after it.

  A cache receives it with the keys: it may rotate them when they are written,
    or
  store them as they are and rotate them when they are read.

  Attributes:
    rope: The rotation; None leaves keys as they are.
    first: First dim of a head that is rotated.
    length: Tokens of the whole context, or of each row's prompt [B], for
      rotations that depend on it; see `Rope.tables`.
    tables: Tables of the call's own tokens, see `Rope.tables`; None: computed
      on use.
    log_factors: Logarithms of a learned rotation's factors, [dims/2], or None.
    after: Function of keys [B, S, K, H] that is applied after the rotation, or
      None.
  """

  rope: Rope | None = None
  first: int = 0
  length: Lengths | None = None
  tables: tuple[Array, Array] | None = None
  after: Callable[[Array], Array] | None = None
  log_factors: Float[Array, " half"] | None = None

  @property
  def trivial(self) -> bool:
    """Whether keys stay as they are."""
    return self.rope is None and self.after is None

  def own(self, k: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
    """Rotate the keys of the call's tokens."""
    return self._apply(k, self.tables)

  def anywhere(
    self, k: Float[Array, "B K S H"], pos: Int[Array, "#B S"]
  ) -> Float[Array, "B K S H"]:
    """Rotate keys of tokens at positions `pos`."""
    rope = self.rope
    if rope is None:
      return self._apply(k, None)
    return self._apply(k, rope.tables(pos, self.length, self.log_factors))

  @property
  def frequencies(self) -> Frequencies:
    """Angle of each pair of dims for one position."""
    assert self.rope is not None
    return self.rope.frequencies(self.length, self.log_factors)

  def quarter(self, q: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
    """Rotate the queries' pairs by -90 degrees.

    q . R(p) k is the sum of q times k times the cosines, and of `quarter(q)`
    times k times the sines.
    """
    assert self.rope is not None
    like = jnp.zeros((1, q.shape[2], self.rope.dims // 2), jnp.float32)
    return dataclasses.replace(self, after=None)._apply(q, (like, like - 1))

  @property
  def by_row(self) -> bool:
    """Whether rows may have different frequencies."""
    scaled = self.rope is not None and self.rope.scaling.by_length
    return scaled and self.length is not None and np.ndim(self.length) > 0

  def of_row(self, row: Index) -> Rotation:
    """Restrict to one row of the batch."""
    if self.length is None or np.ndim(self.length) == 0:
      return self
    length = jnp.asarray(self.length)
    row_length = jax.lax.dynamic_slice_in_dim(length, row, 1)
    return dataclasses.replace(
      self, length=row_length if length.size > 1 else length, tables=None
    )

  def specs(self, batch: str | tuple[str, ...] | None) -> Rotation:
    """PartitionSpecs for rows that are sharded over the mesh axes `batch`."""
    replicated = jax.tree.map(lambda _: P(), self)
    if self.length is None or np.shape(self.length) in ((), (1,)):
      return replicated
    return tree.with_leaves(
      self,
      length=P(batch),
      tables=replicated.tables,
      after=replicated.after,
      log_factors=replicated.log_factors,
    )

  def general(self) -> Rotation:
    """Drop the tables, so that it serves tokens of any call."""
    return dataclasses.replace(self, tables=None)

  def _apply(
    self, k: jax.Array, tables: tuple[Array, Array] | None
  ) -> jax.Array:
    if self.trivial:
      return k
    k = jnp.swapaxes(k, 1, 2)
    if self.rope is not None:
      assert tables is not None
      unrotated, rotated = k[..., : self.first], k[..., self.first :]
      rotated = self.rope.rotate(rotated, tables)
      k = jnp.concatenate([unrotated, rotated], -1) if self.first else rotated
    if self.after is not None:
      k = self.after(k)
    return jnp.swapaxes(k, 1, 2)


tree.register(
  Rotation, ("length", "tables", "after", "log_factors"), ("rope", "first")
)
