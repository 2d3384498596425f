"""Libraries that get the figures of a training, besides its log.jsonl.

A backend has the two methods of metrax's `LoggingBackend`, so its own backends,
and those of a program of yours, are passed by their names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ringjax.errors import OptionError

# Project of W&B without WANDB_PROJECT.
_PROJECT = "ringjax"


class MetricBackend(Protocol):
  """Receiver of figures; metrax's `LoggingBackend`."""

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> Any:
    """Logs a figure under the name `event`, with the keyword `step`."""
    ...

  def close(self) -> Any:
    """Writes what is left, and ends."""
    ...


class _TensorBoard:
  """Event files in the folder `tensorboard`, by tensorboardX."""

  def __init__(self, folder: Path):
    writer = _library("tensorboardX", "tensorboard").SummaryWriter
    self._writer = writer(str(folder / "tensorboard"))

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    self._writer.add_scalar(event, value, kwargs["step"])

  def close(self) -> None:
    self._writer.close()


class _Wandb:
  """A run of Weights & Biases, which a training that is resumed continues.

  WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY and others are obeyed. W&B
  takes no figure twice: those that a resumed training repeats are left out.
  """

  def __init__(self, folder: Path):
    wandb = _library("wandb", "wandb")
    id_file = folder / "wandb_id"
    run_id = id_file.read_text("utf-8") if id_file.is_file() else None
    self._run = wandb.init(
      project=os.environ.get("WANDB_PROJECT") or _PROJECT,
      name=os.environ.get("WANDB_NAME") or folder.name,
      id=run_id,
      resume=None if run_id is None else "allow",
      dir=str(folder),
    )
    id_file.write_text(self._run.id, "utf-8")
    self._step = -1
    self._figures: dict[str, Any] = {}

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    step = kwargs["step"]
    if step != self._step:
      self._write()
      self._step = step
    self._figures[event] = value

  def close(self) -> None:
    self._write()
    self._run.finish()

  def _write(self) -> None:
    if self._figures:
      # All figures of a step in one call.
      self._run.log(self._figures, step=self._step)
    self._figures = {}


BACKENDS: dict[str, Callable[[Path], MetricBackend]] = {
  "tensorboard": _TensorBoard,
  "wandb": _Wandb,
}
# Module of each, which is imported before anything is loaded.
_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_backends(names: list[str]) -> None:
  """Checks names of backends before the training begins.

  Raises:
    OptionError: If a name is unknown, or its library is not installed.
  """
  for name in names:
    if name in BACKENDS:
      _library(_LIBRARIES[name], name)
    else:
      _function(name)


class MetricBackends:
  """Backends that are open, by name; one that fails ends alone.

  A training of days does not end because a service of metrics does.
  """

  def __init__(
    self, names: list[str], folder: Path, say: Callable[[str], object]
  ):
    """Opens backends.

    Args:
      names: Names of `BACKENDS`, or `package.module:function` of a function of
        the folder that returns a `MetricBackend`, e.g. one of metrax.
      folder: Folder of the training.
      say: Function that shows a message.

    Raises:
      OptionError: If one cannot be opened.
    """
    self._say = say
    self._backends: dict[str, MetricBackend] = {}
    for name in names:
      make = BACKENDS.get(name) or _function(name)
      try:
        self._backends[name] = make(folder)
      except Exception as error:
        self.close()
        raise OptionError(
          "--metrics",
          f"{name}, which failed ({type(error).__name__}: {error})"[:200],
          "a backend that can be opened",
          "correct its settings (W&B: wandb login, or WANDB_MODE=offline), or "
          "leave it out",
        ) from error

  def report(self, step: int, figures: Mapping[str, float]) -> None:
    """Gives the figures of a step to each backend."""
    for name, backend in [*self._backends.items()]:
      try:
        for figure, value in figures.items():
          backend.log_scalar(figure, value, step=step)
      except Exception as error:
        self._failed(name, error)
        with contextlib.suppress(Exception):
          backend.close()

  def close(self) -> None:
    """Closes all backends."""
    for name, backend in [*self._backends.items()]:
      try:
        backend.close()
      except Exception as error:
        self._failed(name, error)
    self._backends.clear()

  def _failed(self, name: str, error: Exception) -> None:
    del self._backends[name]
    self._say(
      f"note: --metrics={name} failed and gets no further reports: "
      f"{type(error).__name__}: {error}"
    )


def _function(name: str) -> Callable[[Path], MetricBackend]:
  """Function `package.module:function`."""
  module, colon, function = name.partition(":")
  remedy = f"one of {', '.join(BACKENDS)}, or package.module:function"
  if not colon:
    raise OptionError("--metrics", repr(name), remedy, "pass one of these")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise OptionError(
      "--metrics",
      f"{name!r} ({type(error).__name__}: {error})",
      remedy,
      "install it, or add its folder to PYTHONPATH",
    ) from None


def _library(module: str, name: str) -> Any:
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError:
    raise OptionError(
      "--metrics",
      f"{name}, but {module} is not installed",
      f"{module}, or no {name}",
      f"pip install {module}",
    ) from None
