"""Text generation: reads prompts and continues them.

`generate` makes a whole answer; a `Session` keeps the cache of a conversation
between calls, so that a new turn reads only its new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Int, Shaped

from ringjax.checks import integer, positive_int
from ringjax.errors import (
  InputTypeError,
  OptionError,
)
from ringjax.infer import decode, inputs
from ringjax.infer.call_memory import report_bytes
from ringjax.infer.contexts.behind_contexts import context_session, joined
from ringjax.infer.contexts.combine import Cepe, Combine, Full, combine_of
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.generate_config import (
  GenerateConfig,
  check_pairs,
  present_options,
)
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import Prefill, PrefillConfig, padded
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
from ringjax.infer.sampling import traced
from ringjax.infer.session import (
  GenerateReport,
  Session,
  on_its_mesh,
)
from ringjax.infer.speculate.rounds import check_speculation, speculated
from ringjax.infer.speculate.speculation import drafter_of
from ringjax.infer.stopping import (
  StopLike,
  as_stop,
  check_tokenizer,
)
from ringjax.kv.base import bytes_each
from ringjax.kv.offload.chosen_tiered import page_fetches
from ringjax.kv.offload.hot_pages import PageFetches
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.attention_layers.attention_function import DenseFunction
from ringjax.nn.weights.placed_layers import raise_fault
from ringjax.parallel.local_arrays import here, last_device
from ringjax.parallel.programs import make_room


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

  @overload
  def __getitem__(
    self, key: int | np.integer | slice
  ) -> Int[np.ndarray, " ..."]: ...

  @overload
  def __getitem__(
    self, key: tuple[int | np.integer | slice, ...]
  ) -> Int[np.ndarray, " ..."] | np.integer: ...

  def __getitem__(
    self, key: int | np.integer | slice | tuple[int | np.integer | slice, ...]
  ) -> Int[np.ndarray, " ..."] | np.integer:
    """A row without padding, int32 [lengths[row]]; else `tokens[key]`."""
    if isinstance(key, int | np.integer):
      return self.tokens[key, : self.lengths[key]]
    return self.tokens[key]

  def __iter__(self) -> Iterator[Int[np.ndarray, " _"]]:
    """Iterates over the rows without padding."""
    return (self[row] for row in range(len(self)))

  def __array__(
    self, dtype: DTypeLike | None = None, copy: bool | None = None
  ) -> Shaped[np.ndarray, "B T"]:
    """Converts to a NumPy array: `tokens`, with padding."""
    return np.array(self.tokens, dtype, copy=copy)


@on_its_mesh
def generate(
  model: Transformer,
  tokens: Prompts,
  config: GenerateConfig | None = None,
  *,
  cache: Session | None = None,
  contexts: Sequence[Any] | None = None,
  mesh: Mesh | None = None,
  attention_fn: DenseFunction | None = None,
  tokenizer: Any = None,
  stream: Callable[[np.ndarray], Any] | None = None,
  progress: Callable[[int], Any] | None = None,
  report: Callable[[GenerateReport], Any] | None = None,
  **overrides: Any,
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
    config: Options; default: those of `GenerateConfig()`.
    cache: A `Session` to continue and to update; `tokens` then follow the
      tokens that it holds.
    contexts: Documents that `tokens` are about, each encoded separately: ids or
      an `EncodedContext`, one list for all rows, or a list for each row. See
      `context_session`.
    mesh: Device mesh; default: the session's, the model's or the current one,
      else one device.
    attention_fn: Dense attention function that reads the cache's keys as
      plain arrays, see `Session`; the prompt is then read in chunks.
    tokenizer: Tokenizer of stop texts, which may span tokens; it also encodes
      the request for a repetition, if a policy repeats the prompt
      (`rj.kv.KVzip`).
    stream: Callback that gets each step's tokens, int32 [B]. If it returns
      True, the generation ends; an array of bools [B] ends single rows; None
      and False end nothing; anything else is refused.
    progress: Callback that gets the number of prompt tokens read, after each
      chunk and when all are read.
    report: Callback that gets the call's `GenerateReport`, at the end.
    **overrides: Options of `GenerateConfig` and of its parts by name, in place
      of those of `config`: max_new_tokens=64, prefill="chunked", chunk=512,
      cache_kind="int8", temperature=0.7, stop="end", speculate="lookup".

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
  check_callable(stream=stream, progress=progress, report=report)
  config = GenerateConfig.of(config, overrides)
  # Refused here if it is missing, as `positive_int` says.
  count = positive_int("max_new_tokens", config.max_new_tokens)
  sampler, stop = config.sampler_and_stop
  check_callable(sampler=sampler)
  # Options of a session that this call makes.
  session_options: dict[str, Any] = dict(
    mesh=mesh,
    axis=config.axis,
    dtype=config.decode.cache_dtype,
    cache_kind=config.decode.kind,
  )
  strategy = _strategy(config, contexts)
  apart = strategy is not None and not isinstance(strategy, Full)
  check_pairs(
    present_options(
      config,
      cache=cache,
      contexts=contexts if apart else None,
      attention_fn=attention_fn,
    )
  )
  if contexts is not None and attention_fn is not None:
    check_pairs({"contexts": True, "attention_fn": True})
  config.placement.check_weights(model)
  options = config.prefill
  if options.sends_stored:
    wire = stored_wire(model, cache, session_options)
    options = options.replace(wire=wire)
  speculate = config.speculation.drafter
  drafter = None if speculate is None else drafter_of(speculate)
  prompts = inputs.prompts(tokens, model.config.vocab)
  ending = RowEndings(
    stop,
    tokenizer,
    stream,
    config.stopping.pad_id,
    len(prompts),
    model.config.vocab,
  )
  start = np.zeros(len(prompts), np.int64)
  if strategy is not None and contexts is not None:
    if isinstance(strategy, Full):
      prompts = joined(contexts, prompts, strategy, model.config.vocab)
    else:
      longest = max(p.size for p in prompts)
      cache = context_session(
        model,
        contexts,
        strategy,
        capacity=padded(longest, 1) + count,
        batch=len(prompts),
        library=config.combine.library,
        **session_options,
      )
      session_options = dict.fromkeys(session_options)
  placement = config.placement
  session_options |= dict(
    rows_at_once=placement.rows_at_once,
    cache_placement=placement.cache,
    hidden_placement=placement.hidden,
    disk=placement.disk,
    attention_fn=attention_fn,
    grow=config.decode.grow,
  )
  if cache is not None:
    check_session(cache, model, len(prompts), session_options)
    start = cache.lengths
    prompts = with_pending(prompts, cache)
  lengths = np.array([p.size for p in prompts])
  spare = 0 if drafter is None else drafter.nodes - drafter.depth
  session, reading, total = _planned(
    model, cache, options, session_options, start, lengths, count, spare
  )
  if contexts is not None and session.contexts is not None:
    # Without max_new_tokens, which must not change an answer.
    total = np.array((start + lengths).max(), np.int32)
  if drafter is not None:
    check_speculation(drafter, session, sampler, ending.watches)
  repetition = asked_repetition(model, session, start, lengths, tokenizer)
  model, last = session.weights(model), None
  if options.keep == "last" and session.mesh is not None:
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
  fetches_before = page_fetches(session.cache)
  if drafter is None:
    new = _decode(*decoding, marked)
  else:
    texts = session.texts()
    if session.contexts is not None:
      # The session's tokens are not one text: contexts have separate positions.
      texts = prompts
      if contexts is not None and not isinstance(strategy, Cepe):
        texts = joined(contexts, texts, Full(), model.config.vocab)
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
    tiles=session.tiles,
    fetches=_fetches_since(session.cache, fetches_before),
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


def _strategy(config: GenerateConfig, contexts: object) -> Combine | None:
  """Strategy that combines the contexts of a call; None without contexts.

  Raises:
    OptionError: If there is nothing to combine, or a library has no use.
  """
  combine, library = config.combine.strategy, config.combine.library
  if contexts is None:
    if combine is not None or library is not None:
      raise OptionError(
        "combine" if library is None else "library",
        "a value without contexts",
        "contexts to combine",
        "pass contexts=[...], or leave it out",
      )
    return None
  strategy = combine_of("parallel" if combine is None else combine)
  if isinstance(strategy, Full) and library is not None:
    raise OptionError(
      "library",
      "one with combine='full', which reads contexts anew",
      "contexts that are read apart",
      "leave it out",
    )
  return strategy


def _planned(
  model: Transformer,
  cache: Session | None,
  options: PrefillConfig,
  session_options: dict[str, Any],
  start: np.ndarray,
  lengths: np.ndarray,
  count: int,
  spare: int,
) -> tuple[Session, Prefill, np.ndarray]:
  """Plan the prefill, see `planned`, of texts that the model supports."""
  kind = session_options["cache_kind"] if cache is None else cache.cache.kind
  policy = None if kind is None else kind.policy
  # Such a policy bounds the positions of a text of any length.
  moves = policy is not None and policy.moves
  if not moves:
    check_context(model, start, lengths, count)
  session, reading, total = planned(
    model, cache, options, session_options, start, lengths, count, spare
  )
  if moves:
    check_context(model, start, lengths, count, session.cache.kind, reading)
  return session, reading, total


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


def _fetches_since(
  cache: Any, earlier: PageFetches | None
) -> PageFetches | None:
  """Chosen pages of host memory since an earlier count; None without any."""
  fetches = page_fetches(cache)
  if earlier is None or fetches is None:
    return None
  return fetches.since(earlier)


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

  def told(
    self, tokens: Int[np.ndarray, " B"], ended: Bool[np.ndarray, " B"]
  ) -> Bool[np.ndarray, " B"]:
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


def _answered(
  answer: Any, shape: tuple[int, ...]
) -> bool | Bool[np.ndarray, " B"]:
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
