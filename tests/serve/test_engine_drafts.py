"""An engine that checks drafts answers as one that does not."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.models import longspec, small, tiny
from ringjax.serve import Engine, Request, RowSampling
from ringjax.serve import calls as calls_module
from ringjax.serve.drafts.row_drafts import ENGINE_DRAFTERS
from ringjax.serve.engine_config import EngineConfig
from tests import eagle_heads, predicting
from tests.helpers import refused
from tests.infer import test_dflash_draft
from tests.serve.test_engine import alone, check, engine, requests, served

DRAFTS = "lookup:count=3,adapt=false"
LONG, SLOW = pytest.mark.long, pytest.mark.slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foretold(speculate.TextDrafter):
  """Drafts what is known to come, or what is known not to."""

  adapt: bool = False
  answers: dict = dataclasses.field(default_factory=dict)
  wrong: int = 0

  def reader(self, text):
    return _Known(list(text), self.answers[tuple(text)], self.wrong)


class _Known:
  def __init__(self, text, answer, wrong):
    self.said, self.answer, self.wrong = 0, answer, wrong

  def add(self, tokens):
    self.said += len(tokens)

  def guess(self, count):
    found = self.answer[self.said : self.said + count]
    return [token ^ self.wrong for token in found]


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "devices", "options"),
  [
    ("gpt_oss", 1, dict(count=5)),
    *(
      pytest.param(family, devices, options, marks=pytest.mark.long)
      for family, devices, options in [
        ("llama3", 4, dict(kind="int4")),
        ("llama3", 1, dict(layout="contiguous")),
        ("gpt_oss", 4, dict(preempt="swap")),
        ("deepseek_v3", 1, dict(share="answers")),
        ("gemma2", 1, dict(layout="doubling")),
        ("llama4_text", 4, {}),
        ("falcon_rw", 1, dict(kind="unrotated")),
      ]
    ),
  ],
)
def test_answers_are_those_of_generate(loaded, family, devices, options):
  model, mesh = loaded(family, devices)
  rng, options = np.random.default_rng(devices), dict(options)
  count = options.pop("count", 10)
  at = check(model, mesh, rng, count, speculate=DRAFTS, **options)
  assert at.counters.preemptions
  assert 0 < at.counters.accepted < at.counters.drafted


@pytest.mark.long
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(loaded):
  model, _ = loaded("llama3")
  wanted = requests(np.random.default_rng(1), model.config.vocab, 6)
  answers = {tuple(r.prompt.tolist()): alone(model, r) for r in wanted}
  steps = []
  for wrong in (0, 1):
    drafter = Foretold(count=3, answers=answers, wrong=wrong)
    at = engine(model, speculate=drafter, capacity=512)
    handles = [at.submit(one) for one in wanted]
    at.run()
    for one, handle in zip(wanted, handles, strict=True):
      assert handle.result().tokens.tolist() == answers[tuple(one.prompt)]
    assert at.counters.drafted
    steps.append(at.counters.steps)
    want = 0 if wrong else at.counters.drafted
    assert at.counters.accepted == want
  assert steps[0] < 0.6 * steps[1]


@pytest.mark.long
def test_alone_and_in_a_crowd(loaded):
  model, _ = loaded("gpt_oss")
  rng = np.random.default_rng(3)
  wanted = requests(rng, model.config.vocab, 6, logprobs=2)
  crowd = served(engine(model, speculate=DRAFTS), wanted, rng)
  plain = served(engine(model), wanted, rng)
  for one, result, other in zip(wanted, crowd, plain, strict=True):
    own = engine(model, speculate=DRAFTS).submit(one).result().answers[0]
    assert own.logprobs == result.answers[0].logprobs
    want = other.answers[0]
    assert [x.token for x in own.logprobs] == want.tokens
    np.testing.assert_allclose(
      [x.logprob for x in own.logprobs],
      [x.logprob for x in want.logprobs],
      atol=1e-5,
    )


@pytest.mark.long
@pytest.mark.parametrize(
  "drafts",
  [
    DRAFTS,
    pytest.param(
      "early:layers=2,widths=(2,3),adapt=false", marks=pytest.mark.slow
    ),
  ],
)
def test_penalties_masks_and_beams_beside_drafts(loaded, drafts):
  model, _ = loaded("llama3")
  vocab = model.config.vocab
  even = np.arange(vocab) % 2 == 0
  base = Request(prompt=np.arange(20) % 7, max_new_tokens=14)
  loud = RowSampling(presence_penalty=0.7, frequency_penalty=0.3)
  bias = RowSampling(logit_bias={3: 4.0}, repetition_penalty=1.3)
  wanted = [
    base,
    dataclasses.replace(base, sampling=loud),
    dataclasses.replace(base, sampling=bias),
    dataclasses.replace(base, mask=lambda answer: even),
    dataclasses.replace(base, beams=3),
    dataclasses.replace(base, n=2, sampling=RowSampling(temperature=1.0)),
  ]
  found = []
  for how in (None, drafts):
    at = engine(model, speculate=how, capacity=512)
    results = [at.submit(one) for one in wanted]
    at.run()
    found.append([[a.tokens for a in r.result().answers] for r in results])
  assert found[0] == found[1]
  assert at.counters.accepted


@pytest.mark.slow
def test_a_stop_within_a_draft_ends_the_row(loaded):
  model, _ = loaded("llama3")
  request = Request(prompt=np.arange(9), max_new_tokens=20)
  whole = alone(model, request)
  end = next(n for n in range(6, 20) if whole[n] not in whole[:n])
  drafter = Foretold(count=4, answers={tuple(range(9)): whole})
  at = engine(model, speculate=drafter)
  stopped = dataclasses.replace(request, stop=whole[end])
  result = at.submit(stopped).result()
  assert result.tokens.tolist() == whole[: end + 1]
  assert result.finish == "stop"
  at.scheduler.tree.check()


@pytest.mark.long
def test_a_planted_bug_changes_tokens(loaded, monkeypatch):
  """Of a draft that is right in part the wrong rest is taken too."""
  model, _ = loaded("llama3")
  wanted = requests(np.random.default_rng(1), model.config.vocab, 4)
  answers = {tuple(r.prompt.tolist()): alone(model, r) for r in wanted}
  whole = calls_module.jnp.cumprod
  monkeypatch.setattr(
    calls_module.jnp, "cumprod", lambda x, axis: whole(x * 0 + 1, axis)
  )
  calls_module.check_drafts.clear_cache()
  drafter = Foretold(count=3, answers=answers, wrong=1)
  at = engine(model, speculate=drafter, capacity=512)
  handles = [at.submit(one) for one in wanted]
  at.run()
  calls_module.check_drafts.clear_cache()
  got = [handle.result().tokens.tolist() for handle in handles]
  assert got != list(answers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices", "options"),
  [
    ("gpt_oss", 1, {}),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in [
        ("llama3", 4, dict(preempt="swap")),
        ("deepseek_v3", 1, dict(layout="contiguous")),
        ("falcon_rw", 1, dict(share="answers")),
      ]
    ),
  ],
)
def test_a_model_that_is_the_target_is_always_right(
  loaded, family, devices, options
):
  """By its settings each row's drafts are drawn too, and rows change slots."""
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(devices)
  drafter = speculate.DraftModel(model=model, count=3, adapt=False)
  at = check(model, mesh, rng, 10, speculate=drafter, **options)
  assert at.counters.preemptions or family in ("gpt_oss", "falcon_rw")
  assert at.counters.drafted
  assert at.counters.accepted >= 0.97 * at.counters.drafted


