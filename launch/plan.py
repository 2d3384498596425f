"""Plans a run without running it.

  python -m launch.plan kvr --profile=llama7b-a100 --context=10240 --ranks=4
      --bandwidth=300e9
      How KV-Runahead would split a prompt over ranks, and the time to the
      first token, next to an even split and methods that gather keys instead.
  python -m launch.plan kvr --table=F --save_table
      Searches the partitions of many lengths, to be looked up later.
  python -m launch.plan kvr --paper
      Every published time next to ours.
  python -m launch.plan kvr --fit
      Measures this machine and stores the result as a profile.
  python -m launch.plan explain --shards=64 --tokens=1048576 --heads=32
      --kv_heads=8 --head_dim=128 --chip=tpu-v5p
      Ranks the strategies of attention over several devices, with reasons.
  python -m launch.plan fit --out=machine.json --mesh=seq:8
      Measures products, attention and links of the current devices, for
      explain --chip=machine.json and rj.plan.machine("machine.json").
  python -m launch.plan aot --model=llama-3.1-8b --tokens=1048576
      --topology=v5p:4x4x8 --mesh=data:1,seq:128 --strategy=striped --what=train
      Compiles the exact training step without TPU hardware (pip install -e
      '.[aot]'): whether it fits, its sends and the work that hides them; with
      --search over meshes, layouts, remat and blocks. --model also takes a
      folder with a config.json; no weights are read.
  python -m launch.plan cache --model=gemma-3-27b --tokens=131072
      Bytes of a model's cache of each kind; no weights are read. With
      --cache=hadamard3 --chip=v5e of that kind part by part, and the time of a
      decoded token with it, by the resource that bounds it.
  python -m launch.plan capacity --slices=v5p-128 --out=capacity
      The largest contexts that fit, next to plain attention and all-gather;
      results in the file are not compiled again. --cache=windowed
      with --what=prefill: with a cache of that kind; aot has this flag too.
  python -m launch.plan cycles --chips=v5e,v6e
      Cycles of a tile of the attention kernels, in the TPU compiler's machine
      code, next to those of JAX's splash attention; with --what=decode of the
      kernel that reads a cache, next to XLA's loops; with --what=shared of the
      one that reads pages which rows share, next to JAX's.
  python -m launch.plan elastic --requests=500
      Eight chips as instances that form groups for each batch and dissolve them
      without moving a key (LoongServe), next to tensor parallelism, sequence
      parallelism and replicas: how many requests a second each serves in time.
      --workloads=zipf:1.2,mixed chooses how lengths are drawn.
  python -m launch.plan offload --model=opt-30b --machine=t4 --prompt=512
      --new=32
      Which part of weights, cache and hidden states is best on the device, on
      the host and on disk, in which blocks of rows, and how many tokens a
      second that makes (FlexGen). --machine=here measures this machine, with a
      file in --folder; --policy=48x3:20/80,0/100,0/100 predicts for a given
      placement; --paper prints published policies next to ours.
  python -m launch.plan window --model=llama-2-7b --processes=3 --shares=4,3,3
      --window=4
      Devices that stream their part of each layer from disk while they compute
      and add up by --reduce=star, tree or ring (TPI-LLM): whether they wait,
      the time to the first token and for each, the bytes that each device reads
      and holds. The blocks, and the flags, are those of launch.generate
      --window.
  python -m launch.plan serve --model=llama-3.1-8b --cluster=1x8 --chip=a100
      --trace=requests.csv --slo=ttft=0.5,tpot=0.05
      How many prefill instances and how many decode instances, in which shapes,
      serve the most requests within both limits, next to instances that do both
      (DistServe); --rate=20: on the fewest devices.
  python -m launch.plan which --prompt=8000 --new=200 --slo=ttft=4,tpot=0.05
      One load on eight chips as one engine, replicas, separate prefill and
      decode instances, elastic groups, with and without routing to the instance
      that has a prefix: how many requests a second each serves in time.
  python -m launch.plan routes --trace=conversation_trace.jsonl
      The instance that prefills a prompt, by queues, by prefixes in caches or
      at random: times to first tokens, and cache hits (Mooncake);
      --instances=8x8 prefill and decode.
  python -m launch.plan fastdecode --new=256 --every=16 --answer_seconds=30
      Rows of a mini-batch and CPUs where attention runs next to host caches,
      and how busy both stages are if sequences start together, or a group each
      --every steps (FastDecode).
  python -m launch.plan liger --product_seconds=3 --send_seconds=2
      Requests under tensor parallelism in turn, in opposite phases, or with
      younger ones in the windows of the oldest one (Liger).
  python -m launch.plan ring
      The smallest block whose work hides a hop on five machines, and the
      longest contexts of the Ring Attention paper, next to ours by count; with
      --compile also by the TPU compiler.
  python -m launch.plan pictures --out=docs/strategies
      A picture of each strategy of attention: keys that devices hold and send.

Times are simulated: see docs/kv_runahead.md for the limits of the model.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import numpy as np
from absl import app, flags

from ringjax.errors import OptionError, RingjaxError
from ringjax.parallel.chips import Link
from ringjax.plan import cost, draw, profiles
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.kv_runahead import partition, published, schedules
from ringjax.plan.kv_runahead.balance import round_to_tiles
from ringjax.plan.kv_runahead.grid import SearchResult
from ringjax.plan.kv_runahead.partition import PartitionPlan
from ringjax.plan.kv_runahead.schedules import Outcome
from ringjax.plan.kv_runahead.table import PartitionTable, TableKey

from .planning import (
  aot,
  cache,
  capacity,
  cycles,
  offload,
  plan_flags,
  ring,
  stages,
  strategies,
  windows,
)
from .shared import common, console, machines

NAME = "plan"
# For tests and notebooks, which parse the flags themselves.
define = plan_flags.define
_PICTURES = "docs/strategies"
_FIT_CPU = ("llama-100m", (256, 512, 1024), "float32")
_FIT = ("llama-2-7b", (1024, 2048, 4096), "bfloat16")


# ---------------------------------------------------------------------------
# KV-Runahead
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answer:
  """The result of the sub-command kvr."""

  profile: Profile
  prompt: Prompt
  network: Link
  ranks: int
  plan: PartitionPlan
  outcomes: tuple[Outcome, ...]
  table: str
  bound_s: float
  why: tuple[str, ...]

  def record(self) -> dict[str, Any]:
    search = self.plan.found
    return {
      "profile": dataclasses.asdict(self.profile),
      "prompt": dataclasses.asdict(self.prompt),
      "network": dataclasses.asdict(self.network),
      "ranks_asked": self.ranks,
      "ranks": self.plan.ranks,
      "partition": list(search.lengths),
      "shares": list(search.shares),
      "tried": search.tried,
      "methods": [outcome.record() for outcome in self.outcomes],
      "lower_bound_s": self.bound_s,
      "table": self.table,
      "why": list(self.why),
    }


def _kvr(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  _check(values)
  screen = console.Screen(NAME, stderr)
  if values.fit:
    profile, record, lines = _fit(values, screen, stderr)
    if not values["context"].present:
      strategies.put(values, stdout, record, lines)
      return
    for line in lines:
      screen.say(line)
  elif values.paper:
    _paper(values, stdout, stderr)
    return
  else:
    profile = profiles.load(values.profile)
  if values.kernel not in (None, profile.kernel):
    # Tables treat it as another model, as their partitions do not fit it.
    profile = dataclasses.replace(
      profile, kernel=values.kernel, model=f"{profile.model}-{values.kernel}"
    )
  answer = _plan(values, profile, screen)
  strategies.put(values, stdout, answer.record(), _lines(answer, values.why))
  if values.plot is not None:
    draw.outcomes(answer.outcomes, values.plot, _title(answer))
    screen.say(f"wrote {values.plot}")


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together, before anything is computed."""
  clash = lambda got, want: OptionError("flags", got, want, "leave one out")
  common.check_plot(values)
  if values.fit and values.paper:
    raise clash("--fit and --paper", "one of them")
  if values.fit and values["profile"].present:
    raise clash("--fit and --profile", "--fit with --name")
  if values.save_table and values.table is None:
    raise OptionError(
      "--save_table", "no --table", "--table=FILE", "pass --table=FILE"
    )
  if values.table is not None and (values.prefix or values.window):
    raise clash(
      "--table with --prefix or --window", "--table for whole prompts"
    )
  for name in ("preset", "name", "tokens", "layers", "rounds", "dtype"):
    if values[name].present and not values.fit:
      raise OptionError(f"--{name}", "no --fit", f"--fit --{name}", "add --fit")


