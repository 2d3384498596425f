"""Batches of rows: a pure function of the seed and the step.

Guarantees: `loader.at(step)` is the same whatever was asked before, on
whichever machine and by however many hosts; iterating gives steps 0, 1, 2, ...;
a state that is restored goes on as if nothing had happened, bit for bit. The
batches of all hosts, one under the other, are the batch of one host.

Documents come in epochs: in each, every document once, in an order of its own;
they are packed in that order and the rows are shuffled again. A source without
end makes its examples from seeds. Of several sources, each block of 1024 rows
has of each its share, rounded but never none, in a random order: shares are
rows, not documents.

Cost: at the start of an epoch its documents are packed, a second for a million;
a loader that starts in a later epoch packs all before it to count their rows.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ringjax.data.packing import (
  BestFit,
  DocumentPiece,
  Documents,
  PackedBatch,
  Packer,
  PackingPlan,
  as_document,
  fill,
)
from ringjax.data.prefetch import Prefetcher
from ringjax.errors import DataError, OptionError

_FORMAT, _VERSION = "ringjax-loader", 1
_BLOCK = 1024
_PACKER = BestFit()
# Examples by which a source without a fingerprint is known.
_SAMPLES, _SAMPLED_IDS = 16, 1 << 14
# What random numbers are for.
_MIX, _DOCUMENTS, _ROWS, _EXAMPLES, _SAMPLE = range(5)


@runtime_checkable
class DocumentSource(Protocol):
  """Documents that are there, as `Corpus` and `Documents` have them.

  Attributes:
    lengths: int64 [N], tokens of each.
    fingerprint: tells it from others.
  """

  @property
  def lengths(self) -> np.ndarray: ...

  @property
  def fingerprint(self) -> str: ...

  def read(
    self, document: int, start: int, stop: int
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens of a document, as far as it goes, and their weights."""
    ...


