"""Benchmarks of ringjax.

  python -m launch.bench attention --quick
      Causal attention: ours and its alternatives, in under a minute.
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
  python -m launch.bench decode --quick
      The attention of a decode step by kind of cache, next to the dense one;
      and of rows that share a prefix, read row by row and once for all.
  python -m launch.bench train --quick
      A step of training: time and memory against plain attention with all
      logits and against `ringattention`. On an accelerator, the part of its
      peak that a step reaches: --parts=utilisation --preset=llama-3.2-1b
      --tokens=32768,131072 --devices=1
  python -m launch.bench strategies --json=all.json --plot=all.png
      All strategies of attention across devices: times, hops, bytes, scores,
      next to the times that `strategy="auto"` predicts.
  python -m launch.bench kvr --json=kvr.json --plot=kvr.png
      KV-Runahead: counted, simulated next to the paper, and measured in two
      processes with a core each against strategies that gather or rotate keys.
  python -m launch.bench serve --trace=FILE --engine=simulated --rows=64
      A trace of requests (Azure's csv, Mooncake's jsonl, or random ones with
      --rate) against an engine in real time, or against its simulator.
  python -m launch.bench serve --compare=sequential
      16 requests at once, and one after the other: the ratio of the medians.
  python -m launch.bench serve --compare=simulated --requests=200 --rounds=3
      A trace live, next to the predictions of the simulators of an engine and
      of a cluster, calibrated by turns on other requests.
  python -m launch.bench serve --compare=plain --speculate=lookup
      An engine that checks drafts next to one that does not.
  python -m launch.bench serve --compare=generate --rows=8
      Lone requests to an engine with room for more, next to generate.
  python -m launch.bench serve --compare=transformers --model=llama-100m
      The same requests with transformers' continuous batching.
  python -m launch.bench store --trace=FILE --capacity=3000000
      Which blocks of a trace of prompts (in Mooncake's format) the policies of
      a store would have hit, with a capacity in tokens; and the time of the
      prefix tree's look-ups.
  python -m launch.bench speculate --quick
      Plain decoding and drafters, in turn, by kind of task: tokens a second
      and for each call of the model, in about two minutes.
  python -m launch.bench speculate --context=8192 --devices=8
      The same after a long document over a sharded sequence, which the answer
      quotes; --compare=transformers: with its lookup and assisted generation.
  python -m launch.bench rows --json=rows.json
      Memory of an engine's rows in pages and in contiguous rows that grow on
      demand: wasted, resident and mapped.
  python -m launch.bench stream
      A prompt that a prefill instance sends to a decode instance: the pages
      left to move at its end if they leave by chunks, and by layers.
  python -m launch.bench pull
      Pages on a device that another process's reader pulls: as bytes over a
      socket, and by JAX's transfer server.
  python -m launch.bench offload --folder=DIR --peer=PYTHON
      A model of 3 GiB whose layers stream from disk, made in that folder: one
      prompt at a time and a block of 32, next to accelerate in another Python.

On a CPU the devices are virtual (--devices of them). A benchmark refuses flags
that it does not take.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

# Another project's folder of this name has no such file.
if importlib.util.find_spec("benchmarks") is None or (
  importlib.util.find_spec("benchmarks.attention") is None
):
  print(
    "The benchmarks are not part of the installed package; run "
    "python -m launch.bench in a checkout of ringjax.",
    file=sys.stderr,
  )
  sys.exit(2)

from benchmarks.attention import (
  attention,
  decode_steps,
  kernels,
  layouts,
  strategies,
)
from benchmarks.model import inference, offloading, train
from benchmarks.serving import (
  page_streams,
  page_transfers,
  row_memory,
  serving,
  store_policies,
)
from benchmarks.shared.harness import BenchmarkSettings, option
from benchmarks.speculation import speculating
from ringjax.errors import RingjaxError
from ringjax.parallel.mesh import make_cpu_devices

from .planning import runahead
from .shared.flag_helpers import FlagHelper


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KVRSettings(runahead.Settings, BenchmarkSettings):
  """Settings of `runahead`, with the flags that set them."""

  parts: tuple[str, ...] = option(runahead.PARTS, runahead.PARTS)
  tokens: tuple[int, ...] = option((2048,))
  methods: tuple[str, ...] = option(
    runahead.METHODS, runahead.METHODS, flag="contestants"
  )
  processes: int = option(2)
  preset: str = option("llama-100m", ())
  model: str = option("", ())
  rounds: int = option(5)


class _KVRBenchmark:
  """Benchmark `runahead`: a chain of processes prefills a prompt."""

  name = "kvr"
  options = _KVRSettings
  quick = _KVRSettings(**vars(runahead.QUICK))
  files = ("json", "plot")
  run = staticmethod(runahead.run)


_BENCHMARKS: dict[str, Any] = {
  benchmark.name: benchmark
  for benchmark in (
    strategies.StrategyBenchmark,
    attention.AttentionBenchmark,
    kernels.KernelBenchmark,
    layouts.LayoutBenchmark,
    inference.InferenceBenchmark,
    decode_steps.DecodeBenchmark,
    train.TrainBenchmark,
    _KVRBenchmark,
    serving.ServeBenchmark,
    speculating.SpeculationBenchmark,
    store_policies.StoreBenchmark,
    row_memory.RowMemoryBenchmark,
    offloading.OffloadBenchmark,
    page_streams.StreamBenchmark,
    page_transfers.PullBenchmark,
  )
}


# Help of each flag; `_define` adds the choices of its benchmarks.
_OPTIONS = {
  "devices": "Devices of the sharded contestants.",
  "tokens": "Sequence lengths; layouts takes one.",
  "head_dims": "E.g. 64,128; strategies takes one.",
  "dtypes": "Of operands or weights; strategies takes one.",
  "passes": "Forward, or forward and backward.",
  "contestants": f"strategies: of {','.join(strategies.NAMES)}, hybrid:4 and "
  "two_level:4.",
  "heads": "Heads, N.",
  "kv_heads": "Heads of keys, K; default as --heads.",
  "window": "Keys that a query sees; default: all.",
  "machine": "Predict for this machine, a name or a file of launch.plan fit; "
  "default: measured before.",
  "folder": "Of the model that streams from disk; made if there is none.",
  "scratch": "Folder for what another library writes.",
  "pages": "Pages of 512 KiB that are pulled.",
  "stream": "Tokens of a prompt after which pages of it leave.",
  "peer": "A Python that has accelerate; default: this one.",
  "model_layers": "Of the model that is made, 69 MB each.",
  "memory": "MiB that the process may have at most.",
  "rounds": "Timed rounds.",
  "parts": "What is measured.",
  "preset": "Shapes of the model; kvr: empty is the one that ships.",
  "processes": "Ranks, 2 or more.",
  "caches": "Tokens in the cache when decoding begins.",
  "shards": "Devices of the ring, which are its hops.",
  "q_block": "Queries of a tile.",
  "kv_block": "Keys of a tile.",
  "engine": "What answers.",
  "trace": "File of requests, .csv (Azure) or .jsonl (Mooncake).",
  "block": "Tokens of a block of the trace.",
  "rate": "Requests a second that come by chance, or inf.",
  "speed": "How many times faster than in the file requests come.",
  "shrink": "What lengths of the file are divided by.",
  "requests": "How many, of a file the first ones.",
  "prompt_tokens": "Of prompts by chance, on average.",
  "new_tokens": "Of answers by chance, on average.",
  "shared_tokens": "That all prompts by chance begin with.",
  "spread": "Standard deviation of the logs of lengths by chance.",
  "model": "Hugging Face folder or a fetched name, serve, inference: or a "
  "preset with random weights; default: one that ships, kvr: --preset.",
  "layers": "How equal layers run; unrolled is faster on a CPU.",
  "rows": "Answers that are made at the same time.",
  "capacity": "Tokens that there is room for.",
  "longest": "Tokens of a request at most; default: what the trace needs.",
  "page": "Tokens of a page.",
  "piece": "Tokens of a prompt in a row of a call.",
  "pieces": "Rows of a call of prompts.",
  "budget": "Tokens of a step at most.",
  "share": "What later prompts may find.",
  "speculate": "What drafts for the engine, as of launch.serve: NAME or "
  "NAME:key=value,key=value.",
  "cost": "Seconds of a simulated step: answers=,prompts=,row=,token=,key=,"
  "pair=,step=; default: measured.",
  "compare": "What with.",
  "clock": "--compare=simulated: cpu counts the time in which the process has "
  "a core.",
  "head": "Folder of the EAGLE-3 head of the contestant eagle3.",
  "draft": "Hugging Face folder of a model that drafts, with another "
  "tokenizer through text; default: one that ships where its vocabulary is the "
  "model's, else the model's first layer.",
  "dtype": "Of the weights of the models; default: that of their folders.",
  "drafted": "Tokens of a draft.",
  "draft_cache": "Kind of cache of self, with options as NAME:key=value.",
  "lengths": "Drafts have all their tokens, or as many as pay.",
  "context": "Tokens of a long document that is quoted, in place of the kinds "
  "of tasks.",
}


def _define(flag: str, words: str) -> None:
  """Defines a flag with the type of its option in the benchmarks."""
  fields = {
    name: benchmark.options.options()[flag]
    for name, benchmark in _BENCHMARKS.items()
    if flag in benchmark.options.flags()
  }
  kinds = [field.metadata for field in fields.values()]
  names_by_choices: dict[str, list[str]] = {}
  for name, field in fields.items():
    if field.metadata["choices"]:
      names_by_choices.setdefault(
        ",".join(field.metadata["choices"]), []
      ).append(name)
  for choices, names in names_by_choices.items():
    words += f" {', '.join(names)}: of {choices}."
  if any(kind["several"] for kind in kinds):
    flags.DEFINE_list(flag, None, words)
  elif kinds[0]["choices"] is None:
    flags.DEFINE_integer(flag, None, words)
  else:
    flags.DEFINE_string(flag, None, words)


for _flag, _words in _OPTIONS.items():
  _define(_flag, _words)
_files = FlagHelper(flags.FLAGS)
_files.output("json", None, "File for the complete result.")
_files.output("plot", None, "PNG to draw (needs matplotlib).")
flags.DEFINE_bool("append", False, "Keep the rows that --json already holds.")
flags.DEFINE_bool(
  "quick",
  False,
  "attention: T=4096, H=64, float32, 3 rounds. inference: a few float32 rows. "
  "kvr: 512 tokens. kernels: T=1024, H=64, 3 rounds. serve: 8 requests. "
  "speculate: three kinds, three drafters.",
)


def _taken(benchmark: Any) -> set[str]:
  """The flags that a benchmark takes."""
  quick = ("quick",) if benchmark.quick is not None else ()
  return {*benchmark.options.flags(), *benchmark.files, *quick}


def _run(benchmark: Any) -> None:
  """Runs a benchmark as the flags say.

  Raises:
    app.UsageError: If the benchmark does not take a flag.
    OptionError: If an option has a wrong value.
  """
  accepted = _taken(benchmark)
  script_flags = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
  for flag in script_flags:
    if flag.present and flag.name not in accepted:
      raise app.UsageError(
        f"--{flag.name}: {benchmark.name} does not take it; it takes "
        f"{', '.join(sorted(accepted))}"
      )
  flag_values = {flag.name: flag.value for flag in script_flags}
  start = benchmark.quick if flag_values["quick"] else benchmark.options()
  settings = start.with_flags(flag_values)
  if "devices" in accepted:
    make_cpu_devices(settings.devices)
  files = {name: flag_values[name] for name in benchmark.files}
  command = shlex.join(["python", "-m", "launch.bench", *sys.argv[1:]])
  benchmark.run(settings, command=command, **files)


def main(argv: Sequence[str]) -> int:
  if len(argv) != 2 or argv[1] not in _BENCHMARKS:
    names, command = " or ".join(_BENCHMARKS), " ".join(argv[1:]) or "nothing"
    print(f"bench: got {command}; wanted {names}; see --help.", file=sys.stderr)
    return 2
  if not flags.FLAGS["verbosity"].present:
    # At level "info" JAX lists the accelerators that it did not find.
    logging.set_verbosity(logging.WARNING)
  try:
    _run(_BENCHMARKS[argv[1]])
  except (RingjaxError, app.UsageError) as error:
    print(f"bench: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  app.run(main)
