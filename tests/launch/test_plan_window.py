"""launch.plan window plans what launch.generate --window runs."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest

from launch.shared import tensor_ranks
from ringjax.infer.tpi_llm import tensor_window
from ringjax.models import small
from ringjax.models.hf.folder import Folder
from ringjax.models.partition.tensor_shares import ModelShares
from ringjax.models.partition.window_layout import WindowLayout, rank_blocks
from ringjax.plan import files
from tests.infer.window_ranks import ranks
from tests.launch.test_plan import ask

NEW = 4
PROMPT = np.array([201, 17, 99, 250, 3, 77, 131], np.int32)


def live(shares, window, retain, monkeypatch):
  """The report of a run of as many ranks, and how often each read a block."""
  reports = []
  reads = [collections.Counter() for _ in shares]
  read = tensor_window._RankBlocks._read

  def counted(self, block):
    reads[self.rank][block] += 1
    return read(self, block)

  monkeypatch.setattr(tensor_window._RankBlocks, "_read", counted)
  with ranks(
    small.path(), shares, [window] * len(shares), retain=retain
  ) as group:
    group.window.generate([PROMPT], max_new_tokens=NEW, report=reports.append)
  assert not group.errors
  (report,) = reports
  return report, reads


@pytest.mark.long
@pytest.mark.parametrize(
  ("shares", "window", "retain"),
  [
    ((2, 1, 1), 2, 2),
    pytest.param((2, 1, 1), 2, None, marks=pytest.mark.long),
    pytest.param((1, 1, 1), 3, 3, marks=pytest.mark.long),
    pytest.param((5, 1, 0), 1, 2, marks=pytest.mark.long),
    pytest.param((2, 1, 1), None, 2, marks=pytest.mark.long),
  ],
)
def test_a_plan_reads_what_a_run_reads(
  shares, window, retain, tmp_path, monkeypatch
):
  report, reads = live(shares, window, retain, monkeypatch)
  log = tmp_path / "log.json"
  body = {"blocks": [tensor_ranks.blocks_of(one) for one in report.ranks]}
  files.write(str(log), tensor_ranks.LOG_FORMAT, body)
  flags = [
    "window", f"--model={small.path()}", "--processes=3", "--prompt=7",
    "--shares=" + ",".join(map(str, shares)), f"--window={window or 0}",
    f"--new={NEW}", "--json",
  ]  # fmt: skip
  if retain is not None:
    flags.append(f"--retain={retain}")
  ran = ask(*flags)
  assert ran.status == 0, ran.err
  for row, one, count in zip(
    ran.json["devices"], report.ranks, reads, strict=True
  ):
    assert row["block_bytes"] == list(one.block_bytes)
    assert row["kept"] == list(one.kept)
    order = [k for k, n in enumerate(one.block_bytes) if n]
    passing = [k for k in order if k not in row["kept"]]
    assert {k for k in order if count[k] == 1} == set(row["kept"])
    # What passes was read for each token, and of a next one what has room.
    ahead = [count[k] - NEW for k in passing]
    assert ahead == sorted(ahead, reverse=True) and set(ahead) <= {0, 1}
    assert sum(ahead) <= (window or 0)
    assert row["pass_bytes"] == sum(one.block_bytes[k] for k in passing)
    assert row["pass_bytes"] == one.pass_bytes
    assert NEW * row["pass_bytes"] <= one.bytes_read
    assert row["cache_bytes"] == one.cache_bytes
    assert row["blocks"] >= one.peak_blocks
  # By its measured seconds the plan is what the run's own simulation is.
  ran = ask(*flags, f"--measured={log}")
  assert ran.status == 0, ran.err
  assert ran.json["first_s"] is None
  simulated = report.simulated(passes=NEW)
  assert ran.json["token_s"] == pytest.approx(simulated.token_s, rel=1e-3)
  refusals = (
    ("--window=3", "--shares=1,2,1", "the run"),
    ("--window=3", "--disk_rate=1e9", "--disk_rate"),
  )
  for *other, words in refusals:
    ran = ask(*flags, f"--measured={log}", *other)
    assert ran.status == 2 and words in ran.err, ran.err


def test_a_config_has_the_blocks_of_its_folder():
  folder = Folder.open(small.path())
  shares = (3, 2, 1)
  stored = ModelShares(folder.config, shares, folder=folder)
  described = ModelShares(folder.config, shares, dtype=stored.dtype)
  for rank in range(3):
    for retain in (None, 2):
      both = [
        WindowLayout.of(rank_blocks(model, rank), 2, retain)
        for model in (stored, described)
      ]
      assert both[0] == both[1]
      read = both[0].pass_bytes
      assert (read < sum(both[0].nbytes)) == (retain is not None)
  heads = [rank_blocks(described, rank)[-1].name for rank in range(3)]
  assert heads[0] == "head" and "head" not in heads[1:]


def test_the_plan_has_no_embedding_but_a_head():
  # 2 x 128,256 x 8,192 numbers of float32 less one table.
  ran = ask(
    "window", "--model=llama-3.1-70b", "--dtype=float32", "--retain=4",
    "--disk_rate=1.3e9", "--prompt=32", "--processes=2", "--new=2", "--json",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  master, worker = ran.json["devices"][:2]
  table = 4 * 128_256 * 8192
  more = master["pass_bytes"] - worker["pass_bytes"]
  assert table < more < 1.01 * table
  # The first of four feedforwards stays, as it does when it runs.
  assert worker["kept"] == list(range(1, 160, 8))
  reads = master["pass_bytes"] / 1.3e9
  assert ran.json["token_s"] == pytest.approx(reads, rel=0.02)


def test_a_log_that_is_none_is_refused(tmp_path):
  path = tmp_path / "log.json"
  flags = (
    "window", f"--model={small.path()}", "--processes=2",
    f"--measured={path}",
  )  # fmt: skip
  assert ask(*flags).status == 2
  path.write_text(json.dumps({"format": "ringjax.window_log", "version": 1}))
  ran = ask(*flags)
  assert ran.status == 2 and "launch.generate --window" in ran.err
