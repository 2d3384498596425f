"""A training, from its first to its last stage, as one value.

Guarantees: a recipe and its sources determine the result; the mesh changes only
the speed. Stages follow each other with one optimizer and one count of steps;
each has its own length, batch and RoPE scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.data.loader import Loader
from ringjax.data.packing import BestFit, PackedBatch, Packer
from ringjax.data.placement import place_rows
from ringjax.errors import CheckpointMismatchError, OptionError, ShapeError
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.cepe import CepeTransformer
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention import nesting
from ringjax.ops.mask import Mask, SameSegment, SeparateDocuments
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.parallel.mesh import entering
from ringjax.train import batch as batches
from ringjax.train import loop, memory_needs, remat
from ringjax.train import step as steps
from ringjax.train.checkpoint import Checkpoints
from ringjax.train.draft_training import DraftTraining
from ringjax.train.encoder_training import ContextSplit, EncoderTraining
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.lora import Lora

LAYOUTS: dict[str, Layout] = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
  # Slots in order; `place_rows` places each row's documents on the shards.
  "documents": Contiguous(),
}
# Which segments of a row see each other.
SEGMENTS: dict[str, Mask] = {
  "same": SameSegment(),
  "separate": SeparateDocuments(),
}
# Each from (b1, b2, eps) to the transformation that optax calls scale_by_...
_SCALES: dict[
  str, Callable[[float, float, float], optax.GradientTransformation]
] = {
  "adamw": optax.scale_by_adam,
  "lion": lambda b1, b2, eps: optax.scale_by_lion(b1, b2),
  "adafactor": lambda b1, b2, eps: optax.scale_by_factored_rms(),
  "sgd": lambda b1, b2, eps: optax.trace(b1),
}
OPTIMIZERS = tuple(_SCALES)
SCHEDULES = ("cosine", "linear", "constant", "wsd")
# Fields that only some optimizers or schedules have.
_USERS = {
  "b1": ("name", ("adamw", "lion", "sgd")),
  "b2": ("name", ("adamw", "lion")),
  "eps": ("name", ("adamw",)),
  "decay": ("schedule", ("wsd",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """An optimizer of optax and its learning rate schedule.

  Attributes:
    name: adamw, lion, adafactor or sgd.
    learning_rate: the highest learning rate.
    end_learning_rate: that of the last step, unless it is the only one.
    schedule: cosine, linear, constant or wsd, after the warm-up. "wsd" stays
      at `learning_rate` and falls linearly in the end: warmup, stable, decay.
    warmup: steps from 0 to `learning_rate`.
    decay: the part of all steps in which "wsd" falls; default 0.2.
    b1: decay of the first moment, of all but adafactor; default 0.9.
    b2: decay of the second, of adamw and lion; default 0.95.
    eps: number added to the root of the second moment, of adamw; default 1e-8.
    weight_decay: of matrices; norms, biases and other vectors have none.
    clip: maximum of the gradients' global norm; None for none.
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

  def __post_init__(self) -> None:
    one_of("name", self.name, OPTIMIZERS)
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

  def learning_rates(self, total: int) -> optax.Schedule:
    """The learning rate of each of `total` steps."""
    high, low = self.learning_rate, self.end_learning_rate
    # Steps count from 0. The first one after the warm-up has the highest rate.
    last = total - self.warmup - 1
    fall = max(1, last)
    if self.schedule == "wsd":
      part = 0.2 if self.decay is None else self.decay
      fall = max(1, min(fall, round(part * total)))
    falls = self.schedule != "constant" and (last > 0 or self.warmup > 0)

    def after(count: Any) -> Any:
      if not falls or last < 0:
        return jnp.asarray(high, jnp.float32)
      done = jnp.clip((count - (last - fall)) / fall, 0.0, 1.0)
      if self.schedule == "cosine":
        done = 0.5 * (1.0 - jnp.cos(jnp.pi * done))
      return high + (low - high) * done

    if not self.warmup:
      return after
    # The first step has a learning rate above 0 too.
    grow = lambda count: high * (count + 1) / self.warmup
    return optax.join_schedules([grow, after], [self.warmup])

  def learning_rate_at(self, step: int, total: int) -> float:
    """The learning rate of one of `total` steps."""
    return float(np.asarray(self.learning_rates(total)(step)))

  def build(self, total: int) -> optax.GradientTransformation:
    """The optimizer of `total` steps."""
    b1 = 0.9 if self.b1 is None else self.b1
    b2 = 0.95 if self.b2 is None else self.b2
    eps = 1e-8 if self.eps is None else self.eps
    # What is left out keeps its place in the tree of a saved state.
    none = optax.identity()
    return optax.chain(
      none if self.clip is None else optax.clip_by_global_norm(self.clip),
      _SCALES[self.name](b1, b2, eps),
      optax.add_decayed_weights(self.weight_decay, decayed)
      if self.weight_decay
      else none,
      optax.scale_by_learning_rate(self.learning_rates(total)),
    )


