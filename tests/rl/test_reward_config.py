"""Training by rewards as configs of launch.train describe it."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from ml_collections import ConfigDict

import ringjax as rj
from launch import train
from launch.train import default_config, recipe_of
from launch.training import reward_config
from ringjax.data import Bytes
from ringjax.data.text.chat import ChatTemplate
from ringjax.errors import OptionError
from ringjax.rl import GroupObjective
from ringjax.rl.policy_batch import PolicyObjective
from ringjax.train.expert_balance import ExpertBalance, warn_unbalanced
from tests import checkpoints
from tests.helpers import script
from tests.rl.models import CONFIG
from tests.rl.reward_functions import length, more

STAGE = {"steps": 2, "length": 230, "batch": 32}
TASK = {"kind": "multivalue", "values": 2, "length": 210}


def config(rewards=None, stage=None, **entries) -> ConfigDict:
  result = default_config()
  result.stages = (STAGE | (stage or {}),)
  result.rewards = rewards or {"task": TASK, "group": 8}
  for name, value in entries.items():
    result[name] = value
  return result


def training_of(rewards) -> reward_config.RewardTraining:
  settings = config(rewards)
  return reward_config.training_of(settings, recipe_of(settings), Bytes())


@pytest.mark.parametrize(
  "entries",
  [
    dict(z_loss=1e-3),
    dict(products="int8"),
    dict(predict_loss=0.1),
    dict(expert_balance={"loss": 0.1}),
    dict(index_loss=0.5),
    dict(packer="cut"),
    dict(layout="zigzag"),
    dict(strategy="ulysses"),
    dict(sources=({"kind": "chats", "path": "x"},)),
    dict(links={"each": 2, "documents": 8}),
    dict(posttraining={"loss": "dpo"}),
    dict(held_out={"every": 2}),
  ],
  ids=lambda entries: next(iter(entries)),
)
def test_entries_that_nothing_reads_are_refused(entries):
  (name,) = entries
  with pytest.raises(OptionError, match=f"{name}.*rewards"):
    recipe_of(config(**entries))


def test_other_contradictions_are_refused():
  for stage in ({"segments": "separate"}, {"index_warm_up": True}):
    with pytest.raises(OptionError, match=next(iter(stage))):
      recipe_of(config(stage=stage))
  with pytest.raises(OptionError, match="processes"):
    recipe_of(config({"task": TASK, "processes": True}))
  with pytest.raises(OptionError, match="functions"):
    recipe_of(config({"questions": "x.jsonl"}))
  for rewards, words in (
    ({"task": TASK, "objective": {"low": 0.1}}, "rewards.objective.*low"),
    ({"task": TASK | {"count": 3}}, "rewards.task.*count"),
  ):
    settings = config(rewards)
    with pytest.raises(OptionError, match=words):
      reward_config.training_of(settings, recipe_of(settings), Bytes())
  for fields in (dict(predict_loss=0.1), dict(products="int8")):
    with pytest.raises(OptionError, match="rewards"):
      PolicyObjective(**fields)


def test_a_mixture_is_not_told_to_pass_what_is_refused():
  model = rj.models.abstract(checkpoints.config("gpt_oss"))
  with pytest.warns(UserWarning, match="router_aux_loss_coef"):
    warn_unbalanced(model, ExpertBalance())
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    warn_unbalanced(model, PolicyObjective().expert_balance)


def test_questions_of_a_file_with_functions(tmp_path):
  path = tmp_path / "questions.jsonl"
  lines = [{"prompt": f"say {n}", "answer": n} for n in range(3)]
  path.write_text("\n".join(map(json.dumps, lines)) + "\n")
  rewards = {
    "questions": str(path),
    "functions": {"length": "tests.rl.reward_functions:length"},
    "weights": {"length": 0.5},
    "group": 4,
    "max_new_tokens": 20,
    "minibatches": 2,
    "overlong": 5,
    "objective": {"name": "dapo", "truncate": 2.0},
  }
  recipe, questions, environment, chat = training_of(rewards)
  assert environment is None and chat is None
  assert recipe.rewards.by_name == {"length": length}
  assert recipe.rewards.weights == {"length": 0.5}
  # 32 answers of an update, two updates of a batch.
  assert recipe.groups.groups == 16 and recipe.rows == 32
  assert recipe.groups.overlong is not None
  assert recipe.groups.overlong.longest == 20
  assert recipe.objective == GroupObjective.named("dapo", truncate=2.0)
  drawn = [questions(n) for n in range(6)]
  assert sorted(q.example["answer"] for q in drawn[:3]) == [0, 1, 2]
  for question in drawn:
    assert question.example in lines
    assert question.text == question.example["prompt"]
    expected = Bytes().encode(question.text, bos=Bytes().adds_bos)
    assert np.array_equal(question.prompt, expected)


def test_chats_of_a_file_with_an_environment(tmp_path):
  path = tmp_path / "questions.jsonl"
  message = {"role": "user", "content": "say <|user|>"}
  path.write_text(json.dumps({"messages": [message], "turns": 2}))
  rewards = {
    "questions": str(path),
    "functions": {"length": "tests.rl.reward_functions:length"},
    "environment": "tests.rl.reward_functions:more",
    "turns": 3,
    "max_new_tokens": 20,
  }
  recipe, questions, environment, chat = training_of(rewards)
  assert recipe.rollouts.turns == 3 and chat is not None
  assert environment is more
  question = questions(0)
  assert question.messages == (message,)
  expected = ChatTemplate.of(Bytes()).tokens([message], Bytes())
  assert np.array_equal(question.prompt, expected)
  # A template of a file in place of the tokenizer's.
  file = tmp_path / "chat.jinja"
  file.write_text(
    "{% for m in messages %}{{ '<|user|>' + m.content + eos_token }}"
    "{% endfor %}"
  )
  shorter = training_of(rewards | {"template": str(file)}).questions(0)
  assert len(shorter.prompt) < len(question.prompt)
  for changes, words in (
    ({"turns": 1}, "turns"),
    ({"environment": None}, "turns"),
    ({"environment": "math:absent"}, r"rewards\.environment"),
    ({"template": str(tmp_path / "none")}, "template"),
  ):
    with pytest.raises(OptionError, match=words):
      training_of(rewards | changes)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("", "empty"),
    ('{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}', "both"),
    (
      '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}',
      "line 2.*kind",
    ),
    (
      '{"messages": [{"role": "user", "content": "a"}]}\n{"prompt": "a"}',
      "line 2.*kind",
    ),
    ('{"prompt": "a"}\n{"question": "b"}\n', "line 2"),
    ('{"prompt": "a"}\n\n{"prompt": "b"}\nno JSON\n', "line 4"),
  ],
)
def test_files_that_are_no_questions_are_refused(tmp_path, text, words):
  path = tmp_path / "questions.jsonl"
  path.write_text(text)
  name = "tests.rl.reward_functions:length"
  settings = config({"questions": str(path), "functions": {"length": name}})
  with pytest.raises(OptionError, match=words):
    reward_config.training_of(settings, recipe_of(settings), Bytes())


@pytest.mark.parametrize("name", ["absent.module:f", "math:absent", "math", ""])
def test_functions_that_cannot_be_imported_are_refused(tmp_path, name):
  path = tmp_path / "questions.jsonl"
  path.write_text('{"prompt": "a"}\n')
  settings = config({"questions": str(path), "functions": {"f": name}})
  with pytest.raises(OptionError, match=r"rewards\.functions"):
    reward_config.training_of(settings, recipe_of(settings), Bytes())


RECIPE = """
from launch.train import default_config

