"""``fedhist`` and ``python -m fedhist``; Ctrl-C is answered while the rest is still being imported, too."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from fedhist.command.cli import main as command_line  # noqa: PLC0415

        command_line()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
