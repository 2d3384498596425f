"""Cost of ways to combine contexts: loss, answers, tokens computed, bytes.

Guarantees: all ways continue the same contexts by the same tokens; the loss is
that of these tokens except the first. Tokens computed and bytes moved are those
after contexts were encoded once.
Cost: one pass over the question for each row and way; contexts are encoded once
for all ways that read them after the same prefix, into the same kind of cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.checks import positive_int
from ringjax.data.tasks.link_tokens import LinkTokens
from ringjax.data.tasks.needle import Task
from ringjax.errors import OptionError, ShapeError
from ringjax.eval.finite_losses import check_losses
from ringjax.infer.contexts import (
  APE,
  Combine,
  ContextLibrary,
  Full,
  KVLink,
  Parallel,
  Recompute,
  Selection,
  context_session,
)
from ringjax.infer.generate import generate
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.cache_kind import cache_kind as kind_of
from ringjax.kv.model_cache import ModelCache
from ringjax.models.transformer import Transformer
from ringjax.ops.attention.cached.separate_contexts import WeighedView

# Rows that are read in one call.
_ROWS = 8
# Temperatures and scales to try, beginning with 1.
TEMPERATURES = tuple(n / 10 for n in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12))
SCALES = tuple(n / 10 for n in (*range(10, 0, -1), *range(11, 21)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextWay:
  """A way to answer from contexts.

  Attributes:
    combine: Method by which contexts are combined.
    begins: Ids that each context begins with.
    some: Contexts that are read: "all", "last" or "none".
  """

  combine: Combine
  begins: tuple[int, ...] = ()
  some: str = "all"

  def rows(self, contexts: Sequence[np.ndarray]) -> list[Int[np.ndarray, " _"]]:
    """The contexts that are read, each with its first ids."""
    chosen = {"all": contexts, "last": contexts[-1:], "none": []}[self.some]
    begin = np.asarray(self.begins, np.int32)
    return [np.concatenate([begin, x]) for x in chosen]


def context_ways(
  prefix: Sequence[int],
  links: LinkTokens | None = None,
  kinds: Sequence[str] = (),
) -> dict[str, ContextWay]:
  """Creates ways to combine contexts, by name.

  Args:
    prefix: Ids before all contexts, if shared; the first one begins a text.
    links: The `LinkTokens` of a model that was trained with some, or None.
    kinds: Names of the ways to return; default: all.

  Raises:
    OptionError: If a name is unknown.
  """
  prefix = tuple(int(n) for n in prefix)
  begin = prefix[:1]
  ways = {
    "full": ContextWay(combine=Full(prefix=prefix)),
    "none": ContextWay(combine=Full(prefix=prefix), some="none"),
    "last": ContextWay(combine=Full(prefix=prefix), some="last"),
    "separate": ContextWay(combine=Parallel(), begins=begin),
    "parallel": ContextWay(combine=Parallel(prefix=prefix)),
    "ape": ContextWay(combine=APE(prefix=prefix)),
    "select": ContextWay(combine=Selection(prefix=prefix, by="query")),
    "moved": ContextWay(combine=Recompute(prefix=prefix, fraction=0)),
    "recompute": ContextWay(combine=Recompute(prefix=prefix)),
    "kvlink": ContextWay(combine=KVLink(prefix=prefix, links=links)),
  }
  for name in kinds:
    if name not in ways:
      raise OptionError(
        "ways", name, f"one of {', '.join(ways)}", "pass one of these"
      )
  return {name: ways[name] for name in kinds or ways}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCost:
  """Cost of a way with a number of contexts.

  Attributes:
    way: Name of the way.
    combine: Method by which contexts are combined, as text.
    contexts: Number of contexts into which the text is cut.
    nll: Mean negative log-likelihood, nats a token.
    found: Share of right answers, or None if none was asked for.
    computed: Tokens of a row that are computed for an answer, with those of the
      question, once the contexts are encoded.
    nbytes: Bytes of a row's keys and values that are copied to the devices.
  """

  way: str
  combine: str
  contexts: int
  nll: float
  found: float | None
  computed: float
  nbytes: float

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return dataclasses.asdict(self)


class ContextLibraries:
  """Libraries that encode contexts for several ways, each document once.

  Ways that share a prefix and a kind of cache share a library.
  """

  def __init__(
    self,
    model: Transformer,
    kind: CacheConfig | str | None = None,
    **where: Any,
  ):
    """Stores the model and options; libraries are created on demand.

    Args:
      model: Model that reads documents.
      kind: Kind of cache of the contexts; keys are stored before their rotation
        for ways that move them. Default: that of `context_session`.
      **where: Mesh and axis.
    """
    self._model, self._kind, self._where = model, kind, where
    self._made: dict[Any, ContextLibrary] = {}

  def of(self, combine: Combine) -> ContextLibrary:
    """The library of a way, created when first used."""
    kind = kind_of(self._kind or "dense")
    kind = kind.replace(unrotated=kind.layout.unrotated or combine.moves)
    key = combine.shared_prefix, kind
    if key not in self._made:
      self._made[key] = ContextLibrary(
        self._model, prefix=key[0], cache_kind=kind, **self._where
      )
    return self._made[key]

  def counters(self) -> list[Any]:
    """The `ContextCounters` of each library."""
    return [library.counters for library in self._made.values()]


class ContextTrial:
  """Texts that are read as contexts, and the questions after them.

  Attributes:
    libraries: Libraries that encode contexts.
  """

  def __init__(
    self,
    model: Transformer,
    texts: Int[np.ndarray, "N T"],
    question: int,
    *,
    cache_kind: CacheConfig | str | None = None,
    **where: Any,
  ):
    """Stores the texts; computes nothing.

    Args:
      model: Model to evaluate.
      texts: Ids, int32 [N, C + M]; the first C tokens are cut into contexts.
      question: Number of tokens after them whose loss counts, M.
      cache_kind: Kind of cache of the contexts, see `ContextLibraries`.
      **where: Mesh and axis.

    Raises:
      ShapeError: If `texts` has another shape.
    """
    positive_int("question", question)
    ids = np.asarray(texts)
    valid = ids.ndim == 2 and np.issubdtype(ids.dtype, np.integer)
    if not valid or question < 2 or ids.shape[1] <= question:
      raise ShapeError(
        "texts",
        f"{ids.dtype} {list(ids.shape)} for a question of {question}",
        "integers [N, C + M] with M of 2 or more",
        "pass longer texts, or a shorter question",
      )
    self._model = model
    self._contexts = ids[:, :-question].astype(np.int32)
    self._questions = ids[:, -question:].astype(np.int32)
    self.libraries = ContextLibraries(model, cache_kind, **where)

  def cost(
    self,
    name: str,
    way: ContextWay,
    count: int,
    *,
    found: float | None = None,
    on_row: Callable[[int], Any] = lambda done: None,
  ) -> ContextCost:
    """Measures the cost of a way if the text is cut into `count` contexts.

    Args:
      name: Name of the way.
      way: Way to combine the contexts.
      count: Number of contexts, P.
      found: Share of right answers, if any were asked for, see
        `context_answers`.
      on_row: Function of the number of texts that are read.

    Raises:
      OptionError: If there are more contexts than tokens.
    """
    total = computed = nbytes = 0.0
    for start in range(0, len(self._questions), _ROWS):
      nll, report, length = self._read(way, count, start)
      total += float(np.sum(nll))
      rows = len(nll)
      computed += rows * length
      if report is not None:
        computed += report.computed
        nbytes += report.nbytes
      on_row(start + rows)
    rows = len(self._questions)
    return ContextCost(
      way=name,
      combine=repr(way.combine),
      contexts=count,
      nll=total / rows / (self._questions.shape[1] - 1),
      found=found,
      computed=computed / rows,
      nbytes=nbytes / rows,
    )

  def tuned(
    self,
    count: int,
    combine: APE,
    *,
    temperatures: Sequence[int | float] = TEMPERATURES,
    scales: Sequence[int | float] = SCALES,
    on_try: Callable[[APE, float], Any] = lambda combine, nll: None,
  ) -> APE:
    """Searches the temperature and scale of the least loss, greedily.

    The scale first, then the temperature, and again both, beginning at 1 and 1.
    Contexts are placed once.

    Args:
      count: Number of contexts, P.
      combine: APE with the prefix that contexts share.
      temperatures: Temperatures to try.
      scales: Scales to try.
      on_try: Function of each tried method and its loss.
    """
    model, texts = self._model, self._split(count)
    library = self.libraries.of(combine)
    sessions = [
      (
        context_session(
          model,
          texts[start : start + _ROWS],
          combine,
          capacity=2 * self._questions.shape[1],
          library=library,
        ).cache,
        self._questions[start : start + _ROWS],
      )
      for start in range(0, len(texts), _ROWS)
    ]
    known_losses: dict[tuple[float, float], float] = {}

    def loss(temperature: float, scale: float) -> float:
      key = temperature, scale
      if key not in known_losses:
        weigh = WeighedView(None, jnp.float32(scale * temperature), temperature)
        known_losses[key] = float(
          sum(
            np.sum(
              _losses_after_cache(
                model, dataclasses.replace(cache, weigh=weigh), rows
              )
            )
            for cache, rows in sessions
          )
        ) / (self._questions.shape[0] * (self._questions.shape[1] - 1))
        on_try(
          dataclasses.replace(combine, temperature=temperature, scale=scale),
          known_losses[key],
        )
      return known_losses[key]

    best = (1.0, 1.0)
    for _ in range(2):
      tries = [(best[0], scale) for scale in scales]
      best = min(tries, key=lambda x: loss(*x))
      tries = [(temperature, best[1]) for temperature in temperatures]
      best = min(tries, key=lambda x: loss(*x))
    return dataclasses.replace(combine, temperature=best[0], scale=best[1])

  def _split(self, count: int) -> list[list[np.ndarray]]:
    """Splits each row into contexts."""
    length = self._contexts.shape[1]
    if not 1 <= count <= length:
      raise OptionError(
        "contexts",
        count,
        f"from 1 to the {length} tokens of the text",
        "pass fewer",
      )
    return [np.array_split(row, count) for row in self._contexts]

  def _read(
    self, way: ContextWay, count: int, start: int
  ) -> tuple[np.ndarray, Any, int]:
    """Reads rows: sums of losses [B], report, and tokens of the call."""
    rows = [way.rows(row) for row in self._split(count)[start : start + _ROWS]]
    questions = self._questions[start : start + _ROWS]
    if isinstance(way.combine, Full):
      prefix = np.asarray(way.combine.prefix, np.int32)
      ids = np.stack(
        [
          np.concatenate([prefix, *row, question])
          for row, question in zip(rows, questions, strict=True)
        ]
      )
      return (
        _losses_of_texts(self._model, ids, questions.shape[1]),
        None,
        ids.shape[1],
      )
    session = context_session(
      self._model,
      rows,
      way.combine,
      capacity=2 * questions.shape[1],
      library=self.libraries.of(way.combine),
    )
    nll = _losses_after_cache(self._model, session.cache, questions)
    return nll, session.contexts, questions.shape[1]


def context_answers(
  model: Transformer,
  task: Task,
  ways: Mapping[str, ContextWay],
  counts: Sequence[int],
  *,
  length: int,
  trials: int = 8,
  seed: int = 0,
  cache_kind: CacheConfig | str | None = None,
  on_trial: Callable[[int], Any] = lambda done: None,
  **where: Any,
) -> dict[tuple[str, int], float]:
  """Measures the share of right answers of each way and number of contexts.

  A text with facts is cut into contexts between its lines.

  Args:
    model: Model that answers.
    task: Task that hides facts and asks for them.
    ways: Ways to combine contexts, by name.
    counts: Numbers of contexts.
    length: Tokens of a text with its question and answer.
    trials: Number of texts.
    seed: Random seed of the texts.
    cache_kind: Kind of cache of the contexts, see `ContextLibraries`.
    on_trial: Function of the number of answers so far.
    **where: Mesh and axis.
  """
  libraries = ContextLibraries(model, cache_kind, **where)
  shares: dict[tuple[str, int], float] = {}
  examples = [
    task.make(np.random.default_rng([seed, length, n]), length)
    for n in range(positive_int("trials", trials))
  ]
  encode = lambda text: np.asarray(task.tokenizer.encode(text), np.int32)
  ends = tuple(i for i in task.tokenizer.eos_ids if i < model.config.vocab)
  num_answers = 0
  for name, way in ways.items():
    for count in counts:
      scores = []
      for example in examples:
        at = example.prompt.rfind(task.question.partition("{")[0])
        lines = example.prompt[:at].splitlines(keepends=True)
        parts = np.array_split(np.arange(len(lines)), count)
        texts = [
          encode("".join(lines[n] for n in part)) for part in parts if part.size
        ]
        rows, combine = way.rows(texts), way.combine
        question = encode(example.prompt[at:])
        options: dict[str, Any] = {"contexts": rows, "combine": combine}
        if not rows:
          start = np.asarray(combine.prefix, np.int32)
          question, options = np.concatenate([start, question]), where
        elif not isinstance(combine, Full):
          options["library"] = libraries.of(combine)
        else:
          options |= where
        new = generate(
          model,
          [question],
          max_new_tokens=encode(example.answer).size + 1,
          stop=ends or None,
          **options,
        )[0]
        text = task.tokenizer.decode([int(i) for i in new if i not in ends])
        scores.append(task.score(example, text))
        num_answers += 1
        on_trial(num_answers)
      shares[name, count] = float(np.mean(scores))
  return shares


def _losses_after_cache(
  model: Transformer, cache: ModelCache, questions: np.ndarray
) -> np.ndarray:
  """Sums of losses [B] of questions after a cache, which is not changed."""
  cache = jax.tree.map(jnp.copy, cache)
  ids = jnp.asarray(questions)
  logits, _ = model(ids[:, :-1], cache=cache)
  return _checked(model, _losses(logits, ids[:, 1:]))


def _losses_of_texts(
  model: Transformer, ids: np.ndarray, question: int
) -> np.ndarray:
  """Sums of losses [B] of the last `question` tokens of texts."""
  batch, length = ids.shape
  rows = np.broadcast_to(
    np.arange(length - question, length - 1, dtype=np.int32),
    (batch, question - 1),
  )
  tokens = jnp.asarray(ids)
  logits = model(tokens, rows=rows)
  return _checked(model, _losses(logits, tokens[:, -question + 1 :]))


def _checked(model: Transformer, losses: jax.Array) -> np.ndarray:
  """Checks that sums of losses [B] are finite."""
  sums = np.asarray(losses)
  for document, loss in enumerate(sums):
    check_losses(loss, model, document=document)
  return sums


@jax.jit
def _losses(
  logits: Float[Array, "B n V"], targets: Int[Array, "B n"]
) -> Float[Array, " B"]:
  p = jax.nn.log_softmax(logits, -1)
  return -jnp.sum(jnp.take_along_axis(p, targets[..., None], -1), (1, 2))
