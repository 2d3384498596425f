"""Layers whose weights are not all on the devices: fetched where they are used.

Guarantees: a layer gets exactly the numbers that it would have on the devices;
they are constants to a gradient, and a backward pass fetches them again.
A program contains the number of a layer, never its weights as constants.
Memory: on the devices, in addition to the layers that stay there, the weights
of the layer that runs, and of one in flight.

Layers in the host's memory are stored in one array for each parameter, of which
a layer's part is copied to the devices; layers on disk are read by a callback
that gets the layer's number, and on a mesh the shard that a device needs.
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
from ringjax.parallel import collectives, joint_outcome
from ringjax.typing import Index

# Width of a TPU vector register.
_LANES = 128


@runtime_checkable
class ReadsLayers(Protocol):
  """Reader of layers from disk, see `models.hf.layer_reader`."""

  def get(self, number: int, at: tuple[int, ...] = ()) -> Any: ...


@dataclasses.dataclass
class ReadFault:
  """Holder of the error of a read, until it can be raised.

  Attributes:
    error: Error of a read of this process, or None.
    silent: Whether the program continues with NaN, and raises nothing.
    ranks: Processes that run the program together, by `processes_of`: all
      raise the error of one.
  """

  error: RingjaxError | None = None
  # Whether its program continues with NaN, and raises nothing.
  silent: bool = False
  ranks: tuple[int, ...] = ()

  def __deepcopy__(self, memo: dict[int, object]) -> ReadFault:
    return self


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DiskLayers:
  """Layers of a kind that are stored in the same way on disk.

  Attributes:
    reader: Reader of the layers.
    numbers: Numbers of the layers in the model.
    shapes: Shapes and dtypes of the arrays that a read returns, on a shard.
    specs: Shardings of these arrays over the mesh.
    axes: Mesh axes whose shard index a read needs.
    weights: Function from the arrays of a read to the parameters, in the order
      of `PlacedLayers.paths`.
    fault: Holder of the error of a read.
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
  ) -> list[Shaped[Array, " ..."]]:
    """Read the parameters of a layer.

    Args:
      which: Index into `numbers`.
      after: Array that must be computed before the read, so that a compiler
        does not read layers early.
      mesh: Mesh of the weights, or None.
      spec: Sharding of `after` over the mesh.
    """
    barrier = lax.stop_gradient(after)
    fill_nan = mesh is not None

    def call(
      which: Array | np.ndarray, at: Array | np.ndarray, _: Any
    ) -> tuple[Any, ...]:
      shard = tuple(int(n) for n in np.asarray(at)[1:])
      try:
        return self.reader.get(self.numbers[int(which)], shard)
      except Exception as error:
        ringjax_error = error
        if not isinstance(ringjax_error, RingjaxError):
          ringjax_error = CheckpointFormatError(
            f"layer {self.numbers[int(which)]}",
            f"{type(error).__name__}: {error}",
            "a layer that can be read",
            "load the model without placement= and memory=",
          )
        self.fault.error, self.fault.silent = ringjax_error, fill_nan
        if not fill_nan:
          raise ringjax_error from error
        # Other devices wait for this one: it continues, with NaN.
        return tuple(_no_numbers(x) for x in self.shapes)

    def local(which: jax.Array, after: jax.Array) -> tuple[jax.Array, ...]:
      shard_indices = [collectives.axis_index(axis) for axis in self.axes]
      return jax.pure_callback(
        call,
        self.shapes,
        which,
        jnp.stack([jnp.int32(0), *shard_indices]),
        after.reshape(-1)[0],
        vmap_method="sequential",
      )

    index = jnp.asarray(which, jnp.int32)
    if mesh is None:
      return self.weights(local(index, barrier))
    arrays = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(), spec),
      out_specs=self.specs,
      check_vma=False,
    )(index, barrier)
    return self.weights(arrays)


def in_rows(shape: Sequence[int]) -> tuple[int, ...]:
  """Shape in which a layer's vector is stored in host memory; () if unchanged.

  Args:
    shape: Shape of a device's part of it.
  """
  if len(shape) != 1 or not shape[0] or shape[0] % _LANES:
    return ()
  return shape[0] // _LANES, _LANES


def _no_numbers(x: jax.ShapeDtypeStruct) -> np.ndarray:
  """NaN in every dtype of weights, and the invalid code in codes."""
  filled = np.empty(x.shape, x.dtype)
  filled.reshape(-1).view(np.uint8)[...] = 0xFF
  return filled


