"""Reads prompts and continues them.

`generate` does a whole answer; a `Session` keeps the cache of a conversation
between calls, so that a new turn reads only what is new.
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
  `new[:2]`, is one of `tokens`, which NumPy also takes for the whole:
  `np.asarray(new)` has padding.

  A row ends with the token that ended it: the stop id, or the token that
  completed a stop string. `decode` leaves out special tokens, as most stop ids
  are, but not the text of a stop string.

  Attributes:
    tokens: int32 [B, max_new_tokens], rows filled up with `pad_id`.
    lengths: int32 [B], how many tokens of each row were generated.
  """

  tokens: np.ndarray
  lengths: np.ndarray

  def __len__(self) -> int:
    """The number of rows."""
    return len(self.tokens)

  def __getitem__(
    self, key: int | np.integer | slice | tuple[int | np.integer | slice, ...]
  ) -> Any:
    """A row without padding, int32 [lengths[row]]; else `tokens[key]`."""
    if isinstance(key, int | np.integer):
      return self.tokens[key, : self.lengths[key]]
    return self.tokens[key]

  def __iter__(self) -> Iterator[np.ndarray]:
    """The rows without padding."""
    return (self[row] for row in range(len(self)))

  def __array__(
    self, dtype: DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    """`tokens`, as NumPy asks for an array."""
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

  What a sampler draws for a token is a function of its seed, of the number of
  the row and of the token's position in it: neither other rows, the turns of a
  conversation nor the mesh matter. Another seed or temperature compiles
  nothing, nor does any other number of a sampler.

  Rotations that depend on the length of the context (dynamic, longrope) are
  those of each row's own prompt, whatever `max_new_tokens`, the other rows and
  the chunks are; see `ops.rope`. With a session they are those of its capacity:
  longrope's factors for short texts are not made for rows that grow beyond
  them, which a session of a larger capacity rotates by the others from the
  start. Behind contexts they are those of the longest row with its contexts.

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
    machine: the model's cost on these devices and their links, by which
      prefill="auto" then chooses (`rj.plan.choose`); the report has the
      reasons. Default: "striped" on a sharded sequence. Refused where there is
      no choice: with a chunk, and for recurrent layers on a sharded sequence.
    keep: where the cache is once the prompt is read: "sharded" over the
      sequence's axis, on which all devices decode, or on the "last" device of
      that axis, which then decodes alone, with its own copy of the weights.
    wire: how keys and values travel while a prompt is read on several shards:
      "cache", as the bytes that the cache stores, encoded once; a codec or a
      dtype, see `Ring`; None: as they are. Each query sees its own shard's keys
      exact.
    cache: a `Session`, to continue where it is and to leave it behind; the
      tokens are then what comes after those that it holds.
    contexts: documents that `tokens` are about, each read apart: ids or an
      `EncodedContext`, those of all rows, or for each row a list of them. See
      `context_session`.
    combine: how they are combined: "full", "parallel" (the default), "ape",
      "select", "recompute", "kvlink", "cepe", with options as in
      "ape:temperature=0.8", or an object of `rj.infer.contexts`.
    library: which encodes and keeps them, a `ContextLibrary`; default: one for
      this call.
    speculate: drafts tokens, of which one call of the model checks several: a
      name of `rj.infer.speculate.DRAFTERS` with options, as
      "lookup:count=8", or a `Drafter`. No token changes by it, with
      verify="rejection" no probability.
    cache_kind: how the cache that is made stores keys and values, an
      `rj.kv.CacheKind` or its name, one of `rj.kv.KINDS`; default "windowed",
      which keeps no more than later tokens see.
    cache_dtype: of the cache that is made: bfloat16, float16, float32 or
      float64; default: the model's.
    rows_at_once: rows that a layer computes at a time, group by group: a large
      batch then needs no more memory on its way than so many rows, and each
      layer's weights are still fetched once a call. Default: all rows.
    cache_placement: where the keys of a layer are that does not run, in host
      memory or on disk, see `Session`; no token changes by it.
    hidden_placement: the same of hidden states, with rows_at_once.
    disk: a folder for the part of the cache that is on disk.
    attention_fn: a dense attention function that reads the cache's keys as
      plain arrays, see `Session`; the prompt is then read in chunks.
    grow: tokens by which the cache's memory grows, see `Session`.
    stop: ids behind which a row ends, or texts, or both; or a `Stop`.
    tokenizer: of the texts, which may span tokens; and encodes the request
      for a repetition, where a policy repeats the prompt (`rj.kv.KVzip`).
    stream: called with each step's tokens, int32 [B]. Its answer True ends
      the generation, an array of bools [B] ends single rows, None and False
      end nothing; anything else is refused.
    progress: called with the number of prompt tokens read, after each chunk
      and when all are read.
    report: called with what was done, at the end.
    pad_id: fills up rows that stopped early.
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
    NotFiniteLogitsError: the logits of some rows are NaN or infinite, or those
      of a draft's model; raised when all rows have ended, with what would have
      been returned as its `tokens`: whole answers of the other rows, and of all
      rows where it is the draft's. A session refuses further calls where the
      logits were the model's own, until `restart`.
    RingjaxError: in Python, before anything is compiled; but for a wrong
      answer of `stream`, which ends the generation.
  """
  check_call(model, tokens)
  make_room()
  count = positive_int("max_new_tokens", max_new_tokens)
  sampler, stop = from_names(sampler, stop, names)
  check_callable(sampler=sampler, stream=stream, progress=progress,
                  report=report)  # fmt: skip
  if cache_dtype is not None:
    float_dtype("cache_dtype", cache_dtype)
  # Of a session that is made here.
  own: dict[str, Any] = dict(
    mesh=mesh,
    axis=axis,
    dtype=cache_dtype,
    cache_kind=None if cache_kind is None else kinds.cache_kind(cache_kind),
  )
  offloaded = cache_placement is not None
  if offloaded or getattr(getattr(cache, "cache", None), "fetch", None):
    _check_offloaded(contexts, speculate, keep)
  if rows_at_once is not None or getattr(cache, "rows_at_once", None):
    _check_groups(contexts, speculate, keep, own["cache_kind"])
  options = PrefillOptions(
    method=prefill,
    chunk=chunk,
    partition=partition,
    machine=machine,
    keep=keep,
    wire=stored_wire(model, cache, own) if wire == "cache" else wire,
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
        **own,
      )
      own = dict.fromkeys(own)
  elif combine is not None or library is not None:
    raise OptionError(
      "combine" if library is None else "library",
      "a value without contexts",
      "contexts to combine",
      "pass contexts=[...], or leave it out",
    )
  own |= dict(
    rows_at_once=rows_at_once,
    cache_placement=cache_placement,
    hidden_placement=hidden_placement,
    disk=disk,
    attention_fn=attention_fn,
    grow=grow,
  )
  own_attention = attention_fn or getattr(cache, "attention_fn", None)
  if own_attention is not None:
    _refuse_beside("attention_fn", contexts=contexts, speculate=speculate)
  if grow is not None:
    _refuse_beside("grow", contexts=contexts)
  if cache is not None:
    check_session(cache, model, len(prompts), own)
    start = cache.lengths
    prompts = with_pending(prompts, cache)
  lengths = np.array([p.size for p in prompts])
  held_kind = own["cache_kind"] if cache is None else cache.cache.kind
  policy = None if held_kind is None else held_kind.policy
  moves = policy is not None and policy.moves
  if not moves:
    check_context(model, start, lengths, count)
  spare = 0 if drafter is None else drafter.nodes - drafter.depth
  session, how, total = planned(
    model, cache, options, own, start, lengths, count, spare
  )
  if moves:
    check_context(model, start, lengths, count, session.cache.kind, how)
  if contexts is not None and session.contexts is not None:
    # No number of tokens that may come changes an answer.
    total = np.array((start + lengths).max(), np.int32)
  if drafter is not None:
    check_speculation(drafter, session, sampler, ending.watches)
  asked = asked_repetition(model, session, start, lengths, tokenizer)
  model, last = session.weights(model), None
  if keep == "last" and session.mesh is not None:
    # Refused before the prompt is read, and not behind it.
    refuse_placed(model, "bring it to one device", "pass keep='sharded'")
    last = last_device(session.mesh, session.axis)
    here(model, last)
  logits = read_prompts(
    model, session, how, prompts, start, total, progress, asked
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
      # Contexts are at positions of their own, or of another vocabulary.
      texts, vocab = prompts, model.config.vocab
      if contexts is not None and not isinstance(combine_of(combine), Cepe):
        texts = joined(contexts, texts, Full(), vocab)
    out, sizes, speculation = speculated(
      *decoding, drafter, texts, marked, undrafted
    )
    new = Generated(tokens=out, lengths=sizes)
  session.last = GenerateReport(
    prefill=how,
    prompt_tokens=int(lengths.max()),
    new_tokens=int(new.lengths.max()),
    shards=session.shards,
    cache_bytes=bytes_each(session.cache),
    capacity=session.cache.capacity,
    cache_kind=session.cache.kind,
    contexts=session.contexts,
    speculation=speculation,
    memory=report_bytes(
      model, session, -(-(how.chunk or how.width) // session.shards)
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
  """Refuses what does not go with rows in groups."""
  for name, got in (
    ("contexts", contexts is not None),
    ("speculate", speculate is not None),
    ("keep", keep != KEEPS[0]),
    ("cache_kind", kind is not None and kind.repeats),
  ):
    if got:
      raise OptionError(
        name,
        "a value beside rows_at_once",
        "rows in groups, or this",
        "leave one of them out",
      )


def _refuse_beside(option: str, **others: Any) -> None:
  """Refuses other arguments that do not go with one that is given."""
  for name, value in others.items():
    if value is not None:
      raise OptionError(
        name,
        f"a value beside {option}",
        f"{name}, or {option}",
        "leave one of them out",
      )


def _check_offloaded(contexts: Any, speculate: Any, keep: str) -> None:
  """Refuses what does not go with a cache whose layers are elsewhere."""
  for name, got in (
    ("contexts", contexts is not None),
    ("speculate", speculate is not None),
    ("keep", keep != KEEPS[0]),
  ):
    if got:
      raise OptionError(
        name,
        "a value beside cache_placement",
        "a cache that is all on the devices, or this not",
        "leave one of them out",
      )


def _check_apart(cache: Any, keep: str, wire: Any) -> None:
  """Refuses what does not go with contexts that are encoded apart."""
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
  """Takes steps until all rows have ended; the first token is at `pos` [B].

  `marked` takes the rows whose logits are not finite.
  """
  attend = session.attend()
  batch, length = session.batch, jnp.asarray(total)
  out = np.full((batch, count), ending.pad_id, np.int32)
  ended, sizes = np.zeros(batch, bool), np.zeros(batch, np.int32)
  # A copy: the session's goes on.
  needs = getattr(sampler, "needs_seen", False)
  seen, sampler = jnp.array(session.seen) if needs else None, traced(sampler)

  def step(state: decode.DecodeState) -> decode.DecodeState:
    after, session.cache = decode.step(
      model, attend, sampler, session.cache, state, ending.ids, length
    )
    return after

  with session.running("decoding"):
    state = decode.first(
      sampler, logits, jnp.asarray(pos.astype(np.int32)), seen, ending.ids
    )
    recurrent, ahead = session.cache.recurrent, int(ending.watches)
    # Sums over queries do not go back behind what the caller ends.
    waits = ahead and session.cache.irreversible and not recurrent
    session.keep_slack(ahead)
    left = session.cache.steps()
    for n in range(count):
      # The next step is on its way while this one's tokens are read.
      after = None
      if n + 1 < count and left and not waits:
        after, left = step(state), left - 1
      token, done = jax.device_get((state.token, state.done))
      raise_fault(model.stack.faults)
      ended = ended | marked.note(token, pos + n, ~ended)
      if ended.all():
        # Nothing has come that could be shown.
        break
      out[:, n] = np.where(ended, ending.pad_id, token)
      sizes += ~ended
      session.say(token, pos + n, ~ended)
      told = ending.told(out[:, n], ended)
      ended = ended | done | told
      if after is not None and told.any() and not recurrent:
        session.take_back(told, pos + n)
      if n + 1 == count or ended.all():
        break
      late = after is None
      state = state if late else after
      if told.any():
        # The device knows of stop ids only, those of the next tokens too.
        state = state._replace(done=decode.ends(attend, state.done, ended))
      if late:
        if not left:
          # Rows that are over stay as they are.
          session.cache = session.cache.flush(~ended)
          session.keep_slack(ahead)
          left = session.cache.steps()
        state, left = step(state), left - 1
    session.keep_slack(0)
  return Generated(tokens=out, lengths=sizes)


class RowEndings:
  """What ends rows early, and what fills them up then.

  Attributes:
    ids: int32 [n], stop ids, for the device to look at.
    pad_id: follows the last token of a row.
    watches: whether something else may end a row: a stop string or `stream`.
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
    least, remedy = -(2**31), "leave it out to fill up with 0"
    self.pad_id = integer(
      "pad_id", pad_id, least=least, most=-least - 1, remedy=remedy
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
    """Which rows a stop string or `stream` ends at these tokens: bool [B]."""
    told = np.zeros(tokens.size, bool)
    for row, watch in enumerate(self._watches):
      if not ended[row]:
        watch.feed(int(tokens[row]))
        told[row] = watch.stopped is not None
    if self._stream is not None:
      told = told | _answered(self._stream(tokens), tokens.shape)
    return told


def _answered(answer: Any, shape: tuple[int, ...]) -> Any:
  """Which rows end now, by what `stream` answered."""
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
