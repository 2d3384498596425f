"""What a call keeps in each memory is no more than what was declared for it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import MemoryEstimateError, OptionError
from ringjax.infer.prefill import PrefillConfig
from ringjax.infer.prompt_reading import planned
from ringjax.kv.base import bytes_each
from ringjax.kv.cache_kind import KINDS
from ringjax.models.weights.weight_placement import weight_bytes
from tests import checkpoints
from tests.helpers import refused

LAYERS = 5
PROMPTS = [[5, 6, 7, 8, 9, 1, 2, 3, 4], [3, 4, 1], [2, 2, 7, 1]]
CALL = dict(prompt=9, new=4, rows=3, rows_at_once=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  config = checkpoints.config("llama3") | {"num_hidden_layers": LAYERS}
  path = tmp_path_factory.mktemp("call") / "model"
  rj.models.save(rj.models.create(config, seed=3), path)
  return path


def total(found):
  return {tier: sum(parts.values()) for tier, parts in found.items()}


def on_devices():
  """Bytes of all arrays that are in a device's own memory, by their ids."""
  return {
    id(x): x.nbytes
    for x in jax.live_arrays()
    if x.sharding.memory_kind != "pinned_host"
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  "cache",
  [pytest.param("device=.2,host=.4,disk=.4", marks=pytest.mark.long), None],
)
def test_a_call_stays_within_what_was_declared(cache, folder, tmp_path):
  placed = {"cache_placement": cache, "hidden_placement": "host"}
  disk = tmp_path if cache is not None else None
  call = rj.infer.CallMemory(**CALL, **placed, disk=disk)
  streamed = rj.models.load(folder, placement="disk")
  needs = total(call(streamed))
  layer = streamed.placement_report().disk_bytes // LAYERS
  # Two layers fit beside those that pass through, and beside the call.
  memory = weight_bytes(streamed)["device"] + needs["device"] + 2 * layer + 9
  del streamed
  before, seen, reports = on_devices(), [], []
  model = rj.models.load(folder, memory=memory, placement="disk", beside=call)
  assert model.placement_report().tiers.count("device") == 2
  alone = rj.models.load(folder, memory=memory, placement="disk")
  assert alone.placement_report().tiers.count("device") > 2
  del alone

  def stream(_):
    now = on_devices()
    seen.append(sum(n for key, n in now.items() if key not in before))

  rj.infer.generate(
    model, PROMPTS, max_new_tokens=4, rows_at_once=2, **placed, disk=disk,
    stream=stream, report=reports.append,
  )  # fmt: skip
  found = reports[0].memory
  assert total(found)["device"] <= memory
  declared = call(model)
  for tier, parts in declared.items():
    for name, nbytes in parts.items():
      assert found[tier][name] <= nbytes, (tier, name)
  assert found["disk"]["weights"] == 3 * layer
  assert found["host"]["weights"] <= model.placement_report().buffer_bytes
  assert (found["disk"]["cache"] > 0) == (cache is not None)
  assert found["host"]["hidden"] > 0
  # What is there between steps: no more than was counted.
  device = found["device"]
  assert 0 < max(seen) <= device["weights"] + device["cache"] + device["work"]


def test_a_smaller_call_has_less(folder):
  model = rj.models.load(folder, placement="device=.5,disk=.5")
  want = rj.infer.CallMemory(prompt=60, new=9, rows=4)(model)
  for less in (
    {"rows": 2}, {"prompt": 20}, {"rows_at_once": 1}, {"chunk": 16},
    {"cache_placement": "host"}, {"cache_kind": "int8"},
  ):  # fmt: skip
    options = dict(prompt=60, new=9, rows=4) | less
    found = rj.infer.CallMemory(**options)(model)
    assert total(found)["device"] < total(want)["device"], less


@pytest.mark.parametrize(
  "options",
  [
    {"chunk": 64},
    {"method": "kvr", "partition": (40, 16, 9)},
    {"method": "kvr"},
  ],
)
def test_the_cache_is_no_larger_than_declared(options, folder):
  """Chunks, and uneven parts, take other slots than a prompt at once."""
  mesh = rj.make_mesh((3,), ("seq",)) if "method" in options else None
  model = rj.models.load(folder, mesh=mesh)
  how = PrefillConfig(**options)
  own = dict(mesh=mesh, axis=None, dtype=None, cache_kind=KINDS["dense"])
  for prompt in (65, 64):
    declared = rj.infer.CallMemory(
      prompt=prompt, new=4, cache_kind="dense", prefill=how.method,
      chunk=how.chunk, partition=how.partition,
    )(model, mesh)  # fmt: skip
    session, _, _ = planned(
      model, None, how, own, np.zeros(1, int), np.array([prompt]), 4
    )
    found = bytes_each(session.cache)
    # What makes it a multiple of the shards is all that is more.
    assert found <= declared["device"]["cache"] < 1.1 * found


def test_what_does_not_fit_is_refused_unread(folder, tmp_path):
  bad = tmp_path / "model"
  rj.models.save(rj.models.load(folder), bad)
  (file,) = bad.glob("*.safetensors")
  data = bytearray(file.read_bytes())
  # Numbers that are not finite: read, they are an error.
  data[-4096:] = b"\xff" * 4096
  file.write_bytes(data)
  whole = file.stat().st_size
  call = rj.infer.CallMemory(prompt=5000, new=5000, rows=50)
  load = lambda **options: rj.models.load(bad, beside=call, **options)
  refused(MemoryEstimateError, lambda: load(memory=whole), "of the call")
  refused(OptionError, load, "beside")
  refused(rj.errors.CheckpointMismatchError, lambda: rj.models.load(bad))
  huge = rj.infer.CallMemory(
    prompt=1 << 20, new=1, rows=1 << 12, cache_placement="disk", disk=tmp_path
  )
  model = rj.models.load(folder)
  refused(MemoryEstimateError, lambda: huge(model), "free")
  for wrong, words in (
    ({"prompt": 0}, "prompt"),
    ({"cache_placement": "disk"}, "disk: got None"),
    ({"cache_placement": "disk", "disk": tmp_path / "no"}, "that exists"),
    ({"disk": tmp_path}, "without a cache on disk"),
    ({"prefill": "dense", "chunk": 8}, "chunk"),
  ):
    call = dict(prompt=1, new=1) | wrong
    refused(OptionError, lambda: rj.infer.CallMemory(**call), words)  # noqa: B023
