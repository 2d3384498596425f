"""Pictures of the strategies: what a device holds and sends, step by step.

Guarantees: everything drawn is counted. A row is a device, a column a step; a
cell shows the tiles of the queries and keys that the device has then, each as
the loops of attention treat it (`tile_schedule`, or `tile_kinds` on the
coordinates of placed documents): skipped, computed with the mask, computed
without. The colour is the shard of the keys; arrows are sends between two
steps. The steps of a strategy are written down only here.

Cost: a second or two for all pictures, and less than 60 kB each.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int8

from ringjax.errors import OptionError, ShapeError
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.cost.schedule import busy, tile_schedule
from ringjax.ops.attention.strategies.ring import cut_hops
from ringjax.ops.mask import Causal, Coords, Mask, SameSegment, Window
from ringjax.parallel.layout import LAYOUTS
from ringjax.plan import draw

if TYPE_CHECKING:
  from matplotlib.axes import Axes

# Tokens of a shard and of a tile, in all pictures.
LOCAL, TILE = 32, 8
_WINDOW = LOCAL // 2 + 1
_COLORS = (
  "#3b6fb6", "#e0843d", "#4f9d5b", "#c44e63",
  "#8069b5", "#8a6b4f", "#d185b8", "#6f7a87",
)  # fmt: skip
# Colour and label of each kind of transfer.
_TRANSFERS = {
  "keys": ("#303030", "keys, values"),
  "queries": ("#1f8a8a", "queries, sums"),
  "heads": ("#8a4fb0", "tokens for heads"),
  "slow link": ("#d02020", "keys, values on slow links"),
}


class Transfer(NamedTuple):
  """A send from one device to another, between two steps.

  Fields:
    source: Number of the sending device.
    target: Number of the receiving device.
    kind: "keys" (and values), "queries" (and their sums), "heads" (all that is
      exchanged for tokens) or "slow link" (keys that cross to another group,
      in flight while that group rotates once).
  """

  source: int
  target: int
  kind: str = "keys"


class DeviceShards(NamedTuple):
  """Shards of queries and of keys that a device has in a step."""

  queries: tuple[int, ...]
  keys: tuple[int, ...]


class Step(NamedTuple):
  """One column of a picture.

  Fields:
    name: Label above the column.
    cells: Shards of each device; None for an idle device.
    sends: Transfers between this step and the next.
    computes: Whether tiles are computed, or shards are only held.
  """

  name: str
  cells: tuple[DeviceShards | None, ...]
  sends: tuple[Transfer, ...] = ()
  computes: bool = True


class StrategySteps(NamedTuple):
  """Steps of a strategy, with what is needed to draw them.

  Fields:
    words: A sentence about the strategy.
    steps: Steps in their order.
    mask: Mask of the attention.
    layouts: Names of the layouts for which it is drawn.
  """

  words: str
  steps: tuple[Step, ...]
  mask: Mask = Causal()
  layouts: tuple[str, ...] = tuple(LAYOUTS)

  @property
  def shards(self) -> int:
    """Number of devices, R."""
    return len(self.steps[0].cells)


class Panel(NamedTuple):
  """Steps of a strategy with the tiles of one layout.

  Fields:
    name: Name of the layout.
    steps: Steps of the strategy.
    kinds: Kinds of tiles, by query shard and key shard, as in `tile_schedule`.
  """

  name: str
  steps: tuple[Step, ...]
  kinds: Int8[np.ndarray, "R R q_tiles k_tiles"]

  def tiles(self, cell: DeviceShards) -> Int8[np.ndarray, "q_tiles k_tiles"]:
    """Kinds of a cell's tiles: query shards down, key shards across."""
    return np.block(
      [[self.kinds[q, k] for k in cell.keys] for q in cell.queries]
    )

  def counts(self) -> Int[np.ndarray, "steps R"]:
    """Number of tiles that each device computes in each computing step."""
    return np.array(
      [
        [
          0 if cell is None else np.count_nonzero(self.tiles(cell))
          for cell in step.cells
        ]
        for step in self.steps
        if step.computes
      ]
    )


# ---------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------


def _cells(
  shards: int, keys: Callable[[int], Iterable[int]] = lambda i: (i,)
) -> tuple[DeviceShards, ...]:
  """Every device has its own queries, and the keys of `keys(device)`."""
  return tuple(DeviceShards((i,), tuple(keys(i))) for i in range(shards))


def _shift(shards: int, by: int, what: str = "keys") -> tuple[Transfer, ...]:
  """Let every device send to the one `by` places further, around a ring."""
  return tuple(Transfer(i, (i + by) % shards, what) for i in range(shards))


def _exchange(
  groups: Sequence[Sequence[int]], what: str
) -> tuple[Transfer, ...]:
  """Let every device of a group send to every other."""
  return tuple(
    Transfer(i, j, what)
    for group in groups
    for i in group
    for j in group
    if i != j
  )


