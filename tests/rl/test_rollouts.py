"""Rollouts: log-probabilities, shared prompts, turns, weights handed over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from ringjax.data.text.chat import ChatTemplate
from ringjax.errors import (
  CheckpointMismatchError,
  OptionError,
  PromptError,
  SamplingError,
  TemplateError,
)
from ringjax.nn.one_order import OneOrderParallel
from ringjax.nn.sharding_context import ContextParallel
from ringjax.rl import (
  ChatTurns,
  Question,
  RolloutConfig,
  Rollouts,
  policy_logprobs,
)
from ringjax.rl.policy_batch import answer_rows
from ringjax.serve import Engine, Request, RowSampling
from ringjax.train.batch import Batch
from tests.rl.models import CONFIG

LONGEST, PAGE = 200, 16


@pytest.fixture(scope="module")
def model():
  return rj.models.create(CONFIG, seed=3)


@pytest.fixture(scope="module")
def engine(model):
  with Engine(
    model,
    rows=8,
    capacity=2048,
    longest=LONGEST,
    page=PAGE,
    one_order=True,
    tokenizer=Bytes(),
  ) as made:
    yield made


def questions(*lengths: int) -> list[Question]:
  draw = np.random.default_rng(0)
  return [
    Question(prompt=draw.integers(0, 256, n).astype(np.int32)) for n in lengths
  ]


def scored(model, rows, attend, temperature=1.0) -> np.ndarray:
  batch = Batch(
    rows.tokens, rows.labels, rows.mask, None, jnp.asarray(rows.segments)
  )
  score = jax.jit(
    policy_logprobs, static_argnums=2, static_argnames="temperature"
  )
  return np.asarray(score(model, batch, attend, temperature=temperature))


@pytest.mark.parametrize(
  "temperature", [1.0, pytest.param(0.7, marks=pytest.mark.long)]
)
def test_log_probabilities_are_the_forward_pass_bit_for_bit(
  model, engine, temperature
):
  """Prompts of one token, of odd lengths and of more than a tile of keys."""
  asked = questions(1, 37, 150)
  config = RolloutConfig(group=2, max_new_tokens=13, temperature=temperature)
  groups = Rollouts(engine, config).sample(asked)
  rows = answer_rows(asked, groups, np.zeros((3, 2), np.float32), 170)
  mask = rows.mask > 0
  assert mask.sum() == sum(x.tokens.size for group in groups for x in group)
  exact = scored(model, rows, OneOrderParallel(), temperature)
  assert np.array_equal(exact[mask], rows.behaviour[mask])
  # Other orders of the sums differ by rounding.
  near = scored(model, rows, ContextParallel(), temperature)
  np.testing.assert_allclose(near[mask], rows.behaviour[mask], atol=2e-5)


@pytest.mark.long
def test_log_probabilities_of_32_rows_are_the_forward_pass_bit_for_bit(model):
  """Compilers sum and round arrays of many rows in orders of their own."""
  asked = questions(150, 131, 162, 145)
  config = RolloutConfig(group=8, max_new_tokens=6)
  with Engine(
    model, rows=32, capacity=6400, longest=LONGEST, page=PAGE, one_order=True
  ) as engine:
    groups = Rollouts(engine, config).sample(asked)
  rows = answer_rows(asked, groups, np.zeros((4, 8), np.float32), 170)
  mask = rows.mask > 0
  assert mask.sum() == 32 * 6
  exact = scored(model, rows, OneOrderParallel())
  assert np.array_equal(exact[mask], rows.behaviour[mask])


def test_a_group_computes_its_prompt_once(engine):
  length, group = 75, 5
  config = RolloutConfig(group=group, max_new_tokens=3, seed=1)
  before = engine.counters.prompt_tokens, engine.counters.cached_tokens
  (answers,) = Rollouts(engine, config).sample(questions(length))
  computed = engine.counters.prompt_tokens - before[0]
  cached = engine.counters.cached_tokens - before[1]
  shared = length // PAGE * PAGE
  assert computed == length + (group - 1) * (length - shared)
  assert cached == (group - 1) * shared
  assert len({x.tokens.tobytes() for x in answers}) > 1


def test_answers_depend_on_their_number_alone(engine):
  config = RolloutConfig(group=2, max_new_tokens=6)
  asked = questions(9, 20, 33)
  whole = Rollouts(engine, config).sample(asked, first=4)
  alone = Rollouts(engine, config).sample(asked[2:], first=6)
  for a, b in zip(whole[2], alone[0], strict=True):
    assert np.array_equal(a.tokens, b.tokens)
    assert np.array_equal(a.logprobs, b.logprobs)
  other = Rollouts(engine, config).sample(asked[2:], first=7)
  assert any(
    not np.array_equal(a.tokens, b.tokens)
    for a, b in zip(alone[0], other[0], strict=True)
  )


def test_turns_with_an_environment(model, engine):
  """Tokens that the environment wrote have no loss."""
  seen = []

  def environment(example, answers):
    seen.append((example, len(answers)))
    return None if len(answers) == example else f"<{len(answers)}>"

  asked = [
    Question(prompt=[5, 6, 7], example=2),
    Question(prompt=[8] * 21, example=1),
  ]
  # Each answer ends after its first token.
  config = RolloutConfig(
    group=2, max_new_tokens=4, turns=3, stop=tuple(range(262))
  )
  with pytest.raises(OptionError, match="turns"):
    Rollouts(engine, config)
  groups = Rollouts(engine, config, environment=environment).sample(asked)
  assert set(seen) == {(2, 1), (2, 2), (1, 1)}
  for group, turns in zip(groups, (2, 1), strict=True):
    for rollout in group:
      assert len(rollout.answers) == turns and rollout.finish == "stop"
      # One token a turn, and three bytes of the environment between two.
      assert rollout.sampled.tolist() == (
        [1, 0, 0, 0, 1] if turns == 2 else [1]
      )
      assert not rollout.logprobs[rollout.sampled == 0].any()
  rows = answer_rows(asked, groups, np.zeros((2, 2), np.float32), 40)
  assert rows.mask.sum() == 2 * (2 + 1)
  exact = scored(model, rows, OneOrderParallel())
  at = rows.mask > 0
  assert np.array_equal(exact[at], rows.behaviour[at])


def test_an_engine_takes_weights_without_a_copy(model, engine):
  """Its answers are then those of an engine made with them."""
  config = RolloutConfig(group=2, max_new_tokens=8)
  asked = questions(40)
  rollouts = Rollouts(engine, config)
  first = rollouts.sample(asked)[0]
  other = jax.tree.map(lambda x: x * 1.5, model)
  rollouts.take_weights(other)
  for a, b in zip(
    jax.tree.leaves(engine.model), jax.tree.leaves(other), strict=True
  ):
    assert a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()
  cached = engine.counters.cached_tokens
  second = rollouts.sample(asked)[0]
  # The prompt is computed again: its keys were of other weights.
  assert engine.counters.cached_tokens - cached == 32
  rollouts.take_weights(model)
  third = rollouts.sample(asked)[0]
  for a, b, c in zip(first, second, third, strict=True):
    assert np.array_equal(a.logprobs, c.logprobs)
    assert not np.array_equal(a.logprobs, b.logprobs)


def test_weights_that_do_not_fit_are_refused(engine):
  wider = rj.models.abstract(dict(CONFIG, vocab_size=300))
  with pytest.raises(CheckpointMismatchError, match="vocabulary"):
    engine.take_weights(wider)
  deeper = rj.models.abstract(dict(CONFIG, model_type="qwen3", head_dim=8))
  with pytest.raises(CheckpointMismatchError, match="parameters"):
    engine.take_weights(deeper)
  handle = engine.submit(Request(prompt=[1, 2], max_new_tokens=2))
  with pytest.raises(OptionError, match="1 requests"):
    engine.take_weights(engine.model)
  handle.cancel()
  engine.run()


def test_distributions_that_the_model_has_not_are_refused():
  for options in (
    dict(top_k=5),
    dict(top_p=0.9),
    dict(min_p=0.1),
    dict(repetition_penalty=1.2),
    dict(logit_bias={3: 1.0}),
    dict(temperature=0.0),
  ):
    sampling = RowSampling(**dict(temperature=1.0) | options)
    with pytest.raises(OptionError, match="tempered"):
      Request(prompt=[1], max_new_tokens=1, tempered=True, sampling=sampling)


@pytest.mark.parametrize(
  "fields",
  [
    dict(group=1),
    dict(temperature=0.0),
    dict(temperature=float("nan")),
    dict(turns=0),
    dict(max_new_tokens=0),
  ],
)
def test_configs_are_checked(fields):
  with pytest.raises((OptionError, SamplingError)):
    RolloutConfig(**fields)


def test_caches_that_are_not_exact_are_refused(model):
  with (
    Engine(
      model, rows=2, capacity=256, longest=64, cache_kind="int8"
    ) as engine,
    pytest.raises(OptionError, match="exact keys"),
  ):
    Rollouts(engine, RolloutConfig())


def test_one_order_is_refused_where_it_does_not_hold(model):
  mesh = rj.make_mesh((2,), ("data",), devices=jax.devices()[:2])
  placed = rj.models.create(CONFIG, seed=3, mesh=mesh)
  for options in (
    dict(model=placed, mesh=mesh),
    dict(model=model, row_tile=16),
    dict(model=model, layout="contiguous", attention_fn=lambda *a, **k: None),
  ):
    with pytest.raises(OptionError, match="one_order"):
      Engine(rows=2, capacity=256, longest=64, one_order=True, **options)


def test_messages_of_an_environment_are_written_by_the_chat_template(
  model, engine
):
  """Sampled tokens stay; the template's tokens between them have no loss."""
  chat = ChatTurns(template=ChatTemplate.of(Bytes()), tokenizer=Bytes())
  messages = [{"role": "user", "content": "a <|user|> in a text"}]
  asked = [Question.of_chat(messages, chat, example=2)]

  def environment(example, answers):
    if len(answers) == example:
      return None
    return [{"role": "user", "content": f"more {len(answers)}"}]

  # Each answer ends after its first token.
  config = RolloutConfig(
    group=2, max_new_tokens=4, turns=3, stop=tuple(range(262))
  )
  sampler = Rollouts(engine, config, environment=environment, chat=chat)
  (group,) = sampler.sample(asked)
  turn = [{"role": "user", "content": "more 1"}]
  answer = {"role": "assistant", "content": "x"}
  closed = chat.template.tokens(
    [*messages, answer], Bytes(), add_generation_prompt=False
  )
  whole = chat.template.tokens([*messages, answer, *turn], Bytes())
  between = whole[closed.size :]
  assert between.size and np.array_equal(whole[: closed.size], closed)
  assert closed[-1] == chat.end_id
  for rollout in group:
    assert len(rollout.answers) == 2
    assert np.array_equal(rollout.tokens[1:-1], between)
    assert rollout.sampled.tolist() == [1, *[0] * between.size, 1]
  rows = answer_rows(asked, [group], np.zeros((1, 2), np.float32), 150)
  at = rows.mask > 0
  exact = scored(model, rows, OneOrderParallel())
  assert np.array_equal(exact[at], rows.behaviour[at])
  # Messages need a template, and a question of messages.
  assert Rollouts(engine, RolloutConfig(), chat=chat).sample(asked)
  for question, turns in ((asked[0], None), (questions(5)[0], chat)):
    sampler = Rollouts(engine, config, environment=lambda *_: turn, chat=turns)
    with pytest.raises(OptionError, match="environment"):
      sampler.sample([question])


