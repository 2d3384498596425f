"""launch.plan aot and capacity: what they ask for, print and refuse.

What compiles stands aside: the answers here are schedules written by hand.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import threading

import pytest

import ringjax as rj
from launch.planning import aot as scripts
from launch.planning import capacity
from launch.shared import common
from ringjax.bench import ways
from ringjax.errors import OptionError
from ringjax.parallel import chips
from ringjax.plan.compiler import aot, overlap
from ringjax.plan.compiler.time_range import time_range
from tests.launch.test_plan import ask
from tests.plan.test_overlap import HIDDEN, done, program, start, work

LATE = (start("go"), done("come", "go"), work("w", 2000))
STEP = (
  "aot", "--model=llama-3.1-8b", "--topology=v5e:2x4", "--tokens=65536",
)  # fmt: skip


def answer(topology, options, body=HIDDEN, need=1 << 30):
  core = chips.core(topology)
  fits = need <= core.hbm_bytes
  memory = aot.Memory(
    arguments=need - 3000, outputs=2000, aliased=1000, temporaries=1500,
    code=500, limit=core.hbm_bytes,
  )  # fmt: skip
  text = program(*body)
  report = overlap.check(text, core)
  facts = {
    "mesh": {"seq": 8}, "tokens": options["tokens"], "what": "train",
    "strategy": options.get("strategy", "striped"), "remat": "attention",
    "model_flops": 1e9, "optimizer": "adamw",
  }  # fmt: skip
  return aot.Compiled(
    topology=topology,
    devices=8,
    fits=fits,
    memory=memory if fits else None,
    needed_bytes=need,
    limit_bytes=core.hbm_bytes,
    largest=()
    if fits
    else (aot.Buffer(nbytes=need // 2, shape="f32[4,5]", source="jit(f)/dot"),),
    report=report if fits else None,
    trace_s=1.0,
    compile_s=2.0,
    text_bytes=10,
    facts=facts,
    versions={"jax": "1", "libtpu": "2"},
    time=time_range(text, topology, report, facts=facts, argument_bytes=1e6)
    if fits
    else None,
  )


@pytest.fixture
def asked(monkeypatch):
  """What was compiled, and with which answer; it can be changed."""
  calls, change = [], {}

  def compile(builder, topology, options, **rest):
    calls.append((builder, topology, options, rest))
    more = {k: v(options) if callable(v) else v for k, v in change.items()}
    return answer(topology, options, **more)

  monkeypatch.setattr(aot, "compile", compile)
  monkeypatch.setattr(aot, "missing", lambda *_: None)
  calls_and = type("Asked", (), {"calls": calls, "change": change})
  return calls_and


def test_a_model_is_a_preset_or_a_folder_with_a_config(asked, tmp_path):
  config = dict(rj.models.PRESETS["llama-3.1-8b"], num_hidden_layers=3)
  (tmp_path / "config.json").write_text(json.dumps(config))
  step = ("aot", "--topology=v5e:2x4", "--tokens=65536")
  assert ask(*step, f"--model={tmp_path}").status == 0
  assert asked.calls[0][2]["model"] == config
  (tmp_path / "config.json").unlink()
  ran = ask(*step, f"--model={tmp_path}")
  assert ran.status == 2 and "config.json: got no such file" in ran.err
  ran = ask(*step, "--model=llama-9")
  assert ran.status == 2 and "a folder with a config.json" in ran.err
  assert "llama-3.1-8b" in ran.err and len(asked.calls) == 1


def test_a_step_is_compiled_as_it_was_asked_for(asked):
  ran = ask(
    *STEP, "--mesh=data:1,seq:8", "--strategy=zigzag", "--remat=nothing",
    "--kv_block=512", "--shard=none", "--what=train", "--batch=2",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  ((builder, topology, options, _),) = asked.calls
  assert builder == "ringjax.bench.steps:train" and topology == "v5e:2x4"
  assert options == {
    "model": "llama-3.1-8b", "tokens": 65536, "batch": 2, "shard": None,
    "mesh": [("data", 1), ("seq", 8)], "strategy": "zigzag",
    "remat": "nothing", "kv_block": 512,
  }  # fmt: skip


@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.parametrize(
  ("given", "passed"),
  [
    ("dense", "dense"),
    ("windowed:slack=64", "windowed:slack=64"),
    ("windowed:unrotated=false", "windowed"),
  ],
)
def test_a_program_is_compiled_with_the_cache_asked_for(
  asked, what, given, passed
):
  ran = ask(*STEP, f"--what={what}", f"--cache={given}")
  assert ran.status == 0, ran.err
  ((_, _, options, _),) = asked.calls
  assert options["cache"] == passed


def test_weights_and_keys_in_host_memory(asked):
  ran = ask(
    *STEP, "--what=prefill", "--weights=host", "--chunk=4096",
    "--cache_placement=device=.5,host=.5",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  ((_, _, options, _),) = asked.calls
  assert options["weights"] == "host" and options["chunk"] == 4096
  assert options["cache_placement"] == "device=.5,host=.5"
  assert ask(*STEP, "--what=train", "--weights=host").status == 2
  assert ask(*STEP, "--what=decode", "--chunk=8").status == 2
  found = answer("v5e:2x4", {"tokens": 8})
  more = {"host_bytes": 3 << 30, "cache_bytes": {"device": 0, "host": 1 << 30}}
  found = dataclasses.replace(found, facts={**found.facts, **more})
  title = scripts.words(found)[0]
  assert "of weights and" in title and "of cache in host memory" in title


def test_weights_of_codes(asked):
  ran = ask(*STEP, "--what=decode", "--coded_bits=4")
  assert ran.status == 0, ran.err
  ((_, _, options, _),) = asked.calls
  assert options["coded_bits"] == 4
  assert ask(*STEP, "--what=train", "--coded_bits=4").status == 2
  found = answer("v5e:2x4", {"tokens": 8})
  found = dataclasses.replace(found, facts={**found.facts, "coded_bits": 4})
  assert "weights of 4 bits" in scripts.words(found)[0]


def test_the_report_names_the_cache():
  found = answer("v5e:2x4", {"tokens": 8})
  facts = {**found.facts, "what": "decode", "cache": "dense"}
  found = dataclasses.replace(found, facts=facts)
  assert "dense cache, on v5e:2x4" in scripts.words(found)[0]
  found = answer("v5e:2x4", {"tokens": 8}, need=40 << 30)
  lines = lambda facts: "\n".join(
    scripts.words(dataclasses.replace(found, facts=facts))
  )
  assert "--cache=windowed" in lines(facts)
  assert "--cache" not in lines(facts | {"cache": "windowed"})


def test_the_table_says_what_was_found(asked):
  ran = ask(*STEP)
  assert ran.status == 0, ran.err
  assert "fits: 1.07 GB of 16.9 GB (6 %)" in ran.out
  assert "the ring: hidden" in ran.out
  assert "0.00 % of the step waits for sends" in ran.out
  assert "static, not measured" in ran.out
  assert "a step takes between 0.008 ms and " in ran.out
  assert "no program of this step takes less than 0.008 ms: links" in ran.out
  # 46.6 kB over 46.6 GB/s.
  line = next(x for x in ran.out.splitlines() if x.startswith("go "))
  assert line.split() == [
    "go", "8", "46.6", "kB", "0.001", "ms", "0.001", "ms", "hidden",
  ]  # fmt: skip
  asked.change["body"] = LATE
  ran = ask(*STEP)
  assert "the ring: at fault" in ran.out and "42.9 % of the step" in ran.out
  assert "hidden" in ask(*STEP, "--limit=0.5").out


def test_a_sum_above_the_limit_that_fits_is_explained(asked):
  more = aot.Memory(
    arguments=17 << 30, outputs=0, aliased=0, temporaries=0, code=0,
    limit=16 << 30,
  )  # fmt: skip
  found = dataclasses.replace(answer("v5e:2x4", {"tokens": 8}), memory=more)
  lines = scripts.words(found)
  assert any("not all of it at once" in line for line in lines)
  assert "not all of it at once" not in ask(*STEP).out


def test_json_is_one_object(asked):
  found = ask(*STEP, "--json").json
  assert found["fits"] and found["memory"]["total"] == 1 << 30
  assert found["schedule"]["sends"][0]["hidden"]
  time = found["time"]
  assert time["bound"] in ("products", "memory", "links")
  assert len(time["assumptions"]) == 4
  products = 1e9 / chips.CHIPS["tpu-v5e"].rate("bfloat16")
  assert time["product_s"] == pytest.approx(products)
  assert time["floor_s"] <= time["least_s"] <= time["most_s"]


def test_the_machine_code_is_counted_and_simulated_if_asked_for(asked):
  assert ask(*STEP).status == ask(*STEP, "--simulate").status == 0
  rest = [call[3] for call in asked.calls]
  assert [given["code"] for given in rest] == [True, True]
  assert [given["simulate"] for given in rest] == [False, True]


def test_the_largest_buffers_are_listed_if_asked_for(asked):
  largest = (aot.Buffer(nbytes=1 << 20, shape="f32[9,9]", source="jit(g)"),)
  found = dataclasses.replace(answer("v5e:2x4", {"tokens": 8}), largest=largest)
  lines = scripts.words(found)
  where = lines.index("largest buffers:")
  assert "f32[9,9]  jit(g)" in lines[where + 1]
  assert lines[0].startswith("train") and lines[3].startswith("fits")
  ask(*STEP, "--buffers=3")
  assert asked.calls[-1][3]["buffers"] == 3
  ran = ask(*STEP, "--buffers=3", "--search")
  assert ran.status != 0 and "--buffers" in ran.err


def test_what_does_not_fit_says_what_to_change(asked):
  asked.change["need"] = 40 << 30
  ran = ask(*STEP, "--strategy=gather")
  assert "does not fit: 42.9 GB needed, 16.9 GB there" in ran.out
  assert "f32[4,5]  jit(f)/dot" in ran.out
  for words in ("--remat=nothing", "--strategy=striped", "--optimizer"):
    assert words in ran.out


@pytest.mark.skipif(
  importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
def test_the_timeline_is_drawn(asked, tmp_path):
  path = tmp_path / "p.png"
  ran = ask(*STEP, f"--plot={path}")
  assert ran.status == 0, ran.err
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (("aot", "--topology=v5e:2x4", "--tokens=64"), "--model"),
    (("aot", "--model=llama-3.1-8b", "--tokens=64"), "--topology"),
    (("aot", "--model=llama-3.1-8b", "--topology=v5e:2x4"), "--tokens"),
    ((*STEP, "--topology=v5e:2"), "topology"),
    ((*STEP, "--what=prefill", "--remat=all"), "--remat"),
    ((*STEP, "--what=decode", "--strategy=ring"), "--strategy"),
    ((*STEP, "--what=attention"), "--model"),
    ((*STEP, "--what=shared"), "--what"),
    ((*STEP, "--heads=4"), "--heads"),
    ((*STEP, "--shards=4"), "--shards"),
    ((*STEP, "--strategy=ring", "--strategy=zigzag"), "--strategy"),
    (("kvr", "--topology=v5e:2x4"), "--topology"),
    ((*STEP, "--search", "--plot=x.png"), "--plot"),
    ((*STEP, "--search", "--hlo=x.hlo"), "--hlo"),
    ((*STEP, "--search", "--limit=0.1"), "--limit"),
    ((*STEP, "--search", "--simulate"), "--simulate"),
    (("capacity", "--simulate"), "--simulate"),
    (("capacity", "--slices=v9-1"), "--slices"),
    (("capacity", "--what=decode"), "--what"),
    (("capacity", "--tokens=64"), "--tokens"),
    ((*STEP, "--cache=windowed"), "--cache: got it with --what=train"),
    ((*STEP, "--what=decode", "--cache=ring"), "--cache: got 'ring'"),
    ((*STEP, "--what=prefill", "--cache=dense:size=1"), "options of 'dense'"),
    (("capacity", "--cache=windowed"), "--what=train, which has no cache"),
    (("capacity", "--what=prefill", "--cache=ring"), "--cache: got 'ring'"),
    (("cycles", "--cache=dense"), "--cache"),
  ],
)
def test_flags_that_would_not_be_followed_are_refused(asked, argv, words):
  ran = ask(*argv)
  assert ran.status == 2 and words in ran.err and not ran.out
  assert not asked.calls


def test_a_search_ranks_what_fits(asked):
  slow = lambda options: LATE if options["block"] == 1024 else HIDDEN
  asked.change["body"] = slow
  asked.change["need"] = lambda options: (
    40 << 30 if options["remat"] == "all" else 1 << 30
  )
  ran = ask(*STEP, "--search", "--tries=8", "--strategy=striped", "--json")
  rows = ran.json["tried"]
  assert len(rows) == len(asked.calls) == 8
  order = [(row["most_s"], row["stalled"]) for row in rows if row["fits"]]
  assert order == sorted(order) and len(set(order)) > 1
  assert not rows[-1]["fits"] and rows[-1]["options"]["remat"] == "all"
  assert all(row["options"]["strategy"] == "striped" for row in rows)
  # The first is what nobody changed.
  first = asked.calls[0][2]
  assert first["remat"] == "attention" and first["block"] == 2048


def test_a_search_goes_on_where_a_time_is_unknown(asked, monkeypatch):
  known = aot.compile
  without = lambda *args, **options: dataclasses.replace(
    known(*args, **options), time=None, traffic_error="KeyError: 'a'"
  )
  monkeypatch.setattr(aot, "compile", without)
  ran = ask(*STEP, "--search", "--tries=2", "--strategy=striped")
  assert ran.status == 0 and "unknown" in ran.out
  # One program alone says why.
  assert "times are unknown: KeyError" in ask(*STEP).out or (
    "bytes moved are unknown: KeyError" in ask(*STEP).out
  )


def test_candidates_have_meshes_that_the_batch_fills():
  found = list(
    scripts.candidates("prefill", 8, {"batch": 2, "mesh": [("seq", -1)]})
  )
  meshes = {tuple(one["mesh"]) for one in found}
  assert meshes == {
    (("data", 1), ("seq", 8)),
    (("data", 2), ("seq", 4)),
    (("data", 1), ("seq", 4), ("model", 2)),
    (("data", 2), ("seq", 2), ("model", 2)),
    (("data", 1), ("seq", 2), ("model", 4)),
    (("data", 2), ("seq", 1), ("model", 4)),
  }
  assert all("remat" not in one for one in found)
  fixed = [("data", 2), ("seq", 4)]
  found = scripts.candidates("decode", 8, {"batch": 2, "mesh": fixed})
  assert [one["mesh"] for one in found] == [fixed]


def test_capacity_finds_and_keeps_the_largest(asked, tmp_path):
  # 16.9 GB hold about 258 thousand tokens of 65536 bytes; gather a half.
  each = lambda options: 65536 * (1 + (options["strategy"] == "gather"))
  asked.change["need"] = lambda options: each(options) * options["tokens"]
  out = tmp_path / "capacity"
  ran = ask(
    "capacity", "--model=llama-3.1-8b", "--slices=v5e-256", "--what=prefill",
    "--strategy=striped", "--strategy=gather", f"--out={out}", "--json",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  striped, gather = ran.json["rows"]
  limit = chips.CORES["tpu-v5e"].hbm_bytes
  for row, bytes_each in ((striped, 65536), (gather, 131072)):
    assert row["tokens"] * bytes_each <= limit
    assert row["too_many"] * bytes_each > limit
    assert row["tokens"] % 256 == 0 and row["topology"] == "v5e:16x16"
  assert json.loads((tmp_path / "capacity.json").read_text())["rows"]
  text = (tmp_path / "capacity.md").read_text()
  assert "| llama-3.1-8b | v5e-256 (v5e:16x16) | prefill |" in text
  assert f"{striped['tokens']:,} | {gather['tokens']:,}" in text


def test_capacity_keeps_a_row_for_each_cache(asked, tmp_path):
  # A windowed cache needs a quarter.
  each = lambda options: 65536 >> 2 * (options.get("cache") == "windowed")
  asked.change["need"] = lambda options: each(options) * options["tokens"]
  argv = (*CAPACITY, "--strategy=striped", f"--out={tmp_path / 'all'}")
  for more in ((), ("--cache=dense",), ("--cache=windowed",)):
    assert ask(*argv, *more).status == 0
  rows = json.loads((tmp_path / "all.json").read_text())["rows"]
  caches = [row["options"].get("cache") for row in rows]
  assert caches == [None, "dense", "windowed"]
  none, dense, windowed = (row["tokens"] for row in rows)
  assert none == dense < windowed / 3
  text = (tmp_path / "all.md").read_text()
  assert f"| prefill dense | {dense:,} |" in text
  assert f"| prefill windowed | {windowed:,} |" in text
  # Once it is known it is not compiled again.
  asked.calls.clear()
  picture = tmp_path / "all.png"
  assert ask(*argv, "--cache=dense", f"--plot={picture}").status == 0
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert "](all.png)" in (tmp_path / "all.md").read_text()
  assert ask(*argv, "--cache=windowed:slack=128").status == 0
  assert not asked.calls


def test_the_published_table_is_of_the_published_figures():
  root = pathlib.Path(__file__).parents[2]
  figures = json.loads((root / "docs" / "capacity.json").read_text())
  lines = capacity.page(figures["rows"], "capacity.png")
  assert (root / "docs" / "capacity.md").read_text().splitlines() == lines


CAPACITY = (
  "capacity", "--model=llama-3.1-8b", "--slices=v5e-256", "--what=prefill",
)  # fmt: skip


def test_capacity_goes_on_where_it_was_stopped(asked, tmp_path, monkeypatch):
  out = f"--out={tmp_path / 'all'}"
  asked.change["need"] = lambda options: 65536 * options["tokens"]
  assert ask(*CAPACITY, "--strategy=striped", out).status == 0
  asked.calls.clear()
  more = (*CAPACITY, "--strategy=gather", "--strategy=striped", out)
  ran = ask(*more, "--json")
  assert ran.status == 0 and "1 of 2 are in" in ran.err
  assert {call[2]["strategy"] for call in asked.calls} == {"gather"}
  names = [row["strategy"] for row in ran.json["rows"]]
  assert names == ["gather", "striped"]
  # Other rows of the file stay in it.
  asked.calls.clear()
  ran = ask(*CAPACITY, "--strategy=plain", out, "--json")
  assert [row["strategy"] for row in ran.json["rows"]] == ["plain"]
  kept = json.loads((tmp_path / "all.json").read_text())["rows"]
  assert {row["strategy"] for row in kept} == {"gather", "striped", "plain"}
  # With another compiler, or another program, nothing is known.
  asked.calls.clear()
  assert ask(*CAPACITY, "--strategy=plain", out, "--block=1024").status == 0
  assert asked.calls and asked.calls[0][2]["block"] == 1024
  asked.calls.clear()
  monkeypatch.setattr(aot, "versions", lambda: {"jax": "99"})
  assert ask(*more).status == 0
  assert {c[2]["strategy"] for c in asked.calls} == {"gather", "striped"}


@pytest.mark.parametrize(
  "text", ["", "{}", '{"format": "ringjax-capacity", "version": 1, "rows": 3}']
)
def test_capacity_does_not_write_over_another_file(asked, tmp_path, text):
  (tmp_path / "x.json").write_text(text)
  ran = ask(*CAPACITY, "--strategy=plain", f"--out={tmp_path / 'x'}")
  assert ran.status == 2 and "x.json" in ran.err and not asked.calls
  assert (tmp_path / "x.json").read_text() == text


def test_several_at_a_time_are_the_same(asked, tmp_path):
  asked.change["need"] = lambda options: 65536 * options["tokens"]
  strategies = [f"--strategy={name}" for name in ("striped", "gather", "plain")]
  rows = [
    ask(*CAPACITY, *strategies, f"--jobs={jobs}", "--json").json["rows"]
    for jobs in (1, 3)
  ]
  assert rows[0] == rows[1] and len(rows[0]) == 3


def test_what_runs_is_ended_when_one_fails():
  begun, ended = [], threading.Event()

  def work(i):
    begun.append(i)
    if i == 1:
      raise OptionError("no")
    ended.wait()
    return i

  with pytest.raises(OptionError):
    list(common.map_unordered(work, 9, 2, ended.set))
  assert ended.is_set() and max(begun) < 8


def test_capacity_says_what_was_refused(asked, monkeypatch):
  def compile(*args, **rest):
    raise OptionError("mesh: got 3; wanted 4; change it")

  monkeypatch.setattr(aot, "compile", compile)
  ran = ask(
    "capacity", "--model=llama-3.1-8b", "--slices=v5e-256", "--what=train",
    "--strategy=plain",
  )  # fmt: skip
  assert ran.status == 0 and "| refused |" in ran.out
  assert "mesh: got 3" in ran.err


def test_capacity_keeps_what_it_knew_until_it_knows_more(
  asked, tmp_path, monkeypatch
):
  out = f"--out={tmp_path / 'all'}"
  asked.change["need"] = lambda options: 65536 * options["tokens"]
  strategies = ("--strategy=striped", "--strategy=gather")
  assert ask(*CAPACITY, *strategies, out).status == 0
  kept = lambda: json.loads((tmp_path / "all.json").read_text())["rows"]
  before = kept()
  # Of another compiler, one that refuses the second.
  compile = aot.compile

  def refuses(builder, topology, options, **rest):
    if options["strategy"] == "gather":
      raise OptionError("mesh: got 3; wanted 4; change it")
    return compile(builder, topology, options, **rest)

  monkeypatch.setattr(aot, "compile", refuses)
  monkeypatch.setattr(aot, "versions", lambda: {"jax": "99"})
  assert ask(*CAPACITY, *strategies, out).status == 0
  after = kept()
  assert after[0]["versions"] == {"jax": "99"} and after[1] == before[1]


@pytest.mark.parametrize(
  "argv", [CAPACITY, ("cycles",), (*STEP, "--search"), STEP]
)
def test_without_the_compiler_nothing_is_begun(monkeypatch, argv):
  monkeypatch.setattr(aot, "missing", lambda *_: "libtpu is not installed")
  ran = ask(*argv)
  assert ran.status == 2 and "libtpu is not installed" in ran.err
  assert not ran.out


def test_the_strategies_are_those_of_the_builders():
  assert scripts.STRATEGIES == ways.NAMES


@pytest.mark.parametrize("name", ["warp", "hybrid", "hybrid:0", "ring:2"])
def test_strategies_that_are_none(asked, name):
  ran = ask(*STEP, f"--strategy={name}")
  assert ran.status == 2 and "--strategy" in ran.err and name in ran.err
  assert not asked.calls


def test_attention_in_groups_with_a_window_and_documents(asked):
  ran = ask(
    "aot", "--what=attention", "--topology=v5e:2x4", "--tokens=8192",
    "--strategy=two_level:4", "--window=512", "--packed",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  ((builder, _, options, _),) = asked.calls
  assert builder.endswith(":attention")
  assert options["strategy"] == "two_level:4"
  assert (options["window"], options["packed"]) == (512, True)
  assert ask(*STEP, "--packed").status == 2
