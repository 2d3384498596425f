"""The shape of the code: who imports whom, what is public, what import does.

After a wanted change of the public surface:
  python tests/test_structure.py --update
"""

from __future__ import annotations

import ast
import collections
import inspect
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PUBLIC_API = ROOT / "tests" / "public_api.txt"
UPDATE = "python tests/test_structure.py --update"

pytestmark = pytest.mark.smoke

# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------

# A file imports from its own folder and from rows above it in this list, i.e.
# from lower layers. "ringjax" is the package's own __init__.
ROWS = (
  (
    "typing",
    "errors",
    "checks",
    "config",
    "option_text",
    "regular_files",
    "json_text",
    "tree",
    "parallel",
  ),
  ("ops",),
  ("kv",),
  ("hub", "paths"),
  ("fetched_models",),
  ("nn", "data", "plan", "store", "transfer"),
  ("models",),
  ("train", "infer"),
  ("serve",),
  ("rl",),
  ("ringjax",),
  ("bench", "eval"),
  ("launch",),
  ("benchmarks",),
)
RANK = {folder: rank for rank, row in enumerate(ROWS) for folder in row}

# The lowest rows are functions of arrays: they know JAX and nothing else.
JAX_ONLY = {"jax", "jaxlib", "jaxtyping", "numpy"}
JAX_ONLY_ROWS = range(3)
FRAMEWORKS = {"flax", "optax", "orbax"}
NO_FRAMEWORK = {"data", "plan", "store", "transfer", "serve"}

COLLECTIVES = {
  "all_gather",
  "all_to_all",
  "ppermute",
  "pshuffle",
  "psum_scatter",
  "ragged_all_to_all",
}
COLLECTIVES_FILE = "ringjax/parallel/collectives.py"


def folder_of(module: str) -> str:
  """The entry of ROWS to which a dotted module belongs."""
  parts = module.split(".")
  if parts[0] == "ringjax" and len(parts) > 1:
    return parts[1]
  return parts[0]


def module_of(path: str) -> str:
  """'ringjax/ops/mask.py' -> 'ringjax.ops.mask'."""
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
  """Line and dotted name of all that a file imports, anywhere in it.

  What is imported under `if TYPE_CHECKING` is left out: annotations may name
  what no code of the file knows.
  """
  package = module_of(path).split(".")
  if not path.endswith("/__init__.py"):
    package = package[:-1]
  named_only = {
    part
    for node in ast.walk(tree)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for one in node.body
    for part in ast.walk(one)
  }
  for node in ast.walk(tree):
    if node in named_only:
      continue
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, *([base] if base else [])])
      # `from ringjax import ops` names a folder, not a name of the package.
      for alias in node.names:
        folder = base == "ringjax" and alias.name in RANK
        yield node.lineno, f"{base}.{alias.name}" if folder else base


def layer_faults(path: str, source: str) -> list[str]:
  """What a file imports and should not."""
  own = folder_of(module_of(path))
  if own not in RANK:
    return [f"{path}: no row for '{own}'; add it to ROWS"]
  faults = []
  for line, name in imports(path, ast.parse(source)):
    top, folder = name.split(".")[0], folder_of(name)
    where = f"{path}:{line}: {own} imports {name}"
    if top in ("ringjax", "launch", "tests"):
      if folder not in RANK:
        faults.append(f"{where}, which has no row")
      # The files of the ground row are small and may know each other.
      elif folder != own and RANK[folder] >= max(RANK[own], 1):
        faults.append(f"{where}, which is not in a lower row")
    elif top not in sys.stdlib_module_names:
      if RANK[own] in JAX_ONLY_ROWS and top not in JAX_ONLY:
        faults.append(f"{where}; this row knows {sorted(JAX_ONLY)} only")
      elif own in NO_FRAMEWORK and top in FRAMEWORKS:
        faults.append(f"{where}; it does without {sorted(FRAMEWORKS)}")
  return faults


def launch_faults(path: str, source: str) -> list[str]:
  """Imports of the scripts' folder that fail in the wheel or in a checkout.

  The wheel has `launch` as `ringjax.launch`. Its modules import each other
  relatively; a config is read by its path, so it names the package.
  """
  if not path.startswith("launch/"):
    return []
  is_config = path.startswith("launch/configs/")
  faults = []
  for node in ast.walk(ast.parse(source)):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [node.module or ""] if not node.level else ["."]
      if names == ["ringjax"]:
        names = [f"ringjax.{alias.name}" for alias in node.names]
    for name in names:
      if re.match(r"launch\b", name) or (is_config and name == "."):
        fault = True
      else:
        fault = not is_config and re.match(r"ringjax\.launch\b", name)
      if fault:
        remedy = "ringjax.launch" if is_config else "a relative import"
        faults.append(f"{path}:{node.lineno}: {name}; write {remedy}")
  return faults


