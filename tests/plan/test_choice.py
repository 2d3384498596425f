"""The choice between a ring and a chain, against the schedules themselves."""

from __future__ import annotations

import dataclasses

import pytest

from ringjax import plan
from ringjax.errors import OptionError
from ringjax.plan import Cluster, Link, Noise, Prompt
from ringjax.plan.kv_runahead import schedules

PROFILE = plan.profile("llama7b-a100")
FAST, SLOW = Link(bandwidth=300e9), Link(bandwidth=2e9)


def choose(network: Link, tokens: int = 16384, **more):
  noise = more.pop("noise", None)
  machine = Cluster(profile=PROFILE, network=network, noise=noise)
  window = more.pop("window", None)
  prompt = Prompt(tokens=tokens, window=window)
  return plan.choose(machine, prompt, more.pop("ranks", 4), **more)


def test_fast_links_are_a_ring_s():
  found = choose(FAST)
  assert found.way.method == "striped"
  assert {way.method for way in found.ways} == {"striped", "gather", "kvr"}
  assert found.way.lengths == (4096,) * 4


def test_slow_links_are_a_chain_s():
  found = choose(SLOW)
  assert found.way.method == "kvr"
  ring = schedules.ring(PROFILE, Prompt(tokens=16384), 4, SLOW)
  chain = schedules.kvr(PROFILE, Prompt(tokens=16384), found.way.lengths, SLOW)
  ways = {way.method: way for way in found.ways}
  assert ways["striped"].seconds == pytest.approx(ring.seconds)
  assert found.way.seconds == pytest.approx(float(chain.seconds))
  assert chain.seconds < 0.95 * ring.seconds


@pytest.mark.slow
def test_noisy_links_are_a_chain_s():
  # At this speed the quiet links are the ring's and the noisy ones are not.
  network = Link(bandwidth=40e9)
  assert choose(network).way.method == "striped"
  found = choose(network, noise=Noise(slower=100.0))
  assert found.way.method == "kvr"
  assert any("101 times slower" in text for text in found.why)


def test_decoding_on_one_rank_is_a_chain_s():
  network = Link(bandwidth=10e9)
  assert choose(network).way.method == "striped"
  found = choose(network, keep="last")
  assert found.way.method == "kvr"
  ring = next(way for way in found.ways if way.method == "striped")
  moved = 3 / 4 * 16384 * PROFILE.kv_bytes * PROFILE.layers / 10e9
  assert ring.collect_s == pytest.approx(moved)
  assert found.way.collect_s == 0.0


def test_a_gain_has_to_be_worth_it():
  gain = choose(SLOW)
  best = min(w.seconds for w in gain.ways if w.method != "kvr")
  part = 1 - gain.way.seconds / best
  assert choose(SLOW, least_gain=part + 0.01).way.method != "kvr"
  assert choose(SLOW, least_gain=part - 0.01).way.method == "kvr"


def test_tiny_prompts_and_windows():
  found = choose(SLOW, tokens=600, tile=128)
  assert "kvr" not in {way.method for way in found.ways}
  assert "600 tokens" in " ".join(found.why)
  found = choose(SLOW, tokens=3)
  assert found.way.method == "kvr" and len(found.way.lengths) == 3
  found = choose(FAST, window=1024)
  assert {way.method for way in found.ways} == {"gather", "kvr"}


def test_one_rank():
  found = choose(SLOW, ranks=1, keep="last")
  assert found.way.lengths == (16384,)
  # Nothing is sent, whatever the way; masked tiles are left out.
  least = schedules.ring(PROFILE, Prompt(tokens=16384), 1, SLOW).seconds
  assert found.way.seconds == pytest.approx(least)
  assert found.why[-1] == "one rank reads all; nothing is sent"


def test_reasons_name_every_way_and_its_time():
  found = choose(SLOW)
  for way in found.ways:
    line = next(text for text in found.why if text.startswith(way.method))
    assert f"{way.first_s:.4g} s" in line


@pytest.mark.slow
def test_same_noise_same_choice():
  noise = Noise(slower=20.0, seed=3)
  one, two = choose(SLOW, noise=noise), choose(SLOW, noise=noise)
  assert one == two
  other = choose(SLOW, noise=dataclasses.replace(noise, seed=100))
  assert other.way.first_s != one.way.first_s


@pytest.mark.parametrize(
  "wrong", [{"keep": "first"}, {"least_gain": 2.0}, {"ranks": 0}, {"tile": 0}]
)
def test_wrong_numbers(wrong):
  with pytest.raises(OptionError, match=next(iter(wrong))):
    choose(FAST, **wrong)
