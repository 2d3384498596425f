"""Configs of `generate` and of engines: values, overrides, refused pairs."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest
from absl import flags

import ringjax as rj
from launch import serve
from launch.shared import common
from launch.shared.flag_helpers import FlagHelper, option_values
from ringjax.config import Config, config, option
from ringjax.errors import InputTypeError, OptionError
from ringjax.infer import GenerateConfig, PrefillConfig
from ringjax.infer.generate_config import PAIRS
from ringjax.serve import EngineConfig
from tests.helpers import refused

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A value other than the default for each option that can be written.
VALUES = {
  GenerateConfig: {
    "max_new_tokens": 3, "axis": "seq", "prefill": "chunked", "chunk": 8,
    "keep": "last", "wire": "int8", "cache_kind": "kivi2:residual=64",
    "cache_dtype": "bfloat16", "grow": 16, "cache_placement": "host",
    "placement": "device=.5,disk=.5", "memory": "6GiB",
    "hidden_placement": "host", "rows_at_once": 2, "disk": "folder",
    "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1,
    "repetition_penalty": 1.5, "do_sample": True, "seed": 7,
    "stop": ["end", 3], "eos_token_id": [2], "pad_id": -1,
    "speculate": "lookup:count=4", "combine": "ape:temperature=0.8",
  },
  EngineConfig: {
    "rows": 2, "capacity": 256, "longest": 64, "page": 16, "piece": 8,
    "pieces": 2, "prompt_tile": 8, "row_tile": 16, "budget": 32,
    "prefill": "sparse:xattention,threshold=1.0", "one_order": True,
    "cache_kind": "int8", "dtype": "bfloat16",
    "share": "answers", "shared_reads": "never", "speculate": "suffix",
    "preempt": "swap", "important": 0.25, "layout": "pages", "layer_parts": 2,
  },
}  # fmt: skip
# Options whose values are objects that live in a process.
OBJECTS = {"machine", "partition", "sampler", "library"}


@pytest.mark.parametrize("kind", VALUES)
def test_every_option_is_written_and_read_back(kind):
  parts = {"decode", "sampling", "stopping", "speculation"}
  options = {*kind.options()} - parts - OBJECTS
  assert options == {*VALUES[kind]}, "VALUES above has a value of each option"
  config = kind().replace(**VALUES[kind])
  again = kind.from_dict(json.loads(json.dumps(config.to_dict())))
  assert again == config and repr(again) == repr(config)
  assert kind().to_dict() == {} and repr(kind()) == f"{kind.__name__}()"
  for name in VALUES[kind]:
    assert f"{name}: " in "".join(
      x.__doc__ for x in (kind, *_parts(kind))
    ) or name in {"prefill", "cache_placement", "hidden_placement", "speculate"}


def _parts(kind):
  return [
    type(getattr(kind(), path[0]))
    for path in kind.options().values()
    if len(path) > 1
  ]


def test_overrides_reach_parts_and_keep_the_rest():
  ring = GenerateConfig(prefill=PrefillConfig(method="ring", wire="int8"))
  assert ring.replace(prefill="striped").prefill.wire == "int8"
  assert ring.replace(prefill=PrefillConfig(), chunk=4) == GenerateConfig(
    prefill=PrefillConfig(chunk=4)
  )
  assert ring.replace() == ring and ring.prefill.method == "ring"


@pytest.mark.parametrize(
  ("make", "error", "words"),
  [
    (lambda: GenerateConfig().replace(chunks=3), OptionError, "pass chunk"),
    (lambda: EngineConfig().replace(row=3), OptionError, "pass rows"),
    (lambda: GenerateConfig().replace(max_length=3), OptionError, "max_new"),
    (lambda: GenerateConfig().replace(decode=3), InputTypeError, "DecodeConf"),
    (lambda: GenerateConfig.from_dict({"prefil": {}}), OptionError, "prefill"),
    (lambda: GenerateConfig.from_dict({"prefill": 3}), InputTypeError, "int"),
    (lambda: GenerateConfig().replace(top_k=1, chunk=0), OptionError, "chunk"),
    (lambda: EngineConfig(rows=0), OptionError, "rows"),
    (lambda: EngineConfig(layout="doubling", share="answers"), OptionError,
     "share"),
    (lambda: GenerateConfig().replace(sampler=rj.infer.Greedy()).to_dict(),
     OptionError, "as an override"),
  ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(make, error, words):
  with pytest.raises(error, match=words):
    make()


def test_aliases_set_the_option_that_means_the_same():
  page = (ROOT / "docs/how/configs.md").read_text("utf-8")
  for field in EngineConfig.fields():
    value = VALUES[EngineConfig].get(field.name)
    assert value is not None, f"VALUES above has no {field.name}"
    want = EngineConfig(**{field.name: value})
    aliases = field.metadata["aliases"]
    for alias in aliases:
      option = {alias: value}
      assert EngineConfig(**option) == EngineConfig().replace(**option) == want
      assert EngineConfig.from_dict(option) == want
      assert alias not in want.to_dict()
      both = option | {field.name: value}
      with pytest.raises(OptionError, match="means the same"):
        EngineConfig(**both)
      with pytest.raises(OptionError, match="means the same"):
        want.replace(**both)
      values = common.parse(serve.NAME, serve.define, [f"--{alias}={value}"])
      assert values[field.name].value == value
      twice = [f"--{alias}={value}", f"--{field.name}={value}"]
      with pytest.raises(flags.Error, match="means the same"):
        common.parse(serve.NAME, serve.define, twice)
    if aliases:
      row = ", ".join(f"`{alias}`" for alias in aliases)
      assert f"| `{field.name}` | {row} |\n" in page
      assert f"Also: {', '.join(aliases)}." in " ".join(
        (EngineConfig.__doc__ or "").split()
      )
  assert EngineConfig(rows=3, max_model_len=64).longest == 64


@pytest.fixture
def model(loaded):
  return loaded("llama2", 1)[0]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.option}-{p.other}")
def test_pairs_are_refused_before_anything_is_computed(pair, model):
  session = rj.infer.Session(model, 32)
  values = {
    "contexts": [[1, 2], [3]],
    "rows_at_once": 1,
    "speculate": "lookup",
    "keep": "last",
    "cache_kind": "kvzip:budget=8",
    "cache_placement": "host",
    "cache": session,
    "wire": "int8",
    "attention_fn": jax.nn.dot_product_attention,
    "grow": 16,
    "prefill": "sparse:xattention",
  }
  options = {name: values[name] for name in (pair.option, pair.other)}
  call = lambda: rj.infer.generate(model, [[5, 6]], max_new_tokens=2, **options)
  refused(OptionError, call, pair.option, pair.other)


def test_the_page_has_every_pair():
  page = (ROOT / "docs/how/configs.md").read_text("utf-8")
  rows = page.split("|---|---|---|\n")[1].splitlines()
  assert rows == [
    f"| `{pair.option}` | `{pair.other}` | {pair.reason} |" for pair in PAIRS
  ]


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_engines_and_calls_take_a_config(model):
  config = GenerateConfig(max_new_tokens=4)
  want = rj.infer.generate(model, [[5, 6, 7]], max_new_tokens=3)
  new = rj.infer.generate(model, [[5, 6, 7]], config, max_new_tokens=3)
  assert (new.tokens == want.tokens).all()
  refused(
    InputTypeError,
    lambda: rj.infer.generate(model, [[5]], EngineConfig()),  # type: ignore
    "config",
    "GenerateConfig",
  )
  refused(
    OptionError, lambda: rj.infer.generate(model, [[5]]), "max_new_tokens"
  )
  engine = EngineConfig(rows=2, capacity=64, longest=32, page=16)
  with rj.serve.Engine(model, engine, pieces=1) as at:
    assert at.config == engine.replace(pieces=1)
    handle = at.submit(rj.serve.Request(prompt=[5, 6, 7], max_new_tokens=3))
    at.run()
    assert handle.answers[0].tokens == want.tokens[0].tolist()


@config
class _Every(Config):
  """Options of each kind of value."""

  fast: bool = option("Whether it is fast.", default=False)
  share: float = option("Share to keep.", default=0.5, least=0.1)
  floor: float | None = option("Smallest share.", default=None, least=0.0)
  count: int = option("Number of parts.", default=2, least=1)
  name: str = option("Name of it.", default="x")


def test_flags_of_options_take_the_kind_of_their_values():
  values = flags.FlagValues()
  names = tuple(_Every.options())
  FlagHelper(values).options(_Every, names)
  values(["x", "--fast", "--share=.25", "--floor=0", "--count=3", "--name=y"])
  made = _Every(**option_values(values, _Every, names))
  assert made == _Every(fast=True, share=0.25, floor=0.0, count=3, name="y")
  with pytest.raises(flags.IllegalFlagValueError, match=r"0\.1"):
    values(["x", "--share=0"])
  refused(OptionError, lambda: _Every(share=0.0), "at least 0.1")
  refused(InputTypeError, lambda: _Every(fast="no"), "True or False")
