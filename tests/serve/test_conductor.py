"""Routes by predicted times: the algorithm as published, and what it is for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.serve.cluster import (
  ROUTING_POLICIES,
  ClusterSimulator,
  Conductor,
  EarlyRejection,
  InstanceView,
  PredictiveRejection,
  PrefixCopy,
  QuadraticTimes,
  Rejected,
  Route,
  RoutedRequest,
  RoutingCosts,
  ShortestQueue,
  SimulatedInstance,
  fetch_bytes_per_flop,
  needs_costs,
  routing_policy,
)
from ringjax.serve.traces import TraceRequest, poisson_trace
from tests.helpers import refused

TIMES = QuadraticTimes(
  prefill_token_s=1e-4,
  prefill_pair_s=1e-9,
  decode_fixed_s=0.02,
  decode_row_s=4e-4,
  decode_token_s=1e-8,
)
COSTS = RoutingCosts(
  times=TIMES, kv_token_bytes=1000, link=Link(bandwidth=1e8, latency_s=0.01)
)


def asked(tokens=8000, cached=None, **more):
  known = cached or {}
  return RoutedRequest(
    number=0,
    arrival_s=0.0,
    prompt_tokens=tokens,
    new_tokens=100,
    cached_tokens=lambda name: known.get(name, 0),
    **more,
  )


def published(tokens, prefixes, queues, threshold):
  """Algorithm 1, line by line: (seconds, reader, whether it fetches)."""
  best_len = max(prefixes.values())
  best_instance = max(prefixes, key=prefixes.get)
  ttft, chosen, fetches = math.inf, None, False
  for name, prefix in prefixes.items():
    ratio = best_len / prefix if prefix else (math.inf if best_len else 0)
    if ratio > threshold and name != best_instance:
      moved = COSTS.transfer_s(best_len - prefix)
      need = moved + queues[name]
      need += TIMES.prefill_s([(tokens - best_len, best_len)])
    else:
      need = queues[name] + TIMES.prefill_s([(tokens - prefix, prefix)])
    if need < ttft:
      far = ratio > threshold and name != best_instance
      ttft, chosen, fetches = need, name, far
  return ttft, chosen, fetches


@pytest.mark.parametrize("seed", range(20))
def test_the_published_algorithm(seed):
  rng = np.random.default_rng(seed)
  names = [f"prefill{n}" for n in range(5)]
  lengths = rng.choice([0, 0, 512, 1024, 4096, 7168], 5)
  # None has it in some, so that nothing is divided by 0.
  prefixes = {
    n: int(k) * (seed > 1) for n, k in zip(names, lengths, strict=True)
  }
  queues = {
    n: float(q) for n, q in zip(names, rng.uniform(0, 1, 5), strict=True)
  }
  threshold = [1.0, 2.0, 4.0][seed % 3]
  views = [
    InstanceView(name=n, role="prefill", queued_tokens=1, queued_s=queues[n])
    for n in names
  ]
  policy = Conductor(costs=COSTS, threshold=threshold, forced=True, serial=True)
  found = policy.route(asked(cached=prefixes), views, 0.0)
  seconds, reader, fetches = published(8000, prefixes, queues, threshold)
  assert isinstance(found, Route) and found.prefill == reader
  assert (found.fetch_from is not None) == fetches
  if fetches:
    assert prefixes[found.fetch_from] == max(prefixes.values())
    assert found.fetch_tokens == max(prefixes.values())
  view = views[names.index(reader)]
  choice = policy.choice(asked(cached=prefixes), view, max(prefixes.values()))
  assert choice.ttft_s == pytest.approx(seconds)


def test_a_fetch_is_taken_where_it_is_faster():
  # One has the prefix and a queue; the other could fetch it, or compute it.
  views = [
    InstanceView(name="far", role="prefill", queued_tokens=9, queued_s=9.0),
    InstanceView(name="near", role="prefill"),
  ]
  request = asked(cached={"far": 7000, "near": 0})
  bandwidth = COSTS.fetch_bandwidth("near", 8000, 0, 7000)
  # By hand: 7 MB, in the time of 7000 tokens before 1000 others.
  saved = TIMES.prefill_s([(8000, 0)]) - TIMES.prefill_s([(1000, 7000)])
  assert bandwidth == pytest.approx(7e6 / saved)
  for factor, fetches in ((1.01, True), (0.99, False)):
    costs = RoutingCosts(
      times=TIMES, kv_token_bytes=1000, link=Link(bandwidth=factor * bandwidth)
    )
    found = Conductor(costs=costs).route(request, views, 0.0)
    want = ("far", 7000) if fetches else (None, 0)
    assert (found.fetch_from, found.fetch_tokens) == want
  found = routing_policy("local", COSTS).route(request, views, 0.0)
  assert found == Route(prefill="near", decode=None)


def test_the_published_bound_of_a_fetch():
  # 8 x 312 and 8 x 989 TFLOP/s; Llama-3-70B, 8,192 tokens: 6 and 19 GB/s.
  ratio = fetch_bytes_per_flop(8192, embed=8192, groups=8)
  assert round(ratio * 8 * 312e12 / 1e9) == 6
  assert round(ratio * 8 * 989e12 / 1e9) == 19


def test_reasons_of_rejections():
  idle = InstanceView(name="p", role="prefill")
  full = InstanceView(
    name="d", role="decode", running_requests=200, free_tokens=10**6
  )
  policy = Conductor(costs=COSTS, ttft_s=0.5)
  found = policy.route(asked(), [full, idle], 0.0)
  assert (
    isinstance(found, Rejected) and "0.864 s, more than 0.5 s" in found.reason
  )
  policy = Conductor(costs=COSTS, tpot_s=0.05)
  found = policy.route(asked(), [full, idle], 0.0)
  assert isinstance(found, Rejected) and "more than 0.05 s" in found.reason
  late = Conductor(costs=COSTS, tpot_s=0.05, early=False)
  assert late.route(asked(), [full, idle], 0.0) == Route(
    prefill="p", decode=None
  )
  assert isinstance(late.decode_instance(asked(), [full, idle], 0.0), Rejected)
  for name in ROUTING_POLICIES:
    found = routing_policy(name, COSTS).route(asked(), [full], 0.0)
    assert found == Rejected(reason="no instance reads prompts")
  # Without room it waits, and is not rejected.
  none = InstanceView(name="d", role="decode", free_tokens=7)
  assert policy.decode_instance(asked(), [none, idle], 0.0) is None


def test_policies_by_name():
  made = routing_policy(
    "predictive:tpot_s=0.1,decode_s=20/conductor:threshold=2,serial=True", COSTS
  )
  assert made == PredictiveRejection(
    costs=COSTS,
    tpot_s=0.1,
    decode_s=20,
    policy=Conductor(costs=COSTS, threshold=2, serial=True),
  )
  assert routing_policy("local", COSTS).threshold == math.inf
  assert routing_policy("conductor:threshold=inf", COSTS).threshold == math.inf
  assert routing_policy(made) is made
  found = routing_policy("early:tpot_s=1/shortest", COSTS)
  assert found == EarlyRejection(costs=COSTS, tpot_s=1, policy=ShortestQueue())
  wrong = {
    "best": ("policy", "conductor"),
    "conductor:speed=2": ("policy", "threshold"),
    "conductor:threshold=0.5": ("threshold",),
    "early": ("policy", "'early'"),
    "load/conductor": ("policy", "predictive"),
    "predictive:decode_s=0/load": ("decode_s",),
  }
  for text, words in wrong.items():
    refused(OptionError, lambda t=text: routing_policy(t, COSTS), *words)
  refused(OptionError, lambda: routing_policy("load"), "costs", "shortest")
  refused(OptionError, lambda: routing_policy("shortest:speed=2"), "policy")
  assert routing_policy("shortest") == ShortestQueue()
  needs = {name for name in ROUTING_POLICIES if needs_costs(name)}
  # Policies that predict have costs; others make do with what they count.
  assert {"load", "local", "conductor"} <= needs
  assert "shortest" not in needs
  assert needs_costs("early:tpot_s=1/shortest")
  refused(
    OptionError, lambda: RoutingCosts(times={"a": TIMES}).of("b"), "times", "a"
  )


# ---------------------------------------------------------------------------
# Clusters
# ---------------------------------------------------------------------------


def conversations(turns=3, sessions=80, prompt=6000, rate=3.0, seed=0):
  """Prompts that grow: each turn has all blocks of the one before it."""
  rng = np.random.default_rng(seed)
  fresh, found = iter(range(1, 10**9)), []
  for _ in range(sessions):
    arrival = rng.uniform(0, sessions * turns / rate)
    blocks = [0]
    for _ in range(turns):
      more = max(1, int(rng.exponential(prompt / 512)))
      blocks += [next(fresh) for _ in range(more)]
      found.append((arrival, tuple(blocks)))
      arrival += rng.exponential(12.0) + 4
  found.sort()
  return [
    TraceRequest(
      arrival=float(when),
      prompt_tokens=512 * len(blocks) - 100,
      new_tokens=32,
      number=n,
      blocks=blocks,
    )
    for n, (when, blocks) in enumerate(found)
  ]


def cluster(policy, readers=4, decoders=1, link=None, room=200_000, **more):
  instances = [
    SimulatedInstance(
      name=f"prefill{n}",
      role="prefill",
      times=TIMES,
      prefix_cache_tokens=room,
      capacity_tokens=10**7,
    )
    for n in range(readers)
  ] + [
    SimulatedInstance(
      name=f"decode{n}",
      role="decode",
      times=TIMES,
      capacity_tokens=10**8,
      max_rows=10**4,
    )
    for n in range(decoders)
  ]
  return ClusterSimulator(
    instances=instances, policy=policy, links=link, kv_token_bytes=1000, **more
  )


def mean_ttft(result):
  return float(np.mean([one.ttft_s for one in result.served]))


# Some ten thousand events, which the checks of annotations make ten times as
# slow.
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_each_policy_is_better_than_the_one_before(seed):
  link = Link(bandwidth=1e9, latency_s=1e-3)
  costs = RoutingCosts(times=TIMES, kv_token_bytes=1000, link=link)
  trace = conversations(seed=seed)
  found, hits = {}, {}
  for name in ("random", "load", "local", "conductor"):
    result = cluster(routing_policy(name, costs), link=link).run(trace)
    assert not any(one.rejected for one in result.served)
    found[name] = mean_ttft(result)
    hits[name] = sum(one.cached_tokens for one in result.served)
  assert found["random"] > found["load"] > found["local"] > found["conductor"]
  # Those that look at queues alone find little.
  assert hits["load"] < hits["local"] < hits["conductor"]


def test_hot_blocks_are_soon_in_several_places():
  link = Link(bandwidth=1e10)
  costs = RoutingCosts(times=TIMES, kv_token_bytes=1000, link=link)
  hot = tuple(range(16))
  trace = [
    TraceRequest(
      # The first one is read before the others come, all at once.
      arrival=0.0 if n == 0 else 5.0,
      prompt_tokens=512 * 17,
      new_tokens=2,
      number=n,
      blocks=(*hot, 100 + n),
    )
    for n in range(9)
  ]
  result = cluster(Conductor(costs=costs), link=link).run(trace)
  readers = {one.prefill for one in result.served[1:]}
  assert len(readers) == 4
  assert all(one.cached_tokens == 512 * 16 for one in result.served[1:])
  # Three instances fetched, in the order of the requests; none did twice
  # what it had: all that moved is known.
  local = cluster(routing_policy("local", costs), link=link).run(trace)
  assert mean_ttft(result) < mean_ttft(local)
  moved = sum(result.moved_bytes.values()) - sum(local.moved_bytes.values())
  fetches = round(moved / (512 * 16 * 1000))
  assert moved == pytest.approx(fetches * 512 * 16 * 1000)
  assert 3 <= fetches < 8


def swing(policy, trace, decoders=1):
  """Mean and standard deviation of the answers under way, and the result."""
  result = cluster(policy, readers=16, decoders=decoders, timeline=True).run(
    trace
  )
  times = np.linspace(0.2, 1.0, 1500) * trace[-1].arrival
  total = np.zeros(times.size)
  for n in range(decoders):
    points = result.loads[f"decode{n}"]
    at = np.searchsorted([p.time_s for p in points], times, side="right") - 1
    rows = np.array([p.running_requests for p in points])
    total += rows[np.maximum(at, 0)]
  return float(total.mean()), float(total.std()), result


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("seed", "decoders"), [(0, 1), pytest.param(1, 2, marks=pytest.mark.long)]
)
def test_prediction_calms_the_load_of_decoding(seed, decoders):
  trace = poisson_trace(
    rate=3,
    requests=700,
    prompt_tokens=32_000,
    new_tokens=400 * decoders,
    spread=0.4,
    seed=seed,
  )
  costs, limit = RoutingCosts(times=TIMES), 0.033
  answer_s = 400 * decoders * limit
  late = routing_policy(f"load:tpot_s={limit}", costs)
  early = routing_policy(f"early:tpot_s={limit}/load", costs)
  ahead = routing_policy(
    f"predictive:tpot_s={limit},decode_s={answer_s}/load", costs
  )
  found = {
    name: swing(policy, trace, decoders)
    for name, policy in (("late", late), ("early", early), ("ahead", ahead))
  }
  # At arrival the load swings; looking ahead it does not.
  assert found["ahead"][1] < 0.6 * found["early"][1]
  assert found["ahead"][0] > 0.7 * found["early"][0]
  # What is taken then has its tokens in time, and that is more.
  kept = {
    name: [x.tpot_s <= limit for x in result.served if not x.rejected]
    for name, (*_, result) in found.items()
  }
  assert np.mean(kept["ahead"]) > 0.9 > 0.6 > np.mean(kept["early"])
  assert sum(kept["ahead"]) > 1.5 * sum(kept["early"])
  wasted = {
    name: sum(bool(one.rejected) and one.prefill != "" for one in result.served)
    for name, (*_, result) in found.items()
  }
  # Only a rejection after the prompt has been read wastes the work.
  assert wasted["late"] > 100 and wasted["early"] == wasted["ahead"] == 0
  reasons = {one.rejected.split(":")[0] for one in found["ahead"][2].served}
  assert reasons == {"", "PredictiveRejection"}


def test_a_hot_prefix_is_copied():
  """To the shortest queue that lacks it, while its reader's is long."""
  slow = RoutingCosts(
    times=TIMES, kv_token_bytes=1000, link=Link(bandwidth=1e6)
  )
  policy = routing_policy("conductor:threshold=2,hot_s=0.2", slow)
  queues = {"a": 0.3, "b": 0.1, "c": 0.05}
  views = lambda **more: [
    InstanceView(name=name, role="prefill", queued_s=queued)
    for name, queued in (queues | more).items()
  ]
  some = dict(a=6000)
  # A fetch takes 6 s: it is read where the prefix is.
  got = policy.route(asked(7000, some), views(), 0)
  assert (got.prefill, got.fetch_from) == ("a", None)
  assert got.copy == PrefixCopy(source="a", target="c", tokens=6000)
  # Who has more than half of it needs none; nor does a short queue.
  got = policy.route(asked(7000, some | dict(c=3001)), views(), 0)
  assert got.copy.target == "b"
  assert policy.route(asked(7000, some), views(a=0.19), 0).copy is None
  every = dict(a=6000, b=3500, c=3500)
  assert policy.route(asked(7000, every), views(), 0).copy is None
  # Where queues are longer still nothing is gained.
  assert policy.route(asked(7000, some), views(b=0.4, c=0.5), 0).copy is None
  # Who fetches has a copy anyway.
  fast = routing_policy("conductor:threshold=2,hot_s=0.2", COSTS)
  got = fast.route(asked(7000, some), views(a=0.4), 0)
  assert got.fetch_from == "a" and got.copy is None
  refused(
    OptionError, lambda: routing_policy("conductor:hot_s=-1", COSTS), "hot_s"
  )


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_copies_shorten_the_queue_of_a_hot_prefix():
  """Where fetches would be too slow for the request that waits for them."""
  link = Link(bandwidth=5e6)
  costs = RoutingCosts(times=TIMES, kv_token_bytes=1000, link=link)
  hot = tuple(range(16))
  trace = [
    TraceRequest(
      arrival=0.0 if n == 0 else 5.0 + 0.05 * n,
      prompt_tokens=512 * 17,
      new_tokens=2,
      number=n,
      blocks=(*hot, 100 + n),
    )
    for n in range(120)
  ]
  run = lambda text: cluster(
    routing_policy(f"conductor:{text}", costs), readers=2, link=link
  ).run(trace)
  plain, copied = run("hot_s=inf"), run("hot_s=0.2")
  busy = lambda result: [x.prefill for x in result.served if x.cached_tokens]
  assert len(set(busy(copied))) == 2
  assert mean_ttft(copied) < mean_ttft(plain)


