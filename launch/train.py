"""Trains a model by a recipe, or resumes a training.

  python -m launch.train --config=configs/train/quick.py --out=DIR
      All stages of the recipe; called again, it resumes.
  python -m launch.train --config=... --mesh=seq:4 \\
      --config.optimizer.learning_rate=1e-3
      The same with another number, on another mesh.
  python -m launch.train --config=... --init_from=DIR --out=...
      From the weights of a Hugging Face folder.
  python -m launch.train --help_config
      Every field of a config, with its type, default and meaning.

--out gets `checkpoints`, `log.jsonl` (a line a report), `config.json` and in
the end `model`, a Hugging Face folder with its tokenizer, or `draft`, that of a
draft; of adapters also `adapter`, a folder of PEFT, and with merge=False only
that. On SIGTERM or Ctrl-C the
current step is saved, and the exit status is 143 or 130.

A config is a Python file with get_config(); see configs/train,
configs/posttraining and configs/drafts. Several processes: see
launch/shared/common.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder
from ml_collections.config_flags import config_flags

import ringjax as rj
from ringjax import fetched_models
from ringjax.bench import timing
from ringjax.checks import (
  integer,
  is_address,
  local_path,
  one_of,
  positive_int,
)
from ringjax.data.batches import texts
from ringjax.data.batches.corpus import fingerprint
from ringjax.data.batches.packing import BestFit, Cut
from ringjax.data.chats.answer_tokens import answer_end
from ringjax.data.gguf.gguf_file import is_gguf
from ringjax.data.tasks import documents
from ringjax.data.tasks.link_tokens import LINKS, LinkTokens
from ringjax.data.text.chat import ChatTemplate
from ringjax.data.text.tokenizer_files import write_eos_ids
from ringjax.errors import (
  CheckpointMismatchError,
  OptionError,
  RingjaxError,
  message,
)
from ringjax.eval.perplexity import perplexity
from ringjax.json_text import json_text
from ringjax.models import longspec
from ringjax.models.cepe import INITS, CepeTransformer, Encoder
from ringjax.models.checkpoint import WEIGHTS, cast, stored_dtype
from ringjax.models.contents import text_config
from ringjax.models.gguf.gguf_folder import open_model
from ringjax.models.heads.added_layer import has_predict_layer
from ringjax.models.hf import auxiliary_files
from ringjax.models.parameter_arrays import checksums
from ringjax.models.presets import preset
from ringjax.models.transformer import Transformer
from ringjax.models.weights.coded_weights import KINDS
from ringjax.parallel import chips, memory
from ringjax.paths import AnyPath, ObjectLog, ObjectPath, as_path, filling
from ringjax.train import loop, recipe
from ringjax.train.checkpoints.checkpoint import Checkpoints
from ringjax.train.expert_balance import ExpertBalance, stated_loss
from ringjax.train.extend import RopeScaling, extend_context
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.methods.encoder_training import ContextSplit
from ringjax.train.methods.induction import INITIALISATIONS, CrossInductionHeads
from ringjax.train.methods.lora import Lora
from ringjax.train.methods.peft_folder import check_adapter
from ringjax.train.methods.predict_training import PredictTraining
from ringjax.train.posttraining.posttraining_loss import PosttrainingLoss
from ringjax.train.posttraining.preferences import LOSSES
from ringjax.train.sparsify import sparse_config, sparse_kind
from ringjax.train.step import Objective

from .shared import common, config_fields, console, sources
from .shared.flag_helpers import FlagHelper
from .shared.group import PATIENCE_S, Group
from .training import reward_config
from .training.metric_backends import MetricBackends, check_backends

NAME = "train"
_MEMORY = (
  "shard over more devices (--mesh), raise accumulate, or pass remat='nothing'"
)
# Entries of a config.json that change training alone, and are not applied.
_NOT_APPLIED = (
  "attention_dropout",
  "attention_probs_dropout_prob",
  "embd_pdrop",
  "embedding_dropout",
  "hidden_dropout",
  "hidden_dropout_prob",
  "resid_pdrop",
  "residual_dropout",
  "router_jitter_noise",
)
# Entries of a config that determine the result: a checkpoint belongs to them.
_DECISIVE = (
  "stages",
  "optimizer",
  "lora",
  "cepe",
  "draft",
  "draft_training",
  "distil",
  "top",
  "expert_balance",
  "seed",
  "packer",
  "sources",
  "z_loss",
  "dtype",
)
# Further such entries, which checkpoints from before them lack: each with the
# value that changes nothing.
_LATER: dict[str, Any] = {
  "sparse": "",
  "index_loss": 1.0,
  "posttraining": {},
  "predict_loss": 0.0,
  "predict_only": False,
  "eagle": {},
  "products": "float",
  "weights": "",
  "residual": {},
  "rewards": {},
  # Layers of each round are arrays of their own.
  "stage_rounds": 1,
}
# Fields of a report that are written otherwise, or not at all.
_NESTED = (
  "first",
  "objective",
  "experts",
  "choice",
  "means",
  "policy",
  "scores",
)
# File of a folder with the chat template that its weights were trained with.
_TEMPLATE = "chat_template.jinja"
# Flags of reports, which process 0 alone writes.
_OF_REPORTS = ("json", "metrics", "peak", "profile", "tensorboard")
_PACKERS = {"best_fit": BestFit, "cut": Cut}


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  config_flags.DEFINE_config_file(
    "config",
    None,
    "File with the recipe.",
    flag_values=values,
    # A config names what it changes; `recipe_of` refuses unknown names.
    lock_config=False,
    accept_new_attributes=True,
  )
  _check_overrides(values["config"])
  new = FlagHelper(values)
  new.place("out", None, "Folder for all output, or its address.")
  new.model(
    "init_from",
    None,
    "Hugging Face folder, or name of a model, of the initial weights.",
  )
  new.number(
    "peak",
    None,
    "Peak FLOP/s of a device, for the utilisation; default: from the data "
    "sheet of a known accelerator. Of other devices no utilisation is shown.",
    1.0,
  )
  new.path("profile", None, "Folder for a trace of steps 3 to 5 of this run.")
  new.texts(
    "metrics",
    [],
    "Libraries that get the reports too: tensorboard (tensorboardX, in --out), "
    "wandb (Weights & Biases), or package.module:function, which returns a "
    "LoggingBackend of metrax.",
  )
  new.boolean("tensorboard", False, "Deprecated: --metrics=tensorboard.")
  new.boolean("json", False, "Print reports as JSON on stdout.")
  new.boolean(
    "help_config",
    False,
    "List every field of a config, or of --config, with type and value.",
  )
  common.define(values)


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Trains as the flags say, and returns the exit status."""
  if values.help_config:
    config = values.config or default_config()
    entries = config_fields.fields(config, default_config.__doc__ or "")
    print(config_fields.page(entries), file=stdout or sys.stdout, flush=True)
    return 0
  work = _TrainingRun(
    values, stdout or sys.stdout, console.Screen(NAME, stderr)
  )
  try:
    # While it trains a signal is recorded, and not raised.
    with console.Run(
      work.screen,
      _MEMORY,
      doing=lambda: work.doing,
      reports=work.group,
      leaving=work.group.leave,
    ) as run:
      work.check()
      common.start(values)
      return work.run()
    return run.status
  finally:
    work.close()


