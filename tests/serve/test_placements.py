"""Goodput, placements and times of instances are what brute force says."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.flexgen.offload_tiers import OffloadShape
from ringjax.serve import StepCost
from ringjax.serve.cluster import (
  ClusterSimulator,
  DistServeModel,
  DistServeTimes,
  GpuCluster,
  InstanceGroup,
  Limits,
  MeasuredCall,
  PlacementSearch,
  QuadraticTimes,
  ServedRequest,
  ServingPlacement,
  ShortestQueue,
  SimulatedInstance,
  SizedModel,
  TensorTimes,
  TrafficSummary,
  as_distserve_counts,
  at_rate,
  engine_times,
  goodput,
  read_calls,
  read_capacities,
  read_profile,
  repeated,
  replan,
  share_met,
  trace_rate,
)
from ringjax.serve.cluster.times.distserve_times import stated
from ringjax.serve.traces import TraceRequest, poisson_trace, read_trace
from tests.helpers import refused

TIMES = TensorTimes(
  fixed_s=2e-3,
  token_s=1e-4,
  pair_s=4e-9,
  reduce_s=2e-6,
  weights_s=9e-3,
  row_s=3e-5,
  cached_s=2e-7,
)


LIMITS = Limits(ttft_s=0.08, tpot_s=0.03)


def trace_of(n=25, seed=0, **options):
  given = dict(rate=1.0, prompt_tokens=100, new_tokens=9, spread=0.5)
  return poisson_trace(requests=n, seed=seed, **(given | options))


# ---------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------


def calls_of(times, noise=0.0, seed=0):
  rng = np.random.default_rng(seed)
  found = []
  for t, n, c in itertools.product((1, 2, 8), (3, 100, 3000), (0, 5000)):
    for phase in ("prefill", "decode"):
      one = MeasuredCall(
        phase=phase, devices=t, tokens=n, cached=c, seconds=1.0
      )
      seconds = times.predict_s(one) * math.exp(noise * rng.normal())
      found.append(dataclasses.replace(one, seconds=seconds))
  return found


def test_seven_constants_are_fitted_to_measured_calls():
  found = TensorTimes.fit(calls_of(TIMES))
  for field in dataclasses.fields(TIMES):
    want = getattr(TIMES, field.name)
    assert getattr(found, field.name) == pytest.approx(want, rel=1e-6)
  noisy = calls_of(TIMES, noise=0.05)
  errors = np.abs(TensorTimes.fit(noisy).errors(noisy))
  assert 0 < np.median(errors) < 0.05
  # What does not matter is zero and not negative.
  plain = dataclasses.replace(TIMES, pair_s=0.0, reduce_s=0.0)
  found = TensorTimes.fit(calls_of(plain, noise=0.02, seed=1))
  assert min(dataclasses.astuple(found)) >= 0
  refused(OptionError, lambda: TensorTimes.fit(noisy[:7]), "at least 8")


def test_times_of_devices_are_those_of_calls():
  for t in (1, 4):
    made = TIMES.at(t)
    call = MeasuredCall(
      phase="prefill", devices=t, tokens=70, cached=31, seconds=1, prompts=3
    )
    want = TIMES.predict_s(call)
    assert made.prefill_s([(70, 31)] * 3) == pytest.approx(want)
    call = MeasuredCall(
      phase="decode", devices=t, tokens=5, cached=900, seconds=1
    )
    assert made.decode_s(5, 900) == pytest.approx(TIMES.predict_s(call))


def test_calls_are_read_from_a_file(tmp_path):
  path = tmp_path / "calls.csv"
  path.write_text(
    "phase,devices,tokens,cached,seconds,prompts\n"
    "prefill,2,512,0,0.05,3\ndecode,1,7,4096,0.011,\n"
  )
  one, two = read_calls(path)
  assert (one.prompts, two.prompts, two.cached) == (3, 1, 4096)
  path.write_text("phase,devices,tokens,cached,seconds\nboth,1,1,1,1\n")
  refused(OptionError, lambda: read_calls(path), "line 2")
  refused(OptionError, lambda: read_calls(tmp_path / "none"), "csv")


def test_predicted_times_follow_the_machine():
  shape = OffloadShape.opt("opt-30b")
  a100, h100 = (
    TensorTimes.on(chips.MACHINES[name], shape) for name in ("a100", "h100")
  )
  # Weights of 60 GB at 2 TB/s; a token takes two FLOPs for each.
  weights = shape.layers * shape.weights
  assert a100.weights_s == pytest.approx(2 * weights / 2039e9)
  assert a100.token_s == pytest.approx(2 * weights / 312e12)
  for name in ("token_s", "pair_s", "weights_s", "cached_s"):
    assert 0 < getattr(h100, name) < getattr(a100, name)
  # Sums over devices keep eight of them from being eight times as fast.
  one, eight = a100.at(1), a100.at(8)
  long = [(8192, 0)]
  assert 1 < one.prefill_s(long) / eight.prefill_s(long) < 8


def test_times_of_a_measured_engine():
  cost = StepCost(
    answers=0.01,
    prompts=0.02,
    row=2e-4,
    token=1e-4,
    key=3e-7,
    pair=1e-7,
    step=5e-3,
  )
  made = engine_times(cost)
  # A piece of 50 tokens behind 20: each sees itself and all before it.
  pairs = sum(20 + i + 1 for i in range(50))
  want = 0.025 + 50e-4 + pairs * 1e-7
  assert made.prefill_s([(50, 20)]) == pytest.approx(want)
  assert made.decode_s(3, 333) == pytest.approx(0.015 + 6e-4 + 999e-7)


ENTRY = {
  "decoding_large_small_bs_threshold": 3,
  "prefill": [10.0, 0.5, 1e-3],
  "decoding_smallbs": [20.0, 1e-3, 2.0],
  "decoding_largebs": [5.0, 2e-3, 4.0],
}


def distserve_files(tmp_path):
  profile, capacity = tmp_path / "profile.json", tmp_path / "capacity.csv"
  profile.write_text(json.dumps({"owner/some-model": {"1": ENTRY, "2": ENTRY}}))
  capacity.write_text(
    "model,tp,pp,max_num_tokens\nowner/some-model,1,1,50\n"
    "owner/some-model,1,2,120\nowner/some-model,4,1,500\nother,1,1,9\n"
  )
  return profile, capacity


def test_rules_of_the_published_simulator(tmp_path):
  profile, capacity = distserve_files(tmp_path)
  made = DistServeModel(
    name="some",
    times=read_profile(profile, "some_model"),
    capacity_tokens=read_capacities(capacity, "Some-Model"),
    kv_token_bytes=1,
  )
  # Four devices have no profile, two no capacity.
  assert made.shapes() == [(1, 1), (1, 2)]
  times = made.times[1]
  assert times.decode_s(2, 100) == pytest.approx(24.1e-3)
  assert times.decode_s(3, 100) == pytest.approx(17.2e-3)
  trace = as_distserve_counts(
    [TraceRequest(arrival=0.0, prompt_tokens=40, new_tokens=3)]
  )
  cluster = ClusterSimulator(
    instances=[
      made.instance("a", "prefill", 1, 2), made.instance("b", "decode", 1, 1),
    ],
    policy=ShortestQueue(),
  )  # fmt: skip
  (one,) = cluster.run(trace).served
  # (10 + 20 + 1.6) / 2 + 2 ms of each stage, 2 + 0.004 of the first.
  assert one.ttft_s == pytest.approx((31.6 + 4 + 2.004) * 1e-3)
  # Three steps that look at 41, 42, 43 tokens, the last of which they make: 22
  # and 2 of the entry.
  assert one.tpot_s == pytest.approx((24 + 42e-3 + 41e-4) * 1e-3)
  refused(OptionError, lambda: read_profile(profile, "none"), "some-model")
  refused(OptionError, lambda: read_capacities(capacity, "none"), "no line")
  refused(OptionError, lambda: read_capacities(profile, "x"), "no line")
  capacity.write_text("model,tp\nx,1\n")
  refused(OptionError, lambda: read_capacities(capacity, "x"), "csv")
  refused(OptionError, lambda: DistServeTimes.of({}), "prefill")


def test_the_stated_profile():
  times = stated()["opt-13b"][1]
  # A prompt of 512 tokens on an A100 takes some 70 ms.
  assert 0.065 < times.prefill_s([(512, 0)]) < 0.08
  assert 0.02 < times.decode_s(1, 512) < 0.025


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_published_example():
  # OPT-13B, prefill on two devices, decode on one: 1.56 requests/s a device.
  model = DistServeModel(
    name="opt-13b",
    times=stated()["opt-13b"],
    capacity_tokens={(2, 1): 163_008, (1, 1): 66_144},
    kv_token_bytes=819_200,
    own_rules=True,
  )
  trace = poisson_trace(
    rate=1.0, requests=1500, prompt_tokens=755, new_tokens=200
  )
  search = PlacementSearch(
    model,
    GpuCluster(nodes=1, devices=4),
    as_distserve_counts(trace),
    Limits(ttft_s=0.2, tpot_s=0.1),
    each=True,
    near=0.03,
  )
  rate = search.pair_goodput((2, 1), (1, 1), None) / 3
  assert rate == pytest.approx(1.56, rel=0.1)


# ---------------------------------------------------------------------------
# Goodput
# ---------------------------------------------------------------------------


def server(instances, calls=None):
  made = ClusterSimulator(instances=instances, policy=ShortestQueue())

  def serve(trace):
    if calls is not None:
      calls.append(len(trace))
    return made.run(trace).served

  return serve


def test_a_rate_counts_the_gaps_between_requests():
  trace = [
    TraceRequest(arrival=n / 2, prompt_tokens=1, new_tokens=1) for n in range(5)
  ]
  assert trace_rate(trace) == 2
  assert [one.arrival for one in at_rate(trace, 1.0)] == [0, 1, 2, 3, 4]


def test_goodput_is_the_edge_of_what_meets_the_limits():
  model = sized()
  serve = server([model.instance("one", "both", 1, 1)])
  trace, limits = trace_of(30), Limits(ttft_s=0.08, tpot_s=0.03)
  found = goodput(serve, trace, limits, near=0.05)
  assert found.rate > 0
  met = lambda rate: share_met(serve(at_rate(trace, rate)), limits)
  assert met(found.rate) >= limits.share
  above = min(rate for rate, share in found.tried if share < limits.share)
  assert found.rate < above <= 1.05 * found.rate
  assert found.tried == tuple(sorted(found.tried))
  # From elsewhere the search ends near the same edge.
  other = goodput(serve, trace, limits, first=9 * found.rate, near=0.05)
  assert other.rate == pytest.approx(found.rate, rel=0.1)
  slow = goodput(serve, trace, dataclasses.replace(limits, ttft_s=1e-3))
  assert slow.rate == 0.0
  # Some rate has to be too much.
  at_once = server(
    [SimulatedInstance(name="one", times=QuadraticTimes(), max_rows=10**6)]
  )
  refused(
    OptionError, lambda: goodput(at_once, trace[:4], limits), "some rate breaks"
  )


@pytest.mark.long
def test_instances_of_a_phase_add_up():
  # Of several that read, one that is busy with a prompt gets no other one.
  trace = trace_of(40, new_tokens=1)
  limits = Limits(ttft_s=0.08, tpot_s=1.0)
  search = PlacementSearch(
    sized(), GpuCluster(nodes=1, devices=4), trace, limits, near=0.1
  )
  one, four = (
    ServingPlacement(
      kind="colocated",
      groups=(
        InstanceGroup(role="both", tensor=1, stages=1, count=n, goodput=1.0),
      ),
      goodput=1.0,
    )
    for n in (1, 4)
  )
  single = search.whole_goodput(one)
  assert search.whole_goodput(four) > 3.5 * single > 0


def test_answers_of_one_token_are_not_split():
  trace = [dataclasses.replace(x, new_tokens=1) for x in trace_of(12)]
  search = PlacementSearch(
    sized(), GpuCluster(nodes=1, devices=2), trace, LIMITS, near=0.2
  )
  assert search.high_affinity() is None and search.low_affinity() is None
  (only,) = search.fill()
  assert only.kind == "colocated"


@pytest.mark.long
def test_short_traces_are_repeated():
  trace = [
    dataclasses.replace(one, blocks=(1, 2), block=64) for one in trace_of(7)
  ]
  twice = repeated(trace, 2)
  assert trace_rate(twice) == pytest.approx(trace_rate(trace))
  assert len({one.number for one in twice}) == 14
  assert not set(twice[0].blocks) & set(twice[7].blocks)
  # Rows are many and answers long: all fit at once, but not for long.
  calls = []
  one = dataclasses.replace(sized().instance("one", "both", 1, 1), max_rows=8)
  found = goodput(
    server([one], calls),
    trace_of(8, new_tokens=40, spread=0),
    Limits(ttft_s=2.0),
    near=0.3,
  )
  assert max(calls) > 8
  most = 8 / (39 * TIMES.at(1).decode_s(8, 8 * 120))
  assert most / 2 < found.rate < 1.25 * most
  alike = [dataclasses.replace(x, arrival=0.0) for x in trace]
  refused(OptionError, lambda: trace_rate(alike), "at once")


def test_limits_are_counted_together_or_one_by_one():
  make = lambda ttft, last: ServedRequest(
    number=0, arrival_s=0.0, prompt_tokens=1, new_tokens=2,
    first_token_s=ttft, last_token_s=last,
  )  # fmt: skip
  served = [make(1.0, 3.0), make(3.0, 4.0), make(1.0, 2.0)]
  limits = Limits(ttft_s=2.0, tpot_s=1.5)
  assert share_met(served, limits) == 1 / 3
  assert share_met(served, limits, each=True) == 2 / 3


# ---------------------------------------------------------------------------
# Placements
# ---------------------------------------------------------------------------


def sized(**options):
  given = dict(
    name="some", times=TIMES, weight_bytes=10.0, kv_token_bytes=0.001,
    device_bytes=12.0, tensors=(1, 2), pipelines=(1, 2),
  )  # fmt: skip
  return SizedModel(**(given | options))


class Tables(PlacementSearch):
  """A search whose simulations are tables of random goodputs."""

  def __init__(self, cluster, model, seed, step):
    super().__init__(model, cluster, trace_of(3), Limits())
    rng = np.random.default_rng(seed)
    draw = lambda n: round(float(rng.uniform(0, n)) / step) * step
    self.one = {
      (role, *shape): draw(math.prod(shape) ** 0.9)
      for role in ("prefill", "decode", "both")
      for shape in self.shapes
    }
    self.pair = {
      (a, b): min(self.one["prefill", *a], self.one["decode", *b])
      * float(rng.uniform(0.5, 1))
      for a in self.shapes
      for b in self.shapes
    }

  def phase_goodput(self, role, tensor, stages):
    return self.one[role, tensor, stages]

  def pair_goodput(self, prefill, decode, link):
    return self.pair[prefill, decode]


@pytest.mark.parametrize("seed", range(24))
def test_placements_are_the_best_of_all(seed):
  cluster = GpuCluster(nodes=1 + seed % 3, devices=(1, 2, 4, 8)[seed % 4])
  model = sized(tensors=(1, 2, 4), pipelines=(1, 2, 3, 4))
  # Coarse tables have ties.
  search = Tables(cluster, model, seed, 0.25 if seed % 2 else 1e-9)
  rate, size = 5.3, cluster.size
  best, need = {}, {}
  for role in ("prefill", "decode", "both"):
    rates = {s: search.one[role, *s] for s in search.shapes}
    best[role] = max(
      (x / math.prod(s), -math.prod(s)) for s, x in rates.items()
    )
    need[role] = min(
      (
        math.prod(s) * math.ceil(rate / x - 1e-9) for s, x in rates.items() if x
      ),
      default=0,
    )
  high, both = search.high_affinity(rate), search.colocated(rate)
  if min(best["prefill"][0], best["decode"][0]) > 0:
    for group in high.groups:
      assert group.devices == need[group.role]
      assert (group.count - 1) * group.goodput < rate
      assert group.count * group.goodput >= rate * (1 - 1e-9)
    # Without a rate each is the best a device.
    for group in search.high_affinity().groups:
      devices = group.tensor * group.stages
      assert (group.goodput / devices, -devices) == best[group.role]
  else:
    assert high is None
  if both is not None:
    assert both.devices == need["both"]
  assert (both is None) == (best["both"][0] == 0)
  # Pairs whose stages share nodes.
  pairs = []
  for (a, b), found in search.pair.items():
    for inter in range(1, cluster.nodes + 1):
      if a[1] % inter or b[1] % inter:
        continue
      devices = math.prod(a) + math.prod(b)
      if devices // inter <= cluster.devices and found:
        pairs.append((found / devices, -devices))
  low = search.low_affinity()
  assert (low is None) == (not pairs)
  if low is not None:
    assert (low.per_device, -low.devices) == max(pairs)
    assert search.low_affinity(rate).devices == min(
      -n * math.ceil(rate / (each * -n) - 1e-9) for each, n in pairs
    )
  # The whole cluster: every shape, every count.
  most = (0.0, 0)
  for a, b in itertools.product(search.shapes, repeat=2):
    for n, m in itertools.product(range(1, size + 1), repeat=2):
      used = n * math.prod(a) + m * math.prod(b)
      if used <= size:
        rate = min(n * search.one["prefill", *a], m * search.one["decode", *b])
        most = max(most, (rate, -used))
  filled = {one.kind: one for one in search.fill()}
  if most[0]:
    found = filled["high affinity"]
    assert (found.goodput, -found.devices) == most
  else:
    assert "high affinity" not in filled
  assert all(one.devices <= size for one in filled.values())


@pytest.mark.long
def test_a_placement_does_what_was_promised():
  limits, seen = Limits(ttft_s=0.06, tpot_s=0.025), []
  search = PlacementSearch(
    sized(tensors=(1,), pipelines=(1,), options={"max_rows": 2}),
    GpuCluster(nodes=1, devices=2, inside=chips.Link(bandwidth=0.1)),
    trace_of(12),
    limits,
    near=0.2,
    progress=seen.append,
  )
  high = search.high_affinity()
  assert [one.role for one in high.groups] == ["prefill", "decode"]
  assert high.goodput > 0
  made = search.simulate(high, 0.5 * high.goodput, transfer=False)
  assert share_met(made.served, limits) >= limits.share
  # A cache of 100 tokens moves in a second: too slow for the limit.
  (share,) = search.shares(high, [0.5 * high.goodput])
  assert share < limits.share
  assert seen == list(range(1, search.simulations + 1))
  refused(
    OptionError,
    lambda: PlacementSearch(
      sized(device_bytes=1.0), GpuCluster(nodes=1, devices=2), trace_of(5),
      limits,
    ),
    "room for some",
  )  # fmt: skip


# ---------------------------------------------------------------------------
# Drift
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_steady_load_is_placed_once_and_a_drift_again():
  steady = trace_of(900, rate=3.0, new_tokens=40)
  asked = []

  def plan(requests, now):
    asked.append((len(requests), now.rate[0]))

  assert [x.why for x in replan(steady, plan, window_s=30.0)] == [
    "the first window"
  ]
  # Twice the rate from 300 s on, and longer answers from 400 s on.
  later = [
    dataclasses.replace(
      one,
      arrival=300 + one.arrival / 2,
      new_tokens=one.new_tokens * (1 if one.arrival < 200 else 3),
    )
    for one in steady
  ]
  whole = [*(one for one in steady if one.arrival < 300), *later]
  found = list(replan(whole, plan, window_s=30.0))
  assert [x.time_s for x in found][:2] == [30.0, 330.0]
  assert found[1].why.startswith("rate: ")
  # It changed somewhere in that window: the next one is planned for too.
  assert (found[2].time_s, found[2].why[:10]) == (360.0, "the window")
  assert any("new tokens" in x.why for x in found[2:])
  assert asked[2][1] > 1.5 * asked[1][1]
  # Times of a clock: no windows before the first arrival, and the same ends.
  shifted = [
    dataclasses.replace(one, arrival=one.arrival + 1.5e9) for one in whole
  ]
  ends = [x.time_s - 1.5e9 for x in replan(shifted, plan, window_s=30.0)]
  assert ends == [x.time_s for x in found]
  few = TrafficSummary.of(steady[:3], 1.0)
  assert few.drifted(TrafficSummary.of(later[-50:], 1.0)) == ""


# ---------------------------------------------------------------------------
# Traces
# ---------------------------------------------------------------------------


def test_burstgpt_files_are_read(tmp_path):
  path = tmp_path / "burst.csv"
  head = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
  )
  path.write_text(
    head + "5,ChatGPT,472,18,490,Conversation log\n"
    "9.5,GPT-4,1087,0,1087,API log\n"
    "45,ChatGPT,417,276,693,Conversation log\n"
  )
  # What failed has no response.
  found = read_trace(path)
  assert [(x.arrival, x.prompt_tokens, x.new_tokens) for x in found] == [
    (0.0, 472, 18), (40.0, 417, 276),
  ]  # fmt: skip
  path.write_text(head + "5,ChatGPT,many,18,490,API log\n")
  refused(OptionError, lambda: read_trace(path), "line 2", "Request tokens")


def test_times_that_are_none():
  refused(OptionError, lambda: QuadraticTimes(decode_row_s=-1.0), "row")
  refused(OptionError, lambda: TensorTimes(pair_s=math.nan), "pair")
  refused(OptionError, lambda: GpuCluster(nodes=0, devices=1), "nodes")
