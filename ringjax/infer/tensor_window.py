"""Tensor parallelism over processes with little memory each (TPI-LLM).

Each rank has some heads and some columns of every layer, uneven if it is told
so, reads its blocks from the folder while it computes, and holds a few of them:
attention of layer 0, feedforward of layer 0, attention of layer 1, ... The
terms of each block go to rank 0, which adds them up.

  rank 0     rows of the embedding -> norm -> send, its own term, receive -> sum
             -> residual -> ... -> last norm, head, sampling
  others     receive -> term -> send

Guarantees: logits are those of the whole model up to the rounding of a sum, and
the same bits in every run with the same shares: terms are added in the order of
ranks, in float32. Prompts, generated tokens, embedding and head are on rank 0
alone; the others get hidden states, positions, and which tokens are padding. At
most `window` blocks of weights are in a rank's memory.
Cost: each pass reads every block from disk, once for all rows of a batch; a
message to each rank and one back for each block.
Memory: on a rank its window and its heads' part of the cache; on rank 0 also
the head, as one block of its window, and the rows of the embedding that occur.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), which adds terms in the order
in which they come, and has the embedding as a block.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ringjax.checks import float_dtype, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.infer import decode, inputs
from ringjax.infer.block_window import BlockTimes, BlockWindow
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.generate import Generated, RowEndings
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import padded
from ringjax.infer.prompt_reading import check_callable
from ringjax.infer.sampling import from_names, traced
from ringjax.infer.star import Kind, Star, StarLink
from ringjax.infer.stopping import StopLike
from ringjax.kv import cache_kind as kinds
from ringjax.kv import kind_text
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Calibrated, Codec
from ringjax.models.hf.tensors import parameters
from ringjax.models.tensor_shares import ModulePart, SharedModel
from ringjax.models.transformer import TransformerConfig, logits_of
from ringjax.models.window_layout import WindowLayout, rank_blocks
from ringjax.nn.linear import part_dtype, stream_dtype
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.gather import Gather
from ringjax.ops.mask import Coords
from ringjax.parallel.programs import bounded, make_room
from ringjax.plan import layer_window
from ringjax.plan.layer_window import WindowBlock, WindowRun
from ringjax.typing import Lengths

_READING = ContextParallel(axis=None, strategy=Gather())
_DECODING = CachedAttention(axis=None)
# Numbers of what is sent beside the inputs of blocks.
_POS, _SEG, _LENGTH = 1 << 30, (1 << 30) + 1, (1 << 30) + 2


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModuleProgram:
  """How a module is made of arrays as they are stored.

  Attributes:
    spec: builds it.
    tensors: of each array its form, its parameters' paths, and whether arrays
      are stacked in it.
    embed: D.
    dtype: of the computation.
  """

  spec: Any
  tensors: tuple[Any, ...]
  embed: int
  dtype: str

  def module(self, arrays: Sequence[jax.Array]) -> Any:
    template, flat, tree = _template(self.spec, self.embed)
    found: dict[str, jax.Array] = {}
    for (form, paths, stacked), x in zip(self.tensors, arrays, strict=True):
      split = jax.vmap(form.split) if stacked else form.split
      found.update(zip(paths, split(x), strict=True))
    made = [
      p.replace(
        found[path].astype(
          p.get_value().dtype if p.get_metadata()["wide"] else self.dtype
        )
      )
      for path, p in zip(template, flat, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def _module_program(model: SharedModel, part: ModulePart) -> _ModuleProgram:
  """How a module is made of what is read of it."""
  spec, tensors = part.layout
  return _ModuleProgram(
    spec=spec,
    tensors=tensors,
    embed=model.config.embed,
    dtype=model.dtype.name,
  )


@functools.lru_cache(maxsize=256)
def _template(spec: Any, embed: int) -> tuple[Any, Any, Any]:
  """A module's parameters by their paths, and its tree."""
  shapes = jax.eval_shape(lambda: spec.build(nnx.Rngs(0), embed))
  flat, tree = jax.tree.flatten(
    shapes, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  return tuple(parameters(shapes)), flat, tree


@bounded
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def _attention_term(
  program: _ModuleProgram,
  attend: ShardingContext,
  arrays: PyTree,
  h: Float[Array, "B T D"],
  cache: KVCache,
  at: Coords,
  length: Lengths,
) -> tuple[jax.Array, KVCache]:
  """A rank's term of attention, and its layer's cache with the call's keys."""
  sees = isinstance(attend, CachedAttention)
  tokens = Tokens(
    *at,
    derived=not sees,
    segmented=True,
    ropes=program.spec.ropes,
    length=length,
  )
  cache = cache.allocate(tokens.at, replicated=sees, sees=sees)
  part = cache.layer(0, cache.slots[0], jnp.int32(0))
  y, part = program.module(arrays)(h, tokens, part, attend)
  return y, cache.updated((part.slots,))


@bounded
@functools.partial(jax.jit, static_argnums=(0, 1))
def _feedforward_term(
  program: _ModuleProgram,
  attend: ShardingContext,
  arrays: PyTree,
  h: Float[Array, "B T D"],
) -> jax.Array:
  """A rank's term of a feedforward."""
  return program.module(arrays)(h, attend)


@bounded
@functools.partial(jax.jit, static_argnums=(0,))
def _normed(
  program: _ModuleProgram, arrays: PyTree, x: Float[Array, "B T D"]
) -> jax.Array:
  return program.module(arrays)(x)


@bounded
@functools.partial(jax.jit, static_argnums=(0, 1))
def _joined(
  program: _ModuleProgram | None,
  scale: float,
  arrays: PyTree,
  x: Float[Array, "B T D"],
  terms: PyTree,
) -> jax.Array:
  """x and the sum of a block's terms, in their order, behind its norm."""
  total = terms[0].astype(jnp.float32)
  for term in terms[1:]:
    total = total + term.astype(jnp.float32)
  y = total.astype(x.dtype)
  if program is not None:
    y = program.module(arrays)(y)
  if scale != 1.0:
    y = y * jnp.asarray(scale, y.dtype)
  return x + y


@bounded
@functools.partial(jax.jit, static_argnums=(0,))
def _output(
  program: _ModuleProgram,
  arrays: PyTree,
  x: Float[Array, "B T D"],
  rows: Int[Array, " B"],
) -> jax.Array:
  """float32 [B, V], the logits behind one token of each row."""
  made = program.module(arrays)
  last = jnp.take_along_axis(x, rows[:, None, None], 1)[:, 0]
  head = made.embed if made.head is None else made.head
  h = made.norm(last)
  h = h.astype(part_dtype(head, h.dtype))
  return logits_of(program.spec.config, head, h)


@bounded
@functools.partial(jax.jit, static_argnums=(0,))
def _embedded(scale: float, x: Float[Array, "B T D"]) -> jax.Array:
  x = x.astype(stream_dtype(x.dtype))
  return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


# ---------------------------------------------------------------------------
# One rank
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
  """What a rank held and waited for, of one call of `generate`.

  Attributes:
    rank: its number.
    window: blocks that it may hold; None for all.
    weight_bytes: of all its blocks.
    block_bytes: of each block.
    block_names: of each block.
    peak_blocks: that it held at once, since it began.
    peak_bytes: their bytes.
    bytes_read: from disk, since it began.
    cache_bytes: of its part of the cache.
    sent_bytes: of arrays, since it began.
    rss_bytes: the most that its process had in memory, code and compiler too.
    kept: blocks that stay once they are read.
    pass_bytes: that each pass reads, the first one aside.
    reads_s: of each block the mean seconds of a read.
    disk_s: of each block the mean seconds, for a token, of waiting for its
      read.
    compute_s: the same to compute it.
    peers_s: the same of waiting for other ranks, who may wait for theirs.
    events: (kind, block, start, end), from its own start of the call; or None.
  """

  rank: int
  window: int | None
  weight_bytes: int
  block_bytes: tuple[int, ...]
  block_names: tuple[str, ...]
  peak_blocks: int
  peak_bytes: int
  bytes_read: int
  cache_bytes: int
  sent_bytes: int
  rss_bytes: int
  kept: tuple[int, ...]
  pass_bytes: int
  reads_s: tuple[float, ...]
  disk_s: tuple[float, ...]
  compute_s: tuple[float, ...]
  peers_s: tuple[float, ...]
  events: tuple[Any, ...] | None = None

  @classmethod
  def of(cls, record: dict[str, Any]) -> RankReport:
    """From a record of JSON.

    Raises:
      TypeError: other fields.
    """
    fields: dict[str, Any] = {
      k: tuple(x) if isinstance(x, list) else x for k, x in record.items()
    }
    return cls(**fields)


class _RankBlocks:
  """The blocks of a rank: its window, its caches, and how they are computed."""

  def __init__(
    self,
    model: SharedModel,
    rank: int,
    window: int | None,
    retain: int | None,
    events: bool,
  ):
    self.model, self.rank = model, rank
    self.blocks = rank_blocks(model, rank)
    self.layout = WindowLayout.of(self.blocks, window, retain)
    self.times = BlockTimes(events=events)
    self.start_s = time.monotonic()
    self.nbytes = self.layout.nbytes
    self.window = BlockWindow(self._read, self.layout, self.times)
    self.caches: list[KVCache | None] = []
    self._taken: dict[int, Any] = {}

  @property
  def layers(self) -> int:
    return len(self.model.config.layers)

  def _read(self, block: int) -> dict[str, tuple[jax.Array, ...]]:
    """A block's arrays, on the device."""
    device = jax.local_devices()[0]
    made = {
      name: tuple(
        jax.device_put(x, device, may_alias=True) for x in self.model.read(part)
      )
      for name, part in self.blocks[block].parts.items()
    }
    return jax.block_until_ready(made)

  def open(self, batch: int, capacity: int, kind: CacheKind, dtype: str):
    """Makes empty caches, a layer's in each."""
    self.times.restart()
    self.start_s = time.monotonic()
    self.caches = []
    for n in range(self.layers):
      spec: Any = self.blocks[2 * n].parts["term"].spec
      self.caches.append(
        None
        if spec is None
        else KVCache.create(
          (spec.cache_shape(1),), batch, capacity, dtype, kind=kind
        )
      )

  def program(self, block: int, name: str) -> _ModuleProgram | None:
    """How a module of a block is made; None if it has none."""
    part = self.blocks[block].parts.get(name)
    if part is None or part.spec is None:
      return None
    return _module_program(self.model, part)

  def arrays(self, block: int) -> dict[str, Any]:
    """A block's arrays, once they are there; see `release`."""
    if not self.nbytes[block]:
      return {}
    if block not in self._taken:
      self._taken[block] = self.window.take(block)
    return self._taken[block]

  def release(self, block: int) -> None:
    """Lets go of a block."""
    if self._taken.pop(block, None) is not None:
      self.window.release(block)

  def term(
    self,
    block: int,
    h: Float[Array | np.ndarray, "B T D"],
    at: Coords,
    length: Lengths,
    reading: bool,
  ) -> np.ndarray | None:
    """The rank's term of a block, [B, T, D]; None where it has no part."""
    program = self.program(block, "term")
    if program is None:
      return None
    arrays = self.arrays(block)["term"]
    attend = _READING if reading else _DECODING
    with self.times.of("compute", block):
      if block % 2:
        return np.asarray(_feedforward_term(program, attend, arrays, h))
      cache = self.caches[block // 2]
      assert cache is not None
      y, self.caches[block // 2] = _attention_term(
        program, attend, arrays, h, cache, at, length
      )
      return np.asarray(y)

  def report(self, sent_bytes: int) -> RankReport:
    """What it came to."""
    times, blocks = self.times, len(self.blocks)
    events = None
    if times.events is not None:
      events = tuple(
        (kind, k, start - self.start_s, end - self.start_s)
        for kind, k, start, end in times.events
      )
    return RankReport(
      rank=self.rank,
      window=self.window.window,
      weight_bytes=sum(self.nbytes),
      block_bytes=self.nbytes,
      peak_blocks=self.window.peak_blocks,
      peak_bytes=self.window.peak_bytes,
      bytes_read=self.window.bytes_read,
      cache_bytes=sum(x.nbytes() for x in self.caches if x is not None),
      sent_bytes=sent_bytes,
      rss_bytes=_peak_rss_bytes(),
      block_names=tuple(one.name for one in self.blocks),
      kept=tuple(sorted(self.layout.kept)),
      pass_bytes=self.layout.pass_bytes,
      reads_s=times.means("read", blocks),
      disk_s=times.means("disk", blocks),
      compute_s=times.means("compute", blocks),
      peers_s=times.means("peers", blocks),
      events=events,
    )

  def close(self) -> None:
    self._taken.clear()
    self.window.close()
    self.caches = []


def _peak_rss_bytes() -> int:
  """The most that this process had in memory."""
  found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return found if sys.platform == "darwin" else 1024 * found


def serve_rank(
  path: str | os.PathLike[str],
  link: StarLink,
  rank: int,
  *,
  window: int | None = None,
) -> None:
  """Computes a rank's terms until rank 0 ends it.

  Args:
    path: the model's folder.
    link: to rank 0, of `star.join`.
    rank: from 1.
    window: blocks of weights in memory; None for all.

  Raises:
    PeerError: rank 0 is gone, or says that another rank has failed.
    RingjaxError: what this rank could not do, of which rank 0 is told.
  """
  blocks: _RankBlocks | None = None
  try:
    _, said = link.hear(Kind.SETUP)
    model = SharedModel(path, said["shares"], dtype=said["dtype"])
    blocks = _RankBlocks(model, rank, window, said["retain"], said["events"])
    while True:
      kind, said = link.hear(Kind.OPEN, Kind.PASS, Kind.REPORT, Kind.END)
      if kind == Kind.OPEN:
        found = kind_text.parse(said["cache"])
        blocks.open(said["batch"], said["capacity"], found, said["dtype"])
      elif kind == Kind.PASS:
        _serve_pass(blocks, link, said)
      elif kind == Kind.REPORT:
        link.tell(
          Kind.REPORT, **dataclasses.asdict(blocks.report(link.sent_bytes))
        )
      else:
        return
  except PeerError:
    raise
  except BaseException as error:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    link.tell(Kind.FAIL, why=f"rank {rank} failed: {why}", rank=rank)
    raise
  finally:
    if blocks is not None:
      blocks.close()
    link.close()


def _serve_pass(
  blocks: _RankBlocks, link: StarLink, said: dict[str, Any]
) -> None:
  """A rank's part of one pass over the model."""
  batch, tokens = int(said["batch"]), int(said["tokens"])
  reading = bool(said["reading"])
  blocks.times.begin(later=bool(said["later"]))
  rows = 1 if reading else batch
  pos = link.receive(_POS, (rows, tokens), np.int32)
  seg = link.receive(_SEG, (batch, tokens), np.int32)
  length = link.receive(_LENGTH, said["length"], np.int32)
  assert pos is not None and seg is not None and length is not None
  at = Coords(jnp.asarray(pos), jnp.asarray(seg))
  shape = batch, tokens, blocks.model.config.embed
  last = 2 * blocks.layers - 1
  for block in range(last + 1):
    with blocks.times.of("peers", block):
      h = link.receive(block, shape, blocks.model.dtype)
    # It comes when the sum of the block before is done.
    blocks.release(block - 1)
    assert h is not None
    link.send(block, blocks.term(block, h, at, jnp.asarray(length), reading))
  blocks.release(last)


# ---------------------------------------------------------------------------
# Rank 0
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowReport:
  """What a call of `TensorWindow.generate` did.

  Attributes:
    shares: the ranks' weights.
    ranks: what each held and waited for.
    prompt_tokens: of the longest prompt.
    new_tokens: steps that were taken.
    first_s: seconds to the first token, compiling included.
    token_s: of a later one, the mean without the second, which compiles.
  """

  shares: tuple[int | float, ...]
  ranks: tuple[RankReport, ...]
  prompt_tokens: int
  new_tokens: int
  first_s: float
  token_s: float

  def simulated(self, passes: int = 8) -> WindowRun:
    """The same on simulated clocks, by the measured seconds of each part.

    An all-reduce takes what the rank waited that waited least for others, as
    it came last. A window is that of rank 0.

    Args:
      passes: tokens.
    """
    last = max(len(one.block_bytes) for one in self.ranks)
    fill = lambda x: (*x, *(0,) * (last - len(x)))
    devices = []
    for one in self.ranks:
      blocks = zip(
        fill(one.block_bytes), fill(one.reads_s), fill(one.compute_s),
        strict=True,
      )  # fmt: skip
      devices.append(
        [
          WindowBlock(
            name=f"block {k}",
            nbytes=nbytes,
            load_s=load,
            step_s=step,
            retained=k in one.kept,
          )
          for k, (nbytes, load, step) in enumerate(blocks)
        ]
      )
    waits = [fill(one.peers_s) for one in self.ranks]
    return layer_window.simulate(
      devices,
      window=self.ranks[0].window or last,
      passes=passes,
      reduce_s=[min(each) for each in zip(*waits, strict=True)],
    )


class TensorWindow:
  """A model over ranks that each hold a window of their part: rank 0.

  Attributes:
    config: of the model.
    shares: the ranks' weights.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    star: Star | None = None,
    *,
    shares: Sequence[int | float] | None = None,
    window: int | None = None,
    retain: int | None = None,
    dtype: DTypeLike | None = None,
    events: bool = False,
  ):
    """Begins to read the first blocks, on all ranks.

    Args:
      path: the model's folder, as `rj.models.load` reads it.
      star: the other ranks, of `Star.gather`; default: there are none.
      shares: how much of the model each rank gets, in any unit; default: the
        same. KV heads with their queries, and columns, are dealt by it.
      window: blocks of this rank's weights in memory; None for all.
      retain: of so many feedforwards one stays in memory, beside the window.
      dtype: of the computation; default: the folder's.
      events: whether reports have what happened when.

    Raises:
      OptionError: other shares than ranks.
      ConfigError: a model whose layers are no sums over ranks.
      RingjaxError: as `rj.models.load`.
    """
    self._star = Star({}) if star is None else star
    size = len(self._star.links) + 1
    self._broken: BaseException | None = None
    blocks: _RankBlocks | None = None
    try:
      self.shares = tuple(shares or (1,) * size)
      if len(self.shares) != size:
        raise OptionError(
          "shares",
          f"{len(self.shares)} of them",
          f"{size}, one of each rank",
          "pass as many as there are ranks",
        )
      self._model = SharedModel(path, self.shares, dtype=dtype)
      self.config: TransformerConfig = self._model.config
      blocks = _RankBlocks(self._model, 0, window, retain, events)
      self._blocks = blocks
      self._embed_norm: tuple[_ModuleProgram, PyTree] | None = None
      if (part := self._model.embed_norm()) is not None:
        arrays = tuple(map(jnp.asarray, self._model.read(part)))
        self._embed_norm = _module_program(self._model, part), arrays
      for link in self._star:
        link.tell(
          Kind.SETUP,
          shares=self.shares,
          dtype=self._model.dtype.name,
          retain=retain,
          events=events,
        )
    except BaseException as error:
      self._star.fail(error)
      if blocks is not None:
        blocks.close()
      raise

  def __enter__(self) -> TensorWindow:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends all ranks."""
    if self._broken is None:
      for link in self._star:
        try:
          link.tell(Kind.END)
        except PeerError:
          continue
    self._broken = self._broken or RuntimeError("closed")
    self._star.close()
    self._blocks.close()

  def generate(
    self,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    sampler: Callable[..., Any] | None = None,
    cache_kind: CacheKind | str = "windowed",
    cache_dtype: DTypeLike | None = None,
    stop: StopLike = None,
    tokenizer: Any = None,
    stream: Callable[[np.ndarray], Any] | None = None,
    progress: Callable[[int], Any] | None = None,
    report: Callable[[WindowReport], Any] | None = None,
    pad_id: int = 0,
    **names: Any,
  ) -> Generated:
    """Continues prompts, with the tokens of `rj.infer.generate`.

    Args:
      tokens: int32 [B, T], or B sequences of ids of different lengths.
      max_new_tokens: how many tokens to add at most.
      sampler: chooses a token from logits; default `Greedy()`.
      cache_kind: how ranks store keys and values, an `rj.kv.CacheKind` or its
        name; one that keeps all tokens on the device, with no calibration.
      cache_dtype: of the cache; default: the model's.
      stop: ids behind which a row ends, or texts, or both; or a `Stop`.
      tokenizer: of the texts.
      stream: called with each step's tokens, see `rj.infer.generate`.
      progress: called with the number of prompt tokens, when they are read.
      report: called with what was done.
      pad_id: fills up rows that stopped early.
      **names: as transformers names them, see `rj.infer.generate`.

    Returns:
      The new tokens.

    Raises:
      PeerError: a rank died, froze or failed; the text says which. No later
        call succeeds.
      NotFiniteLogitsError: see `rj.infer.generate`.
      RingjaxError: arguments, before anything is computed.
    """
    if self._broken is not None:
      raise PeerError(f"this group has ended: {self._broken}")
    make_room()
    count = positive_int("max_new_tokens", max_new_tokens)
    sampler, stop = from_names(sampler, stop, names)
    check_callable(sampler=sampler, stream=stream, progress=progress,
                    report=report)  # fmt: skip
    kind = cache_of_ranks(cache_kind)
    dtype = self._model.dtype
    if cache_dtype is not None:
      dtype = float_dtype("cache_dtype", cache_dtype)
    prompts = inputs.prompts(tokens, self.config.vocab)
    ending = RowEndings(
      stop, tokenizer, stream, pad_id, len(prompts), self.config.vocab
    )
    lengths = np.array([p.size for p in prompts], np.int32)
    longest = int(lengths.max())
    inputs.within_context(
      self.config,
      longest + count,
      f"{longest:,} tokens in a prompt and max_new_tokens={count:,}",
    )
    width = padded(longest, 1)
    start_s = time.monotonic()
    self._open(len(prompts), padded(width + count, 1), kind, dtype.name)
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
      row[: prompt.size] = prompt
    seg = (np.arange(width) < lengths[:, None]).astype(np.int32)
    by_length = any(rope.scaling.by_length for rope in self.config.ropes)
    total = lengths if by_length else np.array(longest, np.int32)
    every = np.arange(width, dtype=np.int32)[None]
    logits = self._pass(ids, every, seg, total, lengths - 1, 0)
    if progress is not None:
      progress(longest)
    out = np.full((len(prompts), count), ending.pad_id, np.int32)
    marked = NotFiniteRows()
    sizes, clock = np.zeros(len(prompts), np.int32), [time.monotonic()]
    for n, token in enumerate(
      self._tokens(logits, lengths, prompts, sampler, ending, total, count)
    ):
      clock.append(time.monotonic())
      ended = token[1]
      ended = ended | marked.note(token[0], lengths + n, ~ended)
      out[:, n] = np.where(ended, ending.pad_id, token[0])
      sizes += ~ended
      if not ended.all():
        token[2][:] = ending.told(out[:, n], ended)
    if report is not None:
      later = np.diff(clock[2:]) if len(clock) > 3 else np.diff(clock[1:])
      report(
        WindowReport(
          shares=self.shares,
          ranks=tuple(self._reports()),
          prompt_tokens=longest,
          new_tokens=int(sizes.max()),
          first_s=clock[1] - start_s,
          token_s=float(np.mean(later)) if len(later) else 0.0,
        )
      )
    new = Generated(tokens=out, lengths=sizes)
    marked.check(np.dtype(dtype), new)
    return new

  def _tokens(
    self,
    logits: jax.Array,
    lengths: np.ndarray,
    prompts: Sequence[np.ndarray],
    sampler: Any,
    ending: RowEndings,
    total: np.ndarray,
    count: int,
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each step's tokens [B], which rows had ended, and which the host ends.

    The last is filled by who takes them.
    """
    seen = None
    if getattr(sampler, "needs_seen", False):
      known = np.zeros((len(prompts), self.config.vocab), bool)
      for row, prompt in zip(known, prompts, strict=True):
        row[prompt] = True
      seen = jnp.asarray(known)
    sampler = traced(sampler)
    ended = np.zeros(len(prompts), bool)
    state = decode.first(
      sampler, logits, jnp.asarray(lengths), seen, ending.ids
    )
    for n in range(count):
      token, done = jax.device_get((state.token, state.done))
      told = np.zeros(len(prompts), bool)
      yield token, ended, told
      ended = ended | done | told
      if n + 1 == count or ended.all():
        return
      if told.any():
        state = state._replace(done=jnp.asarray(ended))
      pos, seg = np.asarray(state.pos)[:, None], (~ended)[:, None]
      rows = np.zeros(len(prompts), np.int32)
      logits = self._pass(
        np.maximum(token, 0)[:, None],
        pos,
        seg.astype(np.int32),
        total,
        rows,
        n + 1,
      )
      state = decode.following(sampler, logits, state, ending.ids)

  # -------------------------------------------------------------------------
  # Passes
  # -------------------------------------------------------------------------

  def _open(self, batch: int, capacity: int, kind: CacheKind, dtype: str):
    with _Failing(self):
      said = {"batch": batch, "capacity": capacity, "dtype": dtype}
      for link in self._star:
        link.tell(Kind.OPEN, cache=str(kind), **said)
      self._blocks.open(batch, capacity, kind, dtype)

  def _reports(self) -> Iterator[RankReport]:
    """Of all ranks, in their order."""
    with _Failing(self):
      for link in self._star:
        link.tell(Kind.REPORT)
      yield self._blocks.report(sum(link.sent_bytes for link in self._star))
      for link in self._star:
        yield RankReport.of(link.hear(Kind.REPORT)[1])

  def _pass(
    self,
    ids: np.ndarray,
    pos: np.ndarray,
    seg: np.ndarray,
    total: np.ndarray,
    rows: np.ndarray,
    number: int,
  ) -> jax.Array:
    """All ranks read some tokens: float32 [B, V] behind one of each row.

    Args:
      ids: int32 [B, T].
      pos: int32 [B or 1, T].
      seg: int32 [B, T], 0 for padding.
      total: of the whole context, int32 [] or [B].
      rows: int32 [B], which of the T.
      number: of the pass, the prompt's is 0.
    """
    with _Failing(self):
      blocks, reading = self._blocks, not number
      blocks.times.begin(later=number > 1)
      batch, tokens = ids.shape
      for link in self._star:
        link.tell(
          Kind.PASS,
          batch=batch,
          tokens=tokens,
          reading=reading,
          later=blocks.times.later,
          length=total.shape,
        )
        for what, x in ((_POS, pos), (_SEG, seg), (_LENGTH, total)):
          link.send(what, x)
      at = Coords(jnp.asarray(pos), jnp.asarray(seg))
      call = at, jnp.asarray(total), reading
      x = self._embed(ids)
      for n, layer in enumerate(self.config.layers):
        h, mixed = self._block(2 * n, x, x, None, layer, call)
        same = h if layer.shared_norm else None
        inner = x if layer.parallel else mixed
        _, x = self._block(2 * n + 1, inner, mixed, same, layer, call)
      head = 2 * len(self.config.layers)
      arrays = blocks.arrays(head)["head"]
      with blocks.times.of("compute", head):
        program = blocks.program(head, "head")
        assert program is not None
        logits = _output(program, arrays, x, jnp.asarray(rows))
        logits = jax.block_until_ready(logits)
      blocks.release(head)
      return logits

  def _embed(self, ids: np.ndarray) -> jax.Array:
    """[B, T, D]: rows of the embedding, read from disk."""
    which, where = np.unique(ids, return_inverse=True)
    rows = self._model.embedding_rows(which.tolist())
    x = rows[where.reshape(ids.shape)]
    made = _embedded(self.config.embed_scale, jnp.asarray(x))
    return (
      made if self._embed_norm is None else _normed(*self._embed_norm, made)
    )

  def _block(
    self,
    block: int,
    x: jax.Array,
    base: jax.Array,
    h: jax.Array | None,
    layer: Any,
    call: tuple[Coords, jax.Array, bool],
  ) -> tuple[jax.Array, jax.Array]:
    """What a block reads, and `base` with the sum of its terms.

    `h` is what it reads, if it is known, or else the norm of `x`.
    """
    blocks = self._blocks
    arrays = blocks.arrays(block)
    pre, post = (blocks.program(block, name) for name in ("pre", "post"))
    with blocks.times.of("compute", block):
      if h is None:
        h = x if pre is None else _normed(pre, arrays["pre"], x)
        h = h.astype(self._model.dtype)
      sent = np.asarray(h)
    for link in self._star:
      link.send(block, sent)
    terms = [blocks.term(block, h, *call)]
    with blocks.times.of("peers", block):
      terms += [
        link.receive(block, sent.shape, sent.dtype) for link in self._star
      ]
    with blocks.times.of("compute", block):
      after = _joined(
        post,
        layer.residual_scale,
        arrays.get("post"),
        base,
        tuple(term for term in terms if term is not None),
      )
      after = jax.block_until_ready(after)
    blocks.release(block)
    return h, after


class _Failing:
  """Around what ranks do together: tells them what fails, and ends the group.

  Raises what went wrong; of a rank that is gone, its name.
  """

  def __init__(self, window: TensorWindow):
    self._window = window

  def __enter__(self) -> None:
    return None

  def __exit__(self, _: Any, error: BaseException | None, *__: Any) -> None:
    if error is not None:
      self._window._broken = error
      self._window._star.fail(error)


def cache_of_ranks(given: CacheKind | str) -> CacheKind:
  """A kind of cache that ranks can make of its name.

  Raises:
    OptionError: it evicts, has a part in host memory, or is calibrated.
  """
  kind = kinds.cache_kind(given).resident("ranks that have some heads each")
  codec = kind.codec
  plain = codec is None or (
    isinstance(codec, Codec) and not isinstance(codec, Calibrated)
  )
  named = False
  if plain:
    try:
      named = kind_text.parse(str(kind)) == kind
    except OptionError:
      named = False
  if not named:
    raise OptionError(
      "cache_kind",
      f"{kind}",
      "a kind with a name, whose codec is not calibrated for all heads",
      "pass 'windowed', 'dense' or 'int8', for instance",
    )
  return kind
