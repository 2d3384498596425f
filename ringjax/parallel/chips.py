"""The model of a machine: what devices compute, hold and send, and how fast.

All that predicts a time goes by it: the choice of a strategy, KV-Runahead's
partitions and the simulator. The stated figures are in `machines.toml`, each
with where it is from; nothing is measured here. Rates and memory are those of
one device as JAX counts them: of TPU v4 and v5p a chip, of TPU7x one of a
chip's two cores. `CHIPS` and `MACHINES` have what data sheets say, `CORES` what
the compiler of TPU programs reckons with.

A link is what joins a device to the next along a mesh axis. On a torus (2 or
more `ports`) a device has two links in each of ports / 2 dimensions; a send to
a neighbour takes one, a gather takes them all, and what goes further takes as
many links as it is far. Behind a switch (1 port) every send of a device shares
one way out, and everybody is as near as the next.

  a send to a neighbour      n / b + l
  all-gather, reduce-scatter n / (p b) + l x (farthest device)
  all-to-all                 n c / ((R - 1) b) + l x (farthest device)

with n the bytes that a device receives, b the bandwidth, l the latency, p the
ports, and c the pairs of devices whose traffic crosses the busiest link: of a
row of s devices s^2 / 4 one way, half of it where the row is a ring. Behind a
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
  """What joins a device to the next one.

  Attributes:
    bandwidth: bytes per second, of one link, one way.
    latency_s: seconds until the first byte of a message is there.
    duplex: whether both ways carry `bandwidth` at once.
    ports: links of a device, two for each dimension of a torus; 1 is a switch.
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
    """Links between a device and the one `shift` places on, of `size`.

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
    """Seconds of sends one way, `far` links on, all devices at once."""
    if not messages:
      return 0.0
    return messages * self.latency_s * far + nbytes * far / self.bandwidth

  def both_s(self, one: float, other: float) -> float:
    """Seconds of sends to both neighbours that alone take these seconds."""
    apart = self.duplex and not self.switched
    return max(one, other) if apart else one + other

  def gather_s(self, nbytes: float, size: int, wraps: bool = True) -> float:
    """Seconds of an all-gather that brings a device `nbytes` of others'.

    A reduce-scatter in which a device sends `nbytes` takes as long.

    Args:
      nbytes: that a device receives.
      size: how many devices take part.
      wraps: whether their walk closes to a ring (a whole mesh axis does, a
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
    # What crosses the middle link of a row: of s devices s^2 / 4 pairs.
    whole = abs(side - round(side)) < 1e-9
    crossing = round(side) ** 2 // 4 if whole else side**2 / 4
    pairs = crossing * size / side / (1 + closed)
    seconds = nbytes / (size - 1) * pairs / self.bandwidth
    return self._shared(seconds + latency_s)

  def _box(self, size: int, wraps: bool) -> tuple[int, float, bool, float]:
    """(dimensions, side, closed, latency to the farthest) of `size` devices."""
    dims = min(self.ports // 2, max(1, int(math.log2(size))))
    side = size ** (1 / dims)
    closed = wraps and side > 2
    steps = dims * (side // 2 if closed else side - 1)
    return dims, side, closed, max(1.0, steps) * self.latency_s

  def _shared(self, seconds: float) -> float:
    return seconds if self.duplex else 2 * seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device.

  Attributes:
    name: as in `CHIPS`.
    flops: FLOPs per second of matrix products, a mapping from dtype names.
    hbm_bytes: memory.
    hbm_bandwidth: of the memory, bytes per second.
    source: where the figures are from.
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
    """As JAX calls it: "tpu", "gpu", "cpu"; "other" where no name tells."""
    if self.name.startswith("tpu"):
      return "tpu"
    if self.name in CAPABILITIES:
      return "gpu"
    return "cpu" if self.name == "cpu" else "other"

  def rate(self, dtype: str) -> float:
    """FLOPs per second of products of `dtype`.

    A dtype without a figure has that of the next wider one, else half of the
    slowest, which is what twice the bytes cost at best.
    """
    known = dict(self.flops)
    if dtype in known:
      return float(known[dtype])
    width = number_bytes(dtype)
    for name in sorted(known, key=number_bytes):
      if number_bytes(name) >= width:
        return float(known[name])
    return min(known.values()) / 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Devices, what joins them, and how well the program uses them.

  Attributes:
    name: of the machine.
    chip: its devices.
    links: a `Link` for all mesh axes, or a mapping from axis names.
    island: how many consecutive devices `links` join, e.g. the GPUs of a node;
      None is all of them.
    between: the link of a device to another island.
    efficiency: part of `chip.flops` that a local algorithm reaches in tiles
      that it computes: a mapping from `LOCALS` to (forward, backward).
    hop_s: fixed seconds of every call of the local algorithm.
    call_s: fixed seconds of every attention call, forward or backward.
    memory_share: part of the memory that one call may fill; the rest is the
      model's.
    source: where the figures beside the chip's are from.
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
    """A machine from plain values, as a file or `record` has them.

    Raises:
      OptionError: a value out of its range.
      TypeError, KeyError: other fields than a machine's.
    """
    links, between = body["links"], body.get("between")
    one = "bandwidth" in links
    return cls(
      **dict(body)
      | {
        "chip": Chip(**body["chip"]),
        "links": Link(**links)
        if one
        else {axis: Link(**link) for axis, link in links.items()},
        "between": None if between is None else Link(**between),
      }
    )

  def record(self) -> dict[str, Any]:
    """Plain values, of which `of` makes the machine again."""
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
    """The link between neighbours along a mesh axis, inside an island.

    Raises:
      OptionError: there is none for this axis.
    """
    if isinstance(self.links, Link):
      return self.links
    known = dict(self.links)
    if axis not in known:
      raise OptionError(
        "machine",
        f"{self.name!r} without a link for the axis {axis!r}",
        f"one of {', '.join(known)}",
        "add it to links, or give one Link for all axes",
      )
    return known[axis]

  def part(self, local: str) -> tuple[float, float]:
    """The efficiency of a local algorithm, (forward, backward).

    Raises:
      OptionError: it has none here.
    """
    known = dict(self.efficiency)
    return known[one_of("local", local, known)]


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
  name: str, given: Mapping[str, Any] | Iterable[tuple[str, Any]]
) -> tuple[tuple[str, Any], ...]:
  try:
    pairs = tuple(given.items() if isinstance(given, Mapping) else given)
    right = all(len(p) == 2 and isinstance(p[0], str) for p in pairs)
  except TypeError:
    pairs, right = (), False
  if not right or not pairs:
    raise OptionError(name, repr(given), "a mapping from names", "pass a dict")
  return tuple((str(k), v) for k, v in pairs)


# ---------------------------------------------------------------------------
# As the compiler sees them
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
  """What libtpu's compiler takes one TPU device, as JAX counts them, to be.

  Its estimates are in cycles of this clock; where its figures and the data
  sheet's differ, as of `tpu-7x`, both are stated.

  Attributes:
    name: as in `CHIPS`.
    topology: how topologies of it begin, e.g. "v5e" of "v5e:4x4".
    clock_hz: cycles per second.
    flops_per_cycle: of bfloat16 matrix products, all of the device's cores.
    cores: TensorCores of a device, 2 where XLA uses a chip's two as one.
    link_bytes_s: of one permute, one way.
    hbm_bytes: that a program may fill.
    vmem_bytes: of one core's vector memory.
    matrix_side: rows and columns of a matrix unit.
    full_side: a side of the slice that is a multiple of it closes to a ring.
    rows_per_cycle: that a matrix unit takes.
    source: where the figures are from.
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
    """Which sides of a slice close to a ring."""
    return tuple(n > 1 and n % self.full_side == 0 for n in sides)


# ---------------------------------------------------------------------------
# The figures of `machines.toml`
# ---------------------------------------------------------------------------

_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name("machines.toml").read_text("utf-8")
)


def _stated(table: str) -> dict[str, dict[str, Any]]:
  """The rows of a table, with their names and with their notes as texts."""
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
CHIPS: dict[str, Chip] = {name: one.chip for name, one in MACHINES.items()}
CORES: dict[str, Core] = {
  name: Core(**row) for name, row in _stated("cores").items()
}


# ---------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------


def core(name: str) -> Core:
  """The compiler's figures of a TPU: "tpu-v5e", "v5e" or "v5e:4x4".

  Raises:
    OptionError: there are none.
  """
  short = str(name).partition(":")[0].lower()
  for one in CORES.values():
    if short in (one.name, one.topology):
      return one
  raise OptionError(
    "chip",
    repr(name),
    f"one of {', '.join(one.topology for one in CORES.values())}",
    "pass the name of a TPU, e.g. v5e or v5e:4x4",
  )


def sides(topology: str) -> tuple[int, ...]:
  """The sides of a slice: (4, 4, 8) of "v5p:4x4x8", three of them always.

  Raises:
    OptionError: not of this form, or no TPU that is known.
  """
  made = core(topology)
  _, colon, text = topology.partition(":")
  parts = text.lower().split("x")
  flat = made.topology in ("v5e", "v6e")
  fine = all(part.isdecimal() and int(part) > 0 for part in parts)
  if not colon or not fine or len(parts) != (2 if flat else 3):
    raise OptionError(
      "topology",
      repr(topology),
      f"{made.topology}:{'4x4' if flat else '4x4x4'} or another size",
      "write the chips along each side",
    )
  found = tuple(int(part) for part in parts)
  return found + (1,) * (3 - len(found))


def devices(topology: str) -> int:
  """How many devices JAX counts in a slice, e.g. 128 in "v5p:4x4x8".

  Raises:
    OptionError: see `sides`.
  """
  each = 2 if core(topology).name == "tpu-7x" else 1
  return math.prod(sides(topology)) * each


def known(device_kind: str) -> str | None:
  """The name in `MACHINES` of what `device.device_kind` says, or None."""
  text = device_kind.lower()
  for part, name in _TABLES["names"]["kinds"]:
    if part in text:
      return name or None
  return None


def machine(name: str) -> Machine:
  """A stated machine by its name, or by a `device_kind`.

  Raises:
    OptionError: there is none.
  """
  found = name if name in MACHINES else known(name)
  if found is None:
    raise OptionError(
      "machine",
      repr(name),
      f"one of {', '.join(MACHINES)}",
      "pass one of these names, or a Machine(...)",
    )
  return MACHINES[found]


def machine_of(device_kind: str, platform: str) -> Machine:
  """The stated machine of a device, or of one that is like it.

  Depends on nothing but the two texts, so all processes agree.
  """
  found = known(device_kind)
  if found is not None:
    return MACHINES[found]
  near = MACHINES[_TABLES["names"]["like"].get(platform, "cpu")]
  return dataclasses.replace(
    near,
    name=f"{device_kind} (as {near.name})",
    source=f"no figures of {device_kind!r}: as {near.name}. {near.source}",
  )
