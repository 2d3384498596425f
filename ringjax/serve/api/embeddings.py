"""Embeddings of OpenAI's API: parses bodies, writes answers as bodies."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from ringjax.infer.scoring.text_scorer import POOLINGS
from ringjax.serve.api.api_parameters import (
  EMBEDDING,
  checked,
  refused,
)
from ringjax.serve.api.openai_api import ApiModel

# OpenAI's limit of the texts of one body.
_TEXTS = 2048


class EmbeddingCall(NamedTuple):
  """Parsed call of /v1/embeddings.

  Fields:
    texts: Token ids of each text, int32 [T].
    model: Name by which the model was called.
    adapter: Adapter of that name, or "".
    pooling: One of `POOLINGS`.
    dimensions: Number of first numbers that are kept, or None for all.
    as_base64: Whether an embedding is base64 of float32 numbers.
  """

  texts: tuple[Int[np.ndarray, " _"], ...]
  model: str
  adapter: str
  pooling: str
  dimensions: int | None
  as_base64: bool

  def body(self, embeddings: Float32[np.ndarray, "N D"]) -> dict[str, Any]:
    """Body of the answer.

    Args:
      embeddings: Embeddings of length 1, float32 [N, D].

    Raises:
      ApiError: If there are fewer numbers than were asked for.
    """
    rows, width = embeddings, embeddings.shape[1]
    if self.dimensions is not None:
      if self.dimensions > width:
        raise refused(
          "dimensions",
          self.dimensions,
          f"1 to {width}",
          "ask for fewer, or leave it out",
        )
      rows = rows[:, : self.dimensions]
      length = np.linalg.norm(rows, axis=1, keepdims=True)
      rows = rows / np.maximum(length, np.finfo(np.float32).tiny)
    data = [
      {"object": "embedding", "index": n, "embedding": self._shown(row)}
      for n, row in enumerate(rows)
    ]
    tokens = sum(text.size for text in self.texts)
    return {
      "object": "list",
      "data": data,
      "model": self.model,
      "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }

  def _shown(self, row: Float32[np.ndarray, " D"]) -> str | list[float]:
    if self.as_base64:
      return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return row.tolist()


def embedding_call(model: ApiModel, body: dict[str, Any]) -> EmbeddingCall:
  """Parse a body of /v1/embeddings.

  Args:
    model: The served model.
    body: JSON object of the body.

  Raises:
    ApiError: If a parameter is unknown, of a wrong type or out of range.
  """
  params = checked(body, EMBEDDING)
  adapter = model.adapter(params)
  if "input" not in params:
    raise refused("input", "no input", "a text or several", "pass input")
  texts = model.texts("input", params["input"], _TEXTS)
  ids = tuple(model.encoded("input", text) for text in texts)
  longest = max(text.size for text in ids)
  if longest > model.longest:
    raise refused(
      "input",
      f"over {model.longest:,} tokens",
      f"{model.longest:,} at most",
      "shorten it",
      code="context_length_exceeded",
    )
  return EmbeddingCall(
    ids,
    params.get("model", model.name),
    adapter,
    params.get("pooling", POOLINGS[0]),
    params.get("dimensions"),
    params.get("encoding_format", "float") == "base64",
  )
