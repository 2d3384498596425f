"""Plans of offloading: against the released cost model, a grid, and bounds."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import sys

import numpy as np
import pytest

from ringjax.errors import (
  CheckpointFormatError,
  ConfigError,
  MemoryEstimateError,
  OptionError,
)
from ringjax.models.checkpoint import abstract
from ringjax.models.presets import preset
from ringjax.models.work_profile import offload_shape
from ringjax.plan.flexgen import offload, offload_costs, offload_tiers
from ringjax.plan.flexgen.offload_costs import (
  OffloadPolicy,
  OffloadTask,
  estimate,
)
from ringjax.plan.flexgen.offload_tiers import OffloadMachine, OffloadShape

T4 = offload_tiers.load("t4")
SSD = offload_tiers.load("t4-ssd")
GIB = 2.0**30
SMALL = OffloadShape(
  name="small",
  layers=3,
  embed=64,
  heads=4,
  queries=48,
  hidden=384,
  weights=60_000,
  active=20_000,
  kv=32,
  attend=192,
  tables=20_000,
  head=10_000,
)


def machine(**changes) -> OffloadMachine:
  """A small machine on which no part is negligible."""
  return OffloadMachine(**{
    "name": "toy",
    "device_bytes": 700e3,
    "host_bytes": 900e3,
    "disk_bytes": 5e6,
    "to_device": 10e6,
    "from_device_cache": 4e6,
    "from_device_hidden": 5e6,
    "disk_read": 2e6,
    "disk_write_cache": 1.5e6,
    "disk_write_hidden": 1.2e6,
    "disk_write_decode": 1.1e6,
    "prefill_flops": 1e9,
    "decode_flops": 4e8,
    "prefill_attention_flops": 3e8,
    "decode_attention_flops": 5e6,
    "host_flops": 2e6,
    "usable": 1.0,
    **changes,
  })  # fmt: skip


def released(s, n, layers, h, policy, disk_read):
  """Tokens/s as the released cost model has them, written out for OPT."""
  gbs, bls = policy.rows, policy.block
  _, wc, wn = policy.weights
  cg, cc, cn = policy.cache
  _, hc, hn = policy.hidden
  w, f = 24 * h**2, 4 * h
  hidden, gb, tera = 2 * h * bls, GIB, 1e12
  load = (w * (wc + wn) + s * hidden * (hc + hn)) / (12.89 * gb)
  read = (w * wn + s * hidden * hn) / disk_read
  back = 4 * (s + 1) * h * bls * (cc + cn) / (0.97 * gb)
  back += s * hidden * (hc + hn) / (4.82 * gb)
  store = 4 * (s + 1) * h * bls * cn / (0.746 * gb)
  work = bls * s * (8 * h**2 + 4 * h * f) / (21.24 * tera)
  work += 4 * bls * s**2 * h / (9.97 * tera)
  prefill = max(load + read, back + store, work)
  load = (w * (wc + wn) + hidden * (hc + hn)) / (12.89 * gb)
  x = max(0, math.log2(64 / gbs))
  y = max(0, math.log2(4096 / h))
  slow = max(0.1, 1 + 0.0168 * x * y - 0.0328 * x - 0.0621 * y)
  seen = 4 * bls * (s + n / 2) * h
  work = bls * (8 * h**2 + 4 * h * f) / (4.3 * tera)
  work += seen * cg / (0.079 * tera) + seen * (cc + cn) / (0.0123 * tera * slow)
  read = (seen * cn + hidden * hn) / disk_read + w * wn / (0.95 * disk_read)
  store = (4 * bls * h * cn + hidden * hn) / (2.015 * gb)
  back = hidden * (hc + hn) / (4.82 * gb)
  token = load + max(work, read, store, back)
  return bls * n / layers / (prefill + (n - 1) * token)


@pytest.mark.parametrize(
  ("model", "prompt", "text", "want"),
  [
    ("opt-30b", 512, "48x3:20/80,0/100,0/100", 7.14),
    ("opt-30b", 256, "160x2:10/90,0/100,0/100", 12.97),
    ("opt-175b", 512, "32x8:0/50,0/0,0/100", None),
    ("opt-6.7b", 100, "5x3:13/40,7/31,20/80", None),
  ],
)
def test_the_released_model(model, prompt, text, want):
  shape, policy = OffloadShape.opt(model), OffloadPolicy.parse(text)
  for one, rate in ((T4, 0.473), (SSD, 2.0)):
    task = OffloadTask(prompt=prompt, form="code")
    got = estimate(shape, one, task, policy).tokens_s
    plain = released(prompt, 32, shape.layers, shape.embed, policy, rate * GIB)
    assert got == pytest.approx(plain, rel=1e-6)
    if want is not None:
      assert got == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(
  ("one", "want"),
  [(T4, 0.169), pytest.param(SSD, 0.609, marks=pytest.mark.long)],
)
def test_the_best_of_175b(one, want):
  """Blocks of hundreds of rows, the cache on disk, weights on host and disk."""
  shape, task = OffloadShape.opt("opt-175b"), OffloadTask(form="code")
  # The released search ends at these rows; others are slower.
  best = offload.plan(shape, one, task, rows=1, batches=432)
  assert best.estimate.tokens_s == pytest.approx(want, rel=0.01)
  found = offload.plan(shape, one, task, rows=16, batches=27)
  assert found.estimate.tokens_s > 0.98 * want
  policy = found.policy
  assert policy.weights[0] < 0.02 and 0.2 < policy.weights[1] < 0.6
  assert policy.cache[2] > 0.9 and policy.hidden[2] == 0.0
  assert "disk_read" in found.estimate.binds["decode"]


@pytest.mark.slow
def test_the_published_blocks_are_found():
  """48x3 with 20 % of the weights on the device, and 32x8, in the paper."""
  one = dataclasses.replace(T4, usable=1.0)
  task = OffloadTask(form="code", working="largest")
  small = offload.plan(OffloadShape.opt("opt-30b"), one, task).policy
  assert (small.rows, small.batches) == (64, 3)
  assert 0.15 < small.weights[0] < 0.25 and small.cache[1] > 0.999
  large = offload.plan(OffloadShape.opt("opt-175b"), one, task).policy
  assert large.rows == 32 and large.batches >= 8 and large.cache[2] > 0.9


@pytest.mark.slow
def test_the_best_of_175b_is_found():
  shape, task = OffloadShape.opt("opt-175b"), OffloadTask(form="code")
  for one, want in ((T4, 0.169), (SSD, 0.609)):
    found = offload.plan(shape, one, task)
    assert found.estimate.tokens_s == pytest.approx(want, rel=0.01)
    assert found.policy.block > 200 and found.policy.batches > 8
    exact = offload.plan(shape, one, task, near=0.0)
    assert exact.estimate.tokens_s >= found.estimate.tokens_s


def test_the_memory_of_the_released_model():
  """Its terms written out for OPT, on device and host, in both phases."""
  shape = OffloadShape.opt("opt-6.7b")
  policy = OffloadPolicy.parse("5x3:13/40,7/31,20/80")
  s, n, L, h, heads, f = 100, 32, 32, 4096, 32, 4 * 4096
  w, b, bls = 24 * h**2, 5, 15
  (wg, wc, wn), (cg, cc, cn) = policy.weights, policy.cache
  hg, hc, _ = policy.hidden
  work = 8 * b * s * h + b * (2 * s * h + 2 * heads * s**2) + 2 * b * s * h
  work += 4 * b * s * h + 2 * b * s * f + 2 * b * s * h
  device = w * L * wg + 2 * s * h * bls * hg + 4 * (s + n) * h * bls * L * cg
  device += 2 * w * (1 - wg) + 2 * s * h * b * (1 - hg) + work
  host = w * L * wc + 2 * s * h * bls * hc + 4 * s * h * bls * L * cc
  host += w * (1 - wg) + 2 * s * h * b * (1 - hg)
  later = w * L * wc + 2 * h * bls * hc + 4 * (s + n) * h * bls * L * cc
  later += w * wn + 8 * (s + n) * h * b * cn
  later += 2 * heads * (s + n) * b + 2 * h * b
  disk = w * L * wn + 4 * (s + n) * h * bls * L * cn
  made = estimate(shape, T4, OffloadTask(prompt=s, form="code"), policy)
  assert made.peak["device"] == pytest.approx(device)
  assert made.peak["host"] == pytest.approx(max(host, later))
  assert made.peak["disk"] == pytest.approx(disk)
  # While tokens are generated; more rows make that the larger of the two.
  task = OffloadTask(prompt=2, new=400, form="code")
  s, n = 2, 400
  t = s + n
  work = 8 * b * h + b * (2 * h + 2 * t * h + 2 * heads * t) * cg
  work += b * (2 * t * h + 2 * h) * cg + 4 * b * h + 2 * b * f + 2 * b * h
  device = w * L * wg + 2 * h * bls * hg + 4 * t * h * bls * L * cg
  device += 2 * w * (1 - wg) + 2 * h * b * (1 - hg) + 4 * b * t * h * cg + work
  found = estimate(shape, T4, task, policy).peak["device"]
  assert found == pytest.approx(device, rel=1e-4)


def test_the_published_shape_of_30b():
  """Some weights on the device, the rest and all else on the host."""
  for usable in (0.8, 1.0):
    one = dataclasses.replace(T4, usable=usable)
    found = offload.plan(
      OffloadShape.opt("opt-30b"), one, OffloadTask(form="code"), rows=32
    )
    policy, made = found.policy, found.estimate
    assert 0.1 < policy.weights[0] < 0.25 and policy.weights[2] < 1e-6
    assert policy.cache[1] > 0.98 and policy.hidden[1] > 0.99
    assert 100 < policy.block < 250
    assert made.tokens_s == pytest.approx(7.32, rel=0.05)
    assert made.binds == {"prefill": "compute", "decode": "to_device + compute"}
    assert made.fits and any("host's memory" in text for text in found.why)


def test_the_published_policy_of_30b_is_the_optimum():
  """With all of the memory, and one step of a layer at a time in it."""
  one = dataclasses.replace(T4, usable=1.0)
  task = OffloadTask(form="code", working="largest")
  found = offload.plan(
    OffloadShape.opt("opt-30b"), one, task, rows=48, batches=3
  )
  policy = found.policy
  assert policy.weights[0] == pytest.approx(0.2, abs=0.01)
  assert policy.weights[2] < 1e-6
  assert policy.cache == (0.0, 1.0, 0.0) and policy.hidden[1] > 0.999
  assert found.estimate.tokens_s == pytest.approx(7.14, rel=0.01)


# ---------------------------------------------------------------------------
# The optimum
# ---------------------------------------------------------------------------

_STEPS = 4
_SHARES = [
  (i / _STEPS, j / _STEPS, (_STEPS - i - j) / _STEPS)
  for i in range(_STEPS + 1)
  for j in range(_STEPS + 1 - i)
]


def seconds_of(shape, one, task, policy):
  made = estimate(shape, one, task, policy)
  return made.seconds if made.fits else math.inf


@pytest.mark.parametrize("form", offload_costs.FORMS)
@pytest.mark.parametrize(
  "options",
  [
    {},
    pytest.param({"cache_bits": 4, "weight_bits": 4}, marks=pytest.mark.long),
    pytest.param({"host_attention": False}, marks=pytest.mark.long),
  ],
)
def test_the_optimum_against_a_grid(form, options):
  """No point of a grid is faster, and a point near the optimum is as fast."""
  task = OffloadTask(prompt=48, new=8, form=form, **options)
  small = "cache_bits" in options
  one = machine(
    device_bytes=620e3 if small else 800e3, host_bytes=150e3 if small else 700e3
  )
  found = offload.plan(SMALL, one, task, rows=6, batches=3)
  least = found.estimate.seconds
  assert found.estimate.fits
  grid = [
    OffloadPolicy(rows=6, batches=3, weights=w, cache=c, hidden=h)
    for w, c, h in itertools.product(_SHARES, repeat=3)
    if form == "paper" or h[2] == 0
  ]
  # A sample of the 3375 or 1125, for time.
  step = 47 if form == "paper" else 23
  times = [seconds_of(SMALL, one, task, policy) for policy in grid[::step]]
  assert math.isfinite(min(times)) and math.isinf(max(times))
  assert least <= min(times) * (1 + 1e-6)
  # Steps along each line to a corner that still fit are not faster.
  x = found.policy.fractions().reshape(3, 3)
  for i, j in itertools.product(range(3), repeat=2):
    if form == "code" and (i, j) == (2, 2):
      continue
    moved = x.copy()
    moved[i] = 0.98 * moved[i] + 0.02 * np.eye(3)[j]
    near = OffloadPolicy(
      rows=6, batches=3,
      **dict(zip(offload_costs.KINDS, map(tuple, moved.tolist()), strict=True)),
    )  # fmt: skip
    assert seconds_of(SMALL, one, task, near) >= least * (1 - 1e-6)
  # A convex problem: the best of a grid that is refined around it comes close.
  assert least > 0.5 * min(times)


def test_more_of_anything_is_never_slower():
  task = OffloadTask(prompt=40, new=6, form="paper")
  plain = offload.plan(SMALL, machine(), task, rows=4, batches=2)
  for field in dataclasses.fields(OffloadMachine):
    if field.name in ("name", "source", "usable", "weight_read_part",
                      "host_slope"):  # fmt: skip
      continue
    more = {field.name: 1.5 * getattr(machine(), field.name)}
    found = offload.plan(SMALL, machine(**more), task, rows=4, batches=2)
    assert found.estimate.seconds <= plain.estimate.seconds * (1 + 1e-6)


def test_all_stays_where_it_fits():
  roomy = machine(device_bytes=1e9, decode_attention_flops=1e9)
  for form in offload_costs.FORMS:
    found = offload.plan(
      SMALL, roomy, OffloadTask(prompt=9, new=3, form=form), most_rows=16
    )
    policy = found.policy
    assert policy.weights == policy.cache == policy.hidden == (1.0, 0.0, 0.0)
    assert found.estimate.prefill["to_device"] == 0.0
    assert found.policy.block <= 16
    few = offload.plan(SMALL, roomy, OffloadTask(form=form), most_rows=3)
    assert few.policy.block <= 3


def test_what_is_kept_adds_up():
  task = OffloadTask(prompt=10, new=4, form="paper", weight_bits=4)
  policy = OffloadPolicy.parse("3x2:25/50,10/20,40/0")
  made = estimate(SMALL, machine(), task, policy)
  total = {
    kind: sum(made.final_bytes[tier][kind] for tier in offload_tiers.TIERS)
    for kind in offload_costs.KINDS
  }
  # Half a byte of a number, and four bytes of each group of 64.
  weights = (3 * 60_000 + 20_000) * (0.5 + 4 / 64)
  assert total["weights"] == pytest.approx(weights)
  assert total["cache"] == pytest.approx(14 * 6 * 3 * 32 * 2)
  assert total["hidden"] == pytest.approx(6 * 64 * 2)
  for tier in offload_tiers.TIERS:
    assert made.peak[tier] >= sum(made.final_bytes[tier].values()) * (1 - 1e-9)


def test_attention_without_the_host():
  """The cache then moves for each token; of 4 bits it always does."""
  policy = OffloadPolicy.parse("4x2:100/0,0/100,100/0")
  made = {
    name: estimate(
      SMALL, machine(), OffloadTask(prompt=50, new=2, **options), policy
    )
    for name, options in {
      "host": {},
      "device": {"host_attention": False},
      "coded": {"cache_bits": 4},
    }.items()
  }
  assert made["host"].decode["to_device"] == 0.0
  moved = 8 * 51 * 32 * 2 / 10e6
  assert made["device"].decode["to_device"] == pytest.approx(moved)
  part = (0.5 + 4 / 64) / 2
  assert made["coded"].decode["to_device"] == pytest.approx(moved * part)
  assert made["device"].decode["compute"] < made["host"].decode["compute"]


def test_a_policy_as_text():
  text = "48x3:20/80,0/100,12.5/0"
  policy = OffloadPolicy.parse(text)
  assert str(policy) == text and policy.block == 144
  assert policy.hidden == (0.125, 0.0, 0.875)


# ---------------------------------------------------------------------------
# Models and machines
# ---------------------------------------------------------------------------


def test_shapes_of_models():
  config = preset("llama-3.1-8b")
  plain = OffloadShape.of("llama", config)
  read = offload_shape(abstract(config), "llama")
  assert plain.kv == read.kv == 2 * 8 * 128 and plain.layers == 32
  assert plain.tables == read.tables == 2 * 128256 * 4096
  # Norms are not among the matrices.
  assert read.weights == pytest.approx(plain.weights, rel=1e-4)
  for name in ("embed", "heads", "queries", "hidden", "attend", "head"):
    assert getattr(plain, name) == getattr(read, name), name
  mixture = offload_shape(abstract("gpt-oss-20b"), "gpt-oss-20b")
  # 4 of 32 experts are at work, all of them are moved.
  assert mixture.active < 0.2 * mixture.weights
  assert mixture.hidden == 2 * 4 * 2880 and mixture.kv == 2 * 8 * 64
  with pytest.raises(ConfigError, match="num_local_experts"):
    OffloadShape.of("gpt-oss-20b", preset("gpt-oss-20b"))


def test_a_machine_in_a_file(tmp_path):
  path = str(tmp_path / "machine.json")
  offload_tiers.write(path, T4)
  assert offload_tiers.load(path) == T4
  (tmp_path / "machine.json").write_text('{"format": "other", "version": 1}')
  with pytest.raises(CheckpointFormatError, match="format"):
    offload_tiers.load(path)
  with pytest.raises(OptionError, match="t4"):
    offload_tiers.load("t5")


def test_this_machine_is_measured(tmp_path):
  from ringjax.bench import storage_rates

  made = storage_rates.measure(
    str(tmp_path), nbytes=1 << 20, rounds=1, stream=io.StringIO()
  )
  assert not list(tmp_path.iterdir())
  assert made.device_bytes == made.host_bytes > 1e8
  assert made.disk_write_cache > 1e6 and 1e6 < made.to_device < 1e13
  assert "1 MiB" in made.source
  with pytest.raises(OptionError, match="directory"):
    storage_rates.measure(str(tmp_path / "none"))


# ---------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------


def test_what_does_not_fit_is_said():
  task = OffloadTask(prompt=48, new=8)
  with pytest.raises(MemoryEstimateError, match="in all tiers"):
    offload.plan(
      SMALL, machine(device_bytes=1e5, host_bytes=1e3, disk_bytes=0), task
    )
  with pytest.raises(MemoryEstimateError, match="tier device"):
    offload.plan(SMALL, machine(device_bytes=1e4), task, rows=2)


def test_without_scipy(monkeypatch):
  monkeypatch.setitem(sys.modules, "scipy.optimize", None)
  with pytest.raises(OptionError, match="pip install scipy"):
    offload.plan(SMALL, machine())


@pytest.mark.parametrize(
  "text", ["", "48", "48x3", "48x3:1/2,3/4", "axb:0/0,0/0,0/0", "1x1:0,0,0"]
)
def test_text_that_is_no_policy(text):
  with pytest.raises(OptionError, match="policy"):
    OffloadPolicy.parse(text)


def test_values_out_of_range():
  for bad in ("0x3:0/0,0/0,0/0", "1x1:60/60,0/0,0/0"):
    with pytest.raises(OptionError):
      OffloadPolicy.parse(bad)
  for bad in ({"form": "other"}, {"weight_bits": 8}, {"prompt": 0}):
    with pytest.raises(OptionError):
      OffloadTask(**bad)
  disk = OffloadPolicy.parse("1x1:100/0,100/0,0/0")
  with pytest.raises(OptionError, match="hidden"):
    estimate(SMALL, machine(), OffloadTask(form="code"), disk)
  with pytest.raises(OptionError, match="opt-7b"):
    OffloadShape.opt("opt-7b")
