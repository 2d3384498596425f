"""What all strategies have in common."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax

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
  """A strategy: which keys or queries move over `axis`, around `local`.

  With `forward` and `backward` it is what `attend.Algorithm` says.

  Attributes:
    local: the algorithm that they wrap, or a strategy of another level.
    axis: over which they move; None is one shard.
  """

  # The names of the strategies that it may be around.
  inside: ClassVar[tuple[str, ...]] = ()

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
    """How many keys a call sees whose operands hold `keys`."""
    return self._place()[0] * self.local.span(keys)

  def on(self, axis: Axis | None, needed: np.ndarray | None) -> Any:
    """This strategy on `axis`, cut to the ring distances that are `needed`."""
    del needed
    return dataclasses.replace(self, axis=axis)

  def over(self, mask: Mask, layout: Layout, derived: bool) -> Any:
    """This strategy for a mask and a layout, where it serves them.

    `derived`: queries and keys are the same tokens, where the layout has them.

    Raises:
      OptionError: it does not.
    """
    del mask, layout, derived
    return self

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    """See `attend.attend`."""
    return attend(self, scores, x, terms, context)

  def _place(self) -> tuple[int, Any]:
    """(number of shards, number of this one)."""
    if self.axis is None:
      return 1, 0
    return (
      collectives.axis_size(self.axis),
      collectives.axis_index(self.axis),
    )

  def _source(self, distance: Index) -> Index:
    """The shard that is `distance` places behind this one."""
    size, me = self._place()
    return (me - distance) % size

  def _check_consecutive(
    self, layout: Layout, derived: bool, known: type | UnionType, remedy: str
  ) -> None:
    """Raises OptionError unless consecutive shards have consecutive tokens."""
    if derived and isinstance(layout, known):
      return
    own = "positions of your own, or keys of another length"
    raise OptionError(
      "strategy",
      f"{type(self).__name__} with "
      + (f"the layout {layout}" if derived else own),
      "consecutive tokens on consecutive shards",
      f"pass {remedy}, or strategy='ring'",
    )


def tie_coords_to_queries(x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
  """The same operands, whose coordinates are not known before the queries.

  Coordinates do not depend on data, so a remat pass would compute the masks of
  all hops ahead of the loop and keep them: R tiles x T x S of booleans.
  """
  context = args.context
  q, q_at, k_at = lax.optimization_barrier((x.q, context.q, context.k))
  context = context._replace(q=q_at, k=k_at)
  return x._replace(q=q), args._replace(context=context)
