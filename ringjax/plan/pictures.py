"""A picture of each strategy: who holds what, and what moves, step by step.

Law: what is drawn is counted. A row is a device, a column a step; a cell shows
the tiles of the queries and keys that are at hand there, each as the loops of
attention treat it (`tile_schedule`, or `tile_kinds` on the coordinates of
placed documents): left out, computed with the mask, computed without. The
colour is the shard that the keys are from; arrows are what is sent between two
steps. What a strategy does in which order is written down here, once.

Cost: a second or two for all pictures, and less than 60 kB each.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ringjax.errors import OptionError, ShapeError
from ringjax.ops.attention.blockwise import tile_kinds
from ringjax.ops.attention.ring import cut_hops
from ringjax.ops.attention.schedule import busy, tile_schedule
from ringjax.ops.mask import Causal, Coords, Mask, SameSegment, Window
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.plan.draw import figures

# Tokens of a shard and of a tile, in all pictures.
LOCAL, TILE = 32, 8
_WINDOW = LOCAL // 2 + 1
_LAYOUTS: dict[str, Layout] = {
  "contiguous": Contiguous(),
  "striped": Striped(),
  "zigzag": Zigzag(),
}
_COLORS = (
  "#3b6fb6", "#e0843d", "#4f9d5b", "#c44e63",
  "#8069b5", "#8a6b4f", "#d185b8", "#6f7a87",
)  # fmt: skip
_SENT = {
  "keys": "#303030",
  "queries": "#1f8a8a",
  "heads": "#8a4fb0",
  "slow link": "#d02020",
}
_SENT_WORDS = {
  "keys": "keys, values",
  "queries": "queries, sums",
  "heads": "tokens for heads",
  "slow link": "keys, values on slow links",
}


class Send(NamedTuple):
  """Something on its way from a device to another, between two steps.

  Fields:
    source: the device that has it.
    target: the one that gets it.
    what: of "keys" (and values), "queries" (and their sums), "heads" (all that
      is traded for tokens), "slow link" (keys that cross to another group, on
      their way for as long as a group turns).
  """

  source: int
  target: int
  what: str = "keys"


class Hand(NamedTuple):
  """What a device has at hand: shards of queries and of keys."""

  queries: tuple[int, ...]
  keys: tuple[int, ...]


class Step(NamedTuple):
  """One column of a picture.

  Fields:
    name: what is above it.
    hands: of each device; None of one that has nothing to do.
    sends: what then moves, before the next step.
    computes: whether tiles are computed, or it is only held.
  """

  name: str
  hands: tuple[Hand | None, ...]
  sends: tuple[Send, ...] = ()
  computes: bool = True


class Course(NamedTuple):
  """What a strategy does.

  Fields:
    words: a sentence about it.
    shards: devices, R.
    steps: one after another.
    mask: of the attention.
    layouts: names of the layouts it is drawn for.
  """

  words: str
  shards: int
  steps: tuple[Step, ...]
  mask: Mask = Causal()
  layouts: tuple[str, ...] = tuple(_LAYOUTS)


class Panel(NamedTuple):
  """A course with the tiles of one layout.

  Fields:
    name: of the layout.
    steps: of the course.
    kinds: int8 [query shard, key shard, T/tile, S/tile], as `tile_schedule`
      has them.
  """

  name: str
  steps: tuple[Step, ...]
  kinds: np.ndarray

  def tiles(self, hand: Hand) -> np.ndarray:
    """Kinds of a cell's tiles: int8, query shards down, key shards across."""
    return np.block(
      [[self.kinds[q, k] for k in hand.keys] for q in hand.queries]
    )

  def counts(self) -> np.ndarray:
    """Tiles that each device computes in each computing step: [steps, R]."""
    return np.array(
      [
        [0 if h is None else np.count_nonzero(self.tiles(h)) for h in s.hands]
        for s in self.steps
        if s.computes
      ]
    )


# ---------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------


def ring(shards: int = 4) -> Course:
  """Keys go round, from each device to the next."""
  return Course(
    "ring: queries stay, keys and values go round",
    shards,
    _turning(shards, shards - 1, 0),
  )


