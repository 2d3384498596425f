"""Log-probabilities of a text's tokens, and embeddings of texts.

Guarantees: a text's numbers are those of a forward pass over it alone, up to
rounding: texts of a batch are padded, and padding is read by no token. A
token's log-probability and those of the likeliest tokens come from the same
float32 logits, so the likeliest token's is bit for bit the largest of `top`.
Cost: one forward pass for each text; the lengths of the passes are powers of
two, so that few programs are compiled. Logits exist for some tokens at a time.
Memory: activations of `batch_tokens` tokens, or of one text if it is longer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int, Int32

from ringjax.checks import integer, one_of, positive_int
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import OptionError
from ringjax.infer import inputs
from ringjax.infer.finite import not_finite_error
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.session import check_devices, place_of
from ringjax.kv.base import NoCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.simulated import SimulatedCache
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.nn.weights.placed_layers import naming_faults, raise_fault
from ringjax.parallel.layout import Uneven
from ringjax.parallel.mesh import entering
from ringjax.parallel.programs import bounded, make_room

POOLINGS = ("last", "mean")
# Tokens whose logits exist at the same time.
_LOGIT_TOKENS = 256
# Length of the shortest pass.
_SHORTEST = 16


def text_batches(
  lengths: Sequence[int], batch_tokens: int, batch_texts: int
) -> Iterator[tuple[list[int], int]]:
  """Numbers of the texts of each pass, longest first, and its length.

  The texts of a pass alone are one pass again.

  Args:
    lengths: Number of tokens of each text.
    batch_tokens: Maximum number of tokens of a pass of several texts.
    batch_texts: Maximum number of texts of a pass.
  """
  order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
  at = 0
  while at < len(order):
    width = max(_SHORTEST, 1 << (lengths[order[at]] - 1).bit_length())
    count, most = 1, min(batch_texts, len(order) - at)
    while count < most and 2 * count * width <= batch_tokens:
      count *= 2
    count = min(count, most)
    yield order[at : at + count], width
    at += count


class TokenScores(NamedTuple):
  """Log-probabilities of the tokens of a text after its first one.

  Fields:
    logprobs: Log-probability of each token after those before it, float32
      [T - 1].
    top_ids: Ids of the likeliest tokens at these places, likeliest first, int32
      [T - 1, k].
    top_logprobs: Log-probabilities of these tokens, float32 [T - 1, k].
  """

  logprobs: Float32[np.ndarray, " n"]
  top_ids: Int32[np.ndarray, "n k"]
  top_logprobs: Float32[np.ndarray, "n k"]

  def greedy(self, start: int = 0) -> bool:
    """Whether the tokens from place `start` on are the likeliest ones.

    Needs one likeliest token or more.
    """
    return bool(np.all(self.logprobs[start:] >= self.top_logprobs[start:, 0]))


class TextScorer:
  """Reads texts in batches, for their log-probabilities or embeddings.

  Attributes:
    model: Model that reads.
    batch_tokens: Maximum number of tokens of a forward pass, with padding, if
      it has more than one text.
  """

  def __init__(
    self,
    model: Transformer,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    prefill: str = "auto",
    cache_kind: CacheConfig | str | None = None,
    batch_tokens: int = 4096,
    batch_texts: int = 1024,
    around: Callable[
      [], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
  ):
    """Check the options.

    Args:
      model: Model from `rj.models.load` or `create`.
      mesh: Device mesh; default: the model's, else the current one.
      axis: Mesh axis that shards the sequence; default "seq" if it exists.
      prefill: Method of `rj.infer.METHODS` that reads a text at once, or
        "sparse:PATTERN"; "auto" is "striped" on a sharded sequence.
      cache_kind: Kind of cache with whose codec keys and values are encoded and
        decoded, so that the numbers are those of an answer with that cache;
        None for exact ones.
      batch_tokens: Maximum number of tokens of a forward pass.
      batch_texts: Maximum number of texts of a forward pass.
      around: Makes a context that each forward pass is within, such as
        `Engine.between_steps`; its program is compiled before.

    Raises:
      OptionError: If the method reads in chunks, or the kind has no codec or
        evicts.
      MeshError: If the weights are on other devices than those of the mesh.
    """
    self.model = model
    self.batch_tokens = positive_int("batch_tokens", batch_tokens)
    self._batch_texts = positive_int("batch_texts", batch_texts)
    self._around = around
    self._mesh, self._axis = place_of(mesh, axis, model)
    check_devices(model, self._mesh)
    size = 1 if self._axis is None else self._mesh.shape[self._axis]
    if prefill == "auto":
      prefill = "striped" if size > 1 else "blockwise"
    self._prefill = PrefillConfig(method=prefill)
    self._cache: SimulatedCache | None = None
    if cache_kind is not None:
      self._cache = SimulatedCache.create(model, cache_kind)
    self._plan(_SHORTEST)

  def scores(
    self,
    texts: Sequence[TokenIds],
    *,
    top: int = 1,
    adapter: int | None = None,
    on_batch: Callable[[int], Any] = lambda texts: None,
  ) -> list[TokenScores]:
    """Log-probabilities of the tokens of texts.

    Args:
      texts: Token ids of each text, int32 [T].
      top: Number of likeliest tokens to return at each place, k.
      adapter: Number of the adapter of the texts, 0 for none, of a model with
        adapters (`rj.train.with_adapters`); None for other models.
      on_batch: Function of the number of texts read so far, called after each
        forward pass; an error that it raises ends the call.

    Raises:
      PromptError: If a text is empty, or has an id that the model lacks.
      NotFiniteLogitsError: If log-probabilities are NaN.
    """
    integer("top", top, least=0, most=self.model.config.vocab)
    results: list[Any] = [None] * len(texts)
    for numbers, batch in self._read(texts, top, "", adapter, on_batch):
      for number, ids, row in zip(
        numbers, (texts[n] for n in numbers), batch, strict=False
      ):
        values = row[: len(ids) - 1]
        if np.isnan(values[:, 0]).any():
          at = 1 + int(np.argmax(np.isnan(values[:, 0])))
          raise not_finite_error({number: at}, self.model.dtype, unit="text")
        ids_of_top = values[:, 1 + top :].astype(np.int32)
        results[number] = TokenScores(
          values[:, 0], ids_of_top, values[:, 1 : 1 + top]
        )
    return results

  def embeddings(
    self,
    texts: Sequence[TokenIds],
    *,
    pooling: str = "last",
    adapter: int | None = None,
    on_batch: Callable[[int], Any] = lambda texts: None,
  ) -> Float32[np.ndarray, "N D"]:
    """Embeddings of texts: pooled hidden states of length 1, float32 [N, D].

    Args:
      texts: Token ids of each text, int32 [T].
      pooling: "last" for the hidden state of the last token, after the last
        norm, or "mean" for the mean of all tokens.
      adapter: Number of the adapter, as of `scores`.
      on_batch: Function of the number of texts read so far, as of `scores`.

    Raises:
      OptionError: If `pooling` is unknown.
      PromptError: If a text is empty, or has an id that the model lacks.
      NotFiniteLogitsError: If an embedding is NaN or infinite.
    """
    one_of("pooling", pooling, POOLINGS)
    rows: list[Any] = [None] * len(texts)
    for numbers, batch in self._read(texts, 0, pooling, adapter, on_batch):
      for number, row in zip(numbers, batch, strict=False):
        if not np.isfinite(row).all():
          at = len(texts[number]) - 1
          raise not_finite_error(
            {number: at}, self.model.dtype, unit="text", name="embedding"
          )
        rows[number] = row
    return np.stack(rows)

  def _plan(self, length: int) -> Any:
    """Prefill of a pass of this length.

    Raises:
      OptionError: If it reads in chunks or uneven parts.
    """
    plan = self._prefill.plan(length, self.model, self._mesh, self._axis)
    if plan.chunk is not None or isinstance(plan.attend.layout, Uneven):
      raise OptionError(
        "prefill",
        repr(self._prefill.method),
        "a method that reads a text at once, in even parts",
        "pass prefill='striped', for instance, or leave it out",
      )
    if self._cache is None or not self._cache.kind.exact:
      return plan
    if plan.attend.size > 1:
      raise OptionError(
        "cache_kind",
        f"{self._cache.kind} with exact tokens, on a sharded sequence",
        "one device, or a kind that encodes all tokens",
        "leave the exact tokens out, or pass no mesh",
      )
    cached = CachedAttention(mesh=self._mesh, axis=self._axis)
    return dataclasses.replace(plan, attend=cached)

  @entering(lambda scorer, *_, **__: scorer._mesh)
  def _call(
    self, texts: list[np.ndarray], width: int, *options: Any
  ) -> np.ndarray:
    """Results of one pass, [B, T, ...] by token or [B, D]."""
    top, pooling, adapter = options
    plan = self._plan(width)
    attend, size = plan.attend, plan.attend.size
    rows = 1 << (len(texts) - 1).bit_length()
    rows = -(-rows // attend.data_size) * attend.data_size
    tokens, segments, labels = np.zeros((3, rows, plan.width), np.int32)
    last = np.zeros(rows, np.int32)
    for n, ids in enumerate(texts):
      tokens[n, : ids.size], segments[n, : ids.size] = ids, 1
      labels[n, : ids.size - 1] = ids[1:]
      last[n] = ids.size - 1
    permuted = [
      attend.layout.permute(x, shards=size) for x in (tokens, segments, labels)
    ]
    numbers = None if adapter is None else np.full(rows, adapter, np.int32)
    # Places of the last tokens in the layout's order.
    order = attend.layout.permute(np.arange(plan.width)[None], shards=size)
    last = np.argsort(order[0])[last].astype(np.int32)
    arguments = (
      *(self.model, attend, self._cache, *permuted),
      *(last, numbers, top, pooling),
    )
    make_room()
    # Compiled before the context, in which an engine's answers wait.
    _read_texts.lower(*arguments).compile()
    with naming_faults(self.model.stack.faults), self._around():
      values = np.asarray(jax.device_get(_read_texts(*arguments)))
    raise_fault(self.model.stack.faults)
    if pooling:
      return values
    return attend.layout.restore(values, shards=size)

  def _read(
    self,
    texts: Sequence[TokenIds],
    top: int,
    pooling: str,
    adapter: int | None,
    on_batch: Callable[[int], Any],
  ) -> Iterator[tuple[list[int], np.ndarray]]:
    """Numbers of the texts of each pass, and its results."""
    vocab = self.model.config.vocab
    rows = [inputs.prompt(ids, vocab) for ids in texts]
    for ids in rows:
      inputs.within_context(
        self.model.config, ids.size, f"a text of {ids.size:,} tokens"
      )
    num_read = 0
    lengths = [ids.size for ids in rows]
    for numbers, width in text_batches(
      lengths, self.batch_tokens, self._batch_texts
    ):
      batch = [rows[n] for n in numbers]
      values = self._call(batch, width, top, pooling, adapter)
      yield numbers, values
      num_read += len(numbers)
      on_batch(num_read)


@bounded
@functools.partial(jax.jit, static_argnums=(1, 8, 9))
def _read_texts(
  model: Transformer,
  attend: ShardingContext,
  cache: SimulatedCache | None,
  tokens: Int[Array, "B T"],
  segments: Int[Array, "B T"],
  labels: Int[Array, "B T"],
  last: Int[Array, " B"],
  adapters: Int[Array, " B"] | None,
  top: int,
  pooling: str,
) -> Float[Array, "B ..."]:
  """Embeddings [B, D], or of each token what `_token_scores` returns.

  Args:
    model: Model that reads.
    attend: Sharding of the tokens.
    cache: Cache that applies a codec and stores nothing, or None.
    tokens: Token ids, int32 [B, T], in the layout's order, as all of these.
    segments: 1 for tokens, 0 for padding, int32 [B, T].
    labels: Id of the token after each, int32 [B, T].
    last: Place of each row's last token, int32 [B].
    adapters: Adapter of each row, int32 [B], or None.
    top: Number of likeliest tokens.
    pooling: One of `POOLINGS`, or "" for scores.
  """
  places = tokens_of(model, attend, tokens.shape, None, segments, None)
  no_cache = NoCache(len(model.kinds)) if cache is None else cache
  call_cache: Any = no_cache.allocate(
    places.at, replicated=False, sees=True, tokens=tokens
  )
  with adapter_rows(adapters):
    h, _ = model.hidden(tokens, places, call_cache, attend)
    if pooling:
      return attend.everywhere(_pooled(h, segments, last, pooling))
    # Ids below 2 ** 24 are exact in float32.
    x = jnp.concatenate(
      [h.astype(jnp.float32), labels[..., None].astype(jnp.float32)], -1
    )
    block = max(1, _LOGIT_TOKENS // tokens.shape[0])
    blocks = dataclasses.replace(attend, block=block)
    score = functools.partial(_token_scores, model, h.dtype, top)
    return attend.everywhere(blocks.rowwise(score, x))


def _token_scores(
  model: Transformer, dtype: Any, top: int, x: Float[Array, "*B D1"]
) -> Float[Array, "*B n"]:
  """Log-probabilities of labels and of the likeliest tokens, and their ids.

  Args:
    model: Model with the head.
    dtype: Dtype of the hidden states.
    top: Number of likeliest tokens, k.
    x: Hidden states and labels, float32 [..., D + 1].

  Returns:
    Float32 [..., 1 + 2 k].
  """
  logits = model.logits(x[..., :-1].astype(dtype)).astype(jnp.float32)
  labels = x[..., -1:].astype(jnp.int32)
  total = jax.nn.logsumexp(logits, -1, keepdims=True)
  label_logits = jnp.take_along_axis(logits, labels, -1)
  parts = [label_logits - total]
  if top:
    top_logits, ids = jax.lax.top_k(logits, top)
    parts += [top_logits - total, ids.astype(jnp.float32)]
  return jnp.concatenate(parts, -1)


def _pooled(
  h: Float[Array, "B T D"],
  segments: Int[Array, "B T"],
  last: Int[Array, " B"],
  pooling: str,
) -> Float[Array, "B D"]:
  """Embeddings of hidden states, of length 1, float32 [B, D]."""
  if pooling == "last":
    pooled = jnp.take_along_axis(h, last[:, None, None], 1)[:, 0]
    pooled = pooled.astype(jnp.float32)
  else:
    weights = (segments > 0).astype(jnp.float32)[..., None]
    total = jnp.sum(h.astype(jnp.float32) * weights, 1)
    pooled = total / jnp.maximum(jnp.sum(weights, 1), 1.0)
  length = jnp.linalg.norm(pooled, axis=-1, keepdims=True)
  return pooled / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)
