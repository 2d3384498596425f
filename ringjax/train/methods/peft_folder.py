"""Low-rank adapters as folders of PEFT: written, and read again.

Guarantees: a folder has `adapter_config.json` and `adapter_model.safetensors`
with PEFT's names, so that `peft.PeftModel.from_pretrained` adds the same
numbers to the same maps; `load_adapter` returns bit for bit what `save_adapter`
wrote. A folder that needs more than A and B of linear maps is refused, with the
name of the feature: DoRA, ranks or alphas that differ between maps, trained
biases and whole modules.

A map of PEFT is a tensor of the checkpoint: x A^T B^T with A [r, in] and
B [out, r]. A tensor of several maps (Phi 3's qkv_proj) is read, since its maps
share A, and not written, since here their A's are trained separately.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import Float

from ringjax.checks import local_path
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  CheckpointWriteError,
  ConfigError,
  OptionError,
)
from ringjax.json_text import json_text
from ringjax.models.checkpoint import create
from ringjax.models.contents import read_config
from ringjax.models.hf.names import FusedRows, SwappedAxes, Transpose
from ringjax.models.hf.safe_files import MAX_CONFIG_BYTES, strict_json
from ringjax.models.hf.tensors import CheckpointTensor, checkpoint_tensors
from ringjax.models.parameter_arrays import on_host
from ringjax.models.transformer import Transformer
from ringjax.models.weights.calibration import read_tensors, write_tensors
from ringjax.models.weights.linear_maps import (
  CODED,
  adaptable_maps,
  linear_maps,
)
from ringjax.train.methods.lora import Lora, map_shape

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# Entry of a file's metadata with the modules of the layer that predicts further
# tokens, which most models are loaded without.
_PREDICTING = "predict_layer"
# Entry with the codes that the adapters belong to, see `Lora.over`.
_OVER = "over"
_PREFIX = "base_model.model."
# Entries that only affect training, or repeat what the tensors show.
_IGNORED = (
  "auto_mapping",
  "base_model_name_or_path",
  "corda_config",
  "ensure_weight_tying",
  "eva_config",
  "exclude_modules",
  "fan_in_fan_out",
  "inference_mode",
  "layers_pattern",
  "layers_to_transform",
  "loftq_config",
  "lora_alpha",
  "lora_dropout",
  "lora_ga_config",
  "megatron_core",
  "peft_type",
  "peft_version",
  "qalora_group_size",
  "r",
  "revision",
  "runtime_config",
  "target_modules",
  "task_type",
  "use_rslora",
  "velora_config",
)
# Initialisations that don't change the model's own weights.
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


def save_adapter(
  path: str | os.PathLike[str],
  model: Transformer,
  how: Lora,
  params: Mapping[str, Any],
  *,
  overwrite: bool = False,
) -> None:
  """Writes adapters as a folder that PEFT and `load_adapter` read.

  In a run of several processes all of them make the same call, and process 0
  writes.

  Args:
    path: Folder that does not exist, or has no adapter.
    model: Model that the adapters were trained on, of arrays or shapes.
    how: Rank, alpha and targets of the adapters.
    params: Arrays of the adapters, as `Lora.start` makes them.
    overwrite: Whether an adapter in the folder is replaced.

  Raises:
    OptionError: If there are embeddings of new tokens, or maps that the
      checkpoint keeps with others in one tensor, for which PEFT has no form;
      or if the folder has an adapter.
    CheckpointWriteError: If the folder cannot be written.
  """
  adapted, others = _adapted(model, params)
  tensors: dict[str, np.ndarray] = {}
  host = {
    path: {
      name: on_host(x) if isinstance(x, jax.Array) else np.asarray(x)
      for name, x in part.items()
    }
    for path, part in params.items()
  }
  rank = how.rank
  for name, _, map_path, index in adapted:
    part = host[map_path]
    a, b = part["a"][index], part["b"][index]
    key = f"{_PREFIX}{name}"
    tensors[f"{key}.lora_A.weight"] = np.ascontiguousarray(
      a.reshape(-1, rank).T
    )
    tensors[f"{key}.lora_B.weight"] = np.ascontiguousarray(
      b.reshape(rank, -1).T
    )
  swapped = any(isinstance(form, SwappedAxes) for _, form, _, _ in adapted)
  modules = {_in_layer(name) for name, _, _, _ in adapted}
  if jax.process_index():
    return
  metadata = {"format": "pt"} | ({_OVER: how.over} if how.over else {})
  if model.config.predicts is not None:
    last = f"stack.blocks.{len(model.stack.runs) - 1}."
    further = [
      name for name, _, map_path, _ in adapted if map_path.startswith(last)
    ]
    metadata[_PREDICTING] = " ".join(further)
  alpha = float(how.alpha)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "inference_mode": True,
    "r": how.rank,
    "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": swapped,
    "target_modules": sorted(_endings(modules, others)),
  }
  place = pathlib.Path(local_path("path", path))
  if not overwrite and (place / CONFIG).exists():
    raise OptionError(
      "path",
      f"{str(path)[-80:]}, which has an adapter",
      "a folder without one",
      "pass overwrite=True, or another folder",
    )
  try:
    place.mkdir(parents=True, exist_ok=True)
    write_tensors(place / TENSORS, tensors, metadata)
    text = json_text(config, indent=2, sort_keys=True) + "\n"
    (place / CONFIG).write_text(text, encoding="utf-8")
  except OSError as error:
    raise CheckpointWriteError(
      "path",
      f"{str(path)[-80:]} ({error.strerror})",
      "a folder that can be written to",
      "free space there or change its permissions, or pass another",
      file=error.filename,
    ) from error


def check_adapter(model: Transformer, params: Mapping[str, Any]) -> None:
  """Checks that adapters have a form in PEFT's folders.

  Args:
    model: Model that the adapters are trained on, of arrays or shapes.
    params: Adapters as `Lora.start` makes them, of arrays or shapes.

  Raises:
    OptionError: If they have none, see `save_adapter`.
  """
  _adapted(model, params)


def load_adapter(
  path: str | os.PathLike[str], model: Transformer
) -> tuple[Lora, dict[str, dict[str, Float[np.ndarray, " ..."]]]]:
  """Reads adapters of a folder that PEFT or `save_adapter` wrote.

  Args:
    path: Folder with adapter_config.json and adapter_model.safetensors.
    model: Model that the adapters were trained on, of arrays or shapes.

  Returns:
    (settings, float32 arrays as `Lora.start` makes them); layers without an
    adapter have zeros, and adapters of a layer that predicts further tokens
    are left out where the model was loaded without it.
    `Engine(adapters={name: ...})` takes the pair.

  Raises:
    ConfigError: If the config is not for a sum W + s A B.
    CheckpointFormatError: If a file is missing or broken.
    CheckpointMismatchError: If tensors are of another model, rank or shape.
    OptionError: If the adapters correct codes that the model lacks.
  """
  place = pathlib.Path(local_path("path", path))
  config = _config(place)
  rank, alpha = config["r"], float(config["lora_alpha"])
  if config.get("use_rslora"):
    # The scale of rsLoRA is alpha / sqrt(r).
    alpha *= math.sqrt(rank)
  pairs, metadata = _pairs(place)
  further = metadata.get(_PREDICTING, "").split()
  maps = adaptable_maps(model)
  params: dict[str, dict[str, np.ndarray]] = {}
  for name, form, targets in _modules(model):
    pair = pairs.pop(name, None)
    if pair is None:
      continue
    plain = form.form if isinstance(form, SwappedAxes) else form
    rows, columns = plain.stored
    _check_shapes(name, pair, {"A": (rank, columns), "B": (rows, rank)})
    parts: Any = plain.parts if isinstance(plain, FusedRows) else (plain,)
    groups = plain.groups if isinstance(plain, FusedRows) else 1
    ups = FusedRows(
      groups, tuple(Transpose((rank,), part.outputs) for part in parts)
    ).split(pair["B"])
    for (target, index), part, up in zip(targets, parts, ups, strict=True):
      if target not in params:
        lead, into, out = map_shape(model, target, maps[target])
        params[target] = {
          "a": np.zeros((*lead, *into, rank), np.float32),
          "b": np.zeros((*lead, rank, *out), np.float32),
        }
      down = pair["A"].T.reshape(*part.inputs, rank)
      params[target]["a"][index] = down
      params[target]["b"][index] = up
  if model.config.predicts is None:
    # The layer was left out when the model was loaded.
    pairs = {name: x for name, x in pairs.items() if name not in further}
  if pairs:
    raise CheckpointMismatchError(
      TENSORS,
      f"adapters of {', '.join(sorted(pairs)[:2])}, {len(pairs)} in all",
      f"adapters of linear maps of this {model.config.family}",
      "pass the model that they were trained on",
    )
  if not params:
    raise CheckpointMismatchError(
      TENSORS, "no adapter", "one or more", "pass the folder of an adapter"
    )
  targets = tuple(sorted({name.rsplit(".", 1)[-1] for name in params}))
  how = Lora(
    rank=rank, alpha=alpha, targets=targets, over=metadata.get(_OVER, "")
  )
  how.check_codes(model)
  return how, params


def _adapted(
  model: Transformer, params: Mapping[str, Any]
) -> tuple[list[tuple[str, Any, str, tuple[int, ...]]], set[str]]:
  """Modules with adapters: name, form, map and index; names of the others."""
  if any("new" in part for part in params.values()):
    raise OptionError(
      "params",
      "adapters with embeddings of new tokens",
      "adapters of linear maps alone, which PEFT's folders hold",
      "save the merged model: rj.models.save(how.merged(params, model), path)",
    )
  modules, others = [], set()
  for name, form, targets in _modules(model):
    adapted = [(path, index) for path, index in targets if path in params]
    if not adapted:
      others.add(_in_layer(name))
      continue
    path, index = adapted[0]
    if isinstance(form, FusedRows):
      raise OptionError(
        "params",
        f"an adapter of {path}, which is a part of {name}",
        "adapters of maps with a tensor of their own",
        "save the merged model: rj.models.save(how.merged(params, model), "
        "path)",
      )
    modules.append((name, form, path, index))
  return modules, others


def _in_layer(module: str) -> str:
  """Module name after a layer's number, "self_attn.q_proj"."""
  return re.split(r"\.\d+\.", module)[-1]


