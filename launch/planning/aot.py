"""The sub-command aot of launch.plan, which compiles without TPUs or GPUs.

It compiles one program, or with --search several, and reports its memory, its
sends and the work that hides them. For the largest contexts see
`launch.planning.capacity`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from ringjax.checks import one_of
from ringjax.errors import OptionError, RingjaxError
from ringjax.kv import kind_text
from ringjax.ops.attention.strategies import registry
from ringjax.parallel import chips
from ringjax.plan import draw
from ringjax.plan.compiler import aot, overlap
from ringjax.plan.compiler.aot import Compiled
from ringjax.plan.compiler.target import GpuTarget, TpuTarget, target
from ringjax.plan.compiler.time_range import NOTE, TimeRange

from ..shared import common, console
from . import strategies

NAME = "plan"
# Sizes of the mesh axis over heads that a search tries.
_HEADS = (1, 2, 4)
WHAT = ("train", "prefill", "pair", "decode", "verify", "attention")
STRATEGIES = (*registry.NAMES, "plain")
BUILDERS = "ringjax.bench.steps"
# Default meshes of programs that do not shard the sequence.
_MESHES = {"pair": "model:-1"}


_OF_ATTENTION = ("heads", "kv_heads", "head_dim", "causal", "window", "packed",
                 "backward")  # fmt: skip
_OF_MODEL = ("model", "shard", "experts", "layers")
_OF_PLACES = ("weights", "coded_bits", "cache", "cache_placement")
_OF_TILES = ("strategy", "q_block", "kv_block")
# Options of a program in addition to those of all programs.
_OPTIONS = {
  "train": (*_OF_MODEL, *_OF_TILES, "remat", "optimizer", "moments",
            "moments_in", "accumulate", "block", "loss_block", "qk_clip"),
  "prefill": (*_OF_MODEL, *_OF_TILES, *_OF_PLACES, "block", "chunk"),
  "pair": (*_OF_MODEL, "block", "how_summed"),
  "decode": (*_OF_MODEL, *_OF_PLACES),
  "verify": (*_OF_MODEL, *_OF_PLACES, "drafted", "tree"),
  "attention": (*_OF_ATTENTION, *_OF_TILES),
}  # fmt: skip


# ---------------------------------------------------------------------------
# One program
# ---------------------------------------------------------------------------


def compile_one(
  values: flags.FlagValues, stdout: TextIO, stderr: TextIO
) -> None:
  """Compiles a program and prints its report; with --search several."""
  common.check_plot(values)
  program = _single_value(values, "what") or "train"
  one_of("--what", program, WHAT)
  topology = _required_value(values, "topology", "v5p:4x4x8")
  aim = target(topology)
  options = _options(values, program)
  screen = console.Screen(NAME, stderr)
  if values.search:
    # These flags are about one program, and a search compiles several.
    strategies.refuse(
      values, "--search", ("plot", "hlo", "limit", "simulate", "buffers")
    )
    if isinstance(aim, GpuTarget):
      raise OptionError(
        "--search",
        topology,
        "a TPU slice: the search ranks programs by the compiler's cycles",
        "leave --search out, and compile one program at a time",
      )
    aot.require()
    _search(values, program, topology, options, screen, stdout)
    return
  screen.say(f"compiling {program} for {topology}; this may take minutes")
  compiled = aot.compile(
    f"{BUILDERS}:{program}",
    topology,
    options,
    timeout_s=values.timeout,
    text_path=values.hlo,
    code=isinstance(aim, TpuTarget),
    simulate=values.simulate,
    buffers=values.buffers,
  )
  limit = overlap.LIMIT if values.limit is None else values.limit
  strategies.put(values, stdout, compiled.record(), words(compiled, limit))
  if values.plot is not None:
    if compiled.report is None:
      why = "the program does not fit"
      if compiled.memory is not None:
        why = f"the compiler states no times for {topology}"
      screen.say(f"nothing to draw: {why}")
    else:
      draw.schedule(compiled.report, values.plot, _title(compiled))
      screen.say(f"wrote {values.plot}")


def _single_value(values: flags.FlagValues, name: str) -> Any:
  """The value of a flag that may hold several, of which one is allowed."""
  items = values[name].value
  if not items:
    return None
  if len(items) > 1:
    raise OptionError(
      f"--{name}", ",".join(items), "one", "leave the others out"
    )
  return items[0]


def _required_value(values: flags.FlagValues, name: str, example: str) -> Any:
  """The value of a required flag."""
  value = values[name].value
  if value in (None, []):
    raise OptionError(
      f"--{name}", "nothing", "a value", f"pass e.g. --{name}={example}"
    )
  return value


def _options(values: flags.FlagValues, program: str) -> dict[str, Any]:
  """Options of the builder; refuses flags that the program does not take."""
  tokens = (
    strategies.ints("tokens", _required_value(values, "tokens", "1048576"))
    or ()
  )
  if len(tokens) != 1:
    raise OptionError(
      "--tokens", list(tokens), "one number", "pass --tokens=1048576"
    )
  options: dict[str, Any] = {
    "tokens": tokens[0],
    "mesh": common.axes(values.mesh or _MESHES.get(program, "seq:-1")),
    "batch": values.batch,
  }
  others = dict.fromkeys(itertools.chain.from_iterable(_OPTIONS.values()))
  refused = [name for name in others if name not in _OPTIONS[program]]
  strategies.refuse(values, f"--what={program}", refused)
  if program == "attention":
    options |= {name: values[name].value for name in _OF_ATTENTION[:6]}
    options["what"] = "backward" if values.backward else "forward"
  else:
    _required_value(values, "model", "llama-3.1-8b")
    options["model"] = config_of(_single_value(values, "model"))
    if values.shard is not None:
      options["shard"] = None if values.shard == "none" else values.shard
    if values.experts is not None:
      options["experts"] = values.experts
    if values["layers"].present:
      options["layers"] = values.layers
  strategy = _single_value(values, "strategy")
  if strategy is not None:
    options["strategy"] = named(strategy)
  for name in (
    "remat", "optimizer", "moments", "moments_in", "accumulate", "block",
    "loss_block", "qk_clip", "q_block", "kv_block", "order", "dtype",
    "how_summed", "weights", "cache_placement", "chunk", "drafted",
  ):  # fmt: skip
    if values[name].value is not None:
      options[name] = values[name].value
  if values.coded_bits is not None:
    options["coded_bits"] = int(values.coded_bits)
  if values.tree:
    options["tree"] = True
  if values.cache is not None:
    options["cache"] = str(kind_text.parse(values.cache, "--cache"))
  return options


def config_of(name: str) -> str | dict[str, Any]:
  """The name of a preset, or the config of a folder, GGUF file or fetched name.

  Raises:
    OptionError: If `name` is not one of these.
    ConfigError: If the folder's config.json is missing or not strict JSON.
  """
  # These import the models and flax, which most sub-commands don't need.
  from ringjax import fetched_models
  from ringjax.data.gguf.gguf_file import is_gguf
  from ringjax.models.gguf.gguf_folder import open_model
  from ringjax.models.hf.safe_files import read_config
  from ringjax.models.presets import PRESETS
  from ringjax.paths import as_path

  if name in PRESETS:
    return name
  folder = as_path(fetched_models.resolve(name, "--model"))
  if is_gguf(folder):
    return open_model(folder).config
  if folder.is_dir():
    return read_config(folder)
  similar = (
    difflib.get_close_matches(name, PRESETS, 6, 0) or sorted(PRESETS)[:6]
  )
  raise OptionError(
    "--model",
    f"{name}, which is no preset and no folder",
    "a folder with a config.json, or a preset as " + ", ".join(similar),
    f"pass such a folder, or one of the {len(PRESETS)} of rj.models.PRESETS",
  )


def named(name: str) -> str:
  """Checks that `name` is a strategy, with a number in place of N."""
  kind, colon, group = name.partition(":")
  form = f"{kind}:N" if group.isdecimal() and int(group) else name
  if form not in STRATEGIES or (colon and form == name):
    raise OptionError(
      "--strategy", name, f"one of {', '.join(STRATEGIES)}", "pass one of these"
    )
  return name


def _title(compiled: Compiled) -> str:
  facts = compiled.facts
  axes = ", ".join(f"{name} {n}" for name, n in facts["mesh"].items())
  model = facts.get("model")
  cache = facts.get("cache")
  return (
    f"{facts['what']}{f' of {model}' if model else ''}, "
    f"{facts['tokens']:,} tokens, {facts['strategy']}, "
    f"{f'{cache} cache, ' if cache else ''}{_host_memory_text(facts)}"
    f"{_coded_text(facts)}{_clip_text(facts)}"
    f"on {compiled.topology} "
    f"({compiled.devices} devices: {axes})"
  )


def _coded_text(facts: Mapping[str, Any]) -> str:
  bits = facts.get("coded_bits")
  return "" if bits is None else f"weights of {bits} bits, "


def _clip_text(facts: Mapping[str, Any]) -> str:
  bound = facts.get("qk_clip")
  return "" if bound is None else f"QK-clip at {bound:g}, "


def _host_memory_text(facts: Mapping[str, Any]) -> str:
  """Text on a device's bytes of weights, moments and cache in host memory."""
  parts = {
    "weights": facts.get("host_bytes", 0),
    "moments": facts.get("moments_host_bytes", 0),
    "cache": facts.get("cache_bytes", {}).get("host", 0),
  }
  phrases = [f"{console.nbytes(n)} of {k}" for k, n in parts.items() if n]
  return f"{' and '.join(phrases)} in host memory, " if phrases else ""


