"""Answers and prompts of a step pass the products of a layer in one program."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models.weights.coded_weights import KINDS
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops import flat_product_tpu
from ringjax.ops.experts import grouped_product_tpu
from ringjax.ops.experts.grouped_product_tpu import GroupedProductTPU
from ringjax.ops.flat_product_tpu import FlatProductTPU
from ringjax.serve import Engine, Request
from ringjax.serve.calls import compute, compute_step
from ringjax.serve.engine_config import EngineConfig
from ringjax.serve.tiling import row_tile
from tests import checkpoints, eagle_heads, predicting
from tests.infer import test_dflash_draft
from tests.models import test_gguf_stored

LONG, SLOW = pytest.mark.long, pytest.mark.slow
TILE = 16
DRAFTS = "lookup:count=2,adapt=false"
TREES = "early:layers=2,widths=(2,3),adapt=false"
# Sizes that the kernel multiplies.
WIDE = dict(
  model_type="llama",
  vocab_size=300,
  hidden_size=256,
  intermediate_size=384,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=128,
  max_position_embeddings=512,
)

# Heads of half of the lanes, of an odd number.
NARROW = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=64)
MIXTURE = dict(
  model_type="qwen3_moe",
  num_experts=6,
  num_experts_per_tok=2,
  moe_intermediate_size=128,
)


@dataclasses.dataclass(frozen=True)
class OnCPU(FlatProductTPU):
  """The kernel by an interpreter, in which unwritten numbers are NaN."""

  interpret: bool | pltpu.InterpretParams = True

  def __post_init__(self):
    # A CPU has no vector memory.
    object.__setattr__(self, "chip", None)


class ExpertsOnCPU(GroupedProductTPU):
  """The kernel for experts by an interpreter."""

  def __init__(self, chip=None):
    super().__init__(interpret=True)


@pytest.fixture
def kernel(monkeypatch):
  monkeypatch.setitem(flat_product_tpu.FLAT_PRODUCTS, "cpu", (OnCPU,))
  experts = grouped_product_tpu.GROUPED_PRODUCTS
  monkeypatch.setitem(experts, "cpu", (ExpertsOnCPU,))
  compute_step.clear_cache()
  yield
  compute_step.clear_cache()


@pytest.fixture(scope="module")
def sinks():
  """A dense model with windows and sinks in two layers of three."""
  config = checkpoints.config("mimo_v2_flash")
  config["mlp_layer_types"] = ["dense"] * 3
  return rj.models.create(config, seed=0)


def engine(model, **options):
  settings = dict(rows=4, longest=96, page=16, piece=16, pieces=2)
  return Engine(model, **settings | dict(row_tile=TILE) | options)


def drawn(model, *sizes):
  rng = np.random.default_rng(0)
  return [
    rng.integers(0, model.config.vocab, n).astype(np.int32) for n in sizes
  ]


def request(prompt, count, **options):
  return Request(prompt=prompt, max_new_tokens=count, logprobs=2, **options)


def numbers(handle):
  answer = handle.result().answers[0]
  return answer.tokens, answer.logprobs


def in_a_crowd(model, first, **options):
  """Numbers of a request in an engine where prompts come and go."""
  others = drawn(model, 20, 1, 33, 16, 7)
  crowd, steps = engine(model, **options), 0
  handle = crowd.submit(first)
  while crowd.step() or others:
    steps += 1
    # Steps of prompts alone, of both, and of answers alone.
    if others and steps % 3 == 0:
      crowd.submit(request(others.pop(), 2 + len(others) % 3))
  return numbers(handle)


def check_company(model, adapter="", **options):
  """A request has its bits alone and in a crowd, and tokens of two calls."""
  (prompt,) = drawn(model, 37)
  first = lambda: request(prompt, 14, adapter=adapter)
  alone = engine(model, **options)
  assert not alone.calls_apart
  wanted = numbers(alone.submit(first()))
  assert in_a_crowd(model, first(), **options) == wanted
  apart = engine(model, **options | dict(row_tile=0, prompt_tile=0))
  assert apart.calls_apart
  tokens, logprobs = numbers(apart.submit(first()))
  assert tokens == wanted[0]
  values = lambda entries: [entry.logprob for entry in entries]
  np.testing.assert_allclose(values(wanted[1]), values(logprobs), atol=1e-4)
  return wanted[0]


@pytest.mark.parametrize(
  ("family", "options"),
  [
    pytest.param("llama3", {}, marks=LONG),
    pytest.param("gemma3_text", {}, marks=LONG),
    pytest.param("llama_dynamic", {}, marks=SLOW),
    pytest.param("qwen2_window", {}, marks=SLOW),
    pytest.param("falcon_7b", {}, marks=SLOW),
    pytest.param("cohere", {}, marks=SLOW),
    pytest.param("olmo2", {}, marks=SLOW),
    pytest.param("seed_oss", {}, marks=SLOW),
    pytest.param("llama3", dict(cache_kind="int8"), marks=SLOW),
    pytest.param("llama3", dict(layout="contiguous"), marks=SLOW),
    pytest.param("llama3", dict(row_tile=8), marks=SLOW),
    pytest.param("llama3", dict(cache_kind="int4"), marks=SLOW),
    pytest.param("mixtral", {}, marks=LONG),
    pytest.param("qwen2_moe", {}, marks=SLOW),
    pytest.param("gpt_oss", {}, marks=SLOW),
    pytest.param("gpt_oss", dict(cache_kind="int4"), marks=SLOW),
    pytest.param("llama4_text", {}, marks=SLOW),
    pytest.param("deepseek_v3", {}, marks=LONG),
    pytest.param("deepseek_v2_lite", {}, marks=SLOW),
    pytest.param("llama3", dict(speculate=DRAFTS), marks=LONG),
    pytest.param("gpt_oss", dict(speculate=TREES), marks=SLOW),
  ],
)
def test_prompts_at_its_side_leave_an_answer_its_bits(loaded, family, options):
  check_company(loaded(family)[0], **options)


@pytest.mark.parametrize(
  ("family", "codes"),
  [
    pytest.param("llama3", "nf4", marks=LONG),
    pytest.param("llama3", "int8", marks=SLOW),
    pytest.param("llama3", "int4", marks=SLOW),
    pytest.param("llama3", "mxfp4", marks=SLOW),
    pytest.param("seed_oss", "int8", marks=SLOW),
    pytest.param("mixtral", "int4", marks=SLOW),
    pytest.param("qwen2_moe", "int8", marks=SLOW),
    pytest.param("deepseek_v3", "nf4", marks=SLOW),
  ],
)
def test_weights_of_codes_leave_an_answer_its_bits(loaded, family, codes):
  check_company(coded(loaded(family)[0], codes))


@pytest.mark.slow
def test_drafts_are_checked_by_weights_of_codes(kernel):
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  one_device = rj.models.create(WIDE | dict(vocab_size=12), seed=0)
  model = rj.models.place(coded(one_device, "int8"), mesh)
  options = dict(mesh=mesh, speculate="lookup:count=3,adapt=false")
  (prompt,) = drawn(model, 37)
  at = engine(model, **options)
  assert not at.calls_apart
  wanted = numbers(at.submit(request(prompt, 14)))
  assert at.counters.accepted
  assert in_a_crowd(model, request(prompt, 14), **options) == wanted
  plain = numbers(engine(model, mesh=mesh).submit(request(prompt, 14)))
  assert wanted[0] == plain[0]


@pytest.mark.long
@pytest.mark.parametrize(
  "make",
  [
    functools.partial(predicting.model, "llama3"),
    eagle_heads.model,
    test_dflash_draft.model,
  ],
)
def test_a_layer_that_drafts_keeps_two_calls(make):
  attend = CachedAttention()
  reason = row_tile(make(), EngineConfig(), attend, "tpu")[1]
  assert "layers other than attention and a feedforward" in reason


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_added_to_codes(loaded, merged):
  """Adapters of rows, and one that is added to frozen codes (QLoRA)."""
  model = coded(loaded("llama3")[0], "nf4")
  lora, params = adapters_of(model)
  if merged:
    check_company(lora.merged(params, model))
  else:
    check_company(model, adapters={"a": (lora, params)}, adapter="a")


def adapters_of(model):
  """Adapters with weights that are not zero."""
  lora = rj.train.Lora(rank=2)
  fill = lambda x: np.asarray(
    np.random.default_rng(1).standard_normal(x.shape) * 0.3, np.float32
  )
  params = {p: {"a": x["a"], "b": fill(x["b"])}
            for p, x in lora.start(model, seed=1).items()}  # fmt: skip
  return lora, params


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["int4", "mxfp4"])
def test_groups_of_codes_may_end_after_their_inputs(codes):
  odd = dict(hidden_size=80, intermediate_size=112, head_dim=20)
  config = WIDE | odd | dict(num_hidden_layers=2)
  check_company(coded(rj.models.create(config, seed=0), codes))


def coded(model, codes):
  return rj.models.with_coded_weights(model, **KINDS[codes])


@pytest.mark.parametrize(
  ("family", "axes", "codes"),
  [
    pytest.param("llama3", dict(model=2), None, marks=LONG),
    pytest.param("llama3", dict(seq=2, model=2), None, marks=SLOW),
    pytest.param("gemma3_text", dict(seq=4), None, marks=SLOW),
    pytest.param("olmo2", dict(model=4), None, marks=SLOW),
    pytest.param("llama3", dict(seq=2, model=2), "int8", marks=SLOW),
    pytest.param("llama3", dict(model=2), "int4", marks=SLOW),
  ],
)
def test_shards_of_heads_and_of_the_sequence_keep_bits(
  loaded, family, axes, codes
):
  model, mesh = placed(loaded(family)[0], axes)
  check_company(model if codes is None else coded(model, codes), mesh=mesh)


def placed(model, axes, **rules):
  """A model on a mesh of these axes, and the mesh."""
  devices = jax.devices()[: math.prod(axes.values())]
  mesh = rj.make_mesh((*axes.values(),), (*axes,), devices=devices)
  rules = rj.models.Rules(**rules)
  return rj.models.place(model, mesh, rules=rules), mesh


@pytest.mark.parametrize(
  ("family", "axes", "experts", "codes"),
  [
    pytest.param("olmoe", dict(expert=2), "expert", None, marks=LONG),
    pytest.param("olmoe", dict(model=2), None, None, marks=SLOW),
    pytest.param("olmoe", dict(seq=2), None, None, marks=SLOW),
    pytest.param("olmoe", dict(seq=2), "seq", None, marks=SLOW),
    pytest.param("qwen2_moe", dict(model=2), "model", None, marks=SLOW),
    pytest.param(
      *("qwen2_moe", dict(expert=2, model=2), "expert", None), marks=SLOW
    ),
    pytest.param("gpt_oss", dict(model=2), None, None, marks=SLOW),
    pytest.param(*("gpt_oss", dict(seq=2), "seq", None), marks=SLOW),
    pytest.param("gemma4_moe", dict(model=2), None, None, marks=SLOW),
    pytest.param(
      "deepseek_v3", dict(seq=2, model=2), ("seq", "model"), None, marks=SLOW
    ),
    pytest.param("olmoe", dict(model=2), "model", "int4", marks=SLOW),
    pytest.param("olmoe", dict(model=2), None, "int8", marks=SLOW),
  ],
)
def test_experts_on_a_mesh_leave_an_answer_its_bits(
  loaded, family, axes, experts, codes
):
  model = loaded(family)[0]
  model = model if codes is None else coded(model, codes)
  model, mesh = placed(model, axes, experts=experts)
  check_company(model, mesh=mesh)


@pytest.mark.slow
def test_windows_and_sinks_keep_their_bits(sinks):
  check_company(sinks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "kind", ["wide", "narrow", "mixture", "int8", "int4", "nf4"]
)
def test_the_kernel_leaves_an_answer_its_bits(kernel, kind, dtype):
  """Undefined numbers of tiles without tokens reach no token."""
  # Without a mesh a program counts as one for all devices.
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  config = WIDE | dict(narrow=NARROW, mixture=MIXTURE).get(kind, {})
  one_device = rj.models.create(config, seed=0, dtype=dtype)
  if kind in KINDS:
    one_device = coded(one_device, kind)
  model = rj.models.place(one_device, mesh)
  attend = CachedAttention(mesh=mesh)
  assert row_tile(model, EngineConfig(), attend, "tpu") == (128, "")
  (prompt,) = drawn(model, 37)
  wanted = numbers(engine(model, mesh=mesh).submit(request(prompt, 9)))
  assert in_a_crowd(model, request(prompt, 9), mesh=mesh) == wanted
  if dtype == "float32":
    want = rj.infer.generate(one_device, [prompt], max_new_tokens=9)
    assert wanted[0] == want[0].tolist()


def stored_codes(folder, kinds):
  """A model whose maps are blocks of a GGUF file, and its mesh of a device."""
  sizes = dict(hidden_size=256, intermediate_size=512, head_dim=64)
  path = test_gguf_stored.file_of_kinds(folder, "llama", kinds, **sizes)
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  load = functools.partial(rj.models.load, path, mesh=mesh, dtype="float32")
  return load(weights="stored"), mesh


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kinds", "options"),
  [
    ({"ffn_down": "Q6_K", "blk": "Q4_K"}, dict(speculate=DRAFTS)),
    ({"blk.0.attn_v": "Q6_K", "blk": "Q4_K"}, {}),
  ],
)
def test_k_quants_pass_in_tiles(tmp_path, kernel, kinds, options):
  """Blocks of 256 weights of a GGUF file, of which layers may have others."""
  model, mesh = stored_codes(tmp_path, kinds)
  attend = CachedAttention(mesh=mesh)
  assert row_tile(model, EngineConfig(), attend, "tpu") == (128, "")
  check_company(model, mesh=mesh, **options)


@pytest.mark.slow
def test_groups_of_sixteen_codes_keep_two_calls(tmp_path, kernel):
  model, mesh = stored_codes(tmp_path, {"blk": "Q3_K"})
  attend = CachedAttention(mesh=mesh)
  tile, reason = row_tile(model, EngineConfig(), attend, "tpu")
  assert tile == 0 and "groups of 16" in reason


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, "model"])
def test_the_kernel_runs_shards_of_experts(kernel, experts):
  config = WIDE | MIXTURE | dict(moe_intermediate_size=256)
  one_device = rj.models.create(config, seed=0, dtype="bfloat16")
  model, mesh = placed(one_device, dict(model=2), experts=experts)
  (prompt,) = drawn(model, 37)
  wanted = numbers(engine(model, mesh=mesh).submit(request(prompt, 9)))
  assert in_a_crowd(model, request(prompt, 9), mesh=mesh) == wanted


@pytest.mark.parametrize(
  ("codes", "options"),
  [
    pytest.param(None, {}, marks=LONG),
    pytest.param("int8", dict(cache_kind="int8"), marks=SLOW),
    pytest.param("int4", dict(cache_kind="int4"), marks=SLOW),
    pytest.param("int4", dict(speculate=DRAFTS), marks=SLOW),
  ],
)
def test_a_later_turn_reads_the_pages_of_the_turn_before(
  loaded, codes, options
):
  """Chunks begin elsewhere where a prefix is there; answers have their bits."""
  model, _ = loaded("llama3")
  model = model if codes is None else coded(model, codes)
  (first,) = drawn(model, 40)
  again = engine(model, **options)
  tokens = numbers(again.submit(request(first, 8)))[0]
  second = np.concatenate([first, np.asarray([*tokens, 5, 6, 7], np.int32)])
  handle = again.submit(request(second, 8))
  turn = numbers(handle)
  assert handle.cached_tokens == 32
  assert numbers(engine(model, **options).submit(request(second, 8))) == turn
  assert in_a_crowd(model, request(second, 8), **options) == turn


@pytest.mark.long
def test_a_step_compiles_one_program_whatever_it_holds(loaded):
  model, _ = loaded("llama3")
  # Sizes that no other test has.
  at = engine(model, rows=3, pieces=3, longest=80)
  count = lambda: (compute_step._cache_size(), compute._cache_size())
  old_counts = count()
  old_pool = jax.device_get(at._pool)
  at.warm_up()
  equal = jax.tree.map(np.array_equal, old_pool, jax.device_get(at._pool))
  assert all(jax.tree.leaves(equal))
  for prompt in drawn(model, 40, 5, 33, 2):
    at.submit(request(prompt, 6))
    at.step()
  at.run()
  assert count() == (old_counts[0] + 1, old_counts[1])


@pytest.mark.parametrize(
  ("family", "options", "reason"),
  [
    ("llama3", dict(layer_parts=2), "layer_parts"),
    ("llama3", dict(prompt_tile=8), "prompt_tile"),
    pytest.param("qwen3_next", {}, "attention and", marks=LONG),
    pytest.param("deepseek_v32", {}, "an index of its keys", marks=LONG),
    pytest.param("gemma3n", {}, "attention and", marks=LONG),
    pytest.param("llama3", dict(mesh="data"), "shards the rows", marks=LONG),
  ],
)
def test_what_keeps_two_calls_is_named(loaded, family, options, reason):
  model, _ = loaded(family)
  mesh = None
  if axis := options.pop("mesh", None):
    mesh = rj.make_mesh((2,), (axis,), devices=jax.devices()[:2])
  attend = CachedAttention(mesh=mesh)
  default = EngineConfig(**options)
  tile, answer = row_tile(model, default, attend, "tpu")
  assert tile == 0 and reason in answer
  requested = EngineConfig(row_tile=TILE, **options)
  with pytest.raises(OptionError, match=reason):
    row_tile(model, requested, attend, "cpu")


@pytest.mark.long
def test_rows_have_their_adapters(loaded):
  model, _ = loaded("llama3")
  lora, params = adapters_of(model)
  adapters = {"tuned": (lora, params)}
  tuned = check_company(model, adapters=adapters, adapter="tuned")
  assert tuned != check_company(model, adapters=adapters)
  (prompt,) = drawn(model, 37)
  merged = lora.merged(params, model)
  want = rj.infer.generate(merged, [prompt], max_new_tokens=14)
  assert tuned == want[0].tolist()


@pytest.mark.long
def test_other_maps_keep_two_calls(loaded):
  model, _ = loaded("llama3")
  attend = CachedAttention()
  odd = rj.models.create(WIDE | dict(intermediate_size=200), seed=0)
  reason = row_tile(odd, EngineConfig(), attend, "tpu")[1]
  assert "by no kernel" in reason
  assert row_tile(model, EngineConfig(row_tile=0), attend, "tpu")[0] == 0
  assert row_tile(model, EngineConfig(), attend, "gpu")[0] == 0
  mesh = rj.make_mesh((2,), ("model",), devices=jax.devices()[:2])
  placed = rj.models.place(model, mesh, rules=rj.models.Rules(ffn=None))
  attend = CachedAttention(mesh=mesh)
  reason = row_tile(placed, EngineConfig(), attend, "tpu")[1]
  assert "other rules" in reason


@pytest.mark.long
def test_experts_that_keep_two_calls_are_named(loaded):
  def reason_of(model, mesh):
    return row_tile(model, EngineConfig(), CachedAttention(mesh=mesh), "tpu")[1]

  mixture = loaded("mixtral")[0]
  model, mesh = placed(mixture, dict(model=2), ffn=None)
  assert "experts' gate sharded by other rules" in reason_of(model, mesh)
  model, mesh = placed(loaded("muse_spark")[0], dict(model=2))
  assert "a norm of the outputs of experts" in reason_of(model, mesh)
  model, mesh = placed(loaded("olmoe")[0], dict(expert=2), experts="expert")
  seq_mesh = rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
  assert "which the engine's has not" in reason_of(model, seq_mesh)


@pytest.mark.slow
def test_the_page_of_one_program_is_what_its_script_prints():
  root = pathlib.Path(__file__).resolve().parents[2]
  page = subprocess.run(
    [sys.executable, root / "docs/one_program.py"],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  assert page == (root / "docs/one_program.md").read_text()
