"""Benchmarks of long contexts: their files, their rules, their lengths."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest

import ringjax as rj
from launch import evaluate
from ringjax.data import Bytes, Tokenizer
from ringjax.data.tasks.needle import Passkey
from ringjax.errors import DataError, OptionError, PromptError, RingjaxError
from ringjax.eval import suites
from ringjax.eval.suites import (
  LongQuestion,
  ReadingMode,
  suite_answers,
  suite_of,
)
from ringjax.eval.suites.answer_rules import ndcg, rouge_lsum
from ringjax.models import checkpoint, tiny
from ringjax.paths import as_path
from tests import object_servers
from tests.helpers import refused, script

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
  "max_position_embeddings": 300,
}


def write_rows(path, rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
  return path


def question(*answers, task="", **details):
  return LongQuestion(
    id="",
    task=task,
    context="",
    answers=answers,
    max_new_tokens=1,
    details=details,
  )


# ---------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------

# The rules' results were compared with those of the benchmarks' own programs on
# 28,000 random answers; these are computed by hand.
RULES = [
  ("ruler", question("12", "ab", any_value=False), " Ab and 7", 0.5),
  ("ruler", question("12", "ab", any_value=True), "AB", 1),
  ("ruler", question("12", any_value=False), "1 2", 0),
  ("longbench", question("B"), "**The correct answer is (B)**", 1),
  ("longbench", question("B"), "The correct answer is B. Not A", 1),
  # The form in brackets comes first wherever it stands.
  ("longbench", question("B"), "The correct answer is A or: "
   "The correct answer is (B)", 1),
  ("longbench", question("B"), "the correct answer is (B)", 0),
  ("infinitebench", question("71", task="passkey"), "It is 71, not 5", 1),
  ("infinitebench", question("71", task="number_string"), "711", 0),
  ("infinitebench", question("a-1", task="kv_retrieval"), '{"a-1"}', 1),
  ("infinitebench", question("ANN", task="longdialogue_qa_eng"), "Ann.", 1),
  ("infinitebench", question(-3, task="code_run"), "so it is -3", 1),
  ("infinitebench", question(-3, task="code_run"), "", 0),
  ("infinitebench", question(7, task="math_find"), "7.5", 0),
  ("infinitebench", question(7.5, task="math_find"), "= 7.5", 1),
  ("infinitebench", question(1, 2, 3, 4, task="math_calc"), "1, 2, 4, 4", 0.5),
  # After the phrase one character is left out, whatever it is.
  ("infinitebench", question("x", "C", task="longbook_choice_eng"),
   "I say the answer is: C", 1),
  ("infinitebench", question("x", "C", task="longbook_choice_eng"), "B", 0),
  ("infinitebench", question("f", "D", task="code_debug"), "D. f", 1),
  ("infinitebench", question("f", "D", task="code_debug"),
   "The Answer is: 'f'", 1),
  # 2 of 3 words are right and 2 of 2 are found: 2 * (2/3) / (2/3 + 1).
  ("infinitebench", question("red fox", task="longbook_qa_eng"),
   "The red, quick fox!", 0.8),
  ("infinitebench", question("北京", task="longbook_qa_chn"), "北。", 2 / 3),
  ("infinitebench", question("a b c d", task="longbook_sum_eng"), "a b x d",
   0.75),
  ("nolima", question("Yuki"), "It was Yuki.", 1),
  ("nolima", question("Yuki"), "yuki", 0),
  ("mrcr", question("xyz: abcd", start="xyz: "), "xyz: abcx", 0.75),
  ("mrcr", question("xyz: abcd", start="xyz: "), "abcd", 0),
  ("helmet:task=nq", question("the Nile"), "Answer: Nile\nor not", 1),
  ("helmet:task=nq", question("Nile"), "It is\nthe Nile", 0),
  ("helmet:task=json_kv", question("ab-1"), "So\nCorresponding value: ab-1", 1),
  # Relevant are 1 (gain 2) and 2 (gain 1), ranked third and first.
  ("helmet:task=msmarco", question(relevance={"1": 2, "2": 1, "3": 0}),
   "ID2 > ID3 > ID1", (1 + 2 / 2) / (2 + 1 / np.log2(3))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "question", "completion", "score"), RULES)
def test_rules(name, question, completion, score):
  base, _, options = name.partition(":")
  shots = ",shots=0" if base == "helmet" else ""
  suite = suite_of(f"{base}:path=x{options and ',' + options}{shots}")
  assert suite.score(question, completion) == pytest.approx(score, abs=1e-12)


def test_a_word_of_a_summary_counts_once():
  # The first line's "a" is matched by both lines of the other text.
  assert rouge_lsum("a b\na", "a\na c") == pytest.approx(
    2 * 2 / 3 * 2 / 3 / (4 / 3)
  )
  assert rouge_lsum("", "a") == rouge_lsum("a", "b") == 0


def test_gain_of_rankings():
  assert ndcg({"1": 1}, ["2", "1"], 10) == pytest.approx(1 / np.log2(3))
  assert ndcg({"1": 1}, ["2", "1"], 1) == 0
  assert ndcg({}, ["1"], 10) == 0


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def questions(text, tokenizer=None, **options):
  return list(suite_of(text, **options).questions(tokenizer or Bytes()))


def test_files_of_ruler(tmp_path):
  row = {"index": 4, "input": "Read.\nlong\ntext\nWhat?", "outputs": ["1"],
         "length": 900, "answer_prefix": " It is"}  # fmt: skip
  write_rows(tmp_path / "m/synthetic/4096/data/niah_single_1/validation.jsonl",
             [row])  # fmt: skip
  write_rows(tmp_path / "m/synthetic/4096/pred/niah_single_1.jsonl", [{}])
  write_rows(tmp_path / "m/qa_1/validation.jsonl", [row | {"input": "one"}])
  first, second = sorted(
    questions(f"ruler:path={tmp_path}"), key=lambda x: x.task
  )
  assert (first.opening, first.context, first.closing) == (
    "Read.\n", "long\ntext\n", "What?",
  )  # fmt: skip
  assert (first.length, first.max_new_tokens) == (4096, 128)
  assert first.answer_prefix == " It is"
  # Without a folder that states it, the length is the row's.
  assert (second.length, second.max_new_tokens) == (1024, 32)
  assert second.text == "one" and second.details["any_value"]


def test_files_of_longbench(tmp_path):
  row = {"_id": "a", "domain": "d", "sub_domain": "s", "difficulty": "hard",
         "length": "short", "question": "Q $C_A$?", "choice_A": "w",
         "choice_B": "x", "choice_C": "y", "choice_D": "z", "answer": "C",
         "context": " long $Q$ "}  # fmt: skip
  path = tmp_path / "data.json"
  path.write_text(json.dumps([row]))
  template = "<$DOC$>$Q$|$C_A$$C_B$$C_C$$C_D$"
  (got,) = questions(f"longbench:path={path}", templates={"": template})
  # Text of the data is no placeholder.
  assert got.text == "<long $Q$>Q $C_A$?|wxyz"
  assert got.groups == ("hard", "short") and got.answers == ("C",)
  text = questions(f"longbench:path={path}")[0].text
  assert "The correct answer is (X)" in text and "(D) z" in text
  path.write_text(json.dumps([row | {"answer": "E"}]))
  with pytest.raises(DataError, match=r"item 1: answer: got 'E'"):
    questions(f"longbench:path={path}")
  with pytest.raises(OptionError, match=r"without .*C_D"):
    suite_of(f"longbench:path={path}", templates={"": "$DOC$ $Q$"})


def test_files_of_infinitebench(tmp_path):
  choice = {"id": 0, "context": "book", "input": "Who?", "answer": ["x"],
            "options": ["w", "x", "y", "z"]}  # fmt: skip
  write_rows(tmp_path / "longbook_choice_eng.jsonl", [choice])
  write_rows(tmp_path / "code_run.jsonl", [
    {"id": 1, "context": "def", "input": "Give func_2(-5).", "answer": 3},
  ])  # fmt: skip
  write_rows(tmp_path / "math_find.jsonl", [
    {"id": 2, "context": "[1]", "input": "The largest number of it",
     "answer": 1},
  ])  # fmt: skip
  templates = {"math_find": "{prefix} {context}{input}"}
  by_task = {
    x.task: x
    for x in questions(f"infinitebench:path={tmp_path}", templates=templates)
  }
  assert by_task["longbook_choice_eng"].answers == ("x", "B")
  assert "B. x\n" in by_task["longbook_choice_eng"].text
  assert "func_2(-5)" in by_task["code_run"].text
  assert by_task["code_run"].answers == (3,)
  assert by_task["math_find"].text == (
    "What is the largest number in this list? [1]The largest number of it"
  )
  write_rows(tmp_path / "other.jsonl", [choice])
  with pytest.raises(DataError, match="names of files"):
    questions(f"infinitebench:path={tmp_path}")


def test_files_of_mrcr(tmp_path):
  chat = [{"role": "user", "content": "poem"},
          {"role": "assistant", "content": "one"},
          {"role": "user", "content": "Begin with xy: the 1st"}]  # fmt: skip
  row = {"prompt": json.dumps(chat), "answer": "xyone", "n_needles": 2,
         "random_string_to_prepend": "xy"}  # fmt: skip
  path = write_rows(tmp_path / "2needle.jsonl", [row])
  (got,) = questions(f"mrcr:path={path}")
  assert list(got.history) == chat[:2] and got.text == chat[2]["content"]
  # 4 + 3 + 22 bytes of messages and 5 of the answer.
  assert got.length == 64 and got.max_new_tokens == 5 + 128
  for wrong in ("[", json.dumps(chat[:2])):
    write_rows(path, [row | {"prompt": wrong}])
    with pytest.raises(DataError, match="line 1: prompt|row 1: prompt"):
      questions(f"mrcr:path={path}")


NEEDLES = [{"id": "0401", "needle": "In fact {CHAR} lives next to {1}.",
            "system_prompt": "Be short.", "character_set": ["Yuki", "Stu"],
            "questions": {"onehop": "Who has been to {2}?"},
            "tests": {
              "T1": {"input_args": ["the opera", "Dresden"]}}}]  # fmt: skip


def nolima_folder(root, needles=NEEDLES, lines=60):
  path = root / "needlesets" / "needle_set.json"
  path.parent.mkdir(parents=True)
  path.write_text(json.dumps(needles))
  book = root / "haystack" / "rand_shuffle" / "b1.txt"
  book.parent.mkdir(parents=True)
  book.write_text("\n".join(f"line {n:03} of it" for n in range(lines)))
  return root


def test_files_of_nolima(tmp_path):
  root = nolima_folder(tmp_path)
  question_list = questions(f"nolima:path={root},lengths=(100,200),depths=3")
  assert [(x.length, x.id.split("/")[2]) for x in question_list] == [
    (length, depth)
    for length in (100, 200)
    for depth in ("0.0000", "0.5000", "1.0000")
  ]
  generator = np.random.RandomState(42 + 401)
  for got in question_list[:3]:
    name = str(generator.choice(["Yuki", "Stu"]))
    assert got.answers == (name,)
    needle = f" In fact {name} lives next to the opera.\n"
    first, second = got.context.split(needle)
    # The needle replaces a line break; 100 tokens of the book are around it.
    assert len(first) + 1 + len(second) in (100, 101)
    assert (
      f"{first}\n{second}".strip("\n")
      in (root / "haystack/rand_shuffle/b1.txt").read_text()
    )
  assert "Who has been to Dresden?" in got.closing
  assert got.history == ({"role": "system", "content": "Be short."},)
  with pytest.raises(DataError, match="book b1: got 899 tokens"):
    questions(f"nolima:path={root},lengths=(2000,)")
  refused_folder = nolima_folder(
    tmp_path / "bad", [NEEDLES[0] | {"distractors": {"onehop": "x"}}]
  )
  with pytest.raises(DataError, match="distractors"):
    questions(f"nolima:path={refused_folder}")


def test_files_of_helmet(tmp_path):
  ctxs = [{"title": "T", "text": "long text"}, {"title": "U", "text": "more"}]
  rows = [{"id": n, "question": f"Q{n}?", "answers": [f"a{n}"], "ctxs": ctxs}
          for n in range(9)]  # fmt: skip
  test = write_rows(tmp_path / "nq.jsonl", rows[:1])
  demos = write_rows(tmp_path / "demos.jsonl", rows[1:])
  (got,) = questions(f"helmet:path={test},task=nq,demos={demos},shots=2")
  assert got.context == (
    "Document (Title: T): long text\n\nDocument (Title: U): more"
  )
  assert got.opening.count("Answer: a") == 2 and got.closing.endswith("Q0?")
  assert got.answer_prefix == "\nAnswer:" and got.max_new_tokens == 20
  pairs = [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]]
  path = write_rows(tmp_path / "kv.jsonl", [
    {"context": "{}", "question": "k", "answer": "v", "demos": pairs,
     "num_kvs": 1},
  ])  # fmt: skip
  (got,) = questions(f"helmet:path={path},task=json_kv")
  assert got.closing.count("Corresponding value: ") == 2
  path = write_rows(tmp_path / "ms.jsonl", [
    {"qid": "1", "query": "q", "ctxs": [{"id": "5", "text": "t", "label": 3}]},
  ])  # fmt: skip
  (got,) = questions(f"helmet:path={path},task=msmarco,shots=0")
  assert got.context == "[ID: 5] Document: t"
  assert got.details["relevance"] == {"5": 3}
  for options, words in (
    ("task=nq", "demos and shots"),
    ("task=json_kv,demos=x", "its own"),
    ("task=other", "one of"),
  ):
    with pytest.raises(OptionError, match=words):
      suite_of(f"helmet:path={path},{options}")


def test_files_of_object_storage(tmp_path):
  root = nolima_folder(tmp_path)
  row = {"input": "x", "outputs": ["1"], "length": 900}
  write_rows(root / "4096/data/vt/validation.jsonl", [row])
  with object_servers.served("memory") as bucket:
    for path in root.rglob("*.*"):
      if path.is_file():
        name = path.relative_to(root).as_posix()
        as_path(f"{bucket}/{name}").write_bytes(path.read_bytes())
    (ruler,) = questions(f"ruler:path={bucket}/4096")
    assert (ruler.task, ruler.length) == ("vt", 4096)
    options = "lengths=(100,),depths=2"
    stored = questions(f"nolima:path={bucket},{options}")
    assert stored == questions(f"nolima:path={root},{options}")


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("ruler", "path of ruler"),
    ("rulers:path=x", "one of ruler"),
    ("ruler:path=x,length=3", "options of 'ruler'"),
    ("nolima:path=x,lengths=(0,)", "lengths"),
  ],
)
def test_suites_that_are_none(text, words):
  with pytest.raises(OptionError, match=words):
    suite_of(text)


def test_files_that_are_none(tmp_path):
  path = tmp_path / "niah_1" / "validation.jsonl"
  for contents, words in (
    ("{", "line 1: got no JSON"),
    ("[]", "row 1: got list"),
    ('{"input": 1}', "input: got int"),
    ('{"input": "x", "length": 5, "outputs": []}', "outputs"),
  ):
    path.parent.mkdir(exist_ok=True)
    path.write_text(contents)
    with pytest.raises(DataError, match=words):
      questions(f"ruler:path={path}")
  with pytest.raises(DataError, match="without files"):
    questions(f"ruler:path={tmp_path / 'none'}")
  with pytest.raises(OptionError, match="whole prompts"):
    suite_of("ruler:path=x", templates={"": "{context}"})
  templates = tmp_path / "templates.json"
  templates.write_text('{"a": 1}')
  with pytest.raises(DataError, match="an object"):
    suites.templates_of(templates)


# ---------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(suites.Suite):
  """Given questions, whose score is the length of the answer."""

  path: str = "x"
  entries: tuple[LongQuestion, ...] = ()
  shorten: str = "never"

  @property
  def cut(self):
    return self.shorten

  def questions(self, tokenizer):
    return iter(self.entries)

  def score(self, question, completion):
    return 1.0


def long_question(**values):
  fields = {"opening": "<", "context": "abcdefgh" * 50, "closing": ">?"}
  return LongQuestion(id="q", task="t", max_new_tokens=2, **(fields | values))


@functools.cache
def model():
  return checkpoint.create(CONFIG, seed=0)


def prompts_of(monkeypatch, suite, **options):
  """Ids of the prompts that a model is asked, and the answers."""
  prompts = []

  def generate(model, ids, **options):
    prompts.append((list(ids[0]), options))
    return [np.array([97], np.int32)]

  monkeypatch.setattr("ringjax.eval.suites.asking.generate", generate)
  answers = suite_answers(model(), Bytes(chat_template=None), suite, **options)
  return prompts, answers


@pytest.mark.parametrize("cut", ["middle", "context_end"])
def test_prompts_that_do_not_fit_are_shortened(monkeypatch, cut):
  suite = Fixed(entries=(long_question(),), shorten=cut)
  ((ids, _),), (answer,) = prompts_of(monkeypatch, suite, longest=101)
  assert len(ids) == 99 and answer.shortened and answer.tokens == 99
  text = Bytes().decode([i for i in ids if i < 256])
  full_text = long_question().text
  if cut == "middle":
    half = len(text) // 2
    assert text == full_text[:half] + full_text[half - len(text) :]
  else:
    assert text == full_text[: len(text) - 2] + ">?"


def test_prompts_that_may_not_be_shortened_are_refused(monkeypatch):
  suite = Fixed(entries=(long_question(),))
  refused(
    PromptError,
    lambda: prompts_of(monkeypatch, suite),
    "question q", "at most 300", "shortens none",
  )  # fmt: skip
  short = dataclasses.replace(suite, entries=(long_question(context="abc"),))
  (_,), (answer,) = prompts_of(monkeypatch, short)
  assert not answer.shortened


def test_contexts_in_parts(monkeypatch):
  suite = Fixed(entries=(long_question(context="a b\nc d\ne"),))
  readings = {
    "lines": ReadingMode(parts=2, combine="ape:temperature=0.8"),
    "words": ReadingMode(parts=5),
  }
  prompts, answers = prompts_of(monkeypatch, suite, readings=readings)
  decode = Bytes().decode
  for (ids, options), parts in zip(
    prompts,
    (["a b\nc d\n", "e"], ["a ", "b\n", "c ", "d\n", "e"]),
    strict=True,
  ):
    assert decode(ids) == ">?"
    assert [decode(x) for x in options["contexts"]] == parts
    prefix = options["combine"].prefix
    assert decode([i for i in prefix if i < 256]) == "<"
  assert prompts[0][1]["combine"].temperature == 0.8
  assert [x.reading for x in answers] == ["lines", "words"]
  with pytest.raises(OptionError, match="5 words"):
    prompts_of(monkeypatch, suite, readings={"x": ReadingMode(parts=6)})
  with pytest.raises(OptionError, match="nochat"):
    prompts_of(monkeypatch, suite, readings=readings, chat=True)
  with pytest.raises(RingjaxError, match="combine"):
    ReadingMode(parts=2, combine="other")
  with pytest.raises(OptionError, match="max_new_tokens"):
    ReadingMode(options={"max_new_tokens": 5})
  assert suites.asks_chats(Bytes(), {"": ReadingMode()}, None)
  assert not suites.asks_chats(Bytes(), readings, None)
  chats = Fixed(entries=(long_question(context=""),))
  with pytest.raises(OptionError, match="mrcr"):
    prompts_of(monkeypatch, chats, readings=readings)


def test_limits_and_known_answers(monkeypatch):
  question_list = tuple(
    dataclasses.replace(long_question(context="x"), id=f"{n % 2}", task=task)
    for n in range(4)
    for task in "ab"
  )
  suite = Fixed(entries=question_list)
  told = []
  called, answers = prompts_of(
    monkeypatch, suite, limit=3, on_start=lambda *x: told.append(x)
  )
  assert len(called) == len(answers) == 6 and told[0][0] == 6
  # Ids that are repeated stay apart.
  assert len({x.id for x in answers}) == 6
  again, answers_again = prompts_of(
    monkeypatch, suite, limit=3, known=answers[:4],
    on_start=lambda *x: told.append(x),
  )  # fmt: skip
  assert (
    len(again) == 2 and answers_again == answers and told[1] == (6, answers[:4])
  )
  record = json.loads(json.dumps(answers[0].record()))
  assert suites.SuiteAnswer.from_record(record) == answers[0]


def test_means_and_effective_lengths():
  def answers(scores):
    return [
      suites.SuiteAnswer(
        reading="", id=f"{task}{n}{length}", task=task, groups=("g",),
        length=length, score=float(score), tokens=1, shortened=False,
        completion="",
      )
      for (task, length), row in scores.items()
      for n, score in enumerate(row)
    ]  # fmt: skip

  ruler = suite_of("ruler:path=x")
  answer_list = answers({
    ("niah_1", 4096): [1, 1, 1, 1], ("vt", 4096): [0.8],
    ("niah_1", 8192): [1, 0.5], ("vt", 8192): [0.9],
    ("niah_1", 16384): [1], ("vt", 16384): [1],
  })  # fmt: skip
  table = suites.score_table(answer_list, ruler)
  assert table["", "mean"] == pytest.approx({4096: 0.9, 8192: 0.825, 16384: 1})
  assert table["", "g"][4096] == pytest.approx(4.8 / 5)
  # A length counts only if all shorter ones do.
  assert suites.effective_lengths(answer_list, ruler)[""][:2] == (4096, 0.856)
  longbench = suite_of("longbench:path=x")
  by_question = suites.score_table(answer_list, longbench)
  assert by_question["", "mean"][4096] == pytest.approx(4.8 / 5)
  assert suites.effective_lengths(answer_list, longbench) == {}

  nolima = suite_of("nolima:path=x")
  answer_list = answers({
    ("a", 250): [1, 0.5], ("b", 250): [0.5], ("a", 1000): [0.5],
    ("b", 1000): [1], ("a", 2000): [0.8], ("b", 2000): [0.7],
  })  # fmt: skip
  # The base score is that of a at 250 and of b at 1,000 tokens.
  base = (0.75 + 1) / 2
  effective = suites.effective_lengths(answer_list, nolima)[""]
  assert effective.length == 2000
  assert effective.threshold == pytest.approx(0.85 * base)
  assert suites.effective_lengths(answer_list[-2:], nolima) == {}


@pytest.mark.long
def test_answers_are_those_of_generate():
  tokenizer = Bytes(chat_template=None)
  question_list = (long_question(context="a b\nc d\n"),)
  readings = {"whole": ReadingMode(), "parts": ReadingMode(parts=2)}
  text_answer, parts_answer = suite_answers(
    model(), tokenizer, Fixed(entries=question_list), readings=readings
  )
  ids = tokenizer.encode("<a b\nc d\n>?", bos=tokenizer.adds_bos)
  new = rj.infer.generate(model(), [ids], max_new_tokens=2)[0]
  assert text_answer.completion == tokenizer.decode([int(i) for i in new])
  assert text_answer.tokens == len(ids) == parts_answer.tokens
  prefix = tuple(int(i) for i in ids[: len(ids) - 10])
  new = rj.infer.generate(
    model(),
    [tokenizer.encode(">?")],
    contexts=[tokenizer.encode("a b\n"), tokenizer.encode("c d\n")],
    combine=rj.infer.contexts.Parallel(prefix=prefix),
    max_new_tokens=2,
  )[0]
  assert parts_answer.completion == tokenizer.decode([int(i) for i in new])


@pytest.mark.slow
def test_a_suite_by_script(tmp_path):
  """RULER's files with the passkeys that the shipped model finds."""
  task = Passkey(tokenizer=Tokenizer.load(tiny.path()))
  for length in (256, 512):
    for name in ("niah_single_1", "niah_multikey_1"):
      rows = []
      for n in range(2):
        example = task.make(np.random.default_rng([n, length]), length, 0.5)
        rows.append({"index": n, "input": example.prompt, "length": length,
                     "outputs": list(example.wanted)})  # fmt: skip
      write_rows(tmp_path / f"{length}/data/{name}/validation.jsonl", rows)
  out_file = tmp_path / "out.json"
  argv = ("suite", f"--suite=ruler:path={tmp_path}", "--read=chunked",
          "--read=2*parallel", "--cache=int8", "--limit=1",
          "--mesh=seq:1", f"--out={out_file}")  # fmt: skip
  status, out, err = run(*argv)
  assert status == 0, err
  record = json.loads(out_file.read_text())
  assert record["complete"] and len(record["answers"]) == 2 * 4
  lines = {line[:30].rstrip(): line.split()[-2:] for line in out.splitlines()}
  assert lines["chunked int8  niah_single_1"] == ["100.0", "100.0"]
  assert lines["chunked int8  mean"] == ["100.0", "100.0"]
  assert "effective length of chunked int8: 512 tokens (at least 85.6 %" in out
  status, again, err = run(*argv)
  assert status == 0 and again == out and "has 8 of 8 answers already" in err
  for wrong, words in (
    (("suite",), "--suite: got none"),
    (("suite", "--suite=ruler:path=/no"), "without files"),
    ((*argv[:2], "--prefill=chunked"), "--prefill with suite"),
    (("needle", "--read=chunked"), "--read with needle"),
    ((*argv[:2], "--read=3*nothing"), "combine"),
  ):
    status, _, err = run(*wrong)
    assert status == 2 and words in err, err
  assert rj.eval.suites.SUITES["ruler"] is suites.SUITES["ruler"]