class _TrainingRun:
  """One run of the script.

  Attributes:
    doing: Current activity, for error messages.
    screen: Console that shows messages and progress.
    group: Processes that train together.
  """

  def __init__(
    self, values: flags.FlagValues, stdout: TextIO, screen: console.Screen
  ):
    self.doing = "starting"
    self.screen = screen
    self.group = Group(screen, lambda: self.doing)
    self._values, self._out = values, stdout
    self._log: TextIO | None = None
    self._backends: MetricBackends | None = None
    self._peak: float | None = None

  def close(self) -> None:
    """Closes the logs and leaves the process group."""
    self.screen.end()
    self.group.close()
    if self._log is not None:
      self._log.close()
    if self._backends is not None:
      self._backends.close()

  @property
  def _metrics(self) -> list[str]:
    """Names of the libraries that get the reports, each once."""
    older = ["tensorboard"] if self._values.tensorboard else []
    return list(dict.fromkeys([*self._values.metrics, *older]))

  def check(self) -> None:
    """Checks the flags and the config before anything is loaded."""
    values = self._values
    for flag, example in (
      ("config", "configs/train/quick.py"),
      ("out", "runs/quick"),
    ):
      if values[flag].value is None:
        raise OptionError(f"--{flag} is required, e.g. --{flag}={example}.")
    recipe_of(values.config)
    if values.tensorboard:
      self.screen.say("note: --tensorboard is now --metrics=tensorboard")
    if self._metrics:
      local_path("--out with --metrics", values.out)
      check_backends(self._metrics)

  def run(self) -> int:
    """Trains, and returns the exit status."""
    values, screen = self._values, self.screen
    config = values.config
    screen.quiet = jax.process_index() > 0
    first = not screen.quiet
    self.group.meet(values, config.timeout_s or PATIENCE_S, own=_OF_REPORTS)
    mesh = common.mesh(values.mesh)
    folder = values.init_from or config.get("init_from") or None
    if folder is not None:
      folder = os.fspath(fetched_models.resolve(folder, "--init_from"))
    out = as_path(values.out, "--out")
    self._begin("looking for saved steps")
    base = None if folder is None else open_model(folder).config
    links = _links(config, folder, base)
    train_recipe = recipe_of(config, links)
    save_dtype = _save_dtype(config, folder)
    sharding: dict[str, Any] = {"mesh": mesh, "rules": _rules(config, mesh)}
    tokenizer, home = _tokenizer(config, folder)
    with contextlib.ExitStack() as stack:
      # Adapters are of one model: a checkpoint belongs to its weights.
      model = None
      if train_recipe.adapter is not None or config.rewards:
        model = self._model(config, folder, links, sharding, tokenizer)
        _check_alone(config, folder, model, train_recipe.lora)
      checkpoints = stack.enter_context(
        Checkpoints(
          out / "checkpoints",
          keep=config.keep,
          config=_identity(
            config,
            base,
            tokenizer,
            None if train_recipe.adapter is None else model,
          ),
        )
      )
      # Before the log is opened: another run may be writing to this folder.
      checkpoints.claim()
      if model is None and checkpoints.holds():
        shape = _with_links(base or _shape(config), links)
        if config.sparse:
          shape = preset(shape) if isinstance(shape, str) else shape
          shape = sparse_config(text_config(shape)[0], config.sparse)
        model = rj.models.abstract(
          shape,
          dtype="float32",
          predict_layers=config.predict_loss > 0,
          **sharding,
        )
      elif model is None:
        model = self._model(config, folder, links, sharding, tokenizer)
      if config.stage_rounds > 1:
        model = rj.train.with_stage_rounds(
          model, config.stage_rounds, rules=sharding["rules"]
        )
      # Training donates the model's own arrays.
      abstract_model = jax.eval_shape(lambda model: model, model)
      axis = "seq" if mesh.shape.get("seq", 1) > 1 else None
      chooses = "auto" in (config.feedforward_block, config.block)
      train_recipe = train_recipe.with_block_sizes(abstract_model, mesh, axis)
      if chooses:
        screen.say(
          f"blocks on each shard: feedforward "
          f"{train_recipe.feedforward_block:,} tokens, loss "
          f"{train_recipe.objective.block:,}"
        )
      for line in (
        *_too_long(train_recipe, abstract_model),
        *_left_out(abstract_model),
      ):
        screen.say(line)
      self._peak = values.peak or _peak(config.dtype, mesh)
      self._begin("reading the data")
      template = _chat_template(config)
      own_eos_ids = tokenizer.eos_ids
      if template is not None:
        _stop_at_answer_end(tokenizer, template)
      data = [
        sources.mixture(
          entry.get("sources", config.sources),
          tokenizer,
          length=entry["length"],
          vocab=model.config.vocab,
          links=links,
        )
        for entry in (() if config.rewards else config.stages)
      ]
      for mixture in data:
        for source in mixture.sources:
          if isinstance(source, rj.data.ChatDocuments | rj.data.PairDocuments):
            for note in source.counts.notes():
              screen.say(f"note: {note}")
      adapters = None
      if config.residual:
        train_recipe, adapters = self._residual(
          config, folder, model, train_recipe, data[0], sharding
        )
      if first:
        out.mkdir(parents=True, exist_ok=True)
        self._log = _appended(out / "log.jsonl")
        if self._metrics:
          folder_of_run = pathlib.Path(local_path("--out", values.out))
          self._backends = MetricBackends(
            self._metrics, folder_of_run, screen.say
          )
      parameters = _count(
        rj.models.abstract(json.loads(abstract_model.source))
        if config.weights
        else abstract_model
      )
      screen.say(
        f"{abstract_model.config.family}, {parameters:,} "
        f"parameters, {mesh.devices.size} x {jax.devices()[0].device_kind}, "
        f"{train_recipe.total} steps"
      )
      if folder and config.start and train_recipe.adapter is None:
        screen.say("start: not applied, since the weights are given")
      trace = stack.enter_context(_Trace(values.profile if first else None))

      def on_step(step: int) -> None:
        if self.doing != "training":
          if first:
            # Only now the saved steps are known to be of this training.
            timing.write_json(
              str(out / "config.json"), _config_record(config, folder)
            )
          total = _tokens(train_recipe, train_recipe.total)
          self._begin(
            "training", total, "tokens", done=_tokens(train_recipe, step)
          )
        trace()

      self._begin("making the first step")
      places: dict[str, Any] = dict(
        mesh=mesh,
        axis=axis,
        checkpoints=checkpoints,
        on_step=on_step,
      )
      report = functools.partial(
        self._report, train_recipe, abstract_model, mesh
      )
      try:
        if config.rewards:
          training = reward_config.training_of(config, train_recipe, tokenizer)
          result = rj.rl.train(
            training.recipe,
            model,
            training.questions,
            tokenizer=tokenizer,
            environment=training.environment,
            chat=training.chat,
            report=functools.partial(report, 0),
            **places,
          )
        else:
          result = recipe.train(
            train_recipe,
            model,
            data,
            report=report,
            adapters=adapters,
            evaluate=_evaluation(config, tokenizer, mesh),
            **places,
          )
      except CheckpointMismatchError as error:
        raise _with_changed_fields(
          error, out / "config.json", config, folder
        ) from None
      saved_steps = checkpoints.steps()
    screen.end()
    if trace.missed:
      screen.say(
        "note: --profile wrote nothing: this run took less than 3 steps"
      )
    if result.stopped is not None:
      screen.say(_farewell(result.step, saved_steps))
      return 128 + result.stopped
    self._begin("writing the model")
    if isinstance(result.model, longspec.DraftTransformer):
      # Only the draft is written, not its target.
      with filling(out / "draft") as place:
        longspec.save(result.model, place, dtype=save_dtype)
      screen.say(f"wrote {out / 'draft'}")
      return 0
    if config.eagle:
      rj.models.eagle3.save(
        result.model, out / "head", dtype=save_dtype, overwrite=True
      )
      screen.say(f"wrote {out / 'head'}")
      return 0
    if config.merge:
      written = result.model
      if config.weights:
        written = rj.models.with_float_weights(written)
      if save_dtype is not None:
        written = cast(written, save_dtype)
      rj.models.save(written, out / "model", overwrite=True)
      if first and home is not None:
        with filling(out / "model") as place:
          copy_companions(home, place)
      elif first:
        tokenizer.save(out / "model")
      if first and template is not None:
        with filling(out / "model") as place:
          (place / _TEMPLATE).write_text(template, "utf-8")
          if tokenizer.eos_ids != own_eos_ids:
            write_eos_ids(place, tokenizer.eos_ids)
      if first and links is not None:
        links.save(out / "model")
      screen.say(f"wrote {out / 'model'}")
    if result.adapter is not None:
      self._begin("writing the adapter")
      self._write_adapter(out / "adapter", model, *result.adapter, template)
    return 0

  def _write_adapter(
    self,
    path: AnyPath,
    model: Transformer,
    lora: Lora,
    params: Mapping[str, Any],
    template: str | None,
  ) -> None:
    """Writes trained adapters for PEFT, if it has a form for them."""
    try:
      with filling(path) as folder:
        rj.train.save_adapter(folder, model, lora, params, overwrite=True)
        if template is not None and not jax.process_index():
          (folder / _TEMPLATE).write_text(template, "utf-8")
    except OptionError as error:
      self.screen.say(f"note: no adapter is written: {error}")
    else:
      self.screen.say(f"wrote {path}")

  def _model(
    self,
    config: ConfigDict,
    folder: str | None,
    links: LinkTokens | None,
    sharding: dict[str, Any],
    tokenizer: Any,
  ) -> Transformer:
    """The initial model, loaded from a folder or created."""
    self._begin("making the model")
    encoder_and_init, start = _encoder(config), _start(config)
    starts_encoder = isinstance(start, CrossInductionHeads)
    if config.weights:
      return self._coded(config, folder, sharding)
    predicts = config.predict_loss > 0
    if folder is not None:
      stored = predicts and has_predict_layer(folder)
      model = rj.models.load(
        folder, dtype="float32", predict_layers=stored, **sharding
      )
      if predicts and not stored:
        model = rj.models.with_predict_layer(
          model, seed=config.seed, rules=sharding["rules"]
        )
    else:
      model = rj.models.create(
        _shape(config), seed=config.seed, predict_layers=predicts, **sharding
      )
      if start is not None and not starts_encoder:
        model = start.apply(model)
    if config.sparse:
      model = rj.train.with_sparse_attention(
        model, config.sparse, seed=config.seed, rules=sharding["rules"]
      )
    new = 0 if links is None else links.first + links.count
    if (extra_tokens := new - model.config.vocab) > 0:
      # Random embeddings: link tokens differ from the first step on.
      model = rj.models.with_more_tokens(
        model, extra_tokens, seed=config.seed, spread=1.0
      )
    if config.eagle:
      if folder is None:
        raise OptionError(
          "eagle",
          "a head for a model of fresh weights, which no folder has",
          "the folder of its target",
          "pass --init_from",
        )
      return _with_head(config, model, tokenizer, sharding["rules"])
    if (draft := _draft(config)) is not None:
      draft_config, draft_init = draft
      return longspec.with_draft(
        model,
        draft_config,
        init=draft_init,
        seed=config.seed,
        rules=sharding["rules"],
      )
    if encoder_and_init is None or isinstance(model, CepeTransformer):
      return model
    encoder, init = encoder_and_init
    model = rj.models.cepe.with_encoder(
      model, encoder, init=init, seed=config.seed, rules=sharding["rules"]
    )
    return start.apply(model) if starts_encoder else model

  def _coded(
    self, config: ConfigDict, folder: str | None, sharding: dict[str, Any]
  ) -> Transformer:
    """The frozen model of codes that adapters are trained on."""
    if folder is None:
      raise OptionError(
        "weights",
        f"{config.weights!r} of a fresh model",
        "trained weights, which adapters change",
        "pass --init_from=DIR",
      )
    # What is not coded is in the dtype of the computation.
    options = {"dtype": config.dtype, **sharding}
    if config.weights in WEIGHTS:
      return rj.models.load(folder, weights=config.weights, **options)
    model = rj.models.load(folder, **options)
    return rj.models.with_coded_weights(model, **KINDS[config.weights])

  def _residual(
    self,
    config: ConfigDict,
    folder: str | None,
    coded: Transformer,
    train_recipe: recipe.Recipe,
    mixture: rj.train.Mixture,
    sharding: dict[str, Any],
  ) -> tuple[recipe.Recipe, dict[str, Any]]:
    """The recipe and its first adapters, which correct the codes' error."""
    self._begin("making the adapters")
    assert folder is not None and train_recipe.lora is not None
    tokens, length = None, train_recipe.stages[0].length
    if config.residual.rows:
      loader = rj.data.Loader(
        mixture.sources,
        length=length,
        batch=config.residual.rows,
        seed=config.seed,
        packer=train_recipe.packer,
        weights=mixture.weights,
        prefetch=0,
      )
      tokens = loader.at(0).tokens
    floats = rj.models.load(folder, dtype=config.dtype, **sharding)
    lora, adapters = rj.train.residual_adapters(
      train_recipe.lora, floats, coded, tokens
    )
    return dataclasses.replace(train_recipe, lora=lora), adapters

  def _report(
    self,
    train_recipe: recipe.Recipe,
    model: Transformer,
    mesh: Mesh,
    stage: int,
    metrics: loop.TrainingReport,
    rollouts: rj.rl.RolloutReport | None = None,
  ) -> None:
    """Writes the metrics of some steps to the log and the screen."""
    if jax.process_index():
      return
    flops_per_token = recipe.flops(
      model,
      train_recipe.stages[stage].length,
      adapters=train_recipe.adapter is not None,
    )
    utilisation = _share(
      flops_per_token * metrics.tokens_per_s, self._peak, mesh.devices.size
    )
    peak_bytes = _peak_bytes()
    rate = train_recipe.optimizer.learning_rate_at(
      metrics.step - 1, train_recipe.total
    )
    experts = {} if metrics.experts is None else metrics.experts._asdict()
    choice = {} if metrics.choice is None else metrics.choice._asdict()
    means = metrics.means or {}
    scores = {} if metrics.scores is None else metrics.scores._asdict()
    row = {
      **dataclasses.asdict(metrics),
      **{f"experts_{name}": value for name, value in experts.items()},
      **choice,
      **{f"logits_{name}": value for name, value in scores.items()},
      **_policy_figures(metrics, rollouts),
      **means,
      "stage": stage,
      "learning_rate": rate,
      "tokens_per_s": metrics.tokens_per_s,
      "utilisation": utilisation,
      "compiling": metrics.first,
      "peak_bytes": peak_bytes,
    }
    # JSON has no NaN and no infinity.
    row = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v
      for k, v in row.items()
      if k not in _NESTED
    }
    assert self._log is not None
    # Flushed at once: a kill loses no line on a disk.
    self._log.write(json_text(row) + "\n")
    self._log.flush()
    saves = train_recipe.loop_config.save_every
    last = metrics.step == train_recipe.total
    if isinstance(self._log, ObjectLog) and (
      last or (saves and not metrics.step % saves)
    ):
      # Before the step is saved: the run that resumes there repeats no line.
      self._log.save()
    if self._backends is not None:
      figures = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
        and not (name == "step" or isinstance(value, bool))
      }
      if peak_bytes:
        figures["peak_bytes"] = float(peak_bytes)
      self._backends.report(metrics.step, figures)
    if self._values.json:
      print(json_text(row), file=self._out, flush=True)
    self.screen.say(
      f"step {metrics.step:>7}  loss {metrics.loss:7.4f}  |g| "
      f"{metrics.gradient_norm:8.3g}  {metrics.tokens_per_s:9,.0f} tokens/s"
      + (
        ""
        if utilisation is None
        else f"  {100 * utilisation:5.1f} % of the peak"
      )
      + (
        "" if metrics.held_out is None else f"  held out {metrics.held_out:.4f}"
      )
      + (f"  {console.nbytes(peak_bytes)}" if peak_bytes else "")
      + (f"  {metrics.skipped} not finite" if metrics.skipped else "")
      + (
        f"  index {choice['index_loss']:.4f}  recall {choice['recall']:.4f}"
        if choice
        else ""
      )
      + ("" if rollouts is None else _policy_line(metrics, rollouts))
      + (
        f"  margin {means['reward_margin']:.4f}  accuracy "
        f"{means['reward_accuracy']:.3f}"
        if "reward_margin" in means
        else ""
      )
      + (
        ""
        if metrics.predicted is None
        else f"  further {metrics.predicted:.4f}"
      )
      + (
        f"  largest logit {scores['largest']:.4g}, "
        f"{scores['clipped']:.0f} heads clipped"
        if scores
        else ""
      )
    )
    self.screen.at(_tokens(train_recipe, metrics.step))

  def _begin(
    self, doing: str, total: int = 0, unit: str = "", done: int = 0
  ) -> None:
    self.doing = doing
    self.screen.begin(doing, total, unit, done=done)


