"""From a prompt to new tokens: prefill, decoding, sampling."""

from ringjax.infer import contexts, speculate
from ringjax.infer.calibrate import calibrate
from ringjax.infer.chunk_pipeline import ChunkPipeline
from ringjax.infer.contexts import ContextLibrary, context_session
from ringjax.infer.generate import Generated, generate
from ringjax.infer.integer_model import (
  ActivationRanges,
  activation_ranges,
  integer_model,
)
from ringjax.infer.prefill import METHODS, Prefill
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.repetition import evict_by_repetition
from ringjax.infer.sampling import Greedy, Sample
from ringjax.infer.session import GenerateReport, Session
from ringjax.infer.stopping import Stop
from ringjax.infer.two_processors import TwoProcessorReading, read_on_two

__all__ = [
  "METHODS",
  "ActivationRanges",
  "ChunkPipeline",
  "ContextLibrary",
  "GenerateReport",
  "Generated",
  "Greedy",
  "Prefill",
  "Sample",
  "Session",
  "Stop",
  "TwoProcessorReading",
  "activation_ranges",
  "calibrate",
  "context_session",
  "contexts",
  "evict_by_repetition",
  "generate",
  "integer_model",
  "read_context",
  "read_on_two",
  "speculate",
]
