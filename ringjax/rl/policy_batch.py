"""Answers as rows of tokens, and their log-probabilities on the devices."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, PyTree

from ringjax.errors import OptionError, PromptError
from ringjax.models.checkpoint import cast
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.rl.group_objective import AnswerArrays, GroupObjective
from ringjax.rl.policy_logprobs import policy_logprobs
from ringjax.rl.rollouts import Question, Rollout
from ringjax.train.batch import Batch, check_ids, placer
from ringjax.train.expert_balance import ExpertBalance
from ringjax.train.objective import LossSums, Objective
from ringjax.typing import ArrayLeaf

# Fields of an objective that a training by rewards has, too.
_USED = ("dtype", "group", "temperature")


class AnswerRows(NamedTuple):
  """Answers on the host, a row each: the prompt, then its answer.

  Fields:
    tokens: Token ids, int32 [N, T].
    labels: Ids of the next tokens where these are the policy's, else -100,
      int32 [N, T].
    segments: 1 for tokens, 0 for padding, int32 [N, T].
    behaviour: Log-probabilities of the labels by the engine, float32 [N, T].
    advantages: Advantage of each answer, float32 [N, 1].
    counted: 0 for answers whose tokens have no loss, else 1, float32 [N, 1].
    old: Log-probabilities that ratios are of, float32 [N, T].
    reference: Log-probabilities by the reference, float32 [N, T]; zeros
      without one.
  """

  tokens: Int32[np.ndarray, "N T"]
  labels: Int32[np.ndarray, "N T"]
  segments: Int32[np.ndarray, "N T"]
  behaviour: Float32[np.ndarray, "N T"]
  advantages: Float32[np.ndarray, "N 1"]
  counted: Float32[np.ndarray, "N 1"]
  old: Float32[np.ndarray, "N T"]
  reference: Float32[np.ndarray, "N T"]

  @property
  def mask(self) -> Float32[np.ndarray, "N T"]:
    """1 for tokens that have a loss, else 0, float32 [N, T]."""
    is_label = (self.labels != IGNORE_INDEX).astype(np.float32)
    return is_label * self.counted

  def part(self, rows: slice) -> AnswerRows:
    """Some of the rows."""
    return AnswerRows(*(x[rows] for x in self))

  def text(self) -> str:
    """All arrays as text, for a checkpoint."""
    stream = io.BytesIO()
    arrays: Any = self._asdict()
    np.savez_compressed(stream, **arrays)
    return base64.b64encode(stream.getvalue()).decode()

  @classmethod
  def of_text(cls, text: str) -> AnswerRows:
    """The rows of `text`."""
    stream = io.BytesIO(base64.b64decode(text))
    with np.load(stream, allow_pickle=False) as arrays:
      return cls(**{name: arrays[name] for name in cls._fields})


def answer_rows(
  questions: Sequence[Question],
  groups: Sequence[Sequence[Rollout]],
  advantages: Float32[np.ndarray, "N G"],
  length: int,
  *,
  drop_truncated: bool = False,
) -> AnswerRows:
  """Rows of groups of answers, all of a group next to one another.

  Args:
    questions: Question of each group.
    groups: Answers of each group.
    advantages: Advantage of each answer.
    length: Tokens of a row, T.
    drop_truncated: Whether answers that ended at their maximum length have no
      loss.

  Raises:
    PromptError: If a prompt and its answer are longer than a row.
  """
  count = sum(map(len, groups))
  ints = lambda value: np.full((count, length), value, np.int32)
  floats = lambda: np.zeros((count, length), np.float32)
  tokens, labels, segments = ints(0), ints(IGNORE_INDEX), ints(0)
  behaviour, row = floats(), 0
  counted = np.ones((count, 1), np.float32)
  for question, group in zip(questions, groups, strict=True):
    prompt = np.asarray(question.prompt, np.int32)
    for rollout in group:
      ids = np.concatenate([prompt, rollout.tokens])
      if ids.size - 1 > length:
        raise PromptError(
          "length",
          f"{ids.size:,} tokens of a prompt and its answer",
          f"at most {length + 1:,}",
          "pass a larger length, or a smaller max_new_tokens",
        )
      last, first = ids.size - 1, prompt.size - 1
      tokens[row, :last], segments[row, :last] = ids[:-1], 1
      labels[row, first:last] = np.where(
        rollout.sampled > 0, rollout.tokens, IGNORE_INDEX
      )
      behaviour[row, first:last] = rollout.logprobs
      counted[row] = not (drop_truncated and rollout.truncated)
      row += 1
  return AnswerRows(
    tokens,
    labels,
    segments,
    behaviour,
    advantages.reshape(-1, 1).astype(np.float32),
    counted,
    behaviour.copy(),
    floats(),
  )


class PolicyBatch(NamedTuple):
  """Rows of answers on the devices; the fields of `Batch` have its meaning.

  Fields:
    tokens: Token ids, int32 [A, B, T].
    labels: Ids of the next tokens, or -100, int32 [A, B, T].
    segments: 1 for tokens, 0 for padding, int32 [A, B, T].
    answers: Other arrays of the answers, with A as first axis.
    share: Part of the step's loss that each row is, float32 [A, B, 1].
  """

  tokens: Int[ArrayLeaf, "*A B T"]
  labels: Int[ArrayLeaf, "*A B T"]
  segments: Int[ArrayLeaf, "*A B T"]
  answers: AnswerArrays
  share: Float[ArrayLeaf, "*A B 1"]


def place_answers(
  rows: AnswerRows,
  attend: ShardingContext,
  objective: GroupObjective,
  accumulate: int = 1,
  vocab: int | None = None,
) -> PolicyBatch:
  """Moves the rows of a step to the devices.

  Args:
    rows: Rows of the step.
    attend: Sharding context, with mesh, axis and layout.
    objective: Objective whose weights the tokens get.
    accumulate: Micro-batches, A.
    vocab: Vocabulary size of the model, V, to check ids.

  Raises:
    DataError: If a token is not an id of the model.
    ShapeError: If A, the mesh's batch axes or the shards do not divide them.
  """
  mask = rows.mask
  put = placer(rows.tokens.shape, attend, accumulate)
  arrays: Any = rows.tokens, rows.labels, mask
  check_ids(Batch(*arrays), vocab)
  ordered = lambda x: put(x, in_order=True)
  count = rows.tokens.shape[0]
  # Of adjacent rows each is in another micro-batch.
  place = np.eye(accumulate, dtype=np.float32)[np.arange(count) % accumulate]
  answers = AnswerArrays(
    weights=ordered(objective.token_weights(mask)),
    advantages=put(rows.advantages),
    behaviour=ordered(rows.behaviour),
    old=ordered(rows.old),
    reference=ordered(rows.reference) if objective.beta else None,
    mask=ordered(mask),
    place=put(place),
  )
  share = put(np.full((count, 1), 1 / count, np.float32))
  return PolicyBatch(
    ordered(rows.tokens),
    ordered(rows.labels),
    ordered(rows.segments),
    answers,
    share,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
  """Loss of a training step: a `GroupObjective` of the model's tokens.

  Attributes:
    group: Objective over groups of answers.
    temperature: Divisor of the logits, that of the rollouts.
  """

  group: GroupObjective = GroupObjective()
  temperature: int | float = 1.0
  # Layers' own losses have no part in it, and 0 asks for no warning.
  index_loss: float = 0.0
  expert_balance: ExpertBalance = ExpertBalance(loss=0.0)

  def __post_init__(self) -> None:
    super().__post_init__()
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name not in _USED and value != field.default:
        raise OptionError(
          field.name,
          f"{value} in a training by rewards",
          "the loss of the policy alone, of products in the computation's "
          "dtype",
          "leave it out",
        )

  def sums(
    self, model: Transformer, batch: PyTree, attend: ShardingContext
  ) -> LossSums:
    """Computes the loss of one micro-batch of a `PolicyBatch` as sums."""
    new = self.logprobs(model, batch, attend)
    answers = batch.answers._replace(place=batch.answers.place[0])
    loss, policy = self.group.sums(new, answers)
    # The step divides by the weight: 1 over all micro-batches.
    weight = jnp.sum(batch.share)
    wrong = jnp.zeros((), jnp.float32)
    nll = jax.lax.stop_gradient(loss)
    return LossSums(loss, nll, weight, wrong, policy=policy)

  def logprobs(
    self, model: Transformer, batch: PyTree, attend: ShardingContext
  ) -> Float[Array, "B T"]:
    """Log-probabilities of a micro-batch's labels, float32 [B, T]."""
    if self.dtype is not None:
      model = cast(model, self.dtype)
    weights = jnp.ones(batch.tokens.shape, jnp.float32)
    rows = Batch(batch.tokens, batch.labels, weights, None, batch.segments)
    return policy_logprobs(model, rows, attend, temperature=self.temperature)


def scorer(
  objective: PolicyObjective, attend: ShardingContext, accumulate: int
) -> Callable[[Transformer, AnswerRows], Float32[np.ndarray, "N T"]]:
  """Function (model, rows) to log-probabilities of labels, float32 [N, T].

  Args:
    objective: Objective with the dtype and the temperature.
    attend: Sharding context of the rows.
    accumulate: Parts in which the rows are scored.
  """

  @jax.jit
  def scored(model: Transformer, batch: PolicyBatch) -> jax.Array:
    score = lambda part: objective.logprobs(model, part, attend)
    return jax.lax.map(score, batch)

  def score(model: Transformer, rows: AnswerRows) -> Float32[np.ndarray, "N T"]:
    batch = place_answers(rows, attend, objective.group, accumulate)
    values = np.asarray(jax.device_get(scored(model, batch)))
    # [A, B / A, T], of adjacent rows each in another part.
    values = values.swapaxes(0, 1).reshape(-1, values.shape[-1])
    return attend.layout.restore(values, shards=attend.size)

  return score