def _endings(modules: set[str], others: set[str]) -> set[str]:
  """Shortest endings by which PEFT finds these modules and no others."""
  last = lambda name: name.rpartition(".")[2]
  endings = {last(name) for name in others}
  return {name if last(name) in endings else last(name) for name in modules}


def _modules(
  model: Transformer,
) -> Iterator[tuple[str, Any, list[tuple[str, tuple[int, ...]]]]]:
  """Tensors of linear maps: their modules' names, forms and maps."""
  source = json.loads(model.source)
  _, family = read_config(source)
  coded = any(isinstance(x, CODED) for x in adaptable_maps(model).values())
  if coded or model.stack.placed is not None:
    # Codes, and layers in host memory or on disk, are no floats of the model.
    looped = any(run.repeats > 1 for run in model.stack.runs)
    model = jax.eval_shape(lambda: create(source, scan=looped))
  maps = dict(linear_maps(model))
  tensors: list[CheckpointTensor] = checkpoint_tensors(
    model, family.tensor_names(model.config)
  )
  for tensor in tensors:
    targets = [
      (path.removesuffix(".weight"), index)
      for path, index in tensor.targets
      if path.endswith(".weight") and path.removesuffix(".weight") in maps
    ]
    form = tensor.form
    plain = form.form if isinstance(form, SwappedAxes) else form
    parts = plain.parts if isinstance(plain, FusedRows) else (plain,)
    linear = all(isinstance(part, Transpose) for part in parts)
    if linear and len(targets) == len(parts) == len(tensor.targets):
      yield tensor.name.removesuffix(".weight"), form, targets


