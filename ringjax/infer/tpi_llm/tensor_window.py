"""Tensor parallelism over processes with little memory each (TPI-LLM).

Each rank has some heads and some columns of every layer, in equal or given
shares. It reads its blocks (attention of layer 0, feedforward of layer 0,
attention of layer 1, ...) from the model's folder while it computes, and holds
a few of them at a time. Rank 0 adds up the terms that the ranks compute of
each block.

  rank 0     rows of the embedding -> norm -> send, its own term, receive -> sum
             -> residual -> ... -> last norm, head, sampling
  others     receive -> term -> send

Guarantees: logits are those of the whole model up to the rounding of a sum, and
the same bits in every run with the same shares: terms are added in the order of
ranks, in float32. Prompts, generated tokens, embedding and head are on rank 0
alone; the others get hidden states, positions, and which tokens are padding. At
most `window` blocks of weights are in a rank's memory, plus those that stay.
Cost: each pass reads every block from disk, once for all rows of a batch; a
message to each rank and one back for each block.
Memory: on a rank its window and its heads' part of the cache; on rank 0 also
the head, as one block of its window, and the embedding rows of the tokens.

Ref: Li et al. 2024, TPI-LLM (arXiv 2410.00531), which adds terms in the order
of their arrival, and has the embedding as a block.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
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
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.generate import Generated, RowEndings
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import padded
from ringjax.infer.prompt_reading import check_callable
from ringjax.infer.sampling import from_names, traced
from ringjax.infer.stopping import StopLike
from ringjax.infer.tpi_llm.block_window import BlockTimes, BlockWindow
from ringjax.infer.tpi_llm.process_star import Star, StarLink
from ringjax.kv import cache_kind as kinds
from ringjax.kv import kind_text
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Calibrated, Codec
from ringjax.models.hf.tensors import parameters
from ringjax.models.partition.tensor_shares import ModulePart, SharedModel
from ringjax.models.partition.window_layout import WindowLayout, rank_blocks
from ringjax.models.transformer import TransformerConfig, logits_of
from ringjax.nn.linear import part_dtype, stream_dtype
from ringjax.nn.residuals import ScaledResidual
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  ShardingContext,
)
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.mask import Coords
from ringjax.parallel.programs import bounded, make_room
from ringjax.plan.systems import layer_window
from ringjax.plan.systems.layer_window import WindowBlock, WindowRun
from ringjax.typing import Lengths

_READING = ContextParallel(axis=None, strategy=Gather())
_DECODING = CachedAttention(axis=None)
# Message numbers of positions, segments and lengths. A block's input has the
# block's number.
_POS, _SEG, _LENGTH = 1 << 30, (1 << 30) + 1, (1 << 30) + 2


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModuleProgram:
  """Recipe that builds a module from arrays as the folder stores them.

  Attributes:
    spec: Specification with the module's `build`.
    tensors: (form, paths of its parameters, whether arrays are stacked in it)
      of each array.
    embed: Width D of the hidden states.
    dtype: Name of the computation's dtype.
  """

  spec: Any
  tensors: tuple[Any, ...]
  embed: int
  dtype: str

  def module(self, arrays: Sequence[jax.Array]) -> Any:
    template, variables, tree = _template(self.spec, self.embed)
    values_by_path: dict[str, jax.Array] = {}
    for (form, paths, stacked), array in zip(self.tensors, arrays, strict=True):
      split = jax.vmap(form.split) if stacked else form.split
      values_by_path.update(zip(paths, split(array), strict=True))
    leaves = [
      variable.replace(
        values_by_path[path].astype(
          variable.get_value().dtype
          if variable.get_metadata()["wide"]
          else self.dtype
        )
      )
      for path, variable in zip(template, variables, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def _module_program(model: SharedModel, part: ModulePart) -> _ModuleProgram:
  """Return the recipe that builds a module from its part's arrays."""
  spec, tensors = part.layout
  return _ModuleProgram(
    spec=spec,
    tensors=tensors,
    embed=model.config.embed,
    dtype=model.dtype.name,
  )


