"""Ada-KV: budgets that the heads of a layer share.

Ref: Feng et al. 2024, Ada-KV, arXiv 2407.11550.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy, floored_share, highest
from ringjax.kv.policies.scores.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
  """Keeps the highest scores over all heads of a layer, which share a budget.

  A head whose attention is spread over many tokens keeps more of them.

  Attributes:
    safe: Share of the budget that each head is guaranteed.
    by: Policy whose scores the heads compare; its own budget is not used. None
      for the scores of SnapKV with `window`, `kernel` and `pool`.
  """

  safe: int | float = 0.2
  by: Policy | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    number("safe", self.safe, least=0.0, most=1.0, remedy="pass safe=0.2")
    if self.by is None:
      return
    if not isinstance(self.by, Policy) or not self.by.ranks or self.by.moves:
      raise OptionError(
        "by",
        repr(self.by),
        "a policy that keeps the highest scores of each head",
        "pass by=rj.kv.KeyNorm(), for instance",
      )
    defaults = SnapKV()
    window_options = self.window, self.kernel, self.pool
    if window_options != (defaults.window, defaults.kernel, defaults.pool):
      raise OptionError(
        "window",
        f"window={self.window}, kernel={self.kernel}, pool={self.pool!r} "
        f"with by={self.by}",
        "none: they are SnapKV's, whose scores are not used",
        "leave them out, or leave by= out",
      )

  @property
  def ranks(self) -> bool:
    return False

  @property
  def queries(self) -> int | None:
    return super().queries if self.by is None else self.by.queries

  @property
  def marks(self) -> tuple[int, ...]:
    return () if self.by is None else self.by.marks

  @property
  def moments(self) -> bool:  # pyrefly: ignore
    return self.by is not None and self.by.moments

  @property
  def sums(self) -> bool:  # pyrefly: ignore
    return self.by is not None and self.by.sums

  @property
  def reads(self) -> bool:  # pyrefly: ignore
    return self.by is None or self.by.reads

  def traced(self) -> Policy:
    by = None if self.by is None else self.by.traced()
    return dataclasses.replace(self, budget=1.0, by=by)

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    return super().scores(look) if self.by is None else self.by.scores(look)

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    return shared(scores, counts, self.safe)


def shared(
  scores: Float[Array, "L B K S"], counts: Int[Array, "L B"], safe: float
) -> Bool[Array, "L B K S"]:
  """Mask of the K * counts highest scores of all K heads of a layer.

  Each head keeps at least the share `safe` of its count, and at least one.
  """
  layers, b, heads, size = scores.shape
  head_counts = floored_share(counts, safe)
  if safe:
    head_counts = jnp.maximum(head_counts, 1)
  guaranteed = highest(
    scores, jnp.broadcast_to(head_counts[:, :, None], scores.shape[:3])
  )
  top = jnp.maximum(scores, jnp.finfo(jnp.float32).max)
  flat = jnp.where(guaranteed, top, scores).reshape(layers, b, heads * size)
  return highest(flat, heads * counts).reshape(scores.shape)