def _config(place: pathlib.Path) -> dict[str, Any]:
  """The config of an adapter, after a check that all of it is supported."""
  try:
    data = (place / CONFIG).read_bytes()[: MAX_CONFIG_BYTES + 1]
    config = strict_json(data, max_depth=16)
    if len(data) > MAX_CONFIG_BYTES or not isinstance(config, dict):
      raise ValueError("no JSON object of a config's size")
  except (OSError, ValueError) as error:
    raise CheckpointFormatError(
      f"{place.name}/{CONFIG}"[-60:],
      f"{getattr(error, 'strerror', None) or error}"[:100],
      "the config of an adapter",
      "pass a folder that PEFT's save_pretrained or save_adapter wrote",
    ) from None
  if config.get("peft_type") != "LORA":
    _refuse("peft_type", config.get("peft_type"), "'LORA'")
  bias = config.get("bias", "none")
  if bias != "none":
    _refuse("bias", bias, "'none': trained biases are no part of an adapter")
  init = config.get("init_lora_weights")
  if init not in _INITS:
    _refuse(
      "init_lora_weights",
      init,
      "an initialisation that leaves the weights of the model as they are",
    )
  allowed = (*_IGNORED, "bias", "init_lora_weights")
  for name, value in config.items():
    # PEFT writes unused options as null, false or an empty object.
    if name not in allowed and value:
      _refuse(name, value, "an adapter without it: W + s A B of linear maps")
  rank, alpha = config.get("r"), config.get("lora_alpha")
  if type(rank) is not int or rank < 1:
    _refuse("r", rank, "a rank of 1 or more")
  if type(alpha) not in (int, float):
    _refuse("lora_alpha", alpha, "a number")
  return config


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
  raise ConfigError(
    f"{CONFIG}: {name}",
    f"{value!r}"[:60],
    wanted,
    "merge the adapter into its model with PEFT's merge_and_unload, and load "
    "that",
  )


