"""Rotary position embeddings: which angle a token's position turns a head by.

Guarantees: dims 2i and 2i+1 (interleaved), or i and i + dims/2 (halves), of a
head turn by position * frequency_i; the dot product of a query and a key then
depends on the distance of their positions only. Angles are exact to 8e-7
radians at every position of int32, see `ops.turns`.
Ref: Su et al. 2021, arXiv 2104.09864; the scalings as Hugging Face
checkpoints mean them: linear (Chen et al. 2023, arXiv 2306.15595), dynamic
NTK, Llama 3, YaRN (Peng et al. 2023, arXiv 2309.00071), LongRoPE (Ding et al.
2024, arXiv 2402.13753).

Two scalings look at the length of the context. It is an argument, one number
for all rows or one for each, never the length of an array at hand: a chunk or
a shard of a long text rotates like the whole of it, and a row like itself
alone. The length of a row is that of its prompt. Under LongRoPE its later
tokens go on with the divisors of the prompt: keys of one set and queries of
the other would not fit. Under dynamic NTK a token behind the prompt rotates by
the length up to itself, and keys keep the rotation with which they came, as
transformers' cache does. Both are the rotation of one pass over the row where
nothing is behind the prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ringjax import tree
from ringjax.ops import turns
from ringjax.ops.turns import Frequencies
from ringjax.typing import Index, Lengths


@dataclasses.dataclass(frozen=True)
class Unscaled:
  """The frequencies theta**(-2i/dims) as they are."""

  by_length = False

  def reaches(
    self, length: Lengths, positions: Int[Array, "#B T"]
  ) -> Int[Array, "#B _"]:
    """The length that decides for each token, of lengths [B] of its rows."""
    del positions
    return jnp.asarray(length)[:, None]

  def alike(self, length: int) -> int:
    """A number that prompts have in common if they rotate alike."""
    del length
    return 0

  def scale(self, inverse: np.ndarray, theta: float) -> np.ndarray:
    """Radians [dims/2] of one position from the unscaled ones."""
    del theta
    return inverse

  def frequencies(
    self, inverse: np.ndarray, theta: float, length: Lengths | None
  ) -> Frequencies:
    """Of a context's length, or of several [*N], from the unscaled ones."""
    del length
    return Frequencies.of(self.scale(inverse, theta))

  @property
  def magnitude(self) -> float:
    """Factor of the cosines and sines."""
    return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Unscaled):
  """All positions divided by `factor`.

  Attributes:
    original: the context that is stretched, where that is known.
  """

  factor: float
  original: int | None = None

  def scale(self, inverse: np.ndarray, theta: float) -> np.ndarray:
    return inverse / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proportional(Unscaled):
  """Only the fastest `turning` frequencies turn; `factor` divides positions.

  A pair is as far apart as where all turn, which a part of the dims is not.
  """

  turning: int
  factor: float = 1.0

  def scale(self, inverse: np.ndarray, theta: float) -> np.ndarray:
    turning = np.arange(inverse.size) < self.turning
    return np.where(turning, inverse, 0.0) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(Unscaled):
  """A base that grows with the length beyond `original`."""

  factor: float
  original: int

  by_length = True

  def reaches(
    self, length: Lengths, positions: Int[Array, "#B T"]
  ) -> Int[Array, "#B T"]:
    upto = jnp.minimum(positions, 2**31 - 2) + 1
    return jnp.maximum(jnp.asarray(length)[:, None], upto)

  def alike(self, length: int) -> int:
    return max(length, self.original)

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
  """Long wavelengths divided by `factor`, short ones kept, a ramp between.

  Where `low` is `high` there is no ramp.
  """

  factor: float
  low: float
  high: float
  original: int

  def scale(self, inverse: np.ndarray, theta: float) -> np.ndarray:
    times = self.original * inverse / (2 * math.pi)
    if self.low == self.high:
      keep = np.where(times >= self.low, 1.0, 0.0)
    else:
      keep = np.clip((times - self.low) / (self.high - self.low), 0, 1)
    return keep * inverse + (1 - keep) * inverse / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(Unscaled):
  """Interpolates dims that turn less than `slow` times in `original` tokens.

  Those that turn more than `fast` times are kept; between is a ramp over dims.
  """

  factor: float
  original: int
  fast: float = 32.0
  slow: float = 1.0
  truncate: bool = True
  attention: float | None = None

  def scale(self, inverse: np.ndarray, theta: float) -> np.ndarray:
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
  """A divisor for each dim: one set up to `original` tokens, one beyond."""

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
    beyond = jnp.asarray(length, jnp.int32)[..., None] > self.original
    long, short = (
      Frequencies.of(inverse / np.asarray(x)).with_axes(beyond.ndim - 1)
      for x in (self.long, self.short)
    )
    return Frequencies(
      jnp.where(beyond, long.units, short.units),
      jnp.where(beyond, long.rest, short.rest),
    )

  @property
  def magnitude(self) -> float:
    if self.attention is not None:
      return self.attention
    if self.factor <= 1:
      return 1.0
    return math.sqrt(1 + math.log(self.factor) / math.log(self.original))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """A rotary embedding.

  Attributes:
    theta: base of the frequencies.
    dims: how many of a head's dims turn, the first ones; the others do not.
    interleaved: whether neighbours make a pair, or the two halves do.
    scaling: how long contexts are fitted in.
    reverse: whether it turns the other way.
    copies: how many times there are `dims` that turn, one behind another, all
      by the same angles.
  """

  theta: float
  dims: int
  interleaved: bool = False
  scaling: Unscaled = Unscaled()
  reverse: bool = False
  copies: int = 1

  def tables(
    self, positions: Int[Array, "#B T"], length: Lengths | None
  ) -> tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]:
    """Cosines and sines, float32 [B, T, dims/2], for `positions` [B, T].

    `length` is that of the whole context, an int or a traced int32 scalar; or
    int32 [B], the prompt of each row, see the head of this file.
    """
    by_row = length is not None and np.ndim(length) > 0
    if by_row and self.scaling.by_length:
      frequencies = self.frequencies(self.scaling.reaches(length, positions))
    else:
      frequencies = self.frequencies(None if by_row else length)
      frequencies = frequencies.with_axes(2)
    angles = frequencies.angles(positions[..., None])
    size = jnp.float32(self.scaling.magnitude)
    return jnp.cos(angles) * size, jnp.sin(angles) * size

  def frequencies(self, length: Lengths | None) -> Frequencies:
    """What one position turns each pair by, [*N, dims/2].

    `length` [*N] as of `tables`, one or several.
    """
    exponents = np.arange(0, self.dims, 2, dtype=turns.WIDE) / self.dims
    inverse = turns.WIDE(self.theta) ** -exponents
    each = self.scaling.frequencies(inverse, self.theta, length)
    return each.reversed() if self.reverse else each

  @property
  def pairs(self) -> np.ndarray:
    """Which of the frequencies turns each of the first dims, int [turned]."""
    each = np.arange(self.dims // 2)
    one = np.repeat(each, 2) if self.interleaved else np.tile(each, 2)
    return np.tile(one, self.copies)

  @property
  def turned(self) -> int:
    """Dims that turn, in all copies."""
    return self.copies * self.dims

  def rotate(
    self,
    x: Float[Array, "B T N H"],
    tables: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]],
  ) -> Float[Array, "B T N H"]:
    """Rotates queries or keys by the tables of their positions."""
    if self.copies > 1:
      parts = jnp.split(x[..., : self.turned], self.copies, -1)
      one = dataclasses.replace(self, copies=1)
      parts = [one.rotate(part, tables) for part in parts]
      return jnp.concatenate([*parts, x[..., self.turned :]], -1)
    cos, sin = (t[:, :, None] for t in tables)
    turned, rest = x[..., : self.dims], x[..., self.dims :]
    wide = turned.astype(jnp.float32)
    if self.interleaved:
      a, b = wide[..., 0::2], wide[..., 1::2]
      wide = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
      wide = wide.reshape(turned.shape)
    else:
      a, b = jnp.split(wide, 2, -1)
      wide = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    wide = wide.astype(x.dtype)
    return jnp.concatenate([wide, rest], -1) if rest.shape[-1] else wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
  """What makes a key of its projection: a rotation, and a norm behind it.

  It goes to the cache with the keys, which may rotate them as they come or
  keep them as they are and rotate them where they are read.

  Attributes:
    rope: the rotation; None leaves keys as they are.
    first: the first dim of a head that it rotates.
    length: tokens of the whole context, or [B] of each row's prompt, for
      rotations that depend on it; see `Rope.tables`.
    tables: of the call's own tokens, see `Rope.tables`; None: made anew.
    after: a function of keys [B, S, K, H], behind the rotation, or None.
  """

  rope: Rope | None = None
  first: int = 0
  length: Lengths | None = None
  tables: tuple[Array, Array] | None = None
  after: Callable[[Array], Array] | None = None

  @property
  def trivial(self) -> bool:
    """Whether keys stay as they are."""
    return self.rope is None and self.after is None

  def own(self, k: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
    """Keys of the call's tokens, rotated."""
    return self._apply(k, self.tables)

  def anywhere(
    self, k: Float[Array, "B K S H"], pos: Int[Array, "#B S"]
  ) -> Float[Array, "B K S H"]:
    """Keys of tokens at positions `pos`, rotated."""
    tables = None if self.rope is None else self.rope.tables(pos, self.length)
    return self._apply(k, tables)

  def quarter(self, q: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
    """Queries' pairs of numbers rotated by -90 degrees.

    What a key's sines multiply: q . R(p) k is the sum of q times k times the
    cosines, and of `quarter(q)` times k times the sines.
    """
    assert self.rope is not None
    like = jnp.zeros((1, q.shape[2], self.rope.dims // 2), jnp.float32)
    return dataclasses.replace(self, after=None)._apply(q, (like, like - 1))

  @property
  def by_row(self) -> bool:
    """Whether rows may have frequencies of their own."""
    scaled = self.rope is not None and self.rope.scaling.by_length
    return scaled and self.length is not None and np.ndim(self.length) > 0

  def of_row(self, row: Index) -> Rotation:
    """The same for one row of the batch, of which the others are left out."""
    if self.length is None or np.ndim(self.length) == 0:
      return self
    length = jnp.asarray(self.length)
    each = jax.lax.dynamic_slice_in_dim(length, row, 1)
    return dataclasses.replace(
      self, length=each if length.size > 1 else length, tables=None
    )

  def specs(self, batch: str | tuple[str, ...] | None) -> Rotation:
    """PartitionSpecs where rows lie along the mesh axes `batch`."""
    found = jax.tree.map(lambda _: P(), self)
    if self.length is None or np.shape(self.length) in ((), (1,)):
      return found
    return tree.with_leaves(
      self, length=P(batch), tables=found.tables, after=found.after
    )

  def general(self) -> Rotation:
    """The same for tokens of any call."""
    return dataclasses.replace(self, tables=None)

  def _apply(
    self, k: jax.Array, tables: tuple[Array, Array] | None
  ) -> jax.Array:
    if self.trivial:
      return k
    k = jnp.swapaxes(k, 1, 2)
    if self.rope is not None:
      assert tables is not None
      still, rest = k[..., : self.first], k[..., self.first :]
      rest = self.rope.rotate(rest, tables)
      k = jnp.concatenate([still, rest], -1) if self.first else rest
    if self.after is not None:
      k = self.after(k)
    return jnp.swapaxes(k, 1, 2)


tree.register(Rotation, ("length", "tables", "after"), ("rope", "first"))