def collective_faults(path: str, source: str) -> list[str]:
  """Collectives that a file uses, unless it is the one file that may."""
  if path == COLLECTIVES_FILE:
    return []
  faults = []
  for node in ast.walk(ast.parse(source)):
    names = []
    if isinstance(node, ast.Attribute):
      names = [node.attr]
    elif isinstance(node, ast.ImportFrom):
      names = [alias.name for alias in node.names]
    for name in COLLECTIVES.intersection(names):
      faults.append(
        f"{path}:{node.lineno}: {name}; only {COLLECTIVES_FILE} calls it"
      )
  return faults


def registrations(path: str, source: str) -> list[str]:
  """Dataclasses whose trees are equal to those of other classes."""
  return [
    f"{path}:{node.lineno}: register_dataclass; tree.register says why not"
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Attribute) and node.attr == "register_dataclass"
  ]


# What `allow_nan` is where JSON with infinities stays in its process.
_ALLOW_NAN = {
  "ringjax/models/checkpoint.py": "True",
  "ringjax/models/heads/added_layer.py": "True",
  "ringjax/models/more_tokens.py": "True",
}
# A script without the package, which makes texts.
_JSON_SCRIPT = "ringjax/data/text/render.py"


def json_faults(path: str, source: str) -> list[str]:
  """Uses of json by which NaN or infinities may leave the process."""
  if path == _JSON_SCRIPT:
    return []
  faults, want = [], _ALLOW_NAN.get(path, "False")
  tree = ast.parse(source)
  sound = {
    id(call.func)
    for call in ast.walk(tree)
    if isinstance(call, ast.Call)
    and want
    in [ast.unparse(x.value) for x in call.keywords if x.arg == "allow_nan"]
  }
  for node in ast.walk(tree):
    names = isinstance(node, ast.ImportFrom) and node.module == "json"
    writes = isinstance(node, ast.Attribute) and ast.unparse(node) in (
      "json.dump",
      "json.dumps",
      "json.JSONEncoder",
    )
    if names or (writes and id(node) not in sound):
      faults.append(
        f"{path}:{node.lineno}: {ast.unparse(node)}; take ringjax.json_text, "
        f"or say allow_nan={want}"
      )
  return faults


def sources() -> list[str]:
  files = [
    path.relative_to(ROOT).as_posix()
    for folder in ("ringjax", "launch", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
  ]
  return sorted(files)


@pytest.mark.parametrize("path", sources())
def test_layers(path):
  source = (ROOT / path).read_text()
  faults = layer_faults(path, source) + collective_faults(path, source)
  faults += registrations(path, source) + json_faults(path, source)
  faults += launch_faults(path, source)
  assert not faults, "\n".join(faults)


def test_folders_are_small():
  counts = collections.Counter(
    pathlib.PurePath(path).parent.as_posix()
    for path in sources()
    if not path.endswith(("__init__.py", "__main__.py"))
  )
  large = {folder: count for folder, count in counts.items() if count > 16}
  assert not large, f"folders of more than 16 files: {large}"


def test_files_of_caches_are_short():
  files = (ROOT / "ringjax" / "kv").rglob("*.py")
  lines = {path.name: len(path.read_text().splitlines()) for path in files}
  assert max(lines.values()) <= 700, lines


# An item of a folder's README.md: names, then what they hold.
_ITEM = re.compile(r"^(?:-|\d+\.) ((?:`[^`]+`(?:, )?)+): (.+)$", re.M)


def readme_faults(folder: pathlib.Path) -> list[str]:
  """Entries that a folder's README.md lacks, and those that don't exist."""
  readme = folder / "README.md"
  if not readme.is_file():
    return [f"{folder}: no README.md that lists its files"]
  wanted = {
    path.name + "/" * path.is_dir()
    for path in folder.iterdir()
    if path.name != "__init__.py"
    and (path.suffix in (".py", ".toml") or any(path.rglob("*.py")))
  }
  listed = set()
  for names, text in _ITEM.findall(readme.read_text("utf-8")):
    listed.update(re.findall("`([^`]+)`", names))
    # The steps of a journey name further files in their text.
    listed.update(re.findall(r"`([\w/]+/\w+\.py)`", text))
  faults = [f"{readme}: nothing about {name}" for name in wanted - listed]
  faults += [
    f"{readme}: {name} does not exist"
    for name in listed
    if not (folder / name).exists()
  ]
  return sorted(faults)


def test_readmes_list_the_files_of_their_folders():
  folders = {(ROOT / path).parent for path in sources()}
  folders.add(ROOT / "tests")
  faults = [fault for folder in folders for fault in readme_faults(folder)]
  assert not faults, "\n".join(sorted(faults))


@pytest.mark.parametrize(
  ("readme", "fault"),
  [
    (None, "no README.md"),
    ("- `a.py`, `b/`: two\n", ""),
    ("- `a.py`: one\n", "nothing about b/"),
    ("- `b/`: one\n", "nothing about a.py"),
    ("- `a.py`, `b/`: two\n- `old.py`: gone\n", "old.py does not exist"),
    ("- `a.py`, `b/`: two\n1. `b/c.py`: `b/d.py`\n", "b/d.py does not exist"),
  ],
)
def test_readmes_that_are_wrong_are_seen(readme, fault, tmp_path):
  (tmp_path / "b").mkdir()
  for name in ("__init__.py", "a.py", "b/c.py"):
    (tmp_path / name).touch()
  if readme is not None:
    (tmp_path / "README.md").write_text(readme)
  faults = readme_faults(tmp_path)
  assert len(faults) == bool(fault)
  assert fault in "".join(faults)


def test_there_is_something_to_check():
  assert {"ringjax/__init__.py", COLLECTIVES_FILE} <= set(sources())


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("ringjax/ops/mask.py", "import ringjax.nn.block"),
    ("ringjax/ops/mask.py", "from ringjax.kv import dense"),
    ("ringjax/ops/mask.py", "from ringjax import kv"),
    ("ringjax/ops/mask.py", "import ringjax as rj"),
    ("ringjax/ops/mask.py", "from ringjax import Causal"),
    ("ringjax/ops/mask.py", "from ..models import llama"),
    ("ringjax/ops/__init__.py", "from ..models import llama"),
    ("ringjax/ops/attention/api.py", "from ... import serve"),
    ("ringjax/ops/mask.py", "def f():\n  import ringjax.train"),
    ("ringjax/ops/mask.py", "from tests.helpers import make_mesh"),
    ("ringjax/ops/mask.py", "import flax"),
    ("ringjax/parallel/mesh.py", "from optax import adam"),
    ("ringjax/kv/dense.py", "import orbax.checkpoint as ocp"),
    ("ringjax/kv/dense.py", "import torch"),
    ("ringjax/errors.py", "import ringjax.ops.mask"),
    ("ringjax/train/step.py", "from ringjax.infer import decode"),
    ("ringjax/nn/block.py", "from ringjax.plan import cost"),
    ("ringjax/serve/engine.py", "from flax import nnx"),
    ("ringjax/bench/run.py", "import launch.shared.common"),
    ("ringjax/bench/run.py", "import ringjax.eval"),
    ("ringjax/__init__.py", "from ringjax.bench import report"),
    ("ringjax/utils/stuff.py", ""),
    ("ringjax/serve/engine.py", "import ringjax.utils"),
  ],
)
def test_layers_are_told_apart(path, source):
  assert len(layer_faults(path, source)) == 1


