"""The letters that ringjax uses for axes, in annotations and in einsums.

  B batch            T queries         S keys
  N query heads      K kv heads        G = N // K query heads of one kv head
  H head dim (queries and keys)        J head dim of the values (H but in MLA)
  D embed            F feedforward     V vocabulary        L layers
  R ring size (shards of the sequence)

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
# A field of a tree that is also made of shapes, or of NumPy's arrays on their
# way to devices: an array, for which these may stand at run time.
if TYPE_CHECKING:
  from jaxtyping import Array as ArrayLeaf
else:
  ArrayLeaf = Array | np.ndarray | jax.ShapeDtypeStruct
# A number that a program may compute, such as a slot or a tile's number.
Index = Int[Array, ""] | int | np.integer
# Tokens of a context: of all rows, or of each.
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
]
