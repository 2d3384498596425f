"""Layouts: the shard of each token, and the order of tokens on the shards.

Guarantees: a layout gives each token to a shard; a shard's tokens are in
increasing order of position. `restore(permute(x)) == x`, bit for bit, for every
length.
Layouts that deal out chunks of one length state which chunk goes where, from
which everything else (the permutation, the shards in a window's reach) follows.

  Contiguous  R chunks of T/R tokens, chunk i on shard i.
  Striped(b)  chunks of b tokens dealt round robin (Brandon et al. 2023,
              arXiv 2311.09431, with b = 1): causal work is level in each hop.
  Zigzag      2R chunks, shard i has chunks i and 2R-1-i: causal work is level
              over the whole ring.
  Uneven(c)   c[i] consecutive tokens on shard i (Cho et al. 2024, KV-Runahead,
              arXiv 2405.05329): causal work is level over a chain.

A length that does not divide is padded at the end of the sequence, which is
the end of some shards' parts; `local_length` counts the padding, `order` and
`permute` omit it.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Int, Shaped

from ringjax.errors import InputTypeError, OptionError, ShapeError
from ringjax.typing import Index

# NumPy arrays in a data loader, JAX arrays in a program.
Integers = TypeVar("Integers", Int[Array, "..."], Int[np.ndarray, "..."])
Tree = TypeVar("Tree")


class Layout(abc.ABC):
  """Base class of the layouts; an instance is static, hashable data."""

  @abc.abstractmethod
  def local_length(self, length: int, shards: int) -> int:
    """Number of tokens of each shard, padding included."""

  @abc.abstractmethod
  def position_of(
    self,
    shard: int | Integers,
    slot: Integers,
    shards: int,
    local_length: int,
  ) -> Integers:
    """Positions of the tokens in slots of shards, integers that broadcast.

    Both are NumPy arrays or both are JAX's; `shard` may be an int. Positions at
    or beyond the sequence's true length are padding.
    """

  def positions(
    self, index: Index, shards: int, local_length: int
  ) -> Int[Array, " T"]:
    """Positions of the tokens on shard `index`, int32 [local_length].

    Positions at or beyond the sequence's true length are padding.
    """
    slots = jnp.arange(local_length, dtype=jnp.int32)
    shard: Any = index
    return self.position_of(shard, slots, shards, local_length)

  def padded_order(self, length: int, shards: int) -> Int[np.ndarray, " slots"]:
    """Position of each token in layout order, -1 for padding, [R * local]."""
    local = self.local_length(length, shards)
    shard, slot = np.arange(shards)[:, None], np.arange(local)
    order = self.position_of(shard, slot, shards, local).reshape(-1)
    # A sequence that fills all slots has no padding.
    full = shards * local == length
    return order if full else np.where(order < length, order, -1)

  def real_tokens(self, length: int, shards: int) -> Int[np.ndarray, " R"]:
    """Tokens of each shard, without the padding after them: int64 [R]."""
    local = self.local_length(length, shards)
    shard, low = np.arange(shards), np.zeros(shards, np.int64)
    high = np.full(shards, local)
    # Positions increase along a shard: search the first beyond the end.
    while (low < high).any():
      middle = (low + high) // 2
      real = self.position_of(shard, middle, shards, local) < length
      real &= low < high
      low, high = np.where(real, middle + 1, low), np.where(real, high, middle)
    return low

  @abc.abstractmethod
  def reachable(
    self, shards: int, q_length: int, k_length: int, behind: int, ahead: int
  ) -> Bool[np.ndarray, " R"]:
    """Mark the ring distances that a window needs: bool [R].

    Entry d says that some shard i has a query that may see a key of shard
    (i - d) mod R, when a query at p sees keys from p - behind to p + ahead.
    Lengths are the padded ones of the whole sequence.
    """

  def order(self, length: int, shards: int) -> Int[np.ndarray, " T"]:
    """Position of each token in layout order, [length]: a permutation."""
    order = self.padded_order(length, shards)
    return order[order >= 0]

  def all_positions(self, length: int, shards: int) -> Int[Array, " T"]:
    """Return `order` for use in a program, int32 [length].

    Where every slot has a token the program computes it: a constant would make
    the program, and the time to compile it, grow with the length.
    """
    local = self.local_length(length, shards)
    if shards * local != length:
      return jnp.asarray(self.order(length, shards), jnp.int32)
    shard_positions = jax.vmap(
      lambda shard: self.positions(shard, shards, local)
    )
    return shard_positions(jnp.arange(shards, dtype=jnp.int32)).reshape(length)

  def permute(self, x: Tree, *, shards: int, axis: int = 1) -> Tree:
    """Reorder `axis` of `x` from natural order into this layout's order.

    Works on NumPy arrays (in a data loader) and on JAX arrays, and on the
    leaves of a pytree of them. Do it once, at the loader or the embedding.
    """
    return self._reorder(x, shards, axis, inverse=False)

  def restore(self, x: Tree, *, shards: int, axis: int = 1) -> Tree:
    """Undo `permute`."""
    return self._reorder(x, shards, axis, inverse=True)

  def _reorder(self, x: Tree, shards: int, axis: int, inverse: bool) -> Tree:
    _check_shards(shards)

    def reorder(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
      if not isinstance(leaf, jax.Array | np.ndarray):
        raise InputTypeError(
          "x",
          type(leaf).__name__,
          "a JAX or NumPy array, or a pytree of them",
          "convert it with np.asarray or jnp.asarray",
        )
      if not -leaf.ndim <= axis < leaf.ndim:
        raise ShapeError(
          "axis",
          f"{axis} for an array of shape {leaf.shape}",
          "a dimension of the array",
          "pass the dimension that runs over the sequence",
        )
      order = self.order(leaf.shape[axis], shards)
      if np.array_equal(order, np.arange(order.size)):
        return leaf
      index = np.argsort(order) if inverse else order
      if isinstance(leaf, np.ndarray):
        return np.take(leaf, index, axis=axis)
      sharding = jax.typeof(leaf).sharding
      if AxisType.Explicit in sharding.mesh.axis_types:
        # A gather along a sharded dimension needs the sharding of its result.
        leading = (slice(None),) * (axis % leaf.ndim)
        return leaf.at[(*leading, index)].get(out_sharding=sharding)
      return jnp.take(leaf, index, axis=axis)

    return jax.tree.map(reorder, x)

  def check_local_length(self, local_length: int) -> str | None:
    """Describe what is wrong with a shard of `local_length` tokens, or None."""
    del local_length
    return None


class Dealt(Layout):
  """A layout that deals chunks of one length out to the shards."""

  @abc.abstractmethod
  def chunk_length(self, length: int, shards: int) -> int:
    """Number of tokens of one chunk of a sequence of `length` tokens."""

  @abc.abstractmethod
  def owners(self, chunks: np.ndarray, shards: int) -> Int[np.ndarray, " ..."]:
    """Shard that holds each of the numbered `chunks`."""

  def reachable(
    self, shards: int, q_length: int, k_length: int, behind: int, ahead: int
  ) -> Bool[np.ndarray, " R"]:
    q_chunk = self.chunk_length(q_length, shards)
    k_chunk = self.chunk_length(k_length, shards)
    chunks = np.arange(q_length // q_chunk)
    owner = self.owners(chunks, shards)
    last = k_length // k_chunk - 1
    first_key = np.maximum((chunks * q_chunk - behind) // k_chunk, 0)
    last_key = np.minimum(((chunks + 1) * q_chunk - 1 + ahead) // k_chunk, last)
    # Chunks with the same offsets and the same owner's phase are one case.
    phase = chunks % shards if isinstance(self, Striped) else chunks
    cases = np.unique(
      np.stack([phase, first_key - chunks, last_key - chunks]),
      axis=1,
      return_index=True,
    )[1]
    needed = np.zeros(shards, bool)
    needed[0] = True
    for i in cases:
      # Any run of 2R chunks visits every shard, in every layout.
      stop = min(last_key[i], first_key[i] + 2 * shards)
      keys = np.arange(first_key[i], stop + 1)
      if keys.size:
        needed[(owner[i] - self.owners(keys, shards)) % shards] = True
    return needed


@dataclasses.dataclass(frozen=True)
class Contiguous(Dealt):
  """Shard i holds tokens i*T/R to (i+1)*T/R - 1."""

  def chunk_length(self, length: int, shards: int) -> int:
    return -(-length // shards)

  def owners(self, chunks: np.ndarray, shards: int) -> Int[np.ndarray, " ..."]:
    return np.minimum(chunks, shards - 1)

  def local_length(self, length: int, shards: int) -> int:
    return -(-length // shards)

  def position_of(
    self,
    shard: int | Integers,
    slot: Integers,
    shards: int,
    local_length: int,
  ) -> Integers:
    del shards
    return shard * local_length + slot


@dataclasses.dataclass(frozen=True)
class Striped(Dealt):
  """Blocks of `block` tokens are dealt to the shards in turn."""

  block: int = 1

  def __post_init__(self) -> None:
    is_int = isinstance(self.block, int | np.integer)
    if not is_int or isinstance(self.block, bool) or self.block < 1:
      raise OptionError(
        "block",
        repr(self.block),
        "a positive int, the tokens of one stripe",
        "use Striped() for stripes of one token",
      )
    object.__setattr__(self, "block", int(self.block))

  def chunk_length(self, length: int, shards: int) -> int:
    del length, shards
    return self.block

  def owners(self, chunks: np.ndarray, shards: int) -> Int[np.ndarray, " ..."]:
    return chunks % shards

  def local_length(self, length: int, shards: int) -> int:
    return -(-length // (self.block * shards)) * self.block

  def position_of(
    self,
    shard: int | Integers,
    slot: Integers,
    shards: int,
    local_length: int,
  ) -> Integers:
    del local_length
    stripe = (slot // self.block) * shards + shard
    return stripe * self.block + slot % self.block

  def reachable(
    self, shards: int, q_length: int, k_length: int, behind: int, ahead: int
  ) -> Bool[np.ndarray, " R"]:
    # Stripes repeat: a few periods cover all cases.
    period = self.block * shards
    if behind + ahead >= 2 * period:
      return np.ones(shards, bool)
    q_length, k_length = (min(n, 8 * period) for n in (q_length, k_length))
    return super().reachable(shards, q_length, k_length, behind, ahead)

  def check_local_length(self, local_length: int) -> str | None:
    if local_length % self.block:
      return f"a multiple of the stripe of {self.block} tokens"
    return None


@dataclasses.dataclass(frozen=True)
class Zigzag(Dealt):
  """Shard i holds the i-th of 2R chunks and the i-th from the end."""

  def chunk_length(self, length: int, shards: int) -> int:
    return -(-length // (2 * shards))

  def owners(self, chunks: np.ndarray, shards: int) -> Int[np.ndarray, " ..."]:
    return np.minimum(chunks, 2 * shards - 1 - chunks)

  def local_length(self, length: int, shards: int) -> int:
    return 2 * self.chunk_length(length, shards)

  def position_of(
    self,
    shard: int | Integers,
    slot: Integers,
    shards: int,
    local_length: int,
  ) -> Integers:
    half = local_length // 2
    second_half = (2 * shards - 1 - shard) * half + slot - half
    return _where(slot < half, shard * half + slot, second_half)

  def check_local_length(self, local_length: int) -> str | None:
    return "an even number" if local_length % 2 else None


@dataclasses.dataclass(frozen=True)
class Uneven(Layout):
  """Shard i holds `counts[i]` consecutive tokens.

  All shards have as many slots as the largest has tokens. A sequence of
  `sum(counts)` tokens is padded inside; one of `R * max(counts)` rows already
  has its empty slots, at the end of each shard.
  """

  counts: tuple[int, ...]

  def __post_init__(self) -> None:
    counts = self.counts
    are_counts = isinstance(counts, tuple | list) and all(
      isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0
      for n in counts
    )
    if not are_counts or sum(counts) < 1:
      raise OptionError(
        "counts",
        repr(self.counts),
        "the tokens of each shard, ints of at least 0",
        "pass e.g. Uneven((80, 64, 48, 48)), or search them with rj.plan",
      )
    object.__setattr__(self, "counts", tuple(int(n) for n in counts))

  @property
  def starts(self) -> tuple[int, ...]:
    """Position of each shard's first token."""
    return tuple(int(n) for n in np.cumsum((0, *self.counts[:-1])))

  def local_length(self, length: int, shards: int) -> int:
    max_count, total = max(self.counts), sum(self.counts)
    if shards != len(self.counts):
      raise ShapeError(
        "layout",
        f"{self} over {shards} shards",
        "a count for each shard",
        f"pass {shards} counts",
      )
    if length not in (total, shards * max_count):
      raise ShapeError(
        "layout",
        f"{self} for {length} tokens",
        f"{total} tokens, or {shards * max_count} rows with the empty slots",
        "pass counts that add up to the length",
      )
    return max_count

  def position_of(
    self,
    shard: int | Integers,
    slot: Integers,
    shards: int,
    local_length: int,
  ) -> Integers:
    as_array = np.asarray if isinstance(slot, np.ndarray) else jnp.asarray
    count, start = (
      as_array(np.asarray(n, slot.dtype))[shard]
      for n in (self.counts, self.starts)
    )
    empty = (shards + shard) * local_length + slot
    return _where(slot < count, start + slot, empty)

  def reachable(
    self, shards: int, q_length: int, k_length: int, behind: int, ahead: int
  ) -> Bool[np.ndarray, " R"]:
    self.local_length(q_length, shards)
    self.local_length(k_length, shards)
    first = np.asarray(self.starts)
    last = first + np.asarray(self.counts) - 1
    needed = np.zeros(shards, bool)
    needed[0] = True
    for i in range(shards):
      for j in range(shards):
        both_nonempty = self.counts[i] > 0 and self.counts[j] > 0
        in_window = first[i] - behind <= last[j] and first[j] <= last[i] + ahead
        needed[(i - j) % shards] |= bool(both_nonempty and in_window)
    return needed


