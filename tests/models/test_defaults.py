"""A config without a key means what it means to transformers.

`tests/fixtures/defaults.json` holds facts about transformers, by
`tests/fixtures/defaults.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from ringjax import models
from ringjax.errors import ConfigError
from tests import checkpoints

FILE = checkpoints.MODELS.parent / "defaults.json"


def read_facts():
  """The facts by fixture, way and key."""
  table = {}
  for line, facts in json.loads(FILE.read_text("utf-8")).items():
    name, _, way = line.rpartition(" ")
    errors = dict.fromkeys(facts.pop("error"), "error")
    same = {path: {"fills": {}} for path in facts.pop("same")}
    table.setdefault(name, {})[way] = errors | same | facts
  return table


FACTS = read_facts()
# Fixtures without facts: transformers builds their vision towers with timm and
# torchvision, which an oracle may lack. Their text models have facts.
NO_FACTS = {"fast_vlm", "gemma3n_vl", "perception_lm"}


def spelt(name):
  """A fixture's config, whose name may say the older spelling."""
  name, _, spelling = name.partition(" ")
  return checkpoints.config(name, spelling or "v5")


def replaced(config, values):
  """The config with values by their paths; "gone" removes one."""
  config = copy.deepcopy(config)
  for path, value in values.items():
    *parts, key = path.split(".")
    part = config
    for name in parts:
      if not isinstance(part.get(name), dict):
        part[name] = {}
      part = part[name]
    if value == "gone":
      part.pop(key, None)
    else:
      part[key] = value
  return config


def parsed(config):
  """What a config computes, or the error.

  How far the file says that a model may be used computes nothing.
  """
  try:
    model, _ = models.read_config(config)
  except ConfigError as error:
    return str(error)
  if model.positions is None:
    model = dataclasses.replace(model, max_positions=1, bound=None)
  return model


def deviates(name, way, path, fact):
  """What differs where a key is missing or null; "" if nothing does."""
  whole = spelt(name)
  # The fixture in the spelling in which transformers says what it fills in.
  newer = checkpoints.config(name.partition(" ")[0])
  filled = {k: v for k, v in fact["fills"].items() if v is not None}
  missing, null = (
    parsed(replaced(whole, {path: value})) for value in ("gone", None)
  )
  right, explicit = parsed(whole), parsed(replaced(newer, filled))
  ours, computes = missing if way == "missing" else null, fact.get("computes")
  if isinstance(ours, str):
    # Refused: by the key, or as the filled value is beside the other keys.
    keys = {x.split(".")[-1] for x in (path, *fact["fills"])}
    keys |= {"rope_parameters"} if path == "rope_scaling" else set()
    return "" if ours == explicit or any(x in ours for x in keys) else ours
  if filled and ours == explicit:
    return ""
  if not fact["fills"] or computes == "same":
    return "" if ours == right else "wanted the meaning of the whole file"
  without = FACTS[name]["missing"][path]
  without = {} if without == "error" else without["fills"]
  if way == "null" and without == fact["fills"]:
    return "" if ours == missing else "wanted the meaning without the key"
  if computes is None or filled:
    return f"wanted {fact['fills']}"
  # Transformers has null, which means something else than what the file said.
  if way == "missing":
    return "" if ours == null else "wanted the meaning of null"
  if ours == right and computes != "missing":
    return "wanted another meaning than that of the whole file"
  if without.get(path, "gone") not in (0, "gone") and ours == missing:
    return f"wanted another meaning than that of {without[path]}"
  return ""


def deviations(name):
  """Each key and way whose meaning is another one than transformers'."""
  assert not isinstance(parsed(spelt(name)), str)
  for way, facts in FACTS[name].items():
    for path, fact in facts.items():
      if fact != "error" and (fault := deviates(name, way, path, fact)):
        yield way, path, fact, fault


def test_every_fixture_has_facts_in_each_spelling():
  """Else: python tests/fixtures/defaults.py NAME, with transformers."""
  names = {*checkpoints.names(), *checkpoints.image_names()} - NO_FACTS
  older = {
    f"{name} v4"
    for name in names
    if (checkpoints.home(name) / "config_v4.json").exists()
  }
  assert {*FACTS} == names | older


@pytest.mark.long_cases(30)
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.long] * (n % 4 > 0))
    for n, name in enumerate(sorted(FACTS))
  ],
)
def test_a_key_that_is_not_there(name):
  assert not list(deviations(name))
