"""Eight CPU devices, strict JAX, and ringjax with its annotations checked."""

from __future__ import annotations

import atexit
import collections
import gc
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

# An accelerator on this machine must not change what the tests run on; the
# variable reaches subprocesses, the config below a JAX already imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is what the tests take their time for, and many compile the same
# programs, also in processes of their own. What a worker compiled it reads
# again until it ends. Workers do not share: JAX does not write these files at
# one stroke.
_PROGRAMS = tempfile.mkdtemp(prefix="ringjax-tests-")
atexit.register(shutil.rmtree, _PROGRAMS, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import jax
import jaxtyping
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What would widen or broadcast in silence raises here.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Modules whose functions check their own arguments and say what is wrong: the
# hook would speak first, in words that no user ever sees.
_EDGE = {
  "ringjax.ops.attention.api",
  "ringjax.ops.attention.arguments",
  "ringjax.ops.attention.blockwise",
  "ringjax.ops.attention.cost.call_shape",
  "ringjax.ops.attention.strategies.registry",
  "ringjax.ops.attention.execution",
  "ringjax.ops.attention.cost.select",
  "ringjax.ops.feedforward",
  "ringjax.ops.loss",
  "ringjax.ops.mask",
  "ringjax.parallel.chips",
  "ringjax.ops.recurrent.mixers",
  "ringjax.ops.recurrent.scan",
  "ringjax.ops.recurrent.sequence",
  "ringjax.ops.recurrent.shift",
  "ringjax.parallel.layout",
  "ringjax.parallel.mesh",
  "ringjax.parallel.call_sharding",
}
_ROOT = pathlib.Path(__file__).parents[1]
_MODULES = [
  ".".join(path.relative_to(_ROOT).with_suffix("").parts)
  for path in sorted((_ROOT / "ringjax").rglob("*.py"))
  if path.name != "__init__.py"
]
# Checks every annotated call in ringjax; it must come before its import. That
# takes a fifth of the time; .ci/run leaves it out after the default run.
if os.environ.get("RINGJAX_TESTS_CHECK_ANNOTATIONS", "1") == "1":
  import tests.lazy_checker  # noqa: F401

  jaxtyping.install_import_hook(
    [m for m in _MODULES if m not in _EDGE], "tests.lazy_checker.check"
  )

# Traced programs are millions of objects that stay; looking through them for
# cycles as often as Python does is a tenth of the time.
gc.freeze()
gc.set_threshold(200_000, 50, 100)

# "ci" gives the same examples each time, so that a red run is about the commit.
# For a search: HYPOTHESIS_PROFILE=long, or --hypothesis-profile=long.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile(
  "long", derandomize=False, deadline=None, max_examples=2000, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Mappings of memory that a process may have: 65,530 on Linux, and compiled
# programs take several each. A compiler that gets no more ends the process.
# So few at the end of a file leave the next one room; within a file, whose
# tests share programs, they are kept as long as can be.
_MAPPINGS, _MAPPINGS_WITHIN = 18_000, 45_000
# When they were counted last.
_counted = 0.0


# XLA's older way from a fusion to LLVM, which makes less code of it: half of
# the compiler's time without LLVM's passes. Versions without it ignore this.
# And one module for LLVM instead of one for each thread: a tenth of the rest,
# where all threads are busy.
_QUICK = (
  "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
  "--xla_cpu_parallel_codegen_split_count=1",
)


# A shell's background jobs ignore Ctrl-C, and so would all processes that they
# start: tests that send the signal would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config) -> None:
  """What runs on every commit compiles for a short compilation.

  LLVM's costly passes and XLA's newer code for fusions change no meaning and
  take half of the tests' time, in their subprocesses too; which line of Python
  an operation comes from takes a twentieth. The slow tests, the smoke tests and
  JAX_DISABLE_MOST_OPTIMIZATIONS=0 compile as users do.
  """
  if "not slow" not in config.getoption("markexpr") or "smoke" in (
    config.getoption("markexpr")
  ):
    return
  # A worker finds what the process that began it has set.
  if os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    os.environ["JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS"] = "0"
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, *_QUICK]))


# Files that take minutes, the longest first: begun last they would keep one
# worker busy while the others have nothing left. See "seconds by file".
_LONG = (
  "kv/test_kinds.py",
  "kv/test_window.py",
  "ops/attention/test_exact.py",
  "train/test_step.py",
  "ops/attention/test_strategies.py",
  "launch/test_generate.py",
  "infer/test_contract.py",
  "launch/test_train.py",
  "launch/test_train_faults.py",
  "models/test_families.py",
  "infer/test_generate.py",
  "test_mutations.py",
  "nn/test_delta.py",
  "ops/attention/kernels/test_kinds.py",
  "eval/test_eval.py",
  "ops/attention/test_numerics.py",
  "bench/test_inference_bench.py",
)


