"""The notebooks in colab/ run from top to bottom; their outputs are of them."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import nbclient
import nbformat
import pytest

from ringjax.models import small
from tests.launch.conftest import ROOT, environment

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
# What makes a notebook quick enough for a test.
QUICK = {
  r"CONTEXT = [\d_]+": "CONTEXT = 1_024",
  r"CONTEXT, PAGE = [\d_]+": "CONTEXT, PAGE = 1_024",
  r"LENGTH, ROWS = 1_024, 6": "LENGTH, ROWS = 256, 2",
  r"DOCUMENTS, SIZE = \d+, \d+": "DOCUMENTS, SIZE = 12, 160",
  r"trials = \d+": "trials = 1",
  r"requests = 1000": "requests = 300",
  r"SHARDS, LENGTH, STEPS = 8, 512, 40": "SHARDS, LENGTH, STEPS = 8, 128, 6",
  r"HEADS, LAYERS, VOCAB = 128, 8, 2": "HEADS, LAYERS, VOCAB = 64, 8, 1",
  r"LENGTHS = \[512.*\]": "LENGTHS = [512]",
  r"LENGTHS = \[2\*\*k for k in range\(1., 2.\)\]": "LENGTHS = [2**12, 2**20]",
  r"MESHES = \[.*\]": "MESHES = [4, 16]",
  r"else \(128, 2048\)": "else (32, 256)",
  r"else \(300, 40\)": "else (20, 4)",
  r"TEXTS, LENGTH = 6, 768": "TEXTS, LENGTH = 2, 256",
  r"ASKED = .*": 'ASKED = ("integers, shadow",)',
  r"SHOWN = tuple.*": 'SHOWN = ("float32", *list(make)[2::3])',
  r"STRATEGIES = .*": 'STRATEGIES = ("gather", "ring")',
  r"BLOCKS = .*": "BLOCKS = (1, None)",
  r"WINDOWS = .*": "WINDOWS = (4,)",
  r"NEW = 12": "NEW = 4",
  r"SCALE, LAYERS, NEW = .*": "SCALE, LAYERS, NEW = 8, 6, 2",
  r"READ = 16_384": "READ = 1_024",
  r"REQUESTS = 400": "REQUESTS = 100",
  r"HERE = \[.*\]": "HERE = [512]",
  r"LENGTH, STEPS = 256, 32": "LENGTH, STEPS = 128, 12",
  r"SIZES, ROUNDS = .*": "SIZES, ROUNDS = [8], 1",
  r"STEPS, GROUPS = .*": "STEPS, GROUPS = 5, 2",
  r"DRAFT_STEPS = .*": "DRAFT_STEPS = 20",
}


def found(printed: str, times: int) -> None:
  """The passkey is the model's answer so often, with keys of striped layout."""
  assert "striped" in printed
  assert printed.count("48213") >= times


def five_kinds(printed: str) -> None:
  """Each kind answers three questions; as numbers, all of them right."""
  kinds = re.findall(r"^(\S.*): [\d.]+ MB\n((?:   .*\n)+)", printed, re.M)
  answers = {name: lines.splitlines() for name, lines in kinds}
  names = ["dense", "int8", "hadamard4", "hadamard3", "half of the tokens"]
  assert list(answers) == names
  assert all(len(lines) == 3 for lines in answers.values())
  for number, line in zip(
    ("48213", "90377", "15562"), answers["dense"], strict=True
  ):
    assert number in line


def twenty_questions(printed: str) -> None:
  """Most are answered, and the common part of prompts is there once."""
  right, of = re.search(r"(\d+) of (\d+) found$", printed, re.M).groups()
  assert int(of) == 20 and int(right) >= 15
  number = lambda text: int(text.replace(",", ""))
  computed = number(re.search(r"([\d,]+) tokens of prompts", printed)[1])
  cached = number(re.search(r"computed, ([\d,]+) found", printed)[1])
  assert computed < cached / 4
  counted = re.findall(r'"(\w+)": ([\d,]+) keys read for ([\d,]+)', printed)
  reads = {name: (number(x), number(y)) for name, x, y in counted}
  assert reads["always"][0] < reads["always"][1] / 4
  # Each for itself where sharing would change bits, which is said.
  apart = "each question reads for itself" in printed
  assert (reads["exact"][0] == reads["exact"][1]) == apart
  # Everybody's pages, those of a document, and a question's own.
  levels = re.search(r"used by \[(.*)\] questions", printed)[1]
  assert {"20", "10", "1"} <= set(levels.split(", "))


