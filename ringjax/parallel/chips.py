"""Model of a machine: what devices compute, hold and send, and how fast.

All predictions of time use it: the choice of a strategy, KV-Runahead's
partitions and the simulator. The stated figures are in `machines.toml`, each
with its source; nothing is measured here. Rates and memory are those of one
device as JAX counts them: a chip for TPU v4 and v5p, one of a chip's two cores
for TPU7x. `CHIPS` and `MACHINES` have the figures of data sheets, `CORES` those
that the compiler of TPU programs assumes.

A link joins a device to the next one along a mesh axis. On a torus (2 or more
`ports`) a device has two links in each of ports / 2 dimensions; a send to a
neighbour uses one, a gather uses all, and a longer way uses as many links as
it is long. With a switch (1 port) all sends of a device share one way out, and
all devices are equally near.

  a send to a neighbour      n / b + l
  all-gather, reduce-scatter n / (p b) + l x (farthest device)
  all-to-all                 n c / ((R - 1) b) + l x (farthest device)

with n the bytes that a device receives, b the bandwidth, l the latency, p the
ports, and c the pairs of devices whose traffic crosses the busiest link: in a
row of s devices s^2 / 4 one way, half of it where the row is a ring. With a
switch p is 1 and c is R - 1.
Ref: Patarasuk and Yuan 2009 for the rings of a gather; the all-to-all is the
bisection bound.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError

LOCALS = ("blockwise", "kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """Link between a device and the next one.

  Attributes:
    bandwidth: Bytes per second of one link, one way.
    latency_s: Seconds until the first byte of a message arrives.
    duplex: Whether both ways carry `bandwidth` at once.
    ports: Links of a device, two for each dimension of a torus; 1: a switch.
  """

  bandwidth: int | float
  latency_s: int | float = 0.0
  duplex: bool = True
  ports: int = 2

  def __post_init__(self) -> None:
    number("Link bandwidth", self.bandwidth, above=0)
    number("Link latency_s", self.latency_s, least=0)
    ports = positive_int("Link ports", self.ports)
    if ports > 1 and ports % 2:
      raise OptionError(
        "Link ports",
        repr(self.ports),
        "1 for a switch, or two for each dimension of a torus",
        "use 1, 2, 4 or 6",
      )

  @property
  def switched(self) -> bool:
    """Whether a switch joins all devices."""
    return self.ports == 1

  def far(self, shift: int, size: int) -> float:
    """Number of links to the device `shift` places on, of `size`.

    A walk of neighbours through k dimensions is a box: n places along it are
    about n^(1/k) links apart.
    """
    if self.switched:
      return 1.0
    places = min(shift % size, -shift % size)
    return max(1.0, places ** (2 / self.ports))

  def send_s(
    self, nbytes: float, messages: int = 1, *, far: float = 1.0
  ) -> float:
    """Seconds of sends one way over `far` links, all devices at once."""
    if not messages:
      return 0.0
    return messages * self.latency_s * far + nbytes * far / self.bandwidth

  def both_s(self, one: float, other: float) -> float:
    """Seconds to send to both neighbours, given the seconds of each alone."""
    independent = self.duplex and not self.switched
    return max(one, other) if independent else one + other

  def gather_s(self, nbytes: float, size: int, wraps: bool = True) -> float:
    """Seconds of an all-gather that brings a device `nbytes` of others'.

    A reduce-scatter in which a device sends `nbytes` takes as long.

    Args:
      nbytes: Bytes that a device receives.
      size: Number of devices.
      wraps: Whether their walk closes to a ring (a whole mesh axis does, a
        part of one does not).
    """
    if size == 1:
      return 0.0
    if self.switched:
      messages = math.ceil(math.log2(size))
      return nbytes / self.bandwidth + messages * self.latency_s
    dims, _, closed, latency_s = self._box(size, wraps)
    # The device in a corner of an open box has a link for each dimension.
    return self._shared(
      nbytes / (dims * (1 + closed) * self.bandwidth) + latency_s
    )

  def exchange_s(self, nbytes: float, size: int, wraps: bool = True) -> float:
    """Seconds of an all-to-all in which a device sends `nbytes` to others."""
    if size == 1:
      return 0.0
    if self.switched:
      return nbytes / self.bandwidth + self.latency_s
    _, side, closed, latency_s = self._box(size, wraps)
    # Traffic across the middle link of a row: s^2 / 4 pairs of s devices.
    is_integer = abs(side - round(side)) < 1e-9
    crossing = round(side) ** 2 // 4 if is_integer else side**2 / 4
    pairs = crossing * size / side / (1 + closed)
    seconds = nbytes / (size - 1) * pairs / self.bandwidth
    return self._shared(seconds + latency_s)

  def _box(self, size: int, wraps: bool) -> tuple[int, float, bool, float]:
    """Return (dimensions, side, closed, latency to the farthest device)."""
    dims = min(self.ports // 2, max(1, int(math.log2(size))))
    side = size ** (1 / dims)
    closed = wraps and side > 2
    steps = dims * (side // 2 if closed else side - 1)
    return dims, side, closed, max(1.0, steps) * self.latency_s

  def _shared(self, seconds: float) -> float:
    return seconds if self.duplex else 2 * seconds


# Link from a host's memory to a device: PCIe 3.0 with 16 lanes.
HOST_LINK = Link(bandwidth=16e9, ports=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device.

  Attributes:
    name: Name, as in `CHIPS`.
    flops: FLOPs per second of matrix products, a mapping from dtype names.
    hbm_bytes: Bytes of memory.
    hbm_bandwidth: Memory bandwidth, bytes per second.
    source: Source of the figures.
  """

  name: str
  flops: Mapping[str, float] | tuple[tuple[str, float], ...]
  hbm_bytes: int | float
  hbm_bandwidth: int | float
  source: str

  def __post_init__(self) -> None:
    object.__setattr__(self, "flops", _pairs("Chip flops", self.flops))
    for dtype, rate in self.flops:
      number(f"Chip flops of {dtype}", rate, above=0)
    number("Chip hbm_bytes", self.hbm_bytes, above=0)
    number("Chip hbm_bandwidth", self.hbm_bandwidth, above=0)

  @property
  def platform(self) -> str:
    """JAX's name of the platform: "tpu", "gpu", "cpu"; else "other"."""
    if self.name.startswith("tpu"):
      return "tpu"
    if self.name in CAPABILITIES:
      return "gpu"
    return "cpu" if self.name == "cpu" else "other"

  def rate(self, dtype: str) -> float:
    """FLOPs per second of products of `dtype`.

    A dtype without a figure has that of the next wider one, else half of the
    slowest, the best case for twice the bytes.
    """
    rates = dict(self.flops)
    if dtype in rates:
      return float(rates[dtype])
    width = number_bytes(dtype)
    for name in sorted(rates, key=number_bytes):
      if number_bytes(name) >= width:
        return float(rates[name])
    return min(rates.values()) / 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Devices, their links, and how well programs use them.

  Attributes:
    name: Name of the machine.
    chip: Device type.
    links: A `Link` for all mesh axes, or a mapping from axis names.
    island: Number of consecutive devices that `links` join, e.g. the GPUs of a
      node; None: all of them.
    between: Link from a device to another island.
    efficiency: Part of `chip.flops` that a local algorithm reaches in tiles
      that it computes: a mapping from `LOCALS` to (forward, backward).
    hop_s: Fixed seconds of every call of the local algorithm.
    call_s: Fixed seconds of every attention call, forward or backward.
    memory_share: Part of the memory that one call may fill; the rest is the
      model's.
    source: Source of the figures other than the chip's.
  """

  name: str
  chip: Chip
  links: Link | Mapping[str, Link] | tuple[tuple[str, Link], ...]
  island: int | None = None
  between: Link | None = None
  efficiency: (
    Mapping[str, tuple[float, float]]
    | tuple[tuple[str, tuple[float, float]], ...]
  ) = (("blockwise", (0.15, 0.15)), ("kernel", (0.6, 0.5)))
  hop_s: int | float = 0.0
  call_s: int | float = 0.0
  memory_share: int | float = 0.5
  source: str = ""

  def __post_init__(self) -> None:
    if not isinstance(self.links, Link):
      links = _pairs("Machine links", self.links)
      if not all(isinstance(link, Link) for _, link in links):
        raise OptionError(
          "Machine links",
          repr(self.links),
          "a Link, or a mapping from axis names to Links",
          "pass e.g. Link(bandwidth=50e9)",
        )
      object.__setattr__(self, "links", links)
    efficiency = _pairs("Machine efficiency", self.efficiency)
    for name, pair in efficiency:
      one_of("Machine efficiency", name, LOCALS)
      if len(pair) != 2:
        raise OptionError(
          "Machine efficiency",
          repr(pair),
          "(forward, backward)",
          "pass e.g. {'kernel': (0.6, 0.5)}",
        )
      for part in pair:
        number(f"Machine efficiency of {name}", part, above=0, most=1)
    efficiency = tuple((name, tuple(pair)) for name, pair in efficiency)
    object.__setattr__(self, "efficiency", efficiency)
    number("Machine hop_s", self.hop_s, least=0)
    number("Machine call_s", self.call_s, least=0)
    number("Machine memory_share", self.memory_share, above=0, most=1)
    if (self.island is None) != (self.between is None):
      raise OptionError(
        "Machine island, between",
        f"{self.island!r}, {self.between!r}",
        "both, or neither",
        "pass how many devices an island has and the link between islands",
      )
    if self.island is not None:
      positive_int("Machine island", self.island)

  @classmethod
  def of(cls, body: Mapping[str, Any]) -> Machine:
    """Build a machine from plain values, as a file or `record` has them.

    Raises:
      OptionError: If a value is out of its range.
      TypeError, KeyError: If there are other fields than a machine's.
    """
    links, between = body["links"], body.get("between")
    single_link = "bandwidth" in links
    return cls(
      **dict(body)
      | {
        "chip": Chip(**body["chip"]),
        "links": Link(**links)
        if single_link
        else {axis: Link(**link) for axis, link in links.items()},
        "between": None if between is None else Link(**between),
      }
    )

  def record(self) -> dict[str, Any]:
    """Return plain values, from which `of` builds the machine again."""
    body = dataclasses.asdict(self)
    if not isinstance(self.links, Link):
      body["links"] = {
        axis: dataclasses.asdict(link)
        for axis, link in dict(self.links).items()
      }
    body["chip"]["flops"] = dict(self.chip.flops)
    body["efficiency"] = {name: list(pair) for name, pair in self.efficiency}
    return body

  def link(self, axis: str) -> Link:
    """Return the link between neighbours along a mesh axis in an island.

    Raises:
      OptionError: If this axis has no link.
    """
    if isinstance(self.links, Link):
      return self.links
    links = dict(self.links)
    if axis not in links:
      raise OptionError(
        "machine",
        f"{self.name!r} without a link for the axis {axis!r}",
        f"one of {', '.join(links)}",
        "add it to links, or give one Link for all axes",
      )
    return links[axis]

  def part(self, local: str) -> tuple[float, float]:
    """Return the efficiency of a local algorithm, (forward, backward).

    Raises:
      OptionError: If the machine states none.
    """
    efficiency = dict(self.efficiency)
    return efficiency[one_of("local", local, efficiency)]


def number_bytes(dtype: str) -> int:
  """Bytes of one number of a dtype, by its name."""
  try:
    return jax.numpy.dtype(dtype).itemsize
  except TypeError:
    raise OptionError(
      "dtype",
      repr(dtype),
      "the name of a dtype",
      "pass e.g. 'bfloat16' or 'float32'",
    ) from None


def _pairs(
  name: str, mapping: Mapping[str, Any] | Iterable[tuple[str, Any]]
) -> tuple[tuple[str, Any], ...]:
  try:
    pairs = tuple(mapping.items() if isinstance(mapping, Mapping) else mapping)
    valid = all(len(p) == 2 and isinstance(p[0], str) for p in pairs)
  except TypeError:
    pairs, valid = (), False
  if not valid or not pairs:
    raise OptionError(
      name, repr(mapping), "a mapping from names", "pass a dict"
    )
  return tuple((str(k), v) for k, v in pairs)


# ---------------------------------------------------------------------------
# Figures that the TPU compiler assumes
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
  """Figures that libtpu's compiler assumes for a TPU device as JAX counts them.

  Its estimates are in cycles of this clock; where its figures and the data
  sheet's differ, as for `tpu-7x`, both are stated.

  Attributes:
    name: Name, as in `CHIPS`.
    topology: Prefix of its topologies, e.g. "v5e" of "v5e:4x4".
    clock_hz: Cycles per second.
    flops_per_cycle: FLOPs of bfloat16 matrix products, all cores of a device.
    cores: TensorCores of a device, 2 where XLA uses a chip's two as one.
    link_bytes_s: Bytes per second of one permute, one way.
    hbm_bytes: Memory that a program may fill.
    vmem_bytes: Vector memory of one core.
    matrix_side: Rows and columns of a matrix unit.
    full_side: Sides of a slice that are multiples of it close to a ring.
    rows_per_cycle: Rows that a matrix unit takes per cycle.
    source: Source of the figures.
  """

  name: str
  topology: str
  clock_hz: float
  flops_per_cycle: int
  cores: int
  link_bytes_s: float
  hbm_bytes: int
  vmem_bytes: int
  matrix_side: int
  full_side: int
  rows_per_cycle: int
  source: str

  @property
  def flops(self) -> float:
    """FLOPs per second of bfloat16 products, as the compiler counts."""
    return self.flops_per_cycle * self.clock_hz

  @property
  def link_bytes_per_cycle(self) -> float:
    """Bytes that one permute moves one way in a cycle."""
    return self.link_bytes_s / self.clock_hz

  def wraps(self, sides: Sequence[int]) -> tuple[bool, ...]:
    """Whether each side of a slice closes to a ring."""
    return tuple(n > 1 and n % self.full_side == 0 for n in sides)


# ---------------------------------------------------------------------------
# The figures of `machines.toml`
# ---------------------------------------------------------------------------

_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name("machines.toml").read_text("utf-8")
)


def _stated(table: str) -> dict[str, dict[str, Any]]:
  """Rows of a table, with their names and with their notes as texts."""
  notes = _TABLES["notes"]
  return {
    name: row | {
      "name": name, "source": "; ".join(notes[note] for note in row["source"])
    }
    for name, row in _TABLES[table].items()
  }  # fmt: skip


_SHEETS = _stated("chips")
# The chips that are GPUs, and their compute capabilities.
CAPABILITIES: dict[str, tuple[int, int]] = {
  name: tuple(row.pop("capability"))
  for name, row in _SHEETS.items()
  if "capability" in row
}
MACHINES: dict[str, Machine] = {
  name: Machine.of({**row, "chip": _SHEETS[name]})
  for name, row in _stated("machines").items()
}
CHIPS: dict[str, Chip] = {
  name: stated.chip for name, stated in MACHINES.items()
}
CORES: dict[str, Core] = {
  name: Core(**row) for name, row in _stated("cores").items()
}


# ---------------------------------------------------------------------------
# Look-ups by name
# ---------------------------------------------------------------------------


def core(name: str) -> Core:
  """Find the compiler's figures of a TPU: "tpu-v5e", "v5e" or "v5e:4x4".

  Raises:
    OptionError: If the TPU is not in `CORES`.
  """
  short = str(name).partition(":")[0].lower()
  for tpu_core in CORES.values():
    if short in (tpu_core.name, tpu_core.topology):
      return tpu_core
  raise OptionError(
    "chip",
    repr(name),
    f"one of {', '.join(tpu_core.topology for tpu_core in CORES.values())}",
    "pass the name of a TPU, e.g. v5e or v5e:4x4",
  )


def sides(topology: str) -> tuple[int, ...]:
  """Parse the sides of a slice: (4, 4, 8) for "v5p:4x4x8", always three.

  Raises:
    OptionError: If it has another form, or is of an unknown TPU.
  """
  tpu_core = core(topology)
  _, colon, text = topology.partition(":")
  parts = text.lower().split("x")
  flat = tpu_core.topology in ("v5e", "v6e")
  positive = all(part.isdecimal() and int(part) > 0 for part in parts)
  if not colon or not positive or len(parts) != (2 if flat else 3):
    raise OptionError(
      "topology",
      repr(topology),
      f"{tpu_core.topology}:{'4x4' if flat else '4x4x4'} or another size",
      "write the chips along each side",
    )
  sizes = tuple(int(part) for part in parts)
  return sizes + (1,) * (3 - len(sizes))


def devices(topology: str) -> int:
  """Number of devices that JAX counts in a slice, e.g. 128 in "v5p:4x4x8".

  Raises:
    OptionError: If `sides` cannot parse it.
  """
  devices_per_chip = 2 if core(topology).name == "tpu-7x" else 1
  return math.prod(sides(topology)) * devices_per_chip


def machine_name(device_kind: str) -> str | None:
  """Find the name in `MACHINES` for a `device_kind`, or None."""
  text = device_kind.lower()
  for part, name in _TABLES["names"]["kinds"]:
    if part in text:
      return name or None
  return None


def machine(name: str) -> Machine:
  """Find a stated machine by its name, or by a `device_kind`.

  Raises:
    OptionError: If no machine has the name.
  """
  stated_name = name if name in MACHINES else machine_name(name)
  if stated_name is None:
    raise OptionError(
      "machine",
      repr(name),
      f"one of {', '.join(MACHINES)}",
      "pass one of these names, or a Machine(...)",
    )
  return MACHINES[stated_name]


def machine_of(device_kind: str, platform: str) -> Machine:
  """Find the stated machine of a device, or a similar one.

  Depends only on the two texts, so all processes agree.
  """
  stated_name = machine_name(device_kind)
  if stated_name is not None:
    return MACHINES[stated_name]
  model = MACHINES[_TABLES["names"]["like"].get(platform, "cpu")]
  return dataclasses.replace(
    model,
    name=f"{device_kind} (as {model.name})",
    source=f"no figures of {device_kind!r}: as {model.name}. {model.source}",
  )
