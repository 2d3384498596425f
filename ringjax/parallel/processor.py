"""What the host's processor can do, as far as Linux tells it."""

from __future__ import annotations

import functools

# Products of bfloat16 that are summed in float32: of x86 and of ARM.
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def multiplies_bfloat16() -> bool:
  """Whether it has instructions for products of bfloat16.

  Without them XLA converts the operands of each product, which costs more than
  it saves. A processor that nothing is known of is taken to have them.
  """
  known = instructions()
  return not known or bool(known & _BFLOAT16)


def instructions() -> frozenset[str]:
  """The names of its instruction sets, in Linux's spelling; else none."""
  return frozenset((told("flags") or told("Features")).split())


@functools.cache
def told(name: str) -> str:
  """What /proc/cpuinfo says of the first processor, "" where it is silent."""
  try:
    with open("/proc/cpuinfo") as file:
      for line in file:
        if line.startswith(name):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return ""
