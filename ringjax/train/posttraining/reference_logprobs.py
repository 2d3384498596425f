"""Log-probabilities of the initial model, computed once before the first step.

Guarantees: each answer is read once, however often its row is trained on; a row
is given the numbers of the tokens in it, by a digest of these, so the order of
the rows, their packing and the mesh may change. Saved next to the steps of a
`Checkpoints`, they are there when a run resumes and the initial weights are
gone.
Cost: one forward pass over the answers that the steps read, before the first.
Memory: 4 bytes a token on the host, no second copy of the model.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from ringjax.data.batches.packing import PackedBatch
from ringjax.errors import CheckpointMismatchError, NotFiniteError
from ringjax.models.checkpoint import cast
from ringjax.models.parameter_arrays import checksums, on_host
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ShardingContext
from ringjax.paths import as_path
from ringjax.train.batch import BY_TOKEN, Batch, place
from ringjax.train.posttraining.posttraining_loss import REFERENCE
from ringjax.train.token_logprobs import token_logprobs
from ringjax.typing import leaf

FILE = "reference.npz"


class ReferenceLogprobs:
  """Log-probabilities of answers' labels under one model.

  Attributes:
    key: Text that identifies the model and the dtype of the computation.
  """

  def __init__(self, key: str):
    self.key = key
    self._by_digest: dict[bytes, Float[np.ndarray, " n"]] = {}

  def __len__(self) -> int:
    return len(self._by_digest)

  def lacks(self, rows: PackedBatch) -> bool:
    """Whether a segment of some rows [B, T] is not in the table."""
    return any(
      digest not in self._by_digest for _, _, digest in _segments(rows)
    )

  def add(self, rows: PackedBatch, logprobs: Float[np.ndarray, "B T"]) -> None:
    """Stores the segments of rows.

    Args:
      rows: Rows in token order.
      logprobs: Log-probabilities of their labels, in that order.

    Raises:
      NotFiniteError: If one is not finite.
    """
    for row, slots, digest in _segments(rows):
      values = np.where(
        rows.weights[row, slots] != 0, logprobs[row, slots], 0.0
      ).astype(np.float32)
      if not np.isfinite(values).all():
        raise NotFiniteError(
          "reference",
          f"log-probabilities of the initial model that are not finite, in row "
          f"{row}",
          "finite ones",
          "look at the initial weights, or compute in dtype='float32'",
        )
      self._by_digest[digest] = values

  def attached(self, rows: PackedBatch) -> Batch:
    """Rows with the numbers of their segments as `inputs`."""
    values = np.zeros(rows.tokens.shape, np.float32)
    for row, slots, digest in _segments(rows):
      values[row, slots] = self._by_digest[digest]
    fields = (getattr(rows, name) for name in BY_TOKEN)
    return Batch(*fields, inputs={REFERENCE: leaf(values)})

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the table as `FILE` of a folder; replaces an older one at once.

    Raises:
      OSError: If it cannot be written.
    """
    values = [*self._by_digest.values(), np.zeros(0, np.float32)]
    buffer = io.BytesIO()
    np.savez(
      buffer,
      key=np.array(self.key),
      digests=np.frombuffer(b"".join(self._by_digest), np.uint8),
      lengths=np.array([x.size for x in values[:-1]], np.int64),
      values=np.concatenate(values),
    )
    path = as_path(folder) / FILE
    if not isinstance(path, pathlib.Path):
      # An object is there completely or not at all.
      path.write_bytes(buffer.getvalue())
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(FILE + ".new")
    with draft.open("wb") as file:
      file.write(buffer.getvalue())
      file.flush()
      os.fsync(file.fileno())
    os.replace(draft, path)

  @classmethod
  def load(cls, folder: str | os.PathLike[str]) -> ReferenceLogprobs | None:
    """Reads the table of a folder; None if it has none.

    Raises:
      CheckpointMismatchError: If the file is damaged.
    """
    path = as_path(folder) / FILE
    if not path.exists():
      return None
    try:
      with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        table = cls(str(file["key"]))
        digests, values = file["digests"].tobytes(), file["values"]
        ends = np.cumsum(file["lengths"])
    except (
      ValueError,
      KeyError,
      OSError,
      EOFError,
      zipfile.BadZipFile,
    ) as error:
      raise CheckpointMismatchError(
        FILE,
        f"a file that can't be read ({str(error)[:80]})",
        "log-probabilities of the initial model",
        f"delete {path} and start again, or pass another folder",
      ) from None
    for number, part in enumerate(np.split(values, ends[:-1])):
      digest = digests[number * _DIGEST : (number + 1) * _DIGEST]
      if digest:
        table._by_digest[digest] = part
    return table


