"""What the TPU compiler makes of rings, on slices that are not there.

Compiles with libtpu, which is not in every environment: `pytest -m aot`.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import re
import subprocess
import sys

import jax
import pytest

import ringjax as rj
from ringjax.errors import OptionError, RingjaxError
from ringjax.kv.base import bytes_each
from ringjax.parallel import chips
from ringjax.plan.compiler import (
  aot,
  compiling,
  hlo,
  overlap,
  target,
  traffic,
)
from tests.plan.test_overlap import HIDDEN, program

STEPS = "ringjax.bench.steps"
ATTENTION = f"{STEPS}:attention"
MODEL = {
  "model_type": "llama",
  "num_hidden_layers": 2,
  "hidden_size": 512,
  "intermediate_size": 1024,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 128,
  "vocab_size": 4096,
  "max_position_embeddings": 131072,
}
NARROW = MODEL | {"head_dim": 64}
# Latents of 576 numbers for all heads.
LATENT = MODEL | {
  "model_type": "deepseek_v2",
  "num_key_value_heads": 4,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "first_k_dense_replace": 2,
  "n_routed_experts": 8,
  "moe_intermediate_size": 256,
  "num_experts_per_tok": 2,
}
# A layer's experts are sixteen times those that a token chooses.
MIXTURE = MODEL | {
  "model_type": "qwen3_moe",
  "num_hidden_layers": 4,
  "num_experts": 64,
  "num_experts_per_tok": 4,
  "moe_intermediate_size": 768,
}
# Five layers of six look back a window.
GEMMA = MODEL | {
  "model_type": "gemma3_text",
  "num_hidden_layers": 6,
  "sliding_window": 512,
}
# Models of an engine whose rows are in tiles, and options of its calls.
WIDE = MODEL | {
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "vocab_size": 128256,
}
TILED = {
  "wide": (WIDE, {}),
  "narrow": (
    WIDE | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
    {},
  ),
  "adapters": (WIDE, {"rank": 16}),
  "int8": (WIDE, {"codes": "int8"}),
  "int4": (WIDE, {"codes": "int4"}),
  "nf4": (WIDE, {"codes": "nf4"}),
  "mxfp4": (WIDE, {"codes": "mxfp4"}),
  "mixture": (
    WIDE
    | {
      "model_type": "qwen3_moe",
      "hidden_size": 2048,
      "intermediate_size": 6144,
      "num_key_value_heads": 4,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 768,
    },
    {},
  ),
}
# Steps in which the rows of all experts' blocks are gathered.
EXPERT_STEPS = 5
CONTROLS = "tests.plan.controls"
# Older compilers make worse schedules of some programs.
LIBTPU = tuple(map(int, re.findall(r"\d+", aot.versions()["libtpu"])))
NEW = LIBTPU >= (0, 0, 50)
needs_libtpu = [
  pytest.mark.aot,
  pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing())),
]


@functools.cache
def compiled(builder, topology, options="{}"):
  return aot.compile(builder, topology, json.loads(options), timeout_s=900)


def attention(topology, tokens, **options):
  options |= {"tokens": tokens, "heads": 4, "kv_heads": 4}
  return compiled(ATTENTION, topology, json.dumps(options))


@functools.cache
def engine_call(kind, name, prompts=None, path=None):
  """A call of an engine on one chip, or with `prompts` a step in tiles."""
  model, more = TILED[kind]
  options = {"model": model, "kind": "dense", "page": 128, "tokens": 1 << 15}
  return aot.compile(
    "tests.plan.engine_calls:call",
    "v5e:1x1",
    options | more | {"name": name, "prompts": prompts},
    text_path=None if path is None else str(path),
    timeout_s=900,
  )


def moved_bytes(text, trips):
  """Bytes that a program moves whose loops have these trip counts."""
  program = hlo.HloProgram(text, data_trips=list(trips.items()))
  return traffic.traffic(program).total


def control(name, topology="v5e:2x4", **options):
  return compiled(f"{CONTROLS}:{name}", topology, json.dumps(options))


def host_copies(program):
  """Of each copy from the host's memory to the device's while others run.

  Yields:
    the computation, the names of what runs beside, and its cycles.
  """
  for name in program.times:
    lines = program.computations[name]
    for n, one in enumerate(lines):
      if one.op != "dynamic-slice-start" or "S(5)" not in one.shape:
        continue
      done = next(m for m, x in enumerate(lines) if x.operands == (one.name,))
      beside = lines[n + 1 : done]
      cycles = sum(program.price(name, x) for x in beside)
      yield name, [x.name for x in beside], cycles


class TestCompiled:
  """With libtpu."""

  pytestmark = needs_libtpu

  @pytest.mark.parametrize(
    ("topology", "strategy", "what"),
    [
      ("v5e:2x4", "striped", "forward"),
      ("v5p:2x2x2", "ring", "forward"),
      pytest.param("v5e:2x4", "striped", "backward", marks=pytest.mark.slow),
      pytest.param("v5e:4x4", "ring", "backward", marks=pytest.mark.slow),
      pytest.param("v5p:2x2x2", "striped", "backward", marks=pytest.mark.slow),
      pytest.param("v6e:2x4", "striped", "backward", marks=pytest.mark.slow),
      pytest.param("tpu7x:2x2x1", "striped", "forward", marks=pytest.mark.slow),
      pytest.param("v4:2x2x2", "striped", "forward", marks=pytest.mark.slow),
    ],
  )
  @pytest.mark.parametrize("local", ["best", "blockwise"])
  def test_the_ring_is_hidden(self, topology, strategy, what, local):
    if local == "best" and topology.startswith("tpu7x") and not NEW:
      pytest.skip("libtpu before 0.0.50 puts two sends in a row")
    shards = 16 if topology == "v5e:4x4" else 8
    # A kernel takes less time for a hop: it takes more tokens to hide a send.
    length = 16_384 if local == "best" else 4096
    found = attention(
      topology, length * shards, strategy=strategy, what=what, local=local
    )
    assert found.fits and found.devices == shards
    report = found.report
    assert report.can_hide and report.sends
    assert report.faults() == (), report.faults()
    assert report.stalled <= overlap.LIMIT
    # Keys and values go round once, and back no more often than they must.
    (kind,) = (
      one for one in report.collectives if one.kind == "collective-permute"
    )
    block = 2 * length * 4 * 128 * 2
    times = {"forward": shards - 1, "backward": 2 * (shards - 1) + 2 * shards}
    assert kind.nbytes <= 1.01 * times[what] * block
    assert found.time.floor_s <= found.time.least_s < found.time.most_s

  @pytest.mark.parametrize("topology", [
    "v5e:2x2",
    pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
  ])  # fmt: skip
  def test_one_prompts_products_hide_what_another_sends(self, topology):
    """Sums that the compiler makes run alone, also those of two prompts."""
    sizes = MODEL | {
      "hidden_size": 4096, "intermediate_size": 11_008,
      "num_attention_heads": 32, "num_key_value_heads": 32,
      "num_hidden_layers": 4,
    }  # fmt: skip
    options = {"model": sizes, "tokens": 2048, "shard": None}
    before, after = (
      compiled(
        f"{STEPS}:pair", topology, json.dumps(options | {"how_summed": how})
      ).report
      for how in ("summed", "split")
    )
    sums = lambda report, name: sum(
      getattr(one, name) for one in report.collectives
    )
    assert sums(before, "waited_s") > 0.99 * sums(before, "link_s")
    assert sums(after, "waited_s") < 0.35 * sums(after, "link_s")
    assert sums(after, "waited_s") < 0.75 * sums(before, "waited_s")
    assert after.total_cycles < 0.98 * before.total_cycles
    assert not any(one.synchronous for one in after.sends)

  @pytest.mark.slow
  @pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
  def test_products_of_experts_hide_their_all_to_alls(self, topology):
    """Forward and backward, of a layer's experts alone, without attention."""
    waits = []
    for asynchronous in (False, True):
      options = {"asynchronous": asynchronous}
      report = control("experts", topology, **options).report
      # A round of each of 16 chunks, and an empty one.
      sends = next(x for x in report.collectives if x.kind == "all-to-all")
      assert set(report.counted_by_data.values()) == {16.0}
      assert 16 * 8 < sends.count <= 17 * 8
      waits.append(report.other_cycles / report.total_cycles)
    assert waits[0] > 0.1 and waits[1] <= overlap.LIMIT

  def test_a_ring_of_four_is_hidden_too(self):
    """Its hops are no loop to the compiler: it would send all blocks first."""
    found = attention("v5e:2x4", 8192 * 4, mesh=[["seq", 4]])
    report = found.report
    assert found.devices == 4 and report.can_hide and len(report.sends) == 6
    assert report.faults() == (), report.faults()

  def test_memory_alone_is_the_same_memory(self):
    shape = {"heads": 4, "kv_heads": 4, "tokens": 65_536}
    whole = aot.compile(ATTENTION, "v5e:2x4", shape)
    alone = aot.compile(ATTENTION, "v5e:2x4", shape, memory_only=True)
    assert whole.fits and alone.fits
    assert alone.memory is None and alone.report is None
    assert alone.limit_bytes == whole.limit_bytes
    # The whole also counts the code, and twice what takes turns in one place.
    assert 0.8 < alone.needed_bytes / whole.needed_bytes <= 1
    shape |= {"tokens": 1 << 24}
    over = aot.compile(ATTENTION, "v5e:2x4", shape, memory_only=True)
    assert not over.fits and over.largest
    assert over.needed_bytes > over.limit_bytes == whole.limit_bytes

  @pytest.mark.parametrize(
    "topology",
    ["v5e:2x4", *(pytest.param(t, marks=pytest.mark.slow)
                  for t in ("v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"))],
  )  # fmt: skip
  @pytest.mark.parametrize(
    "strategy",
    ["zigzag", "bidirectional", "ring_q", "chain", "halo", "documents",
     "gather", "ulysses", "hybrid:2", "two_level:4"],
  )  # fmt: skip
  def test_every_strategy_compiles_with_the_kernel(self, topology, strategy):
    options = {
      "window": 256 if strategy == "halo" else None,
      "packed": strategy == "documents",
    }
    for what in ("forward", "backward"):
      found = attention(topology, 8192, strategy=strategy, what=what, **options)
      assert found.fits and found.devices == 8
      # The order of devices is a ring of neighbours for all of them.
      assert not any(send.synchronous for send in found.report.sends)
      assert found.report.unpriced_kernels == ()

  def test_devices_as_they_are_listed_are_caught(self):
    found = attention("v5e:8x8", 1024 * 64, order="listed")
    assert found.report.synchronous_cycles > 0
    assert "synchronous" in found.report.faults()[0]
    good = attention("v5e:8x8", 1024 * 64)
    assert good.report.synchronous_cycles == 0
    assert max(send.hops for send in good.report.sends) == 1

  def test_a_hop_that_receives_and_then_uses_is_caught(self):
    early = control("ring", how="early").report
    assert early.faults() == () and early.stalled < overlap.LIMIT
    late = control("ring", how="late").report
    assert late.stalled > 0.04 and late.can_hide
    assert any("waits for sends" in fault for fault in late.faults())

  def test_a_serial_hop_is_caught(self):
    report = control("ring", how="barrier").report
    assert report.stalled > 0.04 and report.can_hide and report.faults()

  def test_a_kernel_without_a_cost_is_caught(self):
    silent = control("kernel", stated=False).report
    assert silent.unpriced_kernels
    assert any("cost_estimate" in fault for fault in silent.faults())
    stated = control("kernel", stated=True).report
    assert not stated.unpriced_kernels
    assert stated.compute_cycles > silent.compute_cycles

  @pytest.mark.parametrize(
    "topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"]
  )
  def test_a_token_is_decoded_without_a_copy_of_the_cache(self, topology):
    options = {"model": MODEL, "tokens": 65536}
    found = compiled(f"{STEPS}:decode", topology, json.dumps(options))
    # Keys and values of two layers, on each of eight.
    cache = 2 * 2 * 2 * 128 * 2 * 65536 // 8
    assert found.memory.aliased >= cache
    assert found.memory.temporaries < cache / 8
    # The kernel reads it: XLA has no loop over tiles.
    assert not found.report.counted_by_data
    assert found.report.unpriced_kernels == ()
    assert found.time.memory_s < found.time.most_s

  @pytest.mark.parametrize("cache", ["nuq3", "float8"])
  def test_codes_are_read_without_a_copy_of_the_cache(self, cache):
    """Of code books by the kernel, of floats by XLA's loops, tile by tile."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    options = {"model": MODEL | heads, "tokens": 524288, "cache": cache}
    found = compiled(f"{STEPS}:decode", "v5e:2x4", json.dumps(options))
    # Layers, keys and values, heads, at least 48 bytes, on each of eight.
    codes = 2 * 2 * 8 * 48 * 524288 // 8
    assert found.memory.aliased >= codes
    assert found.memory.temporaries < found.memory.aliased / 4
    assert bool(found.report.counted_by_data) == (cache == "float8")
    assert found.report.unpriced_kernels == ()

  @pytest.mark.slow
  def test_a_step_copies_single_pages_of_the_host(self, tmp_path):
    """A page of keys and one of values in a loop, however long the row is."""
    kind = "select:budget=2048,page=128,device=1024,hot=4096"
    temporaries = {}
    for tokens in (65536, 262144):
      path = tmp_path / f"{tokens}.hlo"
      options = {"model": MODEL, "tokens": tokens, "cache": kind}
      found = aot.compile(
        f"{STEPS}:decode", "v5e:1x1", options, text_path=str(path)
      )
      temporaries[tokens] = found.memory.temporaries
      text = path.read_text()
      sizes = re.findall(
        r"dynamic-slice-start\(.*dynamic_slice_sizes=(\S+),", text
      )
      assert sizes == ["{1,128,128}"] * 2
      copies = [x for x in text.splitlines() if "copy-start(" in x]
      assert not any("S(5)" in x for x in copies)
      # The chosen pages are read in place, not gathered first.
      assert "ringjax_decode_own" in text
    # Scores of the pages of a layer, and which of them are hot.
    assert temporaries[262144] - temporaries[65536] < 2**20

  @pytest.mark.slow
  @pytest.mark.parametrize("topology", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
  def test_guessed_pages_are_copied_while_the_layer_before_runs(
    self, tmp_path, topology
  ):
    """All of its keys and values; those of a loop by count have no company."""
    kind = "select:budget=2048,page=128,device=1024,hot=4096,ahead=4"
    path = tmp_path / "program.hlo"
    options = {"model": MODEL, "tokens": 65536, "cache": kind}
    aot.compile(f"{STEPS}:decode", topology, options, text_path=str(path))
    program = hlo.HloProgram(path.read_text(), chips.core(topology))
    by_loop = collections.defaultdict(list)
    for name, ops, cycles in host_copies(program):
      by_loop[name].append((sum("fusion" in x for x in ops), cycles))
    # Those of layer 0 before the loop, of the next layer, and of misses.
    copies = sorted(by_loop.values(), key=lambda x: min(y for _, y in x))
    assert [len(x) for x in copies] == [2, 8, 8]
    assert max(x for _, x in copies[0]) < min(x for _, x in copies[2]) / 10
    # Beside the products of a layer.
    assert min(x for x, _ in copies[2]) > 10

  @pytest.mark.parametrize(
    ("topology", "cache"),
    [
      ("v5e:2x4", "dense"),
      *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in [("v5e:2x4", "int4"), ("v5p:2x2x2", "dense"),
                  ("v6e:2x4", "dense")]
      ),
    ],
  )  # fmt: skip
  def test_blocks_come_from_the_host_beside_the_work(
    self, tmp_path, topology, cache
  ):
    """While the device's part is attended, and each while another one is."""
    path = tmp_path / "program.hlo"
    kind = f"{cache}:device=4096,room=1024"
    options = {"model": MODEL, "tokens": 65536, "cache": kind}
    found = aot.compile(
      f"{STEPS}:decode", topology, options, text_path=str(path)
    )
    every = compiled(
      f"{STEPS}:decode", topology, json.dumps(options | {"cache": cache})
    )
    # 512 slots and two blocks, of 8192 on each of eight; 4 blocks come and go.
    slot = (every.memory.arguments - found.memory.arguments) / (8192 - 2560)
    assert slot > 2 * 2 * 2 * 64
    assert found.memory.temporaries < 12 * 1024 * slot
    program = hlo.HloProgram(path.read_text(), chips.core(topology))
    copies = list(host_copies(program))
    assert copies and all(cycles > 0 for _, _, cycles in copies)
    # Keys and values: of two blocks in a loop, of the first one before it,
    # and of the last one where their number is even.
    counts = collections.Counter(name for name, _, _ in copies)
    assert sorted(counts.values()) == [2, 2, 4]
    if cache == "dense":
      beside = [any("ringjax_decode" in x for x in ops) for _, ops, _ in copies]
      assert sum(beside) == 2

  @pytest.mark.parametrize(
    ("weights", "layers"),
    [
      pytest.param("host", 4, marks=pytest.mark.slow),
      ("device=.5,host=.5", 8),
    ],
  )
  def test_weights_come_from_the_host_beside_the_layer_before(
    self, tmp_path, weights, layers
  ):
    path, topology = tmp_path / "program.hlo", "v5e:1x1"
    options = {
      "model": "llama-3.1-8b", "layers": layers, "tokens": 16384, "chunk": 4096,
      "weights": weights, "mesh": [["seq", 1]],
    }  # fmt: skip
    aot.compile(f"{STEPS}:prefill", topology, options, text_path=str(path))
    program = hlo.HloProgram(path.read_text(), chips.core(topology))
    loops = [x for x in host_copies(program) if program.times[x[0]] == 4]
    assert len(loops) == 9  # The parameters of a layer.
    name = loops[0][0]
    layer = sum(program.price(name, x) for x in program.computations[name])
    assert min(cycles for _, _, cycles in loops) > layer / 2

  @pytest.mark.parametrize("cache", ["dense", "hadamard2"])
  def test_one_chip_is_a_mesh(self, cache):
    options = {"model": MODEL, "tokens": 65536, "cache": cache}
    found = aot.compile(f"{STEPS}:decode", "v5p:1x1x1", options)
    assert found.fits and found.report.unpriced_kernels == ()

  def test_ten_million_tokens_in_three_bits_take_a_quarter_of_the_chips(self):
    options = {"model": "llama-3.1-8b", "tokens": 10 * 2**20}
    decode = functools.partial(aot.compile, f"{STEPS}:decode", memory_only=True)
    assert decode("v5e:4x8", options | {"cache": "hadamard3"}).fits
    assert not decode("v5e:8x8", options).fits
    assert decode("v5e:8x16", options).fits

  def test_blocks_go_to_the_host_and_chunks_read_them(self):
    options = {"model": MODEL, "tokens": 65536}
    for name in ("dense", "int4"):
      options |= {"cache": f"{name}:device=4096,room=1024"}
      for builder in ("evict", "chunk") if name == "dense" else ("evict",):
        found = aot.compile(f"tests.plan.tiers:{builder}", "v5e:2x4", options)
        # What is in the host's memory is in none of the device's.
        assert found.fits and found.memory.total < 50e6

  @pytest.mark.parametrize(
    ("name", "kind", "page", "model"),
    [
      ("answers", "dense", 32, MODEL),
      ("prompts", "dense", 64, MODEL),
      ("layers", "dense", 64, MODEL),
      ("answers", "int8", 128, MODEL),
      ("prompts", "int4", 128, MODEL),
      ("answers", "windowed", 64, GEMMA),
      ("drafts", "dense", 32, MODEL),
      ("trees", "dense", 32, MODEL),
      ("answers", "dense", 32, NARROW),
      ("prompts", "unrotated", 32, NARROW),
    ],
  )
  def test_no_call_of_an_engine_copies_its_pool(self, name, kind, page, model):
    options = {"name": name, "kind": kind, "page": page, "model": model}
    found = aot.compile(
      "tests.plan.engine_calls:call", "v5e:2x2", options | {"tokens": 1 << 17}
    )
    pool = found.facts["pool"]
    assert found.memory.aliased >= pool
    assert found.memory.temporaries < pool / 4

  @pytest.mark.parametrize(
    "kind", ["dense", "int4", pytest.param("int8", marks=pytest.mark.slow)]
  )
  def test_prompts_over_pages_write_no_scores(self, kind, tmp_path):
    """Four pieces of 512 tokens of 32 heads took 1.1 GiB of temporaries.

    Over pages of codes they took 4.1 GiB.
    """
    path = tmp_path / "program.hlo"
    wide = MODEL | {"num_hidden_layers": 1, "num_attention_heads": 32}
    options = {"name": "many", "kind": kind, "page": 128, "model": wide}
    found = aot.compile(
      "tests.plan.engine_calls:call", "v5e:1x1", options | {"tokens": 1 << 15},
      text_path=str(path),
    )  # fmt: skip
    assert "ringjax_prefill_pool" in path.read_text()
    assert found.memory.temporaries < 128 << 20

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("kind", "name", "share"),
    [
      ("wide", "answers", 0.91),
      ("narrow", "answers", 1.0),
      ("adapters", "answers", 1.0),
      ("mixture", "answers", 1.0),
      ("wide", "drafts", 1.0),
      ("int8", "answers", 0.9),
      ("int4", "answers", 0.85),
      ("nf4", "answers", 0.75),
      ("mxfp4", "answers", 0.85),
    ],
  )
  def test_tiles_of_rows_read_a_layer_once_for_both_kinds(
    self, kind, name, share, tmp_path
  ):
    """Copies of layers would add as much as one program saves."""
    path = tmp_path / "program.hlo"
    step = engine_call(kind, name, "prompts", path)
    calls = engine_call(kind, name), engine_call(kind, "prompts")
    assert step.memory.aliased >= step.facts["pool"]
    text = path.read_text()
    moved = functools.partial(moved_bytes, text)
    both = sum(call.traffic.total for call in calls)
    # The first part of a loop's name that fits counts, so "" is the last.
    full = {"row_tiles": 3, "expert_blocks": EXPERT_STEPS, "": 1}
    assert moved(full) < share * both
    # No layer is cut out of its stack, nor put in another order.
    config = TILED[kind][0]
    embed, hidden = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    in_heads = "|".join(f"{n},{config['head_dim']}" for n in heads)
    weights = rf"{embed},({in_heads}|{hidden})|{hidden},{embed}"
    # Small ones may be loaded to the vector memory ahead of their kernel.
    in_main_memory = r"\{(?![^}]*S\(1\))"
    # Nor is a weight of codes decoded there.
    copies = rf"= bf16\[(?:1,)?(?:{weights})\]{in_main_memory}"
    assert not re.findall(copies, text)
    # A step of answers alone skips what is only for prompts; rows that the
    # kernel skips are counted.
    alone = {"joint_call_1": 0} | full | {"row_tiles": 1}
    assert moved(alone) < 1.07 * calls[0].traffic.total

  @pytest.mark.parametrize(
    ("name", "kind", "kernel"),
    [
      ("drafts", "dense", "ringjax_decode_shared"),
      pytest.param(
        *("trees", "dense", "ringjax_decode_shared"), marks=pytest.mark.slow
      ),
      ("drafts", "int4", "ringjax_prefill_pool"),
    ],
  )
  def test_a_kernel_checks_drafts(self, name, kind, kernel, tmp_path):
    path = tmp_path / "program.hlo"
    options = {"name": name, "kind": kind, "page": 128, "model": MODEL}
    aot.compile(
      "tests.plan.engine_calls:call", "v5e:1x1", options | {"tokens": 1 << 15},
      text_path=str(path),
    )  # fmt: skip
    assert kernel in path.read_text()

  @pytest.mark.parametrize(
    ("what", "model", "kind", "rows"),
    [
      ("decode", NARROW, "dense", 8),
      ("decode", LATENT, "dense", 1),
      ("prefill", NARROW, "dense", 1),
      *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in [
          ("decode", MODEL, "int8", 8),
          ("decode", GEMMA | {"head_dim": 64}, "windowed", 4),
          ("prefill", LATENT, "dense", 1),
          ("prefill", NARROW, "unrotated", 1),
          ("prefill", NARROW, "dense", 4),
        ]
      ),
    ],
  )
  def test_no_call_of_a_session_copies_its_cache(
    self, tmp_path, what, model, kind, rows
  ):
    """A step, and a chunk of a prompt behind others, of 64 or 576 numbers."""
    path = tmp_path / "program.hlo"
    options = {"model": model, "tokens": 1 << 19, "cache": kind, "batch": rows}
    if what == "prefill":
      options["chunk"] = 2048
    found = aot.compile(
      f"{STEPS}:{what}", "v5e:2x4", options, text_path=str(path)
    )
    cache = found.facts["cache_bytes"]["device"]
    assert found.memory.aliased >= cache
    assert found.memory.temporaries < cache / 16
    # Of keys or values of all layers, [L, B, K, S, H]; codes are [.., X, S].
    slots = options["tokens"] // 8
    shape = rf"\[\d,{rows},\d,({slots},\d+|\d+,{slots})\]"
    arrays = rf"= \(?(bf16|s8){shape}\S* "
    text = path.read_text()
    assert re.search(arrays + "(get-tuple-element|parameter)", text)
    assert not re.search(arrays + "copy", text)

  @pytest.mark.parametrize(
    ("model", "kind", "rows", "tree", "mesh"),
    [
      (MODEL, "dense", 1, False, [["seq", 1]]),
      (MODEL, "dense", 1, True, [["seq", 1]]),
      *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in [
          (NARROW, "dense", 8, True, [["seq", 4]]),
          (MODEL, "int8", 4, True, [["seq", 2], ["model", 2]]),
          (GEMMA, "windowed:slack=16", 4, True, [["data", 2], ["seq", 2]]),
          (LATENT, "dense", 1, False, [["seq", 2], ["model", 2]]),
        ]
      ),
    ],
  )
  def test_no_check_of_drafts_copies_its_cache(
    self, model, kind, rows, tree, mesh
  ):
    """It moves at most a tenth more bytes than weights and keys have."""
    options = {"model": model, "tokens": 1 << 17, "cache": kind, "batch": rows}
    found = aot.compile(
      f"{STEPS}:verify",
      "v5p:1x1x1" if mesh == [["seq", 1]] else "v5p:2x2x1",
      options | {"tree": tree, "mesh": mesh, "drafted": 7, "shard": None},
    )
    assert found.memory.aliased >= found.facts["cache_bytes"]["device"]
    # Arguments are weights and keys; temporaries are written and read once.
    assert 2 * found.memory.temporaries < 0.1 * found.memory.arguments

  @pytest.mark.parametrize(
    ("model", "rows"),
    [
      (MIXTURE, 1),
      (MIXTURE, 8),
      *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in [
          ("qwen3-30b-a3b", 1),
          ("qwen3-30b-a3b", 8),
          ("qwen3-30b-a3b", 64),
          ("deepseek-v2-lite", 1),
          ("deepseek-v2-lite", 8),
          ("deepseek-v2-lite", 64),
        ]
      ),
    ],
  )
  def test_a_step_of_a_mixture_reads_the_experts_it_chooses(self, model, rows):
    tokens = 4096 if rows > 8 else 8192
    options = {"model": model, "tokens": tokens, "batch": rows}
    found = aot.compile(f"{STEPS}:decode", "v5p:1x1x1", options)
    # Each layer's experts were copied: 2.8 to 18 times the least.
    assert found.traffic.total < 1.15 * found.facts["least_bytes"]
    # Nothing as large as the weights of a layer's experts is written.
    assert found.traffic.largest_written < 50e6

  def test_a_step_reads_codes_of_4_bits_once(self):
    """In place in the stack, of which no layer is copied."""
    compiled = aot.compile(
      f"{STEPS}:decode", "v5e:1x1",
      {"model": "llama-3.1-8b", "tokens": 8192, "layers": 4, "coded_bits": 4,
       "shard": None},
    )  # fmt: skip
    assert compiled.traffic is not None
    assert compiled.traffic.total <= 1.02 * compiled.facts["least_bytes"]

  def test_windowed_layers_are_decoded_from_their_window(self):
    options = {"model": GEMMA, "tokens": 65536}
    dense, windowed = (
      compiled(f"{STEPS}:decode", "v5e:2x4", json.dumps(options | one))
      for one in ({}, {"cache": "windowed"})
    )
    # Keys and values of a layer, on each of eight; a window is 1 % of them.
    layer = 2 * 2 * 128 * 2 * 65536 // 8
    saved = dense.memory.arguments - windowed.memory.arguments
    assert 4.9 * layer < saved < 5 * layer
    assert windowed.memory.aliased >= layer
    assert windowed.memory.temporaries < layer / 2
    assert windowed.report.unpriced_kernels == ()

  def test_a_prompt_is_read_into_windows_in_less_memory(self):
    options = {"model": GEMMA, "tokens": 65536}
    dense, windowed = (
      aot.compile(
        f"{STEPS}:prefill", "v5e:2x4", options | one, memory_only=True
      )
      for one in ({}, {"cache": "windowed"})
    )
    assert dense.fits and windowed.fits
    layer = 2 * 2 * 128 * 2 * 65536 // 8
    assert dense.needed_bytes - windowed.needed_bytes > 4 * layer

  def test_a_step_of_training_compiles_and_reads_the_head_seldom(self):
    options = {"model": MODEL, "tokens": 8192, "q_block": 256, "kv_block": 256}
    found = compiled(f"{STEPS}:train", "v5e:2x4", json.dumps(options))
    assert found.fits and found.facts["layers"] == 2
    assert found.memory.aliased > 0.9 * found.memory.outputs
    assert not any(send.synchronous for send in found.report.sends)
    sent = sum(one.nbytes for one in found.report.collectives)
    # One step of the head brings its weights three times at most, and their
    # gradient; with a step for each 1024 tokens of all shards it were eight.
    # Most is the layers' weights, of which older compilers gather some again.
    head = 2 * MODEL["vocab_size"] * MODEL["hidden_size"]
    assert sent < (40 if NEW else 50) * head
    assert found.record()["time"]["least_s"] == found.time.least_s

  def test_a_program_that_does_not_fit_says_what_is_large(self):
    found = control("large", "v5e:2x2")
    assert not found.fits and found.memory is None and found.report is None
    assert found.limit_bytes == int(15.75 * 2**30)
    assert found.needed_bytes > found.limit_bytes
    assert found.largest[0].nbytes >= 2**33
    assert "[" in found.largest[0].shape
    assert found.time is None
    assert json.loads(json.dumps(found.record()))["fits"] is False

  def test_programs_do_not_grow_with_the_ring(self):
    few = attention("v5e:2x4", 1024 * 8)
    many = attention("v5e:8x8", 1024 * 64)
    assert many.text_bytes < 1.15 * few.text_bytes
    assert many.memory.temporaries < 1.2 * few.memory.temporaries
    assert many.memory.code < 1.2 * few.memory.code

  def test_what_a_builder_refuses_is_said_as_it_said_it(self):
    with pytest.raises(OptionError, match="sides: got none"):
      aot.compile(f"{CONTROLS}:refused", "v5e:2x2")
    with pytest.raises(aot.CompileError, match="no way on 4 devices"):
      aot.compile(f"{CONTROLS}:broken", "v5e:2x2")
    with pytest.raises(OptionError, match="builder"):
      aot.compile(f"{CONTROLS}:missing", "v5e:2x2")
    with pytest.raises(OptionError, match="strategy"):
      aot.compile(ATTENTION, "v5e:2x2", {"tokens": 512, "strategy": "warp"})

  def test_a_step_that_takes_too_long_is_given_up(self):
    with pytest.raises(aot.CompileError, match="timeout_s"):
      aot.compile(f"{CONTROLS}:large", "v5e:2x2", timeout_s=0.2)

  def test_ordinary_runs_never_load_it(self):
    # With libtpu installed: CPU devices, no noise, and it is not even opened.
    source = (
      "import ringjax as rj, jax, jax.numpy as jnp\n"
      "rj.plan.aot, rj.plan.overlap\n"
      "x = jnp.ones((1, 8, 1, 8))\n"
      "out = rj.dot_product_attention(x, x, x)\n"
      "print(jax.devices()[0].platform, out.shape)\n"
      "print('libtpu' in open('/proc/self/maps').read())\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
      [sys.executable, "-c", source], env=environment, capture_output=True,
      text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["cpu", "(1,", "8,", "1,", "8)", "False"]
    assert ran.stderr == ""


def test_without_libtpu_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(aot, "missing", lambda *_: "libtpu is not installed")
  with pytest.raises(OptionError, match="libtpu is not installed"):
    aot.compile(ATTENTION, "v5e:2x2", {"tokens": 512})


@pytest.mark.parametrize("topology", ["v5e", "v9:2x2", "v5p:2x2"])
def test_slices_that_are_none_are_refused(topology):
  with pytest.raises(OptionError, match=r"topology|chip"):
    aot.compile(ATTENTION, topology, {"tokens": 512})


def test_a_compilation_ends_with_who_asked_for_it(tmp_path):
  place = tmp_path / "job"
  place.mkdir()
  # Of a process that is not the one that started it.
  job = {"caller": -1, "builder": "time:sleep", "topology": "v5e:2x2"}
  (place / "job.json").write_text(json.dumps(job))
  ran = subprocess.run(
    [sys.executable, "-c", aot._CHILD, str(place)], timeout=300
  )
  assert ran.returncode == 1 and not place.exists()


def test_options_have_to_be_plain(monkeypatch):
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  with pytest.raises(OptionError, match="options"):
    aot.compile(ATTENTION, "v5e:2x2", {"tokens": object()})


@pytest.mark.parametrize(
  ("sides", "bounds"),
  [((1, 1), [1, 1, 1]), ((1, 2), [1, 2, 1]), ((2, 1, 1), [2, 1, 1])],
)
def test_a_slice_narrower_than_a_host_says_so(sides, bounds):
  assert target._host(sides) == {"chips_per_host_bounds": bounds}
  assert target._host((4, 4)) == target._host((2, 2, 1)) == {}


def test_the_environment_hides_what_libtpu_would_read(monkeypatch):
  for name in ("WRAP", "LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_PLATFORMS"):
    monkeypatch.setenv(name, "nonsense")
  made = aot.environment(("--xla_a=1", "--xla_b=2"))
  assert "WRAP" not in made and "XLA_FLAGS" not in made
  assert made["JAX_PLATFORMS"] == "cpu"
  assert made["LIBTPU_INIT_ARGS"] == "--xla_a=1 --xla_b=2"
  assert "LIBTPU_INIT_ARGS" not in aot.environment()
  assert made["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_of_a_compiler_that_broke_the_reason_is_told(monkeypatch):
  fatal = "F1122 21:26:03.123456   123 shape.cc:99] Check failed: size >= 0"
  said = ["W1122 21:26:01.0 loading", fatal, *["55b3e23e790f,"] * 999]
  source = f"import sys; sys.stderr.write({chr(10).join(said)!r}); sys.exit(7)"
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  monkeypatch.setattr(aot, "_CHILD", source)
  with pytest.raises(aot.CompileError) as error:
    aot.compile(ATTENTION, "v5e:2x2", {"tokens": 512})
  assert "status 7" in str(error.value)
  assert str(error.value).rstrip(".").endswith(fatal)


def test_traffic_that_fails_hides_no_result(monkeypatch):
  body = {
    "fits": True, "devices": 4, "coords": [[0, 0, 0]] * 4, "data_trips": 1.0,
    "facts": {}, "versions": {}, "trace_s": 1.0, "compile_s": 300.0,
    "grids": [], "memory": dict.fromkeys(
      ("arguments", "outputs", "aliased", "temporaries", "code"), 1000
    ),
  }  # fmt: skip
  texts = []

  def parse(text):
    texts.append(text)
    return real_parse(text)

  def failing(program, *, taken):
    raise KeyError("fusion.7")

  real_parse = hlo.parse
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  monkeypatch.setattr(aot, "_run", lambda *_: (body, program(*HIDDEN)))
  monkeypatch.setattr(hlo, "parse", parse)
  compiled = aot.compile(ATTENTION, "v5e:2x2", {"tokens": 512})
  # The program's text is read once, for the report and the traffic.
  assert len(texts) == 1
  assert compiled.traffic is not None and compiled.traffic_error is None
  monkeypatch.setattr(aot, "traffic", failing)
  compiled = aot.compile(ATTENTION, "v5e:2x2", {"tokens": 512})
  assert compiled.fits and compiled.report is not None
  assert compiled.traffic is None
  assert compiled.traffic_error == "KeyError: 'fusion.7'"
  assert compiled.record()["traffic_error"] == compiled.traffic_error


REPORT = """Memory Space: default (color=0)
Total bytes: 60129547776 (56.00GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   16.00GiB( 50%);   16.00GiB;  17179869184;       3; f32[32768,4], s32[32768]
   16.50GiB(100%);  512.00MiB;            0;       5; 2\u00d7bf16[131072,2048]
       512B(100%);       512B;            0;       1; pred[]

Memory Space: vmem (color=1)
    8.00MiB(100%);    8.00MiB;            0;       1; f32[2048,1024]
"""


SCOPED = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for \
%ringjax_flash_forward.6 = (f32[1,1,4096,128]{3,2,1,0}) custom-call(%max.14). \
Scoped allocation with size 19.25M and limit 16.00M exceeded scoped vmem limit
"""


def test_tiles_too_large_are_no_matter_of_tokens():
  with pytest.raises(OptionError, match=r"19.25M .*forward.6; .*16.00M.*block"):
    compiling._check_tiles(SCOPED)
  compiling._check_tiles(
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Program or kernel requires "
    "more memory (50.20G) exceeds available HBM (15.75G)"
  )


def test_options_by_which_it_reads_what_fits_are_not_the_caller_s():
  with pytest.raises(OptionError, match="xla_dump_to"):
    aot.compile(
      ATTENTION, "v5e:2x2", {"tokens": 512},
      compiler_options={"xla_dump_to": "/tmp"},
    )  # fmt: skip


@pytest.mark.parametrize(
  ("what", "wrong"),
  [
    ("attention", {"tokens": 0}),
    ("attention", {"tokens": 1001}),
    ("attention", {"batch": 0}),
    ("attention", {"dtype": "bf17"}),
    ("train", {"model": MODEL, "tokens": 0}),
    ("train", {"model": MODEL, "accumulate": 0}),
    ("prefill", {"model": MODEL, "tokens": 1002}),
    ("decode", {"model": MODEL, "batch": 0}),
  ],
)
def test_sizes_that_are_none_are_refused_by_name(what, wrong):
  name = list(wrong)[-1]
  build = getattr(importlib.import_module(STEPS), what)
  with pytest.raises(RingjaxError, match=f"^{name}: got"):
    build(jax.devices()[:4], **{"tokens": 1024, **wrong})


def test_a_step_of_training_has_the_pass_of_a_bound_on_logits():
  build = importlib.import_module(STEPS).train
  products = {}
  for bound in (None, 100.0):
    built = build(
      jax.devices()[:2], model=MODEL, layers=1, tokens=256, qk_clip=bound
    )
    traced = built.function.trace(*built.arguments)
    products[bound] = str(traced.jaxpr).count("dot_general")
    assert built.facts["qk_clip"] == bound
  assert products[100.0] > products[None]
  with pytest.raises(OptionError, match="qk_clip: got 100 for a qwen3"):
    build(
      jax.devices()[:1], model="qwen3-8b", tokens=64, layers=1, qk_clip=100.0
    )


def test_codes_and_a_placement_of_weights_are_refused_by_name():
  options = {"model": "llama-3.1-8b", "tokens": 64, "layers": 1}
  with pytest.raises(OptionError, match="coded_bits=4"):
    importlib.import_module(STEPS).decode(
      jax.devices()[:1], **options, shard=None, weights="host", coded_bits=4
    )


@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_programs_have_the_cache_that_is_named(what):
  build = getattr(importlib.import_module(STEPS), what)
  sizes = {}
  for cache in ("dense", "windowed", "windowed:slack=64"):
    built = build(jax.devices()[:4], model=GEMMA, tokens=8192, cache=cache)
    assert built.facts["cache"] == cache
    (held,) = (x for x in built.arguments if isinstance(x, rj.kv.KVCache))
    sizes[cache] = bytes_each(held)
  assert sizes["windowed:slack=64"] < sizes["windowed"] < sizes["dense"] / 4
  with pytest.raises(OptionError, match="^cache: got 'ring'; wanted one of"):
    build(jax.devices()[:4], model=GEMMA, tokens=8192, cache="ring")


def test_a_million_tokens_of_llama_7b_fit_into_80_gb():
  """In two bits; beside cache and weights a step takes as good as nothing."""
  decode = importlib.import_module(STEPS).decode
  options = {"model": "llama-2-7b", "cache": "hadamard2"}
  need = {}
  # CPUs widen bfloat16 weights, which are widened beforehand therefore.
  for tokens in (8192, 10**6):
    built = decode(jax.devices()[:1], tokens=tokens, dtype="float32", **options)
    found = built.function.lower(*built.arguments).compile().memory_analysis()
    need[tokens] = found.temp_size_in_bytes
    cache = next(x for x in built.arguments if isinstance(x, rj.kv.KVCache))
  assert need[10**6] - need[8192] < 2e7
  weights = 2 * built.facts["parameters"]
  total = bytes_each(cache) + weights + need[10**6]
  assert total < chips.MACHINES["a100"].chip.hbm_bytes


def test_the_compiler_s_report_of_memory_is_read():
  found = compiling.buffers(REPORT)
  assert found == [
    {"nbytes": 16 << 30, "shape": "f32[32768,4], s32[32768]"},
    {"nbytes": 512 << 20, "shape": "2\u00d7bf16[131072,2048]"},
    {"nbytes": 512, "shape": "pred[]"},
  ]
  text = (
    "  %a = bf16[131072,2048]{1,0} fusion(%b), "
    'metadata={op_name="jit(f)/sort" stack_frame_id=3}'
  )
  assert compiling.source_of("2\u00d7bf16[131072,2048]", text) == "jit(f)/sort"
  assert compiling.source_of("f32[1]", text) == ""
