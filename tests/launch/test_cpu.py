"""What a CPU gets where no flag says more: one device, fast weights, rates."""

from __future__ import annotations

import io
import json

import jax
import jax.numpy as jnp
import pytest

import ringjax as rj
from launch import answering, common, console, generate
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


def test_codes_where_float32_has_no_room(half, monkeypatch):
  monkeypatch.setattr(checkpoint, "host_free_bytes", lambda: 1)
  # No memory at all is refused elsewhere.
  monkeypatch.setattr(checkpoint, "free_bytes", lambda *_: None)
  model, note = _loaded(half, codes=True)
  assert note is not None and "codes of 8 bits" in note
  kinds = {leaf.dtype for leaf in jax.tree.leaves(model)}
  assert jnp.dtype("int8") in kinds
  model, note = _loaded(half, "--dtype=bfloat16", codes=True)
  assert note is not None and "codes" not in note


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