@pytest.mark.parametrize(
  ("path", "source"),
  [
    ("ringjax/ops/mask.py", "import jax, numpy, math\nimport jaxtyping as jt"),
    ("ringjax/ops/mask.py", "from . import softmax\nfrom .. import errors"),
    ("ringjax/ops/mask.py", "from ringjax.parallel import collectives"),
    (
      "ringjax/kv/cache.py",
      "if TYPE_CHECKING:\n  from ringjax.models import Transformer",
    ),
    ("ringjax/parallel/mesh.py", "from ringjax.errors import MeshError"),
    ("ringjax/nn/block.py", "import flax\nfrom ringjax.kv import base"),
    ("ringjax/__init__.py", "from ringjax.ops.mask import Mask"),
    ("ringjax/bench/run.py", "import ringjax as rj"),
    ("ringjax/bench/run.py", "from ringjax import Causal, ops"),
    ("launch/bench.py", "from .shared import common\nimport ringjax.bench"),
    ("launch/bench.py", "from absl import app"),
  ],
)
def test_lawful_imports_pass(path, source):
  assert layer_faults(path, source) == []


@pytest.mark.parametrize(
  ("path", "source", "faults"),
  [
    ("launch/plan.py", "from launch.shared import common", 1),
    ("launch/plan.py", "def f():\n  import launch", 1),
    ("launch/plan.py", "from ringjax.launch.shared import common", 1),
    ("launch/plan.py", "from ringjax import launch", 1),
    ("launch/plan.py", "from .shared import common\nimport launcher", 0),
    ("launch/configs/train/a.py", "from launch.train import default_config", 1),
    ("launch/configs/train/a.py", "from . import b", 1),
    ("launch/configs/train/a.py", "from ringjax.launch.train import x", 0),
    ("benchmarks/a.py", "from launch.shared import common", 0),
  ],
)
def test_imports_that_fail_in_the_wheel_are_seen(path, source, faults):
  assert len(launch_faults(path, source)) == faults


@pytest.mark.parametrize(
  "source",
  [
    "jax.lax.ppermute(x, 'seq', pairs)",
    "from jax.lax import all_gather",
    "from jax.lax import all_to_all as swap",
    "move = lax.psum_scatter",
  ],
)
def test_collectives_are_seen(source):
  assert (
    len(collective_faults("ringjax/ops/attention/strategies/ring.py", source))
    == 1
  )
  assert collective_faults(COLLECTIVES_FILE, source) == []


