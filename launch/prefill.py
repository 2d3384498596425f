"""Times methods of prefill on several devices, side by side.

  python -m launch.prefill --method=all --preset=llama-100m --context=2048 \\
      --coordinator=localhost:7788 --num_processes=2 --process_id=0
      The first of two processes; the second has --process_id=1. KV-Runahead as
      in its paper: a chain of processes, the last of which then decodes.
  python -m launch.prefill --method=kvr,ring --devices=4
      One process and its devices, as one program; there nothing can run ahead.

Methods: kvr (a balanced partition, or --partition, or --search), kvr_even, tsp
(an all-gather, all products, then the mask), flash_tsp (without the masked
tiles), ring, striped, cpp (Mooncake's pipeline: each of several processes has
a part of the layers and reads --chunks of equal time; with --method=cpp alone
it loads these only, but the last one all to decode); auto is the one of the
others that --profile and --bandwidth predict to be the fastest. Each is run in
turn, --rounds times after a first run that is not counted; times to the first
token are medians.

With several processes (see launch/shared/common.py) all get the same flags.
If one dies, freezes or gets stuck, the others report it and end with status 3.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax import plan
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.errors import OptionError
from ringjax.infer import ChunkPipeline
from ringjax.infer.finite import not_finite_error
from ringjax.infer.kv_runahead import kvr, lockstep
from ringjax.infer.prefill import tile
from ringjax.json_text import json_text
from ringjax.models import tiny, work_profile
from ringjax.models.transformer import Transformer
from ringjax.parallel.chips import Link
from ringjax.parallel.local_arrays import last_device
from ringjax.parallel.peers import TIMEOUT_S, Peers
from ringjax.paths import open_binary
from ringjax.plan import cost, draw, fit
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.events import Timeline
from ringjax.plan.kv_runahead import schedules
from ringjax.plan.kv_runahead.schedules import Outcome

from .shared import common, console, machines
from .shared.flag_helpers import FlagHelper, model_folder
from .shared.group import Group
from .shared.prompts import clash

NAME = "prefill"
METHODS = ("kvr", "kvr_even", *lockstep.METHODS, "cpp")
_CHAINS = ("kvr", "kvr_even")
_PIPELINE = "cpp"
_AUTO = "auto"
# Names here of the methods that `plan.choose` returns.
_CHOSEN = {"kvr": "kvr", "striped": "striped", "gather": "flash_tsp"}
_CONTEXT = 2048
_MEMORY = "read a shorter prompt (--context), or use more processes"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.texts(
    "method",
    ["kvr"],
    f"auto (needs --profile), all, or some of {', '.join(METHODS)}.",
  )
  new.whole("context", _CONTEXT, "Tokens of the prompt.")
  new.texts("partition", None, "Tokens of each rank for kvr, e.g. 1216,832.")
  new.whole("chunks", None, "Chunks of cpp; default: four for each process.")
  new.boolean("search", False, "Search kvr's partition by measuring, first.")
  machines.define(new, "Profile to plan kvr's partition or --method=auto with")
  new.checkpoint()
  new.text("preset", None, "Shapes of a model, with random weights.")
  new.place(
    "prompt_file", None, "UTF-8 text to read; default: Python's own sources."
  )
  new.text("dtype", None, "bfloat16, float16 or float32; default: the model's.")
  new.whole("seed", 0, "Random seed of weights and tokens.", 0)
  new.whole("max_new_tokens", 1, "Tokens to generate after each method.")
  new.whole("rounds", 3, "Timed runs of each method.")
  new.whole("credits", kvr.CREDITS, "Layers buffered per link.")
  new.whole("tile", None, "Tokens of a tile of kvr; default: by the context.")
  new.number(
    "timeout", TIMEOUT_S, "Seconds after which a stalled rank is given up.", 0.0
  )
  new.text(
    "delay", None, "RANK:SECONDS, a rank that pauses before every layer."
  )
  new.local_output(
    "plot", None, "PNG of each rank's timeline (needs matplotlib)."
  )
  new.boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Times the methods as the flags say; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  work = _Work(values, screen)
  with console.Run(
    screen,
    _MEMORY,
    doing=lambda: work.doing,
    reports=work.group,
    leaving=console.leave_at_once,
  ) as run:
    _check(values)
    if values.devices is None and (values.num_processes or 1) > 1:
      # A rank is a process: more devices would only share its cores.
      values["devices"].value = 1
    common.start(values)
    record = work.run()
  if run.status:
    return run.status
  work.group.close()
  if jax.process_index() == 0:
    for line in words(record):
      print(
        line, file=(stderr or sys.stderr) if values.json else stdout, flush=True
      )
    if values.json:
      print(json_text(record), file=stdout, flush=True)
  return 0


class _Work:
  """One run of the script.

  Attributes:
    doing: Current activity, for error messages.
    group: Processes of the run.
  """

  _peers: Peers

  def __init__(self, values: flags.FlagValues, screen: console.Screen):
    self.doing = "starting"
    self.group = Group(screen, lambda: self.doing)
    self._values, self._screen = values, screen
    self._stage: ChunkPipeline | None = None

  def run(self) -> dict[str, Any]:
    """Prefills the prompt by all methods; returns all figures."""
    values, screen = self._values, self._screen
    screen.quiet = jax.process_index() > 0
    methods = _methods(values.method)
    peers = self._peers = self.group.meet(
      values, values.timeout, own=("json", "plot")
    )
    mesh = common.mesh(values.mesh)
    if mesh.shape.get("seq") != mesh.devices.size:
      raise OptionError(
        "--mesh", values.mesh, "all devices along seq", "leave --mesh out"
      )
    for name in ("delay", "plot"):
      # One program is one span: it does not show which rank waits.
      if values[name].value is not None and peers.size == 1:
        raise OptionError(
          f"--{name}",
          "one process",
          "several, each of which is a rank",
          "start more with --num_processes, or leave it out",
        )
    model = self._load(mesh, methods)
    rj.infer.inputs.within_context(
      model.config,
      values.context + values.max_new_tokens,
      f"--context={values.context} and "
      f"--max_new_tokens={values.max_new_tokens}",
    )
    ids = self._prompt(model)
    screen.say(
      f"{ids.size:,} tokens on {mesh.devices.size} x "
      f"{jax.devices()[0].device_kind} in {peers.size} "
      f"process{'es' * (peers.size > 1)}"
    )
    if peers.size == 1 and _PIPELINE in methods:
      if values.method != ["all"]:
        raise OptionError(
          "--method",
          "cpp in one process",
          "several, each of which has a part of the layers",
          "start more with --num_processes, or leave it out",
        )
      methods = tuple(name for name in methods if name != _PIPELINE)
    if methods == (_AUTO,):
      methods = (self._choose(model, ids.size, mesh.devices.size),)
    runs = {name: self._reader(name, model, ids, mesh) for name in methods}
    readings = self._interleave(runs)
    return self._figures(readings, ids, mesh, model)

  def _load(self, mesh: Mesh, methods: Sequence[str]) -> Transformer:
    """Loads the model; for the pipeline alone its shapes, and this stage."""
    values, peers = self._values, self._peers
    self._begin("loading the model")
    alone = tuple(methods) == (_PIPELINE,) and peers.size > 1
    if alone and values.preset is None:
      self._stage = ChunkPipeline.load(
        model_folder(values, tiny.path),
        peers,
        decodes=values.max_new_tokens > 1,
        weights_dtype=values.dtype,
        strict=values.strict,
        credits=values.credits,
        tile=values.tile,
      )
      return self._stage.whole
    if values.preset is not None:
      dtype = values.dtype or "float32"
      model = rj.models.create(
        values.preset, seed=values.seed, dtype=dtype, mesh=mesh
      )
    else:
      folder = model_folder(values, tiny.path)
      model = rj.models.load(
        folder, mesh=mesh, dtype=values.dtype, strict=values.strict
      )
    return jax.block_until_ready(model)

  def _prompt(self, model: Transformer) -> np.ndarray:
    values = self._values
    self._begin("making the prompt")

    def make() -> np.ndarray:
      count = values.context
      if values.preset is not None:
        draw_ids = np.random.default_rng(values.seed)
        ids = draw_ids.integers(0, model.config.vocab, count)
        return ids.astype(np.int32)
      folder = model_folder(values, tiny.path)
      tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
      if values.prompt_file is not None:
        with open_binary(values.prompt_file) as file:
          text = file.read().decode("utf-8")
      else:
        size = lambda text: len(tokenizer.encode(text))
        # `fit` returns up to a line less than it is asked for.
        text = documents.fit(count + 256, size).text
      ids = np.asarray(tokenizer.encode(text))[:count]
      if ids.size < count:
        raise OptionError(
          "--context",
          count,
          f"at most the {ids.size} tokens of the text",
          f"pass --context={ids.size}, or a longer text",
        )
      return ids.astype(np.int32)

    return common.share(make)

  def _reader(
    self, name: str, model: Transformer, ids: np.ndarray, mesh: Mesh
  ) -> Callable[[], kvr.Reading]:
    values, peers = self._values, self._peers
    new, pause = values.max_new_tokens, self._pause()
    if name == _PIPELINE:
      return self._pipeline(model, ids)
    if name not in _CHAINS:
      prefill = lockstep.LockstepPrefill(model, peers, name, mesh=mesh)
      return lambda: prefill.read(ids, new_tokens=new, pause=pause)
    ranks = mesh.devices.size if peers.size == 1 else peers.size
    lengths = self._partition(name, model, ids.size, ranks)
    if peers.size == 1:
      read = lambda lengths: _single_program_chain(
        model, ids, lengths, name, mesh, new
      )
    else:
      local = jax.tree.map(lambda a: a.addressable_data(0), model)
      chain = kvr.Runahead(
        local, peers, credits=values.credits, tile=values.tile
      )
      read = lambda lengths: chain.read(
        ids, lengths, new_tokens=new, method=name, pause=pause
      )
    if name == "kvr" and values.search:
      lengths = self._search(lengths, read)
    return lambda: read(lengths)

  def _pipeline(
    self, model: Transformer, ids: np.ndarray
  ) -> Callable[[], kvr.Reading]:
    values, peers = self._values, self._peers
    stage = self._stage
    if stage is None:
      local = jax.tree.map(lambda a: a.addressable_data(0), model)
      stage = self._stage = ChunkPipeline(
        local, peers, credits=values.credits, tile=values.tile
      )
    chunks = stage.chunks(ids.size, values.chunks)
    # Keys are needed only if more tokens are generated.
    keep = "last" if values.max_new_tokens > 1 else "stages"
    return lambda: stage.read(
      ids,
      chunks,
      new_tokens=values.max_new_tokens,
      keep=keep,
      pause=self._pause(),
    )

  def _choose(self, model: Transformer, tokens: int, ranks: int) -> str:
    machine = machines.machine(self._values, self._values.credits)
    assert machine is not None
    machine.profile.check_layers(len(model.config.layers))
    choice = plan.choose(
      machine,
      Prompt(tokens=tokens, window=work_profile.window(model)),
      ranks,
      keep="last",
      tile=tile(tokens, ranks),
    )
    for reason in choice.why:
      self._screen.say(f"  {reason}")
    return _CHOSEN[choice.way.method]

  def _partition(
    self, name: str, model: Transformer, tokens: int, ranks: int
  ) -> tuple[int, ...]:
    values = self._values
    if name == "kvr_even":
      return cost.even(tokens, ranks)
    if values.partition is not None:
      return _ints("partition", values.partition)
    tile_tokens = tile(tokens, ranks)
    machine = machines.machine(values, values.credits)
    if machine is not None:
      machine.profile.check_layers(len(model.config.layers))
      prompt = Prompt(tokens=tokens, window=work_profile.window(model))
      plan_args = (machine.profile, prompt, ranks, machine.network)
      plan_options = {"credits": machine.credits, "noise": machine.noise}
      if self.group.several:
        return plan.plan(
          *plan_args, tile=tile_tokens, **plan_options
        ).found.lengths
      # One program has a part for each device; only processes may stay idle.
      return plan.find(*plan_args, tile=tile_tokens, **plan_options).lengths
    return kvr.balanced(model, tokens, ranks, tile_tokens)

  def _search(
    self,
    start: tuple[int, ...],
    read: Callable[[tuple[int, ...]], kvr.Reading],
  ) -> tuple[int, ...]:
    """Searches a partition; equal times on all ranks give equal results."""
    self._begin("searching a partition")
    objective = plan.measured(
      lambda lengths: float(read(lengths).outcome.seconds), repeats=3
    )
    tile_tokens = tile(sum(start), len(start))
    best = plan.search(
      objective,
      [plan.round_to_tiles(start, sum(start), tile_tokens)],
      tile=tile_tokens,
      least_gain=0.02,
      on_level=lambda level: self._screen.say(
        f"  {level.lengths}: {level.seconds:.3f} s"
      ),
    )
    return best.lengths

  def _pause(self) -> Callable[[int], None]:
    rank, seconds = _delay(self._values.delay or "-1:0")
    return lambda layer: time.sleep(seconds * (rank == self._peers.rank))

  def _interleave(
    self, runs: dict[str, Callable[[], kvr.Reading]]
  ) -> dict[str, list[kvr.Reading]]:
    """Runs rounds of all methods; the first one compiles and isn't counted."""
    rounds = self._values.rounds
    readings: dict[str, list[kvr.Reading]] = {name: [] for name in runs}
    self._screen.begin("reading", (rounds + 1) * len(runs), "runs")
    finished = 0
    for n in range(rounds + 1):
      for name, read in runs.items():
        self.doing = f"reading by {name}"
        reading = read()
        if n:
          readings[name].append(reading)
        finished += 1
        self._screen.at(finished)
    self._screen.end()
    return readings

  def _figures(
    self,
    readings_by_method: dict[str, list[kvr.Reading]],
    ids: np.ndarray,
    mesh: Mesh,
    model: Transformer,
  ) -> dict[str, Any]:
    values, peers = self._values, self._peers
    self.doing = "decoding"
    medians = {
      name: _median(readings) for name, readings in readings_by_method.items()
    }
    outcomes = [reading.outcome for reading in medians.values()]
    simulated = {o.method: o for o in self._simulate(outcomes, ids.size)}
    rows, pairs = [], []
    for name, readings in readings_by_method.items():
      median = medians[name].outcome
      seconds = [float(r.outcome.seconds) for r in readings]
      simulation = simulated.get(f"{name}, simulated")
      row = median.record() | {
        "seconds": statistics.median(seconds),
        "rounds_s": seconds,
        "tiles_by_rank": list(medians[name].tiles),
        "computed_s_by_rank": _computed(median),
      }
      if simulation is not None:
        row["simulated_s"] = float(simulation.seconds)
      if median.timeline.spans:
        pairs += [median, *filter(None, [simulation])]
      if name == _PIPELINE:
        assert self._stage is not None
        row["weight_bytes_by_rank"] = peers.gather(self._stage.weight_bytes)
      rows.append(row | self._continue(readings[-1], model, ids.size))
    if values.plot is not None and peers.rank == 0:
      draw.outcomes(pairs, values.plot)
      self._screen.say(f"wrote {values.plot}")
    return {
      "tokens": int(ids.size),
      "family": model.config.family,
      "layers": len(model.config.layers),
      "dtype": jax.numpy.dtype(model.dtype).name,
      "platform": jax.default_backend(),
      "devices": int(mesh.devices.size),
      "processes": peers.size,
      "credits": values.credits,
      "methods": rows,
    }

  def _continue(
    self, reading: kvr.Reading, model: rj.models.Transformer, tokens_read: int
  ) -> dict[str, Any]:
    """Generates the tokens after the prompt, on the rank that has the keys."""
    peers, count = self._peers, self._values.max_new_tokens
    tokens: list[int] = []
    start = time.monotonic()
    if reading.session is not None:
      tokens = kvr.follow(reading, count).tolist()
    elif reading.logits is not None:
      logits = np.asarray(reading.logits)[0]
      if not np.isfinite(logits.max()):
        raise not_finite_error({0: tokens_read}, model.dtype)
      tokens = [int(np.argmax(logits))]
    took = time.monotonic() - start
    decoded = [x for x in peers.gather([tokens, took]) if x[0]]
    new, took = decoded[-1] if decoded else ([], 0.0)
    return {"new_tokens": new, "decode_s": took if len(new) > 1 else None}

  def _simulate(
    self, measured: Sequence[Outcome], tokens: int
  ) -> list[Outcome]:
    """Simulates the chains with the measured speed of devices and links."""
    chains = [o for o in measured if o.method in _CHAINS and o.timeline.spans]
    fitted = _fitted(chains)
    if fitted is None:
      return []
    profile, network = fitted
    return [
      schedules.kvr(
        profile,
        Prompt(tokens=tokens),
        o.lengths,
        network,
        credits=self._values.credits,
        name=f"{o.method}, simulated",
      )
      for o in chains
    ]

  def _begin(self, doing: str) -> None:
    self.doing = doing
    self._screen.begin(doing)


