"""Losses that are not finite: an error that names the document."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from ringjax.infer.finite import not_finite_error
from ringjax.models.transformer import Transformer


def check_losses(
  losses: Float[Array | np.ndarray, "*T"] | np.floating | float,
  model: Transformer,
  *,
  document: int,
  first: int = 0,
  last: int | None = None,
) -> None:
  """Raises if a loss is NaN or infinite, before a mean hides whose it is.

  Args:
    losses: losses or logarithms of probabilities of one document [T], or a sum
      of them [].
    model: The model that was evaluated.
    document: the document's number, from 0.
    first: position of the first loss; of a sum, where its first token is.
    last: number of the last document, where the losses are of several.

  Raises:
    NotFiniteLogitsError: with the number of the document and a position.
  """
  wrong = ~np.isfinite(np.atleast_1d(np.asarray(losses, np.float64)))
  if wrong.any():
    at = {document: first + int(np.argmax(wrong))}
    unit = "document"
    if last is not None and last > document:
      unit = f"one of the documents up to {last}, from document"
    raise not_finite_error(at, model.dtype, unit=unit)
