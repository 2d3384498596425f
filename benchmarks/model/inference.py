"""Times a model: reading a prompt, a step of decoding, loading.

All contestants of a row get the same weights from one folder, the same tokens
and the same cached keys. Both dtypes hold the same numbers, which are bfloat16.
Contestants are checked against ours in float32 on one device (see `TOLERANCE`).

  forward: a whole prompt to the logits after its last token; no cache is
    kept. Its rate is compared with the machine's matrix product.
  decode: steps of one token as `generate` takes them, each token read by the
    host, with `caches` tokens in the cache. No step can be faster than reading
    the weights and the cache once: that time is the bound, from the best rate
    at which all cores together read a large array. A line is fitted through the
    steps at all lengths: milliseconds for 1024 tokens more.
  load: a folder to arrays. It is in the page cache, as it was just written, so
    that no disk is measured; a cold disk slows all contestants equally.
  tiles: counts of `schedule.tile_counts`, without timing.

The time of each run is shown with the processor time of all threads of the
process, which depends less on the load of a busy machine. PyTorch runs with a
thread for each core, and as "transformers_1" with one: if another process takes
a core, its threads wait for each other, and one thread can be several times as
fast. The better of the two is compared.

On CPU the devices of a mesh are virtual: they share the cores, and each has a
copy of the weights, so striped cannot win there by more hardware. Our
contestants on one device run in a process with one (see `one_device`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

# `rj.models` and `rj.infer` import flax when they are first used, which the
# other benchmarks don't need.
from jaxtyping import Float, Shaped

import ringjax as rj
from benchmarks.attention.layouts import LAYOUTS
from benchmarks.model import inference_tables, model_contestants
from benchmarks.model.model_contestants import (
  CONTESTANTS,
  DTYPES,
  PARTS,
  ModelCase,
  ModelInputs,
)
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, Trial, option
from ringjax.bench import timing
from ringjax.bench.one_device import ProcessorTime
from ringjax.ops.attention.cost import schedule
from ringjax.ops.mask import Causal

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Largest difference of a logit, as a fraction of the reference's largest logit
# or of 1 if that is larger.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}

_TILED = ("contiguous", "striped")

# Size of the array that all cores read: larger than any CPU cache.
_READ_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceSettings(harness.BenchmarkSettings):
  """Settings of the benchmark; every combination in a part is a row.

  Attributes:
    model: Model whose layers all have the same attention: a preset or the
      contents of a config.json, whose weights are random, or a name of
      `launch.fetch` or a folder, whose weights are used.
    tokens: Lengths of the prompts of part "forward".
    caches: Tokens in the cache when decoding begins.
    rounds: Timed rounds.
    steps: Decode steps in a round.
    devices: Number of devices of the sharded contestants.
  """

  model: str | Mapping[str, Any] = option("llama-100m", ())
  parts: tuple[str, ...] = option(PARTS, PARTS)
  tokens: tuple[int, ...] = option((4096, 32768))
  caches: tuple[int, ...] = option((1024, 4096, 8192, 16384, 32768))
  dtypes: tuple[str, ...] = option(DTYPES, DTYPES)
  contestants: tuple[str, ...] = option(tuple(CONTESTANTS), CONTESTANTS)
  rounds: int = option(5)
  steps: int = option(8, flag=None)
  devices: int = option(8)

  @property
  def random(self) -> Mapping[str, Any] | None:
    """Config of a model of random weights; None for a model that is loaded."""
    if isinstance(self.model, str):
      return rj.models.PRESETS.get(self.model)
    return self.model


class InferenceBenchmark(harness.Benchmark):
  """Benchmark of prefill, decode steps and loading against transformers."""

  name = "inference"
  options = InferenceSettings
  quick = InferenceSettings(
    tokens=(2048,), caches=(1024, 8192), dtypes=("float32",), rounds=3
  )
  contestants = CONTESTANTS
  columns = ("part", "dtype", "tokens")
  parts = PARTS

  def __init__(self, settings: InferenceSettings):
    super().__init__(settings)
    self._folders: dict[str, pathlib.Path] = {}
    self._references: dict[ModelCase, np.ndarray] = {}
    self._last: tuple[ModelCase, Trial] | None = None

  @functools.cached_property
  def source(self) -> Mapping[str, Any]:
    """The model's config.json."""
    if self.settings.random is not None:
      return self.settings.random
    written = self.folder("bfloat16") / "config.json"
    return json.loads(written.read_text("utf-8"))

  @functools.cached_property
  def config(self) -> rj.models.TransformerConfig:
    """Architecture of the model."""
    return rj.models.read_config(self.source)[0]

  @functools.cached_property
  def path(self) -> pathlib.Path:
    """Folder in which models are written during a run."""
    folder = tempfile.TemporaryDirectory(prefix="ringjax-bench-")
    return pathlib.Path(self.stack.enter_context(folder))

  @property
  def cases(self) -> list[ModelCase]:
    s = self.settings
    make_case = functools.partial(ModelCase, devices=s.devices)
    # Slots for the steps of the check and of all rounds.
    room = max(s.caches) + (s.rounds + 1) * s.steps
    extras = {"decode": {"room": room, "steps": s.steps}}
    tokens = {"decode": s.caches, "load": (0,)}
    return [
      make_case(part=part, dtype=dtype, tokens=count, **extras.get(part, {}))
      for part in PARTS
      if part in s.parts
      for dtype in (("",) if part == "tiles" else s.dtypes)
      for count in tokens.get(part, s.tokens)
    ]

  def facts(self) -> Row:
    return {"torch_threads": model_contestants.torch_threads()}

  def folder(self, dtype: str) -> pathlib.Path:
    """Folder of the model in a dtype; both dtypes hold the same numbers."""
    if dtype not in self._folders:
      if dtype == "bfloat16":
        model = self._model()
      else:
        model = rj.models.load(self.folder("bfloat16"), dtype=dtype)
      self._folders[dtype] = self.path / dtype
      rj.models.save(model, self._folders[dtype])
    return self._folders[dtype]

  def _model(self) -> Transformer:
    """Makes or loads the model in bfloat16."""
    settings = self.settings
    if settings.random is not None:
      return rj.models.create(settings.random, dtype="bfloat16")
    return rj.models.load(str(settings.model), dtype="bfloat16")

  def inputs(self, case: ModelCase) -> ModelInputs:
    """Inputs that all contestants of a case get."""
    rng = np.random.default_rng(case.tokens)
    folder, config = self.folder(case.dtype), self.config
    count = case.tokens if case.part == "forward" else 1
    ids = rng.integers(0, config.vocab, count, np.int32)
    if case.part != "decode":
      return ModelInputs(folder, config, ids)
    return ModelInputs(folder, config, ids, self._keys(case, rng))

  def _keys(
    self, case: ModelCase, rng: np.random.Generator
  ) -> tuple[Float[np.ndarray, "L K S H"], Float[np.ndarray, "L K S H"]]:
    """Keys and values in the cache, float32 that bfloat16 holds.

    A loaded model's are those of random tokens: with drawn ones its outliers
    would make every dtype's logits others.
    """
    attention: Any = self.config.layers[0].attention
    layers, count = len(self.config.layers), case.tokens

    def truncated(x: Float[np.ndarray, " ..."]) -> Float[np.ndarray, " ..."]:
      return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    if self.settings.random is None:
      ids = rng.integers(0, self.config.vocab, count, np.int32)
      k, v = model_contestants.cached_keys(self.folder("float32"), ids)
      return truncated(k), truncated(v)
    shape = (layers, attention.kv_heads, count, attention.head_dim)
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    return truncated(k), truncated(v)

  def reference(
    self, case: ModelCase, given: ModelInputs
  ) -> Shaped[np.ndarray, " ..."]:
    """Result that the contestants' results are compared with."""
    float32_case = dataclasses.replace(case, dtype="float32")
    if float32_case not in self._references:
      inputs = dataclasses.replace(given, folder=self.folder("float32"))
      self._last = float32_case, self._trial("ringjax", float32_case, inputs)
      self._references[float32_case] = self._last[1][1]
    return self._references[float32_case]

  def build(self, name: str, case: ModelCase, given: ModelInputs) -> Trial:
    """Builds a contestant's run, and computes its result."""
    last, self._last = self._last, None
    if name == "ringjax" and last is not None and last[0] == case:
      # In float32 the reference is the contestant: reuse it.
      return last[1]
    return self._trial(name, case, given)

  def _trial(self, name: str, case: ModelCase, inputs: ModelInputs) -> Trial:
    one_device = CONTESTANTS[name].one_device
    return self.placed(one_device, model_contestants.trial, name, case, inputs)

  def sizes(self) -> tuple[int, int]:
    """Counts (weights that multiply each token, weights of the head)."""
    total = sum(x.size for x in jax.tree.leaves(self._abstract))
    table = self.config.vocab * self.config.embed
    return total - table * (1 if self.config.tied else 2), table

  @functools.cached_property
  def _abstract(self) -> Transformer:
    return jax.eval_shape(lambda: rj.models.create(self.source))

  def flops(self, case: ModelCase) -> float:
    """FLOPs of a whole prompt, without masked pairs."""
    body, head = self.sizes()
    body -= sum(
      x.feedforward.idle(self.config.embed) for x in self.config.layers
    )
    mixers: list[Any] = [layer.attention for layer in self.config.layers]
    pairs = sum(
      2.0 * case.tokens**2 * mixer.heads * mixer.head_dim for mixer in mixers
    )
    return 2.0 * case.tokens * body + 2.0 * head + pairs

  def token_bytes(self, case: ModelCase) -> float:
    """Bytes of a token's keys and values."""
    mixers = (m for layer in self.config.layers for m in layer.mixers)
    shapes = (m.cache_shape(1) for m in mixers)
    return float(sum(s.numbers() for s in shapes) * _itemsize(case.dtype))

  def weight_bytes(self, case: ModelCase) -> float:
    """Bytes of weights that a step must read, without other embeddings.

    Of a mixture they include the experts that a token chooses, not all.
    """
    embed = self.config.embed
    idle = sum(x.feedforward.idle(embed) for x in self.config.layers)
    return float((sum(self.sizes()) - idle) * _itemsize(case.dtype))

  def weight(self, case: ModelCase) -> float:
    """Estimated seconds of a row on a few cores."""
    runs = 4.0 * (self.settings.rounds + 1)
    if case.part == "forward":
      return runs * self.flops(case) / 2e11
    if case.part == "decode":
      size = self.weight_bytes(case) + case.tokens * self.token_bytes(case)
      return 10 + runs * case.steps * size / 1e10
    if case.part == "load":
      return 10 + runs * self.weight_bytes(case) / 1e9
    return 1.0

  def row(self, case: ModelCase, report: Report) -> Row:
    if case.part == "tiles":
      return _tiles(case)
    names = [
      name
      for name in self.settings.contestants
      if case.part in (CONTESTANTS[name].parts or ())
    ]
    inputs = self.inputs(case)
    reference = self.reference(case, inputs)
    machine: dict[str, Callable[[], Any]] = {}
    if case.part == "forward":
      machine["machine"] = timing.gemm(case.dtype)
    elif case.part == "decode":
      machine["machine"] = _read_large_array()
    cpu: dict[str, list[float]] = {}

    def build(name: str) -> Trial:
      work, output = self.build(name, case, inputs)
      return _clocked(work, cpu.setdefault(name, [])), output

    # Loaded numbers are copies: only their sums are rounded.
    tolerance = 1e-9 if case.part == "load" else TOLERANCE[case.dtype]
    results, timings = self.measure(
      names,
      build,
      lambda output: _compare(output, reference, tolerance),
      report,
      machine=machine,
      steps=case.steps,
    )
    row = self._facts(case, timings)
    for name, result in results.items():
      median = result["median_s"]
      result["cpu_s"] = median and statistics.median(cpu[name]) / case.steps
      if case.part == "forward":
        result["gemm_percent"] = harness.percent(
          row["flops"], result, row["machine"]
        )
      elif case.part == "decode":
        result["bound_percent"] = median and 100 * row["bound_s"] / median
      else:
        result["s_per_gigabyte"] = median and median / row["gigabytes"]
    return row | {"results": results}

  def _facts(self, case: ModelCase, timings: Any) -> Row:
    """Entries of a row in addition to its results."""
    row: Row = {"part": case.part, "dtype": case.dtype, "tokens": case.tokens}
    if case.part == "forward":
      size = timing.GEMM_SIZE
      row["flops"] = self.flops(case)
      row["machine"] = harness.product_row(timings["machine"], size)
    elif case.part == "load":
      files = self.folder(case.dtype).glob("*.safetensors")
      row["gigabytes"] = sum(file.stat().st_size for file in files) / 1e9
    else:
      read = harness.timing_row(timings["machine"])
      # The bound is by the best rate that was reached, not by the median.
      rate = _READ_BYTES / read["min_s"]
      weights, token = self.weight_bytes(case), self.token_bytes(case)
      row |= {
        "steps": case.steps,
        "weight_bytes": weights,
        "token_bytes": token,
        "bound_s": (weights + case.tokens * token) / rate,
        "machine": read | {"bytes_per_s": rate},
      }
    return row

  table = staticmethod(inference_tables.table)
  summary = staticmethod(inference_tables.summary)
  closing = staticmethod(inference_tables.closing)
  draw = staticmethod(inference_tables.draw)


