"""Log-probabilities and embeddings of texts are those of a plain forward."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import NotFiniteLogitsError, OptionError, PromptError
from ringjax.infer import TextScorer
from ringjax.kv.simulated import SimulatedCache
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel import programs

LLAMA = dict(
  model_type="llama",
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
)
# Recurrent layers, whose states padding must not change.
RECURRENT = dict(
  model_type="mamba2",
  vocab_size=61,
  hidden_size=32,
  num_hidden_layers=2,
  state_size=8,
  num_heads=4,
  head_dim=16,
  expand=2,
  n_groups=1,
  conv_kernel=4,
  chunk_size=16,
)
CONFIGS = {"llama": LLAMA, "mamba2": RECURRENT}
LENGTHS = (1, 7, 33, 2, 16, 19)


def texts(lengths=LENGTHS, vocab=61):
  rng = np.random.default_rng(1)
  return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


@pytest.fixture(scope="module")
def model():
  return rj.models.create(LLAMA, seed=0)


def forward(model, ids, **options):
  """Logits [T, V] of a text in a call of a fixed length."""
  row = np.zeros((1, 64), np.int32)
  row[0, : ids.size] = ids
  logits = model(row, **options)
  logits = logits[0] if isinstance(logits, tuple) else logits
  return np.asarray(logits[0, : ids.size])


def check_scores(scorer, want_logits, top=3, lengths=LENGTHS):
  batches = []
  results = scorer.scores(texts(lengths), top=top, on_batch=batches.append)
  assert batches[-1] == len(lengths) and len(batches) < len(lengths)
  for ids, result in zip(texts(lengths), results, strict=True):
    want = np.asarray(jax.nn.log_softmax(want_logits(ids)))[:-1]
    assert result.logprobs.shape == (ids.size - 1,)
    at = np.arange(ids.size - 1)
    np.testing.assert_allclose(result.logprobs, want[at, ids[1:]], atol=2e-5)
    order = np.argsort(-want, 1)[:, :top]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(
      result.top_logprobs, np.take_along_axis(want, order, 1), atol=2e-5
    )
    for n in at:
      same = result.top_ids[n] == ids[n + 1]
      assert (result.top_logprobs[n][same] == result.logprobs[n]).all()
    # What is greedy is so by equal numbers.
    assert result.greedy(ids.size - 1)
    if ids.size > 1:
      assert result.greedy() == bool((order[:, 0] == ids[1:]).all())


@pytest.mark.parametrize(
  "family", ["llama", pytest.param("mamba2", marks=pytest.mark.slow)]
)
def test_scores_are_those_of_each_text_alone(family):
  model = rj.models.create(CONFIGS[family], seed=0)
  check_scores(
    TextScorer(model, batch_tokens=64), lambda ids: forward(model, ids)
  )


def test_no_program_is_compiled_while_others_wait(model):
  compiled = []

  @contextlib.contextmanager
  def around():
    before = programs._Compiled.count
    yield
    compiled.append(programs._Compiled.count - before)

  before = programs._Compiled.count
  TextScorer(model, around=around).scores([[*range(1, 10)]], top=7)
  assert programs._Compiled.count > before and compiled == [0]


@pytest.mark.long
def test_greedy_texts(model):
  ids = [3]
  for _ in range(6):
    logits = forward(model, np.array(ids, np.int32))
    ids.append(int(np.argmax(logits[-1])))
  scorer = TextScorer(model)
  (right,) = scorer.scores([ids])
  assert right.greedy()
  (wrong,) = scorer.scores([[*ids[:3], (ids[3] + 1) % 61, *ids[4:]]])
  assert not wrong.greedy() and not wrong.greedy(2)


@pytest.mark.parametrize(
  "prefill",
  [
    pytest.param("auto", marks=pytest.mark.long),
    pytest.param("ring", marks=pytest.mark.slow),
    pytest.param("ulysses", marks=pytest.mark.slow),
  ],
)
def test_a_sharded_sequence(prefill):
  mesh = rj.make_mesh((2, 2), ("data", "seq"))
  model = rj.models.create(LLAMA, seed=0)
  want = {ids.tobytes(): forward(model, ids) for ids in texts()}
  means = TextScorer(model).embeddings(texts(), pooling="mean")
  lasts = TextScorer(model).embeddings(texts())
  placed = rj.models.place(model, mesh)
  scorer = TextScorer(placed, prefill=prefill, batch_tokens=128)
  check_scores(scorer, lambda ids: want[ids.tobytes()])
  for pooling, embeddings in (("mean", means), ("last", lasts)):
    np.testing.assert_allclose(
      scorer.embeddings(texts(), pooling=pooling), embeddings, atol=1e-5
    )


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("int4", marks=pytest.mark.long),
    pytest.param("int8:first=2,recent=4", marks=pytest.mark.slow),
  ],
)
def test_a_codec_of_a_cache(model, kind):
  cache = SimulatedCache.create(model, kind)
  attend = CachedAttention() if cache.kind.exact else None
  want = lambda ids: forward(model, ids, cache=cache, attend=attend)
  scorer = TextScorer(model, cache_kind=kind, batch_tokens=128)
  check_scores(scorer, want)
  exact = TextScorer(model).scores(texts())[2].logprobs
  assert np.abs(scorer.scores(texts())[2].logprobs - exact).max() > 1e-4


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_hidden_states(model, pooling):
  scorer = TextScorer(model, batch_tokens=32)
  embeddings = scorer.embeddings(texts(), pooling=pooling)
  assert (
    embeddings.shape == (len(LENGTHS), 32) and embeddings.dtype == np.float32
  )
  # The head is a map of the hidden states, so least squares gives them back.
  head = np.asarray(model.head.weight[...], np.float64)
  for ids, row in zip(texts(), embeddings, strict=True):
    logits = forward(model, ids).astype(np.float64)
    states = np.linalg.lstsq(head.T, logits.T, rcond=None)[0].T
    want = states[-1] if pooling == "last" else states.mean(0)
    want /= np.linalg.norm(want)
    np.testing.assert_allclose(row, want, atol=1e-5)


def test_what_can_not_be_read_is_refused(model):
  for prefill in ("chunked", "kvr"):
    mesh = rj.make_mesh((2,), ("seq",))
    with pytest.raises(OptionError, match="prefill"):
      TextScorer(rj.models.place(model, mesh), prefill=prefill)
  with pytest.raises(OptionError, match="codec"):
    TextScorer(model, cache_kind="dense")
  scorer = TextScorer(model)
  with pytest.raises(OptionError, match="pooling"):
    scorer.embeddings([[1]], pooling="first")
  for wrong in ([[]], [[61]], [[1], [-1]]):
    with pytest.raises(PromptError):
      scorer.scores(wrong)
  with pytest.raises(PromptError, match="65"):
    scorer.embeddings([[1] * 65])
  assert scorer.scores([]) == []


def test_numbers_that_are_not_finite_are_named():
  model = rj.models.create(LLAMA, seed=0)
  weight = model.embed.weight
  weight.set_value(weight.get_value().at[5].set(np.nan))
  scorer = TextScorer(model)
  assert np.isfinite(scorer.scores([[1, 2]])[0].logprobs).all()
  for call in (scorer.scores, scorer.embeddings):
    with pytest.raises(NotFiniteLogitsError, match="text 1"):
      call([[1, 2], [3, 5, 4, 1]])