@runtime_checkable
class ExampleSource(Protocol):
  """Examples without end."""

  def example(
    self, rng: np.random.Generator
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """An example, by nothing but `rng`.

    Returns:
      Ids [n], and their weights as labels, [n]; None for 1.
    """
    ...


class Loader(Iterator[PackedBatch]):
  """Batches of a corpus, or of a mixture.

  Args:
    sources: one or several, each `DocumentSource` or `ExampleSource`.
    length: T, tokens that a row holds.
    batch: B, rows of a batch, of all hosts together.
    seed: 0 or more.
    packer: makes rows of documents. Examples are never cut: a row has those
      that fit, and the first that does not is dropped.
    weights: of each source, in rows; None for the same.
    host: which part of each batch is wanted.
    hosts: how many parts there are.
    prefetch: batches that a thread makes in advance; 0 for no thread.

  Raises:
    OptionError: a number that does not fit.
    DataError: a source without a token.
  """

  def __init__(
    self,
    sources: Any,
    *,
    length: int,
    batch: int,
    seed: int,
    packer: Packer = _PACKER,
    weights: Sequence[float] | None = None,
    host: int = 0,
    hosts: int = 1,
    prefetch: int = 2,
  ):
    if not isinstance(sources, Sequence):
      sources = [sources]
    for name, value, least in (
      ("length", length, 1),
      ("batch", batch, 1),
      ("seed", seed, 0),
      ("hosts", hosts, 1),
      ("prefetch", prefetch, 0),
    ):
      if value < least:
        raise OptionError(name, value, f"{least} or more", "raise it")
    if batch % hosts or not 0 <= host < hosts:
      raise OptionError(
        "hosts",
        f"host {host} of {hosts}, for {batch} rows",
        "a host below hosts, and rows that can be divided among them",
        "make batch a multiple of hosts",
      )
    self._mix = _Mix(_shares(len(sources), weights), seed)
    streams = [
      _stream(source, i, packer, length, seed)
      for i, source in enumerate(sources)
    ]
    mine = range(host * batch // hosts, (host + 1) * batch // hosts)
    self._batches = _Batches(streams, self._mix, batch, mine)
    self._setup = {
      "sources": [stream.fingerprint for stream in streams],
      "shares": self._mix.counts.tolist(),
      "packer": repr(packer),
      "length": length,
      "batch": batch,
      "seed": seed,
      # Another numpy may shuffle otherwise.
      "draws": _random(seed, _SAMPLE).permutation(1 << 10)[:4].tolist(),
    }
    self._prefetch = prefetch
    self._ahead: Prefetcher | None = None
    self._step = 0

  @property
  def step(self) -> int:
    """The step whose batch comes next."""
    return self._step

  def at(self, step: int) -> PackedBatch:
    """The batch of a step.

    Args:
      step: from 0 on.

    Returns:
      Arrays [B / hosts, T]: this host's rows.
    """
    if step < 0:
      raise OptionError("step", step, "0 or more", "count from 0")
    return self._batches(step)

  def rows(self, source: int = 0, epoch: int = 0) -> int | None:
    """How many rows an epoch of a source has; None if it has no end."""
    return self._batches.streams[source].rows(epoch)

  def __next__(self) -> PackedBatch:
    if not self._prefetch:
      found = self._batches(self._step)
    else:
      if self._ahead is None:
        self._ahead = Prefetcher(self._batches, self._step, self._prefetch)
      try:
        found = self._ahead.take()
      except Exception:
        # The next call tries the same step again.
        self.close()
        raise
    self._step += 1
    return found

  def state(self) -> dict[str, Any]:
    """Where the loader is, as JSON: what was taken, not what is prepared."""
    return {
      "format": _FORMAT,
      "version": _VERSION,
      "step": self._step,
      "setup": dict(self._setup),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on where another loader was. The number of hosts may differ.

    Args:
      state: what `state` gave.

    Raises:
      DataError: it is no state, or one of other batches; the error says in
        what they differ.
    """
    known = isinstance(state, dict) and state.get("format") == _FORMAT
    step = state.get("step") if known else None
    theirs = state.get("setup") if known else None
    if (
      not known
      or state.get("version") != _VERSION
      or type(step) is not int
      or step < 0
      or not isinstance(theirs, dict)
    ):
      raise DataError(
        "state",
        str(state)[:80],
        f"what state() of this version ({_VERSION}) gives",
        "pass it unchanged",
      )
    ours = self._setup
    differ = [k for k in ours if theirs.get(k) != ours[k]]
    if differ:
      shown = lambda setup: ", ".join(
        f"{k} {str(setup.get(k))[:60]}" for k in differ
      )
      raise DataError(
        "state",
        shown(theirs),
        shown(ours)[:140],
        "make the loader as it was, or begin anew",
      )
    self.close()
    self._step = step

  def close(self) -> None:
    """Ends the thread, if there is one. Iterating on starts another."""
    if self._ahead is not None:
      self._ahead.close()
      self._ahead = None

  def __enter__(self) -> Loader:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class _Batches:
  """The batch of a step; the thread holds this and not the loader."""

  def __init__(self, streams: list[Any], mix: _Mix, batch: int, mine: range):
    self.streams = streams
    self._mix = mix
    self._batch = batch
    self._mine = mine

  def __call__(self, step: int) -> PackedBatch:
    rows = []
    for number in self._mine:
      source, index = self._mix(step * self._batch + number)
      rows.append(self.streams[source](index))
    return PackedBatch(
      *(np.concatenate(parts) for parts in zip(*rows, strict=True))
    )


class _Mix:
  """Which row of which source is row n of all.

  Args:
    counts: int64 [S], rows of each source in a block.
    seed: of the order in blocks.
  """

  def __init__(self, counts: np.ndarray, seed: int):
    self.counts = counts
    self._of_block = functools.lru_cache(4)(
      functools.partial(_block, counts, seed)
    )

  def __call__(self, row: int) -> tuple[int, int]:
    block, slot = divmod(row, int(self.counts.sum()))
    sources, ranks = self._of_block(block)
    source = int(sources[slot])
    return source, block * int(self.counts[source]) + int(ranks[slot])


def _block(
  counts: np.ndarray, seed: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
  """Of each row of a block its source, and how many of that came before."""
  sources = np.repeat(np.arange(len(counts)), counts)
  sources = _random(seed, _MIX, block).permutation(sources)
  ranks = np.zeros_like(sources)
  for source, count in enumerate(counts.tolist()):
    ranks[sources == source] = np.arange(count)
  return sources, ranks


def _shares(sources: int, weights: Sequence[float] | None) -> np.ndarray:
  """Rows of each source in a block, int64 [S]."""
  given = np.ones(sources) if weights is None else np.asarray(weights, float)
  sound = given.shape == (sources,) and np.isfinite(given).all()
  if not 1 <= sources <= _BLOCK or not sound or given.min() <= 0:
    raise OptionError(
      "weights",
      f"{weights} for {sources} sources",
      f"a positive number for each of 1 to {_BLOCK} sources",
      "leave out a source of weight 0",
    )
  if sources == 1:
    return np.ones(1, np.int64)
  want = given / given.sum() * _BLOCK
  counts = np.maximum(np.floor(want), 1).astype(np.int64)
  while counts.sum() != _BLOCK:
    more = 1 if counts.sum() < _BLOCK else -1
    # Where one more, or one less, brings it nearest to what is wanted.
    gain = more * (want - counts)
    gain[(counts == 1) & (more < 0)] = -np.inf
    counts[np.argmax(gain)] += more
  return counts


def _random(seed: int, *what: int) -> np.random.Generator:
  return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=what))


def _stream(
  source: Any, number: int, packer: Packer, length: int, seed: int
) -> Any:
  if isinstance(source, DocumentSource):
    return _Epochs(source, number, packer, length, seed)
  if isinstance(source, ExampleSource):
    return _Examples(source, number, length, seed)
  raise OptionError(
    f"sources[{number}]",
    type(source).__name__,
    "documents (lengths, read, fingerprint) or examples (example)",
    "pass a Corpus, Documents or a task of ringjax.data.needle",
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
  ):
    self.fingerprint = source.fingerprint
    self._source = source
    self._packer = packer
    self._length = length
    self._key = (seed, number)
    if not np.sum(source.lengths):
      raise DataError(
        f"sources[{number}]",
        f"{len(source.lengths)} documents without a token",
        "one token at least",
        "leave this source out",
      )
    # The first row of each epoch that was packed.
    self._first = [0]
    self._kept: dict[int, tuple[PackingPlan, np.ndarray, np.ndarray]] = {}
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
    return fill([pieces], self._length, self._source.read)

  def _packed(self, epoch: int) -> tuple[PackingPlan, np.ndarray, np.ndarray]:
    """The rows of an epoch, and the orders of its documents and rows."""
    if epoch not in self._kept:
      seed, number = self._key
      lengths = self._source.lengths
      documents = _random(seed, _DOCUMENTS, number, epoch).permutation(
        len(lengths)
      )
      plan = self._packer.plan(lengths[documents], self._length)
      rows = _random(seed, _ROWS, number, epoch).permutation(len(plan))
      # A batch has rows of two epochs at most times.
      if len(self._kept) > 1:
        del self._kept[next(iter(self._kept))]
      self._kept[epoch] = plan, documents, rows
    return self._kept[epoch]


class _Examples:
  """Rows of examples, each made from a seed of its own."""

  def __init__(
    self, source: ExampleSource, number: int, length: int, seed: int
  ):
    self._source = source
    self._length = length
    self._key = (seed, number)
    said = getattr(source, "fingerprint", None)
    if said is None:
      # What it makes tells it from others: the more if it makes little.
      hashed, rng, size = hashlib.sha256(), _random(0, _SAMPLE), 0
      for _ in range(_SAMPLES):
        ids, weights = self._example(rng)
        hashed.update(ids.tobytes() + weights.tobytes())
        size += len(ids)
        if size > _SAMPLED_IDS:
          break
      said = hashed.hexdigest()[:16]
    self.fingerprint = f"{type(source).__name__} {said}"

  def rows(self, epoch: int) -> None:
    return None

  def __call__(self, index: int) -> PackedBatch:
    seed, number = self._key
    rng = _random(seed, _EXAMPLES, number, index)
    tokens, weights, room = [], [], self._length
    while room:
      ids, own = self._example(rng)
      if len(ids) > room:
        break
      tokens.append(ids)
      weights.append(own)
      room -= len(ids)
    pieces = [DocumentPiece(i, 0, len(ids)) for i, ids in enumerate(tokens)]
    return fill([pieces], self._length, Documents(tokens, weights).read)

  def _example(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = self._source.example(rng)
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
    return ids, weights