def contexts_read_once(printed: str) -> None:
  """Twelve encodings serve all questions; in place, answers are right."""
  counters = re.findall(r"encoded=(\d+)", printed)
  assert counters and set(counters) == {"12"}
  asked = re.findall(r"^\[.*\] (\d+) -> (.*)$", printed, re.M)
  assert len(asked) == 3
  assert sum(number in answer for number, answer in asked) >= 2
  ways = dict(re.findall(r"^(\w+) +(\d+)% found", printed, re.M))
  assert ways["full"] == ways["recompute"] == "100"


def drafts_are_right(printed: str) -> None:
  """All drafters save calls, and so do drafts behind a sharded document."""
  rates = re.findall(r"([\d.]+) tokens a call", printed)
  assert len(rates) == 5 and min(map(float, rates)) > 2
  calls = re.findall(r": 48 tokens in (\d+) calls", printed)
  assert int(calls[0]) == 48 and int(calls[1]) < 36


def a_ring_is_exact(printed: str) -> None:
  """Every way differs from dense attention by rounding, and stripes save."""
  errors = list(map(float, re.findall(r"([\d.]+e-\d+)", printed)))
  assert len(errors) == 7 and max(errors) < 1e-5
  paces = re.findall(r"([\d,]+) if each hop waits", printed)
  ring, striped = (int(n.replace(",", "")) for n in paces)
  assert ring > 1.8 * striped


def which_way_wins(printed: str) -> None:
  """Apart where later tokens are urgent, together where the first one is."""
  rows = re.findall(r": together (\d+), mixed (\d+), apart (\d+)", printed)
  (one, _, apart), (other, _, last) = (tuple(map(int, row)) for row in rows)
  assert apart > one and other > last
  moved = re.findall(r"caches move ([\d.]+) s", printed)
  assert sorted(moved, key=float) == moved and len(set(moved)) == 3


def same_losses(printed: str) -> None:
  """Eight shards train as one does, in less memory at each length."""
  apart = re.search(r"they differ by ([\d.e+-]+) at most", printed)[1]
  assert float(apart) < 1e-3
  first, last = re.findall(r"1 shard.*: loss ([\d.]+) to ([\d.]+)", printed)[0]
  assert float(last) < float(first)
  rows = re.findall(r"shards?, .*: ((?:[\d.]+ MB(?:, )?)+)", printed)
  one, many = ([float(x) for x in re.findall(r"[\d.]+", r)] for r in rows)
  assert len(one) == 1 and all(a > b for a, b in zip(one, many, strict=True))


def longer_rows_are_read(printed: str) -> None:
  """Losses fall in training, and there are three curves by position."""
  first, last = re.search(r"^loss ([\d.]+) to ([\d.]+)", printed, re.M).groups()
  assert float(last) < float(first)
  curves = re.findall(r": ([\d.]+) nats a byte, ([\d.]+) in", printed)
  assert len(curves) == 3
  assert all(0 < float(x) < float(first) for one in curves for x in one)


def a_million_is_planned(printed: str) -> None:
  """A ring needs less than a gather, and the passkey is read."""
  found = dict(re.findall(r"^(\w+): a call ([\d,]+) MB", printed, re.M))
  size = {name: int(x.replace(",", "")) for name, x in found.items()}
  assert size["ring"] < size["hybrid"] < size["gather"]
  counted = dict(re.findall(r"^([\w ]+): ([\d.]+) MB$", printed, re.M))
  assert float(counted["ring"]) < float(counted["scores of all pairs"])
  assert "48213" in printed


def choices_are_measured(printed: str) -> None:
  """Both machines have a choice, and choices are compared with times."""
  kinds = re.findall(r"^(tpu-v5e|h100) takes \[(.+)\]", printed, re.M)
  assert len(kinds) == 2 and all("ulysses" in x for _, x in kinds)
  _, of, times = re.search(
    r"(\d+) of (\d+) choices .* ([\d.]+) times", printed
  ).groups()
  assert int(of) == 1 and float(times) >= 1


