"""How many drafted tokens a target accepts."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

import ringjax as rj
from launch import evaluate
from launch.shared import common
from ringjax.errors import DataError, OptionError
from ringjax.eval import draft_acceptance
from ringjax.models import longspec, small
from tests import checkpoints, eagle_heads
from tests.helpers import refused


@pytest.mark.slow
def test_acceptance_is_that_of_drafts_one_after_the_other():
  target = rj.models.create(checkpoints.config("llama3"), seed=1)
  draft = longspec.with_draft(target, longspec.LongSpecConfig(window=8))
  text = np.random.default_rng(0).integers(0, 90, 20).astype(np.int32)
  count, tokens = 3, 20
  plain, far = draft_acceptance(
    draft, [text], offsets=(0, 50), tokens=tokens, count=count
  )
  whole = [
    *text.tolist(),
    *rj.infer.generate(target, [text], max_new_tokens=tokens)[0].tolist(),
  ]
  right = []
  for begin in range(len(text) - 1, len(whole) - count):
    told = np.zeros((1, 48), np.int32)
    told[0, : begin + 1] = whole[: begin + 1]
    stayed = 0
    for n in range(count):
      at = begin + n
      token = int(np.argmax(draft(told, lag=n + 1)[0, at]))
      told[0, at + 1] = token
      if token != whole[at + 1]:
        break
      stayed += 1
    right.append(stayed)
  assert plain.tokens == len(right)
  assert plain.tokens_per_call == pytest.approx(1 + np.mean(right))
  assert plain.acceptance == pytest.approx(np.mean(right) / count)
  # Of another place the same text is another one to the target.
  assert far.loss != pytest.approx(plain.loss, abs=1e-4)
  logits = np.asarray(target(text[None]), np.float64)[0, :-1]
  law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  assert plain.loss == pytest.approx(
    -law[np.arange(19), text[1:]].mean(), abs=1e-4
  )
  refused(DataError, lambda: draft_acceptance(draft, []), "longer texts")


@pytest.mark.slow
def test_first_tokens_of_a_head_are_those_of_its_drafts():
  model = eagle_heads.model()
  text = np.random.default_rng(0).integers(0, 14, 20).astype(np.int32)
  options = {"offsets": (0, 50), "tokens": 8}
  plain, far = draft_acceptance(model, [text], count=1, **options)
  new = rj.infer.generate(model, [text], max_new_tokens=8)[0]
  whole = np.concatenate([text, np.asarray(new)])
  config, base = eagle_heads.settings(), eagle_heads.target()
  weights = eagle_heads.tensors(config)
  drafted = lambda n: eagle_heads.drafts(base, weights, config, whole[:n], 1)
  right = [drafted(n)[0][0] == whole[n] for n in range(len(text), len(whole))]
  assert plain.tokens == len(right)
  assert plain.acceptance == pytest.approx(np.mean(right))
  assert far.tokens == plain.tokens


def test_models_that_draft_nothing_are_refused():
  model, texts = eagle_heads.model(), [np.arange(9)]
  long_drafts = lambda: draft_acceptance(model, texts, count=2)
  refused(OptionError, long_drafts, "count", "launch.bench speculate")
  alone = lambda: draft_acceptance(eagle_heads.target(), texts, count=1)
  refused(OptionError, alone, "draft", "eagle3")


@pytest.mark.long
def test_the_command_measures_each_draft(tmp_path):
  model = rj.models.load(small.path())
  config = longspec.LongSpecConfig(window=8, hidden=16)
  longspec.save(longspec.with_draft(model, config), tmp_path / "draft")
  folder, file = str(tmp_path / "draft"), tmp_path / "figures.json"

  def run(*flags):
    values, words = common.parse_words(
      "evaluate", evaluate.define, ["drafts", "--mesh=seq:1", *flags]
    )
    out, said = io.StringIO(), io.StringIO()
    status = evaluate.run(values, words, stdout=out, stderr=said)
    return status, out.getvalue(), said.getvalue()

  status, out, _ = run(
    f"--draft={folder}", "--offsets=0,100", "--context=16", "--question=8",
    "--rows=1", f"--out={file}",
  )  # fmt: skip
  assert status == 0 and "tokens a call" in out
  found = json.loads(file.read_text())["drafts"][folder]
  assert [x["offset"] for x in found] == [0, 100]
  status, _, said = run()
  assert status == 2 and "configs/drafts/longspec.py" in said
