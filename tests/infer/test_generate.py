"""generate and Session: what they return, keep, compile and refuse."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  MeshError,
  OptionError,
  PromptError,
  SamplingError,
)
from ringjax.infer import decode, prefill, prompt_reading
from tests import checkpoints
from tests.helpers import make_mesh, refused

NAME = "llama2"


@pytest.fixture(scope="module")
def said():
  """A prompt [B, P] and its greedy continuation [B, 16]."""
  expected = checkpoints.expected(NAME)
  return expected.prompt, expected.greedy


def ask(loaded, prompts, devices=1, **options):
  model, mesh = loaded(NAME, devices)
  options = dict(max_new_tokens=6) | options
  return rj.infer.generate(model, prompts, mesh=mesh, **options).tokens


# ---------------------------------------------------------------------------
# Ends
# ---------------------------------------------------------------------------


def test_a_stop_ends_its_example_and_the_rest_is_padding(loaded, said):
  prompt, greedy = said
  stop = int(greedy[0, 3])
  assert stop not in greedy[1, :6] and stop not in greedy[0, :3]
  new = ask(loaded, prompt, stop=[stop], pad_id=-7)
  assert new[0].tolist() == [*greedy[0, :4], -7, -7]
  np.testing.assert_array_equal(new[1], greedy[1, :6])


def test_all_stopped_ends_early(loaded, said):
  prompt, greedy = said
  stops = [int(greedy[0, 1]), int(greedy[1, 2])]
  reports, steps = [], []
  new = ask(
    loaded, prompt, stop=stops, stream=steps.append, report=reports.append
  )
  assert reports[0].new_tokens == len(steps) <= 3
  assert new.shape == (2, 6) and (new[:, 3:] == 0).all()


def test_a_stop_string_spans_tokens(loaded, said):
  prompt, greedy = said
  text = bytes(greedy[0, 2:4].tolist()).decode("latin-1")
  if not text.isascii():
    pytest.fail("the fixture's answer is no ASCII: choose another one")
  for stop in (rj.infer.Stop(strings=(text,)), text, ["NEVER", text, 100]):
    new = ask(loaded, prompt[:1], stop=stop, tokenizer=Bytes())
    assert new[0].tolist() == [*greedy[0, :4], 0, 0]


def test_rows_are_cut_where_they_ended(loaded, said):
  """Each row has its own ids, which decode to its answer and nothing else."""
  prompt, greedy = said
  model, _ = loaded(NAME)
  stop = int(greedy[0, 3])
  run = lambda prompt, **options: rj.infer.generate(
    model, prompt, max_new_tokens=6, **options
  )
  new = run(prompt, stop=stop)
  want = [greedy[0, :4].tolist(), greedy[1, :6].tolist()]
  assert [row.tolist() for row in new] == want and len(new) == 2
  assert new.lengths.tolist() == [4, 6] and new.lengths.dtype == np.int32
  assert new[0].tolist() == want[0] and new[-2].tolist() == want[0]
  assert new[np.int32(1)].tolist() == want[1]
  # With padding, as an array is indexed.
  assert new.tokens.tolist() == [[*want[0], 0, 0], want[1]]
  assert new.tokens.dtype == np.int32
  assert new[0, 2:].tolist() == [*want[0][2:], 0, 0]
  np.testing.assert_array_equal(np.asarray(new), new.tokens)
  assert np.array(new, np.float32).dtype == np.float32
  with pytest.raises(IndexError):
    new[2]
  one = run(prompt[:1], stop=stop)
  assert one.tokens.shape == (1, 6) and one[0].tolist() == want[0]
  assert run(prompt[:1])[0].tolist() == greedy[0, :6].tolist()


def test_a_row_ends_with_its_stop_string(loaded, said):
  prompt, greedy = said
  model, _ = loaded(NAME)
  text = Bytes().decode(greedy[0, 2:4])
  new = rj.infer.generate(
    model, prompt[:1], max_new_tokens=6, stop=text, tokenizer=Bytes()
  )
  assert new[0].tolist() == greedy[0, :4].tolist()
  assert Bytes().decode(new[0]).endswith(text)


@dataclasses.dataclass(frozen=True)
class Says:
  """A sampler that says what stands here, from position `start` on."""

  rows: tuple[tuple[int, ...], ...]
  start: int

  def __call__(self, logits, step, seen=None):
    table = jnp.asarray(self.rows, jnp.int32)
    at = jnp.minimum(step - self.start, table.shape[1] - 1)
    return jnp.take_along_axis(table, at[:, None], 1)[:, 0]


class Pieces(Bytes):
  """Tokens that hold parts of characters, in a small vocabulary."""

  pieces = (b"a", b"\xe2\x82", b"\xac", b"\xc3", b"\xa9!", b"b\xe2", b"\x82")

  def piece(self, token_id):
    return self.pieces[token_id]


def test_a_stop_of_several_bytes_ends_one_row_of_two(loaded):
  """The character's bytes come in tokens that hold parts of others."""
  # "aab" and the two tokens of a euro; "a", three thirds of it, "\u00e9!".
  said = ((0, 0, 5, 6, 2, 0, 0, 0), (0, 1, 0, 3, 4, 1, 0, 0))
  new = ask(
    loaded,
    [[1, 2, 3], [4, 5, 6]],
    sampler=Says(said, 3),
    stop="b\u20ac",
    tokenizer=Pieces(),
    max_new_tokens=8,
    pad_id=-1,
  )
  # A euro without its "b", and one that never ends, stop nothing.
  assert new.tolist() == [[0, 0, 5, 6, 2, -1, -1, -1], list(said[1])]


