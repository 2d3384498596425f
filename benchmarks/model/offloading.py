"""Benchmark of a model larger than the memory, whose layers stream from disk.

Guarantees: prompts are the same for all, and each contestant is a separate
process whose peak memory the system reports; they run in turn. Ours runs under
a limit of the system (RLIMIT_DATA), which counts written memory and no pages of
files. It computes one prompt, and a block of them, for which a layer is read
once; accelerate, if it is installed, reads the same folder.

The folder is created if it does not exist: random weights in bfloat16.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.model import offload_peer
from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.plan.flexgen import offload_measured
from ringjax.plan.flexgen.offload_measured import StreamedRun

PARTS = ("ours", "accelerate")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings(harness.BenchmarkSettings):
  """Settings of the benchmark: model, block and contestants.

  Attributes:
    folder: Folder of the model; created if it does not exist.
    scratch: Folder for files that accelerate writes.
    peer: Python interpreter that has accelerate; default: this one.
    layers: Number of layers of a created model, 69 MB each.
    rows: Rows of a block. A call of a quarter of them, with more tokens, is
      forecast before it runs, by the log of the others.
    prompt_tokens: Tokens of each prompt.
    new_tokens: Tokens of each answer.
    memory: MiB that ours may take: a limit of the system for written memory;
      for all memory, with pages of programs, only measured.
    rounds: Rounds of each measurement; the median is reported.
    parts: Contestants.
  """

  folder: str = option("", ())
  scratch: str = option("", ())
  peer: str = option("", ())
  layers: int = option(46, flag="model_layers")
  rows: int = option(32)
  prompt_tokens: int = option(16)
  new_tokens: int = option(4)
  memory: int = option(1024)
  rounds: int = option(3)
  parts: tuple[str, ...] = option(PARTS, PARTS)


class OffloadBenchmark(harness.Benchmark):
  """Benchmark of one prompt and of a block; a row is a contestant."""

  name = "offload"
  options = OffloadSettings
  columns = ("kind",)
  parts = PARTS
  files = ("json",)
  summary_name = "ratios"

  def __init__(self, settings: Any):
    super().__init__(settings)
    if not settings.folder:
      raise OptionError(
        "folder", "nothing", "a folder for the model", "pass --folder=DIR"
      )
    if not pathlib.Path(settings.folder).exists():
      made_model(settings.folder, settings.layers)
    self._results: dict[str, Row] | None = None

  @property
  def cases(self) -> list[str]:
    return [part for part in PARTS if part in self.settings.parts]

  def row(self, case: str, report: Report) -> Row:
    if self._results is None:
      self._results = self._measure_all(report)
    return {"kind": case, **self._results[case]}

  def _measure_all(self, report: Report) -> dict[str, Row]:
    """Measures all contestants, in turn."""
    s, results = self.settings, {}
    runs: dict[tuple[str, int], list[Row]] = {}
    forecasts: list[Row] = []
    with tempfile.TemporaryDirectory(dir=s.scratch or None) as scratch:
      workers: dict[str, _ContestantProcess] = {}
      try:
        for name in self.cases:
          command = _command(name, s, scratch)
          if command is None:
            results[name] = {"reason": "accelerate is not installed"}
            continue
          report(0.05, f"starting {name}")
          workers[name] = _ContestantProcess(command)
        for n in range(s.rounds + 1):
          for name, worker in workers.items():
            for rows in (1, s.rows):
              report((n + 1) / (s.rounds + 2), f"{name}, {rows} prompts")
              run = worker.ask(rows, s.prompt_tokens, s.new_tokens)
              if n:
                # The first run compiles.
                runs.setdefault((name, rows), []).append(run)
            if name == "ours":
              report((n + 1) / (s.rounds + 2), "ours, another size")
              run = worker.ask(*self._forecast_size(), 1)
              if n:
                forecasts.append(run)
      finally:
        for worker in workers.values():
          worker.close()
    for name in workers:
      row: Row = {}
      for label, rows in (("one", 1), ("block", s.rows)):
        measured = runs[name, rows]
        seconds = statistics.median(x["seconds"] for x in measured)
        row[label] = rows * s.new_tokens / seconds
        for kind in ("peak", "written"):
          row[kind] = max(row.get(kind, 0), *(x[kind] for x in measured))
        row |= {k: x for k, x in measured[-1].items() if k.startswith("log")}
      results[name] = row | {"gain": row["block"] / row["one"]}
    if forecasts:
      median_of = lambda key: statistics.median(x[key] for x in forecasts)
      results["ours"] |= {
        "other_s": median_of("seconds"),
        "other_forecast_s": median_of("forecast_s"),
      }  # fmt: skip
    return results

  def _forecast_size(self) -> tuple[int, int, int]:
    """Rows, prompt tokens and new tokens of the forecast call."""
    s = self.settings
    return max(1, s.rows // 4), 2 * s.prompt_tokens + 1, s.new_tokens + 2

  def table(self, case: str, row: Row) -> str:
    if "reason" in row:
      return f"{case:11} {row['reason']}"
    text = (
      f"{case:11} {row['one']:7.3f} tokens/s of one prompt, "
      f"{row['block']:7.3f} of {self.settings.rows}: {row['gain']:.1f} times; "
      f"at most {row['peak'] / _MIB:,.0f} MiB, "
      f"{row['written'] / _MIB:,.0f} of them written"
    )
    if "log_predicted_s" in row:
      text += (
        f"; a pass took {row['log_pass_s']:.2f} s, by its log "
        f"{row['log_predicted_s']:.2f} s"
      )
    if "other_s" in row:
      rows, prompt, new = self._forecast_size()
      text += (
        f"; {rows} prompts of {prompt} and {new} tokens took "
        f"{row['other_s']:.2f} s, forecast {row['other_forecast_s']:.2f} s"
      )
    return text

  def summary(self, rows: Sequence[Row]) -> Row:
    by = {row["kind"]: row for row in rows}
    ratios: Row = {}
    ours, peer = by.get("ours"), by.get("accelerate")
    if ours is not None and "one" in ours:
      ratios["block over one"] = ours["gain"]
      ratios["within memory"] = bool(
        ours["peak"] <= self.settings.memory * _MIB
      )
      if "other_s" in ours:
        ratios["forecast error"] = (
          ours["other_forecast_s"] / ours["other_s"] - 1
        )
      if peer is not None and "one" in peer:
        for name in ("one", "block"):
          ratios[f"{name}, over accelerate"] = ours[name] / peer[name]
    return ratios


def _command(
  name: str, settings: OffloadSettings, scratch: str
) -> list[str] | None:
  """Command that runs a contestant; None if it is not installed."""
  folder = settings.folder
  if name == "ours":
    limit = str(settings.memory * _MIB)
    return [sys.executable, "-m", __name__, folder, limit]
  if not settings.peer and importlib.util.find_spec("accelerate") is None:
    return None
  assert offload_peer.__file__ is not None
  python = settings.peer or sys.executable
  return [python, offload_peer.__file__, folder, scratch]


class _ContestantProcess:
  """Process that answers each line with a line of JSON."""

  def __init__(self, command: Sequence[str]):
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
      if command[1] == "-m"
      else None,
    )
    self._answer()

  def ask(self, *numbers: int) -> Row:
    assert self._process.stdin is not None
    print(*numbers, file=self._process.stdin, flush=True)
    return self._answer()

  def _answer(self) -> Row:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise OptionError(
        "contestant",
        f"a process that ended with status {self._process.wait()}",
        "an answer",
        "see what it wrote; leave it out with --parts",
      )
    return json.loads(line)

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    try:
      self._process.wait(30)
    except subprocess.TimeoutExpired:
      self._process.kill()


def made_model(folder: str, layers: int) -> None:
  """Writes a Llama of random bfloat16 weights, a file for each layer.

  Args:
    folder: Folder to create.
    layers: Number of layers, 34.6 million weights each.
  """
  embed, hidden, heads, kv_heads, vocab = 1536, 6144, 12, 4, 1024
  config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": vocab,
    "num_hidden_layers": layers,
    "hidden_size": embed,
    "intermediate_size": hidden,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
  }
  kv = embed // heads * kv_heads
  block = {
    "input_layernorm.weight": (embed,),
    "post_attention_layernorm.weight": (embed,),
    "self_attn.q_proj.weight": (embed, embed),
    "self_attn.k_proj.weight": (kv, embed),
    "self_attn.v_proj.weight": (kv, embed),
    "self_attn.o_proj.weight": (embed, embed),
    "mlp.gate_proj.weight": (hidden, embed),
    "mlp.up_proj.weight": (hidden, embed),
    "mlp.down_proj.weight": (embed, hidden),
  }
  outer = {"model.embed_tokens.weight": (vocab, embed),
           "model.norm.weight": (embed,)}  # fmt: skip
  root = pathlib.Path(folder)
  root.mkdir(parents=True)
  rng = np.random.default_rng(0)
  pool = (0.02 * rng.standard_normal(1 << 24, np.float32)).astype(jnp.bfloat16)
  index: dict[str, str] = {}
  for n in range(-1, layers):
    tensors: dict[str, tuple[int, ...]] = dict(outer)
    if n >= 0:
      tensors = {f"model.layers.{n}.{k}": x for k, x in block.items()}
    file = f"model-{n + 2:05}-of-{layers + 1:05}.safetensors"
    _write(root / file, tensors, pool, rng)
    index |= dict.fromkeys(tensors, file)
  text = json_text({"metadata": {}, "weight_map": index})
  (root / "model.safetensors.index.json").write_text(text)
  # config.json last: its presence marks a complete model.
  (root / "config.json").write_text(json_text(config))


def _write(
  path: pathlib.Path,
  tensors: dict[str, tuple[int, ...]],
  pool: np.ndarray,
  rng: np.random.Generator,
) -> None:
  """Writes a safetensors file with slices of a pool of random numbers."""
  header, at = {}, 0
  for name, shape in tensors.items():
    size = 2 * math.prod(shape)
    header[name] = {
      "dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]
    }  # fmt: skip
    at += size
  text = json_text(header).encode()
  text += b" " * (-len(text) % 8)
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for shape in tensors.values():
      size = math.prod(shape)
      start = int(rng.integers(0, pool.size - size))
      file.write(pool[start : start + size].tobytes())


def main(folder: str, limit: str) -> None:
  """Runs our contestant with at most `limit` bytes; see `offload_peer`."""
  resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
  memory = offload_peer.MemoryWatch()
  import ringjax as rj
  from ringjax.infer.prefill import padded

  model = rj.models.load(folder, placement="disk")
  print(json_text({"ready": True}), flush=True)
  runs_by_size: dict[tuple[int, ...], list[StreamedRun]] = {}
  for line in sys.stdin:
    rows, prompt, new, *forecast_only = map(int, line.split())
    tokens = np.ones((rows, prompt), np.int32)
    size = {"rows": rows, "prompt": padded(prompt, 1), "new": new}
    record: Row = {}
    # The first run of each size compiles.
    logged_runs = [run for runs in runs_by_size.values() for run in runs[1:]]
    if forecast_only and logged_runs:
      record["forecast_s"] = offload_measured.forecast(logged_runs, **size)
    num_events, start = len(model.transfers()), time.monotonic()
    rj.infer.generate(model, tokens, max_new_tokens=new)
    end = time.monotonic()
    events = model.transfers()[num_events:]
    record |= {"seconds": end - start, **memory.peaks()}
    if not forecast_only:
      run = StreamedRun(**size, start=start, end=end, events=events)
      runs_by_size.setdefault((rows, prompt, new), []).append(run)
    if new > 3:
      costs = offload_measured.streamed_costs(events)
      record |= {
        "log_pass_s": costs.pass_s,
        "log_predicted_s": costs.predicted_s,
        "log_read_bytes_s": costs.read_bytes_s,
      }
    print(json_text(record), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
