"""GGUF files: tensors, metadata and tokenizers."""
