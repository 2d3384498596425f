"""Bytes that a schedule reads and writes, on schedules short enough to count.

A loop of 5 turns over layers of 4,096 bytes.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import ringjax as rj
from ringjax.bench.step_bytes import filled_blocks
from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler.hlo import HloProgram
from ringjax.plan.compiler.traffic import traffic
from tests import checkpoints

ROW = 256


def moved(*lines, taken=1.0, turns=5):
  """Traffic of a loop whose body has these lines and the stack %all."""
  text = "\n".join(
    [
      "HloModule jit_f, is_scheduled=true",
      "",
      "%sliced (a: f32[5,16,64], n: s32[]) -> f32[64] {",
      "  %a = f32[5,16,64]{2,1,0} parameter(0)",
      "  %n = s32[] parameter(1)",
      "  %same = f32[5,16,64]{2,1,0} bitcast(%a)",
      "  %layer = f32[1,1,64]{2,1,0} dynamic-slice(%same, %n, %n, %n)",
      "  ROOT %row = f32[64]{0} bitcast(%layer)",
      "}",
      "",
      "%updated (a: f32[5,16,64], x: f32[64], n: s32[]) -> f32[5,16,64] {",
      "  %a = f32[5,16,64]{2,1,0} parameter(0)",
      "  %x = f32[64]{0} parameter(1)",
      "  %n = s32[] parameter(2)",
      "  %one = f32[1,1,64]{2,1,0} bitcast(%x)",
      "  ROOT %new = f32[5,16,64]{2,1,0} dynamic-update-slice(%a, %one, %n, "
      "%n, %n)",
      "}",
      "",
      "%retiled (a: f32[5,16,64]) -> f32[5,16,64] {",
      "  %a = f32[5,16,64]{2,1,0} parameter(0)",
      "  ROOT %c = f32[5,16,64]{2,1,0:T(8,128)} copy(%a)",
      "}",
      "",
      "%sliced_copy (a: f32[5,16,64], n: s32[]) -> f32[64] {",
      "  %a = f32[5,16,64]{2,1,0} parameter(0)",
      "  %n = s32[] parameter(1)",
      "  %c = f32[5,16,64]{2,1,0} fusion(%a), kind=kLoop, calls=%retiled",
      "  %layer = f32[1,1,64]{2,1,0} dynamic-slice(%c, %n, %n, %n)",
      "  ROOT %row = f32[64]{0} bitcast(%layer)",
      "}",
      "",
      "%full (t: f32[64]) -> f32[64] {",
      "  %t = f32[64]{0} parameter(0)",
      "  ROOT %y = f32[64]{0} negate(%t)",
      "}",
      "",
      "%nothing (u: f32[64]) -> f32[64] {",
      "  ROOT %u = f32[64]{0} parameter(0)",
      "}",
      "",
      "%cond (c: (s32[], f32[5,16,64], f32[64])) -> pred[] {",
      "  %c = (s32[], f32[5,16,64]{2,1,0}, f32[64]{0}) parameter(0)",
      "  %i = s32[] get-tuple-element(%c), index=0",
      f"  %bound = s32[] constant({turns})",
      "  ROOT %lt = pred[] compare(%i, %bound), direction=LT",
      "}",
      "",
      "%body (p: (s32[], f32[5,16,64], f32[64])) -> (s32[], f32[5,16,64], "
      "f32[64]) {",
      "  %p = (s32[], f32[5,16,64]{2,1,0}, f32[64]{0}) parameter(0)",
      "  %i = s32[]{:S(2)} get-tuple-element(%p), index=0",
      "  %all = f32[5,16,64]{2,1,0} get-tuple-element(%p), index=1",
      "  %x = f32[64]{0} get-tuple-element(%p), index=2",
      *lines,
      "  ROOT %t = (s32[], f32[5,16,64]{2,1,0}, f32[64]{0}) tuple(%i, %all, "
      "%x)",
      "}",
      "",
      "ENTRY %main (arg: f32[5,16,64], x: f32[64]) -> f32[5,16,64] {",
      "  %arg = f32[5,16,64]{2,1,0} parameter(0)",
      "  %x = f32[64]{0} parameter(1)",
      "  %zero = s32[] constant(0)",
      "  %init = (s32[], f32[5,16,64]{2,1,0}, f32[64]{0}) tuple(%zero, %arg, "
      "%x)",
      "  %loop = (s32[], f32[5,16,64]{2,1,0}, f32[64]{0}) while(%init), "
      "condition=%cond, body=%body",
      "  ROOT %out = f32[5,16,64]{2,1,0} get-tuple-element(%loop), index=1",
      "}",
    ]
  )
  program = HloProgram(text, chips.core("v5e:2x2"))
  return traffic(program, taken=taken)


def layer(space=""):
  shape = f"f32[1,16,64]{{2,1,0{space}}}"
  return f"  %l = {shape} dynamic-slice(%all, %i, %i, %i)"


def test_a_slice_of_a_layer_is_read_and_written():
  cut = moved(layer())

  assert cut.read == cut.written == 5 * 4096
  assert cut.total == 2 * 5 * 4096 and cut.largest_written == 4096
  assert cut.record()["total"] == cut.total


def test_a_slice_into_vector_memory_is_read_alone():
  cut = moved(layer(":T(8,128)S(1)"))
  assert (cut.read, cut.written) == (5 * 4096, 0)


def test_a_copy_between_memories_counts_on_one_side():
  vector, main = "f32[64]{0:S(1)}", "f32[64]{0}"
  start = "  %s = ({}, {}, u32[]) copy-start(%x)"
  end = "  %d = {} copy-done(%s)"
  into = moved(start.format(vector, main), end.format(vector))
  assert (into.read, into.written) == (5 * ROW, 0)
  out = moved(start.format(main, vector), end.format(main))
  assert (out.read, out.written) == (0, 5 * ROW)


@pytest.mark.parametrize(
  ("start", "end", "result", "read", "written"),
  [
    ("({}, {}, u32[]{{:S(2)}}) collective-permute-start",
     "collective-permute-done", "f32[64]{0}", ROW, ROW),
    ("({}, f32[256]{{0}}) all-gather-start", "all-gather-done", "f32[256]{0}",
     ROW, 4 * ROW),
    ("{} all-reduce-start", "all-reduce-done", "f32[64]{0}", ROW, ROW),
  ],
)  # fmt: skip
def test_a_collective_counts_where_it_begins(start, end, result, read, written):
  array = "f32[64]{0}"
  cut = moved(
    f"  %s = {start.format(array, array)}(%x)", f"  %d = {result} {end}(%s)"
  )
  assert (cut.read, cut.written) == (5 * read, 5 * written)


def test_a_fusion_reads_the_part_that_it_slices():
  cut = moved("  %f = f32[64]{0} fusion(%all, %i), kind=kLoop, calls=%sliced")
  assert (cut.read, cut.written) == (5 * ROW, 5 * ROW)


def test_a_copy_within_a_fusion_is_read_in_part_and_a_returned_one_whole():
  part = "fusion(%all, %i), kind=kLoop, calls=%sliced_copy"
  cut = moved(f"  %f = f32[64]{{0}} {part}")
  assert (cut.read, cut.written) == (5 * ROW, 5 * ROW)
  whole = "fusion(%all), kind=kLoop, calls=%retiled"
  cut = moved(f"  %f = f32[5,16,64]{{2,1,0}} {whole}")
  assert cut.read == cut.written == 5 * 5 * 4096


def test_an_update_in_place_writes_its_part_alone():
  update = "fusion(%all, %x, %i), kind=kLoop, calls=%updated"
  cut = moved(f"  %f = f32[5,16,64]{{2,1,0}} {update}")
  assert (cut.read, cut.written) == (5 * ROW, 5 * ROW)
  update = "dynamic-update-slice(%all, %x, %i, %i, %i)"
  cut = moved(f"  %u = f32[5,16,64]{{2,1,0}} {update}")
  assert (cut.read, cut.written) == (5 * ROW, 5 * ROW)


def test_a_copy_of_the_stack_counts_whole():
  cut = moved("  %f = f32[5,16,64]{2,1,0} copy(%all)")
  assert cut.read == cut.written == 25 * 4096


def test_a_kernel_counts_what_it_states():
  call = '(%all), custom_call_target="tpu_custom_call"'
  stated = ', backend_config={"cost_estimate":{"bytes_accessed":"1256"}}'
  line = f"  %k = f32[64]{{0}} custom-call{call}"
  assert (moved(line + stated).read, moved(line).read) == (5000, 25 * 4096)


@pytest.mark.parametrize(("taken", "bytes_"), [(1, 2560), (0.5, 1280), (0, 0)])
def test_branches_are_taken_as_often_as_is_said(taken, bytes_):
  branch = (
    "  %b = pred[]{:S(2)} constant(true)\n"
    "  %y = f32[64]{0} conditional(%b, %x, %x), true_computation=%work, "
    "false_computation=%nothing"
  )
  cut = moved(branch.replace("%work", "%full"), taken=taken)
  assert cut.total == bytes_
  with pytest.raises(OptionError, match="taken"):
    moved(branch, taken=1.5)


def test_blocks_of_many_tokens_are_filled():
  """Beyond the range of a float's factors; nearly all blocks have rows."""
  config = checkpoints.config("qwen3_moe")
  model = rj.models.abstract(config, dtype=jnp.float32)
  shares = [filled_blocks(model, n) for n in (1, 1000, 5000)]
  assert all(0 < share <= 1 for share in shares)
  assert shares[2] > 0.9
