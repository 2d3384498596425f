"""Paths and addresses: the contract of each storage, and its faults."""

from __future__ import annotations

import pathlib
from contextlib import nullcontext

import pytest

from ringjax import paths
from ringjax.errors import InputTypeError, OptionError, StorageError
from ringjax.paths import object_store
from ringjax.store import disk_tier, tier_policies
from ringjax.store.flash import neuron_file
from tests import object_servers
from tests.helpers import MESSAGE_LIMIT

pytestmark = pytest.mark.long_cases(2)

STORAGES = (
  "memory",
  pytest.param("s3", marks=pytest.mark.long),
  pytest.param("gs", marks=pytest.mark.long),
)


@pytest.fixture(scope="module", params=STORAGES)
def bucket(request):
  with object_servers.served(request.param) as address:
    yield paths.as_path(address)


# ---------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------


def test_objects_are_written_read_in_ranges_listed_and_deleted(bucket):
  root = bucket / "run"
  assert not root.exists() and not list(root.iterdir())
  paths.check_writable(root / "report.json")
  assert not root.exists()
  file = root / "a" / "b.txt"
  assert file.write_text("hällo world") == 11
  assert file.read_text() == "hällo world"
  assert file.stat().st_size == 12
  assert file.is_file() and not file.is_dir()
  assert (root / "a").is_dir() and not (root / "a").is_file()
  assert not (root / "a" / "b").exists()
  with file.open("rb") as opened:
    opened.seek(7)
    assert opened.read(3) == b"wor" and opened.read() == b"ld"
    assert opened.read() == b"" and opened.seek(-2, 2) == 10
  with file.open(encoding="utf-8") as opened:
    assert opened.readline() == "hällo world"
  facts = file.facts()
  file.write_bytes(b"other")
  assert file.facts() != facts
  (root / "c.jsonl").write_bytes(b"")
  (root / "ab" / "d.txt").write_bytes(b"d")
  assert [p.name for p in root.iterdir()] == ["a", "ab", "c.jsonl"]
  names = lambda places: [str(p).removeprefix(f"{root}/") for p in places]
  assert names(root.glob("**/*.txt")) == ["a/b.txt", "ab/d.txt"]
  assert names(root.glob("*.txt")) == []
  assert names(root.rglob("*")) == ["a/b.txt", "ab/d.txt", "c.jsonl"]
  assert names((root / "a").glob("*.txt")) == ["a/b.txt"]
  file.unlink()
  file.unlink(missing_ok=True)
  assert not file.exists() and not (root / "a").exists()
  for read in (file.unlink, file.read_bytes, file.stat, file.open):
    with pytest.raises(FileNotFoundError):
      read()


