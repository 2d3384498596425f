"""Codecs on random models of every family."""

from __future__ import annotations

import json

import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.eval import RANDOM_FAMILIES, family_errors
from ringjax.eval.family_errors import random_config
from ringjax.models.families import FAMILIES
from tests.eval.test_eval import run

KINDS = {name: rj.kv.KINDS[name] for name in ("int8", "int4", "int2", "nuq4")}


def errors(families, kinds):
  found = family_errors(kinds, families, length=48)
  assert [(x.family, x.name) for x in found] == [
    (family, name) for family in families for name in kinds
  ]
  return {(x.family, x.name): x.cost.far for x in found}


@pytest.mark.slow
def test_fewer_bits_err_more():
  found = errors(["llama"], KINDS)
  eight, four, two, book = found.values()
  assert 0 < eight < 0.02 < book < 2 * four < two


def test_every_family_is_there():
  """By the name that its config.json has, and as a model of its kind."""
  types = {random_config(name)["model_type"] for name in RANDOM_FAMILIES}
  text = (
    "gemma3", "gemma3n", "gemma4", "glm5_next", "llama4", "minimax_m3_vl",
    "mistral_large4", "muse_glimmer",
    "muse_spark",
    "qwen3_5", "qwen3_5_moe", "qwen4_exp",
  )  # fmt: skip
  # Without keys there is nothing to encode.
  with_keys = set(FAMILIES) - {"mamba", "mamba2", "falcon_mamba"}
  assert {n + "_text" if n in text else n for n in with_keys} <= types


def test_what_is_refused():
  with pytest.raises(OptionError, match="wanted one of llama"):
    family_errors(KINDS, ["lama"])
  with pytest.raises(OptionError, match="kinds: got none"):
    family_errors({})


@pytest.mark.parametrize(
  "family",
  [
    pytest.param(x, marks=pytest.mark.slow if n % 3 else pytest.mark.long)
    for n, x in enumerate(RANDOM_FAMILIES)
  ],
)
def test_any_family(family):
  found = errors([family], {name: KINDS[name] for name in ("int8", "int2")})
  eight, two = found.values()
  assert 0 < 4 * eight < two


@pytest.mark.long
def test_by_script(tmp_path):
  out = tmp_path / "found.json"
  flags = ["--families=glm", "--cache=int4", "--lengths=32", f"--out={out}"]
  status, text, _ = run("families", *flags)
  assert status == 0
  record = json.loads(out.read_text())
  assert record["complete"] and record["length"] == 32
  (one,) = record["results"]
  assert f"{one['cost']['far']:.2%}" in text and one["family"] == "glm"
