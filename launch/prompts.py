"""Prompts of launch.generate: the user's text, or a passkey task.

The task: sources of Python's standard library, in which a line with a passkey
is hidden, and the question for it.
"""

from __future__ import annotations

import dataclasses
import random
import sys

import numpy as np
from absl import flags

from ringjax.data import ChatTemplate, documents, texts
from ringjax.data.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.models import tiny

CONTEXT = 66_000
# Room for an answer that names the passkey.
ANSWER_TOKENS = 64
_FILE_BYTES = 1 << 30
_NAMES = ("amber", "birch", "cobalt", "ember", "fjord", "garnet", "willow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A prompt: a document and a question about it.

  Attributes:
    document: what comes first.
    question: what comes last.
    source: where the document comes from, for the summary.
    depth: where the passkey is hidden, or None where there is none.
    passkey: what to answer, or None.
  """

  document: str
  question: str
  source: str
  depth: float | None = None
  passkey: str | None = None


def clash(got: str, want: str) -> OptionError:
  """An error about flags that do not go together."""
  return OptionError("flags", got, want, "leave one out")


def made_up(values: flags.FlagValues) -> bool:
  """Whether the prompt is the passkey task, as no text is passed."""
  return values.prompt is None and values.prompt_file is None


def chat(
  values: flags.FlagValues, tokenizer: AnyTokenizer
) -> ChatTemplate | None:
  """The template to use, if any.

  Raises:
    TemplateError, OptionError: flags ask for one, and there is none.
  """
  wanted = values.chat
  if values.raw:
    wanted = False
  if wanted is None:
    wanted = tokenizer.chat_template is not None
  if wanted:
    return ChatTemplate.of(tokenizer)
  if values.system is not None:
    raise clash("--system, and the model has no chat template", "no --system")
  return None


def given(values: flags.FlagValues) -> Prompt:
  """The prompt of --prompt and --prompt_file.

  Raises:
    PromptError: an empty or too long text, or a file that is not UTF-8.
    OSError: a file cannot be read.
  """
  question, path = values.prompt, values.prompt_file
  if question is not None:
    _refuse_blank("--prompt", question, "nothing")
    if path is None:
      return Prompt(document="", question=question, source="as given")
  text = read_file(path, "--prompt_file")
  _refuse_blank("--prompt_file", text, f"{path!r}, without text")
  if question is None:
    return Prompt(document="", question=text, source=path)
  return Prompt(document=f"{text}\n\n", question=question, source=path)


def _refuse_blank(name: str, text: str, got: str) -> None:
  if not text.strip():
    raise PromptError(
      name, got, "a text to continue", f"pass a text, or leave {name} out"
    )


def make(
  values: flags.FlagValues, tokenizer: AnyTokenizer, positions: int
) -> Prompt:
  """Sources of the standard library, in which a passkey is hidden.

  Args:
    values: the flags.
    tokenizer: the model's.
    positions: the longest context of the model, in tokens.

  Raises:
    PromptError: there is no room for the question.
  """
  dice = random.Random(values.seed)
  fact = {
    "name": dice.choice(_NAMES),
    "number": str(dice.randrange(10_000, 100_000)),
  }
  needle = tiny.NEEDLE.format(**fact)
  question = tiny.QUESTION.format(**fact)
  context = values.context
  if context is None:
    # A chat template takes some beside the answer.
    answer = max(values.max_new_tokens or 0, ANSWER_TOKENS)
    context = min(CONTEXT, max(positions - answer - ANSWER_TOKENS, 1))
  count = lambda text: len(tokenizer.encode(text))
  room = context - count(needle) - count(question) - 1
  if room < 1:
    raise PromptError(
      "--context",
      context,
      f"more than {context - room} tokens, which the question takes",
      f"pass --context={context - room + 1} or more",
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


def read_file(path: str, argument: str) -> str:
  """The text of a file, or of stdin as "-".

  Args:
    path: Its path.
    argument: What to call it in an error.

  Raises:
    PromptError: it is too long, or not UTF-8.
    OSError: it cannot be read.
  """
  if path == "-":
    data = sys.stdin.buffer.read(_FILE_BYTES + 1)
  else:
    with open(path, "rb") as file:
      data = file.read(_FILE_BYTES + 1)
  if len(data) > _FILE_BYTES:
    raise PromptError(
      argument,
      f"{path}, over {_FILE_BYTES:,} bytes",
      "a smaller file",
      "pass a part of it",
    )
  try:
    # Without the byte order mark with which some editors begin a file.
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise PromptError(
      argument,
      f"{path}, no UTF-8 at byte {error.start}",
      "text in UTF-8",
      "convert it: iconv -t UTF-8",
    ) from None


def encode(
  prompt: Prompt,
  values: flags.FlagValues,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
) -> np.ndarray:
  """The ids of a prompt; none of them is special by what a user wrote."""
  text = prompt.document + prompt.question
  if template is None:
    return tokenizer.encode(text, bos=tokenizer.adds_bos)
  messages = [{"role": "user", "content": text}]
  if values.system is not None:
    messages.insert(0, {"role": "system", "content": values.system})
  return template.tokens(messages, tokenizer)


def contexts(folder: str, tokenizer: AnyTokenizer) -> list[np.ndarray]:
  """The ids of the texts of a folder, files .txt in the order of their names.

  Raises:
    DataError: there are none, or one is not UTF-8.
    PromptError: a file without text.
  """
  paths = texts.find(folder)
  found = []
  for path, text in zip(paths, texts.from_files(paths), strict=True):
    _refuse_blank("--contexts", text, f"{path}, without text")
    found.append(np.asarray(tokenizer.encode(f"{text}\n\n"), np.int32))
  return found


def around_contexts(
  prompt: Prompt,
  values: flags.FlagValues,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
) -> tuple[tuple[int, ...], np.ndarray]:
  """The ids before all contexts, and those of the question behind them."""
  if template is None:
    first = tokenizer.encode("\n\n", bos=tokenizer.adds_bos)
    question = np.asarray(tokenizer.encode(prompt.question), np.int32)
    return tuple(int(n) for n in first), question
  return around_question(prompt, values, tokenizer, template)


def around_question(
  prompt: Prompt,
  values: flags.FlagValues,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
) -> tuple[tuple[int, ...], np.ndarray]:
  """The ids before a question, whatever it says, and those from it on."""
  ids = encode(prompt, values, tokenizer, template)
  # What stands before a message, whatever it says.
  begin = "a" if prompt.question[:1] != "a" else "b"
  other = dataclasses.replace(prompt, question=begin)
  both = ids, encode(other, values, tokenizer, template)
  least = min(map(len, both))
  differ = np.flatnonzero(both[0][:least] != both[1][:least])
  first = int(differ[0]) if differ.size else least - 1
  return tuple(int(n) for n in ids[:first]), ids[first:]
