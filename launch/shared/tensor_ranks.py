"""Tensor parallelism of launch.generate with --processes or --window.

Each process has some heads and columns of every layer, and a few blocks of its
weights in memory (`ringjax.infer.tpi_llm.tensor_window`). With --processes this
process starts the others on this machine; over machines each is started by
hand, with --coordinator, --num_processes and --process_id, and a --key_file
that all have. The others get neither the prompt nor the answer, and no flag
that has them.
On a machine with GPUs the first process and each one that it starts see one
GPU; for those started by hand set CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

from ringjax.checks import number, positive_int
from ringjax.data import Tokenizer
from ringjax.errors import OptionError, PeerError
from ringjax.infer import Stop
from ringjax.infer.tpi_llm import process_star
from ringjax.infer.tpi_llm.process_star import Star
from ringjax.infer.tpi_llm.tensor_window import (
  RankReport,
  TensorWindow,
  WindowReport,
  serve_rank,
)
from ringjax.json_text import json_text
from ringjax.kv import kind_text
from ringjax.models import tiny
from ringjax.models.hf.folder import Folder
from ringjax.models.partition.tensor_shares import digest_of
from ringjax.parallel.gpu_processes import gpu_variables, visible_gpus
from ringjax.paths import AnyPath
from ringjax.plan import files

from . import common, console, prompts
from .entry_points import script_command, script_environment
from .flag_helpers import FlagHelper, model_folder
from .group import FAILED

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()

NAME = "generate"
LOG_FORMAT = "ringjax.window_log"
# Environment variable that passes the key of the group to a started process.
_KEY = "RINGJAX_WINDOW_KEY"
# Seconds to wait for the exit of a process that was asked to end.
_MOMENT_S = 5.0
_MEMORY = "a smaller --window, or more processes"
# Flags of launch.generate that apply to ranks; others are refused.
_USED_FLAGS = (
  "cache",
  "chat",
  "context",
  "coordinator",
  "depth",
  "dtype",
  "init_timeout",
  "json",
  "key_file",
  "log",
  "max_new_tokens",
  "min_p",
  "model",
  "num_processes",
  "patience",
  "process_id",
  "processes",
  "prompt",
  "prompt_file",
  "raw",
  "repetition_penalty",
  "retain",
  "seed",
  "shares",
  "stop",
  "system",
  "temperature",
  "top_k",
  "top_p",
  "window",
)
_RANK_FLAGS = ("shares", "retain", "key_file", "log", "patience")


def define(new: FlagHelper) -> None:
  """Defines the flags of ranks."""
  new.whole(
    "processes",
    None,
    "Processes of this machine that have some heads and columns of each layer.",
    None,
  )
  new.whole(
    "window",
    None,
    "Blocks (an attention, a feedforward) of weights in memory in each "
    "process, the others on disk; 0: all.",
    None,
  )
  new.texts(
    "shares",
    None,
    "How much of the model each process gets, as 3,2,2,1; default: the same.",
  )
  new.whole(
    "retain",
    None,
    "With --window: of so many feedforwards one stays in memory.",
    None,
  )
  new.path(
    "key_file",
    None,
    "With --coordinator and --window: a file of 16 bytes or more that only "
    "these processes can read.",
  )
  new.number(
    "patience",
    process_star.PATIENCE_S,
    "With --window: seconds that a process may be silent.",
  )
  new.output("log", None, "With --window: a JSON file of what happened when.")


def asked(values: flags.FlagValues) -> bool:
  """Whether the model is to run over ranks."""
  return values.window is not None or values.processes is not None


def refuse(values: flags.FlagValues) -> None:
  """Refuses flags of ranks without --window or --processes.

  Raises:
    OptionError: If such a flag was passed.
  """
  for name in _RANK_FLAGS:
    if values[name].present:
      raise prompts.clash(f"--{name} without --window or --processes", "both")


def run(
  values: flags.FlagValues,
  check: Callable[[flags.FlagValues], Any],
  sampler: Callable[[flags.FlagValues], Any],
  *,
  stdout: TextIO,
  stderr: TextIO | None,
) -> int:
  """Answers as the flags say; returns the exit status.

  Args:
    values: Flags of launch.generate.
    check: Refuses flags of prompts that do not go together.
    sampler: Creates the sampler that the flags ask for.
    stdout: Stream of the answer.
    stderr: Stream of messages; None for the process's own.
  """
  screen, job = console.Screen(NAME, stderr), console.Job()
  work = _Ranks(values, sampler, stdout, screen, job)
  with console.Run(
    screen,
    _MEMORY,
    doing=lambda: work.doing,
    reports=work,
    leaving=console.leave_at_once,
    tidy=work.close,
  ) as run:
    common.quiet_logging()
    check(values)
    _check(values)
    record = job.run(work.run)
  if run.status:
    return run.status
  work.close()
  if record is not None:
    if values.json:
      print(json_text(record), file=stdout, flush=True)
    for line in summary(record):
      screen.say(line)
  return console.INTERRUPTED if job.stop else 0


class _Ranks:
  """One run of a rank; `doing` is its current stage, for errors."""

  def __init__(
    self,
    values: flags.FlagValues,
    sampler: Callable[[flags.FlagValues], Any],
    stdout: TextIO,
    screen: console.Screen,
    job: console.Job,
  ):
    self.doing = "starting"
    self._values, self._sampler = values, sampler
    self._out, self._screen, self._job = stdout, screen, job
    self._stack = contextlib.ExitStack()
    self._started: list[subprocess.Popen[str]] = []
    self._joined = False
    self._written = ""

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Ends the other processes and reports an error; returns the status."""
    self.close()
    if isinstance(error, PeerError):
      self._screen.error(f"{error}, while {doing}")
      return FAILED
    return self._screen.failed(error, doing, knobs)

  def run(self) -> dict[str, Any] | None:
    """Answers, and returns all figures; in other ranks None."""
    values = self._values
    folder = model_folder(values, tiny.path)
    digest = digest_of(Folder.open(folder))
    if values.process_id:
      self._serve(folder, digest)
      return None
    prompt = None
    if not prompts.made_up(values):
      # Before processes are started: the file may be unreadable.
      prompt = prompts.from_flags(values)
    shares = _shares(values)
    size = len(shares)
    self._begin("waiting for the other processes" if size > 1 else "starting")
    group = self._gather(size, folder, digest)
    self._joined = True
    self._begin("reading the folder")
    window = self._stack.enter_context(
      TensorWindow(
        folder,
        group,
        shares=shares,
        window=values.window or None,
        retain=values.retain,
        dtype=values.dtype,
        events=values.log is not None,
      )
    )
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    if prompt is None:
      prompt = prompts.make(values, tokenizer, window.config.max_positions)
    chat = prompts.chat(values, tokenizer)
    ids = prompts.encode(prompt, values, tokenizer, chat)
    self._screen.say(f"prompt: {len(ids):,} tokens, {prompt.source}")
    return self._answer(window, tokenizer, ids, prompt, chat) | {
      "model": str(folder),
      "family": window.config.family,
    }

  def _serve(self, folder: AnyPath, digest: str) -> None:
    """Joins the group as another rank and computes until it ends."""
    values = self._values
    self.doing = f"computing as rank {values.process_id}"
    host, port = _address(values.coordinator)
    link = process_star.join(
      (host, port),
      values.process_id,
      values.num_processes,
      _key(values),
      digest=digest,
      patience_s=values.patience,
      join_s=values.init_timeout,
    )
    serve_rank(
      folder, link, values.process_id, window=values.window or None
    )  # fmt: skip

  def _gather(self, size: int, folder: AnyPath, digest: str) -> Star:
    values = self._values
    if size == 1:
      return Star()
    local = values.processes is not None
    host, port = ("127.0.0.1", 0) if local else _address(values.coordinator)
    key = secrets.token_bytes(32) if local else _key(values)
    loopback = host in ("127.0.0.1", "localhost")
    try:
      server = socket.create_server(("127.0.0.1" if loopback else "", port))
    except OSError as error:
      raise OptionError(
        "--coordinator",
        f"port {port}: {error.strerror}",
        "a free port of the machine that process 0 is on",
        "pass another port",
      ) from None
    with server:
      if local:
        if gpus := visible_gpus(os.environ):
          # Before JAX allocates memory on all GPUs.
          jax.config.update("jax_cuda_visible_devices", "0")
          if size > len(gpus):
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        self._start(size, folder, server.getsockname()[1], key)
      return Star.gather(
        server,
        size,
        key,
        digest=digest,
        patience_s=values.patience,
        join_s=values.init_timeout,
        check=self._running,
      )

  def _start(self, size: int, folder: AnyPath, port: int, key: bytes) -> None:
    """Starts the other ranks on this machine."""
    threads = max(1, (os.cpu_count() or 1) // size)
    gpus = visible_gpus(os.environ)
    for rank in range(1, size):
      variables = {_KEY: key.hex(), "NPROC": str(threads)}
      variables |= gpu_variables(rank, size, gpus)
      process = subprocess.Popen(
        [
          *script_command("generate"),
          *worker_flags(self._values, folder, port, rank, size),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Read if it ends before it joins; afterwards rank 0 gets its errors.
        stderr=subprocess.PIPE,
        text=True,
        env=script_environment() | variables,
        # Ctrl-C reaches only rank 0, which ends the others.
        start_new_session=True,
      )
      self._stack.callback(self._end, process)
      self._started.append(process)

  def _end(self, process: subprocess.Popen[str]) -> None:
    """Waits for a process that has joined, else kills it."""
    try:
      process.wait(_MOMENT_S if self._joined else 0.0)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    if process.stderr is not None:
      process.stderr.close()

  def _running(self) -> None:
    """Raises a PeerError if a started process has ended."""
    for rank, process in enumerate(self._started, 1):
      if process.poll() is not None:
        message = process.stderr.read()[-300:].strip() if process.stderr else ""
        raise PeerError(
          f"rank {rank} ended with status {process.returncode}: {message}",
          rank=rank,
        )

  def _answer(
    self,
    window: TensorWindow,
    tokenizer: Any,
    ids: np.ndarray,
    prompt: prompts.Prompt,
    chat: Any,
  ) -> dict[str, Any]:
    values = self._values
    count = values.max_new_tokens
    if count is None:
      count = prompts.ANSWER_TOKENS if prompts.made_up(values) else 256
    strings = tuple(values.stop)
    if not strings and chat is None and prompts.made_up(values):
      strings = ("\n",)
    eos = tuple(i for i in tokenizer.eos_ids if i < window.config.vocab)
    watch = Stop(ids=eos, strings=strings).watch(tokenizer)
    new: list[int] = []
    reports: list[WindowReport] = []
    self._begin("reading the prompt")

    def stream(row: np.ndarray) -> bool:
      if not new:
        self._screen.end()
        self.doing = "answering"
        self._job.gentle = True
      new.append(int(row[0]))
      self._write(watch.feed(new[-1]))
      return watch.stopped is not None or self._job.stop

    start = time.monotonic()
    window.generate(
      [ids],
      max_new_tokens=count,
      sampler=self._sampler(values),
      cache_kind=kind_text.parse(values.cache, "--cache"),
      stop=eos,
      stream=stream,
      report=reports.append,
    )
    self._write(watch.flush())
    self.close()
    (report,) = reports
    stopped = watch.stopped
    if stopped is None:
      stopped = "Ctrl-C" if self._job.stop else "max_new_tokens"
    simulated = report.simulated().record()
    ranks = [_rank_record(rank_report) for rank_report in report.ranks]
    if values.log is not None:
      events = [rank_report.events for rank_report in report.ranks]
      blocks = [blocks_of(rank_report) for rank_report in report.ranks]
      body = {
        "shares": list(report.shares), "ranks": ranks, "blocks": blocks,
        "events": events,
      }  # fmt: skip
      files.write(values.log, LOG_FORMAT, body | {"simulated": simulated})
    passkey = prompt.passkey
    return {
      "answer": self._written,
      "tokens": new,
      "stopped": stopped,
      "prompt_tokens": len(ids),
      "passkey": passkey,
      "passkey_found": None if passkey is None else passkey in self._written,
      "seconds": time.monotonic() - start,
      "first_token_s": report.first_s,
      "token_s": report.token_s,
      "shares": list(report.shares),
      "window": values.window,
      "ranks": ranks,
      "simulated": simulated,
    }

  def close(self) -> None:
    """Ends the answer's last line, and the processes that were started."""
    if self._written and not self._written.endswith("\n"):
      self._put("\n")
    self._stack.close()

  def _begin(self, doing: str) -> None:
    self.doing = doing
    self._screen.begin(doing)

  def _write(self, text: str) -> None:
    self._written += text
    self._put(text)

  def _put(self, text: str) -> None:
    if text and not self._values.json:
      self._out.write(text)
      self._out.flush()


def worker_flags(
  values: flags.FlagValues,
  folder: AnyPath,
  port: int,
  rank: int,
  size: int,
) -> list[str]:
  """Flags of a started rank, without those of the prompt."""
  return [
    f"--model={folder.absolute()}",
    f"--window={values.window or 0}",
    f"--coordinator=127.0.0.1:{port}",
    f"--num_processes={size}",
    f"--process_id={rank}",
    f"--patience={values.patience}",
    f"--init_timeout={values.init_timeout}",
  ]


def _rank_record(report: RankReport) -> dict[str, Any]:
  """A rank's figures as JSON, with sums in place of the lists of blocks."""
  left_out = ("events", "block_bytes", "block_names", "kept")
  fields: dict[str, Any] = dataclasses.asdict(report)
  return {
    k: sum(x) if isinstance(x, tuple) else x
    for k, x in fields.items()
    if k not in left_out
  }


def blocks_of(one: RankReport) -> list[dict[str, Any]]:
  """A rank's blocks as JSON: bytes and seconds of each."""
  rows = zip(
    one.block_names, one.block_bytes, one.reads_s, one.compute_s, one.peers_s,
    strict=True,
  )  # fmt: skip
  return [
    {
      "name": name, "bytes": nbytes, "kept": k in one.kept, "read_s": read,
      "compute_s": compute, "peers_s": peers,
    }
    for k, (name, nbytes, read, compute, peers) in enumerate(rows)
  ]  # fmt: skip


def reading_text(
  window: int | None, seconds: float, words: Callable[[float], str]
) -> str:
  """Text on the time of reading weights, in each pass or once."""
  if window:
    return f"a pass reads for {words(seconds)}"
  return f"all weights were read once, for {words(seconds)}"


def summary(done: dict[str, Any]) -> Iterator[str]:
  """Yields lines of text that summarize the figures of a run."""
  rate = 1 / done["token_s"] if done["token_s"] else 0.0
  size, ms = console.nbytes, lambda s: f"{1e3 * s:,.0f} ms"
  yield ""
  yield (
    f"{'decoding':12} {len(done['tokens'])} tokens, the first after "
    f"{done['first_token_s']:.2f} s, then {rate:,.2f} tokens/s, until "
    f"{done['stopped']!r}"
  )
  yield (
    f"{'a token':12} {ms(done['token_s'])}; simulated by its measured parts "
    f"{ms(done['simulated']['token_s'])}"
  )
  for row in done["ranks"]:
    yield (
      f"{'rank ' + str(row['rank']):12} {row['peak_blocks']} blocks at once, "
      f"{size(row['peak_bytes'])} of {size(row['weight_bytes'])}; process "
      f"{size(row['rss_bytes'])}; a token: {ms(row['compute_s'])} computing, "
      f"{ms(row['disk_s'])} waiting for the disk, {ms(row['peers_s'])} for "
      f"others; {reading_text(done['window'], row['reads_s'], ms)}"
    )
  if done["passkey"] is not None:
    verdict = "in" if done["passkey_found"] else "NOT in"
    yield f"{'passkey':12} {done['passkey']}, {verdict} the answer"


# ---------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together, before anything is started."""
  for name in values:
    if name not in _USED_FLAGS and values[name].present:
      raise prompts.clash(f"--{name} with --window or --processes", "one")
  if values.processes is not None:
    positive_int("--processes", values.processes)
  if values.window is not None and values.window < 0:
    raise OptionError(
      "--window", values.window, "a number of blocks", "pass --window=4"
    )
  if values.retain is not None:
    positive_int("--retain", values.retain)
  number("--patience", values.patience, above=0)
  by_hand = [
    name
    for name in ("coordinator", "num_processes", "process_id")
    if values[name].value is not None
  ]
  if by_hand and values.processes is not None:
    raise prompts.clash(f"--processes and --{by_hand[0]}", "one of them")
  if by_hand and len(by_hand) < 3:
    raise OptionError(
      "flags",
      f"--{' and --'.join(by_hand)}",
      "--coordinator, --num_processes and --process_id together",
      "pass all three",
    )
  if by_hand:
    _address(values.coordinator)
    _key(values)
    if not 0 <= values.process_id < values.num_processes:
      raise OptionError(
        "--process_id",
        values.process_id,
        f"0 to {values.num_processes - 1}",
        "number the processes from 0",
      )
  if not values.process_id:
    _shares(values)


def _shares(values: flags.FlagValues) -> tuple[float, ...]:
  """Share of the model that each process gets, from the flags."""
  items, size = values.shares, values.processes or values.num_processes
  shares = shares_of(items, size)
  if size is None and len(shares) > 1:
    raise prompts.clash("--shares without --processes", "both")
  return shares


def shares_of(
  given: Sequence[str] | None, size: int | None
) -> tuple[float, ...]:
  """Parses --shares, a number for each of `size` processes.

  Raises:
    OptionError: If the count is wrong, one is negative, or all are 0.
  """
  try:
    shares = None if given is None else tuple(float(x) for x in given)
  except ValueError:
    shares = ()
  if shares is None:
    return (1.0,) * (size or 1)
  if not shares or (size is not None and len(shares) != size):
    raise OptionError(
      "--shares",
      ",".join(given or ()),
      f"{size or 'some'} numbers, one for each process",
      "pass --processes=4 --shares=3,2,2,1",
    )
  for share in shares:
    number("--shares", share, least=0)
  number("--shares, the sum", sum(shares), above=0)
  return shares


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise OptionError(
      "--coordinator", text, "HOST:PORT", "pass it like host0:1234"
    )
  return host.strip("[]"), int(port)


def _key(values: flags.FlagValues) -> bytes:
  """The secret key that the processes of a group share."""
  key_hex = os.environ.get(_KEY)
  if values.key_file is None and key_hex:
    return bytes.fromhex(key_hex)
  if values.key_file is None:
    raise OptionError(
      "--key_file",
      "none with --coordinator and --window",
      "a file that all processes have, of 16 bytes or more",
      "make one: head -c 32 /dev/urandom > key; copy it to each machine",
    )
  key = pathlib.Path(values.key_file).read_bytes()
  if len(key) < 16:
    raise OptionError(
      "--key_file", f"{len(key)} bytes", "16 or more", "make a longer one"
    )
  return key