def _policy_figures(
  metrics: loop.TrainingReport, rollouts: rj.rl.RolloutReport | None
) -> dict[str, Any]:
  """Figures of a training by rewards, for the log; {} of other trainings."""
  if rollouts is None:
    return {}
  figures = dataclasses.asdict(rollouts)
  parts = figures.pop("parts")
  return {
    **metrics.policy._asdict(),
    **{f"rollouts_{name}": value for name, value in figures.items()},
    **{f"reward_{name}": value for name, value in parts.items()},
  }


def _policy_line(
  metrics: loop.TrainingReport, rollouts: rj.rl.RolloutReport
) -> str:
  """End of a line of the screen for a training by rewards."""
  policy = metrics.policy
  return (
    f"  reward {rollouts.reward:.3f}  age {rollouts.age}  "
    f"{rollouts.tokens:.0f} tokens  flat {rollouts.flat}/{rollouts.drawn}  "
    f"|log p| differs by {policy.mismatch_max:.2g} (KL "
    f"{policy.mismatch_kl:.2g})"
    + (f"  KL to start {policy.divergence:.3g}" if policy.divergence else "")
  )


# ---------------------------------------------------------------------------
# Configs
# ---------------------------------------------------------------------------


def recipe_of(
  config: ConfigDict, links: LinkTokens | None = None
) -> recipe.Recipe:
  """The recipe that a config describes.

  Args:
    config: Config of this script, see `default_config`.
    links: Link tokens whose embeddings are trained next to adapters, if any.

  Raises:
    OptionError: If an entry is unknown or its value is out of range.
  """
  known_names = set(default_config())
  unknown = sorted(set(config) - known_names)
  if unknown:
    raise OptionError(
      "config",
      ", ".join(unknown),
      f"some of {', '.join(sorted(known_names))}",
      "use these names; --help_config lists them",
    )
  starts_encoder = isinstance(_start(config), CrossInductionHeads)
  if starts_encoder and _encoder(config) is None:
    raise OptionError(
      "start",
      "cross_lookup for a model without an encoder",
      "an encoder, whose start it is",
      "set --config.cepe.width, for instance, or another start",
    )
  if config.sparse:
    sparse_kind(config.sparse)
    others = [name for name in ("cepe", "draft") if len(config[name])]
    if config.lora.get("rank") and sparse_kind(config.sparse).adds_weights:
      others.append("lora")
    if others:
      raise OptionError(
        "sparse",
        f"{config.sparse} with {others[0]}, which freezes the new weights",
        "a training of all parameters",
        "make the model sparse in a run of its own",
      )
  eagle = _eagle(config)
  _check_codes(config)
  if config.rewards:
    reward_config.check(config, default_config())
  _build(rj.models.Rules, config.rules, "rules")
  one_of("packer", config.packer, _PACKERS)
  recipe.dtype_of(config.save_dtype)
  dtype = {"dtype": recipe.dtype_of(config.dtype)}
  balance = {
    "expert_balance": _build(
      ExpertBalance, config.expert_balance, "expert_balance"
    )
  }
  head_loss: dict[str, Any] = {}
  if eagle:
    head_loss = {"predict_loss": 1.0, "predict_steps": eagle.get("steps")}
  parts: dict[str, Any] = {
    "stages": tuple(_stage(stage) for stage in config.stages),
    "optimizer": _build(recipe.Optimizer, config.optimizer, "optimizer"),
    "objective": Objective(
      **_entries(Objective, config)
      | dtype
      | balance
      | {"posttraining": _posttraining(config)}
      | head_loss
    ),
    "predict_only": config.predict_only or bool(eagle),
    "lora": _lora(config, links),
    "cepe": _encoder(config) is not None,
    "draft": _draft_training(config),
    "predict_training": _predict_training(config),
    "packer": _PACKERS[config.packer](),
    "loop_config": loop.LoopConfig(
      **_entries(loop.LoopConfig, config),
      evaluate_every=_held_out(config)["every"],
    ),
  }
  return recipe.Recipe(**_entries(recipe.Recipe, config) | parts)


