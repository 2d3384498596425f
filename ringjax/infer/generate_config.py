"""Options of `generate`, and which of them can't be combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from ringjax.checks import float_dtype, positive_int
from ringjax.config import Config, Flag, config, option, part
from ringjax.errors import OptionError
from ringjax.infer.contexts.combine import WAYS, Combine
from ringjax.infer.contexts.context_library import ContextLibrary
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.sampling import PARAMETERS, REMEDIES, from_names
from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.speculate.speculation import DRAFTERS
from ringjax.infer.stopping import Stop, StopLike
from ringjax.kv import cache_kind as kinds
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.weights.weight_placement import PlacementConfig
from ringjax.plan.choice import KEEPS

# The folder of a draft model decides whether its tokens are translated.
_DRAFTERS = tuple(name for name in DRAFTERS if name != "translated")


def _dtype_name(dtype: DTypeLike) -> str:
  return float_dtype("cache_dtype", dtype).name


@config
class DecodeConfig(Config):
  """Storage of keys and values in a new cache, which decoding reads."""

  cache_kind: CacheConfig | str | None = option(
    "Storage format of keys and values, an `rj.kv.CacheConfig` or its name, "
    'one of `rj.kv.KINDS`; default "windowed", which keeps no more than later '
    "tokens see.",
    default=None,
    text=str,
    flag=Flag(
      f"How the KV cache is stored: {', '.join(kinds.KINDS)}; with options as "
      "NAME:key=value,key=value; device=N keeps the newest N tokens on the "
      "devices, the others in host memory.",
      name="cache",
      default="windowed",
    ),
  )
  cache_dtype: DTypeLike | None = option(
    "Dtype of the cache: bfloat16, float16, float32 or float64; default: the "
    "model's.",
    default=None,
    text=_dtype_name,
    flag=Flag(
      "Dtype of the cache; default: the model's.",
      choices=("bfloat16", "float16", "float32"),
    ),
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
  def kind(self) -> CacheConfig | None:
    """Storage format of keys and values; None: the default."""
    if self.cache_kind is None:
      return None
    return kinds.cache_kind(self.cache_kind)


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
    flag=Flag(PARAMETERS["temperature"].meaning, kind="number"),
  )
  top_k: int | None = option(
    PARAMETERS["top_k"].meaning,
    default=None,
    flag=Flag(PARAMETERS["top_k"].meaning, kind="whole"),
  )
  top_p: int | float | None = option(
    PARAMETERS["top_p"].meaning,
    default=None,
    flag=Flag(PARAMETERS["top_p"].meaning, kind="number"),
  )
  min_p: int | float | None = option(
    PARAMETERS["min_p"].meaning,
    default=None,
    flag=Flag(PARAMETERS["min_p"].meaning, kind="number"),
  )
  repetition_penalty: int | float | None = option(
    PARAMETERS["repetition_penalty"].meaning,
    default=None,
    flag=Flag(PARAMETERS["repetition_penalty"].meaning, kind="number"),
  )
  do_sample: bool | None = option(
    "Whether tokens are drawn; default: if an option above filters them.",
    default=None,
  )
  seed: int | None = option(
    PARAMETERS["seed"].meaning,
    default=None,
    flag=Flag("Random seed of sampling.", kind="whole", default=0),
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
    flag=Flag(
      "Text that ends the answer; repeatable.", kind="texts", default=()
    ),
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
    flag=Flag(
      f"What drafts tokens: {', '.join(_DRAFTERS)}; with options as "
      "lookup:count=8 or model:model=FOLDER, which may have another "
      "tokenizer. Tokens are those without it, but where rounding decides."
    ),
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
    flag=Flag(
      f"How contexts are combined: {', '.join(WAYS)}; with options as "
      "ape:temperature=0.9,scale=0.9; default: parallel."
    ),
  )
  library: ContextLibrary | None = option(
    "A `ContextLibrary` that encodes and keeps contexts; default: a new one "
    "for this call.",
    default=None,
  )


@config
class GenerateConfig(Config):
  """Options of `generate`, as parts.

  An option of a part is set by its name: `GenerateConfig(max_new_tokens=64,
  chunk=512, temperature=0.7, prefill="chunked")`.

  Raises:
    OptionError: If a value is out of range, or options contradict each other.
  """

  max_new_tokens: int | None = option(
    "Maximum number of tokens to add to each row; needed.",
    default=None,
    flag=Flag("Longest answer, in tokens.", kind="whole"),
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
    "Where weights, keys and hidden states are between their uses.",
    default_factory=PlacementConfig,
    main="placement",
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
    remedy: Remedy to name in the error.
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
  Pair(
    "prefill",
    "contexts",
    "chosen tiles: a question reads all keys of its contexts",
    "leave prefill= out",
  ),
  Pair(
    "prefill",
    "rows_at_once",
    "chosen tiles: what groups of rows leave out is not measured",
    "leave one of them out",
  ),
)


def check_pairs(
  present: Mapping[str, bool], names: Mapping[str, str] | None = None
) -> None:
  """Refuses options that can't be combined.

  Args:
    present: Whether each option has a value other than its default, by name;
      names that are left out do not.
    names: Words for options in errors, such as a flag, by option; default: the
      options' names.

  Raises:
    OptionError: If both options of a pair are present.
  """
  for pair in PAIRS:
    if present.get(pair.option) and present.get(pair.other):
      refused, other = (
        (names or {}).get(name, name) for name in (pair.option, pair.other)
      )
      raise OptionError(
        refused,
        f"a value beside {other}",
        f"{refused}, or {other}: {pair.reason}",
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
  made_with = getattr(session, "cache", None)
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
    # Methods that read all keys go with any option.
    "prefill": values.prefill.pattern is not None,
  }
