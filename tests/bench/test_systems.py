"""The page of systems, and the commands that make it."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from benchmarks import (
  blockwise_memory,
  pages,
  real,
  systems,
  systems_alone,
  table,
)
from ringjax.models import small


def test_the_page_is_that_of_the_stored_results():
  results = real.Results(real.RESULTS).read()
  page = real.RESULTS.with_suffix(".md").read_text("utf-8")
  assert page == pages.page(results)


def test_rows_have_names_and_show_something_or_say_why_not():
  names = [row.name for row in systems.ROWS]
  assert len(set(names)) == len(names)
  for row in systems.ROWS:
    assert re.fullmatch(r"\d{4}\.\d{5}|[A-Z]\S* \d{4}", row.paper), row.name
    assert bool(row.runs) != bool(row.unless), row.name
    assert row.runs or not row.more, row.name
    for run in (*row.runs, *row.more):
      for command in (*(step.command for step in run.before), run.command):
        script = command.split()[2].replace(".", "/")
        assert (real.ROOT / f"{script}.py").is_file(), command


def test_results_of_commands_are_kept_one_by_one(tmp_path):
  results = real.Results(tmp_path / "results.json")
  assert results.read() == {}
  run = table.Run(
    """python -c 'print("said before"); print("{\\"x\\": [3, 4]}")'""",
    lambda found: {"last": found["x"][-1]},
  )
  result = real.measured(run)
  assert result["figures"] == {"last": 4}
  assert result["peak_bytes"] > 1e6 and result["seconds"] >= 0
  results.add(run.command, result)
  results.add("another", {"figures": {}})
  assert results.read()[run.command] == json.loads(json.dumps(result))
  assert [x.name for x in pathlib.Path(tmp_path).iterdir()] == ["results.json"]


@pytest.mark.parametrize(
  ("command", "words"),
  [
    ("python -c 'raise SystemExit(3)'", "exit status 3"),
    ("python -c 'print(1)'", "in what it printed"),
    ("python -c 'print([)'", "exit status 1"),
  ],
)
def test_a_command_that_fails_says_so(command, words):
  run = table.Run(command, lambda found: {"x": found["x"]})
  with pytest.raises(real.CommandError, match=words):
    real.measured(run)


def test_what_a_command_reads_is_made_once(tmp_path):
  made, maker = tmp_path / "made", tmp_path / "maker.py"
  maker.write_text(f"open({str(made)!r}, 'a').write('x')")
  teller = tmp_path / "teller.py"
  teller.write_text(f"print(len(open({str(made)!r}).read()))")
  step = table.Step(f"python {maker}", str(made))
  run = table.Run(f"python {teller}", lambda length: {"x": length}, (step,))
  for _ in range(2):
    assert real.measured(run)["figures"] == {"x": 1}
  nothing = table.Step(f"python {teller}", str(tmp_path / "other"))
  with pytest.raises(real.CommandError, match="made no"):
    real.prepare(nothing)


def test_a_command_may_write_its_object_into_a_file(tmp_path):
  script, written = tmp_path / "script.py", tmp_path / "written.json"
  script.write_text(
    f"open({str(written)!r}, 'w').write('{{\"x\": 5}}'); print('a table')"
  )
  run = table.Run(
    f"python {script}", lambda printed: printed["x"], file=str(written)
  )
  assert real.measured(run)["figures"] == 5


def _said(name, *printed):
  """What a row says of what its commands printed."""
  (row,) = (row for row in systems.ROWS if row.name == name)
  runs = (row.runs + row.more)[: len(printed)]
  figures = [run.pick(x) for run, x in zip(runs, printed, strict=True)]
  return row.says(*figures, *[None] * (len(row.runs + row.more) - len(runs)))


def test_bits_of_kvquant():
  kind = lambda name, bits, loss: {"name": name, "bits": bits, "loss": loss}
  kinds = [
    kind("dense", 32, 0.0), kind("int4", 4.5, 0.14), kind("int2", 3, 2.6),
    kind("nuq4:calibration=runs/x", 4.6, 0.001),
    kind("nuq3:calibration=runs/x", 3.6, 0.01),
    kind("nuq2:calibration=runs/x", 2.6, 0.2),
  ]  # fmt: skip
  said = _said("kvquant", {"kinds": kinds})
  assert "nuq3 +0.010" in said and "int2 +2.600" in said and "3.60" in said


def test_losses_of_a_stream():
  kind = lambda name, loss, tokens: {
    "name": name, "bits": 32, "loss": loss, "nbytes": tokens,
  }  # fmt: skip
  kinds = {"kinds": [kind("dense", 0.0, 10), kind("sinks:budget=.2", 0.2, 4)]}
  losses = {
    "sinks:budget=512,positions=cache": [2.25, 1.5],
    "sinks:budget=512": [2.5, 3.5],
    "dense": [2.0],
  }
  share = lambda tokens, x: {"tokens": tokens, "share": x}
  shares = {"rows": [share(8192, 0.25), share(32768, 0.2)]}
  said = _said("sinks", kinds, shares, {"tokens": 2048, "losses": losses})
  assert "+0.200 nat" in said and "a stream of 2,048 tokens" in said
  assert "in the cache 2.25 1.50; positions in the text 2.50 3.50" in said


def test_drafters_and_their_tokens():
  figures = lambda x: {"median": x, "best": x}
  names = {
    "plain": {"x_plain": figures(1), "equal": True},
    "lookup": {
      "x_plain": figures(1.4), "tokens_per_call": figures(2.5), "equal": True,
    },
  }  # fmt: skip
  said = _said("speculation", {"summary": names})
  assert "lookup 2.50 tokens a call, 1.40 times" in said
  assert said.endswith("all tokens as without drafts")
  names["lookup"]["equal"] = False
  assert _said("speculation", {"summary": names}).startswith("lookup")
  own = names["lookup"] | {"x_plain": figures(0.5)}
  said = _said("speculation", {"summary": {"self": own}})
  assert "`self` is slower" in said
  assert _said("speculation", {"summary": names}).endswith(
    "NOT the same tokens"
  )


def test_tokens_a_call_of_a_draft_by_length():
  printed = lambda size, tokens, drafts: {
    "prompt_tokens": size,
    "tokens": tokens,
    "decode_s": 1.0,
    "speculation": drafts,
  }
  drafts = {"tokens_per_call": 1.5, "accepted": 8, "drafted": 40}
  many = printed(7680, [5, 6], drafts | {"tokens_per_call": 1.75})
  said = _said(
    "longspec",
    printed(512, [3, 4], None), printed(512, [3, 4], drafts), many,
  )  # fmt: skip
  assert said.startswith("after 512 tokens 1.50 tokens a call, 8 of 40")
  assert "after 7,680 tokens 1.75" in said
  assert said.endswith("the same 2 tokens as without drafts after 512")
  said = _said(
    "longspec",
    printed(512, [3, 4], None), printed(512, [3, 4], drafts), many,
    printed(7680, [5, 7], None),
  )  # fmt: skip
  assert said.endswith("; NOT the same 2 tokens as without drafts after 7,680")
  said = _said(
    "longspec",
    printed(512, [3, 4], None), printed(512, [3, 5], drafts), many,
  )  # fmt: skip
  assert "NOT the same 2" in said


def test_answers_with_links_and_without():
  scores = {
    "base": {"right": 0.0, "loss": 7.25},
    "links": {"right": 0.5, "loss": 0.4},
  }
  said = _said("kvlink", {"scores": scores})
  assert said.startswith("base 7.250 nat a token, 0.0% right; links 0.400")


def test_losses_of_integer_products():
  ways = {
    "floats": {"loss": 2.0, "distance": 0.0},
    "no shadow": {"loss": 3.5, "distance": 0.4},
    "shadow": {"loss": 2.01, "distance": 0.02},
  }
  said = _said("npu", {"ways": ways})
  assert said.startswith("no shadow: loss +1.5000 nat, logits 40.0% away")
  assert "shadow: loss +0.0100" in said
  simulated = {"waits": 3.0, "fifo": 2.5, "serial": 6.0}
  two = {
    "prompt_tokens": 611,
    "prefill_s": 8.0,
    "two_devices": {"waiting": 0.25, "step_s": {}, "simulated_s": simulated},
  }
  said = _said("npu", {"ways": ways}, two)
  assert "the first waits 25%" in said and "order of arrival 2.5" in said


def test_memory_of_blockwise_layers():
  way = lambda size: {
    "dense": 50 * size, "attention": 1.5 * size, "blockwise": size
  }  # fmt: skip
  said = _said("blockwise", {"bytes": {"4096": way(1e9), "32768": way(3e9)}})
  assert "4,096 tokens 1.00 GB, 1.50 with blockwise attention" in said
  assert "32,768 tokens 3.00 GB" in said and "150.00 with dense" in said


@pytest.mark.slow
def test_a_blockwise_layer_needs_less_memory_than_a_dense_one():
  config = json.loads((pathlib.Path(small.path()) / "config.json").read_text())
  config |= {"num_hidden_layers": 1}
  dense, attention, blockwise = (
    blockwise_memory.program_bytes(config, way, 2048, block=128)
    for way in ("dense", "attention", "blockwise")
  )
  assert blockwise < attention < dense / 4


def test_memory_of_a_window_of_layers():
  printed = lambda held, tokens: {
    "tokens": tokens, "token_s": 0.5,
    "ranks": [{"peak_bytes": held, "weight_bytes": 9e6} for _ in range(3)],
  }  # fmt: skip
  said = _said("window", printed(2e6, [1, 2]), printed(9e6, [1, 2]))
  assert "2, 2, 2 MB of weights of 9, 9, 9" in said and "; the same 2" in said
  said = _said("window", printed(2e6, [1, 3]), printed(9e6, [1, 2]))
  assert "NOT the same" in said


def test_tokens_a_second_by_placement():
  placement = lambda device, read, equal: {
    "weights": {"device": device, "host": 0, "disk": 0},
    "rows": {
      "1": {"tokens_per_s": 2.0, "read_per_step": read, "equal": equal},
      "16": {"tokens_per_s": 20.0, "read_per_step": read, "equal": equal},
    },
  }
  of = lambda equal: {
    "placements": {
      "device": placement(5e8, 0, True), "disk": placement(0, 2e8, equal),
    }
  }  # fmt: skip
  said = _said("offload", of(True))
  assert "device: 500 MB" in said and "disk: 0 MB" in said
  assert "2.0 tokens/s of 1 row, 20.0 of 16, 200 MB read a step" in said
  assert said.endswith("all tokens equal")
  assert _said("offload", of(False)).endswith("NOT the same tokens")


def test_loss_and_memory_of_a_ring():
  curve = lambda nll: {"curves": [{"length": 4096, "mean": nll}]}
  memory = {"bytes": {"4096": {"1": 3e8}, "32768": {"1": 2e9, "8": 2.5e8}}}
  said = _said("ring", curve(1.5), curve(1.5), memory)
  assert "1.50000 nat on four devices, 1.50000 on one" in said
  assert "250 MB on each of eight" in said and "2,000 MB on one" in said
  # Without --cache the command names none.
  asked = lambda *scores: {"cells": [{"cache": "", "scores": scores}]}
  said = _said(
    "ring", curve(1.5), curve(1.5), memory, curve(1.4), curve(1.3),
    asked(0.0), asked(1.0),
  )  # fmt: skip
  assert "1.30000 nat on four devices, 1.40000 on one" in said
  assert "16,000 tokens: found on four devices 1 of 1 and on one 0 of 1" in said


def test_needles_of_kinds_are_counted():
  cell = lambda cache, *scores: {"cache": cache, "scores": scores}
  printed = {
    "cells": [
      cell("dense", 1.0), cell("dense", 1.0), cell("h2o:budget=.2", 0.0, 1.0),
      cell("nuq3:calibration=runs/x", 1.0),
    ]
  }  # fmt: skip
  figures = systems_alone.needles_found(printed)
  assert figures["nuq3"] == {"found": 1.0, "asked": 1}
  said = systems_alone.says_found(
    figures, "in 4,096 tokens", "dense", "h2o:budget=.2", "h2o:budget=.4"
  )
  assert said == (
    "; needles found in 4,096 tokens: dense 2 of 2, h2o:budget=.2 1 of 2"
  )
  assert systems_alone.says_found(None, "in 8,192", "dense") == ""