def test_who_streams_may_end_it(loaded, said):
  prompt, greedy = said
  seen = []

  def stream(tokens):
    seen.append(tokens.copy())
    # The second example ends after two tokens, the first after four.
    return np.array([len(seen) == 4, len(seen) == 2])

  new = ask(loaded, prompt, stream=stream)
  assert new[0].tolist() == [*greedy[0, :4], 0, 0]
  assert new[1].tolist() == [*greedy[1, :2], 0, 0, 0, 0]
  assert len(seen) == 4 and seen[0].dtype == np.int32
  assert ask(loaded, prompt, stream=lambda t: True)[:, 1:].sum() == 0
  assert ask(loaded, prompt, stream=lambda t: np.True_)[:, 1:].sum() == 0
  for nothing in (None, False, np.False_, np.zeros(2, bool)):
    new = ask(loaded, prompt, stream=lambda t, x=nothing: x)
    np.testing.assert_array_equal(new, greedy[:, :6])


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(
  "devices", [pytest.param(1, marks=pytest.mark.slow), 8]
)
def test_a_stop_id_right_behind_the_end_of_another_row(loaded, devices):
  """The step with it is on its way when the other row is ended."""
  said = ((5, 9, 6, 6, 6), (7, 7, 7, 7, 7), (8, 8, 8, 9, 8))
  steps = []

  def stream(tokens):
    steps.append(tokens)
    return np.array([False, len(steps) == 1, False])

  new = ask(
    loaded,
    [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    devices,
    sampler=Says(said, 3),
    stop=9,
    stream=stream,
    max_new_tokens=5,
    pad_id=-1,
  )
  assert new.tolist() == [
    [5, 9, -1, -1, -1],
    [7, -1, -1, -1, -1],
    [8, 8, 8, 9, -1],
  ]
  assert len(steps) == 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("answer", "says"),
  [
    (5, "answer of int, 5"),
    ("", "answer of str"),
    ([True, False], "answer of list"),
    (np.ones(2, np.int32), r"int32 \[2\]"),
    (np.ones(3, bool), r"bool \[3\]; .*bools \[2\]"),
  ],
)
def test_who_streams_answers_with_bools(loaded, said, answer, says):
  """`lambda t: file.write(...)` says how much was written, not that it ends."""
  prompt, _ = said
  with pytest.raises(InputTypeError, match=says) as caught:
    ask(loaded, prompt, stream=lambda tokens: answer)
  assert str(caught.value).startswith("stream: got an answer")
  assert len(str(caught.value)) < 400


# ---------------------------------------------------------------------------
# What it reports
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 8])
def test_report(loaded, said, devices):
  prompt, _ = said
  reports, read = [], []
  ask(
    loaded,
    prompt,
    devices,
    prefill="chunked",
    chunk=8,
    report=reports.append,
    progress=read.append,
  )
  (report,) = reports
  assert read == [8, 16, 24]
  assert report.prefill.name == "chunked" and report.prefill.chunk == 8
  assert (report.prompt_tokens, report.new_tokens) == (24, 6)
  assert report.shards == devices and report.capacity >= 30
  assert report.capacity % devices == 0
  config = checkpoints.config(NAME)
  dim = config.get("head_dim") or (
    config["hidden_size"] // config["num_attention_heads"]
  )
  kept = 2 * config["num_key_value_heads"] * dim * 4
  slots = 2 * report.capacity // devices
  layers = config["num_hidden_layers"]
  cursors = 2 * 2 * 4 * devices
  assert report.cache_bytes == slots * (layers * kept + 8) + cursors


