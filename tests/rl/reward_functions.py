"""Reward functions for tests, at module level so that processes find them."""

from __future__ import annotations

import time
from typing import Any


def length(prompt: str, answer: str, example: object) -> float:
  del prompt, example
  return float(len(answer))


def as_example(prompt: str, answer: str, example: object) -> object:
  """The example itself, of whatever type."""
  del prompt, answer
  return example


def fails(prompt: str, answer: str, example: object) -> float:
  raise KeyError(answer)


def sleeps(prompt: str, answer: str, example: object) -> float:
  time.sleep(3.0)
  return 0.0


def exits(prompt: str, answer: str, example: object) -> float:
  raise SystemExit(answer)


def more(example: Any, answers: Any) -> list[dict[str, str]] | None:
  """A message after the first answers of a conversation."""
  if len(answers) == example["turns"]:
    return None
  return [{"role": "user", "content": "more"}]
