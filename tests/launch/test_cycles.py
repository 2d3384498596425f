"""launch.plan cycles: what it asks for, prints and refuses.

What compiles stands aside.
"""

from __future__ import annotations

import json

import pytest

from launch.planning import cycles as scripts
from ringjax.errors import OptionError, message
from ringjax.plan.compiler import aot, cycles
from tests.launch.test_aot import answer
from tests.launch.test_plan import ask
from tests.plan.test_overlap import done, start, work


@pytest.fixture
def asked(monkeypatch):
  """What was counted; splash refuses v5p."""
  calls = []

  def count(builder, topology, options, **rest):
    calls.append((builder, topology, dict(options), rest))
    splash = "splash" in builder
    if splash and topology.startswith("v5p"):
      raise OptionError(message("program", "it", "another", "change it"))
    run = lambda bundles, matrix: cycles.BasicBlock(
      bundles=bundles, matrix_cycles=matrix, spills=0
    )
    work = run(4481 if splash else 4337, 4096)
    return (
      cycles.KernelTile(kernel="small", work=run(9000, 10), blocks=()),
      cycles.KernelTile(kernel="flash", work=work, blocks=(work,)),
    )

  monkeypatch.setattr(cycles, "count", count)
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  return calls


def test_a_row_for_each_chip_and_pass(asked):
  ran = ask("cycles", "--chips=v5e,v5p", "--nobackward")
  status, out, err = ran.status, ran.out, ran.err
  assert status == 0 and len(asked) == 4
  assert asked[0][:2] == ("ringjax.bench.tiles:ours", "v5e:1x1")
  assert asked[0][2]["what"] == "forward" and asked[0][2]["q_block"] == 1024
  assert "| v5e | forward | 4,337 | 4,096 | 4,481 | 4,096 | 0.97 |" in out
  assert "refused" in out and "v5p forward splash" in out
  assert "ours, forward, for v5e" in err


def test_json(asked):
  ran = ask(
    "cycles", "--json", "--chips=v6e", "--q_block=512", "--kv_block=256",
    "--head_dim=64", "--dtype=float32",
  )  # fmt: skip
  found = ran.json
  assert ran.status == 0 and len(found["rows"]) == 4
  assert (found["q_block"], found["kv_block"], found["head_dim"]) == (
    512,
    256,
    64,
  )
  assert found["rows"][0]["program"] == "flash"
  assert found["rows"][0]["cycles"] == 4337
  assert {row["what"] for row in found["rows"]} == {"forward", "backward"}
  assert found["note"] == scripts.NOTE


@pytest.mark.parametrize(
  ("given", "word"),
  [
    ("--chips=v9", "v9"),
    ("--chips=v4", "v4"),  # the kernel declines it
    ("--topology=v5e:2x4", "--topology"),
    ("--tokens=5", "--tokens"),
    ("--heads=4", "--heads"),
    ("--model=llama-3.1-8b", "--model"),
  ],
)
def test_what_it_refuses(asked, given, word):
  ran = ask("cycles", given)
  assert ran.status == 2 and word in ran.err and not asked


def test_its_flags_are_its_own():
  ran = ask("explain", "--chips=v5e")
  assert ran.status == 2 and "--chips" in ran.err


def test_decoding_beside_reading_and_xla_s_loops(monkeypatch):
  run = lambda bundles, matrix: cycles.BasicBlock(
    bundles=bundles, matrix_cycles=matrix, spills=0
  )
  runs = (run(900, 0), run(2059, 384), run(1097, 256))
  asked = []

  def count(builder, topology, options, **rest):
    asked.append((builder, options))
    return (cycles.KernelTile(kernel="decode", work=runs[1], blocks=runs),)

  def compile(builder, topology, options, **rest):
    asked.append((builder, options))
    # Work that is done 8 times, for two tiles of 64 MB.
    late = start("go"), done("come", "go"), work("w", int(
      1000 + 240000 * options["trips"]
    ))  # fmt: skip
    return answer(topology, {"tokens": 8}, late)

  monkeypatch.setattr(cycles, "count", count)
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  monkeypatch.setattr(aot, "compile", compile)
  ran = ask("cycles", "--what=decode", "--chips=v5e,v5p", "--kv_heads=8")
  assert ran.status == 0, ran.err
  assert "| v5e | 2.1 MB | 3,836 | 1,097 | 2,059 | 30,000 | 7.8 |" in ran.out
  # Two cores read two tiles at once.
  assert "| v5p | 2.1 MB | 2,655 | 1,097 | 2,059 | 60,000 | 22.6 |" in ran.out
  assert {builder for builder, _ in asked} == {"ringjax.bench.tiles:decode"}
  assert all(options["kv_heads"] == 8 for _, options in asked)


