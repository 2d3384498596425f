"""Named models, and their place in the user's cache.

`launch.fetch` downloads their files; every argument for a model's folder takes
such a name, too. The table of them is `fetched_models.toml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import tomllib
from typing import Any

from ringjax import hub
from ringjax.checks import is_address
from ringjax.errors import OptionError
from ringjax.paths import as_path

FILE = "model.gguf"
_TABLE = pathlib.Path(__file__).with_suffix(".toml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedModel:
  """A model that can be fetched.

  Attributes:
    name: Name by which it is asked for.
    title: Size and form, for people.
    family: One of `rj.models.list()`.
    context: Tokens of the longest context.
    chat: Whether it was tuned for chats.
    packages: Packages with their versions, NAME==VERSION, whose wheels hold it.
    parts: Files in these wheels that are the model's file, in their order.
    notices: Files in these wheels that go with it.
    nbytes: Bytes of the model's file.
    sha256: Digest of that file, as hexadecimal digits.
    licence: Licence of the model, and where its text is.
  """

  name: str
  title: str
  family: str
  context: int
  chat: bool
  packages: tuple[str, ...]
  parts: tuple[str, ...]
  notices: tuple[str, ...]
  nbytes: int
  sha256: str
  licence: str

  @property
  def folder(self) -> pathlib.Path:
    """Folder of the model in the cache."""
    return cache_folder() / "models" / self.name

  @property
  def path(self) -> pathlib.Path:
    """Path of the model's file, whether it exists or not."""
    return self.folder / FILE

  @property
  def command(self) -> str:
    """Command that fetches the model."""
    return f"python -m ringjax.launch.fetch {self.name}"


def _read() -> dict[str, NamedModel]:
  tables: dict[str, dict[str, Any]] = tomllib.loads(_TABLE.read_text("utf-8"))
  models = {}
  for name, table in tables.items():
    fields: dict[str, Any] = {
      key: tuple(x) if isinstance(x, list) else x for key, x in table.items()
    }
    models[name] = NamedModel(name=name, **fields)
  return models


MODELS: dict[str, NamedModel] = _read()


def cache_folder() -> pathlib.Path:
  """The user's cache: $RINGJAX_CACHE, else in the standard cache folder."""
  if cache_path := os.environ.get("RINGJAX_CACHE"):
    return pathlib.Path(cache_path).expanduser()
  # By the XDG standard, a relative path there does not count.
  shared_cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
  if not shared_cache.is_absolute():
    shared_cache = pathlib.Path.home() / ".cache"
  return shared_cache / "ringjax"


def resolve(
  path: str | os.PathLike[str],
  argument: str = "path",
  *,
  revision: str | None = None,
  tokenizer: bool = False,
  downloads: bool = True,
) -> str | os.PathLike[str]:
  """Return the file of a named model; any other path is returned as it is.

  Args:
    path: A folder, a file, an address such as gs://bucket/model, a name of
      `launch.fetch`, or a name on the hub, "Qwen/Qwen3-8B", which is
      downloaded. A path that exists comes before a name.
    argument: Name of the argument, for an error.
    revision: Branch, tag or commit of a model on the hub.
    tokenizer: Whether of a model on the hub only the tokenizer is needed.
    downloads: Whether a name on the hub is resolved; else it is returned.

  Raises:
    OptionError: If the named model has not been fetched, the path nearly is a
      name, or the hub does not give the model.
  """
  name = hub.hub_name(path)
  if revision is not None:
    if name is None or name.revision not in (None, revision):
      raise OptionError(
        "revision",
        f"{revision!r} of {path}",
        "a model on the hub, such as Qwen/Qwen3-8B",
        "leave it out",
      )
    name = name._replace(revision=revision)
  if name is not None:
    if not downloads:
      return path
    return hub.download(name, argument, tokenizer=tokenizer)
  if not isinstance(path, str) or os.path.exists(path):
    return path
  if is_address(path):
    as_path(path, argument)
    return path
  if path not in MODELS:
    if matches := difflib.get_close_matches(path, MODELS, 1, 0.6):
      raise OptionError(
        argument,
        f"{path}, which is no folder, file or name",
        f"a path that is there, or {' or '.join(MODELS)}",
        f"did you mean {matches[0]}?",
      )
    return path
  model = MODELS[path]
  if not model.path.is_file():
    raise OptionError(
      argument,
      f"{path}, which is not in {model.folder.parent}",
      "a model that has been fetched",
      f"run {model.command}",
    )
  return model.path


def name_of(path: str | os.PathLike[str]) -> str:
  """Return the name of the model in a folder or a file."""
  if is_address(path):
    return as_path(path).name
  if (hub_name := hub.name_in_cache(pathlib.Path(path))) is not None:
    return hub_name
  file = pathlib.Path(path).resolve()
  return file.parent.name if file.name == FILE else file.name