def decayed(params: PyTree) -> PyTree:
  """Which parameters weight decay applies to: a tree of bool as `params`.

  To matrices: arrays of two axes or more of their own, one of them named, that
  are no biases. The axis over layers that share an array is not their own, and
  a bias for each head and feature is still a bias.
  """

  def one(path: Any, x: Any) -> Any:
    if not isinstance(x, nnx.Variable):
      # Adapters are matrices.
      return jax.tree.map(lambda leaf: leaf.ndim > 1, x)
    axes = x.get_metadata()["axes"]
    is_bias = str(getattr(path[-1], "name", "")).endswith("bias")
    matrix = len(axes) > 1 and any(axes) and not is_bias
    return jax.tree.map(lambda _: matrix, x)

  return jax.tree_util.tree_map_with_path(
    one, params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A part of a training with one length of rows.

  Attributes:
    steps: how many.
    length: T, tokens of a row.
    batch: rows of a step.
    accumulate: micro-batches of a step.
    rope_scaling: extends the context from here on; None leaves it.
    context: how rows are cut into what an encoder reads and what the decoder
      reads; None: all is the decoder's.
    segments: of `SEGMENTS`. "same": a token sees its own document; "separate":
      documents do not see each other, and questions and link tokens see them
      all, as `rj.SeparateDocuments` says.
  """

  steps: int
  length: int
  batch: int
  accumulate: int = 1
  rope_scaling: RopeScaling | None = None
  context: ContextSplit | None = None
  segments: str = "same"

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
    least = context.tokens + (0 if context.repeated else 1)
    if self.length < least:
      raise OptionError(
        "context",
        f"{context.tokens} tokens of rows of {self.length}",
        f"rows of at least {least}",
        f"pass length={2 * context.tokens}, or fewer chunks",
      )

  @property
  def decoded(self) -> int:
    """Tokens of a row that the decoder reads."""
    return (
      self.length if self.context is None else self.context.decoded(self.length)
    )

  def rows(self, rows: PackedBatch, recipe: Recipe) -> Any:
    """The rows of a loader, cut up or moved as the training asks."""
    if recipe.draft is not None:
      return recipe.draft.rows(rows, recipe.seed)
    if self.context is None:
      return rows
    teacher = recipe.objective.distil > 0
    return self.context.split(rows, recipe.seed, teacher=teacher)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """All settings of a training but its data, model and mesh.

  Attributes:
    stages: one after another.
    optimizer: of all stages.
    objective: the loss.
    layout: of the sequence over the shards, of `LAYOUTS`; "documents" places
      each document on as many shards as its work needs, row by row, and rings
      make no more hops than these need; for models without recurrent layers.
    strategy: of attention, by its name in `ringjax.dot_product_attention`.
    remat: activations that are kept for the backward pass, of `remat.POLICIES`.
    lora: adapters in place of all parameters, or None.
    cepe: trains the encoder and the cross-attention of a model that has them,
      and not its decoder.
    draft: trains the block of a `DraftTransformer`, and not its target; None:
      the model is no draft.
    packer: of documents into rows.
    seed: of the data and of adapters.
    loop_config: when to log and save, and which failures to tolerate.
  """

  stages: tuple[Stage, ...]
  optimizer: Optimizer = Optimizer()
  objective: steps.Objective = steps.Objective()
  layout: str = "striped"
  strategy: str = "ring"
  remat: str = "attention"
  lora: Lora | None = None
  cepe: bool = False
  draft: DraftTraining | None = None
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
    integer("seed", self.seed, least=0)
    asked = {"lora": self.lora, "cepe": self.cepe, "draft": self.draft}
    asked = [name for name, value in asked.items() if value]
    if len(asked) > 1:
      raise OptionError(
        asked[0],
        f"{' and '.join(asked)} together",
        "one of them: what it is beside is frozen",
        "leave the others out",
      )
    if self.draft is not None:
      self._check_draft(self.draft)
    alone = [s for s in self.stages if s.context is None or s.context.repeated]
    if self.objective.distil and alone:
      raise OptionError(
        "distil",
        f"{self.objective.distil:g} with a stage whose decoder reads all",
        "stages with a context of other tokens, which the teacher reads too",
        "train those stages in a run of their own",
      )

  def _check_draft(self, draft: DraftTraining) -> None:
    for stage in self.stages:
      draft.check(stage.length)
      others = {
        "context": stage.context,
        "rope_scaling": stage.rope_scaling,
        "segments": stage.segments != "same",
      }
      for name, value in others.items():
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
  def adapter(self) -> Lora | EncoderTraining | DraftTraining | None:
    """What is trained in place of all parameters, or None."""
    if self.draft is not None:
      return self.draft
    return EncoderTraining() if self.cepe else self.lora

  @property
  def total(self) -> int:
    """Steps of all stages."""
    return sum(stage.steps for stage in self.stages)

  def placed(self, rows: PackedBatch, attend: ContextParallel) -> PackedBatch:
    """Rows in true order, or with their documents placed on the shards."""
    if self.layout != "documents" or attend.size == 1:
      return rows
    return place_rows(rows, shards=attend.size)

  def attend(self, mesh: Mesh | None, axis: str | None) -> ContextParallel:
    """The sharding context of a mesh, whose `axis` shards the sequence.

    Stages have segments of their own.
    """
    kept = remat.policy(self.remat)
    if axis is None or mesh is None or mesh.shape[axis] == 1:
      return ContextParallel(mesh=mesh, remat=kept)
    # Documents on few shards need a ring that may stop early.
    ring = self.strategy in ("auto", "ring") and self.layout == "documents"
    return ContextParallel(
      mesh=mesh,
      axis=axis,
      layout=LAYOUTS[self.layout],
      strategy="documents" if ring else self.strategy,
      remat=kept,
    )


class Mixture(NamedTuple):
  """Sources of rows and their shares.

  Fields:
    sources: see `ringjax.data.loader.Loader`.
    weights: share of each in the rows; None for equal shares.
  """

  sources: Sequence[Any]
  weights: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """The trained model, and how its training ended.

  Attributes:
    model: with its adapters added.
    step: steps taken.
    stopped: the signal that ended it early, or None.
    adapter: how adapters are added, and their arrays, for `save_adapter` and
      `Engine(adapters=)`; None where no adapters were trained.
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
  checkpoints: Checkpoints | None = None,
  report: Callable[[int, loop.TrainingReport], Any] = lambda stage, report: (
    None
  ),
  on_step: Callable[[int], Any] = lambda step: None,
  evaluate: Callable[[Transformer], float] | None = None,
) -> TrainResult:
  """Trains by a recipe to its end, resuming from `checkpoints`.

  Args:
    recipe: the settings.
    model: to begin with, float32 parameters on the mesh. Its buffers are
      donated, unless adapters are trained. To resume, its shapes with their
      shardings are enough (`ringjax.models.abstract`).
    data: sources of rows, of all stages or of each.
    mesh: of the devices; None is one device.
    axis: that shards the sequence, or None.
    checkpoints: a `Checkpoints`, or None.
    report: called with the number of the stage and the metrics of its steps.
    on_step: called before each step with how many are taken.
    evaluate: Held-out loss of a model with its adapters added, which it leaves
      as it is, for `TrainingReport.held_out`; called every
      `LoopConfig.evaluate_every` steps and after the last one of a stage.

  Raises:
    RingjaxError: see `check` and `loop.fit`.
  """
  mixtures = [data] * len(recipe.stages) if isinstance(data, Mixture) else data
  if len(mixtures) != len(recipe.stages):
    raise OptionError(
      "data",
      f"{len(mixtures)} mixtures for {len(recipe.stages)} stages",
      "one, or one for each stage",
      f"pass one mixture or {len(recipe.stages)}",
    )
  attend = recipe.attend(mesh, axis)
  part = batches.share_of(attend)
  check(recipe, model, attend)
  loaders = [
    Loader(
      mixture.sources,
      length=stage.length,
      batch=stage.batch,
      # Another order in each stage, the same in each run.
      seed=recipe.seed + index,
      packer=recipe.packer,
      weights=mixture.weights,
      host=part.host,
      hosts=part.hosts,
      separate=stage.segments == "separate",
    )
    for index, (stage, mixture) in enumerate(
      zip(recipe.stages, mixtures, strict=True)
    )
  ]
  optimizer = recipe.optimizer.build(recipe.total)
  adapter = recipe.adapter
  method: Any = steps.AllParameters() if adapter is None else adapter
  base = model
  state, position = _first_state(recipe, optimizer, model, attend, checkpoints)
  taken = int(jax.device_get(state.step))
  end, ended = 0, None
  for index, stage in enumerate(recipe.stages):
    begin, end = end, end + stage.steps
    if stage.rope_scaling is not None:
      if adapter is None:
        state = _extended(state, stage.rope_scaling)
      else:
        base = extend_context(base, stage.rope_scaling)
    if taken >= end and index + 1 < len(recipe.stages):
      continue
    here = dataclasses.replace(attend, segments=SEGMENTS[stage.segments])
    rows = _StageLoader(index, loaders[index])
    if position is not None and taken > begin:
      rows.restore(position)
    with loaders[index]:
      ended = loop.fit(
        state,
        None if adapter is None else base,
        rows,
        steps=end,
        step=steps.make_step(optimizer, here, recipe.objective, method),
        place=lambda rows, stage=stage: batches.place(
          stage.rows(recipe.placed(rows, attend), recipe),
          attend,
          stage.accumulate,
          part,
          model.config.vocab,
        ),
        config=recipe.loop_config,
        checkpoints=checkpoints,
        report=lambda one, index=index: report(index, one),
        on_step=on_step,
        evaluate=None
        if evaluate is None
        else lambda state, base=base: evaluate(
          state.params
          if adapter is None
          else adapter.merged(state.params, base)
        ),
      )
    state, position = ended.state, None
    if ended.stopped is not None:
      break
  assert ended is not None
  made = state.params
  if adapter is not None:
    made = adapter.merged(state.params, base)
  lora = recipe.lora
  return TrainResult(
    model=made,
    step=int(jax.device_get(state.step)),
    stopped=ended.stopped,
    adapter=None if lora is None else (lora, state.params),
  )


