"""The range of a step's time, on programs and bundles written by hand.

Programs whose time their bounds give are compiled with libtpu: `pytest -m aot`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from ringjax.bench import steps
from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler import aot, machine_code, overlap
from ringjax.plan.compiler.kernel_grids import KernelGrid, kernel_grids
from ringjax.plan.compiler.machine_code import operation_code
from ringjax.plan.compiler.time_range import (
  OperationTime,
  ProgramCode,
  time_range,
)
from tests.helpers import SMALL

CHIP = "v5e:1x1"
CORE, SHEET = chips.core(CHIP), chips.CHIPS["tpu-v5e"]
MIB = 1 << 20


def program(*lines, tables=""):
  """A program that runs these lines, with a weight of 1 MiB, %w."""
  return "\n".join(
    [
      "HloModule jit_f, is_scheduled=true",
      "",
      tables,
      "%summed (p: f32[512,512]) -> f32[512] {",
      "  %p = f32[512,512]{1,0} parameter(0)",
      "  ROOT %sum = f32[512]{0} reduce(%p), dimensions={0}",
      "}",
      "",
      "ENTRY %main (w: f32[512,512]) -> f32[512] {",
      "  %w = f32[512,512]{1,0} parameter(0)",
      *lines,
      "}",
    ]
  )


def fusion(name="f", estimate=1_000, frame=1, operand="%w", root=""):
  return (
    f"  {root}%{name} = f32[512]{{0:S(1)}} fusion({operand}), kind=kLoop, "
    f"calls=%summed, metadata={{stack_frame_id={frame}}}, "
    f'backend_config={{"window_config":{{"estimated_cycles":"{estimate}",'
    '"iteration_bounds":["4","2"]}}'
  )


def kernel(name="planted.3", flops=0):
  return (
    f"  ROOT %{name} = f32[512]{{0}} custom-call(%w), "
    'custom_call_target="tpu_custom_call", backend_config={'
    f'"cost_estimate":{{"flops":"{flops}","bytes_accessed":"0"}}}}'
  )


def loop(*bodies, bound="10", stages=2, guard=""):
  """Bundles of a pipelined loop of `bound` - 2 steps, a bundle a line."""
  head = (
    "0xa LB: > { %s1_s1 = sphi %s0, %s2 /* iteration index, stage = 0 */  ;;  "
    f"%s3 = sadd.s32 -2, %s1_s1 /* iteration index, stage = {stages} */ }} "
    "/* Start region 1 */"
  )
  end = [
    f"0xf8   : > {{ %p9_p1 = scmp.ge.s32.totalorder %s2, {bound} "
    "/* loop exit test */ } /* Start/End empty region 7 */",
    "0xf9   :  { %99 = sbr.rel (!%p9_p1) target = $region1 }",
  ]
  return "\n".join(["     0   :  { %s0 = smov 0 }", head, guard, *bodies, *end])


def bundle(op="%v1 = vadd", mark="  ", note=""):
  return f"0x10 {mark}: > {{ {op} }}{note}"


PRODUCT = "%v2 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v1"
STAGE = (
  "0xb   : > { %p1_p2 = scmp.lt.s32.totalorder %s1_s1, 1 }\n"
  "0xc   : > { %5 = sbr.rel (%p1_p2) target = $region7 }\n"
  "0xd   :  {}"
)
COPY = "%6 = dma.hbm_to_vmem /*hbm=*/%s5, /*size_in_granules=*/32, %s6"


def ranged(text, code=None, **facts):
  report = overlap.check(text, CORE)
  return time_range(text, CHIP, report, code=code, facts=facts)


def test_a_loop_turns_as_often_as_its_exit_says():
  """The pipeline's two extra turns compute nothing."""
  code = operation_code(loop(*[bundle()] * 6, guard=STAGE), CHIP)
  assert not code.open and code.matrix == 0
  # Head, guard, branch and its delay, six bundles and the exit; eight turns.
  assert code.least_cycles == code.most_cycles == 8 * (1 + 3 + 6 + 1) + 2


