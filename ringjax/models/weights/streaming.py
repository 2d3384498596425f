"""Places a model's layers in memory tiers while its folder is read.

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
from ringjax.models.weights.weight_placement import (
  WeightPlacement,
  as_bytes,
  deal,
)
from ringjax.nn.stack import Run
from ringjax.nn.weights.placed_layers import (
  DiskLayers,
  PlacedLayers,
  ReadFault,
  in_rows,
)
from ringjax.parallel import joint_outcome
from ringjax.parallel import memory as host_memory

_STACK = "stack.blocks."
# Fraction of the host's free memory for layers: other programs run there too.
_OF_HOST = 0.9

# Function from a tensor to its pieces as device arrays, by their names.
Targets = Callable[[CheckpointTensor], Mapping[str, jax.ShapeDtypeStruct]]


def planned(
  model: Transformer,
  shardings: Mapping[str, Any],
  placement: object,
  memory: object,
  beside: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
  """Chooses the memory of each layer of a model of shapes.

  Args:
    model: Model of shapes, all of whose layers are stacked.
    shardings: Shardings of its parameters by path, None for one device.
    placement: A `Placement`, its text, or None.
    memory: Bytes that all weights may take on a device, as a number or a text,
      or None. The two layers that pass through it are included. Layers
      are on the device as far as they fit. The others are in the host's memory
      as far as they fit there; or where the placement says, "host" or "disk";
      or as its fractions say, of which the host has what the bytes keep off
      the device.
    beside: Bytes by memory that a call needs next to the weights; if given,
      `memory` is the limit of both.

  Returns:
    The tier of each layer, one of `TIERS`.

  Raises:
    OptionError: If placement or memory is unknown.
    MemoryEstimateError: If not even the outer weights and two layers fit.
  """
  layers, outer = _layer_bytes(model, shardings)
  total, widest = sum(layers), max(layers)
  meshes = [x.mesh for x in shardings.values() if x is not None]
  devices = len(meshes[0].local_devices) if meshes else 1
  if memory is None:
    wanted = WeightPlacement.of(placement)
    room = {tier: getattr(wanted, tier) * total for tier in TIERS}
    return deal(layers, room)
  limit, call_bytes = as_bytes(memory), beside or {}
  extra = call_bytes.get(DEVICE, 0)
  if outer + total + extra <= limit and placement is None:
    return (DEVICE,) * len(layers)
  room_left = limit - outer - 2 * widest - extra
  if room_left < 0:
    call_text = f", and {extra:,} of the call" if extra else ""
    raise MemoryEstimateError(
      "memory",
      f"{limit:,} bytes",
      f"at least {outer + 2 * widest + extra:,}: embedding, norm and head, and "
      f"two layers that pass through{call_text}",
      "pass more, or a mesh whose 'model' axis shards the weights"
      + ("; or fewer rows at once, and keys in host memory" if extra else ""),
    )
  room = {DEVICE: min(room_left, total)}
  if placement is None:
    free = host_memory.host_free_bytes()
    not_on_device = total - room[DEVICE]
    # Each device has its shard of a layer in host memory.
    if free is not None:
      free = max(0, free - call_bytes.get(IN_HOST, 0))
    host_room = (
      not_on_device
      if free is None
      else min(not_on_device, _OF_HOST * free / devices)
    )
    # All processes must place the same layers.
    ranks = joint_outcome.processes_of(meshes[0] if meshes else None)
    host_room = min(joint_outcome.exchanged(host_room, ranks))
    return deal(
      layers, room | {IN_HOST: host_room, DISK: not_on_device - host_room}
    )
  wanted = WeightPlacement.of(placement)
  if wanted.disk == 1 or wanted.host == 1:
    off_tier = DISK if wanted.disk else IN_HOST
    return deal(layers, room | {off_tier: total - room[DEVICE]})
  disk = total * (wanted.disk or 0.0)
  room = {DEVICE: min(room_left, total * (wanted.device or 0.0)), DISK: disk}
  return deal(layers, room | {IN_HOST: total - disk - room[DEVICE]})


def _layer_bytes(
  model: Transformer, shardings: Mapping[str, Any]
) -> tuple[list[int], int]:
  """Bytes on a device: of each layer, and of all weights outside of layers."""
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
    layer_run = model.stack.runs[run]
    for index in range(layer_run.repeats):
      layers[layer_run.number(position, index)] += n // layer_run.repeats
  return layers, outer


def _kind(path: str) -> tuple[int, int]:
  """(run, position) of a parameter in a layer."""
  run, position, _ = path.removeprefix(_STACK).split(".", 2)
  return int(run), int(position)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
  """Tensors of a layer that hold the same parameters.

  Attributes:
    form: Form in which the tensors store the parameters.
    paths: Paths of the parameters in the block.
    pieces: Stored arrays that are read for them.
    specs: Sharding of each piece.
    stacked: Whether the tensors are one per expert.
  """

  form: Any
  paths: tuple[str, ...]
  pieces: tuple[StoredPart, ...]
  specs: tuple[P, ...]
  stacked: bool

  @property
  def alike(self) -> tuple[Any, ...]:
    """Key that is equal for layers that are stored alike."""
    return (
      self.form,
      self.paths,
      self.specs,
      tuple((x.full_shape, x.dtype, x.stacked) for x in self.pieces),
    )

  def parts(self, x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Parameters from the arrays read, in the dtypes of their forms."""
    if isinstance(self.form, Packed):
      x = tuple(
        a.astype(piece.wanted) for a, piece in zip(x, self.pieces, strict=True)
      )

    def split(*x: jax.Array) -> tuple[jax.Array, ...]:
      return self.form.split(x if isinstance(self.form, Packed) else x[0])

    return (jax.vmap(split) if self.stacked else split)(*x)