@functools.lru_cache(maxsize=256)
def _template(spec: Any, embed: int) -> tuple[Any, Any, Any]:
  """Paths of a module's parameters, the parameters, and its tree structure."""
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
  """Compute a rank's term of attention, and append the call's keys."""
  decoding = isinstance(attend, CachedAttention)
  tokens = Tokens(
    *at,
    derived=not decoding,
    segmented=True,
    ropes=program.spec.ropes,
    length=length,
  )
  cache = cache.allocate(tokens.at, replicated=decoding, sees=decoding)
  layer_cache = cache.layer(0, cache.slots[0], jnp.int32(0))
  y, layer_cache = program.module(arrays)(h, tokens, layer_cache, attend)
  return y, cache.updated((layer_cache.slots,))


@bounded
@functools.partial(jax.jit, static_argnums=(0, 1))
def _feedforward_term(
  program: _ModuleProgram,
  attend: ShardingContext,
  arrays: PyTree,
  h: Float[Array, "B T D"],
) -> jax.Array:
  """Compute a rank's term of a feedforward."""
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
  residual: ScaledResidual,
  arrays: PyTree,
  x: Float[Array, "B T D"],
  terms: PyTree,
) -> jax.Array:
  """Join the sum of a block's terms, in their order, after its norm to x."""
  total = terms[0].astype(jnp.float32)
  for term in terms[1:]:
    total = total + term.astype(jnp.float32)
  y = total.astype(x.dtype)
  if program is not None:
    y = program.module(arrays)(y)
  return residual(x, y)


@bounded
@functools.partial(jax.jit, static_argnums=(0,))
def _output(
  program: _ModuleProgram,
  arrays: PyTree,
  x: Float[Array, "B T D"],
  rows: Int[Array, " B"],
) -> jax.Array:
  """Logits after one token of each row, float32 [B, V]."""
  module = program.module(arrays)
  last = jnp.take_along_axis(x, rows[:, None, None], 1)[:, 0]
  head = module.embed if module.head is None else module.head
  h = module.norm(last)
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
  """Memory, bytes and waiting times of a rank in one call of `generate`.

  Attributes:
    rank: Number of the rank.
    window: Number of blocks that it may hold at once; None for all.
    weight_bytes: Bytes of all its blocks.
    block_bytes: Bytes of each block.
    block_names: Name of each block.
    peak_blocks: Largest number of blocks held at once, since it began.
    peak_bytes: Largest number of bytes of blocks held at once.
    bytes_read: Bytes read from disk, since it began.
    cache_bytes: Bytes of its part of the cache.
    sent_bytes: Bytes of arrays that it sent, since it began.
    rss_bytes: Peak memory of its process, code and compiler included.
    kept: Numbers of the blocks that stay in memory once they are read.
    pass_bytes: Bytes that each pass after the first reads.
    reads_s: Mean seconds of a read, per block.
    disk_s: Mean seconds, per token, of waiting for the read of each block.
    compute_s: Mean seconds, per token, of computing each block.
    peers_s: Mean seconds, per token and block, of waiting for other ranks,
      which may wait themselves.
    events: (kind, block, start, end) of each, in seconds from the rank's start
      of the call; None if they were not recorded.
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
    """Build a report from a decoded JSON object.

    Raises:
      TypeError: If the fields are not those of a report.
    """
    fields: dict[str, Any] = {
      k: tuple(x) if isinstance(x, list) else x for k, x in record.items()
    }
    return cls(**fields)


class _RankBlocks:
  """The blocks of a rank: their window of weights, caches and programs."""

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
    """Read a block's arrays onto the device."""
    device = jax.local_devices()[0]
    arrays = {
      name: tuple(
        jax.device_put(x, device, may_alias=True) for x in self.model.read(part)
      )
      for name, part in self.blocks[block].parts.items()
    }
    return jax.block_until_ready(arrays)

  def open(self, batch: int, capacity: int, kind: CacheConfig, dtype: str):
    """Create an empty cache for each layer."""
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
    """Return the recipe of a block's module; None if it lacks that module."""
    part = self.blocks[block].parts.get(name)
    if part is None or part.spec is None:
      return None
    return _module_program(self.model, part)

  def arrays(self, block: int) -> dict[str, Any]:
    """Wait for a block's arrays and hold them until `release`."""
    if not self.nbytes[block]:
      return {}
    if block not in self._taken:
      self._taken[block] = self.window.take(block)
    return self._taken[block]

  def release(self, block: int) -> None:
    """Return a block's place to the window."""
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
    """Compute the rank's term of a block, [B, T, D]; None without a part."""
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
    """Report the rank's memory, bytes and times so far."""
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
      cache_bytes=sum(
        cache.nbytes() for cache in self.caches if cache is not None
      ),
      sent_bytes=sent_bytes,
      rss_bytes=_peak_rss_bytes(),
      block_names=tuple(block.name for block in self.blocks),
      kept=tuple(sorted(self.layout.kept_blocks)),
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
  """Peak resident memory of this process, in bytes."""
  max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return max_rss if sys.platform == "darwin" else 1024 * max_rss


