"""The kernel that visits a cache on TPU: its tiles, and what it declines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ringjax.ops import kernel_choice
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.mask import Coords
from tests.ops.attention.kernels.test_decode import call, refuses


def test_tiles_are_large_and_fit():
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def tile(kv, groups, dim, slots=1 << 17, queries=1, chip="tpu-v5e"):
    found = []

    def look(q, k, v, at):
      stored = ContiguousView(k, v, Coords(at, at), 0)
      found.append(DecodeTPU(chip=chip).tile(q, stored))

    stack = like(2, 1, kv, slots, dim)
    jax.eval_shape(
      look, like(1, kv, groups, queries, dim), stack, stack, like(1, slots)
    )
    return found[0]

  assert tile(8, 4, 128) == (8, 512)
  # Two cores: each half of the heads.
  assert tile(8, 4, 128, chip="tpu-v5p") == (4, 1024)
  assert tile(32, 1, 128) == (8, 512)
  assert tile(1, 71, 64) == (1, 2048)
  assert tile(5, 1, 128) == (5, 768)
  assert tile(8, 4, 128, slots=100) == (8, 128)
  # Many queries of many heads: the scores of a tile stay small.
  heads, keys = tile(1, 128, 512, queries=16)
  assert heads == 1 and 2048 * keys <= 1 << 19


DECLINED = {
  "float16": dict(dtype=jnp.float16),
  "multiples of 128": dict(kernel=DecodeTPU(24)),
  "dropout": dict(scores=Scores(scale=1.0, dropout_rate=0.1)),
  "bias": dict(terms=Terms(bias=jnp.zeros((1, 1, 1, 1, 80)))),
  "at most 1024": dict(dim=1025),
  "of vector memory": dict(kernel=DecodeTPU(1 << 18)),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  refuses(DecodeTPU(), words, DECLINED[words])


def test_who_visits(monkeypatch):
  kernel_choice._fault.cache_clear()
  args = call(dtype=jnp.bfloat16)
  ours = auto_kernel.AutoKernel(platform="tpu", chip="tpu-v6e")
  assert ours.choose_decode(*args) == kernel_choice.KernelChoice(
    DecodeTPU(chip="tpu-v6e"), ()
  )
  found = auto_kernel.AutoKernel(24, 24, platform="tpu").choose_decode(*args)
  assert isinstance(found.algorithm, auto_kernel.Loops)
  assert "DecodeTPU: tiles of 24 keys" in str(found)
  found = auto_kernel.AutoKernel(platform="cpu").choose_decode(*args)
  assert isinstance(found.algorithm, auto_kernel.Loops) and not found.declined
