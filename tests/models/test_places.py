"""Where a call's tokens lie that does not say so, and under which meshes."""

from __future__ import annotations

import contextlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import InputTypeError, MeshError
from ringjax.kv.cache import KVCache
from ringjax.models import CachedAttention, ContextParallel
from tests import checkpoints
from tests.helpers import make_mesh, refused

NAME = "qwen3"
VOCAB = 40
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 24)).astype(np.int32)


def close(got, want) -> None:
  np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)


@pytest.fixture(scope="module")
def made():
  """(model on one device, its logits) by the name of a fixture."""
  found = {}

  def make(name: str):
    if name not in found:
      model = rj.models.create(checkpoints.config(name), seed=1)
      found[name] = model, np.asarray(model(TOKENS))
    return found[name]

  return make


@pytest.fixture(scope="module")
def placed(made):
  """The same on a mesh of four, made with explicit axes as JAX makes it."""
  model, logits = made(NAME)
  return rj.models.place(model, make_mesh(4, "explicit")), logits


@pytest.fixture(scope="module")
def said(made):
  return rj.infer.generate(made(NAME)[0], TOKENS, max_new_tokens=3)


def test_tokens_lie_where_the_weights_do(placed):
  model, logits = placed
  assert model.mesh == make_mesh(4, "auto")
  got = model(TOKENS)
  assert got.sharding.spec == P(None, "seq")
  close(got, logits)
  # A length that four do not divide is filled up on the way.
  close(model(TOKENS[:, :21]), logits[:, :21])


def test_tokens_lie_on_the_current_mesh(made):
  model, logits = made(NAME)
  with jax.set_mesh(make_mesh(3, "auto")):
    for call in (model, jax.jit(model)):
      got = call(TOKENS)
      assert got.sharding.spec == P(None, "seq")
      close(got, logits)


@pytest.mark.parametrize("axis", ["seq", "sp"])
def test_a_jit_of_the_caller_knows_the_mesh_of_its_arguments(made, axis):
  """Traced weights, automatic axes, no mesh set or given: keys travel."""
  model, logits = made(NAME)
  mesh = jax.make_mesh((4,), (axis,), axis_types=(AxisType.Auto,))
  there = rj.models.place(model, mesh)
  call = jax.jit(lambda model, x: model(x))
  close(call(there, TOKENS), logits)
  text = call.lower(there, TOKENS).compile().as_text()
  sent = re.findall(r"= \S+ (all-gather|collective-permute)(?:-start)?\(", text)
  assert set(sent) == {"collective-permute"}


@pytest.mark.long
def test_the_current_mesh_comes_before_that_of_the_weights(placed, said):
  model, logits = placed
  shape = (2, 2)
  other = rj.make_mesh(shape, ("data", "seq"), devices=jax.devices()[:4])
  with jax.set_mesh(other):
    got = model(TOKENS)
    assert got.sharding.mesh.shape == {"data": 2, "seq": 2}
    close(got, logits)
    new = rj.infer.generate(model, TOKENS, max_new_tokens=3)
  np.testing.assert_array_equal(new, said)


@pytest.mark.long
@pytest.mark.parametrize("where", ["weights", "current", "shard"])
def test_a_layout_alone_is_that_of_the_place(made, placed, where):
  layout, shards = rj.Striped(block=2), 4
  mesh = make_mesh(shards, "auto")
  model, logits = placed if where == "weights" else made(NAME)
  axis = {"axis": "seq"} if where == "shard" else {}
  call = lambda model, x: model(
    x, attend=ContextParallel(layout=layout, **axis)
  )
  if where == "shard":
    call = jax.shard_map(
      call, mesh=mesh, in_specs=(P(), P(None, "seq")), out_specs=P(None, "seq")
    )
  inside = (
    jax.set_mesh(mesh) if where == "current" else contextlib.nullcontext()
  )
  with inside:
    got = call(model, layout.permute(TOKENS, shards=shards))
  close(layout.restore(np.asarray(got), shards=shards), logits)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "check_vma"),
  [
    (NAME, True),
    (NAME, False),
    # Rotations by the length of the text, layers with a state, experts.
    ("phi3_longrope_long", True),
    ("qwen3_next", True),
    pytest.param("llama_dynamic", True, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
  ],
)
def test_a_shard_s_tokens_are_counted_on(made, name, check_vma):
  model, logits = made(name)
  call = jax.shard_map(
    lambda model, x: model(x, attend=ContextParallel(axis="seq")),
    mesh=make_mesh(4, "auto"),
    in_specs=(P(), P(None, "seq")),
    out_specs=P(None, "seq"),
    check_vma=check_vma,
  )
  close(jax.jit(call)(model, TOKENS), logits)


