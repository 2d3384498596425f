"""Models of this package in lm_eval, EleutherAI's evaluation harness.

  python -m ringjax.eval.lm_eval_model --model=ringjax \\
      --model_args=pretrained=DIR,seq=4 --tasks=hellaswag --batch_size=16
      `lm_eval` with the model "ringjax" added; all its flags work.

lm_eval (MIT, the extra `lm-eval`) finds no models of other packages by itself,
so `register` adds this one to its registry. A conditional log-likelihood is
computed in one pass over context and continuation (`rj.infer.TextScorer`),
answers by `rj.infer.generate`.
Ref: https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer import Tokenizer
from ringjax.errors import OptionError, RingjaxError
from ringjax.infer.generate import generate
from ringjax.infer.scoring.text_scorer import TextScorer
from ringjax.infer.stopping import Stop
from ringjax.models.checkpoint import load
from ringjax.parallel.mesh import make_cpu_devices, make_mesh

# Device of lm_eval's command by default.
_DEFAULT_DEVICE = "cuda:0"
NAME = "ringjax"
# lm_eval's names of options of an answer, and those of `generate`.
_SAMPLING = (
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
)
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
# Batch size of "auto", which `batch_tokens` bounds.
_ANY_SIZE = 1 << 30
# Longest text where the model's config states none.
_MAX_LENGTH = 2048


@runtime_checkable
class HarnessRequest(Protocol):
  """A request of lm_eval, an `Instance`.

  Attributes:
    args: Texts and options, as the method of the request takes them.
  """

  args: tuple[Any, ...]


class HarnessModel:
  """Log-likelihoods and answers of a model, in the terms of lm_eval.

  `lm_class` makes a model of lm_eval of it.

  Attributes:
    model: Model that is evaluated.
    tokenizer: Tokenizer of the model.
    batch_size: Maximum number of texts of a forward pass.
    max_length: Maximum number of tokens of a context and its continuation;
      contexts lose tokens at their start.
    max_gen_toks: Number of new tokens of answers whose task states none.
  """

  def __init__(
    self,
    pretrained: str = "",
    *,
    batch_size: int | str = 8,
    max_batch_size: int | None = None,
    device: str | None = None,
    seq: int = 1,
    model_parallel: int = 1,
    dtype: str | None = None,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    batch_tokens: int = 8192,
    cache: str | None = None,
    prefill: str = "auto",
    add_bos_token: bool | None = None,
    enable_thinking: bool | None = None,
    seed: int = 0,
  ):
    """Load a model.

    Args:
      pretrained: Folder of Hugging Face, or name on its Hub.
      batch_size: Maximum number of texts of a pass; "auto" and "auto:N" for as
        many as `batch_tokens` allow, chosen for each pass.
      max_batch_size: Not supported: `batch_tokens` bounds a pass.
      device: Not supported: JAX takes its devices from JAX_PLATFORMS.
      seq: Number of devices over which the sequence is sharded; a CPU is made
        as many, unless JAX has started.
      model_parallel: Number of devices over which heads and widths are sharded.
      dtype: Dtype of the weights; default: the folder's.
      max_length: Maximum number of tokens of a text; default: the model's
        context.
      max_gen_toks: Default number of new tokens.
      batch_tokens: Maximum number of tokens of a pass, with padding.
      cache: Kind of cache, as "int4"; log-likelihoods are those with its codec.
        Default: exact keys.
      prefill: Method that reads texts and prompts, see `rj.infer.METHODS`.
      add_bos_token: Whether texts begin with the bos token; default: as the
        tokenizer does.
      enable_thinking: Variable of the chat template of that name; None leaves
        it out.
      seed: Seed of answers that are sampled.

    Raises:
      OptionError: If an option is out of range or not supported.
      MeshError: If there are fewer devices.
      CheckpointFormatError: If the folder can't be read.
    """
    for name, value, remedy in (
      ("device", device, "set JAX_PLATFORMS=cpu, cuda or tpu"),
      ("max_batch_size", max_batch_size, "pass batch_tokens"),
    ):
      if value is not None:
        raise OptionError(name, repr(value), "nothing", remedy)
    if not pretrained:
      raise OptionError(
        "pretrained", "nothing", "a folder or a name on the Hub", "pass one"
      )
    self.batch_size = _batch_size(batch_size)
    self.max_gen_toks = positive_int("max_gen_toks", max_gen_toks)
    self._batch_tokens = positive_int("batch_tokens", batch_tokens)
    self._seed = integer("seed", seed, least=0)
    sizes = {"seq": seq, "model": model_parallel}
    sizes = {
      name: size for name, size in sizes.items() if positive_int(name, size) > 1
    }
    self._mesh = None
    if sizes:
      _make_devices(math.prod(sizes.values()))
      self._mesh = make_mesh(tuple(sizes.values()), tuple(sizes))
    self.name = pretrained
    self.model = load(pretrained, mesh=self._mesh, dtype=dtype)
    self.tokenizer = Tokenizer.load(pretrained)
    longest = self.model.config.longest
    self.max_length = longest or _MAX_LENGTH
    if max_length is not None:
      self.max_length = integer("max_length", max_length, least=2, most=longest)
    if add_bos_token is None:
      add_bos_token = self.tokenizer.adds_bos
    if add_bos_token and self.tokenizer.bos_id is None:
      raise OptionError(
        "add_bos_token",
        "True, for a tokenizer without a bos token",
        "False",
        "leave it out",
      )
    self._bos = self.tokenizer.bos_id if add_bos_token else None
    self._cache, self._prefill = cache, prefill
    self._thinking = enable_thinking
    if not self.tokenizer.eos_ids:
      raise OptionError(
        "pretrained",
        f"{pretrained}, whose tokenizer has no eos token",
        "a tokenizer with one, which ends answers",
        "name it in tokenizer_config.json",
      )

  # -------------------------------------------------------------------------
  # Texts
  # -------------------------------------------------------------------------

  @property
  def eot_token_id(self) -> int:
    """Id of the token that ends an answer."""
    return self.tokenizer.eos_ids[0]

  @property
  def prefix_token_id(self) -> int:
    """Id of the token before a text without a context."""
    bos = self.tokenizer.bos_id
    return self.eot_token_id if bos is None else bos

  @property
  def tokenizer_name(self) -> str:
    """Name of the tokenizer, for caches of requests."""
    return self.name.replace("/", "__")

  def tok_encode(
    self,
    string: str,
    add_special_tokens: bool | None = None,
    left_truncate_len: int | None = None,
    **_: Any,
  ) -> list[int]:
    """Token ids of a text, in which special tokens are read as such.

    Args:
      string: The text.
      add_special_tokens: False for no bos token; None and True: if the model
        has one before texts, and this text does not begin with it.
      left_truncate_len: Number of last tokens that are kept, or None for all.
    """
    ids = []
    if string:
      parts = self.tokenizer.specials.split(string)
      ids = self.tokenizer.encode_parts(parts).tolist()
    if add_special_tokens is not False and self._bos is not None:
      ids = ids if ids[:1] == [self._bos] else [self._bos, *ids]
    return ids if left_truncate_len is None else ids[-left_truncate_len:]

  def apply_chat_template(
    self,
    chat_history: Sequence[dict[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    """Text of a chat.

    Args:
      chat_history: Messages.
      add_generation_prompt: Whether the opening of an answer comes last; if
        not, the text ends with that of the last message, which is continued.

    Raises:
      TemplateError: If the model has no chat template.
    """
    template = ChatTemplate.of(self.tokenizer)
    variables: dict[str, Any] = {}
    if self._thinking is not None:
      variables["enable_thinking"] = self._thinking
    text = template.text(
      chat_history, add_generation_prompt=add_generation_prompt, **variables
    )
    if add_generation_prompt:
      return text
    last = chat_history[-1]["content"].rstrip()
    at = text.rfind(last)
    if at < 0:
      raise OptionError(
        "chat_template",
        "one that alters the last message",
        "the message's text as it is",
        "evaluate without a text of the assistant to continue",
      )
    return text[: at + len(last)]

  # -------------------------------------------------------------------------
  # Measurements
  # -------------------------------------------------------------------------

  @functools.cached_property
  def _scorer(self) -> TextScorer:
    return TextScorer(
      self.model,
      mesh=self._mesh,
      prefill=self._prefill,
      cache_kind=self._cache,
      batch_tokens=self._batch_tokens,
      batch_texts=self.batch_size,
    )

  def scores_of(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """Log-probabilities of continuations, and whether they are the likeliest.

    Args:
      pairs: Token ids of each context and its continuation, neither empty.

    Raises:
      OptionError: If a continuation has `max_length` tokens or more.
    """
    texts = []
    for context, continuation in pairs:
      if len(continuation) >= self.max_length:
        raise OptionError(
          "continuation",
          f"{len(continuation):,} tokens",
          f"fewer than max_length={self.max_length:,}",
          "pass a larger max_length, if the model has one",
        )
      texts.append([*context, *continuation][-self.max_length :])
    results = []
    scores = self._scorer.scores(texts, top=1)
    for (_, continuation), score in zip(pairs, scores, strict=True):
      start = score.logprobs.size - len(continuation)
      total = float(np.sum(score.logprobs[start:], dtype=np.float64))
      results.append((total, score.greedy(start)))
    return results

  def answers_to(
    self, prompts: Sequence[list[int]], options: dict[str, Any]
  ) -> list[str]:
    """Texts of answers.

    Args:
      prompts: Token ids of each prompt.
      options: lm_eval's options of an answer: `until`, a length, sampling.

    Raises:
      OptionError: If an option is not supported.
    """
    options = dict(options)
    until = options.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    lengths = [options.pop(name, None) for name in _LENGTHS]
    max_new = next((n for n in lengths if n is not None), self.max_gen_toks)
    is_sampled = options.pop("do_sample", None)
    unknown = sorted(set(options) - {*_SAMPLING})
    if unknown:
      raise OptionError(
        unknown[0],
        repr(options[unknown[0]]),
        f"until, do_sample, {', '.join((*_LENGTHS, *_SAMPLING))}",
        "leave it out of generation_kwargs",
      )
    if is_sampled is None:
      is_sampled = bool(options.get("temperature"))
    sampling: dict[str, Any] = {}
    if is_sampled:
      sampling["temperature"] = 1.0
      sampling |= {name: x for name, x in options.items() if x is not None}
    stop = Stop(ids=self.tokenizer.eos_ids, strings=tuple(filter(None, until)))
    room = self.max_length - int(max_new)
    if room < 1:
      raise OptionError(
        "max_gen_toks",
        max_new,
        f"less than max_length={self.max_length:,}",
        "ask for fewer",
      )
    if self._cache is not None:
      sampling["cache_kind"] = self._cache
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    texts = [""] * len(prompts)
    rows = max(1, min(self.batch_size, len(prompts)))
    if self.batch_size == _ANY_SIZE and prompts:
      longest = len(prompts[order[0]]) + int(max_new)
      rows = max(1, min(rows, self._batch_tokens // longest))
    for first in range(0, len(order), rows):
      numbers = order[first : first + rows]
      if is_sampled:
        # Tasks repeat a prompt to draw several answers, in several passes.
        sampling["seed"] = _pass_seed(self._seed, first)
      new = generate(
        self.model,
        [np.asarray(prompts[n][-room:], np.int32) for n in numbers],
        mesh=self._mesh,
        tokenizer=self.tokenizer,
        max_new_tokens=int(max_new),
        prefill=self._prefill,
        stop=stop,
        **sampling,
      )
      for row, number in enumerate(numbers):
        watch = stop.watch(self.tokenizer)
        text = "".join(map(watch.feed, new[row].tolist()))
        if watch.stopped is None:
          text += watch.flush()
        texts[number] = text
    return texts


def _make_devices(count: int) -> None:
  """Makes JAX's CPU client have as many devices, if nothing has made more."""
  config: Any = jax.config
  by_flag = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
  if not by_flag and config.jax_num_cpu_devices < count:
    make_cpu_devices(count)


