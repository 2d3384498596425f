"""Retrieval by length and depth: which facts in a long text a model finds.

Guarantees: trial i of a length and a depth is the same text and fact for every
model and every prefill method; other depths hide the same fact in the same
text. What cannot be asked is refused before anything is read.
Cost: one prompt is read for each trial; each text is made once more before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.data.needle import Example, Task
from ringjax.errors import OptionError
from ringjax.infer.generate import generate
from ringjax.infer.inputs import within_context
from ringjax.infer.prefill import PrefillOptions
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.kv.cache_kind import WINDOWED
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """The trials of one length and depth.

  Attributes:
    length: tokens of prompt and answer.
    depth: where the fact stands, 0 to 1.
    scores: of each trial, 0 to 1.
    completions: what the model said.
  """

  length: int
  depth: float
  scores: tuple[float, ...]
  completions: tuple[str, ...]

  @property
  def score(self) -> float:
    """The mean."""
    return math.fsum(self.scores) / len(self.scores)

  def record(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "score": self.score}


@on_its_mesh
def find(
  model: Transformer,
  task: Task,
  *,
  lengths: Sequence[int],
  depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
  trials: int = 4,
  seed: int = 0,
  on_trial: Callable[[int], Any] = lambda done: None,
  on_cell: Callable[[Cell], Any] = lambda cell: None,
  **options: Any,
) -> list[Cell]:
  """Asks a model for facts hidden in long texts.

  Args:
    model: that is asked.
    task: what is hidden and asked, with the model's tokenizer.
    lengths: tokens of the texts.
    depths: where the fact stands, 0 to 1.
    trials: texts of each length and depth.
    seed: of the texts.
    on_trial: called with how many trials are done.
    on_cell: called with each cell, as soon as its trials are done.
    **options: of `rj.infer.generate`, such as mesh, prefill, chunk and
      cache_dtype.

  Returns:
    A cell for each length and depth, in this order.

  Raises:
    OptionError: a length or depth out of range, or a prefill method that does
      not fit.
    PromptError: a length beyond the model's context.
    MemoryEstimateError: the longest text's cache has no room.
  """
  positive_int("trials", trials)
  for name, values in (("lengths", lengths), ("depths", depths)):
    if not values:
      raise OptionError(name, "none", "one or more", "pass a list of numbers")
  for depth in depths:
    remedy = "pass depths such as 0.5"
    number("depths", depth, least=0.0, most=1.0, remedy=remedy)
  for length in lengths:
    positive_int("lengths", length)
  draw = lambda length, trial: np.random.default_rng([seed, length, trial])
  for length in lengths:
    for trial in range(trials):
      # That facts and question fit, which all depths have in common.
      task.make(draw(length, trial), length, depths[0])
  _check(model, lengths, options)
  cells, done = [], 0
  for length in lengths:
    for depth in depths:
      said = []
      for trial in range(trials):
        example = task.make(draw(length, trial), length, depth)
        said.append(_ask(model, task, example, options))
        done += 1
        on_trial(done)
      scores, texts = zip(*said, strict=True)
      cells.append(
        Cell(length=length, depth=depth, scores=scores, completions=texts)
      )
      on_cell(cells[-1])
  return cells


def _check(
  model: Transformer, lengths: Sequence[int], options: dict[str, Any]
) -> None:
  """Refuses lengths that the model or its devices cannot read."""
  longest = max(lengths)
  within_context(model.config, longest, f"lengths up to {longest:,}")
  if "cache" in options:
    return
  mesh, axis = place_of(options.get("mesh"), options.get("axis"), model)
  reading = PrefillOptions(
    method=options.get("prefill", "auto"),
    chunk=options.get("chunk"),
    partition=options.get("partition"),
    machine=options.get("machine"),
  )
  plans = [reading.plan(length, model, mesh, axis) for length in lengths]
  # The largest cache: refused if it does not fit, and released at once.
  shards = 1 if axis is None else mesh.shape[axis]
  Session(
    model,
    (max(how.slots for how in plans) + 1) * shards,
    mesh=mesh,
    axis=axis,
    dtype=options.get("cache_dtype"),
    cache_kind=options.get("cache_kind", WINDOWED),
  )


def _ask(
  model: Transformer, task: Task, example: Example, options: dict[str, Any]
) -> tuple[float, str]:
  ids, weights = task.training(example)
  start = int(np.argmax(weights > 0))
  # As long as the answer, and what may end it.
  count = len(ids) - start
  ends = tuple(i for i in task.tokenizer.eos_ids if i < model.config.vocab)
  new = generate(
    model, [ids[:start]], max_new_tokens=count, stop=ends or None, **options
  )[0]
  said = [int(i) for i in new if int(i) not in ends]
  text = task.tokenizer.decode(said)
  return task.score(example, text), text
