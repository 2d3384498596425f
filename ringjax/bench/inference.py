"""How fast a model is: reading a prompt, a step of decoding, loading.

Law: in each row all contestants get the same weights from one folder, the
same tokens and the same cached keys, in place before the clock starts, and
run in turn (see `timing`). Both dtypes hold the same numbers, which are
bfloat16. Each contestant is first checked against ourselves in float32 on one
device (see `TOLERANCE`): one whose result is off is reported as WRONG and not
timed.

  forward: a whole prompt to the logits behind its last token; no cache is
    kept. Its rate is compared with the machine's matrix product.
  decode: steps of one token as `generate` takes them, each token read by the
    host, with so many tokens in the cache. No step can be faster than reading
    the weights and the cache once: that time is the bound, from the best rate
    at which all cores together read a large array between them. A line is
    fitted through the steps at all lengths: milliseconds for 1024 tokens more.
  load: a folder to arrays. It was written a moment ago and lies in the page
    cache, so that no disk is measured; a cold disk is slower for all alike.
  tiles: counts of `schedule.tile_counts`; no clock is involved.

Beside the time of each run stands the processor time that all threads of the
process took for it, which the load of a busy machine changes less. PyTorch
runs with a thread for each core, and as "transformers_1" with one: where
others take a core away its threads wait for each other, and one alone can be
several times as fast. It is compared by the better of the two.

On CPU the devices of a mesh are virtual: they share the cores, and each has
its copy of the weights, so striped cannot win there by more hardware. Who
computes on one device has a process in which there is one (see `alone`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.bench import alone, contest, model_contestants, timing
from ringjax.bench.alone import Alone, Spent
from ringjax.bench.contest import best

# `rj.models` and `rj.infer` load flax when they are first used, which the
# other benchmarks do without.
from ringjax.bench.model_contestants import (
  CONTESTANTS,
  PARTS,
  Case,
  Given,
  torch_threads,
)
from ringjax.bench.timing import Timing
from ringjax.ops.attention import schedule
from ringjax.ops.mask import Causal
from ringjax.parallel.layout import Contiguous, Layout, Striped

# Largest difference of a logit, of the largest logit of the reference or of 1
# where that is smaller.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}

# Tokens: how many times transformers' speed ours shall be.
AIMS = {4096: 1.0, 32768: 2.0}

LAYOUTS: dict[str, Layout] = {"contiguous": Contiguous(), "striped": Striped()}

# The array that all cores read: larger than any cache of theirs.
_READ_BYTES = 1 << 28


_PEERS = ("transformers", "transformers_1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to run; every combination of a part is a row.

  Attributes:
    model: a preset, or what a config.json of a Llama holds.
    parts: of `PARTS`.
    tokens: of the prompts that are read.
    caches: tokens in the cache when decoding begins.
    dtypes: of `TOLERANCE`.
    contestants: of `CONTESTANTS`.
    rounds: timed rounds.
    steps: of decoding in a round.
    devices: of the sharded contestants.
  """

  model: Any = "llama-100m"
  parts: tuple[str, ...] = PARTS
  tokens: tuple[int, ...] = (4096, 32768)
  caches: tuple[int, ...] = (1024, 4096, 8192, 16384, 32768)
  dtypes: tuple[str, ...] = tuple(TOLERANCE)
  contestants: tuple[str, ...] = tuple(CONTESTANTS)
  rounds: int = 5
  steps: int = 8
  devices: int = 8

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={
        "parts": PARTS,
        "dtypes": tuple(TOLERANCE),
        "contestants": tuple(CONTESTANTS),
      },
      counts=("tokens", "caches", "rounds", "steps", "devices"),
    )

  @property
  def source(self) -> dict[str, Any]:
    """The model's config.json."""
    if isinstance(self.model, str):
      return rj.models.PRESETS[self.model]
    return self.model

  @property
  def cases(self) -> list[Case]:
    one = functools.partial(Case, devices=self.devices)
    # Room for the steps of the check and of all rounds.
    room = max(self.caches) + (self.rounds + 1) * self.steps
    found = {
      "forward": [
        one(part="forward", dtype=d, tokens=t)
        for d in self.dtypes
        for t in self.tokens
      ],
      "decode": [
        one(part="decode", dtype=d, tokens=t, room=room, steps=self.steps)
        for d in self.dtypes
        for t in self.caches
      ],
      "load": [one(part="load", dtype=d) for d in self.dtypes],
      "tiles": [one(part="tiles", dtype="", tokens=t) for t in self.tokens],
    }
    return [c for part in PARTS if part in self.parts for c in found[part]]


