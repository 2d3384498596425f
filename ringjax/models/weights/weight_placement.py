"""Placement of layers' weights in memory tiers, and its report.

Guarantees: device and host get at most the bytes that they are meant to have;
the slowest memory in use gets the rest. Layers are spread over them evenly, by
bytes alone, so that the same options place the same layers.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from ringjax import option_text
from ringjax.checks import number
from ringjax.config import Config, Flag, config, option
from ringjax.errors import OptionError
from ringjax.kv.base import DEVICE, DISK, IN_HOST, TIERS, bytes_each
from ringjax.kv.offload.cache_files import TransferEvent
from ringjax.typing import ArrayLeaf

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

_FORM = (
  'write placement="device=.2,host=.5,disk=.3", or "host", "disk", "device"'
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([kmgt]?)(i?)b?", re.I)
# Tolerance of a sum of fractions that are written as decimals.
_NEAR = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightPlacement:
  """Fractions of the bytes of the layers' weights or keys, by memory.

  Embedding, last norm and head are always on the devices. Of the fractions that
  are left out, the first in the order `device`, `host`, `disk` gets what the
  others leave; the fractions sum to 1.

  Attributes:
    device: Fraction on the devices.
    host: Fraction in the host's memory, copied to a device when a layer runs.
    disk: Fraction in files, read when a layer runs.

  Raises:
    OptionError: If a fraction is not in 0 to 1, or the sum is not 1.
  """

  device: int | float | None = None
  host: int | float | None = None
  disk: int | float | None = None

  def __post_init__(self) -> None:
    fractions_by_tier = {name: getattr(self, name) for name in TIERS}
    for name, x in fractions_by_tier.items():
      if x is not None:
        number(name, x, least=0, most=1)
    missing = [name for name, x in fractions_by_tier.items() if x is None]
    total = sum(x for x in fractions_by_tier.values() if x is not None)
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
    """Parses the text of a placement; a placement is returned as it is.

    Raises:
      OptionError: If the text is not a placement.
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
      text_of_error = f"{error}"
      if not text_of_error.startswith(name) or "that sum to" in text_of_error:
        raise
      raise OptionError(
        name, repr(given), "fractions of device, host and disk", _FORM
      ) from None


def as_bytes(given: object, name: str = "memory") -> int:
  """Parses a number of bytes: an int, or a text such as "6GiB" or "500 MB".

  Raises:
    OptionError: If it is not a positive number of bytes.
  """
  is_int = isinstance(given, int | np.integer) and not isinstance(given, bool)
  text = f"{given}" if is_int else given
  match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
  unit = match[2].lower() if match else ""
  if match is None or (match[3] and not unit) or not float(match[1]):
    raise OptionError(
      name, repr(text), "a number of bytes", f'write {name}="6GiB"'
    )
  scale = _BINARY[unit] if match[3] else _UNITS[unit]
  return max(1, int(fractions.Fraction(match[1]) * scale))


def _placement_text(placement: WeightPlacement | str) -> str:
  """Text of a placement, from which it is made again."""
  if isinstance(placement, str):
    return placement
  shares = ((tier, getattr(placement, tier)) for tier in TIERS)
  return ",".join(f"{tier}={share!r}" for tier, share in shares if share)


