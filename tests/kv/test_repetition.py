"""KVzip: the model repeats its context, and questions follow."""

from __future__ import annotations

import types

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import InputTypeError, OptionError, PromptError
from ringjax.eval import compare_caches
from ringjax.infer.repetition import Instructions
from tests.contracts import cache as contract
from tests.helpers import make_mesh

LENGTHS, CAPACITY = (30, 17), 96


def kind_of(budget=0.5, **options):
  policy = rj.kv.KVzip(budget=budget, chunk=12, sinks=2, **options)
  return rj.kv.CacheConfig(policy=policy, page=8, room=8)


def context():
  draw = np.random.default_rng(2)
  return [draw.integers(1, 64, n).astype(np.int32) for n in LENGTHS]


def asked(session, model, question):
  new = rj.infer.generate(model, question, max_new_tokens=5, cache=session)
  return new.tokens.tolist()


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.long)])
def test_several_questions_about_one_context(shards):
  """One behind the other, and each for itself."""
  model = contract.model(shards, "grouped")
  session = rj.infer.Session(model, CAPACITY, batch=2, cache_kind=kind_of())
  rj.infer.read_context(model, context(), cache=session)
  held = session.cache.tokens()[0]
  # One budget for the heads of all layers together, row by row.
  assert held.sum((0, 2)).tolist() == [
    n * held.shape[0] * held.shape[2] // 2 for n in LENGTHS
  ]
  assert session.lengths.tolist() == list(LENGTHS)
  before, nbytes = session.cache.snapshot(), session.cache.nbytes()
  one, two = np.full((2, 3), 7, np.int32), np.full((2, 4), 9, np.int32)
  first = asked(session, model, one)
  behind = asked(session, model, two)
  # What comes behind the context stays: 3 + 5, and 4 + 4 tokens.
  assert (session.cache.tokens()[0] - held).min() == 16
  assert session.lengths.tolist() == [n + 16 for n in LENGTHS]
  session.cache = session.cache.restore(before)
  alone = asked(session, model, two)
  session.cache = session.cache.restore(before)
  assert asked(session, model, one) == first
  assert asked(session, model, two) == behind
  session.cache = session.cache.restore(before)
  assert asked(session, model, two) == alone
  # In chunks the whole is kept until it is read, and then the same stays.
  session.restart()
  rj.infer.read_context(model, context(), cache=session, chunk=8)
  for row in range(2):
    pairs = zip(
      session.cache.positions(row), before.positions(row), strict=True
    )
    for a, b in pairs:
      assert [x.tolist() for x in a] == [x.tolist() for x in b]
  assert session.cache.nbytes() < 1.2 * nbytes


@pytest.mark.long
@pytest.mark.parametrize("by_layer", [False, True])
def test_what_keeps_everything_changes_nothing(by_layer):
  model = contract.model(1, "grouped")
  ask = lambda kind: rj.infer.generate(
    model, context(), max_new_tokens=9, cache_kind=kind
  ).tokens.tolist()
  assert ask(kind_of(1.0, by_layer=by_layer)) == ask("dense")


@pytest.mark.long
def test_codecs_exact_tokens_and_prefixes():
  """Sinks and exact tokens stay; a prefix that is not repeated goes first."""
  model = contract.model(1, "grouped")
  kind = kind_of(0.5, prefix=5)
  codec = rj.kv.KINDS["int8"].codec
  kind = kind.replace(codec=codec, first=1, recent=3)
  session = rj.infer.Session(model, CAPACITY, batch=2, cache_kind=kind)
  rj.infer.read_context(model, context(), cache=session)
  for row, n in enumerate(LENGTHS):
    for layer in session.cache.positions(row):
      for head in layer:
        assert {0, 1, n - 1, n - 2, n - 3} <= set(head.tolist())
        assert not {2, 3, 4} & set(head.tolist())
  assert session.cache.pages[0].k.dtype == np.uint8


