"""Corpora: what was written comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.data import Bytes, Tokenizer
from ringjax.data.batches import corpus, texts
from ringjax.data.batches.corpus import Corpus
from ringjax.errors import DataError, OptionError
from tests.data import made

ROWS = [[5, 6, 7], [], [1], [0, 299, 2, 3]]


@pytest.fixture
def path(tmp_path):
  place = tmp_path / "some.tokens"
  corpus.write(place, ROWS, vocab=300, tokenizer_fingerprint="made")
  return place


@given(
  rows=st.lists(st.lists(st.integers(0, 69), max_size=9), max_size=9),
  wide=st.booleans(),
)
def test_documents_come_back(tmp_path_factory, rows, wide):
  place = tmp_path_factory.mktemp("corpus") / "c"
  rows = [*rows, [69]]
  vocab = 1 << 16 if not wide else (1 << 16) + 1
  corpus.write(
    place, map(np.array, rows), vocab=vocab, tokenizer_fingerprint=""
  )
  found = Corpus.open(place, vocab=vocab)
  assert [found[i].tolist() for i in range(len(found))] == rows
  assert found.lengths.tolist() == [len(row) for row in rows]
  assert found.tokens == sum(map(len, rows))
  width = 4 if wide else 2
  body = -(-width * found.tokens // 8) * 8
  assert place.stat().st_size == 4096 + body + 8 * (len(rows) + 1)
  found.verify()


def test_a_document_and_a_part_of_it(path):
  found = Corpus.open(path, tokenizer_fingerprint="made")
  assert (len(found), found.vocab, found.tokenizer) == (4, 300, "made")
  assert found[-1].dtype == np.int32 and found[-1].tolist() == ROWS[-1]
  for document, row in enumerate(ROWS):
    for start in range(5):
      for stop in range(start, 6):
        ids, weights = found.read(document, start, stop)
        assert ids.tolist() == row[start:stop] and weights is None
  with pytest.raises(IndexError):
    found[4]


def test_the_highest_ids(tmp_path):
  for vocab in (1 << 16, 1 << 31):
    place = tmp_path / "c"
    corpus.write(place, [[vocab - 1]], vocab=vocab, tokenizer_fingerprint="")
    assert Corpus.open(place)[0].tolist() == [vocab - 1]


def test_the_file_is_mapped_not_read(path):
  found = Corpus.open(path)
  assert isinstance(found._data, np.memmap)
  assert isinstance(found._offsets, np.memmap)


def test_fingerprints_are_of_the_content(path, tmp_path):
  first = Corpus.open(path).fingerprint
  prints = set()
  for rows, vocab, name in (
    (ROWS, 300, "made"),
    (ROWS, 301, "made"),
    (ROWS, 300, "other"),
    ([*ROWS[:-1], [0, 298, 2, 3]], 300, "made"),
    ([[5, 6], [7], [1], [0, 299, 2, 3]], 300, "made"),
  ):
    corpus.write(tmp_path / "c", rows, vocab=vocab, tokenizer_fingerprint=name)
    prints.add(Corpus.open(tmp_path / "c").fingerprint)
  assert len(prints) == 5 and first in prints


# ---------------------------------------------------------------------------
# What is no corpus
# ---------------------------------------------------------------------------


def change(path, **fields):
  data = path.read_bytes()
  header = json.loads(data[:4096]) | fields
  path.write_bytes(json.dumps(header).encode().ljust(4096) + data[4096:])


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, 4100, -1])
def test_a_file_that_was_cut_off(path, size):
  data = path.read_bytes()
  path.write_bytes(data[:size])
  with pytest.raises(DataError, match=r"some\.tokens: got .*corpus again"):
    Corpus.open(path)
  path.write_bytes(data + b"\0")
  with pytest.raises(DataError, match="bytes; wanted"):
    Corpus.open(path)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"version": 2}, "version 2; wanted version 1"),
    ({"format": "ringjax-tokenz"}, "begins"),
    ({"dtype": "uint32"}, "dtype 'uint32'; wanted uint16"),
    ({"tokens": 7}, "from 0 to 8; wanted from 0 to 7"),
    ({"tokens": 9}, "bytes; wanted"),
    ({"tokens": 1 << 50}, "bytes; wanted"),
    ({"documents": 1 << 50}, "bytes; wanted"),
    ({"documents": -1}, "documents -1"),
    ({"documents": True}, "documents True"),
    ({"tokens": 1e3}, "tokens 1000.0"),
    ({"tokens": 0}, "tokens 0"),
    ({"vocab": 0}, "vocab 0"),
    ({"checksum": None}, "checksum None"),
    ({"tokenizer": 3}, "tokenizer 3"),
  ],
)
def test_a_header_that_is_wrong(path, fields, words):
  change(path, **fields)
  with pytest.raises(DataError, match=words):
    Corpus.open(path)


def test_files_that_are_none(tmp_path, path):
  with pytest.raises(DataError, match="where no file is"):
    Corpus.open(tmp_path / "nowhere")
  with pytest.raises(DataError, match="where no file is"):
    Corpus.open(tmp_path)
  other = tmp_path / "other"
  other.write_bytes(os.urandom(9000))
  with pytest.raises(DataError, match="a file that begins"):
    Corpus.open(other)
  data = path.read_bytes()
  path.write_bytes(data[:100] + b"{" * 3996 + data[4096:])
  with pytest.raises(DataError, match="no JSON"):
    Corpus.open(path)


def test_documents_out_of_order(path):
  data = path.read_bytes()
  offsets = np.frombuffer(data[-40:], "<i8").copy()
  assert offsets.tolist() == [0, 3, 3, 4, 8]
  offsets[2] = 9
  path.write_bytes(data[:-40] + offsets.tobytes())
  with pytest.raises(DataError, match="document 2 that ends before it begins"):
    Corpus.open(path)
  # The difference to the next wraps around and is positive.
  offsets[1:3] = 2**63 - 1, -(2**63)
  path.write_bytes(data[:-40] + offsets.tobytes())
  with pytest.raises(DataError, match="document 1 that ends before it begins"):
    Corpus.open(path)
  offsets[-1] = 9
  path.write_bytes(data[:-40] + offsets.tobytes())
  with pytest.raises(DataError, match="documents from 0 to 9"):
    Corpus.open(path)


def test_verify_finds_a_changed_byte(path):
  data = bytearray(path.read_bytes())
  data[4096] ^= 1
  path.write_bytes(data)
  with pytest.raises(DataError, match="checksum"):
    Corpus.open(path).verify()


def test_verify_finds_an_id_beyond_the_vocabulary(path):
  change(path, vocab=299)
  with pytest.raises(DataError, match="id 299; wanted ids below 299"):
    Corpus.open(path).verify()


def test_the_file_lasts_before_it_has_its_name(path, monkeypatch):
  told = []
  for name in ("fsync", "replace"):
    real = getattr(os, name)

    def call(*args, name=name, real=real):
      told.append(name)
      return real(*args)

    monkeypatch.setattr(os, name, call)
  corpus.write(path, ROWS, vocab=300, tokenizer_fingerprint="")
  assert told == ["fsync", "replace", "fsync"]


def test_another_vocabulary_and_tokenizer(path):
  Corpus.open(path, vocab=301)
  with pytest.raises(DataError, match="vocab: got some.tokens of 300 ids"):
    Corpus.open(path, vocab=299)
  with pytest.raises(DataError, match="of 'made'; wanted 'else'"):
    Corpus.open(path, tokenizer_fingerprint="else")


@pytest.mark.parametrize(
  ("rows", "words"),
  [
    ([[1], [300]], r"documents\[1\]: got id 300; wanted ids below 300"),
    ([[-1]], r"documents\[0\]: got ids from -1"),
    ([[0.5]], "float64"),
    ([[[1, 2]]], "shape"),
    ([], "0 without a token"),
    ([[], []], "2 without a token"),
  ],
)
def test_what_is_not_written_leaves_what_was_there(path, rows, words):
  before = path.read_bytes()
  with pytest.raises(DataError, match=words):
    corpus.write(path, rows, vocab=300, tokenizer_fingerprint="")
  assert path.read_bytes() == before
  assert os.listdir(path.parent) == [path.name]


def test_options(tmp_path):
  for options, words in (
    ({"vocab": 0}, "vocab: got 0"),
    ({"vocab": 1 << 40}, "vocab"),
    ({"tokenizer_fingerprint": "x" * 101}, "101 characters"),
  ):
    given = {"vocab": 9, "tokenizer_fingerprint": ""} | options
    with pytest.raises(OptionError, match=words):
      corpus.write(tmp_path / "c", [[1]], **given)


def test_killed_midway_the_old_one_stays(path):
  before = path.read_bytes()
  program = """
    import os, signal, sys
    from ringjax.data.batches import corpus
    def rows():
      for i in range(10**6):
        yield [1] * 1000
        if i == 500:
          os.kill(os.getpid(), signal.SIGKILL)
    corpus.write(sys.argv[1], rows(), vocab=9, tokenizer_fingerprint="")
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(program), str(path)],
    cwd=pathlib.Path(__file__).parents[2],
    check=False,
  )
  assert done.returncode == -signal.SIGKILL
  assert path.read_bytes() == before
  Corpus.open(path).verify()