def check(recipe: Recipe, model: Transformer, attend: ContextParallel) -> None:
  """Checks before the first step that all stages can run.

  Args:
    recipe: with its stages.
    model: of arrays or of shapes.
    attend: the sharding context.

  Raises:
    ShapeError: the mesh does not divide the rows.
    ConfigError: the model does not support the RoPE scaling.
    OptionError: the model does not support the layout or the segments, has
      no encoder for the context of a stage, or has layers in host memory or on
      disk, of which only adapters can be trained.
  """
  if isinstance(model, DraftTransformer) != (recipe.draft is not None):
    raise OptionError(
      "draft",
      f"{recipe.draft} for a {type(model).__name__}",
      "DraftTraining() for the draft of a target, and None for other models",
      "make a draft with rj.models.longspec.with_draft(target)",
    )
  if recipe.adapter is None or recipe.lora is None:
    refuse_placed(
      model, "train its weights", "train adapters, with lora=Lora()"
    )
  recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
  if recipe.layout == "documents" and recurrent and attend.size > 1:
    raise OptionError(
      "layout",
      "'documents' for a model with recurrent layers",
      "a layout that keeps the order of the tokens",
      "pass layout='contiguous'",
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


def _check_chunks(
  stage: Stage, recipe: Recipe, encoder: Any, attend: ContextParallel
) -> None:
  """Refuses a context that the encoder or the mesh cannot have."""
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
  saved: Any,
) -> tuple[steps.TrainState, Any]:
  """The state to begin with, and the position of its data if it was saved."""
  mesh: Any = attend.mesh
  params: Any = model
  if recipe.adapter is not None:
    params = recipe.adapter.start(model, seed=recipe.seed)
    if mesh is not None and recipe.lora is not None:
      everywhere = jax.sharding.PartitionSpec()
      params = jax.device_put(
        params, jax.sharding.NamedSharding(mesh, everywhere)
      )
  state = steps.form(optimizer, params, mesh)
  form = state._asdict()
  leaves = jax.tree.leaves(params)
  shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  _check_memory(recipe, state, model, attend, saved, resident=not shapes)
  found = None
  if saved is not None:
    if not shapes and saved.holds(form):
      # Two states at once might not fit the memory.
      for x in leaves:
        x.delete()
      shapes = True
    found = saved.restore(like=form)
  if found is not None:
    return steps.TrainState(**found[0]), found[1]["data"]
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
  saved: Any,
  *,
  resident: bool,
) -> None:
  """Compares what all stages keep with the memory, before the first step."""
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
  """The same arrays in the tree of the model with a longer context."""
  made = extend_context(state.params, scaling)
  form = jax.tree.structure(made)
  is_model = lambda x: isinstance(x, Transformer)
  replaced = lambda x: (
    jax.tree.unflatten(form, jax.tree.leaves(x)) if is_model(x) else x
  )
  return jax.tree.map(replaced, state._replace(params=made), is_leaf=is_model)


