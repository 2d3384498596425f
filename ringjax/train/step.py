"""One step of training: gradients of all micro-batches, then one update.

Guarantees: the loss and its gradients are those of the plain model on one
device, the mean over all weighted labels of the step, however they are split
into micro-batches, shards and devices. A step whose loss or gradients are not
finite changes nothing but its counters.
Memory: parameters and moments as they are sharded, one micro-batch's
activations, and with several micro-batches one more copy of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import refuse_codes
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.sharding_context import ShardingContext
from ringjax.parallel.mesh import compiler_options, with_shardings
from ringjax.train.choice_training import (
  ChoiceStatistics,
  has_indexes,
  of_indexes,
  without_indexes,
)
from ringjax.train.expert_balance import (
  RouterStatistics,
  refuse_frozen,
  warn_unbalanced,
  with_updated_biases,
)
from ringjax.train.objective import LossSums, Objective
from ringjax.train.optimizers.host_moments import HOST, is_on_host, on_host
from ringjax.train.optimizers.qk_clip import (
  PREDICTING,
  ScoreStatistics,
  check_clipped_training,
  check_qk_clip,
  with_clipped_heads,
)
from ringjax.train.posttraining.posttraining_loss import Mean
from ringjax.typing import ArrayLeaf


class TrainState(NamedTuple):
  """The state of a training.

  Fields:
    step: Steps taken, including skipped ones, int32 [].
    params: Trained parameters: a model, or its adapters.
    optimizer: Moments and counts of the optimizer.
    skipped: Steps in a row, up to the last one, that were not finite, int32 [].
  """

  step: Int[ArrayLeaf, ""]
  params: PyTree
  optimizer: PyTree
  skipped: Int[ArrayLeaf, ""]


class StepMetrics(NamedTuple):
  """Metrics of one step, float32 [].

  Fields:
    loss: Mean negative log-likelihood of a label, without the z-loss; or the
      mean of `Objective.posttraining`.
    objective: Mean loss of a label, with the z-loss and the losses of
      experts' balance.
    weight: Sum of the labels' weights, or of what that loss counts.
    gradient_norm: Global norm of the gradients before clipping.
    finite: 1, or 0 for a step that changed nothing.
    skipped: Steps in a row that changed nothing.
    wrong: Number of labels outside of the vocabulary; the loss is then NaN.
    experts: Statistics of the routing; None for a model without experts.
    choice: Statistics of the keys that layers choose; None if all read all.
    policy: Statistics of a policy, see `rj.rl`; None of other losses.
    means: Means of a loss after pre-training, as sums, or None.
    predicted: Mean negative log-likelihood of a label by the layer that
      predicts one token further; None if it is not trained.
    scores: Statistics of the attention logits; None without `qk_clip`.
  """

  loss: jax.Array
  objective: jax.Array
  weight: jax.Array
  gradient_norm: jax.Array
  finite: jax.Array
  skipped: jax.Array
  wrong: jax.Array | float = 0.0
  experts: RouterStatistics | None = None
  choice: ChoiceStatistics | None = None
  policy: PyTree = None
  means: dict[str, Mean] | None = None
  predicted: jax.Array | None = None
  scores: ScoreStatistics | None = None


@runtime_checkable
class TrainingMethod(Protocol):
  """Interface of training methods: a model from its trained parameters."""

  def model(self, params: PyTree, frozen: PyTree) -> Any:
    """The model of the trained parameters and the frozen ones."""
    ...


class AllParameters:
  """Full-parameter training; `Lora` trains adapters in its place."""

  def model(self, params: Transformer, frozen: PyTree) -> Transformer:
    """The model of the trained parameters."""
    del frozen
    return params


def shardings(
  optimizer: optax.GradientTransformation, params: PyTree, mesh: Mesh
) -> TrainState:
  """Shardings of a state: moments as their parameters, the rest replicated.

  Args:
    optimizer: Optimizer of the state.
    params: Parameters with their shardings, arrays or shapes.
    mesh: Mesh of the state.
  """
  replicated = NamedSharding(mesh, P())
  param_shardings = jax.tree.map(lambda x: x.sharding, params)
  moment_shapes = jax.eval_shape(optimizer.init, params)
  moments = optax.tree.map_params(
    optimizer.init,
    _moment_sharding,
    moment_shapes,
    params,
    transform_non_params=lambda _: replicated,
  )
  moments = jax.tree.map(
    lambda x, host: x.with_memory_kind(HOST) if host else x,
    moments,
    on_host(optimizer.init, params),
  )
  scalar: Any = replicated
  return TrainState(scalar, param_shardings, moments, scalar)


def _moment_sharding(
  moment: jax.ShapeDtypeStruct, param: Any
) -> jax.sharding.NamedSharding:
  """Sharding of a moment: that of the parameter's axes that it has."""
  sharding = param.sharding
  if moment.shape == param.shape:
    return sharding
  spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
  is_blocks = moment.ndim == param.ndim > 0
  if is_blocks and moment.shape[:-1] == param.shape[:-1]:
    # The largest number of each block of the last axis.
    shards = param.shape[-1] // sharding.shard_shape(param.shape)[-1]
    last = None if moment.shape[-1] % shards else spec[-1]
    return NamedSharding(sharding.mesh, P(*spec[:-1], last))
  for axis in range(param.ndim):
    # Adafactor has a moment for each row and each column of a matrix.
    if moment.shape == param.shape[:axis] + param.shape[axis + 1 :]:
      return NamedSharding(sharding.mesh, P(*spec[:axis], *spec[axis + 1 :]))
  return NamedSharding(sharding.mesh, P())