_QUIET = "KVR-S: searched for links that do not slow down, timed with --noise"


def _plan(
  values: flags.FlagValues, profile: Profile, screen: console.Screen
) -> _Answer:
  network = machines.link(values)
  prompt = Prompt(
    tokens=values.context, prefix=values.prefix, window=values.window
  )
  noise = None
  if values.noise:
    noise = schedules.Noise(slower=values.noise, seed=values.seed)
  ranks, tile = values.ranks, values.tile
  options, gain = {"credits": values.credits}, values.least_gain
  chosen = partition.plan(
    profile, prompt, ranks, network, tile=tile, least_gain=gain, **options
  )
  used_ranks = chosen.ranks
  # More ranks than tokens cannot share evenly.
  all_ranks = min(ranks, prompt.tokens)
  chain = lambda name, lengths: schedules.kvr(
    profile, prompt, lengths, network, noise=noise, name=name, **options
  )
  level = round_to_tiles([1.0] * used_ranks, prompt.tokens, tile)
  baselines = [schedules.tsp, schedules.flash_tsp]
  if prompt.window is None:
    baselines.append(schedules.ring)
  outcomes = [
    *(f(profile, prompt, all_ranks, network, noise=noise) for f in baselines),
    chain("kvr_e", level),
    chain("kvr_s", chosen.found.lengths),
  ]
  lookup, origin = _lookup(values, profile, network, used_ranks, screen)
  if lookup is not None and prompt == Prompt(tokens=prompt.tokens):
    outcomes.append(chain("kvr_p", lookup.lengths(prompt.tokens, tile)))
  else:
    origin = "not for a prefix or a window"
  return _Answer(
    profile=profile,
    prompt=prompt,
    network=network,
    ranks=ranks,
    plan=chosen,
    outcomes=tuple(outcomes),
    table=origin,
    bound_s=cost.lower_bound_s(profile, prompt, used_ranks),
    why=(
      *chosen.why,
      *([_QUIET] if noise is not None else []),
      f"KVR-P: {origin}",
    ),
  )