def _eagle(config: ConfigDict) -> dict[str, Any]:
  """The entries of an EAGLE-3 head, {} for none.

  Raises:
    OptionError: If an entry is unknown, or other entries train other weights.
  """
  entries = json.loads(config.eagle.to_json())
  integer("eagle.draft_vocab", entries.get("draft_vocab") or 0, least=0)
  names = ("draft_vocab", "taps", "hidden", "steps", "head")
  unknown = [name for name in entries if name not in names]
  of_new = [name for name in names[:3] if entries.get(name)]
  if unknown or (entries.get("head") and of_new):
    raise OptionError(
      "eagle",
      ", ".join(unknown) or f"head with {of_new[0]}, which its folder says",
      f"{', '.join(names[:4])}, or head and steps",
      "leave the others out",
    )
  others = (
    "predict_loss", "predict_only", "sparse", "start", "rewards", "held_out",
    "cepe", "draft", "posttraining", "weights",
  )  # fmt: skip
  used = [name for name in others if config[name]]
  used += ["links"] * bool(config.links.get("each"))
  used += ["lora"] * bool(config.lora.get("rank"))
  if entries and used:
    raise OptionError(
      "eagle",
      f"it with {used[0]}, which is of a model that is trained",
      "a model as it is, from init_from",
      f"leave {used[0]} out",
    )
  return entries


