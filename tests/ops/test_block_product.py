"""Products of few rows with block codes by the kernel, against float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.nn.sharding_context import CachedAttention
from ringjax.ops import block_product_tpu, kernel_choice
from ringjax.ops.block_product_tpu import BlockCodes, BlockProductTPU
from ringjax.parallel.call_sharding import on_mesh

KERNEL = BlockProductTPU(interpret=True)
PLAIN, CENTRED = tuple(range(16)), tuple(range(-8, 8))


def weight_of(
  *, groups, group, outer, levels=PLAIN, dtype="float32", least=True, stack=()
):
  """Random codes, with steps of very different sizes."""
  rng = np.random.default_rng(groups * group + outer)
  rows = group if levels is None else group // 2
  shape = (*stack, groups, rows, outer)
  if levels is None:
    codes = rng.integers(-128, 128, shape).astype(np.int8)
  else:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
  scales = (*stack, groups, outer)
  step = rng.uniform(0.5, 1, scales) * 10.0 ** rng.integers(-7, 0, scales)
  return BlockCodes(
    codes=jnp.asarray(codes),
    step=jnp.asarray(step, dtype),
    least=jnp.asarray(rng.normal(size=scales) / 4, dtype) if least else None,
    index=tuple(jnp.int32(n - 1) for n in stack),
    levels=levels,
  )


def numbers_of(weight):
  """The decoded weight in float64, [I, O]."""
  entry = tuple(int(n) for n in weight.index)
  codes, step = (np.asarray(a[entry]) for a in (weight.codes, weight.step))
  levels = codes.astype(np.float64)
  if weight.levels is not None:
    table = np.array(weight.levels, np.float64)
    levels = np.concatenate([table[codes >> 4], table[codes & 15]], 1)
  numbers = levels * step.astype(np.float64)[:, None]
  if weight.least is not None:
    numbers = numbers + np.asarray(weight.least[entry], np.float64)[:, None]
  return numbers.reshape(-1, codes.shape[-1])


def rows_of(weight, count):
  codes = weight.codes.shape
  size = (count, codes[-3] * weight.group)
  return jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.bfloat16)


def arrays_of(weight):
  names = ("codes", "step", "least", "index")
  return {name: getattr(weight, name) for name in names}


def multiply(x, weight):
  """The kernel's product, compiled."""
  run = lambda x, arrays: KERNEL.product(
    x, dataclasses.replace(weight, **arrays)
  )
  return jax.jit(run)(x, arrays_of(weight))


CASES = {
  "groups of 64": dict(groups=3, group=64, outer=200),
  "two blocks": dict(groups=32, group=64, outer=8),
  "a last block that ends early": dict(groups=20, group=64, outer=8),
  "groups of 32, as Q4_0": dict(
    groups=6, group=32, outer=96, levels=CENTRED, dtype="float16", least=False
  ),
  "groups of 32, as Q4_1": dict(groups=4, group=32, outer=7, dtype="float16"),
  "8 bits, as Q8_0": dict(
    groups=5, group=32, outer=130, levels=None, dtype="float16", least=False
  ),
  "groups of 128": dict(groups=3, group=128, outer=128, dtype="bfloat16"),
  "groups of 256": dict(groups=2, group=256, outer=40),
  "8 bits in groups of 64": dict(groups=3, group=64, outer=64, levels=None),
  "8 bits in groups of 16, as Q6_K": dict(
    groups=4, group=16, outer=40, levels=None, least=False
  ),
  "a stack of layers": dict(groups=2, group=64, outer=72, stack=(3,)),
  "experts of layers": dict(groups=2, group=64, outer=72, stack=(2, 3)),
}
# Numbers of rows of a call; every case has a call of all rows.
COUNTS = {"groups of 64": (1, 3, 8, 17), "two blocks": (8,)}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_the_decoded_weight_for_any_number_of_rows(
  case, monkeypatch
):
  # Blocks of 16 groups of 64.
  monkeypatch.setattr(block_product_tpu, "_BLOCK_ROWS", 512)
  weight = weight_of(**CASES[case])
  x, numbers = rows_of(weight, 64), numbers_of(weight)
  want = np.asarray(x, np.float64) @ numbers
  # Sums of float32, with numbers up to 128 steps larger; then y is rounded.
  size = np.abs(np.asarray(x, np.float64)) @ np.abs(numbers)
  bits = {}
  for count in (*COUNTS.get(case, (1,)), 64):
    y = np.asarray(multiply(x[:count], weight).astype(jnp.float32))
    allowed = np.abs(want) * 2.0**-8 + size * 2.0**-15
    assert (np.abs(y - want[:count]) <= allowed[:count]).all()
    bits[count] = y
  for count, y in bits.items():
    # A token's answer does not depend on its neighbours.
    np.testing.assert_array_equal(y, bits[64][:count])


