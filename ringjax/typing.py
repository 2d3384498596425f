"""Letters for axes in annotations and in einsums, and common array types.

  B batch            T queries         S keys
  N query heads      K kv heads        G = N // K query heads of one kv head
  H head dim (queries and keys)        J head dim of the values (H but in MLA)
  D embed            F feedforward     V vocabulary        L layers
  R ring size (shards of the sequence)
  C channels         E I O experts, inputs and outputs of a map
  M N rows and columns of a stored map
  P pages, or contexts that are read apart, or probe heads of an index
Small letters and `_` are sizes that only one signature knows.

Inside `shard_map` ("Per shard:" in a docstring) T and S are local lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Values = Float[Array, "B S K J"]
Attended = Float[Array, "B T N J"]
LogSumExp = Float[Array, "B T N"]
# A field of a tree that may also hold shapes, or NumPy arrays before they are
# copied to devices: to type checkers an array, at run time any of these.
if TYPE_CHECKING:
  from jaxtyping import Array as ArrayLeaf
else:
  ArrayLeaf = Array | np.ndarray | jax.ShapeDtypeStruct


def leaf(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> ArrayLeaf:
  """Return `x` as a leaf of a tree whose fields are arrays, see `ArrayLeaf`."""
  return x  # pyrefly: ignore[bad-return]


# An integer that a program may compute, such as the index of a slot or a tile.
Index = Int[Array, ""] | int | np.integer
# Numbers of tokens of a context: one for all rows, or one per row.
Lengths = Index | Int[Array | np.ndarray, " ..."]

__all__ = [
  "Array",
  "ArrayLeaf",
  "Attended",
  "Bool",
  "Float",
  "Index",
  "Int",
  "Keys",
  "Lengths",
  "LogSumExp",
  "Queries",
  "Values",
  "leaf",
]