def words(found: Compiled, limit: float = overlap.LIMIT) -> list[str]:
  """The report of a program, in lines of text."""
  size = console.nbytes
  versions = ", ".join(f"{k} {v}" for k, v in found.versions.items())
  lines = [
    _title(found),
    f"compiled in {found.compile_s:.0f} s, traced in {found.trace_s:.0f} s "
    f"({versions})",
    "",
  ]
  if found.memory is None:
    return [*lines, *_too_large(found)]
  memory = found.memory
  lines += [
    f"fits: {size(memory.total)} of {size(memory.limit)} "
    f"({100 * memory.total / memory.limit:.0f} %) on each device",
    f"  arguments {size(memory.arguments)}, outputs {size(memory.outputs)} "
    f"(of them in place {size(memory.aliased)}), temporaries "
    f"{size(memory.temporaries)}, code {size(memory.code)}",
  ]
  moved = found.traffic
  if moved is not None:
    lines.append(
      f"  reads {size(moved.read)} and writes {size(moved.written)}"
      + _times_least(found, moved.total)
    )
  if found.traffic_error is not None:
    unknown = "bytes moved" if moved is None else "times"
    lines.append(f"  {unknown} are unknown: {found.traffic_error}")
  if memory.total > memory.limit:
    # The sum also counts buffers whose lifetimes do not overlap.
    lines.append("  not all of it at once: the compiler says that it fits")
  lines += _largest(found)
  report, time = found.report, found.time
  if report is None:
    return [*lines, "", *_sent(found)]
  lines += [
    "",
    f"{'sent, on each device':<22}{'times':>9}{'bytes':>12}{'links busy':>13}"
    f"{'waited':>14}",
  ]
  lines += [
    f"{collective.kind:<22}{collective.count:>9,.0f}{size(collective.nbytes):>12}"
    f"{_ms(collective.link_s):>13}{_ms(collective.waited_s):>14}"
    for collective in report.collectives
  ] or ["nothing"]
  if report.sends:
    lines += ["", *_sends(report)]
  if time is not None:
    lines += ["", *_range(time)]
    lines += ["", *(f"  {text}" for text in time.assumptions), f"  {NOTE}"]
  faults = report.faults(limit)
  lines += ["", "the ring: " + ("hidden" if report.sends else "none")]
  if faults:
    lines[-1] = "the ring: at fault"
    lines += [f"  {text}" for text in faults]
  if report.sends:
    lines.append(
      f"  {100 * report.stalled:.2f} % of the step waits for sends, "
      f"{100 * report.other_cycles / max(1.0, report.total_cycles):.2f} % for "
      "other collectives"
    )
  if report.unpriced:
    ops = ", ".join(f"{op} ({n})" for op, n in report.unpriced.items())
    lines.append(f"  without a price, in lines of the program: {ops}")
  return lines


