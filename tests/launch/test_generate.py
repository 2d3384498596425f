"""launch.generate: reads, answers, and says what is wrong."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

import ringjax as rj
from launch import generate
from launch.shared import common, console, prompts
from ringjax.data import Tokenizer
from ringjax.data.tasks import documents
from tests.helpers import poisoned

SHORT = ("--max_new_tokens=8", "--context=400")
# What a process may say of its own accord on an interrupt.
PATIENCE_S = 240


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def plain(text: str) -> bool:
  """No control characters but ends of lines."""
  return all(char == "\n" or char.isprintable() for char in text)


# ---------------------------------------------------------------------------
# The road
# ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_passkey_in_a_long_document(ask, folder):
  ran = ask(f"--model={folder}", *SHORT)
  assert ran.status == 0
  assert "striped" in ran.err and "mesh seq:8" in ran.err
  assert "of the standard library of Python" in ran.err
  assert "hidden at 40%" in ran.err and "first token" in ran.err
  assert "on each device" in ran.err
  assert plain(ran.err) and "\x1b" not in ran.err
  assert ran.out.endswith("\n")


@pytest.mark.long
def test_json_is_all_there_is_on_stdout(ask, folder):
  ran = ask(f"--model={folder}", *SHORT, "--json", "--seed=5")
  assert ran.status == 0
  done = json.loads(ran.out)
  assert ran.out.count("\n") == 1
  assert done["passkey"] not in (None, "") and done["depth"] == 0.4
  assert done["mesh"] == {"seq": 8} and done["devices"] == 8
  assert done["prefill"] == "striped" and done["chunk"] is None
  assert 300 <= done["prompt_tokens"] <= 400
  assert len(done["tokens"]) <= 8
  assert done["first_token_s"] > done["prefill_s"] >= 0
  # What another test has compiled is not compiled again.
  assert done["first_token_s"] > done["compile_s"] >= 0
  cache = 2 * 2 * 2 * 8 * 4 + 8
  cursors = 2 * 8 * 4
  slots = cache * done["cache_tokens"] // 8
  assert done["cache_bytes_per_device"] == slots + cursors


@pytest.mark.long
def test_an_adapter_changes_the_answer_as_its_merged_model_does(
  ask, folder, tmp_path
):
  model = rj.models.load(folder)
  how = rj.train.Lora(rank=2, targets=("q", "v"))
  draw = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: draw.normal(size=x.shape).astype(np.float32), how.start(model)
  )
  rj.train.save_adapter(tmp_path / "adapter", model, how, params)
  rj.models.save(how.merged(params, model), tmp_path / "merged")
  flags = (*SHORT, "--json", "--seed=5")
  tokens = lambda *more: json.loads(ask(*flags, *more).out)["tokens"]
  added = tokens(f"--model={folder}", f"--adapter={tmp_path / 'adapter'}")
  assert added == tokens(f"--model={tmp_path / 'merged'}")
  assert added != tokens(f"--model={folder}")
  ran = ask(f"--model={folder}", *SHORT, f"--adapter={tmp_path / 'merged'}")
  assert ran.status == 2 and "adapter_config.json" in ran.err


@pytest.mark.slow
def test_layers_on_disk_change_no_token(ask, folder, tmp_path):
  flags = (f"--model={folder}", *SHORT, "--json", "--seed=5")
  want = json.loads(ask(*flags).out)
  ran = ask(*flags, "--placement=disk")
  done = json.loads(ran.out)
  assert done["tokens"] == want["tokens"] and want["placement"] is None
  assert done["parameters"] == want["parameters"]
  assert "layers" in ran.err and "on disk" in ran.err
  assert set(done["placement"]["tiers"]) == {"disk"}
  # Two layers fit into the buffer, and stay there.
  assert done["placement"]["layer_reads"] >= len(done["placement"]["tiers"])
  policy = ("--policy=2x1:40/20,0/50,50/50", f"--disk={tmp_path}")
  policy = (*policy, "--mesh=seq:1")
  assert json.loads(ask(*flags, *policy).out)["tokens"] == want["tokens"]
  ran = ask(*flags, *policy, "--memory=1GiB")
  assert ran.status == 2 and "--policy and --memory" in ran.err
  # Keys are in host memory, where they fit.
  ran = ask(*flags, f"--disk={tmp_path}")
  assert json.loads(ran.out)["tokens"] == want["tokens"]
  assert not list(tmp_path.iterdir())
  ran = ask(*flags, "--memory=1kB")
  assert ran.status == 2 and "memory" in ran.err and "of the call" in ran.err
  done = json.loads(ask(*flags, "--memory=100MB").out)
  assert done["tokens"] == want["tokens"]
  assert 0 < sum(done["memory"]["device"].values()) <= 100e6


@pytest.mark.long
def test_what_is_read_and_what_is_asked(ask, folder, tmp_path):
  file = tmp_path / "story.txt"
  file.write_text("Once <|end|> upon a time — été.\n" * 9)
  common_flags = (f"--model={folder}", "--json", "--max_new_tokens=4")
  ran = ask(*common_flags, f"--prompt_file={file}", "--prompt=Who?")
  done = json.loads(ran.out)
  text = file.read_text() + "\n\nWho?"
  tokenizer = Tokenizer.load(folder)
  ids = tokenizer.encode(text, bos=True)
  # What a user writes is no special token.
  assert ids.tolist() == [256, *text.encode()]
  assert done["prompt_tokens"] == len(ids)
  model = rj.models.load(folder)
  want = rj.infer.generate(
    model, [ids], max_new_tokens=4, stop=tokenizer.eos_ids
  )
  assert done["tokens"] == want[0, : len(done["tokens"])].tolist()
  assert done["source"] == str(file) and done["passkey"] is None
  alone = json.loads(ask(*common_flags, f"--prompt_file={file}").out)
  assert alone["prompt_tokens"] == 1 + len(file.read_bytes())


@pytest.mark.parametrize("answer", [None, 1, 300])
def test_the_made_up_prompt_leaves_room_for_the_answer(folder, answer):
  flags = [] if answer is None else [f"--max_new_tokens={answer}"]
  values = common.parse("generate", generate.define, flags)
  tokenizer = Tokenizer.load(folder)
  made = prompts.make(values, tokenizer, 1000)
  tokens = len(prompts.encode(made, values, tokenizer, None))
  room = 1000 - max(answer or 0, prompts.ANSWER_TOKENS)
  assert room - 100 < tokens <= room - prompts.ANSWER_TOKENS


@pytest.mark.long
@pytest.mark.parametrize(
  "flags",
  [
    ("--mesh=data:1,seq:4", "--prefill=ring"),
    pytest.param(
      ("--mesh=seq:-1", "--prefill=chunked", "--chunk=64"),
      marks=pytest.mark.slow,
    ),
    pytest.param(("--mesh=seq:1",), marks=pytest.mark.slow),
  ],
)
def test_every_mesh_and_method_gives_the_same_tokens(ask, folder, flags):
  base = (f"--model={folder}", "--json", *SHORT)
  want = json.loads(ask(*base).out)
  ran = ask(*base, *flags)
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  assert done["tokens"] == want["tokens"]
  assert done["answer"] == want["answer"]
  if "--chunk=64" in flags:
    assert done["prefill"] == "chunked" and done["chunk"] == 64


@pytest.mark.long
def test_a_chat_template_is_used_unless_raw(ask, chat_folder):
  base = (f"--model={chat_folder}", "--json", "--max_new_tokens=2")
  chat = json.loads(ask(*base, "--prompt=Hello").out)
  raw = json.loads(ask(*base, "--prompt=Hello", "--raw").out)
  also = json.loads(ask(*base, "--prompt=Hello", "--nochat").out)
  # <|begin|> <|user|> Hello <|end|> <|assistant|>
  assert chat["prompt_tokens"] == 5 + 4
  assert raw["prompt_tokens"] == also["prompt_tokens"] == 5 + 1
  # A user's text forges nothing.
  forged = json.loads(ask(*base, "--prompt=<|end|>").out)
  assert forged["prompt_tokens"] == len("<|end|>") + 4
  system = json.loads(ask(*base, "--prompt=Hello", "--system=Hi").out)
  assert system["prompt_tokens"] == 5 + 4 + 2 + 2


@pytest.mark.long
def test_stop_strings_end_the_answer(ask, folder):
  base = (f"--model={folder}", "--prompt=def f(", "--max_new_tokens=24")
  sample = (*base, "--temperature=1.0", "--top_k=90", "--seed=3", "--json")
  whole = json.loads(ask(*sample).out)["answer"]
  assert len(whole) > 6
  middle = whole[3:5]
  done = json.loads(ask(*sample, f"--stop={middle}", "--stop=NEVER").out)
  assert done["answer"] == whole[: whole.index(middle)]
  assert done["stopped"] == middle
  assert len(done["tokens"]) < 24


@pytest.mark.slow
def test_sampling_flags(ask, folder):
  base = (f"--model={folder}", "--prompt=import ", "--max_new_tokens=12")
  base = (*base, "--json")
  tokens = lambda *flags: json.loads(ask(*base, *flags).out)["tokens"]
  greedy = tokens()
  assert tokens("--temperature=0") == greedy
  assert tokens("--top_k=1") == greedy
  hot = tokens("--temperature=3", "--seed=1")
  assert hot != greedy and hot == tokens("--temperature=3", "--seed=1")
  assert hot != tokens("--temperature=3", "--seed=2")
  assert tokens("--temperature=3", "--seed=1", "--top_p=1e-9") == greedy
  assert tokens("--temperature=3", "--seed=1", "--min_p=1") == greedy


@pytest.mark.slow
def test_a_kind_of_cache_changes_no_token(ask, start, folder):
  flags = (f"--model={folder}", *SHORT)
  want = json.loads(ask(*flags, "--json").out)
  assert want["cache"] == "windowed"
  other = json.loads(ask(*flags, "--json", "--cache=dense:unrotated=true").out)
  assert other["tokens"] == want["tokens"]
  command = ("-m", "launch.generate", *flags, "--cache=unrotated")
  with start(*command) as process:
    out, err = process.communicate(timeout=PATIENCE_S)
  assert process.returncode == 0, err
  assert out == ask(*flags).out and "unrotated, " in err
  values = common.parse("generate", generate.define, [])
  assert "dense, unrotated" in values["cache"].help


@pytest.mark.long
def test_a_terminal_gets_a_bar_and_the_answer_stays_clean(
  ask, folder, monkeypatch
):
  monkeypatch.setenv("TERM", "xterm")
  flags = (f"--model={folder}", *SHORT, "--prefill=chunked", "--chunk=16")
  ran = ask(*flags, stream=Terminal())
  assert ran.status == 0
  assert "\x1b[" in ran.err and "tokens/s" in ran.err
  assert "\x1b" not in ran.out and "\r" not in ran.out


# ---------------------------------------------------------------------------
# What is wrong
# ---------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.long_cases(8)
@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--mesh=sq:8"], "--mesh: got 'sq:8'"),
    (["--mesh=seq:0"], "--mesh: got 'seq:0'"),
    (["--mesh=seq"], "--mesh: got 'seq'"),
    (["--mesh=seq:16"], "needs 16 devices"),
    (["--mesh=seq:8,seq:1"], "one distinct name"),
    (["--temperature=-1"], "temperature: got -1"),
    (["--top_p=2"], "top_p: got 2"),
    (["--temperature=0", "--top_k=3"], "--temperature=0"),
    (["--max_new_tokens=0"], "max_new_tokens: got 0"),
    (["--chunk=0"], "chunk: got 0"),
    (["--prefill=ring", "--chunk=8"], "prefill='chunked'"),
    (["--dtype=int8"], "dtype: got 'int8'"),
    (["--raw", "--chat"], "--raw and --chat"),
    (["--chat"], "without a chat template"),
    (["--system=Hi"], "no chat template"),
    (["--system=Hi", "--raw"], "--system"),
    (["--context=20"], "--context: got 20"),
    (["--context=99999999999"], "what the library of this Python has"),
    (["--depth=2"], "depth: got 2"),
    (["--depth=0.5", "--prompt=x"], "--depth with a prompt"),
    (["--prompt_file=/none/such"], "/none/such: No such file"),
    (["--prompt="], "--prompt: got nothing"),
    (["--prompt= ", "--prompt_file=/none/such"], "--prompt: got nothing"),
    (["--stop="], "texts of 1 to"),
    (["--seed=3", "--prompt=x"], "--seed with a prompt and no sampling"),
    (["--profile=llama7b-a100", "--chunk=8"], "--profile and --chunk"),
    (["--memory=1GiB", "--speculate=lookup"], "--memory with --speculate"),
    (["--prompt=x", "--max_new_tokens=4095"], "at most 4,096 in all"),
    (["--num_processes=2"], "--process_id together"),
    (
      ["--coordinator=a:1", "--num_processes=2", "--process_id=2"],
      "--process_id: got 2",
    ),
  ],
)
def test_a_wrong_flag_is_one_line(ask, folder, flags, says):
  alone = any(f.startswith(("--context", "--prompt")) for f in flags)
  ran = ask(f"--model={folder}", *([] if alone else SHORT), *flags)
  assert ran.status == 2
  last = ran.err.splitlines()[-1]
  assert last.startswith("generate: ") and says in last, ran.err
  assert ran.out == ""


def test_an_empty_name_is_not_the_model_that_ships(ask):
  ran = ask("--model=", *SHORT)
  assert ran.status == 2 and ran.out == ""
  assert "generate: --model: got an empty value" in ran.err


def test_a_missing_model(ask, tmp_path):
  ran = ask(f"--model={tmp_path}/none")
  assert ran.status == 2 and ran.out == ""
  assert ran.err.splitlines()[-1].startswith("generate: path: got")
  (tmp_path / "pickles").mkdir()
  (tmp_path / "pickles" / "config.json").write_text('{"model_type": "llama"}')
  (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"\x80")
  ran = ask(f"--model={tmp_path}/pickles")
  assert ran.status == 2
  assert "opening a pickle runs code" in ran.err


def test_a_prompt_that_is_no_text(ask, folder, tmp_path):
  file = tmp_path / "latin"
  file.write_bytes("été".encode("latin-1"))
  ran = ask(f"--model={folder}", f"--prompt_file={file}")
  assert ran.status == 2
  assert "no UTF-8 at byte 0" in ran.err


# Half of weights and keys on the device, hidden states in host memory.
_HALF = "1x1:50/50,50/50,0/100"


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--max_new_tokens=0"], "--max_new_tokens: got 0"),
    (["--prompt_file={folder}/none"], "none: No such file"),
    (["--prompt_file={folder}"], "Is a directory"),
    (["--prompt_file={folder}/blank"], "blank', without text"),
    (["--prompt_file={folder}/blank", "--prompt=Who?"], "without text"),
    (["--prompt="], "--prompt: got nothing"),
    (["--cache=int3"], "--cache: got 'int3'; wanted one of dense, unrotated"),
    (["--cache="], "--cache: got ''; wanted one of dense, unrotated"),
    (["--cache=dense:bits=4"], "--cache: got 'bits=4' in 'dense:bits=4'"),
    (["--prefill=ring", "--chunk=8"], "prefill='chunked'"),
    (
      ["--keep=last", "--cache_placement=host"],
      "--keep: got a value beside --cache_placement",
    ),
    (
      ["--speculate=lookup", "--disk={folder}"],
      "--speculate: got a value beside --disk",
    ),
    (
      ["--contexts={folder}", "--prompt=Who?", "--wire=int8"],
      "--wire: got a value beside --contexts",
    ),
    (
      ["--contexts={folder}", "--prompt=Who?", f"--policy={_HALF}"],
      "--contexts: got a value beside --policy",
    ),
    (
      ["--cache=kvzip:budget=8", f"--policy={_HALF}"],
      "--cache: got a value beside --policy",
    ),
  ],
)
def test_what_is_wrong_is_refused_before_a_model_is_loaded(
  ask, tmp_path, flags, says
):
  (tmp_path / "blank").write_text("\ufeff \n")
  # No model is there to be loaded.
  ran = ask(
    f"--model={tmp_path}/none", *(f.format(folder=tmp_path) for f in flags)
  )
  assert ran.status == 2 and ran.out == ""
  assert says in ran.err.splitlines()[-1], ran.err


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path):
  file = tmp_path / "marked"
  file.write_bytes(b"\xef\xbb\xbfHi")
  assert prompts.read_file(str(file), "--prompt_file") == "Hi"


@pytest.mark.parametrize(
  ("text", "much"),
  [
    (
      "RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.",
      "123,456,789 bytes",
    ),
    (
      "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory "
      "in memory space hbm. Used 17.5G of 16.0G hbm.",
      "18,790,481,920 bytes",
    ),
  ],
)
def test_out_of_memory_says_what_and_how_much(
  ask, folder, monkeypatch, text, much
):
  def fail(*_, **__):
    raise jax.errors.JaxRuntimeError(text)

  monkeypatch.setattr(rj.infer, "generate", fail)
  ran = ask(f"--model={folder}", *SHORT)
  assert ran.status == 2
  last = ran.err.splitlines()[-1]
  assert "while reading the prompt" in last and much in last
  assert "--mesh=" in last and "--chunk=" in last


def test_logits_that_are_not_finite_are_one_line(ask, folder, monkeypatch):
  load = rj.models.load

  def planted(*args, **options):
    model = load(*args, **options)
    return poisoned(model, *range(model.config.vocab))

  monkeypatch.setattr(rj.models, "load", planted)
  ran = ask(f"--model={folder}", *SHORT)
  assert ran.status == 2 and not ran.out.strip()
  (said,) = [line for line in ran.err.splitlines() if "logits" in line]
  assert "row 0 at position" in said and "weights" in said
  assert "Traceback" not in ran.err


def test_a_fault_of_the_code_is_not_hidden(ask, folder, monkeypatch):
  def fail(*_, **__):
    raise ZeroDivisionError

  monkeypatch.setattr(rj.infer, "generate", fail)
  with pytest.raises(ZeroDivisionError):
    ask(f"--model={folder}", *SHORT)


@pytest.mark.long
def test_no_file_of_flags_is_a_word(start):
  with start("-m", "launch.generate", "--wrong", "thing") as process:
    out, err = process.communicate(timeout=PATIENCE_S)
  assert process.returncode == 2 and out == ""
  assert err.startswith("generate: ") and err.count("\n") == 1
  assert "wrong" in err


# ---------------------------------------------------------------------------
# As a command
# ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_the_command_without_a_model(start):
  with start("-m", "launch.generate", "--context=2048") as process:
    out, err = process.communicate(timeout=PATIENCE_S)
  assert process.returncode == 0, err
  assert plain(err)
  assert "8 x cpu, mesh seq:8" in err
  assert "in the answer" in err and "NOT" not in err
  assert "passkey" in out


@pytest.fixture
def heard():
  """Ctrl-C is heard, also by processes that are started.

  Who runs tests in the background ignores it, and children inherit that.
  """
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("heard")
def test_ctrl_c_keeps_what_was_said(start, folder):
  flags = (f"--model={folder}", "--prompt=x", "--max_new_tokens=4000")
  sample = ("--temperature=1", "--seed=1")
  with start("-m", "launch.generate", *flags, *sample) as process:
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
  assert process.returncode == console.INTERRUPTED, err
  assert len(first) == 3 and out.endswith("\n")
  assert "until 'Ctrl-C'" in err and "Traceback" not in err


@pytest.fixture
def interrupt(monkeypatch, heard):
  """Presses Ctrl-C when the main thread waits for the work."""
  waits = threading.Event()

  class Event(threading.Event):
    def wait(self, timeout=None):
      waits.set()
      return super().wait(timeout)

  def press():
    waits.wait()
    os.kill(os.getpid(), signal.SIGINT)

  names = types.SimpleNamespace(Event=Event, Thread=threading.Thread)
  monkeypatch.setattr(console, "threading", names)
  return press


def test_work_that_looks_ends_by_itself(interrupt):
  job = console.Job()
  job.gentle = True

  def work():
    interrupt()
    while not job.stop:
      time.sleep(0.01)
    return "done"

  assert job.run(work) == "done" and job.stop


def test_work_that_does_not_look_is_left(interrupt):
  job, left = console.Job(), threading.Event()

  def work():
    interrupt()
    left.wait()

  with pytest.raises(KeyboardInterrupt):
    job.run(work)
  left.set()
  assert not job.stop


@pytest.mark.long
@pytest.mark.usefixtures("heard")
def test_ctrl_c_before_the_answer(start, folder):
  with start("-m", "launch.generate", f"--model={folder}", *SHORT) as process:
    for line in process.stderr:
      if line.startswith("loading"):
        break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
  assert process.returncode == console.INTERRUPTED
  assert out == "" and "Traceback" not in err
  assert err.splitlines()[-1].startswith("generate: interrupted while")


@pytest.mark.long
@pytest.mark.parametrize(
  "processes", [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_processes_give_the_tokens_of_one(ask, folder, run_together, processes):
  flags = (
    f"--model={folder}",
    *SHORT,
    "--temperature=0.8",
    "--repetition_penalty=1.1",
  )
  mesh = "--mesh=data:2,seq:4" if processes == 4 else "--mesh=seq:8"
  want = json.loads(ask(*flags, mesh, "--json").out)
  ran = run_together(
    "-m", "launch.generate", *flags, mesh, processes=processes,
    first=("--json",),
  )  # fmt: skip
  assert [r.status for r in ran] == [0] * processes, ran
  done = json.loads(ran[0].out)
  assert done["tokens"] == want["tokens"]
  assert done["processes"] == processes and done["devices"] == 8
  for other in ran[1:]:
    # Gloo's lines, which several threads write at a time.
    said = [x for x in other.err.splitlines() if "peer ranks" not in x]
    assert other.out == "" and said == []


BATCH = """
import sys
import numpy as np
import ringjax as rj
from launch import generate
from launch.shared import common
values = common.parse("batch", generate.define, sys.argv[1:])
common.start(values)
mesh = common.mesh(values.mesh)
model = rj.models.load(values.model, mesh=mesh)
prompts = [list(b"def f(x, y):"), list(b"class A:")]
steps = []
def stream(tokens):
  steps.append(tokens)
  return np.array([False, len(steps) == 2])
