"""The flag --integer: products of integers, on one device or on two."""

from __future__ import annotations

from typing import Any

import jax
from absl import flags

import ringjax as rj
from launch import prompts
from ringjax import option_text
from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.models.transformer import Transformer
from ringjax.plan.subgraphs import RULES

HELP = (
  "Multiplies 8-bit integers in the linear maps, by the activation ranges in "
  "this folder (launch.calibrate --ranges): DIR or "
  "DIR:shadow=16,prune=0.85,scales=tensor. With devices=2, of launch.generate, "
  "the first device multiplies integers of a chunk (--chunk) while the second "
  "one multiplies outliers in floats, and attends with another; "
  f"rule={'|'.join(RULES)} chooses what runs next."
)
# Options of `rj.infer.integer_model`, and of how two devices read with it.
_INTEGER = ("shadow", "prune", "scales", "hot")
_READING = ("devices", "rule")
# What has no effect, or none that is right, where two devices read.
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
  """The model with products of integers that --integer asks for."""
  folder, options = _options(text)
  made = {key: x for key, x in options.items() if key in _INTEGER}
  return rj.infer.integer_model(plain, folder, **made)


def reading(values: flags.FlagValues) -> dict[str, Any]:
  """`devices` and `rule` of `read_on_two`, or nothing where one device reads.

  Raises:
    OptionError: Fewer devices, or flags that do not go together with it.
  """
  asked = two_asked(values)
  if not asked:
    return {}
  devices = jax.devices()
  if len(devices) < 2:
    raise OptionError(
      "--integer",
      f"devices=2 with {len(devices)} device",
      "two devices",
      "pass --devices=2 on CPUs, or leave devices= out",
    )
  return asked | {"devices": tuple(devices[:2])}


def two_asked(values: flags.FlagValues) -> dict[str, Any]:
  """What --integer says of two devices; nothing where one device reads."""
  if values.integer is None:
    return {}
  _, options = _options(values.integer)
  asked = {key: x for key, x in options.items() if key in _READING}
  count = asked.pop("devices", 1)
  if count not in (1, 2) or isinstance(count, bool):
    raise OptionError(
      "--integer", f"devices={count}", "1 or 2", "leave it out, or pass 2"
    )
  if asked and count == 1:
    raise prompts.clash("--integer with rule= and without devices=2", "both")
  if "rule" in asked:
    one_of("--integer: rule", asked["rule"], RULES)
  if count == 1:
    return {}
  for name in _NOT_ON_TWO:
    if name in values and values[name].present:
      raise prompts.clash(f"--{name} and --integer with devices=2", "one")
  if (values["num_processes"].value or 1) > 1:
    raise prompts.clash("--num_processes and devices=2", "one process")
  return {"rule": asked.get("rule", RULES[0])}


def _options(text: str) -> tuple[str, dict[str, Any]]:
  """The folder of --integer, and its options."""
  folder, colon, rest = text.partition(":")
  said = option_text.pairs(
    rest if colon else None, (*_INTEGER, *_READING), "--integer", folder
  )
  return folder, {key: option_text.value(one) for key, one in said.items()}
