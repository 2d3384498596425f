"""More texts that teach a model to look back: sources of a `Loader`.

Guarantees: those of `ringjax.data.recall.Recall`.

Values, Chains and Links hide lines in a text and ask about several of them at
its end; Quotes and Records repeat passages of it. Lines, questions and answers
of Values and Chains are those of MultiValue and VariableTracking in
`ringjax.data.needle`, which measure what these teach.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ringjax.checks import positive_int
from ringjax.data.needle import (
  NEEDLE,
  MultiValue,
  VariableTracking,
)
from ringjax.data.recall import RECALLED, TEXT, Recall, number_of
from ringjax.data.special_tokens import joined

# A line of one of the documents of Links, the question and the answer; the
# line of the other one is `ringjax.data.needle.NEEDLE`.
KEEPER = "# The keeper of {name} is {keeper}.\n"
KEEPER_QUESTION = (
  "\n# Question: What is the passkey for the keeper of {name}?\n# Answer:"
)
# What the documents determine is by itself.
KEEPER_ANSWER = (
  " The keeper of {name} is ",
  "{keeper}",
  ". The passkey for ",
  "{keeper}",
  " is ",
  "{number}",
  ".\n",
)
HEADING = "# ==== Document {number} ====\n"
# A quoted passage, and the question for it.
PASSAGE = "# Passage {name}:\n{text}# End of passage {name}.\n"
PASSAGE_QUESTION = "\n# Question: What does passage {name} say?\n# Answer:\n"

# A part of a text: its ids, and the kind or kinds of its tokens.
Part = tuple[np.ndarray, Any]
# Share of a record's values that are words of the text.
_WORDS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden(Recall):
  """Base of sources that hide lines in a text and ask about some of them.

  Attributes:
    facts: the most groups of lines that there are.
    questions: the most that are asked.
  """

  facts: int = 4
  questions: int = 2

  def __post_init__(self) -> None:
    positive_int("questions", self.questions)
    positive_int("facts", self.facts)
    super().__post_init__()

  @property
  def _least(self) -> int:
    return 64 + self.facts * self._group_size + self.questions * self._ask_size

  @property
  def _group_size(self) -> int:
    """The most bytes of a group's lines."""
    raise NotImplementedError

  @property
  def _ask_size(self) -> int:
    """The most bytes of a question and its answer."""
    raise NotImplementedError

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    """Lines of each group, and the question about them with its answer."""
    raise NotImplementedError

  def _parts(self, rng: np.random.Generator) -> list[Part]:
    count = int(rng.integers(1, self.facts + 1))
    asked = int(rng.integers(1, min(count, self.questions) + 1))
    groups = self._groups(rng, count)
    tail: list[Part] = []
    for i in rng.permutation(count)[:asked]:
      tail += groups[i][1]
    room = self.length - len(self._begin()) - sum(len(ids) for ids, _ in tail)
    hidden = [[self._ids(line) for line in lines] for lines, _ in groups]
    return [(self._body(rng, room, hidden), TEXT), *tail]

  def _body(
    self, rng: np.random.Generator, room: int, groups: list[list[np.ndarray]]
  ) -> np.ndarray:
    """A text of `room` tokens with the groups' lines at random places."""
    needles = []
    for lines in groups:
      # A group keeps its order.
      places = np.sort(rng.random(len(lines))).tolist()
      needles += list(zip(places, lines, strict=True))
    room -= sum(len(line) for _, line in needles)
    text = self._lines(rng, room)
    found: list[np.ndarray] = []
    at = 0
    for place, line in sorted(needles, key=lambda needle: needle[0]):
      here = int(place * (len(text) + 1))
      found += [*text[at:here], line]
      at = here
    return joined([*found, *text[at:]])

  def _answered(self, *texts: tuple[str, int]) -> list[Part]:
    """Texts of kinds, and the id that ends a text."""
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    return [*((self._ids(t), kind) for t, kind in texts), (end, RECALLED)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values(Hidden):
  """Names with several numbers each; all numbers of some are asked for.

  Attributes:
    facts: the most names.
    values: the most numbers of a name.
  """

  values: int = 4

  def __post_init__(self) -> None:
    positive_int("values", self.values)
    super().__post_init__()

  @property
  def _group_size(self) -> int:
    return 48 * self.values

  @property
  def _ask_size(self) -> int:
    return 108 + 8 * self.values

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    found = []
    for name in self._names(rng, count):
      each = int(rng.integers(1, self.values + 1))
      values = list(dict.fromkeys(number_of(rng) for _ in range(each)))
      before, after = MultiValue.answer.split("{number}")
      parts = self._answered(
        (MultiValue.question.format(name=name), TEXT),
        (before.format(name=name), TEXT),
        (", ".join(values) + after, RECALLED),
      )
      lines = [NEEDLE.format(name=name, number=value) for value in values]
      found.append((lines, parts))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains(Hidden):
  """Chains of assignments; the variables of some values are asked for.

  Attributes:
    facts: the most chains, each with a value.
    hops: the most assignments from a variable in a chain.
  """

  hops: int = 4

  def __post_init__(self) -> None:
    positive_int("hops", self.hops)
    super().__post_init__()

  @property
  def _group_size(self) -> int:
    return 20 * (self.hops + 1)

  @property
  def _ask_size(self) -> int:
    return 128 + 7 * (self.hops + 1)

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    found = []
    needle = VariableTracking.needle
    before, after = VariableTracking.answer.split("{name}")
    for _ in range(count):
      each = int(rng.integers(1, self.hops + 1)) + 1
      letters = rng.integers(26, size=(each, 5)) + ord("A")
      chain = ["".join(map(chr, row)) for row in letters.tolist()]
      value = number_of(rng)
      lines = [
        needle.format(name=name, number=of)
        for name, of in zip(chain, [value, *chain[:-1]], strict=True)
      ]
      parts = self._answered(
        (VariableTracking.question.format(number=value), TEXT),
        (before, TEXT),
        (", ".join(chain) + after, RECALLED),
      )
      found.append((lines, parts))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(Hidden):
  """Two documents; each question needs a line of both.

  One document names the keeper of a name, the other the keeper's number. Their
  order is random. The answer states both.

  Attributes:
    facts: the most names.
  """

  @property
  def _group_size(self) -> int:
    return 100

  @property
  def _ask_size(self) -> int:
    return 192

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    everyone = self._names(rng, 2 * count)
    found = []
    for name, keeper in zip(everyone[:count], everyone[count:], strict=True):
      fact = {"name": name, "keeper": keeper, "number": number_of(rng)}
      lines = [
        KEEPER.format(**fact),
        NEEDLE.format(name=keeper, number=fact["number"]),
      ]
      texts = [
        (text.format(**fact), RECALLED if text.startswith("{") else TEXT)
        for text in KEEPER_ANSWER
      ]
      question = (KEEPER_QUESTION.format(**fact), TEXT)
      found.append((lines, self._answered(question, *texts)))
    return found

  def _body(
    self, rng: np.random.Generator, room: int, groups: list[list[np.ndarray]]
  ) -> np.ndarray:
    """Two documents, the one with the first lines of groups, and the other."""
    headings = [self._ids(HEADING.format(number=i)) for i in (1, 2)]
    bare = room - sum(map(len, headings))
    bare -= sum(len(line) for lines in groups for line in lines)
    share = int(bare * rng.uniform(0.3, 0.7))
    found = []
    for heading, which, each in zip(
      headings, rng.permutation(2), (share, bare - share), strict=True
    ):
      lines = [[lines[which]] for lines in groups]
      each += sum(len(line) for (line,) in lines)
      found += [heading, super()._body(rng, each, lines)]
    return joined(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quotes(Hidden):
  """Passages of the text with a name each; some are to be repeated.

  Attributes:
    facts: the most passages.
    longest: tokens of the longest passage.
  """

  longest: int = 160

  def __post_init__(self) -> None:
    positive_int("longest", self.longest)
    super().__post_init__()

  @property
  def _group_size(self) -> int:
    return 60 + self.longest

  @property
  def _ask_size(self) -> int:
    return 64 + self.longest

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    found = []
    for name in self._names(rng, count):
      most = int(rng.integers(self.longest // 4, self.longest + 1))
      text = ""
      for line in self.filler.lines(rng):
        # A line alone may be too long.
        line = line[-most:]
        if text and len(self._ids(text + line)) > most:
          break
        text += line
      passage = PASSAGE.format(name=name, text=text)
      question = PASSAGE_QUESTION.format(name=name)
      parts = self._answered((question, TEXT), (text, RECALLED))
      found.append(([passage], parts))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records(Recall):
  """Records after the same preamble and with the same fields each.

  As prompts of a template: the preamble, some lines of the text, stands before
  each record. Then comes text, and some of the records again, in another order.

  Attributes:
    fields: the most fields of a record.
    preamble: tokens of the longest preamble.
  """

  fields: int = 4
  preamble: int = 200

  def __post_init__(self) -> None:
    positive_int("fields", self.fields)
    positive_int("preamble", self.preamble)
    super().__post_init__()

  @property
  def _least(self) -> int:
    return 3 * (self.preamble + 40 + 32 * self.fields)

  def _parts(self, rng: np.random.Generator) -> list[Part]:
    room = self.length - len(self._begin())
    words = self._words(rng)
    fields: dict[str, None] = {}
    for _ in range(int(rng.integers(1, self.fields + 1))):
      fields.setdefault(next(words))
    least = min(40, self.preamble - 1)
    preamble = joined(self._lines(rng, int(rng.integers(least, self.preamble))))
    records: list[tuple[list[str], list[str]]] = []
    # No more than these have room.
    for name in self._names(rng, max(1, room // 160)):
      values = [
        next(words) if rng.random() < _WORDS else number_of(rng) for _ in fields
      ]
      keys = [f"\nname: {name}\n{next(iter(fields))}: "]
      keys += [f"\n{field}: " for field in list(fields)[1:]]
      size = len(preamble) + 1
      size += sum(len(self._ids(text)) for text in (*keys, *values))
      if 2 * size > room:
        break
      room -= 2 * size
      records.append((keys, values))
    first, again = [], []
    for i in rng.permutation(len(records)):
      record = [(preamble, TEXT)]
      for key, value in zip(*records[i], strict=True):
        record += [(self._ids(key), TEXT), (self._ids(value), RECALLED)]
      again += [*record, (self._ids("\n"), TEXT)]
    for keys, values in records:
      record = "".join(
        part for pair in zip(keys, values, strict=True) for part in pair
      )
      first += [(preamble, TEXT), (self._ids(f"{record}\n"), TEXT)]
    return [*first, (joined(self._lines(rng, room)), TEXT), *again]
