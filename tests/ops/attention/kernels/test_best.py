"""Which kernel is taken, and what happens when one is broken."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import AutoKernel, Blockwise, Gather, Ring, Ulysses
from ringjax.errors import OptionError
from ringjax.ops import kernel_choice
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cost.call_shape import CallShape
from ringjax.ops.attention.kernels import (
  auto_kernel,
  cudnn,
  flash_tpu,
  hop_kinds,
)
from ringjax.ops.attention.kernels.cudnn import CuDNN
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.mask import Causal, Coords
from ringjax.parallel import processor
from tests.ops.attention.kernels.test_kinds import Poison, Vendor


def call(length=256, dtype=jnp.bfloat16, bias=None):
  zeros = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  at = Coords(*[np.ones((1, length), np.int32)] * 2)
  x = Local(
    zeros(1, 2, 2, length, 64), zeros(1, 2, length, 64), zeros(1, 2, length, 64)
  )
  return Scores(scale=0.1), x, Terms(bias), Context(at, at, Causal())


@pytest.fixture
def fresh():
  kernel_choice._fault.cache_clear()
  yield
  kernel_choice._fault.cache_clear()


def test_a_tpu_gets_the_kernel(fresh):
  found = AutoKernel(platform="tpu").choose(*call())
  assert found == kernel_choice.KernelChoice(FlashTPU(), ())
  assert AutoKernel(256, 512, platform="tpu").choose(
    *call()
  ).algorithm == FlashTPU(256, 512)


def test_a_gpu_gets_cudnn_where_there_is_one(fresh, monkeypatch):
  ours = AutoKernel(platform="gpu", chip="h100")
  found = ours.choose(*call())
  assert found.algorithm == Blockwise() and "no cuDNN here" in str(found)
  # As where a program is compiled ahead of time: nothing is tried.
  monkeypatch.setattr(cudnn, "_version_here", lambda: 91002)
  found = ours.choose(*call())
  assert found == kernel_choice.KernelChoice(CuDNN(chip="h100"), ())
  found = ours.choose(*call(dtype=jnp.float32))
  assert found.algorithm == Blockwise() and "float32" in str(found)


def test_what_it_declines_blockwise_serves(fresh):
  found = AutoKernel(platform="tpu").choose(*call(length=40))
  assert found.algorithm == Blockwise()
  assert "40 queries" in str(found) and "FlashTPU" in str(found)
  odd = AutoKernel(24, 8, platform="tpu").choose(*call())
  assert odd.algorithm == Blockwise(24, 8) and "128" in str(odd)


def test_what_a_chip_has_no_room_for_is_declined(fresh):
  old = AutoKernel(platform="tpu", chip="tpu-v4").choose(*call())
  assert old.algorithm == Blockwise() and "vector memory" in str(old)
  long = AutoKernel(platform="tpu", chip="tpu-v5e").choose(
    *call(length=1 << 19)
  )
  assert long.algorithm == Blockwise() and "512 x 512 tiles" in str(long)
  # Gradients of wide heads take room: fewer keys at once.
  kernel = FlashTPU(chip="tpu-v5p")
  wide = call(length=1 << 15)[1]
  assert flash_tpu._span(kernel, wide) == 1 << 14
  heads = jax.ShapeDtypeStruct((1, 2, 1 << 15, 256), jnp.bfloat16)
  wide = wide._replace(k=heads, v=heads)
  assert flash_tpu._span(kernel, wide) == 1 << 13
  assert flash_tpu._vmem(kernel, 1 << 13, 256, 256, 1024, 1024) < 64 << 20


def test_elsewhere_it_is_blockwise():
  wide = not processor.multiplies_bfloat16()
  assert AutoKernel(8, 16).on_device("cpu", "cpu") == Blockwise(8, 16, wide)
  strategy = nesting.on_device(Ulysses(Ring()), "cpu", "cpu")
  assert nesting.innermost(strategy) == Blockwise(wide=wide)
  strategy = nesting.on_device(Ulysses(Ring(), inner=2), "tpu", "TPU v5 lite")
  assert strategy == Ulysses(
    Ring(AutoKernel(platform="tpu", chip="tpu-v5e")), inner=2
  )
  strategy = nesting.on_device(Ring(), "gpu", "NVIDIA H100 80GB HBM3")
  assert strategy == Ring(AutoKernel(platform="gpu", chip="h100"))
  # XLA would have to cut it.
  strategy = nesting.on_device(Ring(), "gpu", "NVIDIA H100 80GB HBM3", False)
  assert strategy == Ring(Blockwise(wide=False))
  # What somebody asked for stays.
  mine = Ring(Blockwise(8, 8, wide=True))
  assert nesting.on_device(mine, "tpu", "TPU v4") == mine


@pytest.fixture
def switch_off(fresh, monkeypatch):
  """Sets RINGJAX_OFF, as if for a process that starts."""

  def switch(text):
    kernel_choice._parse_off.cache_clear()
    monkeypatch.setenv("RINGJAX_OFF", text)

  yield switch
  kernel_choice._parse_off.cache_clear()


def test_a_kernel_that_is_switched_off_is_not_taken(switch_off, caplog):
  ours = AutoKernel(platform="tpu", chip="tpu-v5e")
  shape = CallShape(
    batch=1, queries=1024, keys=1024, heads=4, kv_heads=2, head_dim=64,
    mask=Causal(), axes=(("seq", 4),), dtype="bfloat16",
  )  # fmt: skip
  assert ours.choose(*call()).algorithm == FlashTPU(chip="tpu-v5e")
  assert auto_kernel.expected(shape, "tpu", "tpu-v5e")[0] == "kernel"
  switch_off(" decode_tpu, flash_tpu,")
  with caplog.at_level(logging.WARNING):
    choices = [ours.choose(*call()) for _ in range(2)]
  for choice in choices:
    assert choice.algorithm == Blockwise()
    assert "not FlashTPU: switched off by RINGJAX_OFF" in str(choice)
  assert ours.blocks(4096, 4096) == Blockwise().blocks(4096, 4096)
  local, declined = auto_kernel.expected(shape, "tpu", "tpu-v5e")
  assert local == "blockwise" and "RINGJAX_OFF" in dict(declined)["FlashTPU"]
  lines = [r.getMessage() for r in caplog.records]
  assert lines == [
    "RINGJAX_OFF switches off decode_tpu, flash_tpu; XLA's loops are used"
  ]
  switch_off("decode_tpu")
  assert ours.choose(*call()).algorithm == FlashTPU(chip="tpu-v5e")


def test_a_name_of_no_kernel_is_refused_on_every_platform(switch_off):
  switch_off("flash_tpu,flash")
  for platform in ("tpu", "gpu", "cpu"):
    with pytest.raises(OptionError, match="RINGJAX_OFF.*'flash'.*decode_tpu"):
      AutoKernel().on_device(platform, platform)
    with pytest.raises(OptionError, match="RINGJAX_OFF"):
      AutoKernel(platform=platform).choose(*call())
  q = jnp.ones((1, 24, 2, 8))
  with pytest.raises(OptionError, match="RINGJAX_OFF"):
    rj.dot_product_attention(q, q, q)


@dataclasses.dataclass(frozen=True)
class Cracked(Blockwise):
  """Gives wrong numbers, or none."""

  chip: str | None = None
  raises = False

  def decline(self, *_):
    return None

  def forward(self, *args):
    if self.raises:
      raise RuntimeError("no such instruction")
    found = super().forward(*args)
    return found._replace(l=found.l * 1.5)


class Raising(Cracked):
  raises = True


class Sound(Cracked):
  def forward(self, *args):
    return Blockwise.forward(self, *args)


@pytest.mark.parametrize(
  ("kind", "length", "words"),
  [(Cracked, 40, "off by"), (Raising, 41, "no such instruction")],
)
def test_a_broken_kernel_is_left_with_one_line(
  fresh, monkeypatch, caplog, kind, length, words
):
  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", (kind,))
  # Another length each: what was compiled has chosen.
  q = jax.random.normal(jax.random.key(0), (1, length, 2, 8))
  with caplog.at_level(logging.WARNING):
    results = [
      rj.dot_product_attention(q, q, q, is_causal=True, strategy=Gather())
      for _ in range(2)
    ]
  want = rj.dot_product_attention(
    q, q, q, is_causal=True, strategy=Gather(Blockwise())
  )
  for got in results:
    assert np.array_equal(got, want)
  said = [r.getMessage() for r in caplog.records]
  lines = [text for text in said if "loops are used" in text]
  assert len(lines) == 1 and words in lines[0] and kind.__name__ in lines[0]


def test_a_sound_kernel_passes_its_check(fresh, monkeypatch, caplog):
  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", (Sound,))
  assert AutoKernel(platform="cpu").choose(*call()).algorithm == Sound()
  assert not caplog.records


@dataclasses.dataclass(frozen=True)
class Astray(Vendor):
  """A vendor's kernel that is off in one kind of hop, or in its gradient."""

  fault: str = ""

  def outputs(self, x, scale, causal):
    out, lse = super().outputs(x, scale, causal)
    return out, lse + 0.1 * (self.fault == ("causal" if causal else "full"))

  def gradients(self, *args):
    dq, dk, dv = super().gradients(*args)
    return dq, dk, dv * (0.9 if self.fault == "dv" else 1)