def form(
  optimizer: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh | None = None,
) -> TrainState:
  """Shapes and shardings of a state, without its arrays.

  Args:
    optimizer: Optimizer of the state.
    params: Arrays, or shapes with their shardings.
    mesh: Mesh of the state; None for one device.
  """
  count: Any = jax.ShapeDtypeStruct((), jnp.int32)
  param_shapes = with_shardings(
    params, jax.tree.map(lambda x: x.sharding, params)
  )
  state = TrainState(
    count, param_shapes, jax.eval_shape(optimizer.init, param_shapes), count
  )
  if mesh is None:
    host = on_host(optimizer.init, param_shapes)
    return state._replace(
      optimizer=jax.tree.map(_placed_moment, state.optimizer, host)
    )
  return with_shardings(state, shardings(optimizer, param_shapes, mesh))


def _placed_moment(moment: jax.ShapeDtypeStruct, host: bool) -> Any:
  """The shape of a moment on one device, with its memory."""
  if not host:
    return moment
  # With a SingleDeviceSharding a step would be traced as if an array that was
  # restored were on the device.
  mesh = Mesh(np.array(jax.local_devices()[:1]), ("device",))
  sharding = NamedSharding(mesh, P(), memory_kind=HOST)
  return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=sharding)


def start(
  optimizer: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh | None = None,
) -> TrainState:
  """Makes the state before the first step.

  Raises:
    OptionError: If not all layers are on the devices, or some are codes.
  """
  refuse_placed(params, "train its weights", "train adapters of it: Lora()")
  refuse_codes(params, "train it")

  def make(params: PyTree) -> tuple[Any, jax.Array]:
    return optimizer.init(params), jnp.int32(0)

  if mesh is None:
    moments, zero = jax.jit(make)(params)
  else:
    want = shardings(optimizer, params, mesh)
    moments, zero = jax.jit(make, out_shardings=(want.optimizer, want.step))(
      params
    )
  # The two counters are donated, so they must be two arrays.
  return TrainState(zero, params, moments, zero + 0)