def _single_program_chain(
  model: Transformer,
  ids: np.ndarray,
  lengths: tuple[int, ...],
  name: str,
  mesh: Mesh,
  new_tokens: int,
) -> kvr.Reading:
  """Runs the chain as one program over the devices of a mesh.

  If more tokens are generated, the last device gets all keys and decodes alone,
  as the last rank does.
  """
  shards = len(lengths)
  room = shards * (max(lengths) + 1) + new_tokens
  session = rj.infer.Session(model, room, mesh=mesh)
  start = time.monotonic()
  tokens = rj.infer.generate(
    model,
    [ids],
    max_new_tokens=1,
    prefill="kvr",
    partition=lengths,
    keep="last" if new_tokens > 1 else "sharded",
    cache=session,
  )
  seconds = time.monotonic() - start
  logits = np.zeros((1, model.config.vocab), np.float32)
  logits[0, int(tokens[0, 0])] = 1.0
  prompt = Prompt(tokens=sum(lengths))
  sent = kvr.link_bytes(kvr.LayerPrograms(model).layers, lengths, model.dtype)
  return kvr.Reading(
    outcome=Outcome(
      method=name,
      lengths=lengths,
      seconds=seconds,
      work=tuple(float(n) for n in cost.pairs(prompt, lengths, "causal")),
      link_bytes={f"{i}-{i + 1}": float(n) for i, n in enumerate(sent)},
      timeline=Timeline(()),
    ),
    tiles=(),
    length=sum(lengths) + new_tokens,
    logits=jax.device_put(logits, last_device(mesh, "seq")),
    session=session if new_tokens > 1 else None,
  )


