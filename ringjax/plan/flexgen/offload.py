"""Planner of offloading: which part of a model's data is in which memory tier.

Guarantees: the placement of a block is the optimum of the cost model (a linear
program, solved exactly); of equally fast placements it is the one that moves
the least; it fits, or there is no plan and the error says what is too large.
Blocks are enumerated, not searched to the optimum.

  "paper"  rows in multiples of 4, fewer than 20 batches
  "code"   rows 1, 2, 3, 4, 8, 16, ..., batches while more of them are faster

Cost: a linear program of 12 variables a block, about 3 ms.

Ref: Sheng et al. 2023, FlexGen (arXiv 2303.06865), section 4.3.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.errors import MemoryEstimateError, OptionError
from ringjax.plan import files
from ringjax.plan.flexgen import offload_costs
from ringjax.plan.flexgen.offload_costs import (
  KINDS,
  OffloadEstimate,
  OffloadForms,
  OffloadPolicy,
  OffloadTask,
  estimate,
)
from ringjax.plan.flexgen.offload_tiers import (
  TIERS,
  OffloadMachine,
  OffloadShape,
)

_BATCHES = 19
# Multiples of 4 up to here, then steps of an eighth of a power of two.
_FINE_ROWS = 64
_MOST_ROWS = 1 << 16
# Relative slowdown allowed to the second linear program.
_SLACK = 1e-7
# The solver's tolerance; memory is filled a little less, to be sure to fit.
_LEAST_SHARE = 1e-7
_SPARE = 1e-5
_PHASES = ("prefill", "decode", "head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPlan:
  """The best policy that was found, with reasons.

  Attributes:
    shape: Sizes of the model.
    machine: Bandwidths and sizes of the machine.
    task: Generation task.
    policy: Block size and placement.
    estimate: Predicted times and memory of the policy.
    tried: Number of blocks whose linear program was solved.
    why: Reasons, in sentences.
  """

  shape: OffloadShape
  machine: OffloadMachine
  task: OffloadTask
  policy: OffloadPolicy
  estimate: OffloadEstimate
  tried: int
  why: tuple[str, ...]

  def record(self) -> dict[str, Any]:
    """Fields as a dict for JSON, with the policy as "text"."""
    return {**files.record(self), "text": str(self.policy)}


def plan(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask | None = None,
  *,
  rows: int | None = None,
  batches: int | None = None,
  most_rows: int | None = None,
  near: float = 0.01,
  on_block: Callable[[int, int], None] | None = None,
) -> OffloadPlan:
  """Search the policy with the most tokens per second.

  Args:
    shape: Sizes of the model.
    machine: Bandwidths and sizes of the machine.
    task: Generation task; default: 32 tokens after prompts of 512.
    rows: Rows of a batch; default: searched.
    batches: Batches of a block; default: searched.
    most_rows: Maximum rows of a block that there is work for.
    near: Tolerance: of blocks whose rate is within this fraction of the best,
      the one with the most rows is taken: small batches cost launches
      that the model leaves out.
    on_block: Function called with (rows, batches) before each linear program.

  Raises:
    OptionError: If scipy is not installed, or a value is out of range.
    MemoryEstimateError: If no block fits.
  """
  task = OffloadTask() if task is None else task
  for name, number_or_none in (
    ("rows", rows), ("batches", batches), ("most_rows", most_rows)
  ):  # fmt: skip
    if number_or_none is not None:
      positive_int(name, number_or_none)
  number("near", near, least=0, most=1)
  _linprog()
  rates: dict[tuple[int, int], float] = {}
  tried = 0
  for r in (rows,) if rows is not None else _rows(task.form, most_rows):
    any_fits, last_rate = False, 0.0
    for k in _batches(task.form, batches):
      if most_rows is not None and r * k > most_rows:
        break
      if on_block is not None:
        on_block(r, k)
      tried += 1
      seconds = _optimum(shape, machine, task, r, k)
      if seconds is None:
        break
      any_fits = True
      rates[r, k] = rate = r * k * task.new / seconds[0]
      if task.form == "code" and rate < last_rate:
        break
      last_rate = rate
    if not any_fits:
      break
  if not rates:
    first_rows = next(_rows(task.form))
    raise _too_large(shape, machine, task, rows or first_rows, batches or 1)
  best = max(rates.values())
  r, k = max(
    (block for block, rate in rates.items() if rate >= (1 - near) * best),
    key=lambda block: (block[0], rates[block]),
  )
  optimum = _optimum(shape, machine, task, r, k)
  assert optimum is not None
  policy = _least_moved(shape, machine, task, r, k, optimum[0])
  best_estimate = estimate(shape, machine, task, policy)
  return OffloadPlan(
    shape=shape,
    machine=machine,
    task=task,
    policy=policy,
    estimate=best_estimate,
    tried=tried,
    why=tuple(reasons(best_estimate, policy, task)),
  )


def _rows(form: str, most: int | None = None) -> Iterator[int]:
  rows = 1 if form == "code" else min(4, most or 4)
  while rows <= _MOST_ROWS:
    yield rows
    if form == "code":
      rows = rows + 1 if rows < 4 else 2 * rows
    elif rows < _FINE_ROWS:
      rows += 4
    else:
      rows += 1 << (rows.bit_length() - 4)


def _batches(form: str, batches: int | None) -> Iterator[int]:
  if batches is not None:
    yield batches
    return
  most_batches = _BATCHES if form == "paper" else _MOST_ROWS
  yield from range(1, most_batches + 1)


# ---------------------------------------------------------------------------
# Linear programs
# ---------------------------------------------------------------------------


def _linprog() -> Callable[..., Any]:
  """Import scipy's solver.

  Raises:
    OptionError: If scipy is not installed.
  """
  try:
    return importlib.import_module("scipy.optimize").linprog
  except ModuleNotFoundError:
    raise OptionError(
      "offload",
      "a plan to search, but scipy is not installed",
      "scipy, or a policy that is given",
      "pip install scipy",
    ) from None


@dataclasses.dataclass(frozen=True)
class _LinearProgram:
  """Linear program: min cost x, with upper x <= bound and equal x = right.

  x are nine fractions and three times: of a layer's prompt, of its token, and
  of the head.
  """

  cost: np.ndarray
  upper: np.ndarray
  bound: np.ndarray
  equal: np.ndarray
  right: np.ndarray
  forms: OffloadForms


def _program(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> _LinearProgram:
  affine_forms = offload_costs.forms(shape, machine, task, rows, batches)
  L, n = shape.layers, task.new
  cost = np.zeros(12)
  cost[9:] = L, (n - 1) * L, n
  upper, bound = [], []
  for i, phase in enumerate(_PHASES):
    sums = offload_costs.joined(task.form, phase, affine_forms.times[phase])
    for form in sums.values():
      row = np.zeros(12)
      row[:9], row[9 + i] = form[:9], -1.0
      upper.append(row)
      bound.append(-form[9])
  limit = machine.tier_bytes()
  for tier, _, _, form in affine_forms.peaks:
    # In fractions of the memory, as bytes and seconds differ in scale.
    scale = max(limit[tier], 1.0)
    upper.append(np.append(form[:9] / scale, np.zeros(3)))
    bound.append(((1 - _SPARE) * limit[tier] - form[9]) / scale)
  equal = np.zeros((3, 12))
  for i in range(3):
    equal[i, 3 * i : 3 * i + 3] = 1.0
  right = np.ones(3)
  if task.form == "code":
    # Hidden states stay off the disk.
    row = np.zeros((1, 12))
    row[0, 8] = 1.0
    equal, right = np.concatenate([equal, row]), np.append(right, 0.0)
  return _LinearProgram(
    cost, np.array(upper), np.array(bound), equal, right, affine_forms
  )


def _solve(
  program: _LinearProgram,
  cost: np.ndarray,
  time_bound: tuple[np.ndarray, float] | None,
) -> np.ndarray | None:
  upper, bound = program.upper, program.bound
  if time_bound is not None:
    upper, bound = (
      np.vstack([upper, time_bound[0]]),
      np.append(bound, time_bound[1]),
    )
  result = _linprog()(
    cost,
    A_ub=upper,
    b_ub=bound,
    A_eq=program.equal,
    b_eq=program.right,
    bounds=(0, None),
    method="highs",
  )
  if result.status == 2:
    return None
  if result.status != 0:
    raise OptionError(
      "offload",
      f"a linear program that scipy does not solve: {result.message}",
      "times and sizes of a real machine",
      "check the machine's figures",
    )
  return result.x


def _optimum(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> tuple[float, np.ndarray] | None:
  """(seconds of a block, fractions) of the fastest placement, or None."""
  program = _program(shape, machine, task, rows, batches)
  x = _solve(program, program.cost, None)
  return None if x is None else (float(program.cost @ x), x[:9])


def _least_moved(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
  seconds: float,
) -> OffloadPolicy:
  """Choose the equally fast placement with the least transfer time."""
  program = _program(shape, machine, task, rows, batches)
  moving = np.zeros(12)
  counts = shape.layers, (task.new - 1) * shape.layers, task.new
  for phase, count in zip(_PHASES, counts, strict=True):
    for part, form in program.forms.times[phase].items():
      if part != "compute":
        moving[:9] += count * form[:9] / seconds
  time_bound = program.cost / seconds, 1.0 + _SLACK
  x = _solve(program, moving, time_bound)
  assert x is not None
  shares = np.clip(x[:9].reshape(3, 3), 0.0, 1.0)
  shares = np.where(shares < _LEAST_SHARE, 0.0, shares)
  shares /= shares.sum(1, keepdims=True)
  placements: dict[str, Any] = {
    kind: tuple(map(float, row))
    for kind, row in zip(KINDS, shares, strict=True)
  }
  return OffloadPolicy(rows=rows, batches=batches, **placements)


def _size(nbytes: float) -> str:
  return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes:,.0f} bytes"


def _too_large(
  shape: OffloadShape,
  machine: OffloadMachine,
  task: OffloadTask,
  rows: int,
  batches: int,
) -> MemoryEstimateError:
  """Make the error that says what does not fit of the smallest block."""
  affine_forms = offload_costs.forms(shape, machine, task, rows, batches)
  limit = machine.tier_bytes()
  need, room = sum(affine_forms.final_bytes.values()), sum(limit.values())
  got = f"{_size(need)} of weights, cache and hidden states"
  want = f"{_size(room)} in all tiers"
  if need <= room:
    # A linear form over three simplices has its minimum in a corner.
    least_bytes = {
      tier: max(
        float(form[9] + form[:9].reshape(3, 3).min(1).sum())
        for name, _, _, form in affine_forms.peaks
        if name == tier
      )
      for tier in TIERS
    }
    tier = max(
      TIERS, key=lambda name: least_bytes[name] / max(limit[name], 1.0)
    )
    got = f"{_size(least_bytes[tier])} at work in the tier {tier}"
    want = f"{_size(limit[tier])} there, and room elsewhere for the rest"
  return MemoryEstimateError(
    "offload",
    f"{shape.name}, block {rows}x{batches}: {got}",
    want,
    "use 4 bits, shorter prompts, fewer rows or more memory",
  )


# ---------------------------------------------------------------------------
# Reasons
# ---------------------------------------------------------------------------

_WORDS = {
  "to_device": "what goes from host to device",
  "from_device": "what goes from device to host",
  "disk_read": "reading the disk",
  "disk_write": "writing the disk",
  "compute": "computing",
}


def reasons(
  found: OffloadEstimate, policy: OffloadPolicy, task: OffloadTask
) -> Iterator[str]:
  """Yield reasons why a policy is as fast as it is, and its limits."""
  for phase, unit in (("prefill", "the prompts"), ("decode", "each token")):
    parts = found.binds[phase].split(" + ")
    words = " and then ".join(_WORDS[part] for part in parts)
    times: dict[str, float] = getattr(found, phase)
    seconds = ", ".join(f"{part} {1e3 * x:.3g}" for part, x in times.items())
    yield f"{unit}: a layer waits for {words} (ms: {seconds})"
  for tier in TIERS:
    if found.limit[tier] and found.peak[tier] > 0.999 * found.limit[tier]:
      excess = " and too small" if not found.fits else ""
      yield f"the {tier}'s memory is full{excess}"
  if policy.batches > 1:
    yield (
      f"{policy.batches} batches of {policy.rows} rows share each layer's "
      "weights as they pass"
    )
  off_device = 1 - policy.cache[0]
  if off_device > 1e-6:
    place = "on the host" if task.attends_on_host else "on the device"
    yield f"new tokens attend {place} to {100 * off_device:.3g} % of the cache"
  if task.host_attention and task.cache_bits != 16:
    yield "a cache in 4 bits is decoded on the device, so attention is there"
