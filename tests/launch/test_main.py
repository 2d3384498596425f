"""python -m launch: a line for each script."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from absl import flags

import launch
import ringjax
from launch import evaluate, plan
from launch.__main__ import scripts
from launch.shared import entry_points
from launch.shared.flag_helpers import FlagHelper
from ringjax.infer import GenerateConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_lists_every_script_with_its_purpose():
  done = subprocess.run(
    [sys.executable, "-m", "launch"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  rows = {}
  for line in done.stdout.splitlines():
    if line.startswith("  python -m launch."):
      name, purpose = line.split("launch.", 1)[1].split(maxsplit=1)
      rows[name] = purpose
  started = {
    path.stem
    for path in (ROOT / "launch").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text("utf-8")
  }
  assert set(rows) == started - {"__main__"}
  assert all(purpose.endswith(".") for purpose in rows.values())


# Those whose flags are defined by a function of that name.
SCRIPTS = [
  name
  for name in scripts()
  if "\ndef define(" in (ROOT / "launch" / f"{name}.py").read_text("utf-8")
]
# Scripts that are not installed, each with the reason.
NOT_INSTALLED = {"bench": "benchmarks/ is not in the wheel"}


def test_a_file_that_is_no_script_names_the_right_command():
  done = subprocess.run(
    [sys.executable, "-m", "launch.planning.cycles", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == (
    "launch.planning.cycles is not a command; run python -m launch.plan cycles"
    "\n"
  )


@pytest.mark.parametrize("command", plan._COMMANDS)
def test_a_sub_command_of_plan_is_found_by_its_name(command):
  right = f"python -m launch.plan {command}"
  hint = launch._hint(f"launch.{command}")
  if command == "serve":
    # A script has that name.
    assert hint is None
  else:
    assert right in hint.split(" or ")


@pytest.mark.parametrize("command", evaluate._COMMANDS)
def test_a_sub_command_of_evaluate_is_found_and_has_its_flags(command):
  right = f"python -m launch.evaluate {command}"
  assert right in (launch._hint(f"launch.{command}") or "").split(" or ")
  assert (command in evaluate._OWN_FLAGS) != (command in evaluate._COMMON)
  assert evaluate._uses(command, "out", False)
  assert not evaluate._uses("another", "model", False)


def test_files_of_sub_commands_name_them_in_their_first_line():
  named = []
  for path in sorted((ROOT / "launch" / "planning").glob("[!_]*.py")):
    hint = launch._hint(f"launch.planning.{path.stem}")
    named += hint.split(" or ")
  named = {x.removeprefix("python -m launch.plan ") for x in named}
  own = {"kvr", "pictures"}  # Those of plan.py itself.
  assert {*plan._COMMANDS} - own == named - {"python -m launch"}


@pytest.mark.parametrize(
  ("name", "hint"),
  [
    ("shared.common", "python -m launch"),
    (
      "stages",
      "python -m launch.plan fastdecode or python -m launch.plan liger",
    ),
    ("needle", "python -m launch.evaluate needle"),
    ("serve", None),
    ("nothing", None),
  ],
)
def test_hints_to_what_is_no_script(name, hint):
  assert launch._hint(f"launch.{name}") == hint


def test_installed_commands_start_the_script_of_their_name(tmp_path):
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  commands = project["project"]["scripts"]
  wanted = {f"ringjax-{name}" for name in {*scripts()} - {*NOT_INSTALLED}}
  others = {"ringjax-lm-eval": "ringjax.eval.lm_eval_model:main"}
  entry_point = "ringjax.launch.shared.entry_points:main"
  assert commands == dict.fromkeys(wanted, entry_point) | others
  # What pip writes for an entry point.
  command = tmp_path / "ringjax-tokenize"
  module = entry_point.removesuffix(":main")
  command.write_text(f"from {module} import main\nmain()\n")
  done = subprocess.run(
    [sys.executable, command, "--help"],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  # Commands in the help are those of the installed package.
  usage = "python -m ringjax.launch.tokenize --tokenizer"
  assert usage in done.stdout, done.stderr


def test_the_wheel_installs_one_top_level_package():
  """`launch` is in the wheel by the link `ringjax/launch` alone."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  find = project["tool"]["setuptools"]["packages"]["find"]
  assert find["include"] == ["ringjax*"]
  assert (ROOT / "ringjax" / "launch").resolve() == ROOT / "launch"


