"""Answers from documents that are read apart, with link tokens and without.

Asks models that `launch.train --config=configs/train/kvlink.py` made questions
that need two documents, of held-out examples (docs/how/contexts_kvlink.md), and
prints a JSON object: of each folder how many answers are right and the loss of
an answer's token, nats. A folder's own links.json says which link tokens stand
behind its documents.

  python -m benchmarks.linked_documents --models=none=BASE,links=DIR/model
"""

from __future__ import annotations

import argparse
import pathlib

import ringjax as rj
from ringjax.data import LinkTokens, Tokenizer
from ringjax.data.link_tokens import LINKS
from ringjax.eval import answer_score
from ringjax.json_text import json_text


def main() -> None:
  """Asks and prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--models", required=True)
  parser.add_argument("--documents", type=int, default=4)
  parser.add_argument("--examples", type=int, default=256)
  parser.add_argument("--seed", type=int, default=99)
  asked = parser.parse_args()
  scores = {}
  for text in asked.models.split(","):
    name, _, folder = text.partition("=")
    path = pathlib.Path(folder)
    model = rj.models.load(folder, dtype="float32")
    links = None
    if (path / LINKS).is_file():
      links = LinkTokens.load(path, vocab=model.config.vocab)
    source = rj.data.Continued(
      tokenizer=Tokenizer.load(folder), links=links, documents=asked.documents
    )
    score = answer_score(
      model,
      source,
      segments=rj.SeparateDocuments(),
      examples=asked.examples,
      seed=asked.seed,
    )
    scores[name] = {
      "right": score.accuracy,
      "loss": score.loss,
      "links": 0 if links is None else links.each,
    }
  print(json_text({"documents": asked.documents, "scores": scores}))


if __name__ == "__main__":
  main()
