"""Answers many prompts, with attention on CPUs next to the caches (FastDecode).

  python -m launch.beside --model=DIR --workers=4 questions.txt
      Each line of the files is a prompt. Four processes of this machine keep
      the keys and attend.
  python -m launch.beside --model=DIR --workers=4 --rows=64 --every=16 FILE
      Not more than 64 sequences at a time, which start in groups so that the
      tokens that are cached stay level.
  python -m launch.beside --listen=0.0.0.0:4000 --key_file=KEY
      A worker for other machines; KEY is a file that all have, of 16 bytes or
      more.
  python -m launch.beside --model=DIR --addresses=one:4000,two:4000 \\
      --key_file=KEY FILE
      The workers at these addresses attend.

Each answer is a line of JSON on stdout, in the order of the prompts.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import TextIO

from absl import flags

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.errors import OptionError
from ringjax.infer import AttentionWorkers, WorkersReport
from ringjax.infer.fastdecode.attention_worker import (
  PATIENCE_S,
  AttentionServer,
)
from ringjax.json_text import json_text
from ringjax.kv import kind_text
from ringjax.models import tiny
from ringjax.serve.cluster import LoadControl, TokenLimit, group_rows

from .shared import common, console
from .shared.flag_helpers import FlagHelper, model_folder

NAME = "beside"
_MEMORY = "answer fewer prompts at a time, with --rows"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.checkpoint()
  new.whole("workers", 2, "Processes of this machine that attend.")
  new.texts("addresses", None, "HOST:PORT of workers, in place of --workers.")
  new.text("listen", None, "HOST:PORT: be a worker, and answer nothing.")
  new.path("key_file", None, "File of the key, for --listen and --addresses.")
  new.number(
    "patience", PATIENCE_S, "Seconds for which a worker may be silent.", 0.1
  )
  new.whole("max_new_tokens", 64, "Longest answer.")
  new.whole("rows", None, "Sequences at a time; default: all prompts.")
  new.whole("every", None, "Steps between starts of groups; divides "
            "--max_new_tokens.")  # fmt: skip
  new.text("cache", "windowed", "How workers store keys: dense or windowed.")
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
    _check(values, words)
    if values.listen is not None:
      host, port = _address("--listen", values.listen)
      server = AttentionServer(
        _key(values), host=host, port=port, patience_s=values.patience
      )
      screen.say(f"listening on {server.address[0]}:{server.address[1]}")
      server.serve()
      return 0
    texts = prompt_lines(words)
    folder = model_folder(values, tiny.path)
    run.doing = "loading the model"
    model = rj.models.load(folder, dtype=values.dtype, strict=values.strict)
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    run.doing = "answering"
    with _workers(values) as workers:
      screen.say(f"{len(texts):,} prompts, {len(workers)} workers")
      _answer(values, model, tokenizer, workers, texts, stdout, screen)
  return run.status


def _answer(
  values: flags.FlagValues,
  model: rj.models.Transformer,
  tokenizer: Tokenizer,
  workers: AttentionWorkers,
  texts: list[str],
  stdout: TextIO,
  screen: console.Screen,
) -> None:
  ids = [tokenizer.encode(text) for text in texts]
  reports: list[WorkersReport] = []
  count, rows, group, starts = values.max_new_tokens, values.rows, None, None
  if values.every is not None:
    group = group_rows(rows, count, values.every)
    starts = LoadControl(
      TokenLimit.level(rows, count, values.every, prompt=max(map(len, ids)))
    )
  answers = rj.infer.generate_beside(
    model,
    ids,
    workers=workers,
    max_new_tokens=count,
    stop=tuple(i for i in tokenizer.eos_ids if i < model.config.vocab),
    rows=rows,
    group=group,
    starts=starts,
    cache_kind=kind_text.parse(values.cache, "--cache"),
    report=reports.append,
  )
  (report,) = reports
  for text, new, start in zip(texts, answers, report.starts, strict=True):
    answer = {
      "prompt": text,
      "answer": tokenizer.decode(new),
      "tokens": new.tolist(),
      "start": start,
    }
    print(json_text(answer), file=stdout, flush=True)
  traffic, size = report.traffic, console.nbytes
  token_steps = max(1, traffic.row_steps)
  screen.say(
    f"{int(answers.lengths.sum()):,} tokens in {report.seconds:.1f} s, of "
    f"which {report.waited_s:.1f} s waited for workers; at most "
    f"{report.peak_tokens:,} tokens cached"
  )
  screen.say(
    f"sent {size(traffic.prompt_bytes)} of prompts, and for each token "
    f"{size(traffic.sent_bytes / token_steps)} there and "
    f"{size(traffic.received_bytes / token_steps)} back"
  )


def _workers(values: flags.FlagValues) -> AttentionWorkers:
  if values.addresses is None:
    return AttentionWorkers.start(values.workers, patience_s=values.patience)
  addresses = [_address("--addresses", address) for address in values.addresses]
  return AttentionWorkers.connect(
    addresses, _key(values), patience_s=values.patience
  )


def _check(values: flags.FlagValues, words: Sequence[str]) -> None:
  """Refuses flags that do not go together."""
  clash = lambda got, want: OptionError("flags", got, want, "change one")
  if values.listen is not None and words:
    raise clash("--listen and files", "one of them")
  if values.listen is not None and values.addresses is not None:
    raise clash("--listen and --addresses", "one of them")
  if values.addresses is not None and values["workers"].present:
    raise clash("--addresses and --workers", "one of them")
  remote = values.listen is not None or values.addresses is not None
  if remote != (values.key_file is not None):
    raise clash(
      "--key_file alone, or --listen or --addresses without it", "both"
    )
  if values.every is not None and values.rows is None:
    raise clash("--every without --rows", "both")
  # Before a model is loaded.
  if values.listen is not None:
    _address("--listen", values.listen)
  for address in values.addresses or ():
    _address("--addresses", address)
  if remote:
    _key(values)


def _key(values: flags.FlagValues) -> bytes:
  try:
    return pathlib.Path(values.key_file).read_bytes()
  except OSError as error:
    raise OptionError(
      "--key_file", f"{error}", "a file of 16 bytes or more", "make one"
    ) from None


def _address(name: str, text: str) -> tuple[str, int]:
  host, colon, port = text.rpartition(":")
  if not colon or not host or not port.isdecimal() or int(port) > 65535:
    raise OptionError(name, repr(text), "HOST:PORT", "pass e.g. 10.0.0.2:4000")
  return host, int(port)


def prompt_lines(names: Sequence[str]) -> list[str]:
  """Reads the lines of files that are not empty.

  Raises:
    OptionError: If a file can't be read, or no line has text.
  """
  lines: list[str] = []
  for name in names:
    try:
      lines += pathlib.Path(name).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
      raise OptionError(
        "files", f"{name}: {error}", "a text in UTF-8", "name such a file"
      ) from None
  prompts = [line for line in lines if line.strip()]
  if not prompts:
    raise OptionError(
      "files",
      "no prompt",
      "a prompt in each line",
      "name a file that has some",
    )
  return prompts


def main(argv: Sequence[str]) -> int:
  return run(flags.FLAGS, argv[1:], stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)