def _lookup(
  values: flags.FlagValues,
  profile: Profile,
  network: Link,
  ranks: int,
  screen: console.Screen,
) -> tuple[PartitionTable | None, str]:
  """Table of partitions to interpolate, and its origin in words."""
  if values.prefix or values.window:
    return None, ""
  tabulate = lambda lengths, **options: partition.tabulate(
    profile, lengths, ranks, network, tile=values.tile, **options
  )
  path = values.table
  if path is None:
    neighbours = partition.neighbours(values.context, ranks, values.tile)
    origin = f"between searched partitions of {_list(neighbours)} tokens"
    return tabulate(neighbours), origin
  key = TableKey.of(profile, network, ranks)
  table = PartitionTable.load(path, key) if os.path.exists(path) else None
  if values.save_table:
    step, saved_lengths = partition.SPACING, table.entries if table else ()
    table_lengths = range(step, max(4 * step, values.context) + step, step)
    min_tokens = ranks * values.tile
    missing = [
      n for n in table_lengths if n >= min_tokens and n not in saved_lengths
    ]
    if missing:
      say = lambda tokens: screen.say(f"searching {tokens:,} tokens")
      new_table = tabulate(missing, on_entry=say)
      table = new_table if table is None else table.joined(new_table)
      table.save(path)
      screen.say(f"wrote {path}, {len(table.entries)} entries")
  if table is None:
    raise OptionError(
      "--table",
      f"{path}, which does not exist",
      "a table",
      "pass --save_table to make it",
    )
  return table, f"from {path}, {len(table.entries)} entries"


