"""HELMET's tasks that a judge scores, by a judge on loopback."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import threading

import pytest

from launch import evaluate
from ringjax.data import Bytes
from ringjax.errors import DataError, OptionError
from ringjax.eval import suites
from ringjax.eval.suites import AnswerJudge, JudgeError, LongQuestion, suite_of
from ringjax.models import tiny
from tests.helpers import script

run = functools.partial(script, evaluate)

STORY = {
  "document": {"id": "d", "text": "Ann went to Oslo.\nIt snowed."},
  "question": {"text": "Where did Ann go?"},
  "answers": [{"text": "Oslo"}, {"text": "to Oslo"}],
}
BOOK = {"id": 4, "context": "A long book.", "answer": ["She goes.", "x"]}
CASE = {
  "id": "EE-1",
  "sources": ["First paper.", "Second paper."],
  "summary/short": "A short one.",
  "summary/long": "The long one.",
  "summary/short_keypoints": ["a", "b", "c"],
}


class MockJudge:
  """A server that answers as a judge does.

  Attributes:
    replies: What it answers to the next requests: a text, a status, or bytes of
      a body; afterwards `default` of the prompt.
    bodies: Bodies of the requests.
    keys: Their Authorization headers.
  """

  def __init__(self):
    self.replies, self.bodies, self.keys = [], [], []
    self.default = lambda prompt: '{"fluency": 1, "correctness": 3}'
    self.address = ""


@contextlib.contextmanager
def judging():
  judge = MockJudge()

  class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
      del args

    def do_POST(self):
      length = int(self.headers["Content-Length"])
      body = json.loads(self.rfile.read(length))
      judge.bodies.append((self.path, body))
      judge.keys.append(self.headers.get("Authorization"))
      reply = judge.default(body["messages"][0]["content"])
      if judge.replies:
        reply = judge.replies.pop(0)
      status, data = 200, reply
      if isinstance(reply, int):
        status, data = reply, b'{"error": {"message": "too many judges"}}'
      elif isinstance(reply, str):
        message = {"role": "assistant", "content": reply}
        data = json.dumps({"choices": [{"message": message}]}).encode()
      self.send_response(status)
      self.send_header("Content-Length", str(len(data)))
      if status == 429:
        self.send_header("Retry-After", "0")
      self.end_headers()
      self.wfile.write(data)

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  judge.address = f"http://127.0.0.1:{server.server_port}/v1"
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield judge
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def write_rows(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
  return path


def only_question(text):
  (question,) = suite_of(text).questions(Bytes())
  return question


ASKED = suites.JudgeQuestion("Judge.", {"fluency": 1, "recall": 4})


@pytest.mark.parametrize(
  ("replies", "requests"),
  [
    (['Reasons {"fluency": 9} and {"fluency": 1, "recall": 2.5}'], 1),
    ([429, 503, '```json\n{"recall": 2.5, "fluency": 1, "x": 2}\n```'], 3),
    (["no numbers", b"no JSON", f'{{"fluency": 1, "recall": 1{"0" * 400}}}',
      '{"fluency": 1, "recall": 2.5}'], 4),
    (['{"fluency": 2, "recall": 2.5}', '{"fluency": 1, "recall": -1}',
      '{"fluency": true, "recall": 1}', '{"fluency": 1}',
      '{"fluency": 1, "recall": 2.5}'], 5),
  ],
)  # fmt: skip
def test_a_reply_is_asked_for_until_it_has_the_numbers(replies, requests):
  with judging() as server:
    server.replies = [*replies]
    judge = AnswerJudge(address=server.address, model="m", pause_s=0.0, key="k")
    numbers, reply = judge.numbers(ASKED, "question q")
    assert numbers == {"fluency": 1.0, "recall": 2.5} and reply == replies[-1]
    assert len(server.bodies) == requests and {*server.keys} == {"Bearer k"}
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions" and body["model"] == "m"
    assert body["messages"] == [{"role": "user", "content": "Judge."}]


def test_a_judge_that_fails_is_named_with_its_question(monkeypatch):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  with judging() as server:
    judge = AnswerJudge(
      address=server.address, model="m", pause_s=0.0, attempts=2
    )
    # A refusal is final, a busy server and a useless reply are asked again.
    for replies, words, requests in (
      ([401], "status 401, too many judges", 1),
      ([503, 503], "status 503", 2),
      (["nothing", "at all"], "the reply 'at all'", 2),
      ([b"{}", b"{}"], "no chat completion", 2),
    ):
      server.replies, server.bodies = replies, []
      with pytest.raises(JudgeError, match=f"question q.*{words}"):
        judge.numbers(ASKED, "question q")
      assert len(server.bodies) == requests
    assert {*server.keys} == {None}
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.replies = ['{"fluency": 1, "recall": 0}']
    judge.numbers(ASKED, "question q")
    assert server.keys[-1] == "Bearer secret"
  with pytest.raises(JudgeError, match=r"question q.*Connection"):
    judge.numbers(ASKED, "question q")
  for options, words in (
    ({"address": "", "model": "m"}, "address"),
    ({"address": "localhost:1", "model": "m"}, "address"),
    ({"address": "http://x", "model": ""}, "judge_model"),
    ({"address": "http://x", "model": "m", "attempts": 0}, "attempts"),
  ):
    with pytest.raises(OptionError, match=words):
      AnswerJudge(**options)
  assert "secret" not in repr(
    AnswerJudge(address="http://x", model="m", key="secret")
  )


def test_files_of_judged_tasks(tmp_path):
  stories = write_rows(tmp_path / "n.jsonl", [STORY])
  other = STORY | {"question": {"text": "Why?"}, "answers": [{"text": "So."}]}
  demos = write_rows(tmp_path / "d.jsonl", [STORY, other])
  story = only_question(
    f"helmet:path={stories},task=narrativeqa,demos={demos},shots=2"
  )
  assert story.context == STORY["document"]["text"]
  assert story.answers == ("Oslo", "to Oslo")
  # The question itself is no example.
  assert story.opening.count("Answer: ") == 1 and "So." in story.opening
  assert story.closing.endswith("Question: Where did Ann go?")
  assert (story.max_new_tokens, story.answer_prefix) == (100, "\nAnswer:")

  books = write_rows(tmp_path / "b.jsonl", [BOOK])
  points = write_rows(tmp_path / "k.jsonl", [{"id": 4, "keypoints": ["p"]}])
  options = f"path={books},task=infbench_sum,shots=0"
  book = only_question(f"helmet:{options},keypoints={points}")
  assert book.details["points"] == ["p"] and book.answers == ("She goes.",)
  assert (book.max_new_tokens, book.answer_prefix) == (1200, "\nSummary:")

  cases = [CASE, CASE | {"id": "none", "summary/short": None}]
  path = write_rows(tmp_path / "c.jsonl", cases)
  case = only_question(f"helmet:path={path},task=multi_lexsum,shots=0")
  assert case.context == "First paper.\n\nSecond paper."
  assert case.answers == ("The long one.",) and case.max_new_tokens == 400
  # Templates of summaries need no question.
  suite_of(
    f"helmet:path={path},task=multi_lexsum,shots=0",
    templates={"": "{demos}{context}"},
  )
  for text, error, words in (
    (f"{options}", OptionError, "keypoints"),
    (f"path={path},task=multi_lexsum,shots=0,keypoints=x", OptionError,
     "keypoints"),
    (f"path={path},task=multi_lexsum", OptionError, "demos and shots"),
    (f"{options},keypoints={books}", DataError, "keypoints"),
    (f"path={books},task=narrativeqa,shots=0", DataError, "document"),
  ):  # fmt: skip
    with pytest.raises(error, match=words):
      list(suite_of(f"helmet:{text}").questions(Bytes()))
  write_rows(points, [{"id": 5, "keypoints": []}])
  with pytest.raises(DataError, match="an id of"):
    only_question(f"helmet:{options},keypoints={points}")


SUMMARY = {"points": ["a", "b", "c", "d"]}


@pytest.mark.parametrize(
  ("task", "numbers", "score"),
  [
    ("narrativeqa", {"fluency": 1, "correctness": 3}, 1),
    ("narrativeqa", {"fluency": 1, "correctness": 2}, 2 / 3),
    ("narrativeqa", {"fluency": 0, "correctness": 3}, 0),
    # Recall 3/4, precision 1/2.
    ("infbench_sum",
     {"fluency": 1, "recall": 3, "precision": 2, "sentence_count": 4}, 0.6),
    ("multi_lexsum",
     {"fluency": 0, "recall": 4, "precision": 4, "sentence_count": 4}, 0),
    ("multi_lexsum",
     {"fluency": 1, "recall": 0, "precision": 0, "sentence_count": 0}, 0),
  ],
)  # fmt: skip
def test_formulas_of_judged_tasks(task, numbers, score):
  extra = {"infbench_sum": "keypoints=x,shots=0"}.get(task, "shots=0")
  suite = suite_of(f"helmet:path=x,task={task},{extra}")
  details = SUMMARY | {"question": "Where?"}
  question = LongQuestion(
    id="", task=task, context="", answers=("Oslo", "Rome"), details=details,
    max_new_tokens=1,
  )  # fmt: skip
  assert suite.judged and suite.judged_score(question, numbers) == (
    pytest.approx(score)
  )
  completion = "Well.\nAnswer: answer: {x}\nOslo "
  prompts = suite.judge_questions(question, completion)
  names = [name for prompt in prompts for name in prompt.highest]
  assert names == [*numbers]
  text = "\n".join(prompt.prompt for prompt in prompts)
  # What the prompt shows as the form of a reply is a reply.
  shown = {
    name: number
    for prompt in prompts
    for name, number in json.loads(
      re.findall(r"\{[^{}]*\}", prompt.prompt)[-1]
    ).items()
  }
  assert [*shown] == names
  if task == "narrativeqa":
    assert "Answer: {x} Oslo\n" in text and "Oslo; Rome" in text
  else:
    assert "3. c\n4. d" in text and text.count(completion.strip()) == 3
    assert prompts[1].highest == {"recall": 4}
  with pytest.raises(OptionError, match="no judge"):
    suite.score(question, "x")


@pytest.mark.long
def test_a_judged_run_loses_nothing(tmp_path, monkeypatch):
  """An answer that is not judged is kept, and not asked a second time."""
  rows = [STORY | {"question": {"text": f"Where {n}?"}} for n in range(3)]
  path = write_rows(tmp_path / "n.jsonl", rows)
  out = tmp_path / "out.json"
  monkeypatch.setattr(
    "ringjax.eval.suites.judge.AnswerJudge.__init__",
    functools.partialmethod(AnswerJudge.__init__, pause_s=0.0),
  )
  argv = ("suite", f"--model={tiny.path()}", f"--out={out}", "--mesh=seq:1",
          f"--suite=helmet:path={path},task=narrativeqa,shots=0")  # fmt: skip
  asked = []
  inner = suites.asking.generate

  def generate(*args, **options):
    asked.append(args)
    return inner(*args, **options | {"max_new_tokens": 3})

  monkeypatch.setattr("ringjax.eval.suites.asking.generate", generate)
  good = '{"fluency": 1, "correctness": 3}'
  with judging() as server:
    judge = (f"--judge={server.address}", "--judge_model=m")
    server.replies = [good, 401]
    status, _, err = run(*argv, *judge)
    assert status == 2 and "question narrativeqa/2" in err, err
    assert "401" in err and len(asked) == 2
    record = json.loads(out.read_text())
    scores = [answer["score"] for answer in record["answers"]]
    assert scores == [1.0, None] and not record["complete"]
    server.bodies = []
    server.replies = ['{"fluency": 0, "correctness": 2}', 401]
    status, _, err = run(*argv, *judge)
    assert status == 2 and "2 of 3 answers already" in err, err
    record = json.loads(out.read_text())
    scores = [answer["score"] for answer in record["answers"]]
    # All have answers, and one has no score yet.
    assert scores == [1.0, 0.0, None] and not record["complete"]
    server.bodies.clear()
    status, table, err = run(*argv, *judge)
    assert status == 0 and "3 of 3 answers already" in err, err
    assert len(asked) == 3 and len(server.bodies) == 1
    record = json.loads(out.read_text())
    scores = [answer["score"] for answer in record["answers"]]
    assert scores == [1.0, 0.0, 1.0] and record["complete"]
    assert record["judge"] == "m" and "66.7" in table
    judgement = record["answers"][0]["judgement"]
    assert judgement["model"] == "m" and judgement["replies"] == [good]
    assert judgement["numbers"] == {"fluency": 1, "correctness": 3}
    # Another judge judges the same answers.
    server.default = lambda prompt: '{"fluency": 1, "correctness": 0}'
    status, table, err = run(*argv, judge[0], "--judge_model=n")
    assert status == 0 and len(asked) == 3, err
    record = json.loads(out.read_text())
    assert [answer["score"] for answer in record["answers"]] == [0, 0, 0]
  for wrong, words in (
    (argv, "--judge: got none"),
    ((*argv, judge[0]), "--judge_model"),
    ((*argv, judge[1]), "address of the judge"),
    (("suite", "--suite=ruler:path=x", *judge), "leave it and --judge_model"),
    (("needle", *judge), "--judge, --judge_model with needle"),
  ):
    status, _, err = run(*wrong)
    assert status == 2 and words in err, err
