"""Timelines of further systems: TPI-LLM, Mooncake, llm.npu, Liger."""