@pytest.mark.parametrize(
  ("source", "faults"),
  [
    ("json.dumps(x)", 1),
    ("json.dump(x, file, allow_nan=True)", 1),
    ("write = json.dumps", 1),
    ("from json import dumps", 1),
    ("json.JSONEncoder().encode(x)", 1),
    ("json.dumps(x, allow_nan=False)", 0),
    ("json.loads(x)", 0),
  ],
)
def test_json_with_infinities_is_seen(source, faults):
  assert len(json_faults("launch/generate.py", source)) == faults


# ---------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------

# Class names that still stand for two things: renamed one after another. An
# entry that is not needed any more fails.
CLASH = {
  "Linear",
}
# Module names that are the same idea at another layer.
SAME_IDEA = {
  "calibration": "kv: what was measured; models: its file",
  "checkpoint": "models: weights alone; train: all of a training's state",
  "delta": "ops: the recurrence; nn: the layer around it",
  "feedforward": "ops: the function of arrays; nn: the layer around it",
  "longspec": "models: the draft; infer: how it drafts",
  "needle": "data: the questions; eval: how a model answers them",
}
# Module names that still stand for two things, as `CLASH`.
MODULE_CLASH: set[str] = set()
# Folders in which a family may be asked for by its name.
FAMILY_FOLDER = "ringjax/models/families/"


def class_names(files: dict[str, str]) -> dict[str, list[str]]:
  """Where each class of the package is defined, by its name."""
  found: dict[str, list[str]] = {}
  for path, source in files.items():
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.ClassDef):
        found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
  return found


def module_names(files: Iterable[str]) -> dict[str, list[str]]:
  """The files of each module name, `__init__` aside."""
  found: dict[str, list[str]] = {}
  for path in files:
    name = pathlib.PurePosixPath(path).stem
    if name != "__init__":
      found.setdefault(name, []).append(path)
  return found


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
  return {name: where for name, where in names.items() if len(where) > 1}


def family_tests(path: str, source: str) -> list[str]:
  """Comparisons of a `family` with text: a family is data, not a branch."""
  if path.startswith(FAMILY_FOLDER):
    return []
  found = []
  for node in ast.walk(ast.parse(source)):
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
      sides = [node.left, *node.comparators]
    elif (
      isinstance(node, ast.Call)
      and isinstance(node.func, ast.Attribute)
      and node.func.attr in ("startswith", "endswith")
    ):
      sides = [node.func.value, *node.args]
    is_family = any(
      isinstance(x, ast.Attribute) and x.attr == "family" for x in sides
    )
    has_text = any(
      isinstance(part, ast.Constant) and isinstance(part.value, str)
      for x in sides
      for part in ast.walk(x)
    )
    if is_family and has_text:
      found.append(f"{path}:{node.lineno}: tests the name of a family")
  return found


def package() -> dict[str, str]:
  return {
    path: (ROOT / path).read_text()
    for path in sources()
    if path.startswith("ringjax/")
  }


# The file whose classes say what devices and links can do, and classes
# elsewhere that have such figures for another reason.
CHIPS_FILE = "ringjax/parallel/chips.py"
OF_RATES = {
  "HidingRow": "row of a published table",
  "KernelOutcome": "result: seconds of requests",
  "OffloadMachine": "nine rates that FlexGen fits, of what is moved when",
  "TableKey": "key of a table in files",
  "_CallWithCache": "work of a call, not a rate",
  "_State": "a link's queue in the event simulator",
}
_RATE = re.compile(r"(.*_)?(flops|bandwidth|latency_s|hbm_bytes|link_bytes_s)$")
# What a file without such classes and names does not have: few are parsed.
_RATES_OR_NAMES = re.compile(
  r"(flops|bandwidth|latency_s|hbm_bytes|link_bytes_s):"
  r"|^\w+ = (Chip|Cluster|Link|Machine)$",
  re.M,
)


def second_machines(path: str, source: str) -> list[str]:
  """Classes with rates of devices, and second names of classes of chips."""
  if path == CHIPS_FILE or not _RATES_OR_NAMES.search(source):
    return []
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ClassDef):
      rates = [
        x.target.id
        for x in node.body
        if isinstance(x, ast.AnnAssign)
        and isinstance(x.target, ast.Name)
        and _RATE.match(x.target.id)
      ]
      if rates:
        found.append(f"{node.name} ({path}) has {', '.join(rates)}")
    if (
      isinstance(node, ast.Assign)
      and isinstance(node.value, ast.Name)
      and node.value.id in ("Chip", "Cluster", "Link", "Machine")
    ):
      found.append(f"{ast.unparse(node)} ({path})")
  return found


