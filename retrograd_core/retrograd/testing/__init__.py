"""What plugin authors use in their tests: contract suites and small models."""
