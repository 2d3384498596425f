"""Retrieval of hidden facts by task, kind of cache, length and depth.

Guarantees: trial i of a task, a length and a depth is the same text and fact
for every model, prefill method and kind of cache; other depths hide the same
fact in the same text. Invalid trials are refused before any text is read.
Cost: one prompt is read for each trial; each text is created twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.data.tasks.needle import Example, Task
from ringjax.errors import OptionError
from ringjax.infer.generate import generate
from ringjax.infer.inputs import within_context
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.kv.cache_kind import WINDOWED, CacheConfig
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """The trials of one task, kind of cache, length and depth.

  Attributes:
    length: Tokens of prompt and answer.
    depth: Depth of the fact in the text, 0 to 1; None for a task without depth.
    scores: Score of each trial, 0 to 1.
    completions: Text that the model generated in each trial.
    task, cache: Names of the task and of the kind of cache, see `find`.
  """

  length: int
  depth: float | None
  scores: tuple[float, ...]
  completions: tuple[str, ...]
  task: str = ""
  cache: str = ""

  @property
  def key(self) -> tuple[str, str, int, float | None]:
    """Key of the cell in `grid`."""
    return self.task, self.cache, self.length, self.depth

  @property
  def score(self) -> float:
    """Mean score of the trials."""
    return math.fsum(self.scores) / len(self.scores)

  def record(self) -> dict[str, Any]:
    """Fields and mean score as JSON."""
    return {**dataclasses.asdict(self), "score": self.score}

  @classmethod
  def from_record(cls, record: Mapping[str, Any]) -> Cell:
    """Creates the cell of a `record`."""
    values: dict[str, Any] = {
      name: tuple(x) if isinstance(x, list) else x
      for name, x in record.items()
      if name != "score"
    }
    return cls(**values)


def grid(
  tasks: Mapping[str, Task],
  kinds: Iterable[str],
  lengths: Sequence[int],
  depths: Sequence[float],
) -> list[tuple[str, str, int, float | None]]:
  """Unique keys of the cells of tasks and kinds of caches, in order."""
  keys = (
    (name, kind, length, depth)
    for name, task in tasks.items()
    for kind in kinds
    for length in lengths
    for depth in (depths if task.placed else [None])
  )
  return list(dict.fromkeys(keys))


def table(cells: Iterable[Cell]) -> dict[tuple[str, ...], dict[int, float]]:
  """Tabulates mean scores by length.

  Returns:
    Scores by row and length. Rows are (task, cache), or the one in which cells
    differ, or depths if they differ in neither.
  """
  cells = list(cells)
  differ = [
    name
    for name in ("task", "cache")
    if len({getattr(cell, name) for cell in cells}) > 1
  ]
  if not differ:
    cells.sort(key=lambda cell: cell.depth or 0.0)

  def label(cell: Cell) -> tuple[str, ...]:
    depth = "any" if cell.depth is None else f"{100 * cell.depth:.0f} %"
    return tuple(getattr(cell, name) for name in differ) or (depth,)

  scores_by_row: dict[tuple[str, ...], dict[int, float]] = {}
  for (row, length), score in _means(
    cells, lambda cell: (label(cell), cell.length)
  ).items():
    scores_by_row.setdefault(row, {})[length] = score
  return scores_by_row


def mean(cells: Iterable[Cell]) -> float:
  """Mean score, with equal weights for all tasks."""
  tasks = _means(cells, lambda cell: cell.task).values()
  return math.fsum(tasks) / len(tasks)


def _means(
  cells: Iterable[Cell], key: Callable[[Cell], Any]
) -> dict[Any, float]:
  scores: dict[Any, list[float]] = {}
  for cell in cells:
    scores.setdefault(key(cell), []).append(cell.score)
  return {name: math.fsum(x) / len(x) for name, x in scores.items()}


@on_its_mesh
def find(
  model: Transformer,
  task: Task | Mapping[str, Task],
  *,
  lengths: Sequence[int],
  depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
  kinds: Mapping[str, CacheConfig | str] | None = None,
  trials: int = 4,
  seed: int = 0,
  known: Iterable[Cell] = (),
  on_trial: Callable[[int], Any] = lambda done: None,
  on_cell: Callable[[Cell], Any] = lambda cell: None,
  **options: Any,
) -> list[Cell]:
  """Asks a model for facts hidden in long texts.

  Args:
    model: Model that answers.
    task: Task that hides facts and asks for them, with the model's tokenizer;
      or several tasks by name.
    lengths: Tokens of the texts.
    depths: Depths of the facts in the text, 0 to 1.
    kinds: Kinds of caches by name; None for one kind, `cache_kind` among the
      options.
    trials: Number of texts of each task, length and depth.
    seed: Random seed of the texts.
    known: Complete cells of an earlier call with the same arguments.
    on_trial: Function of the number of trials so far, with known ones.
    on_cell: Function of each new cell, as soon as its trials are done.
    **options: Arguments of `rj.infer.generate`, such as mesh, prefill, chunk
      and cache_dtype.

  Returns:
    A cell for each task, kind, length and depth, in this order.

  Raises:
    OptionError: If a length or depth is out of range, a length is too short for
      a task, or a prefill method or kind of cache does not fit.
    PromptError: If a length is beyond the model's context.
    MemoryEstimateError: If the longest text's cache does not fit the memory.
  """
  positive_int("trials", trials)
  tasks = {"": task} if isinstance(task, Task) else dict(task)
  reading = (
    {"": options}
    if kinds is None
    else {name: options | {"cache_kind": kind} for name, kind in kinds.items()}
  )
  for name, values in (
    ("task", tasks),
    ("kinds", reading),
    ("lengths", lengths),
    ("depths", depths),
  ):
    if not values:
      raise OptionError(name, "none", "one or more", f"pass some {name}")
  for depth in depths:
    remedy = "pass depths such as 0.5"
    number("depths", depth, least=0.0, most=1.0, remedy=remedy)
  for length in lengths:
    positive_int("lengths", length)
  keys = grid(tasks, reading, lengths, depths)
  cells = {cell.key: cell for cell in known}
  missing = [key for key in keys if key not in cells]
  draw = lambda length, trial: np.random.default_rng([seed, length, trial])
  for name, length in dict.fromkeys((n, length) for n, _, length, _ in missing):
    for trial in range(trials):
      # Check that facts and question fit, which does not depend on the depth.
      _make(name, tasks[name], draw(length, trial), length, depths[0])
  for kind, kind_options in reading.items():
    if kind_lengths := [length for _, k, length, _ in missing if k == kind]:
      _check(model, kind_lengths, kind_options)
  num_trials = (len(keys) - len(missing)) * trials
  for key in missing:
    name, kind, length, depth = key
    answers = []
    for trial in range(trials):
      example = tasks[name].make(draw(length, trial), length, depth)
      answers.append(_ask(model, tasks[name], example, reading[kind]))
      num_trials += 1
      on_trial(num_trials)
    scores, texts = zip(*answers, strict=True)
    cells[key] = Cell(
      length=length,
      depth=depth,
      scores=scores,
      completions=texts,
      task=name,
      cache=kind,
    )
    on_cell(cells[key])
  return [cells[key] for key in keys]


def _make(
  name: str, task: Task, rng: np.random.Generator, length: int, depth: float
) -> None:
  """Creates an example; errors name the task, if it has a name."""
  try:
    task.make(rng, length, depth)
  except OptionError as error:
    raise OptionError(f"{name}, {error}" if name else f"{error}") from None


def _check(
  model: Transformer, lengths: Sequence[int], options: dict[str, Any]
) -> None:
  """Refuses lengths that the model or its devices cannot read."""
  longest = max(lengths)
  within_context(model.config, longest, f"lengths up to {longest:,}")
  if "cache" in options:
    return
  mesh, axis = place_of(options.get("mesh"), options.get("axis"), model)
  reading = PrefillConfig(
    method=options.get("prefill", "auto"),
    chunk=options.get("chunk"),
    partition=options.get("partition"),
    machine=options.get("machine"),
  )
  plans = [reading.plan(length, model, mesh, axis) for length in lengths]
  # Allocate the largest cache once, to raise an error now if it does not fit.
  shards = 1 if axis is None else mesh.shape[axis]
  Session(
    model,
    (max(plan.slots for plan in plans) + 1) * shards,
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
  # As many tokens as the answer has, with the id that may end it.
  count = len(ids) - start
  ends = tuple(i for i in task.tokenizer.eos_ids if i < model.config.vocab)
  new = generate(
    model, [ids[:start]], max_new_tokens=count, stop=ends or None, **options
  )[0]
  answer_ids = [int(i) for i in new if int(i) not in ends]
  text = task.tokenizer.decode(answer_ids)
  return task.score(example, text), text
