"""What several test files need."""

from __future__ import annotations

from typing import Literal

import jax
from jax.sharding import AxisType, Mesh

_KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def make_mesh(n: int, kind: Literal["auto", "explicit"]) -> Mesh:
  """The first `n` devices in a row, as the axis "seq".

  Built by JAX alone, so that a test of ringjax's own meshes has something to
  be compared with.
  """
  return jax.make_mesh(
    (n,), ("seq",), axis_types=(_KINDS[kind],), devices=jax.devices()[:n]
  )
