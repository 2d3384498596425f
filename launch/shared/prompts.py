"""Prompts of launch.generate: the user's text, or a passkey task.

The passkey task: sources of Python's standard library, in which a line with a
passkey is hidden, and a question that asks for it.
"""

from __future__ import annotations

import dataclasses
import random
import sys

import numpy as np
from absl import flags
from jaxtyping import Int

from ringjax.data import ChatTemplate
from ringjax.data.batches import texts
from ringjax.data.tasks import documents
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.models import tiny
from ringjax.paths import AnyPath, open_binary

CONTEXT = 66_000
# Largest number of tokens of an answer that names the passkey.
ANSWER_TOKENS = 64
_FILE_BYTES = 1 << 30
_NAMES = ("amber", "birch", "cobalt", "ember", "fjord", "garnet", "willow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A prompt: a document and a question about it.

  Attributes:
    document: Text before the question.
    question: Text after the document.
    source: Origin of the document, for the summary.
    depth: Position of the passkey, from 0 (begin) to 1 (end), or None.
    passkey: Passkey that the answer must contain, or None.
  """

  document: str
  question: str
  source: str
  depth: float | None = None
  passkey: str | None = None


def clash(got: str, want: str) -> OptionError:
  """Creates an error about flags that do not go together."""
  return OptionError("flags", got, want, "leave one out")


def made_up(values: flags.FlagValues) -> bool:
  """Whether the prompt is the passkey task, as no text is passed."""
  return values.prompt is None and values.prompt_file is None


def chat(
  values: flags.FlagValues, tokenizer: AnyTokenizer
) -> ChatTemplate | None:
  """The chat template to use, if any.

  Raises:
    TemplateError, OptionError: If flags need a template and the model has no
      usable one.
  """
  use_template = values.chat
  if values.raw:
    use_template = False
  if use_template is None:
    use_template = tokenizer.chat_template is not None
  if use_template:
    return ChatTemplate.of(tokenizer)
  if values.system is not None:
    raise clash("--system, and the model has no chat template", "no --system")
  return None


def from_flags(values: flags.FlagValues) -> Prompt:
  """The prompt of --prompt and --prompt_file.

  Raises:
    PromptError: If a text is empty or too long, or a file is not UTF-8.
    OSError: If a file cannot be read.
  """
  question, path = values.prompt, values.prompt_file
  if question is not None:
    refuse_blank("--prompt", question, "nothing")
    if path is None:
      return Prompt(document="", question=question, source="as given")
  text = read_file(path, "--prompt_file")
  refuse_blank("--prompt_file", text, f"{path!r}, without text")
  if question is None:
    return Prompt(document="", question=text, source=path)
  return Prompt(document=f"{text}\n\n", question=question, source=path)


def refuse_blank(name: str, text: str, got: str) -> None:
  """Refuses a text without words.

  Raises:
    PromptError: If the text is empty or white space.
  """
  if not text.strip():
    raise PromptError(
      name, got, "a text to continue", f"pass a text, or leave {name} out"
    )


def make(
  values: flags.FlagValues, tokenizer: AnyTokenizer, positions: int
) -> Prompt:
  """Creates the passkey task from sources of the standard library.

  Args:
    values: Flags of the script.
    tokenizer: Tokenizer of the model.
    positions: Longest context of the model, in tokens.

  Raises:
    PromptError: If the context is too short for the question.
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
    # A chat template adds some tokens: leave room for them, too.
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
  """Reads the text of a file, or of stdin as "-".

  Args:
    path: Path of the file.
    argument: Name of the file in error messages.

  Raises:
    PromptError: If it is too long or not UTF-8.
    OSError: If it cannot be read.
  """
  if path == "-":
    data = sys.stdin.buffer.read(_FILE_BYTES + 1)
  else:
    with open_binary(path) as file:
      data = file.read(_FILE_BYTES + 1)
  if len(data) > _FILE_BYTES:
    raise PromptError(
      argument,
      f"{path}, over {_FILE_BYTES:,} bytes",
      "a smaller file",
      "pass a part of it",
    )
  try:
    # "utf-8-sig" drops the byte order mark that some editors write.
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
) -> Int[np.ndarray, " T"]:
  """Encodes a prompt; its text never becomes special tokens."""
  text = prompt.document + prompt.question
  if template is None:
    return tokenizer.encode(text, bos=tokenizer.adds_bos)
  messages = [{"role": "user", "content": text}]
  if values.system is not None:
    messages.insert(0, {"role": "system", "content": values.system})
  return template.tokens(messages, tokenizer)


def find_contexts(folder: str) -> list[AnyPath]:
  """Find the .txt files of a folder, in the order of their names.

  Raises:
    DataError: If no file exists.
  """
  return texts.find(folder)


def contexts(
  folder: str, tokenizer: AnyTokenizer
) -> list[Int[np.ndarray, " _"]]:
  """Encodes the .txt files of a folder, in the order of their names.

  Raises:
    DataError: If no file exists, or one is not UTF-8.
    PromptError: If a file has no text.
  """
  paths = find_contexts(folder)
  ids = []
  for path, text in zip(paths, texts.from_files(paths), strict=True):
    refuse_blank("--contexts", text, f"{path}, without text")
    ids.append(np.asarray(tokenizer.encode(f"{text}\n\n"), np.int32))
  return ids


def around_contexts(
  prompt: Prompt,
  values: flags.FlagValues,
  tokenizer: AnyTokenizer,
  template: ChatTemplate | None,
) -> tuple[tuple[int, ...], Int[np.ndarray, " _"]]:
  """Ids before all contexts, and ids of the question after them."""
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
) -> tuple[tuple[int, ...], Int[np.ndarray, " _"]]:
  """Splits the ids of a prompt before the first id of the question's text."""
  ids = encode(prompt, values, tokenizer, template)
  # Ids that do not depend on the question: those before the first difference
  # to the encoding of another question.
  initial = "a" if prompt.question[:1] != "a" else "b"
  alternative = dataclasses.replace(prompt, question=initial)
  encodings = ids, encode(alternative, values, tokenizer, template)
  shortest = min(map(len, encodings))
  differ = np.flatnonzero(encodings[0][:shortest] != encodings[1][:shortest])
  first = int(differ[0]) if differ.size else shortest - 1
  return tuple(int(n) for n in ids[:first]), ids[first:]