def _with_head(
  config: ConfigDict,
  model: Transformer,
  tokenizer: Any,
  rules: rj.models.Rules,
) -> Transformer:
  """The model with an EAGLE-3 head, a new one or that of a folder."""
  entries = _eagle(config)
  if entries.get("head"):
    return rj.models.eagle3.load(entries["head"], model, rules=rules)
  ids = None
  if size := entries.get("draft_vocab"):
    stage = config.stages[0]
    mixture = sources.mixture(
      stage.get("sources", config.sources),
      tokenizer,
      length=stage["length"],
      vocab=model.config.vocab,
    )
    texts = sources.first_texts(mixture.sources, seed=config.seed)
    ids = rj.models.eagle3.frequent_ids(texts, size, model.config.vocab)
  return rj.models.eagle3.with_head(
    model,
    ids=ids,
    taps=entries.get("taps"),
    hidden=entries.get("hidden"),
    seed=config.seed,
    rules=rules,
  )


def _check_codes(config: ConfigDict) -> None:
  """Refuses codes, or a folder without a merged model, without adapters."""
  has_adapters = bool(config.lora.get("rank"))
  if not config.merge and not has_adapters:
    raise OptionError(
      "merge",
      "False without adapters",
      "adapters, which are then written alone",
      "set --config.lora.rank=16, or leave merge out",
    )
  residual = json.loads(config.residual.to_json())
  if residual and (set(residual) != {"rows"} or config.weights not in KINDS):
    raise OptionError(
      "residual",
      f"{residual} with weights={config.weights!r}",
      f"{{'rows': N}} with weights of {', '.join(KINDS)}, whose error is known",
      "set --config.residual.rows=8 and --config.weights=nf4, or leave it out",
    )
  if residual:
    integer("residual.rows", residual["rows"], least=0)
  if not config.weights:
    return
  one_of("weights", config.weights, (*KINDS, *WEIGHTS))
  unsupported = {
    "lora.rank": None if has_adapters else "rank 0, which trains all weights",
    "sparse": config.sparse,
    "links": config.links.get("each"),
    "predict_loss": config.predict_loss,
    "eagle": config.eagle,
  }
  for name, value in unsupported.items():
    if value:
      raise OptionError(
        name,
        f"{value} with weights={config.weights!r}, which are frozen codes",
        "adapters of a model as it is",
        "set --config.lora.rank=16"
        if name == "lora.rank"
        else "leave it out, or weights",
      )


def _check_alone(
  config: ConfigDict,
  folder: str | None,
  model: Transformer,
  lora: Lora | None,
) -> None:
  """Refuses adapters that are of no use without the merged model.

  Args:
    config: Config of this run.
    folder: Folder of the initial weights, or None.
    model: Model that the adapters are trained on.
    lora: Adapters, or None.

  Raises:
    OptionError: If they would be written alone, and can't be.
  """
  if config.merge or lora is None:
    return
  reason = None
  if folder is None:
    reason = "fresh weights, which no folder has"
  elif config.predict_loss > 0 and not has_predict_layer(folder):
    reason = "a new layer that predicts further tokens"
  else:
    try:
      check_adapter(model, jax.eval_shape(lambda: lora.start(model)))
    except OptionError as error:
      reason = str(error)
  if reason is not None:
    raise OptionError(
      "merge",
      f"False with {reason}"[:240],
      "True: adapters alone would not hold all that is trained",
      "leave merge out",
    )


def _entries(cls: type, config: ConfigDict) -> dict[str, Any]:
  """The entries of a config that are fields of a dataclass."""
  names = [field.name for field in dataclasses.fields(cls)]
  return {name: config[name] for name in names if name in config}


def _posttraining(config: ConfigDict) -> PosttrainingLoss | None:
  """The loss in place of the likelihood of labels, or None."""
  entry = json.loads(config.posttraining.to_json())
  if not entry:
    return None
  kind = one_of("posttraining.loss", entry.pop("loss", None), LOSSES)
  return _build(LOSSES[kind], entry, "posttraining")


def _lora(config: ConfigDict, links: LinkTokens | None) -> Lora | None:
  """The adapters that a config asks for, or None."""
  if config.lora.get("rank"):
    new = {} if links is None else {"new_tokens": links.count}
    return _build(Lora, {**config.lora, **new}, "lora")
  defaults = default_config().lora
  changed = [
    k for k, v in config.lora.items() if k not in defaults or v != defaults[k]
  ]
  if changed:
    raise OptionError(
      "lora",
      f"{', '.join(changed)} with rank 0, which trains all parameters",
      "a rank above 0",
      "set --config.lora.rank, or leave the others out",
    )
  return None


def _encoder(config: ConfigDict) -> tuple[Encoder, str] | None:
  """The encoder that a config asks for and its initialisation, or None."""
  entry = json.loads(config.cepe.to_json())
  if not entry:
    return None
  init = one_of("cepe.init", entry.pop("init", INITS[0]), INITS)
  return _build(Encoder, entry, "cepe"), init


def _draft(config: ConfigDict) -> tuple[longspec.LongSpecConfig, str] | None:
  """The draft that a config asks for and its initialisation, or None."""
  entry = json.loads(config.draft.to_json())
  if not entry:
    return None
  inits = longspec.INITS
  init = one_of("draft.init", entry.pop("init", inits[0]), inits)
  return _build(longspec.LongSpecConfig, entry, "draft"), init


def _draft_training(config: ConfigDict) -> DraftTraining | None:
  """The settings of a draft's training, or None without a draft."""
  entry = json.loads(config.draft_training.to_json())
  if _draft(config) is not None:
    return _build(DraftTraining, entry, "draft_training")
  if entry and not (config.predict_only or config.eagle):
    raise OptionError(
      "draft_training",
      f"{', '.join(entry)} without a draft",
      "a draft, a layer or a head that is trained alone",
      "set --config.draft.window, --config.predict_only or --config.eagle.steps"
      ", for instance, or leave them out",
    )
  return None


def _predict_training(config: ConfigDict) -> PredictTraining:
  """The settings of the training of a layer or head that drafts."""
  if _draft(config) is not None:
    return PredictTraining()
  entry = json.loads(config.draft_training.to_json())
  return _build(PredictTraining, entry, "draft_training")


