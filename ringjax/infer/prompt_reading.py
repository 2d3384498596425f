"""Checks, planning and prefill of prompts that go into a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  OptionError,
  PromptError,
)
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import (
  Prefill,
  PrefillConfig,
  padded,
  read,
  read_tiles,
)
from ringjax.infer.repetition import Instructions, check_repetition, repeat
from ringjax.infer.session import Session, free_on, on_its_mesh, place_of
from ringjax.infer.tile_reading import check_left_out, tile_report
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.models.transformer import Transformer
from ringjax.parallel.layout import Striped
from ringjax.plan.choice import Cluster


@on_its_mesh
def read_context(
  model: Transformer,
  tokens: Prompts,
  *,
  cache: Session,
  prefill: str = "auto",
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  machine: Cluster | None = None,
  tokenizer: Any = None,
  progress: Callable[[int], Any] | None = None,
) -> None:
  """Reads texts into a session and generates nothing.

  Calls of `generate` with the session then ask about them, one after the other.
  With a policy of eviction the questions are about the tokens kept:
  `session.cache.snapshot` and `restore` return to that state.

  Args:
    model: Model to read with, as for `generate`.
    tokens: Token ids, int32 [B, T], or B sequences of different lengths.
    cache: Session to read into, empty or not.
    prefill: Prefill strategy, see `generate`.
    chunk: Maximum number of tokens of a chunk, see `generate`.
    partition: Number of tokens of each shard, see `generate`.
    machine: Measured machine by which "auto" chooses, see `generate`.
    tokenizer: Encodes the request for a repetition, where the session's policy
      repeats the context (`rj.kv.KVzip`).
    progress: Called with the number of tokens read.

  Raises:
    RingjaxError: If an argument is invalid; nothing is compiled.
  """
  check_call(model, tokens)
  check_callable(progress=progress)
  options = PrefillConfig(
    method=prefill, chunk=chunk, partition=partition, machine=machine
  )
  prompts = inputs.prompts(tokens, model.config.vocab)
  cache_options: dict[str, Any] = dict.fromkeys(
    ("mesh", "axis", "dtype", "cache_kind")
  )
  check_session(cache, model, len(prompts), cache_options)
  start, prompts = cache.lengths, with_pending(prompts, cache)
  lengths = np.array([prompt.size for prompt in prompts])
  session, plan, total = planned(
    model, cache, options, cache_options, start, lengths, 1
  )
  check_context(model, start, lengths, 0, session.cache.kind, plan)
  instructions = asked_repetition(model, session, start, lengths, tokenizer)
  model = session.weights(model)
  read_prompts(
    model, session, plan, prompts, start, total, progress, instructions
  )


def stored_wire(
  model: Transformer, session: Session | None, own: dict[str, Any]
) -> Any:
  """Wire format that sends keys and values as the cache stores them."""
  latent_specs = [
    spec
    for spec in model.kinds
    if isinstance(spec, LayerCacheSpec) and not spec.value
  ]
  if latent_specs:
    raise OptionError(
      "wire",
      f"'cache' with {model.config.family}, which caches latents",
      "a model that caches the keys and values that travel",
      "pass a wire of its own, as wire='int8'",
    )
  if isinstance(session, Session):
    return session.cache.kind.as_wire(session.cache.dtype)
  kind = kinds.WINDOWED if own["cache_kind"] is None else own["cache_kind"]
  dtype = model.dtype if own["dtype"] is None else own["dtype"]
  return kind.as_wire(jnp.dtype(dtype))


def with_pending(
  prompts: list[Int[np.ndarray, " _"]], session: Session
) -> list[Int[np.ndarray, " _"]]:
  """Prepend each row's generated but unread token to its prompt."""
  return [
    prompt if token < 0 else np.concatenate([[np.int32(token)], prompt])
    for prompt, token in zip(prompts, session.pending, strict=True)
  ]


