"""launch.bench speculate: drafters beside plain decoding."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import ringjax as rj
from benchmarks.speculation.speculating import (
  SpeculationBenchmark,
  SpeculationSettings,
)
from ringjax.bench.speculation_tasks import KINDS, PROSE, prompt
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.models import small
from tests import eagle_heads
from tests.helpers import refused

TINY = dict(
  requests=1, prompt_tokens=(400,), new_tokens=24, rounds=1, drafted=4
)


def run(**options):
  said = []
  files = {k: options.pop(k) for k in ("json", "plot") if k in options}
  settings = SpeculationSettings(**{**TINY, **options})
  found = SpeculationBenchmark.run(settings, say=said.append, **files)
  return found, "\n".join(said)


@pytest.mark.parametrize("kind", [*KINDS, PROSE, "document"])
def test_prompts_are_functions_of_their_seeds(kind):
  of = lambda seed, length=500: prompt(kind, Bytes(), length, seed)
  np.testing.assert_array_equal(of(1), of(1))
  assert of(1).shape == (500,) and of(1, 901).shape == (901,)
  assert of(1).dtype == np.int32 and (of(1) != of(2)).any()


@pytest.mark.slow
def test_drafts_are_counted_and_compared(tmp_path):
  pytest.importorskip("matplotlib")
  out, plot = tmp_path / "out.json", tmp_path / "plot.png"
  found, said = run(
    parts=("summary",), contestants=("lookup", "never"), json=str(out),
    plot=str(plot),
  )  # fmt: skip
  assert plot.read_bytes()[:4] == b"\x89PNG"
  (row,) = json.loads(out.read_text())["rows"]
  assert row["kind"] == "summary" and row["new_tokens"] == 24
  results = row["results"]
  assert all(one["equal"] for one in results.values())
  # The call reads a prompt's last token, and so gives the first new one.
  lookup, never = results["lookup"], results["never"]
  assert lookup["tokens_per_call"] == 23 / lookup["calls"] > 2
  assert lookup["x_plain"] > 0 and "tokens_per_call" not in results["plain"]
  offered, stayed = np.array(lookup["by_position"]).T
  assert (stayed <= offered).all() and (offered[1:] <= stayed[:-1]).all()
  # Its drafts end, and none of them is right.
  assert never["acceptance"] == 0 and never["calls"] == 23
  assert 0 < never["drafted"] < 4 * 23
  assert found["summary"]["lookup"]["equal"]
  assert "a call" in said and "DIFFERENT" not in said


@pytest.mark.slow
@pytest.mark.long
def test_all_drafters(tmp_path):
  config = json.loads((small.path() / "config.json").read_text())
  # Half of one layer is one layer: a draft that is always right.
  config |= dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=16)  # fmt: skip
  rj.models.save(rj.models.create(config, seed=0), tmp_path)
  for file in small.path().glob("tokenizer*.json"):
    (tmp_path / file.name).write_bytes(file.read_bytes())
  plot = tmp_path / "plot.png"
  found, _ = run(
    model=str(tmp_path), parts=("math",), draft=str(tmp_path),
    prompt_tokens=(300, 400), plot=str(plot),
  )  # fmt: skip
  assert plot.read_bytes()[:4] == b"\x89PNG"
  row, longer = found["rows"]
  assert (row["tokens"], longer["tokens"]) == (300, 400)
  results = [*row["results"].values(), *longer["results"].values()]
  assert all(one["equal"] for one in results)
  for name in ("early", "model", "tree"):
    assert row["results"][name]["tokens_per_call"] > 4


@pytest.mark.slow
@pytest.mark.long
def test_behind_a_document():
  found, said = run(context=512, devices=4, contestants=("lookup",))
  (row,) = found["rows"]
  assert row["kind"] == "document" and row["tokens"] == 512
  assert row["results"]["lookup"]["devices"] == 4
  assert row["results"]["lookup"]["equal"] and "4 device(s)" in said


@pytest.mark.long
def test_compared_with_transformers():
  pytest.importorskip("transformers")
  pytest.importorskip("torch")
  found, _ = run(
    parts=("chat",), contestants=("lookup",), compare="transformers",
    draft=str(small.path()),
  )  # fmt: skip
  results = found["rows"][0]["results"]
  assert results["transformers_lookup"]["x_plain"] > 0
  assert results["transformers_assisted_1"]["tokens_per_s"] > 0
  # On the same weights the same tokens, but for logits within rounding.
  assert results["transformers"]["max_abs_difference"] < 0.5


def test_bad_input_is_refused(monkeypatch, command, capsys):
  for options, word in (
    (dict(parts=("code",)), "parts"),
    (dict(contestants=("medusa",)), "contestants"),
    (dict(lengths="short"), "lengths"),
    (dict(drafted=0), "drafted"),
    (dict(contestants=("longspec",)), "head"),
    (dict(contestants=("eagle3", "longspec"), head="x"), "one of them"),
    (dict(compare="vllm"), "compare"),
    (dict(compare="transformers", devices=8), "--context"),
  ):
    refused(OptionError, lambda o=options: SpeculationSettings(**o), word)
  assert command("speculate", "--parts=code") == 2
  assert "chat, translation" in capsys.readouterr().err
  monkeypatch.setitem(sys.modules, "torch", None)
  refused(OptionError, lambda: run(compare="transformers"), "torch", "[oracle]")


@pytest.mark.slow
def test_a_draft_block_is_a_contestant(tmp_path):
  target = rj.models.load(small.path())
  config = rj.models.longspec.LongSpecConfig(window=16)
  draft = rj.models.longspec.with_draft(target, config)
  rj.models.longspec.save(draft, tmp_path / "draft")
  found, _ = run(
    parts=("prose",), contestants=("longspec",), head=str(tmp_path / "draft")
  )
  result = found["rows"][0]["results"]["longspec"]
  assert result["equal"] and result["tokens_per_call"] >= 1


def test_transformers_gets_the_target_of_a_head(tmp_path):
  target = eagle_heads.target()
  rj.models.save(target, tmp_path / "target")
  settings = SpeculationSettings(
    model=str(tmp_path / "target"), contestants=("eagle3",),
    head=str(eagle_heads.write(tmp_path / "head")), compare="transformers",
  )  # fmt: skip
  benchmark = SpeculationBenchmark(settings)
  assert benchmark.model.config.predicts is not None
  with benchmark.stack:
    written = rj.models.load(benchmark.path)
  assert written.config == target.config
