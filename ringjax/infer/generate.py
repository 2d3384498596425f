"""Text generation: reads prompts and continues them.

`generate` makes a whole answer; a `Session` keeps the cache of a conversation
between calls, so that a new turn reads only its new tokens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringjax.checks import float_dtype, integer, positive_int
from ringjax.errors import (
  InputTypeError,
  OptionError,
)
from ringjax.infer import decode, inputs
from ringjax.infer.call_memory import report_bytes
from ringjax.infer.contexts.behind_contexts import context_session, joined
from ringjax.infer.contexts.combine import Cepe, Combine, Full, combine_of
from ringjax.infer.contexts.context_library import ContextLibrary
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import PrefillOptions, padded
from ringjax.infer.prompt_reading import (
  asked_repetition,
  check_call,
  check_callable,
  check_context,
  check_session,
  planned,
  read_prompts,
  stored_wire,
  with_pending,
)
from ringjax.infer.sampling import from_names, traced
from ringjax.infer.session import (
  GenerateReport,
  Session,
  on_its_mesh,
)
from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.speculate.rounds import check_speculation, speculated
from ringjax.infer.speculate.speculation import drafter_of
from ringjax.infer.stopping import (
  Stop,
  StopLike,
  as_stop,
  check_tokenizer,
)
from ringjax.kv import cache_kind as kinds
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import WeightPlacement, refuse_placed
from ringjax.nn.attention_function import DenseFunction
from ringjax.nn.placed import raise_fault
from ringjax.ops.attention.wire_format import WireLike
from ringjax.parallel.local import here, last_device
from ringjax.parallel.programs import make_room
from ringjax.plan.choice import KEEPS, Machine


# Arrays have no single truth value, by which dataclasses would compare them.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
  """New tokens of a batch, whose rows may end at different lengths.

  `new[row]` and iteration give the ids of a row without its padding, so that
  `tokenizer.decode(new[0])` is the answer. Any other index, as `new[0, :3]` or
  `new[:2]`, indexes `tokens`. `np.asarray(new)` is `tokens`, with padding.

  A row ends with the token that ended it: the stop id, or the token that
  completed a stop string. `decode` leaves out special tokens, as most stop ids
  are, but not the text of a stop string.

  Attributes:
    tokens: New token ids, int32 [B, max_new_tokens], padded with `pad_id`.
    lengths: Number of new tokens in each row, int32 [B].
  """

  tokens: np.ndarray
  lengths: np.ndarray

  def __len__(self) -> int:
    """Number of rows."""
    return len(self.tokens)

  def __getitem__(
    self, key: int | np.integer | slice | tuple[int | np.integer | slice, ...]
  ) -> Any:
    """A row without padding, int32 [lengths[row]]; else `tokens[key]`."""
    if isinstance(key, int | np.integer):
      return self.tokens[key, : self.lengths[key]]
    return self.tokens[key]

  def __iter__(self) -> Iterator[np.ndarray]:
    """Iterates over the rows without padding."""
    return (self[row] for row in range(len(self)))

  def __array__(
    self, dtype: DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    """Converts to a NumPy array: `tokens`, with padding."""
    return np.array(self.tokens, dtype, copy=copy)


@on_its_mesh
def generate(
  model: Transformer,
  tokens: Prompts,
  *,
  max_new_tokens: int,
  sampler: Callable[..., Any] | None = None,
  prefill: str = "auto",
  mesh: Mesh | None = None,
  axis: str | None = None,
  chunk: int | None = None,
  partition: Sequence[int] | None = None,
  machine: Machine | None = None,
  keep: str = "sharded",
  wire: WireLike | None = None,
  cache: Session | None = None,
  contexts: Sequence[Any] | None = None,
  combine: Combine | str | None = None,
  library: ContextLibrary | None = None,
  speculate: Drafter | str | None = None,
  cache_dtype: DTypeLike | None = None,
  cache_kind: CacheKind | str | None = None,
  rows_at_once: int | None = None,
  cache_placement: WeightPlacement | str | None = None,
  hidden_placement: WeightPlacement | str | None = None,
  disk: str | os.PathLike[str] | None = None,
  attention_fn: DenseFunction | None = None,
  grow: int | None = None,
  stop: Stop | str | int | Iterable[int | str] | None = None,
  tokenizer: Any = None,
  stream: Callable[[np.ndarray], Any] | None = None,
  progress: Callable[[int], Any] | None = None,
  report: Callable[[GenerateReport], Any] | None = None,
  pad_id: int = 0,
  **names: Any,
) -> Generated:
  """Continues prompts.

  A sampled token is a function of the sampler's seed, the number of the row and
  the token's position in it: neither other rows, the turns of a conversation
  nor the mesh matter. Another seed or temperature compiles nothing, nor does
  another value of any other setting of a sampler.

  Rotations that depend on the length of the context (dynamic, longrope) use the
  length of each row's own prompt, whatever `max_new_tokens`, the other rows and
  the chunks are; see `ops.rope`. With a session they use its capacity:
  longrope's factors for short texts do not suit rows that grow beyond them,
  which a session of a larger capacity rotates by the long factors from the
  start. With contexts they use the longest row including its contexts.

  Args:
    model: Model made by `rj.models.load` or `create`.
    tokens: Token ids, int32 [B, T], or B sequences of different lengths.
    max_new_tokens: Maximum number of tokens to add to each row.
    sampler: Sampler that chooses a token from logits; default `Greedy()`.
    prefill: Method that reads the prompt: "auto", "dense", "blockwise" (one
      device); "ring", "striped", "zigzag", "bidirectional", "gather",
      "ulysses", "hybrid", "kvr" (a sharded sequence; on one shard they all are
      "blockwise", and the report says so); "chunked" (either).
    mesh: Device mesh; default: the session's, the model's or the current one,
      else one device.
    axis: Mesh axis that shards the sequence; default "seq" if there is one.
    chunk: Maximum number of tokens in a chunk of a chunked prefill.
    partition: Number of tokens of each shard for "kvr", KV-Runahead's chain
      (Cho et al. 2024, arXiv 2405.05329); default: shards have equal work.
    machine: The model's cost on these devices and their links, by which
      prefill="auto" then chooses (`rj.plan.choose`); the report has the
      reasons. Default: "striped" on a sharded sequence. Refused where only one
      method works, with a chunk or with recurrent layers on a sharded sequence.
    keep: Location of the cache after the prompt is read: "sharded" over the
      sequence's axis, on which all devices decode, or on the "last" device of
      that axis, which then decodes alone, with its own copy of the weights.
    wire: Transfer format of keys and values while a prompt is read on several
      shards: "cache", the bytes that the cache stores, encoded once; a codec or
      a dtype, see `Ring`; None: unchanged. Each query sees the exact keys of
      its own shard.
    cache: A `Session` to continue and to update; `tokens` then follow the
      tokens that it holds.
    contexts: Documents that `tokens` are about, each encoded separately: ids or
      an `EncodedContext`, one list for all rows, or a list for each row. See
      `context_session`.
    combine: Strategy that combines contexts: "full", "parallel" (the default),
      "ape", "select", "recompute", "kvlink", "cepe", with options as in
      "ape:temperature=0.8", or an object of `rj.infer.contexts`.
    library: A `ContextLibrary` that encodes and keeps contexts; default: a new
      one for this call.
    speculate: Drafter of tokens, of which one call of the model checks several:
      a name of `rj.infer.speculate.DRAFTERS` with options, as
      "lookup:count=8", or a `Drafter`. It changes no token, and with
      verify="rejection" no probability.
    cache_kind: Storage format of keys and values in a new cache, an
      `rj.kv.CacheKind` or its name, one of `rj.kv.KINDS`; default "windowed",
      which keeps no more than later tokens see.
    cache_dtype: Dtype of a new cache: bfloat16, float16, float32 or float64;
      default: the model's.
    rows_at_once: Number of rows that a layer computes at a time, group by
      group: activations of a large batch then need the memory of this many
      rows, and each layer's weights are still fetched once a call. Default: all
      rows.
    cache_placement: Placement of the keys of layers that are not running, in
      host memory or on disk, see `Session`; it changes no token.
    hidden_placement: Placement of the hidden states of groups that are not
      running, with rows_at_once.
    disk: Folder for the part of the cache that is on disk.
    attention_fn: Dense attention function that reads the cache's keys as
      plain arrays, see `Session`; the prompt is then read in chunks.
    grow: Number of tokens by which the cache's memory grows, see `Session`.
    stop: Token ids or texts after which a row ends, or both; or a `Stop`.
    tokenizer: Tokenizer of stop texts, which may span tokens; it also encodes
      the request for a repetition, if a policy repeats the prompt
      (`rj.kv.KVzip`).
    stream: Callback that gets each step's tokens, int32 [B]. If it returns
      True, the generation ends; an array of bools [B] ends single rows; None
      and False end nothing; anything else is refused.
    progress: Callback that gets the number of prompt tokens read, after each
      chunk and when all are read.
    report: Callback that gets the call's `GenerateReport`, at the end.
    pad_id: Id that pads rows that stopped early.
    **names: Options in place of `sampler` and `stop`, named as in transformers:
      temperature, top_k, top_p, min_p, repetition_penalty, do_sample, seed;
      eos_token_id. One of the first four samples, unless do_sample=False;
      do_sample=True alone keeps all tokens, without a default top_k.

  Returns:
    The new tokens: `new[row]` are those of a row, int32, including the stop id
    that ended it; `new.tokens` is int32 [B, max_new_tokens], with `pad_id`.

  Raises:
    PromptError: If a prompt is invalid, or with `max_new_tokens` longer than
      the context that the model's config states.
    NotFiniteLogitsError: If logits of some rows are NaN or infinite, or those
      of a draft model; raised when all rows have ended, with the result of the
      call as its `tokens`: whole answers of the other rows, and of all rows if
      only the draft's logits were wrong. A session refuses further calls until
      `restart` if the logits were the model's own.
    RingjaxError: If an argument is invalid; raised before anything is compiled,
      except for a wrong answer of `stream`, which ends the generation.
  """
  check_call(model, tokens)
  make_room()
  count = positive_int("max_new_tokens", max_new_tokens)
  sampler, stop = from_names(sampler, stop, names)
  check_callable(sampler=sampler, stream=stream, progress=progress,
                  report=report)  # fmt: skip
  if cache_dtype is not None:
    float_dtype("cache_dtype", cache_dtype)
  # Options of a session that this call makes.
  session_options: dict[str, Any] = dict(
    mesh=mesh,
    axis=axis,
    dtype=cache_dtype,
    cache_kind=None if cache_kind is None else kinds.cache_kind(cache_kind),
  )
  offloaded = cache_placement is not None
  if offloaded or getattr(getattr(cache, "cache", None), "fetch", None):
    _check_offloaded(contexts, speculate, keep)
  if rows_at_once is not None or getattr(cache, "rows_at_once", None):
    _check_groups(contexts, speculate, keep, session_options["cache_kind"])
  options = PrefillOptions(
    method=prefill,
    chunk=chunk,
    partition=partition,
    machine=machine,
    keep=keep,
    wire=stored_wire(model, cache, session_options)
    if wire == "cache"
    else wire,
  )
  drafter = None if speculate is None else drafter_of(speculate)
  prompts = inputs.prompts(tokens, model.config.vocab)
  ending = RowEndings(
    stop, tokenizer, stream, pad_id, len(prompts), model.config.vocab
  )
  start = np.zeros(len(prompts), np.int64)
  if contexts is not None:
    combine = combine_of("parallel" if combine is None else combine)
    if isinstance(combine, Full):
      if library is not None:
        raise OptionError(
          "library",
          "one with combine='full', which reads contexts anew",
          "contexts that are read apart",
          "leave it out",
        )
      prompts = joined(contexts, prompts, combine, model.config.vocab)
    else:
      _check_apart(cache, keep, wire)
      longest = max(p.size for p in prompts)
      cache = context_session(
        model,
        contexts,
        combine,
        capacity=padded(longest, 1) + count,
        batch=len(prompts),
        library=library,
        **session_options,
      )
      session_options = dict.fromkeys(session_options)
  elif combine is not None or library is not None:
    raise OptionError(
      "combine" if library is None else "library",
      "a value without contexts",
      "contexts to combine",
      "pass contexts=[...], or leave it out",
    )
  session_options |= dict(
    rows_at_once=rows_at_once,
    cache_placement=cache_placement,
    hidden_placement=hidden_placement,
    disk=disk,
    attention_fn=attention_fn,
    grow=grow,
  )
  custom_attention = attention_fn or getattr(cache, "attention_fn", None)
  if custom_attention is not None:
    _refuse_beside("attention_fn", contexts=contexts, speculate=speculate)
  if grow is not None:
    _refuse_beside("grow", contexts=contexts)
  if cache is not None:
    check_session(cache, model, len(prompts), session_options)
    start = cache.lengths
    prompts = with_pending(prompts, cache)
  lengths = np.array([p.size for p in prompts])
  held_kind = (
    session_options["cache_kind"] if cache is None else cache.cache.kind
  )
  policy = None if held_kind is None else held_kind.policy
  moves = policy is not None and policy.moves
  if not moves:
    check_context(model, start, lengths, count)
  spare = 0 if drafter is None else drafter.nodes - drafter.depth
  session, reading, total = planned(
    model, cache, options, session_options, start, lengths, count, spare
  )
  if moves:
    check_context(model, start, lengths, count, session.cache.kind, reading)
  if contexts is not None and session.contexts is not None:
    # Without max_new_tokens, which must not change an answer.
    total = np.array((start + lengths).max(), np.int32)
  if drafter is not None:
    check_speculation(drafter, session, sampler, ending.watches)
  repetition = asked_repetition(model, session, start, lengths, tokenizer)
  model, last = session.weights(model), None
  if keep == "last" and session.mesh is not None:
    # Checked before the prompt is read rather than after it.
    refuse_placed(model, "bring it to one device", "pass keep='sharded'")
    last = last_device(session.mesh, session.axis)
    here(model, last)
  logits = read_prompts(
    model, session, reading, prompts, start, total, progress, repetition
  )
  if last is not None:
    session.gather(last)
    model, logits = session.weights(model), here(logits, last)
  decoding = (
    model, session, sampler, logits, start + lengths, ending, total, count,
  )  # fmt: skip
  speculation, marked, undrafted = None, NotFiniteRows(), NotFiniteRows()
  if drafter is None:
    new = _decode(*decoding, marked)
  else:
    texts = session.texts()
    if session.contexts is not None:
      # The session's tokens are not one text: contexts have separate positions.
      texts, vocab = prompts, model.config.vocab
      if contexts is not None and not isinstance(combine_of(combine), Cepe):
        texts = joined(contexts, texts, Full(), vocab)
    out, sizes, speculation = speculated(
      *decoding, drafter, texts, marked, undrafted
    )
    new = Generated(tokens=out, lengths=sizes)
  session.last = GenerateReport(
    prefill=reading,
    prompt_tokens=int(lengths.max()),
    new_tokens=int(new.lengths.max()),
    shards=session.shards,
    cache_bytes=bytes_each(session.cache),
    capacity=session.cache.capacity,
    cache_kind=session.cache.kind,
    contexts=session.contexts,
    speculation=speculation,
    memory=report_bytes(
      model, session, -(-(reading.chunk or reading.width) // session.shards)
    ),
  )
  if report is not None:
    report(session.last)
  session.not_finite(marked.at)
  if undrafted.at:
    session.drafting = None
  marked.check(model.dtype, new)
  undrafted.check(model.dtype, new, name="logits of the draft")
  return new


def _check_groups(
  contexts: Any, speculate: Any, keep: str, kind: CacheKind | None
) -> None:
  """Refuses arguments that do not support rows in groups."""
  for name, is_set in (
    ("contexts", contexts is not None),
    ("speculate", speculate is not None),
    ("keep", keep != KEEPS[0]),
    ("cache_kind", kind is not None and kind.repeats),
  ):
    if is_set:
      raise OptionError(
        name,
        "a value beside rows_at_once",
        "rows in groups, or this",
        "leave one of them out",
      )


def _refuse_beside(option: str, **others: Any) -> None:
  """Refuses other arguments that cannot be combined with `option`."""
  for name, value in others.items():
    if value is not None:
      raise OptionError(
        name,
        f"a value beside {option}",
        f"{name}, or {option}",
        "leave one of them out",
      )


def _check_offloaded(contexts: Any, speculate: Any, keep: str) -> None:
  """Refuses arguments that do not support an offloaded cache."""
  for name, is_set in (
    ("contexts", contexts is not None),
    ("speculate", speculate is not None),
    ("keep", keep != KEEPS[0]),
  ):
    if is_set:
      raise OptionError(
        name,
        "a value beside cache_placement",
        "a cache that is all on the devices, or this not",
        "leave one of them out",
      )


def _check_apart(cache: Any, keep: str, wire: Any) -> None:
  """Refuses arguments that do not support separately encoded contexts."""
  for name, value, default in (
    ("cache", cache, None),
    ("keep", keep, KEEPS[0]),
    ("wire", wire, None),
  ):
    if value is not default and value != default:
      raise OptionError(
        name,
        "a value beside contexts",
        "contexts, or this",
        "leave it out, or pass combine='full'; several questions to the same "
        "contexts: rj.infer.context_session",
      )


def _decode(
  model: Transformer,
  session: Session,
  sampler: Any,
  logits: jax.Array,
  pos: np.ndarray,
  ending: RowEndings,
  total: np.ndarray,
  count: int,
  marked: NotFiniteRows,
) -> Generated:
  """Decodes until all rows have ended; the first token is at `pos` [B].

  `marked` records the rows whose logits are not finite.
  """
  attend = session.attend()
  batch, length = session.batch, jnp.asarray(total)
  out = np.full((batch, count), ending.pad_id, np.int32)
  ended, sizes = np.zeros(batch, bool), np.zeros(batch, np.int32)
  # A copy, since the session's own array changes meanwhile.
  needs_seen = getattr(sampler, "needs_seen", False)
  seen, sampler = (
    jnp.array(session.seen) if needs_seen else None,
    traced(sampler),
  )

  def step(state: decode.DecodeState) -> decode.DecodeState:
    next_state, session.cache = decode.step(
      model, attend, sampler, session.cache, state, ending.ids, length
    )
    return next_state

  with session.running("decoding"):
    state = decode.first(
      sampler, logits, jnp.asarray(pos.astype(np.int32)), seen, ending.ids
    )
    recurrent, lookahead = session.cache.recurrent, int(ending.watches)
    # Sums over queries cannot be undone if the caller ends a row.
    waits = lookahead and session.cache.irreversible and not recurrent
    session.keep_slack(lookahead)
    steps_left = session.cache.steps()
    for n in range(count):
      # The next step is dispatched before this one's tokens are read.
      next_state = None
      if n + 1 < count and steps_left and not waits:
        next_state, steps_left = step(state), steps_left - 1
      token, rows_done = jax.device_get((state.token, state.done))
      raise_fault(model.stack.faults)
      ended = ended | marked.note(token, pos + n, ~ended)
      if ended.all():
        # This step has no token to show.
        break
      out[:, n] = np.where(ended, ending.pad_id, token)
      sizes += ~ended
      session.say(token, pos + n, ~ended)
      ended_by_caller = ending.told(out[:, n], ended)
      ended = ended | rows_done | ended_by_caller
      if next_state is not None and ended_by_caller.any() and not recurrent:
        session.take_back(ended_by_caller, pos + n)
      if n + 1 == count or ended.all():
        break
      needs_step = next_state is None
      state = state if needs_step else next_state
      if ended_by_caller.any():
        # The device's state has rows ended by stop ids only.
        state = state._replace(done=decode.ends(attend, state.done, ended))
      if needs_step:
        if not steps_left:
          # Only live rows are flushed.
          session.make_room(~ended)
          session.keep_slack(lookahead)
          steps_left = session.cache.steps()
        state, steps_left = step(state), steps_left - 1
    session.keep_slack(0)
  return Generated(tokens=out, lengths=sizes)


class RowEndings:
  """Stop rules that end rows early, and the padding id.

  Attributes:
    ids: Stop ids, checked on the device, int32 [n].
    pad_id: Id that pads a row after its last token.
    watches: Whether the host may end a row: by a stop string or `stream`.
  """

  def __init__(
    self,
    stop: StopLike,
    tokenizer: Any,
    stream: Callable[..., Any] | None,
    pad_id: int,
    batch: int,
    vocab: int,
  ):
    min_id, remedy = -(2**31), "leave it out to fill up with 0"
    self.pad_id = integer(
      "pad_id", pad_id, least=min_id, most=-min_id - 1, remedy=remedy
    )
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
    rows = range(batch if stop.strings else 0)
    self.ids = decode.stop_ids(stop.ids)
    self._watches = [stop.watch(tokenizer) for _ in rows]
    self._stream = stream
    self.watches = bool(self._watches) or stream is not None

  def told(self, tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Mask of rows that a stop string or `stream` ends here, bool [B]."""
    ended_by_caller = np.zeros(tokens.size, bool)
    for row, watch in enumerate(self._watches):
      if not ended[row]:
        watch.feed(int(tokens[row]))
        ended_by_caller[row] = watch.stopped is not None
    if self._stream is not None:
      ended_by_caller = ended_by_caller | _answered(
        self._stream(tokens), tokens.shape
      )
    return ended_by_caller


def _answered(answer: Any, shape: tuple[int, ...]) -> Any:
  """Mask of rows that end, from the return value of `stream`."""
  if answer is None or isinstance(answer, bool | np.bool_):
    return bool(answer)
  array = isinstance(answer, np.ndarray | jax.Array)
  if array and answer.dtype == bool and answer.shape in ((), shape):
    return np.asarray(answer)
  # Truth values are refused: `lambda t: file.write(...)` returns a count.
  answer_text = (
    f"{answer.dtype} {list(answer.shape)}" if array else repr(answer)
  )
  raise InputTypeError(
    "stream",
    f"an answer of {type(answer).__name__}, {answer_text}",
    f"None, True, False, or an array of bools {list(shape)}",
    "let it return nothing, or whether to end",
  )
