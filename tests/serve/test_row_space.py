"""Contiguous rows grow on demand, and answers are those of pages."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import MemoryEstimateError, OptionError, OutOfMemoryError
from ringjax.kv.storage.reserved import ReservedRows, reserved_zeros
from ringjax.serve import (
  DoublingSpace,
  Engine,
  OutOfPages,
  Request,
  RowSpace,
  Scheduler,
  ServedRow,
  StepLimits,
)
from tests.helpers import make_mesh, refused, swept
from tests.serve.test_engine import PAGE, alone, engine, requests, served

EVERY = [
  (family, kind, layout, devices)
  for family, kind in (
    ("llama3", "windowed"),
    ("llama3", "int4"),
    ("gpt_oss", "windowed"),
    ("qwen3_next", "windowed"),
  )
  for layout in ("contiguous", "doubling")
  for devices in (1, 4)
]
OFTEN = [
  ("llama3", "windowed", "doubling", 4),
  ("llama3", "int4", "doubling", 1),
  ("llama3", "int4", "contiguous", 4),
  ("gpt_oss", "windowed", "contiguous", 4),
  ("gpt_oss", "windowed", "doubling", 1),
  ("qwen3_next", "windowed", "contiguous", 1),
  ("qwen3_next", "windowed", "doubling", 4),
]


def answers(at, vocab):
  """Of requests that come in any order, with the numbers they came by."""
  rng = np.random.default_rng(0)
  results = served(at, requests(rng, vocab, 8, logprobs=2), rng)
  return [(a.tokens, a.logprobs) for r in results for a in r.answers]


def same_answers(loaded, family, kind, layout, devices):
  """Those of a pool of the same pages, which XLA computes by one program."""
  model, mesh = loaded(family, devices)
  how = dict(cache_kind=kind, share="nothing", shared_reads="never")
  with engine(model, mesh, layout=layout, **how) as at:
    found, counters = answers(at, model.config.vocab), at.space.space_counters
    assert at.counters.preemptions
    assert counters.maps and counters.exhausted
    # Of four shards two groups are all that there is.
    moves = layout == "doubling" and devices == 1
    assert bool(counters.moves) == moves
    how["capacity"] = at._pool.groups[0].pages * PAGE
  if kind == "windowed":
    # All layers keep whole rows, as they do there.
    how["cache_kind"] = "dense"
  pages = engine(model, mesh, **how)
  assert pages.reserved() == at.reserved()
  assert found == answers(pages, model.config.vocab)


@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "layout"), [("llama3", "contiguous"), ("llama3", "doubling")]
)
def test_answers_are_those_of_pages(loaded, family, layout):
  same_answers(loaded, family, "windowed", layout, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "kind", "layout", "devices"), swept(EVERY, OFTEN)
)
def test_more_answers(loaded, family, kind, layout, devices):
  same_answers(loaded, family, kind, layout, devices)


class Counted:
  """Memory that notes what is mapped, and which thread maps it."""

  def __init__(self, most=None):
    self.held, self.calls, self.most = set(), [], most

  def map(self, slot, first, last):
    if self.most is not None and len(self.held) + last - first > self.most:
      return False
    self.calls.append((threading.current_thread().name, slot, first, last))
    new = {(slot, n) for n in range(first, last)}
    assert not new & self.held
    self.held |= new
    return True

  def unmap(self, slot, first, last):
    gone = {(slot, n) for n in range(first, last)}
    assert gone <= self.held
    self.held -= gone


def replay(space, lengths, answers, *, rows, budget=64, piece=16):
  """Steps of a scheduler over a space, without a model; rows in order."""
  limits = StepLimits(
    rows=rows, pieces=2, piece=piece, budget=budget, blocks=space.each
  )
  scheduler = Scheduler(space, limits, reuse=False)
  made = [
    ServedRow(prompt=np.arange(n, dtype=np.int32), most=int(m), arrival=i)
    for i, (n, m) in enumerate(zip(lengths, answers, strict=True))
  ]
  for row in made:
    scheduler.add(row)
  waste = 0
  while scheduler.busy:
    space.join()
    plan = scheduler.plan()
    assert not plan.empty or plan.preempted
    running = [r for r in scheduler.running if r is not None]
    decoding = {r.slot: r.computed for r in running if not r.reading}
    space.look_ahead(decoding)
    space.join()
    space.check()
    for row in running:
      # What nobody else can have, in tokens.
      kept = space.needed[row.slot] * space.page - row.computed
      waste = max(waste, kept)
    for row in running:
      if row.computed >= row.prompt.size + row.most - 1:
        scheduler.drop(row)
  space.close()
  return made, waste


def test_no_row_that_decodes_waits_for_memory():
  memory = Counted()
  space = RowSpace(4, 64, 4, blocks=16, memory=memory, eager=0)
  _, waste = replay(space, [5, 9, 30, 3], [20, 17, 25, 40], rows=4)
  counters = space.space_counters
  assert counters.decode_maps == 0 and counters.background_maps > 10
  # One page of tokens is what a row wastes at most.
  assert waste <= 4
  # A row's tokens and the one that is looked ahead to, in whole groups: the
  # last token of an answer is chosen, not read.
  rows = zip([5, 9, 30, 3], [20, 17, 25, 40], strict=True)
  want = [-(-(n + m - 1 + 1) // 4) for n, m in rows]
  assert space.mapped == want
  assert counters.maps == sum(want) == len(memory.held)
  # Without a thread rows wait.
  alone = RowSpace(4, 64, 4, blocks=16, eager=0, background=False)
  replay(alone, [5, 9, 30, 3], [20, 17, 25, 40], rows=4)
  assert alone.space_counters.background_maps == 0
  assert alone.space_counters.decode_maps > 10


def test_maps_are_made_by_the_thread():
  memory = Counted()
  space = RowSpace(1, 8, 4, blocks=8, memory=memory, eager=0)
  replay(space, [4], [9], rows=1)
  names = [name for name, *_ in memory.calls]
  assert names[0] == threading.current_thread().name
  assert all(name.startswith("ringjax row space") for name in names[1:])
  assert [x[2:] for x in memory.calls] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_free_slot_keeps_its_groups_and_the_best_fit_is_taken():
  space = RowSpace(4, 64, 4, blocks=16, eager=0, background=False)
  for slot, many in enumerate((6, 2, 4)):
    assert space.slot_for([slot], 4 * many) == slot
    for number in range(many):
      assert space.allocate(0, number, slot) == slot * 16 + number
    space.leave(slot)
  assert space.mapped == [6, 2, 4, 0]
  assert space.slot_for([0, 1, 2, 3], 9) == 2
  assert space.slot_for([0, 1, 3], 5) == 1
  # None is enough: the most there is.
  assert space.slot_for([0, 3], 60) == 0
  before = space.space_counters.maps
  space.allocate(0, 5, 0)
  assert space.space_counters.maps == before
  counters = space.space_counters
  assert (counters.reuses, counters.reused) == (3, 3 + 2 + 6)


def test_eager_groups_and_reclamation_when_memory_is_low():
  space = RowSpace(3, 10, 4, blocks=8, eager=2, low=0.5)
  space.slot_for([0], 4)
  space.allocate(0, 0, 0)
  space.look_ahead({})
  space.join()
  assert space.mapped == [1, 2, 0] and space.space_counters.eager_maps == 2
  # The slot that has most is next, and is ready already.
  space.look_ahead({})
  space.join()
  assert space.mapped == [1, 2, 0]
  space.allocate(0, 4, 0)
  space.look_ahead({0: 18})
  space.join()
  # Below half of the groups: a free slot gives one back, step by step.
  assert space.mapped == [5, 1, 0] and space.space_counters.reclaimed == 1
  space.close()


def test_exhaustion_is_a_signal():
  memory = Counted()
  space = RowSpace(3, 6, 4, blocks=6, memory=memory, eager=0, background=False)
  for slot in (0, 1):
    space.slot_for([slot], 12)
    for number in range(3):
      space.allocate(0, number, slot)
  with pytest.raises(OutOfPages):
    space.allocate(0, 3, 0)
  assert space.available() == 0 and space.space_counters.exhausted == 1
  # A free slot's groups are taken, the last ones first.
  space.leave(1)
  space.allocate(0, 3, 0)
  assert space.mapped == [4, 2, 0] and len(memory.held) == 6
  # So are groups behind a running row's end.
  space.slot_for([1], 4)
  space.allocate(0, 0, 1)
  space.allocate(0, 4, 0)
  assert space.mapped == [5, 1, 0]
  # A system without memory is a signal too.
  poor = RowSpace(1, 9, 4, blocks=9, memory=Counted(most=2), background=False)
  poor.slot_for([0], 4)
  poor.allocate(0, 1, 0)
  with pytest.raises(OutOfPages):
    poor.allocate(0, 2, 0)
  poor.check()


def test_memory_that_calls_read_is_not_unmapped():
  memory, waited = Counted(), []
  space = RowSpace(2, 4, 4, blocks=4, memory=memory, eager=0, low=1)
  space.settle = lambda: waited.append(len(memory.held))
  for slot, many in ((0, 1), (1, 3)):
    space.slot_for([slot], 16)
    for number in range(many):
      space.allocate(0, number, slot)
  space.join()
  # A call that is on its way reads the row that is preempted now.
  space.leave(1)
  space.look_ahead({})
  space._wait()
  assert len(memory.held) == 4 and not waited
  space.allocate(0, 1, 0)
  assert waited == [4] and space.mapped == [2, 2]
  # After the next plan has begun it is over: nothing waits.
  space.leave(0)
  space.join()
  space.look_ahead({})
  space.join()
  assert len(memory.held) == 3 and waited == [4]
  space.close()


@pytest.mark.parametrize("make", [RowSpace, DoublingSpace])
def test_any_rows_are_served(make):
  """Rows are preempted where memory ends, and all come to their ends."""
  preemptions = 0
  for seed in range(8):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 5))
    space = make(rows, 16, 4, blocks=16, background=bool(seed % 2))
    made, _ = replay(
      space,
      rng.integers(1, 40, 12),
      rng.integers(1, 24, 12),
      rows=rows,
      budget=int(rng.integers(8, 64)),
    )
    assert all(row.ended for row in made)
    preemptions += sum(row.preemptions for row in made)
  assert preemptions


def test_extents_double_and_move():
  space = DoublingSpace(2, 16, 4, blocks=16, background=False)
  for slot in (0, 1):
    space.slot_for([slot], 64)
    space.allocate(0, 0, slot)
  assert space.base == [0, 1] and space.mapped == [1, 1]
  # Its neighbour is in use: it moves; the other one then grows down.
  space.allocate(0, 1, 0)
  space.allocate(0, 1, 1)
  space.check()
  moves = [tuple(move) for move in space.take_moves()]
  assert moves == [(0, 2, 1), (1, 0, 1)] and not space.take_moves()
  table = np.array([[16, 17, -1]], np.int32)
  assert space.place(table, 1).tolist() == [[0, 1, -1]]
  # Where there is room behind it, it stays.
  space.leave(1)
  space.allocate(0, 7, 0)
  space.check()
  assert space.mapped[0] == 8
  space.slot_for([1], 64)
  space.allocate(0, 0, 1)
  with pytest.raises(OutOfPages):
    space.allocate(0, 15, 1)
  refused(OptionError, lambda: DoublingSpace(2, 12, 4, blocks=4), "power of")


def test_reserved_memory_follows_use():
  """64 rows of a million tokens: 4 GiB of address space."""
  page, each, rows = 128, 1 << 13, 64
  shape = jax.ShapeDtypeStruct((2, rows * each, 1, page, 8), jnp.float32)
  arrays = {"k": reserved_zeros(shape)}
  memory = ReservedRows(arrays, each)
  assert memory.reserved() == 2 * 64 * (1 << 20) * 8 * 4
  assert memory.resident() < 1 << 20

  @jax.jit
  def total(x):
    return x[:, 7 * each : 7 * each + 64].sum(), x[1, 9 * each].sum()

  def write(x, slot, n):
    return x.at[:, slot * each + n].set(1.0)

  write = jax.jit(write, donate_argnums=0)
  x = arrays["k"]
  for n in range(64):
    x = write(x, 7, n)
  jax.block_until_ready(x)
  # In place, and as much memory as was written.
  assert memory.at({"k": x})
  written = 64 * memory.group_bytes
  assert written <= memory.resident() < written + (1 << 20)
  assert [float(n) for n in total(x)] == [64 * 2 * page * 8, 0]
  assert memory.map(9, 0, 100)
  mapped = written + 100 * memory.group_bytes
  assert mapped <= memory.resident() < mapped + (1 << 20)
  assert [float(n) for n in total(x)] == [64 * 2 * page * 8, 0]
  memory.unmap(7, 0, each)
  memory.unmap(9, 0, each)
  assert memory.resident() < 1 << 20
  # But for the ends of rows, in pages of the system that others have too.
  left, other = map(float, total(x))
  assert left <= 2 * 2 * 1024 and other == 0


@pytest.mark.long
def test_a_row_is_a_dense_view(loaded):
  """What lies in a row's memory is what a cache of its own would hold."""
  model, _ = loaded("llama3")
  prompt = np.arange(20, dtype=np.int32)
  with engine(model, layout="contiguous", rows=2) as at:
    # The second slot: the first one is taken.
    at.submit(Request(prompt=prompt[:7], max_new_tokens=40))
    handle = at.submit(Request(prompt=prompt, max_new_tokens=5, logprobs=0))
    answer = handle.result().answers[0]
    each, page = at.space.each, at.space.page
    start, pages = 1 * each, -(-24 // page)
    (held,) = at._pool.slots
  row = [np.asarray(x[:, start : start + pages]) for x in held]
  # [L, n, K, P, H] to [L, 1, K, S, H].
  dense = [np.swapaxes(x, 1, 2) for x in row]
  dense = [x.reshape(*x.shape[:2], -1, x.shape[-1])[:, None] for x in dense]
  cache = model.init_cache(1, dense[0].shape[3])
  _, cache = model(prompt[None], cache=cache)
  _, cache = model(np.asarray([answer.tokens[:3]], np.int32), cache=cache)
  (slots,) = cache.slots
  for found, want in zip(dense, slots, strict=True):
    np.testing.assert_allclose(
      found[:, :, :, :23], want[:, :, :, :23], rtol=1e-4, atol=1e-5
    )
  # Attention over the row gives the logits of the pages.
  slots = type(slots)(*map(jnp.asarray, dense))
  cache = dataclasses.replace(cache, slots=(slots,))
  logits, _ = model(np.asarray([[answer.tokens[3]]], np.int32), cache=cache)
  logprobs = jax.nn.log_softmax(logits[0, -1])
  assert int(logprobs.argmax()) == answer.tokens[4]
  got, want = answer.logprobs[4].logprob, float(logprobs.max())
  assert abs(got - want) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
  "devices", [1, pytest.param(4, marks=pytest.mark.long)]
)
def test_an_engine_is_resident_by_use(loaded, devices):
  model, mesh = loaded("llama3", devices)
  at = Engine(
    model,
    rows=4,
    capacity=1024,
    longest=4096 if devices == 1 else 1024,
    page=128 if devices == 1 else PAGE,
    mesh=mesh,
    layout="contiguous",
  )
  memory = at._rows.memory
  before = at.resident()
  request = Request(prompt=np.arange(20, dtype=np.int32), max_new_tokens=30)
  handles = [at.submit(request) for _ in range(3)]
  at.run()
  want = alone(model, request, mesh)
  assert all(h.result().tokens.tolist() == want for h in handles)
  space, counters = at.space, at.space.space_counters
  assert counters.decode_maps == 0
  assert sum(space.mapped) == counters.maps
  # Groups end within a page of the system, in each tensor.
  tensors = sum(
    x.shape[0] * len(x.addressable_shards)
    for x in jax.tree.leaves(at._pool.slots)
  )
  edges = 2 * 4096 * tensors * (4 + 1)
  mapped = sum(space.mapped) * memory.group_bytes
  assert at.resident() - before <= mapped + edges < memory.reserved()
  assert memory.at(at._pool.slots)
  at.close()


