"""Drafts change no token: of any model, cache, mesh and sampler."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pathlib
import random

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.infer.speculate import model_drafting
from ringjax.infer.speculate.paces import Paces
from ringjax.infer.speculate.suffixes import SuffixAutomaton
from ringjax.kv import CacheConfig, kind_text
from tests.helpers import refused, swept

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GREEDY, DRAWN = {}, dict(temperature=0.8, top_k=20, seed=3)
PENALISED = dict(temperature=1.0, repetition_penalty=1.3, seed=1)


def prompts_of(model, seed=0, lengths=(9, 23, 4)):
  """Some repeat themselves, for those who look things up."""
  rng = np.random.default_rng(seed)
  part = rng.integers(0, model.config.vocab, max(lengths)).astype(np.int32)
  return [np.tile(part[: n // 2 + 1], 2)[:n] for n in lengths]


DRAFTERS = {
  "lookup": lambda _: speculate.PromptLookup(adapt=False),
  "early": lambda _: speculate.EarlyExit(count=3),
  "self": lambda _: speculate.SelfDraft(
    cache_kind="int4", count=3, adapt=False
  ),
  "tree": lambda model: speculate.DraftModel(
    model=model, widths=(3, 3, 2), adapt=False
  ),
  "model": lambda model: speculate.DraftModel(model=model, adapt=False),
  "best": lambda _: speculate.EarlyExit(widths=(4, 4, 4), best=5, adapt=False),
  "suffix": lambda _: speculate.Suffixes(count=3, adapt=False),
}


def drafters(model):
  return {name: make(model) for name, make in DRAFTERS.items()}


# Drafters with tests of their own: test_draft_models.py has another tokenizer,
# test_longspec.py a block that is made for the model, test_predict_draft.py a
# layer of the model, test_eagle_draft.py and test_dflash_draft.py heads.
ELSEWHERE = {"translated", "longspec", "mtp", "eagle3", "dflash"}


def test_every_drafter_is_tested(loaded):
  model, _ = loaded("llama3")
  classes = {type(x) for x in drafters(model).values()}
  assert classes == {
    kind for name, kind in speculate.DRAFTERS.items() if name not in ELSEWHERE
  }, "add it to DRAFTERS here, or to ELSEWHERE"


def same(model, drafter, options=GREEDY, *, count=16, lengths=(9, 23, 4),
         seed=0, **how):  # fmt: skip
  """The report of a call whose tokens are those of one without drafts."""
  prompts, reports = prompts_of(model, seed, lengths), []
  want = rj.infer.generate(
    model, prompts, max_new_tokens=count, **options, **how
  )
  got = rj.infer.generate(
    model, prompts, max_new_tokens=count, speculate=drafter,
    report=reports.append, **options, **how,
  )  # fmt: skip
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.lengths, want.lengths)
  return reports[0].speculation


@pytest.mark.one_case
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_token_changes(loaded, name):
  model, _ = loaded("llama3")
  drafter = drafters(model)[name]
  found = same(model, drafter, PENALISED if name == "tree" else GREEDY)
  # The first token of a row is the prompt's.
  assert found.tokens == 3 * 15
  assert found.tokens == found.calls + found.accepted
  if name in ("model", "tree"):
    assert found.tokens_per_call > 3


EVERY = list(itertools.product(
  ("gpt_oss", "deepseek_v3", "gemma3_text", "llama4_text", "olmo2",
   "falcon_rw", "mixtral", "qwen3", "deepseek_v32"),
  ("lookup", "model", "self", "tree"),
  ("greedy", "drawn", "penalised"),
))  # fmt: skip
HOW = dict(greedy=GREEDY, drawn=DRAWN, penalised=PENALISED)


# Each family, drafter and way to choose, which take turns.
@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("family", "name", "options"), swept(EVERY, EVERY[::5])
)
def test_more_families(loaded, family, name, options):
  model, _ = loaded(family)
  same(model, drafters(model)[name], HOW[options])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("policy", [
  rj.kv.SnapKV(budget=12, window=4), rj.kv.HeavyHitters(budget=12),
  rj.kv.ExpectedAttention(budget=12)], ids=str)  # fmt: skip
def test_heads_keep_what_they_keep_without_drafts(loaded, policy):
  """In a conversation; and notes of queries take no more room behind it."""
  model, _ = loaded("llama3")
  turns = [[[1, 2, 3] * 7, [4, 5] * 9], [[7], [8, 9]], [[1, 2, 3] * 3, [5]]]
  tokens, caches = [], []
  for speculating in (None, "lookup:adapt=False"):
    kind = CacheConfig(policy=policy, room=8)
    session = rj.infer.Session(model, 160, batch=2, cache_kind=kind)
    for turn in turns:
      new = rj.infer.generate(
        model, turn, max_new_tokens=17, cache=session,
        speculate=speculating, **DRAWN,
      )  # fmt: skip
      tokens.append(new.tokens)
    caches.append(session.cache)
  plain, drafted = caches
  for a, b in zip(tokens[:3], tokens[3:], strict=True):
    np.testing.assert_array_equal(a, b)
  for row in range(2):
    for x, y in zip(plain.positions(row), drafted.positions(row), strict=True):
      assert [h.tolist() for h in x] == [h.tolist() for h in y]
  assert jax.tree.map(np.shape, plain) == jax.tree.map(np.shape, drafted)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(
  path.name for path in (FIXTURES / "models").iterdir()))  # fmt: skip
def test_forty_prompts_of_each_family(loaded, family):
  """With every drafter: a thousand prompts over all families."""
  model, _ = loaded(family)
  rng = np.random.default_rng(7)
  for _ in range(5):
    lengths = (47, *rng.integers(2, 48, 7))
    for name, drafter in drafters(model).items():
      recurrent = model.init_cache(1, 8).recurrent
      if recurrent and name in ("tree", "best"):
        ask = lambda drafter=drafter: rj.infer.generate(
          model, [[1, 2]], max_new_tokens=4, speculate=drafter
        )
        refused(OptionError, ask, "recurrent")
        continue
      seed = int(rng.integers(1 << 30))
      same(model, drafter, count=24, lengths=lengths, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, pytest.param(
  DRAWN, marks=pytest.mark.long)], ids=["greedy", "drawn"])  # fmt: skip
def test_recurrent_layers_go_back(loaded, options):
  model, _ = loaded("qwen3_next")
  found = same(model, speculate.PromptLookup(adapt=False), options, count=12)
  assert found.drafted > found.accepted


@pytest.mark.long
def test_a_draft_has_one_program_for_a_length_behind_any_pause(
  loaded, monkeypatch
):
  """A draft model reads the tokens of a pause, and then drafts as without."""
  model, _ = loaded("llama3")
  shapes, compiled = [], model_drafting.drafted

  def drafted(*given):
    shapes.append((given[2], given[6].tokens.shape))
    return compiled(*given)

  pauses = [0, 1, 2, 5, 17, 40]
  plan = itertools.chain.from_iterable([0] * n + [2] for n in pauses)
  monkeypatch.setattr(model_drafting, "drafted", drafted)
  monkeypatch.setattr(
    Paces, "draft_lengths", lambda self: np.full(1, next(plan, 0))
  )
  tokens = sum(pauses) + 3 * len(pauses) + 1
  found = same(
    model, speculate.DraftModel(model=model), count=tokens, lengths=(9,)
  )
  assert set(shapes) == {(2, (1, 2))} and len(shapes) == len(pauses)
  # The model itself is always right: it has read every token.
  assert found.accepted == found.drafted == 2 * len(pauses)


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("name", ["early", pytest.param(
  "self", marks=pytest.mark.long), pytest.param(
  "model", marks=pytest.mark.long)])  # fmt: skip
def test_recurrent_layers_draft(loaded, name):
  model, _ = loaded("qwen3_next")
  found = same(model, drafters(model)[name], DRAWN, count=14)
  if name == "model":
    # The model itself is always right.
    assert found.accepted == found.drafted


KINDS = [
  ("model", "nuq3"),
  ("tree", "unrotated"),
  ("tree", "int4"),
  ("lookup", "hadamard3"),
  ("tree", "kivi2"),
  ("self", "dense"),
  ("lookup", CacheConfig(device=16)),
  ("tree", CacheConfig(device=16)),
  ("early", CacheConfig(policy=rj.kv.KeyDiff(budget=12), room=12)),
  ("lookup", CacheConfig(policy=rj.kv.FastGen(punctuation=(1, 5)), room=8)),
  *(
    (name, CacheConfig(policy=policy, room=8))
    for name, policy in zip(
      ("lookup", "model", "tree") * 3,
      (
        rj.kv.SnapKV(budget=12, window=4),
        rj.kv.Tova(budget=12),
        rj.kv.HeavyHitters(budget=12),
        rj.kv.KeyDiff(budget=12),
        rj.kv.ExpectedAttention(budget=12),
        rj.kv.FastGen(),
        rj.kv.PyramidKV(budget=12, window=4),
        rj.kv.Select(budget=12),
        rj.kv.AdaKV(budget=12, window=4),
      ),
      strict=True,
    )
  ),
]


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("tree", CacheConfig(policy=rj.kv.SnapKV(budget=12, window=4), room=6)),
    *swept(KINDS, [KINDS[n] for n in (0, 4, 7, 9, 12, 14)]),
  ],
  ids=str,
)
def test_kinds_of_caches(loaded, name, kind):
  model, _ = loaded("llama3")
  if kind == "nuq3":
    draw = np.random.default_rng(1).integers(0, model.config.vocab, (2, 64))
    levels = rj.infer.calibrate(model, draw.astype(np.int32))
    kind = kind_text.parse(kind).with_options({"calibration": levels})
  same(model, drafters(model)[name], DRAWN, cache_kind=kind,
       lengths=(19, 23), count=20)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["lookup", pytest.param(
  "model", marks=pytest.mark.slow), pytest.param(
  "tree", marks=pytest.mark.slow)])  # fmt: skip
def test_a_sharded_sequence(loaded, name):
  model, mesh = loaded("llama3", 4)
  same(model, drafters(model)[name], DRAWN, mesh=mesh)


@pytest.mark.slow
def test_a_law_that_is_accepted_by_chance(loaded):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  drafter = speculate.DraftModel(
    model=model, count=3, verify="rejection", adapt=False
  )
  reports = []
  rj.infer.generate(
    model, prompts, max_new_tokens=13, speculate=drafter, temperature=1.0,
    report=reports.append,
  )  # fmt: skip
  # A draft of the target's own law is always right.
  assert reports[0].speculation.acceptance > 0.97
  tree = speculate.DraftModel(model=model, widths=(2, 4), verify="rejection")
  new = rj.infer.generate(
    model, prompts, max_new_tokens=9, speculate=tree, temperature=0.7, top_p=0.9
  )
  assert (new.lengths == 9).all()


@pytest.mark.slow
def test_stops_and_turns(loaded):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  plain = rj.infer.generate(model, prompts, max_new_tokens=16)
  # An id that some row says in the middle of a draft.
  stop = int(plain.tokens[0, 6])
  drafter = drafters(model)["model"]
  want, got = (
    rj.infer.Session(model, 128, batch=3) for _ in range(2)
  )  # fmt: skip
  for session, how in ((want, {}), (got, dict(speculate=drafter))):
    session.answers = [
      rj.infer.generate(
        model, turn, max_new_tokens=16, cache=session, stop=stop, **how
      )
      for turn in (prompts, [p[:3] for p in prompts])
    ]
  for a, b in zip(want.answers, got.answers, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(want.lengths, got.lengths)
  np.testing.assert_array_equal(want.pending, got.pending)


@pytest.mark.long
def test_the_caller_ends_rows(loaded):
  model, _ = loaded("llama3")
  prompts = prompts_of(model)
  drafter = drafters(model)["model"]

  def answers(**how):
    session, columns = rj.infer.Session(model, 128, batch=3), []

    def stream(tokens):
      columns.append(tokens.tolist())
      # The second row after four tokens, all after eleven.
      return np.array([False, len(columns) == 4, False]) | (len(columns) == 11)

    first = rj.infer.generate(
      model, prompts, max_new_tokens=16, cache=session, stream=stream, **how
    )
    after = rj.infer.generate(
      model, [p[:3] for p in prompts], max_new_tokens=4, cache=session
    )
    return first, columns, after

  want, got = answers(), answers(speculate=drafter)
  np.testing.assert_array_equal(got[0].tokens, want[0].tokens)
  assert got[1] == want[1]
  np.testing.assert_array_equal(got[2].tokens, want[2].tokens)


@pytest.mark.long
def test_a_stop_string_in_a_draft():
  from tests import checkpoints

  config = checkpoints.config("llama3") | {"vocab_size": 262}
  model = rj.models.create(config, seed=1)
  tokenizer = Bytes()
  prompt = [tokenizer.encode("abcabcabc")]
  plain = rj.infer.generate(model, prompt, max_new_tokens=16)
  string = tokenizer.decode(plain[0][5:7].tolist())
  how = dict(max_new_tokens=16, stop=string, tokenizer=tokenizer)
  want = rj.infer.generate(model, prompt, **how)
  got = rj.infer.generate(
    model, prompt, speculate=drafters(model)["model"], **how
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)
  assert got.lengths.tolist() == want.lengths.tolist()


@pytest.mark.long
def test_rejected_tokens_leave_nothing(loaded):
  """A cache is as if what was rejected had never been drafted."""
  model, _ = loaded("llama3")

  class Wrong(speculate.Drafter):
    """Drafts what is never right."""

    def begin(self, target):
      return self

    def draft(self, new, state, most):
      token = (np.asarray(state.token)[:, None] + 7) % 3
      tokens = np.repeat(token.astype(np.int32), 4, 1)
      return speculate.Draft(tokens, np.minimum(most, 4).astype(np.int32))

  found = []
  for drafter in (Wrong(adapt=False), speculate.PromptLookup(ngram=1, count=1)):
    session = rj.infer.Session(model, 64, batch=2)
    rj.infer.generate(
      model, prompts_of(model, lengths=(9, 5)), max_new_tokens=6,
      cache=session, speculate=drafter,
    )  # fmt: skip
    found.append((session.lengths.tolist(), session.cache))
  (a, one), (b, two) = found
  assert a == b
  for x in (one, two):
    real = np.asarray(x.at.seg) > 0
    assert real.sum(1).tolist() == a


@pytest.mark.long
def test_drafts_stop_where_they_are_never_right(loaded):
  model, _ = loaded("llama3")

  class Never(speculate.Drafter):
    def begin(self, target):
      return self

    def draft(self, new, state, most):
      rng = np.random.default_rng(0)
      tokens = rng.integers(0, 3, (len(most), 4)).astype(np.int32)
      return speculate.Draft(tokens, np.minimum(most, 4).astype(np.int32))

  found = same(model, Never(), count=80, lengths=(9,))
  assert found.drafted < 4 * found.calls / 2

  class Nothing(Never):
    calls = 0

    def draft(self, new, state, most):
      Nothing.calls += 1
      none = np.zeros(len(most), np.int32)
      return speculate.Draft(none[:, None][:, :0], none)

  # Steps without drafts are ahead of what the caller ends, and of stop ids.
  plain = rj.infer.generate(model, prompts_of(model), max_new_tokens=80)
  stop = int(plain.tokens[1, 30])

  def answers(**how):
    columns = []

    def stream(tokens):
      columns.append(tokens.tolist())
      return np.array([len(columns) == 40, False, False])

    session = rj.infer.Session(model, 256, batch=3)
    new = rj.infer.generate(
      model, prompts_of(model), max_new_tokens=80, cache=session, stop=stop,
      stream=stream, **how,
    )  # fmt: skip
    after = rj.infer.generate(
      model, [p[:3] for p in prompts_of(model)], max_new_tokens=4, cache=session
    )
    return new, columns, after

  want, got = answers(), answers(speculate=Nothing())
  for a, b in zip((want[0], want[2]), (got[0], got[2]), strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  assert got[1] == want[1]
  # Six steps are timed without drafts, whatever they take.
  assert 0 < Nothing.calls <= 79 - 6


def test_lookup_goes_on_from_where_most_last_tokens_were():
  text = [1, 2, 3, 9, 2, 4, 1, 2]
  reader = lambda n: speculate.PromptLookup(ngram=n).reader(text)
  assert reader(2).guess(2) == reader(3).guess(2) == [3, 9]
  assert reader(1).guess(2) == [4, 1]


def test_a_suffix_automaton_finds_the_longest_end():
  draw = random.Random(0)
  for _ in range(200):
    text = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
    automaton = SuffixAutomaton()
    automaton.add(text)
    ends = [
      (size, end)
      for size in range(1, len(text))
      for end in range(size, len(text))
      if text[end - size : end] == text[-size:]
    ]
    longest = max((size for size, _ in ends), default=0)
    first = min((end for size, end in ends if size == longest), default=0)
    assert automaton.matched() == (longest, first)


def test_earlier_texts_are_remembered(loaded):
  model, _ = loaded("llama3")
  drafter = speculate.Suffixes(remember=1000, adapt=False)
  first, again = same(model, drafter), same(model, drafter)
  assert again.tokens_per_call > 3 > first.tokens_per_call


def test_drafters_are_equal_by_all_options(loaded):
  one, _ = loaded("llama3")
  other = copy.copy(one)
  draft = lambda model=one, **more: speculate.DraftModel(model=model, **more)
  different = [
    draft(),
    draft(other),
    draft(widths=(2, 4)),
    draft(cache_kind="int8"),
    draft(adapt=False),
    speculate.EarlyExit(),
    speculate.EarlyExit(layers=2),
    speculate.SelfDraft(),
    speculate.LongSpec(model="a"),
    speculate.LongSpec(model="b"),
  ]
  assert len(set(different)) == len(different)
  for n, drafter in enumerate(different):
    assert drafter == dataclasses.replace(drafter)
    assert hash(drafter) == hash(dataclasses.replace(drafter))
    assert all(drafter != x for x in different[n + 1 :])
  by_path = draft(model="small")
  assert by_path == draft(model="small")


@pytest.mark.slow
def test_names_and_bad_input(loaded):
  model, _ = loaded("llama3")
  next_, _ = loaded("qwen3_next")
  ask = lambda drafter, one=model, **how: rj.infer.generate(
    one, [[1, 2, 3]], max_new_tokens=3, speculate=drafter, **how
  )
  assert ask("lookup:count=3,ngram=2").lengths.tolist() == [3]
  tree = ask("early:layers=1,widths=(2,2),best=3").tokens
  assert (tree == ask("early:layers=1,widths=2").tokens).all()
  refused(OptionError, lambda: ask("best"), "one of lookup, suffix, model")
  refused(OptionError, lambda: ask("lookup:size=3"), "ngram")
  refused(OptionError, lambda: ask("lookup:count=0"), "count")
  # The target itself drafts: another model would be ignored.
  refused(OptionError, lambda: ask("self:model=DIR"), "cache_kind")
  refused(OptionError, lambda: ask("early:model=DIR"), "layers")
  refused(OptionError, lambda: ask("model"), "DraftModel(model=")
  for folder in ("7", "true", "none"):
    # What looks like a number is a folder where one is asked for.
    assert speculate.drafter_of(f"model:model={folder}", "x").model == folder
  refused(OptionError, lambda: ask("lookup:verify=maybe"), "verify")
  refused(OptionError, lambda: ask("lookup:count=400"), "slack")
  refused(OptionError, lambda: ask("lookup:"), "ngram")
  refused(OptionError, lambda: ask("translated:model=DIR"), "model:model=")
  refused(OptionError, lambda: ask("early:layers=9"), "layers")
  small = rj.models.create(
    json.loads(model.source) | {"vocab_size": 50}, seed=0
  )
  refused(
    OptionError, lambda: ask(speculate.DraftModel(model=small)), "vocabulary"
  )
  tree = speculate.DraftModel(model=model, widths=(2, 2))
  refused(OptionError, lambda: ask(tree, next_), "recurrent")
  refused(OptionError, lambda: ask(tree, cache_kind="expected"), "a chain")
  marking = kind_text.parse("fastgen:punctuation=(3,4)")
  refused(OptionError, lambda: ask(tree, cache_kind=marking), "marks")
  refused(
    OptionError,
    lambda: speculate.DraftModel(
      model=model, widths=(2, 3), verify="rejection"
    ),
    "multiples",
  )  # fmt: skip
  refused(
    OptionError,
    lambda: ask(
      "lookup:verify=rejection", sampler=lambda logits, step, seen: logits[:, 0]
    ),
    "Greedy or Sample",
  )  # fmt: skip


@pytest.mark.long
def test_what_a_session_read_before_is_known(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  text = rng.integers(0, model.config.vocab, 40).astype(np.int32)
  known = []

  class Knows(speculate.Drafter):
    def begin(self, target):
      known.extend(x.tolist() for x in target.texts)
      return speculate.PromptLookup().begin(target)

  session = rj.infer.Session(model, 80)
  rj.infer.read_context(model, [text], cache=session)
  first = rj.infer.generate(
    model, [[1, 2]], max_new_tokens=5, cache=session, speculate=Knows()
  )
  rj.infer.generate(
    model, [[3]], max_new_tokens=2, cache=session, speculate=Knows()
  )
  assert known[0] == [*text.tolist(), 1, 2]
  assert known[1] == [*text.tolist(), 1, 2, *first[0].tolist(), 3]


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["parallel", "recompute"])
def test_behind_contexts_that_were_read_apart(loaded, combine):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 60, n).astype(np.int32) for n in (20, 13)]
  same(model, speculate.Suffixes(adapt=False), contexts=texts, combine=combine)


@pytest.mark.long
def test_a_draft_model_catches_up_behind_steps_without_drafts(
  loaded, monkeypatch
):
  from ringjax.infer.speculate.paces import Paces

  model, _ = loaded("llama3")
  calls = []

  def most(self):
    calls.append(1)
    # Two rounds, and forty steps without drafts.
    return np.full(2, 4 if len(calls) % 42 < 2 else 0)

  monkeypatch.setattr(Paces, "draft_lengths", most)
  found = same(
    model, speculate.DraftModel(model=model), count=100, lengths=(9, 23)
  )
  assert found.drafted == found.accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize(
  "bug",
  ["siblings", *(pytest.param(n, marks=pytest.mark.long)
              for n in ("stale", "position"))],
)  # fmt: skip
def test_a_planted_bug_changes_tokens(loaded, bug, monkeypatch):
  from ringjax.infer.speculate import rounds
  from ringjax.kv.cache import KVCache

  model, _ = loaded("llama3")
  forward = rounds.forward

  def shifted(model, attend, tokens, pos, *rest):
    return forward(model, attend, tokens, pos + 1, *rest)

  if bug == "stale":
    # Rejected tokens stay in the cache.
    monkeypatch.setattr(KVCache, "keep", lambda self, kept: self)
  else:
    wrong = {"siblings": lambda *a: forward(*a[:-1], None), "position": shifted}
    monkeypatch.setattr(rounds, "forward", wrong[bug])
  rounds.verify.clear_cache()
  try:
    with pytest.raises(AssertionError, match="not equal"):
      same(model, drafters(model)["tree"], DRAWN)
  finally:
    rounds.verify.clear_cache()
