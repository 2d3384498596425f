"""Contract of a storage of steps: what `Checkpoints` asks of it.

Process 0 alone calls what changes names; every process calls `save`, `check`
and `read`, at the same point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ringjax.train.checkpoints.manifest import File, Leaf, Manifest, Piece

# Pieces of each array of a step, by the array's name.
Pieces = Mapping[str, tuple[Piece, ...]]


@runtime_checkable
class StepSaver(Protocol):
  """Save of one step that is under way."""

  def wait(self) -> None:
    """Waits until this process has written its part.

    Raises:
      Exception: If it could not.
    """
    ...

  def contents(self) -> tuple[tuple[File, ...], Pieces | None]:
    """Files of the step, of all processes, and pieces for `Manifest`."""
    ...

  def close(self) -> None:
    """Frees threads and memory, also after an error."""
    ...


@runtime_checkable
class StepStorage(Protocol):
  """Steps in a folder or in an object storage."""

  def open(self) -> None:
    """Checks the root, and cleans up if no process writes there."""
    ...

  def acquire(self, patience_s: int | float | None = None) -> None:
    """Takes the right to write, and cleans up.

    Args:
      patience_s: Seconds to wait for another process; None for the default.

    Raises:
      OSError: If another process has it, or the storage refuses.
    """
    ...

  def release(self) -> None:
    """Gives the right to write back."""
    ...

  def steps(self) -> list[int]:
    """Numbers of the steps that have a manifest, in order."""
    ...

  def candidates(self) -> list[int]:
    """`steps`, and steps that have lost their manifest."""
    ...

  def prepare(self, step: int) -> str | None:
    """Makes a step's name free; returns the new path of what was there."""
    ...

  def draft(self, step: int, attempt: int) -> str:
    """Place in which a step is written before it exists."""
    ...

  def save(
    self, draft: str, values: Mapping[str, Any], leaves: Mapping[str, Leaf]
  ) -> StepSaver:
    """Begins to write arrays, which may be donated when this returns."""
    ...

  def commit(self, draft: str, manifest: Manifest) -> None:
    """Makes a written step exist; replaces an older one."""
    ...

  def delete(self, step: int) -> None:
    """Deletes a step."""
    ...

  def clean_up(self) -> None:
    """Removes the remains of killed processes and failed saves."""
    ...

  def read_manifest(self, step: int) -> Manifest:
    """Reads a step's manifest.

    Raises:
      CheckpointCorruptError: If it cannot be read or was altered.
      CheckpointFormatError: If a newer ringjax wrote it.
    """
    ...

  def check(self, manifest: Manifest, verify: str) -> None:
    """Compares the files of a step with its manifest.

    Args:
      manifest: Manifest of the step.
      verify: "none" compares all sizes; "crc32" and "full" what `read` does
        not compare, each process its share.

    Raises:
      CheckpointCorruptError: If a file differs.
    """
    ...

  def read(
    self, manifest: Manifest, targets: Mapping[str, Any], verify: str
  ) -> dict[str, Any]:
    """Reads arrays as their targets say.

    Args:
      manifest: Manifest of the step.
      targets: Results of `leaves.target` by name.
      verify: Comparison of the files, as of `Checkpoints.restore`.

    Raises:
      CheckpointCorruptError: If a file differs from the manifest.
    """
    ...
