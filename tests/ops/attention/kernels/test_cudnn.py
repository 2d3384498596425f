"""cuDNN behind its wrapper, as far as that is known without a GPU."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as theirs

import ringjax as rj
from ringjax import Blockwise, Causal, CuDNN, Gather, SameSegment, Window
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.kernels import cudnn
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Coords
from tests import oracle
from tests.ops.attention.kernels import on_gpu
from tests.ops.attention.kernels.test_kinds import LAYOUTS, Poison, Vendor
from tests.ops.attention.test_exact import ring_mesh

ROOT = pathlib.Path(__file__).parents[4]
# A machine that needs no GPU to be compiled for.
H100 = CuDNN(chip="h100", version=91002)


# ---------------------------------------------------------------------------
# What it declines
# ---------------------------------------------------------------------------


def why(
  kernel=H100, t=256, s=256, h=64, j=64, dtype=jnp.bfloat16, mask=None,
  allow=None, terms=None, **scores,
):  # fmt: skip
  struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  at = lambda n: Coords(*[np.ones((1, n), np.int32)] * 2)
  x = Local(struct(1, 2, 4, t, h), struct(1, 2, s, h), struct(1, 2, s, j))
  context = Context(at(t), at(s), mask or Causal(), allow)
  return kernel.decline(
    Scores(scale=0.1, **scores), x, terms or Terms(), context
  )


def test_what_it_serves():
  assert why() is None
  assert why(dtype=jnp.float16, h=128, j=128, t=1000, s=2000) is None
  assert why(mask=Causal() & SameSegment()) is None
  assert why(terms=Terms(sinks=jnp.zeros((2, 4)))) is None


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(dtype=jnp.float32), "float32"),
    (dict(h=64, j=128), "head dims of 64 and 128"),
    (dict(h=60, j=60), "heads of 60"),
    (dict(h=136, j=136), "at most 128"),
    (dict(soft_cap=30.0), "soft cap"),
    (dict(dropout_rate=0.1), "dropout"),
    (dict(terms=Terms(slopes=jnp.zeros((2, 4)))), "ALiBi"),
    (dict(terms=Terms(bias=jnp.zeros((1, 1, 1, 256, 256)))), "bias"),
    (dict(allow=jnp.ones((1, 1, 1, 256, 256), bool)), "mask array"),
    (dict(mask=Causal() & Window(64)), "Window"),
    (dict(mask=Causal() | rj.Prefix(9)), "Prefix"),
    (dict(t=1), "1 queries"),
    (dict(s=100), "100 keys"),
    (dict(kernel=CuDNN(128, chip="h100", version=91002)), "tiles"),
    (dict(kernel=CuDNN()), "no CUDA GPU"),
    (dict(kernel=CuDNN(chip="tpu-v5e", version=91002)), "no CUDA GPU"),
    (dict(kernel=CuDNN(chip="h100")), "no cuDNN"),
    (dict(kernel=CuDNN(chip="h100", version=8907)), "cuDNN 8907"),
  ],
)
def test_what_it_declines_it_says(options, words):
  assert words in why(**options)


@pytest.mark.parametrize(
  ("capability", "options", "words"),
  [
    ((7, 5), {}, "capability 7.5"),
    ((8, 0), dict(h=256, j=256), "at most 128"),
    ((9, 0), dict(h=256, j=256), None),
    ((9, 0), dict(h=264, j=264), "at most 256"),
    ((10, 0), dict(h=256, j=256), "at most 128"),
    ((10, 3), {}, "for this GPU"),
  ],
)
def test_what_the_gpu_that_is_here_can(monkeypatch, capability, options, words):
  monkeypatch.setattr(cudnn, "_capability_here", lambda: capability)
  found = why(CuDNN(version=91002), **options)
  assert found is None if words is None else words in found


def test_functions_that_changed_are_a_reason(monkeypatch):
  cudnn._unknown.cache_clear()
  original = getattr(theirs, cudnn._FORWARD)
  monkeypatch.setattr(
    theirs, cudnn._FORWARD, lambda query, key, value, scale, colour: None
  )
  assert "colour" in why()
  cudnn._unknown.cache_clear()
  monkeypatch.delattr(theirs, cudnn._FORWARD)
  assert "without cuDNN's functions" in why()
  monkeypatch.setattr(theirs, cudnn._FORWARD, original, raising=False)
  cudnn._unknown.cache_clear()
  assert why() is None


def test_who_insists_is_told():
  x = jnp.zeros((1, 128, 1, 16), jnp.float32)
  with pytest.raises(OptionError, match="CuDNN.. for float32"):
    rj.dot_product_attention(x, x, x, strategy=Gather(H100))


# ---------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------


def both(call):
  def run(q, k, v, do, dlse):
    results, pull = jax.vjp(call, q, k, v)
    return results, pull((do, dlse))

  return run


def operands(b=2, t=1024, n=8, kv=2, h=64, dtype=jnp.bfloat16):
  struct = lambda *shape, d=dtype: jax.ShapeDtypeStruct(shape, d)
  q, k = struct(b, t, n, h), struct(b, t, kv, h)
  return q, k, k, q, struct(b, t, n, d=jnp.float32)


def lowered(call, args):
  traced = jax.jit(both(call)).trace(*args)
  return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
  """(name, mask, types of operands) of cuDNN's calls in a program."""
  found = set()
  for line in text.splitlines():
    name = re.search(r"@(__cudnn\$\w+)\(", line)
    if name:
      mask = re.search(r"mask_type\\22: \\22(\w+)\\22", line)[1]
      types = line.rpartition(" : (")[2].partition(") ->")[0]
      found.add((name[1], mask, types))
  return found


FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_a_ring_is_compiled_for_cuda_without_one(layout):
  """In a shard_map that checks replication, on four devices."""
  mesh = ring_mesh(4)
  call = lambda *x: rj.ring_attention(
    *x, mesh=mesh, axis="seq", is_causal=True, layout=LAYOUTS[layout],
    local=H100, return_residual=True,
  )  # fmt: skip
  found = calls(lowered(call, operands()))
  kinds = {(name, mask) for name, mask, _ in found}
  masks = ("NO_MASK", "CAUSAL")
  assert kinds == {(name, m) for name in (FORWARD, BACKWARD) for m in masks}
  tensor = lambda *shape: f"tensor<{'x'.join(map(str, shape))}xbf16>"
  stats = lambda t: f"tensor<2x8x{t}xf32>"
  for t in (256, 128):  # a shard, and its half
    # Heads of keys are not repeated.
    q, k = tensor(2, 8, t, 64), tensor(2, 2, t, 64)
    for mask in masks:
      assert (FORWARD, mask, f"{q}, {k}, {k}") in found
      wanted = f"{q}, {k}, {k}, {stats(t)}, {q}, {q}"
      assert (BACKWARD, mask, wanted) in found
  assert len(found) == 8


def test_heads_may_be_dealt_around_it():
  call = lambda *x: rj.dot_product_attention(
    *x, mesh=ring_mesh(2), axis="seq", is_causal=True,
    strategy=rj.Ulysses(H100), return_residual=True,
  )  # fmt: skip
  found = calls(lowered(call, operands(t=256)))
  assert {name for name, _, _ in found} == {FORWARD, BACKWARD}
  assert all("tensor<2x4x" in types for _, _, types in found)


def test_vmap_is_a_larger_batch():
  def call(q, k, v):
    one = lambda q, k, v: rj.dot_product_attention(
      q, k, v, is_causal=True, strategy=Gather(H100), return_residual=True
    )
    # Axes in odd places, and keys that are shared.
    return jax.vmap(one, (1, None, None), (1, 1))(q, k, v)

  q, k, _, do, dlse = operands(t=256)
  wide = lambda x: jax.ShapeDtypeStruct((2, 3, *x.shape[1:]), x.dtype)
  found = calls(lowered(call, (wide(q), k, k, wide(do), wide(dlse))))
  assert {name for name, _, _ in found} == {FORWARD, BACKWARD}
  for _, _, types in found:
    assert types.startswith("tensor<6x8x") and "tensor<6x2x" in types


