"""The model's order of strategies beside published measurements.

Machines are those that are stated in `chips`, unchanged but for the shape of
the slice; nothing is set for a row. A published time is of a whole training
step, a predicted one of attention alone: orders are compared, and two times
that are within 2 % of each other are in no order. An order that the model does
not meet is marked, with what it would take.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import ringjax as rj
from ringjax.ops.attention.cost import cost_terms, pair_counts
from ringjax.ops.attention.cost.call_shape import CallShape
from ringjax.ops.attention.strategies import registry
from ringjax.parallel import chips

CAUSAL = rj.Causal()
V5P = chips.MACHINES["tpu-v5p"]


def call_of(size, tokens, **options):
  given = dict(batch=1, queries=tokens, keys=tokens, heads=32, kv_heads=8,
               head_dim=128, axes=(("seq", size),), mask=CAUSAL,
               local="kernel")  # fmt: skip
  return CallShape(**(given | options))


def seconds(strategy, call, machine, layout, **options):
  return registry.predict(strategy, call, machine, layout, **options).seconds


def ports(machine, count):
  """The machine with an axis that spans `count` / 2 of a slice's sides."""
  link = dataclasses.replace(machine.link("seq"), ports=count)
  return dataclasses.replace(machine, links=link)


def check_order(published, predicted):
  for a, b in itertools.permutations(published, 2):
    if published[a] < published[b] / 1.02:
      assert predicted[a] < predicted[b], (a, b, predicted)


# MaxText, v5p-128 (64 chips, a 4 x 4 x 4 torus), balanced halves (zigzag).


def test_short_shards_on_fast_links():
  """Llama 2 7B, 32K tokens over 16 chips, 16 sequences a group.

  Step times of pull request 4687: Ulysses 8.90 s, all-gather 8.83, ring 16.38.
  """
  machine = ports(V5P, 4)
  call = call_of(16, 32768, batch=16, kv_heads=32)
  predicted = {
    name: seconds(name, call, machine, rj.Zigzag())
    for name in ("ulysses", "gather", "ring")
  }
  check_order({"ulysses": 8.90, "gather": 8.83, "ring": 16.38}, predicted)
  # The ring's steps take 7.5 s more, of 32 layers.
  more = 32 * (predicted["ring"] - predicted["gather"])
  assert 0.5 * 7.5 < more < 1.5 * 7.5


# Pull request 4836: Llama 3 8B, all 64 chips share a sequence; "usp r x u" is
# a ring of r over groups of u. The batch is not given; 4 make 63 to 68 % of
# the peak rate of the published times.
USP = {
  65536: {"gather": 1.31, "ring": 1.68, "usp 16 x 4": 1.31, "usp 8 x 8": 1.44},
  131072: {"gather": 4.03, "ring": 4.63, "usp 16 x 4": 4.02,
           "usp 8 x 8": 4.05},
  262144: {"gather": 14.33, "ring": 15.35, "usp 16 x 4": 13.92,
           "usp 8 x 8": 13.65},
}  # fmt: skip


def usp(tokens):
  call = call_of(64, tokens, batch=4)
  found = {
    name: seconds(name, call, V5P, rj.Zigzag()) for name in ("gather", "ring")
  }
  link = V5P.link("seq")
  for ring, ulysses in ((16, 4), (8, 8)):
    sides = {4: 2, 8: 4}[ulysses]
    machine = dataclasses.replace(
      V5P,
      links={
        "ring": dataclasses.replace(link, ports=2),
        "ulysses": dataclasses.replace(link, ports=sides),
      },
    )
    grouped = dataclasses.replace(
      call, axes=(("ring", ring), ("ulysses", ulysses))
    )
    found[f"usp {ring} x {ulysses}"] = seconds(
      "hybrid", grouped, machine, rj.Zigzag(), inner=ulysses
    )
  return found


@pytest.mark.parametrize("tokens", USP)
def test_hybrids(tokens):
  published = dict(USP[tokens])
  if tokens == 65536:
    # See the test below.
    del published["usp 8 x 8"]
  check_order(published, usp(tokens))


@pytest.mark.xfail(
  strict=True,
  reason="at 64K the wider groups were 10 % slower than the narrow ones, "
  "although they send less and compute the same; a kernel's rate for few heads "
  "or the chips that an axis was laid over would say, and neither is given",
)
def test_wider_groups_at_short_lengths():
  check_order(USP[65536], usp(65536))