def test_auto_says_why(loaded, said):
  found = {}
  for devices in (1, 8):
    ask(
      loaded,
      said[0],
      devices,
      max_new_tokens=1,
      report=lambda r, n=devices: found.update({n: r.prefill}),
    )
  assert (found[1].name, found[8].name) == ("blockwise", "striped")
  assert "one shard" in found[1].why and "8 shards" in found[8].why


# ---------------------------------------------------------------------------
# Conversations
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "devices"),
  [
    ("llama2", 4),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (("llama2", 1), ("qwen3_next", 1), ("qwen3_next", 4))
    ),
  ],
)
def test_turns_equal_one_long_prompt(loaded, name, devices):
  """A session that reads three turns answers as one that reads them at once."""
  model, mesh = loaded(name, devices)
  rng = np.random.default_rng(0)
  session = rj.infer.Session(model, 160, batch=2, mesh=mesh)
  text = [[], []]
  for turn, longest in enumerate((17, 9, 30)):
    new = [rng.integers(0, 101, longest - 2 * b) for b in range(2)]
    answer = rj.infer.generate(model, new, max_new_tokens=4, cache=session)
    for b in range(2):
      text[b] += new[b].tolist()
    again = rj.infer.generate(model, text, max_new_tokens=4, mesh=mesh)
    np.testing.assert_array_equal(answer, again)
    for b in range(2):
      text[b] += answer[b].tolist()
    # The last token of an answer is not read yet.
    assert session.lengths.tolist() == [len(t) - 1 for t in text], turn


@pytest.mark.long
def test_a_turn_after_a_stop(loaded, said):
  """What an example says behind its stop is not in the conversation."""
  prompt, greedy = said
  model, _ = loaded(NAME)
  session = rj.infer.Session(model, 96, batch=2)
  stop = int(greedy[0, 1])
  assert stop not in greedy[1, :6]
  first = rj.infer.generate(
    model, prompt, max_new_tokens=6, cache=session, stop=[stop]
  )
  turn = [[5, 9, 2], [7]]
  second = rj.infer.generate(model, turn, max_new_tokens=3, cache=session)
  history = [[*prompt[0], *first[0, :2], *turn[0]], [*prompt[1], *first[1], 7]]
  again = rj.infer.generate(model, history, max_new_tokens=3)
  np.testing.assert_array_equal(second, again)


def test_room_of_a_session(loaded):
  model, _ = loaded(NAME)
  session = rj.infer.Session(model, 32)
  assert session.room() == session.cache.capacity == 32
  rj.infer.generate(model, [[1] * 20], max_new_tokens=2, cache=session)
  left = session.room()
  assert 0 < left < 12
  with pytest.raises(PromptError, match="larger capacity"):
    rj.infer.generate(model, [[1] * left], max_new_tokens=9, cache=session)
  # Nothing was lost by asking for too much.
  assert session.room() == left
  rj.infer.generate(model, [[1]], max_new_tokens=1, cache=session)


# ---------------------------------------------------------------------------
# Chains
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("partition", [None, (9, 7, 5, 3), (6, 6, 6, 14)])
def test_parts_of_a_chain(loaded, said, partition):
  """Whatever the parts, the answer is the same."""
  prompt, greedy = said
  reports = []
  new = ask(
    loaded,
    prompt,
    4,
    prefill="kvr",
    partition=partition,
    report=reports.append,
  )
  np.testing.assert_array_equal(new, greedy[:, :6])
  how = reports[0].prefill
  counts = how.attend.layout.counts
  assert partition is None or counts == partition
  assert how.width == sum(counts) >= 24 and how.slots == max(counts)
  if partition is None:
    assert "FLOPs" in how.why


