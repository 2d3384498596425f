"""Models whose experts are sharded: no weight moves, and results are equal."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax import infer, models
from ringjax.bench.program import Program
from ringjax.errors import MeshError
from ringjax.infer import Greedy, decode, prefill
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.ops.experts import expert_shards
from ringjax.serve import Engine, Request
from ringjax.train import batch as batches
from ringjax.train import step
from tests import checkpoints
from tests.helpers import mesh_of

BATCH, TOKENS = 2, 128
# Mesh and mesh axes of the experts.
MESHES = {
  "seq": (dict(seq=8), "seq"),
  "expert": (dict(seq=2, expert=4), "expert"),
  "model": (dict(data=2, seq=2, model=2), "model"),
}


def config(name, layers=1):
  """A family's config with eight experts in each of its layers."""
  content = {**checkpoints.config(name), "num_hidden_layers": layers}
  for key in ("num_local_experts", "num_experts", "n_routed_experts"):
    if key in content:
      content[key] = 8
  if "router_aux_loss_coef" in content:
    # No loss is computed from it, which training warns about.
    content["router_aux_loss_coef"] = 0.0
  if "moe_layers" in content:
    content |= {"interleave_moe_layer_step": 1, "moe_layers": [*range(layers)]}
  if "first_k_dense_replace" in content:
    content["first_k_dense_replace"] = 0
  for key in ("layer_types", "no_rope_layers"):
    if key in content:
      content[key] = content[key][:layers]
  return content


def experts_of(model):
  """Weights [L, E, D, F] of the up maps."""
  return model.stack.blocks[0][0].feedforward.up.get_value()


def compiled(phase, mesh, model):
  array = lambda shape, dtype=jnp.int32, spec=None: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, spec or P())
  )
  if phase == "gradient":
    loss = lambda model, tokens: jnp.mean(jnp.square(model(tokens)))
    tokens = array((BATCH, TOKENS), spec=P(None, "seq"))
    return jax.jit(jax.grad(loss)).lower(model, tokens).compile()
  context = ShardingContext(mesh=mesh, axis="seq")
  cache = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    model.init_cache(BATCH, TOKENS, sharding=context, dtype=jnp.float32),
  )
  rows = array((BATCH,))
  if phase == "decode":
    state = decode.DecodeState(rows, rows, array((BATCH,), jnp.bool_), None)
    attend = CachedAttention(mesh=mesh, axis="seq")
    return decode.step.lower(
      model, attend, Greedy(), cache, state, array((1,)), array(())
    ).compile()
  chunk = 64 if phase == "chunked" else None
  options = prefill.PrefillConfig(method=phase, chunk=chunk)
  row = array((BATCH, chunk or TOKENS))
  return prefill.read.lower(
    model,
    options.plan(TOKENS, model, mesh, "seq").attend,
    row,
    row if chunk else None,
    row,
    cache,
    rows,
    array(()),
  ).compile()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.long_cases(3)
@pytest.mark.parametrize(
  ("name", "phase"),
  [
    ("seq", "decode"),
    *(
      pytest.param(name, phase, marks=pytest.mark.long)
      for name in MESHES
      for phase in (
        "decode",
        "striped",
        "zigzag",
        "ring",
        "chunked",
        "gradient",
      )
      if (name, phase) != ("seq", "decode")
    ),
  ],
)
def test_no_weights_of_experts_move(name, phase):
  """A gradient is summed over shards that have the same experts, at most."""
  sizes, over = MESHES[name]
  mesh = mesh_of(**sizes)
  content = config("mixtral")
  model = models.abstract(
    content, dtype=jnp.float32, mesh=mesh, rules=models.Rules(experts=over)
  )
  width = {content["hidden_size"], content["intermediate_size"]}
  program = Program(compiled(phase, mesh, model).as_text())
  kinds = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
  kinds = kinds if phase == "gradient" else (*kinds, "all-reduce")
  for instructions in program.computations.values():
    for i in instructions.values():
      if i.op.removesuffix("-start") in kinds:
        assert not any(width <= {*dims} for _, dims in i.shapes), i.text


@functools.cache
def one_device(name):
  return models.create(config(name))


