"""Cycles of kernels' tiles, from bundles written by hand and from libtpu's."""

from __future__ import annotations

import pytest

from ringjax.bench import tiles
from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler import aot, cycles
from ringjax.plan.compiler.cycles import BasicBlock

SMALLEST = {
  "v5e": "v5e:1x1",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:1x1",
  "tpu7x": "tpu7x:2x2x1",
}


def product(unit, kind="bf16"):
  return f"%v7 = vmatmul.mubr.{kind}.gmra.mrb[0].mxu{unit} %v3"


def text(*bundles, mark="  ", loops="> "):
  """A run: its bundles' operations, in a loop."""
  lines = []
  for n, ops in enumerate(bundles):
    there = mark if n == 0 else "  "
    lines.append(f"{n:#6x} {there}: {loops}{{ {' ;;  '.join(ops)} }}")
  return "\n".join(lines) + "\n"


BRANCH = "%9 = sbr.rel (%p3) target = $region7"
SPILL = "%1 = vst [vmem:[#allocation5_spill] sm:$0xff] %v1"
MASKED = text(*[[product(0), "%v1 = vadd"]] * 4, ["%v2"], ["%v3"], mark="PF")
WHOLE = text(*[[product(0)], [product(1)]] * 2, [product(0), product(0), SPILL])
HEAD = text(["%s1 = sadd"], [BRANCH], loops="")
SOURCE = "// a comment\n" + HEAD + MASKED + text([BRANCH], mark="PF") + WHOLE


def test_bundles_and_rows_are_counted_between_branches():
  found = cycles.basic_blocks(SOURCE, "v5e")
  assert [run.bundles for run in found] == [2, 6, 1, 5]
  # 16 rows of bfloat16 an instruction, by the busiest of the units.
  assert [run.matrix_cycles for run in found] == [0, 64, 0, 64]
  assert [run.spills for run in found] == [0, 0, 0, 1]
  # Twice as many rows a cycle.
  assert [r.matrix_cycles for r in cycles.basic_blocks(SOURCE, "v6e")] == [
    0,
    32,
    0,
    32,
  ]


def test_rows_of_an_instruction_by_its_type():
  for kind, rows in (("f32", 8), ("bf16", 16), ("s8", 32), ("f8e4m3fn", 32)):
    (run,) = cycles.basic_blocks(text([product(1, kind)]), "v5p")
    assert run == BasicBlock(bundles=1, matrix_cycles=rows, spills=0)


def test_the_tile_is_the_one_that_does_not_mask():
  tile = cycles.tile_of("flash", cycles.basic_blocks(SOURCE, "v6e"))
  assert (tile.kernel, tile.work.bundles, tile.work.cycles) == ("flash", 5, 32)
  slow = cycles.tile_of("flash", (*tile.blocks, BasicBlock(
    bundles=40, matrix_cycles=32, spills=0)))  # fmt: skip
  assert slow.work == tile.work
  assert tile.record()["program"] == "flash"
  assert (
    cycles.tile_of("none", (BasicBlock(bundles=3, matrix_cycles=0, spills=0),))
    is None
  )


