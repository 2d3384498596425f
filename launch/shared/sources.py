"""Training data: the sources that the entries of a config describe.

An entry has a kind, a weight (in rows, default 1) and the kind's arguments:

  library     Python's own sources, nine files of ten.
  corpus      path: a file that launch.tokenize wrote, with the tokenizer of
              the config. verify: whether all of it is read and compared with
              its checksum before the first row, default True; it takes about a
              second for a GB.
  passkey, multikey, multivalue, variables, ...
              (ringjax.data.tasks.needle.TASKS) a question about a text;
              length, shortest: its tokens; and the task's other arguments.
  noise, copies, pairs, questions, values, chains, links, quotes, records
              synthetic rows that teach to look back; arguments of the class in
              ringjax.data.tasks.recall or ringjax.data.tasks.recall_tasks.
              They fill a row.
  continued   prompts of separately encoded documents, in a stage of segments
              "separate", with the config's links; arguments of the class in
              ringjax.data.tasks.continued.

Facts are hidden in the same nine files of ten.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringjax.data import Bytes, Corpus, Tokenizer
from ringjax.data.batches.corpus import fingerprint
from ringjax.data.batches.packing import Documents
from ringjax.data.tasks import documents
from ringjax.data.tasks.continued import Continued
from ringjax.data.tasks.filler import Lines
from ringjax.data.tasks.link_tokens import LinkTokens
from ringjax.data.tasks.needle import TASKS, TaskExamples
from ringjax.data.tasks.recall import Copies, Pairs, Questions, RandomTokens
from ringjax.data.tasks.recall_tasks import (
  Chains,
  Links,
  Quotes,
  Records,
  Values,
)
from ringjax.data.text.tokenizer import AnyTokenizer
from ringjax.errors import OptionError, RingjaxError
from ringjax.json_text import json_text
from ringjax.train.recipe import Mixture

RECALL: dict[str, Any] = {
  "noise": RandomTokens,
  "copies": Copies,
  "pairs": Pairs,
  "questions": Questions,
  "values": Values,
  "chains": Chains,
  "links": Links,
  "quotes": Quotes,
  "records": Records,
}
# Sources of prompts with link tokens.
PROMPTS: dict[str, Any] = {"continued": Continued}
KINDS = ("library", "corpus", *TASKS, *RECALL, *PROMPTS)


def tokenizer(name: str) -> AnyTokenizer:
  """Creates the byte tokenizer, or loads that of a folder."""
  if name == "bytes":
    return Bytes(chat_template=None)
  return Tokenizer.load(name, untrusted=True)


def mixture(
  entries: Sequence[Any],
  tokenizer: AnyTokenizer,
  *,
  length: int,
  vocab: int,
  links: LinkTokens | None = None,
) -> Mixture:
  """Creates the mixture of sources of a stage.

  Args:
    entries: Entries of the config.
    tokenizer: Tokenizer of all sources.
    length: Number of tokens of a row, T.
    vocab: Number of ids of the model.
    links: Link tokens after documents, or None.

  Raises:
    OptionError: If an entry is unknown or invalid.
  """
  if tokenizer.vocab_size > vocab:
    raise OptionError(
      "tokenizer",
      f"{tokenizer.vocab_size} ids",
      f"at most {vocab}, the model's vocabulary",
      "use the tokenizer that belongs to the model",
    )
  mixed, weights = [], []
  for config_entry in entries:
    entry = json.loads(json_text(dict(config_entry)))
    kind, weight = entry.pop("kind", None), entry.pop("weight", 1.0)
    if kind not in KINDS:
      raise OptionError(
        "sources",
        f"kind {kind!r}",
        f"one of {', '.join(KINDS)}",
        "pass kind='library', for instance",
      )
    try:
      mixed.append(_source(kind, entry, tokenizer, length, vocab, links))
      weights.append(float(weight))
    except RingjaxError:
      raise
    except (KeyError, TypeError, ValueError) as error:
      raise OptionError(
        f"sources, {kind}",
        f"{', '.join(entry) or 'nothing'} ({error})",
        "kind, weight and what the kind takes",
        "pass the names that launch/shared/sources.py lists",
      ) from None
  return Mixture(mixed, weights)


def _source(
  kind: str,
  entry: dict[str, Any],
  tokenizer: AnyTokenizer,
  length: int,
  vocab: int,
  links: LinkTokens | None,
) -> Any:
  if kind == "library":
    return _library(tokenizer, **entry)
  if kind == "corpus":
    return _corpus(vocab, fingerprint(tokenizer), **entry)
  if kind in RECALL:
    return RECALL[kind](
      tokenizer=tokenizer, filler=_filler(), length=length, **entry
    )
  if kind in PROMPTS:
    return PROMPTS[kind](tokenizer=tokenizer, links=links, **entry)
  longest, shortest = entry.pop("length", length), entry.pop("shortest", None)
  task = TASKS[kind](tokenizer=tokenizer, filler=_filler(), **entry)
  return TaskExamples(task=task, length=longest, shortest=shortest)


# Cached, so that all stages open and verify a file once.
@functools.lru_cache
def _corpus(
  vocab: int, tokenizer: str, *, path: str, verify: bool = True
) -> Corpus:
  corpus = Corpus.open(path, vocab=vocab, tokenizer_fingerprint=tokenizer)
  if verify:
    corpus.verify()
  return corpus


@functools.lru_cache(1)
def _filler() -> Lines:
  return Lines(text="\n".join(documents.library(held_out=False)))


def _library(tokenizer: AnyTokenizer) -> Documents:
  texts = documents.library(held_out=False)
  bos = tokenizer.adds_bos
  return Documents(
    [np.asarray(tokenizer.encode(x, bos=bos)) for x in texts if x]
  )
