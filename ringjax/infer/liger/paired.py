"""Two requests in one program: products of one hide the sends of the other.

Both may be prompts (`paired_prefill`), or one is a prompt, read in chunks
while the other decodes (`prefill_beside`).

Guarantees: logits and caches are those of two calls, up to the order of sums.
Cost: the products and sends of both. Under tensor parallelism a layer sums over
its shards twice, and products have to wait; here a layer runs for one prompt
and then for the other, and the sums are sends (`nn.weights.split_sums`), so
that a compiler with asynchronous sends overlaps those of one prompt with the
products of the other.
Memory: both caches, and the activations of both prompts in a layer.
Ref: Du et al. 2024, Liger (PPoPP), whose kernels are scheduled while they run;
`plan.systems.kernel_window` simulates that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, MeshError, OptionError, PromptError
from ringjax.infer import decode, inputs
from ringjax.infer.decode import DecodeState
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.generate import Generated, RowEndings
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import Prefill, PrefillConfig
from ringjax.infer.prompt_reading import (
  check_call,
  check_context,
  check_session,
)
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import Session, on_its_mesh, place_of
from ringjax.infer.stopping import StopLike
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import CallCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.feedforward import Gated, Plain
from ringjax.nn.linear import Linear
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.weights.split_sums import CachedSplitSums, SplitSums
from ringjax.parallel.programs import bounded
from ringjax.typing import Lengths

_MODEL = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedReading:
  """Two requests whose prompts were read.

  Attributes:
    logits: Logits after the last tokens of each request, float32 [B, V].
    sessions: Session of each request, for `generate(..., cache=session)`.
  """

  logits: tuple[jax.Array, jax.Array]
  sessions: tuple[Session, Session]


class PairedCall(NamedTuple):
  """The tokens of one of two requests.

  Fields:
    tokens: Token ids, int32 [B, T].
    seg: Segments, int32 [B, T], 0 for padding.
    rows: Index of each prompt's last token among the T, int32 [B].
    length: Length of the prompts, for rotations that depend on it.
  """

  tokens: Int[Array, "B T"]
  seg: Int[Array, "B T"]
  rows: Int[Array, " B"]
  length: Lengths


@on_its_mesh
def paired_prefill(
  model: Transformer,
  first: Prompts,
  second: Prompts,
  *,
  mesh: Mesh | None = None,
  capacity: int | None = None,
  cache_dtype: DTypeLike | None = None,
  cache_kind: CacheConfig | str = "windowed",
) -> PairedReading:
  """Reads the prompts of two requests, layer by layer in turn.

  Args:
    model: Model with weights on a mesh whose axis "model" shards heads and
      feedforward.
    first: Prompts of one request, int32 [B, T], or B sequences of ids.
    second: Prompts of the other; their number and length may differ.
    mesh: Mesh; default: the model's.
    capacity: Tokens of each session's rows; default: its prompts' plus 256.
    cache_dtype: Dtype of the sessions' caches; default: the model's.
    cache_kind: Storage of keys and values in the caches.

  Raises:
    MeshError: If there is no mesh, its axis "model" has fewer than 2 shards, or
      it shards the sequence or the batch too.
    ConfigError: If a layer is not attention with a plain or gated feedforward,
      or the shards do not divide its heads and widths.
    PromptError: If a prompt does not fit `capacity` or the model's context.
  """
  check_call(model, first)
  check_call(model, second)
  refuse_placed(model, "read two prompts", "load it without placement=")
  mesh, axis = place_of(mesh, None, model)
  check_pair(model, mesh, axis)
  requests: list[tuple[Session, Prefill, list[np.ndarray], PairedCall]] = []
  for tokens in (first, second):
    prompts = inputs.prompts(tokens, model.config.vocab)
    lengths = np.array([prompt.size for prompt in prompts])
    check_context(model, np.zeros_like(lengths), lengths, 0)
    plan = PrefillConfig(method="blockwise").plan(
      int(lengths.max()), model, mesh, axis
    )
    room = positive_int(
      "capacity", plan.width + 256 if capacity is None else capacity
    )
    if room < plan.width:
      raise PromptError(
        "capacity",
        room,
        f"{plan.width} or more, which a prompt of {lengths.max()} tokens takes",
        "leave it out, or make it larger",
      )
    session = Session(
      model, room, batch=len(prompts), mesh=mesh, dtype=cache_dtype,
      cache_kind=kinds.cache_kind(cache_kind).resident("reading two prompts"),
    )  # fmt: skip
    (call,) = plan.calls(prompts, np.zeros(len(prompts), np.int64))
    by_length = any(rope.scaling.by_length for rope in model.config.ropes)
    length = lengths if by_length else lengths.max()
    paired_call = PairedCall(
      jnp.asarray(call.tokens),
      jnp.asarray(call.seg),
      jnp.asarray(call.rows),
      jnp.asarray(length.astype(np.int32)),
    )
    requests.append((session, plan, prompts, paired_call))
  sessions = tuple(request[0] for request in requests)
  attend = split_sums(requests[0][1].attend)
  with sessions[0].running("reading two prompts"):
    logits, caches = read_pair(
      model,
      attend,
      tuple(request[3] for request in requests),
      tuple(session.cache for session in sessions),
    )
  for (session, _, prompts, _), cache in zip(requests, caches, strict=True):
    session.cache = cache
    session.bind(model)
    for row, prompt in enumerate(prompts):
      session.heard(row, prompt, 0)
  return PairedReading(logits=logits, sessions=(sessions[0], sessions[1]))


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(3,))
def read_pair(
  model: Transformer,
  attend: ContextParallel,
  calls: tuple[PairedCall, ...],
  caches: tuple[CallCache, ...],
) -> tuple[tuple[Float[Array, "_ V"], ...], tuple[Any, ...]]:
  """Compiled prefill of two requests: logits after the prompts, and caches.

  Args:
    model: Model that reads the prompts.
    attend: `SplitSums`, to hide sums; another context, to compare with.
    calls: Tokens of each request.
    caches: Empty cache of each request; donated.
  """
  stack_inputs = []
  for call, cache in zip(calls, caches, strict=True):
    call_tokens = tokens_of(
      model, attend, call.tokens.shape, None, call.seg, call.length
    )
    call_cache = cache.allocate(
      call_tokens.at, replicated=False, sees=False, tokens=call.tokens
    )
    stack_inputs.append(
      (
        attend.constrain(model.embedded(call.tokens, call_tokens)),
        call_tokens,
        call_cache,
      )
    )
  within = attend
  outputs = model.stack.together(stack_inputs, within)
  logits = []
  for (h, _), call in zip(outputs, calls, strict=True):
    last = jnp.take_along_axis(h, call.rows[:, None, None], 1)[:, 0]
    logits.append(attend.everywhere(model.logits(model.head_input(last))))
  return tuple(logits), tuple(cache for _, cache in outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideReading:
  """A request whose prompts were read while another request decoded.

  Attributes:
    logits: Logits after each prompt's last token, float32 [B, V].
    session: The request's session, for `generate(..., cache=session)`.
    answers: New tokens of the other request, one at most for each chunk.
  """

  logits: jax.Array
  session: Session
  answers: Generated


@on_its_mesh
def prefill_beside(
  model: Transformer,
  tokens: Prompts,
  answering: Session,
  *,
  chunk: int = 512,
  mesh: Mesh | None = None,
  capacity: int | None = None,
  cache_dtype: DTypeLike | None = None,
  cache_kind: CacheConfig | str = "windowed",
  sampler: Callable[..., Any] | None = None,
  stop: StopLike = (),
  pad_id: int = 0,
) -> BesideReading:
  """Reads prompts in chunks, while another request decodes a step per chunk.

  One program computes a chunk of the prompts and a step of the answers, layer
  by layer in turn: tokens come while a long prompt is read, and the sends of
  one overlap the products of the other (Liger, PPoPP 2024).

  Args:
    model: Model with weights on a mesh whose axis "model" shards heads and
      feedforward.
    tokens: Prompts, int32 [B, T], or B sequences of ids.
    answering: Session of the other request, in which `generate` has chosen
      a token of each row that is not read yet.
    chunk: Tokens of a chunk.
    mesh: Mesh; default: the model's.
    capacity: Tokens of the new session's rows; default: its prompts' and 256.
    cache_dtype: Dtype of the new session's cache; default: the model's.
    cache_kind: Storage of keys and values in the new session's cache.
    sampler: Sampler of the answers; default: greedy.
    stop: Ids after which an answer ends.
    pad_id: Id that fills up answers that ended early.

  Returns:
    The reading; the answers continue with `generate(..., cache=answering)`.

  Raises:
    MeshError, ConfigError, PromptError: If `paired_prefill` would raise them.
    OptionError: If `answering` has a row without a pending token or is another
      model's, or a stop is a text.
    NotFiniteLogitsError: If a row's logits are NaN or infinite.
  """
  check_call(model, tokens)
  refuse_placed(model, "read beside answers", "load it without placement=")
  mesh, axis = place_of(mesh, None, model)
  check_pair(model, mesh, axis)
  batch, vocab = answering.batch, model.config.vocab
  check_session(
    answering,
    model,
    batch,
    dict.fromkeys(("mesh", "axis", "dtype", "cache_kind")),
  )
  if answering.attention_fn is not None:
    raise OptionError(
      "answering",
      "a session with attention_fn",
      "one that the library's own attention reads",
      "make it without attention_fn",
    )
  if (answering.pending < 0).any():
    raise OptionError(
      "answering",
      f"a session whose pending tokens are {answering.pending.tolist()}",
      "a token of each row that was generated and not read yet",
      "call rj.infer.generate(model, prompts, cache=answering) first",
    )
  ending = RowEndings(stop, None, None, pad_id, batch, vocab)
  prompts = inputs.prompts(tokens, vocab)
  lengths = np.array([prompt.size for prompt in prompts])
  start = np.zeros_like(lengths)
  check_context(model, start, lengths, 0)
  chunk = positive_int("chunk", chunk)
  options = PrefillConfig(method="chunked", chunk=chunk)
  kind = kinds.cache_kind(cache_kind).resident("reading beside answers")
  plan = options.plan(int(lengths.max()), model, mesh, axis, kind=kind)
  room = plan.width + 256 if capacity is None else capacity
  if positive_int("capacity", room) < plan.width:
    raise PromptError(
      "capacity",
      room,
      f"{plan.width} or more, which a prompt of {lengths.max()} tokens takes",
      "leave it out, or make it larger",
    )
  steps = -(-plan.width // chunk)
  check_context(model, answering.lengths, np.zeros(batch, np.int64), steps)
  if answering.room() < steps:
    raise PromptError(
      "answering",
      f"a session with room for {answering.room()} tokens",
      f"{steps}, one for each chunk",
      "make it of larger capacity, or pass a larger chunk=",
    )
  session = Session(
    model, room, batch=len(prompts), mesh=mesh, dtype=cache_dtype,
    cache_kind=kind,
  )  # fmt: skip
  session.bind(model)
  for row, prompt in enumerate(prompts):
    session.heard(row, prompt, 0)
  return _beside(
    model, plan, prompts, session, answering, sampler, ending, steps
  )


def _beside(
  model: Transformer,
  how: Prefill,
  prompts: list[np.ndarray],
  session: Session,
  answering: Session,
  sampler: Callable[..., Any] | None,
  ending: RowEndings,
  steps: int,
) -> BesideReading:
  """Run the chunks of `prefill_beside`, each with a decoding step."""
  batch = answering.batch
  needs_seen = getattr(sampler, "needs_seen", False)
  choose = traced(Greedy() if sampler is None else sampler)
  pos = answering.lengths
  state = DecodeState(
    token=jnp.asarray(answering.pending.astype(np.int32)),
    pos=jnp.asarray(pos.astype(np.int32)),
    done=jnp.zeros(batch, bool),
    seen=jnp.array(answering.seen) if needs_seen else None,
  )
  by_length = any(rope.scaling.by_length for rope in model.config.ropes)
  prompt_lengths = np.array([prompt.size for prompt in prompts], np.int32)
  lengths = jnp.asarray(prompt_lengths if by_length else prompt_lengths.max())
  total = jnp.asarray(answering.capacity, jnp.int32)
  out = np.full((batch, steps), ending.pad_id, np.int32)
  ended, new_lengths = np.zeros(batch, bool), np.zeros(batch, np.int32)
  not_finite, logits = NotFiniteRows(), None
  attend = CachedSplitSums(mesh=answering.mesh, axis=answering.axis)
  steps_left = answering.cache.steps()
  with session.running("reading beside answers"), answering.running("decoding"):
    for n, call in enumerate(how.calls(prompts, np.zeros(len(prompts), int))):
      slots = np.full((session.batch, session.shards), call.tokens.shape[1])
      session.cache = session.cache.with_room(slots)
      if not steps_left:
        answering.make_room(~ended)
        steps_left = answering.cache.steps()
      paired_call = PairedCall(
        jnp.asarray(call.tokens),
        jnp.asarray(call.seg),
        jnp.asarray(call.rows),
        lengths,
      )
      last, state, (session.cache, answering.cache) = step_beside(
        model,
        attend,
        choose,
        paired_call,
        jnp.asarray(call.pos),
        state,
        ending.ids,
        total,
        (session.cache, answering.cache),
      )
      steps_left -= 1
      session.make_room(np.asarray(call.seg.any(1)), call.ends)
      ends = jnp.asarray(call.ends)[:, None]
      logits = last if logits is None else jnp.where(ends, last, logits)
      token, row_done = jax.device_get((state.token, state.done))
      ended = ended | not_finite.note(token, pos + n + 1, ~ended)
      out[:, n] = np.where(ended, ending.pad_id, token)
      new_lengths += ~ended
      answering.say(token, pos + n + 1, ~ended)
      ended = ended | row_done
  assert logits is not None
  answers = Generated(tokens=out, lengths=new_lengths)
  answering.not_finite(not_finite.at)
  not_finite.check(model.dtype, answers)
  return BesideReading(logits=logits, session=session, answers=answers)


@bounded
@functools.partial(jax.jit, static_argnums=(1,), donate_argnums=(8,))
def step_beside(
  model: Transformer,
  attend: CachedAttention,
  sampler: Callable[..., Any],
  call: PairedCall,
  pos: Int[Array, "B T"],
  state: DecodeState,
  stops: Int[Array, " n"],
  total: Lengths,
  caches: tuple[CallCache, CallCache],
) -> tuple[Float[Array, "B V"], DecodeState, tuple[Any, Any]]:
  """Compiled step: a chunk of prompts, and a decoding step of answers.

  Args:
    model: Model of both requests.
    attend: `CachedSplitSums`, to hide sums; another context, to compare with.
    sampler: Sampler of the answers, traced.
    call: Tokens of the chunk.
    pos: Positions of the chunk's tokens.
    state: Answers' state before the step.
    stops: Ids that end an answer.
    total: Length of the answers' context, for rotations that depend on it.
    caches: The chunk's cache and the answers'; donated.
  """
  calls = (
    (call.tokens, pos, call.seg, call.length),
    (
      # Rows without a token have segment 0: their id does not matter.
      jnp.maximum(state.token, 0)[:, None],
      state.pos[:, None],
      (~state.done).astype(jnp.int32)[:, None],
      total,
    ),
  )
  stack_inputs = []
  for (ids, positions, seg, length), cache in zip(calls, caches, strict=True):
    call_tokens = tokens_of(model, attend, ids.shape, positions, seg, length)
    call_cache = cache.allocate(
      call_tokens.at, replicated=True, sees=True, tokens=ids
    )
    stack_inputs.append(
      (
        attend.constrain(model.embedded(ids, call_tokens)),
        call_tokens,
        call_cache,
      )
    )
  within = attend
  (h, chunk_cache), (g, answer_cache) = model.stack.together(
    stack_inputs, within
  )
  last = jnp.take_along_axis(h, call.rows[:, None, None], 1)[:, 0]
  logits, answer_logits = (
    attend.everywhere(model.logits(model.head_input(x)))
    for x in (last, g[:, 0])
  )
  next_state = decode.following(sampler, answer_logits, state, stops)
  return logits, attend.everywhere(next_state), (chunk_cache, answer_cache)


def split_sums(attend: ShardingContext) -> SplitSums:
  """Convert a context to one whose sums over "model" are sends."""
  fields = {
    field.name: getattr(attend, field.name)
    for field in dataclasses.fields(attend)
  }
  return SplitSums(**fields)


def check_pair(
  model: Transformer, mesh: Mesh | AbstractMesh | None, axis: str | None
) -> None:
  """Refuses a mesh or a model whose sums are not over "model" alone.

  Raises:
    MeshError, ConfigError: As described in `paired_prefill`.
  """
  shape = {} if mesh is None else dict(mesh.shape)
  size = shape.get(_MODEL, 1)
  others = {k: n for k, n in shape.items() if k != _MODEL and n > 1}
  if size < 2 or others or (axis is not None and shape.get(axis, 1) > 1):
    raise MeshError(
      "mesh",
      f"{shape or None}",
      'an axis "model" of 2 or more shards, and no other',
      'load the model with mesh=rj.make_mesh((-1,), ("model",), ring="model")',
    )
  for layer in model.config.layers:
    mixer, feedforward = layer.attention, layer.feedforward
    fault = None
    if type(mixer) is not Attention:
      fault = f"a layer with {type(mixer).__name__}"
    elif not isinstance(feedforward, Plain | Gated):
      fault = f"a layer with {type(feedforward).__name__}"
    elif getattr(feedforward, "sparsity", 0):
      fault = "gates that are shut by what all of them are"
    elif mixer.heads % size or feedforward.hidden % size:
      fault = f"{mixer.heads} heads and a width of {feedforward.hidden}"
    if fault is not None:
      raise ConfigError(
        "model",
        fault,
        f"attention and a plain or gated feedforward, which {size} shards "
        "divide",
        "read the prompts one after another with rj.infer.generate",
      )
  _refuse_changed(model)


def _refuse_changed(model: Transformer) -> None:
  """Refuses projections whose weights are not plain `Linear`s."""
  for run in model.stack.blocks:
    for block in run:
      feedforward = block.feedforward
      projections = [block.attention.o, feedforward.up, feedforward.down]
      for projection in projections:
        if type(projection) is not Linear:
          raise OptionError(
            "model",
            f"layers with {type(projection).__name__}",
            "plain weights",
            "pass the model that rj.models.load returns",
          )
