"""Steps in a folder of a local or mounted file system, by Orbax.

Guarantees: those of `checkpoint_directory.py`. Every file is synced, and read
once more for its digests, before its step exists.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ringjax.train.checkpoints import leaves as leaves_lib
from ringjax.train.checkpoints import manifest as manifests
from ringjax.train.checkpoints.checkpoint_directory import CheckpointDirectory
from ringjax.train.checkpoints.manifest import File, Leaf, Manifest
from ringjax.train.checkpoints.process_group import ProcessGroup


def _is_shown(record: logging.LogRecord) -> bool:
  """False for the dozens of lines that Orbax logs at INFO in each save."""
  orbax = os.path.dirname(ocp.__file__)
  return record.levelno > logging.INFO or orbax not in record.pathname


# Orbax logs by absl's logger, which others use too.
logging.getLogger("absl").addFilter(_is_shown)


class LocalSteps(CheckpointDirectory):
  """Steps of a checkpoint directory, with their arrays.

  Args:
    root: Absolute path of the folder.
    group: Processes of the training.
  """

  def __init__(self, root: str, group: ProcessGroup):
    super().__init__(root)
    self._group = group

  def save(
    self, draft: str, values: Mapping[str, Any], leaves: Mapping[str, Leaf]
  ) -> OrbaxSaver:
    """Begins to write arrays, which may be donated when this returns."""
    saver = OrbaxSaver(draft, self._group)
    saver.save(
      {
        name: leaves_lib.copied(x)
        for name, x in values.items()
        if 0 not in leaves[name].shape
      }
    )
    return saver

  def commit(self, draft: str, manifest: Manifest) -> None:
    """Makes a step of synced files exist; replaces an older one."""
    manifests.sync_folders(draft)
    super().commit(draft, manifest)

  def read_manifest(self, step: int) -> Manifest:
    """Reads a step's manifest."""
    return Manifest.read(self.manifest(step), step)

  def check(self, manifest: Manifest, verify: str) -> None:
    """Compares the files of a step with its manifest."""
    folder = self.folder(manifest.step)
    manifest.check_sizes(folder)
    if verify != "none":
      for file in self._group.share(manifest.files):
        manifest.check_file(folder, file, verify=verify)

  def read(
    self, manifest: Manifest, targets: Mapping[str, Any], verify: str
  ) -> dict[str, Any]:
    """Reads arrays as their targets say."""
    folder = self.folder(manifest.step)
    options = self._group.options()
    reader = ocp.Checkpointer(
      ocp.StandardCheckpointHandler(multiprocessing_options=options),
      multiprocessing_options=options,
    )
    try:
      args = ocp.args.StandardRestore(dict(targets))
      return reader.restore(folder, args=args)
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise
    except Exception as error:
      if verify != "none":
        raise
      reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
      raise manifests.corrupt(manifest.step, folder, reason) from error
    finally:
      reader.close()


class OrbaxSaver:
  """Save of one step by Orbax; a new one each time, as errors leave a state.

  Args:
    draft: Folder that the files are written to.
    group: Processes of the training.
  """

  def __init__(self, draft: str, group: ProcessGroup):
    self._draft, self._group = draft, group
    options = group.options()
    self._saver: Any = ocp.AsyncCheckpointer(
      ocp.StandardCheckpointHandler(multiprocessing_options=options),
      async_options=ocp.options.AsyncOptions(timeout_secs=group.timeout_s),
      multiprocessing_options=options,
    )

  def save(self, arrays: dict[str, Any]) -> None:
    """Begins to write arrays."""
    # Orbax cannot save empty trees.
    tree = arrays or {"%": np.zeros((), np.int8)}
    self._saver.save(self._draft, args=ocp.args.StandardSave(tree))

  def wait(self) -> None:
    """Waits until this process has written its part."""
    self._saver.wait_until_finished()

  def contents(self) -> tuple[tuple[File, ...], None]:
    """Files of the step, synced; each process reads its share of them."""
    draft = self._draft

    def digests() -> list[File]:
      shares = self._group.share(paths)
      return [manifests.digest(draft, path, sync=True) for path in shares]

    # One list for all: a mounted folder may look older on other processes.
    paths = self._group.first(lambda: manifests.files_of(draft))
    records = itertools.chain(*self._group.all(digests))
    return tuple(sorted(File(*x) for x in records)), None

  def close(self) -> None:
    """Closes Orbax' saver."""
    self._saver.close()
