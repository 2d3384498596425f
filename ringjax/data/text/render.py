"""Renders chat templates with Jinja, in a sandbox.

Guarantees: a template gives the text of transformers, or an error. It can
read the values that it is passed and write text; it loads no file, calls no
Python functions, and changes no value. It can still run long and grow large:
therefore this file imports the standard library and jinja2 only, so that a
separate process, with limits, can run it (chat.py).
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jinja2.sandbox import ImmutableSandboxedEnvironment

OUTPUT_CHARS = 4_000_000
# Variables whose texts are written around the body of {% generation %}.
GENERATION_VARIABLES = "ringjax_generation_start", "ringjax_generation_end"
_RANGE = 10_000
# Number of templates that are kept compiled.
_TEMPLATES = 16


def render(
  source: str, variants: list[dict[str, Any]], now: str, room: int
) -> dict[str, Any]:
  """Renders a template once for each set of variables.

  Args:
    source: Source of the template.
    variants: Sets of variables.
    now: Time that the template may write, in ISO form.
    room: Largest number of characters that it may write.

  Returns:
    "texts", one per variant: a str, or {"error": reason}; "literals": the
    texts in the template itself. Or only "error", if `source` is not a
    template.
  """
  import jinja2

  try:
    template, literals = _compiled(source)
  except jinja2.TemplateSyntaxError as error:
    return {"error": f"line {error.lineno}: {error.message}"}
  except Exception as error:
    return {"error": _said(error)}

  def strftime_now(form: str) -> str:
    return datetime.datetime.fromisoformat(now).strftime(form)

  texts = [
    _one(template, {"strftime_now": strftime_now, **variables}, room)
    for variables in variants
  ]
  return {"texts": texts, "literals": literals}


@functools.lru_cache(_TEMPLATES)
def _compiled(source: str) -> tuple[Any, list[str]]:
  """A compiled template, and the texts in it."""
  environment = _environment()
  return environment.from_string(source), _literals(environment, source)


def _one(template: Any, variables: dict[str, Any], room: int) -> Any:
  pieces, length = [], 0
  try:
    for piece in template.generate(**variables):
      length += len(piece)
      if length > room:
        return {"error": f"more than {room} characters of output"}
      pieces.append(piece)
  except Exception as error:
    return {"error": _said(error)}
  return "".join(pieces)


def _said(error: Exception) -> str:
  return f"{type(error).__name__}: {error}"[:300]


def _literals(environment: Any, source: str) -> list[str]:
  from jinja2 import nodes

  tree = environment.parse(source)
  literals = {node.data for node in tree.find_all(nodes.TemplateData)}
  consts = (node.value for node in tree.find_all(nodes.Const))
  literals |= {value for value in consts if isinstance(value, str)}
  return sorted(literals)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
  import jinja2
  import jinja2.ext
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  class Generation(jinja2.ext.Extension):
    """{% generation %}: the text of an assistant, between two variables.

    The variables are `GENERATION_VARIABLES`, and undefined unless a caller
    looks for these texts.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
      start, end = (
        jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line)
        for name in GENERATION_VARIABLES
      )
      return [start, jinja2.nodes.Scope(body, lineno=line), end]

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def tojson(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      x,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def short_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _RANGE:
      raise OverflowError(f"a range of more than {_RANGE}")
    return numbers

  class SafeNamespace(jinja2.utils.Namespace):
    """A namespace without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
      namespace, values = args[0], dict(*args[1:], **kwargs)
      for name in values:
        SafeNamespace._check(name)
      jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: object) -> None:
      SafeNamespace._check(name)
      jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: object) -> None:
      if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r}")

  def table(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)

  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = tojson
  for name in ("lipsum", "cycler", "joiner"):
    del environment.globals[name]
  variables: dict[str, Any] = environment.globals
  variables["range"] = short_range
  variables["dict"] = table
  variables["namespace"] = SafeNamespace
  variables["raise_exception"] = raise_exception
  return environment