def _links(
  config: ConfigDict, folder: str | None, base: dict[str, Any] | None
) -> LinkTokens | None:
  """The link tokens that a config asks for, or None.

  A model that was trained with link tokens keeps its ids; else the ids are
  appended to its vocabulary.

  Args:
    config: Config of this run.
    folder: Folder of the initial weights, or None.
    base: Contents of its config.json.

  Raises:
    OptionError: If the link tokens of the folder differ from the config's.
  """
  requested = dict(config.links)
  if not requested.get("each"):
    return None
  shape = base or _shape(config)
  shape = preset(shape) if isinstance(shape, str) else shape
  vocab = rj.models.read_config(shape)[0].vocab
  if folder is not None and (as_path(folder) / LINKS).exists():
    saved_links = LinkTokens.load(folder, vocab=vocab)
    saved_entries = {
      "each": saved_links.each,
      "documents": saved_links.documents,
    }
    if saved_entries != requested:
      raise OptionError(
        "links",
        f"{requested} for a model that has {saved_entries}",
        "those of the model",
        f"set --config.links.each={saved_links.each} and "
        f"--config.links.documents={saved_links.documents}",
      )
    return saved_links
  return _build(LinkTokens, {"first": vocab, **requested}, "links")


def _with_links(shape: Any, links: LinkTokens | None) -> Any:
  """A config.json or preset's name, its vocabulary extended by link tokens."""
  if links is None:
    return shape
  shape = preset(shape) if isinstance(shape, str) else shape
  text, _ = text_config(shape)
  vocab = max(text["vocab_size"], links.first + links.count)
  return {**text, "vocab_size": vocab}


def _tokens(train_recipe: recipe.Recipe, steps: int) -> int:
  """Tokens that the first `steps` steps read."""
  total = 0
  for stage in train_recipe.stages:
    stage_steps = min(steps, stage.steps)
    total += stage_steps * stage.batch * stage.decoded
    steps -= stage_steps
  return total


def _check_overrides(flag: Any) -> None:
  """Turns a missing file and an override of an unknown field into flag errors.

  A config file that does not exist is looked for among the installed ones, so
  that configs/train/quick.py is found from every working directory.
  """
  parse = flag.parse

  def checked(argument: object) -> None:
    if isinstance(argument, str):
      file, colon, overrides = os.path.expanduser(argument).partition(":")
      installed = pathlib.Path(__file__).parent / file
      if file.startswith("configs/") and not os.path.exists(file):
        file = str(installed if installed.is_file() else file)
      if not os.path.isfile(file):
        raise flags.IllegalFlagValueError(_no_config(argument))
      argument = file + colon + overrides
    try:
      parse(argument)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
      origin = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1][0])
      if "ml_collections" not in origin.parts:
        # A fault in the config file, whose line the user needs to see.
        raise
      raise flags.IllegalFlagValueError(
        message(
          "--config",
          f"{type(error).__name__}: {error}",
          "a field of the config",
          "see --help_config; an item of a list is --config.stages[0].steps",
        )
      ) from None

  flag.parse = checked


def _no_config(argument: str) -> str:
  """Error message of a config that is not a file of this machine."""
  if is_address(argument):
    return message(
      "--config",
      repr(argument),
      "a file on this machine: a config is a program",
      "copy it here",
    )
  return message(
    "--config",
    f"{argument!r}, which is not a file",
    "a Python file with get_config()",
    "see the folders of configs, as configs/train/quick.py",
  )


def default_config() -> ConfigDict:
  """All entries of a config with their defaults.

  Entries:
    model: Name of a preset, or a dict as in config.json; not with init_from.
    init_from: Hugging Face folder of the initial weights.
    held_out: Text whose loss is computed during the training, as by
      launch.evaluate perplexity: every (steps), and path (a folder of .txt
      files; default: the held-out files of Python's library), rows (8) and
      length (1024); {} for none. That of a draft is the loss of its training,
      with positions and lags drawn for these rows.
    rules: Mesh axis that shards each axis of the parameters; default: their
      width over the larger of seq and data. {"embed": None} replicates them on
      every device.
    stage_rows: Rows of a data shard that pass the stages of a --mesh with an
      axis stage together.
    stage_rounds: Rounds in which they pass the stages, each through a part of
      the layers; more rounds, and more rows of a batch, leave stages idle for a
      smaller part of the time.
    start: Initialisation of a fresh model, or of an encoder added to given
      weights; see ringjax.train.methods.induction.
    tokenizer: Folder of a tokenizer, or "bytes"; default: that of init_from,
      else bytes.
    dtype: Dtype of the computation; parameters and moments are float32.
    lora: Adapters; rank 0 trains all parameters.
    weights: Codes in which adapters find the frozen weights of init_from
      (QLoRA): int8, int4, nf4 or mxfp4, or stored for those of a GGUF file;
      empty for floats.
    residual: Adapters that begin as the error of those codes (LoftQ), {} for
      adapters that begin at zero: rows, the number of the first stage's rows
      whose activations weigh the error, 0 for none. Such an adapter belongs to
      the codes, and is refused for other weights.
    merge: Whether `model` is written, with adapters merged into floats; without
      it only `adapter` is.
    cepe: Encoder of contexts for a frozen decoder; {} for none.
    draft: Draft block of a frozen target (LongSpec). Only the draft is written,
      to `draft` of --out; {} for none.
    draft_training: Positions (longest, anchors) of the training of a draft, of
      a layer with predict_only or of an EAGLE-3 head; and lags, of a draft.
    predict_loss: Factor of the loss of a layer that predicts one token further
      (multi-token prediction), which the model gets if init_from has none; 0:
      the model is trained and written without one.
    predict_only: Whether to train that layer alone, and not the model.
    eagle: EAGLE-3 head of a frozen model, {} for none: draft_vocab (number of
      the most frequent ids of the first stage's texts that it drafts; 0: all),
      taps (layers before which it reads the model), hidden (width of its
      feedforward) and steps (predictions in a row); or head (folder of a head
      to train on) in place of the first three. Only the head is written, to
      `head` of --out.
    links: Number of link tokens after each document of a prompt, and the
      largest number of documents (KVLink); each 0 for none. They are new ids,
      whose embeddings are trained even with adapters.
    sparse: Sparse attention that a dense model gets before its training, such
      as index:heads=4,dim=32,count=256; empty for none. A stage with
      index_warm_up=True trains the indexes alone.
    index_loss: Factor of the loss of indexes of keys.
    rewards: Training by rewards in place of texts, {} for none; see
      launch/training/reward_config.py.
    posttraining: Loss in place of the labels' likelihood: loss (dpo, ipo or
      orpo) and its settings; {} for none.
    packer: Packing of documents into rows: best_fit or cut.
    keep: Number of newest checkpoints to keep.
    save_dtype: Dtype of the weights in `model`: float32, bfloat16 or float16;
      default: that of the weights in init_from, else float32.
  """
  # A reference to an object takes numbers and "auto".
  return ConfigDict(
    {
      "model": "llama-100m",
      "init_from": placeholder(str),
      "rules": {},
      "start": {},
      "tokenizer": placeholder(str),
      "stages": ({"steps": 1000, "length": 4096, "batch": 8},),
      "optimizer": {},
      "layout": "striped",
      "strategy": "ring",
      "remat": "attention",
      "feedforward_block": FieldReference(2048, field_type=object),
      "stage_rows": 1,
      "stage_rounds": 1,
      "dtype": "float32",
      "products": "float",
      "save_dtype": placeholder(str),
      "z_loss": 0.0,
      "block": FieldReference(1024, field_type=object),
      "distil": 0.0,
      "top": 50,
      "expert_balance": {},
      "lora": {"rank": 0, "alpha": 32.0, "targets": ("q", "k", "v", "o")},
      "weights": "",
      "residual": {},
      "merge": True,
      "cepe": {},
      "draft": {},
      "draft_training": {},
      "predict_loss": 0.0,
      "predict_only": False,
      "eagle": {},
      "links": {"each": 0, "documents": 8},
      "sparse": "",
      "index_loss": 1.0,
      "rewards": {},
      "posttraining": {},
      "sources": ({"kind": "library", "weight": 1.0},),
      "packer": "best_fit",
      "held_out": {},
      "seed": 0,
      "log_every": 10,
      "save_every": 100,
      "keep": 3,
      "most_skipped": 3,
      "most_unsaved": 0,
      "timeout_s": placeholder(float),
      "replay_every": placeholder(int),
    },
    convert_dict=True,
    type_safe=False,
  )