def serve_rank(
  path: str | os.PathLike[str],
  link: StarLink,
  rank: int,
  *,
  window: int | None = None,
) -> None:
  """Computes a rank's terms until rank 0 ends it.

  Args:
    path: The model's folder.
    link: Connection to rank 0, from `star.join`.
    rank: Number of this rank, at least 1.
    window: Number of blocks of weights in memory; None for all.

  Raises:
    PeerError: If rank 0 is gone, or reports that another rank has failed.
    RingjaxError: If this rank fails; it reports the error to rank 0 first.
  """
  blocks: _RankBlocks | None = None
  try:
    message = link.take("setup").fields
    model = SharedModel(path, message["shares"], dtype=message["dtype"])
    blocks = _RankBlocks(
      model, rank, window, message["retain"], message["events"]
    )
    while True:
      kind, message, *_ = link.take("open", "pass", "report", "end")
      if kind == "open":
        cache_kind = kind_text.parse(message["cache"])
        blocks.open(
          message["batch"], message["capacity"], cache_kind, message["dtype"]
        )
      elif kind == "pass":
        _serve_pass(blocks, link, message)
      elif kind == "report":
        link.send(
          "report", **dataclasses.asdict(blocks.report(link.sent_bytes))
        )
      else:
        return
  except PeerError:
    raise
  except BaseException as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    link.fail(reason)
    raise
  finally:
    if blocks is not None:
      blocks.close()
    link.close()
    link.join(1.0)


def _serve_pass(
  blocks: _RankBlocks, link: StarLink, message: dict[str, Any]
) -> None:
  """Compute a rank's part of one pass over the model."""
  batch, tokens = int(message["batch"]), int(message["tokens"])
  reading = bool(message["reading"])
  blocks.times.begin(later=bool(message["later"]))
  rows = 1 if reading else batch
  pos = link.take_array(_POS, (rows, tokens), np.int32)
  seg = link.take_array(_SEG, (batch, tokens), np.int32)
  length = link.take_array(_LENGTH, message["length"], np.int32)
  assert pos is not None and seg is not None and length is not None
  at = Coords(jnp.asarray(pos), jnp.asarray(seg))
  shape = batch, tokens, blocks.model.config.embed
  last = 2 * blocks.layers - 1
  for block in range(last + 1):
    with blocks.times.of("peers", block):
      h = link.take_array(block, shape, blocks.model.dtype)
    # Rank 0 sends this input once the sum of the block before is done.
    blocks.release(block - 1)
    assert h is not None
    link.send_array(
      block, blocks.term(block, h, at, jnp.asarray(length), reading)
    )
  blocks.release(last)


