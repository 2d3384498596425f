"""launch.bench train: wrong steps are not timed; memory is the compiler's."""

from __future__ import annotations

import importlib.util
import json

import jax
import numpy as np
import pytest

from benchmarks.model import train
from benchmarks.model.train import TrainBenchmark, TrainSettings
from ringjax.bench import one_device, timing
from ringjax.bench.one_device import ProcessorTime
from ringjax.errors import OptionError
from ringjax.models import checkpoint
from ringjax.train import recipe
from tests.train.test_step import CONFIG

SMALL = CONFIG | {"vocab_size": 512}
MINE = ("plain", "plain_remat", "ringjax", "ringjax_least", "striped")
PEERS = ("ringattention", "ringattention_one")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
  lines: list[str] = []
  path = tmp_path_factory.mktemp("bench") / "train.json"
  # The peer mixes dtypes and ranks, as its users' JAX lets it.
  with (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    found = TrainBenchmark.run(
      TrainSettings(
        preset=SMALL,
        tokens=(128,),
        rounds=1,
        devices=4,
        longest=2048,
        limit_bytes=64 << 20,
        local=256,
      ),
      json=str(path),
      say=lambda text: lines.extend(text.splitlines()),
    )
  assert json.loads(path.read_text()) == json.loads(json.dumps(found))
  return found, lines


@pytest.fixture
def here(monkeypatch):
  """Contestants on one device run in this process too."""
  monkeypatch.setattr(one_device, "useful", lambda: False)


def rows(found, part: str) -> list[dict]:
  return [row for row in found["rows"] if row["part"] == part]


@pytest.mark.slow
def test_steps_are_right_before_they_are_timed(measured):
  found, lines = measured
  (row,) = rows(found, "step")
  there = importlib.util.find_spec("ringattention") is not None
  for name in (*MINE, *(PEERS if there else ())):
    one = row["results"][name]
    assert one["reason"] is None and one["median_s"] > 0
    assert one["max_abs_difference"] < 1e-4
    assert one["devices"] == (4 if name in ("striped", "ringattention") else 1)
  for name in () if there else PEERS:
    assert "ringattention" in row["results"][name]["reason"]
  assert found["complete"]
  assert any(line.startswith("our best over plain:") for line in lines)


@pytest.mark.slow
def test_the_longest_row_is_found_by_doubling(measured):
  found, lines = measured
  by_name = {row["name"]: row for row in rows(found, "memory")}
  for name in MINE:
    row = by_name[name]
    sizes = {int(n): size for n, size in row["bytes_by_tokens"].items()}
    fit = [n for n, size in sizes.items() if size <= 64 << 20]
    assert row["longest"] == max(fit, default=0)
    assert list(sizes) == sorted(sizes)
    assert list(sizes.values()) == sorted(sizes.values())
  # Four heads of T x T numbers, and T x V.
  plain, ours = (by_name[n]["bytes_by_tokens"] for n in ("plain", "ringjax"))
  assert plain[1024] > 4 * 4 * 1024**2
  assert ours[1024] < plain[1024] / 2
  assert by_name["ringjax"]["longest"] == 2048
  assert by_name["ringjax"]["capped"] and not by_name["plain"]["capped"]
  assert any("2,048 tokens and more fit" in line for line in lines)


@pytest.mark.slow
def test_a_device_s_memory_as_devices_and_tokens_grow(measured):
  found, lines = measured
  scaled = rows(found, "scaling")
  sizes = [row["bytes_each"] for row in scaled]
  assert [row["tokens"] for row in scaled] == [256, 512, 1024]
  assert sizes[2] < 1.15 * sizes[1]
  for row in scaled:
    assert row["reason"] is None and row["median_s"] > 0
    assert len(row["seconds"]) == 1
  said = [line for line in lines if line.startswith("scaling")]
  assert len(said) == 3 and all("tokens/s" in line for line in said)


@pytest.mark.slow
def test_whose_loss_is_off_is_not_timed(monkeypatch, here):
  inner = train._loss
  monkeypatch.setattr(
    train,
    "_loss",
    lambda name, *rest, **more: (
      inner(name, *rest, **more) * (1.01 if name == "plain" else 1)
    ),
  )
  found = TrainBenchmark.run(
    TrainSettings(
      parts=("step",),
      preset=SMALL,
      tokens=(64,),
      contestants=("plain", "ringjax"),
      rounds=1,
    ),
    say=lambda line: None,
  )
  (row,) = rows(found, "step")
  assert row["results"]["plain"]["reason"].startswith("WRONG")
  assert row["results"]["ringjax"]["median_s"] > 0


@pytest.mark.long
def test_a_step_learns_and_lets_go_of_what_it_had():
  model = checkpoint.create(SMALL, seed=0)
  before = np.asarray(model.embed.weight[...])
  work, (loss, *_) = train._trial("ringjax", model, 32, 1)
  losses = [float(loss), *(float(work()) for _ in range(3))]
  # The same row again and again.
  assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
  # The other contestants begin with the same parameters.
  assert np.array_equal(model.embed.weight[...], before)


def test_memory_holds_the_moments_and_what_is_donated_once():
  params = checkpoint.abstract(SMALL, dtype="float32")
  size = sum(x.size * 4 for x in jax.tree.leaves(params))
  found = train._bytes("ringjax", SMALL, 16, 1)
  # Parameters, two moments and gradients; twice the first three is more.
  assert 3 * size < found < 6 * size


@pytest.mark.slow
def test_contestants_on_one_device_run_in_a_process_with_one():
  settings = TrainSettings(preset=SMALL, devices=2)
  bench = TrainBenchmark(settings)
  with bench.stack:
    work, found = bench.build("ringjax", 32, settings.devices)
    assert isinstance(work(), ProcessorTime)
    here, want = train._trial("ringjax", bench.model, 32, 1)
    assert not isinstance(here(), ProcessorTime)
    for a, b in zip(found, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    work, _ = bench.build("striped", 32, settings.devices)
    assert not isinstance(work(), ProcessorTime)


def memory(settings, monkeypatch, sizes):
  """The part of memory, where a contestant takes what `sizes` gives."""
  monkeypatch.setattr(train, "_bytes", lambda name, _, n, __: sizes(name, n))
  lines: list[str] = []
  found = TrainBenchmark.run(
    TrainSettings(
      parts=("memory",), preset=SMALL, devices=1, limit_bytes=8192, **settings
    ),
    say=lambda text: lines.extend(text.splitlines()),
  )
  return {row["name"]: row for row in found["rows"]}, found["summary"], lines


@pytest.mark.slow
def test_a_failure_at_a_length_keeps_the_shorter_rows_that_fit(monkeypatch):
  def sizes(name: str, tokens: int) -> int:
    if name == "plain" and tokens > 2048:
      raise RuntimeError("no more")
    if name == "plain_remat":
      raise RuntimeError("not at all")
    return tokens

  by_name, summary, lines = memory(
    dict(longest=1 << 20, contestants=("plain", "plain_remat", "ringjax")),
    monkeypatch,
    sizes,
  )
  assert by_name["plain"]["longest"] == 2048
  assert "no more" in by_name["plain"]["reason"]
  assert summary["longest"] == {"plain": 2048, "ringjax": 8192}
  (line,) = (x for x in lines if x.startswith("memory, plain "))
  assert "2,048 tokens fit" in line and "then RuntimeError: no more" in line
  assert lines[-1] == "longest row, ours over plain: 4x"
  assert not any("over plain_remat" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
  ("ours", "theirs", "words"),
  [
    (1, 4, "at least 2x"),
    pytest.param(8, 1, "at most 0.25x", marks=pytest.mark.slow),
    (1, 1, "unknown, both fit 4,096 tokens and more"),
    pytest.param(4, 8, "2x", marks=pytest.mark.slow),
  ],
)
def test_what_was_not_looked_at_is_said(ours, theirs, words, monkeypatch):
  each = {"ringjax": ours, "plain": theirs}
  _, _, lines = memory(
    dict(longest=4096, contestants=("plain", "ringjax")),
    monkeypatch,
    lambda name, tokens: each[name] * tokens,
  )
  assert lines[-1] == f"longest row, ours over plain: {words}"


@pytest.mark.slow
def test_the_part_of_the_peak_that_a_step_reaches(monkeypatch, here):
  """Of the work that the model asks for, in the dtype that is fast."""
  monkeypatch.setattr(timing, "peak", lambda dtype, device: 1e12)
  dtypes = []
  inner = train._trial

  def ready(name, model, tokens, devices, dtype):
    dtypes.append(dtype)
    if name == "striped":
      raise RuntimeError("no more")
    return inner(name, model, tokens, devices, dtype)

  monkeypatch.setattr(train, "_trial", ready)
  lines: list[str] = []
  found = TrainBenchmark.run(
    TrainSettings(
      parts=("utilisation",),
      preset=SMALL,
      tokens=(32,),
      contestants=("plain", "ringjax", "striped"),
      devices=2,
      rounds=1,
    ),
    say=lambda text: lines.extend(text.splitlines()),
  )
  assert dtypes == ["bfloat16"] * 2
  one, other = found["rows"]
  work = recipe.flops(checkpoint.abstract(SMALL), 32) * 32
  assert one["step_flops"] == pytest.approx(work)
  assert one["utilisation"] == pytest.approx(work / one["median_s"] / 1e12)
  assert other["utilisation"] is None and "no more" in other["reason"]
  assert found["summary"]["utilisation"] == {
    "ringjax": {"32": one["utilisation"]}
  }
  assert "% of 1.0 TFLOP/s" in lines[0] and "no more" in lines[1]


@pytest.mark.slow
def test_a_step_that_is_off_is_not_timed_as_devices_grow(monkeypatch, here):
  right = [np.ones(3)]
  ran = []
  monkeypatch.setattr(checkpoint, "create", lambda *_, **__: np.zeros(1))
  monkeypatch.setattr(train, "_bytes", lambda *_: 4 << 20)
  monkeypatch.setattr(
    train,
    "_trial",
    lambda name, model, tokens, devices, dtype: (
      lambda: ran.append(name),
      right if devices != 4 else [np.zeros(3)],
    ),
  )
  lines: list[str] = []
  found = TrainBenchmark.run(
    TrainSettings(
      parts=("scaling",), preset=SMALL, devices=4, rounds=2, local=64
    ),
    say=lambda text: lines.extend(text.splitlines()),
  )
  assert [row["devices"] for row in found["rows"]] == [1, 2, 4]
  assert [row["tokens"] for row in found["rows"]] == [64, 128, 256]
  assert ran == ["ringjax"] * 2 + ["striped"] * 2
  assert found["rows"][2]["median_s"] is None
  assert "1 MiB each; WRONG" in lines[2] and "tokens/s" in lines[1]


@pytest.mark.parametrize(
  "wrong",
  [{"parts": ("steps",)}, {"contestants": ()}, {"tokens": (0,)}],
)
def test_wrong_settings(wrong):
  with pytest.raises(OptionError, match=next(iter(wrong))):
    TrainSettings(**wrong)
