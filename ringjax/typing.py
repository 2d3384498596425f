"""The letters that ringjax uses for axes, in annotations and in einsums.

  B batch            T queries         S keys
  N query heads      K kv heads        G = N // K query heads of one kv head
  H head dim (queries and keys)        J head dim of the values (H but in MLA)
  D embed            F feedforward     V vocabulary        L layers
  R ring size (shards of the sequence)

Inside `shard_map` ("Per shard:" in a docstring) T and S are local lengths.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Values = Float[Array, "B S K J"]
Attended = Float[Array, "B T N J"]
LogSumExp = Float[Array, "B T N"]

__all__ = [
  "Array",
  "Attended",
  "Bool",
  "Float",
  "Int",
  "Keys",
  "LogSumExp",
  "Queries",
  "Values",
]
