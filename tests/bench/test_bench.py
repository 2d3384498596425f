"""The benchmarks: they time fairly, count exactly and hide nothing."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import ringjax as rj
from benchmarks.attention import attention
from benchmarks.attention.attention import AttentionBenchmark, AttentionSettings
from benchmarks.attention.layouts import LayoutBenchmark, LayoutSettings
from benchmarks.model import expert_products
from benchmarks.shared import harness
from launch import bench
from ringjax.bench import timing
from ringjax.errors import OptionError
from ringjax.ops.attention import blockwise
from ringjax.ops.attention.cost import schedule
from tests.helpers import make_mesh

ROOT = pathlib.Path(__file__).parents[2]
LAYOUTS = (rj.Contiguous(), rj.Striped(), rj.Striped(4), rj.Zigzag())


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def is_picture(path: pathlib.Path) -> bool:
  data = path.read_bytes()
  return data.startswith(b"\x89PNG") and len(data) > 10_000


# ---------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------


def test_contestants_run_in_turn():
  calls = []
  runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
  found = timing.interleave(runs, 4, warmup=2)
  rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
  assert len(rounds) == 6
  assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
  assert {r[0] for r in rounds} == {"a", "b", "c"}
  assert all(len(t.seconds) == 4 for t in found.values())
  assert all(t.min_s <= t.median_s for t in found.values())


@pytest.mark.parametrize("count", [2, 6, 8])
def test_no_contestant_always_follows_the_same_one(count):
  calls = []
  runs = {n: (lambda n=n: calls.append(n)) for n in map(str, range(count))}
  timing.interleave(runs, count, warmup=0)
  rounds = [calls[i : i + count] for i in range(0, len(calls), count)]
  pairs = [pair for r in rounds for pair in itertools.pairwise(r)]
  assert len(set(pairs)) == len(pairs) == count * (count - 1)
  assert sorted(r[0] for r in rounds) == sorted(runs)


def test_a_contestant_that_raises_has_a_reason():
  calls = []

  def tires():
    calls.append(1)
    if len(calls) == 3:
      raise MemoryError("all gone\nand more")

  def missing():
    raise ModuleNotFoundError("No module named 'x'", name="x")

  def declines():
    raise timing.Skipped("too long")

  runs = dict(
    fine=lambda: None, tires=tires, missing=missing, declines=declines
  )
  found = timing.interleave(runs, 4, warmup=1)
  assert list(found) == list(runs)
  assert len(found["fine"].seconds) == 4 and found["fine"].reason is None
  assert found["tires"].reason == "MemoryError: out of memory: all gone"
  assert found["tires"].seconds == () and found["tires"].median_s is None
  assert len(calls) == 3
  assert found["missing"].reason == "x is not installed"
  assert found["declines"].reason == "too long"


def test_ratio_is_of_medians():
  times = dict(a=(1.0, 2.0, 90.0), b=(4.0,), none=())
  results = {
    name: harness.result_row(timing.Timing(seconds), None)
    for name, seconds in times.items()
  }
  row = {"results": results}
  assert harness.ratio(row, ["a"], ["b"]) == 0.5
  assert harness.ratio(row, ["a", "b"], ["b", "none"]) == 0.5
  assert harness.ratio(row, ["a"], ["none"]) is None
  found = harness.ratios([row, row], ["a"], ["b"])
  assert found == {"ratios": [0.5, 0.5], "median": 0.5}
  assert harness.ratios([row], ["none"], ["b"]) is None


def test_progress_rewrites_its_line_on_a_terminal_only():
  plain, terminal = io.StringIO(), Terminal()
  for stream in (plain, terminal):
    progress = timing.Progress(4.0, stream, every_s=0.0)
    progress.at(1.0, "one")
    progress.clear()
  assert "\r" not in plain.getvalue() and plain.getvalue().endswith("one\n")
  assert " 25 %" in plain.getvalue() and "left" in plain.getvalue()
  assert terminal.getvalue().startswith("\r")
  assert "\n" not in terminal.getvalue()


def test_json_is_written_whole_or_not_at_all(tmp_path):
  path = tmp_path / "x.json"
  timing.write_json(str(path), {"a": 1})
  with pytest.raises(TypeError):
    timing.write_json(str(path), {"a": object()})
  assert json.loads(path.read_text()) == {"a": 1}


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------

TINY = AttentionSettings(
  tokens=(256,),
  head_dims=(16,),
  dtypes=("float32",),
  heads=2,
  rounds=1,
  devices=4,
  contestants=("blockwise", "ring", "striped", "jax.nn", "torch"),
)


@pytest.mark.slow
def test_attention_benchmark(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "torch", None)
  path, picture = tmp_path / "x.json", tmp_path / "x.png"
  result = AttentionBenchmark.run(
    TINY, command="the command", json=str(path), plot=str(picture)
  )
  assert json.loads(path.read_text()) == json.loads(json.dumps(result))
  assert result["complete"] and result["command"] == "the command"
  assert result["versions"]["jax"] == jax.__version__
  assert [row["pass"] for row in result["rows"]] == ["fwd", "fwdbwd"]
  for row in result["rows"]:
    for name, one in row["results"].items():
      if name == "torch":
        assert one["reason"] == "torch is not installed"
        assert one["median_s"] is None
        continue
      assert one["reason"] is None
      rate = row["flops"] / one["median_s"]
      percent = 100 * rate / row["gemm"]["flops_per_s"]
      np.testing.assert_allclose(one["gemm_percent"], percent)
      assert one["max_abs_difference"] < 1e-4
    forward = 2 * 256 * 256 * 16 * 2
    assert row["flops"] == forward * (3.5 if row["pass"] == "fwdbwd" else 1)
  found = result["summary"]
  times = [
    {n: x["median_s"] for n, x in row["results"].items()}
    for row in result["rows"]
  ]
  loss = [t["ring"] / t["blockwise"] for t in times]
  np.testing.assert_allclose(found["loss"]["ring"]["ratios"], loss)
  np.testing.assert_allclose(found["loss"]["ring"]["median"], np.median(loss))
  best = [
    min(t["blockwise"], t["ring"], t["striped"]) / t["jax.nn"] for t in times
  ]
  np.testing.assert_allclose(found["best"]["jax.nn"]["ratios"], best)
  assert "torch is not installed" in capsys.readouterr().out
  assert is_picture(picture)


def test_narrow_multiplies_bfloat16(monkeypatch):
  exact, half = (
    attention.AttentionCase(
      dtype=dtype, head_dim=16, tokens=256, passes="fwd", heads=2, devices=4
    )
    for dtype in ("float32", "bfloat16")
  )
  with pytest.raises(timing.Skipped, match="bfloat16 only"):
    attention.trial("narrow", exact)
  want = attention.trial("blockwise", exact)[1]
  multiplied = []

  def seen(equation, a, b):
    multiplied.append(a.dtype)
    return product(equation, a, b)

  product = blockwise.product
  monkeypatch.setattr(blockwise, "product", seen)
  outputs = attention.trial("narrow", half)[1]
  assert {str(x) for x in multiplied} == {"bfloat16"}
  limit = attention.TOLERANCE["bfloat16"]
  difference, wrong = harness.compare(outputs, want, limit)
  assert not wrong and difference > 0


@pytest.mark.slow
def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
  def off(case, arrays):
    built = attention.CONTESTANTS["ring"].build(case, arrays)
    worse = lambda: tuple(a + np.float32(0.01) for a in built.check())
    return harness.Runnable(built.run, worse)

  def nan(case, arrays):
    built = attention.CONTESTANTS["blockwise"].build(case, arrays)
    worse = lambda: tuple(a * np.float32(np.nan) for a in built.check())
    return harness.Runnable(built.run, worse)

  for name, build in (("off", off), ("nan", nan)):
    fake = harness.Contestant(build)
    monkeypatch.setitem(attention.CONTESTANTS, name, fake)
  settings = AttentionSettings(
    tokens=(128,),
    head_dims=(8,),
    dtypes=("float32",),
    passes=("fwd",),
    heads=1,
    rounds=1,
    devices=2,
    contestants=("off", "nan"),
  )
  results = AttentionBenchmark.run(settings)["rows"][0]["results"]
  for one in results.values():
    assert one["reason"].startswith("WRONG: off by")
    assert one["median_s"] is None and one["seconds"] == []
  assert capsys.readouterr().out.count("WRONG") == 2


def planted(case, seconds):
  """A row of a case in which the ring took so long."""
  one = timing.Timing((seconds,))
  return {
    "dtype": case.dtype,
    "head_dim": case.head_dim,
    "heads": case.heads,
    "tokens": case.tokens,
    "pass": case.passes,
    "gemm": harness.product_row(timing.Timing((1.0,)), 2048),
    "results": {
      "ring": harness.result_row(one, 0.0, 4) | {"gemm_percent": 1.0}
    },
  }


def test_a_killed_run_keeps_its_rows(tmp_path, monkeypatch):
  rows = iter([planted(AttentionBenchmark(TINY).cases[0], 2.0)])
  monkeypatch.setattr(AttentionBenchmark, "row", lambda *args: next(rows))
  path = tmp_path / "x.json"
  with pytest.raises(StopIteration):
    AttentionBenchmark.run(TINY, json=str(path))
  kept = json.loads(path.read_text())
  assert len(kept["rows"]) == 1 and not kept["complete"]
  assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.slow
def test_runs_add_up(tmp_path, monkeypatch):
  path = str(tmp_path / "x.json")
  for n, tokens in enumerate(((512, 256), (128,), (256,))):
    row = lambda self, case, report, n=n: planted(case, 1.0 + n)
    monkeypatch.setattr(AttentionBenchmark, "row", row)
    settings = dataclasses.replace(TINY, tokens=tokens, passes=("fwd",))
    AttentionBenchmark.run(settings, json=path, command=str(n), append=True)
  kept = json.loads((tmp_path / "x.json").read_text())
  found = [(r["tokens"], r["results"]["ring"]["min_s"]) for r in kept["rows"]]
  assert found == [(128, 2.0), (256, 3.0), (512, 1.0)]
  assert [run["command"] for run in kept["earlier"]] == ["0", "1"]
  assert kept["complete"] and len(kept["summary"]["rows"]) == 3
  with pytest.raises(rj.RingjaxError, match="--json"):
    AttentionBenchmark.run(TINY, append=True)


@pytest.mark.parametrize("name", ["cpu", "vectors", "cores", "device"])
def test_rows_of_another_machine_are_not_mixed_in(tmp_path, name):
  here = timing.environment("")["machine"]
  assert here["vectors"] != "unknown" or not sys.platform.startswith("linux")
  path = tmp_path / "x.json"
  kept = {"command": "", "date": "", "versions": {}, "rows": []}
  path.write_text(json.dumps({**kept, "machine": {**here, name: "other"}}))
  text = path.read_text()
  with pytest.raises(OptionError, match=f"{name} other") as raised:
    AttentionBenchmark.run(TINY, json=str(path), append=True)
  assert str(here[name]) in str(raised.value) and len(str(raised.value)) < 400
  assert path.read_text() == text


def test_rows_of_an_unknown_machine_are_this_one_s():
  here = timing.environment("")["machine"]
  known = {name: here[name] for name in here if name != "vectors"}
  timing.check_same_machine("x.json", known, here)


@pytest.mark.parametrize(
  "name",
  ["attention", "attention-avx2", "inference", "inference-avx2", "strategies",
   "train"],
)  # fmt: skip
def test_records_of_older_runs_are_read(name, tmp_path):
  """Those of the documents: in order, with the same summary, drawn."""
  record = json.loads((ROOT / "docs" / f"{name}.json").read_text())
  kind = bench._BENCHMARKS[record["benchmark"]]
  given = record["settings"].items()
  settings = kind.options(
    **{k: tuple(v) if isinstance(v, list) else v for k, v in given}
  )
  one, rows = kind(settings), record["rows"]
  orders = [one.order(row) for row in rows]
  assert orders == sorted(orders) and len(set(orders)) == len(rows)
  again = json.loads(json.dumps(one.summary(rows)))
  compared(record["summary"], again)
  assert one.closing({**record, "summary": again}) or name == "strategies"
  assert one.table(one.cases[0], rows[0])
  if "plot" in one.files:
    one.draw(record, str(tmp_path / "x.png"))
    assert is_picture(tmp_path / "x.png")


def compared(old, new):
  """Equal but for the last digits of numbers."""
  if isinstance(old, dict):
    assert {*old} <= {*new}
    for key in old:
      compared(old[key], new[key])
  elif isinstance(old, list):
    for a, b in zip(old, new, strict=True):
      compared(a, b)
  else:
    assert new == (pytest.approx(old) if isinstance(old, float) else old)


# ---------------------------------------------------------------------------
# The schedule of tiles
# ---------------------------------------------------------------------------


def brute_force(layout, mask, shards, length, qb, kb):
  """(some allowed, all allowed) of each tile, pair by pair."""
  local = layout.local_length(length, shards)
  order = layout.padded_order(length, shards).reshape(shards, local)
  at = lambda x: rj.Coords(x, (x >= 0).astype(np.int32))
  some, every = [], []
  for hop in range(shards):
    for device in range(shards):
      q = at(order[device][:, None])
      k = at(order[(device - hop) % shards][None])
      yes = np.asarray(mask.allows(q, k)) & (q.seg != 0) & (k.seg != 0)
      tiles = yes.reshape(local // qb, qb, local // kb, kb)
      some.append(tiles.any((1, 3)))
      every.append(tiles.all((1, 3)))
  shape = (shards, shards, local // qb, local // kb)
  return np.reshape(some, shape), np.reshape(every, shape)


@pytest.mark.parametrize("length", [256, 203], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_schedule_equals_brute_force(layout, length):
  # Blocks that divide the 64 (of 203 tokens: 51 to 56) slots of a shard.
  local = layout.local_length(length, 4)
  qb, kb = (16, 8) if local == 64 else (local, local)
  for mask in (rj.Causal(), rj.Everything()):
    args = layout, mask, 4, length, qb, kb
    some, every = brute_force(*args)
    kinds = schedule.tile_schedule(*args)
    np.testing.assert_array_equal(kinds, some.astype(int) + every)
    np.testing.assert_array_equal(schedule.tile_counts(*args), some.sum((2, 3)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_schedule_never_skips_what_a_window_sees(layout):
  args = layout, rj.Causal() & rj.Window(40), 4, 256, 16, 8
  some, every = brute_force(*args)
  kinds = schedule.tile_schedule(*args)
  assert (kinds[some] > 0).all()
  assert every[kinds == 2].all()


@pytest.mark.one_case
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_schedule_is_what_the_loops_run(layout, monkeypatch):
  ran = np.zeros(4, int)
  tile = blockwise.forward_tile

  def counted(*args):
    def count(device):
      ran[device] += 1

    jax.debug.callback(count, jax.lax.axis_index("seq"))
    return tile(*args)

  monkeypatch.setattr(blockwise, "forward_tile", counted)
  # 104 tokens a shard, which neither block divides.
  x = np.ones((1, 416, 1, 4), np.float32)
  out = rj.ring_attention(
    x,
    x,
    x,
    mesh=make_mesh(4, "auto"),
    layout=layout,
    is_causal=True,
    local=rj.Blockwise(30, 20),
  )
  jax.block_until_ready(out)
  jax.effects_barrier()
  counts = schedule.tile_counts(layout, rj.Causal(), 4, 416, 30, 20)
  np.testing.assert_array_equal(ran, counts.sum(0))


@pytest.mark.parametrize("blocks", [(16, 16), (16, 8), (128, 128)], ids=str)
def test_striped_causal_is_level_in_every_hop(blocks):
  counts = schedule.tile_counts(rj.Striped(), rj.Causal(), 8, 8192, *blocks)
  assert (counts.max(1) / counts.mean(1) <= 1.02).all()


@pytest.mark.usefixtures("unchecked")
def test_schedule_says_what_is_wrong():
  good = dict(layout=rj.Striped(), mask=rj.Causal(), shards=2, length=64)
  for name, value in (
    ("shards", 0),
    ("shards", "2"),
    ("length", -1),
    ("q_block", 0),
  ):
    with pytest.raises(OptionError, match=name):
      schedule.tile_schedule(**(good | {name: value}))


# ---------------------------------------------------------------------------
# Layouts and the command line
# ---------------------------------------------------------------------------


@pytest.mark.slow
def test_layouts_benchmark(tmp_path, command, capsys):
  path, picture = tmp_path / "x.json", tmp_path / "x.png"
  done = command(
    "layouts",
    "--shards=4",
    "--tokens=2048",
    "--q_block=128",
    "--kv_block=128",
    f"--json={path}",
    f"--plot={picture}",
  )
  assert done == 0
  result = json.loads(path.read_text())
  assert result["command"].startswith("python -m launch.bench layouts --sh")
  # Four tiles a side: ten on or below a diagonal, all sixteen below it.
  ring = [[10] * 4, [0, 16, 16, 16], [0, 0, 16, 16], [0, 0, 0, 16]]
  wanted = dict(
    contiguous=(ring, 58, 100 * 136 / (4 * 58)),
    striped=([[10] * 4] * 4, 40, 100),
    zigzag=([[10] * 4, *[[8] * 4] * 3], 34, 100),
  )
  out = capsys.readouterr().out
  for name, (counts, steps, busy) in wanted.items():
    one = result["layouts"][name]
    assert one["tiles_by_hop_and_device"] == counts
    assert one["steps"] == steps
    np.testing.assert_allclose(one["busy_percent"], busy)
    np.testing.assert_allclose(
      one["used_percent"],
      100 * (2048 * 2049 / 2) / (np.sum(counts) * 128 * 128),
    )
    assert f"{busy:.1f} %" in out
  assert is_picture(picture)


@pytest.mark.slow
def test_store_benchmark(tmp_path, command, capsys):
  trace, path = tmp_path / "trace.jsonl", tmp_path / "x.json"
  prompts = [[0, 1, 2], [0, 3], [0, 1, 2], [0, 4], [0, 1, 2, 5]]
  trace.write_text("".join(json.dumps({"hash_ids": x}) + "\n" for x in prompts))
  done = command(
    "store",
    f"--trace={trace}",
    "--capacity=48",
    "--block=16",
    "--parts=tree,lru,once_used_first,belady",
    f"--json={path}",
  )
  assert done == 0
  result = json.loads(path.read_text())
  hits = result["hits"]
  assert hits["tree"] is None and hits["lru"] == 6
  assert hits["once_used_first"] == 7 and hits["belady"] == 8
  out = capsys.readouterr().out
  assert "14 look-ups" in out and "6 of 14 hit" in out
  assert "without limits" in out and "a tier is 3 blocks" in out
  assert command("store") == 2
  assert "--trace" in capsys.readouterr().err
  assert command("store", f"--trace={path}x") == 2


@pytest.mark.slow
@pytest.mark.long
def test_picture_of_other_sizes(tmp_path):
  for shards in (1, 3, 12):
    path = tmp_path / f"{shards}.png"
    settings = LayoutSettings(shards=shards, tokens=1000)
    LayoutBenchmark.run(settings, plot=str(path))
    assert is_picture(path)


@pytest.mark.parametrize(
  ("args", "word"),
  [
    ((), "nothing"),
    (("nope",), "nope"),
    (("layouts", "more"), "more"),
    (("layouts", "--tokens=1,2"), "wanted one"),
    (("strategies", "--head_dims=64,128"), "wanted one"),
    (("layouts", "--window=4"), "window"),
    (("layouts", "--quick"), "quick"),
    (("train", "--plot=x.png"), "plot"),
    (("attention", "--kv_heads=1"), "it takes"),
    (("layouts", "--shards=0"), "shards"),
    (("attention", "--tokens=x"), "tokens"),
    (("attention", "--tokens=0"), "tokens"),
    (("attention", "--dtypes=int8"), "int8"),
    (("attention", "--passes=bwd"), "bwd"),
    (("attention", "--contestants=ring,me"), "me"),
    (("attention", "--contestants="), "contestants"),
    (("attention", "--rounds=0"), "rounds"),
    (("inference", "--parts=train"), "train"),
    (("inference", "--parts="), "parts"),
    (("inference", "--caches=x"), "caches"),
    (("inference", "--caches=0"), "caches"),
    (("inference", "--append"), "--json"),
  ],
  ids=lambda x: " ".join(x) if isinstance(x, tuple) else x,
)
def test_a_wrong_command_line_says_so(args, word, command, capsys):
  assert command(*args) == 2
  err = capsys.readouterr().err
  assert err.startswith("bench: ") and word in err


@pytest.mark.parametrize("name", bench._BENCHMARKS)
def test_flags_are_settings_and_arguments(name):
  one = bench._BENCHMARKS[name]
  options = one.options.options()
  fields = {f.name for f in dataclasses.fields(one.options)}
  assert {options[flag].name for flag in one.options.flags()} <= fields
  arguments = inspect.signature(one.run).parameters
  assert {*one.files, "command"} <= {*arguments}
  # Lists are of settings that take several values, or one of them.
  mine = flags.FLAGS.get_key_flags_for_module(bench)
  lists = {f.name for f in mine if f.flag_type().startswith("comma")}
  for flag, field in options.items():
    if flag in lists and field.metadata["choices"] is None:
      found = getattr(one.options().with_flags({flag: ["8"]}), field.name)
      assert found == ((8,) if field.metadata["several"] else 8)


def test_every_flag_is_for_a_benchmark():
  taken = set().union(*map(bench._taken, bench._BENCHMARKS.values()))
  mine = {f.name for f in flags.FLAGS.get_key_flags_for_module(bench)}
  assert taken == mine


def test_too_many_devices():
  many = AttentionSettings(devices=len(jax.devices()) + 1)
  with pytest.raises(OptionError, match="devices"):
    AttentionBenchmark.run(many)


def test_a_plot_without_matplotlib(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(OptionError, match="matplotlib"):
    LayoutBenchmark.run(LayoutSettings(), plot="x.png")


def test_import_starts_nothing():
  code = """if True:
    import sys, launch.bench
    from jax._src import xla_bridge
    heavy = {"matplotlib", "torch", "flax", "ringattention"} & set(sys.modules)
    assert not heavy, heavy
    assert not xla_bridge.backends_are_initialized()
  """
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_unknown_subcommand_exits_with_2():
  found = subprocess.run(
    [sys.executable, "-m", "launch.bench", "nope"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert found.returncode == 2 and "nope" in found.stderr


@pytest.mark.slow
def test_decode_steps():
  from benchmarks.attention import decode_steps as decode

  settings = decode.DecodeSettings(
    tokens=(1024,),
    rows=2,
    shared=(128, 0),
    own=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    contestants=("dense", "int4", "apart", "together", "tiered", "chosen"),
    rounds=1,
  )
  said = []
  result = decode.DecodeBenchmark.run(settings, say=said.append)
  assert [row["part"] for row in result["rows"]] == [
    "kinds",
    "host",
    "sharing",
    "sharing",
  ]
  for row in result["rows"]:
    assert all(one["median_s"] for one in row["results"].values())
  far = lambda row, name: row["results"][name]["max_abs_difference"]
  kinds, hosted, *sharing = result["rows"]
  assert 0 < far(kinds, "int4") < 0.5
  assert far(hosted, "chosen") < 0.5
  assert all(far(row, "together") < 1e-5 for row in sharing)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_same_codes_of_experts_are_compared(bits):
  """Those that the kernel reads are those that others decode first."""
  draw = np.random.default_rng(0)
  groups = 2 * expert_products.GROUP
  if bits == 8:
    codes = draw.integers(-127, 128, (3, groups, 8)).astype(np.int8)
    scales = draw.uniform(0.5, 1, (3, 1, 8))
  else:
    shape = 3, 2, expert_products.GROUP // 2, 8
    codes = draw.integers(0, 256, shape).astype(np.uint8)
    scales = draw.uniform(0.5, 1, (3, 2, 1, 8))
  weights = jnp.asarray(codes), jnp.asarray(scales, jnp.float32)
  maps = expert_products.expert_maps(weights)
  rows = jnp.asarray(draw.normal(size=(5, groups)), jnp.float32)
  for expert in range(3):
    decoded = expert_products.decoded(weights, jnp.float32)[expert]
    np.testing.assert_allclose(
      maps.product(rows, jnp.int32(expert)),
      rows @ decoded,
      rtol=1e-5,
      atol=1e-3,
    )
