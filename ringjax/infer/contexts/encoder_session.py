"""Sessions on contexts that a model's encoder reads (CEPE).

Guarantees: contexts are read in chunks, each alone, and in no order.
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
  """Makes a session whose cache has the states of each row's contexts.

  Args:
    model: Model with an encoder.
    rows: Contexts of each row, as token ids or encoded contexts.
    how: Strategy with the length of chunks.
    capacity: Maximum tokens of questions and answers in a row.
    library: Must be None: a library of keys and values is refused.
    options: Keyword arguments of the session.

  Returns:
    The session, the number of tokens in all contexts, and the bytes of their
    states.

  Raises:
    OptionError: If the model has no encoder, chunks are longer than it reads,
      or a library or prefix is given.
  """
  if not isinstance(model, CepeTransformer):
    raise OptionError(
      "combine",
      f"'cepe' for a {model.config.family} without an encoder",
      "a model with an encoder",
      "make one with rj.models.cepe.with_encoder, or pass combine='parallel'",
    )
  longest = model.encoder_config.chunk
  size = how.chunk or longest
  for name, refused, value in (
    ("library", library is not None, "one of keys and values"),
    ("prefix", bool(how.prefix), f"{len(how.prefix)} tokens"),
    ("chunk", size > longest, f"{size} tokens"),
  ):
    if refused:
      raise OptionError(
        name,
        f"{value} with combine='cepe'",
        f"contexts that an encoder reads in chunks of at most {longest} tokens",
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
  encoder_states = session.cache.states
  nbytes = encoder_states.phi.nbytes + encoder_states.seg.nbytes
  return session, sum(len(text) for row in texts for text in row), nbytes
