"""The sub-command cache of launch.plan: bytes of a model's cache by kind."""

from __future__ import annotations

from typing import Any, TextIO

from absl import flags

from launch import aot, console, strategies
from ringjax.checks import positive_int
from ringjax.kv import KINDS
from ringjax.kv.base import bytes_each


def sizes(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the bytes of all layers' keys and values, for each kind of cache."""
  del stderr
  # It brings the models and flax; most sub-commands do without.
  from ringjax.models.checkpoint import abstract

  tokens = strategies.ints("tokens", values.tokens) or (131_072,)
  for count in tokens:
    positive_int("--tokens", count)
  rows = []
  for name in values.model or ("gemma-3-27b",):
    model = abstract(aot.config_of(name), dtype=values.dtype or "bfloat16")
    for count in tokens:
      for kind in KINDS:
        cache = model.init_cache_spec(values.batch, count, kind=kind)
        rows.append(_row(name, count, kind, cache))
  lines = strategies.markdown(
    ("model", "kind"),
    ("tokens", "cache", "all tokens", "windowed"),
    [
      (
        row["model"],
        row["kind"],
        f"{row['tokens']:,}",
        *(console.nbytes(row[key]) for key in ("bytes", "all", "windowed")),
      )
      for row in rows
    ],
  )
  strategies.put(values, stdout, {"rows": rows}, lines)


def _row(name: str, tokens: int, kind: str, cache: Any) -> dict[str, Any]:
  """Bytes of a cache, and of its layers that keep all tokens or a window."""
  parts = {"all": 0, "windowed": 0}
  rings = cache.ring_of or (None,) * len(cache.slots)
  for ring, slots in zip(rings, cache.slots, strict=True):
    parts["all" if ring is None else "windowed"] += bytes_each(slots)
  total = bytes_each(cache)
  return {
    "model": name, "kind": kind, "tokens": tokens, "bytes": total, **parts
  }  # fmt: skip
