"""A corpus: the tokens of many documents in one memory-mapped file or object.

Guarantees: the file exists completely or not at all. It is written under
another name, synced and renamed, so that a killed process leaves the old one.
Opening checks header, sizes and order of documents; a document is read without
reading another. `verify` reads the whole file.

The file: a header of 4096 bytes, JSON and spaces; tokens, uint16 if the
vocabulary fits and else uint32, little-endian, padded to 8 bytes; and int64
offsets, one more than documents. All sizes in it must agree with the file's
size.

Cost: 2 or 4 bytes a token and 8 a document; opening reads the offsets. An
object is read in blocks of 1 MiB, of which each corpus keeps the last 64.
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
import os
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from ringjax.checks import integer
from ringjax.data.batches.packing import as_document
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import DataError, OptionError
from ringjax.json_text import json_text
from ringjax.paths import AnyPath, ObjectArray, as_path, open_binary, replacing

_FORMAT, _VERSION = "ringjax-tokens", 1
_HEADER_BYTES = 4096
_MOST_VOCAB = 1 << 31
# Tokens or offsets that `verify` reads at once.
_STEP = 1 << 22


def write(
  path: str | os.PathLike[str],
  documents: Iterable[Any],
  *,
  vocab: int,
  tokenizer_fingerprint: str,
  progress: Callable[[int, int], None] | None = None,
) -> None:
  """Writes a corpus; documents are taken one at a time.

  Args:
    path: Path or address of the file. An old one is replaced when all is
      written.
    documents: Ids of each document, integers [n].
    vocab: Size of the vocabulary; all ids are below it.
    tokenizer_fingerprint: Fingerprint of the tokenizer that made the ids, see
      `fingerprint`; up to 100 characters.
    progress: Called with documents and tokens so far, after each document. An
      exception in it ends the writing.

  Raises:
    DataError: If a document is not a row of ids below `vocab`, or there is no
      token at all.
    OSError: If the file cannot be written.
  """
  remedy = "pass the tokenizer's vocab_size"
  integer("vocab", vocab, least=1, most=_MOST_VOCAB, remedy=remedy)
  if len(tokenizer_fingerprint) > 100:
    raise OptionError(
      "tokenizer_fingerprint",
      f"{len(tokenizer_fingerprint)} characters",
      "at most 100",
      "pass ringjax.data.fingerprint(tokenizer)",
    )
  target = as_path(path)
  with replacing(target) as file:
    header = _write_body(file, documents, vocab, progress)
    header["tokenizer"] = tokenizer_fingerprint
    file.seek(0)
    file.write(json_text(header).encode().ljust(_HEADER_BYTES - 1) + b"\n")
  if isinstance(target, pathlib.Path):
    _sync_folder(target.parent)


def _write_body(
  file: BinaryIO,
  documents: Iterable[Any],
  vocab: int,
  progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
  """Writes tokens and offsets, and returns the header."""
  dtype = _dtype(vocab)
  offsets, checksum = array.array("q", [0]), 0
  file.write(bytes(_HEADER_BYTES))
  for i, ids in enumerate(documents):
    row = as_document(f"documents[{i}]", ids)
    if row.size and row.max() >= vocab:
      raise DataError(
        f"documents[{i}]",
        f"id {row.max()}",
        f"ids below {vocab}, the vocabulary",
        "pass the vocab of the tokenizer that made them",
      )
    data = row.astype(dtype).tobytes()
    checksum = zlib.crc32(data, checksum)
    file.write(data)
    offsets.append(offsets[-1] + row.size)
    if progress is not None:
      progress(len(offsets) - 1, offsets[-1])
  if not offsets[-1]:
    raise DataError(
      "documents",
      f"{len(offsets) - 1} without a token",
      "one token at least",
      "check that the files hold text",
    )
  file.write(bytes(-file.tell() % 8))
  if sys.byteorder == "big":
    offsets.byteswap()
  data = offsets.tobytes()
  file.write(data)
  return {
    "format": _FORMAT,
    "version": _VERSION,
    "dtype": dtype.name,
    "vocab": vocab,
    "documents": len(offsets) - 1,
    "tokens": offsets[-1],
    "checksum": zlib.crc32(data, checksum),
  }


class Corpus:
  """Documents of a file that `write` wrote; made by `open`.

  Attributes:
    path: Path or address of the file.
    vocab: Size of the vocabulary; all ids are below it.
    tokens: Number of tokens of all documents.
    tokenizer: Fingerprint of the tokenizer that made the ids.
    lengths: Tokens of each document, int64 [N].
    fingerprint: Digest of the header, including its checksum.
  """

  def __init__(self, path: AnyPath, header: dict[str, Any]):
    self.path = path
    self.vocab: int = header["vocab"]
    self.tokens: int = header["tokens"]
    self.tokenizer: str = header["tokenizer"]
    self._checksum: int = header["checksum"]
    text = json_text(header, sort_keys=True).encode()
    self.fingerprint = hashlib.sha256(text).hexdigest()[:16]
    dtype = _dtype(self.vocab)
    self._data: np.ndarray | ObjectArray
    count = header["documents"] + 1
    if isinstance(path, pathlib.Path):
      self._data = np.memmap(
        path, dtype, mode="r", offset=_HEADER_BYTES, shape=(self.tokens,)
      )
      self._offsets = np.memmap(
        path, "<i8", mode="r", offset=_offsets_at(header), shape=(count,)
      )
    else:
      self._data = ObjectArray(path, dtype, _HEADER_BYTES, self.tokens)
      offsets = ObjectArray(path, np.dtype("<i8"), _offsets_at(header), count)
      self._offsets = offsets[:]

  @classmethod
  def open(
    cls,
    path: str | os.PathLike[str],
    *,
    vocab: int | None = None,
    tokenizer_fingerprint: str | None = None,
  ) -> Corpus:
    """Maps a corpus into memory.

    Args:
      path: Path or address of the file.
      vocab: Vocabulary size of the model that reads it, which may be larger
        than the corpus's; None is not checked.
      tokenizer_fingerprint: Fingerprint of the tokenizer that must have made
        it; None is not checked.

    Raises:
      DataError: If `write` did not write the file, it is incomplete, or it is
        of another tokenizer.
    """
    file = as_path(path)
    header, size = _read_header(file)
    want = _offsets_at(header) + 8 * (header["documents"] + 1)
    if size != want:
      raise _fault(file, f"{size} bytes", f"{want}, as its header says")
    corpus = cls(file, header)
    corpus._check_order()
    if vocab is not None and corpus.vocab > vocab:
      raise DataError(
        "vocab",
        f"{file.name} of {corpus.vocab} ids",
        f"at most {vocab}",
        "encode the corpus with the model's tokenizer",
      )
    if tokenizer_fingerprint not in (None, corpus.tokenizer):
      raise DataError(
        "tokenizer_fingerprint",
        f"{file.name} of {corpus.tokenizer!r}",
        repr(tokenizer_fingerprint),
        "encode the corpus with this tokenizer",
      )
    return corpus

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, document: int) -> Int[np.ndarray, " n"]:
    """The tokens of a document, int32 [n]."""
    at = range(len(self))[document]
    return self.read(at, 0, self.tokens)[0]

  def read(
    self, document: int, start: int, stop: int
  ) -> tuple[Int[np.ndarray, " n"], None]:
    """Tokens of a document, fewer at its end; all labels weigh the same.

    Returns:
      int32 [n], and None.
    """
    begin, end = self._offsets[document : document + 2].tolist()
    ids = self._data[begin + start : min(begin + stop, end)]
    return np.asarray(ids, np.int32), None

  @functools.cached_property
  def lengths(self) -> Int[np.ndarray, " N"]:
    return np.diff(self._offsets)

  def verify(self) -> None:
    """Reads the whole file and checks its checksum and ids.

    Raises:
      DataError: If the file was altered.
    """
    checksum = 0
    for part in (self._data, self._offsets):
      for at in range(0, len(part), _STEP):
        checksum = zlib.crc32(part[at : at + _STEP].tobytes(), checksum)
    if checksum != self._checksum:
      raise _fault(
        self.path, f"checksum {checksum}", f"{self._checksum}, as was written"
      )
    highest = max(
      int(self._data[at : at + _STEP].max())
      for at in range(0, self.tokens, _STEP)
    )
    if highest >= self.vocab:
      raise _fault(self.path, f"id {highest}", f"ids below {self.vocab}")

  def _check_order(self) -> None:
    """Checks that documents are adjacent and fill the file."""
    if self._offsets[0] != 0 or self._offsets[-1] != self.tokens:
      raise _fault(
        self.path,
        f"documents from {self._offsets[0]} to {self._offsets[-1]}",
        f"from 0 to {self.tokens}",
      )
    # np.diff may overflow.
    decreasing = self._offsets[1:] < self._offsets[:-1]
    if decreasing.any():
      document = int(np.argmax(decreasing))
      raise _fault(
        self.path, f"document {document} that ends before it begins", "order"
      )


def fingerprint(tokenizer: AnyTokenizer) -> str:
  """Hash of a tokenizer: of each token's text, and of the ids of a sample.

  Args:
    tokenizer: A `Tokenizer` or `Bytes`.

  Returns:
    16 characters, the same for the same tokenizer.
  """
  hashed = hashlib.sha256()
  hashed.update(repr([tokenizer.vocab_size, tokenizer.eos_ids]).encode())
  for i in range(tokenizer.vocab_size):
    hashed.update(tokenizer.window([i]).encode("utf-8", "replace") + b"\xff")
  hashed.update(np.asarray(tokenizer.encode(_SAMPLE), "<i4").tobytes())
  return hashed.hexdigest()[:16]


_SAMPLE = (
  "The quick brown foxes weren't jumping over 12345 lazy dogs -- twice.\n\n"
  "def f(x):\n\treturn {'a': [x ** 2], \"b\": None}  # internationalization\n"
  "Zwölf Boxkämpfer, 東京の天気, съешь ещё, 😀👍🏽\r\n    indented   "
)


def _dtype(vocab: int) -> np.dtype:
  return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def _offsets_at(header: dict[str, Any]) -> int:
  """Position of the offsets in the file, in bytes."""
  end = _HEADER_BYTES + header["tokens"] * _dtype(header["vocab"]).itemsize
  return end + -end % 8


def _read_header(path: AnyPath) -> tuple[dict[str, Any], int]:
  """The checked header of a file, and the file's size in bytes."""
  if not path.is_file():
    raise DataError(
      "path",
      f"{path}, where no file is",
      "a file that corpus.write wrote",
      "pass the path of a corpus that launch.tokenize wrote",
    )
  with open_binary(path) as file:
    data = file.read(_HEADER_BYTES)
    size = file.seek(0, os.SEEK_END)
  if not data.startswith(f'{{"format": "{_FORMAT}"'.encode()):
    raise _fault(path, f"a file that begins {data[:16]!r}", f"a {_FORMAT} file")
  if len(data) < _HEADER_BYTES:
    raise _fault(path, f"{size} bytes", "a header of 4096")
  try:
    header = json.loads(data)
  except (ValueError, RecursionError):
    raise _fault(path, "a header that is no JSON", "JSON") from None
  if header.get("version") != _VERSION:
    raise DataError(
      path.name,
      f"version {header.get('version')!r}",
      f"version {_VERSION}",
      "write it again, or read it with a newer ringjax",
    )
  for name in ("documents", "checksum"):
    if type(header.get(name)) is not int or not 0 <= header[name] < 1 << 60:
      raise _fault(path, f"{name} {header.get(name)!r}", "a count")
  for name, limit in (("vocab", _MOST_VOCAB), ("tokens", 1 << 60)):
    if type(header.get(name)) is not int or not 0 < header[name] <= limit:
      raise _fault(path, f"{name} {header.get(name)!r}", "a count above 0")
  dtype = _dtype(header["vocab"]).name
  if header.get("dtype") != dtype:
    raise _fault(path, f"dtype {header.get('dtype')!r}", dtype)
  if not isinstance(header.get("tokenizer"), str):
    raise _fault(path, f"tokenizer {header.get('tokenizer')!r}", "a name")
  return header, size


def _fault(path: AnyPath, got: str, want: str) -> DataError:
  return DataError(path.name, got, want, "write the corpus again")


def _sync_folder(folder: pathlib.Path) -> None:
  """Syncs a rename to the disk."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
