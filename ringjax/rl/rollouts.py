"""Groups of answers to prompts, by an engine that has the policy's weights.

Guarantees: an answer depends on the weights, its prompt, the seed and its
number alone, not on other prompts, nor on the engine's load. Its
log-probabilities are those of the distribution that it was drawn from.
Cost: the prompt of a group is computed once up to its last full page; the
tokens after it once for each answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from ringjax.checks import integer, number, positive_int
from ringjax.data.text.special_tokens import TokenIds
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, PromptError
from ringjax.models.transformer import Transformer
from ringjax.rl.chat_turns import ChatTurns, Message, answered
from ringjax.serve.engine import Engine
from ringjax.serve.request import Answer, Handle, Request
from ringjax.serve.row_sampler import RowSampling

# Odd constants that separate the seeds of questions, answers and turns.
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A prompt, and what its answers are judged by.

  Attributes:
    prompt: Token ids, int32 [n].
    text: Text of the prompt.
    example: Value that reward functions and environments get.
    messages: Messages of which the prompt is made by a chat template; needed
      by an environment that continues with messages.
  """

  prompt: TokenIds
  text: str = ""
  example: object = None
  messages: Sequence[Message] = ()

  @classmethod
  def of_chat(
    cls,
    messages: Sequence[Message],
    chat: ChatTurns,
    *,
    example: object = None,
  ) -> Question:
    """Question of messages, by a chat template.

    Its text is the last message's.

    Args:
      messages: Messages, as `ChatTemplate.tokens` takes them.
      chat: Chat template with its tokenizer.
      example: Value that reward functions and environments get.

    Raises:
      RingjaxError: See `ChatTemplate.tokens`.
    """
    content = messages[-1].get("content") if messages else None
    return cls(
      prompt=chat.opened(messages),
      text=content if isinstance(content, str) else "",
      example=example,
      messages=tuple(messages),
    )


@runtime_checkable
class Environment(Protocol):
  """Function that continues a conversation after each answer."""

  def __call__(
    self, example: object, answers: Sequence[str]
  ) -> str | Sequence[Message] | None:
    """Continues a conversation by a text or messages; None ends it.

    A text is encoded as plain text, without special tokens. Messages are
    written by the chat template of the rollouts, up to the opening of an
    answer.

    Args:
      example: Example of the question.
      answers: Texts of the answers so far.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
  """One answer to a prompt, or several with texts of an environment between.

  Attributes:
    tokens: Token ids after the prompt, int32 [m].
    sampled: 1 for tokens that the policy sampled, 0 for others, int32 [m].
    logprobs: Log-probabilities of the sampled tokens, float32 [m]; 0 for
      others.
    answers: Texts of the answers, one for each turn.
    finish: Reason of the end: "stop"; or "length", of an answer that reached
      its maximum, or a conversation without room for the next answer.
  """

  tokens: Int32[np.ndarray, " m"]
  sampled: Int32[np.ndarray, " m"]
  logprobs: Float32[np.ndarray, " m"]
  answers: tuple[str, ...]
  finish: str

  @property
  def truncated(self) -> bool:
    """Whether it ended at its maximum length."""
    return self.finish == "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Settings of the sampling of answers.

  Attributes:
    group: Number of answers to each prompt, G, at least 2.
    max_new_tokens: Maximum number of tokens of an answer.
    temperature: Divisor of the logits, above 0. There is no top-k or top-p:
      a policy's gradient is that of the distribution that it was drawn from.
    stop: Ids after which an answer ends; default: those of the tokenizer.
    turns: Maximum number of answers of a conversation with an environment. It
      ends before, as an answer that reached its maximum, where the next prompt
      with an answer of `max_new_tokens` is longer than `Rollouts.longest`.
    seed: Random seed.
  """

  group: int = 8
  max_new_tokens: int = 64
  temperature: int | float = 1.0
  stop: tuple[int, ...] | None = None
  turns: int = 1
  seed: int = 0

  def __post_init__(self) -> None:
    integer(
      "group",
      self.group,
      least=2,
      remedy="pass 2 or more: the advantage of a single answer is always 0",
    )
    positive_int("max_new_tokens", self.max_new_tokens)
    number("temperature", self.temperature, above=0, most=100)
    positive_int("turns", self.turns)
    integer("seed", self.seed, least=0)


