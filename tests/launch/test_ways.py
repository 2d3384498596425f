"""launch.plan explain and fit: what is printed, written, refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.bench import machine as measuring
from ringjax.bench import timing
from ringjax.parallel import chips
from ringjax.parallel.chips import Link
from ringjax.plan import machines
from tests.launch.test_plan import ask

MAIN = ("--shards=8", "--tokens=65536", "--chip=h100")


@pytest.mark.smoke
def test_a_ranking():
  ran = ask("explain", *MAIN)
  assert ran.status == 0 and ran.err == ""
  for words in ("65,536 tokens", "8 (seq) h100", "declined", "NVLink"):
    assert words in ran.out
  record = ask("explain", *MAIN, "--json").json
  times = [one["seconds"] for one in record["predictions"]]
  assert times == sorted(times) and record["machine"] == "h100"
  assert record["call"]["axes"] == {"seq": 8}


def test_flags_reach_the_call():
  record = ask(
    "explain", "--shards=4,8", "--tokens=8192", "--chip=tpu-v5e", "--json",
    "--heads=16", "--kv_heads=2", "--head_dim=192", "--value_dim=128",
    "--batch=2", "--keys=65536", "--offset=57344", "--nobackward",
    "--window=4096", "--layout=striped", "--wire=int8", "--local=kernel",
    "--dtype=float32", "--packed", "--longest_document=9000",
  ).json  # fmt: skip
  call = record["call"]
  assert call["axes"] == {"groups": 4, "seq": 8}
  want = dict(batch=2, queries=8192, keys=65536, heads=16, kv_heads=2,
              head_dim=192, value_dim=128, dtype="float32", backward=False,
              offset=57344, wire="int8", longest_document=9000,
              local="kernel", layout="Striped(block=1)")  # fmt: skip
  assert {name: call[name] for name in want} == want
  for part in ("Causal", "Window", "SameSegment"):
    assert part in call["mask"]
  assert any("wire" in one["options"] for one in record["predictions"])


@pytest.mark.parametrize(
  "argv",
  [
    ("explain", "--tokens=64", "--chip=cpu"),
    ("explain", "--shards=8", "--chip=cpu"),
    ("explain", "--shards=8", "--tokens=64"),
    ("explain", "--shards=8", "--tokens=64", "--chip=abacus"),
    ("explain", "--shards=2,2,2", "--tokens=64", "--chip=cpu"),
    ("explain", "--shards=8", "--tokens=64", "--chip=none.json"),
    ("explain", *MAIN, "--ranks=4"),
    ("explain", *MAIN, "--out=x"),
    ("explain", *MAIN, "--heads=7"),
    ("kvr", "--shards=8"),
    ("kvr", "--mesh=seq:8"),
    ("fit",),
    ("fit", "--out=x.json", "--chip=cpu"),
    ("fit", "--out=x.json", "--tokens=64"),
    ("fit", "--out=x.json", "--dtype=text"),
  ],
)
def test_refusals(argv, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  ran = ask(*argv)
  assert ran.status == 2 and ran.out == "" and ran.err.startswith("plan: ")
  assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
  importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
def test_a_picture(tmp_path):
  path = tmp_path / "ways.png"
  ran = ask("explain", *MAIN, f"--plot={path}")
  assert ran.status == 0 and path.read_bytes()[:4] == b"\x89PNG"


def known_times(runs, rounds, *, on_run):
  """Runs everything once; says how long a machine that is known takes."""
  link = Link(bandwidth=1e10, latency_s=1e-5)
  pairs = lambda n: n**2 * 4 * 64
  found = {}
  for count, (label, run) in enumerate(runs.items()):
    on_run(count, label)
    jax.block_until_ready(run())
    seconds, (kind, *words) = 1e-4, label.split()
    if kind == "product":
      rate = {"float32": 1e11, "bfloat16": 2e11}[words[0]]
      seconds += 2 * int(words[1]) ** 3 / rate
    elif kind in ("forward", "both"):
      seconds += 2e-5 + 4 * pairs(int(words[0])) / 4e10
      if kind == "both":
        seconds += 2e-5 + 10 * pairs(int(words[0])) / 5e10
    elif kind == "copy":
      seconds += 32 * int(words[0]) / 2e10
    elif kind == "link":
      size, nbytes, times = (
        {"data": 2, "seq": 4}[words[0]],
        *map(int, words[2:]),
      )
      away = nbytes * (size - 1) / size
      seconds += (
        times
        * {
          "one": link.send_s(nbytes),
          "both": link.both_s(link.send_s(nbytes), link.send_s(nbytes)),
          "gather": link.gather_s(away, size),
          "exchange": link.exchange_s(away, size),
        }[words[1]]
      )
    found[label] = timing.Timing((seconds,) * rounds)
  return found


@pytest.mark.long
def test_the_devices_at_hand_are_measured_and_used(tmp_path, monkeypatch):
  monkeypatch.setattr(timing, "interleave", known_times)
  path = tmp_path / "here.json"
  ran = ask(
    "fit", f"--out={path}", "--mesh=seq:4", "--tokens=64,128",
    "--bytes=4096,65536", "--sides=64,128", "--rounds=2", "--name=here",
    "--json",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  made = rj.plan.machine(str(path))
  assert made == machines.read(str(path)) and made.name == "here"
  assert ran.json["machine"] == made.record()
  assert dict(made.chip.flops) == pytest.approx(
    {"float32": 1e11, "bfloat16": 2e11}
  )
  assert made.part("blockwise") == pytest.approx((0.4, 0.5))
  assert (made.hop_s, made.call_s) == pytest.approx((2e-5, 1e-4))
  assert made.chip.hbm_bandwidth == pytest.approx(2e10)
  link = made.link("seq")
  assert link.bandwidth == pytest.approx(1e10)
  assert link.latency_s == pytest.approx(1e-5) and link.ports == 2
  assert "4 cpu" in made.source.lower()
  used = ask("explain", "--shards=4", "--tokens=4096", f"--chip={path}")
  assert used.status == 0 and "4 (seq) here" in used.out


@pytest.mark.slow
def test_measured_times_make_a_machine(tmp_path):
  path = tmp_path / "here.json"
  ran = ask("fit", f"--out={path}")
  assert ran.status == 0 and "GFLOP/s" in ran.out, ran.err


def test_a_single_device_has_no_links_to_measure():
  mesh = rj.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
  with pytest.raises(rj.OptionError, match="mesh"):
    measuring.measure(mesh, name="one")


# ---------------------------------------------------------------------------
# From times to a machine
# ---------------------------------------------------------------------------


def test_a_line_through_times():
  x = [1e3, 1e4, 1e6]
  a, b = machines.line([(n, 2e-5 + n * 3e-9) for n in x])
  assert (a, b) == (pytest.approx(2e-5), pytest.approx(3e-9))
  # A start below nothing is none.
  a, b = machines.line([(1.0, 0.5), (2.0, 2.0)])
  assert a == 0.0 and 0.5 < b < 1.0
  rng = np.random.default_rng(0)
  noisy = [(n, (1e-4 + n * 1e-9) * rng.uniform(0.95, 1.05)) for n in
           np.geomspace(1e3, 1e8, 30)]  # fmt: skip
  a, b = machines.line(noisy)
  assert a == pytest.approx(1e-4, rel=0.05) and b == pytest.approx(
    1e-9, rel=0.05
  )
  for bad in ([(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)], [(1.0, 5.0), (9.0, 0.1)],
              [(1.0, 0.0), (2.0, 1.0)]):  # fmt: skip
    with pytest.raises(rj.OptionError):
      machines.line(bad)


@pytest.mark.parametrize(
  "link",
  [
    Link(bandwidth=1e10, latency_s=1e-5, ports=1),
    Link(bandwidth=1e10, latency_s=1e-5, ports=2),
    Link(bandwidth=1e10, latency_s=1e-5, ports=6),
  ],
  ids=repr,
)
def test_a_link_is_told_by_its_times(link):
  size, sizes = 8, (1e5, 1e6, 1e8)
  share = (size - 1) / size
  times = machines.LinkTimes(
    size=size,
    one_way=[(n, link.send_s(n)) for n in sizes],
    two_way=[(n, link.both_s(link.send_s(n), link.send_s(n))) for n in sizes],
    gather=[(share * n, link.gather_s(share * n, size)) for n in sizes],
    exchange=[(share * n, link.exchange_s(share * n, size)) for n in sizes],
  )
  found = machines.link_of(times)
  assert found.bandwidth == pytest.approx(1e10)
  assert found.latency_s == pytest.approx(1e-5)
  # Eight devices are two in each of three dimensions: a link in each, three
  # in all, which two dimensions come nearest to.
  assert found.ports == {1: 1, 2: 2, 6: 4}[link.ports]


@pytest.mark.parametrize("name", ["tpu-v5p", "gb200"])
def test_machines_in_files(tmp_path, name):
  path = str(tmp_path / "machine.json")
  made = chips.machine(name)
  by_axis = dataclasses.replace(made, links={"seq": made.link("seq")})
  for one in (made, by_axis):
    machines.write(path, one)
    assert machines.load(path) == one
  assert machines.load(name) == made
  body = json.loads((tmp_path / "machine.json").read_text())
  for key, value in (("links", 3), ("chip", {}), ("more", 1),
                     ("memory_share", 7), ("efficiency", "x")):  # fmt: skip
    (tmp_path / "bad.json").write_text(json.dumps(body | {key: value}))
    with pytest.raises(rj.CheckpointFormatError):
      machines.load(str(tmp_path / "bad.json"))
