"""Reads a long document on all devices, and answers.

  python -m launch.generate
      A small model, which ships with ringjax, reads sources of Python's
      standard library in which a passkey is hidden, on 8 CPU devices, and is
      asked for it.
  python -m launch.generate --model=DIR --prompt_file=F --prompt="Who did it?"
      Any Hugging Face folder, a document and a question.
  python -m launch.generate --context=100000 --mesh=data:1,seq:4 \\
      --prefill=chunked --chunk=4096
      A longer document on four devices, 4096 tokens at a time.

The answer goes to stdout as it comes, all else to stderr. Ctrl-C ends an
answer where it is. With several processes (see launch/common.py) all get the
same flags, and the first one speaks; only it needs the document.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags

import ringjax as rj
from launch import common
from ringjax.data import ChatTemplate, Tokenizer, documents
from ringjax.errors import OptionError, PromptError, message
from ringjax.infer import METHODS, Greedy, Report, Sample, Stop
from ringjax.models import tiny
from ringjax.models.hf import tensors

NAME = "generate"
_CONTEXT = 32_768
_NEW_TOKENS, _ANSWER_TOKENS = 256, 64
_FILE_BYTES = 1 << 30
_NAMES = ("amber", "birch", "cobalt", "ember", "fjord", "garnet", "willow")
_MEMORY = (
  "shard the sequence over more devices (--mesh=seq:N), or read less at a "
  "time (--prefill=chunked --chunk=1024)"
)


def define(values: flags.FlagValues) -> None:
  """The flags of this script."""
  text = lambda name, default, words: flags.DEFINE_string(
    name, default, words, flag_values=values
  )
  whole = lambda name, words: flags.DEFINE_integer(
    name, None, words, flag_values=values
  )
  number = lambda name, default, words: flags.DEFINE_float(
    name, default, words, flag_values=values
  )
  boolean = lambda name, default, words: flags.DEFINE_bool(
    name, default, words, flag_values=values
  )
  text("model", None, "Hugging Face folder; default: the one in ringjax.")
  text("prompt", None, "What to continue or, with a file, the question on it.")
  text("prompt_file", None, "A document, UTF-8; - is stdin.")
  text("system", None, "A system message; needs a chat template.")
  boolean("chat", None, "Use the chat template; default: if there is one.")
  boolean("raw", False, "Use no chat template, as --nochat.")
  whole(
    "context",
    f"Tokens of the prompt that is made up if none is given; {_CONTEXT:,}.",
  )
  number("depth", 0.4, "Where the passkey hides in it: 0 begin, 1 end.")
  flags.DEFINE_enum(
    "prefill", "auto", METHODS, "How to read it.", flag_values=values
  )
  whole("chunk", "Tokens of a chunk, for --prefill=chunked.")
  whole(
    "max_new_tokens",
    f"Longest answer; {_NEW_TOKENS}, for the passkey {_ANSWER_TOKENS}.",
  )
  number("temperature", None, "0 is greedy, as is no sampling flag at all.")
  whole("top_k", "Keep so many of the likeliest tokens.")
  number("top_p", None, "Keep the likeliest tokens up to this probability.")
  number("min_p", None, "Keep tokens of this part of the largest probability.")
  number("repetition_penalty", None, "Above 1, seen tokens get less likely.")
  flags.DEFINE_integer(
    "seed", 0, "Of sampling, and of the passkey.", flag_values=values
  )
  flags.DEFINE_multi_string(
    "stop", [], "Text that ends the answer; repeatable.", flag_values=values
  )
  text("dtype", None, "bfloat16, float16 or float32; default: the folder's.")
  boolean("json", False, "One JSON object on stdout, and nothing else.")
  common.define(values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """What is read.

  Attributes:
    document: what comes first.
    question: what comes last.
    source: whose text it is, in words.
    depth: where the passkey is hidden.
    passkey: what to answer, or None where there is none.
  """

  document: str
  question: str
  source: str
  depth: float = 0.0
  passkey: str | None = None


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Does what the flags say; the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = common.Screen(NAME, stderr)
  job = common.Job()
  work = _Work(values, stdout, screen, job)
  try:
    _check(values)
    common.start(values)
    done = job.run(work.run)
  except KeyboardInterrupt:
    # The thread can't be ended but with the process.
    screen.end()
    work.close()
    screen.error(f"interrupted while {work.doing}")
    common.leave(common.INTERRUPTED)
    raise AssertionError from None
  except BrokenPipeError:
    # Who read the answer has gone: `| head`.
    screen.end()
    common.leave(0)
    raise AssertionError from None
  except Exception as error:
    text = common.reason(error, work.doing, _MEMORY)
    if text is None:
      screen.end()
      raise
    screen.error(text)
    return 2
  work.tell(done)
  return common.INTERRUPTED if job.stop else 0


class _Work:
  """One run; `doing` says what it is at."""

  def __init__(
    self,
    values: flags.FlagValues,
    stdout: TextIO,
    screen: common.Screen,
    job: common.Job,
  ):
    self.doing = "starting"
    self._values = values
    self._out = stdout
    self._screen = screen
    self._job = job
    self._written = ""

  def run(self) -> dict[str, Any]:
    """Reads and answers: all figures."""
    values, screen = self._values, self._screen
    first = jax.process_index() == 0
    screen.quiet = not first
    mesh = common.mesh(values.mesh)
    folder = pathlib.Path(values.model or tiny.path())
    screen.say(_devices(mesh))

    self._begin(f"loading {folder}", "loading the model")
    start = time.monotonic()
    model = rj.models.load(folder, mesh=mesh, dtype=values.dtype)
    jax.block_until_ready(model)
    load_s = time.monotonic() - start
    params = tensors.parameters(model)
    numbers = sum(p.get_value().size for p in params.values())
    screen.say(
      f"model: {model.config.family}, {numbers:,} parameters, "
      f"{jax.numpy.dtype(model.dtype).name}, in {load_s:.1f} s"
    )

    self._begin("encoding the prompt", "encoding the prompt")
    tokenizer = Tokenizer.load(folder, untrusted=values.model is not None)
    chat = _chat(values, tokenizer)
    prompt: Prompt | None = None

    def encode() -> np.ndarray:
      nonlocal prompt
      prompt = _prompt(values, tokenizer, model.config.max_positions)
      return _encode(prompt, values, tokenizer, chat)

    ids = common.share(encode)
    found: Any = prompt
    asked = isinstance(found, Prompt) and found.passkey is not None
    count = values.max_new_tokens
    if count is None:
      count = _ANSWER_TOKENS if _made_up(values) else _NEW_TOKENS
    strings = tuple(values.stop) or (("\n",) if _made_up(values) else ())
    eos = [i for i in tokenizer.eos_ids if i < model.config.vocab]
    stop = Stop(ids=tuple(eos), strings=strings)
    if len(ids) + count > model.config.max_positions:
      screen.say(
        f"note: {len(ids) + count:,} tokens, and the model was made for "
        f"{model.config.max_positions:,}"
      )
    if prompt is not None:
      screen.say(f"prompt: {len(ids):,} tokens, {prompt.source}")

    clock = _Clock(time.monotonic())
    reports: list[Report] = []
    self._begin(
      f"reading {len(ids):,} tokens", "reading the prompt", len(ids), "tokens"
    )
    watch = stop.watch(tokenizer)
    new: list[int] = []

    def stream(row: np.ndarray) -> bool:
      clock.token()
      if not new:
        screen.end()
        self.doing = "answering"
        self._job.gentle = jax.process_count() == 1
      new.append(int(row[0]))
      self._write(watch.feed(new[-1]))
      return watch.stopped is not None or self._job.stop

    def progress(done: int) -> None:
      screen.at(done)
      if done >= len(ids):
        clock.read_s = time.monotonic() - clock.start

    with common.Compiling() as compiling:
      rj.infer.generate(
        model,
        [ids],
        max_new_tokens=count,
        sampler=_sampler(values),
        prefill=values.prefill,
        chunk=values.chunk,
        mesh=mesh,
        stop=stop.ids,
        stream=stream,
        progress=progress,
        report=reports.append,
      )
    self._write(watch.flush())
    self.close()
    (report,) = reports
    stopped = watch.stopped
    if stopped is None:
      stopped = "Ctrl-C" if self._job.stop else "max_new_tokens"
    answer = self._written
    return {
      "answer": answer,
      "tokens": new,
      "stopped": stopped,
      "prompt_tokens": len(ids),
      "source": prompt.source if prompt is not None else "",
      "depth": found.depth if asked else None,
      "passkey": found.passkey if asked else None,
      "passkey_found": found.passkey in answer if asked else None,
      "model": str(folder),
      "family": model.config.family,
      "parameters": numbers,
      "dtype": jax.numpy.dtype(model.dtype).name,
      "platform": jax.default_backend(),
      "devices": int(mesh.devices.size),
      "processes": jax.process_count(),
      "mesh": {name: int(n) for name, n in mesh.shape.items()},
      "prefill": report.prefill.name,
      "prefill_why": report.prefill.why,
      "chunk": report.prefill.chunk,
      "load_s": load_s,
      "first_token_s": clock.first_s,
      "compile_s": compiling.seconds(clock.start + clock.first_s),
      "prefill_s": clock.read_s - compiling.seconds(clock.start + clock.read_s),
      "decode_s": clock.last_s - clock.first_s,
      "cache_bytes_per_device": report.cache_bytes,
      "cache_tokens": report.capacity,
    }

  def tell(self, done: dict[str, Any]) -> None:
    """The figures, in words or as JSON."""
    if jax.process_index():
      return
    if self._values.json:
      print(json.dumps(done), file=self._out, flush=True)
    for line in summary(done):
      self._screen.say(line)

  def close(self) -> None:
    """Ends the answer's last line."""
    if self._written and not self._written.endswith("\n"):
      self._put("\n")

  def _begin(self, label: str, doing: str, total: int = 0, unit: str = ""):
    self.doing = doing
    self._screen.begin(label, total, unit)

  def _write(self, text: str) -> None:
    self._written += text
    self._put(text)

  def _put(self, text: str) -> None:
    if text and not self._values.json and jax.process_index() == 0:
      self._out.write(text)
      self._out.flush()