def _groups(shards: int, inner: int) -> list[tuple[int, ...]]:
  """Groups of `inner` neighbours."""
  return [tuple(range(i, i + inner)) for i in range(0, shards, inner)]


def _rotating(shards: int, behind: int, ahead: int) -> tuple[Step, ...]:
  """Steps of a ring: `behind` hops in one direction, `ahead` in the other."""
  distances = [*range(behind + 1), *range(-1, -ahead - 1, -1)]
  steps = []
  for n, distance in enumerate(distances):
    # The other direction starts with each device's own keys.
    last = n == len(distances) - 1
    direction = 1 if 0 <= distance < behind else -1
    steps.append(
      Step(
        f"hop {distance:+d}" if ahead and distance else f"hop {distance}",
        _cells(shards, lambda i, far=distance: ((i - far) % shards,)),
        () if last else _shift(shards, direction),
      )
    )
  return tuple(steps)


def _both_ways(shards: int) -> Iterator[Step]:
  """Yield steps in which keys rotate both ways, half as many."""
  for distance in range(shards // 2 + 1):
    keys = lambda i, distance=distance: dict.fromkeys(
      ((i - distance) % shards, (i + distance) % shards)
    )
    # In the last step both directions may bring the same shard: send one.
    directions = [1, -1] if 2 * (distance + 1) < shards else [1]
    moves = zip(
      *(_shift(shards, direction) for direction in directions), strict=True
    )
    last = distance == shards // 2
    sends = () if last else tuple(send for move in moves for send in move)
    yield Step(f"step {distance}", _cells(shards, keys), sends)


def _queries(shards: int) -> Iterator[Step]:
  """Yield steps in which queries and sums rotate, and return to their owner."""
  for hop in range(shards):
    cells = tuple(
      DeviceShards(((i - hop) % shards,), (i,)) for i in range(shards)
    )
    yield Step(f"hop {hop}", cells, _shift(shards, 1, "queries"))
  yield Step("home", _cells(shards), computes=False)


def _hybrid(shards: int, inner: int) -> Iterator[Step]:
  """Yield steps of Ulysses inside of groups, and a ring of groups."""
  groups = _groups(shards, inner)
  trade = _exchange(groups, "heads")
  yield Step("own", _cells(shards), trade, computes=False)
  for hop in range(len(groups)):
    last = hop == len(groups) - 1
    cells = tuple(
      DeviceShards(groups[i // inner], groups[(i // inner - hop) % len(groups)])
      for i in range(shards)
    )
    yield Step(f"hop {hop}", cells, trade if last else _shift(shards, inner))
  yield Step("own", _cells(shards), computes=False)


def _two_level(shards: int, inner: int) -> Iterator[Step]:
  """Yield steps of rings inside of groups; the next group's keys cross."""
  groups = _groups(shards, inner)
  for turn in range(len(groups)):
    for hop in range(inner):

      def keys(i: int, turn: int = turn, hop: int = hop) -> Sequence[int]:
        group, place = divmod(i, inner)
        return (groups[(group - turn) % len(groups)][(place - hop) % inner],)

      sends: tuple[Transfer, ...] = ()
      if hop < inner - 1:
        sends = tuple(
          Transfer(i, i // inner * inner + (i + 1) % inner)
          for i in range(shards)
        )
      elif turn < len(groups) - 1:
        sends = _shift(shards, inner, "slow link")
      yield Step(f"{turn}.{hop}", _cells(shards, keys), sends)


def _chain(shards: int) -> Iterator[Step]:
  """Yield steps in which keys move to later shards only."""
  for t in range(shards):
    cells = [DeviceShards((i,), (i - t,)) for i in range(t, shards)]
    sends = tuple(Transfer(i, i + 1) for i in range(t, shards - 1))
    yield Step(f"step {t}", (*[None] * t, *cells), sends)


_ALL = tuple(range(4))
_OWN = Step("own", _cells(4), computes=False)
_TRADE = _exchange([_ALL], "heads")
STRATEGIES = {
  "ring": StrategySteps(
    "ring: queries stay, keys and values go round", _rotating(4, 3, 0)
  ),
  "bidirectional": StrategySteps(
    "bidirectional: keys come from both neighbours at once",
    tuple(_both_ways(4)),
  ),
  "ring_q": StrategySteps(
    "ring_q: keys stay, queries and their sums go round and home",
    tuple(_queries(4)),
  ),
  "gather": StrategySteps(
    "gather: everyone gets all keys, then attends alone",
    (
      _OWN._replace(sends=_exchange([_ALL], "keys")),
      Step("attend", _cells(4, lambda i: _ALL)),
    ),
  ),
  "ulysses": StrategySteps(
    "ulysses: tokens for heads; all tokens of 1/4 of the heads, and back",
    (
      _OWN._replace(sends=_TRADE),
      Step("attend", (DeviceShards(_ALL, _ALL),) * 4, _TRADE),
      _OWN,
    ),
  ),
  "hybrid": StrategySteps(
    "hybrid: 2 devices trade tokens for heads, their groups are a ring",
    tuple(_hybrid(8, 2)),
  ),
  "two_level": StrategySteps(
    "two_level: groups of 4 turn on fast links, the next keys cross the slow "
    "ones meanwhile",
    tuple(_two_level(8, 4)),
  ),
  "halo": StrategySteps(
    f"halo: a window of {_WINDOW} tokens; the {_WINDOW - 1} before a shard "
    "are sent",
    (
      _OWN._replace(sends=tuple(Transfer(i, i + 1) for i in range(3))),
      Step("attend", _cells(4, lambda i: range(max(0, i - 1), i + 1))),
    ),
    Causal() & Window(_WINDOW),
    ("contiguous",),
  ),
  "chain": StrategySteps(
    "chain: keys go to later shards only, never around",
    tuple(_chain(4)),
    layouts=("contiguous",),
  ),
}


def panels(strategy: StrategySteps) -> list[Panel]:
  """Make a panel of a strategy for each of its layouts."""
  panel_list, shards = [], strategy.shards
  q, k = np.ogrid[:shards, :shards]
  for name in strategy.layouts:
    # Indexed by hop and device.
    schedule = tile_schedule(
      LAYOUTS[name], strategy.mask, shards, shards * LOCAL, TILE, TILE
    )
    panel_list.append(
      Panel(name, strategy.steps, schedule[(q - k) % shards, q])
    )
  return panel_list


def documents(
  placed: Mapping[str, tuple[Any, Any]], shards: int
) -> list[Panel]:
  """Make panels of documents on a ring that rotates only as far as needed.

  Args:
    placed: (positions, segments) of the slots by name, int32 [R * t] each, as
      `rj.data.place` returns them.
    shards: R, number of shards.

  Raises:
    ShapeError: If shards or tiles do not divide the slots.
  """
  panel_list = []
  for name, (positions, segments) in placed.items():
    pos, seg = (np.asarray(x, np.int32) for x in (positions, segments))
    if pos.ndim != 1 or pos.shape != seg.shape or len(pos) % (shards * TILE):
      raise ShapeError(
        "placed",
        f"{pos.shape} positions and {seg.shape} segments",
        f"as many of each, a multiple of {shards * TILE}",
        f"place documents on {shards} shards of whole tiles",
      )
    coords = Coords(jnp.asarray(pos[None]), jnp.asarray(seg[None]))
    kinds = tile_kinds(Causal() & SameSegment(), coords, coords, TILE, TILE)
    shard_tiles = len(pos) // shards // TILE
    kinds = (
      np.asarray(kinds)
      .reshape(shards, shard_tiles, shards, shard_tiles)
      .swapaxes(1, 2)
    )
    # By pairs, as a tile's bounds may not tell two documents apart.
    sees = (seg[:, None] == seg) & (pos[:, None] >= pos) & (seg > 0)
    shard_pairs = sees.reshape(shards, len(pos) // shards, shards, -1)
    q, k = np.nonzero(shard_pairs.any((1, 3)))
    needed = np.zeros(shards, bool)
    needed[(q - k) % shards] = True
    panel_list.append(Panel(name, _rotating(shards, *cut_hops(needed)), kinds))
  return panel_list


# ---------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------


def write(
  folder: str, placed: Mapping[str, tuple[Any, Any]], shards: int
) -> list[str]:
  """Draw all strategies and the documents; return the paths.

  Args:
    folder: Folder for the PNGs, created if missing.
    placed: Documents, see `documents`.
    shards: Number of shards of the documents.

  Raises:
    OptionError: If matplotlib is not installed, or a file cannot be written.
  """
  draw.figures()
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as error:
    raise _unwritable(folder, error) from None
  pictures = {
    name: (panels(steps), steps.words) for name, steps in STRATEGIES.items()
  }
  words = "documents: a ring that turns no farther than some document needs"
  pictures["documents"] = (documents(placed, shards), words)
  paths = []
  for name, (panel_list, words) in pictures.items():
    paths.append(os.path.join(folder, f"{name}.png"))
    _draw(panel_list, words, paths[-1])
  return paths


def _draw(panel_list: Sequence[Panel], words: str, path: str) -> None:
  """Draw one picture of panels side by side, with `words` above."""
  shards = len(panel_list[0].steps[0].cells)
  cell = 0.72 if shards <= 4 else 0.5
  # A panel is at least as wide as its title.
  widths = [max(2.6, 1.3 * cell * len(panel.steps)) for panel in panel_list]
  fig, grid = draw.figure(
    max(6.0, 1.0 + sum(widths)), 1.5 + cell * shards, 1, len(panel_list),
    squeeze=False, width_ratios=widths,
  )  # fmt: skip
  for ax, panel in zip(grid[0], panel_list, strict=True):
    _draw_panel(ax, panel)
  grid[0][0].set_ylabel("device", fontsize=9)
  fig.suptitle(words, fontsize=10)
  draw.legend(
    fig, _handles(panel_list, shards), ncols=8, fontsize=8, handlelength=1.0,
    columnspacing=1.0, handletextpad=0.4,
  )  # fmt: skip
  image = importlib.import_module("PIL.Image")
  with io.BytesIO() as full:
    fig.savefig(full, format="png", dpi=100 if shards <= 4 else 85)
    # A palette of 64 colours takes a third of the bytes.
    quantized = image.open(full).convert("RGB").quantize(64, dither=0)
  try:
    quantized.save(path, format="png", optimize=True)
  except (OSError, ValueError) as error:
    raise _unwritable(path, error) from None


def _draw_panel(ax: Axes, panel: Panel) -> None:
  shards = len(panel.steps[0].cells)
  for column, step in enumerate(panel.steps):
    x = 1.3 * column
    for device, cell in enumerate(step.cells):
      extent = (x, x + 1, device + 0.9, device + 0.1)
      if cell is not None and step.computes:
        image = _mosaic(panel, cell)
      else:
        image = np.ones((1, 1, 3))
        if cell is not None:
          _draw_keys(ax, x, device, cell)
      ax.imshow(image, extent=extent, interpolation="nearest", aspect="auto")
      ax.plot(
        [x, x + 1, x + 1, x, x],
        [device + 0.1, device + 0.1, device + 0.9, device + 0.9, device + 0.1],
        color="0.55" if cell is not None else "0.85",
        linewidth=0.6,
      )
    for send in step.sends:
      ax.annotate(
        "",
        xy=(x + 1.3, send.target + 0.5),
        xytext=(x + 1.0, send.source + 0.5),
        arrowprops={
          "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
          "color": _TRANSFERS[send.kind][0],
          "linewidth": 0.7,
          "shrinkA": 0,
          "shrinkB": 0,
        },
      )
  ax.set_xlim(-0.1, 1.3 * len(panel.steps) - 0.2)
  ax.set_ylim(shards, 0)
  ax.set_xticks(
    [1.3 * i + 0.5 for i in range(len(panel.steps))],
    [step.name for step in panel.steps],
  )
  ax.set_yticks(
    [i + 0.5 for i in range(shards)], [str(i) for i in range(shards)]
  )
  ax.tick_params(length=0, labelsize=7)
  ax.spines[:].set_visible(False)
  counts = panel.counts()
  ax.set_title(
    f"{panel.name}: {int(counts.sum())} tiles, {100 * busy(counts):.0f} % busy",
    fontsize=9,
  )


def _mosaic(
  panel: Panel, cell: DeviceShards
) -> Float[np.ndarray, "q_tiles k_tiles rgb"]:
  """Colours of a cell's tiles."""
  kinds = panel.tiles(cell)
  colors = np.array([_rgb(_COLORS[k]) for k in cell.keys])
  across = np.repeat(colors, kinds.shape[1] // len(cell.keys), axis=0)[None]
  light = 0.45 * across + 0.55
  kind = kinds[..., None]
  return np.where(kind == 2, across, np.where(kind == 1, light, 1.0))


def _draw_keys(ax: Axes, x: float, device: int, cell: DeviceShards) -> None:
  """Draw a bar of the keys that are held while nothing is computed."""
  width = 0.6 / len(cell.keys)
  for n, key in enumerate(cell.keys):
    ax.bar(
      x + 0.2 + width * (n + 0.5), 0.2, width, device + 0.4,
      color=_COLORS[key], zorder=3,
    )  # fmt: skip


def _handles(panel_list: Sequence[Panel], shards: int) -> list[Any]:
  lines = importlib.import_module("matplotlib.lines")
  light = 0.45 * np.array(_rgb("#606060")) + 0.55
  kinds_sent = {
    send.kind
    for panel in panel_list
    for step in panel.steps
    for send in step.sends
  }
  return [
    *(draw.patch(_COLORS[k], f"keys of {k}") for k in range(shards)),
    draw.patch("#606060", "all pairs"),
    draw.patch(light, "with the mask"),
    *(
      lines.Line2D([], [], color=color, label=label)
      for kind, (color, label) in _TRANSFERS.items()
      if kind in kinds_sent
    ),
  ]


def _rgb(color: str) -> tuple[float, ...]:
  return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _unwritable(path: str, error: Exception) -> OptionError:
  return OptionError(
    "out", f"{path}: {error}", "a folder to write in", "pass another folder"
  )