def test_a_file_of_several_parts_replaces_an_object_or_leaves_it(bucket):
  file = bucket / "parts" / "data"
  file.write_bytes(b"old")
  with pytest.raises(ZeroDivisionError), paths.replacing(file) as new:
    new.write(bytes(1 // 0))
  assert file.read_bytes() == b"old"
  data = bytes(range(251)) * 48_000
  with paths.replacing(file) as new:
    new.write(b"?" * 7)
    new.write(data)
    new.seek(0)
    new.write(b"written")
  assert file.stat().st_size == len(data) + 7
  store = file.store
  assert store.read(str(file), 0, 7) == b"written"
  at = 251 * 40_003
  assert store.read(str(file), at + 7, at + 20) == data[at : at + 13]
  assert store.read(str(file), 5, 5) == b""
  with pytest.raises(StorageError, match="has changed"):
    store.read(str(file), len(data), len(data) + 99)


def test_an_object_is_created_once(bucket):
  if str(bucket).startswith("gs"):
    pytest.skip("the emulator ignores ifGenerationMatch")
  file = bucket / "claim"
  file.store.write(str(file), b"first", new=True)
  with pytest.raises(FileExistsError):
    file.store.write(str(file), b"second", new=True)
  assert file.read_bytes() == b"first"


def test_an_object_is_replaced_only_in_a_version(bucket):
  """Where the client compares versions; others replace any."""
  file = bucket / "version"
  file.write_bytes(b"first")
  facts = file.facts()
  file.store.write(str(file), b"second", replaces=facts)
  compares = bool(file.store.scheme.match)
  assert compares == str(bucket).startswith("s3")
  expected = pytest.raises(FileExistsError) if compares else nullcontext()
  with expected:
    file.store.write(str(file), b"third", replaces=facts)
  assert file.read_bytes() == (b"second" if compares else b"third")
  facts = file.facts()
  file.unlink()
  if compares:
    with pytest.raises(FileExistsError):
      file.store.write(str(file), b"fourth", replaces=facts)


def test_a_folder_becomes_objects_the_named_file_last(bucket):
  place = bucket / "folder"
  with paths.filling(place, last="b.json") as local:
    (local / "b.json").write_text("b")
    (local / "sub").mkdir()
    (local / "sub" / "c").write_text("c")
  assert [str(p)[len(str(place)) :] for p in place.rglob("*")] == [
    "/b.json",
    "/sub/c",
  ]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_missing_bucket_is_named(scheme):
  words = f"{scheme}://none.*create the bucket"
  with (
    object_servers.served(scheme),
    pytest.raises(StorageError, match=words),
  ):
    paths.check_writable(f"{scheme}://none-of-mine/run")


# ---------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------


def test_a_path_of_the_file_system_is_a_path(tmp_path):
  assert paths.as_path(str(tmp_path)) == tmp_path
  assert paths.as_path("~/x") == pathlib.Path.home() / "x"
  with paths.replacing(tmp_path / "file") as new:
    new.write(b"content")
  with paths.open_binary(tmp_path / "file") as file:
    assert file.read() == b"content"
  with paths.filling(tmp_path / "a" / "b") as folder:
    assert folder == tmp_path / "a" / "b" and not folder.exists()


def test_parts_of_an_address():
  place = paths.as_path("memory://bucket//run/model.safetensors/")
  assert str(place) == "memory://bucket/run/model.safetensors"
  assert (place.name, place.stem, place.suffix) == (
    "model.safetensors",
    "model",
    ".safetensors",
  )
  assert place.parent / place.name == place == paths.as_path(place)
  assert place.parent.parent.parent == place.parent.parent
  assert place.parent < place and hash(place) == hash(paths.as_path(str(place)))
  assert place.with_name("x") == place.parent / "x"


@pytest.mark.parametrize(
  ("path", "words"),
  [
    ("xy://bucket/run", "memory://; mount the storage"),
    ("file:///home/run", "memory://; mount the storage"),
    ("memory://", "add the bucket"),
    ("memory:///", "add the bucket"),
  ],
)
def test_other_addresses_are_refused(path, words):
  with pytest.raises(OptionError, match=words) as error:
    paths.as_path(path, "--out")
  assert str(error.value).startswith("--out: got ")
  assert len(str(error.value)) < MESSAGE_LIMIT


@pytest.mark.parametrize(
  "call",
  [
    lambda path: disk_tier.DiskTier(path, 1 << 20, tier_policies.LRU()),
    lambda path: neuron_file.NeuronFile(path),
  ],
)
def test_what_takes_no_address_makes_no_folder(call, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(OptionError, match="copy the files"):
    call("gs://bucket/x")
  assert not list(tmp_path.iterdir())


def test_a_client_that_is_not_installed_is_named(monkeypatch):
  monkeypatch.setattr(object_store.importlib.util, "find_spec", lambda _: None)
  with pytest.raises(OptionError, match=r"pip install 'ringjax\[gcs\]'"):
    paths.as_path("gs://bucket/x")
  with pytest.raises(InputTypeError):
    paths.as_path(None)


# ---------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------


class HttpError(Exception):
  """An error of a client library, with the status of the answer."""

  def __init__(self, code):
    super().__init__(f"status {code}")
    self.code = code


class RefreshError(Exception):
  """An error of google.auth, for credentials that have expired."""


@pytest.mark.parametrize(
  "error",
  [
    HttpError(503),
    HttpError(409),
    ConnectionResetError("reset"),
    TimeoutError("late"),
    OSError(16, "SlowDown"),
  ],
)
@pytest.mark.parametrize("times", [1, 5, 6])
def test_a_busy_storage_is_asked_six_times(error, times):
  file = paths.as_path("memory://faults/object")

  def fault(number, name, address):
    if number < times:
      raise error

  for call in (
    lambda: file.write_bytes(b"data"),
    lambda: file.read_bytes(),
    lambda: file.facts(),
    lambda: list(file.parent.rglob("*")),
    lambda: file.unlink(missing_ok=True),
  ):
    with object_servers.with_faults(fault) as faulty:
      if times < 6:
        call()
      else:
        with pytest.raises(StorageError, match="on 6 attempts to") as info:
          call()
        assert info.value.filename.startswith("memory://faults")
        assert len(str(info.value)) < MESSAGE_LIMIT
    assert len(faulty.requests) >= times


@pytest.mark.parametrize(
  "error", [HttpError(401), HttpError(403), RefreshError("expired"),
            PermissionError("ExpiredToken"), OSError("Forbidden: o")],
)  # fmt: skip
def test_a_denied_request_is_not_repeated(error):
  file = paths.as_path("memory://faults/object")

  def fault(number, name, address):
    raise error

  with (
    object_servers.with_faults(fault) as faulty,
    pytest.raises(StorageError, match="wanted credentials"),
  ):
    paths.check_writable(file)
  # The second request is that which removes the probe.
  assert len(faulty.requests) == 2


class _Console:
  """A storage with a folder in which a console has made two empty ones."""

  def _infos(self, *names):
    return [{"name": name, "type": "file", "size": 0} for name in names]

  def ls(self, path, detail=True):
    folder = {"name": "b/run/a", "type": "directory", "size": 0}
    return [*self._infos("b/run/", "b/run/run"), folder]

  def find(self, path, *, detail):
    infos = self._infos("b/run/", "b/run/a/", "b/run/run")
    return {info["name"]: info for info in infos}

  def info(self, path):
    # As gcsfs does for the address without the last "/".
    return self._infos("b/run/")[0]


def test_objects_that_stand_for_folders_are_no_files(monkeypatch):
  folder = paths.as_path("memory://b/run")
  monkeypatch.setattr(folder.store, "_files", _Console())
  assert [p.name for p in folder.iterdir()] == ["a", "run"]
  assert [str(p) for p in folder.rglob("*")] == ["memory://b/run/run"]
  assert folder.is_dir() and not folder.is_file()


def test_an_object_that_vanishes_is_named():
  file = paths.as_path("memory://faults/object")
  file.write_bytes(b"12345678")
  with file.open("rb") as opened:
    file.unlink()
    with pytest.raises(FileNotFoundError, match="memory://faults/object"):
      opened.read()


def test_an_unknown_error_is_raised_at_once():
  def fault(number, name, address):
    raise ValueError("Bad Request: invalid")

  file = paths.as_path("memory://faults/object")
  with (
    object_servers.with_faults(fault) as faulty,
    pytest.raises(StorageError, match="Bad Request"),
  ):
    file.write_bytes(b"")
  assert len(faulty.requests) == 1