# Layouts that have a name, the plainest first; `Uneven` needs counts.
LAYOUTS: dict[str, Layout] = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
}


class Slots(NamedTuple):
  """Slots of a padded layout that have tokens.

  Fields:
    local: Slots of each shard, whose tokens come first.
    runs: (shards, tokens of each), for runs of neighbours with equally many.
  """

  local: int
  runs: tuple[tuple[int, int], ...]


def slots_of(layout: Layout, length: int, shards: int) -> Slots | None:
  """Slots that a sequence fills; None if it fills all."""
  local = layout.local_length(length, shards)
  if shards * local == length:
    return None
  counts = layout.real_tokens(length, shards).tolist()
  runs = ((len(list(group)), n) for n, group in itertools.groupby(counts))
  return Slots(local, tuple(runs))


def into_slots(
  x: Shaped[Array, " ..."], slots: Slots | None, axis: int
) -> Shaped[Array, " ..."]:
  """Insert the empty slots into `x`, in the layout's order along `axis`.

  By slices: XLA's partitioner splits a gather of rows wrongly where another
  dimension is sharded, and its indices would be a constant as long as `x`.
  """
  if slots is None:
    return x
  return _refit(x, axis, [(n, count, slots.local) for n, count in slots.runs])


def out_of_slots(
  x: Shaped[Array, "B T ..."], slots: Slots
) -> Shaped[Array, "B _ ..."]:
  """Remove the empty slots along axis 1; undoes `into_slots`."""
  return _refit(x, 1, [(n, slots.local, count) for n, count in slots.runs])


