"""What is read off a schedule, on schedules short enough to reckon by hand.

A v5e's link carries 46,600 bytes in 1,500 cycles, which is the send here.
"""

from __future__ import annotations

import math

import pytest

from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler import hlo, overlap

RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
BACK = "source_target_pairs={{1,0},{2,1},{3,2},{0,3}}"
SEND = 1500


def work(name, cycles, operand="%p"):
  return (
    f"  %{name} = f32[64,128]{{1,0}} fusion({operand}), kind=kLoop, calls=%f, "
    f'backend_config={{"estimated_cycles":"{cycles}"}}'
  )


def start(name, pairs=RING, operand="%x"):
  return (
    f"  %{name} = (u8[46600]{{0}}, u8[46600]{{0}}, u32[], u32[]) "
    f"collective-permute-start({operand}), channel_id=1, {pairs}, "
    f'metadata={{op_name="jit(f)/ppermute"}}'
  )


def done(name, of):
  return f"  %{name} = u8[46600]{{0}} collective-permute-done(%{of})"


def program(*body, trips=8, bound=None, condition=None, loop=""):
  """A loop over `body`, whose trip count is a constant of its condition."""
  bound = f"  %n = s32[] constant({trips})" if bound is None else bound
  lines = [
    "HloModule jit_f, is_scheduled=true, num_partitions=4",
    "",
    "%f (a: f32[64,128]) -> f32[64,128] {",
    "  ROOT %a = f32[64,128]{1,0} parameter(0)",
    "}",
    "",
    "%cond (c: (s32[], u8[46600], s32[])) -> pred[] {",
    "  %c = (s32[], u8[46600]{0}, s32[]) parameter(0)",
    "  %i = s32[] get-tuple-element(%c), index=0",
    bound,
    condition or "  ROOT %lt = pred[] compare(%i, %n), direction=LT",
    "}",
    "",
    "%body (p: (s32[], u8[46600], s32[])) -> (s32[], u8[46600], s32[]) {",
    "  %p = (s32[], u8[46600]{0}, s32[]) parameter(0)",
    "  %x = u8[46600]{0} get-tuple-element(%p), index=1",
    *body,
    "  ROOT %t = (s32[], u8[46600]{0}, s32[]) tuple(%p, %x, %p)",
    "}",
    "",
    "ENTRY %main (arg: u8[46600], m: s32[]) -> u8[46600] {",
    "  %arg = u8[46600]{0} parameter(0)",
    "  %m = s32[] parameter(1)",
    "  %zero = s32[] constant(0)",
    "  %many = s32[] constant(5)",
    "  %copied = s32[] copy(%many)",
    "  %init = (s32[], u8[46600]{0}, s32[]) tuple(%zero, %arg, %copied)",
    "  %while.1 = (s32[], u8[46600]{0}, s32[]) while(%init), "
    f"condition=%cond, body=%body{loop}",
    "  ROOT %out = u8[46600]{0} get-tuple-element(%while.1), index=1",
    "}",
  ]
  return "\n".join(lines)


HIDDEN = (start("go"), work("w", 2000), done("come", "go"))


def test_a_send_beside_enough_work_costs_nothing():
  found = overlap.check(program(*HIDDEN), "v5e")
  assert found.total_cycles == found.compute_cycles == 8 * 2000
  assert found.stalled == 0 and found.faults() == () and found.can_hide
  (send,) = found.sends
  assert send.times == 8 and send.nbytes == 46600 and send.hidden
  assert send.between_cycles == 2000
  assert send.link_cycles == pytest.approx(SEND)
  (kind,) = found.collectives
  assert kind.count == 8 and kind.nbytes == 8 * 46600
  assert kind.link_s == pytest.approx(8 * SEND / 1.5e9)


def test_a_send_longer_than_the_work_beside_it_stalls():
  body = (start("go"), work("w", 1000), done("come", "go"))
  found = overlap.check(program(*body), "v5e")
  assert found.total_cycles == pytest.approx(8 * SEND)
  assert found.stalled == pytest.approx(1 / 3)
  assert not found.sends[0].hidden and not found.can_hide
  assert "33.3 % of the step waits" in found.faults()[0]
  assert "too little work" in found.faults()[0]


def test_work_that_waits_for_what_is_sent_hides_nothing():
  body = (start("go"), done("come", "go"), work("w", 6000))
  found = overlap.check(program(*body), "v5e")
  assert found.stalled == pytest.approx(SEND / (SEND + 6000))
  # There was enough of it.
  assert found.can_hide and "too little" not in found.faults()[0]


