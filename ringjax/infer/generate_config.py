"""Options of `generate`, and which of them can't be combined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from ringjax.checks import float_dtype, positive_int
from ringjax.config import Config, config, option, part
from ringjax.errors import OptionError
from ringjax.infer.contexts.combine import Combine
from ringjax.infer.contexts.context_library import ContextLibrary
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.sampling import PARAMETERS, REMEDIES, from_names
from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.stopping import Stop, StopLike
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.weight_placement import WeightPlacement
from ringjax.plan.choice import KEEPS


def _dtype_name(dtype: DTypeLike) -> str:
  return float_dtype("cache_dtype", dtype).name


@config
class DecodeConfig(Config):
  """Storage of keys and values in a new cache, which decoding reads."""

  cache_kind: CacheKind | str | None = option(
    "Storage format of keys and values, an `rj.kv.CacheKind` or its name, one "
    'of `rj.kv.KINDS`; default "windowed", which keeps no more than later '
    "tokens see.",
    default=None,
    text=str,
  )
  cache_dtype: DTypeLike | None = option(
    "Dtype of the cache: bfloat16, float16, float32 or float64; default: the "
    "model's.",
    default=None,
    text=_dtype_name,
  )
  grow: int | None = option(
    "Number of tokens by which the cache's memory grows, see `Session`.",
    default=None,
  )

  def __post_init__(self) -> None:
    if self.cache_dtype is not None:
      float_dtype("cache_dtype", self.cache_dtype)
    if self.grow is not None:
      positive_int("grow", self.grow)

  @property
  def kind(self) -> CacheKind | None:
    """Storage format of keys and values; None: the default."""
    if self.cache_kind is None:
      return None
    return kinds.cache_kind(self.cache_kind)


@config
class PlacementConfig(Config):
  """Memories that hold what does not run: keys and hidden states."""

  cache: WeightPlacement | str | None = option(
    "Placement of the keys of layers that are not running, in host memory or "
    "on disk, see `Session`; it changes no token.",
    default=None,
    override="cache_placement",
    text=str,
  )
  hidden: WeightPlacement | str | None = option(
    "Placement of the hidden states of groups that are not running, with "
    "rows_at_once.",
    default=None,
    override="hidden_placement",
    text=str,
  )
  rows_at_once: int | None = option(
    "Number of rows that a layer computes at a time, group by group: "
    "activations of a large batch then need the memory of this many rows, and "
    "each layer's weights are still fetched once a call. Default: all rows.",
    default=None,
  )
  disk: str | os.PathLike[str] | None = option(
    "Folder for the part of the cache that is on disk.",
    default=None,
    text=os.fspath,
  )


@config
class SamplingConfig(Config):
  """Choice of a token from logits, by a sampler or by transformers' names.

  One of temperature, top_k, top_p and min_p samples, unless do_sample=False;
  do_sample=True alone keeps all tokens, without a default top_k. Without any
  option the most probable token is taken.
  """

  sampler: Callable[..., Any] | None = option(
    "Sampler, in place of all other options; default `Greedy()`.",
    default=None,
  )
  temperature: int | float | None = option(
    PARAMETERS["temperature"].meaning,
    default=None,
  )
  top_k: int | None = option(
    PARAMETERS["top_k"].meaning,
    default=None,
  )
  top_p: int | float | None = option(
    PARAMETERS["top_p"].meaning,
    default=None,
  )
  min_p: int | float | None = option(
    PARAMETERS["min_p"].meaning,
    default=None,
  )
  repetition_penalty: int | float | None = option(
    PARAMETERS["repetition_penalty"].meaning,
    default=None,
  )
  do_sample: bool | None = option(
    "Whether tokens are drawn; default: if an option above filters them.",
    default=None,
  )
  seed: int | None = option(
    PARAMETERS["seed"].meaning,
    default=None,
  )

  @property
  def names(self) -> dict[str, Any]:
    """Values of transformers' names."""
    return {name: getattr(self, name) for name in (*PARAMETERS, "do_sample")}


def _stop_text(stop: object) -> object:
  if isinstance(stop, Iterable) and not isinstance(stop, str | Stop):
    return list(stop)
  return stop


@config
class StoppingConfig(Config):
  """Ends of rows."""

  stop: Stop | str | int | Iterable[int | str] | None = option(
    "Token ids or texts after which a row ends, or both; or a `Stop`.",
    default=None,
    text=_stop_text,
  )
  eos_token_id: StopLike = option(
    "The same, by transformers' name.",
    default=None,
    text=_stop_text,
  )
  pad_id: int = option(
    "Id that pads rows that stopped early.",
    default=0,
  )


@config
class SpeculationConfig(Config):
  """Drafts of tokens, of which one call of the model checks several."""

  drafter: Drafter | str | None = option(
    "Drafter: a name of `rj.infer.speculate.DRAFTERS` with options, as "
    '"lookup:count=8", or a `Drafter`. It changes no token, and with '
    'verify="rejection" no probability, but where rounding decides: bits of '
    "logits differ with the number of tokens in a call, and beside a coded "
    "cache such bits may change a code.",
    default=None,
    override="speculate",
  )


@config
class CombineConfig(Config):
  """Use of documents that are encoded separately."""

  strategy: Combine | str | None = option(
    'Strategy that combines contexts: "full", "parallel" (the default), "ape", '
    '"select", "recompute", "kvlink", "cepe", with options as in '
    '"ape:temperature=0.8", or an object of `rj.infer.contexts`.',
    default=None,
    override="combine",
  )
  library: ContextLibrary | None = option(
    "A `ContextLibrary` that encodes and keeps contexts; default: a new one "
    "for this call.",
    default=None,
  )


