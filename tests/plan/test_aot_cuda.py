"""What XLA makes of the library's programs on GPUs that are not there.

Compiles with JAX's CUDA plugin, which is not in every environment: `pytest -m
aot_cuda`. Without a GPU it calls no cuDNN: hops are XLA's loops.
"""

from __future__ import annotations

import json

import pytest

from ringjax.errors import OptionError
from ringjax.plan.compiler import aot
from ringjax.plan.compiler.target import GpuTarget, target
from tests.launch.test_plan import ask
from tests.plan.test_aot import GEMMA, LATENT, MIXTURE, MODEL

STEPS = "ringjax.bench.steps"
HOST = "h100:8"
TOKENS = 1 << 17
MISSING = aot.missing(HOST)
needs_plugin = [
  pytest.mark.aot_cuda,
  pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


def compiled(program, topology=HOST, **options):
  options = {"tokens": TOKENS} | options
  return aot.compile(f"{STEPS}:{program}", topology, options, timeout_s=3600)


class TestCompiled:
  """With JAX's CUDA plugin."""

  pytestmark = needs_plugin

  @pytest.mark.parametrize(
    ("strategy", "options"),
    [
      ("striped", {}),
      ("ring", {"dtype": "float32"}),
      ("zigzag", {}),
      ("bidirectional", {}),
      ("ring_q", {}),
      ("ulysses", {}),
      ("hybrid:4", {}),
      ("two_level:4", {}),
      ("halo", {"window": 4096}),
      ("documents", {"packed": True}),
      ("gather", {}),
    ],
  )
  def test_attention_and_its_gradients_take_tiles(self, strategy, options):
    """No array of all queries by all keys, even of one head on one shard."""
    found = compiled(
      "attention", what="backward", strategy=strategy, heads=8, kv_heads=8,
      **options,
    )  # fmt: skip
    assert found.fits
    scores = 4 * 8 * (TOKENS // 8) ** 2
    assert found.memory.temporaries < scores / 2
    assert found.sent

  @pytest.mark.parametrize(
    ("model", "cache"),
    [
      (MODEL, "dense"),
      (MODEL, "int8"),
      (MODEL, "int4"),
      (MODEL, "float8"),
      (MODEL, "hadamard3"),
      (LATENT, "dense"),
      (LATENT, "int8"),
      (GEMMA, "windowed"),
      (MIXTURE, "dense"),
    ],
    ids=lambda x: x if isinstance(x, str) else x["model_type"],
  )
  def test_a_step_copies_no_layer_of_a_cache_or_of_experts(self, model, cache):
    """Codes, and keys of more than 256 numbers, pass in tiles of 64 MiB."""
    found = compiled(
      "decode", model=model, cache=cache, batch=8, shard=None, tokens=1 << 20
    )
    nbytes = found.facts["cache_bytes"]["device"]
    assert found.fits
    # All but numbers of a few bytes is updated in place.
    assert found.memory.aliased > nbytes - 1024
    tiles = model is LATENT or cache not in ("dense", "windowed")
    assert found.memory.temporaries < (144 << 20 if tiles else 16 << 20)

  @pytest.mark.parametrize(
    ("program", "options"),
    [
      ("prefill", {}),
      ("prefill", {"chunk": 8192}),
      ("verify", {"drafted": 4, "tree": True}),
      ("train", {"remat": "attention"}),
      ("train", {"model": MIXTURE}),
    ],
  )
  def test_programs_of_a_model_compile_on_two_axes(self, program, options):
    options = {"model": MODEL, "mesh": [["seq", 4], ["model", 2]]} | options
    found = compiled(program, shard=None, **options)
    assert found.fits
    shard = 4 * TOKENS // 4
    logits = shard * MODEL["vocab_size"]
    # Tokens of a mixture are copied for each of their experts.
    copies = shard * MODEL["hidden_size"] * MIXTURE["num_experts_per_tok"]
    mixture = options["model"] is MIXTURE
    assert found.memory.temporaries < 2 * logits + 4 * copies * mixture
    assert found.traffic is None or found.traffic.total > 0

  @pytest.mark.parametrize("name", ["answers", "drafts", "prompts"])
  @pytest.mark.parametrize("kind", ["dense", "int8"])
  def test_an_engines_calls_compile(self, name, kind):
    found = aot.compile(
      "tests.plan.engine_calls:call",
      "h100:4",
      {
        "model": MODEL, "name": name, "kind": kind, "page": 128,
        "tokens": 1 << 15,
      },
      timeout_s=3600,
    )  # fmt: skip
    assert found.fits
    assert found.memory.aliased >= found.facts["pool"]

  def test_a_cache_that_does_not_fit_two_hosts(self):
    found = compiled(
      "decode", "h200:2x4", model="llama-3.1-8b", tokens=1 << 24, shard=None
    )
    assert found.devices == 8
    assert not found.fits
    # 131,072 bytes a token, and the weights on each device.
    assert found.needed_bytes > (1 << 24) * 131072 // 8 + 16e9
    assert found.limit_bytes == 141_000_000_000
    assert found.memory is None

  def test_the_command_prints_memory_and_sends(self, tmp_path):
    text = tmp_path / "program.hlo"
    ran = ask(
      "aot", f"--topology={HOST}", "--what=attention", "--json",
      f"--tokens={TOKENS}", f"--hlo={text}", "--buffers=4",
    )  # fmt: skip
    record = json.loads(ran.out)
    assert record["fits"]
    sizes = [buffer["nbytes"] for buffer in record["largest"]]
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True)
    # Queries of 8 heads of 128 numbers, on one of 8 shards, in bfloat16.
    assert sizes[0] >= 8 * 128 * TOKENS // 8 * 2
    assert "jit" in record["largest"][0]["source"]
    assert record["schedule"] is None
    assert record["sent"]["collective-permute"] > 0
    assert record["versions"].keys() > {"jax"}
    assert "collective-permute" in text.read_text()


class TestTargets:
  def test_a_name_says_hosts_and_gpus(self):
    assert target("h100:8") == GpuTarget("h100", 1, 8)
    assert target("H200:2x4") == GpuTarget("h200", 2, 4)
    assert target("h200:2x4").devices == 8
    assert target("h100:1").hbm_bytes == 84_900_000_000
    assert target("v5e:4x4").devices == 16

  @pytest.mark.parametrize(
    "name", ["h100", "h100:", "h100:0", "h100:2x4x8", "h100:-1", "a100x:8", ""]
  )
  def test_other_names_are_refused(self, name):
    with pytest.raises(OptionError, match="topology"):
      target(name)

  def test_options_of_libtpu_are_refused_for_gpus(self):
    for option in (
      {"flags": ["--xla_x=1"]}, {"kernels": {"a": 1}}, {"code": True},
      {"simulate": True},
    ):  # fmt: skip
      with pytest.raises(OptionError, match="nothing for GPUs"):
        aot.compile(f"{STEPS}:attention", HOST, {"tokens": TOKENS}, **option)
