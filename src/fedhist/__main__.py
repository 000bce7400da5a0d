"""``python -m fedhist``."""

from fedhist.command.cli import main

main()
