"""Short words for the flags that scripts define."""

from __future__ import annotations

from absl import flags

# A flag belongs to the script that asked for it, and stands in its --help.
flags.disclaim_key_flags()


class Definer:
  """Defines flags among `values`."""

  def __init__(self, values: flags.FlagValues):
    self._values = values

  def text(self, name: str, default: str | None, words: str) -> None:
    flags.DEFINE_string(name, default, words, flag_values=self._values)

  def texts(self, name: str, default: list[str] | None, words: str) -> None:
    """Texts with commas between."""
    flags.DEFINE_list(name, default, words, flag_values=self._values)

  def whole(
    self, name: str, default: int | None, words: str, least: int | None = 1
  ) -> None:
    """An int, `least` or more."""
    flags.DEFINE_integer(
      name, default, words, lower_bound=least, flag_values=self._values
    )

  def number(
    self, name: str, default: float | None, words: str,
    least: float | None = None,
  ) -> None:  # fmt: skip
    """A float, `least` or more."""
    flags.DEFINE_float(
      name, default, words, lower_bound=least, flag_values=self._values
    )

  def boolean(self, name: str, default: bool | None, words: str) -> None:
    flags.DEFINE_bool(name, default, words, flag_values=self._values)
