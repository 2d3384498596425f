"""Beam searches: those of transformers, of NumPy, and of the same alone."""

from __future__ import annotations

import functools
import json
import pathlib
import types

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError, PromptError
from ringjax.infer.stopping import Stop
from ringjax.serve import (
  Engine,
  GroupSpec,
  PrefixTree,
  Request,
  RowSampling,
  Scheduler,
  ServedRow,
  StepLimits,
  beams,
)
from ringjax.serve.request import Answer
from tests.helpers import refused, swept
from tests.serve.conftest import BYTES_MODEL
from tests.serve.test_scheduler import PAGE as SMALL
from tests.serve.test_scheduler import Memory

FOUND = pathlib.Path(__file__).parents[1] / "fixtures" / "beams.json"


def engine(model, mesh=None, **options):
  settings = dict(
    rows=5, capacity=512, longest=96, page=16, piece=16, pieces=2, mesh=mesh
  )
  return Engine(model, **settings | options)


def run(at, wanted):
  """Results of requests; all pages are accounted for at each step."""
  handles = [at.submit(request) for request in wanted]
  while at.step():
    accounted(at)
  accounted(at)
  empty(at)
  return [handle.result() for handle in handles]


def accounted(at):
  """Free, cached and held pages are the pool; held are those of rows."""
  tree = at.scheduler.tree
  tree.check()
  for group, spec in enumerate(tree.groups):
    held = {
      (number % tree.shards, page)
      for row in at.scheduler.running
      if row is not None
      for number, page in row.pages[group].items()
    }
    cached = sum(b.pages[group] is not None for b in tree.blocks())
    total = spec.pages * tree.shards
    assert tree.free(group) + cached + len(held) == total


def empty(at):
  """Nothing is in use any more."""
  tree = at.scheduler.tree
  assert not any(at.scheduler.running) and not at.scheduler.waiting
  assert not any(block.refs for block in tree.blocks())
  room = sum(tree.available(s) for s in range(tree.shards))
  assert room == tree.groups[0].pages * tree.shards


def searched(following, request):
  """(tokens, score) of hypotheses, best first; all of them computed anew.

  Args:
    following: of texts, a list of int lists, the log-probabilities [k, V].
    request: with beams.
  """
  k, most = request.beams, request.max_new_tokens
  score = lambda x: x[1] / len(x[0]) ** request.length_penalty
  running, done = [([], 0.0)], []
  for length in range(1, most + 1):
    table = following([tokens for tokens, _ in running])
    sums = table + np.array([total for _, total in running])[:, None]
    vocab, after = sums.shape[1], []
    for rank, at in enumerate(np.argsort(-sums, axis=None, kind="stable")):
      beam, token = divmod(int(at), vocab)
      one = ([*running[beam][0], token], sums[beam, token])
      if not np.isfinite(one[1]) or len(after) == k:
        break
      if token in request.stop.ids or length == most:
        if rank < k:
          done.append(one)
      else:
        after.append(one)
    done = sorted(done, key=score, reverse=True)[:k]
    running = after
    if not after or (len(done) == k and score(after[0]) <= score(done[-1])):
      break
  return [(tokens, total) for tokens, total in done[: request.n]]


def by_model(model, request):
  """What follows texts, by the whole sequence."""
  prompt = request.prompt
  size = -(-(len(prompt) + request.max_new_tokens) // 16) * 16

  def following(texts):
    tokens = np.zeros((request.beams, size), np.int32)
    for n, text in enumerate(texts):
      tokens[n, : len(prompt) + len(text)] = [*prompt, *text]
    last = len(prompt) + len(texts[0]) - 1
    rows = np.full((request.beams, 1), last, np.int32)
    logits = model(tokens, rows=rows, length=np.int32(size))
    found = np.asarray(logits[: len(texts), 0], np.float64)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))

  return following