def test_one_file_says_what_devices_and_links_can_do():
  found = [
    x for path, text in package().items() for x in second_machines(path, text)
  ]
  names = {text.split(" ")[0]: text for text in found}
  new = [text for name, text in names.items() if name not in OF_RATES]
  assert not new, f"use Machine, Chip or Link of {CHIPS_FILE}: {new}"
  gone = set(OF_RATES) - set(names)
  assert not gone, f"remove from OF_RATES: {sorted(gone)}"


@pytest.mark.parametrize(
  "source",
  ["Network = Link", "class Host:\n  bandwidth: float = 16e9"],
)
def test_a_second_link_is_seen(source):
  assert second_machines("ringjax/plan/new.py", source)


def test_no_class_name_twice():
  found = repeated(class_names(package()))
  new = {name: where for name, where in found.items() if name not in CLASH}
  assert not new, f"one name, two things: {new}"
  gone = CLASH - set(found)
  assert not gone, f"remove from CLASH: {sorted(gone)}"


def test_no_module_name_twice():
  found = repeated(module_names(package()))
  known = MODULE_CLASH | set(SAME_IDEA)
  new = {name: where for name, where in found.items() if name not in known}
  assert not new, f"one name, two modules: {new}"
  gone = known - set(found)
  assert not gone, f"remove from MODULE_CLASH or SAME_IDEA: {sorted(gone)}"


def test_no_branch_on_the_name_of_a_family():
  faults = [
    x for path, text in package().items() for x in family_tests(path, text)
  ]
  assert not faults, "\n".join(faults)


def unshaped(path: str, source: str) -> list[str]:
  """Array parameters of public functions whose annotation has no shape."""
  found = []

  def look(body: list[ast.stmt]) -> None:
    for node in body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        look(node.body)
      if not isinstance(node, ast.FunctionDef):
        continue
      if node.name.startswith("_") and not node.name.endswith("__"):
        continue
      arguments = node.args
      for x in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
      ):
        if x.annotation is not None and re.search(
          r"\bjax\.Array\b", ast.unparse(x.annotation)
        ):
          found.append(f"{path}:{x.lineno}: {node.name}({x.arg}) has no shape")

  look(ast.parse(source).body)
  return found


# Parameters and fields of any object, and why no type says more.
OF_ANY_OBJECT = {
  "algorithm": "a local algorithm or a strategy: `attend.Algorithm`, in part",
  "local": "the same, of which each kind has other methods too",
  "fallback": "the same",
  "decoder": "the same, of few queries",
  "kernel": "the same, that may decline",
  "codec": "of a layer above, with what `kv.codecs.VectorCodec` says, in part",
  "inner": "a layer's cache of keys or of a state, which have other methods",
  "index": "whatever indexes an array",
  "tokenizer": "what encodes, or what decodes: each call says which",
  "first": "of llguidance, which need not be there",
  "owner": "whatever an engine, or one without a model, keeps of a row",
  "store_state": "whatever a `BlockSource` keeps of a row",
}


def untyped(path: str, source: str) -> list[str]:
  """Parameters and fields of public functions and classes that are `Any`.

  What is handed on (`*args`, `**options`) may be anything, and so is the `self`
  of a class whose fields are those of the classes that inherit it.
  """
  found = []

  def is_any(annotation: ast.expr | None) -> bool:
    if annotation is None:
      return False
    return ast.unparse(annotation) in ("Any", "Any | None", "None | Any")

  def note(line: int, owner: str, name: str) -> None:
    if name not in (*OF_ANY_OBJECT, "self"):
      found.append(f"{path}:{line}: {name} of {owner} is Any")

  def look(body: list[ast.stmt]) -> None:
    for node in body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        for field in node.body:
          if isinstance(field, ast.AnnAssign) and is_any(field.annotation):
            note(field.lineno, node.name, ast.unparse(field.target))
        look(node.body)
      if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        continue
      if node.name.startswith("_") and not node.name.endswith("__"):
        continue
      given = node.args
      for x in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        if is_any(x.annotation):
          note(x.lineno, node.name, x.arg)

  look(ast.parse(source).body)
  return found


def test_public_parameters_have_types():
  files = package()
  faults = [x for path, text in files.items() for x in untyped(path, text)]
  assert not faults, "\n".join(faults)
  text = "".join(files.values())
  unused = [x for x in OF_ANY_OBJECT if not re.search(rf"\b{x}: Any\b", text)]
  assert not unused, f"remove from OF_ANY_OBJECT: {unused}"


@pytest.mark.parametrize(
  "source",
  [
    "def f(cache: Any): pass",
    "def f(*, cache: Any | None = None): pass",
    "async def f(cache: Any): pass",
    "class A:\n def f(self, cache: Any): 0",
    "class A:\n def __init__(self, cache: Any): 0",
    "class A:\n cache: Any = None",
  ],
)
def test_parameters_of_any_are_seen(source):
  assert len(untyped("ringjax/nn/block.py", source)) == 1
  for typed in ("Cache", "dict[str, Any]"):
    other = source.replace("Any | None", typed).replace("Any", typed)
    assert untyped("ringjax/nn/block.py", other) == []


