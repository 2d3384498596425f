"""Models: `load` a Hugging Face folder, `create` one at random, `save` it."""

from ringjax.models import cepe, longspec
from ringjax.models.checkpoint import (
  abstract,
  create,
  load,
  place,
  save,
)
from ringjax.models.contents import read_config
from ringjax.models.families import FAMILIES
from ringjax.models.heads import dflash, eagle3
from ringjax.models.heads.added_layer import with_predict_layer
from ringjax.models.hub_upload import push
from ringjax.models.more_tokens import with_more_tokens
from ringjax.models.partition.layer_range import LayerRange, load_layers
from ringjax.models.presets import PRESETS
from ringjax.models.rope_scaling import (
  ContextExtension,
  DualChunkExtension,
  DynamicExtension,
  LinearExtension,
  Llama3Extension,
  LongRopeExtension,
  NtkExtension,
  SelfExtendExtension,
  YarnExtension,
)
from ringjax.models.transformer import Transformer, TransformerConfig
from ringjax.models.weights.coded_weights import (
  with_coded_weights,
  with_float_weights,
)
from ringjax.models.weights.neuron_predictors import NeuronPredictors
from ringjax.models.weights.neurons import (
  neuron_report,
  sparse_model,
  write_neurons,
)
from ringjax.models.weights.weight_placement import PlacementReport
from ringjax.models.weights.weight_placement import WeightPlacement as Placement
from ringjax.nn.param import Rules
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.store.flash.neuron_store import NeuronReport


def list() -> tuple[str, ...]:
  """The names of the families that can be loaded."""
  return tuple(sorted(FAMILIES))


__all__ = [
  "PRESETS",
  "CachedAttention",
  "ContextExtension",
  "ContextParallel",
  "DualChunkExtension",
  "DynamicExtension",
  "LayerRange",
  "LinearExtension",
  "Llama3Extension",
  "LongRopeExtension",
  "NeuronPredictors",
  "NeuronReport",
  "NtkExtension",
  "Placement",
  "PlacementReport",
  "Rules",
  "SelfExtendExtension",
  "Transformer",
  "TransformerConfig",
  "YarnExtension",
  "abstract",
  "cepe",
  "create",
  "dflash",
  "eagle3",
  "list",
  "load",
  "load_layers",
  "longspec",
  "neuron_report",
  "place",
  "push",
  "read_config",
  "save",
  "sparse_model",
  "with_coded_weights",
  "with_float_weights",
  "with_more_tokens",
  "with_predict_layer",
  "write_neurons",
]
