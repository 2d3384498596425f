"""Choices of pages of host memory, and keys that are rebuilt on the devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.eval import page_recall
from ringjax.kv import kind_text
from ringjax.kv.offload.mean_pages import Means
from tests.contracts import cache as contract
from tests.helpers import SMALL, make_mesh
from tests.kv.test_chosen_tiered import CAPACITY, B, run, tokens_of

MEANS = "landmarks=means,outlier_pages=1"
# As many vectors as the keys of the tests' models have numbers.
WHOLE = "unrotated=True,rank=16"


def defined(q, keys, pages, outliers):
  """Pages of each head by definition: q [K, G, H], keys [K, M, P, H]."""
  chosen = []
  for queries, head in zip(q, keys, strict=True):
    mean = head.mean(1)
    s = queries @ mean.T / np.sqrt(q.shape[-1])
    weights = np.exp(s - s.max(1, keepdims=True))
    best = (weights / weights.sum(1, keepdims=True)).max(0)
    dots = (head * mean[:, None]).sum(-1)
    norms = (
      np.linalg.norm(head, axis=-1) * np.linalg.norm(mean, axis=-1)[:, None]
    )
    unlike = np.argsort((dots / norms).min(1))[:outliers].tolist()
    others = [m for m in np.argsort(-best) if m not in unlike]
    chosen.append({*unlike, *others[: pages - outliers]})
  return chosen


@pytest.mark.parametrize("outliers", [0, 2])
def test_pages_are_those_of_the_definition(outliers):
  rng = np.random.default_rng(0)
  q = rng.normal(size=(2, 3, 16)).astype(np.float32)
  keys = rng.normal(size=(2, 9, 4, 16)).astype(np.float32)
  choice, real = Means(outliers), jnp.ones((1, 1, 9, 4, 1), bool)
  landmarks = choice.landmarks(jnp.asarray(keys[None]), real)
  places, reads = choice.ranked(
    jnp.asarray(q[None, :, :, None]),
    landmarks,
    jnp.ones((1, 2, 9), bool),
    (0, *(min(n, 4) for n in range(1, 10))),
  )
  assert reads.sum() == 2 * 4
  got = [{*np.asarray(x[: reads[0, n, 0].sum()])} for n, x in
         enumerate(np.asarray(places[0, :, 0]))]  # fmt: skip
  assert got == defined(q, keys, 4, outliers)


@pytest.mark.long
@pytest.mark.parametrize(
  "kind",
  [
    f"select:budget=1.0,{MEANS}",
    f"select:budget=1.0,{WHOLE}",
    f"select:budget=1.0,{MEANS},{WHOLE}",
  ],
)
def test_all_pages_and_vectors_change_nothing(kind):
  ends = (40, 41, 45, 46, 47, 48)
  got, cache = run(f"{kind},device=8,page=8,hot=16", ends=ends, flushes=6)
  want, _ = run("dense", ends=ends, flushes=6)
  contract.close(got, want, 1e-5 * max(1, np.abs(want).max()))
  fetches = cache.fetches()
  key_bytes = 8 * 16 * 4
  copied = key_bytes if "rank" in kind else 2 * key_bytes
  assert fetches.misses and fetches.bytes == fetches.misses * copied


@pytest.mark.slow
def test_fewer_vectors_are_an_approximation_of_the_first_keys():
  """The error falls with the rank, and is less than that of no keys."""
  errors = []
  want, _ = run("dense")
  for rank in (4, 8, 16):
    kind = (
      f"select:budget=1.0,unrotated=True,rank={rank},device=8,page=8,hot=16"
    )
    got, _ = run(kind)
    errors.append(np.abs(got[:, 40:] - want[:, 40:]).mean())
  assert errors[0] > errors[1] > errors[2]


@pytest.mark.long
@pytest.mark.parametrize("options", [MEANS, f"{MEANS},unrotated=True,rank=4"])
def test_rows_turns_and_drafts_are_independent(options):
  kind = kind_text.parse(f"select:budget=16,page=8,device=8,hot=16,{options}")
  model, text = contract.model(1, "grouped"), tokens_of(60)
  dialogue = [[text[0, :50], text[1, :21]], [text[1, 21:30], text[0, 50:55]]]

  def talk(rows, **more):
    session = rj.infer.Session(model, 160, batch=len(rows), cache_kind=kind)
    return [
      rj.infer.generate(
        model, [turn[n] for n in rows], max_new_tokens=20, cache=session, **more
      ).tokens.tolist()
      for turn in dialogue
    ]

  two_rows = talk([0, 1])
  assert [[first] for first, _ in two_rows] == talk([0])
  assert [[second] for _, second in two_rows] == talk([1])
  assert talk([0, 1], speculate="lookup") == two_rows


@pytest.mark.slow
def test_heads_may_be_sharded():
  config = {**SMALL, "model_type": "qwen3", "head_dim": 16}
  kind = kind_text.parse(
    f"select:budget=8,page=8,device=8,hot=16,{MEANS},unrotated=True,rank=8"
  )
  text = [x.tolist() for x in tokens_of(50)]

  def ask(mesh):
    model = rj.models.create(config, seed=0, mesh=mesh)
    return rj.infer.generate(
      model, text, max_new_tokens=10, cache_kind=kind
    ).tokens.tolist()

  assert ask(rj.make_mesh((2,), ("model",))) == ask(None)


@pytest.mark.parametrize(
  ("text", "name"),
  [
    ("dense:device=8,landmarks=means", "landmarks"),
    ("select:landmarks=means", "landmarks"),
    ("select:device=8,hot=64,page=8,landmarks=median", "landmarks"),
    ("select:device=8,hot=64,page=8,outlier_pages=2", "outlier_pages"),
    ("dense:device=8,hot=64,page=8,unrotated=True,rank=4", "rank"),
    ("select:device=8,hot=64,page=8,rank=4", "rank"),
    ("int8+select:device=8,hot=64,page=8,unrotated=True,rank=4", "rank"),
  ],
)
def test_options_that_make_no_sense_are_refused_by_name(text, name):
  with pytest.raises(OptionError, match=name):
    kind_text.parse(text)


def test_ranks_that_do_not_fit_are_refused():
  kind = kind_text.parse("select:device=8,hot=64,page=8,unrotated=True,rank=17")
  model = contract.model(1, "grouped")
  with pytest.raises(OptionError, match="rank.*at most 16"):
    model.init_cache(B, CAPACITY, kind=kind)
  kind = kind_text.parse("select:device=8,hot=64,page=8,unrotated=True,rank=4")
  sharded = rj.models.create(SMALL, seed=0, mesh=make_mesh(2, "auto"))
  with pytest.raises(OptionError, match="rank.*2 shards"):
    rj.infer.Session(sharded, 96, batch=1, cache_kind=kind)


@pytest.mark.long
def test_recall_is_what_is_read():
  """All of it with all pages; with one page the sums of a definition."""
  model, text = contract.model(1, "grouped"), tokens_of(60)
  options = dict(prompt=48, every=4, top=8)
  base = "page=8,device=8,hot=32"
  every = page_recall(model, text, f"select:budget=1.0,{base}", **options)
  assert every.recall == 1 and every.attention == pytest.approx(1, abs=1e-6)
  few = page_recall(model, text, f"select:budget=8,{base}", **options)
  assert few.queries == 3 * B and len(few.layers) == len(every.layers)
  for layer in few.layers:
    assert 0 < layer.worst_head <= layer.recall < 1
    assert 0 < layer.attention < 1
  assert few.fetches.misses > 0 and few.record()["top"] == 8
  # The same tokens are predicted with all pages as by the model itself.
  logits = np.asarray(model(text), np.float64)
  scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nll = -np.take_along_axis(scores[:, 48:59], text[:, 49:, None], 2).mean()
  assert every.nll == pytest.approx(nll, abs=1e-5) and few.nll != every.nll


def test_kinds_without_a_choice_have_no_recall():
  model, text = contract.model(1, "grouped"), tokens_of(60)
  with pytest.raises(OptionError, match="kind"):
    page_recall(model, text, "dense:device=8", prompt=40)
  with pytest.raises(OptionError, match="prompt"):
    page_recall(model, text, "select:device=8,hot=64,page=8", prompt=60)
