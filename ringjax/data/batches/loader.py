"""Batches of rows: a pure function of the seed and the step.

Guarantees: `loader.at(step)` does not depend on earlier calls, on the machine
or on the number of hosts; iterating returns steps 0, 1, 2, ...; a restored
state resumes bit for bit. The batches of all hosts, concatenated along the
rows, are the batch of one host.

Documents come in epochs: in each, every document once, in a new order; they are
packed in that order and the rows are shuffled again. A source without end makes
its examples from seeds. With several sources, each block of 1024 rows has its
share of each, rounded but at least one, in a random order: shares are of rows,
not of documents.

Cost: at the start of an epoch its documents are packed, a second for a million;
a loader that starts in a later epoch packs all before it to count their rows.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import integer, positive_int
from ringjax.data.batches.packing import (
  BestFit,
  DocumentPiece,
  Documents,
  PackedBatch,
  Packer,
  PackingPlan,
  as_document,
  fill,
)
from ringjax.data.batches.prefetch import Prefetcher
from ringjax.errors import DataError, OptionError
from ringjax.ops.mask import SHARED_PREFIX

_FORMAT, _VERSION = "ringjax-loader", 1
_BLOCK = 1024
_PACKER = BestFit()
# Examples that are hashed for a source without a fingerprint.
_SAMPLES, _SAMPLED_IDS = 16, 1 << 14
# The uses of random numbers, each with a separate stream.
_MIX, _DOCUMENTS, _ROWS, _EXAMPLES, _SAMPLE = range(5)


@runtime_checkable
class DocumentSource(Protocol):
  """A finite source of documents, as `Corpus` and `Documents`.

  Attributes:
    lengths: Tokens of each document, int64 [N].
    fingerprint: Text that differs from that of other sources.
  """

  @property
  def lengths(self) -> Int[np.ndarray, " N"]: ...

  @property
  def fingerprint(self) -> str: ...

  def read(
    self, document: int, start: int, stop: int
  ) -> (
    tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"] | None]
    | tuple[
      Int[np.ndarray, " n"],
      Float[np.ndarray, " n"] | None,
      Int[np.ndarray, " n"],
    ]
  ):
    """Tokens `start` to `stop` of a document, or fewer, and their weights.

    Third, if a document has several, its segments [n], from 1 on.
    """
    ...


@runtime_checkable
class ExampleSource(Protocol):
  """An endless source of examples."""

  def example(
    self, rng: np.random.Generator
  ) -> (
    tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"] | None]
    | tuple[
      Int[np.ndarray, " n"],
      Float[np.ndarray, " n"] | None,
      Int[np.ndarray, " n"],
    ]
  ):
    """Makes an example, a function of `rng` alone.

    Returns:
      Ids [n], and their weights as labels, [n]; None for 1. Third, if it has
      any, segments [n] for `rj.SeparateDocuments()`.
    """
    ...


class Loader(Iterator[PackedBatch]):
  """Batches of a corpus, or of a mixture.

  Args:
    sources: One or several, each `DocumentSource` or `ExampleSource`.
    length: Tokens that a row holds, T.
    batch: Rows of a batch, of all hosts together, B.
    seed: Seed of orders and examples, 0 or more.
    packer: Packer of documents into rows. Examples are never cut: a row has
      those that fit, and the first that does not is dropped.
    weights: Share of each source, in rows; None for equal shares.
    host: Number of the part of each batch that this loader returns.
    hosts: Number of parts.
    separate: Whether rows are for `rj.SeparateDocuments()`. Then an example
      with segments keeps them and has a row alone, and other rows are packed
      with documents, segments from 3 on. Else each example is one document.
    prefetch: Batches that a thread makes in advance; 0 for no thread.

  Raises:
    OptionError: If a number is out of range.
    DataError: If a source has no token.
  """

  def __init__(
    self,
    sources: DocumentSource
    | ExampleSource
    | Sequence[DocumentSource | ExampleSource],
    *,
    length: int,
    batch: int,
    seed: int,
    packer: Packer = _PACKER,
    weights: Sequence[float] | None = None,
    host: int = 0,
    hosts: int = 1,
    separate: bool = False,
    prefetch: int = 2,
  ):
    if not isinstance(sources, Sequence):
      sources = [sources]
    for name, value in (("length", length), ("batch", batch), ("hosts", hosts)):
      positive_int(name, value)
    integer("seed", seed, least=0)
    integer("prefetch", prefetch, least=0)
    if batch % hosts or not 0 <= host < hosts:
      raise OptionError(
        "hosts",
        f"host {host} of {hosts}, for {batch} rows",
        "a host below hosts, and a batch that hosts divides",
        "make batch a multiple of hosts",
      )
    counts = _shares(len(sources), weights)
    first = SHARED_PREFIX + 1 if separate else 1
    streams = [
      _stream(source, i, packer, length, seed, first)
      for i, source in enumerate(sources)
    ]
    own_rows = range(host * batch // hosts, (host + 1) * batch // hosts)
    self._batches = _Batches(streams, counts, seed, batch, own_rows)
    self._setup = {
      "sources": [stream.fingerprint for stream in streams],
      "shares": counts.tolist(),
      "packer": repr(packer),
      "length": length,
      "batch": batch,
      "seed": seed,
      # Another version of NumPy may shuffle differently.
      "draws": _random(seed, _SAMPLE).permutation(1 << 10)[:4].tolist(),
    }
    if separate:
      self._setup["separate"] = True
    self._prefetch = prefetch
    self._ahead: Prefetcher | None = None
    self._step = 0

  @property
  def step(self) -> int:
    """The step whose batch comes next."""
    return self._step

  def at(self, step: int) -> PackedBatch:
    """Makes the batch of a step.

    Args:
      step: Number of the step, from 0 on.

    Returns:
      Arrays [B / hosts, T]: this host's rows.
    """
    return self._batches(integer("step", step, least=0))

  def rows(self, source: int = 0, epoch: int = 0) -> int | None:
    """Rows of an epoch of a source; None for an endless one."""
    return self._batches.streams[source].rows(epoch)

  def __next__(self) -> PackedBatch:
    if not self._prefetch:
      batch = self._batches(self._step)
    else:
      if self._ahead is None:
        self._ahead = Prefetcher(self._batches, self._step, self._prefetch)
      try:
        batch = self._ahead.take()
      except Exception:
        # The next call tries the same step again.
        self.close()
        raise
    self._step += 1
    return batch

  def state(self) -> dict[str, Any]:
    """The position as JSON: of the batches taken, not of prepared ones."""
    head = {"format": _FORMAT, "version": _VERSION}
    return head | {"step": self._step, "setup": dict(self._setup)}

  def restore(self, state: dict[str, Any]) -> None:
    """Resumes at the position of another loader; `hosts` may differ.

    Args:
      state: State that `state` returned.

    Raises:
      DataError: If it is not a state, or one of other batches; the error
        names the settings that differ.
    """
    head = {"format": _FORMAT, "version": _VERSION}
    valid = isinstance(state, dict) and state.items() >= head.items()
    step = state.get("step") if valid else None
    theirs = state.get("setup") if valid else None
    if type(step) is not int or step < 0 or not isinstance(theirs, dict):
      raise DataError(
        "state",
        str(state)[:80],
        f"what state() of this version ({_VERSION}) returns",
        "pass it unchanged",
      )
    ours = self._setup
    old, new = theirs.get("sources"), ours["sources"]
    if isinstance(old, list):
      # Older states have a class name before some fingerprints.
      fingerprints = [
        x if x in new else re.sub(r"^\S+ ", "", str(x)) for x in old
      ]
      theirs = theirs | {"sources": fingerprints}
    differ = [k for k in ours if theirs.get(k) != ours[k]]
    if differ:
      shown = lambda setup: ", ".join(
        f"{k} {str(setup.get(k))[:60]}" for k in differ
      )
      raise DataError(
        "state",
        shown(theirs),
        shown(ours)[:140],
        "make the loader as it was, or start a new training",
      )
    self.close()
    self._step = step

  def close(self) -> None:
    """Ends the thread, if there is one; the next batch starts another one."""
    if self._ahead is not None:
      self._ahead.close()
      self._ahead = None

  def __enter__(self) -> Loader:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class _Batches:
  """The batch of a step; the thread holds this and not the loader.

  Args:
    streams: Rows of each source.
    counts: Rows of each source in a block, int64 [S].
    seed: Seed of the order in blocks.
    batch: Rows of a batch, of all hosts together.
    own_rows: Indices of this host's rows.
  """

  def __init__(
    self,
    streams: list[Any],
    counts: np.ndarray,
    seed: int,
    batch: int,
    own_rows: range,
  ):
    self.streams = streams
    self._counts = counts
    self._batch, self._mine = batch, own_rows
    self._block = functools.lru_cache(4)(
      functools.partial(_block, counts, seed)
    )

  def __call__(self, step: int) -> PackedBatch:
    rows = [self._row(step * self._batch + number) for number in self._mine]
    return PackedBatch(*map(np.concatenate, zip(*rows, strict=True)))

  def _row(self, number: int) -> PackedBatch:
    """Row `number` of all sources together."""
    block, slot = divmod(number, int(self._counts.sum()))
    sources, ranks = self._block(block)
    source = int(sources[slot])
    index = block * int(self._counts[source]) + int(ranks[slot])
    return self.streams[source](index)


def _block(
  counts: np.ndarray, seed: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
  """Source of each row of a block, and how many of its rows came before."""
  sources = np.repeat(np.arange(len(counts)), counts)
  sources = _random(seed, _MIX, block).permutation(sources)
  ranks = np.zeros_like(sources)
  for source, count in enumerate(counts.tolist()):
    ranks[sources == source] = np.arange(count)
  return sources, ranks


def _shares(sources: int, weights: Sequence[float] | None) -> np.ndarray:
  """Rows of each source in a block, int64 [S]."""
  wanted = np.ones(sources) if weights is None else np.asarray(weights, float)
  valid = wanted.shape == (sources,) and np.isfinite(wanted).all()
  if not 1 <= sources <= _BLOCK or not valid or wanted.min() <= 0:
    raise OptionError(
      "weights",
      f"{weights} for {sources} sources",
      f"a positive number for each of 1 to {_BLOCK} sources",
      "leave out a source of weight 0",
    )
  if sources == 1:
    return np.ones(1, np.int64)
  shares = wanted / wanted.sum() * _BLOCK
  counts = np.maximum(np.floor(shares), 1).astype(np.int64)
  while counts.sum() != _BLOCK:
    change = 1 if counts.sum() < _BLOCK else -1
    # The source that is furthest from its share.
    gain = change * (shares - counts)
    gain[(counts == 1) & (change < 0)] = -np.inf
    counts[np.argmax(gain)] += change
  return counts


def _random(seed: int, *stream: int) -> np.random.Generator:
  return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def _stream(
  source: Any, number: int, packer: Packer, length: int, seed: int, first: int
) -> _Epochs | _Examples:
  """The rows of a source, whose packed documents are segments from `first`."""
  if isinstance(source, DocumentSource):
    return _Epochs(source, number, packer, length, seed, first)
  if isinstance(source, ExampleSource):
    return _Examples(source, number, length, seed, first)
  raise OptionError(
    f"sources[{number}]",
    type(source).__name__,
    "documents (lengths, read, fingerprint) or examples (example)",
    "pass a Corpus, Documents or a task of ringjax.data.tasks.needle",
  )


class _Epochs:
  """Rows of documents, epoch after epoch."""

  def __init__(
    self,
    source: DocumentSource,
    number: int,
    packer: Packer,
    length: int,
    seed: int,
    first: int,
  ):
    self.fingerprint = source.fingerprint
    self._source = source
    self._packer = packer
    self._length = length
    self._segment = first
    self._seed, self._number = seed, number
    if not np.sum(source.lengths):
      raise DataError(
        f"sources[{number}]",
        f"{len(source.lengths)} documents without a token",
        "one token at least",
        "leave this source out",
      )
    # The first row of each epoch that was packed.
    self._first = [0]
    # Most batches have rows of at most two epochs.
    self._packed = functools.lru_cache(2)(self._pack)
    self._lock = threading.Lock()

  def rows(self, epoch: int) -> int:
    with self._lock:
      return len(self._packed(epoch)[0])

  def __call__(self, index: int) -> PackedBatch:
    with self._lock:
      while self._first[-1] <= index:
        rows = len(self._packed(len(self._first) - 1)[0])
        self._first.append(self._first[-1] + rows)
      epoch = bisect.bisect_right(self._first, index) - 1
      plan, documents, rows = self._packed(epoch)
    row = plan[int(rows[index - self._first[epoch]])]
    pieces = [DocumentPiece(int(documents[p.document]), *p[1:]) for p in row]
    return fill([pieces], self._length, self._source.read, self._segment)

  def _pack(self, epoch: int) -> tuple[PackingPlan, np.ndarray, np.ndarray]:
    """The rows of an epoch, and the orders of its documents and rows."""
    lengths = self._source.lengths
    shuffled = lambda use, count: _random(
      self._seed, use, self._number, epoch
    ).permutation(count)
    documents = shuffled(_DOCUMENTS, len(lengths))
    plan = self._packer.plan(lengths[documents], self._length)
    return plan, documents, shuffled(_ROWS, len(plan))


class _Examples:
  """Rows of examples, each row from a separate seed."""

  def __init__(
    self, source: ExampleSource, number: int, length: int, seed: int, first: int
  ):
    self._source = source
    self._length = length
    self._segment = first
    self._seed, self._number = seed, number
    mark = getattr(source, "fingerprint", None)
    if mark is None:
      # Hashes the first examples: more of them if they are short.
      hashed, rng, size = hashlib.sha256(), _random(0, _SAMPLE), 0
      for _ in range(_SAMPLES):
        ids, weights, _ = self._example(rng)
        hashed.update(ids.tobytes() + weights.tobytes())
        size += len(ids)
        if size > _SAMPLED_IDS:
          break
      mark = hashed.hexdigest()[:16]
    self.fingerprint = mark

  def rows(self, epoch: int) -> None:
    return None

  def __call__(self, index: int) -> PackedBatch:
    rng = _random(self._seed, _EXAMPLES, self._number, index)
    tokens, weights, room = [], [], self._length
    while room:
      ids, label_weights, segments = self._example(rng)
      if segments is not None and self._segment > 1:
        return self._row([ids], [label_weights])._replace(
          segments=np.pad(segments, (0, self._length - len(ids)))[None]
        )
      if len(ids) > room:
        break
      tokens.append(ids)
      weights.append(label_weights)
      room -= len(ids)
    return self._row(tokens, weights)

  def _row(
    self, tokens: list[np.ndarray], weights: list[np.ndarray]
  ) -> PackedBatch:
    pieces = [DocumentPiece(i, 0, len(ids)) for i, ids in enumerate(tokens)]
    read = Documents(tokens, weights).read
    return fill([pieces], self._length, read, self._segment)

  def _example(
    self, rng: np.random.Generator
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    ids, weights, *optional_segments = self._source.example(rng)
    name = f"{type(self._source).__name__}.example"
    ids = as_document(name, ids)
    if weights is None:
      weights = np.ones(len(ids))
    weights = np.asarray(weights, np.float32)
    if not 0 < len(ids) <= self._length or weights.shape != ids.shape:
      raise DataError(
        name,
        f"{len(ids)} ids with weights of shape {weights.shape}",
        f"1 to {self._length} ids, each with a weight",
        "make examples that fit a row",
      )
    if not optional_segments:
      return ids, weights, None
    segments = as_document(f"{name}, segments", optional_segments[0])
    if segments.shape != ids.shape or not segments.all():
      raise DataError(
        f"{name}, segments",
        f"{segments.shape}, from {segments.min()} on, for {len(ids)} ids",
        "a number of at least 1 for each id",
        "return those of ringjax.data.arranged",
      )
    return ids, weights, segments
