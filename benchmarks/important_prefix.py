"""What a continuation loses behind the important part of a prefix (IMPRESS).

Takes texts of the manual that Python brings along (`pydoc_data.topics`), cuts
each into a prefix, a question and its continuation, and prints the mean loss of
the continuation's tokens, in nats, by how much of the prefix is kept and how
that is chosen:

  few probes  by the queries of the question, layer by layer, which the probe
          heads that are chosen on two more texts tell (--probes)
  first 3     the same, the first three heads tell, or each its own
  own         each head keeps its own in every layer
  random     tokens drawn for each layer, the first four kept
  newest     the last tokens, the first four kept
  newest only  the last tokens

With --again the question is a piece of the prefix's first half and the
continuation what stands behind it there: what only the prefix tells.

  python -m benchmarks.important_prefix --tokens=1024 --texts=8

With --json the last line is an object of all losses. Without --model of
SmolLM2, which `python -m launch.fetch smollm2-135m` brings.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.infer.contexts import ImportantPrefixes, probe_heads
from ringjax.json_text import json_text
from ringjax.store import KeptTokens

# Tokens that all heads look at whatever they say.
_FIRST = 4


def texts(tokenizer: Tokenizer, size: int, count: int) -> list[np.ndarray]:
  """Some texts of `size` tokens, int32 each."""
  topics = pydoc_data.topics.topics
  joined = "\n".join(topics[name] for name in sorted(topics))
  ids = np.asarray(tokenizer.encode(joined), np.int32)
  return [ids[n * size : (n + 1) * size] for n in range(count)]


def chosen(
  arrays: tuple[np.ndarray, np.ndarray], tokens: np.ndarray
) -> list[KeptTokens]:
  """The same of a prefix kept by all heads, for each layer, int [L, k]."""
  kept = []
  for layer, at in enumerate(np.sort(tokens, 1)):
    keys, values = (x[layer][:, at] for x in arrays)
    kept.append(
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
  return kept


def by_rule(
  how: str, layers: int, size: int, count: int, rng: np.random.Generator
) -> np.ndarray:
  """Tokens that a rule keeps, int [L, k]."""
  if how == "newest only":
    return np.tile(np.arange(size - count, size), (layers, 1))
  rest = count - _FIRST
  last = np.arange(size - rest, size)
  draw = lambda: rng.choice(np.arange(_FIRST, size), rest, replace=False)
  first = np.arange(_FIRST)
  return np.stack(
    [
      np.concatenate([first, draw() if how == "random" else last])
      for _ in range(layers)
    ]
  )


def main() -> None:
  """Measures and prints."""
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
  asked = parser.parse_args()
  model = rj.models.load(asked.model, dtype="float32")
  size = asked.tokens + asked.question + asked.continuation
  rows = texts(Tokenizer.load(asked.model), size, asked.texts + 2)
  cuts = [asked.tokens, asked.tokens + asked.question]
  rows = [np.split(row, cuts) for row in rows]
  rng = np.random.default_rng(1)
  if asked.again:
    for row in rows:
      at = int(rng.integers(asked.tokens // 8, asked.tokens // 2))
      behind = at + asked.question
      row[1] = row[0][at:behind]
      row[2] = row[0][behind : behind + asked.continuation]
  # Heads are chosen on texts of their own.
  start = time.monotonic()
  heads = probe_heads(
    model, *zip(*[row[:2] for row in rows[-2:]], strict=True),
    count=asked.probes,
  )  # fmt: skip
  print(f"probe heads: {heads.tolist()}, {time.monotonic() - start:.0f} s")

  @jax.jit
  def loss(model, cache, question, continuation):
    """Of each token of the continuation."""
    ids = jnp.concatenate([question, continuation])[None]
    logits, _ = model(ids, cache=cache)
    logits = logits[0, question.size - 1 : -1].astype(jnp.float32)
    return -jnp.take_along_axis(
      jax.nn.log_softmax(logits), continuation[:, None], 1
    )

  losses_by_part: dict[str, dict[str, float]] = {}
  vectors: dict[str, dict[str, int]] = {}
  for part in map(float, asked.parts.split(",")):
    sums: dict[str, list[float]] = {}
    with rj.store.Store(host=1 << 33) as store:
      options = dict(important=part, chunk=asked.chunk)
      work = ImportantPrefixes(model, store, probes=heads, **options)
      ways = {"few probes": work}
      if part < 1:
        ways["first 3"] = ImportantPrefixes(model, store, **options)
        ways["own"] = ImportantPrefixes(model, store, alpha=0, **options)
      for prefix, question, continuation in rows[:-2]:
        kinds = {how: x.keep(prefix, question) for how, x in ways.items()}
        if part < 1:
          arrays = work.read(prefix)
          count = kinds["own"][0].tokens.shape[1]
          for how in ("random", "newest", "newest only"):
            tokens = by_rule(how, len(heads), asked.tokens, count, rng)
            kinds[how] = chosen(arrays, tokens)
        for how, kept in kinds.items():
          session = work.behind(
            [prefix], [kept], capacity=question.size + continuation.size
          )
          found = loss(model, session.cache, question, continuation)
          sums.setdefault(how, []).append(float(found.mean()))
    vectors[str(part)] = {how: x.counters.vectors for how, x in ways.items()}
    losses_by_part[str(part)] = {
      how: float(np.mean(losses)) for how, losses in sums.items()
    }
    for how, x in ways.items():
      did = x.counters
      print(
        f"part {part} {how}: {did.vectors:,} vectors, "
        f"{did.chunk_bytes / 1e6:.1f} MB of chunks, "
        f"{did.fallbacks} of {did.layers} layers fell back"
      )
    for how, losses in sums.items():
      print(f"part {part} {how}: {np.mean(losses):.4f}", flush=True)
  if asked.json:
    print(json_text({"losses": losses_by_part, "vectors": vectors}))


if __name__ == "__main__":
  main()
