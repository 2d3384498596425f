"""Reward functions of the configs in configs/posttraining."""

from __future__ import annotations

import re
from collections.abc import Mapping


def number_alone(prompt: str, answer: str, example: Mapping[str, str]) -> float:
  """Reward of an answer to a sum: 0.5 for the right number, 1 for it alone.

  Args:
    prompt: Text of the prompt.
    answer: Text of the answer, of which the last number counts.
    example: Line of the questions, with the number as "answer".
  """
  del prompt
  numbers = re.findall(r"\d+", answer)
  if not numbers or numbers[-1] != example["answer"]:
    return 0.0
  return 1.0 if answer.strip() == example["answer"] else 0.5
