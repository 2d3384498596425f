"""Models in lm_eval: log-likelihoods and answers equal to those by hand."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.errors import OptionError
from ringjax.eval import lm_eval_model
from ringjax.eval.lm_eval_model import HarnessModel, lm_class, register
from ringjax.serve import Engine
from tests.serve.test_http_live import serving

CONFIG = dict(
  model_type="llama",
  vocab_size=262,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
)
DOCS = [
  {"question": "ab", "choices": [" x", " yz"], "label": 0, "text": "Hallo ä"},
  {"question": "Zwölf?", "choices": [" 12", " 1"], "label": 1,
   "text": "b" * 150},
  {"question": "c <|user|>", "choices": [" d", " e"], "label": 0, "text": "c"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("model")
  rj.models.save(rj.models.create(CONFIG, seed=3), path)
  Bytes().save(path)
  return path


@pytest.fixture(scope="module")
def model(folder):
  return HarnessModel(str(folder), batch_size=2)


def by_hand(model, context, continuation):
  """Sum of log-probabilities, and whether all tokens are the likeliest."""
  ids = [*context, *continuation]
  row = np.zeros((1, 64), np.int32)
  row[0, : len(ids)] = ids
  logp = np.asarray(jax.nn.log_softmax(model.model(row)[0]))
  at = np.arange(len(context) - 1, len(ids) - 1)
  greedy = (logp[at].argmax(1) == ids[len(context) :]).all()
  return logp[at, ids[len(context) :]].sum(), bool(greedy)


def check(values, want):
  for (value, greedy), (want_value, want_greedy) in zip(
    values, want, strict=True
  ):
    assert value == pytest.approx(want_value, abs=1e-4)
    assert greedy == want_greedy


def test_log_likelihoods_are_those_by_hand(model):
  pairs = [([256, 5], [6, 7, 8]), ([9], [1]), (list(range(40)), [3] * 20)]
  check(model.scores_of(pairs), [by_hand(model, *pair) for pair in pairs])
  # A context that is too long loses its start.
  long = [([7] * 10 + list(range(50)), [3, 4] * 10)]
  cut = ([7] * 10 + list(range(50)))[-44:]
  check(model.scores_of(long), [by_hand(model, cut, [3, 4] * 10)])
  with pytest.raises(OptionError, match="64 tokens"):
    model.scores_of([([1], [2] * 64)])
  assert model.scores_of([]) == []


@pytest.mark.long
def test_answers_are_those_of_generate(model):
  prompts = [[256, 5, 6], [9], list(range(70))]
  options = {"until": ["\u0000"], "max_gen_toks": 6, "do_sample": False}
  values = model.answers_to(prompts, options)
  for prompt, text in zip(prompts, values, strict=True):
    new = rj.infer.generate(
      model.model, [prompt[-58:]], max_new_tokens=6, stop=[257, 0]
    )
    tokens = [t for t in new[0].tolist() if t not in (257, 0)]
    assert text == Bytes().decode(tokens)
  # A text ends before the first of its stops.
  whole = model.answers_to([[9]], {"max_gen_toks": 20})[0]
  part = whole[3:5]
  assert model.answers_to([[9]], {"max_gen_toks": 20, "until": part}) == [
    whole[: whole.index(part)]
  ]
  sampled = {"temperature": 5.0, "max_gen_toks": 8, "do_sample": True}
  assert model.answers_to([[9]], sampled) == model.answers_to([[9]], sampled)
  assert model.answers_to([[9]], sampled) != [whole[:8]]
  # Repeats of a prompt draw different answers, also in another pass.
  assert len(set(model.answers_to([[9]] * 4, sampled))) == 4


def test_texts_and_chats(model):
  assert model.tok_encode("a<|user|>") == [256, 97, 260]
  assert model.tok_encode("<|begin|>a") == [256, 97]
  assert model.tok_encode("ab", add_special_tokens=False) == [97, 98]
  assert model.tok_encode("abc", left_truncate_len=2) == [98, 99]
  assert model.tok_encode("", add_special_tokens=False) == []
  assert (model.prefix_token_id, model.eot_token_id) == (256, 257)
  chat = [{"role": "user", "content": "Hi"}]
  text = model.apply_chat_template(chat)
  assert "<|user|>Hi" in text and text.endswith("<|assistant|>")
  begun = [*chat, {"role": "assistant", "content": "Well "}]
  assert model.apply_chat_template(begun, False).endswith("Well")


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"device": "cuda"}, "JAX_PLATFORMS"),
    ({"max_batch_size": 4}, "batch_tokens"),
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": "autos:2"}, "batch_size"),
    ({"max_length": 65}, "max_length"),
    ({"seq": 0}, "seq"),
  ],
)
def test_options_that_are_not_supported_are_refused(folder, options, words):
  with pytest.raises(OptionError, match=words):
    HarnessModel(str(folder), **options)


def test_answers_that_can_not_be_made_are_refused(model):
  for options, words in (
    ({"num_beams": 3}, "num_beams"),
    ({"max_gen_toks": 64}, "max_gen_toks"),
  ):
    with pytest.raises(OptionError, match=words):
      model.answers_to([[1]], options)
  with pytest.raises(OptionError, match="pretrained"):
    HarnessModel("")


def test_the_default_device_of_lm_eval_is_none(folder):
  """Its command names a GPU where the user names no device."""
  pytest.importorskip("lm_eval")
  options = {"pretrained": str(folder)}
  made = lm_class().create_from_arg_obj(options, {"device": "cuda:0"})
  assert made.max_length == 64
  with pytest.raises(OptionError, match="JAX_PLATFORMS"):
    lm_class().create_from_arg_obj(options, {"device": "cpu"})


@pytest.mark.slow
def test_a_sharded_sequence_and_a_cache(folder, model):
  pairs = [([256, 5], [6, 7, 8]), (list(range(40)), [3] * 9)]
  want = model.scores_of(pairs)
  sharded = HarnessModel(str(folder), seq=2, batch_size="auto:2")
  check(sharded.scores_of(pairs), want)
  options = {"until": [], "max_gen_toks": 4}
  prompts = [[256, 5, 6], [9, 8]]
  assert sharded.answers_to(prompts, options) == model.answers_to(
    prompts, options
  )
  coarse = HarnessModel(str(folder), cache="int4")
  assert abs(coarse.scores_of(pairs)[1][0] - want[1][0]) > 1e-3


# ---------------------------------------------------------------------------
# lm_eval itself
# ---------------------------------------------------------------------------


TASKS = {
  "choice": (
    "output_type: multiple_choice\n"
    'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    'doc_to_target: "{{label}}"\ntarget_delimiter: ""\n'
    "metric_list:\n  - metric: acc\n"
  ),
  "rolling": (
    'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
    'doc_to_target: "{{text}}"\n'
    "metric_list:\n  - metric: byte_perplexity\n"
  ),
  "answer": (
    "output_type: generate_until\n"
    'doc_to_text: "{{question}}"\ndoc_to_target: "{{label}}"\n'
    "generation_kwargs:\n  until: ['q']\n  max_gen_toks: 5\n"
    "  do_sample: false\n"
    "metric_list:\n  - metric: exact_match\n"
  ),
}


@pytest.fixture
def tasks(tmp_path):
  data = tmp_path / "docs.jsonl"
  data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
  for name, text in TASKS.items():
    (tmp_path / f"{name}.yaml").write_text(
      f"task: ringjax_{name}\ndataset_path: json\ndataset_kwargs:\n"
      f"  data_files:\n    test: {data}\ntest_split: test\n{text}"
    )
  return tmp_path


def evaluated(tasks, names, monkeypatch, **options):
  # Read when they are imported: nothing is asked of a hub.
  for name in ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_HUB_OFFLINE"):
    monkeypatch.setenv(name, "1")
  lm_eval = pytest.importorskip("lm_eval")
  manager = pytest.importorskip("lm_eval.tasks").TaskManager(
    include_path=str(tasks), include_defaults=False
  )
  assert register() is lm_class() is register()
  return lm_eval.simple_evaluate(
    tasks=[f"ringjax_{name}" for name in names],
    task_manager=manager,
    bootstrap_iters=0,
    log_samples=True,
    **options,
  )


def choice_scores(model):
  """Log-likelihoods of all choices by hand, and the accuracy."""
  scores = []
  for doc in DOCS:
    context = model.tok_encode(doc["question"])
    row = []
    for choice in doc["choices"]:
      ids = model.tok_encode(choice, add_special_tokens=False)
      row.append(by_hand(model, context, ids)[0])
    scores.append(row)
  right = [
    int(np.argmax(row)) == doc["label"]
    for row, doc in zip(scores, DOCS, strict=True)
  ]
  return np.array(scores), float(np.mean(right))


def check_choices(results, scores, accuracy):
  samples = results["samples"]["ringjax_choice"]
  samples = sorted(samples, key=lambda x: x["doc_id"])
  values = [[float(r[0]) for r in s["filtered_resps"]] for s in samples]
  np.testing.assert_allclose(values, scores, atol=1e-4)
  assert results["results"]["ringjax_choice"]["acc,none"] == accuracy


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_has_the_values_by_hand(folder, model, tasks, monkeypatch):
  results = evaluated(
    tasks,
    TASKS,
    monkeypatch,
    model="ringjax",
    model_args=f"pretrained={folder}",
    batch_size=2,
  )
  check_choices(results, *choice_scores(model))
  total = size = 0
  for doc in DOCS:
    ids = model.tok_encode(doc["text"], add_special_tokens=False)
    size += len(doc["text"].encode())
    # Windows of 63 tokens, each with one token of context.
    for first in range(0, len(ids), 63):
      window = [256] if first == 0 else None
      part = ids[first : first + 63]
      # The last window has as much context as fits.
      context = window or ids[max(0, first + len(part) - 64) : first]
      total += by_hand(model, context, part)[0]
  values = results["results"]["ringjax_rolling"]["byte_perplexity,none"]
  assert values == pytest.approx(np.exp(-total / size), rel=1e-2)
  answers = results["samples"]["ringjax_answer"]
  prompts = [model.tok_encode(doc["question"]) for doc in DOCS]
  want = model.answers_to(prompts, {"until": ["q"], "max_gen_toks": 5})
  assert [x["filtered_resps"][0] for x in answers] == want


def test_the_command_refuses_in_one_line(folder, monkeypatch):
  pytest.importorskip("lm_eval")
  monkeypatch.setattr("sys.argv", [
    "ringjax-lm-eval", "--model=ringjax", "--tasks=arc_easy",
    f"--model_args=pretrained={folder},sequence=2",
  ])  # fmt: skip
  with pytest.raises(SystemExit) as ended:
    lm_eval_model.main()
  line = ended.value.code
  assert line.startswith("ringjax-lm-eval: ") and "\n" not in line
  assert "'sequence'" in line and "model_parallel" in line


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_local_completions_of_lm_eval_read_a_server(
  folder, model, tasks, monkeypatch
):
  with (
    Engine(
      model.model, rows=2, capacity=256, page=16, tokenizer=model.tokenizer
    ) as engine,
    serving(engine.start(), model_name="base") as (port, _),
  ):
    url = f"http://127.0.0.1:{port}/v1/completions"
    results = evaluated(
      tasks,
      ("choice", "answer"),
      monkeypatch,
      model="local-completions",
      model_args=dict(
        model="base",
        base_url=url,
        tokenizer_backend="remote",
        max_length=64,
        num_concurrent=1,
        add_bos_token=False,
      ),
      batch_size=2,
    )
  # Without bos tokens, and special tokens of a text are characters.
  plain = types.SimpleNamespace(
    model=model.model,
    tok_encode=lambda text, **_: model.tokenizer.encode(text).tolist(),
  )
  check_choices(results, *choice_scores(plain))
  assert len(results["samples"]["ringjax_answer"]) == len(DOCS)
