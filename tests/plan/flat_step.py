"""A builder of an engine's step as one program over tiles of rows.

Answers fill one tile and prompts the others, so that each layer's weights are
read once for both; an engine computes such a step in two calls.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.kv.base import bytes_each
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.checkpoint import abstract
from ringjax.models.transformer import tokens_of
from ringjax.nn.sharding_context import Extras
from ringjax.ops.flat_product_tpu import LiveTiles, flat_gated, flat_product
from ringjax.ops.norm import rms_norm
from ringjax.parallel.call_sharding import on_mesh
from ringjax.plan.compiler.aot import Built
from ringjax.serve import calls as engine
from tests.plan.engine_calls import ROWS, call_arrays

# Rows of a tile.
TILE = 128


def flat(calls):
  """Arrays of each call's tokens, [B, T, ...], as tiles of rows."""

  def padded(x):
    rows = x.reshape(-1, *x.shape[2:])
    return jnp.pad(rows, [(0, -rows.shape[0] % TILE)] + [(0, 0)] * (x.ndim - 2))

  rows = jnp.concatenate([padded(x) for x in calls])
  return rows.reshape(-1, TILE, *rows.shape[1:])


def split(x, shapes):
  """Arrays of each call's tokens, [B, T, ...], from tiles of rows."""
  rows, parts, start = x.reshape(-1, *x.shape[2:]), [], 0
  for b, t in shapes:
    part = lax.slice_in_dim(rows, start, start + b * t)
    parts.append(part.reshape(b, t, *rows.shape[1:]))
    start += -(-b * t // TILE) * TILE
  return parts


def layer(model, attend, inputs, x, live, index, slots):
  """One layer of a Llama for all tiles; its weights stay in their stack."""
  spec, block = model.config.layers[0], model.stack.blocks[0][0]
  attention, maps = block.attention, block.feedforward
  mixer = spec.attention
  get = lambda part: part.weight.get_value()
  product = lambda x, part: flat_product(x, get(part), live, (index,))
  norm = lambda x, part: rms_norm(x, get(part)[index], spec.norm.eps)
  shapes = [places.pos.shape for places, _ in inputs]
  heads = lambda x, n: split(x.reshape(*x.shape[:2], n, -1), shapes)
  normed = norm(x, block.pre_attention)
  q = heads(product(normed, attention.q), mixer.heads)
  k = heads(product(normed, attention.k), mixer.kv_heads)
  v = heads(product(normed, attention.v), mixer.kv_heads)
  outputs = []
  for (places, cache), call_q, *keys_and_values in zip(
    inputs, q, k, v, strict=True
  ):
    keys, values = (jnp.swapaxes(a, 1, 2) for a in keys_and_values)
    part = cache.layer(0, slots, index)
    rotation = places.rotation(mixer.rope)
    part = part.append(keys, values, places.at, rotation)
    rotated = places.rotate(mixer.rope, call_q)
    extras = Extras(scale=mixer.logit_scale)
    outputs.append(attend(rotated, places, part, mixer.mask, extras))
    slots = part.slots
  out = flat(outputs)
  o = get(attention.o)
  o = o.reshape(o.shape[0], -1, o.shape[-1])
  x = x + flat_product(out.reshape(*out.shape[:2], -1), o, live, (index,))
  gate_and_up = get(maps.gate), get(maps.up)
  gate = lambda gate, up: jax.nn.silu(gate) * up
  normed = norm(x, block.pre_feedforward)
  hidden = flat_gated(normed, gate_and_up, live, (index,), gate)
  return x + product(hidden, maps.down), slots


@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(2, 3))
def step(model, attend, pool, board, calls, allowed):
  """Compute the tokens of both calls, and choose the next ones."""
  caches = engine._pooled(pool, calls[0]), engine._pooled(pool, calls[1])
  inputs, x = [], []
  for call, cache in zip(calls, caches, strict=True):
    tokens = engine._with_last(board, call)
    shape = tokens.shape
    places = tokens_of(model, attend, shape, call.pos, call.seg, call.prompts)
    cache = cache.allocate(places.at, replicated=True, sees=True)
    inputs.append((places, cache))
    x.append(model.embedded(tokens, places))
  segments = flat([places.at.seg for places, _ in inputs])
  live = LiveTiles.of(jnp.any(segments > 0, 1))

  def body(carry, index):
    with on_mesh(attend.mesh, attend.spec):
      return layer(model, attend, inputs, carry[0], live, index, carry[1]), None

  layers = jnp.arange(len(model.config.layers), dtype=jnp.int32)
  (x, slots), _ = lax.scan(body, (flat(x), pool.slots[0]), layers)
  pool = caches[0].updated((slots,))
  shapes = [places.pos.shape for places, _ in inputs]
  last = [
    jnp.take_along_axis(out, call.last[:, None, None], 1)
    for call, out in zip(calls, split(x, shapes), strict=True)
  ]
  # The head's weights are read once for both calls, too.
  logits = model.logits(model.head_input(jnp.concatenate(last)))[:, 0]
  choices, sizes = [], [len(mask) for mask in allowed]
  of_calls = jnp.split(logits, np.cumsum(sizes)[:-1])
  for call, call_logits, mask in zip(calls, of_calls, allowed, strict=True):
    choice = engine._chosen(board, call, call_logits, mask)
    board = engine._with_choice(board, call, choice)
    choices.append(choice)
  return choices, pool, board


def build(devices, *, model, prompts, page, tokens):
  """A step of answers and a call for prompts of `engine_calls` on one device.

  Queries', keys' and values' maps are stored as matrices [L, D, N H]: of
  [L, D, N, H] the compiler would make a copy for the kernel in each step.
  """
  mesh = rj.make_mesh((1,), ("seq",), devices=devices)
  form = abstract(model, mesh=mesh)
  part = form.stack.blocks[0][0].attention
  for linear in (part.q, part.k, part.v):
    old = linear.weight.get_value()
    shape = (*old.shape[:2], old.shape[2] * old.shape[3])
    linear.weight.set_value(
      jax.ShapeDtypeStruct(shape, old.dtype, sharding=old.sharding)
    )
  attend = rj.models.CachedAttention(mesh=mesh, axis="seq")
  pool = PagePool.spec(
    form.kinds,
    rows=ROWS,
    pages=lambda _: tokens // page,
    page=page,
    dtype=jnp.bfloat16,
    kind=form.cache_kind("dense"),
    mesh=mesh,
    axis="seq",
  )
  vocab = form.config.vocab
  calls = tuple(
    call_arrays(pool, name, page, tokens, devices, vocab)
    for name in ("answers", prompts)
  )
  board = engine.RowBoard(
    np.zeros(ROWS, np.int32),
    np.zeros((ROWS, vocab), bool),
    np.zeros((ROWS, vocab), np.int32),
  )
  allowed = tuple(np.zeros((len(call.ends), vocab), bool) for call in calls)
  replicated = NamedSharding(mesh, P())
  calls, board, allowed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
    (calls, board, allowed),
  )
  return Built(
    function=step,
    arguments=(form, attend, pool, board, calls, allowed),
    mesh=mesh,
    facts={"pool": bytes_each(pool.slots)},
  )
