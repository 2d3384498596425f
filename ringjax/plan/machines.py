"""Machines by name, in files, and from measured times.

Guarantees: files are checked when read; a file is written whole or not at all.
A measured machine is a line through times, t = a + b x, with neither negative:
a is the fixed time of a call, 1 / b the rate.

The stated machines are in `ringjax.parallel.chips`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.parallel.chips import Chip, Link, Machine
from ringjax.plan import files

FORMAT = "ringjax.machine"
# Sends in two directions that take less than this times one are independent.
_APART = 1.5


def load(name: str) -> Machine:
  """Load a stated machine by name, or one by the path of its file.

  Raises:
    OptionError: If no machine has this name.
    CheckpointFormatError: If the file does not hold a machine.
  """
  if os.sep in name or name.endswith(".json"):
    return read(name)
  return chips.machine(name)


def write(path: str, machine: Machine) -> None:
  """Write a machine to a file.

  Raises:
    OptionError: If it cannot be written.
  """
  files.write(path, FORMAT, machine.record())


def read(path: str) -> Machine:
  """Read a machine from a file that `write` or a person wrote.

  Raises:
    OptionError: If it cannot be read.
    CheckpointFormatError: If it does not hold a machine.
  """
  return files.load(path, FORMAT, Machine.of, "the fields of a machine")


# ---------------------------------------------------------------------------
# From measured times
# ---------------------------------------------------------------------------

Samples = Sequence[tuple[float, float]]


def line(samples: Samples, noise_s: float = 0.0) -> tuple[float, float]:
  """Fit (a, b) of t = a + b x through (x, t), by least squares.

  Errors count relative to the time, so that short calls have weight, as far as
  they are above the noise.

  Args:
    samples: Pairs (x, t).
    noise_s: Error bound of every time in seconds; a time that is a difference
      may then be below 0.

  Raises:
    OptionError: If there are fewer than two different x, or times do not grow.
  """
  x, t = (np.array(column, float) for column in zip(*samples, strict=True))
  if np.unique(x).size < 2 or (not noise_s and not (t > 0).all()):
    raise OptionError(
      "samples",
      f"{len(samples)}, at {np.unique(x).size} sizes",
      "times of two sizes or more",
      "pass times of at least two sizes",
    )
  weight = 1 / (np.maximum(t, 0.0) + noise_s)
  rows = np.stack([weight, x * weight], 1)
  (a, b), *_ = np.linalg.lstsq(rows, t * weight)
  if a < 0:
    a, b = 0.0, ((x * t * weight**2).sum() / ((x * weight) ** 2).sum())
  if b <= 0:
    raise OptionError(
      "samples",
      f"times of {t.min():.3g} to {t.max():.3g} s that do not grow",
      "sizes that take longer the larger they are",
      "measure larger ones, or more rounds",
    )
  return float(a), float(b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTimes:
  """Measured times along one mesh axis, as lists of (bytes, seconds).

  Attributes:
    size: Number of devices along the axis.
    one_way: Sends to the next device.
    two_way: Sends to both neighbours at once, bytes of each.
    gather: All-gathers, bytes received from other devices.
    exchange: All-to-alls, bytes sent to other devices.
    noise_s: Error bound of all times, in seconds.
  """

  size: int
  one_way: Samples
  two_way: Samples
  gather: Samples
  exchange: Samples
  noise_s: float = 0.0


def link_of(times: LinkTimes) -> Link:
  """Fit a link to these times.

  An all-gather that is much faster than sends to one neighbour uses several
  links; if sends to both neighbours take as long as two, there is one port.
  """
  latency, per_byte = line(times.one_way, times.noise_s)
  _, both_per_byte = line(times.two_way, times.noise_s)
  _, gather_per_byte = line(times.gather, times.noise_s)
  full_duplex = both_per_byte < _APART * per_byte
  ways = per_byte / gather_per_byte
  ports = 1
  if full_duplex and times.size > 2:
    # Two ports per dimension; half a port beyond a whole dimension is noise.
    ports = min(6, max(2, 2 * math.ceil(ways / 2 - 0.25)))
  return Link(bandwidth=1 / per_byte, latency_s=latency, ports=ports)


def fitted(
  name: str,
  *,
  products: Mapping[str, Samples],
  forward: Samples,
  backward: Samples,
  links: Mapping[str, LinkTimes],
  copies: Samples,
  memory_bytes: float,
  call_s: float,
  dtype: str,
  source: str,
) -> Machine:
  """Fit a machine to measured times, each of one device.

  Args:
    name: Name of the machine.
    products: (FLOPs, seconds) of matrix products, by dtype.
    forward: (FLOPs, seconds) of the local algorithm's forward pass.
    backward: (FLOPs, seconds) of its backward pass alone.
    links: Times of links by mesh axis.
    copies: (bytes read and written, seconds).
    memory_bytes: Memory of a device, in bytes.
    call_s: Seconds of a program that does nothing.
    dtype: Dtype in which the local algorithm was measured.
    source: Description of the measurement.

  Raises:
    OptionError: If there are too few samples, or too noisy ones.
  """
  rates = {
    kind: 1 / line(samples, call_s)[1] for kind, samples in products.items()
  }
  lines = [line(samples, call_s) for samples in (forward, backward)]
  # A rate above the product's is noise of the machine.
  forward_part, backward_part = (
    min(1.0, 1 / per_flop / rates[dtype]) for _, per_flop in lines
  )
  return Machine(
    name=name,
    chip=Chip(
      name=name,
      flops=rates,
      hbm_bytes=memory_bytes,
      hbm_bandwidth=1 / line(copies, call_s)[1],
      source=source,
    ),
    links={axis: link_of(times) for axis, times in links.items()},
    efficiency={"blockwise": (forward_part, backward_part)},
    hop_s=float(np.mean([start for start, _ in lines])),
    call_s=call_s,
    source=source,
  )
