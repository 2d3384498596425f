"""The model of costs: what it counts, what it ranks, what it explains."""

from __future__ import annotations

import dataclasses
import functools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.ops.attention.cost import cost_terms, pair_counts, select
from ringjax.ops.attention.cost.call_shape import CallShape, Prediction
from ringjax.ops.attention.strategies import registry
from ringjax.parallel import chips
from ringjax.parallel.chips import Link, Machine
from ringjax.parallel.layout import Dealt
from tests.ops.attention import simulate

LAYOUTS = (rj.Contiguous(), rj.Striped(), rj.Zigzag())
CAUSAL = rj.Causal()


def call_of(size, tokens, **options):
  given = dict(batch=1, queries=tokens, keys=tokens, heads=8, kv_heads=8,
               head_dim=64, axes=(("seq", size),), mask=CAUSAL)  # fmt: skip
  return CallShape(**(given | options))


def machine_of(**options):
  chip = chips.Chip(
    name="plain",
    flops={"bfloat16": 1e14},
    hbm_bytes=1e11,
    hbm_bandwidth=1e12,
    source="made up",
  )
  given = dict(
    name="plain",
    chip=chip,
    links=Link(bandwidth=1e11, latency_s=1e-6),
    efficiency={"blockwise": (0.5, 0.5), "kernel": (0.5, 0.5)},
    memory_share=1.0,
  )
  return Machine(**(given | options))


# ---------------------------------------------------------------------------
# Links and chips
# ---------------------------------------------------------------------------


@pytest.mark.smoke
def test_gathers_and_exchanges_in_closed_form():
  ring = Link(bandwidth=1e9, ports=2)
  assert ring.gather_s(7e9, 8) == pytest.approx(3.5)
  # Distances 1, 1, 2, 2, 3, 3, 4 over two links.
  assert ring.exchange_s(7e9, 8) == pytest.approx(8.0)
  assert ring.exchange_s(2e9, 3) == pytest.approx(1.0)
  # A part of a ring does not close: its end has one link, its middle carries
  # 2 x 2 pairs.
  assert ring.gather_s(3e9, 4, wraps=False) == pytest.approx(3.0)
  assert ring.exchange_s(3e9, 4, wraps=False) == pytest.approx(4.0)
  torus = dataclasses.replace(ring, ports=6)
  assert torus.gather_s(63e9, 64) == pytest.approx(63 / 6)
  assert torus.exchange_s(63e9, 64) == pytest.approx(32.0)
  switch = dataclasses.replace(ring, ports=1)
  assert switch.gather_s(7e9, 8) == switch.exchange_s(7e9, 8) == 7.0
  half = dataclasses.replace(ring, duplex=False)
  assert half.gather_s(7e9, 8) == pytest.approx(7.0)
  assert (ring.both_s(1.0, 2.0), half.both_s(1.0, 2.0)) == (2.0, 3.0)
  assert switch.both_s(1.0, 2.0) == 3.0
  assert ring.far(7, 8) == 1.0 and ring.far(4, 8) == 4.0
  assert torus.far(8, 64) == pytest.approx(2.0) and switch.far(4, 8) == 1.0


def test_every_stated_machine_has_sources_and_figures_that_can_be():
  assert {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x", "a100", "h100",
          "h200", "b200", "gb200", "cpu"} <= set(chips.MACHINES)  # fmt: skip
  for name, machine in chips.MACHINES.items():
    assert machine.name == name == machine.chip.name
    assert machine.source and machine.chip.source
    assert machine.chip.rate("float32") <= machine.chip.rate("bfloat16")
    assert machine.chip.rate("float64") < machine.chip.rate("float32")
    for link in (machine.link("seq"), machine.between):
      assert link is None or link.bandwidth < machine.chip.hbm_bandwidth


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("TPU v4", "tpu-v4"),
    ("TPU v5 lite", "tpu-v5e"),
    ("TPU v5", "tpu-v5p"),
    ("TPU v5p", "tpu-v5p"),
    ("TPU v6 lite", "tpu-v6e"),
    ("TPU7x", "tpu-7x"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("cpu", "cpu"),
    ("TPU v4 lite", None),
    ("Radeon", None),
  ],
)
def test_device_kinds(kind, name):
  assert chips.machine_name(kind) == name


