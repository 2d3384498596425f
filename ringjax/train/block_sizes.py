"""Blocks of tokens of the feedforward and the loss, by a device's memory.

Guarantees: "auto" depends on the model, the rows, the mesh and the whole memory
of a device alone, the smallest of all processes, so that each run on such
devices has the same blocks, and each process the same program. A number of
tokens is taken as it is.
Memory, an estimate: a step of the feedforward takes 4 W + 4 D numbers of the
computation for each token, W being the numbers that a layer computes from a
token's D: those numbers and the product, and gradients of both. A step of the
loss takes 3 V + D numbers of float32: logits, probabilities and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ringjax.checks import positive_int
from ringjax.errors import OptionError
from ringjax.models.transformer import TransformerConfig
from ringjax.parallel.call_sharding import STAGE
from ringjax.parallel.memory import device_memory

AUTO = "auto"
# Tokens with which products reach their peak on all chips; and the fewest.
_MOST, _FEWEST = 8192, 128
# Blocks where a platform does not report its memory.
_DEFAULTS = (2048, 1024)
# Part of a device's memory that a block may take.
_SHARE = 16


class BlockSizes(NamedTuple):
  """Tokens of a step, on each shard; or bytes of a device for each token.

  Fields:
    feedforward: Tokens, or bytes for each, of the feedforward.
    loss: Tokens, or bytes for each, of the loss.
  """

  feedforward: int
  loss: int


def check_block(name: str, block: object) -> None:
  """Checks that a block is a number of tokens or "auto".

  Raises:
    OptionError: If it is something else.
  """
  if block != AUTO:
    if isinstance(block, str):
      raise OptionError(
        name, repr(block), f"a number of tokens, or {AUTO!r}", f"pass {AUTO!r}"
      )
    positive_int(name, block)


def number_of_tokens(name: str, block: int | str) -> int:
  """The tokens of a block, which a model's call needs.

  Raises:
    OptionError: If it is "auto".
  """
  if isinstance(block, str):
    raise OptionError(
      name,
      f"{block!r} where a model is called, which does not know the devices",
      "a number of tokens",
      "pass a number, or recipe.with_block_sizes(model, mesh, axis)",
    )
  return block


def token_bytes(
  config: TransformerConfig, itemsize: int, *, mesh: Mesh | None = None
) -> BlockSizes:
  """Bytes that each token of a block takes on a device.

  Args:
    config: Sizes of the model.
    itemsize: Bytes of a number of the computation.
    mesh: Devices, whose axis "model" shards the widths that it divides.
  """
  model_shards = 1 if mesh is None else dict(mesh.shape).get("model", 1)

  def part(width: int) -> int:
    return width // model_shards if width % model_shards == 0 else width

  width = max(getattr(layer.feedforward, "width", 0) for layer in config.layers)
  return BlockSizes(
    (4 * part(width) + 4 * config.embed) * itemsize,
    (3 * part(config.vocab) + config.embed) * 4,
  )


def chosen_blocks(
  per_token: BlockSizes, memory: int | None, tokens: int
) -> BlockSizes:
  """The largest blocks that take a sixteenth of a device's memory each.

  They are powers of two from 128 to 8,192, of which the larger ones have no use
  for fewer tokens.

  Args:
    per_token: Bytes of a token of a block.
    memory: Bytes of a device; None if they are unknown.
    tokens: Tokens of a row on a shard.
  """
  blocks = []
  for nbytes, default in zip(per_token, _DEFAULTS, strict=True):
    block = default
    if memory is not None:
      block = _MOST
      while block > _FEWEST and (
        block // 2 >= tokens or block * nbytes * _SHARE > memory
      ):
        block //= 2
    blocks.append(block)
  return BlockSizes(*blocks)


def resolved_blocks(
  blocks: tuple[int | str, int | str],
  config: TransformerConfig,
  rows: Sequence[tuple[int, int]],
  *,
  mesh: Mesh | None,
  axis: str | None,
  itemsize: int,
) -> BlockSizes:
  """Blocks with numbers in place of "auto".

  Args:
    blocks: Tokens of a step of the feedforward and of the loss, or "auto".
    config: Sizes of the model.
    rows: Rows and tokens of a row of a micro-batch, for each stage.
    mesh: Devices; None is one.
    axis: Mesh axis that shards the sequence, or None.
    itemsize: Bytes of a number of the computation.
  """
  feedforward, loss = blocks
  if not isinstance(feedforward, str) and not isinstance(loss, str):
    return BlockSizes(feedforward, loss)
  shape = {} if mesh is None else dict(mesh.shape)
  shards = 1 if axis is None else shape.get(axis, 1)
  # A block has tokens of each row of a device.
  batch_shards = math.prod(shape.get(x, 1) for x in ("replica", "data", STAGE))
  rows_each = max(-(-count // min(count, batch_shards)) for count, _ in rows)
  tokens = max(-(-length // shards) for _, length in rows)
  per_token = BlockSizes(
    *(n * rows_each for n in token_bytes(config, itemsize, mesh=mesh))
  )
  chosen = chosen_blocks(per_token, _least_memory(mesh), tokens)
  return BlockSizes(
    chosen.feedforward if isinstance(feedforward, str) else feedforward,
    chosen.loss if isinstance(loss, str) else loss,
  )


def _least_memory(mesh: Mesh | None) -> int | None:
  """Bytes of the smallest device of all processes; None if one is unknown.

  Devices of one kind report different totals where processes share a machine,
  and processes with other blocks would run other programs.
  """
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  memory = device_memory(devices[0], len(devices)).total
  if mesh is None or jax.process_count() == 1:
    return memory
  # JAX has no integers of 64 bits by default.
  sizes = multihost_utils.process_allgather(np.float32(memory or 0))
  return int(np.min(sizes)) or None