@pytest.mark.long
@pytest.mark.parametrize(
  "fault",
  [
    "",
    "strict",
    pytest.param("full", marks=pytest.mark.slow),
    pytest.param("causal", marks=pytest.mark.slow),
    pytest.param("dv", marks=pytest.mark.slow),
  ],
)
def test_the_check_tries_every_kind_of_hop(monkeypatch, fault):
  if fault == "strict":
    monkeypatch.setattr(hop_kinds, "_up", lambda x: x)
  off = auto_kernel._compare_hops(Astray(Poison(), fault=fault))
  assert (
    off > kernel_choice.ALLOWED_ERROR
    if fault
    else off <= kernel_choice.ALLOWED_ERROR
  )


@pytest.mark.long
def test_the_check_has_no_part_in_what_is_traced(fresh, monkeypatch, caplog):
  """The first call is mostly inside of a jit, a shard_map and a mesh."""
  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", (Sound,))
  mesh = rj.make_mesh((4,), ("seq",))
  q = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
  call = jax.jit(jax.grad(lambda q: rj.ring_attention(q, q, q).sum()))
  with jax.set_mesh(mesh):
    got = call(q)
  assert kernel_choice._fault.cache_info().currsize == 1
  assert kernel_choice._fault(Sound) is None and not caplog.records
  want = jax.grad(lambda q: rj.dot_product_attention(q, q, q).sum())(q)
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("shape", "said", "taken"),
  [
    pytest.param((1, 4), {}, True, marks=pytest.mark.slow),
    ((2, 2), {}, False),
    ((2, 2), {"batch_axis": "data"}, True),
    pytest.param((2, 2), {"batch_axis": ()}, True, marks=pytest.mark.slow),
    pytest.param((2, 2), {"head_axis": "data"}, True, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_no_kernel_where_xla_would_have_to_cut_it(
  fresh, monkeypatch, shape, said, taken
):
  seen = []

  class Spy(Sound):
    def forward(self, *args):
      seen.append(self)
      return super().forward(*args)

  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", (Spy,))
  mesh = rj.make_mesh(shape, ("data", "seq"))
  whole = rj.make_mesh((2,), ("data",))
  # Another length each: what was compiled has chosen.
  length = 64 + 4 * shape[0] + 8 * len(str(said))
  q = jax.random.normal(jax.random.key(0), (2, length, 2, 8))
  kernel_choice._fault(Spy)
  seen.clear()
  got = rj.ring_attention(q, q, q, mesh=mesh, axis="seq", **said)
  assert bool(seen) == taken
  want = rj.dot_product_attention(q, q, q, strategy=Gather(Blockwise()))
  np.testing.assert_allclose(got, want, atol=1e-5)
  # Without a mesh a program of several devices may be cut anywhere.
  seen.clear()
  alone = lambda q, **said: rj.dot_product_attention(
    q, q, q, strategy=Gather(), **said
  )
  jax.jit(alone)(q)
  assert not seen
  # A mesh of the batch alone.
  jax.jit(lambda q: alone(q, mesh=whole, batch_axis="data"))(q)
  assert seen
  seen.clear()
  rj.dot_product_attention(q, q, q, strategy=Gather())
  assert seen
