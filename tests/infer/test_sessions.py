"""Sessions that are interrupted, that are nearly full, and what they take."""

from __future__ import annotations

import functools
import sys

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  MemoryEstimateError,
  OptionError,
  OutOfMemoryError,
  PromptError,
)
from ringjax.infer import decode, prefill, prompt_reading
from ringjax.infer.kv_runahead import kvr
from ringjax.kv import kind_text
from ringjax.nn.sharding_context import ShardingContext
from tests import checkpoints
from tests.helpers import SMALL, make_mesh

TURN = [[5, 9, 2], [7, 7, 1]]
CAPACITY = 64


@functools.cache
def loaded(devices=1):
  mesh = make_mesh(devices, "auto") if devices > 1 else None
  return rj.models.create(SMALL, seed=1, mesh=mesh), mesh


@pytest.fixture(scope="module")
def prompt():
  return np.random.default_rng(0).integers(0, 64, (2, 24)).tolist()


def session_on(devices, **more):
  model, mesh = loaded(devices)
  return rj.infer.Session(model, CAPACITY, batch=2, mesh=mesh, **more)


def ask(session, tokens, count=6, **more):
  """An answer, read in chunks of 8: few programs for all tests."""
  return rj.infer.generate(
    session.model,
    tokens,
    max_new_tokens=count,
    prefill="chunked",
    chunk=8,
    cache=session,
    **more,
  ).tokens


def behind(history, count=1):
  """What follows, greedily, by calls without a cache: int [B, count]."""
  history, found = [list(h) for h in history], []
  for _ in range(count):
    ends = [len(h) - 1 for h in history]
    tokens = np.zeros((2, CAPACITY), np.int32)
    for row, h in zip(tokens, history, strict=True):
      row[: len(h)] = h
    logits = np.asarray(loaded()[0](tokens))
    found.append(logits[np.arange(2), ends].argmax(-1))
    for h, token in zip(history, found[-1], strict=True):
      h.append(int(token))
  return np.stack(found, 1)


class Interrupted(Exception):
  pass


def after(number, error=Interrupted):
  """A callback that raises when it is called so often."""
  calls = []

  def call(*_):
    calls.append(1)
    if len(calls) == number:
      raise error

  return call


def agrees(session):
  """What a session says is what its cache holds."""
  assert session.lengths.tolist() == session.cache.length.tolist()
  taken = session.cache.capacity - session.cache.free().sum(1)
  assert taken.tolist() == session.lengths.tolist()
  used = np.asarray(session.cache.at.seg) > 0
  assert used.sum(1).tolist() == session.lengths.tolist()
  return session.room()


def goes_on(session, *parts):
  """A turn behind these parts of a conversation, which the session holds."""
  new = ask(session, TURN, 1)
  whole = np.concatenate([np.asarray(p) for p in (*parts, TURN)], 1).tolist()
  np.testing.assert_array_equal(new, behind(whole))
  agrees(session)


# ---------------------------------------------------------------------------
# Interrupted
# ---------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("devices", [1, 2])
def test_between_chunks(prompt, devices):
  """The rest of the prompt can be read, and then the answer is the same."""
  session = session_on(devices)
  with pytest.raises(Interrupted):
    ask(session, prompt, progress=after(2))
  assert session.lengths.tolist() == [16, 16]
  assert agrees(session) == CAPACITY - 16
  # What was not read was not seen either.
  for row, ids in zip(session.seen, prompt, strict=True):
    assert set(np.flatnonzero(row)) == set(ids[:16])
  got = ask(session, [p[16:] for p in prompt])
  np.testing.assert_array_equal(got, behind(prompt, 6))


def test_a_pending_token_is_read_once(prompt):
  session = session_on(1)
  said = ask(session, prompt, 2)
  assert session.pending.tolist() == said[:, 1].tolist()
  with pytest.raises(Interrupted):
    ask(session, TURN, progress=after(1))
  assert session.pending.tolist() == [-1, -1]
  goes_on(session, prompt, said.tolist(), TURN)


@pytest.mark.long
def test_the_cache_says_what_a_session_holds(prompt):
  """Nothing is kept beside it: a caller may cut off an end."""
  session = session_on(2)
  ask(session, prompt, 3)
  assert session.pending.min() >= 0
  session.cache = session.cache.truncate(10)
  assert session.lengths.tolist() == [10, 10]
  assert session.pending.tolist() == [-1, -1]
  goes_on(session, [p[:10] for p in prompt])


