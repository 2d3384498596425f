"""The kernel that visits a cache on GPUs: what it declines, and its program."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from ringjax.ops import kernel_choice
from ringjax.ops.attention.kernels import auto_kernel, decode_gpu
from ringjax.ops.attention.kernels.decode_gpu import DecodeGPU
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.mask import (
  Causal,
  Chunked,
  Coords,
  Prefix,
  SameSegment,
  Window,
)
from tests.ops.attention.kernels import on_gpu
from tests.ops.attention.kernels.test_decode import call, refuses

DECLINED = {
  "float64": dict(dtype=jnp.float64),
  "no power of two": dict(kernel=DecodeGPU(24)),
  "dropout": dict(scores=Scores(scale=1.0, dropout_rate=0.1)),
  "bias": dict(terms=Terms(bias=jnp.zeros((1, 1, 1, 1, 80)))),
  "at most 256": dict(dim=257),
}


@pytest.mark.parametrize("words", DECLINED)
def test_what_it_does_not_serve(words):
  with jax.enable_x64(words == "float64"):
    refuses(DecodeGPU(), words, DECLINED[words])


def test_who_visits(monkeypatch):
  kernel_choice._fault.cache_clear()
  args = call(dtype=jnp.bfloat16)
  ours = auto_kernel.AutoKernel(platform="gpu", chip="h200")
  assert ours.choose_decode(*args) == kernel_choice.KernelChoice(
    DecodeGPU(chip="h200"), ()
  )
  monkeypatch.setattr(decode_gpu, "plgpu", None)
  found = ours.choose_decode(*args)
  assert isinstance(found.algorithm, auto_kernel.Loops)
  assert "no Triton backend" in str(found)


PROGRAMS = {
  "float32": dict(dtype=jnp.float32),
  "many queries": dict(queries=40),
  "a cap": dict(cap=2.0),
  "window": dict(mask=Causal() & Window(9) & SameSegment()),
  "chunks": dict(mask=Causal() & Chunked(16)),
  "prefixes": dict(mask=Prefix(jnp.array([3, 60]))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_becomes_a_program_of_triton(name):
  """Every operation has a meaning there; no GPU is needed to know this."""
  options = {"dtype": jnp.bfloat16, "queries": 3, **PROGRAMS[name]}
  q, keys, args = call(**options)
  args = args._replace(terms=Terms(slopes=jnp.ones(q.shape[1:3])))

  def run(q, k, v, at):
    here = args._replace(context=args.context._replace(q=at))
    return DecodeGPU().decode(q, dataclasses.replace(keys, k=k, v=v), here)

  gpu = AbstractDevice("NVIDIA H200", None, "cuda")
  mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
  with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    traced = jax.jit(run).trace(q, keys.k, keys.v, Coords(*args.context.q))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("xla.gpu.triton") == 1


@pytest.mark.parametrize(
  ("queries", "dim"), [pytest.param(1, 16, marks=pytest.mark.slow), (3, 24)]
)
def test_the_check_for_a_gpu_checks(queries, dim):
  visit = lambda kernel: on_gpu.decode(kernel, 40, queries, dim, groups=2, kv=1)
  assert visit(DecodeGPU(16, interpret=True))[0] <= on_gpu.FORWARD

  class Cracked(DecodeGPU):
    def decode(self, *args):
      found = super().decode(*args)
      return found._replace(acc=found.acc * 1.02)

  assert visit(Cracked(16, interpret=True))[0] > on_gpu.FORWARD