@config
class PlacementConfig(Config):
  """Memories that hold what does not run: weights, keys, hidden states.

  `rj.models.load` places weights by it, a call keys and hidden states; a call
  refuses a model whose weights are elsewhere.

  Raises:
    OptionError: If the weights' placement or memory is not one.
  """

  weights: WeightPlacement | str | None = option(
    "Memory of the layers' weights, a `Placement` or a text such as "
    '"device=.2,host=.5,disk=.3", "host" or "disk"; default: all on the '
    "devices.",
    default=None,
    override="placement",
    text=_placement_text,
    flag=Flag(
      "Where the weights of layers are: device, host, disk, or fractions as "
      "device=.2,host=.5,disk=.3; default: on the devices."
    ),
  )
  memory: int | str | None = option(
    'Bytes that weights may take on a device, as a number or as "6GiB", see '
    "`rj.models.load`.",
    default=None,
    flag=Flag(
      "Bytes on a device, as 6GiB, of weights, keys and what the call "
      "computes: as many layers as fit, the others in host memory, or where "
      "--placement says. With --contexts of weights alone; --speculate is not "
      "counted."
    ),
  )
  cache: WeightPlacement | str | None = option(
    "Placement of the keys of layers that are not running, in host memory or "
    "on disk, see `Session`; it changes no token.",
    default=None,
    override="cache_placement",
    text=_placement_text,
    flag=Flag(
      "Where the keys of layers are that do not run: device, host, disk, or "
      "fractions as of --placement; they are fetched when the layer runs."
    ),
  )
  hidden: WeightPlacement | str | None = option(
    "Placement of the hidden states of groups that are not running, with "
    "rows_at_once.",
    default=None,
    override="hidden_placement",
    text=_placement_text,
  )
  rows_at_once: int | None = option(
    "Number of rows that a layer computes at a time, group by group: "
    "activations of a large batch then need the memory of this many rows, and "
    "each layer's weights are still fetched once a call. Default: all rows.",
    least=1,
    default=None,
  )
  disk: str | os.PathLike[str] | None = option(
    "Folder for the part of the cache that is on disk.",
    default=None,
    text=os.fspath,
    flag=Flag(
      "A folder for keys that are on disk; alone: keys are in host memory as "
      "far as they fit there, then in this folder, of which no file is left.",
      kind="path",
    ),
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.weights is not None:
      WeightPlacement.of(self.weights)
    if self.memory is not None:
      as_bytes(self.memory)

  def check_weights(self, model: Transformer) -> None:
    """Refuses a model whose weights are not where the options say.

    Raises:
      OptionError: If a layer is in a memory that gets no part, none is in a
        memory whose part is more than a layer, or a device has more bytes of
        weights than `memory`.
    """
    remedy = "leave it out of the call, and pass it to rj.models.load"
    if self.weights is not None:
      wanted = WeightPlacement.of(self.weights)
      tiers = placement_report(model).tiers
      share = {tier: getattr(wanted, tier) for tier in TIERS}
      if self.memory is not None:
        # As many layers as fit are on the devices, whatever their part.
        share = {tier: x and 1 / len(tiers) for tier, x in share.items()}
        share[DEVICE] = 1 / len(tiers)
      counts = {tier: tiers.count(tier) for tier in TIERS}
      wrong = [
        f"{counts[tier]} layers of {len(tiers)} in the memory {tier!r}"
        for tier, x in share.items()
        if (counts[tier] and not x)
        or (not counts[tier] and x * len(tiers) > 1 + _NEAR)
      ]
      if wrong:
        raise OptionError(
          "placement",
          f"{_placement_text(self.weights)}, of a model with {wrong[0]}",
          "a model that was placed so",
          remedy,
        )
    if self.memory is not None:
      has = weight_bytes(model)[DEVICE]
      if has > as_bytes(self.memory):
        raise OptionError(
          "memory",
          f"{self.memory}, of a model with {has:,} bytes on a device",
          "a model that was placed so",
          remedy,
        )


def deal(
  nbytes: Sequence[int], room: Mapping[str, int | float]
) -> tuple[str, ...]:
  """Assigns layers to memories by the room that each memory has.

  With room on disk, layer after layer goes to the memory that lags most behind
  its share of all layers so far, among those that have room for it; of equal
  ones to the fastest. So the layers on disk are spread out, and others run
  while the next one is read. Without, the first layers are on the devices: each
  layer in the host's memory is copied while the one before it runs. Layers that
  fit nowhere go to the slowest memory in use.

  Args:
    nbytes: Bytes of each layer.
    room: Bytes that each of `TIERS` is meant to have.

  Returns:
    One of `TIERS` for each layer.
  """
  total = max(sum(nbytes), 1)
  slowest = max(
    (tier for tier in TIERS if room.get(tier, 0) > 0),
    key=TIERS.index,
    default=DEVICE,
  )
  dealt, tiers, so_far = dict.fromkeys(TIERS, 0), [], 0
  for n in nbytes:
    so_far += n
    deficit = {
      tier: min(room[tier] / total, 1.0) * so_far - dealt[tier]
      for tier in TIERS
      if dealt[tier] + n <= room.get(tier, 0) * (1 + _NEAR)
    }
    key = (
      (lambda t: -TIERS.index(t)) if slowest != DISK else deficit.__getitem__
    )
    tier = max(deficit, key=key, default=slowest)
    dealt[tier] += n
    tiers.append(tier)
  return tuple(tiers)


def cache_tiers(
  model: Transformer, placement: WeightPlacement | str
) -> tuple[str, ...]:
  """Memory of each layer's keys, by fractions of their bytes.

  Layers without keys count as 0 bytes.

  Raises:
    OptionError: If the placement is unknown.
  """
  wanted = WeightPlacement.of(placement, "cache_placement")
  nbytes = [0] * len(model.config.layers)
  for kind in model.kinds:
    for n in getattr(kind, "which", ()):
      nbytes[n] += kind.numbers() // kind.layers
  total = sum(nbytes)
  return deal(nbytes, {t: getattr(wanted, t) * total for t in TIERS})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementReport:
  """Memory of a model's layers, and what fetching them has cost so far.

  Attributes:
    tiers: Memory of each layer, one of "device", "host", "disk".
    device_bytes: Bytes of the layers on the devices, all shards.
    host_bytes: Bytes of the layers in the host's memory, all devices' shards.
    disk_bytes: Bytes of the layers on disk, as they are stored there.
    buffer_bytes: Bytes that reads from disk may hold in the host's memory.
    peak_buffer_bytes: Most bytes that they have held.
    bytes_read: Bytes read from disk.
    reads: Number of reads from disk, by a layer's number; on a mesh each of its
      shards counts.
    waited_s: Seconds that calls waited for the disk.
    streamed_parameters: Number of weights that are not on the devices.
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


def number_of_weights(arrays: Iterable[Any]) -> int:
  """Number of weights in arrays: two codes of 4 bits share a uint8."""
  return sum(x.size * (2 if x.dtype == jnp.uint8 else 1) for x in arrays)


def placement_report(model: Transformer) -> PlacementReport:
  """Makes the report of a model, which may be all on the devices."""
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
          parameters += number_of_weights(kind.shapes)
  readers = _readers(model)
  disk = sum(reader.stored_bytes for reader in readers)
  total = lambda name: sum(getattr(r, name) for r in readers)
  return PlacementReport(
    tiers=tuple(tiers),
    device_bytes=device,
    host_bytes=host,
    disk_bytes=disk,
    buffer_bytes=total("limit_bytes"),
    peak_buffer_bytes=total("peak_bytes"),
    bytes_read=total("bytes_read"),
    reads={k: n for r in readers for k, n in sorted(r.reads.items())},
    waited_s=total("waited_s"),
    streamed_parameters=parameters,
  )


def weight_bytes(model: Transformer) -> dict[str, int]:
  """Bytes of a model's weights, by `kv.base.TIERS`.

  "device" counts all that a device has: embedding, norm and head, its layers,
  and two that pass through if some are elsewhere. "host" counts the layers in
  the host's memory, and the most bytes held by reads from disk.
  """
  stack, report = model.stack, placement_report(model)
  widest = 0
  for run in stack.placed or ():
    for kind in run:
      if kind is not None:
        widest = max(widest, _layer_bytes(kind))
  params = nnx.state(model, nnx.Param)
  return {
    DEVICE: bytes_each(params) + 2 * widest,
    IN_HOST: report.host_bytes + report.peak_buffer_bytes,
    DISK: report.disk_bytes,
  }


def _layer_bytes(kind: Any) -> int:
  """Bytes of a layer that passes through a device."""
  total = 0
  for x, spec in zip(kind.shapes, kind.specs, strict=True):
    shape = x.shape
    if kind.mesh is not None:
      shape = NamedSharding(kind.mesh, spec).shard_shape(shape)
    total += math.prod(shape) * x.dtype.itemsize
  return total


def transfer_events(model: Transformer) -> tuple[TransferEvent, ...]:
  """Reads of a model's layers from disk and waits for them, by start time."""
  events = [event for reader in _readers(model) for event in [*reader.events]]
  return tuple(sorted(events, key=lambda event: event.start))


def set_waiting(model: Transformer, say: Callable[[str], Any] | None) -> None:
  """Sets the function that is called with a text while a call waits."""
  for reader in _readers(model):
    reader.waiting = say


def _readers(model: Transformer) -> list[Any]:
  """Readers of a model's layers on disk."""
  readers = {
    id(part.reader): part.reader
    for run in model.stack.placed or ()
    for kind in run
    if kind is not None
    for part in kind.disk
  }
  return list(readers.values())


def _all_bytes(x: ArrayLeaf) -> int:
  """Bytes of an array's shards on this process's devices, or of a shape."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return _nbytes(x)
  return sum(shard.data.nbytes for shard in x.addressable_shards)


def _nbytes(x: ArrayLeaf) -> int:
  return x.size * x.dtype.itemsize


def refuse_placed(model: object, doing: str, remedy: str) -> None:
  """Refuses an operation that needs all weights on the devices.

  Raises:
    OptionError: If some layers of the model are elsewhere.
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
