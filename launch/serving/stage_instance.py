"""A prefill instance of several processes, which have layers each (Mooncake).

With --stages=N launch.serve starts the other N - 1 processes on this machine;
over machines each is started by hand, with --coordinator, --num_processes and
--process_id. The last rank joins the router; the others only talk to the group.
If one is lost, all others end with status 3 and name it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import jax
from absl import flags

from ringjax.errors import OptionError
from ringjax.infer import ChunkPipeline
from ringjax.models import small
from ringjax.models.partition.layer_range import config_of
from ringjax.paths import AnyPath
from ringjax.serve import cluster
from ringjax.serve.prefix.stage_pages import check_pages

from ..shared import common, console, tensor_ranks
from ..shared.entry_points import script_command, script_environment
from ..shared.flag_helpers import FlagHelper, model_folder
from ..shared.group import FAILED, Group
from . import cluster_roles
from .flag_modes import STAGE_PASSED

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()

_PAGE, _LONGEST = 32, 16384
_MEMORY = "start more stages, or pass --dtype=bfloat16"
# Environment variable of processes that --stages has started.
_STARTED = "RINGJAX_STAGE"
# Seconds to wait for the exit of a process that was asked to end.
_MOMENT_S = 10.0


def define(new: FlagHelper) -> None:
  """Defines the flag of stages."""
  new.whole(
    "stages",
    None,
    "Of a prefill instance: processes of this machine that have layers each, "
    "through which the chunks of a prompt pass; over machines pass "
    "--coordinator, --num_processes and --process_id instead.",
    2,
  )


def check_role(values: flags.FlagValues) -> None:
  """Refuses stages of a process that is no prefill instance of a router.

  Raises:
    OptionError: If it has another role, no router, or processes without names.
  """
  if values.role != "prefill" or values.join is None:
    raise OptionError(
      _count_flag(values),
      f"{values.stages or values.num_processes} for --role={values.role}"
      + (" without --join" if values.join is None else ""),
      "a prefill instance of a router: stages read prompts and do not answer",
      "pass --role=prefill --join=HOST:PORT; or --role=both, for an engine of "
      "all processes; or start one process",
    )
  if values.stages is not None and values.num_processes is not None:
    raise OptionError(
      "--stages, --num_processes",
      f"{values.stages}, {values.num_processes}",
      "one of the two: --stages starts the processes itself",
      "leave one out",
    )
  if values.num_processes is not None and None in (
    values.coordinator,
    values.process_id,
  ):
    raise OptionError(
      "--num_processes",
      "no --coordinator or --process_id",
      "all three",
      "pass --coordinator=HOST:PORT --process_id=0, for instance",
    )


def check(values: flags.FlagValues) -> None:
  """Refuses what stages do not support, before anything is started.

  Raises:
    OptionError: If the model can't be cut, or --longest exceeds its context.
    ConfigError: If layers of the model keep more than keys and values.
  """
  config = config_of(_folder(values), strict=values.strict)
  check_pages(config, common.cache_kind(values.cache))
  count: int = values.stages or values.num_processes
  if count > len(config.layers):
    raise OptionError(
      _count_flag(values),
      count,
      f"at most the {len(config.layers)} layers",
      "start fewer processes",
    )
  longest = _longest(values)
  if config.longest is not None and longest > config.longest:
    raise OptionError(
      "--longest", longest, f"at most {config.longest}", "pass a smaller one"
    )


def run(values: flags.FlagValues, screen: console.Screen) -> int:
  """Runs a process of the instance; returns the exit status."""
  started = _Started(values, screen)
  work = _Stage(values, screen, started)
  with console.Run(
    screen,
    _MEMORY,
    doing=lambda: work.doing,
    reports=work,
    leaving=console.leave_at_once,
    tidy=started.kill,
  ) as run:
    return work.run()
  return run.status


class _Stage:
  """One process of the instance.

  Attributes:
    doing: Current activity, for error messages.
    group: Processes of the instance.
  """

  def __init__(
    self,
    values: flags.FlagValues,
    screen: console.Screen,
    started: _Started,
  ):
    self.doing = "starting"
    self._values, self._screen, self._started = values, screen, started
    self.group = Group(screen, lambda: self.doing, leaving=started.kill)

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Ends the other processes and reports an error; returns the status."""
    self._started.kill()
    return self.group.failed(error, doing, knobs)

  def run(self) -> int:
    """Loads this process's layers and reads prompts; returns the status."""
    values = self._values
    if values.stages is not None:
      self._started.start()
    elif _STARTED in os.environ:
      _end_with_parent()
    if values.devices is None:
      values["devices"].value = 1
    common.start(values)
    self.doing = "waiting for the other processes"
    # The last process alone asks the router, which has other names elsewhere.
    own = {*values} - STAGE_PASSED | {"join"}
    peers = self.group.meet(values, values.silence, own=own)
    is_last = peers.rank == peers.size - 1
    self.doing = "loading layers"
    folder = _folder(values)
    stage = ChunkPipeline.load(
      folder,
      peers,
      weights_dtype=values.dtype,
      strict=values.strict,
      tile=values.piece * values.pieces,
    )
    layers = sum(stage.stages[: peers.rank])
    self._screen.say(
      f"rank {peers.rank} of {peers.size}, process {os.getpid()}: layers "
      f"{layers} to "
      f"{layers + stage.stages[peers.rank] - 1} of {folder}, "
      f"{stage.weight_bytes:,} bytes of weights"
    )
    pages = cluster.gather_pages(
      stage,
      longest=_longest(values),
      page=values.page or _PAGE,
      kind=common.cache_kind(values.cache),
    )
    self.doing = "reading prompts"
    if is_last:
      status = self._join(stage, pages)
    else:
      # Only the last rank decides when the group ends.
      signal.signal(signal.SIGINT, signal.SIG_IGN)
      cluster.serve_stage(stage)
      status = 0
    self.doing = "ending"
    peers.gather(None)
    self.group.close()
    # Each process waits here for the others.
    jax.distributed.shutdown()
    self._started.wait()
    self._screen.say("ended")
    return status

  def _join(self, stage: ChunkPipeline, pages: Any) -> int:
    """Works for the router until a signal; returns the exit status."""
    values, screen = self._values, self._screen
    worker = cluster.PipelineWorker(
      stage,
      pages,
      key=cluster_roles.read_key(values),
      router=cluster_roles.join_address(values),
      longest=_longest(values),
      capacity=values.capacity,
      name=values.name,
      host=values.host,
      port=values.port if values["port"].present else 0,
      lease_s=values.lease,
      silence_s=values.silence,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, lambda *_: stopped.set())
    host, port = worker.publisher.address
    screen.say(f"instance {worker.name}, pages at {host}:{port}")
    shown_refusal, was_joined = "", False
    worker.start()
    while not stopped.wait(0.1) and not worker.ended.is_set():
      if worker.joined.is_set() != was_joined:
        was_joined = not was_joined
        word = "joined" if was_joined else "lost"
        screen.say(f"{word} the router {values.join}, as prefill")
        if was_joined and worker.notice:
          screen.say(worker.notice)
      elif not was_joined and worker.refused not in ("", shown_refusal):
        shown_refusal = worker.refused
        screen.say(f"not joined: {shown_refusal}")
    if worker.error is not None:
      raise worker.error
    worker.leave(values.grace)
    return 0


