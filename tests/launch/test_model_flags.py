"""Flags of a model that several scripts share."""

from __future__ import annotations

import json

import absl.flags
import pytest

import ringjax as rj
from launch import calibrate, chat, convert, evaluate, generate, serve
from launch.shared import common, model_flags, tensor_ranks
from ringjax.errors import ConfigError
from ringjax.models import tiny
from tests import checkpoints


@pytest.mark.parametrize("script", [chat, generate])
def test_nostrict_leaves_keys_out(script, tmp_path):
  folder = tmp_path / "model"
  checkpoints.write("llama3", folder)
  file = folder / "config.json"
  config = json.loads(file.read_text("utf-8"))
  file.write_text(json.dumps({**config, "sliding_window": 8}), "utf-8")
  flags = [f"--model={folder}"]
  values = common.parse(script.NAME, script.define, flags)
  with pytest.raises(ConfigError, match="sliding_window.*--nostrict"):
    model_flags.load(values, folder, None, print)
  values = common.parse(script.NAME, script.define, [*flags, "--nostrict"])
  with pytest.warns(UserWarning, match="sliding_window"):
    model = model_flags.load(values, folder, None, print)
  assert model.config == rj.models.read_config(config)[0]


@pytest.mark.parametrize(
  ("script", "flags", "words"),
  [
    (chat, ["--integer=a", "--weights=int8"], "--integer with --weights"),
    (chat, ["--flash=a", "--memory=1GiB"], "--memory with --flash"),
    (chat, ["--model="], "--model"),
    (generate, ["--flash=a", "--placement=host"], "--placement with --flash"),
    (chat, ["--speculate=lookup", "--cache_placement=host"],
     "--speculate: got a value beside --cache_placement"),
    (chat, ["--prefill=ring", "--chunk=8"], "prefill='chunked'"),
  ],
)  # fmt: skip
def test_flags_that_do_not_go_together(script, flags, words):
  values = common.parse(script.NAME, script.define, flags)
  with pytest.raises(rj.errors.OptionError, match=words):
    model_flags.check(values)


_WITHOUT_FILES = [
  ("--cache=nuq3", "got none"),
  ("--cache=nuq3:calibration=DIR", "without kv_calibration.safetensors"),
  ("--cache=nuq3:calibration=DIR/no", "does not exist"),
  ("--cache=allocated", "table: got none"),
  ("--cache=allocated:table=DIR", "kv_bits.json, which does not exist"),
  ("--speculate=self:cache_kind=nuq3", "got none"),
  ("--speculate=early:cache_kind='nuq3:calibration=DIR'", "without kv_"),
  ("--speculate=model", "folder of a draft model"),
  ("--speculate=model:model=DIR/no", "does not exist"),
  ("--speculate=longspec", "folder of a draft model"),
  ("--speculate=longspec:model=DIR/no", "does not exist"),
  ("--speculate=eagle3:model=DIR/no", "does not exist"),
  ("--speculate=dflash", "--speculate=dflash:model=FOLDER"),
  ("--integer=DIR:shadow=4", "without activation_ranges.safetensors"),
  ("--integer=DIR,devices=2", "options after a colon"),
]


@pytest.mark.parametrize(
  ("script", "flag", "words"),
  [
    (script, flag, words)
    for script in (chat, generate, serve, evaluate)
    for flag, words in _WITHOUT_FILES
    # launch.evaluate has no drafts, launch.serve and it no integers.
    if flag.startswith("--cache")
    or (script is serve and flag.startswith("--speculate"))
    or script in (chat, generate)
  ],
)
def test_files_that_a_flag_names_are_there_before_a_model_is_loaded(
  script, flag, words, tmp_path, monkeypatch, capsys
):
  def load(*args, **options):
    raise AssertionError("a model is loaded")

  if script is serve:
    pytest.importorskip("uvicorn")
  monkeypatch.setattr(rj.models, "load", load)
  monkeypatch.setattr(rj.data.Tokenizer, "load", load)
  argv = [flag.replace("DIR", str(tmp_path))]
  commands = [[]]
  if script is evaluate:
    commands = [["caches"], ["needle"], ["contexts"]]
  for command in commands:
    values, rest = common.parse_words(
      script.NAME, script.define, [*command, *argv]
    )
    if script in (chat, generate):
      with pytest.raises(rj.errors.OptionError, match=words):
        model_flags.check(values)
      continue
    inputs = (rest,) if script is evaluate else ()
    assert script.run(values, *inputs) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  ("script", "flag"), [(generate, "--contexts=absent"), (chat, "--load=absent")]
)
def test_texts_that_a_flag_names_are_there_before_a_model_is_loaded(
  script, flag, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)

  def load(*args, **options):
    raise AssertionError("a model is loaded")

  monkeypatch.setattr(rj.models, "load", load)
  argv = [f"--model={tiny.path()}", "--mesh=seq:1", flag]
  if script is generate:
    argv += ["--prompt=x"]
  values = common.parse(script.NAME, script.define, argv)
  assert script.run(values) == 2
  assert "absent" in capsys.readouterr().err


def test_no_neurons_are_written_of_a_model_without_zeros(tmp_path):
  folder = tmp_path / "model"
  checkpoints.write("llama2", folder)
  out = tmp_path / "neurons"
  flags = [f"--model={folder}", f"--flash={out}"]
  values = common.parse(generate.NAME, generate.define, flags)
  with pytest.raises(rj.errors.OptionError, match="zero for no neuron"):
    model_flags.load(values, folder, None, print)
  assert not out.exists()


def test_a_longer_context_by_a_flag(tmp_path):
  folder = tmp_path / "model"
  checkpoints.write("llama2", folder)
  flags = [f"--model={folder}", "--rope_scaling=yarn:factor=4"]
  values = common.parse(generate.NAME, generate.define, flags)
  model = model_flags.load(values, folder, None, print)
  assert model.config.longest == 4 * 128
  assert generate._positions(folder, values) == model.config.longest


@pytest.mark.parametrize(
  "script", [calibrate, chat, convert, evaluate, generate, serve]
)
def test_scalings_are_checked_where_flags_are_read(script):
  values = common.parse(
    script.NAME, script.define, ["--rope_scaling=linear:factor=2"]
  )
  assert values.rope_scaling == "linear:factor=2"
  with pytest.raises(absl.flags.Error, match="'yarn' without a factor"):
    common.parse(script.NAME, script.define, ["--rope_scaling=yarn"])


def test_a_scaling_is_not_ignored_where_processes_share_layers():
  flags = ["--window=2", "--rope_scaling=yarn:factor=2"]
  values = common.parse(generate.NAME, generate.define, flags)
  with pytest.raises(rj.errors.OptionError, match="--rope_scaling with"):
    tensor_ranks._check(values)