# ---------------------------------------------------------------------------
# Rank 0
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowReport:
  """Times and per-rank reports of a call of `TensorWindow.generate`.

  Attributes:
    shares: Relative share of the model on each rank.
    ranks: Report of each rank.
    prompt_tokens: Number of tokens of the longest prompt.
    new_tokens: Number of decoding steps.
    first_s: Seconds to the first token, compiling included.
    token_s: Mean seconds of a later token, without the second, which compiles.
  """

  shares: tuple[int | float, ...]
  ranks: tuple[RankReport, ...]
  prompt_tokens: int
  new_tokens: int
  first_s: float
  token_s: float

  def simulated(self, passes: int = 8) -> WindowRun:
    """Simulate the ranks' windows from the measured seconds of each block.

    An all-reduce takes the shortest wait of any rank, that of the rank which
    came last. All ranks have the window of rank 0.

    Args:
      passes: Number of passes, one per token.
    """
    num_blocks = max(len(report.block_bytes) for report in self.ranks)
    fill = lambda x: (*x, *(0,) * (num_blocks - len(x)))
    devices = []
    for report in self.ranks:
      blocks = zip(
        fill(report.block_bytes), fill(report.reads_s), fill(report.compute_s),
        strict=True,
      )  # fmt: skip
      devices.append(
        [
          WindowBlock(
            name=f"block {k}",
            nbytes=nbytes,
            load_s=load,
            step_s=step,
            retained=k in report.kept,
          )
          for k, (nbytes, load, step) in enumerate(blocks)
        ]
      )
    waits = [fill(report.peers_s) for report in self.ranks]
    return layer_window.simulate(
      devices,
      window=self.ranks[0].window or num_blocks,
      passes=passes,
      reduce_s=[min(block_waits) for block_waits in zip(*waits, strict=True)],
    )


