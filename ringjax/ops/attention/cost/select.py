"""Choice of an attention call's strategy by predicted time.

Guarantees: the choice depends on shapes, mask, layout, mesh and `device_kind`
alone, so all processes of a run make the same. It never changes the result:
lossy wire formats are chosen only if asked for. Strategies that do not fit the
memory are never chosen.

`explain` prints the predictions by which `Auto` chooses:

  rj.explain((1, 2**20, 32, 128), (1, 2**20, 8, 128), shards=64,
             is_causal=True, machine="tpu-v5p")
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from ringjax.checks import one_of, positive_int
from ringjax.errors import (
  InputTypeError,
  MeshError,
  OptionError,
  ShapeError,
)
from ringjax.ops.attention.cost.call_shape import CallShape, Prediction, Refusal
from ringjax.ops.attention.kernels.auto_kernel import expected
from ringjax.ops.attention.strategies import registry
from ringjax.ops.attention.strategies.wire_format import WireLike
from ringjax.ops.mask import Causal, Everything, Mask
from ringjax.parallel import chips
from ringjax.parallel.call_sharding import SEQ, sharding_of
from ringjax.parallel.chips import Machine
from ringjax.parallel.collectives import names as names_of
from ringjax.parallel.layout import LAYOUTS, Contiguous, Layout, Striped

# An operand of a call: an array, or just its type or shape.
Operand = (
  Shaped[Array | np.ndarray | jax.ShapeDtypeStruct, " ..."] | tuple[int, ...]
)
_SHOWN = 12


def candidates(
  call: CallShape, among: Sequence[str] | None = None
) -> list[tuple[str, Layout, dict[str, Any]]]:
  """List all (strategy, layout, options) that are considered for a call.

  Args:
    call: Shapes, mask and mesh axes of the call. Without a layout all of
      `LAYOUTS` are tried.
    among: Names of strategies; default all.

  Returns:
    Candidates, also those that `registry.predict` then refuses. The options
    are `inner`, the devices of a group, and `wire`.

  Raises:
    OptionError: If no strategy has a name of `among`.
  """
  for name in among or ():
    one_of("among", name, registry.STRATEGIES)
  layouts = LAYOUTS.values() if call.layout is None else (call.layout,)
  size = call.shards
  if len(call.axes) == 2:
    inners = [call.axes[1][1]] if 1 < call.axes[1][1] < size else []
  else:
    inners = [n for n in range(2, size // 2 + 1) if size % n == 0]
  combinations = []
  # On one device nothing has to move, and the ring moves nothing there.
  for name in registry.STRATEGIES if size > 1 else ("ring",):
    if among is not None and name not in among:
      continue
    coded = call.wire is not None and name in registry.WIRED and size > 1
    combinations += [
      (name, layout, {"inner": inner, "wire": wire})
      for inner in (inners if name in registry.GROUPED else [None])
      for wire in ((None, call.wire) if coded else (None,))
      for layout in layouts
    ]
  return combinations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """Predictions for a call on a machine, fastest first.

  Attributes:
    call: Shapes, mask and mesh axes of the call.
    machine: Machine that runs it.
    predictions: Predictions of the candidates that serve the call, sorted by
      seconds.
    refusals: Refusals of the other candidates.
  """

  call: CallShape
  machine: Machine
  predictions: tuple[Prediction, ...]
  refusals: tuple[Refusal, ...]

  @property
  def best(self) -> Prediction:
    """The fastest prediction.

    Raises:
      OptionError: If no candidate serves the call.
    """
    if not self.predictions:
      raise OptionError(
        "strategy",
        "'auto' for a call that no strategy fits",
        f"less than {_nbytes(_memory(self.machine))} a device",
        f"use more devices ({self.refusals[0].reason})"
        if self.refusals
        else "allow more strategies",
      )
    return self.predictions[0]

  @property
  def ways(self) -> dict[str, Prediction]:
    """Fastest prediction of each strategy with its options, by name, sorted."""
    fastest: dict[str, Prediction] = {}
    for prediction in self.predictions:
      fastest.setdefault(_name(prediction), prediction)
    return fastest

  @property
  def title(self) -> str:
    """Summary of the call and the machine."""
    call = self.call
    tokens = f"{call.queries:,}"
    if call.keys != call.queries:
      tokens += f" queries over {call.keys:,}"
    axes = " x ".join(f"{size} ({name})" for name, size in call.axes)
    return (
      f"{tokens} tokens, batch {call.batch}, {call.heads} heads over "
      f"{call.kv_heads} of {call.head_dim}, {call.dtype}, {call.mask}, on "
      f"{axes} {self.machine.name}, {call.local}"
    )

  def of(self, strategy: str, **options: Any) -> Prediction:
    """Return the fastest prediction of a strategy with these options.

    Raises:
      OptionError: If there is no such prediction.
    """
    for prediction in self.predictions:
      if prediction.strategy == strategy and all(
        prediction.options.get(k) == v for k, v in options.items()
      ):
        return prediction
    declined = [r.reason for r in self.refusals if r.strategy == strategy]
    raise OptionError(
      "strategy",
      f"{strategy!r} {options or ''}",
      "one that was predicted",
      declined[0] if declined else "see predictions",
    )

  def record(self) -> dict[str, Any]:
    """Return plain values for JSON."""
    call = vars(self.call) | {"axes": dict(self.call.axes)}
    call |= {"mask": repr(self.call.mask), "layout": repr(self.call.layout)}
    return {
      "call": call,
      "machine": self.machine.name,
      "predictions": [prediction.record() for prediction in self.predictions],
      "refusals": [refusal.record() for refusal in self.refusals],
    }

  def print(self) -> None:
    """Print the table."""
    print(self)

  def __str__(self) -> str:
    lines = [self.title, ""]
    fastest = self.ways
    lines.append(
      f"{'':3}{'strategy':<24}{'layout':<12}{'forward':>10}{'backward':>11}"
      f"{'both':>11}{'memory':>10}{'busy':>6}  sent"
    )
    shown = list(fastest.values())[:_SHOWN]
    for n, prediction in enumerate(shown):
      sent = ", ".join(
        f"{name} {_nbytes(b)}" for name, b in prediction.bytes_by_link.items()
      )
      lines.append(
        f"{n + 1:>2} {_name(prediction):<24}{_layout(prediction.layout):<12}"
        f"{_ms(prediction.forward_s):>10}{_ms(prediction.backward_s):>11}"
        f"{_ms(prediction.seconds):>11}{_nbytes(prediction.memory_bytes):>10}"
        f"{100 * prediction.busy:>4.0f} %  {sent or 'nothing'}"
        + "".join(f"; {note}" for note in prediction.notes)
      )
    if len(fastest) > len(shown):
      lines.append(f"   and {len(fastest) - len(shown)} slower ones")
    if self.call.layout is None and self.predictions:
      lines.append("   each in the layout that is best for it")
    if self.refusals:
      lines += ["", "declined"]
      reasons = dict.fromkeys(f"{_name(r)}: {r.reason}" for r in self.refusals)
      lines += [f"   {reason}" for reason in reasons]
    return "\n".join(lines)


def rank(
  call: CallShape, machine: Machine, among: Sequence[str] | None = None
) -> Explanation:
  """Predict the time of every candidate; the fastest comes first.

  Equals stay in the order of `registry.STRATEGIES`, the plainer one first.

  Args:
    call: Shapes, mask and mesh axes of the call.
    machine: Machine that runs it; a candidate may fill `memory_share` of its
      memory.
    among: Names of strategies; default all.
  """
  among = None if among is None else tuple(among)
  try:
    hash((call, machine))
  except TypeError:
    return _rank(call, machine, among)
  return _ranked(call, machine, among)


def _rank(
  call: CallShape, machine: Machine, among: tuple[str, ...] | None
) -> Explanation:
  max_bytes = _memory(machine)
  predictions, refusals = [], []
  for strategy, layout, options in candidates(call, among):
    result = registry.predict(strategy, call, machine, layout, **options)
    if isinstance(result, Prediction) and result.memory_bytes > max_bytes:
      result = Refusal(
        strategy=strategy,
        options=_identifying_options(result.options),
        reason=(
          f"needs {_nbytes(result.memory_bytes)} a device; "
          f"{100 * machine.memory_share:g} % of {machine.chip.name}'s are "
          f"{_nbytes(max_bytes)}"
        ),
      )
    (refusals if isinstance(result, Refusal) else predictions).append(result)
  # Digits beyond these differ with the order in which sums are taken.
  predictions.sort(key=lambda p: float(f"{p.seconds:.9e}"))
  return Explanation(
    call=call,
    machine=machine,
    predictions=tuple(predictions),
    refusals=tuple(refusals),
  )


_ranked = functools.lru_cache(maxsize=128)(_rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
  """Chooses the strategy of each call by the cost model.

  Attributes:
    machine: A `Machine` or its name; None: the machine of the mesh's devices,
      or of JAX's first.
    backward: Whether to count the backward pass too; None: as the call says.
    among: Names of the strategies to choose from; None: all.
    wire: Lossy format in which to also consider sending K and V: of `WIRES`, or
      an `rj.kv.Codec`.
    longest_document: Tokens of the longest document of packed data, if known.
    local: Local algorithm, of `chips.LOCALS`; None: as the call says.
  """

  machine: Machine | str | None = None
  backward: bool | None = None
  among: tuple[str, ...] | None = None
  wire: WireLike | None = None
  longest_document: int | None = None
  local: str | None = None

  def explain(
    self, call: CallShape, mesh: Mesh | AbstractMesh | None = None
  ) -> Explanation:
    """Predict the costs by which `choose` decides."""
    names = ("backward", "wire", "longest_document", "local")
    changes = {name: getattr(self, name) for name in names}
    changes["layout"] = call.layout or Contiguous()
    overrides = {name: x for name, x in changes.items() if x is not None}
    call = dataclasses.replace(call, **overrides)
    return rank(call, find_machine(self.machine, mesh), self.among)

  def choose(
    self, call: CallShape, mesh: Mesh | AbstractMesh | None = None
  ) -> tuple[str, dict[str, Any]]:
    """Choose the fastest strategy and the options to build it with.

    Args:
      call: Shapes, mask and mesh axes of the call; without a layout it is
        contiguous.
      mesh: Mesh that it runs on, if there is one.

    Returns:
      (name, options): the name of the strategy, and q_block and kv_block with
      inner and wire for the strategies that have them.

    Raises:
      OptionError: If no strategy fits the memory.
    """
    best = self.explain(call, mesh).best
    return best.strategy, dict(best.options)


def find_machine(
  machine: Machine | str | None, mesh: Mesh | AbstractMesh | None = None
) -> Machine:
  """Find the machine of a name, or of a mesh's devices, or of JAX's first.

  Raises:
    OptionError: If no machine has the name.
    InputTypeError: If it is neither a machine nor a name.
  """
  if isinstance(machine, Machine):
    return machine
  if isinstance(machine, str):
    return chips.machine(machine)
  if machine is not None:
    raise InputTypeError(
      "machine",
      type(machine).__name__,
      "a Machine, its name or None",
      f"pass e.g. machine='tpu-v5p', of {', '.join(chips.MACHINES)}",
    )
  devices = mesh.devices.flat if isinstance(mesh, Mesh) else jax.devices()
  device = devices[0]
  return chips.machine_of(device.device_kind, device.platform)


def explain(
  query: Operand,
  key: Operand,
  value: Operand | None = None,
  *,
  mesh: Mesh | AbstractMesh | None = None,
  axis: str | tuple[str, ...] | None = None,
  shards: int | Mapping[str, int] | None = None,
  layout: Layout | None = None,
  is_causal: bool = False,
  mask: Mask | None = None,
  dtype: DTypeLike | None = None,
  machine: Machine | str | None = None,
  backward: bool = True,
  offset: int = 0,
  wire: WireLike | None = None,
  longest_document: int | None = None,
  local: str | None = None,
  among: Sequence[str] | None = None,
  show: bool = True,
) -> Explanation:
  """Explain which strategy an attention call takes, and why.

  Nothing is computed, and no device is needed where `shards` and `machine`
  are given.

  Args:
    query: Queries [B, T, N, H], an array, a `jax.ShapeDtypeStruct` or a shape.
    key: Keys [B, S, K, H], of the whole sequence like the query.
    value: Values [B, S, K, J]; default as the key.
    mesh: Device mesh; default the operands', else the current one.
    axis: Mesh axis that shards the sequence, or two of them, groups of
      devices first; default the operands', else "seq".
    shards: Number of devices where there is no mesh, or a mapping from one axis
      or two to their sizes.
    layout: Order of the tokens on the shards; None tries all of `LAYOUTS`.
    is_causal: Whether a query only sees keys at and before its position.
    mask: Mask over coordinates, e.g. `Window(4096)`; with is_causal both hold.
    dtype: Dtype of operands that are given as shapes; default bfloat16.
    machine: A Machine or its name; default that of the mesh's devices, else of
      JAX's first.
    backward: Whether gradients are computed too.
    offset: Position of the first query.
    wire: Lossy format in which to also consider sending K and V: "int8",
      "float8_e4m3fn" or "bfloat16".
    longest_document: Tokens of the longest document of packed data, if known.
    local: Local algorithm, "blockwise" or "kernel"; default the one that
      `AutoKernel()` takes there.
    among: Names of the strategies to consider; default all.
    show: Whether to print the table.

  Returns:
    The predictions, sorted, and the refusals; its `str` is the table.

  Raises:
    RingjaxError: If operands, mesh or options do not fit.
  """
  value = key if value is None else value
  shapes = [_shape(n, x) for n, x in (("query", query), ("key", key),
                                      ("value", value))]  # fmt: skip
  (b, t, n, h), (kb, s, k, kh), (vb, vs, vk, j) = shapes
  if (kb, vb) != (b, b) or kh != h or (vs, vk) != (s, k):
    raise ShapeError(
      "query, key, value",
      " ".join(map(str, shapes)),
      "[B, T, N, H], [B, S, K, H] and [B, S, K, J]",
      "pass operands of one batch, one head dim and one number of keys",
    )
  axes, call_mesh, parts = _axes(query, key, mesh, axis, shards)
  b, n, k = (-(-x // size) for x, size in zip((b, n, k), parts, strict=True))
  call_mask = Everything() if mask is None else mask
  if not isinstance(call_mask, Mask):
    raise InputTypeError(
      "mask",
      type(mask).__name__,
      "a ringjax mask such as Window(4096)",
      "leave an array out: it bounds no tile",
    )
  if is_causal:
    call_mask = Causal() if mask is None else Causal() & call_mask
  operand_dtype = getattr(query, "dtype", None) if dtype is None else dtype
  local_option: dict[str, Any] = {} if local is None else {"local": local}
  call = CallShape(
    batch=b,
    queries=t,
    keys=s,
    heads=n,
    kv_heads=k,
    head_dim=h,
    value_dim=j,
    dtype="bfloat16"
    if operand_dtype is None
    else jax.numpy.dtype(operand_dtype).name,
    mask=call_mask,
    layout=layout,
    axes=axes,
    backward=backward,
    offset=offset,
    wire=wire,
    longest_document=longest_document,
    **local_option,
  )
  call_machine = find_machine(machine, call_mesh)
  declined: Sequence[tuple[str, str]] = ()
  if local is None:
    name = call_machine.name if call_machine.name in chips.MACHINES else None
    expected_local, declined = expected(call, call_machine.chip.platform, name)
    call = dataclasses.replace(call, local=expected_local)
  explanation = rank(call, call_machine, among)
  refusals = [
    Refusal(strategy=kernel, reason=reason) for kernel, reason in declined
  ]
  explanation = dataclasses.replace(
    explanation, refusals=(*explanation.refusals, *refusals)
  )
  if show:
    explanation.print()
  return explanation


def _shape(name: str, x: Operand) -> tuple[int, int, int, int]:
  shape = tuple(x) if isinstance(x, tuple | list) else getattr(x, "shape", None)
  if shape is None:
    raise InputTypeError(
      name,
      type(x).__name__,
      "an array, a jax.ShapeDtypeStruct or a shape",
      "pass e.g. (1, 8192, 32, 128)",
    )
  shape = (1, *shape) if len(shape) == 3 else shape
  if len(shape) != 4:
    raise ShapeError(name, shape, "four dimensions [B, T, N, H]", "reshape it")
  b, t, n, h = (positive_int(f"{name}'s shape", size) for size in shape)
  return b, t, n, h


def _axes(
  query: Operand,
  key: Operand,
  mesh: Mesh | AbstractMesh | None,
  axis: str | tuple[str, ...] | None,
  shards: int | Mapping[str, int] | None,
) -> tuple[tuple[tuple[str, int], ...], Any, tuple[int, int, int]]:
  """Return axes with sizes, mesh, and shards of batch, q heads and kv heads."""
  names = names_of(axis)
  if shards is not None:
    if mesh is not None:
      raise OptionError("shards", shards, "no mesh with it", "leave one out")
    if isinstance(shards, Mapping):
      return tuple(shards.items()), None, (1, 1, 1)
    name = (names or (SEQ,))[0]
    return ((name, positive_int("shards", shards)),), None, (1, 1, 1)
  (spec, operand_mesh), (key_spec, _) = _sharding(query), _sharding(key)
  context = jax.sharding.get_abstract_mesh()
  call_mesh = mesh if mesh is not None else operand_mesh
  if call_mesh is None and not context.empty:
    call_mesh = context
  if not isinstance(call_mesh, Mesh | AbstractMesh):
    raise MeshError(
      "mesh",
      "none" if call_mesh is None else type(call_mesh).__name__,
      "a mesh, or shards=",
      "pass over how many devices the sequence is sharded, e.g. shards=8",
    )
  if not names:
    names = spec[1] or ((SEQ,) if SEQ in call_mesh.axis_names else ())
  missing = [name for name in names if name not in call_mesh.axis_names]
  if not names or missing:
    raise MeshError(
      "axis",
      repr(missing[0]) if missing else "None",
      f"one of the mesh axes {call_mesh.axis_names}",
      "pass axis=, the name of the one that shards the sequence",
    )
  sizes = tuple((name, call_mesh.shape[name]) for name in names)
  parts = [
    math.prod(call_mesh.shape[a] for a in entry)
    for entry in (spec[0], spec[2], key_spec[2])
  ]
  return sizes, call_mesh, (parts[0], parts[1], parts[2])


def _sharding(x: Any) -> tuple[list[tuple[str, ...]], Any]:
  """Return the mesh axes of an operand's four dimensions, and its mesh."""
  no_axes: list[tuple[str, ...]] = [()] * 4
  mesh, spec = sharding_of(x) if hasattr(x, "sharding") else (None, None)
  if spec is None:
    return no_axes, mesh
  leading = no_axes[: 4 - len(x.shape)] if mesh is not None else []
  return [*leading, *spec, *no_axes][:4], mesh


# ---------------------------------------------------------------------------
# Text of the table
# ---------------------------------------------------------------------------


def _memory(machine: Machine) -> float:
  return machine.memory_share * machine.chip.hbm_bytes


def _identifying_options(options: Mapping[str, Any]) -> dict[str, Any]:
  """Options that distinguish a candidate from others of its strategy."""
  return {k: options[k] for k in ("inner", "wire") if k in options}


def _name(candidate: Prediction | Refusal) -> str:
  options = _identifying_options(candidate.options)
  groups = f" of {options['inner']}" if "inner" in options else ""
  return (
    candidate.strategy
    + groups
    + (f", {options['wire']}" if "wire" in options else "")
  )


def _layout(layout: Layout) -> str:
  name = type(layout).__name__.lower()
  block = layout.block if isinstance(layout, Striped) else 1
  return f"{name}({block})" if block > 1 else name


def _ms(seconds: float) -> str:
  if seconds == 0:
    return "-"
  ms = 1e3 * seconds
  return f"{ms:.3f} ms" if ms < 10 else f"{ms:,.1f} ms"


def _nbytes(count: float) -> str:
  for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if count >= size:
      return f"{count / size:.3g} {unit}"
  return f"{count:.0f} B"
