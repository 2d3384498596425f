"""Routes by predicted times and by who has the prefix: Mooncake's conductor.

Guarantees: as `routing.py`: each policy here is a pure function of a request
and of the views. No number is divided by: an instance without any of the
prefix counts as infinitely worse than one with some.
Cost: a prediction or two for each instance that reads prompts; of a live one
also one for each prompt of its queue, at most 257 and those sent last.

  random   any instance; a hash of the request's number
  load     the instance whose queue is read first
  local    the least predicted time to the first token, with the prefix that
           the instance has itself
  conductor  the same, where an instance may first fetch the longest prefix
           from the instance that has it (Mooncake's algorithm 1)

An instance that fetches a prefix has it from then on, so that the blocks that
are asked for most are soon on several instances. With `hot_s` of the conductor
another one pulls a prefix too while the instance that reads with it is busy.
Ref: Qin et al. 2025, Mooncake (FAST), arXiv 2407.00079, sections 2 and 6.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from ringjax import option_text
from ringjax.checks import boolean, integer, number, positive_int
from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster.phase_times import (
  InstanceTimes,
  PhaseTimes,
  QueuedPrompts,
  reading_s,
)
from ringjax.serve.cluster.routing import (
  ChosenReader,
  InstanceView,
  PrefixCopy,
  Rejected,
  Route,
  RoutedRequest,
  RoutingPolicy,
  ShortestQueue,
)

# ---------------------------------------------------------------------------
# Predictions
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingCosts:
  """What a router predicts times with.

  Attributes:
    times: of an instance's calls; of each by its name, if they differ, or as
      live ones measure them (`InstanceTimes`).
    kv_token_bytes: of a token's keys and values in all layers.
    link: between two instances; None moves caches in no time.
  """

  times: PhaseTimes | Mapping[str, PhaseTimes]
  kv_token_bytes: int | float = 0
  link: Link | None = None

  def __post_init__(self) -> None:
    number("kv_token_bytes", self.kv_token_bytes, least=0)

  def of(self, name: str) -> PhaseTimes:
    """Times of one instance."""
    if isinstance(self.times, InstanceTimes):
      return self.times.of(name)
    if not isinstance(self.times, Mapping):
      return self.times
    if name not in self.times:
      raise OptionError(
        "times",
        f"none of {name!r}",
        f"times of each instance; there are {', '.join(sorted(self.times))}",
        "add it, or pass the same times for all",
      )
    return self.times[name]

  def prefill_s(self, name: str, tokens: int, cached: int) -> float:
    """Seconds of reading a prompt of which `cached` tokens are there."""
    return reading_s(self.of(name), [QueuedPrompts.of(tokens, cached)])

  def queue_s(self, view: InstanceView) -> float:
    """Seconds until an instance has read what it was given before.

    A live instance counts the tokens of the call under way as computed, so
    that what is left of this one call is missing.
    """
    if view.queued_s is not None:
      return float(view.queued_s)
    return reading_s(self.of(view.name), view.prompts)

  def transfer_s(self, tokens: int) -> float:
    """Seconds of moving the cache of some tokens over an idle link."""
    if self.link is None or tokens <= 0:
      return 0.0
    nbytes = tokens * self.kv_token_bytes
    return nbytes / self.link.bandwidth + self.link.latency_s

  def sending_s(self, view: InstanceView) -> float:
    """Seconds until an instance has sent what is in flight from its card."""
    if self.link is None:
      return 0.0
    return view.sending_tokens * self.kv_token_bytes / self.link.bandwidth

  def token_s(self, name: str, rows: int, cached_tokens: int | float) -> float:
    """Seconds of a decode step."""
    return self.of(name).decode_s(rows, cached_tokens)

  def fetch_bandwidth(
    self, name: str, tokens: int, here: int, there: int
  ) -> float:
    """Bytes a second from which on a fetch is faster than computing again.

    Args:
      name: of the instance that reads.
      tokens: of the prompt.
      here: of its prefix, that the instance has.
      there: of its prefix, that another one has; more than `here`.

    Returns:
      The least bandwidth; inf if computing takes no time.
    """
    saved = self.prefill_s(name, tokens, here)
    saved -= self.prefill_s(name, tokens, there)
    nbytes = (there - here) * self.kv_token_bytes
    return nbytes / saved if saved > 0 else math.inf


def fetch_bytes_per_flop(
  prefix_tokens: int,
  *,
  embed: int,
  groups: int = 1,
  number_bytes: int | float = 2,
  pair_flops: int | float = 4,
  weight_flops: int | float = 22,
) -> float:
  """Bandwidth over FLOP/s from which on a cached prefix is worth its fetch.

  Of p tokens a layer computes a p^2 d + b p d^2 and keeps 2 p d s / g bytes:
  B / F > 2 d s / (g (a p d + b d^2)).

  Args:
    prefix_tokens: p.
    embed: d, the model's width.
    groups: g, heads of queries for each head of keys.
    number_bytes: s, of a number of the cache.
    pair_flops: a, of a pair of tokens and a channel.
    weight_flops: b, of a token and a pair of channels.

  Returns:
    Bytes per FLOP: multiply with the FLOP/s of the instance.
  """
  positive_int("prefix_tokens", prefix_tokens)
  d = positive_int("embed", embed)
  flops = pair_flops * prefix_tokens * d + weight_flops * d * d
  return 2 * d * number_bytes / (positive_int("groups", groups) * flops)


def _limit(name: str, value: int | float) -> None:
  """Checks seconds of which inf is no limit."""
  if value != math.inf:
    number(name, value, above=0)


# ---------------------------------------------------------------------------
# Who answers
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastestDecode:
  """Chooses who answers by the predicted time of a token.

  Attributes:
    costs: predictions.
    tpot_s: a request is rejected if a token would take longer everywhere.
  """

  costs: RoutingCosts
  tpot_s: int | float = math.inf

  def __post_init__(self) -> None:
    _limit("tpot_s", self.tpot_s)

  def token_s(self, request: RoutedRequest, view: InstanceView) -> float:
    """Seconds of a step of an instance that also answers this request."""
    rows = view.running_requests + 1
    cached = view.running_tokens + request.prompt_tokens
    return self.costs.token_s(view.name, rows, cached)

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """As `RoutingPolicy`: the instance with room and the fastest steps."""
    able = [one for one in instances if one.decodes]
    if not able:
      return Rejected(reason="no instance answers")
    need = request.prompt_tokens + request.new_tokens
    room = [one for one in able if one.free_tokens >= need]
    if not room:
      return None
    least, name = min((self.token_s(request, one), one.name) for one in room)
    if least > self.tpot_s:
      return Rejected(
        reason=f"tokens would take {least:.3g} s, more than {self.tpot_s:g} s"
      )
    return name


# ---------------------------------------------------------------------------
# Who reads
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRoute(ChosenReader, FastestDecode):
  """Any instance reads; the same one for the same request and seed.

  Attributes:
    seed: of the hash.
  """

  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("seed", self.seed)

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """As `ChosenReader`."""
    drawn = zlib.crc32(f"{self.seed} {request.number}".encode())
    return able[drawn % len(able)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortestWait(ChosenReader, FastestDecode):
  """The instance reads that will have read its queue first."""

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """As `ChosenReader`."""
    key = lambda one: (self.costs.queue_s(one), one.running_tokens, one.name)
    return min(able, key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderChoice:
  """What an instance would need for a prompt.

  Attributes:
    ttft_s: predicted time to the first token.
    prefix_tokens: of the prompt, that would not be computed.
    fetch_tokens: of these, that it would fetch.
  """

  ttft_s: float
  prefix_tokens: int
  fetch_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conductor(FastestDecode):
  """Mooncake's algorithm 1: the least predicted time to the first token.

  An instance may fetch the longest prefix from the instance that has it if
  that one is `threshold` times longer than its own; otherwise it reads with
  what it has. The fetch is taken where it is predicted to be faster; the
  algorithm as published takes it always (`forced`) and adds the time of the
  fetch to that of the queue (`serial`), which here overlap.

  Attributes:
    threshold: the ratio above which an instance fetches; inf for never.
    ttft_s: a request is rejected if its first token would take longer.
    forced: fetch whenever the ratio is above the threshold.
    serial: predict that a fetch begins when the queue is read.
    early: reject at arrival what `decode_instance` would reject now.
    hot_s: seconds of the queue of who reads, from which on another instance
      gets a copy of the prefix, if that is `threshold` times longer than its
      own: one for each request, to the shortest queue; inf for none.
  """

  threshold: int | float = 1.0
  ttft_s: int | float = math.inf
  forced: bool = False
  serial: bool = False
  early: bool = True
  hot_s: int | float = math.inf

  def __post_init__(self) -> None:
    super().__post_init__()
    _limit("ttft_s", self.ttft_s)
    if self.hot_s != math.inf:
      number("hot_s", self.hot_s, least=0)
    if self.threshold != math.inf:
      number("threshold", self.threshold, least=1)
    for name in ("forced", "serial", "early"):
      boolean(name, getattr(self, name))

  def choice(
    self,
    request: RoutedRequest,
    view: InstanceView,
    longest: int,
    sending_s: int | float = 0.0,
  ) -> ReaderChoice:
    """What an instance would need.

    Args:
      request: the request.
      view: the instance.
      longest: tokens of the longest prefix that any instance has.
      sending_s: seconds until the card of who has it is free.
    """
    costs, tokens = self.costs, request.prompt_tokens
    here = request.cached_tokens(view.name)
    queue = costs.queue_s(view)
    alone = ReaderChoice(
      ttft_s=queue + costs.prefill_s(view.name, tokens, here),
      prefix_tokens=here,
    )
    if not self._much_longer(longest, here):
      return alone
    # What is in flight on the same card goes first.
    moved = sending_s + costs.transfer_s(longest - here)
    wait = queue + moved if self.serial else max(queue, moved)
    fetched = ReaderChoice(
      ttft_s=wait + costs.prefill_s(view.name, tokens, longest),
      prefix_tokens=longest,
      fetch_tokens=longest - here,
    )
    return fetched if self.forced or fetched.ttft_s < alone.ttft_s else alone

  def _much_longer(self, longest: int, here: int) -> bool:
    """Whether a prefix is the threshold's times longer than what is there."""
    # As a product, which holds without any prefix too; inf is never.
    if longest <= here or self.threshold == math.inf:
      return False
    return not here or longest > self.threshold * here

  def _copy(
    self,
    request: RoutedRequest,
    reader: InstanceView,
    able: Sequence[InstanceView],
    longest: int,
  ) -> PrefixCopy | None:
    """Who is to get the prefix of a request that its reader has, or None."""
    here = request.cached_tokens(reader.name)
    if self.hot_s == math.inf or not here or here < longest:
      return None
    queue = {one.name: self.costs.queue_s(one) for one in able}
    if queue[reader.name] < self.hot_s:
      return None
    lacking = [
      one
      for one in able
      if queue[one.name] < queue[reader.name]
      and self._much_longer(here, request.cached_tokens(one.name))
    ]
    if not lacking:
      return None
    target = min(lacking, key=lambda one: (queue[one.name], one.name))
    return PrefixCopy(source=reader.name, target=target.name, tokens=here)

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """As `RoutingPolicy`."""
    able = [one for one in instances if one.prefills]
    if not able:
      return Rejected(reason="no instance reads prompts")
    # Who answers may have the prefix too.
    found = [(request.cached_tokens(one.name), one) for one in instances]
    longest = max(n for n, _ in found)
    # Of those that have it: who reads, whose card, whose queue is free first.
    owner = max(
      (one for n, one in found if n == longest),
      key=lambda one: (
        one.prefills,
        -self.costs.sending_s(one),
        -self.costs.queue_s(one),
      ),
    )
    sending_s = self.costs.sending_s(owner)
    made = [
      (self.choice(request, one, longest, sending_s), one) for one in able
    ]
    best, reader = min(made, key=lambda x: (x[0].ttft_s, x[1].name))
    if best.ttft_s > self.ttft_s:
      return Rejected(
        reason=f"the first token would take {best.ttft_s:.3g} s, more than "
        f"{self.ttft_s:g} s"
      )
    if self.early and self.tpot_s != math.inf:
      late = self.decode_instance(request, instances, now_s)
      if isinstance(late, Rejected):
        return late
    if not best.fetch_tokens:
      copy = self._copy(request, reader, able, longest)
      return dataclasses.replace(_to(reader), copy=copy)
    return dataclasses.replace(
      _to(reader), fetch_from=owner.name, fetch_tokens=longest
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConductor(Conductor):
  """The conductor without fetches: an instance has what it read itself."""

  threshold: int | float = math.inf


def _to(view: InstanceView) -> Route:
  """To one instance; one that does both also answers."""
  own = view.name if view.role == "both" else None
  return Route(prefill=view.name, decode=own)


# ---------------------------------------------------------------------------
# Rejections by the load of decoding
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyRejection:
  """Rejects at arrival while answers are too slow already.

  Work that would be thrown away later is not begun. But a request reaches the
  answering instances only when its prompt has been read: all that come in that
  time are taken, then none, and the load swings. `PredictiveRejection` looks
  ahead.

  Attributes:
    policy: decides about what is not rejected.
    costs: predictions.
    tpot_s: seconds of a token, at most.
  """

  policy: RoutingPolicy
  costs: RoutingCosts
  tpot_s: int | float = math.inf

  def __post_init__(self) -> None:
    _limit("tpot_s", self.tpot_s)

  def load(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    route: Route,
  ) -> tuple[float, float]:
    """Answers, and their cached tokens, that the request is judged by."""
    able = [one for one in instances if one.decodes]
    rows = sum(one.running_requests for one in able)
    return float(rows), float(sum(one.running_tokens for one in able))

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """As `RoutingPolicy`."""
    route = self.policy.route(request, instances, now_s)
    if isinstance(route, Rejected):
      return route
    able = [one for one in instances if one.decodes]
    rows, tokens = self.load(request, instances, route)
    rows, tokens = rows + 1, tokens + request.prompt_tokens
    # All instances as loaded as they are together.
    most = max(
      (
        self.costs.token_s(
          one.name, math.ceil(rows / len(able)), tokens / len(able)
        )
        for one in able
      ),
      default=math.inf,
    )
    if most <= self.tpot_s:
      return route
    return Rejected(
      reason=f"{type(self).__name__}: tokens would take {most:.3g} s, more "
      f"than {self.tpot_s:g} s"
    )

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """As the policy does."""
    return self.policy.decode_instance(request, instances, now_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictiveRejection(EarlyRejection):
  """Rejects by the load of answers when the prompt will have been read.

  By then, in w seconds, prompts that wait now will be answered, and answers
  under way will have ended. All answers take `decode_s`, as in the paper: of
  those under way the part w / decode_s ends, if they began evenly; of a queue
  that takes q seconds the last min(w, decode_s) of w seconds are still there.

  Attributes:
    decode_s: seconds of an answer.
  """

  decode_s: int | float = 10.0

  def __post_init__(self) -> None:
    super().__post_init__()
    number("decode_s", self.decode_s, above=0)

  def load(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    route: Route,
  ) -> tuple[float, float]:
    """As `EarlyRejection`, of the time when the prompt will have been read."""
    wait = self.read_s(request, instances, route)
    rows, tokens = super().load(request, instances, route)
    left = max(0.0, 1 - wait / self.decode_s)
    rows, tokens = rows * left, tokens * left
    for one in instances:
      if one.prefills and one.queued_requests:
        queue = self.costs.queue_s(one)
        # Read in the time of which answers are still under way.
        share = 1.0
        if queue > 0:
          first = max(0.0, wait - self.decode_s)
          share = max(0.0, min(wait, queue) - min(first, queue)) / queue
        rows += share * one.queued_requests
        tokens += share * one.queued_tokens
    return rows, tokens

  def read_s(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    route: Route,
  ) -> float:
    """Seconds until the request's prompt will have been read."""
    (view,) = [one for one in instances if one.name == route.prefill]
    here = request.cached_tokens(view.name)
    moved = 0.0
    if route.fetch_from is not None:
      (owner,) = [one for one in instances if one.name == route.fetch_from]
      moved = self.costs.sending_s(owner)
      moved += self.costs.transfer_s(route.fetch_tokens - here)
      here = max(here, route.fetch_tokens)
    read = self.costs.prefill_s(view.name, request.prompt_tokens, here)
    return max(self.costs.queue_s(view), moved) + read


# ---------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------

# Policies that decide alone, and those that stand before another one.
POLICIES: dict[str, Callable[..., RoutingPolicy]] = {
  "random": RandomRoute,
  "load": ShortestWait,
  "local": LocalConductor,
  "conductor": Conductor,
}
REJECTIONS: dict[str, Callable[..., RoutingPolicy]] = {
  "early": EarlyRejection,
  "predictive": PredictiveRejection,
}
_SHORTEST = "shortest"


def routing_policy(
  value: RoutingPolicy | str, costs: RoutingCosts | None = None
) -> RoutingPolicy:
  """A policy by its name, or the policy itself.

  Args:
    value: a policy; or "shortest" (`ShortestQueue`), one of `POLICIES` with
      options, "conductor:threshold=2,ttft_s=30", with rejections in front of
      it, "predictive:tpot_s=0.1,decode_s=20/conductor".
    costs: what it predicts with; all but "shortest" need it.

  Raises:
    OptionError: no such name or option, or no costs.
  """
  if not isinstance(value, str):
    return value
  *before, last = value.split("/")
  made: RoutingPolicy
  if last == _SHORTEST:
    made = ShortestQueue()
  else:
    made = _named(last, POLICIES, (_SHORTEST, *POLICIES), costs, {})
  for part in reversed(before):
    made = _named(part, REJECTIONS, (*REJECTIONS,), costs, {"policy": made})
  return made


def _named(
  text: str,
  known: Mapping[str, Callable[..., RoutingPolicy]],
  names: Sequence[str],
  costs: RoutingCosts | None,
  fixed: Mapping[str, RoutingPolicy],
) -> RoutingPolicy:
  name, colon, rest = text.partition(":")
  if name not in known:
    raise OptionError(
      "policy",
      repr(text),
      f"one of {', '.join(names)}, or a RoutingPolicy",
      "pass policy='conductor:threshold=2', or "
      "'predictive:tpot_s=0.1,decode_s=20/conductor'",
    )
  made = known[name]
  options = [
    f.name
    for f in dataclasses.fields(made)  # pyrefly: ignore
    if isinstance(f.default, int | float)
  ]
  said = option_text.pairs(rest if colon else None, options, "policy", name)
  if costs is None:
    raise OptionError(
      "costs",
      f"none for {name!r}",
      "RoutingCosts",
      "pass the times that it predicts with, or policy='shortest'",
    )
  values = {key: _number(text) for key, text in said.items()}
  return made(costs=costs, **fixed, **values)


def _number(text: str) -> object:
  return math.inf if text == "inf" else option_text.value(text)
