"""`python -m polyclinic`."""

import sys


def main() -> None:
    """The command, with Ctrl-C answered in a word from the first moment on: loading takes seconds."""
    try:
        from polyclinic.cli.main import main as command

        command()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
