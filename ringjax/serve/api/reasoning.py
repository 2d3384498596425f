"""Reasoning of answers: the marks between which models write their thoughts.

Guarantees: reasoning and content of an answer only grow while its text does, so
a stream has the parts of the whole answer; a text that may be the beginning of
a mark is held back. An answer that ends inside of its reasoning has no content.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.serve.api.tool_calls import (
  CHANNEL_MARKS,
  certain,
  channel_texts,
)


class Thoughts(NamedTuple):
  """Parts of an answer's text.

  Fields:
    reasoning: Text in which the model thinks, without its marks.
    content: Text after it.
    end: Number of characters of the answer up to the content.
  """

  reasoning: str
  content: str
  end: int = 0


class ReasoningFormat(NamedTuple):
  """Marks of the reasoning of a family of models.

  Fields:
    name: Name, a value of `--reasoning_parser`.
    aliases: Further names, those of vLLM and SGLang for the same marks.
    signs: Texts in a chat template, one of which shows the format.
    split: Function of an answer's text, of whether it has ended and of whether
      the prompt has opened the reasoning, which returns the parts.
    begin: Texts of the opening, one after another, for grammars.
    end: Texts of the end, one after another.
    direct: Texts before content that follows no reasoning.
  """

  name: str
  aliases: tuple[str, ...]
  signs: tuple[str, ...]
  split: Callable[[str, bool, bool], Thoughts]
  begin: tuple[str, ...]
  end: tuple[str, ...]
  direct: tuple[str, ...] = ()

  @property
  def marks(self) -> tuple[str, ...]:
    """Texts of the marks."""
    return self.begin + self.end + self.direct


# ---------------------------------------------------------------------------
# Formats
# ---------------------------------------------------------------------------


def _between(
  begins: Sequence[str],
  ends: Sequence[str],
  text: str,
  ended: bool,
  opened: bool,
) -> Thoughts:
  """Parts of a text whose reasoning is between two marks at its start.

  A model may repeat the mark with which the prompt ends.
  """
  body = text.lstrip()
  begin = next((mark for mark in begins if body.startswith(mark)), "")
  if not begin:
    if not ended and any(mark.startswith(body) for mark in begins):
      return Thoughts("", "")
    if not opened:
      return Thoughts("", text)
  thought = body[len(begin) :]
  places = [(at, mark) for mark in ends if (at := thought.find(mark)) >= 0]
  if not places:
    shown = thought if ended else certain(thought, ends)
    return Thoughts(shown.strip(), "", len(text))
  at, mark = min(places)
  content = thought[at + len(mark) :].lstrip()
  return Thoughts(thought[:at].strip(), content, len(text) - len(content))


def _channels(text: str, ended: bool, opened: bool) -> Thoughts:
  """Parts of a text in channels (GPT-OSS's Harmony)."""
  body = text.lstrip()
  if not body.startswith(CHANNEL_MARKS):
    may_begin = not ended and any(x.startswith(body) for x in CHANNEL_MARKS)
    return Thoughts("", "" if may_begin else text)
  parts = channel_texts(text if ended else certain(text, CHANNEL_MARKS))
  end = len(text) - len(parts.content)
  return Thoughts(parts.reasoning, parts.content, end)


def _tags(
  name: str,
  aliases: tuple[str, ...],
  begins: tuple[str, ...],
  ends: tuple[str, ...],
  signs: tuple[str, ...] = (),
) -> ReasoningFormat:
  """Format of reasoning between two marks, each of which has variants."""
  split = functools.partial(_between, begins, ends)
  signs = signs or begins + ends
  return ReasoningFormat(name, aliases, signs, split, begins[:1], ends[:1])


FORMATS = (
  ReasoningFormat(
    "gpt_oss",
    ("openai_gptoss", "gpt-oss"),
    ("<|channel|>",),
    _channels,
    ("<|channel|>", "analysis", "<|message|>"),
    (
      "<|end|>",
      "<|start|>",
      "assistant",
      "<|channel|>",
      "final",
      "<|message|>",
    ),
    ("<|channel|>", "final", "<|message|>"),
  ),
  _tags("mistral", ("magistral",), ("[THINK]",), ("[/THINK]",)),
  _tags("seed_oss", ("seed-oss",), ("<seed:think>",), ("</seed:think>",)),
  _tags(
    "granite",
    (),
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
  ),
  # DeepSeek R1 and V3.1, Qwen 3, GLM 4.5, MiniMax M2, Kimi K2, OLMo 3.
  _tags(
    "think",
    (
      "deepseek_r1",
      "deepseek-r1",
      "deepseek_v3",
      "qwen3",
      "glm45",
      "minimax_m2",
      "kimi_k2",
      "olmo3",
    ),
    ("<think>",),
    ("</think>",),
  ),
)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
  """Format of the reasoning of a model's answers, or None without one.

  Args:
    name: Name of a format, "auto" for that which the chat template shows, or
      "none".
    template: Source of the chat template, or "".

  Raises:
    OptionError: If no format has this name.
  """
  if name == "none":
    return None
  for form in FORMATS:
    if name in (form.name, *form.aliases):
      return form
    if name == "auto" and any(sign in template for sign in form.signs):
      return form
  if name == "auto":
    return None
  raise OptionError(
    "reasoning_parser",
    repr(name),
    f"auto, none or one of {', '.join(form.name for form in FORMATS)}",
    "pass one of these names",
  )


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


class Opening(enum.Enum):
  """State in which a prompt leaves the reasoning of its answer."""

  NONE = enum.auto()
  OPENED = enum.auto()
  # The prompt has empty reasoning: the answer begins with its content.
  CLOSED = enum.auto()


@dataclasses.dataclass(frozen=True)
class ReasoningReader:
  """Reads the reasoning of a prompt's answers.

  Attributes:
    form: Format of the reasoning.
    opening: State in which the prompt leaves the reasoning.
    shown: Whether the reasoning stays in the content, with its marks: it is
      only read to tell calls of tools from those that it mentions.
  """

  form: ReasoningFormat
  opening: Opening
  shown: bool = False

  @classmethod
  def of_prompt(
    cls, form: ReasoningFormat, prompt: str, *, shown: bool = False
  ) -> ReasoningReader:
    """Reader of the answers to a prompt.

    Args:
      form: Format of the reasoning.
      prompt: End of the prompt as text, with special tokens.
      shown: Whether the reasoning stays in the content.
    """
    prompt, opening = prompt.rstrip(), Opening.NONE
    if prompt.endswith("".join(form.begin)):
      opening = Opening.OPENED
    elif prompt.endswith("".join(form.end)):
      opening = Opening.CLOSED
    return cls(form, opening, shown)

  def read(self, text: str, ended: bool) -> Thoughts:
    """Parts of an answer's text so far.

    Args:
      text: The text, with marks that are special tokens.
      ended: Whether it is all of the text.
    """
    return self.form.split(text, ended, self.opening is Opening.OPENED)

  def grammar(self, answer: str, specials: Mapping[str, int]) -> str:
    """Grammar of answers whose content follows another grammar.

    The reasoning before it may be any text, and may be missing if the prompt
    does not open it.

    Args:
      answer: Grammar of the content, of llguidance in JSON.
      specials: Ids of the special tokens by their texts.
    """
    if self.opening is Opening.CLOSED:
      return answer
    form = self.form
    parts = lambda texts: " ".join(_lark(text, specials) for text in texts)
    if form.end[0] in specials:
      thought = f"text {parts(form.end)}"
      rules = ["text: /(?s:.*)/"]
    else:
      thought = " ".join(["until_end", parts(form.end[1:])])
      rules = [f"until_end[suffix={json_text(form.end[0])}]: /(?s:.*)/"]
    if self.opening is Opening.NONE:
      thought = f"{parts(form.begin)} {thought}"
    # In channels the content follows its mark at once.
    space = () if form.direct else ("space",)
    start = " ".join([thought, *space, "@answer"])
    if self.opening is Opening.NONE:
      start += f" | {parts(form.direct)} @answer"
    rules += [r"space: /[ \t\r\n]*/"] if space else []
    lines = [f"start: {start}", *rules]
    main = {"name": "main", "lark_grammar": "\n".join(lines)}
    (content,) = json.loads(answer)["grammars"]
    return json_text({"grammars": [main, {**content, "name": "answer"}]})


def _lark(text: str, specials: Mapping[str, int]) -> str:
  """A text as a term of a grammar: a special token, or its characters."""
  return f"<[{specials[text]}]>" if text in specials else json_text(text)
