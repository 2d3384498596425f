"""A dense attention function of the caller reads the keys of requests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import InputTypeError, OptionError, ShapeError
from ringjax.infer.generate import generate
from ringjax.nn.attention_layers.attention_function import check_function
from ringjax.serve import Request
from tests.helpers import refused
from tests.serve.test_engine import alone, engine, requests, served

DENSE = jax.nn.dot_product_attention
PROMPTS = [np.arange(1, 20, dtype=np.int32), np.arange(5, 12, dtype=np.int32)]


class Noting:
  """Softmax attention in plain JAX, which notes what it is called with."""

  def __init__(self):
    self.shapes = []

  def __call__(self, query, key, value, *, mask, scale):
    self.shapes.append((query.shape, key.shape, value.shape, mask.shape))
    group = query.shape[2] // key.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (key, value))
    s = jnp.einsum("btnh,bsnh->bnts", query, k) * scale
    p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf))
    return jnp.einsum("bnts,bsnj->btnj", p, v)


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.parametrize(
  "family",
  ["llama3", *(pytest.param(x, marks=pytest.mark.long) for x in (
    "gemma3", "qwen3_next"))],
)  # fmt: skip
def test_a_session_calls_the_function(loaded, family):
  """Tokens are those of the library's attention, turn after turn."""
  model, _ = loaded(family)
  run = functools.partial(generate, model, max_new_tokens=20)
  want = run(PROMPTS)
  noted = Noting()
  session = rj.infer.Session(model, 80, batch=2, attention_fn=noted, grow=16)
  first = run(PROMPTS, cache=session)
  assert first.tokens.tolist() == want.tokens.tolist()
  b, n, h = 2, *noted.shapes[0][0][2:]
  for query, key, value, mask in noted.shapes:
    assert (query[0], *query[2:]) == (b, n, h)
    assert key[0] == b and key[1] % 16 == 0 and key[3] == h
    assert value[:3] == key[:3]
    assert mask == (b, 1, query[1], key[1])
  # It reads what rows have reached, not the capacity.
  reached = {key[1] for _, key, *_ in noted.shapes}
  assert max(reached) == 48 and len(reached) > 1
  plain = rj.infer.Session(model, 80, batch=2)
  assert run(PROMPTS, cache=plain).tokens.tolist() == want.tokens.tolist()
  again = [np.arange(3, 9, dtype=np.int32)] * 2
  both = [run(again, cache=x).tokens.tolist() for x in (session, plain)]
  assert both[0] == both[1]


@pytest.mark.long
def test_memory_grows_with_the_tokens(loaded):
  """Bytes follow what was read; the capacity alone takes none."""
  model, _ = loaded("llama3")
  short = rj.infer.Session(model, 128, grow=16)
  whole = rj.infer.Session(model, 128)
  size = lambda x: sum(n.nbytes for n in jax.tree.leaves(x.cache.slots))
  each = size(whole) // whole.cache.capacity
  assert size(short) == 16 * each
  prompt = [PROMPTS[0]]
  reached = []
  for _ in range(3):
    new = [generate(model, prompt, max_new_tokens=9, cache=x).tokens.tolist()
           for x in (short, whole)]  # fmt: skip
    assert new[0] == new[1]
    tokens = int(short.lengths[0])
    assert tokens <= short.cache.capacity < tokens + 16 + 1
    assert size(short) == short.cache.capacity * each
    reached.append(short.cache.capacity)
  assert reached == sorted({*reached})
  assert short.room() == whole.room()
  blocks = short.cache.export(0, 0, tokens)
  other = rj.infer.Session(model, 128, grow=16)
  other.cache = other.cache.load(0, blocks)
  assert int(other.lengths[0]) == tokens
  short.restart()
  assert short.cache.capacity == 16 and short.empty


def in_engine(loaded, layout, **options):
  model, _ = loaded("llama3")
  rng = np.random.default_rng(0)
  wanted = requests(rng, model.config.vocab, 8)
  with engine(model, layout=layout, attention_fn=DENSE, **options) as at:
    results = served(at, wanted, rng)
    assert at.space.space_counters.maps
  how = {}
  if "cache_kind" in options:
    how = dict(cache_kind=options["cache_kind"], prefill="chunked")
  for request, result in zip(wanted, results, strict=True):
    assert result.tokens.tolist() == alone(model, request, **how)


@pytest.mark.long
def test_an_engine_calls_the_function(loaded):
  in_engine(loaded, "contiguous")


@pytest.mark.long
@pytest.mark.parametrize(
  ("layout", "options"),
  [
    ("doubling", {}),
    ("contiguous", dict(speculate="lookup:count=2,adapt=false")),
    ("doubling", dict(layer_parts=2)),
    ("contiguous", dict(cache_kind="int8")),
  ],
)
def test_more_engines_call_the_function(loaded, layout, options):
  in_engine(loaded, layout, **options)


@pytest.mark.long
def test_an_engine_gives_it_what_rows_have_reached(loaded):
  """Physical memory follows the tokens, and so do the arrays."""
  model, _ = loaded("llama3")
  noted = Noting()
  with engine(
    model, layout="contiguous", attention_fn=noted, longest=1024, capacity=2048
  ) as at:
    before = at.resident()
    answer = at.submit(Request(prompt=PROMPTS[0], max_new_tokens=4)).result()
    few = {key[1] for _, key, *_ in noted.shapes}
    assert few == {128} and at.resident() - before < at.reserved() // 4
    assert answer.tokens.tolist() == alone(
      model, Request(prompt=PROMPTS[0], max_new_tokens=4)
    )
    noted.shapes.clear()
    at.warm_up()
    assert {key[1] for _, key, *_ in noted.shapes} == {256, 512, 1024}


@pytest.mark.long
def test_what_is_refused(loaded):
  model, _ = loaded("llama3")
  run = functools.partial(generate, model, PROMPTS, max_new_tokens=2)
  own = dict(attention_fn=DENSE)
  layers = model.config.layers
  refused(InputTypeError, lambda: check_function(3, layers), "attention_fn")
  refused(OptionError, lambda: run(**own, speculate="lookup"), "speculate")
  refused(OptionError, lambda: run(**own, prefill="dense"), "'chunked'")
  refused(OptionError, lambda: run(**own, cache_kind="snapkv"), "snapkv")
  refused(OptionError, lambda: run(**own, rows_at_once=1), "attention_fn")
  refused(OptionError, lambda: run(grow=8, contexts=[[1, 2]]), "grow")
  refused(OptionError, lambda: run(grow=0), "grow")
  wrong = lambda query, key, value, mask, scale: query[:, :1]
  refused(ShapeError, lambda: run(attention_fn=wrong), "attention_fn")
  session = rj.infer.Session(model, 40, batch=2)
  refused(OptionError, lambda: run(**own, cache=session), "session's own")
  sunk, _ = loaded("gpt_oss")
  refused(OptionError, lambda: rj.infer.Session(sunk, 8, **own), "sinks")
  made = lambda **more: engine(model, **own, **more)
  refused(OptionError, made, "layout='pages'", "layout='contiguous'")
  kind = dict(layout="contiguous", cache_kind="unrotated")
  refused(OptionError, lambda: made(**kind), "unrotated")
  many, mesh = loaded("llama3", 4)
  there = lambda: rj.infer.Session(many, 40, mesh=mesh, **own)
  refused(OptionError, there, "4 shards")
