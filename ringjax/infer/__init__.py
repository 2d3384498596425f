"""From a prompt to new tokens: prefill, decoding, sampling."""

from ringjax.infer import contexts, speculate
from ringjax.infer.calibrate import calibrate
from ringjax.infer.call_memory import CallMemory
from ringjax.infer.contexts import ContextLibrary, context_session
from ringjax.infer.fastdecode.attention_workers import (
  AttentionWorkers,
  WorkersReport,
  WorkerTraffic,
  generate_beside,
)
from ringjax.infer.generate import Generated, generate
from ringjax.infer.generate_config import (
  CombineConfig,
  DecodeConfig,
  GenerateConfig,
  PlacementConfig,
  SamplingConfig,
  SpeculationConfig,
  StoppingConfig,
)
from ringjax.infer.liger.paired import (
  BesideReading,
  PairedReading,
  paired_prefill,
  prefill_beside,
)
from ringjax.infer.llm_npu.integer_model import (
  ActivationRanges,
  activation_ranges,
  integer_model,
)
from ringjax.infer.llm_npu.two_processors import (
  TwoProcessorReading,
  read_on_two,
)
from ringjax.infer.loongserve.elastic import ElasticSession, owners_of
from ringjax.infer.mooncake.chunk_pipeline import ChunkPipeline
from ringjax.infer.prefill import METHODS, Prefill, PrefillConfig
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.repetition import evict_by_repetition
from ringjax.infer.sampling import Greedy, Sample
from ringjax.infer.scoring.text_scorer import TextScorer, TokenScores
from ringjax.infer.session import GenerateReport, Session
from ringjax.infer.stopping import Stop
from ringjax.infer.tpi_llm import process_star as star
from ringjax.infer.tpi_llm.tensor_window import (
  RankReport,
  TensorWindow,
  WindowReport,
  serve_rank,
)

__all__ = [
  "METHODS",
  "ActivationRanges",
  "AttentionWorkers",
  "BesideReading",
  "CallMemory",
  "ChunkPipeline",
  "CombineConfig",
  "ContextLibrary",
  "DecodeConfig",
  "ElasticSession",
  "GenerateConfig",
  "GenerateReport",
  "Generated",
  "Greedy",
  "PairedReading",
  "PlacementConfig",
  "Prefill",
  "PrefillConfig",
  "RankReport",
  "Sample",
  "SamplingConfig",
  "Session",
  "SpeculationConfig",
  "Stop",
  "StoppingConfig",
  "TensorWindow",
  "TextScorer",
  "TokenScores",
  "TwoProcessorReading",
  "WindowReport",
  "WorkerTraffic",
  "WorkersReport",
  "activation_ranges",
  "calibrate",
  "context_session",
  "contexts",
  "evict_by_repetition",
  "generate",
  "generate_beside",
  "integer_model",
  "owners_of",
  "paired_prefill",
  "prefill_beside",
  "read_context",
  "read_on_two",
  "serve_rank",
  "speculate",
  "star",
]
