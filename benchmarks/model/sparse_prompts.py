"""Prompts that are read by chosen tiles, against dense attention.

Reads held-out files of Python's library, each a prompt of --lengths tokens, by
dense attention and by each of --patterns. Prints a line of each, and with
--out a JSON file: the part of the tiles that is computed, the attention that is
left out (mean of the layers, and the largest, at sampled queries), the loss of
all tokens and of the last half in nats, and the seconds of a prompt: clock,
and of all processors, which say more where other processes run. Methods take
turns, prompt by prompt; seconds are medians after one call that compiles.

  python -m benchmarks.model.sparse_prompts --model=smollm2-135m \\
      --lengths=2048,4096,8192 --patterns=xattention,threshold=0.9
  python -m benchmarks.model.sparse_prompts --model=smollm2-135m \\
      --lengths=16384 --rope_scaling=yarn:factor=2

Several patterns are separated by a semicolon.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from typing import Any

import numpy as np

import ringjax as rj
from ringjax.bench import timing
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.eval.perplexity import reader
from ringjax.json_text import json_text

_PATTERNS = "xattention,threshold=0.9;xattention,threshold=0.8"


def texts_of(tokenizer: Tokenizer, length: int, rows: int) -> list[np.ndarray]:
  """Token ids of some texts that are longer than a prompt.

  Files are joined until a text is long enough.
  """
  texts: list[np.ndarray] = []
  ids: list[int] = []
  for text in documents.library(held_out=True):
    ids += np.asarray(tokenizer.encode(text)).tolist()
    if len(ids) > length + 1:
      texts.append(np.asarray(ids, np.int32))
      ids = []
    if len(texts) == rows:
      break
  return texts


def seconds_of(
  model: rj.models.Transformer, ids: np.ndarray, method: str
) -> tuple[float, float, Any]:
  """Seconds of one prompt and its first token, and the call's report.

  Returns:
    (seconds of the clock, seconds of all processors, report).
  """
  reports: list[Any] = []
  start, busy = time.perf_counter(), time.process_time()
  rj.infer.generate(
    model, ids[None], max_new_tokens=1, prefill=method, report=reports.append
  )
  return (
    time.perf_counter() - start,
    time.process_time() - busy,
    reports[0],
  )


def measure(
  model: rj.models.Transformer,
  texts: list[np.ndarray],
  length: int,
  methods: list[str],
  rounds: int,
) -> list[dict[str, Any]]:
  """Figures of each method for prompts of one length."""
  times: dict[str, list[tuple[float, float]]] = {m: [] for m in methods}
  tiles: dict[str, list[Any]] = {method: [] for method in methods}
  for n in range(rounds + 1):
    for method in methods:
      # The first answer's token has room in the model's context.
      prompt = texts[n % len(texts)][: length - 1]
      *seconds, report = seconds_of(model, prompt, method)
      if n or rounds == 0:
        times[method].append((seconds[0], seconds[1]))
      if report.tiles is not None:
        tiles[method].append(report.tiles)
  records = []
  for method in methods:
    curve = reader(
      model, texts, length=length, rows=len(texts), prefill=method
    )(lambda done: None)
    mean = lambda name, found=tiles[method]: (
      float(np.mean([getattr(x, name) for x in found])) if found else None
    )
    records.append({
      "tokens": length,
      "prefill": method,
      "computed": mean("computed"),
      "left_out": mean("left_out"),
      "left_out_by_layer": [
        float(np.mean([x.layers[n].left_out for x in tiles[method]]))
        for n in range(len(tiles[method][0].layers) if tiles[method] else 0)
      ],
      "loss": curve.mean,
      "last_loss": curve.last_nll,
      "seconds": statistics.median(x for x, _ in times[method]),
      "processor_seconds": statistics.median(x for _, x in times[method]),
    })  # fmt: skip
  return records


def line(record: dict[str, Any], dense: dict[str, Any]) -> str:
  """A line of the table."""
  part = lambda x: "all" if x is None else f"{x:.1%}"
  by_layer = record["left_out_by_layer"]
  left_out = (
    f"{np.mean(by_layer):.1%}, {max(by_layer):.1%}" if by_layer else "-"
  )
  return (
    f"| {record['tokens']:,} | {record['prefill']} | "
    f"{part(record['computed'])} | "
    f"{left_out} | "
    f"{record['loss']:.4f} | {record['loss'] - dense['loss']:+.4f} | "
    f"{record['last_loss'] - dense['last_loss']:+.4f} | "
    f"{record['seconds']:.1f} | {record['processor_seconds']:.1f} | "
    f"{dense['processor_seconds'] / record['processor_seconds']:.2f} |"
  )


def main() -> None:
  """Measures and prints the figures."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--rope_scaling", default=None)
  parser.add_argument("--lengths", default="2048,4096,8192")
  parser.add_argument("--patterns", default=_PATTERNS)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--out", type=pathlib.Path, default=None)
  flags = parser.parse_args()
  model = rj.models.load(
    flags.model, dtype="float32", rope_scaling=flags.rope_scaling
  )
  tokenizer = Tokenizer.load(flags.model)
  patterns = flags.patterns.split(";")
  methods = ["blockwise", *(f"sparse:{text}" for text in patterns)]
  record: dict[str, Any] = {
    "model": flags.model, "rope_scaling": flags.rope_scaling,
    "rows": flags.rows, "figures": [],
  }  # fmt: skip
  print(
    "| tokens | prefill | tiles | left out | loss | over dense | last half | s "
    "| processor s | times dense |"
  )
  print("|---:|---|" + "---:|" * 8, flush=True)
  for length in map(int, flags.lengths.split(",")):
    texts = texts_of(tokenizer, length, flags.rows)
    figures = measure(model, texts, length, methods, flags.rounds)
    for figure in figures:
      print(line(figure, figures[0]), flush=True)
    record["figures"] += figures
    if flags.out is not None:
      timing.write_json(str(flags.out), record)
  if flags.out is None:
    print(json_text(record, indent=1))


if __name__ == "__main__":
  main()
