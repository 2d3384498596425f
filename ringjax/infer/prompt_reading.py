"""Prompts go into a session: what is checked, planned and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  OptionError,
  PromptError,
)
from ringjax.infer import inputs
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import Prefill, PrefillOptions, padded, read
from ringjax.infer.repetition import Instructions, check_repetition, repeat
from ringjax.infer.session import Session, free_on, on_its_mesh, place_of
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache import LayerCacheSpec
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.context_cache import ContextCache
from ringjax.models.transformer import Transformer
from ringjax.parallel.layout import Striped
from ringjax.plan.choice import Machine


@on_its_mesh
def read_context(
  model: Transformer,
  tokens: Prompts,
  *,
  cache: Session,
  prefill: str = "auto",
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  machine: Machine | None = None,
  tokenizer: Any = None,
  progress: Callable[[int], Any] | None = None,
) -> None:
  """Reads texts into a session and generates nothing.

  Calls of `generate` with the session then ask about them, one behind the
  other. With a policy of eviction the questions are about what is kept:
  `session.cache.snapshot` and `restore` go back to it.

  Args:
    model: as `generate` gets it.
    tokens: int32 [B, T], or B sequences of ids of different lengths.
    cache: the session, empty or not.
    prefill: how it is read, see `generate`.
    chunk: the same.
    partition: the same.
    machine: the same.
    tokenizer: encodes the request for a repetition, where the session's policy
      repeats the context (`rj.kv.KVzip`).
    progress: called with the number of tokens read.

  Raises:
    RingjaxError: in Python, before anything is compiled.
  """
  check_call(model, tokens)
  check_callable(progress=progress)
  options = PrefillOptions(
    method=prefill, chunk=chunk, partition=partition, machine=machine
  )
  prompts = inputs.prompts(tokens, model.config.vocab)
  own: dict[str, Any] = dict.fromkeys(("mesh", "axis", "dtype", "cache_kind"))
  check_session(cache, model, len(prompts), own)
  start, prompts = cache.lengths, with_pending(prompts, cache)
  lengths = np.array([p.size for p in prompts])
  session, how, total = planned(model, cache, options, own, start, lengths, 1)
  check_context(model, start, lengths, 0, session.cache.kind, how)
  asked = asked_repetition(model, session, start, lengths, tokenizer)
  model = session.weights(model)
  read_prompts(model, session, how, prompts, start, total, progress, asked)


def stored_wire(
  model: Transformer, session: Session | None, own: dict[str, Any]
) -> Any:
  """The wire that sends what the cache stores."""
  latent = [
    x for x in model.kinds if isinstance(x, LayerCacheSpec) and not x.value
  ]
  if latent:
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
  prompts: list[np.ndarray], session: Session
) -> list[np.ndarray]:
  """The prompts behind tokens that were generated and not read yet."""
  return [
    p if last < 0 else np.concatenate([[np.int32(last)], p])
    for p, last in zip(prompts, session.pending, strict=True)
  ]


def planned(
  model: Transformer,
  session: Session | None,
  options: PrefillOptions,
  own: dict[str, Any],
  start: np.ndarray,
  lengths: np.ndarray,
  count: int,
  spare: int = 0,
) -> tuple[Session, Prefill, np.ndarray]:
  """How the prompts are read, and into which session, with room for them.

  `count` tokens are generated; slots for `spare` more are there for a while.

  Returns:
    (session, how, length): the last is that of the context, for rotations
      that depend on it, int32 []; without a session of each row's prompt, [B].
  """
  longest, batch = int(lengths.max()), lengths.size
  given = own.get("attention_fn") if session is None else session.attention_fn
  if given is not None:
    options = _by_chunks(options)
  if session is None:
    where = place_of(own["mesh"], own["axis"], model)
    if own["cache_kind"] is None:
      own = own | {"cache_kind": kinds.WINDOWED}
    kind = own["cache_kind"]
    how = options.plan(longest, model, *where, kind=kind)
    _check_alone(options, how, lengths, kind, start)
    _check_scores(model, how, batch)
    # A shard's last slot may stay empty behind an uneven prompt.
    shards = how.attend.size
    capacity = how.slots * shards + count + spare + shards
    session = Session(model, capacity, batch=batch, **own)
    if given is not None:
      how = dataclasses.replace(how, attend=session.attend(replicated=False))
    return session, how, _rotated_by(model, lengths)
  room, behind = session.room(), bool(start.any())
  whole = isinstance(session.cache, ContextCache) and session.cache.asks_whole
  if whole and options.chunk is None:
    width = padded(longest, session.shards)
    options = dataclasses.replace(options, chunk=width)
  if whole and options.chunk is not None and options.chunk < longest:
    raise OptionError(
      "chunk",
      f"{options.chunk} tokens of a question of {longest}, whose tokens select "
      "contexts together",
      "the whole question in one call",
      "leave it out, or pass combine='select:by=token' or 'select:by=query'",
    )
  how = options.plan(
    longest,
    model,
    session.mesh,
    session.axis,
    # The last token is not read.
    room=room - (count - 1) - spare,
    behind=behind,
    kind=session.cache.kind,
  )
  _check_alone(options, how, lengths, session.cache.kind, start)
  after = session.cache.free() - how.taken(lengths)
  if after.min() < 0 or after.sum(1).min() < count - 1 + spare:
    raise PromptError(
      "tokens",
      f"{longest} tokens, read by prefill={how.name!r} on {session.shards} "
      f"shard(s), and max_new_tokens={count}, of which {count - 1 + spare} "
      "are read",
      f"at most {room} together in this session of {session.cache.capacity}",
      "make a session of larger capacity, or ask for fewer tokens",
    )
  _check_scores(model, how, batch)
  if given is not None:
    how = dataclasses.replace(how, attend=session.attend(replicated=False))
  if not behind:
    session.bind(model)
  return session, how, np.array(session.capacity, np.int32)


def _by_chunks(options: PrefillOptions) -> PrefillOptions:
  """The same for an attention function of the caller, which reads a cache."""
  if options.method not in ("auto", "chunked") or options.machine is not None:
    raise OptionError(
      "prefill",
      f"{options.method!r} beside attention_fn",
      "'chunked', whose queries find their keys in the cache",
      "leave prefill= and machine= out",
    )
  return dataclasses.replace(options, method="chunked")


def _check_alone(
  options: PrefillOptions,
  how: Prefill,
  lengths: np.ndarray,
  kind: CacheKind,
  start: np.ndarray,
) -> None:
  """Refuses what would read a row otherwise than if it were alone."""
  kept = kind.policy is not None and not kind.repeats
  mixed = bool(start.any()) and not start.all()
  free = options.method == "auto" and options.chunk is None
  if free and mixed and (kept or kind.codec is not None):
    raise OptionError(
      "prefill",
      f"'auto' for empty rows beside rows that hold tokens, with a cache of "
      f"{kind}",
      "one way for all rows, whatever the others hold",
      "pass prefill='chunked'",
    )
  shards, layout = how.attend.size, how.layout
  widths = {padded(int(n), shards) for n in lengths}
  given = options.partition is not None
  if (
    options.wire is not None
    and shards > 1
    and len(widths) > 1
    and not isinstance(layout, Striped)
    and not given
  ):
    raise OptionError(
      "wire",
      f"{options.wire} with prefill={how.name!r}, for prompts of "
      f"{lengths.tolist()} tokens",
      "prompts of one length, or a way whose shards of a row do not depend on "
      "the longest",
      "pass prefill='striped', or leave wire out",
    )


def _rotated_by(model: Transformer, lengths: np.ndarray) -> np.ndarray:
  """Of each row its own prompt, int32 [B]; [] where no rotation looks at it."""
  if any(rope.scaling.by_length for rope in model.config.ropes):
    return lengths.astype(np.int32)
  return np.array(lengths.max(), np.int32)


def read_prompts(
  model: Transformer,
  session: Session,
  how: Prefill,
  prompts: list[np.ndarray],
  start: np.ndarray,
  total: np.ndarray,
  progress: Callable[[int], Any] | None,
  asked: Instructions | None,
) -> jax.Array:
  """Reads the prompts into the session: the logits [B, V] behind them."""
  found: Any = None
  with session.running("reading the prompt"):
    for call in how.calls(prompts, start):
      each = call.tokens.shape[1] // session.shards
      taken = np.full((session.batch, session.shards), each)
      session.cache = session.cache.with_room(taken)
      logits, session.cache = read(
        model,
        how.attend,
        jnp.asarray(call.tokens),
        None if call.pos is None else jnp.asarray(call.pos),
        jnp.asarray(call.seg),
        session.cache,
        jnp.asarray(call.rows),
        jnp.asarray(total),
      )
      for row, prompt in enumerate(prompts):
        session.heard(row, prompt[: call.done], int(start[row]))
      # Rows that are read already stay as they are.
      session.cache = session.cache.flush(call.seg.any(1))
      ends = jnp.asarray(call.ends)[:, None]
      found = logits if found is None else jnp.where(ends, logits, found)
      if progress is not None:
        jax.block_until_ready(logits)
        progress(call.done)
    if asked is not None:
      session.cache = repeat(
        model, session.cache, prompts, start == 0, asked, total
      )
  return found


def asked_repetition(
  model: Transformer,
  session: Session,
  start: np.ndarray,
  lengths: np.ndarray,
  tokenizer: Any,
) -> Instructions | None:
  """What asks for a repetition of the prompts, if the policy wants one.

  Rows that hold tokens are not repeated: what comes behind them stays.
  """
  kind = session.cache.kind
  if not kind.repeats or start.all():
    return None
  asked = Instructions.of(tokenizer)
  check_repetition(model, kind.policy, lengths * (start == 0), asked)
  return asked


def check_session(
  session: Session, model: Transformer, batch: int, own: dict[str, Any]
) -> None:
  """Refuses a session of something else, and options that it has itself."""
  if not isinstance(session, Session):
    raise InputTypeError(
      "cache",
      type(session).__name__,
      "an rj.infer.Session",
      "make one with rj.infer.Session(model, capacity)",
    )
  session.check()
  if own.get("attention_fn") is session.attention_fn:
    own = own | {"attention_fn": None}
  if own["cache_kind"] == session.cache.kind:
    own = own | {"cache_kind": None}
  for name, value in own.items():
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
  kind: CacheKind | None = None,
  how: Prefill | None = None,
) -> None:
  """Refuses a text that is longer than the context the model supports.

  With a policy that moves tokens to their index in the cache, one that holds
  more tokens, read by calls of `how`.
  """
  row = int(np.argmax(start + lengths))
  policy = None if kind is None else kind.policy
  if policy is not None and policy.moves and how is not None:
    assert kind is not None and isinstance(policy.budget, int)
    call = max(how.chunk or how.width, kind.room)
    held = policy.budget + kind.recent + kind.room + call
    inputs.within_context(
      model.config,
      min(held, int(start[row] + lengths[row]) + count),
      f"{held:,} tokens in the cache at once (budget={policy.budget:,}, "
      f"room={kind.room:,}, {call:,} of a call; chunk= makes calls shorter)",
    )
    return
  before = f"{int(start[row]):,} tokens read before, " if start[row] else ""
  inputs.within_context(
    model.config,
    int(start[row] + lengths[row]) + count,
    f"{before}{int(lengths[row]):,} tokens in prompt {row} and "
    f"max_new_tokens={count:,}",
  )


def _check_scores(model: Transformer, how: Prefill, batch: int) -> None:
  """Refuses dense scores that cannot fit, before anything is allocated.

  They alone grow with the square of the prompt. Counted is one copy in
  float32, the least there is.
  """
  if how.name != "dense":
    return
  mesh = how.attend.mesh
  heads = max(
    getattr(layer.attention, "heads", 0) for layer in model.config.layers
  )
  shards = 1 if mesh is None else mesh.devices.size
  each = 4 * batch * heads * how.width**2 // shards
  free, _ = free_on(mesh)
  if free is not None and each > free:
    raise MemoryEstimateError(
      "prefill",
      f"'dense', with {each:,} bytes of scores on each of {shards} "
      f"device(s) for {batch} x {how.width:,} tokens",
      f"at most the {free:,} that are free there",
      "pass prefill='blockwise', or leave it out",
    )


def check_call(model: Transformer | str, tokens: Prompts) -> None:
  """Refuses what is not a model, and a call in a trace."""
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
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
      raise InputTypeError(
        name,
        "a traced array",
        "concrete ones: generate runs programs of its own",
        "call it outside of jit, or model(tokens) inside",
      )


def check_callable(**functions: Any) -> None:
  for name, f in functions.items():
    if f is not None and not callable(f):
      raise InputTypeError(
        name, type(f).__name__, "a callable", f"pass a function as {name}="
      )