@pytest.mark.long
def test_a_row_for_which_the_system_has_no_memory_is_refused(
  loaded, monkeypatch
):
  """Alone it could wait for ever; others are served."""
  model, mesh = loaded("llama3", 1)
  at = engine(model, mesh, layout="contiguous")
  # What the system does once all of its memory is in use.
  given = at.space._memory.map
  few = lambda slot, first, last: last <= 2 and given(slot, first, last)
  monkeypatch.setattr(at.space._memory, "map", few)
  prompt = np.arange(1, PAGE, dtype=np.int32)
  sizes = {"long": 3 * PAGE, "short": 4}
  handles = {
    name: at.submit(Request(prompt=prompt, max_new_tokens=most))
    for name, most in sizes.items()
  }
  at.run()
  with pytest.raises(OutOfMemoryError, match="no memory for 33 tokens"):
    handles["long"].result()
  short = Request(prompt=prompt, max_new_tokens=4)
  assert handles["short"].result().tokens.tolist() == alone(model, short)
  assert not at.busy and at.open
  at.space.check()
  at.close()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["contiguous", "doubling"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_under_a_mesh_of_the_caller(loaded, kind, layout):
  model, _ = loaded("llama3", 4)
  elsewhere, _ = loaded("llama3")
  request = Request(prompt=np.arange(20, dtype=np.int32), max_new_tokens=50)
  want = alone(elsewhere, request)
  with jax.set_mesh(make_mesh(4, kind)):
    at = Engine(
      model, rows=2, capacity=256, longest=128, page=PAGE, layout=layout
    )
    handle = at.submit(request)
    with at.start():
      assert handle.result().tokens.tolist() == want


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "doubling"])
def test_answers_after_answers_by_a_thread(loaded, layout):
  """Slots are reused, reclaimed and preempted while calls are on their way."""
  model, _ = loaded("llama3")
  rng = np.random.default_rng(11)
  wanted = requests(rng, model.config.vocab, 24)
  expected = [alone(model, request) for request in wanted]
  for capacity in (128, 200, 256):
    with engine(model, layout=layout, capacity=capacity) as at:
      at.start()
      handles = [at.submit(request) for request in wanted]
      found = [handle.result().tokens.tolist() for handle in handles]
      at.space.check()
    assert found == expected


def test_what_is_refused(loaded):
  model, _ = loaded("llama3")
  refused(OptionError, lambda: engine(model, layout="rows"), "layout")
  for share in ("prompts", "answers"):
    refused(
      OptionError,
      lambda share=share: engine(model, layout="contiguous", share=share),
      "share",
      "memory of its own",
    )
  refused(
    OptionError,
    lambda: engine(model, layout="doubling", preempt="swap"),
    "preempt",
    "recompute",
  )
  with rj.store.Store(host=1 << 20) as store:
    refused(
      OptionError,
      lambda: engine(model, layout="contiguous", store=store),
      "store",
      "layout='contiguous'",
    )
  huge = jax.ShapeDtypeStruct((1 << 30, 1 << 20), jnp.float32)
  refused(
    MemoryEstimateError, lambda: reserved_zeros(huge), "address space", "rows="
  )
  refused(OptionError, lambda: RowSpace(2, 8, 4, blocks=3, shards=2), "blocks")
  refused(OptionError, lambda: RowSpace(2, 8, 4, blocks=4, low=2), "low")
