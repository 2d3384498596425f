"""Requests as plain JSON, between the processes of a cluster or of an engine.

Guarantees: decoding gives back an equal request, or raises `OptionError`; all
values are checked again by `Request` at the receiver. A mask is sent as its
grammar; other functions are refused.
"""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from ringjax.errors import OptionError
from ringjax.infer.stopping import Stop
from ringjax.serve.api.grammar import GrammarCompiler, GrammarMask
from ringjax.serve.request import Request
from ringjax.serve.row_sampler import RowSampling

# Fields that are sent unchanged.
_PLAIN = (
  "max_new_tokens",
  "n",
  "best_of",
  "beams",
  "length_penalty",
  "logprobs",
  "tempered",
  "priority",
  "salt",
  "adapter",
  "share",
)


def request_fields(
  request: Request, prompt: Int[np.ndarray, " n"]
) -> dict[str, Any]:
  """Encode a request as JSON.

  Args:
    request: Request; its deadline is not sent, the sender enforces it.
    prompt: Checked token ids of its prompt, int32 [n].

  Raises:
    OptionError: If its mask is a function, which no other process has.
  """
  if request.mask is not None and not isinstance(request.mask, GrammarMask):
    raise OptionError(
      "mask",
      "a function",
      "no mask, or that of a grammar: functions stay in their process",
      "ask one engine, or pass a schema or a regular expression",
    )
  stop = request.stops
  data = np.ascontiguousarray(prompt, "<i4").tobytes()
  return {
    **{name: getattr(request, name) for name in _PLAIN},
    "prompt": base64.b64encode(data).decode(),
    "sampling": dataclasses.asdict(request.sampling),
    "stop": dataclasses.asdict(stop),
    "grammar": None if request.mask is None else request.mask.grammar,
    "begun": [list(tokens) for tokens in request.begun],
  }


def request_of(
  fields: dict[str, Any], grammars: GrammarCompiler | None
) -> Request:
  """Decode a request from the JSON of `request_fields`.

  Args:
    fields: JSON object.
    grammars: Grammar compiler of the engine; None if it has no tokenizer.

  Raises:
    OptionError: If a grammar has no tokenizer, or values are out of range.
    KeyError, TypeError, ValueError: If the object is malformed.
  """
  stop = fields["stop"]
  texts = {name: tuple(stop[name]) for name in ("ids", "strings")}
  sampling = dict(fields["sampling"])
  sampling["logit_bias"] = {int(i): x for i, x in sampling["logit_bias"]}
  grammar, plain = fields["grammar"], {name: fields[name] for name in _PLAIN}
  data = base64.b64decode(fields["prompt"], validate=True)
  request = Request(
    prompt=np.frombuffer(data, "<i4").astype(np.int32),
    sampling=RowSampling(**sampling),
    stop=Stop(**stop | texts),
    begun=tuple(tuple(tokens) for tokens in fields["begun"]),
    **plain,
  )
  if grammar is None:
    return request
  if grammars is None:
    raise OptionError(
      "grammar",
      "a grammar, for an engine without a tokenizer",
      "an engine that knows texts",
      "pass tokenizer= to the engine",
    )
  mask = grammars.compile(grammar, request.rows)
  return dataclasses.replace(request, mask=mask)
