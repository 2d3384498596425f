"""Builds calls from shapes that `ringjax.bench.steps` has no builder for.

Those of an engine, as it dispatches them on an accelerator, with all tokens of
a chunk in one tile, and on a CPU, as one program with tiles; and those over
caches whose contents depend on the text, as an eviction's, for which a plan
can't state its reads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.bench import steps
from ringjax.infer import Greedy, decode, prefill
from ringjax.infer.speculate import rounds
from ringjax.infer.speculate.drafter import Draft
from ringjax.kv import kind_text
from ringjax.kv.storage.call_tiles import tiles_of
from ringjax.kv.storage.page_pool import PagePool
from ringjax.nn.sharding_context import CachedAttention
from ringjax.plan.compiler.aot import Built
from ringjax.serve import calls
from ringjax.serve.engine_config import EngineConfig, EngineSizes
from ringjax.serve.prefix.shared_rows import shared_tiles
from ringjax.serve.row_sampler import RowNumbers

# Tokens of a chunk of a prompt, and drafted tokens of a row.
PIECE, DRAFTED = 64, 4
CALLS = ("prompts", "answers", "drafts", "trees", "step")
# Calls over a session's cache.
CACHED = ("decode", "chunk", "verify", "tree")


def _placed(devices, tokens, batch, options):
  """Options, shapes and sharding of a model whose calls read a cache."""
  program = steps.ModelOptions(
    devices=devices, tokens=tokens, batch=batch, strategy="resident", block=1,
    **options,
  )  # fmt: skip
  mesh, axis = program.placed()
  model = program.form(mesh, program.dtype)
  return program, model, CachedAttention(mesh=mesh, axis=axis)


def engine_call(
  devices: Any,
  *,
  tokens: int,
  what: str,
  batch: int,
  cache: str = "windowed",
  **options: Any,
) -> Built:
  """Builds one call of an engine.

  Args:
    devices: Devices of the mesh.
    tokens: Most tokens of a row.
    what: Kind of the call, one of `CALLS`.
    batch: Number of rows of the engine, and of chunks of prompts.
    cache: Kind of the cache.
    options: Options of `steps.ModelOptions`.
  """
  program, model, attend = _placed(devices, tokens, batch, options)
  mesh, axis = attend.mesh, attend.axis
  config = EngineConfig(
    rows=batch, pieces=batch, piece=PIECE, longest=tokens,
    capacity=batch * tokens, cache_kind=cache,
  )  # fmt: skip
  sizes = EngineSizes.of(model, config, mesh, attend.size)
  pool = PagePool.spec(
    model.kinds,
    rows=batch,
    pages=functools.partial(sizes.group_pages, config),
    page=sizes.page,
    dtype=program.dtype,
    kind=sizes.kind,
    mesh=mesh,
    axis=axis if sizes.shards > 1 else None,
    head_axis="model" if "model" in mesh.axis_names else None,
  )
  vocab = model.config.vocab
  board = calls.RowBoard(
    _on_all(mesh, (batch,), jnp.int32),
    _on_all(mesh, (batch, vocab), jnp.bool_),
    _on_all(mesh, (batch, vocab), jnp.int32),
  )
  function = calls.compute
  if what in ("drafts", "trees"):
    function = calls.check_drafts
  arrays = functools.partial(
    _arrays, batch=batch, vocab=vocab, sizes=sizes, groups=len(pool.groups)
  )
  allowed: Any = _on_all(mesh, (batch, vocab), jnp.bool_)
  call: Any
  if what == "step":
    function = calls.compute_step
    call = arrays("answers"), arrays("prompts", tile=16)
    allowed = allowed, allowed
  else:
    call = arrays(what)
  arguments = (model, attend, pool, board, call, allowed)
  return program.built(mesh, function, arguments, 0.0, 1.0, what=what)


def cached_call(
  devices: Any,
  *,
  tokens: int,
  what: str,
  batch: int,
  cache: str,
  chunk: int = 0,
  **options: Any,
) -> Built:
  """Builds one call over a session's cache of any kind.

  Args:
    devices: Devices of the mesh.
    tokens: Tokens of a row's cache.
    what: Kind of the call, one of `CACHED`.
    batch: Number of rows.
    cache: Kind of the cache.
    chunk: Tokens of a chunk of a prompt.
    options: Options of `steps.ModelOptions`.
  """
  program, model, attend = _placed(devices, tokens, batch, options)
  mesh, axis = attend.mesh, attend.axis
  kind = kind_text.parse(cache)
  slots = model.init_cache_spec(batch, tokens, sharding=attend, kind=kind)
  ids = functools.partial(_on_all, mesh, dtype=jnp.int32)
  row, number = ids((batch,)), ids(())
  state = decode.DecodeState(row, row, _on_all(mesh, (batch,), jnp.bool_), None)
  drafted = ids((batch, DRAFTED))
  function, arguments = {
    "decode": (
      decode.step,
      (model, attend, Greedy(), slots, state, ids((1,)), number),
    ),
    "chunk": (
      prefill.read,
      (
        model, CachedAttention(mesh=mesh, axis=axis, replicated=False),
        *[ids((batch, chunk))] * 3, slots, row, number,
      ),
    ),
    **{
      name: (
        rounds.verify,
        (
          model, attend, "match", Greedy(), slots, state,
          Draft(drafted, row, drafted if name == "tree" else None), row,
          ids((4,)), number,
        ),
      )
      for name in ("verify", "tree")
    },
  }[what]  # fmt: skip
  return program.built(mesh, function, arguments, 0.0, 1.0, what=what)


def tiled_prompt(
  devices: Any,
  *,
  tokens: int,
  pattern: str,
  method: str,
  batch: int,
  cache: str,
  **options: Any,
) -> Built:
  """Builds the prefill of a whole prompt by the tiles of a pattern.

  Args:
    devices: Devices of the mesh.
    tokens: Tokens of a row.
    pattern: Text of the pattern.
    method: Method over the sequence's shards.
    batch: Number of rows.
    cache: Kind of the cache.
    options: Options of `steps.ModelOptions`.
  """
  program, model, attend = _placed(devices, tokens, batch, options)
  mesh, axis = attend.mesh, attend.axis
  kind = kind_text.parse(cache).resident("reading a prompt")
  config = prefill.PrefillConfig(method=f"sparse-{method}:{pattern}")
  context = config.plan(tokens, model, mesh, axis).attend
  slots = model.init_cache_spec(batch, tokens, sharding=context, kind=kind)
  over = P(context.batch_axes(batch) or None, axis)
  ids = jax.ShapeDtypeStruct(
    (batch, tokens), jnp.int32, sharding=NamedSharding(mesh, over)
  )
  row, number = _on_all(mesh, (batch,), jnp.int32), _on_all(mesh, (), jnp.int32)
  arguments = (model, context, ids, None, ids, slots, row, number)
  return program.built(mesh, prefill.read_tiles, arguments, 0.0, 1.0)


def _arrays(
  what: str,
  batch: int,
  vocab: int,
  sizes: EngineSizes,
  groups: int,
  tile: int = 0,
) -> calls.CallArrays:
  """Arguments of a call as the host makes them, with tiles of `tile` tokens."""
  width = {"prompts": PIECE + tile, "answers": 1}.get(what, 1 + DRAFTED)
  zeros = lambda *shape: np.zeros(shape, np.int32)
  num_pages = sizes.blocks // sizes.shards
  tables = tuple(zeros(batch, sizes.shards, num_pages) for _ in range(groups))
  shared = None
  if what != "prompts":
    max_tiles = max(1, sizes.blocks * sizes.page // sizes.tile // sizes.shards)
    shared = tuple(
      shared_tiles(table, zeros(batch), sizes.page, sizes.tile, max_tiles)
      for table in tables
    )
  return calls.CallArrays(
    tokens=zeros(batch, width),
    pos=zeros(batch, width),
    seg=zeros(batch, width),
    tables=tables,
    ends=zeros(batch),
    slots=zeros(batch),
    fresh=np.zeros(batch, bool),
    last=zeros(batch),
    chooses=np.zeros(batch, bool),
    sampling=RowNumbers.empty(batch, vocab),
    shared=shared,
    parents=zeros(batch, width) if what == "trees" else None,
    prompts=zeros(batch),
    tiles=tiles_of([0] * batch, [PIECE] * batch, PIECE, (tile,))
    if tile
    else (),
  )


def _on_all(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
  sharding = NamedSharding(mesh, P())
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
