"""The flags of launch.plan: each with the sub-commands that take it.

A sub-command refuses the flags of the others and leaves them out of its --help.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from ringjax.kv import KINDS
from ringjax.ops.attention.cost import call_shape
from ringjax.parallel import chips
from ringjax.plan import cost
from ringjax.plan.flexgen import offload_costs, offload_tiers
from ringjax.plan.systems import allreduce_hops

from ..shared import common
from ..shared.flag_helpers import FlagHelper
from . import aot, capacity, cycles, strategies

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()

# Name, kind, default, sub-commands and help of each flag; then the least
# number, or the choices.
_FLAGS: tuple[tuple[Any, ...], ...] = (
  ("profile", "text", "llama7b-a100", "kvr",
   "Name of a profile, or path of its file."),
  ("context", "whole", 10240, "kvr", "Tokens of the prompt."),
  ("ranks", "whole", 4, "kvr", "Devices that read the prompt."),
  ("bandwidth", "number", 300e9, "kvr window serve which routes",
   "Link bandwidth (bytes/s); window: default 37.5e6; serve: of a device to "
   "another node, default as the chip's; which, routes: of an instance to "
   "others; routes: default 50e9.",
   0.0),
  ("latency", "number", 0.0, "kvr window",
   "Latency of a message (s); window: of a link, default 0.001.", 0.0),
  ("tile", "whole", 1, "kvr", "Partitions are multiples of so many tokens."),
  ("prefix", "whole", 0, "kvr", "Tokens before, whose keys every rank has.", 0),
  ("window", "whole", None, "kvr explain aot window",
   "Keys that a query sees; default: all; window: as of launch.generate, "
   "blocks of weights in memory on each device, default 4; 0: all.", 0),
  ("credits", "whole", None, "kvr",
   "Layers buffered per link; default: no limit."),
  ("kernel", "enum", None, "kvr",
   "Which pairs attention computes; default: as the profile says.",
   cost.KERNELS),
  ("noise", "number", 0.0, "kvr",
   "In each layer one link is slower by this, e.g. 20.", 0.0),
  ("seed", "whole", 0, "kvr serve elastic which routes",
   "Random seed of --noise; serve: of made-up requests; elastic: of lengths "
   "and arrivals.", 0),
  ("least_gain", "number", 0.05, "kvr",
   "Part of the time that twice the ranks must save.", 0.0),
  ("table", "text", None, "kvr", "File of partitions to look up."),
  ("save_table", "boolean", False, "kvr",
   "Search partitions and write them to --table."),
  ("plot", "output", None, "kvr explain aot capacity offload serve",
   "PNG to draw the result in (needs matplotlib)."),
  ("json", "boolean", False,
   "kvr explain fit pictures aot cache capacity cycles offload "
   "window ring serve elastic fastdecode liger which routes",
   "One JSON object on stdout, and nothing else."),
  ("why", "boolean", False, "kvr", "Print the reasons for the choice."),
  ("paper", "boolean", False, "kvr offload",
   "Print every published row beside ours."),
  ("fit", "boolean", False, "kvr", "Measure this machine, store a profile."),
  ("preset", "text", None, "kvr",
   "--fit: the model's sizes; see rj.models.PRESETS."),
  ("name", "text", None, "kvr fit",
   "Name of the stored profile (with --fit) or machine; default: the "
   "hardware's."),
  ("tokens", "texts", None, "kvr explain fit aot cache",
   "Tokens of the sequence; kvr --fit, fit: of each measured call, e.g. "
   "256,512."),
  ("layers", "whole", 2, "kvr aot fastdecode liger",
   "Layers of the model; kvr --fit: to measure; fastdecode: default 32; liger: "
   "default 10."),
  ("rounds", "whole", 5, "kvr fit offload",
   "Timed runs of each call; kvr: of --fit; offload: of --machine=here."),
  ("dtype", "text", None, "kvr explain fit aot cache capacity cycles "
   "window serve routes",
   "Dtype of the computation; kvr --fit: of the weights; window: of a preset "
   "also of its files."),
  ("out", "path", None, "fit pictures capacity offload",
   "fit, offload: file of the measured machine; pictures: folder for the PNGs, "
   "default docs/strategies; capacity: path of the table, without its ending."),
  ("bytes", "texts", None, "fit", "Sizes of sends, e.g. 65536,1048576."),
  ("sides", "texts", None, "fit", "Sides of square matrices, e.g. 256,512."),
  ("chip", "text", None, "explain cache serve routes",
   "Name of a machine; explain, serve: or path of its file; cache: default "
   "v5e; serve: default a100."),
  ("shards", "texts", None, "explain",
   "Devices of a sequence; or groups,devices."),
  ("batch", "whole", 1, "explain aot cache", "Examples on a device."),
  ("heads", "whole", 32, "explain aot cycles", "Query heads on a device."),
  ("kv_heads", "whole", 8, "explain aot cycles", "Heads of keys and values."),
  ("head_dim", "whole", 128, "explain aot cycles",
   "Dimension of queries and keys."),
  ("value_dim", "whole", None, "explain",
   "Dimension of values; default: --head_dim."),
  ("keys", "whole", None, "explain", "Tokens of keys; default: --tokens."),
  ("offset", "whole", 0, "explain", "Position of the first query.", 0),
  ("causal", "boolean", True, "explain aot", "Whether attention is causal."),
  ("backward", "boolean", True, "explain aot cycles", "With gradients."),
  ("layout", "enum", None, "explain", "Layout of the tokens; default: each.",
   list(strategies.LAYOUTS)),
  ("wire", "enum", None, "explain",
   "Wire format of keys and values that is compared too.",
   call_shape.WIRES),
  ("local", "enum", None, "explain",
   "The local algorithm; default: what the machine has.", chips.LOCALS),
  ("packed", "boolean", False, "explain aot", "Whether documents are packed."),
  ("longest_document", "whole", None, "explain", "Its tokens, if known."),
  ("model", "texts", None, "aot cache capacity offload window serve routes",
   "Presets, see rj.models.PRESETS; aot, offload, window, serve: one, or a "
   "folder with a config.json; offload, serve: or one of "
   f"{', '.join(offload_tiers.OPT)}; cache: some, or folders."),
  ("machine", "text", None, "offload",
   f"Name of a machine, of {', '.join(offload_tiers.MACHINES)}, path of a "
   "measured one, or here, which measures this one; default: t4."),
  ("prompt", "whole", 512, "offload window serve fastdecode which routes",
   "Tokens of each row's prompt; serve, which: on average; fastdecode: "
   "default 0."),
  ("new", "whole", 32, "offload window serve fastdecode which routes",
   "Tokens that each row generates; serve, which: on average; "
   "fastdecode: default "
   "256."),
  ("form", "enum", "code", "offload",
   "How times overlap: as in the paper, or as in its released cost model.",
   offload_costs.FORMS),
  ("working", "enum", None, "offload",
   "What of a layer's steps is in memory at once; default: the largest with "
   "--form=paper, their sum with code.", offload_costs.WORKING),
  ("weight_bits", "enum", "16", "offload", "Bits of a weight.", ("16", "4")),
  ("cache_bits", "enum", "16", "offload", "Bits of the cache.", ("16", "4")),
  ("host_attention", "boolean", True, "offload",
   "Whether the host attends to the cache that is not on the device."),
  ("policy", "text", None, "offload",
   "Block ROWSxBATCHES, e.g. 32x8, to place what is in it; or with a "
   "placement, e.g. 48x3:20/80,0/100,0/100, to reckon with it."),
  ("most_rows", "whole", None, "offload", "Rows of a block at most."),
  ("device_gb", "number", None, "offload", "Device memory, 10^9 bytes.", 0.0),
  ("host_gb", "number", None, "offload", "Host memory, 10^9 bytes.", 0.0),
  ("disk_gb", "number", None, "offload", "Space on disk, 10^9 bytes.", 0.0),
  ("usable", "number", None, "offload",
   "Part of each memory that may be filled; default: as the machine says."),
  ("folder", "text", None, "offload",
   "--machine=here: where a file is written and read; default: here."),
  ("workloads", "texts", None, "elastic",
   "How lengths are drawn: zipf:EXPONENT, mixed, or mixed:TOKENS for prompts "
   "that are cut; default: several."),
  ("share", "number", 0.9, "elastic", "Of the requests, served in time.", 0.0),
  ("processes", "whole", None, "window",
   "As of launch.generate: devices that have some heads and columns of each "
   "layer; default: 8, or as many as --shares."),
  ("shares", "texts", None, "window",
   "As of launch.generate: how much of the model each device gets, as 3,2,2,1; "
   "default: the same."),
  ("measured", "text", None, "window",
   "The --log of launch.generate --window, of the same model and shares: its "
   "seconds of each block's read, product and sum in place of rates."),
  ("flops", "texts", ["50e9"], "window",
   "FLOP/s of a device; one for all, or one of each."),
  ("memory_rate", "texts", ["10e9"], "window",
   "Bytes/s of a device's memory; one for all, or one of each."),
  ("disk_rate", "texts", ["2e9"], "window",
   "Bytes/s of a device's disk; one for all, or one of each."),
  ("retain", "whole", None, "window",
   "As of launch.generate: of so many feedforwards one stays on the device."),
  ("reduce", "enum", "star", "window", "How partial results are added up.",
   allreduce_hops.REDUCES),
  ("graph", "text", None, "window",
   "File of devices, switches and links; default: all behind one switch."),
  ("megabytes", "whole", 256, "offload",
   "--machine=here: MiB of that file, and of copies."),
  ("every", "whole", None, "fastdecode",
   "Steps from a start of sequences to the next; default: 16."),
  ("answer_seconds", "number", 60.0, "fastdecode",
   "The longest time of an answer.", 0.0),
  ("fixed_seconds", "number", 1e-3, "fastdecode",
   "A layer's weights' part, whatever the rows.", 0.0),
  ("row_seconds", "number", 1e-5, "fastdecode",
   "A layer's weights' part, for each row.", 0.0),
  ("token_seconds", "number", 2e-6, "fastdecode",
   "Attention of a layer to a cached token on one CPU.", 0.0),
  ("cpu_tokens", "whole", None, "fastdecode",
   "Tokens that a CPU's memory holds in all layers; default: any number."),
  ("product_seconds", "number", 3.0, "liger", "Products of a layer.", 0.0),
  ("send_seconds", "number", 2.0, "liger", "Collectives of a layer.", 0.0),
  ("at_once", "whole", 2, "liger", "Requests that are there at once."),
  ("factor", "number", 0.8, "liger", "Part of a window that is planned.", 0.0),
  ("pieces", "whole", 8, "liger", "Into which products are cut."),
  ("product_slowdown", "number", 1.0, "liger",
   "How much longer products take beside collectives.", 1.0),
  ("send_slowdown", "number", 1.0, "liger",
   "How much longer collectives take beside products.", 1.0),
  ("how_summed", "enum", None, "aot",
   "--what=pair: sums over the axis model as sends, as the compiler makes "
   "them, or so for one prompt alone; default: split.",
   ("split", "summed", "one")),
  ("topology", "text", None, "aot",
   "The slice or GPUs, e.g. v5p:4x4x8, v5e:16x16 or h100:8."),
  ("what", "enums", None, "aot capacity cycles",
   "aot: which program (pair: two prompts at once); capacity: train, "
   "prefill; cycles: attention, decode, shared, product.",
   (*aot.WHAT, "shared", "product")),
  ("strategy", "many", None, "aot capacity",
   f"Strategy of attention, of {','.join(aot.STRATEGIES)}."),
  ("remat", "text", None, "aot capacity",
   "What is kept of a layer; see train.remat."),
  ("optimizer", "text", None, "aot capacity",
   "Optimizer of training; default: adamw."),
  ("moments", "enum", None, "aot capacity",
   "How the optimizer's moments are stored between steps of training; "
   "default: float32.", ("float32", "int8")),
  ("moments_in", "enum", None, "aot capacity",
   "Memory of the optimizer's moments between steps of training; default: "
   "device.", ("device", "host")),
  ("shard", "text", None, "aot capacity",
   "Mesh axis that cuts weights; default: seq; or none."),
  ("experts", "text", None, "aot",
   "Mesh axis that shards the experts of a mixture; default: none."),
  ("accumulate", "whole", None, "aot",
   "Micro-batches of a step of training."),
  ("block", "whole", None, "aot capacity",
   "Tokens of a step of the feedforward."),
  ("cache", "text", None, "aot capacity cycles cache window",
   "cache: the kind to explain; "
   "aot --what=prefill, decode or verify, capacity --what=prefill, cycles "
   "--what=decode: how keys and values are stored, "
   f"{', '.join(KINDS)}; with options as NAME:key=value,key=value; "
   "default: dense; window: as of launch.generate, default windowed."),
  ("weights", "text", None, "aot",
   "--what=prefill, decode or verify: where layers' weights are, host, or "
   "fractions as device=.5,host=.5; default: on the devices."),
  ("coded_bits", "enum", None, "aot",
   "--what=prefill, decode or verify: bits of the codes that replace the "
   "weights of linear maps; default: floats.", ("8", "4")),
  ("cache_placement", "text", None, "aot",
   "--what=prefill, decode or verify: the same of their keys."),
  ("chunk", "whole", None, "aot",
   "--what=prefill: reads the last so many tokens, after the others."),
  ("drafted", "whole", None, "aot",
   "--what=verify: drafted tokens of a row; default: 8."),
  ("tree", "boolean", False, "aot",
   "--what=verify: the draft is a tree, not a chain."),
  ("loss_block", "whole", None, "aot capacity",
   "Tokens of a step of the head."),
  ("qk_clip", "number", None, "aot",
   "--what=train: largest attention logit that a head keeps; default: no "
   "bound.", 0.0),
  ("queries", "whole", None, "cycles",
   "cycles --what=decode: tokens of a call, those of a draft too; "
   "--what=product: rows of the product."),
  ("q_block", "whole", None, "aot cycles", "Queries of a tile of attention."),
  ("kv_block", "whole", None, "aot cycles", "Keys of a tile of attention."),
  ("order", "enum", None, "aot",
   "Order of devices: a ring of neighbours, or as they are listed.",
   ("ring", "listed")),
  ("simulate", "boolean", False, "aot",
   "Compiles a second time, with the compiler's simulator of operations."),
  ("hlo", "output", None, "aot", "File for the scheduled program's text."),
  ("buffers", "whole", None, "aot",
   "List so many of the largest buffers, as the compiler placed them; default: "
   "8 of a program that does not fit."),
  ("limit", "number", None, "aot",
   "Part of a step that may wait for sends.", 0.0),
  ("search", "boolean", False, "aot", "Try meshes, layouts, remat and tiles."),
  ("tries", "whole", 12, "aot", "--search: programs to compile at most."),
  ("timeout", "number", 3600.0, "aot capacity cycles ring",
   "Seconds for a program.", 1.0),
  ("compile", "boolean", False, "ring",
   "Also compile for the slices that the TPU compiler knows; takes minutes."),
  ("slices", "texts", None, "capacity",
   f"Some of {','.join(capacity.SLICES)}; default: all."),
  ("jobs", "whole", 1, "capacity", "Programs to compile at a time."),
  ("chips", "texts", None, "cycles",
   f"Some of {','.join(cycles.SLICES)}; default: all."),
  ("cluster", "text", "1x8", "serve", "NODESxDEVICES, e.g. 4x8."),
  ("slo", "text", "ttft=0.5,tpot=0.1,share=0.9", "serve which",
   "Seconds to the first token and for each later one, and the part of the "
   "requests that has to meet both."),
  ("rate", "number", None, "serve routes",
   "Requests a second to place for; default: what the whole cluster can do.",
   0.0),
  ("trace", "text", None, "serve routes",
   "Requests of a file: Azure's or BurstGPT's .csv, Mooncake's .jsonl; its "
   "gaps are scaled. Default: Poisson arrivals of --prompt and --new."),
  ("requests", "whole", 500, "serve elastic which routes",
   "Requests of a simulation; of --trace the first ones."),
  ("spread", "number", 0.5, "serve which routes",
   "Standard deviation of the logarithms of made-up lengths.", 0.0),
  ("times", "text", None, "serve routes",
   "Times of calls: .csv of measured ones, to which seven constants are "
   "fitted, or .json, a profile of DistServe; default: predicted for --chip."),
  ("capacities", "text", None, "serve",
   "With a profile: .csv of the cache's tokens by model, tp, pp."),
  ("rules", "enum", "ringjax", "serve",
   "Whose simulator: distserve batches as that one does and moves caches in "
   "no time; it needs a profile.", ("ringjax", "distserve")),
  ("stream", "whole", 0, "serve",
   "Parts of a prompt's cache that leave while it is read: as many as the "
   "model has layers, for example; 0: it leaves when all has been read.", 0),
  ("prefill_tokens", "whole", 2048, "serve which",
   "Tokens of prompts that are read at once; a longer prompt is read alone."),
  ("shared", "whole", 0, "which routes",
   "Tokens of a document with which each prompt begins, beside --prompt.", 0),
  ("documents", "whole", 1, "which routes", "How many documents there are."),
  ("instances", "text", "8x8", "routes",
   "READERSxANSWERERS: how many read prompts, and how many answer."),
  ("tensor", "whole", 8, "routes", "Devices of an instance."),
  ("prefix_tokens", "whole", 3_000_000, "routes",
   "Tokens of prompts that an instance keeps for later ones.", 0),
  ("policies", "many", None, "routes",
   "A policy as of launch.serve, such as conductor:threshold=2 (repeat the "
   "flag for others); default: each that predicts."),
  ("replan", "number", None, "serve",
   "Seconds of a window of the requests as they come, or at --rate: where the "
   "load has drifted place anew, and let instances change their roles.",
   0.0),
  ("timeline", "output", None, "serve",
   "PNG of the calls and loads of the best placement (needs matplotlib)."),
)  # fmt: skip
# Flags of `launch.shared.common`.
_COMMON_FLAGS = dict.fromkeys(
  ("devices", "coordinator", "num_processes", "process_id", "distributed",
   "init_timeout"), "fit",
) | {"mesh": "fit aot"}  # fmt: skip
_COMMANDS = {row[0]: row[3].split() for row in _FLAGS} | {
  name: commands.split() for name, commands in _COMMON_FLAGS.items()
}


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  definers: dict[str, Any] = {
    "enum": flags.DEFINE_enum,
    "enums": flags.DEFINE_multi_enum,
    "many": flags.DEFINE_multi_string,
  }
  for name, kind, default, commands, words, *bounds in _FLAGS:
    words = f"{commands.replace(' ', ', ')}: {words}"
    if kind in definers:
      definers[kind](name, default, *bounds, words, flag_values=values)
    else:
      getattr(new, kind)(name, default, words, *bounds)
  common.define(values)


def defined() -> dict[str, flags.Flag]:
  """The flags of this script alone, by name."""
  values = flags.FlagValues()
  define(values)
  return {name: values[name] for name in values}


def refused(command: str) -> list[str]:
  """The flags that a sub-command refuses."""
  return [name for name in defined() if command not in _COMMANDS[name]]
