"""Models and machines as the planner of offloading sees them.

A machine has three tiers: the accelerator's memory ("device"), the processor's
("host") and a disk. A model is a number of equal layers; a layer that differs
from the others is averaged.

Guarantees: a stated machine is read from `offload.toml`, with its source; a
measured one comes from a file that `write` wrote; both are checked.

Ref: Sheng et al. 2023, FlexGen (arXiv 2303.06865).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.plan import files
from ringjax.plan.cost import Shape

FORMAT = "ringjax.offload-machine"
TIERS = ("device", "host", "disk")
_GIVEN = tomllib.loads(
  pathlib.Path(__file__).with_name("offload.toml").read_text("utf-8")
)
# Published policies, as tables of the file.
PUBLISHED: tuple[dict[str, Any], ...] = tuple(_GIVEN["published"])


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadShape:
  """Sizes of a decoder on which the cost of offloading depends.

  Numbers of a layer are means over the layers.

  Attributes:
    name: Name of the model.
    layers: L, number of layers.
    embed: D, width of the hidden states.
    heads: N, number of query heads.
    queries: Numbers of a token's queries in a layer, N H.
    hidden: Numbers that a feedforward holds for a token; both halves of a
      gated one.
    weights: Weights of a layer with all experts: a layer is moved as a whole.
    active: Weights of a layer that a token is multiplied with; only the chosen
      experts.
    kv: Numbers of a token's key and value in a layer, 2 K H.
    attend: FLOPs of a pair of a query and a key in a layer, 4 N H.
    tables: Weights of the embedding and of the head.
    head: Weights of the head's product; 0 leaves it out, as the paper does.
    scores: Whether the scores of all pairs are in memory at once, as in the
      paper's programs; a blockwise algorithm keeps none of them.
  """

  name: str
  layers: int
  embed: int
  heads: int
  queries: int
  hidden: int
  weights: int | float
  active: int | float
  kv: int | float
  attend: int | float
  tables: int = 0
  head: int = 0
  scores: bool = False

  def __post_init__(self) -> None:
    for name in ("layers", "embed", "heads", "queries", "hidden"):
      positive_int(name, getattr(self, name))
    for name in ("weights", "active", "attend"):
      number(name, getattr(self, name), above=0)
    for name in ("kv", "tables", "head"):
      number(name, getattr(self, name), least=0)
    number("active", self.active, most=self.weights)

  @classmethod
  def opt(cls, name: str) -> OffloadShape:
    """Sizes of a model of the OPT family in the paper's form: layers alone.

    A layer has 4 D^2 weights of attention and 8 D^2 of its feedforward.

    Raises:
      OptionError: If there is no such model.
    """
    one_of("model", name, tuple(_GIVEN["opt"]))
    layers, embed, heads = _GIVEN["opt"][name]
    return cls(
      name=name,
      layers=layers,
      embed=embed,
      heads=heads,
      queries=embed,
      hidden=4 * embed,
      weights=12 * embed**2,
      active=12 * embed**2,
      kv=2 * embed,
      attend=4 * embed,
      scores=True,
    )

  @classmethod
  def of(cls, name: str, config: Mapping[str, Any]) -> OffloadShape:
    """Read the sizes from a config.json: plain attention, no experts.

    `rj.models.work_profile.offload_shape` reads them from any model.

    Raises:
      ConfigError: If layers have another form, or there is no vocabulary.
    """
    shape = Shape.of(config)
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int):
      raise ConfigError(
        "config", f"vocab_size {vocab!r}", "an int", "add vocab_size to it"
      )
    weights = shape.parameters / shape.layers
    tied = bool(config.get("tie_word_embeddings"))
    return cls(
      name=name,
      layers=shape.layers,
      embed=shape.embed,
      heads=shape.heads,
      queries=shape.heads * shape.head_dim,
      hidden=(1 + shape.gated) * shape.hidden,
      weights=weights,
      active=weights,
      kv=2 * shape.kv_heads * shape.head_dim,
      attend=4 * shape.heads * shape.head_dim,
      tables=vocab * shape.embed * (1 if tied else 2),
      head=vocab * shape.embed,
    )


OPT = tuple(_GIVEN["opt"])


# ---------------------------------------------------------------------------
# Machines
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadMachine:
  """An accelerator, its host and a disk: bytes, bytes/s and FLOP/s.

  Attributes:
    name: Name of the machine.
    device_bytes: Size of the accelerator's memory.
    host_bytes: Size of the processor's memory.
    disk_bytes: Free space of the disk.
    to_device: Bytes/s from host to device.
    from_device_cache: Bytes/s from device to host, for keys and values.
    from_device_hidden: Bytes/s from device to host, for hidden states.
    disk_read: Bytes/s from disk to host.
    disk_write_cache: Bytes/s from host to disk, for keys and values in prefill.
    disk_write_hidden: Bytes/s from host to disk, for hidden states in prefill.
    disk_write_decode: Bytes/s from host to disk in decode, for both.
    prefill_flops: FLOP/s of products in prefill.
    decode_flops: FLOP/s of products in decode.
    prefill_attention_flops: FLOP/s of attention on the device in prefill.
    decode_attention_flops: FLOP/s of attention on the device in decode.
    host_flops: FLOP/s of attention on the host in decode.
    weight_read_part: Fraction of `disk_read` at which weights are read in
      decode; used by the form "code" alone.
    host_slope: (c1, c2, c3) of the host's slowdown for small batches b and
      narrow models D, for the form "code" alone: a factor of
      1 + c1 x y - c2 x - c3 y with x = log2(64 / b), y = log2(4096 / D),
      neither below 0, and .1 at least.
    usable: Fraction of each memory that a plan may fill.
    source: Origin of the figures.
  """

  name: str
  device_bytes: int | float
  host_bytes: int | float
  disk_bytes: int | float
  to_device: int | float
  from_device_cache: int | float
  from_device_hidden: int | float
  disk_read: int | float
  disk_write_cache: int | float
  disk_write_hidden: int | float
  disk_write_decode: int | float
  prefill_flops: int | float
  decode_flops: int | float
  prefill_attention_flops: int | float
  decode_attention_flops: int | float
  host_flops: int | float
  weight_read_part: int | float = 1.0
  host_slope: tuple[int | float, int | float, int | float] = (0.0, 0.0, 0.0)
  usable: int | float = 0.8
  source: str = ""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name.endswith("_bytes"):
        number(field.name, value, least=0)
      elif field.name in ("usable", "weight_read_part"):
        number(field.name, value, above=0, most=1)
      elif field.name == "host_slope":
        for factor in value:
          number(field.name, factor, least=0)
      elif field.name not in ("name", "source"):
        number(field.name, value, above=0)

  def tier_bytes(self) -> dict[str, float]:
    """Bytes of each tier that a plan may fill."""
    memory_bytes = (self.device_bytes, self.host_bytes, self.disk_bytes)
    return {
      tier: self.usable * n for tier, n in zip(TIERS, memory_bytes, strict=True)
    }

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON."""
    return files.record(self)

  @classmethod
  def from_record(cls, body: Mapping[str, Any]) -> OffloadMachine:
    """Make a machine from a record.

    Raises:
      TypeError: If fields are missing or unknown, or of another type.
      OptionError: If a value is out of range.
    """
    slope = body.get("host_slope", (0.0, 0.0, 0.0))
    if not isinstance(slope, list | tuple) or len(slope) != 3:
      raise TypeError(f"host_slope {slope!r}, not three numbers")
    other_fields = {key: x for key, x in body.items() if key != "host_slope"}
    without_slope = files.as_dataclass(cls, other_fields)
    return dataclasses.replace(without_slope, host_slope=tuple(slope))


def _stated() -> dict[str, OffloadMachine]:
  machines: dict[str, OffloadMachine] = {}
  for name, table in _GIVEN["machines"].items():
    like = table.pop("like", None)
    if like is None:
      machines[name] = OffloadMachine.from_record({"name": name, **table})
    else:
      machines[name] = dataclasses.replace(machines[like], name=name, **table)
  return machines


MACHINES = _stated()


def load(name: str) -> OffloadMachine:
  """Load a stated machine by name, or a measured one by the path of its file.

  Raises:
    OptionError: If no machine has this name, or there is no such file.
    CheckpointFormatError: If the file does not hold a machine.
  """
  if os.sep in name or name.endswith(".json"):
    make = OffloadMachine.from_record
    return files.load(name, FORMAT, make, "a machine with three tiers")
  if name not in MACHINES:
    raise OptionError(
      "machine",
      repr(name),
      f"one of {', '.join(MACHINES)}, or the path of a file",
      "pass one of these, or measure one with --machine=here",
    )
  return MACHINES[name]


def write(path: str, machine: OffloadMachine) -> None:
  """Write a machine to a file.

  Raises:
    OptionError: If it cannot be written.
  """
  files.write(path, FORMAT, machine.record())
