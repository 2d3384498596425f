"""How long an instance takes to read prompts and to make tokens.

  prefill   f + t sum(n) + p sum((n + c)^2 - c^2)   n tokens behind c cached
  decode    g + r rows + k sum(cached tokens)        one token of each row

six constants that are not negative. Prefill's are those of `plan.Profile`
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
  """Seconds of a call of an instance; what simulators and planners ask."""

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """Of reading pieces of prompts in one call.

    Args:
      pieces: (new tokens, tokens cached before them) of each.
    """
    ...

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """Of one token for each of some rows.

    Args:
      rows: how many.
      cached_tokens: of all rows together.
    """
    ...


class QueuedPrompts(NamedTuple):
  """Prompts of a queue that are alike.

  Fields:
    tokens: of each, that are left to compute.
    cached: of each, tokens before them whose keys are there, or will be.
    count: how many prompts.
  """

  tokens: int
  cached: int = 0
  count: int = 1

  @classmethod
  def of(cls, prompt_tokens: int, cached: int) -> QueuedPrompts:
    """One prompt, whose last token is computed whatever is cached.

    Args:
      prompt_tokens: of the prompt; at least 1.
      cached: tokens of its prefix that are there.
    """
    cached = min(cached, prompt_tokens - 1)
    return cls(prompt_tokens - cached, cached)


def reading_s(times: PhaseTimes, queue: Iterable[QueuedPrompts]) -> float:
  """Seconds of reading prompts one behind another, each alone in a call.

  Args:
    times: of the instance.
    queue: its prompts, in any order.
  """
  return float(
    sum(
      one.count * times.prefill_s([(one.tokens, one.cached)]) for one in queue
    )
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuadraticTimes:
  """The form above.

  Attributes:
    prefill_fixed_s: f, of a call.
    prefill_token_s: t, for each new token.
    prefill_pair_s: p, for each pair of a new token and one before it, twice.
    decode_fixed_s: g, of a step.
    decode_row_s: r, for each row.
    decode_token_s: k, for each cached token.
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
    """As `PhaseTimes`."""
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
    """As `PhaseTimes`."""
    return float(
      self.decode_fixed_s
      + self.decode_row_s * rows
      + self.decode_token_s * cached_tokens
    )


class InstanceTimes:
  """Times of live instances, each as it has measured them when it joined.

  As `PhaseTimes`, of no one of them, the mean of all that have joined so far.
  """

  def __init__(self) -> None:
    self._times: dict[str, QuadraticTimes] = {}

  def tell(self, name: str, times: QuadraticTimes) -> None:
    """Takes what an instance has measured."""
    # As a whole: others may be walking through it.
    self._times = {**self._times, name: times}

  def of(self, name: str) -> PhaseTimes:
    """Times of one instance; the mean of all, of one that told none."""
    return self._times.get(name, self)

  def _mean(self, of: Callable[[QuadraticTimes], float]) -> float:
    times = [of(one) for one in self._times.values()]
    if not times:
      raise OptionError(
        "times",
        "no instance that has joined",
        "instances, which measure their calls when they join",
        "start one, or pass times of a file or a chip",
      )
    return sum(times) / len(times)

  def prefill_s(self, pieces: Iterable[tuple[int, int]]) -> float:
    """As `PhaseTimes`."""
    each = [*pieces]
    return self._mean(lambda one: one.prefill_s(each))

  def decode_s(self, rows: int, cached_tokens: int | float) -> float:
    """As `PhaseTimes`."""
    return self._mean(lambda one: one.decode_s(rows, cached_tokens))
