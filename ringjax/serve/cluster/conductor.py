"""Routing by predicted times and cached prefixes: Mooncake's conductor.

Guarantees: as in `routing.py`, each policy here is a pure function of a request
and of the views. There is no division by zero: an instance without any of the
prefix counts as infinitely worse than one with some.
Cost: one or two predictions for each prefill instance; for a live one
also one for each prompt of its queue, at most 257 and those sent last.

Names of policies are at the end, in `ROUTING_POLICIES` and `REJECTIONS`.

An instance that fetches a prefix keeps it, so that the blocks in highest demand
are soon on several instances. With `hot_s` the conductor also copies a prefix
to another instance while the instance that has it is busy.
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
from ringjax.serve.cluster.times.phase_times import (
  InstanceTimes,
  PhaseTimes,
  QueuedPrompts,
  reading_s,
)

# ---------------------------------------------------------------------------
# Predictions
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingCosts:
  """Times and sizes with which a router predicts latencies.

  Attributes:
    times: Times of an instance's calls; a mapping by instance name if they
      differ, or `InstanceTimes` if live instances measure them.
    kv_token_bytes: Bytes of a token's keys and values in all layers.
    link: Link between two instances; None moves caches in no time.
  """

  times: PhaseTimes | Mapping[str, PhaseTimes]
  kv_token_bytes: int | float = 0
  link: Link | None = None

  def __post_init__(self) -> None:
    number("kv_token_bytes", self.kv_token_bytes, least=0)

  def of(self, name: str) -> PhaseTimes:
    """Call times of one instance."""
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
    """Seconds to prefill a prompt of which `cached` tokens are cached."""
    return reading_s(self.of(name), [QueuedPrompts.of(tokens, cached)])

  def queue_s(self, view: InstanceView) -> float:
    """Seconds until an instance has prefilled its current queue.

    A live instance counts the tokens of the current call as computed, so the
    remaining time of this one call is missing.
    """
    if view.queued_s is not None:
      return float(view.queued_s)
    return reading_s(self.of(view.name), view.prompts)

  def transfer_s(self, tokens: int) -> float:
    """Seconds to move the cache of some tokens over an idle link."""
    if self.link is None or tokens <= 0:
      return 0.0
    nbytes = tokens * self.kv_token_bytes
    return self.link.send_s(nbytes)

  def sending_s(self, view: InstanceView) -> float:
    """Seconds until an instance has sent the tokens that are in flight."""
    if self.link is None:
      return 0.0
    return view.sending_tokens * self.kv_token_bytes / self.link.bandwidth

  def token_s(self, name: str, rows: int, cached_tokens: int | float) -> float:
    """Seconds of a decode step."""
    return self.of(name).decode_s(rows, cached_tokens)

  def fetch_bandwidth(
    self, name: str, tokens: int, here: int, there: int
  ) -> float:
    """Bandwidth, in bytes a second, above which a fetch beats recomputing.

    Args:
      name: Name of the prefill instance.
      tokens: Prompt length in tokens.
      here: Prefix tokens cached on this instance.
      there: Prefix tokens cached on the other instance; more than `here`.

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
  """Ratio of bandwidth to FLOP/s above which fetching a prefix pays off.

  For p tokens a layer computes a p^2 d + b p d^2 and keeps 2 p d s / g bytes:
  B / F > 2 d s / (g (a p d + b d^2)).

  Args:
    prefix_tokens: p, prefix length in tokens.
    embed: d, the model's width.
    groups: g, query heads per key head.
    number_bytes: s, bytes of a number of the cache.
    pair_flops: a, FLOPs per pair of tokens and channel.
    weight_flops: b, FLOPs per token and pair of channels.

  Returns:
    Bytes per FLOP: multiply with the FLOP/s of the instance.
  """
  positive_int("prefix_tokens", prefix_tokens)
  d = positive_int("embed", embed)
  flops = pair_flops * prefix_tokens * d + weight_flops * d * d
  return 2 * d * number_bytes / (positive_int("groups", groups) * flops)