def test_a_long_prompt_gives_the_first_shards_more(loaded):
  model, mesh = loaded(NAME, 4)
  counts = {}
  for tokens in (64, 1 << 20):
    options = prefill.PrefillConfig(method="kvr")
    how = options.plan(tokens, model, mesh, "seq")
    counts[tokens] = how.attend.layout.counts
    assert sum(counts[tokens]) == how.width
  assert list(counts[1 << 20]) == sorted(counts[1 << 20], reverse=True)
  share = lambda n: counts[n][0] / sum(counts[n])
  # Attention is all that counts: shares sqrt((i + 1) / p) - sqrt(i / p).
  assert share(1 << 20) == pytest.approx(0.5, abs=0.02)
  assert share(64) <= share(1 << 20)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  "partition", [(12, 12), (24, 0, 0, 0), (5, 5, 5, 5), (9.0, 5, 5, 5), "9555"]
)
def test_parts_that_are_none(loaded, said, partition):
  with pytest.raises(OptionError, match="4 positive ints that add up to"):
    ask(loaded, said[0], 4, prefill="kvr", partition=partition)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zigzag", "bidirectional"])
def test_a_recurrent_layer_reads_in_any_layout(loaded, way):
  model, mesh = loaded("qwen3_next", 4)
  options = dict(max_new_tokens=3, mesh=mesh)
  prompts = [[*range(1, 20)], [5, 6, 7]]
  want = rj.infer.generate(model, prompts, prefill="ring", **options)
  got = rj.infer.generate(model, prompts, prefill=way, **options)
  assert [x.tolist() for x in got] == [x.tolist() for x in want]


@pytest.mark.long
def test_a_recurrent_layer_takes_no_uneven_shards(loaded):
  model, mesh = loaded("qwen3_next", 4)
  with pytest.raises(OptionError, match="prefill: got .* recurrent layers"):
    rj.infer.generate(
      model, [[1] * 20], max_new_tokens=1, prefill="kvr", mesh=mesh
    )


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


class Compiled:
  """Programs that one function has compiled since this was made."""

  def __init__(self, f):
    self._f, self._had = f, f._cache_size()

  def __int__(self):
    return self._f._cache_size() - self._had


@pytest.mark.long
def test_lengths_share_programs(loaded):
  model, mesh = loaded(NAME, 2)
  reading, steps = Compiled(prefill.read), Compiled(decode.step)
  for tokens in (3, 9, 14, 16, 11):
    rj.infer.generate(model, [[1] * tokens], max_new_tokens=9, mesh=mesh)
  assert int(reading) <= 1
  # Room for 3 and for 16 tokens and an answer is not the same.
  assert int(steps) <= 2


@pytest.mark.long
def test_a_growing_context_compiles_nothing(loaded):
  model, mesh = loaded(NAME, 2)
  session = rj.infer.Session(model, 512, mesh=mesh)
  talk = lambda n: rj.infer.generate(
    model, [[1] * n], max_new_tokens=5, cache=session, prefill="chunked"
  )
  talk(12)
  reading, steps = Compiled(prefill.read), Compiled(decode.step)
  for tokens in (10, 3, 15, 9, 14, 1, 12):
    talk(tokens)
  assert int(reading) == int(steps) == 0


def test_a_samplers_numbers_compile_nothing(loaded):
  model, _ = loaded(NAME)
  run = lambda sampler, **more: rj.infer.generate(
    model, [[1] * 5], max_new_tokens=2, sampler=sampler, **more
  )
  firsts, steps = Compiled(decode.first), Compiled(decode.step)
  number = (
    dict(seed=1, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1),
    dict(seed=2, temperature=0.7, top_k=70, top_p=0.9, min_p=0.01),
    dict(seed=2**40, temperature=3.0, top_k=1000, top_p=0.1, min_p=0.9),
  )
  for penalty, filters in zip((0.5, 1.3, 2.0), number, strict=True):
    run(rj.infer.Sample(repetition_penalty=penalty, **filters))
  assert (int(firsts), int(steps)) == (1, 1)


def test_more_stop_ids_compile_nothing(loaded):
  model, _ = loaded(NAME)
  run = lambda stop: rj.infer.generate(
    model, [[1] * 5], max_new_tokens=2, stop=stop
  )
  run(None)
  firsts, steps = Compiled(decode.first), Compiled(decode.step)
  for stop in (7, [1, 2], [1, 2, 3], [4, 5, 6, 7]):
    run(stop)
  assert int(firsts) == int(steps) == 0
  for n in (5, 6, 8):
    run(list(range(n)))
  assert (int(firsts), int(steps)) == (1, 1)


