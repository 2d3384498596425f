"""Drafts by a block that reads the target's cache change no token."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  OptionError,
)
from ringjax.infer import speculate
from ringjax.infer.sampling import Sample, traced
from ringjax.infer.speculate.drafter import Target
from ringjax.kv import CacheConfig
from ringjax.models import longspec
from tests.helpers import refused

LONG = pytest.mark.long
DRAWN = dict(temperature=0.8, top_k=20, seed=3)
SMALL = longspec.LongSpecConfig(window=8)


@functools.cache
def _draft(model):
  return longspec.with_draft(model, SMALL, seed=1)


def drafter(model, **options):
  return speculate.LongSpec(model=_draft(model), adapt=False, **options)


def prompts_of(model, lengths=(9, 23, 4)):
  draw = np.random.default_rng(0)
  return [draw.integers(0, model.config.vocab, n).astype(np.int32)
          for n in lengths]  # fmt: skip


def same(model, drafter, *, count=14, lengths=(9, 23, 4), **how):
  """The report of a call whose tokens are those of one without drafts."""
  prompts, reports = prompts_of(model, lengths), []
  want = rj.infer.generate(model, prompts, max_new_tokens=count, **how)
  got = rj.infer.generate(
    model, prompts, max_new_tokens=count, speculate=drafter,
    report=reports.append, **how,
  )  # fmt: skip
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_array_equal(got.lengths, want.lengths)
  return reports[0].speculation


@pytest.mark.long
@pytest.mark.parametrize(
  ("options", "how"),
  [
    ({}, {}),
    pytest.param({"widths": (3, 4, 2)}, DRAWN, marks=pytest.mark.slow),
    pytest.param({}, DRAWN, marks=pytest.mark.slow),
    pytest.param({"widths": (2, 2)}, {}, marks=pytest.mark.slow),
  ],
  ids=["chain", "drawn tree", "drawn chain", "tree"],
)
def test_no_token_changes(loaded, options, how):
  model, _ = loaded("llama3")
  found = same(model, drafter(model, **options), **how)
  assert found.drafted > found.accepted
  assert found.tokens == found.calls + found.accepted


@pytest.mark.slow
@LONG
@pytest.mark.parametrize(
  "family", ["gemma2", "gpt_oss", "qwen3", "olmo2", "mixtral", "falcon_rw",
             "llama4_text", "qwen3_next", "cohere2", "llama_dynamic",
             "phi3_longrope", "smollm3"])  # fmt: skip
def test_more_families(loaded, family):
  model, _ = loaded(family)
  if model.config.layers[-1].attention.reach is not None:
    refused(OptionError, lambda: _draft(model), "looks back")
    return
  same(model, drafter(model))


@pytest.mark.slow
@LONG
@pytest.mark.parametrize(
  "kind",
  ["int4", "unrotated", "kivi2", CacheConfig(device=16),
   CacheConfig(policy=rj.kv.KeyDiff(budget=12), room=8)],
  ids=str,
)  # fmt: skip
def test_kinds_of_caches(loaded, kind):
  model, _ = loaded("llama3")
  same(model, drafter(model), cache_kind=kind, lengths=(19, 23), count=20)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "how"),
  [
    ({"count": 3}, {"cache_kind": "int4"}),
    pytest.param({"widths": (2, 3)}, {}, marks=LONG),
    pytest.param({"count": 3}, {"keep": "last"}, marks=LONG),
  ],
  ids=str,
)
def test_a_sharded_target(loaded, options, how):
  model, mesh = loaded("llama3", 4)
  same(model, drafter(model, **options), mesh=mesh, **DRAWN, **how)


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("options", [{"count": 2}, {"widths": (2, 4)}], ids=str)
def test_a_law_that_is_accepted_by_chance(loaded, options):
  """Pairs of tokens come as often as without drafts."""
  model, _ = loaded("llama3")
  rows, how = 3000, dict(max_new_tokens=3, temperature=1.0, top_k=2)
  prompts = np.tile(prompts_of(model, (9,))[0], (rows, 1))
  counts = []
  for seed, more in (
    (1, {}), (2, {"speculate": drafter(model, verify="rejection", **options)})
  ):  # fmt: skip
    new = rj.infer.generate(model, prompts, seed=seed, **how, **more).tokens
    found = np.unique(new, axis=0, return_counts=True)
    counts.append({tuple(k): n for k, n in zip(*found, strict=True)})
  keys = sorted({*counts[0], *counts[1]})
  a, b = (np.array([x.get(k, 0) for k in keys], float) for x in counts)
  assert 2 < len(keys) <= 8
  distance = ((a - b) ** 2 / (a + b)).sum()
  assert distance < len(keys) + 5 * np.sqrt(2 * len(keys))


@pytest.mark.slow
def test_a_second_turn_begins_behind_the_first(loaded):
  model, _ = loaded("llama3")
  turns = [prompts_of(model), [x[:3] for x in prompts_of(model)]]
  answers = []
  for how in ({}, {"speculate": drafter(model)}):
    session = rj.infer.Session(model, 96, batch=3)
    answers.append([
      rj.infer.generate(model, turn, max_new_tokens=9, cache=session, **how)
      for turn in turns
    ])  # fmt: skip
  for a, b in zip(*answers, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.long
def test_bytes_of_its_own_cache_do_not_depend_on_the_context(loaded):
  model, _ = loaded("llama3")
  sizes = []
  for length in (20, 180):
    session = rj.infer.Session(model, 256)
    prompts = prompts_of(model, (length,))
    rj.infer.read_context(model, prompts, cache=session)
    target = Target(model, session, traced(Sample()), prompts, False, 8)
    working = drafter(model).begin(target)
    cache = working._session.cache
    sizes.append(cache.nbytes())
    # The window's tokens are those before the next one.
    ring = cache.rings[0].at
    held = np.asarray(ring.pos)[np.asarray(ring.seg) > 0]
    assert sorted(held) == [*range(length - SMALL.window, length)]
  assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------------
# What a draft sees
# ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0, pytest.param(19, marks=LONG)])
def test_drafts_in_decoding_are_those_of_one_call_over_the_text(
  loaded, monkeypatch, pause
):
  """What the n-th drafted token is, a whole text with that lag says."""
  from ringjax.infer.speculate.paces import Paces

  model, _ = loaded("llama3")
  calls = []

  def most(self):
    calls.append(1)
    # A round, and so many steps without drafts.
    return np.full(3, 0 if len(calls) % (pause + 1) else 3)

  if pause:
    monkeypatch.setattr(Paces, "draft_lengths", most)
  draft, prompts = _draft(model), prompts_of(model)
  said = []

  class Says(speculate.LongSpec):
    def begin(self, target):
      working = super().begin(target)
      inner = working.draft

      def drafted(new, state, most):
        found = inner(new, state, most)
        said.append((np.asarray(state.pos), np.asarray(found.tokens)))
        return found

      working.draft = drafted
      return working

  new = rj.infer.generate(
    model, prompts, max_new_tokens=12 if not pause else 64,
    speculate=Says(model=draft, adapt=False, count=3),
  )  # fmt: skip
  assert len(said) > 2
  for row, prompt in enumerate(prompts):
    text = np.concatenate([prompt, new.tokens[row]])
    for pos, tokens in said[:6]:
      at = pos[row]
      if at + 3 >= len(text):
        continue
      told = np.zeros((1, 96 if pause else 40), np.int32)
      told[0, : at + 1] = text[: at + 1]
      for n in range(3):
        logits = draft(told, lag=n + 1)
        assert int(np.argmax(logits[0, at + n])) == tokens[row, n]
        told[0, at + n + 1] = tokens[row, n]


@pytest.mark.parametrize("lag", [1, pytest.param(3, marks=LONG)])
def test_a_query_sees_keys_that_are_as_far_behind(loaded, lag):
  model, _ = loaded("llama3")
  made = longspec.with_draft(model, SMALL, seed=1)
  # Without attention of its own a change comes through the target's keys.
  weight = made.block.attention.o.weight
  weight[...] = 0 * weight[...]
  text = prompts_of(model, (30,))[0][None]
  other = text.copy()
  other[0, 12] = (other[0, 12] + 1) % model.config.vocab
  seg = np.where(np.arange(30) < 20, 1, 2)[None]
  call = lambda text: made(text, lag=lag, segment_ids=seg, positions=at)
  # Positions that jump are no distances.
  at = np.where(np.arange(30) < 2, 0, 900) + np.arange(30)
  far = np.abs(np.asarray(call(text) - call(other))).max((0, 2))
  # The token itself, and queries of its document.
  assert np.flatnonzero(far).tolist() == [12, *range(12 + lag, 20)]


# ---------------------------------------------------------------------------
# Folders and bad input
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_a_folder_comes_back_and_is_of_one_target(loaded, tmp_path):
  model, _ = loaded("llama3")
  made = longspec.with_draft(model, SMALL, init="random", seed=5)
  longspec.save(made, tmp_path / "draft")
  back = longspec.load(tmp_path / "draft", model)
  assert back.draft_config == SMALL
  equal = jax.tree.map(np.array_equal, made.block, back.block)
  assert all(jax.tree.leaves(equal))
  same(model, f"longspec:count=3,model={tmp_path / 'draft'}", count=8)
  other, _ = loaded("llama_gqa_bias")
  ask = lambda model, how: rj.infer.generate(
    model, [[1, 2, 3]], max_new_tokens=3, speculate=how
  )
  name = f"longspec:model={tmp_path / 'draft'}"
  refused(CheckpointMismatchError, lambda: ask(other, name), "another target")
  refused(
    CheckpointMismatchError, lambda: ask(other, drafter(model)), "another"
  )
  refused(OptionError, lambda: ask(model, "longspec"), "model=FOLDER")
  refused(
    CheckpointFormatError, lambda: ask(model, "longspec:model=none"), "none"
  )
  file = tmp_path / "draft" / longspec.TENSORS
  data = file.read_bytes()
  file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
  refused(CheckpointFormatError, lambda: ask(model, name), "digest")


def test_targets_whose_last_layer_has_no_keys_of_all_tokens(loaded):
  latent, _ = loaded("deepseek_v3")
  refused(OptionError, lambda: _draft(latent), "Latent")
  windowed, _ = loaded("mistral")
  refused(OptionError, lambda: _draft(windowed), "looks back")


@pytest.mark.slow
def test_a_planted_bug_is_seen(loaded, monkeypatch):
  """Drafts of wrong positions are not those of the text."""
  from ringjax.infer.speculate import longspec as drafting

  found = drafting._BlockDrafting
  monkeypatch.setattr(found, "_at", property(
    lambda self: self.__dict__["at"] + 1,
    lambda self, x: self.__dict__.__setitem__("at", x)), raising=False,
  )  # fmt: skip
  with pytest.raises(AssertionError):
    test_drafts_in_decoding_are_those_of_one_call_over_the_text(
      loaded, monkeypatch, 0
    )
