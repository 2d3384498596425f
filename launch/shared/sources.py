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
  chats       path: a file of JSON lines, or a folder of such, with chats as
              ringjax/data/chats/chat_lines.py describes. turns: "all",
              "last" or "each" answer that has a loss. template: file of a
              chat template, default the tokenizer's; variables of it. too_long:
              "refuse", "truncate" or "skip"; invalid: "refuse" or "skip"; date:
              YYYY-MM-DD, for templates that write it.
  preferences path: pairs of answers, for a config with posttraining.loss; and
              template, variables, too_long, invalid and date as of chats.

Facts are hidden in the same nine files of ten.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.data import (
  Bytes,
  ChatDocuments,
  ChatEncoding,
  ChatTemplate,
  Corpus,
  PairDocuments,
  Tokenizer,
  read_chats,
  read_pairs,
)
from ringjax.data.batches import texts
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
# Sources of answers to learn.
CHATS = ("chats", "preferences")
KINDS = ("library", "corpus", *CHATS, *TASKS, *RECALL, *PROMPTS)


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


def first_texts(
  row_sources: Sequence[Any], *, seed: int, most: int = 1 << 20
) -> Iterator[Int[np.ndarray, " _"]]:
  """Texts of some sources, of each as many as have about `most` tokens.

  Args:
    row_sources: Sources of rows: documents in their order, or examples that
      are drawn.
    seed: Seed of the examples.
    most: Number of tokens of a source.
  """
  for number, source in enumerate(row_sources):
    draw, count, document = np.random.default_rng([seed, number]), 0, 0
    lengths = getattr(source, "lengths", None)
    while count < most and (lengths is None or document < len(lengths)):
      if lengths is None:
        ids = np.asarray(source.example(draw)[0])
      else:
        ids = np.asarray(source.read(document, 0, int(lengths[document]))[0])
      count, document = count + ids.size, document + 1
      yield ids


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
  if kind in CHATS:
    return _answers(kind, tokenizer, length, **entry)
  if kind in RECALL:
    return RECALL[kind](
      tokenizer=tokenizer, filler=filler(), length=length, **entry
    )
  if kind in PROMPTS:
    return PROMPTS[kind](tokenizer=tokenizer, links=links, **entry)
  longest, shortest = entry.pop("length", length), entry.pop("shortest", None)
  task = TASKS[kind](tokenizer=tokenizer, filler=filler(), **entry)
  return TaskExamples(task=task, length=longest, shortest=shortest)


def _answers(
  kind: str,
  tokenizer: AnyTokenizer,
  length: int,
  *,
  path: str,
  turns: str = "all",
  template: str | None = None,
  invalid: str = "refuse",
  **options: Any,
) -> ChatDocuments | PairDocuments:
  """Chats or pairs of a file or folder."""
  encoding = ChatEncoding(
    tokenizer=tokenizer,
    length=length,
    template=None if template is None else chat_template(tokenizer, template),
    invalid=invalid,
    **options,
  )
  place = pathlib.Path(os.path.expanduser(path))
  paths = texts.find(place, "**/*.jsonl") if place.is_dir() else [path]
  unread: list[str] = []
  on_bad = unread.append if invalid == "skip" else None
  source: ChatDocuments | PairDocuments
  if kind == "chats":
    chats = read_chats(paths, on_bad=on_bad)
    source = ChatDocuments(chats, encoding, turns=turns)
  else:
    if turns != "all":
      raise OptionError(
        "turns",
        f"{turns!r} of preferences",
        "all answers after the prompt",
        "leave turns out",
      )
    source = PairDocuments(read_pairs(paths, on_bad=on_bad), encoding)
  source.counts.invalid += len(unread)
  source.counts.first_error = (unread or [source.counts.first_error])[0]
  return source


def chat_template(tokenizer: AnyTokenizer, path: str | None) -> ChatTemplate:
  """Chat template of a file; without a path that of the tokenizer.

  Raises:
    OptionError: If the file can't be read.
    TemplateError: If there is no path, and the tokenizer has none.
  """
  if path is None:
    return ChatTemplate.of(tokenizer)
  return ChatTemplate(template_text(path), tokenizer.special_names)


def template_text(path: str) -> str:
  """Reads a file with a chat template.

  Raises:
    OptionError: If it can't be read.
  """
  try:
    return pathlib.Path(os.path.expanduser(path)).read_text("utf-8")
  except (OSError, ValueError) as error:
    raise OptionError(
      "template",
      f"{path} ({error})"[-160:],
      "a file with a chat template",
      "pass its path, or leave it out for the tokenizer's",
    ) from None


def template_of(entries: Sequence[Mapping[str, Any]]) -> str | None:
  """Path of the chat template of all entries with chats; None for their own.

  Raises:
    OptionError: If they have different ones.
  """
  paths = {
    entry.get("template") for entry in entries if entry.get("kind") in CHATS
  }
  if len(paths) > 1:
    raise OptionError(
      "template",
      f"{', '.join(sorted(map(str, paths)))} in one training",
      "one chat template, which the model is saved with",
      "pass the same template to all sources of chats",
    )
  return next(iter(paths), None)


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
def filler() -> Lines:
  """Lines of the library of Python, nine files of ten."""
  return Lines(text="\n".join(documents.library(held_out=False)))


def _library(tokenizer: AnyTokenizer) -> Documents:
  texts = documents.library(held_out=False)
  bos = tokenizer.adds_bos
  return Documents(
    [np.asarray(tokenizer.encode(x, bos=bos)) for x in texts if x]
  )
