"""What devices can do: products, memory, links. Stated figures, with sources.

Law: every figure says where it is from, and nothing is measured here. Rates
and memory are those of one device as JAX counts them: of TPU v4 and v5p a chip,
of TPU7x one of a chip's two cores.
`CHIPS` and `MACHINES` have what data sheets say, `CORES` what the compiler of
TPU programs reckons with.

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
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.errors import OptionError, message

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
LOCALS = ("blockwise", "kernel")
# The chips that are GPUs, and their compute capabilities.
CAPABILITIES = {
  "a100": (8, 0),
  "h100": (9, 0),
  "h800": (9, 0),
  "h200": (9, 0),
  "b200": (10, 0),
  "gb200": (10, 0),
}


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
    _positive("Link bandwidth", self.bandwidth, "bytes per second")
    _at_least_0("Link latency_s", self.latency_s)
    whole = isinstance(self.ports, int) and not isinstance(self.ports, bool)
    if not whole or self.ports < 1 or (self.ports > 1 and self.ports % 2):
      raise OptionError(
        message(
          "Link ports",
          repr(self.ports),
          "1 for a switch, or two for each dimension of a torus",
          "use 1, 2, 4 or 6",
        )
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
      return (
        nbytes / self.bandwidth + math.ceil(math.log2(size)) * self.latency_s
      )
    dims, side = self._box(size)
    closed = wraps and side > 2
    # The device in a corner of an open box has a link for each dimension.
    seconds = nbytes / (dims * (1 + closed) * self.bandwidth)
    steps = dims * (side // 2 if closed else side - 1)
    return self._shared(seconds + max(1.0, steps) * self.latency_s)

  def exchange_s(self, nbytes: float, size: int, wraps: bool = True) -> float:
    """Seconds of an all-to-all in which a device sends `nbytes` to others."""
    if size == 1:
      return 0.0
    if self.switched:
      return nbytes / self.bandwidth + self.latency_s
    dims, side = self._box(size)
    closed = wraps and side > 2
    # What crosses the middle link of a row: of s devices s^2 / 4 pairs.
    whole = abs(side - round(side)) < 1e-9
    crossing = round(side) ** 2 // 4 if whole else side**2 / 4
    pairs = crossing * size / side / (1 + closed)
    seconds = nbytes / (size - 1) * pairs / self.bandwidth
    steps = dims * (side // 2 if closed else side - 1)
    return self._shared(seconds + max(1.0, steps) * self.latency_s)

  def _box(self, size: int) -> tuple[int, float]:
    """(dimensions, side) of the box that `size` devices are."""
    dims = min(self.ports // 2, max(1, int(math.log2(size))))
    return dims, size ** (1 / dims)

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
  flops: Any
  hbm_bytes: int | float
  hbm_bandwidth: int | float
  source: str

  def __post_init__(self) -> None:
    object.__setattr__(self, "flops", _pairs("Chip flops", self.flops))
    for dtype, rate in self.flops:
      _positive(f"Chip flops of {dtype}", rate, "FLOPs per second")
    _positive("Chip hbm_bytes", self.hbm_bytes, "bytes")
    _positive("Chip hbm_bandwidth", self.hbm_bandwidth, "bytes per second")

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
  links: Any
  island: int | None = None
  between: Link | None = None
  efficiency: Any = (("blockwise", (0.15, 0.15)), ("kernel", (0.6, 0.5)))
  hop_s: int | float = 0.0
  call_s: int | float = 0.0
  memory_share: int | float = 0.5
  source: str = ""

  def __post_init__(self) -> None:
    if not isinstance(self.links, Link):
      links = _pairs("Machine links", self.links)
      if not all(isinstance(link, Link) for _, link in links):
        raise OptionError(
          message(
            "Machine links",
            repr(self.links),
            "a Link, or a mapping from axis names to Links",
            "build them with Link(bandwidth=...)",
          )
        )
      object.__setattr__(self, "links", links)
    efficiency = tuple(
      (name, tuple(pair))
      for name, pair in _pairs("Machine efficiency", self.efficiency)
    )
    right = all(
      name in LOCALS
      and len(pair) == 2
      and all(_real(x) and 0 < float(x) <= 1 for x in pair)
      for name, pair in efficiency
    )
    if not right or not efficiency:
      raise OptionError(
        message(
          "Machine efficiency",
          repr(self.efficiency),
          f"(forward, backward) above 0 to 1 for some of {', '.join(LOCALS)}",
          "write {'kernel': (0.6, 0.5)}",
        )
      )
    object.__setattr__(self, "efficiency", efficiency)
    for name in ("hop_s", "call_s"):
      _at_least_0(f"Machine {name}", getattr(self, name))
    _positive("Machine memory_share", self.memory_share, "part of the memory")
    if self.memory_share > 1:
      raise OptionError(
        message(
          "Machine memory_share",
          self.memory_share,
          "at most 1",
          "write it as a part, e.g. 0.5",
        )
      )
    if (self.island is None) != (self.between is None):
      raise OptionError(
        message(
          "Machine island, between",
          f"{self.island!r}, {self.between!r}",
          "both, or neither",
          "say how many devices an island has and what joins islands",
        )
      )
    if self.island is not None and self.island < 1:
      raise OptionError(
        message("Machine island", self.island, "1 or more", "count devices")
      )

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
        message(
          "machine",
          f"{self.name!r} without a link for the axis {axis!r}",
          f"one of {', '.join(known)}",
          "add it to links, or give one Link for all axes",
        )
      )
    return known[axis]

  def part(self, local: str) -> tuple[float, float]:
    """The efficiency of a local algorithm, (forward, backward).

    Raises:
      OptionError: it has none here.
    """
    known = dict(self.efficiency)
    if local not in known:
      raise OptionError(
        message(
          "local", repr(local), f"one of {', '.join(known)}", "choose one"
        )
      )
    return known[local]


def number_bytes(dtype: str) -> int:
  """Bytes of one number of a dtype, by its name."""
  if dtype in _DTYPE_BYTES:
    return _DTYPE_BYTES[dtype]
  try:
    return np.dtype(dtype).itemsize
  except TypeError:
    raise OptionError(
      message(
        "dtype",
        repr(dtype),
        f"one of {', '.join(_DTYPE_BYTES)}",
        "correct the name",
      )
    ) from None


def _pairs(name: str, given: Any) -> tuple[tuple[str, Any], ...]:
  try:
    pairs = tuple(given.items() if isinstance(given, Mapping) else given)
    right = all(len(p) == 2 and isinstance(p[0], str) for p in pairs)
  except TypeError:
    pairs, right = (), False
  if not right or not pairs:
    raise OptionError(
      message(name, repr(given), "a mapping from names", "write a dict")
    )
  return tuple((str(k), v) for k, v in pairs)


def _real(value: Any) -> bool:
  real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return real and math.isfinite(float(value))


def _positive(name: str, value: Any, unit: str) -> None:
  if not _real(value) or value <= 0:
    raise OptionError(
      message(name, repr(value), f"{unit}, above 0", "correct it")
    )


def _at_least_0(name: str, value: Any) -> None:
  if not _real(value) or value < 0:
    raise OptionError(
      message(name, repr(value), "seconds, 0 or more", "correct it")
    )


# ---------------------------------------------------------------------------
# Stated
# ---------------------------------------------------------------------------

_TPU = (
  "rates, memory: cloud.google.com/tpu/docs and jax's tpu_info; float32: six "
  "bfloat16 passes (recalled)"
)
_GPU = (
  "data sheet of the maker, dense rates without sparsity (recalled); float32 "
  "in full precision, outside of the tensor cores"
)


def _chip(
  name: str, half: float, single: float, gb: float, gb_s: float, source: str
) -> Chip:
  return Chip(
    name=name,
    flops={"bfloat16": half, "float16": half, "float32": single},
    hbm_bytes=gb * 1e9,
    hbm_bandwidth=gb_s * 1e9,
    source=source,
  )


CHIPS: dict[str, Chip] = {
  chip.name: chip
  for chip in (
    _chip("tpu-v4", 275e12, 275e12 / 6, 34.4, 1230, _TPU),
    _chip("tpu-v5e", 197e12, 197e12 / 6, 17.2, 820, _TPU),
    _chip("tpu-v5p", 459e12, 459e12 / 6, 103, 2765, _TPU),
    _chip("tpu-v6e", 918e12, 918e12 / 6, 34.4, 1640, _TPU),
    _chip(
      "tpu-7x",
      1153.5e12,
      1153.5e12 / 6,
      103,
      3700,
      f"{_TPU}; one of a chip's two cores",
    ),
    _chip("a100", 312e12, 19.5e12, 80, 2039, _GPU),
    _chip("h100", 989e12, 67e12, 80, 3350, _GPU),
    _chip("h800", 989e12, 67e12, 80, 3350, _GPU),
    _chip("h200", 989e12, 67e12, 141, 4800, _GPU),
    _chip("b200", 2250e12, 75e12, 180, 7700, _GPU),
    _chip("gb200", 2500e12, 80e12, 186, 8000, _GPU),
    _chip(
      "cpu",
      117e9,
      60e9,
      4,
      5,
      "eight devices on two cores of an AMD EPYC with AVX-512: an eighth of "
      "480 GFLOP/s float32 and 940 bfloat16 (measured), of 40 GB/s (assumed)",
    ),
  )
}

_XLA = (
  "kernels reach {kernel}; the loops of Blockwise as XLA compiles them a "
  "quarter of it (kernels are 3 to 5 times as fast in compiled schedules)"
)
_ICI = (
  "link: the rate of one permute one way that libtpu assumes; latency 1 us "
  "(recalled); "
)
_NVLINK = (
  "link: NVLink one way behind a switch, {gb} GB/s; between nodes {ib} GB/s a "
  "GPU; latencies 5 and 10 us with the launch (recalled); "
)


def _tpu(
  name: str, ports: int, gb_s: float, kernel: tuple, words: str
) -> Machine:
  return Machine(
    name=name,
    chip=CHIPS[name],
    links=Link(bandwidth=gb_s * 1e9, latency_s=1e-6, ports=ports),
    efficiency=_efficiency(kernel),
    hop_s=10e-6,
    call_s=10e-6,
    source=_ICI + _XLA.format(kernel=words),
  )


def _gpu(
  name: str, gb_s: float, island: int, ib: float, kernel: tuple, words: str
) -> Machine:
  return Machine(
    name=name,
    chip=CHIPS[name],
    links=Link(bandwidth=gb_s * 1e9, latency_s=5e-6, ports=1),
    island=island,
    between=Link(bandwidth=ib * 1e9, latency_s=10e-6, ports=1),
    efficiency=_efficiency(kernel),
    hop_s=10e-6,
    call_s=20e-6,
    source=_NVLINK.format(gb=gb_s, ib=ib) + _XLA.format(kernel=words),
  )


def _efficiency(kernel: tuple[float, float]) -> dict[str, Any]:
  return {"blockwise": tuple(x / 4 for x in kernel), "kernel": kernel}


_SPLASH = (
  "75 % forward, 70 % backward (final schedules of splash in blocks of 1024: "
  "88 to 92 % and 94 %, without waiting for memory)"
)
_WIDE = (
  "30 % forward, 40 % backward (final schedules of splash: 32 and 44 %, head "
  "dims of 128 half fill the matrix unit)"
)
_FLASH2 = "60 % forward, 50 % backward (FlashAttention 2, recalled)"
_FLASH3 = "65 % forward, 55 % backward (FlashAttention 3, recalled)"

MACHINES: dict[str, Machine] = {
  machine.name: machine
  for machine in (
    _tpu("tpu-v4", 6, 44.8, (0.75, 0.7), _SPLASH),
    _tpu("tpu-v5e", 4, 46.6, (0.75, 0.7), _SPLASH),
    _tpu("tpu-v5p", 6, 93.3, (0.75, 0.7), _SPLASH),
    _tpu("tpu-v6e", 4, 93.3, (0.3, 0.4), _WIDE),
    # Two devices share a chip's links.
    _tpu("tpu-7x", 6, 93.3 / 2, (0.3, 0.4), _WIDE),
    _gpu("a100", 300, 8, 25, (0.6, 0.5), _FLASH2),
    _gpu("h100", 450, 8, 50, (0.65, 0.55), _FLASH3),
    _gpu("h800", 200, 8, 50, (0.65, 0.55), _FLASH3),
    _gpu("h200", 450, 8, 50, (0.65, 0.55), _FLASH3),
    _gpu("b200", 900, 8, 50, (0.65, 0.55), _FLASH3),
    _gpu("gb200", 900, 72, 50, (0.65, 0.55), _FLASH3),
    Machine(
      name="cpu",
      chip=CHIPS["cpu"],
      links=Link(bandwidth=1.25e9, latency_s=2e-4, ports=1),
      efficiency={"blockwise": (0.4, 0.45)},
      hop_s=1e-4,
      call_s=1e-4,
      source=(
        "eight devices on two cores: permutes of 10 GB/s in all, 0.15 to 0.3 "
        "ms for an empty one, 40 to 50 % of the product rate (measured)"
      ),
    ),
  )
}


# ---------------------------------------------------------------------------
# As the compiler sees them
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
  """What libtpu's compiler takes one TPU device, as JAX counts them, to be.

  Its estimates are in cycles of this clock, so that they can be told from
  what the data sheet says; of `tpu-7x` the two differ.

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


