"""The flag --integer: products of integers, on one device or on two."""

from __future__ import annotations

from typing import Any

import jax
from absl import flags

import ringjax as rj
from ringjax import option_text
from ringjax.checks import is_address, one_of
from ringjax.errors import OptionError
from ringjax.infer.llm_npu.integer_model import FILE as RANGES
from ringjax.models.transformer import Transformer
from ringjax.paths import as_path
from ringjax.plan.systems.subgraphs import RULES

from . import prompts

HELP = (
  "Multiplies 8-bit integers in the linear maps, by the activation ranges in "
  "this folder (launch.calibrate --ranges): DIR or "
  "DIR:shadow=16,prune=0.85,scales=tensor. With devices=2, of launch.generate, "
  "the first device multiplies integers of a chunk (--chunk) while the second "
  "one multiplies outliers in floats, and attends with another; "
  f"rule={'|'.join(RULES)} chooses what runs next."
)
# Options of `rj.infer.integer_model` and of `rj.infer.read_on_two`.
_INTEGER = ("shadow", "prune", "scales", "hot")
_READING = ("devices", "rule")
# Flags that are refused where two devices prefill.
_NOT_ON_TWO = (
  "mesh",
  "prefill",
  "profile",
  "keep",
  "wire",
  "cache",
  "contexts",
  "speculate",
  "placement",
  "memory",
  "cache_placement",
  "disk",
  "policy",
)


def model(plain: Transformer, text: str) -> Transformer:
  """Creates the model with integer products that --integer asks for."""
  folder, options = _options(text)
  model_options = {key: x for key, x in options.items() if key in _INTEGER}
  return rj.infer.integer_model(plain, folder, **model_options)


def check(text: str) -> None:
  """Refuses options and a folder that do not exist, before a model is loaded.

  Raises:
    OptionError: If there is no such option, or the folder has no ranges.
  """
  folder, _ = _options(text)
  if not (as_path(folder, "--integer") / RANGES).exists():
    raise OptionError(
      "--integer",
      f"{folder!r}, without {RANGES}",
      "the folder of the model's activation ranges, options after a colon",
      "pass --integer=DIR:shadow=16; to make one: python -m launch.calibrate "
      "--model=DIR --text=FILE --ranges --out=DIR",
    )


def reading(values: flags.FlagValues) -> dict[str, Any]:
  """`devices` and `rule` of `read_on_two`; empty if one device prefills.

  Raises:
    OptionError: If there are too few devices, or flags conflict with it.
  """
  reading_options = two_asked(values)
  if not reading_options:
    return {}
  devices = jax.devices()
  if len(devices) < 2:
    raise OptionError(
      "--integer",
      f"devices=2 with {len(devices)} device",
      "two devices",
      "pass --devices=2 on CPUs, or leave devices= out",
    )
  return reading_options | {"devices": tuple(devices[:2])}


def two_asked(values: flags.FlagValues) -> dict[str, Any]:
  """Parses the options of --integer on two devices; empty for one device."""
  if values.integer is None:
    return {}
  _, options = _options(values.integer)
  reading_options = {key: x for key, x in options.items() if key in _READING}
  count = reading_options.pop("devices", 1)
  if count not in (1, 2) or isinstance(count, bool):
    raise OptionError(
      "--integer", f"devices={count}", "1 or 2", "leave it out, or pass 2"
    )
  if reading_options and count == 1:
    raise prompts.clash("--integer with rule= and without devices=2", "both")
  if "rule" in reading_options:
    one_of("--integer: rule", reading_options["rule"], RULES)
  if count == 1:
    return {}
  for name in _NOT_ON_TWO:
    if name in values and values[name].present:
      raise prompts.clash(f"--{name} and --integer with devices=2", "one")
  if (values["num_processes"].value or 1) > 1:
    raise prompts.clash("--num_processes and devices=2", "one process")
  return {"rule": reading_options.get("rule", RULES[0])}


def _options(text: str) -> tuple[str, dict[str, Any]]:
  """The folder or the address of --integer, and its options."""
  # After the colon of an address.
  scheme = len(text.partition("://")[0]) + 3 if is_address(text) else 0
  folder, colon, option_part = text[scheme:].partition(":")
  folder = text[:scheme] + folder
  pairs = option_text.pairs(
    option_part if colon else None, (*_INTEGER, *_READING), "--integer", folder
  )
  return folder, {key: option_text.value(value) for key, value in pairs.items()}
