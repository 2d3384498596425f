"""Errors that say what came, what was wanted and what to change.

Guarantees: everything ringjax raises about a caller's input derives from
`RingjaxError` and from the builtin a caller would expect (`ValueError`,
`TypeError`), is raised in Python before any compilation or collective, fits
in 400 characters and names the argument and one remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LIMIT = 400


class RingjaxError(Exception):
  """Base of every error that ringjax raises about its inputs.

  Made of one text, or of the four parts of `message`: the argument, what came,
  what was expected, what to do.
  """

  def __init__(self, *parts: object):
    # A copy in another process is made of the text.
    super().__init__(message(*parts) if len(parts) == 4 else parts[0])


class ShapeError(RingjaxError, ValueError):
  """A rank, a length or a head count does not fit."""


class DtypeError(RingjaxError, TypeError):
  """A dtype is not supported or two dtypes that must agree do not."""


class InputTypeError(RingjaxError, TypeError):
  """An argument is not an array (or not the object that was wanted)."""


class MeshError(RingjaxError, ValueError):
  """A mesh, a mesh axis or a sharding does not fit the call."""


class OptionError(RingjaxError, ValueError):
  """An option has an unknown value or does not combine with another."""


class ConfigError(RingjaxError, ValueError):
  """A model's config asks for what does not fit or is not supported."""


class CheckpointFormatError(RingjaxError, ValueError):
  """A file of a checkpoint is not what its format demands."""


class CheckpointMismatchError(RingjaxError, ValueError):
  """A checkpoint's tensors are not those that the model needs."""


class CheckpointWriteError(RingjaxError, OSError):
  """A model or a training step could not be saved; older ones are intact.

  Attributes:
    file: what could not be written, or None if that is not known.
    step: which step it was, or None.
  """

  def __init__(
    self, *parts: object, file: str | None = None, step: int | None = None
  ):
    super().__init__(*parts)
    self.file, self.step = file, step


class CheckpointCorruptError(RingjaxError, ValueError):
  """A saved training step is not what was written.

  Attributes:
    file: the first file that is not, or None.
    step: which step it is, or None if there is more than one.
  """

  def __init__(
    self, *parts: object, file: str | None = None, step: int | None = None
  ):
    super().__init__(*parts)
    self.file, self.step = file, step


class UnsafeFormatError(RingjaxError, ValueError):
  """A file could run code when it is opened, so it is not opened."""


class TokenizerError(RingjaxError, ValueError):
  """A tokenizer cannot be loaded or cannot encode or decode."""


class TemplateError(RingjaxError, ValueError):
  """A chat template fails or asks for more than it may have."""


class PromptError(RingjaxError, ValueError):
  """A prompt is empty, too long or holds unknown tokens."""


class DataError(RingjaxError, ValueError):
  """A file or a document to learn from is not what it should be."""


class SamplingError(RingjaxError, ValueError):
  """A sampling parameter is out of its range."""


class MemoryEstimateError(RingjaxError, MemoryError):
  """A model or a cache cannot fit the devices, as counted beforehand."""


class OutOfMemoryError(RingjaxError, MemoryError):
  """A device or the host had no more memory while a program ran.

  Attributes:
    nbytes: how much was asked for, or None if that is not known.
  """

  def __init__(self, *parts: object, nbytes: int | None = None):
    super().__init__(*parts)
    self.nbytes = nbytes


class PeerError(RingjaxError, RuntimeError):
  """Another process died, froze or got stuck, or two do not agree.

  Attributes:
    rank: whose fault it is, or None.
  """

  def __init__(self, *parts: object, rank: int | None = None):
    super().__init__(*parts)
    self.rank = rank


class CollectiveTimeoutError(PeerError, TimeoutError):
  """A step did not come to its end in time: a process or a device hangs.

  What hangs cannot be raised from: the process says this and ends.
  """


class NotFiniteError(RingjaxError, ArithmeticError):
  """A loss or its gradients stay infinite or NaN."""


class NotFiniteLogitsError(NotFiniteError):
  """Logits of some rows are NaN or infinite, so no token can be chosen there.

  It is raised when the other rows have ended.

  Attributes:
    rows: numbers of these rows, or of the texts where there is no batch.
    positions: position of the token that could not be chosen, for each of them.
    tokens: the result of the call, in which these rows have the tokens before
      those positions; or None.
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
    self.tokens: Any = tokens


class ReplayError(RingjaxError, ArithmeticError):
  """A step that was computed twice gave two results: a device errs."""


class Declined(RingjaxError, NotImplementedError):
  """An implementation says "not me"; `select` then asks the next one."""


def message(argument: object, got: object, want: object, remedy: object) -> str:
  """One sentence each: what came, what was wanted, what to change."""
  text = f"{argument}: got {_short(got)}; wanted {want}; {remedy}."
  return text if len(text) < _LIMIT else text[: _LIMIT - 4] + "..."


def _short(value: object, limit: int = 120) -> str:
  text = str(value)
  return text if len(text) <= limit else text[: limit - 3] + "..."
