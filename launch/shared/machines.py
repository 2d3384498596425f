"""Flags that describe a device and its links, for the cost model."""

from __future__ import annotations

from absl import flags

from launch.shared.flag_helpers import FlagHelper
from ringjax.plan import Machine, Network, Noise, profile

# Show these flags in the --help of the script that defines them.
flags.disclaim_key_flags()


def define(new: FlagHelper, use: str) -> None:
  """Defines the flags; `use` is the purpose of the profile, for --help."""
  new.path("profile", None, f"{use}: its name, or a file; see launch.plan.")
  new.number("bandwidth", 10e9, "--profile: of a link, bytes a second.", 0.0)
  new.number("latency", 0.0, "--profile: of a message, seconds.", 0.0)
  new.number(
    "noise",
    0.0,
    "--profile: in each layer one link is so much slower, e.g. 20.",
    0.0,
  )


def machine(
  values: flags.FlagValues, credits: int | None = None
) -> Machine | None:
  """The machine that the flags describe; None without a profile.

  Raises:
    OptionError: If the profile does not exist, or the bandwidth is 0.
  """
  if values.profile is None:
    return None
  return Machine(
    profile=profile(values.profile),
    network=Network(bandwidth=values.bandwidth, latency_s=values.latency),
    noise=Noise(slower=values.noise) if values.noise else None,
    credits=credits,
  )


def unused(values: flags.FlagValues) -> list[str]:
  """Names of passed flags that have no effect without a profile."""
  if values.profile is not None:
    return []
  names = ("bandwidth", "latency", "noise")
  return [name for name in names if values[name].present]
