"""Plans over random trees of prompts: every page holds what its rows think.

No model: a call writes the text before a token into the token's slot, so that
a page that is stale, freed too early or of another row is seen at once.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringjax.serve import (
  GroupSpec,
  OutOfPages,
  PrefixTree,
  Scheduler,
  ServedRow,
  StepLimits,
)

PAGE = 4


class Memory:
  """Pages as a device would have them, and what is read out of them."""

  def __init__(self, scheduler):
    self.scheduler = scheduler
    self.slots = {}

  def key(self, group, row, n):
    tree = self.scheduler.tree
    number = n // PAGE
    table = self.scheduler.tables[group]
    page = table[row.slot, number % tree.shards, number // tree.shards]
    assert page >= 0, "a token without a page"
    return group, number % tree.shards, int(page), n % PAGE

  def text(self, row, n):
    """Up to token n: what its keys depend on."""
    whole = [*row.prompt.tolist(), *row.answer]
    return row.salt, row.adapter, tuple(whole[: n + 1])

  def call(self, plan):
    parts = [(p.row, p.start, p.count) for p in plan.pieces]
    parts += [(t.row, t.at, 1) for t in plan.turns]
    groups = range(len(self.scheduler.tree.groups))
    for row, start, count in parts:
      for n in range(start, start + count):
        for group in groups:
          self.slots[self.key(group, row, n)] = self.text(row, n)
    for row, start, count in parts:
      for group in groups:
        reach = self.scheduler.tree.groups[group].reach
        end = start + count
        first = 0 if reach is None else max(0, start - reach)
        for n in range(first, end):
          found = self.slots.get(self.key(group, row, n))
          assert found == self.text(row, n), "a page of another text"


def run(
  seed, operations, *, shards=1, reach=None, pages=24, share=False, alone=False
):
  """Random rows that come, are cancelled, and end; checked at each step."""
  rng = np.random.default_rng(seed)
  groups = [GroupSpec(pages=pages // shards)]
  if reach is not None:
    groups.append(GroupSpec(pages=pages // shards, reach=reach))
  # All layers may look back a window.
  groups = groups[1:] if alone else groups
  tree = PrefixTree(groups, PAGE, shards=shards)
  limits = StepLimits(rows=4, pieces=3, piece=5, budget=12, blocks=16)
  scheduler = Scheduler(tree, limits, share_answers=share)
  memory = Memory(scheduler)
  stems = [rng.integers(0, 5, 20).astype(np.int32) for _ in range(3)]
  done, live, count = 0, [], 0
  while count < operations or scheduler.busy:
    if count < operations and rng.random() < 0.5:
      stem = stems[rng.integers(3)][: rng.integers(0, 21)]
      own = rng.integers(0, 5, rng.integers(1, 12)).astype(np.int32)
      row = ServedRow(
        prompt=np.concatenate([stem, own]),
        most=int(rng.integers(1, 12)),
        priority=int(rng.integers(0, 3)),
        arrival=count,
        salt=str(rng.integers(0, 2)),
      )
      assert scheduler.fits(row) is None
      scheduler.add(row)
      live.append(row)
    elif count < operations and live and rng.random() < 0.1:
      row = live.pop(rng.integers(len(live)))
      scheduler.drop(row)
      done += 1
    count += 1
    assert count < 50 * operations, "rows do not get on"
    plan = scheduler.plan()
    running = [row.order for row in scheduler.running if row is not None]
    for row in plan.preempted:
      # Those that came first, or matter more, go on.
      assert all(row.order > other for other in running)
    memory.call(plan)
    for part in (*plan.turns, *plan.pieces):
      if part.chooses:
        row = part.row
        row.answer.append(int(rng.integers(0, 5)))
        if len(row.answer) == row.most:
          scheduler.drop(row)
          live.remove(row)
          done += 1
    tree.check()
  tree.check()
  # All that is left is what nobody uses.
  assert not any(block.refs for block in tree.blocks())
  assert (
    sum(tree.available(s) for s in range(shards)) == pages // shards * shards
  )
  return scheduler


CASES = {
  "one": {},
  "sharded": dict(shards=4, pages=32),
  "windows": dict(reach=6),
  "windows alone": dict(reach=6, alone=True),
  "answers": dict(share=True),
  "windows of answers, sharded": dict(reach=9, share=True, shards=2, pages=32),
}


@pytest.mark.one_case
@pytest.mark.long_cases(10)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
  "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))]
)
def test_a_thousand_operations(case, seed):
  scheduler = run(seed, 1000, **CASES[case])
  counters = scheduler.tree.counters
  assert counters.hit and counters.evicted


def test_rows_are_preempted_and_come_back():
  scheduler = run(0, 300, pages=12)
  assert scheduler.tree.counters.evicted


def broken_release(self, block, groups):
  """A row that leaves does not count."""
  for group in groups:
    self.unsee(block, group)
  block.used = next(self._clock)


def broken_finish(self, block, pages, indexed=False):
  """Blocks are ready, of which the page is not theirs."""
  swapped = [None if p is None else (p + 1) % 24 for p in pages]
  FINISH(self, block, swapped, indexed)


def broken_match(self, root, tokens, *, most=None):
  """Blocks are found by their own tokens, not by their prefix."""
  found = MATCH(self, root, tokens, most=most)
  if found:
    return found
  data = np.ascontiguousarray(tokens, "<i4").tobytes()[: 4 * self.page]
  alike = [b for b in self.blocks() if b.data == data and b.ready]
  return alike[:1] if len(tokens) > self.page else []


def broken_remove(self, block):
  """A page is freed that its block still has."""
  page = block.pages[0]
  REMOVE(self, block)
  if page is not None:
    self._free[0][block.depth % self.shards].append(page)


def broken_give_back(self, group, number, page):
  """The tail of a row stays where it was."""
  self._held[group][number % self.shards] -= 1


FINISH, MATCH = PrefixTree.finish, PrefixTree.match
REMOVE = PrefixTree._remove


@pytest.mark.long_cases(10)
@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "broken"),
  [
    ("release", broken_release),
    ("finish", broken_finish),
    ("match", broken_match),
    ("_remove", broken_remove),
    ("give_back", broken_give_back),
  ],
)
def test_planted_bugs_are_caught(monkeypatch, name, broken):
  monkeypatch.setattr(PrefixTree, name, broken)
  with pytest.raises((AssertionError, OutOfPages, IndexError, KeyError)):
    run(0, 200)


def test_stale_tables_are_caught(monkeypatch):
  write = Scheduler._set
  monkeypatch.setattr(
    Scheduler,
    "_set",
    lambda self, row, group, n, page: write(
      self, row, group, n, page if n != 1 else 0
    ),
  )
  with pytest.raises(AssertionError):
    run(0, 300)


def test_hashes_are_of_the_whole_prefix():
  tree = PrefixTree([GroupSpec(pages=8)], 2)
  digests = set()
  for salt in ("", "x"):
    for adapter in ("", "x"):
      root = tree.root(salt, adapter)
      one = tree.extend(root, b"12345678")
      two = tree.extend(one, b"12345678")
      digests |= {one.digest, two.digest}
  assert len(digests) == 8
  tree.finish(two, [tree.allocate(0, 1)], indexed=True)
  assert tree.find(two.digest) is two and tree.find(one.digest) is None


@pytest.mark.long
def test_memory_stays_level():
  """Over many requests of many tenants, most of whom come once."""
  tree = PrefixTree([GroupSpec(pages=16), GroupSpec(pages=16, reach=4)], PAGE)
  limits = StepLimits(rows=2, pieces=2, piece=16, budget=40, blocks=16)
  scheduler = Scheduler(tree, limits)
  sizes = []
  for n in range(6000):
    prompt = np.arange(20, dtype=np.int32)
    salt = "often" if n % 2 else str(n)
    row = ServedRow(prompt=prompt, most=1, arrival=n, salt=salt)
    scheduler.add(row)
    while not row.ended:
      for part in scheduler.plan().pieces:
        if part.chooses:
          scheduler.drop(part.row)
    if n % 1500 == 1499:
      tree.check()
      heaps = [*tree._leaves, *(h for g in tree._unseen for h in g)]
      sizes.append(sum(map(len, heaps)) + len(tree._roots))
  assert max(sizes) < 3 * (1024 + 5 * 16)


def _one_row(scheduler, prompt, **options):
  row = ServedRow(prompt=np.asarray(prompt, np.int32), most=4, **options)
  scheduler.add(row)
  return row


def test_a_kept_table_is_the_row_s_own():
  """A preempted row's slot is another's by the time that it is copied."""
  tree = PrefixTree([GroupSpec(pages=8)], PAGE)
  limits = StepLimits(rows=1, pieces=1, piece=8, budget=9, blocks=8)
  scheduler = Scheduler(tree, limits, keeps=lambda row: True)
  row = _one_row(scheduler, range(9))
  scheduler.plan()
  pages = scheduler.tables[0][0].copy()
  assert row.computed == 8 and (pages >= 0).any()
  scheduler._begun = set()
  scheduler._preempt(row, [])
  # What the tables say later is of no concern.
  scheduler.tables[0][:] = 7
  assert row.kept is not None
  assert row.kept.tables[0].tolist() == pages.tolist()
  assert (row.kept.computed, row.kept.slot) == (8, 0)


def test_a_page_that_is_attached_has_a_user():
  """It may not go while the row that gave it sees it, and may afterwards."""
  tree = PrefixTree([GroupSpec(pages=4), GroupSpec(pages=2, reach=4)], PAGE)
  data = np.arange(PAGE, dtype=np.int32).tobytes()
  block = tree.extend(tree.root(), data)
  wide = tree.allocate(0, 0)
  tree.finish(block, [wide, None])
  tree.attach(block, 1, tree.allocate(1, 0))
  assert block.users[1] == 1
  before = tree.free(1)
  tree.unsee(block, 1)
  assert block.users[1] == 0 and tree.free(1) == before