def by_engine(at, request):
  """The same by requests for one token, of which each has the whole text."""
  vocab = at.model.config.vocab

  def following(texts):
    handles = [
      at.submit(
        Request(
          prompt=np.append(request.prompt, np.array(text, np.int32)),
          max_new_tokens=1,
          logprobs=20,
          share=False,
        )
      )
      for text in texts
    ]
    found = np.full((len(texts), vocab), -np.inf)
    for n, handle in enumerate(handles):
      (one,) = handle.result().answers[0].logprobs
      for token, logprob in one.top:
        found[n, token] = logprob
    return found

  return following


def agrees(result, want, *, near=1e-4):
  assert [a.tokens for a in result.answers] == [tokens for tokens, _ in want]
  for answer, (_, total) in zip(result.answers, want, strict=True):
    assert abs(answer.total_logprob - total) < near * len(answer.tokens)


def prompts(rng, vocab, count):
  """Of which the first two share a prefix."""
  common = rng.integers(0, vocab, 33).astype(np.int32)
  return [
    np.append(
      common if n < 2 else common[:0],
      rng.integers(0, vocab, rng.integers(2, 20)).astype(np.int32),
    )
    for n in range(count)
  ]


@pytest.mark.long
@pytest.mark.parametrize(
  "family", ["llama3", pytest.param("gemma2", marks=pytest.mark.long)]
)
def test_searches_of_transformers(loaded, family):
  model, _ = loaded(family)
  cases = json.loads(FOUND.read_text())[family]
  wanted = [
    Request(
      prompt=np.array(case["prompt"], np.int32),
      beams=case["beams"],
      n=case["beams"],
      length_penalty=case["length_penalty"],
      max_new_tokens=case["max_new_tokens"],
      stop=case["stop"],
    )
    for case in cases
  ]
  results = run(engine(model), wanted)
  ends = set()
  for case, result in zip(cases, results, strict=True):
    assert [a.tokens for a in result.answers] == case["tokens"]
    penalty = case["length_penalty"]
    scores = [
      a.total_logprob / len(a.tokens) ** penalty for a in result.answers
    ]
    if case["scores"] is not None:
      np.testing.assert_allclose(scores, case["scores"], rtol=1e-5)
    ends |= {a.finish for a in result.answers}
  assert ends == {"stop", "length"}


# Family, devices, options; and whether the reference is the model itself.
REFERENCES = {
  "codes, sharded": ("llama3", 4, dict(cache_kind="int4"), False),
}
MORE = {
  "recurrent": ("qwen3_next", 1, {}, True),
  "windows": ("gpt_oss", 1, {}, True),
  "windows, sharded": ("gpt_oss", 4, {}, False),
  "latent": ("deepseek_v3", 1, {}, True),
  "plain": ("llama3", 1, {}, True),
  "recurrent, sharded": ("qwen3_next", 4, {}, False),
  "codes": ("llama3", 1, dict(cache_kind="int4"), False),
  "unrotated": ("llama3", 1, dict(cache_kind="unrotated"), True),
  "read together": ("llama3", 1, dict(shared_reads="always"), True),
}


