"""launch.calibrate: a text in, a calibration that a cache is made with."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import ringjax as rj
from launch import calibrate
from ringjax.models import tiny
from ringjax.models.weights.calibration import FILE
from ringjax.paths import as_path
from tests import checkpoints, object_servers
from tests.helpers import script

run = functools.partial(script, calibrate)

QUICK = ("--rows=2", "--length=32", "--mesh=seq:1")


@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.parametrize(
  ("argv", "says"),
  [
    ((), "--out: got no value, without --model"),
    (("--out=OUT", "--text=OUT/none.txt"), "none.txt"),
    (("--out=OUT", "--text=SHORT"), "pass more text"),
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
def test_a_short_text_is_measured_as_far_as_it_goes(tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 8)
  want = ("--ranges", "--length=32", "--mesh=seq:1", "--json")
  status, said, err = run(f"--text={text}", f"--out={tmp_path}", *want)
  assert status == 0, err
  tokens = json.loads(said)["tokens"]
  assert 0 < tokens < 16 * 32 and tokens % 32 == 0
  assert f"{tokens // 32} of 16 rows of 32" in err
  # Shorter than a row: one row of all tokens.
  want = ("--ranges", "--length=4096", "--mesh=seq:1", "--json")
  status, said, err = run(f"--text={text}", f"--out={tmp_path}", *want)
  assert status == 0, err
  whole = json.loads(said)["tokens"]
  assert tokens <= whole < tokens + 32
  assert f"1 of 16 rows of {whole}" in err


@pytest.mark.slow
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
  first, second = run_together(
    *argv, "--mesh=seq:2", processes=2, first=("--json",)
  )
  assert first.status == second.status == 0, first.err + second.err
  assert json.loads(first.out)["tokens"] == 64 and second.out == ""
  assert [path.name for path in both.iterdir()] == [FILE]
  want, got = (safetensors.numpy.load_file(at / FILE) for at in (alone, both))
  assert want.keys() == got.keys()
  for name, x in want.items():
    np.testing.assert_allclose(got[name], x, rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.slow
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
  # The same, read by two devices.
  two = ask(
    *asked, f"--integer={out}:shadow=4,prune=0.5,devices=2", "--chunk=4"
  )
  assert two.status == 0, two.err
  done = json.loads(two.out)
  assert done["tokens"] == json.loads(ran.out)["tokens"]
  assert (done["devices"], done["prefill"]) == (2, "two devices")
  assert done["chunk"] == 4 and 0 <= done["two_devices"]["waiting"] < 1
  assert set(done["two_devices"]["simulated_s"]) == {"fifo", "waits", "serial"}
  assert min(done["two_devices"]["step_s"].values()) > 0
  wrong = ask(*asked, f"--integer={out}:shade=4")
  assert wrong.status == 2 and "shadow" in wrong.err
  both = ask(*asked, f"--integer={out}", "--weights=int4")
  assert both.status == 2 and "one of them" in both.err
  coded = ask(*asked, "--weights=int4")
  assert coded.status == 0, coded.err
  status, _, err = run(f"--out={out}", "--ranges", "--bits=3", *QUICK)
  assert status == 2 and "--ranges" in err


@pytest.mark.long
def test_neurons_are_written_and_predicted(tmp_path, ask):
  """What is calibrated answers, and without predictors exactly."""
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 40)
  folder, out = tmp_path / "model", tmp_path / "found"
  config = checkpoints.config("llama3") | {
    "hidden_act": "relu",
    "vocab_size": 262,
  }
  rj.models.save(rj.models.create(config, seed=1), folder)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(tiny.path() / name, folder)
  model = f"--model={folder}"
  quick = (f"--text={text}", f"--out={out}", "--rows=8", "--length=32")
  status, said, err = run(model, "--neurons", *quick, "--mesh=seq:1", "--json")
  assert status == 0, err
  record = json.loads(said)
  assert record["tokens"] == 256 and set(record["measured"]) == {"0", "1"}
  assert {x.name for x in out.iterdir()} == {
    "neurons.bin",
    "neuron_predictors.safetensors",
  }
  asked = (model, "--prompt=a few", "--max_new_tokens=5", "--mesh=seq:1")
  plain = json.loads(ask(*asked, "--json").out)
  done = json.loads(ask(*asked, f"--flash={out}:window=2", "--json").out)
  assert done["answer"] == plain["answer"] and plain["neurons"] is None
  assert done["neurons"]["calls"] and done["neurons"]["bytes_read"]
  lossy = ask(*asked, f"--flash={out}:predictors=true,memory=1MB")
  assert lossy.status == 0 and "predictors may miss" in lossy.err
  clash = ask(*asked, f"--flash={out}", "--weights=int8")
  assert clash.status == 2 and "--flash" in clash.err
  status, _, err = run("--rank=3", *quick)
  assert status == 2 and "without --neurons" in err


@pytest.mark.slow
def test_what_is_measured_is_read_from_an_address(tmp_path, ask):
  text = tmp_path / "text.txt"
  text.write_text("a few words, again and again. " * 20)
  prompt_flags = ("--max_new_tokens=4", "--prompt=What is a ring?", "--json")
  with object_servers.served("memory") as bucket:
    place, folder = f"{bucket}/measured", tmp_path / "measured"
    tokens = {}
    for out in (place, folder):
      for flag in ([], ["--ranges"]):
        status, _, err = run(f"--text={text}", f"--out={out}", *QUICK, *flag)
        assert status == 0, err
      for flag in (
        f"--cache=nuq4:calibration={out}",
        f"--integer={out}:shadow=4",
      ):
        ran = ask(*prompt_flags, flag)
        assert ran.status == 0, ran.err
        tokens.setdefault(out, []).append(json.loads(ran.out)["tokens"])
    assert tokens[place] == tokens[folder]
    assert len(list(as_path(place).iterdir())) == 2
    status, _, err = run(f"--out={place}/other", "--bits=4.5", *QUICK)
    assert status == 2 and "--bits; wanted a folder" in err
    ran = ask(*prompt_flags, f"--integer={place}/nothing:shadow=4")
    assert ran.status == 2 and "without activation_ranges" in ran.err
