"""Transfer of a prompt's pages at the end of prefill, by chunks, or by layers.

Guarantees: all ways have the same answers, or the row reports that they differ;
they run in turn, each in a separate cluster of two instances in one process.

  end       all pages leave when the prompt has been read
  pieces    each time `stream` tokens of it have been read
  layers:4  as pieces, but each chunk's layers in four parts, within a step

For each way the medians of: the seconds of prefill, the bytes that are not
pulled yet at its end, and the seconds from there to the second token, which is
the first one of the decode instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.shared import harness
from benchmarks.shared.harness import Report, Row, option
from ringjax.errors import OptionError

_MIB = 1 << 20
_VOCAB = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings(harness.BenchmarkSettings):
  """Settings: the prompt, the model and the ways of transfer."""

  contestants: tuple[str, ...] = option(
    ("end", "pieces", "layers:2", "layers:4", "layers:8"), ()
  )
  tokens: tuple[int, ...] = option((2048,))
  stream: int = option(512)
  piece: int = option(128)
  pieces: int = option(1)
  model_layers: int = option(8)
  rounds: int = option(5)


class StreamBenchmark(harness.Benchmark):
  """Benchmark of page transfers in prefill; a row is a length of prompts."""

  name = "stream"
  options = StreamSettings
  columns = ("tokens",)
  files = ("json",)
  quick = StreamSettings(
    contestants=("end", "layers:2"), tokens=(256,), stream=128, model_layers=2,
    rounds=1,
  )  # fmt: skip
  summary_name = "left at the end"

  def __init__(self, settings: Any):
    super().__init__(settings)
    for way in settings.contestants:
      _parts(way)

  @property
  def cases(self) -> list[int]:
    return list(self.settings.tokens)

  def row(self, case: int, report: Report) -> Row:
    from benchmarks.serving.stream_contestants import MovedPrompt, pair

    s, rng = self.settings, np.random.default_rng(0)
    config = dict(
      model_type="llama",
      vocab_size=_VOCAB,
      hidden_size=512,
      intermediate_size=1536,
      num_hidden_layers=s.model_layers,
      num_attention_heads=8,
      num_key_value_heads=8,
      max_position_embeddings=2 * case,
    )
    prompts_by_way: dict[str, list[MovedPrompt]] = {
      way: [] for way in s.contestants
    }
    with contextlib.ExitStack() as stack:
      live = {
        way: stack.enter_context(
          pair(
            config,
            case,
            stream=s.stream if _parts(way) else 0,
            layer_parts=max(1, _parts(way)),
            piece=s.piece,
            pieces=s.pieces,
          )
        )
        for way in s.contestants
      }
      # The first round compiles.
      for n in range(-1, s.rounds):
        prompt = rng.integers(0, _VOCAB, case).astype(np.int32)
        for way, instances in live.items():
          report((n + 1) / (s.rounds + 1), way)
          moved = instances.moved(prompt)
          if n >= 0:
            prompts_by_way[way].append(moved)
    answers = [
      [x.tokens for x in prompts] for prompts in prompts_by_way.values()
    ]
    medians = {
      way: {
        name: statistics.median(getattr(x, name) for x in prompts)
        for name in ("read_s", "left", "answer_s", "total")
      }
      for way, prompts in prompts_by_way.items()
    }
    equal = all(x == answers[0] for x in answers)
    return {"tokens": case, "ways": medians, "same": equal}

  def table(self, case: int, row: Row) -> str:
    lines = [
      f"{case:,} tokens; {'the same' if row['same'] else 'OTHER'} answers"
    ]
    lines += [
      f"  {way:9} read in {x['read_s']:6.3f} s; {x['left'] / _MIB:7.2f} of "
      f"{x['total'] / _MIB:7.2f} MiB left; then {1e3 * x['answer_s']:6.1f} ms "
      "to the second token"
      for way, x in row["ways"].items()
    ]
    return "\n".join(lines)

  def summary(self, rows: Sequence[Row]) -> Row:
    return {
      str(row["tokens"]): {
        way: round(x["left"] / x["total"], 4) for way, x in row["ways"].items()
      }
      for row in rows
    }


def _parts(way: str) -> int:
  """Number of parts of the layers; 0 for transfer at the end."""
  name, _, count = way.partition(":")
  if way in ("end", "pieces"):
    return int(way == "pieces")
  if name != "layers" or not count.isdigit() or int(count) < 2:
    raise OptionError(
      "contestants",
      repr(way),
      "end, pieces, or layers:N with N of 2 at least",
      "pass --contestants=end,pieces,layers:4",
    )
  return int(count)
