"""Flags of a model that several scripts share."""

from __future__ import annotations

import json

import pytest

import ringjax as rj
from launch import chat, common, generate, model_flags
from ringjax.errors import ConfigError
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
  ],
)
def test_flags_that_do_not_go_together(script, flags, words):
  values = common.parse(script.NAME, script.define, flags)
  with pytest.raises(rj.errors.OptionError, match=words):
    model_flags.check(values)
