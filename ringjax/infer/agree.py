"""Ranks compare what they are about to do, before they do it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from ringjax.errors import OptionError, PeerError, RingjaxError
from ringjax.json_text import json_text
from ringjax.models.fingerprint import digest, fingerprint
from ringjax.models.transformer import Transformer
from ringjax.parallel.peers import Peers
from ringjax.plan import cost

_T = TypeVar("_T")


def check_partition(
  partition: Sequence[int], tokens: int, ranks: int
) -> tuple[int, ...]:
  """Tokens of the ranks that take part.

  Raises:
    OptionError: it does not add up, or is for more ranks than there are.
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
  """Has all ranks compare what they are about to do, before they do it.

  Args:
    peers: the group.
    make: returns what has to be the same on all ranks, JSON values by name,
      and what this function returns.

  Raises:
    PeerError: it names a rank that differs from most and in what, or one
      whose `make` failed.
    RingjaxError: what `make` raises, on the rank that it concerns.
  """
  peers.check()
  try:
    (card, made), refusal = make(), None
  except RingjaxError as error:
    card, made, refusal = {"refused": f"{error}"}, None, error
  cards = peers.gather(card)
  if refusal is not None:
    raise refusal
  for rank, other in enumerate(cards):
    if "refused" in other:
      raise PeerError(f"rank {rank} refused: {other['refused']}", rank=rank)
  for name in card:
    texts = [json_text(c.get(name)) for c in cards]
    ((most, count),) = collections.Counter(texts).most_common(1)
    if count < len(texts):
      odd = next(r for r, text in enumerate(texts) if text != most)
      raise PeerError(
        f"rank {odd}",
        f"{name} {texts[odd]}",
        f"{most}, as rank {texts.index(most)} has",
        "start all processes with the same model and flags",
        rank=odd,
      )
  return made  # pyrefly: ignore


def reading(model: Transformer, ids: np.ndarray) -> dict[str, Any]:
  """What ranks that read a prompt have to agree on: the model and the ids."""
  return {
    "tokens": f"{ids.size} of digest {digest(ids.tobytes())}",
    "model config": digest(repr(model.config).encode()),
    "model weights": fingerprint(model),
    "model dtype": jnp.dtype(model.dtype).name,
  }
