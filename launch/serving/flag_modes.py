"""Flags that each mode of launch.serve uses; all others are refused there.

A mode is what a process does: serve without a router, in one process or in
several; be a router, be an instance, be one of the processes of an instance
(stages), or ask a router. A flag that no mode
lists is refused in all of them, so that a new one can't be ignored silently.
Options of `EngineConfig` are flags but for `NO_FLAG`, and are used wherever
there is an engine.
"""

from __future__ import annotations

from typing import NamedTuple

from absl import flags

from ringjax.errors import OptionError
from ringjax.serve.engine_config import EngineConfig

from ..shared.flag_helpers import flag_name

# Options of an engine that are no flags, each with the reason.
NO_FLAG = {"dtype": "--dtype is that of the weights, which the cache has too"}
ENGINE_OPTIONS = tuple(
  name for name in EngineConfig.options() if name not in NO_FLAG
)


class Mode(NamedTuple):
  """One of the things that a process of launch.serve can be.

  Fields:
    text: Noun phrase with the flags that choose the mode.
    used: Names of the flags that the mode uses.
  """

  text: str
  used: frozenset[str]


_ENGINE = frozenset(flag_name(EngineConfig, x) for x in ENGINE_OPTIONS)
# Engine flags that have a meaning only with another flag or mode.
_ALONE = frozenset({"important"})
_INSTANCE = {"layer_parts"}
_DEVICES = {"devices", "distributed", "mesh"}
_PROCESSES = {"coordinator", "num_processes", "process_id", "init_timeout"}
_MODEL = {"model", "strict", "dtype", "longest", "rope_scaling"}
# Flags of one process of a server, or of the one that serves clients.
_SERVER = frozenset(
  {
    "admin",
    "api_keys",
    "body_bytes",
    "chat_template",
    "grace",
    "host",
    "model_name",
    "port",
    "queue",
    "reasoning_parser",
    "response_bytes",
    "stall",
  }
)
# Flags of a server that may differ in its processes: process 0 alone uses them,
# or each for its own part of a store.
MAY_DIFFER = _SERVER | {"cluster_key", "log_calls", "name", "store_bytes"}
_JOINS = {
  "cluster_key",
  "grace",
  "host",
  "join",
  "lease",
  "name",
  "port",
  "role",
  "silence",
}
# Flags of stages that all processes of the instance need.
STAGE_PASSED = frozenset(
  {
    "cache",
    "capacity",
    "cluster_key",
    "dtype",
    "init_timeout",
    "join",
    "longest",
    "page",
    "piece",
    "pieces",
    "silence",
    "strict",
  }
)
MODES = {
  "alone": Mode(
    "a server without a router",
    (_ENGINE - _INSTANCE)
    | _MODEL
    | _SERVER
    | _DEVICES
    | _PROCESSES
    | {
      "adapters",
      "failure_timeout",
      "log_calls",
      "probe_heads",
      "restarts",
      "role",
      "store",
      "store_bytes",
    },
  ),
  "router": Mode(
    "a router (--role=router)",
    frozenset(_SERVER)
    | _MODEL
    | _PROCESSES
    | {"devices", "distributed"}
    | {
      "bandwidth",
      "chip",
      "cluster_key",
      "cluster_port",
      "instance_devices",
      "patience",
      "piece",
      "pieces",
      "policy",
      "replan",
      "role",
      "silence",
      "slo",
      "stream",
      "times",
    },
  ),
  "instance": Mode(
    "an instance (--join)",
    (_ENGINE - _ALONE)
    | _MODEL
    | _JOINS
    | _DEVICES
    | _PROCESSES
    | {
      "adapters",
      "device_pages",
      "failure_timeout",
      "host_store",
      "log_calls",
    },
  ),
  "stages": Mode(
    "an instance of several processes (--stages, or --num_processes and "
    "--join)",
    STAGE_PASSED | _PROCESSES | _JOINS | {"model", "stages"},
  ),
  "command": Mode(
    "a question to a router (--instances or --set_role)",
    frozenset({"cluster_key", "instances", "join", "set_role", "silence"}),
  ),
}
# What takes the place of a flag in modes without it.
_INSTEAD = {
  "store": ": an instance keeps what comes in --host_store",
}


def mode_of(values: flags.FlagValues) -> str:
  """Name of the mode that the flags choose, a key of `MODES`."""
  if values.instances or values.set_role is not None:
    return "command"
  of_cluster = values.join is not None or values.role != "both"
  processes = values.num_processes or 1
  whole = values.join is not None and values.role == "both"
  if values.stages is not None or (processes > 1 and of_cluster and not whole):
    return "stages"
  if values.role == "router":
    return "router"
  return "alone" if values.join is None else "instance"


def check(values: flags.FlagValues, names: frozenset[str]) -> None:
  """Refuses flags that the mode of a process does not use.

  Args:
    values: Flags as passed.
    names: Names of the flags of the script.

  Raises:
    OptionError: If such a flag is passed.
  """
  mode = MODES[mode_of(values)]
  for name in sorted(names - mode.used):
    if values[name].present:
      users = [x.text for x in MODES.values() if name in x.used]
      raise OptionError(
        f"--{name}",
        f"{values[name].value} for {mode.text}",
        f"nothing, unless for {' or '.join(users)}{_INSTEAD.get(name, '')}",
        "leave it out, or pass it there",
      )