def test_private_and_handed_on_may_be_any():
  for source in (
    "def _f(cache: Any): pass",
    "class _A:\n cache: Any",
    "def f(*cache: Any, **options: Any): pass",
    "def f() -> Any: pass",
  ):
    assert untyped("ringjax/nn/block.py", source) == []


def test_public_arrays_have_shapes():
  faults = [x for path, text in package().items() for x in unshaped(path, text)]
  assert not faults, "\n".join(faults)


def test_arrays_without_shapes_are_seen():
  path = "ringjax/nn/block.py"
  assert len(unshaped(path, "def f(x: jax.Array): pass")) == 1
  assert (
    len(unshaped(path, "class A:\n def f(self, x: jax.Array | None): 0")) == 1
  )
  assert unshaped(path, 'def f(x: Float[Array, "B T"]): pass') == []
  assert unshaped(path, "def _f(x: jax.Array): pass") == []


def any_annotations(source: str) -> int:
  """Annotations that are `Any`: of parameters, returns and variables."""

  def is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in (
      "Any",
      "Any | None",
      "None | Any",
    )

  return sum(
    is_any(getattr(node, "annotation", None))
    + is_any(getattr(node, "returns", None))
    for node in ast.walk(ast.parse(source))
  )


def array_returns(source: str) -> tuple[int, int]:
  """Public functions that return arrays, and how many of them say a shape."""
  counts = [0, 0]

  def bare(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
      if ast.unparse(node.value).endswith("Callable"):
        return False
      axes = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else None
      if isinstance(axes, ast.Constant) and isinstance(
        axes.value, str | types.EllipsisType
      ):
        return False
    if isinstance(node, ast.Name | ast.Attribute):
      name = node.id if isinstance(node, ast.Name) else node.attr
      return name in ("Array", "ndarray")
    return any(bare(child) for child in ast.iter_child_nodes(node))

  def look(body: list[ast.stmt]) -> None:
    for node in body:
      name = getattr(node, "name", "_")
      if name.startswith("_") and not name.endswith("__"):
        continue
      if isinstance(node, ast.ClassDef):
        look(node.body)
      if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        continue
      if node.returns is None:
        continue
      text = re.sub(r"Callable\[.*", "", ast.unparse(node.returns))
      if re.search(r"\b(Array|ndarray)\b", text):
        counts[0] += 1
        counts[1] += not bare(node.returns)

  look(ast.parse(source).body)
  return counts[0], counts[1]


# What the tree has reached: lower the first and raise the second, never back.
MOST_ANY_PER_1000_LINES = 5.6
LEAST_SHARE_OF_SHAPED_RETURNS = 0.99


def test_annotations_say_what_things_are():
  texts = [(ROOT / path).read_text(encoding="utf-8") for path in sources()]
  lines = sum(len(text.splitlines()) for text in texts)
  rate = 1000 * sum(map(any_annotations, texts)) / lines
  assert rate <= MOST_ANY_PER_1000_LINES, f"{rate:.2f} `Any` per 1,000 lines"
  returns, shaped = map(sum, zip(*map(array_returns, texts), strict=True))
  share = shaped / returns
  assert share >= LEAST_SHARE_OF_SHAPED_RETURNS, f"{share:.3f} have a shape"


@pytest.mark.parametrize(
  ("source", "count"),
  [
    ("def f(x: Any, *y: Any, z: Any | None = None, **w: Any) -> Any: 0", 5),
    ("x: Any = f()", 1),
    ("class A:\n x: Any", 1),
    ("def f(x: dict[str, Any]) -> list[Any]: 0", 0),
  ],
)
def test_annotations_of_any_are_counted(source, count):
  assert any_annotations(source) == count


@pytest.mark.parametrize(
  ("returned", "counts"),
  [
    ("jax.Array", (1, 0)),
    ("np.ndarray | None", (1, 0)),
    ('tuple[Float[Array, "B T"], jax.Array]', (1, 0)),
    ('tuple[Float[Array, "B T"], int]', (1, 1)),
    ("Float[Array, ...]", (1, 1)),
    ('dict[str, Int[np.ndarray, " T"]]', (1, 1)),
    ("Callable[[Array], Array]", (0, 0)),
    ("int", (0, 0)),
  ],
)
def test_returns_with_shapes_are_counted(returned, counts):
  assert array_returns(f"def f() -> {returned}: 0") == counts
  assert array_returns(f"class A:\n def f(self) -> {returned}: 0") == counts
  assert array_returns(f"def _f() -> {returned}: 0") == (0, 0)


def test_names_are_compared():
  files = {
    "ringjax/a/one.py": "class A:\n  class B: pass",
    "ringjax/b/one.py": "class B: pass",
    "ringjax/b/__init__.py": "",
  }
  assert set(repeated(class_names(files))) == {"B"}
  assert set(repeated(module_names(files))) == {"one"}


@pytest.mark.parametrize(
  "source",
  [
    'if config.family.startswith("gemma3"): pass',
    'x = self.family == "llama"',
    'x = config.family in ("llama", "mistral")',
  ],
)
def test_branches_on_a_family_are_seen(source):
  assert len(family_tests("ringjax/models/transformer.py", source)) == 1
  assert family_tests(FAMILY_FOLDER + "gemma.py", source) == []
  assert family_tests("ringjax/nn/block.py", "a.family == b.family") == []


# ---------------------------------------------------------------------------
# The public surface
# ---------------------------------------------------------------------------


def public_names(module: types.ModuleType) -> list[str]:
  """`__all__`, or else every name in the module that is not a submodule."""
  names = getattr(module, "__all__", None)
  if names is None:
    names = [
      name
      for name, value in vars(module).items()
      if not name.startswith("_") and not inspect.ismodule(value)
    ]
  return sorted(names)


def describe(name: str, value: object) -> str:
  """One line: what a caller can write."""
  if inspect.isclass(value) and issubclass(value, BaseException):
    return f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
  if not callable(value):
    return name
  try:
    signature = inspect.signature(value)
  except (TypeError, ValueError):
    return f"{name}(...)"
  # Annotations are checked elsewhere; how they print differs between Pythons.
  bare = signature.replace(
    parameters=[
      p.replace(annotation=p.empty) for p in signature.parameters.values()
    ],
    return_annotation=signature.empty,
  )
  return re.sub(r" at 0x[0-9a-f]+", "", f"{name}{bare}")


def surface(module: types.ModuleType) -> list[str]:
  return [
    describe(name, getattr(module, name)) for name in public_names(module)
  ]


def undocumented(module: types.ModuleType) -> list[str]:
  """Public callables without words of their own."""
  found = []
  for name in public_names(module):
    value = getattr(module, name)
    words = (getattr(value, "__doc__", None) or "").strip()
    # Dataclasses and named tuples write a signature where words are missing.
    if callable(value) and (not words or words.startswith(f"{name}(")):
      found.append(name)
  return found


def planted(source: str) -> types.ModuleType:
  module = types.ModuleType("planted")
  exec(textwrap.dedent(source), vars(module))
  return module


@pytest.mark.long
def test_a_cluster_is_reached_from_the_package():
  code = "import ringjax as rj; print(rj.serve.cluster.LoadControl.__name__)"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stdout) == (0, "LoadControl\n"), done.stderr


