"""Cost model: how long a model's layers take, and how much they send.

Ref: Cho et al. 2024, KV-Runahead (arXiv 2405.05329), made explicit: `n` tokens
that see `s` keys each take

  t = a n + b n s + c0                            for all layers together,

a for all that is linear in the tokens, b for attention, c0 for the fixed cost
of a call. Each of L layers takes 1 / L of it. `early` of the linear part comes
before keys and values can be sent.

Attention counts pairs of a query and a key. A "dense" kernel computes the
rectangle and masks it; a "causal" one skips the tiles above the diagonal:

  dense   c (P + c)        c queries after P keys
  causal  c (P + c / 2)

and a window of W limits the keys before a query to W - 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from ringjax.checks import integer, number, one_of, positive_int
from ringjax.errors import ConfigError, OptionError
from ringjax.parallel.chips import Machine, number_bytes

KERNELS = ("dense", "causal")
# Tokens of each rank of a partition, or of several partitions at once.
Lengths = Shaped[np.ndarray, "*K p"] | Sequence[Any]
# A number of tokens or of pairs, or several.
Quantity = int | float | np.number | np.ndarray


# Names under which other packages import them.
check_number = functools.partial(number, least=0)
check_count = functools.partial(integer, least=1)


# ---------------------------------------------------------------------------
# Models, devices, prompts
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Sizes of a decoder on which its cost depends.

  Attributes:
    layers: L, number of layers.
    embed: D, width of the hidden states.
    hidden: F, width of the feedforward.
    heads: N, number of query heads.
    kv_heads: K, number of key heads.
    head_dim: H, size of a head.
    gated: Whether a feedforward has three matrices instead of two.
  """

  layers: int
  embed: int
  hidden: int
  heads: int
  kv_heads: int
  head_dim: int
  gated: bool = True

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.name != "gated":
        positive_int(field.name, getattr(self, field.name))

  @classmethod
  def of(cls, config: Mapping[str, Any]) -> Shape:
    """Read the sizes from a config.json's fields.

    Raises:
      ConfigError: If there are experts, latent attention, windows or layers
        without attention, whose cost has another form.
    """
    unsupported = [
      key
      for key in ("num_local_experts", "n_routed_experts", "num_experts",
                  "kv_lora_rank", "linear_num_value_heads", "sliding_window")
      if config.get(key)
    ]  # fmt: skip
    kind = config.get("model_type")
    if unsupported:
      raise ConfigError(
        "config",
        f"{kind} with {', '.join(unsupported)}",
        "plain attention and feedforward",
        "measure it instead and store a profile",
      )
    try:
      embed, heads = config["hidden_size"], config["num_attention_heads"]
      falcon = kind == "falcon"
      kv_heads = config.get("num_key_value_heads") or heads
      if falcon:
        kv_heads = 1 if config.get("multi_query") else heads
      return cls(
        layers=config["num_hidden_layers"],
        embed=embed,
        hidden=4 * embed if falcon else config["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.get("head_dim") or embed // heads,
        gated=not falcon,
      )
    except KeyError as error:
      raise ConfigError(
        "config",
        f"{kind} without {error.args[0]}",
        "a decoder's config.json",
        f"add {error.args[0]} to it",
      ) from None

  @property
  def parameters(self) -> int:
    """Weights of all layers' matrices; a token takes two FLOPs for each."""
    project = self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
    return self.layers * (project + (2 + self.gated) * self.embed * self.hidden)

  @property
  def early(self) -> float:
    """Fraction of the matrices that computes queries, keys and values."""
    heads = self.heads + 2 * self.kv_heads
    project = self.layers * self.embed * self.head_dim * heads
    return project / self.parameters

  def kv_bytes(self, number_bytes: int = 2) -> int:
    """Bytes of the key and value of one token in one layer."""
    return 2 * self.kv_heads * self.head_dim * number_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """Cost coefficients of a model on a kind of device.

  Attributes:
    name: Name of the profile.
    model: Name of the model.
    hardware: Name of the device.
    source: Origin of the numbers.
    layers: L, number of layers.
    token_s: a, seconds per token, of all layers.
    pair_s: b, seconds per pair of a query and a key, of all layers and heads.
    fixed_s: c0, seconds per call.
    floor_s: Minimum seconds of a call, where launching is slower than
      computing.
    kv_bytes: Bytes of the key and value of one token in one layer.
    early: Fraction of `token_s` before keys and values are computed.
    kernel: Kind of kernel: the pairs that attention computes, of `KERNELS`.
  """

  name: str
  model: str
  hardware: str
  layers: int
  token_s: int | float
  pair_s: int | float
  kv_bytes: int | float
  source: str = ""
  fixed_s: int | float = 0.0
  floor_s: int | float = 0.0
  early: int | float = 0.25
  kernel: str = "dense"

  def __post_init__(self) -> None:
    for name in ("name", "model", "hardware", "source"):
      if not isinstance(getattr(self, name), str):
        raise OptionError(
          name, repr(getattr(self, name)), "a str", f"pass {name} as a str"
        )
    positive_int("layers", self.layers)
    for name in ("token_s", "pair_s", "fixed_s", "floor_s", "kv_bytes"):
      number(name, getattr(self, name), least=0)
    number("early", self.early, least=0, most=1)
    if self.token_s + self.pair_s == 0:
      raise OptionError(
        "token_s, pair_s",
        "0 and 0",
        "work that takes time",
        "pass a value above 0 for one of them",
      )
    one_of("kernel", self.kernel, KERNELS)

  def work_s(self, tokens: Quantity, pairs: Quantity) -> Any:
    """Seconds of tokens and pairs, elementwise, without a call's fixed time."""
    return self.token_s * tokens + self.pair_s * pairs

  @classmethod
  def on(
    cls, machine: Machine, shape: Shape, *, local: str, dtype: str = "bfloat16"
  ) -> Profile:
    """Predict the profile of a model from the stated figures of a machine.

    Matrices run at the rate of products, attention at the local algorithm's
    fraction of it, as in `strategy="auto"`, plus a call's fixed time per layer.

    Args:
      machine: Devices and links.
      shape: Sizes of the model.
      local: Algorithm of attention, one of `chips.LOCALS`.
      dtype: Dtype of weights and keys.

    Raises:
      OptionError: If the machine has no figures of this algorithm or dtype.
    """
    rate = machine.chip.rate(dtype)
    flops = 4 * shape.layers * shape.heads * shape.head_dim
    return cls(
      name=f"{shape.layers} layers on {machine.name}",
      model=f"{shape.layers} layers of {shape.embed}",
      hardware=machine.name,
      source=f"predicted: {machine.source}",
      layers=shape.layers,
      token_s=2 * shape.parameters / rate,
      pair_s=flops / (rate * machine.part(local)[0]),
      fixed_s=shape.layers * (machine.hop_s + machine.call_s),
      kv_bytes=shape.kv_bytes(number_bytes(dtype)),
      early=shape.early,
      kernel="causal",
    )

  def check_layers(self, layers: int) -> None:
    """Check that a model has the profile's number of layers.

    Raises:
      OptionError: If the number differs.
    """
    if self.layers != layers:
      raise OptionError(
        "profile",
        f"{self.name!r} of {self.model}, {self.layers} layers",
        f"one of this model, {layers} layers",
        "measure one: python -m ringjax.launch.plan kvr --fit",
      )

  def scaled(
    self, base: Shape, shape: Shape, *, name: str, model: str, source: str
  ) -> Profile:
    """Estimate the profile of another model on the same hardware.

    Linear work is proportional to the parameters. A dense kernel's time is
    proportional to the scores that pass through memory, hence to the number of
    heads and not to their size; the floor is proportional to the layers.
    """
    scores = shape.layers * shape.heads / (base.layers * base.heads)
    return dataclasses.replace(
      self,
      name=name,
      model=model,
      source=source,
      layers=shape.layers,
      token_s=self.token_s * shape.parameters / base.parameters,
      pair_s=self.pair_s * scores,
      fixed_s=self.fixed_s * shape.layers / base.layers,
      floor_s=self.floor_s * shape.layers / base.layers,
      kv_bytes=self.kv_bytes * shape.kv_bytes() / base.kv_bytes(),
      early=shape.early,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """Lengths of a prompt.

  Attributes:
    tokens: Number of new tokens, C.
    prefix: Number of tokens before them whose keys every rank already has.
    window: Number of keys that a query sees, including itself; None is all.
  """

  tokens: int
  prefix: int = 0
  window: int | None = None

  def __post_init__(self) -> None:
    positive_int("tokens", self.tokens)
    integer("prefix", self.prefix, least=0)
    if self.window is not None:
      positive_int("window", self.window)


# ---------------------------------------------------------------------------
# Tokens, pairs, seconds
# ---------------------------------------------------------------------------


def check_lengths(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
  """Check that `lengths` are positive and add up to `tokens`.

  Raises:
    OptionError: If they are not.
  """
  partition = tuple(positive_int("partition", n) for n in lengths)
  if not partition or sum(partition) != tokens:
    raise OptionError(
      "partition",
      f"{partition}, in all {sum(partition)}",
      f"lengths that add up to {tokens}",
      f"change the lengths so that their sum is {tokens}",
    )
  return partition


def even(tokens: int, ranks: int) -> tuple[int, ...]:
  """Split tokens evenly: lengths differ by at most one, longer ones first.

  Raises:
    OptionError: If there are fewer tokens than ranks.
  """
  positive_int("ranks", ranks)
  if positive_int("tokens", tokens) < ranks:
    raise OptionError("ranks", ranks, f"{tokens} at most", "use fewer ranks")
  shortest, num_longer = divmod(tokens, ranks)
  return tuple(shortest + (i < num_longer) for i in range(ranks))


def pairs(
  prompt: Prompt, lengths: Lengths, kernel: str = "dense"
) -> Float[np.ndarray, "*K p"]:
  """Number of pairs of a query and a key that each rank computes.

  Args:
    prompt: Prompt to prefill.
    lengths: Number of tokens of each rank.
    kernel: Kind of kernel, one of `KERNELS`.
  """
  c = np.asarray(lengths, np.float64)
  tokens_before = prompt.prefix + np.cumsum(c, axis=-1) - c
  return pairs_behind(tokens_before, c, prompt.window, kernel)


def pairs_behind(
  before: Quantity, c: Quantity, window: int | None, kernel: str
) -> Any:
  """Number of pairs of `c` queries after `before` keys, elementwise."""
  earlier, c = np.asarray(before, np.float64), np.asarray(c, np.float64)
  if kernel == "dense":
    seen = earlier if window is None else np.minimum(earlier, window - 1)
    return c * (seen + c)
  if window is None:
    return c * (earlier + c / 2)
  # Query number x of the c sees min(before + x, window) keys.
  rising = np.clip(window - earlier, 0.0, c)
  return rising * (earlier + rising / 2) + (c - rising) * window


def compute_s(
  profile: Profile, prompt: Prompt, lengths: Lengths
) -> Float[np.ndarray, "*K p"]:
  """Seconds that each rank of a chain computes."""
  c = np.asarray(lengths, np.float64)
  return profile.work_s(c, pairs(prompt, c, profile.kernel)) + profile.fixed_s


def chain_tokens(
  prompt: Prompt, lengths: Lengths
) -> Float[np.ndarray, "*K links"]:
  """Number of tokens whose key and value pass each link of a chain, per layer.

  Link i carries the tokens of ranks up to i, or those within a window of its
  end. A prefix is on every rank and is not sent.
  """
  ends = np.cumsum(np.asarray(lengths, np.float64), axis=-1)[..., :-1]
  return ends if prompt.window is None else np.minimum(ends, prompt.window - 1)


def gathered_tokens(prompt: Prompt, ranks: int) -> int:
  """Tokens that pass all links of an all-gather, per layer: (p - 1) C."""
  return (ranks - 1) * prompt.tokens


def lower_bound_s(profile: Profile, prompt: Prompt, ranks: int) -> float:
  """Time to first token of a perfect chain over links that cost nothing.

  Linear work divided by p, and attention's least work: that of an even
  partition, a C/p + b C^2/2 (1/p + 1/p^2) with a dense kernel.
  """
  least_pairs = pairs(
    prompt, np.full(ranks, prompt.tokens / ranks), profile.kernel
  )
  seconds = profile.work_s(prompt.tokens, least_pairs.sum())
  return max(float(seconds) / ranks + profile.fixed_s, profile.floor_s)