def test_a_synchronous_send_is_a_fault_however_short():
  text = (
    f"  %go = u8[46600]{{0}} collective-permute(%x), channel_id=1, {RING}",
    work("w", 10_000_000),
  )
  found = overlap.check(program(*text), "v5e")
  assert found.stalled < overlap.LIMIT
  assert found.synchronous_cycles == pytest.approx(8 * SEND)
  assert "1 of 1 sends are synchronous" in found.faults()[0]


@pytest.mark.parametrize(("pairs", "stall"), [(RING, 1000), (BACK, 0)])
def test_sends_of_one_direction_share_its_link(pairs, stall):
  body = (
    start("k"), start("v", pairs), work("w", 2000), done("a", "k"),
    done("b", "v"),
  )  # fmt: skip
  found = overlap.check(program(*body), "v5e")
  assert found.stalled_cycles == pytest.approx(8 * stall)
  assert found.sends[1].hidden == (stall == 0)


def test_far_pairs_take_a_link_for_each_hop():
  line = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
  snake = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
  check = lambda coords, wraps=None: overlap.check(
    program(*HIDDEN), "v5e", coords=coords, wraps=wraps
  )
  # The way home of a line is as long as it is.
  assert check(line).sends[0].hops == 3
  assert check(line).stalled_cycles == pytest.approx(8 * (3 * SEND - 2000))
  assert check(line, (True, False, False)).sends[0].hops == 1
  assert check(snake).sends[0].hops == 1 and check(snake).stalled == 0
  with pytest.raises(OptionError, match="coords"):
    check(line[:3])


@pytest.mark.parametrize(
  ("change", "turns"),
  [
    (dict(trips=3), 3),
    (dict(trips=1), 1),
    (dict(trips=40), 40),
    # The bound is what goes into the loop, through a copy.
    (dict(bound="  %n = s32[] get-tuple-element(%c), index=2"), 5),
    (
      dict(condition="  ROOT %gt = pred[] compare(%n, %i), direction=GT"),
      8,
    ),
    (dict(loop=', backend_config={"known_trip_count":{"n":"6"}}'), 6),
  ],
)
def test_trip_counts_that_are_written_down(change, turns):
  found = overlap.check(program(*HIDDEN, **change), "v5e")
  assert found.total_cycles == turns * 2000
  assert not found.counted_by_data


def test_a_loop_that_data_counts_turns_as_often_as_is_said():
  # The bound is an argument of the program.
  text = program(
    *HIDDEN,
    bound="  %n = s32[] get-tuple-element(%c), index=2",
    loop=', metadata={op_name="jit(f)/transpose(jvp())/while"}',
  ).replace("%arg, %copied)", "%arg, %m)")
  for trips, turns in (
    (1.0, 1),
    (4, 4),
    (2.5, 2.5),
    ([("transpose", 6), ("", 2)], 6),
    ([("rematted", 6), ("", 2)], 2),
  ):
    found = overlap.check(text, "v5e", data_trips=trips)
    assert found.total_cycles == turns * 2000
    assert found.counted_by_data == {"main/while.1": turns}
  # The loop's own scope comes first, but not that of a loop around it.
  for scope, turns in (("expected_trips_16/while", 16),
                       ("expected_trips_16/while/body/while", 3)):  # fmt: skip
    stated = text.replace("transpose(jvp())/while", scope)
    found = overlap.check(stated, "v5e", data_trips=3)
    assert found.total_cycles == turns * 2000
  for wrong in (-1, math.inf, [("", math.nan)]):
    with pytest.raises(OptionError, match="data_trips"):
      overlap.check(text, "v5e", data_trips=wrong)


def kernel(stated):
  cost = f',"cost_estimate":{{{stated}}}' if stated else ""
  return (
    "  %flash.1 = f32[64,128]{1,0} custom-call(%x), "
    'custom_call_target="tpu_custom_call", '
    f'backend_config={{"custom_call_config":{{"body":"x"{cost}}}}}'
  )


def test_kernels_are_priced_by_what_they_state_or_not_at_all():
  body = lambda stated: program(start("go"), kernel(stated), done("a", "go"))
  flops = 2000 * 131072
  stated = overlap.check(body(f'"flops":"{flops}"'), "v5e")
  assert stated.total_cycles == 8 * 2000 and stated.faults() == ()
  silent = overlap.check(body(""), "v5e")
  assert silent.unpriced_kernels == ("flash.1",)
  assert any("cost_estimate" in fault for fault in silent.faults())
  # What was measured, or counted in the kernel's own schedule, goes first.
  known = overlap.check(body(""), "v5e", kernels={"flash": 3000})
  assert known.total_cycles == 8 * 3000 and known.faults() == ()


