"""A training, from its first to its last stage, as one value.

Guarantees: a recipe and its sources decide all that is trained; where it runs
decides only how fast. Stages follow each other with one optimizer and one count
of steps; each has its own length, batch and RoPE scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ringjax.checks import positive_int
from ringjax.data.loader import Loader
from ringjax.data.packing import BestFit, PackedBatch, Packer
from ringjax.data.placement import place_rows
from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.kv.state import StateShape
from ringjax.models import work_profile
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.ops.attention import nesting
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.parallel.mesh import entering
from ringjax.plan.cost import check_count, check_number
from ringjax.train import batch as batches
from ringjax.train import loop, remat
from ringjax.train import step as steps
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.lora import Lora

LAYOUTS: dict[str, Layout] = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
  # Slots in order; who has which is decided for each row, by `place_rows`.
  "documents": Contiguous(),
}
OPTIMIZERS = ("adamw", "lion", "adafactor", "sgd")
SCHEDULES = ("cosine", "linear", "constant", "wsd")


def _choice(name: str, value: Any, known: Iterable[str]) -> None:
  if value not in known:
    raise OptionError(
      name,
      repr(value),
      f"one of {', '.join(known)}",
      f"set {name} to one of these",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """An optimizer of optax and its learning rate.

  Attributes:
    name: adamw, lion, adafactor or sgd.
    learning_rate: the highest learning rate.
    end_learning_rate: that of the last step.
    schedule: cosine, linear, constant or wsd, behind the warm-up. "wsd" stays
      at `learning_rate` and falls linearly in the end: warmup, stable, decay.
    warmup: steps from 0 to `learning_rate`.
    decay: the part of all steps in which "wsd" falls; default 0.2.
    b1: decay of the first moment, of all but adafactor; default 0.9.
    b2: decay of the second, of adamw and lion; default 0.95.
    weight_decay: of matrices; norms, biases and what else is one number for a
      feature or head have none.
    clip: of the gradients' global norm; None for none.
  """

  name: str = "adamw"
  learning_rate: float = 3e-4
  end_learning_rate: float = 0.0
  schedule: str = "cosine"
  warmup: int = 0
  decay: float | None = None
  b1: float | None = None
  b2: float | None = None
  weight_decay: float = 0.1
  clip: float | None = 1.0

  def __post_init__(self) -> None:
    _choice("name", self.name, OPTIMIZERS)
    _choice("schedule", self.schedule, SCHEDULES)
    for name in ("learning_rate", "end_learning_rate", "weight_decay"):
      check_number(name, getattr(self, name))
    for name, of, users in (
      ("b1", self.name, ("adamw", "lion", "sgd")),
      ("b2", self.name, ("adamw", "lion")),
      ("decay", self.schedule, ("wsd",)),
    ):
      value = getattr(self, name)
      if value is None:
        continue
      check_number(name, value, most=1.0)
      if of not in users:
        raise OptionError(
          name,
          f"{value} with {of!r}, which has none",
          f"it with {', '.join(users)} only",
          "leave it out",
        )
    check_count("warmup", self.warmup, least=0)
    if self.clip is not None:
      check_number("clip", self.clip)

  def learning_rates(self, total: int) -> optax.Schedule:
    """The learning rate of each of `total` steps."""
    rest = max(1, total - self.warmup)
    if self.schedule == "constant":
      after = optax.constant_schedule(self.learning_rate)
    elif self.schedule == "linear":
      after = optax.linear_schedule(
        self.learning_rate, self.end_learning_rate, rest
      )
    elif self.schedule == "wsd":
      part = 0.2 if self.decay is None else self.decay
      fall = max(1, min(rest, round(part * total)))
      after = optax.linear_schedule(
        self.learning_rate,
        self.end_learning_rate,
        fall,
        transition_begin=rest - fall,
      )
    else:
      low = (
        self.end_learning_rate / self.learning_rate
        if self.learning_rate
        else 0.0
      )
      after = optax.cosine_decay_schedule(self.learning_rate, rest, low)
    if not self.warmup:
      return after
    # The first step is not lost: it has a rate too.
    grow = lambda count: self.learning_rate * (count + 1) / self.warmup
    return optax.join_schedules([grow, after], [self.warmup])

  def learning_rate_at(self, step: int, total: int) -> float:
    """The learning rate of one of `total` steps."""
    return float(np.asarray(self.learning_rates(total)(step)))

  def build(self, total: int) -> optax.GradientTransformation:
    """The optimizer of `total` steps."""
    rate = self.learning_rates(total)
    decay: Any = optax.add_decayed_weights(self.weight_decay, decayed)
    if not self.weight_decay:
      decay = optax.identity()
    b1 = 0.9 if self.b1 is None else self.b1
    b2 = 0.95 if self.b2 is None else self.b2
    kinds = {
      "adamw": lambda: optax.scale_by_adam(b1, b2),
      "lion": lambda: optax.scale_by_lion(b1, b2),
      "adafactor": optax.scale_by_factored_rms,
      "sgd": lambda: optax.trace(b1),
    }
    clip: Any = optax.identity()
    if self.clip is not None:
      clip = optax.clip_by_global_norm(self.clip)
    return optax.chain(
      clip, kinds[self.name](), decay, optax.scale_by_learning_rate(rate)
    )


def decayed(params: Any) -> Any:
  """Which numbers weight decay applies to: a tree of bool as `params`.

  Layers that share an array do not make a matrix of a vector, and a bias for
  each head and feature is still a bias: a matrix has two axes or more of its
  own, one of them named, and is no bias.
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
  """Steps of one length.

  Attributes:
    steps: how many.
    length: T, tokens of a row.
    batch: rows of a step.
    accumulate: micro-batches of a step.
    rope_scaling: how the rotations reach further from here on; None: as before.
  """

  steps: int
  length: int
  batch: int
  accumulate: int = 1
  rope_scaling: RopeScaling | None = None

  def __post_init__(self) -> None:
    for name in ("steps", "length", "batch", "accumulate"):
      positive_int(name, getattr(self, name))
    if self.batch % self.accumulate:
      raise OptionError(
        "batch",
        f"{self.batch} rows in {self.accumulate} micro-batches",
        "rows that can be dealt out evenly",
        "change one of them",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What is trained and how.

  Attributes:
    stages: one after another.
    optimizer: of all of them.
    objective: what is minimised.
    layout: of the sequence over the shards, of `LAYOUTS`; "documents" deals
      each document to as many shards as its work asks for, row by row, and
      the ring turns as far as these reach; for models without recurrent layers.
    strategy: of attention, by its name in `ringjax.dot_product_attention`.
    remat: what is kept of a layer, of `remat.POLICIES`.
    lora: adapters in place of all parameters, or None.
    packer: of documents into rows.
    seed: of the data and of adapters.
    pace: how often it reports and saves.
  """

  stages: tuple[Stage, ...]
  optimizer: Optimizer = Optimizer()
  objective: steps.Objective = steps.Objective()
  layout: str = "striped"
  strategy: str = "ring"
  remat: str = "attention"
  lora: Lora | None = None
  packer: Packer = BestFit()
  seed: int = 0
  pace: loop.LoopConfig = loop.LoopConfig()

  def __post_init__(self) -> None:
    if not self.stages:
      raise OptionError("stages", "none", "one or more", "add one")
    _choice("layout", self.layout, LAYOUTS)
    if self.strategy != "auto":
      nesting.named(self.strategy)
    _choice("remat", self.remat, remat.POLICIES)
    check_count("seed", self.seed, least=0)

  @property
  def total(self) -> int:
    """Steps of all stages."""
    return sum(stage.steps for stage in self.stages)

  def dealt(self, rows: PackedBatch, attend: ContextParallel) -> PackedBatch:
    """Rows in true order, or their documents dealt to the shards."""
    if self.layout != "documents" or attend.size == 1:
      return rows
    return place_rows(rows, shards=attend.size)

  @property
  def _strategy(self) -> str:
    # What deals documents to few shards does it so that a ring may stop early.
    ring = self.strategy in ("auto", "ring")
    return "documents" if ring and self.layout == "documents" else self.strategy

  def attend(self, mesh: Any, axis: str | None) -> ContextParallel:
    """How tokens lie on a mesh."""
    kept = remat.policy(self.remat)
    if axis is None or mesh.shape[axis] == 1:
      # One shard: there is nobody to send to.
      return ContextParallel(mesh=mesh, remat=kept)
    return ContextParallel(
      mesh=mesh,
      axis=axis,
      layout=LAYOUTS[self.layout],
      strategy=self._strategy,
      remat=kept,
    )


class Mixture(NamedTuple):
  """What rows are made of.

  Fields:
    sources: see `ringjax.data.loader.Loader`.
    weights: of each, in rows; None for the same.
  """

  sources: Sequence[Any]
  weights: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """What came out.

  Attributes:
    model: with adapters added, if there were some.
    step: steps taken.
    stopped: the signal that ended it early, or None.
  """

  model: Transformer
  step: int
  stopped: int | None


class _Staged:
  """The loader of a stage, which says which one it is."""

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
        "undo what was changed, or choose another folder",
      )
    self._loader.restore(state["loader"])


@entering(lambda *_, mesh=None, **__: mesh)
def train(
  recipe: Recipe,
  model: Transformer,
  data: Mixture | Sequence[Mixture],
  *,
  mesh: Any = None,
  axis: str | None = None,
  checkpoints: Any = None,
  report: Callable[[int, loop.TrainingReport], Any] = lambda stage, report: (
    None
  ),
  on_step: Callable[[int], Any] = lambda step: None,
) -> TrainResult:
  """Follows a recipe to its end, or on from where `checkpoints` stands.

  Args:
    recipe: what is done.
    model: to begin with, float32 parameters on the mesh. Its memory is taken
      over, unless adapters are trained. To go on from a saved step its shapes
      with their shardings do (`ringjax.models.abstract`).
    data: what rows are made of, in all stages or in each.
    mesh: where it runs; None is one device.
    axis: that shards the sequence, or None.
    checkpoints: a `Checkpoints`, or None.
    report: called with the number of the stage and what its steps gave.
    on_step: called before each step with how many are taken.

  Raises:
    RingjaxError: see `check` and `loop.fit`.
  """
  mixtures = [data] * len(recipe.stages) if isinstance(data, Mixture) else data
  if len(mixtures) != len(recipe.stages):
    raise OptionError(
      "data",
      f"{len(mixtures)} mixtures for {len(recipe.stages)} stages",
      "one, or one for each stage",
      "add what is missing",
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
      seed=recipe.seed + number,
      packer=recipe.packer,
      weights=mixture.weights,
      host=part.host,
      hosts=part.hosts,
    )
    for number, (stage, mixture) in enumerate(
      zip(recipe.stages, mixtures, strict=True)
    )
  ]
  optimizer = recipe.optimizer.build(recipe.total)
  method: Any = steps.AllParameters() if recipe.lora is None else recipe.lora
  base = model
  state, place = _begun(recipe, optimizer, model, attend.mesh, checkpoints)
  taken = int(jax.device_get(state.step))
  end, ended = 0, None
  for number, stage in enumerate(recipe.stages):
    begin, end = end, end + stage.steps
    if stage.rope_scaling is not None:
      # The weights stay; the tree around them is another model's.
      if recipe.lora is None:
        state = _stretched(state, stage.rope_scaling)
      else:
        base = extend_context(base, stage.rope_scaling)
    if taken >= end and number + 1 < len(recipe.stages):
      continue
    rows = _Staged(number, loaders[number])
    if place is not None and taken > begin:
      rows.restore(place)
    with loaders[number]:
      ended = loop.fit(
        state,
        None if recipe.lora is None else base,
        rows,
        steps=end,
        step=steps.make_step(optimizer, attend, recipe.objective, method),
        place=lambda rows, stage=stage: batches.place(
          recipe.dealt(rows, attend), attend, stage.accumulate, part
        ),
        pace=recipe.pace,
        checkpoints=checkpoints,
        resume=False,
        report=lambda one, number=number: report(number, one),
        on_step=on_step,
      )
    state, place = ended.state, None
    if ended.stopped is not None:
      break
  assert ended is not None
  made = state.params
  if recipe.lora is not None:
    made = recipe.lora.merged(state.params, base)
  return TrainResult(
    model=made, step=int(jax.device_get(state.step)), stopped=ended.stopped
  )


def check(recipe: Recipe, model: Transformer, attend: ContextParallel) -> None:
  """Refuses, before the first step, what a later stage could not do.

  Args:
    recipe: with its stages.
    model: of arrays or of shapes.
    attend: how tokens lie on the mesh.

  Raises:
    ShapeError: rows that cannot be dealt out.
    ConfigError: RoPE scaling that this model cannot have.
    OptionError: a layout that this model cannot have.
  """
  recurrent = any(isinstance(kind, StateShape) for kind in model.kinds)
  if recipe.layout == "documents" and recurrent and attend.size > 1:
    raise OptionError(
      "layout",
      "'documents' for a model with recurrent layers",
      "'contiguous', where each token lies behind the one before it",
      "change the layout",
    )
  form = jax.eval_shape(lambda model: model, model)
  for stage in recipe.stages:
    batches.check(stage.batch, stage.length, attend, stage.accumulate)
    if stage.rope_scaling is not None:
      form = extend_context(form, stage.rope_scaling)


def _begun(
  recipe: Recipe, optimizer: Any, model: Transformer, mesh: Any, saved: Any
) -> tuple[steps.TrainState, Any]:
  """The state to go on from, and where its data is if it was saved."""
  params: Any = model
  if recipe.lora is not None:
    params = recipe.lora.start(model, seed=recipe.seed)
    if mesh is not None:
      everywhere = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()
      )
      params = jax.device_put(params, everywhere)
  form = steps.form(optimizer, params, mesh)
  leaves = jax.tree.leaves(params)
  shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  if saved is not None and not shapes and saved.holds(form._asdict()):
    # Two states at once would not fit where one just does.
    for x in leaves:
      x.delete()
    shapes = True
  found = None if saved is None else saved.restore(like=form._asdict())
  if found is not None:
    return steps.TrainState(**found[0]), found[1]["data"]
  if shapes:
    raise OptionError(
      "model",
      "its shapes alone, and no step is saved",
      "a saved step to go on from, or weights to begin with",
      "pass a model with weights",
    )
  return steps.start(optimizer, params, mesh), None


def _stretched(
  state: steps.TrainState, scaling: RopeScaling
) -> steps.TrainState:
  """The same numbers, around which the model is the stretched one."""
  made = extend_context(state.params, scaling)
  form = jax.tree.structure(made)
  model = lambda x: isinstance(x, Transformer)
  turn = lambda x: (
    jax.tree.unflatten(form, jax.tree.leaves(x)) if model(x) else x
  )
  return jax.tree.map(turn, state._replace(params=made), is_leaf=model)


def flops(model: Transformer, length: int, *, adapters: bool = False) -> float:
  """Of a token in a step, forward and backward, in rows of `length` tokens.

  Three times those of reading; attention as if a row were one document, which
  counts too much where several are packed. What is computed again to save
  memory does not count.

  Args:
    model: of arrays or shapes.
    length: T, tokens of a row.
    adapters: whether only these are trained: frozen weights need no gradient,
      a third of a matrix's work.
  """
  made = work_profile.profile(model, length)
  head = 2.0 * model.config.vocab * model.config.embed
  pairs = made.pair_s * (length + 1) / 2
  return (2.0 if adapters else 3.0) * (made.token_s + head) + 3.0 * pairs


def dtype_of(name: str | None) -> Any:
  """A dtype of computation by name, None for the parameters' own."""
  if name is None or name == "float32":
    return None
  _choice("dtype", name, ("float32", "bfloat16", "float16"))
  return jnp.dtype(name)
