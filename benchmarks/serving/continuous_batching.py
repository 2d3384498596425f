"""Continuous batching of transformers, to compare an engine with.

Guarantees: the same folder, float32, greedy answers of exactly the requested
length, and nothing shared between prompts. Its pages and its thread stay from
round to round, as a server's do.
Memory: a second copy of the weights, and pages for the announced requests.
Ref: transformers 5, `ContinuousBatchingManager`.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Sequence

import numpy as np

from benchmarks.shared.harness import import_torch
from ringjax.errors import OptionError


def import_transformers() -> types.ModuleType:
  """Imports transformers and torch.

  Raises:
    OptionError: If one is missing, or too old to batch continuously.
  """
  try:
    import_torch()
    transformers = importlib.import_module("transformers")
    _ = transformers.ContinuousBatchingConfig
  except (ImportError, AttributeError) as error:
    raise OptionError(
      "compare",
      f"transformers, which does not import here: {error}",
      "torch and transformers 5.23 or newer",
      "pip install -e '.[oracle]', or pass --compare=sequential",
    ) from error
  return transformers


class TransformersServer:
  """A model of transformers that answers many requests at once.

  These settings were the fastest on a CPU, of `eager` and `sdpa`, pages of 32
  and 256 tokens, 512 and 2,048 tokens a step, compiled or not.
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
      folder: Folder of the model.
      lengths: Tokens of the prompt and of the answer of each request that will
        arrive at once.
      rows: Largest number of rows that decode at once.
      page: Tokens of a page.
      threads: Number of threads of PyTorch.

    Raises:
      OptionError: See `import_transformers`.
    """
    transformers = import_transformers()
    torch = import_torch(threads)
    logs = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    pages = sorted(
      (-(-sum(length) // page) for length in lengths), reverse=True
    )
    prompts = sum(prompt for prompt, _ in lengths)
    self._manager = model.init_continuous_batching(
      generation_config=transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0
      ),
      continuous_batching_config=transformers.ContinuousBatchingConfig(
        page_size=page,
        # One more page for each row, which may begin its next page early.
        num_blocks=sum(pages[:rows]) + rows,
        max_batch_tokens=max(64, min(2048, prompts)),
        max_requests_per_batch=rows,
        allow_block_sharing=False,
      ),
    )
    self._manager.start()
    # Its thread reads PyTorch's number of threads at the first computation.
    self.answers([np.zeros(1, np.int32)], [1])

  def answers(
    self, prompts: Sequence[np.ndarray], new_tokens: Sequence[int]
  ) -> list[list[int]]:
    """Answers prompts that arrive at once; returns ids in their order.

    Raises:
      RuntimeError: If a request fails.
    """
    names = [
      self._manager.add_request(prompt.tolist(), max_new_tokens=count)
      for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    tokens: dict[str, list[int]] = {}
    while len(tokens) < len(names):
      result = self._manager.get_result(timeout=1)
      if result is None:
        if not self._manager.is_running():
          raise RuntimeError("the thread of transformers has ended")
      elif result.error is not None:
        raise RuntimeError(f"transformers: {result.error}")
      elif result.is_finished():
        tokens[result.request_id] = list(result.generated_tokens)
    return [tokens[name] for name in names]

  def close(self) -> None:
    """Ends the thread of transformers."""
    self._manager.stop(block=True)