def fewer_bits_lose_little(printed: str) -> None:
  """Bytes fall by four and more; losses hardly rise; answers are right."""
  rows = re.findall(r"^(.+?) +([\d.]+) MB, ([\d.]+) nats a byte", printed, re.M)
  size = {name: float(x) for name, x, _ in rows}
  loss = {name: float(x) for name, _, x in rows}
  assert len(rows) == 3
  assert size["integers, shadow"] < size["float32"] / 3.8
  assert size["codes, 4 bits"] < size["float32"] / 6
  assert max(loss.values()) < loss["float32"] + 0.05
  assert printed.count("'48213") == 2


def a_budget_is_kept(printed: str) -> None:
  """Layers are on disk, the bytes held fit, and a batch reads no more."""
  budget, disk, of = re.search(
    r"budget ([\d.]+) GB: (\d+) of (\d+) layers", printed
  ).groups()
  assert 0 < int(disk) <= int(of)
  rows = re.findall(r"([\d.]+) GB read a token, ([\d.]+) GB held", printed)
  assert len(rows) == 2 and rows[0][0] == rows[1][0]
  assert all(float(held) <= float(budget) for _, held in rows)
  assert "a pass took" in printed


def the_disk_is_read_less(printed: str) -> None:
  """Windows bound what is in memory, and neurons of before are there."""
  held = re.findall(r"^window (\w+): ([\d.]+) of ([\d.]+) MB", printed, re.M)
  assert [x for x, *_ in held] == ["1", "None"]
  sizes = [float(x) for _, x, _ in held]
  assert sizes == sorted(sizes) and sizes[0] < sizes[-1] / 2
  waits = re.findall(r"a token, (\d+) of it waiting", printed)
  assert int(waits[0]) > int(waits[1]) >= int(waits[2]) == 0
  there = re.findall(r"calls: (\d+)% of neurons", printed)
  assert len(there) == 1 and int(there[0]) > 50


def the_same_tokens_anywhere(printed: str) -> None:
  """Groups, workers and another mesh change no token; one spare serves more."""
  for same in ("tokens of one device", "same beside", "same tokens"):
    assert f"{same}: True" in printed
  held = [
    list(map(int, row.split(", ")))
    for row in re.findall(r"tokens held \[(.*)\]", printed)
  ]
  assert len(held) == 3 and all(not any(row[3:]) for row in held)
  assert held[0][2] == held[1][2] == 0 < held[2][2]
  assert float(re.search(r"logits differ by (\S+)", printed)[1]) < 1e-4
  wire = re.findall(r"([\d,]+) bytes a token on the wire", printed)
  assert len(wire) == 3 and len(set(wire)) == 1
  kept = dict(re.findall(r"^(.*): 90% up to ([\d.]+)", printed, re.M))
  assert float(kept["elastic, 1 spare"]) > float(kept["TP8"])
  assert int(re.search(r"(\d+) of \d+ tokens were found", printed)[1]) > 300


def small_weights_are_named(printed: str) -> None:
  """Without a net it says so, and the small model answers."""
  assert "HuggingFaceTB/SmolLM2-135M-Instruct can't be fetched" in printed
  assert "weights: the small model of ringjax" in printed
  assert "the number is in it: True" in printed
  mean, last = re.search(r"([\d.]+) nats a token, ([\d.]+)", printed).groups()
  assert float(last) < float(mean)


def some_keys_are_read(printed: str) -> None:
  """Tiles are left out, an index begins as nothing, and pages are copied."""
  parts = re.findall(r"^threshold [\d.]+: (\d+)% of the tiles", printed, re.M)
  first, second = map(int, parts)
  assert second < first < 100
  assert printed.count("48213") >= 2
  assert "equal to dense: True" in printed
  recalls = re.findall(r"recall ([\d.]+), of the worst", printed)
  assert len(recalls) == 2 and all(0.2 < float(x) <= 1 for x in recalls)
  hot, copied = re.search(r"([\d,]+) chosen .* ([\d,]+) were", printed).groups()
  assert int(hot.replace(",", "")) > 0 < int(copied.replace(",", ""))


