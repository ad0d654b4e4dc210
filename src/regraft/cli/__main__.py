"""`python -m regraft.cli`."""

import sys

from regraft.cli import main

sys.exit(main())
