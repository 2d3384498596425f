"""Draft models of their own: another tokenizer, a folder, another mesh."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import ringjax as rj
from ringjax.data import Bytes, Tokenizer
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.infer.speculate import model_drafting
from ringjax.models import small, tiny
from tests.data import made
from tests.helpers import refused
from tests.infer.test_speculate import prompts_of

TEXTS = [
  "def area(self):\n    return self.width * self.height\n\ndef area(self):\n",
  "The capital of Grüße 😀 is: a, b, c, d, a, b, c, d, a, b,",
]


class Shuffled:
  """Bytes by other numbers."""

  by_bytes, lead, bos_id, adds_bos = True, "", None, False

  def __init__(self, order):
    self.order, self.back = order, np.argsort(order)

  def piece(self, token_id):
    return Bytes().piece(int(self.back[token_id]))

  def is_special(self, token_id):
    return False

  def window(self, ids):
    return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

  def encode(self, text, *, bos=False):
    return self.order[Bytes().encode(text)].astype(np.int32)


@pytest.fixture(scope="module")
def target():
  return rj.models.load(small.path())


def asked(model, drafter=None, texts=TEXTS, **options):
  """Tokens, and the report where something drafts."""
  reports = []
  prompts = [Bytes().encode(text) for text in texts]
  new = rj.infer.generate(
    model,
    prompts,
    max_new_tokens=24,
    speculate=drafter,
    report=reports.append,
    **options,
  )
  return new.tokens, reports[0].speculation


def shuffled(model, seed=0):
  """The model with other numbers for its tokens, and its tokenizer."""
  graph, state = nnx.split(model)
  order = np.random.default_rng(seed).permutation(model.config.vocab)
  back = np.argsort(order)

  def one(path, x):
    names = jax.tree_util.keystr(path)
    if "embed" in names:
      return x[back]
    return x[:, back] if "head" in names else x

  state = jax.tree_util.tree_map_with_path(one, state)
  return nnx.merge(graph, state), Shuffled(order)


@pytest.mark.slow
def test_the_same_model_by_other_numbers_is_always_right(target):
  draft, mine = shuffled(target)
  drafter = speculate.TranslatedDraft(
    model=draft, tokenizer=mine, target_tokenizer=Bytes(), steps=4, adapt=False
  )
  want, _ = asked(target)
  got, found = asked(target, drafter)
  np.testing.assert_array_equal(got, want)
  # But within a character of several bytes nothing is drafted.
  assert found.tokens_per_call > 4


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ("llama3", "gemma", "llama2", "wordpiece", "unigram")
  ],
)
def test_words_drafted_for_bytes(target, tmp_path, kind):
  words = Tokenizer.load(made.folder(kind, tmp_path))
  draft = rj.models.create(
    dict(
      model_type="llama", vocab_size=words.vocab_size, hidden_size=32,
      intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
      num_key_value_heads=2, max_position_embeddings=1024,
    ),
    seed=0,
  )  # fmt: skip
  drafter = speculate.TranslatedDraft(
    model=draft, tokenizer=words, target_tokenizer=Bytes(), steps=3
  )
  want, _ = asked(target, temperature=0.7, seed=2)
  got, found = asked(target, drafter, temperature=0.7, seed=2)
  np.testing.assert_array_equal(got, want)
  assert found.drafted


@pytest.mark.slow
def test_through_text_as_without(target):
  """Where both have one tokenizer, text is only another way."""
  draft, options = rj.models.load(tiny.path()), dict(adapt=False)
  plain = speculate.DraftModel(model=draft, count=4, **options)
  text = speculate.TranslatedDraft(
    model=draft, tokenizer=Bytes(), target_tokenizer=Bytes(), count=4,
    steps=4, **options,
  )  # fmt: skip
  want, a = asked(target, plain, TEXTS[:1])
  got, b = asked(target, text, TEXTS[:1])
  np.testing.assert_array_equal(got, want)
  assert (a.drafted, a.accepted) == (b.drafted, b.accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
  "verify", ["match", pytest.param("rejection", marks=pytest.mark.long)]
)
def test_a_folder_drafts_on_devices_of_its_own(target, verify):
  other = rj.make_mesh((2,), ("seq",), devices=jax.devices()[4:6])
  drafter = speculate.DraftModel(
    model=str(tiny.path()), mesh=other, verify=verify, adapt=False
  )
  want, _ = asked(target)
  got, found = asked(target, drafter)
  np.testing.assert_array_equal(got, want)
  assert found.accepted


@pytest.mark.slow
@pytest.mark.parametrize(
  "how", ["self:cache_kind=int4,adapt=False", pytest.param(
    "early:adapt=False", marks=pytest.mark.long)]
)  # fmt: skip
def test_a_draft_model_goes_on_with_what_it_has_read(loaded, monkeypatch, how):
  model, _ = loaded("llama3")
  turns = [[[5, 6, 7] * 6, [1, 2]], [[3] * 20, [8, 9, 8, 9]], [[2], [4]]]
  found = []
  for speculating in (None, how):
    session = rj.infer.Session(model, 128, batch=2)
    for n, turn in enumerate(turns):
      if n == 1:
        # From now on nothing may be read from the beginning.
        monkeypatch.setattr(model_drafting, "read_context", None)
      new = rj.infer.generate(
        model, turn, max_new_tokens=9, cache=session, speculate=speculating
      )
      found.append(new.tokens)
      if speculating:
        assert session.last.speculation.accepted
    monkeypatch.undo()
  for plain, drafted in zip(found[:3], found[3:], strict=True):
    np.testing.assert_array_equal(plain, drafted)
  # Another conversation is read anew.
  session.restart()
  assert session.drafting is None


@pytest.mark.long
def test_bad_draft_models_are_refused(loaded, target):
  model, _ = loaded("llama3")
  ask = lambda drafter: rj.infer.generate(
    model, prompts_of(model), max_new_tokens=4, speculate=drafter
  )
  make = speculate.TranslatedDraft
  both = dict(tokenizer=Bytes(), target_tokenizer=Bytes())
  refused(OptionError, lambda: make(model=target), "both tokenizers", "load(")
  refused(OptionError, lambda: make(**both, widths=(2, 2)), "chain")
  refused(OptionError, lambda: ask(make(**both)), "folder")
  refused(
    OptionError,
    lambda: ask(speculate.DraftModel(model=target)),
    "TranslatedDraft",
  )