@pytest.mark.slow
def test_a_whole_prompt(prompt):
  """What was read at once stays read."""
  session = session_on(1)
  with pytest.raises(Interrupted):
    rj.infer.generate(
      session.model, prompt, max_new_tokens=2, cache=session,
      progress=after(1),
    )  # fmt: skip
  assert session.lengths.tolist() == [24, 24]
  goes_on(session, prompt)


@pytest.mark.parametrize(("devices", "step"), [(2, 3), (1, 6)])
def test_while_tokens_are_streamed(prompt, devices, step):
  """By the last one too, which is pending."""
  session = session_on(devices)
  with pytest.raises(Interrupted):
    ask(session, prompt, stream=after(step))
  agrees(session)
  goes_on(session, prompt, behind(prompt, step).tolist())


def test_while_a_step_is_on_its_way(prompt, monkeypatch):
  """Ctrl-C where the host waits for a token."""
  session = session_on(1)
  stop, get = after(3, KeyboardInterrupt), jax.device_get

  def wait(x):
    stop()
    return get(x)

  monkeypatch.setattr(jax, "device_get", wait)
  with pytest.raises(KeyboardInterrupt):
    ask(session, prompt)
  monkeypatch.undo()
  agrees(session)
  assert session.lengths.tolist() == [27, 27]
  goes_on(session, prompt, behind(prompt, 3).tolist())


def test_while_a_program_runs(prompt, monkeypatch):
  """The cache is gone with it; the session says so, and can begin anew."""
  session = session_on(2)
  read = prefill.read

  def broken(*args):
    read(*args)
    raise MemoryError

  monkeypatch.setattr(prompt_reading, "read", broken)
  with pytest.raises(MemoryError):
    ask(session, prompt)
  monkeypatch.undo()
  for _ in range(2):
    with pytest.raises(OptionError, match=r"session\.restart\(\)") as caught:
      ask(session, prompt)
    assert "deleted" not in str(caught.value)
  session.restart()
  assert session.room() == CAPACITY
  np.testing.assert_array_equal(ask(session, prompt, 1), behind(prompt))


def test_memory_that_runs_out_says_what_to_change(prompt, monkeypatch):
  session = session_on(1)

  def full(*_):
    raise jax.errors.JaxRuntimeError(
      "RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."
    )

  monkeypatch.setattr(decode, "step", full)
  with pytest.raises(OutOfMemoryError, match="while decoding") as caught:
    ask(session, prompt)
  monkeypatch.undo()
  assert caught.value.nbytes == 123456789 and "chunk=" in str(caught.value)
  # The prompt is there, and the session goes on.
  assert session.lengths.tolist() == [24, 24]
  goes_on(session, prompt)


def test_other_weights_do_not_go_on(prompt):
  model, _ = loaded()
  other = rj.models.create(SMALL, seed=2)
  session = rj.infer.Session(model, CAPACITY, batch=2)
  run = lambda model, tokens: rj.infer.generate(
    model, tokens, max_new_tokens=1, prefill="chunked", chunk=8, cache=session
  )
  # Nothing is read yet: any weights may.
  want = run(other, prompt)
  with pytest.raises(OptionError, match=r"other weights.*session\.restart\(\)"):
    run(model, TURN)
  run(other, TURN)
  session.restart()
  np.testing.assert_array_equal(run(model, prompt), behind(prompt))
  session.restart()
  np.testing.assert_array_equal(run(other, prompt), want)


@pytest.mark.slow
def test_a_restart_stays_where_the_session_is(prompt):
  session = session_on(2, dtype="bfloat16")
  ask(session, prompt, 1, keep="last")
  lies = lambda: jax.tree.map(
    lambda x: (x.dtype, x.sharding), session.cache.slots
  )
  before = lies()
  session.restart()
  assert lies() == before
  assert session.lengths.tolist() == [0, 0] and agrees(session) == CAPACITY
  assert ask(session, prompt, 1).shape == (2, 1)


