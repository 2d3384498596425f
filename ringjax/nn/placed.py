"""Layers whose weights are not all on the devices: fetched where they are used.

Guarantees: a layer gets the numbers that it would have on the devices, to the
bit; they are constants to a gradient, and a backward pass fetches them again.
A program has the number of a layer, and never its weights as constants.
Memory: on the devices, beside the layers that are there, the weights of one
layer that runs, and of one that is on its way.

Layers in the host's memory lie in one array for each parameter, of which a
layer's part is copied to the devices; layers on disk are read by a callback
that gets the layer's number, and on a mesh which shard a device wants.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.errors import CheckpointFormatError, MeshError, RingjaxError
from ringjax.kv.base import DISK, TIERS
from ringjax.parallel import collectives, outcome
from ringjax.typing import Index

# Of a row of a TPU's registers.
_LANES = 128


@runtime_checkable
class ReadsLayers(Protocol):
  """What reads layers from disk, see `models.hf.layer_reader`."""

  def get(self, number: int, at: tuple[int, ...] = ()) -> Any: ...


@dataclasses.dataclass
class ReadFault:
  """The error of a read that a program could not raise, until it is raised.

  Attributes:
    error: of a read of this process.
    silent: see below.
    ranks: processes that run the program together, by `processes_of`: all
      raise the error of one.
  """

  error: RingjaxError | None = None
  # Whether its program goes on without numbers, and raises nothing.
  silent: bool = False
  ranks: tuple[int, ...] = ()

  def __deepcopy__(self, memo: dict[int, object]) -> ReadFault:
    return self


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DiskLayers:
  """Some layers of a kind that are stored alike on disk.

  Attributes:
    reader: reads them.
    numbers: of the layers in the model.
    shapes: of the arrays that a read returns, on a shard.
    specs: how these are sharded over the mesh.
    axes: mesh axes of which a read is told the shard.
    weights: the parameters, in the order of `PlacedLayers.paths`, from the
      arrays of a read.
    fault: where the error of a read is kept.
  """

  reader: ReadsLayers
  numbers: tuple[int, ...]
  shapes: tuple[jax.ShapeDtypeStruct, ...]
  specs: tuple[P, ...]
  axes: tuple[str, ...]
  weights: Callable[[Sequence[jax.Array]], list[jax.Array]]
  fault: ReadFault

  def __deepcopy__(self, memo: dict[int, object]) -> DiskLayers:
    return self

  def read(
    self,
    which: Index,
    after: Shaped[Array, " ..."],
    mesh: Mesh | None,
    spec: P,
  ) -> list[jax.Array]:
    """The parameters of a layer.

    Args:
      which: of `numbers`.
      after: what must be computed before it is read, so that a compiler reads
        no layer before its time.
      mesh: of the weights.
      spec: how `after` is sharded over it.
    """
    after = lax.stop_gradient(after)
    poison = mesh is not None

    def call(which: Any, at: Any, _: Any) -> tuple[Any, ...]:
      place = tuple(int(n) for n in np.asarray(at)[1:])
      try:
        return self.reader.get(self.numbers[int(which)], place)
      except Exception as error:
        found = error
        if not isinstance(found, RingjaxError):
          found = CheckpointFormatError(
            f"layer {self.numbers[int(which)]}",
            f"{type(error).__name__}: {error}",
            "a layer that can be read",
            "load the model without placement= and memory=",
          )
        self.fault.error, self.fault.silent = found, poison
        if not poison:
          raise found from error
        # Other devices wait for this one: it goes on, with no numbers.
        return tuple(_no_numbers(x) for x in self.shapes)

    def local(which: jax.Array, after: jax.Array) -> tuple[jax.Array, ...]:
      at = [collectives.axis_index(axis) for axis in self.axes]
      return jax.pure_callback(
        call,
        self.shapes,
        which,
        jnp.stack([jnp.int32(0), *at]),
        after.reshape(-1)[0],
        vmap_method="sequential",
      )

    which = jnp.asarray(which, jnp.int32)
    if mesh is None:
      return self.weights(local(which, after))
    found = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(), spec),
      out_specs=self.specs,
      check_vma=False,
    )(which, after)
    return self.weights(found)


def in_rows(shape: Sequence[int]) -> tuple[int, ...]:
  """How a vector of a layer is stored in the host's memory; () as it is.

  Args:
    shape: of a device's part of it.
  """
  if len(shape) != 1 or not shape[0] or shape[0] % _LANES:
    return ()
  return shape[0] // _LANES, _LANES


def _no_numbers(x: jax.ShapeDtypeStruct) -> np.ndarray:
  """NaN in every dtype of weights, and of codes what stands for none."""
  made = np.empty(x.shape, x.dtype)
  made.reshape(-1).view(np.uint8)[...] = 0xFF
  return made


class _Branch(NamedTuple):
  """Of which tier a layer is, and which of that tier's."""

  tier: int
  rank: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayers:
  """Where the weights of one kind of layers are.

  Attributes:
    paths: of a layer's parameters, in the order of the leaves of its block.
    shapes: of these, for one layer.
    specs: how they are sharded over the mesh.
    mesh: of the weights, or None.
    tiers: of each of the kind's layers, of `TIERS`.
    disk: those on disk, by how they are stored.
  """

  paths: tuple[str, ...]
  shapes: tuple[jax.ShapeDtypeStruct, ...]
  specs: tuple[P, ...]
  mesh: Mesh | None
  tiers: tuple[str, ...]
  disk: tuple[DiskLayers, ...]
  numbers: tuple[int, ...]

  def __deepcopy__(self, memo: dict[int, object]) -> PlacedLayers:
    return self

  @property
  def layer_bytes(self) -> int:
    """Bytes of a layer's parameters."""
    return sum(x.size * x.dtype.itemsize for x in self.shapes)

  def rank(self, index: int) -> int:
    """Which of the layers of its tier a layer is."""
    return self.tiers[:index].count(self.tiers[index])

  def _branches(self) -> list[_Branch]:
    """For each layer: 0 on the devices, 1 on the host, 2... on disk."""
    found = []
    for index, number in enumerate(self.numbers):
      tier = TIERS.index(self.tiers[index])
      if self.tiers[index] != DISK:
        found.append(_Branch(tier, self.rank(index)))
        continue
      n, part = next(
        (n, x) for n, x in enumerate(self.disk) if number in x.numbers
      )
      found.append(_Branch(tier + n, part.numbers.index(number)))
    return found

  def fetch(
    self,
    index: Index,
    resident: Sequence[Shaped[Array, " ..."]],
    hosted: Sequence[Shaped[Array, " ..."]],
    after: Shaped[Array, " ..."],
    spec: P,
    within: range | None = None,
  ) -> list[jax.Array]:
    """The parameters of one layer, in the order of `paths`.

    Args:
      index: which of the kind's layers.
      resident: the parameters of layers on the devices, [n, ...].
      hosted: of those in the host's memory, [m, ...], of vectors as `in_rows`
        says; none without any.
      after: what must be computed before a layer on disk is read.
      spec: how `after` is sharded over the mesh.
      within: what the index may be; others give a layer that is none of these.
        None: any.

    Raises:
      MeshError: on a mesh, in a shard_map.
    """
    if self.mesh is not None and collectives.manual_axes():
      raise MeshError(
        "model",
        "streamed weights on a mesh, in a shard_map",
        "a call from outside of it",
        "load the model without placement=, or call it outside",
      )
    branches = self._branches()
    some = branches if within is None else branches[within.start : within.stop]
    used = sorted({branch.tier for branch in some})
    ranks = jnp.asarray([branch.rank for branch in branches], jnp.int32)
    turns = jnp.asarray(
      [used.index(b.tier) if b.tier in used else 0 for b in branches], jnp.int32
    )
    index = jnp.asarray(index, jnp.int32)
    pick = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    rank = pick(ranks)

    def of(tier: int) -> Callable[[], list[jax.Array]]:
      if tier == 0:
        return lambda: self._constrained(
          [
            lax.dynamic_index_in_dim(x, rank, 0, keepdims=False)
            for x in resident
          ]
        )
      if tier == 1:
        return lambda: self._constrained(self._from_host(hosted, rank))
      part = self.disk[tier - 2]
      return lambda: self._constrained(part.read(rank, after, self.mesh, spec))

    made = [of(tier) for tier in used]
    found = made[0]() if len(made) == 1 else lax.switch(pick(turns), made)
    # What a layer computes must not depend on where its weights come from.
    return lax.optimization_barrier(found)

  def _from_host(
    self, hosted: Sequence[jax.Array], rank: jax.Array
  ) -> list[jax.Array]:
    def local(rank: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
      # Along the first axis alone, as TPU cuts the host's memory.
      return [
        jax.device_put(
          lax.dynamic_slice_in_dim(x, rank, 1, 0), jax.memory.Space.Device
        )
        for x in arrays
      ]

    if self.mesh is not None:
      stacked = tuple(P(None, *spec) for spec in self.specs)
      local = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(P(), *stacked),
        out_specs=list(stacked),
        check_vma=False,
      )
    found = local(rank, *map(lax.stop_gradient, hosted))
    return [
      x.reshape(like.shape) for x, like in zip(found, self.shapes, strict=True)
    ]

  def _constrained(self, found: list[jax.Array]) -> list[jax.Array]:
    if self.mesh is None:
      return found
    return [
      lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
      for x, spec in zip(found, self.specs, strict=True)
    ]


