"""Measured calls of a live engine, from its own steps, optionally as a file.

Guarantees: a line is a call that shared no step with calls of the other kind: a
prompt, over all steps that it took, or a token of each decoding row; steps with
both kinds are left out. A file is written line by line, each in one write, so
that a process that is killed leaves complete lines; appending to a file first
removes a line that was truncated by a loss of power.
Cost: some microseconds of Python a step, and a line of some 40 bytes for each
prompt and each decode step.

A prompt is one call however many steps prefill it: its time grows like that of
a queue's prompts in `reading_s`, with its cached tokens and its length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.serve.cluster.times.fitted_times import (
  CALL_COLUMNS,
  MeasuredCall,
)
from ringjax.serve.engine import Engine
from ringjax.serve.request import Handle, Request
from ringjax.serve.scheduler import ServedRow, StepPlan
from ringjax.serve.simulate import watch_steps


class _ReadPiece(NamedTuple):
  """A chunk of a prompt in a step, and its share of the step's tokens.

  The other fields are those of `PromptPiece`.
  """

  row: ServedRow
  start: int
  count: int
  ends: bool
  share: float


class _StepWork(NamedTuple):
  """Work of a step, recorded before the state changes.

  Fields:
    rows: Number of rows that decode.
    cached: Cached tokens of all of them.
    pieces: Chunks of prompts.
  """

  rows: int
  cached: int
  pieces: tuple[_ReadPiece, ...]


def _step_work(plan: StepPlan) -> _StepWork:
  tokens = sum(piece.count for piece in plan.pieces)
  return _StepWork(
    len(plan.turns),
    sum(turn.at for turn in plan.turns),
    tuple(
      _ReadPiece(
        piece.row, piece.start, piece.count, piece.chooses, piece.count / tokens
      )
      for piece in plan.pieces
    ),
  )


@dataclasses.dataclass(eq=False)
class _ReadPrompt:
  """A prompt in prefill: its tokens so far, and their seconds."""

  cached: int
  tokens: int = 0
  seconds: float = 0.0


@contextlib.contextmanager
def watch_calls(
  engine: Engine,
  told: Callable[[MeasuredCall], None],
  *,
  clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
  """Report an engine's calls within a context; also if it has a thread.

  Args:
    engine: Engine whose programs are compiled (`Engine.warm_up`).
    told: Function called with each call, in the thread that steps.
    clock: Returns seconds.
  """
  devices = 1 if engine.mesh is None else engine.mesh.size
  # Prompts all of whose steps so far had only prompts.
  prompts: dict[ServedRow, _ReadPrompt] = {}

  def on_step(work: _StepWork, seconds: float) -> None:
    if work.rows and work.pieces:
      for piece in work.pieces:
        prompts.pop(piece.row, None)
    elif work.rows:
      told(
        MeasuredCall(
          phase="decode",
          devices=devices,
          tokens=work.rows,
          cached=work.cached,
          seconds=max(seconds, 1e-9),
        )
      )
    for piece in work.pieces if not work.rows else ():
      prompt = prompts.get(piece.row)
      if prompt is None and piece.start != piece.row.hit:
        # Its first chunks shared steps with decoding rows.
        continue
      if prompt is None or piece.start != prompt.cached + prompt.tokens:
        prompt = prompts[piece.row] = _ReadPrompt(piece.start)
      prompt.tokens += piece.count
      prompt.seconds += seconds * piece.share
      if piece.ends:
        del prompts[piece.row]
        told(
          MeasuredCall(
            phase="prefill",
            devices=devices,
            tokens=prompt.tokens,
            cached=prompt.cached,
            seconds=max(prompt.seconds, 1e-9),
          )
        )
    if len(prompts) > 2 * engine.rows:
      # Forget requests that were cancelled.
      for row in [row for row in prompts if row.ended]:
        del prompts[row]

  with watch_steps(engine, _step_work, on_step, clock=clock):
    yield


@contextlib.contextmanager
def log_calls(engine: Engine, path: str | os.PathLike[str]) -> Iterator[None]:
  """Append an engine's calls to a csv that `read_calls` reads, in a context.

  Args:
    engine: Engine to watch, see `watch_calls`.
    path: Path of the file, created if missing.

  Raises:
    OptionError: If it can't be written, or is another kind of file.
  """
  head = ",".join(CALL_COLUMNS)
  flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
  try:
    file = os.open(path, flags, 0o644)
  except OSError as error:
    raise OptionError(
      "log_calls", error, "a file that can be written", "pass its path"
    ) from None
  try:
    size = os.fstat(file).st_size
    if size:
      with open(path, "rb") as existing:
        data = existing.read()
      if not data.startswith(head.encode() + b"\n"):
        raise OptionError(
          "log_calls",
          f"{os.fspath(path)}, which begins otherwise",
          f"a new file, or one whose first line is {head}",
          "pass another path",
        )
      os.ftruncate(file, data.rfind(b"\n") + 1)
    else:
      os.write(file, f"{head}\n".encode())

    def append_line(call: MeasuredCall) -> None:
      line = ",".join(f"{getattr(call, name)}" for name in CALL_COLUMNS)
      # A full disk must not stop an engine.
      with contextlib.suppress(OSError):
        os.write(file, f"{line}\n".encode())

    with watch_calls(engine, append_line):
      yield
  finally:
    os.close(file)


def measure_calls(
  engine: Engine,
  *,
  seconds: int | float = 20.0,
  seed: int = 0,
  clock: Callable[[], float] = time.monotonic,
) -> list[MeasuredCall]:
  """Measure calls of several sizes on an idle engine.

  Prompts have one step's tokens and twice as many each time, up to the limit
  of a row, with a few tokens of decode each; then rows decode together.

  Args:
    engine: Engine whose programs are compiled; with or without a thread.
    seconds: Seconds after which no longer prompt is begun; the two shortest
      sizes are measured in any case.
    seed: Seed of the prompts' random tokens.
    clock: Returns seconds.

  Raises:
    OptionError: If the engine is busy.
  """
  number("seconds", seconds, above=0)
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  rng = np.random.default_rng(seed)
  limits, tree = engine.scheduler.limits, engine.scheduler.tree
  room = tree.groups[0].pages * tree.shards * tree.page
  row_tokens = min(engine.longest, room)
  new_tokens = max(1, min(8, row_tokens // 4))
  longest = max(1, row_tokens - new_tokens)

  def submit_random(tokens: int) -> Handle:
    prompt = rng.integers(0, engine.vocab, tokens).astype(np.int32)
    return engine.submit(
      Request(prompt=prompt, max_new_tokens=new_tokens, share=False)
    )

  unit = max(1, min(limits.piece * limits.pieces, longest // 4))
  # The first prompt only warms up memory and code.
  submit_random(unit).result()
  calls: list[MeasuredCall] = []
  end, sizes = clock() + seconds, [unit, 2 * unit]
  while 2 * sizes[-1] <= longest:
    sizes.append(2 * sizes[-1])
  with watch_calls(engine, calls.append, clock=clock):
    for n, size in enumerate(sizes):
      if n < 2 or clock() < end:
        for _ in range(2):
          submit_random(size).result()
    rows = min(limits.rows, 8, max(1, room // (unit + new_tokens + tree.page)))
    for handle in [submit_random(unit) for _ in range(rows)]:
      handle.result()
  return calls
