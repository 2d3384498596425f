"""Calibration of code books: what it finds, its file, a run that is killed."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import ringjax as rj
from ringjax.errors import CheckpointFormatError, OptionError, ShapeError
from ringjax.infer.calibrate import PARTIAL, levels, nll, normalize
from ringjax.kv import kind_text
from ringjax.models.weights import calibration as files
from ringjax.models.weights.calibration import (
  FILE,
  load_calibration,
  save_calibration,
)
from ringjax.serve import Engine, Request
from tests import checkpoints, object_servers
from tests.helpers import SMALL

# `rj.infer.calibrate` is the function.
calibrate_module = sys.modules["ringjax.infer.calibrate"]

CONFIG = {
  **SMALL,
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "initializer_range": 0.2,
}
ROWS = np.random.default_rng(2).integers(0, 64, (3, 48)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
  return rj.models.create(CONFIG, seed=0)


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
  folder = tmp_path_factory.mktemp("calibration")
  told = []
  made = rj.infer.calibrate(
    model, ROWS, folder=folder, progress=lambda done, all_: told.append(done)
  )
  assert told == [1, 2, 3, 4, 5, 6]
  assert [path.name for path in folder.iterdir()] == [FILE]
  return folder, made


def moved(model, kind):
  """How far a codec moves the logits of a text, and its bits a number."""
  text = np.random.default_rng(7).integers(0, 64, (2, 64)).astype(np.int32)
  kind = model.cache_kind(kind)
  got, _ = model(text, cache=rj.kv.SimulatedCache.create(model, kind))
  return float(jnp.sqrt(jnp.mean(jnp.square(got - model(text)))))


@pytest.mark.slow
def test_code_books_beat_integers_and_more_bits_are_better(model, found):
  _, made = found
  books = [
    moved(model, rj.kv.KINDS[f"nuq{n}"].with_options({"calibration": made}))
    for n in (2, 3, 4)
  ]
  assert books[0] > 1.5 * books[1] > 2 * books[2] > 0
  # By fewer bytes, and by less than integers of as many bits.
  for bits, error in zip((2, 3), books, strict=False):
    whole = rj.kv.Integers(bits=bits)
    assert rj.kv.CodeBook(bits=bits).width(16) < whole.width(16)
    codec = rj.kv.Codec(keys=whole, values=whole)
    assert error < moved(model, rj.kv.CacheConfig(codec=codec))


@pytest.fixture(scope="module")
def sinks():
  """A model in which token 1, and no other, has keys far from all others.

  Its embedding is a number of its own, which only keys read; and what was
  measured on texts that begin with it.
  """
  model = rj.models.create(CONFIG, seed=0)
  _, state = nnx.split(model)

  def plant(path, x):
    name = jax.tree_util.keystr(path)
    if "embed" in name:
      x = x.at[:, 0].set(0)
      return x.at[1].set(0).at[1, 0].set(10.0)
    if "['k']" in name:
      return x.at[:, 0].multiply(5)
    if "['o']" in name or "['down']" in name:
      return x.at[..., 0].set(0)
    return x

  nnx.update(model, jax.tree_util.tree_map_with_path(plant, state))
  texts = ROWS.copy()
  texts[:, 0] = 1
  return model, rj.infer.calibrate(model, texts), texts


@pytest.mark.long
def test_the_first_token_has_fine_codes_at_no_more_bytes(sinks):
  """So that levels are better than integers and rotated codes at equal bits."""
  model, made, _ = sinks
  text = np.random.default_rng(7).integers(2, 64, (2, 64)).astype(np.int32)
  text[:, 0] = 1

  def far(kind):
    cache = rj.kv.SimulatedCache.create(model, kind)
    got, _ = model(text, cache=cache, attend=rj.models.CachedAttention())
    return float(jnp.sqrt(jnp.mean(jnp.square(got - model(text)))))

  unmeasured = dataclasses.replace(
    made,
    digest="without",
    arrays={
      name: x
      for name, x in made.arrays.items()
      if not name.endswith(("sink", "factor"))
    },
  )
  kind = rj.kv.KINDS["nuq3"]
  coded = far(kind.with_options({"calibration": made}))
  exact = far(kind.with_options({"calibration": made, "first": 1}))
  without = far(kind.with_options({"calibration": unmeasured}))
  # The exact token has exact values, too.
  assert coded < 1.6 * exact
  assert without > 1.5 * coded
  assert coded < min(far("hadamard3"), far("int4:bits=3"))
  dims = model.kinds[0].key
  assert rj.kv.CodeBook(bits=3).width(dims) == 3 * dims // 8 + 3


@pytest.mark.slow
def test_an_engine_reads_the_sink_out_of_its_pages(sinks):
  model, made, texts = sinks
  kind = rj.kv.KINDS["nuq4"].with_options({"calibration": made})
  prompts = [texts[0, :20], np.concatenate([texts[0, :18], texts[1, 3:9]])]
  alone = [
    rj.infer.generate(
      model, [p], max_new_tokens=8, cache_kind=kind, prefill="chunked", chunk=64
    )
    for p in prompts
  ]
  engine = Engine(
    model, rows=2, capacity=64, longest=40, page=16, piece=16, pieces=2,
    cache_kind=kind,
  )  # fmt: skip
  handles = [
    engine.submit(Request(prompt=p, max_new_tokens=8)) for p in prompts
  ]
  engine.run()
  for handle, new in zip(handles, alone, strict=True):
    np.testing.assert_array_equal(handle.result().tokens, new.tokens[0])


def test_options_other_than_those_of_the_calibration_are_refused(model, found):
  folder, made = found
  for source in (made, str(folder)):
    kind = lambda source=source, **options: model.cache_kind(
      rj.kv.KINDS["nuq3"].with_options({"calibration": source} | options)
    )
    assert kind(first=1).first == 1
    with pytest.raises(OptionError, match=r"outliers=0\.01"):
      kind(**{"keys.outliers": 0.02})
    with pytest.raises(OptionError, match=r"outliers=0\.01"):
      kind(**{"values.outliers": 0})
    with pytest.raises(OptionError, match=r"outliers=0\.01"):
      kind(**{"keys.outliers": "1%", "values.outliers": "1%"})
    with pytest.raises(OptionError, match="left out 1 token"):
      kind(first=2)
    with pytest.raises(OptionError, match="keys=token"):
      kind(**{"keys.by": "token"})
    with pytest.raises(OptionError, match="keys before their rotation"):
      kind(unrotated=False)
  with pytest.raises(OptionError, match="fitted to scales by token"):
    rj.kv.KINDS["nuq3"].with_options({"values.by": "channel"})
  with pytest.raises(OptionError, match="levels fit keys of one sort"):
    rj.kv.CacheConfig(codec=rj.kv.Calibrated(unrotated=False), unrotated=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("keys", "rotated"), [("token", False), ("channel", True), ("token", True)]
)
def test_keys_of_another_sort_have_levels_of_their_own(
  model, found, tmp_path, keys, rotated
):
  """They are read from the file, by kinds of that sort alone, and fit."""
  made = rj.infer.calibrate(
    model, ROWS, keys=keys, rotated=rotated, folder=tmp_path
  )
  again = load_calibration(tmp_path, model)
  assert (again, again.keys, again.rotated) == (made, keys, rotated)
  assert ("0.keys.scale" in made.arrays) == (keys == "channel")
  name = f"nuq3:keys.by={keys},unrotated={not rotated}"
  kind = kind_text.parse(name)
  assert kind_text.parse(str(kind)) == kind
  assert kind.codec.unrotated == kind.layout.unrotated == (not rotated)
  kind = kind.with_options({"calibration": str(tmp_path)})
  with pytest.raises(OptionError, match=r"keys\.by|unrotated"):
    model.cache_kind(
      rj.kv.KINDS["nuq3"].with_options({"calibration": str(tmp_path)})
    )
  # Even levels, and scales of the other sort, as if they had been measured.
  wrong = dataclasses.replace(
    made, digest="wrong", arrays={**made.arrays, **found[1].arrays}
  )
  even = np.linspace(-1, 1, 8, dtype=np.float32)
  shape = wrong.arrays["0.keys.levels3"].shape
  wrong.arrays["0.keys.levels3"] = np.broadcast_to(even, shape)
  assert moved(model, kind) < moved(
    model, kind.with_options({"calibration": wrong})
  )
  # A cache of its own answers as the call that stores nothing.
  text = ROWS[:1, :20]
  plain, _ = model(text, cache=rj.kv.SimulatedCache.create(model, kind))
  cache, got = model.init_cache(1, 32, kind=kind), []
  for n in range(20):
    logits, cache = model(text[:, n : n + 1], cache=cache)
    got.append(np.asarray(logits)[:, 0])
  far = np.abs(np.stack(got, 1) - plain) / np.abs(plain).max()
  assert np.quantile(far, 0.9) < 1e-3


@pytest.mark.long
def test_outliers_of_pages_have_a_calibration_of_their_own(model, tmp_path):
  made = rj.infer.calibrate(
    model, ROWS, outliers="5%", weights="none", folder=tmp_path
  )
  again = load_calibration(tmp_path, model)
  assert (again, again.outliers) == (made, "5%")
  each = rj.infer.calibrate(model, ROWS, outliers=0.05, weights="none")
  of_keys = "0.keys.scale", "0.keys.levels3"
  for name in of_keys:
    np.testing.assert_array_equal(made.arrays[name], each.arrays[name])
  levels3 = "0.values.levels3"
  assert not np.array_equal(made.arrays[levels3], each.arrays[levels3])
  source = {"calibration": str(tmp_path)}
  kind = kind_text.parse("nuq3:outliers=5%").with_options(source)
  assert model.cache_kind(kind).codec.calibration == made
  for other in ("outliers=0.01", "outliers=1%", "values.outliers=0.05"):
    refused = kind_text.parse(f"nuq3:{other}").with_options(source)
    with pytest.raises(OptionError, match="write outliers=5%"):
      model.cache_kind(refused)
  # Channels have the same scales.
  for source, text in (
    (made, "keys.outliers=0.05,values.outliers=5%"),
    (each, "keys.outliers=5%,values.outliers=0.05"),
  ):
    kind = kind_text.parse(f"nuq3:{text}")
    model.cache_kind(kind.with_options({"calibration": source}))
  (tmp_path / "bad").mkdir()
  bad = dataclasses.replace(made, outliers="500%")
  save_calibration(bad, tmp_path / "bad")
  with pytest.raises(CheckpointFormatError, match="500%"):
    load_calibration(tmp_path / "bad", model)


def test_a_file_from_before_the_sink_is_read(model, found, tmp_path):
  """It says neither outliers nor first, and no key is near its sink."""
  arrays = {
    name: x
    for name, x in found[1].arrays.items()
    if not name.endswith(("sink", "factor"))
  }
  old = files.make(found[1].model, arrays)
  path = save_calibration(old, tmp_path)
  again = load_calibration(path, model)
  assert (again, again.first, again.outliers) == (old, None, None)
  kind = rj.kv.KINDS["nuq3"].with_options({"calibration": str(tmp_path)})
  assert moved(model, kind) > 0


def test_a_calibration_at_an_address(model, found):
  with object_servers.served("memory") as bucket:
    calibration = files.make(found[1].model, found[1].arrays)
    place = save_calibration(calibration, f"{bucket}/nuq")
    for source in (f"{bucket}/nuq", place):
      assert load_calibration(source, model) == calibration
    kind = kind_text.parse(f"nuq3:calibration={bucket}/nuq")
    assert model.cache_kind(kind).codec.calibration == calibration
    with pytest.raises(CheckpointFormatError, match="no such object"):
      load_calibration(f"{bucket}/other", model)
    place.write_bytes(place.read_bytes()[:-9])
    with pytest.raises(CheckpointFormatError, match="whole safetensors"):
      load_calibration(place, model)


def test_normalized_levels_keep_mean_and_deviation():
  draw = np.random.default_rng(0).normal(0.1, 0.25, 20_000).clip(-1, 1)
  count, edges = np.histogram(draw, 1024, (-1, 1))
  middle = (edges[1:] + edges[:-1]) / 2
  cells = lambda x: np.float32(x)[None, None]
  plain = levels(cells(count), cells(count * middle), 4)
  wide = normalize(plain, cells(count))[0, 0]
  code = np.abs(draw[:, None] - plain[0, 0]).argmin(1)
  assert plain[0, 0][code].std() < 0.97 * draw.std()
  assert wide[code].std() == pytest.approx(draw.std(), rel=3e-3)
  assert wide[code].mean() == pytest.approx(draw.mean(), abs=1e-3)


def test_scales_leave_the_outliers_out(model, found):
  _, made = found
  spec = model.kinds[0]
  scale, zero = made.arrays["0.keys.scale"], made.arrays["0.keys.zero"]
  assert scale.shape == zero.shape == (spec.layers, spec.heads, spec.key)
  for bits in (2, 3, 4):
    for part in ("keys", "values"):
      known = made.arrays[f"0.{part}.levels{bits}"]
      assert known.shape == (spec.layers, spec.heads, 2**bits)
      assert (np.diff(known) >= 0).all() and (np.abs(known) <= 1).all()


def test_levels_are_the_weighted_means_of_their_cells():
  weight, total = np.zeros((2, 1, 1, 1024), np.float32)
  for cell, mass in ((10, 1.0), (30, 3.0), (900, 2.0), (910, 2.0)):
    x = (cell + 0.5) / 512 - 1
    weight[..., cell], total[..., cell] = mass, mass * x
  low, high = levels(weight, total, 2)[0, 0]
  assert low == pytest.approx((25 + 0.5) / 512 - 1, abs=1e-4)
  assert high == pytest.approx((905 + 0.5) / 512 - 1, abs=1e-4)


def test_the_loss_of_blocks_of_tokens_is_that_of_all(model):
  """Its gradients too; 47 tokens are no whole number of blocks."""
  labels = jnp.asarray(ROWS[0, 1:])
  h = np.random.default_rng(4).normal(size=(47, model.config.embed))
  h = jnp.asarray(h, jnp.float32)

  def plain(h):
    chance = jax.nn.log_softmax(model.logits(h), -1)
    return -jnp.sum(jnp.take_along_axis(chance, labels[:, None], -1))

  blocks = lambda h: nll(model, h, labels, block=16)
  for got, want in zip(
    jax.value_and_grad(blocks)(h), jax.value_and_grad(plain)(h), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_gradients_take_less_memory_than_the_logits():
  """Of a vocabulary of 65,536, by the compiler's count."""
  wide = {**CONFIG, "vocab_size": 65536}
  work = calibrate_module._Work(
    rj.models.create(wide, seed=0), np.ones((1, 512), np.int32), [0], 0.01, 1,
    "fisher", "", "channel", False,
  )  # fmt: skip
  with np.errstate(invalid="ignore"):
    # Nothing was measured; only shapes matter.
    scales = {0: work.scales(0)}
  lowered = work._counts.lower(
    work.model, work.attend, work.ids, work.arrays, scales, 1, 0.01, "fisher",
    False,
  )  # fmt: skip
  memory = lowered.compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * 512 * 65536