def _held_out(config: ConfigDict) -> dict[str, Any]:
  """The entries of `held_out` with their defaults; every None for no text.

  Raises:
    OptionError: If an entry is unknown or out of range.
  """
  defaults = {"every": None, "path": None, "rows": 8, "length": 1024}
  config_entries = json.loads(config.held_out.to_json())
  unknown = [name for name in config_entries if name not in defaults]
  if unknown or (config_entries and config_entries.get("every") is None):
    raise OptionError(
      "held_out",
      ", ".join(unknown) or "no entry every",
      f"{', '.join(defaults)}",
      "set --config.held_out.every=100, for instance",
    )
  entries = {**defaults, **config_entries}
  for name in ("every", "rows", "length"):
    if entries[name] is not None:
      positive_int(f"held_out.{name}", entries[name])
  draft_training = _draft_training(config)
  if config_entries and draft_training is not None:
    draft_training.check(int(entries["length"] or 0))
  return entries


def _evaluation(
  config: ConfigDict, tokenizer: Any, mesh: Mesh
) -> Callable[[Transformer], float] | None:
  """Returns a function that computes a model's held-out loss, or None."""
  entries = _held_out(config)
  if entries["every"] is None:
    return None
  path, length, rows = (entries[x] for x in ("path", "length", "rows"))
  corpus = documents.library(held_out=True)
  if path is not None:
    corpus = list(texts.from_files(texts.find(os.path.expanduser(path))))
  bos = tokenizer.bos_id if tokenizer.adds_bos else None
  # As launch.evaluate perplexity: texts are joined, and cut into rows.
  ids = np.concatenate([np.asarray(tokenizer.encode(x)) for x in corpus])
  span = length + (bos is None)
  if len(ids) < rows * span:
    raise OptionError(
      "held_out",
      f"{len(ids):,} tokens of text for {rows} rows of {length}",
      f"at least {rows * span:,}",
      "pass more text, or fewer or shorter rows",
    )
  token_rows = [ids[n * span : (n + 1) * span] for n in range(rows)]
  # Positions and lags of a draft are drawn as in its training.
  options = {"draft": _draft_training(config), "seed": config.seed}

  def loss(model: Transformer) -> float:
    curve = perplexity(
      model, token_rows, length=length, rows=rows, bos=bos, mesh=mesh, **options
    )
    return curve.mean

  return loss


def _rules(config: ConfigDict, mesh: Mesh) -> rj.models.Rules | None:
  """Sharding rules of the parameters; None replicates them.

  By default the axes seq and data together shard them too, as FSDP does.
  A model with an encoder or a draft of few layers is replicated.
  """
  if config.rules:
    return _build(rj.models.Rules, config.rules, "rules")
  sizes = {name: mesh.shape.get(name, 1) for name in ("seq", "data")}
  # The larger one first: it alone is used where both do not divide a width.
  axes = sorted(
    (name for name in sizes if sizes[name] > 1), key=lambda name: -sizes[name]
  )
  if not axes or len(config.cepe) or len(config.draft):
    return None
  return rj.models.Rules(embed=tuple(axes))


def copy_companions(home: AnyPath, folder: pathlib.Path) -> None:
  """Writes the tokenizer and other side files of a folder or a GGUF file.

  Not those of the model's origin: a training that resumes has none.
  """
  if not is_gguf(home):
    auxiliary_files.copy(home, folder)
    return
  for write in open_model(home).companions().values():
    write(folder)


def _save_dtype(config: ConfigDict, folder: str | None) -> Any:
  """The dtype of the weights to write; None for the parameters' float32."""
  name = config.save_dtype
  if name is None and folder is not None:
    source = open_model(folder)
    text, _ = text_config(source.config)
    name = stored_dtype(source, text)
  return None if name == "float64" else recipe.dtype_of(name)


def _chat_template(config: ConfigDict) -> str | None:
  """The chat template that chats are trained with; None: the tokenizer's."""
  path = config.rewards.get("template") or sources.template_of(
    [
      entry
      for stage in config.stages
      for entry in stage.get("sources", config.sources)
    ]
  )
  return None if path is None else sources.template_text(path)


def _stop_at_answer_end(tokenizer: Any, template: str) -> None:
  """Makes the token that ends a template's answers one at which a model stops.

  The initial model may not stop at that of another template than its own.
  """
  chat_template = ChatTemplate(template, tokenizer.special_names)
  end = answer_end(chat_template, tokenizer)
  if end is not None and end not in tokenizer.eos_ids:
    tokenizer.eos_ids = (*tokenizer.eos_ids, end)


def _start(config: ConfigDict) -> Any:
  """The initialisation of a fresh model that a config asks for, or None."""
  entry = json.loads(config.start.to_json())
  kind = entry.pop("kind", None)
  if not entry and kind is None:
    return None
  one_of("start.kind", kind, INITIALISATIONS)
  entry = {k: _tuples(v) for k, v in entry.items()}
  return _build(INITIALISATIONS[kind], entry, "start")


def _tuples(value: object) -> object:
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _stage(config_entries: Mapping[str, Any]) -> recipe.Stage:
  if not isinstance(config_entries, Mapping):
    raise OptionError(
      "stages",
      f"{config_entries!r} as a stage",
      "stages, each with its own options",
      "pass --config.stages.0.steps=100, for instance",
    )
  entry = dict(config_entries)
  # The sources of rows are no part of the recipe.
  entry.pop("sources", None)
  context = entry.pop("context", None)
  if context is not None:
    entry["context"] = _build(ContextSplit, context, "context")
  scaling = entry.pop("rope_scaling", None)
  if scaling is not None:
    entry["rope_scaling"] = _build(RopeScaling, scaling, "rope_scaling")
  return _build(recipe.Stage, entry, "stages")


def _build(cls: type, fields: Mapping[str, Any], name: str) -> Any:
  """Creates a dataclass from entries of a config."""
  entry = {
    k: tuple(v) if isinstance(v, list) else v for k, v in dict(fields).items()
  }
  try:
    return cls(**entry)
  except RingjaxError:
    raise
  except (TypeError, ValueError) as error:
    # Without the name of the class: "missing 1 required argument: 'length'".
    why = str(error).rpartition("() ")[2]
    raise OptionError(
      name,
      f"{', '.join(entry) or 'nothing'} ({why[:160]})",
      f"some of {', '.join(field.name for field in dataclasses.fields(cls))}",
      "see --help_config for their types",
    ) from None