@pytest.fixture
def real_model():
  """The file of a fetched model by its name; else the test is skipped.

  For tests that are marked `real`.
  """
  from ringjax import fetched_models

  def path(name: str) -> pathlib.Path:
    model = fetched_models.MODELS[name]
    if not model.path.is_file():
      pytest.skip(f"needs {name}; fetch it: {model.command}")
    return model.path

  return path


def _leave_out_real(config, items) -> None:
  """Takes tests of real models away, unless -m asks for them by name."""
  asked = re.sub(r"not\s+real\b", "", config.getoption("markexpr"))
  if re.search(r"\breal\b", asked):
    return
  left = [item for item in items if item.get_closest_marker("real")]
  if left:
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("real")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
  """Chooses cases of the long run, and begins with files that take longest."""
  _leave_out_real(config, items)
  choose_cases(items)
  places = {_ROOT / "tests" / name: i for i, name in enumerate(_LONG)}
  items.sort(key=lambda item: places.get(item.path, len(_LONG)))


def choose_cases(items) -> None:
  """Marks cases `long` by `one_case`, and `slow` by `long_cases`.

  Of a test's long cases the long run has as many as `long_cases` says, or one,
  at equal distances; the others are slow. Cases that are slow by themselves
  count for neither mark.
  """
  cases = collections.defaultdict(list)
  for item in items:
    if not item.get_closest_marker("slow"):
      cases[item.path, item.originalname].append(item)
  for every in cases.values():
    for item in every[1:]:
      if item.get_closest_marker("one_case"):
        item.add_marker("long")
    long = [item for item in every if item.get_closest_marker("long")]
    for n, item in enumerate(long):
      mark = item.get_closest_marker("long_cases")
      most = mark.args[0] if mark else 1
      if n * most // len(long) == (n + 1) * most // len(long):
        item.add_marker("slow")


_left_out = {"long": 0}


def pytest_deselected(items) -> None:
  """Counts the long tests that the run leaves out."""
  _left_out["long"] += sum(
    item.get_closest_marker("long") is not None
    and item.get_closest_marker("slow") is None
    for item in items
  )


def pytest_sessionfinish(session) -> None:
  """A worker tells the process that began it what it left out."""
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["long"] = _left_out["long"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
  """Every worker collects all tests, so each leaves out the same ones."""
  output = getattr(node, "workeroutput", {})
  _left_out["long"] = max(_left_out["long"], output.get("long", 0))


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
  """Forgets compiled programs between files, once there are very many."""
  yield
  _let_go(_MAPPINGS)


@pytest.fixture(autouse=True)
def _programs_are_let_go_within() -> Iterator[None]:
  """Forgets them between tests, before the compiler ends the process.

  To count mappings takes longer than many tests; in two seconds a compiler
  makes few of them.
  """
  global _counted
  yield
  if time.monotonic() - _counted > 2:
    _let_go(_MAPPINGS_WITHIN)
    _counted = time.monotonic()


def _let_go(most: int) -> None:
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > most:
    jax.clear_caches()
    gc.collect()


def pytest_terminal_summary(terminalreporter) -> None:
  """What did not run, and where the time went, by file.

  The files say what to cut when the whole takes too long.
  """
  if _left_out["long"]:
    terminalreporter.write_line(
      f"{_left_out['long']} long tests were left out; run them with: "
      'python -m pytest -n 3 -q -m "long and not slow"'
    )
  skipped = terminalreporter.stats.get("skipped", [])
  for mark, name, extra in (
    ("aot", "TPU", "aot"), ("aot_cuda", "GPU", "aot-cuda")
  ):  # fmt: skip
    compiled = sum(mark in getattr(x, "keywords", ()) for x in skipped)
    if compiled:
      terminalreporter.write_line(
        f"{compiled} tests that compile for {name} did not run: pip install -e "
        f"'.[{extra}]' (Linux on x86-64)"
      )
  seconds = collections.Counter()
  for reports in terminalreporter.stats.values():
    for report in reports:
      if hasattr(report, "duration"):
        seconds[report.nodeid.split("::")[0]] += report.duration
  if sum(seconds.values()) < 300:
    return
  terminalreporter.write_sep("=", "seconds by file")
  for path, spent in seconds.most_common(40):
    terminalreporter.write_line(f"{spent:7.0f} {path}")


@pytest.fixture
def x64() -> Iterator[None]:
  """64-bit types in one test, for float64 references inside JAX."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def unchecked() -> Iterator[None]:
  """ringjax as its users have it, without the checks of the import hook.

  For tests of what ringjax itself says to a wrong argument; elsewhere the
  hook would speak first.
  """
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