_LIBTPU = (
  "clock, link: the scheduler's timelines that libtpu 0.0.50 dumps; memory: "
  "what it says when a program does not fit; matrix units, vector memory: "
  "jax's tpu_info"
)


def _core(
  name: str, topology: str, mhz: int, flops: int, cores: int, gb_s: float,
  hbm_gib: float, vmem_mib: int, matrix_side: int, full_side: int,
) -> Core:  # fmt: skip
  return Core(
    name=name,
    topology=topology,
    clock_hz=mhz * 1e6,
    flops_per_cycle=flops,
    cores=cores,
    link_bytes_s=gb_s * 1e9,
    hbm_bytes=int(hbm_gib * 2**30),
    vmem_bytes=vmem_mib << 20,
    matrix_side=matrix_side,
    full_side=full_side,
    source=_LIBTPU,
  )


CORES: dict[str, Core] = {
  core.name: core
  for core in (
    _core("tpu-v4", "v4", 1050, 262144, 2, 44.8, 30.75, 16, 128, 4),
    _core("tpu-v5e", "v5e", 1500, 131072, 1, 46.6, 15.75, 128, 128, 16),
    _core("tpu-v5p", "v5p", 1750, 262144, 2, 93.3, 95.73, 64, 128, 4),
    _core("tpu-v6e", "v6e", 1750, 524288, 1, 93.3, 31.24, 128, 256, 16),
    _core("tpu-7x", "tpu7x", 1900, 524288, 1, 93.3, 94.74, 64, 256, 4),
  )
}


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
    message(
      "chip",
      repr(name),
      f"one of {', '.join(one.topology for one in CORES.values())}",
      "name a TPU, e.g. v5e or v5e:4x4",
    )
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
      message(
        "topology",
        repr(topology),
        f"{made.topology}:{'4x4' if flat else '4x4x4'} or another size",
        "write the chips along each side",
      )
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