QUICK = Settings(
  tokens=(2048,),
  caches=(1024, 8192),
  dtypes=("float32",),
  rounds=3,
)


# ---------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------


def run(
  settings: Settings,
  *,
  command: str = "",
  json: str | None = None,
  plot: str | None = None,
  append: bool = False,
) -> dict[str, Any]:
  """Runs the benchmark; prints, writes and returns the result.

  Args:
    settings: what to run.
    command: the command line, for the record.
    json: file for the result; rewritten after every row.
    plot: file for a picture of all rows; needs matplotlib.
    append: keeps what `json` holds already, but for rows that run anew.
  """
  record = contest.Record(
    "inference",
    settings,
    order=_order,
    summary=summary,
    command=command,
    json=json,
    plot=plot,
    append=append,
    torch_threads=torch_threads(),
  )
  contest.load(CONTESTANTS[name] for name in settings.contestants)
  cases = settings.cases
  with (
    tempfile.TemporaryDirectory(prefix="ringjax-bench-") as temporary,
    Alone() as process,
  ):
    bench = _Bench(settings, pathlib.Path(temporary), process)
    for case in cases:
      row = _row(bench, case)
      record.add(row, last=case is cases[-1])
      bench.progress.clear()
      print(_table(row), flush=True)
  result = record.result
  print(_summary_table(result["summary"]), flush=True)
  if plot is not None:
    draw(result, plot)
  return result


