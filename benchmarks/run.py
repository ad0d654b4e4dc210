"""All benchmarks, one after the other: `make bench`. Each prints its tables; an argument names the ones to run.

python benchmarks/run.py [engine] [weights] [inference] [limits] [overhead]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("engine", "weights", "inference", "limits", "overhead")


def main() -> int:
    """Run them, each in a process of its own; the exit status is that of the first that fails."""
    wanted = sys.argv[1:] or list(NAMES)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in wanted:
        print(f"## {name}\n", flush=True)
        status = subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py"))]).returncode
        if status:
            return status
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