def _refit(
  x: jax.Array, axis: int, runs: list[tuple[int, int, int]]
) -> jax.Array:
  """Pad the shards of `x` with zeros to their new length, or truncate them.

  `runs` are (shards, old, new): neighbours with the same lengths.
  """
  leading, trailing = x.shape[:axis], x.shape[axis + 1 :]
  parts: list[jax.Array] = []
  start = 0
  for shards, old, new in runs:
    stop = start + shards * old
    part = lax.slice_in_dim(x, start, stop, axis=axis)
    if new != old:
      part = part.reshape(*leading, shards, old, *trailing)
      part = lax.slice_in_dim(part, 0, min(old, new), axis=axis + 1)
      widths = [(0, 0)] * part.ndim
      widths[axis + 1] = (0, max(0, new - old))
      part = jnp.pad(part, widths).reshape(*leading, shards * new, *trailing)
    parts.append(part)
    start = stop
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _where(
  condition: Bool[Array | np.ndarray, " n"],
  if_true: Array | np.ndarray | int,
  if_false: Array | np.ndarray | int,
) -> Any:
  """`where` for NumPy or JAX arrays, as the condition is."""
  where_fn = np.where if isinstance(condition, np.ndarray) else jnp.where
  return where_fn(condition, if_true, if_false)


def _check_shards(shards: int) -> None:
  if not isinstance(shards, int | np.integer) or shards < 1:
    raise OptionError(
      "shards",
      repr(shards),
      "a positive int, the devices along the sequence axis",
      "pass shards=mesh.shape['seq']",
    )
