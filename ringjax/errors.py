"""Errors that state what came, what was expected and what to change.

Guarantees: everything ringjax raises about a caller's input derives from
`RingjaxError` and from the builtin a caller would expect (`ValueError`,
`TypeError`), is raised in Python before any compilation or collective, fits
in 400 characters and names the argument and one remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

_LIMIT = 400


class RingjaxError(Exception):
  """Base class of every error that ringjax raises about its inputs.

  Made from one text, or from the four parts of `message`: the argument, what
  came, what was expected, what to do.
  """

  def __init__(self, *parts: object):
    # An error is copied to another process by its text.
    super().__init__(message(*parts) if len(parts) == 4 else parts[0])


class ShapeError(RingjaxError, ValueError):
  """A rank, a length or a head count does not fit."""


class DtypeError(RingjaxError, TypeError):
  """A dtype is not supported or two dtypes that must agree do not."""


class InputTypeError(RingjaxError, TypeError):
  """An argument is not an array (or not the expected object)."""


class MeshError(RingjaxError, ValueError):
  """A mesh, a mesh axis or a sharding does not fit the call."""


class OptionError(RingjaxError, ValueError):
  """An option has an unknown value or does not combine with another."""


class RewardError(RingjaxError, ValueError):
  """A reward function raised an error, or gave no finite number in time."""


class ConfigError(RingjaxError, ValueError):
  """A model's config has values that do not fit or are not supported."""


class CheckpointFormatError(RingjaxError, ValueError):
  """A file of a checkpoint violates its format."""


class CheckpointMismatchError(RingjaxError, ValueError):
  """A checkpoint's tensors are not those that the model needs.

  Attributes:
    leaves: Names of the leaves of a training step that differ, if these do.
  """

  def __init__(self, *parts: object, leaves: Sequence[str] = ()):
    super().__init__(*parts)
    self.leaves = tuple(leaves)


class CheckpointWriteError(RingjaxError, OSError):
  """A model or a training step could not be saved; older ones are intact.

  Attributes:
    file: File that could not be written, or None if unknown.
    step: Training step that was saved, or None.
  """

  def __init__(
    self, *parts: object, file: str | None = None, step: int | None = None
  ):
    super().__init__(*parts)
    self.file, self.step = file, step


class CheckpointCorruptError(RingjaxError, ValueError):
  """A saved training step differs from what was written.

  Attributes:
    file: First corrupt file, or None.
    step: Training step that is corrupt, or None if there is more than one.
  """

  def __init__(
    self, *parts: object, file: str | None = None, step: int | None = None
  ):
    super().__init__(*parts)
    self.file, self.step = file, step


class StorageError(RingjaxError, OSError):
  """An object of an object storage cannot be read, written or deleted.

  Attributes:
    filename: Address of the object, or None.
    strerror: Reason, which code for files of a disk shows.
  """

  def __init__(
    self, *parts: object, filename: str | None = None, reason: str | None = None
  ):
    super().__init__(*parts)
    self.filename, self.strerror = filename, reason

  def __str__(self) -> str:
    # That of OSError is another text once a file name is set.
    return str(self.args[0])


class UnsafeFormatError(RingjaxError, ValueError):
  """A file could run code when it is opened, so it is not opened."""


class TokenizerError(RingjaxError, ValueError):
  """A tokenizer cannot be loaded or cannot encode or decode."""


class TemplateError(RingjaxError, ValueError):
  """A chat template fails or exceeds its limits."""


class PromptError(RingjaxError, ValueError):
  """A prompt is empty, too long or holds unknown tokens."""


class DataError(RingjaxError, ValueError):
  """A file or a document of training data is invalid."""


class SamplingError(RingjaxError, ValueError):
  """A sampling parameter is out of its range."""


class MemoryEstimateError(RingjaxError, MemoryError):
  """A model or a cache cannot fit the devices, as counted beforehand."""


class OutOfMemoryError(RingjaxError, MemoryError):
  """A device or the host ran out of memory while a program ran.

  Attributes:
    nbytes: Number of bytes that were requested, or None if unknown.
  """

  def __init__(self, *parts: object, nbytes: int | None = None):
    super().__init__(*parts)
    self.nbytes = nbytes


class PeerError(RingjaxError, RuntimeError):
  """A process died, froze or got stuck, or two processes do not agree.

  Attributes:
    rank: Rank of the process that failed, or None.
  """

  def __init__(self, *parts: object, rank: int | None = None):
    super().__init__(*parts)
    self.rank = rank


class CollectiveTimeoutError(PeerError, TimeoutError):
  """A step did not end in time: a process or a device hangs.

  A hanging operation cannot raise an error: the process reports this and exits.
  """


class NotFiniteError(RingjaxError, ArithmeticError):
  """A loss or its gradients stay infinite or NaN."""


class NotFiniteLogitsError(NotFiniteError):
  """Logits of some rows are NaN or infinite, so no token can be chosen there.

  It is raised when the other rows have ended.

  Attributes:
    rows: Indices of these rows, or of the texts where there is no batch.
    positions: Position of the token that could not be chosen, for each of them.
    tokens: Result of the call, in which these rows have the tokens before those
      positions; or None.
  """

  def __init__(
    self,
    *parts: object,
    rows: Sequence[int] = (),
    positions: Sequence[int] = (),
    tokens: object = None,
  ):
    super().__init__(*parts)
    self.rows, self.positions = tuple(rows), tuple(positions)
    self.tokens = tokens


class ReplayError(RingjaxError, ArithmeticError):
  """A step that was computed twice gave two results: a device errs."""


class Declined(RingjaxError, NotImplementedError):
  """An implementation does not serve a call; `select` tries the next one."""


def message(argument: object, got: object, want: object, remedy: object) -> str:
  """Compose a message: what came, what was expected, what to change."""
  text = f"{argument}: got {_short(got)}; wanted {want}; {remedy}."
  return text if len(text) < _LIMIT else text[: _LIMIT - 4] + "..."


def _short(value: object, limit: int = 120) -> str:
  text = str(value)
  return text if len(text) <= limit else text[: limit - 3] + "..."