def test_a_template_says_what_is_before_an_answer():
  asked = []

  def encode(text, special=False):
    asked.append((text, special))
    return np.arange(len(asked), dtype=np.int32)

  chat = types.SimpleNamespace(
    chat_template="<u>{{ messages[0]['content'] }}</u>\n<a>",
    special_names={"bos_token": "<s>"},
    encode=encode,
  )
  found = Instructions.of(chat)
  assert ("</u>\n<a>", True) in asked
  prompt = np.arange(100, 130, dtype=np.int32)
  texts = found.texts(prompt, 4, 10)
  assert [(start, end) for start, end, _ in texts] == [
    (4, 14), (14, 24), (24, 30)
  ]  # fmt: skip
  last = texts[2][2].tolist()
  words = [
    *found.later_chunks,
    *range(116, 124),
    *found.suffix,
    *range(124, 130),
  ]
  assert last == words
  none = Instructions.of(None).texts(prompt, 0, 100)
  assert [text.tolist() for _, _, text in none] == [prompt.tolist()]


@pytest.mark.slow
def test_its_costs_are_measured():
  model = contract.model(1, "grouped")
  text = np.stack([context()[0]] * 2)
  every, few = compare_caches(
    model, text, {"all": kind_of(1.0), "few": kind_of(0.25)}
  )
  assert every.kl < 1e-4 < few.kl
  assert few.nbytes < every.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_a_cache_of_ones_own_on_a_mesh(axes):
  """The same tokens stay, of rows of unequal lengths."""
  kept = []
  for shards in (1, 4):
    model = contract.model(shards, "grouped")
    if shards > 1 and axes == "explicit":
      model = rj.models.place(model, make_mesh(shards, axes))
    attend = None
    if shards > 1:
      attend = rj.models.CachedAttention(mesh=model.mesh, axis="seq")
    cache = model.init_cache(2, 64, sharding=attend, kind=kind_of())
    size = max(LENGTHS)
    seg = (np.arange(size)[None] < np.array(LENGTHS)[:, None]).astype(np.int32)
    tokens = np.zeros((2, size), np.int32)
    for row, prompt in zip(tokens, context(), strict=True):
      row[: prompt.size] = prompt
    _, cache = model(tokens, cache=cache, segment_ids=seg)
    cache = rj.infer.evict_by_repetition(model, cache, context())
    rows = [cache.positions(row) for row in range(2)]
    kept.append(
      [[set(x.tolist()) for x in layer] for row in rows for layer in row]
    )
  assert kept[0] == kept[1]


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
  model = contract.model(1, "grouped")
  tokens = context()[0][None]
  _, cache = model(tokens, cache=model.init_cache(1, 64, kind=kind_of()))
  again = rj.infer.evict_by_repetition
  with pytest.raises(OptionError, match="evict_by_repetition"):
    cache.evict()
  with pytest.raises(OptionError, match="as many as the cache holds"):
    again(model, cache, tokens[:, :20])
  with pytest.raises(InputTypeError, match="tokenizer"):
    again(model, cache, tokens, tokenizer="a tokenizer")
  plain = model.init_cache(1, 64, kind="snapkv")
  with pytest.raises(OptionError, match="a policy that repeats"):
    again(model, plain, tokens)
  with pytest.raises(OptionError, match="chunk"):
    rj.kv.KVzip(chunk=0)
  for by in (rj.kv.KVzip(), rj.kv.Select(), rj.kv.PyramidKV(), "knorm"):
    with pytest.raises(OptionError, match="highest scores of each head"):
      rj.kv.AdaKV(by=by)
  with pytest.raises(OptionError, match="window"):
    rj.kv.AdaKV(by=rj.kv.KeyNorm(), window=8)
  most = model.config.longest
  long = np.ones((1, most - 4), np.int32)
  with pytest.raises(PromptError, match="repeats"):
    rj.infer.generate(model, long, max_new_tokens=1, cache_kind="kvzip")