class _Started:
  """The processes that --stages has started on this machine."""

  def __init__(self, values: flags.FlagValues, screen: console.Screen):
    self._values, self._screen = values, screen
    self._processes: list[subprocess.Popen[bytes]] = []
    self._ending = threading.Event()

  def start(self) -> None:
    """Starts all ranks but the last, which is this process."""
    values, size = self._values, self._values.stages
    with socket.create_server(("127.0.0.1", 0)) as server:
      address = f"127.0.0.1:{server.getsockname()[1]}"
    threads = max(1, (os.cpu_count() or 1) // size)
    gpus = tensor_ranks.visible_gpus(os.environ)
    for rank in range(size - 1):
      variables = {_STARTED: "1", "NPROC": str(threads)}
      variables |= tensor_ranks.gpu_variables(rank, size, gpus)
      self._processes.append(
        subprocess.Popen(
          [
            *script_command("serve"),
            "--role=prefill",
            *stage_flags(values, _folder(values)),
            f"--coordinator={address}",
            f"--num_processes={size}",
            f"--process_id={rank}",
          ],
          # It ends when this pipe does.
          stdin=subprocess.PIPE,
          stdout=subprocess.DEVNULL,
          env=script_environment() | variables,
          # Ctrl-C reaches only this process, which ends the others.
          start_new_session=True,
        )
      )
    if gpus:
      # Before JAX allocates memory on all GPUs.
      number = (size - 1) % len(gpus)
      jax.config.update("jax_cuda_visible_devices", str(number))
      if size > len(gpus):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    values["coordinator"].value = address
    values["num_processes"].value = size
    values["process_id"].value = size - 1
    threading.Thread(target=self._watch, daemon=True).start()

  def _watch(self) -> None:
    """Ends this process if one of the others ends before it should."""
    while not self._ending.wait(0.2):
      for rank, process in enumerate(self._processes):
        status = process.poll()
        if status is None or self._ending.is_set():
          continue
        # The group's own report comes first, if there is one.
        time.sleep(1.0)
        if not self._ending.is_set():
          self._screen.error(f"rank {rank} ended with status {status}")
          self.kill()
          console.leave(FAILED)

  def wait(self) -> None:
    """Waits for the processes to end, and kills those that don't."""
    self._ending.set()
    end = time.monotonic() + _MOMENT_S
    for process in self._processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - time.monotonic()))
    self.kill()

  def kill(self) -> None:
    """Kills the processes, frozen ones included."""
    self._ending.set()
    for process in self._processes:
      if process.poll() is None:
        process.kill()
        process.wait()


def stage_flags(values: flags.FlagValues, folder: object) -> list[str]:
  """Flags of a started process, without its number."""
  words = [f"--model={folder}"]
  for name in sorted(STAGE_PASSED):
    value = values[name].value
    if not values[name].present or value is None:
      continue
    if isinstance(value, bool):
      words.append(f"--{'' if value else 'no'}{name}")
    else:
      words.append(f"--{name}={value}")
  return words


def _end_with_parent() -> None:
  """Ends this process when the one that started it has ended."""

  def wait() -> None:
    while os.read(0, 1):
      pass
    # Its group ends it with a better reason, if it has met.
    time.sleep(5.0)
    console.leave(FAILED)

  threading.Thread(target=wait, daemon=True).start()


def _folder(values: flags.FlagValues) -> AnyPath:
  path = model_folder(values, small.path)
  # A path that does not exist stays as it was passed, for an error.
  return path.absolute() if path.exists() else path


def _count_flag(values: flags.FlagValues) -> str:
  """Flag that sets the number of processes."""
  return "--num_processes" if values.stages is None else "--stages"


def _longest(values: flags.FlagValues) -> int:
  """Maximum number of tokens of a request, as an engine's default."""
  if values.longest is not None:
    return values.longest
  config = config_of(_folder(values), strict=values.strict)
  return min(config.longest or _LONGEST, _LONGEST)
