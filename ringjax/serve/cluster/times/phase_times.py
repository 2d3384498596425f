"""Models of the seconds that an instance takes for prefill and decode.

  prefill   f + t sum(n) + p sum((n + c)^2 - c^2)   n tokens after c cached
  decode    g + r rows + k sum(cached tokens)        one token of each row

with six non-negative constants. Prefill's are those of `plan.Profile`
(which counts n (c + n / 2) or n (c + n) pairs), DistServe's and LoongServe's.
A queue takes the sum of its prompts, each alone in a call (`reading_s`, of live
routers and of the simulator): as the time grows with the square of a prompt's
length, ten prompts of 1,000 tokens take much less than one of 10,000.
Ref: Zhong et al. 2024, DistServe, appendix A and its simulator; Wu et al. 2024,
LoongServe (SOSP), arXiv 2404.09526, section 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from ringjax.checks import number
from ringjax.errors import OptionError


@runtime_checkable
class PhaseTimes(Protocol):
  """Seconds of an instance's calls, as simulators and planners use them."""

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """Seconds to prefill chunks of prompts in one call.

    Args:
      pieces: (new tokens, tokens cached before them) of each chunk.
    """
    ...

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """Seconds of a decode step, one token for each row.

    Args:
      rows: Number of rows.
      cached_tokens: Cached tokens of all rows together.
    """
    ...


class QueuedPrompts(NamedTuple):
  """Equal prompts of a queue.

  Fields:
    tokens: Uncomputed tokens of each prompt.
    cached: Tokens of each prompt before these that are or will be cached.
    count: Number of prompts.
  """

  tokens: int
  cached: int = 0
  count: int = 1

  @classmethod
  def of(cls, prompt_tokens: int, cached: int) -> QueuedPrompts:
    """Make one prompt; its last token is computed even if it is cached.

    Args:
      prompt_tokens: Prompt length in tokens, at least 1.
      cached: Length of its cached prefix in tokens.
    """
    cached = min(cached, prompt_tokens - 1)
    return cls(prompt_tokens - cached, cached)


def reading_s(times: PhaseTimes, queue: Iterable[QueuedPrompts]) -> float:
  """Seconds to prefill prompts one after another, each alone in a call.

  Args:
    times: Times of the instance.
    queue: Prompts of its queue, in any order.
  """
  return float(
    sum(
      prompts.count * times.prefill_s([(prompts.tokens, prompts.cached)])
      for prompts in queue
    )
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuadraticTimes:
  """Quadratic prefill time and linear decode time.

  Attributes:
    prefill_fixed_s: f, per call.
    prefill_token_s: t, per new token.
    prefill_pair_s: p, per pair of a new and an earlier token, counted twice.
    decode_fixed_s: g, per step.
    decode_row_s: r, per row.
    decode_token_s: k, per cached token.
  """

  prefill_fixed_s: int | float = 0.0
  prefill_token_s: int | float = 0.0
  prefill_pair_s: int | float = 0.0
  decode_fixed_s: int | float = 0.0
  decode_row_s: int | float = 0.0
  decode_token_s: int | float = 0.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      number(field.name, getattr(self, field.name), least=0)

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """Seconds to prefill (new, cached) tokens of prompts in one call."""
    tokens = pairs = 0
    for new, cached in pieces:
      tokens += new
      pairs += new * (new + 2 * cached)
    return float(
      self.prefill_fixed_s
      + self.prefill_token_s * tokens
      + self.prefill_pair_s * pairs
    )

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """Seconds of a decode step."""
    return float(
      self.decode_fixed_s
      + self.decode_row_s * rows
      + self.decode_token_s * cached_tokens
    )


class InstanceTimes:
  """Times of live instances, as each has measured them before it joined.

  Used as a `PhaseTimes` itself, it gives the mean of all instances so far.
  """

  def __init__(self) -> None:
    self._times: dict[str, QuadraticTimes] = {}

  def tell(self, name: str, times: QuadraticTimes) -> None:
    """Set the measured times of an instance."""
    # Replaced, not changed in place: other threads may be iterating over it.
    self._times = {**self._times, name: times}

  def of(self, name: str) -> PhaseTimes:
    """Times of one instance; the mean of all if it reported none."""
    return self._times.get(name, self)

  def _mean(self, of: Callable[[QuadraticTimes], float]) -> float:
    times = [of(instance) for instance in self._times.values()]
    if not times:
      raise OptionError(
        "times",
        "no instance that has joined",
        "instances, which measure their calls when they join",
        "start one, or pass times of a file or a chip",
      )
    return sum(times) / len(times)

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """Mean seconds of a prefill call over all instances."""
    piece_list = [*pieces]
    return self._mean(lambda instance: instance.prefill_s(piece_list))

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """Mean seconds of a decode step over all instances."""
    return self._mean(lambda instance: instance.decode_s(rows, cached_tokens))
