"""Loss of a model with products of 8-bit integers (llm.npu).

Reads held-out texts of Python's library with a model in floats and with linear
maps by integers, and prints a JSON object: for each way the loss, nats a token,
and the distance of the logits from those in floats, relative to their norm.
"chunked" is `shadow` with the text read in chunks into a cache: a token's
integers do not depend on other tokens.

  python -m launch.calibrate --model=smollm2-135m --ranges --out=DIR
  python -m benchmarks.integer_products --ranges=DIR
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.json_text import json_text
from ringjax.models.transformer import Transformer

# Options of `rj.infer.integer_model` by the name of the way.
WAYS: dict[str, dict[str, Any]] = {
  "no shadow": dict(shadow=0),
  "shadow": dict(shadow=16),
  "shadow, 85 % pruned": dict(shadow=16, prune=0.85),
  "shadow, a scale a layer": dict(shadow=16, scales="tensor"),
}


def held_out(
  tokenizer: AnyTokenizer, tokens: int, rows: int
) -> Int[np.ndarray, "B T"]:
  """Ids of texts spread over the held-out files, int32 [rows, tokens]."""
  texts = documents.library(held_out=True)
  ids = np.concatenate([np.asarray(tokenizer.encode(text)) for text in texts])
  starts = np.linspace(0, ids.size - tokens, rows).astype(int)
  return np.stack([ids[start : start + tokens] for start in starts])


def logits_of(
  model: Transformer, ids: np.ndarray, chunk: int | None
) -> Float[np.ndarray, "B T V"]:
  """Logits, float32 [rows, T, V], read in chunks into a cache or at once."""
  call = jax.jit(lambda model, ids: model(ids))
  if chunk is None:
    return np.concatenate([np.asarray(call(model, row[None])) for row in ids])
  append = jax.jit(lambda model, ids, cache: model(ids, cache=cache))
  rows = []
  for row in ids:
    cache, parts = model.init_cache(1, ids.shape[1], dtype=jnp.float32), []
    for start in range(0, ids.shape[1], chunk):
      part, cache = append(model, row[None, start : start + chunk], cache)
      parts.append(np.asarray(part))
    rows.append(np.concatenate(parts, 1))
  return np.concatenate(rows)


def loss(logits: np.ndarray, ids: np.ndarray) -> float:
  """Mean loss of all tokens but the first, nats a token."""
  scores = jax.nn.log_softmax(jnp.asarray(logits[:, :-1]))
  return -float(jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean())


def main() -> None:
  """Measures and prints losses."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--ranges", required=True)
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--rows", type=int, default=4)
  parser.add_argument("--chunk", type=int, default=128)
  flags = parser.parse_args()
  model = rj.models.load(flags.model, dtype="float32")
  ids = held_out(Tokenizer.load(flags.model), flags.tokens, flags.rows)
  floats = logits_of(model, ids, None)
  ways = {"floats": {"loss": loss(floats, ids), "distance": 0.0}}
  chunks = {"shadow": {"chunked": flags.chunk}}
  for name, options in WAYS.items():
    integers = rj.infer.integer_model(model, flags.ranges, **options)
    sizes = {name: None} | chunks.get(name, {})
    for label, chunk in sizes.items():
      logits = logits_of(integers, ids, chunk)
      ways[label] = {
        "loss": loss(logits, ids),
        "distance": float(
          np.linalg.norm(logits - floats) / np.linalg.norm(floats)
        ),
      }
  print(json_text({"model": flags.model, "tokens": ids.size, "ways": ways}))


if __name__ == "__main__":
  main()