_TITLES = {
  "tsp": "TSP",
  "flash_tsp": "TSP, causal tiles",
  "ring_striped": "ring, striped",
  "kvr_e": "KVR-E",
  "kvr_s": "KVR-S",
  "kvr_p": "KVR-P",
}


def _title(answer: _Answer) -> str:
  p = answer.profile
  ranks = answer.ranks
  text = (
    f"{p.model} on {p.hardware}: {answer.prompt.tokens:,} tokens, "
    f"{ranks} rank{'s' * (ranks > 1)}, links of "
    f"{answer.network.bandwidth / 1e9:g} GB/s"
  )
  if answer.network.latency_s:
    text += f" and {answer.network.latency_s * 1e6:g} us"
  if answer.prompt.prefix:
    text += f", after {answer.prompt.prefix:,}"
  if answer.prompt.window:
    text += f", window {answer.prompt.window:,}"
  return text


def _lines(answer: _Answer, why: bool) -> list[str]:
  base = answer.outcomes[0].seconds
  lines = [
    _title(answer),
    f"profile {answer.profile.name}: {answer.profile.source}",
    "",
    f"{'method':<19}{'first token':>11}{'speed-up':>10}{'sent':>11}  partition",
  ]
  for outcome in answer.outcomes:
    speed_up = base / outcome.seconds
    lines.append(
      f"{_TITLES[outcome.method]:<19}{outcome.seconds:>9.3f} s{speed_up:>10.2f}"
      f"{console.nbytes(outcome.sent_bytes):>11}  {_list(outcome.lengths)}"
    )
  search: SearchResult = answer.plan.found
  bound = answer.bound_s
  lines += [
    f"{'lower bound':<19}{bound:>9.3f} s{base / bound:>10.2f}",
    "",
    "shares of KVR-S: " + " ".join(f"{s:.3f}" for s in search.shares),
  ]
  if answer.plan.ranks < answer.ranks:
    lines.append(
      f"KVR uses {answer.plan.ranks} of {answer.ranks} ranks; "
      "--least_gain=0 uses all that have tokens"
    )
  if _QUIET in answer.why:
    lines.append(_QUIET)
  if why:
    lines += ["", "why", *(f"  {text}" for text in answer.why)]
  return lines


# ---------------------------------------------------------------------------
# Published rows
# ---------------------------------------------------------------------------


