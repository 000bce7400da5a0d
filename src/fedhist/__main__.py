"""``python -m fedhist``."""

from fedhist.cli import main

main()