def _check_seconds(name: str, value: int | float) -> None:
  """Check a limit in seconds; inf means no limit."""
  if value != math.inf:
    number(name, value, above=0)


# ---------------------------------------------------------------------------
# Choice of the decode instance
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastestDecode:
  """Chooses the decode instance by the predicted time of a token.

  Attributes:
    costs: Predictions of times.
    tpot_s: Maximum seconds of a token: a request is rejected if a token would
      take longer on every instance.
  """

  costs: RoutingCosts
  tpot_s: int | float = math.inf

  def __post_init__(self) -> None:
    _check_seconds("tpot_s", self.tpot_s)

  def token_s(self, request: RoutedRequest, view: InstanceView) -> float:
    """Seconds of an instance's decode step that includes this request."""
    rows = view.running_requests + 1
    cached = view.running_tokens + request.prompt_tokens
    return self.costs.token_s(view.name, rows, cached)

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """Name of the instance with room and the fastest decode steps."""
    decoding = [view for view in instances if view.decodes]
    if not decoding:
      return Rejected(reason="no instance answers")
    need = request.prompt_tokens + request.new_tokens
    with_room = [view for view in decoding if view.free_tokens >= need]
    if not with_room:
      return None
    least_s, name = min(
      (self.token_s(request, view), view.name) for view in with_room
    )
    if least_s > self.tpot_s:
      return Rejected(
        reason=f"tokens would take {least_s:.3g} s, more than {self.tpot_s:g} s"
      )
    return name


