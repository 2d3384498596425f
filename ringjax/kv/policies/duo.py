"""DuoAttention: retrieval heads keep all tokens, streaming heads few.

Ref: Xiao et al. 2024, DuoAttention, arXiv 2410.10819.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.kv.policies.policy import Look, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Duo(Policy):
  """Streaming heads keep the first and the newest tokens, the others all.

  Attributes:
    streaming: Pairs of a layer and a KV head, both counted from 0.
    sinks: Number of first tokens that streaming heads keep.
    newest: Number of newest tokens that streaming heads keep.
  """

  streaming: tuple[tuple[int, int], ...] = ()
  sinks: int = 128
  newest: int = 256

  reads: ClassVar[bool] = False
  budgeted: ClassVar[bool] = False

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("sinks", self.sinks, least=0)
    integer("newest", self.newest, least=1)
    is_valid = isinstance(self.streaming, tuple) and all(
      isinstance(pair, tuple)
      and len(pair) == 2
      and all(isinstance(n, int) and n >= 0 for n in pair)
      for pair in self.streaming
    )
    if not is_valid:
      raise OptionError(
        "streaming",
        repr(self.streaming),
        "a tuple of pairs of a layer and a KV head",
        "pass streaming=((0, 1), (3, 0)), for instance",
      )

  def scores(self, look: Look) -> Float[Array, "B K S"]:
    is_newest = look.pos >= (look.length - self.newest)[:, None, None]
    in_stream = (look.pos < self.sinks) | is_newest
    number, first = look.layer, look.first_head
    heads = first + jnp.arange(look.pos.shape[1], dtype=jnp.int32)
    is_streaming = jnp.zeros(heads.shape, bool)
    for layer, head in self.streaming:
      is_streaming = is_streaming | ((number == layer) & (heads == head))
    return jnp.where(in_stream | ~is_streaming[None, :, None], 1.0, 0.0)

  def expected(self, length: int, heads: Sequence[int]) -> list[int | float]:
    streams = min(length, self.sinks + self.newest)
    pairs = set(self.streaming)

    def mean(layer: int, count: int) -> int | float:
      num_streaming = sum((layer, head) in pairs for head in range(count))
      return (num_streaming * streams + (count - num_streaming) * length) / max(
        1, count
      )

    return [mean(layer, count) for layer, count in enumerate(heads)]

  def kept(
    self, scores: Float[Array, "L B K S"], counts: Int[Array, "L B"]
  ) -> Bool[Array, "L B K S"]:
    del counts
    return scores > 0
