"""Request traces of other services, to replay: arrivals and lengths.

Files of three kinds are read: Azure's (csv: TIMESTAMP, ContextTokens,
GeneratedTokens), BurstGPT's (csv: Timestamp in s, Request tokens, Response
tokens and others; requests that failed have no response and are left out) and
Mooncake's (jsonl: timestamp in ms, input_length, output_length, hash_ids). An
id of Mooncake's stands for a whole prefix in blocks of 512 tokens, so that
requests share the same prefixes as in the trace. `poisson_trace` generates
arrivals.
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
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.checks import integer, number, positive_int
from ringjax.errors import OptionError, StorageError
from ringjax.paths import as_path

_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
  """A request of a trace.

  Attributes:
    arrival: Arrival in seconds after the first request.
    prompt_tokens: Number of tokens of its prompt.
    new_tokens: Number of tokens of its answer.
    number: Number of the request, from which a prompt without blocks is drawn.
    blocks: Ids of the prompt's blocks.
    block: Number of tokens of a block.
    cached: Pairs (name, tokens) of cluster instances that had a part of the
      prompt when it came, if a router recorded them.
  """

  arrival: float
  prompt_tokens: int
  new_tokens: int
  number: int = 0
  blocks: tuple[int, ...] = ()
  block: int = _BLOCK
  cached: tuple[tuple[str, int], ...] = ()

  def prompt(self, vocab: int | None = None) -> Int[np.ndarray, " n"]:
    """Token ids, equal where the traced prompts were equal, int32 [n].

    Args:
      vocab: Number of token ids of a model; None for arbitrary numbers, which
        is faster.
    """
    blocks = self.blocks or (-1 - self.number,)
    size = self.block if self.blocks else self.prompt_tokens
    if vocab is None:
      # Repeat the block's number: such tokens are only compared.
      tokens = np.repeat(np.asarray(blocks, np.int32), size)
    else:
      draw = lambda n: np.random.default_rng(n % 2**63).integers(0, vocab, size)
      tokens = np.concatenate([draw(n) for n in blocks]).astype(np.int32)
    return tokens[: self.prompt_tokens]

  def shrunk(self, factor: int) -> TraceRequest:
    """Request with `factor` times fewer tokens, for a small model."""
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
  """Prefixes that instances had cached before the first of these requests.

  Only the first request for each block counts: later ones may find what that
  one computed.

  Args:
    requests: Requests in the order of their arrival, with `cached`.

  Returns:
    Number of tokens of each cached block, by instance.
  """
  prefixes: dict[str, dict[int, int]] = {}
  seen_blocks: set[int] = set()
  for request in requests:
    for name, tokens in request.cached:
      had = prefixes.setdefault(name, {})
      for block in request.blocks[: tokens // request.block]:
        if block not in seen_blocks:
          had[block] = request.block
    seen_blocks.update(request.blocks)
  return prefixes


def read_trace(path: str | os.PathLike[str]) -> list[TraceRequest]:
  """Read the requests of a file, in the order of their arrival.

  Args:
    path: Azure's or BurstGPT's .csv, or Mooncake's .jsonl; also an address.

  Raises:
    OptionError: If the file cannot be read, or a line has another format.
    StorageError: If the storage of an address does not answer.
  """
  kinds = {".csv": _table, ".jsonl": _mooncake}
  file = as_path(path, "trace")
  if file.suffix not in kinds:
    raise OptionError(
      "trace",
      file.name,
      f"a name that ends in {' or '.join(kinds)}",
      "pass a trace of Azure's or BurstGPT's (csv) or Mooncake's (jsonl)",
    )
  try:
    lines = file.read_text("utf-8").splitlines()
  except StorageError:
    raise
  except (OSError, ValueError) as error:
    raise OptionError("trace", error, "a text file", "pass its path") from None
  requests = kinds[file.suffix](file.name, lines)
  if not requests:
    raise OptionError("trace", f"{file.name}, empty", "requests", "pass others")
  requests.sort(key=lambda r: r.arrival)
  start = requests[0].arrival
  return [
    dataclasses.replace(r, arrival=r.arrival - start, number=n)
    for n, r in enumerate(requests)
  ]


def _wrong(name: str, line: int, want: str) -> OptionError:
  return OptionError(
    "trace", f"line {line} of {name}", want, "pass a trace of that format"
  )


def _table(name: str, lines: list[str]) -> list[TraceRequest]:
  burst = bool(lines) and "Request tokens" in lines[0]
  return (_burstgpt if burst else _azure)(name, lines)


def _burstgpt(name: str, lines: list[str]) -> list[TraceRequest]:
  requests = []
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
      requests.append(
        TraceRequest(
          arrival=float(when), prompt_tokens=prompt, new_tokens=answer
        )
      )
  return requests


def _azure(name: str, lines: list[str]) -> list[TraceRequest]:
  requests = []
  for n, row in enumerate(csv.DictReader(lines), 2):
    try:
      when = datetime.datetime.fromisoformat(row["TIMESTAMP"])
      requests.append(
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
  return requests


def _mooncake(name: str, lines: list[str]) -> list[TraceRequest]:
  requests = []
  for n, line in enumerate(lines, 1):
    want = "timestamp, input_length, output_length and all hash_ids"
    try:
      row: dict[str, Any] = json.loads(line)
      tokens = positive_int("tokens", row["input_length"])
      blocks = tuple(integer("id", i, least=0) for i in row["hash_ids"])
      if len(blocks) != -(-tokens // _BLOCK):
        raise ValueError(f"{len(blocks)} blocks")
      requests.append(
        TraceRequest(
          arrival=number("timestamp", row["timestamp"], least=0) / 1000,
          prompt_tokens=tokens,
          new_tokens=positive_int("tokens", row["output_length"]),
          blocks=blocks,
        )
      )
    except (KeyError, TypeError, ValueError):
      raise _wrong(name, n, want) from None
  return requests


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
  """Generate requests that arrive independently (a Poisson process).

  Args:
    rate: Requests a second; math.inf for all at once.
    requests: Number of requests.
    prompt_tokens: Mean number of tokens of a prompt, without shared ones.
    new_tokens: Mean number of tokens of an answer.
    shared_tokens: Number of tokens with which all prompts begin, in addition.
    spread: Standard deviation of the logs of lengths, which are log-normal; 0
      for equal lengths.
    seed: Random seed.

  Raises:
    OptionError: If a value is out of range.
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
  # With shared tokens, a prompt is the common block and private ones.
  block = shared_tokens or _BLOCK
  trace = []
  for n in range(requests):
    num_blocks = -(-int(prompts[n]) // block)
    ids = (0, *((n + 1) * 2**12 + i for i in range(num_blocks)))
    trace.append(
      TraceRequest(
        arrival=float(times[n]),
        prompt_tokens=int(prompts[n]) + shared_tokens,
        new_tokens=int(answers[n]),
        number=n,
        blocks=ids if shared_tokens else (),
        block=block,
      )
    )
  return trace