@pytest.mark.long
@pytest.mark.parametrize(
  "case",
  [*REFERENCES, *(pytest.param(x, marks=pytest.mark.long) for x in MORE)],
)
def test_whole_sequences_give_the_same(loaded, case):
  family, devices, options, whole = (REFERENCES | MORE)[case]
  model, mesh = loaded(family, devices)
  at = engine(model, mesh, **options)
  rng, vocab = np.random.default_rng(0), model.config.vocab
  wanted = [
    Request(
      prompt=prompt,
      beams=beams,
      n=beams,
      max_new_tokens=14,
      stop=rng.choice(vocab, 6, replace=False).tolist(),
    )
    for prompt, beams in zip(prompts(rng, vocab, 3), (4, 3, 5), strict=True)
  ]
  results = run(at, wanted)
  for request, result in zip(wanted, results, strict=True):
    follow = by_model(model, request) if whole else by_engine(at, request)
    agrees(result, searched(follow, request), near=1e-3)
  empty(at)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices"),
  [
    ("llama3", 1),
    pytest.param("llama3", 4, marks=pytest.mark.long),
    pytest.param("gpt_oss", 1, marks=pytest.mark.long),
    pytest.param("gpt_oss", 4, marks=pytest.mark.long),
    pytest.param("qwen3_next", 1, marks=pytest.mark.long),
    pytest.param("qwen3_next", 4, marks=pytest.mark.long),
  ],
)
def test_alone_and_in_a_crowd_bit_for_bit(loaded, family, devices):
  model, mesh = loaded(family, devices)
  rng, vocab = np.random.default_rng(1), model.config.vocab
  # So few pages that rows have to make room.
  small = dict(capacity=208 if devices == 1 else 320, rows=8)
  wanted = [
    Request(
      prompt=prompt,
      beams=beams,
      n=2,
      max_new_tokens=18,
      logprobs=3,
      priority=1,
    )
    for prompt, beams in zip(
      prompts(rng, vocab, 6), (3, 4, 2, 3, 2, 4), strict=True
    )
  ]
  at = engine(model, mesh, **small)
  handles, doomed = [], []
  others = [
    Request(
      prompt=prompt,
      max_new_tokens=int(rng.integers(8, 24)),
      sampling=RowSampling(temperature=1.0, seed=n),
      n=int(rng.integers(1, 3)),
    )
    for n, prompt in enumerate(prompts(rng, vocab, 2 * len(wanted)))
  ]
  for request in wanted:
    handles.append(at.submit(request))
    doomed.append(at.submit(request))
    for _ in range(2):
      at.submit(others.pop())
    for _ in range(rng.integers(0, 4)):
      at.step()
      accounted(at)
    at.cancel(doomed.pop(), "deadline" if rng.integers(2) else "cancelled")
    accounted(at)
  while at.step():
    accounted(at)
  empty(at)
  assert sum(handle.preemptions for handle in handles)
  own = engine(model, mesh, **small)
  for request, handle in zip(wanted, handles, strict=True):
    (alone,) = run(own, [request])
    for x, y in zip(alone.answers, handle.result().answers, strict=True):
      # Every number, not only what was chosen by it.
      assert vars(x) == vars(y)
      assert sum(one.logprob for one in x.logprobs) == x.total_logprob
      assert [one.token for one in x.logprobs] == x.tokens


@pytest.mark.long
def test_one_more_program(loaded):
  from ringjax.serve import calls

  model, _ = loaded("llama3")
  at = engine(model)
  prompt = np.arange(20, dtype=np.int32)
  run(at, [Request(prompt=prompt, max_new_tokens=3, logprobs=1)])
  run(at, [Request(prompt=prompt, max_new_tokens=3, n=2)])
  before = calls.compute._cache_size(), calls._forked._cache_size()
  ask = lambda beams: Request(prompt=prompt, max_new_tokens=20, beams=beams)
  run(at, [ask(2)])
  forks = calls._forked._cache_size()
  assert forks <= before[1] + 1
  run(at, [ask(3), ask(5), ask(1)])
  assert calls.compute._cache_size() == before[0]
  assert calls._forked._cache_size() == forks


def test_forks_share_pages(loaded):
  """4 hypotheses behind 64 tokens have one copy of these, in their pages."""
  model, _ = loaded("llama3")
  at = engine(model)
  prompt = np.arange(64, dtype=np.int32)
  handle = at.submit(
    Request(prompt=prompt, beams=4, n=4, max_new_tokens=20, share=False)
  )
  most, tree = 0, at.scheduler.tree
  while at.step():
    accounted(at)
    most = max(most, tree.groups[0].pages - tree.free())
  # 4 of the prompt, and of each row at most 2 of 20 tokens.
  assert 4 + 4 <= most <= 4 + 4 * 2
  assert len(handle.result().answers) == 4
  empty(at)