def test_public_api():
  import ringjax

  want = PUBLIC_API.read_text().splitlines()
  have = surface(ringjax)
  gone = [f"- {line}" for line in want if line not in have]
  new = [f"+ {line}" for line in have if line not in want]
  assert have == want, "\n".join(
    [
      "the public surface is not what tests/public_api.txt says:",
      *gone,
      *new,
      f"if that is wanted, run: {UPDATE}",
    ]
  )


def test_public_callables_have_docstrings():
  import ringjax

  missing = undocumented(ringjax)
  assert not missing, f"public, without a docstring: {', '.join(missing)}"


def test_surface_of_a_planted_module():
  module = planted(
    """
    import os
    from typing import NamedTuple as _NamedTuple
    class Oops(ValueError): "Words."
    class Pair(_NamedTuple):
      a: int
      b: int = 2
    def f(x: int, *, y: str = "z") -> None: "Words."
    def g(x=object()): pass
    _hidden = 1
    version = "1"
    """
  )
  assert surface(module) == [
    "Oops(ValueError)",
    "Pair(a, b=2)",
    "f(x, *, y='z')",
    "g(x=<object object>)",
    "version",
  ]
  assert undocumented(module) == ["Pair", "g"]
  module.__all__ = ["f", "Pair"]
  assert public_names(module) == ["Pair", "f"]


# ---------------------------------------------------------------------------
# Importing
# ---------------------------------------------------------------------------

HEAVY = ["flax", "matplotlib", "optax", "orbax", "torch"]
# These are what a user starts with; they answer before anything heavy loads.
LIGHT = {"ringjax", "launch", "launch.bench", "launch.plan"}

PROBE = """
import importlib, json, os, sys
import jax
from jax._src import xla_bridge
found = {{}}
for name in {modules}:
  before = dict(jax.config.values), dict(os.environ)
  importlib.import_module(name)
  after = dict(jax.config.values), dict(os.environ)
  faults = found.setdefault(name, [])
  if xla_bridge.backends_are_initialized():
    faults.append("backend")
  if before[0] != after[0]:
    faults.append("config")
  if before[1] != after[1]:
    faults.append("environment")
  faults += sorted(set({heavy}) & set(sys.modules))
print("PROBE" + json.dumps(found), end="")
"""


