"""Run a command as the user nobody: `unshare --mount python as_nobody.py COMMAND...`, as root.

nobody may not read root's home, so a Python that is installed there is made readable in the private mount.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NOBODY = 65534
COMMAND = ["unshare", "--mount", sys.executable, "-B", __file__]


def main(command: list[str]) -> None:
    root, base = Path("/root"), Path(sys.base_prefix)
    if base.is_relative_to(root):
        with tempfile.TemporaryDirectory() as aside:
            subprocess.run(["mount", "--bind", base, aside], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", root], check=True)
            base.mkdir(parents=True)
            subprocess.run(["mount", "--bind", aside, base], check=True)
            subprocess.run(["umount", aside], check=True)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["HOME"] = "/"
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
