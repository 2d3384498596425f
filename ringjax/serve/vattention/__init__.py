"""vAttention: rows that are contiguous in address space."""
