"""Codecs: how a cache stores a key or a value in fewer bytes."""

from ringjax.kv.codecs.calibration import Calibrated, Calibration
from ringjax.kv.codecs.channel_groups import ChannelGroups
from ringjax.kv.codecs.code_book import CodeBook
from ringjax.kv.codecs.codec import Codec, VectorCodec
from ringjax.kv.codecs.floats import Floats
from ringjax.kv.codecs.hadamard import Hadamard
from ringjax.kv.codecs.head_codecs import Allocated, CacheCodec, PerHead
from ringjax.kv.codecs.integers import Integers

__all__ = [
  "Allocated",
  "CacheCodec",
  "Calibrated",
  "Calibration",
  "ChannelGroups",
  "CodeBook",
  "Codec",
  "Floats",
  "Hadamard",
  "Integers",
  "PerHead",
  "VectorCodec",
]
