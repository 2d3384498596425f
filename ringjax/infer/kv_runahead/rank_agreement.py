"""Agreement of ranks on a call's arguments before they execute it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.json_text import json_text
from ringjax.models.fingerprint import digest, fingerprint
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.parallel.peers import Peers
from ringjax.plan import cost

_T = TypeVar("_T")


def check_partition(
  partition: Sequence[int], tokens: int, ranks: int
) -> tuple[int, ...]:
  """Checks a partition; returns the number of tokens of each rank in it.

  Raises:
    OptionError: If it does not add up to `tokens`, or has more than `ranks`
      parts.
  """
  lengths = cost.check_lengths(partition, tokens)
  if len(lengths) > ranks:
    raise OptionError(
      "partition",
      f"{len(lengths)} parts, {lengths}",
      f"at most {ranks}, one for each process",
      "start more processes or pass fewer parts",
    )
  return lengths


def agree(peers: Peers, make: Callable[[], tuple[dict[str, Any], _T]]) -> _T:
  """Compares the arguments of all ranks before a call.

  Args:
    peers: Process group of the ranks.
    make: Function that returns the values that must be equal on all ranks
      (JSON values by name), and the result of `agree`.

  Raises:
    PeerError: If a rank differs from most others or its `make` failed; the
      error names the rank and the value.
    RingjaxError: If `make` raises it, on the same rank.
  """
  peers.check()
  try:
    (card, result), refusal = make(), None
  except RingjaxError as error:
    card, result, refusal = {"refused": f"{error}"}, None, error
  cards = peers.gather(card)
  if refusal is not None:
    raise refusal
  for rank, rank_card in enumerate(cards):
    if "refused" in rank_card:
      raise PeerError(f"rank {rank} refused: {rank_card['refused']}", rank=rank)
  for name in card:
    texts = [json_text(c.get(name)) for c in cards]
    ((most_common, count),) = collections.Counter(texts).most_common(1)
    if count < len(texts):
      odd = next(r for r, text in enumerate(texts) if text != most_common)
      raise PeerError(
        f"rank {odd}",
        f"{name} {texts[odd]}",
        f"{most_common}, as rank {texts.index(most_common)} has",
        "start all processes with the same model and flags",
        rank=odd,
      )
  return result  # pyrefly: ignore


def reading(model: Transformer, ids: np.ndarray) -> dict[str, Any]:
  """Values that ranks compare before reading a prompt: model and token ids."""
  return prompt_of(model.config, ids) | {
    "model weights": fingerprint(model),
    "model dtype": jnp.dtype(model.dtype).name,
  }


def prompt_of(config: TransformerConfig, ids: np.ndarray) -> dict[str, Any]:
  """Values that ranks compare which do not all have the same weights."""
  return {
    "tokens": f"{ids.size} of digest {digest(ids.tobytes())}",
    "model config": digest(repr(config).encode()),
  }
