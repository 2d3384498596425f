"""Layers in stages: rows pass groups of devices that hold parts of the layers.

Guarantees: results and gradients are those of the layers one after another.
Cost: of M groups of rows in V rounds over S stages a device computes
V M + S - 1 times, of which S - 1 are idle ("bubble"); after each, one group's
activations go to the next stage, and in the last round back to their place.
Memory: inputs and results of a device's own rows, and what the backward pass
keeps of V M + S - 1 passes of a stage.
Ref: Huang et al. 2019, GPipe, arXiv 1811.06965; rounds as in Narayanan et al.
2021, arXiv 2104.04473, which calls them virtual stages.

Rows are sharded over the stages while they are outside of the layers. At pass t
stage s computes group m of round v, where t - s = v M + m. Inputs wait in a
store of M / S groups a stage, of which one place moves by a stage in each pass,
so that a group reaches the first stage when its turn comes, and its result the
stage that had its input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.errors import ShapeError
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import STAGE


class Turn(NamedTuple):
  """The rows and layers of a pass, for each of S stages, [S] each.

  Fields:
    stage: Number of the stage, int32 [].
    round: Number of the round, int32 [].
    group: Number of the group of rows, int32 [].
    is_real: Whether there is such a group, bool [].
  """

  stage: Int[Array, "*S"]
  round: Int[Array, "*S"]
  group: Int[Array, "*S"]
  is_real: Bool[Array, "*S"]


class _Carry(NamedTuple):
  """State between passes, sharded over the stages.

  Fields:
    arrived: Activations from the stage before, [S, b, T, ...].
    store: Inputs that wait, and results, [S, M / S, b, T, ...].
    waiting: Results of a round that wait for the next one, those of the first
      stage, [M - S + 1, S, b, T, ...]; none if there is one round.
    sums: Sums that the layers recorded, by stage, round and group.
  """

  arrived: Float[Array, "S b T *D"]
  store: Float[Array, "S c b T *D"]
  waiting: Float[Array, "w S b T *D"]
  sums: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSchedule:
  """Passes of groups of rows through stages.

  Attributes:
    stages: Number of stages, S.
    groups: Number of groups of rows, M, a multiple of the stages.
    rounds: Number of rounds, V.
  """

  stages: int
  groups: int
  rounds: int = 1

  def run(
    self,
    compute: Callable[[Float[Array, "S b T *D"], Turn], tuple[Any, PyTree]],
    store: Float[Array, "S c b T *D"],
  ) -> tuple[Float[Array, "S c b T *D"], PyTree]:
    """Pass groups of rows through all stages.

    Args:
      compute: Function of the stages' activations and turns that returns the
        activations after their layers, and sums that these record, [S, ...].
      store: Groups, [S, M / S, b, T, ...] in their order.

    Returns:
      Results in the order of the store, and each group's sums, [S, V, M, ...].
    """
    stages, passes = self.stages, self.groups * self.rounds
    stage = jnp.arange(stages, dtype=jnp.int32)
    is_first, is_last = stage == 0, stage == stages - 1
    choose = jax.vmap(jnp.where)
    first = Turn(stage, stage, stage, is_first)
    sums_shape = jax.eval_shape(compute, store[:, 0], first)[1]
    zero_sums = jax.tree.map(
      lambda x: jnp.zeros(
        (stages, self.rounds, self.groups, *x.shape[1:]), x.dtype
      ),
      sums_shape,
    )
    wait = self.groups - stages + 1
    num_waiting = wait if self.rounds > 1 else 0
    # A stage without work computes with numbers of its own rows.
    start = _Carry(
      store[:, 0],
      store,
      jnp.broadcast_to(store[:, 0], (num_waiting, *store[:, 0].shape)),
      zero_sums,
    )
    # As many places move to the stage before, so that each is used in turn.
    places = self.groups // stages

    def step(carry: _Carry, t: Int[Array, ""]) -> tuple[_Carry, None]:
      number = jnp.clip(t - stage, 0, passes - 1)
      is_real = number == t - stage
      turn = Turn(stage, number // self.groups, number % self.groups, is_real)
      place = t % places
      column = lax.dynamic_index_in_dim(carry.store, place, 1, keepdims=False)
      x = column
      if self.rounds > 1:
        # It arrived `wait` passes before this one.
        x = jnp.where(t < self.groups, column, carry.waiting[t % wait])
      y, sums = compute(choose(is_first, x, carry.arrived), turn)
      arrived, waiting = jnp.roll(y, 1, 0), carry.waiting
      if self.rounds > 1:
        waiting = waiting.at[t % wait].set(arrived)
      column = choose(is_last, y, jnp.roll(column, -1, 0))
      store = lax.dynamic_update_index_in_dim(carry.store, column, place, 1)
      masked = jax.tree.map(
        lambda x: choose(is_real, x, jnp.zeros_like(x)), sums
      )
      add = jax.vmap(lambda total, x, n, m: total.at[n, m].add(x))
      total = jax.tree.map(
        lambda total, x: add(total, x, turn.round, turn.group),
        carry.sums,
        masked,
      )
      return _Carry(arrived, store, waiting, total), None

    numbers = jnp.arange(passes + stages - 1, dtype=jnp.int32)
    end, _ = lax.scan(step, start, numbers)
    # The first result was stored in pass S - 1.
    return jnp.roll(end.store, -((stages - 1) % places), 1), end.sums


@dataclasses.dataclass(frozen=True)
class StageGroups:
  """Groups of a batch's rows, which pass the stages one after another.

  A group has rows of each data shard, so no row changes its shard.

  Attributes:
    context: Sharding context of the rows.
    shards: Number of data shards, without the stages.
    groups: Number of groups.
    rows: Rows of a data shard in a group.
  """

  context: RowSharding
  shards: int
  groups: int
  rows: int

  @classmethod
  def of(cls, batch: int, rows: int, context: RowSharding) -> StageGroups:
    """Groups of a batch.

    Raises:
      ShapeError: If the stages do not divide the number of groups.
    """
    stages, shards = context.stages, context.data_size // context.stages
    unit = shards * stages * rows
    if batch % unit:
      raise ShapeError(
        "rows",
        f"{batch} of {rows} at once on {shards} data shards in {stages} stages",
        f"a multiple of {unit}",
        f"pass a batch of {-(-batch // unit) * unit}, or fewer rows at once",
      )
    return cls(context, shards, batch // (shards * rows), rows)

  def split(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "M b ..."]:
    """Arrange rows [B, ...] by groups, [M, b, ...]."""
    shape = (self.shards, self.groups, self.rows, *x.shape[1:])
    return jnp.moveaxis(x.reshape(shape), 0, 1).reshape(
      self.groups, self.shards * self.rows, *x.shape[1:]
    )

  def store(self, x: Float[Array, "B T *D"]) -> Float[Array, "S c b T *D"]:
    """Arrange activations by the stages that hold them and their groups."""
    groups = self.split(self.context.constrain(x))
    by_stage = (self.context.stages, -1, *groups.shape[1:])
    return self._constrained(groups.reshape(by_stage), self.context.spec(x))

  def restore(self, x: Float[Array, "S c b T *D"]) -> Float[Array, "B T *D"]:
    """Activations in the order of the batch."""
    shape = (self.groups, self.shards, self.rows, *x.shape[3:])
    batch = (math.prod(shape[:3]), *x.shape[3:])
    spec = self.context.spec(jax.ShapeDtypeStruct(batch, x.dtype))
    rows = jnp.moveaxis(self._constrained(x, spec).reshape(shape), 1, 0)
    return self.context.constrain(rows.reshape(batch))

  def joined(self, x: Shaped[Array, "L M b ..."]) -> Shaped[Array, "L B ..."]:
    """Numbers of layers for each row, in the order of the batch."""
    layers, other = x.shape[0], x.shape[3:]
    shape = (layers, self.groups, self.shards, self.rows, *other)
    return jnp.moveaxis(x.reshape(shape), 1, 2).reshape(layers, -1, *other)

  def _constrained(self, x: Float[Array, "S c b T *D"], spec: P) -> Any:
    axes, *others = spec
    data = tuple(axis for axis in collectives.names(axes) if axis != STAGE)
    return self.context.constrained(x, P(STAGE, None, data or None, *others))


class RowSharding(Protocol):
  """Sharding context of rows, see `nn.sharding_context`."""

  @property
  def stages(self) -> int: ...

  @property
  def data_size(self) -> int: ...

  def spec(self, x: Shaped[Array | jax.ShapeDtypeStruct, " ..."]) -> P: ...

  def constrain(
    self, x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T *d"]: ...

  def constrained(
    self, x: Shaped[Array, " ..."], spec: P
  ) -> Shaped[Array, " ..."]: ...


def equal_neighbours(items: Sequence[Any]) -> list[range]:
  """Split into ranges of neighbours that are equal."""
  ranges: list[range] = []
  for n, item in enumerate(items):
    if ranges and items[ranges[-1].start] == item:
      ranges[-1] = range(ranges[-1].start, n + 1)
    else:
      ranges.append(range(n, n + 1))
  return ranges
