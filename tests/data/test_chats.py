"""Chats and pairs as documents: tokens with a loss, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ringjax.data import Bytes, ChatTemplate, Tokenizer
from ringjax.data.batches.packing import BestFit, Cut, fill
from ringjax.data.chats.answer_tokens import answer_end, answer_tokens
from ringjax.data.chats.chat_documents import (
  ChatDocuments,
  ChatEncoding,
  PairDocuments,
)
from ringjax.data.chats.chat_lines import Chat, read_chats, read_pairs
from ringjax.data.text.tokenizer_files import write_eos_ids
from ringjax.errors import DataError, OptionError, TemplateError
from tests.data import made, templates
from tests.data.test_chat import NOW, model, user
from tests.helpers import refused

CHAT = [
  user("Hello there"),
  model("Hi, friend."),
  user("text < more?"),
  model("Yes: 2 < 3\nand more."),
]
CHATML = templates.QWEN25
GENERATION = CHATML.replace(
  "{{- '<|im_start|>' + message.role + '\\n' + message.content }}\n"
  "  {{- '<|im_end|>' + '\\n' }}",
  """{{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' %}
    {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
  {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
  {{- '\\n' }}""",
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  base = tmp_path_factory.mktemp("tokenizers")
  kinds = sorted({kind for _, kind in templates.ALL.values()})
  return {
    kind: Tokenizer.load(made.folder(kind, base / kind)) for kind in kinds
  }


def template_of(source, tokenizer):
  return ChatTemplate(source, tokenizer.special_names, trusted=True)


def runs(mask):
  """Start and end of each run of True."""
  edges = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0]))
  return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", templates.ALL)
def test_answers_end_with_a_token_at_which_the_model_stops(loaded, name):
  source, kind = templates.ALL[name]
  tokenizer = loaded[kind]
  end = answer_end(template_of(source, tokenizer), tokenizer)
  assert end is not None and tokenizer.window([end]) in source + "".join(
    map(str, tokenizer.special_names.values())
  )


def test_answers_may_end_without_a_special_token():
  tokenizer = Bytes()
  source = (
    "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}"
    "END{% endgeneration %}\n{% endfor %}"
  )
  template = template_of(source, tokenizer)
  assert answer_end(template, tokenizer) is None
  own = template_of(source.replace("END", "<|user|>"), tokenizer)
  end = answer_end(own, tokenizer)
  assert tokenizer.window([end]) == "<|user|>"
  # A template of prompts alone, and one that wants another chat.
  for other in (
    "{{ messages[0].content }}",
    "{{ raise_exception('no system message') }}",
  ):
    assert answer_end(template_of(other, tokenizer), tokenizer) is None


def test_ids_at_which_a_model_stops_are_written_beside_others(tmp_path):
  Bytes().save(tmp_path)
  path = tmp_path / "generation_config.json"
  path.write_text('{"eos_token_id": 257, "temperature": 0.6}')
  write_eos_ids(tmp_path, (257, 259))
  assert Tokenizer.load(tmp_path).eos_ids == (257, 259)
  assert json.loads(path.read_text())["temperature"] == 0.6
  path.unlink()
  write_eos_ids(tmp_path, (257, 260))
  assert Tokenizer.load(tmp_path).eos_ids == (257, 260)


@pytest.mark.parametrize("name", templates.ALL)
def test_answers_are_what_the_model_would_write(loaded, name):
  source, kind = templates.ALL[name]
  tokenizer = loaded[kind]
  template = template_of(source, tokenizer)
  encode = lambda learned: answer_tokens(
    template, CHAT, tokenizer, learned=learned, now=NOW
  )
  ids, answered = encode([1, 3])
  chat_ids = template.tokens(
    CHAT, tokenizer, add_generation_prompt=False, now=NOW
  )
  np.testing.assert_array_equal(ids, chat_ids)
  spans = runs(answered)
  assert len(spans) == 2
  for turn, (start, stop) in zip((1, 3), spans, strict=True):
    text = tokenizer.decode(ids[start:stop])
    # Zephyr marks the opening of an answer, too.
    assert text.removeprefix("<|assistant|>").strip() == CHAT[turn]["content"]
    if not template.marks_answers:
      # An answer ends with the token at which the model stops.
      assert tokenizer.is_special(int(ids[stop - 1]))
      prompt_ids = template.tokens(CHAT[:turn], tokenizer, now=NOW)
      np.testing.assert_array_equal(ids[:start], prompt_ids)
  for number, turn in enumerate((1, 3)):
    assert runs(encode([turn]).answered) == [spans[number]]


def test_marks_and_prefixes_agree(loaded):
  tokenizer = loaded["qwen"]
  marked = template_of(GENERATION, tokenizer)
  assert marked.marks_answers
  by_marks, by_prefixes = (
    answer_tokens(template, CHAT, tokenizer, learned=[1, 3])
    for template in (marked, template_of(CHATML, tokenizer))
  )
  np.testing.assert_array_equal(by_marks.ids, by_prefixes.ids)
  np.testing.assert_array_equal(by_marks.answered, by_prefixes.answered)


THOUGHT = "<think>\nhm\n</think>\n\nHi."


def test_an_answer_that_later_messages_change_is_refused(loaded):
  tokenizer = loaded["qwen"]
  template = template_of(templates.QWEN3, tokenizer)
  chat = [user("Hello"), model(THOUGHT), user("More?"), model(THOUGHT)]
  encode = lambda learned: answer_tokens(
    template, chat, tokenizer, learned=learned
  )
  refused(TemplateError, lambda: encode([1, 3]), "message 1", "turns='each'")
  last = encode([3])
  assert tokenizer.decode(last.ids[last.answered]).startswith("<think>\nhm")
  # The thought of an earlier answer is not in the whole chat.
  assert tokenizer.decode(last.ids).count("hm") == 1
  encoding = ChatEncoding(tokenizer=tokenizer, template=template, length=99)
  chats = [Chat("a:1", chat, [1, 3])]
  documents = ChatDocuments(chats, encoding, turns="each")
  assert len(documents) == 2
  for number in range(2):
    ids, weights = documents.read(number, 0, 99)
    assert "hm" in tokenizer.decode(ids[weights > 0])


def test_marks_that_later_messages_move_are_refused():
  """The mark of the last answer is not taken for that of another one."""
  tokenizer = Bytes()
  template = ChatTemplate(
    "{% for x in messages %}[{{ x.role }}]"
    "{% if loop.last and x.role != 'user' %}"
    "{% generation %}{{ x.content }}{% endgeneration %}"
    "{% else %}{{ x.content }}{% endif %}{% endfor %}",
    tokenizer.special_names,
  )
  chat = [user("a"), model("b"), user("c"), model("d")]
  encode = lambda messages, learned: answer_tokens(
    template, messages, tokenizer, learned=learned
  )
  for learned in ([1, 3], [1]):
    refused(TemplateError, lambda x=learned: encode(chat, x), "message 1")
  encoding = ChatEncoding(tokenizer=tokenizer, template=template, length=99)
  documents = ChatDocuments([Chat("a:1", chat, [1])], encoding, turns="each")
  ids, weights = documents.read(0, 0, 99)
  assert tokenizer.decode(ids[weights > 0]) == "b"


def test_an_answer_to_nothing_is_refused_by_name(loaded):
  template = template_of(CHATML, loaded["qwen"])
  refused(
    TemplateError,
    lambda: answer_tokens(template, [model("a")], loaded["qwen"], learned=[0]),
    "before any other message",
    '"weight": 0',
  )


def test_a_mark_inside_of_a_token_is_refused(loaded):
  tokenizer = loaded["qwen"]
  glued = GENERATION.replace(
    "{%- generation %}", "{{- 'st' }}{%- generation %}"
  )
  template = template_of(glued, tokenizer)
  encode = lambda answer: answer_tokens(
    template, [user("Hello"), model(answer)], tokenizer, learned=[1]
  )
  ids, answered = encode("\nr")
  assert tokenizer.decode(ids[answered]) == "\nr"
  assert len(tokenizer.encode("str")) == 1
  refused(TemplateError, lambda: encode("r"), "{% generation %}")


def test_calls_and_results_of_tools(loaded):
  tokenizer = loaded["qwen"]
  template = template_of(templates.QWEN3, tokenizer)
  call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
  chat = [
    user("Add"),
    model("", tool_calls=[call]),
    {"role": "tool", "content": "3"},
    model("Three"),
  ]
  tools = [{"type": "function", "function": {"name": "f"}}]
  ids, answered = answer_tokens(
    template, chat, tokenizer, learned=[1, 3], tools=tools
  )
  texts = [tokenizer.decode(ids[a:b]) for a, b in runs(answered)]
  assert '{"name": "f", "arguments": {"x": 1}}' in texts[0]
  assert texts[1].strip() == "Three"
  assert "# Tools" in tokenizer.decode(ids)


def written(path, *lines) -> list[str]:
  path.write_text("\n".join(json.dumps(line) for line in lines))
  return [str(path)]


def test_lines_are_chats(tmp_path):
  call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
  paths = written(
    tmp_path / "a.jsonl",
    {
      "messages": [
        user("a"),
        model("b", weight=0),
        user("c"),
        model(None, tool_calls=[call]),
      ],
      "tools": [{"type": "function"}],
    },
  )
  (chat,) = read_chats(paths)
  assert chat.learned == [3]
  assert "weight" not in chat.messages[1]
  arguments = chat.messages[3]["tool_calls"][0]["function"]["arguments"]
  assert arguments == {"x": 1}
  assert chat.tools == [{"type": "function"}]


def test_nulls_are_missing_entries(tmp_path):
  """Tables write null for what only some messages have."""
  nulls = {"weight": None, "tool_calls": None, "reasoning_content": None}
  line = {"messages": [user("a") | nulls, model("b") | nulls], "tools": None}
  (chat,) = read_chats(written(tmp_path / "a.jsonl", line))
  assert chat[1:] == ([user("a"), model("b")], [1], None)
  line = pair_line()
  line = {
    name: [message | nulls for message in messages]
    for name, messages in line.items()
  }
  (pair,) = read_pairs(written(tmp_path / "b.jsonl", line))
  assert pair.prompt == [user("question")]
  assert pair.chosen == [model("yes")]


def test_pairs_without_a_prompt_share_their_beginning(tmp_path):
  paths = written(
    tmp_path / "a.jsonl",
    {"chosen": [user("a"), model("b")], "rejected": [user("a"), model("c")]},
    {"prompt": "x", "chosen": " y", "rejected": " z"},
  )
  first, second = read_pairs(paths)
  assert first.prompt == [user("a")]
  assert first.chosen == [model("b")]
  assert second[1:4] == ("x", " y", " z")


@pytest.mark.parametrize(
  ("read", "line", "words"),
  [
    (read_chats, [1], ("messages",)),
    (read_chats, {"messages": []}, ("messages",)),
    (read_chats, {"messages": [user("a")]}, ("assistant",)),
    (read_chats, {"messages": [user("a"), model("b", weight=0)]}, ("weight",)),
    (read_chats, {"messages": [user("a"), model("b", weight=2)]}, ("weight",)),
    (read_chats, {"messages": [{"content": "a"}]}, ("role",)),
    (
      read_chats,
      {
        "messages": [
          model(None, tool_calls=[{"function": {"arguments": "{"}}]),
        ]
      },
      ("arguments",),
    ),
    (read_pairs, {"prompt": "a", "chosen": "b", "rejected": "b"}, ("equal",)),
    (read_pairs, {"chosen": "b", "rejected": "c"}, ("prompt",)),
    (
      read_pairs,
      {"prompt": [user("a")], "chosen": [user("b")], "rejected": [model("c")]},
      ("chosen", "assistant"),
    ),
    (read_pairs, {"prompt": [user("a")], "chosen": "b"}, ("chosen",)),
    (
      read_pairs,
      {
        "prompt": [user("a")],
        "chosen": [model("b", weight=0), model("c")],
        "rejected": [model("d")],
      },
      ("chosen[0]", "weight 0"),
    ),
    (read_pairs, {"chosen": [model("b")], "rejected": [model("c")]},
     ("prompt",)),
  ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, read, line, words):
  paths = written(tmp_path / "bad.jsonl", line)
  refused(DataError, lambda: [*read(paths)], "bad.jsonl:1", *words)
  errors: list[str] = []
  assert not [*read(paths, on_bad=errors.append)]
  assert len(errors) == 1


def pair_line(chosen="yes", rejected="no", prompt="question"):
  return {
    "prompt": [user(prompt)],
    "chosen": [model(chosen)],
    "rejected": [model(rejected)],
  }


def test_both_answers_of_a_pair_are_segments_of_a_row(tmp_path):
  tokenizer = Bytes(chat_template=CHATML)
  lines = [pair_line(), pair_line("long " * 3, "n", "q"), pair_line("a", "bc")]
  pairs = read_pairs(written(tmp_path / "a.jsonl", *lines))
  length = 2000
  documents = PairDocuments(
    pairs, ChatEncoding(tokenizer=tokenizer, length=length)
  )
  assert len(documents) == 3
  plan = BestFit().plan(documents.lengths, length)
  rows = fill(plan, length, documents.read)
  assert rows.segments.max() == 6
  answers = []
  for segment in range(1, 7):
    slots = np.flatnonzero(rows.segments[0] == segment)
    np.testing.assert_array_equal(
      rows.positions[0, slots], np.arange(len(slots))
    )
    assert rows.weights[0, slots[-1]] == 0
    np.testing.assert_array_equal(
      rows.labels[0, slots[:-1]], rows.tokens[0, slots[1:]]
    )
    learned = slots[rows.weights[0, slots] > 0]
    answers.append(tokenizer.decode(rows.labels[0, learned]))
  ends = {line["chosen"][0]["content"] for line in lines}
  assert {a.partition("<|im_end|>")[0] for a in answers[::2]} == ends
  refused(
    DataError,
    lambda: fill(Cut().plan(documents.lengths, 50), 50, documents.read),
    "packer",
  )


def test_texts_without_a_template(tmp_path):
  tokenizer = Bytes(chat_template=None)
  line = {"prompt": "one", "chosen": " two", "rejected": " three"}
  documents = PairDocuments(
    read_pairs(written(tmp_path / "a.jsonl", line)),
    ChatEncoding(tokenizer=tokenizer, length=99),
  )
  ids, weights, segments = documents.read(0, 0, 99)
  for segment, text in ((1, " two"), (2, " three")):
    answer = ids[(segments == segment) & (weights > 0)]
    assert tokenizer.decode(answer) == text
    assert answer[-1] in tokenizer.eos_ids


@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_examples_that_are_too_long(tmp_path, kind):
  tokenizer = Bytes(chat_template=CHATML)
  path = tmp_path / "a.jsonl"
  # The system's message that the template adds takes some 60 bytes.
  if kind == "chats":
    paths = written(
      path,
      {"messages": [user("a"), model("b")]},
      {"messages": [user("a"), model("b" * 500)]},
      {"messages": [user("a" * 500), model("b")]},
    )
    make = lambda **options: ChatDocuments(
      read_chats(paths), ChatEncoding(tokenizer=tokenizer, **options)
    )
    length = 200
  else:
    paths = written(
      path,
      pair_line(),
      pair_line("b" * 500, "c"),
      pair_line("b", "c", "a" * 500),
    )
    make = lambda **options: PairDocuments(
      read_pairs(paths), ChatEncoding(tokenizer=tokenizer, **options)
    )
    length = 400
  refused(DataError, lambda: make(length=length), "2 examples", "a.jsonl:")
  short = make(length=length, too_long="skip")
  assert len(short) == 1
  assert short.counts.notes() == ["2 of 3 examples left out, longer than a row"]
  cut = make(length=length, too_long="truncate")
  assert cut.lengths.max() <= length
  assert (cut.counts.used, cut.counts.truncated, cut.counts.too_long) == (
    2,
    1,
    1,
  )
  refused(DataError, lambda: make(length=3, too_long="skip"), "none to learn")


def test_what_a_template_refuses_is_named_or_counted(tmp_path):
  tokenizer = Bytes(chat_template=templates.GEMMA)
  paths = written(
    tmp_path / "a.jsonl",
    {"messages": [{"role": "system", "content": "s"}, model("b")]},
    {"messages": [user("a"), model("b")]},
  )
  encoding = lambda **options: ChatEncoding(
    tokenizer=tokenizer, length=99, **options
  )
  make = lambda **options: ChatDocuments(read_chats(paths), encoding(**options))
  refused(DataError, make, "a.jsonl:1", "System role not supported")
  documents = make(invalid="skip")
  assert len(documents) == 1
  assert "a.jsonl:1" in documents.counts.notes()[0]
  plain = Bytes(chat_template=None)
  refused(
    DataError,
    lambda: ChatDocuments(
      read_chats(paths), ChatEncoding(tokenizer=plain, length=99)
    ),
    "chat template",
  )
  refused(OptionError, lambda: encoding(too_long="cut"), "too_long")
  refused(OptionError, lambda: encoding(date="1. May"), "date")
  refused(
    OptionError, lambda: ChatDocuments([], encoding(), turns="some"), "turns"
  )


def test_a_template_that_writes_the_date_needs_one(loaded):
  tokenizer = loaded["llama3"]
  template = template_of(templates.LLAMA3, tokenizer)
  make = lambda **options: ChatDocuments(
    [Chat("a:1", CHAT[:2], [1])],
    ChatEncoding(tokenizer=tokenizer, template=template, length=200, **options),
  )
  refused(DataError, make, "date")
  ids, _ = make(date="2026-02-03").read(0, 0, 200)
  assert "03 Feb 2026" in tokenizer.decode(ids)
