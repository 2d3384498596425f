"""A row's answer and what is kept of it are those that it has alone.

Whatever the other rows of the batch are, when they end, and what is drafted.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import prefill
from ringjax.kv import kind_text
from tests.contracts import cache as contract

ROOM, CHUNK, COUNT, CAPACITY = 8, 16, 21, 192
# Cut in equal pieces they would be cut otherwise alone than together.
LENGTHS = (58, 37, 13)
TURNS = (5, 19, 9)
DRAFTS = "lookup:count=4,ngram=2"
KINDS = {
  "int4": "int4:slack=6",
  "kivi2": "kivi2:recent=8,room=8,slack=6",
  "snapkv": "snapkv:budget=.3,room=8,window=8,slack=6",
  "snapkv of codes": "int4+snapkv:budget=.3,room=8,window=8,slack=6,recent=4",
  "h2o": "h2o:budget=.3,room=8,slack=6",
  "tova": "tova:budget=.3,room=8,slack=6",
  "fastgen": "fastgen:room=8,window=8,recovered=.8,slack=6",
  "expected": "expected:budget=.3,room=8,slack=6",
  "tiered": "int4:device=16,room=8,slack=6",
}
# What ends the second row after a few tokens: an id, or who reads the stream.
WAYS = ("id", "stream")
CASES = [
  (kind, way, drafts)
  for kind in KINDS
  for way in WAYS
  for drafts in (None, DRAFTS)
]
# Of each kind one that is run often; ways and drafts take turns.
OFTEN = [CASES[4 * n + (3 if n % 2 else 1)] for n in range(len(KINDS))]
OFTEN[list(KINDS).index("expected")] = ("expected", "stream", None)


def kind_of(name):
  return kind_text.parse(KINDS[name])


def prompts_of(lengths, seed):
  draw = np.random.default_rng(seed)
  return [draw.integers(1, 64, n).astype(np.int32) for n in lengths]


def kept(cache):
  """The positions that heads hold, row by row."""
  if isinstance(cache, rj.kv.EvictingCache):
    rows = [cache.positions(n) for n in range(cache.batch)]
    return [
      [[head.tolist() for head in layer] for layer in row if layer is not None]
      for row in rows
    ]
  at = cache.at
  return [
    sorted(pos[seg > 0].tolist())
    for pos, seg in zip(np.asarray(at.pos), np.asarray(at.seg), strict=True)
  ]


def conversation(rows, kind, way, drafts, stop):
  """Two turns of some rows: answers, what was kept, and logits behind it."""
  model = contract.model(1, "windows")
  session = rj.infer.Session(model, CAPACITY, batch=len(rows), cache_kind=kind)
  ask = functools.partial(
    rj.infer.generate, model, cache=session, prefill="chunked", chunk=CHUNK,
    speculate=drafts,
  )  # fmt: skip
  count = [0]

  def stream(tokens):
    count[0] += 1
    return np.array([count[0] == 6 and row == 1 for row in rows])

  ends = {"stop": stop} if way == "id" else {"stream": stream}
  prompts, turns = prompts_of(LENGTHS, 2), prompts_of(TURNS, 3)
  first = ask([prompts[n] for n in rows], max_new_tokens=COUNT, **ends)
  found = kept(session.cache)
  pending = session.pending
  # What is read next is seen in the logits.
  text = np.stack([turns[n][:5] for n in rows])
  cache = session.cache.with_room(5)
  logits, _ = model(jnp.asarray(text), cache=cache)
  second = ask([turns[n] for n in rows], max_new_tokens=COUNT)
  return [
    dict(
      first=first[n].tolist(),
      pending=int(pending[n]),
      kept=found[n],
      logits=np.asarray(logits)[n],
      second=second[n].tolist(),
      after=kept(session.cache)[n],
    )
    for n in range(len(rows))
  ]


@functools.cache
def alone(name, way):
  """Each row by itself, without drafts, and the stop id."""
  kind, stop = kind_of(name), ()
  if way == "id":
    model = contract.model(1, "windows")
    prompts = prompts_of(LENGTHS, 2)
    long, new, short = (
      rj.infer.generate(
        model, [prompts[n]], max_new_tokens=COUNT, cache_kind=kind,
        prefill="chunked", chunk=CHUNK,
      )[0].tolist()
      for n in range(3)
    )  # fmt: skip
    others = {*long, *short}
    stop = next(
      x
      for n, x in enumerate(new)
      if n > 3 and x not in others and x not in new[:n]
    )
  rows = [conversation([n], kind, way, None, stop)[0] for n in range(3)]
  return rows, stop


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("name", "way", "drafts"),
  [
    pytest.param(*x, marks=pytest.mark.long if x in OFTEN else pytest.mark.slow)
    for x in CASES
    if x != ("expected", "stream", DRAFTS)
  ],
)
def test_a_row_is_what_it_is_alone(name, way, drafts):
  want, stop = alone(name, way)
  assert len(want[1]["first"]) < COUNT
  got = conversation([0, 1, 2], kind_of(name), way, drafts, stop)
  for row, (a, b) in enumerate(zip(want, got, strict=True)):
    for what in ("first", "pending", "kept", "second", "after"):
      assert b[what] == a[what], (row, what)
    size = np.abs(a["logits"]).max()
    np.testing.assert_allclose(
      b["logits"], a["logits"], rtol=0, atol=1e-4 * size
    )


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("name", ["kivi2", "snapkv of codes"])
def test_of_a_call_without_a_session(name):
  """Its cache is as large as the longest row and the drafts need."""
  ask = functools.partial(
    rj.infer.generate, contract.model(1, "windows"), max_new_tokens=COUNT,
    cache_kind=kind_of(name), prefill="chunked", chunk=CHUNK,
  )  # fmt: skip
  prompts = prompts_of(LENGTHS, 2)
  want = [ask([prompt])[0].tolist() for prompt in prompts]
  for drafts in (None, DRAFTS):
    got = ask(prompts, speculate=drafts)
    assert [row.tolist() for row in got] == want


@pytest.mark.parametrize("room", [None, 700])
def test_a_row_is_cut_as_if_it_were_alone(room):
  model, lengths = contract.model(1), (620, 300, 130)
  how = prefill.PrefillConfig(method="chunked", chunk=128)

  def cuts(lengths):
    plan = how.plan(max(lengths), model, None, None, room=room)
    calls = plan.calls([np.ones(n, np.int32) for n in lengths], np.zeros(3))
    counts = np.stack([call.seg.sum(1) for call in calls], 1).tolist()
    return [[n for n in row if n] for row in counts]

  want = [cuts([n] * 3)[0] for n in lengths]
  assert cuts(lengths) == want
  assert want[1] == [128, 128, 44]


def test_coded_tokens_in_the_hosts_memory_are_read_in_parts():
  """In one call a row would see its own keys before they are encoded."""
  model, how = contract.model(1), prefill.PrefillConfig()
  plan = lambda kind, n: how.plan(
    n, model, None, None, kind=kind_text.parse(kind)
  )
  found = [plan("int4:device=64", n) for n in (40, 90)]
  assert [x.name for x in found] == ["chunked"] * 2
  assert plan("dense:device=64", 40).name == "blockwise"


def test_empty_rows_beside_others_are_refused():
  model = contract.model(1)
  session = rj.infer.Session(model, 64, batch=2, cache_kind="int4")
  ask = functools.partial(
    rj.infer.generate, model, [[1, 2, 3]] * 2, max_new_tokens=1, cache=session
  )
  ask()
  session.cache = session.cache.reset([1])
  with pytest.raises(OptionError, match="empty rows beside rows that hold"):
    ask()
  ask(prefill="chunked")
  assert session.lengths.tolist() == [7, 3]


def test_a_wire_that_cuts_by_the_longest_row_is_refused():
  model = contract.model(4)
  ask = functools.partial(
    rj.infer.generate, model, [[1] * 60, [2] * 9], max_new_tokens=1,
    wire="int8",
  )  # fmt: skip
  for method in ("ring", "zigzag", "gather", "kvr"):
    with pytest.raises(OptionError, match="pass prefill='striped'"):
      ask(prefill=method)


def test_drafts_beside_a_stream_and_sums_are_refused():
  with pytest.raises(OptionError, match="sums over queries do not go back"):
    rj.infer.generate(
      contract.model(1), [[1, 2, 3]], max_new_tokens=2, cache_kind="expected",
      speculate=DRAFTS, stream=print,
    )  # fmt: skip
