"""launch.chat: a conversation whose cache stays from turn to turn."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import ringjax as rj
from launch import chat
from launch.answers.conversation import Conversation, Interrupted
from launch.answers.conversation_group import ConversationGroup
from launch.shared import common
from ringjax.data import ChatTemplate, Tokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.infer import Session, Stop
from ringjax.models import tiny
from ringjax.parallel.peers import Peers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAIN = (
  "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
  "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Of answers that others follow only the beginning stays, as of reasoning.
SHORTENED = (
  "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
  "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:4] }}"
  "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEW = 12


@pytest.fixture(scope="module")
def model():
  return rj.models.load(tiny.path())


@pytest.fixture(scope="module")
def tokenizer():
  return Tokenizer.load(tiny.path())


def conversation(model, tokenizer, source=PLAIN, capacity=400, **options):
  """An empty one."""
  kind = options.pop("cache", "windowed")
  template = ChatTemplate(source, tokenizer.special_names, trusted=True)
  session = Session(model, capacity, cache_kind=kind)
  return Conversation(
    model, tokenizer, template, session, max_new_tokens=NEW, **options
  )


def answer(model, tokenizer, source, messages, **options):
  """What one call says to the whole conversation."""
  template = ChatTemplate(source, tokenizer.special_names, trusted=True)
  ids = template.tokens(messages, tokenizer)
  watch = Stop(ids=tokenizer.eos_ids).watch(tokenizer)
  new = rj.infer.generate(
    model, [ids], max_new_tokens=NEW, stop=tokenizer.eos_ids, **options
  )
  return watch.feed(new[0]) + watch.flush()


def check_answers(model, tokenizer, source, messages, **options):
  """Every answer is that of one call on all that was said before."""
  turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
  assert turns
  for n in turns:
    whole = answer(model, tokenizer, source, messages[:n], **options)
    assert messages[n]["content"] == whole


def script(tmp_path, lines, *argv, source=PLAIN):
  """Status, stdout and stderr of the script with these lines as its input."""
  file = tmp_path / "template.jinja"
  file.write_text(source)
  values = common.parse(
    "chat",
    chat.define,
    [f"--model={tiny.path()}", f"--chat_template={file}", "--mesh=seq:1",
     f"--max_new_tokens={NEW}", "--context=400", *argv],
  )  # fmt: skip
  out, err = io.StringIO(), io.StringIO()
  status = chat.run(values, stdin=io.StringIO(lines), stdout=out, stderr=err)
  return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
  "source",
  [pytest.param(PLAIN, marks=pytest.mark.long, id="plain"),
   pytest.param(SHORTENED, marks=pytest.mark.long, id="less")],
)  # fmt: skip
def test_turns_are_one_call_on_the_whole_conversation(
  source, model, tokenizer, tmp_path
):
  file = tmp_path / "messages.json"
  status, out, err = script(
    tmp_path, f"import os\nx = [1, 2]\nreturn\n/save {file}\n", source=source
  )
  assert status == 0, err
  messages = json.loads(file.read_text("utf-8"))
  assert [m["role"] for m in messages] == ["user", "assistant"] * 3
  check_answers(model, tokenizer, source, messages)
  shown = "".join(m["content"] for m in messages if m["role"] == "assistant")
  assert out.replace("\n", "") == shown.replace("\n", "")
  cached = [int(n) for n in re.findall(r"\[(\d+) tokens cached", err)]
  assert cached[0] == 0 and 0 < cached[1] < cached[2]


@pytest.mark.long
@pytest.mark.parametrize(
  "options",
  [{"sampler": rj.infer.Sample(temperature=1.5, seed=3)},
   {"repetition_penalty": 1.3}],
  ids=["sampled", "penalty"],
)  # fmt: skip
def test_other_ways_to_answer(options, model, tokenizer):
  """Also where what was taken back had been seen."""
  talk = conversation(model, tokenizer, SHORTENED, options=options)
  for text in ("import os", "x = [1, 2]"):
    talk.ask(text, lambda piece: None)
  check_answers(model, tokenizer, SHORTENED, talk.messages, **options)


@pytest.mark.long
def test_a_cache_that_cannot_go_back_is_emptied(model, tokenizer, monkeypatch):
  def refuse(self, rows, end):
    raise OptionError("cache", "a recurrent layer", "another", "restart")

  monkeypatch.setattr(Session, "take_back", refuse)
  talk = conversation(model, tokenizer, SHORTENED)
  turns = [talk.ask(x, lambda piece: None) for x in ("import os", "x = 1")]
  assert turns[1].cached == 0
  check_answers(model, tokenizer, SHORTENED, talk.messages)


@pytest.mark.long
def test_an_answer_that_is_ended(model, tokenizer):
  """What was shown is what the conversation goes on with."""
  talk, shown = conversation(model, tokenizer), []
  turn = talk.ask("import os", shown.append, stopped=lambda: len(shown) > 2)
  assert turn.ended == "Ctrl-C" and len(turn.tokens) < NEW
  assert talk.messages[-1]["content"] == "".join(shown) == turn.text
  turn = talk.ask("x = [1, 2]", lambda piece: None)
  assert turn.cached > 0
  whole = answer(model, tokenizer, PLAIN, talk.messages[:-1])
  assert turn.text == whole


@pytest.mark.long
def test_a_message_that_is_ended_while_it_is_read(model, tokenizer):
  talk = conversation(model, tokenizer)
  talk.ask("import os", lambda piece: None)
  before = list(talk.messages)
  with pytest.raises(Interrupted):
    talk.ask("x = [1, 2]", lambda piece: None, stopped=lambda: True)
  assert talk.messages == before
  talk.ask("y = 3", lambda piece: None)
  check_answers(model, tokenizer, PLAIN, talk.messages)


@pytest.mark.long
def test_a_context_that_is_full(model, tokenizer):
  talk = conversation(model, tokenizer, capacity=64)
  turn = talk.ask("import os " * 5, lambda piece: None)
  before = list(talk.messages)
  with pytest.raises(PromptError, match=r"64 of the context.*/reset"):
    talk.ask("x = 1 " * 20, lambda piece: None)
  assert talk.messages == before and turn.text
  talk.reset()
  assert talk.messages == [] and talk.session.empty


@pytest.mark.long
def test_commands(tmp_path):
  document, saved = tmp_path / "notes.txt", tmp_path / "m.json"
  document.write_text("the key is 5")
  lines = (
    f"/help\n/read {document}\nwhere?\n/save {saved}\n/nothing\n/read\n"
    f"/read {tmp_path}/gone\n//slash\n/save {tmp_path}/again.json\n"
    f"/reset\n/save {tmp_path}/empty.json\n/quit\nnever read\n"
  )
  status, _, err = script(tmp_path, lines, "--system=Be short.")
  assert status == 0
  messages = json.loads(saved.read_text())
  assert messages[0] == {"role": "system", "content": "Be short."}
  assert messages[1]["content"] == "the key is 5\n\nwhere?"
  assert len(messages) == 3
  assert "/reset" in err and "'/nothing'" not in err and "/nothing" in err
  assert "gone: No such file" in err and "name a file" in err
  again = json.loads((tmp_path / "again.json").read_text())
  assert again[3]["content"] == "/slash"
  assert json.loads((tmp_path / "empty.json").read_text()) == messages[:1]
  # The conversation goes on from the file.
  status, _, err = script(tmp_path, f"more\n/save {saved}\n", f"--load={saved}")
  assert status == 0 and json.loads(saved.read_text())[:3] == messages
  saved.write_text('[{"role": "boss", "content": 3}]')
  status, _, err = script(tmp_path, "more\n", f"--load={saved}")
  assert status == 2 and "boss" in err


def test_a_model_without_a_template():
  values = common.parse(
    "chat", chat.define, [f"--model={tiny.path()}", "--mesh=seq:1"]
  )
  err = io.StringIO()
  status = chat.run(
    values, stdin=io.StringIO("x\n"), stdout=io.StringIO(), stderr=err
  )
  assert status == 2 and "--chat_template=FILE" in err.getvalue()


def test_a_model_that_is_not_fetched(tmp_path, monkeypatch):
  monkeypatch.setenv("RINGJAX_CACHE", str(tmp_path))
  values = common.parse("chat", chat.define, ["--mesh=seq:1"])
  err = io.StringIO()
  status = chat.run(
    values, stdin=io.StringIO("x\n"), stdout=io.StringIO(), stderr=err
  )
  assert status == 2
  assert "launch.fetch smollm2-135m" in err.getvalue()


@pytest.mark.long
def test_ctrl_c_in_a_terminal(tmp_path):
  """Ends an answer and an unfinished line, not the conversation."""
  import pty

  template, saved = tmp_path / "t.jinja", tmp_path / "m.json"
  template.write_text(PLAIN.replace("<|end|>", "\n"))
  ours, theirs = pty.openpty()
  child = subprocess.Popen(
    [sys.executable, "-m", "launch.chat", f"--model={tiny.path()}",
     f"--chat_template={template}", "--context=60000",
     "--max_new_tokens=50000"],
    cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
    start_new_session=True,
    env=os.environ | {"RINGJAX_CACHE": str(tmp_path), "TERM": "dumb"},
  )  # fmt: skip
  os.close(theirs)
  seen = ""

  def until(text):
    nonlocal seen
    while text not in seen:
      seen += os.read(ours, 4096).decode("utf-8", "replace")
    seen = seen.partition(text)[2]

  def interrupt():
    """Sends a signal; again if readline missed it between two waits."""
    child.send_signal(signal.SIGINT)
    while not seen and not select.select([ours], [], [], 10)[0]:
      child.send_signal(signal.SIGINT)

  try:
    until("> ")
    os.write(ours, b"half a line")
    until("half a line")
    time.sleep(0.2)
    interrupt()
    until("> ")
    os.write(ours, b"import os\n")
    until("import os\r\n")
    while len(seen) < 3:
      seen += os.read(ours, 4096).decode("utf-8", "replace")
    child.send_signal(signal.SIGINT)
    until("until Ctrl-C]")
    until("> ")
    os.write(ours, f"/save {saved}\n".encode())
    until("2 messages in")
    # A terminal forgets the end of a file that comes before a line is read.
    until("> ")
    os.write(ours, b"\x04")
    assert child.wait() == 0
  finally:
    child.kill()
    os.close(ours)
  messages = json.loads(saved.read_text())
  assert messages[0]["content"] == "import os" and messages[1]["content"]
  assert "import os" in (tmp_path / "chat_history").read_text()


@pytest.mark.long
def test_those_that_follow_have_the_same_conversation(model, tokenizer):
  """After an answer that is ended, one that was not begun, and a reset."""
  leading, following = (
    ConversationGroup(peers) for peers in Peers.in_threads(2, timeout_s=60)
  )
  talks = [conversation(model, tokenizer) for _ in range(2)]
  thread = threading.Thread(
    target=following.follow, args=(talks[1],), daemon=True
  )
  thread.start()

  def ask(message, most):
    calls = iter(range(100))
    leading.ask(message)
    return talks[0].ask(
      message,
      lambda text: None,
      stopped=lambda: leading.stopped(next(calls) >= most),
    )

  assert ask("return", most=100).ended == "max_new_tokens"
  leading.reset()
  talks[0].reset()
  turn = ask("import os", most=3)
  assert turn.ended == "Ctrl-C" and len(turn.tokens) < NEW
  with pytest.raises(Interrupted):
    ask("x = 1", most=0)
  with pytest.raises(PromptError):
    ask("too long " * 400, most=100)
  ask("x = 2", most=100)
  leading.end()
  thread.join(240)
  assert not thread.is_alive()
  first, second = talks
  assert first.messages == second.messages and len(first.messages) == 4
  for group in (leading, following):
    group.peers.close()


@pytest.mark.slow
def test_two_processes_hold_one_conversation(tmp_path, model, tokenizer):
  """Only process 0 has the template and the lines; Ctrl-C ends an answer."""
  template, saved = tmp_path / "t.jinja", tmp_path / "m.json"
  template.write_text(PLAIN.replace("<|end|>", "\n"))
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  argv = [
    sys.executable, "-m", "launch.chat", f"--model={tiny.path()}",
    f"--coordinator=localhost:{port}", "--num_processes=2", "--mesh=seq:2",
    "--context=60000",
  ]  # fmt: skip
  options = dict(
    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  with contextlib.ExitStack() as stack:
    first, second = (
      stack.enter_context(subprocess.Popen([*argv, *flags], **options))
      for flags in (
        ["--process_id=0", f"--chat_template={template}",
         "--max_new_tokens=50000"],
        ["--process_id=1", "--max_new_tokens=50000"],
      )
    )  # fmt: skip
    for process in (first, second):
      stack.callback(process.kill)
    first.stdin.write("import os\n")
    first.stdin.flush()
    assert first.stdout.read(3)
    first.send_signal(signal.SIGINT)
    for line in first.stderr:
      if "until Ctrl-C]" in line:
        break
    first.stdin.write(f"/save {saved}\n/reset\n/save {saved}.2\n")
    _, err = first.communicate(timeout=240)
    assert first.returncode == 0, err
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0 and out == "", err
  question, reply = json.loads(saved.read_text())
  assert question["content"] == "import os"
  assert json.loads(pathlib.Path(f"{saved}.2").read_text()) == []
  ids = ChatTemplate(
    template.read_text(), tokenizer.special_names, trusted=True
  ).tokens([question], tokenizer)
  new = rj.infer.generate(model, [ids], max_new_tokens=3)
  assert reply["content"].startswith(tokenizer.decode(new[0][:2]))