def test_a_product_of_one_row_is_that_of_the_decoded_weight():
  weight = weight_of(groups=2, group=64, outer=130)
  x = rows_of(weight, 1)
  want = np.asarray(x, np.float64) @ numbers_of(weight)
  np.testing.assert_allclose(
    np.asarray(multiply(x, weight), np.float64), want, rtol=2**-7, atol=0.02
  )


@pytest.mark.parametrize(("change", "reason"), [
  (dict(dtype="float32"), "multiplies bfloat16"),
  (dict(rows=65), "65 rows"),
  (dict(levels=(0, 1, 2, 3, 4, 6, 8, 12) * 2), "not consecutive"),
  (dict(group=48), "groups of 48"),
  (dict(group=32, groups=3), "half of a register"),
])  # fmt: skip
def test_calls_that_are_declined_say_why(change, reason):
  change = dict(change)
  dtype, rows = change.pop("dtype", "bfloat16"), change.pop("rows", 1)
  weight = weight_of(**(dict(groups=2, group=64, outer=8) | change))
  x = rows_of(weight, rows).astype(dtype)
  assert reason in KERNEL.decline(x, weight)
  assert KERNEL.decline(rows_of(weight, 1), weight_of(
    groups=2, group=64, outer=8
  )) is None  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Interpreted(BlockProductTPU):
  """The kernel by Pallas' interpreter, which counts its products."""

  interpret: bool = True

  def product(self, x, weight, *, wide=False):
    CALLS.append(weight.codes.shape)
    return KERNEL.product(x, weight, wide=wide)


CALLS = []


@pytest.fixture
def interpreted(monkeypatch):
  """Takes the kernel on this platform."""
  monkeypatch.setitem(block_product_tpu.PRODUCTS, "cpu", (Interpreted,))
  monkeypatch.setattr(kernel_choice, "_fault", lambda kind: None)
  # A program of a single device, as XLA counts where there is no mesh.
  monkeypatch.setattr(jax, "device_count", lambda *_: 1)
  jax.clear_caches()
  CALLS.clear()
  yield
  # Programs with the kernel are not those of other tests.
  jax.clear_caches()


LLAMA = {
  "model_type": "llama",
  "vocab_size": 64,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 3,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
}
MIXTURE = LLAMA | {
  "model_type": "mixtral",
  "num_local_experts": 3,
  "num_experts_per_tok": 2,
}


def answers(model):
  prompts = [[5, 6, 7, 8] * 5, [9, 10, 11]]
  return rj.infer.generate(model, prompts, max_new_tokens=4).tokens


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_a_model_generates_with_the_kernel_as_with_loops(interpreted, experts):
  """Decoding reads layers, and experts, in place in their stack."""
  config = MIXTURE if experts else LLAMA
  model = rj.models.create(config, seed=1, dtype=jnp.bfloat16)
  coded = rj.models.with_coded_weights(model, bits=4, group=32)
  tokens = np.random.default_rng(1).integers(0, 60, (1, 9)).astype(np.int32)
  got, kernel_answers = coded(tokens), answers(coded)
  stacks = {shape[: len(shape) - 3] for shape in CALLS}
  assert (3,) in stacks
  assert ((3, 3) in stacks) == experts
  CALLS.clear()
  jax.clear_caches()
  block_product_tpu.PRODUCTS.pop("cpu")
  want = coded(tokens)
  assert not CALLS
  assert jnp.linalg.norm(got - want) < 0.03 * jnp.linalg.norm(want)
  assert np.shape(kernel_answers) == np.shape(answers(coded))


