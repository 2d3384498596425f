"""The compiled step over tiles of rows computes what an engine's calls do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.kv.storage.page_pool import PagePool
from ringjax.serve.calls import CallArrays, RowBoard, compute
from ringjax.serve.row_sampler import RowNumbers
from tests.plan import flat_step

ROWS, PAGE, VOCAB = 8, 16, 300
CONFIG = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": VOCAB,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 512,
}


def call_of(batch, width, rows):
  """A call for rows of {slot: (tokens, position of the first)}."""
  zeros = lambda *shape: np.zeros(shape, np.int32)
  tokens, pos, seg = (zeros(batch, width) for _ in range(3))
  tables, ends, last = zeros(batch, 1, 4), zeros(batch), zeros(batch)
  slots = np.full(batch, ROWS, np.int32)
  fresh, chooses = np.zeros(batch, bool), np.zeros(batch, bool)
  for b, (slot, (text, start)) in enumerate(rows.items()):
    count = len(text)
    tokens[b, :count], seg[b, :count] = text, 1
    pos[b, :count] = start + np.arange(count)
    tables[b, 0] = 1 + 4 * slot + np.arange(4)
    ends[b], slots[b], last[b] = start + count, slot, count - 1
    fresh[b], chooses[b] = start == 0, True
  return CallArrays(
    tokens=tokens,
    pos=pos,
    seg=seg,
    tables=(tables,),
    ends=ends,
    slots=slots,
    fresh=fresh,
    last=last,
    chooses=chooses,
    sampling=RowNumbers.empty(ROWS, VOCAB).of(np.zeros(batch, np.int32)),
    prompts=ends.copy(),
  )


@pytest.mark.long
def test_one_program_over_tiles_has_the_tokens_and_keys_of_two_calls():
  model, attend = rj.models.create(CONFIG), rj.models.CachedAttention()
  rng = np.random.default_rng(0)
  text = lambda count: rng.integers(1, VOCAB, count)
  begun = call_of(4, 32, {4: (text(20), 0), 5: (text(7), 0)})
  prompts = call_of(4, 32, {n: (text(c), 0) for n, c in enumerate([32, 5, 17])})
  # -1 stands for the token that was chosen last.
  answers = call_of(8, 1, {4: ([-1], 20), 5: ([-1], 7)})
  allowed = lambda call: np.ones((len(call.ends), VOCAB), bool)

  def start():
    pool = PagePool.create(
      model.kinds,
      rows=ROWS,
      pages=lambda _: 64,
      page=PAGE,
      dtype=jnp.float32,
      kind=model.cache_kind("dense"),
      mesh=None,
      axis=None,
      head_axis=None,
    )
    board = RowBoard(
      jnp.zeros(ROWS, jnp.int32),
      jnp.zeros((ROWS, VOCAB), bool),
      jnp.zeros((ROWS, VOCAB), jnp.int32),
    )
    return compute(model, attend, pool, board, begun, allowed(begun))[1:]

  pool, board = start()
  for call in (answers, prompts):
    _, pool, board = compute(model, attend, pool, board, call, allowed(call))
  flat_model = nnx.clone(model)
  attention = flat_model.stack.blocks[0][0].attention
  for linear in (attention.q, attention.k, attention.v):
    weight = linear.weight.get_value()
    linear.weight.set_value(weight.reshape(*weight.shape[:2], -1))
  calls = answers, prompts
  _, flat_pool, flat_board = flat_step.step(
    flat_model, attend, *start(), calls, tuple(map(allowed, calls))
  )
  np.testing.assert_array_equal(flat_board.last, board.last)
  assert np.unique(board.last[jnp.array([0, 1, 2, 4, 5])]).size > 2
  for tiles, pages in zip(
    *map(jax.tree.leaves, (flat_pool.slots, pool.slots)), strict=True
  ):
    np.testing.assert_allclose(tiles, pages, rtol=1e-5, atol=1e-5)
