"""Files that GitHub, Read the Docs and pre-commit read, which no test runs.

Their form by the rules that matter, and that what they name exists: jobs,
extras, scripts, flags and files.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tomllib

import pytest
from absl import flags

from launch import doctor, fetch, generate, train

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
  x for x in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if x.stem != "config"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KEYS = {
  "workflow": {"name", "on", "permissions", "concurrency", "jobs", "env"},
  "job": {
    "runs-on", "steps", "needs", "if", "strategy", "permissions",
    "environment", "timeout-minutes", "env",
  },
  "step": {"name", "uses", "run", "with", "if", "env", "id", "shell"},
}  # fmt: skip
SCRIPTS = {x.NAME: x for x in (doctor, fetch, generate, train)}
EVENTS = {"push", "pull_request", "schedule", "workflow_dispatch", "release"}


def read(path):
  values = yaml.safe_load(path.read_text())
  # YAML 1.1 takes a bare `on` for true.
  return {"on" if key is True else key: x for key, x in values.items()}


def extras_of(requirements):
  """Extras of ringjax in requirements such as '.[test]' and ringjax[test]."""
  names = re.findall(r"(?:^|['\" ])(?:\.|ringjax)\[([^\]]+)\]", requirements)
  return {x.strip() for group in names for x in group.split(",")}


def brought_by(extra):
  """Names of the packages that an extra asks for, with its other extras."""
  packages = set()
  for text in PROJECT["optional-dependencies"][extra]:
    for named in extras_of(text):
      packages |= brought_by(named)
    packages.add(re.match(r"[\w-]+", text)[0])
  return packages


def check_commands(text):
  """A shell can read them; extras, files, modules and flags in them exist."""
  subprocess.run(["bash", "-n", "-c", text], check=True)
  assert extras_of(text) <= PROJECT["optional-dependencies"].keys(), text
  for path in re.findall(
    r"(?<![\w/.-])(?:docs|tests|benchmarks)/[\w/.]+", text
  ):
    assert (ROOT / path).exists() or path == "docs/_build", path
  programs = re.findall(
    r"(?:bin/ringjax-|-m (?:ringjax\.)?launch\.)(\w+)((?:[ \\\n]+--\S+)*)", text
  )
  for name, passed in programs:
    assert name in SCRIPTS, name
    values = flags.FlagValues()
    if passed:
      SCRIPTS[name].define(values)
    for flag in re.findall(r"--(\w+)", passed):
      assert flag in (*values, "help", "help_config"), f"{name} --{flag}"
  for name in re.findall(r"bin/(ringjax-\w+)", text):
    assert name in PROJECT["scripts"], name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid(path):
  workflow = read(path)
  assert workflow.keys() <= KEYS["workflow"]
  assert workflow["on"].keys() <= EVENTS
  # Without it a workflow's token may write.
  assert workflow["permissions"] == {"contents": "read"}
  jobs = workflow["jobs"]
  uploads = {}
  for name, job in jobs.items():
    assert job.keys() <= KEYS["job"] and job["steps"], name
    assert job["runs-on"].startswith("ubuntu-")
    needs = job.get("needs", [])
    needs = {needs} if isinstance(needs, str) else set(needs)
    # Jobs come after those that they need, so that there is no circle.
    assert needs <= uploads.keys(), name
    uploads[name] = set()
    axes = job.get("strategy", {}).get("matrix", {})
    for axis in re.findall(r"\$\{\{ matrix\.(\w+) \}\}", repr(job)):
      assert axes[axis], axis
    for step in job["steps"]:
      assert step.keys() <= KEYS["step"] and ("uses" in step) != ("run" in step)
      if "run" in step:
        check_commands(step["run"])
        continue
      assert re.fullmatch(r"[\w-]+/[\w.-]+@[\w./-]+", step["uses"])
      options = step.get("with", {})
      if "/upload-artifact@" in step["uses"]:
        uploads[name].add(options["name"])
      if "/download-artifact@" in step["uses"]:
        assert any(options["name"] in uploads[x] for x in needs)
      if "/setup-python@" in step["uses"]:
        # A number would be 3.1 where 3.10 is meant.
        assert isinstance(options["python-version"], str)
        lowest = PROJECT["requires-python"].removeprefix(">=")
        versions = axes.get("python", [options["python-version"]])
        assert all(
          [*map(int, version.split("."))] >= [*map(int, lowest.split("."))]
          for version in versions
        )


def test_ci_s_commands_are_valid():
  text = (ROOT / ".ci" / "run").read_text()
  check_commands(text)
  (tests,) = read(GITHUB / "workflows" / "tests.yml")["jobs"]["tests"]["steps"][
    -1:
  ]
  assert tests["run"] in (ROOT / "README.md").read_text()


def test_hooks_run_programs_that_the_extra_dev_brings():
  hooks = [
    hook
    for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]
  ]
  assert len({hook["id"] for hook in hooks}) == len(hooks) > 0
  for hook in hooks:
    assert hook.keys() >= {"id", "name", "entry", "language"}
    assert hook["language"] == "system"
    assert hook["entry"].split()[0] in brought_by("dev")


def test_the_site_s_settings_name_files_and_extras():
  settings = read(ROOT / ".readthedocs.yaml")
  assert settings["version"] == 2
  assert settings["build"].keys() == {"os", "tools"}
  assert isinstance(settings["build"]["tools"]["python"], str)
  assert (ROOT / settings["sphinx"]["configuration"]).is_file()
  (install,) = settings["python"]["install"]
  assert install["method"] == "pip" and (ROOT / install["path"]).is_dir()
  for extra in install["extra_requirements"]:
    assert "sphinx" in brought_by(extra)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_of_reports_is_valid(path):
  form = read(path)
  assert form["name"] and form["description"]
  ids = []
  for part in form["body"]:
    assert part["type"] in (
      "markdown", "input", "textarea", "dropdown", "checkboxes"
    )  # fmt: skip
    assert part["attributes"][
      "value" if part["type"] == "markdown" else "label"
    ]
    ids += [part["id"]] if "id" in part else []
  assert len({*ids}) == len(ids)
