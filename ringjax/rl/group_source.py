"""Source of a training's steps: sampled, judged groups of answers.

Guarantees: the rows of a step depend on the recipe, the questions and the
weights of the steps before alone. Batch n is sampled with the weights after
batch n - 1 - age, or the first ones, so its age in batches is exactly min(n,
age), whatever is faster. `state` has everything that is sampled and not learned
from, so that a training resumes with the same rows. A batch whose sampling or
judging failed is not in it: a resumed training samples it again, with its own
weights, and reports their age.
Memory: with an age above 0 a copy of the weights for each batch in flight.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.rl.group_objective import GroupObjective
from ringjax.rl.policy_batch import AnswerRows, answer_rows
from ringjax.rl.rewards import Judge
from ringjax.rl.rollouts import Question, Rollout, Rollouts


@runtime_checkable
class QuestionSource(Protocol):
  """Questions of a training, by number."""

  def __call__(self, number: int) -> Question:
    """Question `number`, counted from 0; always the same."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed:
  """Questions of a list, in another order in each pass over it.

  Attributes:
    items: Questions.
    seed: Random seed of the orders.
  """

  items: Sequence[Question]
  seed: int = 0

  def __post_init__(self) -> None:
    if not len(self.items):
      raise OptionError(
        "items",
        "no questions",
        "one or more",
        "pass the questions of the training",
      )

  def __call__(self, number: int) -> Question:
    turn, place = divmod(number, len(self.items))
    order = np.random.default_rng((self.seed, turn)).permutation(
      len(self.items)
    )
    return self.items[int(order[place])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
  """Soft penalty of long answers (DAPO): 0 down to -1 over a margin.

  Attributes:
    longest: Tokens from which on the reward is 1 less.
    margin: Tokens before that over which it falls.
  """

  longest: int
  margin: int

  def __post_init__(self) -> None:
    positive_int("longest", self.longest)
    integer("margin", self.margin, least=1, most=self.longest)

  def __call__(self, tokens: int) -> float:
    """Addend of the reward of an answer of this many tokens."""
    over = tokens - (self.longest - self.margin)
    return -min(1.0, max(0.0, over / self.margin))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConfig:
  """Composition of a batch of groups.

  Attributes:
    groups: Number of groups of a batch.
    length: Tokens of a row of the training, T: prompt and answer, less one.
    minibatches: Number of updates of a pass over a batch, each of groups of its
      own.
    epochs: Number of passes over a batch.
    age: Number of batches by which the weights of the engine may be older than
      those of the training: answers are then sampled while others are learned
      from.
    refill: Largest number of times that questions are drawn again for groups
      whose rewards are all equal, of which nothing is learned (DAPO's dynamic
      sampling); 0 keeps these groups.
    overlong: Penalty of long answers, or None.
    drop_truncated: Whether answers that ended at their maximum have no loss.
  """

  groups: int = 8
  length: int = 512
  minibatches: int = 1
  epochs: int = 1
  age: int = 0
  refill: int = 0
  overlong: OverlongPenalty | None = None
  drop_truncated: bool = False

  def __post_init__(self) -> None:
    for name in ("groups", "length", "minibatches", "epochs"):
      positive_int(name, getattr(self, name))
    for name in ("age", "refill"):
      integer(name, getattr(self, name), least=0)
    if self.groups % self.minibatches:
      raise OptionError(
        "minibatches",
        f"{self.minibatches} of {self.groups} groups",
        "a divisor of the groups",
        f"pass groups={self.minibatches * -(-self.groups // self.minibatches)}",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutReport:
  """Figures of a batch of answers.

  Attributes:
    batch: Number of the batch, from 0.
    age: Batches by which the engine's weights were older.
    reward: Mean reward.
    spread: Mean standard deviation of a group's rewards.
    parts: Mean reward of each function, by its name.
    flat: Groups whose rewards are all equal, of which nothing is learned.
    drawn: Questions that were drawn; more than the groups where some were
      drawn again.
    tokens: Mean number of tokens of an answer.
    truncated: Share of the answers that ended at their maximum length.
    prompt_tokens: Prompt tokens that the engine computed.
    cached_tokens: Prompt tokens whose keys it had.
    useful: Groups of the batch whose answers have a loss.
  """

  batch: int
  age: int
  reward: float
  spread: float
  parts: dict[str, float]
  flat: int
  drawn: int
  tokens: float
  truncated: float
  prompt_tokens: int
  cached_tokens: int
  useful: int


class _Sampled(NamedTuple):
  """A batch that was sampled and judged.

  Fields:
    rows: Rows of the batch, without log-probabilities by other models.
    report: Figures of the batch.
    questions: Number of questions drawn until then.
  """

  rows: AnswerRows
  report: RolloutReport
  questions: int


Score = Callable[[Transformer, AnswerRows], np.ndarray]


class GroupSource:
  """Rows of one step after another, a `loop.RowSource`.

  Attributes:
    report: Figures of the last batch, or None before the first.
  """

  def __init__(
    self,
    questions: QuestionSource,
    rollouts: Rollouts,
    judge: Judge,
    objective: GroupObjective,
    config: GroupConfig,
    policy: Callable[[], Transformer],
    *,
    score: Score,
    reference: Transformer | None = None,
  ):
    """Begin at the first batch.

    Args:
      questions: Questions by number.
      rollouts: Sampler of answers.
      judge: Judge of answers.
      objective: Objective, which gives advantages.
      config: Composition of a batch.
      policy: Function that returns the training's current model.
      score: Function (model, rows) to log-probabilities of the labels.
      reference: Reference model, or None.
    """
    self._questions, self._rollouts, self._judge = questions, rollouts, judge
    self._objective, self._config, self._policy = objective, config, policy
    self._score, self._reference = score, reference
    self.report: RolloutReport | None = None
    self._pending: collections.deque[AnswerRows] = collections.deque()
    self._flying: collections.deque[concurrent.futures.Future[_Sampled]] = (
      collections.deque()
    )
    # Number of batches taken, and of questions drawn by them and by all
    # batches sampled.
    self._batch = self._taken = self._drawn = 0
    self._worker: concurrent.futures.ThreadPoolExecutor | None = None

  def __next__(self) -> AnswerRows:
    """Rows of the next step."""
    if not self._pending:
      self._begin_batch()
    return self._pending.popleft()

  def state(self) -> dict[str, Any]:
    """Position, and answers that are not learned from yet, as JSON.

    Waits for batches in flight. The error of one that failed is raised where it
    is learned from.
    """
    flying: list[_Sampled] = []
    for future in self._flying:
      if future.exception() is not None:
        break
      flying.append(future.result())
    return {
      "batch": self._batch,
      "drawn": flying[-1].questions if flying else self._taken,
      "pending": [rows.text() for rows in self._pending],
      "flying": [
        {
          "rows": sampled.rows.text(),
          "report": dataclasses.asdict(sampled.report),
          "questions": sampled.questions,
        }
        for sampled in flying
      ],
      "report": self.report and dataclasses.asdict(self.report),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Continue at a saved state."""
    self._batch, self._taken = state["batch"], state["drawn"]
    self._drawn = state["drawn"]
    self._pending = collections.deque(map(AnswerRows.of_text, state["pending"]))
    report = state["report"]
    self.report = report and RolloutReport(**report)
    self._flying = collections.deque()
    for entry in state["flying"]:
      sampled: concurrent.futures.Future[_Sampled] = concurrent.futures.Future()
      sampled.set_result(
        _Sampled(
          AnswerRows.of_text(entry["rows"]),
          RolloutReport(**entry["report"]),
          entry["questions"],
        )
      )
      self._flying.append(sampled)

  def close(self) -> None:
    """Waits for batches in flight."""
    if self._worker is not None:
      self._worker.shutdown(wait=True, cancel_futures=True)
      self._worker = None

  def _begin_batch(self) -> None:
    """Take the next batch, and cut it into the rows of its steps."""
    config, policy = self._config, self._policy()
    if not config.age:
      sampled = self._sampled(policy, self._batch, 0)
    else:
      self._fly(policy)
      sampled = self._flying.popleft().result()
    self._batch += 1
    self._taken = sampled.questions
    rows, self.report = sampled.rows, sampled.report
    if self._objective.truncate is not None:
      rows = rows._replace(old=self._score(policy, rows))
    if self._objective.beta:
      assert self._reference is not None
      rows = rows._replace(reference=self._score(self._reference, rows))
    count = rows.tokens.shape[0] // config.minibatches
    parts = [
      rows.part(slice(n * count, (n + 1) * count))
      for n in range(config.minibatches)
    ]
    self._pending.extend(parts * config.epochs)

  def _fly(self, policy: Transformer) -> None:
    """Let the worker sample until `age` batches after this one fly."""
    if self._worker is None:
      self._worker = concurrent.futures.ThreadPoolExecutor(
        1, "ringjax rollouts"
      )
    missing = 1 + self._config.age - len(self._flying)
    if not missing:
      return
    # The training donates its own arrays.
    weights = jax.tree.map(jnp.copy, policy)
    for _ in range(missing):
      number = self._batch + len(self._flying)
      age = number - self._batch
      self._flying.append(
        self._worker.submit(self._sampled, weights, number, age)
      )

  def _sampled(self, policy: Transformer, batch: int, age: int) -> _Sampled:
    """Sample and judge a batch."""
    config, counters = self._config, self._rollouts.engine.counters
    self._rollouts.take_weights(policy)
    prompts_before = counters.prompt_tokens
    cached_before = counters.cached_tokens
    useful: list[_JudgedGroup] = []
    flat: list[_JudgedGroup] = []
    rewards_of_all: list[_JudgedGroup] = []
    for _ in range(1 + config.refill):
      missing = config.groups - len(useful)
      judged = self._judged(self._drawn, missing)
      self._drawn += missing
      rewards_of_all += judged
      for group in judged:
        spread = float(np.ptp(group.rewards)) > 0
        (useful if spread or not config.refill else flat).append(group)
      if len(useful) == config.groups:
        break
    # Groups without spread, of which nothing is learned, keep the shape.
    batch_groups = useful + flat[: config.groups - len(useful)]
    rewards = np.stack([group.rewards for group in batch_groups])
    rows = answer_rows(
      [group.question for group in batch_groups],
      [group.rollouts for group in batch_groups],
      self._objective.advantages(rewards),
      config.length,
      drop_truncated=config.drop_truncated,
    )
    if config.refill:
      rows.counted[len(useful) * rewards.shape[1] :] = 0
    answers = [x for group in rewards_of_all for x in group.rollouts]
    every = np.stack([group.rewards for group in rewards_of_all])
    names = rewards_of_all[0].parts
    report = RolloutReport(
      batch=batch,
      age=age,
      reward=float(every.mean()),
      spread=float(every.std(1).mean()),
      parts={
        name: float(np.mean([group.parts[name] for group in rewards_of_all]))
        for name in names
      },
      flat=int(np.sum(np.ptp(every, 1) == 0)),
      drawn=len(rewards_of_all),
      tokens=float(np.mean([x.sampled.sum() for x in answers])),
      truncated=float(np.mean([x.truncated for x in answers])),
      prompt_tokens=counters.prompt_tokens - prompts_before,
      cached_tokens=counters.cached_tokens - cached_before,
      useful=len(useful),
    )
    return _Sampled(rows, report, self._drawn)

  def _judged(self, first: int, count: int) -> list[_JudgedGroup]:
    """Sample and judge the groups of some questions."""
    questions = [self._questions(first + n) for n in range(count)]
    groups = self._rollouts.sample(questions, first)
    answers = [
      (question.text, "".join(rollout.answers[-1:]), question.example)
      for question, group in zip(questions, groups, strict=True)
      for rollout in group
    ]
    rewards, parts = self._judge.rewards(answers)
    penalty = self._config.overlong
    if penalty is not None:
      lengths = [int(x.sampled.sum()) for group in groups for x in group]
      rewards = rewards + np.asarray(list(map(penalty, lengths)), np.float32)
    size = self._rollouts.config.group
    return [
      _JudgedGroup(
        question,
        group,
        rewards[n * size : (n + 1) * size],
        {name: x[n * size : (n + 1) * size] for name, x in parts.items()},
      )
      for n, (question, group) in enumerate(zip(questions, groups, strict=True))
    ]


class _JudgedGroup(NamedTuple):
  """A group of answers with their rewards.

  Fields:
    question: Question of the group.
    rollouts: Answers.
    rewards: Rewards, float32 [G].
    parts: Rewards of each function, by its name.
  """

  question: Question
  rollouts: tuple[Rollout, ...]
  rewards: np.ndarray
  parts: dict[str, np.ndarray]
