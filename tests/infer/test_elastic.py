"""Elastic sessions: read by four instances, answered by two, then by three."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import models
from ringjax.errors import OptionError, PromptError
from ringjax.infer import ElasticSession, Sample, generate, owners_of, prefill
from ringjax.infer.loongserve.retaining_prefill import (
  RetainedCache,
  RetainingParallel,
)
from ringjax.nn.sharding_context import ContextParallel, ShardingContext
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.parallel.chips import CORES
from ringjax.parallel.layout import Striped
from ringjax.plan.compiler.hlo import HloProgram
from tests.helpers import refused

LENGTHS = (37, 20, 5)


def _prompts(model, lengths=LENGTHS, seed=0):
  chance = np.random.default_rng(seed)
  vocab = model.config.vocab
  return [chance.integers(0, vocab, n).astype(np.int32) for n in lengths]


def _owners(seed=1):
  """Instances 0 and 2 keep all: ranges, single tokens, one for the whole."""
  chance = np.random.default_rng(seed)
  return [
    owners_of([20, 0, 17, 0]),
    2 * chance.integers(0, 2, LENGTHS[1]),
    owners_of([0, 0, LENGTHS[2]]),
  ]


# Grouped queries; windows, sinks and two rotations; slopes for positions.
@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "llama3",
    pytest.param("gpt_oss", marks=pytest.mark.long),
    pytest.param("falcon_rw", marks=pytest.mark.slow),
    pytest.param("llama_dynamic", marks=pytest.mark.slow),
  ],
)
def test_four_read_two_answer_then_three(loaded, name):
  one, _ = loaded(name)
  model, mesh = loaded(name, 4)
  prompts = _prompts(one)
  want = generate(one, prompts, max_new_tokens=9)
  session = ElasticSession(model, 40, mesh=mesh)
  session.read(prompts, _owners())
  assert session.members == (0, 2)
  assert session.used.sum(1).tolist() == list(LENGTHS)
  first = session.decode(4)
  held = session.used
  session.regroup([0, 2, 3])
  rest = session.decode(5)
  got = np.concatenate([first.tokens, rest.tokens], 1)
  np.testing.assert_array_equal(got, want.tokens)
  # The third row's master is the one that joined: what came is there.
  after = session.used
  # In another order another one is; what is held is the same.
  session.regroup([0, 2, 3], first=3)
  assert session.members == (3, 0, 2)
  np.testing.assert_array_equal(session.used, after[:, [2, 0, 1]])
  assert after[2].tolist() == [*held[2], 5]
  assert after[:, :2].sum() == held.sum() + 2 * 5


@pytest.mark.long
def test_instances_join_one_that_decoded_alone(loaded):
  one, _ = loaded("llama3")
  model, mesh = loaded("llama3", 4)
  prompt = _prompts(one)[:1]
  want = generate(one, prompt, max_new_tokens=9).tokens
  session = ElasticSession(model, 64, mesh=mesh, members=[3])
  session.read(prompt, [np.full(LENGTHS[0], 3)])
  parts = [session.decode(4).tokens]
  for members in ([3, 0], [1, 3, 0]):
    session.regroup(members, first=members[0])
    parts.append(session.decode(len(members)).tokens)
  np.testing.assert_array_equal(np.concatenate(parts, 1), want)


@pytest.mark.long
def test_plan_is_data_and_regrouping_moves_nothing(loaded):
  one, _ = loaded("llama3")
  model, mesh = loaded("llama3", 4)
  prompts = _prompts(one)
  want = generate(one, prompts, max_new_tokens=4).tokens
  session = ElasticSession(model, 40, mesh=mesh)
  session.read(prompts, _owners())
  session.decode(2)
  programs = prefill.read._cache_size()
  chance = np.random.default_rng(5)
  other = ElasticSession(model, 40, mesh=mesh)
  anywhere = [chance.integers(0, 4, n) for n in LENGTHS]
  other.read(prompts, anywhere, members=range(4))
  assert prefill.read._cache_size() == programs
  assert other.used.tolist() == [
    np.bincount(row, minlength=4).tolist() for row in anywhere
  ]
  np.testing.assert_array_equal(other.decode(4).tokens, want)
  # Another session, whose cache grows by an instance: the arrays on the devices
  # of the first two are those from before.
  places = lambda session: {
    shard.device.id: shard.data.unsafe_buffer_pointer()
    for shard in session.cache.slots[0].k.addressable_shards
  }
  before = places(session)
  session.regroup([0, 1, 2])
  after = places(session)
  assert len(before) == 2
  assert len(after) == 3
  assert before.items() <= after.items()


@pytest.mark.long
def test_reading_sends_what_a_ring_sends(loaded):
  model, mesh = loaded("llama3", 4)
  session = ElasticSession(model, 40, mesh=mesh)
  plan = [np.arange(33) % 4, np.arange(20) % 2]
  cache, place = session._planned(plan, Striped().padded_order(64, 4), mesh)
  none = jnp.zeros(2, jnp.int32)
  ids = jnp.zeros((2, 64), jnp.int32)

  def sent(attend, cache):
    call = prefill.read.lower(
      model, attend, ids, None, ids + 1, cache, none, jnp.int32(33)
    )
    core = next(iter(CORES.values()))
    return HloProgram(call.compile().as_text(), core).sent_bytes()

  where = dict(mesh=mesh, axis="seq", layout=Striped())
  kept = sent(RetainingParallel(**where), RetainedCache(cache, place))
  empty = model.init_cache(
    2, 160, sharding=ShardingContext(mesh=mesh, axis="seq")
  )
  plain = sent(ContextParallel(**where, strategy=Ring()), empty)
  # Three hops of 16 tokens' keys and values of each row, and coordinates.
  keys = sum(
    kind.layers * 3 * 2 * 2 * kind.heads * 16 * kind.key * 4
    for kind in model.kinds
  )
  assert keys <= kept["collective-permute"] <= plain["collective-permute"]
  assert sum(kept.values()) <= sum(plain.values())


@pytest.mark.slow
def test_sampling_with_a_penalty_goes_on_in_another_group(loaded):
  one, _ = loaded("llama3")
  model, mesh = loaded("llama3", 4)
  prompts = _prompts(one, (9, 14))
  sampler = Sample(temperature=0.9, repetition_penalty=1.3, seed=3)
  want = generate(one, prompts, max_new_tokens=6, sampler=sampler)
  stop = int(want.tokens[1, 2])
  ended = generate(
    one, prompts, max_new_tokens=6, sampler=sampler, stop=stop, pad_id=7
  )
  session = ElasticSession(model, 40, mesh=mesh)
  session.read(prompts, [np.full(9, 1), np.full(14, 1)], members=[1, 2])
  take = dict(sampler=sampler, stop_ids=[stop], pad_id=7)
  first = session.decode(4, **take)
  # A group of one instance: its program sends nothing.
  session.regroup([1, 2, 3])
  rest = session.decode(2, **take)
  got = np.concatenate([first.tokens, rest.tokens], 1)
  np.testing.assert_array_equal(got, ended.tokens)
  np.testing.assert_array_equal(first.lengths + rest.lengths, ended.lengths)


@pytest.mark.slow
def test_instances_of_two_devices(tmp_path_factory, loaded):
  """Heads over `model`: an instance is two devices that share them."""
  from tests import checkpoints

  one, _ = loaded("llama3")
  folder = checkpoints.write("llama3", tmp_path_factory.mktemp("two") / "m")
  mesh = rj.make_mesh((3, 2), ("seq", "model"), devices=jax.devices()[:6])
  model = models.load(folder, mesh=mesh)
  prompts = _prompts(one)
  want = generate(one, prompts, max_new_tokens=5)
  session = ElasticSession(model, 40, mesh=mesh)
  session.read(prompts, [owners_of([n // 2, n - n // 2]) for n in LENGTHS])
  first = session.decode(2)
  session.regroup([0, 1, 2])
  rest = session.decode(3)
  got = np.concatenate([first.tokens, rest.tokens], 1)
  np.testing.assert_array_equal(got, want.tokens)


@pytest.mark.long
def test_refusals(loaded):
  model, mesh = loaded("llama3", 4)
  latent, _ = loaded("deepseek_v3", 4)
  make = lambda **how: ElasticSession(model, 8, mesh=mesh, **how)
  refused(OptionError, lambda: ElasticSession(latent, 8, mesh=mesh), "latents")
  refused(OptionError, lambda: make(members=[4]), "members", "0 to 3")
  refused(OptionError, lambda: make().decode(1), "read")
  prompts = _prompts(model, (6, 3))
  read = lambda *owners, **how: make(**how).read(prompts, owners)
  refused(OptionError, lambda: read([0] * 6), "owners")
  refused(OptionError, lambda: read([0] * 6, [0] * 2), "owners")
  refused(OptionError, lambda: read([3] * 6, [0] * 3, members=[0, 1]), "owners")
  long = _prompts(model, (9,))
  refused(PromptError, lambda: make().read(long, [[1] * 9]), "8 slots")
  session = make()
  session.read(prompts, [owners_of([3, 3]), owners_of([0, 3])])
  refused(OptionError, lambda: session.regroup([0]), "instance 1", "6 tokens")
  refused(OptionError, lambda: session.regroup([0, 1], first=2), "first")
  refused(OptionError, lambda: session.read(prompts, []), "second call")
  refused(PromptError, lambda: session.decode(7), "regroup")