# ---------------------------------------------------------------------------
# From texts
# ---------------------------------------------------------------------------


def test_a_folder_of_texts(tmp_path):
  for name, text in (("b.txt", "zwölf"), ("a/x.txt", "one\n"), ("c.md", "no")):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text, encoding="utf-8")
  files = texts.find(tmp_path)
  assert [f.name for f in files] == ["x.txt", "b.txt"]
  seen = []
  place = tmp_path / "c.tokens"
  texts.build(
    place,
    texts.from_files(files),
    Bytes(),
    progress=lambda *counts: seen.append(counts),
  )
  found = Corpus.open(place, vocab=Bytes().vocab_size)
  for ids, text in zip(found, ("one\n", "zwölf"), strict=True):
    assert ids.tolist() == [256, *text.encode(), 257]
  assert seen == [(1, 6), (2, 14)]
  assert found.tokenizer == corpus.fingerprint(Bytes())
  with pytest.raises(DataError, match=r"without a file \*\.rst"):
    texts.find(tmp_path, "*.rst")


def test_a_text_cannot_write_a_special_token(tmp_path):
  texts.build(tmp_path / "c", ["<|end|>"], Bytes())
  assert Corpus.open(tmp_path / "c")[0].tolist() == [256, *b"<|end|>", 257]


