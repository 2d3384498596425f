"""A request whose logits are not finite fails alone, and says why."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import NotFiniteLogitsError
from ringjax.infer import speculate
from ringjax.serve import Engine, Request, RowSampling
from tests.helpers import poisoned, refused
from tests.serve.conftest import BYTES_MODEL
from tests.serve.test_http import ask, complete, error

# A byte that stands for what goes wrong.
BAD = ord("Q")
PROMPT = "def f(x):\n  return x + "


@pytest.fixture(scope="module")
def sound():
  config = BYTES_MODEL | {"tie_word_embeddings": False}
  return rj.models.create(config, seed=0)


@pytest.fixture(scope="module")
def model(sound):
  return poisoned(sound, BAD)


def engine(model, **options):
  settings = dict(rows=4, capacity=256, longest=96, page=16, piece=16, pieces=2)
  return Engine(model, **settings | options)


def ids(rng, n):
  return rng.integers(0, 80, n).astype(np.int32)


def crowd(rng):
  """Prompts with a common prefix, every third of them bad at the end."""
  common = ids(rng, 32)
  made = []
  for n in range(12):
    own = ids(rng, 5 + 3 * n)
    if n % 3 == 1:
      own[2] = BAD
    made.append(np.concatenate([common, own]))
  return made


def check(at, prompts, want, **options):
  handles = [
    at.submit(Request(prompt=p, max_new_tokens=8, **options)) for p in prompts
  ]
  while at.step():
    at.scheduler.tree.check()
  for prompt, handle, tokens in zip(prompts, handles, want, strict=True):
    if BAD in prompt:
      found = refused(
        NotFiniteLogitsError,
        handle.result,
        f"answer 0 at position {prompt.size}",
        "weights",
      )
      assert found.positions == (prompt.size,)
      assert handle.answers[0].finish == "error"
    else:
      assert handle.result().tokens.tolist() == tokens.tolist()
  tree = at.scheduler.tree
  tree.check()
  assert tree.available() == tree.groups[0].pages
  return handles


def wanted(sound, prompts):
  """Answers of a sound model, none of which has the bad id itself."""
  with engine(sound) as at:
    handles = [at.submit(Request(prompt=p, max_new_tokens=8)) for p in prompts]
    at.run()
  found = [handle.result().tokens for handle in handles]
  assert all(BAD not in new for new in found)
  return found


def test_a_crowd_goes_on_and_finds_no_keys_of_what_failed(sound, model):
  prompts = crowd(np.random.default_rng(0))
  want = wanted(sound, prompts)
  with engine(model) as at:
    check(at, prompts, want)
    bad = sum(BAD in p for p in prompts)
    assert at.counters.failed == at.counters.not_finite == bad
    # Pages that held NaN are used by others, and no prefix with one is found.
    for prompt in prompts:
      found = at.scheduler.tree.match(at.scheduler.tree.root(), prompt)
      if BAD in prompt:
        assert 16 * len(found) <= prompt.tolist().index(BAD)
    check(at, prompts[::-1], want[::-1])


def test_an_answer_that_gets_bad_keeps_its_tokens(sound):
  prompts = [ids(np.random.default_rng(n), 20) for n in range(3)]
  want = wanted(sound, prompts)
  rest = {*np.concatenate([*prompts, want[0], want[2]]).tolist()}
  step = next(n for n in range(7) if int(want[1][n]) not in rest)
  with engine(poisoned(sound, int(want[1][step]))) as at:
    handles = [at.submit(Request(prompt=p, max_new_tokens=8)) for p in prompts]
    at.run()
    for n in (0, 2):
      assert handles[n].result().tokens.tolist() == want[n].tolist()
    failed = refused(NotFiniteLogitsError, handles[1].result)
    assert failed.positions == (20 + step + 1,)
    assert handles[1].answers[0].tokens == want[1][: step + 1].tolist()


@pytest.mark.long
def test_sampled_rows_with_masks_fail_alone(sound, model):
  rng = np.random.default_rng(3)
  good, bad = ids(rng, 9), np.append(ids(rng, 9), BAD)
  allowed = np.arange(262) < 100
  how = RowSampling(temperature=0.7, top_k=20, seed=4)
  options = dict(max_new_tokens=5, sampling=how, mask=lambda _: allowed)
  results = []
  for weights in (sound, model):
    with engine(weights) as at:
      handles = [at.submit(Request(prompt=good, **options))]
      if weights is model:
        handles.append(at.submit(Request(prompt=bad, **options)))
      at.run()
      results.append(handles[0].result().tokens.tolist())
      if weights is model:
        refused(NotFiniteLogitsError, handles[1].result)
  assert results[0] == results[1]


@pytest.mark.long
def test_beams_fail_with_their_request(sound, model):
  rng = np.random.default_rng(5)
  good, bad = ids(rng, 21), np.append(ids(rng, 20), BAD)
  beams = dict(beams=3, max_new_tokens=5)
  with engine(sound) as at:
    want = at.submit(Request(prompt=good, **beams))
    at.run()
  with engine(model) as at:
    handles = [at.submit(Request(prompt=p, **beams)) for p in (good, bad)]
    at.run()
    at.scheduler.tree.check()
  assert handles[0].result().tokens.tolist() == want.result().tokens.tolist()
  refused(NotFiniteLogitsError, handles[1].result, "position 21")


@pytest.mark.parametrize(
  "drafter",
  [
    pytest.param("lookup:count=3,adapt=false", marks=pytest.mark.long),
    pytest.param(
      speculate.SelfDraft(count=3, cache_kind="int8", adapt=False),
      marks=pytest.mark.long,
    ),
    pytest.param(
      speculate.SelfDraft(widths=(2, 2), cache_kind="int8", adapt=False),
      marks=pytest.mark.long,
    ),
  ],
  ids=["lookup", "chain", "tree"],
)
def test_drafts_do_not_hide_it(sound, model, drafter):
  prompts = crowd(np.random.default_rng(1))[:5]
  with engine(model, speculate=drafter) as at:
    check(at, prompts, wanted(sound, prompts))


@pytest.mark.long
@pytest.mark.parametrize("options", [dict(count=3), dict(widths=(2, 2))])
def test_rows_go_on_without_a_draft_that_is_not_finite(sound, model, options):
  # Target and prompts are sound, the draft has no number for one of them.
  prompts = crowd(np.random.default_rng(2))[:5]
  want = wanted(sound, prompts)
  drafter = speculate.DraftModel(model=model, adapt=False, **options)
  with engine(sound, speculate=drafter) as at:
    handles = [at.submit(Request(prompt=p, max_new_tokens=8)) for p in prompts]
    at.run()
    for handle, tokens in zip(handles, want, strict=True):
      assert handle.result().tokens.tolist() == tokens.tolist()
    assert at.counters.undrafted == sum(BAD in p for p in prompts)
    assert at.counters.failed == 0


def test_pages_of_what_failed_reach_no_store(model):
  rng = np.random.default_rng(6)
  bad = ids(rng, 40)
  bad[3] = BAD
  with rj.store.Store(host=1 << 24) as store:
    with engine(model, store=store) as at:
      handle = at.submit(Request(prompt=bad, max_new_tokens=2))
      at.run()
      refused(NotFiniteLogitsError, handle.result)
    assert at.counters.pages_out == 0


def test_a_stream_says_what_failed_before_its_first_event(model, monkeypatch):
  with engine(model, tokenizer=Bytes(), longest=160).start() as at:
    submit = at.submit

    def submit_and_wait(request, on_change):
      handle = submit(request, on_change)
      with contextlib.suppress(NotFiniteLogitsError):
        handle.result()
      return handle

    monkeypatch.setattr(at, "submit", submit_and_wait)
    app = rj.serve.app(at, trusted_template=True)
    stream = complete(app, prompt=PROMPT + "Q", max_tokens=3, stream=True)
    (event,) = stream.events
    assert "position" in event["error"]["message"]


def test_http_says_it(model):
  with engine(model, tokenizer=Bytes(), longest=160).start() as at:
    app = rj.serve.app(at, trusted_template=True)
    assert complete(app, max_tokens=3).status == 200
    text = PROMPT + "Q"
    one = complete(app, prompt=text, max_tokens=3)
    found = error(one, 500, "position", "weights")
    assert found["type"] == "server_error"
    both = complete(app, prompt=[PROMPT, text], max_tokens=3)
    error(both, 500, "position")
    stream = complete(app, prompt=text, max_tokens=3, stream=True)
    events = stream.data.decode().split("\n\n")
    said = [json.loads(e.removeprefix("data: ")) for e in events if "{" in e]
    assert "position" in said[-1]["error"]["message"]
    metrics = ask(app, "/metrics").data.decode()
    assert "ringjax_requests_not_finite_total 3" in metrics
