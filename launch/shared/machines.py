"""Flags that describe a device and its links, for the cost model."""

from __future__ import annotations

from absl import flags

from ringjax.checks import number
from ringjax.parallel.chips import Link
from ringjax.plan import Cluster, Noise, profile

from .flag_helpers import FlagHelper

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
) -> Cluster | None:
  """Ranks and links that the flags describe; None without a profile.

  Raises:
    OptionError: If the profile does not exist, or the bandwidth is 0.
  """
  if values.profile is None:
    return None
  return Cluster(
    profile=profile(values.profile),
    network=link(values),
    noise=Noise(slower=values.noise) if values.noise else None,
    credits=credits,
  )


def link(
  values: flags.FlagValues,
  *,
  bandwidth: float | None = None,
  latency_s: float | None = None,
  ports: int = 2,
) -> Link:
  """Link that --bandwidth and --latency describe.

  Args:
    values: The script's flags.
    bandwidth: Bytes/s where --bandwidth is not passed; None: the flag's
      default.
    latency_s: Seconds where --latency is not passed, or where the script
      has no such flag; None: the flag's default.
    ports: Links of a device; 1: a switch.

  Raises:
    OptionError: If the bandwidth is 0, or a value is not finite.
  """
  return Link(
    bandwidth=number(
      "--bandwidth", _number(values, "bandwidth", bandwidth), above=0
    ),
    latency_s=_number(values, "latency", latency_s),
    ports=ports,
  )


def _number(
  values: flags.FlagValues, name: str, default: float | None
) -> float:
  """Number of a flag that was passed, or the default."""
  passed = name in values and values[name].present
  if default is not None and not passed:
    return default
  return float(values[name].value or 0.0) if name in values else 0.0


def unused(values: flags.FlagValues) -> list[str]:
  """Names of passed flags that have no effect without a profile."""
  if values.profile is not None:
    return []
  names = ("bandwidth", "latency", "noise")
  return [name for name in names if values[name].present]
