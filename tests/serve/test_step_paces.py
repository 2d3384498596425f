"""Which steps of an engine have drafts: what these cost is bounded."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest

from ringjax.infer import speculate
from ringjax.infer.speculate.paces import SHARE, Paces
from ringjax.serve import Engine, Request
from ringjax.serve import engine as engine_module
from ringjax.serve.drafts.step_paces import StepPaces
from ringjax.serve.prefix.prefix_tree import GroupSpec, PrefixTree
from ringjax.serve.scheduler import RowDraft, Scheduler, ServedRow, StepLimits
from tests.serve.test_engine import check, engine
from tests.serve.test_engine_drafts import Foretold

LONG = pytest.mark.long
PLAIN_S, PROMPT_S = 1.0, 0.7
ROWS, COUNT = 8, 4


class Loop:
  """Steps of an engine without a model, which take what they are said to."""

  def __init__(self, drafter, right, *, check_s=1.0, draft_s=0.0, read_s=0.0):
    """Of an engine that has no drafts, or drafts by a rule.

    Args:
      drafter: what drafts, or None.
      right: of a row how many of its drafted tokens are.
      check_s: of a call for answers that checks drafts.
      draft_s: of drafting for all rows.
      read_s: of each token of a text that the draft has to read.
    """
    limits = StepLimits(
      rows=ROWS, pieces=2, piece=16, budget=ROWS * (1 + COUNT) + 32, blocks=32
    )
    tree = PrefixTree([GroupSpec(pages=ROWS * 32)], 16)
    self.scheduler = Scheduler(tree, limits, reuse=False)
    self.now, self.free, self.flight = 0.0, 0.0, None
    self.paces = None
    if drafter is not None:
      self.paces = StepPaces(drafter, ROWS, lambda: self.now)
    self.right, self.check_s = right, check_s
    self.draft_s, self.read_s = draft_s, read_s
    self.known = {}
    self.drafted_steps, self.reasons = 0, collections.Counter()

  def behind(self):
    rows = [row for row in self.scheduler.running if row is not None]
    most = max(
      (r.known - self.known.get(r, 0) for r in rows if not r.reading), default=0
    )
    return most if most > 16 else 0

  def step(self):
    rows = [row for row in self.scheduler.running if row is not None]
    drafting, paces = False, self.paces
    if paces is not None:
      behind = self.behind if self.read_s else lambda: 0
      drafting = paces.drafts(rows, lambda row: True, behind)
      if drafting or (self.flight is not None and self.flight[1]):
        self.collect()
    self.scheduler.drafts = None
    if drafting:
      self.scheduler.drafts = lambda row, most: RowDraft(
        (7,) * min(most, COUNT)
      )
      with paces.drafting():
        self.now += self.draft_s + self.read_s * self.behind()
      for row in self.scheduler.running:
        if row is not None and not row.reading:
          self.known[row] = row.known
    plan = self.scheduler.plan()
    for row in plan.admitted if paces is not None else ():
      paces.begin(row)
    before, self.flight = self.flight, None
    if not plan.empty:
      checks = any(turn.draft.tokens for turn in plan.turns)
      self.drafted_steps += checks
      if plan.turns and paces is not None and not drafting:
        self.reasons[paces.reason] += 1
      seconds = self.check_s if checks else PLAIN_S
      self.free = max(self.now, self.free) + bool(plan.turns) * seconds
      self.free += bool(plan.pieces) * PROMPT_S
      timing = None if paces is None else paces.planned(plan)
      self.flight = plan, checks, timing, self.free
    if before is not None:
      self.read(*before)

  def collect(self):
    before, self.flight = self.flight, None
    if before is not None:
      self.read(*before)

  def read(self, plan, checks, timing, free):
    self.now = max(self.now, free)
    count = np.ones(ROWS, int)
    for turn in plan.turns:
      drafted = len(turn.draft.tokens)
      count[turn.slot] += min(drafted, self.right(turn.row))
    if self.paces is not None:
      self.paces.add(timing, plan, count if checks else None)
    for turn in plan.turns:
      row, many = turn.row, int(count[turn.slot])
      row.chosen += many - 1
      row.computed += many - 1
      self.say(row, many)
    for piece in plan.pieces:
      if piece.chooses:
        self.say(piece.row, 1)

  def say(self, row, many):
    if not row.ended:
      row.answer.extend([7] * many)
      if len(row.answer) >= row.most:
        self.scheduler.drop(row)

  def serve(self, seed=0, count=12):
    """Seconds for requests of all lengths, of which more and fewer run."""
    rng = np.random.default_rng(seed)
    left = [
      ServedRow(
        prompt=np.zeros(int(rng.integers(1, 100)), np.int32),
        most=int(rng.integers(20, 300)),
        arrival=n,
      )
      for n in range(count)
    ]
    steps = 0
    while left or self.scheduler.busy or self.flight is not None:
      # Bursts, behind which the engine is nearly idle.
      if left and (steps % 200 == 0 or not self.scheduler.busy):
        for _ in range(min(len(left), int(rng.integers(1, 12)))):
          self.scheduler.add(left.pop())
      with self.paces.step() if self.paces else contextlib.nullcontext():
        self.step()
      steps += 1
    return self.now


def ratio(right, drafter=None, **seconds):
  """What an engine takes that drafts, of one that does not, and the loop."""
  drafter = drafter or speculate.PromptLookup(count=COUNT)
  loop = Loop(drafter, right, **seconds)
  return loop.serve() / Loop(None, right).serve(), loop


@pytest.mark.parametrize("check_s", [1.1, pytest.param(6.0, marks=LONG)])
def test_useless_drafts_cost_no_more_than_a_twentieth(check_s):
  took, loop = ratio(lambda row: 0, check_s=check_s)
  assert 1 < took <= 1 + SHARE
  assert loop.drafted_steps > 1 and loop.reasons["slower"]


@LONG
@pytest.mark.parametrize("read_s", [0.01, 0.1])
def test_a_useless_draft_model_is_not_read_to_again_and_again(read_s):
  drafter = speculate.EarlyExit(count=COUNT)
  took, loop = ratio(
    lambda row: 0, drafter, check_s=1.3, draft_s=0.8, read_s=read_s
  )
  # What it reads at first is let off.
  assert 1 < took <= 1 + SHARE + 100 * read_s / loop.now
  assert loop.drafted_steps > 1 and loop.reasons["costly"]


@pytest.mark.parametrize("check_s", [1.5, pytest.param(1.1, marks=LONG)])
def test_drafts_that_pay_never_pause(check_s):
  took, loop = ratio(lambda row: COUNT, check_s=check_s)
  assert took < 0.65
  assert not loop.reasons["slower"] and not loop.reasons["costly"]


@LONG
def test_a_draft_model_that_pays_reads_new_texts():
  drafter = speculate.EarlyExit(count=COUNT)
  took, loop = ratio(
    lambda row: COUNT, drafter, check_s=1.3, draft_s=0.5, read_s=0.01
  )
  assert took < 0.8
  assert not loop.reasons["slower"]


@LONG
def test_rows_that_draft_well_pay_for_those_that_do_not():
  took, loop = ratio(
    lambda row: COUNT * (len(row.answer) % 100 < 70), check_s=1.5
  )
  assert took < 0.9 and loop.drafted_steps > 100


@LONG
def test_drafts_of_few_rows_are_no_matter_of_those_of_many():
  """Where checks cost more beside many rows each size has its own pauses."""
  drafter = speculate.PromptLookup(count=COUNT)
  paces = Paces(drafter, ROWS, whole=True)
  drafts = {0: 0, 3: 0}
  for n in range(3000):
    size, live = (0, 1) if n % 2 else (3, ROWS)
    rows = np.arange(ROWS) < live
    most = paces.draft_lengths(size, rows=rows, live=live)
    drafts[size] += bool(most.any())
    seconds = (1.2 if size == 0 else 4.0) if most.any() else PLAIN_S
    came = np.where(rows, 1 + np.minimum(most, 1), 0)
    paces.add(most, most, came, seconds, size)
  assert drafts[0] > 1400 and drafts[3] < 40
  assert paces.cost_s < SHARE * paces.plain_s


class Device:
  """A device with a clock, on which each program takes what it is said to."""

  def __init__(self, monkeypatch, **seconds):
    self.now, self.free = 0.0, 0.0
    self._ends: collections.deque = collections.deque()
    for name, each in seconds.items():
      self._time(monkeypatch, name, each)
    read, run = Engine._read, Engine._run

    def reads(engine, flight):
      self.now = max(self.now, self._ends.popleft())
      return read(engine, flight)

    def runs(engine, plan):
      flight = run(engine, plan)
      self._ends.append(self.free)
      return flight

    monkeypatch.setattr(Engine, "_read", reads)
    monkeypatch.setattr(Engine, "_run", runs)

  def _time(self, monkeypatch, name, seconds):
    program = getattr(engine_module, name)

    def timed(*args, **options):
      self.free = max(self.now, self.free) + seconds
      return program(*args, **options)

    monkeypatch.setattr(engine_module, name, timed)

  def __call__(self):
    return self.now


def answers(model, wanted, **options):
  """Tokens of each request, and the engine."""
  at = engine(model, capacity=512, longest=400, **options)
  at.warm_up()
  handles = [at.submit(request) for request in wanted]
  at.run()
  return [handle.result().tokens.tolist() for handle in handles], at


@pytest.fixture(scope="module")
def texts(loaded):
  """Requests, and what comes behind their prompts."""
  model, _ = loaded("llama3")
  wanted = [
    Request(prompt=[n + 1, 5, 9], max_new_tokens=100 + 20 * n) for n in range(3)
  ]
  said, _ = answers(model, wanted)
  return {tuple(r.prompt): x for r, x in zip(wanted, said, strict=True)}, wanted


@LONG
@pytest.mark.parametrize("check_s", [1.5, 6.0])
def test_drafts_that_are_never_right_cost_a_twentieth(
  loaded, texts, monkeypatch, check_s
):
  model, _ = loaded("llama3")
  known, wanted = texts
  device = Device(monkeypatch, compute=PLAIN_S, check_drafts=check_s)
  drafter = Foretold(count=4, answers=known, wrong=1, adapt=True)
  said, at = answers(model, wanted, speculate=drafter, clock=device)
  assert said == list(known.values())
  counters = at.counters
  plain = counters.drafted_steps + counters.plain_steps
  cost = counters.drafted_steps * (check_s - PLAIN_S)
  # Of the first draft nothing is known.
  assert 0 < cost <= SHARE * plain + check_s
  assert counters.accepted == 0 < counters.paused_slower
  assert "takes" in at.drafting
  assert counters.paused_timing and counters.plain_steps > 100


@LONG
def test_right_drafts_never_pause(loaded, texts, monkeypatch):
  model, _ = loaded("llama3")
  known, wanted = texts
  device = Device(monkeypatch, compute=PLAIN_S, check_drafts=1.5)
  drafter = Foretold(count=4, answers=known, adapt=True)
  said, at = answers(model, wanted, speculate=drafter, clock=device)
  assert said == list(known.values())
  counters = at.counters
  assert counters.paused_slower == counters.paused_costly == 0
  # Two sizes of steps are timed, and while prompts are read too.
  assert counters.paused_timing < 25
  assert counters.accepted == counters.drafted > 100


@LONG
def test_without_adapt_all_steps_draft(loaded, texts, monkeypatch):
  model, _ = loaded("llama3")
  known, wanted = texts
  device = Device(monkeypatch, compute=PLAIN_S, check_drafts=6.0)
  drafter = Foretold(count=4, answers=known, wrong=1, adapt=False)
  said, at = answers(model, wanted, speculate=drafter, clock=device)
  assert said == list(known.values())
  assert at.counters.plain_steps == 0 < at.counters.drafted_steps
  assert "adapt=False" in at.drafting


@pytest.mark.slow
@LONG
@pytest.mark.parametrize(
  ("family", "devices", "how", "options"),
  [
    ("llama3", 1, "lookup:count=3", {}),
    ("gpt_oss", 1, "early:layers=1,count=2", {}),
    ("llama3", 4, "early:layers=1,widths=(2,2)", dict(preempt="swap")),
    ("llama3", 1, "self:cache_kind=int8", dict(layout="contiguous")),
  ],
)
def test_pauses_at_any_time_change_no_token(
  loaded, family, devices, how, options, monkeypatch
):
  """Rows come, go and make room; draft models catch up behind pauses."""
  model, mesh = loaded(family, devices)
  draw = np.random.default_rng(5)

  def most(self, size=0, *, rows, **_):
    return 2 * rows * bool(draw.integers(0, 3) == 0)

  monkeypatch.setattr(Paces, "draft_lengths", most)
  at = check(
    model, mesh, np.random.default_rng(devices), 10, speculate=how, **options
  )
  assert at.counters.drafted_steps > 5 and at.counters.plain_steps > 5
  assert at.counters.accepted


@LONG
def test_a_draft_model_that_pauses_reads_what_it_missed(loaded, monkeypatch):
  model, _ = loaded("llama3")
  calls = []

  def most(self, size=0, *, rows, **_):
    calls.append(1)
    # Two steps with drafts, and forty without.
    return 3 * rows * (len(calls) % 42 < 2)

  monkeypatch.setattr(Paces, "draft_lengths", most)
  at = engine(
    model,
    capacity=512,
    longest=200,
    speculate=speculate.DraftModel(model=model, count=3),
  )
  handles = [
    at.submit(Request(prompt=[n + 1, 5], max_new_tokens=150)) for n in range(2)
  ]
  at.run()
  assert all(handle.result().finish == "length" for handle in handles)
  # The target itself is always right, about what it has read.
  assert at.counters.accepted == at.counters.drafted > 20
  assert at.counters.drafted_steps < 10 < at.counters.plain_steps
