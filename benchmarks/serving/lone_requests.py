"""Lone requests to an engine with room for more, next to `rj.infer.generate`.

A call of an engine should cost what it holds, not what it has room for: a short
prompt, an answer without neighbours and a long prompt are timed in turn by the
engine and by `generate`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import ringjax as rj
from ringjax.bench import timing
from ringjax.serve import Engine

# Tokens of the short prompt.
_SHORT = 12


def compare_with_generate(
  engine: Engine,
  *,
  prompt_tokens: int,
  new_tokens: int,
  rounds: int,
  say: Callable[[str], Any],
) -> Mapping[str, Any]:
  """Times of an engine and of `generate` for the same requests, in turn.

  Args:
    engine: Engine that finds no prefixes again.
    prompt_tokens: Number of tokens of the long prompt.
    new_tokens: Number of tokens of the answer to the short prompt.
    rounds: Number of timed rounds.
    say: Function that prints a line.
  """
  draw = np.random.default_rng(0).integers
  prompt = lambda count: draw(0, engine.vocab, count).astype(np.int32)
  short, neighbours = prompt(_SHORT), [
    prompt(engine.config.piece) for _ in range(engine.config.pieces - 1)
  ]  # fmt: skip
  cases = {
    "first token, short prompt": (short, 1, []),
    "first token, beside prompts": (short, 1, neighbours),
    "lone answer": (short, new_tokens, []),
    "long prompt": (prompt(prompt_tokens), 1, []),
  }
  processor: dict[str, list[float]] = {}
  calls: dict[str, Callable[[], Any]] = {}
  for name, (tokens, count, others) in cases.items():

    def serve(
      tokens: np.ndarray = tokens,
      count: int = count,
      others: list[np.ndarray] = others,
    ) -> None:
      handles = [
        engine.submit(rj.serve.Request(prompt=x, max_new_tokens=count))
        for x in (*others, tokens)
      ]
      engine.run()
      handles[-1].result()

    def generate(tokens: np.ndarray = tokens, count: int = count) -> None:
      rj.infer.generate(engine.model, [tokens], max_new_tokens=count)

    for side, work in (("engine", serve), ("generate", generate)):
      label = f"{name}: {side}"

      def run(label: str = label, work: Callable[..., None] = work) -> None:
        start = time.process_time()
        work()
        seconds = time.process_time() - start
        processor.setdefault(label, []).append(seconds)

      calls[label] = run
  timings = timing.timed(calls, rounds)
  result = {}
  for name in cases:
    figures = {}
    for side in ("engine", "generate"):
      label = f"{name}: {side}"
      median_s = timings[label].median_s
      assert median_s is not None
      # The first round is not timed.
      cpu_s = statistics.median(processor[label][-rounds:])
      figures |= {f"{side}_s": median_s, f"{side}_cpu_s": cpu_s}
    ratio = figures["engine_s"] / figures["generate_s"]
    cpu_ratio = figures["engine_cpu_s"] / figures["generate_cpu_s"]
    result[name] = figures | {"ratio": ratio, "cpu_ratio": cpu_ratio}
    say(
      f"{name:28} engine {figures['engine_s']:8.3f} s  generate "
      f"{figures['generate_s']:8.3f} s  ratio {ratio:5.2f}, of processor "
      f"time {cpu_ratio:5.2f} ({figures['engine_cpu_s']:.3f} / "
      f"{figures['generate_cpu_s']:.3f} s)"
    )
  return result
