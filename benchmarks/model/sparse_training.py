"""Models with sparse attention beside full attention: facts recalled, and loss.

For each of --models (folders of the byte model, or "small", which reads all
keys) and each of --lengths prints a line: keys that a query reads at most,
shares of answers that are right and of their bytes for each of --kinds, and the
loss of held-out files of Python's library in nats a byte. With --out a JSON
file. --sparse makes dense models sparse first, without training.

  python -m benchmarks.model.sparse_training --models=small,DIR/model \\
      --lengths=1024,2048
  python -m benchmarks.model.sparse_training --models=small \\
      --sparse=moba:block=32,count=4 --lengths=1024
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np

import ringjax as rj
from launch.shared.sources import RECALL
from ringjax.data import Bytes
from ringjax.data.tasks import documents
from ringjax.data.tasks.filler import Lines
from ringjax.eval.perplexity import perplexity
from ringjax.eval.recall_accuracy import recall_accuracy
from ringjax.json_text import json_text
from ringjax.models import small

# Options of sources that ask for single facts.
_OPTIONS = {"questions": {"facts": 8, "questions": 4}}


def keys_of(model: rj.models.Transformer, length: int) -> int:
  """Most keys that a query of a layer reads, in the layer that reads fewest."""
  readings = [getattr(kind, "reading", None) for kind in model.kinds]
  limits = [x.most for x in readings if x is not None and x.most is not None]
  return min([*limits, length])


def measure(
  model: rj.models.Transformer,
  length: int,
  kinds: list[str],
  examples: int,
  rows: int,
) -> dict[str, Any]:
  """Figures of a model at one length."""
  texts = documents.library(held_out=True)
  filler = Lines(text="\n".join(texts[:20]))
  record: dict[str, Any] = {"length": length, "keys": keys_of(model, length)}
  for kind in kinds:
    source = RECALL[kind](
      tokenizer=Bytes(), filler=filler, length=length, **_OPTIONS.get(kind, {})
    )
    accuracy = recall_accuracy(model, source, examples=examples)
    record[kind] = accuracy.answers
    record[f"{kind}_bytes"] = accuracy.tokens
    record[f"{kind}_count"] = accuracy.count
  ids = np.frombuffer("\n".join(texts).encode(), np.uint8).astype(np.int32)
  token_rows = [ids[n * length : (n + 1) * length] for n in range(rows)]
  curve = perplexity(model, token_rows, length=length, rows=rows, bos=256)
  record["loss"] = curve.mean
  return record


def main() -> None:
  """Measures and prints the figures."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--models", default="small")
  parser.add_argument("--sparse", default="")
  parser.add_argument("--lengths", default="1024,2048")
  parser.add_argument("--kinds", default="questions,pairs")
  parser.add_argument("--examples", type=int, default=8)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--out", type=pathlib.Path, default=None)
  flags = parser.parse_args()
  kinds, records = flags.kinds.split(","), []
  print(f"| model | tokens | keys | {' | '.join(kinds)} | loss |")
  print("|---" * (4 + len(kinds)) + "|")
  for name in flags.models.split(","):
    folder = small.path() if name == "small" else name
    model = rj.models.load(folder, dtype="float32")
    if flags.sparse:
      model = rj.train.with_sparse_attention(model, flags.sparse)
    for length in map(int, flags.lengths.split(",")):
      record = measure(model, length, kinds, flags.examples, flags.rows)
      shares = " | ".join(
        f"{record[kind]:.2f}, {record[f'{kind}_bytes']:.3f}" for kind in kinds
      )
      print(
        f"| {name} | {length:,} | {record['keys']:,} | {shares} | "
        f"{record['loss']:.3f} |",
        flush=True,
      )
      records.append({"model": name, "sparse": flags.sparse, **record})
  if flags.out is not None:
    flags.out.write_text(json_text(records) + "\n", "utf-8")


if __name__ == "__main__":
  main()