@pytest.mark.parametrize(
  ("source", "words"),
  [
    ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", "ends it"),
    (
      "{{ messages | length }}{% for m in messages %}"
      "{{ '<|user|>' + m.content + eos_token }}{% endfor %}",
      "messages follow",
    ),
  ],
)
def test_templates_without_turns_are_refused(engine, source, words):
  chat = ChatTurns(
    template=ChatTemplate(source, Bytes().special_names), tokenizer=Bytes()
  )
  config = RolloutConfig(turns=2)
  with pytest.raises(TemplateError, match=words):
    Rollouts(engine, config, environment=lambda *_: None, chat=chat)


def test_a_conversation_without_room_ends_as_a_truncated_one(engine):
  config = RolloutConfig(
    group=2, max_new_tokens=4, turns=3, stop=tuple(range(262))
  )
  environment = lambda example, answers: "y" * example
  asked = [
    Question(prompt=[5] * 7, example=2),
    Question(prompt=[6] * 7, example=30),
  ]
  # The second question has 7 + 1 + 30 tokens in its second turn.
  short, long = Rollouts(
    engine, config, environment=environment, longest=41
  ).sample(asked)
  for rollout in short:
    assert len(rollout.answers) == 3 and not rollout.truncated
  for rollout in long:
    assert len(rollout.answers) == 1 and rollout.truncated
    assert rollout.tokens.size == 1
  with pytest.raises(PromptError, match="41"):
    Rollouts(engine, config, environment=environment, longest=41).sample(
      questions(38)
    )
