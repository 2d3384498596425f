"""In which memory the weights of a model's layers are, and what it came to.

Guarantees: device and host get at most the bytes that they are meant to have,
but for the slowest memory in use, which gets what is left;
a model's layers are dealt to them evenly, by a rule that knows nothing but
bytes, so that the same options place the same layers.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from ringjax import option_text
from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.kv.base import DEVICE, DISK, IN_HOST, TIERS, bytes_each
from ringjax.kv.cache_files import TransferEvent

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

_FORM = (
  'write placement="device=.2,host=.5,disk=.3", or "host", "disk", "device"'
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]?)(i?)b?", re.I)
# A sum of fractions that are written as decimals.
_NEAR = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPlacement:
  """Fractions of the bytes of the layers' weights or keys, by memory.

  Embedding, last norm and head are always on the devices. What is left out
  gets what the others leave: the first of `device`, `host`, `disk` that is
  None; the fractions sum to 1.

  Attributes:
    device: on the devices.
    host: in the host's memory, copied to the devices when a layer runs.
    disk: in files, read when a layer runs.

  Raises:
    OptionError: a fraction that is none, or another sum.
  """

  device: int | float | None = None
  host: int | float | None = None
  disk: int | float | None = None

  def __post_init__(self) -> None:
    given = {name: getattr(self, name) for name in TIERS}
    for name, x in given.items():
      if x is not None:
        number(name, x, least=0, most=1)
    missing = [name for name, x in given.items() if x is None]
    total = sum(x for x in given.values() if x is not None)
    if total > 1 + _NEAR or (not missing and total < 1 - _NEAR):
      raise OptionError(
        "placement",
        f"fractions that sum to {total:g}",
        "a sum of 1",
        "leave one of device, host and disk out, which gets the rest",
      )
    for n, name in enumerate(missing):
      object.__setattr__(self, name, max(0.0, 1 - total) if n == 0 else 0.0)

  @classmethod
  def of(cls, given: object, name: str = "placement") -> WeightPlacement:
    """The placement that a text stands for; one is returned as it is.

    Raises:
      OptionError: another text.
    """
    if isinstance(given, cls):
      return given
    if given in TIERS:
      return cls(**{str(given): 1.0})
    text = str(given)
    options = text if ":" in text else f"by:{text}"
    try:
      return option_text.named(options, cls, {"by": cls}, name)
    except OptionError as error:
      said = f"{error}"
      if not said.startswith(name) or "that sum to" in said:
        raise
      raise OptionError(
        name, repr(given), "fractions of device, host and disk", _FORM
      ) from None


def as_bytes(given: object, name: str = "memory") -> int:
  """A number of bytes from an int, or from a text as "6GiB" or "500 MB".

  Raises:
    OptionError: another one.
  """
  if isinstance(given, int | np.integer) and not isinstance(given, bool):
    given = f"{given}"
  found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
  unit = found[2].lower() if found else ""
  if found is None or (found[3] and not unit) or not float(found[1]):
    raise OptionError(
      name, repr(given), "a number of bytes", f'write {name}="6GiB"'
    )
  scale = _BINARY[unit] if found[3] else _UNITS[unit]
  return max(1, int(fractions.Fraction(found[1]) * scale))


def deal(
  nbytes: Sequence[int], room: Mapping[str, int | float]
) -> tuple[str, ...]:
  """Which memory each layer is in.

  With room on disk, layer after layer goes to the memory that has fallen behind
  its share of all layers so far the most, among those that have room for it; of
  equal ones to the fastest. So the layers on disk stand apart, and others run
  while the next one is read. Without, the first layers are on the devices: of
  neighbours in the host's memory each comes while the one before it runs. What
  fits nowhere goes to the slowest memory that is to have any.

  Args:
    nbytes: of each layer.
    room: bytes that each of `TIERS` is meant to have.

  Returns:
    One of `TIERS` for each layer.
  """
  total = max(sum(nbytes), 1)
  last = max(
    (tier for tier in TIERS if room.get(tier, 0) > 0),
    key=TIERS.index,
    default=DEVICE,
  )
  given, found, so_far = dict.fromkeys(TIERS, 0), [], 0
  for n in nbytes:
    so_far += n
    behind = {
      tier: min(room[tier] / total, 1.0) * so_far - given[tier]
      for tier in TIERS
      if given[tier] + n <= room.get(tier, 0) * (1 + _NEAR)
    }
    key = (lambda t: -TIERS.index(t)) if last != DISK else behind.__getitem__
    tier = max(behind, key=key, default=last)
    given[tier] += n
    found.append(tier)
  return tuple(found)


def cache_tiers(
  model: Transformer, placement: WeightPlacement | str
) -> tuple[str, ...]:
  """Which memory the keys of each layer are in, by fractions of their bytes.

  Layers without keys count with none.

  Raises:
    OptionError: another placement.
  """
  wanted = WeightPlacement.of(placement, "cache_placement")
  nbytes = [0] * len(model.config.layers)
  for kind in model.kinds:
    for n in getattr(kind, "which", ()):
      nbytes[n] = kind.numbers() // kind.layers
  total = sum(nbytes)
  return deal(nbytes, {t: getattr(wanted, t) * total for t in TIERS})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementReport:
  """Where a model's layers are, and what fetching them came to so far.

  Attributes:
    tiers: of each layer, one of "device", "host", "disk".
    device_bytes: of the layers' weights on the devices, all shards.
    host_bytes: of those in the host's memory, all devices' parts.
    disk_bytes: of those on disk, as they are stored there.
    buffer_bytes: that reading from disk may have in the host's memory.
    peak_buffer_bytes: that it had at most.
    bytes_read: from disk.
    reads: by the number of a layer how often it was read from disk; on a mesh
      each of its shards counts.
    waited_s: seconds that calls waited for the disk.
    streamed_parameters: numbers of weights that are not on the devices.
  """

  tiers: tuple[str, ...]
  device_bytes: int
  host_bytes: int
  disk_bytes: int
  buffer_bytes: int
  peak_buffer_bytes: int
  bytes_read: int
  reads: Mapping[int, int]
  waited_s: int | float
  streamed_parameters: int


def placement_report(model: Transformer) -> PlacementReport:
  """The report of a model, which may be all on the devices."""
  stack = model.stack
  tiers = [DEVICE] * len(model.config.layers)
  host = parameters = 0
  device = sum(_nbytes(x) for x in jax.tree.leaves(stack.blocks))
  for g, run in enumerate(stack.placed or ()):
    for p, kind in enumerate(run):
      if kind is None:
        continue
      host += sum(map(_all_bytes, stack.hosted[g][p]))
      for layer, tier in zip(kind.numbers, kind.tiers, strict=True):
        tiers[layer] = tier
        if tier != DEVICE:
          parameters += sum(x.size for x in kind.shapes)
  readers = _readers(model)
  disk = sum(reader.stored_bytes for reader in readers)
  add = lambda name: sum(getattr(r, name) for r in readers)
  return PlacementReport(
    tiers=tuple(tiers),
    device_bytes=device,
    host_bytes=host,
    disk_bytes=disk,
    buffer_bytes=add("limit_bytes"),
    peak_buffer_bytes=add("peak_bytes"),
    bytes_read=add("bytes_read"),
    reads={k: n for r in readers for k, n in sorted(r.reads.items())},
    waited_s=add("waited_s"),
    streamed_parameters=parameters,
  )


def weight_bytes(model: Transformer) -> dict[str, int]:
  """Bytes of a model's weights, by `kv.base.TIERS`.

  Of a device all that it has: embedding, norm and head, the layers that are
  there, and two that pass through if some are not. Of the host the layers that
  are there, in all, and what layers on disk were read through at most.
  """
  stack, found = model.stack, placement_report(model)
  widest = 0
  for run in stack.placed or ():
    for kind in run:
      if kind is not None:
        widest = max(widest, _layer_bytes(kind))
  params = nnx.state(model, nnx.Param)
  return {
    DEVICE: bytes_each(params) + 2 * widest,
    IN_HOST: found.host_bytes + found.peak_buffer_bytes,
    DISK: found.disk_bytes,
  }


def _layer_bytes(kind: Any) -> int:
  """Bytes on a device of a layer that passes through it."""
  total = 0
  for x, spec in zip(kind.shapes, kind.specs, strict=True):
    shape = x.shape
    if kind.mesh is not None:
      shape = NamedSharding(kind.mesh, spec).shard_shape(shape)
    total += math.prod(shape) * x.dtype.itemsize
  return total


def transfer_events(model: Transformer) -> tuple[TransferEvent, ...]:
  """Reads of a model's layers from disk, and waits for them, by their start."""
  found = [event for reader in _readers(model) for event in [*reader.events]]
  return tuple(sorted(found, key=lambda event: event.start))


