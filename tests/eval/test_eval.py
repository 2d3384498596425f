"""What evaluation counts, by models whose answers are known."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import evaluate
from launch.shared import console
from ringjax.data import Bytes, Tokenizer
from ringjax.data.tasks import documents
from ringjax.data.tasks.needle import CommonWords, MultiKey, Passkey
from ringjax.errors import (
  MemoryEstimateError,
  NotFiniteLogitsError,
  OptionError,
  PromptError,
  RingjaxError,
)
from ringjax.eval import (
  Cell,
  Curve,
  KindCost,
  charts,
  find,
  perplexity,
  reader,
)
from ringjax.eval.needle import mean, table
from ringjax.models import checkpoint, tiny
from tests.helpers import poisoned, script

run = functools.partial(script, evaluate)

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 262,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "max_position_embeddings": 262144,
}


@functools.cache
def made(seed: int):
  """A small model that has learnt nothing."""
  return checkpoint.create(CONFIG, seed=seed)


@pytest.fixture(scope="module")
def shipped():
  tokenizer = Tokenizer.load(tiny.path())
  return rj.models.load(tiny.path()), Passkey(tokenizer=tokenizer)


@pytest.mark.slow
def test_the_model_that_ships_finds_what_is_hidden(shipped):
  model, task = shipped
  done = []
  cells = find(
    model, task, lengths=[600, 1500], depths=[0.1, 0.9], trials=2,
    on_trial=done.append,
  )  # fmt: skip
  assert [(c.length, c.depth) for c in cells] == [
    (600, 0.1), (600, 0.9), (1500, 0.1), (1500, 0.9),
  ]  # fmt: skip
  assert [c.score for c in cells] == [1.0] * 4
  assert all(c.completions[0] != c.completions[1] for c in cells)
  assert done == list(range(1, 9))


def test_each_cell_is_told_when_it_is_done():
  task = Passkey(tokenizer=Bytes())
  model = made(0)
  told = []
  cells = find(
    model, task, lengths=[250], depths=[0.0, 0.5, 1.0], trials=2,
    on_trial=told.append, on_cell=lambda cell: told.append(cell.depth),
  )  # fmt: skip
  assert told == [1, 2, 0.0, 3, 4, 0.5, 5, 6, 1.0]
  assert [cell.depth for cell in cells] == [0.0, 0.5, 1.0]


def test_a_model_that_knows_nothing_finds_nothing(shipped):
  _, task = shipped
  model = made(0)
  (cell,) = find(model, task, lengths=[300], depths=[0.5], trials=3)
  assert cell.score == 0 and len(cell.scores) == 3


@pytest.mark.long
def test_depths_hide_the_same_fact(shipped):
  model, task = shipped
  cells = find(model, task, lengths=[500], depths=[0.0, 1.0], trials=1)
  assert cells[0].completions == cells[1].completions


@pytest.mark.long
def test_tasks_and_kinds_of_caches():
  tasks = {
    "key": Passkey(tokenizer=Bytes()),
    "words": CommonWords(tokenizer=Bytes(), words=2, times=4, others=1),
  }
  told, new = [], []
  ask = functools.partial(
    find, made(0), tasks, lengths=[300], depths=[0.4], trials=1,
    kinds={"full": "dense", "short": "bfloat16"}, on_trial=told.append,
    on_cell=lambda cell: new.append(cell.key),
  )  # fmt: skip
  cells = ask()
  want = [
    ("key", "full", 300, 0.4), ("key", "short", 300, 0.4),
    # All over the text.
    ("words", "full", 300, None), ("words", "short", 300, None),
  ]  # fmt: skip
  assert [cell.key for cell in cells] == new == want
  assert told == [1, 2, 3, 4]
  # What is known is not asked again, and counts.
  told.clear(), new.clear()
  known = [Cell.from_record(json.loads(json.dumps(c.record()))) for c in cells]
  assert known == cells
  assert ask(known=[*known[:2], *known[3:]]) == cells
  assert new == want[2:3] and told == [4]
  assert ask(known=known) == cells and told == [4]


def test_what_a_table_and_a_mean_are_of():
  def cells(tasks, kinds, depths=(0.0, 1.0)):
    return [
      Cell(length=n, depth=d, scores=(s,), completions=("",), task=t, cache=k)
      for t, s in tasks.items()
      for k in kinds
      for n in (10, 20)
      for d in depths
    ]

  both = {"a": 0.5, "b": 1.0}
  assert table(cells(both, ["x", "y"])) == {
    (t, k): {10: s, 20: s} for t, s in both.items() for k in "xy"
  }
  assert list(table(cells(both, ["x"]))) == [("a",), ("b",)]
  assert list(table(cells({"a": 1.0}, ["x", "y"]))) == [("x",), ("y",)]
  assert list(table(cells({"a": 1.0}, ["x"]))) == [("0 %",), ("100 %",)]
  assert list(table(cells({"a": 1.0}, ["x"], [None]))) == [("any",)]
  # Tasks of more cells do not weigh more.
  assert mean(cells(both, ["x"]) + cells({"c": 0.0}, ["x"], [None])) == 0.5


def test_a_task_that_does_not_fit_is_named():
  tasks = {"keys": MultiKey(tokenizer=Bytes()), "words": CommonWords(
    tokenizer=Bytes())}  # fmt: skip
  with pytest.raises(OptionError, match=r"^words, length: got 600; wanted"):
    find(made(0), tasks, lengths=[600])
  with pytest.raises(OptionError, match="kinds: got none"):
    find(made(0), tasks, lengths=[6000], kinds={})
  with pytest.raises(OptionError, match="task: got none"):
    find(made(0), {}, lengths=[6000])


@pytest.mark.parametrize(
  ("wrong", "words"),
  [
    (dict(lengths=[]), "lengths"),
    (dict(lengths=[0]), "lengths"),
    (dict(lengths=[300], depths=[]), "depths"),
    (dict(lengths=[300], depths=[1.5]), "depth"),
    (dict(lengths=[300], trials=0), "trials"),
    (dict(lengths=[30]), "length"),
  ],
)
def test_wrong_questions(shipped, wrong, words):
  model, task = shipped
  with pytest.raises(OptionError, match=words):
    find(model, task, **wrong)


@pytest.mark.parametrize(
  "wrong",
  [
    dict(lengths=[300, 30]),
    dict(lengths=[300, 0]),
    dict(lengths=[300], depths=[0.0, 1.5]),
    dict(lengths=[300], prefill="blockwise", chunk=8),
    dict(lengths=[300, 100_000]),
  ],
)
def test_nothing_is_asked_when_a_question_is_wrong(wrong, monkeypatch):
  # Room for the shorter text alone.
  module = importlib.import_module("ringjax.infer.session")
  monkeypatch.setattr(module, "device_free_bytes", lambda *devices: 1 << 20)
  task = Passkey(tokenizer=Bytes())
  model, done = made(0), []
  with pytest.raises((OptionError, MemoryEstimateError)):
    find(model, task, trials=1, on_trial=done.append, **wrong)
  assert not done


# ---------------------------------------------------------------------------
# Perplexity
# ---------------------------------------------------------------------------


def texts(count: int, length: int) -> list[np.ndarray]:
  draw_ids = np.random.default_rng(0)
  return [draw_ids.integers(0, 262, length) for _ in range(count)]


def test_a_document_whose_losses_are_not_finite_is_named():
  model = poisoned(made(1), 201)
  rows = [row % 200 for row in texts(3, 49)]
  rows[1][7] = 201
  for options in ({}, dict(prefill="chunked", chunk=16)):
    with pytest.raises(NotFiniteLogitsError) as caught:
      perplexity(model, rows, length=48, rows=3, **options)
    assert "document 1 at position 8" in str(caught.value)
    assert caught.value.rows == (1,) and caught.value.positions == (8,)


def test_losses_by_position_are_the_model_s_own():
  model = made(1)
  rows = texts(3, 49)
  found = perplexity(model, rows, length=48, rows=3)
  tokens = np.stack(rows).astype(np.int32)
  logits = np.asarray(model(tokens[:, :-1]), np.float64)
  lse = np.log(np.exp(logits).sum(-1))
  picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
  each = (lse - picked).mean(0)
  assert found.ends == (1, 2, 4, 8, 16, 32, 48)
  starts = (0, *found.ends[:-1])
  want = [each[a:b].mean() for a, b in zip(starts, found.ends, strict=True)]
  assert found.nll == pytest.approx(want, rel=1e-5)
  assert found.mean == pytest.approx(each.mean(), rel=1e-6)
  assert found.perplexity == pytest.approx(math.exp(each.mean()), rel=1e-5)
  assert found.last == 24
  assert found.last_nll == pytest.approx(each[-24:].mean(), rel=1e-6)
  found = perplexity(model, rows, length=48, rows=3, last=5)
  assert found.last_nll == pytest.approx(each[-5:].mean(), rel=1e-6)


@pytest.mark.parametrize("prefill", ["auto", "chunked"])
def test_the_id_that_begins_a_text_is_read_and_not_foretold(prefill):
  model = made(1)
  rows = texts(2, 48)
  found = perplexity(model, rows, length=48, rows=2, bos=256, prefill=prefill)
  labels = np.stack(rows).astype(np.int32)
  tokens = np.concatenate([np.full((2, 1), 256, np.int32), labels], 1)
  logits = np.asarray(model(tokens[:, :-1]), np.float64)
  lse = np.log(np.exp(logits).sum(-1))
  picked = np.take_along_axis(logits, labels[:, :, None], -1)[..., 0]
  each = (lse - picked).mean(0)
  assert found.nll[0] == pytest.approx(each[0], rel=1e-5)
  assert found.mean == pytest.approx(each.mean(), rel=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
  "prefill",
  [
    "auto",
    "hybrid",
    "kvr",
    "chunked",
    pytest.param("ring", marks=pytest.mark.slow),
    pytest.param("bidirectional", marks=pytest.mark.slow),
  ],
)
def test_a_sharded_text_gives_the_same(prefill):
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  model = made(1)
  rows = texts(2, 49)
  want = perplexity(model, rows, length=48, rows=2)
  got = perplexity(
    checkpoint.place(model, mesh), rows, length=48, rows=2, prefill=prefill
  )
  assert got.nll == pytest.approx(want.nll, rel=1e-5)


@pytest.mark.parametrize(
  ("axes", "prefill"), [(("data",), "chunked"), (("data", "stage"), "auto")]
)
def test_devices_of_a_batch_read_rows_of_their_own(axes, prefill):
  """Three rows over two or four devices: the last ones repeat a row."""
  shape = (2,) * len(axes)
  mesh = rj.make_mesh(shape, axes, devices=jax.devices()[: 2 ** len(axes)])
  model, rows, counts = made(1), texts(3, 49), []
  want = perplexity(model, rows, length=48, rows=3)
  got = perplexity(
    checkpoint.place(model, mesh), rows, length=48, rows=3, prefill=prefill,
    on_row=counts.append,
  )  # fmt: skip
  assert counts == [1, 2, 3]
  assert got.nll == pytest.approx(want.nll, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [7, 16, 48, 100])
def test_what_was_read_may_lie_in_a_cache(chunk):
  model = made(1)
  rows = texts(2, 49)
  want = perplexity(model, rows, length=48, rows=2)
  read = functools.partial(
    perplexity, model, rows, length=48, rows=2, prefill="chunked", chunk=chunk
  )
  assert read().nll == pytest.approx(want.nll, rel=1e-5)
  # A cache of fewer bits is another one, and not by much.
  short = read(cache_dtype="bfloat16")
  assert short.nll == pytest.approx(want.nll, rel=2e-2)
  assert short.nll[-1] != read().nll[-1]


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(prefill="rings"), "one of auto, dense"),
    (dict(cache_dtype="bfloat16"), "which has no cache"),
    (dict(prefill="blockwise", chunk=8), "chunk"),
  ],
)
def test_ways_that_do_not_fit(options, words):
  model = made(1)
  with pytest.raises(OptionError, match=words):
    perplexity(model, texts(1, 49), length=48, rows=1, **options)


@pytest.mark.parametrize(
  ("wrong", "words"),
  [
    (dict(length=50), "multiple of 8"),
    (dict(rows=3), "2 of more than 48 tokens; wanted 3"),
    (dict(rows=0), "rows"),
    (dict(length=0), "length"),
    (dict(last=0), "last"),
    (dict(last=49), "at most length=48"),
    (dict(bos=262), "id 262"),
    (dict(prefill="chunked", length=40), "cache"),
  ],
)
def test_nothing_is_read_when_it_cannot_be(wrong, words, monkeypatch):
  module = importlib.import_module("ringjax.infer.session")
  monkeypatch.setattr(module, "device_free_bytes", lambda *devices: 1 << 10)
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  model = checkpoint.place(made(1), mesh)
  with pytest.raises(RingjaxError, match=words):
    reader(model, texts(2, 52), **(dict(length=48, rows=2) | wrong))


@pytest.mark.parametrize("loss", [850.0, math.inf, math.nan])
def test_a_model_that_is_far_off_is_told_too(loss):
  curve = Curve(
    length=2, rows=1, ends=(1, 2), nll=(1.0, loss), mean=loss, last=1,
    last_nll=loss,
  )  # fmt: skip
  said = json.loads(json.dumps(curve.record(), allow_nan=False))
  assert said["perplexity"] is None and said["nll"][0] == 1.0
  known = loss if math.isfinite(loss) else None
  assert (said["mean"], said["last_nll"]) == (known, known)


def test_too_few_texts():
  model = made(1)
  with pytest.raises(PromptError, match="1 of more than 48 tokens; wanted 2"):
    perplexity(model, [*texts(1, 49), *texts(3, 48)], length=48, rows=2)


# ---------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------


@pytest.mark.slow
def test_needle_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  plot, kept = tmp_path / "map.png", tmp_path / "map.json"
  status, out, err = run(
    "needle", "--lengths=300,600", "--depths=0,1", "--trials=1",
    "--mesh=seq:2", f"--plot={plot}", f"--out={kept}", "--prefill=chunked",
    "--chunk=128", "--cache_dtype=bfloat16",
  )  # fmt: skip
  assert status == 0, err
  lines = out.splitlines()
  assert [line.split() for line in lines[1:]] == [
    ["300", "600"],
    ["0", "%", "100", "100"],
    ["100", "%", "100", "100"],
  ]
  assert plot.read_bytes()[:4] == b"\x89PNG"
  record = json.loads(kept.read_text())
  assert [c["score"] for c in record["cells"]] == [1.0] * 4
  assert record["complete"]


@pytest.mark.slow
def test_tasks_by_kinds_of_caches_and_what_is_missing_later(tmp_path):
  pytest.importorskip("matplotlib")
  plot, kept = tmp_path / "map.png", tmp_path / "map.json"
  script = functools.partial(
    run, "needle", "--lengths=300", "--depths=0.5", "--trials=1",
    "--mesh=seq:1", "--cache=dense", "--cache=int8:group=16", f"--out={kept}",
  )  # fmt: skip
  status, out, err = script("--task=passkey", f"--plot={plot}")
  assert status == 0, err
  assert [line.split() for line in out.splitlines()[1:]] == [
    ["300"], ["dense", "100"], ["int8:group=16", "100"],
  ]  # fmt: skip
  assert plot.read_bytes()[:4] == b"\x89PNG"
  first = json.loads(kept.read_text())
  assert (first["tasks"], first["caches"]) == (
    ["passkey"],
    ["dense", "int8:group=16"],
  )
  # What was found is told from an answer, so that it shows when asked again.
  for cell in first["cells"]:
    cell["completions"] = ["kept"]
  kept.write_text(json.dumps(first))
  status, out, err = script("--task=passkey,multikey", f"--plot={plot}")
  assert status == 0, err
  assert f"{kept} has 2 of 4 cells already" in err
  assert [line.split() for line in out.splitlines()[1:]] == [
    ["300"],
    ["passkey", "dense", "100"], ["passkey", "int8:group=16", "100"],
    ["multikey", "dense", "100"], ["multikey", "int8:group=16", "100"],
    ["mean", "dense", "100"], ["mean", "int8:group=16", "100"],
  ]  # fmt: skip
  record = json.loads(kept.read_text())
  assert record["complete"] and len(record["cells"]) == 4
  said = [cell["completions"] == ["kept"] for cell in record["cells"]]
  assert said == [True, True, False, False]


@pytest.mark.long
@pytest.mark.parametrize(
  ("change", "known"),
  [
    ({}, 1),
    ({"seed": 1}, 0),
    ({"model": "another"}, 0),
    ({"weights": "0"}, 0),
    ({"cells": 3}, 0),
    ({"cells": [{"length": 300}]}, 0),
    ([], 0),
    ("not JSON", 0),
  ],
)
def test_what_another_run_left_is_not_taken(
  asked, change, known, tmp_path, monkeypatch
):
  kept = tmp_path / "map.json"
  script = functools.partial(
    run, "needle", "--lengths=300", "--depths=1", "--mesh=seq:1",
    f"--out={kept}",
  )  # fmt: skip
  assert script()[0] == 0
  record = json.loads(kept.read_text())
  cell = Cell(
    length=300, depth=1.0, scores=(0.5,), completions=("",), task="passkey"
  )
  record["cells"] = [cell.record()]
  text = change
  if not isinstance(change, str):
    text = json.dumps(record | change if isinstance(change, dict) else change)
  kept.write_text(text)
  status, _, err = script()
  assert status == 0, err
  assert ("1 of 1 cells already" in err) == bool(known)
  assert len(json.loads(kept.read_text())["cells"]) == known


@pytest.fixture
def asked(monkeypatch) -> list:
  """Tasks that the script asks for, in place of asking."""
  tasks = []

  def note(model, task, *, lengths, depths, **options):
    tasks.extend(task.values())
    return [
      Cell(length=n, depth=d, scores=(1.0,), completions=("",))
      for n in lengths
      for d in depths
    ]

  monkeypatch.setattr(evaluate, "find", note)
  return tasks


def test_facts_are_hidden_in_held_out_text_alone(asked):
  status, out, err = run("needle", "--lengths=600", "--mesh=seq:1", "--json")
  assert status == 0, err
  assert "more than once" not in err
  (task,) = asked
  held_out = set("\n".join(documents.library(held_out=True)).split("\n"))
  lines = task.filler.lines(np.random.default_rng(0))
  # As far as it goes, and on from its start.
  count = task.filler.text.count("\n") + 10
  assert all(line[:-1] in held_out for line in itertools.islice(lines, count))
  assert task.filler.text == "\n".join(documents.library(held_out=True))
  assert json.loads(out)["text"] == "held-out files of Python's library"


def test_facts_are_hidden_in_a_folder_s_text(asked, tmp_path):
  (tmp_path / "b.txt").write_text("second\n")
  (tmp_path / "a.txt").write_text("first\n")
  status, out, err = run(
    "needle", "--lengths=600", "--mesh=seq:1", f"--folder={tmp_path}", "--json"
  )
  assert status == 0, err
  assert asked[0].filler.text == "first\n\nsecond\n"
  record = json.loads(out)
  assert (record["text"], record["characters"]) == (str(tmp_path), 14)
  assert "about 14 tokens; what is longer has it more than once" in err


@pytest.mark.long
def test_perplexity_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  plot = tmp_path / "nll.png"
  status, out, err = run(
    "perplexity", "--lengths=256,512", "--rows=2", "--mesh=seq:2",
    f"--plot={plot}", "--json",
  )  # fmt: skip
  assert status == 0, err
  short, long = json.loads(out)["curves"]
  assert short["ends"][-1] == 256 and long["ends"][-1] == 512
  # The same bytes, with 128 or more before them and with 384.
  assert short["last"] == long["last"] == 128
  assert long["last_nll"] < short["last_nll"]
  # Bytes of Python: far from random, and the first one hardly known.
  assert 0.3 < long["mean"] < 4
  assert long["nll"][0] > long["nll"][-1]
  assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_figures_with_an_adapter_are_those_of_its_merged_model(tmp_path):
  model = rj.models.load(tiny.path())
  lora = rj.train.Lora(rank=2, targets=("q", "v"))
  draw = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: 0.3 * draw.normal(size=x.shape).astype(np.float32),
    lora.start(model),
  )
  rj.train.save_adapter(tmp_path / "adapter", model, lora, params)
  rj.models.save(lora.merged(params, model), tmp_path / "merged")
  for name in ("tokenizer.json", "tokenizer_config.json"):
    if (tiny.path() / name).exists():
      shutil.copy(tiny.path() / name, tmp_path / "merged")

  def figures(key, *argv):
    status, out, err = run(*argv, "--mesh=seq:1", "--json")
    assert status == 0, err
    return json.loads(out)[key]

  adapter, merged = (
    f"--{x}={tmp_path / y}"
    for x, y in (("adapter", "adapter"), ("model", "merged"))
  )
  cases = {
    "curves": ("perplexity", "--lengths=64", "--rows=1"),
    "kinds": ("caches", "--cache=int8", "--lengths=128", "--rows=1"),
    "cells": ("needle", "--lengths=300", "--depths=0", "--trials=1"),
  }
  for key, argv in cases.items():
    got = figures(key, *argv, adapter)
    assert got == figures(key, *argv, merged)
    if key != "cells":
      assert got != figures(key, *argv)
  status, _, err = run(*cases["curves"], f"--adapter={tmp_path / 'merged'}")
  assert status == 2 and "adapter_config.json" in err
  status, _, err = run("families", adapter)
  assert status == 2 and "--adapter with families" in err


@pytest.mark.parametrize("adds_bos", [True, False])
def test_rows_of_all_lengths_end_alike(adds_bos, monkeypatch):
  tokenizer, given = Tokenizer.load(tiny.path()), {}
  tokenizer.adds_bos = adds_bos
  monkeypatch.setattr(evaluate.Tokenizer, "load", lambda *a, **k: tokenizer)

  def note(model, documents, *, length, rows, last, **options):
    given[length] = (documents, last)
    curve = Curve(
      length=length, rows=rows, ends=(length,), nll=(1.0,), mean=1.0,
      last=last, last_nll=length / 7,
    )  # fmt: skip
    return lambda on_row: curve

  monkeypatch.setattr(evaluate, "reader", note)
  status, out, err = run(
    "perplexity", "--lengths=64,16,32", "--rows=3", "--mesh=seq:1"
  )
  assert status == 0, err
  long, long_last = given[64]
  assert [len(row) for row in long] == [64 + (not adds_bos)] * 3
  for length in (16, 32):
    rows, last = given[length]
    assert last == long_last == 8
    for short, whole in zip(rows, long, strict=True):
      assert short.tolist() == whole[-length - (not adds_bos) :].tolist()
  # In the order that was asked for.
  assert out.splitlines()[-1].split() == ["9.1429", "2.2857", "4.5714"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_each_row_begins_as_a_text_does(adds_bos, monkeypatch):
  tokenizer, given = Tokenizer.load(tiny.path()), []
  assert tokenizer.adds_bos
  tokenizer.adds_bos = adds_bos
  monkeypatch.setattr(evaluate.Tokenizer, "load", lambda *a, **k: tokenizer)

  def note(model, documents, **options):
    given.append((documents, options["bos"]))
    curve = Curve(
      length=64, rows=2, ends=(64,), nll=(1.0,), mean=1.0, last=1, last_nll=1.0
    )
    return lambda on_row: curve

  monkeypatch.setattr(evaluate, "reader", note)
  status, out, err = run(
    "perplexity", "--lengths=64", "--rows=2", "--mesh=seq:1", "--json"
  )
  assert status == 0, err
  ((rows, bos),) = given
  assert bos == (256 if adds_bos else None)
  assert json.loads(out)["bos"] == adds_bos
  text = "".join(documents.library(held_out=True))[:200]
  want = tokenizer.encode(text, bos=False)[: len(np.concatenate(rows))]
  assert np.concatenate(rows).tolist() == want.tolist()
  assert [len(row) for row in rows] == [64 if adds_bos else 65] * 2


@pytest.mark.long
@pytest.mark.parametrize(
  ("argv", "unit", "error", "status"),
  [
    (("needle", "--lengths=300", "--depths=0,1", "--trials=1"), "cells",
     KeyboardInterrupt(), 130),
    (("perplexity", "--lengths=64,128", "--rows=1"), "curves",
     MemoryError("no"), 2),
  ],
)  # fmt: skip
def test_who_is_stopped_has_what_was_found(
  argv, unit, error, status, tmp_path, monkeypatch
):
  def at(screen, done: int) -> None:
    if done == 2:
      raise error

  monkeypatch.setattr(console.Screen, "at", at)
  kept = tmp_path / "found.json"
  got, out, err = run(*argv, "--mesh=seq:1", f"--out={kept}")
  assert (got, out) == (status, "")
  assert f"{kept} has 1 of 2 {unit}" in err
  record = json.loads(kept.read_text())
  assert len(record[unit]) == 1 and record["complete"] is False


@pytest.mark.slow
def test_costs_of_caches_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  plot, kept = tmp_path / "caches.png", tmp_path / "caches.json"
  status, out, err = run(
    "caches", "--lengths=64", "--rows=2", "--mesh=seq:2", "--cache=dense",
    "--cache=int8", "--cache=int4:group=16", f"--plot={plot}", f"--out={kept}",
  )  # fmt: skip
  assert status == 0, err
  assert plot.read_bytes()[:4] == b"\x89PNG"
  record = json.loads(kept.read_text())
  assert record["complete"]
  found = {cost["name"]: cost for cost in record["kinds"]}
  dense, byte = found["dense"], found["int8"]
  assert dense["kl"] == dense["loss"] == dense["far"] == 0
  # 32 numbers of a token and 8 bytes of its coordinates and the row's.
  numbers = 64 * 32
  assert dense["bits"] == 8 * dense["nbytes"] / numbers > 32
  assert byte["bits"] == pytest.approx(dense["bits"] - 23)
  assert byte["nbytes"] < 0.4 * dense["nbytes"]
  divergences = [cost["kl"] for cost in found.values()]
  assert divergences == sorted(divergences) and divergences[1] > 0
  assert out.splitlines()[2].split()[0] == "dense"


@pytest.mark.slow
def test_choices_of_heads_by_script(tmp_path):
  """A row for each of FastGen's sets; each head of a text takes one."""
  kept = tmp_path / "caches.json"
  status, out, err = run(
    "caches", "--lengths=64", "--rows=2", "--mesh=seq:1",
    "--cache=fastgen:recovered=1,window=16", "--cache=dense", f"--out={kept}",
  )  # fmt: skip
  assert status == 0, err
  every, dense = json.loads(kept.read_text())["kinds"]
  names = rj.kv.FastGen().choices
  assert tuple(every["choices"]) == names and dense["choices"] == {}
  # Layers that look back a window have none.
  each = every["choices"].values()
  heads = np.asarray([[n for x in layers for n in x] for layers in each])
  assert heads.size and (heads.sum(0) == 2).all() and (heads[-1] == 2).all()
  lines = out.splitlines()
  wide = max(map(len, names))
  assert [line[:wide].strip() for line in lines[-4:]] == [*names]
  assert "choices in 2 texts" in lines[-5]


