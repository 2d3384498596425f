"""Parts of a kind of cache, and the options that cannot be combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ringjax.checks import boolean
from ringjax.config import Config, config, option
from ringjax.errors import OptionError
from ringjax.kv.codecs import Allocated, Calibrated, Codec, PerHead

if TYPE_CHECKING:
  from ringjax.kv.cache_kind import CacheConfig

_PAGES = (8, 16, 32, 64, 128)
# Tokens of pages that are copied together from host memory.
_TILE = 256


@config
class LayoutConfig(Config):
  """Slots of a cache, and what is stored in them."""

  unrotated: bool = option(
    "Whether keys are stored before their rotation and rotated when they are "
    "read, so that `load` can move them to other positions without a copy of "
    "the stored numbers. Reading costs a rotation of each key.",
    default=False,
  )
  windowed: bool = option(
    "Whether layers with a window of w tokens keep w + `slack` tokens of each "
    "row, in a ring buffer. Other layers keep all.",
    default=False,
  )
  slack: int = option(
    "Number of a call's tokens that `keep` or `truncate` may remove from a "
    "ring buffer, at least 1.",
    least=1,
    default=128,
  )
  page: int = option(
    "Slots of a page; each KV head has a whole number of pages. Used with a "
    "policy, `first` or `recent`.",
    default=32,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    boolean("unrotated", self.unrotated)
    boolean("windowed", self.windowed)
    if self.page not in _PAGES:
      raise OptionError(
        "page", repr(self.page), f"one of {_PAGES}", "pass page=32"
      )


@config
class ExactConfig(Config):
  """Tokens that stay exact; true where some stay, first or newest ones."""

  first: int = option(
    "Number of tokens at the start of each document that stay, exact.",
    least=0,
    default=0,
  )
  recent: int = option(
    "Number of newest tokens of a row that stay, exact. With a codec, a token "
    "is encoded when it is no longer among them; with a codec of groups of "
    "tokens, when its whole group is not.",
    least=0,
    default=0,
  )
  residual: int | None = option(
    "Residual length R of KIVI, for a codec of groups: keys are encoded R at a "
    "time, at each multiple of R, values one by one once they are older than "
    "the newest R. `recent` must be R, too. None: keys and values are encoded "
    "together.",
    least=1,
    default=None,
  )
  room: int = option(
    "Number of tokens between two evictions, if they come one by one.",
    least=1,
    default=32,
  )

  def __bool__(self) -> bool:
    return bool(self.first or self.recent)


@config
class TierConfig(Config):
  """Tokens that stay in device memory, while older ones are on the host."""

  device: int | None = option(
    "Number of newest tokens of a row that stay in device memory, all shards "
    "together. Older ones move to host memory, block by block, and are read "
    "from there. None: all stay. See `TieredCache`.",
    least=1,
    default=None,
  )
  block: int = option(
    "Tokens of a block in host memory; in texts, room. With `hot` a block is a "
    "page, and the default is `page`.",
    least=1,
    default=256,
  )
  hot: int | None = option(
    "Tokens of pages in host memory that each KV head keeps in device memory, "
    "on each shard, once queries chose them. A token of an answer then reads "
    "only the pages that the policy, or the index of its layer, chooses, and "
    "copies only those that are not kept. None: each call copies all older "
    "tokens. See `ChosenTieredCache`.",
    least=1,
    default=None,
  )
  landmarks: str = option(
    'What queries choose keys of host memory by: "bounds" of the keys of a '
    'page (Quest), "means" of them (ShadowKV), "hashes" of single keys, which '
    'are sampled (MagicPIG), or "clusters" of the keys of a page, whose tokens '
    "are read one by one (RetrievalAttention). Layers with an index choose by "
    "it.",
    choices=("bounds", "means", "hashes", "clusters"),
    default="bounds",
  )
  outlier_pages: int = option(
    'Number of pages of a KV head that each query reads besides, with "means": '
    "those with a key that is the least like the mean.",
    least=0,
    default=0,
  )
  hash_bits: int = option(
    'Bits of a hash, with "hashes": the number of random planes, at most 16.',
    least=1,
    default=10,
  )
  hash_tables: int = option(
    'Number of hashes of a key, with "hashes". A key is read by queries that '
    "have two or more in common with it.",
    least=2,
    default=150,
  )
  hash_seed: int = option(
    'Seed of the planes, with "hashes".',
    least=0,
    default=0,
  )
  sink_tokens: int = option(
    "Number of first tokens of a document that each query reads, with "
    '"hashes".',
    least=0,
    default=4,
  )
  cluster_tokens: int = option(
    'Mean number of tokens of a cluster, with "clusters": each page has '
    "page // cluster_tokens of them.",
    least=1,
    default=8,
  )
  rank: int | None = option(
    "Numbers in which device memory has each key of a page in host memory, "
    "before its rotation: coefficients of the leading singular vectors of the "
    "row's first keys. The keys of chosen pages are rebuilt from them, and "
    "only values are copied. None: both are copied.",
    least=1,
    default=None,
  )
  ahead: int | None = option(
    "Pages, or single tokens where these are chosen, that each device copies "
    "while the layer before runs: those that the layer's queries, guessed from "
    "that one's input, choose and that are not hot. As many are copied in each "
    "layer of each call of an answer, of use or not. None: none.",
    least=1,
    default=None,
  )

  @property
  def tile_blocks(self) -> int:
    """Blocks that a call copies together if it reads all of them."""
    return 1 if self.hot is None else max(1, _TILE // self.block)


class CacheRefusal(NamedTuple):
  """Options of a cache that can't be combined.

  Fields:
    option: Name of the option that is refused.
    refused: Whether a config is refused.
    got: Function of the config that describes its values.
    want: Expected value.
    remedy: Advice, or a function of the config that gives it.
  """

  option: str
  refused: Callable[[CacheConfig], bool]
  got: Callable[[CacheConfig], str]
  want: str
  remedy: str | Callable[[CacheConfig], str]


def _coded_groups(kind: CacheConfig) -> Codec | None:
  """Codec of groups of tokens, or None."""
  return kind.codec if kind.grouped and isinstance(kind.codec, Codec) else None


def _group_sizes(kind: CacheConfig) -> set[int]:
  """Numbers of tokens of a codec's groups."""
  codec = _coded_groups(kind)
  parts = () if codec is None else (codec.keys, codec.values)
  sizes: Iterator[int | None] = (getattr(x, "page", None) for x in parts)
  return {size for size in sizes if size is not None}


