"""Refusals in several processes, as the table of docs/clusters.md lists them.

Each row is refused by name. Here one process takes itself for two: refusals
come before anything is computed together.
"""

from __future__ import annotations

import functools
import pathlib
import re
import types

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import generate
from launch.shared import common, integer_flags
from ringjax.data import Bytes
from ringjax.eval.suites import asking
from ringjax.kv.cache_rows import on_host
from ringjax.serve import Engine, EngineGroup, Request, prefix_layout
from ringjax.serve import engine as engines
from ringjax.serve.request_fields import request_fields
from tests.helpers import refused
from tests.serve.conftest import BYTES_MODEL

ROOT = pathlib.Path(__file__).parents[2]
TOKENS = np.ones((8, 8), np.int32)


@functools.cache
def model():
  return rj.models.create(BYTES_MODEL, seed=0)


def engine(**options):
  sizes = dict(rows=1, capacity=32, longest=32, page=16, piece=16, pieces=1)
  return Engine(model(), **sizes | options)


def of_processes(monkeypatch):
  monkeypatch.setattr(engines, "processes_of", lambda mesh: (0, 1))


def spread(monkeypatch):
  """All arrays count as spread over processes."""
  array = type(jax.numpy.zeros(1))
  monkeypatch.setattr(array, "is_fully_addressable", False)


def contiguous_rows(monkeypatch):
  of_processes(monkeypatch)
  engine(layout="contiguous")


def parts_of_prefixes(monkeypatch):
  with rj.store.Store(host=1 << 20) as store:
    important = rj.serve.ImportantShare(share=0.5, segment=16)
    EngineGroup(engine(store=store, important=important))


def important_of_a_mesh(monkeypatch):
  mesh = rj.make_mesh((2,), ("seq",))
  with rj.store.Store(host=1 << 20) as store:
    placed = rj.models.place(model(), mesh)
    rj.infer.contexts.ImportantPrefixes(placed, store)


def store_without_a_group(monkeypatch):
  with rj.store.Store(host=1 << 20) as store:
    empty_engine = engine(store=store)
    of_processes(monkeypatch)
    empty_engine.submit(Request(prompt=[1], max_new_tokens=1))


def mask_functions(monkeypatch):
  request = Request(prompt=[1], max_new_tokens=1, mask=lambda *_: None)
  request_fields(request, np.ones(1, np.int32))


def pages_between_engines(monkeypatch):
  empty_engine = engine()
  spread(monkeypatch)
  prefix_layout(empty_engine)


def rows_to_the_host(monkeypatch):
  x = jax.numpy.zeros(1)
  spread(monkeypatch)
  on_host(x, "export")


def two_devices(monkeypatch):
  passed = ("--integer=DIR:devices=2", "--num_processes=2")
  integer_flags.reading(common.parse("generate", generate.define, passed))


def as_two(call):
  """A call in one of two processes."""

  def refusing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    call()

  return refusing


def residual_adapters():
  lora = rj.train.Lora(rank=2)
  coded = rj.models.with_coded_weights(model())
  rj.train.residual_adapters(lora, model(), coded, TOKENS)


def judged_tasks():
  suite = types.SimpleNamespace(judged=True)
  judge = types.SimpleNamespace(model="m")
  asking.suite_answers(model(), Bytes(), suite, judge=judge)


# By the words that the first cell of a row begins with: the call, and words of
# the error.
CASES = {
  "contiguous rows": (contiguous_rows, "layout: "),
  "part of stored prefixes": (parts_of_prefixes, "important: "),
  "`launch.generate --important`": (important_of_a_mesh, "on 2 devices"),
  "masks": (mask_functions, "mask: "),
  "a store": (store_without_a_group, "store: "),
  "pages between engines": (pages_between_engines, "several processes"),
  "rows of caches": (rows_to_the_host, "several processes"),
  "two devices": (two_devices, "--num_processes and devices=2"),
  "ranges": (
    as_two(lambda: rj.infer.activation_ranges(model(), TOKENS)),
    "2 processes",
  ),
  "codecs": (
    as_two(lambda: rj.kv.allocate_bits(model(), TOKENS, bits=4)),
    "processes: got 2",
  ),
  "residual adapters": (as_two(residual_adapters), "in 2 processes"),
  "predictors": (
    as_two(lambda: rj.train.train_predictors(model(), TOKENS)),
    "in 2 process",
  ),
  "training by rewards": (
    as_two(lambda: rj.rl.train(None, model(), None)),
    "in 2 processes",
  ),
  "judged tasks": (as_two(judged_tasks), "judge: got 2 processes"),
}


@functools.cache
def rows():
  """First cells of the table."""
  text = (ROOT / "docs" / "clusters.md").read_text()
  table = text.partition("## What several processes do not do\n")[2]
  table = table.partition("|---|---|---|\n")[2].partition("\n\n")[0]
  return [
    line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()
  ]


@pytest.mark.parametrize("words", CASES)
def test_each_row_is_refused_by_name(monkeypatch, unchecked, words):
  call, error = CASES[words]
  assert [x for x in rows() if x.startswith(words)], words
  refused(rj.errors.RingjaxError, lambda: call(monkeypatch), error)


def test_each_row_has_a_case():
  text = "|".join(map(re.escape, CASES))
  assert len(rows()) == len(CASES)
  assert all(re.match(text, row) for row in rows())
