"""Grouped products by the kernels, against one block after another."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.models.weights.coded_weights import _NF4_LEVELS
from ringjax.ops import kernel_choice
from ringjax.ops.experts import grouped_product, grouped_product_tpu
from ringjax.ops.experts.expert_shards import (
  Dispatch,
  ExpertShards,
  mix_sharded,
)
from ringjax.ops.experts.grouped_product import GroupedExperts
from ringjax.ops.experts.grouped_product_tpu import (
  ExpertMaps,
  GroupedProductTPU,
)
from ringjax.ops.experts.moe import mix
from ringjax.ops.experts.row_blocks import blocks_by_expert, into_blocks
from ringjax.plan.compiler import aot
from tests.helpers import mesh_of

KERNEL = GroupedProductTPU(interpret=True)
EXPERTS, DIM, HIDDEN, ROWS = 4, 256, 384, 16
# Expert 1 has no rows, and expert 3 more than two blocks.
CHOSEN = np.array([3, 0, 3, 3, 2, 0] * 11, np.int32)


def maps_of(kind, layers=(), seed=0):
  """Random maps: floats of a dtype, or codes of 8 bits, or codes in groups."""
  rng = np.random.default_rng(seed)
  lead = (*layers, EXPERTS)
  index = tuple(jnp.int32(n - 1) for n in layers)
  if kind in ("float32", "bfloat16"):
    weight = rng.normal(size=(*lead, DIM, HIDDEN)) / 16
    return ExpertMaps(stacked=jnp.asarray(weight, kind), index=index)
  step = lambda *shape: rng.uniform(0.5, 1, shape) / 512
  if kind == "8 bits":
    codes = rng.integers(-127, 128, (*lead, DIM, HIDDEN)).astype(np.int8)
    return ExpertMaps(
      stacked=jnp.asarray(codes),
      step=jnp.asarray(step(*lead, HIDDEN), jnp.float32),
      index=index,
    )
  bits, group, dtype, *levels = kind
  rows = group if bits == 8 else group // 2
  shape = (*lead, DIM // group, rows, HIDDEN)
  scales = (*lead, DIM // group, HIDDEN)
  codes = (
    rng.integers(-128, 128, shape).astype(np.int8)
    if bits == 8
    else rng.integers(0, 256, shape).astype(np.uint8)
  )
  least = rng.normal(size=scales) / 64 if bits == 4 else None
  return ExpertMaps(
    stacked=jnp.asarray(codes),
    step=jnp.asarray(step(*scales), dtype),
    least=None if least is None else jnp.asarray(least, dtype),
    index=index,
    levels=(*levels, tuple(range(-8, 8)))[0] if bits == 4 else None,
  )


def tokens_of(count, dtype="float32", width=DIM, seed=1):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(count, width)), dtype)


@functools.partial(jax.jit, static_argnums=0)
def multiplied(product, x, maps, chosen):
  """Products of rows in their own order."""
  blocks = blocks_by_expert(chosen, EXPERTS, ROWS)
  return [y[blocks.slot] for y in product(into_blocks(x, blocks), maps, blocks)]


CASES = {
  "float32": ("float32", ()),
  "bfloat16 of two layers": ("bfloat16", (2,)),
  "codes of 8 bits": ("8 bits", (2,)),
  "codes of 4 bits in groups of 64": ((4, 64, "float32"), (2,)),
  "codes of 4 bits in groups of 32": ((4, 32, "float16"), ()),
  "codes of 8 bits in groups of 32": ((8, 32, "bfloat16"), ()),
  "codes of uneven levels": ((4, 64, "bfloat16", _NF4_LEVELS), (2,)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_one_block_after_another(case):
  kind, layers = CASES[case]
  maps = maps_of(kind, layers), maps_of(kind, layers, seed=2)
  dtype = "float32" if kind == "float32" else "bfloat16"
  x, chosen = tokens_of(CHOSEN.size, dtype), jnp.asarray(CHOSEN)
  got = multiplied(KERNEL.products, x, maps, chosen)
  want = multiplied(grouped_product.products_by_loop, x, maps, chosen)
  wide = lambda y: np.asarray(y, np.float64)
  for y, z in zip(got, want, strict=True):
    assert y.dtype == x.dtype and np.abs(wide(y)).max() > 0.5
    scale = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(wide(y), wide(z), rtol=scale, atol=scale)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_no_map_is_read_before_it_has_come_nor_overwritten_while_it_is(mode):
  """Copies are made as late, and as early, as their semaphores allow."""
  params = pltpu.InterpretParams(dma_execution_mode=mode)
  kernel = GroupedProductTPU(interpret=params)
  maps = (maps_of("float32", (2,)),)
  x, chosen = tokens_of(CHOSEN.size), jnp.asarray(CHOSEN)
  (got,) = multiplied(kernel.products, x, maps, chosen)
  (want,) = multiplied(grouped_product.products_by_loop, x, maps, chosen)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "8 bits"])
def test_a_row_does_not_depend_on_the_others_nor_on_its_place(kind):
  maps = (maps_of(kind),)
  dtype = "float32" if kind == "float32" else "bfloat16"
  x, rng = tokens_of(CHOSEN.size, dtype), np.random.default_rng(3)
  (want,) = multiplied(KERNEL.products, x, maps, jnp.asarray(CHOSEN))
  others = tokens_of(CHOSEN.size, dtype, seed=4)
  kept = rng.random(CHOSEN.size) < 0.3
  crowd = np.where(kept, CHOSEN, rng.integers(0, EXPERTS, CHOSEN.size))
  place = rng.permutation(CHOSEN.size)
  mixed = jnp.where(kept[:, None], x, others)[place]
  chosen = jnp.asarray(crowd[place], jnp.int32)
  (got,) = multiplied(KERNEL.products, mixed, maps, chosen)
  got = got[np.argsort(place)]
  np.testing.assert_array_equal(got[kept], want[kept])
  assert not np.array_equal(got, want)


def test_experts_without_rows_have_gradients_of_zero():
  blocks = blocks_by_expert(jnp.asarray(CHOSEN), EXPERTS, ROWS)
  x = into_blocks(tokens_of(CHOSEN.size), blocks)
  y = into_blocks(tokens_of(CHOSEN.size, width=HIDDEN), blocks)
  got = jax.jit(lambda x, y: KERNEL.gradients(
    x, y, blocks, EXPERTS, jnp.float32
  ))(x, y)  # fmt: skip
  of_expert = np.eye(EXPERTS + 1)[np.asarray(blocks.expert), :EXPERTS]
  weight = np.repeat(of_expert, ROWS, 0)
  want = np.einsum("pd,pf,pe->edf", x, y, weight)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  assert not got[1].any()


# Codes that a TPU's compiler has to accept: it reads no single row of 16 bits.
CODES = [
  "8 bits", (4, 64, "float32"), (4, 32, "float16"), (4, 128, "bfloat16"),
  (8, 32, "bfloat16"), (8, 64, "float16"),
]  # fmt: skip


def products_of_codes(devices):
  """Builds products with maps of all kinds of codes, for a TPU."""
  mesh = Mesh(np.asarray(devices[:1]), ("one",))
  like = lambda a: jax.ShapeDtypeStruct(
    a.shape, a.dtype, sharding=NamedSharding(mesh, P())
  )
  maps = [maps_of(kind, (2,)) for kind in CODES]
  x = like(tokens_of(CHOSEN.size, "bfloat16"))

  def run(x, maps):
    blocks = blocks_by_expert(jnp.asarray(CHOSEN), EXPERTS, ROWS)
    rows = into_blocks(x, blocks)
    return [GroupedProductTPU().products(rows, (m,), blocks) for m in maps]

  return aot.Built(
    function=jax.jit(run), arguments=(x, jax.tree.map(like, maps)), mesh=mesh
  )


@pytest.mark.aot
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_a_tpu_s_compiler_accepts_all_kinds_of_codes():
  builder = "tests.ops.test_grouped_product:products_of_codes"
  assert aot.compile(builder, "v5e:1x1").fits


def experts_of(kernel, maps, x, blocks):
  up, gate, down = maps
  combine = lambda gate, up: jnp.tanh(gate) * up
  h = grouped_product.gated(kernel, combine, x, (gate, up), blocks)
  return grouped_product.products(kernel, h, (down,), blocks)[0]


def expert_of_block(weights, rows):
  up, gate, down = weights
  return (jnp.tanh(rows @ gate) * (rows @ up)) @ down


def mixture(tokens=40, chosen=2, experts=8):
  rng = np.random.default_rng(5)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
  weights = (
    draw(experts, 128, 256), draw(experts, 128, 256), draw(experts, 256, 128)
  )  # fmt: skip
  picked = np.argsort(rng.random((tokens, experts)), 1)[:, :chosen]
  x, mixing = draw(tokens, 128) * 8, jnp.abs(draw(tokens, chosen)) * 8
  return weights, x, jnp.asarray(picked, jnp.int32), mixing


def by_kernel(weights):
  maps = lambda weights: tuple(ExpertMaps(stacked=w) for w in weights)
  f = lambda kernel, weights, x, blocks: experts_of(
    kernel, maps(weights), x, blocks
  )
  return GroupedExperts(kernel=KERNEL, f=f, weights=weights)


def gradients(run, weights, x, mixing):
  def loss(weights, x, mixing):
    y = run(weights, x, mixing)
    return jnp.sum(jnp.sin(y)), y

  return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(weights, x, mixing)


def assert_same(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert float(jnp.linalg.norm(b)) > 0.1
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("scale_input", [False, True])
def test_a_mixture_and_its_gradients_are_those_of_the_loop(scale_input):
  weights, x, picked, mixing = mixture()

  def run(weights, x, mixing, *, grouped):
    f = lambda e, rows: expert_of_block([w[e] for w in weights], rows)
    return mix(
      f, x, picked, mixing, 8, scale_input=scale_input,
      grouped=by_kernel(weights) if grouped else None,
    )  # fmt: skip

  got, want = (
    gradients(functools.partial(run, grouped=grouped), weights, x, mixing)
    for grouped in (True, False)
  )
  assert_same(got, want)


@pytest.mark.long
@pytest.mark.parametrize(
  "dispatch",
  [
    Dispatch(kind="gather", reason=""),
    Dispatch(kind="rounds", reason="", chunk=8, capacity=8),
  ],
  ids=lambda dispatch: dispatch.kind,
)
def test_sharded_experts_and_their_gradients_are_those_of_the_loop(dispatch):
  weights, x, picked, mixing = mixture()
  mesh = mesh_of(seq=2)
  shards = ExpertShards(over=("seq",), tokens=("seq",))

  def run(weights, x, mixing, *, grouped):
    def local(weights, x, picked, mixing):
      return mix_sharded(
        expert_of_block, weights, x, picked, mixing, 8, shards,
        dispatch=dispatch, grouped=by_kernel(weights) if grouped else None,
      )  # fmt: skip

    return jax.shard_map(
      local, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"),
      # Pallas' interpreter mixes arrays that vary with ones that don't.
      check_vma=not grouped,
    )(weights, x, picked, mixing)  # fmt: skip

  got, want = (
    gradients(functools.partial(run, grouped=grouped), weights, x, mixing)
    for grouped in (True, False)
  )
  assert_same(got, want)


@pytest.mark.parametrize("kind", ["gather", "rounds"])
def test_the_kernels_vary_over_the_axes_of_their_operands(kind):
  """Traced as for a TPU, where JAX checks what varies between shards."""
  weights, x, picked, mixing = mixture()
  shards = ExpertShards(over=("seq",), tokens=("seq",))
  dispatch = Dispatch(kind=kind, reason="", chunk=8, capacity=8)
  grouped = dataclasses.replace(by_kernel(weights), kernel=GroupedProductTPU())

  def local(weights, x, picked, mixing):
    return mix_sharded(
      expert_of_block, weights, x, picked, mixing, 8, shards,
      dispatch=dispatch, grouped=grouped,
    )  # fmt: skip

  def loss(weights, x, mixing):
    run = jax.shard_map(
      local, mesh=mesh_of(seq=2), in_specs=P("seq"), out_specs=P("seq")
    )
    return jnp.sum(run(weights, x, picked, mixing))

  got = jax.eval_shape(jax.grad(loss, (0, 1, 2)), weights, x, mixing)
  shapes = lambda tree: [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]
  assert shapes(got) == shapes((weights, x, mixing))


def test_gradients_of_one_layer_of_a_stack_and_of_steps_of_codes():
  chosen = jnp.asarray(CHOSEN)
  blocks = blocks_by_expert(chosen, EXPERTS, ROWS)
  x = tokens_of(CHOSEN.size, "bfloat16")

  def loss(product, floats, maps, x):
    maps = dataclasses.replace(maps, **floats)
    (y,) = product(into_blocks(x, blocks), (maps,), blocks)
    return jnp.sum(jnp.sin(y[blocks.slot].astype(jnp.float32)))

  for kind, name in (("bfloat16", "stacked"), ("8 bits", "step")):
    maps = maps_of(kind, (2,))
    floats = {name: getattr(maps, name)}
    got, want = (
      jax.jit(jax.grad(functools.partial(loss, product)))(floats, maps, x)[name]
      for product in (
        functools.partial(grouped_product.products, KERNEL),
        grouped_product.products_by_loop,
      )
    )
    wide = lambda a: np.asarray(a, np.float32)
    assert not wide(got[0]).any() and wide(got[1]).any()
    error = np.linalg.norm(wide(got) - wide(want)) / np.linalg.norm(wide(want))
    assert error < 0.02


@pytest.mark.parametrize(("change", "dtype", "reason"), [
  (dict(kind="bfloat16"), "float16", "float16: it multiplies bfloat16"),
  (dict(kind="float32"), "bfloat16", "a map of float32 for rows of bfloat16"),
  (dict(kind="8 bits"), "float32", "codes for rows of float32"),
  (dict(kind=(4, 16, "float32")), "bfloat16", "groups of 16"),
])  # fmt: skip
def test_calls_that_are_declined_say_why(change, dtype, reason):
  assert reason in KERNEL.decline(jnp.dtype(dtype), (maps_of(**change),))


@pytest.mark.parametrize(
  "other",
  ["8 bits", "bfloat16", (4, 32, "float32"), (8, 64, "float32"), "levels"],
  ids=str,
)
def test_two_maps_of_different_kinds_are_declined(other):
  """As files of GGUF have them, whose maps are coded one by one."""
  first = maps_of((4, 64, "float32"))
  second = (
    dataclasses.replace(first, levels=tuple(range(16)))
    if other == "levels"
    else maps_of(other)
  )
  assert KERNEL.decline(jnp.bfloat16, (first, first)) is None
  for maps in ((first, second), (second, first)):
    assert "different kinds" in KERNEL.decline(jnp.bfloat16, maps)


def test_maps_of_other_sizes_than_lanes_or_that_do_not_fit_are_declined():
  like = lambda *shape: ExpertMaps(
    stacked=jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  )
  decline = lambda *shape: KERNEL.decline(jnp.bfloat16, (like(*shape),) * 2)
  assert decline(8, 4096, 14336) is None
  assert "multiples of 128" in decline(8, 2880, 2880)
  assert "do not fit" in decline(2, 1 << 20, 128)


CALLS = []


@dataclasses.dataclass(frozen=True)
class Interpreted(GroupedProductTPU):
  """The kernels by Pallas' interpreter, which count their products."""

  interpret: bool = True

  def __post_init__(self):
    object.__setattr__(self, "chip", None)

  def _call(self, inputs, maps, *args, **options):
    CALLS.extend(map_.stacked.shape for map_ in maps)
    return super()._call(inputs, maps, *args, **options)


