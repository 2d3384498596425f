"""llm.npu: integer products beside a float processor."""
