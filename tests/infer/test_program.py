"""What the compiled prefill and decode steps send, keep and leave alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax import models
from ringjax.bench.program import Program
from ringjax.infer import Greedy, decode, prefill
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from tests import checkpoints
from tests.helpers import make_mesh

# Shapes stand for arrays here, which the hook's types do not know.
pytestmark = pytest.mark.usefixtures("unchecked")

SHARDS, BATCH = 8, 2
# Many layers, so that a copy of the cache cannot hide among activations.
LAYERS = 32
SMALL = 64


def sizes(name):
  config = checkpoints.config(name)
  heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
  return heads, kv, config["head_dim"]


@functools.cache
def operands(name, capacity, layers=LAYERS, batch=BATCH):
  """A model and a cache in the abstract, on eight devices."""
  mesh = make_mesh(SHARDS, "auto")
  config = {**checkpoints.config(name), "num_hidden_layers": layers}
  put = lambda x, sharding: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding
  )
  model = models.abstract(config, dtype=jnp.float32)
  # The shardings of a small cache, and the shapes of a large one.
  attend = ShardingContext(mesh=mesh, axis="seq")
  small = model.init_cache(batch, SMALL, sharding=attend, dtype=jnp.float32)
  large = lambda x: jax.ShapeDtypeStruct(
    tuple(capacity if n == SMALL else n for n in x.shape),
    x.dtype,
    sharding=x.sharding,
  )
  cache = jax.tree.map(large, small)
  model = jax.tree.map(lambda x: put(x, NamedSharding(mesh, P())), model)
  return mesh, model, cache


def array(mesh, shape, dtype=jnp.int32, spec=None):
  return jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, spec or P())
  )


@functools.cache
def step(name, capacity, layers=LAYERS):
  """The compiled step of decoding."""
  mesh, model, cache = operands(name, capacity, layers)
  one = lambda dtype=jnp.int32, shape=(BATCH,): array(mesh, shape, dtype)
  state = decode.DecodeState(one(), one(), one(jnp.bool_), None)
  return decode.step.lower(
    model,
    CachedAttention(mesh=mesh, axis="seq"),
    Greedy(),
    cache,
    state,
    one(shape=(1,)),
    one(shape=()),
  ).compile()


@functools.cache
def reading(name, method, tokens, layers=LAYERS, capacity=None):
  """The compiled program that reads a prompt, or a chunk of `tokens`."""
  return lowered(name, method, tokens, layers, capacity).compile()


def lowered(name, method, tokens, layers, capacity=None):
  """As it is before it is compiled."""
  mesh, model, cache = operands(name, capacity or tokens, layers)
  chunk = tokens if method == "chunked" else None
  options = prefill.PrefillConfig(method=method, chunk=chunk)
  how = options.plan(tokens, model, mesh, "seq")
  row = array(mesh, (BATCH, tokens))
  return prefill.read.lower(
    model,
    how.attend,
    row,
    row if chunk else None,
    row,
    cache,
    array(mesh, (BATCH,)),
    array(mesh, ()),
  )


@pytest.mark.parametrize("method", ["ring", "striped", "zigzag", "chunked"])
def test_a_program_has_no_numbers_for_each_token(method):
  """Which would take as long to compile as there are tokens."""
  short, long = (
    len(lowered("llama3", method, tokens, layers=2).as_text())
    for tokens in (131_072, 524_288)
  )
  assert long < 1.05 * short


def cache_bytes(name, capacity, layers=LAYERS):
  """On each device."""
  cache = operands(name, capacity, layers)[2]
  return (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // SHARDS
  )


def collectives(program):
  """(op, bytes, times) of all that is sent."""
  kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute",
           "reduce-scatter")  # fmt: skip
  return [
    (i.op.removesuffix("-start"), i.bytes, program.times[name])
    for name, c in program.computations.items()
    for i in c.values()
    if i.op.removesuffix("-start") in kinds
  ]


@pytest.mark.parametrize("capacity", [SMALL, 4096])
def test_a_step_sends_a_maximum_and_a_sum_a_layer(capacity):
  """Whatever the capacity; no key or value moves."""
  program = Program(step("llama3", capacity).as_text())
  heads, _, dim = sizes("llama3")
  rows = 4 * BATCH * heads
  sent = sorted(collectives(program))
  assert sent == [
    ("all-reduce", rows, LAYERS),
    ("all-reduce", rows * (dim + 1), LAYERS),
  ]


def test_a_step_of_latent_attention_sends_latents():
  """The sums are of the latent vector that stands for all heads' values."""
  program = Program(step("deepseek_v3", 4096, layers=4).as_text())
  config = checkpoints.config("deepseek_v3")
  rows = 4 * BATCH * config["num_attention_heads"]
  key = config["kv_lora_rank"] + config["qk_rope_head_dim"]
  sent = collectives(program)
  assert {op for op, _, _ in sent} == {"all-reduce"}
  assert sum(times for _, _, times in sent) == 2 * 4
  assert {n for _, n, _ in sent} == {rows, rows * (key + 1)}


