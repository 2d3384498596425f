"""Blocks of tokens of the feedforward and the loss, by a device's memory.

Guarantees: "auto" depends on the model, the rows, the mesh and the whole memory
of a device alone, so that each run on such devices has the same blocks; a
block that would fill a device is refused before the first step.
Memory, an estimate: a step of the feedforward takes 4 W + 4 D numbers of the
computation for each token, W being the numbers that a layer computes from a
token's D: those numbers and the product, and gradients of both. A step of the
loss takes 3 V + D numbers of float32: logits, probabilities and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from ringjax.checks import positive_int
from ringjax.errors import MemoryEstimateError, OptionError
from ringjax.models.transformer import TransformerConfig
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

  Raises:
    MemoryEstimateError: If a block that is given is larger than a device.
  """
  devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
  memory = device_memory(devices[0], len(devices)).total
  shards = 1 if mesh is None or axis is None else mesh.shape[axis]
  # A block has tokens of each row of a device.
  batch_shards = 1
  if mesh is not None:
    shape = dict(mesh.shape)
    batch_shards = mesh.size // shards // shape.get("model", 1)
  rows_each = max(-(-count // min(count, batch_shards)) for count, _ in rows)
  tokens = max(-(-length // shards) for _, length in rows)
  per_token = BlockSizes(
    *(n * rows_each for n in token_bytes(config, itemsize, mesh=mesh))
  )
  chosen = chosen_blocks(per_token, memory, tokens)
  names = ("feedforward_block", "block")
  sizes = []
  for name, block, auto, nbytes in zip(
    names, blocks, chosen, per_token, strict=True
  ):
    size = auto if isinstance(block, str) else block
    needed = min(size, tokens) * nbytes
    if not isinstance(block, str) and memory is not None and needed > memory:
      raise MemoryEstimateError(
        name,
        f"{size} tokens of {rows_each} row(s) at once, which take "
        f"{needed / 1e9:.1f} GB of a device",
        f"at most the {memory / 1e9:.1f} GB that it has",
        f"pass {name}={auto}, or 'auto'",
      )
    sizes.append(size)
  return BlockSizes(*sizes)
