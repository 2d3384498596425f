"""Machines by name, in files, and from measured times.

Guarantees: what is read is checked before it is used; a file is written whole
or not at all. A measured machine is a line through times, t = a + b x, with
neither negative: a is the fixed time of a call, 1 / b the rate.

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
# Two directions at once that take less than this of one alone share nothing.
_APART = 1.5


def load(name: str) -> Machine:
  """A stated machine by name, or one by the path of its file.

  Raises:
    OptionError: no machine has this name.
    CheckpointFormatError: the file does not hold a machine.
  """
  if os.sep in name or name.endswith(".json"):
    return read(name)
  return chips.machine(name)


def write(path: str, machine: Machine) -> None:
  """Writes a machine to a file.

  Raises:
    OptionError: it cannot be written.
  """
  files.write(path, FORMAT, machine.record())


def read(path: str) -> Machine:
  """The machine in a file that `write` or a person wrote.

  Raises:
    OptionError: it cannot be read.
    CheckpointFormatError: it does not hold a machine.
  """
  return files.load(path, FORMAT, Machine.of, "the fields of a machine")


# ---------------------------------------------------------------------------
# From measured times
# ---------------------------------------------------------------------------

Samples = Sequence[tuple[float, float]]


def line(samples: Samples, noise_s: float = 0.0) -> tuple[float, float]:
  """(a, b) of t = a + b x through (x, t), by least squares.

  Errors count relative to the time, so that short calls have a say, as far as
  they are above the noise.

  Args:
    samples: pairs of (x, t).
    noise_s: seconds by which every time may be wrong; a time that is a
      difference may then be below 0.

  Raises:
    OptionError: fewer than two different x, or times that do not grow.
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
  """Times along one mesh axis, each a list of (bytes, seconds).

  Attributes:
    size: devices along the axis.
    one: a send to the next device, of so many bytes.
    both: to both neighbours at once, of so many bytes each.
    gather: an all-gather that brings so many bytes of others'.
    exchange: an all-to-all that sends so many bytes to others.
    noise_s: by how much any of the times may be wrong.
  """

  size: int
  one: Samples
  both: Samples
  gather: Samples
  exchange: Samples
  noise_s: float = 0.0


def link_of(times: LinkTimes) -> Link:
  """The link that takes these times.

  A gather that is much faster than sends to one neighbour uses several links;
  where sends to both neighbours take as long as two, there is one way out.
  """
  latency, per_byte = line(times.one, times.noise_s)
  _, both = line(times.both, times.noise_s)
  _, gathered = line(times.gather, times.noise_s)
  apart = both < _APART * per_byte
  ways = per_byte / gathered
  ports = 1
  if apart and times.size > 2:
    # Whole dimensions; a little less than a half of one is noise.
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
  """The machine that takes these times, each of one device.

  Args:
    name: of it.
    products: for each dtype (FLOPs, seconds) of matrix products.
    forward: (FLOPs, seconds) of the local algorithm's forward pass.
    backward: of its backward pass alone.
    links: by mesh axis.
    copies: (bytes read and written, seconds).
    memory_bytes: of a device.
    call_s: of a program that does nothing.
    dtype: that the local algorithm was measured in.
    source: how it was measured.

  Raises:
    OptionError: samples too few or too noisy.
  """
  rates = {
    kind: 1 / line(samples, call_s)[1] for kind, samples in products.items()
  }
  fits = [line(samples, call_s) for samples in (forward, backward)]
  # A rate above the product's is the noise of the machine.
  forward_part, backward_part = (
    min(1.0, 1 / per_flop / rates[dtype]) for _, per_flop in fits
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
    hop_s=float(np.mean([start for start, _ in fits])),
    call_s=call_s,
    source=source,
  )
