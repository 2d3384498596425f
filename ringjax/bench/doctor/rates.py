"""Rates of a device and its links, next to those of the data sheet.

A device's rates are those of the first device of each process. All devices send
at the same time.
"""

from __future__ import annotations

import functools
import io
from typing import TextIO

import jax
from jax.sharding import Mesh

from ringjax.bench import machine, timing
from ringjax.bench.doctor.findings import OK, SKIPPED, SLOW, Findings
from ringjax.parallel import chips, joint_outcome

PART = "rates"
# Share of the data sheet's rate below which a device is slow.
SLOW_SHARE = 0.5
_ROUNDS = 3
# Bytes that are read and sent, side of a matrix; on CPUs, and elsewhere.
_SIZES_CPU, _SIZES = (1 << 27, 1 << 20, 1024), (1 << 30, 1 << 26, 8192)


class DeviceRates:
  """Rates of a device, each measured once, when it is first asked for.

  Args:
    device: First device of this process.
    stream: Stream for progress.
  """

  def __init__(
    self, device: jax.Device, stream: TextIO | io.TextIOBase | None = None
  ):
    self.device = device
    self.stream = stream
    small = device.platform == "cpu"
    self._read_bytes, self.sent_bytes, self._side = (
      _SIZES_CPU if small else _SIZES
    )
    self._products: dict[str, float] = {}

  @functools.cached_property
  def read(self) -> float:
    """Bytes per second of reading an array once."""
    return machine.read_rate(
      self.device, nbytes=self._read_bytes, rounds=_ROUNDS, stream=self.stream
    )

  def product(self, dtype: str) -> float:
    """FLOPs per second of a product of two square matrices."""
    if dtype not in self._products:
      runs = {f"product, {dtype}": timing.gemm(dtype, self._side)}
      (measured,) = timing.timed(runs, _ROUNDS, self.stream).values()
      self._products[dtype] = timing.gemm_flops(self._side) / min(
        measured.seconds
      )
    return self._products[dtype]

  @property
  def stated(self) -> chips.Machine | None:
    """The machine of the data sheet; None for CPUs and unknown devices."""
    name = chips.machine_name(self.device.device_kind)
    if self.device.platform == "cpu" or name is None:
      return None
    return chips.MACHINES[name]


def check(findings: Findings, rates: DeviceRates, mesh: Mesh) -> None:
  """Adds a finding for each rate.

  Args:
    findings: Findings to add to.
    rates: Rates of the first device of this process.
    mesh: Mesh of all processes' devices.
  """
  chip = None if rates.stated is None else rates.stated.chip
  for dtype in ("bfloat16", "float32"):
    name = f"product, {dtype}"
    with findings.guarded(PART, name):
      sheet = None if chip is None else chip.rate(dtype)
      _add(findings, name, rates.product(dtype), sheet, 1e12, "TFLOP/s")
  name = "reading memory"
  with findings.guarded(PART, name):
    sheet = None if chip is None else chip.hbm_bandwidth
    _add(findings, name, rates.read, sheet, 1e9, "GB/s")
  with findings.guarded(PART, "links"):
    _check_links(findings, rates, mesh)


_KINDS = {"one": "send to a neighbour", "gather": "gather", "sum": "sum"}


def _check_links(findings: Findings, rates: DeviceRates, mesh: Mesh) -> None:
  if mesh.devices.size == 1:
    raise timing.Skipped("one device has no links")
  ranks = joint_outcome.processes_of(mesh)
  # A process that is not here would leave the others in a collective.
  joint_outcome.raise_first(None, ranks)
  measured = machine.link_rates(
    mesh, nbytes=rates.sent_bytes, rounds=_ROUNDS, stream=rates.stream
  )
  for (axis, kind), rate in measured.items():
    name = f"{_KINDS[kind]}, axis {axis} of {mesh.shape[axis]}"
    sheet = None
    # Sums and gathers use several links of a device at once.
    if rates.stated is not None and kind == "one":
      stated = rates.stated
      beyond = stated.island is not None and mesh.devices.size > stated.island
      link = stated.between if beyond else stated.link(axis)
      sheet = None if link is None else link.bandwidth
    _add(findings, name, rate, sheet, 1e9, "GB/s")


def _add(
  findings: Findings,
  name: str,
  rate: float,
  sheet: float | None,
  unit: float,
  unit_name: str,
) -> None:
  if rate != rate:
    findings.add(PART, name, SKIPPED, "faster than the clock's noise")
    return
  text = f"{rate / unit:,.2f} {unit_name}"
  if sheet is None:
    findings.add(PART, name, OK, text, figures={"rate": rate})
    return
  share = rate / sheet
  text += f", {100 * share:.0f} % of the data sheet's {sheet / unit:,.1f}"
  slow = share < SLOW_SHARE
  if slow:
    text += "; look for other programs on the device, its clock and its links"
  findings.add(
    PART,
    name,
    SLOW if slow else OK,
    text,
    figures={"rate": rate, "sheet": sheet, "share": share},
  )
