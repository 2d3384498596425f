"""Options of a cache as a value: parts, names, refused pairs."""

from __future__ import annotations

import dataclasses

import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import (
  KINDS,
  CacheConfig,
  CacheKind,
  ExactConfig,
  LayoutConfig,
  TierConfig,
)
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.kind_parts import REFUSED
from tests.helpers import refused

_GROUPS = rj.kv.Codec(
  keys=rj.kv.ChannelGroups(bits=2, group=32),
  values=rj.kv.Integers(bits=2, group=32),
)
_GROUPED_VALUES = rj.kv.Codec(
  keys=rj.kv.ChannelGroups(bits=2, group=32),
  values=rj.kv.ChannelGroups(bits=2, group=32),
)
_HASHES = {
  "device": 8,
  "hot": 64,
  "policy": rj.kv.Select(),
  "landmarks": "hashes",
}
# Options that the rows of the table refuse, in their order.
_EXAMPLES = (
  {"device": 8, "recent": 8},
  {"hot": 64},
  {"device": 8, "policy": rj.kv.Select()},
  {"device": 8, "hot": 8},
  {"landmarks": "means"},
  {"device": 8, "hot": 64, "policy": rj.kv.Select(), "outlier_pages": 1},
  {"device": 8, "hot": 64, "policy": rj.kv.Select(), "hash_tables": 75},
  {**_HASHES, "hash_bits": 17},
  {**_HASHES, "sink_tokens": 32},
  {"device": 8, "hot": 64, "policy": rj.kv.Select(), "cluster_tokens": 4},
  {**_HASHES, "landmarks": "clusters", "cluster_tokens": 33},
  {**_HASHES, "unrotated": True, "rank": 8},
  {"rank": 8},
  {"device": 8, "hot": 64, "ahead": 2},
  {
    "device": 8,
    "hot": 64,
    "policy": rj.kv.Select(),
    "unrotated": True,
    "rank": 8,
    "codec": KINDS["int8"].codec,
  },
  {"device": 8, "hot": 64, "policy": rj.kv.Select(), "rank": 8},
  {"device": 8, "hot": 64, "block": 16},
  {"device": 8, "hot": 64, "codec": rj.kv.Allocated()},
  {"block": 8},
  {"tier": TierConfig(device=8), "exact": ExactConfig(room=16)},
  {"codec": rj.kv.Allocated(), "recent": 8},
  {"codec": KINDS["nuq3"].codec},
  {"codec": rj.kv.Calibrated(unrotated=False), "unrotated": True},
  {"residual": 32, "recent": 32},
  {"codec": _GROUPED_VALUES, "residual": 32, "recent": 32},
  {"codec": _GROUPS, "residual": 40, "recent": 40},
  {"codec": _GROUPS, "recent": 32, "policy": rj.kv.SnapKV()},
  {"codec": _GROUPS},
  {"codec": _GROUPS, "recent": 32, "page": 16},
  {"policy": rj.kv.Sinks(positions="cache", budget=16), "first": 2},
)


def test_options_stand_in_parts():
  kind = CacheConfig(
    layout=LayoutConfig(windowed=True), exact=ExactConfig(recent=8, room=16)
  )
  text = (
    "CacheConfig(layout=LayoutConfig(windowed=True), "
    "exact=ExactConfig(recent=8, room=16))"
  )
  assert repr(kind) == text and eval(text) == kind
  assert CacheConfig.from_dict(kind.to_dict()) == kind
  assert CacheConfig(windowed=True, recent=8, room=16) == kind
  assert kind.exact and not CacheConfig().exact
  kept = kind.replace(recent=0, codec=KINDS["int4"].codec)
  assert kept == cache_kind("int4:room=16") and kept.layout == kind.layout
  with pytest.raises(dataclasses.FrozenInstanceError):
    kind.layout = LayoutConfig()


def test_room_of_a_kind_in_host_memory_is_its_block():
  kind = cache_kind("int8:device=32,room=16")
  assert kind.tier == TierConfig(device=32, block=16)
  assert kind.exact == ExactConfig() and cache_kind(str(kind)) == kind
  assert kind.opened().tier == TierConfig()


def test_room_beside_a_block_is_never_dropped():
  for options in ({"room": 16, "block": 8}, {"block": 8, "room": 16}):
    refused(OptionError, lambda o=options: CacheConfig(device=64, **o), "room")
  for kind in (CacheKind(room=16), cache_kind("dense:room=16")):
    refused(
      OptionError, lambda k=kind: k.replace(device=64), "room", "block=16"
    )
  assert CacheKind(device=64, room=16).room == 16


def test_names_of_the_version_before():
  kind = CacheKind(windowed=True, device=32, room=16)
  assert isinstance(kind, CacheConfig) and CacheKind is CacheConfig
  assert kind == cache_kind("windowed:device=32,room=16")
  assert dataclasses.replace(kind, slack=3).layout.slack == 3
  assert (kind.windowed, kind.slack, kind.device) == (True, 128, 32)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_every_row_refuses_what_it_says(number):
  assert len(_EXAMPLES) == len(REFUSED)
  row, options = REFUSED[number], _EXAMPLES[number]
  call = lambda: CacheConfig(**options)
  refused(OptionError, call, f"{row.option}: got", row.want)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"page": 12}, "page: got 12"),
    ({"slack": 0}, "slack: got 0"),
    ({"recent": -1}, "recent: got -1"),
    ({"policy": "h2o"}, "policy: got 'h2o'"),
    ({"windows": True}, "pass windowed="),
  ],
)
def test_values_out_of_range_are_refused(options, words):
  refused(OptionError, lambda: CacheConfig(**options), words)


def test_an_option_of_a_policy_is_written_once():
  text = "h2o:budget=8,budget=16"
  refused(OptionError, lambda: cache_kind(text), "each once")


def test_every_option_of_a_part_is_written_and_kept_by_a_sum():
  for options in (LayoutConfig, ExactConfig, TierConfig):
    for field in options.fields():
      # Set through `device` and `recent`: other fields alone are refused.
      if field.name in ("block", "residual"):
        continue
      value = True if field.default is False else 512
      if field.name == "page":
        value = 64
      if field.name == "landmarks":
        value = "means"
      # Chosen pages are hot beside the newest tokens.
      more = {"device": 8} if field.name == "hot" else {}
      if field.name in ("hash_bits", "sink_tokens"):
        value = 12
      if field.name.startswith("hash_") or field.name == "sink_tokens":
        more = _HASHES
      if field.name == "cluster_tokens":
        value, more = 12, {**_HASHES, "landmarks": "clusters"}
      if field.name in ("landmarks", "outlier_pages", "rank", "ahead"):
        more = {
          "device": 8, "hot": 64, "policy": rj.kv.Select(),
          "landmarks": "means", "unrotated": True,
        }  # fmt: skip
        more.pop(field.name, None)
      kind = CacheConfig(**{field.name: value}, **more)
      assert kind.text_options()[field.name] == value
      assert kind + CacheConfig(windowed=True) == kind.replace(windowed=True)
      assert CacheConfig(windowed=True) + kind == kind.replace(windowed=True)
