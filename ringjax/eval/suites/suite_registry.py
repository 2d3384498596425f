"""Suites by name, and templates from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ringjax.errors import DataError
from ringjax.eval.suites.helmet import Helmet
from ringjax.eval.suites.infinitebench import InfiniteBench
from ringjax.eval.suites.longbench import LongBench
from ringjax.eval.suites.mrcr import Mrcr
from ringjax.eval.suites.nolima import NoLiMa
from ringjax.eval.suites.question import Suite, json_value
from ringjax.eval.suites.ruler import Ruler
from ringjax.option_text import named
from ringjax.paths import AnyPath

SUITES: dict[str, type[Suite]] = {
  "ruler": Ruler,
  "longbench": LongBench,
  "infinitebench": InfiniteBench,
  "nolima": NoLiMa,
  "mrcr": Mrcr,
  "helmet": Helmet,
}


def suite_of(
  text: object,
  *,
  templates: Mapping[str, str] | None = None,
  name: str = "suite",
) -> Suite:
  """Makes a suite by its name and options.

  Args:
    text: Text such as "ruler:path=DIR" or "nolima:path=DIR,lengths=(1000,)"; a
      `Suite` is returned as it is, but for templates.
    templates: Texts of messages by task, see `templates_of`.
    name: Name of the argument or flag, for errors.

  Raises:
    OptionError: If the name or an option is unknown, or does not fit.
  """
  suite = named(text, Suite, SUITES, name)
  if templates is None:
    return suite
  return dataclasses.replace(suite, templates=templates)


def templates_of(path: AnyPath) -> dict[str, str]:
  """Reads templates: a text for all tasks, or JSON {"task": "text"}.

  Raises:
    DataError: If the JSON has other values than texts.
  """
  text = path.read_text("utf-8")
  if path.suffix != ".json":
    return {"": text}
  templates = json_value(text, f"{path}")
  if not isinstance(templates, dict) or not all(
    isinstance(x, str) for x in templates.values()
  ):
    raise DataError(
      f"{path}",
      "other JSON",
      'an object {"task": "text with {context}"}',
      "write one, or a text file for all tasks",
    )
  return templates
