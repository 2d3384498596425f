"""Base class of all strategies."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.ops.attention.attend import attend
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Mask
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis
from ringjax.parallel.layout import Layout
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class Strategy:
  """A strategy that moves keys or queries over `axis`, around `local`.

  With `forward` and `backward` it is an `attend.Algorithm`.

  Attributes:
    local: Local algorithm that it wraps, or a strategy of another level.
    axis: Mesh axis over which it sends; None: one shard.
  """

  # The names of the strategies that it may wrap.
  inside: ClassVar[tuple[str, ...]] = ()
  # The layouts that it serves.
  layouts: ClassVar[tuple[type[Layout], ...]] = (Layout,)

  local: Any = AutoKernel()
  axis: Axis | None = None

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes of all levels."""
    return (*collectives.names(self.axis), *self.local.axes)

  @property
  def differentiable(self) -> bool:
    """Whether JAX may differentiate `forward` itself."""
    return self.local.differentiable

  def span(self, keys: int) -> int:
    """Number of keys that a call sees whose operands hold `keys`."""
    return self._place()[0] * self.local.span(keys)

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Any:
    """Bind to `axis`, restricted to the ring distances that are `needed`."""
    del needed
    return dataclasses.replace(self, axis=axis)

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Any:
    """Adapt to a mask and a layout, or refuse them.

    `derived`: whether queries and keys are the same tokens, at the same places.

    Raises:
      OptionError: If the strategy does not serve them.
    """
    del mask, layout, derived
    return self

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    """Attend per shard by this strategy, see `attend.attend`."""
    return attend(self, scores, x, terms, context)

  def _place(self) -> tuple[int, Any]:
    """Return (number of shards, index of this one)."""
    if self.axis is None:
      return 1, 0
    return (
      collectives.axis_size(self.axis),
      collectives.axis_index(self.axis),
    )

  def _source(self, distance: Index) -> Index:
    """Index of the shard `distance` places before this one."""
    size, shard = self._place()
    return (shard - distance) % size

  def _check_consecutive(
    self, layout: Layout, derived: bool, remedy: str
  ) -> None:
    """Raise OptionError unless consecutive shards have consecutive tokens."""
    if derived and isinstance(layout, self.layouts):
      return
    description = "positions of your own, or keys of another length"
    raise OptionError(
      "strategy",
      f"{type(self).__name__} with "
      + (f"the layout {layout}" if derived else description),
      "consecutive tokens on consecutive shards",
      f"pass {remedy}, or strategy='ring'",
    )


def tie_coords_to_queries(x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
  """Make the coordinates depend on the queries, for the compiler.

  Coordinates do not depend on data, so a remat pass would compute the masks of
  all hops ahead of the loop and keep them: R tiles x T x S of booleans.
  """
  context = args.context
  q, q_at, k_at = lax.optimization_barrier((x.q, context.q, context.k))
  context = context._replace(q=q_at, k=k_at)
  return x._replace(q=q), args._replace(context=context)
