"""Sessions after the important part of prefixes that are in a store: IMPRESS.

Guarantees: with important=1 a session answers as one that read the prefix. What
is kept of a prefix is a function of the prefix and of the tokens after it:
neither other rows nor whether the store had the prefix matter.
Cost: for a prefix that is not in the store, its prefill. For one that is there,
of each layer the keys of a few probe heads, then the chunks in which important
tokens are (`ringjax.store.impress.importance`); the question's tokens pass
through the model once to choose and once more when they are read.
Memory: the kept tokens on the device, and a layer of the prefix on the host;
for one that is not in the store, its cache.
Lossy: what is not kept is left out of the softmax, for the question and the
answer alike.

The choice is made layer by layer, since the queries of a layer are what the
layers before it made of their kept tokens. A kept key is as attention reads it,
with its rotation, so that its position is not needed: tokens of different
layers and heads share slots that are all before the question.
Ref: Chen et al. 2025, IMPRESS (FAST).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from ringjax.checks import number, positive_int
from ringjax.errors import ConfigError, InputTypeError, OptionError, PromptError
from ringjax.infer import inputs
from ringjax.infer.contexts.context_library import (
  cache_spec,
  context_kind,
  context_origin,
  prefix_key,
)
from ringjax.infer.layerwise import LayerPrograms, TokenSpan
from ringjax.infer.prefill import padded
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.session import Session
from ringjax.kv.composed.context_cache import (
  ContextCache,
  PlacedContext,
  exported,
  placed,
  slots_for,
)
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.storage.exported_blocks import Blocks
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.ops.mask import Causal, Coords
from ringjax.store import (
  Impress,
  ImpressCounters,
  KeptTokens,
  MissingChunk,
  Store,
  StoredNode,
  mean_jaccard,
)
from ringjax.store.impress.importance import heads_of_layers


class ImportantPrefixes:
  """Prefixes in a store, of which a session gets what its question looks at.

  Attributes:
    model: The model that reads them.
    store: The store that keeps them.
    important: Part of a prefix's tokens that is kept.
    counters: Counts of what was loaded, an `ImpressCounters`.
    computed: Number of tokens of prefixes that were not in the store.
    reused: Number of tokens of prefixes that were.
  """

  def __init__(
    self,
    model: Transformer,
    store: Store,
    *,
    important: int | float = 0.25,
    alpha: int | float = 0.6,
    chunk: int = 32,
    probes: int | Int[np.ndarray, "*layers P"] = 3,
  ):
    """Prepares; nothing is read or compiled yet.

    Args:
      model: Model of `rj.models.load` or `create`, on one device.
      store: Store of type `rj.store.Store`, with room for at least one prefix.
      important: Part of a prefix's tokens to keep, above 0, at most 1.
      alpha: Exponent of the threshold above which probes are believed, see
        `rj.store.overlap_threshold`.
      chunk: Tokens of a chunk.
      probes: Number of probe heads, the first ones, or heads: int [P] of
        every layer, or [L, P], as `probe_heads` chooses them.

    Raises:
      InputTypeError: If `store` has another type.
      OptionError: If a value is out of its range, or the model is spread over
        devices or not all on them.
      ConfigError: If the attention of a layer is more than a causal softmax,
        or layers differ in their heads.
    """
    if not isinstance(store, Store):
      raise InputTypeError(
        "store",
        type(store).__name__,
        "an rj.store.Store",
        "make one with rj.store.Store(host=1 << 30)",
      )
    self.important = number("important", important, above=0)
    if important > 1:
      raise OptionError(
        "important", important, "a part, at most 1", "pass 1 for all tokens"
      )
    self._alpha = number("alpha", alpha, least=0)
    self._chunk = positive_int("chunk", chunk)
    self.model, self.store = model, store
    self._programs = softmax_layers(model)
    layers = self._programs.layers
    mixer: Any = layers[0].spec.attention
    self._probes = heads_of_layers(probes, len(layers), mixer.kv_heads)
    self._kind = context_kind(model, "dense")
    self._dtype = np.dtype(model.dtype)
    self._origin = context_origin(model, self._kind, self._dtype)
    self.counters = ImpressCounters()
    self.computed = self.reused = 0
    self._seen: dict[bytes, tuple[int, Any]] = {}

  def session(
    self,
    prefixes: Sequence[Any],
    questions: Sequence[Any],
    *,
    capacity: int,
  ) -> Session:
    """A session that holds what is important of each row's prefix.

    Ask it by `rj.infer.generate(model, questions, cache=session)`.

    Args:
      prefixes: Token ids of each row's prefix, int [m].
      questions: Token ids after each prefix, int [T], by whose queries tokens
        are chosen.
      capacity: Number of tokens of a row after its prefix, the answer too.

    Raises:
      PromptError: If the numbers of prefixes and questions differ, an id is
        not in the vocabulary, or a row has more tokens than the context.
      OptionError: If the store has no room for a prefix.
    """
    model, vocab = self.model, self.model.config.vocab
    capacity = positive_int("capacity", capacity)
    texts = inputs.prompts(prefixes, vocab)
    question_tokens = inputs.prompts(questions, vocab)
    if len(texts) != len(question_tokens):
      raise PromptError(
        "questions",
        f"{len(question_tokens)} for {len(texts)} prefixes",
        "one for each prefix",
        "pass a prefix and a question for each row",
      )
    for text in texts:
      came = f"{text.size:,} tokens of a prefix and {capacity:,} after it"
      inputs.within_context(model.config, text.size + capacity, came)
    kept_tokens = [
      self.keep(*row) for row in zip(texts, question_tokens, strict=True)
    ]
    return self.behind(texts, kept_tokens, capacity=capacity)

  def behind(
    self,
    prefixes: Sequence[Int[np.ndarray, " _"]],
    kept: Sequence[list[KeptTokens]],
    *,
    capacity: int,
  ) -> Session:
    """A session that holds these tokens of each row's prefix.

    Args:
      prefixes: Token ids of each row's prefix, int32 [m].
      kept: Kept tokens of each layer for each row, as of `keep`.
      capacity: Number of tokens of a row after its prefix, the answer too.
    """
    texts, model = prefixes, self.model
    rows = [
      [self._placed(tokens, text.size)]
      for text, tokens in zip(texts, kept, strict=True)
    ]
    session = Session(
      model,
      padded(capacity, 1) + 1,
      batch=len(rows),
      dtype=self._dtype,
      cache_kind=self._kind,
    )
    room = slots_for([[row[0].pos.size] for row in rows], 1)
    spec = cache_spec(model, session, len(rows), room)
    contexts, _ = placed(spec, rows)
    longest = max(text.size for text in texts)
    session.cache = ContextCache(
      open=session.cache,
      kind=session.cache.kind,
      limit=longest + capacity,
      contexts=contexts,
    )
    for seen, text in zip(session.seen, texts, strict=True):
      seen[text] = True
    return session

  def keep(
    self, text: Int[np.ndarray, " m"], question: Int[np.ndarray, " T"]
  ) -> list[KeptTokens]:
    """Chooses the tokens of a prefix that each layer keeps, for a question.

    Args:
      text: Token ids of the prefix, int32 [m].
      question: Token ids after it, int32 [T].

    Raises:
      OptionError: If the store has no room for the prefix.
    """
    node = self._node(text)
    if node.whole:
      try:
        kept_tokens = self._choose(node, text, question)
        self.reused += text.size
        return kept_tokens
      except MissingChunk:
        # A block was damaged, or another thread's blocks took its room.
        pass
    arrays = self.read(text)
    self.computed += text.size
    node = self._node(text, arrays)
    try:
      return self._choose(node, text, question)
    except MissingChunk as fault:
      raise OptionError(
        "store",
        f"one that has let go of a part of a prefix of {node.nbytes:,} bytes "
        f"({fault})",
        "room for at least one prefix",
        "make a larger one",
      ) from None

  def read(
    self, text: Int[np.ndarray, " m"]
  ) -> tuple[Shaped[np.ndarray, "L K m H"], Shaped[np.ndarray, "L K m J"]]:
    """Computes the keys and values of a prefix.

    Args:
      text: Token ids of the prefix.
    """
    session = Session(
      self.model,
      padded(text.size, 1) + 1,
      dtype=self._dtype,
      cache_kind=self._kind,
    )
    read_context(self.model, [text], cache=session)
    (blocks,) = exported(session.cache, [(0, 0, text.size)])
    layers = [(x.kind, x.index) for x in self._programs.layers]
    keys, values = (
      np.stack([getattr(blocks.parts[kind], part)[n] for kind, n in layers])
      for part in ("k", "v")
    )
    return keys, values

  def _choose(
    self, node: StoredNode, text: np.ndarray, question: np.ndarray
  ) -> list[KeptTokens]:
    """Chooses the tokens that layers keep by the queries of the question."""
    work = Impress(node, keep=self.important, alpha=self._alpha)
    work.counters = self.counters
    kept_tokens = []

    def attend(
      number: int, q: jax.Array, k: jax.Array, v: jax.Array, scale: float
    ) -> jax.Array:
      mixed, tokens = work.attend(number, q, k, v, scale=scale)
      kept_tokens.append(tokens)
      return mixed

    through_layers(self._programs, question, node.tokens, self._dtype, attend)
    name = prefix_key(self._origin, (), text)
    count, mean = self._seen.get(name, (0, np.zeros_like(work.importance)))
    mean = mean + (work.importance - mean) / (count + 1)
    self._seen[name] = count + 1, mean
    return kept_tokens

  def reorder(self, text: Int[np.ndarray, " m"]) -> None:
    """Packs the tokens of a prefix by how much questions looked at them.

    Later questions then read fewer chunks for the same tokens. Call it between
    requests; see `StoredNode.reorder`.

    Args:
      text: Token ids of a prefix that this object was asked about.

    Raises:
      PromptError: If there was no question about the prefix.
      MissingChunk: If the store does not have all of it.
    """
    name = prefix_key(self._origin, (), text)
    if name not in self._seen:
      raise PromptError(
        "text",
        f"a prefix of {text.size:,} tokens without questions",
        "one that a session was made behind",
        "ask about it first",
      )
    self._node(text).reorder(self._seen[name][1])

  def _node(self, text: np.ndarray, arrays: Any = None) -> StoredNode:
    """A prefix in the store: written, if its keys and values are given."""
    layers = self._programs.layers
    mixer: Any = layers[0].spec.attention
    if arrays is None:
      shape = len(layers), mixer.kv_heads, text.size
      arrays = [
        jax.ShapeDtypeStruct((*shape, size), self._dtype)
        for size in (mixer.head_dim, mixer.value)
      ]
    name = prefix_key(self._origin, (), text)
    return StoredNode(
      self.store, name, *arrays, chunk=self._chunk, probes=self._probes
    )

  def _placed(self, kept: list[KeptTokens], tokens: int) -> PlacedContext:
    """The kept tokens of all layers, in the slots before a question."""
    kinds: dict[int, list[KeptTokens]] = {}
    for layer, x in zip(self._programs.layers, kept, strict=True):
      kinds.setdefault(layer.kind, []).append(x)
    stacked: Any = lambda of, part: np.stack([getattr(x, part) for x in of])
    parts = tuple(
      LayerKV(stacked(of, "keys"), stacked(of, "values"))
      for _, of in sorted(kinds.items())
    )
    count = kept[0].tokens.shape[1]
    # All of them are before the question; the last one says where that begins.
    at: Any = np.arange(tokens - count, tokens, dtype=np.int32)
    coords = Coords(at, np.ones_like(at))
    return PlacedContext(Blocks(coords, parts, self._kind), at)


def probe_heads(
  model: Transformer,
  prefixes: Sequence[Any],
  questions: Sequence[Any],
  *,
  count: int,
  important: int | float = 0.25,
) -> Int[np.ndarray, "L P"]:
  """The heads of each layer whose important tokens are most like all heads'.

  The paper takes the first ones; models whose heads share keys have few, which
  differ.

  Args:
    model: Model of `rj.models.load` or `create`, on one device.
    prefixes: Token ids of each text, int [m].
    questions: Token ids after each text, int [T].
    count: Number of heads, P; of models with fewer, all.
    important: Part of the tokens that would be kept.

  Raises:
    RingjaxError: as of `ImportantPrefixes`.
  """
  count = positive_int("count", count)
  total = None
  for text, question in zip(prefixes, questions, strict=True):
    with Store(host=1 << 40) as store:
      # A threshold that is never passed: each head keeps its own.
      work = ImportantPrefixes(
        model, store, important=important, alpha=0, probes=1 << 20
      )
      prompts = inputs.prompts([text, question], model.config.vocab)
      kept_tokens = work.keep(*prompts)
    heads = range(len(kept_tokens[0].tokens))
    like = [
      [sum(mean_jaccard(x.tokens[[a, b]]) for b in heads) for a in heads]
      for x in kept_tokens
    ]
    total = np.array(like) + (0 if total is None else total)
  if total is None:
    raise PromptError(
      "prefixes", "none", "at least one", "pass a few texts of the kind served"
    )
  best = np.argsort(-total, axis=1, kind="stable")[:, :count]
  return np.sort(best, axis=1)


def through_layers(
  programs: LayerPrograms,
  question: Int[np.ndarray, " T"],
  first: int,
  dtype: DTypeLike,
  attend: Callable[..., Any],
  *,
  multiple: int = 1,
) -> Float[jax.Array, "1 _ D"]:
  """Tokens at positions from `first` on through all layers, by `attend`.

  Args:
    programs: Layers as of `softmax_layers`.
    question: Token ids.
    first: Position of the first one.
    dtype: Dtype of keys and values.
    attend: Function of a layer's number, its queries [T, N, H], keys
      [T, K, H], values [T, K, J] and its scale; returns [T, N, J].
    multiple: Number to a multiple of which T is padded after the question, so
      that few programs are compiled.
  """
  span = TokenSpan(
    np.int32(first), np.int32(question.size), np.int32(first + question.size)
  )
  question = np.pad(question, (0, -question.size % multiple))
  x = programs.embed(jnp.asarray(question)[None])
  for layer, weights in programs.walk():
    mixer: Any = layer.spec.attention
    q, k, v = programs.project(layer.spec, weights, x, span, dtype)
    turned = (jnp.swapaxes(part[0], 0, 1) for part in (k, v))
    mixed = attend(layer.number, q[0], *turned, mixer.logit_scale)
    x = programs.finish(layer.spec, weights, x, mixed[None], span)
  return x


def softmax_layers(model: Transformer) -> LayerPrograms:
  """The model's layers, whose attention is a causal softmax and nothing else.

  Args:
    model: Model on one device.

  Raises:
    InputTypeError, OptionError, ConfigError: see `ImportantPrefixes`.
  """
  if not isinstance(model, Transformer):
    raise InputTypeError(
      "model",
      type(model).__name__,
      "an rj.models.Transformer",
      "make one with rj.models.load",
    )
  refuse_placed(model, "choose important tokens", "load it without placement=")
  if model.mesh is not None and model.mesh.size > 1:
    raise OptionError(
      "model",
      f"one on {model.mesh.size} devices, to choose important tokens",
      "a model on one device",
      "load it on one, as with --mesh=seq:1",
    )
  programs = LayerPrograms(model)
  shapes = set()
  for layer in programs.layers:
    mixer: Any = layer.spec.attention
    faults = [
      name
      for name, wrong in (
        (f"mask {mixer.mask}", mixer.mask != Causal()),
        ("soft_cap", mixer.soft_cap is not None),
        ("sinks", mixer.sinks),
        ("ALiBi", mixer.alibi is not None),
        (
          "rotations by the context's length",
          any(rope.scaling.by_length for rope in mixer.ropes),
        ),
      )
      if wrong
    ]
    if faults:
      raise ConfigError(
        "model",
        f"{model.config.family}, whose layer {layer.number} has "
        + ", ".join(faults),
        "layers whose attention is a causal softmax over all tokens",
        "read the prefix into an rj.infer.Session",
      )
    shapes.add((mixer.kv_heads, mixer.head_dim))
  if len(shapes) > 1:
    raise ConfigError(
      "model",
      f"{model.config.family}, whose layers have different heads: "
      f"{sorted(shapes)}",
      "layers of as many heads and of one width",
      "read the prefix into an rj.infer.Session",
    )
  return programs
