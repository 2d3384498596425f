"""Contexts that a model's encoder reads (CEPE), as a session behind them.

Guarantees: tokens of contexts are read in chunks, each alone, and in no order.
Memory: the states of all chunks, which all layers share.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringjax.errors import OptionError
from ringjax.infer.contexts.combine import Cepe
from ringjax.infer.contexts.context_library import (
  EncodedContext,
  context_tokens,
)
from ringjax.infer.session import Session
from ringjax.models.cepe import CepeTransformer, encode
from ringjax.models.transformer import Transformer


def encoder_session(
  model: Transformer,
  rows: list[list[Any]],
  how: Cepe,
  *,
  capacity: int,
  library: object,
  options: dict[str, Any],
) -> tuple[Session, int, int]:
  """A session whose cache has the states of each row's contexts.

  Args:
    model: with an encoder.
    rows: the contexts of each, ids or encoded contexts.
    how: the length of chunks.
    capacity: tokens of questions and answers, of a row.
    library: of keys and values: refused.
    options: of the session.

  Returns:
    (session, tokens of all contexts, bytes of their states).

  Raises:
    OptionError: a model without an encoder, longer chunks than it reads, or
      what is of keys and values.
  """
  if not isinstance(model, CepeTransformer):
    raise OptionError(
      "combine",
      f"'cepe' for a {model.config.family} without an encoder",
      "a model with an encoder",
      "make one with rj.models.cepe.with_encoder, or pass combine='parallel'",
    )
  most = model.encoder_config.chunk
  size = how.chunk or most
  for name, bad, came in (
    ("library", library is not None, "one of keys and values"),
    ("prefix", bool(how.prefix), f"{len(how.prefix)} tokens"),
    ("chunk", size > most, f"{size} tokens"),
  ):
    if bad:
      raise OptionError(
        name,
        f"{came} with combine='cepe'",
        f"contexts that an encoder reads in chunks of at most {most} tokens",
        "leave it out, or put a prefix before the question",
      )
  raw = [
    [x.tokens if isinstance(x, EncodedContext) else x for x in row]
    for row in rows
  ]
  texts = [context_tokens(row, model.config.vocab) for row in raw]
  states = encode(
    model,
    [
      [text[n : n + size] for text in row for n in range(0, len(text), size)]
      for row in texts
    ],
  )
  kind = options["cache_kind"]
  options = options | {"cache_kind": "dense" if kind is None else kind}
  session = Session(model, capacity, batch=len(rows), **options)
  session.cache = session.cache.with_states(states)
  for seen, row in zip(session.seen, texts, strict=True):
    seen[np.concatenate(row)] = True
  held = session.cache.states
  nbytes = held.phi.nbytes + held.seg.nbytes
  return session, sum(len(text) for row in texts for text in row), nbytes
