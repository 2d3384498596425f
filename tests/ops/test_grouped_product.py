"""Grouped products by the kernels, against the maps of each row's expert."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.experts.grouped_product_tpu import (
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.ops.experts.row_blocks import blocks_by_expert, into_blocks

KERNEL = GroupedProductTPU(interpret=True)
EXPERTS, DIM, HIDDEN = 5, 256, 384


def float_maps(dtype="bfloat16", layers=()):
  rng = np.random.default_rng(1)
  weight = rng.normal(size=(*layers, EXPERTS, DIM, HIDDEN)) / 8
  index = tuple(jnp.int32(n - 1) for n in layers)
  return ExpertMaps(stacked=jnp.asarray(weight, dtype), index=index)


def test_it():
  experts = jnp.asarray([3, 0, 3, 3, 4, 0] * 9, jnp.int32)
  maps = float_maps("float32", (2,))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(54, DIM)), jnp.float32)

  def run(x, maps):
    blocks = blocks_by_expert(experts, EXPERTS, 16)
    rows = into_blocks(x, blocks)
    y, z = KERNEL.products(rows, (maps, maps), blocks)
    inside = jnp.arange(rows.shape[0]) < blocks.used * 16
    y = jnp.where(inside[:, None], y, 0)
    g = KERNEL.gated(rows, (maps, maps), blocks, lambda a, b: jnp.tanh(a) * b)
    dx = KERNEL.summed((y, y), (maps, maps), blocks)
    dw = KERNEL.gradients(rows, y, blocks, EXPERTS, jnp.float32)
    take = lambda a: a[blocks.slot]
    return take(y), take(z), take(g), take(dx), dw

  y, z, g, dx, dw = jax.jit(run)(x, maps)
  w = np.asarray(maps.stacked[1])[np.asarray(experts)]
  want = np.einsum("nd,ndf->nf", x, w)
  np.testing.assert_allclose(y, want, atol=1e-4)
  np.testing.assert_allclose(z, want, atol=1e-4)
  np.testing.assert_allclose(g, np.tanh(want) * want, atol=1e-4)
  np.testing.assert_allclose(
    dx, 2 * np.einsum("nf,ndf->nd", want, w), atol=1e-3
  )
  hot = np.eye(EXPERTS)[np.asarray(experts)]
  np.testing.assert_allclose(
    dw, np.einsum("nd,nf,ne->edf", x, want, hot), atol=1e-3
  )
