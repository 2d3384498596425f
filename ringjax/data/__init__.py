"""Text and tokens: tokenizers, chat templates, corpora, batches to train on.

Nothing here imports JAX. The libraries that it uses (tokenizers, jinja2) are
loaded when they are needed, not when this package is imported.
"""

from ringjax.data.batches.corpus import Corpus, fingerprint
from ringjax.data.batches.grain_data import RecordDocuments, grain_dataset
from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import BestFit, Cut, Documents, PackedBatch
from ringjax.data.batches.placement import (
  Placement,
  place,
  place_documents,
  place_rows,
  plan_batches,
)
from ringjax.data.chats.chat_documents import (
  ChatDocuments,
  ChatEncoding,
  PairDocuments,
)
from ringjax.data.chats.chat_lines import read_chats, read_pairs
from ringjax.data.tasks import documents
from ringjax.data.tasks.continued import Continued
from ringjax.data.tasks.link_tokens import ArrangedPrompt, LinkTokens, arranged
from ringjax.data.text.bytelevel import Bytes
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.punctuation import punctuation_ids
from ringjax.data.text.stream import Stream
from ringjax.data.text.tokenizer import Tokenizer

__all__ = [
  "ArrangedPrompt",
  "BestFit",
  "Bytes",
  "ChatDocuments",
  "ChatEncoding",
  "ChatTemplate",
  "Continued",
  "Corpus",
  "Cut",
  "Documents",
  "LinkTokens",
  "Loader",
  "PackedBatch",
  "PairDocuments",
  "Placement",
  "RecordDocuments",
  "Stream",
  "Tokenizer",
  "arranged",
  "documents",
  "fingerprint",
  "grain_dataset",
  "place",
  "place_documents",
  "place_rows",
  "plan_batches",
  "punctuation_ids",
  "read_chats",
  "read_pairs",
]
