"""Further texts that train retrieval: sources of a `Loader`.

Guarantees: those of `ringjax.data.tasks.recall.Recall`.

Values, Chains and Links hide lines in a text and ask about several of them at
its end; Quotes and Records repeat passages of it. Lines, questions and answers
of Values and Chains are those of MultiValue and VariableTracking in
`ringjax.data.tasks.needle`, which measure what these teach.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ringjax.checks import positive_int
from ringjax.data.tasks.needle import (
  NEEDLE,
  MultiValue,
  VariableTracking,
)
from ringjax.data.tasks.recall import RECALLED, TEXT, Recall, number_of
from ringjax.data.text.special_tokens import joined

# A line of one of the documents of Links, the question and the answer; the
# line of the other document is `ringjax.data.tasks.needle.NEEDLE`.
KEEPER = "# The keeper of {name} is {keeper}.\n"
KEEPER_QUESTION = (
  "\n# Question: What is the passkey for the keeper of {name}?\n# Answer:"
)
# The parts that the documents determine are separate strings.
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
# Fraction of a record's values that are words of the text.
_WORDS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden(Recall):
  """Base of sources that hide lines in a text and ask about some of them.

  Attributes:
    facts: Largest number of groups of lines.
    questions: Largest number of questions.
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
    """Largest size of a group's lines in bytes."""
    raise NotImplementedError

  @property
  def _ask_size(self) -> int:
    """Largest size of a question and its answer in bytes."""
    raise NotImplementedError

  def _groups(
    self, rng: np.random.Generator, count: int
  ) -> list[tuple[list[str], list[Part]]]:
    """Lines of each group, and the question about them with its answer."""
    raise NotImplementedError

  def _parts(self, rng: np.random.Generator) -> list[Part]:
    count = int(rng.integers(1, self.facts + 1))
    num_asked = int(rng.integers(1, min(count, self.questions) + 1))
    groups = self._groups(rng, count)
    tail: list[Part] = []
    for i in rng.permutation(count)[:num_asked]:
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
    pieces: list[np.ndarray] = []
    start = 0
    for place, line in sorted(needles, key=lambda needle: needle[0]):
      cut = int(place * (len(text) + 1))
      pieces += [*text[start:cut], line]
      start = cut
    return joined([*pieces, *text[start:]])

  def _answered(self, *texts: tuple[str, int]) -> list[Part]:
    """Parts of the given texts and kinds, and the id that ends a text."""
    end = np.array(self.tokenizer.eos_ids[:1], np.int32)
    return [*((self._ids(t), kind) for t, kind in texts), (end, RECALLED)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values(Hidden):
  """Names with several numbers each; all numbers of some are asked for.

  Attributes:
    facts: Largest number of names.
    values: Largest number of values of a name.
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
    groups = []
    for name in self._names(rng, count):
      num_values = int(rng.integers(1, self.values + 1))
      values = list(dict.fromkeys(number_of(rng) for _ in range(num_values)))
      answer_start, answer_end = MultiValue.answer.split("{number}")
      parts = self._answered(
        (MultiValue.question.format(name=name), TEXT),
        (answer_start.format(name=name), TEXT),
        (", ".join(values) + answer_end, RECALLED),
      )
      lines = [NEEDLE.format(name=name, number=value) for value in values]
      groups.append((lines, parts))
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains(Hidden):
  """Chains of assignments; the variables of some values are asked for.

  Attributes:
    facts: Largest number of chains, each with a value.
    hops: Largest number of assignments from a variable in a chain.
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
    groups = []
    needle = VariableTracking.needle
    answer_start, answer_end = VariableTracking.answer.split("{name}")
    for _ in range(count):
      num_variables = int(rng.integers(1, self.hops + 1)) + 1
      letters = rng.integers(26, size=(num_variables, 5)) + ord("A")
      chain = ["".join(map(chr, row)) for row in letters.tolist()]
      value = number_of(rng)
      lines = [
        needle.format(name=name, number=value_of_name)
        for name, value_of_name in zip(chain, [value, *chain[:-1]], strict=True)
      ]
      parts = self._answered(
        (VariableTracking.question.format(number=value), TEXT),
        (answer_start, TEXT),
        (", ".join(chain) + answer_end, RECALLED),
      )
      groups.append((lines, parts))
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links(Hidden):
  """Two documents; each question needs a line of both.

  One document names the keeper of a name, the other the keeper's number. Their
  order is random. The answer states both.

  Attributes:
    facts: Largest number of names.
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
    all_names = self._names(rng, 2 * count)
    groups = []
    for name, keeper in zip(all_names[:count], all_names[count:], strict=True):
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
      groups.append((lines, self._answered(question, *texts)))
    return groups

  def _body(
    self, rng: np.random.Generator, room: int, groups: list[list[np.ndarray]]
  ) -> np.ndarray:
    """Two documents, with the first and the second lines of the groups."""
    headings = [self._ids(HEADING.format(number=i)) for i in (1, 2)]
    body_room = room - sum(map(len, headings))
    body_room -= sum(len(line) for lines in groups for line in lines)
    share = int(body_room * rng.uniform(0.3, 0.7))
    documents = []
    for heading, side, body_length in zip(
      headings, rng.permutation(2), (share, body_room - share), strict=True
    ):
      lines = [[lines[side]] for lines in groups]
      body_length += sum(len(line) for (line,) in lines)
      documents += [heading, super()._body(rng, body_length, lines)]
    return joined(documents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quotes(Hidden):
  """Passages of the text with a name each; some are to be repeated.

  Attributes:
    facts: Largest number of passages.
    longest: Tokens of the longest passage.
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
    groups = []
    for name in self._names(rng, count):
      longest = int(rng.integers(self.longest // 4, self.longest + 1))
      text = ""
      for line in self.filler.lines(rng):
        # A line alone may be too long.
        line = line[-longest:]
        if text and len(self._ids(text + line)) > longest:
          break
        text += line
      passage = PASSAGE.format(name=name, text=text)
      question = PASSAGE_QUESTION.format(name=name)
      parts = self._answered((question, TEXT), (text, RECALLED))
      groups.append(([passage], parts))
    return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records(Recall):
  """Records after the same preamble and with the same fields each.

  As in prompts of a template, the preamble, some lines of the text, stands
  before each record. Then comes text, and some of the records again, in another
  order.

  Attributes:
    fields: Largest number of fields of a record.
    preamble: Tokens of the longest preamble.
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
    shortest = min(40, self.preamble - 1)
    preamble = joined(
      self._lines(rng, int(rng.integers(shortest, self.preamble)))
    )
    records: list[tuple[list[str], list[str]]] = []
    # More records than these have no room.
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
    first, repeated = [], []
    for i in rng.permutation(len(records)):
      record = [(preamble, TEXT)]
      for key, value in zip(*records[i], strict=True):
        record += [(self._ids(key), TEXT), (self._ids(value), RECALLED)]
      repeated += [*record, (self._ids("\n"), TEXT)]
    for keys, values in records:
      record = "".join(
        part for pair in zip(keys, values, strict=True) for part in pair
      )
      first += [(preamble, TEXT), (self._ids(f"{record}\n"), TEXT)]
    return [*first, (joined(self._lines(rng, room)), TEXT), *repeated]
