"""launch.train: recipes from files, runs that are stopped and go on."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import signal
import types

import jax
import numpy as np
import pytest
from absl import flags

import ringjax as rj
from launch import train
from launch.shared import common, sources
from launch.training import metric_backends
from ringjax.data.batches import corpus
from ringjax.data.text.bytelevel import Bytes
from ringjax.errors import DataError, OptionError
from ringjax.eval.perplexity import perplexity
from ringjax.models import checkpoint
from ringjax.nn.sharding_context import ContextParallel
from ringjax.train import recipe, step
from ringjax.train.batch import Batch
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.extend import RopeScaling, scaled_config
from ringjax.train.methods.induction import InductionHeads
from ringjax.train.methods.lora import Lora
from tests.helpers import script
from tests.launch.conftest import PATIENCE_S, ROOT

run = functools.partial(script, train)

# How ml_collections reads a file.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")

# Without what several of them share.
CONFIGS = [
  path
  for path in sorted((ROOT / "launch" / "configs").glob("*/*.py"))
  if "def get_config" in path.read_text("utf-8")
]
SMALL = """
from launch.train import default_config

def get_config():
  config = default_config()
  config.model = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 262,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
  }
  config.stages = (
    {"steps": 4, "length": 160, "batch": 2},
    {"steps": 3, "length": 320, "batch": 4, "accumulate": 2,
     "rope_scaling": {"context": 320, "method": "yarn"}},
  )
  config.optimizer = {"learning_rate": 1e-2, "warmup": 2}
  config.sources = ({"kind": "passkey", "length": 150},)
  config.log_every = 2
  config.save_every = 3
  return config
