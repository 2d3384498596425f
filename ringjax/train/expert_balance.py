"""Warning about a config's loss for balanced experts, which is not computed."""

from __future__ import annotations

import json
import warnings

from ringjax.models.transformer import Transformer
from ringjax.nn.feedforward import Experts

_KEYS = ("router_aux_loss_coef", "aux_loss_alpha")


def warn_unbalanced(model: object) -> None:
  """Warns of a mixture whose config names a loss that is not computed.

  Args:
    model: Model that is trained.
  """
  if not isinstance(model, Transformer):
    return
  feedforwards = (layer.feedforward for layer in model.config.layers)
  if not any(isinstance(x, Experts) for x in feedforwards):
    return
  source = json.loads(model.source)
  for key in _KEYS:
    if source.get(key):
      warnings.warn(
        f"{key} is {source[key]} in the model's config, but no loss that "
        "balances experts is computed: watch how tokens are spread over them, "
        f"or set {key} to 0",
        UserWarning,
        stacklevel=2,
      )
      return