def test_what_is_found_with_each_kind_by_script(monkeypatch, tmp_path):
  read = []

  def note(model, tasks, *, lengths, depths, kinds, on_trial, **options):
    read.append((list(tasks), lengths, depths, options["trials"], *kinds))
    (kind,) = kinds
    on_trial(1)
    score = 0.75 if kind == "dense" else 0.5
    return [Cell(length=64, depth=1.0, scores=(score,), completions=("",))]

  def cost(model, tokens, kinds, *, on_read):
    read.append((tokens.shape, *kinds))
    on_read(1)
    (name,) = kinds
    rest = dict(bits=1.0, nbytes=1, nll=1.0, loss=0.0, kl=0.0, far=0.0)
    return [KindCost(name=name, **rest)]

  monkeypatch.setattr(evaluate, "find", note)
  monkeypatch.setattr(evaluate, "compare_caches", cost)
  kept = tmp_path / "caches.json"
  status, out, err = run(
    "caches", "--lengths=64", "--rows=1", "--mesh=seq:1", "--cache=dense",
    "--cache=hadamard4", "--task=passkey,multikey", "--trials=1", "--depths=1",
    f"--out={kept}",
  )  # fmt: skip
  assert status == 0, err
  assert read == [
    (["passkey", "multikey"], [64], [1.0], 1, "dense"),
    ((1, 64), "dense"),
    (["passkey", "multikey"], [64], [1.0], 1, "hadamard4"),
    ((1, 64), "hadamard4"),
  ]
  head, *lines = out.splitlines()[1:]
  assert head.split()[-1] == "found"
  assert [line.split()[-1] for line in lines] == ["75%", "50%"]
  record = json.loads(kept.read_text())
  assert [kind["score"] for kind in record["kinds"]] == [0.75, 0.5]
  assert record["tasks"] == ["passkey", "multikey"] and record["complete"]