@pytest.mark.slow
def test_rows_for_which_a_step_has_no_room_keep_their_drafts(loaded):
  model, _ = loaded("llama3")
  drafter = speculate.DraftModel(model=model, count=3, adapt=False)
  # Of four rows with drafts two fit.
  at = engine(model, speculate=drafter, budget=8, pieces=4)
  wanted = [Request(prompt=[n + 1, 5], max_new_tokens=12) for n in range(4)]
  handles = [at.submit(one) for one in wanted]
  at.run()
  for one, handle in zip(wanted, handles, strict=True):
    assert handle.result().tokens.tolist() == alone(model, one)
  assert at.counters.accepted == at.counters.drafted > 30


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "devices", "how", "kind"),
  [
    ("llama3", 4, "early:layers=1,count=2,adapt=false", None),
    ("gpt_oss", 1, "self:cache_kind=int4,count=3,adapt=false", None),
    ("llama3", 1, "self:cache_kind=int8,adapt=false", "int4"),
  ],
)
def test_models_draft_for_rows(loaded, family, devices, how, kind):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(7)
  at = check(model, mesh, rng, 8, speculate=how, kind=kind)
  assert 0 < at.counters.accepted < at.counters.drafted


@pytest.mark.slow
def test_a_folder_drafts_for_rows_that_come_and_go():
  model = rj.models.load(small.path())
  rng = np.random.default_rng(2)
  wanted = requests(rng, model.config.vocab, 12, logprobs=1)
  at = engine(model, speculate=f"model:model={tiny.path()},count=4,adapt=false")
  crowd = served(at, wanted, rng)
  assert at.counters.drafted
  for one, result in zip(wanted[:4], crowd, strict=False):
    own = engine(model).submit(one).result()
    assert own.tokens.tolist() == result.tokens.tolist()
  # What a prompt has of tokens is more than a draft reads at once.
  long = dataclasses.replace(wanted[0], prompt=np.arange(80) % 9)
  assert at.submit(long).result().tokens.tolist() == alone(model, long)


