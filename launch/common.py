"""What the launch scripts share: processes, devices, meshes, progress, errors.

Several processes: by hand with --coordinator, --num_processes and
--process_id; under srun, Open MPI and on GKE's TPU slices they find each
other; on a TPU pod slice of Compute Engine, where only a metadata server
knows, with --distributed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ringjax.errors import MeshError, OptionError, RingjaxError, message
from ringjax.parallel.mesh import make_mesh

AXES = ("replica", "data", "seq", "model")
_DEVICES = 8
# What a shell reports of a command that Ctrl-C ended.
INTERRUPTED = 130

# Number of processes, as those say who start them; above 1 there are others.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


def define(values: flags.FlagValues) -> None:
  """The flags of every script that computes."""
  flags.DEFINE_string(
    "mesh",
    None,
    "Mesh axes and sizes, e.g. data:1,seq:8; -1 takes what is left. Axes: "
    f"{', '.join(AXES)}. Default: all devices along seq.",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "devices",
    None,
    "CPU devices of each process; default: as many as --mesh needs, or "
    f"{_DEVICES} in all.",
    lower_bound=1,
    upper_bound=1024,
    flag_values=values,
  )
  flags.DEFINE_string(
    "coordinator", None, "host:port of process 0.", flag_values=values
  )
  flags.DEFINE_integer(
    "num_processes", None, "How many there are.", flag_values=values
  )
  flags.DEFINE_integer(
    "process_id", None, "Which one this is, from 0.", flag_values=values
  )
  flags.DEFINE_bool(
    "distributed",
    None,
    "Whether to look for other processes; default: if the environment names "
    "some (srun, Open MPI, TPU slices on GKE).",
    flag_values=values,
  )


def start(values: flags.FlagValues) -> None:
  """Makes devices and meets the other processes, before JAX is first used.

  Raises:
    OptionError: flags that do not go together, or nobody to meet.
    MeshError: --mesh is none.
  """
  if not flags.FLAGS.is_parsed() or not flags.FLAGS["verbosity"].present:
    # At "info" JAX lists the accelerators that it did not find.
    logging.set_verbosity(logging.WARNING)
  by_hand: dict[str, Any] = {
    name: values[name].value
    for name in ("coordinator", "num_processes", "process_id")
  }
  given = [name for name, value in by_hand.items() if value is not None]
  if given and len(given) < len(by_hand):
    raise OptionError(
      message(
        "flags",
        f"--{' and --'.join(given)}",
        "--coordinator, --num_processes and --process_id together",
        "add the others",
      )
    )
  count = by_hand["num_processes"] if given else _found_processes()
  if given and not 0 <= by_hand["process_id"] < count:
    raise OptionError(
      message(
        "--process_id",
        by_hand["process_id"],
        f"0 to {count - 1} for --num_processes={count}",
        "number the processes from 0",
      )
    )
  _make_cpu_devices(values, count)
  look = values.distributed
  if given or look or (look is None and count > 1):
    try:
      jax.distributed.initialize(
        by_hand["coordinator"], by_hand["num_processes"], by_hand["process_id"]
      )
    except (RuntimeError, ValueError) as error:
      raise OptionError(
        message(
          "processes",
          f"{error}".partition("\n")[0],
          "all of them within 5 minutes",
          "check --coordinator, or pass --nodistributed to run alone",
        )
      ) from None


def _found_processes() -> int:
  """How many processes the environment says that there are, as far as known."""
  counts = [os.environ.get(name, "") for name in _COUNTS]
  found = [int(text) for text in counts if text.isdecimal()]
  hosts = [os.environ.get(name, "") for name in _HOSTS]
  found += [text.count(",") + 1 for text in hosts]
  return max(found)


def _make_cpu_devices(values: flags.FlagValues, processes: int) -> None:
  wanted = values.devices
  if wanted is None:
    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
      return
    size = 1
    for _, n in axes(values.mesh or f"seq:{_DEVICES}"):
      size *= n
    wanted = max(1, (size if size > 0 else _DEVICES) // processes)
  config: Any = jax.config
  if config.jax_num_cpu_devices != wanted:
    try:
      jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
      # JAX runs already: a notebook, or a test.
      if values.devices is not None:
        raise OptionError(
          message(
            "--devices", wanted, "it before JAX runs", "leave it out here"
          )
        ) from None


def axes(text: str) -> list[tuple[str, int]]:
  """The axes of "data:1,seq:8".

  Raises:
    MeshError: not of this form.
  """
  found = []
  for part in text.split(","):
    match = re.fullmatch(r"\s*(\w+)\s*:\s*(-1|[1-9]\d{0,5})\s*", part)
    if match is None or match[1] not in AXES:
      raise MeshError(
        message(
          "--mesh",
          repr(text),
          f"axes of {', '.join(AXES)} with their sizes",
          "write it like data:1,seq:8",
        )
      )
    found.append((match[1], int(match[2])))
  return found


def mesh(text: str | None) -> Mesh:
  """The mesh of a flag, over the devices of all processes.

  Raises:
    MeshError: it does not fit them.
  """
  names, sizes = zip(*axes(text or "seq:-1"), strict=True)
  made = make_mesh(sizes, names)
  if jax.process_count() > 1 and made.devices.size < jax.device_count():
    raise MeshError(
      message(
        "--mesh",
        f"{text}, {made.devices.size} devices",
        f"all {jax.device_count()} devices of {jax.process_count()} processes",
        "write -1 for one of the sizes",
      )
    )
  return made


def share(make: Callable[[], np.ndarray]) -> np.ndarray:
  """What `make` gives in process 0, int32 [n], in every process.

  Raises:
    OptionError: it failed there.
  """
  if jax.process_count() == 1:
    return make()
  made, fault = np.zeros(0, np.int32), None
  if jax.process_index() == 0:
    try:
      made = make()
    except Exception as error:
      fault = error
  size = np.array(-1 if fault else made.size, np.int32)
  size = int(multihost_utils.broadcast_one_to_all(size))
  if fault is not None:
    raise fault
  if size < 0:
    raise OptionError(
      message(
        "prompt",
        "a failure in process 0",
        "one that it can read",
        "see what process 0 says",
      )
    )
  made = np.resize(made, size) if made.size != size else made
  return np.asarray(multihost_utils.broadcast_one_to_all(made))


# ---------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------


class Compiling:
  """Seconds that JAX traces and compiles, while it is entered."""

  def __init__(self) -> None:
    self._spans: list[tuple[float, float]] = []

  def __enter__(self) -> Compiling:
    _listen()
    _LISTENING.append(self)
    return self

  def __exit__(self, *_: object) -> None:
    _LISTENING.remove(self)

  def took(self, duration_s: float) -> None:
    """Something was compiled, and took so long."""
    now = time.monotonic()
    self._spans.append((now - duration_s, now))

  def seconds(self, until: float = float("inf")) -> float:
    """Of the time before `until`; what overlaps counts once."""
    total, end = 0.0, -float("inf")
    for first, last in sorted(self._spans):
      last = min(last, until)
      total += max(0.0, last - max(first, end))
      end = max(end, last)
    return total


_LISTENING: list[Compiling] = []


@functools.cache
def _listen() -> None:
  """Once: what listens cannot be taken away again."""

  def hear(event: str, duration_s: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
      for one in list(_LISTENING):
        one.took(duration_s)

  listener: Any = hear
  jax.monitoring.register_event_duration_secs_listener(listener)


# ---------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------


class Screen:
  """What a script says on stderr while it works.

  On a terminal a bar with rate and remaining time; elsewhere plain lines, now
  and then. In all processes but the first: nothing.
  """

  def __init__(
    self, name: str, stream: TextIO | None = None, every_s: float = 5.0
  ):
    self.name = name
    self.quiet = False
    self._stream = sys.stderr if stream is None else stream
    self._every_s = every_s
    self._bar: Any = None
    self._task: Any = None
    self._label, self._unit, self._total = "", "", 0
    self._start = self._last = 0.0

  def say(self, text: str) -> None:
    """A line."""
    if self.quiet:
      return
    if self._bar is not None:
      self._bar.console.print(text, markup=False, highlight=False)
    else:
      print(text, file=self._stream, flush=True)

  def error(self, text: str) -> None:
    """A line that says what is wrong, from any process."""
    self.end()
    complain(self.name, text, self._stream)

  def begin(self, label: str, total: int = 0, unit: str = "") -> None:
    """Something begins that takes a while; `total` is 0 if it isn't known."""
    self.end()
    self._label, self._unit, self._total = label, unit, total
    self._start = self._last = time.monotonic()
    if self.quiet:
      return
    if not self._stream.isatty():
      self.say(f"{label} ...")
      return
    from rich import console, progress

    self._bar = progress.Progress(
      progress.SpinnerColumn(),
      progress.TextColumn("{task.description}", markup=False),
      progress.BarColumn(bar_width=30),
      progress.TextColumn("{task.fields[rate]}", markup=False),
      progress.TimeElapsedColumn(),
      progress.TimeRemainingColumn(),
      console=console.Console(file=self._stream),
      transient=True,
    )
    self._task = self._bar.add_task(label, total=total or None, rate="")
    self._bar.start()

  def at(self, done: int) -> None:
    """So much of the total is done."""
    if self.quiet:
      return
    now = time.monotonic()
    rate = done / max(now - self._start, 1e-9)
    if self._bar is not None:
      self._bar.update(
        self._task, completed=done, rate=f"{rate:,.0f} {self._unit}/s"
      )
    elif now - self._last >= self._every_s and 0 < done < self._total:
      self._last = now
      left = (self._total - done) / rate
      self.say(
        f"  {done:,} of {self._total:,} {self._unit}, {rate:,.0f} a second, "
        f"{clock(left)} left"
      )

  def end(self) -> None:
    """Nothing is under way any more."""
    if self._bar is not None:
      self._bar.stop()
      self._bar = None


