"""retrograd: fine-tune GGUF language models on one machine."""