"""


@pytest.fixture
def small(tmp_path) -> str:
  path = tmp_path / "small.py"
  path.write_text(SMALL)
  return str(path)


def lines(folder: pathlib.Path) -> list[dict]:
  return [json.loads(x) for x in (folder / "log.jsonl").read_text().split("\n")
          if x]  # fmt: skip


def weights(folder: pathlib.Path) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(rj.models.load(folder))]


@pytest.mark.slow
def test_stages_one_after_another(small, tmp_path):
  out = tmp_path / "out"
  status, said, err = run(
    f"--config={small}", f"--out={out}", "--mesh=data:2,seq:4", "--json"
  )
  assert status == 0, err
  rows = lines(out)
  assert [json.loads(x) for x in said.splitlines()] == rows
  assert [row["step"] for row in rows] == [2, 3, 4, 6, 7]
  assert [row["stage"] for row in rows] == [0, 0, 0, 1, 1]
  assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
  # A CPU's peak is not known.
  assert all(row["utilisation"] is None for row in rows)
  assert "of the peak" not in err
  # All that is read, and what of it has an answer.
  assert [row["tokens"] for row in rows[:4]] == [640, 320, 320, 2560]
  assert all(0 < row["labels"] < row["tokens"] for row in rows)
  assert rows[0]["learning_rate"] == pytest.approx(1e-2)
  model = rj.models.load(out / "model")
  assert model.config.max_positions == 320
  assert json.loads(model.source)["rope_scaling"]["rope_type"] == "yarn"
  new = rj.infer.generate(model, [[65, 66, 67]], max_new_tokens=2)
  assert new.tokens.shape == (1, 2)
  assert "7 steps" in err and "wrote" in err


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_end(small, tmp_path, monkeypatch):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  flags = (f"--config={small}", "--mesh=seq:2", "--config.log_every=1")
  assert run(*flags, f"--out={whole}")[0] == 0
  inner = train._TrainingRun._report
  stops = iter((4, 6))
  stop = [next(stops)]

  def report(self, made, model, mesh, stage, one):
    inner(self, made, model, mesh, stage, one)
    if one.step == stop[0]:
      stop[0] = next(stops, -1)
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(train._TrainingRun, "_report", report)
  statuses, last = [], ""
  while not statuses or statuses[-1]:
    status, _, last = run(*flags, f"--out={parts}")
    statuses.append(status)
    assert len(statuses) < 6, last
  # Stopped at the very end of the first stage, and in the second.
  assert statuses == [143, 143, 0]
  for a, b in zip(
    weights(whole / "model"), weights(parts / "model"), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  loss = lambda out: {row["step"]: row["loss"] for row in lines(out)}
  assert loss(whole) == loss(parts)


@pytest.mark.slow
def test_preferences_that_are_stopped_go_on_to_the_same_end(
  tmp_path, monkeypatch
):
  complete, parts = tmp_path / "complete", tmp_path / "parts"
  folder = ROOT / "launch" / "configs" / "posttraining"
  flags = (
    "--config=configs/posttraining/dpo.py",
    "--mesh=seq:2",
    "--config.log_every=1",
    "--config.stages=({'steps': 3, 'length': 256, 'batch': 2},)",
    "--config.optimizer={'learning_rate': 1e-3}",
  )
  assert run(*flags, f"--out={complete}")[0] == 0
  inner = train._TrainingRun._report

  def report(self, train_recipe, model, mesh, stage, metrics):
    inner(self, train_recipe, model, mesh, stage, metrics)
    if metrics.step == 1:
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(train._TrainingRun, "_report", report)
  assert run(*flags, f"--out={parts}")[0] == 143
  assert (parts / "checkpoints" / "reference.npz").exists()
  status, _, err = run(*flags, f"--out={parts}")
  assert status == 0, err
  assert "margin" in err
  rows = {row["step"]: row for row in lines(complete)}
  assert rows[1]["reward_margin"] == pytest.approx(0, abs=1e-4)
  for row in lines(parts):
    for name in ("loss", "reward_margin", "reward_accuracy", "labels"):
      assert row[name] == rows[row["step"]][name]
  for a, b in zip(
    weights(complete / "model"), weights(parts / "model"), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  template = (complete / "model" / "chat_template.jinja").read_text()
  assert template == (folder / "chat.jinja").read_text()
  # Another loss is another training.
  status, _, err = run(
    *flags, f"--out={parts}", "--config.posttraining.beta=0.2"
  )
  assert status == 2
  assert "posttraining.beta" in err


@pytest.mark.slow
def test_chats_that_are_cut_are_counted(tmp_path):
  out = tmp_path / "out"
  folder = ROOT / "launch" / "configs" / "posttraining"
  # A template of one's own, with a token at which the model has not stopped.
  chats = (folder / "chat.jinja").read_text()
  own = chats.replace("eos_token }}{%- endgen", "'<|user|>' }}{%- endgen")
  assert own != chats
  path = tmp_path / "own.jinja"
  path.write_text(own)
  status, _, err = run(
    "--config=configs/posttraining/sft.py",
    "--mesh=seq:2",
    f"--out={out}",
    "--config.stages=({'steps': 2, 'length': 64, 'batch': 2},)",
    "--config.lora.rank=2",
    "--config.sources=({'kind': 'chats', 'too_long': 'truncate', "
    f"'path': '{folder}/chats.jsonl', 'template': '{path}'}},)",
  )
  assert status == 0, err
  assert "cut to the length of a row" in err
  assert all(0 < row["labels"] < row["tokens"] for row in lines(out))
  assert (out / "adapter" / "adapter_config.json").exists()
  template = (out / "adapter" / "chat_template.jinja").read_text()
  assert template == own
  tokenizer = rj.data.Tokenizer.load(out / "model")
  assert [tokenizer.window([i]) for i in tokenizer.eos_ids[1:]] == ["<|user|>"]


def test_adapters_that_cannot_be_written_alone_are_refused(small, tmp_path):
  """Before the first step: without the model nothing would be written."""
  overrides = ("--config.lora.rank=2", "--config.merge=False")
  config = overridden(small, *overrides)
  model = checkpoint.create(json.loads(config.model.to_json()))
  rj.models.save(model, tmp_path / "base")

  def check(lora, folder, config=config):
    train._check_alone(config, folder, model, lora)

  base = str(tmp_path / "base")
  check(Lora(rank=2), base)
  with pytest.raises(OptionError, match="merge: got False with fresh weights"):
    check(Lora(rank=2), None)
  with pytest.raises(OptionError, match="embeddings of new tokens"):
    check(Lora(rank=2, new_tokens=3), base)
  predicting = overridden(small, *overrides, "--config.predict_loss=0.1")
  with pytest.raises(OptionError, match="layer that predicts further"):
    check(Lora(rank=2), base, predicting)


@pytest.mark.slow
def test_adapters_that_correct_codes_are_of_these_codes(small, tmp_path):
  base = tmp_path / "base"
  first = ("--mesh=seq:1", f"--config={small}")
  assert run(*first, f"--out={base}", ONE_STEP)[0] == 0
  status, _, err = run(
    *first,
    f"--out={tmp_path / 'lora'}",
    f"--init_from={base / 'model'}",
    "--config.lora.rank=2",
    "--config.weights=nf4",
    "--config.residual.rows=2",
    "--config.merge=False",
    ONE_STEP,
  )
  assert status == 0, err
  floats = rj.models.load(base / "model")
  coded = rj.models.with_coded_weights(floats, bits=4, levels="nf4")
  how, _ = rj.train.load_adapter(tmp_path / "lora" / "adapter", coded)
  assert how.over.startswith("nf4/")
  with pytest.raises(OptionError, match="for a model of floats"):
    rj.train.load_adapter(tmp_path / "lora" / "adapter", floats)


@pytest.mark.slow
def test_adapters_from_a_folder(small, tmp_path):
  base = tmp_path / "base"
  first = ("--mesh=seq:2", f"--config={small}")
  assert run(*first, f"--out={base}")[0] == 0
  status, _, err = run(
    *first,
    f"--out={tmp_path / 'lora'}",
    f"--init_from={base / 'model'}",
    "--config.lora.rank=2",
    "--config.lora.targets=('q', 'v')",
    "--config.stages=({'steps': 3, 'length': 160, 'batch': 2},)",
  )
  assert status == 0, err
  old = rj.models.load(base / "model").stack.blocks[0][0]
  new = rj.models.load(tmp_path / "lora" / "model").stack.blocks[0][0]
  value = lambda block, name: np.asarray(
    getattr(block.attention, name).weight[...]
  )
  for name in ("q", "v"):
    assert np.any(value(old, name) != value(new, name))
  for name in ("k", "o"):
    np.testing.assert_array_equal(value(old, name), value(new, name))
  before = rj.models.load(base / "model")
  how, params = rj.train.load_adapter(tmp_path / "lora" / "adapter", before)
  again = how.merged(params, before).stack.blocks[0][0]
  for name in ("q", "v"):
    np.testing.assert_allclose(value(again, name), value(new, name), atol=1e-6)


@pytest.mark.slow
def test_each_stage_may_have_sources_of_its_own(small, tmp_path, monkeypatch):
  made = []
  inner = sources._source

  def source(kind, entry, tokenizer, length, vocab):
    made.append((kind, dict(entry), length))
    return inner(kind, entry, tokenizer, length, vocab)

  monkeypatch.setattr(sources, "_source", source)
  status, _, err = run(
    f"--config={small}",
    f"--out={tmp_path / 'out'}",
    "--mesh=seq:1",
    "--config.sources=({'kind': 'multikey', 'keys': 2},)",
    "--config.stages=("
    "{'steps': 1, 'length': 160, 'batch': 1, 'sources': ("
    "  {'kind': 'copies', 'weight': 0.5, 'fewest': 16}, {'kind': 'pairs'})},"
    "{'steps': 1, 'length': 320, 'batch': 1},)",
  )
  assert status == 0, err
  assert made == [
    ("copies", {"fewest": 16}, 160),
    ("pairs", {}, 160),
    ("multikey", {"keys": 2}, 320),
  ]


@pytest.mark.long
@pytest.mark.long_cases(8)
@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ("--config.sources=({'kind': 'copies', 'few': 2},)", "sources, copies"),
    pytest.param(
      "--config.sources=({'kind': 'corpus'},)",
      "sources, corpus",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "--config.sources=({'kind': 'passkey', 'length': 30},)",
      "length",
      marks=pytest.mark.slow,
    ),
    ("--config.start={'kind': 'habit'}", "one of lookup"),
    ("--config.posttraining={'loss': 'ppo'}", "posttraining.loss: got 'ppo'"),
    ("--config.posttraining={'loss': 'ipo', 'smooth': 1}", "posttraining: got"),
    ("--config.posttraining={'loss': 'dpo', 'beta': 0}", "beta: got 0"),
    ("--config.posttraining={'loss': 'dpo'}", "rope_scaling in a stage of Dpo"),
    ("--config.sources=({'kind': 'chats', 'path': 'x', 'turn': 1},)", "turn"),
    ("--config.start={'kind': 'lookup', 'backs': 1}", "start: got backs"),
    ("--config.start={'kind': 'lookup', 'back': ((1, 2),)}", "llama of 2"),
    ("--config.start={'kind': 'rotary_lookup', 'back': ((1,),)}", "llama of 2"),
    ("--config.optimizer={'schedule': 'wsd', 'decay': 2.0}", "decay"),
    ("--config.replay_every=0", "replay_every"),
    ("--config.packer=bestfit", "packer: got 'bestfit'; wanted one of best"),
    ("--config.stages=({'steps': 1, 'batch': 1},)", "argument: 'length'"),
    ("--config.stages=(1,)", "stages: got 1 as a stage"),
    ("--config.start={'kind': 'lookup'}", "argument: 'back'"),
    (
      "--config.stages=({'steps': 1, 'length': 160, 'batch': 1, "
      "'rope_scaling': {'method': 'yarn'}},)",
      "argument: 'context'",
    ),
    ("--config.residual.rows=2", "residual: got {'rows': 2} with weights=''"),
    ("--config.rules={'embd': 'data'}", "rules: got embd"),
    ("--config.rules.embd=data", "rules: got embd"),
    ("--config.layuot=zigzag", "config: got layuot"),
    ("--config.optimizer={'learning_rate': 'high'}", "learning_rate"),
    ("--config.optimizer={'decay': 0.1}", "decay: got 0.1 with 'cosine'"),
    (
      "--config.sources=({'kind': 'passkey', 'length': 9, 'shortest': 10},)",
      "shortest: got 10",
    ),
    pytest.param(
      "--config.sources=({'kind': 'copies', 'weight': 'x'},)",
      "sources, cop",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_wrong_configs(small, tmp_path, argv, words):
  status, out, err = run(
    f"--config={small}", f"--out={tmp_path / 'out'}", "--mesh=seq:1", argv
  )
  assert (status, out) == (2, "")
  assert words in err and "Traceback" not in err


@pytest.mark.slow
def test_memory_that_is_not_there(tmp_path, start):
  """A limit of the process, which a step exceeds."""
  config = tmp_path / "small.py"
  config.write_text(SMALL)
  limit = 6 << 30
  script = (
    "import resource, runpy; "
    f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
    "runpy.run_module('launch.train', run_name='__main__')"
  )
  with start(
    "-c",
    script,
    f"--config={config}",
    f"--out={tmp_path / 'out'}",
    "--mesh=seq:1",
    "--config.stages=({'steps': 1, 'length': 65536, 'batch': 64},)",
    "--config.sources=({'kind': 'copies'},)",
  ) as one:
    _, err = one.communicate(timeout=PATIENCE_S)
  assert one.returncode == 2
  assert re.search(
    r"train: out of memory while training, which asked for [\d,]+ bytes: .*"
    r"--mesh.*accumulate",
    err,
  ), err
  assert "Traceback" not in err


def overridden(path: str, *argv: str):
  """What a config says under these flags."""
  return common.parse("train", train.define, [f"--config={path}", *argv]).config


def test_entries_that_a_config_leaves_out_can_be_set(small):
  config = overridden(
    small,
    "--config.optimizer.schedule=wsd",
    "--config.optimizer.decay=0.5",
    "--config.optimizer.clip=None",
    "--config.rules.embed=data",
  )
  made = train.recipe_of(config).optimizer
  assert (made.schedule, made.decay, made.clip) == ("wsd", 0.5, None)
  assert made.learning_rate == 1e-2 and config.rules.embed == "data"


def test_the_result_has_the_dtype_of_its_source(small, tmp_path):
  """Without a source it is float32, and an entry of the config says another."""
  config = overridden(small)
  model = rj.models.create(json.loads(config.model.to_json()), dtype="bfloat16")
  rj.models.save(model, tmp_path / "base")
  as_given = lambda *more: train._save_dtype(
    overridden(small, *more), str(tmp_path / "base")
  )
  assert train._save_dtype(config, None) is None
  assert as_given() == np.dtype("bfloat16")
  assert as_given("--config.save_dtype=float16") == np.dtype("float16")
  assert as_given("--config.save_dtype=float32") is None
  wrong = overridden(small, "--config.save_dtype=int8")
  with pytest.raises(OptionError, match="dtype: got 'int8'"):
    train.recipe_of(wrong)


def test_parameters_are_sharded_unless_a_config_says_otherwise(small):
  config = overridden(small)
  rules = lambda shape, names, config=config: train._rules(
    config, rj.make_mesh(shape, names)
  )
  assert rules((8,), ("seq",)).embed == ("seq",)
  assert rules((4, 2), ("data", "seq")).embed == ("data", "seq")
  assert rules((2, 4), ("data", "seq")).embed == ("seq", "data")
  assert rules((1, 8), ("seq", "model")) is None
  whole = overridden(small)
  whole.rules = {"embed": None}
  assert rules((8,), ("seq",), whole).embed is None


def test_what_a_held_out_text_must_have(small):
  for flag, words in (
    ("rows=2", "no entry every"),
    ("evry=2", "evry"),
    ("every=0", "every"),
  ):
    config = overridden(small)
    name, _, value = flag.partition("=")
    config.held_out = {name: int(value)}
    with pytest.raises(OptionError, match=words):
      train.recipe_of(config)
  config = overridden(small)
  config.draft, config.held_out = {"window": 16}, {"every": 1, "length": 512}
  config.draft_training = {"longest": 256}
  with pytest.raises(OptionError, match=r"longest.*512"):
    train.recipe_of(config)


@pytest.mark.long
def test_the_held_out_loss_is_that_of_launch_evaluate(small, tmp_path):
  """Also of a run that was stopped and resumed; the last one by its folder."""
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("A line of text.\n" * 40)
  flags = (
    f"--config={small}",
    "--mesh=seq:2",
    "--config.held_out.every=1",
    f"--config.held_out.path={tmp_path / 'text'}",
    "--config.held_out.rows=2",
    "--config.held_out.length=64",
  )
  stages = lambda n: (
    f"--config.stages=({{'steps': {n}, 'length': 160, 'batch': 2}},)"
  )
  status, _, err = run(*flags, f"--out={tmp_path / 'a'}", stages(3))
  assert status == 0 and "held out" in err, err
  losses = [row["held_out"] for row in lines(tmp_path / "a")]
  assert len(losses) == 3 and all(np.isfinite(losses))
  model = rj.models.load(tmp_path / "a" / "model")
  ids = np.frombuffer((tmp_path / "text" / "a.txt").read_bytes(), np.uint8)
  tokenizer = rj.data.Tokenizer.load(tmp_path / "a" / "model")
  bos = tokenizer.bos_id if tokenizer.adds_bos else None
  span = 64 + (bos is None)
  rows = [ids[n * span : (n + 1) * span].astype(np.int32) for n in range(2)]
  curve = perplexity(model, rows, length=64, rows=2, bos=bos)
  assert losses[-1] == pytest.approx(curve.mean, rel=1e-5)


@pytest.mark.slow
def test_a_draft_has_a_held_out_loss_while_it_is_trained(small, tmp_path):
  """The same on one device and two, at each interval and in the log."""
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "a.txt").write_text("A line of text.\n" * 40)
  losses = []
  for shards in (1, 2):
    out = tmp_path / f"{shards}"
    status, _, err = run(
      f"--config={small}",
      f"--mesh=seq:{shards}",
      f"--out={out}",
      "--config.draft.window=16",
      "--config.draft_training.longest=512",
      "--config.held_out.every=1",
      f"--config.held_out.path={tmp_path / 'text'}",
      "--config.held_out.rows=2",
      "--config.held_out.length=64",
      "--config.stages=({'steps': 2, 'length': 160, 'batch': 2},)",
    )
    assert status == 0 and "held out" in err, err
    losses.append([row["held_out"] for row in lines(out)])
  assert len(losses[0]) == 2 and losses[0][0] != losses[0][1]
  assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.long
def test_a_bfloat16_model_stays_one(small, tmp_path):
  config = overridden(small)
  model = rj.models.create(json.loads(config.model.to_json()), dtype="bfloat16")
  rj.models.save(model, tmp_path / "base")
  status, _, err = run(
    f"--config={small}",
    "--mesh=seq:2",
    f"--out={tmp_path / 'out'}",
    f"--init_from={tmp_path / 'base'}",
    "--config.tokenizer=bytes",
    "--config.stages=({'steps': 1, 'length': 160, 'batch': 2},)",
  )
  assert status == 0, err
  size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size
  model = rj.models.load(tmp_path / "out" / "model")
  assert (model.saved_dtype or model.dtype) == "bfloat16"
  assert size("out/model") == pytest.approx(size("base"), rel=0.01)


@pytest.mark.parametrize("entry", ["alpha=8.0", "targets=('q',)", "ranks=4"])
def test_adapters_that_nobody_asked_for(small, entry):
  config = overridden(small, f"--config.lora.{entry}")
  with pytest.raises(
    OptionError, match=f"lora: got {entry.split('=')[0]} with"
  ):
    train.recipe_of(config)


def test_a_trace_that_was_not_begun_is_missed(tmp_path):
  for steps, folder, missed in ((2, tmp_path, True), (2, None, False)):
    with train._Trace(folder and str(folder)) as trace:
      for _ in range(steps):
        trace()
    assert trace.missed == missed


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ("--config.optimiser.learning_rate=1", "optimiser"),
    ("--config.stages[7].steps=1", "out of range"),
    ("--config.stages[0].accumulate=2", "accumulate"),
    ("--config.stages.steps=1", "indices"),
    ("--config.stages.0.steps=1", r"--config.stages\[0\].steps"),
  ],
)
def test_overrides_that_fit_nowhere(small, argv, words):
  with pytest.raises(flags.Error, match=words):
    overridden(small, argv)


def test_what_is_wrong_in_a_config_is_shown_where_it_is(tmp_path):
  path = tmp_path / "wrong.py"
  path.write_text("def get_config():\n  return {}['no such']\n")
  with pytest.raises(KeyError, match="no such"):
    overridden(str(path))


def test_help_config_lists_every_field(small):
  status, said, err = run("--help_config")
  assert (status, err) == (0, "")
  for name in train.default_config():
    if name not in ("stages", "sources"):
      assert f"--config.{name}  (" in said
  for cls, path in (
    (recipe.Stage, "stages[0]"),
    (RopeScaling, "stages[0].rope_scaling"),
    (recipe.Optimizer, "optimizer"),
    (rj.models.Rules, "rules"),
    (Lora, "lora"),
    (InductionHeads, "start"),
  ):
    for field in dataclasses.fields(cls):
      assert f"--config.{path}.{field.name}  ({field.type}, " in said
  assert (
    "--config.optimizer.learning_rate  (float, 0.0003)\n"
    "    the highest learning rate."
  ) in said
  # Each field has a line that says what it is.
  lines = said.splitlines()[2:]
  assert all(x.startswith("--config.") for x in lines[::2])
  assert all(len(x.strip()) > 3 for x in lines[1::2])
  status, said, _ = run(
    f"--config={small}", "--config.optimizer.warmup=9", "--help_config"
  )
  assert status == 0 and "--config.stages[1].length  (int, 320)" in said
  assert "--config.optimizer.warmup  (int, 9)" in said


ONE_STEP = "--config.stages=({'steps': 1, 'length': 160, 'batch': 1},)"


def test_blocks_are_numbers_or_chosen(small):
  flags = [f"--config={small}", "--config.feedforward_block=auto"]
  values = common.parse("train", train.define, [*flags, "--config.block=512"])
  made = train.recipe_of(values.config)
  assert (made.feedforward_block, made.objective.block) == ("auto", 512)
  values.config.block = "auto"
  assert train.recipe_of(values.config).objective.block == "auto"
  values.config.block = "all"
  with pytest.raises(OptionError, match="block: got 'all'"):
    train.recipe_of(values.config)


@pytest.mark.slow
def test_another_recipe_is_not_mixed_in(small, tmp_path):
  out = tmp_path / "out"
  flags = ("--mesh=seq:2", f"--config={small}", f"--out={out}", ONE_STEP)
  status, _, err = run(*flags)
  assert status == 0, err
  asked = (out / "config.json").read_text()
  status, _, err = run(*flags, "--config.optimizer.learning_rate=0.5")
  assert status == 2
  assert (
    "fields changed since the checkpoint: optimizer.learning_rate 0.01 -> 0.5;"
  ) in err and "another --out" in err
  assert "Traceback" not in err
  # What the run that is there was asked for is still known.
  assert (out / "config.json").read_text() == asked
  # The memory of moments, and blocks, are no part of the recipe's numbers.
  status, said, err = run(
    *flags,
    "--config.optimizer.moments_in=host",
    "--config.feedforward_block=auto",
  )
  assert status == 0, err
  assert "blocks on each shard: feedforward " in said + err


def test_a_second_run_in_a_folder_is_refused_at_once(
  small, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    "ringjax.train.checkpoints.checkpoint_directory.PATIENCE_S", 0.05
  )
  out = tmp_path / "out"
  with Checkpoints(out / "checkpoints") as other:
    other.claim()
    status, _, err = run("--mesh=seq:2", f"--config={small}", f"--out={out}")
  assert status == 2
  assert "no other process writes" in err and "Traceback" not in err
  # What belongs to the other one is as it was.
  assert not (out / "log.jsonl").exists()


def seen(values: dict, **more) -> dict:
  """What has to be equal for a step to be of a training."""
  config = train.default_config()
  config.update(values)
  return train._identity(
    config, **{"base": None, "tokenizer": Bytes(), "model": None} | more
  )


def test_what_another_objective_is():
  same = seen({})
  assert seen({"log_every": 3, "layout": "zigzag", "remat": "all"}) == same
  assert seen({"stage_rows": 2}) == same != seen({"stage_rounds": 2})
  assert seen({"z_loss": 1e-4}) != same
  assert seen({"dtype": "bfloat16"}) != same
  assert seen({}, tokenizer=Bytes(chat_template="x")) == same
  other = {"model_type": "llama", "vocab_size": 262}
  assert seen({}, base=other) != same
  # A balance loss that the folder states, and not one that does nothing.
  mixture = other | {"model_type": "mixtral", "router_aux_loss_coef": 0.02}
  plain = seen({}, base=mixture)
  assert "expert_balance" not in plain
  stated = mixture | {"output_router_logits": True}
  assert seen({}, base=stated)["expert_balance"] == {"loss": 0.02}
  off = seen({"expert_balance": {"loss": 0.0}}, base=stated)
  assert "expert_balance" not in off
  # What a fresh model would be is not asked where there is another.
  assert seen({"model": "llama-1b"}, base=other) == seen({}, base=other)


@pytest.mark.slow
def test_adapters_are_of_one_model():
  config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
  mesh = rj.make_mesh((4,), ("model",), devices=jax.devices()[:4])
  of = lambda seed, **more: train.checksums(
    rj.models.create(config, seed=seed, **more)
  )
  assert of(1) == of(1) == of(1, mesh=mesh)
  assert all(a != b for a, b in zip(of(1)[:1], of(2)[:1], strict=True))
  # Two rows that have changed places.
  model = rj.models.create(config, seed=1)
  w = model.embed.weight
  w[...] = w[...][:, ::-1]
  assert train.checksums(model) != of(1)


def test_a_log_goes_on_without_the_line_that_was_cut_off(tmp_path):
  log = tmp_path / "log.jsonl"
  for before, after in (
    (None, ""),
    ("", ""),
    ('{"step": 1}\n', '{"step": 1}\n'),
    ('{"step": 1}\n{"st', '{"step": 1}\n'),
    ('{"st', ""),
  ):
    if before is not None:
      log.write_text(before)
    with train._appended(log) as opened:
      opened.write("next\n")
    assert log.read_text() == after + "next\n"


def test_rows_beyond_the_context_are_told(small):
  config = overridden(small)
  form = checkpoint.abstract(json.loads(config.model.to_json()))
  assert train._too_long(train.recipe_of(config), form) == []
  longer = overridden(small, "--config.stages[0].length=192")
  (note,) = train._too_long(train.recipe_of(longer), form)
  assert "stage 0 has rows of 192 tokens" in note and "is for 160" in note


def test_what_a_config_asks_of_a_training_is_not_passed_over(small):
  config = json.loads(overridden(small).model.to_json())
  said = lambda **more: train._left_out(checkpoint.abstract(config | more))
  assert said() == said(attention_dropout=0.0) == []
  (note,) = said(attention_dropout=0.1, hidden_dropout=0.0)
  assert note == "note: not applied: attention_dropout 0.1"


def test_utilisation_is_of_what_is_stated_of_an_accelerator():
  one = lambda kind, platform: types.SimpleNamespace(
    devices=np.array(
      [
        types.SimpleNamespace(
          device_kind=kind, platform=platform, process_index=0
        )
      ]
    )
  )
  of = train._peak
  assert of("bfloat16", one("NVIDIA H200", "gpu")) == 989e12
  assert of("bfloat16", one("TPU v5p", "tpu")) == 459e12
  assert of("bfloat16", one("Some new chip", "gpu")) is None
  assert of("float32", one("cpu", "cpu")) is None
  assert train._share(3e12, 2e12, 2) == 0.75
  # By --peak, say: it is not the peak of these devices.
  assert train._share(5e12, 2e12, 2) is None
  assert train._share(5e12, None, 2) is None


def test_what_is_said_where_nothing_could_be_saved():
  assert train._farewell(5, [3, 5]).endswith("step 5, which is saved")
  assert train._farewell(5, [2, 3]).endswith("finite; step 3 is saved")
  assert train._farewell(5, []).endswith("none is saved")


@pytest.mark.slow
def test_a_short_run_has_a_trace_too(small, tmp_path):
  traced = tmp_path / "trace"
  status, _, err = run(
    f"--config={small}", f"--out={tmp_path / 'out'}", "--mesh=seq:1",
    f"--profile={traced}",
    "--config.stages=({'steps': 4, 'length': 160, 'batch': 1},)",
  )  # fmt: skip
  assert status == 0, err
  assert list(traced.rglob("*.xplane.pb"))


@pytest.mark.slow
def test_on_from_a_folder_with_its_tokenizer(small, tmp_path):
  """What is written can be begun with, read and asked."""
  first, second = tmp_path / "first", tmp_path / "second"
  flags = (f"--config={small}", "--mesh=seq:1", ONE_STEP)
  assert run(*flags, f"--out={first}")[0] == 0
  base = first / "model"
  (base / "generation_config.json").write_text("{}")
  status, _, err = run(
    *flags,
    f"--out={second}",
    f"--init_from={base}",
    "--config.start={'kind': 'lookup', 'back': ((1, 2),)}",
  )
  assert status == 0, err
  assert "start: not applied" in err
  for name in ("tokenizer.json", "generation_config.json"):
    kept = (second / "model" / name).read_bytes()
    assert kept == (base / name).read_bytes()
  asked = json.loads((second / "config.json").read_text())
  assert asked["init_from"] == str(base)
  # Called again when all is done, it writes the same.
  status, _, err = run(*flags, f"--out={second}", f"--init_from={base}")
  assert status == 0, err


def test_a_corpus_of_another_tokenizer(small, tmp_path):
  path = tmp_path / "some.tokens"
  corpus.write(path, [[65, 66, 67]], vocab=262, tokenizer_fingerprint="other")
  status, _, err = run(
    f"--config={small}", f"--out={tmp_path / 'out'}", "--mesh=seq:1",
    f"--config.sources=({{'kind': 'corpus', 'path': '{path}'}},)",
  )  # fmt: skip
  assert status == 2
  assert "of 'other'" in err and "Traceback" not in err


@pytest.mark.parametrize("verify", [True, False])
def test_a_corpus_with_a_bit_that_has_changed(tmp_path, verify):
  path = tmp_path / "some.tokens"
  tokens = np.arange(100) % 50
  corpus.write(
    path,
    [tokens],
    vocab=262,
    tokenizer_fingerprint=corpus.fingerprint(Bytes()),
  )
  data = bytearray(path.read_bytes())
  at = data.find(tokens[40:45].astype(np.uint16).tobytes())
  data[at] ^= 1
  path.write_bytes(data)
  entry = {"kind": "corpus", "path": str(path), "verify": verify}
  read = lambda: sources.mixture([entry], Bytes(), length=16, vocab=262)
  if verify:
    with pytest.raises(DataError, match="checksum"):
      read()
  else:
    read()


def test_a_tokenizer_of_more_ids_than_the_model_has(small, tmp_path):
  status, _, err = run(
    f"--config={small}", f"--out={tmp_path / 'out'}", "--mesh=seq:1",
    "--config.model.vocab_size=256",
  )  # fmt: skip
  assert status == 2
  assert "tokenizer: got 262 ids" in err


@pytest.mark.one_case
@pytest.mark.long_cases(4)
@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ((), "--config is required, e.g. --config=configs"),
    (("--config={small}",), "--out is required"),
    (("--config={small}", "--out={out}", "--config.layout=stripes"), "striped"),
    (("--config={small}", "--out={out}", "--config.dtype=int8"), "bfloat16"),
    (
      ("--config={small}", "--out={out}", "--config.optimizer={'rat': 1.0}"),
      "optimizer: got rat",
    ),
    (
      ("--config={small}", "--out={out}", "--config.stages=()"),
      "stages: got none",
    ),
    (
      ("--config={small}", "--out={out}", "--init_from=/nowhere"),
      "/nowhere",
    ),
    (
      ("--config={small}", "--out={out}", "--mesh=seq:2",
       "--config.sources=({'kind': 'web'},)"),
      "one of library, corpus",
    ),
  ],
)  # fmt: skip
def test_wrong_flags(small, tmp_path, argv, words):
  out = str(tmp_path / "out")
  given = [x.replace("{small}", small).replace("{out}", out) for x in argv]
  status, out, err = run(*given)
  assert (status, out) == (2, "")
  assert words in err and "Traceback" not in err


BACKEND = """
class Backend:
  def __init__(self, folder):
    self._file = (folder / "figures.txt").open("a")
  def log_scalar(self, event, value, **kwargs):
    print(kwargs["step"], event, value, file=self._file)
  def close(self):
    print("closed", file=self._file)
    self._file.close()

