"""Which strategy an attention call takes, by predicted time, and why.

Guarantees: the choice depends on shapes, mask, layout, mesh and `device_kind`
alone, so every process of a run makes the same. It never changes the result,
hence nothing that loses digits is chosen unless it is asked for; and nothing
that does not fit the memory.

`explain` prints what `Auto` goes by:

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
from ringjax.ops.attention import registry
from ringjax.ops.attention.call_shape import CallShape, Prediction, Refusal
from ringjax.ops.attention.kernels.auto_kernel import expected
from ringjax.ops.attention.wire_format import WireLike
from ringjax.ops.mask import Causal, Everything, Mask
from ringjax.parallel import chips
from ringjax.parallel.chips import Machine
from ringjax.parallel.collectives import names as names_of
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.parallel.place import SEQ, sharding_of

# An array of a call, or what is known of one: its type, or its shape.
Operand = (
  Shaped[Array | np.ndarray | jax.ShapeDtypeStruct, " ..."] | tuple[int, ...]
)
LAYOUTS: tuple[Layout, ...] = (Contiguous(), Striped(), Zigzag())
_SHOWN = 12


def candidates(
  call: CallShape, among: Sequence[str] | None = None
) -> list[tuple[str, Layout, dict[str, Any]]]:
  """All (strategy, layout, options) that are considered for a call.

  Args:
    call: what is to be computed. Without a layout all of `LAYOUTS` are tried.
    among: names of strategies; default all.

  Returns:
    Also those that `registry.predict`, which takes them, then refuses. The
    options are `inner`, devices of a group, and `wire`.

  Raises:
    OptionError: a name that no strategy has.
  """
  for name in among or ():
    one_of("among", name, registry.STRATEGIES)
  layouts = LAYOUTS if call.layout is None else (call.layout,)
  size = call.shards
  if len(call.axes) == 2:
    inners = [call.axes[1][1]] if 1 < call.axes[1][1] < size else []
  else:
    inners = [n for n in range(2, size // 2 + 1) if size % n == 0]
  found = []
  # On one device there is nothing to move, and the ring moves nothing.
  for name in registry.STRATEGIES if size > 1 else ("ring",):
    if among is not None and name not in among:
      continue
    coded = call.wire is not None and name in registry.WIRED and size > 1
    found += [
      (name, layout, {"inner": inner, "wire": wire})
      for inner in (inners if name in registry.GROUPED else [None])
      for wire in ((None, call.wire) if coded else (None,))
      for layout in layouts
    ]
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """The predictions for a call on a machine, the fastest first.

  Attributes:
    call: what is to be computed.
    machine: on what.
    predictions: of all candidates that serve the call, sorted by seconds.
    refusals: of all others.
  """

  call: CallShape
  machine: Machine
  predictions: tuple[Prediction, ...]
  refusals: tuple[Refusal, ...]

  @property
  def best(self) -> Prediction:
    """The fastest prediction.

    Raises:
      OptionError: no candidate serves the call.
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
    """The fastest of each strategy with its options, by name, sorted."""
    found: dict[str, Prediction] = {}
    for one in self.predictions:
      found.setdefault(_name(one), one)
    return found

  @property
  def title(self) -> str:
    """What is computed, and on what."""
    call = self.call
    tokens = f"{call.queries:,}"
    if call.keys != call.queries:
      tokens += f" queries over {call.keys:,}"
    over = " x ".join(f"{size} ({name})" for name, size in call.axes)
    return (
      f"{tokens} tokens, batch {call.batch}, {call.heads} heads over "
      f"{call.kv_heads} of {call.head_dim}, {call.dtype}, {call.mask}, on "
      f"{over} {self.machine.name}, {call.local}"
    )

  def of(self, strategy: str, **options: Any) -> Prediction:
    """The fastest prediction of a strategy with these options.

    Raises:
      OptionError: there is none.
    """
    for one in self.predictions:
      if one.strategy == strategy and all(
        one.options.get(k) == v for k, v in options.items()
      ):
        return one
    declined = [r.reason for r in self.refusals if r.strategy == strategy]
    raise OptionError(
      "strategy",
      f"{strategy!r} {options or ''}",
      "one that was predicted",
      declined[0] if declined else "see predictions",
    )

  def record(self) -> dict[str, Any]:
    """Plain values for JSON."""
    call = vars(self.call) | {"axes": dict(self.call.axes)}
    call |= {"mask": repr(self.call.mask), "layout": repr(self.call.layout)}
    return {
      "call": call,
      "machine": self.machine.name,
      "predictions": [one.record() for one in self.predictions],
      "refusals": [one.record() for one in self.refusals],
    }

  def print(self) -> None:
    """Prints the table."""
    print(self)

  def __str__(self) -> str:
    lines = [self.title, ""]
    seen = self.ways
    lines.append(
      f"{'':3}{'strategy':<24}{'layout':<12}{'forward':>10}{'backward':>11}"
      f"{'both':>11}{'memory':>10}{'busy':>6}  sent"
    )
    shown = list(seen.values())[:_SHOWN]
    for n, one in enumerate(shown):
      sent = ", ".join(
        f"{name} {_nbytes(b)}" for name, b in one.bytes_by_link.items()
      )
      lines.append(
        f"{n + 1:>2} {_name(one):<24}{_layout(one.layout):<12}"
        f"{_ms(one.forward_s):>10}{_ms(one.backward_s):>11}"
        f"{_ms(one.seconds):>11}{_nbytes(one.memory_bytes):>10}"
        f"{100 * one.busy:>4.0f} %  {sent or 'nothing'}"
        + "".join(f"; {note}" for note in one.notes)
      )
    if len(seen) > len(shown):
      lines.append(f"   and {len(seen) - len(shown)} slower ones")
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
  """Predicts the time of every candidate; the fastest comes first.

  Equals stay in the order of `registry.STRATEGIES`, the plainer one first.

  Args:
    call: what is to be computed.
    machine: on what; a candidate may fill `memory_share` of its memory.
    among: names of strategies; default all.
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
  most = _memory(machine)
  predictions, refusals = [], []
  for strategy, layout, options in candidates(call, among):
    found = registry.predict(strategy, call, machine, layout, **options)
    if isinstance(found, Prediction) and found.memory_bytes > most:
      found = Refusal(
        strategy=strategy,
        options=_own(found.options),
        reason=(
          f"needs {_nbytes(found.memory_bytes)} a device; "
          f"{100 * machine.memory_share:g} % of {machine.chip.name}'s are "
          f"{_nbytes(most)}"
        ),
      )
    (refusals if isinstance(found, Refusal) else predictions).append(found)
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
    machine: what it runs on, a `Machine` or its name; None is the stated one of
      the mesh's devices, or of JAX's first.
    backward: whether to count the backward pass too; None is the call's own.
    among: names of the strategies to choose from; None is all.
    wire: also consider K and V sent as such codes, which lose digits: of
      `WIRES`, or an `rj.kv.Codec`.
    longest_document: tokens of the longest document of packed data, if known.
    local: the local algorithm, of `chips.LOCALS`; None is the call's own.
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
    """The predictions by which `choose` decides."""
    names = ("backward", "wire", "longest_document", "local")
    changes = {name: getattr(self, name) for name in names}
    changes["layout"] = call.layout or Contiguous()
    given = {name: x for name, x in changes.items() if x is not None}
    call = dataclasses.replace(call, **given)
    return rank(call, find_machine(self.machine, mesh), self.among)

  def choose(
    self, call: CallShape, mesh: Mesh | AbstractMesh | None = None
  ) -> tuple[str, dict[str, Any]]:
    """The name of the fastest strategy, and what to build it with.

    Args:
      call: what is to be computed; without a layout it is contiguous.
      mesh: the mesh it runs on, if there is one.

    Returns:
      (name, options): q_block and kv_block, and for the strategies that have
      them inner and wire.

    Raises:
      OptionError: nothing fits the memory.
    """
    best = self.explain(call, mesh).best
    return best.strategy, dict(best.options)


def find_machine(
  machine: Machine | str | None, mesh: Mesh | AbstractMesh | None = None
) -> Machine:
  """The machine of a name, or of a mesh's devices, or of JAX's first.

  Raises:
    OptionError: no machine has the name.
    InputTypeError: neither a machine nor a name.
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
  """Explains which strategy an attention call takes, and why.

  Nothing is computed, and no device is needed where `shards` and `machine`
  are given.

  Args:
    query: [B, T, N, H], an array, a `jax.ShapeDtypeStruct` or a shape.
    key: [B, S, K, H], of the whole sequence like the query.
    value: [B, S, K, J]; default as the key.
    mesh: the mesh; default the operands', else the current one.
    axis: the mesh axis that shards the sequence, or two of them, groups of
      devices first; default the operands', else "seq".
    shards: without a mesh how many devices there are, or a mapping from one
      axis or two to their sizes.
    layout: order of the tokens on the shards; None tries all of `LAYOUTS`.
    is_causal: a query sees keys at and before its position.
    mask: over coordinates, e.g. `Window(4096)`; with is_causal both hold.
    dtype: of operands that are given as shapes; default bfloat16.
    machine: on what: a Machine or its name; default the stated one of the
      mesh's devices, else of JAX's first.
    backward: whether gradients are wanted too.
    offset: position of the first query.
    wire: "int8", "float8_e4m3fn" or "bfloat16": show also K and V sent so.
    longest_document: tokens of the longest document of packed data, if known.
    local: the local algorithm, "blockwise" or "kernel"; default the one that
      `AutoKernel()` takes there.
    among: names of the strategies to look at; default all.
    show: whether to print the table.

  Returns:
    The predictions, sorted, and the refusals; its `str` is the table.

  Raises:
    RingjaxError: operands, mesh or options that do not fit.
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
  axes, found, parts = _axes(query, key, mesh, axis, shards)
  b, n, k = (-(-x // by) for x, by in zip((b, n, k), parts, strict=True))
  seen = Everything() if mask is None else mask
  if not isinstance(seen, Mask):
    raise InputTypeError(
      "mask",
      type(mask).__name__,
      "a ringjax mask such as Window(4096)",
      "leave an array out: it bounds no tile",
    )
  if is_causal:
    seen = Causal() if mask is None else Causal() & seen
  kind = getattr(query, "dtype", None) if dtype is None else dtype
  call = CallShape(
    batch=b,
    queries=t,
    keys=s,
    heads=n,
    kv_heads=k,
    head_dim=h,
    value_dim=j,
    dtype="bfloat16" if kind is None else jax.numpy.dtype(kind).name,
    mask=seen,
    layout=layout,
    axes=axes,
    backward=backward,
    offset=offset,
    wire=wire,
    longest_document=longest_document,
    **({} if local is None else {"local": local}),
  )
  there = find_machine(machine, found)
  declined: Sequence[tuple[str, str]] = ()
  if local is None:
    name = there.name if there.name in chips.MACHINES else None
    found_local, declined = expected(call, there.chip.platform, name)
    call = dataclasses.replace(call, local=found_local)
  explanation = rank(call, there, among)
  refusals = [Refusal(strategy=kernel, reason=why) for kernel, why in declined]
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
  """(axes with sizes, the mesh, shards of batch, query heads, kv heads)."""
  names = names_of(axis)
  if shards is not None:
    if mesh is not None:
      raise OptionError("shards", shards, "no mesh with it", "leave one out")
    if isinstance(shards, Mapping):
      return tuple(shards.items()), None, (1, 1, 1)
    name = (names or (SEQ,))[0]
    return ((name, positive_int("shards", shards)),), None, (1, 1, 1)
  (spec, held), (key_spec, _) = _sharding(query), _sharding(key)
  context = jax.sharding.get_abstract_mesh()
  found = mesh if mesh is not None else held
  if found is None and not context.empty:
    found = context
  if not isinstance(found, Mesh | AbstractMesh):
    raise MeshError(
      "mesh",
      "none" if found is None else type(found).__name__,
      "a mesh, or shards=",
      "pass over how many devices the sequence is sharded, e.g. shards=8",
    )
  if not names:
    names = spec[1] or ((SEQ,) if SEQ in found.axis_names else ())
  missing = [name for name in names if name not in found.axis_names]
  if not names or missing:
    raise MeshError(
      "axis",
      repr(missing[0]) if missing else "None",
      f"one of the mesh axes {found.axis_names}",
      "pass axis=, the name of the one that shards the sequence",
    )
  sizes = tuple((name, found.shape[name]) for name in names)
  parts = [
    math.prod(found.shape[a] for a in entry)
    for entry in (spec[0], spec[2], key_spec[2])
  ]
  return sizes, found, (parts[0], parts[1], parts[2])


def _sharding(x: Any) -> tuple[list[tuple[str, ...]], Any]:
  """(mesh axes of each of four dimensions, the mesh) of an operand."""
  none: list[tuple[str, ...]] = [()] * 4
  mesh, spec = sharding_of(x) if hasattr(x, "sharding") else (None, None)
  if spec is None:
    return none, mesh
  leading = none[: 4 - len(x.shape)] if mesh is not None else []
  return [*leading, *spec, *none][:4], mesh


# ---------------------------------------------------------------------------
# The table's text
# ---------------------------------------------------------------------------


def _memory(machine: Machine) -> float:
  return machine.memory_share * machine.chip.hbm_bytes


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
  """The options that tell a candidate from others of its strategy."""
  return {k: options[k] for k in ("inner", "wire") if k in options}


def _name(one: Prediction | Refusal) -> str:
  own = _own(one.options)
  groups = f" of {own['inner']}" if "inner" in own else ""
  return one.strategy + groups + (f", {own['wire']}" if "wire" in own else "")


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
