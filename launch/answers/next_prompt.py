"""A second prompt of launch.generate, read while the first one is answered.

With --next_prompt_file each chunk of the second prompt and one token of the
first one's answer are computed in one program, under tensor parallelism, so
that sends of one overlap products of the other (Liger). See docs/how/paired.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import Sample, Stop
from ringjax.infer.stopping import Watch
from ringjax.kv import kind_text
from ringjax.models.transformer import Transformer

from ..shared import prompts

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()

_CHUNK = 512
# Flags that change how one prompt is read or answered.
_REFUSED = (
  "cache_placement", "contexts", "disk", "entropy", "flash", "important",
  "integer", "keep", "memory", "placement", "policy", "prefill", "profile",
  "repetition_penalty", "speculate", "store", "wire",
)  # fmt: skip


def refuse(values: flags.FlagValues, sampler: Any) -> None:
  """Refuses flags that do not go with --next_prompt_file.

  Raises:
    OptionError: If such a flag was passed.
  """
  if values.next_prompt_file is None:
    return
  if prompts.made_up(values):
    raise prompts.clash("--next_prompt_file without a prompt", "--prompt too")
  for name in _REFUSED:
    if values[name].present and values[name].value not in (None, False):
      raise prompts.clash(f"--next_prompt_file and --{name}", "one of them")
  if isinstance(sampler, Sample):
    raise prompts.clash("--next_prompt_file with sampling", "greedy answers")


def refuse_mesh(values: flags.FlagValues, mesh: Mesh) -> None:
  """Refuses a mesh that can't take two requests.

  Raises:
    OptionError: If the mesh is not of an axis "model" alone.
  """
  if values.next_prompt_file is None:
    return
  if mesh.axis_names != ("model",) or mesh.size < 2:
    raise OptionError(
      "--mesh",
      f"{dict(mesh.shape)} with --next_prompt_file",
      'an axis "model" of 2 devices or more',
      "pass --mesh=model:2",
    )


def answer(
  model: Transformer,
  mesh: Mesh,
  ids: np.ndarray,
  next_ids: np.ndarray,
  *,
  values: flags.FlagValues,
  count: int,
  stop: Stop,
  tokenizer: Any,
  write: Callable[[str], None],
) -> dict[str, Any]:
  """Answers a prompt and reads the next one meanwhile; then answers that.

  Args:
    model: Model with weights on `mesh`, whose axis is "model" alone.
    mesh: Mesh of both requests.
    ids: Ids of the first prompt, int32 [T].
    next_ids: Ids of the second prompt, int32 [S].
    values: Flags of launch.generate.
    count: Maximum tokens of each answer.
    stop: Ids and texts that end an answer.
    tokenizer: Tokenizer of both.
    write: Callback that gets parts of the first answer, then of the second.

  Returns:
    Both answers, how many tokens of the first came while the second prompt was
    read, and seconds.

  Raises:
    MeshError, ConfigError, PromptError: If `rj.infer.prefill_beside` raises
      them.
  """
  chunk = _CHUNK if values.chunk is None else values.chunk
  chunk = min(chunk, next_ids.size)
  kind = kind_text.parse(values.cache, "--cache")
  steps = -(-next_ids.size // chunk)
  room = max(count, 1 + steps) + 1
  start = time.monotonic()
  session = rj.infer.Session(model, ids.size + room, mesh=mesh, cache_kind=kind)
  greedy = lambda tokens, cache, most: rj.infer.generate(
    model, [tokens], max_new_tokens=most, cache=cache, stop=stop.ids
  )[0].tolist()
  new = greedy(ids, session, 1)
  first_s, num_beside = time.monotonic() - start, 0
  next_capacity = steps * chunk + room
  if _ended(new, stop):
    # Nothing is left to decode beside the second prompt.
    next_session = rj.infer.Session(
      model, next_capacity, mesh=mesh, cache_kind=kind
    )
    second = greedy(next_ids, next_session, 1)
  else:
    beside = rj.infer.prefill_beside(
      model, [next_ids], session, chunk=chunk, mesh=mesh, cache_kind=kind,
      capacity=next_capacity, stop=stop.ids,
    )  # fmt: skip
    next_session = beside.session
    second = [int(np.argmax(jax.device_get(beside.logits)[0]))]
    came = beside.answers[0].tolist()
    num_beside, new = len(came), new + came
  read_s = time.monotonic() - start
  if len(new) < count and not _ended(new, stop):
    new += _continued(greedy, session, new, count)
  first = _told(new[:count], stop.watch(tokenizer), write)
  write("\n")
  if count > 1 and not _ended(second, stop):
    second += _continued(greedy, next_session, second, count)
  return {
    "prompt_tokens": ids.size,
    **first,
    "next": {
      "prompt_tokens": next_ids.size,
      **_told(second, stop.watch(tokenizer), write),
    },
    "chunk": chunk,
    "tokens_beside": min(num_beside, count - 1),
    "first_token_s": first_s,
    "next_first_token_s": read_s,
    "seconds": time.monotonic() - start,
  }


def _continued(
  greedy: Callable[..., list[int]],
  session: rj.infer.Session,
  new: Sequence[int],
  count: int,
) -> list[int]:
  """Generates from the last token of an answer, which is not read yet."""
  # It is passed as the prompt, and not as what the session has pending.
  session.pending = np.array([-1])
  return greedy(np.array(new[-1:], np.int32), session, count - len(new))


def _ended(new: Sequence[int], stop: Stop) -> bool:
  return bool(new) and new[-1] in stop.ids


def _told(
  new: Sequence[int], watch: Watch, write: Callable[[str], None]
) -> dict[str, Any]:
  """Writes an answer until it stops; returns its text and tokens."""
  text, told, stopped = "", [], None
  for token in new:
    told.append(token)
    text += watch.feed(token)
    stopped = watch.stopped
    if stopped is not None:
      break
  text += watch.flush()
  write(text)
  return {
    "answer": text,
    "tokens": told,
    "stopped": "max_new_tokens" if stopped is None else stopped,
  }


def summary(done: dict[str, Any]) -> list[str]:
  """Lines of text that summarize the figures of a run."""
  following = done["next"]
  return [
    "",
    f"prompts      {done['prompt_tokens']:,} tokens, and "
    f"{following['prompt_tokens']:,} in chunks of {done['chunk']:,}",
    f"beside       {done['tokens_beside']:,} tokens of the first answer while "
    "the second prompt was read",
    f"first token  after {done['first_token_s']:.2f} s; of the second after "
    f"{done['next_first_token_s']:.2f} s, with compiling",
    f"answers      {len(done['tokens']):,} and {len(following['tokens']):,} "
    f"tokens in {done['seconds']:.2f} s",
  ]