class Streaming:
  """Loads a model some of whose layers are in host memory or on disk.

  Attributes:
    empty: Model of shapes; of placed layers it has those on the devices.
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
    """Allocates the host's layers, or their shapes.

    Args:
      model: Model of shapes, all of whose layers are stacked.
      tiers: Memory of each layer.
      mesh: Mesh of the model, None for one device.
      shardings: Shardings of its parameters by path.
      shapes: Whether layers in the host's memory stay shapes.
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
    """Devices of this process; each has its shard of the host's layers."""
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
    """The model with the shapes of the layers on the devices only."""
    shrunk = jax.tree.map(lambda x: x, model)
    for g, run in enumerate(self._runs):
      for p in range(len(run.layers)):
        tiers = self._of_kind(run, p)
        if set(tiers) == {DEVICE}:
          continue
        cut = functools.partial(_of_layers, tiers.count(DEVICE))
        shrunk.stack.blocks[g][p] = jax.tree.map(cut, shrunk.stack.blocks[g][p])
    return shrunk

  def placed(self, tensor: CheckpointTensor) -> tuple[str, CheckpointTensor]:
    """Memory of a tensor, and the tensor with its index in that memory."""
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
    """Stores a tensor of a layer that stays in the host's memory.

    Args:
      tensor: Tensor with its index in the host's memory.
      x: Pieces of the tensor.
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
      # Each of several processes has the shards of its devices, and does not
      # touch the pages of the others' shards.
      if not self._mine(path, index):
        continue
      for shard in part.addressable_shards:
        self._hosted[path][index][shard.index] = np.asarray(shard.data)

  def _mine(self, path: str, index: tuple[int, ...]) -> bool:
    """Whether a device of this process has that expert of a layer."""
    sharding = self._shardings[path]
    if sharding is None:
      return True
    shape = self._full[path].get_value().shape
    device_slices = sharding.addressable_devices_indices_map(shape).values()
    return any(
      all(
        n in range(*cut.indices(size))
        for n, cut, size in zip(index[1:], at[1:], shape[1:], strict=False)
      )
      for at in device_slices
    )

  def _cut(self, path: str, count: int) -> NamedSharding | None:
    """Sharding of a parameter without its first `count` axes."""
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
    """Completes the model with its layers in the host's memory and on disk.

    Args:
      model: Model with arrays on the devices.
      folder: Folder of the tensors, if some are on disk.
      tensors: Tensors of layers on disk.
      targets: Function from a tensor to its pieces as device arrays.
    """
    groups = {}
    reader = None
    fault = ReadFault(ranks=joint_outcome.processes_of(self._mesh))
    if folder is not None and targets is not None:
      groups = self._groups(folder, tensors, targets)
      reader = self._reader(folder, groups)
    placed, hosted = [], []
    for g, run in enumerate(self._runs):
      kinds, arrays = [], []
      for p in range(len(run.layers)):
        layers = self._kind_of(model, g, p, groups, reader, fault)
        kinds.append(layers)
        paths = () if layers is None else layers.paths
        arrays.append(
          tuple(
            self._to_host(f"{_STACK}{g}.{p}.{path}")
            for path in paths
            if f"{_STACK}{g}.{p}.{path}" in self._hosted
          )
        )
      placed.append(tuple(kinds))
      hosted.append(tuple(arrays))
    result = copy.copy(model)
    result.stack = copy.copy(model.stack)
    result.stack.placed = tuple(placed)
    result.stack.hosted = nnx.data(tuple(hosted))
    return result

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
    # Layers on disk have a reader.
    disk_reader: Any = reader
    return PlacedLayers(
      paths=paths,
      shapes=shapes,
      specs=specs,
      mesh=self._mesh,
      tiers=tiers,
      numbers=numbers,
      disk=tuple(
        DiskLayers(
          reader=disk_reader,
          numbers=tuple(layer_numbers),
          shapes=tuple(
            jax.ShapeDtypeStruct(part.local(sizes), part.result_dtype)
            for group in groups[layer_numbers[0]]
            for part in group.pieces
          ),
          specs=tuple(
            s for group in groups[layer_numbers[0]] for s in group.specs
          ),
          axes=tuple(sizes),
          weights=functools.partial(
            _weights, groups[layer_numbers[0]], paths, dtypes
          ),
          fault=fault,
        )
        for layer_numbers in alike.values()
      ),
    )

  def _to_host(self, path: str) -> Any:
    """Moves the layers of a parameter into host memory that devices reach."""
    return in_host(self._hosted.pop(path), self._shardings[path])

  def _groups(
    self,
    folder: Folder,
    tensors: Sequence[CheckpointTensor],
    targets: Targets,
  ) -> dict[int, tuple[_Group, ...]]:
    """Tensor groups of each layer on disk, by the layer's number."""
    by_group: dict[Any, list[CheckpointTensor]] = {}
    for t in tensors:
      path, index = t.targets[0]
      paths = tuple(path for path, _ in t.targets)
      by_group.setdefault((self._number(path, index[0]), paths), []).append(t)
    by_layer: dict[int, list[_Group]] = {}
    for (number, paths), members in sorted(by_group.items()):
      members.sort(key=lambda t: t.targets[0][1])
      stacked = len(members[0].targets[0][1]) > 1
      by_layer.setdefault(number, []).append(
        self._group(folder, paths, members, targets, stacked)
      )
    return {number: tuple(groups) for number, groups in by_layer.items()}

  def _group(
    self,
    folder: Folder,
    paths: tuple[str, ...],
    members: list[CheckpointTensor],
    targets: Targets,
    stacked: bool,
  ) -> _Group:
    first = members[0]
    pieces, specs = [], []
    param_dtype = self._full[paths[0]].get_value().dtype
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
          names=tuple(t.pieces[n].name for t in members),
          stacked=stacked,
          shape=tuple(x.shape),
          dtype=dtype,
          cuts=spec,
          # All integers are codes; of uint8 arrays only the first one.
          codes=packed
          and np.issubdtype(dtype, np.integer)
          and (n == 0 or dtype != np.uint8),
          # Scales get the dtype that `load` reads them as; codes stay.
          wanted=x.dtype if packed else param_dtype,
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
    for layer_groups in groups.values():
      for group in layer_groups:
        for part in group.pieces:
          cut.update(dict.fromkeys(a for a in part.cuts if a is not None))
    several = [axes for axes in cut if not isinstance(axes, str)]
    if several:
      raise OptionError(
        "placement",
        f"layers on disk, sharded over {several[0]}",
        "one mesh axis for each axis of the weights",
        "set rules= to single mesh axes, or leave disk out of placement=",
      )
    sizes = {} if self._mesh is None else {a: self._mesh.shape[a] for a in cut}
    # Number of devices of this process per shard that it reads.
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
      {
        n: [x for g in layer_groups for x in g.pieces]
        for n, layer_groups in groups.items()
      },
      sizes=sizes,
      shards=len(users),
      users=max(users.values()),
    )