def set_waiting(model: Transformer, say: Callable[[str], Any] | None) -> None:
  """Has what reads a model's layers say what a call waits for."""
  for reader in _readers(model):
    reader.waiting = say


def _readers(model: Transformer) -> list[Any]:
  """What reads a model's layers from disk."""
  found = {
    id(part.reader): part.reader
    for run in model.stack.placed or ()
    for kind in run
    if kind is not None
    for part in kind.disk
  }
  return list(found.values())


def _all_bytes(x: Any) -> int:
  """Bytes of all parts of an array on this process's devices, or of a shape."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return _nbytes(x)
  return sum(shard.data.nbytes for shard in x.addressable_shards)


def _nbytes(x: Any) -> int:
  return x.size * x.dtype.itemsize


def refuse_placed(model: object, doing: str, remedy: str) -> None:
  """Refuses what needs all weights on the devices.

  Raises:
    OptionError: some layers of the model are not.
  """
  stack = getattr(model, "stack", None)
  if getattr(stack, "neuron_fault", None) is not None:
    raise OptionError(
      "model",
      f"one whose feedforward neurons are on disk, to {doing}",
      "a model that is all on the devices",
      "pass the model that it was made of",
    )
  if getattr(stack, "placed", None) is not None:
    raise OptionError(
      "model",
      f"one whose layers are in host memory or on disk, to {doing}",
      "a model that is all on the devices",
      remedy,
    )
