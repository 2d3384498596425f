"""A training recipe: stages, optimizer and objective of a run as one value.

Guarantees: a recipe and its sources determine the result; the mesh changes only
the speed. Stages follow each other with one optimizer and one count of steps;
each has its own length, batch and RoPE scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.batches.loader import Loader
from ringjax.data.batches.packing import BestFit, PackedBatch, Packer
from ringjax.data.batches.placement import place_rows
from ringjax.data.chats.chat_documents import ChatDocuments, PairDocuments
from ringjax.errors import CheckpointMismatchError, OptionError, ShapeError
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.cepe import CepeTransformer
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import refuse_codes
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.sharding_context import ContextParallel
from ringjax.nn.stack import stages_error
from ringjax.ops.attention.strategies import nesting
from ringjax.ops.mask import Mask, SameSegment, SeparateDocuments
from ringjax.parallel.call_sharding import STAGE
from ringjax.parallel.layout import LAYOUTS as NAMED_LAYOUTS
from ringjax.parallel.layout import Contiguous, Layout
from ringjax.parallel.mesh import entering
from ringjax.train import batch as batches
from ringjax.train import loop, memory_needs, remat
from ringjax.train import step as steps
from ringjax.train.batch import Batch
from ringjax.train.block_sizes import (
  check_block,
  number_of_tokens,
  resolved_blocks,
)
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.choice_training import choosing_layers, has_indexes
from ringjax.train.expert_balance import refuse_frozen
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.methods.encoder_training import ContextSplit, EncoderTraining
from ringjax.train.methods.lora import Lora
from ringjax.train.methods.predict_training import PredictTraining
from ringjax.train.optimizers.coded_moments import (
  refuse_other_blocks,
  with_coded_moments,
)
from ringjax.train.optimizers.host_moments import with_host_moments
from ringjax.train.optimizers.muon import (
  momenta_by_leaf,
  scale_by_momenta,
  scale_by_muon,
  with_orthogonal_matrices,
)
from ringjax.train.optimizers.qk_clip import (
  PREDICTING,
  check_clipped_training,
  check_qk_clip,
)
from ringjax.train.posttraining import reference_logprobs
from ringjax.train.posttraining.posttraining_loss import PosttrainingLoss
from ringjax.train.posttraining.reference_logprobs import (
  REFERENCE,
  ReferenceLogprobs,
)

LAYOUTS: dict[str, Layout] = NAMED_LAYOUTS | {
  # Slots in order; `place_rows` places each row's documents on the shards.
  "documents": Contiguous(),
}
# Which segments of a row see each other.
SEGMENTS: dict[str, Mask] = {
  "same": SameSegment(),
  "separate": SeparateDocuments(),
}
# Each from (b1, b2, eps, mesh) to the transformation that optax calls
# scale_by_...
_SCALES: dict[
  str,
  Callable[[float, float, float, Mesh | None], optax.GradientTransformation],
] = {
  "adamw": lambda b1, b2, eps, mesh: optax.scale_by_adam(b1, b2, eps),
  "lion": lambda b1, b2, eps, mesh: optax.scale_by_lion(b1, b2),
  "adafactor": lambda b1, b2, eps, mesh: optax.scale_by_factored_rms(),
  "sgd": lambda b1, b2, eps, mesh: optax.trace(b1),
  "muon": lambda b1, b2, eps, mesh: scale_by_muon(b1, b2, eps, mesh=mesh),
}
OPTIMIZERS = tuple(_SCALES)
# How moments are stored between updates, and where.
MOMENTS = ("float32", "int8")
MEMORIES = ("device", "host")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
# Fields that only some optimizers or schedules have.
_USERS = {
  "b1": ("name", ("adamw", "lion", "sgd", "muon")),
  "b2": ("name", ("adamw", "lion", "muon")),
  "eps": ("name", ("adamw", "muon")),
  "decay": ("schedule", ("wsd",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """An optimizer and its learning rate schedule.

  Attributes:
    name: Name of the optimizer: adamw, lion, adafactor, sgd or muon.
    learning_rate: the highest learning rate.
    end_learning_rate: Learning rate of the last step, unless it is the only
      one.
    schedule: Schedule after the warm-up: cosine, linear, constant or wsd. "wsd"
      (warmup, stable, decay) stays at `learning_rate` and falls linearly at the
      end.
    warmup: Steps from 0 to `learning_rate`.
    decay: Fraction of all steps in which "wsd" falls; default 0.2.
    b1: Decay of the first moment, for all but adafactor; default 0.9, for muon
      0.95, where it is that of matrices.
    b2: Decay of the second moment, for adamw, lion and muon; default 0.95.
    eps: Number added to the root of the second moment, for adamw and muon;
      default 1e-8.
    weight_decay: Weight decay of matrices; other parameters have none.
    clip: Maximum of the gradients' global norm; None for none.
    qk_clip: Largest attention logit of a head, above which the maps of its
      queries and keys are multiplied after the update (MuonClip: 100); None for
      no bound. See `train/optimizers/qk_clip.py`.
    moments: Storage of moments between updates: float32, or int8, codes of
      blocks, for all but adafactor, whose moments are small.
    moments_in: Memory of moments between updates: "device", or "host", from
      which an update fetches those of one layer at a time; for all but
      adafactor, and for float32 moments on meshes without stages.
  """

  name: str = "adamw"
  learning_rate: float = 3e-4
  end_learning_rate: float = 0.0
  schedule: str = "cosine"
  warmup: int = 0
  decay: float | None = None
  b1: float | None = None
  b2: float | None = None
  eps: float | None = None
  weight_decay: float = 0.1
  clip: float | None = 1.0
  qk_clip: float | None = None
  moments: str = "float32"
  moments_in: str = "device"

  def __post_init__(self) -> None:
    one_of("name", self.name, OPTIMIZERS)
    one_of("moments", self.moments, MOMENTS)
    if self.moments != "float32" and self.name == "adafactor":
      raise OptionError(
        "moments",
        f"{self.moments!r} with 'adafactor', whose moments are sums of rows "
        "and columns",
        "'float32'",
        "leave it out, or pass name='adamw'",
      )
    one_of("moments_in", self.moments_in, MEMORIES)
    if self.moments_in == "host":
      self._check_host()
    one_of("schedule", self.schedule, SCHEDULES)
    for name in ("learning_rate", "end_learning_rate", "weight_decay"):
      number(name, getattr(self, name), least=0)
    for name, (of, users) in _USERS.items():
      value = getattr(self, name)
      if value is None:
        continue
      number(name, value, least=0, most=1)
      if getattr(self, of) not in users:
        raise OptionError(
          name,
          f"{value} with {getattr(self, of)!r}, which has none",
          f"it with {', '.join(users)} only",
          "leave it out",
        )
    integer("warmup", self.warmup, least=0)
    if self.clip is not None:
      number("clip", self.clip, least=0)
    if self.qk_clip is not None:
      number("qk_clip", self.qk_clip, above=0)

  def _check_host(self) -> None:
    if self.name == "adafactor":
      raise OptionError(
        "moments_in",
        "'host' with 'adafactor', whose moments are sums of rows and columns",
        "'device'",
        "leave it out, or pass name='adamw'",
      )
    if self.moments != "float32":
      raise OptionError(
        "moments_in",
        f"'host' with moments={self.moments!r}, whose blocks of codes are "
        "encoded on the devices",
        "one of both",
        "leave out moments, or moments_in",
      )

  def check_replay(self, every: int | None) -> None:
    """Refuses steps that are computed twice with moments on the host.

    Raises:
      OptionError: If `every` is a number of steps and moments are there.
    """
    if self.moments_in == "host" and every is not None:
      raise OptionError(
        "replay_every",
        f"{every} with moments_in='host', of which the devices hold no copy",
        "None, or moments_in='device'",
        "leave one of them out",
      )

  def learning_rates(self, total: int) -> optax.Schedule:
    """The learning rate of each of `total` steps."""
    high, low = self.learning_rate, self.end_learning_rate
    # Steps count from 0. The first one after the warm-up has the highest rate.
    last = total - self.warmup - 1
    decay_steps = max(1, last)
    if self.schedule == "wsd":
      part = 0.2 if self.decay is None else self.decay
      decay_steps = max(1, min(decay_steps, round(part * total)))
    decays = self.schedule != "constant" and (last > 0 or self.warmup > 0)

    def decaying(count: Any) -> jax.Array:
      if not decays or last < 0:
        return jnp.asarray(high, jnp.float32)
      fraction = jnp.clip(
        (count - (last - decay_steps)) / decay_steps, 0.0, 1.0
      )
      if self.schedule == "cosine":
        fraction = 0.5 * (1.0 - jnp.cos(jnp.pi * fraction))
      return high + (low - high) * fraction

    if not self.warmup:
      return decaying
    # The first step has a learning rate above 0, too.
    warming_up = lambda count: high * (count + 1) / self.warmup
    return optax.join_schedules([warming_up, decaying], [self.warmup])

  def learning_rate_at(self, step: int, total: int) -> float:
    """The learning rate of one of `total` steps."""
    return float(np.asarray(self.learning_rates(total)(step)))

  def build(
    self, total: int, mesh: Mesh | None = None
  ) -> optax.GradientTransformation:
    """The optimizer of `total` steps.

    Args:
      total: Steps of the schedule.
      mesh: Devices that share the matrices of muon; None for one.
    """
    default_b1 = 0.95 if self.name == "muon" else 0.9
    b1 = default_b1 if self.b1 is None else self.b1
    b2 = 0.95 if self.b2 is None else self.b2
    eps = 1e-8 if self.eps is None else self.eps
    if self.moments_in == "host":
      scale = self._with_host_moments(b1, b2, eps, mesh)
    else:
      scale = _SCALES[self.name](b1, b2, eps, mesh)
    if self.moments == "int8":
      scale = with_coded_moments(scale)
    # A transformation that is left out keeps its place in a saved state's tree.
    identity = optax.identity()
    return optax.chain(
      identity if self.clip is None else optax.clip_by_global_norm(self.clip),
      scale,
      optax.add_decayed_weights(self.weight_decay, decayed)
      if self.weight_decay
      else identity,
      optax.scale_by_learning_rate(self.learning_rates(total)),
    )

  def _with_host_moments(
    self, b1: float, b2: float, eps: float, mesh: Mesh | None
  ) -> optax.GradientTransformation:
    """The transformation of `_SCALES`, of moments in the host's memory.

    Raises:
      OptionError: If the mesh has stages, each of which has other layers.
    """
    if mesh is not None and dict(mesh.shape).get(STAGE, 1) > 1:
      raise OptionError(
        "moments_in",
        f"'host' on a mesh with an axis {STAGE!r}, whose stages have different "
        "layers",
        "'device'",
        f"leave it out, or pass a mesh without {STAGE!r}",
      )
    if self.name == "muon":
      hosted = with_host_moments(
        scale_by_momenta(b1, b2, eps), momenta_by_leaf(b1, b2, eps)
      )
      return with_orthogonal_matrices(hosted, mesh)
    scale = _SCALES[self.name](b1, b2, eps, mesh)
    return with_host_moments(
      scale, lambda params: [scale for _ in jax.tree.leaves(params)]
    )


def decayed(params: PyTree) -> PyTree:
  """Tree of bool as `params`: whether weight decay applies to a parameter.

  It applies to matrices: arrays of two axes or more, one of them named, that
  are not biases. The axis over stacked layers does not count, and a bias per
  head and feature is still a bias.
  """

  def is_decayed(path: tuple[Any, ...], x: Any) -> PyTree:
    if not isinstance(x, nnx.Variable):
      # Adapters are matrices.
      return jax.tree.map(lambda leaf: leaf.ndim > 1, x)
    axes = x.get_metadata()["axes"]
    is_bias = str(getattr(path[-1], "name", "")).endswith("bias")
    matrix = len(axes) > 1 and any(axes) and not is_bias
    return jax.tree.map(lambda _: matrix, x)

  return jax.tree_util.tree_map_with_path(
    is_decayed, params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A part of a training with one length of rows.

  Attributes:
    steps: Number of steps.
    length: Tokens of a row, T.
    batch: Rows of a step.
    accumulate: Micro-batches of a step.
    rope_scaling: Scaling that extends the context from here on; None:
      unchanged.
    context: Split of rows into tokens of an encoder and of the decoder; None:
      the decoder reads all.
    segments: One of `SEGMENTS`. "same": a token sees its own document;
      "separate": documents do not see each other, and questions and link tokens
      see them all, as `rj.SeparateDocuments` says.
    index_warm_up: Whether queries read all keys and only the indexes of keys
      learn, as in the first stage of DeepSeek-V3.2.
  """

  steps: int
  length: int
  batch: int
  accumulate: int = 1
  rope_scaling: RopeScaling | None = None
  context: ContextSplit | None = None
  segments: str = "same"
  index_warm_up: bool = False

  def __post_init__(self) -> None:
    for name in ("steps", "length", "batch", "accumulate"):
      positive_int(name, getattr(self, name))
    one_of("segments", self.segments, SEGMENTS)
    if self.batch % self.accumulate:
      raise OptionError(
        "batch",
        f"{self.batch} rows in {self.accumulate} micro-batches",
        "a multiple of the micro-batches",
        f"pass batch={-(-self.batch // self.accumulate) * self.accumulate}",
      )
    if self.context is not None:
      self._check_context(self.context)

  def _check_context(self, context: ContextSplit) -> None:
    shortest = context.tokens + (0 if context.repeated else 1)
    if self.length < shortest:
      raise OptionError(
        "context",
        f"{context.tokens} tokens of rows of {self.length}",
        f"rows of at least {shortest}",
        f"pass length={2 * context.tokens}, or fewer chunks",
      )

  @property
  def decoded(self) -> int:
    """Tokens of a row that the decoder reads."""
    return (
      self.length if self.context is None else self.context.decoded(self.length)
    )

  def rows(self, rows: PackedBatch, recipe: Recipe) -> Batch | PackedBatch:
    """The rows of a loader, split or moved as the training needs them."""
    if recipe.draft is not None:
      return recipe.draft.rows(rows, recipe.seed)
    if recipe.predict_only:
      return recipe.predict_training.rows(rows, recipe.seed)
    if self.context is None:
      return rows
    teacher = recipe.objective.distil > 0
    return self.context.split(rows, recipe.seed, teacher=teacher)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """All settings of a training except its data, model and mesh.

  Attributes:
    stages: Stages in their order.
    optimizer: Optimizer of all stages.
    objective: Loss.
    layout: Layout of the sequence over the shards, of `LAYOUTS`; "documents"
      places each document on as many shards as its work needs, row by row, and
      rings make no more hops than these need; for models without recurrent
      layers.
    strategy: Attention strategy, by its name in
      `ringjax.dot_product_attention`.
    remat: Activations that are kept for the backward pass, of `remat.POLICIES`.
    feedforward_block: Tokens of a step of the feedforward, on each shard; the
      head's are `Objective.block`. A device holds the hidden activations of so
      many tokens at a time. "auto", here and there, chooses by the memory of a
      device, see `with_block_sizes`.
    stage_rows: Rows of a data shard that pass the stages of a mesh with an axis
      "stage" together. Fewer rows leave stages idle for a smaller part of the
      time, see `with_stage_rounds`.
    lora: Adapters in place of all parameters, or None.
    cepe: Whether to train the encoder and the cross-attention of a model that
      has them, and not its decoder.
    draft: Training of the block of a `DraftTransformer`, and not its target;
      None: the model is not a draft.
    predict_only: Whether to train the layer that predicts one token further,
      and not the model before it.
    predict_training: Positions of that training; others keep theirs.
    packer: Packer of documents into rows.
    seed: Seed of the data and of adapters.
    loop_config: Logging, saving and failure-tolerance settings.
  """

  stages: tuple[Stage, ...]
  optimizer: Optimizer = Optimizer()
  objective: steps.Objective = steps.Objective()
  layout: str = "striped"
  strategy: str = "ring"
  remat: str = "attention"
  feedforward_block: int | str = 2048
  stage_rows: int = 1
  lora: Lora | None = None
  cepe: bool = False
  draft: DraftTraining | None = None
  predict_only: bool = False
  predict_training: PredictTraining = PredictTraining()
  packer: Packer = BestFit()
  seed: int = 0
  loop_config: loop.LoopConfig = loop.LoopConfig()

  def __post_init__(self) -> None:
    if not self.stages:
      raise OptionError(
        "stages",
        "none",
        "one or more",
        "pass stages=(Stage(steps=..., length=..., batch=...),)",
      )
    one_of("layout", self.layout, LAYOUTS)
    separate = any(stage.segments == "separate" for stage in self.stages)
    if self.layout == "documents" and separate:
      raise OptionError(
        "layout",
        "'documents' with a stage of segments='separate'",
        "a layout for rows with tokens that see all documents",
        "pass layout='striped'",
      )
    if self.strategy != "auto":
      nesting.named(self.strategy)
    one_of("remat", self.remat, remat.POLICIES)
    check_block("feedforward_block", self.feedforward_block)
    positive_int("stage_rows", self.stage_rows)
    integer("seed", self.seed, least=0)
    self.optimizer.check_replay(self.loop_config.replay_every)
    if self.objective.posttraining is not None:
      self._check_posttraining(self.objective.posttraining)
    methods = {
      "lora": self.lora,
      "cepe": self.cepe,
      "draft": self.draft,
      "predict_only": self.predict_only,
    }
    methods = [name for name, value in methods.items() if value]
    if len(methods) > 1:
      raise OptionError(
        methods[0],
        f"{' and '.join(methods)} together",
        "one of them: what it is beside is frozen",
        "leave the others out",
      )
    balance = self.objective.expert_balance
    refuse_frozen(balance, self.adapter)
    if balance.used and self.cepe:
      raise OptionError(
        f"expert_balance.{balance.used[0]}",
        f"{getattr(balance, balance.used[0]):g} with cepe=True, whose decoder "
        "is frozen",
        "a training of the decoder",
        "leave it out",
      )
    if self.draft is not None:
      self._check_draft(self.draft)
    self._check_predict()
    self._check_qk_clip()
    undistilled = [
      s for s in self.stages if s.context is None or s.context.repeated
    ]
    if self.objective.distil and undistilled:
      raise OptionError(
        "distil",
        f"{self.objective.distil:g} with a stage whose decoder reads all",
        "stages with a context of other tokens, which the teacher reads too",
        "train those stages in a run of their own",
      )

  def _check_posttraining(self, loss: PosttrainingLoss) -> None:
    """Refuses what a loss after pre-training is not computed with."""
    name = type(loss).__name__
    for method in ("cepe", "draft"):
      if getattr(self, method):
        raise OptionError(
          method,
          f"it with {name}, a loss of a model's own answers",
          "a training of all parameters or of adapters",
          f"leave {method} out",
        )
    for stage in self.stages:
      self.objective_of(stage)
      unsupported = {
        "context": stage.context,
        "segments": stage.segments != "same",
        # The initial model has the old context.
        "rope_scaling": stage.rope_scaling and REFERENCE in loss.reads,
      }
      for option, value in unsupported.items():
        if value:
          raise OptionError(
            option,
            f"{option} in a stage of {name}",
            "stages of whole rows, of the context that the model has",
            "leave it out, or extend the context in a run of its own",
          )
    unknown = [x for x in loss.reads if x != REFERENCE]
    if unknown:
      raise OptionError(
        "posttraining",
        f"{name}, which reads {', '.join(unknown)}",
        f"a loss that reads {REFERENCE} or nothing, which rj.train.train adds",
        "make batches with these inputs, and steps with make_step",
      )

  def _check_qk_clip(self) -> None:
    others = {
      type(self.adapter).__name__: self.adapter,
      PREDICTING: self.objective.predict_loss,
      "a stage with index_warm_up": any(x.index_warm_up for x in self.stages),
    }
    check_clipped_training(self.optimizer.qk_clip, others)

  def _check_predict(self) -> None:
    others = {
      "cepe": self.cepe,
      "draft": self.draft,
      "distil": self.objective.distil,
      "a posttraining loss": self.objective.posttraining,
      "a stage with a context": any(stage.context for stage in self.stages),
      "a stage with index_warm_up": any(x.index_warm_up for x in self.stages),
    }
    used = [name for name, value in others.items() if value]
    factor = self.objective.predict_loss
    if factor and used:
      raise OptionError(
        "predict_loss",
        f"{factor:g} with {used[0]}",
        "a training of the model's own next tokens",
        "leave predict_loss out",
      )
    if self.predict_only and not factor:
      raise OptionError(
        "predict_only",
        "True with predict_loss=0, by which the layer does not learn",
        "a factor above 0",
        "pass objective=Objective(predict_loss=0.3)",
      )
    if not self.predict_training.longest:
      return
    if not self.predict_only:
      raise OptionError(
        "predict_training",
        f"longest={self.predict_training.longest} without predict_only, in a "
        "training of the model at its own positions",
        "predict_only=True, by which the layer or head alone is trained",
        "leave predict_training out",
      )
    for stage in self.stages:
      self.predict_training.check(stage.length)
      if stage.segments != "same":
        raise OptionError(
          "segments",
          f"{stage.segments!r} in a stage whose positions are moved",
          "'same', in which a token sees its own document",
          "leave segments out, or pass longest=0",
        )

  def _check_draft(self, draft: DraftTraining) -> None:
    for stage in self.stages:
      draft.check(stage.length)
      unsupported = {
        "context": stage.context,
        "rope_scaling": stage.rope_scaling,
        "segments": stage.segments != "same",
      }
      for name, value in unsupported.items():
        if value:
          raise OptionError(
            name,
            f"{name} in a stage that trains a draft",
            "the target as it is, of rows of whole documents",
            "leave it out",
          )
    if self.layout == "documents":
      raise OptionError(
        "layout",
        "'documents' for a draft, whose target's keys lag by the order of rows",
        "a layout that keeps rows together",
        "pass layout='striped'",
      )

  @property
  def adapter(
    self,
  ) -> Lora | EncoderTraining | DraftTraining | PredictTraining | None:
    """Method that trains something else than all parameters, or None."""
    if self.draft is not None:
      return self.draft
    if self.predict_only:
      return self.predict_training
    return EncoderTraining() if self.cepe else self.lora

  def objective_of(self, stage: Stage) -> steps.Objective:
    """The loss of a stage."""
    return dataclasses.replace(
      self.objective, index_warm_up=stage.index_warm_up
    )

  @property
  def total(self) -> int:
    """Steps of all stages."""
    return sum(stage.steps for stage in self.stages)

  def placed(self, rows: PackedBatch, attend: ContextParallel) -> PackedBatch:
    """Rows in token order, or with their documents placed on the shards."""
    if self.layout != "documents" or attend.size == 1:
      return rows
    return place_rows(rows, shards=attend.size)

  def with_block_sizes(
    self, model: Transformer, mesh: Mesh | None, axis: str | None
  ) -> Recipe:
    """The recipe with numbers in place of "auto", which `train` takes, too.

    Args:
      model: Model of arrays or of shapes.
      mesh: Mesh of the devices; None for one device.
      axis: Mesh axis that shards the sequence, or None.
    """
    sizes = resolved_blocks(
      (self.feedforward_block, self.objective.block),
      model.config,
      [(x.batch // x.accumulate, x.decoded) for x in self.stages],
      mesh=mesh,
      axis=axis,
      itemsize=jnp.dtype(self.objective.dtype or jnp.float32).itemsize,
    )
    return dataclasses.replace(
      self,
      feedforward_block=sizes.feedforward,
      objective=dataclasses.replace(self.objective, block=sizes.loss),
    )

  def attend(self, mesh: Mesh | None, axis: str | None) -> ContextParallel:
    """The sharding context of a mesh, whose `axis` shards the sequence.

    It does not have the segments, which differ between stages.
    """
    remat_policy = remat.policy(self.remat)
    options = {
      "remat": remat_policy,
      "block": number_of_tokens("feedforward_block", self.feedforward_block),
      "stage_rows": self.stage_rows,
    }
    if axis is None or mesh is None or mesh.shape[axis] == 1:
      return ContextParallel(mesh=mesh, **options)
    # Documents on few shards need a ring that may stop early.
    ring = self.strategy in ("auto", "ring") and self.layout == "documents"
    return ContextParallel(
      mesh=mesh,
      axis=axis,
      layout=LAYOUTS[self.layout],
      strategy="documents" if ring else self.strategy,
      **options,
    )


class Mixture(NamedTuple):
  """Sources of rows and their shares.

  Fields:
    sources: Sources of rows, see `ringjax.data.batches.loader.Loader`.
    weights: Share of each in the rows; None for equal shares.
  """

  sources: Sequence[Any]
  weights: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """The trained model, and how its training ended.

  Attributes:
    model: Trained model, with its adapters added; those over codes, or over
      layers in host memory, are added when a layer runs.
    step: Number of steps taken.
    stopped: Signal that ended it early, or None.
    adapter: Adapter settings and arrays, for `save_adapter` and
      `Engine(adapters=)`; None if no adapters were trained.
  """

  model: Transformer
  step: int
  stopped: int | None
  adapter: tuple[Lora, dict[str, Any]] | None = None


class _StageLoader:
  """The loader of a stage, whose state holds the number of the stage."""

  def __init__(self, number: int, loader: Loader):
    self._number, self._loader = number, loader

  def __next__(self) -> Any:
    return next(self._loader)

  def state(self) -> dict[str, Any]:
    return {"stage": self._number, "loader": self._loader.state()}

  def restore(self, state: dict[str, Any]) -> None:
    if state["stage"] != self._number:
      raise CheckpointMismatchError(
        "stages",
        f"a step of stage {state['stage']} where stage {self._number} is",
        "the stages with which it was saved",
        "pass those stages, or another folder",
      )
    self._loader.restore(state["loader"])


@entering(lambda *_, mesh=None, **__: mesh)
def train(
  recipe: Recipe,
  model: Transformer,
  data: Mixture | Sequence[Mixture],
  *,
  mesh: Mesh | None = None,
  axis: str | None = None,
  adapters: Mapping[str, Any] | None = None,
  checkpoints: Checkpoints | None = None,
  report: Callable[[int, loop.TrainingReport], Any] = lambda stage, report: (
    None
  ),
  on_step: Callable[[int], Any] = lambda step: None,
  evaluate: Callable[[Transformer], float] | None = None,
) -> TrainResult:
  """Trains by a recipe to its end, resuming from `checkpoints`.

  Args:
    recipe: Settings of the training.
    model: Initial model, float32 parameters on the mesh; codes, too, for
      adapters (QLoRA). Its buffers are donated, unless adapters are trained. To
      resume, its shapes with their shardings are enough
      (`ringjax.models.abstract`).
    data: Sources of rows, for all stages or for each.
    mesh: Mesh of the devices; None for one device.
    axis: Mesh axis that shards the sequence, or None.
    adapters: Initial adapters, as `Lora.start` makes them, which are not
      changed; default: those of the recipe's `lora`.
    checkpoints: A `Checkpoints`, or None.
    report: Function that is called with a stage's number and its metrics.
    on_step: Function that is called before each step with the steps taken.
    evaluate: Held-out loss of a model with its adapters added, which must not
      change it, for `TrainingReport.held_out`; called every
      `LoopConfig.evaluate_every` steps and after the last one of a stage.

  Raises:
    RingjaxError: See `check` and `loop.fit`.
    OptionError: If a source is not of the kind that the loss learns from.
    CheckpointMismatchError: If log-probabilities of the initial model are not
      there, and its weights are not, either.
  """
  mixtures = [data] * len(recipe.stages) if isinstance(data, Mixture) else data
  if len(mixtures) != len(recipe.stages):
    raise OptionError(
      "data",
      f"{len(mixtures)} mixtures for {len(recipe.stages)} stages",
      "one, or one for each stage",
      f"pass one mixture or {len(recipe.stages)}",
    )
  recipe = recipe.with_block_sizes(model, mesh, axis)
  attend = recipe.attend(mesh, axis)
  part = batches.share_of(attend)
  check(recipe, model, attend)
  _check_adapters(recipe, model, adapters)
  _check_sources(recipe, mixtures)
  loaders = [
    _loader(recipe, index, mixture, part)
    for index, mixture in enumerate(mixtures)
  ]
  initial = model
  if adapters is not None and recipe.lora is not None:
    initial = recipe.lora.merged(adapters, model)
  references = _references(recipe, initial, mixtures, attend, checkpoints)
  optimizer = recipe.optimizer.build(recipe.total, mesh)
  adapter = recipe.adapter
  method = steps.AllParameters() if adapter is None else adapter
  base = model
  state, position = _first_state(
    recipe, optimizer, model, attend, checkpoints, adapters
  )
  steps_taken = int(jax.device_get(state.step))
  end, fitted = 0, None
  for index, stage in enumerate(recipe.stages):
    begin, end = end, end + stage.steps
    if stage.rope_scaling is not None:
      if adapter is None:
        state = _extended(state, stage.rope_scaling)
      else:
        base = extend_context(base, stage.rope_scaling)
    if steps_taken >= end and index + 1 < len(recipe.stages):
      continue
    stage_attend = dataclasses.replace(
      attend, segments=SEGMENTS[stage.segments]
    )
    rows = _StageLoader(index, loaders[index])
    if position is not None and steps_taken > begin:
      rows.restore(position)
    with loaders[index]:
      fitted = loop.fit(
        state,
        None if adapter is None else base,
        rows,
        steps=end,
        step=steps.make_step(
          optimizer,
          stage_attend,
          recipe.objective_of(stage),
          method,
          qk_clip=recipe.optimizer.qk_clip,
        ),
        place=lambda rows, stage=stage: batches.place(
          stage.rows(recipe.placed(rows, attend), recipe)
          if references is None
          else references.attached(recipe.placed(rows, attend)),
          attend,
          stage.accumulate,
          part,
          model.config.vocab,
        ),
        config=recipe.loop_config,
        checkpoints=checkpoints,
        report=lambda training_report, index=index: report(
          index, training_report
        ),
        on_step=on_step,
        evaluate=None
        if evaluate is None
        else lambda state, base=base: evaluate(
          state.params
          if adapter is None
          else adapter.merged(state.params, base)
        ),
      )
    state, position = fitted.state, None
    if fitted.stopped is not None:
      break
  assert fitted is not None
  trained = state.params
  if adapter is not None:
    trained = adapter.merged(state.params, base)
  lora = recipe.lora
  return TrainResult(
    model=trained,
    step=int(jax.device_get(state.step)),
    stopped=fitted.stopped,
    adapter=None if lora is None else (lora, state.params),
  )


def _loader(
  recipe: Recipe, index: int, mixture: Mixture, part: batches.ProcessShare
) -> Loader:
  """The loader of a stage."""
  stage = recipe.stages[index]
  return Loader(
    mixture.sources,
    length=stage.length,
    batch=stage.batch,
    # Each stage has another order, which is the same in each run.
    seed=recipe.seed + index,
    packer=recipe.packer,
    weights=mixture.weights,
    host=part.host,
    hosts=part.hosts,
    separate=stage.segments == "separate",
  )


def _check_adapters(
  recipe: Recipe, model: Transformer, adapters: Mapping[str, Any] | None
) -> None:
  """Refuses initial adapters that are not those of the recipe's `lora`."""
  lora = recipe.lora
  if lora is not None:
    lora.check_codes(model)
  if adapters is None and (lora is None or not lora.over):
    return
  if adapters is None or lora is None:
    raise OptionError(
      "adapters",
      "None for adapters that correct codes" if lora else "some without lora",
      "both results of rj.train.residual_adapters, or neither",
      "pass lora in the recipe, and adapters",
    )
  wanted = jax.eval_shape(lambda: lora.start(model))
  shapes = jax.tree.map(lambda x: tuple(x.shape), (dict(adapters), wanted))
  if shapes[0] != shapes[1]:
    raise OptionError(
      "adapters",
      f"adapters of {', '.join(adapters)}"[:200],
      f"those of {', '.join(wanted)}, of rank {lora.rank}"[:200],
      "make them with the lora of the recipe",
    )


def _check_sources(recipe: Recipe, mixtures: Sequence[Mixture]) -> None:
  """Refuses sources that the loss or the packer does not fit."""
  loss = recipe.objective.posttraining
  for stage, mixture in zip(recipe.stages, mixtures, strict=True):
    for source in mixture.sources:
      if loss is not None:
        loss.check_source(source)
      if not isinstance(source, ChatDocuments | PairDocuments):
        continue
      longest = int(source.lengths.max())
      if longest > stage.length:
        raise OptionError(
          "length",
          f"{stage.length} for a chat or pair of {longest} tokens",
          "rows as long as the longest, which is not cut",
          f"pass length={longest} or more, or ChatEncoding("
          f"length={stage.length}, too_long='truncate')",
        )
      if not isinstance(source, PairDocuments):
        continue
      if loss is None:
        raise OptionError(
          "sources",
          "pairs of answers without a loss of pairs: the rejected ones would "
          "be learned",
          "Objective(posttraining=Dpo()), for instance",
          "set --config.posttraining.loss=dpo, or pass chats",
        )
      if not isinstance(recipe.packer, BestFit):
        raise OptionError(
          "packer",
          f"{type(recipe.packer).__name__} for pairs of answers",
          "BestFit(), which keeps both answers of a pair in one row",
          "set packer='best_fit'",
        )


def _references(
  recipe: Recipe,
  model: Transformer,
  mixtures: Sequence[Mixture],
  attend: ContextParallel,
  checkpoints: Checkpoints | None,
) -> ReferenceLogprobs | None:
  """Log-probabilities of the initial model, if the loss reads them."""
  loss = recipe.objective.posttraining
  if loss is None or REFERENCE not in loss.reads:
    return None

  def rows() -> Iterator[tuple[PackedBatch, int]]:
    for index, mixture in enumerate(mixtures):
      loader = _loader(recipe, index, mixture, batches.ProcessShare())
      stage = recipe.stages[index]
      for step in range(stage.steps):
        yield loader.at(step), stage.accumulate

  return reference_logprobs.prepared(
    model,
    rows(),
    attend,
    placed=lambda rows: recipe.placed(rows, attend),
    dtype=recipe.objective.dtype,
    block=number_of_tokens("block", recipe.objective.block),
    folder=None if checkpoints is None else checkpoints.root,
    resumes=checkpoints is not None and checkpoints.holds(),
  )


def check(recipe: Recipe, model: Transformer, attend: ContextParallel) -> None:
  """Checks before the first step that all stages can run.

  Args:
    recipe: Recipe with its stages.
    model: Model of arrays or of shapes.
    attend: Sharding context.

  Raises:
    ShapeError: If the mesh does not divide the rows.
    ConfigError: If the model does not support the RoPE scaling.
    OptionError: If the model does not support the layout or the segments, has
      no encoder for the context of a stage, or has codes, or layers in host
      memory or on disk, for which only adapters can be trained.
  """
  recipe.objective.expert_balance.of_model(model)
  check_qk_clip(recipe.optimizer.qk_clip, model)
  if isinstance(model, DraftTransformer) != (recipe.draft is not None):
    raise OptionError(
      "draft",
      f"{recipe.draft} for a {type(model).__name__}",
      "DraftTraining() for the draft of a target, and None for other models",
      "make a draft with rj.models.longspec.with_draft(target)",
    )
  if attend.stages > 1:
    _check_stages(recipe, model)
  predicts = model.config.predicts is not None
  factor = recipe.objective.predict_loss
  if factor and not predicts:
    raise OptionError(
      "predict_loss",
      f"{factor:g} for a {model.config.family} without a layer that predicts "
      "further tokens",
      "a model with one",
      "add one with rj.models.with_predict_layer(model), or an EAGLE-3 head "
      "with rj.models.eagle3.with_head(model)",
    )
  if model.stack.taps and not recipe.predict_only:
    raise OptionError(
      "predict_only",
      "False for a model with an EAGLE-3 head, whose target stays as it is",
      "True, by which the head alone is trained",
      "pass predict_only=True, or rj.models.eagle3.without_head(model)",
    )
  if predicts and not factor and recipe.adapter is None:
    raise OptionError(
      "predict_loss",
      "0 for a model with a layer that predicts further tokens, of which only "
      "weight decay would change the weights",
      "a factor above 0",
      "pass objective=Objective(predict_loss=0.1), or load the model without "
      "predict_layers",
    )
  if recipe.lora is None:
    refuse_placed(
      model, "train its weights", "train adapters, with lora=Lora()"
    )
    refuse_codes(model, "train other weights than adapters of it")
  recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
  if recipe.layout == "documents" and recurrent and attend.size > 1:
    raise OptionError(
      "layout",
      "'documents' for a model with recurrent layers",
      "a layout that keeps the order of the tokens",
      "pass layout='contiguous'",
    )
  if recipe.layout == "documents" and model.stack.taps and attend.size > 1:
    raise OptionError(
      "layout",
      "'documents' for a head whose drafts read the tokens before, which are "
      "in other slots",
      "a layout that keeps the order of the tokens",
      "pass layout='striped'",
    )
  encoder = None
  if isinstance(model, CepeTransformer):
    encoder = model.encoder_config
  elif recipe.cepe or any(stage.context for stage in recipe.stages):
    raise OptionError(
      "model",
      f"a {model.config.family} without an encoder",
      "one with an encoder, for cepe=True or a stage with a context",
      "make one with rj.models.cepe.with_encoder(model)",
    )
  _check_choices(recipe, model)
  if recipe.predict_training.longest and choosing_layers(model):
    raise OptionError(
      "longest",
      f"{recipe.predict_training.longest} for a {model.config.family} whose "
      "layers choose keys, in blocks of adjacent positions",
      "a model whose layers read all keys, or those of a window",
      "pass longest=0, which trains at plain positions",
    )
  separate = any(stage.segments == "separate" for stage in recipe.stages)
  if separate and recurrent:
    raise OptionError(
      "segments",
      "'separate' for a model with recurrent layers, whose state skips no "
      "document",
      "a model of attention alone",
      "leave segments out",
    )
  form = jax.eval_shape(lambda model: model, model)
  for stage in recipe.stages:
    batches.check(stage.batch, stage.decoded, attend, stage.accumulate)
    if stage.context is not None:
      _check_chunks(stage, recipe, encoder, attend)
    if stage.rope_scaling is not None:
      form = extend_context(form, stage.rope_scaling)


def _check_stages(recipe: Recipe, model: Transformer) -> None:
  """Refuses what rows in stages are not trained with."""
  faults = {
    "the draft of a target, which reads its keys": recipe.draft,
    "contexts that an encoder reads": any(x.context for x in recipe.stages),
    "layers that read tokens' ids or share weights": model.config.inputs,
  }
  for name, is_there in faults.items():
    if is_there:
      raise stages_error(name)
  model.stack.check_stages()


def _check_choices(recipe: Recipe, model: Transformer) -> None:
  """Refuses what models whose layers choose keys are not trained with."""
  warm_up = any(stage.index_warm_up for stage in recipe.stages)
  if warm_up and not has_indexes(model):
    raise OptionError(
      "index_warm_up",
      f"a stage of it for a {model.config.family} whose layers have no index",
      "layers with an index of keys",
      "add one with rj.train.with_sparse_attention, or leave it out",
    )
  if warm_up and recipe.adapter is not None:
    raise OptionError(
      "index_warm_up",
      f"it with {type(recipe.adapter).__name__}, which freezes the index",
      "a training of all parameters",
      "train the index first, in a run of its own",
    )
  if not choosing_layers(model):
    return
  if recipe.layout == "documents":
    raise OptionError(
      "layout",
      "'documents' for a model whose layers choose keys",
      "a layout that does not look at documents",
      "pass layout='striped'",
    )
  if recipe.strategy not in ("auto", "ring"):
    raise OptionError(
      "strategy",
      f"{recipe.strategy!r} for a model whose layers choose keys",
      "'ring', which brings the chosen keys to their queries",
      "leave strategy out",
    )
  if any(stage.segments == "separate" for stage in recipe.stages):
    raise OptionError(
      "segments",
      "'separate' for a model whose layers choose keys",
      "'same', in which a token sees its own document",
      "leave segments out",
    )


def _check_chunks(
  stage: Stage, recipe: Recipe, encoder: Any, attend: ContextParallel
) -> None:
  """Refuses a context that the encoder or the mesh does not support."""
  context: Any = stage.context
  if context.chunk > encoder.chunk:
    raise OptionError(
      "context",
      f"chunks of {context.chunk} tokens",
      f"at most {encoder.chunk}, the longest chunk of the encoder",
      "cut the rows into shorter chunks",
    )
  if context.tokens % attend.size:
    raise ShapeError(
      "context",
      f"{context.tokens} tokens over {attend.size} shards",
      f"a multiple of {attend.size}",
      "pass chunks= as a multiple of the shards",
    )
  if recipe.layout == "documents" and attend.size > 1:
    raise OptionError(
      "layout",
      "'documents' with a context",
      "a layout that keeps rows together",
      "pass layout='striped'",
    )


def _first_state(
  recipe: Recipe,
  optimizer: Any,
  model: Any,
  attend: ContextParallel,
  saved: PyTree,
  adapters: Mapping[str, Any] | None,
) -> tuple[steps.TrainState, Any]:
  """The first state, and the position of its data if it was restored."""
  mesh: Any = attend.mesh
  params = model
  if recipe.adapter is not None:
    params = (
      recipe.adapter.start(model, seed=recipe.seed)
      if adapters is None
      # The step donates its state.
      else jax.tree.map(lambda x: jnp.array(x, jnp.float32), dict(adapters))
    )
    if mesh is not None and recipe.lora is not None:
      replicated = jax.sharding.PartitionSpec()
      params = jax.device_put(
        params, jax.sharding.NamedSharding(mesh, replicated)
      )
  state = steps.form(optimizer, params, mesh)
  form = state._asdict()
  leaves = jax.tree.leaves(params)
  shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  _check_memory(recipe, state, model, attend, saved, resident=not shapes)
  restored = None
  if saved is not None:
    try:
      if not shapes and saved.holds(form):
        # Two states at once might not fit the memory.
        for x in leaves:
          x.delete()
        shapes = True
      restored = saved.restore(like=form)
    except CheckpointMismatchError as error:
      refuse_other_blocks(error)
      raise
  if restored is not None:
    return steps.TrainState(**restored[0]), restored[1]["data"]
  if shapes:
    raise OptionError(
      "model",
      "its shapes alone, and no step is saved",
      "a saved step to resume from, or weights to begin with",
      "pass a model with weights",
    )
  return steps.start(optimizer, params, mesh), None


def _check_memory(
  recipe: Recipe,
  state: steps.TrainState,
  model: Any,
  attend: ContextParallel,
  saved: PyTree,
  *,
  resident: bool,
) -> None:
  """Compares the memory that all stages need with what the devices have."""
  mesh: Any = attend.mesh
  platform = jax.local_devices()[0].platform
  dtype = recipe.objective.dtype or jnp.float32
  needs = memory_needs.training_memory(
    state,
    model.config,
    [(x.batch // x.accumulate, x.decoded) for x in recipe.stages],
    mesh=mesh,
    axis=attend.axis if attend.sharded else None,
    remat=recipe.remat,
    itemsize=jnp.dtype(dtype).itemsize,
    saves=saved is not None and platform == "cpu",
  )
  memory_needs.check_memory(needs, mesh, resident=resident)


def _extended(
  state: steps.TrainState, scaling: RopeScaling
) -> steps.TrainState:
  """The state, with the same arrays, of the model with a longer context."""
  extended = extend_context(state.params, scaling)
  form = jax.tree.structure(extended)
  is_model = lambda x: isinstance(x, Transformer)
  retree = lambda x: (
    jax.tree.unflatten(form, jax.tree.leaves(x)) if is_model(x) else x
  )
  return jax.tree.map(retree, state._replace(params=extended), is_leaf=is_model)


def flops(model: Transformer, length: int, *, adapters: bool = False) -> float:
  """FLOPs per token of a step, forward and backward.

  Three times those of the forward pass; attention as if a row were one
  document, which counts too much where several are packed. Recomputation to
  save memory is not counted.

  Args:
    model: Model of arrays or shapes.
    length: Tokens of a row, T.
    adapters: Whether only adapters are trained: frozen weights need no
      gradient, which is a third of a matrix's work.
  """
  if isinstance(model, DraftTransformer):
    return _draft_flops(model, length)
  profile = work_profile.profile(model, length)
  head = 2.0 * model.config.vocab * model.config.embed
  pairs = profile.pair_s * (length + 1) / 2
  return (2.0 if adapters else 3.0) * (profile.token_s + head) + 3.0 * pairs


def _draft_flops(model: DraftTransformer, length: int) -> float:
  """FLOPs per token of a draft; its target only runs forward, with no head."""
  target_profile = work_profile.profile(model.target, length)
  layer, cross = model.config.layers[0], model.target.config.layers[-1]
  window: Any = layer.attention.reach
  attention_flops = min(window + 1, length) * layer.attention.pair_flops
  attention_flops += cross.attention.pair_flops * (length + 1) / 2
  block = 2.0 * sum(x.size for x in jax.tree.leaves(model.block))
  head = 2.0 * model.config.vocab * model.config.embed
  forward = target_profile.token_s + target_profile.pair_s * (length + 1) / 2
  return forward + 3.0 * (block + attention_flops) + 2.0 * head


def dtype_of(name: str | None) -> Any:
  """Computation dtype by its name; None for float32, the parameters' dtype."""
  if name is None:
    return None
  one_of("dtype", name, ("float32", "bfloat16", "float16"))
  return None if name == "float32" else jnp.dtype(name)
