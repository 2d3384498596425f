"""ringjax: exact attention over sequences that do not fit one device.

Importing it computes nothing and starts no backend.
"""

from ringjax.errors import (
  Declined,
  DtypeError,
  InputTypeError,
  MeshError,
  OptionError,
  RingjaxError,
  ShapeError,
)
from ringjax.ops.attention.api import (
  attention,
  blockwise_attention,
  dot_product_attention,
  ring_attention,
  striped_attention,
)
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.dense import Dense
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.ring import Ring
from ringjax.ops.attention.schedule import tile_counts, tile_schedule
from ringjax.ops.attention.ulysses import Ulysses
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
  Window,
)
from ringjax.ops.softmax import Partial, finalize, merge
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.parallel.mesh import make_mesh

__all__ = [
  "BlockCausal",
  "Blockwise",
  "Causal",
  "Chunked",
  "Contiguous",
  "Coords",
  "Declined",
  "Dense",
  "DtypeError",
  "Everything",
  "Gather",
  "InputTypeError",
  "Layout",
  "Mask",
  "MeshError",
  "OptionError",
  "Partial",
  "Prefix",
  "Ring",
  "RingjaxError",
  "SameSegment",
  "ShapeError",
  "Striped",
  "Ulysses",
  "Window",
  "Zigzag",
  "attention",
  "blockwise_attention",
  "blockwise_cross_entropy",
  "blockwise_feedforward",
  "dot_product_attention",
  "finalize",
  "make_mesh",
  "merge",
  "ring_attention",
  "striped_attention",
  "tile_counts",
  "tile_schedule",
]