class TensorWindow:
  """Rank 0 of a model over ranks that each hold a window of their weights.

  Attributes:
    config: Configuration of the model.
    shares: Relative share of the model on each rank.
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
      path: The model's folder, as `rj.models.load` reads it.
      star: Connections to the other ranks, from `Star.gather`; default: rank 0
        runs alone.
      shares: Share of the model that each rank gets, in any unit; default: all
        the same. KV heads with their queries, and columns, are dealt by it.
      window: Number of blocks of this rank's weights in memory; None for all.
      retain: Keeps the first of every `retain` feedforwards in memory, in
        addition to the window; None: no block.
      dtype: Dtype of the computation; default: the folder's.
      events: Whether reports list when each read, wait and computation ran.

    Raises:
      OptionError: If there are not as many shares as ranks.
      ConfigError: If the model's layers can't be split into sums over ranks.
      RingjaxError: If `rj.models.load` would raise it.
    """
    self._star = Star() if star is None else star
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
        link.send(
          "setup",
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
          link.send("end")
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
    cache_kind: CacheConfig | str = "windowed",
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
      tokens: Token ids, int32 [B, T], or B sequences of different lengths.
      max_new_tokens: Maximum number of tokens to add to each row.
      sampler: Chooses a token from logits; default `Greedy()`.
      cache_kind: Storage of keys and values on the ranks, an
        `rj.kv.CacheConfig` or its name; one that keeps all tokens on the
        device, uncalibrated.
      cache_dtype: Dtype of the cache; default: the model's.
      stop: Ids after which a row ends, or texts, or both; or a `Stop`.
      tokenizer: Tokenizer for the texts of `stop`.
      stream: Called with each step's tokens, see `rj.infer.generate`.
      progress: Called with the number of prompt tokens, when they are read.
      report: Called with the `WindowReport` at the end.
      pad_id: Id that fills up rows that stopped early.
      **names: Options named as in transformers, see `rj.infer.generate`.

    Returns:
      The new tokens.

    Raises:
      PeerError: If a rank died, froze or failed; the text says which. No later
        call succeeds.
      NotFiniteLogitsError: If logits are NaN or infinite, see
        `rj.infer.generate`.
      RingjaxError: If an argument is invalid; nothing is computed.
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
    lengths = np.array([prompt.size for prompt in prompts], np.int32)
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
    positions = np.arange(width, dtype=np.int32)[None]
    logits = self._pass(ids, positions, seg, total, lengths - 1, 0)
    if progress is not None:
      progress(longest)
    out = np.full((len(prompts), count), ending.pad_id, np.int32)
    not_finite = NotFiniteRows()
    new_lengths, times_s = np.zeros(len(prompts), np.int32), [time.monotonic()]
    for n, step in enumerate(
      self._tokens(logits, lengths, prompts, sampler, ending, total, count)
    ):
      times_s.append(time.monotonic())
      ended = step[1]
      ended = ended | not_finite.note(step[0], lengths + n, ~ended)
      out[:, n] = np.where(ended, ending.pad_id, step[0])
      new_lengths += ~ended
      if not ended.all():
        step[2][:] = ending.told(out[:, n], ended)
    if report is not None:
      step_seconds = (
        np.diff(times_s[2:]) if len(times_s) > 3 else np.diff(times_s[1:])
      )
      report(
        WindowReport(
          shares=self.shares,
          ranks=tuple(self._reports()),
          prompt_tokens=longest,
          new_tokens=int(new_lengths.max()),
          first_s=times_s[1] - start_s,
          token_s=float(np.mean(step_seconds)) if len(step_seconds) else 0.0,
        )
      )
    generated = Generated(tokens=out, lengths=new_lengths)
    not_finite.check(np.dtype(dtype), generated)
    return generated

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
    """Yield each step's tokens and masks of ended rows, all [B].

    The masks are the rows that had ended before, and the rows that the host
    ends at this step: the caller fills in the latter.
    """
    seen = None
    if getattr(sampler, "needs_seen", False):
      in_prompt = np.zeros((len(prompts), self.config.vocab), bool)
      for row, prompt in zip(in_prompt, prompts, strict=True):
        row[prompt] = True
      seen = jnp.asarray(in_prompt)
    sampler = traced(sampler)
    ended = np.zeros(len(prompts), bool)
    state = decode.first(
      sampler, logits, jnp.asarray(lengths), seen, ending.ids
    )
    for n in range(count):
      token, device_ended = jax.device_get((state.token, state.done))
      host_ended = np.zeros(len(prompts), bool)
      yield token, ended, host_ended
      ended = ended | device_ended | host_ended
      if n + 1 == count or ended.all():
        return
      if host_ended.any():
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

  def _open(self, batch: int, capacity: int, kind: CacheConfig, dtype: str):
    with _Failing(self):
      settings = {"batch": batch, "capacity": capacity, "dtype": dtype}
      for link in self._star:
        link.send("open", cache=str(kind), **settings)
      self._blocks.open(batch, capacity, kind, dtype)

  def _reports(self) -> Iterator[RankReport]:
    """Yield the reports of all ranks, in their order."""
    with _Failing(self):
      for link in self._star:
        link.send("report")
      yield self._blocks.report(sum(link.sent_bytes for link in self._star))
      for link in self._star:
        yield RankReport.of(link.take("report").fields)

  def _pass(
    self,
    ids: np.ndarray,
    pos: np.ndarray,
    seg: np.ndarray,
    total: np.ndarray,
    rows: np.ndarray,
    number: int,
  ) -> jax.Array:
    """Run a pass on all ranks: logits after one token of each row [B, V].

    Args:
      ids: Token ids, int32 [B, T].
      pos: Positions, int32 [B or 1, T].
      seg: Segments, int32 [B, T], 0 for padding.
      total: Number of tokens of the whole context, int32 [] or [B].
      rows: Index among the T of the token whose logits to compute, int32 [B].
      number: Number of the pass; the prompt's is 0.
    """
    with _Failing(self):
      blocks, reading = self._blocks, not number
      blocks.times.begin(later=number > 1)
      batch, tokens = ids.shape
      for link in self._star:
        link.send(
          "pass",
          batch=batch,
          tokens=tokens,
          reading=reading,
          later=blocks.times.later,
          length=total.shape,
        )
        for message_id, array in ((_POS, pos), (_SEG, seg), (_LENGTH, total)):
          link.send_array(message_id, array)
      at = Coords(jnp.asarray(pos), jnp.asarray(seg))
      call = at, jnp.asarray(total), reading
      array = self._embed(ids)
      for n, layer in enumerate(self.config.layers):
        h, mixed = self._block(2 * n, array, array, None, layer, call)
        shared_input = h if layer.shared_norm else None
        norm_input = array if layer.parallel else mixed
        _, array = self._block(
          2 * n + 1, norm_input, mixed, shared_input, layer, call
        )
      head = 2 * len(self.config.layers)
      arrays = blocks.arrays(head)["head"]
      with blocks.times.of("compute", head):
        program = blocks.program(head, "head")
        assert program is not None
        logits = _output(program, arrays, array, jnp.asarray(rows))
        logits = jax.block_until_ready(logits)
      blocks.release(head)
      return logits

  def _embed(self, ids: np.ndarray) -> jax.Array:
    """Read the tokens' embeddings from disk, [B, T, D]."""
    unique_ids, inverse = np.unique(ids, return_inverse=True)
    rows = self._model.embedding_rows(unique_ids.tolist())
    x = rows[inverse.reshape(ids.shape)]
    embedded = _embedded(self.config.embed_scale, jnp.asarray(x))
    return (
      embedded
      if self._embed_norm is None
      else _normed(*self._embed_norm, embedded)
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
    """Run a block on all ranks: its input, and `base` plus its terms.

    The input is `h` if it is given, or else the norm of `x`.
    """
    blocks = self._blocks
    arrays = blocks.arrays(block)
    pre, post = (blocks.program(block, name) for name in ("pre", "post"))
    with blocks.times.of("compute", block):
      if h is None:
        h = x if pre is None else _normed(pre, arrays["pre"], x)
        h = h.astype(self._model.dtype)
      hidden = np.asarray(h)
    for link in self._star:
      link.send_array(block, hidden)
    terms = [blocks.term(block, h, *call)]
    with blocks.times.of("peers", block):
      terms += [
        link.take_array(block, hidden.shape, hidden.dtype)
        for link in self._star
      ]
    residual = layer.residuals[block % 2]
    # Others are refused by `tensor_shares`.
    assert isinstance(residual, ScaledResidual)
    with blocks.times.of("compute", block):
      output = _joined(
        post,
        residual,
        arrays.get("post"),
        base,
        tuple(term for term in terms if term is not None),
      )
      output = jax.block_until_ready(output)
    blocks.release(block)
    return h, output


class _Failing:
  """Context manager that reports an error to all ranks and ends the group.

  The error is raised again.
  """

  def __init__(self, window: TensorWindow):
    self._window = window

  def __enter__(self) -> None:
    return None

  def __exit__(
    self,
    _: type[BaseException] | None,
    error: BaseException | None,
    *__: TracebackType | None,
  ) -> None:
    if error is not None:
      self._window._broken = error
      self._window._star.fail(error)


def cache_of_ranks(given: CacheConfig | str) -> CacheConfig:
  """Return a kind of cache that each rank can create from its name.

  Raises:
    OptionError: If it evicts, has a part in host memory, or is calibrated.
  """
  kind = kinds.cache_kind(given).resident("ranks that have some heads each")
  codec = kind.codec
  plain = codec is None or (
    isinstance(codec, Codec) and not isinstance(codec, Calibrated)
  )
  round_trips = False
  if plain:
    try:
      round_trips = kind_text.parse(str(kind)) == kind
    except OptionError:
      round_trips = False
  if not round_trips:
    raise OptionError(
      "cache_kind",
      f"{kind}",
      "a kind with a name, whose codec is not calibrated for all heads",
      "pass 'windowed', 'dense' or 'int8', for instance",
    )
  return kind