def of_metrax(folder):
  from metrax.logging import TensorboardBackend
  return TensorboardBackend(str(folder / "metrax"))
"""


def test_figures_for_other_libraries(small, tmp_path, monkeypatch):
  """All that are installed, and a backend of one's own."""
  (tmp_path / "own_backend.py").write_text(BACKEND)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("WANDB_MODE", "offline")
  out = tmp_path / "out"
  libraries = {"tensorboard": "tensorboardX", "wandb": "wandb",
               "own_backend:of_metrax": "metrax"}  # fmt: skip
  installed = [
    name
    for name, module in libraries.items()
    if importlib.util.find_spec(module)
  ]
  names = ["own_backend:Backend", *installed]
  flags = (f"--config={small}", f"--out={out}", "--mesh=seq:2",
           "--config.log_every=1", "--config.save_every=1")  # fmt: skip
  stages = "--config.stages=({'steps': %d, 'length': 160, 'batch': 1},)"
  status, _, err = run(*flags, stages % 2, f"--metrics={','.join(names)}")
  assert status == 0, err
  lines = (out / "figures.txt").read_text().splitlines()
  rows = [
    json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()
  ]
  for row in rows:
    assert f"{row['step']} loss {row['loss']}" in lines
  assert len(rows) == 2 and lines[-1] == "closed"
  for name in {"tensorboard", "own_backend:of_metrax"} & {*installed}:
    (written,) = (out / name.rpartition("_")[2]).iterdir()
    assert b"gradient_norm" in written.read_bytes()
  if "wandb" in installed:
    run_id = (out / "wandb_id").read_text()
    assert list((out / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
  absent = [name for name in ("tensorboard", "wandb") if name not in installed]
  for name in absent:
    status, _, err = run(*flags, f"--metrics={name}")
    assert status == 2 and f"pip install {libraries[name]}" in err
  for name, words in (
    ("prometheus", "one of tensorboard, wandb"),
    ("own_backend:other", "AttributeError"),
    ("no_such_module:x", "ModuleNotFoundError"),
  ):
    status, _, err = run(*flags, f"--metrics={name}")
    assert status == 2 and words in err


def test_a_backend_that_fails_ends_alone(tmp_path, monkeypatch):
  (tmp_path / "faulty_backends.py").write_text(
    BACKEND + "class Full(Backend):\n"
    "  def log_scalar(self, *args, **kwargs):\n"
    "    raise OSError('no room')\n"
    "def shut(folder): raise ValueError('no key')\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  names = [f"faulty_backends:{name}" for name in ("Full", "Backend", "shut")]
  messages = []
  backends = metric_backends.MetricBackends(
    names[:2], tmp_path, messages.append
  )
  for number in (1, 2):
    backends.report(number, {"loss": 0.5})
  backends.close()
  lines = (tmp_path / "figures.txt").read_text().splitlines()
  assert lines == ["closed", "1 loss 0.5", "2 loss 0.5", "closed"]
  assert len(messages) == 1 and "Full failed" in messages[0]
  with pytest.raises(OptionError, match=r"shut, which failed .*no key"):
    metric_backends.MetricBackends(names[1:], tmp_path, messages.append)
  lines = (tmp_path / "figures.txt").read_text().splitlines()
  assert lines[4:] == ["closed"]


@pytest.mark.slow
def test_a_run_of_wandb_is_continued(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  ids = []
  for number in (1, 2):
    backends = metric_backends.MetricBackends(["wandb"], tmp_path, print)
    backends.report(number, {"loss": 0.5})
    backends.close()
    ids.append((tmp_path / "wandb_id").read_text())
  assert ids[0] == ids[1]
  assert list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))


@pytest.mark.long
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_can_be_built(path):
  """By shapes alone: the state, its shardings and the step's figures."""
  values = common.parse("train", train.define, [f"--config={path}"])
  config = values.config
  made = train.recipe_of(config)
  shape = config.model
  if not isinstance(shape, str):
    shape = json.loads(shape.to_json())
  model = checkpoint.abstract(shape, dtype="float32")
  if (wanted := train._encoder(config)) is not None:
    model = rj.models.cepe.with_encoder(rj.models.create(shape), wanted[0])
  if (wanted := train._draft(config)) is not None:
    made_whole = rj.models.create(shape)
    model = rj.models.longspec.with_draft(made_whole, wanted[0])
  if made.predict_only:
    base = rj.models.load(config.init_from)
    model = (
      train._with_head(config, base, None, rj.models.Rules())
      if config.eagle
      else rj.models.with_predict_layer(base)
    )
  for stage in made.stages:
    if stage.rope_scaling is not None:
      parsed, _ = rj.models.read_config(
        scaled_config(json.loads(model.source), stage.rope_scaling)
      )
      assert parsed.max_positions == stage.rope_scaling.context
  for entry in config.stages:
    given = entry.get("sources", config.sources)
    if all(one["kind"] != "corpus" for one in given):
      mixture = sources.mixture(
        given,
        train._tokenizer(config, None)[0],
        length=entry["length"],
        vocab=model.config.vocab,
      )
      assert len(mixture.sources) == len(given)
  optimizer = made.optimizer.build(made.total)
  attend = ContextParallel()
  recipe.check(made, model, attend)
  doc = path.read_text()
  for word in ("Command", "Hardware", "Time", "Result"):
    assert f"\n{word} " in doc
  if wanted is not None or made.predict_only:
    # Their steps: test_encoder_training.py, test_moved_positions.py.
    return
  one = jax.ShapeDtypeStruct((1, 1, made.stages[0].length), np.int32)
  weight = jax.ShapeDtypeStruct(one.shape, np.float32)
  state, figures = jax.eval_shape(
    step.make_step(optimizer, attend, made.objective),
    step.form(optimizer, model),
    None,
    Batch(one, one, weight, one, one, inputs={"reference": weight}),
  )
  assert figures.loss.shape == ()
  assert jax.tree.structure(state.params) == jax.tree.structure(model)
  assert recipe.flops(model, made.stages[-1].length) > 0


LINKED = (
  "--mesh=seq:2",
  "--config.links.each=2",
  "--config.links.documents=2",
  "--config.stages=({'steps': 3, 'length': 64, 'batch': 2, "
  "'segments': 'separate', "
  "'sources': ({'kind': 'continued', 'documents': 2},)},)",
)


@pytest.mark.slow
@pytest.mark.long
def test_link_tokens_are_new_ids_of_the_model(small, tmp_path):
  out, more = tmp_path / "out", tmp_path / "more"
  flags = (f"--config={small}", *LINKED)
  status, _, err = run(*flags, f"--out={out}")
  assert status == 0, err
  links = rj.data.LinkTokens.load(out / "model", vocab=266)
  assert links == rj.data.LinkTokens(262, 2, 2)
  first = rj.models.load(out / "model")
  assert first.config.vocab == 266
  # A training that goes on from there has the same ones, and adapters leave
  # what is no link token alone.
  status, _, err = run(
    *flags,
    f"--init_from={out / 'model'}",
    f"--out={more}",
    "--config.lora.rank=2",
  )
  assert status == 0, err
  second = rj.models.load(more / "model")
  assert rj.data.LinkTokens.load(more / "model", vocab=266) == links
  old, new = (np.asarray(m.embed.weight[...]) for m in (first, second))
  np.testing.assert_array_equal(new[:262], old[:262])
  assert np.any(new[262:] != old[262:])
  status, _, err = run(
    *flags,
    f"--init_from={out / 'model'}",
    f"--out={tmp_path / 'other'}",
    "--config.links.each=3",
  )
  assert status == 2 and "--config.links.each=2" in err


@pytest.mark.slow
def test_a_training_with_link_tokens_resumes(small, tmp_path, monkeypatch):
  flags = (f"--config={small}", *LINKED, "--config.log_every=1")
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert run(*flags, f"--out={whole}")[0] == 0
  inner = train._TrainingRun._report

  def report(self, made, model, mesh, stage, one):
    inner(self, made, model, mesh, stage, one)
    if one.step == 2:
      signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(train._TrainingRun, "_report", report)
  assert run(*flags, f"--out={parts}")[0] == 143
  monkeypatch.undo()
  assert run(*flags, f"--out={parts}")[0] == 0
  for a, b in zip(
    weights(whole / "model"), weights(parts / "model"), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert [row["step"] for row in lines(parts)] == [1, 2, 3]
