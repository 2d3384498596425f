"""launch.bench kernels: it counts pairs, checks its contestants, and runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.attention import kernels
from benchmarks.attention.kernels import KernelBenchmark, KernelSettings
from ringjax.errors import OptionError
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.mask import Coords, visible
from tests.ops.attention.kernels.test_kinds import Poison, Vendor

TINY = KernelSettings(
  tokens=(64,),
  head_dims=(16,),
  dtypes=("float32",),
  heads=2,
  kv_heads=1,
  shards=4,
  rounds=1,
)


@pytest.mark.parametrize("shards", [3, 4])
@pytest.mark.parametrize("kind", [*kernels.HOPS, *kernels.RINGS])
def test_pairs_are_counted(kind, shards):
  case = kernels.HopCase(
    kind=kind,
    dtype="float32",
    head_dim=8,
    tokens=24,
    passes="fwd",
    heads=2,
    kv_heads=2,
    shards=shards,
  )
  at = case.context
  q, k = (
    Coords(*(np.expand_dims(c[0], axis) for c in coords))
    for coords, axis in ((at.q, 1), (at.k, 0))
  )
  yes = np.broadcast_to(visible(at.mask, q, k), (case.rows, k.pos.size))
  assert case.pairs == yes.sum()
  assert case.flops == 4 * 8 * 2 * case.pairs


def vendor(**options):
  class Kernel(Vendor):
    def __init__(self, chip=None):
      super().__init__(Poison(), chip=chip, **options)

  return (Kernel,)


@pytest.mark.slow
def test_all_contestants(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", vendor())
  path = tmp_path / "x.json"
  settings = dataclasses.replace(TINY, kinds=("ring",), passes=("fwdbwd",))
  found = KernelBenchmark.run(settings, command="it", json=str(path))
  assert json.loads(path.read_text()) == json.loads(json.dumps(found))
  (row,) = found["rows"]
  for one in row["results"].values():
    assert one["reason"] is None and one["median_s"] > 0
    assert one["gemm_percent"] > 0 and one["max_abs_difference"] < 1e-4
  assert {*found["summary"]} == {"kernel over blockwise", "kernel over jax.nn"}
  assert found["complete"] and "kernel over" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hop_that_a_contestant_lacks_has_a_reason():
  settings = dataclasses.replace(
    TINY, kinds=("strict",), passes=("fwd",), contestants=("kernel", "jax.nn")
  )
  (row,) = KernelBenchmark.run(settings)["rows"]
  reasons = [one["reason"] for one in row["results"].values()]
  assert reasons == ["no kernel for cpu", "skipped: it has no strict hop"]


@pytest.mark.slow
def test_a_kernel_that_is_off_is_not_timed(monkeypatch):
  monkeypatch.setitem(auto_kernel.KERNELS, "cpu", vendor(local=True))
  settings = dataclasses.replace(
    TINY, kinds=("striped",), passes=("fwdbwd",), contestants=("kernel",)
  )
  (row,) = KernelBenchmark.run(settings)["rows"]
  assert "WRONG" in row["results"]["kernel"]["reason"]


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(kinds=("halo",)), "kinds"),
    (dict(kinds=()), "nothing"),
    (dict(contestants=("torch",)), "contestants"),
    (dict(heads=3, kv_heads=2), "kv_heads"),
    (dict(tokens=(0,)), "tokens"),
    (dict(tokens=(100,)), "multiples of 8"),
  ],
)
def test_wrong_settings(options, words):
  with pytest.raises(OptionError, match=words):
    KernelSettings(**options)


@pytest.mark.long
def test_the_command_line(tmp_path, capsys, command):
  path = tmp_path / "x.json"
  args = (
    "kernels", "--quick", "--tokens=64", "--parts=full", "--passes=fwd",
    "--rounds=1", "--heads=2", "--contestants=kernel,jax.nn", f"--json={path}",
  )  # fmt: skip
  assert command(*args) == 0
  assert "no kernel for cpu" in capsys.readouterr().out
  settings = json.loads(path.read_text())["settings"]
  assert settings["kv_heads"] == 2 and settings["tokens"] == [64]
  assert command("kernels", "--plot=x.png") == 2
  assert "kernels does not take" in capsys.readouterr().err
