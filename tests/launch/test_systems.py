"""Each system by its paper's name: what the table says exists and runs."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags

import ringjax
import ringjax.eval
import ringjax.serve.cluster
from benchmarks import pages, systems
from launch import systems as script
from launch.shared.systems_table import SYSTEMS
from ringjax.models import small

ROOT = pathlib.Path(__file__).parents[2]
by_name = pytest.mark.parametrize("system", SYSTEMS, ids=lambda x: x.name)


@by_name
def test_what_a_system_names_exists(system):
  for path in system.modules:
    assert (ROOT / path).is_file(), path
    importlib.import_module(path.removesuffix(".py").replace("/", "."))
  for name in system.names:
    functools.reduce(getattr, name.split(".")[1:], ringjax)
  for path in (system.page, *system.tests):
    assert (ROOT / path).is_file(), path
  assert system.commands and system.link.startswith("https://")
  for sentence in (system.does, system.absent):
    assert sentence.endswith(".") and "|" not in sentence


@pytest.mark.long
def test_public_names_are_there_once_their_package_is_imported():
  names = [name for system in SYSTEMS for name in system.names]
  packages = {name.rpartition(".")[0] for name in names if name[:3] != "rj."}
  # In a process in which no other test has imported a module.
  program = "\n".join(
    ["import ringjax as rj", *(f"import {x}" for x in sorted(packages)), *names]
  )
  completed = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert completed.returncode == 0, completed.stderr
  assert all(re.fullmatch(r"(rj|ringjax)(\.\w+)+", name) for name in names)


def test_the_systems_are_those_that_are_shown_on_real_models():
  shown = {row.system: row.paper for row in systems.ROWS}
  assert {system.name: system.paper for system in SYSTEMS} == shown


def test_modules_that_refer_to_a_paper_are_in_its_system():
  for path in sorted((ROOT / "ringjax").rglob("*.py")):
    file = path.relative_to(ROOT).as_posix()
    docstring = re.match(r'"""(.*?)"""', path.read_text("utf-8"), re.S)
    # Benchmarks compare with papers, and are listed on pages of their own;
    # a folder's docstring names what is in its files.
    is_bench = file.startswith("ringjax/bench/")
    if docstring is None or is_bench or path.name == "__init__.py":
      continue
    for system in SYSTEMS:
      key = system.name if system.url else system.paper
      if re.search(rf"\b{re.escape(key)}\b", docstring[1]):
        assert file in system.modules, f"{file}: {system.name}"


def parsed(command: str) -> list[str] | None:
  """Parses a command's flags; returns its words, or None for no Python.

  Raises:
    absl.flags.Error: If the script does not take the flags.
  """
  words = shlex.split(command)
  if words[0] != "python":
    assert words[0] == "mkdir", command
    return None
  module, argv = words[2], words[3:]
  folder, name = module.split(".")
  assert words[1] == "-m" and folder in ("launch", "benchmarks"), command
  passed = {x.removeprefix("--").split("=")[0] for x in argv if x[:2] == "--"}
  loaded = importlib.import_module(module)
  if folder == "benchmarks":
    source = pathlib.Path(loaded.__file__ or "").read_text("utf-8")
    assert all(f'"--{flag}"' in source for flag in passed), command
  elif name == "bench":
    bench_flags = flags.FLAGS.get_key_flags_for_module(module)
    assert passed <= {flag.name for flag in bench_flags}, command
  else:
    values = flags.FlagValues()
    loaded.define(values)
    # The fields of a config are parsed by its recipe.
    values([name, *(x for x in argv if not x.startswith("--config"))])
    assert {x.split(".")[0] for x in passed} <= set(values), command
  return words


@by_name
def test_commands_have_flags_that_exist(system, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  commands = [parsed(command) for command in system.commands]
  # Only what it reads may come from a command of the shell.
  assert commands[-1]


def test_a_flag_that_does_not_exist_is_seen():
  for command in (
    "python -m launch.generate --no_such=1",
    "python -m launch.plan ring --no_such",
  ):
    with pytest.raises(flags.UnrecognizedFlagError):
      parsed(command)
  for command in (
    "python -m launch.bench rows --no_such",
    "python -m benchmarks.ways pull --no_such",
    "python -m launch.train --config=x.py --config.x=1 --no_such=1",
  ):
    with pytest.raises((AssertionError, flags.UnrecognizedFlagError)):
      parsed(command)


@pytest.mark.long
@by_name
def test_the_commands_of_a_system_run(system, tmp_path):
  if any("benchmarks.live" in command for command in system.commands):
    pytest.importorskip("uvicorn")
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  for command in system.commands:
    line = command.replace("python", shlex.quote(sys.executable), 1)
    line = line.replace("ringjax/models/small", shlex.quote(str(small.path())))
    completed = subprocess.run(
      line if parsed(command) else command,
      shell=True,
      cwd=tmp_path,
      env=environment,
      capture_output=True,
      text=True,
    )
    assert completed.returncode == 0, f"{command}: {completed.stderr[-2000:]}"


def test_the_page_is_made_of_the_table():
  page = (ROOT / "docs" / "systems_map.md").read_text("utf-8")
  assert page == pages.map_page()


def test_prints_a_table_of_100_columns(capsys):
  assert script.main([]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= 100
  text = " ".join(" ".join(lines).split())
  for system in SYSTEMS:
    assert system.page.removeprefix("docs/") in text
    assert system.name.split()[-1] in text


@pytest.mark.parametrize(
  ("word", "name"),
  [
    ("kivi", "KIVI"),
    ("LLM_in-a flash", "LLM in a Flash"),
    ("tpi", "TPI-LLM"),
    ("attention sinks", "StreamingLLM"),
    ("blockwise transformers", "Blockwise Parallel Transformer"),
    ("2405.05329", "KV-Runahead"),
    ("loong", "LoongServe"),
  ],
)
def test_prints_one_system_in_full(word, name, capsys):
  assert script.main([word]) == 0
  printed = capsys.readouterr().out
  (system,) = (system for system in SYSTEMS if system.name == name)
  assert printed.startswith(f"{name} ({system.link})\n")
  for part in (*system.modules, *system.names, *system.commands, system.page):
    assert part in printed
  assert " ".join(system.absent.split()) in " ".join(printed.split())
  assert max(map(len, printed.partition("\ncommands")[0].splitlines())) <= 100


def test_an_unknown_name_gets_the_nearest(capsys):
  assert script.main(["kivi", "snapkw"]) == 2
  printed = capsys.readouterr()
  assert printed.out == "" and "'snapkw'" in printed.err
  assert "nearest: SnapKV" in printed.err
  for nothing in ("", "???"):
    assert script.main([nothing]) == 2
  assert "none is near" in capsys.readouterr().err


def test_every_name_is_of_one_system():
  keys = [key for system in SYSTEMS for key in script.keys(system)]
  assert len(keys) == len(set(keys))
  for system in SYSTEMS:
    for name in (system.name, *system.also):
      assert script.named(name) == [system]


def test_scripts_run_by_their_names():
  run = lambda *words: subprocess.run(
    [sys.executable, "-m", "launch", *words],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  completed = run("systems", "Mooncake")
  assert completed.returncode == 0, completed.stderr
  assert completed.stdout.startswith(
    "Mooncake (https://arxiv.org/abs/2407.00079)"
  )
  completed = run("no_such", "Mooncake")
  assert (completed.returncode, completed.stdout) == (2, "")
  assert "'no_such'" in completed.stderr