def bidirectional(shards: int = 4) -> Course:
  """Keys go round both ways, in half the steps."""
  steps = []
  for far in range(shards // 2 + 1):
    hands, sends = [], []
    for i in range(shards):
      keys = dict.fromkeys(((i - far) % shards, (i + far) % shards))
      hands.append(Hand((i,), tuple(keys)))
      # Next time the two ways may end at the same shard; one way brings it.
      if far < shards // 2:
        sends.append(Send(i, (i + 1) % shards))
        if 2 * (far + 1) < shards:
          sends.append(Send(i, (i - 1) % shards))
    steps.append(Step(f"step {far}", tuple(hands), tuple(sends)))
  return Course(
    "bidirectional: keys come from both neighbours at once",
    shards,
    tuple(steps),
  )


def ring_q(shards: int = 4) -> Course:
  """Queries and their sums go round, keys stay."""
  there = lambda i, hop: (i - hop) % shards
  sends = tuple(Send(i, (i + 1) % shards, "queries") for i in range(shards))
  steps = [
    Step(
      f"hop {hop}",
      tuple(Hand((there(i, hop),), (i,)) for i in range(shards)),
      sends,
    )
    for hop in range(shards)
  ]
  home = tuple(Hand((i,), (i,)) for i in range(shards))
  return Course(
    "ring_q: keys stay, queries and their sums go round and home",
    shards,
    (*steps, Step("home", home, computes=False)),
  )


def gather(shards: int = 4) -> Course:
  """All keys come to all devices, then everyone attends alone."""
  every = tuple(range(shards))
  held = tuple(Hand((i,), (i,)) for i in every)
  sends = tuple(Send(i, j) for i in every for j in every if i != j)
  return Course(
    "gather: everyone gets all keys, then attends alone",
    shards,
    (
      Step("own", held, sends, computes=False),
      Step("attend", tuple(Hand((i,), every) for i in every)),
    ),
  )


def ulysses(shards: int = 4) -> Course:
  """Tokens are traded for heads, and back."""
  every = tuple(range(shards))
  held = tuple(Hand((i,), (i,)) for i in every)
  trade = _trades([every])
  return Course(
    f"ulysses: tokens for heads; all tokens of 1/{shards} of the heads, and "
    "back",
    shards,
    (
      Step("own", held, trade, computes=False),
      Step("attend", tuple(Hand(every, every) for _ in every), trade),
      Step("own", held, computes=False),
    ),
  )


def hybrid(shards: int = 8, inner: int = 2) -> Course:
  """Ulysses inside of groups, a ring of groups."""
  groups = _groups(shards, inner)
  held = tuple(Hand((i,), (i,)) for i in range(shards))
  trade = _trades(groups)
  steps = [Step("own", held, trade, computes=False)]
  for hop in range(len(groups)):
    last = hop == len(groups) - 1
    move = tuple(Send(i, (i + inner) % shards) for i in range(shards))
    hands = tuple(
      Hand(groups[i // inner], groups[(i // inner - hop) % len(groups)])
      for i in range(shards)
    )
    steps.append(Step(f"hop {hop}", hands, trade if last else move))
  steps.append(Step("own", held, computes=False))
  return Course(
    f"hybrid: {inner} devices trade tokens for heads, their groups are a ring",
    shards,
    tuple(steps),
  )


def two_level(shards: int = 8, inner: int = 4) -> Course:
  """Rings inside of groups; what the next turn needs crosses meanwhile."""
  groups = _groups(shards, inner)
  steps = []
  for turn in range(len(groups)):
    for hop in range(inner):
      hands, sends = [], []
      for i in range(shards):
        group, place = divmod(i, inner)
        from_ = groups[(group - turn) % len(groups)]
        hands.append(Hand((i,), (from_[(place - hop) % inner],)))
        if hop < inner - 1:
          sends.append(Send(i, groups[group][(place + 1) % inner]))
        elif turn < len(groups) - 1:
          sends.append(Send(i, (i + inner) % shards, "slow link"))
      steps.append(Step(f"{turn}.{hop}", tuple(hands), tuple(sends)))
  return Course(
    f"two_level: groups of {inner} turn on fast links, the next keys cross "
    "the slow ones meanwhile",
    shards,
    tuple(steps),
  )


def halo(shards: int = 4) -> Course:
  """The keys that a window reaches back to come from the neighbour."""
  every = range(shards)
  held = tuple(Hand((i,), (i,)) for i in every)
  sends = tuple(Send(i, i + 1) for i in every[:-1])
  near = tuple(Hand((i,), tuple(every[max(0, i - 1) : i + 1])) for i in every)
  return Course(
    f"halo: a window of {_WINDOW} tokens; the {_WINDOW - 1} before a shard "
    "are sent",
    shards,
    (Step("own", held, sends, computes=False), Step("attend", near)),
    Causal() & Window(_WINDOW),
    ("contiguous",),
  )


def chain(shards: int = 4) -> Course:
  """Keys go on to later shards, never around."""
  steps = []
  for t in range(shards):
    hands = tuple(
      Hand((i,), (i - t,)) if i >= t else None for i in range(shards)
    )
    sends = tuple(Send(i, i + 1) for i in range(t, shards - 1))
    steps.append(Step(f"step {t}", hands, sends))
  return Course(
    "chain: keys go to later shards only, never around",
    shards,
    tuple(steps),
    layouts=("contiguous",),
  )


STRATEGIES: dict[str, Callable[[], Course]] = {
  "ring": ring,
  "bidirectional": bidirectional,
  "ring_q": ring_q,
  "gather": gather,
  "ulysses": ulysses,
  "hybrid": hybrid,
  "two_level": two_level,
  "halo": halo,
  "chain": chain,
}


def panels(course: Course) -> list[Panel]:
  """A course's panels, one for each of its layouts."""
  found = []
  for name in course.layouts:
    schedule = tile_schedule(
      _LAYOUTS[name],
      course.mask,
      course.shards,
      course.shards * LOCAL,
      TILE,
      TILE,
    )
    found.append(Panel(name, course.steps, _by_pair(schedule)))
  return found


def documents(
  placed: Mapping[str, tuple[Any, Any]], shards: int
) -> list[Panel]:
  """Panels of documents on a ring that turns no farther than they need.

  Args:
    placed: by name, (positions, segments) of the slots, int32 [R * t] each,
      as `rj.data.place` gives them.
    shards: R.

  Raises:
    ShapeError: slots that the shards or tiles do not divide.
  """
  found = []
  for name, (positions, segments) in placed.items():
    pos, seg = (np.asarray(x, np.int32) for x in (positions, segments))
    if pos.ndim != 1 or pos.shape != seg.shape or len(pos) % (shards * TILE):
      raise ShapeError(
        "placed",
        f"{pos.shape} positions and {seg.shape} segments",
        f"as many of each, a multiple of {shards * TILE}",
        f"place documents on {shards} shards of whole tiles",
      )
    at = Coords(jnp.asarray(pos[None]), jnp.asarray(seg[None]))
    kinds = tile_kinds(Causal() & SameSegment(), at, at, TILE, TILE)
    each = len(pos) // shards // TILE
    kinds = np.asarray(kinds).reshape(shards, each, shards, each).swapaxes(1, 2)
    # By pairs: a tile's bounds may not tell two documents apart.
    sees = (seg[:, None] == seg) & (pos[:, None] >= pos) & (seg > 0)
    parts = sees.reshape(shards, len(pos) // shards, shards, -1)
    q, k = np.nonzero(parts.any((1, 3)))
    needed = np.zeros(shards, bool)
    needed[(q - k) % shards] = True
    found.append(Panel(name, _turning(shards, *cut_hops(needed)), kinds))
  return found


def _turning(shards: int, behind: int, ahead: int) -> tuple[Step, ...]:
  """A ring of so many hops from behind, and then from ahead."""
  steps = []
  for distance in (*range(behind + 1), *range(-1, -ahead - 1, -1)):
    hands = tuple(Hand((i,), ((i - distance) % shards,)) for i in range(shards))
    last = distance == behind if distance >= 0 else -distance == ahead
    shift = 1 if distance >= 0 else -1
    sends = [Send(i, (i + shift) % shards) for i in range(shards)]
    # The other way begins anew, with each device's own keys.
    if last:
      turns = distance == behind and ahead > 0
      sends = (
        [Send(i, (i - 1) % shards) for i in range(shards)] if turns else []
      )
    name = f"hop {distance:+d}" if ahead and distance else f"hop {distance}"
    steps.append(Step(name, hands, tuple(sends)))
  return tuple(steps)


def _groups(shards: int, inner: int) -> list[tuple[int, ...]]:
  """Neighbours, `inner` each."""
  return [tuple(range(i, i + inner)) for i in range(0, shards, inner)]


def _trades(groups: Sequence[Sequence[int]]) -> tuple[Send, ...]:
  """All-to-all inside of each group."""
  return tuple(
    Send(i, j, "heads")
    for group in groups
    for i in group
    for j in group
    if i != j
  )


def _by_pair(schedule: np.ndarray) -> np.ndarray:
  """[hops, device, ...] as [query shard, key shard, ...]."""
  shards = schedule.shape[0]
  q, k = np.ogrid[:shards, :shards]
  return schedule[(q - k) % shards, q]


# ---------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------


def write(
  folder: str, placed: Mapping[str, tuple[Any, Any]], shards: int
) -> list[str]:
  """Draws all strategies and the documents; their paths.

  Args:
    folder: for the PNGs, made if it is not there.
    placed: see `documents`.
    shards: of the documents.

  Raises:
    OptionError: matplotlib is not installed, or a file cannot be written.
  """
  figures()
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as error:
    raise _unwritable(folder, error) from None
  paths = []
  for name, course in STRATEGIES.items():
    made = course()
    paths.append(os.path.join(folder, f"{name}.png"))
    draw(panels(made), made.words, paths[-1])
  paths.append(os.path.join(folder, "documents.png"))
  words = "documents: a ring that turns no farther than some document needs"
  draw(documents(placed, shards), words, paths[-1])
  return paths


def draw(found: Sequence[Panel], words: str, path: str) -> None:
  """One picture of panels side by side.

  Args:
    found: the panels.
    words: what stands above.
    path: of the PNG.

  Raises:
    OptionError: matplotlib is not installed, or the path cannot be written.
  """
  shards = len(found[0].steps[0].hands)
  cell = 0.72 if shards <= 4 else 0.5
  # A panel is as wide as its title at least.
  widths = [max(2.6, 1.3 * cell * len(panel.steps)) for panel in found]
  figure = figures().Figure(
    figsize=(max(6.0, 1.0 + sum(widths)), 1.5 + cell * shards),
    layout="constrained",
    facecolor="white",
  )
  axes = figure.subplots(1, len(found), squeeze=False, width_ratios=widths)[0]
  for ax, panel in zip(axes, found, strict=True):
    _draw_panel(ax, panel)
  axes[0].set_ylabel("device", fontsize=9)
  figure.suptitle(words, fontsize=10)
  figure.legend(
    handles=_handles(found, shards),
    loc="outside lower center",
    ncols=8,
    frameon=False,
    fontsize=8,
    handlelength=1.0,
    columnspacing=1.0,
    handletextpad=0.4,
  )
  image = importlib.import_module("PIL.Image")
  with io.BytesIO() as full:
    figure.savefig(full, format="png", dpi=100 if shards <= 4 else 85)
    # A few dozen colours are a third of the bytes.
    small = image.open(full).convert("RGB").quantize(64, dither=0)
  try:
    small.save(path, format="png", optimize=True)
  except (OSError, ValueError) as error:
    raise _unwritable(path, error) from None


def _draw_panel(ax: Any, panel: Panel) -> None:
  shards = len(panel.steps[0].hands)
  for column, step in enumerate(panel.steps):
    x = 1.3 * column
    for device, hand in enumerate(step.hands):
      extent = (x, x + 1, device + 0.9, device + 0.1)
      if hand is not None and step.computes:
        image = _mosaic(panel, hand)
      else:
        image = np.ones((1, 1, 3))
        if hand is not None:
          _held(ax, x, device, hand)
      ax.imshow(image, extent=extent, interpolation="nearest", aspect="auto")
      ax.plot(
        [x, x + 1, x + 1, x, x],
        [device + 0.1, device + 0.1, device + 0.9, device + 0.9, device + 0.1],
        color="0.55" if hand is not None else "0.85",
        linewidth=0.6,
      )
    for send in step.sends:
      ax.annotate(
        "",
        xy=(x + 1.3, send.target + 0.5),
        xytext=(x + 1.0, send.source + 0.5),
        arrowprops={
          "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
          "color": _SENT[send.what],
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


def _mosaic(panel: Panel, hand: Hand) -> np.ndarray:
  """RGB of a cell's tiles."""
  kinds = panel.tiles(hand)
  colors = np.array([_rgb(_COLORS[k]) for k in hand.keys])
  across = np.repeat(colors, kinds.shape[1] // len(hand.keys), axis=0)[None]
  light = 0.45 * across + 0.55
  kind = kinds[..., None]
  return np.where(kind == 2, across, np.where(kind == 1, light, 1.0))


def _held(ax: Any, x: float, device: int, hand: Hand) -> None:
  """A bar of the keys that are held while nothing is computed."""
  width = 0.6 / len(hand.keys)
  for n, key in enumerate(hand.keys):
    ax.bar(
      x + 0.2 + width * (n + 0.5), 0.2, width, device + 0.4,
      color=_COLORS[key], zorder=3,
    )  # fmt: skip


def _handles(found: Sequence[Panel], shards: int) -> list[Any]:
  patches = importlib.import_module("matplotlib.patches")
  lines = importlib.import_module("matplotlib.lines")
  handles = [
    patches.Patch(color=_COLORS[k], label=f"keys of {k}") for k in range(shards)
  ]
  light = 0.45 * np.array(_rgb("#606060")) + 0.55
  handles.append(patches.Patch(color="#606060", label="all pairs"))
  handles.append(patches.Patch(color=light, label="with the mask"))
  sent = {send.what for p in found for step in p.steps for send in step.sends}
  for what in (name for name in _SENT if name in sent):
    handles.append(
      lines.Line2D([], [], color=_SENT[what], label=_SENT_WORDS[what])
    )
  return handles


def _rgb(color: str) -> tuple[float, ...]:
  return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _unwritable(path: str, error: Exception) -> OptionError:
  return OptionError(
    "out", f"{path}: {error}", "a folder to write in", "choose another"
  )
