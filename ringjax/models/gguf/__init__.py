"""Models in GGUF files, as folders of Hugging Face's names."""