# ---------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------

# What `device.device_kind` says, in lower case, up to the first that is found.
_KINDS = (
  ("tpu7x", "tpu-7x"),
  ("tpu v7x", "tpu-7x"),
  ("tpu v6", "tpu-v6e"),
  ("tpu v5 lite", "tpu-v5e"),
  ("tpu v5e", "tpu-v5e"),
  ("tpu v5", "tpu-v5p"),
  ("tpu v4 lite", None),
  ("tpu v4", "tpu-v4"),
  ("gb200", "gb200"),
  ("b200", "b200"),
  ("h200", "h200"),
  ("h800", "h800"),
  ("h100", "h100"),
  ("a100", "a100"),
  ("cpu", "cpu"),
)
# What stands in for a device that no figure is known of, by its platform.
_LIKE = {"tpu": "tpu-v5e", "gpu": "a100", "cuda": "a100", "rocm": "a100"}


def known(device_kind: str) -> str | None:
  """The name in `MACHINES` of what `device.device_kind` says, or None."""
  text = device_kind.lower()
  for part, name in _KINDS:
    if part in text:
      return name
  return None


def machine(name: str) -> Machine:
  """A stated machine by its name, or by a `device_kind`.

  Raises:
    OptionError: there is none.
  """
  found = name if name in MACHINES else known(name)
  if found is None:
    raise OptionError(
      message(
        "machine",
        repr(name),
        f"one of {', '.join(MACHINES)}",
        "choose one, or build a Machine(...)",
      )
    )
  return MACHINES[found]


def machine_of(device_kind: str, platform: str) -> Machine:
  """The stated machine of a device, or of one that is like it.

  Depends on nothing but the two texts, so all processes agree.
  """
  found = known(device_kind)
  if found is not None:
    return MACHINES[found]
  near = MACHINES[_LIKE.get(platform, "cpu")]
  return dataclasses.replace(
    near,
    name=f"{device_kind} (as {near.name})",
    source=f"no figures of {device_kind!r}: as {near.name}. {near.source}",
  )
