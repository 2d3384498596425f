"""Times of served requests, and the share that meets latency limits.

TTFT is from a request's arrival to its first token. TPOT is the time from the
first token to the last one, for each token after the first. Goodput is the
largest rate at which a share of the requests meets both limits.
Ref: Zhong et al. 2024, DistServe (OSDI), arXiv 2401.09670.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ringjax.checks import number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Latency limits of a service level objective.

  Attributes:
    ttft_s: Maximum seconds to the first token.
    tpot_s: Maximum average seconds of each later token.
    share: Share of the requests that have to meet both limits.
  """

  ttft_s: int | float = math.inf
  tpot_s: int | float = math.inf
  share: int | float = 0.9

  def __post_init__(self) -> None:
    number("share", self.share, above=0, most=1)

  def of(self, prompt_tokens: int) -> Limits:
    """Limits of a request with a given prompt length: always these."""
    del prompt_tokens
    return self


@dataclasses.dataclass(kw_only=True, slots=True)
class ServedRequest:
  """The times of one request, in seconds of the cluster's clock.

  Attributes:
    number: Number of the request.
    arrival_s: Time of arrival.
    prompt_tokens: Prompt length in tokens.
    new_tokens: Answer length in tokens.
    prefill: Name of the prefill instance.
    decode: Name of the decode instance.
    cached_tokens: Prompt tokens that were found cached.
    prefill_start_s: Time at which prefill began.
    first_token_s: Time of the first token.
    moved_s: Seconds in which its cache was transferred.
    last_token_s: Time of the last token; nan while unfinished.
    rejected: Reason of a rejection, or "".
  """

  number: int
  arrival_s: float
  prompt_tokens: int
  new_tokens: int
  prefill: str = ""
  decode: str = ""
  cached_tokens: int = 0
  prefill_start_s: float = math.nan
  first_token_s: float = math.nan
  moved_s: float = 0.0
  last_token_s: float = math.nan
  rejected: str = ""

  @property
  def ttft_s(self) -> float:
    """Seconds to the first token."""
    return self.first_token_s - self.arrival_s

  @property
  def tpot_s(self) -> float:
    """Seconds for each token after the first; 0 for a single token."""
    if self.new_tokens < 2:
      return 0.0
    return (self.last_token_s - self.first_token_s) / (self.new_tokens - 1)

  def meets(self, limits: Limits) -> bool:
    """Whether it was served within the limits."""
    request_limits = limits.of(self.prompt_tokens)
    return (
      not self.rejected
      and self.ttft_s <= request_limits.ttft_s
      and self.tpot_s <= request_limits.tpot_s
    )


def attainment(served: Sequence[ServedRequest], limits: Limits) -> float:
  """Share of requests that were served within the limits, 0 to 1."""
  return sum(request.meets(limits) for request in served) / max(1, len(served))


def percentiles(
  served: Sequence[ServedRequest], at: Sequence[int | float] = (50, 90, 95, 99)
) -> dict[str, dict[str, float]]:
  """Percentiles of TTFT and TPOT of served requests, in seconds."""
  completed = [request for request in served if not request.rejected]
  table = {}
  for name in ("ttft_s", "tpot_s"):
    values = np.asarray([getattr(request, name) for request in completed])
    table[name] = {
      f"p{p:g}": float(np.percentile(values, p)) if values.size else math.nan
      for p in at
    }
  return table