@pytest.mark.slow
def test_levels_without_gradients_are_others(model, found, tmp_path):
  """Their scales are the same; the file says which they are."""
  plain = rj.infer.calibrate(model, ROWS, weights="none", folder=tmp_path)
  again = load_calibration(tmp_path, model)
  assert (again, again.weights) == (plain, "none")
  assert found[1].weights == "fisher" and found[1] != plain
  name = "0.keys.scale"
  np.testing.assert_array_equal(plain.arrays[name], found[1].arrays[name])
  # Levels at equal parts of the numbers, not of what the loss minds.
  mine, other = (x.arrays["0.keys.levels3"] for x in (plain, found[1]))
  assert np.abs(mine - other).max() > 0.02
  with pytest.raises(OptionError, match="weights"):
    rj.infer.calibrate(model, ROWS, weights="hessian")


@pytest.mark.long
def test_a_run_that_was_killed_resumes(model, found, tmp_path):
  _, want = found
  folder = tmp_path / "new" / "folder"

  def stop(done, total):
    if done == 4:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    rj.infer.calibrate(model, ROWS, folder=folder, progress=stop)
  assert [path.name for path in folder.iterdir()] == [PARTIAL]
  told = []
  made = rj.infer.calibrate(
    model, ROWS, folder=folder, progress=lambda done, _: told.append(done)
  )
  assert told == [5, 6] and made == want
  # Of other texts nothing is taken over.
  with pytest.raises(KeyboardInterrupt):
    rj.infer.calibrate(model, ROWS, folder=folder, progress=stop)
  other = rj.infer.calibrate(model, ROWS[:2], folder=folder)
  assert other == rj.infer.calibrate(model, ROWS[:2])