def _sent(compiled: Compiled) -> list[str]:
  """The collectives of a program whose compiler states no times."""
  sent = compiled.sent or {}
  return [
    f"{'sent, on each device':<22}{'bytes':>12}",
    *(f"{kind:<22}{console.nbytes(n):>12}" for kind, n in sent.items()),
    *([] if sent else ["nothing"]),
    "",
    f"no times: the compiler states none for {compiled.topology}; without a "
    "GPU it calls no cuDNN, so that XLA's loops attend",
  ]


def _times_least(compiled: Compiled, moved: float) -> str:
  """The bytes of a step over those that it must move, as text, or ""."""
  least_bytes = compiled.facts.get("least_bytes")
  if not least_bytes:
    return ""
  return (
    f", {moved / least_bytes:,.2f} times {console.nbytes(least_bytes)}, which "
    "a step must read or write (experts chosen evenly)"
  )


def _too_large(compiled: Compiled) -> list[str]:
  size = console.nbytes
  lines = [
    f"does not fit: {size(compiled.needed_bytes)} needed, "
    f"{size(compiled.limit_bytes)} there",
  ]
  lines += _largest(compiled)
  facts = compiled.facts
  lines.append("what to change:")
  if facts.get("remat") in ("all", "attention"):
    lines.append("  --remat=nothing keeps less of each layer")
  if facts["strategy"] in ("gather", "plain"):
    lines.append("  --strategy=striped keeps one shard's keys at a time")
  if facts.get("optimizer") == "adamw":
    lines.append("  --optimizer=adafactor or lion keeps fewer moments")
  if facts.get("moments") == "float32":
    lines.append("  --moments=int8 keeps moments as codes of 8 bits")
  if facts.get("moments_in") == "device":
    lines.append("  --moments_in=host keeps moments in the host's memory")
  if facts.get("cache") == "dense":
    lines.append("  --cache=windowed keeps the window of layers that have one")
  if int(facts.get("batch", 1)) > 1 and facts["what"] == "train":
    lines.append("  --accumulate reads fewer rows at a time")
  lines.append("  fewer --tokens, or a larger slice or its seq axis")
  return lines


