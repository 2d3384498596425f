"""Options of an engine, and the sizes that follow from them and its model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringjax.checks import float_dtype, integer, one_of
from ringjax.config import Config, Flag, config, option
from ringjax.errors import OptionError
from ringjax.infer.speculate.drafter import Drafter
from ringjax.kv.cache_kind import KINDS, CacheConfig
from ringjax.models.transformer import Transformer
from ringjax.ops.attention.cached.pooled import pool_tile
from ringjax.serve.prefix.important_link import ImportantShare
from ringjax.serve.prefix.page_swap import PREEMPTIONS
from ringjax.serve.sparse_prompts import check_options, pattern_of_prompts
from ringjax.serve.vattention.contiguous_rows import (
  LAYOUTS,
  check_contiguous,
  row_pages,
)

SHARES = ("prompts", "answers", "nothing")
SHARED_READS = ("exact", "always", "never")
PAGES = (16, 32, 64, 128)
# Tokens of a row, and of a pool, where neither an option nor the model says.
_LONGEST, _CAPACITY = 16384, 65536


def _dtype_name(dtype: DTypeLike) -> str:
  return float_dtype("dtype", dtype).name


def _share_text(share: object) -> object:
  """Plain value of `important` if it has no settings besides the share."""
  if isinstance(share, ImportantShare):
    # Arrays of probe heads have no truth value, which == of objects needs.
    plain = ImportantShare(share=share.share)
    alone = all(
      np.array_equal(getattr(share, field.name), getattr(plain, field.name))
      for field in dataclasses.fields(share)
    )
    return share.share if alone else share
  return share


@config
class EngineConfig(Config):
  """Options of an engine that do not depend on its model or machine.

  Raises:
    OptionError: If a value is out of range, or contiguous rows are to share
      prefixes or to be swapped.
  """

  rows: int = option(
    "Number of answers that are computed at the same time; calls always have "
    "that size.",
    least=1,
    default=16,
    aliases=("max_num_seqs", "max_running_requests"),
  )
  capacity: int | None = option(
    "Number of tokens in the pool, those of shared prefixes once; default: "
    "`rows` rows of `longest` tokens, at most 65,536.",
    least=1,
    default=None,
    aliases=("max_total_tokens",),
  )
  longest: int | None = option(
    "Maximum number of tokens of a prompt and its answer together; default: "
    "the model's context, at most 16,384. Rotations that depend on the length "
    "of the context (dynamic, longrope) are those of each row's own prompt, as "
    "in `generate`; prompts that rotate otherwise share no prefixes.",
    least=1,
    default=None,
    aliases=("max_model_len", "context_length"),
  )
  page: int | None = option(
    "Number of tokens of a page, 16, 32, 64 or 128; default: 32, and 128 for "
    "codes on a TPU, whose memory layout pads shorter ones.",
    least=1,
    default=None,
    aliases=("block_size", "page_size"),
  )
  piece: int = option(
    "Number of tokens of a prompt's chunk, in one row of a call.",
    least=1,
    default=64,
  )
  pieces: int = option(
    "Number of chunks, the rows of a call for prompts.",
    least=1,
    default=4,
  )
  prompt_tile: int | None = option(
    "Number of tokens of the smallest tile of prompts: a call for prompts "
    "takes the time of the tiles that it holds, not of those for which it has "
    "room. Late positions are in tiles that are 4 and 16 times as large, and "
    "so on up to `piece`. 0: all tokens of a call pass together; default: 16 "
    "on CPUs where the model and the mesh allow tiles, else 0.",
    least=0,
    default=None,
  )
  row_tile: int | None = option(
    "Number of rows of a tile in which answers and prompts pass the products "
    "of a layer together, so that a step is one program that reads the weights "
    "once. 0: no such tiles; default: 128 on a TPU where the model, the mesh "
    "and the other options allow them, else 0.",
    least=0,
    default=None,
  )
  budget: int | None = option(
    "Maximum number of tokens of a step, of prompts and answers together; "
    "default: all that its calls have room for.",
    least=1,
    default=None,
    aliases=("max_num_batched_tokens",),
  )
  prefill: str | None = option(
    "Part of the attention that prompts compute: "
    '"sparse:xattention,threshold=0.9" reads the tiles that a pattern chooses '
    "among the keys of each 8,192 tokens, see `rj.infer.generate`; chunks have "
    "`piece` tokens, a multiple of the pattern's block. Answers read all keys. "
    "Default: all tiles.",
    default=None,
  )
  cache_kind: CacheConfig | str = option(
    "Storage of keys and values, see `Transformer.init_cache`.",
    default="windowed",
    text=str,
    flag=Flag(
      f"How the KV cache is stored: {', '.join(KINDS)}; with options as "
      "NAME:key=value,key=value.",
      name="cache",
    ),
  )
  dtype: DTypeLike | None = option(
    "Dtype of the cache; default: the model's.",
    default=None,
    text=_dtype_name,
  )
  share: str | None = option(
    'Blocks that later prompts may reuse: those of "prompts", of prompts and '
    '"answers", or "nothing"; default: "prompts" in pages, "nothing" in '
    "contiguous rows, which share no memory.",
    choices=SHARES,
    default=None,
  )
  shared_reads: str = option(
    "Whether answers read pages that rows share once for all of them "
    '(ChunkAttention): "always", "never", or where that is "exact", so that a '
    "row has the same bits alone; it is tried on the device, and a warning is "
    "logged if it has not. Never where a mesh axis shards the rows. See "
    "`reads_apart`, and `counters.keys_read` of `keys_seen`.",
    choices=SHARED_READS,
    default=SHARED_READS[0],
  )
  speculate: Drafter | str | None = option(
    "Drafter of tokens after the last one of a row: from its text "
    '"lookup" or "suffix", by a model "model:model=FOLDER", "early" or '
    '"self:cache_kind=int4", by a block that was made for the model '
    '"longspec:model=FOLDER", by the layer of the model that predicts further '
    'tokens "mtp", or by its head "eagle3" or "dflash", with options as in '
    '"lookup:count=4". An '
    "object is taken, too. Calls for answers then check `count` drafted "
    "tokens of each row, which may have fewer; tokens are the same: with "
    "adapt=False bit for bit, else but where rounding decides. A model "
    "drafts for all rows at once and has a separate cache, a block a window of "
    'it. With widths=, as in "early:widths=(4,4,2),best=6", models and blocks '
    "draft trees. Rows with a mask or of a beam search are not drafted for. "
    "Steps have no drafts where these cost more time than they save, by what "
    "was measured, see `drafting`; with adapt=False all have.",
    default=None,
  )
  preempt: str = option(
    "Treatment of a row that has to make room: it is computed again later "
    '("recompute"), its pages go to the host\'s memory and come back ("swap"), '
    'or whichever costs less by what was measured ("auto").',
    choices=PREEMPTIONS,
    default="auto",
  )
  important: ImportantShare | int | float | None = option(
    "Part of a prefix in the store that is read in place of the whole "
    "(IMPRESS), above 0, at most 1; or an `ImportantShare` with more settings. "
    "Answers that follow it are approximate. The store then has prefixes by "
    "layers and no pages. Default: all, bit for bit.",
    default=None,
    text=_share_text,
    flag=Flag(
      "Part of a prefix in --store that is read in place of the whole, by what "
      "the rest of the prompt looks at (IMPRESS): approximate.",
      kind="number",
    ),
  )
  one_order: bool = option(
    "Whether prompts read their keys in the order in which answers do, tiles "
    "of 128 keys (512 on accelerators), by XLA's loops, and products are made "
    "in tiles of 16 tokens: a token is computed alike in a prompt, in an "
    "answer and in a training step, see `rj.rl`. For one device; prompts take "
    "longer.",
    default=False,
  )
  layout: str = option(
    '"pages"; or "contiguous", rows whose memory grows on demand (vAttention): '
    'on CPUs reserved address space, elsewhere, or with "doubling", extents of '
    "a pool of fixed size that double, its capacity rounded down to a power of "
    "two of pages on each shard. All layers then keep whole rows, also those "
    "that look back a window, and preempted rows are computed again.",
    choices=LAYOUTS,
    default=LAYOUTS[0],
  )
  layer_parts: int = option(
    "Number of parts into which the layers are cut for prompts, each a "
    "separate program, so that pages of layers that are done can leave while "
    "others compute, see `ClusterWorker`. Keys are those of one program up to "
    "rounding.",
    least=1,
    default=1,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.page is not None:
      one_of("page", self.page, PAGES)
    if self.dtype is not None:
      float_dtype("dtype", self.dtype)
    if self.contiguous:
      check_contiguous(self.sharing, self.preempt)
    check_options(self)

  @property
  def contiguous(self) -> bool:
    """Whether each row has separate contiguous memory."""
    return self.layout != "pages"

  @property
  def sharing(self) -> str:
    """Blocks that later prompts may reuse, one of `SHARES`."""
    if self.share is None:
      return "nothing" if self.contiguous else "prompts"
    return self.share

  @property
  def preemption(self) -> str:
    """Treatment of a row that has to make room, one of `PREEMPTIONS`."""
    if pattern_of_prompts(self.prefill) is not None:
      # Answers that were read again as prompts would leave tiles out.
      return "swap"
    return "recompute" if self.contiguous else self.preempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
  """Sizes of an engine's pool and rows.

  Attributes:
    platform: Platform of the devices, such as "tpu".
    shards: Number of shards of the pages.
    kind: Storage of keys and values.
    page: Number of tokens of a page.
    longest: Maximum number of tokens of a row.
    capacity: Number of tokens in the pool, as requested.
    blocks: Maximum number of pages of a row, a multiple of the shards.
    tile: Number of tokens that a kernel reads at once.
    pages_at_once: Number of pages that the capacity stands for.
    pages: Number of pages in the pool, of all shards together.
    reserves: Whether the pool is reserved address space.
  """

  platform: str
  shards: int
  kind: CacheConfig
  page: int
  longest: int
  capacity: int
  blocks: int
  tile: int
  pages_at_once: int
  pages: int
  reserves: bool

  @classmethod
  def of(
    cls,
    model: Transformer,
    config: EngineConfig,
    mesh: Mesh | None,
    shards: int,
  ) -> EngineSizes:
    """Sizes of an engine for a model on a mesh.

    Raises:
      OptionError: If the capacity is below a page, or rows are longer than the
        model's context.
    """
    platform = _platform(mesh)
    kind = model.cache_kind(config.cache_kind)
    page = config.page
    if page is None:
      page = 128 if platform == "tpu" and kind.codec is not None else 32
    longest, capacity = _longest(model, config.longest), config.capacity
    if capacity is None:
      capacity = min(_CAPACITY, config.rows * longest)
    capacity = integer("capacity", capacity, least=page)
    pages = pages_at_once = _round_up(-(-capacity // page), shards)
    tile = pool_tile(page, platform)
    blocks = _round_up(-(-longest // page), shards * (tile // page))
    reserves = config.layout == "contiguous" and platform == "cpu"
    if config.contiguous:
      pages = row_pages(pages_at_once, config.rows, blocks, shards, reserves)
      kind = kind.replace(windowed=False)
    return cls(
      platform=platform,
      shards=shards,
      kind=kind,
      page=page,
      longest=longest,
      capacity=capacity,
      blocks=blocks,
      tile=tile,
      pages_at_once=pages_at_once,
      pages=pages,
      reserves=reserves,
    )

  def group_pages(self, config: EngineConfig, reach: int | None) -> int:
    """Number of pages of layers that look back `reach` tokens, or all."""
    if reach is None:
      return self.pages
    # Twice the pages that a row sees: as many again for prefixes that are
    # reused.
    tokens_per_row = reach + config.piece * config.pieces
    pages_per_row = -(-tokens_per_row // self.page) + 2
    return min(
      self.pages, _round_up(2 * config.rows * pages_per_row, self.shards)
    )


def _longest(model: Transformer, longest: int | None) -> int:
  """Maximum number of tokens of a row.

  Raises:
    OptionError: If it exceeds the model's context.
  """
  context = model.config.longest
  if longest is None:
    return min(context or _LONGEST, _LONGEST)
  if context is not None and longest > context:
    raise OptionError(
      "longest",
      longest,
      f"at most the model's context, {context:,}",
      " or pass ".join(
        filter(
          None, ("leave it out", model.config.longer_context_remedy(longest))
        )
      ),
    )
  return longest


def _platform(mesh: Mesh | None) -> str:
  if mesh is None:
    return jax.default_backend()
  device = mesh.devices.flat[0]
  return device.platform


def _round_up(count: int, multiple: int) -> int:
  return -(-count // multiple) * multiple