def planned(
  model: Transformer,
  session: Session | None,
  options: PrefillConfig,
  session_options: dict[str, Any],
  start: Int[np.ndarray, " B"],
  lengths: Int[np.ndarray, " B"],
  count: int,
  spare: int = 0,
) -> tuple[Session, Prefill, Int[np.ndarray, ""] | Int[np.ndarray, " B"]]:
  """Plan the prefill of prompts, in the given session or a new one.

  The session has room for the prompts, `count` generated tokens and, for a
  while, `spare` more.

  Returns:
    (session, how, length): Session, prefill plan, and the length that rotations
      may depend on, which is the context's, int32 [], or without a session each
      row's prompt's, [B].
  """
  longest, batch = int(lengths.max()), lengths.size
  attention_fn = (
    session_options.get("attention_fn")
    if session is None
    else session.attention_fn
  )
  if attention_fn is not None:
    options = _by_chunks(options)
  if session is None:
    placement = place_of(
      session_options["mesh"], session_options["axis"], model
    )
    if session_options["cache_kind"] is None:
      session_options = session_options | {"cache_kind": kinds.WINDOWED}
    kind = session_options["cache_kind"]
    plan = options.plan(longest, model, *placement, kind=kind)
    _check_alone(options, plan, lengths, kind, start)
    _check_scores(model, plan, batch)
    # A shard's last slot may stay empty after an uneven prompt.
    shards = plan.attend.size
    capacity = plan.slots * shards + count + spare + shards
    session = Session(model, capacity, batch=batch, **session_options)
    if attention_fn is not None:
      plan = dataclasses.replace(plan, attend=session.attend(replicated=False))
    return session, plan, _rotated_by(model, lengths)
  if options.pattern is not None:
    _check_tile_session(session)
  room, holds_tokens = session.room(), bool(start.any())
  asks_whole = session.cache.asks_whole
  if asks_whole and options.chunk is None:
    width = padded(longest, session.shards)
    options = dataclasses.replace(options, chunk=width)
  if asks_whole and options.chunk is not None and options.chunk < longest:
    raise OptionError(
      "chunk",
      f"{options.chunk} tokens of a question of {longest}, whose tokens select "
      "contexts together",
      "the whole question in one call",
      "leave it out, or pass combine='select:by=token' or 'select:by=query'",
    )
  plan = options.plan(
    longest,
    model,
    session.mesh,
    session.axis,
    # The last generated token is not read.
    room=room - (count - 1) - spare,
    behind=holds_tokens,
    kind=session.cache.kind,
  )
  _check_alone(options, plan, lengths, session.cache.kind, start)
  free_slots = session.cache.free() - plan.slots_taken(lengths)
  if free_slots.min() < 0 or free_slots.sum(1).min() < count - 1 + spare:
    raise PromptError(
      "tokens",
      f"{longest} tokens, read by prefill={plan.name!r} on {session.shards} "
      f"shard(s), and max_new_tokens={count}, of which {count - 1 + spare} "
      "are read",
      f"at most {room} together in this session of {session.cache.capacity}",
      "make a session of larger capacity, or ask for fewer tokens",
    )
  _check_scores(model, plan, batch)
  if attention_fn is not None:
    plan = dataclasses.replace(plan, attend=session.attend(replicated=False))
  if not holds_tokens:
    session.bind(model)
  return session, plan, np.array(session.capacity, np.int32)


def _check_tile_session(session: Session) -> None:
  """Refuses sessions whose prompts are not read as one text of all rows."""
  if session.contexts is None and not session.rows_at_once:
    return
  raise OptionError(
    "prefill",
    "'sparse' in a session of contexts"
    if session.contexts is not None
    else f"'sparse' in a session of rows_at_once={session.rows_at_once}",
    "a session of one text in each row, and all rows at once",
    "leave prefill= out, or make a session without these",
  )


def _by_chunks(options: PrefillConfig) -> PrefillConfig:
  """Change options to "chunked", so that `attention_fn` reads the cache."""
  if options.method not in ("auto", "chunked") or options.machine is not None:
    raise OptionError(
      "prefill",
      f"{options.method!r} beside attention_fn",
      "'chunked', whose queries find their keys in the cache",
      "leave prefill= and machine= out",
    )
  return dataclasses.replace(options, method="chunked")