new = rj.infer.generate(model, prompts, max_new_tokens=6, stream=stream)
print(new.tokens.tolist(), flush=True)
"""


@pytest.mark.slow
def test_a_batch_over_processes_is_read_by_all(folder, run_together):
  flags = (f"--model={folder}", "--mesh=data:2,seq:4")
  ran = run_together("-c", BATCH, *flags, processes=2)
  assert [r.status for r in ran] == [0, 0], ran
  mesh = common.mesh("data:2,seq:4")
  prompts = [list(b"def f(x, y):"), list(b"class A:")]
  want = rj.infer.generate(
    rj.models.load(folder, mesh=mesh), prompts, max_new_tokens=6
  ).tokens
  # The stream ends the second one.
  want[1, 2:] = 0
  for one in ran:
    assert one.out.splitlines()[-1] == str(want.tolist())


@pytest.mark.slow
def test_processes_measure_as_one(folder, run_together, tmp_path):
  """The perplexity of launch.evaluate, on the same mesh."""
  argv = (
    "-m", "launch.evaluate", "perplexity", f"--model={folder}",
    "--lengths=64,32", "--rows=2", "--mesh=seq:8",
  )  # fmt: skip
  file = tmp_path / "figures.json"
  (one,) = run_together(*argv, processes=1, first=("--json",))
  first, second = run_together(
    *argv, processes=2, first=("--json", f"--out={file}")
  )
  assert [x.status for x in (one, first, second)] == [0] * 3, (one, first)
  assert second.out == ""
  expected, result = json.loads(one.out), json.loads(first.out)
  assert result["complete"] and result.keys() == expected.keys()
  assert json.loads(file.read_text()) == result
  for curve, right in zip(result["curves"], expected["curves"], strict=True):
    np.testing.assert_allclose(curve["nll"], right["nll"], atol=1e-5)


# ---------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------


def test_axes_of_a_mesh():
  assert common.axes("data:1, seq:8") == [("data", 1), ("seq", 8)]
  assert common.mesh("model:2,seq:-1").shape == {"model": 2, "seq": 4}
  assert common.mesh(None).shape == {"seq": 8}


def test_compiling_counts_overlaps_once():
  compiling = console.Compiling()
  compiling._spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.5)]
  assert compiling.seconds() == 4.0
  assert compiling.seconds(2.5) == 2.5
  with compiling:
    jax.jit(lambda x: x * 2 + 1)(np.ones(7))
  assert len(compiling._spans) > 4


def test_what_takes_long_is_said_again_where_there_is_no_terminal():
  heard = threading.Event()

  class Stream(io.StringIO):
    def write(self, text):
      if "so far" in text:
        heard.set()
      return super().write(text)

  stream = Stream()
  screen = console.Screen("x", stream, every_s=0.01)
  screen.begin("loading")
  heard.wait()
  screen.end()
  assert stream.getvalue().startswith("loading ...\n  loading: 0:0")
  screen.begin("reading")
  screen.end()
  assert stream.getvalue().endswith("reading ...\n")


def test_words_for_sizes_and_times():
  assert [console.nbytes(n) for n in (0, 999, 1500, 2.5e9, 3e15)] == [
    "0 bytes",
    "999 bytes",
    "1.5 kB",
    "2.5 GB",
    "3e+03 TB",
  ]
  assert console.clock(65) == "1:05" and console.clock(7200) == "2:00:00"


# What srun tells each process of a step.
SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "node[1-4]",
  "SLURM_NTASKS": "4",
  "SLURM_PROCID": "0",
  "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
  ("environment", "flags", "absent"),
  [
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}, (), "SLURM_PROCID"),
    ({"SLURM_JOB_ID": "7"}, ("--distributed",), "SLURM_STEP_NODELIST"),
  ],
)
def test_a_partial_environment_of_slurm_is_named(
  monkeypatch, ask, folder, environment, flags, absent
):
  for name in (*common._COUNTS, *common._HOSTS, *SLURM):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  asked = (f"--model={folder}", "--prompt=x", "--max_new_tokens=1")
  ran = ask(*asked, *flags)
  assert ran.status == 2 and absent in ran.err and "srun" in ran.err
  assert "SLURM_JOB_ID" not in ran.err and "--nodistributed" in ran.err
  # The same process alone does what it is asked.
  assert ask(*asked, "--nodistributed").status == 0


@pytest.mark.parametrize(
  ("environment", "count"),
  [
    ({}, 1),
    ({"SLURM_STEP_NUM_TASKS": "4", **SLURM}, 4),
    ({"SLURM_STEP_NUM_TASKS": "x", **SLURM}, 1),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
    ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, 3),
  ],
)
def test_processes_are_looked_for_where_there_are_some(
  monkeypatch, folder, environment, count
):
  for name in (*common._COUNTS, *common._HOSTS, *SLURM):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  calls = []
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda *args, **_: calls.append(args)
  )
  parse = lambda *flags: common.parse("generate", generate.define, flags)
  common.start(parse())
  assert calls == ([(None, None, None)] if count > 1 else [])
  common.start(parse("--nodistributed"))
  assert len(calls) == (count > 1)
  common.start(parse("--distributed"))
  assert len(calls) == 1 + (count > 1)
  assert common._found_processes() == count


def test_each_cpu_device_has_two_threads(monkeypatch):
  # What is set here is taken back.
  monkeypatch.setenv("NPROC", "")
  monkeypatch.delenv("NPROC")
  common.start(common.parse("generate", generate.define, ["--mesh=seq:1"]))
  assert "NPROC" not in os.environ
  common.start(common.parse("generate", generate.define, ["--mesh=seq:50"]))
  assert int(os.environ["NPROC"]) >= 100


def test_the_document_is_python(folder):
  assert documents.standard_library(500).text.startswith("# ==== ")
  assert sys.version.split()[0] in documents.standard_library(500).source
  assert pathlib.Path(folder, "tokenizer.json").is_file()


@pytest.mark.long
def test_drafts_change_no_token(ask, folder):
  flags = (
    f"--model={folder}",
    "--context=400",
    "--max_new_tokens=20",
    "--json",
  )
  plain, drafted = ask(*flags), ask(*flags, "--speculate=lookup:count=4")
  assert "tokens a call" in drafted.err
  plain, drafted = json.loads(plain.out), json.loads(drafted.out)
  assert drafted["tokens"] == plain["tokens"]
  assert drafted["speculation"]["calls"] < len(plain["tokens"])
  wrong = ask(f"--model={folder}", "--speculate=model")
  assert wrong.status == 2 and "--speculate: got 'model'" in wrong.err
  draft = f"--speculate=model:model={folder},count=3"
  modelled = ask(*flags, draft)
  assert not modelled.status, modelled.err
  modelled = json.loads(modelled.out)
  assert modelled["tokens"] == plain["tokens"]
  assert modelled["speculation"]["accepted"]


@pytest.mark.long
def test_chosen_tiles_are_counted_in_words_and_in_json(ask, folder):
  method = "--prefill=sparse:xattention,threshold=0.5,block=64"
  ran = ask(f"--model={folder}", *SHORT, "--json", "--seed=5", method)
  assert ran.status == 0
  tiles = json.loads(ran.out)["tiles"]
  assert tiles["pattern"] == "XAttention" and tiles["threshold"] == 0.5
  assert len(tiles["layers"]) == 2 and 0 < tiles["computed"] < 1
  assert 0 < tiles["left_out"] < 1
  assert f"{tiles['computed']:.1%} computed" in ran.err


@pytest.mark.long
def test_a_pattern_that_is_none_is_refused_before_loading(ask, folder):
  ran = ask(f"--model={folder}", "--prefill=sparse:xattention,stride=7")
  assert ran.status != 0 and "stride" in ran.err and "model:" not in ran.err
