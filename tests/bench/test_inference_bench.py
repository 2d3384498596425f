"""The benchmark of whole models: same work for all, checked, nothing hidden."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys

import jax
import numpy as np
import pytest

import ringjax as rj
from benchmarks.attention.layouts import LAYOUTS
from benchmarks.model import inference, inference_tables, model_contestants
from benchmarks.model.inference import InferenceBenchmark, InferenceSettings
from benchmarks.shared import harness
from ringjax.bench import timing
from ringjax.ops.attention.cost import schedule

MODEL = {
  "model_type": "llama",
  "num_hidden_layers": 2,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "vocab_size": 64,
  "max_position_embeddings": 512,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
}
TINY = InferenceSettings(
  model=MODEL,
  tokens=(64,),
  caches=(16, 48),
  dtypes=("float32",),
  rounds=2,
  steps=3,
  devices=4,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """What is measured of the machine is not looked at here."""
  monkeypatch.setattr(timing, "GEMM_SIZE", 32)
  monkeypatch.setattr(inference, "_READ_BYTES", 1 << 16)


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory):
  """The folders of `MODEL`, written once; `folders` is what writes them."""
  write = InferenceBenchmark.folder
  held = InferenceBenchmark(TINY)
  vars(held)["path"] = tmp_path_factory.mktemp("folders")

  def read(bench, dtype):
    assert bench.settings.model is MODEL
    return write(held, dtype)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(InferenceBenchmark, "folder", read)
    yield write


def only(*parts, **more):
  return dataclasses.replace(TINY, parts=parts, **more)


# ---------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  """A complete run without PyTorch: (result, its folder, what it printed)."""
  path, out = tmp_path_factory.mktemp("ran"), io.StringIO()
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
    patch.setattr(inference, "_READ_BYTES", 1 << 16)
    patch.setattr(timing, "GEMM_SIZE", 32)
    patch.setitem(sys.modules, "torch", None)
    result = InferenceBenchmark.run(
      TINY,
      command="the command",
      json=str(path / "x.json"),
      plot=str(path / "x.png"),
    )
  return result, path, out.getvalue()


@pytest.mark.slow
def test_inference_benchmark(ran):
  result, path, out = ran
  kept = json.loads((path / "x.json").read_text())
  assert kept == json.loads(json.dumps(result))
  assert result["complete"] and result["command"] == "the command"
  assert result["versions"]["jax"] == jax.__version__
  assert result["torch_threads"] is None
  found = [(r["part"], r["dtype"], r["tokens"]) for r in result["rows"]]
  assert found == [
    ("forward", "float32", 64),
    ("decode", "float32", 16),
    ("decode", "float32", 48),
    ("load", "float32", 0),
    ("tiles", "", 64),
  ]
  peers = {"transformers", "transformers_1"}
  wanted = {
    "forward": {"ringjax", "striped"} | peers,
    "decode": {"ringjax", "unrolled", "default"} | peers,
    "load": {"ringjax", "transformers", "safetensors"},
  }
  for row in result["rows"][:-1]:
    assert set(row["results"]) == wanted[row["part"]]
    for name, one in row["results"].items():
      if name in peers:
        assert one["reason"] == "torch is not installed"
        assert one["median_s"] is None and one["seconds"] == []
        continue
      assert one["reason"] is None and one["max_abs_difference"] < 1e-4
      assert len(one["seconds"]) == 2 and one["cpu_s"] > 0
      assert one["median_s"] == np.median(one["seconds"]) > 0
  speeds = result["summary"]["speeds"]
  assert len(speeds) == 3 and all(x["speed"] is None for x in speeds)
  assert out.count("torch is not installed") == 7
  assert (path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bfloat16():
  settings = only(
    "forward",
    "load",
    dtypes=("bfloat16",),
    contestants=("ringjax", "safetensors"),
  )
  forward, load = InferenceBenchmark.run(settings)["rows"]
  assert 0 < forward["results"]["ringjax"]["max_abs_difference"] < 0.1
  assert all(one["reason"] is None for one in load["results"].values())


@pytest.mark.slow
def test_a_folder_is_timed_with_its_own_weights(tmp_path, folders):
  model = rj.models.create(MODEL, seed=3, dtype="bfloat16")
  rj.models.save(model, tmp_path / "own")
  settings = dataclasses.replace(
    TINY, model=str(tmp_path / "own"), parts=("decode",), caches=(16,),
    contestants=("ringjax", "default"), dtypes=("bfloat16",), rounds=1,
  )  # fmt: skip
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(InferenceBenchmark, "folder", folders)
    bench = InferenceBenchmark(settings)
    vars(bench)["path"] = tmp_path
    written = rj.models.load(bench.folder("float32"))
    case = bench.cases[0]
    k, v = bench.inputs(case).keys
    results = InferenceBenchmark.run(settings)["rows"][0]["results"]
  for ours, given in zip(
    jax.tree.leaves(written), jax.tree.leaves(model), strict=True
  ):
    np.testing.assert_array_equal(ours, np.asarray(given, np.float32))
  assert k.shape == v.shape == (2, 1, 16, 8)
  # Drawn keys are the same for all weights.
  other = rj.models.create(MODEL, seed=4)
  rj.models.save(other, tmp_path / "other")
  drawn = np.random.default_rng(16)
  drawn.integers(0, 64, 1, np.int32)
  ids = drawn.integers(0, 64, 16, np.int32)
  others, _ = model_contestants.cached_keys(tmp_path / "other", ids)
  again, _ = model_contestants.cached_keys(tmp_path / "float32", ids)
  np.testing.assert_allclose(again, k, rtol=1e-2)
  assert np.abs(others - k).max() > 0.1
  # Without a dtype the weights are float32 on a CPU, as the reference's are.
  assert results["default"]["max_abs_difference"] == 0
  assert results["ringjax"]["max_abs_difference"] > 0


@pytest.mark.slow
def test_figures_follow_from_times_and_sizes(ran):
  body = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32 + 2 * 16) + 16
  head = 64 * 16
  forward, first, last, load, _ = ran[0]["rows"]
  flops = 2 * 64 * body + 2 * head + 2 * 64 * 64 * 16 * 2
  assert forward["flops"] == flops
  one = forward["results"]["striped"]
  assert one["devices"] == 4
  share = flops / one["median_s"] / forward["machine"]["flops_per_s"]
  np.testing.assert_allclose(one["gemm_percent"], 100 * share)
  rate = (1 << 16) / min(last["machine"]["seconds"])
  np.testing.assert_allclose(last["machine"]["bytes_per_s"], rate)
  assert last["weight_bytes"] == 4 * (body + head)
  assert last["token_bytes"] == 4 * 2 * 2 * 8
  bound = (4 * (body + head) + 48 * 4 * 2 * 2 * 8) / rate
  np.testing.assert_allclose(last["bound_s"], bound)
  one = last["results"]["ringjax"]
  np.testing.assert_allclose(
    one["bound_percent"], 100 * bound / one["median_s"]
  )
  assert first["steps"] == 3
  one = load["results"]["safetensors"]
  # The header is a part of the file.
  assert 4 * (body + head) < load["gigabytes"] * 1e9 < 4 * (body + head) + 4096
  np.testing.assert_allclose(
    one["s_per_gigabyte"], one["median_s"] / load["gigabytes"]
  )


def test_peers_agree():
  pytest.importorskip("transformers")
  settings = dataclasses.replace(TINY, dtypes=("float32", "bfloat16"))
  result = InferenceBenchmark.run(settings)
  assert result["torch_threads"] >= 1
  for row in result["rows"]:
    for name, one in row["results"].items():
      assert row["part"] == "tiles" or one["reason"] is None, (row, name)
  assert all(x["speed"] > 0 for x in result["summary"]["speeds"])


@pytest.mark.long
def test_tiles_are_counted():
  row = InferenceBenchmark.run(only("tiles", tokens=(1024,)))["rows"][0]
  for name in inference._TILED:
    counts = schedule.tile_counts(LAYOUTS[name], rj.Causal(), 4, 1024)
    one = row["results"][name]
    assert one["tiles"] == sum(one["tiles_by_hop"]) == counts.sum()
    assert one["time"] == counts.max(1).sum()
    np.testing.assert_allclose(
      one["largest_over_mean_by_hop"], counts.max(1) / counts.mean(1)
    )
  striped, contiguous = (
    row["results"][name]["largest_over_mean_by_hop"]
    for name in ("striped", "contiguous")
  )
  assert max(striped) <= 1.02 and max(contiguous) > 3.9


# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------


def plant(monkeypatch, name, **builders):
  """A contestant of this name, which settings then accept."""
  fake = model_contestants._contestant(**builders)
  monkeypatch.setitem(inference.CONTESTANTS, name, fake)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("part", "factor"),
  [
    pytest.param("forward", 1.01, marks=pytest.mark.slow),
    pytest.param("decode", np.nan, marks=pytest.mark.slow),
    ("load", 1.01),
    pytest.param("load", None, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_wrong_result_is_not_timed(part, factor, monkeypatch, capsys):
  ran = []

  def off(case, given):
    built = inference.CONTESTANTS["ringjax"].build(case, given)

    def check():
      found = built.check()
      # None: a result of another shape.
      return found[:-1] if factor is None else found * np.float32(factor)

    return harness.Runnable(lambda: ran.append(1), check)

  plant(monkeypatch, "off", **{part: off})
  settings = only(part, caches=(16,), contestants=("off",))
  one = InferenceBenchmark.run(settings)["rows"][0]["results"]["off"]
  assert one["reason"].startswith("WRONG: off by")
  assert one["median_s"] is None and one["seconds"] == [] == ran
  assert "WRONG" in capsys.readouterr().out


@pytest.mark.slow
def test_a_contestant_that_fails_has_a_reason(monkeypatch, capsys):
  def full(case, given):
    raise MemoryError("all gone")

  plant(monkeypatch, "full", forward=full)
  settings = only("forward", tokens=(60,), contestants=("full", "striped"))
  results = InferenceBenchmark.run(settings)["rows"][0]["results"]
  assert results["full"]["reason"] == "MemoryError: out of memory: all gone"
  assert results["striped"]["reason"] == "skipped: 60 tokens over 4"
  assert "all gone" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
  "scan", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_filled_cache_is_one_that_read_a_prompt(scan, tmp_path):
  model = rj.models.create(MODEL, scan=scan)
  ids = np.random.default_rng(0).integers(0, 64, (1, 24), np.int32)
  read = rj.infer.Session(model, 32)
  token = rj.infer.generate(model, ids, max_new_tokens=1, cache=read)
  at = np.full((1, 1), 24, np.int32)
  step = lambda cache: model(token.tokens, positions=at, cache=cache)[0]
  parts = tuple(
    np.concatenate(x)[:, 0, :, :24] for x in zip(*read.cache.slots, strict=True)
  )
  given = inference.ModelInputs(tmp_path, model.config, ids[0], parts)
  empty = rj.infer.Session(model, 64).cache
  found = step(model_contestants._filled(empty, given))
  np.testing.assert_allclose(found, step(read.cache), rtol=1e-5, atol=1e-5)
  half = dataclasses.replace(given, keys=tuple(x[:, :, :12] for x in parts))
  worse = step(model_contestants._filled(empty, half))
  assert np.abs(worse - found).max() > 1e-2


def test_weights_are_told_apart():
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal(s, np.float32) for s in ((8, 4), (6,)))
  same = model_contestants._digest([b, a.T])
  np.testing.assert_allclose(
    model_contestants._digest([a, b]), same, rtol=1e-12
  )
  for other in ([a], [a, b * 2], [a, np.abs(b) + 1], [a, b, b]):
    assert inference._compare(model_contestants._digest(other), same, 1e-3)[1]


@pytest.mark.long
def test_both_dtypes_hold_the_same_numbers(tmp_path, folders):
  held = InferenceBenchmark(TINY)
  vars(held)["path"] = tmp_path
  wide, narrow = (
    rj.models.load(folders(held, d), dtype=d) for d in ("float32", "bfloat16")
  )
  assert wide.dtype == "float32" and narrow.dtype == "bfloat16"
  for a, b in zip(*map(jax.tree.leaves, (wide, narrow)), strict=True):
    np.testing.assert_array_equal(a, b.astype(np.float32))
  case = inference.ModelCase(part="decode", dtype="float32", tokens=16)
  for x in held.inputs(case).keys:
    np.testing.assert_array_equal(x, x.astype("bfloat16").astype(np.float32))
    assert abs(x.std() - 1) < 0.2


# ---------------------------------------------------------------------------
# Summaries
# ---------------------------------------------------------------------------


def timed(part, dtype, tokens, **medians):
  return {
    "part": part,
    "dtype": dtype,
    "tokens": tokens,
    "machine": {"bytes_per_s": 5e8},
    "token_bytes": 1e6 / 1024,
    "results": {name: {"median_s": s} for name, s in medians.items()},
  }


def test_aims():
  rows = [
    timed(
      "forward", "float32", 4096, ringjax=2.0, striped=1.0, transformers=1.0
    ),
    timed("forward", "float32", 32768, ringjax=1.0, transformers=1.9),
    timed("decode", "bfloat16", 1024, ringjax=1.0, transformers=0.1),
    timed("decode", "bfloat16", 4096, ringjax=None, transformers=1.0),
    timed("decode", "bfloat16", 32768, unrolled=0.5, transformers=1.0),
  ]
  found = inference_tables.summary(rows)
  speeds = [(x["best_of_ours"], x["speed"]) for x in found["speeds"]]
  assert speeds == [
    ("striped", 1.0),
    ("ringjax", 1.9),
    ("ringjax", 0.1),
    (None, None),
    ("unrolled", 2.0),
  ]
  aims = [(x["tokens"], x["aim"], x["met"]) for x in found["aims"]]
  assert aims == [
    (4096, 1.0, True),
    (32768, 2.0, False),
    (4096, 1.0, None),
    (32768, 2.0, True),
  ]
  text = inference_tables.closing({"summary": found})
  assert text.count(": met") == 2 and text.count(": not met") == 1
  assert text.count(": no number") == 1


def test_the_peer_has_its_better_number_of_threads():
  row = timed("decode", "float32", 4096, ringjax=1.0, transformers=9.0)
  row["results"]["transformers_1"] = {"median_s": 3.0, "cpu_s": 2.0}
  row["results"]["transformers"]["cpu_s"] = 1.0
  row["results"]["ringjax"]["cpu_s"] = 4.0
  (one,) = inference_tables.summary([row])["speeds"]
  assert (one["speed"], one["cpu_speed"]) == (3.0, 0.25)


def test_lines():
  x = (1024, 2048, 8192)
  line = inference_tables.fit(x, [0.005 + t / 1024 * 0.003 for t in x])
  wanted = {"ms": 5.0, "ms_per_1024": 3.0, "r2": 1.0}
  np.testing.assert_allclose([line[k] for k in wanted], list(wanted.values()))
  assert inference_tables.fit((1024, 2048, 3072), (1.0, 9.0, 2.0))["r2"] < 0.1
  rows = [timed("decode", "float32", t, unrolled=t / 1024 * 0.003) for t in x]
  rows.append(timed("decode", "float32", 16384, unrolled=None))
  rows.append(timed("decode", "bfloat16", 1024, unrolled=1.0))
  rows[1]["machine"]["bytes_per_s"] = 4e8
  (one,) = inference_tables.summary(rows)["lines"]
  assert (one["dtype"], one["contestant"]) == ("float32", "unrolled")
  found = one["ms_per_1024"], one["bound_ms_per_1024"]
  np.testing.assert_allclose(found, (3.0, 2.0))


def test_loading_is_compared_with_safetensors():
  rows = [
    timed("load", "float32", 0, ringjax=3.0, transformers=6.0, safetensors=2.0),
    timed("load", "bfloat16", 0, ringjax=3.0, safetensors=None),
  ]
  found = inference_tables.summary(rows)["load"]
  ratios = [(x["contestant"], x["time_over_safetensors"]) for x in found]
  assert ratios == [("ringjax", 1.5), ("transformers", 3.0), ("ringjax", None)]


# ---------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------


def test_flags_become_settings(command, monkeypatch):
  got = []
  monkeypatch.setattr(
    InferenceBenchmark,
    "run",
    lambda settings, **files: got.append((settings, files)),
  )
  done = command(
    "inference",
    "--quick",
    "--parts=load,tiles",
    "--tokens=128",
    "--caches=8,16",
    "--dtypes=bfloat16",
    "--contestants=ringjax",
    "--rounds=7",
    "--devices=8",
    "--append",
    "--json=x.json",
  )
  assert done == 0
  ((settings, files),) = got
  assert settings == dataclasses.replace(
    InferenceBenchmark.quick,
    parts=("load", "tiles"),
    tokens=(128,),
    caches=(8, 16),
    dtypes=("bfloat16",),
    contestants=("ringjax",),
    rounds=7,
    devices=8,
  )
  assert files["append"] and files["json"] == "x.json"
  assert files["command"].startswith("python -m launch.bench inference --qui")
