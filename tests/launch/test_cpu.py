"""What a CPU gets where no flag says more: one device, fast weights, rates."""

from __future__ import annotations

import io
import json

import jax
import jax.numpy as jnp
import pytest

import ringjax as rj
from launch import calibrate, evaluate, generate
from launch.shared import answering, common, console, model_flags
from launch.shared.group import Group
from ringjax.data import Bytes
from ringjax.models import checkpoint
from tests.launch.conftest import CONFIG, PATIENCE_S, command

ONE = ("--mesh=seq:1", "--prompt=def f(x):", "--max_new_tokens=3")


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> str:
  """A model whose folder has 16 bits."""
  path = tmp_path_factory.mktemp("models") / "half"
  rj.models.save(rj.models.create(CONFIG, seed=3, dtype="bfloat16"), path)
  Bytes(chat_template=None).save(path)
  return str(path)


@pytest.fixture
def no_room(monkeypatch):
  """No room for weights in float32."""
  monkeypatch.setattr(checkpoint, "host_free_bytes", lambda: 1)
  # No memory at all is refused elsewhere.
  monkeypatch.setattr(checkpoint, "device_free_bytes", lambda *_: None)


def _loaded(folder: str, *flags: str, codes: bool = False):
  values = common.parse(
    "generate", generate.define, [f"--model={folder}", *flags]
  )
  return answering.load(values, folder, common.mesh("seq:1"), codes=codes)


def test_16_bits_are_held_in_float32_and_a_line_says_so(ask, half):
  ran = ask(f"--model={half}", *ONE)
  assert ran.status == 0, ran.err
  said = [line for line in ran.err.splitlines() if line.startswith("CPU:")]
  assert len(said) == 1 and "float32" in said[0]
  assert "--dtype=bfloat16" in said[0]


def test_the_dtype_of_a_flag_is_obeyed_and_its_cost_said(ask, half):
  ran = ask(f"--model={half}", *ONE, "--dtype=bfloat16", "--json")
  assert json.loads(ran.out.splitlines()[-1])["dtype"] == "bfloat16"
  assert "--dtype=float32 is faster" in ran.err


def test_no_flag_of_devices_says_how_to_get_a_mesh(half):
  _, note = _loaded(half)
  assert note is not None and "--devices=8" in note
  _, note = _loaded(half, "--devices=1", "--dtype=float32")
  assert note is None


def test_codes_where_float32_has_no_room(half, no_room):
  model, note = _loaded(half, codes=True)
  assert note is not None and "codes of 8 bits" in note
  kinds = {leaf.dtype for leaf in jax.tree.leaves(model)}
  assert jnp.dtype("int8") in kinds
  model, note = _loaded(half, "--dtype=bfloat16", codes=True)
  assert note is not None and "codes" not in note


def test_the_warning_of_slow_weights_names_what_to_do(half, no_room):
  with pytest.warns(RuntimeWarning) as said:
    model = rj.models.load(half)
  remedy = "rj.models.with_coded_weights(model, bits=8)"
  assert remedy in str(said[0].message)
  small = eval(remedy, {"rj": rj, "model": model})
  assert jnp.dtype("int8") in {leaf.dtype for leaf in jax.tree.leaves(small)}


@pytest.mark.parametrize(
  ("flag", "coded"), [("--cache=int8", True), ("--cache=nuq4", False)]
)
def test_what_is_of_float_weights_keeps_them(half, no_room, flag, coded):
  argv = [f"--model={half}", "--mesh=seq:1", flag]
  values = common.parse("generate", generate.define, argv)
  mesh = common.mesh("seq:1")
  loaded = [model_flags.load(values, half, mesh, lambda line: None)]
  values = common.parse("evaluate", evaluate.define, argv)
  screen = console.Screen("evaluate", io.StringIO())
  evaluation = evaluate._Evaluation(
    values, screen, Group(screen, str), "caches"
  )
  loaded.append(evaluation._load()[0])
  evaluation._begin("kinds", 1)
  assert ("codes of 8 bits" in evaluation.record["loading"]) == coded
  for model in loaded:
    kinds = {leaf.dtype for leaf in jax.tree.leaves(model)}
    assert (jnp.dtype("int8") in kinds) == coded


def test_calibration_has_one_device_and_float32_too(
  half, tmp_path, monkeypatch
):
  starts = []
  monkeypatch.setattr(common, "start", lambda _, **how: starts.append(how))
  argv = [f"--model={half}", "--mesh=seq:1", f"--out={tmp_path}"]
  argv += ["--ranges", "--rows=1", "--length=16"]
  values, words = common.parse_words("calibrate", calibrate.define, argv)
  err = io.StringIO()
  assert calibrate.run(values, words, stdout=io.StringIO(), stderr=err) == 0
  assert starts == [{"single": True}]
  assert "weights of bfloat16 held in float32" in err.getvalue()


@pytest.mark.long
@pytest.mark.parametrize(("flags", "devices"), [((), 1), (("--devices=2",), 2)])
def test_a_model_that_is_brought_has_one_device(folder, flags, devices):
  words = ("--prompt=a", "--max_new_tokens=2", "--json")
  with command(
    "-m", "launch.generate", f"--model={folder}", *words, *flags
  ) as process:
    out, _ = process.communicate(timeout=PATIENCE_S)
  assert json.loads(out)["devices"] == devices


@pytest.mark.parametrize(("rate", "text"), [
  (12345.6, "12,346"), (123.4, "123"), (5.678, "5.68"), (0.01234, "0.0123"),
])  # fmt: skip
def test_slow_rates_have_digits(rate, text):
  assert console.per_second(rate) == text


@pytest.mark.long
def test_progress_of_slow_work_is_not_none_a_second(monkeypatch):
  stream, now = io.StringIO(), [0.0]
  monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
  screen = console.Screen("test", stream, every_s=5.0)
  screen.begin("reading", 100, "texts")
  now[0] = 40.0
  screen.at(2)
  assert "0.05 a second" in stream.getvalue()
  screen.end()