class _Branch(NamedTuple):
  """Tier of a layer, and its index within the tier."""

  tier: int
  rank: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlacedLayers:
  """Placement of the weights of one kind of layers.

  Attributes:
    paths: Paths of a layer's parameters, in the order of its block's leaves.
    shapes: Shapes and dtypes of these parameters, for one layer.
    specs: Shardings of these parameters over the mesh.
    mesh: Mesh of the weights, or None.
    tiers: Tier of each of the kind's layers, one of `TIERS`.
    disk: Layers on disk, grouped by how they are stored.
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
    """Index of a layer among the layers of its tier."""
    return self.tiers[:index].count(self.tiers[index])

  def _branches(self) -> list[_Branch]:
    """Branch of each layer: 0 on the devices, 1 on the host, 2... on disk."""
    branches = []
    for index, number in enumerate(self.numbers):
      tier = TIERS.index(self.tiers[index])
      if self.tiers[index] != DISK:
        branches.append(_Branch(tier, self.rank(index)))
        continue
      entry, part = next(
        (n, layers)
        for n, layers in enumerate(self.disk)
        if number in layers.numbers
      )
      branches.append(_Branch(tier + entry, part.numbers.index(number)))
    return branches

  def fetch(
    self,
    index: Index,
    resident: Sequence[Shaped[Array, " ..."]],
    hosted: Sequence[Shaped[Array, " ..."]],
    after: Shaped[Array, " ..."],
    spec: P,
    within: range | None = None,
  ) -> list[Shaped[Array, " ..."]]:
    """Fetch the parameters of one layer, in the order of `paths`.

    Args:
      index: Index among the kind's layers.
      resident: Parameters of layers on the devices, [n, ...].
      hosted: Parameters in the host's memory, [m, ...], vectors in the shape of
        `in_rows`; empty without any.
      after: Array that must be computed before a layer on disk is read.
      spec: Sharding of `after` over the mesh.
      within: Possible values of the index; other values give an arbitrary
        layer.
        None: any value.

    Raises:
      MeshError: If there is a mesh, in a shard_map.
    """
    if self.mesh is not None and collectives.manual_axes():
      raise MeshError(
        "model",
        "streamed weights on a mesh, in a shard_map",
        "a call from outside of it",
        "load the model without placement=, or call it outside",
      )
    branches = self._branches()
    possible = (
      branches if within is None else branches[within.start : within.stop]
    )
    used = sorted({branch.tier for branch in possible})
    ranks = jnp.asarray([branch.rank for branch in branches], jnp.int32)
    switch_index = jnp.asarray(
      [used.index(b.tier) if b.tier in used else 0 for b in branches], jnp.int32
    )
    index = jnp.asarray(index, jnp.int32)
    pick = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    rank = pick(ranks)

    def fetch_from_tier(tier: int) -> Callable[[], list[jax.Array]]:
      if tier == 0:
        return lambda: self._with_shardings(
          [
            lax.dynamic_index_in_dim(x, rank, 0, keepdims=False)
            for x in resident
          ]
        )
      if tier == 1:
        return lambda: self._with_shardings(self._from_host(hosted, rank))
      part = self.disk[tier - 2]
      return lambda: self._with_shardings(
        part.read(rank, after, self.mesh, spec)
      )

    fetch_functions = [fetch_from_tier(tier) for tier in used]
    weights = (
      fetch_functions[0]()
      if len(fetch_functions) == 1
      else lax.switch(pick(switch_index), fetch_functions)
    )
    # A layer's results must not depend on where its weights come from.
    return lax.optimization_barrier(weights)

  def _from_host(
    self, hosted: Sequence[jax.Array], rank: jax.Array
  ) -> list[jax.Array]:
    def local(rank: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
      # Along the first axis only, as TPU slices the host's memory.
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
    layer = local(rank, *map(lax.stop_gradient, hosted))
    return [
      x.reshape(like.shape) for x, like in zip(layer, self.shapes, strict=True)
    ]

  def _with_shardings(self, weights: list[jax.Array]) -> list[jax.Array]:
    if self.mesh is None:
      return weights
    return [
      lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
      for x, spec in zip(weights, self.specs, strict=True)
    ]


def raise_fault(faults: Sequence[ReadFault]) -> None:
  """Raise the error of a read that no program could raise.

  In a program of several processes all call this, and all raise.

  Raises:
    CheckpointFormatError: If a file has changed, or on an I/O error.
    CheckpointMismatchError: If numbers are not finite.
  """
  for fault in faults:
    error, fault.error = fault.error, None
    joint_outcome.raise_first(error, fault.ranks)


@contextlib.contextmanager
def naming_faults(faults: Sequence[ReadFault]) -> Iterator[None]:
  """Context around programs that fetch layers: raises the error of a read.

  A program in which a read fails ends with an error of JAX, or on a mesh with
  NaN. Any other error of one of several processes is raised in all, too: each
  makes the same exchanges, whatever happens.

  Raises:
    CheckpointFormatError: See `raise_fault`.
    CheckpointMismatchError: See `raise_fault`.
  """
  for fault in faults:
    if not fault.silent:
      # Left from an earlier program, which raised it.
      fault.error = None
  try:
    yield
  except Exception as error:
    if joint_outcome.is_told(error):
      raise
    cause: Exception = error
    for fault in faults:
      if fault.error is not None and not isinstance(error, RingjaxError):
        cause = fault.error
        cause.__cause__ = error
      fault.error = None
    # Instead of the exchange that the other processes do next.
    ranks = next((fault.ranks for fault in faults if fault.ranks), ())
    joint_outcome.raise_first(cause, ranks)
  else:
    raise_fault(faults)
