"""Training by rewards as a config of launch.train describes it.

Entries of `rewards`:

  task        kind: one of ringjax.data.tasks.needle.TASKS, length: tokens of
              prompt and answer; and the task's other arguments. Its score is
              the reward.
  questions   in place of a task: a file of JSON lines, each with a prompt, or
              with messages for the chat template; the line is the example of
              the functions.
  template    file of a chat template in place of the tokenizer's; date and
              variables as in `rj.rl.ChatTurns`.
  turns       as in `rj.rl.RolloutConfig`, with
  environment "package.module:f", a function (example, answers) to the text or
              messages that follow, or None at the end.
  functions   names of functions by a name each, {"exact": "package.module:f"},
              with `questions`; weights: their factors.
  group, max_new_tokens, temperature
              as in `rj.rl.RolloutConfig`.
  minibatches, epochs, age, refill, drop_truncated
              as in `rj.rl.GroupConfig`.
  overlong    tokens over which the reward falls by 1 before max_new_tokens.
  objective   name: grpo, dr_grpo, dapo or gspo; and fields of
              `rj.rl.GroupObjective`.
  workers, processes, timeout_s
              as in `rj.rl.RewardConfig`.

The first stage has the number of updates (steps), the tokens of a row (length),
the answers of an update (batch) and their micro-batches (accumulate).
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import ringjax as rj
from ringjax.checks import one_of
from ringjax.data.tasks.needle import TASKS, Task
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError
from ringjax.paths import as_path
from ringjax.rl import (
  ChatTurns,
  Environment,
  Question,
  QuestionSource,
  RewardRecipe,
)
from ringjax.train.recipe import Recipe

from ..shared import sources

_ROLLOUTS = ("group", "max_new_tokens", "temperature", "turns")
_GROUPS = ("minibatches", "epochs", "age", "refill", "drop_truncated")
_CHAT = ("template", "date", "variables")
_CALLS = ("workers", "processes", "timeout_s")
ENTRIES = (
  *("task", "questions", "functions", "weights", "overlong", "objective"),
  *("environment",),
  *_CHAT,
  *_ROLLOUTS,
  *_GROUPS,
  *_CALLS,
)
# Entries of a config and of its stage that a training by rewards reads. Others
# must have their defaults.
_READ = (
  *("model", "init_from", "rules", "start", "tokenizer", "stages", "seed"),
  *("optimizer", "remat", "dtype", "save_dtype", "lora", "weights", "merge"),
  *("rewards", "log_every", "save_every", "keep", "most_skipped"),
  *("most_unsaved", "timeout_s", "replay_every"),
)
_READ_OF_STAGE = ("steps", "length", "batch", "accumulate")


def check(config: Any, defaults: Any) -> None:
  """Refuses entries of a config that contradict a training by rewards.

  Args:
    config: Config of launch.train, with `rewards`.
    defaults: The config without changes.

  Raises:
    OptionError: If an entry is unknown, missing, or of another training.
  """
  entry = json.loads(config.rewards.to_json())
  unknown = sorted(set(entry) - set(ENTRIES))
  if unknown:
    raise OptionError(
      "rewards",
      ", ".join(unknown),
      f"some of {', '.join(ENTRIES)}",
      "use these names",
    )
  if ("task" in entry) == ("questions" in entry):
    raise OptionError(
      "rewards",
      "a task and questions" if "task" in entry else "no task",
      "a task, or questions with functions",
      "set --config.rewards.task.kind=multivalue, for instance",
    )
  if ("questions" in entry) != bool(entry.get("functions")):
    raise OptionError(
      "rewards.functions",
      f"{entry.get('functions')}",
      "functions with questions; a task has its own score",
      "set functions={'exact': 'package.module:function'}",
    )
  if "task" in entry and entry.get("processes"):
    raise OptionError(
      "rewards.processes",
      "processes with a task, whose score is quick",
      "threads, or questions with functions",
      "leave processes out",
    )
  if "task" in entry:
    for name in (*_CHAT, "environment"):
      if entry.get(name):
        raise OptionError(
          f"rewards.{name}",
          f"{entry[name]!r} with a task, whose prompts are plain texts",
          "it with questions",
          f"leave {name} out, or pass questions with functions",
        )
  has_turns = entry.get("turns") not in (None, 1)
  if bool(entry.get("environment")) != has_turns:
    raise OptionError(
      "rewards.turns",
      f"{entry.get('turns', 1)} with environment={entry.get('environment')}",
      "several turns with an environment, one without",
      "pass both, or leave both out",
    )
  others = [
    name
    for name in defaults
    if name not in _READ and config[name] != defaults[name]
  ]
  if len(config.stages) > 1:
    others.append("stages")
  others += [
    f"stages[0].{name}"
    for name in config.stages[0]
    if name not in _READ_OF_STAGE
  ]
  if others:
    raise OptionError(
      others[0],
      f"{', '.join(others)} in a training by rewards"[:120],
      "one stage of all parameters or adapters, and the loss of the policy",
      "leave it out",
    )


class RewardTraining(NamedTuple):
  """A training by rewards, as `rj.rl.train` takes it.

  Fields:
    recipe: Settings of the training.
    questions: Questions.
    environment: Function that continues conversations, or None.
    chat: Chat template of the conversations, or None.
  """

  recipe: RewardRecipe
  questions: QuestionSource
  environment: Environment | None = None
  chat: ChatTurns | None = None


def training_of(
  config: Any, recipe: Recipe, tokenizer: AnyTokenizer
) -> RewardTraining:
  """The recipe of a training by rewards, its questions and conversations.

  Args:
    config: Config of launch.train, with `rewards`.
    recipe: The config's other settings.
    tokenizer: Tokenizer of the model.

  Raises:
    OptionError: If a value is out of range, or a name is unknown.
  """
  entry = json.loads(config.rewards.to_json())
  (stage,) = recipe.stages
  pick = lambda names: {name: entry[name] for name in names if name in entry}
  rollouts = rj.rl.RolloutConfig(**pick(_ROLLOUTS), seed=recipe.seed)
  minibatches = entry.get("minibatches", 1)
  answers = stage.batch * minibatches
  if answers % rollouts.group:
    raise OptionError(
      "batch",
      f"{stage.batch} answers in groups of {rollouts.group}",
      "a multiple of the group",
      f"set --config.stages[0].batch={rollouts.group * 8}, for instance",
    )
  overlong = chat = environment = None
  if entry.get("overlong"):
    overlong = rj.rl.OverlongPenalty(
      longest=rollouts.max_new_tokens, margin=entry["overlong"]
    )
  if "task" in entry:
    functions, questions = _of_task(entry["task"], tokenizer, recipe.seed)
  else:
    functions = {
      name: _named(path, "functions")
      for name, path in entry["functions"].items()
    }
    items, chat = _of_file(entry, tokenizer)
    questions = rj.rl.Listed(items=items, seed=recipe.seed)
    if entry.get("environment"):
      environment = _named(entry["environment"], "environment")
  objective = dict(entry.get("objective") or {})
  dtype = recipe.objective.dtype
  reward_recipe = RewardRecipe(
    steps=stage.steps,
    rewards=rj.rl.RewardConfig(
      functions=functions, weights=entry.get("weights"), **pick(_CALLS)
    ),
    rollouts=rollouts,
    groups=rj.rl.GroupConfig(
      groups=answers // rollouts.group,
      length=stage.length,
      overlong=overlong,
      **pick(_GROUPS),
    ),
    objective=_built(
      "objective",
      functools.partial(
        rj.rl.GroupObjective.named, objective.pop("name", "grpo")
      ),
      objective,
    ),
    optimizer=recipe.optimizer,
    accumulate=stage.accumulate,
    dtype=None if dtype is None else np.dtype(dtype).name,
    remat=recipe.remat,
    lora=recipe.lora,
    loop_config=recipe.loop_config,
  )
  return RewardTraining(reward_recipe, questions, environment, chat)


def _of_task(
  entry: Mapping[str, Any], tokenizer: AnyTokenizer, seed: int
) -> tuple[dict[str, Any], QuestionSource]:
  """Score of a task as the reward, and its examples as questions."""
  options = dict(entry)
  kind = one_of("rewards.task.kind", options.pop("kind", None), TASKS)
  length = options.pop("length", 512)
  make = functools.partial(
    TASKS[kind], tokenizer=tokenizer, filler=sources.filler()
  )
  task: Task = _built("task", make, options)

  def question(number: int) -> Question:
    example = task.make(np.random.default_rng((seed, number)), length)
    prompt = tokenizer.encode(example.prompt, bos=tokenizer.adds_bos)
    return Question(prompt=prompt, text=example.prompt, example=example)

  def score(prompt: str, answer: str, example: Any) -> float:
    del prompt
    return task.score(example, answer)

  return {kind: score}, question


def _of_file(
  entry: Mapping[str, Any], tokenizer: AnyTokenizer
) -> tuple[list[Question], ChatTurns | None]:
  """Questions of JSON lines, and the chat template if they have messages.

  Args:
    entry: Entries of `rewards`.
    tokenizer: Tokenizer of the model.
  """
  path = entry["questions"]
  questions: list[Question] = []
  chat: ChatTurns | None = None
  with as_path(path, "rewards.questions").open("rb") as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      place = f"line {number} of {path[-60:]}"
      example = _json(line)
      entries = example if isinstance(example, dict) else {}
      prompt, messages = entries.get("prompt"), entries.get("messages")
      if isinstance(messages, list) and messages and prompt is None:
        if questions and chat is None:
          raise _mixed(place)
        if chat is None:
          chat = ChatTurns(
            template=sources.chat_template(tokenizer, entry.get("template")),
            tokenizer=tokenizer,
            variables=entry.get("variables") or {},
            date=entry.get("date"),
          )
        questions.append(Question.of_chat(messages, chat, example=example))
        continue
      if not isinstance(prompt, str) or not prompt or messages is not None:
        raise OptionError(
          "rewards.questions",
          f"{place} with {'both' if prompt and messages else 'neither'}",
          'JSON objects with a text "prompt", or with a list "messages"',
          "write one of them, or remove the line",
        )
      if chat is not None:
        raise _mixed(place)
      ids = tokenizer.encode(prompt, bos=tokenizer.adds_bos)
      questions.append(Question(prompt=ids, text=prompt, example=example))
  if not questions:
    raise OptionError(
      "rewards.questions",
      f"{path[-80:]}, which is empty",
      "one or more JSON lines with a prompt or messages",
      "add questions",
    )
  for name in _CHAT:
    if entry.get(name) and chat is None:
      raise OptionError(
        f"rewards.{name}",
        f"{entry[name]!r} with questions of plain prompts",
        "it with questions of messages, which a chat template writes",
        f"leave {name} out, or write messages",
      )
  return questions, chat


def _mixed(place: str) -> OptionError:
  return OptionError(
    "rewards.questions",
    f"{place} of another kind than the lines before it",
    "prompts in all lines, or messages in all",
    "write all questions in one way",
  )


def _json(line: bytes | str) -> object:
  """Value of a line, or None if it is no JSON."""
  try:
    return json.loads(line)
  except ValueError:
    return None


def _built(
  name: str, make: Callable[..., Any], entry: Mapping[str, Any]
) -> Any:
  """`make` with the entries of a config.

  Raises:
    OptionError: If it has no such entry, or lacks one.
  """
  try:
    return make(**entry)
  except TypeError as error:
    raise OptionError(
      f"rewards.{name}",
      f"{', '.join(entry)} ({str(error)[:160]})",
      "the arguments that it has",
      "see launch/training/reward_config.py",
    ) from None


def _named(path: str, entry: str) -> Callable[..., Any]:
  """Function `package.module:name`.

  Raises:
    OptionError: If it can't be imported.
  """
  module, _, name = path.partition(":")
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise OptionError(
      f"rewards.{entry}",
      f"{path!r} ({type(error).__name__})",
      "package.module:function, importable here",
      "add its folder to PYTHONPATH",
    ) from None
