"""launch.generate over processes that each have a part of every layer."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import time

import numpy as np
import pytest

import ringjax as rj
from launch import generate
from launch.shared import common, tensor_ranks
from ringjax.data import Tokenizer
from ringjax.models import small
from ringjax.parallel import gpu_processes
from tests.launch.conftest import PATIENCE_S, command

SECRET = "quince 71305 and nobody else"


@pytest.mark.parametrize(
  ("flags", "wanted"),
  [
    (["--shares=1,2"], "--shares without --window"),
    (["--log=x.json"], "--log without --window"),
    (["--window=2", "--mesh=seq:2"], "--mesh with --window"),
    (["--processes=2", "--placement=disk"], "--placement with --window"),
    (["--processes=2", "--speculate=lookup"], "--speculate with"),
    (["--window=-1"], "a number of blocks"),
    (["--processes=0"], "--processes"),
    (["--processes=2", "--shares=1,2,3"], "2 numbers"),
    (["--processes=2", "--shares=1,x"], "2 numbers"),
    (["--processes=2", "--shares=0,0"], "the sum"),
    (["--window=2", "--shares=1,1"], "--shares without --processes"),
    (["--window=2", "--coordinator=a:1"], "pass all three"),
    (
      ["--processes=2", "--coordinator=a:1", "--process_id=1"],
      "--processes and --coordinator",
    ),
    (
      [
        "--window=2",
        "--coordinator=a:1",
        "--num_processes=2",
        "--process_id=1",
      ],
      "--key_file",
    ),
    (["--processes=1", "--adapter=DIR"], "--adapter with --window"),
    (["--processes=2", "--retain=0"], "--retain"),
    (["--processes=2", "--patience=0"], "--patience"),
  ],
)
def test_flags_that_do_not_go_together(ask, flags, wanted):
  ran = ask("--prompt=x", *flags)
  assert ran.status == 2 and not ran.out
  assert wanted in ran.err


def test_each_rank_sees_a_gpu_of_its_own(tmp_path):
  for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl"):
    (tmp_path / name).touch()
  gpus = lambda **said: gpu_processes.visible_gpus(said, str(tmp_path))
  assert gpus() == ("0", "1", "2", "10")
  assert gpus(CUDA_VISIBLE_DEVICES="3, GPU-ab") == ("3", "GPU-ab")
  assert gpus(CUDA_VISIBLE_DEVICES="") == gpus(JAX_PLATFORMS="cpu") == ()
  assert gpus(JAX_PLATFORMS="cuda,cpu") == gpus()
  of = lambda size, gpus: [
    gpu_processes.gpu_variables(rank, size, gpus) for rank in range(size)
  ]
  key = "CUDA_VISIBLE_DEVICES"
  assert of(3, ("4", "5", "7")) == [{key: "4"}, {key: "5"}, {key: "7"}]
  shared = of(3, ("4", "5"))
  assert [x[key] for x in shared] == ["4", "5", "4"]
  assert {x["XLA_PYTHON_CLIENT_PREALLOCATE"] for x in shared} == {"false"}
  assert of(2, ()) == [{}, {}]


def test_weights_that_stay_are_not_read_in_each_pass():
  of = lambda window: tensor_ranks.reading_text(window, 1.5, str)
  assert of(4) == "a pass reads for 1.5"
  assert of(0) == of(None) == "all weights were read once, for 1.5"


def test_flags_of_other_ranks_have_nothing_of_the_prompt(folder):
  values = common.parse(
    "generate",
    generate.define,
    [
      f"--model={folder}",
      f"--prompt={SECRET}",
      "--system=x",
      "--window=3",
      "--seed=4",
      "--stop=quince",
      "--patience=7",
    ],
  )
  found = tensor_ranks.worker_flags(values, pathlib.Path(folder), 123, 1, 3)
  again = common.parse("generate", generate.define, found)
  assert (again.window, again.process_id, again.num_processes) == (3, 1, 3)
  assert again.patience == 7 and again.coordinator == "127.0.0.1:123"
  given = ("prompt", "prompt_file", "system", "seed", "stop", "temperature")
  assert not any(again[name].present for name in given)
  assert not [x for x in found if "quince" in x]


@pytest.mark.slow
def test_one_process_streams_a_window(ask, folder):
  want = json.loads(
    ask(f"--model={folder}", f"--prompt={SECRET}", "--max_new_tokens=5",
        "--json", "--mesh=seq:1").out
  )  # fmt: skip
  ran = ask(f"--model={folder}", f"--prompt={SECRET}", "--max_new_tokens=5",
            "--window=2", "--json")  # fmt: skip
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  assert done["tokens"] == want["tokens"]
  (rank,) = done["ranks"]
  assert rank["peak_blocks"] == 2 and rank["sent_bytes"] == 0
  assert "simulated by its measured parts" in ran.err


@pytest.mark.long
def test_three_processes_answer_as_one(ask, tmp_path, monkeypatch):
  prompt = SECRET * 2
  model = rj.models.load(small.path())
  ids = Tokenizer.load(small.path()).encode(prompt)
  want = rj.infer.generate(model, [np.asarray(ids, np.int32)], max_new_tokens=6)
  empty = tmp_path / "empty"
  empty.mkdir()
  monkeypatch.setenv("TMPDIR", str(empty))
  ran = ask(
    f"--model={small.path()}",
    f"--prompt={prompt}",
    "--raw",
    "--processes=3",
    "--shares=3,2,1",
    "--window=3",
    "--max_new_tokens=6",
    f"--log={tmp_path}/log.json",
    "--json",
  )
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  new = done["tokens"]
  assert new == want[0][: len(new)].tolist()
  assert [r["rank"] for r in done["ranks"]] == [0, 1, 2]
  assert all(1 <= r["peak_blocks"] <= 3 for r in done["ranks"])
  log = json.loads((tmp_path / "log.json").read_text())
  assert log["format"] == "ringjax.window_log" and len(log["events"]) == 3
  for events in log["events"]:
    kinds = {kind for kind, *_ in events}
    assert kinds == {"read", "disk", "peers", "compute"}
    assert all(start <= end for _, _, start, end in events)
  assert log["simulated"]["token_s"] > 0
  assert {x.name for x in tmp_path.iterdir()} == {"empty", "log.json"}
  assert not list(empty.iterdir())


def children(pid: int) -> list[int]:
  """The processes that a process has started, by Linux."""
  found = []
  for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
    # A thread may end meanwhile.
    with contextlib.suppress(OSError):
      found += [int(x) for x in (task / "children").read_text().split()]
  return found


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc")
def test_a_killed_process_is_named_and_none_is_left():
  with command(
    "-m", "launch.generate", f"--model={small.path()}", f"--prompt={SECRET}",
    "--raw", "--processes=3", "--window=2", "--max_new_tokens=8000",
  ) as process:  # fmt: skip
    # The answer has begun.
    assert process.stdout is not None and process.stdout.read(1)
    ranks = children(process.pid)
    named = {}
    for pid in ranks:
      argv = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
      assert b"quince" not in argv
      (number,) = (
        x.partition(b"=")[2]
        for x in argv.split(b"\0")
        if x.startswith(b"--process_id")
      )
      named[int(number)] = pid
    assert set(named) == {1, 2}
    os.kill(named[2], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    assert "rank 2 closed the connection" in err and "answering" in err
    assert SECRET not in out + err
  end = time.monotonic() + PATIENCE_S
  while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
    assert time.monotonic() < end
    time.sleep(0.1)
