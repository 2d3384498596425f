"""launch.tokenize: text in, a corpus that training reads."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from launch import tokenize
from launch.shared import console
from ringjax.data import Bytes, Corpus, Loader
from ringjax.models import tiny
from tests.helpers import script

run = functools.partial(script, tokenize)


@pytest.fixture
def folder(tmp_path):
  """Two texts and three lines, of which one is wrong."""
  root = tmp_path / "texts"
  (root / "more").mkdir(parents=True)
  (root / "b.txt").write_text("second <|end|>")
  (root / "a.txt").write_text("first, ä")
  lines = [{"text": "third"}, {"body": "?"}, {"text": "fourth"}]
  (root / "more" / "c.jsonl").write_text(
    "\n".join(json.dumps(line) for line in lines)
  )
  return root


@pytest.mark.parametrize("tokenizer", ["bytes", str(tiny.path())])
def test_a_folder_becomes_a_corpus(folder, tmp_path, tokenizer):
  path = tmp_path / "all.tokens"
  status, out, err = run(
    f"--tokenizer={tokenizer}", f"--out={path}", "--skip_bad", "--json",
    str(folder),
  )  # fmt: skip
  assert status == 0, err
  assert "c.jsonl:2" in err
  found = Corpus.open(path, vocab=262)
  said = [
    Bytes().decode([i for i in found[n].tolist() if i < 256])
    for n in range(len(found))
  ]
  assert said == ["first, ä", "second <|end|>", "third", "fourth"]
  record = json.loads(out)
  assert record["documents"] == 4
  assert record["tokens"] == sum(map(len, found)) == int(found.lengths.sum())
  assert all(found[n][-1] == 257 for n in range(4))
  with Loader(found, length=64, batch=1, seed=0) as loader:
    assert np.any(next(loader).weights)


def test_how_far_it_is_within_a_file(tmp_path, monkeypatch):
  told = []
  monkeypatch.setattr(console.Screen, "at", lambda self, n: told.append(n))
  lines = tmp_path / "lines.jsonl"
  lines.write_text('{"text": "a line"}\n' * 5)
  (tmp_path / "short.txt").write_text("ä")
  status, _, err = run(
    "--tokenizer=bytes", f"--out={tmp_path / 'all.tokens'}", str(lines),
    str(tmp_path / "short.txt"),
  )  # fmt: skip
  assert status == 0, err
  size = lines.stat().st_size
  assert told == [6, 12, 18, 24, 30, size + 2]


def test_all_files_are_looked_for_before_one_is_read(folder, tmp_path):
  status, _, err = run(
    "--tokenizer=bytes", f"--out={tmp_path / 'all.tokens'}", str(folder),
    str(tmp_path / "nowhere.txt"),
  )  # fmt: skip
  assert status == 2
  # Neither begun, nor stopped at the line that is wrong.
  assert "encoding" not in err and "c.jsonl" not in err
  assert "nowhere.txt, which is not there" in err


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--out={out}", "{folder}"), "--tokenizer"),
    (("--tokenizer=bytes", "{folder}"), "--out"),
    (("--tokenizer=bytes", "--out={out}"), "files: got none"),
    (("--tokenizer=bytes", "--out={out}", "{folder}"), "c.jsonl:2"),
    (("--tokenizer=bytes", "--out={out}", "/nowhere.txt"), "/nowhere.txt"),
    (("--tokenizer=/nowhere", "--out={out}", "{folder}/a.txt"), "/nowhere"),
  ],
)
def test_what_is_wrong_writes_nothing(folder, tmp_path, argv, words):
  path = tmp_path / "all.tokens"
  given = [x.format(out=path, folder=folder) for x in argv]
  status, out, err = run(*given)
  assert (status, out) == (2, "")
  assert words in err and "Traceback" not in err
  assert not list(tmp_path.glob("*.tokens*"))
