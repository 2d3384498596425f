"""Compiled steps, chunks and checks of drafts, by mesh and kind of cache.

A new kind of cache, or a new mesh, is one line of `KINDS` or of `MESHES`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import models
from ringjax.bench.program import Program
from ringjax.infer import Greedy, decode, prefill
from ringjax.infer.speculate import rounds
from ringjax.infer.speculate.drafter import Draft
from ringjax.kv.base import bytes_each
from ringjax.kv.kind_text import parse
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from tests import checkpoints
from tests.helpers import swept

# Shapes stand for arrays here, which the hook's types do not know.
pytestmark = pytest.mark.usefixtures("unchecked")

BATCH, LAYERS, CHUNK, DRAFTED = 4, 4, 32, 7
SIZES = {
  "vocab_size": 128,
  "intermediate_size": 96,
  "num_hidden_layers": LAYERS,
}
# Mesh, batch, query heads and kv heads.
MESHES = {
  "seq:8": (BATCH, 8, 8),
  "seq:2 x model:4": (BATCH, 8, 8),
  "seq:2 x model:4, two kv heads": (BATCH, 8, 2),
  "seq:2 x model:4, one kv head": (BATCH, 8, 1),
  "seq:2 x model:2, three heads": (BATCH, 3, 3),
  "data:2 x seq:4": (BATCH, 8, 8),
  "data:2 x seq:4, three rows": (3, 8, 8),
  "data:2 x seq:2 x model:2": (BATCH, 8, 8),
  "data:2 x seq:2 x model:2, three heads": (BATCH, 3, 3),
  "replica:2 x seq:4": (BATCH, 8, 8),
  "data:4 x model:2": (BATCH, 8, 8),
}
# Model and kind of cache.
KINDS = {
  "dense": ("llama3", "dense"),
  "unrotated": ("llama3", "unrotated"),
  "windowed": ("gemma3_text", "windowed:slack=16"),
  "int8": ("llama3", "int8"),
  "int4": ("gemma3_text", "int4:slack=16"),
  "kivi4": ("llama3", "kivi4"),
  "nuq4": ("llama3", "nuq4"),
  "evicting": ("llama3", "snapkv"),
  "evicting by sums": ("llama3", "h2o"),
  "tiered": ("llama3", "dense:device=4096,room=1024"),
  "latents": ("deepseek_v3", "dense"),
  "recurrent": ("qwen3_next", "dense"),
}
# What a kind cannot be: a tree of drafts moves states of one text alone.
CHAINS = ("recurrent", "evicting by sums")


def made_mesh(mesh, axis_type=None):
  """Mesh of a key of `MESHES`."""
  axes = [part.split(":") for part in mesh.split(",")[0].split(" x ")]
  names, sizes = zip(*((name, int(size)) for name, size in axes), strict=True)
  devices = jax.devices()[: math.prod(sizes)]
  if axis_type is None:
    return rj.make_mesh(sizes, names, devices=devices)
  types = (axis_type,) * len(names)
  return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


@functools.cache
def compiled(call, mesh, kind, capacity, axis_type=None):
  """A compiled call, and the bytes of keys and values on a device."""
  (batch, heads, kv_heads), (name, kind_text) = MESHES[mesh], KINDS[kind]
  sizes = SIZES | {"num_attention_heads": heads}
  if name != "deepseek_v3":
    sizes["num_key_value_heads"] = kv_heads
  else:
    sizes["num_key_value_heads"] = heads
  config = checkpoints.config(name) | sizes
  if config.get("layer_types"):
    config["layer_types"] = (config["layer_types"] * LAYERS)[:LAYERS]
  mesh = made_mesh(mesh, axis_type)
  axis = "seq" if "seq" in mesh.axis_names else None
  context = ShardingContext(mesh=mesh, axis=axis)
  mesh = context.mesh
  model = models.abstract(config, dtype=jnp.float32, mesh=mesh)
  cache = model.init_cache_spec(
    batch, capacity, sharding=context, kind=parse(kind_text)
  )
  whole = NamedSharding(mesh, P())
  array = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=whole
  )
  row = array(batch)
  state = decode.DecodeState(row, row, array(batch, dtype=jnp.bool_), None)
  attend = CachedAttention(mesh=mesh, axis=axis)
  if call == "step":
    lowered = decode.step.lower(
      model, attend, Greedy(), cache, state, array(1), array()
    )
  elif call == "chunk":
    options = prefill.PrefillConfig(method="chunked", chunk=CHUNK)
    attend = options.plan(CHUNK, model, mesh, axis).attend
    tokens = array(batch, CHUNK)
    lowered = prefill.read.lower(
      model, attend, tokens, tokens, tokens, cache, row, array()
    )
  else:
    parents = array(batch, DRAFTED) if call == "tree" else None
    draft = Draft(array(batch, DRAFTED), row, parents)
    lowered = rounds.verify.lower(
      model, attend, "match", Greedy(), cache, state, draft, row, array(4),
      array(),
    )  # fmt: skip
  return lowered.compile(), bytes_each(cache.slots)


def sent(program):
  """(op, bytes, times) of all that is sent."""
  kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute",
           "reduce-scatter")  # fmt: skip
  parsed = Program(program.as_text())
  return sorted(
    (i.op.removesuffix("-start"), i.bytes, parsed.times[name])
    for name, lines in parsed.computations.items()
    for i in lines.values()
    if i.op.removesuffix("-start") in kinds
  )


ALL_CASES = [
  *((call, mesh, "dense") for call in ("step", "chunk") for mesh in MESHES),
  *(
    (call, "data:2 x seq:2 x model:2", kind)
    for call in ("step", "chunk")
    for kind in KINDS
    if kind != "dense"
  ),
  *(("step", "seq:2 x model:4, two kv heads", k) for k in ("int8", "windowed")),
  *(
    (call, mesh, kind)
    for call in ("chain", "tree")
    for mesh in ("seq:2 x model:4", "data:2 x seq:4")
    for kind in ("dense", "windowed", "int4", "evicting")
  ),
]


@pytest.mark.parametrize(
  ("call", "mesh", "kind"),
  [
    ("step", "data:2 x seq:2 x model:2", "int8"),
    *swept(
      [x for x in ALL_CASES if x[::2] != ("step", "int8") or "two" in x[1]],
      [
        x for x in ALL_CASES if x[0] != "chunk" and x[2] in ("dense", "latents")
      ],
    ),
  ],
)
def test_what_is_sent_does_not_depend_on_the_capacity(call, mesh, kind):
  """No key moves: neither over the sequence nor over another mesh axis."""
  short, long = (compiled(call, mesh, kind, n)[0] for n in (1024, 4096))
  assert sent(short) == sent(long)


@pytest.mark.parametrize(
  ("call", "mesh", "kind"),
  swept(
    [
      *(
        (call, mesh, kind)
        for call in ("step", "chain", "tree")
        for mesh in (
          "seq:2 x model:4", "seq:2 x model:4, two kv heads",
          "data:2 x seq:2 x model:2, three heads",
        )
        for kind in KINDS
        if kind not in ("tiered", "nuq4")
        and (call != "tree" or kind not in CHAINS)
        and ("heads" not in mesh or "evicting" not in kind)
      ),
      ("step", "seq:8", "dense"),
    ],
    [
      ("tree", "seq:2 x model:4, two kv heads", "dense"),
      ("chain", "seq:2 x model:4", "recurrent"),
    ],
  ),
)  # fmt: skip
def test_no_call_copies_the_cache(call, mesh, kind):
  """What a longer cache needs more besides it is coordinates and sums."""
  (short, less), (long, more) = (
    compiled(call, mesh, kind, n) for n in (1 << 16, 1 << 17)
  )
  temporaries = [x.memory_analysis().temp_size_in_bytes for x in (short, long)]
  assert long.memory_analysis().alias_size_in_bytes >= more
  # A layer's keys and values are a quarter.
  assert temporaries[1] - temporaries[0] < (more - less) / 5


@pytest.mark.long
def test_a_step_is_the_same_on_automatic_and_explicit_axes():
  case = ("step", "seq:2 x model:4", "dense", 1024)
  types = AxisType.Auto, AxisType.Explicit
  for axis_type in types:
    mesh = made_mesh("seq:2 x model:4", axis_type)
    assert set(mesh.axis_types) == {axis_type}
  automatic, explicit = (sent(compiled(*case, x)[0]) for x in types)
  assert automatic == explicit