def _group_size(kind: CacheConfig) -> int:
  """Largest number of tokens of a codec's groups."""
  return max(_group_sizes(kind))


def _whole_groups(kind: CacheConfig) -> int:
  """Smallest number of tokens of whole pages that hold a residual."""
  page = kind.layout.page
  return -(-(kind.exact.residual or 0) // page) * page


def _has_value_groups(kind: CacheConfig) -> bool:
  codec = _coded_groups(kind)
  return codec is not None and getattr(codec.values, "page", None) is not None


def _whole_residual(kind: CacheConfig) -> bool:
  """Whether a residual is whole pages, all recent tokens, and no first ones."""
  exact = kind.exact
  if exact.first or exact.recent != exact.residual:
    return False
  return exact.residual == _whole_groups(kind)


def _drops(kind: CacheConfig) -> bool:
  """Whether a policy drops tokens, or reads pages that calls do not choose."""
  return kind.policy is not None and not kind.policy.selects


def _hash_options(kind: CacheConfig) -> str:
  """Options of hashes that are set, as text."""
  tier, default = kind.tier, TierConfig()
  names = "hash_bits", "hash_tables", "hash_seed", "sink_tokens"
  values = {name: getattr(tier, name) for name in names}
  return ", ".join(
    f"{name}={value}"
    for name, value in values.items()
    if value != getattr(default, name)
  )


# Tried in this order.
REFUSED = (
  CacheRefusal(
    "device",
    lambda k: k.tier.device is not None and (bool(k.exact) or _drops(k)),
    lambda k: f"{k.tier.device}, with a policy, first or recent",
    "a kind of cache that keeps all tokens",
    "leave device out, or leave those out",
  ),
  CacheRefusal(
    "hot",
    lambda k: k.tier.hot is not None and k.tier.device is None,
    lambda k: f"{k.tier.hot}, without device",
    "both, as chosen pages come from host memory",
    "pass device= too, or leave hot out",
  ),
  CacheRefusal(
    "hot",
    lambda k: (
      k.tier.hot is None and k.tier.device is not None and k.policy is not None
    ),
    lambda k: f"None, with {k.policy} and device={k.tier.device}",
    "the number of chosen tokens that stay in device memory",
    "pass hot=4096, for instance",
  ),
  CacheRefusal(
    "hot",
    lambda k: k.tier.hot is not None and k.tier.hot < k.layout.page,
    lambda k: f"{k.tier.hot}, with pages of {k.layout.page} tokens",
    "a page or more",
    lambda k: f"pass hot={k.layout.page}",
  ),
  CacheRefusal(
    "landmarks",
    lambda k: (
      k.tier.landmarks != "bounds" and (k.tier.hot is None or not k.policy)
    ),
    lambda k: f"{k.tier.landmarks!r}, without select and hot",
    "a policy by which queries choose pages of host memory",
    "write select:device=4096,hot=8192,landmarks=means, or leave it out",
  ),
  CacheRefusal(
    "outlier_pages",
    lambda k: k.tier.outlier_pages > 0 and k.tier.landmarks != "means",
    lambda k: f"{k.tier.outlier_pages}, with landmarks={k.tier.landmarks!r}",
    "landmarks=means, whose pages can be unlike their mean",
    "pass landmarks=means, or leave outlier_pages out",
  ),
  CacheRefusal(
    "hash_bits",
    lambda k: bool(_hash_options(k)) and k.tier.landmarks != "hashes",
    lambda k: f"{_hash_options(k)}, with landmarks={k.tier.landmarks!r}",
    "landmarks=hashes, which these options describe",
    "pass landmarks=hashes, or leave them out",
  ),
  CacheRefusal(
    "hash_bits",
    lambda k: k.tier.hash_bits > 16,
    lambda k: f"{k.tier.hash_bits}",
    "at most 16, in two bytes",
    "pass hash_bits=10, and more hash_tables",
  ),
  CacheRefusal(
    "sink_tokens",
    lambda k: (
      k.tier.landmarks == "hashes" and k.tier.sink_tokens >= k.layout.page
    ),
    lambda k: f"{k.tier.sink_tokens}, with pages of {k.layout.page} tokens",
    "fewer than a page, so that a budget has room for sampled tokens",
    lambda k: f"pass sink_tokens={k.layout.page // 2}",
  ),
  CacheRefusal(
    "cluster_tokens",
    lambda k: (
      k.tier.cluster_tokens != TierConfig().cluster_tokens
      and k.tier.landmarks != "clusters"
    ),
    lambda k: f"{k.tier.cluster_tokens}, with landmarks={k.tier.landmarks!r}",
    "landmarks=clusters, whose size it is",
    "pass landmarks=clusters, or leave cluster_tokens out",
  ),
  CacheRefusal(
    "cluster_tokens",
    lambda k: k.tier.cluster_tokens > k.layout.page,
    lambda k: f"{k.tier.cluster_tokens}, with pages of {k.layout.page} tokens",
    "at most a page, as clusters are of the keys of one",
    lambda k: f"pass cluster_tokens={k.layout.page // 4}, or larger pages",
  ),
  CacheRefusal(
    "rank",
    lambda k: k.tier.rank is not None and k.tier.landmarks == "hashes",
    lambda k: f"{k.tier.rank}, with landmarks='hashes'",
    "the keys that were hashed, from which probabilities follow",
    "leave rank out, or take landmarks=means",
  ),
  CacheRefusal(
    "rank",
    lambda k: k.tier.rank is not None and (not k.tier.hot or not k.policy),
    lambda k: f"{k.tier.rank}, without select and hot",
    "a policy by which queries choose pages of host memory",
    "write select:device=4096,hot=8192,unrotated=True,rank=32, or leave it out",
  ),
  CacheRefusal(
    "ahead",
    lambda k: k.tier.ahead is not None and (not k.tier.hot or not k.policy),
    lambda k: f"{k.tier.ahead}, without select and hot",
    "a policy by which queries choose pages of host memory",
    "write select:device=4096,hot=8192,ahead=8, or leave it out",
  ),
  CacheRefusal(
    "rank",
    lambda k: k.tier.rank is not None and k.codec is not None,
    lambda k: f"{k.tier.rank}, with a codec",
    "numbers, of which a key is a sum of vectors",
    "leave the codec or rank out",
  ),
  CacheRefusal(
    "rank",
    lambda k: k.tier.rank is not None and not k.layout.unrotated,
    lambda k: f"{k.tier.rank}, with rotated keys",
    "unrotated keys, which are of lower rank",
    "pass unrotated=True, too",
  ),
  CacheRefusal(
    "block",
    lambda k: k.tier.hot is not None and k.tier.block != k.layout.page,
    lambda k: f"{k.tier.block}, with pages of {k.layout.page} tokens and hot",
    "the same, as a block in host memory is a page",
    lambda k: f"pass block={k.layout.page} (room, in texts), or leave it out",
  ),
  CacheRefusal(
    "codec",
    lambda k: (
      k.tier.hot is not None and isinstance(k.codec, Allocated | PerHead)
    ),
    lambda k: "one for each head, with hot",
    "one codec for all heads, for pages hold vectors of one length",
    "leave hot and the policy out, or take one codec",
  ),
  CacheRefusal(
    "block",
    lambda k: k.tier.device is None and k.tier != TierConfig(),
    lambda k: f"{k.tier.block}, without device",
    "both, as blocks are in host memory",
    "pass device= too, or leave block (room, with device) out",
  ),
  CacheRefusal(
    "room",
    lambda k: k.tier.device is not None and k.exact != ExactConfig(),
    lambda k: f"{k.exact.room}, with device",
    "block, as no tokens are evicted",
    lambda k: f"pass block={k.exact.room} in its place",
  ),
  CacheRefusal(
    "codec",
    lambda k: k.evicting and isinstance(k.codec, Allocated | PerHead),
    lambda k: "one for each head, with a policy, first or recent",
    "one codec for all heads, for pages hold vectors of one length",
    "leave the policy, first and recent out, or take one codec",
  ),
  CacheRefusal(
    "unrotated",
    lambda k: (
      k.codec is not None and k.codec.unrotated and not k.layout.unrotated
    ),
    lambda k: "False, with a codec of keys before their rotation",
    "True",
    "pass rj.kv.CacheConfig(codec=..., unrotated=True)",
  ),
  CacheRefusal(
    "unrotated",
    lambda k: (
      isinstance(k.codec, Calibrated)
      and not k.codec.unrotated
      and k.layout.unrotated
    ),
    lambda k: "True, with a calibrated codec of keys after their rotation",
    "the same of both: levels fit keys of one sort",
    "pass rj.kv.Calibrated(unrotated=True), or leave unrotated out",
  ),
  CacheRefusal(
    "residual",
    lambda k: k.exact.residual is not None and not k.grouped,
    lambda k: f"{k.exact.residual}, without a codec of groups of tokens",
    "keys by channel, of which so many become codes at a time",
    "write kivi2:residual=128, or recent= with other codecs",
  ),
  CacheRefusal(
    "residual",
    lambda k: k.exact.residual is not None and _has_value_groups(k),
    lambda k: f"{k.exact.residual}, with a codec of groups of values",
    "values by token, which become codes one by one",
    lambda k: f"write recent={k.exact.residual} in its place",
  ),
  CacheRefusal(
    "residual",
    lambda k: k.exact.residual is not None and not _whole_residual(k),
    lambda k: (
      f"{k.exact.residual}, with recent={k.exact.recent}, "
      f"first={k.exact.first} and groups of {k.layout.page}"
    ),
    "whole groups, recent the same, and first 0",
    lambda k: (
      f"write residual={_whole_groups(k)}, and leave recent and first out"
    ),
  ),
  CacheRefusal(
    "policy",
    lambda k: k.grouped and k.policy is not None,
    lambda k: f"{k.policy} with a codec of groups of tokens",
    "none: heads that keep different tokens have no groups in common",
    "use a codec of single tokens, as int4, or leave the policy out",
  ),
  CacheRefusal(
    "recent",
    lambda k: k.grouped and not k.exact.recent,
    lambda k: "0 with a codec of groups of tokens",
    "1 or more: tokens stay exact until a group is full",
    "pass recent=128",
  ),
  CacheRefusal(
    "page",
    lambda k: k.grouped and _group_sizes(k) != {k.layout.page},
    lambda k: (
      f"{k.layout.page} with groups of {sorted(_group_sizes(k))} tokens"
    ),
    "pages that are groups",
    lambda k: f"pass page={_group_size(k)} and group={_group_size(k)}",
  ),
  CacheRefusal(
    "first",
    lambda k: (
      k.policy is not None and bool(k.policy.moves) and k.exact.first > 0
    ),
    lambda k: f"{k.exact.first}, with positions='cache'",
    "0: the policy's sinks are the first tokens that stay",
    lambda k: f"leave it out, and pass sinks={k.exact.first}",
  ),
)
