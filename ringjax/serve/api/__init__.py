"""HTTP and the OpenAI interface of an engine."""
