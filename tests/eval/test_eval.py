"""What evaluation counts, by models whose answers are known."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import common, evaluate
from ringjax.data import Tokenizer, documents
from ringjax.data.needle import Passkey
from ringjax.errors import OptionError, PromptError
from ringjax.eval import Cell, draw, find, perplexity
from ringjax.models import checkpoint, tiny

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 262,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def shipped():
  tokenizer = Tokenizer.load(tiny.path())
  return rj.models.load(tiny.path()), Passkey(tokenizer=tokenizer)


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


def test_a_model_that_knows_nothing_finds_nothing(shipped):
  _, task = shipped
  model = checkpoint.create(CONFIG, seed=0)
  (cell,) = find(model, task, lengths=[300], depths=[0.5], trials=3)
  assert cell.score == 0 and len(cell.scores) == 3


def test_depths_hide_the_same_fact(shipped):
  model, task = shipped
  cells = find(model, task, lengths=[500], depths=[0.0, 1.0], trials=1)
  assert cells[0].completions == cells[1].completions


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


# ---------------------------------------------------------------------------
# Perplexity
# ---------------------------------------------------------------------------


def texts(count: int, length: int) -> list[np.ndarray]:
  draw_ids = np.random.default_rng(0)
  return [draw_ids.integers(0, 262, length) for _ in range(count)]


def test_losses_by_position_are_the_model_s_own():
  model = checkpoint.create(CONFIG, seed=1)
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


@pytest.mark.parametrize("prefill", ["auto", "ring", "chunked"])
def test_a_sharded_text_gives_the_same(prefill):
  mesh = rj.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
  model = checkpoint.create(CONFIG, seed=1)
  rows = texts(2, 49)
  want = perplexity(model, rows, length=48, rows=2)
  got = perplexity(
    checkpoint.place(model, mesh), rows, length=48, rows=2, prefill=prefill
  )
  assert got.nll == pytest.approx(want.nll, rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 16, 48, 100])
def test_what_was_read_may_lie_in_a_cache(chunk):
  model = checkpoint.create(CONFIG, seed=1)
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
    (dict(prefill="kvr"), "one of auto, blockwise"),
    (dict(cache_dtype="bfloat16"), "which has no cache"),
    (dict(prefill="blockwise", chunk=8), "chunk"),
  ],
)
def test_ways_that_do_not_fit(options, words):
  model = checkpoint.create(CONFIG, seed=1)
  with pytest.raises(OptionError, match=words):
    perplexity(model, texts(1, 49), length=48, rows=1, **options)


def test_too_few_texts():
  model = checkpoint.create(CONFIG, seed=1)
  with pytest.raises(PromptError, match="1 of more than 48 tokens; wanted 2"):
    perplexity(model, [*texts(1, 49), *texts(3, 48)], length=48, rows=2)


# ---------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------


def run(*argv: str) -> tuple[int, str, str]:
  out, err = io.StringIO(), io.StringIO()
  values, words = common.parse_words("evaluate", evaluate.define, argv)
  status = evaluate.run(values, words, stdout=out, stderr=err)
  return status, out.getvalue(), err.getvalue()


def test_needle_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  plot, kept = tmp_path / "map.png", tmp_path / "map.json"
  status, out, err = run(
    "needle", "--lengths=600,1200", "--depths=0,1", "--trials=1",
    "--mesh=seq:2", f"--plot={plot}", f"--out={kept}", "--prefill=chunked",
    "--chunk=256", "--cache_dtype=bfloat16",
  )  # fmt: skip
  assert status == 0, err
  lines = out.splitlines()
  assert lines[2].split() == ["600", "100", "100"]
  assert lines[3].split() == ["1,200", "100", "100"]
  assert plot.read_bytes()[:4] == b"\x89PNG"
  cells = json.loads(kept.read_text())["cells"]
  assert [c["score"] for c in cells] == [1.0] * 4


@pytest.fixture
def asked(monkeypatch) -> list:
  """Tasks that the script asks for, in place of asking."""
  tasks = []

  def note(model, task, *, lengths, depths, **options):
    tasks.append(task)
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
  # Bytes of Python: far from random, and the first one hardly known.
  assert 0.3 < long["mean"] < 4
  assert long["nll"][0] > long["nll"][-1]
  assert plot.read_bytes()[:4] == b"\x89PNG"


def test_curves_by_script(tmp_path):
  pytest.importorskip("matplotlib")
  log, plot = tmp_path / "log.jsonl", tmp_path / "run.png"
  row = lambda step, loss: json.dumps(
    {"step": step, "stage": step // 4, "loss": loss, "gradient_norm": 1.0,
     "rate": 1e-3, "tokens_per_s": 10.0}
  )  # fmt: skip
  lines = [row(2, 3.0), row(4, 2.5), row(6, 2.0), row(4, 2.4), row(6, 1.9)]
  log.write_text("\n".join(lines) + '\n{"step": 8, "lo')
  status, out, err = run("curves", f"--log={log}", f"--plot={plot}", "--json")
  assert status == 0, err
  found = json.loads(out)["rows"]
  assert [(r["step"], r["loss"]) for r in found] == [(2, 3.0), (4, 2.4),
                                                     (6, 1.9)]  # fmt: skip
  assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
  ("argv", "words"),
  [
    ((), "wanted needle or perplexity or curves"),
    (("needles",), "got needles"),
    (("curves",), "--log"),
    (("curves", "--log=/nowhere"), "/nowhere"),
    (("needle", "--lengths=long"), "--lengths"),
    (("needle", "--lengths="), "--lengths"),
    (("needle", "--lengths=600,0"), "--lengths"),
    (("needle", "--depths=0,nan"), "--depths"),
    (("needle", "--depths="), "--depths"),
    (("needle", "--folder=/nowhere"), "/nowhere"),
    (("needle", "--plot=/nowhere/a.png"), "--plot"),
    (("needle", "--model=/nowhere"), "/nowhere"),
    (("perplexity", "--lengths=10000000", "--rows=1", "--mesh=seq:1"),
     "documents"),
  ],
)  # fmt: skip
def test_wrong_flags(argv, words):
  status, out, err = run(*argv)
  assert (status, out) == (2, "")
  assert words in err and "Traceback" not in err


def test_a_map_has_gaps_where_nothing_was_asked(tmp_path):
  pytest.importorskip("matplotlib")
  cell = lambda n, d: Cell(
    length=n, depth=d, scores=(1.0, 0.0), completions=("a", "b")
  )
  path = tmp_path / "gaps.png"
  draw.heat_map([cell(10, 0.0), cell(20, 0.5)], str(path))
  assert path.read_bytes()[:4] == b"\x89PNG"
  assert cell(10, 0.0).score == 0.5