def a_rewarded_model_drafts_in_four_bits(printed: str) -> None:
  """Both sides have the same numbers, and drafts and codes keep the answers."""
  first, last = re.search(
    r"^reward ([\d.]+) to ([\d.]+)", printed, re.M
  ).groups()
  assert float(last) > float(first)
  difference = re.search(r"engine differ by ([\d.e+-]+)", printed)[1]
  assert float(difference) < 1e-4
  sizes = re.findall(r"^(?:floats|four bits): ([\d.]+) MB", printed, re.M)
  assert float(sizes[1]) < float(sizes[0]) / 4
  assert "same tokens: True" in printed
  assert float(re.search(r"([\d.]+) tokens a call", printed)[1]) > 1


# What a notebook must have printed; one that isn't here fails.
PRINTS: dict[str, Callable[[str], None]] = {
  "01_generate": lambda printed: found(printed, 1),
  "02_kv_runahead": lambda printed: found(printed, 2),
  "03_caches": five_kinds,
  "04_serve": twenty_questions,
  "05_contexts": contexts_read_once,
  "06_speculate": drafts_are_right,
  "07_ring_from_scratch": a_ring_is_exact,
  "08_simulate_a_cluster": which_way_wins,
  "09_flax_model": same_losses,
  "10_train_32k": longer_rows_are_read,
  "11_million": a_million_is_planned,
  "12_choose": choices_are_measured,
  "13_offload": a_budget_is_kept,
  "14_groups_apart_in_pairs": the_same_tokens_anywhere,
  "15_integers": fewer_bits_lose_little,
  "16_window_flash": the_disk_is_read_less,
  "17_real_weights": small_weights_are_named,
  "18_sparse_attention": some_keys_are_read,
  "19_rewards_to_four_bits": a_rewarded_model_drafts_in_four_bits,
}
# The first is for every commit.
MARKS = {
  "01_generate": pytest.mark.long,
  "04_serve": pytest.mark.slow,
  "05_contexts": pytest.mark.slow,
  "06_speculate": pytest.mark.slow,
  "07_ring_from_scratch": pytest.mark.long,
  "09_flax_model": pytest.mark.slow,
  "10_train_32k": pytest.mark.slow,
  "15_integers": pytest.mark.slow,
  "16_window_flash": pytest.mark.long,
  "17_real_weights": pytest.mark.slow,
  "18_sparse_attention": pytest.mark.slow,
  "19_rewards_to_four_bits": pytest.mark.slow,
}
# What of Colab's runtimes shows most; the others are for a CPU.
RUNTIMES = {
  "TPU": ("01", "07", "09", "10", "11"),
  "GPU": ("03", "04", "05", "06", "15", "17"),
}
# They run for too long to store what they show with each change.
WITHOUT_OUTPUTS = ("10", "13")
# An absolute path of a machine, none of an address or a fraction.
MACHINE = re.compile(
  r"(?<![\w.:/])/(?:work|root|tmp|home|usr|opt|var|content)/"
)


def source(cell: dict) -> str:
  return "".join(cell["source"])


def test_there_are_notebooks():
  assert NOTEBOOKS


def code_of(path: pathlib.Path) -> list[dict]:
  cells = json.loads(path.read_text())["cells"]
  return [cell for cell in cells if cell["cell_type"] == "code"]


