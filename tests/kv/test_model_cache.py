"""Base class of caches: kinds of storage refuse by name what they cannot do."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax import tree
from ringjax.errors import OptionError, PromptError
from ringjax.infer.generate_config import present_options
from ringjax.kv import cache_specs
from ringjax.kv.base import zeros
from ringjax.kv.cache import KVCache
from ringjax.kv.composed.context_cache import ContextCache
from ringjax.kv.composed.open_cache import WithOpenCache
from ringjax.kv.composed.row_groups import RowGroups
from ringjax.kv.eviction.peak_attention import Repeated
from ringjax.ops.mask import Coords
from tests.contracts import cache as contract
from tests.helpers import SMALL, refused

STORAGE = {
  "ChosenTieredCache",
  "ContextCache",
  "EvictingCache",
  "KVCache",
  "OffloadedCache",
  "PooledCache",
  "RowGroups",
  "TieredCache",
}
PACKAGE = pathlib.Path(rj.__file__).parent


class IdsConfig(rj.kv.CacheConfig):
  """The kind of cache that `CacheWithIds` stores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheWithIds(WithOpenCache):
  """A new kind of cache, which also has the token id of each position.

  Attributes:
    ids: Token ids, int32 [B, S]; 0 from the end of a row on.
  """

  ids: Any
  row_axes: ClassVar[Mapping[str, int]] = {"ids": 0}
  call_fields: ClassVar[tuple[str, ...]] = ("ids",)

  @classmethod
  def spec(cls, shapes, batch, capacity, dtype, *, kind, **where):
    slots = kind.opened()
    opened = KVCache.spec(shapes, batch, capacity, dtype, kind=slots, **where)
    ids = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
    return cls(open=opened, kind=kind, limit=capacity, ids=ids)

  def allocated(self, files=None):
    opened = self.open.allocated(files)
    return dataclasses.replace(self, open=opened, ids=zeros(self.ids))

  def allocate(self, at, *, tokens=None, **call):
    cache = super().allocate(at, tokens=tokens, **call)
    rows = jnp.arange(self.batch)[:, None]
    into = jnp.where(at.seg > 0, at.pos, self.limit)
    ids = self.ids.at[rows, into].set(tokens, mode="drop")
    return dataclasses.replace(cache, ids=ids)

  def changed(self, change):
    cache = super().changed(change)
    inside = jnp.arange(self.limit)[None] < cache.length[:, None]
    return dataclasses.replace(cache, ids=jnp.where(inside, cache.ids, 0))


tree.register(CacheWithIds, ("open", "ids"), ("kind", "limit"))


@pytest.fixture
def _with_ids(monkeypatch):
  """Register the new kind as a program of its author does."""
  entry = (lambda kind: isinstance(kind, IdsConfig), CacheWithIds)
  monkeypatch.setattr(cache_specs, "STORAGES", [entry, *cache_specs.STORAGES])


@pytest.mark.parametrize(
  "law",
  [
    contract.an_undone_call_leaves_no_trace,
    *(
      pytest.param(law, marks=pytest.mark.long)
      for law in (
        contract.as_without_a_cache,
        contract.rejected_tokens_leave_no_trace,
        contract.blocks_are_loaded_bit_for_bit,
        contract.rows_are_independent,
        contract.a_snapshot_comes_back,
        contract.any_split_is_read_the_same,
        contract.bytes_are_stated_before,
      )
    ),
  ],
)
@pytest.mark.usefixtures("_with_ids")
def test_a_new_kind_of_cache_keeps_the_laws(law):
  law(contract.Setup(IdsConfig(), 1))


@pytest.mark.long
@pytest.mark.usefixtures("_with_ids")
def test_own_arrays_of_a_new_kind_follow_rows_and_tokens():
  setup = contract.Setup(IdsConfig(), 1)
  tokens, _ = setup.text()
  shown = lambda cache: [row[row > 0].tolist() for row in np.asarray(cache.ids)]
  rows = lambda length: [row[:length].tolist() for row in tokens]
  _, cache = setup.read(tokens[:, :5], setup.empty())
  state = cache.call_state(3)
  _, longer = setup.read(tokens[:, 5:8], cache)
  assert shown(longer) == rows(8)
  assert shown(longer.undo_call(state)) == rows(5)
  assert shown(longer.truncate(6)) == rows(6)
  assert shown(longer.keep_first(np.array([1, 1, 1]), 3)) == rows(6)
  keep_mask = np.array([[True, True, False]] * 3)
  assert shown(longer.restore(longer.snapshot()).keep(keep_mask)) == rows(7)
  assert shown(longer.take([2, 0])) == [rows(8)[2], rows(8)[0]]
  _, row = setup.read(tokens[:1, :4], setup.empty(batch=1))
  assert shown(longer.insert([2], row)) == [*rows(8)[:2], rows(4)[0]]
  dense = contract.Setup("dense", 1).empty(batch=1)
  refused(OptionError, lambda: longer.insert([2], dense), "a KVCache")
  assert shown(longer.reset([1])) == [rows(8)[0], [], rows(8)[2]]


@pytest.fixture(scope="module")
def model():
  return rj.models.create(SMALL | {"num_hidden_layers": 2}, seed=1)


def operations(cache):
  """Calls of what moves rows or tokens of a cache, by name."""
  device = jax.devices()[0]
  return {
    "take": lambda: cache.take([0]),
    "insert": lambda: cache.insert([0], cache),
    "export": lambda: cache.export(0, 0, 1),
    "load": lambda: cache.load(0, None),
    "snapshot": lambda: cache.snapshot(),
    "with_states": lambda: cache.with_states(None),
    "gathered": lambda: cache.gathered(device),
  }


