"""Pages of an engine, made of keys and values that a pipeline has computed.

Guarantees: layout, labels and digest are those that an engine with the whole
model would send (`prefix_transfer`), though no process has all weights: each
process sums its own layers, and the sums are those of the whole arrays. So an
engine takes the pages only if its weights are the same, bit for bit, in each
layer.
Cost: one pass over the weights, once; a copy of a prompt's keys and values into
pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from ringjax.checks import positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.infer.layerwise import check_layers
from ringjax.kv.cache_kind import CacheConfig, LayoutConfig
from ringjax.kv.storage.page_pool import PagePool
from ringjax.models.fingerprint import EDGE, corner
from ringjax.models.hf.tensors import parameters
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.serve.prefix.prefix_transfer import (
  PrefixHashes,
  label_of,
  label_start,
  page_layout,
)
from ringjax.serve.prefix.store_link import checksums, digest_of_sums

_BLOCKS = "stack.blocks."


def weight_sums(weights: Mapping[str, Shaped[Array, " ..."]]) -> dict[str, Any]:
  """Checksum and corner of each weight of some layers, as JSON values.

  Args:
    weights: Weights by their paths in the whole model (`LayerRange.weights`).
  """
  sums = jax.device_get(checksums(dict(weights)))
  return {
    path: [int(sums[path]), corner(x).tobytes().hex()]
    for path, x in weights.items()
  }


def whole_digest(whole: Transformer, parts: Sequence[Mapping[str, Any]]) -> str:
  """The `weights_digest` of a model whose layers are in several processes.

  Args:
    whole: Shapes of the whole model.
    parts: `weight_sums` of each process.

  Raises:
    OptionError: If a weight is in none of them, or differs between two.
  """
  by_path: dict[str, Any] = {}
  for part in parts:
    for path, value in part.items():
      if by_path.setdefault(path, value) != value:
        raise OptionError(
          "model",
          f"two different {path}",
          "one model in all processes",
          "start them with the same --model and --dtype",
        )
  corners = hashlib.sha256()
  totals: list[int | list[int]] = []
  for path in parameters(whole):
    if not path.startswith(_BLOCKS):
      own_paths = [path]
    else:
      run_index, position, name = path.removeprefix(_BLOCKS).split(".", 2)
      run = whole.stack.runs[int(run_index)]
      own_paths = [
        f"{run.number(int(position), repeat)}.{name}"
        for repeat in range(run.repeats)
      ]
    missing = [x for x in own_paths if x not in by_path]
    if missing:
      raise OptionError(
        "model",
        f"no process with {missing[0]}",
        "all layers in some process",
        "start a process for each stage",
      )
    values = [by_path[x] for x in own_paths]
    sums = [total for total, _ in values]
    totals.append(sums if path.startswith(_BLOCKS) else sums[0])
    for _, data in values[:EDGE]:
      corners.update(bytes.fromhex(data))
  return digest_of_sums(corners.hexdigest()[:16], totals, whole.config.ropes)


def check_pages(config: TransformerConfig, kind: CacheConfig) -> None:
  """Refuses models and caches whose pages stages can't make.

  Raises:
    ConfigError: If layers keep more than keys and values of one width.
    OptionError: If the cache stores keys in another form than they are
      computed in, or lets go what a window passes.
  """
  check_layers(config)
  if config.inputs is not None or config.streams is not None:
    raise ConfigError(
      "model",
      f"{config.family}, whose layers share further weights or streams",
      "layers that need the output of the layer before alone",
      "start one process, without stages",
    )
  plain = CacheConfig(
    layout=LayoutConfig(
      windowed=kind.layout.windowed,
      slack=kind.layout.slack,
      page=kind.layout.page,
    )
  )
  fault = ""
  if kind != plain:
    fault = f"{kind}, for stages, whose keys are numbers as they are computed"
  elif kind.layout.windowed and any(
    layer.attention.reach is not None for layer in config.layers
  ):
    fault = f"{kind}, for layers that look back a window and let pages go"
  if fault:
    raise OptionError(
      "cache",
      fault,
      "a cache that keeps all keys and values as numbers",
      "pass --cache=dense, to decode instances too",
    )


class StagePages:
  """Cuts the keys and values of prompts into pages with labels.

  Attributes:
    layout: Layout of each page.
    page: Number of tokens in a page.
    whole: Shapes of the whole model.
  """

  def __init__(
    self,
    whole: Transformer,
    *,
    weights: str,
    longest: int,
    page: int,
    dtype: DTypeLike,
    kind: CacheConfig,
  ):
    """Prepares the layout.

    Args:
      whole: Shapes of the whole model.
      weights: Digest of the weights (`whole_digest`).
      longest: Maximum number of tokens of a prompt and its answer, as of the
        engines that take the pages.
      page: Number of tokens in a page.
      dtype: Dtype of keys and values.
      kind: Kind of cache of these engines.

    Raises:
      ConfigError, OptionError: See `check_pages`.
    """
    check_pages(whole.config, kind)
    self.whole, self.page = whole, positive_int("page", page)
    pool = PagePool.spec(
      whole.kinds,
      rows=1,
      pages=lambda reach: 1,
      page=page,
      dtype=dtype,
      kind=kind,
    )
    self.layout = page_layout(pool, weights, longest)
    # Side (0: keys) and layers of each leaf.
    self._leaves = [
      leaf
      for group in range(len(pool.groups))
      for leaf in pool.page_layers(group)
    ]
    self._scaled = {
      rope.scaling for rope in whole.config.ropes if rope.scaling.by_length
    }

  def labels(self, tokens: Int[np.ndarray, " n"], count: int) -> list[str]:
    """Labels of the first `count` pages of a prompt."""
    rotations = tuple(sorted(str(x.alike(len(tokens))) for x in self._scaled))
    start = label_start("", rotations)
    digests = PrefixHashes().of(tokens, self.page, start, count)
    return [label_of(x) for x in digests]

  def cut(
    self,
    blocks: Sequence[
      tuple[Shaped[np.ndarray, "K n H"], Shaped[np.ndarray, "K n H"]]
    ],
  ) -> list[tuple[Shaped[np.ndarray, " ..."], ...]]:
    """Cuts keys and values of each layer into whole pages.

    Returns:
      Leaves of each page, as `Publisher.publish` takes them.
    """
    count = blocks[0][0].shape[1] // self.page
    leaves: list[np.ndarray] = []
    for side, numbers in self._leaves:
      rows = np.stack(
        [blocks[number][side][:, : count * self.page] for number in numbers]
      )
      layers, heads, _, dim = rows.shape
      rows = rows.reshape(layers, heads, count, self.page, dim)
      leaves.append(np.ascontiguousarray(np.moveaxis(rows, 2, 0)))
    return [tuple(x[n] for x in leaves) for n in range(count)]
