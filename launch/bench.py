"""Benchmarks of ringjax.

  python -m launch.bench attention --quick
      Causal attention: ours, and what else one would pick, in under a minute.
  python -m launch.bench attention --json=all.json --plot=all.png
      Every dtype, head dim and length; hours on two cores. In pieces: with
      --tokens=8192 and so on, and --append.
  python -m launch.bench kernels --json=kernels.json
      What a hop costs on this device: its kernel, the loops of Blockwise and
      one plain call; a shard's whole ring too. For a GPU or a TPU; --quick
      runs anywhere.
  python -m launch.bench layouts --plot=layouts.png
      Which device computes which tile when, for three layouts.
  python -m launch.bench inference --quick
      A 100M-parameter Llama: reading, decoding and loading against
      transformers and safetensors, in about a minute.
  python -m launch.bench train --quick
      A step of training: time and memory against plain attention with all
      logits and against `ringattention`. On an accelerator, what part of its
      peak a step reaches: --parts=utilisation --preset=llama-3.2-1b
      --tokens=32768,131072 --devices=1
  python -m launch.bench strategies --json=ways.json --plot=ways.png
      Every way to move attention across devices: times, hops, bytes, scores,
      beside the times that `strategy="auto"` predicts.
  python -m launch.bench kvr --json=kvr.json --plot=kvr.png
      KV-Runahead: counted, simulated beside the paper, and measured in two
      processes with a core each against what gathers or rotates keys.

On a CPU the devices are virtual (--devices of them). Flags that name
benchmarks concern those only.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging

from launch import runahead
from ringjax.bench import (
  attention,
  inference,
  kernels,
  layouts,
  strategies,
  train,
)
from ringjax.errors import RingjaxError

_DEVICES = flags.DEFINE_integer(
  "devices", 8, "Devices of the sharded contestants.", lower_bound=1
)
_JSON = flags.DEFINE_string("json", None, "File for the complete result.")
_PLOT = flags.DEFINE_string("plot", None, "PNG to draw (needs matplotlib).")
_TOKENS = flags.DEFINE_list(
  "tokens", None, "Sequence lengths; layouts takes one."
)
_QUICK = flags.DEFINE_bool(
  "quick",
  False,
  "attention: T=4096, H=64, float32, 3 rounds. inference: a few float32 rows. "
  "kvr: 512 tokens. kernels: T=1024, H=64, 3 rounds.",
)
_HEAD_DIMS = flags.DEFINE_list(
  "head_dims", None, "attention, kernels: e.g. 64,128."
)
_DTYPES = flags.DEFINE_list(
  "dtypes",
  None,
  f"attention, inference: of {','.join(attention.TOLERANCE)}; "
  f"kernels: of {','.join(kernels.TOLERANCE)}.",
)
_PASSES = flags.DEFINE_list(
  "passes",
  None,
  f"attention, strategies, kernels: of {','.join(attention.PASSES)}.",
)
_CONTESTANTS = flags.DEFINE_list(
  "contestants",
  None,
  f"attention: of {','.join(attention.CONTESTANTS)}; "
  f"inference: of {','.join(inference.CONTESTANTS)}; "
  f"train: of {','.join(train.CONTESTANTS)}; "
  f"strategies: of {','.join(strategies.NAMES)}, hybrid:4 and two_level:4; "
  f"kvr: of {','.join(runahead.METHODS)}; "
  f"kernels: of {','.join(kernels.CONTESTANTS)}.",
)
_HEADS = flags.DEFINE_integer(
  "heads", None, "attention, strategies, kernels: heads, N."
)
_KV_HEADS = flags.DEFINE_integer(
  "kv_heads", None, "strategies, kernels: heads of keys, K; default as --heads."
)
_WINDOW = flags.DEFINE_integer(
  "window", None, "strategies: keys that a query sees.", lower_bound=1
)
_MACHINE = flags.DEFINE_string(
  "machine",
  None,
  "strategies: predict for this machine, a name or a file of launch.plan fit; "
  "default: measured before.",
)
_APPEND = flags.DEFINE_bool(
  "append",
  False,
  "attention, inference, train, strategies, kernels: keep the rows that --json "
  "already holds.",
)
_ROUNDS = flags.DEFINE_integer(
  "rounds",
  None,
  "attention, inference, train, strategies, kvr, kernels: timed rounds.",
)
_PARTS = flags.DEFINE_list(
  "parts",
  None,
  f"inference: of {','.join(inference.PARTS)}; "
  f"train: of {','.join(train.PARTS)}; kvr: of {','.join(runahead.PARTS)}; "
  f"kernels: of {','.join((*kernels.HOPS, *kernels.RINGS))}.",
)
_PRESET = flags.DEFINE_string(
  "preset",
  runahead.Settings.preset,
  "train, kvr: shapes of the model; kvr: empty is the one that ships.",
)
_PROCESSES = flags.DEFINE_integer(
  "processes", runahead.Settings.processes, "kvr: ranks.", lower_bound=2
)
_CACHES = flags.DEFINE_list(
  "caches", None, "inference: tokens in the cache when decoding begins."
)
_SHARDS = flags.DEFINE_integer(
  "shards", 8, "layouts: devices of the ring; kernels: its hops."
)
_Q_BLOCK = flags.DEFINE_integer("q_block", None, "layouts: queries of a tile.")
_KV_BLOCK = flags.DEFINE_integer("kv_block", None, "layouts: keys of a tile.")


def _ints(name: str, values: Sequence[str] | None) -> tuple[int, ...] | None:
  if values is None:
    return None
  try:
    return tuple(int(v) for v in values)
  except ValueError:
    raise app.UsageError(f"--{name}: want ints, got {values}") from None


def _words(values: Sequence[str] | None) -> tuple[str, ...] | None:
  return None if values is None else tuple(values)


def _attention(files: dict[str, Any]) -> None:
  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  chosen: dict[str, Any] = {
    "tokens": _ints("tokens", _TOKENS.value),
    "head_dims": _ints("head_dims", _HEAD_DIMS.value),
    "dtypes": _words(_DTYPES.value),
    "passes": _words(_PASSES.value),
    "contestants": _words(_CONTESTANTS.value),
    "heads": _HEADS.value,
    "rounds": _ROUNDS.value,
    "devices": _DEVICES.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  start = attention.QUICK if _QUICK.value else attention.Settings()
  settings = dataclasses.replace(start, **chosen)
  attention.run(settings, append=_APPEND.value, **files)


def _inference(files: dict[str, Any]) -> None:
  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  chosen: dict[str, Any] = {
    "parts": _words(_PARTS.value),
    "tokens": _ints("tokens", _TOKENS.value),
    "caches": _ints("caches", _CACHES.value),
    "dtypes": _words(_DTYPES.value),
    "contestants": _words(_CONTESTANTS.value),
    "rounds": _ROUNDS.value,
    "devices": _DEVICES.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  start = inference.QUICK if _QUICK.value else inference.Settings()
  settings = dataclasses.replace(start, **chosen)
  inference.run(settings, append=_APPEND.value, **files)


def _layouts(files: dict[str, Any]) -> None:
  tokens = _ints("tokens", _TOKENS.value)
  if tokens is not None and len(tokens) != 1:
    raise app.UsageError("--tokens: layouts takes one length")
  settings = layouts.Settings(
    shards=_SHARDS.value,
    tokens=tokens[0] if tokens else layouts.Settings.tokens,
    q_block=_Q_BLOCK.value,
    kv_block=_KV_BLOCK.value,
  )
  layouts.run(settings, **files)


def _kernels(files: dict[str, Any]) -> None:
  if files.pop("plot") is not None:
    raise app.UsageError("--plot: kernels draws nothing")
  chosen: dict[str, Any] = {
    "kinds": _words(_PARTS.value),
    "tokens": _ints("tokens", _TOKENS.value),
    "head_dims": _ints("head_dims", _HEAD_DIMS.value),
    "dtypes": _words(_DTYPES.value),
    "passes": _words(_PASSES.value),
    "contestants": _words(_CONTESTANTS.value),
    "heads": _HEADS.value,
    "kv_heads": _KV_HEADS.value or _HEADS.value,
    "shards": _SHARDS.value if flags.FLAGS["shards"].present else None,
    "rounds": _ROUNDS.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  start = kernels.QUICK if _QUICK.value else kernels.Settings()
  settings = dataclasses.replace(start, **chosen)
  kernels.run(settings, append=_APPEND.value, **files)


def _train(files: dict[str, Any]) -> None:
  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  if files.pop("plot") is not None:
    raise app.UsageError("--plot: train draws nothing")
  chosen: dict[str, Any] = {
    "parts": _words(_PARTS.value),
    "tokens": _ints("tokens", _TOKENS.value),
    "contestants": _words(_CONTESTANTS.value),
    "rounds": _ROUNDS.value,
    "devices": _DEVICES.value,
    "preset": _PRESET.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  settings = dataclasses.replace(
    train.QUICK if _QUICK.value else train.Settings(), **chosen
  )
  train.run(settings, append=_APPEND.value, **files)


def _kvr(files: dict[str, Any]) -> None:
  chosen: dict[str, Any] = {
    "parts": _words(_PARTS.value),
    "tokens": _ints("tokens", _TOKENS.value),
    "methods": _words(_CONTESTANTS.value),
    "rounds": _ROUNDS.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  settings = dataclasses.replace(
    runahead.QUICK if _QUICK.value else runahead.Settings(),
    preset=_PRESET.value,
    processes=_PROCESSES.value,
    **chosen,
  )
  runahead.run(settings, **files)


def _strategies(files: dict[str, Any]) -> None:
  jax.config.update("jax_num_cpu_devices", _DEVICES.value)
  head_dims = _ints("head_dims", _HEAD_DIMS.value)
  for name, given in (("head_dims", head_dims), ("dtypes", _DTYPES.value)):
    if given is not None and len(given) != 1:
      raise app.UsageError(f"--{name}: strategies takes one")
  chosen: dict[str, Any] = {
    "tokens": _ints("tokens", _TOKENS.value),
    "head_dim": head_dims and head_dims[0],
    "dtype": _DTYPES.value and _DTYPES.value[0],
    "passes": _words(_PASSES.value),
    "strategies": _words(_CONTESTANTS.value),
    "heads": _HEADS.value,
    "kv_heads": _KV_HEADS.value or _HEADS.value,
    "window": _WINDOW.value,
    "rounds": _ROUNDS.value,
    "devices": _DEVICES.value,
  }
  chosen = {name: value for name, value in chosen.items() if value is not None}
  start = strategies.QUICK if _QUICK.value else strategies.Settings()
  settings = dataclasses.replace(start, **chosen)
  strategies.run(settings, on=_MACHINE.value, append=_APPEND.value, **files)


_COMMANDS = {
  "strategies": _strategies,
  "attention": _attention,
  "kernels": _kernels,
  "layouts": _layouts,
  "inference": _inference,
  "train": _train,
  "kvr": _kvr,
}


def main(argv: Sequence[str]) -> int:
  names = " or ".join(_COMMANDS)
  if len(argv) != 2 or argv[1] not in _COMMANDS:
    given = " ".join(argv[1:]) or "nothing"
    print(f"bench: got {given}; wanted {names}; see --help.", file=sys.stderr)
    return 2
  if not flags.FLAGS["verbosity"].present:
    # At "info" JAX lists the accelerators that it did not find.
    logging.set_verbosity(logging.WARNING)
  files = {
    "command": shlex.join(["python", "-m", "launch.bench", *sys.argv[1:]]),
    "json": _JSON.value,
    "plot": _PLOT.value,
  }
  try:
    _COMMANDS[argv[1]](files)
  except (RingjaxError, app.UsageError) as error:
    print(f"bench: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main)