def test_lines_of_json(tmp_path):
  file = tmp_path / "a.jsonl"
  file.write_text('{"text": "one\\ntwo", "n": 1}\n\n  \n{"text": ""}')
  assert list(texts.from_jsonl([file, file])) == ["one\ntwo", ""] * 2
  file.write_text('{"body": "x"}\n')
  assert list(texts.from_jsonl([file], field="body")) == ["x"]


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path):
  mark, file = b"\xef\xbb\xbf", tmp_path / "a"
  file.write_bytes(mark + b"one")
  assert list(texts.from_files([file])) == ["one"]
  file.write_bytes(mark + b'{"text": "one"}\n{"text": "two"}')
  assert list(texts.from_jsonl([file])) == ["one", "two"]


BAD = [
  (b"{", "no JSON"),
  (b"[" * 100_000, "no JSON"),
  (b"[1]", "got list"),
  (b'{"texts": "x"}', "'text' of NoneType"),
  (b'{"text": 3}', "'text' of int"),
  (b'"\xff"', "no UTF-8 at byte 1"),
  (b'{"text": "\\ud800"}', "lone surrogate"),
  (b'{"text": "' + b"x" * 200_001, "over 200000 bytes"),
]


def test_a_bad_line_is_told_with_its_place(tmp_path, monkeypatch):
  monkeypatch.setattr(texts, "LINE_BYTES", 200_000)
  file = tmp_path / "a.jsonl"
  for line, words in BAD:
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{words}"):
      list(texts.from_jsonl([file]))
  lines = [b'{"text": "good"}', *(line for line, _ in BAD)] * 2
  file.write_bytes(b"\n".join(lines))
  told = []
  assert list(texts.from_jsonl([file], on_bad=told.append)) == ["good"] * 2
  numbers = [int(t.split(": got")[0].rpartition(":")[2]) for t in told]
  assert numbers == [*range(2, 10), *range(11, 19)]


def test_a_bad_file_is_told(tmp_path, monkeypatch):
  monkeypatch.setattr(texts, "FILE_BYTES", 5)
  for name, data in (("a", b"abc\xff"), ("b", b"123456"), ("c", b"good")):
    (tmp_path / name).write_bytes(data)
  files = texts.find(tmp_path, "*")
  with pytest.raises(DataError, match="a: got no UTF-8 at byte 3"):
    list(texts.from_files(files))
  told = []
  assert list(texts.from_files(files, on_bad=told.append)) == ["good"]
  assert len(told) == 2 and "over 5 bytes" in told[1]


def test_fingerprints_tell_tokenizers_apart(tmp_path):
  folders = [made.folder(k, tmp_path / k) for k in ("llama3", "qwen", "gemma")]
  prints = [corpus.fingerprint(Tokenizer.load(f)) for f in folders]
  again = corpus.fingerprint(Tokenizer.load(folders[0]))
  assert again == prints[0]
  prints += [corpus.fingerprint(Bytes()), corpus.fingerprint(Bytes("abc"))]
  assert len(set(prints)) == 5


def test_a_tokenizer_without_an_end(tmp_path):
  class Endless(Bytes):
    def __init__(self):
      super().__init__()
      self.eos_ids = ()

  with pytest.raises(DataError, match="without an eos_token"):
    texts.build(tmp_path / "c", ["x"], Endless())