@pytest.mark.parametrize(
  ("argv", "says"),
  [
    (("--cache=int3",), "--cache: got 'int3'"),
    (("--task=passkey", "--lengths=90"), "passkey, length: got 90"),
    (("--task=passkeys",), "--task: got 'passkeys'"),
    (("--cache=nuq3", "--lengths=64"), "launch.calibrate"),
    (("--lengths=64,128",), "one length"),
    (("--lengths=64", "--depths=0"), "--depths with caches"),
  ],
)
def test_caches_that_cannot_be_compared(argv, says):
  status, out, err = run("caches", *argv, "--rows=1", "--mesh=seq:1")
  assert (status, out) == (2, "") and says in err


def test_curves_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  log, plot = tmp_path / "log.jsonl", tmp_path / "run.png"
  row = lambda step, loss: json.dumps(
    {"step": step, "stage": step // 4, "loss": loss, "gradient_norm": 1.0,
     "learning_rate": 1e-3, "tokens_per_s": 10.0}
  )  # fmt: skip
  lines = [row(2, 3.0), row(4, 2.5), row(6, 2.0), row(4, 2.4), row(6, 1.9)]
  log.write_text("\n".join(lines) + '\n{"step": 8, "lo')
  status, out, err = run("curves", f"--log={log}", f"--plot={plot}", "--json")
  assert status == 0, err
  found = json.loads(out)["rows"]
  assert [(r["step"], r["loss"]) for r in found] == [(2, 3.0), (4, 2.4),
                                                     (6, 1.9)]  # fmt: skip
  assert plot.read_bytes()[:4] == b"\x89PNG"


