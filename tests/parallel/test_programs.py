"""What keeps compiled programs from taking all memory mappings."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.infer import prefill
from ringjax.models import tiny
from ringjax.parallel import programs

linux = pytest.mark.skipif(
  not pathlib.Path("/proc/self/maps").exists(), reason="Linux's files"
)


@pytest.fixture(scope="module")
def model():
  return rj.models.load(tiny.path())


def asked(model, tokens: int) -> np.ndarray:
  prompt = np.arange(tokens, dtype=np.int32)[None] + 1
  return rj.infer.generate(model, prompt, max_new_tokens=2).tokens


@linux
def test_mappings_are_counted():
  found = programs.mappings()
  assert found is not None and 0 < found <= programs.most_mappings()


@pytest.mark.slow
def test_programs_go_where_mappings_run_out(model, monkeypatch):
  """Answers stay, and a limit that is far changes nothing."""
  want = [asked(model, n) for n in (9, 33)]
  kept = prefill.read._cache_size()
  again = [asked(model, n) for n in (9, 33)]
  np.testing.assert_array_equal(again, want)
  assert prefill.read._cache_size() == kept >= 2

  counts = iter([6_000, 100])
  monkeypatch.setattr(programs, "mappings", lambda: next(counts))
  monkeypatch.setattr(programs, "most_mappings", lambda: 10_000)
  jax.jit(lambda x: x + len(counts.__class__.__name__))(np.float32(1))
  np.testing.assert_array_equal(asked(model, 9), want[0])
  assert prefill.read._cache_size() == 1


@pytest.mark.long
def test_all_caches_go_with_a_warning(model, monkeypatch):
  """Where others' programs take the mappings, the caller is told."""
  want = asked(model, 9)
  monkeypatch.setattr(programs, "mappings", lambda: 9_000)
  monkeypatch.setattr(programs, "most_mappings", lambda: 10_000)
  jax.jit(lambda x: x * 3)(np.float32(1))
  with pytest.warns(RuntimeWarning, match="vm.max_map_count"):
    got = asked(model, 9)
  np.testing.assert_array_equal(got, want)


@pytest.mark.long
def test_nothing_is_counted_where_nothing_was_compiled(model, monkeypatch):
  asked(model, 9)
  asked(model, 9)

  def never():
    raise AssertionError("counted")

  monkeypatch.setattr(programs, "mappings", never)
  asked(model, 9)
