"""Models by their name on the Hugging Face Hub: `Qwen/Qwen3-8B`.

Guarantees: a download that was killed is resumed, and a file that is in the
cache of `huggingface_hub` is not downloaded again. Without a connection the
cache is read. No downloaded code runs.
Cost: only the files that a model is read from: config, tokenizer and template,
and one form of the weights. Several processes of a host wait for one download.

The cache, the token, the server and the offline mode are those of
`huggingface_hub`: $HF_HOME, $HF_TOKEN, $HF_ENDPOINT, $HF_HUB_OFFLINE.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringjax.errors import OptionError

_PREFIX = "hf://"
_NAME = re.compile(
  r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?:@(?P<revision>[^@:]+))?"
  r"(?::(?P<file>[^@:]+\.gguf))?"
)
# Files at the top of a repository that describe a model; code is not run, but
# shows whether keys of config.json may change the computation.
_ABOUT = ("*.json", "*.jinja", "*.txt", "*.py", "*.model", "LICENSE*")
_TOKENIZER = (
  "*token*.json", "config.json", "generation_config.json", "vocab.json",
  "chat_template.*", "*.jinja", "merges.txt", "tokenizer.model",
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class HubName(NamedTuple):
  """Name of a repository on the hub.

  Fields:
    repo: Owner and name, "Qwen/Qwen3-8B".
    revision: Branch, tag or commit; None: the default branch.
    file: GGUF file in it; None: the repository's weights.
  """

  repo: str
  revision: str | None = None
  file: str | None = None

  def __str__(self) -> str:
    revision = "" if self.revision is None else f"@{self.revision}"
    return self.repo + revision + ("" if self.file is None else f":{self.file}")


def hub_name(path: object) -> HubName | None:
  """Read a name such as "Qwen/Qwen3-8B"; None for anything else.

  A path that exists is not read as a name, nor is one in a folder that exists:
  where there is a folder "owner" only "hf://owner/name" is a name.

  Args:
    path: "owner/name", "owner/name@revision" or "owner/name:FILE.gguf", with
      or without "hf://" before it.
  """
  if not isinstance(path, str):
    return None
  text = path.removeprefix(_PREFIX)
  match = _NAME.fullmatch(text)
  if match is None or text.startswith((".", "-")):
    return None
  if text == path and (
    os.path.exists(path) or os.path.isdir(path.partition("/")[0])
  ):
    return None
  return HubName(**match.groupdict())


def download(
  name: HubName, argument: str = "path", *, tokenizer: bool = False
) -> pathlib.Path:
  """Download what is missing of a model; returns its folder or GGUF file.

  Args:
    name: Name of the repository.
    argument: Name of the argument, for an error.
    tokenizer: Whether only the files of the tokenizer are needed.

  Raises:
    OptionError: If there is no such repository, revision or file, if it is
      not open to the user, if it has no weights in a safe form, or without a
      connection if it is not in the cache.
  """
  # Imported on use: most programs read local folders.
  import huggingface_hub
  from huggingface_hub import constants, errors

  def fail(state: str, expected: str, remedy: str) -> OptionError:
    return OptionError(argument, f"{name}, {state}", expected, remedy)

  page = f"{constants.ENDPOINT}/{name.repo}"
  try:
    api = huggingface_hub.HfApi(
      endpoint=constants.ENDPOINT, library_name="ringjax"
    )
    info = api.model_info(name.repo, revision=name.revision)
    files = [sibling.rfilename for sibling in info.siblings or ()]
    wanted = _wanted(files, name, tokenizer, fail)
    folder = api.snapshot_download(
      name.repo,
      revision=name.revision,
      allow_patterns=[glob.escape(file) for file in wanted],
    )
  except errors.GatedRepoError:
    raise fail(
      "whose owner has not given you access",
      "a repository that your token may read",
      f"accept the conditions at {page}, and set HF_TOKEN or run hf auth login",
    ) from None
  except errors.RepositoryNotFoundError:
    raise fail(
      f"which is not at {page}, or is private",
      "the name of a repository",
      "check the name, or set HF_TOKEN if it is private",
    ) from None
  except errors.RevisionNotFoundError:
    raise fail(
      "whose revision does not exist",
      "a branch, a tag or a commit",
      f"choose one of {page}/commits",
    ) from None
  except (errors.HfHubHTTPError, OSError) as error:
    # OSError: no connection, offline mode, or a disk that is full.
    if isinstance(error, OSError) and error.errno is not None:
      raise
    return _from_cache(name, error, tokenizer, fail)
  except Exception as error:
    if not _is_connection_error(error):
      raise
    return _from_cache(name, error, tokenizer, fail)
  path = pathlib.Path(folder)
  return path / wanted[-1] if _is_gguf(wanted) else path


def name_in_cache(path: pathlib.Path) -> str | None:
  """Name of the repository that a folder of the hub's cache is from."""
  parts = path.parts
  if len(parts) > 2 and parts[-2] == "snapshots":
    kind, *owner_and_name = parts[-3].split("--")
    if kind == "models" and owner_and_name:
      return "/".join(owner_and_name)
  return None


