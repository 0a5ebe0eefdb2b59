"""A real container engine for tests."""
