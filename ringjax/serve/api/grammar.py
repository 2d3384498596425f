"""Masks of requests whose answers follow a JSON schema or a regular expression.

llguidance (MIT, 2 MB, no dependencies) computes the allowed tokens: it is the
library that llama.cpp, vLLM and SGLang offer too, written in Rust, and needs
about 50 us a token. It is an optional extra, `structured`.
Ref: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from jaxtyping import Bool

from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError
from ringjax.json_text import json_text


class GrammarCompiler:
  """Compiles grammars to masks for `rj.serve.Request`, for one tokenizer."""

  def __init__(self, tokenizer: AnyTokenizer, vocab: int):
    """Load nothing yet.

    Args:
      tokenizer: Tokenizer of the model; its tokens have bytes (`by_bytes`).
      vocab: Number of token ids of the model.
    """
    self._tokenizer, self._vocab = tokenizer, vocab
    self._lock = threading.Lock()
    self._known = None

  def mask(
    self,
    schema: dict[str, Any] | None,
    regex: str | None,
    answers: int,
    within: Callable[[str], str] = lambda grammar: grammar,
  ) -> Callable[[np.ndarray], Any] | None:
    """Make the mask of a request, or None if it has no grammar.

    Args:
      schema: JSON schema, or None.
      regex: Regular expression, or None.
      answers: Number of answers of the request.
      within: Function of the grammar that returns that of the whole answer, of
        which it is a part.

    Raises:
      OptionError: If llguidance is missing or refuses the grammar.
    """
    if schema is None and regex is None:
      return None
    name = "guided_regex" if schema is None else "response_format"
    matcher = _llguidance(name).LLMatcher
    try:
      grammar = (
        matcher.grammar_from_regex(regex)
        if schema is None
        else matcher.grammar_from_json_schema(json_text(schema))
      )
    except ValueError as error:
      raise _bad(name, error) from None
    return self.compile(within(grammar), answers, name)

  def compile(
    self, grammar: str, answers: int, name: str = "grammar"
  ) -> GrammarMask:
    """Make the mask of a grammar.

    Args:
      grammar: Text of the grammar for llguidance, `GrammarMask.grammar` of
        another mask.
      answers: Number of answers of the request.
      name: Name of the grammar in errors.

    Raises:
      OptionError: If llguidance is missing or refuses the grammar.
    """
    matcher = _llguidance(name).LLMatcher
    with self._lock:
      if self._known is None:
        self._known = self._words(name)
      words = self._known
    first = matcher(words, grammar, log_level=0)
    if first.is_error():
      raise _bad(name, first.get_error())
    ends = self._tokenizer.eos_ids[:1]
    return GrammarMask(first, self._vocab, answers, grammar, ends)

  def _words(self, name: str) -> Any:
    """Wrap the tokenizer for llguidance."""
    library, tokenizer = _llguidance(name), self._tokenizer
    if not tokenizer.by_bytes or not tokenizer.eos_ids:
      raise OptionError(
        name,
        "a model whose tokens have no bytes of their own, or no end",
        "a byte-level tokenizer with an eos token",
        "leave it out",
      )
    size = min(tokenizer.vocab_size, self._vocab)

    class Wrapped(SimpleNamespace):
      def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
          text = text.decode("utf-8")
        return tokenizer.encode(text).tolist()

    wrapped = Wrapped(
      eos_token_id=tokenizer.eos_ids[0],
      bos_token_id=tokenizer.bos_id,
      tokens=[tokenizer.piece(i) for i in range(size)],
      special_token_ids=[i for i in range(size) if tokenizer.is_special(i)],
    )
    return library.LLTokenizer(library.TokenizerWrapper(wrapped))


class GrammarMask:
  """Mask of the tokens that a grammar allows after those of an answer.

  A matcher continues from the tokens that it has seen; each answer of a request
  has a separate matcher.

  Attributes:
    grammar: Grammar of the mask, see `GrammarCompiler.compile`.
    ends: Ids of the token that ends the grammar, which also ends the answer:
      a complete grammar allows no other one, and no token after it.
  """

  def __init__(
    self,
    first: Any,
    vocab: int,
    answers: int,
    grammar: str = "",
    ends: tuple[int, ...] = (),
  ):
    self.grammar, self.ends = grammar, ends
    self._first, self._vocab = first, vocab
    # The tokens that each matcher has seen; the least recently used first.
    self._known: list[tuple[tuple[int, ...], Any]] = []
    self._most = answers

  def __call__(self, tokens: np.ndarray) -> Bool[np.ndarray, " V"]:
    """Allowed next tokens, bool [V], for the tokens of an answer, int32 [m]."""
    wanted = tuple(tokens.tolist())
    prefixes = [x for x in self._known if wanted[: len(x[0])] == x[0]]
    if prefixes:
      longest = max(prefixes, key=lambda x: len(x[0]))
      self._known.remove(longest)
      seen, matcher = longest
    else:
      seen, matcher = (), self._first.deep_copy()
      self._known = self._known[max(0, len(self._known) + 1 - self._most) :]
    if wanted != seen:
      matcher.consume_tokens(list(wanted[len(seen) :]))
    self._known.append((wanted, matcher))
    if matcher.is_error():
      raise _bad("response_format", matcher.get_error())
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.zeros(self._vocab, bool)
    found_bits = np.unpackbits(bits, bitorder="little").astype(bool)
    size = min(self._vocab, found_bits.size)
    allowed[:size] = found_bits[:size]
    return allowed


def _bad(name: str, error: object) -> OptionError:
  why = " ".join(str(error).split())[:150]
  return OptionError(name, why, "a grammar that llguidance takes", "change it")


def _llguidance(name: str) -> types.ModuleType:
  try:
    return importlib.import_module("llguidance")
  except ImportError:
    raise OptionError(
      name,
      "a grammar, on a server without llguidance",
      "the extra `structured`",
      "install ringjax[structured] on the server, or leave it out",
    ) from None
