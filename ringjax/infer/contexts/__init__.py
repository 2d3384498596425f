"""Documents that are read once, apart, and combined with any question."""

from ringjax.infer.contexts.behind_contexts import (
  ContextReport,
  context_session,
)
from ringjax.infer.contexts.combine import (
  APE,
  WAYS,
  Cepe,
  Combine,
  Full,
  KVLink,
  Parallel,
  Recompute,
  Selection,
  combine_of,
)
from ringjax.infer.contexts.context_library import (
  ContextCounters,
  ContextLibrary,
  EncodedContext,
)
from ringjax.infer.contexts.important_prefix import (
  ImportantPrefixes,
  probe_heads,
)

__all__ = [
  "APE",
  "WAYS",
  "Cepe",
  "Combine",
  "ContextCounters",
  "ContextLibrary",
  "ContextReport",
  "EncodedContext",
  "Full",
  "ImportantPrefixes",
  "KVLink",
  "Parallel",
  "Recompute",
  "Selection",
  "combine_of",
  "context_session",
  "probe_heads",
]