@pytest.fixture
def interpreted(monkeypatch):
  """Takes the kernels on this platform."""
  kinds = grouped_product_tpu.GROUPED_PRODUCTS
  monkeypatch.setitem(kinds, "cpu", (Interpreted,))
  monkeypatch.setattr(kernel_choice, "_fault", lambda kind: None)
  # A program of a single device, as XLA counts where there is no mesh.
  monkeypatch.setattr(jax, "device_count", lambda *_: 1)
  jax.clear_caches()
  CALLS.clear()
  yield
  # Programs with the kernels are not those of other tests.
  jax.clear_caches()


MIXTURE = {
  "model_type": "mixtral",
  "vocab_size": 64,
  "hidden_size": 128,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_local_experts": 4,
  "num_experts_per_tok": 2,
}


# Norms around its experts, one of which all experts share.
NORMED = {
  "model_type": "muse_spark_text",
  "vocab_size": 64,
  "hidden_size": 128,
  "intermediate_size": 128,
  "moe_intermediate_size": 128,
  "moe_hidden_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_local_experts": 4,
  "num_experts_per_tok": 2,
}


def test_kernels_that_are_switched_off_are_left_out(interpreted, monkeypatch):
  maps = (maps_of("bfloat16"),)
  x = tokens_of(3, "bfloat16")
  choose = lambda: grouped_product.choose_product(x, (maps,))
  assert isinstance(choose().algorithm, Interpreted)
  monkeypatch.setattr(
    kernel_choice, "switched_off", lambda: frozenset({"test_grouped_product"})
  )
  assert choose().algorithm is None
  assert "switched off by RINGJAX_OFF" in str(choose())
  name = kernel_choice.kernel_name(GroupedProductTPU)
  assert name == "grouped_product_tpu"


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("config", [MIXTURE, NORMED], ids=["plain", "normed"])
def test_a_model_trains_with_the_kernels_as_with_the_loop(interpreted, config):
  model = rj.models.create(config, seed=1, dtype=jnp.float32)
  tokens = np.random.default_rng(1).integers(0, 60, (2, 12)).astype(np.int32)
  loss = lambda model: jnp.mean(jax.nn.logsumexp(model(tokens), -1))
  got = jax.jit(jax.value_and_grad(loss, allow_int=True))(model)
  assert {*CALLS} == {(4, 128, 128)}
  CALLS.clear()
  jax.clear_caches()
  grouped_product_tpu.GROUPED_PRODUCTS.pop("cpu")
  want = jax.jit(jax.value_and_grad(loss, allow_int=True))(model)
  assert not CALLS
  leaves = lambda tree: [
    a for a in jax.tree.leaves(tree) if a.dtype == jnp.float32
  ]
  for a, b in zip(leaves(got), leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_model_generates_with_the_kernels_as_with_the_loop(interpreted, bits):
  """Decoding reads experts in place in the stack of layers."""
  model = rj.models.create(MIXTURE, seed=1, dtype=jnp.bfloat16)
  if bits is not None:
    model = rj.models.with_coded_weights(model, bits=bits)
  tokens = np.random.default_rng(1).integers(0, 60, (1, 40)).astype(np.int32)
  prompts = [[5, 6, 7, 8] * 5, [9, 10, 11]]
  got = model(tokens)
  answers = rj.infer.generate(model, prompts, max_new_tokens=4).tokens
  assert (2, 4) in {shape[:2] for shape in CALLS}
  CALLS.clear()
  jax.clear_caches()
  grouped_product_tpu.GROUPED_PRODUCTS.pop("cpu")
  want = model(tokens)
  assert not CALLS
  assert jnp.linalg.norm(got - want) < 0.03 * jnp.linalg.norm(want)
  others = rj.infer.generate(model, prompts, max_new_tokens=4).tokens
  assert np.shape(answers) == np.shape(others)