def _batch_size(given: int | str) -> int:
  """Maximum number of texts of a pass, from lm_eval's option.

  Raises:
    OptionError: If it is neither a positive integer nor "auto".
  """
  text = str(given)
  if text.partition(":")[0] == "auto":
    return _ANY_SIZE
  if not text.isdecimal():
    raise OptionError(
      "batch_size", repr(given), "an int or auto", "pass --batch_size=8"
    )
  return positive_int("batch_size", int(text))


def _pass_seed(seed: int, first: int) -> int:
  """Seed of the pass whose first prompt has this number."""
  state = np.random.SeedSequence([seed, first]).generate_state(1)
  return int(state[0] >> 1)


@functools.cache
def lm_class() -> type[Any]:
  """Class of lm_eval's model "ringjax".

  Raises:
    OptionError: If lm_eval is not installed.
  """
  try:
    base = importlib.import_module("lm_eval.api.model").TemplateLM
    windows = importlib.import_module("lm_eval.utils")
  except ImportError as error:
    raise OptionError(
      "lm_eval",
      f"a Python without it ({error})",
      "the extra `lm-eval`",
      "pip install 'ringjax[lm-eval]'",
    ) from None

  class RingjaxLM(HarnessModel, base):
    """A model of ringjax for lm_eval; options are those of `HarnessModel`."""

    def __init__(self, *args: Any, **options: Any):
      names = list(inspect.signature(HarnessModel).parameters)
      for name in options:
        if name not in names:
          raise OptionError(
            "model_args",
            f"the name {name!r}",
            f"some of {', '.join(names)}",
            "leave it out",
          )
      base.__init__(self)
      HarnessModel.__init__(self, *args, **options)

    @classmethod
    def create_from_arg_obj(
      cls,
      arg_dict: dict[str, Any],
      additional_config: dict[str, Any] | None = None,
    ) -> Any:
      options = dict(additional_config or {})
      # What the command passes where no --device is given.
      if options.get("device") == _DEFAULT_DEVICE:
        del options["device"]
      return super().create_from_arg_obj(arg_dict, options)

    def _loglikelihood_tokens(
      self, requests: Sequence[Any], **_: Any
    ) -> list[tuple[float, bool]]:
      pairs = [(context, answer) for _, context, answer in requests]
      results = self.scores_of(pairs)
      for request, result in zip(requests, results, strict=True):
        if request[0] is not None:
          self.cache_hook.add_partial("loglikelihood", request[0], result)
      return results

    def loglikelihood_rolling(
      self, requests: Sequence[HarnessRequest], **_: Any
    ) -> list[float]:
      pairs, counts = [], []
      for request in requests:
        tokens = self.tok_encode(request.args[0], add_special_tokens=False)
        rolling = windows.get_rolling_token_windows(
          token_list=tokens,
          prefix_token=self.prefix_token_id,
          max_seq_len=self.max_length - 1,
          context_len=1,
        )
        parts = [windows.make_disjoint_window(x) for x in rolling]
        pairs += parts
        counts.append(len(parts))
      scores = [score for score, _ in self.scores_of(pairs)]
      totals = []
      for request, count in zip(requests, counts, strict=True):
        totals.append(sum(scores[:count]))
        del scores[:count]
        self.cache_hook.add_partial(
          "loglikelihood_rolling", request.args, totals[-1]
        )
      return totals

    def generate_until(
      self, requests: Sequence[HarnessRequest], **_: Any
    ) -> list[str]:
      # Requests of equal options are answered together.
      groups: dict[str, list[int]] = {}
      for n, request in enumerate(requests):
        groups.setdefault(repr(request.args[1]), []).append(n)
      texts = [""] * len(requests)
      for numbers in groups.values():
        options = requests[numbers[0]].args[1]
        prompts = [
          self.tok_encode(requests[n].args[0]) or [self.prefix_token_id]
          for n in numbers
        ]
        answers = self.answers_to(prompts, options)
        for n, text in zip(numbers, answers, strict=True):
          texts[n] = text
          self.cache_hook.add_partial("generate_until", requests[n].args, text)
      return texts

  return RingjaxLM


def register() -> type[Any]:
  """Add the model "ringjax" to lm_eval's registry; returns its class.

  Raises:
    OptionError: If lm_eval is not installed.
  """
  harness_class = lm_class()
  registry = importlib.import_module("lm_eval.api.registry")
  # The others are added when this is imported, if the registry is empty.
  importlib.import_module("lm_eval.models")
  if registry.MODEL_REGISTRY.get(NAME, None) is not harness_class:
    registry.register_model(NAME)(harness_class)
  return harness_class


def main() -> None:
  """Runs lm_eval's command with the model "ringjax" added.

  An error of this package is one line on stderr, and exit status 1.
  """
  try:
    register()
    sys.argv[0] = str(Path(sys.argv[0]).with_name("lm_eval"))
    importlib.import_module("lm_eval.__main__").cli_evaluate()
  except RingjaxError as error:
    sys.exit(f"ringjax-lm-eval: {' '.join(str(error).split())}")


if __name__ == "__main__":
  # Of the module by its name, not of a second copy of it.
  importlib.import_module("ringjax.eval.lm_eval_model").main()