def test_a_loop_of_unknown_length_counts_once_or_as_is_said():
  text = loop(*[bundle()] * 5, bound="%s77")
  once, eight = operation_code(text, CHIP), operation_code(text, CHIP, (2, 8))
  assert once.open and not eight.open
  assert once.least_cycles == 7 + 2 and once.least_cycles == once.most_cycles
  assert (eight.least_cycles, eight.most_cycles) == (2 * 7 + 2, 8 * 7 + 2)


def test_products_take_the_rows_of_the_matrix_unit():
  code = operation_code(loop(*[bundle(PRODUCT)] * 4), CHIP)
  # 16 rows of bfloat16 an instruction, one a cycle, in eight turns.
  assert code.matrix == 8 * 4 * 16 and code.least_cycles >= code.matrix
  # Two cores share the steps of a device.
  assert operation_code(loop(*[bundle(PRODUCT)] * 4), "v5p:2x2x1").matrix == (
    code.matrix / 2
  )


def test_of_tiles_with_and_without_a_mask_one_runs():
  """The least is the cheaper one; what happens once per row is left out."""
  branch = lambda n: bundle(f"%8 = sbr.rel (%p{n}_p{n}) target = $region{n}")
  label = lambda n: bundle(note=f" /* Start/End empty region {n} */", mark="PF")
  masked = [bundle(PRODUCT), *[bundle()] * 30]
  text = loop(
    branch(20), *[bundle()] * 50, label(20),
    branch(21), *masked, label(21),
    branch(22), *[bundle(PRODUCT)] * 1, label(22),
  )  # fmt: skip
  code = operation_code(text, CHIP)
  # 16 cycles of rows, next to 31 bundles of the tile with a mask.
  fixed = 8 * (1 + 3 + 3 + 1) + 2
  assert code.least_cycles == fixed + 8 * 16
  assert code.most_cycles == fixed + 8 * (50 + 31)


def test_copies_of_the_code_count_in_granules_of_32_bytes():
  assert operation_code(loop(bundle(COPY)), CHIP).copied == 8 * 32 * 32


def test_a_kernel_that_states_no_cost_has_its_machine_code_s():
  """A planted circle: nothing that the kernel states can lower the bound."""
  text = program(kernel(flops=0))
  bundles = {"planted.3": loop(*[bundle(PRODUCT)] * 4, bound="%s77")}
  grid = KernelGrid(name="planted", outputs=((512,),), steps=1000)
  time = ranged(text, ProgramCode(bundles=bundles, grids=(grid,)))
  cycles = 1000 * 4 * 16
  assert time.core_s >= cycles / CORE.clock_hz
  assert time.least_s >= cycles / CORE.clock_hz and time.covered == 1
  # Nor can what it states raise it.
  boast = ranged(
    program(kernel(flops=10**15)),
    ProgramCode(bundles=bundles, grids=(grid,)),
  )
  assert boast == time
  assert ranged(text).least_s == 0


def test_a_list_of_steps_bounds_a_kernel_s_loop():
  grid = KernelGrid(name="planted", outputs=((512,),), steps=2, listed=100)
  bundles = {"planted.3": loop(*[bundle()] * 6, bound="%s77")}
  code = functools.partial(ProgramCode, bundles=bundles, grids=(grid,))
  free, half = (
    ranged(program(kernel()), code(tile_share=share)) for share in (None, 0.5)
  )
  clock = CORE.clock_hz
  assert free.core_s == pytest.approx((2 * 8 + 2) / clock)
  assert half.core_s == pytest.approx((100 * 8 + 2) / clock)
  assert free.most_s > half.most_s > half.core_s and not free.open


def test_a_kernel_of_a_gradient_has_the_grid_of_its_own_name():
  bundles = {"planted.3": loop(*[bundle()] * 6, bound="%s77")}
  grid = KernelGrid(name="plant", outputs=((512,),), steps=7)
  time = ranged(program(kernel()), ProgramCode(bundles=bundles, grids=(grid,)))
  assert time.core_s == pytest.approx((7 * 8 + 2) / CORE.clock_hz)