def test_the_drafters_of_an_engine_are_named_where_it_is_configured():
  meaning = EngineConfig.field("speculate")[0].metadata["meaning"]
  assert {*ENGINE_DRAFTERS} == {*speculate.DRAFTERS} - {"translated"}
  for name in ENGINE_DRAFTERS:
    assert f'"{name}' in meaning


def test_bad_drafters_are_refused(loaded):
  model, _ = loaded("llama3")
  ask = lambda how, model=model: Engine(model, speculate=how, rows=2)
  refused(OptionError, lambda: ask("best"), "lookup, suffix")
  refused(OptionError, lambda: ask("self"), "keeps all tokens")
  refused(OptionError, lambda: ask("longspec"), "model", "longspec.load")
  refused(OptionError, lambda: ask("lookup:verify=rejection"), "match")
  wide = f"early:layers=1,widths=({model.config.vocab + 1},)"
  refused(OptionError, lambda: ask(wide), "widths", "ids")
  recurrent, _ = loaded("qwen3_next")
  refused(OptionError, lambda: ask("lookup", recurrent), "recurrent")
  by = speculate.DraftModel(model=recurrent)
  refused(OptionError, lambda: ask(by), "recurrent")


@functools.cache
def _block(model):
  """A draft of a window that prompts exceed."""
  return longspec.with_draft(model, longspec.LongSpecConfig(window=24), seed=1)


@pytest.mark.slow
def test_trees_of_a_block(loaded):
  """Rows of unequal length, which have to make room."""
  model, _ = loaded("llama3")
  drafter = speculate.LongSpec(model=_block(model), widths=(2, 2), adapt=False)
  new = dict(max_new_tokens=24)
  prompts = [np.arange(n) * 7 % 60 for n in (1, 45, 18, 70)]
  want = rj.infer.generate(model, prompts, **new)
  at = engine(model, speculate=drafter)
  handles = [at.submit(Request(prompt=one, **new)) for one in prompts]
  at.run()
  for handle, row in zip(handles, want.tokens, strict=True):
    assert handle.result().tokens.tolist() == row.tolist()
  assert at.counters.preemptions
  assert 0 < at.counters.accepted < at.counters.drafted


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("family", "devices", "options"),
  [
    pytest.param("llama3", 4, dict(preempt="swap", kind="int4"), marks=LONG),
    pytest.param("gpt_oss", 1, {}, marks=SLOW),
    pytest.param("llama3", 1, dict(layout="doubling"), marks=SLOW),
    pytest.param(
      "mixtral", 1, dict(layout="contiguous", kind="unrotated"), marks=SLOW
    ),
    pytest.param("falcon_rw", 4, dict(share="answers"), marks=SLOW),
  ],
)
def test_a_block_reads_the_pages_of_rows(loaded, family, devices, options):
  model, mesh = loaded(family, devices)
  drafter = speculate.LongSpec(model=_block(model), count=3, adapt=False)
  rng = np.random.default_rng(devices)
  at = check(model, mesh, rng, 10, speculate=drafter, **options)
  # Extents have room for more rows.
  assert at.counters.preemptions or options.get("layout") == "doubling"
  assert 0 < at.counters.accepted < at.counters.drafted