def test_buckets():
  for shards in (1, 3, 8):
    lengths = {prefill.padded(n, shards) for n in range(1, 4097)}
    assert all(n % shards == 0 for n in lengths)
    assert all(prefill.padded(n, shards) >= n for n in range(1, 4097))
    for octave in range(6, 12):
      inside = [n for n in lengths if 2**octave < n <= 2 ** (octave + 1)]
      assert len(inside) <= 9
    big = range(64 * shards, 4097)
    assert all(prefill.padded(n, shards) <= 1.2 * n + 8 * shards for n in big)
  assert prefill.padded(30, 8, room=48) == 48
  assert prefill.padded(30, 8, room=20) == 32


# ---------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_samples_do_not_depend_on_the_mesh_or_the_batch(loaded, said):
  prompt, greedy = said
  sampler = rj.infer.Sample(temperature=1.5, top_k=40, top_p=0.95, seed=3)
  one = ask(loaded, prompt, 1, sampler=sampler)
  assert (one != greedy[:, :6]).any()
  np.testing.assert_array_equal(one, ask(loaded, prompt, 8, sampler=sampler))
  alone = ask(loaded, prompt[:1], 1, sampler=sampler)
  np.testing.assert_array_equal(alone, one[:1])
  other = rj.infer.Sample(temperature=1.5, top_k=40, top_p=0.95, seed=4)
  assert (ask(loaded, prompt, 1, sampler=other) != one).any()


@pytest.mark.long
def test_a_conversation_is_drawn_as_one_text(loaded):
  """Turns draw anew, and know what was seen in those before."""
  model, _ = loaded(NAME)
  sampler = rj.infer.Sample(temperature=2.0, seed=5, repetition_penalty=3.0)
  talk = lambda session, prompts: rj.infer.generate(
    model, prompts, max_new_tokens=6, cache=session, sampler=sampler
  )
  session = rj.infer.Session(model, 96, batch=2)
  text = [[], []]
  for turn in ([[1, 2, 3], [4, 5, 6, 7, 8, 9]], [[11], [12, 13]]):
    answer = talk(session, turn)
    text = [t + new for t, new in zip(text, turn, strict=True)]
    again = talk(rj.infer.Session(model, 96, batch=2), text)
    np.testing.assert_array_equal(answer, again)
    text = [[*t, *new] for t, new in zip(text, answer, strict=True)]
  # All that was read or said, by each alone.
  for row, ids in zip(session.seen, text, strict=True):
    assert set(np.flatnonzero(row)) == set(ids)


def test_what_follows_a_stop_was_not_seen(loaded, said):
  prompt, greedy = said
  model, _ = loaded(NAME)
  session = rj.infer.Session(model, 96, batch=2)
  rj.infer.generate(
    model, prompt, max_new_tokens=6, cache=session, stop=int(greedy[0, 1])
  )
  want = {*prompt[0].tolist(), *greedy[0, :2].tolist()}
  assert set(np.flatnonzero(session.seen[0])) == want


@pytest.mark.long
def test_rows_of_unequal_lengths_are_drawn_alone(loaded):
  """Row 0 draws the same, whatever stands beside it."""
  model, _ = loaded(NAME)
  sampler = rj.infer.Sample(temperature=2.0, seed=1)
  run = lambda prompts: rj.infer.generate(
    model, prompts, max_new_tokens=6, sampler=sampler
  )
  both = run([[5, 6, 7], [1] * 11])
  np.testing.assert_array_equal(both[:1], run([[5, 6, 7]]))
  # Rows of the same prompt differ.
  twice = run([[5, 6, 7]] * 2)
  np.testing.assert_array_equal(twice[0], both[0])
  assert (twice[0] != twice[1]).any()


def test_a_penalty_sees_prompt_and_answer(loaded, said):
  prompt, _ = said
  sampler = rj.infer.Greedy(repetition_penalty=100.0)
  new = ask(loaded, prompt, sampler=sampler, max_new_tokens=10)
  for row, answer in zip(prompt, new, strict=True):
    assert len(set(answer)) == 10 and not set(answer) & set(row)


