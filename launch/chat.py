"""Talks with a model in the terminal.

  python -m launch.chat
      With the model smollm2-135m, which python -m launch.fetch downloads.
  python -m launch.chat --model=DIR --system="Answer in one sentence."
      With any model that was tuned for chats.
  python -m launch.chat --model=DIR --context=131072 --mesh=seq:4 --cache=int8
      A long conversation, whose cache is sharded over four devices.
  echo "What is a ring?" | python -m launch.chat
      Each line of a pipe is a message.
  python -m launch.chat --model=DIR --mesh=seq:8 --coordinator=HOST:7788 \\
      --num_processes=2 --process_id=0
      Process 0 has the terminal, and the files of --load, --chat_template and
      /read; the others compute with it (see launch/shared/common.py).

The answer goes to stdout as it comes, all else to stderr. The cache stays from
turn to turn: only the new tokens of each message are read. Ctrl-C ends an
answer and not the conversation, Ctrl-D ends that. /help lists the commands.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import pathlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax import fetched_models
from ringjax.data import ChatTemplate, Tokenizer
from ringjax.errors import OptionError, PromptError, TemplateError
from ringjax.kv import kind_text
from ringjax.paths import as_path

from .answers.conversation import (
  Conversation,
  Interrupted,
  Turn,
  read_messages,
)
from .answers.conversation_group import ConversationGroup
from .shared import (
  common,
  console,
  integer_flags,
  machines,
  model_flags,
  prompts,
)
from .shared.flag_helpers import FlagHelper
from .shared.group import Group

NAME = "chat"
_MODEL = "smollm2-135m"
_NEW_TOKENS = 1024
_CONTEXT = 16384
_LINES = 1000
_MEMORY = (
  "pass a smaller --context, a codec (--cache=int8), or shard the sequence "
  "over more devices (--mesh=seq:N)"
)
_HELP = """\
/read FILE    puts a file into the conversation, before your next message
/reset        forgets the conversation
/save FILE    writes the messages as JSON, for --load=FILE
/help         this list
/quit         ends, as Ctrl-D does
Ctrl-C ends an answer. A message that begins with a slash: begin it with two."""


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  model_flags.define(
    values, _MODEL, says={"max_new_tokens": f"Default: {_NEW_TOKENS:,}."}
  )
  new.whole(
    "context",
    None,
    "Tokens of the whole conversation; default: the model's context, at most "
    f"{_CONTEXT:,}.",
  )
  new.path("load", None, "Messages to go on with, as /save writes them.")
  new.path(
    "chat_template", None, "File of a Jinja template, in place of the model's."
  )
  common.define(values)


def run(
  values: flags.FlagValues,
  *,
  stdin: TextIO | None = None,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Talks until the input ends; returns the exit status."""
  stdin = sys.stdin if stdin is None else stdin
  screen = console.Screen(NAME, stderr)
  chat = _Chat(values, stdin, sys.stdout if stdout is None else stdout, screen)

  def leave(error: BaseException, status: int) -> None:
    chat.group.leave(error, status)
    # A thread may still compute.
    console.leave_at_once(error, status)

  with console.Run(
    screen,
    _MEMORY,
    doing=lambda: chat.doing,
    reports=chat.group,
    leaving=leave,
    pipe_ends=True,
  ) as run:
    model_flags.check(values)
    if integer_flags.two_asked(values):
      raise prompts.clash("--integer with devices=2 in a chat", "one device")
    common.start(values, single=True)
    if stdout is None and jax.process_count() > 1:
      chat.write_to(console.own_stdout())
    console.Job().run(chat.begin)
    chat.talk()
  if not run.status:
    chat.group.close()
  return run.status


