"""A model behind an OpenAI-compatible address that judges answers.

Guarantees: a score comes from a reply that has all numbers in their ranges;
anything else is asked again and then an error, never a score of 0.
Cost: a chat for each criterion of an answer, one after another.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringjax.checks import positive_int
from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import json_text

# Statuses of a server that is busy or starting.
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 60.0
_OBJECT = re.compile(r"\{[^{}]*\}")


class JudgeError(RingjaxError, RuntimeError):
  """A judge that did not answer, or whose replies have no valid numbers."""


class JudgeQuestion(NamedTuple):
  """A prompt for a judge, and the numbers that its reply has to contain.

  Attributes:
    prompt: Text of the user's message.
    highest: Highest value of each number, by its name in the reply: a number,
      the name of another number of the reply, or None for any.
  """

  prompt: str
  highest: Mapping[str, int | str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerJudge:
  """A model that judges answers.

  Attributes:
    address: Base address of the API, as "http://127.0.0.1:8000/v1".
    model: Name of the model there.
    key: API key; default: $OPENAI_API_KEY, and none where that is not set.
    temperature: Temperature of its replies.
    max_tokens: Maximum tokens of a reply, with its reasoning.
    attempts: Number of attempts at a reply.
    pause_s: Seconds after the first failure, which double with each, or are as
      many as the server asks for.
    timeout_s: Seconds that a reply may take.
  """

  address: str
  model: str
  key: str | None = dataclasses.field(default=None, repr=False)
  temperature: float = 0.1
  max_tokens: int = 4096
  attempts: int = 5
  pause_s: float = 2.0
  timeout_s: float = 600.0

  def __post_init__(self) -> None:
    """Checks the options.

    Raises:
      OptionError: If the address is not of HTTP or the model is empty.
    """
    if not re.match(r"https?://[^/\s]", self.address):
      raise OptionError(
        "address of the judge",
        repr(self.address),
        "http:// or https://, a host, and usually /v1",
        "pass --judge=http://127.0.0.1:8000/v1, for instance",
      )
    if not self.model:
      raise OptionError(
        "model of the judge",
        "none",
        "the name of a model that the judge's server has",
        "pass --judge_model=NAME",
      )
    positive_int("max_tokens of the judge", self.max_tokens)
    positive_int("attempts of the judge", self.attempts)

  def numbers(
    self, question: JudgeQuestion, subject: str
  ) -> tuple[dict[str, float], str]:
    """Asks for the numbers of one criterion.

    Args:
      question: Prompt and numbers.
      subject: Name of what is judged, for errors.

    Returns:
      Numbers by name, and the reply that they are from.

    Raises:
      JudgeError: If no attempt brings a reply with these numbers.
    """
    pause, failure = self.pause_s, ""
    for attempt in range(self.attempts):
      if attempt:
        time.sleep(min(pause, _LONGEST_PAUSE_S))
        pause *= 2
      try:
        reply = self._reply(question.prompt)
      except urllib.error.HTTPError as error:
        with error:
          failure = f"status {error.code}, {_words_of(error)}"
          if error.code not in _BUSY:
            break
          seconds = error.headers.get("Retry-After", "")
          pause = max(pause, float(seconds)) if seconds.isdecimal() else pause
      # No connection, or one that was cut.
      except (OSError, http.client.HTTPException) as error:
        failure = f"{type(error).__name__}: {error}"
      except (ValueError, LookupError, TypeError):
        failure = "a body that is no chat completion"
      else:
        numbers = numbers_of(reply, question.highest)
        if numbers is not None:
          return numbers, reply
        failure = f"the reply {reply[-80:]!r}"
    raise JudgeError(
      f"judge of {subject}",
      failure,
      f"a reply with {', '.join(question.highest)} in their ranges",
      f"check {self.address} and {self.model}, and run it again: "
      "judged answers stay",
    )

  def _reply(self, prompt: str) -> str:
    key = os.environ.get("OPENAI_API_KEY") if self.key is None else self.key
    body = {
      "model": self.model,
      "messages": [{"role": "user", "content": prompt}],
      "temperature": self.temperature,
      "max_completion_tokens": self.max_tokens,
    }
    request = urllib.request.Request(
      f"{self.address.rstrip('/')}/chat/completions",
      json_text(body).encode(),
      {"Content-Type": "application/json"}
      | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
      reply = json.loads(response.read())
    content = reply["choices"][0]["message"]["content"]
    # A reply that its reasoning has filled has no content.
    return content if isinstance(content, str) else ""


def numbers_of(
  reply: str, highest: Mapping[str, int | str | None]
) -> dict[str, float] | None:
  """Numbers of the last JSON object of a reply; None if they do not fit.

  Args:
    reply: Text of a judge.
    highest: Highest values, see `JudgeQuestion`.
  """
  objects = _OBJECT.findall(reply)
  try:
    values: Any = json.loads(objects[-1])
  except (IndexError, ValueError, RecursionError):
    return None
  numbers: dict[str, float] = {}
  for name in highest:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
      return None
    try:
      numbers[name] = float(value)
    except OverflowError:
      return None
  for name, bound in highest.items():
    limit = numbers[bound] if isinstance(bound, str) else bound
    if not 0 <= numbers[name] <= (math.inf if limit is None else limit):
      return None
    if not math.isfinite(numbers[name]):
      return None
  return numbers


def _words_of(error: urllib.error.HTTPError) -> str:
  """The message in the body of an error."""
  try:
    return f"{json.loads(error.read())['error']['message']}"[:200]
  except (OSError, ValueError, LookupError, TypeError):
    return f"{error.reason}"
