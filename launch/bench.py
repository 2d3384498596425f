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

On a CPU the devices are virtual (--devices of them). A benchmark refuses flags
that it does not take.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
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

_INTS = ("tokens", "head_dims", "caches")

flags.DEFINE_integer(
  "devices", None, "Devices of the sharded contestants.", lower_bound=1
)
flags.DEFINE_string("json", None, "File for the complete result.")
flags.DEFINE_string("plot", None, "PNG to draw (needs matplotlib).")
flags.DEFINE_list("tokens", None, "Sequence lengths; layouts takes one.")
flags.DEFINE_bool(
  "quick",
  False,
  "attention: T=4096, H=64, float32, 3 rounds. inference: a few float32 rows. "
  "kvr: 512 tokens. kernels: T=1024, H=64, 3 rounds.",
)
flags.DEFINE_list("head_dims", None, "e.g. 64,128; strategies takes one.")
flags.DEFINE_list(
  "dtypes",
  None,
  f"attention, inference: of {','.join(attention.TOLERANCE)}; "
  f"kernels: of {','.join(kernels.TOLERANCE)}; strategies takes one.",
)
flags.DEFINE_list("passes", None, f"Of {','.join(attention.PASSES)}.")
flags.DEFINE_list(
  "contestants",
  None,
  f"attention: of {','.join(attention.CONTESTANTS)}; "
  f"inference: of {','.join(inference.CONTESTANTS)}; "
  f"train: of {','.join(train.CONTESTANTS)}; "
  f"strategies: of {','.join(strategies.NAMES)}, hybrid:4 and two_level:4; "
  f"kvr: of {','.join(runahead.METHODS)}; "
  f"kernels: of {','.join(kernels.CONTESTANTS)}.",
)
flags.DEFINE_integer("heads", None, "Heads, N.")
flags.DEFINE_integer("kv_heads", None, "Heads of keys, K; default as --heads.")
flags.DEFINE_integer(
  "window", None, "Keys that a query sees; default: all.", lower_bound=1
)
flags.DEFINE_string(
  "machine",
  None,
  "Predict for this machine, a name or a file of launch.plan fit; "
  "default: measured before.",
)
flags.DEFINE_bool("append", False, "Keep the rows that --json already holds.")
flags.DEFINE_integer("rounds", None, "Timed rounds.")
flags.DEFINE_list(
  "parts",
  None,
  f"inference: of {','.join(inference.PARTS)}; "
  f"train: of {','.join(train.PARTS)}; kvr: of {','.join(runahead.PARTS)}; "
  f"kernels: of {','.join((*kernels.HOPS, *kernels.RINGS))}.",
)
flags.DEFINE_string(
  "preset", None, "Shapes of the model; kvr: empty is the one that ships."
)
flags.DEFINE_integer("processes", None, "Ranks.", lower_bound=2)
flags.DEFINE_list("caches", None, "Tokens in the cache when decoding begins.")
flags.DEFINE_integer("shards", None, "Devices of the ring, which are its hops.")
flags.DEFINE_integer("q_block", None, "Queries of a tile.")
flags.DEFINE_integer("kv_block", None, "Keys of a tile.")


@dataclasses.dataclass(frozen=True)
class _Benchmark:
  """One of the benchmarks.

  Attributes:
    module: with `Settings`, `run` and, where it takes --quick, `QUICK`.
    takes: its flags; "flag:attribute" where its settings say it otherwise, and
      "flag=attribute" where they hold one value and no tuple.
    runs: flags that are arguments of `run`, "flag:argument" likewise.
  """

  module: Any
  takes: tuple[str, ...]
  runs: tuple[str, ...] = ("json", "plot", "append")

  def settings(self) -> Any:
    """What the flags say.

    Raises:
      app.UsageError: a list of one is wanted, or of numbers.
      OptionError: values that cannot be.
    """
    chosen = {}
    for entry in self.takes:
      flag, mark, attribute = _parted(entry)
      value = flags.FLAGS[flag].value
      if value is None:
        continue
      if isinstance(value, list):
        value = _ints(flag, value) if flag in _INTS else tuple(value)
      if mark == "=":
        if len(value) != 1:
          raise app.UsageError(f"--{flag}: got {len(value)} values, wanted one")
        value = value[0]
      chosen[attribute] = value
    if "heads" in chosen and "kv_heads" in self.takes:
      chosen = {"kv_heads": chosen["heads"], **chosen}
    quick = flags.FLAGS["quick"].value
    start = self.module.QUICK if quick else self.module.Settings()
    return dataclasses.replace(start, **chosen)

  def refuse(self, name: str) -> None:
    """Raises app.UsageError for a flag that has no meaning here."""
    known = [_parted(x)[0] for x in (*self.takes, *self.runs)]
    if hasattr(self.module, "QUICK"):
      known.append("quick")
    mine = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
    for flag in mine:
      if flag.present and flag.name not in known:
        raise app.UsageError(
          f"--{flag.name}: {name} does not take it; it takes "
          f"{', '.join(sorted(known))}"
        )