def test_settings(loaded):
  """Masks, biases and penalties come before candidates are ranked."""
  model, _ = loaded("llama3")
  vocab, prompt = model.config.vocab, np.arange(9, dtype=np.int32)
  even = np.arange(vocab) % 2 == 0

  def mask(tokens):
    return even if tokens.size % 2 else None

  how = RowSampling(
    logit_bias={3: 2.5, 4: 1.5},
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
  )
  ask = functools.partial(
    Request, prompt=prompt, beams=4, n=4, max_new_tokens=8, stop=[6, 7]
  )
  both = ask(sampling=how, mask=mask)
  wanted = [both, ask(sampling=how), ask(mask=mask), ask()]
  results = run(engine(model), wanted)
  for result, request in zip(results, wanted, strict=True):
    follow = settled(model, request, even)
    agrees(result, searched(follow, request))
  assert len({tuple(r.answers[0].tokens) for r in results}) > 2


def settled(model, request, even):
  """What follows, with the settings of a request: of logits, in NumPy."""
  how, prompt = request.sampling, request.prompt

  def following(texts):
    tokens = np.zeros((request.beams, 32), np.int32)
    for n, text in enumerate(texts):
      tokens[n, : len(prompt) + len(text)] = [*prompt, *text]
    last = len(prompt) + len(texts[0]) - 1
    logits = np.asarray(model(tokens)[: len(texts), last], np.float64).copy()
    for row, text in zip(logits, texts, strict=True):
      for token, bias in how.logit_bias:
        row[token] += bias
      if request.mask is not None and len(text) % 2:
        row[~even] = -np.inf
      said = np.union1d(prompt, np.array(text, np.int32))
      penalty = how.repetition_penalty or 1.0
      row[said] = np.where(
        row[said] < 0, row[said] * penalty, row[said] / penalty
      )
      times = np.bincount(np.array(text, np.int64), minlength=row.size)
      row -= how.frequency_penalty * times
      row -= how.presence_penalty * (times > 0)
      row -= np.log(np.exp(row).sum())
    return logits

  return following


@pytest.mark.long
def test_an_adapter(loaded):
  model, _ = loaded("llama3")
  how, rng = rj.train.Lora(rank=2, alpha=4.0), np.random.default_rng(2)
  fill = lambda x: rng.standard_normal(x.shape).astype(np.float32) * 0.3
  params = {
    path: {"a": x["a"], "b": fill(x["b"])}
    for path, x in how.start(model, seed=0).items()
  }
  at = engine(model, adapters={"one": (how, params)})
  ask = functools.partial(
    Request, prompt=np.arange(20, dtype=np.int32), beams=3, max_new_tokens=8
  )
  plain, own = run(at, [ask(), ask(adapter="one")])
  merged = how.merged(params, model)
  agrees(plain, searched(by_model(model, ask()), ask()))
  agrees(own, searched(by_model(merged, ask()), ask()))
  assert plain.answers[0].tokens != own.answers[0].tokens


@pytest.mark.long
def test_stop_texts(tiny):
  """A text ends a hypothesis with the token that completes it."""
  at = engine(tiny, tokenizer=Bytes())
  prompt = np.array([256, 97, 98], np.int32)
  free = Request(prompt=prompt, beams=4, n=4, max_new_tokens=12)
  (before,) = run(at, [free])
  texts = [a.text for a in before.answers]
  stop = next(
    t[n : n + 2] for t in texts for n in (3, 4) if t[n : n + 2].isascii()
  )
  (found,) = run(
    at, [Request(prompt=prompt, beams=4, n=4, max_new_tokens=12, stop=[stop])]
  )
  assert stop in {a.stopped for a in found.answers}
  for answer in found.answers:
    whole = Bytes().decode(answer.tokens)
    if answer.finish == "stop":
      # Neither shown, nor complete before the last token.
      assert answer.text + stop == whole[: len(answer.text) + len(stop)]
      assert stop not in Bytes().decode(answer.tokens[:-1])
    else:
      assert answer.text == whole and stop not in whole