def _check_alone(
  options: PrefillConfig,
  how: Prefill,
  lengths: np.ndarray,
  kind: CacheConfig,
  start: np.ndarray,
) -> None:
  """Refuses options by which a row's result depends on the other rows."""
  evicts = kind.policy is not None and not kind.repeats
  some_empty = bool(start.any()) and not start.all()
  unspecified = options.method == "auto" and options.chunk is None
  if unspecified and some_empty and (evicts or kind.codec is not None):
    raise OptionError(
      "prefill",
      f"'auto' for empty rows beside rows that hold tokens, with a cache of "
      f"{kind}",
      "one way for all rows, whatever the others hold",
      "pass prefill='chunked'",
    )
  if options.pattern is not None and options.chunk is None and some_empty:
    raise OptionError(
      "prefill",
      "'sparse' for empty rows beside rows that hold tokens, which choose "
      "among the keys of the cache",
      "one way for all rows, whatever the others hold",
      "pass chunk=, by which all rows choose so",
    )
  shards, layout = how.attend.size, how.layout
  widths = {padded(int(length), shards) for length in lengths}
  has_partition = options.partition is not None
  if (
    options.wire_format is not None
    and shards > 1
    and len(widths) > 1
    and not isinstance(layout, Striped)
    and not has_partition
  ):
    raise OptionError(
      "wire",
      f"{options.wire_format} with prefill={how.name!r}, for prompts of "
      f"{lengths.tolist()} tokens",
      "prompts of one length, or a way whose shards of a row do not depend on "
      "the longest",
      "pass prefill='striped', or leave wire out",
    )


def _rotated_by(model: Transformer, lengths: np.ndarray) -> np.ndarray:
  """Length by which rotations scale: each row's, int32 [B], or the longest."""
  if any(rope.scaling.by_length for rope in model.config.ropes):
    return lengths.astype(np.int32)
  return np.array(lengths.max(), np.int32)


def read_prompts(
  model: Transformer,
  session: Session,
  how: Prefill,
  prompts: list[Int[np.ndarray, " _"]],
  start: Int[np.ndarray, " B"],
  total: np.ndarray,
  progress: Callable[[int], Any] | None,
  asked: Instructions | None,
) -> Float[Array, "B V"]:
  """Reads prompts into the session: returns the logits after them [B, V]."""
  last_logits: Any = None
  tile_sums: list[Any] = []
  session.tiles = None
  session.keep_slack(0)
  with session.running("reading the prompt"):
    for call in how.calls(prompts, start):
      shard_slots = call.tokens.shape[1] // session.shards
      slots = np.full((session.batch, session.shards), shard_slots)
      session.cache = session.cache.with_room(slots)
      call_arguments = (
        model,
        how.attend,
        jnp.asarray(call.tokens),
        None if call.pos is None else jnp.asarray(call.pos),
        jnp.asarray(call.seg),
        session.cache,
        jnp.asarray(call.rows),
        jnp.asarray(total),
      )
      if how.pattern is None:
        logits, session.cache = read(*call_arguments)
      else:
        logits, session.cache, sums = read_tiles(*call_arguments)
        tile_sums.append(sums)
      for row, prompt in enumerate(prompts):
        session.heard(row, prompt[: call.read_tokens], int(start[row]))
      # Rows whose prompt has ended are not flushed.
      session.make_room(np.asarray(call.seg.any(1)), call.ends)
      ends = jnp.asarray(call.ends)[:, None]
      last_logits = (
        logits if last_logits is None else jnp.where(ends, logits, last_logits)
      )
      if progress is not None:
        jax.block_until_ready(logits)
        progress(call.read_tokens)
    if asked is not None:
      session.cache = repeat(
        model, session.cache, prompts, start == 0, asked, total
      )
  if how.pattern is not None:
    session.tiles = tile_report(model, how.pattern, jax.device_get(tile_sums))
    if session.tiles is not None:
      check_left_out(session.tiles)
  return last_logits


def asked_repetition(
  model: Transformer,
  session: Session,
  start: np.ndarray,
  lengths: np.ndarray,
  tokenizer: Any,
) -> Instructions | None:
  """Build the instructions to repeat the prompts, if the policy needs them.

  Rows that hold tokens are not repeated: their new tokens all stay.
  """
  kind = session.cache.kind
  if not kind.repeats or start.all():
    return None
  instructions = Instructions.of(tokenizer)
  check_repetition(model, kind.policy, lengths * (start == 0), instructions)
  return instructions