class _Clock:
  """When what happened, in seconds from the start."""

  def __init__(self, start: float):
    self.start = start
    self.read_s = self.first_s = self.last_s = 0.0

  def token(self) -> None:
    self.last_s = time.monotonic() - self.start
    self.first_s = self.first_s or self.last_s


def summary(done: dict[str, Any]) -> list[str]:
  """Lines for people, from the figures of a run."""
  rate = lambda n, s: f"{n / s:,.1f}" if s > 0 else "-"
  axes = ", ".join(f"{name}:{n}" for name, n in done["mesh"].items())
  chunk = f" of {done['chunk']:,} tokens" if done["chunk"] else ""
  processes = ""
  if done["processes"] > 1:
    processes = f" in {done['processes']} processes"
  lines = {
    "prompt": f"{done['prompt_tokens']:,} tokens, {done['source']}",
    "devices": f"{done['devices']} x {done['platform']}{processes}, "
    f"mesh {axes}",
    "prefill": f"{done['prefill']}{chunk} ({done['prefill_why']}), "
    f"{rate(done['prompt_tokens'], done['prefill_s'])} tokens/s",
    "first token": f"after {done['first_token_s']:.2f} s, "
    f"{done['compile_s']:.2f} s of it compiling",
    "decoding": f"{len(done['tokens'])} tokens, "
    f"{rate(len(done['tokens']) - 1, done['decode_s'])} tokens/s, "
    f"until {done['stopped']!r}",
    "cache": f"{common.nbytes(done['cache_bytes_per_device'])} on each device, "
    f"{done['cache_tokens']:,} tokens in all",
  }
  if done["passkey"] is not None:
    found = "in" if done["passkey_found"] else "NOT in"
    lines["passkey"] = (
      f"{done['passkey']}, hidden at {done['depth']:.0%}, {found} the answer"
    )
  return ["", *(f"{name:12} {text}" for name, text in lines.items())]


