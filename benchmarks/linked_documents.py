"""Answers from separately encoded documents, with and without link tokens.

Asks a model that `launch.train --config=configs/train/kvlink.py` trained, and
its base model, questions that need two documents of a prompt
(docs/how/contexts_kvlink.md) and that were not in the training. Prints a JSON
object with the share of right answers and the loss of an answer's token in
nats, for

  base             the model before the training
  links            the trained model, with link tokens after each document
  links left out   the trained model, without these tokens in the prompt

  python -m benchmarks.linked_documents --base=DIR --trained=DIR2
"""

from __future__ import annotations

import argparse

import ringjax as rj
from ringjax.data import Continued, LinkTokens, Tokenizer
from ringjax.eval import answer_score
from ringjax.json_text import json_text


def main() -> None:
  """Measures and prints scores."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--base", required=True)
  parser.add_argument("--trained", required=True)
  parser.add_argument("--documents", type=int, default=4)
  parser.add_argument("--examples", type=int, default=64)
  parser.add_argument("--seed", type=int, default=99)
  flags = parser.parse_args()
  links = LinkTokens.load(flags.trained)
  ways = {
    "base": (flags.base, None),
    "links": (flags.trained, links),
    "links left out": (flags.trained, None),
  }
  scores = {}
  for name, (folder, way_links) in ways.items():
    source = Continued(
      tokenizer=Tokenizer.load(folder),
      links=way_links,
      documents=flags.documents,
    )
    score = answer_score(
      rj.models.load(folder, dtype="float32"),
      source,
      segments=rj.SeparateDocuments(),
      examples=flags.examples,
      batch=16,
      seed=flags.seed,
    )
    scores[name] = {"right": score.accuracy, "loss": score.loss}
  print(json_text({"documents": flags.documents, "scores": scores}))


if __name__ == "__main__":
  main()
