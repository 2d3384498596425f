"""The sub-command cache of launch.plan: bytes of a model's cache by kind."""

from __future__ import annotations

from typing import Any, TextIO

from absl import flags

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.kv import KINDS, KVCache, kind_text
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_report import report
from ringjax.kv.cache_specs import storage_of
from ringjax.kv.eviction.prompt_spec import prompt_spec
from ringjax.parallel import chips

from ..shared import console
from . import aot, strategies


def sizes(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  """Prints the bytes of all layers' keys and values, for each kind of cache."""
  del stderr
  # It imports the models and flax, which most sub-commands don't need.
  from ringjax.models.checkpoint import abstract

  tokens = strategies.ints("tokens", values.tokens) or (131_072,)
  for count in tokens:
    positive_int("--tokens", count)
  if values.cache is not None:
    _explain_kind(values, tokens, stdout)
    return
  if values.chip is not None:
    raise OptionError(
      "--chip",
      f"{values.chip}, without a kind of cache",
      "it with --cache",
      "pass --cache=hadamard3, for instance, or leave --chip out",
    )
  rows = []
  for name in values.model or ("gemma-3-27b",):
    model = abstract(aot.config_of(name), dtype=values.dtype or "bfloat16")
    for count in tokens:
      # The tokens that an evicting policy keeps depend on the text.
      for kind in (
        name for name, preset_kind in KINDS.items() if not preset_kind.evicting
      ):
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


def _explain_kind(
  values: flags.FlagValues, tokens: tuple[int, ...], stdout: TextIO
) -> None:
  """Prints and explains the bytes of one kind of cache, part by part."""
  from ringjax.models.checkpoint import abstract

  kind = kind_text.parse(values.cache, "--cache").without_weights()
  machine = chips.machine(_CHIPS.get(values.chip, values.chip or "tpu-v5e"))
  rows, lines = [], []
  for name in values.model or ("gemma-3-27b",):
    model = abstract(aot.config_of(name), dtype=values.dtype or "bfloat16")
    weights = bytes_each(model)
    platform = {"platform": machine.chip.platform}
    for count in tokens:
      spec_args = (model.kinds, values.batch, count, model.dtype)
      dense = bytes_each(
        KVCache.spec(*spec_args, kind=KINDS["dense"], **platform)
      )
      extra: dict[str, Any] = {}
      if kind.evicting:
        prompt = prompt_spec(*spec_args, kind=kind, **platform)
        cache_report = report(
          prompt.cache, machine, None, weights, held=prompt.held
        )
        extra["reading"] = bytes_each(prompt.reading) + cache_report.nbytes
      else:
        spec = storage_of(kind).spec(*spec_args, kind=kind, **platform)
        cache_report = spec.explain(machine, weights=weights)
      share = cache_report.nbytes / dense
      rows.append(
        {"model": name, **cache_report.record(), "share": share, **extra}
      )
      lines += [
        f"{name}, of {console.nbytes(weights)} of weights",
        f"{cache_report}",
        f"{share:.3f} of a dense cache's bytes",
      ]
      if extra:
        lines.append(
          f"after a prompt of {count:,} tokens; where it is read at once, "
          f"{console.nbytes(extra['reading'])} while it is evicted, "
          f"{extra['reading'] / dense:.3f} of a dense cache's"
        )
  strategies.put(values, stdout, {"rows": rows}, lines)


# Names of TPUs by the compiler's names.
_CHIPS = {core.topology: name for name, core in chips.CORES.items()}


def _row(name: str, tokens: int, kind: str, cache: Any) -> dict[str, Any]:
  """Row of a cache's bytes: total, layers with all tokens, windowed layers."""
  parts = {"all": 0, "windowed": 0}
  rings = cache.ring_of or (None,) * len(cache.slots)
  for ring, slots in zip(rings, cache.slots, strict=True):
    parts["all" if ring is None else "windowed"] += bytes_each(slots)
  total = bytes_each(cache)
  return {
    "model": name, "kind": kind, "tokens": tokens, "bytes": total, **parts
  }  # fmt: skip
