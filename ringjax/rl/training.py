"""Training by rewards: answers by an engine, judged, learned from.

Guarantees: a recipe, the questions and the first weights determine the result,
however often the run is interrupted and however long functions take. On one
device tokens are computed as in the engine, see `nn.one_order`; each step
reports how far its log-probabilities are from those of the engine.
Memory: besides a training's the engine's pool; the engine has the training's
own arrays, or with `age` above 0 copies of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ringjax.checks import integer, one_of, positive_int
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.models.checkpoint import cast, place
from ringjax.models.heads.added_layer import refuse_predicting
from ringjax.models.transformer import Transformer
from ringjax.nn.one_order import OneOrderParallel
from ringjax.nn.sharding_context import ContextParallel
from ringjax.parallel.call_sharding import STAGE
from ringjax.parallel.mesh import entering
from ringjax.rl.chat_turns import ChatTurns
from ringjax.rl.group_objective import GroupObjective
from ringjax.rl.group_source import (
  GroupConfig,
  GroupSource,
  Listed,
  QuestionSource,
  RolloutReport,
)
from ringjax.rl.policy_batch import PolicyObjective, place_answers, scorer
from ringjax.rl.rewards import Judge, RewardConfig
from ringjax.rl.rollouts import Environment, RolloutConfig, Rollouts
from ringjax.serve.engine import Engine
from ringjax.serve.engine_config import EngineConfig
from ringjax.train import batch as batches
from ringjax.train import loop, remat
from ringjax.train import step as steps
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.methods.lora import Lora
from ringjax.train.optimizers.coded_moments import refuse_other_blocks
from ringjax.train.recipe import Optimizer, TrainResult, dtype_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRecipe:
  """All settings of a training by rewards except its questions and model.

  Attributes:
    steps: Number of updates.
    rewards: Functions that reward answers.
    rollouts: Settings of the sampling of answers.
    groups: Composition of a batch.
    objective: Objective over groups of answers.
    optimizer: Optimizer.
    accumulate: Micro-batches of an update.
    dtype: Dtype of the computation, of engine and training; None for float32.
    remat: Activations that are kept for the backward pass, of `remat.POLICIES`.
    lora: Adapters in place of all parameters, or None.
    engine: Options of the engine, or None for `engine_config`.
    loop_config: Logging, saving and failure-tolerance settings.
  """

  steps: int
  rewards: RewardConfig
  rollouts: RolloutConfig = RolloutConfig()
  groups: GroupConfig = GroupConfig()
  objective: GroupObjective = GroupObjective()
  optimizer: Optimizer = Optimizer(schedule="constant", weight_decay=0.0)
  accumulate: int = 1
  dtype: str | None = None
  remat: str = "attention"
  lora: Lora | None = None
  engine: EngineConfig | None = None
  loop_config: loop.LoopConfig = loop.LoopConfig(log_every=1)

  def __post_init__(self) -> None:
    positive_int("steps", self.steps)
    integer("accumulate", self.accumulate, least=1)
    one_of("remat", self.remat, remat.POLICIES)
    dtype_of(self.dtype)
    self.optimizer.check_replay(self.loop_config.replay_every)
    if self.rows % self.accumulate:
      raise OptionError(
        "accumulate",
        f"{self.accumulate} micro-batches of {self.rows} answers",
        "a divisor of the answers of an update",
        "pass another number of groups or micro-batches",
      )
    if self.lora is not None and self.lora.over:
      raise OptionError(
        "lora",
        f"adapters that correct the error of {self.lora.over}",
        "adapters that begin at zero in a training by rewards",
        "pass the Lora without over",
      )
    stale = self.groups.age and self.objective.truncate is None
    if stale and self.objective.ratio == "sequence":
      raise OptionError(
        "age",
        f"{self.groups.age} with ratio='sequence' and no truncate",
        "ratios of sequences to the policy at the batch's start",
        "pass truncate=2.0, for instance, in the objective",
      )
    if self.optimizer.qk_clip is not None:
      raise OptionError(
        "qk_clip",
        f"{self.optimizer.qk_clip:g} in a training by rewards",
        "None: its loss records no attention logits",
        "leave it out",
      )
    if self.loop_config.evaluate_every is not None:
      raise OptionError(
        "evaluate_every",
        f"{self.loop_config.evaluate_every} in a training by rewards",
        "None: a batch's reward is that of new answers",
        "leave it out",
      )

  @property
  def rows(self) -> int:
    """Answers of an update."""
    return self.groups.groups * self.rollouts.group // self.groups.minibatches

  def policy_objective(self) -> PolicyObjective:
    """Loss of a step."""
    return PolicyObjective(
      group=self.objective,
      temperature=self.rollouts.temperature,
      dtype=dtype_of(self.dtype),
    )

  def engine_config(self, mesh: Mesh | None) -> EngineConfig:
    """Options of the engine on a mesh: rows for the answers of a batch.

    On one device tokens are computed as in the training.
    """
    if self.engine is not None:
      return self.engine
    rows = min(64, self.groups.groups * self.rollouts.group)
    longest = self.groups.length + 1
    return EngineConfig(
      rows=rows,
      longest=longest,
      capacity=rows * (longest + 32),
      page=16,
      one_order=mesh is None or mesh.size == 1,
      cache_kind="dense",
    )

  def attend(self, mesh: Mesh | None, axis: str | None) -> ContextParallel:
    """Sharding context of the training on a mesh.

    On one device tokens are computed as in the engine.
    """
    policy = remat.policy(self.remat)
    if mesh is None or mesh.size == 1:
      return OneOrderParallel(mesh=mesh, remat=policy)
    if axis is None or mesh.shape[axis] == 1:
      return ContextParallel(mesh=mesh, remat=policy)
    return ContextParallel(mesh=mesh, axis=axis, remat=policy)


@entering(lambda *_, mesh=None, **__: mesh)
def train(
  recipe: RewardRecipe,
  model: Transformer,
  questions: QuestionSource,
  *,
  tokenizer: AnyTokenizer | None = None,
  environment: Environment | None = None,
  chat: ChatTurns | None = None,
  mesh: Mesh | None = None,
  axis: str | None = None,
  engine_mesh: Mesh | None = None,
  checkpoints: Checkpoints | None = None,
  report: Callable[[loop.TrainingReport, RolloutReport], Any] = (
    lambda training, rollouts: None
  ),
  on_step: Callable[[int], Any] = lambda step: None,
) -> TrainResult:
  """Trains by rewards to a recipe's last step, resuming from `checkpoints`.

  Args:
    recipe: Settings of the training.
    model: Initial model, float32 parameters on the mesh. Its buffers are
      donated, unless adapters are trained. It is the reference, too, of which
      a copy is kept if the objective has a `beta`.
    questions: Function from a number to a question; `Listed` for a list.
    tokenizer: Tokenizer that turns answers into texts for the functions.
    environment: Function that continues a conversation after each answer.
    chat: Chat template of an environment's messages, or None.
    mesh: Mesh of the devices; None for one device.
    axis: Mesh axis that shards the sequence in the training, or None.
    engine_mesh: Mesh of the engine, to which weights are moved; default: that
      of the training, on which nothing is copied.
    checkpoints: A `Checkpoints`, or None.
    report: Function that is called with the metrics of some steps and those of
      the last batch of answers.
    on_step: Function that is called before each step with the steps taken.

  Raises:
    RewardError: If a function gives no finite number, or none in time.
    OptionError: If options contradict, the tokenizer or the engine does not fit
      the model, or the model has a layer that predicts further tokens or a
      head; in several processes.
    PromptError: If a question does not fit a row; those of `Listed` are checked
      before the first step.
    TemplateError: If turns of the chat template can't be told from an answer.
    RingjaxError: See `loop.fit`.
  """
  if jax.process_count() > 1:
    raise OptionError(
      "rewards",
      f"a training by rewards in {jax.process_count()} processes",
      "one process, with all of its devices",
      "run it in one process",
    )
  # Of its weights rewards would change none: only weight decay would.
  refuse_predicting(model, "train it by rewards")
  attend = recipe.attend(mesh, axis)
  if attend.stages > 1:
    model.stack.check_stages()
    _check_engine_mesh(engine_mesh)
  batches.check(recipe.rows, recipe.groups.length, attend, recipe.accumulate)
  objective = recipe.policy_objective()
  method = recipe.lora or steps.AllParameters()
  policy_of = lambda params: (
    params if recipe.lora is None else recipe.lora.merged(params, model)
  )
  reference = None
  if recipe.objective.beta:
    reference = jax.tree.map(jnp.copy, model)
  optimizer = recipe.optimizer.build(recipe.steps, mesh)
  params: Any = model
  if recipe.lora is not None:
    params = recipe.lora.start(model, seed=recipe.rollouts.seed)
  state, position = _first_state(optimizer, params, mesh, checkpoints)
  current: dict[str, Any] = {"params": state.params}
  score = scorer(objective, attend, recipe.accumulate)
  with contextlib.ExitStack() as stack:
    engine = stack.enter_context(
      Engine(
        _engine_model(policy_of(state.params), objective, engine_mesh),
        recipe.engine_config(engine_mesh or mesh),
        mesh=engine_mesh or mesh,
        tokenizer=tokenizer,
      )
    )
    rollouts = Rollouts(
      engine,
      recipe.rollouts,
      tokenizer=tokenizer,
      environment=environment,
      chat=chat,
      longest=recipe.groups.length + 1,
    )
    if isinstance(questions, Listed):
      for question in questions.items:
        rollouts.check(question)
    judge = stack.enter_context(Judge(recipe.rewards))
    source = stack.enter_context(
      contextlib.closing(
        GroupSource(
          questions,
          rollouts,
          judge,
          recipe.objective,
          recipe.groups,
          lambda: policy_of(current["params"]),
          score=score,
          reference=reference,
        )
      )
    )
    if position is not None:
      source.restore(position)
    compiled = steps.make_step(optimizer, attend, objective, method)

    def step(state: Any, frozen: Any, batch: Any) -> Any:
      new, metrics = compiled(state, frozen, batch)
      current["params"] = new.params
      return new, metrics

    def reported(training: loop.TrainingReport) -> None:
      assert source.report is not None
      report(training, source.report)

    fitted = loop.fit(
      state,
      None if recipe.lora is None else model,
      source,
      steps=recipe.steps,
      step=step,
      place=lambda rows: place_answers(
        rows, attend, recipe.objective, recipe.accumulate, model.config.vocab
      ),
      config=recipe.loop_config,
      checkpoints=checkpoints,
      report=reported,
      on_step=on_step,
    )
  trained = fitted.state.params
  return TrainResult(
    model=policy_of(trained),
    step=int(jax.device_get(fitted.state.step)),
    stopped=fitted.stopped,
    adapter=None if recipe.lora is None else (recipe.lora, trained),
  )


def _check_engine_mesh(engine_mesh: Mesh | None) -> None:
  """Refuses an engine on stages, which pass rows on without a cache.

  Raises:
    OptionError: If no mesh of the engine is given, or one with stages.
  """
  if engine_mesh is None or dict(engine_mesh.shape).get(STAGE, 1) > 1:
    raise OptionError(
      "engine_mesh",
      f"{None if engine_mesh is None else dict(engine_mesh.shape)} for a "
      f"training on a mesh with an axis {STAGE!r}, which an engine does not "
      "have",
      f"a mesh without {STAGE!r} for the engine, such as rj.make_mesh()",
      f"pass engine_mesh=, or a mesh without {STAGE!r}",
    )


def _engine_model(
  model: Transformer, objective: PolicyObjective, mesh: Mesh | None
) -> Any:
  """The policy in the dtype of the computation, on a mesh of the engine's own.

  `mesh`: that mesh, or None for the arrays as they are.
  """
  if objective.dtype is not None:
    model = cast(model, objective.dtype)
  return model if mesh is None else place(model, mesh)


def _first_state(
  optimizer: Any,
  params: Any,
  mesh: Mesh | None,
  checkpoints: Checkpoints | None,
) -> tuple[steps.TrainState, Any]:
  """The first state, and the position of its source if it was restored."""
  if checkpoints is not None:
    form = steps.form(optimizer, params, mesh)
    try:
      restored = checkpoints.restore(like=form._asdict())
    except CheckpointMismatchError as error:
      refuse_other_blocks(error)
      raise
    if restored is not None:
      return steps.TrainState(**restored[0]), restored[1]["data"]
  return steps.start(optimizer, params, mesh), None
