"""Tokenizers that reproduce llama.cpp's, by `tokenizer.ggml.model` of the GGUF."""
