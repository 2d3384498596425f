"""An engine gives each request what `generate` gives it alone."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import MeshError, OptionError, PromptError, SamplingError
from ringjax.kv import kind_text
from ringjax.ops.attention.cached import pooled
from ringjax.serve import Engine, Request, RowSampling
from tests.helpers import make_mesh, refused, swept

PAGE = 16
# No two have a layer in common.
FAMILIES = ("llama3", "gpt_oss", "deepseek_v3", "qwen3_next")
MORE = ("gemma2", "gemma3_text", "llama4_text", "falcon_rw", "mixtral",
        "deepseek_v32", "deepseek_v4")  # fmt: skip


def engine(model, mesh=None, **options):
  """A small one, which has to preempt rows."""
  settings = dict(
    rows=4, capacity=128, longest=96, page=PAGE, piece=16, pieces=2, mesh=mesh
  )
  return Engine(model, **settings | options)


def requests(rng, vocab, count, **options):
  """Prompts of which many share a prefix, with settings of all kinds."""
  common = rng.integers(0, vocab, 40).astype(np.int32)
  made = []
  for n in range(count):
    own = rng.integers(0, vocab, rng.integers(1, 20)).astype(np.int32)
    prompt = np.concatenate([common[: rng.choice([0, 17, 32, 40])], own])
    sampling = RowSampling()
    if n % 2:
      # Each set of filters is a program of `generate`: none, and all.
      filters = dict(top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
      sampling = RowSampling(
        temperature=float(rng.choice([0.5, 1.0, 1.5])),
        seed=int(rng.integers(0, 2**40)),
        **(filters if n % 4 == 1 else {}),
      )
    count = int(rng.integers(1, 24))
    made.append(
      Request(prompt=prompt, max_new_tokens=count, sampling=sampling, **options)
    )
  return made


def alone(model, request, mesh=None, **options):
  """What `generate` answers."""
  how = request.sampling
  names = dict(repetition_penalty=how.repetition_penalty)
  if how.temperature:
    names |= dict(
      temperature=how.temperature,
      top_k=how.top_k,
      top_p=how.top_p,
      min_p=how.min_p,
      seed=how.seed,
    )
  new = rj.infer.generate(
    model,
    [request.prompt],
    max_new_tokens=request.max_new_tokens,
    mesh=mesh,
    **names,
    **options,
  )
  return new[0].tolist()


def served(at, wanted, rng):
  """Answers to requests that come in any order, beside cancelled ones."""
  handles = {}
  for n in rng.permutation(len(wanted)):
    handles[n] = at.submit(wanted[n])
    doomed = at.submit(wanted[rng.integers(len(wanted))])
    for _ in range(rng.integers(0, 4)):
      at.step()
    doomed.cancel()
    at.scheduler.tree.check()
  at.run()
  at.scheduler.tree.check()
  return [handles[n].result() for n in range(len(wanted))]


def check(model, mesh, rng, count, *, longest=96, kind=None, **options):
  at = engine(model, mesh, cache_kind=kind or "windowed", **options)
  wanted = requests(rng, model.config.vocab, count)
  results = served(at, wanted, rng)
  # Prompts are read out of what the cache made of them, as in chunks.
  how = {} if kind is None else dict(cache_kind=kind, prefill="chunked")
  for request, result in zip(wanted, results, strict=True):
    assert result.tokens.tolist() == alone(model, request, mesh, **how)
    assert result.finish == "length"
  return at


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_families(loaded, family):
  model, _ = loaded(family)
  at = check(model, None, np.random.default_rng(0), 8)
  assert at.counters.preemptions
  # Recurrent layers can't share a prefix.
  assert bool(at.counters.cached_tokens) == (family != "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices"),
  swept(
    itertools.product((*FAMILIES, *MORE), (1, 4)),
    [*((f, 4) for f in FAMILIES), *zip(MORE[:5], (1, 4, 1, 4, 1), strict=True)],
  ),
)
def test_more_families_and_meshes(loaded, family, devices):
  model, mesh = loaded(family, devices)
  check(model, mesh, np.random.default_rng(devices), 12)


@pytest.mark.slow
@pytest.mark.long
def test_any_filters_of_a_request(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(5)
  wanted = [
    dataclasses.replace(
      one,
      sampling=RowSampling(
        temperature=float(rng.choice([0.5, 1.0, 1.5])),
        top_k=rng.choice([None, 5]),
        top_p=rng.choice([None, 0.9]),
        min_p=rng.choice([None, 0.05]),
        repetition_penalty=rng.choice([None, 1.2]),
        seed=int(rng.integers(0, 2**40)),
      ),
    )
    for one in requests(rng, model.config.vocab, 16)
  ]
  for request, result in zip(
    wanted, served(engine(model), wanted, rng), strict=True
  ):
    assert result.tokens.tolist() == alone(model, request)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "unrotated"])
def test_codecs_on_a_mesh(loaded, kind):
  model, mesh = loaded("llama3", 4)
  check(model, mesh, np.random.default_rng(1), 6, kind=kind)


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("family", "kind"),
  swept(
    itertools.product(
      ("llama3", "gpt_oss", "deepseek_v3"),
      ("int8", "hadamard3", "float8", "bfloat16"),
    ),
    [
      ("llama3", "int8"),
      ("gpt_oss", "hadamard3"),
      ("deepseek_v3", "float8"),
      ("gpt_oss", "bfloat16"),
    ],
  ),
)
def test_more_codecs(loaded, family, kind):
  model, _ = loaded(family)
  check(model, None, np.random.default_rng(2), 8, kind=kind)


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("family", ["llama3", "gpt_oss", "deepseek_v3"])
def test_calibrated_levels(loaded, family):
  model, _ = loaded(family)
  draw = np.random.default_rng(1).integers(0, model.config.vocab, (2, 64))
  levels = rj.infer.calibrate(model, draw.astype(np.int32))
  kind = kind_text.parse("nuq3").with_options({"calibration": levels})
  check(model, None, np.random.default_rng(2), 8, kind=kind)
  # And bit for bit as alone in an engine.
  rng = np.random.default_rng(2)
  wanted = requests(rng, model.config.vocab, 6, logprobs=2)
  crowd = served(engine(model, cache_kind=kind), wanted, rng)
  for request, result in zip(wanted, crowd, strict=True):
    own = engine(model, cache_kind=kind).submit(request).result()
    assert own.answers[0].tokens == result.answers[0].tokens
    assert own.answers[0].logprobs == result.answers[0].logprobs


@pytest.mark.long
@pytest.mark.parametrize("rows", [9, pytest.param(13, marks=pytest.mark.long)])
def test_every_slot_gives_the_same_bits(loaded, rows):
  """Also of a family whose gates are products with a single column."""
  model, _ = loaded("qwen3_next")
  at = engine(model, rows=rows, capacity=rows * 48, share="nothing")
  one = Request(
    prompt=np.arange(21, dtype=np.int32), max_new_tokens=12, logprobs=0
  )
  handles = [at.submit(one) for _ in range(rows)]
  at.run()
  found = [h.result().answers[0] for h in handles]
  first, *others = [(a.tokens, a.logprobs) for a in found]
  assert all(other == first for other in others)


def test_alone_and_in_a_crowd_bit_for_bit(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(3)
  wanted = requests(rng, model.config.vocab, 8, logprobs=3)
  crowd = served(engine(model), wanted, rng)
  for request, result in zip(wanted, crowd, strict=True):
    own = engine(model).submit(request).result()
    assert own.answers[0].tokens == result.answers[0].tokens
    # Every number, not only what was chosen by it.
    assert own.answers[0].logprobs == result.answers[0].logprobs


def test_few_programs(loaded):
  from ringjax.serve.calls import compute, compute_step

  model, _ = loaded("llama3")
  at = engine(model)
  rng = np.random.default_rng(4)
  served(at, requests(rng, model.config.vocab, 4), rng)
  before = compute_step._cache_size(), compute._cache_size()
  served(at, requests(rng, model.config.vocab, 8, logprobs=2), rng)
  assert (compute_step._cache_size(), compute._cache_size()) == before


def compiled():
  """How many programs each jitted function of the engine's own has."""
  found = {
    f"{f.__module__}.{f.__name__}": f._cache_size()
    for name, module in sys.modules.items()
    if name.startswith("ringjax.serve") and module is not None
    for f in vars(module).values()
    if hasattr(f, "_cache_size")
  }
  assert len(found) >= 8
  return found


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_a_trace_compiles_few_programs(loaded, family):
  """At most 12, with all that an engine may do on one day."""
  model, _ = loaded(family)
  longest = min(model.config.longest or 512, 512)
  day = [
    one.shrunk(4096 // longest)
    for one in rj.serve.poisson_trace(
      rate=20,
      requests=60,
      prompt_tokens=900,
      new_tokens=250,
      shared_tokens=512,
      spread=0.7,
      seed=1,
    )
  ]
  options: dict[str, Any] = dict(
    preempt="swap", longest=longest, capacity=longest * 5 // 4
  )
  if family == "gpt_oss":
    options["store"] = rj.store.Store(host=1 << 24)
  # Programs that are let go while it counts would be missing from the count.
  jax.clear_caches()
  before = compiled()
  with engine(model, rows=5, pieces=3, **options) as at:
    rng = np.random.default_rng(2)
    for n, part in enumerate((day[:30], day[30:])):
      more = [
        *requests(rng, model.config.vocab, 6),
        Request(prompt=np.arange(40), max_new_tokens=24, beams=3 + n, n=2),
        Request(prompt=np.arange(longest // 2) % 64, max_new_tokens=40),
      ]
      handles = [at.submit(one) for one in more]
      start = part[0].arrival
      moved = [
        dataclasses.replace(one, arrival=one.arrival - start) for one in part
      ]
      assert rj.serve.replay_live(at, moved).requests == 30
      assert all(handle.done for handle in handles)
    at.scheduler.tree.check()
    counters = at.counters
  assert counters.swapped and not counters.failed
  if family == "gpt_oss":
    assert counters.cached_tokens and counters.pages_out
    assert counters.stored_tokens and counters.pages_in
  found = {name: n - before.get(name, 0) for name, n in compiled().items()}
  assert found["ringjax.serve.calls.compute_step"] == 1
  assert found["ringjax.serve.calls.compute"] == 0
  assert found["ringjax.serve.calls._forked"] == 1
  assert sum(found.values()) <= 12, found


@pytest.mark.long
def test_answers_that_later_prompts_find(loaded):
  model, _ = loaded("llama3")
  at = engine(model, share="answers", capacity=512)
  prompt = np.arange(20, dtype=np.int32)
  first = at.submit(Request(prompt=prompt, max_new_tokens=30)).result()
  turn = np.concatenate([prompt, first.tokens, prompt[:3]])
  found = at.submit(Request(prompt=turn, max_new_tokens=4)).result()
  assert found.cached_tokens == (20 + 29) // PAGE * PAGE
  want = rj.infer.generate(model, [turn], max_new_tokens=4)
  assert found.tokens.tolist() == want[0].tolist()
  # By default only prompts are found.
  at = engine(model, capacity=512)
  at.submit(Request(prompt=prompt, max_new_tokens=30)).result()
  found = at.submit(Request(prompt=turn, max_new_tokens=4)).result()
  assert found.cached_tokens == PAGE


def test_tenants_share_nothing(loaded):
  model, _ = loaded("llama3")
  at = engine(model, capacity=512)
  prompt = np.arange(50, dtype=np.int32)
  ask = lambda **options: at.submit(
    Request(prompt=prompt, max_new_tokens=2, **options)
  ).result()
  ask(salt="a")
  assert ask(salt="b").cached_tokens == 0
  assert ask(salt="a", share=False).cached_tokens == 0
  assert ask(salt="a").cached_tokens == 48
  # A whole prompt that is known: its last token is computed for its logits.
  assert ask(salt="a").tokens.tolist() == ask(salt="b").tokens.tolist()


def test_a_prefix_that_is_being_computed_is_waited_for(loaded):
  model, _ = loaded("llama3")
  at = engine(model, rows=4, capacity=512, pieces=1)
  prompt = np.arange(64, dtype=np.int32)
  both = [
    at.submit(Request(prompt=np.append(prompt, n), max_new_tokens=2))
    for n in range(3)
  ]
  at.run()
  assert [h.cached_tokens for h in both] == [0, 64, 64]
  assert at.counters.prompt_tokens == 65 + 1 + 1


def test_several_answers(loaded):
  model, _ = loaded("llama3")
  at = engine(model, capacity=512)
  prompt = np.arange(20, dtype=np.int32)
  how = RowSampling(temperature=1.0, seed=7)
  request = Request(prompt=prompt, max_new_tokens=6, sampling=how, n=3)
  result = at.submit(request).result()
  want = rj.infer.generate(
    model, [prompt] * 3, max_new_tokens=6, temperature=1.0, seed=7
  )
  assert [a.tokens for a in result.answers] == [row.tolist() for row in want]
  best = Request(prompt=prompt, max_new_tokens=6, sampling=how, n=1, best_of=3)
  found = at.submit(best).result().answers
  assert len(found) == 1
  of_all = [
    at.submit(
      Request(prompt=prompt, max_new_tokens=6, sampling=how, n=3, logprobs=0)
    ).result()
  ][0].answers
  total = lambda a: sum(x.logprob for x in a.logprobs)
  assert found[0].tokens == max(of_all, key=total).tokens


def test_settings_of_each_row(loaded):
  model, _ = loaded("llama3")
  at = engine(model, capacity=512)
  prompt, vocab = np.arange(9, dtype=np.int32), model.config.vocab
  ask = lambda **options: at.submit(
    Request(prompt=prompt, max_new_tokens=6, **options)
  )
  only = np.zeros(vocab, bool)
  only[[5, 7]] = True
  plain = ask()
  pushed = ask(sampling=RowSampling(logit_bias={11: 1e4}))
  masked = ask(mask=lambda tokens: only if tokens.size % 2 else None)
  once = ask(
    sampling=RowSampling(frequency_penalty=2.0, logit_bias={3: 5.0, 4: 4.0})
  )
  stopped = ask(stop=[11], sampling=RowSampling(logit_bias={11: 1e4}))
  late = ask(deadline=1e-9)
  at.run()
  assert plain.result().tokens.tolist() == alone(model, plain.request)
  assert pushed.result().tokens.tolist() == [11] * 6
  found = masked.result().tokens
  assert set(found[1::2]) <= {5, 7} and found[0] == plain.result().tokens[0]
  counted = once.result().tokens
  logits, _ = model(
    prompt[None], cache=model.init_cache(1, 16)
  )  # The first choice by hand: bias, then no penalty.
  first = np.array(logits[0, -1])
  first[3] += 5
  first[4] += 4
  assert counted[0] == first.argmax()
  assert stopped.result().finish == "stop"
  assert stopped.result().answers[0].stopped == 11
  assert late.answers[0].finish == "deadline"


def test_logprobs_are_those_of_the_model(loaded):
  model, _ = loaded("llama3")
  at = engine(model)
  prompt = np.arange(12, dtype=np.int32)
  answer = (
    at.submit(Request(prompt=prompt, max_new_tokens=5, logprobs=4))
    .result()
    .answers[0]
  )
  text = np.concatenate([prompt, answer.tokens])
  logits, _ = model(text[None], cache=model.init_cache(1, 32))
  logits = np.asarray(logits[0], np.float64)
  want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  for n, found in enumerate(answer.logprobs):
    row = want[prompt.size - 1 + n]
    assert abs(found.logprob - row[found.token]) < 1e-4
    assert [i for i, _ in found.top] == np.argsort(-row)[:4].tolist()


def test_priorities_and_deadlines(loaded):
  model, _ = loaded("llama3")
  at = engine(model, rows=1)
  prompt = np.arange(9, dtype=np.int32)
  handles = [
    at.submit(Request(prompt=prompt, max_new_tokens=3, priority=p))
    for p in (5, 5, 1)
  ]
  ends = []
  while at.step():
    ends += [n for n, h in enumerate(handles) if h.done and n not in ends]
  ends += [n for n, h in enumerate(handles) if h.done and n not in ends]
  assert ends == [2, 0, 1]


def test_errors_end_one_request(loaded):
  model, _ = loaded("llama3")
  at = engine(model)
  prompt = np.arange(9, dtype=np.int32)

  def broken(tokens):
    raise ValueError("no grammar")

  bad = at.submit(Request(prompt=prompt, max_new_tokens=3, mask=broken))
  none = at.submit(
    Request(
      prompt=prompt,
      max_new_tokens=3,
      mask=lambda _: np.zeros(model.config.vocab, bool),
    )
  )
  good = at.submit(Request(prompt=prompt, max_new_tokens=3))
  at.run()
  with pytest.raises(ValueError, match="no grammar"):
    bad.result()
  with pytest.raises(TypeError, match="mask"):
    none.result()
  assert good.result().tokens.tolist() == alone(model, good.request)
  at.scheduler.tree.check()


def test_what_is_refused(loaded):
  model, _ = loaded("llama3")
  at = engine(model)
  prompt = np.arange(9, dtype=np.int32)
  long = np.zeros(90, np.int32)
  refused(
    PromptError,
    lambda: at.submit(Request(prompt=long, max_new_tokens=9)),
    "96 tokens of a row",
  )
  refused(
    PromptError,
    lambda: at.submit(Request(prompt=prompt[:0], max_new_tokens=9)),
    "prompt",
  )
  refused(
    OptionError,
    lambda: at.submit(Request(prompt=prompt, max_new_tokens=9, stop="text")),
    "tokenizer",
  )
  refused(
    OptionError, lambda: engine(model, page=24), "page", "24", "16, 32, 64"
  )
  refused(
    OptionError, lambda: engine(model, cache_kind="snapkv"), "pool of pages"
  )
  refused(SamplingError, lambda: RowSampling(frequency_penalty=3.0), "2")
  at.close()
  refused(
    OptionError,
    lambda: at.submit(Request(prompt=prompt, max_new_tokens=9)),
    "closed",
  )


@pytest.mark.long
def test_a_thread_of_its_own(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(5)
  with engine(model).start() as at:
    wanted = requests(rng, model.config.vocab, 6)
    handles = [at.submit(request) for request in wanted]
    streamed = list(handles[0])
    for request, handle in zip(wanted, handles, strict=True):
      assert handle.result().tokens.tolist() == alone(model, request)
    assert streamed == handles[0].result().tokens.tolist()


@pytest.mark.long
@pytest.mark.parametrize(
  ("devices", "speculate"),
  [(1, None), (4, None), (1, "lookup:count=3,adapt=false")],
)
def test_rows_read_what_they_share_once(loaded, devices, speculate):
  model, mesh = loaded("llama3", devices)
  rng = np.random.default_rng(6)
  common = rng.integers(0, model.config.vocab, 520).astype(np.int32)
  wanted = [
    Request(
      prompt=np.append(common[:n], np.int32(i)),
      max_new_tokens=10,
      logprobs=2,
    )
    for i, n in enumerate((520, 520, 300, 520, 0))
  ]

  made = []

  def answers(how, together):
    at = Engine(
      model,
      rows=5,
      capacity=2048,
      longest=640,
      page=PAGE,
      mesh=mesh,
      shared_reads=how,
      speculate=speculate,
    )
    made.append(at)
    if together:
      handles = [at.submit(request) for request in wanted]
      at.run()
    else:
      handles = []
      for request in wanted:
        handles.append(at.submit(request))
        at.run()
    return at.counters, [h.result().answers[0] for h in handles]

  counters, crowd = answers("always", True)
  assert counters.keys_read < 0.6 * counters.keys_seen
  figures = {x.name: x.value for x in made[0].figures()}
  assert figures["keys_read_total"] == counters.keys_read
  assert figures["keys_referenced_total"] == counters.keys_seen
  same, own = answers("never", True)
  assert same.keys_read == same.keys_seen
  exact, alone = answers("exact", False)
  for x, y, z in zip(crowd, own, alone, strict=True):
    assert x.tokens == y.tokens == z.tokens
    # CPUs sum both in one order.
    assert x.logprobs == y.logprobs == z.logprobs
  assert exact.plans


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_read_together_are_exact_on_a_cpu(dtype):
  shape = 8, 2, 2, 64, 64
  assert pooled.sharing_is_exact(shape, 32, np.dtype(dtype), "cpu")


def test_rows_that_read_apart_say_why(loaded, monkeypatch, caplog):
  model, _ = loaded("llama3")
  figures = lambda at: {x.name: x.value for x in at.figures()}
  at = engine(model)
  assert at.reads_apart == "" and figures(at)["shared_reads"] == 1
  assert not caplog.records
  for options, why in (
    (dict(shared_reads="never"), "shared_reads='never'"),
    (dict(layout="contiguous"), "layout='contiguous'"),
  ):
    assert why in engine(model, **options).reads_apart
  assert not caplog.records
  exact = "ringjax.serve.engine.sharing_is_exact"
  monkeypatch.setattr(exact, lambda *_: False)
  at = engine(model)
  assert "pass shared_reads='always'" in at.reads_apart
  assert at.reads_apart in caplog.text
  assert figures(at)["shared_reads"] == 0
  assert engine(model, shared_reads="always").reads_apart == ""


@pytest.mark.long
def test_what_rows_share_is_found_anew_only_when_it_changes(
  loaded, monkeypatch
):
  """By a change of the tables, or a row that fills a tile."""
  from ringjax.serve import calls

  model, _ = loaded("llama3")
  made, find = [], calls.shared_tiles

  def noted(table, ready, page, tile, most):
    made.append((table.tobytes(), (ready // tile).tobytes()))
    return find(table, ready, page, tile, most)

  at = Engine(
    model, rows=3, capacity=2048, longest=512, page=64, shared_reads="always"
  )
  monkeypatch.setattr(calls, "shared_tiles", noted)
  prompt = np.arange(260, dtype=np.int32) % model.config.vocab
  for n in range(3):
    at.submit(Request(prompt=np.append(prompt, n), max_new_tokens=100))
  at.run()
  assert len(made) == at.counters.plans
  assert all(one != next_ for one, next_ in itertools.pairwise(made))
  assert at.counters.steps > 100 > 8 * at.counters.plans


def test_counted_reads(loaded):
  """32 rows of 1,024 shared tokens and 64 of their own."""
  from ringjax.serve.prefix.shared_rows import shared_tiles

  table = np.full((32, 1, 9 * 8), -1, np.int32)
  table[:, 0, :64] = np.arange(64)
  table[:, 0, 64:68] = 64 + np.arange(32 * 4).reshape(32, 4)
  ready = np.full(32, 1024 + 64)
  plan = shared_tiles(table, ready, 16, 128, 100)
  shared = int(plan.count[0]) * 128
  own = int((ready - plan.shared_counts[0] * 128).sum())
  assert (shared, own) == (1024, 32 * 64)
  assert shared + own == 3072
  # With pages of its own each row reads all that it looks at.
  apart = np.arange(table.size, dtype=np.int32).reshape(table.shape)
  plan = shared_tiles(apart, ready, 16, 128, 100)
  assert not plan.count.any() and not plan.cover.any()
  assert int((ready - plan.shared_counts[0] * 128).sum()) == 34_816
  # A tile that differs ends what is shared, whatever follows.
  table[3, 0, 8] = 999
  plan = shared_tiles(table, ready, 16, 128, 100)
  assert (
    plan.shared_counts[0, 3] == 1
    and (np.delete(plan.shared_counts[0], 3) == 8).all()
  )
  assert not plan.cover[0, 1:8, 3].any()


def test_a_page_that_is_not_ready_is_not_read_together():
  """Two rows of two pages in common, of which one row has computed one."""
  from ringjax.serve.prefix.shared_rows import shared_tiles

  table = np.array([[[4, 7]], [[4, 7]]], np.int32)
  plan = shared_tiles(table, np.array([4, 3]), 2, 2, 9)
  assert plan.count.tolist() == [1] and plan.shared_counts.tolist() == [[1, 1]]
  plan = shared_tiles(table, np.array([4, 4]), 2, 2, 9)
  assert plan.count.tolist() == [2] and plan.shared_counts.tolist() == [[2, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "devices"),
  [("llama3", 1), ("gpt_oss", 1), ("qwen3_next", 1), ("gpt_oss", 4)],
)
def test_rows_come_back_from_the_host(loaded, family, devices):
  model, mesh = loaded(family, devices)
  rng = np.random.default_rng(0)
  at = check(model, mesh, rng, 8, preempt="swap")
  assert at.counters.swapped
  # Nothing of them is computed again.
  again = check(model, mesh, np.random.default_rng(0), 8, preempt="recompute")
  assert not again.counters.swapped
  assert at.counters.prompt_tokens < again.counters.prompt_tokens


@pytest.mark.parametrize(
  ("token_seconds", "rate", "swaps"),
  [
    (1e-2, 1e9, True),
    (1e-7, 1e9, False),
    # A slow link, and the same tokens as at first.
    (1e-2, 1e5, False),
  ],
)
def test_the_cheaper_of_copies_and_computing_is_taken(
  loaded, monkeypatch, token_seconds, rate, swaps
):
  """By what steps and copies took so far, on a clock of the test."""
  from ringjax.kv.storage.page_pool import PagePool
  from ringjax.serve.prefix import page_swap
  from ringjax.serve.scheduler import KeptPages, PromptPiece

  model, _ = loaded("llama3")
  pool = PagePool.create(
    model.kinds,
    rows=1,
    pages=lambda _: 8,
    page=PAGE,
    dtype=np.float32,
    kind=model.cache_kind("windowed"),
  )
  each = sum(group.token_bytes for group in pool.groups) * PAGE
  # Pages are copied 16 at a time.
  now, size = [0.0], 16 * each

  def copied(payload):
    now[0] += size / rate
    return get(payload)

  get = jax.device_get
  monkeypatch.setattr(page_swap.time, "monotonic", lambda: now[0])
  monkeypatch.setattr(page_swap.jax, "device_get", copied)
  swap = page_swap.PageSwap("auto", PAGE, each)
  row = rj.serve.ServedRow(prompt=np.zeros(64, np.int32), most=1, computed=64)
  plan = rj.serve.StepPlan(
    turns=(),
    pieces=(PromptPiece(row=row, start=0, count=64, chooses=False),),
    admitted=(),
    preempted=(),
  )
  for _ in range(80):
    tables = [np.arange(8, dtype=np.int32)[None] for _ in pool.groups]
    row.kept = KeptPages(tables=tables, computed=64, slot=0)
    swap.out(pool, row)
    swap.measure(plan)
    now[0] += 64 * token_seconds
  assert swap.count == 80
  assert swap.keeps(row) == swaps
  # By what both cost in truth.
  assert swaps == (2 * size / rate < 64 * token_seconds)


@pytest.mark.long
def test_an_adapter_for_each_row(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(8)

  def trained(how, seed):
    """Adapters that change something."""
    params = how.start(model, seed=seed)
    fill = lambda x: rng.standard_normal(x.shape).astype(np.float32) * 0.3
    return {p: {"a": x["a"], "b": fill(x["b"])} for p, x in params.items()}

  small = rj.train.Lora(rank=2, alpha=4.0)
  large = rj.train.Lora(rank=4, alpha=4.0, targets=("q", "up", "down"))
  adapters = {"s": (small, trained(small, 0)), "l": (large, trained(large, 1))}
  at = engine(model, adapters=adapters, capacity=512)
  prompt = rng.integers(0, model.config.vocab, 40).astype(np.int32)
  handles = {
    name: at.submit(Request(prompt=prompt, max_new_tokens=8, adapter=name))
    for name in ("", "s", "l", "")
  }
  at.run()
  found = {n: h.result().tokens.tolist() for n, h in handles.items()}
  assert found[""] == alone(model, handles[""].request)
  for name, (how, params) in adapters.items():
    merged = how.merged(params, model)
    assert found[name] == alone(merged, handles[name].request)
  assert len({tuple(x) for x in found.values()}) == 3
  # They share no prefix: keys depend on the adapter.
  assert handles["s"].cached_tokens == handles["l"].cached_tokens == 0
  refused(
    OptionError,
    lambda: at.submit(Request(prompt=prompt, max_new_tokens=8, adapter="x")),
    "adapter",
    "'s'",
  )
  other, _ = loaded("gemma2")
  refused(
    OptionError, lambda: engine(other, adapters=adapters), "adapters", "trained"
  )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_under_a_mesh_of_the_caller(loaded, kind):
  model, _ = loaded("llama3", 4)
  elsewhere, _ = loaded("llama3")
  request = Request(prompt=np.arange(20, dtype=np.int32), max_new_tokens=4)
  want = alone(elsewhere, request)
  make = lambda model: Engine(
    model, rows=2, capacity=256, longest=64, page=PAGE
  )
  with jax.set_mesh(make_mesh(4, kind)):
    at = make(model)
    assert list(at.submit(request)) == want
    with at.start():
      assert at.submit(request).result().tokens.tolist() == want
    refused(MeshError, lambda: make(elsewhere), "1 device", "mesh=")


@pytest.mark.long
def test_a_mask_that_cancels_another(loaded):
  """What was planned of it is computed: others may find its pages."""
  model, _ = loaded("llama3")
  at = engine(model, capacity=512)
  prompt = np.arange(32, dtype=np.int32)
  other: list[Any] = []

  def mask(tokens):
    if other and tokens.size >= 2:
      other[0].cancel()

  first = at.submit(Request(prompt=prompt[:9], max_new_tokens=6, mask=mask))
  while not first.answers[0].tokens:
    at.step()
  other.append(at.submit(Request(prompt=prompt, max_new_tokens=6)))
  at.run()
  assert other[0].answers[0].finish == "cancelled"
  assert first.result().tokens.tolist() == alone(model, first.request)
  again = at.submit(Request(prompt=prompt, max_new_tokens=6))
  assert again.result().tokens.tolist() == alone(model, again.request)
  at.scheduler.tree.check()


@pytest.mark.slow
def test_a_store_tells_adapters_of_one_name_apart(loaded):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(9)
  how = rj.train.Lora(rank=2, alpha=8.0)

  def drawn():
    fill = lambda x: rng.standard_normal(x.shape).astype(np.float32) * 0.3
    params = how.start(model).items()
    return {p: {"a": x["a"], "b": fill(x["b"])} for p, x in params}

  prompt = rng.integers(0, model.config.vocab, 40).astype(np.int32)
  request = Request(prompt=prompt, max_new_tokens=6, adapter="mine")
  with rj.store.Store(host=1 << 24) as store:
    for params in (drawn(), drawn()):
      with engine(model, adapters={"mine": (how, params)}, store=store) as at:
        result = at.submit(request).result()
        assert result.cached_tokens == 0
      merged = how.merged(params, model)
      assert result.tokens.tolist() == alone(merged, request)
      store.flush()
    # With the same ones it is found.
    with engine(model, adapters={"mine": (how, params)}, store=store) as at:
      found = at.submit(request).result()
    assert found.cached_tokens == 32
    assert found.tokens.tolist() == result.tokens.tolist()


@pytest.mark.slow
def test_windows_alone_serve_texts_longer_than_their_pages():
  config = dict(
    model_type="mistral",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    sliding_window=16,
  )
  model = rj.models.create(config, seed=0)
  at = Engine(model, rows=2, longest=512, page=PAGE, piece=16, pieces=2)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 64, n).astype(np.int32) for n in (490, 30, 400)]
  wanted = [Request(prompt=p, max_new_tokens=9) for p in prompts]
  handles = [at.submit(request) for request in wanted]
  at.run()
  at.scheduler.tree.check()
  for request, handle in zip(wanted, handles, strict=True):
    assert handle.result().tokens.tolist() == alone(model, request)


@pytest.mark.long
def test_pages_of_rows_show_what_rows_share(loaded):
  """A common prefix has one number in all rows, what follows has others."""
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  mesh = rj.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
  at = engine(rj.models.place(model, mesh), mesh)
  assert (at.pages_of_rows() == -1).all()
  common = rng.integers(0, 64, 3 * PAGE).astype(np.int32)
  # Its pages are there for those that come later.
  for n in (1, 2):
    handles = [
      at.submit(
        Request(prompt=np.append(common, np.int32(i)), max_new_tokens=4)
      )
      for i in range(n)
    ]
    most = at.pages_of_rows()
    while at.step():
      now = at.pages_of_rows()
      most = now if (now >= 0).sum() > (most >= 0).sum() else most
    assert all(handle.result() for handle in handles)
  used = most[(most >= 0).any(1)]
  assert used.shape[0] == 2 and (used[:, 4:] == -1).all()
  assert (used[0, :3] == used[1, :3]).all() and used[0, 3] != used[1, 3]
  assert len(set(used[:, :4].ravel().tolist())) == 5
  assert (at.pages_of_rows() == -1).all()