def _largest(compiled: Compiled) -> list[str]:
  """The largest buffers, if they were asked for or the program does not fit."""
  if not compiled.largest:
    return []
  return [
    "largest buffers:",
    *(
      (
        f"  {console.nbytes(buffer.nbytes):>10}  {buffer.shape[:60]}  "
        f"{buffer.source[-50:]}"
      ).rstrip()
      for buffer in compiled.largest
    ),
  ]


def _sends(report: overlap.OverlapReport) -> list[str]:
  clock, size = report.core.clock_hz, console.nbytes
  lines = [
    f"{'each permute':<30}{'times':>8}{'bytes':>11}{'hops':>6}"
    f"{'on its way':>12}{'work beside':>13}"
  ]
  for send in report.sends:
    state = "hidden" if send.hidden else "exposed"
    state = "synchronous" if send.synchronous else state
    name = send.name.removeprefix("collective-")
    hops = "" if send.hops is None else str(send.hops)
    lines.append(
      f"{name[:29]:<30}{send.times:>8,.0f}{size(send.nbytes):>11}"
      f"{hops:>6}{_ms(send.link_cycles / clock):>12}"
      f"{_ms(send.between_cycles / clock):>13}  {state}"
    )
  return lines


def _range(time: TimeRange) -> list[str]:
  """The least and most time of a step, and what they are made of."""
  rows = (
    ("products at the peak", time.product_s),
    ("memory, what a step needs", time.memory_s),
    ("links, the busiest way", time.link_s),
    ("memory, what XLA touches", time.touched_s),
    ("cycles of the operations", time.core_s),
    ("sum without any overlap", time.most_s),
  )
  lines = [
    f"a step takes between {_ms(time.least_s)} and {_ms(time.most_s)}",
    f"  no program of this step takes less than {_ms(time.floor_s)}: "
    f"{time.bound}",
    *(f"  {name:<26}{_ms(seconds):>12}" for name, seconds in rows),
    f"  {100 * time.covered:.0f} % of the sum is of operations whose machine "
    "code was counted",
  ]
  if time.open:
    names = ", ".join(time.open[:4])
    lines.append(
      f"  {len(time.open)} operations have a loop of unknown length, which "
      f"counts once: {names}"
    )
  if time.operations:
    lines += ["", f"{'most above their floor':<40}{'times':>8}{'above':>13}"]
    lines += [
      f"{operation.name[:39]:<40}{operation.times:>8,.0f}"
      f"{_ms(operation.above_s):>13}  {operation.source[-60:]}"
      for operation in time.operations
    ]
  return lines


def _ms_or_unknown(seconds: float | None) -> str:
  return "unknown" if seconds is None else _ms(seconds)


