"""Documents out of Python's library: the same each time, as long as asked."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.data.tasks import documents
from ringjax.errors import PromptError

pytestmark = pytest.mark.smoke


def test_the_same_text_each_time_and_the_beginning_of_a_longer_one():
  long, short = (documents.standard_library(n) for n in (90_000, 30_000))
  assert documents.standard_library(90_000) == long
  assert long.text.startswith(short.text)
  assert short.text.endswith("\n")
  assert 29_000 < len(short.text) <= 30_000
  assert long.files >= short.files >= 1
  assert platform.python_version() in long.source


def test_files_come_whole_below_their_names():
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = documents.standard_library(200_000).text
  # A file may hold lines of its own that look alike but name no file.
  first, *parts = re.split(r"^# ==== (\S+\.py) ====\n", text, flags=re.M)
  names, bodies = parts[::2], parts[1::2]
  assert first == "" and len(names) > 3
  # The last one is cut.
  for name, body in zip(names[:-1], bodies[:-1], strict=True):
    source = (root / name).read_text(encoding="utf-8", errors="replace")
    assert body == source.rstrip("\n") + "\n\n"
  assert len(set(names)) == len(names)
  assert not any("test" in pathlib.PurePath(n).parts[:1] for n in names)


def test_what_the_small_model_has_not_seen_comes_first():
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  names = documents._names(root)
  unseen = [documents._is_unseen(name) for name in names]
  assert unseen == sorted(unseen, reverse=True)
  assert 0 < sum(unseen) < len(unseen) / 5


@pytest.mark.parametrize("characters", [0, -1, 10**12])
def test_more_than_there_is(characters):
  with pytest.raises(PromptError, match=r"characters: got .*wanted 1 to \d"):
    documents.standard_library(characters)


@pytest.mark.parametrize("tokens", [200, 5_000, 50_000])
@pytest.mark.parametrize("each", [1, 3.7])
def test_fit_is_a_little_below(tokens, each):
  count = lambda text: int(len(text.encode()) / each)
  have = count(documents.fit(tokens, count).text)
  # The end of a line is at most a line away.
  assert 0.98 * tokens - 100 <= have <= tokens


def test_fit_with_a_count_that_jumps():
  count = lambda text: 7 * len(text.split("\n"))
  assert count(documents.fit(700, count).text) <= 700


LINES = st.lists(st.text("ab \u00e9", max_size=9), max_size=9).map("\n".join)


@given(LINES, st.floats(0, 1))
def test_a_needle_is_a_line_of_its_own_and_nothing_is_lost(text, depth):
  hidden = documents.hide(text, "NEEDLE\n", depth)
  assert hidden.count("NEEDLE\n") == 1
  assert "NEEDLE" in hidden.split("\n")
  rest = hidden.replace("NEEDLE\n", "")
  assert rest in (text, text + "\n")


def test_depth(unchecked):
  text = "".join(f"line {i:03}\n" for i in range(100))
  at = lambda depth: documents.hide(text, "N\n", depth).split("\n").index("N")
  assert [at(d) for d in (0, 0.25, 0.5, 1)] == [0, 25, 50, 100]
  for wrong in (-0.1, 1.5, float("nan")):
    with pytest.raises(PromptError, match="depth: got"):
      documents.hide(text, "N\n", wrong)


def test_several_needles_keep_their_depths_and_order(unchecked):
  text = "".join(f"line {i:03}\n" for i in range(100))
  depths = [(1, "D\n"), (0.5, "A\n"), (0.504, "B\n"), (1, "C\n"), (0, "E\n")]
  hidden = documents.hide_all(text, depths).splitlines()
  at = {name: hidden.index(name) for name in "ABCDE"}
  assert at == {"E": 0, "A": 51, "B": 52, "D": 103, "C": 104}
  assert [line for line in hidden if line not in at] == text.splitlines()
  with pytest.raises(PromptError, match="depth: got 2"):
    documents.hide_all(text, [(0, "x"), (2, "y")])


@given(LINES, st.lists(st.floats(0, 1), max_size=5))
def test_several_needles_are_lines_of_their_own(text, depths):
  needles = [(depth, f"N{i}\n") for i, depth in enumerate(depths)]
  hidden = documents.hide_all(text, needles)
  lines = hidden.split("\n")
  for _, needle in needles:
    assert lines.count(needle.rstrip()) == 1
    hidden = hidden.replace(needle, "")
  assert hidden in (text, text + "\n")


def test_what_stands_beside_the_library_is_not_entered(tmp_path, monkeypatch):
  """Where a venv has no library of its own there are all packages too."""
  for name in ("a.py", "b/c.py", "site-packages/big/d.py", "b/test/e.py"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("x = 1\n")
  entered, scandir = [], os.scandir

  def scan(path):
    entered.append(pathlib.Path(path).relative_to(tmp_path).as_posix())
    return scandir(path)

  monkeypatch.setattr(os, "scandir", scan)
  monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
  assert documents.standard_library(20).files == 1
  assert len(documents.library(held_out=False)) <= 2
  assert set(entered) == {".", "b"}
