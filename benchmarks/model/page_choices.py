"""Choices of pages of host memory, by recall, loss and bytes, on a real model.

Reads held-out files of Python's library: --prompt tokens as a prompt, then
--tokens tokens one by one, each of which reads the pages that its queries
choose. Prints a line for each of --kinds, and with --out a JSON file: the part
of the attention and of the --top best keys that is read (mean and least of the
layers, at one of --every tokens), the relative error of the attention's output,
the loss over all pages in nats, the bytes that a token copies from host memory,
and the bytes on the device of a token of host memory (landmarks, coefficients).

  python -m benchmarks.model.page_choices --model=smollm2-135m --prompt=2048

Kinds are options after select:, separated by a semicolon.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax
import numpy as np

import ringjax as rj
from benchmarks.model.sparse_prompts import texts_of
from ringjax.bench import timing
from ringjax.data import Tokenizer
from ringjax.eval import page_recall
from ringjax.json_text import json_text
from ringjax.kv.offload.chosen_tiered import ChosenTieredCache

_KINDS = (
  "budget=256,page=16;"
  "budget=256,page=16,landmarks=means;"
  "budget=192,page=16,landmarks=means,outlier_pages=4;"
  "budget=256,page=16,landmarks=hashes,hash_bits=8,hash_tables=75;"
  "budget=256,page=128,landmarks=clusters;"
  "budget=256,page=16,unrotated=True,rank=32;"
  "budget=192,page=16,landmarks=means,outlier_pages=4,unrotated=True,rank=32"
)


def device_bytes(model: rj.models.Transformer, kind: str, tokens: int) -> float:
  """Bytes on the device, of landmarks and coefficients, of a token."""
  cache = model.init_cache_spec(1, tokens, kind=model.cache_kind(kind))
  assert isinstance(cache, ChosenTieredCache)
  arrays = jax.tree.leaves((cache.landmarks, cache.low_rank))
  total = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)
  return total / cache.held.capacity


def main() -> None:
  """Measures and prints the figures."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--prompt", type=int, default=2048)
  parser.add_argument("--tokens", type=int, default=128)
  parser.add_argument("--every", type=int, default=8)
  parser.add_argument("--top", type=int, default=64)
  parser.add_argument("--device", type=int, default=64)
  parser.add_argument("--hot", type=int, default=512)
  parser.add_argument("--rows", type=int, default=1)
  parser.add_argument("--kinds", default=_KINDS)
  parser.add_argument("--out", type=pathlib.Path, default=None)
  flags = parser.parse_args()
  model = rj.models.load(flags.model, dtype="float32")
  length = flags.prompt + flags.tokens + 1
  texts = texts_of(Tokenizer.load(flags.model), length, flags.rows)
  ids = np.stack([x[:length] for x in texts])
  sizes = f"device={flags.device},hot={flags.hot}"
  records: list[dict[str, Any]] = []
  print(
    "| kind | attention | least layer | recall | least layer | error | loss | "
    "bytes copied a token | device bytes a token | misses copied ahead |"
  )
  print("|---|" + "---:|" * 9, flush=True)
  base = None
  for options in ["budget=1.0,page=16", *flags.kinds.split(";")]:
    kind = f"select:{sizes},{options}"
    result = page_recall(
      model,
      ids,
      kind,
      prompt=flags.prompt,
      every=flags.every,
      top=flags.top,
    )
    base = result.nll if base is None else base
    copied = result.fetches.bytes / (flags.tokens * flags.rows)
    resident_bytes = device_bytes(model, kind, length)
    records.append(
      result.record() | {"device_bytes": resident_bytes, "copied_bytes": copied}
    )
    fetches = result.fetches
    ahead = f"{fetches.early / max(1, fetches.misses):.1%}"
    attention = [x.attention for x in result.layers]
    recall = [x.recall for x in result.layers]
    print(
      f"| `{options}` | {result.attention:.1%} | {min(attention):.1%} | "
      f"{result.recall:.1%} | {min(recall):.1%} | {result.error:.1%} | "
      f"{result.nll - base:+.4f} | "
      f"{copied:,.0f} | {resident_bytes:,.0f} | {ahead} |",
      flush=True,
    )
  if flags.out is not None:
    timing.write_json(str(flags.out), records)
  else:
    print(json_text(records, indent=1))


if __name__ == "__main__":
  main()