@pytest.mark.parametrize(
  ("names", "sampler"),
  [
    (dict(do_sample=True), rj.infer.Sample()),
    (
      dict(temperature=2.0, top_k=40, seed=3),
      rj.infer.Sample(temperature=2.0, top_k=40, seed=3),
    ),
    (
      dict(do_sample=True, top_p=0.9, min_p=0.01, repetition_penalty=2.0),
      rj.infer.Sample(top_p=0.9, min_p=0.01, repetition_penalty=2.0),
    ),
    (dict(temperature=0), rj.infer.Greedy()),
    (dict(do_sample=False, top_p=None), rj.infer.Greedy()),
    (
      dict(repetition_penalty=100.0),
      rj.infer.Greedy(repetition_penalty=100.0),
    ),
  ],
)
def test_names_of_transformers(loaded, said, names, sampler):
  prompt, _ = said
  want = ask(loaded, prompt, sampler=sampler)
  np.testing.assert_array_equal(ask(loaded, prompt, **names), want)


def test_end_ids_by_the_name_of_transformers(loaded, said):
  prompt, greedy = said
  model, _ = loaded(NAME)
  for end in (int(greedy[0, 3]), [100, int(greedy[0, 3])]):
    new = rj.infer.generate(
      model, prompt, max_new_tokens=6, eos_token_id=end, temperature=0
    )
    assert new[0].tolist() == greedy[0, :4].tolist()


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("change", "kind", "says"),
  [
    (dict(tokens=[]), PromptError, "tokens: got"),
    (dict(tokens="text"), PromptError, "encode the text"),
    (dict(tokens=[[1], []]), PromptError, "prompt 1"),
    (dict(tokens=[[1.5]]), PromptError, "float"),
    (dict(tokens=np.zeros(3, np.int32)), PromptError, "tokens\\[None\\]"),
    (dict(tokens=np.zeros((0, 3), np.int32)), PromptError, "no prompts"),
    (dict(tokens=[[1, 101]]), PromptError, "id 101 at position 1"),
    (dict(tokens=[[-1]]), PromptError, "id -1"),
    (dict(max_new_tokens=0), OptionError, "max_new_tokens"),
    (dict(max_new_tokens=2.0), OptionError, "max_new_tokens"),
    (dict(prefill="flash"), OptionError, "one of auto, dense"),
    (dict(prefill="dense", chunk=4), OptionError, "chunk"),
    (dict(chunk=0), OptionError, "chunk"),
    (dict(partition=(1, 1)), OptionError, "prefill='kvr'"),
    (dict(sampler="greedy"), InputTypeError, "sampler"),
    (dict(stream=3), InputTypeError, "stream"),
    (dict(pad_id="x"), OptionError, "pad_id"),
    (dict(pad_id=2**31), OptionError, "pad_id"),
    (dict(stop=[500]), PromptError, "vocabulary"),
    (dict(stop=rj.infer.Stop(strings=("a",))), OptionError, "tokenizer"),
    (dict(stop="\n"), OptionError, "tokenizer: got None with stop strings"),
    (dict(stop=["\n"]), OptionError, "tokenizer: got None with stop strings"),
    (dict(stop=1.5), InputTypeError, "stop: got float 1.5"),
    (dict(stop=[1.5]), InputTypeError, "stop: got float 1.5"),
    (dict(stop=True), InputTypeError, "stop: got bool"),
    (dict(stop=b"\n"), InputTypeError, "stop: got bytes"),
    (dict(stop=[[1]]), InputTypeError, "stop: got list"),
    (
      dict(stop=[1], tokenizer=dataclasses),
      InputTypeError,
      r"tokenizer: got builtins\.module.*Tokenizer\.load",
    ),
    (dict(top_k=4, sampler=rj.infer.Greedy()), OptionError, "beside sampler="),
    (dict(eos_token_id=4, stop=5), OptionError, "beside stop="),
    (dict(eos_token_id=500), PromptError, "vocabulary"),
    (
      dict(top_k=4, temperature=0),
      OptionError,
      "temperature, top_k: got .*greedy",
    ),
    (dict(do_sample=False, top_p=0.5), OptionError, "do_sample=True"),
    (dict(seed=3), OptionError, "do_sample=True"),
    (dict(do_sample=1.5), OptionError, "do_sample: got 1.5"),
    (dict(do_sample=True, temperature=0), SamplingError, "temperature: got 0"),
    (dict(top_p=2.0), SamplingError, "top_p: got 2.0"),
    (dict(max_length=9), OptionError, "max_new_tokens="),
    (dict(num_beams=4), OptionError, "rj.serve.Request"),
    (dict(temprature=1.0), OptionError, "temprature: got 1.0"),
    (dict(axis="seq"), MeshError, "without a mesh"),
    (dict(mesh="seq:8"), MeshError, "got str"),
    (dict(cache={}), InputTypeError, "Session"),
  ],
)
def test_bad_input(loaded, change, kind, says):
  model, _ = loaded(NAME)
  options = dict(tokens=[[1, 2]], max_new_tokens=2) | change
  with pytest.raises(kind, match=says) as caught:
    rj.infer.generate(model, options.pop("tokens"), **options)
  text = str(caught.value)
  assert len(text) < 400 and "\n" not in text