def _devices(mesh: Any) -> str:
  axes = ", ".join(f"{name}:{n}" for name, n in mesh.shape.items())
  kind = mesh.devices.flat[0].device_kind
  processes = ""
  if jax.process_count() > 1:
    processes = f" in {jax.process_count()} processes"
  return f"devices: {mesh.devices.size} x {kind}{processes}, mesh {axes}"


# ---------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------


def _check(values: flags.FlagValues) -> None:
  """Refuses flags that do not go together, before anything is loaded."""
  _sampler(values)
  if values.raw and values.chat:
    raise _clash("--raw and --chat", "one of them")
  if values.system is not None and (values.raw or values.chat is False):
    raise _clash("--system without a chat template", "--system with --chat")
  for name in ("context", "depth"):
    if values[name].present and not _made_up(values):
      raise _clash(f"--{name} with a prompt", f"--{name} or a prompt")


def _clash(got: str, want: str) -> OptionError:
  return OptionError(message("flags", got, want, "leave one out"))


def _made_up(values: flags.FlagValues) -> bool:
  return values.prompt is None and values.prompt_file is None


def _sampler(values: flags.FlagValues) -> Any:
  filters = {name: values[name].value for name in ("top_k", "top_p", "min_p")}
  penalty, temperature = values.repetition_penalty, values.temperature
  chosen = any(value is not None for value in filters.values())
  if temperature == 0 and chosen:
    raise _clash("--temperature=0 and filters", "sampling or --temperature=0")
  if temperature == 0 or (temperature is None and not chosen):
    return Greedy(repetition_penalty=penalty)
  return Sample(
    temperature=1.0 if temperature is None else temperature,
    repetition_penalty=penalty,
    seed=values.seed,
    **filters,
  )


