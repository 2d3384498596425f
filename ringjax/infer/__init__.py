"""From a prompt to new tokens: prefill, decoding, sampling."""

from ringjax.infer.generate import generate
from ringjax.infer.generated import Generated
from ringjax.infer.prefill import METHODS, Prefill
from ringjax.infer.sampling import Greedy, Sample
from ringjax.infer.session import Report, Session
from ringjax.infer.stopping import Stop

__all__ = [
  "METHODS",
  "Generated",
  "Greedy",
  "Prefill",
  "Report",
  "Sample",
  "Session",
  "Stop",
  "generate",
]