# ---------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------


class Bind:
  """In place of a primitive of JAX's: what it computes, by its rules.

  JAX's functions around it are real, so their arguments have to be right.
  """

  def __init__(self, backward):
    self.backward = backward
    self.masks = set()

  def bind(self, *args, **options):
    q, k, v = args[:3]
    assert all(a.size == 0 for a in args[3:10])
    assert options["layout"] == theirs.AttentionLayout.BNTH.value
    assert options["dropout_rate"] == 0 and not any(options["variadic_args"])
    assert options["sliding_window_length"] is None
    assert options.get("score_mod") is None
    causal = options["mask_type"] == theirs.MaskType.CAUSAL
    self.masks.add(options["mask_type"].name)
    b, n, t = q.shape[:3]
    grouped = lambda a: a.reshape(b, k.shape[1], -1, *a.shape[2:])
    x = Local(grouped(q), k, v)
    if not self.backward:
      out, lse = Vendor().outputs(x, options["scale"], causal)
      assert options["is_training"]
      return [out.reshape(q.shape), lse.reshape(b, n, t)]
    lse, out, do = args[10:13]
    assert lse.shape == (b, n, t) and lse.dtype == jnp.float32
    rows = map(grouped, (do, out, lse))
    dq, dk, dv = Vendor().gradients(x, rows, options["scale"], causal)
    return [dq.reshape(q.shape), dk, dv]


@pytest.fixture
def emulated(monkeypatch):
  """JAX's functions on a CPU; what they were called with."""
  found = Bind(False), Bind(True)
  for way, bind in zip(("fwd", "bwd"), found, strict=True):
    name = f"_dot_product_attention_{way}_p_wrapper"
    assert hasattr(theirs, name)
    monkeypatch.setattr(theirs, name, bind)
  return found


@pytest.mark.long
@pytest.mark.parametrize(
  "layout", [pytest.param("striped", marks=pytest.mark.slow), "zigzag"]
)
def test_a_ring_of_it_is_right(emulated, monkeypatch, layout):
  monkeypatch.setattr(CuDNN, "_fallback", lambda self: Poison())
  case = oracle.build(
    t=4 * 128,
    h=8,
    is_causal=True,
    sees=lambda i, j: j <= i,
    sinks=True,
    dtype=jnp.bfloat16,
  )
  got = oracle.run(
    case,
    layout=LAYOUTS[layout],
    strategy=rj.Ring(H100, unroll=1),
    shards=4,
    mesh=ring_mesh(4),
  )
  oracle.check(got, oracle.truth(case), on_gpu.FORWARD, on_gpu.BACKWARD)
  assert all(bind.masks == {"NO_MASK", "CAUSAL"} for bind in emulated)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", on_gpu.kinds(8))
def test_the_check_for_a_gpu_checks(kind):
  """Its cases, on what stands in for one: right, and wrong where planted."""
  local = Vendor(Blockwise(32, 32) if kind in ("other", "none") else Poison())
  found, right = on_gpu.errors(local, kind, 64, 16)
  assert right, found
  if kind == "causal":
    found, right = on_gpu.errors(Vendor(Poison(), local=True), kind, 64, 16)
    assert not right


def _gpu():
  """Why there is no GPU for the tests, or None."""
  if not list(pathlib.Path("/dev").glob("nvidia[0-9]*")):
    return "no NVIDIA GPU here"
  ask = "import jax; jax.local_devices(backend='cuda')"
  environ = os.environ | {"JAX_PLATFORMS": "cuda"}
  found = subprocess.run([sys.executable, "-c", ask], env=environ, check=False)
  return "JAX here has no CUDA" if found.returncode else None


@pytest.mark.gpu
def test_on_a_gpu():
  reason = _gpu()
  if reason is not None:
    pytest.skip(reason)
  done = subprocess.run(
    [sys.executable, "-m", on_gpu.__name__],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cuda,cpu"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert not done.returncode, done.stdout + done.stderr[-2000:]