@pytest.mark.parametrize("name", ["llama3", "gemma3_text"])
def test_a_step_copies_no_cache(name):
  """It is written in place, and read where it lies."""
  capacity = SHARDS * 2**15
  layers = LAYERS if name == "llama3" else 4
  analysis = step(name, capacity, layers).memory_analysis()
  cache = cache_bytes(name, capacity, layers)
  assert analysis.alias_size_in_bytes >= cache
  # A tile of keys and one of values, and the coordinates of the slots.
  assert analysis.temp_size_in_bytes < min(cache // 4, 8 << 20)


@pytest.mark.parametrize(
  "kind",
  [
    "dense",
    "int8",
    "unrotated",
    *(
      pytest.param(kind, marks=pytest.mark.long)
      for kind in ("bfloat16", "windowed", "kivi2", "sinks", "h2o", "fastgen")
    ),
  ],
)
def test_a_step_over_one_tile_copies_no_slots_of_all_layers(kind):
  """One row on one device: its slots are written in place in each layer."""
  layers = 8
  config = {**checkpoints.config("llama3"), "num_hidden_layers": layers}
  model = models.abstract(config, dtype=jnp.float32)
  cache = jax.eval_shape(
    lambda: model.init_cache(1, SMALL, dtype=jnp.float32, kind=kind)
  )
  one = lambda dtype=jnp.int32, shape=(1,): jax.ShapeDtypeStruct(shape, dtype)
  program = decode.step.lower(
    model,
    CachedAttention(),
    Greedy(),
    cache,
    decode.DecodeState(one(), one(), one(jnp.bool_), None),
    one(),
    one(shape=()),
  ).compile()
  slots = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  copies = [
    (i.shapes, program.times[name])
    for program in [Program(program.as_text())]
    for name, lines in program.computations.items()
    for i in lines.values()
    if i.op == "copy" and i.bytes >= slots // 2 and program.times[name] > 1
  ]
  assert not copies


def test_a_longer_cache_takes_no_more_room_in_a_step():
  temp = lambda n: (
    step("llama3", SHARDS * n).memory_analysis().temp_size_in_bytes
  )
  grown = cache_bytes("llama3", SHARDS * 2**15)
  assert temp(2**16) - temp(2**15) < grown / 50


@pytest.mark.one_case
@pytest.mark.parametrize("method", ["striped", "ring", "zigzag"])
def test_reading_sends_keys_around_and_nothing_else(method):
  """R - 1 sends a layer of a shard's own keys, and the last token's row."""
  tokens = SHARDS * 16
  program = Program(reading("llama3", method, tokens).as_text())
  _, kv, dim = sizes("llama3")
  own = 2 * 4 * BATCH * kv * (tokens // SHARDS) * dim
  sent = collectives(program)
  rings = [(n, times) for op, n, times in sent if op == "collective-permute"]
  keys = [(n, times) for n, times in rings if n == own]
  assert sum(times for _, times in keys) == LAYERS * (SHARDS - 1)
  # Besides them coordinates, and what the head reads of one row a prompt.
  assert all(n <= own // 8 for n, _ in rings if n != own)
  embed = checkpoints.config("llama3")["hidden_size"]
  others = [(op, n) for op, n, _ in sent if op != "collective-permute"]
  assert all(n <= 4 * BATCH * tokens for _, n in others), others
  assert sum(n for _, n in others) <= 4 * BATCH * (2 * tokens + 2 * embed)


@pytest.mark.long
@pytest.mark.parametrize(
  ("method", "part"),
  [("striped", 1 / 2), ("ulysses", 1 / 2), ("gather", 3 / 4)],
)
def test_reading_leaves_one_cache(method, part):
  """The cache is donated; what is alive beside it is about one layer's.

  To gather is to hold a layer's keys of all shards, here a quarter of a cache.
  """
  tokens = SHARDS * 2048
  analysis = reading("llama3", method, tokens).memory_analysis()
  cache = cache_bytes("llama3", tokens)
  assert analysis.alias_size_in_bytes >= cache
  assert analysis.temp_size_in_bytes < cache * part


def test_a_chunk_leaves_one_cache():
  """One layer of the cache is brought into another order, no more."""
  capacity = SHARDS * 2**14
  program = reading("llama3", "chunked", SHARDS * 16, capacity=capacity)
  analysis = program.memory_analysis()
  cache = cache_bytes("llama3", capacity)
  assert analysis.alias_size_in_bytes >= cache
  assert analysis.temp_size_in_bytes < cache // 4


def test_a_chunk_sends_queries_and_sums():
  """What is sent depends on the chunk, not on the cache."""
  sent = [
    sorted(
      collectives(
        Program(reading("llama3", "chunked", SHARDS * 8, capacity=n).as_text())
      )
    )
    for n in (SHARDS * 128, SHARDS * 512)
  ]
  assert sent[0] == sent[1]
  assert "collective-permute" not in {op for op, _, _ in sent[0]}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_nothing_is_as_long_as_the_prompt_and_as_wide_as_a_feedforward(name):
  """Neither F nor V numbers of each token are there at a time."""
  local = 4096 if name == "llama3" else 2048
  layers = 2
  config = checkpoints.config(name)
  wide = {config["intermediate_size"], config["vocab_size"]}
  assert len(wide) == 2 and not wide & {config["hidden_size"], local}
  program = Program(reading(name, "striped", SHARDS * local, layers).as_text())
  found = {
    dims
    for c in program.computations.values()
    for i in c.values()
    for _, dims in i.shapes
    if set(dims) & wide
  }
  assert found
  for dims in found:
    rows = 1
    for n in dims:
      rows *= 1 if n in wide else n
    assert rows < BATCH * local, dims


def test_experts_get_no_token_of_another_shard():
  """A mixture of experts sends nothing: its weights are everywhere."""
  tokens = SHARDS * 64
  program = Program(reading("mixtral", "striped", tokens, 2).as_text())
  embed = checkpoints.config("mixtral")["hidden_size"]
  shard = 4 * BATCH * (tokens // SHARDS) * embed
  for op, n, _ in collectives(program):
    assert op != "all-to-all"
    if op != "collective-permute":
      assert n < shard, (op, n)
