"""Eviction by a model's attention while it repeats its context (KVzip).

Guarantees: the cache holds the same keys, but for those evicted.
Cost: a call for each chunk of the context, which attends to all of it.
Memory: the open cache grows by a call's tokens until the eviction.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ringjax.data.text.chat import ChatTemplate
from ringjax.errors import InputTypeError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import PrefillConfig, padded
from ringjax.kv.eviction import peak_attention
from ringjax.kv.eviction.evicting import EvictingCache
from ringjax.kv.eviction.peak_attention import Chunk, Repeated
from ringjax.kv.policies.kvzip import KVzip
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.parallel.mesh import entering
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

# Texts of the paper's authors, by which its figures were measured.
_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_SUFFIX = "\n"
# Placeholder text that no chat template contains.
_MARK = "the context"
# Tokens of the chunk before, which mark the start of the repetition.
_BEFORE = 8


class Instructions(NamedTuple):
  """Texts that ask for a repetition, as int32 ids.

  Fields:
    first: Request for the first chunk.
    later_chunks: Request for the others; the last tokens of the chunk before
      follow.
    suffix: Text that a chat template writes before an answer.
  """

  first: np.ndarray
  later_chunks: np.ndarray
  suffix: np.ndarray

  @classmethod
  def of(cls, tokenizer: Any) -> Instructions:
    """Encode the texts with a tokenizer; None gives empty texts.

    Raises:
      InputTypeError: If the tokenizer can't encode a text.
    """
    if tokenizer is None:
      empty = np.zeros(0, np.int32)
      return cls(empty, empty, empty)
    if isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
      raise InputTypeError(
        "tokenizer",
        type(tokenizer).__name__,
        "a tokenizer that encodes the request for a repetition",
        "pass rj.data.Tokenizer.load(folder)",
      )
    encode = lambda text: np.asarray(tokenizer.encode(text), np.int32).reshape(
      -1
    )
    suffix = encode(_SUFFIX)
    if getattr(tokenizer, "chat_template", None) is not None:
      turn = [{"role": "user", "content": _MARK}]
      chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_names)
      text = chat.text(turn).partition(_MARK)[2]
      suffix = tokenizer.encode(text, special=True)
    return cls(encode(_FIRST), encode(_LATER), suffix)

  def texts(
    self, prompt: Int[np.ndarray, " T"], prefix: int, chunk: int
  ) -> list[tuple[int, int, Int[np.ndarray, " _"]]]:
    """List first, end and repetition text of each chunk of a prompt."""
    texts = []
    for start in range(prefix, prompt.size, chunk):
      end = min(start + chunk, prompt.size)
      request = [self.first]
      if start > prefix:
        request = [
          self.later_chunks,
          prompt[start - min(chunk, _BEFORE) : start],
        ]
      text = np.concatenate([*request, self.suffix, prompt[start:end]])
      texts.append((start, end, text.astype(np.int32)))
    return texts


def check_repetition(
  model: Transformer, policy: KVzip, lengths: np.ndarray, asked: Instructions
) -> None:
  """Refuses a context that with its repetition exceeds the model's context.

  Raises:
    PromptError: If it does.
  """
  chunk = np.minimum(policy.chunk, lengths)
  request_tokens = (
    max(asked.first.size, asked.later_chunks.size + _BEFORE) + asked.suffix.size
  )
  total, limit = (
    int((lengths + chunk).max()) + request_tokens,
    model.config.longest,
  )
  if limit is not None and total > limit:
    raise PromptError(
      "tokens",
      f"{int(lengths.max()):,} tokens, of which {policy} repeats "
      f"{int(chunk.max()):,} at once after them: {total:,} in all",
      f"at most {limit:,}, the model's context by its {model.config.bound}",
      "repeat fewer at once, rj.kv.KVzip(chunk=256), or use another policy",
    )


def repeat(
  model: Transformer,
  cache: EvictingCache,
  prompts: list[np.ndarray],
  rows: np.ndarray,
  asked: Instructions,
  total: np.ndarray,
) -> EvictingCache:
  """Evict by a repetition of some rows' prompts, and return the cache.

  Args:
    model: Model that has read the prompts into the cache.
    cache: Cache whose policy repeats; `rows` of it hold these prompts alone.
    prompts: Token ids of each row's prompt, int32 [T].
    rows: Mask of the rows to repeat, bool [B]; the others keep all keys.
    asked: Texts that ask for the repetition.
    total: Tokens of the context, for rotations that depend on it.
  """
  policy: Any = cache.kind.policy
  texts = [
    asked.texts(prompt, policy.prefix, policy.chunk) if repeated else []
    for prompt, repeated in zip(prompts, rows, strict=True)
  ]
  count = max(map(len, texts))
  if not peak_attention.repeated_kinds(cache) or not count:
    return cache.flush()
  ends = np.array([prompt.size for prompt in prompts]) * rows
  longest = max(text.size for row_texts in texts for _, _, text in row_texts)
  shards, batch = cache.shards, cache.batch
  options = PrefillConfig(method="chunked", chunk=padded(longest, shards))
  cache = cache.with_room(
    np.full((batch, shards), padded(longest, shards) // shards)
  )
  scores: Any = None
  # The policy's numbers are traced: another budget compiles nothing.
  kind = dataclasses.replace(cache.kind, policy=policy.traced())
  traced_cache = dataclasses.replace(cache, kind=kind)
  for n in range(count):
    empty = (0, 0, np.zeros(0, np.int32))
    chunk_texts = [
      row_texts[n] if n < len(row_texts) else empty for row_texts in texts
    ]
    start, end, ids = zip(*chunk_texts, strict=True)
    plan = options.plan(longest, model, cache.mesh, cache.axis, behind=True)
    (call,) = plan.calls(ids, ends)
    bounds = [
      jnp.asarray(np.array(values, np.int32)) for values in (start, end, ends)
    ]
    chunk_scores = _peaks(
      model,
      plan.attend,
      jnp.asarray(call.tokens),
      jnp.asarray(call.pos),
      jnp.asarray(call.seg),
      traced_cache,
      Chunk(*bounds),
      jnp.asarray(total, jnp.int32),
    )
    # A token is in one chunk, and gets 0 in the others.
    join = lambda x, y: jax.tree.map(jnp.maximum, x, y)
    scores = chunk_scores if scores is None else join(scores, chunk_scores)
  return cache.evict(Repeated(scores, rows))


@bounded
@functools.partial(jax.jit, static_argnums=1)
def _peaks(
  model: Transformer,
  attend: ShardingContext,
  tokens: Int[Array, "B T"],
  pos: Int[Array, "B T"],
  seg: Int[Array, "B T"],
  cache: EvictingCache,
  chunk: Chunk,
  length: Lengths,
) -> dict[int, jax.Array]:
  """Compiled call: scores of a chunk. The call's tokens leave no keys."""
  watched = peak_attention.watching(cache, tokens.shape[1])
  rows = jnp.zeros((tokens.shape[0], 1), jnp.int32)
  _, watched_cache = forward(
    model, attend, tokens, pos, seg, watched, rows, length
  )
  return peak_attention.of_chunk(watched_cache, chunk)


