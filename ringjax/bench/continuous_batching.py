"""transformers' continuous batching, beside an engine.

Guarantees: the same folder, float32, greedy answers of exactly so many tokens,
and nothing shared between prompts. Its pages and its thread stay from round to
round, as a server's do.
Memory: the weights once more, and pages for the requests that were told.
Ref: transformers 5, `ContinuousBatchingManager`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.bench.harness import import_torch
from ringjax.errors import OptionError


def import_transformers() -> Any:
  """transformers, with torch for it.

  Raises:
    OptionError: one of them is missing, or too old to batch continuously.
  """
  try:
    import_torch()
    found = importlib.import_module("transformers")
    _ = found.ContinuousBatchingConfig
  except (ImportError, AttributeError) as error:
    raise OptionError(
      "compare",
      f"transformers, which does not import here: {error}",
      "torch and transformers 5.23 or newer",
      "pip install -e '.[oracle]', or pass --compare=sequential",
    ) from error
  return found


class TransformersServer:
  """A model of transformers that answers many requests at once.

  Of what was tried on a CPU (`eager` and `sdpa`; pages of 32 and 256 tokens;
  512 and 2,048 tokens a step; compiled or not) these settings are the fastest.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    lengths: Sequence[tuple[int, int]],
    *,
    rows: int,
    page: int,
    threads: int,
  ):
    """Loads a model and reserves pages.

    Args:
      folder: of the model.
      lengths: of the requests that will come at once, tokens of the prompt and
        of the answer.
      rows: answers that are made at the same time at most.
      page: tokens of a page.
      threads: of PyTorch.

    Raises:
      OptionError: see `import_transformers`.
    """
    transformers = import_transformers()
    torch = import_torch(threads)
    logs = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    pages = sorted((-(-sum(one) // page) for one in lengths), reverse=True)
    prompts = sum(prompt for prompt, _ in lengths)
    self._manager = model.init_continuous_batching(
      generation_config=transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0
      ),
      continuous_batching_config=transformers.ContinuousBatchingConfig(
        page_size=page,
        # One page of a row may be the next one's.
        num_blocks=sum(pages[:rows]) + rows,
        max_batch_tokens=max(64, min(2048, prompts)),
        max_requests_per_batch=rows,
        allow_block_sharing=False,
      ),
    )
    self._manager.start()
    # Its thread takes the number of threads when it first computes something.
    self.answers([np.zeros(1, np.int32)], [1])

  def answers(
    self, prompts: Sequence[np.ndarray], new_tokens: Sequence[int]
  ) -> list[list[int]]:
    """The answers of prompts that come at once, in their order.

    Raises:
      RuntimeError: a request failed.
    """
    names = [
      self._manager.add_request(prompt.tolist(), max_new_tokens=count)
      for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
      one = self._manager.get_result(timeout=1)
      if one is None:
        if not self._manager.is_running():
          raise RuntimeError("the thread of transformers has ended")
      elif one.error is not None:
        raise RuntimeError(f"transformers: {one.error}")
      elif one.is_finished():
        found[one.request_id] = list(one.generated_tokens)
    return [found[name] for name in names]

  def close(self) -> None:
    """Ends its thread."""
    self._manager.stop(block=True)
