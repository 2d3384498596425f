"""Reads prompts and continues them.

`generate` does a whole answer; a `Session` keeps the cache of a conversation
between calls, so that a new turn reads only what is new.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ringjax.checks import float_dtype, positive_int
from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  OptionError,
)
from ringjax.infer import decode, inputs, prefill
from ringjax.infer.generated import Generated
from ringjax.infer.prefill import check_machine, plan
from ringjax.infer.sampling import Greedy, from_names, traced
from ringjax.infer.session import (
  Report,
  Session,
  check_session,
  free_on,
  on_its_mesh,
  place_of,
  settled,
)
from ringjax.infer.stopping import Stop, as_stop, check_tokenizer
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import bytes_each
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.local import here, last_device
from ringjax.plan.choice import KEEPS, Machine


@on_its_mesh
def generate(
  model: Transformer,
  tokens: Any,
  *,
  max_new_tokens: int,
  sampler: Any = None,
  prefill: str = "auto",
  mesh: Mesh | None = None,
  axis: str | None = None,
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  machine: Machine | None = None,
  keep: str = "sharded",
  cache: Session | None = None,
  cache_dtype: Any = None,
  cache_kind: Any = "dense",
  stop: Stop | str | int | Iterable[int | str] | None = None,
  tokenizer: Any = None,
  stream: Callable[[np.ndarray], Any] | None = None,
  progress: Callable[[int], Any] | None = None,
  report: Callable[[Report], Any] | None = None,
  pad_id: int = 0,
  **names: Any,
) -> Generated:
  """Continues prompts.

  What a sampler draws for a token is a function of its seed, of the number of
  the row and of the token's position in it: neither other rows, the turns of a
  conversation nor the mesh matter. Another seed or temperature compiles
  nothing, nor does any other number of a sampler.

  Rotations that depend on the length of the context (dynamic, longrope) turn
  as for the longest prompt of the batch and `max_new_tokens`, or with a
  session for its capacity: the same for all examples and steps.

  Args:
    model: made by `rj.models.load` or `create`.
    tokens: int32 [B, T], or B sequences of ids of different lengths.
    max_new_tokens: how many tokens to add at most.
    sampler: chooses a token from logits; default `Greedy()`.
    prefill: how the prompt is read: "auto", "dense", "blockwise" (one device);
      "ring", "striped", "zigzag", "bidirectional", "gather", "ulysses",
      "hybrid", "kvr" (a sharded sequence; on one shard they all are
      "blockwise", and the report says so); "chunked" (either).
    mesh: the mesh; default: the session's, the model's or the current one,
      else one device.
    axis: the axis that shards the sequence; default "seq" if there is one.
    chunk: most tokens of a chunk of a chunked prefill.
    partition: tokens of each shard for "kvr", KV-Runahead's chain (Cho et al.
      2024, arXiv 2405.05329); default: shards have equal work.
    machine: the model's cost on these devices and their links, which
      prefill="auto" then chooses by (`rj.plan.choose`); `Report` has the
      reasons. Default: "striped" on a sharded sequence. Refused where there is
      no choice: with a chunk, and for recurrent layers on a sharded sequence.
    keep: where the cache lies when the prompt is read: "sharded" over the
      sequence's axis, on which all devices decode, or on the "last" device of
      that axis, which then decodes alone, with its own copy of the weights.
    cache: a `Session`, to continue where it is and to leave it behind; the
      tokens are then what comes after those that it holds.
    cache_kind: how the cache stores keys and values, an `rj.kv.CacheKind` or
      its name: "dense" or "unrotated".
    cache_dtype: of the cache that is made: bfloat16, float16, float32 or
      float64; default: the model's.
    stop: ids behind which an example ends, or texts, or both; or a `Stop`.
    tokenizer: of the texts, which may span tokens.
    stream: called with each step's tokens, int32 [B]. Its answer True ends
      the generation, an array of bools [B] ends single examples, None and
      False end nothing; anything else is refused.
    progress: called with the number of prompt tokens read, after each chunk
      and when all are read.
    report: called with what was done, at the end.
    pad_id: fills the rows of examples that stopped early.
    **names: in place of `sampler` and `stop`, as transformers names them:
      temperature, top_k, top_p, min_p, repetition_penalty, do_sample, seed;
      eos_token_id. One of the first four samples, unless do_sample=False;
      do_sample=True alone keeps all tokens, with no top_k of its own.

  Returns:
    The new tokens: `new[row]` are those of a row, int32, the stop id included
    that ended it; `new.tokens` is int32 [B, max_new_tokens], with `pad_id`.

  Raises:
    PromptError: also for prompts that with `max_new_tokens` are longer than
      the context that the model's config states.
    RingjaxError: in Python, before anything is compiled; but for an answer of
      `stream`, with which the generation ends.
  """
  _check_here(model, tokens)
  count = positive_int("max_new_tokens", max_new_tokens)
  sampler, stop = from_names(sampler, stop, names)
  sampler = Greedy() if sampler is None else sampler
  _check_calls(sampler=sampler, stream=stream, progress=progress, report=report)
  _check_pad(pad_id)
  _check_keep(keep)
  if cache_dtype is not None:
    float_dtype("cache_dtype", cache_dtype)
  if isinstance(cache, Session):
    cache.check()
  if machine is not None:
    check_machine(machine, prefill, model, chunk)
  prompts = inputs.prompts(tokens, model.config.vocab)
  stops, watches = _stops(stop, model.config.vocab, tokenizer, len(prompts))
  if isinstance(cache, Session) and len(prompts) == cache.pending.size:
    prompts = [
      p if last < 0 else np.concatenate([[np.int32(last)], p])
      for p, last in zip(prompts, cache.pending, strict=True)
    ]
  batch, lengths = len(prompts), np.array([len(p) for p in prompts])
  longest = int(lengths.max())
  session = cache
  _check_context(model, session, lengths, count)
  if session is None:
    found, over = place_of(mesh, axis, model)
    shards = 1 if over is None else found.shape[over]
    first = plan(
      prefill,
      longest,
      model,
      found,
      over,
      chunk=chunk,
      partition=partition,
      machine=machine,
      keep=keep,
    )
    _check_scores(model, first, batch)
    # A shard's last slot may stay empty behind an uneven prompt.
    need = first.slots * shards + count + shards
    session = Session(
      model,
      need,
      batch=batch,
      mesh=found,
      axis=over,
      dtype=cache_dtype,
      cache_kind=cache_kind,
    )
  elif mesh is not None or axis is not None:
    raise OptionError(
      "mesh",
      "a mesh or an axis beside a session",
      "one of them",
      "leave mesh= and axis= out: the session has its own",
    )
  elif cache_dtype is not None:
    raise OptionError(
      "cache_dtype",
      f"{cache_dtype} beside a session",
      "one of them",
      "leave it out: the session's cache has its dtype",
    )
  elif not isinstance(session, Session):
    raise InputTypeError(
      "cache",
      type(session).__name__,
      "an rj.infer.Session",
      "make one with rj.infer.Session(model, capacity)",
    )
  elif kinds.cache_kind(cache_kind) not in (kinds.DENSE, session.cache.kind):
    raise OptionError(
      "cache_kind",
      f"{cache_kind} beside a session of kind {session.cache.kind}",
      "one of them",
      "leave it out: the session has its own",
    )
  given, model = model, session.weights(model)
  last = None
  if keep == "last" and session.mesh is not None:
    # Refused before the prompt is read, and not behind it.
    last = last_device(session.mesh, session.axis)
    here(model, last)
  fresh = session.empty
  # The last token is not read.
  left = session.room() - (count - 1)
  resolve = functools.partial(
    plan,
    tokens=longest,
    model=model,
    mesh=session.mesh,
    axis=session.axis,
    chunk=chunk,
    partition=partition,
    room=left,
    keep=keep,
  )
  how = _method(prefill, machine, fresh, resolve)
  check_session(session, given, batch, lengths, count, how)
  if fresh:
    session.reads(given)
  _check_scores(model, how, batch)
  start = session.lengths.copy()
  total = int(start.max()) + longest + count
  if not fresh or cache is not None:
    total = session.cache.capacity
  logits = _run(model, session, how, prompts, lengths, total, progress)
  if last is not None:
    session.gather(last)
    model, logits = session.weights(model), here(logits, last)
  # A copy: the session's goes on.
  needs = getattr(sampler, "needs_seen", False)
  seen, sampler = jnp.array(session.seen) if needs else None, traced(sampler)
  state = decode.first(
    sampler,
    logits,
    jnp.asarray(session.lengths.astype(np.int32)),
    seen,
    stops,
  )
  new = _continue(
    model,
    session,
    sampler,
    state,
    stops,
    total,
    count,
    _observer(stream, watches),
    pad_id,
  )
  session.last = Report(
    prefill=how,
    prompt_tokens=longest,
    new_tokens=int(new.lengths.max()),
    shards=session.shards,
    cache_bytes=bytes_each((session.cache.slots, session.cache.held)),
    capacity=session.cache.capacity,
  )
  if report is not None:
    report(session.last)
  return new


@settled("reading the prompt")
def _run(
  model: Transformer,
  session: Session,
  how: prefill.Prefill,
  prompts: list[np.ndarray],
  lengths: np.ndarray,
  total: int,
  progress: Any,
) -> jax.Array:
  """Reads the prompts into the session: the logits behind them."""
  start = session.lengths
  longest = int(lengths.max())

  def read(cache: Any, done: int) -> None:
    """Notes that so many tokens of each prompt are in the cache."""
    session.commit(cache, start + np.minimum(lengths, done))
    for row, prompt in zip(session.seen, prompts, strict=True):
      row[prompt[:done]] = True

  width = how.width if how.chunk is None else longest
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: prompt.size] = prompt
  if how.chunk is None:
    logits, cache = prefill.whole(
      model, how, tokens, lengths, session.cache, total
    )
    read(cache, longest)
    if progress is not None:
      jax.block_until_ready(logits)
      progress(longest)
    return logits
  return prefill.chunked(
    model, how, tokens, lengths, start, session.cache, total, read, progress
  )


@settled("decoding")
def _continue(
  model: Transformer,
  session: Session,
  sampler: Any,
  state: decode.State,
  stops: jax.Array,
  total: int,
  count: int,
  observe: Callable[[np.ndarray, np.ndarray], np.ndarray],
  pad_id: int,
) -> Generated:
  """Takes steps until all rows have stopped."""
  attend = CachedAttention(mesh=session.mesh, axis=session.axis)
  batch = session.lengths.size
  out = np.full((batch, count), pad_id, np.int32)
  ended, sizes = np.zeros(batch, bool), np.zeros(batch, np.int32)
  length = jnp.int32(total)
  for n in range(count):
    # The next step is on its way while this one's tokens are read.
    after = None
    if n + 1 < count:
      after, session.cache = decode.step(
        model, attend, sampler, session.cache, state, stops, length
      )
    token, done = jax.device_get((state.token, state.done))
    out[:, n] = np.where(ended, pad_id, token)
    sizes += ~ended
    session.seen[~ended, token[~ended]] = True
    read = ~done & (after is not None)
    session.lengths = session.lengths + read
    session.pending = np.where(
      ended, session.pending, np.where(read, -1, token)
    )
    told = observe(out[:, n], ended)
    ended = ended | done | told
    if after is None or ended.all():
      break
    state = after
    if told.any():
      # The device knows of stop ids only, those of the next tokens too.
      state = after._replace(done=decode.ends(attend, after.done, ended))
  return Generated(tokens=out, lengths=sizes)


def _method(
  name: str,
  machine: Machine | None,
  fresh: bool,
  resolve: Callable[..., prefill.Prefill],
) -> prefill.Prefill:
  if fresh:
    return resolve(name, machine=machine)
  if name == "auto":
    # What it sees lies in the cache already: no choice is left.
    why = "it continues a conversation"
    return dataclasses.replace(resolve("chunked"), why=why)
  if name != "chunked":
    raise OptionError(
      "prefill",
      f"{name!r} into a cache that holds tokens",
      "'chunked', which sees them",
      "pass prefill='auto'",
    )
  return resolve(name, machine=machine)


def _check_context(
  model: Transformer, session: Any, lengths: np.ndarray, count: int
) -> None:
  """Refuses a text that is longer than the model was made for."""
  read = np.zeros_like(lengths)
  if isinstance(session, Session) and session.lengths.size == lengths.size:
    read = session.lengths
  row = int(np.argmax(read + lengths))
  before = f"{int(read[row]):,} tokens read before, " if read[row] else ""
  inputs.within_context(
    model.config,
    int(read[row] + lengths[row]) + count,
    f"{before}{int(lengths[row]):,} tokens in prompt {row} and "
    f"max_new_tokens={count:,}",
  )


def _check_scores(model: Transformer, how: prefill.Prefill, batch: int) -> None:
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


def _check_here(model: Any, tokens: Any) -> None:
  """Refuses what is no model, and a call in a trace."""
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


def _check_calls(**functions: Any) -> None:
  for name, f in functions.items():
    if f is not None and not callable(f):
      raise InputTypeError(
        name, type(f).__name__, "something to call", "see `generate`"
      )


def _check_keep(keep: Any) -> None:
  if keep not in KEEPS:
    raise OptionError(
      "keep", repr(keep), f"one of {', '.join(KEEPS)}", "leave it out"
    )


def _check_pad(pad_id: Any) -> None:
  whole = isinstance(pad_id, int | np.integer) and not isinstance(pad_id, bool)
  if not whole or not -(2**31) <= pad_id < 2**31:
    raise OptionError(
      "pad_id", repr(pad_id), "an int of 32 bits", "leave it out"
    )


def _stops(
  stop: Any, vocab: int, tokenizer: Any, batch: int
) -> tuple[jax.Array, list[Any]]:
  """Ids for the device to look at, and watches for stop strings."""
  stop = as_stop(stop)
  stop.check(vocab)
  if tokenizer is not None:
    check_tokenizer(tokenizer)
  if stop.strings and tokenizer is None:
    raise OptionError(
      "tokenizer",
      "None with stop strings",
      "the model's tokenizer",
      "pass tokenizer=, e.g. rj.data.Tokenizer.load(folder)",
    )
  watches = [stop.watch(tokenizer) for _ in range(batch if stop.strings else 0)]
  return decode.stop_ids(stop.ids), watches


def _observer(
  stream: Any, watches: list[Any]
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
  """Shows a step's tokens to whoever asked: which examples end now, [B]."""

  def observe(tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    told = np.zeros(tokens.size, bool)
    for row, watch in enumerate(watches):
      if not ended[row]:
        watch.feed(int(tokens[row]))
        told[row] = watch.stopped is not None
    if stream is not None:
      told = told | _told(stream(tokens), tokens.shape)
    return told

  return observe


def _told(answer: Any, shape: tuple[int, ...]) -> Any:
  """Who ends now, by what `stream` answered."""
  if answer is None or isinstance(answer, bool | np.bool_):
    return bool(answer)
  array = isinstance(answer, np.ndarray | jax.Array)
  if array and answer.dtype == bool and answer.shape in ((), shape):
    return np.asarray(answer)
  # A truth value would end it at the first `lambda t: file.write(...)`.
  what = f"{answer.dtype} {list(answer.shape)}" if array else repr(answer)
  raise InputTypeError(
    "stream",
    f"an answer of {type(answer).__name__}, {what}",
    f"None, True, False, or an array of bools {list(shape)}",
    "let it return nothing, or whether to end",
  )
