"""Checks of prompts: each has at least one id, and the model knows all ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from ringjax.checks import token_rows
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import PromptError
from ringjax.models.transformer import TransformerConfig

# Prompts of a batch: ids [B, T], B sequences of ids, or the ids of one prompt.
Prompts = Int[Array | np.ndarray, "_ _"] | Sequence[TokenIds] | TokenIds


def texts(tokens: Int[np.ndarray, "N T"], vocab: int) -> Int[np.ndarray, "N T"]:
  """Check texts to measure a model on, and convert them to int32 [N, T].

  Args:
    tokens: Token ids, int [N, T].
    vocab: Size of the vocabulary, V; ids are below it.

  Raises:
    ShapeError: If the shape is another, or the dtype no integer type.
    PromptError: If a value is no id of the model.
  """
  ids = token_rows(tokens)
  return np.stack(prompts(ids, vocab))


def prompts(tokens: Prompts, vocab: int) -> list[Int[np.ndarray, " _"]]:
  """Check prompts and convert each to ids, int32 [T] with T per prompt.

  Args:
    tokens: Token ids, int [B, T], B sequences of ids, or the ids of one prompt.
    vocab: Size of the vocabulary, V; ids are below it.

  Raises:
    PromptError: If there is no prompt, an empty one, or a value that is no id
      of the model.
  """
  if isinstance(tokens, jax.Array | np.ndarray):
    if tokens.ndim != 2:
      raise PromptError(
        "tokens",
        f"shape {tokens.shape}",
        "[B, T], or a list of sequences",
        "give a single prompt a batch axis: tokens[None]",
      )
    rows: Sequence[Any] = list(np.asarray(tokens))
  elif isinstance(tokens, list | tuple):
    is_single = bool(tokens) and isinstance(tokens[0], int | np.integer)
    rows = [tokens] if is_single else tokens
  else:
    raise PromptError(
      "tokens",
      f"a {type(tokens).__name__}",
      "an int32 array [B, T], or a list of sequences",
      "encode the text first",
    )
  if not rows:
    raise PromptError(
      "tokens", "no prompts", "at least one", "encode the text first"
    )
  return [_ids(row, i, vocab) for i, row in enumerate(rows)]


def prompt(tokens: TokenIds, vocab: int) -> Int[np.ndarray, " T"]:
  """Check one prompt [T] or [1, T], and convert it to ids, int32 [T].

  Raises:
    PromptError: If it is not a prompt, or there are several.
  """
  if isinstance(tokens, jax.Array | np.ndarray) and tokens.ndim == 1:
    tokens = tokens[None]
  rows = prompts(tokens, vocab)
  if len(rows) != 1:
    raise PromptError(
      "tokens",
      f"{len(rows)} prompts",
      "integer ids [T] of one prompt",
      "read one prompt at a time",
    )
  return rows[0]


def _ids(row: Any, number: int, vocab: int) -> np.ndarray:
  try:
    ids = np.asarray(row)
  except ValueError:
    ids = np.asarray(None)  # Lists of unequal depth.
  if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
    raise PromptError(
      "tokens",
      f"prompt {number} of shape {ids.shape} and dtype {ids.dtype}",
      "at least one integer id",
      "encode the text first; begin an empty prompt with the BOS id",
    )
  wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
  if wrong.size:
    raise PromptError(
      "tokens",
      f"id {int(ids[wrong[0]])} at position {int(wrong[0])} of prompt {number}",
      f"ids from 0 to {vocab - 1}",
      "use the tokenizer that belongs to the model",
    )
  return ids.astype(np.int32)


def within_context(config: TransformerConfig, total: int, came: str) -> None:
  """Refuses a text that is longer than the context the model supports.

  Args:
    config: Configuration of the model.
    total: Number of tokens of the text, generated ones included.
    came: Description of this number, for the error.

  Raises:
    PromptError: If the text is longer.
  """
  limit = config.longest
  if limit is not None and total > limit:
    raise PromptError(
      "tokens",
      came,
      f"at most {limit:,} in all, the model's context by its {config.bound}",
      " or pass ".join(
        filter(None, ("ask for fewer", config.longer_context_remedy(total)))
      ),
    )