def output_faults(notebook: dict) -> list[str]:
  """Faults of the outputs that a notebook holds."""
  code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  sources = json.dumps([source(cell) for cell in code]).encode()
  of = notebook["metadata"].get("ringjax", {}).get("code_sha256")
  faults = []
  if of != hashlib.sha256(sources).hexdigest():
    faults.append("of other code")
  counts = [cell["execution_count"] for cell in code]
  if counts != list(range(1, len(code) + 1)):
    faults.append(f"cells ran in the order {counts}")
  for cell in code:
    for output in cell["outputs"]:
      if output["output_type"] == "error":
        faults.append(f"cell {cell['id']} has failed")
        continue
      data = dict(output.get("data", {"text": output.get("text", "")}))
      picture = data.pop("image/png", None)
      if picture and len(base64.b64decode(picture)) > 60_000:
        faults.append(f"cell {cell['id']} has a picture above 60 kB")
      if MACHINE.search(json.dumps(data)):
        faults.append(f"cell {cell['id']} shows a path of a machine")
  if "outputs stored here" not in source(notebook["cells"][0]):
    faults.append("it does not say where they were made")
  return faults


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_the_cells(path: pathlib.Path):
  """Of the code as it is, and as `python colab/run.py` stores them."""
  notebook = json.loads(path.read_text())
  if path.name[:2] in WITHOUT_OUTPUTS:
    assert not any(cell["outputs"] for cell in code_of(path))
    assert {cell["execution_count"] for cell in code_of(path)} == {None}
    assert "outputs stored here" not in source(notebook["cells"][0])
    return
  assert output_faults(notebook) == []
  assert any(cell["outputs"] for cell in code_of(path))


