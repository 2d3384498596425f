"""Every field of a training config, for launch.train --help_config."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from ringjax.json_text import json_text
from ringjax.models import Rules
from ringjax.models.cepe import Encoder
from ringjax.models.longspec import LongSpecConfig
from ringjax.train import recipe
from ringjax.train.expert_balance import ExpertBalance
from ringjax.train.extend import RopeScaling
from ringjax.train.loop import LoopConfig
from ringjax.train.methods.draft_training import DraftTraining
from ringjax.train.methods.encoder_training import ContextSplit
from ringjax.train.methods.induction import INITIALISATIONS, InductionHeads
from ringjax.train.methods.lora import Lora
from ringjax.train.posttraining.preferences import LOSSES, Dpo
from ringjax.train.step import Objective

from . import sources

_REQUIRED = "required"


class Field(NamedTuple):
  """A field of a config.

  Fields:
    path: Path of the field in a flag, without "--config.".
    type: Type of its value.
    value: Current or default value as JSON; "required" without a default.
    text: Meaning of the field.
  """

  path: str
  type: str
  value: str
  text: str


def fields(config: ConfigDict, entries: str) -> Iterator[Field]:
  """Yields every field of a config, each followed by its sub-fields.

  Args:
    config: Config of `launch.train`.
    entries: Docstring of the entries that are not fields of a dataclass.
  """
  texts = _entry_texts(entries)
  for cls in (recipe.Recipe, Objective, LoopConfig):
    texts = _entry_texts(cls.__doc__) | texts
  config_entries = json.loads(config.to_json_best_effort())
  stages = config_entries.pop("stages", None) or [{}]
  mixture = config_entries.pop("sources", None) or [{}]
  for name, value in config_entries.items():
    kind = config.get_type(name).__name__.replace("ConfigDict", "dict")
    # Of a number, or a word in its place.
    kind = kind.replace("object", "int | str")
    kind += " | None" * (value is None)
    part = _PARTS.get(name)
    value_text = "see below" if part else json_text(value)
    yield Field(name, kind, value_text, texts.get(name, ""))
    if name == "start":
      names = ", ".join(INITIALISATIONS)
      yield Field(
        "start.kind", "str", json_text(value.get("kind")), f"{names} or null"
      )
      part = INITIALISATIONS.get(value.get("kind"), part)
    if name == "posttraining":
      yield Field(
        "posttraining.loss",
        "str",
        json_text(value.get("loss")),
        f"{', '.join(LOSSES)} or null",
      )
      part = LOSSES.get(value.get("loss"), part)
    if part:
      yield from _class_fields(name, part, value)
  for i, stage in enumerate(stages):
    at = f"stages[{i}]"
    scaling = stage.get("rope_scaling")
    yield from _class_fields(at, recipe.Stage, stage)
    yield from _class_fields(f"{at}.rope_scaling", RopeScaling, scaling or {})
    yield from _class_fields(
      f"{at}.context", ContextSplit, stage.get("context") or {}
    )
    yield Field(
      f"{at}.sources",
      "tuple",
      json_text(stage.get("sources")),
      "sources of this stage alone, in place of those of all stages",
    )
  for i, source in enumerate(mixture):
    at = f"sources[{i}]"
    yield Field(
      f"{at}.kind",
      "str",
      json_text(source.get("kind", _REQUIRED)),
      f"one of {', '.join(sources.KINDS)}; what each takes: "
      "launch/shared/sources.py",
    )
    weight = json_text(source.get("weight", 1.0))
    yield Field(f"{at}.weight", "float", weight, "share of the rows")
    for name in sorted(set(source) - {"kind", "weight"}):
      value = source[name]
      yield Field(
        f"{at}.{name}", type(value).__name__, json_text(value), "of this kind"
      )


_PARTS = {
  "optimizer": recipe.Optimizer,
  "posttraining": Dpo,
  "lora": Lora,
  "cepe": Encoder,
  "expert_balance": ExpertBalance,
  "draft": LongSpecConfig,
  "draft_training": DraftTraining,
  "rules": Rules,
  "start": InductionHeads,
}


def page(found: Iterator[Field]) -> str:
  """Fields as text, two lines for each."""
  lines = ["Fields of a training config (type, value), set by flags:", ""]
  for field in found:
    lines.append(f"--config.{field.path}  ({field.type}, {field.value})")
    lines.append(f"    {field.text}")
  return "\n".join(lines)


def changes(
  old: ConfigDict, new: ConfigDict, names: Iterable[str]
) -> list[str]:
  """Fields that differ: "optimizer.learning_rate 0.1 -> 0.2".

  Args:
    old: First config.
    new: Second config.
    names: Entries to compare, with their sub-fields.
  """
  values = [
    {field.path: field.value for field in fields(config, "")}
    for config in (old, new)
  ]
  changed = []
  for path in dict.fromkeys(
    path for config_values in values for path in config_values
  ):
    a, b = (config_values.get(path, "none") for config_values in values)
    if a != b and re.split(r"[.\[]", path)[0] in names:
      changed.append(path if len(a + b) > 60 else f"{path} {a} -> {b}")
  return changed


def _class_fields(
  path: str, cls: type, current: Mapping[str, Any]
) -> Iterator[Field]:
  texts = _entry_texts(cls.__doc__)
  for field in dataclasses.fields(cls):
    value = _REQUIRED
    if field.name in current:
      value = json_text(current[field.name])
    elif field.default is not dataclasses.MISSING:
      value = json_text(field.default)
    yield Field(
      f"{path}.{field.name}",
      str(field.type),
      value,
      texts.get(field.name, ""),
    )


def _entry_texts(docstring: str | None) -> dict[str, str]:
  """Parses the Attributes or Entries of a docstring: text by name."""
  texts: dict[str, str] = {}
  indent, name = -1, ""
  for line in (docstring or "").splitlines():
    depth = len(line) - len(line.lstrip())
    if line.strip() in ("Attributes:", "Entries:"):
      indent = depth + 2
    elif indent < 0 or not line.strip():
      indent = -1
    elif depth == indent and (match := re.match(r"\s*(\w+): (.*)", line)):
      name = match[1]
      texts[name] = match[2]
    elif depth > indent:
      texts[name] += f" {line.strip()}"
    else:
      indent = -1
  return texts