def test_an_unknown_device_is_like_one_that_is_known():
  found = chips.machine_of("NVIDIA Q900", "gpu")
  assert found.chip == chips.CHIPS["a100"] and "Q900" in found.source
  with pytest.raises(rj.OptionError, match="machine"):
    chips.machine("NVIDIA Q900")


@pytest.mark.parametrize(
  "make",
  [
    lambda: Link(bandwidth=0),
    lambda: Link(bandwidth=1e9, latency_s=-1),
    lambda: Link(bandwidth=1e9, ports=3),
    lambda: machine_of(links={}),
    lambda: machine_of(links={"seq": 3}),
    lambda: machine_of(efficiency={"blockwise": (0.5, 1.5)}),
    lambda: machine_of(efficiency={"magic": (0.5, 0.5)}),
    lambda: machine_of(island=8),
    lambda: machine_of(memory_share=2.0),
    lambda: machine_of(links={"x": Link(bandwidth=1e9)}).link("seq"),
    lambda: machine_of(efficiency={"kernel": (0.5, 0.5)}).part("blockwise"),
    lambda: call_of(4, 64, heads=3, kv_heads=2),
    lambda: call_of(4, 64, axes=()),
    lambda: call_of(4, 64, axes=(("a", 2), ("a", 2))),
    lambda: call_of(4, 64, wire="int3"),
    lambda: call_of(4, 64, offset=-1),
    lambda: call_of(4, 64, mask=np.ones((64, 64), bool)),
    lambda: call_of(4, 64, dtype="text"),
    lambda: call_of(4, 64, local="magic"),
    lambda: select.candidates(call_of(4, 64), ("magic",)),
    lambda: registry.predict("magic", call_of(4, 64), machine_of(), LAYOUTS[0]),
    lambda: registry.predict(
      "hybrid", call_of(4, 64), machine_of(), LAYOUTS[0]
    ),
    lambda: registry.predict(
      "ulysses", call_of(4, 64), machine_of(), LAYOUTS[0], wire="int8"
    ),
  ],
)
def test_what_is_refused(make):
  with pytest.raises(rj.OptionError):
    make()


# ---------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------

MASKS = (
  CAUSAL,
  CAUSAL & rj.Window(100),
  CAUSAL | rj.Prefix(70),
  rj.Window(40, 30) & rj.Everything(),
  CAUSAL & rj.Chunked(64),
)


