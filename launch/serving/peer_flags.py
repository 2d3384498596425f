"""Flags of vLLM and SGLang: other names of flags here, or what to do instead.

`ALIASES` has those with the same meaning and unit; options of the engine have
theirs in `EngineConfig`. `REFUSED` has those of another meaning.
"""

from __future__ import annotations

from absl import flags

from ..shared.flag_helpers import FlagHelper

# Flags are those of the script that calls `define`.
flags.disclaim_key_flags()

# Flag of launch.serve, and its names in vLLM and SGLang.
ALIASES: dict[str, tuple[str, ...]] = {
  "model": ("model_path",),
  "model_name": ("served_model_name",),
  "adapters": ("lora_modules", "lora_paths"),
  "queue": ("max_queued_requests",),
  "coordinator": ("dist_init_addr",),
  "num_processes": ("nnodes",),
  "process_id": ("node_rank",),
}

_MESH = "axes of a mesh are one flag: --mesh=model:4, --mesh=seq:4"
_CACHE = "codes of keys and values are kinds of caches: --cache=float8, int8"
_WEIGHTS = "codes of weights are found by the folder's config; leave it out"
_MEMORY = "the pool has a size in tokens: --capacity=65536"
_DRAFTS = "drafts are one flag: --speculate=lookup, mtp or model:model=DIR"
_TOOLS = "calls of tools are found by the chat template; leave it out"
_PROCESSES = "processes of one engine: --coordinator, --num_processes"
_PREFIXES = "prefixes are always shared; --share says which pages"
_CHUNKS = "prompts are read in --pieces rows of --piece tokens, --budget in all"
_CODE = "no code of a model's folder is executed; leave it out"
# Flags of vLLM and SGLang that are none here, with what to do instead.
REFUSED: dict[str, str] = {
  "api_key": "keys are lines KEY TENANT of a file: --api_keys=FILE",
  "attention_backend": "kernels are chosen by the device; see RINGJAX_OFF",
  "chunked_prefill_size": _CHUNKS,
  "context_parallel_size": _MESH,
  "cpu_offload_gb": "layers in host memory: launch.generate --memory",
  "data_parallel_size": "copies of a model are instances of a router: --role",
  "disable_cuda_graph": "steps are compiled programs; leave it out",
  "disable_radix_cache": _PREFIXES,
  "distributed_executor_backend": _PROCESSES,
  "dp_size": "copies of a model are instances of a router: --role",
  "enable_auto_tool_choice": _TOOLS,
  "enable_chunked_prefill": _CHUNKS,
  "enable_lora": "adapters are named: --adapters=NAME=DIR",
  "enable_prefix_caching": _PREFIXES,
  "enforce_eager": "steps are compiled programs; leave it out",
  "ep_size": _MESH,
  "gpu_memory_utilization": _MEMORY,
  "guided_decoding_backend": "grammars are llguidance's; leave it out",
  "kv_cache_dtype": _CACHE,
  "max_lora_rank": "ranks are those of the adapters; leave it out",
  "mem_fraction_static": _MEMORY,
  "no_enable_prefix_caching": _PREFIXES,
  "num_gpu_blocks_override": _MEMORY,
  "pipeline_parallel_size": "stages read prompts: --role=prefill --stages=4",
  "pp_size": "stages read prompts: --role=prefill --stages=4",
  "quantization": _WEIGHTS,
  "seed": "a request has its own seed",
  "speculative_algorithm": _DRAFTS,
  "speculative_config": _DRAFTS,
  "speculative_draft_model_path": _DRAFTS,
  "speculative_num_draft_tokens": _DRAFTS,
  "swap_space": "rows that wait are moved to host memory: --preempt=swap",
  "tensor_parallel_size": _MESH,
  "tokenizer": "the tokenizer is that of the model's folder; leave it out",
  "tokenizer_path": "the tokenizer is that of the model's folder",
  "tool_call_parser": _TOOLS,
  "tp": _MESH,
  "tp_size": _MESH,
  "trust_remote_code": _CODE,
}


def define(new: FlagHelper) -> None:
  """Defines the other names of flags, which are defined already."""
  for name, aliases in ALIASES.items():
    new.aliases(name, aliases)


def hint(name: str) -> str | None:
  """Message about a flag of vLLM or SGLang; None for other flags."""
  name = name.replace("-", "_")
  instead = REFUSED.get(name) or REFUSED.get(name.removeprefix("no"))
  if instead is None:
    return None
  return f"--{name} of other engines is no flag here: {instead}"
