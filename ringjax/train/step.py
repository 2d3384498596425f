"""One step of training: gradients of all micro-batches, then one update.

Guarantees: the loss and its gradients are those of the plain model on one
device, the mean over all weighted labels of the step, however they are cut up
into micro-batches, shards and devices. A step whose loss or gradients are not
finite changes nothing but its counters.
Memory: parameters and moments as they are sharded, one micro-batch's
activations, and with several micro-batches one more copy of the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.parallel.mesh import lying
from ringjax.train.batch import Batch
from ringjax.train.objective import LossSums, sums


class TrainState(NamedTuple):
  """What training changes.

  Fields:
    step: int32 [], steps taken, those that changed nothing too.
    params: what is trained: the model, or what is added to it.
    optimizer: moments and counts.
    skipped: int32 [], steps in a row, up to the last one, that were not finite.
  """

  step: Any
  params: Any
  optimizer: Any
  skipped: Any


class StepMetrics(NamedTuple):
  """Of one step, float32 [].

  Fields:
    loss: mean negative log-likelihood of a label, without the z-loss.
    objective: what was minimised.
    weight: of all labels.
    gradient_norm: before clipping.
    finite: 1, or 0 for a step that changed nothing.
    skipped: such steps in a row.
  """

  loss: jax.Array
  objective: jax.Array
  weight: jax.Array
  gradient_norm: jax.Array
  finite: jax.Array
  skipped: jax.Array


class AllParameters:
  """Trains all parameters of a model."""

  def model(self, params: Transformer, frozen: Any) -> Transformer:
    """The model that these parameters are."""
    del frozen
    return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """What is minimised, and in what it is computed.

  Attributes:
    z_loss: factor of the squared logsumexp.
    block: tokens of a step of the head, on each shard.
    dtype: of the computation; None: the parameters'.
  """

  z_loss: float = 0.0
  block: int = 1024
  dtype: Any = None

  def sums(
    self, model: Transformer, batch: Batch, attend: ShardingContext
  ) -> LossSums:
    """The sums of one micro-batch."""
    return sums(
      model,
      batch,
      attend,
      z_loss=self.z_loss,
      block=self.block,
      dtype=self.dtype,
    )


def shardings(
  optimizer: optax.GradientTransformation, params: Any, mesh: Any
) -> TrainState:
  """Where a state lies: moments as their parameters, the rest everywhere.

  Args:
    optimizer: of the state.
    params: with their shardings, arrays or shapes.
    mesh: of all of it.
  """
  everywhere = NamedSharding(mesh, P())
  mine = jax.tree.map(lambda x: x.sharding, params)
  made = jax.eval_shape(optimizer.init, params)
  moments = optax.tree.map_params(
    optimizer.init,
    _beside,
    made,
    params,
    transform_non_params=lambda _: everywhere,
  )
  return TrainState(everywhere, mine, moments, everywhere)


def _beside(moment: Any, param: Any) -> Any:
  """Where a moment lies: as its parameter, or as what is left of its axes."""
  sharding = param.sharding
  if moment.shape == param.shape:
    return sharding
  spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
  for axis in range(param.ndim):
    # Adafactor has a number for each row and each column of a matrix.
    if moment.shape == param.shape[:axis] + param.shape[axis + 1 :]:
      return NamedSharding(sharding.mesh, P(*spec[:axis], *spec[axis + 1 :]))
  return NamedSharding(sharding.mesh, P())


def form(
  optimizer: optax.GradientTransformation, params: Any, mesh: Any = None
) -> TrainState:
  """The shapes of a state, and where it lies, without its memory.

  Args:
    optimizer: of the state.
    params: arrays, or shapes with their shardings.
    mesh: of all of it; None is one device.
  """
  count = jax.ShapeDtypeStruct((), jnp.int32)
  mine = lying(params, jax.tree.map(lambda x: x.sharding, params))
  made = TrainState(count, mine, jax.eval_shape(optimizer.init, mine), count)
  if mesh is None:
    return made
  return lying(made, shardings(optimizer, mine, mesh))


def start(
  optimizer: optax.GradientTransformation, params: Any, mesh: Any = None
) -> TrainState:
  """The state before the first step."""

  def make(params: Any) -> tuple[Any, jax.Array]:
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
  method: Any = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, StepMetrics]]:
  """The compiled step: step(state, frozen, batch).

  The state is donated. `frozen` is what the method needs beside it, None for
  `AllParameters`; `batch` has the shapes of `place`.

  Args:
    optimizer: by optax.
    attend: how a batch's tokens lie on devices, and what is kept of a layer.
    objective: what is minimised.
    method: turns parameters into a model; default `AllParameters()`.
  """
  method = AllParameters() if method is None else method

  def loss(
    params: Any, frozen: Any, batch: Batch
  ) -> tuple[jax.Array, LossSums]:
    found = objective.sums(method.model(params, frozen), batch, attend)
    return found.loss, found

  def gradients(params: Any, frozen: Any, batch: Batch) -> tuple[Any, LossSums]:
    grad = jax.grad(loss, has_aux=True)
    if batch.tokens.shape[0] == 1:
      return grad(params, frozen, jax.tree.map(lambda x: x[0], batch))

    def more(so_far: Any, one: Batch) -> tuple[Any, None]:
      return jax.tree.map(jnp.add, so_far, grad(params, frozen, one)), None

    first = jax.eval_shape(
      grad, params, frozen, jax.tree.map(lambda x: x[0], batch)
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    # Sums of gradients lie as the parameters do, not whole on each device.
    grads = jax.tree.map(_like, zeros[0], params)
    return jax.lax.scan(more, (grads, zeros[1]), batch)[0]

  def step(
    state: TrainState, frozen: Any, batch: Batch
  ) -> tuple[TrainState, StepMetrics]:
    grads, found = gradients(state.params, frozen, batch)
    # A batch of nothing but padding has no mean, and no gradient either.
    share = 1 / jnp.maximum(found.weight, jnp.float32(1e-9))
    grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    norm = optax.tree.norm(grads).astype(jnp.float32)
    fine = jnp.isfinite(found.loss) & jnp.isfinite(norm)
    # Optimizers mix dtypes, which whoever is strict does not allow elsewhere.
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
    figures = StepMetrics(
      loss=found.nll * share,
      objective=found.loss * share,
      weight=found.weight,
      gradient_norm=norm,
      finite=fine.astype(jnp.float32),
      skipped=skipped.astype(jnp.float32),
    )
    return after, figures

  return jax.jit(step, donate_argnums=(0,))


def _like(zero: jax.Array, param: Any) -> jax.Array:
  sharding = getattr(jax.typeof(param), "sharding", None)
  if sharding is None or sharding.mesh.empty:
    return zero
  return jax.lax.with_sharding_constraint(zero, sharding)
