"""Log-probabilities of labels and their gradients, against the full logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import batch as batches
from ringjax.train.token_logprobs import token_logprobs
from tests.helpers import refused

CONFIG = {
  "architectures": ["Gemma2ForCausalLM"],
  "model_type": "gemma2",
  "vocab_size": 51,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 8,
  "query_pre_attn_scalar": 8,
  "sliding_window": 16,
  "final_logit_softcapping": 2.0,
}
ROWS, LENGTH = 3, 24
WAYS = {
  "one device": (1, rj.Contiguous()),
  "ring": (2, rj.Contiguous()),
  "striped": (4, rj.Striped()),
  "zigzag": (4, rj.Zigzag()),
}


def rows() -> batches.Batch:
  """Rows of one and two documents, with tokens without a label and padding."""
  draw = np.random.default_rng(0)
  tokens = draw.integers(0, 51, (ROWS, LENGTH)).astype(np.int32)
  labels = np.roll(tokens, -1, 1)
  segments = np.ones((ROWS, LENGTH), np.int32)
  segments[0, 9:], segments[1, 17:] = 2, 0
  positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
  positions[0, 9:] -= 9
  labels[0, 8] = labels[:, -1] = -100
  labels[1, 16:] = labels[2, 3:8] = -100
  weights = np.zeros((ROWS, LENGTH), np.float32)
  return batches.Batch(tokens, labels, weights, positions, segments)


def plain(model, temperature):
  """Log-probabilities and entropies from all logits of each document."""
  batch = rows()
  logprobs = jnp.zeros((ROWS, LENGTH))
  entropies = jnp.zeros((ROWS, LENGTH))
  for row, start, stop in ((0, 0, 9), (0, 9, 24), (1, 0, 17), (2, 0, 24)):
    logits = model(batch.tokens[row : row + 1, start:stop])[0] / temperature
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    labels = batch.labels[row, start:stop]
    has_label = labels >= 0
    picked = logp[np.arange(stop - start), np.maximum(labels, 0)]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    logprobs = logprobs.at[row, start:stop].set(jnp.where(has_label, picked, 0))
    entropies = entropies.at[row, start:stop].set(
      jnp.where(has_label, entropy, 0)
    )
  return logprobs, entropies


def factors() -> np.ndarray:
  return np.random.default_rng(1).normal(size=(2, ROWS, LENGTH)).astype("f")


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize("way", ["one device", "ring", "striped", "zigzag"])
def test_they_are_those_of_the_full_logits(way):
  model = checkpoint.create(CONFIG, seed=1)
  count, layout = WAYS[way]
  attend = ContextParallel()
  if count > 1:
    mesh = rj.make_mesh((count,), ("seq",), devices=jax.devices()[:count])
    attend = ContextParallel(
      mesh=mesh, axis="seq", layout=layout, strategy="ring"
    )
  batch = jax.tree.map(lambda x: x[0], batches.place(rows(), attend))
  reorder = lambda x: attend.layout.permute(x, shards=count)
  by_logprob, by_entropy = map(reorder, factors())

  def weighted(model):
    statistics = token_logprobs(
      model, batch, attend, temperature=0.7, block=5, entropy=True
    )
    logprobs, entropies = statistics
    total = jnp.sum(logprobs * by_logprob + entropies * by_entropy)
    return total, statistics

  def expected(model):
    logprobs, entropies = plain(model, 0.7)
    a, b = factors()
    return jnp.sum(logprobs * a + entropies * b), (logprobs, entropies)

  gradients = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(model)
  (_, got), got_grads = gradients(weighted)
  (_, want), want_grads = gradients(expected)
  for array, reference in zip(got, want, strict=True):
    assert array.dtype == jnp.float32
    restored = attend.layout.restore(np.asarray(array), shards=count)
    np.testing.assert_allclose(restored, reference, atol=2e-6)
  for array, reference in zip(
    jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True
  ):
    scale = np.abs(reference).max()
    np.testing.assert_allclose(array, reference, atol=1e-5 * scale)


def test_without_entropy_they_are_the_same_numbers():
  model = checkpoint.create(CONFIG, seed=1)
  batch = jax.tree.map(jnp.asarray, rows())
  attend = ContextParallel()
  statistics = token_logprobs(model, batch, attend, entropy=True)
  alone = token_logprobs(model, batch, attend)
  np.testing.assert_array_equal(alone, statistics.logprobs)
  assert not np.asarray(alone)[batch.labels < 0].any()


def test_bad_options_are_refused():
  model = checkpoint.create(CONFIG, seed=1)
  batch, attend = rows(), ContextParallel()
  refused(
    OptionError,
    lambda: token_logprobs(model, batch, attend, temperature=0.0),
    "temperature",
  )
  refused(
    OptionError, lambda: token_logprobs(model, batch, attend, block=0), "block"
  )