def test_offloaded_layers_refuse_what_moves_rows(model):
  cache = model.init_cache(2, 8, placement="host")
  for name, call in operations(cache).items():
    refused(OptionError, call, name, "host memory or on disk")
  refused(OptionError, cache.explain, "explain", "bytes_by_memory()")
  assert sum(cache.bytes_by_memory().values()) == cache.nbytes()


def test_row_groups_refuse_what_moves_rows(model):
  groups = RowGroups.of(3, 2, lambda rows: model.init_cache(rows, 8))
  for name, call in operations(groups).items():
    refused(OptionError, call, name, "row groups", "rows_at_once")
  refused(OptionError, lambda: groups.reset([0]), "reset", "rows_at_once")


def test_sessions_with_offloaded_layers_are_not_gathered(model):
  """The cache that a session has counts as one that is asked for."""
  for options in ({"cache_placement": "host"}, {}):
    session = rj.infer.Session(model, 16, **options)
    config = rj.infer.GenerateConfig().replace(keep="last")
    present = present_options(config, cache=session)
    assert present["cache_placement"] == bool(options)


def test_rows_of_offloaded_layers_begin_anew(model):
  """A row that was reset computes what it did at first."""
  tokens = np.arange(1, 9, dtype=np.int32).reshape(2, 4)
  seg = np.ones((2, 4), np.int32)
  empty = model.init_cache(2, 8, placement="host")
  first, cache = model(tokens, segment_ids=seg, cache=empty)
  cache = cache.reset([1])
  assert cache.length.tolist() == [4, 0]
  again, cache = model(tokens, segment_ids=seg, cache=cache)
  assert cache.length.tolist() == [8, 4]
  np.testing.assert_array_equal(again[1], first[1])


def test_marks_of_row_groups_are_checked(model):
  """Two documents in a row share positions, whichever group it is in."""
  kind = "fastgen:punctuation=5"
  empty = lambda rows: model.init_cache(rows, 16, kind=kind)
  tokens = np.ones((3, 4), np.int32)
  documents = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 2, 2]], np.int32)
  for cache in (empty(3), RowGroups.of(3, 2, empty)):
    call = lambda cache=cache: model(tokens, segment_ids=documents, cache=cache)
    refused(OptionError, call, "document 2 of a row", "punctuation=")


def test_scores_of_a_repetition_need_a_policy_that_repeats(model):
  """Other caches could not use them, and each group of rows needs its own."""
  empty = lambda rows: model.init_cache(rows, 64)
  scores = Repeated({}, np.ones(3, bool))
  for cache in (empty(3), RowGroups.of(3, 2, empty)):
    refused(OptionError, lambda c=cache: c.evict(scores), "repeated", "kvzip")
  repeating = lambda rows: model.init_cache(rows, 64, kind="kvzip")
  groups = RowGroups.of(3, 2, repeating)
  refused(OptionError, lambda: groups.evict(scores), "one group of rows")


def test_a_call_that_does_not_see_contexts_is_refused(model):
  """Under a trace too, where the number of their tokens is unknown."""
  tokens = np.arange(1, 9, dtype=np.int32)[None]
  _, contexts = model(tokens, cache=model.init_cache(1, 8))
  opened = model.init_cache(1, 16)
  cache = ContextCache(
    open=opened, kind=opened.kind, limit=24, contexts=contexts
  )
  attend = rj.models.ContextParallel()
  call = lambda cache: model(tokens, cache=cache, attend=attend)
  refused(OptionError, lambda: call(cache), "after 8 tokens", "attend=Cached")
  refused(OptionError, lambda: jax.jit(call)(cache), "after contexts")


def test_a_policy_that_looks_at_ids_gets_them(model):
  cache = model.init_cache(1, 32, kind="fastgen:punctuation=5")
  at = Coords(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32))
  call = lambda: cache.allocate(at, replicated=True, sees=True)
  refused(OptionError, call, "without token ids", "punctuation=")


@pytest.mark.parametrize("kind", ["snapkv", "dense:device=8,room=8"])
def test_a_part_that_is_full_is_said_to_need_room(model, kind):
  """A larger cache would not help: the part on the devices is full."""
  cache = model.init_cache(1, 256, kind=kind)
  tokens = cache.open.capacity + 1
  call = lambda c: c.check(1, tokens, replicated=True, sees=True)
  refused(PromptError, lambda: call(cache), f"with_room({tokens})")
  call(cache.with_room(tokens))


@pytest.mark.parametrize(
  "path", ["models/transformer.py", *sorted(
    f"nn/{path.name}" for path in (PACKAGE / "nn").glob("*.py")
  )],
)  # fmt: skip
def test_models_know_caches_by_their_base_class(path):
  """No class of storage, and no question which one a cache is."""
  for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
    if isinstance(node, ast.Name | ast.alias):
      name = node.id if isinstance(node, ast.Name) else node.name
      assert name not in STORAGE, f"{path}:{node.lineno}: {name}"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
      continue
    if node.func.id in ("isinstance", "getattr", "hasattr"):
      subject, kind = map(ast.unparse, node.args[:2])
      lawful = not subject.endswith("cache") or kind == "CallCache"
      assert lawful, f"{path}:{node.lineno}: {ast.unparse(node)}"
