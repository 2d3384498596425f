"""The former name of `local_hops`."""

from ringjax.ops.attention.kernels.local_hops import LocalHops as InTurn

__all__ = ["InTurn"]