def test_outputs_of_other_cells_are_seen():
  notebook = json.loads(NOTEBOOKS[0].read_text())
  code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  shows = next(cell for cell in code if cell["outputs"])
  shows["source"] = [*shows["source"], "\nx = 1"]
  shows["execution_count"] = 9
  text = {"output_type": "stream", "name": "stdout"}
  shows["outputs"] = [
    {"output_type": "error", "ename": "E", "evalue": "", "traceback": []},
    text | {"text": ["read /" + "root/a, 3 /4\n"]},
    {"output_type": "display_data", "data": {"image/png": "A" * 100_000}},
  ]
  assert len(output_faults(notebook)) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_the_first_cell_installs(path: pathlib.Path):
  cells = json.loads(path.read_text())["cells"]
  assert len({cell["id"] for cell in cells}) == len(cells)
  installs = ["%pip" in source(cell) for cell in code_of(path)]
  assert installs == [True, *[False] * (len(installs) - 1)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_asks_for_the_runtime_that_fits(path: pathlib.Path):
  metadata = json.loads(path.read_text())["metadata"]
  kinds = [k for k, some in RUNTIMES.items() if path.name[:2] in some]
  chip = {"TPU": "V5E1", "GPU": "T4"}
  assert [metadata.get("accelerator")] == (kinds or [None])
  assert metadata["colab"].get("gpuType") == (chip[kinds[0]] if kinds else None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_says_what_one_device_does_not_show(path: pathlib.Path):
  """A mesh of all devices has one device in a Colab runtime."""
  code = "\n".join(map(source, code_of(path)))
  forced = 'jax.config.update("jax_platforms", "cpu")' in code
  meshes = re.search(r"make_mesh\(\((?:-1|devices|SHARDS),\)", code)
  if meshes and not forced:
    assert re.search(r"\"?one device", code)


def hidden_names(code: str) -> list[str]:
  """Names of the library's inside that a cell uses."""
  tree = ast.parse(re.sub(r"^(\s*)[%!].*", r"\1pass", code, flags=re.M))
  attributes = [x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute)]
  imported = [
    part
    for x in ast.walk(tree)
    if isinstance(x, ast.ImportFrom)
    for part in (*(x.module or "").split("."), *(y.name for y in x.names))
  ]
  # The scheduler's state is the engine's own.
  inside = re.compile(r"_(?!_)|scheduler$")
  return [name for name in (*attributes, *imported) if inside.match(name)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_uses_hidden_names(path: pathlib.Path):
  assert [x for cell in code_of(path) for x in hidden_names(source(cell))] == []


def test_hidden_names_are_seen():
  code = "%pip install x\nfrom a._b import c\nengine.scheduler.tables\nx._y"
  assert sorted(hidden_names(code)) == ["_b", "_y", "scheduler"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_badge_opens_it_in_colab(path: pathlib.Path):
  first = source(json.loads(path.read_text())["cells"][0])
  where = "colab.research.google.com/github/ringjax/ringjax/blob/main/colab"
  assert f"{where}/{path.name})" in first


def first_code(path: pathlib.Path) -> str:
  cells = json.loads(path.read_text())["cells"]
  return next(source(c) for c in cells if c["cell_type"] == "code")


# Most begin alike: each way to begin is run once.
BEGINNINGS = {first_code(path): path for path in reversed(NOTEBOOKS)}


@pytest.mark.one_case
@pytest.mark.parametrize(
  "path", BEGINNINGS.values(), ids=lambda path: path.stem
)
def test_the_first_cell_installs_what_is_missing(path, tmp_path):
  """With a pip that writes down what it is asked for."""
  first = first_code(path)
  cell = tmp_path / "cell.ipy"
  asked = tmp_path / "asked"
  (tmp_path / "pip.py").write_text(
    "import json, sys\n"
    f"open({str(asked)!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
  )

  def run(before: str) -> None:
    cell.write_text(before + first)
    done = subprocess.run(
      [sys.executable, "-m", "IPython", "--no-banner", str(cell)],
      cwd=tmp_path,
      env={
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
      },
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

  run("")
  assert not asked.exists()
  # Python takes a module that is None for one that is not there.
  names = ["ringjax", "libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"]
  for plugin, extra in (("", ""), ("libtpu", ",tpu"), (names[2], ",cuda12")):
    absent = [name for name in names if name != plugin]
    if plugin:
      (tmp_path / f"{plugin}.py").write_text("")
    run(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    assert json.loads(asked.read_text()) == [
      "install",
      "-q",
      f"ringjax[plot{extra}] @ git+https://github.com/ringjax/ringjax",
    ]
  # A wheel of its own, by a path.
  wheel = tmp_path / "ringjax-0.1.0-py3-none-any.whl"
  address = re.compile(r'^RINGJAX = ".*"$', re.M)
  first = address.sub(f"RINGJAX = {str(wheel)!r}", first)
  run(f"import sys\nsys.modules.update(dict.fromkeys({names}))\n")
  asked_for = json.loads(asked.read_text())[-1]
  assert asked_for == f"ringjax[plot] @ {wheel.as_uri()}"


def printed_by(path: pathlib.Path, changes: dict[str, str]) -> str:
  """Text that a notebook prints when patterns of its code are replaced."""
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    for pattern, quick in changes.items():
      cell.source = re.sub(pattern, quick, cell.source)
  client = nbclient.NotebookClient(
    notebook,
    timeout=None,
    kernel_name="python3",
    resources={"metadata": {"path": str(path.parent)}},
  )
  # Nothing is fetched.
  more = {"MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
  with pytest.MonkeyPatch.context() as patched:
    for name, value in (environment() | more).items():
      patched.setenv(name, value)
    client.execute()
  return "".join(
    output.get("text", "")
    for cell in notebook.cells
    if cell.cell_type == "code"
    for output in cell.outputs
  )


@pytest.mark.long_cases(20)
@pytest.mark.parametrize(
  "path",
  [
    pytest.param(n, marks=MARKS.get(n.stem, pytest.mark.slow))
    for n in NOTEBOOKS
  ],
  ids=lambda path: path.stem,
)
def test_runs(path: pathlib.Path, tmp_path, monkeypatch):
  monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
  PRINTS[path.stem](printed_by(path, QUICK))


ONE_DEVICE = {'"jax_num_cpu_devices", 8': '"jax_num_cpu_devices", 1'}


@pytest.mark.long
@pytest.mark.parametrize("name", ["01", "02", "07"])
def test_runs_on_one_device(name: str):
  """The limits are printed, and vmap runs the ring."""
  (path,) = (x for x in NOTEBOOKS if x.name.startswith(name))
  printed = printed_by(path, QUICK | ONE_DEVICE)
  assert "one device: " in printed
  if name == "07":
    a_ring_is_exact(printed)
    assert "a Flax layer of 8 shards on one" in printed


@pytest.mark.slow
def test_weights_of_the_hub_are_taken(tmp_path, monkeypatch):
  """From the hub's cache, as a download leaves it."""
  (path,) = (x for x in NOTEBOOKS if x.name.startswith("17"))
  repository = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
  commit = "0" * 40
  shutil.copytree(small.path(), repository / "snapshots" / commit)
  (repository / "refs").mkdir()
  (repository / "refs" / "main").write_text(commit)
  monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
  printed = printed_by(path, QUICK)
  assert "weights: HuggingFaceTB/SmolLM2-135M-Instruct\n" in printed
  assert "the number is in it: True" in printed