class Rollouts:
  """Samples groups of answers by an engine.

  Attributes:
    engine: Engine with the policy's weights.
    config: Settings of the sampling.
    tokenizer: Tokenizer of answers and of an environment's texts.
    longest: Maximum number of tokens of a prompt or conversation with its
      answers.
  """

  def __init__(
    self,
    engine: Engine,
    config: RolloutConfig,
    *,
    tokenizer: AnyTokenizer | None = None,
    environment: Environment | None = None,
    chat: ChatTurns | None = None,
    longest: int | None = None,
  ):
    """Check the options.

    Args:
      engine: Engine with the policy's weights.
      config: Settings of the sampling.
      tokenizer: Tokenizer of the model; default: that of the engine.
      environment: Function that continues conversations, or None.
      chat: Chat template, which writes an environment's messages, and whose
        token at the end of an answer ends it; or None.
      longest: Maximum number of tokens of a conversation; default: that of
        the engine's rows, which it can't exceed.

    Raises:
      OptionError: If the tokenizer has more ids than the model, or the
        engine's cache is not exact; turns without an environment, and the
        other way round.
      TemplateError: If the template's turns can't be told from an answer, see
        `ChatTurns.between`.
    """
    self.engine, self.config = engine, config
    self.longest = min(longest or engine.longest, engine.longest)
    self.tokenizer = engine.tokenizer if tokenizer is None else tokenizer
    if self.tokenizer is not None and self.tokenizer.vocab_size > engine.vocab:
      raise OptionError(
        "tokenizer",
        f"{self.tokenizer.vocab_size:,} ids",
        f"at most {engine.vocab:,}, those of the engine's model",
        "pass the tokenizer of the model",
      )
    kind = engine.model.cache_kind(engine.config.cache_kind)
    if kind.codec is not None or kind.policy is not None:
      raise OptionError(
        "cache_kind",
        f"{engine.config.cache_kind}",
        "a cache of exact keys, which the training's forward pass reads",
        "leave cache_kind out",
      )
    if (environment is None) != (config.turns == 1):
      raise OptionError(
        "turns",
        f"{config.turns} "
        + ("without" if environment is None else "with")
        + " an environment",
        "several turns with an environment, one without",
        "pass both, or leave both out",
      )
    if environment is not None and self.tokenizer is None:
      raise OptionError(
        "tokenizer",
        "none, with an environment, whose texts have to be encoded",
        "a tokenizer",
        "pass tokenizer=",
      )
    self._environment, self._chat = environment, chat
    stop = config.stop
    if stop is None:
      ids = [] if self.tokenizer is None else [*self.tokenizer.eos_ids]
      # Tokenizers of chat models may end texts with another token.
      if chat is not None and chat.end_id not in ids:
        ids.append(chat.end_id)
      stop = tuple(ids)
    self._stop = stop
    if chat is not None and environment is not None:
      chat.check_turns()
    self._handles: list[Handle] = []

  def check(self, question: Question) -> None:
    """Refuses a prompt that leaves no room for an answer.

    Raises:
      PromptError: If prompt and answer are longer than `longest`.
    """
    size = len(question.prompt)
    if size + self.config.max_new_tokens > self.longest:
      raise PromptError(
        "prompt",
        f"{size:,} tokens of {question.text[:40]!r} with max_new_tokens="
        f"{self.config.max_new_tokens:,}",
        f"at most {self.longest:,} tokens in all, a row of the training",
        "pass a larger length, or leave the question out",
      )

  def take_weights(self, model: Transformer) -> None:
    """Hands the policy's weights to the engine, see `Engine.take_weights`."""
    self.engine.take_weights(model)

  def sample(
    self, questions: Sequence[Question], first: int = 0
  ) -> list[tuple[Rollout, ...]]:
    """Groups of answers, in the order of the questions.

    Args:
      questions: Questions.
      first: Number of the first question in the training, with which the
        random draws of the next ones begin.

    Raises:
      PromptError: If prompt and answer are longer than `longest`.
      NotFiniteLogitsError: If logits are NaN or infinite.
    """
    try:
      return self._conversations(questions, first)
    except BaseException:
      # An engine with requests takes no weights.
      for handle in self._handles:
        handle.cancel()
      raise
    finally:
      self._handles.clear()

  def _conversations(
    self, questions: Sequence[Question], first: int
  ) -> list[tuple[Rollout, ...]]:
    """Groups of finished conversations; see `sample`."""
    for question in questions:
      self.check(question)
    handles = [
      self._submit(question.prompt, first + n, self.config.group)
      for n, question in enumerate(questions)
    ]
    groups = []
    for n, (question, handle) in enumerate(
      zip(questions, handles, strict=True)
    ):
      answers = handle.result().answers
      conversations = [
        self._begun(question, first + n, place, answer)
        for place, answer in enumerate(answers)
      ]
      groups.append(conversations)
    every = [x for conversations in groups for x in conversations]
    # All conversations take their next turns together.
    for turn in range(1, self.config.turns):
      waiting = [
        (conversation, handle)
        for conversation in every
        if (handle := self._next_turn(conversation, turn)) is not None
      ]
      for conversation, handle in waiting:
        self._add(conversation, handle.result().answers[0])
    return [
      tuple(conversation.rollout() for conversation in conversations)
      for conversations in groups
    ]

  def _submit(
    self, prompt: TokenIds, number: int, count: int, *marks: int
  ) -> Handle:
    config, stop = self.config, self._stop
    handle = self.engine.submit(
      Request(
        prompt=prompt,
        max_new_tokens=config.max_new_tokens,
        n=count,
        logprobs=0,
        tempered=True,
        stop=tuple(stop) or None,
        sampling=RowSampling(
          temperature=config.temperature,
          seed=_seed(config.seed, number, *marks),
        ),
      )
    )
    self._handles.append(handle)
    return handle

  def _begun(
    self, question: Question, number: int, place: int, answer: Answer
  ) -> _TurnTokens:
    conversation = _TurnTokens(question, number, place)
    self._add(conversation, answer)
    return conversation

  def _add(self, conversation: _TurnTokens, answer: Answer) -> None:
    """Append an answer of the policy."""
    tokens = np.asarray(answer.tokens, np.int32)
    logprobs = np.asarray([x.logprob for x in answer.logprobs], np.float32)
    text = ""
    if self.tokenizer is not None:
      ended = answer.finish == "stop"
      text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
    conversation.add(tokens, logprobs, text, answer.finish or "length")

  def _next_turn(self, conversation: _TurnTokens, turn: int) -> Handle | None:
    """Request of a conversation's next answer, or None at its end."""
    # An answer that was cut is the last one.
    conversation.ended |= conversation.finish == "length"
    if conversation.ended or self._environment is None:
      return None
    turn_text = self._environment(
      conversation.question.example, tuple(conversation.answers)
    )
    if turn_text is None:
      conversation.ended = True
      return None
    ids = self._turn_tokens(conversation, turn_text)
    prompt = np.concatenate([conversation.ids(), ids])
    if prompt.size + self.config.max_new_tokens > self.longest:
      # There is no room for another answer, which the task needs.
      conversation.ended, conversation.finish = True, "length"
      return None
    conversation.extend(ids)
    return self._submit(
      prompt, conversation.number, 1, conversation.place + 1, turn
    )

  def _turn_tokens(
    self, conversation: _TurnTokens, turn: str | Sequence[Message]
  ) -> Int32[np.ndarray, " n"]:
    """Tokens of what an environment returned, int32 [n].

    Raises:
      OptionError: If messages come without a chat template, or for a question
        without messages.
    """
    assert self.tokenizer is not None
    if isinstance(turn, str):
      # Later messages would follow other ones than the conversation has.
      conversation.messages = ()
      return np.asarray(self.tokenizer.encode(turn, bos=False), np.int32)
    if self._chat is None or not conversation.messages:
      raise OptionError(
        "environment",
        "messages "
        + (
          "without a chat template"
          if self._chat is None
          else "for a question without messages, or after a text"
        ),
        "a text, or messages with a chat template and questions of messages",
        "pass chat=ChatTurns(...), and make questions with Question.of_chat",
      )
    ids = self._chat.between(conversation.messages, turn)
    conversation.messages = answered(conversation.messages, turn)
    return ids


