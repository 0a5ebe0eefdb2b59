"""`python -m retrograd`."""

from retrograd.cli import main

main()
