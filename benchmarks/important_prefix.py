"""Loss of a continuation after the important part of a prefix (IMPRESS).

Takes texts of Python's manual (`pydoc_data.topics`), cuts each into a prefix, a
question and its continuation, and prints the mean loss of the continuation's
tokens, in nats, by the part of the prefix that is kept and the way it is
chosen:

  few probes   by the question's queries, layer by layer, of probe heads that
               are chosen on two more texts (--probes)
  first 3      by the queries of the first three heads, or of each head
  own          each head keeps its own tokens in every layer
  random       random tokens for each layer, with the first four
  newest       the last tokens, with the first four
  newest only  the last tokens

With --again the question is a part of the prefix's first half, and the
continuation the text after it there, which only the prefix can predict.

  python -m benchmarks.important_prefix --tokens=1024 --texts=8

With --json the last line is an object of all losses. The default model is
SmolLM2, which `python -m launch.fetch smollm2-135m` downloads.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.infer.contexts import ImportantPrefixes, probe_heads
from ringjax.json_text import json_text
from ringjax.store import KeptTokens

# First tokens, to which all heads attend whatever they are.
_FIRST = 4


def texts(
  tokenizer: Tokenizer, size: int, count: int
) -> list[Int[np.ndarray, " T"]]:
  """Cuts the manual into `count` texts of `size` tokens, int32 each."""
  topics = pydoc_data.topics.topics
  joined = "\n".join(topics[name] for name in sorted(topics))
  ids = np.asarray(tokenizer.encode(joined), np.int32)
  return [ids[n * size : (n + 1) * size] for n in range(count)]


def chosen(
  arrays: tuple[np.ndarray, np.ndarray], tokens: np.ndarray
) -> list[KeptTokens]:
  """Keeps `tokens`, int [L, k], of a prefix for all heads of each layer."""
  kept_tokens = []
  for layer, at in enumerate(np.sort(tokens, 1)):
    keys, values = (x[layer][:, at] for x in arrays)
    kept_tokens.append(
      KeptTokens(
        tokens=np.tile(at, (keys.shape[0], 1)),
        similarity=1.0,
        threshold=0.0,
        shared=True,
        importance=np.zeros(keys.shape[1], np.float32),
        keys=keys,
        values=values,
      )
    )
  return kept_tokens


def by_rule(
  how: str, layers: int, size: int, count: int, rng: np.random.Generator
) -> Int[np.ndarray, "L _"]:
  """Tokens that a rule keeps in each layer, int [L, k]."""
  if how == "newest only":
    return np.tile(np.arange(size - count, size), (layers, 1))
  num_chosen = count - _FIRST
  last = np.arange(size - num_chosen, size)
  draw = lambda: rng.choice(np.arange(_FIRST, size), num_chosen, replace=False)
  first = np.arange(_FIRST)
  return np.stack(
    [
      np.concatenate([first, draw() if how == "random" else last])
      for _ in range(layers)
    ]
  )


def main() -> None:
  """Measures and prints losses."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="smollm2-135m")
  parser.add_argument("--tokens", type=int, default=1024)
  parser.add_argument("--question", type=int, default=32)
  parser.add_argument("--continuation", type=int, default=96)
  parser.add_argument("--texts", type=int, default=8)
  parser.add_argument("--probes", type=int, default=1)
  parser.add_argument("--chunk", type=int, default=32)
  parser.add_argument("--again", action="store_true")
  parser.add_argument("--json", action="store_true")
  parser.add_argument("--parts", default="1,0.5,0.25,0.1")
  flags = parser.parse_args()
  model = rj.models.load(flags.model, dtype="float32")
  size = flags.tokens + flags.question + flags.continuation
  rows = texts(Tokenizer.load(flags.model), size, flags.texts + 2)
  cuts = [flags.tokens, flags.tokens + flags.question]
  rows = [np.split(row, cuts) for row in rows]
  rng = np.random.default_rng(1)
  if flags.again:
    for row in rows:
      at = int(rng.integers(flags.tokens // 8, flags.tokens // 2))
      end = at + flags.question
      row[1] = row[0][at:end]
      row[2] = row[0][end : end + flags.continuation]
  # Probe heads are chosen on separate texts.
  start = time.monotonic()
  heads = probe_heads(
    model, *zip(*[row[:2] for row in rows[-2:]], strict=True),
    count=flags.probes,
  )  # fmt: skip
  print(f"probe heads: {heads.tolist()}, {time.monotonic() - start:.0f} s")

  @jax.jit
  def loss(
    model: rj.models.Transformer,
    cache: PyTree,
    question: jax.Array,
    continuation: jax.Array,
  ) -> jax.Array:
    """Loss of each token of the continuation."""
    ids = jnp.concatenate([question, continuation])[None]
    logits, _ = model(ids, cache=cache)
    logits = logits[0, question.size - 1 : -1].astype(jnp.float32)
    return -jnp.take_along_axis(
      jax.nn.log_softmax(logits), continuation[:, None], 1
    )

  losses_by_part: dict[str, dict[str, float]] = {}
  vectors: dict[str, dict[str, int]] = {}
  for part in map(float, flags.parts.split(",")):
    sums: dict[str, list[float]] = {}
    with rj.store.Store(host=1 << 33) as store:
      options = dict(important=part, chunk=flags.chunk)
      work = ImportantPrefixes(model, store, probes=heads, **options)
      ways = {"few probes": work}
      if part < 1:
        ways["first 3"] = ImportantPrefixes(model, store, **options)
        ways["own"] = ImportantPrefixes(model, store, alpha=0, **options)
      for prefix, question, continuation in rows[:-2]:
        kinds = {way: x.keep(prefix, question) for way, x in ways.items()}
        if part < 1:
          arrays = work.read(prefix)
          count = kinds["own"][0].tokens.shape[1]
          for way in ("random", "newest", "newest only"):
            tokens = by_rule(way, len(heads), flags.tokens, count, rng)
            kinds[way] = chosen(arrays, tokens)
        for way, kept_tokens in kinds.items():
          session = work.behind(
            [prefix], [kept_tokens], capacity=question.size + continuation.size
          )
          token_losses = loss(model, session.cache, question, continuation)
          sums.setdefault(way, []).append(float(token_losses.mean()))
    vectors[str(part)] = {way: x.counters.vectors for way, x in ways.items()}
    losses_by_part[str(part)] = {
      way: float(np.mean(losses)) for way, losses in sums.items()
    }
    for way, x in ways.items():
      counters = x.counters
      print(
        f"part {part} {way}: {counters.vectors:,} vectors, "
        f"{counters.chunk_bytes / 1e6:.1f} MB of chunks, "
        f"{counters.fallbacks} of {counters.layers} layers fell back"
      )
    for way, losses in sums.items():
      print(f"part {part} {way}: {np.mean(losses):.4f}", flush=True)
  if flags.json:
    print(json_text({"losses": losses_by_part, "vectors": vectors}))


if __name__ == "__main__":
  main()
