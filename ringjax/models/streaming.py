"""Puts a model's layers where a placement says, while its folder is read.

Guarantees: names, forms, dtypes and shardings of tensors are those of
`rj.models.load`; a layer that is fetched has the numbers that it would have if
it were loaded.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from ringjax.errors import MemoryEstimateError, OptionError
from ringjax.kv.base import DEVICE, DISK, HOST, IN_HOST, TIERS
from ringjax.models.hf.folder import Folder
from ringjax.models.hf.layer_reader import LayerReader, StoredPart
from ringjax.models.hf.packed import Packed
from ringjax.models.hf.tensors import CheckpointTensor, parameters
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import WeightPlacement, as_bytes, deal
from ringjax.nn.placed import (
  DiskLayers,
  PlacedLayers,
  ReadFault,
  in_rows,
)
from ringjax.nn.stack import Run
from ringjax.parallel import memory as host_memory
from ringjax.parallel import outcome

_STACK = "stack.blocks."
# Of the host's free memory, what layers may have: something else runs too.
_OF_HOST = 0.9

# What the pieces of a tensor are on the devices, by their names.
Targets = Callable[[CheckpointTensor], Mapping[str, jax.ShapeDtypeStruct]]


def planned(
  model: Transformer,
  shardings: Mapping[str, Any],
  placement: object,
  memory: object,
  beside: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
  """The memory of each layer of a model of shapes.

  Args:
    model: of shapes, all of whose layers are stacked.
    shardings: of its parameters by their paths, None for one device.
    placement: a `Placement`, a text that stands for one, or None.
    memory: bytes that all weights may take on a device, as a number or a text,
      or None. Those of two layers that pass through it are counted. Layers
      are on the device as far as they fit. The others are in the host's memory
      as far as they fit there; or where the placement says, "host" or "disk";
      or as its fractions say, of which the host has what the bytes keep off
      the device.
    beside: bytes by memory that a call has beside the weights; with `memory`,
      which is then of both.

  Raises:
    OptionError: another placement or memory.
    MemoryEstimateError: not even the outer weights and two layers fit.
  """
  layers, outer = _layer_bytes(model, shardings)
  total, widest = sum(layers), max(layers)
  meshes = [x.mesh for x in shardings.values() if x is not None]
  devices = len(meshes[0].local_devices) if meshes else 1
  if memory is None:
    wanted = WeightPlacement.of(placement)
    room = {tier: getattr(wanted, tier) * total for tier in TIERS}
    return deal(layers, room)
  most, call = as_bytes(memory), beside or {}
  also = call.get(DEVICE, 0)
  if outer + total + also <= most and placement is None:
    return (DEVICE,) * len(layers)
  left = most - outer - 2 * widest - also
  if left < 0:
    more = f", and {also:,} of the call" if also else ""
    raise MemoryEstimateError(
      "memory",
      f"{most:,} bytes",
      f"at least {outer + 2 * widest + also:,}: embedding, norm and head, and "
      f"two layers that pass through{more}",
      "pass more, or a mesh whose 'model' axis shards the weights"
      + ("; or fewer rows at once, and keys in host memory" if also else ""),
    )
  room = {DEVICE: min(left, total)}
  if placement is None:
    free = host_memory.host_free_bytes()
    rest = total - room[DEVICE]
    # Each device has its shard of a layer there.
    if free is not None:
      free = max(0, free - call.get(IN_HOST, 0))
    fits = rest if free is None else min(rest, _OF_HOST * free / devices)
    # All processes place the same layers.
    ranks = outcome.processes_of(meshes[0] if meshes else None)
    fits = min(outcome.exchanged(fits, ranks))
    return deal(layers, room | {IN_HOST: fits, DISK: rest - fits})
  wanted = WeightPlacement.of(placement)
  if wanted.disk == 1 or wanted.host == 1:
    rest = DISK if wanted.disk else IN_HOST
    return deal(layers, room | {rest: total - room[DEVICE]})
  disk = total * (wanted.disk or 0.0)
  room = {DEVICE: min(left, total * (wanted.device or 0.0)), DISK: disk}
  return deal(layers, room | {IN_HOST: total - disk - room[DEVICE]})


def _layer_bytes(
  model: Transformer, shardings: Mapping[str, Any]
) -> tuple[list[int], int]:
  """Bytes on a device: of each layer, and of all that is no layer."""
  layers, outer = [0] * len(model.config.layers), 0
  for path, p in parameters(model).items():
    shape = p.get_value().shape
    if shardings[path] is not None:
      shape = shardings[path].shard_shape(shape)
    n = math.prod(shape) * p.get_value().dtype.itemsize
    if not path.startswith(_STACK):
      outer += n
      continue
    run, position = _kind(path)
    found = model.stack.runs[run]
    for index in range(found.repeats):
      layers[found.number(position, index)] += n // found.repeats
  return layers, outer


def _kind(path: str) -> tuple[int, int]:
  """(run, position) of a parameter in a layer."""
  run, position, _ = path.removeprefix(_STACK).split(".", 2)
  return int(run), int(position)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
  """Tensors of a layer that are parameters together.

  Attributes:
    form: how they are stored.
    paths: of the parameters in the block.
    pieces: what is read for them.
    specs: how that is sharded.
    stacked: whether they are tensors of experts, one for each.
  """

  form: Any
  paths: tuple[str, ...]
  pieces: tuple[StoredPart, ...]
  specs: tuple[P, ...]
  stacked: bool

  @property
  def alike(self) -> tuple[Any, ...]:
    """The same for layers that are stored alike."""
    return (
      self.form,
      self.paths,
      self.specs,
      tuple((x.whole, x.dtype, x.stacked) for x in self.pieces),
    )

  def parts(self, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The parameters of what was read, in the dtypes of their forms."""
    if isinstance(self.form, Packed):
      x = tuple(
        a.astype(piece.wanted) for a, piece in zip(x, self.pieces, strict=True)
      )

    def split(*x: jax.Array) -> tuple[jax.Array, ...]:
      return self.form.split(x if isinstance(self.form, Packed) else x[0])

    return (jax.vmap(split) if self.stacked else split)(*x)