@pytest.mark.slow
def test_latent_attention_is_measured_too():
  """Its levels are those of its latents: of unmeasured ones they are even."""
  latent = rj.models.create(checkpoints.config("deepseek_v3"), seed=0)
  made = rj.infer.calibrate(latent, ROWS)
  for n, shape in enumerate(latent.kinds):
    assert not shape.value
    steps = np.diff(made.arrays[f"{n}.keys.levels3"], axis=-1)
    assert steps.max() > 1.2 * steps.min() > 0
  errors = [
    moved(latent, rj.kv.KINDS[f"nuq{n}"].with_options({"calibration": made}))
    for n in (2, 4)
  ]
  assert errors[0] > 2 * errors[1] > 0


def test_a_broken_part_of_a_run_is_read_anew(model, found, tmp_path):
  (tmp_path / PARTIAL).write_bytes(b"broken")
  assert rj.infer.calibrate(model, ROWS, folder=tmp_path) == found[1]


@pytest.mark.slow
def test_generate_and_sessions_take_the_folder(model, found):
  folder, made = found
  ask = lambda **options: (
    rj.infer.generate(model, ROWS[:2, :20], max_new_tokens=6, **options).tokens
  )
  kind = rj.kv.KINDS["nuq4"].with_options({"calibration": str(folder)})
  got = ask(cache_kind=kind)
  session = rj.infer.Session(model, 64, batch=2, cache_kind=kind)
  assert session.cache.kind.codec.calibration == made
  np.testing.assert_array_equal(ask(cache=session), got)


