"""Answers prompts with processes whose groups change (LoongServe).

  python -m launch.instances --model=DIR --workers=4 --slots=2048 FILE
      Each line of the files is a prompt. Four processes of this machine have
      the model and room for 2048 tokens each: long prompts are read by many of
      them and answered by fewer, which have kept the keys meanwhile.
  python -m launch.instances --workers=4 --slots=512 --reserve=16 FILE
      Answers get slots as they grow: processes join.
  python -m launch.instances --workers=3 --check --leave=0 --kill=1 FILE
      Once all prompts are read process 0 leaves, its keys are moved first, and
      process 1 is killed. The answers are compared with those of one device.

A JSON record on stdout: answers, groups that read and answered and their times,
tokens kept and moved, bytes between processes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np
from absl import flags

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.errors import OptionError
from ringjax.infer.loongserve.elastic_worker import PATIENCE_S
from ringjax.json_text import json_text
from ringjax.models import tiny
from ringjax.serve.cluster import ElasticAnswers, ElasticWorkers

from .beside import prompt_lines
from .shared import common, console
from .shared.flag_helpers import FlagHelper, model_folder

NAME = "instances"
_MEMORY = "start fewer processes, with --workers, or give them fewer --slots"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.whole("workers", 4, "Processes, each with the model.")
  new.whole("slots", 1024, "Tokens that each process has room for.")
  new.whole("max_new_tokens", 32, "Longest answer.")
  new.whole("steps", 4, "Tokens between two decisions.")
  new.whole(
    "wide_rows", 4, "Rows of a process, above which another joins its group."
  )
  new.whole(
    "reserve", None, "Tokens of an answer that have slots when it begins, and "
    "again when these are full; default: all.",
  )  # fmt: skip
  new.boolean(
    "proactive", True, "Whether keys are kept while a prompt is read where "
    "they are needed; else they are moved then.",
  )  # fmt: skip
  new.number(
    "patience", PATIENCE_S, "Seconds for which a process may be silent.", 0.1
  )
  new.whole("leave", None, "Process that leaves once all is read.", least=0)
  new.whole("kill", None, "Process that is killed once all is read.", least=0)
  new.boolean(
    "check", False, "Whether to compare with one device, in this process."
  )
  new.text(
    "dtype", None, "bfloat16, float16 or float32; default: the folder's."
  )


def run(
  values: flags.FlagValues,
  words: Sequence[str],
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Answers the prompts of the files in `words`; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  with console.Run(screen, _MEMORY) as run:
    for name in ("leave", "kill"):
      if values[name].value is not None and values[name].value >= (
        values.workers
      ):
        raise OptionError(
          f"--{name}", values[name].value, f"below {values.workers}",
          "name one of the processes",
        )  # fmt: skip
    texts = prompt_lines(words)
    folder = model_folder(values, tiny.path)
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    ids = [tokenizer.encode(text) for text in texts]
    run.doing = "starting processes"
    with ElasticWorkers.start(
      folder,
      values.workers,
      slots=values.slots,
      dtype=values.dtype,
      strict=values.strict,
      patience_s=values.patience,
    ) as workers:
      screen.say(f"{len(texts):,} prompts, {values.workers} processes")
      run.doing = "answering"
      stops = [i for i in tokenizer.eos_ids if i < workers.vocab]
      answers = _served(values, workers, ids, stops)
    record = _record(texts, tokenizer, answers)
    if values.check:
      run.doing = "answering on one device"
      model = rj.models.load(folder, dtype=values.dtype, strict=values.strict)
      expected = rj.infer.generate(
        model, ids, max_new_tokens=values.max_new_tokens, stop=tuple(stops)
      )
      record["equal"] = [
        answer.tokens == want.tolist()
        for answer, want in zip(answers.answers, expected, strict=True)
      ]
  if run.status:
    return run.status
  print(json_text(record, indent=2), file=stdout, flush=True)
  return 0 if all(record.get("equal", [True])) else 1


def _served(
  values: flags.FlagValues,
  workers: ElasticWorkers,
  ids: list[np.ndarray],
  stops: list[int],
) -> ElasticAnswers:
  due = {"leave": values.leave, "kill": values.kill}

  def watch(event: dict[str, Any]) -> None:
    # At the first decode step all prompts that fit have been read.
    if event["event"] != "step":
      return
    leaves, killed = due.pop("leave", None), due.pop("kill", None)
    if leaves is not None:
      workers.leave(leaves)
    if killed is not None:
      workers.processes[killed].kill()

  return workers.serve(
    ids,
    values.max_new_tokens,
    policy=workers.policy(steps=values.steps, wide_rows=values.wide_rows),
    stop_ids=stops,
    reserve=values.reserve,
    proactive=values.proactive,
    watch=watch,
  )


def _record(
  texts: list[str], tokenizer: Tokenizer, served: ElasticAnswers
) -> dict[str, Any]:
  answers = [
    {
      "prompt": text if len(text) < 80 else f"{text[:76]} ...",
      "prompt_tokens": answer.prompt_tokens,
      "answer": tokenizer.decode(answer.tokens),
      "tokens": answer.tokens,
      "reads": answer.reads,
      "error": answer.error,
    }
    for text, answer in zip(texts, served.answers, strict=True)
  ]
  return {
    "answers": answers,
    "groups": list(served.events),
    **dataclasses.asdict(served.counts),
    "bytes_sent": served.bytes_sent,
    "seconds": served.seconds,
  }


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)