def _parted(entry: str) -> tuple[str, str, str]:
  """(flag, what is between, attribute) of an entry of `takes`."""
  for mark in ":=":
    flag, found, attribute = entry.partition(mark)
    if found:
      return flag, mark, attribute
  return entry, "", entry


def _ints(name: str, values: Sequence[str]) -> tuple[int, ...]:
  try:
    return tuple(int(v) for v in values)
  except ValueError:
    raise app.UsageError(f"--{name}: want ints, got {values}") from None


_BENCHMARKS: Mapping[str, _Benchmark] = {
  "strategies": _Benchmark(
    strategies,
    (
      "tokens",
      "head_dims=head_dim",
      "dtypes=dtype",
      "passes",
      "contestants:strategies",
      "heads",
      "kv_heads",
      "window",
      "rounds",
      "devices",
    ),
    ("json", "plot", "append", "machine:on"),
  ),
  "attention": _Benchmark(
    attention,
    (
      "tokens",
      "head_dims",
      "dtypes",
      "passes",
      "contestants",
      "heads",
      "rounds",
      "devices",
    ),
  ),
  "kernels": _Benchmark(
    kernels,
    (
      "parts:kinds",
      "tokens",
      "head_dims",
      "dtypes",
      "passes",
      "contestants",
      "heads",
      "kv_heads",
      "shards",
      "rounds",
    ),
    ("json", "append"),
  ),
  "layouts": _Benchmark(
    layouts,
    ("shards", "tokens=tokens", "q_block", "kv_block"),
    ("json", "plot"),
  ),
  "inference": _Benchmark(
    inference,
    (
      "parts",
      "tokens",
      "caches",
      "dtypes",
      "contestants",
      "rounds",
      "devices",
    ),
  ),
  "train": _Benchmark(
    train,
    ("parts", "tokens", "contestants", "rounds", "devices", "preset"),
    ("json", "append"),
  ),
  "kvr": _Benchmark(
    runahead,
    (
      "parts",
      "tokens",
      "contestants:methods",
      "rounds",
      "preset",
      "processes",
    ),
    ("json", "plot"),
  ),
}


def _run(name: str) -> None:
  chosen = _BENCHMARKS[name]
  chosen.refuse(name)
  settings = chosen.settings()
  if "devices" in chosen.takes:
    jax.config.update("jax_num_cpu_devices", settings.devices)
  more = {}
  for flag, _, argument in map(_parted, chosen.runs):
    more[argument] = flags.FLAGS[flag].value
  command = shlex.join(["python", "-m", "launch.bench", *sys.argv[1:]])
  chosen.module.run(settings, command=command, **more)


def main(argv: Sequence[str]) -> int:
  names = " or ".join(_BENCHMARKS)
  if len(argv) != 2 or argv[1] not in _BENCHMARKS:
    given = " ".join(argv[1:]) or "nothing"
    print(f"bench: got {given}; wanted {names}; see --help.", file=sys.stderr)
    return 2
  if not flags.FLAGS["verbosity"].present:
    # At "info" JAX lists the accelerators that it did not find.
    logging.set_verbosity(logging.WARNING)
  try:
    _run(argv[1])
  except (RingjaxError, app.UsageError) as error:
    print(f"bench: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main)
