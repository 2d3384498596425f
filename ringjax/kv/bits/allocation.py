"""Allocate bits to layers and KV heads under a byte budget, by measured loss.

Guarantees: the sum of the bytes is within the budget. The loss of a
choice is measured: a text is read with one layer's or head's keys and values
encoded and decoded, all others exact. Choices are combined as if these losses
added; the result reports both the predicted sum and the measured loss.
Cost: (units x candidates + candidates + 2) x texts calls of the model, where
units are the layers, the KV heads, or the keys and the values of each; with
`measure="kl"` each call is two.
Memory: that of a call without a cache.
Ref: Everett 1963, "Generalized Lagrange Multiplier Method for Solving Problems
of Optimum Allocation of Resources"; Shoham and Gersho 1988, "Efficient bit
allocation for an arbitrary set of quantizers".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

from ringjax.checks import local_path, one_of, token_rows
from ringjax.errors import (
  CheckpointFormatError,
  MeshError,
  OptionError,
)
from ringjax.kv import kind_text
from ringjax.kv.bits.allocation_units import (
  Unit,
  attention_layers,
  budget_bytes,
  choose,
  unit_bytes,
  units_of,
)
from ringjax.kv.bits.measured_losses import (
  PARTIAL_FILE,
  Losses,
  write_json,
)
from ringjax.kv.cache_kind import CacheConfig, LayoutConfig, cache_kind
from ringjax.kv.codecs import Calibrated, Calibration, Codec, PerHead
from ringjax.kv.codecs.head_codecs import BITS_FILE
from ringjax.kv.layer_spec import LayerCacheSpec, model_layers

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

CANDIDATES = ("hadamard4", "hadamard3", "hadamard2")
BY = ("layer", "head", "part")
MEASURES = ("loss", "kl")
_FORMAT = "ringjax-kv-bits-1"
_REMEDY = (
  "allocate again: python -m ringjax.launch.calibrate --model=DIR --bits=3.2"
)

# For each layer of the model the numbers of its KV heads' candidates.
Table = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
  """Codec of each KV head of each layer, with its size and loss.

  Attributes:
    model: Digest of the measured model.
    candidates: Cache kinds of the candidate codecs, as text.
    calibrations: Digests of the candidates' calibrations, or "".
    by: Unit that gets a codec: "layer", "head", or "part" (the keys or the
      values of a head).
    measure: Metric of the losses: "loss" or "kl".
    keys: For each layer of the model, candidate indices of its heads' keys.
    values: For each layer of the model, candidate indices of its heads' values.
    bytes_per_token: Stored bytes of a token in all layers.
    bits: Mean bits per scalar, scales included.
    exact: Loss without a cache, in nats per token.
    loss: Increase of the loss by this allocation, in nats per token.
    predicted: Cost by `measure` if the losses of all choices add.
    measured: Measured cost by `measure`.
    uniform: Bytes per token and loss of each candidate for all units.
    losses: For each unit, in order of layers and heads, the loss of each
      candidate, by `measure`.
    tokens: Number of tokens of the text.
    calls: Number of model calls.
    codecs: Codecs of the candidates.
    unrotated: Whether keys are encoded before their rotation.
    source: File that it was read from, or "".
  """

  model: str
  candidates: tuple[str, ...]
  calibrations: tuple[str, ...]
  by: str
  measure: str
  keys: Table
  values: Table
  bytes_per_token: int
  bits: float
  exact: float
  loss: float
  predicted: float
  measured: float
  uniform: tuple[tuple[int, float], ...]
  losses: tuple[tuple[float, ...], ...]
  tokens: int
  calls: int
  codecs: tuple[Codec, ...] = dataclasses.field(repr=False)
  unrotated: bool = False
  source: str = ""

  @property
  def kind(self) -> CacheConfig:
    """Cache kind with these codecs, for `generate` and `init_cache`."""
    pairs = sorted({
      pair
      for rows in zip(self.keys, self.values, strict=True)
      for pair in zip(*rows, strict=True)
    })  # fmt: skip
    pair_of_head = tuple(
      tuple(pairs.index(pair) for pair in zip(*rows, strict=True))
      for rows in zip(self.keys, self.values, strict=True)
    )
    codec = PerHead(
      codecs=tuple(_paired(self.codecs, *pair) for pair in pairs),
      which=pair_of_head,
      source=self.source,
      loss=self.loss,
    )
    return CacheConfig(
      layout=LayoutConfig(windowed=True, unrotated=self.unrotated), codec=codec
    )

  def __str__(self) -> str:
    """Format as a table: a row for each layer, a column for each KV head."""
    heads = max(map(len, self.keys))
    name = lambda n: self.candidates[n]

    def cell(k: int, v: int) -> str:
      return name(k) if k == v else f"{name(k)}/{name(v)}"

    rows = [("layer", *(f"head {n}" for n in range(heads)))]
    for n, pair in enumerate(zip(self.keys, self.values, strict=True)):
      cells = [cell(k, v) for k, v in zip(*pair, strict=True)]
      if cells:
        rows.append((str(n), *cells))
    widths = [
      max(len(row[i]) for row in rows if i < len(row)) for i in range(heads + 1)
    ]
    shown = [
      "  ".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=False)).rstrip()
      for row in rows
    ]
    return "\n".join(
      [
        *shown,
        f"{self.bits:.2f} bits a number, {self.bytes_per_token:,} bytes a "
        "token",
        f"loss {self.loss:+.5f} nats a token, on {self.tokens:,} tokens in "
        f"{self.calls:,} calls",
        f"by {self.measure}: {self.measured:+.5f} measured, "
        f"{self.predicted:+.5f} if what single choices cost is added",
        *(
          f"all {self.candidates[n]}: {size:,} bytes a token, loss {loss:+.5f}"
          for n, (size, loss) in enumerate(self.uniform)
        ),
      ]
    )

  def record(self) -> dict[str, Any]:
    """Fields as JSON, without those derived from others."""
    derived = ("codecs", "source")
    names = [x.name for x in dataclasses.fields(self) if x.name not in derived]
    return {"format": _FORMAT, **{name: getattr(self, name) for name in names}}

  def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
    """Save to a file, or to a folder as kv_bits.json; return the path.

    Raises:
      OptionError: If the text of a candidate does not name its codec.
    """
    for text, codec in zip(self.candidates, self.codecs, strict=True):
      if _named(text) != _uncalibrated(codec):
        raise OptionError(
          "candidates",
          f"{text}, which no name says"[:160],
          "kinds by their names, for a file says names",
          "pass candidates=('hadamard4', 'int4:group=32'), for instance",
        )
    file = pathlib.Path(local_path("path", path))
    if file.suffix != ".json":
      file = file / BITS_FILE
    write_json(file, self.record())
    return file

  @classmethod
  def load(cls, path: str | os.PathLike[str], model: Transformer) -> Allocation:
    """Read the allocation of a model from a file.

    Args:
      path: File, or folder with kv_bits.json. Calibrations of the candidates
        are read from the same folder.
      model: `Transformer` that was measured.

    Raises:
      CheckpointFormatError: If the file is missing or not an allocation.
      OptionError: If the model or a calibration differs.
    """
    file = pathlib.Path(local_path("path", path))
    if file.is_dir():
      file = file / BITS_FILE
    body = _read(file)
    model_digest = model.digest
    if body["model"] != model_digest:
      raise OptionError(
        "table",
        f"{file}, of a model of digest {body['model']}",
        f"that of this model, {model_digest}",
        _REMEDY,
      )
    try:
      codecs = []
      for text, digest in zip(
        body["candidates"], body["calibrations"], strict=True
      ):
        kind = kind_text.parse(text, "candidates")
        if digest:
          kind = kind.with_options({"calibration": str(file.parent)})
        codec: Any = model.cache_kind(kind).codec
        if digest and codec.calibration.digest != digest:
          raise OptionError(
            "calibration",
            f"one of digest {codec.calibration.digest} beside {file}",
            f"the one that {text} was measured with, {digest}",
            _REMEDY,
          )
        codecs.append(codec)
      allocation = cls(**body, codecs=tuple(codecs), source=str(file))
      # Check that the tables fit the candidates and the model.
      codec = allocation.kind.codec
      assert isinstance(codec, PerHead)
      for shape in attention_layers(model):
        codec.table(shape)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
      if isinstance(error, OptionError) and "calibration" in str(error):
        raise
      raise CheckpointFormatError(
        f"{file}", f"{error}"[:160], "what allocate_bits wrote", _REMEDY
      ) from None
    return allocation


def allocate_bits(
  model: Transformer,
  tokens: Int[np.ndarray, "N T"],
  *,
  bits: int | float | None = None,
  bytes_per_token: int | float | None = None,
  candidates: Sequence[Any] = CANDIDATES,
  by: str = "head",
  measure: str = "loss",
  folder: str | os.PathLike[str] | None = None,
  progress: Callable[[int, int], Any] | None = None,
) -> Allocation:
  """Choose a codec for each KV head of each layer under a byte budget.

  Each choice is measured alone on the text, and the losses are assumed to add.
  Bytes go where each saves the most loss: steps on the lower convex hulls of
  (bytes, loss), the steepest first; the rest goes to the best single exchanges.

  Args:
    model: A `Transformer`, on one device or a mesh.
    tokens: Token ids of texts, int32 [N, T]; on a mesh T is a multiple of the
      shards.
    bits: Budget as mean bits per scalar, scales included.
    bytes_per_token: Budget as bytes of a token in all layers; excludes `bits`.
    candidates: Cache kinds by name, with options as in a flag
      ("int4:group=32,keys.bits=8"), or as `CacheConfig`, each with a codec.
    by: Unit that gets a codec: "layer", "head", or "part" (the keys or the
      values of a head).
    measure: Metric: "loss", the increase of the negative log-likelihood; or
      "kl", the Kullback-Leibler divergence of the predictions, which is never
      negative and varies less with the text.
    folder: Folder for measurements, so that a killed run resumes, and for
      kv_bits.json at the end.
    progress: Callback, called with the number of finished model calls and of
      all.

  Returns:
    The allocation; its `kind` is the cache kind to use.

  Raises:
    OptionError: If the budget is missing or below the cheapest candidate, or
      candidates are incompatible.
    ShapeError: If `tokens` are not [N, T].
    ConfigError: If the model has no keys and values.
    MeshError: If there are several processes.
  """
  ids = token_rows(tokens, 2)
  one_of("by", by, BY)
  one_of("measure", measure, MEASURES)
  if jax.process_count() > 1:
    raise MeshError(
      "processes",
      jax.process_count(),
      "one, whose devices hold the model",
      "allocate in one process; the file serves any number of them",
    )
  names, kinds = _candidates(model, candidates)
  codecs: tuple[Any, ...] = tuple(kind.codec for kind in kinds)
  calibrations = tuple(map(_calibration, codecs))
  if by == "part":
    for n in range(len(codecs)):
      _paired(codecs, n, 0)
  shapes = attention_layers(model)
  units = units_of(shapes, by)
  sizes = [[unit_bytes(u, codec, shapes) for codec in codecs] for u in units]
  budget = budget_bytes(bits, bytes_per_token, shapes, sizes, names)
  inputs = hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes())
  fingerprint = (model.digest, ids.shape, names, calibrations, by, measure)
  inputs.update(f"{fingerprint}".encode())
  meter = Losses(model, ids, kinds, measure, inputs.hexdigest()[:16], folder)
  meter.total = (len(units) * len(codecs) + len(codecs) + 2) * len(ids)
  meter.progress = progress

  exact = meter.loss([])[0]
  losses = []
  for unit in units:
    row = [meter.loss([(unit, n)]) for n in range(len(codecs))]
    losses.append(tuple(x[measure == "kl"] for x in row))
  uniform = [
    (
      sum(size[n] for size in sizes),
      meter.loss([(unit, n) for unit in units])[0],
    )
    for n in range(len(codecs))
  ]
  base = exact if measure == "loss" else 0.0
  losses = [tuple(x - base for x in row) for row in losses]
  choice = choose(sizes, losses, budget)
  pairs = [*zip(units, choice, strict=True)]
  final = meter.loss(pairs)
  keys, values = _tables(model, shapes, pairs)
  nbytes = sum(size[n] for size, n in zip(sizes, choice, strict=True))
  numbers = sum(shape.numbers() for shape in shapes)
  allocation = Allocation(
    model=model.digest,
    candidates=names,
    calibrations=calibrations,
    by=by,
    measure=measure,
    keys=keys,
    values=values,
    bytes_per_token=nbytes,
    bits=8 * nbytes / numbers,
    exact=exact,
    loss=final[0] - exact,
    predicted=sum(row[n] for row, n in zip(losses, choice, strict=True)),
    measured=final[measure == "kl"] - base,
    uniform=tuple((size, loss - exact) for size, loss in uniform),
    losses=tuple(losses),
    tokens=ids.size,
    calls=meter.total,
    codecs=codecs,
    unrotated=kinds[0].layout.unrotated,
  )
  if folder is not None:
    allocation = dataclasses.replace(
      allocation, source=str(allocation.save(folder))
    )
    (pathlib.Path(folder) / PARTIAL_FILE).unlink(missing_ok=True)
  return allocation


# ---------------------------------------------------------------------------
# Candidates
# ---------------------------------------------------------------------------


def _candidates(
  model: Transformer, given: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[CacheConfig, ...]]:
  """Names and cache kinds of the candidates, for this model."""
  if isinstance(given, str) or not given:
    raise OptionError(
      "candidates",
      repr(given),
      "two kinds of caches or more",
      f"pass candidates={CANDIDATES}",
    )
  names, kinds = [], []
  for candidate in given:
    named = isinstance(candidate, str)
    kind = (
      kind_text.parse(candidate, "candidates")
      if named
      else cache_kind(candidate)
    )
    kind = model.cache_kind(kind).reading_all("a candidate")
    if not isinstance(kind.codec, Codec):
      raise OptionError(
        "candidates",
        f"{kind}",
        "kinds with one codec",
        "use bfloat16 or int8 for heads that are to lose little",
      )
    plain = _uncalibrated(kind.codec)
    kind = CacheConfig(
      layout=LayoutConfig(windowed=True, unrotated=kind.layout.unrotated),
      codec=kind.codec,
    )
    # Keep the text as given, but without the path of a calibration.
    keeps_text = named and plain == kind.codec
    text = (
      candidate if keeps_text else str(dataclasses.replace(kind, codec=plain))
    )
    names.append(text)
    kinds.append(kind)
  if len({kind.codec for kind in kinds}) < len(kinds):
    raise OptionError(
      "candidates", ", ".join(names), "each once", "leave the others out"
    )
  if len({kind.layout.unrotated for kind in kinds}) > 1:
    raise OptionError(
      "candidates",
      ", ".join(names),
      "kinds that all store keys before their rotation, or none",
      "take code books (nuq) apart from others, or pass unrotated=True to all",
    )
  return tuple(names), tuple(kinds)


def _calibration(codec: Codec) -> str:
  """Digest of a codec's calibration; "" if it needs no calibration."""
  if not isinstance(codec, Calibrated):
    return ""
  if isinstance(codec.calibration, Calibration):
    return codec.calibration.digest
  raise OptionError(
    "candidates",
    "code books without a calibration",
    "the calibration of this model",
    "pass 'nuq3:calibration=DIR'; to make one: "
    "python -m ringjax.launch.calibrate",
  )


