"""launch.calibrate: a text in, a calibration that a cache is made with."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import safetensors.numpy

from launch import calibrate, common
from ringjax.models.calibration import FILE

QUICK = ("--rows=2", "--length=32", "--mesh=seq:1")


def run(*argv: str) -> tuple[int, str, str]:
  out, err = io.StringIO(), io.StringIO()
  values, words = common.parse_words("calibrate", calibrate.define, argv)
  status = calibrate.run(values, words, stdout=out, stderr=err)
  return status, out.getvalue(), err.getvalue()


@pytest.mark.long
def test_a_cache_is_made_with_what_was_measured(tmp_path, ask):
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 20)
  out = tmp_path / "found"
  status, said, err = run(f"--text={text}", f"--out={out}", *QUICK, "--json")
  assert status == 0, err
  record = json.loads(said)
  assert record["out"] == str(out / FILE) and record["tokens"] == 64
  assert [path.name for path in out.iterdir()] == [FILE]
  asked = ("--max_new_tokens=4", "--prompt=What is a ring?")
  ran = ask(*asked, f"--cache=nuq4:calibration={out}", "--json")
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  assert done["cache"].startswith("nuq4:calibration=")
  refused = ask(*asked, "--cache=nuq4")
  assert refused.status == 2 and "launch.calibrate" in refused.err


@pytest.mark.long
def test_bits_are_allocated_to_heads(tmp_path, ask):
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 20)
  out = tmp_path / "found"
  status, said, err = run(
    f"--text={text}",
    f"--out={out}",
    "--bits=4.5",
    "--by=layer",
    "--cache=int4:group=32",
    "--cache=hadamard3",
    *QUICK,
  )
  assert status == 0, err
  assert "all int4:group=32" in said and "measured on 64 tokens" in said
  assert [path.name for path in out.iterdir()] == ["kv_bits.json"]
  ran = ask(
    "--max_new_tokens=4",
    "--prompt=What is a ring?",
    f"--cache=allocated:table={out}",
    "--json",
  )
  assert ran.status == 0, ran.err
  assert json.loads(ran.out)["cache"] == f"allocated:table={out}/kv_bits.json"


@pytest.mark.parametrize(
  ("argv", "says"),
  [
    ((), "--out: got no value, without --model"),
    (("--out=OUT", "--text=OUT/none.txt"), "none.txt"),
    (("--out=OUT", "--text=SHORT"), "pass more text, or fewer --rows"),
    (("--out=OUT", "more"), "flags only"),
    (("--out=OUT", "--by=head"), "--by without --bits"),
    (("--out=OUT", "--bits=3", "--first=2"), "--first with --bits"),
    (("--out=OUT", "--bits=1"), "bits: got 1"),
    (("--out=OUT", "--bits=4", "--cache=nuq3:calibration=X"), "in --out"),
  ],
)
def test_what_is_refused(argv, says, tmp_path):
  (tmp_path / "short.txt").write_text("too short")
  fill = {"OUT": str(tmp_path), "SHORT": str(tmp_path / "short.txt")}
  given = []
  for word in argv:
    for name, value in fill.items():
      word = word.replace(name, value)
    given.append(word)
  status, out, err = run(*given, *QUICK)
  assert (status, out) == (2, "") and says in err


@pytest.mark.long
def test_two_processes_measure_as_one(tmp_path, run_together):
  """On a mesh of both, of which the first one writes."""
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 20)
  alone, both = tmp_path / "alone", tmp_path / "both"
  status, _, err = run(
    f"--text={text}", f"--out={alone}", *QUICK, "--mesh=seq:2"
  )
  assert status == 0, err
  argv = ("-m", "launch.calibrate", f"--text={text}", f"--out={both}", *QUICK)
  first, second = run_together(*argv, "--mesh=seq:2", processes=2)
  assert first.status == second.status == 0, first.err + second.err
  assert "measured on 64 tokens" in first.out and second.out == ""
  assert [path.name for path in both.iterdir()] == [FILE]
  want, got = (safetensors.numpy.load_file(at / FILE) for at in (alone, both))
  assert want.keys() == got.keys()
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.long
def test_integers_multiply_by_ranges_that_were_measured(tmp_path, ask):
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 20)
  out = tmp_path / "found"
  status, said, err = run(
    f"--text={text}", f"--out={out}", "--ranges", *QUICK, "--json"
  )
  assert status == 0, err
  record = json.loads(said)
  assert record["out"] == str(out / "activation_ranges.safetensors")
  asked = ("--max_new_tokens=4", "--prompt=What is a ring?", "--json")
  ran = ask(*asked, f"--integer={out}:shadow=4,prune=0.5")
  assert ran.status == 0, ran.err
  plain = ask(*asked)
  assert json.loads(ran.out)["parameters"] > json.loads(plain.out)["parameters"]
  wrong = ask(*asked, f"--integer={out}:shade=4")
  assert wrong.status == 2 and "shadow" in wrong.err
  both = ask(*asked, f"--integer={out}", "--weights=int4")
  assert both.status == 2 and "one of them" in both.err
  coded = ask(*asked, "--weights=int4")
  assert coded.status == 0, coded.err
  status, _, err = run(f"--out={out}", "--ranges", "--bits=3", *QUICK)
  assert status == 2 and "--ranges" in err
