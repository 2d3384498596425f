"""A codec for each KV head of each layer.

Guarantees: a head's keys and values are those that a cache of its codec alone
would give; which codec it has is part of the program, not data.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree

from ringjax.errors import OptionError
from ringjax.kv.codecs.codec import Codec

if TYPE_CHECKING:
  from ringjax.kv.layer_spec import LayerCacheSpec

# File that `allocate_bits` writes next to a model.
BITS_FILE = "kv_bits.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerHead:
  """A codec for each KV head of each layer.

  Attributes:
    codecs: Codecs that heads have; all of keys before their rotation, or none.
    which: Number of each KV head's codec, by layer of the model; () for layers
      without keys.
    source: File of the table, or "".
    loss: Loss that it adds, in nats a token, if it was measured, or None.
  """

  codecs: tuple[Codec, ...]
  which: tuple[tuple[int, ...], ...]
  source: str = dataclasses.field(default="", compare=False)
  loss: float | None = dataclasses.field(default=None, compare=False)

  def without_weights(self) -> PerHead:
    """Codecs of the same bytes, without their calibrations."""
    codecs = tuple(codec.without_weights() for codec in self.codecs)
    return dataclasses.replace(self, codecs=codecs)

  def __post_init__(self) -> None:
    if not self.codecs or not all(isinstance(x, Codec) for x in self.codecs):
      raise OptionError(
        "codecs",
        repr(self.codecs),
        "a tuple of one rj.kv.Codec or more",
        "pass codecs=(rj.kv.KINDS['hadamard4'].codec, ...)",
      )
    used = {n for layer in self.which for n in layer}
    all_ints = all(type(n) is int for n in used)
    if not used or not all_ints or not used <= {*range(len(self.codecs))}:
      raise OptionError(
        "which",
        f"{sorted(used, key=str)}"[:80],
        f"for each layer and KV head an int from 0 to {len(self.codecs) - 1}",
        "pass which=((0, 1), (1, 1)) for two layers of two heads, for instance",
      )
    if len({x.unrotated for x in self.codecs}) > 1:
      named = lambda rotated: ", ".join(
        type(x.keys).__name__ for x in self.codecs if x.unrotated != rotated
      )
      raise OptionError(
        "codecs",
        f"keys before their rotation ({named(False)}) and after it "
        f"({named(True)})",
        "codecs that are all of one sort, for a layer rotates its keys once",
        "take codecs of the same name with other bits",
      )

  @property
  def unrotated(self) -> bool:
    """Whether keys are encoded as they are before their rotation."""
    return self.codecs[0].unrotated

  @property
  def digest(self) -> str:
    """Digest of the codecs and the table."""
    text = f"{self.codecs} {self.which}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def __repr__(self) -> str:
    count = collections.Counter(n for layer in self.which for n in layer)
    heads = ", ".join(f"{count[n]}" for n in range(len(self.codecs)))
    return (
      f"PerHead({heads} heads of its {len(self.codecs)} codecs, {self.digest})"
    )

  def table(self, shape: LayerCacheSpec) -> tuple[tuple[int, ...], ...]:
    """Numbers of the heads' codecs in a kind of layers, [L, K].

    Args:
      shape: Cache of one of these layers.

    Raises:
      OptionError: If the table is of another model.
    """
    last = max(shape.which, default=len(self.which))
    rows = () if last >= len(self.which) else shape.which
    table = tuple(self.which[n] for n in rows)
    if not table or any(len(row) != shape.heads for row in table):
      raise OptionError(
        "which",
        f"a table of {len(self.which)} layers, with "
        f"{sorted({len(row) for row in self.which})} KV heads",
        f"that of this model: {shape.heads} KV heads in the layers "
        f"{', '.join(map(str, shape.which)) or 'of its kinds'}"[:120],
        "allocate bits for this model with rj.kv.allocate_bits",
      )
    return table

  def constants(self, number: int, shape: LayerCacheSpec) -> tuple[Any, ...]:
    """Constants of each codec for its heads, [n, g, x]."""
    places = HeadPlaces.of(self, shape)
    of_heads = lambda part, way: tuple(x[places.index(way)] for x in part)
    return tuple(
      tuple(
        of_heads(part, way)
        for part in self.codecs[way].constants(number, shape)
      )
      for way in places.ways
    )

  def constant_shapes(self, shape: LayerCacheSpec) -> tuple[Any, ...]:
    """Shapes of `constants`, which are float32."""
    places = HeadPlaces.of(self, shape)

    def head_shapes(part: PyTree, way: int) -> tuple[tuple[int, ...], ...]:
      lead = places.count(way), places.group
      return tuple((*lead, *x[2:]) for x in part)

    return tuple(
      tuple(
        head_shapes(part, way)
        for part in self.codecs[way].constant_shapes(shape)
      )
      for way in places.ways
    )

  def for_model(self, load: Callable[[Any], Any]) -> PerHead:
    """Reads the calibrations of a model by `load`."""
    codecs = tuple(codec.for_model(load) for codec in self.codecs)
    return dataclasses.replace(self, codecs=codecs)

  def options(self) -> dict[str, Any]:
    """Options that text can set: none."""
    return {}

  def with_options(self, options: dict[str, Any]) -> PerHead:
    """Returns the codec unchanged."""
    del options
    return self


@dataclasses.dataclass(frozen=True)
class HeadPlaces:
  """Places of the heads of a kind of layers, in an array for each codec.

  Attributes:
    group: Number of heads that have the same codec in each layer and stay
      together, g.
    ways: Numbers of the codecs that occur.
    way: Index into `ways` of each group's codec, [L, K / g].
    row: Index of each group among the groups of its codec, [L, K / g].
  """

  group: int
  ways: tuple[int, ...]
  way: tuple[tuple[int, ...], ...]
  row: tuple[tuple[int, ...], ...]

  @classmethod
  def of(cls, codec: PerHead, shape: LayerCacheSpec) -> HeadPlaces:
    """Places for a kind of layers."""
    table, heads = codec.table(shape), shape.heads
    alike = lambda g: all(
      len({*layer[n : n + g]}) == 1
      for layer in table
      for n in range(0, heads, g)
    )
    group = max(g for g in range(1, heads + 1) if not heads % g and alike(g))
    ways = tuple(sorted({n for layer in table for n in layer}))
    seen: collections.Counter[int] = collections.Counter()
    way, row = [], []
    for layer in table:
      way.append(tuple(ways.index(n) for n in layer[::group]))
      row.append([])
      for n in way[-1]:
        row[-1].append(seen[n])
        seen[n] += 1
    return cls(group, ways, tuple(way), tuple(map(tuple, row)))

  def count(self, way: int) -> int:
    """Number of groups that have a codec."""
    number = self.ways.index(way)
    return sum(layer.count(number) for layer in self.way)

  def index(self, way: int) -> tuple[Any, Any]:
    """Layers [n, 1] and heads [n, g] of the groups that have a codec."""
    number, layers, heads = self.ways.index(way), [], []
    for n, layer in enumerate(self.way):
      for m, codec_number in enumerate(layer):
        if codec_number == number:
          layers.append([n])
          heads.append([m * self.group + i for i in range(self.group)])
    return layers, heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocated:
  """Codecs of heads from a file, see `rj.kv.allocate_bits`.

  Attributes:
    table: File, or the folder that has it.
  """

  table: str | None = None
  unrotated: bool = dataclasses.field(default=False, init=False)

  def without_weights(self) -> PerHead:
    """Refuse: which head has which codec is known of a model's weights.

    Raises:
      OptionError: Always.
    """
    raise OptionError(
      "cache",
      "bits by head from a file, which is of a model with weights",
      "one codec for all heads, for no weights are read here",
      "load the model and print model.init_cache(1, N, kind=...).explain()",
    )

  def check_file(self) -> None:
    """Refuses a table that has no file.

    Raises:
      OptionError: If there is no table, or its file is missing.
    """
    path = self._path()
    if not path.is_file():
      raise self._without_table(f"{path}, which does not exist")

  def for_model(self, load: Callable[[Any], Any]) -> PerHead:
    """Reads the heads' codecs from the file by `load`."""
    return load(str(self._path())).kind.codec

  def _path(self) -> pathlib.Path:
    """File of the table."""
    if self.table is None:
      raise self._without_table("none")
    path = pathlib.Path(self.table)
    return path if path.suffix == ".json" else path / BITS_FILE

  def _without_table(self, got: str) -> OptionError:
    """Error for a table that is missing."""
    return OptionError(
      "table",
      got,
      "the file that says which codec each head has",
      "name its folder, e.g. allocated:table=DIR; to make one: python -m "
      "launch.calibrate --model=DIR --text=FILE --bits=3.2",
    )

  def options(self) -> dict[str, Any]:
    """Options that text can set, by name."""
    return {"table": self.table}

  def with_options(self, options: dict[str, Any]) -> Allocated:
    """Replaces options by other values."""
    return Allocated(table=options.get("table", self.table))


# How a cache stores keys and values in fewer bytes.
CacheCodec = Codec | PerHead | Allocated