def _fitted(chains: Sequence[Outcome]) -> tuple[Profile, Link] | None:
  """Fits coefficients to spans of measured chains; None if too few."""
  samples, project_s, total_s, sent_bytes, send_s = [], 0.0, 0.0, 0.0, 0.0
  layers = 0
  for chain in chains:
    spans = chain.timeline.spans
    for rank, count in enumerate(chain.lengths):
      rank_spans = chain.timeline.of(f"rank {rank}")
      seconds = sum(s.end_s - s.start_s for s in rank_spans)
      project_s += sum(
        s.end_s - s.start_s for s in rank_spans if s.kind == "project"
      )
      total_s += seconds
      layers = sum(s.kind == "attend" for s in rank_spans)
      prefix_tokens = sum(chain.lengths[:rank])
      if seconds > 0:
        samples.append(
          fit.Sample(tokens=count, before=prefix_tokens, seconds=seconds)
        )
    sent_bytes += sum(s.nbytes for s in spans)
    send_s += sum(s.end_s - s.start_s for s in spans if s.kind == "send")
  try:
    coefficients = fit.fit(samples)
    linear = coefficients.token_s * sum(s.tokens for s in samples)
    profile = Profile(
      name="measured",
      model="at hand",
      hardware="at hand",
      layers=layers,
      token_s=coefficients.token_s,
      pair_s=coefficients.pair_s,
      fixed_s=coefficients.fixed_s,
      kv_bytes=_row_bytes(chains[0], layers),
      early=min(1.0, project_s / linear) if linear else 0.25,
      kernel=coefficients.kernel,
    )
    return profile, Link(bandwidth=sent_bytes / send_s if send_s else 1e12)
  except (OptionError, ZeroDivisionError):
    return None


