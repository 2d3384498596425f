"""launch.prefill: methods side by side, in one process and in several."""

from __future__ import annotations

import functools
import json
import signal
import socket

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import prefill
from launch.shared.group import FAILED
from ringjax import plan
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from ringjax.plan import profiles
from tests.helpers import script

read = functools.partial(script, prefill)

PATIENCE_S = 600


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--method=kvr,tps",), "--method"),
    (("--method=tsp", "--partition=1024,1024"), "--partition without kvr"),
    (("--partition=1024,1023",), "add up to 2048"),
    (("--partition=1024,0,1024",), "partition"),
    (("--partition=1024,half",), "want ints"),
    (("--partition=1024,1024", "--search"), "--partition and --search"),
    (("--preset=llama-100m", "--model=x"), "--preset and --model"),
    (("--delay=one:2",), "RANK:SECONDS"),
    (("--timeout=0",), "--timeout"),
    (("--context=64", "--mesh=data:2,seq:2"), "all devices along seq"),
    (("--context=64", "--model=/nowhere"), "/nowhere"),
    (("--context=64", "--delay=0:1"), "--delay: got one process"),
    (("--chunks=4",), "--chunks without cpp"),
    (("--context=64", "--method=cpp"), "cpp in one process"),
  ],
)
def test_wrong_flags(argv, words):
  status, out, err = read(*argv)
  assert status == 2
  assert out == ""
  assert words in err
  assert "Traceback" not in err


@pytest.mark.long
def test_one_process(folder):
  status, out, err = read(
    "--method=kvr,kvr_even,flash_tsp",
    f"--model={folder}",
    "--context=96",
    "--partition=56,40",
    "--mesh=seq:2",
    "--rounds=1",
    "--json",
  )
  assert status == 0, err
  done = json.loads(out)
  rows = {row["method"]: row for row in done["methods"]}
  assert list(rows) == ["kvr", "kvr_even", "flash_tsp"]
  assert rows["kvr"]["partition"] == [56, 40]
  assert rows["kvr_even"]["partition"] == [48, 48]
  assert len({tuple(row["new_tokens"]) for row in rows.values()}) == 1
  # Two layers, two kv heads of 8 numbers, keys and values, float32.
  assert rows["kvr"]["bytes_by_link"] == {"0-1": 56 * 2 * 2 * 8 * 2 * 4}
  assert "first token" in err


def argv(folder: str, port: int, rank: int, *more: str) -> list[str]:
  return [
    "-m",
    "launch.prefill",
    f"--model={folder}",
    "--context=96",
    f"--coordinator=localhost:{port}",
    "--num_processes=2",
    f"--process_id={rank}",
    *more,
  ]


def port() -> int:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return free.getsockname()[1]


# launch.generate has its like on every commit.
@pytest.mark.slow
def test_two_processes(folder, start, tmp_path):
  pytest.importorskip("matplotlib")
  at, plot = port(), tmp_path / "timeline.png"
  more = ("--method=kvr,kvr_even,tsp", "--partition=56,40", "--rounds=1",
          "--max_new_tokens=4", "--json", f"--plot={plot}")  # fmt: skip
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    other, _ = second.communicate(timeout=PATIENCE_S)
  assert (first.returncode, second.returncode) == (0, 0), err
  assert other == ""
  done = json.loads(out)
  rows = {row["method"]: row for row in done["methods"]}
  assert done["processes"] == 2
  kvr, even, tsp = rows["kvr"], rows["kvr_even"], rows["tsp"]
  assert len(kvr["new_tokens"]) == 4
  assert kvr["new_tokens"] == even["new_tokens"]
  assert kvr["new_tokens"][:1] == tsp["new_tokens"]
  assert kvr["pairs_by_rank"] == [56 * 28.0, 40 * (56 + 20.0)]
  assert kvr["bytes_by_link"] == {"0-1": 56 * 2 * 2 * 8 * 2 * 4}
  assert all(row["seconds"] > 0 for row in rows.values())
  assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_pipeline_of_two_processes(folder, start):
  at = port()
  more = ("--method=kvr,cpp", "--chunks=3", "--rounds=1", "--json",
          "--max_new_tokens=4")  # fmt: skip
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    second.communicate(timeout=PATIENCE_S)
  assert (first.returncode, second.returncode) == (0, 0), err
  rows = {row["method"]: row for row in json.loads(out)["methods"]}
  assert rows["cpp"]["new_tokens"] == rows["kvr"]["new_tokens"]
  assert len(rows["cpp"]["partition"]) == 3
  assert sum(rows["cpp"]["partition"]) == 96
  # Activations of 96 tokens, in place of keys and values of two layers.
  (sent,) = rows["cpp"]["bytes_by_link"].values()
  assert sent % (96 * 4) == 0


@pytest.mark.slow
@pytest.mark.parametrize("new", [1, 4])
def test_a_pipeline_alone_loads_a_part_in_each_process(folder, start, new):
  at = port()
  more = ("--method=cpp", "--rounds=1", "--json", f"--max_new_tokens={new}")
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    second.communicate(timeout=PATIENCE_S)
  assert (first.returncode, second.returncode) == (0, 0), err
  done = json.loads(out)
  (row,) = done["methods"]
  model = rj.models.load(folder)
  nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  layer, table = nbytes(model.stack) // 2, nbytes(model.embed)
  last = nbytes(model) if new > 1 else layer + table + nbytes(model.norm)
  assert row["weight_bytes_by_rank"] == [layer + table, last]
  tokenizer = Tokenizer.load(folder)
  text = documents.fit(96 + 256, lambda x: len(tokenizer.encode(x))).text
  ids = np.asarray(tokenizer.encode(text))[:96].astype(np.int32)
  expected = rj.infer.generate(model, [ids], max_new_tokens=new)[0].tolist()
  assert row["new_tokens"] == expected