def _is_gguf(files: Sequence[str]) -> bool:
  return bool(files) and files[-1].endswith(".gguf")


def _is_connection_error(error: Exception) -> bool:
  """Whether the server could not be reached, whatever library says so."""
  return any(
    kind.__name__ in ("TransportError", "ConnectionError", "Timeout")
    for kind in type(error).__mro__
  )


def _wanted(
  files: Sequence[str],
  name: HubName,
  tokenizer: bool,
  fail: Callable[[str, str, str], OptionError],
) -> list[str]:
  """Files of a repository that a model is read from; a GGUF file is last."""
  top = [file for file in files if "/" not in file]
  has = lambda *patterns: [
    file for file in top if any(fnmatch.fnmatch(file, p) for p in patterns)
  ]
  if name.file is not None:
    parts = [name.file]
    if _PART.search(name.file):
      stem = _PART.sub("", name.file)
      parts = sorted(file for file in files if _PART.sub("", file) == stem)
    if name.file not in files:
      others = [file for file in files if file.endswith(".gguf")]
      raise fail(
        "a file that is not there",
        ", ".join(others) or "a repository with GGUF files",
        "choose one of these" if others else "check the name",
      )
    return [*parts[1:], parts[0]]
  if tokenizer and has("tokenizer.json"):
    return has(*_TOKENIZER)
  weights = _weights(top)
  if weights:
    return has(*_TOKENIZER) if tokenizer else has(*_ABOUT) + weights
  quantised = has("*.gguf") or [x for x in files if x.endswith(".gguf")]
  if len({_PART.sub("", file) for file in quantised}) == 1:
    return [*quantised[1:], quantised[0]]
  if quantised:
    raise fail(
      f"with {len(quantised)} GGUF files",
      "one of them",
      f"append :FILE, for instance {name.repo}:{quantised[0]}",
    )
  unsafe = has("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack")
  raise fail(
    f"which has {', '.join(unsafe[:3])} only" if unsafe else "without weights",
    "weights as *.safetensors or *.gguf",
    "convert them with transformers: save_pretrained writes safetensors"
    if unsafe
    else "check the name",
  )


def _weights(names: Sequence[str]) -> list[str]:
  """Safetensors files of the set that a folder is read from."""
  if _INDEX not in names and "model.safetensors" in names:
    return ["model.safetensors"]
  parts = [name for name in names if _SHARD.fullmatch(name)]
  return parts or [name for name in names if name.endswith(".safetensors")]


def _from_cache(
  name: HubName,
  error: Exception,
  tokenizer: bool,
  fail: Callable[[str, str, str], OptionError],
) -> pathlib.Path:
  """The model as it is in the cache, because the hub cannot be asked."""
  import huggingface_hub
  from huggingface_hub import constants, errors

  reason = f"{type(error).__name__}: {error}".partition("\n")[0]
  path = None
  try:
    folder = huggingface_hub.snapshot_download(
      name.repo,
      revision=name.revision,
      local_files_only=True,
      # The weights are checked below, whatever form they have.
      allow_patterns=[],
    )
    path = _complete(pathlib.Path(folder), name.file, tokenizer)
  except errors.LocalEntryNotFoundError:
    pass
  if path is None:
    raise fail(
      f"which is not whole in {constants.HF_HUB_CACHE}, and "
      f"the hub could not be asked ({reason})",
      "a connection, or a model that was downloaded",
      "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or pass a folder",
    ) from error
  logging.getLogger(__name__).warning(
    "reading %s as it is in the cache: the hub could not be asked (%s)",
    name,
    reason,
  )
  return path


def _complete(
  folder: pathlib.Path, file: str | None, tokenizer: bool
) -> pathlib.Path | None:
  """Folder or GGUF file of a snapshot; None if some of it is missing."""
  present = sorted(path.name for path in folder.iterdir())
  if file is not None:
    parts = sum(_PART.sub("", x) == _PART.sub("", file) for x in present)
    number = re.search(r"-of-(\d{5})\.gguf$", file)
    whole = number is None or parts == int(number[1])
    return folder / file if whole and (folder / file).exists() else None
  if tokenizer and "tokenizer.json" in present:
    return folder
  if _INDEX in present:
    index = json.loads((folder / _INDEX).read_text("utf-8"))
    shards = set(index["weight_map"].values())
    return folder if shards <= set(present) else None
  weights = _weights(present)
  if weights:
    return None if any(map(_SHARD.fullmatch, weights)) else folder
  # One of several files is not known to be the one that is meant, nor is any
  # in a repository that has other weights.
  quantised = [name for name in present if name.endswith(".gguf")]
  if len(quantised) != 1 or _PART.search(quantised[0]):
    return None
  return None if "config.json" in present else folder / quantised[0]