def _row_bytes(outcome: Outcome, layers: int) -> float:
  rows = sum(np.cumsum(outcome.lengths)[:-1]) * layers
  return float(outcome.sent_bytes) / rows if rows else 0.0


def _computed(outcome: Outcome) -> list[float]:
  """Seconds until each rank finished its last layer; empty if unrecorded."""
  ranks = range(len(outcome.lengths))
  spans = [outcome.timeline.of(f"rank {rank}") for rank in ranks]
  return (
    [max(s.end_s for s in rank_spans) for rank_spans in spans]
    if all(spans)
    else []
  )


def _median(readings: Sequence[kvr.Reading]) -> kvr.Reading:
  ordered = sorted(readings, key=lambda r: r.outcome.seconds)
  return ordered[(len(ordered) - 1) // 2]


def words(done: dict[str, Any]) -> list[str]:
  """Lines of text that show the figures of a run."""
  lines = [
    f"{'method':<11}{'first token':>12}{'spread':>16}{'simulated':>11}"
    f"{'sent':>10}  partition",
  ]
  for row in done["methods"]:
    low, high = min(row["rounds_s"]), max(row["rounds_s"])
    simulated = row.get("simulated_s")
    sent = sum(row["bytes_by_link"].values())
    lines.append(
      f"{row['method']:<11}{row['seconds']:>10.3f} s"
      f"{f'{low:.3f}-{high:.3f}':>16}"
      f"{'-' if simulated is None else f'{simulated:.3f} s':>11}"
      f"{console.nbytes(sent):>10}  "
      + " ".join(f"{n}" for n in row["partition"])
    )
  lines.append("")
  for row in done["methods"]:
    links = ", ".join(
      f"{link} {console.nbytes(n)}" for link, n in row["bytes_by_link"].items()
    )
    pairs = " ".join(f"{n:,.0f}" for n in row["pairs_by_rank"])
    parts = "chunk" if row["method"] == _PIPELINE else "rank"
    lines.append(f"{row['method']:<11}pairs a layer by {parts} {pairs}")
    if any(row["tiles_by_rank"]):
      tiles = " ".join(f"{n:,}" for n in row["tiles_by_rank"])
      lines.append(f"{'':<11}tiles by rank {tiles}")
    lines.append(f"{'':<11}links {links or '-'}")
    if "weight_bytes_by_rank" in row:
      weights = " ".join(map(console.nbytes, row["weight_bytes_by_rank"]))
      lines.append(f"{'':<11}weights by rank {weights}")
    tokens = " ".join(map(str, row["new_tokens"][:8]))
    lines.append(f"{'':<11}continues with {tokens}")
  return lines


# ---------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together, before anything is loaded."""
  methods = _methods(values.method)
  ways = [n for n in ("partition", "profile", "search") if values[n].value]
  if len(ways) > 1:
    raise clash(f"--{' and --'.join(ways)}", "one of them")
  if methods == (_AUTO,):
    if ways != ["profile"]:
      clause = f" with --{ways[0]}" if ways else " without --profile"
      raise clash(f"--method=auto{clause}", "--method=auto --profile=NAME")
  elif ways and "kvr" not in methods:
    raise clash(f"--{ways[0]} without kvr", "--method=kvr")
  if values.chunks is not None and _PIPELINE not in methods:
    raise clash("--chunks without cpp", "--method=cpp")
  for name in machines.unused(values):
    raise clash(f"--{name} without --profile", "both")
  if values.preset is not None and values.model is not None:
    raise clash("--preset and --model", "one of them")
  if values.preset is not None and values.prompt_file is not None:
    raise clash("--preset and --prompt_file", "--model with a text")
  if values.timeout <= 0:
    raise OptionError(
      "--timeout", values.timeout, "seconds above 0", "pass --timeout=10"
    )
  if values.partition is not None:
    lengths = _ints("partition", values.partition)
    cost.check_lengths(lengths, values.context)
  if values.delay is not None:
    _delay(values.delay)
  common.check_plot(values)


def _methods(names: Sequence[str]) -> tuple[str, ...]:
  if list(names) in (["all"], [_AUTO]):
    return METHODS if names[0] == "all" else (_AUTO,)
  wrong = [name for name in names if name not in METHODS]
  if wrong or not names:
    raise OptionError(
      "--method",
      ",".join(names) or "none",
      f"auto, all, or some of {', '.join(METHODS)}",
      "pass --method=all, or names with commas between",
    )
  return tuple(dict.fromkeys(names))


def _ints(name: str, items: Sequence[str]) -> tuple[int, ...]:
  try:
    return tuple(int(v) for v in items)
  except ValueError:
    raise app.UsageError(
      f"--{name}: want ints, got {','.join(items)}"
    ) from None


def _delay(text: str) -> tuple[int, float]:
  rank, _, seconds = text.partition(":")
  try:
    return int(rank), float(seconds)
  except ValueError:
    raise app.UsageError(f"--delay: want RANK:SECONDS, got {text!r}") from None


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS, stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)
