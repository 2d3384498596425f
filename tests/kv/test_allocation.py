"""Codecs for each layer and KV head, and how they are chosen."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import CheckpointFormatError, OptionError, ShapeError
from ringjax.eval import compare_caches
from ringjax.kv import kind_text
from ringjax.kv.base import CacheSpec, bytes_each
from ringjax.kv.bits.allocation_units import choose
from ringjax.kv.cache_kind import KINDS
from ringjax.models.checkpoint import abstract
from tests import checkpoints
from tests.contracts import cache as contract
from tests.helpers import make_mesh

CANDIDATES = ("hadamard4", "hadamard2")


@pytest.fixture(scope="module")
def texts():
  draw = np.random.default_rng(5).integers(1, 64, (2, 24))
  return draw.astype(np.int32)


@pytest.fixture(scope="module")
def made(texts):
  """Of a model of three layers of two KV heads."""
  return rj.kv.allocate_bits(
    contract.model(1), texts, bits=10, candidates=CANDIDATES
  )


def codec(name):
  return KINDS[name].codec


def test_bytes_are_those_of_the_heads_codecs():
  """Each head takes the bytes of its codec, whatever the others have."""
  model = contract.model(1)
  kind = contract.kind_of("per-head")
  slots = model.init_cache(2, 32, kind=kind).slots
  want = 0
  for shape in model.kinds:
    for row in kind.codec.table(shape):
      for n in row:
        one = kind.codec.codecs[n]
        want += one.keys.width(shape.key) + one.values.width(shape.value)
  got = sum(x.nbytes for x in jax.tree.leaves(slots))
  assert got == want * 2 * 32


def test_heads_of_one_codec_stay_together():
  """Layers that have one codec each are stored as they are of one kind."""
  model = contract.model(1)
  which = tuple((n % 2,) * 2 for n in range(3))
  kind = rj.kv.CacheConfig(
    codec=rj.kv.PerHead(codecs=(codec("int4"), codec("int8")), which=which)
  )
  cache = model.init_cache(2, 16, kind=kind)
  assert {x.shape[2] for x in jax.tree.leaves(cache.slots)} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "law"),
  [
    ("per-head", contract.blocks_are_loaded_bit_for_bit),
    ("per-head-nuq", contract.as_without_a_cache),
  ],
)
def test_some_laws_of_caches(kind, law):
  """All of them are among the longer tests of test_kinds."""
  law(contract.Setup(kind, 1))


@pytest.mark.slow
def test_generate_is_the_same_on_a_mesh(made):
  tokens = contract.text()[0][:2, :9]
  ask = lambda shards: rj.infer.generate(
    contract.model(shards), tokens, max_new_tokens=6, cache_kind=made.kind
  ).tokens.tolist()
  assert ask(4) == ask(1)


@pytest.mark.slow
def test_tokens_are_last_on_a_tpu(monkeypatch, made):
  tokens = contract.text()[0][:, :9]
  ask = lambda: rj.infer.generate(
    contract.model(1), tokens, max_new_tokens=6, cache_kind=made.kind
  ).tokens.tolist()
  want = ask()
  monkeypatch.setattr(CacheSpec, "platform", "tpu")
  cache = contract.model(1).init_cache_spec(2, 16, kind=made.kind)
  shapes = {(x.shape[-1], str(x.dtype)) for x in jax.tree.leaves(cache.slots)}
  assert shapes == {(16, "int8")}
  assert ask() == want


@pytest.mark.long
def test_the_budget_holds_and_losses_are_measured(made, texts):
  model = contract.model(1)
  assert made.bits <= 10 and made.calls == (6 * 2 + 2 + 2) * 2
  numbers = sum(shape.numbers() for shape in model.kinds)
  assert made.bits == 8 * made.bytes_per_token / numbers
  # What a cache of that kind takes, and costs.
  (cost,) = compare_caches(model, texts, {"": made.kind})
  # `compare_caches` counts positions, too.
  count = numbers * texts.shape[1]
  assert cost.bits == pytest.approx(8 * cost.nbytes / count)
  dense = bytes_each(model.init_cache_spec(1, texts.shape[1]))
  positions = 8 * dense / count - 32
  assert cost.bits == pytest.approx(made.bits + positions)
  assert made.loss == pytest.approx(cost.loss, abs=1e-5)
  assert made.measured == made.loss
  for n, name in enumerate(CANDIDATES):
    (cost,) = compare_caches(model, texts, {name: name})
    nbytes, loss = made.uniform[n]
    assert loss == pytest.approx(cost.loss, abs=1e-5)
    assert cost.bits == pytest.approx(8 * nbytes / numbers + positions)
  # No exchange of two heads' codecs is better by what was measured.
  units = [n for layer in made.keys for n in layer]
  spent = sum(row[n] for row, n in zip(made.losses, units, strict=True))
  assert made.predicted == pytest.approx(spent)
  for i, a in enumerate(units):
    for j, b in enumerate(units):
      swapped = made.losses[i][b] + made.losses[j][a]
      assert swapped >= made.losses[i][a] + made.losses[j][b] - 1e-9


def test_more_bytes_never_cost_more_by_prediction(made):
  sizes = [[10, 6]] * 6
  losses = [list(row) for row in made.losses]
  spent = []
  for budget in range(36, 61, 4):
    found = choose(sizes, losses, budget)
    assert sum(s[n] for s, n in zip(sizes, found, strict=True)) <= budget
    spent.append(sum(x[n] for x, n in zip(losses, found, strict=True)))
  assert spent == sorted(spent, reverse=True)


def test_steps_on_the_hull_come_first_and_then_what_fits():
  # The middle one of the first unit saves less a byte than the step to the
  # last, so it is there for a byte that is left; the last one of the second
  # costs more than the one before it.
  sizes, losses = [[1, 2, 3], [1, 2, 3]], [[9.0, 8.0, 0.0], [9.0, 1.0, 2.0]]
  assert choose(sizes, losses, 3) == [0, 1]
  assert choose(sizes, losses, 4) == [1, 1]
  assert choose(sizes, losses, 5) == [2, 1]
  assert choose(sizes, losses, 6) == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["loss", "kl"])
def test_by_layer_and_by_part(texts, measure):
  model = contract.model(1)
  ask = lambda by: rj.kv.allocate_bits(
    model, texts, bits=10, candidates=CANDIDATES, by=by, measure=measure
  )
  layers = ask("layer")
  assert all(len({*row}) == 1 for row in layers.keys)
  assert layers.keys == layers.values and layers.calls == (3 * 2 + 4) * 2
  parts = ask("part")
  assert len(parts.losses) == 12 and parts.bits <= 10
  for found in (layers, parts):
    (cost,) = compare_caches(model, texts, {"": found.kind})
    assert found.loss == pytest.approx(cost.loss, abs=1e-5)
    if measure == "kl":
      assert found.measured == pytest.approx(cost.kl, abs=1e-5)
      assert min(map(min, found.losses)) > -1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("family", ["latent", "recurrent", "grouped"])
def test_families_and_meshes(family, kind):
  name = contract.FAMILIES[family]
  model = rj.models.create(
    checkpoints.config(name), seed=1, mesh=make_mesh(4, kind)
  )
  texts = np.random.default_rng(5).integers(1, 64, (1, 24)).astype(np.int32)
  found = rj.kv.allocate_bits(model, texts, bits=10, candidates=CANDIDATES)
  (cost,) = compare_caches(model, texts, {"": found.kind})
  assert found.loss == pytest.approx(cost.loss, abs=1e-4)
  out = rj.infer.generate(
    model, texts[:, :9], max_new_tokens=4, cache_kind=found.kind
  )
  assert out.tokens.shape == (1, 4)


def test_a_file_keeps_it(made, texts, tmp_path):
  folder = tmp_path / "new"
  model = contract.model(1)
  done = []
  again = rj.kv.allocate_bits(
    model,
    texts,
    bytes_per_token=made.bytes_per_token,
    candidates=CANDIDATES,
    folder=folder,
    progress=lambda n, total: done.append((n, total)),
  )
  assert done == [(n + 1, made.calls) for n in range(made.calls)]
  assert [path.name for path in folder.iterdir()] == ["kv_bits.json"]
  assert again.kind == made.kind
  read = rj.kv.Allocation.load(folder, model)
  assert read == again and f"{read}" == f"{made}"
  kind = model.cache_kind(kind_text.parse(f"allocated:table={folder}"))
  assert kind == made.kind
  assert model.cache_kind(kind_text.parse(str(kind))) == kind
  assert model.init_cache(1, 16, kind=kind).explain().loss == made.loss


def test_a_killed_run_resumes(made, texts, tmp_path):
  model = contract.model(1)

  def run(stop, calls):
    def progress(n, total):
      calls.append(n)
      if n == stop:
        raise KeyboardInterrupt

    return rj.kv.allocate_bits(
      model,
      texts,
      bits=10,
      candidates=CANDIDATES,
      folder=tmp_path,
      progress=progress,
    )

  calls = []
  with pytest.raises(KeyboardInterrupt):
    run(11, calls)
  again = run(None, calls)
  # Five choices of two texts each were there.
  assert calls == [*range(1, 12), *range(11, made.calls + 1)]
  assert again.kind == made.kind and again.loss == made.loss
  assert [path.name for path in tmp_path.iterdir()] == ["kv_bits.json"]


@pytest.mark.slow
def test_calibrated_candidates_and_their_file(tmp_path, texts):
  model = contract.model(1)
  rj.infer.calibrate(model, texts, folder=tmp_path)
  kinds = [
    kind_text.parse(f"{name}:calibration={tmp_path}")
    for name in ("nuq3", "nuq2")
  ]
  found = rj.kv.allocate_bits(
    model, texts, bits=15, by="layer", candidates=kinds, folder=tmp_path
  )
  assert found.kind.layout.unrotated and found.candidates == ("nuq3", "nuq2")
  read = rj.kv.Allocation.load(tmp_path, model)
  assert read.kind == found.kind
  rj.infer.calibrate(model, texts[:1], folder=tmp_path)
  with pytest.raises(OptionError, match="measured with"):
    rj.kv.Allocation.load(tmp_path, model)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({}, "bits, bytes_per_token: got None, None; wanted one of them"),
    ({"bits": 3, "bytes_per_token": 9}, "wanted one of them"),
    ({"bits": 0}, "bits: got 0; wanted a number above 0"),
    ({"bits": float("nan")}, "bits: got nan"),
    ({"bytes_per_token": -1}, "bytes_per_token: got -1"),
    ({"bits": 2}, "which the cheapest of hadamard4, hadamard2 take"),
    ({"bits": 4, "by": "token"}, "one of layer, head, part"),
    ({"bits": 4, "measure": "error"}, "one of loss, kl"),
    ({"bits": 4, "candidates": ()}, "two kinds"),
    ({"bits": 4, "candidates": ("int3",)}, "candidates: got 'int3'"),
    ({"bits": 4, "candidates": ("dense", "int4")}, "kinds with one codec"),
    ({"bits": 4, "candidates": ("int4", "int4")}, "each once"),
    ({"bits": 4, "candidates": ("nuq3", "nuq2")}, "without a calibration"),
    ({"bits": 4, "candidates": ("int4+sinks",)}, "without a policy"),
    (
      {"bits": 4, "candidates": ("int4", "int8:unrotated=True")},
      "before their rotation, or none",
    ),
    (
      {"bits": 4, "candidates": ("allocated:table=x", "int4")},
      "no such file|No such file",
    ),
  ],
)
def test_what_is_refused(texts, options, says):
  options = {"candidates": CANDIDATES} | options
  with pytest.raises(
    (OptionError, CheckpointFormatError), match=says
  ) as caught:
    rj.kv.allocate_bits(contract.model(1), texts, **options)
  assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("unchecked")
def test_texts_and_tables_that_are_refused(made, texts):
  model = contract.model(1)
  with pytest.raises(ShapeError, match="integers"):
    rj.kv.allocate_bits(model, texts[0], bits=4)
  both = (codec("int4"), codec("nuq3"))
  with pytest.raises(OptionError, match="CodeBook.*Integers"):
    rj.kv.PerHead(codecs=both, which=((0, 1),))
  with pytest.raises(OptionError, match="an int from 0 to 0"):
    rj.kv.PerHead(codecs=both[:1], which=((0, 1),))
  with pytest.raises(OptionError, match="pages hold vectors of one length"):
    dataclasses.replace(made.kind, policy=rj.kv.SnapKV())
  with pytest.raises(OptionError, match="pages hold vectors of one length"):
    dataclasses.replace(made.kind, recent=4)
  short = dataclasses.replace(made.kind.codec, which=made.keys[:2])
  with pytest.raises(OptionError, match="a table of 2 layers"):
    model.init_cache(1, 8, kind=rj.kv.CacheConfig(codec=short))
  mesh = jax.make_mesh((2,), ("model",), axis_types=_AUTO)
  attend = rj.models.CachedAttention(mesh=mesh, axis=None)
  with pytest.raises(OptionError, match="heads sharded over 'model'"):
    model.init_cache(1, 8, sharding=attend, kind=made.kind)
  with pytest.raises(OptionError, match="name its folder"):
    model.init_cache(1, 8, kind="allocated")


_AUTO = (jax.sharding.AxisType.Auto,)


def test_files_that_are_refused(made, tmp_path):
  model = contract.model(1)
  path = made.save(tmp_path)
  kind = kind_text.parse(f"allocated:table={tmp_path}")
  with pytest.raises(OptionError, match="shapes alone"):
    abstract(contract.CONFIG).init_cache_spec(1, 8, kind=kind)
  body = json.loads(path.read_text())
  load = lambda: rj.kv.Allocation.load(tmp_path, model)
  for name, value, error, says in (
    ("model", "0" * 16, OptionError, "of a model of digest 0000"),
    ("format", "other", CheckpointFormatError, "no file of format"),
    ("keys", [[0, 1]], CheckpointFormatError, "kv_bits.json"),
    ("keys", [[0, 7]] * 3, CheckpointFormatError, "kv_bits.json"),
    ("candidates", ["int3", "int2"], CheckpointFormatError, "int3"),
    ("more", 1, CheckpointFormatError, "other fields"),
  ):
    path.write_text(json.dumps(body | {name: value}))
    with pytest.raises(error, match=says):
      load()
  path.write_text("{")
  with pytest.raises(CheckpointFormatError, match="what allocate_bits wrote"):
    load()
  with pytest.raises(CheckpointFormatError, match="No such file"):
    rj.kv.Allocation.load(tmp_path / "none.json", model)
