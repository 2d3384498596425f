"""The check of a machine: what it finds, and what does not end it."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import json
import os
import socket

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import doctor
from ringjax.bench import machine
from ringjax.bench.doctor import (
  checkup,
  inventory,
  kernel_cases,
  kernel_checks,
  model_steps,
  settings,
)
from ringjax.bench.doctor.findings import (
  OK,
  SKIPPED,
  SLOW,
  WRONG,
  Finding,
  Findings,
  table,
)
from ringjax.bench.doctor.rates import DeviceRates
from ringjax.bench.timing import Skipped
from ringjax.ops import kernel_choice
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.kernels.auto_kernel import Loops
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.experts import grouped_product_tpu
from ringjax.ops.experts.grouped_product_tpu import GroupedProductTPU
from tests.helpers import script
from tests.launch.conftest import PATIENCE_S

run = functools.partial(script, doctor)


@pytest.fixture
def one_case(monkeypatch):
  """Plain keys of a cache alone, read by DecodeTPU or by the loops."""
  every = kernel_cases.decode_cases
  first = lambda platform: itertools.islice(every(platform), 1)
  monkeypatch.setattr(kernel_cases, "hop_cases", lambda: ())
  monkeypatch.setattr(kernel_cases, "decode_cases", first)
  monkeypatch.setattr(auto_kernel, "KERNELS", {})
  monkeypatch.setattr(auto_kernel, "DECODERS", {"tpu": (DecodeTPU,)})
  monkeypatch.setattr(kernel_checks, "PRODUCTS", ())
  kernel_choice._parse_off.cache_clear()
  yield
  kernel_choice._parse_off.cache_clear()


def test_a_wrong_kernel_is_found_and_can_be_switched_off(one_case, monkeypatch):
  status, out, _ = run("--quick", "--interpret")
  assert status == 0 and "0 WRONG" in out
  assert out.count("OK       ") == 2 and "decode_tpu: cache, bfloat16" in out

  right = DecodeTPU.decode

  def cracked(self, q, keys, args):
    partial = right(self, q, keys, args)
    return partial._replace(acc=partial.acc.at[0, 1].multiply(1.05))

  monkeypatch.setattr(DecodeTPU, "decode", cracked)
  status, out, _ = run("--quick", "--interpret")
  (line,) = [x for x in out.splitlines() if x.startswith("  WRONG")]
  assert status == 1 and "decode_tpu" in line and "(out)" in line
  assert "RINGJAX_OFF=decode_tpu" in out
  assert [x for x in out.splitlines() if "XLA's loops" in x and "OK" in x]

  monkeypatch.setenv("RINGJAX_OFF", "decode_tpu")
  status, out, _ = run("--quick", "--interpret")
  assert status == 0 and "SKIPPED  decode_tpu" in out
  assert "switched off by RINGJAX_OFF" in out


@pytest.mark.long
def test_products_of_experts_are_checked(one_case, monkeypatch):
  kinds = grouped_product_tpu.GROUPED_PRODUCTS
  monkeypatch.setattr(kernel_checks, "PRODUCTS", (kinds,))
  status, out, _ = run("--quick", "--interpret")
  (line,) = [x for x in out.splitlines() if "grouped_product_tpu" in x]
  assert status == 0 and line.startswith("  OK") and "a small product" in line

  right = GroupedProductTPU.summed
  monkeypatch.setattr(
    GroupedProductTPU, "summed", lambda *args: 1.1 * right(*args)
  )
  status, out, _ = run("--quick", "--interpret")
  (line,) = [x for x in out.splitlines() if x.startswith("  WRONG")]
  assert status == 1 and "grouped_product_tpu" in line
  assert "RINGJAX_OFF=grouped_product_tpu" in out


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_a_kernel_that_raises_or_gives_nan_is_wrong(
  one_case, monkeypatch, fault
):
  right = DecodeTPU.decode

  def cracked(self, q, keys, args):
    if fault == "raises":
      raise RuntimeError("no such instruction")
    partial = right(self, q, keys, args)
    return partial._replace(acc=partial.acc * np.float32("nan"))

  monkeypatch.setattr(DecodeTPU, "decode", cracked)
  status, out, _ = run("--quick", "--interpret")
  assert status == 1 and "1 OK, 1 WRONG" in out
  assert ("no such instruction" if fault == "raises" else "off by inf") in out


def test_an_unknown_kernel_in_the_variable_is_wrong(one_case, monkeypatch):
  monkeypatch.setenv("RINGJAX_OFF", "decode")
  status, out, _ = run("--quick")
  assert status == 1 and "WRONG    this part" in out
  assert "'decode'" in out and "decode_tpu" in out


def test_the_reference_sees_an_error_of_a_gradient():
  case = kernel_cases.hop_cases()[2]

  class Cracked(Blockwise):
    def backward(self, *args):
      gradients = super().backward(*args)
      return gradients._replace(v=gradients.v * 1.1)

  truth = kernel_cases.hop_truth(case)
  results = kernel_cases.hop_program(Cracked(), case).run(tuple(truth))
  errors = {
    name: kernel_checks.error(results[name], truth[name]) for name in truth
  }
  limit = kernel_checks.TOLERANCES["bfloat16"]
  assert [name for name in truth if errors[name] > limit] == ["dv"]


@pytest.mark.long
def test_a_cache_of_codes_is_compared_with_what_its_codes_stand_for():
  *_, int4, _, _, nuq, pages, prompts = kernel_cases.decode_cases("cpu")
  for make in (int4, nuq, pages, prompts):
    case = make()
    truth = kernel_cases.decode_truth(case)
    results = kernel_cases.decode_program(Loops(), case).run(tuple(truth))
    errors = [kernel_checks.error(results[name], truth[name]) for name in truth]
    assert max(errors) < kernel_checks.TOLERANCES["bfloat16"], case.name


def test_a_part_that_raises_is_a_line_and_the_others_run(monkeypatch):
  def fail(*_):
    raise RuntimeError("no such file\nand more")

  monkeypatch.setattr(inventory, "check", fail)
  status, out, _ = run("--parts=machine,settings")
  assert status == 1
  assert "WRONG    this part          RuntimeError: no such file\n" in out
  assert "compilation cache" in out and "and more" not in out


def test_a_check_without_memory_or_subject_is_skipped():
  findings = Findings()
  with findings.guarded("rates", "links"):
    raise Skipped("one device")
  with findings.guarded("model", "step"):
    raise RuntimeError("RESOURCE_EXHAUSTED: 3 GB")
  with findings.guarded("model", "other"):
    raise ValueError("odd")
  assert [x.status for x in findings.rows] == [SKIPPED, SKIPPED, WRONG]
  assert findings.rows[0].text == "one device"


def test_the_file_has_all_findings_or_is_not_written(tmp_path, monkeypatch):
  path = tmp_path / "new" / "doctor.json"
  status, out, err = run("--parts=machine,settings", f"--json={path}")
  body = json.loads(path.read_text())
  assert status == 0 and body["wrong"] is False and body["processes"] == 1
  assert {x["part"] for x in body["findings"]} == {"machine", "settings"}
  counts = collections.Counter(x["status"] for x in body["findings"])
  assert counts["OK"] > 0
  for count in counts.items():
    assert "{1} {0}".format(*count) in out
  before = path.read_text()

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  status, out, err = run("--parts=settings", f"--json={path}")
  # The findings are on the screen.
  assert status == 2 and "settings" in out and "No space left" in err
  assert path.read_text() == before


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    (["--parts=kernel"], "'kernel'"),
    (["--parts="], "no name"),
    (["--quick", "--parts=rates"], "--quick"),
  ],
)
def test_unknown_parts_are_refused(argv, words):
  status, out, err = run(*argv)
  assert (status, out) == (2, "") and words in err


def test_slow_is_no_error(monkeypatch):
  slow = lambda findings, device: findings.add("settings", "x", SLOW, "slow")
  monkeypatch.setattr(settings, "check", slow)
  status, out, _ = run("--parts=settings")
  assert status == 0 and "0 WRONG, 1 SLOW" in out


def test_long_texts_stay_in_their_column():
  row = Finding(part="rates", name="n" * 40, status=OK, text="word " * 40)
  lines = list(table([row]))
  assert lines[0] == "rates" and lines[1] == f"  OK       {'n' * 40}"
  assert all(len(line) <= 100 for line in lines)
  assert len({len(x) - len(x.lstrip()) for x in lines[2:-1]}) == 1


def rows(*texts, status=OK, common=True):
  names = ("versions", "runtime")
  return [
    Finding(part="machine", name=n, status=status, text=x, common=common)
    for n, x in zip(names, texts, strict=False)
  ]


def test_a_process_that_differs_gets_a_line():
  same = rows("jax 1", "a")
  assert checkup.combined([same, same]) == same
  # What may differ, does.
  own = rows("jax 2", "b", common=False)
  assert checkup.combined([rows("jax 1", "a", common=False), own]) == rows(
    "jax 1", "a", common=False
  )
  merged = checkup.combined([same, rows("jax 2", "a"), rows("jax 1")])
  assert [(x.name, x.status) for x in merged] == [
    ("versions", OK),
    ("runtime", OK),
    ("process 1: versions", WRONG),
    ("process 2: runtime", WRONG),
  ]
  assert "jax 2" in merged[2].text
  slow = checkup.combined([same, rows("jax 1", "a", status=SLOW)])
  assert [x.status for x in slow] == [OK, OK, SLOW, SLOW]


def test_an_accelerator_that_jax_does_not_use_is_named(tmp_path):
  find = functools.partial(inventory.unused_accelerator, "cpu")
  assert find({}, str(tmp_path)) is None
  (tmp_path / "accel0").touch()
  assert "ringjax[tpu]" in find({}, str(tmp_path))
  (tmp_path / "nvidia0").touch()
  assert "ringjax[cuda12]" in find({}, str(tmp_path))
  assert find({"JAX_PLATFORMS": "cpu"}, str(tmp_path)) is None
  assert inventory.unused_accelerator("gpu", {}, str(tmp_path)) is None


def test_links_of_several_devices_are_measured():
  mesh = rj.make_mesh((2, 2), ("data", "seq"))
  rates = machine.link_rates(
    mesh, nbytes=1 << 12, rounds=1, stream=io.StringIO()
  )
  assert set(rates) == {
    (axis, kind)
    for axis in ("data", "seq")
    for kind in ("one", "gather", "sum")
  }
  assert all(rate > 0 or rate != rate for rate in rates.values())


@pytest.mark.slow
def test_several_processes_have_one_table(run_together, tmp_path):
  path = tmp_path / "doctor.json"
  first, second = run_together(
    "-m", "launch.doctor", "--parts=machine,rates", "--devices=2",
    f"--json={path}", processes=2,
  )  # fmt: skip
  assert (first.status, second.status) == (0, 0), first.err + second.err
  assert second.out == "" and "process 1: " not in first.out
  assert "4 cpu (cpu), 2 of each process" in first.out
  body = json.loads(path.read_text())
  links = {
    x["name"] for x in body["findings"] if ", axis seq of 4" in x["name"]
  }
  assert len(links) == 3 and body["processes"] == 2


@pytest.mark.long
def test_a_process_with_another_variable_gets_a_line(start, tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  argv = ("--parts=machine", f"--coordinator=localhost:{port}",
          "--num_processes=2")  # fmt: skip
  # The command sets the variable as a shell would.
  code = (
    "import os, runpy, sys; os.environ['RINGJAX_OFF'] = 'cudnn'; "
    "runpy.run_module('launch.doctor', run_name='__main__', alter_sys=True)"
  )
  with (
    start("-m", "launch.doctor", *argv, "--process_id=0") as first,
    start("-c", code, *argv, "--process_id=1") as second,
  ):
    out, err = first.communicate(timeout=PATIENCE_S)
    second.communicate(timeout=PATIENCE_S)
  assert (first.returncode, second.returncode) == (1, 1), err
  assert "WRONG    process 1: kernels switched off" in out
  assert "cudnn; must be that of process 0" in out


@pytest.mark.long
def test_a_models_steps_are_compared_with_their_floor():
  size = model_steps.ModelSize(
    embed=64, heads=4, layers=2, vocab=128, tokens=64, dtype="float32"
  )
  findings = Findings()
  rates = DeviceRates(jax.devices()[0], io.StringIO())
  rates.read = 1e12
  rates._products = {"float32": 1e9}
  model_steps.check(findings, rates, size)
  names = [row.name for row in findings.rows]
  assert [name.split(" of ")[0].split(" after ")[0] for name in names] == [
    "prefill", "decode step", "training step",
  ]  # fmt: skip
  assert all(row.status in (OK, SLOW) for row in findings.rows)
  # 2 FLOPs of each weight; the head for one token.
  embed, tokens, layers = 64, 64, 2
  weights = layers * embed * (2 * embed + 2 * embed // 2 + 12 * embed)
  attention = 2 * layers * 2 * embed * tokens * (tokens + 1) / 2
  flops = 2 * weights * tokens + attention + 2 * 128 * embed
  floor_s = findings.rows[0].figures["floor_s"]
  assert floor_s == pytest.approx(flops / 1e9, rel=0.01)