@pytest.mark.long
def test_the_length_of_the_text_is_that_of_all_shards(made):
  """Positions that are given leave it to be found."""
  model, logits = made("phi3_longrope_long")
  at = np.broadcast_to(np.arange(24, dtype=np.int32), TOKENS.shape)
  part = P(None, "seq")
  got = jax.shard_map(
    lambda model, x, at: model(
      x, positions=at, attend=ContextParallel(axis="seq")
    ),
    mesh=make_mesh(4, "auto"),
    in_specs=(P(), part, part),
    out_specs=part,
  )(model, TOKENS, at)
  close(got, logits)


@pytest.mark.parametrize("axis", ["seq", None])
def test_a_shard_map_over_the_batch_leaves_the_sequence(made, axis):
  model, logits = made(NAME)
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  call = jax.shard_map(
    lambda model, x: model(x, attend=ContextParallel(axis=axis)),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P("data"),
    axis_names={"data"},
  )
  close(jax.jit(call)(model, TOKENS), logits)


@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["data", "seq"])
def test_in_a_shard_map_no_axis_is_guessed(made, name, check_vma):
  """An axis of any name may shard the batch as well as the sequence."""
  model, logits = made(NAME)

  def call(part, **options):
    return jax.shard_map(
      lambda model, x: model(x, **options),
      mesh=rj.make_mesh((2,), (name,), devices=jax.devices()[:2]),
      in_specs=(P(), part),
      out_specs=part,
      check_vma=check_vma,
    )(model, TOKENS)

  batch, sequence = P(name), P(None, name)
  spellings = (f"ContextParallel(axis='{name}')", "ContextParallel(axis=None)")
  for part in (batch, sequence):
    refused(MeshError, lambda p=part: call(p), "tokens", *spellings)
    refused(
      MeshError,
      lambda p=part: call(p, attend=ContextParallel()),
      "tokens",
      *spellings,
    )
  close(call(batch, attend=ContextParallel(axis=None)), logits)
  close(call(sequence, attend=ContextParallel(axis=name)), logits)
  if check_vma:
    close(call(P()), logits)


def test_an_axis_without_a_mesh_is_that_of_the_place(made, placed):
  model, logits = placed
  got = model(TOKENS, attend=ContextParallel(axis="seq"))
  assert got.sharding.spec == P(None, "seq")
  close(got, logits)
  close(model(TOKENS, attend=ContextParallel(axis=None)), logits)
  refused(
    MeshError,
    lambda: made(NAME)[0](TOKENS, attend=ContextParallel(axis="seq")),
    "axis",
  )


@pytest.mark.long
def test_queries_visit_the_cache_where_it_lies(placed):
  model, logits = placed
  sharding = CachedAttention(mesh=make_mesh(4, "explicit"), axis="seq")
  for attend in (None, CachedAttention(replicated=False)):
    cache = model.init_cache(2, 32, sharding=sharding)
    got, cache = model(TOKENS, cache=cache, attend=attend)
    close(got, logits)
    assert cache.slots[0].k.sharding.spec[3] == "seq"
  # Queries visit all shards, and what each found is added up.
  call = jax.jit(lambda model, x, cache: model(x, cache=cache))
  text = call.lower(model, TOKENS[:, :4], cache).compile().as_text()
  sent = re.findall(r"= (\w+)\S* (all-\w+|collective-\w+)\(", text)
  assert ("f32", "all-reduce") in sent
  assert {how for _, how in sent} == {"all-reduce"}


