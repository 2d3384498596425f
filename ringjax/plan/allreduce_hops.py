"""Link latencies of an all-reduce, counted in a graph of devices and switches.

Where links are slow to answer and messages small, what an all-reduce costs is
how many links its longest chain of messages passes, one after another:

  star   the farthest device to the root and back             2 max d
  tree   up the deepest chain of parents, and down again      2 max sum of d
  ring   2 (p - 1) steps, each between farthest neighbours    2 (p - 1) max d

with d the latency of the shortest path between two devices. On eight devices
that are four links apart, each behind a switch of its own, it is 8, 16 and 56.

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
    devices: names of those that compute; the first is the root.
    links: (one end, other end, latency in seconds), both ways alike.
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
    for one in self.devices[1:]:
      if math.isinf(self.distances(self.devices[0]).get(one, math.inf)):
        raise OptionError(
          "links",
          f"none that lead from {self.devices[0]} to {one}",
          "a graph in which all devices reach each other",
          "add the missing links",
        )

  @classmethod
  def behind_switches(
    cls, devices: int, latency_s: int | float = 1.0
  ) -> Topology:
    """Devices each behind its own switch, all switches at one: four links."""
    positive_int("devices", devices)
    number("latency", latency_s, least=0)
    names = tuple(f"d{i}" for i in range(devices))
    links = []
    for i, name in enumerate(names):
      links += [(name, f"s{i}", latency_s), (f"s{i}", "core", latency_s)]
    return cls(names, tuple(links))

  @classmethod
  def load(cls, path: str) -> Topology:
    """A graph from a file: {"devices": [...], "links": [[a, b, seconds], ...]}.

    Raises:
      OptionError: it cannot be read, or is no graph of these devices.
      CheckpointFormatError: it is not of this form.
    """
    make = lambda body: cls(
      tuple(str(name) for name in body["devices"]),
      tuple((str(a), str(b), float(s)) for a, b, s in body["links"]),
    )
    return files.load(path, FORMAT, make, "devices and links")

  def distances(self, start: str) -> dict[str, float]:
    """Latency of the shortest path from `start` to all that it reaches."""
    near: dict[str, list[tuple[str, float]]] = {}
    for a, b, latency_s in self.links:
      near.setdefault(a, []).append((b, latency_s))
      near.setdefault(b, []).append((a, latency_s))
    found: dict[str, float] = {}
    queue = [(0.0, start)]
    while queue:
      far, at = heapq.heappop(queue)
      if at in found:
        continue
      found[at] = far
      for other, latency_s in near.get(at, ()):
        if other not in found:
          heapq.heappush(queue, (far + latency_s, other))
    return found

  def between(self, one: str, other: str) -> float:
    """Latency of the shortest path between two devices."""
    return self.distances(one)[other]


def two_levels(devices: Sequence[str]) -> dict[str, str]:
  """Parents in a tree of two levels: groups of about sqrt(p), and their first.

  The first device of the first group is the root and leads its group.
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
    topology: the graph.
    reduce: of `REDUCES`.
    parents: of a tree, by device; default: `two_levels`.

  Raises:
    OptionError: an unknown all-reduce, or parents that are no tree.
  """
  one_of("reduce", reduce, REDUCES)
  devices = topology.devices
  if len(devices) == 1:
    return 0.0
  root = devices[0]
  if reduce == "ring":
    around = zip(devices, (*devices[1:], root), strict=True)
    far = max(topology.between(a, b) for a, b in around)
    return 2 * (len(devices) - 1) * far
  if reduce == "star":
    parents = dict.fromkeys(devices[1:], root)
  elif parents is None:
    parents = two_levels(devices)
  return 2 * max(_up(topology, one, parents) for one in devices)


def _up(topology: Topology, device: str, parents: Mapping[str, str]) -> float:
  """Latency from a device to the root along its parents."""
  total, at = 0.0, device
  for _ in topology.devices:
    if at == topology.devices[0]:
      return total
    parent = parents.get(at)
    if parent not in topology.devices:
      break
    total += topology.between(at, str(parent))
    at = str(parent)
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
    topology: the graph.
    reduce: of `REDUCES`.
    nbytes: of what is summed, of one device.
    bandwidth: bytes/s of a link.
    barrier_s: waiting until all are there.
    sum_s: adding up.

  Raises:
    OptionError: a value out of its range.
  """
  number("nbytes", nbytes, least=0)
  number("bandwidth", bandwidth, above=0)
  links = chain_s(topology, reduce)
  p = len(topology.devices)
  if p == 1:
    return 0.0
  times = {"star": 2.0, "tree": 4.0, "ring": 2 * (p - 1) / p}[reduce]
  return times * nbytes / bandwidth + links + barrier_s + sum_s