def check_session(
  session: Session,
  model: Transformer,
  batch: int,
  session_options: dict[str, Any],
) -> None:
  """Refuses a session that does not fit, and options that it already fixes."""
  if not isinstance(session, Session):
    raise InputTypeError(
      "cache",
      type(session).__name__,
      "an rj.infer.Session",
      "make one with rj.infer.Session(model, capacity)",
    )
  session.check()
  if session_options.get("attention_fn") is session.attention_fn:
    session_options = session_options | {"attention_fn": None}
  if session_options["cache_kind"] == session.cache.kind:
    session_options = session_options | {"cache_kind": None}
  for name, value in session_options.items():
    if value is not None:
      raise OptionError(
        "cache_dtype" if name == "dtype" else name,
        f"a {name}" if name in ("mesh", "attention_fn") else value,
        "the session's own",
        "leave it out: the session has its own",
      )
  if session.model.config != model.config:
    raise OptionError(
      "cache",
      f"a session of another model, a {session.model.config.family}",
      "one that was made for this model",
      "make one with rj.infer.Session(model, capacity)",
    )
  if not session.empty and not session.bound_to(model):
    raise OptionError(
      "model",
      "other weights than those that read what the session holds",
      "the same arrays",
      "pass that model, or call session.restart() and read it again",
    )
  if session.batch != batch:
    raise PromptError(
      "tokens",
      f"{batch} prompts",
      f"{session.batch}, as many as the session has rows",
      "make a session with batch=",
    )


def check_context(
  model: Transformer,
  start: np.ndarray,
  lengths: np.ndarray,
  count: int,
  kind: CacheConfig | None = None,
  plan: Prefill | None = None,
) -> None:
  """Refuses a text that is longer than the context the model supports.

  With a policy that moves tokens to their index in the cache, refuses a cache
  that holds more tokens than that, with the calls of `plan`.
  """
  row = int(np.argmax(start + lengths))
  policy = None if kind is None else kind.policy
  if policy is not None and policy.moves and plan is not None:
    assert kind is not None and isinstance(policy.budget, int)
    call = max(plan.chunk or plan.width, kind.exact.room)
    most_held = policy.budget + kind.exact.recent + kind.exact.room + call
    inputs.within_context(
      model.config,
      min(most_held, int(start[row] + lengths[row]) + count),
      f"{most_held:,} tokens in the cache at once (budget={policy.budget:,}, "
      f"room={kind.exact.room:,}, {call:,} of a call; chunk= makes calls "
      "shorter)",
    )
    return
  read_before = (
    f"{int(start[row]):,} tokens read before, " if start[row] else ""
  )
  inputs.within_context(
    model.config,
    int(start[row] + lengths[row]) + count,
    f"{read_before}{int(lengths[row]):,} tokens in prompt {row} and "
    f"max_new_tokens={count:,}",
  )


def _check_scores(model: Transformer, how: Prefill, batch: int) -> None:
  """Refuses dense scores that cannot fit, before anything is allocated.

  Only the scores grow with the square of the prompt. The estimate is one copy
  in float32, a lower bound.
  """
  if how.name != "dense":
    return
  mesh = how.attend.mesh
  heads = max(
    getattr(layer.attention, "heads", 0) for layer in model.config.layers
  )
  shards = 1 if mesh is None else mesh.devices.size
  score_bytes = 4 * batch * heads * how.width**2 // shards
  free, _ = free_on(mesh)
  if free is not None and score_bytes > free:
    raise MemoryEstimateError(
      "prefill",
      f"'dense', with {score_bytes:,} bytes of scores on each of {shards} "
      f"device(s) for {batch} x {how.width:,} tokens",
      f"at most the {free:,} that are free there",
      "pass prefill='blockwise', or leave it out",
    )


def check_call(model: Transformer | str, tokens: Prompts) -> None:
  """Refuses a value that is not a model, and a call inside a trace."""
  if not isinstance(model, Transformer):
    raise InputTypeError(
      "model",
      type(model).__name__,
      "an rj.models.Transformer",
      "make one with rj.models.load",
    )
  weight = model.embed.weight.get_value()
  rows = tokens if isinstance(tokens, list | tuple) else (tokens,)
  for name, arrays in (("model", (weight,)), ("tokens", rows)):
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
      raise InputTypeError(
        name,
        "a traced array",
        "concrete ones: generate runs programs of its own",
        "call it outside of jit, or model(tokens) inside",
      )


def check_callable(**functions: Any) -> None:
  for name, function in functions.items():
    if function is not None and not callable(function):
      raise InputTypeError(
        name,
        type(function).__name__,
        "a callable",
        f"pass a function as {name}=",
      )