def make_step(
  optimizer: optax.GradientTransformation,
  attend: ShardingContext,
  objective: Objective,
  method: TrainingMethod | None = None,
  *,
  qk_clip: float | None = None,
) -> Callable[[TrainState, Any, Any], tuple[TrainState, StepMetrics]]:
  """Compiles a training step: step(state, frozen, batch).

  The state is donated. `frozen` is the model that adapters are added to, None
  for `AllParameters`; `batch` has the shapes of `place`, or what
  else the objective takes: a tree of arrays [A, B, ...] with `tokens`.

  Args:
    optimizer: Optimizer of optax.
    attend: Sharding context of a batch, with its rematerialisation.
    objective: Loss.
    method: Function from parameters to a model; default `AllParameters()`.
    qk_clip: Largest attention logit that a head keeps, see `Optimizer`.
  """
  method = AllParameters() if method is None else method
  all_trained = isinstance(method, AllParameters)
  warm_up = objective.index_warm_up
  if not all_trained:
    if warm_up:
      raise OptionError(
        "index_warm_up",
        f"it with {type(method).__name__}, which freezes the index",
        "a training of all parameters",
        "train the index first, in a run of its own",
      )
    # The index is frozen, too: its loss would be computed for nothing.
    objective = dataclasses.replace(objective, index_loss=0.0)
  refuse_frozen(objective.expert_balance, None if all_trained else method)
  others = {
    type(method).__name__: not all_trained,
    PREDICTING: objective.predict_loss,
    "index_warm_up": warm_up,
  }
  check_clipped_training(qk_clip, others)
  if qk_clip is not None:
    objective = dataclasses.replace(objective, record_scores=True)
  optimizer = optax.with_extra_args_support(optimizer)

  def loss(
    params: PyTree, frozen: Transformer | None, batch: Any
  ) -> tuple[jax.Array, LossSums]:
    sums = objective.sums(method.model(params, frozen), batch, attend)
    return sums.loss, sums

  def gradients(
    params: PyTree, frozen: Transformer | None, batch: Any
  ) -> tuple[Any, LossSums]:
    grad = jax.grad(loss, has_aux=True)
    if batch.tokens.shape[0] == 1:
      return grad(params, frozen, jax.tree.map(lambda x: x[0], batch))

    def add_micro_batch(
      accumulated: PyTree, micro_batch: Any
    ) -> tuple[Any, None]:
      grads, sums = accumulated
      more_grads, more_sums = grad(params, frozen, micro_batch)
      grads = jax.tree.map(jnp.add, grads, more_grads)
      return (grads, sums.plus(more_sums)), None

    first = jax.eval_shape(
      grad, params, frozen, jax.tree.map(lambda x: x[0], batch)
    )
    # Sums of gradients are sharded like the parameters, not replicated.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first[0])
    grads = jax.tree.map(_like, zeros, params)
    begin = (grads, LossSums.zeros(first[1]))
    return jax.lax.scan(add_micro_batch, begin, batch)[0]

  def step(
    state: TrainState, frozen: Transformer | None, batch: Any
  ) -> tuple[TrainState, StepMetrics]:
    # Runs once, when the step is traced.
    trained = state.params if frozen is None else frozen
    warn_unbalanced(trained, objective.expert_balance)
    check_qk_clip(qk_clip, trained)
    grads, sums = gradients(state.params, frozen, batch)
    # A batch of padding only has weight 0, and gradients of 0.
    share = 1 / jnp.maximum(sums.weight, jnp.float32(1e-9))
    grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    norm = optax.tree.norm(grads).astype(jnp.float32)
    is_finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    # Optimizers mix dtypes, which the caller's configuration may forbid.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = optimizer.update(
        grads, state.optimizer, state.params, is_finite=is_finite
      )
      # Weight decay is an update without a gradient.
      if warm_up:
        updates = of_indexes(updates)
      elif not (objective.index_loss and has_indexes(trained)):
        updates = without_indexes(updates)
      params = optax.apply_updates(state.params, updates)
    rate = 0.0 if warm_up else objective.expert_balance.bias_rate
    if rate and sums.routing is not None:
      model: Any = params
      params = with_updated_biases(model, sums.routing, rate)
    if qk_clip is not None:
      assert sums.scores is not None
      clipped: Any = params
      params = with_clipped_heads(clipped, sums.scores, qk_clip)
    if_finite = lambda new, old: jax.tree.map(
      # What is in the host's memory was updated only if it is finite.
      lambda a, b: a if is_on_host(a) else jnp.where(is_finite, a, b),
      new,
      old,
    )
    skipped = jnp.where(is_finite, 0, state.skipped + 1).astype(jnp.int32)
    new_state = TrainState(
      state.step + 1,
      if_finite(params, state.params),
      if_finite(moments, state.optimizer),
      skipped,
    )
    metrics = StepMetrics(
      loss=sums.nll * share,
      objective=sums.loss * share,
      weight=sums.weight,
      gradient_norm=norm,
      finite=is_finite.astype(jnp.float32),
      skipped=skipped.astype(jnp.float32),
      wrong=sums.wrong,
      experts=None if sums.routing is None else sums.routing.statistics(),
      choice=None if sums.choice is None else sums.choice.statistics(),
      policy=None if sums.policy is None else sums.policy.statistics(),
      means=sums.metrics,
      predicted=None if sums.predicted is None else sums.predicted * share,
      scores=None
      if qk_clip is None or sums.scores is None
      else sums.scores.statistics(qk_clip, is_finite),
    )
    return new_state, metrics

  options = compiler_options(attend.mesh)
  return jax.jit(step, donate_argnums=(0,), compiler_options=options)


def _like(zero: jax.Array, param: jax.Array) -> jax.Array:
  sharding = getattr(jax.typeof(param), "sharding", None)
  if sharding is None or sharding.mesh.empty:
    return zero
  return jax.lax.with_sharding_constraint(zero, sharding)
