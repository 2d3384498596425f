"""Link latencies of an all-reduce, counted in a graph of devices and switches.

If links have a high latency and messages are small, the cost of an all-reduce
is the number of links that its longest chain of messages passes in sequence:

  star   the farthest device to the root and back             2 max d
  tree   up the deepest chain of parents, and down again      2 max sum of d
  ring   2 (p - 1) steps, each between farthest neighbours    2 (p - 1) max d

with d the latency of the shortest path between two devices. For eight devices
that are four links apart, each behind its own switch, it is 8, 16 and 56.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), section 3.2; its tree has two
levels.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from ringjax.checks import number, one_of, positive_int
from ringjax.errors import OptionError
from ringjax.plan import files

FORMAT = "ringjax.topology"
REDUCES = ("star", "tree", "ring")


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices and switches, and the links between them.

  Attributes:
    devices: Names of the devices that compute; the first is the root.
    links: (one end, other end, latency in seconds), equal both ways.
  """

  devices: tuple[str, ...]
  links: tuple[tuple[str, str, int | float], ...]

  def __post_init__(self) -> None:
    if not self.devices or len(set(self.devices)) != len(self.devices):
      raise OptionError(
        "devices", f"{self.devices}", "names, each once", "rename the devices"
      )
    for _, _, latency_s in self.links:
      number("latency", latency_s, least=0)
    for device in self.devices[1:]:
      if math.isinf(self.distances(self.devices[0]).get(device, math.inf)):
        raise OptionError(
          "links",
          f"none that lead from {self.devices[0]} to {device}",
          "a graph in which all devices reach each other",
          "add the missing links",
        )

  @classmethod
  def behind_switches(
    cls, devices: int, latency_s: int | float = 1.0
  ) -> Topology:
    """Devices each on its own switch, all switches on a core: four links."""
    positive_int("devices", devices)
    number("latency", latency_s, least=0)
    names = tuple(f"d{i}" for i in range(devices))
    links = []
    for i, name in enumerate(names):
      links += [(name, f"s{i}", latency_s), (f"s{i}", "core", latency_s)]
    return cls(names, tuple(links))

  @classmethod
  def load(cls, path: str) -> Topology:
    """Load a graph: {"devices": [...], "links": [[a, b, seconds], ...]}.

    Raises:
      OptionError: If it cannot be read, or is not a graph of these devices.
      CheckpointFormatError: If it is not of this form.
    """
    make = lambda body: cls(
      tuple(str(name) for name in body["devices"]),
      tuple((str(a), str(b), float(s)) for a, b, s in body["links"]),
    )
    return files.load(path, FORMAT, make, "devices and links")

  def distances(self, start: str) -> dict[str, float]:
    """Latency of the shortest path from `start` to all reachable nodes."""
    neighbours: dict[str, list[tuple[str, float]]] = {}
    for a, b, latency_s in self.links:
      neighbours.setdefault(a, []).append((b, latency_s))
      neighbours.setdefault(b, []).append((a, latency_s))
    latencies: dict[str, float] = {}
    queue = [(0.0, start)]
    while queue:
      latency, node = heapq.heappop(queue)
      if node in latencies:
        continue
      latencies[node] = latency
      for neighbour, latency_s in neighbours.get(node, ()):
        if neighbour not in latencies:
          heapq.heappush(queue, (latency + latency_s, neighbour))
    return latencies

  def between(self, one: str, other: str) -> float:
    """Latency of the shortest path between two devices."""
    return self.distances(one)[other]


def two_levels(devices: Sequence[str]) -> dict[str, str]:
  """Parents in a tree of two levels: groups of about sqrt(p) devices.

  The first device of a group leads it; that of the first group is the root.
  """
  size = math.isqrt(max(0, len(devices) - 1)) + 1
  parents: dict[str, str] = {}
  for i, name in enumerate(devices):
    leader = devices[i - i % size]
    if i:
      parents[name] = devices[0] if leader == name else leader
  return parents


def chain_s(
  topology: Topology,
  reduce: str,
  *,
  parents: Mapping[str, str] | None = None,
) -> float:
  """Seconds of latency in the longest chain of messages of an all-reduce.

  Args:
    topology: Graph of devices and links.
    reduce: Algorithm, one of `REDUCES`.
    parents: Parents in a tree, by device; default: `two_levels`.

  Raises:
    OptionError: If the all-reduce is unknown, or parents are not a tree.
  """
  one_of("reduce", reduce, REDUCES)
  devices = topology.devices
  if len(devices) == 1:
    return 0.0
  root = devices[0]
  if reduce == "ring":
    ring_pairs = zip(devices, (*devices[1:], root), strict=True)
    farthest = max(topology.between(a, b) for a, b in ring_pairs)
    return 2 * (len(devices) - 1) * farthest
  if reduce == "star":
    parents = dict.fromkeys(devices[1:], root)
  elif parents is None:
    parents = two_levels(devices)
  return 2 * max(
    _latency_to_root(topology, device, parents) for device in devices
  )


def _latency_to_root(
  topology: Topology, device: str, parents: Mapping[str, str]
) -> float:
  """Latency from a device to the root along its parents."""
  total, node = 0.0, device
  for _ in topology.devices:
    if node == topology.devices[0]:
      return total
    parent = parents.get(node)
    if parent not in topology.devices:
      break
    total += topology.between(node, str(parent))
    node = str(parent)
  raise OptionError(
    "parents",
    f"{device} that does not lead to {topology.devices[0]}",
    "a tree whose root is the first device",
    "give each other device a parent",
  )


def allreduce_s(
  topology: Topology,
  reduce: str,
  nbytes: int | float,
  bandwidth: int | float,
  *,
  barrier_s: int | float = 0.0,
  sum_s: int | float = 0.0,
) -> float:
  """Seconds of an all-reduce: data, links, barrier and sums.

  A star or a level of a tree moves all bytes up and down again, a ring
  2 (p - 1) / p of them.

  Args:
    topology: Graph of devices and links.
    reduce: Algorithm, one of `REDUCES`.
    nbytes: Bytes of one device's operand.
    bandwidth: Bandwidth of a link, in bytes/s.
    barrier_s: Seconds of waiting for all devices.
    sum_s: Seconds of adding up.

  Raises:
    OptionError: If a value is out of range.
  """
  number("nbytes", nbytes, least=0)
  number("bandwidth", bandwidth, above=0)
  links = chain_s(topology, reduce)
  p = len(topology.devices)
  if p == 1:
    return 0.0
  times = {"star": 2.0, "tree": 4.0, "ring": 2 * (p - 1) / p}[reduce]
  return times * nbytes / bandwidth + links + barrier_s + sum_s
