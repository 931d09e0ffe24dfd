"""The `weft` command: the same as the Rust program, out of the same module as the Python package."""

import signal
import sys

from ._weft import command


def main() -> int:
    # Python only notes that Ctrl-C was pressed and raises later, and the command would never get that far: it ends at once, as others do.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Some verbs start the command again. By the module, and without looking for it in the directory where the user happens to be.
    again = [sys.executable, "-P", "-m", "weft"]
    return command(["weft", *sys.argv[1:]], again)


if __name__ == "__main__":
    sys.exit(main())
