"""Attention entropy of an answer, for launch.generate with --entropy.

It is measured after the answer, in one more call of the model: the tokens
that gave the answer look once more at what they saw, contexts that a selection
keeps for instance. See docs/how/contexts_entropy.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax.eval import attention_statistics, context_statistics
from ringjax.models.transformer import Transformer
from ringjax.parallel.local_arrays import whole_on_host

from ..shared import integer_flags, prompts

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()

# Flags by which an answer sees other keys than a call without a cache.
_OTHER_KEYS = ("cache", "important", "policy", "memory", "placement",
               "cache_placement", "disk", "flash", "wire")  # fmt: skip


def refuse(values: flags.FlagValues) -> None:
  """Refuses flags that do not go with --entropy.

  Raises:
    OptionError: If such a flag was passed.
  """
  if not values.entropy:
    return
  for name in _OTHER_KEYS:
    if values[name].value not in (None, values[name].default):
      raise prompts.clash(
        f"--entropy and --{name}", "one of them: exact keys on the devices"
      )
  if integer_flags.two_asked(values):
    raise prompts.clash("--entropy and --integer with devices=2", "one of them")


def refuse_mesh(values: flags.FlagValues, mesh: Mesh) -> None:
  """Refuses a mesh on which the statistics can't be computed.

  Raises:
    OptionError: If contexts are to be measured over a sharded sequence.
  """
  if not values.entropy:
    return
  if values.contexts is not None and mesh.size > 1:
    raise prompts.clash(
      f"--entropy and --contexts on {mesh.size} devices",
      "--devices=1: all scores of a query are then on one",
    )


def measure(
  model: Transformer,
  ids: np.ndarray,
  new: Sequence[int],
  options: Mapping[str, Any],
  mesh: Mesh,
) -> dict[str, Any]:
  """Measures the entropy of the attention by which an answer was chosen.

  Args:
    model: Model of the answer.
    ids: Ids of the prompt or, after contexts, of the question: int32 [T].
    new: Ids of the answer.
    options: Arguments `contexts`, `combine` and `library` of `generate`; empty
      for a prompt without contexts.
    mesh: Mesh of the answer.

  Returns:
    Number of queries; mean entropy in nats; and its means over queries by layer
    and head, None for layers that do not attend.
  """
  tokens = np.concatenate([ids, np.asarray(new[:-1], np.int32)])
  if options:
    session = rj.infer.context_session(
      model, options["contexts"], options["combine"], capacity=tokens.size,
      library=options["library"],
    )  # fmt: skip
    statistics = context_statistics(session, tokens)
  else:
    statistics = attention_statistics(
      model, tokens[None], queries=len(new), mesh=mesh
    )
  entropies = whole_on_host(
    [None if x is None else x.entropy for x in statistics.layers]
  )
  layers = [
    None
    if entropy is None
    else entropy.astype(np.float64)[0, -len(new) :].mean(0).tolist()
    for entropy in entropies
  ]
  attending = [heads for heads in layers if heads is not None]
  return {
    "queries": len(new),
    "mean": float(np.mean(np.concatenate(attending))),
    "by_layer": layers,
  }
