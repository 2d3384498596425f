"""Profiles: those that are stated, those that a user stores, and fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringjax.errors import CheckpointFormatError, OptionError
from ringjax.plan import fit, profiles
from ringjax.plan.cost import KERNELS
from ringjax.plan.fit import TimedCall

A100 = profiles.STATED["llama7b-a100"]
MINE = dataclasses.replace(A100, name="mine", source="measured")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
  return tmp_path / "data" / "ringjax" / "profiles"


@pytest.mark.smoke
def test_the_stated_profile_is_one_gpu_of_the_paper():
  assert profiles.load("llama7b-a100") is A100
  published = {1: 0.10, 2: 0.24, 4: 0.65, 8: 1.95, 12: 3.95}
  for k, want in published.items():
    n = 1024 * k
    ours = A100.token_s * n + A100.pair_s * n * n
    assert abs(ours - want) < 0.016
  assert A100.kv_bytes == 16384 and A100.layers == 32


def test_siblings_are_scaled():
  gqa = profiles.load("llama7b-gqa8-a100")
  mqa = profiles.load("llama7b-mqa-a100")
  assert (gqa.kv_bytes, mqa.kv_bytes) == (4096, 512)
  assert mqa.token_s < gqa.token_s < A100.token_s
  assert mqa.pair_s == gqa.pair_s == A100.pair_s
  assert math.isclose(
    profiles.load("llama13b-a100").pair_s / A100.pair_s, 1.5625
  )
  for name in profiles.STATED:
    assert profiles.load(name).name == name
    if name != A100.name:
      assert "not measured" in profiles.load(name).source


def test_store_and_load(home):
  path = profiles.store(MINE)
  assert path == str(home / "mine.json")
  assert profiles.load("mine") == profiles.load(path) == MINE
  assert "mine" in profiles.names() and "llama7b-a100" in profiles.names()
  again = dataclasses.replace(MINE, token_s=1.0)
  profiles.store(again)
  assert profiles.load("mine") == again
  assert os.listdir(home) == ["mine.json"]


def test_without_the_variable(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  for value in ("", "relative/path"):
    monkeypatch.setenv("XDG_DATA_HOME", value)
    want = tmp_path / ".local" / "share" / "ringjax" / "profiles"
    assert profiles.folder() == str(want)
  assert profiles.names() == tuple(sorted(profiles.STATED))


def test_a_name_that_nobody_has():
  with pytest.raises(OptionError, match="llama7b-a100"):
    profiles.load("nobody")
  with pytest.raises(OptionError, match=r"none\.json"):
    profiles.load("none.json")


@pytest.mark.parametrize(
  "name", ["", "../up", "a b", ".hidden", "x" * 65, "llama7b-a100", "a\n"]
)
def test_names_that_cannot_be_stored(name):
  with pytest.raises(OptionError, match="name"):
    profiles.store(dataclasses.replace(A100, name=name))


def test_a_folder_that_is_a_file(home):
  home.parent.mkdir(parents=True)
  home.touch()
  with pytest.raises(OptionError, match="file"):
    profiles.store(MINE)


@pytest.mark.parametrize(
  "change",
  [
    {"token_s": -1.0},
    {"token_s": "1"},
    {"token_s": None},
    {"token_s": True},
    {"token_s": [1]},
    {"token_s": math.inf},
    {"layers": 1.5},
    {"layers": 0},
    {"kernel": "sparse"},
    {"kernel": 5},
    {"early": 2},
    {"model": 5},
    {"more": 1},
    {"format": "ringjax.kvr-table"},
    {"version": 9},
  ],
)
def test_files_that_are_no_profiles(change, home):
  path = profiles.store(MINE)
  with open(path) as file:
    good = json.load(file)
  with open(path, "w") as file:
    json.dump({**good, **change}, file)
  with pytest.raises(CheckpointFormatError) as caught:
    profiles.load("mine")
  assert len(str(caught.value)) < 400 and "mine.json" in str(caught.value)


def test_a_profile_with_a_field_less(home):
  path = profiles.store(MINE)
  with open(path) as file:
    good = json.load(file)
  del good["pair_s"]
  with open(path, "w") as file:
    json.dump(good, file)
  with pytest.raises(CheckpointFormatError, match="pair_s"):
    profiles.load("mine")


# ---------------------------------------------------------------------------
# Fits
# ---------------------------------------------------------------------------

POINTS = [(n, p) for p in (0, 2048) for n in (256, 512, 1024)]


def samples(a, b, c, kernel, wobble=0.0):
  made = fit.Fit(token_s=a, pair_s=b, fixed_s=c, kernel=kernel, error=0.0)
  return [
    TimedCall(
      tokens=n,
      before=p,
      seconds=made.seconds(n, p) * (1 + wobble * (-1) ** i),
    )
    for i, (n, p) in enumerate(POINTS)
  ]


@pytest.mark.smoke
@given(
  st.floats(1e-6, 1e-3),
  st.floats(1e-10, 1e-7),
  st.floats(1e-4, 1e-1),
  st.sampled_from(KERNELS),
)
def test_a_fit_finds_what_was_planted(a, b, c, kernel):
  found = fit.fit(samples(a, b, c, kernel))
  assert found.error < 1e-6
  for n, p in POINTS:
    want = fit.Fit(token_s=a, pair_s=b, fixed_s=c, kernel=kernel, error=0.0)
    assert math.isclose(found.seconds(n, p), want.seconds(n, p), rel_tol=1e-6)


def test_a_fit_tells_the_kernel():
  for kernel in KERNELS:
    found = fit.fit(samples(1e-5, 1e-8, 1e-3, kernel))
    assert found.kernel == kernel
    assert math.isclose(found.token_s, 1e-5, rel_tol=1e-6)
    assert math.isclose(found.pair_s, 1e-8, rel_tol=1e-6)
    assert math.isclose(found.fixed_s, 1e-3, rel_tol=1e-6)


def test_a_fit_of_noisy_times():
  found = fit.fit(samples(1e-5, 1e-8, 1e-3, "dense", wobble=0.03))
  assert 0.005 < found.error < 0.06
  assert math.isclose(found.pair_s, 1e-8, rel_tol=0.2)


def test_no_coefficient_is_negative():
  # A call that gets cheaper by the token has no fixed cost below zero.
  data = [
    TimedCall(tokens=n, before=p, seconds=1e-6 * n**1.5 + 1e-9 * n * p)
    for n, p in POINTS
  ]
  found = fit.fit(data)
  assert min(found.token_s, found.pair_s, found.fixed_s) == 0.0


@pytest.mark.parametrize(
  "data",
  [
    [],
    [TimedCall(tokens=5, before=0, seconds=1.0)] * 2,
    [TimedCall(tokens=5, before=0, seconds=1.0)] * 9,
    [TimedCall(tokens=n, before=0, seconds=0.0) for n in (1, 2, 3, 4)],
    [TimedCall(tokens=n, before=p, seconds=1 / n) for n, p in POINTS],
  ],
)
def test_samples_that_tell_nothing(data):
  with pytest.raises(OptionError, match="samples"):
    fit.fit(data)


@pytest.mark.parametrize(
  "wrong",
  [
    dict(tokens=0, before=0, seconds=1.0),
    dict(tokens=1, before=-1, seconds=1.0),
    dict(tokens=1, before=0, seconds=math.nan),
  ],
)
def test_samples_that_are_none(wrong):
  with pytest.raises(OptionError):
    TimedCall(**wrong)
