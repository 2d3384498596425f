"""Requests of other people's services, to replay: when they came, how long.

Files of three kinds are read: Azure's (csv: TIMESTAMP, ContextTokens,
GeneratedTokens), BurstGPT's (csv: Timestamp in s, Request tokens, Response
tokens and others; requests that failed have no response and are left out) and
Mooncake's (jsonl: timestamp in ms, input_length, output_length, hash_ids). An
id of Mooncake's names a whole prefix in blocks of 512 tokens, so that requests
share what they shared. Or arrivals are made up.
Ref: Patel et al. 2024, Splitwise (ISCA), arXiv 2311.18677; Qin et al. 2025,
Mooncake (FAST), arXiv 2407.00079; Wang et al. 2024, BurstGPT, arXiv 2401.17644.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError

_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
  """A request of a trace.

  Attributes:
    arrival: seconds from the first one.
    prompt_tokens: of its prompt.
    new_tokens: of its answer.
    number: its number; prompts without blocks share nothing.
    blocks: ids of the prompt's blocks.
    block: tokens of a block.
    cached: (name, tokens) of the instances of a cluster that had some of the
      prompt when it came, where a router has looked.
  """

  arrival: float
  prompt_tokens: int
  new_tokens: int
  number: int = 0
  blocks: tuple[int, ...] = ()
  block: int = _BLOCK
  cached: tuple[tuple[str, int], ...] = ()

  def prompt(self, vocab: int | None = None) -> np.ndarray:
    """Tokens that are alike where the requests' were, int32 [n].

    Args:
      vocab: ids that a model has; None for any numbers, which is faster.
    """
    blocks = self.blocks or (-1 - self.number,)
    size = self.block if self.blocks else self.prompt_tokens
    if vocab is None:
      # The block's number at all of its places: it is compared, not read.
      found = np.repeat(np.asarray(blocks, np.int32), size)
    else:
      draw = lambda n: np.random.default_rng(n % 2**63).integers(0, vocab, size)
      found = np.concatenate([draw(n) for n in blocks]).astype(np.int32)
    return found[: self.prompt_tokens]

  def shrunk(self, factor: int) -> TraceRequest:
    """With `factor` times fewer tokens, for a small model."""
    less = lambda n: -(-n // factor)
    block = max(1, self.block // factor)
    prompt = less(self.prompt_tokens)
    if self.blocks:
      prompt = min(prompt, block * len(self.blocks))
    return dataclasses.replace(
      self,
      prompt_tokens=prompt,
      new_tokens=less(self.new_tokens),
      block=block,
      cached=tuple((x, n // self.block * block) for x, n in self.cached),
    )


def first_prefixes(
  requests: Iterable[TraceRequest],
) -> dict[str, dict[int, int]]:
  """What instances had of prompts before the first of these requests.

  Of each block the first request counts that asks for it: later ones may find
  what that one has left.

  Args:
    requests: in the order of their arrival, with `cached`.

  Returns:
    By instance, the tokens of each block.
  """
  found: dict[str, dict[int, int]] = {}
  asked: set[int] = set()
  for one in requests:
    for name, tokens in one.cached:
      had = found.setdefault(name, {})
      for block in one.blocks[: tokens // one.block]:
        if block not in asked:
          had[block] = one.block
    asked.update(one.blocks)
  return found


def read_trace(path: str | os.PathLike[str]) -> list[TraceRequest]:
  """The requests of a file, in the order of their arrival.

  Args:
    path: Azure's or BurstGPT's .csv, or Mooncake's .jsonl.

  Raises:
    OptionError: it cannot be read, or a line is not of the format.
  """
  kinds = {".csv": _table, ".jsonl": _mooncake}
  file = pathlib.Path(path)
  if file.suffix not in kinds:
    raise OptionError(
      "trace",
      file.name,
      f"a name that ends in {' or '.join(kinds)}",
      "pass a trace of Azure's or BurstGPT's (csv) or Mooncake's (jsonl)",
    )
  try:
    lines = file.read_text("utf-8").splitlines()
  except (OSError, ValueError) as error:
    raise OptionError("trace", error, "a text file", "pass its path") from None
  found = kinds[file.suffix](file.name, lines)
  if not found:
    raise OptionError("trace", f"{file.name}, empty", "requests", "pass others")
  found.sort(key=lambda r: r.arrival)
  start = found[0].arrival
  return [
    dataclasses.replace(r, arrival=r.arrival - start, number=n)
    for n, r in enumerate(found)
  ]


def _wrong(name: str, line: int, want: str) -> OptionError:
  return OptionError(
    "trace", f"line {line} of {name}", want, "pass a trace of that format"
  )


def _table(name: str, lines: list[str]) -> list[TraceRequest]:
  burst = bool(lines) and "Request tokens" in lines[0]
  return (_burstgpt if burst else _azure)(name, lines)


def _burstgpt(name: str, lines: list[str]) -> list[TraceRequest]:
  found = []
  for n, row in enumerate(csv.DictReader(lines), 2):
    try:
      when = number("time", float(row["Timestamp"]), least=0)
      prompt = integer("tokens", int(row["Request tokens"]), least=0)
      answer = integer("tokens", int(row["Response tokens"]), least=0)
    except (KeyError, TypeError, ValueError):
      raise _wrong(
        name, n, "Timestamp, Request tokens and Response tokens"
      ) from None
    if prompt and answer:
      found.append(
        TraceRequest(
          arrival=float(when), prompt_tokens=prompt, new_tokens=answer
        )
      )
  return found


def _azure(name: str, lines: list[str]) -> list[TraceRequest]:
  found = []
  for n, row in enumerate(csv.DictReader(lines), 2):
    try:
      when = datetime.datetime.fromisoformat(row["TIMESTAMP"])
      found.append(
        TraceRequest(
          arrival=when.replace(tzinfo=datetime.UTC).timestamp(),
          prompt_tokens=positive_int("tokens", int(row["ContextTokens"])),
          new_tokens=positive_int("tokens", int(row["GeneratedTokens"])),
        )
      )
    except (KeyError, TypeError, ValueError):
      raise _wrong(
        name, n, "TIMESTAMP, ContextTokens and GeneratedTokens"
      ) from None
  return found


def _mooncake(name: str, lines: list[str]) -> list[TraceRequest]:
  found = []
  for n, line in enumerate(lines, 1):
    want = "timestamp, input_length, output_length and all hash_ids"
    try:
      row: dict[str, Any] = json.loads(line)
      tokens = positive_int("tokens", row["input_length"])
      blocks = tuple(integer("id", i, least=0) for i in row["hash_ids"])
      if len(blocks) != -(-tokens // _BLOCK):
        raise ValueError(f"{len(blocks)} blocks")
      found.append(
        TraceRequest(
          arrival=number("timestamp", row["timestamp"], least=0) / 1000,
          prompt_tokens=tokens,
          new_tokens=positive_int("tokens", row["output_length"]),
          blocks=blocks,
        )
      )
    except (KeyError, TypeError, ValueError):
      raise _wrong(name, n, want) from None
  return found


def poisson_trace(
  *,
  rate: int | float,
  requests: int,
  prompt_tokens: int,
  new_tokens: int,
  shared_tokens: int = 0,
  spread: int | float = 0.5,
  seed: int = 0,
) -> list[TraceRequest]:
  """Requests that come independently of each other.

  Args:
    rate: requests a second; math.inf for all at once.
    requests: how many.
    prompt_tokens: of a prompt, on average.
    new_tokens: of an answer, on average.
    shared_tokens: that all prompts begin with, beside their own.
    spread: standard deviation of the logs of lengths, which are log-normal; 0
      for equal lengths.
    seed: random seed.

  Raises:
    OptionError: a value is out of its range.
  """
  positive_int("requests", requests)
  number("spread", spread, least=0)
  if rate != math.inf:
    number("rate", rate, above=0)
  integer("shared_tokens", shared_tokens, least=0)
  rng = np.random.default_rng(seed)

  def lengths(name: str, mean: int) -> np.ndarray:
    middle = math.log(positive_int(name, mean)) - spread**2 / 2
    drawn = rng.lognormal(middle, spread, requests)
    return np.maximum(1, np.round(drawn)).astype(int)

  gaps = np.zeros(requests)
  if rate != math.inf:
    gaps = rng.exponential(1 / rate, requests)
    gaps[0] = 0
  times = np.cumsum(gaps)
  prompts = lengths("prompt_tokens", prompt_tokens)
  answers = lengths("new_tokens", new_tokens)
  # With a common block each prompt is made of blocks, of which the others are
  # its own.
  block = shared_tokens or _BLOCK
  found = []
  for n in range(requests):
    own = -(-int(prompts[n]) // block)
    ids = (0, *((n + 1) * 2**12 + i for i in range(own)))
    found.append(
      TraceRequest(
        arrival=float(times[n]),
        prompt_tokens=int(prompts[n]) + shared_tokens,
        new_tokens=int(answers[n]),
        number=n,
        blocks=ids if shared_tokens else (),
        block=block,
      )
    )
  return found