class _Chat:
  """A conversation in a terminal; `doing` is its current stage, for errors."""

  def __init__(
    self,
    values: flags.FlagValues,
    stdin: TextIO,
    stdout: TextIO,
    screen: console.Screen,
  ):
    self.doing = "starting"
    self.group = Group(screen, lambda: self.doing)
    self._values = values
    self._in, self._out, self._screen = stdin, stdout, screen
    self._terminal = stdin.isatty()
    # Texts of /read files, which come before the next message.
    self._files: list[str] = []
    self._conversation: Any = None
    self._tokenizer: Any = None

  def write_to(self, stdout: TextIO) -> None:
    """Writes answers to this stream."""
    self._out = stdout

  def begin(self) -> None:
    """Loads the model and creates the cache."""
    values, screen = self._values, self._screen
    screen.quiet = jax.process_index() > 0
    # Process 0 reads these files for all.
    peers = self.group.meet(values, own=("chat_template", "load"))
    self._processes = ConversationGroup(peers)
    path = fetched_models.resolve(values.model or _MODEL, "--model")
    folder = as_path(path)
    mesh = common.mesh(values.mesh)
    messages, source, date = self._processes.shared(self._files_of_flags)
    self.doing = "reading the tokenizer"
    self._tokenizer = Tokenizer.load(folder, untrusted=True)
    template = _template(source, self._tokenizer)
    self.doing = "loading the model"
    screen.begin(f"loading {folder}")
    call_bytes = None if values.memory is None else self._call_bytes
    model = model_flags.load(
      values, folder, mesh, screen.say, beside=call_bytes
    )
    jax.block_until_ready(model)
    context = self._context(model)
    self.doing = "making the cache"
    session = rj.infer.Session(
      model,
      context,
      mesh=mesh,
      cache_kind=kind_text.parse(values.cache, "--cache"),
      **model_flags.offload(values, model, context),
    )
    drafter = None
    if values.speculate is not None:
      drafter = model_flags.drafter(values.speculate, self._tokenizer)
    self._conversation = Conversation(
      model,
      self._tokenizer,
      template,
      session,
      system=values.system,
      stop=values.stop,
      max_new_tokens=values.max_new_tokens or _NEW_TOKENS,
      options={
        "config": model_flags.config(values).replace(
          machine=machines.machine(values),
          speculate=drafter,
          # The session has its own.
          cache_kind=None,
        )
      },
      now=datetime.datetime.fromisoformat(date),
    )
    if messages is not None:
      self._conversation.messages = messages
    screen.end()
    model_flags.tell_placement(model, screen.say)
    screen.say(
      f"model: {fetched_models.name_of(folder)}, {model.config.family}, "
      f"{context:,} tokens of context; /help lists the commands"
    )

  def _files_of_flags(
    self,
  ) -> tuple[list[dict[str, str]] | None, str | None, str]:
    """Messages of --load, text of --chat_template, and the date."""
    values = self._values
    messages = None if values.load is None else read_messages(values.load)
    source = None
    if values.chat_template is not None:
      source = _template_source(values.chat_template)
    return messages, source, datetime.datetime.now().isoformat()

  def _context(self, model: rj.models.Transformer) -> int:
    """Largest number of tokens of the conversation."""
    return self._values.context or min(model.config.max_positions, _CONTEXT)

  def _call_bytes(
    self, model: rj.models.Transformer, mesh: Mesh | None
  ) -> Mapping[str, Mapping[str, int]]:
    """Bytes that the longest call needs, for --memory."""
    values, context = self._values, self._context(model)
    new = min(values.max_new_tokens or _NEW_TOKENS, context - 1)
    call = rj.infer.CallMemory(
      prompt=context - new,
      new=new,
      prefill=values.prefill,
      chunk=values.chunk,
      machine=machines.machine(values),
      cache_kind=kind_text.parse(values.cache, "--cache"),
      **model_flags.offload(values, model, context),
    )
    return call(model, mesh)

  def talk(self) -> None:
    """Answers messages until there are no more."""
    if not self._processes.leads:
      # Process 0 ends answers and the conversation.
      signal.signal(signal.SIGINT, signal.SIG_IGN)
      self.doing = "following process 0"
      self._processes.follow(self._conversation)
      return
    with _history(self._terminal):
      for line in self._lines():
        if not self._handle(line.strip()):
          break
    self._processes.end()

  def _handle(self, text: str) -> bool:
    """Answers a line of the user; returns whether others may follow."""
    if not text:
      return True
    self.doing = "answering"
    try:
      if text.startswith("/") and not text.startswith("//"):
        return self._command(text)
      self._answer(text[1:] if text.startswith("//") else text)
    except (PromptError, TemplateError) as error:
      # The conversation has not changed.
      self._screen.error(f"{error}")
    except OSError as error:
      if isinstance(error, BrokenPipeError):
        raise
      self._screen.error(f"{error.filename}: {error.strerror}")
    return True

  def _lines(self) -> Iterator[str]:
    """Yields the lines of the user."""
    self.doing = "waiting for a message"
    while True:
      try:
        if self._terminal:
          yield input("> ")
        elif line := self._in.readline():
          yield line
        else:
          return
      except EOFError:
        self._screen.say("")
        return
      except KeyboardInterrupt:
        if not self._terminal:
          raise
        # An unfinished line is dropped, as in a shell.
        self._screen.say("")

  def _command(self, text: str) -> bool:
    """Runs a command; returns whether the conversation continues."""
    word, _, name = text.partition(" ")
    path = os.path.expanduser(name.strip())
    if word in ("/read", "/save") and not path:
      raise PromptError(word, "no file", f"{word} FILE", "name a file")
    if word == "/quit":
      return False
    if word == "/help":
      self._screen.say(_HELP)
    elif word == "/reset":
      self._processes.reset()
      self._conversation.reset()
      self._files = []
      self._screen.say("forgotten")
    elif word == "/save":
      self._conversation.save(path)
      count = len(self._conversation.messages)
      self._screen.say(f"{count} messages in {path}")
    elif word == "/read":
      read = prompts.read_file(path, "/read")
      self._files.append(read)
      tokens = len(self._tokenizer.encode(read))
      self._screen.say(
        f"{path}: {tokens:,} tokens, which come before your next message"
      )
    else:
      raise PromptError(
        "command", word, "one of /help's", "begin a message with // for a /"
      )
    return True

  def _answer(self, text: str) -> None:
    """Answers a message, and prints its tokens and times."""
    job, screen = console.Job(), self._screen
    job.gentle = True
    message = "\n\n".join([*self._files, text])
    began = False

    def show(piece: str) -> None:
      nonlocal began
      if piece and not began:
        began = True
        screen.end()
      self._out.write(piece)
      self._out.flush()

    def progress(done: int, total: int) -> None:
      screen.at(done)

    if self._terminal and len(message) > 2000:
      screen.begin("reading", unit="tokens")
    self._processes.ask(message)
    ask = lambda: self._conversation.ask(
      message,
      show,
      stopped=lambda: self._processes.stopped(job.stop),
      progress=progress,
    )
    try:
      turn = job.run(ask)
    except Interrupted:
      screen.end()
      screen.say("interrupted; the message is not part of the conversation")
      return
    screen.end()
    self._files = []
    if not turn.text.endswith("\n"):
      self._out.write("\n")
      self._out.flush()
    screen.say(_figures(turn))
    if turn.ended == "context":
      screen.say(
        "the context is full: begin anew with /reset, or start with a larger "
        "--context"
      )