def test_a_kernel_with_a_grid_of_unknown_length_is_named():
  bundles = {"planted.3": loop(bundle(), bound="%s77")}
  grid = KernelGrid(name="planted", outputs=((512,),), steps=1, open=True)
  time = ranged(program(kernel()), ProgramCode(bundles=bundles, grids=(grid,)))
  assert time.open == ("planted.3",)


def test_bytes_and_cycles_add_up_once_without_overlap():
  bundles = {"f": loop(*[bundle()] * 98, bound="102")}
  time = ranged(program(fusion(root="ROOT ")), ProgramCode(bundles=bundles))
  reading = MIB / SHEET.hbm_bandwidth
  cycles = 100 * 100 + 2
  assert time.least_s == pytest.approx(cycles / CORE.clock_hz)
  assert time.touched_s == pytest.approx(reading)
  start = 1800 / CORE.clock_hz
  assert time.most_s == pytest.approx(cycles / CORE.clock_hz + reading + start)
  (operation,) = time.operations
  assert operation.floor_s == pytest.approx(reading)


def test_equal_operations_share_their_machine_code():
  """The compiler makes it once, under the first one's name."""
  lines = (fusion("f"), fusion("g", root="ROOT "))
  bundles = {"f": loop(*[bundle()] * 6)}
  both = ranged(program(*lines), ProgramCode(bundles=bundles))
  alone = ranged(program(*lines[:1]), ProgramCode(bundles=bundles))
  assert both.core_s == pytest.approx(2 * alone.core_s) and both.covered == 1


def test_the_simulator_s_cycles_raise_both_ends():
  code = ProgramCode(
    bundles={"f": loop(bundle())}, simulated={"f": 9_000_000.0}
  )
  time = ranged(program(fusion(root="ROOT ")), code)
  assert time.least_s == time.most_s == pytest.approx(9e6 / CORE.clock_hz)


def test_without_machine_code_an_operation_takes_at_most_its_estimate():
  time = ranged(program(fusion(estimate=90_000, root="ROOT ")))
  assert time.core_s == 0 and time.covered == 0
  assert time.most_s == pytest.approx(90_000 / CORE.clock_hz)
  # Unless that is below what its bytes take, as of copies that XLA prices at 0.
  time = ranged(program(fusion(estimate=0, root="ROOT ")))
  assert time.most_s == pytest.approx(MIB / SHEET.hbm_bandwidth)


def test_the_floor_is_the_largest_of_three():
  text = program(fusion(root="ROOT "))
  time = ranged(text, model_flops=1e12, least_bytes=1e6)
  assert time.bound == "products"
  assert time.floor_s == 1e12 / SHEET.rate("bfloat16") == time.least_s
  slow = ranged(text, model_flops=1e12, dtype="float32")
  assert slow.product_s > time.product_s
  time = ranged(text, model_flops=1.0, least_bytes=1e9)
  assert time.bound == "memory"
  assert time.least_s == 1e9 / SHEET.hbm_bandwidth <= time.most_s


def test_the_line_that_made_an_operation_is_named():
  tables = "\n".join(
    [
      "FileNames", '1 "/home/me/model/layer.py"', "",
      "FunctionNames", '1 "f"', "",
      "FileLocations", "1 {file_name_id=1 function_name_id=1 line=42 end=1}",
      "", "StackFrames", "1 {file_location_id=1 parent_frame_id=1}", "",
    ]
  )  # fmt: skip
  (operation,) = ranged(
    program(fusion(estimate=90_000), tables=tables)
  ).operations
  assert isinstance(operation, OperationTime)
  assert operation.source == "home/me/model/layer.py:42"
  stated = fusion(estimate=90_000).replace(
    "stack_frame_id=1", 'source_file="a/b.py" source_line=7'
  )
  (operation,) = ranged(program(stated)).operations
  assert operation.source == "a/b.py:7"


