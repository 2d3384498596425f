"""ringjax: language models whose context does not fit one device.

Importing it computes nothing and starts no backend. The parts that need more
than JAX (`rj.data`, `rj.infer`, `rj.models`, `rj.serve`, `rj.train`), and
`rj.plan`, `rj.kv`, `rj.store` and `rj.transfer`, which need less, are imported
when they are first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ringjax.errors import (
  CheckpointCorruptError,
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  ConfigError,
  DataError,
  Declined,
  DtypeError,
  InputTypeError,
  MemoryEstimateError,
  MeshError,
  NotFiniteError,
  NotFiniteLogitsError,
  OptionError,
  PeerError,
  PromptError,
  ReplayError,
  RewardError,
  RingjaxError,
  SamplingError,
  ShapeError,
  TemplateError,
  TokenizerError,
  UnsafeFormatError,
)
from ringjax.ops.attention.api import (
  attention,
  attention_statistics,
  blockwise_attention,
  dot_product_attention,
  latent_attention,
  ring_attention,
  striped_attention,
)
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cost.schedule import tile_counts, tile_schedule
from ringjax.ops.attention.cost.select import Auto, explain
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.flax_attention import flax_attention
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.kernels.cudnn import CuDNN
from ringjax.ops.attention.kernels.decode_gpu import DecodeGPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.index_learning.index_loss import index_loss
from ringjax.ops.attention.sparse.native_sparse import (
  NativeSparse,
  native_sparse_attention,
)
from ringjax.ops.attention.sparse.sparse_api import (
  sparse_attention,
  sparse_latent_attention,
)
from ringjax.ops.attention.sparse.strided_blocks import strided_blocks
from ringjax.ops.attention.sparse.top_blocks import TopBlocks
from ringjax.ops.attention.sparse.top_index_blocks import TopIndexBlocks
from ringjax.ops.attention.sparse.top_pooled_blocks import TopPooledBlocks
from ringjax.ops.attention.sparse.top_tokens import TopTokens
from ringjax.ops.attention.sparse.top_tokens_of_blocks import TopTokensOfBlocks
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.attention.strategies.chain import Chain
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.halo import Halo
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.attention.strategies.ring_q import RingQ
from ringjax.ops.attention.strategies.ulysses import Ulysses
from ringjax.ops.attention.strategies.wire_format import WireFormat
from ringjax.ops.attention.tiles.flexprefill import FlexPrefill
from ringjax.ops.attention.tiles.minference import MInference
from ringjax.ops.attention.tiles.tiles_api import tile_attention
from ringjax.ops.attention.tiles.xattention import XAttention
from ringjax.ops.feedforward import blockwise_feedforward
from ringjax.ops.loss import blockwise_cross_entropy
from ringjax.ops.mask import (
  BlockCausal,
  Causal,
  Chunked,
  Coords,
  Everything,
  Mask,
  Prefix,
  SameSegment,
  SeparateDocuments,
  Window,
)
from ringjax.ops.recurrent.mixers import causal_conv, gated_delta_rule
from ringjax.ops.recurrent.scan import associative_scan, linear_recurrence
from ringjax.ops.recurrent.shift import token_shift
from ringjax.ops.softmax import Partial, finalize, merge
from ringjax.parallel.layout import (
  Contiguous,
  Layout,
  Striped,
  Uneven,
  Zigzag,
)
from ringjax.parallel.mesh import make_mesh

__all__ = [
  "AttentionStatistics",
  "Auto",
  "AutoKernel",
  "BlockCausal",
  "Blockwise",
  "Causal",
  "Chain",
  "CheckpointCorruptError",
  "CheckpointFormatError",
  "CheckpointMismatchError",
  "CheckpointWriteError",
  "Chunked",
  "ConfigError",
  "Contiguous",
  "Coords",
  "CuDNN",
  "DataError",
  "Declined",
  "DecodeGPU",
  "DecodeTPU",
  "Dense",
  "DtypeError",
  "Everything",
  "FlashTPU",
  "FlexPrefill",
  "Gather",
  "GivenBlocks",
  "Halo",
  "InputTypeError",
  "Layout",
  "MInference",
  "Mask",
  "MemoryEstimateError",
  "MeshError",
  "NativeSparse",
  "NotFiniteError",
  "NotFiniteLogitsError",
  "OptionError",
  "Partial",
  "PeerError",
  "Prefix",
  "PromptError",
  "ReplayError",
  "RewardError",
  "Ring",
  "RingQ",
  "RingjaxError",
  "SameSegment",
  "SamplingError",
  "SeparateDocuments",
  "ShapeError",
  "Striped",
  "TemplateError",
  "TokenizerError",
  "TopBlocks",
  "TopIndexBlocks",
  "TopPooledBlocks",
  "TopTokens",
  "TopTokensOfBlocks",
  "Ulysses",
  "Uneven",
  "UnsafeFormatError",
  "Window",
  "WireFormat",
  "XAttention",
  "Zigzag",
  "associative_scan",
  "attention",
  "attention_statistics",
  "blockwise_attention",
  "blockwise_cross_entropy",
  "blockwise_feedforward",
  "causal_conv",
  "dot_product_attention",
  "explain",
  "finalize",
  "flax_attention",
  "gated_delta_rule",
  "index_loss",
  "latent_attention",
  "linear_recurrence",
  "make_mesh",
  "merge",
  "native_sparse_attention",
  "ring_attention",
  "sparse_attention",
  "sparse_latent_attention",
  "strided_blocks",
  "striped_attention",
  "tile_attention",
  "tile_counts",
  "tile_schedule",
  "token_shift",
]

_PARTS = (
  "data",
  "infer",
  "kv",
  "models",
  "plan",
  "rl",
  "serve",
  "store",
  "train",
  "transfer",
)

if _TYPE_CHECKING:
  from ringjax import (
    data,
    infer,
    kv,
    models,
    plan,
    rl,
    serve,
    store,
    train,
    transfer,
  )


def __getattr__(name: str) -> _Any:
  if name in _PARTS:
    return _importlib.import_module(f"ringjax.{name}")
  if name == "__version__":
    return _importlib.import_module("importlib.metadata").version("ringjax")
  raise AttributeError(f"module 'ringjax' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted([*__all__, *_PARTS, "__version__"])
