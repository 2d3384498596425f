"""One step of training: gradients of all micro-batches, then one update.

Guarantees: the loss and its gradients are those of the plain model on one
device, the mean over all weighted labels of the step, however they are cut up
into micro-batches, shards and devices. A step whose loss or gradients are not
finite changes nothing but its counters.
Memory: parameters and moments as they are sharded, one micro-batch's
activations, and with several micro-batches one more copy of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from ringjax.models.coded_weights import refuse_codes
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.nn.sharding_context import ShardingContext
from ringjax.parallel.mesh import with_shardings
from ringjax.train.balance import warn_unbalanced
from ringjax.train.batch import Batch
from ringjax.train.objective import LossSums, Objective
from ringjax.typing import ArrayLeaf


class TrainState(NamedTuple):
  """The state of a training.

  Fields:
    step: int32 [], steps taken, skipped ones included.
    params: the trained parameters: a model, or its adapters.
    optimizer: moments and counts.
    skipped: int32 [], steps in a row, up to the last one, that were not finite.
  """

  step: Int[ArrayLeaf, ""]
  params: PyTree
  optimizer: PyTree
  skipped: Int[ArrayLeaf, ""]


class StepMetrics(NamedTuple):
  """Metrics of one step, float32 [].

  Fields:
    loss: mean negative log-likelihood of a label, without the z-loss.
    objective: mean loss of a label, with the z-loss.
    weight: sum of the labels' weights.
    gradient_norm: before clipping.
    finite: 1, or 0 for a step that changed nothing.
    skipped: such steps in a row.
    wrong: labels outside of the vocabulary, for which the loss is NaN.
  """

  loss: jax.Array
  objective: jax.Array
  weight: jax.Array
  gradient_norm: jax.Array
  finite: jax.Array
  skipped: jax.Array
  wrong: jax.Array | float = 0.0


@runtime_checkable
class TrainingMethod(Protocol):
  """Which parameters are trained, and the model that they make."""

  def model(self, params: PyTree, frozen: PyTree) -> Any:
    """The model that the trained parameters make, with those that are not."""
    ...


class AllParameters:
  """Full-parameter training; `Lora` trains adapters in its place."""

  def model(self, params: Transformer, frozen: PyTree) -> Transformer:
    """The model that the trained parameters make."""
    del frozen
    return params


def shardings(
  optimizer: optax.GradientTransformation, params: PyTree, mesh: Mesh
) -> TrainState:
  """The shardings of a state: moments as their parameters, the rest replicated.

  Args:
    optimizer: of the state.
    params: with their shardings, arrays or shapes.
    mesh: of the state.
  """
  everywhere = NamedSharding(mesh, P())
  mine = jax.tree.map(lambda x: x.sharding, params)
  made = jax.eval_shape(optimizer.init, params)
  moments = optax.tree.map_params(
    optimizer.init,
    _moment_sharding,
    made,
    params,
    transform_non_params=lambda _: everywhere,
  )
  one: Any = everywhere
  return TrainState(one, mine, moments, one)


def _moment_sharding(
  moment: jax.ShapeDtypeStruct, param: Any
) -> jax.sharding.NamedSharding:
  """The sharding of a moment: that of its parameter's axes that it has."""
  sharding = param.sharding
  if moment.shape == param.shape:
    return sharding
  spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
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
  """The shapes and shardings of a state, without its arrays.

  Args:
    optimizer: of the state.
    params: arrays, or shapes with their shardings.
    mesh: of the state; None is one device.
  """
  count: Any = jax.ShapeDtypeStruct((), jnp.int32)
  mine = with_shardings(params, jax.tree.map(lambda x: x.sharding, params))
  made = TrainState(count, mine, jax.eval_shape(optimizer.init, mine), count)
  if mesh is None:
    return made
  return with_shardings(made, shardings(optimizer, mine, mesh))


def start(
  optimizer: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh | None = None,
) -> TrainState:
  """The state before the first step.

  Raises:
    OptionError: a model whose layers are not all on the devices, or codes.
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
  # Two counters that are donated have to be two arrays.
  return TrainState(zero, params, moments, zero + 0)


def make_step(
  optimizer: optax.GradientTransformation,
  attend: ShardingContext,
  objective: Objective,
  method: TrainingMethod | None = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, StepMetrics]]:
  """The compiled step: step(state, frozen, batch).

  The state is donated. `frozen` is the model that adapters are added to, None
  for `AllParameters`; `batch` has the shapes of `place`.

  Args:
    optimizer: by optax.
    attend: the sharding context of a batch, with its rematerialisation.
    objective: the loss.
    method: makes a model of the parameters; default `AllParameters()`.
  """
  method = AllParameters() if method is None else method

  def loss(
    params: PyTree, frozen: Transformer | None, batch: Batch
  ) -> tuple[jax.Array, LossSums]:
    found = objective.sums(method.model(params, frozen), batch, attend)
    return found.loss, found

  def gradients(
    params: PyTree, frozen: Transformer | None, batch: Batch
  ) -> tuple[Any, LossSums]:
    grad = jax.grad(loss, has_aux=True)
    if batch.tokens.shape[0] == 1:
      return grad(params, frozen, jax.tree.map(lambda x: x[0], batch))

    def more(so_far: Any, one: Batch) -> tuple[Any, None]:
      return jax.tree.map(jnp.add, so_far, grad(params, frozen, one)), None

    first = jax.eval_shape(
      grad, params, frozen, jax.tree.map(lambda x: x[0], batch)
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    # Sums of gradients are sharded as the parameters, not replicated.
    grads = jax.tree.map(_like, zeros[0], params)
    return jax.lax.scan(more, (grads, zeros[1]), batch)[0]

  def step(
    state: TrainState, frozen: Transformer | None, batch: Batch
  ) -> tuple[TrainState, StepMetrics]:
    # When the step is compiled.
    warn_unbalanced(state.params if frozen is None else frozen)
    grads, found = gradients(state.params, frozen, batch)
    # A batch of nothing but padding has weight 0, and gradients of 0.
    share = 1 / jnp.maximum(found.weight, jnp.float32(1e-9))
    grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    norm = optax.tree.norm(grads).astype(jnp.float32)
    fine = jnp.isfinite(found.loss) & jnp.isfinite(norm)
    # Optimizers mix dtypes, which the caller's configuration may forbid.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = optimizer.update(grads, state.optimizer, state.params)
      params = optax.apply_updates(state.params, updates)
    kept = lambda new, old: jax.tree.map(
      lambda a, b: jnp.where(fine, a, b), new, old
    )
    skipped = jnp.where(fine, 0, state.skipped + 1).astype(jnp.int32)
    after = TrainState(
      state.step + 1,
      kept(params, state.params),
      kept(moments, state.optimizer),
      skipped,
    )
    metrics = StepMetrics(
      loss=found.nll * share,
      objective=found.loss * share,
      weight=found.weight,
      gradient_norm=norm,
      finite=fine.astype(jnp.float32),
      skipped=skipped.astype(jnp.float32),
      wrong=found.wrong,
    )
    return after, metrics

  return jax.jit(step, donate_argnums=(0,))


def _like(zero: jax.Array, param: jax.Array) -> jax.Array:
  sharding = getattr(jax.typeof(param), "sharding", None)
  if sharding is None or sharding.mesh.empty:
    return zero
  return jax.lax.with_sharding_constraint(zero, sharding)