def clock(seconds: float) -> str:
  """1:05 or 2:00:00."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


def nbytes(n: float) -> str:
  """12.3 MB."""
  units = ["bytes", "kB", "MB", "GB", "TB"]
  while n >= 1000 and len(units) > 1:
    n /= 1000
    units.pop(0)
  return f"{n:.3g} {units[0]}"


def reason(error: BaseException, doing: str, knobs: str) -> str | None:
  """What a user should read of an error; None if it is a fault of the code.

  Args:
    error: what was raised.
    doing: what was done then.
    knobs: what to change if memory ran out.
  """
  if isinstance(error, RingjaxError | app.UsageError | flags.Error):
    return f"{error}"
  text = f"{error}"
  if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
    asked = re.search(r"(\d[\d,.]*)\s*([KMGT]i?)?B?(?:ytes|\b)", text)
    much = "more"
    if found := re.search(r"(\d{4,}) ?bytes", text):
      much = f"{int(found[1]):,} bytes"
    elif asked and asked[2]:
      much = f"{asked[1]} {asked[2]}B"
    return f"out of memory while {doing}, which asked for {much}: {knobs}"
  if isinstance(error, OSError):
    name = error.filename
    return f"{name}: {error.strerror}" if name else text
  return None


# ---------------------------------------------------------------------------
# Ctrl-C
# ---------------------------------------------------------------------------


class Job:
  """Work in a thread, so that Ctrl-C is heard while a device computes.

  Attributes:
    gentle: whether the work looks at `stop`, and ends by itself.
    stop: whether it should.
  """

  def __init__(self) -> None:
    self.gentle = False
    self.stop = False

  def run(self, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises.

    Raises:
      KeyboardInterrupt: and the work goes on; the process has to end now.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def target() -> None:
      try:
        outcome.append((work(), None))
      except BaseException as error:
        outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    while thread.is_alive():
      try:
        thread.join(0.5)
      except KeyboardInterrupt:
        if self.stop or not self.gentle:
          raise
        self.stop = True
    value, error = outcome[0]
    if error is not None:
      raise error
    return value


def parse(
  name: str, define: Callable[[flags.FlagValues], None], argv: Sequence[str]
) -> flags.FlagValues:
  """Flags of their own, to run a script from Python.

  Args:
    name: of the script.
    define: defines its flags.
    argv: as on a command line, without the script's name.
  """
  values = flags.FlagValues()
  define(values)
  rest = values([name, *argv])
  refuse_rest(rest)
  return values


def own_stdout() -> TextIO:
  """The stdout of this process, for us alone.

  What libraries write to theirs (Gloo does) goes to stderr from now on.
  """
  sys.stdout.flush()
  mine = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
  os.dup2(2, 1)
  return mine


def launch(name: str, main: Callable[[Sequence[str]], int]) -> None:
  """Runs a script: `main` gets what is left beside the flags."""

  def read(argv: Sequence[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.Error as error:
      complain(name, error)
      raise SystemExit(2) from None

  def guarded(argv: Sequence[str]) -> int:
    try:
      return main(argv)
    except app.UsageError as error:
      complain(name, error)
      return 2

  app.run(guarded, flags_parser=read)


def complain(name: str, error: object, stream: TextIO | None = None) -> None:
  """One line on stderr."""
  line = " ".join(f"{error}".split())
  print(f"{name}: {line}", file=stream or sys.stderr, flush=True)


def refuse_rest(argv: Sequence[str]) -> None:
  """Raises UsageError for arguments that are no flags."""
  if len(argv) > 1:
    raise app.UsageError(
      f"got {' '.join(argv[1:])!r}; wanted flags; see --help"
    )


def leave(status: int) -> None:
  """Ends the process now, whatever its threads do."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):
      stream.flush()
  os._exit(status)