def test_a_kernel_that_is_switched_off_is_left_out(interpreted, monkeypatch):
  weight = weight_of(groups=2, group=64, outer=8)
  x = rows_of(weight, 1)
  assert isinstance(
    block_product_tpu.choose_product(x, weight).algorithm, Interpreted
  )
  monkeypatch.setattr(
    kernel_choice, "switched_off", lambda: frozenset({"test_block_product"})
  )
  choice = block_product_tpu.choose_product(x, weight)
  assert choice.algorithm is None
  assert "switched off by RINGJAX_OFF" in str(choice)
  assert kernel_choice.kernel_name(BlockProductTPU) == "block_product_tpu"


@pytest.mark.parametrize("count", [2, 8])
def test_on_a_mesh_the_kernel_serves_only_where_nothing_is_partitioned(
  interpreted, count
):
  weight = weight_of(groups=2, group=64, outer=8)
  x = rows_of(weight, count)
  mesh = rj.make_mesh((count,), ("model",), devices=jax.devices()[:count])
  with on_mesh(mesh):
    choice = block_product_tpu.choose_product(x, weight)
    assert choice.algorithm is None
    assert "over several devices" in str(choice)
  chosen = []

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"),
    check_vma=False,
  )  # fmt: skip
  def per_shard(x, arrays):
    local = dataclasses.replace(weight, **arrays)
    with on_mesh(mesh):
      choice = block_product_tpu.choose_product(x, local)
    chosen.append(choice)
    return choice.algorithm.product(x, local)

  y = jax.jit(per_shard)(x, arrays_of(weight))
  assert isinstance(chosen[0].algorithm, Interpreted)
  np.testing.assert_array_equal(y, multiply(x, weight))


def layer_of(model):
  """The feedforward of a model's first layer."""
  return jax.tree.map(lambda x: x[0], model.stack.blocks[0][0]).feedforward


@pytest.mark.long
@pytest.mark.parametrize(("shape", "names"), [
  ((2,), ("model",)),
  ((8,), ("model",)),
  ((2, 4), ("data", "model")),
])  # fmt: skip
@pytest.mark.parametrize("kernel", [True, False])
def test_sharded_maps_are_multiplied_on_each_shard_by_itself(
  interpreted, shape, names, kernel
):
  if not kernel:
    block_product_tpu.PRODUCTS.pop("cpu")
  config = LLAMA | {"hidden_size": 512, "intermediate_size": 1024}
  dtype = jnp.bfloat16 if kernel else jnp.float32
  config |= {"num_hidden_layers": 2}
  model = rj.models.create(config, seed=1, dtype=dtype)
  coded = rj.models.with_coded_weights(model, bits=4)
  size, model_size = int(np.prod(shape)), shape[-1]
  mesh = rj.make_mesh(
    shape, names, devices=jax.devices()[:size],
    axis_types=jax.sharding.AxisType.Explicit,
  )  # fmt: skip
  placed = rj.models.place(coded, mesh)
  attend = CachedAttention(mesh=mesh)
  rng = np.random.default_rng(1)
  for name, inner, sums in (("up", 512, 0), ("down", 1024, 1)):
    x = jnp.asarray(rng.normal(size=(2, 1, inner)), dtype)
    want = jax.jit(lambda m, x: m(x))(getattr(layer_of(coded), name), x)
    CALLS.clear()

    def call(module, x):
      with on_mesh(attend.mesh, attend.spec):
        return module(x)

    compiled = jax.jit(call)
    args = getattr(layer_of(placed), name), x
    text = compiled.lower(*args).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert ("all-reduce" in text) == bool(sums)
    shard_shape = {
      "up": (8, 32, 1024 // model_size), "down": (16 // model_size, 32, 512)
    }[name]  # fmt: skip
    assert set(CALLS) == ({shard_shape} if kernel else set())
    got = compiled(*args)
    # The bits of XLA's loops depend on the number of columns of a shard.
    if sums or not kernel:
      allowed = dict(rtol=2**-7, atol=2**-6) if kernel else dict(atol=2e-5)
      np.testing.assert_allclose(
        np.float32(got), np.float32(want), **({"rtol": 1e-5} | allowed)
      )
    else:
      np.testing.assert_array_equal(got, want)