def _ms(seconds: float) -> str:
  if seconds >= 10:
    return f"{seconds:,.1f} s"
  return f"{1e3 * seconds:,.3f} ms"


# ---------------------------------------------------------------------------
# Several
# ---------------------------------------------------------------------------


def candidates(
  what: str, devices: int, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
  """Yields options to try that do not change the result of the program.

  Options that the caller fixed stay. Meshes have a data axis that the batch
  fills and an axis of heads; the rest of the devices are the ring. Tiles of
  attention are not tried: each kernel chooses its tiles.
  """
  batch = int(options["batch"])
  axes = dict(options["mesh"])
  if len(axes) > 1 or -1 not in axes.values():
    meshes = [options["mesh"]]
  else:
    head_counts = _HEADS if what != "attention" else (1,)
    meshes = [
      [("data", n), ("seq", devices // n // m), *([("model", m)] * (m > 1))]
      for m in head_counts
      for n in range(1, batch + 1)
      if devices % (n * m) == 0 and batch % n == 0
    ]
  choices: dict[str, Sequence[Any]] = {
    "mesh": meshes,
    "strategy": ("striped", "zigzag", "ring"),
    "remat": ("attention", "nothing", "all"),
    "block": (2048, 1024),
    "loss_block": (1024, 2048),
  }
  choices = {
    name: (options[name],) if name in options and name != "mesh" else values
    for name, values in choices.items()
    if name in ("mesh", *_OPTIONS[what])
  }
  # Candidates that change one option first, then combinations.
  names = list(choices)
  grids = itertools.product(*(range(len(choices[name])) for name in names))
  for picks in sorted(grids, key=lambda picks: (sum(map(bool, picks)), picks)):
    chosen = {
      name: choices[name][i] for name, i in zip(names, picks, strict=True)
    }
    yield {k: v for k, v in chosen.items() if v is not None}


def _search(
  values: flags.FlagValues,
  program: str,
  topology: str,
  options: dict[str, Any],
  screen: console.Screen,
  stdout: TextIO,
) -> None:
  devices = chips.devices(topology)
  rows: list[dict[str, Any]] = []
  tries = itertools.islice(candidates(program, devices, options), values.tries)
  for number, tried in enumerate(tries):
    label = _label(tried)
    screen.say(f"{number + 1} of at most {values.tries}: {label}")
    try:
      compiled = aot.compile(
        f"{BUILDERS}:{program}",
        topology,
        options | tried,
        timeout_s=values.timeout,
        code=True,
      )
    except RingjaxError as error:
      rows.append({"options": tried, "refused": str(error)})
      continue
    time = compiled.time
    rows.append(
      {
        "options": tried,
        "fits": compiled.fits,
        "needed_bytes": compiled.needed_bytes,
        "least_s": None if time is None else time.least_s,
        "most_s": None if time is None else time.most_s,
        "stalled": None if compiled.report is None else compiled.report.stalled,
        "compile_s": compiled.compile_s,
      }
    )
  last = float("inf")
  # The sum is the same whether sends are hidden.
  rows.sort(
    key=lambda row: (row.get("most_s") or last, row.get("stalled") or 0.0)
  )
  lines = [
    f"{program} on {topology}, by the most time of a step, then by waiting",
    f"{'between':>12}{'and':>12}{'memory':>11}{'waits':>8}  options",
  ]
  for row in rows:
    label = _label(row["options"])
    if "refused" in row:
      lines.append(f"{'refused':>12}{'':31}  {label}: {row['refused'][:80]}")
    elif not row["fits"]:
      need = console.nbytes(row["needed_bytes"])
      lines.append(f"{'no room':>12}{'':12}{need:>11}{'':8}  {label}")
    else:
      lines.append(
        f"{_ms_or_unknown(row['least_s']):>12}"
        f"{_ms_or_unknown(row['most_s']):>12}"
        f"{console.nbytes(row['needed_bytes']):>11}"
        f"{100 * row['stalled']:>6.1f} %  {label}"
      )
  strategies.put(
    values, stdout, {"what": program, "tried": rows}, [*lines, NOTE]
  )


def _label(options: Mapping[str, Any]) -> str:
  parts = []
  for name, value in options.items():
    if name == "mesh":
      value = ",".join(f"{axis}:{n}" for axis, n in value)
    parts.append(f"--{name}={value}")
  return " ".join(parts) or "as given"
