"""Corpora, texts, traces, reports and logs at addresses."""

from __future__ import annotations

import numpy as np
import pytest

import ringjax as rj
from ringjax import paths
from ringjax.bench import timing
from ringjax.data import Bytes
from ringjax.data.batches import corpus, texts
from ringjax.data.batches.corpus import Corpus
from ringjax.errors import DataError, OptionError, StorageError
from ringjax.paths import object_array, object_log
from ringjax.plan import files
from tests import object_servers

pytestmark = pytest.mark.long_cases(2)


@pytest.fixture(
  scope="module",
  params=(
    "memory",
    pytest.param("s3", marks=pytest.mark.long),
    pytest.param("gs", marks=pytest.mark.long),
  ),
)
def bucket(request):
  with object_servers.served(request.param) as address:
    yield paths.as_path(address)


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_a_corpus_is_read_in_blocks(bucket, block_bytes, monkeypatch):
  monkeypatch.setattr(object_array, "_BLOCK_BYTES", block_bytes)
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 70_000, n) for n in (5, 0, 1, 300, 77, 4)]
  place = bucket / "corpora" / "some.tokens"
  corpus.write(place, rows, vocab=70_000, tokenizer_fingerprint="t")
  documents = Corpus.open(str(place), vocab=70_000, tokenizer_fingerprint="t")
  assert [documents[n].tolist() for n in range(6)] == [r.tolist() for r in rows]
  assert documents.read(3, 250, 999)[0].tolist() == rows[3][250:].tolist()
  assert documents.read(1, 0, 9)[0].size == 0
  assert documents.lengths.tolist() == [5, 0, 1, 300, 77, 4]
  documents.verify()
  with pytest.raises(ZeroDivisionError):
    corpus.write(place, ([1 // n] for n in (1, 0)), vocab=9,
                 tokenizer_fingerprint="t")  # fmt: skip
  assert len(Corpus.open(place)) == 6


def test_a_corpus_that_is_damaged_or_gone(bucket):
  place = bucket / "corpora" / "bad.tokens"
  corpus.write(place, [[1, 2, 3]] * 9, vocab=9, tokenizer_fingerprint="t")
  documents = Corpus.open(place)
  data = bytearray(place.read_bytes())
  data[4096] ^= 1
  place.write_bytes(bytes(data))
  with pytest.raises(DataError, match="checksum"):
    Corpus.open(place).verify()
  place.write_bytes(bytes(data[:-8]))
  with pytest.raises(DataError, match="bytes"):
    Corpus.open(place)
  place.unlink()
  with pytest.raises(StorageError, match="no such object"):
    documents[0]
  with pytest.raises(DataError, match="where no file is"):
    Corpus.open(place)


def test_texts_of_a_folder(bucket):
  folder = bucket / "texts"
  (folder / "b.txt").write_text("zwei ü")
  (folder / "a" / "c.txt").write_text("one")
  (folder / "d.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
  text_files = texts.find(str(folder))
  assert list(texts.from_files(text_files)) == ["one", "zwei ü"]
  assert list(texts.from_jsonl([str(folder / "d.jsonl")])) == ["x", "y"]
  texts.build(bucket / "built", texts.from_files(text_files), Bytes())
  assert len(Corpus.open(bucket / "built")) == 2
  with pytest.raises(DataError, match="without a file"):
    texts.find(bucket / "none")


def test_a_trace(bucket):
  place = bucket / "trace.csv"
  place.write_text(
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-01-01 00:00:01,7,3\n2024-01-01 00:00:00,5,2\n"
  )
  requests = rj.serve.read_trace(str(place))
  assert [(r.arrival, r.prompt_tokens) for r in requests] == [(0, 5), (1, 7)]
  with pytest.raises(OptionError, match="no such object"):
    rj.serve.read_trace(bucket / "none.csv")


def test_reports(bucket):
  place = str(bucket / "reports" / "figures.json")
  files.write(place, "figures", {"a": 1})
  assert files.read(place, "figures") == {"a": 1}
  timing.write_json(place, {"b": [2.5]})
  assert timing.read_json(place) == {"b": [2.5]}
  with pytest.raises(OptionError, match="no such object"):
    files.read(str(bucket / "none.json"), "figures")


def test_a_log_is_written_in_whole_lines(bucket, monkeypatch):
  place = bucket / "log.jsonl"
  place.write_text('{"step": 1}\n{"st')
  with object_log.ObjectLog(place) as log:
    log.write('{"step": 2}\n')
    log.flush()
    # It is not due.
    assert place.read_text() == '{"step": 1}\n{"st'
    log.save()
    assert place.read_text() == '{"step": 1}\n{"step": 2}\n'
    monkeypatch.setattr(object_log, "PERIOD_S", 0)
    log.write("part")
    log.flush()
    assert place.read_text() == '{"step": 1}\n{"step": 2}\n'
    log.write("\n")
  assert place.read_text() == '{"step": 1}\n{"step": 2}\npart\n'


def test_a_storage_that_fails_is_named():
  place = paths.as_path("memory://faults/trace.csv")

  def fault(number, name, address):
    raise ConnectionResetError("reset")

  for call in (
    lambda: rj.serve.read_trace(place),
    lambda: Corpus.open(place),
    lambda: texts.find(place),
    lambda: list(texts.from_files([place])),
    lambda: files.read(str(place), "x"),
    lambda: files.write(str(place), "x", {}),
    lambda: timing.write_json(str(place), {}),
  ):
    with (
      object_servers.with_faults(fault),
      pytest.raises(StorageError, match="on 6 attempts"),
    ):
      call()