@config
class GenerateConfig(Config):
  """Options of `generate`, as parts.

  An option of a part is set by its name: `GenerateConfig(max_new_tokens=64)
  .replace(chunk=512, temperature=0.7, prefill="chunked")`.

  Raises:
    OptionError: If a value is out of range, or options contradict each other.
  """

  max_new_tokens: int | None = option(
    "Maximum number of tokens to add to each row; needed.",
    default=None,
  )
  axis: str | None = option(
    'Mesh axis that shards the sequence; default "seq" if there is one.',
    default=None,
  )
  prefill: PrefillConfig = part(
    "How prompts are read.",
    default_factory=PrefillConfig,
    main="prefill",
  )
  decode: DecodeConfig = part(
    "How keys and values are stored.",
    default_factory=DecodeConfig,
  )
  placement: PlacementConfig = part(
    "Where keys and hidden states are between their uses.",
    default_factory=PlacementConfig,
  )
  sampling: SamplingConfig = part(
    "How a token is chosen.",
    default_factory=SamplingConfig,
    main="sampler",
  )
  stopping: StoppingConfig = part(
    "When a row ends.",
    default_factory=StoppingConfig,
    main="stop",
  )
  speculation: SpeculationConfig = part(
    "How tokens are drafted.",
    default_factory=SpeculationConfig,
    main="speculate",
  )
  combine: CombineConfig = part(
    "How contexts are combined.",
    default_factory=CombineConfig,
    main="combine",
  )

  def __post_init__(self) -> None:
    if self.max_new_tokens is not None:
      positive_int("max_new_tokens", self.max_new_tokens)

  @property
  def sampler_and_stop(self) -> tuple[Any, Any]:
    """Sampler and stop that the options stand for.

    Raises:
      OptionError: If two options mean the same.
      SamplingError: If a number is out of its range.
    """
    names = self.sampling.names
    names["eos_token_id"] = self.stopping.eos_token_id
    return from_names(self.sampling.sampler, self.stopping.stop, names)

  @classmethod
  def _unknown(
    cls, name: str, value: object, paths: Mapping[str, Any]
  ) -> OptionError:
    if name in REMEDIES:
      return OptionError(
        name, repr(value), "an argument of generate", REMEDIES[name]
      )
    return super()._unknown(name, value, paths)


# ---------------------------------------------------------------------------
# Options that can't be combined
# ---------------------------------------------------------------------------


class Pair(NamedTuple):
  """Two options of a call that can't be combined.

  Fields:
    option: Name of the option that is refused.
    other: Name of the option that excludes it.
    reason: Reason, for people.
    remedy: What to do instead.
  """

  option: str
  other: str
  reason: str
  remedy: str = "leave one of them out"


_APART = (
  "leave it out, or pass combine='full'; several questions to the same "
  "contexts: rj.infer.context_session"
)
# A session has the options with which it was made. "contexts" are those that
# are encoded separately, all but combine="full".
PAIRS = (
  Pair("contexts", "rows_at_once", "contexts are one cache of all rows"),
  Pair("speculate", "rows_at_once", "drafts are checked for all rows at once"),
  Pair("keep", "rows_at_once", "groups of rows are not gathered"),
  Pair(
    "cache_kind",
    "rows_at_once",
    "a kind that repeats its context reads all rows at once",
  ),
  Pair(
    "contexts", "cache_placement", "contexts are read from the devices' memory"
  ),
  Pair(
    "speculate", "cache_placement", "drafts are checked in caches on devices"
  ),
  Pair("keep", "cache_placement", "keys in host memory are not gathered"),
  Pair("cache", "contexts", "a session has contexts or a conversation", _APART),
  Pair("keep", "contexts", "contexts stay sharded", _APART),
  Pair("wire", "contexts", "contexts are read without sends", _APART),
  Pair(
    "contexts", "attention_fn", "a dense function knows no separate contexts"
  ),
  Pair("speculate", "attention_fn", "a dense function checks no drafts"),
  Pair("contexts", "grow", "memory of contexts does not grow"),
)


def check_pairs(present: Mapping[str, bool]) -> None:
  """Refuses options that can't be combined.

  Args:
    present: Whether each option has a value other than its default, by name;
      names that are left out do not.

  Raises:
    OptionError: If both options of a pair are present.
  """
  for pair in PAIRS:
    if present.get(pair.option) and present.get(pair.other):
      raise OptionError(
        pair.option,
        f"a value beside {pair.other}",
        f"{pair.option}, or {pair.other}: {pair.reason}",
        pair.remedy,
      )


def present_options(
  values: GenerateConfig, **others: object
) -> dict[str, bool]:
  """Find out which options of `PAIRS` a call has.

  Args:
    values: Config of the call.
    **others: Other arguments of the call: cache, contexts, attention_fn.
  """
  kind, session = values.decode.kind, others.get("cache")
  made_with: Any = getattr(session, "cache", None)
  return {
    "cache": session is not None,
    "contexts": others.get("contexts") is not None,
    "attention_fn": others.get("attention_fn") is not None
    or getattr(session, "attention_fn", None) is not None,
    "speculate": values.speculation.drafter is not None,
    "keep": values.prefill.keep != KEEPS[0],
    "wire": values.prefill.wire is not None,
    "cache_kind": kind is not None and kind.repeats,
    "rows_at_once": values.placement.rows_at_once is not None
    or bool(getattr(session, "rows_at_once", None)),
    "cache_placement": values.placement.cache is not None
    or bool(getattr(made_with, "offloaded", False)),
    "grow": values.decode.grow is not None,
  }