def test_codes_beside_the_keys_that_they_are_of(monkeypatch):
  run = lambda bundles: cycles.BasicBlock(
    bundles=bundles, matrix_cycles=256, spills=0
  )
  runs = (run(2063), run(1963))
  asked = []

  def count(builder, topology, options, **rest):
    asked.append(options)
    return (cycles.KernelTile(kernel="decode", work=runs[1], blocks=runs),)

  monkeypatch.setattr(cycles, "count", count)
  monkeypatch.setattr(scripts, "_loops", lambda *rest: 9000.0)
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  ran = ask("cycles", "--what=decode", "--chips=v5e", "--cache=int4", "--json")
  assert ran.status == 0, ran.err
  (row,) = ran.json["rows"]
  assert asked[0]["cache"] == ran.json["cache"] == "int4"
  # 896 keys of 8 heads: 72 bytes a key and a value, and 256 without a codec.
  assert row["bytes"] == 8 * 896 * 2 * 72
  assert row["plain"] == pytest.approx(row["reading"] * 256 / 72)
  assert row["share"] == pytest.approx(1963 / row["plain"])
  assert ask("cycles", "--cache=int4", "--chips=v5e").status == 2


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--what=train", "attention, decode, shared"),
    ("--heads=4", "--heads"),
    ("--tokens=64", "--tokens"),
  ],
)
def test_flags_that_would_not_be_followed(asked, flag, words):
  ran = ask("cycles", "--chips=v5e", flag)
  assert ran.status == 2 and words in ran.err and not asked
  assert ask("cycles", "--what=decode", "--q_block=128").status == 2
  assert ask("cycles", "--queries=3").status == 2


def test_pages_that_rows_share_beside_reading_them_apart(monkeypatch):
  asked = []

  def count(builder, topology, options, *, timeout_s):
    asked.append((builder.partition(":")[2], topology, options))
    work = cycles.BasicBlock(bundles=3000, matrix_cycles=10, spills=0)
    full = cycles.BasicBlock(bundles=2000, matrix_cycles=10, spills=0)
    names = {
      "pool": ("ringjax_decode_own.1", "ringjax_decode_shared.1"),
      "ragged": ("ragged_paged_attention_kernel.1",),
    }
    return tuple(
      cycles.KernelTile(
        kernel=name,
        work=work,
        # A full tile runs one branch, a tile with a mask the other.
        blocks=(full, work) if "own" in name else (work, work),
      )
      for name in names[asked[-1][0]]
    )

  monkeypatch.setattr(cycles, "count", count)
  monkeypatch.setattr(aot, "require", lambda: None)
  ran = ask("cycles", "--what=shared", "--chips=v5e", "--json")
  (row,) = json.loads(ran.out)["rows"]
  assert [name for name, *_ in asked] == ["pool", "ragged"]
  # Four tiles for all rows and one of each row; or five of each.
  assert row["together"] == 4 * 6000 + 32 * 3000
  # A full tile computes for fewer cycles than its keys take to arrive.
  assert row["apart"] == pytest.approx(32 * (4 * row["reading"] + 3000))
  assert row["ragged"] == 5 * 32 * 6000
  assert 3500 < row["reading"] < 4000
  assert ask("cycles", "--what=shared", "--cache=int4").status == 2
