"""Compiled programs send and write only what they must, on every mesh."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench.program import CompiledProgram
from tests.contracts import program
from tests.contracts.program import Case
from tests.helpers import make_mesh

# Shapes stand for arrays here, which the hook's types do not know.
pytestmark = pytest.mark.usefixtures("unchecked")

# In the default run; the other cases are long.
FIRST = {
  Case("decode"),
  Case("decode", mesh="seq_model"),
  Case("decode", mesh="data_seq_model"),
  Case("decode", "mixture"),
  Case("verify"),
  Case("verify_tree", mesh="seq_model"),
  Case("prefill", "windowed"),
  Case("prefill", mesh="seq_model"),
  Case("prefill", "latent", "seq_model"),
  Case("chunk", mesh="seq_model", capacity=1 << 18),
  Case("serve_answers", mesh="data_seq_model", cache="windowed"),
  Case("serve_prompts", mesh="seq_model", cache="windowed"),
}
# Cases of phases and families that not every mesh has.
OTHERS = (
  ("chunk", "dense", "seq"),
  ("chunk", "dense", "data_model"),
  ("chunk", "dense", "model"),
  ("chunk", "dense", "replica_seq"),
  ("chunk", "dense", "seq_model"),
  ("chunk", "latent", "seq_model"),
  ("chunk", "latent", "data_seq"),
  ("chunk", "mixture", "data_seq_model"),
  ("chunk", "windowed", "seq"),
  ("chunk", "hybrid", "data_seq_model"),
  ("chunk", "indexed", "seq_model"),
  ("chunk", "two_kv_heads", "seq_model"),
  ("decode", "dense", "data_model"),
  ("decode", "dense", "replica_seq"),
  ("decode", "hybrid", "seq_model"),
  ("decode", "indexed", "seq_model"),
  ("decode", "mixture", "seq_expert"),
  ("decode", "mixture", "all_axes"),
  ("decode", "three_heads", "data_seq_model"),
  ("decode", "three_heads", "seq_model"),
  ("decode", "two_kv_heads", "seq_model"),
  ("decode_codes", "dense", "model"),
  ("decode_codes", "dense", "data_seq_model"),
  ("prefill", "hybrid", "seq"),
  ("prefill", "hybrid", "seq_model"),
  ("prefill", "indexed", "seq"),
  ("prefill", "indexed", "seq_model"),
  ("tiles_striped", "dense", "seq"),
  ("tiles_striped", "dense", "seq_model"),
  ("tiles_zigzag", "dense", "data_seq_model"),
  ("tiles_ring", "dense", "seq"),
  ("train", "dense", "seq"),
  ("train", "dense", "seq_model"),
  ("train", "latent", "seq_model"),
  ("train", "mixture", "data_seq"),
)
KINDS = ("windowed", "int8", "int4", "float8", "hadamard3", "unrotated")
# Kinds of caches of few cases, by call.
CACHED = {
  "cached_decode": (
    "kivi4",
    "nuq4",
    "snapkv",
    "h2o",
    "dense:device=4096,room=1024",
  ),
  "cached_chunk": ("windowed", "int4", "unrotated", "snapkv", "h2o"),
  "cached_verify": ("snapkv",),
  "cached_tree": ("windowed", "int4", "snapkv"),
}
SERVED = ("serve_prompts", "serve_answers", "serve_drafts", "serve_trees")


def cases():
  for phase, family, mesh in itertools.product(
    ("decode", "verify", "verify_tree", "prefill"),
    program.FAMILIES,
    program.MESHES,
  ):
    yield Case(phase, family, mesh)
  for phase, family, mesh in OTHERS:
    # A shard's cache is larger than what a chunk reads of it at once.
    capacity = 1 << 18 if phase == "chunk" else 1 << 16
    rows = 4 if mesh in program.OTHER_MESHES else 2
    yield Case(phase, family, mesh, rows=rows, capacity=capacity)
  for phase, kind, mesh in itertools.product(
    ("decode", "verify"), KINDS, program.MESHES
  ):
    # Codes of a layer are larger than a decoded tile.
    yield Case(phase, mesh=mesh, cache=kind, capacity=1 << 18)
  for phase, kinds in CACHED.items():
    for kind in kinds:
      yield Case(phase, "dense", "data_seq_model", kind, capacity=1 << 18)
  # One program for answers and prompts, where no axis shards the rows.
  for mesh in ("seq", "model", "seq_model"):
    yield Case("serve_step", mesh=mesh, cache="windowed")
  # Rows that a mesh axis does not divide.
  yield Case("decode", mesh="data_seq", rows=3)
  for phase, family, mesh in itertools.product(
    SERVED,
    (*program.FAMILIES, "hybrid", "indexed"),
    (*program.MESHES, "seq_expert", "all_axes"),
  ):
    drafts = phase in ("serve_drafts", "serve_trees")
    sharded_experts = mesh in program.EXPERT_MESHES
    if (drafts and family == "hybrid") or (
      sharded_experts and family != "mixture"
    ):
      continue
    yield Case(phase, family, mesh, "windowed")
  for phase, kind, mesh in itertools.product(
    ("serve_prompts", "serve_answers"), ("int8", "int4"), program.MESHES
  ):
    yield Case(phase, mesh=mesh, cache=kind, capacity=1 << 18)


def marked(case):
  marks = [] if case in FIRST else [pytest.mark.long]
  if case.phase == "train":
    marks.append(pytest.mark.slow)
  # Trees do as chains but for `keep`, which knows no family.
  trees = case.phase in ("verify_tree", "serve_trees")
  # An engine's calls do to weights and keys what sessions' do.
  others = case.phase in SERVED and case.mesh != "data_seq_model"
  if case not in FIRST and (others or (trees and case.family != "dense")):
    marks.append(pytest.mark.slow)
  return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("case", [*map(marked, cases())])
def test_a_program_sends_and_writes_only_what_it_must(case):
  faults = program.faults(case)
  assert not faults, "\n".join(map(str, faults))


def _sent_around(cache, mesh):
  """A ring that sends the keys of eight heads for each row of a latent."""

  def ring(rows):
    keys = jnp.tile(rows, (8, 1, 1, 1)) * 2.0
    hop = lambda _, x: lax.ppermute(
      x, "seq", [(i, (i + 1) % 8) for i in range(8)]
    )
    return lax.fori_loop(0, 7, hop, keys)[:2]

  spec = P(None, None, "seq")
  sent = jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)(cache[0])
  return cache.at[0].set(sent)


def _summed_in_each_step(cache, mesh):
  """A loop that sums a gradient over the shards in each of its steps."""

  def loop(rows):
    part = rows[0, 0, :512].T @ rows[0, 0, :512]
    step = lambda n, total: total + lax.psum(jnp.tile(part, (64, 1)) * n, "seq")
    total = lax.fori_loop(0, 64, step, jnp.zeros((512, 8)))
    return rows + jnp.sum(total)

  spec = P(None, None, "seq")
  added = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec)(
    cache[0]
  )
  return cache.at[0].set(added)


def _gathered(cache, mesh):
  return lax.with_sharding_constraint(cache, NamedSharding(mesh, P())) + 1


def _all_logits(cache, mesh):
  """The logits [T, V] of all tokens at once."""
  del mesh
  logits = jnp.tanh(cache[0] @ jnp.ones((8, 64)))
  return cache.at[0, 0, 0, 0, 0].add(jnp.max(jnp.sort(logits, -1)[..., 3]))


# Programs that do what no step may do to a cache [L, B, K, S, H]: the phase by
# whose law they are judged, the program, and words of the fault.
PLANTED = {
  "gather": ("decode", _gathered, "all-gather carries"),
  "copy": ("decode", lambda cache, _: cache + 1, "are written"),
  "layer": (
    "decode",
    lambda cache, _: lax.fori_loop(
      0, 4, lambda n, x: x + jnp.sum(jnp.sin(cache[n]) @ jnp.ones((8, 8))), 0.0
    ),
    "are written",
  ),
  "not_donated": (
    "decode",
    lambda cache, _: cache.at[0, 0, 0, 0, 0].set(1.0),
    "updated in place",
  ),
  "gathered_chunk": ("chunk", _gathered, "all-gather carries"),
  "keys_of_heads": ("prefill", _sent_around, "collective-permute carries"),
  "all_logits": ("train", _all_logits, "are written"),
  "sums_in_steps": ("train", _summed_in_each_step, "all-reduce carries"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault):
  """And its instruction is named, where there is one."""
  phase, planted, words = PLANTED[fault]
  mesh = make_mesh(8, "auto")
  sharding = NamedSharding(mesh, P(None, None, None, "seq"))
  shape = (4, 2, 2, 65536, 8)
  cache = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
  work = lambda cache: planted(cache, mesh)
  compiled = jax.jit(work).lower(cache).compile()
  analysis = compiled.memory_analysis()
  each = 4 * 4 * 2 * 2 * 8192 * 8
  sizes = program.Sizes(
    rows=2, tokens=1, layers=4, heads=2, value=8, keys=32, embed=16, vocab=64,
    seq=8, model=1, data=1,
  )  # fmt: skip
  reading = program.Reading(
    CompiledProgram(compiled.as_text()),
    analysis.temp_size_in_bytes,
    analysis.alias_size_in_bytes,
    each,
    each // 4,
    sizes,
  )
  faults = program.judged(reading, program.PHASES[phase])
  assert any(words in x.what for x in faults), faults
