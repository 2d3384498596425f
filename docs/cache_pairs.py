"""Prints docs/cache_pairs.md: what goes with what in a cache.

  PYTHONPATH=. python docs/cache_pairs.py > docs/cache_pairs.md

Caches are only described, not made: `init_cache_spec` of models without
weights. `tests/kv/test_pairs.py` runs what works here, and checks that the page
is what this script prints.
"""

from __future__ import annotations

import dataclasses
import sys

import jax

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv import KINDS
from tests import checkpoints
from tests.contracts import cache as contract

_CODECS = [
  name
  for name, kind in KINDS.items()
  if kind.policy is None and not kind.grouped
]
_POLICIES = [name for name, kind in KINDS.items() if kind.policy is not None]
# Sizes of mesh axes.
_MESHES = {
  "one device": {},
  "seq=4": {"seq": 4},
  "seq=2, model=2": {"seq": 2, "model": 2},
  "data=2, seq=2, model=2": {"data": 2, "seq": 2, "model": 2},
}
_OPTIONS = {
  "`windowed`": dict(windowed=True),
  "`unrotated`": dict(unrotated=True),
  "`first`, `recent`": dict(first=4, recent=8),
}
_HEAD = """\
# Which cache goes with which

A kind of cache is a codec and a policy ([Use a cache](how/cache.md)), of a
model of some family, on one device or a mesh. Each pair of these works, or is
refused by a named error before anything is allocated. This page is printed by
`docs/cache_pairs.py`, which asks for a description of each cache;
`tests/kv/test_pairs.py` runs the pairs: a policy whose budget keeps all tokens
changes nothing, a smaller one frees bytes, and four shards keep the tokens that
one device keeps.
"""
_TAIL = """\
## What is refused of every codec

These calls raise an `OptionError`, whatever the codec and the family are:

- `cache.export` after an eviction: heads hold different tokens.
- `cache.evict` inside of `jit`: how much stays decides shapes.
- `cache.evict` with `kvzip` and no repetition: call
  `rj.infer.evict_by_repetition`.
- `cache.take` where the batch is sharded: pages stay on their device.
- A call with `attend=ContextParallel()` after tokens in the cache: it would
  not see them.
- `cache.keep` and `cache.truncate` with recurrent layers: a state does not go
  back.
- `rj.kv.SimulatedCache` with a policy: what it keeps depends on the text.
- Two codecs or two policies in one kind.

Beside any policy, and `first` or `recent`, these are refused when the kind is
made:

- `kivi4` and `kivi2` with a policy: heads that keep different tokens have no
  groups of tokens in common. They need `recent`.
- Codecs that differ from head to head (`allocated`, `rj.kv.PerHead`): pages
  hold vectors of one length.
- A part in host memory (`device=N`): blocks hold all tokens of a row. `select`
  goes with it, with `hot=`: all tokens stay, and chosen pages are copied.
"""


def page() -> str:
  """The page."""
  notes: list[str] = []
  models = {name: _model(name) for name in contract.FAMILIES}
  parts = [_HEAD, "## Codecs and policies\n"]
  parts.append(
    f"In all {len(models)} families below, on one device and over four "
    "shards of the sequence; `nuq4`, `nuq3` and\n`nuq2` with a "
    "calibration of the model. A number is a note; families that it does not "
    "name\nwork.\n"
  )
  rows = [
    [
      f"`{codec}`",
      *(_pair(models, codec, policy, notes) for policy in _POLICIES),
    ]
    for codec in _CODECS
  ]
  parts.append(_table(["", *(f"`{name}`" for name in _POLICIES)], rows))
  parts.append("## Families and options\n")
  parts.append(
    "Each with the policy `snapkv`, and the codec `int8` on a mesh.\n"
  )
  rows = []
  for name, model in models.items():
    cells = [
      _cell(model, KINDS["snapkv"], options, {}, name, notes)
      for options in _OPTIONS.values()
    ]
    cells += [
      _cell(model, KINDS["int8"] + KINDS["snapkv"], {}, sizes, name, notes)
      for sizes in _MESHES.values()
    ]
    rows.append([name, f"`{_config(name)['model_type']}`", *cells])
  head = ["family", "of which", *_OPTIONS, *_MESHES]
  parts.append(_table(head, rows))
  parts.append("## Notes\n")
  parts.append("".join(f"{n}. {x}\n" for n, x in enumerate(notes, 1)))
  return "\n".join([*parts, _TAIL])


def _config(family: str) -> dict:
  name = contract.FAMILIES[family]
  return contract.CONFIG if name is None else checkpoints.config(name)


def _model(family: str) -> rj.models.Transformer:
  """A model without weights."""
  return rj.models.abstract(_config(family))


def _why(model, kind, options, sizes) -> str | None:
  """The error by which a kind of cache is refused, but for what came."""
  sharding = None
  if sizes:
    mesh = rj.make_mesh(tuple(sizes.values()), tuple(sizes))
    sharding = rj.models.CachedAttention(mesh=mesh, axis="seq")
  try:
    kind = dataclasses.replace(kind, **options)
    model.init_cache_spec(4, 64, kind=kind, sharding=sharding)
  except OptionError as error:
    name, _, text = str(error).partition(":")
    return f"`OptionError` of `{name}`, {text[text.index('wanted') :]}"
  return None


def _pair(models, codec, policy, notes) -> str:
  refused = {}
  for family, model in models.items():
    for sizes in ({}, {"seq": 4}):
      kind = KINDS[codec] + KINDS[policy]
      if why := _why(model, kind, {}, sizes):
        refused.setdefault(why, []).append(family)
  found = [
    f"{', '.join(dict.fromkeys(families))}: {why}"
    for why, families in refused.items()
  ]
  return _noted(found, notes)


def _cell(model, kind, options, sizes, family, notes) -> str:
  why = _why(model, kind, options, sizes)
  return _noted([] if why is None else [f"{family}: {why}"], notes)


def _noted(found: list[str], notes: list[str]) -> str:
  if not found:
    return "yes"
  for note in found:
    if note not in notes:
      notes.append(note)
  return ", ".join(f"({notes.index(note) + 1})" for note in found)


def _table(head: list[str], rows: list[list[str]]) -> str:
  lines = [head, ["---"] * len(head), *rows]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 8)
  sys.stdout.write(page())