@pytest.mark.parametrize("layout", [*LAYOUTS, rj.Striped(8)], ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_tiles_are_those_of_the_loops(layout, mask):
  size, length, block = 4, 256, 16
  want = rj.tile_counts(layout, mask, size, length, block, block)
  found = pair_counts.pairs(
    layout, mask, size, (length, length), (block, block)
  )
  shard = np.arange(size)
  by_hop = found[shard, (shard - shard[:, None]) % size]
  np.testing.assert_array_equal(by_hop, want * block**2)


def test_tiles_of_uneven_shards_and_padding():
  layout = rj.Uneven((80, 64, 48, 48))
  want = rj.tile_counts(layout, CAUSAL, 4, 240, 16, 16)
  found = pair_counts.pairs(layout, CAUSAL, 4, (240, 240), (16, 16))
  shard = np.arange(4)
  by_hop = found[shard, (shard - shard[:, None]) % 4]
  np.testing.assert_array_equal(by_hop, want * 256)
  for layout in LAYOUTS:
    want = rj.tile_counts(layout, CAUSAL, 4, 230, 16, 16)
    found = pair_counts.pairs(layout, CAUSAL, 4, (230, 230), (16, 16))
    by_hop = found[shard, (shard - shard[:, None]) % 4]
    np.testing.assert_array_equal(by_hop, want * 256)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_positions_are_the_layouts(layout):
  for shard in range(3):
    np.testing.assert_array_equal(
      layout.position_of(shard, np.arange(8), 3, 8),
      layout.positions(shard, 3, 8),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_hundred_million_tokens_over_a_thousand_devices(layout):
  size, length = 1024, 100_000_768
  found = pair_counts.pairs(layout, CAUSAL, size, (length, length), (512, 256))
  assert found.shape == (size, size)
  # Half of all pairs, and up to a tile's width along the diagonal; groups of
  # shards that stand for each other blur it.
  assert found.sum() / length**2 == pytest.approx(0.5, rel=0.02)


def test_a_long_window_is_not_lost_between_shards():
  length, size = 1 << 20, 16
  mask = CAUSAL & rj.Window(4096)
  for layout in LAYOUTS:
    found = pair_counts.pairs(layout, mask, size, (length, length), (512, 256))
    seen = length * 4096
    assert seen <= found.sum() < (3 if layout == rj.Striped() else 1.3) * seen


def test_reach_is_the_layouts():
  for layout in (*LAYOUTS, rj.Striped(4)):
    for reach in ((5, 0), (40, 3), (200, 200)):
      np.testing.assert_array_equal(
        Dealt.reachable(layout, 8, 512, 512, *reach),
        layout.reachable(8, 512, 512, *reach),
      )
  assert rj.Striped().reachable(64, 64 << 22, 64 << 22, 9, 0).sum() == 10


def test_a_mask_that_is_traced_counts_as_far_as_it_is_known():
  @jax.jit
  def f(length):
    mask = CAUSAL | rj.Prefix(length)
    found = pair_counts.pairs(LAYOUTS[0], mask, 2, (64, 64), (16, 16))
    window = pair_counts.pairs(LAYOUTS[0], CAUSAL, 2, (64, 64), (16, 16))
    return jnp.asarray([found.sum(), window.sum()])

  whole, causal = f(jnp.int32(3))
  assert whole == 64 * 64 and causal < whole


# ---------------------------------------------------------------------------
# Against a simulation
# ---------------------------------------------------------------------------


@functools.cache
def _tiles(layout, mask, size, t, blocks):
  order = layout.padded_order(size * t, size).reshape(size, t)
  found = np.zeros((size, size, -(-t // blocks[0]), -(-t // blocks[1])), bool)
  for i in range(size):
    for j in range(size):
      p = order[i][:, None] - order[j][None]
      allowed = np.ones_like(p, bool)
      if mask == "causal":
        allowed = p >= 0
      elif mask != "full":
        allowed = (p >= 0) & (p < mask)
      cut = allowed.reshape(found.shape[2], blocks[0], -1, blocks[1])
      found[i, j] = cut.any((1, 3))
  return found


def _draw(rng):
  """A machine and a call, drawn at random: (World, machine, call, mask)."""
  size = rng.choice((2, 3, 4, 5, 6, 8))
  t = rng.choice((256, 512, 1024) if size <= 4 else (256, 512))
  layout = rng.choice(LAYOUTS)
  mask = rng.choice(("causal", "causal", "full", t // 2, t + t // 2))
  kv_heads = rng.choice((1, 2, 8, 16))
  heads = kv_heads * rng.choice((1, 2, 4))
  peak = 10 ** rng.uniform(11, 14)
  switch, duplex = rng.random() < 0.4, rng.random() < 0.8
  link = Link(
    bandwidth=10 ** rng.uniform(8.5, 11.5),
    latency_s=10 ** rng.uniform(-6.5, -4.5),
    duplex=duplex or switch,
    ports=1 if switch else 2,
  )
  memory = 10 ** rng.uniform(11, 12.5)
  machine = Machine(
    name="drawn",
    chip=chips.Chip(
      name="drawn",
      flops={"bfloat16": peak},
      hbm_bytes=1e15,
      hbm_bandwidth=memory,
      source="drawn",
    ),
    links=link,
    efficiency={"blockwise": (rng.uniform(0.2, 0.7), rng.uniform(0.2, 0.7))},
    hop_s=10 ** rng.uniform(-6, -4.5),
    call_s=1e-5,
  )
  masks = {"causal": CAUSAL, "full": rj.Everything()}
  call = call_of(
    size, size * t, batch=rng.choice((1, 2)), heads=heads, kv_heads=kv_heads,
    head_dim=rng.choice((64, 128)), layout=layout,
    mask=masks.get(mask) or CAUSAL & rj.Window(mask),
  )  # fmt: skip
  blocks = cost_terms.tile_blocks(call, t, t)
  world = simulate.World(
    size=size,
    t=t,
    batch=call.batch,
    heads=heads,
    kv_heads=kv_heads,
    dim=call.head_dim,
    number=2,
    rates=tuple(peak * part for part in machine.part("blockwise")),
    memory=memory,
    hop_s=machine.hop_s,
    call_s=machine.call_s,
    bandwidth=link.bandwidth,
    latency=link.latency_s,
    duplex=link.duplex,
    switch=switch,
    tiles=_tiles(layout, mask, size, t, blocks),
    blocks=blocks,
  )
  return world, machine, call, mask


def _simulated(world, call, mask):
  """Seconds of both passes, by strategy and inner."""
  whole = mask in ("causal", "full")
  both = lambda f, *args: sum(f(world, b, *args) for b in (False, True))
  found = {
    ("gather", None): both(simulate.gather, "gather"),
    ("ring_q", None): both(simulate.ring, "ring_q"),
  }
  n = world.size
  if whole:
    found["ring", None] = both(simulate.ring, "ring")
    if n > 2:
      found["bidirectional", None] = both(simulate.ring, "bidirectional")
    if mask == "causal" and call.layout == rj.Contiguous():
      found["chain", None] = both(simulate.ring, "chain")
  elif call.layout == rj.Contiguous() and n > 2:
    found["halo", None] = both(simulate.halo, mask - 1)
  for inner in range(2, n + 1):
    # Uneven heads are padded, which is tested by itself.
    if n % inner == 0 and world.kv_heads % inner == 0:
      if inner == n:
        found["ulysses", None] = both(simulate.traded, n)
      elif whole:
        found["hybrid", inner] = both(simulate.traded, inner)
  return found


def _compare(seeds):
  close, right, apart = [], [], []
  for seed in seeds:
    world, machine, call, mask = _draw(random.Random(seed))
    simulated = _simulated(world, call, mask)
    predicted = {
      (name, inner): registry.predict(
        name, call, machine, call.layout, inner=inner
      ).seconds
      for name, inner in simulated
    }
    for which, seconds in simulated.items():
      off = predicted[which] / seconds - 1
      close.append(abs(off) <= 0.1)
      if abs(off) > 0.1:
        apart.append((seed, which, round(off, 3)))
    chosen = min(predicted, key=predicted.get)
    right.append(simulated[chosen] <= 1.05 * min(simulated.values()))
  return np.mean(close), np.mean(right), apart


def test_predictions_and_choices_against_a_simulation():
  close, right, apart = _compare(range(60))
  assert right >= 0.95, apart
  assert close >= 0.95, apart


@pytest.mark.slow
def test_predictions_and_choices_against_many_simulations():
  close, right, apart = _compare(range(1000, 1600))
  assert right >= 0.95, apart
  assert close >= 0.95, apart


# ---------------------------------------------------------------------------
# What follows from the model
# ---------------------------------------------------------------------------


def seconds(strategy, call, machine, layout=LAYOUTS[0], **options):
  found = registry.predict(strategy, call, machine, layout, **options)
  assert isinstance(found, Prediction), found
  return found.seconds


def test_bytes_and_sends_of_a_ring_are_those_of_its_law():
  size, tokens, call = 4, 1024, call_of(4, 1024, heads=4, kv_heads=2)
  kv = 2 * (tokens // size) * 2 * 64
  found = registry.predict("ring", call, machine_of(), LAYOUTS[0])
  # K and V in bfloat16, 3 times each pass; float32 sums 4 times.
  assert found.bytes_by_link == {"seq": 2 * 3 * kv * 2 + 4 * kv * 4}
  assert found.sends == 2 * 3 + 4
  forward = dataclasses.replace(call, backward=False)
  found = registry.predict("ring", forward, machine_of(), LAYOUTS[0])
  assert (found.sends, found.backward_s) == (3, 0.0)
  cut = dataclasses.replace(forward, mask=CAUSAL & rj.Window(200))
  found = registry.predict("ring", cut, machine_of(), LAYOUTS[0])
  assert found.sends == 1 and found.notes == ("1 hop",)
  coded = registry.predict(
    "ring", forward, machine_of(), LAYOUTS[0], wire="int8"
  )
  assert coded.bytes_by_link["seq"] == pytest.approx(3 * kv * 17 / 16)
  chain = registry.predict("chain", call, machine_of(), LAYOUTS[0])
  assert chain.sends == 2 * 3 + 4


def test_layouts_are_told_apart_where_the_mask_makes_them_differ():
  # Links that hide behind the tiles.
  machine = machine_of(links=Link(bandwidth=1e13))
  causal = call_of(8, 1 << 16)
  contiguous, striped, zigzag = (
    seconds("ring", causal, machine, layout) for layout in LAYOUTS
  )
  # 7.5 hops' worth of tiles against 4, and the diagonals of striped hops.
  assert contiguous / zigzag == pytest.approx(7.5 / 4, rel=0.04)
  assert zigzag < striped < 1.1 * zigzag
  # Heads are dealt out, not tokens: no layout helps.
  ulysses = [seconds("ulysses", causal, machine, at) for at in LAYOUTS]
  assert max(ulysses) < 1.1 * min(ulysses)
  full = dataclasses.replace(causal, mask=rj.Everything())
  rings = [seconds("ring", full, machine, layout) for layout in LAYOUTS]
  assert max(rings) == pytest.approx(min(rings))


def test_few_queries_over_a_long_cache_move_instead_of_the_keys():
  machine = machine_of(links=Link(bandwidth=1e10))
  call = call_of(8, 1 << 18, queries=1 << 10, offset=(1 << 18) - (1 << 10),
                 backward=False)  # fmt: skip
  assert seconds("ring_q", call, machine) < 0.1 * seconds("ring", call, machine)
  even = call_of(8, 1 << 16, heads=32, kv_heads=4, backward=False)
  assert seconds("ring_q", even, machine) > seconds("ring", even, machine)


def test_both_neighbours_help_where_they_are_two_ways():
  call = call_of(8, 4096, mask=rj.Everything(), backward=False)
  slow = lambda **options: machine_of(links=Link(bandwidth=1e9, **options))
  ratio = lambda machine: (
    seconds("bidirectional", call, machine) / seconds("ring", call, machine)
  )
  assert ratio(slow()) == pytest.approx(4 / 7, rel=0.05)
  assert ratio(slow(ports=1)) > 0.99
  assert ratio(slow(duplex=False)) > 0.99


def test_heads_that_do_not_divide_cost_what_they_are_padded_by():
  machine = machine_of(links=Link(bandwidth=1e15))
  even = call_of(8, 1 << 14, heads=8, kv_heads=8)
  odd = call_of(8, 1 << 14, heads=9, kv_heads=9)
  found = registry.predict("ulysses", odd, machine, LAYOUTS[0])
  assert found.notes == ("9 query heads are padded to 16 (2 a device)",)
  assert found.seconds == pytest.approx(
    2 * seconds("ulysses", even, machine), rel=0.01
  )


def test_groups_use_the_fast_links_where_links_differ():
  machine = machine_of(
    links={"slow": Link(bandwidth=1e9), "fast": Link(bandwidth=1e12)}
  )
  call = call_of(32, 1 << 15, axes=(("slow", 4), ("fast", 8)),
                 layout=rj.Striped())  # fmt: skip
  found = select.rank(call, machine)
  hybrid, two, ring = (
    found.of("hybrid", inner=8),
    found.of("two_level", inner=8),
    found.of("ring"),
  )
  # Of 31 hops 28 stay inside the groups; a ring waits for the slow links.
  assert max(two.seconds, hybrid.seconds) < 0.2 * ring.seconds
  assert hybrid.bytes_by_link["slow"] < ring.bytes_by_link["slow"] / 8
  # The same, of one axis whose first eight devices share a node.
  island = machine_of(
    links=Link(bandwidth=1e12, ports=1),
    island=8,
    between=Link(bandwidth=1e9, ports=1),
  )
  one = dataclasses.replace(call, axes=(("seq", 32),))
  found = select.rank(one, island)
  assert found.of("two_level", inner=8).seconds < 0.2 * (
    found.of("ring").seconds
  )
  assert found.best.options.get("inner") in (8, 4, 2) or (
    found.best.strategy in ("gather", "ulysses")
  )


def test_documents_cut_the_ring_at_the_longest():
  mask = CAUSAL & rj.SameSegment()
  call = call_of(8, 1 << 13, mask=mask)
  whole = registry.predict("documents", call, machine_of(), LAYOUTS[0])
  assert whole.seconds == seconds("ring", call, machine_of())
  assert "not known" in whole.notes[0]
  call = dataclasses.replace(call, longest_document=1000)
  cut = registry.predict("documents", call, machine_of(), LAYOUTS[0])
  assert cut.notes == ("1 hop",) and cut.seconds < 0.5 * whole.seconds
  plain = registry.predict(
    "documents", call_of(8, 512), machine_of(), LAYOUTS[0]
  )
  assert "documents" in plain.reason
  striped = registry.predict("documents", call, machine_of(), rj.Striped())
  assert "all shards" in striped.reason


@pytest.mark.parametrize(
  ("strategy", "change", "layout", "words"),
  [
    ("halo", {}, LAYOUTS[0], "no limit"),
    ("halo", {"mask": CAUSAL & rj.Window(9)}, LAYOUTS[1], "neighbours"),
    ("halo", {"mask": rj.Window(4096)}, LAYOUTS[0], "around"),
    ("chain", {"mask": rj.Everything()}, LAYOUTS[0], "later keys"),
    ("chain", {}, LAYOUTS[2], "earlier tokens"),
    ("chain", {"queries": 64, "offset": 448}, LAYOUTS[0], "not the same"),
    ("bidirectional", {"axes": (("seq", 2),)}, LAYOUTS[0], "one neighbour"),
  ],
)
def test_reasons(strategy, change, layout, words):
  call = dataclasses.replace(call_of(8, 512), **change)
  found = registry.predict(strategy, call, machine_of(), layout)
  assert words in found.reason


def test_what_does_not_fit_is_declined_with_its_numbers():
  chip = dataclasses.replace(machine_of().chip, hbm_bytes=1e9)
  tight = machine_of(chip=chip, memory_share=0.45)
  call = call_of(64, 1 << 20, kv_heads=8, layout=rj.Zigzag())
  found = select.rank(call, tight)
  gather = next(r for r in found.refusals if r.strategy == "gather")
  assert "GB a device" in gather.reason and "450 MB" in gather.reason
  assert found.of("ring").memory_bytes < 4.5e8
  with pytest.raises(rj.OptionError, match="needs"):
    found.of("gather")
  with pytest.raises(rj.OptionError, match="more devices"):
    _ = select.rank(call, machine_of(chip=chip, memory_share=1e-6)).best


# ---------------------------------------------------------------------------
# What users call
# ---------------------------------------------------------------------------


@pytest.mark.smoke
def test_explaining_needs_no_device(capsys):
  found = select.explain(
    (1, 1 << 20, 32, 128), (1, 1 << 20, 8, 128), shards=64, is_causal=True,
    machine="tpu-v5p",
  )  # fmt: skip
  text = str(found)
  assert text.startswith("1,048,576 tokens") and "64 (seq) tpu-v5p" in text
  assert "best for it" in text and "declined" in text and "halo: " in text
  assert found.call.local == "kernel"
  assert capsys.readouterr().out == text + "\n"
  select.explain((1, 64, 2, 8), (1, 64, 2, 8), shards=2, machine="cpu",
                 show=False)  # fmt: skip
  assert capsys.readouterr().out == ""
  record = json.loads(json.dumps(found.record()))
  assert record["predictions"][0]["strategy"] == found.best.strategy
  times = [one.seconds for one in found.predictions]
  assert times == sorted(times)
  assert {one.layout for one in found.predictions} == set(LAYOUTS)


def test_lossy_codes_are_shown_when_asked_for_and_never_else():
  shapes = (1, 1 << 14, 8, 64), (1, 1 << 14, 8, 64)
  plan = functools.partial(
    select.explain, *shapes, shards=8, machine=machine_of(), is_causal=True
  )
  assert all("wire" not in one.options for one in plan().predictions)
  asked = plan(wire="int8")
  coded = asked.of("ring", wire="int8")
  assert "codes lose digits" in coded.notes and "ring, int8" in str(asked)
  assert coded.bytes_by_link["seq"] < asked.of("ring").bytes_by_link["seq"]


def test_explaining_reads_meshes_and_shardings():
  mesh = rj.make_mesh((2, 4), ("data", "seq"))
  sharding = NamedSharding(mesh, P("data", "seq"))
  arg = lambda heads: jax.ShapeDtypeStruct(
    (4, 512, heads, 16), jnp.float32, sharding=sharding
  )
  found = select.explain(arg(4), arg(2), is_causal=True)
  assert found.call.axes == (("seq", 4),) and found.call.batch == 2
  assert found.call.dtype == "float32" and found.machine.name == "cpu"
  assert found.call.local == "blockwise"
  with jax.set_mesh(mesh):
    inside = select.explain((4, 512, 4, 16), (4, 512, 2, 16))
  assert inside.call.axes == (("seq", 4),) and inside.call.batch == 4
  both = select.explain(
    (4, 512, 4, 16), (4, 512, 2, 16), mesh=mesh, axis=("data", "seq")
  )
  assert both.call.axes == (("data", 2), ("seq", 4))
  array = jax.device_put(jnp.zeros((4, 512, 2, 16)), sharding)
  assert select.explain(array, array).call.batch == 2
  named = select.explain(
    (4, 512, 4, 16), (4, 512, 2, 16), shards={"outer": 2, "inner": 2}
  )
  assert named.call.axes == (("outer", 2), ("inner", 2))


@pytest.mark.parametrize(
  ("change", "error"),
  [
    ({"key": (1, 64, 3, 16)}, rj.OptionError),
    ({"key": (1, 64, 2, 8)}, rj.ShapeError),
    ({"value": (1, 32, 2, 8)}, rj.ShapeError),
    ({"query": (64, 16)}, rj.ShapeError),
    ({"query": "text"}, rj.InputTypeError),
    ({"shards": None}, rj.MeshError),
    ({"shards": 0}, rj.OptionError),
    ({"mask": np.ones((64, 64), bool)}, rj.InputTypeError),
    ({"machine": "abacus"}, rj.OptionError),
    ({"machine": 3}, rj.InputTypeError),
    ({"wire": "int3"}, rj.OptionError),
    ({"local": "magic"}, rj.OptionError),
  ],
)
def test_explaining_refuses(change, error):
  given = dict(query=(1, 64, 4, 16), key=(1, 64, 2, 16), shards=4,
               machine="cpu")  # fmt: skip
  with pytest.raises(error):
    select.explain(**(given | change))


def test_the_choice_is_the_same_under_a_trace():
  auto = select.Auto(machine=machine_of())
  call = call_of(8, 4096)
  outside = auto.choose(call)

  @jax.jit
  def f(x):
    assert auto.choose(call) == outside
    return x

  f(jnp.zeros(()))
  name, options = outside
  assert name in registry.STRATEGIES and options["q_block"] == 128
  # What may be chosen can be limited, and one device moves nothing.
  limited = select.Auto(machine=machine_of(), among=("ring", "chain"))
  assert limited.choose(call)[0] in ("ring", "chain")
  alone = select.Auto(machine="cpu").choose(call_of(1, 512))
  assert alone[0] == "ring"
  forward = select.Auto(machine=machine_of(), backward=False)
  assert forward.explain(call).best.backward_s == 0.0


def test_a_choice_for_the_devices_at_hand():
  mesh = rj.make_mesh((8,), ("seq",))
  found = select.Auto().explain(call_of(8, 512, dtype="float32"), mesh)
  assert found.machine == chips.MACHINES["cpu"]


@pytest.mark.parametrize(
  ("machine", "options", "words"),
  [
    ("tpu-v5e", {"dtype": "float16"}, "FlashTPU: float16"),
    ("tpu-v5e", {"dim": 512}, "FlashTPU: heads of 512"),
    ("tpu-v5e", {"tokens": 512}, "FlashTPU: 64 queries"),
    ("tpu-v4", {}, "FlashTPU: the vector memory"),
    ("h100", {"mask": rj.Window(64)}, "CuDNN: the mask"),
    ("h100", {"dim": 512}, "CuDNN: heads of 512"),
  ],
)
def test_a_kernel_that_declines_is_said_to(machine, options, words):
  rest = dict(options)
  shape = (1, rest.pop("tokens", 65536), 8, rest.pop("dim", 128))
  explain = lambda shape, **options: rj.explain(
    shape, shape, shards=8, is_causal=True, show=False, machine=machine,
    **options,
  )  # fmt: skip
  found = explain(shape, **rest)
  assert found.call.local == "blockwise"
  assert words in str(found) and "blockwise" in found.title
  served = rj.explain(
    (1, 65536, 8, 128), (1, 65536, 8, 128), shards=8, is_causal=True,
    show=False, machine="tpu-v5e",
  )  # fmt: skip
  assert served.call.local == "kernel" and "FlashTPU" not in str(served)