class Streaming:
  """A model of which layers are placed, while it is loaded.

  Attributes:
    empty: the model of shapes: of placed layers, those on the devices.
  """

  def __init__(
    self,
    model: Transformer,
    tiers: Sequence[str],
    mesh: Mesh | None,
    shardings: Mapping[str, Any],
    *,
    shapes: bool = False,
  ):
    """Prepares.

    Args:
      model: of shapes, all of whose layers are stacked.
      tiers: of each layer.
      mesh: which devices have it.
      shardings: of its parameters by their paths.
      shapes: whether layers in the host's memory stay shapes.
    """
    self._runs = model.stack.runs
    self._tiers, self._mesh, self._shardings = tiers, mesh, shardings
    self._full = parameters(model)
    self.empty = self._shrunk(model)
    make: Any = jax.ShapeDtypeStruct if shapes else np.zeros
    self._hosted = {
      path: make((n, *p.get_value().shape[1:]), p.get_value().dtype)
      for path, p in self._full.items()
      if path.startswith(_STACK) and (n := self._count(path, IN_HOST))
    }

  @property
  def host_bytes(self) -> int:
    """Bytes of the layers in this host's memory."""
    return sum(
      math.prod(self._shard(path, x.shape)) * x.dtype.itemsize * self._devices
      for path, x in self._hosted.items()
    )

  @property
  def _devices(self) -> int:
    """Each of which has its shard of the host's layers."""
    return 1 if self._mesh is None else len(self._mesh.local_devices)

  def _shard(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    sharding = self._shardings[path]
    return shape if sharding is None else sharding.shard_shape(shape)

  def _number(self, path: str, index: int) -> int:
    run, position = _kind(path)
    return self._runs[run].number(position, index)

  def _of_kind(self, run: Run, position: int) -> tuple[str, ...]:
    numbers = (run.number(position, n) for n in range(run.repeats))
    return tuple(self._tiers[n] for n in numbers)

  def _count(self, path: str, tier: str) -> int:
    run, position = _kind(path)
    return self._of_kind(self._runs[run], position).count(tier)

  def _shrunk(self, model: Transformer) -> Transformer:
    """The model with the shapes of the layers on the devices alone."""
    made = jax.tree.map(lambda x: x, model)
    for g, run in enumerate(self._runs):
      for p in range(len(run.layers)):
        tiers = self._of_kind(run, p)
        if set(tiers) == {DEVICE}:
          continue
        cut = functools.partial(_of_layers, tiers.count(DEVICE))
        made.stack.blocks[g][p] = jax.tree.map(cut, made.stack.blocks[g][p])
    return made

  def placed(self, tensor: CheckpointTensor) -> tuple[str, CheckpointTensor]:
    """The memory of a tensor, and the tensor with its place there."""
    path, index = tensor.targets[0]
    if not path.startswith(_STACK):
      return DEVICE, tensor
    run, position = _kind(path)
    tiers = self._of_kind(self._runs[run], position)
    tier, rank = tiers[index[0]], tiers[: index[0]].count(tiers[index[0]])
    if tier == DISK:
      return tier, tensor
    targets = tuple((p, (rank, *i[1:])) for p, i in tensor.targets)
    return tier, dataclasses.replace(tensor, targets=targets)

  def host(
    self, tensor: CheckpointTensor, x: tuple[Shaped[Array, " ..."], ...]
  ) -> None:
    """Takes a tensor of a layer that stays in the host's memory.

    Args:
      tensor: with its place there.
      x: its pieces.
    """
    split = x if isinstance(tensor.form, Packed) else x[0]
    dtypes = tuple(
      jnp.dtype(self._hosted[path].dtype).name for path, _ in tensor.targets
    )
    shardings = tuple(
      self._cut(path, len(index)) for path, index in tensor.targets
    )
    parts = _parts(tensor.form, dtypes, shardings, split)
    for (path, index), part in zip(tensor.targets, parts, strict=True):
      # Of several processes each has the shards of its devices, and leaves the
      # pages of the others' untouched.
      if not self._mine(path, index):
        continue
      for shard in part.addressable_shards:
        self._hosted[path][index][shard.index] = np.asarray(shard.data)

  def _mine(self, path: str, index: tuple[int, ...]) -> bool:
    """Whether devices of this process have that expert of a layer."""
    sharding = self._shardings[path]
    if sharding is None:
      return True
    shape = self._full[path].get_value().shape
    places = sharding.addressable_devices_indices_map(shape).values()
    return any(
      all(
        n in range(*cut.indices(size))
        for n, cut, size in zip(index[1:], at[1:], shape[1:], strict=False)
      )
      for at in places
    )

  def _cut(self, path: str, count: int) -> NamedSharding | None:
    """The sharding of a parameter behind its first axes."""
    sharding = self._shardings[path]
    if sharding is None:
      return None
    return NamedSharding(sharding.mesh, P(*tuple(sharding.spec)[count:]))

  def finish(
    self,
    model: Transformer,
    folder: Folder | None = None,
    tensors: Sequence[CheckpointTensor] = (),
    targets: Targets | None = None,
  ) -> Transformer:
    """The model with its layers in the host's memory and on disk.

    Args:
      model: with arrays on the devices.
      folder: where the tensors are, if some are on disk.
      tensors: of layers on disk.
      targets: as what pieces of a tensor come to the devices.
    """
    groups: Any = {}
    reader = None
    fault = ReadFault(ranks=outcome.processes_of(self._mesh))
    if folder is not None and targets is not None:
      groups = self._groups(folder, tensors, targets)
      reader = self._reader(folder, groups)
    placed, hosted = [], []
    for g, run in enumerate(self._runs):
      kinds, arrays = [], []
      for p in range(len(run.layers)):
        made = self._kind_of(model, g, p, groups, reader, fault)
        kinds.append(made)
        paths = () if made is None else made.paths
        arrays.append(
          tuple(
            self._to_host(f"{_STACK}{g}.{p}.{path}")
            for path in paths
            if f"{_STACK}{g}.{p}.{path}" in self._hosted
          )
        )
      placed.append(tuple(kinds))
      hosted.append(tuple(arrays))
    found = copy.copy(model)
    found.stack = copy.copy(model.stack)
    found.stack.placed = tuple(placed)
    found.stack.hosted = nnx.data(tuple(hosted))
    return found

  def _kind_of(
    self,
    model: Transformer,
    g: int,
    p: int,
    groups: Mapping[int, tuple[_Group, ...]],
    reader: LayerReader | None,
    fault: ReadFault,
  ) -> PlacedLayers | None:
    run = self._runs[g]
    tiers = self._of_kind(run, p)
    if set(tiers) == {DEVICE}:
      return None
    paths = tuple(parameters(model.stack.blocks[g][p]))
    full = {path: f"{_STACK}{g}.{p}.{path}" for path in paths}
    shapes = tuple(
      jax.ShapeDtypeStruct(
        self._full[full[path]].get_value().shape[1:],
        self._full[full[path]].get_value().dtype,
      )
      for path in paths
    )
    specs = tuple(_layer_spec(self._shardings[full[path]]) for path in paths)
    dtypes = {path: x.dtype for path, x in zip(paths, shapes, strict=True)}
    numbers = tuple(run.number(p, n) for n in range(run.repeats))
    alike: dict[Any, list[int]] = {}
    for number, tier in zip(numbers, tiers, strict=True):
      if tier == DISK:
        key = tuple(group.alike for group in groups[number])
        alike.setdefault(key, []).append(number)
    sizes = {} if reader is None else reader.sizes
    # Layers on disk have one.
    reads: Any = reader
    return PlacedLayers(
      paths=paths,
      shapes=shapes,
      specs=specs,
      mesh=self._mesh,
      tiers=tiers,
      numbers=numbers,
      disk=tuple(
        DiskLayers(
          reader=reads,
          numbers=tuple(same),
          shapes=tuple(
            jax.ShapeDtypeStruct(part.local(sizes), part.result_dtype)
            for group in groups[same[0]]
            for part in group.pieces
          ),
          specs=tuple(s for group in groups[same[0]] for s in group.specs),
          axes=tuple(sizes),
          weights=functools.partial(_weights, groups[same[0]], paths, dtypes),
          fault=fault,
        )
        for same in alike.values()
      ),
    )

  def _to_host(self, path: str) -> Any:
    """The layers of a parameter, moved into the memory that devices reach."""
    return in_host(self._hosted.pop(path), self._shardings[path])

  def _groups(
    self,
    folder: Folder,
    tensors: Sequence[CheckpointTensor],
    targets: Targets,
  ) -> dict[int, tuple[_Group, ...]]:
    """What each layer on disk is made of."""
    together: dict[Any, list[CheckpointTensor]] = {}
    for t in tensors:
      path, index = t.targets[0]
      paths = tuple(path for path, _ in t.targets)
      together.setdefault((self._number(path, index[0]), paths), []).append(t)
    found: dict[int, list[_Group]] = {}
    for (number, paths), same in sorted(together.items()):
      same.sort(key=lambda t: t.targets[0][1])
      stacked = len(same[0].targets[0][1]) > 1
      found.setdefault(number, []).append(
        self._group(folder, paths, same, targets, stacked)
      )
    return {number: tuple(groups) for number, groups in found.items()}

  def _group(
    self,
    folder: Folder,
    paths: tuple[str, ...],
    same: list[CheckpointTensor],
    targets: Targets,
    stacked: bool,
  ) -> _Group:
    first = same[0]
    pieces, specs = [], []
    wide = self._full[paths[0]].get_value().dtype
    packed = isinstance(first.form, Packed)
    for n, (name, x) in enumerate(targets(first).items()):
      spec = () if x.sharding is None else tuple(x.sharding.spec)
      spec += (None,) * (len(x.shape) - len(spec))
      if stacked:
        experts = None
        if self._shardings[paths[0]] is not None:
          experts = (*self._shardings[paths[0]].spec, None, None)[1]
        spec = (experts, *spec)
      dtype = folder.tensors[name].dtype
      assert isinstance(dtype, np.dtype)
      pieces.append(
        StoredPart(
          names=tuple(t.pieces[n].name for t in same),
          stacked=stacked,
          shape=tuple(x.shape),
          dtype=dtype,
          cuts=spec,
          # Every code is a number, and of bytes those that come first.
          codes=packed
          and np.issubdtype(dtype, np.integer)
          and (n == 0 or dtype != np.uint8),
          # Scales become what `load` reads them as, codes stay.
          wanted=x.dtype if packed else wide,
        )
      )
      specs.append(P(*spec))
    block = len(".".join(paths[0].split(".")[:4])) + 1
    return _Group(
      form=first.form,
      paths=tuple(path[block:] for path in paths),
      pieces=tuple(pieces),
      specs=tuple(specs),
      stacked=stacked,
    )

  def _reader(
    self, folder: Folder, groups: Mapping[int, tuple[_Group, ...]]
  ) -> LayerReader:
    cut: dict[str, None] = {}
    for made in groups.values():
      for group in made:
        for part in group.pieces:
          cut.update(dict.fromkeys(a for a in part.cuts if a is not None))
    sizes = {} if self._mesh is None else {a: self._mesh.shape[a] for a in cut}
    # How many devices of this process read each of the shards that it reads.
    users = collections.Counter({(): 1})
    if self._mesh is not None:
      axes = [self._mesh.axis_names.index(a) for a in sizes]
      users = collections.Counter(
        tuple(at[n] for n in axes)
        for at, device in np.ndenumerate(self._mesh.devices)
        if device.process_index == jax.process_index()
      )
    return LayerReader(
      folder,
      {n: [x for g in made for x in g.pieces] for n, made in groups.items()},
      sizes=sizes,
      shards=len(users),
      users=max(users.values()),
    )


def abstract_placed(
  form: Transformer, placement: object, mesh: Mesh
) -> Transformer:
  """A model of shapes some of whose layers are in the host's memory.

  Args:
    form: by `abstract`, on `mesh`.
    placement: see `planned`; none on disk, which no program compiles for
      devices that are not there.
    mesh: its mesh.

  Raises:
    OptionError: another placement.
  """
  shardings = {
    path: p.get_value().sharding for path, p in parameters(form).items()
  }
  tiers = planned(form, shardings, placement, None)
  if DISK in tiers:
    raise OptionError(
      "weights",
      f"{placement}, with layers on disk",
      "device and host",
      "place them in host memory, through which those on disk come too",
    )
  if set(tiers) == {DEVICE}:
    return form
  made = Streaming(form, tiers, mesh, shardings, shapes=True)
  return made.finish(made.empty)


def in_host(
  x: Shaped[np.ndarray, "L ..."] | jax.ShapeDtypeStruct,
  sharding: NamedSharding | None,
) -> Any:
  """Layers of a parameter, in the host's memory that devices reach.

  Args:
    x: of some layers; of a shape, a shape.
    sharding: of the parameter, as it is on the devices.
  """
  layer = () if sharding is None else tuple(_layer_spec(sharding))
  local = x.shape if sharding is None else sharding.shard_shape(x.shape)
  more = in_rows(local[1:])
  if more:
    # TPU cuts packed numbers along an axis before the last two alone.
    width = more[-1]
    shape = (x.shape[0], x.shape[1] // width, width)
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if abstract else x.reshape(shape)
  if sharding is None:
    (device,) = jnp.zeros(()).devices()
    here = SingleDeviceSharding(device, memory_kind=HOST)
    return jax.device_put(x, here)
  here = NamedSharding(sharding.mesh, P(None, *layer), memory_kind=HOST)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
  return jax.make_array_from_callback(x.shape, here, lambda at: x[at])


def check_host(nbytes: int, beside: int = 0) -> None:
  """Refuses layers for the host's memory that it has no room for.

  Args:
    nbytes: of the layers.
    beside: that a call has there too.

  Raises:
    MemoryEstimateError: it has less.
    OptionError: devices that reach no memory of the host.
  """
  if not nbytes + beside:
    return
  device = jax.local_devices()[0]
  kinds = [found.kind for found in device.addressable_memories()]
  if HOST not in kinds:
    raise OptionError(
      "placement",
      f"host memory, on a {device.platform} with the memories {kinds}",
      f"devices that read {HOST} memory",
      "place these layers on disk",
    )
  free = host_memory.host_free_bytes()
  if free is not None and nbytes + beside > free:
    of = "layers, keys and hidden states" if beside else "layers"
    raise MemoryEstimateError(
      "placement",
      f"{nbytes + beside:,} bytes of {of} for the host's memory",
      f"at most the {free:,} that are free there",
      "place more of them on disk",
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _parts(
  form: Any,
  dtypes: tuple[str, ...],
  shardings: tuple[NamedSharding | None, ...],
  x: Any,
) -> tuple[Shaped[Array, " ..."], ...]:
  """The pieces of a tensor as their parameters have them."""
  made = []
  for part, dtype, sharding in zip(
    form.split(x), dtypes, shardings, strict=True
  ):
    part = part.astype(dtype)
    if sharding is not None:
      part = jax.lax.with_sharding_constraint(part, sharding)
    made.append(part)
  return tuple(made)


def _weights(
  groups: Sequence[_Group],
  paths: Sequence[str],
  dtypes: Mapping[str, Any],
  found: Sequence[jax.Array],
) -> list[jax.Array]:
  """The parameters of a layer, in the order of `paths`, from what was read."""
  made: dict[str, jax.Array] = {}
  arrays = iter(found)
  for group in groups:
    x = tuple(next(arrays) for _ in group.pieces)
    for path, part in zip(group.paths, group.parts(x), strict=True):
      made[path] = part.astype(dtypes[path])
  return [made[path] for path in paths]


def _of_layers(count: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  shape = (count, *x.shape[1:])
  return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)


def _layer_spec(sharding: Any) -> P:
  """The sharding of one layer of a parameter that is stacked."""
  return P() if sharding is None else P(*tuple(sharding.spec)[1:])
