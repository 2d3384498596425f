"""Evicts by what a model looks at while it repeats its context (KVzip).

Guarantees: the cache holds what it held, but for what is evicted.
Cost: a call for each chunk of the context, behind the whole of it.
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

from ringjax.data.chat import ChatTemplate
from ringjax.errors import InputTypeError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import PrefillOptions, padded
from ringjax.kv import peaks
from ringjax.kv.evicting import EvictingCache
from ringjax.kv.peaks import Chunk, Repeated
from ringjax.kv.policies.kvzip import KVzip
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.parallel.mesh import entering
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

# The texts are those of the paper's authors, which its figures are of.
_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_SUFFIX = "\n"
# What no template writes by itself.
_MARK = "the context"
# Of the chunk before: where the repetition starts.
_BEFORE = 8


class Instructions(NamedTuple):
  """What asks for a repetition, int32 ids.

  Fields:
    first: before the first chunk.
    later: before the last tokens of the chunk before, for the others.
    suffix: what a template writes before an answer.
  """

  first: np.ndarray
  later: np.ndarray
  suffix: np.ndarray

  @classmethod
  def of(cls, tokenizer: Any) -> Instructions:
    """By a tokenizer; none without, the chunk alone is then repeated.

    Raises:
      InputTypeError: it can't encode a text.
    """
    if tokenizer is None:
      none = np.zeros(0, np.int32)
      return cls(none, none, none)
    if isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
      raise InputTypeError(
        "tokenizer",
        type(tokenizer).__name__,
        "a tokenizer that encodes the request for a repetition",
        "pass rj.data.Tokenizer.load(folder)",
      )
    ids = lambda text: np.asarray(tokenizer.encode(text), np.int32).reshape(-1)
    suffix = ids(_SUFFIX)
    if getattr(tokenizer, "chat_template", None) is not None:
      turn = [{"role": "user", "content": _MARK}]
      chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_names)
      text = chat.text(turn).partition(_MARK)[2]
      suffix = tokenizer.encode(text, special=True)
    return cls(ids(_FIRST), ids(_LATER), suffix)

  def texts(
    self, prompt: np.ndarray, prefix: int, chunk: int
  ) -> list[tuple[int, int, np.ndarray]]:
    """First and end of each chunk of a prompt, and what is read for it."""
    found = []
    for start in range(prefix, prompt.size, chunk):
      end = min(start + chunk, prompt.size)
      ask = [self.first]
      if start > prefix:
        ask = [self.later, prompt[start - min(chunk, _BEFORE) : start]]
      text = np.concatenate([*ask, self.suffix, prompt[start:end]])
      found.append((start, end, text.astype(np.int32)))
    return found


def check_repetition(
  model: Transformer, policy: KVzip, lengths: np.ndarray, asked: Instructions
) -> None:
  """Refuses a context that with its repetition is longer than the model's.

  Raises:
    PromptError: it is.
  """
  chunk = np.minimum(policy.chunk, lengths)
  words = max(asked.first.size, asked.later.size + _BEFORE) + asked.suffix.size
  total, most = int((lengths + chunk).max()) + words, model.config.longest
  if most is not None and total > most:
    raise PromptError(
      "tokens",
      f"{int(lengths.max()):,} tokens, of which {policy} repeats "
      f"{int(chunk.max()):,} at once behind them: {total:,} in all",
      f"at most {most:,}, the model's context by its {model.config.bound}",
      "repeat fewer at once, rj.kv.KVzip(chunk=256), or use another policy",
    )


def repeat(
  model: Transformer,
  cache: EvictingCache,
  prompts: list[np.ndarray],
  rows: np.ndarray,
  asked: Instructions,
  total: np.ndarray,
) -> Any:
  """The cache after an eviction by a repetition of these rows' prompts.

  Args:
    model: that has read them into the cache.
    cache: of a kind whose policy repeats, with these tokens alone in `rows`.
    prompts: int32 [T] each.
    rows: bool [B], which rows are repeated; the others keep all.
    asked: the instructions.
    total: tokens of the context, for rotations that depend on it.
  """
  policy: Any = cache.kind.policy
  texts = [
    asked.texts(prompt, policy.prefix, policy.chunk) if mine else []
    for prompt, mine in zip(prompts, rows, strict=True)
  ]
  count = max(map(len, texts))
  if not peaks.repeated_kinds(cache) or not count:
    return cache.flush()
  ends = np.array([p.size for p in prompts]) * rows
  longest = max(text.size for each in texts for _, _, text in each)
  shards, batch = cache.shards, cache.batch
  options = PrefillOptions(method="chunked", chunk=padded(longest, shards))
  cache = cache.with_room(
    np.full((batch, shards), padded(longest, shards) // shards)
  )
  scores: Any = None
  # Another budget compiles nothing.
  kind = dataclasses.replace(cache.kind, policy=policy.traced())
  held = dataclasses.replace(cache, kind=kind)
  for n in range(count):
    none = (0, 0, np.zeros(0, np.int32))
    mine = [each[n] if n < len(each) else none for each in texts]
    start, end, ids = zip(*mine, strict=True)
    how = options.plan(longest, model, cache.mesh, cache.axis, behind=True)
    (call,) = how.calls(ids, ends)
    at = [jnp.asarray(np.array(x, np.int32)) for x in (start, end, ends)]
    found = _peaks(
      model,
      how.attend,
      jnp.asarray(call.tokens),
      jnp.asarray(call.pos),
      jnp.asarray(call.seg),
      held,
      Chunk(*at),
      jnp.asarray(total, jnp.int32),
    )
    # A token is in one chunk, and gets 0 in the others.
    join = lambda x, y: jax.tree.map(jnp.maximum, x, y)
    scores = found if scores is None else join(scores, found)
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
) -> Any:
  """The scores of a chunk; the call's tokens are forgotten again."""
  watched = peaks.watching(cache, tokens.shape[1])
  rows = jnp.zeros((tokens.shape[0], 1), jnp.int32)
  _, after = forward(model, attend, tokens, pos, seg, watched, rows, length)
  return peaks.of_chunk(after, chunk)


@entering(lambda _, cache, *__, **___: getattr(cache, "mesh", None))
def evict_by_repetition(
  model: Transformer,
  cache: EvictingCache,
  tokens: Prompts,
  *,
  tokenizer: Any = None,
) -> Any:
  """The cache after an eviction by a policy that repeats the context.

  `generate` and `read_context` do so by themselves; for caches of your own.

  Args:
    model: that has read the tokens into the cache.
    cache: made by `model.init_cache` with a kind such as "kvzip".
    tokens: int32 [B, T], or B sequences of ids: all that the cache holds.
    tokenizer: encodes the request for a repetition; without one the context
      is repeated without a request.

  Raises:
    OptionError: a cache whose policy repeats nothing, or that holds other
      numbers of tokens.
    PromptError: tokens that with their repetition are longer than the model's
      context.
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
  sizes = np.array([p.size for p in prompts])
  sharding = CachedAttention(mesh=cache.mesh, axis=cache.axis)
  held = np.asarray(jax.jit(sharding.everywhere)(cache.length))
  if held.tolist() != sizes.tolist():
    raise OptionError(
      "tokens",
      f"rows of {sizes.tolist()} tokens",
      f"as many as the cache holds, {held.tolist()}",
      "pass all tokens that were read into it, and evict before any others",
    )
  asked = Instructions.of(tokenizer)
  policy: Any = kind.policy
  check_repetition(model, policy, sizes, asked)
  return repeat(
    model, cache, prompts, sizes > 0, asked, np.array(cache.capacity)
  )