def test_what_is_refused(unchecked, model, found, tmp_path):
  folder, _ = found
  with pytest.raises(OptionError, match=r"launch\.calibrate"):
    model.init_cache(1, 32, kind="nuq3")
  other = rj.models.create(CONFIG, seed=1)
  with pytest.raises(OptionError, match="of a model of digest"):
    load_calibration(folder, other)
  with pytest.raises(CheckpointFormatError, match="safetensors"):
    load_calibration(tmp_path, model)
  data = (folder / FILE).read_bytes()
  (tmp_path / FILE).write_bytes(data[:-100])
  with pytest.raises(CheckpointFormatError, match="calibrate again"):
    load_calibration(tmp_path, model)
  arrays = load_file(folder / FILE)
  arrays["0.keys.scale"][0, 0, 0] = np.nan
  save_file(arrays, tmp_path / FILE)
  with pytest.raises(CheckpointFormatError, match="not finite"):
    load_calibration(tmp_path, model)
  arrays["0.keys.scale"][0, 0, 0] = 1.0
  save_file(arrays, tmp_path / FILE)
  with pytest.raises(CheckpointFormatError, match="another digest"):
    load_calibration(tmp_path, model)
  with pytest.raises(ShapeError, match="a row for each text"):
    rj.infer.calibrate(model, ROWS[0])
  with pytest.raises(OptionError, match="outliers"):
    rj.infer.calibrate(model, ROWS, outliers=0.9)