@pytest.mark.long
def test_all_of_a_model_s_work_under_an_explicit_mesh(made, said, tmp_path):
  """Which is what jax.make_mesh makes, and jax.set_mesh sets."""
  model, _ = made(NAME)
  mesh = make_mesh(4, "explicit")
  with jax.set_mesh(mesh):
    there = rj.models.place(model, mesh)
    rj.models.save(there, tmp_path / "model")
    loaded = rj.models.load(tmp_path / "model", mesh=mesh)
    session = rj.infer.Session(loaded, 40, batch=2, mesh=mesh)
    got = [
      rj.infer.generate(there, TOKENS, max_new_tokens=3),
      rj.infer.generate(loaded, TOKENS, max_new_tokens=3, mesh=mesh),
      rj.infer.generate(loaded, TOKENS, max_new_tokens=3, cache=session),
    ]
    session.restart()
    got.append(
      rj.infer.generate(loaded, TOKENS, max_new_tokens=3, cache=session)
    )
    assert jax.sharding.get_mesh() == mesh
  for tokens in got:
    np.testing.assert_array_equal(tokens, said)


@pytest.mark.long
def test_tokens_of_an_explicit_mesh(made, placed):
  mesh = make_mesh(4, "explicit")
  tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(None, "seq")))
  at = jax.device_put(
    np.broadcast_to(np.arange(24, dtype=np.int32), TOKENS.shape),
    NamedSharding(mesh, P()),
  )
  for model, logits in (made(NAME), placed):
    close(model(tokens), logits)
    refused(
      MeshError, lambda m=model: jax.jit(lambda x: m(x))(tokens), "tokens"
    )
    close(model(tokens, positions=at), logits)


@pytest.mark.usefixtures("unchecked")
def test_what_has_no_place(made, placed):
  (model, _), (there, _) = made(NAME), placed
  mesh = make_mesh(4, "auto")
  refused(InputTypeError, lambda: model(TOKENS, attend="ring"), "attend")
  refused(MeshError, lambda: ContextParallel(mesh=mesh, axis="sep"), "'sep'")
  with jax.set_mesh(make_mesh(4, "explicit")):
    for call in (there, jax.jit(there)):
      refused(MeshError, lambda c=call: c(TOKENS), "mesh", "automatic")
  attend = CachedAttention(mesh=mesh, axis="seq")
  with jax.set_mesh(make_mesh(2, "auto")):
    refused(
      MeshError,
      lambda: there(TOKENS, cache=there.init_cache(2, 32, sharding=attend)),
      "cache",
    )
    refused(MeshError, lambda: model(TOKENS, attend=attend), "attend")


@pytest.mark.parametrize(
  ("options", "part", "names", "words"),
  [
    (
      dict(attend=ContextParallel(axis="seq")),
      P(),
      None,
      ("tokens", "same on all"),
    ),
    (
      dict(attend=ContextParallel(axis="sp")),
      P("data"),
      {"data"},
      ("axis", "'sp'"),
    ),
    (
      dict(attend=ContextParallel(axis=None, layout=rj.Zigzag())),
      P("data"),
      {"data"},
      ("attend",),
    ),
    (
      dict(cache=True, attend=ContextParallel(axis="seq")),
      P(None, "seq"),
      None,
      ("cache",),
    ),
    (dict(attend=True), P(None, "seq"), None, ("attend",)),
  ],
)
def test_what_has_no_place_in_a_shard_map(made, options, part, names, words):
  model, _ = made(NAME)
  mesh = rj.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
  if "cache" in options:
    cache = model.init_cache(2, 32)
    assert isinstance(cache, KVCache)
    options = options | dict(cache=cache)
  elif options.get("attend") is True:
    options = dict(attend=ContextParallel(mesh=mesh, axis="seq"))
  call = jax.shard_map(
    lambda model, x: model(x, **options),
    mesh=mesh,
    in_specs=(P(), part),
    out_specs=part,
    **({} if names is None else dict(axis_names=names)),
  )
  refused(MeshError, lambda: jax.jit(call)(model, TOKENS), *words)
