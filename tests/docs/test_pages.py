"""The Python of the tutorial and of the how-to pages runs as it stands."""

from __future__ import annotations

import pathlib
import re
import types

import pytest

import ringjax
from ringjax import models
from ringjax.infer.speculate import DRAFTERS
from ringjax.kv import cache_kind, cache_specs
from ringjax.models import families
from ringjax.serve import cluster

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how").glob("*.md"))]
# Commands alone, which test_fresh_machine.py runs.
PAGES.remove(DOCS / "how" / "fresh_machine.md")
# What the default run leaves out: code that takes long, or that tests have too.
_LONG = (
  "attention_workers",
  "cache",
  "cache_kind",
  "cluster",
  "contexts",
  "contexts_cepe",
  "contexts_entropy",
  "contexts_kvlink",
  "drafter",
  "elastic",
  "experts",
  "family",
  "flash",
  "integers",
  "load",
  "million",
  "offload",
  "paired",
  "plan_serve",
  "serve",
  "speculate_longspec",
  "storage",
  "store",
  "strategy",
  "train",
  "speculate",
  "transfer",
  "tutorial",
  "which_cluster",
  "window",
  "lm_eval",
)


def blocks(page: pathlib.Path) -> str:
  """The page's Python, each line where the page has it."""
  lines = page.read_text().splitlines()
  code, inside = [], False
  for line in lines:
    if line.startswith("```"):
      inside = line == "```python"
      line = ""
    code.append(line if inside else "")
  return "\n".join(code)


@pytest.mark.long_cases(8)
@pytest.mark.parametrize(
  "page",
  [
    pytest.param(page, marks=[pytest.mark.long] * (page.stem in _LONG))
    for page in PAGES
  ],
  ids=lambda page: page.stem,
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
  code = blocks(page)
  assert re.search(r"^assert ", code, re.M), f"{page.name} asserts nothing"
  monkeypatch.chdir(tmp_path)
  # What a page registers is taken back.
  known = families.FAMILIES, cache_kind.KINDS, cluster.ROUTING_POLICIES
  before = [dict(names) for names in known]
  monkeypatch.setattr(cache_specs, "STORAGES", [*cache_specs.STORAGES])
  # What an earlier import made an attribute of the package is none to a user.
  for name, value in {**vars(ringjax)}.items():
    is_part = isinstance(value, types.ModuleType) and not name.startswith("_")
    if is_part and name not in ringjax.__dir__():
      monkeypatch.delattr(ringjax, name)
  try:
    # A traceback names the page and its line.
    program = compile(code, page, "exec", dont_inherit=True)
    exec(program, {"__name__": "__main__"})
  finally:
    for names, old in zip(known, before, strict=True):
      names.clear()
      names.update(old)


def test_the_page_of_models_names_every_family():
  text = (DOCS / "models.md").read_text("utf-8")
  first_column = re.findall(r"^\| ([\w, ]+) \|", text, re.M)
  named = {name.strip() for row in first_column for name in row.split(",")}
  assert {*models.list()} <= named
  compared = (DOCS / "comparison.md").read_text("utf-8")
  assert f"| families | {len(models.list())}, text:" in compared


def names_of_rows(text, heading):
  """Names in the first column of the table below a row of headings."""
  table = text.partition(heading)[2].partition("\n\n")[0]
  cells = re.findall(r"^\| (.+?) \|", table, re.M)
  return {name for cell in cells for name in re.findall("`([^`]+)`", cell)}


def test_the_page_of_speculation_names_every_drafter():
  text = (DOCS / "how" / "speculate.md").read_text("utf-8")
  table = text.partition("| `speculate=` |")[2].partition("\n\n")[0]
  rows = re.findall(r"^\| `(?:speculate\.)?(\w+)", table, re.M)
  names = {"TranslatedDraft" if x == "translated" else x for x in DRAFTERS}
  assert {*rows} == names


def test_the_page_of_the_conductor_names_every_policy():
  text = (DOCS / "how" / "conductor.md").read_text("utf-8")
  rows = names_of_rows(text, "| name | prefill instance |")
  assert rows == {*cluster.ROUTING_POLICIES}
  for name in cluster.REJECTIONS:
    assert f"`{name}:" in text