@pytest.mark.usefixtures("unchecked")
def test_only_from_the_host(loaded):
  model, _ = loaded(NAME)
  run = lambda model, tokens: rj.infer.generate(model, tokens, max_new_tokens=1)
  tokens = np.ones((1, 3), np.int32)
  refused(InputTypeError, lambda: jax.jit(run)(model, tokens), "model", "jit")
  inside = jax.jit(lambda x: run(model, x))
  refused(InputTypeError, lambda: inside(tokens), "tokens", "jit")
  rows = jax.jit(lambda x: run(model, [x[0], x[0, :2]]))
  with jax.set_mesh(make_mesh(2, "explicit")):
    refused(InputTypeError, lambda: rows(tokens), "tokens", "jit")
    refused(InputTypeError, lambda: run("model", tokens), "model: got str")


def test_meshes_that_do_not_fit(loaded):
  model, mesh = loaded(NAME, 8)
  run = lambda **o: rj.infer.generate(model, [[1]], max_new_tokens=1, **o)
  with pytest.raises(MeshError, match="weights on 8"):
    run(mesh=make_mesh(4, "auto"))
  with pytest.raises(MeshError, match="one of the mesh axes"):
    run(mesh=mesh, axis="model")
  with pytest.raises(OptionError, match="'dense' on a mesh"):
    run(prefill="dense")


def test_sessions_that_do_not_fit(loaded):
  model, mesh = loaded(NAME, 8)
  other, _ = loaded("llama3")
  session = rj.infer.Session(model, 64)
  run = lambda m, p, **o: rj.infer.generate(
    m, p, max_new_tokens=1, cache=session, **o
  )
  with pytest.raises(PromptError, match="2 prompts"):
    run(model, [[1], [2]])
  with pytest.raises(OptionError, match="another model"):
    run(other, [[1]])
  with pytest.raises(OptionError, match="the session has its own"):
    run(model, [[1]], mesh=mesh)
  run(model, [[1]])
  with pytest.raises(OptionError, match="holds tokens"):
    run(model, [[1]], prefill="ring")


def test_a_cache_that_cannot_fit_is_refused_before_it_is_made(
  loaded, monkeypatch
):
  model, _ = loaded(NAME)
  module = sys.modules["ringjax.infer.session"]
  monkeypatch.setattr(module, "device_free_bytes", lambda *_: 1 << 20)
  made = []
  monkeypatch.setattr(type(model), "init_cache", lambda *a, **k: made.append(1))
  with pytest.raises(MemoryEstimateError, match="1,048,576") as caught:
    rj.infer.Session(model, 1 << 20)
  assert "shard the sequence" in str(caught.value) and not made


def test_dense_scores_that_cannot_fit_are_refused_before_all(
  loaded, monkeypatch
):
  model, _ = loaded(NAME)
  module = sys.modules["ringjax.infer.session"]
  heads = checkpoints.config(NAME)["num_attention_heads"]
  session = rj.infer.Session(model, 256, batch=2)
  monkeypatch.setattr(
    module, "device_free_bytes", lambda *_: 4 * 2 * heads * 96**2
  )
  run = lambda prompt, **more: rj.infer.generate(
    model, [prompt] * 2, max_new_tokens=1, prefill="dense", **more
  )
  made = []
  with monkeypatch.context() as patch:
    patch.setattr(type(model), "init_cache", lambda *a, **k: made.append(1))
    need = f"{4 * 2 * heads * 104**2:,} bytes of scores"
    with pytest.raises(MemoryEstimateError, match=need) as caught:
      run([1] * 100)
    assert "prefill='blockwise'" in str(caught.value) and not made
  with pytest.raises(MemoryEstimateError, match="2 x 104 tokens"):
    run([1] * 100, cache=session)
  assert session.empty
  for name, tokens in (("dense", 90), ("blockwise", 10_000)):
    options = prefill.PrefillConfig(method=name)
    how = options.plan(tokens, model, None, None)
    prompt_reading._check_scores(model, how, 2)


