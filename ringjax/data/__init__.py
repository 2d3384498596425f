"""Text and tokens: tokenizers, chat templates, corpora, batches to train on.

Nothing here imports JAX. The libraries that it uses (tokenizers, jinja2) are
loaded when they are needed, not when this package is imported.
"""

from ringjax.data.bytelevel import Bytes
from ringjax.data.chat import ChatTemplate
from ringjax.data.continued import Continued
from ringjax.data.corpus import Corpus, fingerprint
from ringjax.data.link_tokens import ArrangedPrompt, LinkTokens, arranged
from ringjax.data.loader import Loader
from ringjax.data.packing import BestFit, Cut, Documents, PackedBatch
from ringjax.data.placement import (
  Placement,
  place,
  place_documents,
  place_rows,
  plan_batches,
)
from ringjax.data.punctuation import punctuation_ids
from ringjax.data.stream import Stream
from ringjax.data.tokenizer import Tokenizer

__all__ = [
  "ArrangedPrompt",
  "BestFit",
  "Bytes",
  "ChatTemplate",
  "Continued",
  "Corpus",
  "Cut",
  "Documents",
  "LinkTokens",
  "Loader",
  "PackedBatch",
  "Placement",
  "Stream",
  "Tokenizer",
  "arranged",
  "fingerprint",
  "place",
  "place_documents",
  "place_rows",
  "plan_batches",
  "punctuation_ids",
]
