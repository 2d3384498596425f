"""Tokens a second by the placement of a model's weights, and by rows.

Loads a folder once for each placement, each time in a separate process, lets it
continue prompts of held-out text, and prints a JSON object: for each placement
and number of rows, tokens a second, bytes read from disk for a step, and
whether the tokens equal those of the first placement; and the growth of the
process's memory, with programs.

  python -m benchmarks.offloaded --model=DIR --placements=device,host,disk
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.integer_products import held_out
from ringjax.json_text import json_text


def high_water() -> int:
  """Peak resident bytes of this process."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))


def measured(asked: argparse.Namespace, placement: str) -> dict[str, Any]:
  """Measures one placement; returns its figures and tokens."""
  import ringjax as rj

  start_bytes = high_water()
  model = rj.models.load(asked.model, placement=placement, dtype="float32")
  ids = held_out(rj.data.Tokenizer.load(asked.model), asked.prompt, asked.most)
  rows: dict[int, Any] = {}
  for count in asked.rows:
    times: list[float] = []
    note = lambda _, times=times: times.append(time.monotonic())
    options = dict(max_new_tokens=asked.new)
    rj.infer.generate(model, ids[:count], max_new_tokens=2)
    read = model.placement_report().bytes_read
    new = rj.infer.generate(model, ids[:count], stream=note, **options)
    read = model.placement_report().bytes_read - read
    step = (times[-1] - times[0]) / (len(times) - 1)
    rows[count] = {
      "tokens_per_s": count / step,
      "read_per_step": read / asked.new,
      "tokens": np.asarray(new.tokens).tolist(),
    }
  report = model.placement_report()
  return {
    "weights": {
      "device": report.device_bytes,
      "host": report.host_bytes,
      "disk": report.disk_bytes,
    },
    "buffer": report.peak_buffer_bytes,
    "grown": high_water() - start_bytes,
    "rows": rows,
  }


def main() -> None:
  """Measures and prints all placements."""
  parser = argparse.ArgumentParser(description=__doc__)
  numbers = lambda text: [int(x) for x in text.split(",")]
  parser.add_argument("--model", required=True)
  parser.add_argument("--placements", default="device,host,disk")
  parser.add_argument("--rows", type=numbers, default=[1, 8])
  parser.add_argument("--prompt", type=int, default=64)
  parser.add_argument("--new", type=int, default=9)
  parser.add_argument("--alone", help="One placement, in this process.")
  flags = parser.parse_args()
  flags.most = max(flags.rows)
  if flags.alone:
    print(json_text(measured(flags, flags.alone)))
    return
  command = [sys.executable, "-m", "benchmarks.offloaded", *sys.argv[1:]]
  placements: dict[str, Any] = {}
  for text in flags.placements.split(","):
    alone = subprocess.run(
      [*command, f"--alone={text}"], stdout=subprocess.PIPE, check=True
    )
    placements[text] = json.loads(alone.stdout.decode().splitlines()[-1])
  first = next(iter(placements.values()))["rows"]
  want = {count: x["tokens"] for count, x in first.items()}
  for placement in placements.values():
    for count, x in placement["rows"].items():
      x["equal"] = x.pop("tokens") == want[count]
  print(json_text({"model": flags.model, "placements": placements}))


if __name__ == "__main__":
  main()
