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
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.bench import (
  alone,
  contest,
  inference_report,
  model_contestants,
  timing,
)
from ringjax.bench.alone import Alone, Spent

# `rj.models` and `rj.infer` load flax when they are first used, which the
# other benchmarks do without.
from ringjax.bench.model_contestants import (
  CONTESTANTS,
  DTYPES,
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

LAYOUTS: dict[str, Layout] = {"contiguous": Contiguous(), "striped": Striped()}

# The array that all cores read: larger than any cache of theirs.
_READ_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What to run; every combination of a part is a row.

  Attributes:
    model: a preset, or what a config.json of a Llama holds.
    parts: of `PARTS`.
    tokens: of the prompts that are read.
    caches: tokens in the cache when decoding begins.
    dtypes: of `DTYPES`.
    contestants: of `CONTESTANTS`.
    rounds: timed rounds.
    steps: of decoding in a round.
    devices: of the sharded contestants.
  """

  model: Any = "llama-100m"
  parts: tuple[str, ...] = PARTS
  tokens: tuple[int, ...] = (4096, 32768)
  caches: tuple[int, ...] = (1024, 4096, 8192, 16384, 32768)
  dtypes: tuple[str, ...] = DTYPES
  contestants: tuple[str, ...] = tuple(CONTESTANTS)
  rounds: int = 5
  steps: int = 8
  devices: int = 8

  def __post_init__(self) -> None:
    contest.check(
      self,
      choices={
        "parts": PARTS,
        "dtypes": DTYPES,
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
    order=inference_report.order,
    summary=inference_report.summary,
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
      print(inference_report.table(row), flush=True)
  result = record.result
  print(inference_report.summary_table(result["summary"]), flush=True)
  if plot is not None:
    inference_report.draw(result, plot)
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