def test_texts_beyond_the_context_are_refused(loaded):
  model, _ = loaded(NAME)
  assert model.config.longest == 128
  run = lambda tokens, count, **more: rj.infer.generate(
    model, tokens, max_new_tokens=count, **more
  )
  with pytest.raises(PromptError, match="at most 128 in all") as caught:
    run([[1], [1] * 120], 9)
  assert "120 tokens in prompt 1" in str(caught.value)
  assert "max_position_embeddings" in str(caught.value)
  session = rj.infer.Session(model, 160)
  # The last of 108 tokens comes with the next turn.
  run([[1] * 107], 1, cache=session)
  with pytest.raises(PromptError, match="107 tokens read before, 11 tokens"):
    run([[1] * 10], 11, cache=session)
  check = prompt_reading.check_context
  check(model, session.lengths, np.array([11]), 10)
  check(model, np.zeros(2, int), np.array([1, 120]), 8)


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["ring", "striped", "ulysses", "kvr"])
def test_ways_of_several_shards_on_one(loaded, said, way):
  prompt, greedy = said
  reports = []
  new = ask(loaded, prompt, prefill=way, report=reports.append)
  np.testing.assert_array_equal(new, greedy[:, :6])
  how = reports[0].prefill
  assert how.name == "blockwise"
  assert f"'{way}' was asked for, and on one shard" in how.why


@pytest.mark.parametrize(("name", "devices"), [(NAME, 2), ("falcon_7b", 8)])
def test_no_groups_that_trade_heads(loaded, name, devices):
  """Two shards are one group, and one kv head is not traded."""
  model, mesh = loaded(name, devices)
  with pytest.raises(OptionError, match=f"'hybrid' on {devices} shards") as e:
    rj.infer.generate(
      model, [[1, 2]], max_new_tokens=2, mesh=mesh, prefill="hybrid"
    )
  assert "prefill='striped'" in str(e.value) and "inner" not in str(e.value)


def test_a_chain_of_one_part(loaded, said):
  prompt, greedy = said
  reports = []
  new = ask(
    loaded, prompt, prefill="kvr", partition=(30,), report=reports.append
  )
  np.testing.assert_array_equal(new, greedy[:, :6])
  assert reports[0].prefill.width == 30
  with pytest.raises(OptionError, match="1 positive ints"):
    ask(loaded, prompt, prefill="kvr", partition=(15, 15))


# ---------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------


def test_the_current_mesh_is_the_default(said):
  prompt, _ = said
  config = checkpoints.config(NAME)
  mesh = make_mesh(4, "auto")
  arrays = rj.models.create(config, seed=0, mesh=mesh)
  reports = []
  with jax.set_mesh(mesh):
    rj.infer.generate(arrays, prompt, max_new_tokens=2, report=reports.append)
  assert reports[0].shards == 4


def test_batch_heads_and_sequence_axes(loaded, said, tmp_path):
  """On a mesh of three axes: the batch, the heads and the sequence."""
  prompt, greedy = said
  folder = checkpoints.write(NAME, tmp_path / "model")
  mesh = rj.make_mesh((2, 2, 2), ("data", "model", "seq"))
  model = rj.models.load(folder, mesh=mesh)
  session = rj.infer.Session(model, 64, batch=2)
  new = rj.infer.generate(model, prompt, max_new_tokens=8, cache=session)
  np.testing.assert_array_equal(new, greedy[:, :8])
  slots = session.cache.slots[0].k
  whole = slots.shape
  assert slots.sharding.shard_shape(whole) == (
    whole[0],
    whole[1] // 2,
    whole[2] // 2,
    whole[3] // 2,
    whole[4],
  )


def test_a_cache_of_another_dtype(loaded, said):
  prompt, _ = said
  model, mesh = loaded(NAME, 2)
  session = rj.infer.Session(model, 64, batch=2, mesh=mesh, dtype=jnp.bfloat16)
  new = rj.infer.generate(model, prompt, max_new_tokens=2, cache=session)
  assert session.cache.slots[0].k.dtype == jnp.bfloat16
  assert new.tokens.shape == (2, 2)