def import_faults(
  modules: list[str], heavy: list[str], path: pathlib.Path
) -> dict[str, list[str]]:
  """What importing `modules` in a fresh interpreter does besides importing.

  Those that do nothing else are left out.
  """
  # Without the test run's own settings: a user's environment has none.
  env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
  env["PYTHONPATH"] = os.pathsep.join([str(path), str(ROOT)])
  done = subprocess.run(
    [sys.executable, "-c", PROBE.format(modules=modules, heavy=heavy)],
    capture_output=True,
    text=True,
    env=env,
    cwd=path,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  printed, _, found = done.stdout.partition("PROBE")
  faults = {name: said for name, said in json.loads(found).items() if said}
  if printed or done.stderr:
    faults.setdefault(modules[0], []).insert(0, "output")
  return faults


def importable() -> list[str]:
  launch = [m.name for m in pkgutil.iter_modules([str(ROOT / "launch")])]
  return ["ringjax", "launch", *(f"launch.{name}" for name in sorted(launch))]


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_import_is_inert_and_light(module, tmp_path):
  assert import_faults([module], HEAVY, tmp_path) == {}


def test_every_import_is_inert(tmp_path):
  assert import_faults(importable(), [], tmp_path) == {}


def test_import_that_is_not_inert_is_seen(tmp_path):
  (tmp_path / "torch.py").touch()
  (tmp_path / "loud.py").write_text(
    textwrap.dedent(
      """
      import os
      import jax
      import torch
      jax.config.update("jax_platforms", "cpu")
      jax.devices()
      os.environ["LOUD"] = "1"
      print("hello")
      """
    )
  )
  found = import_faults(["json", "loud"], HEAVY, tmp_path)
  # Whose output it was is not known.
  assert found == {
    "json": ["output"],
    "loud": ["backend", "config", "environment", "torch"],
  }


if __name__ == "__main__":
  if sys.argv[1:] != ["--update"]:
    sys.exit(f"usage: {UPDATE}")
  sys.path.insert(0, str(ROOT))
  import ringjax

  PUBLIC_API.write_text("".join(f"{line}\n" for line in surface(ringjax)))
  print(f"{PUBLIC_API.relative_to(ROOT)}: {len(surface(ringjax))} names")


# Of a kind of cache: arrays, a call's slots, a layer, room, changes, copies.
SIX_CACHE_METHODS = {
  "allocated", "allocate", "layer", "free", "changed", "export",
}  # fmt: skip
# Of one for a single call: refusals, slots, tiles, a layer, what remains.
CALL_CACHE_METHODS = {"check_coords", "allocate", "tile", "layer", "updated"}


def overridden_methods(texts: list[str], base: str) -> dict[str, set[str]]:
  """Public methods of a base class that each class below it overrides."""
  classes = [
    node
    for text in texts
    for node in ast.parse(text).body
    if isinstance(node, ast.ClassDef)
  ]
  methods = {
    node.name: {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
    for node in classes
  }
  bases = {node.name: {ast.unparse(x) for x in node.bases} for node in classes}

  def above(name: str) -> set[str]:
    return bases.get(name, set()).union(*map(above, bases.get(name, ())))

  contract = methods[base].union(*(methods.get(x, ()) for x in above(base)))
  contract = {name for name in contract if not name.startswith("_")}
  kinds = [name for name in bases if base in above(name)]
  return {name: methods[name] & contract for name in kinds}


def test_kinds_of_caches_override_six_methods():
  paths = [path for path in sources() if path.startswith("ringjax/")]
  texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
  # Parsing all files takes seconds.
  texts = [x for x in texts if re.search(r"^class .*Cache", x, re.MULTILINE)]
  stored = overridden_methods(texts, "ModelCache")
  assert {"KVCache", "EvictingCache", "RowGroups"} <= stored.keys()
  of_a_call = overridden_methods(texts, "CallCache")
  assert {"ModelCache", "NoCache", "PooledCache"} <= of_a_call.keys()
  more = {
    name: sorted(names - SIX_CACHE_METHODS)
    for name, names in stored.items()
    if names - SIX_CACHE_METHODS
  } | {
    name: sorted(names - CALL_CACHE_METHODS)
    for name, names in of_a_call.items()
    if names - CALL_CACHE_METHODS and name not in {"ModelCache", *stored}
  }
  assert not more, f"a base class can compute these: {more}"


def test_overridden_methods_are_counted():
  base = "class Call:\n def layer(self): 0\n def _own(self): 0"
  model = "class Model(Call):\n def steps(self): 0"
  kind = "class A(Model):\n def layer(self): 0\n def _own(self): 0"
  below = "class B(A):\n def steps(self): 0\n def own(self): 0"
  texts = [base, model, kind, below]
  assert overridden_methods(texts, "Model") == {"A": {"layer"}, "B": {"steps"}}
  of_call = overridden_methods(texts, "Call")
  assert of_call == {"Model": set(), "A": {"layer"}, "B": set()}
