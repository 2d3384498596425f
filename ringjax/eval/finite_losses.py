"""Check for losses that are not finite, with an error for the document."""

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
  """Raises if a loss is NaN or infinite, before a mean hides its document.

  Args:
    losses: Losses or log probabilities of one document [T], or their sum [].
    model: Model that was evaluated.
    document: Number of the document, from 0.
    first: Position of the first loss, or of the first token of a sum.
    last: Number of the last document, if the losses are of several.

  Raises:
    NotFiniteLogitsError: With the number of the document and a position.
  """
  wrong = ~np.isfinite(np.atleast_1d(np.asarray(losses, np.float64)))
  if wrong.any():
    at = {document: first + int(np.argmax(wrong))}
    unit = "document"
    if last is not None and last > document:
      unit = f"one of the documents up to {last}, from document"
    raise not_finite_error(at, model.dtype, unit=unit)