@pytest.mark.long
@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  ("name", "how", "options"),
  [
    ("glm4_moe", dict(count=3), dict(layout="contiguous", kind="int8")),
    ("deepseek_v3", dict(count=3), {}),
    ("eagle3", dict(count=3), dict(kind="int8")),
    ("llama3", dict(widths=(2, 4)), {}),
    ("dflash", dict(widths=(2, 3)), {}),
    ("eagle3", dict(widths=(3, 6), beam=2, best=5), dict(kind="int8")),
    ("dflash", dict(count=3), {}),
    ("llama3", dict(count=3), {}),
  ],
)
def test_a_layer_of_the_model_drafts(name, how, options):
  """Rows make room for one another, and share pages of their prompts."""
  heads = {
    "eagle3": (eagle_heads.model, speculate.Eagle3),
    "dflash": (test_dflash_draft.model, speculate.DFlash),
  }
  if name in heads:
    make, kind = heads[name]
    model = make()
  else:
    model, kind = predicting.model(name), speculate.PredictDraft
  drafter = kind(adapt=False, **how)
  rng = np.random.default_rng(1)
  at = check(model, None, rng, 10, speculate=drafter, **options)
  assert 0 < at.counters.accepted < at.counters.drafted
  assert at.counters.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
  "how",
  [
    pytest.param("count=3", marks=LONG),
    pytest.param("widths=(2,4,2),best=6", marks=SLOW),
  ],
)
def test_drafts_of_a_block_are_those_of_generate(loaded, how, tmp_path):
  """Rows of unequal length, more than there are slots."""
  model, _ = loaded("llama3")
  longspec.save(_block(model), tmp_path)
  how = f"longspec:model={tmp_path},{how},adapt=false"
  reports, new = [], dict(max_new_tokens=12)
  prompts = [np.arange(n) * 7 % 60 for n in (1, 45, 18, 70)]
  want = rj.infer.generate(
    model,
    prompts,
    speculate=how,
    report=reports.append,
    **new,
  )
  at = engine(model, speculate=how, capacity=512, rows=2)
  handles = [at.submit(Request(prompt=one, **new)) for one in prompts]
  at.run()
  for handle, row in zip(handles, want.tokens, strict=True):
    assert handle.result().tokens.tolist() == row.tolist()
  found = reports[0].speculation
  assert at.counters.accepted == found.accepted > 0
  if not found.drafter.tree:
    assert at.counters.drafted == found.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices", "how", "options"),
  [
    pytest.param(*case, marks=mark)
    for mark, *case in [
      (LONG, "llama3", 4, dict(widths=(3, 4), best=5), dict(kind="int4")),
      (SLOW, "llama3", 4, dict(widths=(2, 4, 2)), dict(preempt="swap")),
      (SLOW, "llama3", 1, dict(widths=(2, 2)), dict(layout="doubling")),
      (SLOW, "gpt_oss", 1, dict(widths=(2, 2)), {}),
      (SLOW, "deepseek_v3", 1, dict(widths=(2, 3)), dict(layout="contiguous")),
      (SLOW, "falcon_rw", 1, dict(widths=(2, 4, 2)), dict(kind="unrotated")),
    ]
  ],
)
def test_trees_of_the_target_itself(loaded, family, devices, how, options):
  """Of trees by the target a whole path is right, also of rows that draw."""
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(devices)
  drafter = speculate.DraftModel(model=model, adapt=False, **how)
  at = check(model, mesh, rng, 10, speculate=drafter, **options)
  assert at.counters.preemptions or family == "gpt_oss"
  # Of each round's tokens the path's.
  share = drafter.depth / drafter.nodes
  assert at.counters.accepted > 0.7 * share * at.counters.drafted


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize("drafts", [pytest.param(None, marks=LONG), DRAFTS])
def test_stop_texts_inside_of_a_drafted_run(talking, drafts):
  """Texts of special tokens, which are not shown, and of several tokens."""
  with Engine(
    talking.model,
    rows=2,
    capacity=128,
    longest=64,
    page=16,
    piece=16,
    pieces=1,
    tokenizer=talking.tokenizer,
    speculate=drafts,
  ) as at:
    # All tokens are <|user|>, which lookup drafts.
    how = RowSampling(logit_bias={260: 100.0})
    for stop, tokens in (
      ("<|user|>", 1),
      ("<|user|>" * 5, 5),
      ("r|>" + "<|user|>" * 7 + "<|us", 9),
      (("<|user|>" * 6, "<|user|>" * 9), 6),
      (("<|user|>" * 9, 257), 9),
    ):
      request = Request(
        prompt=[260] * 9, max_new_tokens=20, sampling=how, stop=stop
      )
      (answer,) = at.submit(request).result().answers
      assert len(answer.tokens) == tokens and answer.text == ""
      assert answer.finish == "stop" and isinstance(answer.stopped, str)
      shown = dataclasses.replace(
        request,
        stop=rj.infer.Stop(
          strings=(answer.stopped,), special=True, included=True
        ),
      )
      text = at.submit(shown).result().answers[0].text
      assert text.endswith(answer.stopped)
    assert (at.counters.accepted > 0) == (drafts is not None)
