"""Link tokens, and prompts of documents that are encoded apart (KVLink).

Documents of such a prompt see only themselves, so that their keys can be
computed once and used in any prompt. After each there are a few link tokens
that see all before them; the trained embeddings of these ids connect the
documents again.

Guarantees: each document slot has separate ids of link tokens, whatever the
document; `arranged` gives the tokens of training and of a forward pass
without a cache, for `rj.SeparateDocuments()`.
Ref: Yang et al. 2025, arXiv 2502.16002.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ringjax.checks import boolean, integer, positive_int
from ringjax.data.batches.packing import as_document
from ringjax.data.text.special_tokens import TokenIds
from ringjax.errors import CheckpointFormatError, DataError, OptionError
from ringjax.json_text import json_text
from ringjax.ops.mask import READER, SHARED_PREFIX
from ringjax.paths import as_path

# File name, next to the files of a model.
LINKS = "links.json"


@dataclasses.dataclass(frozen=True)
class LinkTokens:
  """The ids of link tokens: o of document slot i is first + i * each + o.

  Attributes:
    first: First id, usually the one after the model's own vocabulary.
    each: Number of link tokens after a document.
    documents: Number of slots, the most documents of a prompt.
  """

  first: int
  each: int
  documents: int

  def __post_init__(self) -> None:
    integer("first", self.first, least=0)
    positive_int("each", self.each)
    positive_int("documents", self.documents)

  @property
  def count(self) -> int:
    """Ids of all slots together."""
    return self.each * self.documents

  def ids(self, slot: int) -> Int[np.ndarray, " _"]:
    """The link tokens after document `slot` of a prompt, int32 [each].

    Raises:
      DataError: If there is no such slot.
    """
    integer(
      "document",
      slot,
      least=0,
      most=self.documents - 1,
      error=DataError,
      remedy="pass fewer documents, or train links for more",
    )
    start = self.first + slot * self.each
    return np.arange(start, start + self.each, dtype=np.int32)

  def check(self, vocab: int) -> None:
    """Refuses ids that a vocabulary of `vocab` tokens does not have.

    Raises:
      OptionError: If an id is not below `vocab`.
    """
    if self.first + self.count > vocab:
      raise OptionError(
        "links",
        f"ids to {self.first + self.count - 1}",
        f"ids below {vocab}, the vocabulary",
        f"grow it: rj.models.with_more_tokens(model, {self.count})",
      )

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes `links.json` into a folder, usually that of a model.

    The folder is created if it does not exist.
    """
    text = json_text(dataclasses.asdict(self), indent=2)
    place = as_path(folder, "folder")
    place.mkdir(parents=True, exist_ok=True)
    (place / LINKS).write_text(text + "\n", "utf-8")

  @classmethod
  def load(
    cls, folder: str | os.PathLike[str], *, vocab: int | None = None
  ) -> LinkTokens:
    """Reads the `links.json` of a folder.

    Args:
      folder: Folder of the file.
      vocab: Vocabulary size of the model that they are for, to `check` them.

    Raises:
      CheckpointFormatError: If the file is missing or has another content.
      OptionError: If the vocabulary does not have the ids.
    """
    path = as_path(folder, "folder") / LINKS
    try:
      links = cls(**json.loads(path.read_text("utf-8")))
    except (OSError, TypeError, ValueError) as error:
      raise CheckpointFormatError(
        str(path),
        f"{type(error).__name__}: {error}",
        "a JSON object of first, each and documents",
        "name a folder whose model was trained with link tokens",
      ) from None
    if vocab is not None:
      links.check(vocab)
    return links


class ArrangedPrompt(NamedTuple):
  """Tokens of a prompt of documents, each int32 [T].

  Fields:
    tokens: Token ids.
    positions: 0, 1, ... through the whole prompt.
    segments: Segments for `rj.SeparateDocuments()`.
  """

  tokens: np.ndarray
  positions: np.ndarray
  segments: np.ndarray


def arranged(
  documents: Sequence[Any],
  question: TokenIds,
  links: LinkTokens | None = None,
  prefix: TokenIds | None = None,
  *,
  shared: bool = True,
) -> ArrangedPrompt:
  """Joins a prefix, documents with their link tokens, and a question.

  Documents are segments 3, 4, ...; link tokens and question are segment 1, and
  so is the answer that follows.

  Args:
    documents: Ids of each document, int [n].
    question: Ids that see everything, int [n].
    links: Link tokens after each document; None for none.
    prefix: Ids before all documents, int [n], or None.
    shared: Whether documents see the prefix (segment 2); else it is segment 1.

  Raises:
    DataError: If a document is empty, or there are more than the links have
      slots for.
  """
  boolean("shared", shared)
  parts: list[tuple[np.ndarray, int]] = []
  if prefix is not None:
    segment = SHARED_PREFIX if shared else READER
    parts.append((as_document("prefix", prefix), segment))
  for slot, document in enumerate(documents):
    ids = as_document(f"documents[{slot}]", document)
    if not len(ids):
      raise DataError(
        f"documents[{slot}]", "no tokens", "at least one", "leave it out"
      )
    parts.append((ids, SHARED_PREFIX + 1 + slot))
    if links is not None:
      parts.append((links.ids(slot), READER))
  parts.append((as_document("question", question), READER))
  tokens = np.concatenate([ids for ids, _ in parts])
  segments = np.concatenate([np.full(len(ids), n) for ids, n in parts])
  return ArrangedPrompt(
    tokens,
    np.arange(len(tokens), dtype=np.int32),
    segments.astype(np.int32),
  )