class _TurnTokens:
  """Tokens of a conversation so far."""

  def __init__(self, question: Question, number: int, place: int):
    self.question, self.number, self.place = question, number, place
    self.messages: Sequence[Message] = question.messages
    self.answers: list[str] = []
    self.finish = ""
    self.ended = False
    self._parts: list[tuple[np.ndarray, np.ndarray, int]] = []

  def add(
    self, tokens: np.ndarray, logprobs: np.ndarray, text: str, finish: str
  ) -> None:
    """Append tokens of the policy."""
    self._parts.append((tokens, logprobs, 1))
    self.answers.append(text)
    self.finish = finish

  def extend(self, tokens: np.ndarray) -> None:
    """Append tokens of the environment."""
    self._parts.append((tokens, np.zeros(tokens.size, np.float32), 0))

  def ids(self) -> np.ndarray:
    """Prompt and all tokens after it, int32."""
    prompt = np.asarray(self.question.prompt, np.int32)
    return np.concatenate([prompt, *(tokens for tokens, _, _ in self._parts)])

  def rollout(self) -> Rollout:
    tokens, logprobs, marks = zip(*self._parts, strict=True)
    sampled = [
      np.full(part.size, mark, np.int32)
      for part, mark in zip(tokens, marks, strict=True)
    ]
    return Rollout(
      tokens=np.concatenate(tokens),
      sampled=np.concatenate(sampled),
      logprobs=np.concatenate(logprobs),
      answers=tuple(self.answers),
      finish=self.finish,
    )


def _seed(*numbers: int) -> int:
  """Seed of 64 bits from several numbers (SplitMix64's finaliser)."""
  state = 0
  for value in numbers:
    state = (state + value + 1) * _MIX[0] & (1 << 64) - 1
    state = (state ^ state >> 30) * _MIX[1] & (1 << 64) - 1
    state = (state ^ state >> 27) * _MIX[2] & (1 << 64) - 1
    state ^= state >> 31
  # Seeds of requests are integers below 2**63.
  return state >> 1
