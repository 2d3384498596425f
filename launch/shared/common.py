"""Code that all launch scripts share: processes, meshes, flags.

Several processes: by hand with --coordinator, --num_processes and
--process_id; under srun, Open MPI and on GKE's TPU slices they find each
other; on a TPU pod slice of Compute Engine, where only a metadata server
knows, with --distributed.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Int

from ringjax.errors import MeshError, OptionError
from ringjax.kv import CacheConfig, kind_text
from ringjax.kv.codecs import Allocated, Calibrated
from ringjax.parallel.mesh import make_cpu_devices, make_mesh
from ringjax.plan import draw

from . import console, rendezvous
from .entry_points import command_text
from .flag_helpers import FlagHelper, help_text
from .flag_helpers import check_output as check_file

T = TypeVar("T")
AXES = ("stage", "replica", "data", "seq", "model")
DEVICES = 8
# Environment variables in which launchers set the number of processes.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# Environment variables that JAX reads in a step of Slurm.
_SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


def define(values: flags.FlagValues) -> None:
  """Defines the flags of every script that computes."""
  new = FlagHelper(values, "Devices and processes.")
  new.text(
    "mesh",
    None,
    "Mesh axes and sizes, e.g. data:1,seq:8; -1 takes what is left. Axes: "
    f"{', '.join(AXES)}. Default: all devices along seq.",
  )
  new.whole(
    "devices",
    None,
    "CPU devices of each process; default: as many as --mesh needs; without "
    f"it {DEVICES} in all, or one to answer or measure by a model of --model.",
    most=1024,
  )
  new.text("coordinator", None, "host:port of process 0.")
  new.whole("num_processes", None, "Number of processes.", None)
  new.whole("process_id", None, "Number of this process, from 0.", None)
  new.number(
    "init_timeout", 300.0, "Seconds to wait for the other processes.", 1.0
  )
  new.boolean(
    "distributed",
    None,
    "Whether to look for other processes; default: if the environment names "
    "some (srun, Open MPI, TPU slices on GKE).",
  )


def start(values: flags.FlagValues, *, single: bool = False) -> None:
  """Configures CPU devices and connects the processes, before JAX starts.

  Args:
    values: Flags of the script.
    single: Whether one process has one CPU device by default, unless flags or
      the environment set the number: for a model of --model.

  Raises:
    OptionError: If flags do not go together, or a process is missing.
    MeshError: If --mesh is not of the form data:1,seq:8.
  """
  quiet_logging()
  by_hand: dict[str, Any] = {
    name: values[name].value
    for name in ("coordinator", "num_processes", "process_id")
  }
  passed = [name for name, value in by_hand.items() if value is not None]
  if passed and len(passed) < len(by_hand):
    raise OptionError(
      "flags",
      f"--{' and --'.join(passed)}",
      "--coordinator, --num_processes and --process_id together",
      "pass all three",
    )
  count = by_hand["num_processes"] if passed else _found_processes()
  if passed and not 0 <= by_hand["process_id"] < count:
    raise OptionError(
      "--process_id",
      by_hand["process_id"],
      f"0 to {count - 1} for --num_processes={count}",
      "number the processes from 0",
    )
  look = values.distributed
  connects = passed or look or (look is None and count > 1)
  if connects and not passed:
    _check_slurm()
  _make_cpu_devices(values, count, single)
  if connects:
    process_args = tuple(by_hand.values())
    if passed:
      rendezvous.call(*process_args, timeout_s=values.init_timeout)
    try:
      jax.distributed.initialize(
        *process_args, initialization_timeout=math.ceil(values.init_timeout)
      )
    except (RuntimeError, ValueError) as error:
      raise OptionError(
        "processes",
        f"{error}".partition("\n")[0],
        f"all of them within {values.init_timeout:g} s",
        "check --coordinator, or pass --nodistributed to run alone",
      ) from None


def _check_slurm() -> None:
  """Refuses a step of Slurm without the variables that JAX reads.

  Raises:
    OptionError: If variables are missing and no other launcher is in use.
  """
  others = (*_HOSTS, "OMPI_COMM_WORLD_SIZE")
  if any(os.environ.get(name) for name in others) or not any(
    name in os.environ for name in (*_SLURM, "SLURM_STEP_NUM_TASKS")
  ):
    return
  missing = [name for name in _SLURM if name not in os.environ]
  if missing:
    raise OptionError(
      "Slurm",
      f"an environment without {', '.join(missing)}",
      "the variables that srun sets",
      "start with srun; or pass --coordinator, --num_processes and "
      "--process_id; or --nodistributed to run alone",
    )


def quiet_logging() -> None:
  """Logs warnings only, unless --verbosity is passed."""
  if not flags.FLAGS.is_parsed() or not flags.FLAGS["verbosity"].present:
    # At level "info" JAX lists the accelerators that it did not find.
    logging.set_verbosity(logging.WARNING)


def _found_processes() -> int:
  """Number of processes by the environment; 0 if no variable is set."""
  counts = [os.environ.get(name, "") for name in _COUNTS]
  sizes = [int(text) for text in counts if text.isdecimal()]
  hosts = [os.environ.get(name, "") for name in _HOSTS]
  sizes += [text.count(",") + 1 for text in hosts]
  return max(sizes)


def _make_cpu_devices(
  values: flags.FlagValues, processes: int, single: bool
) -> None:
  count = values.devices
  if count is None:
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
      return
    # More virtual CPU devices would not make one process faster.
    alone = single and processes == 1 and values.mesh is None
    if alone and "JAX_NUM_CPU_DEVICES" in os.environ:
      return
    size = 1
    for _, n in axes(values.mesh or f"seq:{1 if alone else DEVICES}"):
      size *= n
    count = max(1, (size if size > 0 else DEVICES) // processes)
  # JAX may have started already, as in a notebook or a test.
  if not make_cpu_devices(count) and values.devices is not None:
    raise OptionError(
      "--devices", count, "no --devices once JAX runs", "leave it out"
    )


def axes(text: str) -> list[tuple[str, int]]:
  """Parses mesh axes and sizes, as "data:1,seq:8".

  Raises:
    MeshError: If the text is not of this form.
  """
  pairs = []
  for part in text.split(","):
    match = re.fullmatch(r"\s*(\w+)\s*:\s*(-1|[1-9]\d{0,5})\s*", part)
    if match is None or match[1] not in AXES:
      raise MeshError(
        "--mesh",
        repr(text),
        f"axes of {', '.join(AXES)} with their sizes",
        "write it like data:1,seq:8",
      )
    pairs.append((match[1], int(match[2])))
  return pairs


def mesh(text: str | None) -> Mesh:
  """Creates the mesh of --mesh over the devices of all processes.

  Raises:
    MeshError: If it does not fit the devices.
  """
  names, sizes = zip(*axes(text or "seq:-1"), strict=True)
  device_mesh = make_mesh(sizes, names)
  if jax.process_count() > 1 and device_mesh.devices.size < jax.device_count():
    raise MeshError(
      "--mesh",
      f"{text}, {device_mesh.devices.size} devices",
      f"all {jax.device_count()} devices of {jax.process_count()} processes",
      "write -1 for one of the sizes",
    )
  return device_mesh


def check_plot(values: flags.FlagValues) -> None:
  """Refuses --plot without matplotlib, before anything is computed.

  Raises:
    OptionError: If matplotlib is missing.
  """
  if values.plot is not None:
    draw.figures()


def check_output(values: flags.FlagValues, name: str) -> None:
  """Refuses a file of a flag that can't be written; makes its folder.

  Raises:
    OptionError: If it can't be written.
  """
  path = values[name].value
  if path is None:
    return
  try:
    check_file(path)
  except ValueError as error:
    raise OptionError(f"--{name}: {error}") from None


def cache_kind(text: str, *, calibrated: bool = True) -> CacheConfig:
  """Return the kind of cache that a flag names.

  Args:
    text: Value of --cache.
    calibrated: Whether the file of a calibration, or of a table of codecs, has
      to be there if the kind needs one.

  Raises:
    OptionError: If there is no such kind, or its file is missing.
  """
  kind = kind_text.parse(text, "--cache")
  if calibrated:
    check_files_of(kind)
  return kind


def check_files_of(kind: CacheConfig) -> None:
  """Refuses a kind of cache without the files that it needs.

  Raises:
    OptionError: If the file of a calibration or of a table of codecs is
      missing.
  """
  if isinstance(kind.codec, Calibrated | Allocated):
    kind.codec.check_file()


def measured(kind: CacheConfig) -> bool:
  """Whether a file of a kind goes with certain weights, and with no codes."""
  return isinstance(kind.codec, Calibrated | Allocated)


def share(make: Callable[[], np.ndarray]) -> Int[np.ndarray, " n"]:
  """Broadcasts the result of `make` in process 0, int32 [n], to every process.

  Raises:
    OptionError: In the other processes, if `make` failed in process 0.
  """
  if jax.process_count() == 1:
    return make()
  ids, fault = np.zeros(0, np.int32), None
  if jax.process_index() == 0:
    try:
      ids = make()
    except Exception as error:
      fault = error
  size = np.array(-1 if fault else ids.size, np.int32)
  size = int(multihost_utils.broadcast_one_to_all(size))
  if fault is not None:
    raise fault
  if size < 0:
    raise OptionError(
      "prompt",
      "a failure in process 0",
      "a prompt that it can read",
      "see the error of process 0",
    )
  ids = np.resize(ids, size) if ids.size != size else ids
  return np.asarray(multihost_utils.broadcast_one_to_all(ids))


def share_lists(
  make: Callable[[], Sequence[np.ndarray]],
) -> list[Int[np.ndarray, " _"]]:
  """Broadcasts lists of process 0, int32 [n] each, as `share` does one.

  Raises:
    OptionError: In the other processes, if `make` failed in process 0.
  """

  def joined() -> np.ndarray:
    lists = make()
    sizes = [len(lists), *map(len, lists)]
    return np.concatenate([np.asarray(sizes, np.int32), *lists])

  ids = share(joined)
  count = int(ids[0])
  ends = np.cumsum(ids[1 : 1 + count])
  return np.split(ids[1 + count :], ends[:-1]) if count else []


# ---------------------------------------------------------------------------
# Scripts
# ---------------------------------------------------------------------------


def parse(
  name: str, define: Callable[[flags.FlagValues], None], argv: Sequence[str]
) -> flags.FlagValues:
  """Parses a script's flags, to run it from Python.

  Args:
    name: Name of the script.
    define: Function that defines its flags.
    argv: Arguments of a command line, without the script's name.
  """
  values, words = parse_words(name, define, argv)
  refuse_rest([name, *words])
  return values


def parse_words(
  name: str, define: Callable[[flags.FlagValues], None], argv: Sequence[str]
) -> tuple[flags.FlagValues, list[str]]:
  """Parses the flags and the words of a script with sub-commands."""
  values = flags.FlagValues()
  define(values)
  words, saved_argv = [name, *argv], sys.argv
  try:
    # ml_collections reads overrides of config fields from sys.argv.
    sys.argv = words
    return values, values(words)[1:]
  finally:
    sys.argv = saved_argv


def launch(
  name: str,
  main: Callable[[Sequence[str]], int],
  help_page: Callable[[str], str | None] = lambda command: None,
  unknown: Callable[[str], str | None] = lambda flag: None,
) -> None:
  """Runs a script.

  Args:
    name: Name of the script.
    main: Function of the arguments that are no flags; returns the exit status.
    help_page: Function that returns the help of a sub-command, or None for
      the help of the script.
    unknown: Function that returns a message about a flag that the script does
      not have, or None for absl's.
  """

  def read(argv: Sequence[str]) -> list[str]:
    if set(argv) & {"--help", "-help", "-h", "-?"}:
      for word in argv[1:]:
        if not word.startswith("-") and (page := help_page(word)) is not None:
          raise SystemExit(_print_help(page))
      shown = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
      purpose = sys.modules["__main__"].__doc__ or ""
      raise SystemExit(_print_help(f"{purpose}\n{help_text(shown)}"))
    try:
      return flags.FLAGS(with_underscores(argv, flags.FLAGS))
    except flags.UnrecognizedFlagError as error:
      console.complain(name, unknown(error.flagname) or error)
      raise SystemExit(2) from None
    except SystemExit:
      # absl's parser exits with status 1 after --help.
      raise SystemExit(0) from None
    except flags.Error as error:
      console.complain(name, error)
      raise SystemExit(2) from None

  def guarded(argv: Sequence[str]) -> int:
    try:
      return main(argv)
    except app.UsageError as error:
      console.complain(name, error)
      return 2
    except BrokenPipeError:
      return _unread()

  app.run(guarded, flags_parser=read)


def with_underscores(
  argv: Sequence[str], values: flags.FlagValues
) -> list[str]:
  """Arguments whose flags may be written with dashes: --max-model-len=64."""
  words = list(argv)
  for n, word in enumerate(words):
    if word == "--":
      break
    name, equals, value = word.partition("=")
    plain = name.replace("-", "_").removeprefix("__")
    if not name.startswith("--") or "-" not in name[2:]:
      continue
    if plain in values or plain.removeprefix("no") in values:
      words[n] = f"--{plain}{equals}{value}"
  return words


def _print_help(text: str) -> int:
  """Prints a help text; returns the exit status."""
  try:
    print(command_text(text), flush=True)
  except BrokenPipeError:
    return _unread()
  return 0


def _unread() -> int:
  """Exit status after the reader of stdout, such as `head`, has ended."""
  # Python would flush stdout again at exit and print a second error.
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return console.UNREAD


def map_unordered(
  work: Callable[[int], T], n: int, jobs: int, stop: Callable[[], None]
) -> Iterator[tuple[int, T]]:
  """Yields i and work(i) for 0 to n - 1 as they end, `jobs` at a time.

  After the first error no other starts, and `stop` is called to end the running
  ones.
  """
  with futures.ThreadPoolExecutor(max(1, min(jobs, n))) as pool:
    begun = {pool.submit(work, i): i for i in range(n)}
    try:
      for future in futures.as_completed(begun):
        yield begun[future], future.result()
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      stop()
      raise


def refuse_rest(argv: Sequence[str]) -> None:
  """Raises UsageError for arguments that are not flags."""
  if len(argv) > 1:
    raise app.UsageError(
      f"got {' '.join(argv[1:])!r}; wanted flags; see --help"
    )
