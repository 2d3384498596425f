"""What ways to combine contexts cost, by functions and by the command."""

from __future__ import annotations

import functools
import io
import json

import numpy as np
import pytest
from absl import flags

import ringjax as rj
from launch import evaluate
from ringjax.data import Bytes
from ringjax.data.tasks.needle import TASKS
from ringjax.errors import OptionError, ShapeError
from ringjax.eval import ContextTrial, context_answers, context_ways
from ringjax.infer import contexts
from tests import checkpoints
from tests.helpers import refused

PREFIX, LENGTH, QUESTION = (5, 9), 24, 6


@functools.cache
def model():
  config = checkpoints.config("llama3") | {"initializer_range": 0.2}
  return rj.models.create(config, seed=1)


def trial(rows=3, **options):
  draw = np.random.default_rng(0)
  texts = draw.integers(1, 64, (rows, LENGTH + QUESTION))
  return ContextTrial(model(), texts, QUESTION, **options)


@pytest.mark.slow
def test_one_part_costs_what_the_whole_text_costs():
  ways, asked = context_ways(PREFIX), trial()
  costs = {
    name: asked.cost(name, ways[name], 1)
    for name in ("full", "parallel", "moved", "none")
  }
  whole = costs["full"]
  for name in ("parallel", "moved"):
    assert costs[name].nll == pytest.approx(whole.nll, abs=1e-4), name
  assert costs["none"].nll != pytest.approx(whole.nll, abs=1e-3)
  assert whole.computed == len(PREFIX) + LENGTH + QUESTION
  assert costs["parallel"].computed == QUESTION
  # What was read for one way is there for the next.
  assert {x.encoded for x in asked.libraries.counters()} == {3}


@pytest.mark.slow
@pytest.mark.long
def test_parts_cost_more_or_less_by_the_way():
  ways, asked = context_ways(PREFIX), trial()
  cost = functools.partial(asked.cost, count=4)
  plain = cost("parallel", ways["parallel"])
  assert plain.nbytes > 0
  recomputed = cost("recompute", ways["recompute"])
  assert recomputed.computed == QUESTION + np.ceil(0.15 * LENGTH)
  for name in ("separate", "ape", "select", "moved", "kvlink"):
    assert cost(name, ways[name]).nll != plain.nll, name
  coded = trial(cache_kind="int4")
  # Those that move keys store them before their rotation.
  for name in ("parallel", "moved"):
    assert coded.cost(name, ways[name], 4).nbytes < 0.4 * plain.nbytes


@pytest.mark.slow
def test_a_search_finds_no_worse_than_it_begins_with():
  asked, tried = trial(2), {}
  begin = contexts.APE(prefix=PREFIX)
  best = asked.tuned(
    4,
    begin,
    on_try=lambda c, nll: tried.update({(c.temperature, c.scale): nll}),
  )
  assert tried[best.temperature, best.scale] == min(tried.values())
  assert tried[best.temperature, best.scale] <= tried[1.0, 1.0]
  way = context_ways(PREFIX)["ape"]
  cost = asked.cost("ape", type(way)(combine=best), 4)
  assert cost.nll == pytest.approx(min(tried.values()), abs=1e-5)


@pytest.mark.slow
def test_answers_are_asked_behind_contexts():
  config = checkpoints.config("llama3") | {"vocab_size": 262}
  one = rj.models.create(config, seed=1)
  task = TASKS["passkey"](tokenizer=Bytes())
  ways = context_ways((256,), kinds=("full", "moved"))
  done = []
  found = context_answers(
    one, task, ways, [1, 3], length=260, trials=1, on_trial=done.append,
    cache_kind="int4",
  )  # fmt: skip
  assert set(found) == {(w, n) for w in ways for n in (1, 3)}
  assert done == [1, 2, 3, 4]
  assert all(0 <= score <= 1 for score in found.values())


def test_bad_input(unchecked):
  refused(OptionError, lambda: context_ways(PREFIX, kinds=["best"]), "best")
  refused(ShapeError, lambda: ContextTrial(model(), [[1, 2]], 5), "texts")
  way = context_ways(PREFIX)["parallel"]
  refused(OptionError, lambda: trial().cost("a", way, 99), "99")


def command(*args):
  values = flags.FlagValues()
  evaluate.define(values)
  (_, *words) = values(["evaluate", *args])
  out, err = io.StringIO(), io.StringIO()
  code = evaluate.run(values, words, stdout=out, stderr=err)
  return code, out.getvalue(), err.getvalue()


@pytest.mark.long
def test_the_command(tmp_path):
  folder, out, plot = (tmp_path / n for n in ("model", "out.json", "out.png"))
  config = checkpoints.config("llama3") | {"vocab_size": 262}
  rj.models.save(rj.models.create(config, seed=1), folder)
  Bytes().save(folder)
  texts = tmp_path / "texts"
  texts.mkdir()
  (texts / "a.txt").write_text("What is read in parts. " * 40)
  code, said, err = command(
    "contexts", f"--model={folder}", f"--folder={texts}", "--lengths=40",
    "--question=8", "--rows=2", "--contexts=1,2", "--ways=full,parallel",
    "--mesh=data:1", f"--out={out}", f"--plot={plot}",
  )  # fmt: skip
  assert code == 0, err
  found = json.loads(out.read_text())
  assert found["complete"] and len(found["costs"]) == 4
  assert plot.stat().st_size > 1000
  first = {cost["way"]: cost["nll"] for cost in found["costs"][:2]}
  assert first["full"] == pytest.approx(first["parallel"], abs=1e-4)
  assert "tokens computed" in said


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (["--ways=best"], "best"),
    (["--contexts=0"], "--contexts"),
    (["--lengths=8,9"], "--lengths"),
    (["--cache=int4", "--cache=int8"], "--cache"),
    (["--depths=0.5"], "--depths"),
  ],
)
def test_wrong_flags_are_one_line(args, says):
  code, said, err = command("contexts", *args)
  assert code and not said
  assert says in err and "Traceback" not in err


def test_all_ways_are_a_way_to_say_so(tmp_path):
  """What is refused is the folder, which is looked at behind the ways."""
  code, _, err = command(
    "contexts", "--ways=all", f"--folder={tmp_path / 'none'}", "--lengths=40"
  )
  assert code and "without a file" in err