def get_config():
  config = default_config()
  config.model = {model}
  config.stages = ({{"steps": 2, "length": 120, "batch": 4}},)
  config.rewards = {rewards}
  config.log_every = 1
  return config
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the load_module")
def test_a_training_of_conversations_by_script(tmp_path):
  """Messages by a template of a file, which the model keeps."""
  pytest.importorskip("tensorboardX")
  template = tmp_path / "chat.jinja"
  template.write_text(
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
  )
  questions = tmp_path / "questions.jsonl"
  message = {"role": "user", "content": "say"}
  questions.write_text(json.dumps({"messages": [message], "turns": 2}))
  rewards = {
    "questions": str(questions),
    "functions": {"length": "tests.rl.reward_functions:length"},
    "environment": "tests.rl.reward_functions:more",
    "template": str(template),
    "turns": 2,
    "group": 2,
    "max_new_tokens": 6,
    "objective": {"name": "dapo"},
  }
  path = tmp_path / "recipe.py"
  path.write_text(RECIPE.format(model=CONFIG, rewards=rewards))
  out = tmp_path / "out"
  status, _, err = script(
    train, f"--config={path}", f"--out={out}", "--mesh=seq:1", "--tensorboard"
  )
  assert status == 0, err
  rows = [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]
  assert [row["rollouts_batch"] for row in rows] == [0, 1]
  assert all(row["mismatch_max"] < 1e-5 for row in rows)
  (events,) = (out / "tensorboard").iterdir()
  written = events.read_bytes()
  assert b"reward_length" in written and b"rollouts_flat" in written
  template_text = (out / "model" / "chat_template.jinja").read_text()
  assert template_text == template.read_text()