@pytest.mark.usefixtures("unchecked")
def test_hypotheses_watch_each_a_text_of_its_own():
  """What one says behind their beginning does not end the other."""
  request = types.SimpleNamespace(logprobs=None, beams=2)
  search = beams.BeamSearch(request, [], None, None)
  watch = Stop(strings=("ab",)).watch(Bytes())
  begun = beams._Beam(answer=Answer(), watch=watch, row=None)
  tokens = np.array([*Bytes().encode("ab")], np.int32)[-2:]
  grow = lambda n: search._grown(begun, tokens, np.zeros(2), int(tokens[n]))
  grow(0)
  answer, after = grow(1)
  assert (answer.text, answer.finish, after.tokens) == ("b", None, 1)
  assert watch.tokens == 0


@pytest.mark.usefixtures("unchecked")
def test_a_score_is_a_mean_by_the_length_to_a_power():
  request = types.SimpleNamespace(beams=2, length_penalty=0.5)
  search = beams.BeamSearch(request, [], None, None)
  answer = Answer(tokens=[5, 6, 7, 8], total_logprob=-8.0)
  assert search._score(answer) == -4


@pytest.mark.long
def test_few_hypotheses(tiny):
  """A mask that leaves two paths: the other answers are empty."""
  at, two = engine(tiny), np.zeros(tiny.config.vocab, bool)
  one = two.copy()
  two[[5, 9]] = one[7] = True
  request = Request(
    prompt=np.arange(20, dtype=np.int32),
    beams=4,
    n=3,
    max_new_tokens=4,
    mask=lambda tokens: one if tokens.size else two,
  )
  (found,) = run(at, [request])
  tokens = [a.tokens for a in found.answers]
  assert sorted(tokens[:2]) == [[5, 7, 7, 7], [9, 7, 7, 7]]
  assert tokens[2] == [] and found.answers[2].total_logprob == -np.inf
  # Only the first token was a choice.
  chosen = np.exp([a.total_logprob for a in found.answers])
  assert abs(chosen.sum() - 1) < 1e-5


@pytest.mark.long
def test_a_search_that_is_given_up(tiny):
  """What is known of it stays; a mask that raises ends it alone."""
  at = engine(tiny)
  prompt = np.arange(20, dtype=np.int32)
  ask = functools.partial(Request, prompt=prompt, beams=3, n=3)
  first = at.submit(ask(max_new_tokens=30))
  for _ in range(9):
    at.step()
  first.cancel()
  accounted(at)
  assert {a.finish for a in first.answers} == {"cancelled"}
  assert all(0 < len(a.tokens) < 30 for a in first.answers)
  totals = [a.total_logprob for a in first.answers]
  assert totals == sorted(totals, reverse=True)

  def broken(tokens):
    if tokens.size == 3:
      raise ValueError("no grammar")

  bad = at.submit(ask(max_new_tokens=9, mask=broken))
  good = at.submit(ask(max_new_tokens=9))
  at.run()
  empty(at)
  with pytest.raises(ValueError, match="no grammar"):
    bad.result()
  assert good.result().finish == "length"
  assert at.counters.failed == 1 and at.counters.finished == 3


def test_what_is_refused(tiny):
  at, prompt = engine(tiny), np.arange(9, dtype=np.int32)
  ask = functools.partial(Request, prompt=prompt, max_new_tokens=9)
  for words, options in {
    ("n", "2"): dict(beams=2, n=3),
    ("temperature", "beams=2"): dict(
      beams=2, sampling=RowSampling(temperature=0.5)
    ),
    ("best_of", "beams=2"): dict(beams=2, best_of=2),
    ("length_penalty", "beams"): dict(length_penalty=0.5),
    ("20", "beams=17"): dict(beams=18, stop=[1, 2, 3]),
  }.items():
    refused(OptionError, lambda options=options: ask(**options), *words)
  refused(OptionError, lambda: at.submit(ask(beams=6)), "beams", "rows=5")
  for layout in ("contiguous", "doubling"):
    with engine(tiny, layout=layout) as other:
      refused(
        OptionError, lambda at=other: at.submit(ask(beams=2)), "layout='pages'"
      )
  # Its rows together need more pages than there are.
  small = engine(tiny, capacity=128)
  long = np.zeros(40, np.int32)
  small.submit(Request(prompt=long, max_new_tokens=40)).cancel()
  refused(
    PromptError,
    lambda: small.submit(Request(prompt=long, max_new_tokens=40, beams=4)),
    "beams=4",
    "128 tokens in the pool",
  )


