"""Streams of weights through a window: predicates, simulation, memory, hops."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.plan.systems import allreduce_hops, layer_window
from ringjax.plan.systems.allreduce_hops import Topology
from ringjax.plan.systems.layer_window import WindowBlock, WindowTimes

# The example of the paper, in milliseconds: 7B on eight devices, a window of 4.
PAPER = WindowTimes(
  attention=11,
  feedforward=17,
  reduce=14,
  load_attention=18,
  load_feedforward=30,
)
MS = st.integers(0, 40)


def blocks(times: WindowTimes, layers: int, retain: int | None = None):
  made = []
  for n in range(1, layers + 1):
    kept = retain is not None and n % retain == 0
    made += [
      WindowBlock(
        name=f"attention {n}",
        nbytes=2,
        load_s=times.load_attention,
        step_s=times.attention,
      ),
      WindowBlock(
        name=f"feedforward {n}",
        nbytes=3,
        load_s=times.load_feedforward,
        step_s=times.feedforward,
        retained=kept,
      ),
    ]
  return made


def run(times, layers, window, *, passes=8, retain=None):
  mine = blocks(times, layers, retain)
  return layer_window.simulate(
    [mine],
    window=window,
    passes=passes,
    reduce_s=[times.reduce] * len(mine),
  )


def is_steady(times, layers, window, retain=None):
  mine = blocks(times, layers, retain)
  return layer_window.steady(
    [one.step_s + times.reduce for one in mine],
    [0 if one.retained else one.load_s for one in mine],
    window,
  )


def test_the_example_of_the_paper():
  assert not layer_window.tight(PAPER)
  assert layer_window.loose(PAPER, 32)
  assert not run(PAPER, 4, 2).steady
  found = run(PAPER, 4, 4)
  assert found.steady and found.token_s == 4 * (11 + 17 + 2 * 14)
  assert found.peak_blocks == (4,)


@pytest.mark.smoke
@settings(max_examples=30, deadline=None)
@given(MS, MS, MS, MS, MS, st.integers(2, 6))
def test_the_simulator_agrees_with_the_predicates(a, f, r, la, lf, window):
  times = WindowTimes(
    attention=a, feedforward=f, reduce=r, load_attention=la, load_feedforward=lf
  )
  found = run(times, 3, window)
  assert found.peak_blocks[0] <= window
  # A block that loads in no time needs no window.
  if la and lf:
    named = layer_window.tight(times) if window == 2 else (
      layer_window.loose(times, 3)
    )  # fmt: skip
    assert found.steady == named == is_steady(times, 3, window)
  if found.steady:
    assert found.token_s == pytest.approx(3 * (a + f + 2 * r))
  else:
    assert found.token_s > 3 * (a + f + 2 * r)


@settings(max_examples=25, deadline=None)
@given(
  st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6
  ),
  st.integers(1, 7),
)
def test_any_blocks_and_any_window(given_blocks, window):
  """The predicate for blocks that all differ, the simulator being the truth."""
  steps, loads = zip(*given_blocks, strict=True)
  mine = [
    WindowBlock(name=f"{i}", nbytes=1, load_s=load, step_s=step)
    for i, (step, load) in enumerate(given_blocks)
  ]
  found = layer_window.simulate(
    [mine], window=window, passes=16, reduce_s=[0] * len(mine)
  )
  assert found.steady == layer_window.steady(steps, loads, window)
  assert found.peak_blocks[0] <= window
  least = layer_window.least_window(steps, loads)
  if least is not None and len(mine) >= window:
    assert found.steady == (window >= least)


def test_retained_blocks():
  """Loads that are too slow by a little: one feedforward of two stays."""
  slow = dataclasses.replace(PAPER, load_feedforward=45)
  assert not layer_window.loose(slow, 4)
  assert layer_window.loose(slow, 4, retain_every=1)
  for retain, layers in ((1, 3), (2, 4), (3, 6)):
    for window in (2, 4, 6):
      found = run(slow, layers, window, retain=retain, passes=12)
      assert found.steady == is_steady(slow, layers, window, retain), (
        retain, window
      )  # fmt: skip
      # They are in memory beside the window.
      assert found.peak_blocks[0] <= window + layers // retain
  assert not run(slow, 4, 8).steady


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(MS, MS, MS, MS, MS, st.integers(1, 4))
def test_loose_conditions_hold_in_the_simulator(a, f, r, la, lf, retain):
  times = WindowTimes(
    attention=a, feedforward=f, reduce=r, load_attention=la, load_feedforward=lf
  )
  layers = 2 * retain
  if layer_window.loose(times, layers, retain):
    assert run(times, layers, 2 * layers, retain=retain, passes=12).steady


def test_devices_wait_for_the_slowest():
  fast = blocks(dataclasses.replace(PAPER, load_feedforward=1), 3)
  slow = blocks(dataclasses.replace(PAPER, load_attention=60), 3)
  both = layer_window.simulate(
    [fast, slow], window=4, passes=6, reduce_s=[14] * 6
  )
  alone = layer_window.simulate([slow], window=4, passes=6, reduce_s=[14] * 6)
  assert both.token_s == alone.token_s == 3 * (60 + 30)
  assert both.waits_s[0] <= 1e-9 < both.waits_s[1]


def test_the_prompt_counts_in_the_first_pass():
  one = WindowBlock(name="x", nbytes=1, load_s=0, step_s=2, first_s=50)
  found = layer_window.simulate([[one]], window=1, passes=3, reduce_s=[1])
  assert found.first_s == 51 and found.token_s == 3 and found.seconds == 57


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", range(1, 7))
@pytest.mark.parametrize("sizes", [(3, 7), (5, 5), (9, 4)])
def test_memory_against_counted_blocks(window, sizes):
  attention, feedforward = sizes
  layers, embedding, head = 6, 40, 41
  worker = [attention, feedforward] * layers
  counted = layer_window.window_numbers(worker, window)
  assert counted == layer_window.worker_numbers(*sizes, window)
  master = [embedding, *worker, head]
  counted = layer_window.window_numbers(master, window)
  got = layer_window.master_numbers(*sizes, embedding, head, window)
  if attention <= feedforward:
    assert counted == got
  else:
    # The formula takes the larger kind at both ends, which is no row of blocks.
    assert counted <= got


@pytest.mark.parametrize("window", range(1, 7))
def test_memory_of_the_simulator(window):
  """A loader that is fast fills the window with the largest row of blocks."""
  times = dataclasses.replace(PAPER, load_attention=1, load_feedforward=1)
  found = run(times, 5, window)
  sizes = [one.nbytes for one in blocks(times, 5)]
  assert found.peak_blocks == (window,)
  assert found.peak_bytes == (layer_window.window_numbers(sizes, window),)


# ---------------------------------------------------------------------------
# Hops
# ---------------------------------------------------------------------------


def test_link_latencies_of_an_all_reduce():
  graph = Topology.behind_switches(8)
  got = [
    allreduce_hops.chain_s(graph, name) for name in ("star", "tree", "ring")
  ]
  assert got == [8, 16, 56]
  slow = Topology.behind_switches(8, 1e-3)
  # Half a millisecond each of data, and a barrier.
  nbytes, bandwidth = 1250, 2.5e6
  found = allreduce_hops.allreduce_s(
    slow, "star", nbytes, bandwidth, barrier_s=1e-4
  )
  assert found == pytest.approx(8e-3 + 2 * 5e-4 + 1e-4)
  assert allreduce_hops.allreduce_s(
    slow, "ring", nbytes, bandwidth
  ) == pytest.approx(56e-3 + 14 / 8 * 5e-4)
  one = Topology.behind_switches(1)
  assert allreduce_hops.allreduce_s(one, "ring", 8, 1.0) == 0.0


def test_any_graph_against_all_paths():
  """Shortest paths by Floyd and Warshall, and each chain written out."""
  rng = np.random.default_rng(3)
  for _ in range(20):
    size, devices = 9, 5
    far = np.full((size, size), np.inf)
    np.fill_diagonal(far, 0.0)
    links = []
    for i in range(1, size):
      pairs = {
        (int(rng.integers(i)), i),
        tuple(sorted(rng.integers(0, size, 2))),
      }
      for a, b in pairs:
        if a != b:
          s = int(rng.integers(1, 9))
          links.append((f"n{a}", f"n{b}", s))
          far[a, b] = far[b, a] = min(far[a, b], s)
    for k in range(size):
      far = np.minimum(far, far[:, k : k + 1] + far[k : k + 1])
    graph = Topology(tuple(f"n{i}" for i in range(devices)), tuple(links))
    star, tree, ring = (
      allreduce_hops.chain_s(graph, name) for name in allreduce_hops.REDUCES
    )
    assert star == 2 * far[0, :devices].max()
    assert ring == 8 * max(far[i, (i + 1) % devices] for i in range(devices))
    # Groups of 3: 0 1 2, and 3 4 under 3.
    paths = [far[0, 1], far[0, 2], far[0, 3], far[3, 4] + far[0, 3]]
    assert tree == 2 * max(paths)
    line = {"n1": "n0", "n2": "n1", "n3": "n2", "n4": "n3"}
    got = allreduce_hops.chain_s(graph, "tree", parents=line)
    assert got == 2 * sum(far[i, i + 1] for i in range(4))


def test_a_graph_in_a_file(tmp_path):
  path = tmp_path / "graph.json"
  body = {"format": "ringjax.topology", "version": 1, "devices": ["a", "b"],
          "links": [["a", "s", 0.5], ["s", "b", 1]]}  # fmt: skip
  path.write_text(json.dumps(body))
  assert allreduce_hops.chain_s(Topology.load(str(path)), "star") == 3.0
  path.write_text(json.dumps({**body, "links": 3}))
  with pytest.raises(CheckpointFormatError, match="devices and links"):
    Topology.load(str(path))


def test_refusals():
  with pytest.raises(OptionError, match="reach each other"):
    Topology(("a", "b"), (("a", "s", 1),))
  graph = Topology.behind_switches(3)
  with pytest.raises(OptionError, match="reduce"):
    allreduce_hops.chain_s(graph, "mesh")
  with pytest.raises(OptionError, match="tree"):
    allreduce_hops.chain_s(graph, "tree", parents={"d1": "d2", "d2": "d1"})
  one = WindowBlock(name="x", nbytes=1, load_s=1, step_s=1)
  with pytest.raises(OptionError, match="same number"):
    layer_window.simulate([[one], []], window=2, passes=1, reduce_s=[0])
  with pytest.raises(OptionError, match="window"):
    layer_window.simulate([[one]], window=0, passes=1, reduce_s=[0])
  with pytest.raises(OptionError, match="loads"):
    layer_window.steady([1, 2], [1], 2)
