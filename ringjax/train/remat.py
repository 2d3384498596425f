"""Rematerialisation policies: activations kept for the backward pass.

  all        everything; nothing is computed twice
  attention  attention's output and logsumexp, so that no ring is run twice;
             the rest of a layer is computed again
  nothing    a layer is computed again from its input, its ring included
  offload    as "attention", and a layer's input, kept in the host's memory

The others keep a layer's input on the device. Tiles of attention and blocks of
a feedforward are always computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ringjax.checks import one_of
from ringjax.errors import OptionError
from ringjax.nn.stack import LAYER_INPUT
from ringjax.ops.attention.attend import NAMES

_HOST = "pinned_host"
POLICIES: dict[str, Callable[..., Any] | None] = {
  "all": None,
  "attention": jax.checkpoint_policies.save_only_these_names(*NAMES),
  "nothing": jax.checkpoint_policies.nothing_saveable,
  "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[*NAMES, LAYER_INPUT],
    offload_src="device",
    offload_dst=_HOST,
  ),
}


def policy(
  name: str, devices: Sequence[jax.Device] | None = None
) -> Callable[..., Any] | None:
  """A policy by its name.

  Args:
    name: One of `POLICIES`.
    devices: Devices that will run it; default: this process's.

  Raises:
    OptionError: If the name is unknown, or if it is "offload" and the devices
      cannot reach host memory.
  """
  one_of("remat", name, POLICIES)
  if name == "offload":
    device = (jax.local_devices() if devices is None else devices)[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST not in kinds:
      raise OptionError(
        "remat",
        f"'offload' on {device.device_kind}, memories {', '.join(kinds)}",
        f"devices that reach {_HOST} memory",
        "pass remat='attention'",
      )
  return POLICIES[name]