def _itemsize(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize


def _clocked(work: Callable[[], Any], cpu: list[float]) -> Callable[[], None]:
  """Wraps `work` to append the processor time of each run to `cpu`."""

  def run() -> None:
    start = time.process_time()
    outcome = jax.block_until_ready(work())
    elapsed = time.process_time() - start
    cpu.append(
      outcome.seconds if isinstance(outcome, ProcessorTime) else elapsed
    )

  return run


def _compare(
  output: np.ndarray, reference: np.ndarray, tolerance: float
) -> tuple[float, bool]:
  """Computes (largest absolute difference, whether the result is off)."""
  if output.dtype == np.float64 and output.shape == reference.shape:
    # Sums of weights are compared relatively, each by itself.
    output, reference = output / reference, np.ones_like(reference)
  return harness.compare([output], [reference], tolerance)


def _read_large_array() -> Callable[[], Any]:
  """Returns a function by which all cores read `_READ_BYTES` once."""
  cores = os.cpu_count() or 1
  pool = concurrent.futures.ThreadPoolExecutor(cores)
  parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), cores)
  # NumPy releases the GIL in np.max.
  return lambda: list(pool.map(np.max, parts))


def _tiles(case: ModelCase) -> Row:
  """Counts tiles by hop; a hop lasts as long as its slowest device."""
  results = {}
  for name in _TILED:
    counts = schedule.tile_counts(
      LAYOUTS[name], Causal(), case.devices, case.tokens
    )
    slowest = counts.max(axis=1)
    results[name] = {
      "tiles": int(counts.sum()),
      "time": int(slowest.sum()),
      "busy_percent": 100 * schedule.busy(counts),
      "tiles_by_hop": counts.sum(axis=1).tolist(),
      "largest_by_hop": slowest.tolist(),
      "largest_over_mean_by_hop": (slowest / counts.mean(axis=1)).tolist(),
    }
  return {
    "part": "tiles",
    "dtype": "",
    "tokens": case.tokens,
    "devices": case.devices,
    "results": results,
  }