@pytest.mark.parametrize(
  ("family", "name"),
  [
    pytest.param("deepseek_v3", "seq", marks=pytest.mark.long),
    ("mixtral", "expert"),
    pytest.param("llama4_text", "model", marks=pytest.mark.long),
    pytest.param("gpt_oss", "expert", marks=pytest.mark.long),
  ],
)
def test_logits_and_gradients_equal_those_of_one_device(family, name):
  """Shared experts, grouped choice, scaled inputs and biases included."""
  sizes, over = MESHES[name]
  model = one_device(family)
  sharded = models.place(model, mesh_of(**sizes), models.Rules(experts=over))
  assert experts_of(sharded).sharding.spec[1] == over
  tokens = np.random.default_rng(0).integers(0, 64, (BATCH, 32))

  @jax.jit
  def run(model):
    def loss(model):
      logits = model(tokens)
      return jnp.mean(jnp.square(logits)), logits

    return jax.grad(loss, has_aux=True)(model)

  for a, b in zip(
    jax.tree.leaves(run(sharded)), jax.tree.leaves(run(model)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_folder_is_loaded_into_shards(family, tmp_path):
  """Each device has its experts; answers equal those of one device."""
  model = one_device(family)
  models.save(model, tmp_path)
  mesh = mesh_of(seq=4, expert=2)
  rules = models.Rules(experts=("expert", "seq"))
  sharded = models.load(tmp_path, mesh=mesh, rules=rules, dtype=jnp.float32)
  weights = experts_of(sharded)
  assert weights.sharding.spec == P(None, ("expert", "seq"))
  assert {s.data.shape[1] for s in weights.addressable_shards} == {1}
  tokens = np.random.default_rng(0).integers(0, 64, (BATCH, 16))
  answer = lambda model: infer.generate(model, tokens, max_new_tokens=3).tokens
  np.testing.assert_array_equal(answer(sharded), answer(model))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["8 bits", "4 bits", "host", "disk"])
def test_coded_and_placed_experts_are_sharded(kind, tmp_path):
  model = one_device("mixtral")
  mesh, rules = mesh_of(seq=2, expert=4), models.Rules(experts="expert")
  if kind.endswith("bits"):
    bits = int(kind[0])
    sharded = models.with_coded_weights(
      models.place(model, mesh, rules), bits=bits
    )
    codes = sharded.stack.blocks[0][0].feedforward.up.codes.get_value()
    assert codes.sharding.spec[1] == "expert"
    model = models.with_coded_weights(model, bits=bits)
  else:
    models.save(model, tmp_path)
    sharded = models.load(
      tmp_path, mesh=mesh, rules=rules, dtype=jnp.float32, placement=kind
    )
  tokens = np.random.default_rng(0).integers(0, 64, (BATCH, 16))
  np.testing.assert_allclose(sharded(tokens), model(tokens), rtol=0, atol=2e-5)


@pytest.mark.long
def test_an_engine_answers_as_on_one_device():
  """Rows that join and leave, on shards that have the same tokens."""
  model = one_device("mixtral")
  mesh = mesh_of(seq=2, expert=4)
  sharded = models.place(model, mesh, models.Rules(experts="expert"))
  draw = np.random.default_rng(0)
  prompts = [draw.integers(0, 64, n).astype(np.int32) for n in (5, 19, 11)]

  def answers(model, mesh=None):
    with Engine(
      model, rows=2, capacity=128, longest=64, page=16, piece=16, mesh=mesh
    ) as engine:
      handles = [
        engine.submit(Request(prompt=prompt, max_new_tokens=4))
        for prompt in prompts
      ]
      return [handle.result().tokens.tolist() for handle in handles]

  assert answers(sharded, mesh) == answers(model)


# Mesh, axis of the experts, and tokens of a chunk.
LAWS = {
  "expert": (dict(seq=2, expert=4), "expert", 16),
  "seq": (dict(seq=4), "seq", 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_an_answer_does_not_depend_on_its_neighbours(name, monkeypatch):
  """To the bit: unequal rows, chunks cut anywhere, and drafted tokens."""
  sizes, over, piece = LAWS[name]
  mesh, chosen = mesh_of(**sizes), set()
  choose = expert_shards.choose_dispatch

  def spied(*args):
    dispatch = choose(*args)
    chosen.add(dispatch.kind)
    return dispatch

  monkeypatch.setattr(expert_shards, "choose_dispatch", spied)
  model = models.place(one_device("mixtral"), mesh, models.Rules(experts=over))
  draw = np.random.default_rng(0)
  prompt, *others = (
    draw.integers(0, 64, n).astype(np.int32) for n in (45, 5, 19, 33)
  )
  request = lambda prompt: Request(prompt=prompt, max_new_tokens=5, logprobs=2)
  numbers = lambda answer: (answer.tokens, answer.logprobs)
  for speculate in (None, "lookup:count=2,adapt=false"):
    options = dict(
      rows=4, longest=64, page=16, piece=piece, mesh=mesh, share="nothing",
      speculate=speculate,
    )  # fmt: skip
    with Engine(model, **options) as engine:
      alone = numbers(engine.submit(request(prompt)).result().answers[0])
      before = [engine.submit(request(other)) for other in others[:2]]
      handle = engine.submit(request(prompt))
      after = engine.submit(request(others[2]))
      assert numbers(handle.result().answers[0]) == alone
      for other in (*before, after):
        other.result()
  # All shards have the tokens of an engine's call.
  assert chosen == {"own"}


@pytest.mark.slow
def test_a_training_step_leaves_moments_on_their_shards():
  """The step is that of one device, in two micro-batches too."""
  model = one_device("mixtral")
  mesh = rj.make_mesh((2, 4), ("seq", "expert"))
  rules = models.Rules(experts=("expert", "seq"))
  draw = np.random.default_rng(0)
  rows = step_batch(draw.integers(0, 64, (4, 33)).astype(np.int32))

  def trained(model, attend, mesh=None):
    optimizer = optax.adam(1e-2, eps=1e-2)
    run = step.make_step(optimizer, attend, step.Objective())
    state = step.start(optimizer, model, mesh)
    return run(state, None, batches.place(rows, attend, 2))[0]

  attend = models.ContextParallel(mesh=mesh, axis="seq")
  # A step donates its state, and a placed model may share arrays.
  copied = lambda: jax.tree.map(jnp.copy, model)
  got = trained(models.place(copied(), mesh, rules), attend, mesh)
  want = trained(copied(), models.ContextParallel())
  for tree in (got.params, got.optimizer[0].mu, got.optimizer[0].nu):
    assert experts_of(tree).sharding.spec == P(None, ("expert", "seq"))
  for a, b in zip(
    jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def step_batch(tokens):
  inputs, labels = tokens[:, :-1], tokens[:, 1:]
  positions = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
  return batches.Batch(
    inputs,
    labels,
    np.ones(inputs.shape, np.float32),
    positions.astype(np.int32),
    np.ones(inputs.shape, np.int32),
  )


def test_a_mesh_without_the_axis_of_the_experts_is_refused():
  mesh = mesh_of(seq=2, expert=4)
  rules = models.Rules(experts="expert")
  model = models.abstract(config("mixtral"), mesh=mesh, rules=rules)
  attend = models.ContextParallel(mesh=mesh_of(seq=8), axis="seq")
  with pytest.raises(MeshError, match="expert.*rj.models.place"):
    jax.eval_shape(
      lambda model: model(jnp.zeros((1, 8), jnp.int32), attend=attend), model
    )


def test_a_part_of_the_experts_in_a_shard_map_is_refused():
  model = one_device("mixtral")
  mesh = mesh_of(expert=4)
  specs = jax.tree.map(lambda x: P(), model)
  specs.stack.blocks[0][0].feedforward.up.set_value(P(None, "expert"))
  attend = models.ContextParallel(axis=None)
  call = jax.shard_map(
    lambda model: model(jnp.zeros((1, 8), jnp.int32), attend=attend),
    mesh=mesh,
    in_specs=(specs,),
    out_specs=P(),
  )
  with pytest.raises(MeshError, match="2 of 8 experts"):
    jax.eval_shape(call, model)