def _paper(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  jobs = list(published.rows())
  screen = console.Screen(NAME, stderr)
  screen.begin("simulating", len(jobs), "rows")
  rows: list[published.Row] = []
  for n, (_, make) in enumerate(jobs):
    rows += make()
    screen.at(n + 1)
  screen.end()
  worst = published.summary(rows)
  record = {
    "rows": [row.record() for row in rows],
    "worst_4_ranks_8k_to_16k": worst,
  }
  kinds = ("TSP", "KVR-S", "speed-up")
  lines = [
    f"{'':41}{'TSP':^22}{'KVR-S':^22}{'speed-up':>13}",
    f"{'links':<10}{'profile':<18}{'tokens':>6}{'ranks':>6} "
    + f"{'paper':>7}{'ours':>7}{'':8}" * 2
    + f"{'paper':>7}{'ours':>6}",
  ]
  cases: dict[Any, dict[str, published.Row]] = {}
  for row in rows:
    if row.what in kinds:
      case = (row.table, row.profile, row.tokens, row.ranks)
      cases.setdefault(case, {})[row.what] = row
  for (links, name, tokens, ranks), case_rows in cases.items():
    text = f"{links:<10}{name:<18}{tokens:>6}{ranks:>6} "
    for kind in kinds[:2]:
      text += _comparison(case_rows[kind]) if kind in case_rows else " " * 22
    if kinds[2] in case_rows:
      row = case_rows[kinds[2]]
      text += f"{row.paper:>7.2f}{row.ours:>6.2f}"
    lines.append(text.rstrip())
  lines.append("")
  for row in rows:
    if row.what not in kinds:
      digits = 0 if row.what == "boundary" else 3
      lines.append(
        f"{row.tokens:>6} tokens, {row.ranks} ranks, {row.what}: "
        f"paper {row.paper:.{digits}f}, ours {row.ours:.{digits}f}"
      )
  lines += [
    "",
    "llama7b-a100, 4 ranks, 8k to 16k, 300 GB/s: TSP within "
    f"{100 * worst['TSP']:.1f} %, KVR-S within {100 * worst['KVR-S']:.1f} %, "
    f"speed-up within {worst['speed-up apart']:.3f}",
    "llama7b-a100 is a fit to one GPU's times and to those of short prompts: "
    "rows with * in place of % are what it was fitted to, and no comparison",
    "the others are scaled from it",
  ]
  strategies.put(values, stdout, record, lines)


def _comparison(row: published.Row) -> str:
  """Published and simulated seconds, in 22 columns."""
  mark = "*" if row.fitted else "%"
  return (
    f"{row.paper:>7.3f}{row.ours:>7.3f}{100 * row.difference:>+6.1f} {mark}"
  )


# ---------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------


def _fit(
  values: flags.FlagValues, screen: console.Screen, stderr: TextIO
) -> tuple[Profile, dict[str, Any], list[str]]:
  # These import the models and flax, which other sub-commands don't need.
  import jax

  from ringjax.bench import layers
  from ringjax.models.presets import preset

  common.quiet_logging()
  platform = jax.default_backend()
  default = _FIT_CPU if platform == "cpu" else _FIT
  model = values.preset or default[0]
  tokens = strategies.ints("tokens", values.tokens) or default[1]
  dtype = values.dtype or default[2]
  name = values.name or f"{model}-{platform}"
  config = preset(model)
  # A config that cannot be stored is refused before minutes of measuring.
  cost.Shape.of(config)
  profiles.check_name(name)
  for count in tokens:
    cost.check_count("tokens", count)
  screen.say(f"measuring {values.layers} layers of {model} in {dtype}")
  samples = layers.measure(
    config,
    tokens,
    layers=values.layers,
    rounds=values.rounds,
    dtype=dtype,
    stream=stderr,
  )
  profile, model_fit = layers.profile(
    name, model, config, samples, layers=values.layers, dtype=dtype
  )
  path = profiles.store(profile)
  lines = [
    f"{profile.model} on {profile.hardware}, {values.layers} of "
    f"{profile.layers} layers",
    f"{'tokens':>8}{'prefix':>8}{'measured':>12}{'model':>12}",
  ]
  for s in samples:
    predicted_s = model_fit.seconds(s.tokens, s.before)
    lines.append(
      f"{s.tokens:>8}{s.before:>8}{1e3 * s.seconds:>9.2f} ms"
      f"{1e3 * predicted_s:>9.2f} ms"
    )
  lines += [
    "",
    f"all {profile.layers} layers: {profile.token_s:.3e} s a token, "
    f"{profile.pair_s:.3e} s a pair ({profile.kernel}), {profile.fixed_s:.3e} "
    "s a call",
    f"the model misses the samples by {100 * model_fit.error:.1f} % at most",
    f"wrote {path}; use it with --profile={profile.name}",
  ]
  record = {
    "profile": dataclasses.asdict(profile),
    "path": path,
    "samples": [dataclasses.asdict(s) for s in samples],
    "largest_error": model_fit.error,
  }
  return profile, record, lines


# ---------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------

# Documents on four shards, each a few tiles of the pictures long.
_DOCUMENTS, _SHARDS, _SLOTS = (16, 96, 24, 40, 32, 24, 16, 8), 4, 64


def _pictures(values: flags.FlagValues, stdout: TextIO, stderr: TextIO) -> None:
  # Drawing tiles imports JAX and compiles: only this sub-command does.
  from ringjax.data.batches.placement import Cost, place
  from ringjax.plan import pictures

  order = np.repeat(np.arange(1, len(_DOCUMENTS) + 1), _DOCUMENTS)
  positions = np.concatenate([np.arange(n) for n in _DOCUMENTS])
  fill = (0, _SHARDS * _SLOTS - len(order))
  placements = {"in order": (np.pad(positions, fill), np.pad(order, fill))}
  for name, spread in (("in runs", "run"), ("in stripes", "stripe")):
    placed = place(
      _DOCUMENTS,
      shards=_SHARDS,
      local_length=_SLOTS,
      spread=spread,
      # Only documents longer than a shard are split over two.
      cost=Cost(pair=1.0, hop=1e3),
    )
    placements[name] = placed.positions, placed.segment_ids
  paths = pictures.write(values.out or _PICTURES, placements, _SHARDS)
  strategies.put(values, stdout, {"pictures": paths}, paths)


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def _list(numbers: Sequence[int]) -> str:
  return " ".join(f"{n}" for n in numbers)


def _elastic(values: flags.FlagValues, out: TextIO, err: TextIO) -> None:
  # Simulated engines are in a package with real ones, which import flax.
  from .planning import elastic

  elastic.compared(values, out, err)


def _which(values: flags.FlagValues, out: TextIO, err: TextIO) -> None:
  from .planning import serving_systems

  serving_systems.compared(values, out, err)


def _serve(values: flags.FlagValues, out: TextIO, err: TextIO) -> None:
  from .planning import serving_plan

  serving_plan.served(values, out, err)


def _routes(values: flags.FlagValues, out: TextIO, err: TextIO) -> None:
  from .planning import routes

  routes.compared(values, out, err)


_COMMANDS: dict[str, Callable[[flags.FlagValues, TextIO, TextIO], None]] = {
  "kvr": _kvr,
  "explain": strategies.explain,
  "fit": strategies.measure,
  "pictures": _pictures,
  "ring": ring.tables,
  "aot": aot.compile_one,
  "cache": cache.sizes,
  "capacity": capacity.search,
  "cycles": cycles.count,
  "elastic": _elastic,
  "offload": offload.offloaded,
  "window": windows.windowed,
  "serve": _serve,
  "which": _which,
  "routes": _routes,
  "fastdecode": stages.fastdecode,
  "liger": stages.liger,
}


def help_page(command: str) -> str | None:
  """Help text of a sub-command and its flags; None if it does not exist."""
  if command not in _COMMANDS:
    return None
  command_flags = flags.FlagValues()
  refused = plan_flags.refused(command)
  for name, flag in plan_flags.defined().items():
    if name not in refused:
      command_flags[name] = flag
  start = "  python -m launch.plan "
  usage = [
    start + part.partition("\n\n")[0].rstrip()
    for part in (__doc__ or "").split(start)[1:]
    if part.split(maxsplit=1)[0] == command
  ]
  return "\n".join(
    [
      *usage,
      "",
      "flags:",
      "",
      command_flags.get_help(include_special_flags=False),
    ]
  )


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Runs the sub-command in `words` with the flags; returns the exit status."""
  stderr = sys.stderr if stderr is None else stderr
  if len(words) != 1 or words[0] not in _COMMANDS:
    command = " ".join(words) or "nothing"
    commands = " or ".join(_COMMANDS)
    console.complain(
      NAME, f"got {command}; wanted {commands}; see --help", stderr
    )
    return 2
  try:
    strategies.refuse(values, words[0], plan_flags.refused(words[0]))
    if values.window == 0 and words[0] != "window":
      raise OptionError(
        "--window", 0, "1 or more keys", "leave it out for all keys"
      )
    _COMMANDS[words[0]](values, stdout or sys.stdout, stderr)
  except (RingjaxError, app.UsageError) as error:
    console.complain(NAME, error, stderr)
    return 2
  except KeyboardInterrupt:
    console.complain(NAME, "stopped", stderr)
    return console.INTERRUPTED
  return 0


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:])


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main, help_page)
