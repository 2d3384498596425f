"""Instruction sets of the host's processor, as Linux lists them."""

from __future__ import annotations

import functools

# Instruction sets with bfloat16 products summed in float32, of x86 and of ARM.
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def multiplies_bfloat16() -> bool:
  """Whether the processor has instructions for products of bfloat16.

  Without them XLA converts the operands of each product, which costs more than
  it saves. A processor of unknown instruction sets counts as having them.
  """
  names = instructions()
  return not names or bool(names & _BFLOAT16)


def instructions() -> frozenset[str]:
  """Names of the instruction sets, in Linux's spelling; empty if unknown."""
  return frozenset((told("flags") or told("Features")).split())


@functools.cache
def told(name: str) -> str:
  """Read a field of the first processor in /proc/cpuinfo; "" if missing."""
  try:
    with open("/proc/cpuinfo") as file:
      for line in file:
        if line.startswith(name):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return ""