def test_other_collectives_wait_apart_from_the_ring():
  body = (
    *HIDDEN,
    "  %sum = f32[1024]{0} all-reduce(%x), channel_id=2, "
    "replica_groups=[1,4]<=[4], to_apply=%f",
  )
  found = overlap.check(program(*body), "v5e")
  assert found.stalled == 0 and found.other_cycles > 0
  kinds = {one.kind: one for one in found.collectives}
  assert kinds["all-reduce"].count == 8
  # A reduce-scatter and a gather, of three quarters each.
  assert kinds["all-reduce"].nbytes == 8 * 2 * 4096 * 3 / 4
  assert found.total_cycles == pytest.approx(8 * 2000 + found.other_cycles)


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
    ("replica_groups=[2,8]<=[16]", 8),
    ("replica_groups=mesh['data'=2,'seq'=16] {'seq'}", 16),
    ("replica_groups=mesh['data'=2,'seq'=16] {'data','seq'}", 32),
    ("replica_groups=mesh['seq'=16] {'seq':(1)4}", 4),
    ("no groups", 1),
  ],
)
def test_groups_of_a_collective(groups, size):
  assert overlap.group_size(groups) == size


def test_branches_count_as_the_longest():
  text = program(
    "  %c1 = f32[64,128]{1,0} conditional(%x, %x, %x), "
    "true_computation=%f, false_computation=%slow"
  ).replace(
    "%cond (c:",
    "%slow (s: f32[64,128]) -> f32[64,128] {\n"
    "  %p = f32[64,128]{1,0} parameter(0)\n"
    + work("w", 700).replace("  %w", "  ROOT %w")
    + "\n}\n\n%cond (c:",
  )
  assert overlap.check(text, "v5e").total_cycles == 8 * 700


def test_what_has_no_price_is_told():
  body = (*HIDDEN, "  %s = f32[64,128]{1,0} sort(%x), dimensions={0}")
  assert overlap.check(program(*body), "v5e").unpriced == {"sort": 1}


def test_a_text_that_is_no_schedule_is_refused():
  plain = program(*HIDDEN).replace("is_scheduled=true, ", "")
  for text in ("", "module @jit_f {", plain):
    with pytest.raises(OptionError, match="scheduled HLO"):
      overlap.check(text, "v5e")


def test_the_record_is_json_s():
  import json

  found = overlap.check(program(*HIDDEN), "v5e").record()
  assert json.loads(json.dumps(found)) == found
  assert found["sends"][0]["hidden"] and found["faults"] == []


def test_spans_are_the_timeline():
  found = overlap.check(program(*HIDDEN, trips=2), "v5e")
  spans = {(s.lane, s.kind, s.start, s.end) for s in found.spans}
  assert ("device", "work", 0.0, 2000.0) in spans
  assert ("device", "work", 2000.0, 4000.0) in spans
  ways = [s for s in found.spans if s.lane == "link 1"]
  assert [s.start for s in ways] == [0.0, 2000.0]
  assert all(s.end - s.start == pytest.approx(SEND) for s in ways)


def test_arrays_and_pairs_of_a_line():
  lines, _ = hlo.parse(program(*HIDDEN))
  go = next(one for one in lines["body"] if one.name == "go")
  assert go.pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
  assert go.nbytes == 46600 and go.op_name == "jit(f)/ppermute"


# ---------------------------------------------------------------------------
# Chips
# ---------------------------------------------------------------------------


def test_the_compiler_s_chips_have_data_sheets():
  for name, core in chips.CORES.items():
    sheet = chips.CHIPS[name]
    assert core.hbm_bytes < sheet.hbm_bytes
    # The compiler's peak is the data sheet's, of TPU7x a seventh less.
    assert 0.85 < core.flops / sheet.rate("bfloat16") < 1.01
    assert core.link_bytes_s <= 2 * chips.MACHINES[name].links.bandwidth
    assert core.source


def test_slices_by_name():
  assert chips.core("v5p:4x4x8") is chips.core("tpu-v5p")
  assert chips.sides("v5p:4x4x8") == (4, 4, 8)
  assert chips.sides("v5e:8x16") == (8, 16, 1)
  assert chips.core("v5e").wraps((8, 16, 1)) == (False, True, False)
  assert chips.core("v5p").wraps((2, 4, 8)) == (False, True, True)
  for wrong in ("v5e", "v5e:4x4x4", "v5p:4x4", "v5e:4x", "v5e:0x4", "a100:8"):
    with pytest.raises(OptionError):
      chips.sides(wrong)
