"""Constrained decoding: which tokens a grammar lets a sequence go on with."""