def raise_fault(faults: Sequence[ReadFault]) -> None:
  """Raises the error of a read that no program could raise.

  Of a program of several processes all call this, and all raise.

  Raises:
    CheckpointFormatError: a file that has changed, or an I/O error.
    CheckpointMismatchError: numbers that are not finite.
  """
  for fault in faults:
    error, fault.error = fault.error, None
    outcome.raise_first(error, fault.ranks)


@contextlib.contextmanager
def naming_faults(faults: Sequence[ReadFault]) -> Iterator[None]:
  """Around programs that fetch layers: names the error of a read.

  A program that a read fails in ends with an error of JAX, or on a mesh with
  numbers that are none. Any other error of one of several processes is one of
  all, too: each makes the same exchanges, whatever happens.

  Raises:
    CheckpointFormatError: see `raise_fault`.
    CheckpointMismatchError: see `raise_fault`.
  """
  for fault in faults:
    if not fault.silent:
      # Of an earlier program, which raised it.
      fault.error = None
  try:
    yield
  except Exception as error:
    if outcome.is_told(error):
      raise
    found: Exception = error
    for fault in faults:
      if fault.error is not None and not isinstance(error, RingjaxError):
        found = fault.error
        found.__cause__ = error
      fault.error = None
    # In place of the exchange that the others come to next.
    ranks = next((fault.ranks for fault in faults if fault.ranks), ())
    outcome.raise_first(found, ranks)
  else:
    raise_fault(faults)
