"""Calibration of code books: what it finds, its file, a run that is killed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ringjax as rj
from ringjax.errors import CheckpointFormatError, OptionError, ShapeError
from ringjax.infer.calibrate import PARTIAL, levels
from ringjax.models.calibration import FILE, load_calibration
from tests import checkpoints
from tests.helpers import SMALL

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
    assert error < moved(model, rj.kv.CacheKind(codec=codec))


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


@pytest.mark.long
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


def test_a_run_that_was_killed_resumes(model, found, tmp_path):
  _, want = found

  def stop(done, total):
    if done == 4:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    rj.infer.calibrate(model, ROWS, folder=tmp_path, progress=stop)
  assert [path.name for path in tmp_path.iterdir()] == [PARTIAL]
  told = []
  made = rj.infer.calibrate(
    model, ROWS, folder=tmp_path, progress=lambda done, _: told.append(done)
  )
  assert told == [5, 6] and made == want
  # Of other texts nothing is taken over.
  with pytest.raises(KeyboardInterrupt):
    rj.infer.calibrate(model, ROWS, folder=tmp_path, progress=stop)
  other = rj.infer.calibrate(model, ROWS[:2], folder=tmp_path)
  assert other == rj.infer.calibrate(model, ROWS[:2])


@pytest.mark.long
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
