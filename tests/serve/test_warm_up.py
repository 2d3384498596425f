"""After `warm_up` no request of any kind compiles a program."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.models import longspec
from ringjax.serve import Request, RowSampling
from tests.helpers import refused
from tests.serve.test_engine import engine

LONG = pytest.mark.long
_compiled = [0]


def _heard(event, duration, **_):
  del duration
  _compiled[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_heard)


def compiled(call):
  """How many programs a call compiles."""
  before = _compiled[0]
  call()
  return _compiled[0] - before


def kinds(at, rng):
  """Requests of every kind that an engine takes, by name."""
  vocab = at.vocab
  prompt = lambda n=20: rng.integers(0, vocab, n).astype(np.int32)
  one = lambda new=6, size=20, **options: Request(
    prompt=prompt(size), max_new_tokens=new, **options
  )
  even = np.arange(vocab) % 2 == 0
  common = prompt(40)
  drawn = RowSampling(
    temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, logit_bias={1: 2.0}
  )
  penalties = RowSampling(
    repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2
  )
  every = {
    "plain": [one()],
    "one token": [one(1, 1)],
    "mask": [one(mask=lambda tokens: even), one()],
    "mask of some": [one(mask=lambda tokens: even if tokens.size else None)],
    "penalties": [one(sampling=penalties), one(8, sampling=penalties)],
    "drawn": [one(sampling=drawn), one()],
    "logprobs": [one(logprobs=5), one(logprobs=0)],
    "several": [one(n=3, sampling=drawn), one(best_of=2)],
    "stop": [one(stop=3)],
    "begun": [one(begun=((1, 2, 3),))],
    "prefix": [Request(prompt=common, max_new_tokens=3)],
    "found prefix": [
      Request(prompt=common, max_new_tokens=n) for n in (4, 5, 9)
    ],
    # More than there is room for: rows are preempted and come back.
    "many": [one(28, int(n)) for n in rng.integers(20, 50, 5)],
    "found again": [Request(prompt=common, max_new_tokens=4)],
  }
  if at.space is None:
    every["beams"] = [one(beams=3, n=2), one(20, beams=2)]
  if at.scheduler.limits.one_piece:
    del every["found prefix"], every["found again"]
  if len(at._adapters) > 1:
    every["adapter"] = [one(adapter="a"), one()]
  return every


def check(at, rng):
  at.warm_up()
  # Again it does nothing new.
  assert compiled(at.warm_up) == 0

  def serve(several):
    handles = [at.submit(request) for request in several]
    at.run()
    for handle in handles:
      assert handle.result().finish in ("stop", "length")

  found = {
    name: compiled(functools.partial(serve, several))
    for name, several in kinds(at, rng).items()
  }
  assert not any(found.values()), found
  assert at.counters.requests == at.counters.finished
  return at.counters


def drafter(model, name):
  if name == "model":
    return speculate.DraftModel(model=model, count=2)
  if name == "block":
    config = longspec.LongSpecConfig(window=24)
    draft = longspec.with_draft(model, config, seed=1)
    return speculate.LongSpec(model=draft, count=2)
  return name


EVERY = [
  ("llama3", 1, dict(preempt="swap")),
  pytest.param("llama3", 4, dict(preempt="swap"), marks=LONG),
  pytest.param("gpt_oss", 4, dict(preempt="recompute"), marks=LONG),
  pytest.param("qwen3_next", 1, dict(preempt="swap"), marks=LONG),
  pytest.param("qwen3_next", 4, dict(preempt="swap"), marks=LONG),
  pytest.param("gpt_oss", 1, dict(store=True), marks=LONG),
  pytest.param("gpt_oss", 4, dict(store=True), marks=LONG),
  pytest.param("llama3", 1, dict(shared_reads="always"), marks=LONG),
  pytest.param("llama3", 1, dict(layout="contiguous"), marks=LONG),
  pytest.param("gpt_oss", 1, dict(layout="doubling"), marks=LONG),
  pytest.param("llama3", 4, dict(layout="doubling"), marks=LONG),
  pytest.param("llama3", 1, dict(layer_parts=2), marks=LONG),
  pytest.param("llama3", 4, dict(layer_parts=2), marks=LONG),
  pytest.param("llama3", 1, dict(adapters=True), marks=LONG),
  pytest.param("llama3", 4, dict(adapters=True), marks=LONG),
  *(
    pytest.param("llama3", devices, dict(speculate=how), marks=LONG)
    for how in (
      "lookup:count=3",
      "early",
      "early:widths=(2,2),best=3",
      "model",
      "block",
    )
    for devices in (1, 4)
  ),
]


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(("family", "devices", "options"), EVERY)
def test_no_request_compiles_after_it(loaded, family, devices, options):
  model, mesh = loaded(family, devices)
  options = dict(options)
  if options.pop("store", False):
    options["store"] = rj.store.Store(host=1 << 24)
  if options.pop("adapters", False):
    how = rj.train.Lora(rank=2)
    options["adapters"] = {"a": (how, how.start(model))}
  if "speculate" in options:
    options["speculate"] = drafter(model, options["speculate"])
  rng = np.random.default_rng(0)
  with engine(model, mesh, capacity=160, **options) as at:
    counters = check(at, rng)
  if options.get("preempt") == "swap":
    assert counters.swapped
  if "store" in options:
    assert counters.pages_out and counters.pages_in
  if "speculate" in options:
    assert counters.drafted


def test_a_first_mask_compiles_nothing(loaded):
  """Neither in an engine that nothing has warmed up."""
  model, _ = loaded("llama3")
  at = engine(model)
  prompt, even = np.arange(20), np.arange(model.config.vocab) % 2 == 0
  ask = lambda **options: at.submit(
    Request(prompt=prompt, max_new_tokens=4, **options)
  ).result()
  ask()
  assert compiled(lambda: ask(mask=lambda tokens: even)) == 0


def test_what_it_leaves(loaded):
  """Answers behind it are those without, and nothing is counted."""
  model, _ = loaded("llama3")
  ask = Request(prompt=np.arange(30), max_new_tokens=6, logprobs=2)
  plain, warmed = engine(model), engine(model)
  warmed.warm_up()
  assert vars(warmed.counters) == vars(engine(model).counters)
  first, second = (at.submit(ask).result().answers[0] for at in (plain, warmed))
  assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
  # Behind requests too, whose prefixes stay.
  warmed.warm_up()
  again = warmed.submit(ask).result()
  assert again.answers[0].logprobs == first.logprobs
  assert again.cached_tokens == 16


def test_an_engine_at_work_refuses_it(loaded):
  model, _ = loaded("llama3")
  at = engine(model)
  handle = at.submit(Request(prompt=np.arange(30), max_new_tokens=6))
  refused(OptionError, at.warm_up, "warm_up", "1 requests", "run()")
  handle.cancel()
  at.close()
  refused(OptionError, at.warm_up, "closed")
