"""Reward functions of the configs in configs/posttraining."""

from __future__ import annotations

import re
from collections.abc import Mapping


def number_share(prompt: str, answer: str, example: Mapping[str, str]) -> float:
  """Reward of an answer: the right number's share of its characters, 0 to 1.

  1 for the number alone. Answers of one group seldom have equal rewards, so
  that the group is learned from; with one reward for each answer that has the
  number somewhere it is not.

  Args:
    prompt: Text of the prompt.
    answer: Text of the answer, of which the last number counts.
    example: Line of the questions, with the number as "answer".
  """
  del prompt
  numbers = re.findall(r"\d+", answer)
  if not numbers or numbers[-1] != example["answer"]:
    return 0.0
  return len(example["answer"]) / len(answer.strip())
