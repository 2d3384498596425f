"""Ranks agree on what they are about to do, before they do it."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.errors import (
  OptionError,
  PeerError,
  RingjaxError,
)
from ringjax.models.transformer import Transformer
from ringjax.parallel.peers import Peers
from ringjax.plan import cost


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


def agree(peers: Peers, make: Callable[[], dict[str, Any]]) -> None:
  """Refuses to start unless all ranks have the same card.

  Raises:
    PeerError: it names a rank that differs from most and in what, or one
      that cannot make a card.
    RingjaxError: what `make` raises, on the rank that it concerns.
  """
  try:
    card, refusal = make(), None
  except RingjaxError as error:
    card, refusal = {"refused": f"{error}"}, error
  cards = peers.gather(card)
  if refusal is not None:
    raise refusal
  for rank, other in enumerate(cards):
    if "refused" in other:
      raise PeerError(f"rank {rank} refused: {other['refused']}", rank=rank)
  for name in card:
    texts = [json.dumps(c.get(name)) for c in cards]
    most, count = collections.Counter(texts).most_common(1)[0]
    if count == len(texts):
      continue
    odd = next(r for r, text in enumerate(texts) if text != most)
    raise PeerError(
      f"rank {odd}",
      f"{name} {texts[odd]}",
      f"{most}, as rank {texts.index(most)} has",
      "start all processes with the same model and flags",
      rank=odd,
    )


def digest(data: bytes) -> str:
  """A short name of some bytes."""
  return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(model: Transformer) -> str:
  """Tells models apart by some of their weights."""
  found = hashlib.sha256()
  for leaf in jax.tree.leaves(model):
    here = np.asarray(leaf) if _is_host(leaf) else leaf
    corner = here[tuple(slice(0, 4) for _ in here.shape)]
    found.update(np.asarray(corner).tobytes())
  return found.hexdigest()[:16]


def _is_host(x: jax.Array) -> bool:
  return all(d.platform == "cpu" for d in x.devices())
