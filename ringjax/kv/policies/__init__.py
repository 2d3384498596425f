"""Eviction policies, which choose the tokens each KV head keeps."""

from ringjax.kv.policies.adakv import AdaKV
from ringjax.kv.policies.duo import Duo
from ringjax.kv.policies.expected_attention import ExpectedAttention
from ringjax.kv.policies.fastgen import FastGen
from ringjax.kv.policies.heavy_hitters import HeavyHitters
from ringjax.kv.policies.kvzip import KVzip
from ringjax.kv.policies.page_selection import Select
from ringjax.kv.policies.policy import Look, Policy
from ringjax.kv.policies.pyramidkv import PyramidKV
from ringjax.kv.policies.scores.key_diff import KeyDiff
from ringjax.kv.policies.scores.key_norm import KeyNorm
from ringjax.kv.policies.scores.lagkv import LagKV
from ringjax.kv.policies.scores.snapkv import SnapKV
from ringjax.kv.policies.scores.tova import Tova
from ringjax.kv.policies.sinks import Sinks

__all__ = [
  "AdaKV",
  "Duo",
  "ExpectedAttention",
  "FastGen",
  "HeavyHitters",
  "KVzip",
  "KeyDiff",
  "KeyNorm",
  "LagKV",
  "Look",
  "Policy",
  "PyramidKV",
  "Select",
  "Sinks",
  "SnapKV",
  "Tova",
]