def flops(model: Transformer, length: int, *, adapters: bool = False) -> float:
  """FLOPs of a token in a step, forward and backward.

  Three times those of the forward pass; attention as if a row were one
  document, which counts too much where several are packed. What is computed
  again to save memory is not counted.

  Args:
    model: of arrays or shapes.
    length: T, tokens of a row.
    adapters: whether only these are trained: frozen weights need no gradient,
      which is a third of a matrix's work.
  """
  if isinstance(model, DraftTransformer):
    return _draft_flops(model, length)
  made = work_profile.profile(model, length)
  head = 2.0 * model.config.vocab * model.config.embed
  pairs = made.pair_s * (length + 1) / 2
  return (2.0 if adapters else 3.0) * (made.token_s + head) + 3.0 * pairs


def _draft_flops(model: DraftTransformer, length: int) -> float:
  """The same of a draft: its target goes forward alone, without a head."""
  below = work_profile.profile(model.target, length)
  layer, cross = model.config.layers[0], model.target.config.layers[-1]
  window: Any = layer.attention.reach
  seen = min(window + 1, length) * layer.attention.pair_flops
  seen += cross.attention.pair_flops * (length + 1) / 2
  block = 2.0 * sum(x.size for x in jax.tree.leaves(model.block))
  head = 2.0 * model.config.vocab * model.config.embed
  forward = below.token_s + below.pair_s * (length + 1) / 2
  return forward + 3.0 * (block + seen) + 2.0 * head


def dtype_of(name: str | None) -> Any:
  """A dtype of computation by its name; None for float32, the parameters'."""
  if name is None:
    return None
  one_of("dtype", name, ("float32", "bfloat16", "float16"))
  return None if name == "float32" else jnp.dtype(name)