class _Bench:
  """Weights, inputs and references of a run."""

  def __init__(
    self, settings: Settings, path: pathlib.Path, process: Alone
  ) -> None:
    self.settings = settings
    self.process = process
    self.config, _ = rj.models.read_config(settings.source)
    self.path = path
    self.done = 0.0
    self.progress = timing.Progress(sum(map(self.seconds, settings.cases)))
    self._folders: dict[str, pathlib.Path] = {}
    self._references: dict[Case, np.ndarray] = {}
    self._ready: tuple[Case, contest.Made] | None = None

  def folder(self, dtype: str) -> pathlib.Path:
    """The model in a dtype; its numbers are the same in both."""
    if dtype not in self._folders:
      path = self.path / dtype
      if dtype == "bfloat16":
        rj.models.save(
          rj.models.create(self.settings.source, dtype=dtype), path
        )
      else:
        rj.models.save(
          rj.models.load(self.folder("bfloat16"), dtype=dtype), path
        )
      self._folders[dtype] = path
    return self._folders[dtype]

  def given(self, case: Case) -> Given:
    rng = np.random.default_rng(case.tokens)
    folder, config = self.folder(case.dtype), self.config
    if case.part == "forward":
      ids = rng.integers(0, config.vocab, case.tokens, np.int32)
      return Given(folder, config, ids)
    ids = rng.integers(0, config.vocab, 1, np.int32)
    if case.part == "load":
      return Given(folder, config, ids)
    attention = config.layers[0].attention
    shape = (
      len(config.layers),
      attention.kv_heads,
      case.tokens,
      attention.head_dim,
    )

    def draw() -> np.ndarray:
      x = rng.standard_normal(shape, np.float32)
      # Of a bfloat16, so that both dtypes hold the same numbers.
      return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    return Given(folder, config, ids, (draw(), draw()))

  def reference(self, case: Case, given: Given) -> np.ndarray:
    """What the contestants' results are compared with."""
    wide = dataclasses.replace(case, dtype="float32")
    if wide not in self._references:
      given = dataclasses.replace(given, folder=self.folder("float32"))
      ready = self._made("ringjax", wide, given)
      self._references[wide] = ready[1]
      self._ready = wide, ready
    return self._references[wide]

  def made(self, name: str, case: Case, given: Given) -> contest.Made:
    """What a contestant runs, and its result."""
    last, self._ready = self._ready, None
    if name == "ringjax" and last is not None and last[0] == case:
      # In float32 the reference competes itself.
      return last[1]
    return self._made(name, case, given)

  def _made(self, name: str, case: Case, given: Given) -> contest.Made:
    if CONTESTANTS[name].alone and alone.serves():
      make = f"{model_contestants.__name__}:{model_contestants.made.__name__}"
      return self.process.make(make, name, case, given)
    return model_contestants.made(name, case, given)

  def numbers(self) -> tuple[int, int]:
    """(weights that each token is multiplied by, those of the head)."""
    total = sum(x.size for x in jax.tree.leaves(self._abstract))
    table = self.config.vocab * self.config.embed
    return total - table * (1 if self.config.tied else 2), table

  @functools.cached_property
  def _abstract(self) -> rj.models.Transformer:
    return jax.eval_shape(lambda: rj.models.create(self.settings.source))

  def flops(self, case: Case) -> float:
    """Of a whole prompt; of masked pairs nothing counts."""
    body, head = self.numbers()
    pairs = sum(
      2.0 * case.tokens**2 * x.attention.heads * x.attention.head_dim
      for x in self.config.layers
    )
    return 2.0 * case.tokens * body + 2.0 * head + pairs

  def token_bytes(self, case: Case) -> float:
    """Of a token's keys and values."""
    shapes = (x.attention.cache_shape(1) for x in self.config.layers)
    return float(sum(s.numbers() for s in shapes) * _itemsize(case.dtype))

  def weight_bytes(self, case: Case) -> float:
    """That a step must read: all but the embeddings of other tokens."""
    return float(sum(self.numbers()) * _itemsize(case.dtype))

  def seconds(self, case: Case) -> float:
    """About how long a row takes on a few cores, for the progress."""
    turns = 4.0 * (self.settings.rounds + 1)
    if case.part == "forward":
      return turns * self.flops(case) / 2e11
    if case.part == "decode":
      size = self.weight_bytes(case) + case.tokens * self.token_bytes(case)
      return 10 + turns * case.steps * size / 1e10
    if case.part == "load":
      return 10 + turns * self.weight_bytes(case) / 1e9
    return 1.0


def _itemsize(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize


def _row(bench: _Bench, case: Case) -> dict[str, Any]:
  """Checks and times all contestants on one case."""
  if case.part == "tiles":
    bench.done += bench.seconds(case)
    return _tiles(case)
  settings = bench.settings
  names = [n for n in settings.contestants if case.part in CONTESTANTS[n].parts]
  steps = contest.steps(names, settings.rounds)

  def report(step: int, label: str) -> None:
    done = bench.done + bench.seconds(case) * step / steps
    bench.progress.at(done, f"{case}: {label}")

  report(0, "reference")
  given = bench.given(case)
  reference = bench.reference(case, given)
  machine: dict[str, Callable[[], Any]] = {}
  if case.part == "forward":
    machine["machine"] = timing.gemm(case.dtype)
  elif case.part == "decode":
    machine["machine"] = _reading()
  cpu: dict[str, list[float]] = {}

  def make(name: str) -> contest.Made:
    work, found = bench.made(name, case, given)
    return _clocked(work, cpu.setdefault(name, [])), found

  timings, differences = contest.run(
    names,
    make,
    lambda found: _compare(found, reference, _tolerance(case)),
    settings.rounds,
    report,
    machine,
  )
  bench.process.clear()
  bench.done += bench.seconds(case)
  return _record(bench, case, names, timings, differences, cpu)


def _clocked(work: Callable[[], Any], cpu: list[float]) -> Callable[[], None]:
  """`work`, with the processor time of each run noted in `cpu`."""

  def run() -> None:
    start = time.process_time()
    done = jax.block_until_ready(work())
    here = time.process_time() - start
    cpu.append(done.processor_s if isinstance(done, Spent) else here)

  return run


def _tolerance(case: Case) -> float:
  # Loaded numbers are copies: only their sums are rounded.
  return 1e-9 if case.part == "load" else TOLERANCE[case.dtype]


def _compare(
  found: np.ndarray, reference: np.ndarray, tolerance: float
) -> tuple[float, bool]:
  """(largest absolute difference, whether the result is off)."""
  if found.dtype == np.float64 and found.shape == reference.shape:
    # Of weights: each of the sums counts for itself.
    found, reference = found / reference, np.ones_like(reference)
  return contest.compare([found], [reference], tolerance)


def _reading() -> Callable[[], Any]:
  """All cores read `_READ_BYTES` once, ready to run."""
  cores = os.cpu_count() or 1
  pool = concurrent.futures.ThreadPoolExecutor(cores)
  parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), cores)
  # NumPy lets go of the interpreter while it looks for the largest number.
  return lambda: list(pool.map(np.max, parts))