@pytest.mark.usefixtures("unchecked")
def test_a_reading_whose_cache_is_lost():
  model, _ = loaded()
  session = rj.infer.Session(model, 32)
  for x in jax.tree.leaves(session.cache.slots):
    x.delete()
  reading = kvr.Reading(
    outcome=None, tiles=(), length=32, logits=np.zeros((1, 64)),
    session=session,
  )  # fmt: skip
  with pytest.raises(OptionError, match="restart"):
    kvr.follow(reading, 2)


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("config", "sizes"),
  [(SMALL, (2, 1, 2)), (checkpoints.config("qwen3_next"), (1, 2, 1))],
)
def test_what_fits_is_what_the_cache_takes(config, sizes, monkeypatch):
  """Shards of heads and of the batch count, and recurrent states."""
  mesh = rj.make_mesh(
    sizes, ("data", "seq", "model"), devices=jax.devices()[: np.prod(sizes)]
  )
  model = jax.eval_shape(lambda: rj.models.create(config, seed=0))
  attend = ShardingContext(mesh=mesh, axis="seq")
  cache = model.init_cache(2, CAPACITY, sharding=attend)
  takes = sum(
    x.addressable_shards[0].data.nbytes
    for x in jax.tree.leaves((cache.slots, cache.held))
  )
  module = sys.modules["ringjax.infer.session"]
  make = {"batch": 2, "capacity": CAPACITY}
  monkeypatch.setattr(module, "device_free_bytes", lambda *_: takes)
  module._check_memory(model, attend, make)
  monkeypatch.setattr(module, "device_free_bytes", lambda *_: takes - 1)
  with pytest.raises(MemoryEstimateError, match=f"got {takes:,} bytes"):
    module._check_memory(model, attend, make)


# ---------------------------------------------------------------------------
# Room
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_chunks(shards):
  """Cuts of any length are the same, padding is little, and what fits fits."""
  most, found = 256, set()
  up = lambda n: -(-n // shards) * shards
  for tokens in range(1, 1500, 13):
    chunk, width = prefill.chunks(tokens, shards, most)
    count = -(-tokens // up(most))
    assert tokens <= width <= count * chunk
    assert chunk == min(width, up(most)) and width % shards == 0
    if tokens > most:
      assert width <= 1.13 * tokens + 8 * shards
    found.add(width - (count - 1) * up(most))
    for room in (up(tokens), up(tokens) + 5, width):
      chunk, tight = prefill.chunks(tokens, shards, most, room)
      assert tokens <= tight <= room
      assert tight % shards == 0 and chunk % shards == 0
      # The same calls, of which the last has something to read.
      assert (count - 1) * chunk < tokens and tight <= count * chunk
  # The last chunk has few sizes.
  assert len(found) <= 9 * 5


def test_a_long_prompt_takes_little_more_than_its_tokens():
  plan = lambda n, **more: prefill.PrefillConfig(method="chunked").plan(
    n, loaded()[0], None, None, **more
  )
  assert plan(4097).width <= 1.13 * 4097 and plan(4097).chunk == 4096
  assert plan(4500, room=5120).width <= 5120


def test_a_turn_that_fits_is_read(monkeypatch):
  """Two chunks of 32 tokens would take 64 slots of 40."""
  model, _ = loaded()
  tokens = np.random.default_rng(0).integers(0, 64, (2, 36))
  session = rj.infer.Session(model, 40, batch=2)
  monkeypatch.setattr(prefill, "_CHUNK", 32)
  got = rj.infer.generate(
    model, tokens, max_new_tokens=1, prefill="chunked", cache=session
  )
  np.testing.assert_array_equal(got, behind(tokens.tolist()))
  how = session.last.prefill
  assert (how.chunk, how.width) == (32, 40)
  # Padding takes no slot.
  assert agrees(session) == 4


def test_a_refusal_says_what_is_true():
  model, _ = loaded()
  session = rj.infer.Session(model, 5000)
  for tokens, count in ((5120, 2), (5000, 122), (5121, 1)):
    with pytest.raises(PromptError, match="together") as caught:
      rj.infer.generate(
        model, [[1] * tokens], max_new_tokens=count, prefill="chunked",
        cache=session,
      )  # fmt: skip
    words = str(caught.value)
    assert f"got {tokens} tokens, read by prefill='chunked'" in words
    assert tokens + count - 1 > 5120 == session.room()
    assert "at most 5120 together" in words


def test_kinds_are_texts_with_options_as_in_flags(prompt):
  text = "snapkv:budget=.5,room=12"
  by_text = session_on(1, cache_kind=text)
  assert by_text.cache.kind == kind_text.parse(text)
  with pytest.raises(rj.OptionError, match="cache_kind: got 'budgets=1'"):
    session_on(1, cache_kind="snapkv:budgets=1")