@pytest.mark.aot
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
class TestCompiled:
  """With libtpu."""

  @pytest.mark.parametrize("what", ["forward", "backward"])
  @pytest.mark.parametrize(
    "chip",
    ["v5e", *(pytest.param(c, marks=pytest.mark.slow) for c in
              ("v5p", "v6e", "tpu7x"))],
  )  # fmt: skip
  def test_a_whole_tile_takes_no_longer_than_splash(self, chip, what):
    both = {}
    for kernel in ("ours", "splash"):
      found = cycles.count(
        f"ringjax.bench.tiles:{kernel}", SMALLEST[chip], {"what": what}
      )
      both[kernel] = max(tile.work.cycles for tile in found)
    assert both["ours"] <= 1.1 * both["splash"], both

  def test_the_count_is_that_of_the_products(self):
    """All of a tile's products, at the rate that the chip has on paper."""
    (tile,) = cycles.count("ringjax.bench.tiles:ours", SMALLEST["v5e"])
    assert "flash_forward" in tile.kernel
    flops = 4 * 1024 * 1024 * 128
    assert tile.work.matrix_cycles == flops // chips.core("v5e").flops_per_cycle

  @pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
  def test_a_visit_waits_for_memory_alone(self, chip):
    """A tile of a cache is computed while the next one is read."""
    core = chips.core(chip)
    (tile,) = cycles.count("ringjax.bench.tiles:decode", SMALLEST[chip])
    assert "ringjax_decode" in tile.kernel
    work = [run.cycles for run in tile.blocks if run.matrix_cycles]
    rate = chips.MACHINES[core.name].chip.hbm_bandwidth / core.clock_hz
    reading = tiles.decode_tile(core.name) / rate * core.cores
    assert min(work) <= reading

  @pytest.mark.parametrize(
    ("chip", "cache", "most"),
    [
      ("v5e", "int4", 0.45),
      ("v6e", "int4", 0.45),
      ("v5e", "hadamard4", 0.45),
      ("v5e", "nuq3", 0.62),
      pytest.param("v5e", "int8", 0.60, marks=pytest.mark.slow),
      pytest.param("v5e", "hadamard3", 0.45, marks=pytest.mark.slow),
      # The vector unit binds there: see the kernels' page.
      pytest.param("v6e", "hadamard3", 0.75, marks=pytest.mark.slow),
    ],
  )
  def test_codes_are_read_in_a_part_of_the_time(self, chip, cache, most):
    """Of the time that reading as many keys in bfloat16 takes."""
    core = chips.core(chip)
    shape = {"cache": cache}
    (tile,) = cycles.count("ringjax.bench.tiles:decode", SMALLEST[chip], shape)
    assert "ringjax_decode_codes" in tile.kernel
    work = [run.cycles for run in tile.blocks if run.matrix_cycles]
    rate = chips.MACHINES[core.name].chip.hbm_bandwidth / core.clock_hz
    rate = float(rate) / core.cores
    reading = tiles.decode_tile(core.name, **shape) / rate
    plain = tiles.plain_bytes(core.name, **shape) / rate
    assert max(reading, min(work)) <= most * plain

  @pytest.mark.slow
  @pytest.mark.parametrize(("bits", "most"), [(4, 5600), (3, 4500), (2, 4200)])
  def test_code_books_with_outliers(self, bits, most):
    (tile,) = cycles.count(
      "ringjax.bench.tiles:code_book", SMALLEST["v5e"], {"bits": bits}
    )
    assert tile.work.cycles <= most

  @pytest.mark.parametrize(
    ("chip", "codes", "most"),
    [
      ("v6e", "4 bits", 1.3),
      pytest.param("v5e", "4 bits", 1.3, marks=pytest.mark.slow),
      pytest.param("v5p", "4 bits", 1.3, marks=pytest.mark.slow),
      pytest.param("v5e", "Q4_0", 1.3, marks=pytest.mark.slow),
      # The kernel binds there: see docs/how/load.md.
      pytest.param("v6e", "Q4_0", 1.8, marks=pytest.mark.slow),
    ],
  )
  def test_weights_of_codes_take_little_more_than_reading(
    self, chip, codes, most
  ):
    options = {"codes": codes}
    (tile,) = cycles.count(
      "ringjax.bench.tiles:product", SMALLEST[chip], options
    )
    assert "ringjax_block_product" in tile.kernel
    core = chips.core(chip)
    rate = chips.MACHINES[core.name].chip.hbm_bandwidth / core.clock_hz
    nbytes = tiles.ProductShape(**options).block_bytes(core.name)
    taken = sum(block.cycles for block in tile.blocks)
    assert taken <= most * nbytes / rate * core.cores

  @pytest.mark.parametrize("chip", ["v5e", "v6e"])
  def test_shared_pages_are_read_once(self, chip):
    """32 rows, 2,048 of whose 2,112 keys are shared."""
    kernels = []
    for builder, more in (("pool", {}), ("ragged", {"queries_per_block": 1})):
      kernels += cycles.count(
        f"ringjax.bench.tiles:{builder}", SMALLEST[chip], more
      )
    found = tiles.pool_cycles(chip, tiles.PoolShape(), kernels)
    assert found["apart"] >= 3 * found["together"]
    # JAX's kernel, which shares nothing.
    assert found["ragged"] >= 2.8 * found["together"]

  @pytest.mark.parametrize("chip", ["v5e", "v5p"])
  def test_many_queries_of_wide_heads_find_room(self, chip):
    """16 of each of 128 heads of a latent cache: 10 MB of sums."""
    wide = {"heads": 128, "kv_heads": 1, "head_dim": 576, "queries": 16}
    (tile,) = cycles.count("ringjax.bench.tiles:decode", SMALLEST[chip], wide)
    assert tile.work.matrix_cycles

  def test_kernels_run_beside_axes_of_batch_and_heads(self):
    """XLA cuts no kernel: all axes are the call's own."""
    found = cycles.count(
      "ringjax.bench.steps:attention",
      "v5e:2x4",
      {
        "tokens": 4096,
        "mesh": [["data", 2], ["seq", 2], ["model", 2]],
        "batch": 2,
        "what": "backward",
      },
    )
    kernels = {tile.kernel.partition(".")[0] for tile in found}
    assert kernels == {"ringjax_flash_forward", "ringjax_flash_backward"}

  def test_a_program_without_kernels_has_no_tile(self):
    with pytest.raises(OptionError, match="no kernel"):
      cycles.count(
        "ringjax.bench.steps:attention",
        SMALLEST["v5e"],
        {"tokens": 1024, "mesh": [["seq", 1]], "local": "blockwise"},
      )
