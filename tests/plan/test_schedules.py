"""Methods of reading a prompt: against closed forms, events and each other."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.errors import OptionError
from ringjax.parallel.chips import Link
from ringjax.plan import cost, draw, profiles
from ringjax.plan.cost import Profile, Prompt
from ringjax.plan.events import Simulator
from ringjax.plan.kv_runahead import schedules
from ringjax.plan.kv_runahead.schedules import Noise

A100 = profiles.STATED["llama7b-a100"]
FAST = Link(bandwidth=300e9)
# Of one token a row of keys and a row of values: bytes count rows.
ROWS = Profile(
  name="rows",
  model="m",
  hardware="h",
  layers=1,
  token_s=1.0,
  pair_s=1.0,
  kv_bytes=2,
)


def near(a: float, b: float) -> bool:
  return math.isclose(a, b, rel_tol=1e-9)


@pytest.mark.smoke
def test_the_worked_example():
  prompt, network = Prompt(tokens=9), Link(bandwidth=1.0)
  chain = schedules.kvr(ROWS, prompt, (4, 3, 2), network)
  assert chain.work == (16, 21, 18)
  assert chain.link_bytes == {"0-1": 8, "1-2": 14} and chain.sent_bytes == 22
  gather = schedules.tsp(ROWS, prompt, 3, network)
  assert gather.work == (27, 27, 27)
  assert gather.sent_bytes == 36
  assert set(gather.link_bytes.values()) == {12}


def test_layers_multiply_bytes():
  deep = dataclasses.replace(ROWS, layers=5)
  prompt, network = Prompt(tokens=9), Link(bandwidth=1.0)
  assert schedules.kvr(deep, prompt, (4, 3, 2), network).sent_bytes == 110
  assert schedules.tsp(deep, prompt, 3, network).sent_bytes == 180


@st.composite
def cases(draw):
  lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
  profile = Profile(
    name="x",
    model="m",
    hardware="h",
    layers=draw(st.integers(1, 6)),
    token_s=draw(st.sampled_from([0.0, 0.3, 1.0])),
    pair_s=draw(st.sampled_from([0.01, 0.07])),
    fixed_s=draw(st.sampled_from([0.0, 2.0])),
    floor_s=draw(st.sampled_from([0.0, 30.0])),
    kv_bytes=3,
    early=draw(st.sampled_from([0.0, 0.25, 1.0])),
    kernel=draw(st.sampled_from(cost.KERNELS)),
  )
  prompt = Prompt(
    tokens=sum(lengths),
    prefix=draw(st.sampled_from([0, 13])),
    window=draw(st.sampled_from([None, 1, 17])),
  )
  network = Link(
    bandwidth=draw(st.sampled_from([1.0, 30.0, 1e6])),
    latency_s=draw(st.sampled_from([0.0, 0.7])),
  )
  options = dict(
    credits=draw(st.sampled_from([None, 1, 2])),
    noise=draw(st.sampled_from([None, Noise(slower=5, seed=3)])),
  )
  return profile, prompt, tuple(lengths), network, options


def simulated(profile, prompt, lengths, network, credits, noise):
  """The chain with pools as its buffers, played on the simulator of events."""
  sim, p, layers = Simulator(), len(lengths), profile.layers
  devices = [sim.device(f"rank {i}") for i in range(p)]
  links = [
    sim.link(f"{i}", network.bandwidth, network.latency_s) for i in range(p - 1)
  ]
  many = layers + 1 if credits is None else credits
  out, into = ([sim.pool(f"{s} {i}", many) for i in range(p)] for s in "oi")
  slow = (noise or Noise(slower=0.0)).slowdowns(layers, p - 1)
  work = cost.pairs(prompt, lengths, profile.kernel)
  nbytes = cost.chain_tokens(prompt, lengths) * profile.kv_bytes
  ends: list[list] = [[] for _ in lengths]
  for layer in range(layers):
    came: list = []
    for i, n in enumerate(lengths):
      linear, last = profile.token_s / layers * n, i == p - 1
      project = sim.op(
        "project", devices[i], profile.early * linear, after=ends[i]
      )
      joined = sim.op(
        "join", after=[project, *came], take={} if last else {out[i]: 1}
      )
      attend = sim.op(
        "attend",
        devices[i],
        (1 - profile.early) * linear
        + float(profile.pair_s / layers * work[i])
        + profile.fixed_s / layers,
        after=[joined],
        give={into[i]: 1} if i else {},
      )
      if not last:
        send = sim.send(
          "send", links[i], float(nbytes[i]), slowdown=float(slow[layer, i]),
          after=[joined], take={into[i + 1]: 1}, give={out[i]: 1},
        )  # fmt: skip
        came = [send]
      floor = sim.op("floor", None, profile.floor_s / layers, after=ends[i])
      ends[i] = [sim.op("end", after=[attend, floor])]
  timeline = sim.run()
  return timeline[ends[-1][0]].done_s, timeline


@pytest.mark.smoke
@given(cases())
@settings(max_examples=40)
def test_the_recurrence_is_the_simulation(case):
  profile, prompt, lengths, network, options = case
  want, timeline = simulated(profile, prompt, lengths, network, **options)
  found = schedules.kvr_seconds(profile, prompt, [lengths], network, **options)
  assert found.shape == (1,)
  assert near(float(found[0]), float(want))
  played = schedules.kvr(profile, prompt, lengths, network, **options)
  assert near(float(played.seconds), float(want))
  for kind in ("project", "attend", "send"):
    first, second = (
      np.array([(s.start_s, s.end_s, s.done_s) for s in spans]).reshape(-1, 3)
      for spans in (
        [s for s in timeline.spans if s.name == kind],
        [s for s in played.timeline.spans if s.kind == kind],
      )
    )
    assert np.allclose(first, second, rtol=1e-9, atol=1e-12)


@given(cases())
@settings(max_examples=40)
def test_what_a_chain_computes_and_sends(case):
  profile, prompt, lengths, network, options = case
  played = schedules.kvr(profile, prompt, lengths, network, **options)
  want = cost.pairs(prompt, lengths, profile.kernel)
  assert played.work == tuple(want)
  sent = cost.chain_tokens(prompt, lengths) * profile.kv_bytes * profile.layers
  assert list(played.link_bytes.values()) == sent.tolist()
  busy = [played.timeline.busy_s(f"rank {i}") for i in range(len(lengths))]
  assert np.allclose(busy, cost.compute_s(profile, prompt, lengths))
  assert played.seconds >= max(busy[-1], profile.floor_s) * (1 - 1e-12)


def test_many_partitions_are_each_alone():
  prompt = Prompt(tokens=4096)
  many = [(1024,) * 4, (2000, 1000, 600, 496), (1, 1, 1, 4093)]
  found = schedules.kvr_seconds(A100, prompt, many, FAST)
  alone = [schedules.kvr_seconds(A100, prompt, [x], FAST)[0] for x in many]
  assert found.tolist() == alone


@given(st.integers(1, 6), st.sampled_from([1e8, 3e11]), st.integers(8, 3000))
@settings(max_examples=25)
def test_tsp_in_closed_form(ranks, bandwidth, tokens):
  tokens = tokens * ranks
  network = Link(bandwidth=bandwidth, latency_s=1e-4)
  profile = dataclasses.replace(A100, layers=4, floor_s=0.0, fixed_s=0.01)
  found = schedules.tsp(profile, Prompt(tokens=tokens), ranks, network)
  each = tokens // ranks
  hop = each * profile.kv_bytes / bandwidth + network.latency_s
  want = (
    profile.token_s * each
    + profile.pair_s * each * tokens
    + profile.fixed_s
    + profile.layers * (ranks - 1) * hop
  )
  assert near(found.seconds, want)


@given(st.integers(1, 5), st.integers(4, 3000))
@settings(max_examples=25)
def test_ring_over_links_that_cost_nothing(ranks, tokens):
  tokens = tokens * ranks
  network = Link(bandwidth=1e30)
  profile = dataclasses.replace(A100, layers=2, floor_s=0.0)
  striped = schedules.ring(profile, Prompt(tokens=tokens), ranks, network)
  linear = profile.token_s * tokens / ranks
  pair = profile.pair_s * tokens**2
  assert near(striped.seconds, linear + pair / ranks / 2)
  level = schedules.ring(
    profile, Prompt(tokens=tokens), ranks, network, layout="contiguous"
  )
  # The last shard sees all, half of its own.
  assert near(level.seconds, linear + pair * (1 / ranks - 1 / (2 * ranks**2)))
  assert near(sum(striped.work), tokens**2 / 2)
  assert near(sum(level.work), tokens**2 / 2)


def test_ring_hides_hops_behind_compute():
  prompt = Prompt(tokens=16384)
  free = schedules.ring(A100, prompt, 4, Link(bandwidth=1e30)).seconds
  assert near(schedules.ring(A100, prompt, 4, FAST).seconds, free)
  slow = schedules.ring(A100, prompt, 4, Link(bandwidth=1e9)).seconds
  # Three hops of a quarter, in each of 32 layers, cannot be hidden.
  assert slow >= 32 * 3 * 4096 * 16384 / 1e9


def test_one_rank_is_one_device():
  prompt = Prompt(tokens=4096)
  want = A100.token_s * 4096 + A100.pair_s * 4096**2
  for found in (
    schedules.tsp(A100, prompt, 1, FAST),
    schedules.kvr(A100, prompt, (4096,), FAST),
  ):
    assert near(found.seconds, want)
    assert found.sent_bytes == 0 and found.link_bytes == {}
  causal = dataclasses.replace(A100, kernel="causal")
  half = A100.token_s * 4096 + A100.pair_s * 4096**2 / 2
  for found in (
    schedules.flash_tsp(A100, prompt, 1, FAST),
    schedules.ring(A100, prompt, 1, FAST),
    schedules.kvr(causal, prompt, (4096,), FAST),
  ):
    assert near(found.seconds, half)


def test_order_of_the_baselines():
  prompt = Prompt(tokens=16384)
  dense = schedules.tsp(A100, prompt, 4, FAST).seconds
  flash = schedules.flash_tsp(A100, prompt, 4, FAST).seconds
  ring = schedules.ring(A100, prompt, 4, FAST).seconds
  assert ring < flash < dense


@given(cases())
@settings(max_examples=40)
def test_no_chain_beats_its_bound(case):
  profile, prompt, lengths, network, options = case
  played = schedules.kvr(profile, prompt, lengths, network, **options)
  work = cost.pairs(prompt, lengths, profile.kernel)
  least = profile.token_s * lengths[-1] + profile.pair_s * work[-1]
  assert played.seconds >= least * (1 - 1e-12)


@given(cases())
@settings(max_examples=40)
def test_slower_links_and_fewer_buffers_never_help(case):
  profile, prompt, lengths, network, options = case
  seconds = lambda net, **more: float(
    schedules.kvr_seconds(
      profile, prompt, [lengths], net, **{**options, **more}
    )[0]
  )
  found = seconds(network)
  slack = 1 + 1e-12
  half = dataclasses.replace(network, bandwidth=network.bandwidth / 2)
  assert seconds(half) * slack >= found
  later = dataclasses.replace(network, latency_s=network.latency_s + 1)
  assert seconds(later) * slack >= found
  one, two, free = (seconds(network, credits=c) for c in (1, 2, None))
  assert one * slack >= two >= free / slack
  assert near(seconds(network, credits=profile.layers), free)


@pytest.mark.parametrize("credits", [1, 2, 3])
def test_credits_bound_the_buffers(credits):
  prompt = Prompt(tokens=4096)
  # Rank 0 is far ahead, if it may.
  lengths = (512, 512, 3072)
  found = schedules.kvr(A100, prompt, lengths, FAST, credits=credits)
  spans = {s.name: s for s in found.timeline.spans}
  for i in range(2):
    for layer in range(credits, A100.layers):
      back = layer - credits
      sent = spans[f"send {i}.{layer}"].start_s
      assert sent >= spans[f"attend {i + 1}.{back}"].end_s
      joined = spans[f"join {i}.{layer}"].start_s
      assert joined >= spans[f"send {i}.{back}"].done_s
  free = schedules.kvr(A100, prompt, lengths, FAST)
  ahead = lambda x: x.timeline.of("rank 0")[-1].end_s
  assert ahead(free) < ahead(found) / 1.5


def test_earlier_ranks_run_ahead_and_gatherers_do_not():
  """A slow last rank delays nobody before it in a chain."""
  prompt = Prompt(tokens=4096)
  chain = schedules.kvr(A100, prompt, (100, 100, 3896), FAST)
  end = lambda x, i: x.timeline.of(f"rank {i}")[-1].end_s
  assert end(chain, 0) < chain.seconds / 5
  gather = schedules.flash_tsp(A100, prompt, 3, FAST)
  assert end(gather, 0) > gather.seconds * 0.9


# ---------------------------------------------------------------------------
# Noise
# ---------------------------------------------------------------------------


def test_noise_is_the_same_each_time():
  factors = Noise(slower=20, seed=5).slowdowns(32, 3)
  assert (factors == Noise(slower=20, seed=5).slowdowns(32, 3)).all()
  assert (factors != Noise(slower=20, seed=6).slowdowns(32, 3)).any()
  assert (np.sort(factors, 1) == [1, 1, 21]).all()
  assert (factors > 1).any(0).all()
  assert Noise().slowdowns(4, 0).shape == (4, 0)


def test_noise_slows_what_waits_for_all():
  prompt = Prompt(tokens=8192)
  noise = Noise(slower=20)
  chain = lambda **more: (
    schedules.kvr(A100, prompt, (2900, 2100, 1700, 1492), FAST, **more).seconds
  )
  gather = lambda **more: schedules.tsp(A100, prompt, 4, FAST, **more).seconds
  worse = gather(noise=noise) / gather() - 1
  assert worse > 0.2
  assert 0 <= chain(noise=noise) / chain() - 1 <= worse / 5


# ---------------------------------------------------------------------------
# Pictures, refusals
# ---------------------------------------------------------------------------


def test_picture(tmp_path):
  prompt = Prompt(tokens=2048)
  found = [
    schedules.tsp(A100, prompt, 2, FAST),
    schedules.kvr(A100, prompt, (1200, 848), FAST),
    schedules.kvr(A100, prompt, (2048,), FAST, name="alone"),
  ]
  path = tmp_path / "ranks.png"
  draw.outcomes(found, str(path), "a title")
  data = path.read_bytes()
  assert data.startswith(b"\x89PNG") and len(data) > 10_000
  with pytest.raises(OptionError, match="nowhere"):
    draw.outcomes(found, str(tmp_path / "nowhere" / "x.png"))


def test_a_record_is_plain(tmp_path):
  import json

  prompt = Prompt(tokens=64)
  found = schedules.kvr(A100, prompt, (40, 24), FAST).record()
  assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
  "wrong",
  [
    lambda p: schedules.kvr(A100, p, (4, 3), FAST),
    lambda p: schedules.kvr(A100, p, (9, 0), FAST),
    lambda p: schedules.kvr(A100, p, (10, -1), FAST),
    lambda p: schedules.kvr(A100, p, (4, 3, 2), FAST, credits=0),
    lambda p: schedules.kvr_seconds(A100, p, [(4, 4)], FAST),
    lambda p: schedules.kvr_seconds(A100, p, (4, 5), FAST),
    lambda p: schedules.kvr_seconds(A100, p, [(4.0, 5.0)], FAST),
    lambda p: schedules.kvr_seconds(A100, p, [(4, 5)], FAST, credits=0),
    lambda p: schedules.tsp(A100, p, 10, FAST),
    lambda p: schedules.tsp(A100, p, 0, FAST),
    lambda p: schedules.ring(A100, p, 3, FAST, layout="zebra"),
    lambda p: schedules.ring(A100, dataclasses.replace(p, window=3), 3, FAST),
    lambda p: Noise(slower=-1.0),
    lambda p: Noise(seed=-1),
  ],
)
def test_refusals(wrong):
  with pytest.raises(OptionError) as caught:
    wrong(Prompt(tokens=9))
  assert len(str(caught.value)) < 400
