"""Compressed keys are the sums that a loop over windows makes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.attention.sparse.compressed_keys import (
  Pooling,
  Projections,
  TokenInputs,
  compress,
)
from ringjax.ops.recurrent.conv import Tail

DIM, EPS = 5, 1e-3


def reference(value, gate, bias, norm, rate, overlap):
  """Entries of one document, by a loop over its windows."""
  entries = []
  for w in range(len(value) // rate):
    window = range(w * rate, (w + 1) * rate)
    rows = [(t, DIM * overlap) for t in window]
    if overlap and w:
      rows += [(t - rate, 0) for t in window]
    take = lambda x, t, i: x[t, i : i + DIM]
    scores = np.stack(
      [take(gate, t, i) + bias[t % rate, i : i + DIM] for t, i in rows]
    )
    weights = np.exp(scores - scores.max(0))
    weights /= weights.sum(0)
    entry = (weights * np.stack([take(value, t, i) for t, i in rows])).sum(0)
    entries.append(entry / np.sqrt(np.mean(entry**2) + EPS) * norm)
  return np.reshape(entries, (-1, DIM))


@pytest.mark.long
@pytest.mark.parametrize(("rate", "overlap"), [(4, True), (3, False)])
def test_equals_a_loop_over_windows(rate, overlap):
  """Two documents with padding around them, in calls of odd lengths."""
  draw = np.random.default_rng(rate)
  lengths, width = (11, 14), (1 + overlap) * DIM
  normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
  documents = [(normal(n, width), normal(n, width)) for n in lengths]
  bias, norm = normal(rate, width), normal(DIM)
  joined = [
    np.concatenate(parts)[None] for parts in zip(*documents, strict=True)
  ]
  pos = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None]
  seg = np.repeat(np.int32([1, 2]), lengths)[None]
  size = (rate * 2 if overlap else rate) - 1
  nothing = jnp.zeros((1, size, width))
  number = jnp.zeros((1, size), jnp.int32)
  tail = Tail(((Projections(nothing, nothing),), number), number)
  weights = (Pooling(jnp.asarray(bias), jnp.asarray(norm)),)
  keys, coords, at = [], [], 0

  def padded(x, n):
    others = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(jnp.asarray(x[:, at : at + n]), [(0, 0), (2, 1), *others])

  for n in (1, 9, 2, 13):
    value, gate = (padded(x, n) for x in joined)
    x = TokenInputs((Projections(value, gate),), padded(pos, n), padded(seg, n))
    entries, tail = compress(weights, x, tail, None, rate=rate, eps=EPS)
    real = np.asarray(entries.at.seg[0]) > 0
    keys.append(np.asarray(entries.keys[0])[0, real])
    coords.append(np.stack(entries.at)[:, 0, real])
    at += n
  want = [reference(*x, bias, norm, rate, overlap) for x in documents]
  np.testing.assert_allclose(
    np.concatenate(keys), np.concatenate(want), rtol=0, atol=2e-6
  )
  ends = [np.arange(rate - 1, n, rate) for n in lengths]
  got_pos, got_seg = np.concatenate(coords, 1)
  np.testing.assert_array_equal(got_pos, np.concatenate(ends))
  assert got_seg.tolist() == [1] * len(ends[0]) + [2] * len(ends[1])
