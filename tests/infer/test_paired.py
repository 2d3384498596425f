"""Two prompts in one program are two prompts apart."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.errors import ConfigError, MeshError, OptionError, PromptError
from ringjax.parallel import collectives
from tests import checkpoints
from tests.helpers import refused


@pytest.fixture(scope="module")
def over_heads(tmp_path_factory):
  """Loads a fixture with its heads on two devices."""
  mesh = rj.make_mesh((2,), ("model",), devices=jax.devices()[:2])

  def load(name):
    folder = tmp_path_factory.mktemp(name)
    checkpoints.write(name, folder)
    return rj.models.load(folder, mesh=mesh)

  return load


def prompts_of(model, lengths, seed):
  rng = np.random.default_rng(seed)
  vocab = model.config.vocab
  return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("name", [
  # Its maps have biases, also those whose sums are over shards.
  pytest.param("starcoder2", marks=pytest.mark.long),
  pytest.param("gemma2", marks=pytest.mark.slow),
  pytest.param("falcon_7b", marks=pytest.mark.slow),
  pytest.param("phi3", marks=pytest.mark.slow),
])  # fmt: skip
def test_two_requests_of_other_lengths(over_heads, name):
  model = over_heads(name)
  # Rows that shards do not divide, of another number and length.
  two = prompts_of(model, (5, 17), 1), prompts_of(model, (33,), 2)
  found = rj.infer.paired_prefill(model, *two, capacity=64)
  for prompts, logits, session in zip(
    two, found.logits, found.sessions, strict=True
  ):
    lengths = [p.size for p in prompts]
    assert session.lengths.tolist() == lengths
    longest = max(lengths)
    ids = np.stack([np.pad(p, (0, longest - p.size)) for p in prompts])
    seg = np.arange(longest)[None] < np.array(lengths)[:, None]
    rows = np.array(lengths)[:, None] - 1
    want = model(ids, segment_ids=seg.astype(np.int32), rows=rows)[:, 0]
    np.testing.assert_allclose(logits, want, atol=2e-4, rtol=1e-4)
  # Answers go on behind a session.
  first = np.asarray(found.logits[0]).argmax(-1).astype(np.int32)[:, None]
  behind = rj.infer.generate(
    model, first, max_new_tokens=4, cache=found.sessions[0]
  ).tokens
  whole = rj.infer.generate(model, two[0], max_new_tokens=5).tokens
  np.testing.assert_array_equal(np.concatenate([first, behind], 1), whole)


@pytest.mark.parametrize(("name", "kind"), [
  pytest.param("starcoder2", "windowed", marks=pytest.mark.long),
  pytest.param("llama3", "int8", marks=pytest.mark.long),
  pytest.param("gemma2", "windowed", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_prompt_is_read_beside_answers(over_heads, name, kind):
  model = over_heads(name)
  asked, prompts = prompts_of(model, (5, 9), 1), prompts_of(model, (33, 20), 2)
  count = 1 + 5 + 4
  want = rj.infer.generate(model, asked, max_new_tokens=count, cache_kind=kind)
  # A row that ends while the prompts are read.
  stop = [int(want[1][3])]
  want = rj.infer.generate(
    model, asked, max_new_tokens=count, stop=stop, cache_kind=kind
  )
  session = rj.infer.Session(model, 64, batch=2, cache_kind=kind)
  first = rj.infer.generate(
    model, asked, max_new_tokens=1, stop=stop, cache=session
  )
  found = rj.infer.prefill_beside(
    model, prompts, session, chunk=7, stop=stop, cache_kind=kind
  )
  assert found.answers.tokens.shape == (2, 5)
  for row in range(2):
    told = [*first[row], *found.answers[row]]
    assert told == want[row][: len(told)].tolist()
  assert len(found.answers[0]) > len(found.answers[1])
  # Both go on, each as alone.
  ahead = rj.infer.Session(model, 64, batch=2, cache_kind=kind)
  rj.infer.generate(model, asked, max_new_tokens=6, stop=stop, cache=ahead)
  more = prompts_of(model, (3, 3), 3)
  for beside, alone in ((session, ahead),):
    a, b = (
      rj.infer.generate(model, more, max_new_tokens=4, cache=x).tokens
      for x in (beside, alone)
    )
    np.testing.assert_array_equal(a, b)
  alone = rj.infer.Session(model, 320, batch=2, cache_kind=kind)
  rj.infer.read_context(model, prompts, cache=alone, prefill="chunked", chunk=7)
  a, b = (
    rj.infer.generate(model, more, max_new_tokens=4, cache=x).tokens
    for x in (found.session, alone)
  )
  np.testing.assert_array_equal(a, b)


def test_answers_beside_need_a_token_to_go_on_from(over_heads):
  model = over_heads("llama3")
  (prompt,) = prompts_of(model, (20,), 2)
  read = functools.partial(rj.infer.prefill_beside, model, [prompt])
  session = rj.infer.Session(model, 8)
  refused(OptionError, lambda: read(session), "pending")
  rj.infer.generate(model, [prompt[:4]], max_new_tokens=1, cache=session)
  refused(PromptError, lambda: read(session, chunk=2), "room for 4")
  refused(OptionError, lambda: read(session, chunk=0), "chunk")
  refused(OptionError, lambda: read(session, stop="text"), "tokenizer")
  other = over_heads("llama3")
  refused(
    OptionError,
    lambda: rj.infer.prefill_beside(other, [prompt], session),
    "weights",
  )


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_a_sum_by_sends_is_the_sum(rows, how):
  x = jax.random.normal(jax.random.key(0), (4, rows, 3))
  f = lambda x: collectives.sum_by_sends(x, "model")
  if how == "vmap":
    found = jax.vmap(f, axis_name="model")(x)
  else:
    mesh = rj.make_mesh((4,), ("model",), devices=jax.devices()[:4])
    found = jax.jit(
      jax.shard_map(
        lambda x: f(x[0])[None], mesh=mesh, in_specs=P("model"),
        out_specs=P("model"), check_vma=False,
      )
    )(x)  # fmt: skip
  for shard in found:
    np.testing.assert_allclose(shard, x.sum(0), atol=1e-5)


def test_what_is_refused(over_heads, loaded):
  read = rj.infer.paired_prefill
  alone, _ = loaded("llama3")
  two = prompts_of(alone, (5,), 1), prompts_of(alone, (7,), 2)
  refused(MeshError, lambda: read(alone, *two), "model")
  sharded, _ = loaded("llama3", 2)
  refused(MeshError, lambda: read(sharded, *two), "seq")
  model = over_heads("llama3")
  refused(PromptError, lambda: read(model, *two, capacity=6), "capacity")
  refused(OptionError, lambda: read(model, *two, cache_kind="none"), "none")
  coded = rj.models.with_coded_weights(model)
  refused(OptionError, lambda: read(coded, *two), "plain weights")


@pytest.mark.slow
def test_experts_are_refused(over_heads):
  model = over_heads("mixtral")
  two = prompts_of(model, (5,), 1), prompts_of(model, (7,), 2)
  refused(ConfigError, lambda: rj.infer.paired_prefill(model, *two), "Experts")