def test_grids_are_read_from_the_traced_program():
  def body(x, out):
    out[...] = x[...]

  def call(x, n):
    return pl.pallas_call(
      body,
      grid=(3, n),
      in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, 0))],
      out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((24, 128), jnp.float32),
      name="planted",
    )(x)

  x = jnp.zeros((24, 128))
  (grid,) = kernel_grids(jax.make_jaxpr(lambda x: call(call(x, 2), 2))(x))
  assert grid == KernelGrid(name="planted", outputs=((24, 128),), steps=6)
  (grid,) = kernel_grids(jax.make_jaxpr(jax.jit(call))(x, jnp.int32(2)))
  assert grid.open and grid.steps == 3


def test_a_kernel_without_a_name_has_a_grid():
  def copy(x, out):
    out[...] = x[...]

  call = pl.pallas_call(
    copy, grid=(2,), out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32)
  )
  (grid,) = kernel_grids(jax.make_jaxpr(call)(jnp.zeros((8, 128))))
  assert grid.steps == 2 and not grid.open


def test_profiles_of_the_simulator_are_read_except_of_0_cycles(tmp_path):
  for name, cycles in (("f", 12), ("g", 0)):
    (tmp_path / f"{name}_static_llo_profile.textproto").write_text(
      f'hlo_op_estimate {{\n hlo_op_name: "{name}"\n '
      f"estimated_cycles: {cycles}\n}}"
    )
  assert machine_code.read_simulated(tmp_path) == {"f": 12.0}


@pytest.mark.parametrize("given", [
  {"code": True, "memory_only": True}, {"simulate": True, "memory_only": True},
  {"memory_only": True, "buffers": 4},
  {"code": True, "flags": ("--xla_jf_dump_to=/tmp/x",)},
])  # fmt: skip
def test_options_that_exclude_each_other_are_refused(given):
  with pytest.raises(OptionError, match="memory_only|xla_jf_dump_to"):
    aot.compile("a:b", CHIP, **given)


@functools.cache
def compiled(name, topology=CHIP, **options):
  return aot.compile(
    f"tests.plan.controls:{name}", topology, options, code=True
  ).time


@pytest.mark.aot
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
class TestCompiled:
  """Programs whose time their bounds give."""

  def test_one_row_takes_as_long_as_its_weights(self):
    time = compiled("matmul", rows=1)
    reading = 2 * 4096 * 4096 / SHEET.hbm_bandwidth
    assert time.bound == "memory" and time.covered > 0.9
    assert 0.95 * time.least_s <= reading <= time.most_s
    # XLA's own estimate is several times that.
    assert time.most_s < 2 * reading
    assert "controls.py:" in time.operations[0].source

  def test_a_large_product_takes_as_long_as_at_the_peak(self):
    time = compiled("matmul", rows=4096)
    peak = 2 * 4096**3 / CORE.flops
    assert 0.95 * time.least_s <= peak <= time.most_s < 1.5 * peak

  def test_a_hop_takes_as_long_as_its_bytes_on_a_link(self):
    time = compiled("hops", "v5e:2x2")
    sending = 2 * 2048 * 2048 / chips.core("v5e").link_bytes_s
    assert time.bound == "links"
    assert 0.95 * time.least_s <= sending <= time.most_s < 2 * sending

  def test_a_kernel_that_states_nothing_takes_its_products(self):
    time = compiled("kernel", "v5e:2x2", stated=False)
    products = 4 * 2 * 1024**3 / CORE.flops
    assert time.core_s >= products and time.least_s >= products
    stated = compiled("kernel", "v5e:2x2", stated=True)
    assert stated.core_s == pytest.approx(time.core_s, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_a_training_step_must_keep_its_inputs_in_their_dtype():
  """The input of each layer, [B, T, D], written and read once."""
  least = lambda dtype: steps.train(
    jax.devices()[:4],
    tokens=4096,
    model=SMALL | {"num_hidden_layers": 4},
    dtype=dtype,
  ).facts["least_bytes"]
  inputs = 4 * 4096 * SMALL["hidden_size"] / 4
  assert least("float32") - least("bfloat16") == 2 * inputs * (4 - 2)
