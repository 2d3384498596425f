"""How long the calls of a live engine take: by its own steps, to a file or not.

Guarantees: a line is a call that nothing else shared a step with: a prompt,
over all steps that it took, or a token of each row that decodes; what ran in
one step with calls of the other kind is left out. A file is written line by
line, each in one write, so that a process that is killed leaves whole lines;
one that goes on with the file removes what a loss of power has cut.
Cost: some microseconds of Python a step, and a line of some 40 bytes for each
prompt and each step of answers.

A prompt is one call however many steps read it: its time grows as that of a
queue's prompts does in `reading_s`, by what is cached of it and by its length.
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
from ringjax.serve.cluster.fitted_times import CALL_COLUMNS, MeasuredCall
from ringjax.serve.engine import Engine
from ringjax.serve.request import Handle, Request
from ringjax.serve.scheduler import ServedRow, StepPlan
from ringjax.serve.simulate import watch_steps


class _ReadPiece(NamedTuple):
  """A piece of a prompt in a step; the fields of `PromptPiece`, and its share
  of the step's tokens."""

  row: ServedRow
  start: int
  count: int
  ends: bool
  share: float


class _StepWork(NamedTuple):
  """What a step computes, noted before it changes.

  Fields:
    rows: that decode.
    cached: tokens of all of them.
    pieces: of prompts.
  """

  rows: int
  cached: int
  pieces: tuple[_ReadPiece, ...]


def _work_of(plan: StepPlan) -> _StepWork:
  tokens = sum(piece.count for piece in plan.pieces)
  return _StepWork(
    len(plan.turns),
    sum(turn.at for turn in plan.turns),
    tuple(
      _ReadPiece(x.row, x.start, x.count, x.chooses, x.count / tokens)
      for x in plan.pieces
    ),
  )


@dataclasses.dataclass(eq=False)
class _ReadPrompt:
  """A prompt that is being read: its tokens so far, and their seconds."""

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
  """Tells of an engine's calls, in a block; of one with a thread too.

  Args:
    engine: whose programs are compiled (`Engine.warm_up`).
    told: is called with each call, by the thread that steps.
    clock: seconds.
  """
  devices = 1 if engine.mesh is None else engine.mesh.size
  # Prompts that began when only prompts were read, and whose steps were so.
  prompts: dict[ServedRow, _ReadPrompt] = {}

  def step(work: _StepWork, seconds: float) -> None:
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
        # Its beginning was read beside answers.
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
      # Those that were given up.
      for row in [row for row in prompts if row.ended]:
        del prompts[row]

  with watch_steps(engine, _work_of, step, clock=clock):
    yield


@contextlib.contextmanager
def log_calls(engine: Engine, path: str | os.PathLike[str]) -> Iterator[None]:
  """Appends an engine's calls to a csv that `read_calls` reads, in a block.

  Args:
    engine: see `watch_calls`.
    path: of the file, made if it is not there.

  Raises:
    OptionError: it can't be written, or is another kind of file.
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
      with open(path, "rb") as there:
        data = there.read()
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

    def told(call: MeasuredCall) -> None:
      line = ",".join(f"{getattr(call, name)}" for name in CALL_COLUMNS)
      # A full disk may not end an engine.
      with contextlib.suppress(OSError):
        os.write(file, f"{line}\n".encode())

    with watch_calls(engine, told):
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
  """Measures calls of an engine with nothing to do, of several sizes.

  Prompts of one step's tokens and of twice as many each time, up to what a row
  may have, with a few tokens behind each; then rows that decode together.

  Args:
    engine: whose programs are compiled; with a thread or without.
    seconds: after which no longer prompt is begun; the shortest ones are read
      in any case.
    seed: of the prompts' random tokens.
    clock: seconds.

  Raises:
    OptionError: the engine is busy.
  """
  number("seconds", seconds, above=0)
  if engine.busy:
    raise OptionError(
      "engine", "one that is busy", "one with nothing to do", "run it first"
    )
  rng = np.random.default_rng(seed)
  limits, tree = engine.scheduler.limits, engine.scheduler.tree
  room = tree.groups[0].pages * tree.shards * tree.page
  most = min(engine.longest, room)
  new = max(1, min(8, most // 4))
  longest = max(1, most - new)

  def ask(tokens: int) -> Handle:
    prompt = rng.integers(0, engine.vocab, tokens).astype(np.int32)
    return engine.submit(
      Request(prompt=prompt, max_new_tokens=new, share=False)
    )

  unit = max(1, min(limits.piece * limits.pieces, longest // 4))
  # Memory is resident, and code is read, once.
  ask(unit).result()
  found: list[MeasuredCall] = []
  end, sizes = clock() + seconds, [unit, 2 * unit]
  while 2 * sizes[-1] <= longest:
    sizes.append(2 * sizes[-1])
  with watch_calls(engine, found.append, clock=clock):
    for n, size in enumerate(sizes):
      if n < 2 or clock() < end:
        for _ in range(2):
          ask(size).result()
    rows = min(limits.rows, 8, max(1, room // (unit + new + tree.page)))
    for handle in [ask(unit) for _ in range(rows)]:
      handle.result()
  return found
