"""Flags of both launch.generate and launch.chat: model, cache and sampling.

Also creates the objects that these flags ask for.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

import jax
from absl import flags
from jax.sharding import Mesh

import ringjax as rj
from ringjax import fetched_models, option_text
from ringjax.checks import is_address, local_path, positive_int
from ringjax.data import Tokenizer, fingerprint
from ringjax.errors import OptionError
from ringjax.infer import GenerateConfig, Sample, speculate
from ringjax.infer.generate_config import check_pairs, present_options
from ringjax.infer.sampling import PARAMETERS, from_names
from ringjax.infer.speculate.draft_model import ModelDrafter
from ringjax.kv import kind_text
from ringjax.models.checkpoint import WEIGHTS
from ringjax.models.transformer import Transformer
from ringjax.models.weights import neurons
from ringjax.models.weights.coded_weights import KINDS
from ringjax.parallel import memory
from ringjax.paths import AnyPath

from . import (
  answering,
  common,
  console,
  integer_flags,
  machines,
  prompts,
)
from .flag_helpers import FlagHelper, flag_name, option_values

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()
# Options of `generate` with flags here; `define` takes more of them.
_OPTIONS = (
  "prefill",
  "chunk",
  "wire",
  "cache_kind",
  "placement",
  "memory",
  "cache_placement",
  "disk",
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "stop",
  "speculate",
  "max_new_tokens",
  "seed",
)
# Share of the host's free memory that keys may take.
_HOST_SHARE = 0.9
# Options of `rj.models.sparse_model`.
_FLASH = ("window", "memory", "threshold", "predictors", "threads")


def define(
  values: flags.FlagValues,
  default: str = "the model in ringjax",
  more: Collection[str] = (),
  says: Mapping[str, str] | None = None,
) -> None:
  """Defines the flags of a model, of its cache and of sampling.

  Args:
    values: Flags to add to.
    default: Words for the model that is taken without --model.
    more: Options of `generate` that get a flag besides those of all scripts.
    says: Sentences that a script adds to the texts of options.
  """
  new = FlagHelper(values)
  new.checkpoint(default)
  new.rope_scaling()
  new.text("system", None, "A system message; needs a chat template.")
  new.options(GenerateConfig, (*_OPTIONS, *more), says)
  machines.define(
    FlagHelper(values, "Costs of the devices, for --prefill=auto."),
    "Profile for --prefill=auto to choose by",
  )
  new.text(
    "dtype",
    None,
    "bfloat16, float16 or float32; default: the folder's, on one CPU device "
    "float32 where that fits.",
  )
  flags.DEFINE_enum(
    "weights",
    None,
    [*KINDS, *WEIGHTS],
    "Keeps the weights of linear maps as codes: rounded to 8 or 4 bits (nf4 "
    "and mxfp4 have 4), or stored: those of a GGUF file, with its numbers.",
    flag_values=values,
  )
  new.path("adapter", None, "Low-rank adapter to add: a folder of PEFT.")
  new.place("integer", None, integer_flags.HELP)
  new.path(
    "flash",
    None,
    "Reads single feedforward neurons from this folder as tokens need them, "
    "of a ReLU model, or lossily with a threshold: DIR or DIR:window=5,"
    "memory=1GiB,threshold=.1,predictors=true; predictors of launch.calibrate "
    "--neurons are in DIR. Neurons are written there if there are none.",
  )


def config(values: flags.FlagValues) -> GenerateConfig:
  """Options of `generate` that the flags set, but for placements and texts.

  Placements depend on the model, see `offload`; texts that end an answer and
  drafters on its tokenizer.

  Raises:
    OptionError: If an option is out of its range, or some contradict.
  """
  names = ("prefill", "chunk", "wire", "keep", "cache_kind", "max_new_tokens")
  options = option_values(values, GenerateConfig, names)
  return GenerateConfig().replace(**options, sampler=sampler(values))


def check(values: flags.FlagValues, **others: str | None) -> None:
  """Refuses flags that do not go together, before anything is loaded.

  Args:
    values: The flags.
    **others: Flags that stand for other options of `generate.PAIRS`, by the
      name of the option, such as contexts="--contexts"; None: not passed.
  """
  common.cache_kind(values.cache)
  if values.speculate is not None:
    checked_drafter(values.speculate)
  if values.max_new_tokens is not None:
    positive_int("--max_new_tokens", values.max_new_tokens)
  if values.model == "":
    # Probably an unset shell variable: the default model would answer.
    raise OptionError(
      "--model", "an empty value", "a model directory", "pass its path"
    )
  costs = values.profile is not None
  for refused, got, want in (
    *((values.flash is not None and values[name].value is not None,
       f"--{name} with --flash", "one of them")
      for name in ("placement", "memory", "weights", "integer")),
    (values.integer is not None and values.weights is not None,
     "--integer with --weights", "one of them"),
    *((True, f"--{name} without --profile", "both")
      for name in machines.unused(values)),
    (costs and values.prefill != "auto",
     f"--profile and --prefill={values.prefill}", "--prefill=auto"),
    (costs and values.chunk is not None,
     "--profile and --chunk", "one of them"),
  ):  # fmt: skip
    if refused:
      raise prompts.clash(got, want)
  options = config(values).replace(
    speculate=values.speculate, cache_placement=values.cache_placement
  )
  names = {x: f"--{flag_name(GenerateConfig, x)}" for x in (*_OPTIONS, "keep")}
  if values.disk is not None and values.cache_placement is None:
    # It places keys, see `offload`.
    others["cache_placement"] = "--disk"
  passed = {name: flag for name, flag in others.items() if flag is not None}
  present = present_options(options) | dict.fromkeys(passed, True)
  check_pairs(present, names | passed)
  if values.integer is not None:
    integer_flags.check(values.integer)


def checked_drafter(text: str) -> speculate.Drafter:
  """The drafter of --speculate, refused before anything is loaded.

  Raises:
    OptionError: If there is no such drafter, or the folder of its model or the
      file of its cache's calibration is missing.
  """
  drafter = speculate.drafter_of(text, "--speculate")
  if isinstance(drafter, ModelDrafter):
    kind = drafter.cache_kind
    if isinstance(kind, str):
      kind = kind_text.parse(kind, "--speculate")
    common.check_files_of(kind)
  is_head = isinstance(drafter, answering.HEADS)
  if is_head or isinstance(drafter, speculate.LongSpec) or _has_folder(drafter):
    model = drafter.model
    assert isinstance(model, str)
    if not is_head:
      local_path("--speculate", model)
    missing = None if model else repr(text)
    if not (missing or is_address(model)) and not os.path.exists(
      fetched_models.resolve(model, "--speculate")
    ):
      missing = f"{model}, which does not exist"
    if missing:
      raise OptionError(
        "--speculate",
        missing,
        "the folder of " + ("a head" if is_head else "a draft model"),
        f"pass --speculate={drafter.name}:model=FOLDER",
      )
  return drafter


def load(
  values: flags.FlagValues,
  folder: AnyPath,
  mesh: Mesh | None,
  say: Callable[[str], Any],
  *,
  policy: Any = None,
  beside: Callable[..., Mapping[str, Mapping[str, int]]] | None = None,
) -> Transformer:
  """Loads the model of the flags.

  Args:
    values: The flags.
    folder: Folder or file of the model.
    mesh: Devices that get it.
    say: Function that prints a line.
    policy: Placement of its layers, in place of --placement.
    beside: Bytes of the largest call, for --memory, as `rj.models.load` has it.
  """
  check_adapter(values.adapter)
  if values.flash is not None and mesh is not None and mesh.size > 1:
    raise OptionError(
      "--flash", f"a mesh of {mesh.size} devices", "one", "pass --mesh=seq:1"
    )
  # With --flash at most one layer's feedforward is loaded at a time.
  placement = values.placement if values.flash is None else "disk"
  exact = ("placement", "memory", "flash", "weights", "integer", "adapter")
  model, note = answering.load(
    values,
    folder,
    mesh,
    codes=policy is None
    and all(values[name].value is None for name in exact)
    and not measured(values),
    placement=policy or placement,
    memory=values.memory,
    beside=beside,
    weights=values.weights if values.weights in WEIGHTS else None,
  )
  if model.stored_types is not None:
    say(f"weights: {model.stored_types}")
  if note is not None:
    say(note)
  if values.weights is not None and values.weights not in WEIGHTS:
    model = rj.models.with_coded_weights(model, **KINDS[values.weights])
  if values.adapter is not None:
    # Next to codes, which it may have been trained on.
    model = _adapted(model, values)
  if values.flash is not None:
    model = _flash(model, values.flash, say)
  if values.integer is not None:
    model = integer_flags.model(model, values.integer)
  return model


def measured(values: flags.FlagValues) -> bool:
  """Whether a cache or a drafter was made for the weights as floats."""
  if common.measured(kind_text.parse(values.cache, "--cache")):
    return True
  return values.speculate is not None and isinstance(
    speculate.drafter_of(values.speculate, "--speculate"), speculate.LongSpec
  )


def tell_placement(model: Transformer, say: Callable[[str], Any]) -> None:
  """Reports the placement of layers, unless all are on the devices."""
  placed = model.placement_report()
  if placed.streamed_parameters:
    say(f"placement: {_placement(placed)}")
    model.on_wait(say)


def offload(
  values: flags.FlagValues, model: Transformer, tokens: int
) -> dict[str, Any]:
  """Arguments of `generate` and `Session` that place keys of idle layers.

  Args:
    values: The flags.
    model: Model of the keys.
    tokens: Tokens of the row.
  """
  placement = values.cache_placement
  if placement is None and values.disk is None:
    return {}
  if placement is None:
    kind = kind_text.parse(values.cache, "--cache")
    cache_spec = model.init_cache_spec(1, tokens, kind=kind)
    need = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache_spec))
    free = memory.host_free_bytes()
    host = 1.0 if free is None else min(1.0, _HOST_SHARE * free / need)
    placement = rj.models.Placement(host=host, disk=1 - host)
    if placement.disk == 0:
      return {"cache_placement": placement}
  return {"cache_placement": placement, "disk": values.disk}


def _adapted(model: Transformer, values: flags.FlagValues) -> Transformer:
  """Adds the adapter of --adapter to the weights of a model."""
  rounded = values.integer is not None or values.weights is not None
  placed = model.stack.placed is not None
  if values.flash is not None or (placed and rounded):
    raise OptionError(
      "--adapter",
      "it with weights that are read from disk or rounded as they stream",
      "weights that the adapter is added to",
      "leave --flash, --integer and --weights out",
    )
  return adapted(model, values.adapter)


def check_adapter(folder: str | None) -> None:
  """Refuses an adapter that is not there, before a model is loaded.

  Raises:
    OptionError: If the folder has no adapter_config.json.
  """
  if folder is None or (pathlib.Path(folder) / "adapter_config.json").is_file():
    return
  raise OptionError(
    "--adapter",
    f"{folder!r}, without adapter_config.json",
    "a folder of PEFT",
    "pass the folder that launch.train or PEFT wrote",
  )


def adapted(model: Transformer, folder: str) -> Transformer:
  """Adds the low-rank adapter of a PEFT folder to the weights of a model."""
  lora, params = rj.train.load_adapter(folder, model)
  return lora.merged(params, model)


def _flash(
  model: Transformer, text: str, say: Callable[[str], Any]
) -> Transformer:
  """Creates the model of --flash, whose neurons are on disk."""
  folder, colon, option_part = text.partition(":")
  pairs = option_text.pairs(
    option_part if colon else None, _FLASH, "--flash", folder
  )
  options = {key: option_text.value(value) for key, value in pairs.items()}
  if options.pop("predictors", False):
    options["predictors"] = folder
  if not (pathlib.Path(folder) / neurons.FILE).exists():
    # The file is as large as the weights: not for a model that is refused.
    neurons.check_sparse(model, options.get("threshold", 0))
    say(f"neurons: {rj.models.write_neurons(model, folder)}")
  sparse = rj.models.sparse_model(model, folder, **options)
  report = rj.models.neuron_report(sparse)
  lossy = "predictors may miss some" if "predictors" in options else "exact"
  if options.get("threshold"):
    lossy = "a threshold leaves small ones out"
  say(
    f"neurons: {console.nbytes(report.disk_bytes)} on disk, at most "
    f"{console.nbytes(report.buffer_bytes)} in memory; {lossy}"
  )
  return sparse


def _has_folder(drafter: speculate.Drafter) -> TypeGuard[speculate.DraftModel]:
  """Whether a drafter is a draft model, which a flag names by its folder."""
  return type(drafter) is speculate.DraftModel


def drafter(text: str, tokenizer: Tokenizer) -> speculate.Drafter:
  """The drafter of --speculate; a draft model's tokens may be translated."""
  drafter = speculate.drafter_of(text, "--speculate")
  if not _has_folder(drafter):
    return drafter
  assert isinstance(drafter.model, str)
  draft_tokenizer = Tokenizer.load(drafter.model, untrusted=True)
  if fingerprint(draft_tokenizer) == fingerprint(tokenizer):
    return drafter
  options = {
    f.name: getattr(drafter, f.name)
    for f in dataclasses.fields(drafter)
    if f.init
  }
  return speculate.TranslatedDraft(
    **options, tokenizer=draft_tokenizer, target_tokenizer=tokenizer
  )


def sampler(values: flags.FlagValues) -> Any:
  """Creates the sampler of the flags."""
  parameters = {
    name: values[name].value for name in PARAMETERS if name != "seed"
  }
  filters = any(
    parameters[name] is not None for name in ("top_k", "top_p", "min_p")
  )
  if parameters["temperature"] == 0 and filters:
    raise prompts.clash(
      "--temperature=0 and filters", "sampling or --temperature=0"
    )
  sampler, _ = from_names(None, None, parameters)
  if isinstance(sampler, Sample):
    return dataclasses.replace(sampler, seed=values.seed)
  return sampler


def _placement(report: Any) -> str:
  """Text on the layers in each memory tier and their bytes."""
  parts = []
  for tier in ("device", "host", "disk"):
    if count := report.tiers.count(tier):
      size = console.nbytes(getattr(report, f"{tier}_bytes"))
      parts.append(f"{count} layers ({size}) {_PLACES[tier]}")
  text = ", ".join(parts)
  if report.buffer_bytes:
    text += f"; {console.nbytes(report.buffer_bytes)} to read them through"
  return text


_PLACES = {
  "device": "on the devices",
  "host": "in host memory",
  "disk": "on disk",
}