# ---------------------------------------------------------------------------
# The prompt
# ---------------------------------------------------------------------------


def _chat(values: flags.FlagValues, tokenizer: Any) -> ChatTemplate | None:
  wanted = values.chat
  if values.raw:
    wanted = False
  if wanted is None:
    # The model that ships knows no chats; neither does a text to continue.
    wanted = tokenizer.chat_template is not None
  if wanted:
    return ChatTemplate.of(tokenizer)
  if values.system is not None:
    raise _clash("--system, and the model has no chat template", "no --system")
  return None


def _prompt(values: flags.FlagValues, tokenizer: Any, positions: int) -> Prompt:
  if _made_up(values):
    return _with_passkey(values, tokenizer, positions)
  if values.prompt_file is None:
    return Prompt(document="", question=values.prompt, source="as given")
  text = _read(values.prompt_file)
  if values.prompt is None:
    return Prompt(document="", question=text, source=values.prompt_file)
  return Prompt(
    document=f"{text}\n\n", question=values.prompt, source=values.prompt_file
  )


def _with_passkey(
  values: flags.FlagValues, tokenizer: Any, positions: int
) -> Prompt:
  """Sources of the standard library, and a line that does not belong there."""
  dice = random.Random(values.seed)
  fact = {
    "name": dice.choice(_NAMES),
    "number": str(dice.randrange(10_000, 100_000)),
  }
  needle = tiny.NEEDLE.format(**fact)
  question = tiny.QUESTION.format(**fact)
  context = values.context
  if context is None:
    context = min(_CONTEXT, max(positions - 2 * _ANSWER_TOKENS, 1))
  count = lambda text: len(tokenizer.encode(text))
  room = context - count(needle) - count(question) - 1
  if room < 1:
    raise PromptError(
      message(
        "--context",
        context,
        f"more than {context - room} tokens, which the question takes",
        "raise it",
      )
    )
  document = documents.fit(room, count)
  files = "file" if document.files == 1 else "files"
  return Prompt(
    document=documents.hide(document.text, needle, values.depth),
    question=question,
    source=f"{document.files} {files} of {document.source}",
    depth=values.depth,
    passkey=fact["number"],
  )


def _read(path: str) -> str:
  if path == "-":
    data = sys.stdin.buffer.read(_FILE_BYTES + 1)
  else:
    with open(path, "rb") as file:
      data = file.read(_FILE_BYTES + 1)
  if len(data) > _FILE_BYTES:
    raise PromptError(
      message(
        "--prompt_file",
        f"{path}, over {_FILE_BYTES:,} bytes",
        "a smaller file",
        "cut it",
      )
    )
  try:
    return data.decode("utf-8")
  except UnicodeDecodeError as error:
    raise PromptError(
      message(
        "--prompt_file",
        f"{path}, no UTF-8 at byte {error.start}",
        "text in UTF-8",
        "convert it: iconv -t UTF-8",
      )
    ) from None


def _encode(
  prompt: Prompt,
  values: flags.FlagValues,
  tokenizer: Any,
  chat: ChatTemplate | None,
) -> np.ndarray:
  text = prompt.document + prompt.question
  if chat is None:
    return tokenizer.encode(text, bos=tokenizer.adds_bos)
  messages = [{"role": "user", "content": text}]
  if values.system is not None:
    messages.insert(0, {"role": "system", "content": values.system})
  return chat.tokens(messages, tokenizer)


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS, stdout=common.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)