def test_a_fetch_waits_for_what_is_in_flight_on_the_same_card():
  policy = routing_policy("conductor", COSTS)
  view = lambda name, sending=0, queued=0: InstanceView(
    name=name, role="prefill", queued_s=queued, sending_tokens=sending
  )
  both = asked(cached={"a": 6000, "b": 6000})
  few = asked(cached={"a": 6000})
  # 6,000 tokens take 0.07 s to move and 0.636 s to compute; a is busy.
  got = policy.route(few, [view("a", queued=9), view("c")], 0)
  assert (got.prefill, got.fetch_from) == ("c", "a")
  # Behind 60,000 tokens, which take 0.6 s, it is computed.
  got = policy.route(few, [view("a", 60_000, 9), view("c")], 0)
  assert (got.prefill, got.fetch_from) == ("c", None)
  # Of two that have it, the one whose card is free sends it.
  for busy, free in (("a", "b"), ("b", "a")):
    views = [view(busy, 60_000, 8), view(free, 0, 9), view("c")]
    assert policy.route(both, views, 0).fetch_from == free


def test_a_simulated_card_says_what_it_has_to_send():
  seen = []

  class Looking(type(routing_policy("conductor", COSTS))):
    def route(self, request, instances, now_s):
      seen.append(sum(one.sending_tokens for one in instances))
      return super().route(request, instances, now_s)

  ClusterSimulator(
    instances=[
      SimulatedInstance(name="a", role="prefill", times=TIMES),
      SimulatedInstance(name="b", role="decode", times=TIMES),
    ],
    policy=Looking(costs=COSTS),
    # Slow: what was read is still on its way when others come.
    links=Link(bandwidth=1e6),
    kv_token_bytes=1000,
  ).run(poisson_trace(rate=2, requests=12, prompt_tokens=2000, new_tokens=5))
  assert seen[0] == 0 and 0 < max(seen) <= 4000 * 12
