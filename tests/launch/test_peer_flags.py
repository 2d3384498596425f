"""Flags of vLLM and SGLang at launch.serve."""

from __future__ import annotations

import re

import pytest
from absl import flags

from launch import generate, serve
from launch.serving import peer_flags
from launch.shared import common
from ringjax.serve.engine_config import EngineConfig
from tests.launch.conftest import command

# As vLLM and SGLang write them.
SAME = [
  ("--served-model-name=x", "model_name", "x"),
  ("--model_path=/m", "model", "/m"),
  ("--max-num-seqs=3", "rows", 3),
  ("--max_model_len=64", "longest", 64),
  ("--lora-modules=a=/x,b=/y", "adapters", ["a=/x", "b=/y"]),
  ("--max-queued-requests=7", "queue", 7),
  ("--dist-init-addr=h:1", "coordinator", "h:1"),
  ("--node-rank=1", "process_id", 1),
  ("--nnodes=2", "num_processes", 2),
]


def parsed(*argv):
  values = flags.FlagValues()
  serve.define(values)
  words = common.with_underscores(argv, values)
  return common.parse("serve", serve.define, words)


@pytest.mark.parametrize(("flag", "name", "value"), SAME)
def test_flags_with_the_same_meaning(flag, name, value):
  assert parsed(flag)[name].value == value


def test_two_names_of_a_flag_are_refused():
  with pytest.raises(flags.Error, match="served_model_name"):
    parsed("--served_model_name=x", "--model_name=y")


def test_dashes_stay_in_values_and_after_the_flags():
  values = flags.FlagValues()
  serve.define(values)
  argv = ("--max-model-len=a-b", "--no-such=1", "--noi-am=1", "--", "--max-x")
  assert common.with_underscores(argv, values) == [
    "--max_model_len=a-b", "--no-such=1", "--noi-am=1", "--", "--max-x",
  ]  # fmt: skip
  argv = ("--nodistributed", "--model-name", "a-b")
  assert common.with_underscores(argv, values) == [
    "--nodistributed", "--model_name", "a-b",
  ]  # fmt: skip


def test_refused_flags_name_flags_that_exist():
  values = flags.FlagValues()
  serve.define(values)
  serve_flags = {*values}
  values = flags.FlagValues()
  generate.define(values)
  for name, text in peer_flags.REFUSED.items():
    assert name not in serve_flags
    flag_names = {*values} if "launch.generate" in text else serve_flags
    assert set(re.findall(r"--(\w+)", text)) <= flag_names, text
    assert peer_flags.hint(name.replace("_", "-")).endswith(text)
  assert peer_flags.hint("nothing") is None
  # What the engine takes by another name is not refused.
  aliases = {x for f in EngineConfig.fields() for x in f.metadata["aliases"]}
  assert not aliases & {*peer_flags.REFUSED}


def test_a_refused_flag_by_the_script():
  with command("-m", "launch.serve", "--tensor-parallel-size=4") as process:
    out, err = process.communicate()
  assert (process.returncode, out) == (2, "")
  assert "--tensor_parallel_size" in err and "--mesh=model:4" in err