def test_long_shards_of_many_wide_heads():
  """DeepSeek 2 16B, 256K tokens; pull request 4719, MFU 31.1 and 31.8 %.

  Over how many chips is not given. 16 is what the pull request's other model
  has at this length; over 64 the model here would have it the other way round.
  """
  call = call_of(16, 262144, heads=16, kv_heads=16, head_dim=192,
                 value_dim=128)  # fmt: skip
  predicted = {
    name: seconds(name, call, ports(V5P, 4), rj.Zigzag())
    for name in ("gather", "ring")
  }
  check_order({"gather": 1 / 31.1, "ring": 1 / 31.8}, predicted)


# ring-flash-attention, README: 8 H800, heads of Llama 3.1 8B, 8K tokens each,
# forward and backward, as part of one GPU's rate on its share of the work.


def test_layouts_on_one_node():
  call = call_of(8, 65536)
  machine = chips.MACHINES["h800"]
  rate = machine.chip.rate("bfloat16")
  parts = machine.part("kernel")
  pairs = 65536**2 / 2 / 8
  ideal = sum(
    pairs * 32 * flops / (rate * part)
    for flops, part in zip((4 * 128, 10 * 128), parts, strict=True)
  )
  published = {
    rj.Contiguous(): 0.539,
    rj.Striped(): 0.829,
    rj.Zigzag(): 0.902,
  }
  reached = {
    layout: ideal / seconds("ring", call, machine, layout)
    for layout in published
  }
  assert reached[rj.Contiguous()] < reached[rj.Striped()] < reached[rj.Zigzag()]
  for layout, part in published.items():
    assert reached[layout] == pytest.approx(part, abs=0.1)
  # Gathered keys under a contiguous layout, 58.1 %, and a zigzag ring, 75.9 %,
  # of packed documents.
  gather = seconds("gather", call, machine, rj.Contiguous())
  assert gather > seconds("ring", call, machine, rj.Zigzag())


def test_a_window_on_four_wide_gpus():
  """TransformerEngine's tutorial: 4 GB200, 2 x 64K tokens, striped.

  128 heads over 8, a window of 8192: all-gather 53.8 ms, ring 57.2 ms.
  """
  call = call_of(4, 65536, batch=2, heads=128, mask=CAUSAL & rj.Window(8192))
  machine = chips.MACHINES["gb200"]
  predicted = {
    name: seconds(name, call, machine, rj.Striped())
    for name in ("gather", "ring")
  }
  check_order({"gather": 53.8, "ring": 57.2}, predicted)


@pytest.mark.parametrize(
  ("name", "bandwidth", "tokens"),
  [
    ("a100", 300e9, 6.2e3),
    ("a100", 12.5e9, 149.5e3),
    ("tpu-v4", 268e9, 6.2e3),
  ],
)
def test_a_block_that_hides_its_send(name, bandwidth, tokens):
  """Liu et al. 2023, Table 2: six blocks of FLOPs / bandwidth tokens.

  At the product's full rate, whatever the heads, forward, without a mask.
  """
  stated = chips.MACHINES[name]
  machine = dataclasses.replace(
    stated,
    chip=dataclasses.replace(stated.chip, hbm_bandwidth=1e30),
    links=chips.Link(bandwidth=bandwidth),
    island=None,
    between=None,
    efficiency={"kernel": (1.0, 1.0)},
    hop_s=0.0,
    call_s=0.0,
  )

  def exposed(block):
    """Seconds beyond those of the tiles, as a part."""
    call = call_of(8, 8 * block, kv_heads=32, mask=rj.Everything(),
                   backward=False)  # fmt: skip
    blocks = cost_terms.tile_blocks(call, block, block)
    pairs = pair_counts.pairs(
      rj.Contiguous(), call.mask, 8, (8 * block,) * 2, blocks
    )
    tiles = pairs.sum() / 8 * 32 * 4 * 128 / machine.chip.rate("bfloat16")
    return seconds("ring", call, machine, rj.Contiguous()) / tiles - 1

  enough = round(tokens / 6)
  assert exposed(round(1.03 * enough)) < 1e-6
  assert exposed(round(0.8 * enough)) > 0.05


@pytest.mark.parametrize("name", ["a100", "tpu-v4"])
def test_stripes_at_256k(name):
  """Brandon et al. 2023: up to 1.45 times as fast end to end at 256K.

  Attention alone gains more than a step of which it is a part, and at most
  two times.
  """
  call = call_of(8, 262144, heads=32, kv_heads=32)
  machine = chips.MACHINES[name]
  contiguous, striped = (
    seconds("ring", call, machine, layout)
    for layout in (rj.Contiguous(), rj.Striped())
  )
  assert 1.45 < contiguous / striped < 2
