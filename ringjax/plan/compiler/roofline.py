"""Lower bounds of the time of a step, next to the compiler's schedule.

Guarantees: bounds are arithmetic on figures that are stated with their sources:
the model's products at the chip's peak, the bytes that the program must read
and write once at the memory's bandwidth, the bytes on its links at theirs. The
schedule's time is the compiler's estimate, with the waiting that
`ringjax.plan.compiler.overlap` finds. Nothing was measured.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ringjax.parallel import chips
from ringjax.plan import files
from ringjax.plan.compiler.aot import Compiled

NOTE = (
  "static estimate, not measured: the time to a message's first byte, "
  "contention of links and memory, stragglers and the host are left out"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
  """Seconds of a step, each under one assumption alone.

  Attributes:
    multiply_s: Time of the model's FLOPs at the data sheet's peak.
    memory_s: Time to read arguments and write outputs once; outputs that alias
      arguments, which may be written in part, are not counted.
    ring_s: Time of the busiest direction of the ring.
    others_s: Time of collectives other than permutes, one after another.
    schedule_s: Time of the compiler's schedule.
    assumptions: Assumptions of each of these, as texts.
  """

  multiply_s: float
  memory_s: float
  ring_s: float
  others_s: float
  schedule_s: float
  assumptions: tuple[str, ...]

  @property
  def floor_s(self) -> float:
    """Lower bound: the largest of the times that can overlap."""
    return max(self.multiply_s, self.memory_s, self.ring_s, self.others_s)

  @property
  def utilization(self) -> float:
    """Fraction of the peak that the model's FLOPs use in the schedule."""
    return self.multiply_s / self.schedule_s if self.schedule_s else 0.0

  @property
  def bound(self) -> str:
    """Name of the largest bound."""
    floors = {
      "products": self.multiply_s,
      "memory": self.memory_s,
      "ring": self.ring_s,
      "other collectives": self.others_s,
    }
    return max(floors, key=lambda name: floors[name])

  def record(self) -> dict[str, Any]:
    """Fields and properties as a dict for JSON."""
    body = files.record(self, "floor_s", "utilization", "bound")
    return {**body, "note": NOTE}


def roofline(found: Compiled, dtype: str = "bfloat16") -> Roofline | None:
  """Compute the bounds of a program; None if it does not fit.

  Args:
    found: Compiled program with "model_flops", per device, among its facts.
    dtype: Dtype of the products.
  """
  if found.report is None or found.memory is None:
    return None
  core = found.report.core
  chip = chips.CHIPS[core.name]
  memory = found.memory
  rate = chip.rate(dtype)
  moved = memory.arguments + memory.outputs - memory.aliased
  others = math.fsum(
    collective.link_s
    for collective in found.report.collectives
    if collective.kind != "collective-permute"
  )
  flops = float(found.facts.get("model_flops", 0.0))
  return Roofline(
    multiply_s=flops / rate,
    memory_s=moved / chip.hbm_bandwidth,
    ring_s=found.report.link_cycles / core.clock_hz,
    others_s=others,
    schedule_s=found.report.seconds,
    assumptions=(
      f"products: {flops:.4g} FLOPs of the model on each device, nothing "
      f"computed twice, at {rate / 1e12:,.0f} TFLOP/s of {dtype} "
      f"({chip.source}); the compiler reckons with {core.flops / 1e12:,.0f}",
      f"memory: {moved / 1e9:,.2f} GB of arguments, and of outputs elsewhere, "
      f"once, at {chip.hbm_bandwidth / 1e9:,.0f} GB/s ({chip.source})",
      f"ring: {core.link_bytes_s / 1e9:g} GB/s one way over one link, times "
      f"its hops ({core.source})",
      "other collectives: over all links of a device at once, rings of a "
      "torus, and 1 us a link for each message (recalled)",
      f"schedule: cycles that the compiler wrote beside each operation, at "
      f"{core.clock_hz / 1e6:,.0f} MHz ({core.source}); kernels by their cost "
      "estimates; loops that data counts: " + (_loops(found) or "none"),
    ),
  )


def _loops(compiled: Compiled) -> str:
  """Text of the assumed trip counts of loops that depend on data, or ""."""
  assert compiled.report is not None
  counts = sorted(set(compiled.report.counted_by_data.values()))
  if not counts:
    return ""
  loops = len(compiled.report.counted_by_data)
  return (
    f"{loops} are taken to turn {', '.join(f'{n:g}' for n in counts)} times"
  )