# ---------------------------------------------------------------------------
# Choice of the prefill instance
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomRoute(ChosenReader, FastestDecode):
  """Prefills on a pseudo-random instance, fixed by request and seed.

  Attributes:
    seed: Seed of the hash.
  """

  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("seed", self.seed)

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """Draw an instance from a hash of the request's number."""
    hashed = zlib.crc32(f"{self.seed} {request.number}".encode())
    return able[hashed % len(able)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortestWait(ChosenReader, FastestDecode):
  """Prefills on the instance that will have finished its queue first."""

  def reader(
    self, request: RoutedRequest, able: Sequence[InstanceView]
  ) -> InstanceView:
    """Choose the instance with the shortest predicted queue."""
    key = lambda view: (
      self.costs.queue_s(view),
      view.running_tokens,
      view.name,
    )
    return min(able, key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderChoice:
  """Predicted cost of prefilling a prompt on one instance.

  Attributes:
    ttft_s: Predicted time to the first token, in seconds.
    prefix_tokens: Prompt tokens that would not be computed.
    fetch_tokens: Prompt tokens of these that would be fetched.
  """

  ttft_s: float
  prefix_tokens: int
  fetch_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conductor(FastestDecode):
  """Mooncake's algorithm 1: the least predicted time to the first token.

  An instance may fetch the longest prefix from the instance that has it if
  that prefix is `threshold` times longer than its own; otherwise it prefills
  with the prefix that it has. The fetch is used where it is predicted to be
  faster; the algorithm as published always uses it (`forced`) and adds the time
  of the fetch to that of the queue (`serial`), which here overlap.

  Attributes:
    threshold: Ratio of prefix lengths above which an instance fetches; inf for
      never.
    ttft_s: Maximum seconds to the first token: a request is rejected if it
      would take longer.
    forced: Whether to fetch whenever the ratio is above the threshold.
    serial: Whether a fetch is predicted to begin only after the queue.
    early: Whether to reject at arrival what `decode_instance` would reject now.
    hot_s: Queue of the prefill instance, in seconds, above which another
      instance gets a copy of the prefix, if that is `threshold` times longer
      than its own: one for each request, to the shortest queue; inf for none.
  """

  threshold: int | float = 1.0
  ttft_s: int | float = math.inf
  forced: bool = False
  serial: bool = False
  early: bool = True
  hot_s: int | float = math.inf

  def __post_init__(self) -> None:
    super().__post_init__()
    _check_seconds("ttft_s", self.ttft_s)
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
    """Predict an instance's time to the first token, with or without a fetch.

    Args:
      request: Request to route.
      view: View of the instance.
      longest: Longest prefix that any instance has, in tokens.
      sending_s: Seconds until the network card of that prefix's owner is free.
    """
    costs, tokens = self.costs, request.prompt_tokens
    cached_here = request.cached_tokens(view.name)
    queue = costs.queue_s(view)
    without_fetch = ReaderChoice(
      ttft_s=queue + costs.prefill_s(view.name, tokens, cached_here),
      prefix_tokens=cached_here,
    )
    if not self._much_longer(longest, cached_here):
      return without_fetch
    # Transfers in flight on the same card go first.
    moved = sending_s + costs.transfer_s(longest - cached_here)
    wait = queue + moved if self.serial else max(queue, moved)
    with_fetch = ReaderChoice(
      ttft_s=wait + costs.prefill_s(view.name, tokens, longest),
      prefix_tokens=longest,
      fetch_tokens=longest - cached_here,
    )
    return (
      with_fetch
      if self.forced or with_fetch.ttft_s < without_fetch.ttft_s
      else without_fetch
    )

  def _much_longer(self, longest: int, own_prefix: int) -> bool:
    """Whether a prefix is more than `threshold` times longer than the own."""
    # As a product, which is also valid for `own_prefix` == 0; inf means never.
    if longest <= own_prefix or self.threshold == math.inf:
      return False
    return not own_prefix or longest > self.threshold * own_prefix

  def _copy(
    self,
    request: RoutedRequest,
    reader: InstanceView,
    able: Sequence[InstanceView],
    longest: int,
  ) -> PrefixCopy | None:
    """Copy of a hot prefix to make on another instance, or None."""
    cached_here = request.cached_tokens(reader.name)
    if self.hot_s == math.inf or not cached_here or cached_here < longest:
      return None
    queue = {view.name: self.costs.queue_s(view) for view in able}
    if queue[reader.name] < self.hot_s:
      return None
    candidates = [
      view
      for view in able
      if queue[view.name] < queue[reader.name]
      and self._much_longer(cached_here, request.cached_tokens(view.name))
    ]
    if not candidates:
      return None
    target = min(candidates, key=lambda view: (queue[view.name], view.name))
    return PrefixCopy(
      source=reader.name, target=target.name, tokens=cached_here
    )

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """Route to the prefill instance with the least predicted TTFT."""
    readers = [view for view in instances if view.prefills]
    if not readers:
      return Rejected(reason="no instance reads prompts")
    # A decode instance may have the prefix, too.
    prefixes = [(request.cached_tokens(view.name), view) for view in instances]
    longest = max(tokens for tokens, _ in prefixes)
    # Among the owners, prefer a prefill instance, then the card and the queue
    # that are free first.
    owner = max(
      (view for tokens, view in prefixes if tokens == longest),
      key=lambda view: (
        view.prefills,
        -self.costs.sending_s(view),
        -self.costs.queue_s(view),
      ),
    )
    sending_s = self.costs.sending_s(owner)
    choices = [
      (self.choice(request, view, longest, sending_s), view) for view in readers
    ]
    best, reader = min(
      choices, key=lambda entry: (entry[0].ttft_s, entry[1].name)
    )
    if best.ttft_s > self.ttft_s:
      return Rejected(
        reason=f"the first token would take {best.ttft_s:.3g} s, more than "
        f"{self.ttft_s:g} s"
      )
    if self.early and self.tpot_s != math.inf:
      decision = self.decode_instance(request, instances, now_s)
      if isinstance(decision, Rejected):
        return decision
    if not best.fetch_tokens:
      copy = self._copy(request, reader, readers, longest)
      return dataclasses.replace(_route_to(reader), copy=copy)
    return dataclasses.replace(
      _route_to(reader), fetch_from=owner.name, fetch_tokens=longest
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalConductor(Conductor):
  """A conductor without fetches: instances use only their own prefixes."""

  threshold: int | float = math.inf


def _route_to(view: InstanceView) -> Route:
  """Route to one instance, which also decodes if its role is "both"."""
  decoder = view.name if view.role == "both" else None
  return Route(prefill=view.name, decode=decoder)


# ---------------------------------------------------------------------------
# Rejections by the load of decode
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyRejection:
  """Rejects at arrival while decode is too slow already.

  Work that would be thrown away later is not begun. But a request reaches the
  decode instances only after its prefill: all requests that arrive in that
  time are accepted, then none, and the load swings. `PredictiveRejection`
  looks ahead.

  Attributes:
    policy: Policy that decides about requests that are not rejected.
    costs: Predictions of times.
    tpot_s: Maximum seconds of a token.
  """

  policy: RoutingPolicy
  costs: RoutingCosts
  tpot_s: int | float = math.inf

  def __post_init__(self) -> None:
    _check_seconds("tpot_s", self.tpot_s)

  def load(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    route: Route,
  ) -> tuple[float, float]:
    """Number of answers and their cached tokens by which to judge."""
    decoding = [view for view in instances if view.decodes]
    rows = sum(view.running_requests for view in decoding)
    return float(rows), float(sum(view.running_tokens for view in decoding))

  def route(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> Route | Rejected:
    """Route as the inner policy does, or reject at high decode load."""
    route = self.policy.route(request, instances, now_s)
    if isinstance(route, Rejected):
      return route
    decoding = [view for view in instances if view.decodes]
    rows, tokens = self.load(request, instances, route)
    rows, tokens = rows + 1, tokens + request.prompt_tokens
    # As if the load were spread evenly over the decode instances.
    token_s = max(
      (
        self.costs.token_s(
          view.name, math.ceil(rows / len(decoding)), tokens / len(decoding)
        )
        for view in decoding
      ),
      default=math.inf,
    )
    if token_s <= self.tpot_s:
      return route
    return Rejected(
      reason=f"{type(self).__name__}: tokens would take {token_s:.3g} s, more "
      f"than {self.tpot_s:g} s"
    )

  def decode_instance(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    now_s: int | float,
  ) -> str | Rejected | None:
    """Decode instance that the inner policy chooses."""
    return self.policy.decode_instance(request, instances, now_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictiveRejection(EarlyRejection):
  """Rejects by the predicted decode load at the end of the prompt's prefill.

  By then, in w seconds, prompts that wait now will be decoding, and some
  current answers will have ended. All answers take `decode_s`, as in the paper:
  of the current ones the share w / decode_s ends, if they began evenly; of a
  queue that takes q seconds the last min(w, decode_s) of w seconds are still
  decoding.

  Attributes:
    decode_s: Seconds of an answer.
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
    """Predicted answers and cached tokens at the end of the prefill."""
    wait = self.read_s(request, instances, route)
    rows, tokens = super().load(request, instances, route)
    remaining = max(0.0, 1 - wait / self.decode_s)
    rows, tokens = rows * remaining, tokens * remaining
    for view in instances:
      if view.prefills and view.queued_requests:
        queue = self.costs.queue_s(view)
        # Share of the queue whose answers are still decoding then.
        share = 1.0
        if queue > 0:
          answered_before = max(0.0, wait - self.decode_s)
          share = (
            max(0.0, min(wait, queue) - min(answered_before, queue)) / queue
          )
        rows += share * view.queued_requests
        tokens += share * view.queued_tokens
    return rows, tokens

  def read_s(
    self,
    request: RoutedRequest,
    instances: Sequence[InstanceView],
    route: Route,
  ) -> float:
    """Seconds until the request's prompt will have been prefilled."""
    (view,) = [
      candidate for candidate in instances if candidate.name == route.prefill
    ]
    cached_tokens = request.cached_tokens(view.name)
    moved = 0.0
    if route.fetch_from is not None:
      (owner,) = [
        candidate
        for candidate in instances
        if candidate.name == route.fetch_from
      ]
      moved = self.costs.sending_s(owner)
      moved += self.costs.transfer_s(route.fetch_tokens - cached_tokens)
      cached_tokens = max(cached_tokens, route.fetch_tokens)
    prefill_s = self.costs.prefill_s(
      view.name, request.prompt_tokens, cached_tokens
    )
    return max(self.costs.queue_s(view), moved) + prefill_s


# ---------------------------------------------------------------------------
# Policies by name
# ---------------------------------------------------------------------------

# Policies that decide alone, and those that wrap another policy. A class with a
# field `costs` gets `RoutingCosts`.
ROUTING_POLICIES: dict[str, Callable[..., RoutingPolicy]] = {
  "shortest": ShortestQueue,
  "random": RandomRoute,
  "load": ShortestWait,
  "local": LocalConductor,
  "conductor": Conductor,
}
REJECTIONS: dict[str, Callable[..., RoutingPolicy]] = {
  "early": EarlyRejection,
  "predictive": PredictiveRejection,
}


def needs_costs(text: str) -> bool:
  """Whether a policy predicts, by its text as of `routing_policy`.

  Raises:
    OptionError: If a name is unknown.
  """
  *rejections, base = text.split("/")
  classes = [_class_of(base, ROUTING_POLICIES)]
  classes += [_class_of(rejection, REJECTIONS) for rejection in rejections]
  return any(map(_has_costs, classes))


def routing_policy(
  value: RoutingPolicy | str, costs: RoutingCosts | None = None
) -> RoutingPolicy:
  """Make a routing policy from its name, or return a policy as it is.

  Args:
    value: A policy; or one of `ROUTING_POLICIES` with options,
      "conductor:threshold=2,ttft_s=30", with `REJECTIONS` in front of it,
      "predictive:tpot_s=0.1,decode_s=20/conductor".
    costs: Costs with which it predicts, see `needs_costs`.

  Raises:
    OptionError: If a name or option is unknown, or costs are missing.
  """
  if not isinstance(value, str):
    return value
  *rejections, base = value.split("/")
  policy = _named(base, ROUTING_POLICIES, costs, {})
  for rejection in reversed(rejections):
    policy = _named(rejection, REJECTIONS, costs, {"policy": policy})
  return policy


def _class_of(
  text: str, policies: Mapping[str, Callable[..., RoutingPolicy]]
) -> Callable[..., RoutingPolicy]:
  """Find the class of a policy by its text."""
  name = text.partition(":")[0]
  if name not in policies:
    raise OptionError(
      "policy",
      repr(text),
      f"one of {', '.join(policies)}, or a RoutingPolicy",
      "pass policy='conductor:threshold=2', or "
      "'predictive:tpot_s=0.1,decode_s=20/conductor'",
    )
  return policies[name]


def _has_costs(policy_class: Callable[..., RoutingPolicy]) -> bool:
  fields = dataclasses.fields(policy_class)  # pyrefly: ignore
  return any(field.name == "costs" for field in fields)


def _named(
  text: str,
  policies: Mapping[str, Callable[..., RoutingPolicy]],
  costs: RoutingCosts | None,
  fixed: Mapping[str, RoutingPolicy],
) -> RoutingPolicy:
  policy_class = _class_of(text, policies)
  name, colon, options_text = text.partition(":")
  options = [
    f.name
    for f in dataclasses.fields(policy_class)  # pyrefly: ignore
    if isinstance(f.default, int | float)
  ]
  given_options = option_text.pairs(
    options_text if colon else None, options, "policy", name
  )
  values = {key: _option_number(text) for key, text in given_options.items()}
  if not _has_costs(policy_class):
    return policy_class(**fixed, **values)
  if costs is None:
    others = [x for x, kind in ROUTING_POLICIES.items() if not _has_costs(kind)]
    raise OptionError(
      "costs",
      f"none for {name!r}",
      "RoutingCosts",
      f"pass the times that it predicts with, or policy={others[0]!r}",
    )
  return policy_class(costs=costs, **fixed, **values)


def _option_number(text: str) -> object:
  return math.inf if text == "inf" else option_text.value(text)