_DIGEST = 16


def _segments(
  rows: PackedBatch,
) -> Iterable[tuple[int, Int[np.ndarray, " n"], bytes]]:
  """Row, slots in the order of positions, and digest of each segment."""
  for row, segments in enumerate(np.asarray(rows.segments)):
    for segment in range(1, int(segments.max(initial=0)) + 1):
      slots = np.flatnonzero(segments == segment)
      slots = slots[np.argsort(rows.positions[row, slots], kind="stable")]
      hashed = hashlib.blake2b(digest_size=_DIGEST)
      hashed.update(np.ascontiguousarray(rows.tokens[row, slots]).tobytes())
      hashed.update(np.ascontiguousarray(rows.weights[row, slots]).tobytes())
      yield row, slots, hashed.digest()


def prepared(
  model: Transformer,
  batches: Iterable[tuple[PackedBatch, int]],
  attend: ShardingContext,
  *,
  placed: Callable[[PackedBatch], PackedBatch],
  dtype: DTypeLike | None,
  block: int,
  folder: str | None,
  resumes: bool,
) -> ReferenceLogprobs:
  """The table of a training, read from a folder or computed and saved there.

  Args:
    model: Initial model; shapes alone if the folder has all.
    batches: Rows of all steps, of all processes together, and their
      micro-batches.
    attend: Sharding context of the rows.
    placed: Function that places documents on shards, as in training.
    dtype: Dtype of the computation; None: the parameters'.
    block: Tokens per step of the head, on each shard.
    folder: Folder or address of the training's steps, or None.
    resumes: Whether steps of the training are saved there.

  Raises:
    CheckpointMismatchError: If steps are saved and the table is missing, of
      other weights or of other rows.
    NotFiniteError: If log-probabilities are not finite.
  """
  table = None if folder is None else ReferenceLogprobs.load(folder)
  shapes = any(
    isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model)
  )
  if shapes:
    if table is None or any(table.lacks(rows) for rows, _ in batches):
      raise _unknown("shapes of the initial model alone")
    return table
  name = "parameters" if dtype is None else jnp.dtype(dtype).name
  key = f"{name} {checksums(model)}"
  if table is not None and table.key != key:
    if resumes:
      raise _unknown("other weights, or another dtype")
    table = None
  table = ReferenceLogprobs(key) if table is None else table
  count = len(table)
  fill_table(
    table, model, batches, attend, placed=placed, dtype=dtype, block=block
  )
  if folder is not None and len(table) > count and not jax.process_index():
    table.save(folder)
  return table


def _unknown(got: str) -> CheckpointMismatchError:
  return CheckpointMismatchError(
    FILE,
    f"{got}, and no log-probabilities of it for all rows",
    "the initial weights, or the file next to the saved steps",
    "pass the model that the training began with, or another folder",
  )


def fill_table(
  table: ReferenceLogprobs,
  model: Transformer,
  batches: Iterable[tuple[PackedBatch, int]],
  attend: ShardingContext,
  *,
  placed: Callable[[PackedBatch], PackedBatch],
  dtype: DTypeLike | None,
  block: int,
) -> None:
  """Computes what a table lacks.

  Every process calls it with the same batches.

  Args:
    table: Table to fill.
    model: Initial model.
    batches: Rows of all processes and their micro-batches.
    attend: Sharding context of the rows.
    placed: Function that places documents on shards, as in training.
    dtype: Dtype of the computation; None: the parameters'.
    block: Tokens per step of the head, on each shard.

  Raises:
    NotFiniteError: If log-probabilities are not finite.
  """

  @jax.jit
  def compute(model: Transformer, batch: Batch) -> jax.Array:
    if dtype is not None:
      model = cast(model, dtype)
    counted = jnp.asarray(batch.weights) != 0
    logprobs = token_logprobs(model, batch, attend, block=block)
    return attend.everywhere(jnp.where(counted, logprobs, 0.0))

  for rows, accumulate in batches:
    if not table.lacks(rows):
      continue
    slot_rows = placed(rows)
    batch = place(slot_rows, attend, accumulate, vocab=model.config.vocab)
    parts = [
      on_host(compute(model, jax.tree.map(lambda x, i=i: x[i], batch)))
      for i in range(accumulate)
    ]
    # Of adjacent rows each is in another micro-batch.
    logprobs = np.stack(parts, 1).reshape(rows.tokens.shape)
    table.add(slot_rows, attend.layout.restore(logprobs, shards=attend.size))
