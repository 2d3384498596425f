"""Prompts of an engine that are read by chosen tiles.

Guarantees: chunks begin at multiples of `piece` tokens of a prompt, those after
a reused prefix, too, so that a row's choice of tiles, and its bits, do not
depend on other rows. A pattern that keeps all tiles is no pattern: prompts have
the bits of dense attention. Answers are computed by dense attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringjax.errors import OptionError
from ringjax.infer.tile_reading import check_layers
from ringjax.models.transformer import Transformer
from ringjax.nn.attention_layers.attention_function import DenseFunction
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.tile_context import CachedTiles
from ringjax.ops.attention.tiles.patterns import pattern_of
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.store import Store

if TYPE_CHECKING:
  from ringjax.serve.engine_config import EngineConfig, EngineSizes

_PREFIX = "sparse:"


def pattern_of_prompts(prefill: str | None) -> TilePattern | None:
  """The pattern of an engine's `prefill`; None: all tiles are read.

  Raises:
    OptionError: If it is another method, or not the text of a pattern.
  """
  if prefill is None:
    return None
  if not isinstance(prefill, str) or not prefill.startswith(_PREFIX):
    raise OptionError(
      "prefill",
      f"{prefill!r} for an engine, which reads prompts in chunks",
      "'sparse:PATTERN', such as 'sparse:xattention,threshold=0.9'",
      "leave prefill out to read all tiles",
    )
  text = prefill.removeprefix(_PREFIX)
  pattern = pattern_of(text, "prefill", _PREFIX)
  return None if pattern.keeps_all else pattern


def check_options(config: EngineConfig) -> None:
  """Refuses options with which a row's tiles would depend on other rows.

  Raises:
    OptionError: If `prefill` is no pattern, has a limit, or is combined with
      an option that cuts prompts otherwise, reads them again by other calls,
      or shares what these have computed.
  """
  pattern = pattern_of_prompts(config.prefill)
  if pattern is None:
    return
  refused = {
    "prompt_tile": (
      bool(config.prompt_tile),
      "whose tiles are smaller than a pattern's blocks of queries",
    ),
    "row_tile": (
      bool(config.row_tile),
      "in which answers and prompts are read alike",
    ),
    "budget": (
      config.budget is not None,
      "which cuts chunks where other rows leave room",
    ),
    "share": (
      config.sharing == "answers",
      "whose keys come from dense attention, those of prompts do not",
    ),
    "layout": (
      config.contiguous,
      "in which preempted rows read their answers again as prompts",
    ),
    "preempt": (
      config.preempt == "recompute",
      "which reads answers again as prompts",
    ),
  }
  for name, (is_set, reason) in refused.items():
    if is_set:
      raise OptionError(
        "prefill",
        f"{config.prefill!r} with {name}={getattr(config, name)!r}, {reason}",
        "prompts that are cut and shared alike whatever other rows do",
        f"leave {name} or prefill out",
      )
  if pattern.max_left_out is not None:
    raise OptionError(
      "prefill",
      f"{config.prefill!r}: an engine does not measure what it leaves out",
      "a pattern without max_left_out",
      "measure it with rj.infer.generate, and leave max_left_out out here",
    )
  if config.piece % pattern.block:
    raise OptionError(
      "piece",
      f"{config.piece} with blocks of {pattern.block} queries",
      "whole blocks of queries in a chunk",
      f"pass piece={-(-config.piece // pattern.block) * pattern.block}, or "
      "block=64 in the pattern",
    )


def prompt_attention(
  model: Transformer,
  config: EngineConfig,
  sizes: EngineSizes,
  attend: CachedAttention,
  attention_fn: DenseFunction | None,
  store: Store | None,
) -> CachedAttention:
  """Attention by which an engine's prompts read their keys.

  Args:
    model: Model of the engine.
    config: Options, see `check_options`.
    sizes: Sizes of the pool.
    attend: Attention of answers.
    attention_fn: Dense attention function of the caller, or None.
    store: Store of prefixes, or None.

  Raises:
    OptionError: If the model's layers choose or weigh keys themselves, or for a
      sharded sequence, a store or an `attention_fn`.
  """
  pattern = pattern_of_prompts(config.prefill)
  if pattern is None:
    return attend
  check_layers(model)
  reasons = {
    f"{sizes.shards} shards of the sequence": sizes.shards > 1,
    "a store, whose prefixes other engines read": store is not None,
    "an attention_fn, which reads all keys": attention_fn is not None,
    f"pages of {sizes.page} tokens, which do not divide piece={config.piece}": (
      config.piece % sizes.page > 0
    ),
  }
  for got, applies in reasons.items():
    if applies:
      raise OptionError(
        "prefill",
        f"{config.prefill!r} with {got}",
        "one shard, prefixes in the engine alone, and chunks of whole pages",
        "leave it or prefill out",
      )
  return CachedTiles(
    mesh=attend.mesh, axis=attend.axis, pattern=pattern, replicated=True
  )