def _record(
  bench: _Bench,
  case: Case,
  names: Sequence[str],
  timings: Mapping[str, Timing],
  differences: Mapping[str, float],
  cpu: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
  row: dict[str, Any] = {
    "part": case.part,
    "dtype": case.dtype,
    "tokens": case.tokens,
  }
  if case.part == "load":
    files = bench.folder(case.dtype).glob("*.safetensors")
    row["gigabytes"] = sum(file.stat().st_size for file in files) / 1e9
  else:
    machine = timings["machine"]
    assert machine.median_s is not None and machine.min_s is not None
    row["machine"] = {
      "median_s": machine.median_s,
      "min_s": machine.min_s,
      "seconds": list(machine.seconds),
    }
    if case.part == "forward":
      row["flops"] = bench.flops(case)
      row["machine"]["flops_per_s"] = timing.GEMM_FLOPS / machine.median_s
    else:
      # A bound is what was reached, not what is usual.
      rate = _READ_BYTES / machine.min_s
      weights, token = bench.weight_bytes(case), bench.token_bytes(case)
      row |= {
        "steps": case.steps,
        "weight_bytes": weights,
        "token_bytes": token,
        "bound_s": (weights + case.tokens * token) / rate,
      }
      row["machine"]["bytes_per_s"] = rate
  row["results"] = {}
  for name in names:
    one, contestant = timings[name], CONTESTANTS[name]
    seconds = [s / case.steps for s in one.seconds]
    median = statistics.median(seconds) if seconds else None
    found: dict[str, Any] = {
      "devices": case.devices if contestant.sharded else 1,
      "median_s": median,
      "min_s": min(seconds, default=None),
      "cpu_s": statistics.median(cpu[name]) / case.steps if seconds else None,
      "max_abs_difference": differences.get(name),
      "seconds": seconds,
      "reason": one.reason,
    }
    if case.part == "forward":
      rate = row["machine"]["flops_per_s"]
      found["gemm_percent"] = median and 100 * row["flops"] / median / rate
    elif case.part == "decode":
      found["bound_percent"] = median and 100 * row["bound_s"] / median
    else:
      found["s_per_gigabyte"] = median and median / row["gigabytes"]
    row["results"][name] = found
  return row


def _tiles(case: Case) -> dict[str, Any]:
  """Counts by hop; a hop lasts as long as its slowest device."""
  results = {}
  for name, layout in LAYOUTS.items():
    counts = schedule.tile_counts(layout, Causal(), case.devices, case.tokens)
    slowest = counts.max(axis=1)
    mean = counts.mean(axis=1)
    results[name] = {
      "tiles": int(counts.sum()),
      "time": int(slowest.sum()),
      "busy_percent": 100 * schedule.busy(counts),
      "tiles_by_hop": counts.sum(axis=1).tolist(),
      "largest_by_hop": slowest.tolist(),
      "largest_over_mean_by_hop": (slowest / mean).tolist(),
    }
  return {
    "part": "tiles",
    "dtype": "",
    "tokens": case.tokens,
    "devices": case.devices,
    "results": results,
  }


# ---------------------------------------------------------------------------
# What comes out
# ---------------------------------------------------------------------------


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
  """What tells rows apart, in the order of the tables."""
  dtypes = ("", *TOLERANCE)
  return (
    PARTS.index(row["part"]), dtypes.index(row["dtype"]), row["tokens"]
  )  # fmt: skip


def fit(tokens: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
  """The line through times of a step, in ms and ms for 1024 tokens."""
  x, y = np.asarray(tokens) / 1024, np.asarray(seconds) * 1e3
  slope, start = np.polyfit(x, y, 1)
  spread = float(np.sum((y - y.mean()) ** 2))
  rest = float(np.sum((y - start - slope * x) ** 2))
  return {
    "ms": float(start),
    "ms_per_1024": float(slope),
    "r2": 1 - rest / spread if spread else 1.0,
  }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Speed over transformers', fitted lines, loading over safetensors, aims.

  A "speed" is their best median time over our best: above 1 we are faster; a
  "cpu_speed" is that in processor time. The bound of a line is the slope of
  reading the cache once. Loading is compared by time: below 1 we are faster.
  """
  ours = [name for name, one in CONTESTANTS.items() if one.ours]
  speeds, aims = [], []
  for row in rows:
    if row["part"] not in ("forward", "decode"):
      continue
    mine, speed = _speed(row, ours, "median_s")
    facts = {name: row[name] for name in ("part", "dtype", "tokens")}
    _, cpu = _speed(row, ours, "cpu_s")
    speeds.append(
      {**facts, "best_of_ours": mine, "speed": speed, "cpu_speed": cpu}
    )
    if row["tokens"] in AIMS:
      aim = AIMS[row["tokens"]]
      met = None if speed is None else speed >= aim
      aims.append({**facts, "aim": aim, "speed": speed, "met": met})
  return {
    "speeds": speeds,
    "lines": _lines(rows),
    "load": [
      {
        "dtype": row["dtype"],
        "contestant": name,
        "time_over_safetensors": _over(row, name, "safetensors"),
      }
      for row in rows
      if row["part"] == "load"
      for name in row["results"]
      if name != "safetensors"
    ],
    "tiles": [
      {
        "tokens": row["tokens"],
        "devices": row["devices"],
        "striped_time_over_contiguous": row["results"]["striped"]["time"]
        / row["results"]["contiguous"]["time"],
      }
      for row in rows
      if row["part"] == "tiles"
    ],
    "aims": aims,
  }


def _speed(
  row: dict[str, Any], ours: Sequence[str], key: str
) -> tuple[str | None, float | None]:
  """(our fastest, the peer's best time over its)."""
  mine, theirs = best(row, ours, key), best(row, _PEERS, key)
  speed = theirs[1] / mine[1] if mine and theirs else None
  return mine and mine[0], speed


def _over(row: dict[str, Any], a: str, b: str) -> float | None:
  mine, theirs = best(row, [a]), best(row, [b])
  return mine[1] / theirs[1] if mine and theirs else None


def _read_rate(rows: Sequence[dict[str, Any]]) -> float:
  """The best rate of reading in any row, bytes per second."""
  return max(
    (r["machine"]["bytes_per_s"] for r in rows if r["part"] == "decode"),
    default=0.0,
  )


def _lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  found = []
  for dtype in TOLERANCE:
    members = [r for r in rows if r["part"] == "decode" and r["dtype"] == dtype]
    rate = _read_rate(rows)
    for name in CONTESTANTS:
      points = [(r, least[1]) for r in members if (least := best(r, [name]))]
      if len(points) < 2:
        continue
      tokens = [r["tokens"] for r, _ in points]
      line = fit(tokens, [s for _, s in points])
      cpu = [r["results"][name].get("cpu_s") for r, _ in points]
      found.append(
        {
          "dtype": dtype,
          "contestant": name,
          **line,
          "cpu": fit(tokens, cpu) if all(cpu) else None,
          "bound_ms_per_1024": 1024e3 * members[0]["token_bytes"] / rate,
        }
      )
  return found


def _title(row: dict[str, Any]) -> str:
  case = Case(part=row["part"], dtype=row["dtype"], tokens=row["tokens"])
  return str(case)


def _table(row: dict[str, Any]) -> str:
  if row["part"] == "tiles":
    return _tiles_table(row)
  lines = [_title(row)]
  if row["part"] == "forward":
    rate = row["machine"]["flops_per_s"] / 1e9
    lines.append(f"  {'matrix product':31}{rate:8.0f} GFLOP/s")
  elif row["part"] == "decode":
    rate, ms = row["machine"]["bytes_per_s"] / 1e9, row["bound_s"] * 1e3
    lines.append(
      f"  {'reading once':26}{ms:11.1f} ms   100 %   {rate:.1f} GB/s"
    )
  for name, one in row["results"].items():
    devices = one["devices"]
    head = f"  {name:14}{devices:3} device{'s' if devices > 1 else ' '} "
    if one["median_s"] is None:
      lines.append(f"{head}           - {one['reason']}")
      continue
    rest = f"best {one['min_s'] * 1e3:.1f} ms"
    if row["part"] == "load":
      share = f"{one['s_per_gigabyte']:5.2f} s/GB"
    else:
      percent = one.get("gemm_percent") or one["bound_percent"]
      share = f"{percent:5.1f} %"
      rest += f", off by {one['max_abs_difference']:.0e}"
    cpu = f"cpu {one['cpu_s'] * 1e3:.1f} ms"
    lines.append(
      f"{head}{one['median_s'] * 1e3:11.1f} ms {share}   {cpu}, {rest}"
    )
  return "\n".join(lines) + "\n"


def _tiles_table(row: dict[str, Any]) -> str:
  lines = [
    f"tiles of a causal ring, {row['devices']} devices T={row['tokens']}; "
    "by hop: largest : mean"
  ]
  for name, one in row["results"].items():
    hops = " ".join(f"{x:.2f}" for x in one["largest_over_mean_by_hop"])
    lines.append(
      f"  {name:12}{one['tiles']:8} tiles, time {one['time']:6}, busy "
      f"{one['busy_percent']:5.1f} %   {hops}"
    )
  return "\n".join(lines) + "\n"


def _line(one: Mapping[str, Any]) -> str:
  start, slope = one["ms"], one["ms_per_1024"]
  return f"{start:8.1f} + {slope:5.2f}, R2 {one['r2']:.2f}"


def _summary_table(found: dict[str, Any]) -> str:
  lines = []
  number = lambda x: "-" if x is None else format(x, ".2f")
  if found["speeds"]:
    lines.append("Our best speed over transformers' best: time, processor time")
    for one in found["speeds"]:
      name = one["best_of_ours"] or "no number of ours"
      lines.append(
        f"  {_title(one):32}{number(one['speed']):>6}"
        f"{number(one['cpu_speed']):>6}  {name}"
      )
  if found["lines"]:
    lines.append("A step as the cache grows: ms and ms for 1024 tokens more")
    for one in found["lines"]:
      head = f"  {one['contestant']:15}{one['dtype']:9}"
      lines.append(
        f"{head}{_line(one)} (reading {one['bound_ms_per_1024']:.2f})"
      )
      if one["cpu"] is not None:
        lines.append(f"{'    processor time':26}{_line(one['cpu'])}")
  if found["load"]:
    lines.append("Time to load over safetensors'")
    for one in found["load"]:
      ratio = number(one["time_over_safetensors"])
      lines.append(f"  {one['contestant']:15}{one['dtype']:17}{ratio:>6}")
  if found["tiles"]:
    lines.append("Time of striped over contiguous, in tiles")
    for one in found["tiles"]:
      ratio = number(one["striped_time_over_contiguous"])
      lines.append(f"  {'T=' + str(one['tokens']):32}{ratio:>6}")
  if found["aims"]:
    lines.append("Aims: times transformers' speed")
    words = {True: "met", False: "not met", None: "no number"}
    for one in found["aims"]:
      lines.append(
        f"  {_title(one):32}{number(one['speed']):>6}  of {one['aim']:.0f}: "
        f"{words[one['met']]}"
      )
  return "\n".join(lines) + "\n"


_COLORS = {
  "ringjax": "#08519c",
  "unrolled": "#3182bd",
  "striped": "#9ecae1",
  "transformers": "#d95f0e",
  "transformers_1": "#fdae6b",
}


def draw(result: dict[str, Any], path: str) -> None:
  """A panel a dtype: the step as the cache grows; below, the forward pass."""
  figures = importlib.import_module("matplotlib.figure")
  rows = result["rows"]
  dtypes = [d for d in TOLERANCE if any(r["dtype"] == d for r in rows)]
  figure = figures.Figure(
    figsize=(4.2 * max(2, len(dtypes)), 6.2), layout="constrained"
  )
  axes = figure.subplots(2, max(1, len(dtypes)), squeeze=False)
  lines = result["summary"]["lines"]
  for column, dtype in enumerate(dtypes):
    of = lambda part, dtype=dtype: [
      r for r in rows if r["part"] == part and r["dtype"] == dtype
    ]
    mine = {x["contestant"]: x for x in lines if x["dtype"] == dtype}
    _draw_decode(axes[0, column], of("decode"), mine, _read_rate(rows))
    _draw_forward(axes[1, column], of("forward"))
    axes[0, column].set_title(f"{dtype}: a step", loc="left", fontsize=10)
    axes[1, column].set_title(
      f"{dtype}: a whole prompt", loc="left", fontsize=10
    )
  for ax in axes.flat:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    if ax.get_legend_handles_labels()[0]:
      ax.legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=100)
  print(f"wrote {path}", file=sys.stderr)


def _draw_decode(
  ax: Any,
  rows: Sequence[dict[str, Any]],
  lines: Mapping[str, Any],
  rate: float,
) -> None:
  for name, color in _COLORS.items():
    points = [(r["tokens"], b[1] * 1e3) for r in rows if (b := best(r, [name]))]
    if not points:
      continue
    x = np.array([p[0] for p in points])
    ax.plot(x, [p[1] for p in points], "o", color=color, label=name)
    if name in lines:
      line = lines[name]
      y = line["ms"] + line["ms_per_1024"] * x / 1024
      ax.plot(x, y, color=color, linewidth=1)
  if rows:
    x = np.array([r["tokens"] for r in rows])
    bound = rows[0]["weight_bytes"] + x * rows[0]["token_bytes"]
    ax.plot(x, 1e3 * bound / rate, "--", color="0.5", label="reading once")
  ax.set_ylim(bottom=0)
  ax.set_xlabel("tokens in the cache", fontsize=9)
  ax.set_ylabel("ms", fontsize=9)


def _draw_forward(ax: Any, rows: Sequence[dict[str, Any]]) -> None:
  names = [n for n in _COLORS if any(best(r, [n]) for r in rows)]
  width = 0.8 / max(len(names), 1)
  for i, name in enumerate(names):
    rates = [
      r["tokens"] / b[1] if (b := best(r, [name])) else 0.0 for r in rows
    ]
    x = np.arange(len(rows)) + (i - (len(names) - 1) / 2) * width
    ax.bar(x, rates, width * 0.92, color=_COLORS[name], label=name)
  ax.set_xticks(range(len(rows)), [f"T={r['tokens']}" for r in rows])
  ax.set_ylabel("tokens per second", fontsize=9)