@pytest.mark.long
def test_processes_that_do_not_agree(folder, start):
  at = port()
  with (
    start(*argv(folder, at, 0, "--partition=56,40")) as first,
    start(*argv(folder, at, 1, "--partition=40,56")) as second,
  ):
    for one in (first, second):
      out, err = one.communicate(timeout=PATIENCE_S)
      assert one.returncode == 2
      assert out == ""
      assert "--partition: got 40,56 in process 1" in err
      assert "Traceback" not in err


@pytest.mark.slow
def test_a_process_that_is_stuck(folder, start):
  at = port()
  more = ("--delay=1:100000", "--timeout=2")
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == FAILED
    assert "rank 1 is stuck" in err and "reading by kvr" in err
    _, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == FAILED
    assert "given up by rank 0" in err
  assert out == ""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kvr", "tsp", "cpp"])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_process_that_dies(folder, start, dying, method):
  at = port()
  more = (f"--delay={dying}:100000", "--timeout=1000", f"--method={method}")
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    # The first one says when it begins.
    assert first.stderr is not None
    for line in first.stderr:
      if line.startswith("reading ..."):
        break
    running = [first, second]
    # Both are in the first run, or about to be.
    with pytest.raises(Exception, match="timed out"):
      running[1 - dying].wait(15)
    running[dying].send_signal(signal.SIGKILL)
    _, err = running[1 - dying].communicate(timeout=PATIENCE_S)
  assert f"rank {dying} is gone" in err
  # Where the coordinator died JAX may end it first, once that has been said.
  assert running[1 - dying].returncode in (FAILED, -6)


# ---------------------------------------------------------------------------
# Chosen and searched
# ---------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path, monkeypatch) -> str:
  """A profile of two layers, by name."""
  monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
  made = plan.Profile(
    name="two",
    model="made",
    hardware="none",
    layers=2,
    token_s=1e-6,
    pair_s=1e-7,
    kv_bytes=64,
  )
  profiles.store(made)
  return made.name


@pytest.mark.parametrize(
  ("bandwidth", "chosen"),
  [pytest.param(1e12, "striped", marks=pytest.mark.slow), (1e6, "kvr")],
)
def test_auto(folder, profile, bandwidth, chosen):
  status, out, err = read(
    "--method=auto",
    f"--profile={profile}",
    f"--bandwidth={bandwidth}",
    f"--model={folder}",
    "--context=96",
    "--mesh=seq:2",
    "--rounds=1",
    "--json",
  )
  assert status == 0, err
  (row,) = json.loads(out)["methods"]
  assert row["method"] == chosen
  assert "one rank decodes: a chain leaves the keys there" in err
  assert "kvr: " in err and "striped: " in err


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("--method=auto",), "--method=auto without --profile"),
    (("--method=auto", "--search"), "--method=auto with --search"),
    (("--method=auto,kvr", "--profile=two"), "auto"),
    (("--bandwidth=1e9",), "--bandwidth without --profile"),
    (("--method=auto", "--profile=none"), "none"),
    (("--method=auto", "--profile=llama7b-a100"), "32 layers"),
  ],
)
def test_wrong_flags_of_auto(folder, profile, argv, words):
  more = (f"--model={folder}", "--context=64", "--mesh=seq:2")
  status, out, err = read(*argv, *more)
  assert (status, out) == (2, "")
  assert words in err and "Traceback" not in err


@pytest.mark.slow
def test_all_methods_with_a_searched_partition(folder):
  status, out, err = read(
    "--method=all",
    "--search",
    f"--model={folder}",
    "--context=64",
    "--mesh=seq:2",
    "--rounds=1",
    "--json",
  )
  assert status == 0, err
  rows = {row["method"]: row for row in json.loads(out)["methods"]}
  assert tuple(rows) == prefill.METHODS
  assert len({tuple(row["new_tokens"]) for row in rows.values()}) == 1
  first, second = rows["kvr"]["partition"]
  assert f"({first}, {second}): " in err and first + second == 64


@pytest.mark.slow
def test_the_last_device_continues(folder):
  status, out, err = read(
    "--method=kvr,ring",
    f"--model={folder}",
    "--context=64",
    "--mesh=seq:4",
    "--rounds=1",
    "--max_new_tokens=6",
    "--json",
  )
  assert status == 0, err
  kvr, ring = json.loads(out)["methods"]
  assert len(kvr["new_tokens"]) == 6
  assert kvr["new_tokens"][:1] == ring["new_tokens"]


@pytest.mark.slow
def test_a_search_by_measuring(folder, start):
  at = port()
  more = ("--search", "--rounds=1", "--json")
  with (
    start(*argv(folder, at, 0, *more)) as first,
    start(*argv(folder, at, 1, *more)) as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    second.communicate(timeout=PATIENCE_S)
  assert (first.returncode, second.returncode) == (0, 0), err
  (row,) = json.loads(out)["methods"]
  assert sum(row["partition"]) == 96 and len(row["partition"]) == 2
  # Each level of the search is told with its partition and its time.
  assert "(" in err and " s\n" in err.replace("\r", "\n")