def _figures(turn: Turn) -> str:
  """Text on the tokens and times of a turn."""
  steps = len(turn.tokens) - 1
  rate = f"{steps / turn.answer_s:,.1f}" if steps and turn.answer_s else "-"
  ended = ""
  if turn.ended in ("Ctrl-C", "max_new_tokens", "context"):
    ended = f", until {turn.ended}"
  return (
    f"[{turn.cached:,} tokens cached, {turn.read:,} read in "
    f"{turn.read_s:.2f} s; {len(turn.tokens):,} new, {rate} tokens/s{ended}]"
  )


def _template_source(path: str) -> str:
  """Reads the text of a template's file."""
  try:
    return pathlib.Path(path).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise OptionError(
      "--chat_template", error, "a file of a Jinja template", "pass its path"
    ) from None


def _template(source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
  """The model's chat template, or one with this text."""
  if source is not None:
    return ChatTemplate(source, tokenizer.special_names)
  if tokenizer.chat_template is None:
    raise OptionError(
      "--model",
      f"{tokenizer.name}, which has no chat template",
      "a model that was tuned for chats",
      "pass --chat_template=FILE, or continue texts with launch.generate",
    )
  return ChatTemplate.of(tokenizer)


@contextlib.contextmanager
def _history(terminal: bool) -> Iterator[None]:
  """Keeps the history of lines, for arrow keys, from run to run."""
  if not terminal:
    yield
    return
  try:
    readline = importlib.import_module("readline")
  except ImportError:
    yield
    return
  file = fetched_models.cache_folder() / "chat_history"
  with contextlib.suppress(OSError):
    readline.read_history_file(file)
  try:
    yield
  finally:
    readline.set_history_length(_LINES)
    with contextlib.suppress(OSError):
      file.parent.mkdir(parents=True, exist_ok=True)
      readline.write_history_file(file)


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS)


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)