def _uncalibrated(codec: Codec) -> Codec:
  """Codec without its calibration."""
  if not isinstance(codec, Calibrated):
    return codec
  return dataclasses.replace(codec, calibration=None)


def _named(text: str) -> Any:
  """Codec that a text names, or None."""
  try:
    return kind_text.parse(text, "candidates").codec
  except OptionError:
    return None


def _paired(codecs: Sequence[Codec], keys: int, values: int) -> Codec:
  """Combine the key codec of one candidate with the value codec of another."""
  a, b = codecs[keys], codecs[values]
  if keys == values:
    return a
  pairs_up = dataclasses.replace(a, keys=b.keys, values=b.values) == b
  if type(a) is not type(b) or not pairs_up:
    raise OptionError(
      "candidates",
      f"{type(a).__name__} and {type(b).__name__}, by part",
      "codecs of one class and calibration, to pair keys with values",
      "pass by='head', or candidates that go together",
    )
  return dataclasses.replace(a, values=b.values)


def _tables(
  model: Transformer,
  shapes: Sequence[LayerCacheSpec],
  pairs: Sequence[tuple[Unit, int]],
) -> tuple[Table, Table]:
  """Candidates of each layer's heads, for keys and for values."""
  layers = model_layers(model.kinds)
  heads = {n: shape.heads for shape in shapes for n in shape.which}
  choices = {
    part: [[0] * heads.get(n, 0) for n in range(layers)]
    for part in ("keys", "values")
  }
  for unit, n in pairs:
    for part in unit.parts:
      for head in unit.heads:
        choices[part][unit.layer][head] = n
  # Values that are part of the keys use the codec of the keys.
  for shape in shapes:
    if not shape.value:
      for n in shape.which:
        choices["values"][n] = choices["keys"][n]
  tables = (tuple(map(tuple, choices[part])) for part in ("keys", "values"))
  keys, values = tables
  return keys, values


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def _read(path: pathlib.Path) -> dict[str, Any]:
  """Read the fields of a file, lists as tuples.

  Raises:
    CheckpointFormatError: If the file is missing or not an allocation.
  """

  def frozen(x: Any) -> Any:
    return tuple(map(frozen, x)) if isinstance(x, list) else x

  try:
    body = json.loads(path.read_text("utf-8"))
    if not isinstance(body, dict) or body.pop("format", None) != _FORMAT:
      raise ValueError(f"no file of format {_FORMAT}")
    names = {x.name for x in dataclasses.fields(Allocation)}
    if body.keys() != names - {"codecs", "source"}:
      raise ValueError("other fields than an allocation's")
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointFormatError(
      f"{path}", f"{error}"[:160], "what allocate_bits wrote", _REMEDY
    ) from None
  return {name: frozen(x) for name, x in body.items()}