@entering(lambda _, cache, *__, **___: getattr(cache, "mesh", None))
def evict_by_repetition(
  model: Transformer,
  cache: EvictingCache,
  tokens: Prompts,
  *,
  tokenizer: Any = None,
) -> EvictingCache:
  """Evict by a policy that repeats the context, and return the cache.

  `generate` and `read_context` call this themselves; it is for other caches.

  Args:
    model: Model that has read the tokens into the cache.
    cache: Cache made by `model.init_cache` with a kind such as "kvzip".
    tokens: All tokens that the cache holds, int32 [B, T], or B sequences of
      ids.
    tokenizer: Encodes the request for a repetition; without one the context
      is repeated without a request.

  Raises:
    OptionError: If the cache's policy repeats nothing, or the cache holds
      another number of tokens.
    PromptError: If the tokens with their repetition exceed the model's context.
  """
  kind = cache.kind
  if not kind.repeats:
    raise OptionError(
      "cache",
      f"one of kind {kind}",
      "a policy that repeats the context",
      "call cache.evict(), or make the cache with kind='kvzip'",
    )
  prompts = inputs.prompts(tokens, model.config.vocab)
  sizes = np.array([prompt.size for prompt in prompts])
  sharding = CachedAttention(mesh=cache.mesh, axis=cache.axis)
  lengths = np.asarray(jax.jit(sharding.everywhere)(cache.length))
  if lengths.tolist() != sizes.tolist():
    raise OptionError(
      "tokens",
      f"rows of {sizes.tolist()} tokens",
      f"as many as the cache holds, {lengths.tolist()}",
      "pass all tokens that were read into it, and evict before any others",
    )
  instructions = Instructions.of(tokenizer)
  policy: Any = kind.policy
  check_repetition(model, policy, sizes, instructions)
  return repeat(
    model, cache, prompts, sizes > 0, instructions, np.array(cache.capacity)
  )