def _pairs(
  place: pathlib.Path,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, str]]:
  """Arrays A and B, float32, by module; metadata of the file."""
  if not (place / TENSORS).exists():
    raise CheckpointFormatError(
      f"{place.name}"[-60:],
      f"no {TENSORS}",
      "one: files of other formats would run code",
      "save the adapter with safe_serialization=True",
    )
  arrays, metadata = read_tensors(place / TENSORS)
  pairs: dict[str, dict[str, np.ndarray]] = {}
  for name, x in arrays.items():
    module, dot, kind = name.rpartition(".lora_")
    kinds = {"A.weight": "A", "B.weight": "B"}
    if not dot or kind not in kinds or not module.startswith(_PREFIX):
      raise CheckpointMismatchError(
        TENSORS,
        name[-80:],
        f"names as {_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight",
        "save it with PEFT's save_pretrained, or merge it into its model",
      )
    pair = pairs.setdefault(module.removeprefix(_PREFIX), {})
    pair[kinds[kind]] = np.asarray(x).astype(np.float32)
  for module, pair in pairs.items():
    if len(pair) < 2:
      raise CheckpointMismatchError(
        TENSORS, f"only {', '.join(pair)} of {module}", "A and B", "save again"
      )
  return pairs, metadata


def _check_shapes(
  name: str,
  pair: Mapping[str, np.ndarray],
  wanted: Mapping[str, tuple[int, ...]],
) -> None:
  shapes = {kind: x.shape for kind, x in sorted(pair.items())}
  if shapes != dict(wanted):
    raise CheckpointMismatchError(
      f"adapter of {name}",
      f"{shapes}",
      f"{dict(wanted)}",
      "pass the model that it was trained on",
    )
