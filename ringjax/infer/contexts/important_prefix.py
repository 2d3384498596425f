"""Sessions on the important tokens of prefixes in a store (IMPRESS).

Guarantees: with important=1 a session answers as one that read the prefix. The
tokens kept of a prefix depend only on the prefix and on the question: neither
on other rows nor on whether the store had the prefix.
Cost: for a prefix that is not in the store, its prefill. For a stored prefix,
in each layer a read of the keys of a few probe heads, then of the chunks with
important tokens (`ringjax.store.importance`); the question's tokens pass
through the model once to choose and once more when they are read.
Memory: the kept tokens on the device, and a layer of the prefix on the host;
for a prefix that is not in the store, its cache.
Lossy: tokens that are not kept are left out of the softmax, for the question
and the answer alike.

Tokens are chosen layer by layer, since the queries of a layer depend on the
kept tokens of the layers before it. Kept keys include their rotation and need
no separate position: tokens of different layers and heads share slots that are
all before the question.
Ref: Chen et al. 2025, IMPRESS (FAST).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from ringjax.kv.cache import Blocks, LayerKV
from ringjax.kv.context_cache import (
  ContextCache,
  PlacedContext,
  exported,
  placed,
  slots_for,
)
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
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
from ringjax.store.importance import heads_of_layers


class ImportantPrefixes:
  """Prefixes in a store; a session loads the tokens its question attends to.

  Attributes:
    model: The model that reads them.
    store: The store that keeps them.
    important: Part of a prefix's tokens that is kept.
    counters: Counts of what was loaded, an `ImpressCounters`.
    computed: Number of tokens of prefixes that were not in the store.
    reused: Number of tokens of prefixes that were in the store.
  """

  def __init__(
    self,
    model: Transformer,
    store: Store,
    *,
    important: int | float = 0.25,
    alpha: int | float = 0.6,
    chunk: int = 32,
    probes: int | Int[np.ndarray, "L P"] = 3,
  ):
    """Checks the arguments; nothing is read or compiled yet.

    Args:
      model: Model made by `rj.models.load` or `create`, on one device.
      store: An `rj.store.Store` with room for at least one prefix.
      important: Fraction of a prefix's tokens to keep, above 0, at most 1.
      alpha: Exponent of the threshold above which probes are trusted, see
        `rj.store.overlap_threshold`.
      chunk: Number of tokens in a chunk.
      probes: Number of probe heads, the first ones, or the heads of each
        layer, as `probe_heads` chooses them.

    Raises:
      InputTypeError: If `store` is not an `rj.store.Store`.
      OptionError: If a value is out of its range, or the model is spread over
        devices or partly outside them.
      ConfigError: If attention layers are more than a causal softmax, or
        differ in their heads.
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
    self._programs = _programs(model)
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
    """Makes a session with the important tokens of each row's prefix.

    Ask it by `rj.infer.generate(model, questions, cache=session)`.

    Args:
      prefixes: Token ids of each row's prefix, int [m].
      questions: Token ids of the question after each prefix, int [T], whose
        queries choose the tokens.
      capacity: Maximum tokens of a row after its prefix, with the answer.

    Raises:
      PromptError: If the numbers of prefixes and questions differ, ids are
        outside the vocabulary, or a row exceeds the model's context.
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
      description = (
        f"{text.size:,} tokens of a prefix and {capacity:,} behind it"
      )
      inputs.within_context(model.config, text.size + capacity, description)
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
    """Makes a session with the given kept tokens of each row's prefix.

    Args:
      prefixes: Token ids of each row's prefix, int32 [m].
      kept: Kept tokens of each row by layer, as `keep` returns them.
      capacity: Maximum tokens of a row after its prefix, with the answer.
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
    """Chooses the tokens that each layer keeps of a prefix, for a question.

    Args:
      text: Token ids of the prefix, int32 [m].
      question: Token ids of the question, int32 [T].

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
        # A block was damaged, or another thread's blocks evicted it.
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
    """Chooses the tokens each layer keeps, by the question's queries."""
    work = Impress(node, keep=self.important, alpha=self._alpha)
    work.counters = self.counters
    kept_tokens = []

    def attend(number: int, q: Any, k: Any, v: Any, scale: float) -> Any:
      mixed, tokens = work.attend(number, q, k, v, scale=scale)
      kept_tokens.append(tokens)
      return mixed

    _through(self._programs, question, node.tokens, self._dtype, attend)
    name = prefix_key(self._origin, (), text)
    count, mean = self._seen.get(name, (0, np.zeros_like(work.importance)))
    mean = mean + (work.importance - mean) / (count + 1)
    self._seen[name] = count + 1, mean
    return kept_tokens

  def reorder(self, text: Int[np.ndarray, " m"]) -> None:
    """Packs the tokens of a prefix by the attention of earlier questions.

    Later questions then read fewer chunks for the same tokens. Call it between
    requests; see `StoredNode.reorder`.

    Args:
      text: Token ids of a prefix for which this object made a session.

    Raises:
      PromptError: If no question was asked about the prefix.
      MissingChunk: If the store does not have the complete prefix.
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
    """Node of a prefix in the store; written if `arrays` (k, v) are given."""
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
    """Places the kept tokens of all layers in the slots before a question."""
    kinds: dict[int, list[KeptTokens]] = {}
    for layer, x in zip(self._programs.layers, kept, strict=True):
      kinds.setdefault(layer.kind, []).append(x)
    stacked: Any = lambda layers_kept, part: np.stack(
      [getattr(x, part) for x in layers_kept]
    )
    parts = tuple(
      LayerKV(stacked(layers_kept, "keys"), stacked(layers_kept, "values"))
      for _, layers_kept in sorted(kinds.items())
    )
    count = kept[0].tokens.shape[1]
    # The last position is the one before the question's first token.
    positions: Any = np.arange(tokens - count, tokens, dtype=np.int32)
    coords = Coords(positions, np.ones_like(positions))
    return PlacedContext(Blocks(coords, parts, self._kind), positions)


def probe_heads(
  model: Transformer,
  prefixes: Sequence[Any],
  questions: Sequence[Any],
  *,
  count: int,
  important: int | float = 0.25,
) -> Int[np.ndarray, "L P"]:
  """Chooses the heads whose important tokens best match those of all heads.

  The paper takes the first heads; models with grouped queries have few key
  heads, which differ.

  Args:
    model: Model made by `rj.models.load` or `create`, on one device.
    prefixes: Token ids of each prefix, int [m].
    questions: Token ids of the question after each prefix, int [T].
    count: Number of heads per layer, P; all heads if the model has fewer.
    important: Fraction of the tokens that would be kept.

  Raises:
    RingjaxError: If `ImportantPrefixes` refuses an argument.
  """
  count = positive_int("count", count)
  total: Any = None
  for text, question in zip(prefixes, questions, strict=True):
    with Store(host=1 << 40) as store:
      # With alpha=0 and all heads as probes each head keeps its own tokens.
      work = ImportantPrefixes(
        model, store, important=important, alpha=0, probes=1 << 20
      )
      prompts = inputs.prompts([text, question], model.config.vocab)
      kept_tokens = work.keep(*prompts)
    heads = range(len(kept_tokens[0].tokens))
    similarity = [
      [sum(mean_jaccard(x.tokens[[a, b]]) for b in heads) for a in heads]
      for x in kept_tokens
    ]
    total = np.array(similarity) + (0 if total is None else total)
  if total is None:
    raise PromptError(
      "prefixes", "none", "at least one", "pass a few texts of the kind served"
    )
  best = np.argsort(-total, axis=1, kind="stable")[:, :count]
  return np.sort(best, axis=1)


def _through(
  programs: LayerPrograms,
  question: np.ndarray,
  first: int,
  dtype: Any,
  attend: Any,
) -> Float[jax.Array, "1 T D"]:
  """Runs tokens at positions from `first` on through all layers."""
  span = TokenSpan(
    np.int32(first), np.int32(question.size), np.int32(first + question.size)
  )
  x = programs.embed(programs.outer, jnp.asarray(question)[None])
  for layer in programs.layers:
    weights = programs.weights(layer)
    mixer: Any = layer.spec.attention
    q, k, v = programs.project(layer.spec, weights, x, span, dtype)
    heads_first = (jnp.swapaxes(part[0], 0, 1) for part in (k, v))
    mixed = attend(layer.number, q[0], *heads_first, mixer.logit_scale)
    x = programs.finish(layer.spec, weights, x, mixed[None], span)
  return x


def _programs(model: Transformer) -> LayerPrograms:
  """Programs of the model's layers; refuses all but plain causal softmax.

  Raises:
    InputTypeError, OptionError, ConfigError: If `ImportantPrefixes` does not
      support the model.
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
