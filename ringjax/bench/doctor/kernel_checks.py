"""Compares the kernels of a device with float64.

Guarantees: every kernel that `AutoKernel` may choose on a platform, and XLA's
loops, get the same operands. The expected results are those of `reference` in
float64 from these operands as they are rounded, on the host's CPU where JAX has
it: outputs, log-sum-exps, and all gradients of kernels that have some. An error
is the largest difference, relative to the largest expected number of that
array. Kernels of products are compared with XLA's in one small case each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ringjax.bench.doctor import kernel_cases
from ringjax.bench.doctor.findings import OK, SKIPPED, WRONG, Findings
from ringjax.bench.doctor.kernel_cases import DecodeCase, HopCase, Results
from ringjax.ops import block_product_tpu, kernel_choice
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel, Loops
from ringjax.ops.experts import grouped_product_tpu
from ringjax.ops.mask import Coords
from ringjax.parallel import chips

PART = "kernels"
# Name of XLA's loops in a finding.
LOOPS = "XLA's loops"
# Kernels of products, by platform.
PRODUCTS = (
  block_product_tpu.PRODUCTS,
  grouped_product_tpu.GROUPED_PRODUCTS,
)
# Largest error, by the dtype of the operands. Products of bfloat16 round their
# operands to 2**-9; those of float32 are exact to 2**-22, sums and exponentials
# are not.
TOLERANCES = {"bfloat16": 0.02, "float32": 1e-4}


class _Contestant(NamedTuple):
  """An algorithm that is checked.

  Fields:
    name: Name of the kernel, or `LOOPS`.
    algorithm: Local algorithm, or algorithm of `decode`.
    platform: Platform whose layouts of caches it reads.
    chooser: `AutoKernel` of the device; None for loops and interpreters.
  """

  name: str
  algorithm: Any
  platform: str
  chooser: AutoKernel | None = None


def check(
  findings: Findings, device: jax.Device, *, interpret: bool = False
) -> None:
  """Adds a finding for each kernel and case.

  Args:
    findings: Findings to add to.
    device: Device that runs the kernels, one of this process.
    interpret: Whether to run the Pallas kernels of all platforms by Pallas'
      interpreter too, slowly.
  """
  platform = device.platform
  chip = chips.machine_name(device.device_kind)
  make = functools.partial(
    _kernels,
    auto=AutoKernel(platform=platform, chip=chip),
    interpret=interpret,
  )
  loops = Blockwise().on_device(platform, device.device_kind, True)
  hops = [_Contestant(LOOPS, loops, platform), *make(auto_kernel.KERNELS)]
  decoders = [
    _Contestant(LOOPS, Loops(platform), platform),
    *make(auto_kernel.DECODERS),
  ]
  with jax.default_device(device):
    for case in kernel_cases.hop_cases():
      truth = functools.cache(functools.partial(kernel_cases.hop_truth, case))
      for contestant in hops:
        with findings.guarded(PART, f"{contestant.name}: {case.name}"):
          _check_hop(findings, contestant, case, truth)
    for home in dict.fromkeys(x.platform for x in decoders):
      for make_case in kernel_cases.decode_cases(home):
        readers = [x for x in decoders if x.platform == home]
        _check_decodes(findings, readers, make_case)
    for table in kernel_choice.tables():
      if any(table.kinds is kinds for kinds in PRODUCTS):
        _check_products(findings, make(table.kinds), table)
  for kind in _off(None if interpret else platform):
    findings.add(
      PART,
      kernel_choice.kernel_name(kind),
      SKIPPED,
      f"switched off by {kernel_choice.OFF_VARIABLE}",
    )


def _kernels(
  tables: dict[str, tuple[type, ...]], *, auto: AutoKernel, interpret: bool
) -> list[_Contestant]:
  """The kernels to check, without those that are switched off."""
  contestants: list[_Contestant] = []
  off = kernel_choice.switched_off()
  for platform, kinds in tables.items():
    for kind in kinds:
      name = kernel_choice.kernel_name(kind)
      if name in off:
        continue
      if platform == auto.platform:
        kernel = kind(chip=auto.chip)
        contestants.append(_Contestant(name, kernel, platform, auto))
      elif interpret and "interpret" in _field_names(kind):
        kernel = kind(interpret=True)
        contestants.append(_Contestant(name, kernel, platform))
  return contestants


def _field_names(kind: type) -> set[str]:
  return {field.name for field in dataclasses.fields(kind)}


def _off(platform: str | None) -> list[type]:
  """Kernels of a platform that are switched off; None for all platforms."""
  off = kernel_choice.switched_off()
  return [
    kind
    for table in kernel_choice.tables()
    for home, kinds in table.kinds.items()
    for kind in kinds
    if platform in (None, home) and kernel_choice.kernel_name(kind) in off
  ]


def _check_hop(
  findings: Findings,
  contestant: _Contestant,
  case: HopCase,
  truth: Callable[[], Results],
) -> None:
  operands = kernel_cases.hop_operands(case)
  args = kernel_cases.hop_args(case, operands)
  # The keys of one hop.
  part = lambda x, axis: jnp.split(x, case.hops, axis)[0]
  x = operands.x._replace(k=part(operands.x.k, 2), v=part(operands.x.v, 2))
  k_at = Coords(*(part(c, 1) for c in operands.k_at))
  call = (args.scores, x, args.terms, args.context._replace(k=k_at))
  name = f"{contestant.name}: {case.name}"
  declined = _declined(contestant.algorithm, call)
  if declined is not None:
    findings.add(PART, name, SKIPPED, f"declines {declined}")
    return
  program = kernel_cases.hop_program(contestant.algorithm, case)
  results = program.run(kernel_cases.OUTPUTS + kernel_cases.GRADIENTS)
  chooser = contestant.chooser
  choice = None if chooser is None else chooser.choose(*call)
  _judge(findings, contestant.name, case, case.dtype, results, truth(), choice)


def _check_decodes(
  findings: Findings,
  contestants: Sequence[_Contestant],
  make_case: Callable[[], DecodeCase],
) -> None:
  """Checks all kernels that read one kind of cache."""
  case = truth = None
  with findings.guarded(PART, "a cache"):
    case = make_case()
  if case is None:
    return
  call = (case.q, case.keys, case.args)
  for name, kernel, _, chooser in contestants:
    declined = _declined(kernel, call)
    if declined is not None:
      # Each kernel reads one kind of view, and has no line for the others.
      if not declined.startswith(f"{type(case.keys).__name__}: "):
        findings.add(
          PART, f"{name}: {case.name}", SKIPPED, f"declines {declined}"
        )
      continue
    with findings.guarded(PART, f"{name}: {case.name}"):
      program = kernel_cases.decode_program(kernel, case)
      results = program.run(kernel_cases.OUTPUTS)
      truth = kernel_cases.decode_truth(case) if truth is None else truth
      choice = None if chooser is None else chooser.choose_decode(*call)
      dtype = case.q.dtype.name
      _judge(findings, name, case, dtype, results, truth, choice)


def _check_products(
  findings: Findings,
  contestants: Sequence[_Contestant],
  table: kernel_choice.KernelTable,
) -> None:
  """Checks kernels of products in the case that precedes their first use."""
  limit = kernel_choice.ALLOWED_ERROR
  for contestant in contestants:
    name = f"{contestant.name}: a small product"
    with findings.guarded(PART, name):
      worst = table.largest_error(contestant.algorithm)
      text = f"off by {worst:.1e}, allowed {limit:g}"
      if worst > limit:
        text += (
          f"; switch it off: {kernel_choice.OFF_VARIABLE}={contestant.name}"
        )
      findings.add(
        PART,
        name,
        OK if worst <= limit else WRONG,
        text,
        figures={"tolerance": limit, "error": worst},
      )


def _declined(kernel: Any, call: tuple[Any, ...]) -> str | None:
  """Reason of a kernel that declines a call; the loops decline none."""
  try:
    return getattr(kernel, "decline", lambda *_: None)(*call)
  except Exception:
    # The call itself raises again, where it becomes a finding.
    return None


def _judge(
  findings: Findings,
  name: str,
  case: HopCase | DecodeCase,
  dtype: str,
  results: Results,
  truth: Results,
  choice: kernel_choice.KernelChoice | None,
) -> None:
  """Adds the finding of one algorithm in one case."""
  errors = {key: error(results[key], truth[key]) for key in truth}
  limit = TOLERANCES[dtype]
  worst = max(errors, key=lambda key: errors[key])
  text = f"off by {errors[worst]:.1e} ({worst}), allowed {limit:g}"
  status = OK if errors[worst] <= limit else WRONG
  if status == WRONG and name == LOOPS:
    text += "; report it with the file of --json"
  elif status == WRONG:
    text += f"; switch it off: {kernel_choice.OFF_VARIABLE}={name}"
  if (
    choice is not None
    and kernel_choice.kernel_name(type(choice.algorithm)) != name
  ):
    text += f"; AutoKernel takes {choice}"
  findings.add(
    PART,
    f"{name}: {case.name}",
    status,
    text,
    figures={"tolerance": limit, **errors},
  )


def error(
  result: Float[np.ndarray, ...], expected: Float[np.ndarray, ...]
) -> float:
  """Largest difference over the largest expected number; infinity for NaN."""
  largest = np.max(np.abs(expected))
  difference = np.max(np.abs(result - expected)) / largest
  return float(difference) if np.isfinite(difference) else float("inf")
