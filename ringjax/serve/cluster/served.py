"""What became of the requests of a cluster: times of each, goodput.

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
  """What a request is promised (a service level objective).

  Attributes:
    ttft_s: seconds to the first token, at most.
    tpot_s: seconds for each later token, on average, at most.
    share: of the requests, that have to meet both.
  """

  ttft_s: int | float = math.inf
  tpot_s: int | float = math.inf
  share: int | float = 0.9

  def __post_init__(self) -> None:
    number("share", self.share, above=0, most=1)

  def of(self, prompt_tokens: int) -> Limits:
    """The limits of a request with a prompt of so many tokens: these."""
    del prompt_tokens
    return self


@dataclasses.dataclass(kw_only=True, slots=True)
class ServedRequest:
  """The times of one request, in seconds of the cluster's clock.

  Attributes:
    number: of the request.
    arrival_s: when it came.
    prompt_tokens: of its prompt.
    new_tokens: of its answer.
    prefill: name of the instance that read it.
    decode: name of the instance that answered.
    cached_tokens: of the prompt, that were not computed.
    prefill_start_s: when reading began.
    first_token_s: when its first token was there.
    moved_s: seconds in which its cache was pulled.
    last_token_s: when it was done; nan while it is not.
    rejected: why it was not served; "" if it was.
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
    """Seconds for each token after the first; 0 if there is none."""
    if self.new_tokens < 2:
      return 0.0
    return (self.last_token_s - self.first_token_s) / (self.new_tokens - 1)

  def meets(self, limits: Limits) -> bool:
    """Whether it was served within the limits."""
    own = limits.of(self.prompt_tokens)
    return (
      not self.rejected
      and self.ttft_s <= own.ttft_s
      and self.tpot_s <= own.tpot_s
    )


def attainment(served: Sequence[ServedRequest], limits: Limits) -> float:
  """The share of requests that were served within the limits, 0 to 1."""
  return sum(one.meets(limits) for one in served) / max(1, len(served))


def percentiles(
  served: Sequence[ServedRequest], at: Sequence[int | float] = (50, 90, 95, 99)
) -> dict[str, dict[str, float]]:
  """Percentiles of TTFT and TPOT of the requests that were served, seconds."""
  done = [one for one in served if not one.rejected]
  found = {}
  for name in ("ttft_s", "tpot_s"):
    values = np.asarray([getattr(one, name) for one in done])
    found[name] = {
      f"p{p:g}": float(np.percentile(values, p)) if values.size else math.nan
      for p in at
    }
  return found