def test_the_installed_package_starts_its_own_scripts():
  """Child processes and messages name the package as it was imported."""
  code = (
    "from ringjax.launch.shared import console, entry_points\n"
    "print(entry_points.script_command('serve')[-1])\n"
    "console.Screen('x').say('see python -m launch.plan kvr')"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.stdout == "ringjax.launch.serve\n", done.stderr
  assert done.stderr == "see python -m ringjax.launch.plan kvr\n"
  assert entry_points.script_command("serve")[-1] == "launch.serve"
  assert entry_points.command_text("python -m launch") == "python -m launch"


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["generate", "tokenize"])
def test_help_that_was_asked_for_is_no_failure(name):
  done = subprocess.run(
    [sys.executable, "-m", f"launch.{name}", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0
  assert f"launch.{name}" in done.stdout and done.stderr == ""
  if name == "generate":
    # Flags stand below what the parts of `GenerateConfig` are about.
    for part in GenerateConfig.fields():
      if "part" in part.metadata:
        assert f"\n{part.metadata['meaning']}\n  --" in done.stdout


def test_paths_of_flags_may_begin_at_home():
  values = flags.FlagValues()
  FlagHelper(values).path("model", None, "A folder.")
  values(["generate", "--model=~/models/x"])
  assert values.model == os.path.expanduser("~/models/x")


# Flags of files that a script writes, of each script with its `define`.
OUTPUTS = {
  "calibrate": (), "chat": (), "doctor": ("json",),
  "evaluate": ("plot", "out"),
  "generate": ("log",), "plan": ("plot", "hlo", "timeline"),
  "prefill": ("plot",), "serve": ("log_calls",), "tokenize": ("out",),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_file_to_write_is_checked_before_the_work(name, tmp_path):
  (tmp_path / "taken").write_text("a file, not a folder", "utf-8")
  values = flags.FlagValues()
  importlib.import_module(f"launch.{name}").define(values)
  words = (
    "PNG of",
    "PNG to",
    "File for",
    "File to write",
    "JSON file of",
    "csv to which",
  )
  outputs = {
    flag for flag in values if any(x in f"{values[flag].help}" for x in words)
  }
  assert outputs <= {*OUTPUTS[name]}
  for flag in OUTPUTS[name]:
    path = tmp_path / "new" / flag / "result"
    values([name, f"--{flag}={path}"])
    assert path.parent.is_dir()
    for wrong, words in (
      (tmp_path / "taken" / "result", "cannot write to .*taken"),
      (tmp_path, "a directory; add the name of the file"),
      ("", "an empty path"),
    ):
      with pytest.raises(flags.IllegalFlagValueError, match=words):
        values([name, f"--{flag}={wrong}"])


def test_configs_are_found_from_any_folder(tmp_path):
  done = subprocess.run(
    [
      sys.executable, "-m", "launch.train",
      "--config=configs/train/tiny_long.py", "--help_config",
    ],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )  # fmt: skip
  assert done.returncode == 0 and "32768" in done.stdout, done.stderr


def test_the_version_is_that_of_the_package():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  assert ringjax.__version__ == project["project"]["version"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_of_a_script_has_all_of_its_flags(name):
  module = importlib.import_module(f"launch.{name}")
  values = flags.FlagValues()
  module.define(values)
  shown = {
    flag.name
    for where in (module.__name__, "launch.shared.common")
    for flag in values.get_key_flags_for_module(where)
  }
  assert shown == set(values)
