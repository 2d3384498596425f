"""Many requests at once, over one pool of pages.

Guarantees: a request's tokens are bit for bit those that it gets when served
alone, on one kind of device: calls have fixed shapes, keys are read in the
order of positions, and a token is always computed by the same program, that of
prompts or that of answers, also when its row was preempted. (With
share="answers" blocks of answers are found by later prompts, with trees of
drafts a key is where its tree has it, and drafts that pause make steps without
drafts another program, unless adapt=False: all three give that up, to
rounding.) An error that one request raises ends that request alone, as do
logits that are not finite, whose keys no later prompt finds.
Cost: a step is one program for answers and prompts, which reads the weights
once, or, for the reason in `calls_apart`, at most one call for answers and one
for prompts; each is compiled once (that of prompts as `layer_parts` programs).
A program takes the time of what it holds. The host plans a
step while the device computes the one before; a mask, a beam search or drafts,
where they do not pause, make it wait.
Memory: the pool; it does not grow. Of reserved rows only the part in use.
Ref: Yu et al. 2022, Orca (OSDI); Kwon et al. 2023, PagedAttention, arXiv
2309.06180.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int32

from ringjax.checks import float_dtype, integer
from ringjax.errors import (
  InputTypeError,
  MemoryEstimateError,
  NotFiniteLogitsError,
  OptionError,
  OutOfMemoryError,
  PromptError,
)
from ringjax.infer import inputs
from ringjax.infer.finite import NOT_FINITE, not_finite_error
from ringjax.infer.session import check_devices, free_on, place_of
from ringjax.infer.stopping import Watch, check_tokenizer
from ringjax.kv.base import bytes_each, zeros
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.state import StateShape
from ringjax.kv.storage.page_pool import PagePool
from ringjax.kv.storage.pooled_cache import PooledRows, encoded_view
from ringjax.kv.storage.reserved import reserved_zeros
from ringjax.models.parameter_arrays import weights_as
from ringjax.models.partition.layer_parts import layer_parts as layer_parts_of
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention_function import (
  DenseFunction,
  FunctionAttention,
  check_function,
)
from ringjax.nn.one_order import OneOrderCached
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.stack import stages_error
from ringjax.nn.weights.placed_layers import naming_faults, raise_fault
from ringjax.ops.attention.cached.pooled import (
  sharing_is_exact,
)
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.parallel import chips
from ringjax.parallel.joint_outcome import processes_of
from ringjax.parallel.mesh import entering
from ringjax.parallel.programs import make_room
from ringjax.serve.api.server_metrics import Figure, engine_figures
from ringjax.serve.beams import BeamSearch
from ringjax.serve.calls import (
  CallArrays,
  CallBuilder,
  Checked,
  RowBoard,
  check_drafts,
  compute,
  compute_layers,
  compute_step,
  forked,
  marked,
)
from ringjax.serve.drafts.row_drafts import RowDrafts
from ringjax.serve.drafts.step_paces import StepPaces, StepTiming
from ringjax.serve.engine_config import EngineConfig, EngineSizes
from ringjax.serve.hosts.step_agreement import LocalAgreement, StepAgreement
from ringjax.serve.prefix.important_link import ImportantLink, share_of
from ringjax.serve.prefix.page_swap import PageSwap
from ringjax.serve.prefix.prefix_tree import GroupSpec, PrefixTree
from ringjax.serve.prefix.store_link import StoreLink
from ringjax.serve.request import Answer, Handle, Request, TokenLogprobs
from ringjax.serve.scheduler import (
  DecodeTurn,
  PromptPiece,
  Scheduler,
  ServedRow,
  StepLimits,
  StepPlan,
)
from ringjax.serve.sparse_prompts import prompt_attention
from ringjax.serve.text_requests import EngineTexts, TextRequests
from ringjax.serve.tiling import prompt_tiles, reason_for_two_calls, row_tile
from ringjax.serve.vattention.contiguous_rows import (
  ContiguousRows,
  check_dense_rows,
  row_reaches,
)
from ringjax.serve.vattention.row_space import RowSpace
from ringjax.store.prefix_store import Store
from ringjax.train.methods.lora import Lora, adapter_digest, with_adapters

_LOG = logging.getLogger("ringjax.serve")


@dataclasses.dataclass(kw_only=True)
class EngineCounters:
  """Counters of an engine's work.

  Attributes:
    requests: Number of requests submitted.
    finished: Number of requests that ended, for any reason.
    steps: Number of steps that computed tokens.
    prompt_tokens: Number of prompt tokens computed.
    cached_tokens: Number of prompt tokens whose keys were cached.
    new_tokens: Number of answer tokens chosen.
    drafted: Number of tokens that were drafted and checked.
    accepted: Number of drafted tokens that were accepted.
    preemptions: Number of times that a row had to make room.
    swapped: Number of preemptions that moved pages to host memory.
    expired: Number of requests whose deadline passed.
    cancelled: Number of requests that were cancelled.
    failed: Number of requests that raised an error.
    not_finite: Number of requests whose logits were NaN or infinite.
    drafted_steps: Number of steps that checked drafts.
    plain_steps: Number of steps for answers that checked none.
    paused_timing: Number of these in which drafts paused for steps without
      them to be timed.
    paused_slower: Number of these in which drafts paused, as they took more
      time than they saved.
    paused_costly: Number of these in which drafts paused, as they could have
      cost more than 5 %.
    undrafted: Number of rows that continued without drafts, as the logits of
      the draft were NaN or infinite.
    plans: Number of times that the tiles which rows share were recomputed.
    keys_read: Number of keys that answers read, those that rows read together
      counted once. `keys_read / keys_seen` is what reading together leaves.
    keys_seen: Number of keys that rows of answers refer to, of each row.
    stored_tokens: Number of prompt tokens that came out of the store; those of
      rows that began again are counted again.
    pages_out: Number of pages exported to the store.
    pages_in: Number of pages imported from the store.
    pages_lost: Number of pages that were not exported, as the copies before
      them were still in flight.
    restarts: Number of times that this server was started again after a loss.
    important_rows: Number of rows that read a part of a prefix in the store.
    important_prefix: Number of tokens of these prefixes.
    important_tokens: Number of tokens of these prefixes that were kept.
    important_bytes: Bytes read from the store to choose and to load them.
    important_probe_bytes: Bytes of keys of probe heads, part of
      `important_bytes`.
    important_bytes_left: Bytes of keys and values that were not read.
    important_failed: Number of prefixes that were computed because their part
      could not be chosen; the log says why, unless the store lost a chunk.
  """

  requests: int = 0
  finished: int = 0
  steps: int = 0
  prompt_tokens: int = 0
  cached_tokens: int = 0
  new_tokens: int = 0
  drafted: int = 0
  accepted: int = 0
  drafted_steps: int = 0
  plain_steps: int = 0
  paused_timing: int = 0
  paused_slower: int = 0
  paused_costly: int = 0
  preemptions: int = 0
  swapped: int = 0
  expired: int = 0
  cancelled: int = 0
  failed: int = 0
  not_finite: int = 0
  undrafted: int = 0
  plans: int = 0
  keys_read: int = 0
  keys_seen: int = 0
  stored_tokens: int = 0
  pages_out: int = 0
  pages_in: int = 0
  pages_lost: int = 0
  restarts: int = 0
  important_rows: int = 0
  important_prefix: int = 0
  important_tokens: int = 0
  important_bytes: int = 0
  important_probe_bytes: int = 0
  important_bytes_left: int = 0
  important_failed: int = 0


class _Flight(NamedTuple):
  """A step in flight.

  Fields:
    plan: Plan of the step.
    checks: Whether its call for answers checks drafts.
    timing: Facts for the choice of steps that have drafts, or None.
    answer_turns: Choices of the call for answers, or None.
    pieces: Choices of the call for prompts, or None.
  """

  plan: StepPlan
  checks: bool
  timing: StepTiming | None
  answer_turns: Any
  pieces: Any


class _Owner(NamedTuple):
  """Owner of a row: its request, answer and stopping state.

  Fields:
    handle: Handle of the row's request.
    answer: Answer to which the row's tokens are appended.
    watch: Detector of the end of its text, or None.
    draw: Row number in a batch whose random draws it uses.
    search: Beam search that the row is part of and that has the answers, or
      None.
  """

  handle: Handle
  answer: Answer
  watch: Watch | None
  draw: int
  search: BeamSearch | None = None


class Engine:
  """Serves requests; `submit` one, then `step`, or `start` a thread.

  Attributes:
    config: Options of the engine.
    model: Model with the adapters.
    counters: Counts of requests, steps and tokens so far.
    scheduler: Scheduler of rows and pages.
    on_step: Called after each step by the thread that steps, or None; it has
      to be quick and may not raise.
    on_layers: Called, where `layer_parts` is above 1, after each part but the
      last of a call for prompts is dispatched, with the part's number, the
      chunks and the pool, in which the keys of these layers are still being
      computed. It has to be quick and may not raise.
    layer_parts: First layer and end of each part of the layers.
    reads_apart: Reason for which each row reads the pages that it shares with
      others for itself; "" where they are read once for all rows.
    calls_apart: Reason for which answers and prompts are computed in two calls,
      each of which reads the weights; "" where one program computes both.
    important: Part of prefixes in the store that is read, an `ImportantShare`,
      or None for all.
    agreement: Agreement with the replicas of the engine in other processes, see
      `EngineGroup`.
  """

  @entering(lambda _, model, *__, mesh=None, **___: mesh or model.mesh)
  def __init__(
    self,
    model: Transformer,
    config: EngineConfig | None = None,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    tokenizer: Any = None,
    adapters: Mapping[str, tuple[Lora, Any]] | None = None,
    store: Store | None = None,
    attention_fn: DenseFunction | None = None,
    clock: Callable[[], float] = time.monotonic,
    **overrides: Any,
  ):
    """Makes an empty pool.

    Args:
      model: Model from `rj.models.load` or `create`.
      config: Options; default: those of `EngineConfig()`.
      mesh: Device mesh; default: the model's.
      axis: Mesh axis that shards the pages; default "seq" if there is one.
      tokenizer: Tokenizer for stop texts and `Answer.text`.
      adapters: Low-rank adapters of the model, (config, params) by name, see
        `rj.train.Lora.start`; a request names the one that it uses.
      store: An `rj.store.Store` to which evicted pages are written, and from
        which prefixes are read bit for bit. The engine does not close it.
      attention_fn: Dense attention function of the caller, which reads the
        keys of contiguous rows as plain arrays [B, S, K, H], see `Session`. S
        is a power of two of pages, at least what the longest row of the call
        has reached, with a program for each: tokens are those of pages up to
        rounding.
      clock: Clock in seconds, for deadlines and step times.
      **overrides: Options of `EngineConfig` by name, as rows=8, in place of
        those of `config`.

    Raises:
      OptionError: If a value is out of range, or for an `attention_fn` for
        pages, shards, unrotated keys, trees or a model whose keys it can't
        read, a store for a model that shares nothing, `important` without a
        store, with adapters, codecs or shards, contiguous rows that are to
        share prefixes or to be swapped, drafts for recurrent layers, or by a
        model with another tokenizer or on other devices, or one whose cache
        evicts; parts of layers that can't be cut so often, or of recurrent
        ones; contiguous rows on a mesh of several processes.
      ConfigError: `important`, for layers whose attention is more than a causal
        softmax.
      MeshError: If weights are on other devices than those of the mesh.
      MemoryEstimateError: If the pool does not fit.
    """
    if not isinstance(model, Transformer):
      raise InputTypeError(
        "model",
        type(model).__name__,
        "an rj.models.Transformer",
        "make one with rj.models.load",
      )
    self.config = config = EngineConfig.of(config, overrides)
    self.important = share_of(config.important, store, adapters)
    if tokenizer is not None:
      check_tokenizer(tokenizer)
    self.tokenizer = tokenizer
    self.agreement: StepAgreement = LocalAgreement()
    self._take_adapters(model, adapters or {})
    self.mesh, self.axis = place_of(mesh, axis, model)
    check_devices(model, self.mesh)
    self._check_processes()
    self._attend = self._attention()
    if self._attend.stages > 1:
      raise stages_error("an engine, whose calls have a cache")
    self._cut_layers()
    self._take_drafter(clock)
    sizes = EngineSizes.of(model, config, self.mesh, self._attend.size)
    self.longest, self.vocab = sizes.longest, model.config.vocab
    self._take_function(attention_fn, sizes)
    self._take_pattern(model, sizes, attention_fn, store)
    self._make_pool(sizes)
    self._make_scheduler(sizes)
    self.counters = EngineCounters()
    self._link = self._link_store(store)
    self._make_rows()
    self._begin_drafts()
    self._make_steps(clock)

  # -------------------------------------------------------------------------
  # Parts of an engine, made once
  # -------------------------------------------------------------------------

  def _take_pattern(
    self,
    model: Transformer,
    sizes: EngineSizes,
    attention_fn: DenseFunction | None,
    store: Store | None,
  ) -> None:
    """Makes the attention of prompts whose tiles a pattern chooses."""
    self._reads_prompts = prompt_attention(
      model, self.config, sizes, self._attend, attention_fn, store
    )

  def _make_rows(self) -> None:
    """Place the state of rows, and masks that allow all tokens."""
    config = self.config
    self._board = RowBoard(
      self._place(jnp.zeros((config.rows,), jnp.int32)),
      self._place(jnp.zeros((config.rows, self.vocab), bool)),
      self._place(jnp.zeros((config.rows, self.vocab), jnp.int32)),
    )
    self._all = {
      n: self._place(jnp.ones((n, self.vocab), bool))
      for n in {config.rows, config.pieces}
    }
    # Length-dependent rotations: prompts that rotate otherwise share no keys.
    self._scaled = {
      rope.scaling for rope in self.model.config.ropes if rope.scaling.by_length
    }

  def _make_steps(self, clock: Callable[[], float]) -> None:
    """Begin without requests, and with locks for threads that step or ask."""
    self._handles: dict[Handle, list[ServedRow]] = {}
    self.on_step: Callable[[], None] | None = None
    self.on_layers: (
      Callable[[int, tuple[PromptPiece, ...], PagePool], None] | None
    ) = None
    self._flying: _Flight | None = None
    self._arrivals = itertools.count()
    self._clock = clock
    self._lock = threading.RLock()
    self._work = threading.Condition(self._lock)
    # One entry for each thread that waits to be let in between two steps.
    self._asking: collections.deque[None] = collections.deque()
    self._thread: threading.Thread | None = None
    self._closed = False
    self._broken: Exception | None = None

  def _begin_drafts(self) -> None:
    """Begin the drafter, if there is one."""
    if self._drafts is None:
      return
    # Draft by the base weights: rows may have several adapters.
    self._drafts.begin(
      self.base,
      rows=self.config.rows,
      longest=self.longest,
      mesh=self.mesh,
      axis=self.axis,
      dtype=self._pool.dtype,
    )

  def _take_adapters(
    self, model: Transformer, adapters: Mapping[str, tuple[Lora, Any]]
  ) -> None:
    # The model without adapters; adapter number 0 stands for none.
    self.base = model
    self._adapter_parts = dict(adapters)
    self._adapters = {"": 0} | {
      name: n + 1 for n, name in enumerate(self._adapter_parts)
    }
    self._adapter_digests = {"": ""}
    self.model = model
    if adapters:
      self.model = with_adapters(model, [*self._adapter_parts.values()])

  @property
  def _recurrent(self) -> bool:
    """Whether some layers keep a state in place of keys and values."""
    return any(isinstance(s, StateShape) for s in self.base.kinds)

  def _attention(self) -> CachedAttention:
    """Attention over the pages, in one order for prompts and answers or not.

    Raises:
      OptionError: If `one_order` is asked for on a mesh of several devices.
    """
    if not self.config.one_order:
      return CachedAttention(mesh=self.mesh, axis=self.axis)
    if self.mesh is not None and self.mesh.size > 1:
      raise OptionError(
        "one_order",
        f"it on a mesh of {self.mesh.size} devices",
        "one device, which computes tiles one after another",
        "leave one_order out",
      )
    return OneOrderCached(mesh=self.mesh, axis=self.axis)

  def _cut_layers(self) -> None:
    """Cut the layers into parts for prompts.

    Raises:
      OptionError: If they can't be cut so often.
    """
    self._parts = layer_parts_of(self.model, self.config.layer_parts)
    if self._recurrent and len(self._parts) > 1:
      raise OptionError(
        "layer_parts",
        f"{self.config.layer_parts} for a {self.base.config.family}, with "
        "recurrent layers",
        "1: their states do not leave while a prompt is read",
        "leave it out",
      )
    self.layer_parts = tuple(
      part.stack.within or (0, len(self.base.config.layers))
      for part in self._parts
    )

  def _take_drafter(self, clock: Callable[[], float]) -> None:
    self._drafts: RowDrafts | None = None
    self._paces: StepPaces | None = None
    self._drafted = 0
    if self.config.speculate is None:
      return
    self._drafts = RowDrafts(self.config.speculate)
    self._drafts.check(self.base)
    self._drafted = self._drafts.count
    if self._drafts.adapts:
      self._paces = self._drafts.paces(
        self.config.rows, clock, lambda value: self.agreement.choose(value)
      )

  def _check_processes(self) -> None:
    """Refuse a layout whose memory is that of one host, in several processes.

    Raises:
      OptionError: If rows are contiguous.
    """
    processes = processes_of(self.mesh)
    if processes and self.config.contiguous:
      raise OptionError(
        "layout",
        f"{self.config.layout!r}, in {len(processes)} processes",
        "'pages': contiguous rows grow as far as each host has memory for them",
        "leave layout out, or use a mesh of one process's devices",
      )

  def _check_group(self) -> None:
    """Refuse a store whose processes do not agree on what it has.

    Raises:
      OptionError: If there are several, without an `EngineGroup`.
    """
    alone = isinstance(self.agreement, LocalAgreement)
    if alone and self._link is not None and processes_of(self.mesh):
      raise OptionError(
        "store",
        "a store of an engine in several processes, without a group",
        "a group, whose processes agree on the prefixes that all have",
        "make an rj.serve.EngineGroup of the engine, and submit to that",
      )

  def _take_function(
    self, attention_fn: DenseFunction | None, sizes: EngineSizes
  ) -> None:
    self._function = attention_fn
    self._reaches: tuple[int, ...] = ()
    if attention_fn is None:
      return
    if self.config.one_order:
      raise OptionError(
        "one_order",
        "it with an attention_fn, which reads keys in an order of its own",
        "one of them",
        "leave one_order out",
      )
    check_function(attention_fn, self.base.config.layers)
    trees = self._drafts is not None and self._drafts.trees
    check_dense_rows(self.config.layout, sizes.shards, sizes.kind, trees)
    self._reaches = row_reaches(sizes.page, sizes.tile, sizes.blocks)

  def _make_pool(self, sizes: EngineSizes) -> None:
    """Make the pool of pages.

    Raises:
      MemoryEstimateError: If it does not fit the devices.
    """
    config, model = self.config, self.base
    mesh_axes = () if self.mesh is None else self.mesh.axis_names
    spec: dict[str, Any] = dict(
      rows=config.rows,
      pages=functools.partial(sizes.group_pages, config),
      page=sizes.page,
      dtype=model.dtype
      if config.dtype is None
      else float_dtype("dtype", config.dtype),
      kind=sizes.kind,
      mesh=self.mesh,
      axis=self.axis if sizes.shards > 1 else None,
      head_axis="model" if "model" in mesh_axes else None,
      row_tokens=sizes.longest,
    )
    free, devices = free_on(self.mesh)
    pool_bytes = bytes_each(PagePool.spec(model.kinds, **spec).slots)
    if free is not None and pool_bytes > free and not sizes.reserves:
      raise MemoryEstimateError(
        "capacity",
        f"{pool_bytes:,} bytes on each of {devices} device(s) for "
        f"{sizes.capacity:,} tokens",
        f"at most the {free:,} that are free there",
        "pass a smaller capacity=, a codec as cache_kind=, or more devices",
      )
    fill = reserved_zeros if sizes.reserves else zeros
    self._pool = PagePool.create(model.kinds, fill=fill, **spec)
    self._place = self._everywhere
    if self.mesh is None:
      # Committed, as what calls return: else each program is compiled twice.
      (device,) = jax.tree.leaves(model)[0].devices()
      self._place = lambda x: jax.device_put(x, device)
      self._pool = jax.device_put(self._pool, device)
    # Bytes of a page in all groups of layers.
    self.page_bytes = sizes.page * sum(g.token_bytes for g in self._pool.groups)

  def _make_scheduler(self, sizes: EngineSizes) -> None:
    """Make the tree of prefixes, the scheduler and the builder of calls."""
    config, drafted = self.config, self._drafted
    self._rows: ContiguousRows | None = None
    if config.contiguous:
      self._rows = ContiguousRows(
        self._pool,
        config.rows,
        sizes.blocks,
        sizes.pages_at_once,
        sizes.reserves,
        1 + drafted,
      )
      self._rows.space.settle = self._settle
      tree: PrefixTree = self._rows.space
    else:
      groups = [
        GroupSpec(pages=g.pages // sizes.shards, reach=g.reach)
        for g in self._pool.groups
      ]
      tree = PrefixTree(
        groups or [GroupSpec(pages=sizes.pages // sizes.shards)],
        sizes.page,
        shards=sizes.shards,
      )
    self.reads_apart = self._reason_to_read_apart(sizes)
    budget = config.budget
    if budget is None:
      budget = config.rows * (1 + drafted) + config.piece * config.pieces
    limits = StepLimits(
      rows=config.rows,
      pieces=config.pieces,
      piece=config.piece,
      budget=budget,
      blocks=sizes.blocks,
      one_piece=self._recurrent,
      aligned=1 if self._reads_prompts is self._attend else config.piece,
    )
    self._swap = PageSwap(
      config.preemption,
      sizes.page,
      self.page_bytes,
      lambda value: self.agreement.choose(value),
    )
    # No reuse with recurrent layers: a state can't go back to a prefix's end.
    self.scheduler = Scheduler(
      tree,
      limits,
      share_answers=config.sharing == "answers",
      reuse=config.sharing != "nothing" and not self._recurrent,
      keeps=self._swap.keeps,
    )
    tiles = prompt_tiles(
      self.model, config, self._attend, sizes.platform, self._function
    )
    self._row_tile, self.calls_apart = row_tile(
      self.model,
      config,
      self._attend,
      sizes.platform,
      self._function,
      self._drafted,
    )
    if not self._row_tile:
      self.calls_apart = reason_for_two_calls(
        config, tiles, sizes.platform, self.calls_apart
      )
    self._calls = CallBuilder(
      self.scheduler,
      self.vocab,
      tile=sizes.tile,
      together=not self.reads_apart,
      adapters=self._adapters,
      groups=len(self._pool.groups),
      drafted=drafted,
      trees=self._drafts is not None and self._drafts.trees,
      place=self._rows.place if self._rows is not None else None,
      prompt_tiles=tiles,
    )
    # What a step passes for the kind of row that it does not have.
    self._no_calls: tuple[CallArrays, CallArrays] | None = None
    if not self.calls_apart:
      self._no_calls = self._calls.answer_call(()), self._calls.pieces(())
      self._calls.plans = 0

  def _reason_to_read_apart(self, sizes: EngineSizes) -> str:
    """Reason for which rows read common pages apart, or ""."""
    if self.config.contiguous:
      return f"layout={self.config.layout!r}, whose rows share no pages"
    # Rows on other devices read their pages separately.
    if self._attend.batch_axes(self.config.rows):
      return "a mesh axis shards the rows"
    if self.config.shared_reads == "never":
      return "shared_reads='never'"
    if self.config.shared_reads == "always" or all(
      self._exact(self.config.rows, sizes.page, sizes.platform, width)
      for width in self._widths(self._drafted)
    ):
      return ""
    reason = (
      "on this device numbers of a row that reads with others differ in "
      "their last bits from those that it has alone; pass "
      "shared_reads='always' to read together nevertheless"
    )
    _LOG.warning("rows read their common pages apart: %s", reason)
    return reason

  def _link_store(self, store: Store | None) -> StoreLink | None:
    """Link the pool and a store.

    Raises:
      OptionError: If prefixes are not found again.
    """
    if store is None:
      return None
    if not self.scheduler.reuse:
      config = self.config
      raise OptionError(
        "store",
        "a store, for "
        + (
          "recurrent layers"
          if self._recurrent
          else f"layout={config.layout!r}, share={config.sharing!r}"
        ),
        "a model and a share= with which prefixes are found again",
        "leave store out",
      )
    linked = store, self.model, self._pool, self.scheduler, self.counters
    if self.important is not None:
      return ImportantLink(*linked, self.longest, self.important)
    digests = {name: self.adapter_digest(name) for name in self._adapter_parts}
    link = StoreLink(*linked, self.longest, base=self.base, adapters=digests)
    link.together = lambda value: self.agreement.together(value)
    return link

  def _everywhere(self, x: jax.Array) -> jax.Array:
    return jax.device_put(x, NamedSharding(self.mesh, P()))

  def _widths(self, drafted: int) -> set[int]:
    """Widths of calls for answers: tokens of a row, with or without drafts."""
    plain = self._drafts is None or self._drafts.adapts
    return {1, 1 + drafted} if plain else {1 + drafted}

  def _exact(self, rows: int, page: int, platform: str, queries: int) -> bool:
    """Whether rows get the same bits if they read shared pages together."""
    pool = self._pool
    # Kinds of layers of different shapes.
    shapes = {
      (rows, s.heads, s.reading.groups, s.key, s.value or s.key): n
      for n, s in enumerate(pool.shapes)
      if isinstance(s, LayerCacheSpec) and s.reading is not None
    }
    # The kernel of this chip, if there is one, decides.
    kind = jax.devices(platform)[0].device_kind
    local = AutoKernel(platform=platform, chip=chips.machine_name(kind))
    return all(
      sharing_is_exact(
        s,
        page,
        pool.dtype,
        platform,
        local.decode,
        queries,
        functools.partial(encoded_view, pool, n),
      )
      for s, n in shapes.items()
    )

  # -------------------------------------------------------------------------
  # Requests
  # -------------------------------------------------------------------------

  def prefix_salt(self, salt: str, length: int) -> str:
    """Prefix salt of a request, shared by prompts with the same rotations.

    Args:
      salt: Salt of the request.
      length: Number of tokens in its prompt.
    """
    alike = self.rotations(length)
    return "\0".join([salt, *alike]) if alike else salt

  def rotations(self, length: int) -> tuple[str, ...]:
    """Keys of the length-dependent rotations of a prompt of this length.

    Prompts with equal keys rotate alike. Empty where no rotation depends on the
    length.
    """
    return tuple(sorted(str(x.alike(length)) for x in self._scaled))

  def adapter_number(self, name: str) -> int:
    """Number of an adapter among those of the engine; "" is 0.

    Raises:
      OptionError: If the engine has no adapter of that name.
    """
    if name not in self._adapters:
      raise OptionError(
        "adapter",
        repr(name),
        f"one of {sorted(self._adapters)}",
        "pass adapters= to the engine",
      )
    return self._adapters[name]

  def adapter_digest(self, name: str) -> str:
    """Digest of all numbers of an adapter; "" without an adapter.

    Unlike an adapter's number, it means the same in every engine.

    Raises:
      OptionError: If the engine has no adapter of that name.
    """
    self.adapter_number(name)
    if name not in self._adapter_digests:
      digest = adapter_digest(*self._adapter_parts[name])
      self._adapter_digests[name] = digest
    return self._adapter_digests[name]

  @contextlib.contextmanager
  def _asked(self) -> Iterator[None]:
    """Hold the lock in a thread that the engine's thread lets in between steps.

    Locks of Python are not fair: a thread that steps again and again would keep
    others waiting.

    Raises:
      OptionError: If a group of processes drives the engine.
    """
    self.agreement.check_caller("its methods that change it")
    self._asking.append(None)
    with self._work:
      self._asking.pop()
      try:
        yield
      finally:
        self._work.notify_all()

  def submit(
    self,
    request: Request,
    on_change: Callable[[Answer], None] | None = None,
  ) -> Handle:
    """Queues a request.

    Args:
      request: Request to serve.
      on_change: Called with an answer after each of its tokens and when it has
        ended, by the thread that steps or cancels, which waits for it: it has
        to be quick and may not raise.

    Raises:
      PromptError: If the prompt is invalid or longer than the engine serves.
      OptionError: If there are stop texts without a tokenizer, more beams than
        rows, beams in contiguous rows, the engine is closed, or it has a store
        in several processes and no `EngineGroup`.
    """
    if not isinstance(request, Request):
      raise InputTypeError(
        "request",
        type(request).__name__,
        "an rj.serve.Request",
        "make one with rj.serve.Request(prompt=..., max_new_tokens=...)",
      )
    prompt = inputs.prompt(request.prompt, self.vocab)
    stop = request.stops
    stop.check(self.vocab)
    if stop.strings and self.tokenizer is None:
      raise OptionError(
        "stop",
        "texts, for an engine without a tokenizer",
        "ids",
        "pass tokenizer= to the engine",
      )
    self.adapter_number(request.adapter)
    self._check_group()
    beams = request.beams or 0
    if beams > self.scheduler.limits.rows or (beams and self._rows):
      raise OptionError(
        "beams",
        f"{beams}, for an engine with rows={self.scheduler.limits.rows}"
        + (" that are contiguous" if self._rows else ""),
        "at most as many beams as rows, which share pages",
        "ask for fewer, or make the engine with more rows=, layout='pages'",
      )
    for token in dict(request.sampling.logit_bias):
      integer("logit_bias token", token, least=0, most=self.vocab - 1)
    for token in itertools.chain.from_iterable(request.begun):
      integer("begun", token, least=0, most=self.vocab - 1)
    total = prompt.size + request.max_new_tokens
    if total > self.longest:
      raise PromptError(
        "prompt",
        f"{prompt.size:,} tokens and max_new_tokens={request.max_new_tokens:,}",
        f"{self.longest:,} tokens of a row at most",
        "ask for fewer, or make the engine with a larger longest=",
      )
    inputs.within_context(
      self.model.config,
      total,
      f"{prompt.size:,} tokens in the prompt and max_new_tokens="
      f"{request.max_new_tokens:,}",
    )
    with self._asked():
      self._check_open()
      handle = Handle(self, request, self._clock(), on_change)
      number = next(self._arrivals)
      rows: list[ServedRow] = []
      watches = [
        None if self.tokenizer is None else stop.watch(self.tokenizer)
        for _ in range(request.rows)
      ]
      search = None
      if request.beams is not None:
        search = BeamSearch(request, rows, self.scheduler, watches[0])
      begun = request.begun or ((),) * request.rows
      for n, watch in enumerate(watches):
        # All rows of a beam search share its first answer.
        answer = handle.answers[n if search is None else 0]
        answer.tokens.extend(begun[n])
        if watch is not None:
          answer.text = "".join(map(watch.feed, begun[n]))
        row = ServedRow(
          prompt=prompt,
          most=request.max_new_tokens,
          priority=request.priority,
          # Rows of a request follow one another in the order of arrival.
          arrival=number + n / (request.rows + 1),
          salt=self.prefix_salt(request.salt, prompt.size),
          adapter=request.adapter,
          share=request.share,
          answer=list(begun[n]),
          chosen=len(begun[n]),
          owner=_Owner(handle, answer, watch, n, search),
        )
        rows.append(row)
        if search is not None:
          row.team = rows
      why = self.scheduler.fits(rows[0])
      if why is not None:
        raise PromptError(
          "prompt",
          f"{prompt.size:,} tokens and max_new_tokens="
          f"{request.max_new_tokens:,}" + (f", beams={beams}" if beams else ""),
          why,
          "ask for fewer, or make the engine with larger longest=, capacity=",
        )
      self._handles[handle] = rows
      self.counters.requests += 1
      for row in rows[:1] if search is not None else rows:
        self.scheduler.add(row)
    return handle

  def cancel(self, handle: Handle, why: str = "cancelled") -> None:
    """Cancels a request; its pages are free at once."""
    with self._asked():
      rows = self._handles.get(handle, [])
      for row in rows:
        if not row.ended:
          self._end(row, why)
      if rows:
        self.counters.cancelled += why == "cancelled"

  def prompt_progress(self, handle: Handle) -> int:
    """Tokens of a request's prompt whose keys are computed, or found.

    Args:
      handle: Handle of a request; the result is 0 once it has ended.
    """
    rows = self._handles.get(handle)
    return min(rows[0].computed, rows[0].prompt.size) if rows else 0

  @contextlib.contextmanager
  def between_steps(self) -> Iterator[PagePool]:
    """The pool, for a block in which the engine takes no step."""
    with self._asked():
      self._check_open()
      yield self._pool

  def take_weights(self, model: Transformer) -> None:
    """Replaces the model's weights by those of another one, between requests.

    Arrays that lie where the engine's do are not copied; others are moved to
    its mesh and dtype. Cached prefixes are cleared, as other weights made them.
    A program is not compiled again. Arrays must not be donated to another
    program while the engine has them and computes.

    Args:
      model: Model with the same layers and shapes, such as that of a training.

    Raises:
      OptionError: If the engine has requests, a store, adapters or drafts,
        whose state belongs to its weights, or is closed.
      CheckpointMismatchError: If a weight has another name or shape.
    """
    refused = {
      "store": self._link is not None,
      "adapters": bool(self._adapter_parts),
      "speculate": self._drafts is not None,
    }
    for name, present in refused.items():
      if present:
        raise OptionError(
          name,
          f"an engine with {name}, which belongs to its weights",
          f"an engine without {name}",
          f"leave {name} out to hand over weights",
        )
    with self._asked():
      self._check_open()
      if self._handles:
        raise OptionError(
          "take_weights",
          f"an engine with {len(self._handles)} requests",
          "an engine without requests",
          "wait for their results, or call run(), first",
        )
      # A step may be in flight after the last token of the last request.
      self._collect()
      self.model = self.base = weights_as(model, self.model)
      self._cut_layers()
      self.scheduler.tree.clear()
      # A scorer of texts keeps the model.
      self.__dict__.pop("texts", None)

  @functools.cached_property
  def texts(self) -> TextRequests:
    """Scores and embeddings of texts by the engine's model."""
    return TextRequests(EngineTexts(self).read, self.vocab)

  @property
  def store_link(self) -> StoreLink | None:
    """Link that moves pages to the store and back, or None without one."""
    return self._link

  @property
  def space(self) -> RowSpace | None:
    """Slots of contiguous rows and what is mapped in them; None in pages."""
    return None if self._rows is None else self._rows.space

  def pages_of_rows(self) -> Int32[np.ndarray, "rows pages"]:
    """Numbers of the pages of each row, in the order of its tokens; -1: none.

    Rows that share a page have the same number in the same place. If layers
    have windows of several sizes, these are the pages of the layers that look
    back furthest.
    """
    groups = self.scheduler.tree.groups
    reach = [np.inf if g.reach is None else g.reach for g in groups]
    with self._lock:
      table = self.scheduler.tables[int(np.argmax(reach))].copy()
    # Token blocks are dealt to the shards, each of which numbers its own pages.
    rows, shards, _ = table.shape
    numbers = table * shards + np.arange(shards, dtype=np.int32)[:, None]
    numbers = np.where(table < 0, np.int32(-1), numbers)
    return numbers.swapaxes(1, 2).reshape(rows, -1)

  def reserved(self) -> int:
    """Bytes of the arrays of keys and values, resident or not."""
    return self._pool.nbytes()

  def resident(self) -> int | None:
    """Bytes of reserved rows that are in memory; None of another layout."""
    with self._lock:
      memory = None if self._rows is None else self._rows.memory
      return None if memory is None else memory.resident()

  @property
  def open(self) -> bool:
    """Whether it takes requests: not closed, and no step of it has failed."""
    return not self._closed and self._broken is None

  @property
  def missing(self) -> str:
    """Reason for which it takes no requests; "" if it takes them."""
    if self._closed:
      return "the engine: it is closed"
    return "" if self._broken is None else "the engine: a step of it failed"

  @property
  def rows(self) -> int:
    """Answers that are made at the same time."""
    return self.scheduler.limits.rows

  @property
  def adapters(self) -> tuple[str, ...]:
    """Names of the adapters that requests may ask for."""
    return tuple(name for name in self._adapters if name)

  @property
  def drafting(self) -> str:
    """The reason for which the last step for answers had drafts, or none; ""
    for an engine without drafts."""
    if self._drafts is None:
      return ""
    if self._paces is None:
      return "always, as adapt=False says"
    return self._paces.why

  def figures(self) -> list[Figure]:
    """Metrics that a server publishes about the engine."""
    return engine_figures(self)

  @property
  def busy(self) -> bool:
    """Whether requests are running, waiting or in flight."""
    return self._flying is not None or self.scheduler.busy

  # -------------------------------------------------------------------------
  # Steps
  # -------------------------------------------------------------------------

  def step(self) -> bool:
    """Computes the next tokens and returns whether there is more to do.

    The tokens of a step are known after the next one, which is in flight
    while they are read.
    """
    self.agreement.check_caller("step")
    with self._lock:
      self._check_open()
      make_room()
      try:
        timing = contextlib.nullcontext()
        if self._paces is not None:
          timing = self._paces.step()
        with naming_faults(self.model.stack.faults), timing:
          return self._step()
      except Exception as raised:
        # The state of the device is unknown now, so all requests end.
        self._broken = error = self.agreement.failed(raised)
        for handle in list(self._handles):
          for row in self._handles.get(handle, []):
            if not row.ended:
              row.owner.answer.error = error
              self._end(row, "error")
        if error is not raised:
          raise error from raised
        raise

  @entering(lambda engine: engine.mesh)
  def warm_up(self) -> None:
    """Compiles the programs of all kinds of requests, so that none waits.

    It runs each program once with nothing to compute. A program is compiled
    for the first request that needs it otherwise, while all others wait.

    Raises:
      OptionError: If the engine has requests, or is closed.
    """
    with self._asked():
      self._check_open()
      if self.busy:
        raise OptionError(
          "warm_up",
          f"an engine with {len(self._handles)} requests",
          "an engine without requests",
          "call it before the first submit, or after run()",
        )
      make_room()
      with naming_faults(self.model.stack.faults):
        self._warm_up()
      # Wait until nothing is in flight, and raise the faults of these calls.
      jax.block_until_ready((self._pool, self._board))
      raise_fault(self.model.stack.faults)

  def _warm_up(self) -> None:
    """Runs each program once with nothing to compute; see `warm_up`."""
    limits = self.scheduler.limits
    if self._rows is not None:
      self._rows.space.join()
      self._pool = self._rows.warm_up(self._pool)
    else:
      self._pool = forked(self._pool, (), limits.rows)
    if self._link is not None:
      self._pool = self._link.warm_up(self._pool)
    self._pool = self._swap.warm_up(self._pool)
    nothing = np.zeros(self.vocab, np.int32)
    # Compile the marking program; it marks no tokens.
    self._board = marked(self._board, jnp.int32(0), nothing > 0, nothing)
    if self._drafts is not None:
      self._drafts.warm_up(self._calls.settings, self._board, self._held)
    drafted = 0 if self._drafts is None else self._drafts.count
    if self._no_calls is not None:
      for width in sorted(self._widths(drafted)):
        answers = self._calls.answer_call((), width > 1)
        jax.device_get(self._step_choices(answers, self._no_calls[1]))
      return
    for end in self._reaches or (0,):
      for width in sorted(self._widths(drafted)):
        # Calls of padding alone, as long as a row of this reach.
        decode_call = self._calls.answer_call((), width > 1)
        decode_call.ends[:] = end
        work = check_drafts if width > 1 else compute
        jax.device_get(self._computed(decode_call, [], work))
      pieces = self._calls.pieces(())
      pieces.ends[:] = end
      last = functools.partial(compute, x=self._before_last(pieces, None))
      jax.device_get(self._computed(pieces, [], last, self._parts[-1]))

  def run(self) -> None:
    """Steps until all requests have ended."""
    while self.step():
      pass

  def advance(self, handle: Handle) -> None:
    """Advances a request: takes a step, or waits for the engine's thread."""
    if self._thread is None:
      self.step()
      return
    with self._work:
      if not handle.done and not self._closed:
        self._work.wait(timeout=1.0)

  def start(self) -> Engine:
    """Starts a thread that takes the steps, until `close`."""
    self.agreement.check_caller("start")
    with self._lock:
      self._check_open()
      if self._thread is None:
        self._thread = threading.Thread(
          target=self._serve, name="ringjax engine", daemon=True
        )
        self._thread.start()
    return self

  def close(self) -> None:
    """Ends the thread, cancels requests and writes prefixes to the store."""
    self.agreement.check_caller("close")
    with self._work:
      self._closed = True
      self._work.notify_all()
    if self._thread is not None:
      self._thread.join()
    with self._lock:
      for handle in list(self._handles):
        self.cancel(handle)
      self._flying = None
      self._work.notify_all()
      if self._link is not None:
        if self._broken is None:
          self._link.export_all(self._pool)
        self._link.close()
        self._link = None
      if self._rows is not None:
        self._rows.space.close()

  def __enter__(self) -> Engine:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _serve(self) -> None:
    while True:
      with self._work:
        while not self._closed and (self._asking or not self.busy):
          self._work.wait()
        if self._closed:
          return
      try:
        self.step()
      except Exception:
        # `step` has set the error of every request.
        return

  def _check_open(self) -> None:
    if self._closed:
      raise OptionError(
        "engine", "a closed one", "one that is open", "make another Engine"
      )
    if self._broken is not None:
      raise OptionError(
        "engine",
        f"one whose step failed: {self._broken!r}",
        "one that works",
        "make another Engine",
      ) from self._broken

  @entering(lambda engine: engine.mesh)
  def _step(self) -> bool:
    """Take one step; the caller holds the lock."""
    self._expire()
    rows = [row for row in self.scheduler.running if row is not None]
    drafting = self._drafting(rows)
    checked = self._flying is not None and self._flying.checks
    if (
      drafting
      or checked
      or any(
        row.team or row.owner.handle.request.mask is not None for row in rows
      )
    ):
      # Their next tokens depend on all tokens before, so read those first.
      self._collect()
    if self._rows is not None:
      self._rows.space.join()
    self.scheduler.drafts = None
    if drafting and self._drafts is not None:
      self._prepare(self._drafts)
    plan = self.scheduler.plan()
    counters = self.counters
    if self._rows is not None:
      self._pool = self._rows.moved(self._pool)
    # Copy pages out before any call writes to them.
    for row in plan.preempted:
      if row.kept is not None:
        self._swap.out(self._pool, row)
    if self._link is not None:
      self._pool = self._link.move(self._pool)
    for row in plan.restored:
      self._pool = self._swap.back(self._pool, row)
    if plan.forks:
      max_rows = self.scheduler.limits.rows
      self._pool = forked(self._pool, plan.forks, max_rows)
    for row in plan.admitted:
      self._admit(row)
    counters.preemptions += len(plan.preempted)
    counters.swapped = self._swap.count
    for row in plan.preempted:
      row.owner.handle.preemptions += 1
    for row in plan.refused:
      row.owner.answer.error = OutOfMemoryError(
        "a row alone",
        f"no memory for {row.known:,} tokens",
        "what the system has to spare for one row",
        "free memory on this host, or pass a smaller longest=",
      )
      self._end(row, "error")
    previous, self._flying = self._flying, None
    if not plan.empty:
      counters.steps += 1
      counters.prompt_tokens += sum(piece.count for piece in plan.pieces)
      self._flying = self._run(plan)
    if self._rows is not None:
      self._rows.look_ahead(self.scheduler.running)
    if previous is not None:
      self._read(previous)
    elif plan.empty and self._link is not None:
      # All remaining rows wait for blocks.
      self._link.wait(self.scheduler.waiting)
    if self._link is not None and not self.busy:
      self._link.settle(self._pool)
    self._swap.measure(plan)
    if self.on_step is not None:
      self.on_step()
    self._work.notify_all()
    return self.busy

  def _drafting(self, rows: list[ServedRow]) -> bool:
    """Whether rows have drafts in the step that is about to be planned."""
    drafts = self._drafts
    if drafts is None or self._paces is None:
      return drafts is not None
    return self._paces.drafts(
      rows, drafts.drafts_for, lambda: drafts.unread(rows)
    )

  def _prepare(self, drafts: RowDrafts) -> None:
    """Prepare the drafts of this step and pass them to the scheduler."""
    timing = contextlib.nullcontext()
    if self._paces is not None:
      timing = self._paces.drafting()
    with timing:
      drafts.prepare(
        [row for row in self.scheduler.running if row is not None],
        self._calls.settings,
        self._board,
        self._held,
      )
    self.counters.undrafted = drafts.undrafted
    self.scheduler.drafts = drafts.draft

  def _held(self) -> PooledRows:
    """Pages of the rows that decode, as a drafter reads them."""
    if self._rows is not None:
      # The look-ahead may have moved some.
      self._pool = self._rows.moved(self._pool)
    return self._calls.row_pages(self._pool)

  def _settle(self) -> None:
    """Waits for the calls that are in flight."""
    if self._flying is not None:
      jax.block_until_ready((self._flying.answer_turns, self._flying.pieces))

  def _collect(self) -> None:
    """Reads the tokens of the step that is in flight."""
    previous, self._flying = self._flying, None
    if previous is not None:
      self._read(previous)

  def _expire(self) -> None:
    current_time = self._clock()
    for handle in list(self._handles):
      deadline = handle.request.deadline
      if deadline is not None and current_time - handle.arrival > deadline:
        self.counters.expired += 1
        self.cancel(handle, "deadline")

  def _admit(self, row: ServedRow) -> None:
    """Set up a row that begins or begins again."""
    request = row.owner.handle.request
    if not row.preemptions:
      if row.owner.draw == 0:
        row.owner.handle.cached_tokens = row.hit
      self.counters.cached_tokens += row.hit
    self.counters.stored_tokens += row.loaded
    if row.apart is not None and not row.preemptions:
      kept_tokens = len(row.apart.payloads) * self.scheduler.tree.page
      row.owner.handle.kept_tokens = kept_tokens
      self.counters.important_rows += 1
      self.counters.important_prefix += row.hit
      self.counters.important_tokens += kept_tokens
    self._calls.begin(row, request, row.owner.draw)
    if self._paces is not None:
      self._paces.begin(row)
    self._mark(row)

  def _mark(self, row: ServedRow) -> None:
    """Copy a row's token counts to the device, if its sampling needs them."""
    if row.owner.handle.request.sampling.counts:
      counts = np.bincount(row.answer, minlength=self.vocab).astype(np.int32)
      seen = counts > 0
      seen[row.prompt] = True
      self._board = marked(self._board, jnp.int32(row.slot), seen, counts)

  # -------------------------------------------------------------------------
  # Calls
  # -------------------------------------------------------------------------

  def _run(self, plan: StepPlan) -> _Flight:
    """Dispatch the calls of a plan."""
    self.agreement.planned(plan, self.scheduler)
    calls, counters = self._calls, self.counters
    checks = self._drafts is not None and (
      self._paces is None or any(turn.draft.tokens for turn in plan.turns)
    )
    decode = calls.answer_call(plan.turns, checks) if plan.turns else None
    pieces = calls.pieces(plan.pieces) if plan.pieces else None
    # A mask may end rows, so both calls are built (with their pages) first.
    if decode is not None:
      keys = sum(turn.end - turn.row.absent for turn in plan.turns)
      counters.keys_seen += keys
      counters.keys_read += keys - calls.saved
      counters.plans = calls.plans
      self._count_steps(checks)
    rows = [(turn.slot, turn.row) for turn in plan.turns if turn.chooses]
    ends = [(n, x.row) for n, x in enumerate(plan.pieces) if x.chooses]
    if self._no_calls is not None:
      choices = self._step_choices(decode, pieces, rows, ends)
      timing = None if self._paces is None else self._paces.planned(plan)
      return _Flight(plan, checks, timing, *choices)
    if decode is not None:
      decode = self._computed(decode, rows, check_drafts if checks else compute)
    if pieces is not None:
      x = self._before_last(pieces, plan.pieces)
      last = functools.partial(compute, x=x)
      pieces = self._computed(pieces, ends, last, self._parts[-1])
    timing = None
    if self._paces is not None:
      timing = self._paces.planned(plan)
    return _Flight(plan, checks, timing, decode, pieces)

  def _count_steps(self, checks: bool) -> None:
    """Counts a step for answers, by whether and why it has drafts."""
    counters = self.counters
    counters.drafted_steps += checks
    counters.plain_steps += not checks
    if self._paces is not None and self.scheduler.drafts is None:
      reason = self._paces.reason
      counters.paused_timing += reason == "timing"
      counters.paused_slower += reason == "slower"
      counters.paused_costly += reason == "costly"

  def _before_last(
    self, call: CallArrays, pieces: tuple[PromptPiece, ...] | None
  ) -> jax.Array | None:
    """Run all parts of the layers but the last one on prompts.

    `on_layers` is not called where `pieces` is None.
    """
    x = None
    for n, part in enumerate(self._parts[:-1]):
      attend = self._attending(call)
      x, self._pool = compute_layers(part, attend, self._pool, call, x)
      if self.on_layers is not None and pieces is not None:
        self.on_layers(n, pieces, self._pool)
    return x

  def _step_choices(
    self,
    answers: CallArrays | None,
    prompts: CallArrays | None,
    rows: Sequence[tuple[int, ServedRow]] = (),
    ends: Sequence[tuple[int, ServedRow]] = (),
  ) -> tuple[Any, Any]:
    """Dispatch the program of a step; the choices of its two calls.

    Args:
      answers: Call for answers, or None.
      prompts: Call for prompts, or None.
      rows: Rows of the answers that choose tokens.
      ends: Rows of the prompts that choose tokens.
    """
    assert self._no_calls is not None
    calls = (
      self._no_calls[0] if answers is None else answers,
      self._no_calls[1] if prompts is None else prompts,
    )
    allowed = (
      self._allowed(calls[0].slots.size, rows),
      self._allowed(calls[1].slots.size, ends),
    )
    choices, self._pool, self._board = compute_step(
      self.model,
      self._attend,
      self._pool,
      self._board,
      calls,
      allowed,
      self._row_tile,
    )
    return (
      None if answers is None else choices[0],
      None if prompts is None else choices[1],
    )

  def _computed(
    self,
    call: CallArrays,
    rows: list[tuple[int, ServedRow]],
    work: Callable[..., Any] = compute,
    model: Transformer | None = None,
  ) -> Any:
    """Dispatch a call in which these rows choose tokens; its choices."""
    choice, self._pool, self._board = work(
      self.model if model is None else model,
      self._attending(call),
      self._pool,
      self._board,
      call,
      self._allowed(call.slots.size, rows),
    )
    return choice

  def _attending(self, call: CallArrays) -> CachedAttention:
    """Attention function with which a call's tokens read their keys."""
    if self._function is None:
      # Calls for prompts have no tiles that rows share.
      return self._attend if call.shared is not None else self._reads_prompts
    assert self._rows is not None
    end = int(np.max(call.ends, initial=0))
    reach = next(n for n in self._reaches if n >= end)
    # In calls for answers a row's number is its slot, where reserved rows are.
    fixed = self._rows.memory is not None and call.shared is not None
    return FunctionAttention(
      mesh=self.mesh,
      axis=self.axis,
      function=self._function,
      reach=reach,
      stride=self._rows.space.each if fixed else None,
    )

  def _allowed(self, batch: int, rows: Sequence[tuple[int, ServedRow]]) -> Any:
    """Mask of allowed next tokens, bool [B, V]."""
    allowed = None
    for n, row in rows:
      mask = row.owner.handle.request.mask
      # A row of a beam search may have ended all rows of the search.
      if mask is None or row.ended:
        continue
      try:
        answer = mask(np.asarray(row.answer, np.int32))
        row_mask = None if answer is None else np.asarray(answer)
        valid = row_mask is None or (
          row_mask.shape == (self.vocab,) and row_mask.dtype == bool
        )
        if not valid or (row_mask is not None and not row_mask.any()):
          raise InputTypeError(
            "mask",
            f"an answer of {type(answer).__name__}"
            + (
              f" {row_mask.dtype} {list(row_mask.shape)}"
              if row_mask is not None
              else ""
            ),
            f"bool [{self.vocab}] of which some are True, or None",
            "let it return which tokens may come",
          )
      except Exception as error:
        row.owner.answer.error = error
        self._end(row, "error")
        continue
      if row_mask is not None:
        if allowed is None:
          allowed = np.ones((batch, self.vocab), bool)
        allowed[n] = row_mask
    everything = self._all[batch]
    if allowed is None:
      return everything
    # Use the sharding of the mask that allows all tokens: jit compiles another
    # program for each other sharding. `device_put` would let all processes
    # compare the mask, each time.
    return jax.make_array_from_callback(
      allowed.shape, everything.sharding, lambda at: allowed[at]
    )

  # -------------------------------------------------------------------------
  # Answers
  # -------------------------------------------------------------------------

  def _read(self, flight: _Flight) -> None:
    """Appends the tokens that a step chose to their rows."""
    plan = flight.plan
    decode_choices, pieces = jax.device_get(
      (flight.answer_turns, flight.pieces)
    )
    raise_fault(self.model.stack.faults)
    chosen = []
    for choice in (decode_choices, pieces):
      if isinstance(choice, Checked):
        chosen += [choice.choice.token, choice.count]
      elif choice is not None:
        chosen.append(choice.token)
    self.agreement.read([np.asarray(tokens) for tokens in chosen])
    if self._paces is not None and flight.timing is not None:
      count = decode_choices.count if flight.checks and plan.turns else None
      self._paces.add(flight.timing, plan, count)
    for turn in plan.turns:
      if not turn.chooses:
        continue
      if not flight.checks:
        self._append_token(turn.row, decode_choices, turn.slot)
      else:
        self._append_drafted(turn, decode_choices)
    for n, piece in enumerate(plan.pieces):
      if piece.chooses:
        self._append_token(piece.row, pieces, n)

  def _append_drafted(self, turn: DecodeTurn, checked: Checked) -> None:
    """Append a row's accepted draft tokens and the token after them."""
    row, num_tokens = turn.row, int(checked.count[turn.slot])
    first = turn.slot * (checked.choice.token.size // checked.count.size)
    for n in range(num_tokens):
      self._append_token(row, checked.choice, first + n)
    self.counters.drafted += len(turn.draft.tokens)
    self.counters.accepted += num_tokens - 1
    row.chosen += num_tokens - 1
    row.computed += num_tokens - 1

  def _append_token(self, row: ServedRow, choice: Any, n: int) -> None:
    """Append one token to a row, and end the row if it stops there."""
    if row.ended:
      return
    owner: _Owner = row.owner
    answer, handle = owner.answer, owner.handle
    if choice.token[n] == NOT_FINITE:
      self._fail(row)
      return
    self.counters.new_tokens += 1
    if handle.first_token is None:
      handle.first_token = self._clock() - handle.arrival
    if owner.search is not None:
      if owner.search.offer(row, choice.top[n], choice.top_logprobs[n]):
        if owner.search.ended:
          self._end(row, "stop")
        else:
          for member in row.team:
            self._mark(member)
      return
    token = int(choice.token[n])
    row.answer.append(token)
    answer.tokens.append(token)
    num_logprobs = handle.request.logprobs
    answer.total_logprob += float(choice.logprob[n])
    if num_logprobs is not None:
      pairs = zip(choice.top[n], choice.top_logprobs[n], strict=True)
      top = [(int(i), float(x)) for i, x in pairs][:num_logprobs]
      answer.logprobs.append(
        TokenLogprobs(
          token=token, logprob=float(choice.logprob[n]), top=tuple(top)
        )
      )
    if owner.watch is not None:
      answer.text += owner.watch.feed(token)
      if owner.watch.stopped is not None:
        answer.stopped = owner.watch.stopped
        self._end(row, "stop")
        return
    elif token in handle.request.stops.ids:
      answer.stopped = token
      self._end(row, "stop")
      return
    if len(answer.tokens) >= row.most:
      self._end(row, "length")
      return
    if handle.on_change is not None:
      handle.on_change(answer)

  def _fail(self, row: ServedRow) -> None:
    """Ends a row whose logits are not finite; its keys are not reused."""
    owner: _Owner = row.owner
    at = row.prompt.size + len(row.answer)
    owner.answer.error = not_finite_error(
      {owner.draw: at}, self.model.dtype, unit="answer"
    )
    self._end(row, "error", lose=True)

  def _end(self, row: ServedRow, why: str, *, lose: bool = False) -> None:
    """Ends a row, and its request if it was the last row.

    `lose`: Whether other rows must not reuse its keys.
    """
    owner: _Owner = row.owner
    handle = owner.handle
    if owner.search is not None:
      for member in row.team:
        self.scheduler.drop(member, lose=lose)
      ended = handle.answers
      owner.search.answer(ended, why)
    else:
      if owner.watch is not None and why != "stop":
        owner.answer.text += owner.watch.flush()
      if self._link is not None and why in ("stop", "length"):
        self._link.ended(row)
      self.scheduler.drop(row, lose=lose)
      owner.answer.finish = why
      ended = [owner.answer]
    if handle.done:
      handle.seconds = self._clock() - handle.arrival
      self.counters.finished += 1
      errors = [a.error for a in handle.answers]
      self.counters.failed += any(error is not None for error in errors)
      self.counters.not_finite += any(
        isinstance(error, NotFiniteLogitsError) for error in errors
      )
      self._handles.pop(handle, None)
    if handle.on_change is not None:
      for answer in ended:
        handle.on_change(answer)