def _shape(config: ConfigDict) -> Any:
  """The fresh model: a preset's name, or a config.json as a dict."""
  shape = config.model
  return shape if isinstance(shape, str) else json.loads(shape.to_json())


def _tokenizer(
  config: ConfigDict, folder: str | None
) -> tuple[Any, AnyPath | None]:
  """The tokenizer, and its folder; None for bytes."""
  name = config.get("tokenizer") or folder or "bytes"
  home = (
    None
    if name == "bytes"
    else as_path(fetched_models.resolve(name, "tokenizer", tokenizer=True))
  )
  return sources.tokenizer(name), home


def _identity(
  config: ConfigDict,
  base: dict[str, Any] | None,
  tokenizer: Any,
  model: Transformer | None,
) -> dict[str, Any]:
  """JSON that identifies a training: a checkpoint with other JSON is refused.

  Args:
    config: Config of this run.
    base: Contents of config.json in the folder of the initial weights, or None.
    tokenizer: Tokenizer of the data.
    model: Frozen model of the adapters, whose weights are fingerprinted; None
      when all weights are trained, as a checkpoint has them all.
  """
  entries = _config_record(config)
  identity = {name: entries[name] for name in _DECISIVE}
  # Where moments are changes no number: a run resumes with either.
  identity["optimizer"] = dict(entries["optimizer"])
  identity["optimizer"].pop("moments_in", None)
  if base is None:
    identity |= {"model": entries["model"], "start": entries["start"]}
  else:
    identity["init_from"] = base
  identity["tokenizer"] = fingerprint(tokenizer)
  # What takes effect: checkpoints from before this entry can be resumed by runs
  # without any.
  balance = dict(identity.pop("expert_balance"))
  source = entries["model"] if base is None else base
  if balance.get("loss") is None and isinstance(source, dict):
    balance["loss"] = stated_loss(source, str(source.get("model_type")))
  balance = {name: value for name, value in balance.items() if value}
  if balance:
    identity["expert_balance"] = balance
  if entries["links"]["each"]:
    identity["links"] = entries["links"]
  for name, neutral in _LATER.items():
    if entries[name] != neutral:
      # "weights" are the checksums of the model's.
      identity["codes" if name == "weights" else name] = entries[name]
  if model is not None:
    identity["weights"] = checksums(model)
  return identity


def _with_changed_fields(
  error: CheckpointMismatchError,
  path: AnyPath,
  config: ConfigDict,
  folder: str | None,
) -> CheckpointMismatchError:
  """Adds the config fields that changed since the checkpoint to an error.

  Args:
    error: Error that `restore` raised.
    path: Path of the config that the previous run wrote.
    config: Config of this run.
    folder: Folder of the initial weights, or None.
  """
  try:
    previous = ConfigDict(json.loads(path.read_text("utf-8")))
  except (OSError, ValueError):
    return error
  current = ConfigDict(_config_record(config, folder))
  names = (
    *_DECISIVE,
    "links",
    *_LATER,
    "model",
    "start",
    "init_from",
    "tokenizer",
  )
  changed = config_fields.changes(previous, current, names)
  if not changed:
    return error
  return CheckpointMismatchError(
    "config",
    f"fields changed since the checkpoint: {', '.join(changed)}",
    "the config that the checkpoint was saved with",
    "set them back, or use another --out",
  )


def _config_record(
  config: ConfigDict, folder: str | None = None
) -> dict[str, Any]:
  """A config as JSON, with the folder of the initial weights."""
  entries = json.loads(config.to_json_best_effort())
  if folder:
    entries["init_from"] = str(as_path(folder).absolute())
  return entries


def _too_long(
  train_recipe: recipe.Recipe, abstract_model: Transformer
) -> list[str]:
  """Notes about stages with rows beyond the model's context."""
  notes = []
  for number, stage in enumerate(train_recipe.stages):
    if stage.rope_scaling is not None:
      abstract_model = extend_context(abstract_model, stage.rope_scaling)
    longest = abstract_model.config.longest
    if longest is not None and stage.length > longest:
      notes.append(
        f"note: stage {number} has rows of {stage.length:,} tokens, and the "
        f"model is for {longest:,}, which its config will keep; to change that "
        f"give the stage 'rope_scaling': {{'context': {stage.length}}}"
      )
  return notes


def _left_out(abstract_model: Transformer) -> list[str]:
  """Note about entries of a model's config that training does not apply."""
  config = json.loads(abstract_model.source)
  ignored = [
    f"{name} {config[name]}" for name in _NOT_APPLIED if config.get(name)
  ]
  return [f"note: not applied: {', '.join(ignored)}"] if ignored else []


def _farewell(step: int, saved_steps: Sequence[int]) -> str:
  if saved_steps and saved_steps[-1] == step:
    return f"stopped after step {step}, which is saved"
  saved = f"step {saved_steps[-1]} is saved" if saved_steps else "none is saved"
  return f"stopped after step {step}, which was not finite; {saved}"


def _count(model: Transformer) -> int:
  return sum(math.prod(x.shape) for x in jax.tree.leaves(model))


# ---------------------------------------------------------------------------
# Measurements
# ---------------------------------------------------------------------------


class _Trace:
  """Writes a trace of the third to the fifth step of a run."""

  def __init__(self, folder: str | None):
    self._folder, self._count, self._runs = folder, 0, False

  @property
  def missed(self) -> bool:
    """Whether a trace was asked for and the run was too short for it."""
    return self._folder is not None and self._count < 3

  def __enter__(self) -> _Trace:
    return self

  def __exit__(self, *_: object) -> None:
    if self._runs:
      # Programs are still running: the host is ahead of the devices.
      for x in jax.live_arrays():
        if not x.is_deleted():
          x.block_until_ready()
      self._runs = False
      jax.profiler.stop_trace()

  def __call__(self) -> None:
    """Counts a step that begins; starts or stops the trace."""
    self._count += 1
    if self._folder is not None and self._count == 3:
      jax.profiler.start_trace(self._folder)
      self._runs = True
    if self._count == 6:
      self.__exit__()


def _appended(path: AnyPath) -> TextIO:
  """Opens a log, without its last line if a kill has truncated that."""
  if isinstance(path, ObjectPath):
    return ObjectLog(path)
  log = path.open("a+b")
  log.seek(0)
  complete_bytes = log.read().rfind(b"\n") + 1
  log.truncate(complete_bytes)
  return io.TextIOWrapper(log, encoding="utf-8")


def _peak(dtype: str, mesh: Mesh) -> float | None:
  """Peak FLOP/s of a device of a mesh by its data sheet; None if unknown."""
  device = mesh.devices.flat[0]
  name = chips.machine_name(device.device_kind)
  if device.platform == "cpu" or name is None:
    return None
  return chips.CHIPS[name].rate(dtype)


def _share(rate: float, peak: float | None, devices: int) -> float | None:
  """Share of the devices' peak FLOP/s that a rate reaches; None if unknown.

  None above 1, too: the peak is not that of these devices then.
  """
  if peak is None or rate > peak * devices:
    return None
  return rate / (peak * devices)


def _peak_bytes() -> int | None:
  """Peak memory of this process's first device, if it is known."""
  return memory.device_memory(jax.local_devices()[0]).peak


# ---------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  common.refuse_rest(argv)
  return run(flags.FLAGS, stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  flags.adopt_module_key_flags(common)
  common.launch(NAME, main)
