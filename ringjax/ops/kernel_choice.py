"""Choose the platform's first kernel that serves a call.

Guarantees: a kernel that fails its check on this machine is declined with one
line in the log, and so is one that the environment variable RINGJAX_OFF names
("flash_tpu,decode_pool_tpu"), which is read when a program is traced. A kernel
is named by its file.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.parallel import collectives

_log = logging.getLogger(__name__)

# Environment variable with the names of kernels that are not chosen.
OFF_VARIABLE = "RINGJAX_OFF"
# Tolerance for bfloat16 operands, relative to the largest number.
ALLOWED_ERROR = 0.02
# Modules that register kernels, so that the variable's names can be checked.
_MODULES = (
  "ringjax.ops.attention.kernels.auto_kernel",
  "ringjax.ops.block_product_tpu",
  "ringjax.ops.flat_product_tpu",
  "ringjax.ops.experts.grouped_product_tpu",
)


class KernelTable(NamedTuple):
  """Kernels that serve one kind of call.

  Fields:
    kinds: Classes of kernels of each platform, in order of preference.
    largest_error: Function of a kernel that computes a few small cases on the
      default device, and returns its largest relative error.
  """

  kinds: dict[str, tuple[type, ...]]
  largest_error: Callable[[Any], float]


_TABLES: list[KernelTable] = []


def register(
  kinds: dict[str, tuple[type, ...]], largest_error: Callable[[Any], float]
) -> None:
  """Add the kernels of one kind of call, see `KernelTable`."""
  _TABLES.append(KernelTable(kinds, largest_error))


def tables() -> tuple[KernelTable, ...]:
  """All kernels, by the kind of call that they serve."""
  for module in _MODULES:
    importlib.import_module(module)
  return tuple(_TABLES)


class KernelChoice(NamedTuple):
  """An algorithm, and the reasons of the kernels that declined."""

  algorithm: Any
  declined: tuple[tuple[str, str], ...]

  def __str__(self) -> str:
    reasons = "".join(f"; not {n}: {reason}" for n, reason in self.declined)
    return f"{type(self.algorithm).__name__}{reasons}"


def first_serving(
  kernels: Sequence[Any], decline: Callable[[Any], str | None], fallback: Any
) -> KernelChoice:
  """Choose the first kernel that serves, else `fallback`.

  Args:
    kernels: Instances of registered kernels, in order of preference.
    decline: Function of a kernel that returns its reason not to serve the call.
    fallback: Algorithm that serves every call.

  Raises:
    OptionError: If RINGJAX_OFF names no kernel.
  """
  # Refuse a misspelt name where a platform has no kernels, too.
  switched_off()
  declined = []
  axis = collectives.partitioned()
  for kernel in kernels:
    reason = off_reason(type(kernel)) or decline(kernel)
    if reason is None and axis is not None:
      reason = f"XLA cuts no kernel along {axis}"
    reason = reason or _fault(type(kernel))
    if reason is None:
      return KernelChoice(kernel, tuple(declined))
    declined.append((type(kernel).__name__, reason))
  return KernelChoice(fallback, tuple(declined))


def check_serves(kernel: Any, *call: Any) -> None:
  """Check that a kernel that was passed explicitly serves the call.

  Args:
    kernel: Kernel to ask.
    *call: Arguments of its `decline`.

  Raises:
    OptionError: If it declines the call.
  """
  reason = kernel.decline(*call)
  if reason is None:
    return
  raise OptionError(
    "local",
    f"{type(kernel).__name__}() for {reason}",
    "a call that this kernel serves",
    "pass local=AutoKernel(), which takes what serves each call",
  )


def kernel_name(kind: type) -> str:
  """Name of a kernel in RINGJAX_OFF, which is that of its file: "flash_tpu"."""
  return kind.__module__.rpartition(".")[2]


def switched_off() -> frozenset[str]:
  """Names of the kernels that RINGJAX_OFF switches off.

  Raises:
    OptionError: If it names no kernel.
  """
  return _parse_off(os.environ.get(OFF_VARIABLE, ""))


@functools.cache
def _parse_off(text: str) -> frozenset[str]:
  words = [word.strip() for word in text.split(",") if word.strip()]
  if not words:
    return frozenset()
  kinds = [row for table in tables() for row in table.kinds.values()]
  all_names = sorted({kernel_name(kind) for row in kinds for kind in row})
  names = frozenset(
    one_of(
      OFF_VARIABLE, word, all_names, remedy="pass names with commas between"
    )
    for word in words
  )
  # Cached, so once in a process.
  _log.warning(
    "%s switches off %s; XLA's loops are used",
    OFF_VARIABLE,
    ", ".join(sorted(names)),
  )
  return names


def off_reason(kind: type) -> str | None:
  """Reason not to use a kernel that RINGJAX_OFF names, or None."""
  if kernel_name(kind) in switched_off():
    return f"switched off by {OFF_VARIABLE}"
  return None


@functools.cache
def _fault(kind: type) -> str | None:
  """Check a kernel on this machine; return what is wrong, or None.

  It runs once per process, mostly while another function is traced: hence in a
  thread, which has no part in that trace. Without a device of the platform, as
  in compiling ahead of time, nothing is checked.
  """
  platform, largest_error = next(
    (platform, table.largest_error)
    for table in _TABLES
    for platform, kinds in table.kinds.items()
    if kind in kinds
  )
  try:
    device = jax.local_devices(backend=platform)[0]
  except RuntimeError:
    return None

  def error_on_device() -> float:
    with jax.default_device(device):
      return largest_error(kind())

  try:
    with futures.ThreadPoolExecutor(1) as thread:
      error = thread.submit(error_on_device).result()
  except Exception as e:
    reason = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
  else:
    if error <= ALLOWED_ERROR:
      return None
    reason = f"off by {error:.2g} in a small case"
  _log.warning(
    "%s does not work on %s (%s); XLA's loops are used",
    kind.__name__,
    device.device_kind,
    reason,
  )
  return reason


def relative_error(
  results: Sequence[Float[Array, " ..."]],
  references: Sequence[Float[Array, " ..."]],
) -> float:
  """Largest error, relative to the largest number; infinity for NaN."""
  float32 = lambda a: a.astype(jnp.float32)
  errors = [
    jnp.max(jnp.abs(float32(a) - float32(b))) / jnp.max(jnp.abs(float32(b)))
    for a, b in zip(results, references, strict=True)
  ]
  worst = float(jnp.max(jnp.stack(errors)))
  return worst if worst == worst else float("inf")
