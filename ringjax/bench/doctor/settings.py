"""Advice on settings, by the machine and by what is set already."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import jax

from ringjax.bench.doctor.findings import OK, SLOW, Findings
from ringjax.parallel import processor

PART = "settings"
# Modules of extras that add a feature.
_EXTRAS = {
  "gguf": "gguf",
  "serve": "uvicorn",
  "structured": "llguidance",
  "plot": "matplotlib",
}
# Settings of JAX that make programs slow, and what is right for speed.
_SLOW = {
  "jax_disable_jit": "every operation is a program",
  "jax_debug_nans": "every result is looked at",
  "jax_enable_x64": "Python's numbers become 64 bits wide",
  "jax_disable_most_optimizations": "programs are compiled quickly, not well",
}


def check(
  findings: Findings,
  device: jax.Device,
  variables: Mapping[str, str] = os.environ,
) -> None:
  """Adds a finding for each setting.

  Args:
    findings: Findings to add to.
    device: First device of this process.
    variables: Environment variables.
  """
  findings.add(PART, "dtype", OK, _dtype(device.platform))
  with findings.guarded(PART, "compilation cache"):
    _check_cache(findings)
  for name, why in _SLOW.items():
    if getattr(jax.config, name, False):
      findings.add(
        PART, name, SLOW, f"on: {why}; unset {name.upper()}", common=True
      )
  if device.platform == "gpu":
    findings.add(PART, "memory", OK, _gpu_memory(variables))
  if device.platform == "cpu" and jax.local_device_count() > 1:
    _check_threads(findings, variables)
  missing = [
    extra
    for extra, module in _EXTRAS.items()
    if importlib.util.find_spec(module) is None
  ]
  text = (
    f"not installed: pip install 'ringjax[{','.join(missing)}]'"
    if missing
    else "all installed"
  )
  findings.add(PART, "extras", OK, text)


def _dtype(platform: str) -> str:
  if platform != "cpu":
    return "bfloat16: weights, caches and products"
  if processor.multiplies_bfloat16():
    return "float32 or bfloat16: this processor multiplies both"
  return "float32: this processor has no products of bfloat16"


def _check_cache(findings: Findings) -> None:
  config: Any = jax.config
  folder = config.jax_compilation_cache_dir
  if folder and config.jax_enable_compilation_cache:
    findings.add(PART, "compilation cache", OK, str(folder))
    return
  findings.add(
    PART,
    "compilation cache",
    SLOW,
    "off: set JAX_COMPILATION_CACHE_DIR to a folder",
  )


def _gpu_memory(variables: Mapping[str, str]) -> str:
  if variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in (
    "false",
    "0",
  ):
    return "allocated as it is needed"
  old_name = variables.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
  share = variables.get("XLA_CLIENT_MEM_FRACTION", old_name)
  return (
    f"{share} of the GPU's is allocated at the start; if no other program "
    "needs it, set XLA_CLIENT_MEM_FRACTION=0.95"
  )


def _check_threads(findings: Findings, variables: Mapping[str, str]) -> None:
  """XLA's CPU client aborts where collectives wait for threads."""
  wanted = 2 * jax.local_device_count()
  threads = variables.get("NPROC", "")
  enough = threads.isdecimal() and int(threads) >= wanted
  text = f"NPROC={threads}"
  if not enough:
    text = (
      f"NPROC is {threads or 'not set'}; set NPROC={wanted} before JAX starts"
    )
  findings.add(PART, "threads", OK if enough else SLOW, text)
