"""Grids of a traced program's Pallas kernels: how many steps a call runs.

A kernel's machine code is a loop over the steps of its grid. Grids are no part
of a compiled program's text; the traced program has them. A bound that is
computed while the program runs is taken from a list of steps among the
kernel's scalars, if there is one: at most its length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

# Fields of a kernel's equation and of its grid are those of JAX's own tracer.
_KERNEL = "pallas_call"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelGrid:
  """Grid of a Pallas kernel.

  Attributes:
    name: Name of the kernel.
    outputs: Sizes of each output.
    steps: Number of steps of a call: the product of the stated bounds.
    listed: Length of the list of steps that replaces a computed bound; None if
      all bounds are stated.
    open: Whether a bound is computed and no list limits it.
  """

  name: str
  outputs: tuple[tuple[int, ...], ...]
  steps: int
  listed: int | None = None
  open: bool = False

  @property
  def most_steps(self) -> int:
    """Most steps of a call, if the grid is not open."""
    return self.steps * (self.listed or 1)


def kernel_grids(jaxpr: ClosedJaxpr) -> list[KernelGrid]:
  """List the grids of all kernels of a traced program, each once.

  Args:
    jaxpr: The traced program, `jitted.trace(...).jaxpr`.
  """
  grids = {_grid(equation): None for equation in _kernels(jaxpr)}
  return list(grids)


def from_records(records: Sequence[dict[str, Any]]) -> tuple[KernelGrid, ...]:
  """Grids from dicts as `dataclasses.asdict` makes them, also after JSON."""
  return tuple(
    KernelGrid(
      name=fields["name"],
      outputs=tuple(map(tuple, fields["outputs"])),
      steps=fields["steps"],
      listed=fields["listed"],
      open=fields["open"],
    )
    for fields in records
  )


def _kernels(value: Any) -> Iterator[Any]:
  """Yield the kernels' equations of a traced program and its parts."""
  jaxpr = getattr(value, "jaxpr", value)
  for equation in getattr(jaxpr, "eqns", ()):
    if equation.primitive.name == _KERNEL:
      yield equation
      continue
    for parameter in equation.params.values():
      parts = parameter if isinstance(parameter, tuple | list) else (parameter,)
      for part in parts:
        yield from _kernels(part)


def _grid(equation: Any) -> KernelGrid:
  parameters, mapping = equation.params, equation.params["grid_mapping"]
  # A kernel without a name has that of its function where JAX keeps it.
  source = parameters.get("name_and_src_info")
  name = parameters.get("name") or getattr(source, "name", None)
  stated = [bound for bound in mapping.grid if isinstance(bound, int)]
  computed = len(mapping.grid) - len(stated)
  first = mapping.num_dynamic_grid_bounds
  scalars = equation.invars[first : first + mapping.num_index_operands]
  lists = [
    scalar.aval.shape[0]
    for scalar in scalars
    if len(scalar.aval.shape) == 1 and scalar.aval.dtype.name == "int32"
  ]
  listed = max(lists) if computed == 1 and lists else None
  return KernelGrid(
    name=name or "",
    outputs=tuple(tuple(out.aval.shape) for out in equation.outvars),
    steps=math.prod(stated),
    listed=listed,
    open=bool(computed) and listed is None,
  )