@pytest.mark.parametrize(
  "change",
  [{}, {"num_hidden_layers": 3},
   {"num_attention_heads": 8, "num_key_value_heads": 4},
   *(pytest.param(x, marks=pytest.mark.long) for x in (
     {"num_hidden_layers": 1},
     {"num_attention_heads": 2, "num_key_value_heads": 1}))],
)  # fmt: skip
def test_a_calibration_of_another_model_is_refused(found, change):
  """Not only as a file, and whatever shapes the other model has."""
  other = rj.models.create(CONFIG | change, seed=1)
  kind = rj.kv.KINDS["nuq3"].with_options({"calibration": found[1]})
  for make in (
    lambda: other.cache_kind(kind),
    lambda: other.init_cache(1, 32, kind=kind),
    lambda: rj.infer.Session(other, 32, cache_kind=kind),
    lambda: rj.kv.SimulatedCache.create(other, kind),
  ):
    with pytest.raises(OptionError, match="of a model of digest"):
      make()


def test_weights_in_another_dtype_are_the_same_model(model, found):
  folder, made = found
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
  assert load_calibration(folder, half) == made
  kind = rj.kv.KINDS["nuq3"].with_options({"calibration": made})
  assert half.cache_kind(kind) == model.cache_kind(kind) == kind