@pytest.fixture(scope="module")
def tiny():
  """A model of bytes."""
  heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
  config = BYTES_MODEL | {"num_hidden_layers": 1} | heads
  return rj.models.create(config, seed=0)


# ---------------------------------------------------------------------------
# Without a model
# ---------------------------------------------------------------------------


def teams(seed, operations, *, shards=1, reach=None, pages=24):
  """Random teams whose rows fork at random, among other rows."""
  rng = np.random.default_rng(seed)
  groups = [GroupSpec(pages=pages // shards)]
  if reach is not None:
    groups.append(GroupSpec(pages=pages // shards, reach=reach))
  tree = PrefixTree(groups, SMALL, shards=shards)
  limits = StepLimits(rows=9, pieces=3, piece=5, budget=7, blocks=16)
  scheduler = Scheduler(tree, limits)
  memory, preempted, forks = Memory(scheduler), 0, 0
  live: list[list[ServedRow]] = []
  offered: set[ServedRow] = set()
  count = 0
  while count < operations or scheduler.busy:
    if count < operations and len(live) < 6 and rng.random() < 0.5:
      stem = rng.integers(0, 2, 20).astype(np.int32)
      rows = [
        ServedRow(
          prompt=stem[rng.integers(0, 9) :],
          most=int(rng.integers(4, 16)),
          priority=int(rng.integers(0, 2)),
          arrival=count,
        )
      ]
      for _ in range(rng.integers(0, 4)):
        rows.append(
          ServedRow(
            prompt=rows[0].prompt,
            most=rows[0].most,
            priority=rows[0].priority,
            arrival=count + len(rows) / 5,
          )
        )
      for row in rows:
        row.team = rows
      if scheduler.fits(rows[0]) is None:
        scheduler.add(rows[0])
        live.append(rows)
    elif live and rng.random() < 0.05:
      for row in live.pop(rng.integers(len(live))):
        scheduler.drop(row)
    count += 1
    assert count < 50 * operations, "rows do not get on"
    plan = scheduler.plan()
    preempted += len(plan.preempted)
    forks += len(plan.forks)
    assert not plan.refused
    for fork in plan.forks:
      for group, (old, new) in enumerate(fork.pages):
        for n in range(SMALL):
          at = group, fork.number % shards
          memory.slots[*at, new, n] = memory.slots.get((*at, old, n))
    memory.call(plan)
    offered |= {x.row for x in (*plan.turns, *plan.pieces) if x.chooses}
    for rows in [*live]:
      going = [row for row in rows if row.chosen]
      if not going or not offered.issuperset(going):
        continue
      offered -= set(going)
      if len(going[0].answer) + 1 == going[0].most:
        for row in rows:
          scheduler.drop(row)
        live.remove(rows)
        continue
      parents = [going[i] for i in rng.integers(0, len(going), len(rows))]
      texts = {row: [*row.answer] for row in going}
      free, kept = [r for r in rows if r not in parents], set()
      for parent in parents:
        row = parent
        if parent in kept:
          row = free.pop()
          scheduler.park(row, parent)
        kept.add(parent)
        row.answer = [*texts[parent], int(rng.integers(0, 5))]
        row.chosen = len(row.answer)
    tree.check()
  tree.check()
  assert not any(block.refs for block in tree.blocks())
  assert sum(map(tree.available, range(shards))) == pages // shards * shards
  return preempted, forks


@pytest.mark.one_case
@pytest.mark.parametrize(
  "options",
  [{}, dict(shards=4), dict(reach=6), dict(reach=9, shards=2)],
)
@pytest.mark.parametrize(
  "seed", [0, *swept([(n,) for n in range(1, 9)], [(1,), (2,)])]
)
def test_pages_of_forks_hold_their_texts(seed, options):
  preempted, forks = teams(seed, 600, **options)
  assert preempted > 2 and forks > 300