def test_figures_of_a_kind_of_training_are_drawn(tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  log, plot = tmp_path / "log.jsonl", tmp_path / "run.png"
  common = {"stage": 0, "loss": 1.0, "gradient_norm": 1.0,
            "learning_rate": 1e-3, "tokens_per_s": 10.0}  # fmt: skip
  rows = [
    {"step": n, **common, "rollouts_reward": n / 4, "rollouts_tokens": 9}
    for n in (1, 2)
  ]
  log.write_text("".join(json.dumps(row) + "\n" for row in rows))
  titles = []
  monkeypatch.setattr(
    "matplotlib.axes.Axes.set_title",
    lambda self, title, **_: titles.append(title),
  )
  status, out, err = run("curves", f"--log={log}", f"--plot={plot}")
  assert status == 0, err
  assert out.splitlines()[2].split()[-2:] == ["0.5", "9"]
  assert "mean reward of a batch" in titles
  assert not any("margin" in title for title in titles)
  rows[1]["rollouts_reward"] = "much"
  log.write_text("".join(json.dumps(row) + "\n" for row in rows))
  status, _, err = run("curves", f"--log={log}")
  assert status == 2 and "rollouts_reward 'much'" in err


def test_steps_that_were_not_finite_are_gaps(tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  log, plot = tmp_path / "log.jsonl", tmp_path / "run.png"
  rest = '"stage": 0, "gradient_norm": null, '
  rest += '"learning_rate": 1e-3, "tokens_per_s": 9'
  losses = ("3.0", "null", "NaN", "Infinity", "2.0")
  log.write_text(
    "".join(
      f'{{"step": {n}, "loss": {loss}, {rest}}}\n'
      for n, loss in enumerate(losses)
    )
  )
  drawn = []
  monkeypatch.setattr(
    "matplotlib.axes.Axes.plot", lambda self, x, y, **_: drawn.append(list(y))
  )
  status, out, err = run("curves", f"--log={log}", f"--plot={plot}")
  assert status == 0, err
  shown = [line.split()[2] for line in out.splitlines()[1:]]
  assert shown == ["3.0000", "-", "-", "-", "2.0000"]
  assert drawn[0] == pytest.approx([3.0, *[math.nan] * 3, 2.0], nan_ok=True)
  assert plot.read_bytes()[:4] == b"\x89PNG"
  status, out, err = run("curves", f"--log={log}", "--json")
  found = json.loads(out, parse_constant=pytest.fail)["rows"]
  assert [row["loss"] for row in found] == [3.0, None, None, None, 2.0]


@pytest.mark.parametrize(
  "line",
  [
    "[1]",
    "3",
    "null",
    '{"step": 1}',
    '{"step": "1", "stage": 0, "loss": 1, "gradient_norm": 1, '
    '"learning_rate": 1, '
    '"tokens_per_s": 1}',
    '{"step": 1, "stage": 0, "loss": "low", "gradient_norm": 1, '
    '"learning_rate": 1, '
    '"tokens_per_s": 1}',
    "step 1",
  ],
)
def test_a_log_of_something_else(line, tmp_path):
  log = tmp_path / "log.jsonl"
  log.write_text(f"{line}\n")
  status, out, err = run("curves", f"--log={log}")
  assert (status, out) == (2, "")
  assert f"{log}:1: " in err and "Traceback" not in err


@pytest.mark.long
def test_a_training_is_drawn_without_its_devices(tmp_path):
  log = tmp_path / "log.jsonl"
  log.write_text(
    '{"step": 1, "stage": 0, "loss": 1, "gradient_norm": 1, '
    '"learning_rate": 1, '
    '"tokens_per_s": 1}\n'
  )
  program = f"""
from jax._src import xla_bridge
from launch import evaluate
from launch.shared import common
values, words = common.parse_words(
  "evaluate", evaluate.define, ["curves", "--log={log}"])
assert evaluate.run(values, words) == 0
assert not xla_bridge.backends_are_initialized()
import jax
jax.devices()
assert xla_bridge.backends_are_initialized()
"""
  ran = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  assert ran.returncode == 0, ran.stderr
  assert "1.0000" in ran.stdout


@pytest.mark.parametrize(
  ("argv", "unused"),
  [
    (("perplexity", "--task=passkey", "--depths=0", "--trials=1", "--seed=1"),
     "--depths, --seed, --task, --trials with perplexity"),
    (("needle", "--rows=2", "--log=a"), "--log, --rows with needle"),
    (("curves", "--log=a", "--mesh=seq:1", "--lengths=9", "--nodistributed"),
     "--distributed, --lengths, --mesh with curves"),
  ],
)  # fmt: skip
def test_no_flag_is_without_effect(argv, unused):
  status, out, err = run(*argv)
  assert (status, out) == (2, "")
  assert f"got {unused}" in err


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ((), "wanted needle or suite or perplexity or caches"),
    (("needles",), "got needles"),
    (("curves",), "--log"),
    (("curves", "--log=/nowhere"), "/nowhere"),
    (("needle", "--lengths=long"), "--lengths"),
    (("needle", "--task=passkey,keys"), "--task: got 'keys'"),
    (("needle", "--task="), "--task: got 'none'"),
    (("needle", "--lengths="), "--lengths"),
    (("needle", "--lengths=600,0"), "--lengths"),
    (("needle", "--depths=0,nan"), "--depths"),
    (("needle", "--depths="), "--depths"),
    (("needle", "--folder=/nowhere"), "/nowhere"),
    (("needle", "--model=/nowhere"), "/nowhere"),
    (("needle", "--lengths=300,30", "--mesh=seq:1"), "length"),
    (("perplexity", "--lengths=64,10000000", "--rows=1", "--mesh=seq:1"),
     "documents"),
  ],
)  # fmt: skip
def test_wrong_flags(argv, words):
  status, out, err = run(*argv)
  assert (status, out) == (2, "")
  # No text is read in vain.
  assert "reading" not in err
  assert words in err and "Traceback" not in err


def test_a_map_has_gaps_where_nothing_was_asked(tmp_path):
  pytest.importorskip("matplotlib")
  cell = lambda n, d: Cell(
    length=n, depth=d, scores=(1.0, 0.0), completions=("a", "b")
  )
  path = tmp_path / "gaps.png"
  charts.heat_map([cell(10, 0.0), cell(20, 0.5)], str(path))
  assert path.read_bytes()[:4] == b"\x89PNG"
  assert cell(10, 0.0).score == 0.5


@pytest.mark.slow
def test_policies_are_measured_behind_what_they_evicted():
  model = made(0)
  tokens = np.random.default_rng(0).integers(1, 64, (2, 256))
  policy = lambda budget: rj.kv.CacheConfig(
    policy=rj.kv.SnapKV(budget=budget, window=8), room=32
  )
  every, few = rj.eval.compare_caches(
    model,
    tokens.astype(np.int32),
    {"all": policy(1.0), "few": policy(0.1)},
  )
  assert abs(every.loss) < 1e-4
  assert every.far < 1e-4 < few.far
  assert few.nbytes < 0.6 * every.nbytes
  # Bits are of the numbers that stay, and of all bytes.
  assert few.bits > every.bits > 32
