"""launch.bench train: who is wrong is not timed; memory is the compiler's."""

from __future__ import annotations

import importlib.util
import json

import pytest

from ringjax.bench import train
from ringjax.errors import OptionError
from tests.train.test_step import CONFIG

SMALL = CONFIG | {"vocab_size": 512}
OTHERS = ("plain", "plain_remat", "ringjax", "striped")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
  lines: list[str] = []
  path = tmp_path_factory.mktemp("bench") / "train.json"
  found = train.run(
    train.Settings(
      preset=SMALL,
      tokens=(128,),
      rounds=1,
      devices=4,
      longest=2048,
      limit_bytes=64 << 20,
      local=512,
    ),
    json=str(path),
    say=lines.append,
  )
  assert json.loads(path.read_text()) == json.loads(json.dumps(found))
  return found, lines


def rows(found, part: str) -> list[dict]:
  return [row for row in found["rows"] if row["part"] == part]


@pytest.mark.slow
def test_steps_are_right_before_they_are_timed(measured):
  found, lines = measured
  (row,) = rows(found, "step")
  for name in OTHERS:
    one = row["results"][name]
    assert one["reason"] is None and one["median_s"] > 0
    assert one["max_abs_difference"] < 1e-4
  peer = row["results"]["ringattention"]
  if importlib.util.find_spec("ringattention") is None:
    assert "ringattention" in peer["reason"]
  assert found["complete"]
  assert any(line.startswith("our best over plain:") for line in lines)


@pytest.mark.slow
def test_the_longest_row_is_found_by_doubling(measured):
  found, _ = measured
  by_name = {row["name"]: row for row in rows(found, "memory")}
  for name in OTHERS:
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
  assert by_name["ringjax"]["longest"] > by_name["plain"]["longest"]


@pytest.mark.slow
def test_a_device_s_memory_as_devices_and_tokens_grow(measured):
  found, _ = measured
  sizes = [row["bytes_each"] for row in rows(found, "scaling")]
  assert [row["tokens"] for row in rows(found, "scaling")] == [512, 1024, 2048]
  assert sizes[2] < 1.15 * sizes[1]


def test_whose_loss_is_off_is_not_timed(monkeypatch):
  inner = train._loss
  monkeypatch.setattr(
    train,
    "_loss",
    lambda name, *rest: inner(name, *rest) * (1.01 if name == "plain" else 1),
  )
  found = train.run(
    train.Settings(
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


@pytest.mark.parametrize(
  "wrong",
  [{"parts": ("steps",)}, {"contestants": ()}, {"tokens": (0,)}],
)
def test_wrong_settings(wrong):
  with pytest.raises(OptionError, match=next(iter(wrong))):
    train.Settings(**wrong)
