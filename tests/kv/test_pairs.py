"""Each codec with each policy: on one device and on a mesh, in each family.

Law: a pair works, or is refused by name. The default run has a few pairs, the
longer ones a design in which each codec, policy and family is, and the slow
ones all pairs, in families that take turns so that each codec and each policy
meets each family.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.kv.cache_kind import KINDS
from tests.contracts import cache as contract

CODECS = [
  name
  for name, kind in KINDS.items()
  if kind.policy is None and not kind.grouped
]
POLICIES = [name for name, kind in KINDS.items() if kind.policy is not None]
FAMILIES = list(contract.FAMILIES)
# Texts are short.
SMALL = dict(window=4, positions=8, lag=6, chunk=16, sinks=2, beta=2, newest=6)
LENGTHS, MORE, CAPACITY = (40, 29), 3, 64
ROOT = pathlib.Path(__file__).parents[2]


def policy_of(name, budget):
  policy = KINDS[name].policy
  known = {field.name for field in dataclasses.fields(policy)}
  options = {n: value for n, value in SMALL.items() if n in known}
  if name == "fastgen":
    options |= dict(local=budget, recovered=1.0 if budget == 1.0 else 0.1)
  return dataclasses.replace(policy, budget=budget, **options)


def kind_of(codec, family, policy=None):
  kind = contract.kind_of(codec, family)
  return kind.replace(windowed=True, slack=8, page=8, room=8, policy=policy)


@functools.cache
def prompts():
  draw = np.random.default_rng(3)
  one = lambda n: draw.integers(1, 64, n).astype(np.int32)
  return [one(n) for n in LENGTHS], np.stack([one(MORE) for _ in LENGTHS])


def read(shards, kind, family):
  """Logits behind a context that was read and evicted, and its cache."""
  model = contract.model(shards, family)
  context, more = prompts()
  session = rj.infer.Session(model, CAPACITY, batch=2, cache_kind=kind)
  rj.infer.read_context(model, context, cache=session)
  cache = session.cache
  assert cache.length.tolist() == list(LENGTHS)
  logits, _ = model(more, cache=cache.with_room(MORE))
  return np.asarray(logits), cache


def kept(cache):
  """By row, layer and head the positions that stay."""
  return [
    [None if layer is None else [set(x.tolist()) for x in layer]
     for layer in cache.positions(row)]
    for row in range(len(LENGTHS))
  ]  # fmt: skip


def check(codec, policy, family):
  exact = KINDS[codec].codec is None
  few = kind_of(codec, family, policy_of(policy, 0.25))
  every = kind_of(codec, family, policy_of(policy, 1.0))
  alone = kind_of(codec, family)
  logits, held = {}, {}
  for shards in (1, 4):
    want, _ = read(shards, alone, family)
    got, whole = read(shards, every, family)
    size = float(np.abs(want).max())
    contract.close(got, want, 1e-4 * max(1.0, size))
    logits[shards], small = read(shards, few, family)
    held[shards] = kept(small)
    if KINDS[policy].policy.selects:
      assert held[shards] == kept(whole)
    else:
      assert small.nbytes() < whole.nbytes()
      assert held[shards] != kept(whole)
  if not KINDS[policy].policy.selects:
    # Each shard selects among its own pages.
    far = np.median(np.abs(logits[1] - logits[4]))
    assert far < (1e-4 if exact else 0.05) * size
  # A layer that looks back a window may have a ring buffer on one of both.
  shared = [
    len(x & y) / max(1, len(x | y))
    for one, four in zip(held[1], held[4], strict=True)
    for a, b in zip(one, four, strict=True)
    if a is not None and b is not None
    for x, y in zip(a, b, strict=True)
  ]
  # A number may be near the middle between two codes.
  assert np.mean(shared) > 0.8
  assert min(shared) == 1 or not exact


def design():
  """Codecs, policies and families, each at least once."""
  count = max(map(len, (CODECS, POLICIES, FAMILIES)))
  for n in range(count):
    pick = lambda names, n=n: names[n % len(names)]
    yield pick(CODECS), pick(POLICIES), pick(FAMILIES)


ALL = [
  (codec, policy, FAMILIES[(n + m) % len(FAMILIES)])
  for n, codec in enumerate(CODECS)
  for m, policy in enumerate(POLICIES)
]


@pytest.mark.long_cases(0)
@pytest.mark.parametrize(
  ("codec", "policy", "family"),
  [
    *(pytest.param(*x, marks=pytest.mark.long) for x in design()),
    pytest.param("int8", "sinks", "grouped", marks=pytest.mark.long),
    pytest.param("int8", "kvzip", "windows", marks=pytest.mark.long),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ALL),
  ],
)
def test_a_pair_works_or_is_refused(codec, policy, family):
  late = family == "chunked" and KINDS[codec].layout.unrotated
  if late and KINDS[policy].policy.reads:
    model = contract.model(1, family)
    with pytest.raises(OptionError, match="before a rotation and a norm"):
      model.init_cache(2, CAPACITY, kind=KINDS[codec] + KINDS[policy])
    return
  check(codec, policy, family)


@pytest.mark.slow
def test_the_page_of_pairs_is_what_its_script_prints():
  # In a process of its own: checks of types take minutes for so many caches.
  env = {n: x for n, x in os.environ.items() if n != "XLA_FLAGS"}
  page = subprocess.run(
    [sys.executable, ROOT / "docs/cache_pairs.py"],
    cwd=ROOT,
    env=env | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  assert page == (ROOT / "docs/cache_pairs.md").read_text()