def abstract_placed(
  form: Transformer, placement: object, mesh: Mesh
) -> Transformer:
  """A model of shapes some of whose layers are in the host's memory.

  Args:
    form: Model by `abstract`, on `mesh`.
    placement: See `planned`; without layers on disk, for which no program
      compiles without the devices.
    mesh: Mesh of the model.

  Raises:
    OptionError: If the placement is unknown or has layers on disk.
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
  streaming = Streaming(form, tiers, mesh, shardings, shapes=True)
  return streaming.finish(streaming.empty)


def in_host(
  x: Shaped[np.ndarray, "L ..."] | jax.ShapeDtypeStruct,
  sharding: NamedSharding | None,
) -> Any:
  """Puts layers of a parameter into the host memory that devices reach.

  Args:
    x: Layers of the parameter, [L, ...]; for a shape the result is a shape.
    sharding: Sharding of the parameter on the devices.
  """
  layer = () if sharding is None else tuple(_layer_spec(sharding))
  local = x.shape if sharding is None else sharding.shard_shape(x.shape)
  folded = in_rows(local[1:])
  if folded:
    # TPU cuts packed numbers only along an axis before the last two.
    width = folded[-1]
    shape = (x.shape[0], x.shape[1] // width, width)
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct(shape, x.dtype) if abstract else x.reshape(shape)
  if sharding is None:
    (device,) = jnp.zeros(()).devices()
    host_sharding = SingleDeviceSharding(device, memory_kind=HOST)
    return jax.device_put(x, host_sharding)
  host_sharding = NamedSharding(
    sharding.mesh, P(None, *layer), memory_kind=HOST
  )
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host_sharding)
  return jax.make_array_from_callback(
    x.shape, host_sharding, lambda index: x[index]
  )


def check_host(nbytes: int, beside: int = 0) -> None:
  """Refuses layers for which the host's memory has no room.

  Args:
    nbytes: Bytes of the layers.
    beside: Bytes that a call needs there, too.

  Raises:
    MemoryEstimateError: If the host has less memory free.
    OptionError: If the devices cannot reach host memory.
  """
  if not nbytes + beside:
    return
  device = jax.local_devices()[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
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
  """Splits a tensor into its parameters, with their dtypes and shardings."""
  parts = []
  for part, dtype, sharding in zip(
    form.split(x), dtypes, shardings, strict=True
  ):
    part = part.astype(dtype)
    if sharding is not None:
      part = jax.lax.with_sharding_constraint(part, sharding)
    parts.append(part)
  return tuple(parts)


def _weights(
  groups: Sequence[_Group],
  paths: Sequence[str],
  dtypes: Mapping[str, Any],
  arrays: Sequence[jax.Array],
) -> list[jax.Array]:
  """Parameters of a layer, in the order of `paths`, from the arrays read."""
  by_path: dict[str, jax.Array] = {}
  unread = iter(arrays)
  for group in groups:
    x = tuple(next(unread) for _ in group.pieces)
    for path, part in zip(group.paths, group.parts(x), strict=True):
      by_path[path] = part.astype(dtypes[path])
  return [by_path[path] for path in paths]


def _of_layers(count: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  shape = (count, *x.shape[1:])
  return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)


def _layer_spec(sharding: Any) -> P:
  """Spec of one layer of a parameter that is stacked."""
  return P() if sharding is None else P(*tuple(sharding.spec)[1:])
